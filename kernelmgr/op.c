/* Pending operations (start, restart, interrupt, session). A finished one waits on the manager's
 * done list and its function runs after the current callback: so a caller never gets its answer
 * inside its own call, and can cancel until the very moment of it. */
#include "kernelmgr/km_priv.h"
#include <errno.h>
#include <stdarg.h>
#include <string.h>

struct km_op *km_op_new(struct km_manager *m, struct km_kernel *k, enum km_op_kind kind,
                        km_done_fn fn, void *ctx)
{
    struct km_op *op = xnew(struct km_op);
    op->kind = kind;
    op->m = m;
    op->kernel = k;
    op->fn = fn;
    op->ctx = ctx;
    if (k)
        list_push_back(&k->ops, &op->link);
    return op;
}

static void op_free(struct km_op *op)
{
    list_remove(&op->link);
    free(op->msg_id);
    free(op);
}

static void deliver(void *ctx)
{
    struct km_manager *m = ctx;
    struct list_node *n;
    m->done_queued = false;
    while ((n = list_first(&m->done))) {
        struct km_op op = *list_entry(n, struct km_op, link);
        const struct err *e = op.result.code ? &op.result : NULL;
        op_free(list_entry(n, struct km_op, link));
        if (op.session_fn)
            op.session_fn(op.ctx, e ? NULL : op.session, e);
        else if (op.fn)
            op.fn(op.ctx, e ? NULL : op.kernel, e);
    }
}

/* An interrupt that a client asked for on the wire is answered there. */
static void answer_interrupt(struct km_op *op)
{
    struct km_kernel *k = op->kernel;
    struct km_req *q = km_router_find(&k->router, op->msg_id);
    if (!q)
        return;
    if (op->result.code) {
        km_synth_answer(k, q, "InterruptError", op->result.msg);
        return;
    }
    km_synth_status(k, "busy", q->header, 0);
    km_synth(k, q->channel, "interrupt_reply", q->header, "{\"status\": \"ok\"}", q->peer);
    km_synth_status(k, "idle", q->header, 0);
    km_router_remove(&k->router, q);
}

static void op_end(struct km_op *op)
{
    list_remove(&op->link);
    op->finished = true;
    if (op->msg_id && op->kernel)
        answer_interrupt(op);
    if (!op->fn && !op->session_fn) {
        op_free(op);
        return;
    }
    list_push_back(&op->m->done, &op->link);
    if (!op->m->done_queued) {
        op->m->done_queued = true;
        loop_defer(op->m->loop, deliver, op->m);
    }
}

void km_op_finish(struct km_op *op, int code, const char *fmt, ...)
{
    va_list ap;
    op->result.code = code;
    va_start(ap, fmt);
    vsnprintf(op->result.msg, sizeof(op->result.msg), fmt, ap);
    va_end(ap);
    op_end(op);
}

void km_ops_finish(struct km_kernel *k, enum km_op_kind kind, int code, const char *text)
{
    LIST_FOR_EACH_SAFE (&k->ops, n) {
        struct km_op *op = list_entry(n, struct km_op, link);
        if (op->kind == kind)
            km_op_finish(op, code, "%s", text);
    }
}

void km_ops_drop_kernel(struct km_kernel *k)
{
    struct list_node *n;
    while ((n = list_first(&k->ops))) {
        struct km_op *op = list_entry(n, struct km_op, link);
        op->kernel = NULL;
        km_op_finish(op, -ESRCH, "the kernel was shut down");
    }
    LIST_FOR_EACH (&k->m->done, d) {
        struct km_op *op = list_entry(d, struct km_op, link);
        if (op->kernel != k)
            continue;
        op->kernel = NULL;
        if (!op->result.code)
            err_set(&op->result, -ESRCH, "the kernel was shut down");
    }
}

void km_ops_free_done(struct km_manager *m)
{
    LIST_FOR_EACH_SAFE (&m->done, n)
        op_free(list_entry(n, struct km_op, link));
}

void km_op_cancel(struct km_op *op)
{
    if (!op)
        return;
    struct km_kernel *k = op->kernel;
    if (op->kind == KM_OP_SESSION) {
        km_session_op_cancel(op);
        op_free(op);
        return;
    }
    bool undo = op->kind == KM_OP_START && k;
    if (op->msg_id && !op->finished) { /* a client waits on the wire as well */
        op->fn = NULL;
        return;
    }
    op_free(op);
    if (undo)
        km_kernel_close(k, KM_CLOSE_DELETED, "its start was cancelled");
}
