#pragma once
/* One HTTP request from dispatch to reply. A handler either replies before it returns, or keeps the
 * pointer, sets on_gone, and replies later; after a reply the request belongs to the transport and
 * must not be touched. When the peer goes away first, on_gone(r) is called once (cancel what is
 * pending there) and the request is freed after it: no reply then.
 *
 * The transport (http/conn.c; a fake in unit tests) fills the head, then calls gw_req_head_done()
 * before the body and gw_req_dispatch() behind it. */
#include "common/buf.h"
#include "common/err.h"
#include "common/list.h"
#include "gateway/http/auth.h"
#include "gateway/http/head.h"
#include "gateway/http/routes.h"
#include <jansson.h>

struct gw_server;
struct gw_req;

#define GW_QUERY_MAX 64

struct gw_transport_ops {
    /* r->status, r->head (header lines) and r->out (body) are the reply; takes r over. */
    void (*reply)(struct gw_req *r);
};

#define GW_REQ_MAGIC 0x67777271u
struct gw_req {
    unsigned magic;
    struct gw_server *server;
    const struct gw_transport_ops *ops;
    void *transport;
    const char *peer; /* address for the log; the transport's */

    enum gw_method method;
    char *uri;        /* decoded path as requested, with base_url */
    const char *path; /* below base_url; NULL: not below it */
    char *query[GW_QUERY_MAX];
    size_t n_query;
    char *header[GW_HEADERS]; /* NULL = absent */
    bool upgrade;             /* asks for a websocket */
    struct buf body;

    struct gw_match match;
    const char *principal; /* set for all but open routes without credentials */
    enum gw_auth_how how;
    uint64_t started_us;

    void (*on_gone)(struct gw_req *r); /* handler's */
    void *ctx;                         /* handler's */

    int status;
    bool replied, headless; /* headless: HEAD or 204/304: no body on the wire */
    bool close;             /* end the connection behind the reply */
    struct buf head, out;
    const char *content_type; /* static; NULL = no body type */
    struct list_node link;    /* gw_server::pending, while a handler holds it */
};

struct gw_req *gw_req_new(struct gw_server *s, enum gw_method m, const char *uri);
void gw_req_free(struct gw_req *r);
void gw_req_set_header(struct gw_req *r, enum gw_header h, const char *value);
/* "name=value", decoded. False: too many. */
bool gw_req_add_query(struct gw_req *r, const char *arg);
const char *gw_req_query(const struct gw_req *r, const char *name);

/* Host, route, credentials, origin, XSRF: everything that can be decided without the body. True: go
 * on with the body and gw_req_dispatch. False: a reply has been given (r is gone). For websockets
 * (r->upgrade) also the rule that only the handshake route may upgrade. */
bool gw_req_head_done(struct gw_req *r);
/* The body is complete: run the handler. */
void gw_req_dispatch(struct gw_req *r);
/* The peer is gone: tells the handler and frees r. */
void gw_req_gone(struct gw_req *r);

/* ---- for handlers ---- */
const char *gw_arg(const struct gw_req *r, size_t i);
/* Body as a JSON object, new reference; an empty body gives {}. -EINVAL: e has the text. */
int gw_req_json(struct gw_req *r, json_t **ret, struct err *e);
/* Add a response header; the value must not hold CR or LF (asserted by dropping the header). */
void gw_reply_header(struct gw_req *r, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Location: base_url + path (percent-encoded here). */
void gw_reply_location(struct gw_req *r, const char *path);

/* All of these finish r. */
void gw_reply_empty(struct gw_req *r, int status);
void gw_reply_text(struct gw_req *r, int status, const char *content_type, struct slice body);
void gw_reply_json(struct gw_req *r, int status, json_t *steal);
/* Body already written into r->out. */
void gw_reply_out(struct gw_req *r, int status, const char *content_type);
void gw_reply_error(struct gw_req *r, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Status by gw_status_of(e->code). */
void gw_reply_err(struct gw_req *r, const struct err *e);
