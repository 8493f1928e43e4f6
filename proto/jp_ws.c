/* The three websocket framings, see jp_ws.h (jupyter.md 2.2, 2.3). Parts are spliced, never
 * re-serialised; jp_json_append_strict is the exception that keeps legacy text valid JSON. */
#include "proto/jp_ws.h"
#include "common/id.h"
#include "common/rdwr.h"
#include "proto/jp_json.h"
#include "proto/jp_priv.h"
#include <errno.h>
#include <stdlib.h>

#define V1_FIXED 6u /* offsets of a frame without buffers: channel, four parts, end */

/* ---- decoding ---- */

/* Shell and control requests need an id: replies are routed by it. */
static int finish(const struct jp_parts *p, struct jp_msg **ret, struct err *e)
{
    struct jp_msg *m;
    int r = jp_msg_new(p, &m, e);

    if (r < 0)
        return r;
    if (!m->msg_id[0] && (p->channel == JP_SHELL || p->channel == JP_CONTROL)) {
        jp_msg_unref(m);
        return err_set(e, -EINVAL, "header.msg_id is missing; shell and control messages need one");
    }
    *ret = m;
    return 0;
}

static int unknown_channel(struct slice name, struct err *e)
{
    return err_set(e, -ENOENT, "unknown channel \"%.*s\"; known: shell, control, stdin, iopub",
                   name.n > 40 ? 40 : (int)name.n, (const char *)name.p);
}

/* Offsets of parts 0..n-1 from the table at r, last is the end; slices of frame into v. */
static int v1_parts(struct rd *r, struct slice frame, struct slice *v, size_t n, struct err *e)
{
    uint64_t from = rd_u64le(r), first = 8 * (n + 2);

    if (from != first)
        return err_set(e, -EINVAL, "v1 frame: first offset is not %llu", (unsigned long long)first);
    for (size_t i = 0; i < n; i++) {
        uint64_t to = rd_u64le(r);
        if (to < from || to > frame.n)
            return err_set(e, -EINVAL, "v1 frame: offset %zu lies outside the frame", i + 1);
        v[i] = slice_of(frame.p + from, to - from);
        from = to;
    }
    if (from != frame.n)
        return err_set(e, -EINVAL, "v1 frame: last offset is not the frame's length");
    return 0;
}

static int decode_v1(struct slice frame, struct jp_msg **ret, struct err *e)
{
    struct rd r = rd_of(frame);
    uint64_t offsets = rd_u64le(&r);
    struct jp_parts p = { 0 };
    struct jp_slices s;
    size_t n;
    int rc;

    if (!rd_ok(&r) || offsets < V1_FIXED)
        return err_set(e, -EINVAL, "v1 frame: offset table is too short");
    if (frame.n / 8 < offsets + 1 || offsets == UINT64_MAX)
        return err_set(e, -EINVAL, "v1 frame: ends inside its offset table");
    if (offsets > V1_FIXED + JP_BUFFERS_MAX)
        return err_set(e, -E2BIG, "v1 frame: more than %u buffers", JP_BUFFERS_MAX);
    n = (size_t)offsets - 1;
    rc = jp_slices_init(&s, n);
    if (rc < 0)
        return err_set(e, rc, "out of memory");
    rc = v1_parts(&r, frame, s.v, n, e);
    if (rc == 0 && jp_channel_parse(s.v[0], &p.channel) < 0)
        rc = unknown_channel(s.v[0], e);
    if (rc == 0) {
        p.header = s.v[1];
        p.parent = s.v[2];
        p.metadata = s.v[3];
        p.content = s.v[4];
        p.buffers = s.v + 5;
        p.n_buffers = n - 5;
        rc = finish(&p, ret, e);
    }
    jp_slices_fini(&s);
    return rc;
}

/* Top-level members of a legacy JSON message. */
struct legacy {
    struct slice header, parent, metadata, content, channel, buffers;
};

