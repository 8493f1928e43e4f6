/* POST /api/kernels/{id}/execute: run code, wait, get everything it produced (km_execution.h). A
 * client that goes away stops the code (case-66); "timeout" is exact and ours (case-124). */
#include "common/json.h"
#include "gateway/http/server.h"
#include "gateway/jupyter/api.h"
#include "kernelmgr/km_execution.h"
#include <errno.h>
#include <string.h>

#define TIMEOUT_MAX_S (30.0 * 24 * 3600)

static void on_done(void *ctx, struct km_execution *x)
{
    struct gw_req *r = ctx;
    r->on_gone = NULL;
    buf_clear(&r->out);
    int e = km_execution_write_json(x, &r->out);
    km_execution_free(x);
    if (e)
        gw_reply_error(r, 500, "The result is too big for one reply");
    else
        gw_reply_out(r, 200, "application/json");
}

static void on_gone(struct gw_req *r)
{
    km_execution_cancel(r->ctx, true);
    km_execution_free(r->ctx);
}

static int get_timeout(json_t *body, uint64_t *ret_ms, struct err *e)
{
    json_t *v = json_object_get(body, "timeout");
    if (!v || json_is_null(v))
        return 0;
    if (!json_is_number(v) || json_number_value(v) < 0 || json_number_value(v) > TIMEOUT_MAX_S)
        return err_set(e, -EINVAL, "timeout: not a number of seconds from 0 (none) to %.0f",
                       TIMEOUT_MAX_S);
    double ms = json_number_value(v) * 1000;
    *ret_ms = ms > 0 && ms < 1 ? 1 : (uint64_t)ms;
    return 0;
}

static int read_body(json_t *body, struct km_execute_opts *o, struct err *e)
{
    static const char *const known[] = { "code",          "timeout",       "silent",
                                         "store_history", "stop_on_error", NULL };
    struct json_obj obj;
    int err = json_obj_of(body, "", &obj, e);
    if (!err)
        err = json_check_keys(&obj, known, e);
    if (!err)
        err = json_get_str(&obj, "code", &o->code, e);
    if (!err && !o->code)
        err = err_set(e, -EINVAL, "Missing field in JSON data: code");
    if (!err)
        err = get_timeout(body, &o->timeout_ms, e);
    if (!err)
        err = json_get_bool(&obj, "silent", &o->silent, e);
    o->store_history = !o->silent;
    if (!err)
        err = json_get_bool(&obj, "store_history", &o->store_history, e);
    if (!err)
        err = json_get_bool(&obj, "stop_on_error", &o->stop_on_error, e);
    if (!err)
        o->code_len = strlen(o->code);
    return err;
}

void gw_api_execute(struct gw_req *r)
{
    static const struct km_execution_events events = { .done = on_done };
    struct km_kernel *k = gw_req_kernel(r);
    struct km_execute_opts o;
    struct km_execution *x = NULL;
    struct err e = { 0 };
    json_t *body = NULL;
    if (!k)
        return;
    km_execute_opts_defaults(&o);
    o.stop_on_error = false; /* calls are independent: one that fails, or is cancelled, aborts no
                                other that waits behind it (case-66) */
    int err = gw_req_json(r, &body, &e);
    if (!err)
        err = read_body(body, &o, &e);
    if (!err)
        err = km_execute(k, &o, &events, r, &x, &e);
    if (!err) {
        r->ctx = x;
        r->on_gone = on_gone;
    }
    json_decref(body);
    if (err) {
        e.code = err;
        gw_reply_err(r, &e);
    }
}
