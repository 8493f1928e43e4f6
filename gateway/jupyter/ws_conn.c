/* Kernel websockets; see ws_conn.h. */
#include "gateway/jupyter/ws_conn.h"
#include "common/mem.h"
#include "gateway/http/head.h"
#include "gateway/jupyter/ws_source.h"
#include "proto/jp_ws.h"
#include <errno.h>
#include <libwebsockets.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#define RX_KEEP (64u << 10) /* a reassembly buffer that grew beyond this is given back */
#define REASON_MAX 120u     /* bytes of a close reason: 123 less a margin */
#define NOTSENT_LOWAT                                                                              \
    (128 << 10) /* unsent bytes in the kernel: enough for speed, little for pings */
#define KILL_AFTER_CLOSE_MS 10000u /* what a peer that does not read gets for our close frame */

struct gw_ws {
    struct km_client client;
    struct gw_conn *conn;
    struct list_node link; /* gw_server::sockets */
    char *kernel_id, *principal, *session;
    enum jp_ws_proto proto;
    bool attached, established;

    struct buf rx;       /* fragments so far */
    struct jp_msg *held; /* refused by the kernel for now */
    bool throttled;

    struct ws_source tx; /* the message under way */
    bool ping_due;
    uint64_t pinged_ms, alive_ms;
    uint64_t acked; /* bytes the peer's TCP had acknowledged at alive_ms */
    unsigned close_code;
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

static void want_write(struct gw_ws *w)
{
    if (w->conn->wsi && w->established)
        lws_callback_on_writable(w->conn->wsi);
}

/* ---- from the kernel ---- */

static void on_wake(struct km_client *k)
{
    want_write(container_of(k, struct gw_ws, client));
}

static void on_closed(struct km_client *k, enum km_close_why why, const char *text)
{
    struct gw_ws *w = container_of(k, struct gw_ws, client);
    unsigned code = why == KM_CLOSE_REPLACED   ? GW_WS_REPLACED
                    : why == KM_CLOSE_SHUTDOWN ? 1012
                                               : 1000;
    w->attached = false;
    gw_ws_close(w, code, text);
}

static int submit(struct gw_ws *w, struct jp_msg *m);

static void on_throttle(struct km_client *k, bool on)
{
    struct gw_ws *w = container_of(k, struct gw_ws, client);
    w->throttled = on;
    if (!on && w->held) {
        struct jp_msg *m = w->held;
        w->held = NULL;
        int r = submit(w, m);
        jp_msg_unref(m);
        if (r)
            return; /* refused again: still throttled */
    }
    if (w->conn->wsi)
        lws_rx_flow_control(w->conn->wsi, !w->throttled);
}

static const struct km_client_ops client_ops = {
    .wake = on_wake,
    .closed = on_closed,
    .throttle = on_throttle,
};

/* ---- closing ---- */

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
    log_info(&server_of(w)->log, "websocket of kernel %s closes: %u %s", w->kernel_id, code,
             w->close_text);
    if (!w->conn->wsi)
        return;
    w->conn->deadline_ms = now_ms(w) + KILL_AFTER_CLOSE_MS;
    if (w->throttled)
        lws_rx_flow_control(w->conn->wsi, 1); /* the peer's close frame must get through */
    want_write(w);
}

void gw_ws_free(struct gw_ws *w)
{
    struct gw_server *s = server_of(w);
    if (w->attached)
        km_client_detach(&w->client);
    if (list_linked(&w->link)) {
        list_remove(&w->link);
        s->n_sockets--;
        metric_set(s->count.ws_open, s->n_sockets);
    }
    jp_msg_unref(w->held);
    ws_source_fini(&w->tx);
    buf_fini(&w->rx);
    free(w->kernel_id);
    free(w->principal);
    free(w->session);
    free(w);
}

/* ---- handshake ---- */

