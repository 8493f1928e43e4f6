/* Connections; see conn.h. conn_run drives the state machine until it needs more input, more room
 * for output, or a handler; every event of the socket and every late reply ends there. */
#include "gateway/http/conn.h"
#include "common/mem.h"
#include "gateway/http/error.h"
#include "gateway/jupyter/ws_conn.h"
#include <errno.h>
#include <string.h>
#include <time.h>

#define READ_STEP (16u << 10)
#define READS 4                            /* per event, so that nobody else starves */
#define RX_MAX (GW_HEAD_MAX + (64u << 10)) /* input waiting for its turn */
#define LINGER_MS 2000u
#define DISCARD_MAX (256u << 10)

static const struct sm_state states[] = {
    [GW_CONN_HEAD] = { "HEAD", SM_TO(GW_CONN_BODY) | SM_TO(GW_CONN_HANDLING) |
                                   SM_TO(GW_CONN_REPLY) | SM_TO(GW_CONN_SOCKET) },
    [GW_CONN_BODY] = { "BODY", SM_TO(GW_CONN_HANDLING) | SM_TO(GW_CONN_REPLY) },
    [GW_CONN_HANDLING] = { "HANDLING", SM_TO(GW_CONN_REPLY) },
    [GW_CONN_REPLY] = { "REPLY", SM_TO(GW_CONN_HEAD) | SM_TO(GW_CONN_LINGER) },
    [GW_CONN_SOCKET] = { "SOCKET", SM_TO(GW_CONN_LINGER) },
    [GW_CONN_LINGER] = { "LINGER", 0 },
};
static const struct sm_def machine = { "connection", states, sizeof(states) / sizeof(states[0]) };

static void conn_run(struct gw_conn *c);
static void on_ready(void *ctx, int events);

static uint64_t now_ms(const struct gw_conn *c)
{
    return loop_now_ms(c->server->loop);
}

static bool in(const struct gw_conn *c, enum gw_conn_state s)
{
    return c->state.state == (unsigned)s;
}

struct gw_conn *gw_conn_new(struct gw_server *s, int fd, const char *peer)
{
    struct gw_conn *c = xnew(struct gw_conn);
    c->magic = GW_CONN_MAGIC;
    c->server = s;
    sm_init(&c->state, &machine, GW_CONN_HEAD);
    snprintf(c->peer, sizeof(c->peer), "%s", peer);
    c->deadline_ms = loop_now_ms(s->loop) + GW_HEAD_DEADLINE_MS;
    buf_init(&c->rx, RX_MAX + READ_STEP);
    buf_init(&c->tx, SIZE_MAX / 2);
    list_push_back(&s->conns, &c->link);
    metric_set(s->count.conns, ++s->n_conns);
    if (gw_stream_init(&c->stream, s->loop, fd, s->tls, on_ready, c)) {
        gw_conn_kill(c);
        return NULL;
    }
    return c;
}

void gw_conn_kill(struct gw_conn *c)
{
    struct gw_server *s = c->server;
    if (c->req)
        gw_req_gone(TAKE_PTR(c->req));
    if (c->ws)
        gw_ws_free(TAKE_PTR(c->ws));
    gw_stream_fini(&c->stream);
    list_remove(&c->link);
    metric_set(s->count.conns, --s->n_conns);
    buf_fini(&c->rx);
    buf_fini(&c->tx);
    buf_fini(&c->tx_body);
    c->magic = 0;
    free(c);
    gw_server_arm(s);
}

bool gw_conn_idle(const struct gw_conn *c)
{
    return in(c, GW_CONN_HEAD) || in(c, GW_CONN_LINGER);
}

/* ---- output ---- */

