#include "tests/support/km_rig.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct bench {
    struct rig r;
    struct fake_vm *vm;
    struct km_kernel *k;
    struct rig_client a, b;
};

static int setup(void **state)
{
    struct bench *t = calloc(1, sizeof(*t));
    rig_init(&t->r);
    *state = t;
    return 0;
}

static int teardown(void **state)
{
    struct bench *t = *state;
    rig_client_fini(&t->a);
    rig_client_fini(&t->b);
    rig_fini(&t->r);
    free(t);
    return 0;
}

/* A ready kernel with clients a ("A") and b ("B"). */
static void begin(struct bench *t)
{
    t->k = rig_kernel(&t->r, &t->vm);
    assert_non_null(t->k);
    assert_int_equal(rig_attach(&t->a, t->k, "A"), 0);
    assert_int_equal(rig_attach(&t->b, t->k, "B"), 0);
}

static void assert_story(struct rig_client *c, const char *parent, const char *want)
{
    char *story = rig_story(c, parent);
    assert_string_equal(story, want);
    free(story);
}

static struct jp_msg *sent(struct bench *t)
{
    struct jp_msg *m = fake_vm_take_msg(t->vm);
    assert_non_null(m);
    return m;
}

static void reply_goes_only_to_the_asker_and_iopub_to_all(void **state)
{
    struct bench *t = *state;
    begin(t);
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "r1", "{\"code\":\"1\"}"), 0);
    struct jp_msg *m = sent(t);
    assert_string_equal(m->msg_id, "r1");
    fake_vm_serve(t->vm, m);
    jp_msg_unref(m);
    rig_turn(&t->r);
    assert_story(&t->a, "r1", "busy execute_reply idle");
    assert_story(&t->b, "r1", "busy idle");
}

static void parts_reach_the_kernel_byte_for_byte(void **state)
{
    struct bench *t = *state;
    begin(t);
    assert_int_equal(
        rig_submit(&t->a, JP_SHELL, "comm_msg", "r1", "{\"x\": NaN, \"b\":123456789012345678901}"),
        0);
    struct jp_msg *m = sent(t);
    assert_true(rig_content_has(m, "{\"x\": NaN, \"b\":123456789012345678901}"));
    jp_msg_unref(m);
}

static void requests_keep_their_order_while_the_link_is_full(void **state)
{
    struct bench *t = *state;
    begin(t);
    t->vm->full = true;
    for (int i = 0; i < 10; i++) {
        char id[16];
        snprintf(id, sizeof(id), "r%d", i);
        assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", id, NULL), 0);
    }
    assert_int_equal(rig_submit(&t->a, JP_CONTROL, "usage_request", "u", NULL), 0);
    assert_null(fake_vm_take(t->vm));
    t->vm->full = false;
    t->vm->ev->writable(t->vm->ctx, 1);
    struct jp_msg *m = sent(t);
    assert_string_equal(m->msg_id, "u"); /* control passes the shell's pile */
    jp_msg_unref(m);
    for (int i = 0; i < 10; i++) {
        char id[16];
        snprintf(id, sizeof(id), "r%d", i);
        m = sent(t);
        assert_string_equal(m->msg_id, id);
        jp_msg_unref(m);
    }
}

static void a_flood_of_requests_is_throttled_and_released(void **state)
{
    struct bench *t = *state;
    int r = 0, n = 0;
    begin(t);
    t->vm->full = true;
    while (r == 0 && n < 10000) {
        char id[16];
        snprintf(id, sizeof(id), "r%d", n);
        r = rig_submit(&t->a, JP_SHELL, "execute_request", id, NULL);
        n += r == 0;
    }
    assert_int_equal(r, -EAGAIN);
    assert_int_equal(t->a.throttles_on, 1);
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "x", NULL), -EAGAIN);
    assert_int_equal(t->a.throttles_on, 1);
    t->vm->full = false;
    t->vm->ev->writable(t->vm->ctx, 1);
    rig_turn(&t->r);
    assert_int_equal(t->a.throttles_off, 0); /* still too many without a reply */
    for (int i = 0; i < n; i++) {
        struct jp_msg *m = sent(t);
        fake_vm_serve(t->vm, m);
        jp_msg_unref(m);
        rig_turn(&t->r);
    }
    assert_int_equal(t->a.throttles_off, 1);
    assert_int_equal(rig_count(&t->a, "execute_reply", NULL, NULL), n);
}

