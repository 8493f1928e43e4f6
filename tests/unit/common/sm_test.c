#include "common/log.h"
#include "common/sm.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { DOOR_SHUT, DOOR_OPEN, DOOR_GONE };
static const struct sm_state door_states[] = {
    [DOOR_SHUT] = { "SHUT", SM_TO(DOOR_OPEN) | SM_TO(DOOR_GONE) },
    [DOOR_OPEN] = { "OPEN", SM_TO(DOOR_SHUT) },
    [DOOR_GONE] = { "GONE", 0 },
};
static const struct sm_def door = { "door", door_states, 3 };

static void test_listed_moves_are_made(void **state)
{
    (void)state;
    struct sm m;
    sm_init(&m, &door, DOOR_SHUT);
    assert_string_equal(sm_name(&m), "SHUT");
    sm_move(&m, DOOR_OPEN);
    assert_int_equal(m.state, DOOR_OPEN);
    assert_string_equal(sm_name(&m), "OPEN");
}

static void test_a_move_to_itself_changes_nothing(void **state)
{
    (void)state;
    struct sm m;
    sm_init(&m, &door, DOOR_GONE);
    sm_move(&m, DOOR_GONE);
    assert_int_equal(m.state, DOOR_GONE);
}

static void test_can_tells_legal_from_illegal(void **state)
{
    (void)state;
    struct sm m;
    sm_init(&m, &door, DOOR_OPEN);
    assert_true(sm_can(&m, DOOR_SHUT));
    assert_false(sm_can(&m, DOOR_GONE));
    assert_false(sm_can(&m, 3));
    assert_false(sm_can(&m, 64));
}

static void test_an_illegal_move_names_both_states_and_aborts(void **state)
{
    (void)state;
    int pair[2];
    assert_int_equal(pipe(pair), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit none = { 0, 0 };
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGABRT, SIG_DFL);
        dup2(pair[1], 2);
        struct sm m;
        sm_init(&m, &door, DOOR_GONE);
        sm_move(&m, DOOR_OPEN);
        _exit(0);
    }
    close(pair[1]);
    char text[512] = "";
    ssize_t n = read(pair[0], text, sizeof(text) - 1);
    close(pair[0]);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGABRT);
    assert_true(n > 0);
    assert_non_null(strstr(text, "door: GONE -> OPEN"));
}

static void test_the_description_lists_every_state(void **state)
{
    (void)state;
    char *text = sm_describe(&door);
    assert_string_equal(text, "SHUT -> OPEN, GONE\n"
                              "OPEN -> SHUT\n"
                              "GONE -> (end)\n");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_listed_moves_are_made),
        cmocka_unit_test(test_a_move_to_itself_changes_nothing),
        cmocka_unit_test(test_can_tells_legal_from_illegal),
        cmocka_unit_test(test_an_illegal_move_names_both_states_and_aborts),
        cmocka_unit_test(test_the_description_lists_every_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
