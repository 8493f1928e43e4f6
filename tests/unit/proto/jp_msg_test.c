#include "common/buf.h"
#include "common/mem.h"
#include "proto/jp_json.h"
#include "proto/jp_msg.h"
#include "vectors.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HEADER "{\"msg_id\":\"m\",\"msg_type\":\"t\",\"session\":\"s\"}"

static int make(const char *header, const char *parent, const char *metadata, const char *content,
                struct jp_msg **ret, struct err *e)
{
    struct jp_parts p = { JP_SHELL,
                          slice_str(header),
                          slice_str(parent),
                          slice_str(metadata),
                          slice_str(content),
                          NULL,
                          0 };

    return jp_msg_new(&p, ret, e);
}

static void every_vector_yields_its_ids_and_status(void **state)
{
    struct vectors v;
    struct vec_message m;

    (void)state;
    vectors_load(&v, "messages.json");
    assert_true(json_array_size(v.doc) > 20);
    for (size_t i = 0; i < json_array_size(v.doc); i++) {
        struct jp_msg *msg;
        char status[16];
        size_t size = 0;

        vec_message(&v, i, &m);
        assert_int_equal(jp_msg_new(&m.parts, &msg, NULL), 0);
        vec_check(&m, &m.parts, msg);
        jp_status_of(msg, status);
        assert_string_equal(status, m.status);
        size = m.parts.header.n + m.parts.parent.n + m.parts.metadata.n + m.parts.content.n;
        for (size_t k = 0; k < m.parts.n_buffers; k++)
            size += m.parts.buffers[k].n;
        assert_int_equal(msg->size, size);
        jp_msg_unref(msg);
    }
    vectors_free(&v);
}

static void every_vector_survives_the_guest_link_body(void **state)
{
    struct vectors v;
    struct vec_message m;

    (void)state;
    vectors_load(&v, "messages.json");
    for (size_t i = 0; i < json_array_size(v.doc); i++) {
        struct jp_msg *msg, *again;
        struct err e = { 0 };
        size_t n, at;
        uint8_t *body;

        vec_message(&v, i, &m);
        assert_int_equal(jp_msg_new(&m.parts, &msg, NULL), 0);
        n = jp_body_size(msg);
        body = xmalloc(n);
        jp_body_head(msg, body);
        at = 4 + 4 * (4 + msg->parts.n_buffers);
        const struct slice json[] = { m.parts.header, m.parts.parent, m.parts.metadata,
                                      m.parts.content };
        for (size_t k = 0; k < 4 + m.parts.n_buffers; k++) {
            struct slice p = k < 4 ? json[k] : m.buffers[k - 4];
            if (p.n)
                memcpy(body + at, p.p, p.n);
            at += p.n;
        }
        assert_int_equal(at, n);
        if (jp_body_decode(slice_of(body, n), &again, &e) < 0)
            fail_msg("%s: %s", m.name, e.msg);
        vec_check(&m, &m.parts, again);
        jp_msg_unref(msg);
        jp_msg_unref(again);
        free(body);
    }
    vectors_free(&v);
}

static void malformed_bodies_are_refused(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
        int want;
    } cases[] = {
#define CASE(s, w) { s, sizeof(s) - 1, w }
        CASE("", -EINVAL),
        CASE("\0\0\4", -EINVAL),
        CASE("\0\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", -EINVAL),           /* table cut */
        CASE("\0\0\3\0\0\0\0\0\0\0\0\0\0\0\0\0", -EINVAL),                 /* n < 4 */
        CASE("\0\1\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", -EINVAL),         /* reserved byte */
        CASE("\4\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", -EINVAL),         /* channel 4 */
        CASE("\0\0\4\0\xff\xff\xff\xff\0\0\0\0\0\0\0\0\0\0\0\0", -EINVAL), /* length beyond */
        CASE("\0\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0x", -EINVAL),        /* bytes left over */
        CASE("\0\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", -EINVAL),         /* no msg_type */
#undef CASE
    };
    struct jp_msg *m = NULL;
    uint8_t many[4 + 4 * 4101] = { 0, 0, 5, 0x10 }; /* 0x1005 = 4101 parts */

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(jp_body_decode(slice_of(cases[i].bytes, cases[i].n), &m, NULL),
                         cases[i].want);
    assert_int_equal(jp_body_decode(slice_of(many, sizeof(many)), &m, NULL), -E2BIG);
    assert_null(m);
}