static void missed_messages_come_first_after_a_reconnect(void **state)
{
    struct bench *t = *state;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *m = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", m, "{\"execution_state\": \"busy\"}");
    rig_turn(&t->r);
    km_client_detach(&t->a.c);
    fake_vm_say(t->vm, JP_IOPUB, "stream", m, "{\"name\": \"stdout\", \"text\": \"2\\n\"}");
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", m, "{\"status\": \"ok\"}");
    fake_vm_say(t->vm, JP_IOPUB, "status", m, "{\"execution_state\": \"idle\"}");
    jp_msg_unref(m);
    rig_advance(&t->r, 3000);
    assert_int_equal(rig_attach(&t->a, t->k, "A"), 0);
    rig_turn(&t->r);
    assert_story(&t->a, "r1", "busy stream execute_reply idle");
    assert_story(&t->b, "r1", "busy stream idle");
}

static void another_session_gets_nothing_of_the_past(void **state)
{
    struct bench *t = *state;
    struct rig_client q = { 0 };
    begin(t);
    km_client_detach(&t->a.c);
    fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, "{\"name\": \"stdout\", \"text\": \"2\\n\"}");
    assert_int_equal(rig_attach(&q, t->k, "Q"), 0);
    rig_turn(&t->r);
    assert_int_equal(q.n_got, 0);
    rig_client_fini(&q);
}

static void a_cursor_is_forgotten_after_its_time(void **state)
{
    struct bench *t = *state;
    begin(t);
    km_client_detach(&t->b.c);
    km_client_detach(&t->a.c);
    fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, "{\"name\": \"stdout\", \"text\": \"2\\n\"}");
    rig_advance(&t->r, t->r.cfg.replay_ttl_ms + 1);
    assert_int_equal(rig_attach(&t->a, t->k, "A"), 0);
    rig_turn(&t->r);
    assert_int_equal(t->a.n_got, 0);
}

static void what_was_lost_while_away_is_announced_with_its_size(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *last;
    char content[2100];
    t->r.cfg.replay_bytes_max = 100000;
    t->r.cfg.coalesce_max = 0;
    begin(t);
    km_client_detach(&t->b.c);
    km_client_detach(&t->a.c);
    memset(content, 'y', sizeof(content));
    memcpy(content, "{\"name\": \"stdout\", \"text\": \"", 28);
    memcpy(content + 2096, "\"}", 3);
    for (int i = 0; i < 200; i++)
        assert_int_equal(fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, content), 0);
    rig_attach(&t->a, t->k, "A");
    rig_turn(&t->r);
    assert_true(rig_content_has(t->a.got[0], "messages"));
    assert_true(rig_content_has(t->a.got[0], "stderr"));
    unsigned missing = 0;
    CLEANUP(freep) char *text = slice_dup(t->a.got[0]->parts.content);
    assert_int_equal(sscanf(strchr(text, ']'), "] %u messages", &missing), 1);
    assert_int_equal(missing + t->a.n_got - 1, 200);
    assert_int_equal(rig_count(&t->a, "stream", NULL, &last), t->a.n_got);
}

