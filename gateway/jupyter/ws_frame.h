#pragma once
/* Websocket frames from a client (RFC 6455), byte-driven: pure, hostile input, fuzzed. Puts
 * fragments together; control frames may come between them. No UTF-8 validation: some proxies send
 * binary as text (jupyter.md 1.5), and message content is opaque anyway. No extensions: RSV bits
 * are errors. */
#include "common/buf.h"

enum gw_ws_event {
    GW_WS_MORE,    /* everything used, nothing complete */
    GW_WS_MESSAGE, /* a whole message: payload */
    GW_WS_PING,    /* control frame: payload */
    GW_WS_PONG,
    GW_WS_CLOSE,
};
enum {
    GW_WS_TEXT = 1,
    GW_WS_BINARY = 2,
    GW_WS_OP_CLOSE = 8,
    GW_WS_OP_PING = 9,
    GW_WS_OP_PONG = 10
};

struct gw_ws_rx {
    uint8_t head[14];
    unsigned head_n;
    bool in_payload;
    uint8_t op; /* of the present frame */
    bool fin;
    uint64_t left; /* payload bytes still to come */
    uint8_t mask[4];
    unsigned mask_at;
    bool fragmented; /* a message is under way: continuations may come */
    struct buf msg;  /* its bytes so far */
    uint8_t ctl[125];
    unsigned ctl_n;
};
void gw_ws_rx_init(struct gw_ws_rx *r, size_t max_message);
void gw_ws_rx_fini(struct gw_ws_rx *r);
/* Take bytes from p (unmasked in place) until an event. *ret_used of n are used; *ret_payload is
 * valid until the next call. Errors: -EPROTO (close 1002), -EMSGSIZE (1009), -ENOMEM. */
int gw_ws_rx_feed(struct gw_ws_rx *r, uint8_t *p, size_t n, size_t *ret_used,
                  enum gw_ws_event *ret_event, struct slice *ret_payload);

#define GW_WS_HEAD_MAX 10
/* Header of a frame to a client (unmasked); returns its length. op 0 = continuation. */
size_t gw_ws_head(uint8_t ret[GW_WS_HEAD_MAX], unsigned op, bool fin, uint64_t len);
/* Sec-WebSocket-Accept of a key. */
void gw_ws_accept(struct slice key, char ret[29]);
/* May a peer send this close code? (RFC 6455 7.4) */
bool gw_ws_code_ok(unsigned code);
