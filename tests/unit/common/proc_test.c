#include "common/buf.h"
#include "common/cleanup.h"
#include "common/proc.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct loop *loop;
static struct proc_exit result;
static int exits;
static bool hung;

static void on_guard(void *ctx)
{
    (void)ctx;
    hung = true;
    loop_stop(loop);
}

static int setup(void **state)
{
    (void)state;
    loop = loop_new();
    exits = 0;
    hung = false;
    loop_timer_start(loop_timer_new(loop, on_guard, NULL), 30000, 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    loop_free(loop);
    /* No child may be left, running or as a zombie. */
    return hung || waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD ? -1 : 0;
}

static void on_exit_record(void *ctx, const struct proc_exit *x)
{
    (void)ctx;
    result = *x;
    exits++;
    loop_stop(loop);
}

#define ARGV(...)                                                                                  \
    (const char *const[])                                                                          \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }

/* Run to the end and return what came out of its fd 1. */
static int run_text(struct proc_spec spec, char *ret, size_t size)
{
    int pair[2];
    assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
    struct err e = { 0 };
    int r = proc_run(&spec, pair[1], &e);
    close(pair[1]);
    if (r < 0)
        print_error("%s\n", e.msg);
    size_t n = 0;
    ssize_t got;
    while (n + 1 < size && (got = read(pair[0], ret + n, size - 1 - n)) > 0)
        n += (size_t)got;
    ret[n] = '\0';
    close(pair[0]);
    return r;
}

static void test_exit_codes_come_back_once(void **state)
{
    (void)state;
    struct proc *p = NULL;
    struct err e = { 0 };
    struct proc_spec spec = { .argv = ARGV("sh", "-c", "exit 7") };
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, &e), 0);
    assert_true(proc_pid(p) > 0);
    loop_run(loop);
    assert_int_equal(exits, 1);
    assert_int_equal(result.code, 7);
    assert_int_equal(result.signal, 0);
    assert_int_equal(proc_kill(p, SIGTERM, false), -ESRCH);
    loop_step(loop, 5);
    assert_int_equal(exits, 1);
    proc_free(p);
    proc_free(NULL);
}

static void test_a_signal_is_reported_as_such(void **state)
{
    (void)state;
    struct proc *p = NULL;
    struct proc_spec spec = { .argv = ARGV("sleep", "1000") };
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, NULL), 0);
    assert_int_equal(proc_kill(p, SIGTERM, false), 0);
    loop_run(loop);
    assert_int_equal(result.code, -1);
    assert_int_equal(result.signal, SIGTERM);
    proc_free(p);
}

static void test_killing_the_group_reaches_grandchildren(void **state)
{
    (void)state;
    int pair[2];
    assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
    struct proc *p = NULL;
    struct proc_fd fds[] = { { pair[1], 1 } };
    struct proc_spec spec = { .argv = ARGV("sh", "-c", "sleep 1000 & echo; wait"),
                              .fds = fds,
                              .n_fds = 1,
                              .new_group = true };
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, NULL), 0);
    close(pair[1]);
    char c;
    assert_int_equal(read(pair[0], &c, 1), 1);
    assert_int_equal(proc_kill(p, SIGKILL, true), 0);
    loop_run(loop);
    assert_int_equal(result.signal, SIGKILL);
    /* Both held the pipe's other end. */
    struct pollfd pfd = { .fd = pair[0], .events = POLLIN };
    assert_int_equal(poll(&pfd, 1, 20000), 1);
    assert_int_equal(read(pair[0], &c, 1), 0);
    close(pair[0]);
    proc_free(p);
}

