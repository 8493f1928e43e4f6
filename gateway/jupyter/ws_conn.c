/* Kernel websockets; see ws_conn.h. */
#include "gateway/jupyter/ws_conn.h"
#include "common/mem.h"
#include "common/utf8.h"
#include "gateway/jupyter/ws_frame.h"
#include "gateway/jupyter/ws_source.h"
#include "gateway/jupyter/ws_unacked.h"
#include "proto/jp_ws.h"
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define REASON_MAX 120u /* bytes of a close reason: 123 less a margin */
#define UNSENT_MAX                                                                                 \
    (128u << 10)              /* unsent bytes in the kernel: enough for speed, little for pings    \
                               */
#define CLOSE_ANSWER_MS 5000u /* what a peer gets to read and answer our close frame */

struct gw_ws {
    struct km_client client;
    struct gw_conn *conn;
    struct list_node link; /* gw_server::sockets */
    char *kernel_id, *session;
    enum jp_ws_proto proto;
    bool attached;

    struct gw_ws_rx rx;
    struct jp_msg *held; /* refused by the kernel for now */
    bool throttled;
    bool deaf; /* framing is lost: input is dropped */

    struct ws_source tx;       /* the message under way ... */
    struct jp_msg *sending;    /* ... itself */
    bool sent_whole;           /* its last fragment is in the frame just made */
    struct ws_unacked unacked; /* written, not acknowledged by the peer's TCP */
    struct ws_unacked again;   /* of the connection before: go first */
    bool more;                 /* something waits for the socket to become writable */
    bool queued;               /* on_turn is deferred */
    bool ping_due, pong_due;
    uint8_t pong[125];
    size_t pong_n;
    uint64_t pinged_ms, alive_ms;
    uint64_t acked; /* bytes the peer's TCP had acknowledged at the last ping */
    unsigned close_code;
    bool close_sent, peer_closed;
    char close_text[REASON_MAX + 1];
};

static struct gw_server *server_of(const struct gw_ws *w)
{
    return w->conn->server;
}

static uint64_t now_ms(const struct gw_ws *w)
{
    return loop_now_ms(server_of(w)->loop);
}

static void on_turn(void *ctx)
{
    struct gw_ws *w = ctx;
    w->queued = false;
    gw_conn_continue(w->conn);
}

/* Go on after the present callback: kernelmgr/ may be in the middle of something. */
static void next_turn(struct gw_ws *w)
{
    if (w->queued)
        return;
    w->queued = true;
    loop_defer(server_of(w)->loop, on_turn, w);
}

/* ---- from the kernel ---- */

static void on_wake(struct km_client *k)
{
    next_turn(container_of(k, struct gw_ws, client));
}

/* Keep what may not have arrived for the next connection of this session. A client that closed in
 * order has had what it wanted. */
static void park(struct gw_ws *w)
{
    const struct gw_stream *st = &w->conn->stream;
    uint64_t now = now_ms(w), arrived = gw_stream_acked(st);
    struct jp_msg *m;
    if (!*w->session || w->peer_closed)
        return;
    ws_unacked_ack(&w->unacked, arrived);
    /* A peer that has just reset or ended the connection was in reach: what was on the wire is
     * taken for delivered, or it would come twice for the sake of a late acknowledgement. */
    if (w->conn->eof && !ws_unacked_overdue(&w->unacked, now))
        ws_unacked_ack(&w->unacked, gw_stream_sent(st) - gw_stream_unsent(st));
    if (w->sending)
        ws_unacked_add(&w->unacked, w->sending, UINT64_MAX, now);
    while ((m = ws_unacked_take(&w->again))) {
        ws_unacked_add(&w->unacked, m, UINT64_MAX, now);
        jp_msg_unref(m);
    }
    ws_parked_put(&server_of(w)->parked, w->kernel_id, w->session, &w->unacked, now);
}

static void on_closed(struct km_client *k, enum km_close_why why, const char *text)
{
    struct gw_ws *w = container_of(k, struct gw_ws, client);
    if (why == KM_CLOSE_REPLACED)
        park(w);
    w->attached = false;
    gw_ws_close(w,
                why == KM_CLOSE_REPLACED   ? GW_WS_REPLACED
                : why == KM_CLOSE_SHUTDOWN ? 1012
                                           : 1000,
                text);
}

static int submit(struct gw_ws *w, struct jp_msg *m);