int gw_conn_flush(struct gw_conn *c)
{
    while (c->tx.len || c->tx_body.len) {
        uint8_t *p = c->server->scratch;
        size_t n = 0;
        for (struct buf *b = &c->tx; b; b = b == &c->tx ? &c->tx_body : NULL) {
            size_t k = b->len < GW_CHUNK - n ? b->len : GW_CHUNK - n;
            if (k)
                memcpy(p + n, buf_slice(b).p, k);
            n += k;
        }
        ssize_t w = gw_stream_write(&c->stream, p, n);
        if (w == -EAGAIN)
            return 0;
        if (w < 0)
            return -1;
        size_t head = (size_t)w < c->tx.len ? (size_t)w : c->tx.len;
        buf_consume(&c->tx, head);
        buf_consume(&c->tx_body, (size_t)w - head);
        if (in(c, GW_CONN_REPLY))
            c->deadline_ms = now_ms(c) + GW_WRITE_DEADLINE_MS;
    }
    buf_fini(&c->tx_body);
    return 1;
}

static int compose(struct gw_conn *c, struct gw_req *r)
{
    char date[64];
    time_t now = (time_t)(loop_wall_us(c->server->loop) / 1000000);
    struct tm tm;
    gmtime_r(&now, &tm);
    strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", &tm);
    struct buf *h = &c->tx;
    int e = buf_printf(h, "HTTP/1.1 %d %s\r\nDate: %s\r\nServer: cellvisor\r\n", r->status,
                       gw_status_phrase(r->status), date);
    if (!e)
        e = buf_append_slice(h, buf_slice(&r->head));
    if (!e && r->content_type)
        e = buf_printf(h, "Content-Type: %s\r\n", r->content_type);
    if (!e && r->status != 204 && r->status != 304)
        e = buf_printf(h, "Content-Length: %zu\r\n", r->out.len);
    if (!e)
        e = buf_printf(h, "Connection: %s\r\n\r\n", c->keepalive ? "keep-alive" : "close");
    if (!e && !r->headless) {
        c->tx_body = r->out; /* moved */
        r->out = (struct buf) { .max = 0 };
    }
    return e;
}

static void conn_reply(struct gw_req *r)
{
    struct gw_conn *c = r->transport;
    bool unread = !in(c, GW_CONN_HANDLING) && (c->body_left || c->body_chunked);
    c->req = NULL;
    /* A small body of a refused request is dropped; for a big one the connection is not worth it.
     */
    if (unread && !c->body_chunked && c->body_left <= DISCARD_MAX)
        c->discard = c->body_left;
    else if (unread)
        c->keepalive = false;
    if (r->close || c->server->closing || c->eof)
        c->keepalive = false;
    if (compose(c, r))
        c->keepalive = false; /* out of memory: what there is goes out, then the end */
    gw_req_free(r);
    sm_move(&c->state, GW_CONN_REPLY);
    c->deadline_ms = now_ms(c) + GW_WRITE_DEADLINE_MS;
    if (!c->running)
        conn_run(c);
}

static const struct gw_transport_ops ops = { .reply = conn_reply };

void gw_conn_linger(struct gw_conn *c)
{
    /* A close with unread input would reset the connection and eat what we have just said. */
    gw_stream_shutdown(&c->stream);
    sm_move(&c->state, GW_CONN_LINGER);
    c->deadline_ms = now_ms(c) + LINGER_MS;
}

static void next_request(struct gw_conn *c)
{
    c->body_left = c->body_got = 0;
    c->body_chunked = false;
    sm_move(&c->state, GW_CONN_HEAD);
    c->deadline_ms = now_ms(c) + GW_IDLE_DEADLINE_MS;
}

/* ---- input ---- */

/* Everything there is, within bounds, into rx. */
static void fill(struct gw_conn *c)
{
    /* OpenSSL may hold bytes that no event announces: there read until it has none. */
    for (int i = 0; (i < READS || c->stream.ssl) && c->rx.len < RX_MAX && !c->eof; i++) {
        uint8_t *p = buf_reserve(&c->rx, READ_STEP);
        ssize_t n = p ? gw_stream_read(&c->stream, p, READ_STEP) : -ENOMEM;
        if (n == -EAGAIN)
            break;
        if (n <= 0)
            c->eof = true;
        else
            buf_commit(&c->rx, (size_t)n);
    }
}