static void a_second_client_of_the_same_session_replaces_the_first(void **state)
{
    struct bench *t = *state;
    struct rig_client again = { 0 };
    begin(t);
    fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, "{\"name\": \"stdout\", \"text\": \"2\\n\"}");
    assert_int_equal(rig_attach(&again, t->k, "A"), 0);
    assert_int_equal(t->a.closes, 1);
    assert_int_equal(t->a.why, KM_CLOSE_REPLACED);
    rig_turn(&t->r);
    assert_int_equal(again.n_got, 1);
    assert_int_equal(t->a.n_got, 0);
    rig_client_fini(&again);
}

static void a_prompt_goes_to_its_asker_and_comes_again_after_a_reconnect(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *first, *again;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *m = sent(t);
    fake_vm_say(t->vm, JP_STDIN, "input_request", m, "{\"prompt\": \"x\", \"password\": true}");
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "input_request", "r1", &first), 1);
    assert_int_equal(rig_count(&t->b, "input_request", NULL, NULL), 0);
    km_client_detach(&t->a.c);
    rig_advance(&t->r, 3000);
    rig_attach(&t->a, t->k, "A");
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "input_request", "r1", &again), 2);
    assert_string_equal(first->msg_id, again->msg_id);
    /* Another client's answer is not taken, the asker's is, and only one. */
    assert_int_equal(rig_submit(&t->b, JP_STDIN, "input_reply", "i0", "{\"value\": \"no\"}"), 0);
    assert_null(fake_vm_take(t->vm));
    assert_int_equal(rig_submit(&t->a, JP_STDIN, "input_reply", "i1", "{\"value\": \"yes\"}"), 0);
    assert_int_equal(rig_submit(&t->a, JP_STDIN, "input_reply", "i2", "{\"value\": \"stale\"}"), 0);
    struct jp_msg *answer = sent(t);
    assert_true(rig_content_has(answer, "yes"));
    assert_null(fake_vm_take(t->vm));
    jp_msg_unref(answer);
    jp_msg_unref(m);
}

static void an_unseen_prompt_is_not_doubled(void **state)
{
    struct bench *t = *state;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *m = sent(t);
    km_client_detach(&t->a.c);
    fake_vm_say(t->vm, JP_STDIN, "input_request", m, "{\"prompt\": \"x\"}");
    rig_attach(&t->a, t->k, "A");
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "input_request", "r1", NULL), 1);
    jp_msg_unref(m);
}

static void a_prompt_whose_asker_never_returns_is_interrupted(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *m = sent(t);
    fake_vm_say(t->vm, JP_STDIN, "input_request", m, "{\"prompt\": \"x\"}");
    rig_turn(&t->r);
    km_client_detach(&t->a.c);
    rig_advance(&t->r, t->r.cfg.replay_ttl_ms + 1);
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_string_equal(op, "interrupt");
    jp_msg_unref(m);
}

static void kernel_info_is_answered_while_the_kernel_is_busy(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *reply;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *m = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", m, "{\"execution_state\": \"busy\"}");
    rig_turn(&t->r);
    assert_string_equal(rig_state(t->k), "busy");
    assert_int_equal(rig_submit(&t->b, JP_CONTROL, "kernel_info_request", "i1", NULL), 0);
    rig_turn(&t->r);
    assert_null(fake_vm_take(t->vm));
    assert_story(&t->b, "i1", "busy kernel_info_reply idle");
    assert_int_equal(rig_count(&t->b, "kernel_info_reply", "i1", &reply), 1);
    assert_true(rig_content_has(reply, "fake"));
    assert_int_equal(reply->parts.channel, JP_CONTROL);
    /* The last word is the truth, for front ends that take any status. */
    char status[16];
    jp_status_of(t->b.got[t->b.n_got - 1], status);
    assert_string_equal(status, "busy");
    assert_string_equal(rig_state(t->k), "busy");
    assert_int_equal(rig_count(&t->a, NULL, "i1", NULL), 0);
    jp_msg_unref(m);
}