bool gw_ws_offers_v1(const char *list, char first[GW_WS_NAME_MAX])
{
    bool v1 = false;
    first[0] = 0;
    while (*list) {
        list += strspn(list, ", \t");
        size_t n = strcspn(list, ", \t");
        if (n && n < GW_WS_NAME_MAX && !first[0]) {
            memcpy(first, list, n);
            first[n] = 0;
        }
        if (n == strlen(JP_WS_V1_NAME) && strncmp(list, JP_WS_V1_NAME, n) == 0)
            v1 = true;
        list += n;
    }
    return v1;
}

/* libwebsockets refuses a handshake that offers only names it does not know. protocols[2] bears the
 * name in gw_server::any_protocol: we put the client's first name there while lws looks, and blank
 * it before lws writes the answer (FILTER_PROTOCOL_CONNECTION), so that nothing is echoed: a client
 * that offers what we do not speak gets the legacy framing and no Sec-WebSocket-Protocol header. */
static bool choose_protocol(struct gw_ws *w, struct gw_req *r)
{
    struct gw_server *s = server_of(w);
    char *list = gw_head_copy(w->conn, WSI_TOKEN_PROTOCOL);
    bool legacy_only = s->config.ws_protocol && strcmp(s->config.ws_protocol, "legacy") == 0;
    bool v1 = list && gw_ws_offers_v1(list, s->any_protocol);
    w->proto = v1 && !legacy_only ? JP_WS_V1 : JP_WS_LEGACY;
    /* What lws would answer by hanging up. */
    bool bad = list && (strlen(list) > 126 || !s->any_protocol[0]);
    if (bad || !list || w->proto == JP_WS_V1)
        s->any_protocol[0] = 0;
    free(list);
    if (bad)
        gw_reply_error(r, 400, "The list of websocket subprotocols is too long or malformed");
    return !bad;
}

/* What lws would answer by hanging up. */
static bool handshake_complete(struct gw_conn *c, struct gw_req *r)
{
    char *key = gw_head_copy(c, WSI_TOKEN_KEY), *version = gw_head_copy(c, WSI_TOKEN_VERSION);
    char *connection = gw_head_copy(c, WSI_TOKEN_CONNECTION);
    bool ok = false;
    if (!version || strcmp(version, "13") != 0) {
        gw_reply_header(r, "Sec-WebSocket-Version", "13");
        gw_reply_error(r, 426, "Only websocket version 13 is spoken");
    } else if (!key || strlen(key) != 24) {
        gw_reply_error(r, 400, "The Sec-WebSocket-Key is missing or malformed");
    } else if (!connection || strlen(connection) > 126 || !strcasestr(connection, "upgrade") ||
               !r->header[GW_H_HOST]) {
        gw_reply_error(r, 400, "A websocket handshake needs Host and Connection: Upgrade");
    } else {
        ok = true;
    }
    free(key);
    free(version);
    free(connection);
    return ok;
}

void gw_ws_handshake(struct gw_conn *c, struct gw_req *r)
{
    const char *id = gw_arg(r, 0), *session = gw_req_query(r, "session_id");
    if (!handshake_complete(c, r))
        return;
    if (!km_kernel_find(c->server->km, r->principal, id)) {
        gw_reply_error(r, 404, "Kernel does not exist: %s", id);
        return;
    }
    if (session && strlen(session) >= JP_ID_MAX) {
        gw_reply_error(r, 400, "The session_id is longer than %u characters", JP_ID_MAX - 1);
        return;
    }
    struct gw_ws *w = xnew(struct gw_ws);
    w->conn = c;
    w->kernel_id = xstrdup(id);
    w->principal = xstrdup(r->principal);
    w->session = xstrdup(session ? session : "");
    buf_init(&w->rx, c->server->config.max_ws_message);
    ws_source_init(&w->tx);
    if (!choose_protocol(w, r)) {
        gw_ws_free(w);
        return;
    }
    log_debug(&c->server->log, "websocket of kernel %s, %s framing, from %s", id,
              w->proto == JP_WS_V1 ? "v1" : "legacy", c->peer);
    c->ws = w;
}

