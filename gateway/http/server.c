/* Server life: configuration, libwebsockets on our loop, tick, and the orderly end.
 *
 * libwebsockets 4.1 runs as a guest on the uv loop ("foreign loop"). Its end takes two calls of
 * lws_context_destroy with turns of the loop between them: the first closes all handles, the
 * second, when libuv has called their close callbacks, frees the context. */
#include "gateway/http/server.h"
#include "common/mem.h"
#include "gateway/http/conn.h"
#include "gateway/http/listen.h"
#include "gateway/http/uri.h"
#include "gateway/jupyter/api.h"
#include "gateway/jupyter/ws_conn.h"
#include "proto/jp_ws.h"
#include <errno.h>
#include <libwebsockets.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FDS_MAX (GW_CONNECTIONS_MAX + 48)
#define WS_RX (16u << 10) /* of each websocket; longer frames come in pieces */
#define CLOSE_TICKS 5     /* turns of the loop that libuv gets for its close callbacks */
#define FAST_MS 100u
#define SLOW_MS 1000u

/* ---- libwebsockets' own log: the last error line explains a failed start ---- */
static char lws_error[200];
static const struct log_ctx *lws_log;
static bool lws_started;

static void on_lws_log(int level, const char *line)
{
    (void)level;
    snprintf(lws_error, sizeof(lws_error), "%.*s", (int)strcspn(line, "\n"), line);
    /* Most of its "errors" are a peer's doing. */
    if (lws_started)
        log_debug(lws_log, "libwebsockets: %s", lws_error);
}

void gw_config_defaults(struct gw_config *c)
{
    *c = (struct gw_config) {
        .ip = "127.0.0.1",
        .port = 8888,
        .base_url = "/",
        .max_body = 16u << 20,
        .max_ws_message = 128u << 20,
        .ws_ping_s = 25,
        .ws_pong_timeout_s = 75,
    };
}

static const char *const *dup_list(const char *const *in)
{
    size_t n = 0;
    while (in && in[n])
        n++;
    if (!n)
        return NULL;
    char **out = xcalloc(n + 1, sizeof(*out));
    for (size_t i = 0; i < n; i++)
        out[i] = xstrdup(in[i]);
    return (const char *const *)out;
}

static void free_list(const char *const *list)
{
    for (size_t i = 0; list && list[i]; i++)
        free((void *)(uintptr_t)list[i]);
    free((void *)(uintptr_t)list);
}

/* Everything but the tokens, which gw_auth owns. */
static void config_copy(struct gw_config *to, const struct gw_config *from)
{
    *to = *from;
    to->tokens = NULL;
    to->n_tokens = 0;
    to->ip = xstrdup(from->ip);
    to->base_url = NULL;
    to->allow_origins = dup_list(from->allow_origins);
    to->allow_hosts = dup_list(from->allow_hosts);
    to->tls_cert = xstrdup(from->tls_cert);
    to->tls_key = xstrdup(from->tls_key);
    to->ws_protocol = xstrdup(from->ws_protocol);
    to->web_dir = xstrdup(from->web_dir);
}

static void config_free(struct gw_config *c)
{
    free((void *)(uintptr_t)c->ip);
    free_list(c->allow_origins);
    free_list(c->allow_hosts);
    free((void *)(uintptr_t)c->tls_cert);
    free((void *)(uintptr_t)c->tls_key);
    free((void *)(uintptr_t)c->ws_protocol);
    free((void *)(uintptr_t)c->web_dir);
}

static int config_check(const struct gw_config *c, struct err *e)
{
    if (!c->ip || !*c->ip)
        return err_set(e, -EINVAL, "ip: empty");
    if (c->ws_ping_s && c->ws_pong_timeout_s <= c->ws_ping_s)
        return err_set(
            e, -EINVAL,
            "ws_pong_timeout_s (%u) must be greater than ws_ping_s (%u); both are seconds",
            c->ws_pong_timeout_s, c->ws_ping_s);
    if (c->ws_ping_s > 3600)
        return err_set(e, -EINVAL, "ws_ping_s: %u seconds is more than an hour; it is in seconds",
                       c->ws_ping_s);
    if (!c->tls_cert != !c->tls_key)
        return err_set(e, -EINVAL, "tls_cert and tls_key belong together: one is missing");
    if (c->ws_protocol && strcmp(c->ws_protocol, "legacy") != 0)
        return err_set(e, -EINVAL, "ws_protocol \"%s\": only \"legacy\" can be forced",
                       c->ws_protocol);
    if (!c->max_body || !c->max_ws_message)
        return err_set(e, -EINVAL, "max_body and max_ws_message must not be 0");
    return 0;
}

