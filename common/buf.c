/* Memory layout: data[0 .. off) is consumed, data[off .. off+len) is live, the rest is room. The
 * maximum bounds the live bytes; the allocation is at most one byte larger (for a NUL). */
#include "common/buf.h"
#include "common/mem.h"
#include "common/utf8.h"
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void buf_init(struct buf *b, size_t max)
{
    *b = (struct buf) { .max = max };
}

void buf_fini(struct buf *b)
{
    free(b->data);
    *b = (struct buf) { .max = b->max };
}

struct slice buf_slice(const struct buf *b)
{
    return b->len ? (struct slice) { b->data + b->off, b->len } : SLICE_NULL;
}

void buf_clear(struct buf *b)
{
    b->off = b->len = 0;
}

void buf_consume(struct buf *b, size_t n)
{
    assert(n <= b->len);
    b->off += n;
    b->len -= n;
    if (b->len == 0)
        b->off = 0;
}

void buf_truncate(struct buf *b, size_t n)
{
    if (n < b->len)
        b->len = n;
    if (b->len == 0)
        b->off = 0;
}

/* Capacity for `total` live bytes: the next doubling, but never beyond the maximum plus the NUL. */
static size_t grown_cap(const struct buf *b, size_t total)
{
    size_t cap = b->cap < 64 ? 64 : b->cap;
    while (cap < total)
        cap = cap > SIZE_MAX / 2 ? total : cap * 2;
    size_t limit = b->max < SIZE_MAX ? b->max + 1 : b->max;
    return cap > limit && total <= limit ? limit : cap;
}

/* Room for n more bytes behind the live ones; `extra` (0 or 1) may exceed the maximum. */
static int ensure(struct buf *b, size_t n, size_t extra)
{
    if (n > b->max || b->len > b->max - n)
        return -ENOBUFS;
    size_t total = b->len + n + extra;
    if (total < extra)
        return -ENOBUFS;
    if (b->cap - b->off >= total)
        return 0;
    if (b->off) {
        memmove(b->data, b->data + b->off, b->len);
        b->off = 0;
        /* Moving pays only when it made real room; else fall through and grow as well. */
        if (b->cap >= total && (b->len <= b->cap / 2 || b->cap > b->max))
            return 0;
    }
    size_t cap = grown_cap(b, total);
    if (cap <= b->cap)
        return 0;
    uint8_t *p = mem_try_realloc(b->data, cap);
    if (!p)
        return b->cap >= total ? 0 : -ENOMEM;
    b->data = p;
    b->cap = cap;
    return 0;
}

int buf_append(struct buf *b, const void *p, size_t n)
{
    if (n == 0)
        return 0;
    int r = ensure(b, n, 0);
    if (r < 0)
        return r;
    memcpy(b->data + b->off + b->len, p, n);
    b->len += n;
    return 0;
}

int buf_append_slice(struct buf *b, struct slice s)
{
    return buf_append(b, s.p, s.n);
}

int buf_append_str(struct buf *b, const char *s)
{
    return buf_append(b, s, strlen(s));
}

int buf_append_byte(struct buf *b, uint8_t c)
{
    return buf_append(b, &c, 1);
}

int buf_vprintf(struct buf *b, const char *fmt, va_list ap)
{
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, again);
    va_end(again);
    if (n < 0)
        return -ENOMEM;
    int r = ensure(b, (size_t)n, 1);
    if (r < 0)
        return r;
    vsnprintf((char *)b->data + b->off + b->len, (size_t)n + 1, fmt, ap);
    b->len += (size_t)n;
    return 0;
}

int buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int r = buf_vprintf(b, fmt, ap);
    va_end(ap);
    return r;
}

/* Append the JSON form of one byte that cannot stand as it is. */
static int append_json_escape(struct buf *b, uint8_t c)
{
    static const char short_form[32] = {
        ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r'
    };
    char esc[8];
    if (c == '"' || c == '\\')
        snprintf(esc, sizeof(esc), "\\%c", c);
    else if (c < 32 && short_form[c])
        snprintf(esc, sizeof(esc), "\\%c", short_form[c]);
    else
        snprintf(esc, sizeof(esc), "\\u%04x", c);
    return buf_append_str(b, esc);
}

static int append_json_body(struct buf *b, struct slice s)
{
    size_t plain = 0; /* start of the run that needs no change */
    for (size_t i = 0; i < s.n;) {
        uint8_t c = s.p[i];
        size_t len = utf8_len(s.p + i, s.n - i);
        if (len > 1 || (len == 1 && c >= 0x20 && c != '"' && c != '\\' && c != 0x7f)) {
            i += len;
            continue;
        }
        int r = buf_append(b, s.p + plain, i - plain);
        if (r == 0)
            r = len ? append_json_escape(b, c) : buf_append_str(b, UTF8_REPLACEMENT);
        if (r < 0)
            return r;
        plain = ++i;
    }
    return s.n > plain ? buf_append(b, s.p + plain, s.n - plain) : 0;
}

int buf_append_json_string(struct buf *b, struct slice s)
{
    size_t before = b->len;
    int r = buf_append_byte(b, '"');
    if (r == 0)
        r = append_json_body(b, s);
    if (r == 0)
        r = buf_append_byte(b, '"');
    if (r < 0)
        buf_truncate(b, before);
    return r;
}

uint8_t *buf_reserve(struct buf *b, size_t n)
{
    /* A byte of slack makes n = 0 on a fresh buffer a valid, non-NULL pointer. */
    if (ensure(b, n, 1) < 0)
        return NULL;
    return b->data + b->off + b->len;
}

void buf_commit(struct buf *b, size_t n)
{
    assert(n <= b->cap - b->off - b->len && n <= b->max - b->len);
    b->len += n;
}

char *buf_cstr(struct buf *b)
{
    if (ensure(b, 0, 1) < 0)
        return NULL;
    b->data[b->off + b->len] = '\0';
    return (char *)b->data + b->off;
}

uint8_t *buf_steal(struct buf *b, size_t *ret_len)
{
    if (!buf_cstr(b))
        return NULL;
    if (b->off)
        memmove(b->data, b->data + b->off, b->len + 1);
    uint8_t *p = b->data;
    if (ret_len)
        *ret_len = b->len;
    *b = (struct buf) { .max = b->max };
    return p;
}
