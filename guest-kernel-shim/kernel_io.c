/* What flows through a kernel: host -> channels, channels and descriptors 1, 2 -> host, and the
 * shim's own requests (probe, silent execution). Lifecycle is in kernel.c.
 *
 * Everything for the host passes the outbox, a short FIFO (one batch): when the link has no room
 * the outbox keeps its items and nothing more is read from the kernel's sockets and pipes. */
#include "common/cleanup.h"
#include "common/mem.h"
#include "guest-kernel-shim/kernel.h"
#include "proto/jp_json.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#define BATCH 32 /* iopub messages between two looks at the pipes */
#define TURNS 8  /* batches before other kernels get their turn */
#define OUT_CHUNK (32u << 10)
#define OUT_BATCH (SHIM_PIPE_BYTES + OUT_CHUNK) /* all that precedes a message */
#define INFO_MAX (256u << 10)
#define ERROR_MAX (16u << 10)

struct in_item {
    struct list_node link; /* shim_kernel::inbox[channel] */
    struct jp_msg *msg;
    size_t credited;
};
struct out_item {
    struct list_node link; /* shim_kernel::outbox */
    struct jp_msg *msg;    /* or NULL: bytes of fd */
    int fd;
    size_t n;
    uint8_t bytes[];
};

/* ---- host -> kernel ---- */

static void in_item_end(struct shim_kernel *k, struct in_item *i)
{
    list_remove(&i->link);
    k->host->ops->consumed(k->host->ctx, k, i->credited);
    jp_msg_unref(i->msg);
    free(i);
}

void shim_kernel_drop_inbox(struct shim_kernel *k)
{
    for (int c = 0; c < JP_CHANNELS; c++) {
        struct list_node *n;
        while ((n = list_first(&k->inbox[c])))
            in_item_end(k, list_entry(n, struct in_item, link));
    }
}

static void flush_inbox(struct shim_kernel *k)
{
    if (k->sm.state != SHIM_KERNEL_RUNNING || k->held)
        return;
    for (int c = 0; c < JP_CHANNELS; c++) {
        struct list_node *n;
        while ((n = list_first(&k->inbox[c]))) {
            struct in_item *i = list_entry(n, struct in_item, link);
            if (shim_zmq_send(k->zmq, i->msg) == -EAGAIN)
                break; /* POLLOUT brings us back */
            in_item_end(k, i);
        }
    }
}

void shim_kernel_submit(struct shim_kernel *k, struct jp_msg *m, size_t credited)
{
    struct in_item *i = xnew(struct in_item);

    i->msg = m;
    i->credited = credited;
    list_push_back(&k->inbox[m->parts.channel], &i->link);
    if (m->parts.channel == JP_IOPUB) {
        log_warn(&k->log, "message on iopub from the host dropped");
        in_item_end(k, i);
        return;
    }
    flush_inbox(k);
}

/* ---- kernel -> host ---- */

static void queue_out(struct shim_kernel *k, struct out_item *o)
{
    list_push_back(&k->outbox, &o->link);
}

static void queue_msg(struct shim_kernel *k, struct jp_msg *m)
{
    struct out_item *o = xnew(struct out_item);

    o->msg = m;
    queue_out(k, o);
}

/* Deliver the outbox in order. true: it is empty. */
static bool flush_outbox(struct shim_kernel *k)
{
    const struct shim_kernel_ops *ops = k->host->ops;
    struct list_node *n;

    while ((n = list_first(&k->outbox))) {
        struct out_item *o = list_entry(n, struct out_item, link);
        int r = o->msg ? ops->message(k->host->ctx, k, o->msg)
                       : ops->output(k->host->ctx, k, o->fd, slice_of(o->bytes, o->n));

        if (r == -EAGAIN)
            return false;
        list_remove(&o->link);
        jp_msg_unref(o->msg);
        free(o);
    }
    return true;
}

static void keep_tail(struct shim_kernel *k, struct slice s)
{
    if (s.n > SHIM_TAIL_MAX)
        s = slice_of(s.p + s.n - SHIM_TAIL_MAX, SHIM_TAIL_MAX);
    if (k->tail.len + s.n > SHIM_TAIL_MAX)
        buf_consume(&k->tail, k->tail.len + s.n - SHIM_TAIL_MAX);
    buf_append_slice(&k->tail, s);
}

