/* See ws_source.h. */
#include "gateway/jupyter/ws_source.h"
#include <string.h>

#define KEEP (32u << 10) /* a frame buffer of up to this size is reused for the next message */
#define FRAME_MAX ((size_t)JP_MSG_MAX * 2) /* legacy text grows: base64, escapes */

void ws_source_init(struct ws_source *s)
{
    memset(s, 0, sizeof(*s));
    buf_init(&s->head, FRAME_MAX);
}

void ws_source_clear(struct ws_source *s)
{
    jp_msg_unref(s->msg);
    s->msg = NULL;
    if (s->head.cap > KEEP)
        buf_fini(&s->head);
    else
        buf_clear(&s->head);
    s->part = s->off = 0;
    s->binary = s->started = s->busy = false;
}

void ws_source_fini(struct ws_source *s)
{
    ws_source_clear(s);
    buf_fini(&s->head);
}

int ws_source_set(struct ws_source *s, enum jp_ws_proto proto, const struct jp_ws_opts *o,
                  struct jp_msg *m)
{
    uint64_t total = 0;
    int r;
    if (proto == JP_WS_V1) {
        r = jp_ws_v1_head(m, &s->head, &total);
        s->binary = true;
        s->msg = r ? NULL : jp_msg_ref(m);
    } else {
        r = jp_ws_encode(proto, o, m, &s->head, &s->binary);
    }
    if (r) {
        ws_source_clear(s);
        return r;
    }
    s->busy = true;
    return 0;
}

static size_t n_parts(const struct jp_msg *m)
{
    return 4 + m->parts.n_buffers;
}

static struct slice part_of(const struct jp_msg *m, size_t i)
{
    switch (i) {
    case 0:
        return m->parts.header;
    case 1:
        return m->parts.parent;
    case 2:
        return m->parts.metadata;
    case 3:
        return m->parts.content;
    default:
        return m->parts.buffers[i - 4];
    }
}

size_t ws_source_read(struct ws_source *s, uint8_t *p, size_t size, bool *ret_last)
{
    struct slice h = buf_slice(&s->head);
    size_t n = h.n < size ? h.n : size;
    if (n)
        memcpy(p, h.p, n);
    buf_consume(&s->head, n);
    while (n < size && s->msg && s->part < n_parts(s->msg)) {
        struct slice part = part_of(s->msg, s->part);
        size_t k = part.n - s->off < size - n ? part.n - s->off : size - n;
        if (k)
            memcpy(p + n, part.p + s->off, k);
        n += k;
        s->off += k;
        if (s->off == part.n) {
            s->part++;
            s->off = 0;
        }
    }
    s->started = true;
    /* Empty parts at the end must not leave an empty last fragment behind. */
    while (s->msg && s->part < n_parts(s->msg) && part_of(s->msg, s->part).n == s->off) {
        s->part++;
        s->off = 0;
    }
    *ret_last = !s->head.len && (!s->msg || s->part == n_parts(s->msg));
    return n;
}
