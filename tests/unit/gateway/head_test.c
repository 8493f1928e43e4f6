#include "gateway/http/head.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct gw_head head(const char *text)
{
    struct gw_head h;
    assert_int_equal(gw_head_parse(slice_str(text), &h), 1);
    return h;
}

static int status(const char *method, const char *lines)
{
    char text[2000];
    snprintf(text, sizeof(text), "%s /x HTTP/1.1\r\nHost: h\r\n%s\r\n", method, lines);
    return head(text).status;
}

static void test_a_head_is_taken_apart(void **state)
{
    static const char text[] =
        "\r\nPOST /a%20b?c=d HTTP/1.1\r\nHost:  h:1 \r\nX-Unknown: y\r\n"
        "authorization:token T\r\nContent-Length: 12\r\nConnection: Keep-Alive, Upgrade\r\n"
        "Upgrade: WebSocket\r\nExpect: 100-continue\r\n\r\nrest";
    struct gw_head h = head(text);
    (void)state;
    assert_int_equal(h.status, 0);
    assert_int_equal(h.method, GW_POST);
    assert_true(slice_eq_str(h.target, "/a%20b?c=d"));
    assert_true(slice_eq_str(h.header[GW_H_HOST], "h:1"));
    assert_true(slice_eq_str(h.header[GW_H_AUTHORIZATION], "token T"));
    assert_int_equal(h.length, 12);
    assert_true(h.http11 && h.keepalive && h.upgrade_ws && h.expect_continue);
    assert_false(h.chunked);
    assert_int_equal(h.size, sizeof(text) - 1 - 4);
    assert_null(h.header[GW_H_COOKIE].p);
}

static void test_an_unfinished_head_asks_for_more_at_every_byte(void **state)
{
    static const char text[] = "GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n\r\n";
    struct gw_head h;
    (void)state;
    for (size_t n = 0; n < sizeof(text) - 1; n++)
        assert_int_equal(gw_head_parse(slice_of(text, n), &h), 0);
    assert_int_equal(gw_head_parse(slice_of(text, sizeof(text) - 1), &h), 1);
}

static void test_bare_line_feeds_end_lines_too(void **state)
{
    (void)state;
    assert_int_equal(head("GET / HTTP/1.1\nHost: h\n\n").status, 0);
}

