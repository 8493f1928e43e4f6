/* The libwebsockets side of a connection; see conn.h. */
#include "gateway/http/conn.h"
#include "common/mem.h"
#include "gateway/http/error.h"
#include "gateway/http/head.h"
#include "gateway/jupyter/ws_conn.h"
#include <errno.h>
#include <libwebsockets.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define LINGER_MS 2000u /* after an early reply: let the peer finish its body before the close */

struct gw_conn *gw_conn_new(struct gw_server *s, const char *peer)
{
    struct gw_conn *c = xnew(struct gw_conn);
    c->magic = GW_CONN_MAGIC;
    c->server = s;
    snprintf(c->peer, sizeof(c->peer), "%s", peer);
    c->deadline_ms = loop_now_ms(s->loop) + GW_HEAD_DEADLINE_MS;
    buf_init(&c->tx_head, 64 << 10);
    buf_init(&c->tx_body, SIZE_MAX / 2);
    list_push_back(&s->conns, &c->link);
    s->n_conns++;
    metric_set(s->count.conns, s->n_conns);
    return c;
}

/* The peer is gone, whatever happens next: tell who waits. Idempotent. */
static void conn_gone(struct gw_conn *c)
{
    c->wsi = NULL;
    c->deadline_ms = 0;
    c->sending = false;
    if (c->req) {
        struct gw_req *r = c->req;
        c->req = NULL;
        gw_req_gone(r);
    }
    if (c->ws) {
        struct gw_ws *w = c->ws;
        c->ws = NULL;
        gw_ws_free(w);
    }
}

void gw_conn_free(struct gw_conn *c)
{
    conn_gone(c);
    list_remove(&c->link);
    c->server->n_conns--;
    metric_set(c->server->count.conns, c->server->n_conns);
    buf_fini(&c->tx_head);
    buf_fini(&c->tx_body);
    c->magic = 0;
    free(c);
}

void gw_conn_kill(struct gw_conn *c)
{
    /* Not the ASYNC kind: lws looks at its timers only after input or output of some connection. */
    if (c->wsi)
        lws_set_timeout(c->wsi, PENDING_TIMEOUT_USER_REASON_BASE, LWS_TO_KILL_SYNC);
}

bool gw_conn_idle(const struct gw_conn *c)
{
    return !c->req && !c->sending && !c->ws;
}

bool gw_conn_peer_left(const struct gw_conn *c)
{
    struct tcp_info ti;
    socklen_t n = sizeof(ti);
    if (!c->wsi || getsockopt(lws_get_socket_fd(c->wsi), IPPROTO_TCP, TCP_INFO, &ti, &n) != 0)
        return !c->wsi;
    return ti.tcpi_state == TCP_CLOSE || ti.tcpi_state == TCP_CLOSE_WAIT ||
           ti.tcpi_state == TCP_LAST_ACK;
}

/* ---- replies ---- */

static int compose(struct gw_conn *c, struct gw_req *r)
{
    char date[64];
    time_t now = (time_t)(loop_wall_us(c->server->loop) / 1000000);
    struct tm tm;
    gmtime_r(&now, &tm);
    strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", &tm);
    struct buf *h = &c->tx_head;
    buf_clear(h);
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
    buf_fini(&c->tx_body);
    if (!e && !r->headless) {
        c->tx_body = r->out; /* moved */
        r->out = (struct buf) { .max = 0 };
    }
    return e;
}

/* Write up to one chunk of head and body. 0 more, 1 all written, -1 dead. */
static int write_some(struct gw_conn *c)
{
    uint8_t *p = c->server->scratch + LWS_PRE;
    size_t n = 0;
    for (struct buf *b = &c->tx_head; b; b = b == &c->tx_head ? &c->tx_body : NULL) {
        struct slice s = buf_slice(b);
        size_t k = s.n < GW_CHUNK - n ? s.n : GW_CHUNK - n;
        if (k)
            memcpy(p + n, s.p, k);
        buf_consume(b, k);
        n += k;
    }
    if (n && lws_write(c->wsi, p, n, LWS_WRITE_HTTP) < 0)
        return -1;
    c->deadline_ms = loop_now_ms(c->server->loop) + GW_WRITE_DEADLINE_MS;
    return !c->tx_head.len && !c->tx_body.len;
}

static void conn_reply(struct gw_req *r)
{
    struct gw_conn *c = r->transport;
    c->req = NULL;
    bool body_pending = !c->dispatched && (c->body_chunked || c->drain);
    if (r->close || c->server->closing || (body_pending && c->body_chunked))
        c->keepalive = false;
    int e = c->wsi ? compose(c, r) : -EPIPE;
    gw_req_free(r);
    if (e) { /* perhaps inside a callback of lws: let the tick end it */
        c->deadline_ms = 1;
        return;
    }
    c->sending = true;
    if (c->in_upgrade) {
        /* lws wants the whole answer before CONFIRM_UPGRADE returns. */
        while (write_some(c) == 0)
            ;
        c->sending = false;
        return;
    }
    if (c->rx_off) {
        c->rx_off = false;
        lws_rx_flow_control(c->wsi, 1);
    }
    c->deadline_ms = loop_now_ms(c->server->loop) + GW_WRITE_DEADLINE_MS;
    lws_callback_on_writable(c->wsi);
}