static void test_a_missing_program_is_enoent_with_its_name(void **state)
{
    (void)state;
    struct proc *p = NULL;
    struct err e = { 0 };
    struct proc_spec spec = { .argv = ARGV("no-such-program-here") };
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, &e), -ENOENT);
    assert_string_equal(e.msg, "no-such-program-here: no such program in PATH");
    spec.argv = ARGV("/nonexistent/x");
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, &e), -ENOENT);
    assert_string_equal(e.msg, "/nonexistent/x: No such file or directory");
    spec.argv = ARGV("/etc/passwd");
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, &e), -EACCES);
    spec.argv = ARGV("");
    assert_int_equal(proc_run(&spec, -1, &e), -ENOENT);
    assert_null(p);
}

static void test_a_failed_step_before_exec_is_named(void **state)
{
    (void)state;
    struct err e = { 0 };
    struct proc_spec spec = { .argv = ARGV("true"), .cwd = "/nonexistent" };
    assert_int_equal(proc_run(&spec, -1, &e), -ENOENT);
    assert_string_equal(e.msg, "true: cannot enter the directory: No such file or directory");
    struct proc_fd fds[] = { { 9999, 5 } };
    spec = (struct proc_spec) { .argv = ARGV("true"), .fds = fds, .n_fds = 1 };
    assert_int_equal(proc_run(&spec, -1, &e), -EBADF);
    assert_string_equal(e.msg, "true: cannot arrange descriptors: Bad file descriptor");
}

static void test_environment_and_directory_are_as_told(void **state)
{
    (void)state;
    char text[256];
    struct proc_spec spec = { .argv = ARGV("/usr/bin/env"), .env = ARGV("A=1", "B=two words") };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "A=1\nB=two words\n");
    spec = (struct proc_spec) { .argv = ARGV("pwd"), .cwd = "/usr" };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "/usr\n");
    setenv("CV_TEST_INHERITED", "yes", 1);
    spec = (struct proc_spec) { .argv = ARGV("sh", "-c", "echo $CV_TEST_INHERITED") };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "yes\n");
}

static int temp_with(const char *text)
{
    char path[] = "/tmp/cv-proc-test-XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    assert_true(fd >= 0);
    unlink(path);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    return fd;
}

static void test_descriptors_may_swap_and_overlap(void **state)
{
    (void)state;
    int a = temp_with("A"), b = temp_with("B");
    /* Targets are each other's numbers, and one source goes to two places. */
    struct proc_fd fds[] = { { a, b }, { b, a }, { a, 0 } };
    char script[128], text[64];
    snprintf(script, sizeof(script), "cat /proc/$$/fd/%d; cat /proc/$$/fd/%d; cat", a, b);
    struct proc_spec spec = { .argv = ARGV("sh", "-c", script), .fds = fds, .n_fds = 3 };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "BAA");
    close(a);
    close(b);
}

static void test_no_other_descriptor_leaks_into_the_child(void **state)
{
    (void)state;
    int leak = dup(open("/dev/null", O_RDONLY)); /* deliberately not close-on-exec */
    int wanted = temp_with("x");
    struct proc_fd fds[] = { { wanted, 7 } };
    char text[256];
    /* The shell lists itself through a child; the ":" keeps it from becoming that child. */
    struct proc_spec spec = { .argv = ARGV("sh", "-c", "ls /proc/$$/fd; :"),
                              .fds = fds,
                              .n_fds = 1 };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "0\n1\n2\n7\n");
    close(leak);
    close(leak - 1);
    close(wanted);
}

static void test_standard_descriptors_default_to_dev_null(void **state)
{
    (void)state;
    char text[256];
    struct proc_spec spec = { .argv =
                                  ARGV("sh", "-c", "cat; readlink /proc/$$/fd/0 /proc/$$/fd/2") };
    int pair[2];
    assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
    struct proc_fd out[] = { { pair[1], 1 } };
    spec.fds = out;
    spec.n_fds = 1;
    assert_int_equal(proc_run(&spec, -1, NULL), 0);
    close(pair[1]);
    ssize_t n = read(pair[0], text, sizeof(text) - 1);
    assert_true(n > 0);
    text[n] = '\0';
    close(pair[0]);
    assert_string_equal(text, "/dev/null\n/dev/null\n");
}

