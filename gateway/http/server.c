/* Server life: configuration, tick, and the orderly end. */
#include "gateway/http/server.h"
#include "common/mem.h"
#include "gateway/http/conn.h"
#include "gateway/http/listen.h"
#include "gateway/http/uri.h"
#include "gateway/jupyter/api.h"
#include "gateway/jupyter/ws_conn.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FAST_MS 100u
#define SLOW_MS 1000u

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

static void finish_close(void *ctx)
{
    struct gw_server *s = ctx;
    void (*fn)(void *) = s->closed;
    s->closed = NULL;
    if (fn)
        fn(s->closed_ctx);
}

static void on_tick(void *ctx)
{
    struct gw_server *s = ctx;
    s->now_ms = loop_now_ms(s->loop);
    LIST_FOR_EACH_SAFE (&s->conns, n) {
        struct gw_conn *c = list_entry(n, struct gw_conn, link);
        if (!gw_conn_tick(c) || (c->ws && !gw_ws_tick(c->ws)))
            continue;
        if (s->closing && (gw_conn_idle(c) || s->now_ms >= s->close_deadline_ms))
            gw_conn_kill(c);
    }
    if (s->closing && !s->n_conns) {
        loop_timer_stop(s->tick);
        loop_defer(s->loop, finish_close, s);
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
    ws_parked_init(&s->parked);
    config_copy(&s->config, c);
    s->started_us = s->activity_us = loop_wall_us(l);
    s->scratch = xmalloc(GW_SCRATCH);
    s->tick = loop_timer_new(l, on_tick, s);
    gw_api_routes(&s->routes, &s->n_routes);
    make_metrics(s);
    r = gw_base_normalise(c->base_url, &s->base, e);
    if (!r)
        r = gw_auth_new(c, &s->auth, e);
    if (!r && c->tls_cert)
        r = gw_tls_context(c->tls_cert, c->tls_key, &s->tls, e);
    if (!r)
        r = gw_listen_open(s, e);
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

void gw_server_free(struct gw_server *s)
{
    if (!s)
        return;
    gw_listen_close(s);
    LIST_FOR_EACH_SAFE (&s->conns, n)
        gw_conn_kill(list_entry(n, struct gw_conn, link));
    ws_parked_fini(&s->parked);
    loop_cancel_deferred(s->loop, s);
    loop_timer_free(s->tick);
    SSL_CTX_free(s->tls);
    gw_auth_free(s->auth);
    config_free(&s->config);
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
