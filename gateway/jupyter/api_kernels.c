/* /api/kernels: list, start, look at, interrupt, restart, end. */
#include "common/json.h"
#include "common/timefmt.h"
#include "gateway/http/error.h"
#include "gateway/http/server.h"
#include "gateway/jupyter/api.h"
#include <errno.h>
#include <string.h>

static void set_text(json_t *o, const char *key, const char *value)
{
    json_object_set_new(o, key, value ? json_string(value) : json_null());
}

json_t *gw_timings(const struct vm_timings *t)
{
    return json_pack("{s:s?, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "origin", t->origin,
                     "queue_ms", t->queue_ms, "spawn_ms", t->spawn_ms, "load_ms", t->load_ms,
                     "resume_ms", t->resume_ms, "assign_ms", t->assign_ms, "total_ms", t->total_ms,
                     "guest_entropy_ms", t->guest_entropy_ms, "guest_clock_ms", t->guest_clock_ms,
                     "guest_hooks_ms", t->guest_hooks_ms);
}

/* What is ours in the model, under one key so that no client trips over it. */
static json_t *cellvisor_part(const struct km_kernel_info *i)
{
    json_t *o = json_object();
    set_text(o, "tier", i->vm ? vm_tier_name(i->vm->tier) : NULL);
    set_text(o, "template", i->vm ? i->vm->template_name : NULL);
    set_text(o, "sandbox", i->vm ? i->vm->id : NULL);
    set_text(o, "reason", i->reason);
    json_object_set_new(o, "timings", i->vm ? gw_timings(&i->vm->timings) : json_null());
    json_object_set_new(o, "restarts", json_integer(i->restarts));
    return o;
}

json_t *gw_kernel_model(const struct km_kernel *k)
{
    struct km_kernel_info i;
    char when[TIMEFMT_ISO_LEN + 1];
    km_kernel_info(k, &i);
    timefmt_iso(when, i.last_activity_us);
    json_t *o = json_object();
    set_text(o, "id", i.id);
    set_text(o, "name", i.spec);
    set_text(o, "last_activity", when);
    set_text(o, "execution_state", i.execution_state);
    json_object_set_new(o, "connections", json_integer(i.connections));
    if (i.reason)
        set_text(o, "reason", i.reason);
    json_object_set_new(o, "cellvisor", cellvisor_part(&i));
    return o;
}

struct km_kernel *gw_req_kernel(struct gw_req *r)
{
    struct km_kernel *k = km_kernel_find(r->server->km, r->principal, gw_arg(r, 0));
    if (!k)
        gw_reply_error(r, 404, "Kernel does not exist: %s", gw_arg(r, 0));
    return k;
}

static bool add_model(void *ctx, struct km_kernel *k)
{
    json_array_append_new(ctx, gw_kernel_model(k));
    return true;
}

void gw_api_kernels(struct gw_req *r)
{
    json_t *a = json_array();
    km_kernel_each(r->server->km, r->principal, add_model, a);
    gw_reply_json(r, 200, a);
}

void gw_api_kernel(struct gw_req *r)
{
    struct km_kernel *k = gw_req_kernel(r);
    if (k)
        gw_reply_json(r, 200, gw_kernel_model(k));
}

void gw_api_kernel_delete(struct gw_req *r)
{
    struct km_kernel *k = gw_req_kernel(r);
    if (!k)
        return;
    km_kernel_shutdown(k, "deleted by its owner");
    gw_reply_empty(r, 204);
}

/* ---- operations that take time: r->ctx is the km_op ---- */

static void on_gone(struct gw_req *r)
{
    km_op_cancel(r->ctx); /* a start is undone, anything else goes on without us */
}

static void location_of(struct gw_req *r, const struct km_kernel *k)
{
    struct km_kernel_info i;
    char path[300];
    km_kernel_info(k, &i);
    snprintf(path, sizeof(path), "/api/kernels/%s", i.id);
    gw_reply_location(r, path);
}

