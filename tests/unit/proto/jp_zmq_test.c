#include "proto/jp_zmq.h"
#include "vectors.h"
#include <errno.h>
#include <string.h>

static void every_vector_decodes_to_its_parts(void **state)
{
    struct vectors v;
    struct vec_message m;

    (void)state;
    vectors_load(&v, "messages.json");
    for (size_t i = 0; i < json_array_size(v.doc); i++) {
        struct jp_signer *s;
        struct jp_msg *msg = NULL;
        struct err e = { 0 };
        size_t ids = 99;

        vec_message(&v, i, &m);
        s = jp_signer_new(m.key);
        if (jp_zmq_decode(s, m.parts.channel, m.zmq, m.n_zmq, &ids, &msg, &e) < 0)
            fail_msg("%s: %s", m.name, e.msg);
        assert_int_equal(ids, m.n_idents);
        vec_check(&m, &m.parts, msg);
        jp_msg_unref(msg);
        jp_signer_free(s);
    }
    vectors_free(&v);
}

static void every_vector_encodes_to_its_frames(void **state)
{
    struct vectors v;
    struct vec_message m;

    (void)state;
    vectors_load(&v, "messages.json");
    for (size_t i = 0; i < json_array_size(v.doc); i++) {
        struct jp_signer *s;
        struct jp_msg *msg;
        struct slice out[6 + VEC_MAX];
        char sig[JP_SIG_LEN + 1];
        size_t n;

        vec_message(&v, i, &m);
        s = jp_signer_new(m.key);
        assert_int_equal(jp_msg_new(&m.parts, &msg, NULL), 0);
        n = jp_zmq_encode(s, msg, sig, out);
        assert_int_equal(n, m.n_zmq - m.n_idents);
        for (size_t k = 0; k < n; k++)
            assert_bytes(m.name, out[k], m.zmq[m.n_idents + k]);
        jp_msg_unref(msg);
        jp_signer_free(s);
    }
    vectors_free(&v);
}

/* Frames for the malformed cases: key "", so that only the shape counts. */
#define F(text) SLICE_LIT(text)
static int decode(const struct slice *frames, size_t n, const char *key, struct err *e)
{
    struct jp_signer *s = jp_signer_new(slice_str(key));
    struct jp_msg *msg = NULL;
    size_t ids = 7;
    int r = jp_zmq_decode(s, JP_IOPUB, frames, n, &ids, &msg, e);

    jp_signer_free(s);
    jp_msg_unref(msg);
    if (r < 0 && ids != 7)
        return 1; /* outputs must stay untouched on failure */
    return r;
}

static void frames_without_delimiter_are_refused(void **state)
{
    const struct slice frames[] = { F("a"), F("b"), F("<IDS|MSG"), F("{}"), F("{}"), F("{}") };
    struct err e = { 0 };

    (void)state;
    assert_int_equal(decode(frames, 6, "", &e), -EBADMSG);
    assert_non_null(strstr(e.msg, "delimiter"));
    assert_int_equal(decode(frames, 0, "", NULL), -EBADMSG);
}

static void more_identities_than_the_cap_are_refused(void **state)
{
    struct slice frames[JP_ZMQ_IDS_MAX + 7];
    const struct slice tail[] = { F("<IDS|MSG>"), F(""),   F("{\"msg_type\":\"t\"}"),
                                  F("{}"),        F("{}"), F("{}") };

    (void)state;
    for (size_t i = 0; i < JP_ZMQ_IDS_MAX + 1; i++)
        frames[i] = F("id");
    memcpy(frames + JP_ZMQ_IDS_MAX, tail, sizeof(tail));
    assert_int_equal(decode(frames, JP_ZMQ_IDS_MAX + 6, "", NULL), 0);
    frames[JP_ZMQ_IDS_MAX] = F("id");
    memcpy(frames + JP_ZMQ_IDS_MAX + 1, tail, sizeof(tail));
    assert_int_equal(decode(frames, JP_ZMQ_IDS_MAX + 7, "", NULL), -EBADMSG);
}

static void too_few_frames_are_refused(void **state)
{
    const struct slice frames[] = { F("<IDS|MSG>"), F(""),   F("{\"msg_type\":\"t\"}"),
                                    F("{}"),        F("{}"), F("{}") };

    (void)state;
    for (size_t n = 1; n < 6; n++)
        assert_int_equal(decode(frames, n, "", NULL), -EBADMSG);
    assert_int_equal(decode(frames, 6, "", NULL), 0);
}

static void bad_signature_wins_over_bad_json(void **state)
{
    const struct slice frames[] = {
        F("<IDS|MSG>"), F("0000"), F("not json"), F("{"), F("["), F("")
    };
    struct err e = { 0 };

    (void)state;
    assert_int_equal(decode(frames, 6, "secret", &e), -EACCES);
    assert_int_equal(decode(frames, 6, "", &e), -EINVAL);
}

static void empty_parts_count_as_empty_objects(void **state)
{
    const struct slice frames[] = { F("<IDS|MSG>"), F(""), F("{\"msg_type\":\"t\"}"),
                                    F(""),          F(""), F("") };
    struct jp_signer *s = jp_signer_new(SLICE_NULL);
    struct jp_msg *msg;
    size_t ids;

    (void)state;
    assert_int_equal(jp_zmq_decode(s, JP_SHELL, frames, 6, &ids, &msg, NULL), 0);
    assert_bytes("content", msg->parts.content, F("{}"));
    assert_bytes("parent", msg->parts.parent, F("{}"));
    jp_msg_unref(msg);
    jp_signer_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_decodes_to_its_parts),
        cmocka_unit_test(every_vector_encodes_to_its_frames),
        cmocka_unit_test(frames_without_delimiter_are_refused),
        cmocka_unit_test(more_identities_than_the_cap_are_refused),
        cmocka_unit_test(too_few_frames_are_refused),
        cmocka_unit_test(bad_signature_wins_over_bad_json),
        cmocka_unit_test(empty_parts_count_as_empty_objects),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
