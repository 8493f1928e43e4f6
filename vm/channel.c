/* The pump between a stream descriptor and a gl_link. Reads and writes are bounded per turn of the
 * loop, so that a flooding guest cannot starve the others; what a guest may have in flight is
 * bounded by gl_link's credits. */
#include "vm/channel.h"
#include "common/mem.h"
#include "vm/usock.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define MESSAGE_MAX                                                                                \
    (256u << 20)              /* of one kernel message, reassembled: far above any output cap      \
                               */
#define QUEUE_MAX (16u << 20) /* waiting towards the guest, per stream */
/* A guest that was saved without a host may see our first bytes before it sees that its port is
 * open, and forget them with the state of the link; HELLO is said again until it is answered. */
#define HELLO_AGAIN_MS 300u
#define TURN_BYTES (256u << 10) /* moved per direction and turn of the loop */

struct vm_channel {
    struct loop *loop;
    struct loop_fd *watch;
    struct loop_timer *hello_timer;
    struct gl_link *link;
    struct log_ctx log;
    const struct vm_channel_events *ev;
    void *ctx;
    int fd;
    unsigned hellos; /* sent */
    bool dead, freed;
    unsigned busy;
};

static void release(struct vm_channel *c)
{
    if (--c->busy > 0 || !c->freed)
        return;
    gl_link_free(c->link);
    free(c);
}

static void stop_io(struct vm_channel *c)
{
    loop_fd_free(c->watch);
    c->watch = NULL;
    loop_timer_free(c->hello_timer);
    c->hello_timer = NULL;
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
}

static void die(struct vm_channel *c, int code, const char *why)
{
    if (c->dead || c->freed)
        return;
    c->dead = true;
    stop_io(c);
    c->ev->closed(c->ctx, code, why);
}

static void die_errno(struct vm_channel *c, int errnum, const char *what)
{
    struct err e;

    err_errno(&e, errnum, "guest link: %s", what);
    die(c, -errnum, e.msg);
}

static void flush(struct vm_channel *c)
{
    size_t moved = 0;
    struct slice s;

    while (!c->dead && !c->freed && moved < TURN_BYTES && (s = gl_link_output(c->link)).n > 0) {
        ssize_t w = send(c->fd, s.p, s.n, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (w < 0) {
            die_errno(c, errno, "cannot write");
            return;
        }
        moved += (size_t)w;
        gl_link_consumed(c->link, (size_t)w);
    }
    if (c->watch)
        loop_fd_set(c->watch, LOOP_READ | (gl_link_output(c->link).n > 0 ? LOOP_WRITE : 0));
}

static void drain(struct vm_channel *c)
{
    uint8_t chunk[64u << 10];
    size_t moved = 0;

    while (!c->dead && !c->freed && moved < TURN_BYTES) {
        ssize_t n = recv(c->fd, chunk, sizeof(chunk), MSG_DONTWAIT);
        struct err e;
        int r;

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) {
            die_errno(c, errno, "cannot read");
            return;
        }
        if (n == 0) {
            die(c, -ECONNRESET, "guest link: closed by the other end");
            return;
        }
        moved += (size_t)n;
        r = gl_link_feed(c->link, slice_of(chunk, (size_t)n), &e);
        if (r < 0) {
            die(c, -EPROTO, e.msg);
            return;
        }
        if ((size_t)n < sizeof(chunk))
            return; /* drained: save the read that would say EAGAIN */
    }
}

static void on_io(void *ctx, int events)
{
    struct vm_channel *c = ctx;

    c->busy++;
    if (events & (LOOP_READ | LOOP_HUP))
        drain(c);
    if (!c->dead && !c->freed)
        flush(c);
    release(c);
}

static void on_flush_soon(void *ctx)
{
    struct vm_channel *c = ctx;

    c->busy++;
    if (!c->dead && !c->freed)
        flush(c);
    release(c);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct vm_channel *c = ctx;

    if (!c->dead && !c->freed)
        c->ev->message(c->ctx, type, stream, payload);
}

/* gl_link says so once per change from nothing to something, possibly in the middle of a burst of
 * sends: write after the caller is through, so that small messages share a system call. */
static void on_output(void *ctx)
{
    struct vm_channel *c = ctx;

    if (!c->dead && !c->freed && !c->busy)
        loop_defer(c->loop, on_flush_soon, c);
}

static void on_writable(void *ctx, uint32_t stream)
{
    struct vm_channel *c = ctx;

    if (!c->dead && !c->freed && c->ev->writable)
        c->ev->writable(c->ctx, stream);
}

static const struct gl_link_ops link_ops = { on_message, on_output, on_writable };

static void say_hello(void *ctx)
{
    static const char hello[] =
        "{\"version\":1,\"role\":\"host\",\"host\":\"" CELLVISOR_VERSION "\"}";
    struct vm_channel *c = ctx;
    struct slice part = SLICE_LIT(hello);

    if (c->hellos && gl_link_phase(c->link) != GL_PHASE_HELLO) {
        loop_timer_stop(c->hello_timer);
        return;
    }
    c->hellos++;
    gl_link_send(c->link, GL_HELLO, 0, &part, 1);
}

struct vm_channel *vm_channel_new(struct loop *l, int fd, const struct log_ctx *log,
                                  const struct vm_channel_events *ev, void *ctx)
{
    static const struct gl_limits limits = { .message_max = MESSAGE_MAX, .queue_max = QUEUE_MAX };
    struct vm_channel *c = xnew(struct vm_channel);

    c->loop = l;
    c->fd = fd;
    c->ev = ev;
    c->ctx = ctx;
    log_ctx_init(&c->log, log);
    c->link = gl_link_new(GL_HOST, &limits, &link_ops, c);
    c->watch = loop_fd_new(l, fd, on_io, c);
    loop_fd_set(c->watch, LOOP_READ);
    c->hello_timer = loop_timer_new(l, say_hello, c);
    loop_timer_start(c->hello_timer, HELLO_AGAIN_MS, HELLO_AGAIN_MS);
    say_hello(c);
    return c;
}

unsigned vm_channel_hellos(const struct vm_channel *c)
{
    return c->hellos;
}

struct gl_link *vm_channel_link(struct vm_channel *c)
{
    return c->link;
}

void vm_channel_free(struct vm_channel *c)
{
    if (!c || c->freed)
        return;
    c->freed = true;
    c->busy++;
    loop_cancel_deferred(c->loop, c);
    stop_io(c);
    release(c);
}

int vm_channel_connect(const char *path)
{
    return vm_usock_connect(path);
}