static void kernel_info_keeps_its_place_behind_own_requests(void **state)
{
    struct bench *t = *state;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *m = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", m, "{\"execution_state\": \"busy\"}");
    jp_msg_unref(m);
    rig_submit(&t->a, JP_SHELL, "kernel_info_request", "i1", NULL);
    m = sent(t);
    assert_string_equal(m->msg_id, "i1");
    jp_msg_unref(m);
}

static void a_cursor_outside_of_the_code_is_answered_without_the_kernel(void **state)
{
    /* Positions count UTF-16 units at most: the emoji (escaped or not) are two. */
    static const struct {
        const char *content;
        bool refused;
    } cases[] = {
        { "{\"code\": \"abc\", \"cursor_pos\": 0}", false },
        { "{\"code\": \"abc\", \"cursor_pos\": 3}", false },
        { "{\"code\": \"abc\", \"cursor_pos\": 4}", true },
        { "{\"code\": \"abc\", \"cursor_pos\": -1}", true },
        { "{\"code\": \"a\\n\\\"\\\\\", \"cursor_pos\": 4}", false },
        { "{\"code\": \"a\\n\\\"\\\\\", \"cursor_pos\": 5}", true },
        { "{\"code\": \"\xf0\x9f\x98\x80\\ud83d\\ude00\", \"cursor_pos\": 4}", false },
        { "{\"code\": \"\xf0\x9f\x98\x80\\ud83d\\ude00\", \"cursor_pos\": 5}", true },
        { "{\"code\": \"\", \"cursor_pos\": 0}", false },
        { "{\"code\": \"abc\", \"cursor_pos\": \"9\"}", false }, /* the kernel's business */
        { "{\"code\": 5, \"cursor_pos\": 9}", false },
        { "{\"code\": \"abc\"}", false },
    };
    struct bench *t = *state;
    begin(t);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char id[16];
        snprintf(id, sizeof(id), "c%zu", i);
        const char *type = i % 2 ? "complete_request" : "inspect_request";
        assert_int_equal(rig_submit(&t->a, JP_SHELL, type, id, cases[i].content), 0);
        rig_turn(&t->r);
        struct jp_msg *m = fake_vm_take_msg(t->vm);
        if ((m == NULL) != cases[i].refused)
            fail_msg("case %zu: %s", i, cases[i].content);
        if (m)
            fake_vm_serve(t->vm, m);
        jp_msg_unref(m);
        rig_turn(&t->r);
        assert_story(&t->a, id, i % 2 ? "busy complete_reply idle" : "busy inspect_reply idle");
    }
    assert_string_equal(rig_state(t->k), "idle");
}

static void an_interrupt_on_the_wire_is_done_and_answered(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    assert_int_equal(rig_submit(&t->a, JP_CONTROL, "interrupt_request", "x", NULL), 0);
    uint64_t id = fake_vm_take_ctl(t->vm, op);
    assert_string_equal(op, "interrupt");
    rig_turn(&t->r);
    assert_int_equal(t->a.n_got, 0);
    fake_vm_done(t->vm, id, true);
    rig_turn(&t->r);
    assert_story(&t->a, "x", "busy interrupt_reply idle");
}

static void an_interrupt_that_nobody_acknowledges_gets_an_error_reply(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *m;
    begin(t);
    rig_submit(&t->a, JP_CONTROL, "interrupt_request", "x", NULL);
    rig_advance(&t->r, 20000);
    assert_int_equal(rig_count(&t->a, "interrupt_reply", "x", &m), 1);
    assert_true(rig_content_has(m, "\"error\""));
    assert_int_equal(rig_count(&t->a, "status", "x", NULL), 2);
}

static void shutdown_on_the_wire_is_answered_before_the_end(void **state)
{
    struct bench *t = *state;
    begin(t);
    rig_submit(&t->a, JP_CONTROL, "shutdown_request", "x", "{\"restart\": false}");
    rig_advance(&t->r, 1000);
    assert_story(&t->a, "x", "busy shutdown_reply shutdown_reply idle");
    assert_int_equal(t->a.closes, 1);
    assert_int_equal(t->b.closes, 1);
    assert_int_equal(t->a.why, KM_CLOSE_DELETED);
    assert_int_equal(t->r.vms.alive, 0);
}

