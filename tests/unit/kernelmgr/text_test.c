#include "kernelmgr/text.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void terminal_text_becomes_plain(void **state)
{
    static const struct {
        const char *in, *want;
    } cases[] = {
        { "", "" },
        { "plain \xc3\xa9\n", "plain \xc3\xa9\n" },
        { "\x1b[31mred\x1b[0m", "red" },
        { "a\x1b[A\x1b[2K\x1b[?25lb", "ab" },
        { "\x1b]8;;http://e\x07link\x1b]8;;\x07", "link" },
        { "\x1b]0;title\x1b\\x", "x" },
        { "lone \x1b", "lone " },
        { "\x1b[31", "" },
        { "\x1b]8;;never ends", "" },
        { "\x1b"
          "7saved\x1b"
          "8",
          "7saved8" },
        { " 10%\r 50%\r100%\n", "100%\n" },
        { "first\n 10%\r 50%", "first\n 50%" },
        { "dos\r\nline\r\n", "dos\nline\n" },
        { "kept\r", "kept" },
        { "kept\r\r\n", "kept\n" },
        { "ab\b\bc", "c" },
        { "x\n\by", "x\ny" },
        { "\xc3\xa9\bz", "z" },
        { "bell\x07 nul\x01 tab\t", "bell nul tab\t" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct buf b;
        buf_init(&b, 1000);
        assert_int_equal(km_text_plain(slice_str(cases[i].in), &b), 0);
        assert_string_equal(buf_cstr(&b), cases[i].want);
        buf_fini(&b);
    }
}

static void a_newline_is_added_once_and_only_where_needed(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 10);
    assert_int_equal(km_text_newline(&b), 0);
    assert_int_equal(b.len, 0);
    buf_append_str(&b, "x");
    assert_int_equal(km_text_newline(&b), 0);
    assert_int_equal(km_text_newline(&b), 0);
    assert_string_equal(buf_cstr(&b), "x\n");
    buf_fini(&b);
}

static void a_full_buffer_is_an_error(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 3);
    assert_true(km_text_plain(slice_str("four"), &b) < 0);
    buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(terminal_text_becomes_plain),
        cmocka_unit_test(a_newline_is_added_once_and_only_where_needed),
        cmocka_unit_test(a_full_buffer_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
