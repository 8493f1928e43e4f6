/* /api/sessions (jupyter.md 1.3, 1.4): a path bound to a kernel; semantics in
 * kernelmgr/km_session.h. */
#include "common/json.h"
#include "gateway/http/error.h"
#include "gateway/http/server.h"
#include "gateway/jupyter/api.h"
#include <errno.h>
#include <string.h>

/* New reference; NULL when the kernel is gone. */
static json_t *session_model(struct gw_req *r, const struct km_session *s)
{
    struct km_kernel *k = km_kernel_find(r->server->km, s->principal, s->kernel_id);
    if (!k)
        return NULL;
    const char *type = s->type ? s->type : "", *name = s->name ? s->name : "";
    json_t *o = json_pack("{s:s,s:s,s:s,s:s,s:o}", "id", s->id, "path", s->path ? s->path : "",
                          "name", name, "type", type, "kernel", gw_kernel_model(k));
    if (o && strcmp(type, "notebook") == 0)
        json_object_set_new(o, "notebook",
                            json_pack("{s:s,s:s}", "path", s->path ? s->path : "", "name", name));
    return o;
}

struct listing {
    struct gw_req *r;
    json_t *out;
};

static bool add_session(void *ctx, struct km_session *s)
{
    struct listing *l = ctx;
    json_t *m = s->starting ? NULL : session_model(l->r, s);
    if (m)
        json_array_append_new(l->out, m);
    return true;
}

void gw_api_sessions(struct gw_req *r)
{
    struct listing l = { .r = r, .out = json_array() };
    km_session_each(r->server->km, r->principal, add_session, &l);
    gw_reply_json(r, 200, l.out);
}

static struct km_session *find(struct gw_req *r)
{
    struct km_session *s = km_session_find(r->server->km, r->principal, gw_arg(r, 0));
    if (!s)
        gw_reply_error(r, 404, "Session not found: session_id='%s'", gw_arg(r, 0));
    return s;
}

void gw_api_session(struct gw_req *r)
{
    struct km_session *s = find(r);
    if (!s)
        return;
    json_t *m = session_model(r, s);
    if (m)
        gw_reply_json(r, 200, m);
    else
        gw_reply_error(r, 404, "The kernel of session %s is gone", s->id);
}

/* Body -> request; strings borrow from body. The old form {"notebook":{"path"|"name"},..} is taken.
 */
static int read_body(json_t *body, struct km_session_req *q, struct err *e)
{
    struct json_obj o, kernel, nb;
    json_t *k = NULL, *n = NULL;
    int err = json_obj_of(body, "", &o, e);
    if (!err)
        err = json_get_str(&o, "path", &q->path, e);
    if (!err)
        err = json_get_str(&o, "name", &q->name, e);
    if (!err)
        err = json_get_str(&o, "type", &q->type, e);
    if (!err)
        err = json_get_obj(&o, "kernel", &k, e);
    if (!err)
        err = json_get_obj(&o, "notebook", &n, e);
    if (!err)
        err = gw_body_env(body, &q->env, e);
    if (!err && n) {
        const char *path = NULL, *name = NULL;
        err = json_obj_of(n, "notebook", &nb, e);
        if (!err)
            err = json_get_str(&nb, "path", &path, e);
        if (!err)
            err = json_get_str(&nb, "name", &name, e);
        if (!q->path)
            q->path = path ? path : name;
        if (!q->type)
            q->type = "notebook";
    }
    if (err || !k)
        return err;
    err = json_obj_of(k, "kernel", &kernel, e);
    if (!err)
        err = json_get_str(&kernel, "id", &q->kernel_id, e);
    if (!err)
        err = json_get_str(&kernel, "name", &q->spec, e);
    return err;
}

/* A session that cannot get its kernel is a 501 with a short_message too: JupyterLab shows that. */
static void reply_failed(struct gw_req *r, const struct err *e)
{
    int status = gw_status_of(e->code);
    const char *text = e->msg[0] ? e->msg : strerror(-e->code);
    if (status != 404 && status != 500) {
        gw_reply_err(r, e);
        return;
    }
    json_t *o = json_pack("{s:s,s:s,s:s}", "message", text, "short_message", text, "reason",
                          gw_status_phrase(501));
    gw_reply_json(r, 501, o);
}

static void on_gone(struct gw_req *r)
{
    km_op_cancel(r->ctx);
}

static void reply_session(struct gw_req *r, struct km_session *s, const struct err *e, int status)
{
    r->ctx = NULL;
    if (e && e->code) {
        reply_failed(r, e);
        return;
    }
    json_t *m = s ? session_model(r, s) : NULL;
    if (!m) {
        gw_reply_error(r, 500, "The kernel of the session is gone already");
        return;
    }
    char path[100];
    snprintf(path, sizeof(path), "/api/sessions/%s", s->id);
    if (status == 201)
        gw_reply_location(r, path);
    gw_reply_json(r, status, m);
}

static void on_created(void *ctx, struct km_session *s, const struct err *e)
{
    reply_session(ctx, s, e, 201);
}

static void on_patched(void *ctx, struct km_session *s, const struct err *e)
{
    reply_session(ctx, s, e, 200);
}

void gw_api_session_create(struct gw_req *r)
{
    struct km_session_req q = { 0 };
    struct km_op *op = NULL;
    struct err e = { 0 };
    json_t *body = NULL;
    int err = gw_req_json(r, &body, &e);
    if (!err)
        err = read_body(body, &q, &e);
    if (!err && (!q.path || !*q.path))
        err = err_set(&e, -EINVAL, "Missing field in JSON data: path");
    if (!err && (!q.type || !*q.type))
        err = err_set(&e, -EINVAL, "Missing field in JSON data: type");
    bool asked = !err;
    if (!err)
        err = km_session_create(r->server->km, r->principal, &q, on_created, r, &op, &e);
    if (!err) {
        r->ctx = op;
        r->on_gone = on_gone;
    }
    json_decref(body);
    if (!err)
        return;
    e.code = err;
    if (asked)
        reply_failed(r, &e);
    else
        gw_reply_err(r, &e);
}

void gw_api_session_patch(struct gw_req *r)
{
    struct km_session *s = find(r);
    struct km_session_req q = { 0 };
    struct km_op *op = NULL;
    struct err e = { 0 };
    json_t *body = NULL;
    if (!s)
        return;
    int err = gw_req_json(r, &body, &e);
    if (!err)
        err = read_body(body, &q, &e);
    bool asked = !err;
    if (!err)
        err = km_session_patch(r->server->km, s, &q, on_patched, r, &op, &e);
    if (!err) {
        r->ctx = op;
        r->on_gone = on_gone;
    }
    json_decref(body);
    if (!err)
        return;
    e.code = err;
    if (asked)
        reply_failed(r, &e);
    else
        gw_reply_err(r, &e);
}

void gw_api_session_delete(struct gw_req *r)
{
    struct km_session *s = find(r);
    if (!s)
        return;
    if (km_session_delete(r->server->km, s))
        gw_reply_error(r, 410, "Kernel deleted before session");
    else
        gw_reply_empty(r, 204);
}
