/* Send queue of the guest link, see gl_priv.h. Everything in it was written by this side, so
 * headers read back here are trusted. */
#include "common/mem.h"
#include "proto/gl_priv.h"
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FRAME_BYTES (GL_HEADER + GL_FRAME_MAX)
/* A lone small message gets a small chunk; a queue that builds up gets large ones, so that one
 * write to the transport carries many frames. */
#define CHUNK_SMALL (16u << 10)
#define CHUNK_LARGE (4u * FRAME_BYTES)

static struct gl_chunk *chunk_take(struct gl_chunk_pool *pool, size_t need, bool backlog)
{
    size_t cap = CHUNK_LARGE;
    struct gl_chunk *c;

    if (!backlog && need <= CHUNK_SMALL)
        cap = CHUNK_SMALL;
    for (size_t i = 0; i < 2; i++) {
        c = pool->spare[i];
        if (!c || c->cap < cap)
            continue;
        pool->spare[i] = NULL;
        return c;
    }
    c = mem_try_realloc(NULL, sizeof(*c) + cap);
    if (!c)
        return NULL;
    c->next = NULL;
    c->off = c->len = 0;
    c->cap = (uint32_t)cap;
    return c;
}

static void chunk_give(struct gl_chunk_pool *pool, struct gl_chunk *c)
{
    c->next = NULL;
    c->off = c->len = 0;
    for (size_t i = 0; i < 2; i++) {
        if (pool->spare[i])
            continue;
        pool->spare[i] = c;
        return;
    }
    free(c);
}

void gl_chunk_pool_fini(struct gl_chunk_pool *pool)
{
    for (size_t i = 0; i < 2; i++) {
        free(pool->spare[i]);
        pool->spare[i] = NULL;
    }
}

static void chunks_give(struct gl_chunk_pool *pool, struct gl_chunk *c)
{
    while (c) {
        struct gl_chunk *next = c->next;
        chunk_give(pool, c);
        c = next;
    }
}

size_t gl_queue_framed(size_t n)
{
    size_t frames = n ? (n + GL_FRAME_MAX - 1) / GL_FRAME_MAX : 1;
    return n + frames * GL_HEADER;
}

/* Room for n contiguous bytes at the tail; more = what the rest of the message will take. */
static uint8_t *tail_room(struct gl_queue *q, struct gl_chunk_pool *pool, size_t n, size_t more)
{
    struct gl_chunk *c = q->tail;

    if (!c || c->cap - c->len < n) {
        c = chunk_take(pool, n + more, q->tail != NULL);
        if (!c)
            return NULL;
        if (q->tail)
            q->tail->next = c;
        else
            q->head = c;
        q->tail = c;
    }
    c->len += (uint32_t)n;
    return c->data + c->len - n;
}

/* Gathers bytes out of a list of parts. */
struct gather {
    const struct slice *parts;
    size_t off; /* into parts[0] */
};

static void gather(struct gather *g, uint8_t *to, size_t n)
{
    while (n) {
        size_t take = g->parts->n - g->off;
        if (take > n)
            take = n;
        if (take)
            memcpy(to, g->parts->p + g->off, take);
        to += take;
        n -= take;
        g->off += take;
        if (g->off == g->parts->n) {
            g->parts++;
            g->off = 0;
        }
    }
}

static bool frame_exempt(unsigned type)
{
    return gl_type_info(type)->class != GL_CLASS_BULK;
}

int gl_queue_put(struct gl_queue *q, struct gl_chunk_pool *pool, enum gl_type type, uint32_t stream,
                 const struct slice *parts, size_t n)
{
    struct gl_chunk *old_tail = q->tail;
    uint32_t old_len = old_tail ? old_tail->len : 0;
    struct gather g = { parts, 0 };
    size_t left = 0, total;
    unsigned frames = 0;

    for (size_t i = 0; i < n; i++)
        left += parts[i].n;
    total = left;
    do {
        size_t len = left > GL_FRAME_MAX ? GL_FRAME_MAX : left;
        struct gl_header h = { (uint32_t)len, (uint8_t)type, left > len ? GL_FLAG_MORE : 0,
                               stream };
        uint8_t *to = tail_room(q, pool, GL_HEADER + len, left - len);
        if (!to)
            goto undo;
        gl_header_put(to, &h);
        gather(&g, to + GL_HEADER, len);
        left -= len;
        frames++;
    } while (left);
    q->bytes += total + frames * GL_HEADER;
    if (frame_exempt(type))
        q->n_exempt += frames;
    return 0;

undo:
    if (old_tail) {
        chunks_give(pool, old_tail->next);
        old_tail->next = NULL;
        old_tail->len = old_len;
    } else {
        chunks_give(pool, q->head);
        q->head = NULL;
    }
    q->tail = old_tail;
    return -ENOMEM;
}

