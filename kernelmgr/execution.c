/* Executions: a client of our own that sends one execute_request and gathers what belongs to it. It
 * ends with reply and idle, which the kernel log guarantees (death, restart and lost messages
 * included), at its time limit, or when the kernel is removed. It stays linked to the kernel until
 * it is freed, so that later update_display_data still reach its outputs (case-77, case-78). */
#include "common/id.h"
#include "common/timefmt.h"
#include "kernelmgr/km_execution.h"
#include "kernelmgr/km_priv.h"
#include "kernelmgr/result.h"
#include "kernelmgr/text.h"
#include <errno.h>
#include <string.h>

#define STOP_GRACE_MS 400u /* after an interrupt of ours: wait so long for a proper end */
#define CODE_MAX ((size_t)JP_MSG_MAX - (1u << 20))

enum x_status { X_IS_RUNNING, X_IS_OK, X_IS_ERROR, X_IS_ABORTED, X_IS_TIMEOUT, X_IS_DEAD };
static const char *const status_names[] = {
    "running", "ok", "error", "aborted", "timeout", "dead"
};

struct km_execution {
    struct km_client client;
    struct list_node link; /* km_kernel::executions; while the kernel exists */
    struct km_kernel *kernel;
    struct loop *loop;
    struct loop_timer *timer;
    struct km_execution_events ev;
    void *ctx;
    char id[ID_UUID_LEN + 1];
    enum x_status status;
    struct km_result result;
    bool have_idle, done_queued;
    bool expired; /* over its time limit */
    bool asked;   /* the code wants input, which nobody here can give (case-42) */
    uint64_t timeout_ms;
    uint64_t submit_us, begin_us, end_us;
    char why[300]; /* dead: the reason */
};

void km_execute_opts_defaults(struct km_execute_opts *o)
{
    *o = (struct km_execute_opts) { .store_history = true, .output_max = 64u << 20 };
}

static void say_done(void *ctx)
{
    struct km_execution *x = ctx;
    x->done_queued = false;
    if (x->ev.done)
        x->ev.done(x->ctx, x);
}

static void finish(struct km_execution *x, enum x_status status)
{
    if (x->status != X_IS_RUNNING)
        return;
    x->status = status;
    x->end_us = loop_now_us(x->loop);
    loop_timer_free(TAKE_PTR(x->timer));
    km_client_detach(&x->client);
    x->done_queued = true;
    loop_defer(x->loop, say_done, x);
}

static enum x_status status_of_reply(const struct km_execution *x)
{
    struct slice s = km_result_reply_value(&x->result, "status");
    if (x->expired)
        return X_IS_TIMEOUT;
    if (x->asked)
        return X_IS_ERROR;
    if (slice_eq_str(s, "\"ok\""))
        return X_IS_OK;
    if (slice_eq_str(s, "\"aborted\"") || slice_eq_str(s, "\"abort\""))
        return X_IS_ABORTED;
    if (slice_eq_str(km_result_reply_value(&x->result, "ename"), "\"DeadKernelError\""))
        return X_IS_DEAD;
    return X_IS_ERROR;
}

/* Stop the code: now when it runs, when it begins while it is queued behind others (whose code must
 * go on). */
static void stop_code(struct km_execution *x)
{
    struct km_kernel *k = x->kernel;
    struct km_req *q = k ? km_router_find(&k->router, x->id) : NULL;
    if (!q)
        return;
    if (q->busy)
        km_kernel_interrupt(k, NULL, NULL, NULL);
    else
        q->interrupt_on_busy = true;
}

static void on_timer(void *ctx);

static void end_within(struct km_execution *x, uint64_t ms)
{
    if (!x->timer)
        x->timer = loop_timer_new(x->loop, on_timer, x);
    loop_timer_start(x->timer, ms, 0);
}

static void take(struct km_execution *x, struct jp_msg *m)
{
    char status[16];
    bool ours = !strcmp(m->parent_id, x->id);
    if (m->parts.channel == JP_SHELL) {
        if (ours)
            km_result_set_reply(&x->result, m);
        return;
    }
    if (m->parts.channel == JP_STDIN && ours && !x->asked) {
        x->asked = true;
        if (x->kernel) /* it asks, so it runs, whether or not its busy was seen */
            km_kernel_interrupt(x->kernel, NULL, NULL, NULL);
        end_within(x, STOP_GRACE_MS);
    }
    if (m->parts.channel != JP_IOPUB || !ours)
        return;
    jp_status_of(m, status);
    if (!strcmp(status, "busy") && !x->begin_us)
        x->begin_us = loop_now_us(x->loop);
    if (!strcmp(status, "idle"))
        x->have_idle = true;
    km_result_add(&x->result, m);
    if (x->ev.output)
        x->ev.output(x->ctx, m);
}

static void on_wake(struct km_client *c)
{
    struct km_execution *x = container_of(c, struct km_execution, client);
    struct jp_msg *m;
    while (x->status == X_IS_RUNNING && (m = km_client_next(c))) {
        take(x, m);
        jp_msg_unref(m);
        if (x->have_idle && x->result.reply)
            finish(x, status_of_reply(x));
    }
}