static void close_out(struct shim_kernel *k, int i)
{
    if (k->out_fd[i] < 0)
        return;
    shim_watch_stop(&k->host->loop, &k->out_watch[i]);
    closep(&k->out_fd[i]);
    k->out_fd[i] = -1;
}

/* Move what the pipe holds (at most OUT_BATCH) to the outbox. */
static void take_output(struct shim_kernel *k, int i)
{
    for (size_t total = 0; k->out_fd[i] >= 0 && total < OUT_BATCH;) {
        struct out_item *o = xmalloc(sizeof(*o) + OUT_CHUNK);
        ssize_t n = read(k->out_fd[i], o->bytes, OUT_CHUNK);

        if (n <= 0) {
            int code = errno;
            free(o);
            if (n < 0 && code == EINTR)
                continue;
            if (n == 0 || code != EAGAIN)
                close_out(k, i);
            return;
        }
        o->msg = NULL;
        o->fd = i + 1;
        o->n = (size_t)n;
        o->link = (struct list_node) { 0 };
        keep_tail(k, slice_of(o->bytes, o->n));
        if (k->sm.state == SHIM_KERNEL_STARTING)
            free(o); /* belongs to no cell; told in the tail if the start fails */
        else
            queue_out(k, o);
        total += OUT_CHUNK;
    }
}

/* The hook reads the pipes itself while it lives; afterwards the rest is ours (last words). */
static bool pipes_are_ours(const struct shim_kernel *k)
{
    return !(shim_hook_ready(&k->hook) && k->hook.capture && k->pid > 0);
}

static void take_outputs(struct shim_kernel *k)
{
    if (!pipes_are_ours(k))
        return;
    take_output(k, 0);
    take_output(k, 1);
}

/* ---- own requests ---- */

void shim_kernel_send_own(struct shim_kernel *k, enum jp_channel c, const char *type,
                          const char *content, char **ret_id)
{
    struct jp_msg *m = NULL;

    if (jp_msg_build(c, type, k->session, SLICE_NULL, slice_str(content), shim_wall_us(), &m) < 0) {
        log_error(&k->log, "cannot build a %s", type);
        return;
    }
    if (ret_id) {
        free(*ret_id);
        *ret_id = xstrdup(m->msg_id);
    }
    if (shim_zmq_send(k->zmq, m) < 0)
        log_warn(&k->log, "the kernel's %s queue is full: %s not sent", jp_channel_name(c), type);
    jp_msg_unref(m);
}

void shim_kernel_request_done(struct shim_kernel *k, const char *error)
{
    struct shim_request *r = &k->request;
    void (*fn)(void *ctx, const char *error) = r->fn;

    if (!r->msg_id)
        return;
    free(r->msg_id);
    r->msg_id = NULL;
    r->fn = NULL;
    if (fn)
        fn(r->ctx, error);
}

void shim_kernel_probe(struct shim_kernel *k)
{
    k->request.replied = k->request.idle = false;
    k->probe_counts = shim_zmq_connected(k->zmq);
    shim_kernel_send_own(k, JP_SHELL, "kernel_info_request", "{}", &k->request.msg_id);
}

void shim_kernel_execute(struct shim_kernel *k, const char *code, void (*fn)(void *, const char *),
                         void *ctx)
{
    struct shim_request *r = &k->request;
    struct buf content;

    if (k->sm.state != SHIM_KERNEL_RUNNING || r->msg_id) {
        fn(ctx, "the kernel is not running");
        return;
    }
    buf_init(&content, 32u << 20);
    buf_append_str(&content, "{\"code\":");
    buf_append_json_string(&content, slice_str(code));
    buf_append_str(&content, ",\"silent\":true,\"store_history\":false,\"user_expressions\":{},"
                             "\"allow_stdin\":false,\"stop_on_error\":false}");
    r->replied = r->idle = false;
    r->fn = fn;
    r->ctx = ctx;
    buf_fini(&r->error);
    buf_init(&r->error, ERROR_MAX);
    shim_kernel_send_own(k, JP_SHELL, "execute_request", buf_cstr(&content), &r->msg_id);
    buf_fini(&content);
}

static void request_progress(struct shim_kernel *k)
{
    struct shim_request *r = &k->request;

    if (!r->msg_id || !r->replied || !r->idle)
        return;
    if (k->sm.state == SHIM_KERNEL_STARTING) {
        if (!k->probe_counts) {
            if (shim_zmq_connected(k->zmq))
                shim_kernel_probe(k); /* else the timer does */
            return;
        }
        shim_kernel_request_done(k, NULL);
        shim_kernel_running(k);
        return;
    }
    shim_kernel_request_done(k, r->error.len ? buf_cstr(&r->error) : NULL);
}