/* libwebsockets only logs what is wrong with a certificate; find out before it tries. */
static int tls_check(const struct gw_config *c, struct err *e)
{
    if (!c->tls_cert)
        return 0;
    if (access(c->tls_cert, R_OK))
        return err_errno(e, errno, "tls_cert %s", c->tls_cert);
    if (access(c->tls_key, R_OK))
        return err_errno(e, errno, "tls_key %s", c->tls_key);
    SSL_CTX *t = SSL_CTX_new(TLS_server_method());
    int r = 0;
    if (!t)
        r = err_set(e, -ENOMEM, "TLS cannot be set up");
    else if (SSL_CTX_use_certificate_chain_file(t, c->tls_cert) != 1)
        r = err_set(e, -EINVAL, "tls_cert %s: no PEM certificate chain", c->tls_cert);
    else if (SSL_CTX_use_PrivateKey_file(t, c->tls_key, SSL_FILETYPE_PEM) != 1)
        r = err_set(e, -EINVAL, "tls_key %s: no PEM key that belongs to %s", c->tls_key,
                    c->tls_cert);
    else if (SSL_CTX_check_private_key(t) != 1)
        r = err_set(e, -EINVAL, "tls_key %s does not belong to %s", c->tls_key, c->tls_cert);
    SSL_CTX_free(t);
    return r;
}

static int lws_failed(struct err *e)
{
    static const char plugin[] = LWS_INSTALL_LIBDIR "/libwebsockets-evlib_uv.so";
    if (access(plugin, R_OK))
        return err_set(e, -ENOENT,
                       "%s is missing: install the package libwebsockets-evlib-uv (libwebsockets "
                       "needs it to run on libuv)",
                       plugin);
    return err_set(e, -EIO, "libwebsockets does not start: %s", lws_error[0] ? lws_error : "?");
}

static struct lws_protocols *make_protocols(struct gw_server *s)
{
    struct lws_protocols *p = xcalloc(4, sizeof(*p));
    bool legacy = s->config.ws_protocol != NULL;
    const char *const names[3] = { "cellvisor-legacy", legacy ? "-" : JP_WS_V1_NAME,
                                   s->any_protocol };
    for (int i = 0; i < 3; i++) {
        p[i].name = names[i];
        p[i].callback = (lws_callback_function *)gw_lws_callback;
        p[i].rx_buffer_size = WS_RX;
        p[i].tx_packet_size = GW_CHUNK + LWS_PRE + 64; /* one write must not be cut by lws */
    }
    return p;
}

static int start_lws(struct gw_server *s, struct err *e)
{
    static const lws_retry_bo_t no_validity = { 0 }; /* pings are ours (ws_conn.c) */
    void *loops[1] = { loop_native(s->loop) };
    struct lws_context_creation_info i;
    memset(&i, 0, sizeof(i));
    lws_started = false;
    lws_log = &s->log;
    lws_set_log_level(LLL_ERR, on_lws_log);
    i.options = LWS_SERVER_OPTION_LIBUV | LWS_SERVER_OPTION_EXPLICIT_VHOSTS |
                LWS_SERVER_OPTION_NO_LWS_SYSTEM_STATES;
    i.foreign_loops = loops;
    i.fd_limit_per_thread = FDS_MAX;
    i.pt_serv_buf_size = 32 << 10;
    i.max_http_header_data2 = 64 << 10; /* beyond, lws hangs up without a word */
    i.max_http_header_pool = FDS_MAX;
    i.pcontext = &s->context;
    i.retry_and_idle_policy = &no_validity;
    if (s->config.tls_cert)
        i.options |= LWS_SERVER_OPTION_DO_SSL_GLOBAL_INIT;
    s->context = lws_create_context(&i);
    if (!s->context)
        return lws_failed(e);
    s->protocols = make_protocols(s);
    i.port = CONTEXT_PORT_NO_LISTEN_SERVER;
    i.vhost_name = "cellvisor";
    i.protocols = s->protocols;
    i.keepalive_timeout = GW_IDLE_DEADLINE_MS / 1000;
    i.timeout_secs_ah_idle = 30 * 24 * 3600; /* lws kills a request that takes longer; ours may */
    i.options |= LWS_SERVER_OPTION_FALLBACK_TO_APPLY_LISTEN_ACCEPT_CONFIG;
    if (s->config.tls_cert) {
        i.ssl_cert_filepath = s->config.tls_cert;
        i.ssl_private_key_filepath = s->config.tls_key;
        i.alpn = "http/1.1";
        i.ssl_options_set = SSL_OP_NO_TLSv1 | SSL_OP_NO_TLSv1_1;
    }
    s->vhost = lws_create_vhost(s->context, &i);
    if (!s->vhost)
        return lws_failed(e);
    lws_started = true;
    return 0;
}