static void on_throttle(struct km_client *k, bool on)
{
    struct gw_ws *w = container_of(k, struct gw_ws, client);
    w->throttled = on;
    if (!on && w->held) {
        struct jp_msg *m = TAKE_PTR(w->held);
        (void)submit(w, m);
        jp_msg_unref(m);
    }
    if (!w->throttled)
        next_turn(w);
}

static const struct km_client_ops client_ops = {
    .wake = on_wake,
    .closed = on_closed,
    .throttle = on_throttle,
};

/* ---- life ---- */

void gw_ws_close(struct gw_ws *w, unsigned code, const char *text)
{
    if (w->close_code)
        return;
    w->close_code = code;
    snprintf(w->close_text, sizeof(w->close_text), "%s", text ? text : "");
    /* Do not cut a character of the reason in two: it must be UTF-8. */
    size_t n = strlen(w->close_text);
    while (text && text[n] && n && ((unsigned char)text[n] & 0xc0) == 0x80)
        w->close_text[--n] = 0;
    w->close_text[n] = 0;
    log_info(&server_of(w)->log, "websocket of kernel %s closes: %u %s", w->kernel_id, code,
             w->close_text);
    w->conn->deadline_ms = now_ms(w) + CLOSE_ANSWER_MS;
    next_turn(w);
}

void gw_ws_free(struct gw_ws *w)
{
    struct gw_server *s = server_of(w);
    loop_cancel_deferred(s->loop, w);
    if (w->attached && !w->close_code)
        park(w);
    if (w->attached)
        km_client_detach(&w->client);
    list_remove(&w->link);
    metric_set(s->count.ws_open, --s->n_sockets);
    jp_msg_unref(w->held);
    jp_msg_unref(w->sending);
    ws_unacked_fini(&w->unacked);
    ws_unacked_fini(&w->again);
    ws_source_fini(&w->tx);
    gw_ws_rx_fini(&w->rx);
    free(w->kernel_id);
    free(w->session);
    free(w);
}

/* ---- handshake ---- */

static bool handshake_ok(struct gw_req *r)
{
    const char *version = r->header[GW_H_WS_VERSION], *key = r->header[GW_H_WS_KEY];
    const char *conn = r->header[GW_H_CONNECTION], *session = gw_req_query(r, "session_id");
    if (!version || strcmp(version, "13") != 0) {
        gw_reply_header(r, "Sec-WebSocket-Version", "13");
        gw_reply_error(r, 426, "Only websocket version 13 is spoken");
        return false;
    }
    if (!key || strlen(key) != 24) {
        gw_reply_error(r, 400, "The Sec-WebSocket-Key is missing or malformed");
        return false;
    }
    if (!conn || !gw_list_has(slice_str(conn), "upgrade")) {
        gw_reply_error(r, 400, "A websocket handshake needs Connection: Upgrade");
        return false;
    }
    if (session && strlen(session) >= JP_ID_MAX) {
        gw_reply_error(r, 400, "The session_id is longer than %u characters", JP_ID_MAX - 1);
        return false;
    }
    return true;
}

/* The subprotocol is echoed only when it is spoken; a client that offers only others gets the
 * legacy framing and no Sec-WebSocket-Protocol header (case-30, jupyter.md 2.1). */
static enum jp_ws_proto choose_protocol(const struct gw_server *s, const struct gw_req *r)
{
    const char *list = r->header[GW_H_WS_PROTOCOL];
    bool v1 = list && !s->config.ws_protocol && gw_list_has(slice_str(list), JP_WS_V1_NAME);
    return v1 ? JP_WS_V1 : JP_WS_LEGACY;
}

static int write_101(struct gw_conn *c, const struct gw_req *r, enum jp_ws_proto proto)
{
    char accept[29];
    gw_ws_accept(slice_str(r->header[GW_H_WS_KEY]), accept);
    return buf_printf(&c->tx,
                      "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                      "Connection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n%s\r\n",
                      accept,
                      proto == JP_WS_V1 ? "Sec-WebSocket-Protocol: " JP_WS_V1_NAME "\r\n" : "");
}

