#include "common/mem.h"
#include "common/rdwr.h"
#include "proto/gl_priv.h"
#include "vectors.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct gl_chunk_pool pool;

static void put_n(struct gl_queue *q, enum gl_type type, uint32_t stream, size_t n, uint8_t fill)
{
    uint8_t *bytes = xmalloc(n + 1);
    struct slice part = slice_of(bytes, n);

    memset(bytes, fill, n);
    assert_int_equal(gl_queue_put(q, &pool, type, stream, &part, 1), 0);
    free(bytes);
}

/* Take everything out, `step` bytes at a time; frames as "type:length[+]" into text. */
static void drain(struct gl_queue *q, uint32_t *credit, size_t step, char *text, size_t size)
{
    struct buf all;

    buf_init(&all, 64 << 20);
    while (gl_queue_ready(q, *credit)) {
        struct slice s = gl_queue_front(q, *credit, 100000);
        assert_true(s.n > 0);
        if (s.n > step)
            s.n = step;
        assert_int_equal(buf_append_slice(&all, s), 0);
        gl_queue_consume(q, &pool, s.n, credit);
    }
    text[0] = '\0';
    for (struct slice s = buf_slice(&all); s.n;) {
        struct gl_header h;
        const struct gl_type_info *info;
        size_t len = strlen(text);

        assert_true(s.n >= GL_HEADER);
        assert_int_equal(gl_header_get(s.p, &h, &info, NULL), 0);
        assert_true(s.n >= GL_HEADER + h.length);
        snprintf(text + len, size - len, "%u:%u%s ", h.type, h.length, h.flags ? "+" : "");
        s.p += GL_HEADER + h.length;
        s.n -= GL_HEADER + h.length;
    }
    buf_fini(&all);
}

static void messages_are_cut_into_frames(void **state)
{
    static const size_t steps[] = { 1, 7, 4096, SIZE_MAX };
    char text[200];

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        struct gl_queue q = { 0 };
        uint32_t credit = 1 << 20;

        put_n(&q, GL_KERNEL_MSG, 1, 0, 0);
        put_n(&q, GL_KERNEL_MSG, 1, 65536, 1);
        put_n(&q, GL_KERNEL_MSG, 1, 65537, 2);
        put_n(&q, GL_KERNEL_MSG, 1, 200000, 3);
        assert_int_equal(q.bytes, gl_queue_framed(0) + gl_queue_framed(65536) +
                                      gl_queue_framed(65537) + gl_queue_framed(200000));
        drain(&q, &credit, steps[i], text, sizeof(text));
        assert_string_equal(text, "20:0 20:65536 20:65536+ 20:1 20:65536+ 20:65536+ 20:65536+ "
                                  "20:3392 ");
        assert_int_equal(credit, (1 << 20) - 65536 - 65537 - 200000);
        assert_int_equal(q.bytes, 0);
        assert_null(q.head);
    }
    gl_chunk_pool_fini(&pool);
}

static void parts_are_gathered_across_frame_borders(void **state)
{
    uint8_t *all = xmalloc(150000), *got = xmalloc(160000);
    const struct slice parts[] = { { all, 0 },
                                   { all, 1 },
                                   { all + 1, 65535 },
                                   { all, 0 },
                                   { all + 65536, 1000 },
                                   { all + 66536, 83464 },
                                   { all + 99999, 0 } };
    struct gl_queue q = { 0 };
    uint32_t credit = UINT32_MAX;
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < 150000; i++)
        all[i] = (uint8_t)(i * 7 + i / 251);
    assert_int_equal(gl_queue_put(&q, &pool, GL_KERNEL_MSG, 1, parts, 7), 0);
    while (gl_queue_ready(&q, credit)) {
        struct slice s = gl_queue_front(&q, credit, 1);
        memcpy(got + n, s.p + GL_HEADER, s.n - GL_HEADER);
        n += s.n - GL_HEADER;
        gl_queue_consume(&q, &pool, s.n, &credit);
    }
    assert_int_equal(n, 150000);
    assert_memory_equal(got, all, 150000);
    gl_chunk_pool_fini(&pool);
    free(all);
    free(got);
}

