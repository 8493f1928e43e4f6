#include "tests/support/km_rig.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct bench {
    struct rig r;
    struct fake_vm *vm;
    struct km_kernel *k;
    struct rig_client a, b;
    struct rig_done done;
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

/* Submit r1 (running), r2 and a comm_msg (queued) to the kernel. */
static void put_in_flight(struct bench *t)
{
    rig_submit(&t->a, JP_SHELL, "execute_request", "r1", NULL);
    rig_submit(&t->b, JP_SHELL, "complete_request", "r2", NULL);
    rig_submit(&t->a, JP_SHELL, "comm_msg", "r3", NULL);
    struct jp_msg *m = fake_vm_take_msg(t->vm);
    fake_vm_say(t->vm, JP_IOPUB, "status", m, "{\"execution_state\": \"busy\"}");
    jp_msg_unref(m);
    rig_turn(&t->r);
}

static void assert_answered_with(struct bench *t, const char *text)
{
    const struct jp_msg *m;
    assert_story(&t->a, "r1", "busy error execute_reply idle");
    assert_story(&t->b, "r1", "busy error idle");
    assert_story(&t->b, "r2", "busy complete_reply idle");
    assert_story(&t->a, "r2", "busy idle");
    assert_story(&t->a, "r3", "busy idle");
    rig_count(&t->a, "execute_reply", "r1", &m);
    assert_true(rig_content_has(m, "DeadKernelError"));
    assert_true(rig_content_has(m, text));
    assert_true(rig_content_has(m, "\"status\": \"error\""));
    rig_count(&t->b, "complete_reply", "r2", &m);
    assert_true(rig_content_has(m, text));
}

static void a_dead_process_answers_what_was_asked_and_comes_back(void **state)
{
    static const struct {
        const char *report, *text;
    } cases[] = {
        { "{\"state\":\"exited\",\"exit_code\":7,\"signal\":null,\"reason\":\"exit\"}",
          "exit code 7" },
        { "{\"state\":\"exited\",\"exit_code\":null,\"signal\":9,\"reason\":\"signal\"}",
          "SIGKILL" },
        { "{\"state\":\"exited\",\"exit_code\":null,\"signal\":11,\"reason\":\"signal\"}",
          "SIGSEGV" },
        { "{\"state\":\"exited\",\"exit_code\":null,\"signal\":9,\"reason\":\"oom\"}",
          "out of memory (512 MB)" },
    };
    struct bench *t = *state;
    char op[16];
    begin(t);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const struct jp_msg *m;
        put_in_flight(t);
        fake_vm_state(t->vm, cases[i].report);
        rig_turn(&t->r);
        assert_answered_with(t, cases[i].text);
        assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
        assert_string_equal(op, "restart");
        assert_string_equal(rig_state(t->k), "restarting");
        assert_story(&t->a, "", "restarting");
        rig_count(&t->a, "status", "", &m);
        assert_string_equal(m->session,
                            "kernel-session"); /* the kernel's own, see jupyter.md 2.8 */
        fake_vm_state(t->vm, "{\"state\":\"starting\"}");
        assert_string_equal(rig_state(t->k), "starting");
        fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
        rig_turn(&t->r);
        assert_string_equal(rig_state(t->k), "idle");
        assert_story(&t->a, "", "restarting starting idle");
        rig_forget(&t->a);
        rig_forget(&t->b);
        rig_advance(&t->r, 11000); /* stable: the count of restarts begins anew */
    }
}

static void a_kernel_that_keeps_dying_is_dead_after_the_limit(void **state)
{
    struct bench *t = *state;
    struct km_kernel_info i;
    const struct jp_msg *m;
    t->r.cfg.restart_limit = 2;
    begin(t);
    for (int n = 0; n < 2; n++) {
        fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":3,\"reason\":\"exit\"}");
        fake_vm_state(t->vm, "{\"state\":\"starting\"}");
        fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    }
    assert_string_equal(rig_state(t->k), "idle");
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":3,\"reason\":\"exit\"}");
    rig_turn(&t->r);
    km_kernel_info(t->k, &i);
    assert_string_equal(i.execution_state, "dead");
    assert_string_equal(i.reason, "exit code 3");
    assert_null(i.vm);
    assert_int_equal(i.restarts, 2);
    rig_count(&t->a, "status", "", &m);
    assert_true(rig_content_has(m, "dead"));
    rig_advance(&t->r, 10000);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(t->a.closes, 0); /* the websocket stays for a restart */
}