void gw_ws_handshake(struct gw_conn *c, struct gw_req *r)
{
    struct gw_server *s = c->server;
    const char *id = gw_arg(r, 0), *session = gw_req_query(r, "session_id");
    struct km_kernel *k = km_kernel_find(s->km, r->principal, id);
    if (!k) {
        gw_reply_error(r, 404, "Kernel does not exist: %s", id);
        return;
    }
    if (!handshake_ok(r))
        return;
    struct gw_ws *w = xnew(struct gw_ws);
    w->conn = c;
    w->kernel_id = xstrdup(id);
    w->session = xstrdup(session ? session : "");
    w->proto = choose_protocol(s, r);
    gw_ws_rx_init(&w->rx, s->config.max_ws_message);
    ws_source_init(&w->tx);
    w->alive_ms = w->pinged_ms = loop_now_ms(s->loop);
    list_push_back(&s->sockets, &w->link);
    metric_add(s->count.ws_opened, 1);
    metric_set(s->count.ws_open, ++s->n_sockets);
    c->ws = w;
    c->deadline_ms = 0;
    sm_move(&c->state, GW_CONN_SOCKET);
    gw_stream_lowat(&c->stream, UNSENT_MAX);
    log_debug(&s->log, "websocket of kernel %s, %s framing, from %s", id,
              w->proto == JP_WS_V1 ? "v1" : "legacy", c->peer);
    if (write_101(c, r, w->proto))
        c->eof = true; /* out of memory */
    else if (km_client_attach(&w->client, k, w->session, &client_ops))
        gw_ws_close(w, 1000, "the kernel is gone");
    else
        w->attached = true;
    if (w->attached && *w->session)
        ws_parked_get(&s->parked, id, w->session, &w->again, loop_now_ms(s->loop));
    c->req = NULL;
    gw_req_free(r);
    gw_server_arm(s);
}

/* ---- input ---- */

/* 0: done with it (m still is the caller's); -EAGAIN: kept as `held`. */
static int submit(struct gw_ws *w, struct jp_msg *m)
{
    int r = w->attached ? km_client_submit(&w->client, m) : -ESRCH;
    if (r != -EAGAIN)
        return 0; /* -ESRCH: the log has the error reply */
    w->throttled = true;
    w->held = jp_msg_ref(m);
    return r;
}

static void refuse(struct gw_ws *w, int code, const struct err *e)
{
    metric_add(server_of(w)->count.ws_bad, 1);
    if (code == -ENOENT)
        log_warn(&server_of(w)->log, "websocket of kernel %s: message ignored: %s", w->kernel_id,
                 e->msg);
    else if (code == -ENOMEM)
        gw_ws_close(w, 1013, "out of memory");
    else
        gw_ws_close(w, code == -E2BIG ? 1009 : 1007, e->msg);
}

static bool is_utf8(struct slice s)
{
    for (size_t i = 0; i < s.n;) {
        size_t k = utf8_len(s.p + i, s.n - i);
        if (!k)
            return false;
        i += k;
    }
    return true;
}

/* Headers come back to everybody as parent headers: what a browser cannot parse there would hurt
 * the others. */
static bool is_json(struct slice s)
{
    json_t *v = s.n ? json_loadb((const char *)s.p, s.n, 0, NULL) : NULL;
    bool ok = !s.n || v;
    json_decref(v);
    return ok;
}

/* Content and metadata are opaque, but must be text: they may come back in text frames, and
 * browsers end a connection over one bad byte. Buffers may hold anything. */
static int check_parts(const struct jp_msg *m, struct err *e)
{
    const struct jp_parts *p = &m->parts;
    if (!is_json(p->header) || !is_json(p->parent))
        return err_set(e, -EINVAL, "a header is no valid JSON");
    if (!is_utf8(p->metadata) || !is_utf8(p->content))
        return err_set(e, -EINVAL, "the message is not UTF-8");
    return 0;
}

static void on_message(struct gw_ws *w, struct slice frame)
{
    struct err e = { 0 };
    struct jp_msg *m = NULL;
    if (!frame.n || w->close_code)
        return; /* empty frames are a habit of some proxies */
    metric_add(server_of(w)->count.ws_in, 1);
    int r = jp_ws_decode(w->proto, frame, &m, &e);
    if (!r)
        r = check_parts(m, &e);
    if (r)
        refuse(w, r, &e);
    else
        (void)submit(w, m);
    jp_msg_unref(m);
}

