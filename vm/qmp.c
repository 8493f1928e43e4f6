/* QMP client. Input is collected in `in` until a newline, then dispatched line by line; output is a
 * FIFO of commands, each with the descriptor that travels with its first byte. Callbacks may free
 * the client: every entry point holds `busy` while it runs and the last one out releases the
 * memory. */
#include "vm/qmp.h"
#include "common/buf.h"
#include "common/json.h"
#include "common/list.h"
#include "common/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>

/* One command: first in `out` until written, and in `pending` until answered. */
struct command {
    struct list_node link; /* vm_qmp::pending */
    struct list_node out;  /* vm_qmp::out */
    uint64_t id;
    char *name;
    char *text;
    size_t len, sent;
    int fd; /* ours; -1 when none */
    uint64_t deadline;
    vm_qmp_reply_fn fn;
    void *ctx;
};

struct vm_qmp {
    struct loop *loop;
    struct loop_fd *watch;
    struct loop_timer *timer;
    int fd;
    const struct vm_qmp_events *ev;
    void *ctx;
    struct log_ctx log;
    struct buf in;
    struct list pending, out;
    size_t out_bytes;
    unsigned n_pending;
    uint64_t next_id;
    uint64_t greeting_deadline; /* 0 once ready */
    bool greeted, ready, closed, freed;
    unsigned busy;
};

static void command_free(struct command *c)
{
    list_remove(&c->link);
    list_remove(&c->out);
    if (c->fd >= 0)
        close(c->fd);
    free(c->name);
    free(c->text);
    free(c);
}

static void release(struct vm_qmp *q)
{
    if (--q->busy > 0 || !q->freed)
        return;
    buf_fini(&q->in);
    free(q);
}

static void stop_io(struct vm_qmp *q)
{
    loop_fd_free(q->watch);
    q->watch = NULL;
    loop_timer_free(q->timer);
    q->timer = NULL;
    if (q->fd >= 0)
        close(q->fd);
    q->fd = -1;
}

/* Answer everything that waits with e, then closed(). */
static void fail(struct vm_qmp *q, const struct err *e)
{
    struct list_node *n;

    if (q->closed)
        return;
    q->closed = true;
    q->busy++;
    stop_io(q);
    while (!q->freed && (n = list_first(&q->pending))) {
        struct command *c = list_entry(n, struct command, link);
        vm_qmp_reply_fn fn = c->fn;
        void *ctx = c->ctx;

        command_free(c);
        if (fn)
            fn(ctx, NULL, e);
    }
    if (!q->freed)
        q->ev->closed(q->ctx, e);
    release(q);
}

static void violation(struct vm_qmp *q, const char *what)
{
    struct err e;

    err_set(&e, -EPROTO, "QMP: %s", what);
    fail(q, &e);
}

/* The timer is armed for the oldest command: deadlines of later ones cannot be noticed before it is
 * answered, because QEMU answers in order. */
static void arm(struct vm_qmp *q)
{
    struct list_node *n = list_first(&q->pending);
    uint64_t now = loop_now_ms(q->loop), at;

    if (q->closed)
        return;
    at = n ? list_entry(n, struct command, link)->deadline : q->greeting_deadline;
    if (at)
        loop_timer_start(q->timer, at > now ? at - now : 0, 0);
    else
        loop_timer_stop(q->timer);
}

static void on_deadline(void *ctx)
{
    struct vm_qmp *q = ctx;
    struct list_node *n = list_first(&q->pending);
    struct err e;

    if (n)
        err_set(&e, -ETIMEDOUT, "QMP: no answer to '%s'",
                list_entry(n, struct command, link)->name);
    else
        err_set(&e, -ETIMEDOUT, "QMP: QEMU sent no greeting");
    fail(q, &e);
}

