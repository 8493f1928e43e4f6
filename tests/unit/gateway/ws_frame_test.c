#include "gateway/jupyter/ws_frame.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Append a client frame: masked unless told otherwise. */
static void put(struct buf *b, unsigned first, const void *data, size_t n, bool masked)
{
    static const uint8_t mask[4] = { 0x11, 0x22, 0x33, 0x44 };
    uint8_t h[GW_WS_HEAD_MAX];
    size_t k = gw_ws_head(h, 0, true, n);
    h[0] = (uint8_t)first;
    h[1] |= masked ? 0x80 : 0;
    assert_int_equal(buf_append(b, h, k), 0);
    if (masked)
        assert_int_equal(buf_append(b, mask, 4), 0);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(
            buf_append_byte(b, (uint8_t)(((const uint8_t *)data)[i] ^ (masked ? mask[i & 3] : 0))),
            0);
}

struct story {
    char text[4000]; /* "M:hello P:x C:" */
    int error;
};

static void tell(struct story *s, enum gw_ws_event ev, struct slice p)
{
    static const char letter[] = { '?', 'M', 'P', 'O', 'C' };
    size_t n = strlen(s->text);
    snprintf(s->text + n, sizeof(s->text) - n, "%c:%.*s ", letter[ev], SLICE_FMT(p));
}

/* Feed in pieces of `step` bytes. */
static struct story feed(const struct buf *in, size_t step, size_t max)
{
    struct story s = { .text = "" };
    struct gw_ws_rx r;
    gw_ws_rx_init(&r, max);
    uint8_t *copy = malloc(in->len + 1);
    memcpy(copy, in->data + in->off, in->len);
    for (size_t at = 0; at < in->len && !s.error;) {
        size_t k = in->len - at < step ? in->len - at : step, used = 0;
        enum gw_ws_event ev;
        struct slice p;
        s.error = gw_ws_rx_feed(&r, copy + at, k, &used, &ev, &p);
        at += used;
        if (!s.error && ev != GW_WS_MORE)
            tell(&s, ev, p);
    }
    free(copy);
    gw_ws_rx_fini(&r);
    return s;
}

static void test_messages_and_controls_come_out_whatever_the_pieces(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 10000);
    put(&b, 0x81, "hello", 5, true);
    put(&b, 0x02, "frag", 4, true);
    put(&b, 0x89, "ping!", 5, true);
    put(&b, 0x00, "men", 3, true);
    put(&b, 0x8a, "", 0, true);
    put(&b, 0x80, "ted", 3, true);
    put(&b, 0x82, "", 0, true);
    put(&b, 0x01, "", 0, true);
    put(&b, 0x80, "", 0, true);
    put(&b, 0x88, "\x03\xe8", 2, true);
    for (size_t step = 1; step < b.len + 1; step++) {
        struct story s = feed(&b, step, 100);
        assert_int_equal(s.error, 0);
        assert_string_equal(s.text, "M:hello P:ping! O: M:fragmented M: M: C:\x03\xe8 ");
    }
    buf_fini(&b);
}

static void test_lengths_of_all_three_forms(void **state)
{
    static const size_t sizes[] = { 0, 1, 125, 126, 127, 65535, 65536, 70000 };
    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        static const size_t steps[] = { 1, 13, 1000, 1000000 };
        uint8_t *data = malloc(sizes[i] + 1);
        struct buf b;
        memset(data, 'x', sizes[i]);
        buf_init(&b, 100000);
        put(&b, 0x82, data, sizes[i], true);
        for (size_t k = 0; k < 4; k++) {
            struct gw_ws_rx r;
            uint8_t *copy = malloc(b.len);
            size_t at = 0, used = 0;
            enum gw_ws_event ev = GW_WS_MORE;
            struct slice p = SLICE_NULL;
            memcpy(copy, b.data, b.len);
            gw_ws_rx_init(&r, 70000);
            while (ev == GW_WS_MORE) {
                size_t n = b.len - at < steps[k] ? b.len - at : steps[k];
                assert_int_equal(gw_ws_rx_feed(&r, copy + at, n, &used, &ev, &p), 0);
                at += used;
            }
            assert_int_equal(at, b.len);
            assert_int_equal(p.n, sizes[i]);
            assert_true(!sizes[i] || memcmp(p.p, data, sizes[i]) == 0);
            gw_ws_rx_fini(&r);
            free(copy);
        }
        buf_fini(&b);
        free(data);
    }
}