static void on_peer_close(struct gw_ws *w, struct slice s)
{
    unsigned code = s.n >= 2 ? (unsigned)s.p[0] << 8 | s.p[1] : 0;
    w->peer_closed = true;
    if (!w->close_code) {
        bool bad = s.n == 1 || (s.n >= 2 && !gw_ws_code_ok(code));
        w->close_code = bad ? 1002 : code ? code : 1000; /* the answer repeats it */
        w->close_text[0] = 0;
        w->conn->deadline_ms = now_ms(w) + CLOSE_ANSWER_MS;
    }
}

static void on_event(struct gw_ws *w, enum gw_ws_event event, struct slice payload)
{
    switch (event) {
    case GW_WS_MESSAGE:
        on_message(w, payload);
        break;
    case GW_WS_PING:
        memcpy(w->pong, payload.p, payload.n);
        w->pong_n = payload.n;
        w->pong_due = true;
        break;
    case GW_WS_CLOSE:
        on_peer_close(w, payload);
        break;
    case GW_WS_PONG:
    case GW_WS_MORE:
        break;
    }
}

static void take_input(struct gw_ws *w)
{
    struct buf *rx = &w->conn->rx;
    if (rx->len)
        w->alive_ms = now_ms(w);
    while (rx->len && gw_ws_reads(w)) {
        enum gw_ws_event event;
        struct slice payload;
        size_t used = 0;
        if (w->deaf || w->peer_closed) {
            buf_clear(rx);
            return;
        }
        int e = gw_ws_rx_feed(&w->rx, rx->data + rx->off, rx->len, &used, &event, &payload);
        if (e) {
            w->deaf = true;
            metric_add(server_of(w)->count.ws_bad, 1);
            gw_ws_close(w,
                        e == -EPROTO     ? 1002
                        : e == -EMSGSIZE ? 1009
                                         : 1013,
                        e == -EPROTO     ? "the frame is malformed"
                        : e == -EMSGSIZE ? "the message is too big"
                                         : "out of memory");
            continue;
        }
        on_event(w, event, payload); /* the payload may lie in rx: consume behind it */
        buf_consume(rx, used);
    }
}

bool gw_ws_reads(const struct gw_ws *w)
{
    return !w->throttled || w->close_code;
}

/* ---- output ---- */

static size_t control_frame(uint8_t *p, unsigned op, const void *data, size_t n)
{
    size_t h = gw_ws_head(p, op, true, n);
    if (n)
        memcpy(p + h, data, n);
    return h + n;
}

static size_t close_frame(struct gw_ws *w, uint8_t *p)
{
    uint8_t body[2 + REASON_MAX];
    size_t n = strlen(w->close_text);
    body[0] = (uint8_t)(w->close_code >> 8);
    body[1] = (uint8_t)w->close_code;
    memcpy(body + 2, w->close_text, n);
    w->close_sent = true;
    return control_frame(p, GW_WS_OP_CLOSE, body, n + 2);
}

/* Next fragment of the message under way, with its header. */
static size_t data_frame(struct gw_ws *w, uint8_t *p)
{
    struct gw_server *s = server_of(w);
    bool first = !w->tx.started, last;
    uint8_t head[GW_WS_HEAD_MAX];
    size_t n = ws_source_read(&w->tx, p + GW_WS_HEAD_MAX, GW_CHUNK, &last);
    size_t h = gw_ws_head(head, !first ? 0 : w->tx.binary ? GW_WS_BINARY : GW_WS_TEXT, last, n);
    memmove(p + h, p + GW_WS_HEAD_MAX, n);
    memcpy(p, head, h);
    metric_add(s->count.ws_bytes_out, (double)n);
    if (last) {
        metric_add(s->count.ws_out, 1);
        ws_source_clear(&w->tx);
        w->sent_whole = true;
    }
    return h + n;
}

/* The next message of the log, if there is one. */
static void next_message(struct gw_ws *w)
{
    struct jp_msg *m = ws_unacked_take(&w->again);
    if (!m && w->attached)
        m = km_client_next(&w->client);
    if (!m)
        return; /* wake() will come */
    struct jp_ws_opts o = { .no_binary = server_of(w)->config.proxy_no_binary };
    int r = ws_source_set(&w->tx, w->proto, &o, m);
    w->sending = m;
    if (r) /* the client must not believe that it has everything */
        gw_ws_close(w, 1011, "a message of the kernel could not be sent");
}

