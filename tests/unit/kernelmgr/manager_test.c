#include "tests/support/km_rig.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ID "01234567-89ab-cdef-0123-456789abcdef"

struct bench {
    struct rig r;
    struct rig_done done;
    struct err e;
    struct km_op *op;
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
    rig_fini(&t->r);
    free(t);
    return 0;
}

static int start(struct bench *t, const char *principal, const char *spec, const char *id)
{
    struct km_start s = { .principal = principal, .spec = spec, .kernel_id = id };
    if (!t->r.m)
        rig_start_manager(&t->r);
    return km_kernel_start(t->r.m, &s, rig_on_done, &t->done, &t->op, &t->e);
}

static bool count_one(void *ctx, struct km_kernel *k)
{
    (void)k;
    ++*(unsigned *)ctx;
    return true;
}

static unsigned count(struct bench *t, const char *principal)
{
    unsigned n = 0;
    km_kernel_each(t->r.m, principal, count_one, &n);
    return n;
}

static void a_start_is_done_when_the_kernel_is_ready(void **state)
{
    struct bench *t = *state;
    struct km_kernel_info i;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    struct fake_vm *v = fake_vm_last(&t->r.vms);
    assert_string_equal(v->template_name, "python");
    assert_string_equal(v->spec, "python3");
    struct km_kernel *k = km_kernel_find(t->r.m, "me", ID);
    assert_non_null(k);
    assert_string_equal(rig_state(k), "starting");
    fake_vm_up(v);
    struct fake_frame *f = fake_vm_take(v);
    assert_int_equal(f->type, GL_KERNEL_START);
    assert_string_equal(f->text, "{\"spec\":\"python3\",\"env\":{},\"cwd\":null}");
    fake_frame_free(f);
    fake_vm_state(v, "{\"state\":\"starting\"}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 0);
    fake_vm_state(v, "{\"state\":\"running\",\"info\":{\"banner\":\"hi\"}}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_ptr_equal(t->done.k, k);
    km_kernel_info(k, &i);
    assert_string_equal(i.id, ID);
    assert_string_equal(i.execution_state, "idle");
    assert_non_null(strstr(i.kernel_info, "banner"));
    assert_non_null(i.vm);
}

static void a_kernel_that_the_template_brought_is_ready_at_once(void **state)
{
    struct bench *t = *state;
    t->r.vms.prestarted = true;
    assert_int_equal(start(t, "me", "python3", NULL), 0);
    struct fake_vm *v = fake_vm_last(&t->r.vms);
    fake_vm_up(v);
    rig_turn(&t->r);
    assert_non_null(t->done.k);
    assert_null(fake_vm_take(v));
}

static void another_spec_is_started_beside_it_and_the_unused_one_stopped(void **state)
{
    struct bench *t = *state;
    char op[16];
    t->r.vms.prestarted = true;
    assert_int_equal(start(t, "me", "bash", NULL), 0);
    struct fake_vm *v = fake_vm_last(&t->r.vms);
    fake_vm_up(v);
    fake_vm_take_ctl(v, op);
    assert_string_equal(op, "stop");
    struct fake_frame *f = fake_vm_take(v);
    assert_int_equal(f->type, GL_KERNEL_START);
    assert_int_equal(f->stream, 2);
    fake_frame_free(f);
    fake_vm_raw(v, GL_KERNEL_STATE, 1, SLICE_LIT("{\"state\":\"exited\",\"reason\":\"stopped\"}"));
    fake_vm_raw(v, GL_KERNEL_STATE, 2, SLICE_LIT("{\"state\":\"running\",\"info\":{}}"));
    rig_turn(&t->r);
    assert_non_null(t->done.k);
}

static void bad_starts_are_refused_with_a_reason(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", "nope", NULL), -ENOENT);
    assert_non_null(strstr(t->e.msg, "nope"));
    assert_non_null(strstr(t->e.msg, "python3"));
    assert_non_null(strstr(t->e.msg, "minimal.python3"));
    assert_int_equal(start(t, "me", NULL, "../x"), -EINVAL);
    assert_non_null(strstr(t->e.msg, "../x"));
    t->r.vms.acquire_error = -EAGAIN;
    assert_int_equal(start(t, "me", NULL, ID), -EAGAIN);
    assert_null(km_kernel_find(t->r.m, "me", ID));
    t->r.vms.acquire_error = -EPERM;
    assert_int_equal(start(t, "me", NULL, ID), -EPERM);
    t->r.vms.acquire_error = 0;
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 0);
    assert_int_equal(count(t, NULL), 0);
    t->r.vms.n_templates = 0;
    assert_int_equal(start(t, "me", NULL, NULL), -ENOENT);
    assert_non_null(strstr(t->e.msg, "template build"));
}

static void a_bad_environment_is_refused(void **state)
{
    static const char *const bad[] = { "[]", "{\"A\":1}", "{\"A=B\":\"x\"}", "{\"\":\"x\"}",
                                       "{\"A\":\"x\\u0000y\"}" };
    struct bench *t = *state;
    rig_start_manager(&t->r);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        struct km_start s = { .principal = "me", .env = json_loads(bad[i], JSON_ALLOW_NUL, NULL) };
        assert_non_null(s.env);
        assert_int_equal(km_kernel_start(t->r.m, &s, rig_on_done, &t->done, NULL, &t->e), -EINVAL);
        assert_non_null(strstr(t->e.msg, "env"));
        json_decref(s.env);
    }
}

static void an_id_exists_once(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    assert_int_equal(start(t, "me", NULL, ID), -EEXIST);
    assert_int_equal(start(t, "you", NULL, ID), -EEXIST);
}

