#include "common/err.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void test_set_stores_code_and_text_and_returns_the_code(void **state)
{
    (void)state;
    struct err e = { 0 };
    assert_int_equal(err_set(&e, -EINVAL, "memory: %d is odd", 7), -EINVAL);
    assert_int_equal(e.code, -EINVAL);
    assert_string_equal(e.msg, "memory: 7 is odd");
}

static void test_a_null_object_is_accepted_everywhere(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, -EINVAL, "x"), -EINVAL);
    assert_int_equal(err_wrap(NULL, -EIO, "x"), -EIO);
    assert_int_equal(err_errno(NULL, ENOENT, "x"), -ENOENT);
}

static void test_wrap_puts_context_in_front(void **state)
{
    (void)state;
    struct err e = { 0 };
    err_set(&e, -ENOENT, "no such file");
    assert_int_equal(err_wrap(&e, -EIO, "template %s", "base"), -EIO);
    assert_int_equal(e.code, -EIO);
    assert_string_equal(e.msg, "template base: no such file");
}

static void test_wrap_of_nothing_gives_the_text_of_the_code(void **state)
{
    (void)state;
    struct err e = { 0 };
    err_wrap(&e, -ENOENT, "/etc/x");
    assert_string_equal(e.msg, "/etc/x: No such file or directory");
}

static void test_errno_appends_its_text_and_negates(void **state)
{
    (void)state;
    struct err e = { 0 };
    assert_int_equal(err_errno(&e, EACCES, "%s", "/root/x"), -EACCES);
    assert_int_equal(e.code, -EACCES);
    assert_string_equal(e.msg, "/root/x: Permission denied");
}

static void test_long_texts_are_cut_not_overrun(void **state)
{
    (void)state;
    struct err e = { 0 };
    char big[2000];
    memset(big, 'a', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    err_set(&e, -EIO, "%s", big);
    assert_int_equal(strlen(e.msg), sizeof(e.msg) - 1);
    err_wrap(&e, -EIO, "outer");
    assert_int_equal(strlen(e.msg), sizeof(e.msg) - 1);
    assert_memory_equal(e.msg, "outer: aaa", 10);
    err_wrap(&e, -EIO, "%s", big);
    assert_int_equal(strlen(e.msg), sizeof(e.msg) - 1);
    assert_memory_equal(e.msg, "aaaa", 4);
}

static void test_arguments_may_point_into_the_message(void **state)
{
    (void)state;
    struct err e = { 0 };
    err_set(&e, -EIO, "inner");
    err_set(&e, -EINVAL, "line 3: %s", e.msg);
    assert_string_equal(e.msg, "line 3: inner");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_set_stores_code_and_text_and_returns_the_code),
        cmocka_unit_test(test_a_null_object_is_accepted_everywhere),
        cmocka_unit_test(test_wrap_puts_context_in_front),
        cmocka_unit_test(test_wrap_of_nothing_gives_the_text_of_the_code),
        cmocka_unit_test(test_errno_appends_its_text_and_negates),
        cmocka_unit_test(test_long_texts_are_cut_not_overrun),
        cmocka_unit_test(test_arguments_may_point_into_the_message),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
