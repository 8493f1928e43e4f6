#include "common/cleanup.h"
#include "common/mem.h"
#include "vm/template_priv.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct tb b;
static unsigned lines;
static char last[5000];

static int setup(void **state)
{
    (void)state;
    b = (struct tb) { .log_fd = -1, .loop = loop_new() };
    lines = 0;
    last[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    loop_free(b.loop);
    return 0;
}

static void on_line(struct tb *tb, void *ctx, const char *line)
{
    (void)tb;
    (void)ctx;
    lines++;
    snprintf(last, sizeof(last), "%s", line);
}

static int shell(const char *script, char cause[300], struct err *e)
{
    const char *const argv[] = { "sh", "-c", script, NULL };
    struct tb_cmd cmd = { .argv = argv, .keep_fd = -1, .out_fd = -1, .on_line = on_line };
    return tb_run(&b, &cmd, cause, 300, e);
}

static void test_output_comes_line_by_line_and_the_code_back(void **state)
{
    (void)state;
    char cause[300];
    struct err e = { 0 };
    assert_int_equal(shell("echo one; echo two >&2; printf 'half\\rlast'; exit 7", cause, &e), 7);
    assert_int_equal(lines, 4);
    assert_string_equal(last, "last");
    assert_string_equal(cause, "last"); /* better than nothing */
}

static void test_endless_lines_are_cut(void **state)
{
    (void)state;
    char cause[300];
    assert_int_equal(shell("head -c 100000 /dev/zero | tr '\\0' x; echo; echo end", cause, NULL),
                     0);
    assert_int_equal(lines, 2);
    assert_string_equal(last, "end");
}

static void test_a_program_that_is_not_there_is_named(void **state)
{
    (void)state;
    const char *const argv[] = { "no-such-program-here", NULL };
    struct tb_cmd cmd = { .argv = argv, .keep_fd = -1, .out_fd = -1 };
    struct err e = { 0 };
    assert_int_equal(tb_run_ok(&b, &cmd, "trying", &e), -ENOENT);
    assert_non_null(strstr(e.msg, "no-such-program-here"));
}

static void test_a_failure_is_explained_by_what_was_printed(void **state)
{
    (void)state;
    const char *const argv[] = {
        "sh", "-c", "echo 'E: Unable to locate package nmpy'; echo 'E: other'; exit 100", NULL
    };
    struct tb_cmd cmd = { .argv = argv, .keep_fd = -1, .out_fd = -1 };
    struct err e = { 0 };
    assert_int_equal(tb_run_ok(&b, &cmd, "resolving packages", &e), -EIO);
    assert_string_equal(e.msg, "resolving packages: apt: Debian has no package \"nmpy\"");
}

static void test_an_unreachable_mirror_is_told_apart(void **state)
{
    (void)state;
    const char *const argv[] = {
        "sh", "-c", "echo \"W: Failed to fetch x  Temporary failure resolving 'm'\"; exit 100", NULL
    };
    struct tb_cmd cmd = { .argv = argv, .keep_fd = -1, .out_fd = -1 };
    struct err e = { 0 };
    assert_int_equal(tb_run_ok(&b, &cmd, "reading", &e), -EHOSTUNREACH);
    assert_non_null(strstr(e.msg, "reading: the package mirror cannot be reached: "));
}

static void test_a_full_disk_is_told_apart(void **state)
{
    (void)state;
    char cause[300];
    struct err e = { 0 };
    assert_int_equal(
        shell("echo 'dpkg: error: cannot write: No space left on device'; exit 1", cause, &e),
        -ENOSPC);
}

/* Ended: no such process, or nothing of it but its number, which init has yet to collect. */
static bool ends_soon(pid_t pid)
{
    char path[64], text[512];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    for (int i = 0; i < 200; i++) {
        FILE *f = fopen(path, "re");
        size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
        if (f)
            fclose(f);
        text[n] = '\0';
        const char *name_end = strrchr(text, ')');
        if (!name_end || name_end[2] == 'Z')
            return true;
        usleep(20000);
    }
    return false;
}

static void test_leftovers_do_not_hold_us_up_and_are_ended(void **state)
{
    (void)state;
    char cause[300];
    assert_int_equal(shell("sleep 30 & echo $! ", cause, NULL), 0);
    assert_int_equal(lines, 1);
    assert_true(ends_soon((pid_t)strtol(last, NULL, 10)));
}

static void cancel(void *ctx)
{
    struct tb *tb = ctx;
    tb->cancelled = true;
    if (tb->on_cancel)
        tb->on_cancel(tb);
}

static void test_cancelling_ends_the_whole_group(void **state)
{
    (void)state;
    char cause[300];
    struct err e = { 0 };
    struct loop_timer *t = loop_timer_new(b.loop, cancel, &b);
    loop_timer_start(t, 300, 0);
    int r = shell("sh -c 'echo $$; sleep 60'; echo never", cause, &e);
    loop_timer_free(t);
    assert_int_equal(r, -EINTR);
    assert_non_null(strstr(e.msg, "interrupted"));
    assert_int_equal(lines, 1);
    assert_true(ends_soon((pid_t)strtol(last, NULL, 10))); /* the grandchild too */
    /* and nothing is started any more */
    assert_int_equal(shell("echo x", cause, &e), -EINTR);
    assert_int_equal(lines, 1);
}

static void test_standard_output_can_be_taken_alone(void **state)
{
    (void)state;
    const char *const argv[] = { "sh", "-c", "echo wanted; echo noise >&2", NULL };
    struct buf out;
    assert_int_equal(tb_run_text(&b, argv, NULL, 100, &out, "trying", NULL), 0);
    assert_string_equal(buf_cstr(&out), "wanted\n");
    buf_fini(&out);
    const char *const much[] = { "sh", "-c", "head -c 101 /dev/zero", NULL };
    assert_true(tb_run_text(&b, much, NULL, 100, &out, "trying", NULL) < 0);
}

static void test_the_recipe_key_of_a_wrong_package_is_named(void **state)
{
    (void)state;
    char python[] = "python3", nope[] = "python3-nope", numpy[] = "numpy", nopey[] = "nopey>=2",
         js[] = "nope-js";
    char *apt[] = { python, nope, NULL }, *pip[] = { numpy, nopey, NULL }, *npm[] = { js, NULL };
    struct vm_recipe r = { .apt = apt, .pip = pip, .npm = npm };
    static const struct {
        const char *line, *cause;
    } cases[] = {
        { "E: Unable to locate package python3-nope",
          "apt: Debian has no package \"python3-nope\" (recipe key apt[1])" },
        { "E: Package 'python3' has no installation candidate",
          "apt: package \"python3\" has no installation candidate (recipe key apt[0])" },
        { "E: Version '9' for 'python3' was not found",
          "apt: there is no such version of \"python3\" (recipe key apt[0])" },
        { "dpkg: error processing package libfoo (--configure):",
          "package \"libfoo\" could not be installed" },
        { "ERROR: No matching distribution found for nopey>=2",
          "pip: there is no package \"nopey\" for this Python (recipe key pip[1])" },
        { "npm error 404  'nope-js@*' is not in this registry.",
          "npm: there is no package \"nope-js\" (recipe key npm[0])" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char cause[300] = "";
        assert_int_equal(tb_cause(cases[i].line, &r, cause, sizeof(cause)), 2);
        assert_string_equal(cause, cases[i].cause);
    }
    char cause[300] = "";
    assert_int_equal(tb_cause("Setting up python3 (3.13) ...", &r, cause, sizeof(cause)), 0);
    assert_int_equal(tb_cause("E: something else", &r, cause, sizeof(cause)), 1);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_output_comes_line_by_line_and_the_code_back),
        T(test_endless_lines_are_cut),
        T(test_a_program_that_is_not_there_is_named),
        T(test_a_failure_is_explained_by_what_was_printed),
        T(test_an_unreachable_mirror_is_told_apart),
        T(test_a_full_disk_is_told_apart),
        T(test_leftovers_do_not_hold_us_up_and_are_ended),
        T(test_cancelling_ends_the_whole_group),
        T(test_standard_output_can_be_taken_alone),
        T(test_the_recipe_key_of_a_wrong_package_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