static int legacy_split(struct slice json, struct legacy *l, struct err *e)
{
    const struct {
        const char *key;
        struct slice *to;
    } fields[] = {
        { "header", &l->header },   { "parent_header", &l->parent }, { "metadata", &l->metadata },
        { "content", &l->content }, { "channel", &l->channel },      { "buffers", &l->buffers },
    };
    struct slice key, value;
    size_t pos = 0;
    int r;

    while ((r = jp_json_member(json, &pos, &key, &value)) > 0) {
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
            if (jp_json_key_is(key, fields[i].key))
                *fields[i].to = slice_eq_str(value, "null") ? SLICE_NULL : value;
    }
    if (r < 0)
        return err_set(e, -EINVAL, "message is not a JSON object (near byte %zu)", pos);
    if (!l->header.n)
        return err_set(e, -EINVAL, "message has no header");
    return 0;
}

static int legacy_channel(struct slice value, enum jp_channel *ret, struct err *e)
{
    char name[16];
    int r;

    *ret = JP_SHELL;
    if (!value.n)
        return 0;
    r = jp_json_string(value, name, sizeof(name));
    if (r == -ENOBUFS || (r == 0 && jp_channel_parse(slice_str(name), ret) < 0))
        return unknown_channel(value, e);
    return r < 0 ? err_set(e, -EINVAL, "channel is not a string") : 0;
}

static int legacy_finish(const struct legacy *l, const struct slice *buffers, size_t n_buffers,
                         struct jp_msg **ret, struct err *e)
{
    struct jp_parts p = { .header = l->header,
                          .parent = l->parent,
                          .metadata = l->metadata,
                          .content = l->content,
                          .buffers = buffers,
                          .n_buffers = n_buffers };
    int r = legacy_channel(l->channel, &p.channel, e);

    return r < 0 ? r : finish(&p, ret, e);
}

/* Elements of the buffers array: counts, and fills v when it is not NULL. */
static int count_elements(struct slice array, struct slice *v, size_t *ret, struct err *e)
{
    struct slice item;
    size_t pos = 0, n = 0;
    int r;

    while ((r = jp_json_element(array, &pos, &item)) > 0) {
        if (item.p[0] != '"')
            return err_set(e, -EINVAL, "buffers[%zu] is not a base64 string", n);
        if (n == JP_BUFFERS_MAX)
            return err_set(e, -E2BIG, "more than %u buffers", JP_BUFFERS_MAX);
        if (v)
            v[n] = slice_of(item.p + 1, item.n - 2);
        n++;
    }
    if (r < 0)
        return err_set(e, -EINVAL, "buffers is neither an array nor {}");
    *ret = n;
    return 0;
}

/* Decode the base64 texts v[] into `bytes` (as long as the frame) and point v[] there. */
static int decode_base64(struct slice *v, size_t n, uint8_t *bytes, size_t room, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        size_t len = room;
        if (id_base64_decode(v[i], bytes, &len) < 0)
            return err_set(e, -EINVAL, "buffers[%zu] is not base64", i);
        v[i] = slice_of(bytes, len);
        bytes += len;
        room -= len;
    }
    return 0;
}

static int legacy_base64(const struct legacy *l, struct jp_msg **ret, struct err *e)
{
    struct jp_slices s;
    uint8_t *bytes;
    size_t n;
    int r = count_elements(l->buffers, NULL, &n, e);

    if (r < 0)
        return r;
    if (n == 0)
        return legacy_finish(l, NULL, 0, ret, e);
    r = jp_slices_init(&s, n);
    if (r < 0)
        return err_set(e, r, "out of memory");
    bytes = malloc(l->buffers.n);
    r = bytes ? count_elements(l->buffers, s.v, &n, e) : err_set(e, -ENOMEM, "out of memory");
    if (r == 0)
        r = decode_base64(s.v, n, bytes, l->buffers.n, e);
    if (r == 0)
        r = legacy_finish(l, s.v, n, ret, e);
    free(bytes);
    jp_slices_fini(&s);
    return r;
}

static int decode_legacy_text(struct slice frame, struct jp_msg **ret, struct err *e)
{
    struct legacy l = { 0 };
    struct slice key, value;
    size_t pos = 0;
    int r = legacy_split(frame, &l, e);

    if (r < 0)
        return r;
    /* Old clients send {} for "no buffers". */
    if (!l.buffers.n || jp_json_member(l.buffers, &pos, &key, &value) == 0)
        return legacy_finish(&l, NULL, 0, ret, e);
    return legacy_base64(&l, ret, e);
}

