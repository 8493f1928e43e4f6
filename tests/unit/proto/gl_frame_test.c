#include "common/buf.h"
#include "common/fs.h"
#include "common/mem.h"
#include "proto/gl_priv.h"
#include "vectors.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void headers_survive_the_codec(void **state)
{
    static const struct gl_header cases[] = {
        { 0, GL_PING, 0, 0 },
        { 2, GL_HELLO, 0, 0 },
        { GL_FRAME_MAX, GL_KERNEL_MSG, GL_FLAG_MORE, GL_STREAMS_MAX - 1 },
        { 4, GL_CREDIT, 0, 1 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint8_t bytes[GL_HEADER];
        struct gl_header h = { 0 };
        const struct gl_type_info *info = NULL;

        gl_header_put(bytes, &cases[i]);
        assert_int_equal(gl_header_get(bytes, &h, &info, NULL), 0);
        assert_int_equal(h.length, cases[i].length);
        assert_int_equal(h.type, cases[i].type);
        assert_int_equal(h.flags, cases[i].flags);
        assert_int_equal(h.stream, cases[i].stream);
        assert_ptr_equal(info, gl_type_info(cases[i].type));
    }
}

/* The bytes in docs/guestlink.md: any implementation must produce these. */
static void header_bytes_are_those_of_the_document(void **state)
{
    static const struct gl_header h = { 300, GL_KERNEL_MSG, GL_FLAG_MORE, 2 };
    static const uint8_t head[] = { 0x2c, 0x01, 0, 0, 20, 1 }, tail[] = { 2, 0, 0, 0 };
    uint32_t sum = 300 * UINT32_C(0x9E3779B1) + (20 | 1 << 8) * UINT32_C(0x85EBCA77) +
                   2 * UINT32_C(0xC2B2AE3D);
    uint8_t bytes[GL_HEADER];

    (void)state;
    gl_header_put(bytes, &h);
    assert_memory_equal(bytes, head, sizeof(head));
    assert_int_equal(bytes[6] | bytes[7] << 8, sum >> 16);
    assert_memory_equal(bytes + 8, tail, sizeof(tail));
}

static void every_flipped_bit_is_noticed(void **state)
{
    const struct gl_header good = { 1000, GL_KERNEL_MSG, 0, 5 };
    uint8_t bytes[GL_HEADER];
    unsigned passed = 0;

    (void)state;
    gl_header_put(bytes, &good);
    for (unsigned bit = 0; bit < GL_HEADER * 8; bit++) {
        struct gl_header h;
        const struct gl_type_info *info;
        struct err e = { 0 };

        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (gl_header_get(bytes, &h, &info, &e) == 0)
            passed++;
        else
            assert_int_equal(e.code, -EPROTO);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_int_equal(passed, 0);
}

static void impossible_headers_are_refused_by_name(void **state)
{
    static const struct {
        struct gl_header h;
        const char *text;
    } cases[] = {
        { { GL_FRAME_MAX + 1, GL_KERNEL_MSG, 0, 1 }, "at most" },
        { { UINT32_MAX, GL_KERNEL_MSG, 0, 1 }, "at most" },
        { { 2, GL_HELLO, 2, 0 }, "flags" },
        { { 2, 0, 0, 0 }, "type 0" },
        { { 2, 15, 0, 0 }, "type 15" },
        { { 2, 22, 0, 1 }, "type 22" },
        { { 2, 32, 0, 0 }, "type 32" },
        { { 2, 255, 0, 0 }, "type 255" },
        { { 2, GL_KERNEL_MSG, 0, GL_STREAMS_MAX }, "streams end" },
        { { 2, GL_KERNEL_MSG, 0, 0 }, "belongs on a kernel stream" },
        { { 2, GL_HELLO, 0, 1 }, "belongs on stream 0" },
        { { 0, GL_KERNEL_MSG, GL_FLAG_MORE, 1 }, "promises more" },
        { { 4, GL_KERNEL_CTL, GL_FLAG_MORE, 1 }, "several frames" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint8_t bytes[GL_HEADER];
        struct gl_header h;
        const struct gl_type_info *info;
        struct err e = { 0 };

        gl_header_put(bytes, &cases[i].h);
        assert_int_equal(gl_header_get(bytes, &h, &info, &e), -EPROTO);
        if (!strstr(e.msg, cases[i].text))
            fail_msg("\"%s\" lacks \"%s\"", e.msg, cases[i].text);
    }
}

static void nothing_but_hello_is_legal_before_hello(void **state)
{
    (void)state;
    for (unsigned t = 0; t < 256; t++) {
        const struct gl_type_info *info = gl_type_info(t);
        if (!info)
            continue;
        for (unsigned r = 0; r < 2; r++)
            assert_int_equal(gl_type_legal(info, (enum gl_role)r, GL_PHASE_HELLO), t == GL_HELLO);
    }
}

static void hello_and_prepare_are_illegal_once_running(void **state)
{
    static const enum gl_type never[] = { GL_HELLO, GL_PREPARE, GL_PREPARED };

    (void)state;
    for (size_t i = 0; i < 3; i++)
        for (unsigned r = 0; r < 2; r++)
            assert_false(gl_type_legal(gl_type_info(never[i]), (enum gl_role)r, GL_PHASE_RUNNING));
}

static void kernel_messages_flow_only_when_running(void **state)
{
    const struct gl_type_info *msg = gl_type_info(GL_KERNEL_MSG);

    (void)state;
    for (unsigned r = 0; r < 2; r++) {
        assert_false(gl_type_legal(msg, (enum gl_role)r, GL_PHASE_IDLE));
        assert_true(gl_type_legal(msg, (enum gl_role)r, GL_PHASE_RUNNING));
    }
}

static void orders_come_from_the_host_and_reports_from_the_guest(void **state)
{
    static const enum gl_type host[] = { GL_PREPARE,  GL_RESUME,       GL_ASSIGN,
                                         GL_SHUTDOWN, GL_KERNEL_START, GL_KERNEL_CTL };
    static const enum gl_type guest[] = { GL_SPECS,        GL_PREPARED,    GL_RESUMED,
                                          GL_ASSIGNED,     GL_LOG,         GL_EVENT,
                                          GL_KERNEL_STATE, GL_KERNEL_DONE, GL_KERNEL_OUT };

    (void)state;
    for (size_t i = 0; i < sizeof(host) / sizeof(host[0]); i++)
        assert_int_equal(gl_type_info(host[i])->from, GL_FROM_HOST);
    for (size_t i = 0; i < sizeof(guest) / sizeof(guest[0]); i++)
        assert_int_equal(gl_type_info(guest[i])->from, GL_FROM_GUEST);
}

static void names_are_known(void **state)
{
    (void)state;
    assert_string_equal(gl_type_name(GL_KERNEL_MSG), "kernel_msg");
    assert_string_equal(gl_type_name((enum gl_type)15), "unknown");
    assert_string_equal(gl_type_name((enum gl_type)200), "unknown");
    assert_string_equal(gl_phase_name(GL_PHASE_IDLE), "idle");
    assert_string_equal(gl_phase_name((enum gl_phase)7), "?");
    assert_string_equal(gl_role_name(GL_GUEST), "guest");
}

/* ---- the document ---- */

static const char *from_text(const struct gl_type_info *t)
{
    return t->from == GL_FROM_BOTH ? "both" : t->from == GL_FROM_HOST ? "host" : "guest";
}

static void phases_text(const struct gl_type_info *t, struct buf *out)
{
    for (unsigned p = 0; p < 3; p++)
        if (t->phases & 1u << p)
            buf_printf(out, "%s%s", out->len ? ", " : "", gl_phase_name((enum gl_phase)p));
}

static void row_text(unsigned type, const struct gl_type_info *t, struct buf *out)
{
    static const char *const classes[] = { "control", "urgent", "ordered", "bulk" };
    struct buf phases;

    buf_init(&phases, 100);
    phases_text(t, &phases);
    buf_printf(out, "\n| %u | `%s` | %s | %s | %s | %u | ", type, t->name, from_text(t),
               buf_cstr(&phases), classes[t->class], t->min);
    if (t->max)
        buf_printf(out, "%u |", t->max);
    else
        buf_append_str(out, "message |");
    buf_fini(&phases);
}

static void the_frame_table_of_the_document_is_the_table_of_the_code(void **state)
{
    char *path = xasprintf("%s/../docs/guestlink.md", TEST_SOURCE_DIR);
    struct buf doc, row;
    struct err e = { 0 };
    unsigned rows = 0, types = 0;

    (void)state;
    if (fs_read_file(path, 1 << 20, &doc, &e) < 0)
        fail_msg("%s", e.msg);
    buf_init(&row, 1000);
    for (unsigned t = 0; t < 256; t++) {
        if (!gl_type_info(t))
            continue;
        types++;
        buf_clear(&row);
        row_text(t, gl_type_info(t), &row);
        if (!strstr(buf_cstr(&doc), buf_cstr(&row)))
            fail_msg("docs/guestlink.md lacks this row:%s", buf_cstr(&row));
    }
    for (const char *at = buf_cstr(&doc); (at = strstr(at, "\n| ")); at += 3)
        rows += at[3] >= '0' && at[3] <= '9';
    assert_int_equal(rows, types);
    buf_fini(&row);
    buf_fini(&doc);
    free(path);
}

static void the_limits_of_the_document_are_those_of_the_code(void **state)
{
    static const struct {
        const char *name;
        uint64_t value;
    } limits[] = { { "GL_VERSION", GL_VERSION },         { "GL_HEADER", GL_HEADER },
                   { "GL_FRAME_MAX", GL_FRAME_MAX },     { "GL_WINDOW", GL_WINDOW },
                   { "GL_STREAMS_MAX", GL_STREAMS_MAX }, { "GL_CONTROL_MAX", GL_CONTROL_MAX },
                   { "JP_MSG_MAX", JP_MSG_MAX },         { "JP_BUFFERS_MAX", JP_BUFFERS_MAX } };
    char *path = xasprintf("%s/../docs/guestlink.md", TEST_SOURCE_DIR);
    struct buf doc;

    (void)state;
    assert_int_equal(fs_read_file(path, 1 << 20, &doc, NULL), 0);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        char *row = xasprintf("\n| `%s` | %" PRIu64 " |", limits[i].name, limits[i].value);
        if (!strstr(buf_cstr(&doc), row))
            fail_msg("docs/guestlink.md lacks this row:%s", row);
        free(row);
    }
    buf_fini(&doc);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headers_survive_the_codec),
        cmocka_unit_test(header_bytes_are_those_of_the_document),
        cmocka_unit_test(every_flipped_bit_is_noticed),
        cmocka_unit_test(impossible_headers_are_refused_by_name),
        cmocka_unit_test(nothing_but_hello_is_legal_before_hello),
        cmocka_unit_test(hello_and_prepare_are_illegal_once_running),
        cmocka_unit_test(kernel_messages_flow_only_when_running),
        cmocka_unit_test(orders_come_from_the_host_and_reports_from_the_guest),
        cmocka_unit_test(names_are_known),
        cmocka_unit_test(the_frame_table_of_the_document_is_the_table_of_the_code),
        cmocka_unit_test(the_limits_of_the_document_are_those_of_the_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