static void read_query(struct gw_req *r, struct slice q, struct gw_head *h)
{
    char arg[GW_URI_MAX + 1];
    size_t at = 0;
    while (at < q.n && !h->status) {
        size_t end = at;
        while (end < q.n && q.p[end] != '&')
            end++;
        gw_query_decode(slice_of(q.p + at, end - at), arg, sizeof(arg));
        if (arg[0] && !gw_req_add_query(r, arg)) {
            h->status = 400;
            h->why = "There are too many query arguments";
        }
        at = end + 1;
    }
}

static struct gw_req *make_request(struct gw_conn *c, struct gw_head *h)
{
    char path[GW_URI_MAX + 8] = "/";
    struct slice query = SLICE_NULL;
    int e = h->status ? 0 : gw_target_split(h->target, path, sizeof(path), &query);
    struct gw_req *r = gw_req_new(c->server, h->method, path);
    r->ops = &ops;
    r->transport = c;
    r->peer = c->peer;
    if (e && !h->status) {
        h->status = e == -ENOENT ? 404 : 400;
        h->why = e == -ENOENT ? "Not found: no name here holds a slash or is a dot segment"
                              : "The URI is malformed";
    }
    if (h->status)
        return r;
    read_query(r, query, h);
    for (int i = 0; i < GW_HEADERS; i++)
        if (h->header[i].p)
            r->header[i] = slice_dup(h->header[i]);
    r->upgrade = h->upgrade_ws && h->method == GW_GET && !h->length && !h->chunked;
    return r;
}

static void dispatch(struct gw_conn *c)
{
    c->deadline_ms = 0;
    sm_move(&c->state, GW_CONN_HANDLING);
    gw_req_dispatch(c->req);
    gw_server_arm(c->server);
}

static void start_body(struct gw_conn *c, const struct gw_head *h)
{
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    sm_move(&c->state, GW_CONN_BODY);
    gw_chunked_init(&c->chunked);
    c->body_since_ms = now_ms(c);
    c->deadline_ms = c->body_since_ms + GW_BODY_DEADLINE_MS;
    if (h->expect_continue && !c->rx.len)
        (void)buf_append_str(&c->tx, go_on);
    (void)gw_conn_flush(c);
}

static void start_request(struct gw_conn *c, struct gw_head *h)
{
    struct gw_req *r = make_request(c, h);
    c->req = r;
    c->keepalive = h->keepalive;
    c->body_chunked = h->chunked;
    c->body_left = h->length;
    if (h->status) {
        /* What follows cannot be told from the next request. */
        r->close = true;
        gw_reply_error(r, h->status, "%s", h->why);
        return;
    }
    if (!gw_req_head_done(r))
        return;
    if (r->upgrade) {
        gw_ws_handshake(c, r); /* replies, or makes this a websocket */
        return;
    }
    if (h->length > c->server->config.max_body) {
        r->close = true;
        gw_reply_error(r, 413, "The body has %llu bytes; at most %zu are taken",
                       (unsigned long long)h->length, c->server->config.max_body);
        return;
    }
    if (h->length || h->chunked)
        start_body(c, h);
    else
        dispatch(c);
}

/* True: something was done. */
static bool step_head(struct gw_conn *c)
{
    struct gw_head h;
    if (c->discard && c->rx.len) {
        size_t n = c->rx.len < c->discard ? c->rx.len : (size_t)c->discard;
        buf_consume(&c->rx, n);
        c->discard -= n;
        return true;
    }
    if (!c->rx.len || !gw_head_parse(buf_slice(&c->rx), &h))
        return false;
    /* The slices of h point into rx: consume only when the request has its copies. */
    size_t used = h.size;
    struct buf rest = c->rx;
    c->rx = (struct buf) { .max = rest.max };
    if (rest.len > used && buf_append(&c->rx, buf_slice(&rest).p + used, rest.len - used))
        c->eof = true;
    start_request(c, &h);
    buf_fini(&rest);
    return true;
}

static void body_failed(struct gw_conn *c, int e)
{
    c->req->close = true;
    if (e == -EINVAL)
        gw_reply_error(c->req, 400, "The chunked body is malformed");
    else if (e == -ENOMEM)
        gw_reply_error(c->req, 503, "Out of memory");
    else
        gw_reply_error(c->req, 413, "The body has more than %zu bytes", c->server->config.max_body);
}