/* Table of n offsets at r; v[0] becomes the JSON text, the others the buffers. */
static int legacy_parts(struct rd *r, struct slice frame, struct slice *v, size_t n, struct err *e)
{
    uint64_t from = rd_u32be(r);

    if (from != 4 * (n + 1))
        return err_set(e, -EINVAL, "binary frame: first offset is not %zu", 4 * (n + 1));
    for (size_t i = 0; i < n; i++) {
        uint64_t to = i + 1 < n ? rd_u32be(r) : frame.n;
        if (to < from || to > frame.n)
            return err_set(e, -EINVAL, "binary frame: offset %zu lies outside the frame", i + 1);
        v[i] = slice_of(frame.p + from, to - from);
        from = to;
    }
    return 0;
}

static int decode_legacy_binary(struct slice frame, struct jp_msg **ret, struct err *e)
{
    struct rd r = rd_of(frame);
    uint32_t n = rd_u32be(&r);
    struct legacy l = { 0 };
    struct jp_slices s;
    int rc;

    if (!rd_ok(&r) || n == 0)
        return err_set(e, -EINVAL, "binary frame: offset table is too short");
    if (frame.n / 4 < (size_t)n + 1) /* before the count: text that is no JSON object comes here */
        return err_set(e, -EINVAL, "binary frame: ends inside its offset table");
    if (n > 1 + JP_BUFFERS_MAX)
        return err_set(e, -E2BIG, "binary frame: more than %u buffers", JP_BUFFERS_MAX);
    rc = jp_slices_init(&s, n);
    if (rc < 0)
        return err_set(e, rc, "out of memory");
    rc = legacy_parts(&r, frame, s.v, n, e);
    if (rc == 0)
        rc = legacy_split(s.v[0], &l, e);
    if (rc == 0)
        rc = legacy_finish(&l, s.v + 1, n - 1, ret, e);
    jp_slices_fini(&s);
    return rc;
}

int jp_ws_decode(enum jp_ws_proto proto, struct slice frame, struct jp_msg **ret, struct err *e)
{
    uint8_t c;

    if (frame.n == 0)
        return err_set(e, -ENOENT, "empty frame");
    if (proto == JP_WS_V1)
        return decode_v1(frame, ret, e);
    c = frame.p[0];
    if (c == '{' || c == ' ' || (c >= '\t' && c <= '\r'))
        return decode_legacy_text(frame, ret, e);
    return decode_legacy_binary(frame, ret, e);
}

/* ---- encoding ---- */

int jp_ws_v1_head(const struct jp_msg *m, struct buf *out, uint64_t *ret_total)
{
    const struct jp_parts *p = &m->parts;
    struct slice name = slice_str(jp_channel_name(p->channel));
    const struct slice json[] = { name, p->header, p->parent, p->metadata, p->content };
    uint64_t offsets = V1_FIXED + p->n_buffers, at = 8 * (offsets + 1);
    size_t head = (size_t)at + name.n;
    uint8_t *to = buf_reserve(out, head);

    if (!to)
        return head > out->max || out->len > out->max - head ? -ENOBUFS : -ENOMEM;
    put_u64le(to, offsets);
    for (uint64_t i = 0; i < offsets; i++) {
        put_u64le(to + 8 * (i + 1), at);
        if (i + 1 < offsets)
            at += i < 5 ? json[i].n : p->buffers[i - 5].n;
    }
    for (size_t i = 0; i < name.n; i++)
        to[head - name.n + i] = name.p[i];
    buf_commit(out, head);
    *ret_total = at;
    return 0;
}

static int encode_v1(const struct jp_msg *m, struct buf *out)
{
    const struct jp_parts *p = &m->parts;
    const struct slice json[] = { p->header, p->parent, p->metadata, p->content };
    size_t whole = 8 * (V1_FIXED + 1 + p->n_buffers) + 8 + m->size; /* names have <= 8 letters */
    uint64_t total;
    int r;

    if (whole <= out->max && out->len <= out->max - whole && !buf_reserve(out, whole))
        return -ENOMEM; /* one growth step; a frame near the maximum grows as it goes */
    r = jp_ws_v1_head(m, out, &total);
    for (size_t i = 0; i < 4 && r == 0; i++)
        r = buf_append_slice(out, json[i]);
    for (size_t i = 0; i < p->n_buffers && r == 0; i++)
        r = buf_append_slice(out, p->buffers[i]);
    return r;
}

