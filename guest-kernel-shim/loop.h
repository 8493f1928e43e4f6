#pragma once
/* The shim's event loop: one thread, one poll over ZMQ sockets and plain descriptors, plus timers.
 * Watches and timers are embedded in the object that owns the descriptor; the loop only links them.
 * A callback may stop or free any watch or timer, its own included.
 *
 * ZMQ sockets are polled by their ZMQ_FD, which tells of changes only (zmq_getsockopt(3)): whoever
 * sends or receives on a watched socket sets `check`, unless a receive has just said EAGAIN, and
 * the loop asks for ZMQ_EVENTS before it sleeps. zmq_poll would do that for every socket, twice for
 * each wait: four fifths of all the shim's system calls. */
#include "common/list.h"
#include <stdbool.h>
#include <stdint.h>

struct shim_watch {
    void *socket; /* ZMQ socket, or NULL: fd counts */
    int fd;
    short events; /* ZMQ_POLLIN | ZMQ_POLLOUT; 0 = registered but silent */
    bool check;   /* socket: its state may have changed without a sign on the descriptor */
    void (*fn)(void *ctx, short revents);
    void *ctx;
    struct list_node link; /* shim_loop::watches */
};
struct shim_timer {
    uint64_t at_ms;
    void (*fn)(void *ctx);
    void *ctx;
    struct list_node link; /* shim_loop::timers; not linked = not armed */
};
struct pollfd;
struct shim_loop {
    struct list watches, timers;
    struct shim_watch **active; /* of the iteration that is being dispatched */
    struct pollfd *items;       /* as long as active */
    size_t n_active, cap;
    bool stopped;
    /* Called before every wait: flush what the callbacks queued. */
    void (*prepare)(void *ctx);
    void *prepare_ctx;
};

void shim_loop_init(struct shim_loop *l);
void shim_loop_fini(struct shim_loop *l);
void shim_loop_run(struct shim_loop *l); /* until shim_loop_stop */
void shim_loop_step(struct shim_loop *l, uint64_t max_wait_ms);
void shim_loop_stop(struct shim_loop *l);

/* Exactly one of socket and fd (>= 0). */
void shim_watch_start(struct shim_loop *l, struct shim_watch *w, void *socket, int fd, short events,
                      void (*fn)(void *ctx, short revents), void *ctx);
void shim_watch_stop(struct shim_loop *l, struct shim_watch *w); /* idempotent */

void shim_timer_start(struct shim_loop *l, struct shim_timer *t, uint64_t after_ms,
                      void (*fn)(void *ctx), void *ctx); /* re-arms */
void shim_timer_stop(struct shim_timer *t);              /* idempotent */

uint64_t shim_now_ms(void); /* monotonic */
uint64_t shim_now_us(void);
uint64_t shim_wall_us(void);