static uint32_t frame_length(const uint8_t *h)
{
    return h[0] | (uint32_t)h[1] << 8 | (uint32_t)h[2] << 16 | (uint32_t)h[3] << 24;
}

bool gl_queue_ready(const struct gl_queue *q, uint32_t credit)
{
    const uint8_t *h;

    if (!q->bytes)
        return false;
    if (q->frame_left)
        return true;
    h = q->head->data + q->head->off;
    return frame_exempt(h[4]) || frame_length(h) <= credit;
}

struct slice gl_queue_front(const struct gl_queue *q, uint32_t credit, size_t want)
{
    const struct gl_chunk *c = q->head;
    size_t n = q->frame_left;

    if (!c)
        return SLICE_NULL;
    while (n < want && c->off + n < c->len) {
        const uint8_t *h = c->data + c->off + n;
        uint32_t len = frame_length(h);
        if (!frame_exempt(h[4])) {
            if (len > credit)
                break;
            credit -= len;
        }
        n += GL_HEADER + len;
    }
    return slice_of(c->data + c->off, n);
}

static void frame_begin(struct gl_queue *q, uint32_t *credit)
{
    const uint8_t *h = q->head->data + q->head->off;
    uint32_t len = frame_length(h);

    q->frame_left = GL_HEADER + len;
    if (frame_exempt(h[4])) {
        q->n_exempt--;
    } else {
        assert(len <= *credit);
        *credit -= len;
    }
    q->mid_message = h[5] & GL_FLAG_MORE;
}

void gl_queue_consume(struct gl_queue *q, struct gl_chunk_pool *pool, size_t n, uint32_t *credit)
{
    assert(n <= q->bytes);
    while (n) {
        struct gl_chunk *c = q->head;
        uint32_t take;

        if (!q->frame_left)
            frame_begin(q, credit);
        take = n < q->frame_left ? (uint32_t)n : q->frame_left;
        c->off += take;
        q->frame_left -= take;
        q->bytes -= take;
        n -= take;
        if (c->off < c->len)
            continue;
        q->head = c->next;
        if (!q->head)
            q->tail = NULL;
        chunk_give(pool, c);
    }
}

void gl_queue_prune(struct gl_queue *q, struct gl_chunk_pool *pool)
{
    struct gl_chunk *c = q->head;
    bool keep = q->mid_message;
    size_t pos, to;

    q->bytes = 0;
    q->n_exempt = 0;
    for (; c; c = c->next) { /* squeeze every chunk in place; empty ones stay until consumed */
        to = pos = c->off;
        if (c == q->head)
            to = pos += q->frame_left;
        while (pos < c->len) {
            const uint8_t *h = c->data + pos;
            size_t n = GL_HEADER + frame_length(h);
            bool exempt = frame_exempt(h[4]), more = h[5] & GL_FLAG_MORE;
            if (keep || exempt) {
                memmove(c->data + to, h, n);
                to += n;
                q->n_exempt += exempt;
            }
            keep = keep && more;
            pos += n;
        }
        c->len = (uint32_t)to;
        q->bytes += c->len - c->off;
    }
    for (struct gl_chunk **at = &q->head; (c = *at);) { /* unlink what became empty */
        if (c->off < c->len) {
            q->tail = c;
            at = &c->next;
            continue;
        }
        *at = c->next;
        chunk_give(pool, c);
    }
    if (!q->head)
        q->tail = NULL;
}

void gl_queue_clear(struct gl_queue *q, struct gl_chunk_pool *pool)
{
    chunks_give(pool, q->head);
    *q = (struct gl_queue) { 0 };
}
