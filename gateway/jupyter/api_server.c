/* The server about itself: version, status, identity, sandboxes, metrics, health, shutdown. */
#include "common/json.h"
#include "common/timefmt.h"
#include "gateway/http/server.h"
#include "gateway/jupyter/api.h"
#include <ctype.h>
#include <errno.h>
#include <string.h>

void gw_api_root(struct gw_req *r)
{
    if (gw_web_try(r, "index.html"))
        return;
    gw_reply_header(r, "Content-Security-Policy",
                    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'");
    (void)buf_printf(&r->out,
                     "<!doctype html><html lang=en><meta charset=utf-8><title>Cellvisor</title>"
                     "<body style=\"font-family:sans-serif;max-width:40em;margin:4em auto\">"
                     "<h1>Cellvisor</h1><p>This is a Jupyter gateway that runs every kernel in a "
                     "microVM of its own. It has no notebooks; clients connect to it, for example "
                     "<code>jupyter lab --gateway-url=THIS_URL</code>.</p>"
                     "<p><a href=\"%sapi\">API version</a> &middot; <a href=\"%slogin\">log in</a>",
                     r->server->base, r->server->base);
    gw_reply_out(r, 200, "text/html; charset=utf-8");
}

void gw_api_version(struct gw_req *r)
{
    gw_reply_json(r, 200,
                  json_pack("{s:s,s:s}", "version", CELLVISOR_VERSION, "name", "cellvisor"));
}

struct totals {
    json_int_t kernels, connections;
    uint64_t last_us;
};

static bool add_totals(void *ctx, struct km_kernel *k)
{
    struct totals *t = ctx;
    struct km_kernel_info i;
    km_kernel_info(k, &i);
    t->kernels++;
    t->connections += i.connections;
    if (i.last_activity_us > t->last_us)
        t->last_us = i.last_activity_us;
    return true;
}

void gw_api_status(struct gw_req *r)
{
    struct totals t = { .last_us = r->server->activity_us };
    char started[TIMEFMT_ISO_LEN + 1], last[TIMEFMT_ISO_LEN + 1];
    km_kernel_each(r->server->km, r->principal, add_totals, &t);
    timefmt_iso(started, r->server->started_us);
    timefmt_iso(last, t.last_us);
    gw_reply_json(r, 200,
                  json_pack("{s:s,s:s,s:I,s:I}", "started", started, "last_activity", last,
                            "kernels", t.kernels, "connections", t.connections));
}

/* ---- /api/me ---- */

static bool may(const char *resource, const char *action)
{
    static const char *const resources[] = { "api", "kernels", "kernelspecs", "sessions", NULL };
    static const char *const actions[] = { "read", "write", "execute", NULL };
    bool known = false, ok = false;
    for (size_t i = 0; resources[i]; i++)
        known |= strcmp(resources[i], resource) == 0;
    for (size_t i = 0; actions[i]; i++)
        ok |= strcmp(actions[i], action) == 0;
    return known && ok;
}

/* ?permissions={"kernels":["read","write"]} -> what of that is granted; NULL: malformed. */
static json_t *permissions(const char *asked)
{
    json_t *out = json_object(), *list, *v;
    const char *resource;
    size_t i;
    if (!asked || !*asked)
        return out;
    json_t *in = json_parse(slice_str(asked), NULL);
    bool ok = json_is_object(in);
    json_object_foreach(in, resource, list)
    {
        json_t *granted = json_array();
        ok = ok && json_is_array(list);
        json_array_foreach(list, i, v)
        {
            ok = ok && json_is_string(v);
            if (json_is_string(v) && may(resource, json_string_value(v)))
                json_array_append(granted, v);
        }
        json_object_set_new(out, resource, granted);
    }
    json_decref(in);
    if (!ok) {
        json_decref(out);
        return NULL;
    }
    return out;
}

void gw_api_me(struct gw_req *r)
{
    json_t *perms = permissions(gw_req_query(r, "permissions"));
    const char *who = r->principal;
    char initial[2] = { (char)toupper((unsigned char)who[0]), 0 };
    if (!perms) {
        gw_reply_error(r, 400, "permissions: not a JSON object of lists of strings");
        return;
    }
    if ((unsigned char)initial[0] >= 0x80)
        initial[0] = 0;
    gw_reply_json(r, 200,
                  json_pack("{s:{s:s,s:s,s:s,s:s,s:n,s:n},s:o,s:[]}", "identity", "username", who,
                            "name", who, "display_name", who, "initials", initial, "avatar_url",
                            "color", "permissions", perms, "updatable_fields"));
}

void gw_api_me_patch(struct gw_req *r)
{
    gw_reply_error(r, 403, "The identity comes from the token: nothing can be changed here");
}

/* ---- the rest ---- */

void gw_api_shutdown(struct gw_req *r)
{
    struct gw_server *s = r->server;
    if (!gw_auth_may_shutdown(s->auth, r->principal)) {
        gw_reply_error(r, 403, "%s may not shut the server down: it has other users", r->principal);
        return;
    }
    void (*fn)(void *) = s->on_shutdown;
    void *ctx = s->shutdown_ctx;
    log_info(&s->log, "shutdown asked for by %s", r->principal);
    gw_reply_json(r, 200, json_object());
    if (fn)
        loop_defer(s->loop, fn, ctx);
}

struct sandboxes {
    uint64_t now_us;
    json_t *out;
};

static bool add_sandbox(void *ctx, struct km_kernel *k)
{
    struct sandboxes *s = ctx;
    struct km_kernel_info i;
    km_kernel_info(k, &i);
    if (!i.vm)
        return true;
    double age = s->now_us > i.started_us ? (double)(s->now_us - i.started_us) / 1e6 : 0;
    json_t *o = json_pack("{s:s,s:s?,s:s,s:f,s:o,s:[s]}", "id", i.vm->id, "template",
                          i.vm->template_name, "tier", vm_tier_name(i.vm->tier), "age_s", age,
                          "timings", gw_timings(&i.vm->timings), "kernels", i.id);
    if (o)
        json_array_append_new(s->out, o);
    return true;
}

void gw_api_sandboxes(struct gw_req *r)
{
    struct sandboxes s = { .now_us = loop_wall_us(r->server->loop), .out = json_array() };
    km_kernel_each(r->server->km, r->principal, add_sandbox, &s);
    gw_reply_json(r, 200, s.out);
}

void gw_api_healthz(struct gw_req *r)
{
    gw_reply_json(r, 200, json_pack("{s:s}", "status", "ok"));
}

void gw_api_metrics(struct gw_req *r)
{
    if (metrics_write(r->server->metrics, &r->out))
        gw_reply_error(r, 500, "The metrics do not fit into one reply");
    else
        gw_reply_out(r, 200, "text/plain; version=0.0.4; charset=utf-8");
}

void gw_api_csp_report(struct gw_req *r)
{
    gw_reply_empty(r, 204); /* browsers send these because our policy header asks them to */
}
