#pragma once
/* The descriptor under the guest link: a virtio-serial port (VM) or a socketpair end (local).
 *
 * A virtio port stays open while hosts come and go: with no host connected poll() says POLLHUP for
 * ever and read() returns 0. So the descriptor sits in an edge-triggered epoll set of its own, and
 * the loop waits on that set: a change of the port wakes it once. Whenever the host goes away the
 * frame state is reset and we are mute until the next host says HELLO. A socketpair that ends has
 * ended for good. */
#include "common/log.h"
#include "guest-kernel-shim/loop.h"
#include "proto/gl.h"

/* Bytes waiting per stream before gl_link_send refuses; at half of it `writable` comes. Small: what
 * waits here delays replies on the control channel, and is lost when the host goes away. */
#define SHIM_LINK_QUEUE (1u << 20)

struct shim_link_ops {
    void (*message)(void *ctx, enum gl_type type, uint32_t stream, struct slice payload);
    void (*writable)(void *ctx, uint32_t stream);
    /* The host went away. final: the link will not come back (socketpair). */
    void (*down)(void *ctx, bool final);
};

struct shim_link {
    struct shim_loop *loop;
    struct gl_link *gl;
    const struct shim_link_ops *ops;
    void *ctx;
    struct log_ctx log;
    int fd, epoll_fd;
    bool port;      /* virtio-serial: comes back */
    bool connected; /* bytes have come since the last reset */
    bool open;      /* port: a host was seen to be there since the last reset */
    bool readable;  /* not yet read to EAGAIN */
    bool blocked;   /* a write said EAGAIN; the next edge tries again */
    struct shim_watch watch;
};

/* Takes fd, makes it non-blocking. */
int shim_link_open(struct shim_link *l, struct shim_loop *loop, int fd, bool port,
                   const struct shim_link_ops *ops, void *ctx, struct err *e);
void shim_link_close(struct shim_link *l);
/* Write what gl_link has queued until it or the descriptor is exhausted. */
void shim_link_flush(struct shim_link *l);
/* Device node of the virtio port with this name ("org.cellvisor.link"): path into ret.
 * sys_dir is "/sys/class/virtio-ports". -ENOENT. */
int shim_link_find_port(const char *sys_dir, const char *name, char *ret, size_t size);
