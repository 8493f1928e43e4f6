/* Requests and replies; see request.h. */
#include "gateway/http/request.h"
#include "common/json.h"
#include "common/mem.h"
#include "gateway/http/error.h"
#include "gateway/http/origin.h"
#include "gateway/http/server.h"
#include "gateway/http/uri.h"
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_MAX (16u << 10)
#define REPLY_MAX (512u << 20)

struct gw_req *gw_req_new(struct gw_server *s, enum gw_method m, const char *uri)
{
    struct gw_req *r = xnew(struct gw_req);
    r->magic = GW_REQ_MAGIC;
    r->server = s;
    r->method = m;
    r->uri = xstrdup(uri);
    r->path = gw_base_strip(s->base, r->uri);
    r->started_us = loop_now_us(s->loop);
    buf_init(&r->body, s->config.max_body);
    buf_init(&r->head, HEAD_MAX);
    buf_init(&r->out, REPLY_MAX);
    return r;
}

void gw_req_free(struct gw_req *r)
{
    if (!r)
        return;
    list_remove(&r->link);
    for (size_t i = 0; i < r->n_query; i++)
        free(r->query[i]);
    for (size_t i = 0; i < GW_HEADERS; i++)
        free(r->header[i]);
    free(r->uri);
    buf_fini(&r->body);
    buf_fini(&r->head);
    buf_fini(&r->out);
    r->magic = 0;
    free(r);
}

void gw_req_set_header(struct gw_req *r, enum gw_header h, const char *value)
{
    free(r->header[h]);
    r->header[h] = xstrdup(value);
}

bool gw_req_add_query(struct gw_req *r, const char *arg)
{
    if (r->n_query == GW_QUERY_MAX)
        return false;
    r->query[r->n_query++] = xstrdup(arg);
    return true;
}

const char *gw_req_query(const struct gw_req *r, const char *name)
{
    return gw_query_get(r->query, r->n_query, name);
}

const char *gw_arg(const struct gw_req *r, size_t i)
{
    return r->match.arg[i];
}

int gw_req_json(struct gw_req *r, json_t **ret, struct err *e)
{
    struct slice s = buf_slice(&r->body);
    size_t blank = 0;
    while (blank < s.n && strchr(" \t\r\n", s.p[blank]) && s.p[blank])
        blank++;
    if (blank == s.n) {
        *ret = json_object();
        return 0;
    }
    json_t *v = json_parse(s, e);
    if (!v)
        return err_wrap(e, -EINVAL, "Invalid JSON in body of request");
    if (!json_is_object(v)) {
        json_decref(v);
        return err_set(e, -EINVAL, "Invalid JSON in body of request: not an object");
    }
    *ret = v;
    return 0;
}

/* ---- replies ---- */

void gw_reply_header(struct gw_req *r, const char *name, const char *fmt, ...)
{
    char value[2048];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(value, sizeof(value), fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof(value) || strpbrk(value, "\r\n"))
        return; /* a peer's bytes must not split the response */
    (void)buf_printf(&r->head, "%s: %s\r\n", name, value);
}

void gw_reply_location(struct gw_req *r, const char *path)
{
    struct buf b;
    buf_init(&b, 2000);
    const char *base = r->server->base;
    if (!buf_append(&b, base, strlen(base)) &&
        !gw_uri_encode(&b, *path == '/' ? path + 1 : path, NULL))
        gw_reply_header(r, "Location", "%s", buf_cstr(&b));
    buf_fini(&b);
}

/* Headers that every reply has. API replies carry the policy that jupyter_server's clients know. */
static void common_headers(struct gw_req *r)
{
    bool page = r->match.route && (r->match.route->flags & GW_ROUTE_PAGE);
    const struct gw_config *c = &r->server->config;
    (void)buf_append_str(&r->head, "X-Content-Type-Options: nosniff\r\n");
    if (!page)
        (void)buf_printf(&r->head,
                         "Content-Security-Policy: frame-ancestors 'self'; report-uri "
                         "%sapi/security/csp-report; default-src 'none'\r\n"
                         "Cache-Control: no-store\r\n",
                         r->server->base);
    (void)gw_cors_headers(c, r->header[GW_H_ORIGIN], r->method == GW_OPTIONS, r->match.allow,
                          r->header[GW_H_AC_REQUEST_HEADERS], &r->head);
}

