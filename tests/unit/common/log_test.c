#include "common/json.h"
#include "common/log.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char last[16384];
static enum log_level last_level;
static int lines;

static void capture(void *ctx, enum log_level level, const char *line)
{
    (void)ctx;
    snprintf(last, sizeof(last), "%s", line);
    last_level = level;
    lines++;
}

static int setup(void **state)
{
    (void)state;
    log_set_sink(capture, NULL);
    log_configure(LOG_LEVEL_INFO, false);
    last[0] = '\0';
    lines = 0;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    log_set_sink(NULL, NULL);
    log_configure(LOG_LEVEL_INFO, false);
    return 0;
}

/* The line without its time, which is checked for form only. */
static const char *after_time(void)
{
    assert_memory_equal(last, "time=2", 6);
    const char *p = strchr(last, ' ');
    assert_non_null(p);
    assert_int_equal(p - last, 5 + 27);
    return p + 1;
}

static void test_a_line_has_level_context_and_message(void **state)
{
    (void)state;
    struct log_ctx c;
    log_ctx_init(&c, NULL);
    log_ctx_add(&c, "kernel", "7f3a");
    log_ctx_add(&c, "spec", "Python 3");
    log_warn(&c, "ready in %d ms", 42);
    assert_string_equal(after_time(),
                        "level=warn kernel=7f3a spec=\"Python 3\" msg=\"ready in 42 ms\"");
    assert_int_equal(last_level, LOG_LEVEL_WARN);
    log_error(NULL, "x");
    assert_string_equal(after_time(), "level=error msg=\"x\"");
}

static void test_lines_below_the_level_are_dropped(void **state)
{
    (void)state;
    log_debug(NULL, "no");
    assert_int_equal(lines, 0);
    assert_false(log_enabled(LOG_LEVEL_DEBUG));
    log_configure(LOG_LEVEL_DEBUG, false);
    log_debug(NULL, "yes");
    assert_int_equal(lines, 1);
    log_configure(LOG_LEVEL_ERROR, false);
    log_warn(NULL, "no");
    assert_int_equal(lines, 1);
}

static void test_control_characters_cannot_forge_a_line(void **state)
{
    (void)state;
    log_info(NULL, "%s", "a\nlevel=error \"q\" \\ \x1b[31m\x7f \xc2\x9b \xff \xc3\xa9");
    assert_string_equal(
        after_time(), "level=info msg=\"a\\nlevel=error \\\"q\\\" \\\\ \\u001b[31m\\u007f \\u009b "
                      "\xef\xbf\xbd \xc3\xa9\"");
}

static void test_context_values_are_quoted_when_needed(void **state)
{
    (void)state;
    struct log_ctx c;
    log_ctx_init(&c, NULL);
    log_ctx_add(&c, "a", "x=1");
    log_ctx_add(&c, "b", "");
    log_ctx_add(&c, "c", "new\nline");
    log_ctx_add(&c, "d", NULL);
    assert_string_equal(c.text, "a=\"x=1\" b=\"\" c=\"new\\nline\" d=\"\"");
}

