#include "guest-kernel-shim/procs.h"
#include "shim_test.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_a_command_with_brackets_and_blanks_does_not_confuse(void **state)
{
    struct shim_proc p;

    (void)state;
    assert_true(shim_procs_parse_stat("42 (a) R 9 (b)\n) S 7 40 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 "
                                      "0 1 0 123456 100 200 18446744073709551615\n",
                                      &p));
    assert_int_equal(p.pid, 42);
    assert_int_equal(p.ppid, 7);
    assert_int_equal(p.pgrp, 40);
    assert_int_equal(p.start, 123456);
}

static void test_zombies_and_nonsense_are_no_processes(void **state)
{
    struct shim_proc p;

    (void)state;
    assert_false(shim_procs_parse_stat("42 (a) Z 7 40 1 0\n", &p));
    assert_false(shim_procs_parse_stat("", &p));
    assert_false(shim_procs_parse_stat("42 a S 1 1", &p));
    assert_false(shim_procs_parse_stat("x (a) S 1 1", &p));
    assert_false(shim_procs_parse_stat("42 (a", &p));
}

static void test_grandchildren_are_descendants_whatever_their_group(void **state)
{
    struct shim_proc found[64];
    int ready[2];
    pid_t child, grand = 0;
    size_t n;
    bool seen = false;

    (void)state;
    assert_int_equal(pipe(ready), 0);
    child = fork();
    if (child == 0) {
        pid_t g = fork();
        if (g == 0) {
            setsid();
            pid_t self = getpid();
            (void)!write(ready[1], &self, sizeof(self));
            pause();
        }
        pause();
        _exit(0);
    }
    assert_int_equal(read(ready[0], &grand, sizeof(grand)), sizeof(grand));
    n = shim_procs_descendants(child, found, 64);
    for (size_t i = 0; i < n; i++)
        seen = seen || (found[i].pid == grand && found[i].ppid == child && found[i].pgrp == grand);
    kill(grand, SIGKILL);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_int_equal(n, 1);
    assert_true(seen);
    assert_false(shim_procs_get(child, &found[0]));
    close(ready[0]);
    close(ready[1]);
}

static void test_the_log_line_of_an_oom_kill_gives_the_pid(void **state)
{
    (void)state;
    assert_int_equal(shim_oom_parse("3,812,5023,-;Out of memory: Killed process 231 (python3) "
                                    "total-vm:812kB, anon-rss:4kB"),
                     231);
    assert_int_equal(shim_oom_parse("3,1,2,-;Memory cgroup out of memory: Killed process 9 (a)"),
                     9);
    assert_int_equal(shim_oom_parse("6,1,2,-;Killed process 9 by hand"), 0);
    assert_int_equal(shim_oom_parse("6,1,2,-;Out of memory: nothing"), 0);
    assert_int_equal(shim_oom_parse(""), 0);
}

static void test_without_a_kill_nothing_is_an_oom(void **state)
{
    struct shim_oom o;

    (void)state;
    shim_oom_init(&o, false);
    o.counter = UINT64_MAX; /* whatever this machine has seen is the past */
    assert_false(shim_oom_was(&o, getpid()));
    shim_oom_fini(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_command_with_brackets_and_blanks_does_not_confuse),
        cmocka_unit_test(test_zombies_and_nonsense_are_no_processes),
        cmocka_unit_test(test_grandchildren_are_descendants_whatever_their_group),
        cmocka_unit_test(test_the_log_line_of_an_oom_kill_gives_the_pid),
        cmocka_unit_test(test_without_a_kill_nothing_is_an_oom),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
