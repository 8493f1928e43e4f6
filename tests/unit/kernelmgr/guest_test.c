/* What sandboxes say: process reports, prompts, odd messages; and what it leads to in metrics. */
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
    t->r.metrics = metrics_new();
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

static struct jp_msg *ask(struct bench *t, const char *type, const char *id)
{
    rig_submit(&t->a, JP_SHELL, type, id, NULL);
    struct jp_msg *m = fake_vm_take_msg(t->vm);
    assert_non_null(m);
    return m;
}

static double metric(struct bench *t, const char *name)
{
    return metric_value(metrics_counter(t->r.metrics, name, "", ""));
}

static void start_with(struct bench *t, const char *report)
{
    struct km_start s = { .principal = "me" };
    rig_start_manager(&t->r);
    assert_int_equal(km_kernel_start(t->r.m, &s, rig_on_done, &t->done, NULL, NULL), 0);
    t->vm = fake_vm_last(&t->r.vms);
    fake_vm_up(t->vm);
    fake_vm_state(t->vm, report);
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
}

static void the_reason_of_a_failed_start_is_told_in_words(void **state)
{
    struct bench *t = *state;
    start_with(
        t, "{\"state\":\"exited\",\"exit_code\":null,\"signal\":null,\"reason\":\"start_failed\"}");
    assert_non_null(strstr(t->done.e.msg, "could not be started"));
    assert_true(metric(t, "cellvisor_kernel_start_failures_total") == 1);
}

static void an_unknown_signal_is_told_by_its_number(void **state)
{
    struct bench *t = *state;
    start_with(t, "{\"state\":\"exited\",\"signal\":4000,\"reason\":\"signal\"}");
    assert_non_null(strstr(t->done.e.msg, "signal 4000"));
}

static void only_the_end_of_long_last_words_is_shown(void **state)
{
    struct bench *t = *state;
    char report[5000] =
        "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"start_failed\",\"tail\":\"head";
    for (int i = 0; i < 600; i++)
        strncat(report, "\xc3\xa9", 3);
    strncat(report, "END\"}", 6);
    start_with(t, report);
    assert_null(strstr(t->done.e.msg, "head"));
    assert_non_null(strstr(t->done.e.msg, "END"));
    assert_non_null(strstr(t->done.e.msg, "output: \xc3\xa9")); /* cut between characters */
}

static void a_restart_that_the_guest_refuses_goes_to_a_fresh_sandbox(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    fake_vm_done(t->vm, fake_vm_take_ctl(t->vm, op), false);
    rig_turn(&t->r);
    assert_string_equal(rig_state(t->k), "restarting");
    assert_int_equal(t->r.vms.acquired, 2);
    assert_int_equal(t->r.vms.alive, 1);
}

static void without_a_fresh_sandbox_a_failed_restart_ends_in_death(void **state)
{
    struct bench *t = *state;
    begin(t);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":0,\"reason\":\"stopped\"}");
    assert_string_equal(rig_state(t->k), "restarting");
    t->r.vms.acquire_error = -EAGAIN;
    fake_vm_state(
        t->vm, "{\"state\":\"exited\",\"reason\":\"start_failed\",\"tail\":\"no such program\"}");
    rig_turn(&t->r);
    assert_non_null(strstr(t->done.e.msg, "no such program"));
    assert_string_equal(rig_state(t->k), "dead");
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    rig_turn(&t->r);
    assert_int_equal(t->done.e.code, -EAGAIN);
    assert_string_equal(rig_state(t->k), "dead");
}

static void a_link_that_takes_no_orders_fails_them(void **state)
{
    struct bench *t = *state;
    begin(t);
    t->vm->ctl_error = -EAGAIN;
    km_kernel_interrupt(t->k, rig_on_done, &t->done, NULL);
    assert_int_equal(t->done.calls, 0);
    rig_turn(&t->r);
    assert_int_equal(t->done.e.code, -EAGAIN);
    km_kernel_restart(t->k, rig_on_done, &t->done, NULL);
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1); /* the restart goes on, in a fresh sandbox */
    assert_int_equal(t->r.vms.acquired, 2);
}

static void nothing_is_interrupted_while_the_kernel_starts(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    km_kernel_restart(t->k, NULL, NULL, NULL);
    fake_vm_take_ctl(t->vm, op);
    km_kernel_interrupt(t->k, rig_on_done, &t->done, NULL);
    rig_turn(&t->r);
    assert_ptr_equal(t->done.k, t->k);
    assert_int_equal(fake_vm_take_ctl(t->vm, op), 0);
}

