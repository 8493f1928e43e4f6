#pragma once
/* One TCP connection: HTTP/1.1 requests one after the other (pipelined ones wait in rx), or one
 * websocket. Owned by the server's list, freed by gw_conn_kill or by its own events. */
#include "common/sm.h"
#include "gateway/http/chunked.h"
#include "gateway/http/head.h"
#include "gateway/http/request.h"
#include "gateway/http/server.h"
#include "gateway/http/stream.h"

struct gw_ws;

enum gw_conn_state {
    GW_CONN_HEAD,     /* waiting for, or inside, a request head */
    GW_CONN_BODY,     /* reading its body */
    GW_CONN_HANDLING, /* a handler has the request */
    GW_CONN_REPLY,    /* writing the reply */
    GW_CONN_SOCKET,   /* a websocket: see jupyter/ws_conn.h */
    GW_CONN_LINGER,   /* all is said: waiting for the peer to close, input is dropped */
};

#define GW_CONN_MAGIC 0x6777636fu
struct gw_conn {
    unsigned magic;
    struct gw_server *server;
    struct gw_stream stream;
    struct list_node link; /* gw_server::conns */
    struct sm state;
    char peer[48];
    bool running; /* inside conn_run: replies only change the state */
    bool eof;     /* the peer has ended its side */

    struct gw_req *req; /* BODY, HANDLING */
    bool keepalive, body_chunked;
    struct gw_chunked chunked;
    uint64_t body_left, body_got, body_since_ms;
    uint64_t discard;       /* bytes of a refused body to drop before the next head */
    uint64_t deadline_ms;   /* 0 = none */
    struct buf rx;          /* input not yet used */
    struct buf tx, tx_body; /* output not yet taken by the socket */

    struct gw_ws *ws;
};

/* Takes fd over. NULL: it could not be set up (fd is closed). */
struct gw_conn *gw_conn_new(struct gw_server *s, int fd, const char *peer);
/* End the connection at once: tells who waits for it, closes, frees. */
void gw_conn_kill(struct gw_conn *c);
/* From the server's tick: deadlines, and peers that left unseen. False: c is gone. */
bool gw_conn_tick(struct gw_conn *c);
/* Server close: nothing is in flight, the connection may go. */
bool gw_conn_idle(const struct gw_conn *c);
/* Of the websocket: everything is said, half-close and wait a little for the peer. */
void gw_conn_linger(struct gw_conn *c);
/* Something has changed outside of its own events (the websocket's kernel has news): go on. May
 * free c. */
void gw_conn_continue(struct gw_conn *c);
/* Write what is in tx and tx_body as far as the socket takes it. 1 all, 0 later, -1 broken. */
int gw_conn_flush(struct gw_conn *c);
