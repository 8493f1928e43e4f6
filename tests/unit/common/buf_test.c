#include "common/buf.h"
#include "common/mem.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_appends_up_to_the_maximum_and_not_beyond(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 10);
    assert_int_equal(buf_append(&b, "12345678", 8), 0);
    assert_int_equal(buf_append(&b, "abc", 3), -ENOBUFS);
    assert_int_equal(b.len, 8);
    assert_int_equal(buf_append_str(&b, "90"), 0);
    assert_int_equal(buf_append_byte(&b, 'x'), -ENOBUFS);
    assert_int_equal(buf_append(&b, "", 0), 0);
    assert_true(slice_eq_str(buf_slice(&b), "1234567890"));
    assert_int_equal(buf_append(&b, "x", SIZE_MAX), -ENOBUFS);
    buf_fini(&b);
    assert_int_equal(b.max, 10);
    assert_null(b.data);
}

static void test_a_zeroed_buffer_takes_nothing_and_can_be_finished(void **state)
{
    (void)state;
    struct buf b = { 0 };
    assert_int_equal(buf_append_byte(&b, 1), -ENOBUFS);
    assert_int_equal(buf_slice(&b).n, 0);
    buf_fini(&b);
    buf_fini(&b);
}

static void test_consuming_makes_room_again(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 100);
    uint8_t next_in = 0, next_out = 0;
    for (int round = 0; round < 500; round++) {
        uint8_t chunk[30];
        for (size_t i = 0; i < sizeof(chunk); i++)
            chunk[i] = next_in++;
        assert_int_equal(buf_append(&b, chunk, sizeof(chunk)), 0);
        size_t take = round % 3 == 2 ? b.len : 20 + (size_t)round % 10;
        if (take > b.len)
            take = b.len;
        if (b.len - take > 70)
            take = b.len;
        struct slice s = buf_slice(&b);
        for (size_t i = 0; i < take; i++)
            assert_int_equal(s.p[i], next_out++);
        buf_consume(&b, take);
        assert_true(b.cap <= 101);
    }
    buf_fini(&b);
}

static void test_a_full_buffer_with_a_consumed_front_accepts_as_much_again(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 64);
    uint8_t chunk[64];
    memset(chunk, 'a', sizeof(chunk));
    assert_int_equal(buf_append(&b, chunk, 64), 0);
    buf_consume(&b, 3);
    assert_int_equal(buf_append(&b, "xyz", 3), 0);
    assert_int_equal(buf_append_byte(&b, '!'), -ENOBUFS);
    assert_memory_equal(buf_slice(&b).p + 61, "xyz", 3);
    buf_fini(&b);
}

static void test_truncate_and_clear_keep_the_memory(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 100);
    buf_append_str(&b, "abcdef");
    buf_truncate(&b, 3);
    assert_true(slice_eq_str(buf_slice(&b), "abc"));
    buf_truncate(&b, 50);
    assert_int_equal(b.len, 3);
    buf_clear(&b);
    assert_int_equal(b.len, 0);
    assert_non_null(b.data);
    buf_fini(&b);
}

static void test_printf_is_all_or_nothing(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 8);
    assert_int_equal(buf_printf(&b, "%d-%s", 12, "abcde"), 0);
    assert_true(slice_eq_str(buf_slice(&b), "12-abcde"));
    assert_int_equal(buf_printf(&b, "%d", 1), -ENOBUFS);
    assert_int_equal(buf_printf(&b, "%s", ""), 0);
    assert_int_equal(b.len, 8);
    buf_fini(&b);
}

static void test_cstr_terminates_even_a_full_buffer(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 3);
    assert_string_equal(buf_cstr(&b), "");
    buf_append_str(&b, "abc");
    assert_string_equal(buf_cstr(&b), "abc");
    buf_consume(&b, 1);
    assert_string_equal(buf_cstr(&b), "bc");
    assert_int_equal(b.len, 2);
    buf_fini(&b);
}

static void test_reserve_and_commit_grow_in_place(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 10);
    uint8_t *p = buf_reserve(&b, 10);
    assert_non_null(p);
    memcpy(p, "0123456789", 10);
    buf_commit(&b, 4);
    assert_true(slice_eq_str(buf_slice(&b), "0123"));
    assert_null(buf_reserve(&b, 7));
    assert_non_null(buf_reserve(&b, 6));
    assert_non_null(buf_reserve(&b, 0));
    buf_fini(&b);
}

