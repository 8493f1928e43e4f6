#include "proto/jp_json.h"
#include "proto/jp_priv.h"
#include "vectors.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct slice S(const char *s) {
    return slice_str(s);
}

static void
a_value_ends_where_it_ends(void **state)
{
    static const struct {
        const char *text, *value, *rest;
    } cases[] = {
        { "1 2", "1", " 2" },
        { "  {\"a\":[1,{}]} x", "{\"a\":[1,{}]}", " x" },
        { "\"a\\\"b\"c", "\"a\\\"b\"", "c" },
        { "NaN,", "NaN", "," },
        { "-Infinity]", "-Infinity", "]" },
        { "123456789012345678901234567890}", "123456789012345678901234567890", "}" },
        { "[]", "[]", "" },
        { "\"0123456789012345678901234567890123456789\\\\\"", NULL, "" },
        { "{\"}\":\"]\"}", NULL, "" },
    };
    struct slice v, rest;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *want = cases[i].value ? cases[i].value : cases[i].text;
        assert_int_equal(jp_json_value(S(cases[i].text), &v, &rest), 0);
        assert_bytes(cases[i].text, v, S(want));
        assert_bytes(cases[i].text, rest, S(cases[i].rest));
    }
}

static void malformed_values_are_refused(void **state)
{
    static const char *const cases[] = { "",  " ",  "\"abc",  "\"abc\\", "\"abc\\\"", "{",
                                         "[", "[1", "{\"a\"", "{]",      "[}",        "[{]}",
                                         "}", ",",  ":",      "\x01",    "[\"]",      "\"" };
    struct slice v, rest;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (jp_json_value(S(cases[i]), &v, &rest) != -EINVAL)
            fail_msg("accepted %s", cases[i]);
}

static void strings_of_every_length_and_alignment_end_at_their_quote(void **state)
{
    char text[80];
    struct slice v, rest;

    (void)state;
    for (size_t lead = 0; lead < 9; lead++)
        for (size_t n = 0; n < 40; n++) {
            memset(text, ' ', lead);
            text[lead] = '"';
            memset(text + lead + 1, 'x', n);
            memcpy(text + lead + 1 + n, "\"tail\"", sizeof("\"tail\""));
            assert_int_equal(jp_json_value(slice_str(text), &v, &rest), 0);
            assert_int_equal(v.n, n + 2);
            assert_bytes("rest", rest, S("tail\""));
        }
}

static void nesting_is_limited_to_512(void **state)
{
    char text[2 * 513];
    struct slice v, rest;

    (void)state;
    memset(text, '[', 512);
    memset(text + 512, ']', 512);
    assert_int_equal(jp_json_value(slice_of(text, 1024), &v, &rest), 0);
    memset(text, '[', 513);
    memset(text + 513, ']', 513);
    assert_int_equal(jp_json_value(slice_of(text, 1026), &v, &rest), -EINVAL);
}

static void members_come_in_order_with_raw_keys(void **state)
{
    struct slice obj = S(" { \"a\" : 1 ,\n\"b\\u0041\":[2, 3],\"\":{}\t} "), k, v;
    size_t pos = 0;

    (void)state;
    assert_int_equal(jp_json_member(obj, &pos, &k, &v), 1);
    assert_bytes("key", k, S("a"));
    assert_bytes("value", v, S("1"));
    assert_int_equal(jp_json_member(obj, &pos, &k, &v), 1);
    assert_bytes("key", k, S("b\\u0041"));
    assert_bytes("value", v, S("[2, 3]"));
    assert_int_equal(jp_json_member(obj, &pos, &k, &v), 1);
    assert_bytes("key", k, S(""));
    assert_bytes("value", v, S("{}"));
    assert_int_equal(jp_json_member(obj, &pos, &k, &v), 0);
    pos = 0;
    assert_int_equal(jp_json_member(S("{}"), &pos, &k, &v), 0);
}

static void malformed_objects_are_refused(void **state)
{
    static const char *const cases[] = {
        "",           "[]",         "{",         "{\"a\"}",
        "{\"a\":}",   "{\"a\":1",   "{a:1}",     "{\"a\":1 \"b\":2}",
        "{\"a\":1,}", "{,\"a\":1}", "{} x",      "{}{}",
        "{\"a\":1]",  "{\"a",       "{\"a\":1}}"
    };
    struct slice k, v;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t pos = 0;
        int r, n = 0;
        while ((r = jp_json_member(S(cases[i]), &pos, &k, &v)) > 0 && n < 10)
            n++;
        if (r != -EINVAL)
            fail_msg("accepted %s", cases[i]);
    }
}

