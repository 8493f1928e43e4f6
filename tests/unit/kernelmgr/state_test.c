/* execution_state and last_activity, jupyter.md 2.5. */
#include "tests/support/km_rig.h"
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
    struct rig_client a;
};

static int setup(void **state)
{
    struct bench *t = calloc(1, sizeof(*t));
    rig_init(&t->r);
    t->k = rig_kernel(&t->r, &t->vm);
    rig_attach(&t->a, t->k, "A");
    *state = t;
    return 0;
}

static int teardown(void **state)
{
    struct bench *t = *state;
    rig_client_fini(&t->a);
    rig_fini(&t->r);
    free(t);
    return 0;
}

static struct jp_msg *ask(struct bench *t, enum jp_channel ch, const char *type, const char *id)
{
    rig_submit(&t->a, ch, type, id, NULL);
    struct jp_msg *m = fake_vm_take_msg(t->vm);
    assert_non_null(m);
    return m;
}

static void status(struct bench *t, const struct jp_msg *q, const char *s)
{
    char content[64];
    snprintf(content, sizeof(content), "{\"execution_state\": \"%s\"}", s);
    fake_vm_say(t->vm, JP_IOPUB, "status", q, content);
}

static uint64_t activity(const struct bench *t)
{
    struct km_kernel_info i;
    km_kernel_info(t->k, &i);
    return i.last_activity_us;
}

static void a_cell_makes_the_kernel_busy_and_idle(void **state)
{
    struct bench *t = *state;
    struct jp_msg *q = ask(t, JP_SHELL, "execute_request", "r");
    status(t, q, "busy");
    assert_string_equal(rig_state(t->k), "busy");
    status(t, q, "idle");
    assert_string_equal(rig_state(t->k), "idle");
    jp_msg_unref(q);
}

static void requests_that_tools_send_by_themselves_do_not_count(void **state)
{
    static const char *const types[] = { "kernel_info_request", "comm_info_request",
                                         "debug_request" };
    struct bench *t = *state;
    for (size_t i = 0; i < 3; i++) {
        uint64_t before = activity(t);
        char id[16];
        snprintf(id, sizeof(id), "r%zu", i);
        rig_advance(&t->r, 1000);
        struct jp_msg *q = ask(t, JP_SHELL, types[i], id);
        status(t, q, "busy");
        assert_string_equal(rig_state(t->k), "idle");
        status(t, q, "idle");
        assert_int_equal(activity(t), before);
        jp_msg_unref(q);
    }
}

static void output_of_a_cell_is_activity(void **state)
{
    struct bench *t = *state;
    struct jp_msg *q = ask(t, JP_SHELL, "execute_request", "r");
    uint64_t before = activity(t);
    rig_advance(&t->r, 1000);
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"x\"}");
    assert_true(activity(t) >= before + 1000000);
    before = activity(t);
    rig_advance(&t->r, 1000);
    fake_vm_say(t->vm, JP_IOPUB, "comm_msg", q, "{}");
    assert_true(activity(t) >= before + 1000000);
    jp_msg_unref(q);
}

static void an_idle_on_control_does_not_end_a_cell(void **state)
{
    struct bench *t = *state;
    struct jp_msg *q = ask(t, JP_SHELL, "execute_request", "r");
    struct jp_msg *u = ask(t, JP_CONTROL, "usage_request", "u");
    status(t, q, "busy");
    status(t, u, "busy");
    status(t, u, "idle");
    assert_string_equal(rig_state(t->k), "busy");
    status(t, q, "idle");
    assert_string_equal(rig_state(t->k), "idle");
    jp_msg_unref(q);
    jp_msg_unref(u);
}

static void an_idle_of_one_subshell_does_not_end_the_cell_of_another(void **state)
{
    struct bench *t = *state;
    struct jp_msg *q = ask(t, JP_SHELL, "execute_request", "r");
    struct jp_msg *c = ask(t, JP_SHELL, "comm_msg", "c");
    status(t, q, "busy");
    status(t, c, "busy");
    status(t, c, "idle");
    assert_string_equal(rig_state(t->k), "busy");
    status(t, q, "idle");
    assert_string_equal(rig_state(t->k), "idle");
    jp_msg_unref(q);
    jp_msg_unref(c);
}

static void a_cell_that_dies_does_not_leave_the_kernel_busy(void **state)
{
    struct bench *t = *state;
    struct jp_msg *q = ask(t, JP_SHELL, "execute_request", "r");
    status(t, q, "busy");
    jp_msg_unref(q);
    km_client_detach(&t->a.c);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"signal\":9,\"reason\":\"signal\"}");
    fake_vm_state(t->vm, "{\"state\":\"starting\"}");
    fake_vm_state(t->vm, "{\"state\":\"running\"}");
    rig_turn(&t->r);
    assert_string_equal(rig_state(t->k), "idle");
}

static void a_busy_whose_idle_was_lost_ends_with_its_grace(void **state)
{
    struct bench *t = *state;
    struct jp_msg *q = ask(t, JP_SHELL, "execute_request", "r");
    status(t, q, "busy");
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", q, "{\"status\": \"ok\"}");
    jp_msg_unref(q);
    rig_advance(&t->r, 60000);
    assert_string_equal(rig_state(t->k), "idle");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_cell_makes_the_kernel_busy_and_idle),
        TEST(requests_that_tools_send_by_themselves_do_not_count),
        TEST(output_of_a_cell_is_activity),
        TEST(an_idle_on_control_does_not_end_a_cell),
        TEST(an_idle_of_one_subshell_does_not_end_the_cell_of_another),
        TEST(a_cell_that_dies_does_not_leave_the_kernel_busy),
        TEST(a_busy_whose_idle_was_lost_ends_with_its_grace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