static void shutdown_with_restart_keeps_the_kernel(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    rig_submit(&t->a, JP_SHELL, "shutdown_request", "x", "{\"restart\": true}");
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_string_equal(op, "restart");
    assert_string_equal(rig_state(t->k), "restarting");
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_advance(&t->r, 1000);
    assert_string_equal(rig_state(t->k), "idle");
    assert_int_equal(t->a.closes, 0);
    assert_int_equal(rig_count(&t->a, "status", "", NULL), 2); /* starting, idle */
}

static void a_reply_that_never_comes_is_made_up_after_the_idle(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *m;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    struct jp_msg *q = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", q, "{\"execution_state\": \"busy\"}");
    fake_vm_say(t->vm, JP_IOPUB, "status", q, "{\"execution_state\": \"idle\"}");
    rig_advance(&t->r, t->r.cfg.reply_grace_ms / 2);
    assert_int_equal(rig_count(&t->a, "execute_reply", "r1", NULL), 0);
    rig_advance(&t->r, t->r.cfg.reply_grace_ms);
    assert_int_equal(rig_count(&t->a, "execute_reply", "r1", &m), 1);
    assert_true(rig_content_has(m, "MissingReplyError"));
    /* The real one, late: the request has been answered. */
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", q, "{\"status\": \"ok\"}");
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "execute_reply", "r1", NULL), 1);
    jp_msg_unref(q);
}

static void what_runs_in_a_deleted_subshell_ends_with_its_grace(void **state)
{
    struct bench *t = *state;
    begin(t);
    struct jp_parts in_subshell = {
        .channel = JP_SHELL,
        .header = SLICE_LIT("{\"msg_id\":\"c1\",\"msg_type\":\"comm_close\",\"session\":\"a\","
                            "\"subshell_id\":\"sub1\"}"),
    };
    struct jp_msg *m = NULL;
    assert_int_equal(jp_msg_new(&in_subshell, &m, NULL), 0);
    assert_int_equal(km_client_submit(&t->a.c, m), 0);
    jp_msg_unref(m);
    struct jp_msg *closing = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", closing, "{\"execution_state\": \"busy\"}");
    rig_submit(&t->a, JP_CONTROL, "delete_subshell_request", "d1", "{\"subshell_id\": \"sub1\"}");
    struct jp_msg *deleting = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", deleting, "{\"execution_state\": \"busy\"}");
    fake_vm_say(t->vm, JP_CONTROL, "delete_subshell_reply", deleting, "{\"status\": \"ok\"}");
    fake_vm_say(t->vm, JP_IOPUB, "status", deleting, "{\"execution_state\": \"idle\"}");
    rig_advance(&t->r, t->r.cfg.reply_grace_ms / 2);
    assert_int_equal(rig_count(&t->a, "status", "c1", NULL), 1);
    rig_advance(&t->r, t->r.cfg.reply_grace_ms);
    assert_int_equal(rig_count(&t->a, "status", "c1", NULL), 2); /* busy, and our idle */
    jp_msg_unref(closing);
    jp_msg_unref(deleting);
}

static void an_idle_that_was_lost_is_inferred_from_the_next_busy(void **state)
{
    struct bench *t = *state;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    rig_submit(&t->a, JP_SHELL, "execute_request", "r2", NULL);
    struct jp_msg *q1 = sent(t), *q2 = sent(t);
    fake_vm_say(t->vm, JP_IOPUB, "status", q1, "{\"execution_state\": \"busy\"}");
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", q1, "{\"status\": \"ok\"}");
    fake_vm_serve(t->vm, q2);
    rig_turn(&t->r);
    assert_story(&t->a, NULL, "busy execute_reply idle busy execute_reply idle");
    assert_string_equal(rig_state(t->k), "idle");
    jp_msg_unref(q1);
    jp_msg_unref(q2);
}

