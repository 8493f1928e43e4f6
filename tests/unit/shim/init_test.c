#include "guest-kernel-shim/guest.h"
#include "guest-kernel-shim/init.h"
#include "shim_test.h"

static void test_numbers_of_the_command_line_are_found_by_their_whole_key(void **state)
{
    (void)state;
    assert_int_equal(init_cmdline_number("quiet cv.disk_mb=700 x", "cv.disk_mb", 1), 700);
    assert_int_equal(init_cmdline_number("cv.disk_mb=8\n", "cv.disk_mb", 1), 8);
    assert_int_equal(init_cmdline_number("xcv.disk_mb=8", "cv.disk_mb", 1), 1);
    assert_int_equal(init_cmdline_number("cv.disk_mbx=8", "cv.disk_mb", 1), 1);
    assert_int_equal(init_cmdline_number("cv.disk_mb=8k", "cv.disk_mb", 1), 1);
    assert_int_equal(init_cmdline_number("cv.disk_mb=", "cv.disk_mb", 1), 1);
    assert_int_equal(init_cmdline_number("", "cv.disk_mb", 5), 5);
    assert_int_equal(init_cmdline_number("cv.disk_mb=z cv.disk_mb=9", "cv.disk_mb", 1), 9);
}

static void test_host_names_are_checked(void **state)
{
    static const char *const good[] = { "a", "cv-12", "a.b", "A9" };
    static const char *const bad[] = { "", "-a", ".a", "a b", "a/b", "\xc3\xa4", "a\nb" };
    char longest[65];

    (void)state;
    for (size_t i = 0; i < 4; i++)
        assert_true(guest_hostname_ok(good[i]));
    for (size_t i = 0; i < 7; i++)
        assert_false(guest_hostname_ok(bad[i]));
    memset(longest, 'a', 64);
    longest[64] = '\0';
    assert_false(guest_hostname_ok(longest));
    longest[63] = '\0';
    assert_true(guest_hostname_ok(longest));
}

static void test_too_little_entropy_is_refused(void **state)
{
    struct err e = { 0 };

    (void)state;
    assert_true(guest_add_entropy(SLICE_LIT("short"), &e) < 0);
    assert_non_null(strstr(e.msg, "entropy of 5 bytes"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers_of_the_command_line_are_found_by_their_whole_key),
        cmocka_unit_test(test_host_names_are_checked),
        cmocka_unit_test(test_too_little_entropy_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