/* Text of a failed execution: the traceback's lines, else "ename: evalue". */
static void keep_error(struct shim_request *r, struct slice content)
{
    CLEANUP(freep) char *text = slice_dup(content);
    json_t *v = json_loads(text, 0, NULL), *trace = json_object_get(v, "traceback"), *line;
    const char *name = json_string_value(json_object_get(v, "ename"));
    const char *value = json_string_value(json_object_get(v, "evalue"));
    size_t i;

    buf_clear(&r->error);
    json_array_foreach(trace, i, line)
    {
        buf_append_str(&r->error, json_string_value(line) ? json_string_value(line) : "");
        buf_append_byte(&r->error, '\n');
    }
    if (r->error.len == 0)
        buf_printf(&r->error, "%s: %s", name ? name : "error", value ? value : "");
    json_decref(v);
}

static bool content_is(const struct jp_msg *m, const char *key, const char *value)
{
    struct slice v;
    char text[32];

    return jp_json_find(m->parts.content, key, &v) == 0 &&
           jp_json_string(v, text, sizeof(text)) == 0 && strcmp(text, value) == 0;
}

/* A message that answers one of our own requests. */
static void take_own(struct shim_kernel *k, const struct jp_msg *m)
{
    struct shim_request *r = &k->request;
    char state[16] = "";

    if (k->interrupt_id && strcmp(m->msg_type, "interrupt_reply") == 0 &&
        strcmp(m->parent_id, k->interrupt_id) == 0) {
        shim_kernel_interrupted(k, NULL);
        return;
    }
    if (!r->msg_id || strcmp(m->parent_id, r->msg_id) != 0)
        return;
    if (m->parts.channel == JP_IOPUB) {
        jp_status_of(m, state);
        if (strcmp(state, "idle") == 0)
            r->idle = true;
        else if (strcmp(m->msg_type, "error") == 0)
            keep_error(r, m->parts.content);
    } else if (strcmp(m->msg_type, "kernel_info_reply") == 0) {
        r->replied = true;
        if (m->parts.content.n <= INFO_MAX) {
            free(k->info);
            k->info = slice_dup(m->parts.content);
        }
    } else if (strcmp(m->msg_type, "execute_reply") == 0) {
        r->replied = true;
        if (!content_is(m, "status", "ok") && r->error.len == 0)
            keep_error(r, m->parts.content);
    }
    request_progress(k);
}

static bool is_own(const struct shim_kernel *k, const struct jp_msg *m)
{
    if (m->parent_session[0] && strcmp(m->parent_session, k->session) == 0)
        return true;
    return k->request.msg_id && strcmp(m->parent_id, k->request.msg_id) == 0;
}

/* Takes the reference. */
static void take_msg(struct shim_kernel *k, struct jp_msg *m)
{
    char state[16] = "";

    if (is_own(k, m)) {
        take_own(k, m);
        jp_msg_unref(m);
        return;
    }
    if (m->parts.channel == JP_IOPUB && strcmp(m->msg_type, "status") == 0) {
        jp_status_of(m, state);
        k->busy = strcmp(state, "busy") == 0;
    }
    /* What a kernel says before it is ready, it says to nobody; "starting" is our own report. */
    if (k->sm.state == SHIM_KERNEL_STARTING || strcmp(state, "starting") == 0) {
        log_debug(&k->log, "%s while starting not forwarded", m->msg_type);
        jp_msg_unref(m);
        return;
    }
    queue_msg(k, m);
}

/* ---- pump ---- */

/* One batch in the order that kernel.h promises. false: nothing was there. k->zmq may be gone
 * afterwards only by way of callbacks that end the kernel; those run from the loop, not here. */
