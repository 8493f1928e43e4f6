#pragma once
/* Bounds-checked cursors over hostile bytes. After the first error every operation is a no-op that
 * yields 0/empty, so that a parser reads straight through and checks rd_ok() once. */
#include "common/buf.h"
#include "common/slice.h"

struct rd {
    const uint8_t *p;
    size_t left;
    bool bad;
};

struct rd rd_of(struct slice s);
bool rd_ok(const struct rd *r);  /* no error so far */
bool rd_end(const struct rd *r); /* no error and nothing left */
uint8_t rd_u8(struct rd *r);
uint16_t rd_u16le(struct rd *r);
uint32_t rd_u32le(struct rd *r);
uint64_t rd_u64le(struct rd *r);
uint32_t rd_u32be(struct rd *r);
struct slice rd_bytes(struct rd *r, uint64_t n);
struct slice rd_rest(struct rd *r);

/* Writers append to a buf; the result is that of buf_append. */
int wr_u8(struct buf *b, uint8_t v);
int wr_u16le(struct buf *b, uint16_t v);
int wr_u32le(struct buf *b, uint32_t v);
int wr_u64le(struct buf *b, uint64_t v);
int wr_u32be(struct buf *b, uint32_t v);
void put_u32le(uint8_t *p, uint32_t v);
void put_u64le(uint8_t *p, uint64_t v);
void put_u32be(uint8_t *p, uint32_t v);