static const struct gw_transport_ops ops = { .reply = conn_reply };

/* The reply is out: next request, or the end. Returns what the lws callback should. */
static int reply_done(struct gw_conn *c)
{
    c->sending = false;
    buf_fini(&c->tx_head);
    buf_fini(&c->tx_body);
    c->tx_body.max = SIZE_MAX / 2;
    uint64_t now = loop_now_ms(c->server->loop);
    if (!c->keepalive && c->drain) {
        /* Closing with unread input would reset the connection and eat the reply. */
        c->lingering = true;
        c->deadline_ms = now + LINGER_MS;
        return 0;
    }
    if (!c->keepalive)
        return -1;
    c->deadline_ms = now + GW_IDLE_DEADLINE_MS;
    c->dispatched = c->drain = c->body_chunked = false;
    return lws_http_transaction_completed(c->wsi) ? -1 : 0;
}

static int on_writeable(struct gw_conn *c)
{
    if (!c->sending)
        return 0;
    int r = write_some(c);
    if (r < 0)
        return -1;
    if (r)
        return reply_done(c);
    lws_callback_on_writable(c->wsi);
    return 0;
}

/* ---- requests ---- */

static void dispatch(struct gw_conn *c)
{
    struct gw_req *r = c->req;
    c->dispatched = true;
    c->deadline_ms = 0;
    gw_req_dispatch(r);
    if (c->req != r || !c->wsi || c->in_upgrade)
        return;
    c->rx_off = true;
    lws_rx_flow_control(c->wsi, 0);
    gw_server_arm(c->server);
}

static int on_http(struct gw_conn *c)
{
    if (c->req || c->sending || c->lingering)
        return -1; /* cannot be: lws starts the next request when we have completed this one */
    struct gw_framing f;
    c->dispatched = c->drain = c->body_chunked = false;
    c->body_got = 0;
    struct gw_req *r = gw_head_read(c, &f);
    r->ops = &ops;
    r->transport = c;
    r->peer = c->peer;
    c->req = r;
    c->keepalive = f.keepalive;
    c->body_chunked = f.chunked;
    /* Only where lws is in its body state does it read (and drop) what follows an early reply. */
    bool reads = r->method == GW_POST || r->method == GW_PUT || r->method == GW_PATCH;
    c->drain = f.length > 0 || (reads && (f.chunked || f.status));
    c->body_since_ms = loop_now_ms(c->server->loop);
    if (f.status) {
        r->close = true;
        gw_reply_error(r, f.status, "%s", f.why);
        return 0;
    }
    if (!gw_req_head_done(r))
        return 0;
    if (f.length > c->server->config.max_body) {
        r->close = true;
        gw_reply_error(r, 413, "The body has %llu bytes; at most %zu are taken",
                       (unsigned long long)f.length, c->server->config.max_body);
        return 0;
    }
    c->drain = false;
    if (!f.length && !f.chunked) {
        dispatch(c);
        return 0;
    }
    if (f.chunked) {
        /* lws believes that 100 MB will come; there is no way back to the next request. */
        c->keepalive = false;
        gw_chunked_init(&c->chunked);
    }
    c->deadline_ms = c->body_since_ms + GW_BODY_DEADLINE_MS;
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (f.expect_continue) {
        memcpy(c->server->scratch + LWS_PRE, go_on, sizeof(go_on));
        if (lws_write(c->wsi, c->server->scratch + LWS_PRE, sizeof(go_on) - 1,
                      LWS_WRITE_HTTP_HEADERS) < 0)
            return -1;
    }
    return 0;
}

static void body_failed(struct gw_conn *c, int e)
{
    c->drain = true;
    c->req->close = true;
    if (e == -EINVAL)
        gw_reply_error(c->req, 400, "The chunked body is malformed");
    else if (e == -ENOMEM)
        gw_reply_error(c->req, 503, "Out of memory");
    else
        gw_reply_error(c->req, 413, "The body has more than %zu bytes", c->server->config.max_body);
}

static int on_body(struct gw_conn *c, const uint8_t *in, size_t len)
{
    if (!c->req || c->dispatched || !len)
        return 0;
    c->body_got += len;
    c->deadline_ms = c->body_since_ms + GW_BODY_DEADLINE_MS + c->body_got / 8;
    int e;
    if (c->body_chunked) {
        size_t used = 0;
        e = gw_chunked_feed(&c->chunked, slice_of(in, len), &used, &c->req->body);
        if (e == 1) {
            dispatch(c);
            return 0;
        }
    } else {
        e = buf_append(&c->req->body, in, len);
    }
    if (e)
        body_failed(c, e);
    return 0;
}