static bool take_batch(struct shim_kernel *k)
{
    struct jp_msg *batch[BATCH], *m;
    size_t n = 0;
    bool any = false;

    while (shim_zmq_recv(k->zmq, JP_CONTROL, &m) == 1) {
        take_msg(k, m);
        any = true;
    }
    while (n < BATCH && shim_zmq_recv(k->zmq, JP_IOPUB, &batch[n]) == 1)
        n++;
    take_outputs(k);
    for (size_t i = 0; i < n; i++)
        take_msg(k, batch[i]);
    if (n == BATCH)
        return true;
    /* iopub is empty now: what shell and stdin have may follow, one message at a time. */
    if (shim_zmq_recv(k->zmq, JP_STDIN, &m) == 1 || shim_zmq_recv(k->zmq, JP_SHELL, &m) == 1) {
        while (n < 2 * BATCH && shim_zmq_recv(k->zmq, JP_IOPUB, &batch[0]) == 1) {
            take_msg(k, batch[0]); /* came between the two looks */
            n++;
        }
        take_msg(k, m);
        return true;
    }
    return any || n > 0;
}

static void listen_to(struct shim_kernel *k, bool on)
{
    bool pipes = on && pipes_are_ours(k);

    if (k->zmq)
        shim_zmq_listen(k->zmq, on ? ~0u : 0);
    for (int i = 0; i < 2; i++)
        if (k->out_fd[i] >= 0)
            k->out_watch[i].events = pipes ? ZMQ_POLLIN : 0;
}

void shim_kernel_pump(struct shim_kernel *k)
{
    const struct shim_kernel_ops *ops = k->host->ops;
    bool room, more = true;

    if (!k->zmq)
        return;
    flush_inbox(k);
    for (int turn = 0; turn < TURNS; turn++) {
        room = flush_outbox(k) && ops->room(k->host->ctx, k);
        if (!room || !more)
            break;
        more = take_batch(k);
    }
    flush_inbox(k); /* it may run since a moment ago */
    room = flush_outbox(k) && ops->room(k->host->ctx, k);
    listen_to(k, room);
    if (k->sm.state == SHIM_KERNEL_DRAINING && room && !more && shim_kernel_drained(k))
        shim_kernel_finish(k);
}

bool shim_kernel_drained(const struct shim_kernel *k)
{
    bool ended = k->out_fd[0] < 0 && k->out_fd[1] < 0 && shim_zmq_disconnected(k->zmq);

    return list_empty(&k->outbox) && (ended || k->drain_forced);
}

/* ---- open and close ---- */

static void on_ready(void *ctx)
{
    shim_kernel_pump(ctx);
}

static void on_pipe(void *ctx, short revents)
{
    (void)revents;
    shim_kernel_pump(ctx);
}

static void on_hello(void *ctx, const char *before)
{
    struct shim_kernel *k = ctx;

    keep_tail(k, slice_str(before));
    log_debug(&k->log, "hook is ready%s", k->hook.capture ? ", captures output" : "");
    shim_kernel_pump(k);
}

/* Channels and hook for a new process; k->dir, key and session are set. The hook's other end and
 * the pipes' write ends are made by the caller of shim_spawn. */
int shim_kernel_open_io(struct shim_kernel *k, struct err *e)
{
    CLEANUP(freep) char *ip = xasprintf("%s/s", k->dir);
    struct shim_zmq_opts o = {
        .zmq_ctx = k->host->zmq_ctx,
        .loop = &k->host->loop,
        .log = &k->log,
        .ip = ip,
        .identity = k->session,
        /* With the hook a full pipe makes the kernel wait (XPUB_NODROP), so that the flood stays in
         * the kernel; without it a limit would mean silent loss. */
        .iopub_hwm = k->hooked ? 1000 : 0,
        .ready = on_ready,
        .ctx = k,
    };

    k->zmq = shim_zmq_open(&o, slice_str(k->key), e);
    if (!k->zmq)
        return e ? e->code : -EIO;
    for (int i = 0; i < 2; i++) {
        fcntl(k->out_fd[i], F_SETFL, O_NONBLOCK);
        shim_watch_start(&k->host->loop, &k->out_watch[i], NULL, k->out_fd[i], ZMQ_POLLIN, on_pipe,
                         k);
    }
    k->hook.hello = on_hello;
    k->hook.ctx = k;
    return 0;
}

void shim_kernel_close_io(struct shim_kernel *k)
{
    struct list_node *n;

    shim_zmq_close(k->zmq);
    k->zmq = NULL;
    shim_hook_close(&k->hook);
    close_out(k, 0);
    close_out(k, 1);
    while ((n = list_first(&k->outbox))) {
        struct out_item *o = list_entry(n, struct out_item, link);
        list_remove(n);
        jp_msg_unref(o->msg);
        free(o);
    }
}
