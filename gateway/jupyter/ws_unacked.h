#pragma once
/* What was written to a websocket but not acknowledged by the peer's TCP. A network that drops
 * takes everything in the socket's buffer with it; when the client comes back with its session id
 * these messages go out again, before what the kernel's log still has for it. So a cursor that has
 * passed them is no loss (cases 100, 101). */
#include "common/list.h"
#include "proto/jp_msg.h"

#define WS_UNACKED_MAX 8192u /* messages; beyond, the oldest count as delivered */

struct ws_unacked_item {
    struct jp_msg *msg;
    uint64_t end;   /* offset in the byte stream at which it is complete */
    uint64_t at_ms; /* when it was written */
};
struct ws_unacked { /* FIFO; zeroed is empty */
    struct ws_unacked_item *items;
    size_t first, n, cap;
};
void ws_unacked_fini(struct ws_unacked *u);
/* Takes a reference. */
void ws_unacked_add(struct ws_unacked *u, struct jp_msg *m, uint64_t end, uint64_t now_ms);
/* Bytes up to this offset have arrived. */
void ws_unacked_ack(struct ws_unacked *u, uint64_t offset);
/* Has the oldest waited longer than any TCP delays its acknowledgements? */
bool ws_unacked_overdue(const struct ws_unacked *u, uint64_t now_ms);
/* Oldest message (the caller's reference now), or NULL. */
struct jp_msg *ws_unacked_take(struct ws_unacked *u);

/* Parked until the session comes back: per server, bounded in bytes and time. */
#define WS_PARKED_BYTES (64u << 20)
#define WS_PARKED_TTL_MS 600000u
struct ws_parked {
    struct list all; /* oldest first */
    size_t bytes;
};
void ws_parked_init(struct ws_parked *p);
void ws_parked_fini(struct ws_parked *p);
/* Moves everything out of u. */
void ws_parked_put(struct ws_parked *p, const char *kernel, const char *session,
                   struct ws_unacked *u, uint64_t now_ms);
/* Moves what is parked for this session into u (which is empty). */
void ws_parked_get(struct ws_parked *p, const char *kernel, const char *session,
                   struct ws_unacked *u, uint64_t now_ms);