void gw_reply_out(struct gw_req *r, int status, const char *content_type)
{
    r->status = status;
    r->content_type = content_type;
    r->headless = r->method == GW_HEAD || status == 204 || status == 304;
    r->replied = true;
    r->on_gone = NULL;
    list_remove(&r->link);
    common_headers(r);
    gw_server_count(r->server, r);
    r->ops->reply(r);
}

void gw_reply_empty(struct gw_req *r, int status)
{
    buf_clear(&r->out);
    gw_reply_out(r, status, NULL);
}

void gw_reply_text(struct gw_req *r, int status, const char *content_type, struct slice body)
{
    buf_clear(&r->out);
    if (buf_append_slice(&r->out, body))
        return gw_reply_error(r, 500, "the reply does not fit into memory");
    gw_reply_out(r, status, content_type);
}

static int dump_to_buf(const char *p, size_t n, void *ctx)
{
    return buf_append(ctx, p, n) ? -1 : 0;
}

void gw_reply_json(struct gw_req *r, int status, json_t *steal)
{
    buf_clear(&r->out);
    int bad = !steal || json_dump_callback(steal, dump_to_buf, &r->out, JSON_COMPACT);
    json_decref(steal);
    if (bad)
        return gw_reply_error(r, 500, "the reply cannot be written as JSON");
    gw_reply_out(r, status, "application/json");
}

void gw_reply_error(struct gw_req *r, int status, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    buf_clear(&r->out);
    (void)gw_error_body(&r->out, status, NULL, text);
    if (status >= 500)
        log_warn(&r->server->log, "%s %s: %d %s", gw_method_name(r->method), r->uri, status, text);
    gw_reply_out(r, status, "application/json");
}

void gw_reply_err(struct gw_req *r, const struct err *e)
{
    int status = gw_status_of(e->code ? e->code : -EIO);
    if (status == 503)
        gw_reply_header(r, "Retry-After", "5");
    gw_reply_error(r, status, "%s", e->msg[0] ? e->msg : strerror(-e->code));
}

/* ---- before the body ---- */

/* "/api/kernels/" -> "/api/kernels" where that is a route: clients that add slashes are sent there.
 */
static bool redirect_slash(struct gw_req *r)
{
    size_t n = strlen(r->path);
    if (n < 2 || r->path[n - 1] != '/')
        return false;
    char *bare = xstrndup(r->path, n - 1);
    struct gw_match m;
    gw_routes_match(r->server->routes, r->server->n_routes, r->method, bare, &m);
    bool known = m.status != 404;
    if (known) {
        struct buf b;
        buf_init(&b, 8000);
        bool ok = !buf_append_str(&b, r->server->base) && !gw_uri_encode(&b, bare + 1, NULL);
        for (size_t i = 0; ok && i < r->n_query; i++)
            ok = !buf_append_byte(&b, i ? '&' : '?') && !gw_uri_encode(&b, r->query[i], "=");
        if (ok && buf_cstr(&b))
            (void)buf_printf(&r->head, "Location: %s\r\n", buf_cstr(&b));
        buf_fini(&b);
        bool get = r->method == GW_GET || r->method == GW_HEAD;
        gw_reply_empty(r, get ? 302 : 308);
    }
    free(bare);
    return known;
}