/* Control frames first, then the message under way, then close or a new message. 0: nothing now. */
static size_t next_frame(struct gw_ws *w, uint8_t *p)
{
    if (w->close_sent)
        return 0;
    if (w->pong_due) {
        w->pong_due = false;
        return control_frame(p, GW_WS_OP_PONG, w->pong, w->pong_n);
    }
    if (w->ping_due) {
        w->ping_due = false;
        return control_frame(p, GW_WS_OP_PING, NULL, 0);
    }
    if (!ws_source_busy(&w->tx) && !w->close_code)
        next_message(w);
    if (ws_source_busy(&w->tx) && !w->deaf)
        return data_frame(w, p);
    return w->close_code ? close_frame(w, p) : 0;
}

#define TLS_MARGIN 1024u /* what TLS may add to bytes that are not written yet */

/* The message whose last byte is now written, or waits in conn->tx. */
static void note_sent(struct gw_ws *w)
{
    const struct gw_conn *c = w->conn;
    if (!w->sent_whole)
        return;
    w->sent_whole = false;
    uint64_t end = gw_stream_sent(&c->stream) + c->tx.len;
    if (c->tx.len && c->stream.ssl)
        end += TLS_MARGIN;
    if (w->unacked.n && w->unacked.n % 32 == 0)
        ws_unacked_ack(&w->unacked, gw_stream_acked(&c->stream));
    if (*w->session)
        ws_unacked_add(&w->unacked, w->sending, end, now_ms(w));
    jp_msg_unref(TAKE_PTR(w->sending));
}

/* Send until the socket is full, one turn's share is used up, or there is nothing. -1: broken. */
static int pump(struct gw_ws *w)
{
    struct gw_conn *c = w->conn;
    uint8_t *p = c->server->scratch;
    size_t sent = 0, n;
    w->more = false;
    int r = gw_conn_flush(c);
    if (r <= 0)
        return r;
    while ((n = next_frame(w, p))) {
        ssize_t k = gw_stream_write(&c->stream, p, n);
        if (k < 0 && k != -EAGAIN)
            return -1;
        k = k < 0 ? 0 : k;
        if ((size_t)k < n && buf_append(&c->tx, p + k, n - (size_t)k))
            return -1;
        note_sent(w);
        if ((size_t)k < n)
            return 0;
        sent += n;
        if (sent >= GW_CHUNK ||
            (sent >= GW_CHUNK / 4 && gw_stream_unsent(&c->stream) > UNSENT_MAX)) {
            w->more = true; /* the others are next; the low-water mark wakes us */
            return 0;
        }
    }
    return 1;
}

int gw_ws_run(struct gw_ws *w)
{
    take_input(w);
    int r = pump(w);
    if (r > 0 && w->close_sent && (w->peer_closed || w->deaf))
        gw_conn_linger(w->conn);
    return r;
}

bool gw_ws_writes(const struct gw_ws *w)
{
    return w->more;
}

/* ---- time ---- */

/* A slow reader with a backlog is alive as long as its TCP acknowledges something, however late its
 * pong may be (case-27). */
static void note_progress(struct gw_ws *w, uint64_t now)
{
    uint64_t acked = gw_stream_acked(&w->conn->stream);
    ws_unacked_ack(&w->unacked, acked);
    bool backlog = w->conn->tx.len || ws_source_busy(&w->tx) || km_client_lag(&w->client) ||
                   gw_stream_unsent(&w->conn->stream);
    if (w->throttled || (backlog && acked != w->acked))
        w->alive_ms = now;
    w->acked = acked;
}

bool gw_ws_tick(struct gw_ws *w)
{
    const struct gw_config *c = &server_of(w)->config;
    uint64_t now = server_of(w)->now_ms;
    if (w->close_code || !c->ws_ping_s)
        return true; /* a closing one has a deadline of its own */
    if (now - w->pinged_ms >= c->ws_ping_s * UINT64_C(1000)) {
        w->pinged_ms = now;
        w->ping_due = true;
        if (w->attached)
            note_progress(w, now);
        next_turn(w);
    }
    if (now - w->alive_ms < c->ws_pong_timeout_s * UINT64_C(1000))
        return true;
    log_info(&server_of(w)->log, "websocket of kernel %s: no sign of life for %u s, dropped",
             w->kernel_id, c->ws_pong_timeout_s);
    gw_conn_kill(w->conn);
    return false;
}