static void parts_that_are_no_objects_are_refused_by_name(void **state)
{
    struct jp_msg *m = NULL;
    struct err e = { 0 };

    (void)state;
    assert_int_equal(make("[]", "{}", "{}", "{}", &m, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "header is not a JSON object"));
    assert_int_equal(make(HEADER, "1", "{}", "{}", &m, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "parent_header"));
    assert_int_equal(make(HEADER, "{}", "null", "{}", &m, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "metadata"));
    assert_int_equal(make(HEADER, "{}", "{}", "{", &m, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "content"));
    assert_null(m);
}

static void msg_type_must_be_a_string(void **state)
{
    static const char *const bad[] = { "{}", "{\"msg_type\":1}", "{\"msg_type\":null}",
                                       "{\"msg_type\":\"\"}",
                                       "{\"msg_type\":\"t\",\"msg_type\":2}" };
    struct jp_msg *m = NULL;
    struct err e = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(make(bad[i], "{}", "{}", "{}", &m, &e), -EINVAL);
        assert_non_null(strstr(e.msg, "msg_type"));
    }
    assert_int_equal(make("{\"msg_type\":\"\\x\"}", "{}", "{}", "{}", &m, &e), -EINVAL);
}

static void absent_ids_are_empty_and_duplicates_count_last(void **state)
{
    struct jp_msg *m;

    (void)state;
    assert_int_equal(make("{\"msg_type\":\"a\",\"msg\\u005ftype\":\"b\",\"msg_id\":7,"
                          "\"session\":null,\"subshell_id\":\"x\",\"subshell_id\":null}",
                          "", "", "", &m, NULL),
                     0);
    assert_string_equal(m->msg_type, "b");
    assert_string_equal(m->msg_id, "");
    assert_string_equal(m->session, "");
    assert_string_equal(m->subshell, "");
    assert_string_equal(m->username, "");
    assert_string_equal(m->parent_id, "");
    jp_msg_unref(m);
}

static void ids_longer_than_the_limit_are_refused(void **state)
{
    struct buf b;
    struct jp_msg *m = NULL;
    struct err e = { 0 };

    (void)state;
    for (size_t n = JP_ID_MAX - 1; n <= JP_ID_MAX; n++) {
        buf_init(&b, 1000);
        buf_append_str(&b, "{\"msg_type\":\"t\",\"msg_id\":\"");
        for (size_t i = 0; i < n; i++)
            buf_append_byte(&b, 'x');
        buf_append_str(&b, "\"}");
        assert_int_equal(make(buf_cstr(&b), "", "", "", &m, &e), n < JP_ID_MAX ? 0 : -E2BIG);
        buf_fini(&b);
    }
    assert_non_null(strstr(e.msg, "msg_id"));
    jp_msg_unref(m);
}

static void too_many_buffers_or_bytes_are_refused(void **state)
{
    static struct slice many[JP_BUFFERS_MAX + 1];
    struct jp_parts p = { .header = SLICE_LIT(HEADER), .buffers = many };
    struct jp_msg *m = NULL;
    uint8_t *big = xmalloc(JP_MSG_MAX / 4 + 1);

    (void)state;
    p.n_buffers = JP_BUFFERS_MAX;
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    jp_msg_unref(m);
    m = NULL;
    p.n_buffers = JP_BUFFERS_MAX + 1;
    assert_int_equal(jp_msg_new(&p, &m, NULL), -E2BIG);
    p.n_buffers = 4;
    for (size_t i = 0; i < 4; i++)
        many[i] = slice_of(big, JP_MSG_MAX / 4 + 1); /* never read: refused by size alone */
    assert_int_equal(jp_msg_new(&p, &m, NULL), -E2BIG);
    assert_null(m);
    free(big);
}

static void a_failed_allocation_is_reported(void **state)
{
    struct jp_msg *m = NULL;

    (void)state;
    mem_fail_at(1);
    assert_int_equal(make(HEADER, "{}", "{}", "{}", &m, NULL), -ENOMEM);
    assert_int_equal(make(HEADER, "{}", "{}", "{}", &m, NULL), 0);
    jp_msg_unref(m);
    jp_msg_unref(NULL);
}

static void references_keep_the_message(void **state)
{
    struct jp_msg *m;

    (void)state;
    assert_int_equal(make(HEADER, "{}", "{}", "{}", &m, NULL), 0);
    assert_ptr_equal(jp_msg_ref(m), m);
    assert_int_equal(m->refs, 2);
    jp_msg_unref(m);
    assert_int_equal(m->refs, 1);
    assert_string_equal(m->msg_id, "m");
    jp_msg_unrefp(&m);
}