static void on_closed(struct km_client *c, enum km_close_why why, const char *text)
{
    struct km_execution *x = container_of(c, struct km_execution, client);
    (void)why;
    snprintf(x->why, sizeof(x->why), "%s", text);
    finish(x, X_IS_DEAD);
}

static void on_throttle(struct km_client *c, bool on)
{
    (void)c;
    (void)on;
}

static const struct km_client_ops client_ops = { on_wake, on_closed, on_throttle };

static void on_timer(void *ctx)
{
    struct km_execution *x = ctx;
    if (x->expired || x->asked) { /* stopped, and still no end */
        finish(x, x->expired ? X_IS_TIMEOUT : X_IS_ERROR);
        return;
    }
    x->expired = true;
    stop_code(x);
    if (x->status == X_IS_RUNNING)
        end_within(x, STOP_GRACE_MS);
}

static const char *json_bool(bool b)
{
    return b ? "true" : "false";
}

static int build_request(const struct km_execution *x, const struct km_execute_opts *o,
                         struct jp_msg **ret, struct err *e)
{
    char date[TIMEFMT_ISO_LEN + 1];
    struct buf header, content;
    size_t n = o->code_len ? o->code_len : o->code ? strlen(o->code) : 0;
    if (n > CODE_MAX)
        return err_set(e, -E2BIG, "the code is %zu bytes long, at most %zu are taken", n, CODE_MAX);
    buf_init(&header, 2048);
    buf_init(&content, 6 * n + 256);
    timefmt_iso(date, loop_wall_us(x->loop));
    int r =
        buf_printf(&header,
                   "{\"msg_id\": \"%s\", \"msg_type\": \"execute_request\", \"session\": \"%s\", "
                   "\"username\": \"cellvisor\", \"date\": \"%s\", \"version\": \"5.3\"}",
                   x->id, x->client.session, date);
    if (r == 0)
        r = buf_append_str(&content, "{\"code\": ");
    if (r == 0)
        r = buf_append_json_string(&content, slice_of(o->code, n));
    if (r == 0)
        r = buf_printf(&content,
                       ", \"silent\": %s, \"store_history\": %s, \"user_expressions\": {}, "
                       "\"allow_stdin\": false, "
                       "\"stop_on_error\": %s}",
                       json_bool(o->silent), json_bool(o->store_history && !o->silent),
                       json_bool(o->stop_on_error));
    if (r == 0) {
        struct jp_parts parts = { .channel = JP_SHELL,
                                  .header = buf_slice(&header),
                                  .content = buf_slice(&content) };
        r = jp_msg_new(&parts, ret, e);
    }
    buf_fini(&header);
    buf_fini(&content);
    return r;
}

int km_execute(struct km_kernel *k, const struct km_execute_opts *o,
               const struct km_execution_events *ev, void *ctx, struct km_execution **ret,
               struct err *e)
{
    CLEANUP(jp_msg_unrefp) struct jp_msg *m = NULL;
    char session[ID_UUID_LEN + 1];
    if (km_state(k) == KM_K_CLOSED || km_state(k) == KM_K_DEAD)
        return err_set(e, -ESRCH, "the kernel is dead%s%s", k->reason ? ": " : "",
                       k->reason ? k->reason : "");
    struct km_execution *x = xnew(struct km_execution);
    id_uuid4(x->id);
    id_uuid4(session);
    x->kernel = k;
    x->loop = k->m->loop;
    x->ev = *ev;
    x->ctx = ctx;
    x->timeout_ms = o->timeout_ms;
    x->submit_us = loop_now_us(x->loop);
    km_result_init(&x->result, o->output_max ? o->output_max : 64u << 20);
    list_push_back(&k->executions, &x->link);
    km_client_attach_internal(&x->client, k, session, &client_ops);
    int r = build_request(x, o, &m, e);
    if (r == 0 && (r = km_client_submit(&x->client, m)) < 0)
        err_set(e, r,
                r == -EAGAIN ? "the kernel has too many requests waiting"
                             : "the kernel takes no requests now");
    if (r < 0) {
        km_execution_free(x);
        return r;
    }
    if (o->timeout_ms)
        end_within(x, o->timeout_ms);
    *ret = x;
    return 0;
}

void km_execution_cancel(struct km_execution *x, bool interrupt)
{
    x->ev = (struct km_execution_events) { 0 };
    if (x->status != X_IS_RUNNING)
        return;
    if (interrupt)
        stop_code(x);
    finish(x, X_IS_ABORTED);
}

void km_execution_free(struct km_execution *x)
{
    if (!x)
        return;
    loop_timer_free(x->timer);
    km_client_detach(&x->client);
    loop_cancel_deferred(x->loop, x);
    list_remove(&x->link);
    km_result_fini(&x->result);
    free(x);
}

void km_executions_observe(struct km_kernel *k, const struct jp_msg *m)
{
    LIST_FOR_EACH (&k->executions, n) {
        struct km_execution *x = list_entry(n, struct km_execution, link);
        bool comes_by_log = x->status == X_IS_RUNNING && !strcmp(m->parent_id, x->id);
        if (!comes_by_log)
            km_result_update(&x->result, (struct jp_msg *)(uintptr_t)m);
    }
}

