#include "gateway/http/uri.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_any_spelling_of_base_url_is_normalised(void **state)
{
    static const char *const table[][2] = {
        { "", "/" },
        { "/", "/" },
        { NULL, "/" },
        { "gw", "/gw/" },
        { "/gw", "/gw/" },
        { "/gw/", "/gw/" },
        { "gw/", "/gw/" },
        { "/a/b", "/a/b/" },
        { "//a///b//", "/a/b/" },
        { "fake/path", "/fake/path/" },
        { "~me@x", "/~me@x/" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        char *out = NULL;
        assert_int_equal(gw_base_normalise(table[i][0], &out, NULL), 0);
        assert_string_equal(out, table[i][1]);
        free(out);
    }
}

static void test_a_base_url_that_is_no_path_is_refused_with_its_text(void **state)
{
    static const char *const bad[] = { "/a?b",  "/a#b",  "/a b",   "/a\n",
                                       "/../x", "a/./b", "/a%20b", "/ü" };
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct err e = { 0 };
        char *out = NULL;
        assert_int_equal(gw_base_normalise(bad[i], &out, &e), -EINVAL);
        assert_null(out);
        assert_non_null(strstr(e.msg, "base_url"));
    }
}

static void test_stripping_the_base_respects_segment_borders(void **state)
{
    (void)state;
    assert_string_equal(gw_base_strip("/", "/api"), "/api");
    assert_string_equal(gw_base_strip("/", "/"), "/");
    assert_string_equal(gw_base_strip("/gw/", "/gw/api"), "/api");
    assert_string_equal(gw_base_strip("/gw/", "/gw"), "/");
    assert_string_equal(gw_base_strip("/gw/", "/gw/"), "/");
    assert_null(gw_base_strip("/gw/", "/gwx/api"));
    assert_null(gw_base_strip("/gw/", "/api"));
    assert_null(gw_base_strip("/gw/", "/"));
    assert_null(gw_base_strip("/a/b/", "/a"));
}

static void test_encoding_leaves_nothing_that_could_end_a_header(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 200);
    assert_int_equal(gw_uri_encode(&b, "Py [a b]\xc3\xa9/x?y#z%\r\n", NULL), 0);
    assert_string_equal(buf_cstr(&b), "Py%20%5Ba%20b%5D%C3%A9/x%3Fy%23z%25%0D%0A");
    buf_clear(&b);
    assert_int_equal(gw_uri_encode(&b, "a=b&c", "="), 0);
    assert_string_equal(buf_cstr(&b), "a=b%26c");
    buf_fini(&b);
    buf_init(&b, 3);
    assert_int_equal(gw_uri_encode(&b, "abcd", NULL), -ENOBUFS);
    buf_fini(&b);
}

static void test_query_arguments_are_found_by_their_whole_name(void **state)
{
    char a[] = "token=T=1", b[] = "tokens=x", c[] = "1723", d[] = "token=second";
    char *args[] = { b, c, a, d };
    (void)state;
    assert_string_equal(gw_query_get(args, 4, "token"), "T=1");
    assert_string_equal(gw_query_get(args, 4, "1723"), "");
    assert_null(gw_query_get(args, 4, "tok"));
    assert_null(gw_query_get(args, 0, "token"));
}

static void test_segments_that_lead_elsewhere_are_no_names(void **state)
{
    (void)state;
    assert_true(gw_segment_ok("python3"));
    assert_true(gw_segment_ok("Py [a b]\xc3\xa9"));
    assert_true(gw_segment_ok("...") && gw_segment_ok(".hidden"));
    assert_false(gw_segment_ok(""));
    assert_false(gw_segment_ok("."));
    assert_false(gw_segment_ok(".."));
    assert_false(gw_segment_ok("a/b"));
    assert_false(gw_segment_ok("a\nb"));
    assert_false(gw_segment_ok("a\x7f"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_spelling_of_base_url_is_normalised),
        cmocka_unit_test(test_a_base_url_that_is_no_path_is_refused_with_its_text),
        cmocka_unit_test(test_stripping_the_base_respects_segment_borders),
        cmocka_unit_test(test_encoding_leaves_nothing_that_could_end_a_header),
        cmocka_unit_test(test_query_arguments_are_found_by_their_whole_name),
        cmocka_unit_test(test_segments_that_lead_elsewhere_are_no_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
