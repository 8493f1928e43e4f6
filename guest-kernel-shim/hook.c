#include "guest-kernel-shim/hook.h"
#include "common/cleanup.h"
#include "common/json.h"
#include "common/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <zmq.h>

#define LINE_MAX_BYTES (1u << 20)

struct hook_call {
    struct list_node link; /* shim_hook::waiting */
    shim_hook_fn fn;
    void *ctx;
};

static void write_out(struct shim_hook *h)
{
    while (h->out.len) {
        struct slice s = buf_slice(&h->out);
        ssize_t n = send(h->fd, s.p, s.n, MSG_NOSIGNAL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break; /* full: the watch goes on; broken: the read side tells */
        buf_consume(&h->out, (size_t)n);
    }
    h->watch.events = (short)(ZMQ_POLLIN | (h->out.len ? ZMQ_POLLOUT : 0));
}

static void take_line(struct shim_hook *h, struct slice line)
{
    struct err e = { 0 };
    json_t *v = json_parse(line, &e);
    const char *error = NULL;
    struct list_node *first;

    if (!json_is_object(v)) {
        error = "the hook's answer is no JSON object";
    } else if (json_object_get(v, "hook")) {
        h->ready = true;
        h->capture = json_is_true(json_object_get(v, "capture"));
        error = json_string_value(json_object_get(v, "before"));
        h->hello(h->ctx, error ? error : "");
        json_decref(v);
        return;
    } else if (!json_is_true(json_object_get(v, "ok"))) {
        error = json_string_value(json_object_get(v, "error"));
        if (!error)
            error = "the hook failed without a reason";
    }
    first = list_first(&h->waiting);
    if (first) {
        struct hook_call *call = list_entry(first, struct hook_call, link);

        list_remove(first);
        call->fn(call->ctx, error);
        free(call);
    }
    json_decref(v);
}

static void on_hook(void *ctx, short revents)
{
    struct shim_hook *h = ctx;

    if (revents & ZMQ_POLLOUT)
        write_out(h);
    for (;;) {
        uint8_t *room = buf_reserve(&h->in, 4096);
        ssize_t n = room ? recv(h->fd, room, 4096, 0) : 0;
        struct slice s;
        const uint8_t *end;

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) { /* gone, or a line that never ends */
            shim_hook_close(h);
            return;
        }
        buf_commit(&h->in, (size_t)n);
        while (h->fd >= 0 && (s = buf_slice(&h->in)).n && (end = memchr(s.p, '\n', s.n))) {
            CLEANUP(freep) char *line = slice_dup(slice_of(s.p, (size_t)(end - s.p)));
            size_t len = (size_t)(end - s.p);

            buf_consume(&h->in, len + 1);
            take_line(h, slice_of(line, len));
        }
        if (h->fd < 0)
            return;
    }
}

int shim_hook_open(struct shim_hook *h, struct shim_loop *loop,
                   void (*hello)(void *ctx, const char *before), void *ctx, int *ret_child_fd,
                   struct err *e)
{
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        return err_errno(e, errno, "socketpair for the hook");
    fcntl(pair[0], F_SETFL, O_NONBLOCK);
    *h = (struct shim_hook) { .loop = loop, .fd = pair[0], .hello = hello, .ctx = ctx };
    list_init(&h->waiting);
    buf_init(&h->in, LINE_MAX_BYTES);
    buf_init(&h->out, LINE_MAX_BYTES);
    shim_watch_start(loop, &h->watch, NULL, h->fd, ZMQ_POLLIN, on_hook, h);
    *ret_child_fd = pair[1];
    return 0;
}

void shim_hook_close(struct shim_hook *h)
{
    struct list_node *n;

    if (!h->loop)
        return;
    shim_watch_stop(h->loop, &h->watch);
    closep(&h->fd);
    h->fd = -1;
    h->ready = h->capture = false;
    buf_fini(&h->in);
    buf_fini(&h->out);
    while ((n = list_first(&h->waiting))) {
        struct hook_call *call = list_entry(n, struct hook_call, link);

        list_remove(n);
        call->fn(call->ctx, "the kernel's hook has gone");
        free(call);
    }
}

bool shim_hook_ready(const struct shim_hook *h)
{
    return h->loop && h->fd >= 0 && h->ready;
}

void shim_hook_call(struct shim_hook *h, json_t *cmd, shim_hook_fn fn, void *ctx)
{
    CLEANUP(freep) char *text = json_dumps(cmd, JSON_COMPACT);
    struct hook_call *call;

    json_decref(cmd);
    if (!shim_hook_ready(h)) {
        fn(ctx, "the kernel has no hook");
        return;
    }
    if (!text || h->out.len + strlen(text) >= LINE_MAX_BYTES || buf_append_str(&h->out, text) < 0 ||
        buf_append_byte(&h->out, '\n') < 0) {
        fn(ctx, "the command for the kernel's hook is too large");
        return;
    }
    call = xnew(struct hook_call);
    call->fn = fn;
    call->ctx = ctx;
    list_push_back(&h->waiting, &call->link);
    write_out(h);
}
