#include "common/rdwr.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_what_is_written_is_read_back(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 100);
    assert_int_equal(wr_u8(&b, 0xfe), 0);
    assert_int_equal(wr_u16le(&b, 0x1234), 0);
    assert_int_equal(wr_u32le(&b, 0x89abcdef), 0);
    assert_int_equal(wr_u64le(&b, UINT64_C(0x0102030405060708)), 0);
    assert_int_equal(wr_u32be(&b, 0xdeadbeef), 0);
    assert_memory_equal(buf_slice(&b).p,
                        "\xfe\x34\x12\xef\xcd\xab\x89\x08\x07\x06\x05\x04\x03\x02\x01"
                        "\xde\xad\xbe\xef",
                        19);
    struct rd r = rd_of(buf_slice(&b));
    assert_int_equal(rd_u8(&r), 0xfe);
    assert_int_equal(rd_u16le(&r), 0x1234);
    assert_int_equal(rd_u32le(&r), 0x89abcdef);
    assert_true(rd_u64le(&r) == UINT64_C(0x0102030405060708));
    assert_false(rd_end(&r));
    assert_int_equal(rd_u32be(&r), 0xdeadbeef);
    assert_true(rd_end(&r));
    assert_true(rd_ok(&r));
    buf_fini(&b);
}

static void test_the_first_short_read_sticks(void **state)
{
    (void)state;
    struct rd r = rd_of(SLICE_LIT("abc"));
    assert_int_equal(rd_u32le(&r), 0);
    assert_false(rd_ok(&r));
    assert_int_equal(rd_u8(&r), 0);
    assert_int_equal(rd_u32be(&r), 0);
    assert_int_equal(rd_bytes(&r, 1).n, 0);
    assert_int_equal(rd_bytes(&r, 0).n, 0);
    assert_int_equal(rd_rest(&r).n, 0);
    assert_false(rd_end(&r));
}

static void test_huge_lengths_are_refused(void **state)
{
    (void)state;
    struct rd r = rd_of(SLICE_LIT("abc"));
    assert_int_equal(rd_bytes(&r, UINT64_MAX).n, 0);
    assert_false(rd_ok(&r));
    r = rd_of(SLICE_LIT("abc"));
    rd_bytes(&r, (UINT64_C(1) << 32) + 1);
    assert_false(rd_ok(&r));
}

static void test_bytes_and_rest_are_views(void **state)
{
    (void)state;
    struct slice s = SLICE_LIT("header/body");
    struct rd r = rd_of(s);
    assert_true(slice_eq_str(rd_bytes(&r, 7), "header/"));
    assert_int_equal(rd_bytes(&r, 0).n, 0);
    struct slice rest = rd_rest(&r);
    assert_true(slice_eq_str(rest, "body"));
    assert_ptr_equal(rest.p, s.p + 7);
    assert_true(rd_end(&r));
    assert_int_equal(rd_rest(&r).n, 0);
    assert_true(rd_ok(&r));
}

static void test_an_empty_input_is_at_its_end(void **state)
{
    (void)state;
    struct rd r = rd_of(SLICE_NULL);
    assert_true(rd_end(&r));
    assert_int_equal(rd_u8(&r), 0);
    assert_false(rd_ok(&r));
}

static void test_writers_report_a_full_buffer(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 3);
    assert_int_equal(wr_u32le(&b, 1), -ENOBUFS);
    assert_int_equal(wr_u64le(&b, 1), -ENOBUFS);
    assert_int_equal(wr_u32be(&b, 1), -ENOBUFS);
    assert_int_equal(b.len, 0);
    assert_int_equal(wr_u16le(&b, 1), 0);
    assert_int_equal(wr_u16le(&b, 1), -ENOBUFS);
    buf_fini(&b);
}

static void test_put_stores_in_the_named_order(void **state)
{
    (void)state;
    uint8_t p[8];
    put_u32le(p, 0x01020304);
    assert_memory_equal(p, "\4\3\2\1", 4);
    put_u32be(p, 0x01020304);
    assert_memory_equal(p, "\1\2\3\4", 4);
    put_u64le(p, UINT64_C(0x0102030405060708));
    assert_memory_equal(p, "\10\7\6\5\4\3\2\1", 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_written_is_read_back),
        cmocka_unit_test(test_the_first_short_read_sticks),
        cmocka_unit_test(test_huge_lengths_are_refused),
        cmocka_unit_test(test_bytes_and_rest_are_views),
        cmocka_unit_test(test_an_empty_input_is_at_its_end),
        cmocka_unit_test(test_writers_report_a_full_buffer),
        cmocka_unit_test(test_put_stores_in_the_named_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
