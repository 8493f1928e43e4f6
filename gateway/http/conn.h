#pragma once
/* One TCP connection: HTTP/1.1 requests one after the other, or one websocket. Lives from accept to
 * lws' WSI_DESTROY; wsi is NULL from the moment the peer is gone. Why so much care about states:
 * libwebsockets 4.1 does not look at a connection's input while a GET is being answered (so the end
 * of the peer is seen by the server's tick, see gw_conn_tick), repeats HTTP_BODY_COMPLETION when
 * pipelined bytes follow, and takes a POST without Content-Length for one of 100 MB. */
#include "gateway/http/chunked.h"
#include "gateway/http/request.h"
#include "gateway/http/server.h"

struct lws;
struct gw_ws;

#define GW_CONN_MAGIC 0x6777636fu
struct gw_conn {
    unsigned magic;
    struct gw_server *server;
    struct lws *wsi;
    struct list_node link; /* gw_server::conns */
    char peer[48];

    struct gw_req *req; /* being received, or held by a handler */
    bool dispatched;    /* the handler has it */
    bool body_chunked;
    bool drain;      /* a reply went out before the body was read: discard the rest */
    bool keepalive;  /* what this request allows */
    bool rx_off;     /* input is stopped while a handler holds the request */
    bool in_upgrade; /* inside CONFIRM_UPGRADE: replies are written at once */
    bool sending, lingering;
    struct gw_chunked chunked;
    uint64_t body_got, body_since_ms;
    uint64_t deadline_ms; /* 0 = none */
    struct buf tx_head, tx_body;

    struct gw_ws *ws;
};

struct gw_conn *gw_conn_new(struct gw_server *s, const char *peer);
void gw_conn_free(struct gw_conn *c);
/* From the server's tick: deadlines, and peers that left while a handler works. */
void gw_conn_tick(struct gw_conn *c);
/* End the connection at once, without ceremony. Never from inside a callback of lws. */
void gw_conn_kill(struct gw_conn *c);
/* Server close: true when nothing is in flight and the connection may go. */
bool gw_conn_idle(const struct gw_conn *c);
/* Has the peer closed (or reset) its side? Also true for unknown states of a dead socket. */
bool gw_conn_peer_left(const struct gw_conn *c);

int gw_lws_callback(struct lws *wsi, int reason, void *user, void *in, size_t len);
