#include "common/timefmt.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_iso_has_six_digits_and_a_z(void **state)
{
    (void)state;
    static const struct {
        uint64_t us;
        const char *text;
    } cases[] = {
        { 0, "1970-01-01T00:00:00.000000Z" },
        { UINT64_C(1767225600000001), "2026-01-01T00:00:00.000001Z" },
        { UINT64_C(951782399999999), "2000-02-28T23:59:59.999999Z" },
        { UINT64_C(951782400000000), "2000-02-29T00:00:00.000000Z" },
        { UINT64_C(253402300799999999), "9999-12-31T23:59:59.999999Z" },
        { UINT64_MAX, "9999-12-31T23:59:59.999999Z" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[TIMEFMT_ISO_LEN + 1];
        timefmt_iso(text, cases[i].us);
        assert_string_equal(text, cases[i].text);
    }
}

struct number_case {
    uint64_t n;
    const char *text;
};

static void test_spans_read_well_at_every_size(void **state)
{
    (void)state;
    static const struct number_case cases[] = {
        { 0, "0 ms" },           { 48, "48 ms" },       { 999, "999 ms" },
        { 1000, "1.0 s" },       { 3250, "3.2 s" },     { 59999, "59.9 s" },
        { 60000, "1m 00s" },     { 65000, "1m 05s" },   { 3599999, "59m 59s" },
        { 3600000, "1h 00m" },   { 7500000, "2h 05m" }, { 86400000, "1d 00h" },
        { 273600000, "3d 04h" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[32];
        timefmt_span(text, sizeof(text), cases[i].n);
        assert_string_equal(text, cases[i].text);
    }
}

static void test_byte_counts_round_to_the_next_unit(void **state)
{
    (void)state;
    static const struct number_case cases[] = {
        { 0, "0 B" },
        { 999, "999 B" },
        { 1000, "1.0 kB" },
        { 1250, "1.3 kB" },
        { 9949, "9.9 kB" },
        { 9951, "10 kB" },
        { 512000, "512 kB" },
        { 999499, "999 kB" },
        { 999500, "1.0 MB" },
        { 1300000000, "1.3 GB" },
        { UINT64_MAX, "18 EB" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[32];
        timefmt_bytes(text, sizeof(text), cases[i].n);
        assert_string_equal(text, cases[i].text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_iso_has_six_digits_and_a_z),
        cmocka_unit_test(test_spans_read_well_at_every_size),
        cmocka_unit_test(test_byte_counts_round_to_the_next_unit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