static int on_body_complete(struct gw_conn *c)
{
    if (!c->req || c->dispatched)
        return 0; /* lws repeats this when pipelined bytes wait */
    if (c->body_chunked)
        body_failed(c, -EFBIG);
    else
        dispatch(c);
    return 0;
}

/* ---- upgrades ---- */

/* Returns as CONFIRM_UPGRADE wants: 0 go on with the upgrade, 1 we have answered. */
static int on_upgrade(struct gw_conn *c, const char *to)
{
    struct gw_framing f;
    bool ws = to && strcasecmp(to, "websocket") == 0;
    c->in_upgrade = true;
    c->keepalive = false;
    c->dispatched = c->drain = c->body_chunked = false;
    struct gw_req *r = gw_head_read(c, &f);
    r->ops = &ops;
    r->transport = c;
    r->peer = c->peer;
    r->upgrade = ws;
    c->req = r;
    if (f.status) {
        gw_reply_error(r, f.status, "%s", f.why);
    } else if (f.length || f.chunked || r->method == GW_POST || (ws && r->method != GW_GET)) {
        gw_reply_error(r, 400, "No protocol upgrade on this request, please");
    } else if (gw_req_head_done(r)) {
        if (ws)
            gw_ws_handshake(c, r);
        else
            dispatch(c); /* h2c and the like: answered in HTTP/1.1, as RFC 9110 7.8 allows */
    }
    if (c->req && !c->ws)
        gw_reply_error(c->req, 400, "This cannot be answered on a protocol upgrade");
    c->in_upgrade = false;
    if (!c->ws) {
        c->deadline_ms = loop_now_ms(c->server->loop) + LINGER_MS;
        return 1;
    }
    gw_req_free(c->req);
    c->req = NULL;
    c->deadline_ms = 0;
    return 0;
}

/* A request line that is no HTTP we know: lws falls back to raw and hands us the bytes. */
static int on_raw(struct gw_conn *c)
{
    static const char body[] =
        "{\"message\":\"This is no HTTP request with a known method\",\"reason\":\"Bad Request\"}";
    struct buf b;
    buf_init(&b, 2048);
    static const uint8_t pad[LWS_PRE];
    if (!buf_append(&b, pad, LWS_PRE) &&
        !buf_printf(&b,
                    "HTTP/1.1 400 Bad Request\r\nServer: cellvisor\r\n"
                    "Content-Type: application/json\r\nContent-Length: %zu\r\n"
                    "Connection: close\r\n\r\n%s",
                    sizeof(body) - 1, body))
        (void)!lws_write(c->wsi, b.data + b.off + LWS_PRE, b.len - LWS_PRE, LWS_WRITE_RAW);
    buf_fini(&b);
    return -1;
}

/* ---- time ---- */

void gw_conn_tick(struct gw_conn *c)
{
    uint64_t now = c->server->now_ms;
    if (!c->wsi)
        return;
    if (c->req && c->dispatched && gw_conn_peer_left(c)) {
        gw_conn_kill(c);
        return;
    }
    if (!c->deadline_ms || now < c->deadline_ms)
        return;
    c->deadline_ms = 0;
    if (c->req && !c->dispatched) {
        c->drain = c->req->close = true;
        gw_reply_error(c->req, 408, "The body did not come in time");
        return;
    }
    gw_conn_kill(c);
}

/* ---- lws ---- */

int gw_lws_callback(struct lws *wsi, int reason, void *user, void *in, size_t len)
{
    struct gw_conn *c = lws_get_opaque_user_data(wsi);
    (void)user;
    if (!c || c->magic != GW_CONN_MAGIC)
        return 0; /* lws' own wsis */
    switch (reason) {
    case LWS_CALLBACK_SERVER_NEW_CLIENT_INSTANTIATED:
        c->wsi = wsi;
        return 0;
    case LWS_CALLBACK_HTTP:
        return on_http(c);
    case LWS_CALLBACK_HTTP_BODY:
        return on_body(c, in, len);
    case LWS_CALLBACK_HTTP_BODY_COMPLETION:
        return on_body_complete(c);
    case LWS_CALLBACK_HTTP_WRITEABLE:
        return c->wsi ? on_writeable(c) : -1;
    case LWS_CALLBACK_HTTP_CONFIRM_UPGRADE:
        return on_upgrade(c, in);
    case LWS_CALLBACK_RAW_RX:
        return on_raw(c);
    case LWS_CALLBACK_CLOSED_HTTP:
    case LWS_CALLBACK_CLOSED:
    case LWS_CALLBACK_RAW_CLOSE:
        conn_gone(c);
        return 0;
    case LWS_CALLBACK_WSI_DESTROY:
        lws_set_opaque_user_data(wsi, NULL);
        gw_conn_free(c);
        return 0;
    default:
        return c->ws ? gw_ws_callback(c->ws, reason, in, len) : 0;
    }
}