static void the_starting_status_of_the_process_itself_goes_out_once(void **state)
{
    struct bench *t = *state;
    begin(t);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"exit\"}");
    fake_vm_say(t->vm, JP_IOPUB, "status", NULL, "{\"execution_state\": \"starting\"}");
    fake_vm_state(t->vm, "{\"state\":\"running\",\"info\":{}}");
    rig_turn(&t->r);
    char *story = rig_story(&t->a, "");
    assert_non_null(strstr(story, "restarting"));
    assert_non_null(strstr(story, "starting idle"));
    free(story);
    assert_int_equal(rig_count(&t->a, "status", "", NULL),
                     4); /* restarting, its own, ours of the new one, idle */
}

static void a_fresh_kernel_info_replaces_the_remembered_one(void **state)
{
    struct bench *t = *state;
    struct km_kernel_info i;
    begin(t);
    struct jp_msg *q = ask(t, "kernel_info_request", "i");
    fake_vm_say(t->vm, JP_SHELL, "kernel_info_reply", q,
                "{\"status\": \"ok\", \"banner\": \"fresh\"}");
    km_kernel_info(t->k, &i);
    assert_non_null(strstr(i.kernel_info, "fresh"));
    jp_msg_unref(q);
}

static void answers_find_the_right_one_of_several_prompts(void **state)
{
    struct bench *t = *state;
    begin(t);
    struct jp_msg *q1 = ask(t, "execute_request", "r1"), *q2 = ask(t, "execute_request", "r2");
    fake_vm_say(t->vm, JP_STDIN, "input_request", q1, "{\"prompt\": \"1\"}");
    fake_vm_say(t->vm, JP_STDIN, "input_request", q2, "{\"prompt\": \"2\"}");
    struct jp_parts p = { .channel = JP_STDIN,
                          .header = SLICE_LIT("{\"msg_id\":\"a2\",\"msg_type\":\"input_reply\"}"),
                          .parent = q2->parts.header,
                          .content = SLICE_LIT("{\"value\":\"two\"}") };
    struct jp_msg *answer = NULL;
    assert_int_equal(jp_msg_new(&p, &answer, NULL), 0);
    assert_int_equal(km_client_submit(&t->a.c, answer), 0);
    jp_msg_unref(answer);
    answer = fake_vm_take_msg(t->vm);
    assert_true(rig_content_has(answer, "two"));
    jp_msg_unref(answer);
    /* The other prompt is still open: it comes again to a client that returns. */
    rig_turn(&t->r);
    km_client_detach(&t->a.c);
    rig_forget(&t->a);
    rig_attach(&t->a, t->k, "A");
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "input_request", "r1", NULL), 1);
    assert_int_equal(rig_count(&t->a, "input_request", "r2", NULL), 0);
    jp_msg_unref(q1);
    jp_msg_unref(q2);
}

static void many_prompts_and_huge_ones_are_passed_on_but_not_remembered(void **state)
{
    struct bench *t = *state;
    char *big = calloc(1, 100000);
    begin(t);
    struct jp_msg *q = ask(t, "execute_request", "r1");
    for (int i = 0; i < 40; i++)
        fake_vm_say(t->vm, JP_STDIN, "input_request", q, "{\"prompt\": \"?\"}");
    memset(big, 'p', 99999);
    memcpy(big, "{\"prompt\": \"", 12);
    memcpy(big + 99996, "\"}", 3);
    fake_vm_say(t->vm, JP_STDIN, "input_request", q, big);
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "input_request", "r1", NULL), 41);
    km_client_detach(&t->a.c);
    rig_forget(&t->a);
    rig_attach(&t->a, t->k, "A");
    rig_turn(&t->r);
    assert_int_equal(rig_count(&t->a, "input_request", "r1", NULL), 16);
    jp_msg_unref(q);
    free(big);
}

static void prompts_without_an_asker_interrupt_at_most_once_a_second(void **state)
{
    struct bench *t = *state;
    char op[16];
    begin(t);
    for (int i = 0; i < 50; i++)
        fake_vm_say(t->vm, JP_STDIN, "input_request", NULL, "{}");
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_int_equal(fake_vm_take_ctl(t->vm, op), 0);
    rig_advance(&t->r, 1100);
    fake_vm_say(t->vm, JP_STDIN, "input_request", NULL, "{}");
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
}

