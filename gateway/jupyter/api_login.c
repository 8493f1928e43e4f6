/* /login and /logout: turn a token into a cookie, so that a browser need not carry it in URLs. */
#include "common/mem.h"
#include "gateway/http/server.h"
#include "gateway/http/uri.h"
#include "gateway/jupyter/api.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define PAGE_CSP                                                                                   \
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"

/* Where to go after the login: a path of ours, or the root. "//host" would lead away. */
static const char *safe_next(const char *base, const char *next)
{
    if (!next || next[0] != '/' || next[1] == '/' || next[1] == '\\' || !gw_base_strip(base, next))
        return base;
    for (const char *p = next; *p; p++)
        if ((unsigned char)*p <= 0x20 || *p == '\\' || *p == 0x7f)
            return base;
    return next;
}

static void log_in(struct gw_req *r, const char *token, const char *next)
{
    struct gw_server *s = r->server;
    uint64_t now_s = loop_wall_us(s->loop) / 1000000;
    const char *who = gw_auth_token(s->auth, token);
    if (!who) {
        gw_reply_error(r, 401, "The token is wrong");
        return;
    }
    if (gw_auth_set_cookies(s->auth, token, r->header[GW_H_COOKIE], now_s, &r->head)) {
        gw_reply_error(r, 500, "The cookie could not be made");
        return;
    }
    r->principal = who;
    struct buf b;
    buf_init(&b, 4096);
    if (!gw_uri_encode(&b, safe_next(s->base, next), "?=&") && buf_cstr(&b))
        gw_reply_header(r, "Location", "%s", buf_cstr(&b));
    buf_fini(&b);
    gw_reply_empty(r, 302);
}

void gw_api_login_page(struct gw_req *r)
{
    const char *token = gw_req_query(r, "token");
    if (token && *token) {
        log_in(r, token, gw_req_query(r, "next"));
        return;
    }
    gw_reply_header(r, "Content-Security-Policy", "%s", PAGE_CSP);
    gw_reply_header(r, "Referrer-Policy", "no-referrer");
    (void)buf_printf(&r->out,
                     "<!doctype html><html lang=en><meta charset=utf-8><title>Cellvisor</title>"
                     "<body style=\"font-family:sans-serif;max-width:30em;margin:4em auto\">"
                     "<h1>Cellvisor</h1><form method=post action=\"%slogin\">"
                     "<label>Token <input type=password name=password autofocus "
                     "autocomplete=current-password></label> <button>Log in</button></form>",
                     r->server->base);
    gw_reply_out(r, 200, "text/html; charset=utf-8");
}

static int hex(char c)
{
    return isdigit((unsigned char)c)    ? c - '0'
           : isxdigit((unsigned char)c) ? tolower((unsigned char)c) - 'a' + 10
                                        : -1;
}

/* Value of a field in an application/x-www-form-urlencoded body, heap, or NULL. */
static char *form_field(struct slice body, const char *name)
{
    char *text = slice_dup(body), *out = NULL;
    size_t n = strlen(name);
    for (char *p = text; p && !out; p = strchr(p, '&') ? strchr(p, '&') + 1 : NULL) {
        if (strncmp(p, name, n) != 0 || p[n] != '=')
            continue;
        size_t len = strcspn(p + n + 1, "&"), o = 0;
        const char *v = p + n + 1;
        out = xmalloc(len + 1);
        for (size_t i = 0; i < len; i++) {
            bool esc =
                v[i] == '%' && i + 2 < len + 0 + 1 && hex(v[i + 1]) >= 0 && hex(v[i + 2]) >= 0;
            out[o++] = esc ? (char)(hex(v[i + 1]) * 16 + hex(v[i + 2])) : v[i] == '+' ? ' ' : v[i];
            i += esc ? 2 : 0;
        }
        out[o] = 0;
    }
    free(text);
    return out;
}

/* {"token":..} or {"password":..} as JSON, or the same as a form. */
void gw_api_login(struct gw_req *r)
{
    const char *type = r->header[GW_H_CONTENT_TYPE];
    char *token = NULL;
    if (type && strncasecmp(type, "application/json", 16) == 0) {
        struct err e = { 0 };
        json_t *body = NULL;
        if (gw_req_json(r, &body, &e)) {
            gw_reply_err(r, &e);
            return;
        }
        const char *t = json_string_value(json_object_get(body, "token"));
        token = xstrdup(t ? t : json_string_value(json_object_get(body, "password")));
        json_decref(body);
    } else {
        token = form_field(buf_slice(&r->body), "password");
        if (!token)
            token = form_field(buf_slice(&r->body), "token");
    }
    if (!token || !*token)
        gw_reply_error(r, 400, "Missing field: password (or token)");
    else
        log_in(r, token, gw_req_query(r, "next"));
    free(token);
}

void gw_api_logout(struct gw_req *r)
{
    (void)gw_auth_clear_cookies(r->server->auth, &r->head);
    gw_reply_header(r, "Location", "%s", r->server->base);
    gw_reply_empty(r, 302);
}