static bool find_route(struct gw_req *r)
{
    if (!r->path) {
        gw_reply_error(r, 404, "Not found: this server lives below %s", r->server->base);
        return false;
    }
    gw_routes_match(r->server->routes, r->server->n_routes, r->method, r->path, &r->match);
    if (r->match.status == 404) {
        if (!redirect_slash(r))
            gw_reply_error(r, 404, "Not found: %s", r->uri);
        return false;
    }
    if (r->match.status == 405) {
        gw_reply_header(r, "Allow", "%s", r->match.allow);
        gw_reply_error(r, 405, "%s is not possible on %s; use one of %s", gw_method_name(r->method),
                       r->uri, r->match.allow);
        return false;
    }
    bool ws = r->match.route->flags & GW_ROUTE_WS;
    if (r->method == GW_OPTIONS)
        return true;
    if (r->upgrade && !ws) {
        gw_reply_error(r, 400, "%s is no websocket", r->uri);
        return false;
    }
    if (!r->upgrade && ws) {
        gw_reply_header(r, "Upgrade", "websocket");
        gw_reply_error(r, 400, "%s is a websocket: an upgrade is needed", r->uri);
        return false;
    }
    return true;
}

static void refuse_login(struct gw_req *r, bool tried)
{
    if (!r->upgrade)
        gw_reply_header(r, "WWW-Authenticate", "Bearer realm=\"cellvisor\"");
    gw_reply_error(r, r->upgrade ? 403 : 401, "%s",
                   tried ? "The token is wrong"
                         : "A token is needed: Authorization: token ..., or ?token=...");
}

static bool check_identity(struct gw_req *r)
{
    struct gw_server *s = r->server;
    struct gw_credentials c = { .authorization = r->header[GW_H_AUTHORIZATION],
                                .query_token = gw_req_query(r, "token"),
                                .cookie = r->header[GW_H_COOKIE] };
    struct gw_identity id;
    gw_auth_check(s->auth, &c, loop_wall_us(s->loop) / 1000000, &id);
    r->principal = id.principal;
    r->how = id.how;
    unsigned flags = r->match.route->flags;
    bool open =
        (flags & GW_ROUTE_OPEN) || ((flags & GW_ROUTE_METRICS) && s->config.metrics_no_auth);
    /* A name that is not ours, and no explicit token: a page may have rebound its DNS name to us.
     */
    if (r->method == GW_OPTIONS)
        return true;
    if (!open && id.how != GW_AUTH_TOKEN && !gw_host_ok(&s->config, r->header[GW_H_HOST])) {
        gw_reply_error(r, 403, "Host %s is not allowed; see --allow-host",
                       r->header[GW_H_HOST] ? r->header[GW_H_HOST] : "");
        return false;
    }
    if (!r->principal && !open) {
        refuse_login(r, id.tried);
        return false;
    }
    /* An explicit token cannot come from a foreign page by accident; on a websocket the origin is
     * the only browser-side guard, so there it always counts (case-133). */
    if ((r->upgrade || id.how != GW_AUTH_TOKEN) && !open &&
        !gw_origin_ok(&s->config, r->header[GW_H_ORIGIN], r->header[GW_H_HOST])) {
        gw_reply_error(r, 403, "Origin %s is not allowed; see --allow-origin",
                       r->header[GW_H_ORIGIN]);
        return false;
    }
    if (id.how == GW_AUTH_COOKIE && !open &&
        !gw_auth_xsrf_ok(r->method, r->header[GW_H_COOKIE], r->header[GW_H_XSRF],
                         gw_req_query(r, "_xsrf"))) {
        gw_reply_error(r, 403, "XSRF cookie and X-XSRFToken header do not match");
        return false;
    }
    return true;
}

bool gw_req_head_done(struct gw_req *r)
{
    if (r->server->closing) {
        r->close = true;
        gw_reply_header(r, "Retry-After", "5");
        gw_reply_error(r, 503, "The server is shutting down");
        return false;
    }
    return find_route(r) && check_identity(r);
}

void gw_req_dispatch(struct gw_req *r)
{
    if (r->method == GW_OPTIONS) {
        gw_reply_header(r, "Allow", "%s", r->match.allow);
        gw_reply_empty(r, 204);
        return;
    }
    list_push_back(&r->server->pending, &r->link);
    r->match.route->fn(r);
}

void gw_req_gone(struct gw_req *r)
{
    if (r->on_gone)
        r->on_gone(r);
    gw_req_free(r);
}
