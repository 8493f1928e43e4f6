/* See link.h. Reads are bounded per turn so that a talkative host cannot starve the kernels. */
#include "guest-kernel-shim/link.h"
#include "common/cleanup.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#define READ_CHUNK (64u << 10)
#define READ_TURNS 8

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct shim_link *l = ctx;

    l->ops->message(l->ctx, type, stream, payload);
}

static void on_writable(void *ctx, uint32_t stream)
{
    struct shim_link *l = ctx;

    l->ops->writable(l->ctx, stream);
}

static const struct gl_link_ops gl_ops = { .message = on_message, .writable = on_writable };

/* Forget the connection: half frames, queues, credit. */
static void link_down(struct shim_link *l, bool final)
{
    bool was = l->connected;

    gl_link_reset(l->gl);
    l->connected = l->open = false;
    l->blocked = false;
    if (final)
        shim_watch_stop(l->loop, &l->watch);
    if (was || final)
        l->ops->down(l->ctx, final);
}

static void take_bytes(struct shim_link *l, struct slice bytes)
{
    struct err e = { 0 };

    l->connected = true;
    if (gl_link_feed(l->gl, bytes, &e) == 0)
        return;
    /* A host that was replaced while we were not looking starts with HELLO in the midst of our
     * old state: start over with the same bytes, once. */
    link_down(l, false);
    l->connected = true;
    if (gl_link_feed(l->gl, bytes, NULL) == 0 && gl_link_phase(l->gl) != GL_PHASE_HELLO) {
        log_info(&l->log, "link: a new host took over");
        return;
    }
    log_warn(&l->log, "link: %s; waiting for the host to say hello again", e.msg);
    if (l->port)
        gl_link_reset(l->gl);
    else
        link_down(l, true);
}

/* A level poll of the port itself: is a host there at all? */
static bool host_gone(const struct shim_link *l)
{
    zmq_pollitem_t item = { .fd = l->fd, .events = ZMQ_POLLIN };

    return zmq_poll(&item, 1, 0) > 0 && (item.revents & ZMQ_POLLERR);
}

static void link_read(struct shim_link *l)
{
    uint8_t bytes[READ_CHUNK];

    for (int turn = 0; turn < READ_TURNS && l->fd >= 0; turn++) {
        ssize_t n = read(l->fd, bytes, sizeof(bytes));
        if (n > 0) {
            take_bytes(l, slice_of(bytes, (size_t)n));
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        l->readable = false;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n == 0 && l->port) {
            /* Bytes of a new host may overtake the event that says it is there (they take another
             * queue): until it was seen, "nobody there" is yesterday's news. */
            if (host_gone(l) && (l->open || !l->connected))
                link_down(l, false);
            return;
        }
        link_down(l, !l->port);
        return;
    }
}

static void on_epoll(void *ctx, short revents)
{
    struct shim_link *l = ctx;
    struct epoll_event ev;

    (void)revents;
    while (epoll_wait(l->epoll_fd, &ev, 1, 0) > 0) {
        if (ev.events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            l->readable = true;
        if (ev.events & EPOLLOUT)
            l->blocked = false;
    }
    if (l->port && !l->open && !host_gone(l))
        l->open = true;
    if (l->readable)
        link_read(l);
    /* Bytes left for the next turn: the edge is spent, so arm it anew (MOD re-reports). */
    if (l->readable && l->fd >= 0) {
        ev = (struct epoll_event) { .events = EPOLLIN | EPOLLOUT | EPOLLET };
        epoll_ctl(l->epoll_fd, EPOLL_CTL_MOD, l->fd, &ev);
    }
}

void shim_link_flush(struct shim_link *l)
{
    while (l->fd >= 0 && !l->blocked) {
        struct slice out = gl_link_output(l->gl);
        ssize_t n;

        if (out.n == 0)
            return;
        n = write(l->fd, out.p, out.n);
        if (n > 0) {
            gl_link_consumed(l->gl, (size_t)n);
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n == 0 || errno == EAGAIN) {
            l->blocked = true; /* the next EPOLLOUT edge clears it */
        } else {
            link_down(l, !l->port);
            return;
        }
    }
}

int shim_link_open(struct shim_link *l, struct shim_loop *loop, int fd, bool port,
                   const struct shim_link_ops *ops, void *ctx, struct err *e)
{
    const struct gl_limits limits = { .message_max = 256u << 20, .queue_max = SHIM_LINK_QUEUE };
    struct epoll_event ev = { .events = EPOLLIN | EPOLLOUT | EPOLLET };
    int flags = fcntl(fd, F_GETFL);

    *l = (struct shim_link) { .loop = loop, .ops = ops, .ctx = ctx, .fd = fd, .port = port };
    log_ctx_init(&l->log, NULL);
    l->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || l->epoll_fd < 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, fd, &ev) < 0) {
        int r = err_errno(e, errno, "guest link: descriptor %d", fd);
        closep(&l->epoll_fd);
        return r;
    }
    l->gl = gl_link_new(GL_GUEST, &limits, &gl_ops, l);
    shim_watch_start(loop, &l->watch, NULL, l->epoll_fd, ZMQ_POLLIN, on_epoll, l);
    return 0;
}

void shim_link_close(struct shim_link *l)
{
    if (!l->loop)
        return;
    shim_watch_stop(l->loop, &l->watch);
    gl_link_free(l->gl);
    l->gl = NULL;
    closep(&l->epoll_fd);
    closep(&l->fd);
    l->fd = l->epoll_fd = -1;
}

int shim_link_find_port(const char *sys_dir, const char *name, char *ret, size_t size)
{
    DIR *d = opendir(sys_dir);
    struct dirent *entry;
    int r = -ENOENT;

    if (!d)
        return -errno;
    while (r != 0 && (entry = readdir(d))) {
        char path[512], text[128] = "";
        FILE *f;

        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s/name", sys_dir, entry->d_name);
        f = fopen(path, "re");
        if (!f)
            continue;
        if (fgets(text, sizeof(text), f)) {
            text[strcspn(text, "\n")] = '\0';
            if (strcmp(text, name) == 0 &&
                snprintf(ret, size, "/dev/%s", entry->d_name) < (int)size)
                r = 0;
        }
        fclose(f);
    }
    closedir(d);
    return r;
}