static void a_built_message_is_complete(void **state)
{
    struct jp_msg *a, *b;
    struct slice v;
    char text[64];

    (void)state;
    assert_int_equal(jp_msg_build(JP_IOPUB, "status", "ses\"sion", SLICE_LIT(HEADER),
                                  SLICE_LIT("{\"execution_state\":\"dead\"}"), 1769860800000000,
                                  &a),
                     0);
    assert_int_equal(
        jp_msg_build(JP_IOPUB, "status", "s", SLICE_NULL, SLICE_NULL, 1769860800000000, &b), 0);
    assert_string_equal(a->msg_type, "status");
    assert_string_equal(a->session, "ses\"sion");
    assert_string_equal(a->username, "cellvisor");
    assert_string_equal(a->parent_id, "m");
    assert_string_equal(a->parent_session, "s");
    assert_int_equal(strlen(a->msg_id), 36);
    assert_string_not_equal(a->msg_id, b->msg_id);
    assert_int_equal(jp_json_find(a->parts.header, "date", &v), 0);
    assert_int_equal(jp_json_string(v, text, sizeof(text)), 0);
    assert_string_equal(text, "2026-01-31T12:00:00.000000Z");
    assert_int_equal(jp_json_find(a->parts.header, "version", &v), 0);
    assert_bytes("version", v, SLICE_LIT("\"5.3\""));
    jp_status_of(a, text);
    assert_string_equal(text, "dead");
    assert_bytes("content", b->parts.content, SLICE_LIT("{}"));
    jp_msg_unref(a);
    jp_msg_unref(b);
}

static void status_is_read_from_iopub_status_only(void **state)
{
    struct jp_parts p = { JP_SHELL,   SLICE_LIT("{\"msg_type\":\"status\"}"),      SLICE_NULL,
                          SLICE_NULL, SLICE_LIT("{\"execution_state\":\"busy\"}"), NULL,
                          0 };
    struct jp_msg *m;
    char text[16];

    (void)state;
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    jp_status_of(m, text);
    assert_string_equal(text, "");
    jp_msg_unref(m);
    p.channel = JP_IOPUB;
    p.content = SLICE_LIT("{\"execution_state\":\"a state name too long for it\"}");
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    jp_status_of(m, text);
    assert_string_equal(text, "");
    jp_msg_unref(m);
}

static void types_are_classified(void **state)
{
    char reply[JP_ID_MAX];

    (void)state;
    assert_true(jp_type_untracked("kernel_info_request"));
    assert_true(jp_type_untracked("status"));
    assert_false(jp_type_untracked("execute_request"));
    assert_false(jp_type_untracked("comm_msg"));
    assert_false(jp_type_untracked(""));
    assert_true(jp_reply_type("execute_request", reply));
    assert_string_equal(reply, "execute_reply");
    assert_false(jp_reply_type("comm_open", reply));
    assert_false(jp_reply_type("_request", reply));
    assert_false(jp_reply_type("", reply));
}

static void channels_have_names(void **state)
{
    enum jp_channel c;

    (void)state;
    for (unsigned i = 0; i < JP_CHANNELS; i++) {
        assert_int_equal(jp_channel_parse(slice_str(jp_channel_name((enum jp_channel)i)), &c), 0);
        assert_int_equal(c, i);
    }
    assert_int_equal(jp_channel_parse(SLICE_LIT("hb"), &c), -EINVAL);
    assert_string_equal(jp_channel_name((enum jp_channel)9), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_yields_its_ids_and_status),
        cmocka_unit_test(every_vector_survives_the_guest_link_body),
        cmocka_unit_test(malformed_bodies_are_refused),
        cmocka_unit_test(parts_that_are_no_objects_are_refused_by_name),
        cmocka_unit_test(msg_type_must_be_a_string),
        cmocka_unit_test(absent_ids_are_empty_and_duplicates_count_last),
        cmocka_unit_test(ids_longer_than_the_limit_are_refused),
        cmocka_unit_test(too_many_buffers_or_bytes_are_refused),
        cmocka_unit_test(a_failed_allocation_is_reported),
        cmocka_unit_test(references_keep_the_message),
        cmocka_unit_test(a_built_message_is_complete),
        cmocka_unit_test(status_is_read_from_iopub_status_only),
        cmocka_unit_test(types_are_classified),
        cmocka_unit_test(channels_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
