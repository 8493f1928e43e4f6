#include "gateway/http/chunked.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Feed text in pieces of `step` bytes; the result of the last feed, decoded bytes in out. */
static int feed(const char *text, size_t step, struct buf *out, size_t *ret_used)
{
    struct gw_chunked c;
    size_t n = strlen(text), at = 0, used = 0;
    gw_chunked_init(&c);
    int r = 0;
    while (at < n && r == 0) {
        size_t k = n - at < step ? n - at : step;
        r = gw_chunked_feed(&c, slice_of(text + at, k), &used, out);
        if (r < 0)
            return r;
        at += used;
    }
    *ret_used = at;
    return r;
}

static void test_decodes_whatever_the_pieces_it_comes_in(void **state)
{
    static const char body[] = "4\r\nWiki\r\n5;ext=\"v\"\r\npedia\r\nE\r\n in\r\n\r\nchunks.\r\n"
                               "0\r\nX-Trailer: yes\r\n\r\nGET / HTTP/1.1\r\n";
    (void)state;
    for (size_t step = 1; step <= sizeof(body); step++) {
        struct buf out;
        size_t used = 0;
        buf_init(&out, 100);
        assert_int_equal(feed(body, step, &out, &used), 1);
        assert_true(slice_eq_str(buf_slice(&out), "Wikipedia in\r\n\r\nchunks."));
        assert_int_equal(used, strlen(body) - strlen("GET / HTTP/1.1\r\n"));
        buf_fini(&out);
    }
}

static void test_an_empty_body_is_the_last_chunk_alone(void **state)
{
    struct buf out;
    size_t used = 0;
    (void)state;
    buf_init(&out, 10);
    assert_int_equal(feed("0\r\n\r\n", 100, &out, &used), 1);
    assert_int_equal(out.len, 0);
    assert_int_equal(feed("00000\r\n\r\n", 1, &out, &used), 1);
    assert_int_equal(feed("0 \t\r\n\r\n", 1, &out, &used), 1);
    buf_fini(&out);
}

static void test_an_unfinished_body_asks_for_more(void **state)
{
    static const char *const parts[] = { "4",       "4\r",       "4\r\n",
                                         "4\r\nWi", "4\r\nWiki", "4\r\nWiki\r\n",
                                         "0\r\n",   "0\r\n\r",   "0\r\nA: b\r\n" };
    (void)state;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        struct buf out;
        size_t used = 0;
        buf_init(&out, 10);
        assert_int_equal(feed(parts[i], 100, &out, &used), 0);
        assert_int_equal(used, strlen(parts[i]));
        buf_fini(&out);
    }
}

static void test_malformed_chunks_are_refused(void **state)
{
    static const char *const bad[] = {
        "\r\n",
        "g\r\n",
        "-1\r\n",
        " 4\r\nWiki",
        "0x4\r\n",
        "4\nWiki",
        "4\r\r",
        "4\r\nWikix",
        "4\r\nWiki\rx",
        "4;a\nb\r\n",
        "1234567890123456\r\n",
        "0\r\n\n",
        "0\r\nA\n",
        "0\r\n\rx",
        "0\r\nA: b\rx",
        "4 4\n",
        "4\r\nWiki\n",
    };
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct buf out;
        size_t used = 0;
        buf_init(&out, 100);
        if (feed(bad[i], 1, &out, &used) != -EINVAL)
            fail_msg("taken: case %zu", i);
        buf_fini(&out);
    }
}

static void test_the_limit_is_that_of_the_buffer(void **state)
{
    struct buf out;
    size_t used = 0;
    (void)state;
    buf_init(&out, 6);
    assert_int_equal(feed("3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n", 4, &out, &used), 1);
    buf_fini(&out);
    buf_init(&out, 5);
    assert_int_equal(feed("3\r\nabc\r\n3\r\ndef\r\n", 100, &out, &used), -EFBIG);
    buf_fini(&out);
}

static void test_extensions_and_trailers_are_bounded(void **state)
{
    struct gw_chunked c;
    struct buf out;
    size_t used = 0;
    int r = 0;
    (void)state;
    buf_init(&out, 10);
    gw_chunked_init(&c);
    r = gw_chunked_feed(&c, SLICE_LIT("1;"), &used, &out);
    for (unsigned i = 0; i < 2 * GW_CHUNKED_SKIP_MAX && r == 0; i++)
        r = gw_chunked_feed(&c, SLICE_LIT("x"), &used, &out);
    assert_int_equal(r, -EINVAL);
    gw_chunked_init(&c);
    r = gw_chunked_feed(&c, SLICE_LIT("0\r\n"), &used, &out);
    for (unsigned i = 0; i < GW_CHUNKED_SKIP_MAX && r == 0; i++)
        r = gw_chunked_feed(&c, SLICE_LIT("A: b\r\n"), &used, &out);
    assert_int_equal(r, -EINVAL);
    buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decodes_whatever_the_pieces_it_comes_in),
        cmocka_unit_test(test_an_empty_body_is_the_last_chunk_alone),
        cmocka_unit_test(test_an_unfinished_body_asks_for_more),
        cmocka_unit_test(test_malformed_chunks_are_refused),
        cmocka_unit_test(test_the_limit_is_that_of_the_buffer),
        cmocka_unit_test(test_extensions_and_trailers_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