static void death_while_restarting_counts_as_another_try(void **state)
{
    struct bench *t = *state;
    t->r.cfg.restart_limit = 3;
    begin(t);
    for (int n = 0; n < 4; n++) {
        assert_string_not_equal(rig_state(t->k), "dead");
        fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"exit\"}");
        fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    }
    assert_string_equal(rig_state(t->k), "dead");
}

static void the_end_of_the_sandbox_answers_everything_at_once(void **state)
{
    struct bench *t = *state;
    struct km_kernel_info i;
    begin(t);
    put_in_flight(t);
    fake_vm_down(t->vm, VM_EXIT_VMM, "the VMM was killed by SIGKILL");
    rig_turn(&t->r);
    assert_answered_with(t, "the VMM was killed by SIGKILL");
    km_kernel_info(t->k, &i);
    assert_string_equal(i.execution_state, "dead");
    assert_non_null(strstr(i.reason, "SIGKILL"));
}

static void a_dead_kernel_answers_with_an_error_and_can_be_restarted(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *m;
    begin(t);
    fake_vm_down(t->vm, VM_EXIT_VMM, "killed");
    rig_turn(&t->r);
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "r9", NULL), -ESRCH);
    rig_turn(&t->r);
    assert_story(&t->a, "r9", "busy error execute_reply idle");
    rig_count(&t->a, "execute_reply", "r9", &m);
    assert_true(rig_content_has(m, "restart it"));
    km_kernel_interrupt(t->k, rig_on_done, &t->done, NULL);
    rig_turn(&t->r);
    assert_int_equal(t->done.e.code, -ESRCH);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    assert_int_equal(t->r.vms.alive, 1);
    assert_string_equal(rig_state(t->k), "restarting");
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "r10", NULL), 0);
    t->vm = fake_vm_last(&t->r.vms);
    fake_vm_up(t->vm);
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 2);
    assert_ptr_equal(t->done.k, t->k);
    assert_string_equal(rig_state(t->k), "idle");
    struct jp_msg *q = fake_vm_take_msg(t->vm);
    assert_string_equal(q->msg_id, "r10");
    jp_msg_unref(q);
}

static void a_restart_answers_the_old_process_requests_and_holds_new_ones(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    put_in_flight(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    struct jp_msg *m;
    fake_vm_take_ctl(t->vm, op);
    assert_string_equal(op, "restart");
    while ((m = fake_vm_take_msg(t->vm)))
        jp_msg_unref(m);
    assert_int_equal(rig_submit(&t->a, JP_SHELL, "execute_request", "new", NULL), 0);
    assert_null(fake_vm_take_msg(t->vm));
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "execute_reply", NULL, NULL),
                     0); /* the old one may still answer */
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    rig_turn(&t->r);
    assert_answered_with(t, "restarted");
    assert_int_equal(t->done.calls, 0);
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_ptr_equal(t->done.k, t->k);
    m = fake_vm_take_msg(t->vm);
    assert_string_equal(m->msg_id, "new");
    fake_vm_serve(t->vm, m);
    jp_msg_unref(m);
    rig_turn(&t->r);
    assert_story(&t->a, "new", "busy execute_reply idle");
    assert_story(&t->a, "",
                 "starting idle"); /* no "restarting": front ends take that for a crash */
}

static void the_kernels_own_starting_status_is_not_doubled(void **state)
{
    struct bench *t = *state;
    begin(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    fake_vm_say(t->vm, JP_IOPUB, "status", NULL, "{\"execution_state\": \"starting\"}");
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    fake_vm_say(t->vm, JP_IOPUB, "status", NULL, "{\"execution_state\": \"starting\"}");
    rig_turn(&t->r);
    assert_story(&t->a, "", "starting idle");
    assert_string_equal(rig_state(t->k), "idle");
}

/* The fresh sandbox that a failed restart takes; `told` of the old one's end. */
static void assert_moved(struct bench *t)
{
    struct fake_vm *old = t->vm;
    const struct jp_msg *m;
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 0);
    assert_string_equal(rig_state(t->k), "restarting");
    assert_int_equal(t->r.vms.acquired, 2);
    t->vm = fake_vm_last(&t->r.vms);
    assert_ptr_not_equal(t->vm, old);
    assert_int_equal(rig_count(&t->a, "stream", "", &m), 1);
    assert_true(rig_content_has(m, "files that were written in the old one are gone"));
    fake_vm_up(t->vm);
}

