#include "proto/jp_priv.h"
#include "vectors.h"
#include <errno.h>
#include <string.h>

static void check(const char *text, const char *want)
{
    struct buf out;

    buf_init(&out, 1000);
    assert_int_equal(jp_json_append_strict(&out, slice_str(text)), 0);
    assert_bytes(text, buf_slice(&out), slice_str(want));
    buf_fini(&out);
}

static void valid_json_is_copied_byte_for_byte(void **state)
{
    static const char *const same[] = {
        "{}",
        "{\"a\": 1e5, \"b\":[-0.0,true,false,null]}",
        "{\"NaN\":\"Infinity -Infinity NaN\"}",
        "{\"text\":\"caf\xc3\xa9 \xf0\x9f\x98\x80\"}",
        "{\"lone\":\"\\ud800\"}",
        "{\"esc\":\"\\\"NaN\\\\\"}",
        "{\n \"pretty\": [\r\n\t1\n ]\n}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++)
        check(same[i], same[i]);
}

static void nonfinite_numbers_become_null(void **state)
{
    (void)state;
    check("{\"a\":NaN}", "{\"a\":null}");
    check("{\"a\":[NaN, Infinity,-Infinity ,1],\"NaN\":\"NaN\"}",
          "{\"a\":[null, null,null ,1],\"NaN\":\"NaN\"}");
}

static void malformed_utf8_and_control_characters_are_repaired(void **state)
{
    (void)state;
    check("{\"a\":\"x\x80\xffy\"}", "{\"a\":\"x\xef\xbf\xbd\xef\xbf\xbdy\"}");
    check("{\"a\":\"\xed\xa0\x80\"}", "{\"a\":\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"}");
    check("{\"a\":\"line\nbreak\"}", "{\"a\":\"line\\u000abreak\"}");
    check("{\"a\":\"\x1b[0m\\q\"}", "{\"a\":\"\\u001b[0m\\\\q\"}");
    check("{\"a\":\"\\\"\x01\\\\\",\"b\":NaN}", "{\"a\":\"\\\"\\u0001\\\\\",\"b\":null}");
}

static void a_part_that_is_no_object_becomes_an_empty_one(void **state)
{
    (void)state;
    check("[1]", "{}");
    check("{},\"channel\":\"shell\",\"x\":{}", "{}"); /* would leak into the envelope */
    check("{\"a\":", "{}");
    check("", "{}");
    check(" {\"a\":1} ", "{\"a\":1}");
}

static void nothing_is_left_behind_when_the_buffer_is_full(void **state)
{
    struct buf out;

    (void)state;
    buf_init(&out, 20);
    assert_int_equal(buf_append_str(&out, "0123456789"), 0);
    assert_int_equal(jp_json_append_strict(&out, SLICE_LIT("{\"a\":NaN,\"b\":NaN}")), -ENOBUFS);
    assert_bytes("untouched", buf_slice(&out), SLICE_LIT("0123456789"));
    assert_int_equal(jp_json_append_strict(&out, SLICE_LIT("{\"a\":1000000}")), -ENOBUFS);
    assert_bytes("untouched", buf_slice(&out), SLICE_LIT("0123456789"));
    buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(valid_json_is_copied_byte_for_byte),
        cmocka_unit_test(nonfinite_numbers_become_null),
        cmocka_unit_test(malformed_utf8_and_control_characters_are_repaired),
        cmocka_unit_test(a_part_that_is_no_object_becomes_an_empty_one),
        cmocka_unit_test(nothing_is_left_behind_when_the_buffer_is_full),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