static void a_slow_client_holds_the_guest_back_and_loses_nothing(void **state)
{
    struct bench *t = *state;
    size_t said = 0, size = 200000;
    char *content = malloc(size);
    int r = 0;
    t->r.cfg.log_bytes_max = 32u << 20;
    t->r.cfg.coalesce_max = 0;
    begin(t);
    t->a.lazy = true;
    memset(content, 'z', size);
    memcpy(content, "{\"name\": \"stdout\", \"text\": \"", 28);
    memcpy(content + size - 3, "\"}", 3);
    while (said < 1000 && (r = fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, content)) == 0) {
        said++;
        rig_turn(&t->r);
    }
    assert_int_equal(r, -ENOSPC); /* out of credit */
    assert_true(said * size < t->r.cfg.log_bytes_max);
    assert_int_equal(t->b.n_got, said);
    rig_pull(&t->a);
    assert_int_equal(t->a.n_got, said);
    assert_int_equal(fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, content), 0);
    rig_turn(&t->r);
    rig_pull(&t->a);
    assert_int_equal(t->vm->granted, t->vm->sent_credits);
    free(content);
}

static void an_absent_client_never_holds_the_guest_back(void **state)
{
    struct bench *t = *state;
    size_t size = 200000;
    char *content = malloc(size);
    begin(t);
    km_client_detach(&t->a.c);
    memset(content, 'z', size);
    memcpy(content, "{\"name\": \"stdout\", \"text\": \"", 28);
    memcpy(content + size - 3, "\"}", 3);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, content), 0);
        rig_turn(&t->r);
        rig_forget(&t->b);
    }
    free(content);
}

static void a_header_that_is_too_long_is_refused_with_an_answer(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *reply;
    begin(t);
    char *header = malloc(70000);
    memset(header, 'h', 70000);
    int n = snprintf(header, 200, "{\"msg_id\":\"x\",\"msg_type\":\"execute_request\",\"pad\":\"");
    header[n] = 'h';
    memcpy(header + 69997, "\"}", 3);
    struct jp_parts p = { .channel = JP_SHELL, .header = slice_str(header) };
    struct jp_msg *m = NULL;
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    assert_int_equal(km_client_submit(&t->a.c, m), 0);
    jp_msg_unref(m);
    free(header);
    rig_turn(&t->r);
    assert_null(fake_vm_take(t->vm));
    assert_story(&t->a, "x", "busy error execute_reply idle");
    rig_count(&t->a, "execute_reply", "x", &reply);
    assert_true(rig_content_has(reply, "64 KiB"));
    assert_true(reply->size < 1000);
}

static void a_message_that_the_link_never_takes_is_answered(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *reply;
    begin(t);
    t->vm->send_error = -E2BIG;
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "x", NULL), 0);
    rig_turn(&t->r);
    assert_story(&t->a, "x", "busy error execute_reply idle");
    rig_count(&t->a, "execute_reply", "x", &reply);
    assert_true(rig_content_has(reply, "larger than the sandbox link allows"));
}

static void a_client_refused_again_at_once_does_not_spin(void **state)
{
    struct bench *t = *state;
    size_t size = 7u << 20;
    char *content = malloc(size);
    begin(t);
    memset(content, 'z', size);
    memcpy(content, "{\"code\": \"", 10);
    memcpy(content + size - 3, "\"}", 3);
    t->vm->full = true;
    t->a.eager = content; /* tries again from inside throttle(off) */
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "1", content), 0);
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "2", content), 0);
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "3", content), -EAGAIN);
    t->vm->full = false;
    t->vm->room = 1;
    t->vm->ev->writable(t->vm->ctx, 1);
    rig_turn(&t->r);
    assert_int_equal(t->a.throttles_off, 1);
    t->vm->room = 0;
    t->vm->ev->writable(t->vm->ctx, 1);
    rig_turn(&t->r);
    assert_true(t->a.throttles_off <= 3);
    free(content);
}

