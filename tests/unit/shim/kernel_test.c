/* Exit reasons, operations, the declared state machine. What needs a process is in
 * tests/integration/shim. */
#include "guest-kernel-shim/kernel.h"
#include "shim_test.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>

/* wait(2) statuses, as the kernel makes them. */
#define EXIT(code) ((code) << 8)
#define KILLED(sig) (sig)

static void test_every_end_has_its_reason(void **state)
{
    static const struct {
        enum shim_kernel_state s;
        int status;
        bool oom;
        const char *reason;
        int code, signal;
    } rows[] = {
        { SHIM_KERNEL_RUNNING, EXIT(7), false, "exit", 7, -1 },
        { SHIM_KERNEL_RUNNING, EXIT(0), false, "exit", 0, -1 },
        { SHIM_KERNEL_RUNNING, KILLED(SIGSEGV), false, "signal", -1, SIGSEGV },
        { SHIM_KERNEL_RUNNING, KILLED(SIGKILL), false, "signal", -1, SIGKILL },
        { SHIM_KERNEL_RUNNING, KILLED(SIGKILL), true, "oom", -1, SIGKILL },
        { SHIM_KERNEL_RUNNING, KILLED(SIGSEGV), true, "signal", -1, SIGSEGV },
        { SHIM_KERNEL_RUNNING, EXIT(1), true, "exit", 1, -1 },
        { SHIM_KERNEL_STARTING, EXIT(1), false, "start_failed", 1, -1 },
        { SHIM_KERNEL_STARTING, KILLED(SIGABRT), false, "start_failed", -1, SIGABRT },
        { SHIM_KERNEL_STARTING, KILLED(SIGKILL), true, "oom", -1, SIGKILL },
        { SHIM_KERNEL_STOPPING, EXIT(0), false, "stopped", 0, -1 },
        { SHIM_KERNEL_STOPPING, KILLED(SIGKILL), true, "stopped", -1, SIGKILL },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct shim_exit x = shim_exit_of(rows[i].s, rows[i].status, rows[i].oom);
        assert_string_equal(x.reason, rows[i].reason);
        assert_int_equal(x.code, rows[i].code);
        assert_int_equal(x.signal, rows[i].signal);
    }
}

static void test_only_the_four_operations_are_known(void **state)
{
    enum shim_op op = SHIM_OP_KILL;

    (void)state;
    assert_int_equal(shim_op_parse("interrupt", &op), 0);
    assert_int_equal(op, SHIM_OP_INTERRUPT);
    assert_int_equal(shim_op_parse("restart", &op), 0);
    assert_int_equal(op, SHIM_OP_RESTART);
    assert_int_equal(shim_op_parse("stop", &op), 0);
    assert_int_equal(shim_op_parse("kill", &op), 0);
    assert_int_equal(shim_op_parse("Interrupt", &op), -EINVAL);
    assert_int_equal(shim_op_parse("", &op), -EINVAL);
    assert_int_equal(shim_op_parse(NULL, &op), -EINVAL);
    assert_int_equal(op, SHIM_OP_KILL);
}

static void test_the_declared_moves_are_these(void **state)
{
    CLEANUP(freep) char *text = sm_describe(&shim_kernel_sm);

    (void)state;
    assert_string_equal(text, "new -> starting, exited\n"
                              "starting -> running, stopping, draining, exited\n"
                              "running -> stopping, draining\n"
                              "stopping -> draining\n"
                              "draining -> exited\n"
                              "exited -> starting\n");
}

/* ---- a kernel object without a process ---- */

static unsigned n_states, n_done;
static char last_error[512];

static void on_state(void *ctx, struct shim_kernel *k)
{
    (void)ctx;
    (void)k;
    n_states++;
}
static void on_done(void *ctx, struct shim_kernel *k, uint64_t id, const char *error)
{
    (void)ctx;
    (void)k;
    (void)id;
    n_done++;
    snprintf(last_error, sizeof(last_error), "%s", error ? error : "");
}
static bool on_room(void *ctx, struct shim_kernel *k)
{
    (void)ctx;
    (void)k;
    return true;
}
static void on_consumed(void *ctx, struct shim_kernel *k, size_t n)
{
    (void)k;
    *(size_t *)ctx += n;
}

static const struct shim_kernel_ops ops = {
    .state = on_state, .done = on_done, .room = on_room, .consumed = on_consumed
};

static void test_a_program_that_is_not_there_fails_the_start_with_its_name(void **state)
{
    struct shim_host h = { .ops = &ops, .start_timeout_ms = 1000, .grace_ms = 1000 };
    struct shim_spec spec = {
        .name = (char[]) { "gone" }, .dir = *state, .prefix = (char[]) { "/usr" }, .language = ""
    };
    size_t consumed = 0;
    struct shim_kernel *k;

    n_states = n_done = 0;
    h.ctx = &consumed;
    shim_loop_init(&h.loop);
    shim_environ_init(&h.env);
    shim_environ_set(&h.env, "PATH", "/nonexistent");
    snprintf(h.run_dir, sizeof(h.run_dir), "%s", (char *)*state);
    spec.json = json_pack("{s:[s]}", "argv", "no-such-program");
    k = shim_kernel_new(&h, 1);
    shim_kernel_start(k, &spec, NULL, NULL);
    assert_int_equal(k->sm.state, SHIM_KERNEL_EXITED);
    assert_int_equal(n_states, 1);
    assert_string_equal(k->exit.reason, "start_failed");
    assert_non_null(strstr(buf_cstr(&k->tail), "no-such-program"));

    /* Operations on a kernel without a process are answered, too. */
    shim_kernel_op(k, SHIM_OP_INTERRUPT, 1);
    assert_int_equal(n_done, 1);
    assert_string_not_equal(last_error, "");
    shim_kernel_op(k, SHIM_OP_STOP, 2);
    assert_int_equal(n_done, 2);
    assert_string_equal(last_error, "");
    shim_kernel_op(k, SHIM_OP_RESTART, 3);
    assert_int_equal(n_done, 3);
    assert_non_null(strstr(last_error, "no-such-program"));

    shim_kernel_free(k);
    json_decref(spec.json);
    shim_environ_fini(&h.env);
    shim_loop_fini(&h.loop);
}

static void test_a_run_dir_that_is_too_long_is_refused_with_a_hint(void **state)
{
    struct shim_host h = { .ops = &ops };
    struct shim_spec spec = { .name = (char[]) { "x" },
                              .dir = *state,
                              .prefix = (char[]) { "/usr" } };
    size_t consumed = 0;
    struct shim_kernel *k;

    h.ctx = &consumed;
    shim_loop_init(&h.loop);
    shim_environ_init(&h.env);
    memset(h.run_dir, 'd', sizeof(h.run_dir) - 1);
    h.run_dir[0] = '/';
    spec.json = json_pack("{s:[s]}", "argv", "/bin/true");
    k = shim_kernel_new(&h, 1);
    shim_kernel_start(k, &spec, NULL, NULL);
    assert_int_equal(k->sm.state, SHIM_KERNEL_EXITED);
    assert_true(k->tail.len > 0);
    shim_kernel_free(k);
    json_decref(spec.json);
    shim_environ_fini(&h.env);
    shim_loop_fini(&h.loop);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, make_tmp, remove_tmp)
    const struct CMUnitTest tests[] = {
        T(test_every_end_has_its_reason),
        T(test_only_the_four_operations_are_known),
        T(test_the_declared_moves_are_these),
        T(test_a_program_that_is_not_there_fails_the_start_with_its_name),
        T(test_a_run_dir_that_is_too_long_is_refused_with_a_hint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