static void buffers_travel_both_ways(void **state)
{
    struct bench *t = *state;
    struct slice buffers[20];
    begin(t);
    for (int i = 0; i < 20; i++)
        buffers[i] = SLICE_LIT("\0\1\2\xff");
    struct jp_parts p = { .channel = JP_SHELL,
                          .header = SLICE_LIT("{\"msg_id\":\"c\",\"msg_type\":\"comm_msg\"}"),
                          .content = SLICE_LIT("{\"comm_id\":\"x\"}"),
                          .buffers = buffers,
                          .n_buffers = 20 };
    for (p.n_buffers = 2; p.n_buffers <= 20; p.n_buffers += 18) {
        struct jp_msg *m = NULL;
        assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
        assert_int_equal(km_client_submit(&t->a.c, m), 0);
        jp_msg_unref(m);
        m = fake_vm_take_msg(t->vm);
        assert_int_equal(m->parts.n_buffers, p.n_buffers);
        assert_memory_equal(m->parts.buffers[1].p, "\0\1\2\xff", 4);
        jp_msg_unref(m);
    }
}

static void clients_have_nothing_to_say_on_iopub(void **state)
{
    struct bench *t = *state;
    begin(t);
    assert_int_equal(rig_submit(&t->a, JP_IOPUB, "stream", "x", NULL), 0);
    assert_null(fake_vm_take(t->vm));
}

static void sessions_are_made_up_or_refused_when_too_long(void **state)
{
    struct bench *t = *state;
    struct rig_client c = { 0 };
    char longest[400];
    begin(t);
    assert_int_equal(rig_attach(&c, t->k, ""), 0);
    assert_int_equal(strlen(c.c.session), 36);
    rig_client_fini(&c);
    memset(longest, 's', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = 0;
    assert_int_equal(rig_attach(&c, t->k, longest), -E2BIG);
    rig_client_fini(&c);
}

static void of_many_absent_sessions_the_first_to_leave_are_forgotten(void **state)
{
    struct bench *t = *state;
    struct rig_client c = { 0 };
    begin(t);
    for (int i = 0; i < 40; i++) {
        char s[16];
        snprintf(s, sizeof(s), "s%d", i);
        assert_int_equal(rig_attach(&c, t->k, s), 0);
        km_client_detach(&c.c);
        rig_advance(&t->r, 1);
    }
    fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, "{\"name\": \"stdout\", \"text\": \"x\"}");
    for (int i = 0; i < 40; i += 39) {
        char s[16];
        snprintf(s, sizeof(s), "s%d", i);
        rig_attach(&c, t->k, s);
        rig_turn(&t->r);
        assert_int_equal(c.n_got, i == 39);
        km_client_detach(&c.c);
    }
    rig_client_fini(&c);
}

static void what_happens_can_be_counted(void **state)
{
    struct bench *t = *state;
    begin(t);
    km_client_detach(&t->b.c);
    for (int i = 0; i < 3; i++)
        fake_vm_say(t->vm, JP_IOPUB, "stream", NULL, "{\"name\": \"stdout\", \"text\": \"x\"}");
    fake_vm_raw(t->vm, GL_KERNEL_MSG, 1, SLICE_LIT("bad"));
    assert_true(metric(t, "cellvisor_kernel_starts_total") == 1);
    assert_true(metric(t, "cellvisor_messages_joined_total") == 2);
    assert_true(metric(t, "cellvisor_guest_messages_bad_total") == 1);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"exit\"}");
    assert_true(metric(t, "cellvisor_kernel_deaths_total") == 1);
    assert_true(metric(t, "cellvisor_kernel_restarts_total") == 1);
    assert_true(metric(t, "cellvisor_messages_synthesised_total") > 0);
    assert_int_equal(km_client_lag(&t->b.c), 0);
    assert_true(km_client_lag(&t->a.c) > 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_reason_of_a_failed_start_is_told_in_words),
        TEST(an_unknown_signal_is_told_by_its_number),
        TEST(only_the_end_of_long_last_words_is_shown),
        TEST(a_restart_that_the_guest_refuses_goes_to_a_fresh_sandbox),
        TEST(without_a_fresh_sandbox_a_failed_restart_ends_in_death),
        TEST(a_link_that_takes_no_orders_fails_them),
        TEST(nothing_is_interrupted_while_the_kernel_starts),
        TEST(the_starting_status_of_the_process_itself_goes_out_once),
        TEST(a_fresh_kernel_info_replaces_the_remembered_one),
        TEST(answers_find_the_right_one_of_several_prompts),
        TEST(many_prompts_and_huge_ones_are_passed_on_but_not_remembered),
        TEST(prompts_without_an_asker_interrupt_at_most_once_a_second),
        TEST(buffers_travel_both_ways),
        TEST(clients_have_nothing_to_say_on_iopub),
        TEST(sessions_are_made_up_or_refused_when_too_long),
        TEST(of_many_absent_sessions_the_first_to_leave_are_forgotten),
        TEST(what_happens_can_be_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