static int error_of(unsigned first, size_t n, bool masked, const char *before)
{
    static const uint8_t data[200];
    struct buf b;
    buf_init(&b, 1000);
    if (before)
        put(&b, 0x01, before, strlen(before), true);
    put(&b, first, data, n, masked);
    int r = feed(&b, 1, 1000).error;
    assert_int_equal(feed(&b, 1000, 1000).error, r);
    buf_fini(&b);
    return r;
}

static void test_illegal_frames_are_protocol_errors(void **state)
{
    (void)state;
    assert_int_equal(error_of(0x81, 3, false, NULL), -EPROTO); /* not masked */
    assert_int_equal(error_of(0xc1, 3, true, NULL), -EPROTO);  /* RSV */
    assert_int_equal(error_of(0x83, 3, true, NULL), -EPROTO);  /* reserved opcodes */
    assert_int_equal(error_of(0x8b, 0, true, NULL), -EPROTO);
    assert_int_equal(error_of(0x09, 1, true, NULL), -EPROTO);    /* fragmented control */
    assert_int_equal(error_of(0x89, 126, true, NULL), -EPROTO);  /* long control */
    assert_int_equal(error_of(0x80, 1, true, NULL), -EPROTO);    /* continuation of nothing */
    assert_int_equal(error_of(0x81, 1, true, "start"), -EPROTO); /* new message inside one */
    assert_int_equal(error_of(0x80, 1, true, "start"), 0);
    assert_int_equal(error_of(0x89, 125, true, "start"), 0);
}

static void test_size_limits_hold_before_the_bytes_come(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 100);
    assert_int_equal(buf_append(&b, "\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff\1\2\3\4", 14), 0);
    assert_int_equal(feed(&b, 1, 1000).error, -EMSGSIZE);
    buf_clear(&b);
    put(&b, 0x02, "12345", 5, true);
    put(&b, 0x80, "67890", 5, true);
    assert_int_equal(feed(&b, 3, 10).error, 0);
    assert_int_equal(feed(&b, 3, 9).error, -EMSGSIZE);
    buf_fini(&b);
}

static void test_headers_to_the_client(void **state)
{
    uint8_t h[GW_WS_HEAD_MAX];
    (void)state;
    assert_int_equal(gw_ws_head(h, GW_WS_TEXT, true, 5), 2);
    assert_memory_equal(h, "\x81\x05", 2);
    assert_int_equal(gw_ws_head(h, 0, false, 126), 4);
    assert_memory_equal(h, "\x00\x7e\x00\x7e", 4);
    assert_int_equal(gw_ws_head(h, GW_WS_BINARY, true, 65536), 10);
    assert_memory_equal(h, "\x82\x7f\0\0\0\0\0\1\0\0", 10);
}

static void test_the_accept_key_is_that_of_the_standard(void **state)
{
    char accept[29];
    (void)state;
    gw_ws_accept(slice_str("dGhlIHNhbXBsZSBub25jZQ=="), accept); /* RFC 6455 1.3 */
    assert_string_equal(accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
}

static void test_close_codes_of_peers(void **state)
{
    static const unsigned good[] = { 1000, 1001, 1003, 1007, 1011, 1012, 3000, 4999 },
                          bad[] = { 0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535 };
    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        assert_true(gw_ws_code_ok(good[i]));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(gw_ws_code_ok(bad[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_and_controls_come_out_whatever_the_pieces),
        cmocka_unit_test(test_lengths_of_all_three_forms),
        cmocka_unit_test(test_illegal_frames_are_protocol_errors),
        cmocka_unit_test(test_size_limits_hold_before_the_bytes_come),
        cmocka_unit_test(test_headers_to_the_client),
        cmocka_unit_test(test_the_accept_key_is_that_of_the_standard),
        cmocka_unit_test(test_close_codes_of_peers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