static ssize_t send_some(struct vm_qmp *q, struct command *c)
{
    struct iovec iov = { c->text + c->sent, c->len - c->sent };
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control = { 0 };

    if (c->fd >= 0 && c->sent == 0) {
        struct cmsghdr *h;

        msg.msg_control = control.space;
        msg.msg_controllen = sizeof(control.space);
        h = CMSG_FIRSTHDR(&msg);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(h), &c->fd, sizeof(int));
    }
    return sendmsg(q->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void flush(struct vm_qmp *q)
{
    struct list_node *n;

    while (!q->closed && q->fd >= 0 && (n = list_first(&q->out))) {
        struct command *c = list_entry(n, struct command, out);
        ssize_t w = send_some(q, c);

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (w < 0) {
            struct err e;

            err_errno(&e, errno, "QMP: cannot send '%s'", c->name);
            fail(q, &e);
            return;
        }
        c->sent += (size_t)w;
        q->out_bytes -= (size_t)w;
        if (c->sent == c->len)
            list_remove(&c->out);
    }
    if (q->watch)
        loop_fd_set(q->watch, LOOP_READ | (list_empty(&q->out) ? 0 : LOOP_WRITE));
}

static int enqueue(struct vm_qmp *q, const char *name, json_t *args, int pass_fd,
                   unsigned deadline_ms, vm_qmp_reply_fn fn, void *ctx)
{
    CLEANUP(freep) char *text = NULL;
    CLEANUP(closep) int fd = -1;
    struct command *c;
    json_t *msg;

    if (q->closed || q->freed) {
        json_decref(args);
        return -ENOTCONN;
    }
    msg = json_pack("{s:s, s:o*, s:I}", "execute", name, "arguments", args, "id",
                    (json_int_t)q->next_id);
    text = msg ? json_dumps(msg, JSON_COMPACT) : NULL;
    json_decref(msg);
    if (!text)
        return -ENOMEM;
    if (q->n_pending >= VM_QMP_PENDING_MAX || q->out_bytes + strlen(text) > VM_QMP_OUT_MAX)
        return -ENOBUFS;
    if (pass_fd >= 0 && (fd = fcntl(pass_fd, F_DUPFD_CLOEXEC, 3)) < 0)
        return -errno;
    c = xnew(struct command);
    c->id = q->next_id++;
    c->name = xstrdup(name);
    c->len = strlen(text);
    c->text = TAKE_PTR(text);
    c->fd = TAKE_FD(fd);
    c->fn = fn;
    c->ctx = ctx;
    c->deadline = loop_now_ms(q->loop) + deadline_ms;
    list_push_back(&q->pending, &c->link);
    list_push_back(&q->out, &c->out);
    q->n_pending++;
    q->out_bytes += c->len;
    q->busy++;
    arm(q);
    flush(q);
    release(q);
    return 0;
}

int vm_qmp_command(struct vm_qmp *q, const char *name, json_t *args, int pass_fd,
                   unsigned deadline_ms, vm_qmp_reply_fn fn, void *ctx)
{
    if (!q->ready) {
        json_decref(args);
        return -ENOTCONN;
    }
    return enqueue(q, name, args, pass_fd, deadline_ms, fn, ctx);
}

static void on_negotiated(void *ctx, json_t *result, const struct err *e)
{
    struct vm_qmp *q = ctx;

    (void)result;
    if (e)
        return; /* fail() is under way, or on_reply ends the conversation */
    q->ready = true;
    q->ev->ready(q->ctx);
}

static void on_greeting(struct vm_qmp *q, json_t *line)
{
    if (!json_is_object(json_object_get(line, "QMP"))) {
        violation(q, "the first line is no greeting");
        return;
    }
    q->greeted = true;
    enqueue(q, "qmp_capabilities", NULL, -1,
            (unsigned)(q->greeting_deadline - loop_now_ms(q->loop)), on_negotiated, q);
    q->greeting_deadline = 0;
}

static void on_reply(struct vm_qmp *q, json_t *line)
{
    json_t *id = json_object_get(line, "id"), *error = json_object_get(line, "error");
    json_t *result = json_object_get(line, "return");
    struct list_node *n = list_first(&q->pending);
    struct command *c = n ? list_entry(n, struct command, link) : NULL;
    const char *desc = json_string_value(json_object_get(error, "desc"));
    vm_qmp_reply_fn fn;
    struct err e;
    void *ctx;

    /* A command that is not written yet cannot have been answered. */
    if (!c || c->sent < (q->fd >= 0 ? c->len : 0) || !json_is_integer(id) ||
        (uint64_t)json_integer_value(id) != c->id) {
        violation(q, "a reply that answers no command");
        return;
    }
    if (!result == !error || (error && !desc)) {
        violation(q, "a reply with neither result nor error");
        return;
    }
    if (error)
        err_set(&e, -EREMOTEIO, "QEMU refused '%s': %s", c->name, desc);
    fn = c->fn;
    ctx = c->ctx;
    if (c->sent < c->len)
        q->out_bytes -= c->len - c->sent;
    q->n_pending--;
    command_free(c);
    arm(q);
    if (fn)
        fn(ctx, error ? NULL : result, error ? &e : NULL);
    if (error && !q->ready && !q->freed)
        violation(q, "capability negotiation was refused");
}

static void on_line(struct vm_qmp *q, struct slice text)
{
    struct err e;
    json_t *line = json_parse(text, &e), *event;

    if (!json_is_object(line)) {
        violation(q, "a line that is no JSON object");
    } else if (!q->greeted) {
        on_greeting(q, line);
    } else if ((event = json_object_get(line, "event"))) {
        if (!json_is_string(event))
            violation(q, "an event without a name");
        else if (q->ready)
            q->ev->event(q->ctx, json_string_value(event), json_object_get(line, "data"));
    } else {
        on_reply(q, line);
    }
    json_decref(line);
}

void vm_qmp_feed(struct vm_qmp *q, struct slice bytes)
{
    q->busy++;
    while (bytes.n > 0 && !q->closed && !q->freed) {
        const uint8_t *nl = memchr(bytes.p, '\n', bytes.n);
        size_t n = nl ? (size_t)(nl - bytes.p) + 1 : bytes.n;

        if (buf_append(&q->in, bytes.p, n) < 0) {
            violation(q, "a line is too long");
            break;
        }
        bytes = slice_of(bytes.p + n, bytes.n - n);
        if (nl) {
            /* The line's bytes must not move while it is handled: feed is never called from within.
             */
            struct slice line = buf_slice(&q->in);

            while (line.n && (line.p[line.n - 1] == '\n' || line.p[line.n - 1] == '\r'))
                line.n--;
            if (line.n)
                on_line(q, line);
            buf_clear(&q->in);
        }
    }
    release(q);
}

static void on_readable(struct vm_qmp *q)
{
    uint8_t chunk[16384];
    struct err e;
    ssize_t n = recv(q->fd, chunk, sizeof(chunk), MSG_DONTWAIT);

    if (n > 0) {
        vm_qmp_feed(q, slice_of(chunk, (size_t)n));
        return;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (n == 0)
        err_set(&e, -ECONNRESET, "QMP: QEMU closed the connection");
    else
        err_errno(&e, errno, "QMP: cannot read");
    fail(q, &e);
}

void vm_qmp_drain(struct vm_qmp *q)
{
    struct err e;

    q->busy++;
    /* The peer is gone, so this ends: at EOF, at an error, or when nothing more waits. */
    for (int i = 0; i < 64 && !q->closed && !q->freed && q->fd >= 0; i++)
        on_readable(q);
    if (!q->closed && !q->freed) {
        err_set(&e, -ECONNRESET, "QMP: QEMU has ended");
        fail(q, &e);
    }
    release(q);
}

static void on_io(void *ctx, int events)
{
    struct vm_qmp *q = ctx;

    q->busy++;
    if (events & (LOOP_READ | LOOP_HUP))
        on_readable(q);
    if (!q->closed && !q->freed && (events & LOOP_WRITE))
        flush(q);
    release(q);
}

struct vm_qmp *vm_qmp_new(struct loop *l, int fd, unsigned greeting_ms, const struct log_ctx *log,
                          const struct vm_qmp_events *ev, void *ctx)
{
    struct vm_qmp *q = xnew(struct vm_qmp);

    q->loop = l;
    q->fd = fd;
    q->ev = ev;
    q->ctx = ctx;
    q->next_id = 1;
    log_ctx_init(&q->log, log);
    buf_init(&q->in, VM_QMP_LINE_MAX);
    list_init(&q->pending);
    list_init(&q->out);
    q->greeting_deadline = loop_now_ms(l) + greeting_ms;
    q->timer = loop_timer_new(l, on_deadline, q);
    if (fd >= 0) {
        q->watch = loop_fd_new(l, fd, on_io, q);
        loop_fd_set(q->watch, LOOP_READ);
    }
    arm(q);
    return q;
}

void vm_qmp_free(struct vm_qmp *q)
{
    struct list_node *n;

    if (!q || q->freed)
        return;
    q->freed = true;
    q->busy++;
    stop_io(q);
    while ((n = list_first(&q->pending)))
        command_free(list_entry(n, struct command, link));
    release(q);
}
