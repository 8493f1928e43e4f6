#pragma once
/* The server object: configuration, TLS context, listener, connections. Internal to
 * gateway/; the public face is gateway/gateway.h. */
#include "common/list.h"
#include "common/log.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "gateway/gateway.h"
#include "gateway/http/auth.h"
#include "gateway/http/request.h"
#include "gateway/jupyter/ws_unacked.h"
#include <openssl/ssl.h>

#define GW_CONNECTIONS_MAX 2000u    /* more are told 503 */
#define GW_HEAD_DEADLINE_MS 15000u  /* connect to complete head */
#define GW_IDLE_DEADLINE_MS 90000u  /* keep-alive: end of a reply to the next complete head */
#define GW_BODY_DEADLINE_MS 30000u  /* for a body, plus a millisecond for each 8 bytes received */
#define GW_WRITE_DEADLINE_MS 60000u /* no progress while writing a reply */
#define GW_CLOSE_GRACE_MS 5000u     /* server close: what is in flight gets so long */

struct gw_counters {
    struct metric *http, *http_seconds, *ws_opened, *ws_open, *ws_in, *ws_out, *ws_bytes_out,
        *ws_bad, *rejected, *conns;
};

struct gw_server {
    struct loop *loop;
    struct log_ctx log;
    struct km_manager *km;
    struct metrics *metrics;
    struct gw_counters count;
    struct gw_config config; /* deep copy */
    char *base;              /* "/", "/gw/" */
    char *url;
    unsigned port;
    struct gw_auth *auth;
    const struct gw_route *routes;
    size_t n_routes;
    uint64_t started_us, activity_us; /* UTC */

    SSL_CTX *tls; /* NULL: plain */
    int listen_fd;
    struct loop_fd *listener;
    struct loop_timer *tick;
    unsigned tick_ms; /* its period now, 0 = off */
    bool accept_paused;
    uint64_t now_ms;   /* of the present tick */
    struct list conns; /* struct gw_conn */
    unsigned n_conns;
    struct list pending; /* struct gw_req held by handlers */
    struct list sockets; /* struct gw_ws: open websockets */
    unsigned n_sockets;
    struct ws_parked parked; /* messages for websockets that come back */
    uint8_t *scratch;        /* GW_SCRATCH bytes: output on its way to a socket, within one call */

    bool closing;
    uint64_t close_deadline_ms;
    void (*closed)(void *ctx);
    void *closed_ctx;
    void (*on_shutdown)(void *ctx);
    void *shutdown_ctx;
};
#define GW_CHUNK (64u << 10)
#define GW_SCRATCH (GW_CHUNK + 64)

/* Access log and metrics of a finished request. */
void gw_server_count(struct gw_server *s, const struct gw_req *r);
/* (Re)arm the tick: fast while requests are pending, slow while there are connections, else off. */
void gw_server_arm(struct gw_server *s);