static bool step_body(struct gw_conn *c)
{
    struct slice s = buf_slice(&c->rx);
    size_t used = 0;
    int e = 0;
    if (!s.n)
        return false;
    if (c->body_chunked) {
        e = gw_chunked_feed(&c->chunked, s, &used, &c->req->body);
    } else {
        used = s.n < c->body_left ? s.n : (size_t)c->body_left;
        e = buf_append(&c->req->body, s.p, used);
        c->body_left -= e ? 0 : used;
        e = e ? e : !c->body_left;
    }
    buf_consume(&c->rx, used);
    c->body_got += used;
    c->deadline_ms = c->body_since_ms + GW_BODY_DEADLINE_MS + c->body_got / 8;
    if (e < 0) {
        body_failed(c, e);
    } else if (e) {
        c->body_chunked = false;
        dispatch(c);
    }
    return true;
}

/* False: c is gone. */
static bool step_reply(struct gw_conn *c, bool *progress)
{
    int r = gw_conn_flush(c);
    if (r < 0) {
        gw_conn_kill(c);
        return false;
    }
    if (!r)
        return true;
    *progress = true;
    if (c->keepalive) {
        next_request(c);
    } else if (c->eof) {
        gw_conn_kill(c);
        return false;
    } else {
        gw_conn_linger(c);
    }
    return true;
}

/* The peer has ended its side and all its bytes are used up. */
static bool over(const struct gw_conn *c)
{
    return c->eof && !in(c, GW_CONN_REPLY);
}

static void set_interest(struct gw_conn *c)
{
    bool read = !c->eof && c->rx.len < RX_MAX;
    bool write = c->tx.len || c->tx_body.len;
    if (in(c, GW_CONN_SOCKET)) {
        read = read && gw_ws_reads(c->ws);
        write = write || gw_ws_writes(c->ws);
    }
    gw_stream_want(&c->stream, read, write);
}

static void conn_run(struct gw_conn *c)
{
    bool progress = true;
    c->running = true;
    while (progress) {
        progress = false;
        switch ((enum gw_conn_state)c->state.state) {
        case GW_CONN_HEAD:
            progress = step_head(c);
            break;
        case GW_CONN_BODY:
            progress = step_body(c);
            break;
        case GW_CONN_REPLY:
            if (!step_reply(c, &progress))
                return;
            break;
        case GW_CONN_SOCKET:
            if (gw_ws_run(c->ws) < 0) {
                gw_conn_kill(c);
                return;
            }
            progress = !in(c, GW_CONN_SOCKET);
            break;
        case GW_CONN_LINGER:
            buf_clear(&c->rx);
            break;
        case GW_CONN_HANDLING:
            break;
        }
    }
    c->running = false;
    if (over(c)) {
        gw_conn_kill(c);
        return;
    }
    if (!c->rx.len)
        buf_fini(&c->rx);
    if (!c->tx.len)
        buf_fini(&c->tx);
    set_interest(c);
}

static void on_ready(void *ctx, int events)
{
    struct gw_conn *c = ctx;
    if (events & (LOOP_READ | LOOP_HUP))
        fill(c);
    conn_run(c);
}

void gw_conn_continue(struct gw_conn *c)
{
    if (!c->running)
        conn_run(c);
}

/* ---- time ---- */

bool gw_conn_tick(struct gw_conn *c)
{
    uint64_t now = c->server->now_ms;
    /* Input is not read while much of it waits: then the end of the peer shows only here. */
    if (!c->stream.want_read && !c->eof && gw_stream_peer_left(&c->stream) &&
        (in(c, GW_CONN_HANDLING) || in(c, GW_CONN_SOCKET))) {
        gw_conn_kill(c);
        return false;
    }
    if (!c->deadline_ms || now < c->deadline_ms)
        return true;
    c->deadline_ms = 0;
    if (in(c, GW_CONN_BODY)) {
        c->req->close = true;
        gw_reply_error(c->req, 408, "The body did not come in time");
        return false; /* alive perhaps, but not to be touched in this tick */
    }
    gw_conn_kill(c);
    return false;
}