static void test_ambiguous_framing_is_refused(void **state)
{
    static const struct {
        const char *method, *lines;
        int status;
    } table[] = {
        { "POST", "", 0 },
        { "POST", "Content-Length: 0\r\n", 0 },
        { "POST", "Content-Length: -1\r\n", 400 },
        { "POST", "Content-Length: +5\r\n", 400 },
        { "POST", "Content-Length: 5, 5\r\n", 400 },
        { "POST", "Content-Length: 0x10\r\n", 400 },
        { "POST", "Content-Length: 1e3\r\n", 400 },
        { "POST", "Content-Length:\r\n", 400 },
        { "POST", "Content-Length: 12345678901234567890\r\n", 400 },
        { "POST", "Content-Length: 5\r\nContent-Length: 5\r\n", 400 },
        { "POST", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400 },
        { "POST", "Transfer-Encoding: chunked\r\n", 0 },
        { "GET", "Transfer-Encoding: Chunked\r\n", 0 },
        { "POST", "Transfer-Encoding: gzip, chunked\r\n", 501 },
        { "POST", "Transfer-Encoding: chunked, chunked\r\n", 501 },
        { "POST", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400 },
        { "POST", "Transfer-Encoding : chunked\r\n", 400 },
        { "POST", "A: b\r\n folded\r\n", 400 },
        { "POST", "A\r\n", 400 },
        { "POST", ": b\r\n", 400 },
        { "POST", "A: b\rC: d\r\n", 400 },
        { "POST", "A: \x01\r\n", 400 },
        { "POST", "Host: other\r\n", 400 },
        { "BREW", "", 501 },
        { "get", "", 501 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (status(table[i].method, table[i].lines) != table[i].status)
            fail_msg("case %zu: %d", i, status(table[i].method, table[i].lines));
}

static void test_what_is_no_request_is_refused_without_waiting(void **state)
{
    static const char *const bad[] = { "hello\r\n",           "GET /\r\n",
                                       "GET  / HTTP/1.1\r\n", "GET / HTTP/1.1 \r\n",
                                       "GET / HTTP/1.x\r\n",  " GET / HTTP/1.1\r\n",
                                       "\x16\x03\x01\n",      "GET /a b HTTP/1.1\r\n" };
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(head(bad[i]).status, 400);
    assert_int_equal(head("GET / HTTP/2.0\r\n").status, 505);
    assert_int_equal(head("GET / HTTP/1.1\r\n\r\n").status, 400); /* no Host */
    assert_int_equal(head("GET / HTTP/1.0\r\n\r\n").status, 0);
    struct gw_head h;
    assert_int_equal(gw_head_parse(slice_of("GET / HTTP/1.1\0x\r\n", 18), &h), 1);
    assert_int_equal(h.status, 400);
}

static void test_sizes_are_limited(void **state)
{
    static char big[GW_HEAD_MAX + 100];
    struct gw_head h;
    (void)state;
    memset(big, 'a', sizeof(big));
    assert_int_equal(gw_head_parse(slice_of(big, GW_HEAD_MAX), &h), 0);
    assert_int_equal(gw_head_parse(slice_of(big, sizeof(big)), &h), 1);
    assert_int_equal(h.status, 414);
    memcpy(big, "GET / HTTP/1.1\r\nX: ", 19);
    assert_int_equal(gw_head_parse(slice_of(big, sizeof(big)), &h), 1);
    assert_int_equal(h.status, 431);
    memcpy(big, "GET /aaaaaaaaaaaaaa", 19);
    memcpy(big + GW_URI_MAX + 10, " HTTP/1.1\r\nHost: h\r\n\r\n", 22);
    assert_int_equal(gw_head_parse(slice_of(big, sizeof(big)), &h), 1);
    assert_int_equal(h.status, 414);
    size_t n = (size_t)snprintf(big, sizeof(big), "GET / HTTP/1.1\r\nHost: h\r\n");
    for (int i = 0; i < 101; i++)
        n += (size_t)snprintf(big + n, sizeof(big) - n, "A: b\r\n");
    n += (size_t)snprintf(big + n, sizeof(big) - n, "\r\n");
    assert_int_equal(gw_head_parse(slice_of(big, n), &h), 1);
    assert_int_equal(h.status, 431);
}

static void test_keep_alive_follows_version_and_header(void **state)
{
    (void)state;
    assert_true(head("GET / HTTP/1.1\r\nHost: h\r\n\r\n").keepalive);
    assert_false(head("GET / HTTP/1.1\r\nHost: h\r\nConnection: x, CLOSE\r\n\r\n").keepalive);
    assert_false(head("GET / HTTP/1.0\r\n\r\n").keepalive);
    assert_true(head("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").keepalive);
}

static void test_targets_are_decoded_once_and_resolved(void **state)
{
    static const struct {
        const char *target;
        int r;
        const char *path, *query;
    } table[] = {
        { "/", 0, "/", "" },
        { "/a/b", 0, "/a/b", "" },
        { "/a/b/", 0, "/a/b/", "" },
        { "//a///b", 0, "/a/b", "" },
        { "/a/./b/../c", 0, "/a/c", "" },
        { "/a/..", 0, "/", "" },
        { "/a/b/..", 0, "/a/", "" },
        { "/../../etc", 0, "/etc", "" },
        { "/a?b=c?d", 0, "/a", "b=c?d" },
        { "/a%20b%5B%c3%A9", 0, "/a b[\xc3\xa9", "" },
        { "/a%2520", 0, "/a%20", "" },
        { "/a+b", 0, "/a+b", "" },
        { "http://h:1/x?y", 0, "/x", "y" },
        { "http://h", 0, "/", "" },
        { "/a%2Fb", -ENOENT, "", "" },
        { "/%2e%2e/x", -ENOENT, "", "" },
        { "/%2E", -ENOENT, "", "" },
        { "/.%2e", -ENOENT, "", "" },
        { "/a%00b", -EINVAL, "", "" },
        { "/a%zz", -EINVAL, "", "" },
        { "/a%2", -EINVAL, "", "" },
        { "/%", -EINVAL, "", "" },
        { "*", -EINVAL, "", "" },
        { "x", -EINVAL, "", "" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        char path[100];
        struct slice q = SLICE_NULL;
        int r = gw_target_split(slice_str(table[i].target), path, sizeof(path), &q);
        if (r != table[i].r)
            fail_msg("%s: %d", table[i].target, r);
        if (r)
            continue;
        assert_string_equal(path, table[i].path);
        assert_true(slice_eq_str(q, table[i].query));
    }
    char small[8];
    struct slice q;
    assert_int_equal(gw_target_split(slice_str("/aaaaaaaaaaaaaaaaa"), small, sizeof(small), &q),
                     -EINVAL);
    assert_int_equal(gw_target_split(slice_str("/a/a/a/a/a/a"), small, sizeof(small), &q), -EINVAL);
}

static void test_query_arguments_are_decoded_leniently(void **state)
{
    char out[20];
    (void)state;
    gw_query_decode(slice_str("a=b%26+c%3d%zz%"), out, sizeof(out));
    assert_string_equal(out, "a=b& c=%zz%");
    gw_query_decode(slice_str("0123456789012345678901234567890"), out, sizeof(out));
    assert_string_equal(out, "0123456789012345678");
    gw_query_decode(slice_str("%00"), out, sizeof(out));
    assert_string_equal(out, "%00");
}

static void test_lists_are_searched_by_token(void **state)
{
    (void)state;
    assert_true(gw_list_has(slice_str("a, Upgrade"), "upgrade"));
    assert_true(gw_list_has(slice_str(" upgrade "), "upgrade"));
    assert_false(gw_list_has(slice_str("upgrades,xupgrade"), "upgrade"));
    assert_false(gw_list_has(SLICE_NULL, "upgrade"));
    assert_false(gw_list_has(slice_str(", ,"), "upgrade"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_head_is_taken_apart),
        cmocka_unit_test(test_an_unfinished_head_asks_for_more_at_every_byte),
        cmocka_unit_test(test_bare_line_feeds_end_lines_too),
        cmocka_unit_test(test_ambiguous_framing_is_refused),
        cmocka_unit_test(test_what_is_no_request_is_refused_without_waiting),
        cmocka_unit_test(test_sizes_are_limited),
        cmocka_unit_test(test_keep_alive_follows_version_and_header),
        cmocka_unit_test(test_targets_are_decoded_once_and_resolved),
        cmocka_unit_test(test_query_arguments_are_decoded_leniently),
        cmocka_unit_test(test_lists_are_searched_by_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
