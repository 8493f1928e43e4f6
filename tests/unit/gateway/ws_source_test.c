#include "gateway/jupyter/ws_source.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct jp_msg *message(size_t n_buffers, const struct slice *buffers)
{
    struct jp_parts p = {
        .channel = JP_IOPUB,
        .header = SLICE_LIT("{\"msg_id\":\"1\",\"msg_type\":\"stream\"}"),
        .parent = SLICE_LIT("{}"),
        .metadata = SLICE_LIT("{}"),
        .content = SLICE_LIT("{\"name\":\"stdout\",\"text\":\"NaN\"}"),
        .buffers = buffers,
        .n_buffers = n_buffers,
    };
    struct jp_msg *m = NULL;
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    return m;
}

/* Read everything in pieces of `step`; checks that only the last piece says so. */
static void read_all(struct ws_source *s, size_t step, struct buf *out, size_t *ret_pieces)
{
    uint8_t *p = malloc(step);
    bool last = false;
    *ret_pieces = 0;
    while (!last) {
        size_t n = ws_source_read(s, p, step, &last);
        assert_true(n > 0);
        assert_int_equal(buf_append(out, p, n), 0);
        ++*ret_pieces;
    }
    free(p);
}

static void test_a_small_message_is_one_piece_equal_to_the_encoding(void **state)
{
    static const enum jp_ws_proto protos[] = { JP_WS_LEGACY, JP_WS_V1 };
    struct jp_msg *m = message(0, NULL);
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct ws_source s;
        struct jp_ws_opts o = { 0 };
        struct buf want, got;
        bool binary = false;
        size_t pieces = 0;
        buf_init(&want, 10000);
        buf_init(&got, 10000);
        ws_source_init(&s);
        assert_false(ws_source_busy(&s));
        assert_int_equal(jp_ws_encode(protos[i], &o, m, &want, &binary), 0);
        assert_int_equal(ws_source_set(&s, protos[i], &o, m), 0);
        assert_true(ws_source_busy(&s));
        assert_int_equal(s.binary, binary);
        read_all(&s, 4096, &got, &pieces);
        assert_int_equal(pieces, 1);
        assert_true(slice_eq(buf_slice(&want), buf_slice(&got)));
        ws_source_clear(&s);
        assert_false(ws_source_busy(&s));
        buf_fini(&want);
        buf_fini(&got);
        ws_source_fini(&s);
    }
    assert_int_equal(m->refs, 1);
    jp_msg_unref(m);
}

static void test_pieces_of_any_size_add_up_with_empty_buffers_in_between(void **state)
{
    static const uint8_t big[5000] = { 1, 2, 3 };
    const struct slice buffers[] = { slice_of(big, 0), slice_of(big, sizeof(big)), slice_of(big, 1),
                                     slice_of(big, 0), slice_of(big, 0) };
    static const enum jp_ws_proto protos[] = { JP_WS_LEGACY, JP_WS_V1 };
    (void)state;
    for (size_t n = 1; n <= 5; n++) {
        struct jp_msg *m = message(n, buffers);
        for (size_t i = 0; i < 2; i++) {
            static const size_t steps[] = { 1, 7, 64, 5000, 5001, 100000 };
            struct jp_ws_opts o = { 0 };
            struct buf want;
            bool binary = false;
            buf_init(&want, 100000);
            assert_int_equal(jp_ws_encode(protos[i], &o, m, &want, &binary), 0);
            for (size_t k = 0; k < sizeof(steps) / sizeof(steps[0]); k++) {
                struct ws_source s;
                struct buf got;
                size_t pieces = 0;
                buf_init(&got, 100000);
                ws_source_init(&s);
                assert_int_equal(ws_source_set(&s, protos[i], &o, m), 0);
                read_all(&s, steps[k], &got, &pieces);
                assert_int_equal(pieces, (want.len + steps[k] - 1) / steps[k]);
                assert_true(slice_eq(buf_slice(&want), buf_slice(&got)));
                ws_source_fini(&s);
                buf_fini(&got);
            }
            buf_fini(&want);
        }
        jp_msg_unref(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_small_message_is_one_piece_equal_to_the_encoding),
        cmocka_unit_test(test_pieces_of_any_size_add_up_with_empty_buffers_in_between),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