static int on_established(struct gw_ws *w)
{
    struct gw_server *s = server_of(w);
    int fd = lws_get_socket_fd(w->conn->wsi), one = 1, lowat = NOTSENT_LOWAT;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof(lowat));
    lws_set_timeout(w->conn->wsi, NO_PENDING_TIMEOUT, 0);
    w->established = true;
    w->alive_ms = w->pinged_ms = now_ms(w);
    list_push_back(&s->sockets, &w->link);
    metric_add(s->count.ws_opened, 1);
    metric_set(s->count.ws_open, ++s->n_sockets);
    gw_server_arm(s);
    struct km_kernel *k = km_kernel_find(s->km, w->principal, w->kernel_id);
    if (s->closing)
        gw_ws_close(w, 1012, "the gateway is shutting down");
    else if (!k || km_client_attach(&w->client, k, w->session, &client_ops))
        gw_ws_close(w, 1000, "the kernel is gone");
    else
        w->attached = true;
    want_write(w);
    return 0;
}

/* ---- input ---- */

/* 0: done with it (m still is the caller's); -EAGAIN: kept as `held`. */
static int submit(struct gw_ws *w, struct jp_msg *m)
{
    int r = w->attached ? km_client_submit(&w->client, m) : -ESRCH;
    if (r != -EAGAIN)
        return 0; /* -ESRCH: the log has the error reply */
    if (w->held) {
        /* Cannot be: input is stopped while one is held. Better to end than to lose it. */
        gw_ws_close(w, 1013, "too many messages at once");
        return 0;
    }
    w->held = jp_msg_ref(m);
    return r;
}

static void refuse(struct gw_ws *w, int code, const struct err *e)
{
    metric_add(server_of(w)->count.ws_bad, 1);
    if (code == -ENOENT) {
        log_warn(&server_of(w)->log, "websocket of kernel %s: message ignored: %s", w->kernel_id,
                 e->msg);
        return;
    }
    if (code == -ENOMEM)
        gw_ws_close(w, 1013, "out of memory");
    else
        gw_ws_close(w, code == -E2BIG ? 1009 : 1007, e->msg);
}

static void on_message(struct gw_ws *w, struct slice frame)
{
    struct err e = { 0 };
    struct jp_msg *m = NULL;
    if (!frame.n)
        return; /* empty frames are a habit of some proxies */
    metric_add(server_of(w)->count.ws_in, 1);
    int r = jp_ws_decode(w->proto, frame, &m, &e);
    if (r) {
        refuse(w, r, &e);
        return;
    }
    (void)submit(w, m);
    jp_msg_unref(m);
}

static int on_receive(struct gw_ws *w, const uint8_t *in, size_t len)
{
    w->alive_ms = now_ms(w);
    if (w->close_code)
        return 0; /* what comes after our decision to close is void */
    bool final = lws_is_final_fragment(w->conn->wsi);
    if (final && !w->rx.len) {
        on_message(w, slice_of(in, len));
        return 0;
    }
    int r = buf_append(&w->rx, in, len);
    if (r) {
        buf_fini(&w->rx);
        gw_ws_close(w, r == -ENOBUFS ? 1009 : 1013,
                    r == -ENOBUFS ? "the message is too big" : "out of memory");
        return 0;
    }
    if (!final)
        return 0;
    on_message(w, buf_slice(&w->rx));
    if (w->rx.cap > RX_KEEP)
        buf_fini(&w->rx);
    else
        buf_clear(&w->rx);
    return 0;
}

/* ---- output ---- */

/* Not empty: lws 4.1 tells nobody of a pong without payload, so that idle clients would look dead.
 */
static int send_ping(struct gw_ws *w)
{
    uint8_t *p = server_of(w)->scratch + LWS_PRE;
    w->ping_due = false;
    w->pinged_ms = now_ms(w);
    p[0] = '.';
    return lws_write(w->conn->wsi, p, 1, LWS_WRITE_PING) < 0 ? -1 : 0;
}

static int send_close(struct gw_ws *w)
{
    lws_close_reason(w->conn->wsi, (enum lws_close_status)w->close_code,
                     (unsigned char *)w->close_text, strlen(w->close_text));
    return -1; /* lws sends the frame and waits for the answer */
}

