#pragma once
/* Decoder of the chunked transfer coding (RFC 9112 section 7.1) for request bodies. Pure; hostile
 * input; chunk extensions and trailers are skipped, both bounded. */
#include "common/buf.h"

enum gw_chunked_state {
    GW_CHUNK_SIZE, /* hex digits */
    GW_CHUNK_EXT,  /* ";..." up to CR */
    GW_CHUNK_SIZE_LF,
    GW_CHUNK_DATA,
    GW_CHUNK_DATA_CR,
    GW_CHUNK_DATA_LF,
    GW_CHUNK_TRAILER, /* at the start of a trailer line */
    GW_CHUNK_TRAILER_LINE,
    GW_CHUNK_TRAILER_LF, /* the LF of a trailer line */
    GW_CHUNK_END_LF,     /* the LF of the last, empty line */
    GW_CHUNK_DONE,
};
struct gw_chunked {
    enum gw_chunked_state state;
    uint64_t left;    /* of the present chunk */
    unsigned digits;  /* of the present size */
    unsigned skipped; /* bytes of extensions and trailers so far */
};
#define GW_CHUNKED_SKIP_MAX 8192u

void gw_chunked_init(struct gw_chunked *c);
/* Decode `in` and append data to out. 0: more input is needed (all of `in` was used); 1: the body
 * is complete, *ret_used bytes of `in` belong to it. -EINVAL: malformed; -EFBIG: out is full (its
 * max is the body limit); -ENOMEM. After an error or 1 do not feed again. */
int gw_chunked_feed(struct gw_chunked *c, struct slice in, size_t *ret_used, struct buf *out);