void km_executions_forget(struct km_kernel *k)
{
    struct list_node *n;
    while ((n = list_first(&k->executions))) {
        list_entry(n, struct km_execution, link)->kernel = NULL;
        list_remove(n);
    }
}

/* ---- views ---- */

const char *km_execution_id(const struct km_execution *x)
{
    return x->id;
}

const char *km_execution_status(const struct km_execution *x)
{
    return status_names[x->status];
}

/* An error that the kernel did not report itself. */
static int put_own_error(const char *ename, const char *evalue, struct buf *out)
{
    int r = buf_printf(out, "{\"ename\": \"%s\", \"evalue\": ", ename);
    if (r == 0)
        r = buf_append_json_string(out, slice_str(evalue));
    return r < 0 ? r : buf_append_str(out, ", \"traceback\": []}");
}

static int put_kernel_error(const struct km_execution *x, struct buf *out)
{
    static const char *const keys[] = { "ename", "evalue", "traceback" };
    int r = buf_append_byte(out, '{');
    for (size_t i = 0; i < 3 && r == 0; i++) {
        struct slice v = km_result_reply_value(&x->result, keys[i]);
        r = buf_printf(out, "%s\"%s\": ", i ? ", " : "", keys[i]);
        if (r == 0)
            r = v.n ? buf_append_slice(out, v) : buf_append_str(out, i == 2 ? "[]" : "\"\"");
    }
    return r < 0 ? r : buf_append_byte(out, '}');
}

/* Name and text of the error that we add to what the kernel said, or false. */
static bool own_error(const struct km_execution *x, const char **ret_name, char *ret_text,
                      size_t size)
{
    if (x->status == X_IS_TIMEOUT) {
        *ret_name = "Timeout";
        snprintf(ret_text, size, "the code was stopped after its time limit of %g s",
                 (double)x->timeout_ms / 1000);
    } else if (x->status == X_IS_ERROR && x->asked) {
        *ret_name = "StdinNotImplementedError";
        snprintf(ret_text, size,
                 "the code asked for input, which this way of running code cannot give");
    } else if (x->status == X_IS_DEAD && !x->result.reply) {
        *ret_name = "DeadKernelError";
        snprintf(ret_text, size, "%s", x->why);
    } else {
        return false;
    }
    return true;
}

static int put_error(const struct km_execution *x, struct buf *out)
{
    const char *name;
    char text[300];
    if (own_error(x, &name, text, sizeof(text)))
        return put_own_error(name, text, out);
    if (x->status == X_IS_ERROR || x->status == X_IS_DEAD)
        return put_kernel_error(x, out);
    return buf_append_str(out, "null");
}

static double span_ms(uint64_t from, uint64_t to)
{
    return from && to > from ? (double)(to - from) / 1000 : 0;
}

int km_execution_write_json(const struct km_execution *x, struct buf *out)
{
    uint64_t end = x->end_us ? x->end_us : loop_now_us(x->loop);
    struct slice count = km_result_reply_value(&x->result, "execution_count");
    struct slice payload = km_result_reply_value(&x->result, "payload");
    int r = buf_printf(out, "{\"id\": \"%s\", \"status\": \"%s\", \"execution_count\": ", x->id,
                       km_execution_status(x));
    if (r == 0)
        r = count.n ? buf_append_slice(out, count) : buf_append_str(out, "null");
    if (r == 0)
        r = buf_append_str(out, ", \"outputs\": ");
    if (r == 0)
        r = km_result_write_outputs(&x->result, out);
    if (r == 0)
        r = buf_append_str(out, ", \"error\": ");
    if (r == 0)
        r = put_error(x, out);
    if (r == 0)
        r = buf_append_str(out, ", \"payload\": ");
    if (r == 0)
        r = payload.n ? buf_append_slice(out, payload) : buf_append_str(out, "[]");
    if (r == 0)
        r = buf_printf(
            out, ", \"truncated_bytes\": %zu, \"timing\": {\"queued_ms\": %.3f, \"run_ms\": %.3f}}",
            x->result.truncated, span_ms(x->submit_us, x->begin_us ? x->begin_us : end),
            span_ms(x->begin_us, end));
    return r;
}

int km_execution_write_text(const struct km_execution *x, struct buf *out)
{
    const char *name;
    char text[300];
    int r = km_result_write_text(&x->result, out);
    if (r == 0 && x->result.truncated) {
        r = km_text_newline(out);
        if (r == 0)
            r = buf_printf(out, "[%zu bytes of output left out]\n", x->result.truncated);
    }
    if (r == 0 && own_error(x, &name, text, sizeof(text))) {
        r = km_text_newline(out);
        if (r == 0)
            r = buf_printf(out, "%s: %s\n", name, text);
    }
    return r;
}

void km_execution_each_mime(const struct km_execution *x, const char *prefix,
                            void (*fn)(void *ctx, struct slice mime, struct slice json_value),
                            void *ctx)
{
    km_result_each_mime(&x->result, prefix, fn, ctx);
}