static void on_started(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct gw_req *r = ctx;
    r->ctx = NULL;
    if (!k) {
        gw_reply_err(r, e);
        return;
    }
    location_of(r, k);
    gw_reply_json(r, 201, gw_kernel_model(k));
}

int gw_body_env(json_t *body, json_t **ret, struct err *e)
{
    json_t *env = json_object_get(body, "env"), *v;
    const char *key;
    *ret = NULL;
    if (!env || json_is_null(env))
        return 0;
    if (!json_is_object(env))
        return err_set(e, -EINVAL, "env: not an object of strings");
    json_object_foreach(env, key, v) if (!json_is_string(v)) return err_set(
        e, -EINVAL, "env.%.100s: not a string", key);
    *ret = env;
    return 0;
}

/* {"name","kernel_id","env","path","cellvisor":{"tier","cwd"}}; path names a directory of the
 * client's machine: it means nothing in a sandbox and is ignored. */
static int read_start(struct gw_req *r, json_t *body, struct km_start *s, struct err *e)
{
    struct json_obj o, own;
    json_t *extra = NULL;
    const char *tier = NULL, *path = NULL;
    int err = json_obj_of(body, "", &o, e);
    s->principal = r->principal;
    if (!err)
        err = json_get_str(&o, "name", &s->spec, e);
    if (!err)
        err = json_get_str(&o, "kernel_id", &s->kernel_id, e);
    if (!err)
        err = json_get_str(&o, "path", &path, e);
    if (!err)
        err = gw_body_env(body, &s->env, e);
    if (!err)
        err = json_get_obj(&o, "cellvisor", &extra, e);
    if (err || !extra)
        return err;
    err = json_obj_of(extra, "cellvisor", &own, e);
    if (!err)
        err = json_get_str(&own, "tier", &tier, e);
    if (!err)
        err = json_get_str(&own, "cwd", &s->cwd, e);
    if (!err && tier && vm_tier_parse(tier, &s->tier_floor))
        err = err_set(e, -EINVAL, "cellvisor.tier: \"%.40s\" is none of local, tcg, kvm", tier);
    return err;
}

void gw_api_kernel_start(struct gw_req *r)
{
    struct km_start s = { .tier_floor = VM_TIER_LOCAL };
    struct km_op *op = NULL;
    struct err e = { 0 };
    json_t *body = NULL;
    int err = gw_req_json(r, &body, &e);
    if (!err)
        err = read_start(r, body, &s, &e);
    if (!err)
        err = km_kernel_start(r->server->km, &s, on_started, r, &op, &e);
    if (!err) {
        r->ctx = op;
        r->on_gone = on_gone;
    }
    json_decref(body);
    if (err) {
        e.code = err;
        gw_reply_err(r, &e);
    }
}

static void on_interrupted(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct gw_req *r = ctx;
    r->ctx = NULL;
    if (k)
        gw_reply_empty(r, 204);
    else
        gw_reply_err(r, e);
}

void gw_api_kernel_interrupt(struct gw_req *r)
{
    struct km_kernel *k = gw_req_kernel(r);
    struct km_op *op = NULL;
    if (!k)
        return;
    km_kernel_interrupt(k, on_interrupted, r, &op);
    r->ctx = op;
    r->on_gone = on_gone;
}

static void on_restarted(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct gw_req *r = ctx;
    r->ctx = NULL;
    if (!k) {
        int status = gw_status_of(e->code);
        gw_reply_error(r, status, "Exception restarting kernel: %s", e->msg);
        return;
    }
    location_of(r, k);
    gw_reply_json(r, 200, gw_kernel_model(k));
}

void gw_api_kernel_restart(struct gw_req *r)
{
    struct km_kernel *k = gw_req_kernel(r);
    struct km_op *op = NULL;
    if (!k)
        return;
    km_kernel_restart(k, on_restarted, r, &op);
    r->ctx = op;
    r->on_gone = on_gone;
}