static void test_context_is_inherited_and_never_overrun(void **state)
{
    (void)state;
    struct log_ctx parent, child;
    log_ctx_init(&parent, NULL);
    log_ctx_add(&parent, "vm", "3");
    log_ctx_init(&child, &parent);
    char big[400];
    memset(big, 'z', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    log_ctx_add(&child, "k", big);
    size_t n = strlen(child.text);
    assert_true(n < sizeof(child.text));
    assert_memory_equal(child.text, "vm=3 k=\"zzz", 11);
    assert_string_equal(child.text + n - 4, "...\"");
    log_ctx_add(&child, "more", "left out, as there is no room");
    assert_int_equal(strlen(child.text), n);
    assert_string_equal(parent.text, "vm=3");
}

static void test_every_cut_context_is_well_formed(void **state)
{
    (void)state;
    /* Values of every length, of characters that grow when escaped. */
    for (size_t len = 0; len < 200; len++) {
        char value[201];
        memset(value, '\x01', len);
        value[len] = '\0';
        struct log_ctx c;
        log_ctx_init(&c, NULL);
        log_ctx_add(&c, "k", value);
        log_configure(LOG_LEVEL_INFO, true);
        log_info(&c, "m");
        json_t *v = json_parse(slice_str(last), NULL);
        assert_non_null(v);
        assert_non_null(json_string_value(json_object_get(v, "k")));
        json_decref(v);
    }
}

static void test_json_lines_parse_and_carry_the_same_values(void **state)
{
    (void)state;
    log_configure(LOG_LEVEL_INFO, true);
    struct log_ctx c;
    log_ctx_init(&c, NULL);
    log_ctx_add(&c, "kernel", "7f3a");
    log_ctx_add(&c, "name", "say \"hi\" \\ \n");
    log_info(&c, "tab\there %s", "\x01");
    struct err e = { 0 };
    json_t *v = json_parse(slice_str(last), &e);
    assert_non_null(v);
    assert_string_equal(json_string_value(json_object_get(v, "level")), "info");
    assert_string_equal(json_string_value(json_object_get(v, "kernel")), "7f3a");
    assert_string_equal(json_string_value(json_object_get(v, "name")), "say \"hi\" \\ \n");
    assert_string_equal(json_string_value(json_object_get(v, "msg")), "tab\there \x01");
    assert_int_equal(strlen(json_string_value(json_object_get(v, "time"))), 27);
    json_decref(v);
}

static void test_long_messages_are_cut_with_a_mark(void **state)
{
    (void)state;
    char *big = malloc(100000);
    assert_non_null(big);
    memset(big, '\x01', 99999); /* the byte that grows most */
    big[99999] = '\0';
    log_configure(LOG_LEVEL_INFO, true);
    log_info(NULL, "%s", big);
    json_t *v = json_parse(slice_str(last), NULL);
    assert_non_null(v);
    const char *msg = json_string_value(json_object_get(v, "msg"));
    assert_int_equal(strlen(msg), 1024 + 3);
    assert_string_equal(msg + 1024, "...");
    json_decref(v);
    free(big);
}

static void test_errno_is_left_alone(void **state)
{
    (void)state;
    errno = EXDEV;
    log_info(NULL, "x");
    assert_int_equal(errno, EXDEV);
}

static void test_without_a_sink_a_line_goes_to_stderr(void **state)
{
    (void)state;
    int pair[2], saved = dup(2);
    assert_int_equal(pipe(pair), 0);
    assert_true(saved >= 0 && dup2(pair[1], 2) == 2);
    log_set_sink(NULL, NULL);
    log_info(NULL, "to stderr");
    assert_int_equal(dup2(saved, 2), 2);
    close(saved);
    close(pair[1]);
    ssize_t n = read(pair[0], last, sizeof(last) - 1);
    close(pair[0]);
    assert_true(n > 0);
    last[n] = '\0';
    assert_string_equal(after_time(), "level=info msg=\"to stderr\"\n");
}

static void test_level_names_are_parsed(void **state)
{
    (void)state;
    enum log_level l = LOG_LEVEL_ERROR;
    assert_int_equal(log_level_parse("debug", &l), 0);
    assert_int_equal(l, LOG_LEVEL_DEBUG);
    assert_int_equal(log_level_parse("warn", &l), 0);
    assert_int_equal(l, LOG_LEVEL_WARN);
    assert_int_equal(log_level_parse("loud", &l), -EINVAL);
    assert_int_equal(log_level_parse("", &l), -EINVAL);
    assert_int_equal(l, LOG_LEVEL_WARN);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_a_line_has_level_context_and_message),
        T(test_lines_below_the_level_are_dropped),
        T(test_control_characters_cannot_forge_a_line),
        T(test_context_values_are_quoted_when_needed),
        T(test_context_is_inherited_and_never_overrun),
        T(test_every_cut_context_is_well_formed),
        T(test_json_lines_parse_and_carry_the_same_values),
        T(test_long_messages_are_cut_with_a_mark),
        T(test_errno_is_left_alone),
        T(test_without_a_sink_a_line_goes_to_stderr),
        T(test_level_names_are_parsed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