static void a_restart_that_fails_in_its_sandbox_goes_to_a_fresh_one(void **state)
{
    struct bench *t = *state;
    begin(t);
    put_in_flight(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"start_failed\","
                         "\"tail\":\"no module\"}");
    assert_moved(t);
    assert_answered_with(t, "restarted");
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_ptr_equal(t->done.k, t->k);
    assert_string_equal(rig_state(t->k), "idle");
    assert_int_equal(t->r.vms.alive, 1);
    assert_int_equal(t->a.closes, 0);
}

static void a_restart_that_fails_in_the_fresh_sandbox_too_leaves_a_dead_kernel(void **state)
{
    struct bench *t = *state;
    begin(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"start_failed\"}");
    assert_moved(t);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"start_failed\","
                         "\"tail\":\"no module\"}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_null(t->done.k);
    assert_non_null(strstr(t->done.e.msg, "no module"));
    assert_string_equal(rig_state(t->k), "dead");
    assert_int_equal(t->r.vms.alive, 0);
}

static void a_restart_that_hangs_moves_on_at_its_deadline(void **state)
{
    struct bench *t = *state;
    begin(t);
    put_in_flight(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    rig_advance(&t->r, t->r.cfg.restart_timeout_ms - 1);
    assert_int_equal(t->r.vms.acquired, 1);
    rig_advance(&t->r, 1);
    assert_moved(t);
    assert_answered_with(t, "restarted");
    rig_advance(&t->r, t->r.cfg.start_timeout_ms + 1);
    assert_int_equal(t->done.e.code, -ETIMEDOUT);
    assert_string_equal(rig_state(t->k), "dead");
    assert_int_equal(t->r.vms.alive, 0);
}

static void two_restarts_at_once_share_one(void **state)
{
    struct bench *t = *state;
    struct rig_done second = { 0 };
    char op[16];
    begin(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    km_kernel_restart(t->k, rig_on_done, &second, NULL);
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_int_equal(fake_vm_take_ctl(t->vm, op), 0);
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_int_equal(second.calls, 1);
    assert_non_null(second.k);
}

static void what_the_link_holds_for_the_old_process_is_dropped_with_it(void **state)
{
    struct bench *t = *state;
    begin(t);
    t->vm->queued = 5000;
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    assert_int_equal(t->vm->closed_streams, 0); /* the old one's last words are still welcome */
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    assert_int_equal(t->vm->closed_streams, 1);
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_turn(&t->r);
    assert_non_null(t->done.k);
    assert_int_equal(t->vm->closed_streams, 1);
}

static void an_interrupt_is_done_when_the_guest_says_so(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    km_kernel_interrupt(t->k, rig_on_done, &t->done, NULL);
    uint64_t id = fake_vm_take_ctl(t->vm, op);
    assert_string_equal(op, "interrupt");
    fake_vm_done(t->vm, id + 100, true);
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 0);
    fake_vm_done(t->vm, id, true);
    assert_int_equal(t->done.calls, 0); /* never inside the call */
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_ptr_equal(t->done.k, t->k);
}

static void an_unanswered_interrupt_times_out(void **state)
{
    struct bench *t = *state;
    begin(t);
    km_kernel_interrupt(t->k, rig_on_done, &t->done, NULL);
    rig_advance(&t->r, 60000);
    assert_int_equal(t->done.calls, 1);
    assert_int_equal(t->done.e.code, -ETIMEDOUT);
}

static void shutdown_takes_kernel_clients_and_sandbox_along(void **state)
{
    struct bench *t = *state;
    char id[40];
    begin(t);
    struct km_kernel_info i;
    km_kernel_info(t->k, &i);
    snprintf(id, sizeof(id), "%s", i.id);
    km_kernel_interrupt(t->k, rig_on_done, &t->done, NULL);
    km_kernel_shutdown(t->k, "culled after 10 s");
    assert_null(km_kernel_find(t->r.m, "me", id));
    assert_int_equal(t->a.closes, 1);
    assert_int_equal(t->a.why, KM_CLOSE_DELETED);
    assert_string_equal(t->a.why_text, "culled after 10 s");
    assert_true(t->vm->released);
    km_kernel_shutdown(t->k, "again");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_int_equal(t->done.e.code, -ESRCH);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(rig_attach(&t->a, NULL, "A"), -ESRCH);
}

static void raw_output_becomes_a_stream_of_the_running_cell(void **state)
{
    struct bench *t = *state;
    const struct jp_msg *m;
    begin(t);
    put_in_flight(t);
    assert_int_equal(fake_vm_raw(t->vm, GL_KERNEL_OUT, 1, SLICE_LIT("\1gr\xc3")), 0);
    assert_int_equal(fake_vm_raw(t->vm, GL_KERNEL_OUT, 1, SLICE_LIT("\2oops\n")), 0);
    assert_int_equal(fake_vm_raw(t->vm, GL_KERNEL_OUT, 1, SLICE_LIT("\1\xbc\xc3\x9f \"q\"\n")), 0);
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "stream", "r1", &m), 3);
    assert_true(rig_content_has(m, "\"\u00fc\u00df \\\"q\\\"\\n\""));
    assert_true(rig_content_has(m, "stdout"));
    assert_int_equal(t->vm->granted, t->vm->sent_credits);
}