static int append_base64(struct buf *out, struct slice s)
{
    size_t n = id_base64_len(s.n);
    uint8_t *to;
    int r = buf_append_byte(out, '"');

    if (r < 0)
        return r;
    if (n >= out->max || out->len >= out->max - n)
        return -ENOBUFS;
    to = buf_reserve(out, n + 1); /* id_base64 writes a NUL, too */
    if (!to)
        return -ENOMEM;
    id_base64((char *)to, s);
    buf_commit(out, n);
    return buf_append_byte(out, '"');
}

/* ,"buffers":[...]: the text form only. */
static int append_buffers(struct buf *out, const struct jp_parts *p)
{
    int r = buf_append_str(out, ",\"buffers\":[");

    for (size_t i = 0; i < p->n_buffers && r == 0; i++) {
        if (i)
            r = buf_append_byte(out, ',');
        if (r == 0)
            r = append_base64(out, p->buffers[i]);
    }
    return r < 0 ? r : buf_append_byte(out, ']');
}

static int append_member(struct buf *out, const char *key, struct slice part)
{
    int r = buf_append_str(out, key);

    return r < 0 ? r : jp_json_append_strict(out, part);
}

static int append_id(struct buf *out, const char *key, const char *id)
{
    int r = buf_append_str(out, key);

    return r < 0 ? r : buf_append_json_string(out, slice_str(id));
}

/* The JSON text of a legacy message, with or without its buffers as base64. */
static int append_json(struct buf *out, const struct jp_msg *m, bool buffers)
{
    const struct jp_parts *p = &m->parts;
    int r = append_member(out, "{\"header\":", p->header);

    if (r == 0)
        r = append_member(out, ",\"parent_header\":", p->parent);
    if (r == 0)
        r = append_member(out, ",\"metadata\":", p->metadata);
    if (r == 0)
        r = append_member(out, ",\"content\":", p->content);
    if (r == 0)
        r = append_id(out, ",\"channel\":", jp_channel_name(p->channel));
    if (r == 0)
        r = append_id(out, ",\"msg_id\":", m->msg_id);
    if (r == 0)
        r = append_id(out, ",\"msg_type\":", m->msg_type);
    if (r == 0 && buffers)
        r = append_buffers(out, p);
    return r < 0 ? r : buf_append_byte(out, '}');
}

/* Table first with the JSON's length left open, then the JSON, then the table is filled in. */
static int encode_legacy_binary(const struct jp_msg *m, struct buf *out)
{
    const struct jp_parts *p = &m->parts;
    size_t start = out->len, table = 4 * (p->n_buffers + 2);
    uint64_t at;
    int r = 0;

    for (size_t i = 0; i < p->n_buffers + 2 && r == 0; i++)
        r = wr_u32be(out, i ? (uint32_t)table : (uint32_t)(p->n_buffers + 1));
    if (r == 0)
        r = append_json(out, m, false);
    at = out->len - start;
    for (size_t i = 0; i < p->n_buffers && r == 0; i++) {
        put_u32be(out->data + out->off + start + 4 * (i + 2), (uint32_t)at);
        at += p->buffers[i].n;
        r = at > UINT32_MAX ? -ENOBUFS : buf_append_slice(out, p->buffers[i]);
    }
    return r;
}

int jp_ws_encode(enum jp_ws_proto proto, const struct jp_ws_opts *opts, const struct jp_msg *m,
                 struct buf *out, bool *ret_binary)
{
    bool binary = proto == JP_WS_V1 || (m->parts.n_buffers && !(opts && opts->no_binary));
    size_t before = out->len;
    int r;

    if (proto == JP_WS_V1)
        r = encode_v1(m, out);
    else if (binary)
        r = encode_legacy_binary(m, out);
    else
        r = append_json(out, m, true);
    if (r < 0) {
        buf_truncate(out, before);
        return r;
    }
    *ret_binary = binary;
    return 0;
}
