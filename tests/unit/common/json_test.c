#include "common/json.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static json_t *must_parse(const char *text)
{
    struct err e = { 0 };
    json_t *v = json_parse(slice_str(text), &e);
    if (!v)
        print_error("%s\n", e.msg);
    assert_non_null(v);
    return v;
}

static void test_bad_texts_are_refused_with_a_position(void **state)
{
    (void)state;
    static const struct slice bad[] = {
        SLICE_LIT(""),
        SLICE_LIT("{"),
        SLICE_LIT("{} x"),
        SLICE_LIT("{\"a\":1,\"a\":2}"),
        SLICE_LIT("{\"a\":\"\\u0000\"}"),
        SLICE_LIT("{\"a\":1}\0"),
        SLICE_LIT("[99999999999999999999]"),
        SLICE_LIT("[1e999]"),
        SLICE_LIT("[\"\xff\"]"),
        SLICE_LIT("{'a':1}"),
        SLICE_LIT("[NaN]"),
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct err e = { 0 };
        assert_null(json_parse(bad[i], &e));
        assert_int_equal(e.code, -EINVAL);
        assert_memory_equal(e.msg, "line 1 column ", 14);
    }
}

static void test_deep_nesting_is_refused_before_it_is_parsed(void **state)
{
    (void)state;
    static char deep[200000];
    memset(deep, '[', sizeof(deep));
    struct err e = { 0 };
    assert_null(json_parse(slice_of(deep, sizeof(deep)), &e));
    assert_int_equal(e.code, -EINVAL);
    assert_non_null(strstr(e.msg, "deeper"));
    /* Brackets in strings and one after the other do not count. */
    memset(deep, ' ', sizeof(deep));
    deep[0] = '[';
    deep[1] = '"';
    memset(deep + 2, '[', 1000);
    memcpy(deep + 1002, "\\\"[[\",[]", 8);
    for (int i = 0; i < 500; i++)
        memcpy(deep + 1010 + 3 * i, ",[]", 3);
    deep[1010 + 1500] = ']';
    json_t *v = json_parse(slice_of(deep, 1010 + 1501), &e);
    assert_non_null(v);
    assert_int_equal(json_array_size(v), 502);
    json_decref(v);
}

static void test_getters_read_what_is_there(void **state)
{
    (void)state;
    json_t *v = must_parse("{\"s\":\"x\",\"b\":true,\"n\":42,\"o\":{},\"a\":[1]}");
    struct json_obj o;
    struct err e = { 0 };
    assert_int_equal(json_obj_of(v, "", &o, &e), 0);
    const char *s = NULL;
    bool b = false;
    uint64_t n = 0;
    json_t *obj = NULL, *arr = NULL;
    assert_int_equal(json_get_str(&o, "s", &s, &e), 0);
    assert_int_equal(json_get_bool(&o, "b", &b, &e), 0);
    assert_int_equal(json_get_u64(&o, "n", 0, 100, &n, &e), 0);
    assert_int_equal(json_get_obj(&o, "o", &obj, &e), 0);
    assert_int_equal(json_get_array(&o, "a", &arr, &e), 0);
    assert_string_equal(s, "x");
    assert_true(b);
    assert_int_equal(n, 42);
    assert_true(json_is_object(obj));
    assert_int_equal(json_array_size(arr), 1);
    assert_int_equal(e.code, 0);
    json_decref(v);
}

static void test_missing_and_null_leave_the_default(void **state)
{
    (void)state;
    json_t *v = must_parse("{\"s\":null,\"n\":null}");
    struct json_obj o;
    assert_int_equal(json_obj_of(v, "vm", &o, NULL), 0);
    const char *s = "default";
    bool b = true;
    uint64_t n = 7;
    json_t *obj = v;
    assert_int_equal(json_get_str(&o, "s", &s, NULL), 0);
    assert_int_equal(json_get_bool(&o, "b", &b, NULL), 0);
    assert_int_equal(json_get_u64(&o, "n", 0, 1, &n, NULL), 0);
    assert_int_equal(json_get_obj(&o, "o", &obj, NULL), 0);
    assert_int_equal(json_get_array(&o, "a", &obj, NULL), 0);
    assert_string_equal(s, "default");
    assert_true(b);
    assert_int_equal(n, 7);
    assert_ptr_equal(obj, v);
    json_decref(v);
}