static void limits_count_pending_starts(void **state)
{
    struct bench *t = *state;
    t->r.cfg.max_kernels = 3;
    t->r.cfg.max_kernels_per_principal = 2;
    assert_int_equal(start(t, "me", NULL, NULL), 0);
    assert_int_equal(start(t, "me", NULL, NULL), 0);
    assert_int_equal(start(t, "me", NULL, NULL), -EDQUOT);
    assert_non_null(strstr(t->e.msg, "2"));
    assert_int_equal(start(t, "you", NULL, NULL), 0);
    assert_int_equal(start(t, "they", NULL, NULL), -EDQUOT);
    assert_non_null(strstr(t->e.msg, "3"));
    km_op_cancel(t->op);
    assert_int_equal(start(t, "they", NULL, NULL), 0);
}

static void a_cancelled_start_is_undone(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    km_op_cancel(t->op);
    assert_null(km_kernel_find(t->r.m, "me", ID));
    rig_advance(&t->r, 5000);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(t->done.calls, 0);
}

static void a_start_cancelled_after_it_was_done_is_undone_as_well(void **state)
{
    struct bench *t = *state;
    t->r.vms.prestarted = true;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    fake_vm_up(fake_vm_last(&t->r.vms));
    km_op_cancel(t->op); /* ready, not yet told */
    rig_advance(&t->r, 5000);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(t->done.calls, 0);
}

static void a_kernel_that_dies_while_starting_fails_the_start_with_its_last_words(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    struct fake_vm *v = fake_vm_last(&t->r.vms);
    fake_vm_up(v);
    fake_vm_state(
        v, "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"start_failed\",\"tail\":\"boom\"}");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_null(t->done.k);
    assert_non_null(strstr(t->done.e.msg, "exit code 1"));
    assert_non_null(strstr(t->done.e.msg, "boom"));
    assert_int_equal(count(t, NULL), 0);
    assert_int_equal(t->r.vms.alive, 0);
}

static void a_sandbox_that_does_not_come_up_fails_the_start(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    fake_vm_down(fake_vm_last(&t->r.vms), VM_EXIT_START_FAILED, "restore: bad state");
    rig_turn(&t->r);
    assert_int_equal(t->done.calls, 1);
    assert_non_null(strstr(t->done.e.msg, "restore: bad state"));
    assert_null(km_kernel_find(t->r.m, "me", ID));
}

static void a_start_that_hangs_ends_at_its_deadline(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    fake_vm_up(fake_vm_last(&t->r.vms));
    rig_advance(&t->r, t->r.cfg.start_timeout_ms + 1);
    assert_int_equal(t->done.e.code, -ETIMEDOUT);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(count(t, NULL), 0);
}

static void principals_do_not_see_each_other(void **state)
{
    struct bench *t = *state;
    assert_int_equal(start(t, "me", NULL, ID), 0);
    assert_null(km_kernel_find(t->r.m, "you", ID));
    assert_non_null(km_kernel_find(t->r.m, "me", ID));
    assert_non_null(km_kernel_find(t->r.m, NULL, ID));
    assert_int_equal(count(t, "you"), 0);
    assert_int_equal(count(t, "me"), 1);
}

static void closing_ends_all_kernels_and_waits_for_their_sandboxes(void **state)
{
    struct bench *t = *state;
    struct rig_client c = { 0 };
    assert_int_equal(start(t, "me", NULL, ID), 0);
    assert_int_equal(start(t, "you", NULL, NULL), 0);
    assert_int_equal(rig_attach(&c, km_kernel_find(t->r.m, NULL, ID), "A"), 0);
    rig_fini(&t->r);
    assert_true(t->r.closed);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(c.why, KM_CLOSE_SHUTDOWN);
    assert_int_equal(c.closes, 1);
    rig_client_fini(&c);
    rig_init(&t->r); /* for teardown */
}

static void a_closing_manager_starts_nothing(void **state)
{
    struct bench *t = *state;
    rig_start_manager(&t->r);
    km_manager_close(t->r.m, NULL, NULL);
    assert_int_equal(start(t, "me", NULL, NULL), -EAGAIN);
}

static void a_restart_asked_for_before_closing_is_told_of_the_end(void **state)
{
    struct bench *t = *state;
    struct fake_vm *v;
    struct km_kernel *k = rig_kernel(&t->r, &v);
    km_kernel_restart(k, rig_on_done, &t->done, NULL);
    km_manager_close(t->r.m, NULL, NULL);
    rig_advance(&t->r, 1000);
    assert_int_equal(t->done.calls, 1);
    assert_int_equal(t->done.e.code, -ESRCH);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_start_is_done_when_the_kernel_is_ready),
        TEST(a_kernel_that_the_template_brought_is_ready_at_once),
        TEST(another_spec_is_started_beside_it_and_the_unused_one_stopped),
        TEST(bad_starts_are_refused_with_a_reason),
        TEST(a_bad_environment_is_refused),
        TEST(an_id_exists_once),
        TEST(limits_count_pending_starts),
        TEST(a_cancelled_start_is_undone),
        TEST(a_start_cancelled_after_it_was_done_is_undone_as_well),
        TEST(a_kernel_that_dies_while_starting_fails_the_start_with_its_last_words),
        TEST(a_sandbox_that_does_not_come_up_fails_the_start),
        TEST(a_start_that_hangs_ends_at_its_deadline),
        TEST(principals_do_not_see_each_other),
        TEST(closing_ends_all_kernels_and_waits_for_their_sandboxes),
        TEST(a_closing_manager_starts_nothing),
        TEST(a_restart_asked_for_before_closing_is_told_of_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