static void test_handlers_and_masks_are_not_inherited(void **state)
{
    (void)state;
    sigset_t block, old;
    sigemptyset(&block);
    sigaddset(&block, SIGUSR1);
    sigprocmask(SIG_BLOCK, &block, &old);
    void (*before)(int) = signal(SIGPIPE, SIG_IGN);
    char text[256];
    struct proc_spec spec = { .argv =
                                  ARGV("sh", "-c", "grep -E '^Sig(Blk|Ign)' /proc/self/status") };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    signal(SIGPIPE, before);
    sigprocmask(SIG_SETMASK, &old, NULL);
    assert_string_equal(text, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
}

static void test_limits_and_session_are_set(void **state)
{
    (void)state;
    char text[256];
    struct proc_limit limits[] = { { RLIMIT_NOFILE, 64 }, { RLIMIT_CORE, 0 } };
    struct proc_spec spec = { .argv = ARGV("sh", "-c", "ulimit -n; ulimit -c"),
                              .limits = limits,
                              .n_limits = 2 };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "64\n0\n");
    spec = (struct proc_spec) { .argv = ARGV("sh", "-c",
                                             "read a b c d e f g </proc/$$/stat;"
                                             "test $f = $$ && echo leader"),
                                .new_session = true,
                                .die_with_parent = true };
    assert_int_equal(run_text(spec, text, sizeof(text)), 0);
    assert_string_equal(text, "leader\n");
}

static void test_freeing_kills_and_reaps_without_a_call(void **state)
{
    (void)state;
    struct proc *p = NULL;
    struct proc_spec spec = { .argv = ARGV("sleep", "1000") };
    assert_int_equal(proc_spawn(loop, &spec, on_exit_record, NULL, &p, NULL), 0);
    proc_free(p);
    loop_step(loop, 5);
    assert_int_equal(exits, 0);
    /* teardown: loop_free waits for the reaping, then no child is left. */
}

static void free_in_callback(void *ctx, const struct proc_exit *x)
{
    (void)x;
    exits++;
    proc_free(*(struct proc **)ctx);
    loop_stop(loop);
}

static void test_freeing_in_the_exit_callback_is_fine(void **state)
{
    (void)state;
    struct proc *p = NULL;
    struct proc_spec spec = { .argv = ARGV("true") };
    assert_int_equal(proc_spawn(loop, &spec, free_in_callback, &p, &p, NULL), 0);
    loop_run(loop);
    assert_int_equal(exits, 1);
}

static void test_run_returns_code_output_and_signal(void **state)
{
    (void)state;
    char text[256];
    struct err e = { 0 };
    struct proc_spec spec = { .argv = ARGV("sh", "-c", "echo out; echo err >&2; exit 3") };
    assert_int_equal(run_text(spec, text, sizeof(text)), 3);
    assert_string_equal(text, "out\nerr\n");
    spec.argv = ARGV("sh", "-c", "kill -9 $$");
    assert_int_equal(proc_run(&spec, -1, &e), -EINTR);
    assert_non_null(strstr(e.msg, "sh: killed by signal 9"));
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_exit_codes_come_back_once),
        T(test_a_signal_is_reported_as_such),
        T(test_killing_the_group_reaches_grandchildren),
        T(test_a_missing_program_is_enoent_with_its_name),
        T(test_a_failed_step_before_exec_is_named),
        T(test_environment_and_directory_are_as_told),
        T(test_descriptors_may_swap_and_overlap),
        T(test_no_other_descriptor_leaks_into_the_child),
        T(test_standard_descriptors_default_to_dev_null),
        T(test_handlers_and_masks_are_not_inherited),
        T(test_limits_and_session_are_set),
        T(test_freeing_kills_and_reaps_without_a_call),
        T(test_freeing_in_the_exit_callback_is_fine),
        T(test_run_returns_code_output_and_signal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