static void test_wrong_types_name_the_path(void **state)
{
    (void)state;
    json_t *v = must_parse("{\"memory_mb\":\"big\",\"n\":1.5,\"neg\":-1,\"big\":4096}");
    struct json_obj o;
    struct err e = { 0 };
    json_obj_of(v, "vm", &o, &e);
    uint64_t n = 7;
    const char *s = "d";
    bool b = true;
    json_t *j = NULL;
    assert_int_equal(json_get_u64(&o, "memory_mb", 0, 10, &n, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.memory_mb: not an integer");
    assert_int_equal(json_get_u64(&o, "n", 0, 10, &n, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.n: not an integer");
    assert_int_equal(json_get_u64(&o, "neg", 0, 10, &n, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.neg: -1 is not in 0..10");
    assert_int_equal(json_get_u64(&o, "big", 64, 1024, &n, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.big: 4096 is not in 64..1024");
    assert_int_equal(json_get_str(&o, "n", &s, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.n: not a string");
    assert_int_equal(json_get_bool(&o, "n", &b, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.n: not true or false");
    assert_int_equal(json_get_obj(&o, "n", &j, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.n: not an object");
    assert_int_equal(json_get_array(&o, "n", &j, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.n: not an array");
    assert_int_equal(n, 7);
    assert_string_equal(s, "d");
    assert_null(j);
    json_decref(v);
}

static void test_only_objects_are_read(void **state)
{
    (void)state;
    json_t *v = must_parse("[1]");
    struct json_obj o;
    struct err e = { 0 };
    assert_int_equal(json_obj_of(v, "", &o, &e), -EINVAL);
    assert_string_equal(e.msg, "not an object");
    assert_int_equal(json_obj_of(v, "vm.pool", &o, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.pool: not an object");
    assert_int_equal(json_obj_of(NULL, "x", &o, &e), -EINVAL);
    json_decref(v);
}

static void test_unknown_keys_get_a_suggestion(void **state)
{
    (void)state;
    static const char *const known[] = { "memory_mb", "cpus", "kernel", NULL };
    json_t *v = must_parse("{\"cpus\":1,\"memroy_mb\":2}");
    struct json_obj o;
    struct err e = { 0 };
    json_obj_of(v, "vm", &o, &e);
    assert_int_equal(json_check_keys(&o, known, &e), -EINVAL);
    assert_string_equal(e.msg, "vm.memroy_mb: unknown key; did you mean \"memory_mb\"?");
    json_decref(v);
    v = must_parse("{\"z\\u001b\":1}");
    json_obj_of(v, "", &o, &e);
    assert_int_equal(json_check_keys(&o, known, &e), -EINVAL);
    assert_string_equal(e.msg, "z?: unknown key (known: memory_mb, cpus, kernel)");
    json_decref(v);
    v = must_parse("{\"cpus\":1,\"kernel\":2}");
    json_obj_of(v, "", &o, &e);
    assert_int_equal(json_check_keys(&o, known, &e), 0);
    json_decref(v);
}

static void test_very_long_keys_are_cut_in_the_message(void **state)
{
    (void)state;
    char text[600] = "{\"";
    memset(text + 2, 'k', 500);
    memcpy(text + 502, "\":1}", 5);
    json_t *v = must_parse(text);
    struct json_obj o;
    struct err e = { 0 };
    static const char *const known[] = { "a", NULL };
    json_obj_of(v, "", &o, &e);
    assert_int_equal(json_check_keys(&o, known, &e), -EINVAL);
    assert_true(strlen(e.msg) < 100);
    json_decref(v);
}

static void test_nearest_tolerates_a_few_slips(void **state)
{
    (void)state;
    static const char *const known[] = { "start", "stop", "status", "template", NULL };
    assert_string_equal(json_nearest("strat", known), "start");
    assert_string_equal(json_nearest("stpo", known), "stop");
    assert_string_equal(json_nearest("templat", known), "template");
    assert_string_equal(json_nearest("statuss", known), "status");
    assert_null(json_nearest("qqq", known));
    assert_null(json_nearest("", known));
}

static void test_a_missing_file_is_named(void **state)
{
    (void)state;
    struct err e = { 0 };
    assert_null(json_parse_file("/nonexistent/x.json", 1000, &e));
    assert_int_equal(e.code, -ENOENT);
    assert_non_null(strstr(e.msg, "/nonexistent/x.json"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_texts_are_refused_with_a_position),
        cmocka_unit_test(test_deep_nesting_is_refused_before_it_is_parsed),
        cmocka_unit_test(test_getters_read_what_is_there),
        cmocka_unit_test(test_missing_and_null_leave_the_default),
        cmocka_unit_test(test_wrong_types_name_the_path),
        cmocka_unit_test(test_only_objects_are_read),
        cmocka_unit_test(test_unknown_keys_get_a_suggestion),
        cmocka_unit_test(test_very_long_keys_are_cut_in_the_message),
        cmocka_unit_test(test_nearest_tolerates_a_few_slips),
        cmocka_unit_test(test_a_missing_file_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
