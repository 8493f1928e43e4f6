/* Chunked decoder, a byte-driven state machine; data runs are copied in one go. */
#include "gateway/http/chunked.h"
#include <errno.h>

void gw_chunked_init(struct gw_chunked *c)
{
    *c = (struct gw_chunked) { .state = GW_CHUNK_SIZE };
}

static int hex_value(uint8_t ch)
{
    if (ch >= '0' && ch <= '9')
        return ch - '0';
    if (ch >= 'a' && ch <= 'f')
        return ch - 'a' + 10;
    if (ch >= 'A' && ch <= 'F')
        return ch - 'A' + 10;
    return -1;
}

/* Size line: at least one digit, at most 15 (so that `left` cannot overflow). */
static int size_byte(struct gw_chunked *c, uint8_t ch)
{
    int v = hex_value(ch);
    if (v >= 0) {
        if (++c->digits > 15)
            return -EINVAL;
        c->left = c->left * 16 + (unsigned)v;
        return 0;
    }
    if (!c->digits)
        return -EINVAL;
    if (ch == '\r')
        c->state = GW_CHUNK_SIZE_LF;
    else if (ch == ';' || ch == ' ' || ch == '\t')
        c->state = GW_CHUNK_EXT;
    else
        return -EINVAL;
    return 0;
}

static int skip_byte(struct gw_chunked *c)
{
    return ++c->skipped > GW_CHUNKED_SKIP_MAX ? -EINVAL : 0;
}

static int expect(struct gw_chunked *c, uint8_t ch, uint8_t want, enum gw_chunked_state next)
{
    if (ch != want)
        return -EINVAL;
    c->state = next;
    return 0;
}

/* One byte outside of chunk data. */
static int line_byte(struct gw_chunked *c, uint8_t ch)
{
    switch (c->state) {
    case GW_CHUNK_SIZE:
        return size_byte(c, ch);
    case GW_CHUNK_EXT:
        if (ch == '\r')
            c->state = GW_CHUNK_SIZE_LF;
        else if (ch == '\n')
            return -EINVAL;
        return skip_byte(c);
    case GW_CHUNK_SIZE_LF:
        return expect(c, ch, '\n', c->left ? GW_CHUNK_DATA : GW_CHUNK_TRAILER);
    case GW_CHUNK_DATA_CR:
        return expect(c, ch, '\r', GW_CHUNK_DATA_LF);
    case GW_CHUNK_DATA_LF:
        c->digits = 0;
        return expect(c, ch, '\n', GW_CHUNK_SIZE);
    case GW_CHUNK_TRAILER:
        if (ch == '\n')
            return -EINVAL;
        c->state = ch == '\r' ? GW_CHUNK_END_LF : GW_CHUNK_TRAILER_LINE;
        return skip_byte(c);
    case GW_CHUNK_TRAILER_LINE:
        if (ch == '\n')
            return -EINVAL;
        if (ch == '\r')
            c->state = GW_CHUNK_TRAILER_LF;
        return skip_byte(c);
    case GW_CHUNK_TRAILER_LF:
        return expect(c, ch, '\n', GW_CHUNK_TRAILER);
    case GW_CHUNK_END_LF:
        return expect(c, ch, '\n', GW_CHUNK_DONE);
    case GW_CHUNK_DATA:
    case GW_CHUNK_DONE:
        break;
    }
    return -EINVAL;
}

int gw_chunked_feed(struct gw_chunked *c, struct slice in, size_t *ret_used, struct buf *out)
{
    size_t i = 0;
    while (i < in.n && c->state != GW_CHUNK_DONE) {
        if (c->state != GW_CHUNK_DATA) {
            int r = line_byte(c, in.p[i++]);
            if (r)
                return r;
            continue;
        }
        size_t n = in.n - i < c->left ? in.n - i : (size_t)c->left;
        int r = buf_append(out, in.p + i, n);
        if (r)
            return r == -ENOBUFS ? -EFBIG : r;
        i += n;
        c->left -= n;
        if (!c->left)
            c->state = GW_CHUNK_DATA_CR;
    }
    *ret_used = i;
    return c->state == GW_CHUNK_DONE;
}