static void bulk_waits_for_credit_and_exempt_frames_do_not(void **state)
{
    struct gl_queue q = { 0 };
    uint32_t credit = 99;
    char text[200];

    (void)state;
    put_n(&q, GL_KERNEL_STATE, 1, 50, 'a');
    put_n(&q, GL_KERNEL_MSG, 1, 100, 'b');
    put_n(&q, GL_KERNEL_STATE, 1, 60, 'c');
    assert_int_equal(q.n_exempt, 2);
    drain(&q, &credit, SIZE_MAX, text, sizeof(text));
    assert_string_equal(text, "17:50 ");
    assert_int_equal(q.n_exempt, 1);
    assert_false(gl_queue_ready(&q, credit));
    assert_int_equal(gl_queue_front(&q, credit, 1000).n, 0);
    credit = 100;
    drain(&q, &credit, SIZE_MAX, text, sizeof(text));
    assert_string_equal(text, "20:100 17:60 ");
    assert_int_equal(credit, 0);
    gl_chunk_pool_fini(&pool);
}

static void prune_keeps_the_begun_message_and_exempt_frames(void **state)
{
    struct gl_queue q = { 0 };
    uint32_t credit = 10 << 20;
    char text[200];

    (void)state;
    put_n(&q, GL_KERNEL_MSG, 1, 150000, 'a');
    put_n(&q, GL_KERNEL_MSG, 1, 100, 'b');
    put_n(&q, GL_KERNEL_STATE, 1, 70000, 'c');
    put_n(&q, GL_KERNEL_MSG, 1, 300000, 'd');
    put_n(&q, GL_KERNEL_STATE, 1, 5, 'e');
    gl_queue_consume(&q, &pool, GL_HEADER + 65536, &credit); /* first frame of three is out */
    gl_queue_prune(&q, &pool);
    assert_int_equal(q.bytes,
                     2 * GL_HEADER + 150000 - 65536 + gl_queue_framed(70000) + gl_queue_framed(5));
    drain(&q, &credit, 1000, text, sizeof(text));
    assert_string_equal(text, "20:65536+ 20:18928 17:65536+ 17:4464 17:5 ");
    assert_int_equal(q.n_exempt, 0);
    gl_chunk_pool_fini(&pool);
}

static void prune_finishes_a_half_written_frame(void **state)
{
    struct gl_queue q = { 0 };
    uint32_t credit = 10 << 20;

    (void)state;
    put_n(&q, GL_KERNEL_MSG, 1, 100, 'a');
    put_n(&q, GL_KERNEL_MSG, 1, 100, 'b');
    gl_queue_consume(&q, &pool, 50, &credit);
    gl_queue_prune(&q, &pool);
    assert_int_equal(q.bytes, 100 + GL_HEADER - 50);
    gl_queue_consume(&q, &pool, q.bytes, &credit);
    put_n(&q, GL_KERNEL_MSG, 1, 100, 'c'); /* and works on */
    gl_queue_prune(&q, &pool);
    assert_int_equal(q.bytes, 0);
    assert_null(q.tail);
    put_n(&q, GL_KERNEL_MSG, 1, 100, 'd');
    gl_queue_clear(&q, &pool);
    assert_int_equal(q.bytes, 0);
    gl_chunk_pool_fini(&pool);
}

static void failed_allocation_leaves_the_queue_as_it_was(void **state)
{
    struct gl_queue q = { 0 };
    uint8_t *bytes = xcalloc(1, 1 << 20);
    struct slice part = slice_of(bytes, 1 << 20);
    uint32_t credit = 10 << 20;
    char text[100];
    int failures = 0;

    (void)state;
    for (int with = 0; with < 2; with++) {
        if (with)
            put_n(&q, GL_KERNEL_STATE, 1, 10, 'x');
        for (unsigned n = 1; n < 20; n++) {
            struct gl_queue before = q;
            mem_fail_at(n);
            int r = gl_queue_put(&q, &pool, GL_KERNEL_STATE, 1, &part, 1);
            mem_fail_at(0);
            if (r == 0)
                break;
            assert_int_equal(r, -ENOMEM);
            assert_int_equal(q.bytes, before.bytes);
            assert_int_equal(q.n_exempt, before.n_exempt);
            assert_ptr_equal(q.tail, before.tail);
            gl_chunk_pool_fini(&pool);
            failures++;
        }
        gl_queue_clear(&q, &pool);
    }
    assert_true(failures >= 4);
    put_n(&q, GL_KERNEL_MSG, 1, 10, 'y');
    drain(&q, &credit, SIZE_MAX, text, sizeof(text));
    assert_string_equal(text, "20:10 ");
    gl_chunk_pool_fini(&pool);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_are_cut_into_frames),
        cmocka_unit_test(parts_are_gathered_across_frame_borders),
        cmocka_unit_test(bulk_waits_for_credit_and_exempt_frames_do_not),
        cmocka_unit_test(prune_keeps_the_begun_message_and_exempt_frames),
        cmocka_unit_test(prune_finishes_a_half_written_frame),
        cmocka_unit_test(failed_allocation_leaves_the_queue_as_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