static void an_id_in_use_by_another_client_is_refused(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *m;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "same", NULL);
    rig_submit(&t->b, JP_SHELL, "execute_request", "same", NULL);
    struct jp_msg *q = sent(t);
    assert_null(fake_vm_take(t->vm));
    fake_vm_serve(t->vm, q);
    jp_msg_unref(q);
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->b, "execute_reply", NULL, &m), 1);
    assert_true(rig_content_has(m, "DuplicateIdError"));
    assert_int_equal(rig_count(&t->a, "execute_reply", NULL, &m), 1);
    assert_true(rig_content_has(m, "\"ok\""));
}

static void the_same_client_may_send_an_id_twice_and_gets_two_answers(void **state)
{
    struct bench *t = *state;
    begin(t);
    rig_submit(&t->a, JP_SHELL, "execute_request", "same", NULL);
    rig_submit(&t->a, JP_SHELL, "execute_request", "same", NULL);
    for (int i = 0; i < 2; i++) {
        struct jp_msg *q = sent(t);
        fake_vm_serve(t->vm, q);
        jp_msg_unref(q);
    }
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "execute_reply", "same", NULL), 2);
}

static void connections_count_attached_clients(void **state)
{
    struct bench *t = *state;
    struct km_kernel_info i;
    begin(t);
    km_kernel_info(t->k, &i);
    assert_int_equal(i.connections, 2);
    km_client_detach(&t->a.c);
    km_client_detach(&t->a.c);
    km_kernel_info(t->k, &i);
    assert_int_equal(i.connections, 1);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(reply_goes_only_to_the_asker_and_iopub_to_all),
        TEST(parts_reach_the_kernel_byte_for_byte),
        TEST(requests_keep_their_order_while_the_link_is_full),
        TEST(a_flood_of_requests_is_throttled_and_released),
        TEST(missed_messages_come_first_after_a_reconnect),
        TEST(another_session_gets_nothing_of_the_past),
        TEST(a_cursor_is_forgotten_after_its_time),
        TEST(what_was_lost_while_away_is_announced_with_its_size),
        TEST(a_second_client_of_the_same_session_replaces_the_first),
        TEST(a_prompt_goes_to_its_asker_and_comes_again_after_a_reconnect),
        TEST(an_unseen_prompt_is_not_doubled),
        TEST(a_prompt_whose_asker_never_returns_is_interrupted),
        TEST(kernel_info_is_answered_while_the_kernel_is_busy),
        TEST(kernel_info_keeps_its_place_behind_own_requests),
        TEST(a_cursor_outside_of_the_code_is_answered_without_the_kernel),
        TEST(an_interrupt_on_the_wire_is_done_and_answered),
        TEST(an_interrupt_that_nobody_acknowledges_gets_an_error_reply),
        TEST(shutdown_on_the_wire_is_answered_before_the_end),
        TEST(shutdown_with_restart_keeps_the_kernel),
        TEST(a_reply_that_never_comes_is_made_up_after_the_idle),
        TEST(what_runs_in_a_deleted_subshell_ends_with_its_grace),
        TEST(an_idle_that_was_lost_is_inferred_from_the_next_busy),
        TEST(a_slow_client_holds_the_guest_back_and_loses_nothing),
        TEST(an_absent_client_never_holds_the_guest_back),
        TEST(a_header_that_is_too_long_is_refused_with_an_answer),
        TEST(a_message_that_the_link_never_takes_is_answered),
        TEST(a_client_refused_again_at_once_does_not_spin),
        TEST(an_id_in_use_by_another_client_is_refused),
        TEST(the_same_client_may_send_an_id_twice_and_gets_two_answers),
        TEST(connections_count_attached_clients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
