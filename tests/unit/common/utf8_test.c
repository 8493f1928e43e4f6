#include "common/utf8.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static size_t len_of(const char *s)
{
    return utf8_len((const uint8_t *)s, strlen(s));
}

static void test_well_formed_sequences_of_every_length(void **state)
{
    (void)state;
    assert_int_equal(len_of("a"), 1);
    assert_int_equal(utf8_len((const uint8_t *)"", 1), 1); /* U+0000 */
    assert_int_equal(len_of("\xc2\x80"), 2);
    assert_int_equal(len_of("\xdf\xbf"), 2);
    assert_int_equal(len_of("\xe0\xa0\x80"), 3);
    assert_int_equal(len_of("\xed\x9f\xbf"), 3);
    assert_int_equal(len_of("\xef\xbf\xbf"), 3);
    assert_int_equal(len_of("\xf0\x90\x80\x80"), 4);
    assert_int_equal(len_of("\xf4\x8f\xbf\xbf"), 4);
}

static void test_malformed_sequences_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "\x80", /* continuation alone */
        "\xbf",
        "\xc0\x80", /* overlong */
        "\xc1\xbf",
        "\xe0\x9f\xbf",
        "\xf0\x8f\xbf\xbf",
        "\xed\xa0\x80", /* surrogate */
        "\xed\xbf\xbf",
        "\xf4\x90\x80\x80", /* above U+10FFFF */
        "\xf5\x80\x80\x80",
        "\xff",
        "\xc3", /* cut short */
        "\xe2\x82",
        "\xf0\x9f\x90",
        "\xc3z", /* wrong continuation */
        "\xe2\x82z",
        "\xf0\x9f\x90z",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(len_of(bad[i]), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_well_formed_sequences_of_every_length),
        cmocka_unit_test(test_malformed_sequences_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
