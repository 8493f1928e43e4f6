#include "common/slice.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_equal_means_same_length_and_bytes(void **state)
{
    (void)state;
    assert_true(slice_eq(SLICE_LIT("abc"), slice_str("abc")));
    assert_false(slice_eq(SLICE_LIT("abc"), SLICE_LIT("ab")));
    assert_false(slice_eq(SLICE_LIT("abc"), SLICE_LIT("abd")));
    assert_true(slice_eq_str(SLICE_LIT("x"), "x"));
    assert_false(slice_eq_str(SLICE_LIT("x"), "xy"));
}

static void test_empty_slices_are_equal_whatever_their_pointer(void **state)
{
    (void)state;
    assert_true(slice_eq(SLICE_NULL, slice_of("zzz", 0)));
    assert_true(slice_eq_str(SLICE_NULL, ""));
    assert_int_equal(slice_str(NULL).n, 0);
}

static void test_prefix_is_checked_within_the_length(void **state)
{
    (void)state;
    assert_true(slice_starts(SLICE_LIT("kernel"), "ker"));
    assert_true(slice_starts(SLICE_LIT("kernel"), ""));
    assert_true(slice_starts(SLICE_NULL, ""));
    assert_false(slice_starts(slice_of("kernel", 2), "ker"));
    assert_false(slice_starts(SLICE_LIT("kernel"), "ken"));
}

static void test_copy_ends_with_nul_and_keeps_inner_nuls(void **state)
{
    (void)state;
    char *s = slice_dup(slice_of("a\0b", 3));
    assert_memory_equal(s, "a\0b", 4);
    free(s);
    s = slice_dup(SLICE_NULL);
    assert_string_equal(s, "");
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_means_same_length_and_bytes),
        cmocka_unit_test(test_empty_slices_are_equal_whatever_their_pointer),
        cmocka_unit_test(test_prefix_is_checked_within_the_length),
        cmocka_unit_test(test_copy_ends_with_nul_and_keeps_inner_nuls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