static void make_metrics(struct gw_server *s)
{
    static const double seconds[] = { 0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60 };
    struct metrics *m = s->metrics;
    s->count = (struct gw_counters) {
        .http = metrics_counter(m, "cellvisor_http_requests_total", "", "HTTP requests answered"),
        .http_seconds =
            metrics_histogram(m, "http_request_duration_seconds", "", "from request head to reply",
                              seconds, sizeof(seconds) / sizeof(seconds[0])),
        .ws_opened = metrics_counter(m, "cellvisor_websockets_total", "", "websockets opened"),
        .ws_open = metrics_gauge(m, "cellvisor_websockets", "", "websockets open now"),
        .ws_in = metrics_counter(m, "cellvisor_websocket_messages_total", "direction=\"in\"",
                                 "whole messages"),
        .ws_out = metrics_counter(m, "cellvisor_websocket_messages_total", "direction=\"out\"",
                                  "whole messages"),
        .ws_bytes_out = metrics_counter(m, "cellvisor_websocket_bytes_sent_total", "", "payload"),
        .ws_bad = metrics_counter(m, "cellvisor_websocket_bad_messages_total", "",
                                  "undecodable messages of clients"),
        .rejected = metrics_counter(m, "cellvisor_connections_rejected_total", "",
                                    "connections over the limit"),
        .conns = metrics_gauge(m, "cellvisor_connections", "", "TCP connections now"),
    };
    metric_set(metrics_gauge(m, "started_timestamp_seconds", "", "start of the server, UTC"),
               (double)s->started_us / 1e6);
}

static void make_url(struct gw_server *s)
{
    bool v6 = strchr(s->config.ip, ':') != NULL;
    s->url = xasprintf("%s://%s%s%s:%u%s", s->config.tls_cert ? "https" : "http", v6 ? "[" : "",
                       s->config.ip, v6 ? "]" : "", s->port, s->base);
}

/* ---- tick ---- */

static void on_tick(void *ctx);

void gw_server_arm(struct gw_server *s)
{
    unsigned ms = 0;
    if (s->n_conns || s->closing || s->accept_paused)
        ms = !list_empty(&s->pending) || s->closing ? FAST_MS : SLOW_MS;
    if (ms == s->tick_ms)
        return; /* re-arming at every request would put the tick off for ever */
    s->tick_ms = ms;
    if (ms)
        loop_timer_start(s->tick, ms, ms);
    else
        loop_timer_stop(s->tick);
}

static void finish_close(struct gw_server *s);

static void on_tick(void *ctx)
{
    struct gw_server *s = ctx;
    s->now_ms = loop_now_ms(s->loop);
    if (s->closing && s->close_ticks) {
        finish_close(s);
        return;
    }
    LIST_FOR_EACH_SAFE (&s->conns, n) {
        struct gw_conn *c = list_entry(n, struct gw_conn, link);
        gw_conn_tick(c);
        if (c->ws)
            gw_ws_tick(c->ws);
        if (s->closing && (gw_conn_idle(c) || s->now_ms >= s->close_deadline_ms))
            gw_conn_kill(c);
    }
    if (s->closing && !s->n_conns) {
        s->close_ticks = 1;
        lws_context_destroy(s->context);
        loop_timer_start(s->tick, 1, 1);
        return;
    }
    if (s->listener && s->accept_paused) {
        s->accept_paused = false;
        loop_fd_set(s->listener, LOOP_READ);
    }
    gw_server_arm(s);
}

/* ---- life ---- */

