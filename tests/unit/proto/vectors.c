#include "vectors.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include "proto/jp_msg.h"
#include <string.h>

void vectors_load(struct vectors *v, const char *name)
{
    char *path = xasprintf("%s/vectors/%s", TEST_SOURCE_DIR, name);
    json_error_t error;

    *v = (struct vectors) { 0 };
    v->doc = json_load_file(path, JSON_ALLOW_NUL, &error);
    if (!v->doc)
        fail_msg("%s: %s", path, error.text);
    free(path);
}

void vectors_free(struct vectors *v)
{
    for (size_t i = 0; i < v->n_blobs; i++)
        free(v->blobs[i]);
    free(v->blobs);
    json_decref(v->doc);
}

const char *vec_str(json_t *obj, const char *key)
{
    json_t *s = json_object_get(obj, key);

    if (!json_is_string(s))
        fail_msg("vector without a string %s", key);
    return json_string_value(s);
}

struct slice vec_bytes(struct vectors *v, json_t *base64)
{
    struct slice text = slice_of(json_string_value(base64), json_string_length(base64));
    size_t n = text.n + 1;
    uint8_t *bytes = xmalloc(n);

    v->blobs = xrealloc(v->blobs, (v->n_blobs + 1) * sizeof(*v->blobs));
    v->blobs[v->n_blobs++] = bytes;
    assert_int_equal(id_base64_decode(text, bytes, &n), 0);
    return slice_of(bytes, n);
}

struct slice vec_get(struct vectors *v, json_t *obj, const char *key)
{
    json_t *s = json_object_get(obj, key);

    return s ? vec_bytes(v, s) : SLICE_NULL;
}

size_t vec_list(struct vectors *v, json_t *obj, const char *key, struct slice *ret, size_t max)
{
    json_t *array = json_object_get(obj, key), *item;
    size_t i;

    assert_true(json_is_array(array) && json_array_size(array) <= max);
    json_array_foreach(array, i, item) ret[i] = vec_bytes(v, item);
    return json_array_size(array);
}

static struct jp_parts four(const struct slice p[4])
{
    return (struct jp_parts) { .header = p[0], .parent = p[1], .metadata = p[2], .content = p[3] };
}

void vec_message(struct vectors *v, size_t i, struct vec_message *ret)
{
    json_t *o = json_array_get(v->doc, i);
    struct slice p[4];
    enum jp_channel channel;
    size_t n;

    assert_non_null(o);
    *ret = (struct vec_message) { .name = vec_str(o, "name") };
    assert_int_equal(jp_channel_parse(slice_str(vec_str(o, "channel")), &channel), 0);
    assert_int_equal(vec_list(v, o, "parts", p, 4), 4);
    ret->parts = four(p);
    assert_int_equal(vec_list(v, o, "legacy_parts", p, 4), 4);
    ret->legacy = four(p);
    n = vec_list(v, o, "buffers", ret->buffers, VEC_MAX);
    ret->parts.channel = ret->legacy.channel = channel;
    ret->parts.n_buffers = ret->legacy.n_buffers = n;
    ret->parts.buffers = ret->legacy.buffers = ret->buffers;
    ret->n_zmq = vec_list(v, o, "zmq", ret->zmq, VEC_MAX);
    ret->n_idents = (size_t)json_integer_value(json_object_get(o, "n_idents"));
    ret->key = vec_get(v, o, "key");
    ret->ws_v1 = vec_get(v, o, "ws_v1");
    ret->ws_legacy = vec_get(v, o, "ws_legacy");
    ret->ws_legacy_base64 = vec_get(v, o, "ws_legacy_base64");
    ret->strict_value = vec_get(v, o, "strict_value");
    ret->signature = vec_str(o, "signature");
    ret->status = vec_str(o, "status");
    ret->ids = json_object_get(o, "ids");
}

void assert_bytes(const char *what, struct slice got, struct slice want)
{
    if (!slice_eq(got, want))
        fail_msg("%s: got %zu bytes \"%.*s\", want %zu bytes \"%.*s\"", what, got.n, SLICE_FMT(got),
                 want.n, SLICE_FMT(want));
}

void vec_check(const struct vec_message *v, const struct jp_parts *want, const struct jp_msg *m)
{
    const struct {
        const char *key, *got;
    } ids[] = { { "msg_id", m->msg_id },           { "msg_type", m->msg_type },
                { "session", m->session },         { "username", m->username },
                { "subshell", m->subshell },       { "parent_id", m->parent_id },
                { "parent_type", m->parent_type }, { "parent_session", m->parent_session } };

    assert_int_equal(m->parts.channel, want->channel);
    assert_bytes(v->name, m->parts.header, want->header);
    assert_bytes(v->name, m->parts.parent, want->parent);
    assert_bytes(v->name, m->parts.metadata, want->metadata);
    assert_bytes(v->name, m->parts.content, want->content);
    assert_int_equal(m->parts.n_buffers, want->n_buffers);
    for (size_t i = 0; i < want->n_buffers; i++)
        assert_bytes(v->name, m->parts.buffers[i], want->buffers[i]);
    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++)
        assert_string_equal(ids[i].got, vec_str(v->ids, ids[i].key));
}