static void find_takes_the_last_of_equal_keys_and_sees_through_escapes(void **state)
{
    struct slice v;

    (void)state;
    assert_int_equal(jp_json_find(S("{\"k\":1,\"x\":2,\"k\":3}"), "k", &v), 0);
    assert_bytes("last", v, S("3"));
    assert_int_equal(jp_json_find(S("{\"msg_type\":1,\"msg\\u005ftype\":2}"), "msg_type", &v), 0);
    assert_bytes("escaped", v, S("2"));
    assert_int_equal(jp_json_find(S("{\"a\":{\"k\":1}}"), "k", &v), -ENOENT);
    assert_int_equal(jp_json_find(S("{\"k\":"), "k", &v), -EINVAL);
    assert_true(jp_json_key_is(S("\\u006b"), "k"));
    assert_false(jp_json_key_is(S("\\u006bk"), "k"));
    assert_false(jp_json_key_is(S("\\q"), "q"));
}

static void only_one_whole_object_is_an_object(void **state)
{
    (void)state;
    assert_true(jp_json_is_object(S(" {\"a\":NaN} \n")));
    assert_false(jp_json_is_object(S("[]")));
    assert_false(jp_json_is_object(S("{} {}")));
    assert_false(jp_json_is_object(S("null")));
    assert_false(jp_json_is_object(S("")));
}

static void elements_come_in_order(void **state)
{
    struct slice a = S("[1, \"x\" ,[2]]"), v;
    size_t pos = 0;

    (void)state;
    assert_int_equal(jp_json_element(a, &pos, &v), 1);
    assert_int_equal(jp_json_element(a, &pos, &v), 1);
    assert_bytes("second", v, S("\"x\""));
    assert_int_equal(jp_json_element(a, &pos, &v), 1);
    assert_int_equal(jp_json_element(a, &pos, &v), 0);
    pos = 0;
    assert_int_equal(jp_json_element(S("{}"), &pos, &v), -EINVAL);
}

static void strings_decode_as_in_the_reference(void **state)
{
    struct vectors v;
    json_t *item;
    size_t i;

    (void)state;
    vectors_load(&v, "json.json");
    assert_true(json_array_size(json_object_get(v.doc, "strings")) > 5);
    json_array_foreach(json_object_get(v.doc, "strings"), i, item)
    {
        struct slice text = vec_get(&v, item, "json"), want = vec_get(&v, item, "text");
        char out[64], *dup;

        assert_int_equal(jp_json_string(text, out, sizeof(out)), 0);
        assert_bytes("string", S(out), want);
        assert_int_equal(jp_json_string_dup(text, 1000, &dup), 0);
        assert_bytes("dup", S(dup), want);
        free(dup);
    }
    vectors_free(&v);
}

static void strings_too_long_or_malformed_are_refused(void **state)
{
    static const char *const bad[] = { "abc",    "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"",
                                       "\"a\"b", "1",       "" };
    char out[4], *dup = NULL;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(jp_json_string(S(bad[i]), out, sizeof(out)), -EINVAL);
    assert_int_equal(jp_json_string(S("\"abc\""), out, 4), 0);
    assert_int_equal(jp_json_string(S("\"abcd\""), out, 4), -ENOBUFS);
    assert_int_equal(jp_json_string(S("\"\""), out, 0), -ENOBUFS);
    assert_int_equal(jp_json_string(S("\"\xc3\xa9\xc3\xa9\""), out, 4), -ENOBUFS);
    assert_int_equal(jp_json_string_dup(S("\"abcd\""), 3, &dup), -ENOBUFS);
    assert_null(dup);
    assert_int_equal(jp_json_string(S("\"\xff\""), out, 4), 0);
    assert_string_equal(out, "\xef\xbf\xbd");
}

static void nonfinite_tokens_are_told_from_strings(void **state)
{
    struct vectors v;
    json_t *item;
    size_t i;

    (void)state;
    vectors_load(&v, "json.json");
    json_array_foreach(json_object_get(v.doc, "nonfinite"), i, item)
    {
        struct slice text = vec_get(&v, item, "json");
        bool want = json_is_true(json_object_get(item, "nonfinite"));

        if (jp_json_has_nonfinite(text) != want)
            fail_msg("%.*s", SLICE_FMT(text));
    }
    assert_true(i > 5);
    vectors_free(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_value_ends_where_it_ends),
        cmocka_unit_test(malformed_values_are_refused),
        cmocka_unit_test(strings_of_every_length_and_alignment_end_at_their_quote),
        cmocka_unit_test(nesting_is_limited_to_512),
        cmocka_unit_test(members_come_in_order_with_raw_keys),
        cmocka_unit_test(malformed_objects_are_refused),
        cmocka_unit_test(find_takes_the_last_of_equal_keys_and_sees_through_escapes),
        cmocka_unit_test(only_one_whole_object_is_an_object),
        cmocka_unit_test(elements_come_in_order),
        cmocka_unit_test(strings_decode_as_in_the_reference),
        cmocka_unit_test(strings_too_long_or_malformed_are_refused),
        cmocka_unit_test(nonfinite_tokens_are_told_from_strings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