static void test_steal_hands_over_a_terminated_block(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 10);
    buf_append_str(&b, "xxabc");
    buf_consume(&b, 2);
    size_t n = 99;
    uint8_t *p = buf_steal(&b, &n);
    assert_int_equal(n, 3);
    assert_string_equal((char *)p, "abc");
    assert_int_equal(b.len, 0);
    free(p);
    p = buf_steal(&b, NULL);
    assert_string_equal((char *)p, "");
    free(p);
    assert_int_equal(buf_append_str(&b, "again"), 0);
    buf_fini(&b);
}

static void test_json_strings_are_escaped(void **state)
{
    (void)state;
    static const struct {
        struct slice in;
        const char *out;
    } cases[] = {
        { SLICE_LIT(""), "\"\"" },
        { SLICE_LIT("plain"), "\"plain\"" },
        { SLICE_LIT("a\"b\\c/d"), "\"a\\\"b\\\\c/d\"" },
        { SLICE_LIT("\b\t\n\f\r"), "\"\\b\\t\\n\\f\\r\"" },
        { SLICE_LIT("\0\x01\x1f\x7f"), "\"\\u0000\\u0001\\u001f\\u007f\"" },
        { SLICE_LIT("gr\xc3\xbc\xc3\x9f \xf0\x9f\x90\x8d"),
          "\"gr\xc3\xbc\xc3\x9f \xf0\x9f\x90\x8d\"" },
        { SLICE_LIT("a\xff"
                    "b\xc3"),
          "\"a\xef\xbf\xbd"
          "b\xef\xbf\xbd\"" },
        { SLICE_LIT("\xed\xa0\x80"), "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct buf b;
        buf_init(&b, 1000);
        assert_int_equal(buf_append_json_string(&b, cases[i].in), 0);
        assert_string_equal(buf_cstr(&b), cases[i].out);
        buf_fini(&b);
    }
}

static void test_a_json_string_that_does_not_fit_leaves_nothing(void **state)
{
    (void)state;
    for (size_t max = 0; max < 12; max++) {
        struct buf b;
        buf_init(&b, max + 1);
        assert_int_equal(buf_append_byte(&b, '['), 0);
        assert_int_equal(buf_append_json_string(&b, SLICE_LIT("ab\n\x01z")), -ENOBUFS);
        assert_true(slice_eq_str(buf_slice(&b), "["));
        buf_fini(&b);
    }
}

static void test_every_failed_allocation_is_reported_and_harmless(void **state)
{
    (void)state;
    for (unsigned n = 1; n < 6; n++) {
        struct buf b;
        buf_init(&b, 100000);
        mem_fail_at(n);
        int failures = 0;
        size_t len = 0;
        for (int i = 0; i < 1000; i++) {
            int r = buf_append(&b, "0123456789", 10);
            assert_true(r == 0 || r == -ENOMEM);
            failures += r != 0;
            len += r == 0 ? 10 : 0;
            assert_int_equal(b.len, len);
        }
        assert_int_equal(failures, 1);
        mem_fail_at(1);
        struct buf c;
        buf_init(&c, 10);
        assert_null(buf_cstr(&c));
        mem_fail_at(1);
        assert_null(buf_steal(&c, NULL));
        mem_fail_at(1);
        assert_int_equal(buf_printf(&c, "%d", 5), -ENOMEM);
        mem_fail_at(0);
        buf_fini(&b);
        buf_fini(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_appends_up_to_the_maximum_and_not_beyond),
        cmocka_unit_test(test_a_zeroed_buffer_takes_nothing_and_can_be_finished),
        cmocka_unit_test(test_consuming_makes_room_again),
        cmocka_unit_test(test_a_full_buffer_with_a_consumed_front_accepts_as_much_again),
        cmocka_unit_test(test_truncate_and_clear_keep_the_memory),
        cmocka_unit_test(test_printf_is_all_or_nothing),
        cmocka_unit_test(test_cstr_terminates_even_a_full_buffer),
        cmocka_unit_test(test_reserve_and_commit_grow_in_place),
        cmocka_unit_test(test_steal_hands_over_a_terminated_block),
        cmocka_unit_test(test_json_strings_are_escaped),
        cmocka_unit_test(test_a_json_string_that_does_not_fit_leaves_nothing),
        cmocka_unit_test(test_every_failed_allocation_is_reported_and_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