int gw_server_new(struct loop *l, const struct gw_config *c, struct km_manager *km,
                  struct metrics *m, const struct log_ctx *log, struct gw_server **ret,
                  struct err *e)
{
    int r = config_check(c, e);
    if (!r)
        r = tls_check(c, e);
    if (r)
        return r;
    struct gw_server *s = xnew(struct gw_server);
    s->loop = l;
    s->km = km;
    s->metrics = m;
    s->listen_fd = -1;
    log_ctx_init(&s->log, log);
    list_init(&s->conns);
    list_init(&s->pending);
    list_init(&s->sockets);
    config_copy(&s->config, c);
    s->started_us = s->activity_us = loop_wall_us(l);
    s->scratch = xmalloc(LWS_PRE + GW_CHUNK + 16);
    s->tick = loop_timer_new(l, on_tick, s);
    gw_api_routes(&s->routes, &s->n_routes);
    make_metrics(s);
    r = gw_base_normalise(c->base_url, &s->base, e);
    if (!r)
        r = gw_auth_new(c, &s->auth, e);
    if (!r)
        r = gw_listen_open(s, e);
    if (!r)
        r = start_lws(s, e);
    if (r) {
        gw_server_free(s);
        return r;
    }
    gw_auth_set_place(s->auth, s->base, s->port, s->config.tls_cert != NULL);
    make_url(s);
    gw_listen_start(s);
    *ret = s;
    return 0;
}

unsigned gw_server_port(const struct gw_server *s)
{
    return s->port;
}

const char *gw_server_url(const struct gw_server *s)
{
    return s->url;
}

void gw_server_on_shutdown(struct gw_server *s, void (*fn)(void *ctx), void *ctx)
{
    s->on_shutdown = fn;
    s->shutdown_ctx = ctx;
}

void gw_server_close(struct gw_server *s, void (*closed)(void *ctx), void *ctx)
{
    if (s->closing)
        return;
    s->closing = true;
    s->closed = closed;
    s->closed_ctx = ctx;
    s->close_deadline_ms = loop_now_ms(s->loop) + GW_CLOSE_GRACE_MS;
    gw_listen_close(s);
    LIST_FOR_EACH_SAFE (&s->conns, n) {
        struct gw_conn *c = list_entry(n, struct gw_conn, link);
        if (c->ws)
            gw_ws_close(c->ws, 1012, "the gateway is shutting down");
    }
    gw_server_arm(s);
}

/* After the first lws_context_destroy: give libuv its turns, then free the context. */
static void finish_close(struct gw_server *s)
{
    if (++s->close_ticks <= CLOSE_TICKS)
        return;
    loop_timer_stop(s->tick);
    if (s->context)
        lws_context_destroy(s->context);
    s->context = NULL;
    void (*fn)(void *) = s->closed;
    s->closed = NULL;
    if (fn)
        fn(s->closed_ctx);
}

/* A server that never was closed (failed start): run the loop for lws here. */
static void drop_context(struct gw_server *s)
{
    lws_context_destroy(s->context);
    for (int i = 0; i < CLOSE_TICKS && s->context; i++)
        loop_step(s->loop, 1);
    if (s->context)
        lws_context_destroy(s->context);
    s->context = NULL;
}

void gw_server_free(struct gw_server *s)
{
    if (!s)
        return;
    gw_listen_close(s);
    if (s->context)
        drop_context(s);
    LIST_FOR_EACH_SAFE (&s->conns, n)
        gw_conn_free(list_entry(n, struct gw_conn, link));
    loop_timer_free(s->tick);
    gw_auth_free(s->auth);
    config_free(&s->config);
    free(s->protocols);
    free(s->scratch);
    free(s->base);
    free(s->url);
    free(s);
}

/* ---- log ---- */

void gw_server_count(struct gw_server *s, const struct gw_req *r)
{
    uint64_t us = loop_now_us(s->loop) - r->started_us;
    enum log_level level = LOG_LEVEL_INFO;
    metric_add(s->count.http, 1);
    metric_observe(s->count.http_seconds, (double)us / 1e6);
    if (r->status < 400 && (r->method == GW_GET || r->method == GW_HEAD || r->method == GW_OPTIONS))
        level = LOG_LEVEL_DEBUG; /* polls */
    else if (r->method != GW_GET)
        s->activity_us = loop_wall_us(s->loop);
    if (log_enabled(level)) /* never the query: it may hold a token */
        log_write(&s->log, level, "%s %s %d %zu bytes %.1f ms principal=%s peer=%s",
                  gw_method_name(r->method), r->uri, r->status, r->out.len, (double)us / 1000,
                  r->principal ? r->principal : "-", r->peer ? r->peer : "-");
}
