#pragma once
/* The message that a websocket is sending, readable in pieces. Small messages are one piece. Big v1
 * messages are not copied as a whole: offset table, then the parts from where they lie. */
#include "common/buf.h"
#include "proto/jp_ws.h"

struct ws_source {
    struct buf head;    /* legacy: the whole frame; v1: its table and channel name */
    struct jp_msg *msg; /* v1: parts still to come; NULL otherwise */
    size_t part, off;   /* position in the parts: 0-3 JSON, 4.. buffers */
    bool binary, started, busy;
};

void ws_source_init(struct ws_source *s);
void ws_source_fini(struct ws_source *s);
void ws_source_clear(struct ws_source *s); /* ready for the next message; keeps a small buffer */
static inline bool ws_source_busy(const struct ws_source *s)
{
    return s->busy;
}
/* Take a message (keeps a reference when it needs one). -ENOBUFS, -ENOMEM. */
int ws_source_set(struct ws_source *s, enum jp_ws_proto proto, const struct jp_ws_opts *o,
                  struct jp_msg *m);
/* Copy up to size bytes to p; *ret_last: the frame ends with them. */
size_t ws_source_read(struct ws_source *s, uint8_t *p, size_t size, bool *ret_last);
