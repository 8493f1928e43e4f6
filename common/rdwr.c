#include "common/rdwr.h"

struct rd rd_of(struct slice s)
{
    return (struct rd) { .p = s.p, .left = s.n };
}

bool rd_ok(const struct rd *r)
{
    return !r->bad;
}

bool rd_end(const struct rd *r)
{
    return !r->bad && r->left == 0;
}

/* The next n bytes, or NULL (and the sticky error) when there are fewer. n is at least 1. */
static const uint8_t *take(struct rd *r, size_t n)
{
    if (r->bad || n > r->left) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *p = r->p;
    r->p += n;
    r->left -= n;
    return p;
}

static uint64_t take_le(struct rd *r, size_t n)
{
    const uint8_t *p = take(r, n);
    uint64_t v = 0;
    for (size_t i = 0; p && i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

uint8_t rd_u8(struct rd *r)
{
    return (uint8_t)take_le(r, 1);
}

uint16_t rd_u16le(struct rd *r)
{
    return (uint16_t)take_le(r, 2);
}

uint32_t rd_u32le(struct rd *r)
{
    return (uint32_t)take_le(r, 4);
}

uint64_t rd_u64le(struct rd *r)
{
    return take_le(r, 8);
}

uint32_t rd_u32be(struct rd *r)
{
    const uint8_t *p = take(r, 4);
    if (!p)
        return 0;
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

struct slice rd_bytes(struct rd *r, uint64_t n)
{
    if (r->bad || n > r->left) {
        r->bad = true;
        return SLICE_NULL;
    }
    if (n == 0)
        return SLICE_NULL;
    return slice_of(take(r, (size_t)n), (size_t)n);
}

struct slice rd_rest(struct rd *r)
{
    return rd_bytes(r, r->left);
}

static int wr_le(struct buf *b, uint64_t v, size_t n)
{
    uint8_t bytes[8];
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(v >> (8 * i));
    return buf_append(b, bytes, n);
}

int wr_u8(struct buf *b, uint8_t v)
{
    return buf_append_byte(b, v);
}

int wr_u16le(struct buf *b, uint16_t v)
{
    return wr_le(b, v, 2);
}

int wr_u32le(struct buf *b, uint32_t v)
{
    return wr_le(b, v, 4);
}

int wr_u64le(struct buf *b, uint64_t v)
{
    return wr_le(b, v, 8);
}

int wr_u32be(struct buf *b, uint32_t v)
{
    uint8_t bytes[4];
    put_u32be(bytes, v);
    return buf_append(b, bytes, sizeof(bytes));
}

void put_u32le(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

void put_u64le(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

void put_u32be(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (24 - 8 * i));
}