/* Next fragment of the message under way. */
static int send_part(struct gw_ws *w)
{
    struct gw_server *s = server_of(w);
    uint8_t *p = s->scratch + LWS_PRE;
    bool first = !w->tx.started, last;
    size_t n = ws_source_read(&w->tx, p, GW_CHUNK, &last);
    int kind = !first ? LWS_WRITE_CONTINUATION : w->tx.binary ? LWS_WRITE_BINARY : LWS_WRITE_TEXT;
    if (!last)
        kind |= LWS_WRITE_NO_FIN;
    metric_add(s->count.ws_bytes_out, (double)n);
    if (lws_write(w->conn->wsi, p, n, (enum lws_write_protocol)kind) < 0)
        return -1;
    if (last) {
        metric_add(s->count.ws_out, 1);
        ws_source_clear(&w->tx);
    }
    return 0;
}

/* One lws_write for each call: control frames first, then the message under way, then a new one. */
static int on_writable(struct gw_ws *w)
{
    if (w->ping_due) {
        want_write(w);
        return send_ping(w);
    }
    if (!ws_source_busy(&w->tx)) {
        if (w->close_code)
            return send_close(w);
        struct jp_msg *m = w->attached ? km_client_next(&w->client) : NULL;
        if (!m)
            return 0; /* wake() will come */
        struct jp_ws_opts o = { .no_binary = server_of(w)->config.proxy_no_binary };
        int r = ws_source_set(&w->tx, w->proto, &o, m);
        jp_msg_unref(m);
        if (r) {
            /* Too big for memory: the client must not believe that it has everything. */
            gw_ws_close(w, 1011, "a message of the kernel could not be sent");
            return 0;
        }
    }
    want_write(w);
    return send_part(w);
}

/* ---- time ---- */

/* Bytes of ours that the peer's TCP has acknowledged: a slow reader with a backlog is alive as long
 * as this grows, however late its pong may be (case-27). */
static uint64_t bytes_acked(const struct gw_ws *w)
{
    struct tcp_info ti;
    socklen_t n = sizeof(ti);
    memset(&ti, 0, sizeof(ti));
    getsockopt(lws_get_socket_fd(w->conn->wsi), IPPROTO_TCP, TCP_INFO, &ti, &n);
    return ti.tcpi_bytes_acked;
}

void gw_ws_tick(struct gw_ws *w)
{
    const struct gw_config *c = &server_of(w)->config;
    uint64_t now = server_of(w)->now_ms;
    if (!w->conn->wsi)
        return;
    /* While input is stopped lws does not look, so that a peer that left is not noticed. */
    if (w->throttled && gw_conn_peer_left(w->conn)) {
        gw_conn_kill(w->conn);
        return;
    }
    if (w->close_code || !c->ws_ping_s)
        return;
    if (now - w->pinged_ms >= c->ws_ping_s * UINT64_C(1000)) {
        w->ping_due = true;
        w->pinged_ms = now;
        uint64_t acked = bytes_acked(w);
        if (w->throttled || acked != w->acked) {
            w->acked = acked;
            if (w->throttled || ws_source_busy(&w->tx) || km_client_lag(&w->client))
                w->alive_ms = now;
        }
        want_write(w);
    }
    if (now - w->alive_ms >= c->ws_pong_timeout_s * UINT64_C(1000)) {
        log_info(&server_of(w)->log, "websocket of kernel %s: no sign of life for %u s, dropped",
                 w->kernel_id, c->ws_pong_timeout_s);
        gw_conn_kill(w->conn);
    }
}

int gw_ws_callback(struct gw_ws *w, int reason, void *in, size_t len)
{
    switch (reason) {
    case LWS_CALLBACK_FILTER_PROTOCOL_CONNECTION:
        server_of(w)->any_protocol[0] = 0;
        return 0;
    case LWS_CALLBACK_ESTABLISHED:
        return on_established(w);
    case LWS_CALLBACK_RECEIVE:
        return on_receive(w, in, len);
    case LWS_CALLBACK_RECEIVE_PONG:
        w->alive_ms = now_ms(w);
        return 0;
    case LWS_CALLBACK_SERVER_WRITEABLE:
        return on_writable(w);
    default:
        return 0;
    }
}