static void nonsense_from_the_guest_changes_nothing(void **state)
{
    struct bench *t = *state;
    begin(t);
    fake_vm_state(t->vm, "nonsense");
    fake_vm_state(t->vm, "[]");
    fake_vm_state(t->vm, "{\"state\":7}");
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    fake_vm_state(t->vm, "{\"state\":\"running\"}");
    fake_vm_done(t->vm, 77, false);
    fake_vm_raw(t->vm, GL_KERNEL_MSG, 1, SLICE_LIT("\1"));
    fake_vm_raw(t->vm, GL_KERNEL_OUT, 1, SLICE_LIT("\7abc"));
    fake_vm_raw(t->vm, GL_KERNEL_MSG, 9, SLICE_LIT("other stream"));
    fake_vm_raw(t->vm, GL_EVENT, 0, SLICE_LIT("{\"kind\":\"disk\"}"));
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", NULL, "{}");
    fake_vm_say(t->vm, JP_STDIN, "input_request", NULL, "{}");
    rig_turn(&t->r);
    assert_string_equal(rig_state(t->k), "idle");
    assert_int_equal(t->a.n_got, 0);
    assert_int_equal(t->vm->granted, t->vm->sent_credits);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_dead_process_answers_what_was_asked_and_comes_back),
        TEST(a_kernel_that_keeps_dying_is_dead_after_the_limit),
        TEST(death_while_restarting_counts_as_another_try),
        TEST(the_end_of_the_sandbox_answers_everything_at_once),
        TEST(a_dead_kernel_answers_with_an_error_and_can_be_restarted),
        TEST(a_restart_answers_the_old_process_requests_and_holds_new_ones),
        TEST(the_kernels_own_starting_status_is_not_doubled),
        TEST(a_restart_that_fails_in_its_sandbox_goes_to_a_fresh_one),
        TEST(a_restart_that_fails_in_the_fresh_sandbox_too_leaves_a_dead_kernel),
        TEST(a_restart_that_hangs_moves_on_at_its_deadline),
        TEST(two_restarts_at_once_share_one),
        TEST(what_the_link_holds_for_the_old_process_is_dropped_with_it),
        TEST(an_interrupt_is_done_when_the_guest_says_so),
        TEST(an_unanswered_interrupt_times_out),
        TEST(shutdown_takes_kernel_clients_and_sandbox_along),
        TEST(raw_output_becomes_a_stream_of_the_running_cell),
        TEST(nonsense_from_the_guest_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
