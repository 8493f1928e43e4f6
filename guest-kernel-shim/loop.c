/* See loop.h. The poll set is rebuilt for every wait: a shim has at most a few
 * hundred watches, and this way the callbacks may change any of them. */
#include "guest-kernel-shim/loop.h"
#include "common/mem.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <time.h>
#include <zmq.h>

#define WAIT_MAX_MS 60000u

static uint64_t clock_us(clockid_t id)
{
    struct timespec ts;

    clock_gettime(id, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

uint64_t shim_now_us(void)
{
    return clock_us(CLOCK_MONOTONIC);
}

uint64_t shim_now_ms(void)
{
    return clock_us(CLOCK_MONOTONIC) / 1000u;
}

uint64_t shim_wall_us(void)
{
    return clock_us(CLOCK_REALTIME);
}

void shim_loop_init(struct shim_loop *l)
{
    *l = (struct shim_loop) { 0 };
    list_init(&l->watches);
    list_init(&l->timers);
}

void shim_loop_fini(struct shim_loop *l)
{
    free(l->active);
    free(l->items);
    l->active = NULL;
    l->items = NULL;
}

void shim_loop_stop(struct shim_loop *l)
{
    l->stopped = true;
}

void shim_watch_start(struct shim_loop *l, struct shim_watch *w, void *socket, int fd, short events,
                      void (*fn)(void *ctx, short revents), void *ctx)
{
    size_t size = sizeof(w->fd);

    shim_watch_stop(l, w);
    w->socket = socket;
    w->fd = fd;
    if (socket && zmq_getsockopt(socket, ZMQ_FD, &w->fd, &size) < 0)
        w->fd = -1; /* poll ignores it: the socket's context has ended */
    w->check = true;
    w->events = events;
    w->fn = fn;
    w->ctx = ctx;
    list_push_back(&l->watches, &w->link);
}

void shim_watch_stop(struct shim_loop *l, struct shim_watch *w)
{
    list_remove(&w->link);
    for (size_t i = 0; i < l->n_active; i++)
        if (l->active[i] == w)
            l->active[i] = NULL;
}

void shim_timer_start(struct shim_loop *l, struct shim_timer *t, uint64_t after_ms,
                      void (*fn)(void *ctx), void *ctx)
{
    list_remove(&t->link);
    t->at_ms = shim_now_ms() + after_ms;
    t->fn = fn;
    t->ctx = ctx;
    list_push_back(&l->timers, &t->link);
}

void shim_timer_stop(struct shim_timer *t)
{
    list_remove(&t->link);
}

/* Fire what is due; one at a time, because a callback may change the list. */
static void fire_timers(struct shim_loop *l)
{
    uint64_t now = shim_now_ms();

    for (;;) {
        struct shim_timer *due = NULL;

        LIST_FOR_EACH (&l->timers, n) {
            struct shim_timer *t = list_entry(n, struct shim_timer, link);
            if (t->at_ms <= now && (!due || t->at_ms < due->at_ms))
                due = t;
        }
        if (!due)
            return;
        list_remove(&due->link);
        due->fn(due->ctx);
    }
}

static uint64_t next_wait(struct shim_loop *l, uint64_t max_wait_ms)
{
    uint64_t now = shim_now_ms(), wait = max_wait_ms;

    LIST_FOR_EACH (&l->timers, n) {
        struct shim_timer *t = list_entry(n, struct shim_timer, link);
        uint64_t left = t->at_ms > now ? t->at_ms - now : 0;
        if (left < wait)
            wait = left;
    }
    return wait;
}

/* What is ready on a ZMQ socket now; takes the sign off its descriptor. */
static short socket_events(struct shim_watch *w)
{
    int events = 0;
    size_t size = sizeof(events);

    w->check = false;
    if (zmq_getsockopt(w->socket, ZMQ_EVENTS, &events, &size) < 0)
        return 0;
    return (short)(events & w->events);
}

/* In terms of zmq_poll, which watches are written in. */
static short fd_events(short revents)
{
    return (short)((revents & POLLIN ? ZMQ_POLLIN : 0) | (revents & POLLOUT ? ZMQ_POLLOUT : 0) |
                   (revents & (POLLERR | POLLHUP | POLLNVAL) ? ZMQ_POLLERR : 0));
}

/* Fills the poll set. true: a socket is ready already, do not sleep. */
static bool build_set(struct shim_loop *l)
{
    size_t n = 0;
    bool ready = false;

    LIST_FOR_EACH (&l->watches, node)
        n++;
    if (n > l->cap) {
        l->cap = n * 2;
        l->active = xrealloc(l->active, l->cap * sizeof(*l->active));
        l->items = xrealloc(l->items, l->cap * sizeof(*l->items));
    }
    l->n_active = 0;
    LIST_FOR_EACH (&l->watches, node) {
        struct shim_watch *w = list_entry(node, struct shim_watch, link);
        struct pollfd *item = l->items + l->n_active;

        if (!w->events)
            continue;
        *item = (struct pollfd) { .fd = w->fd };
        item->events = (short)((w->socket || w->events & ZMQ_POLLIN ? POLLIN : 0) |
                               (!w->socket && w->events & ZMQ_POLLOUT ? POLLOUT : 0));
        if (w->socket && w->check && socket_events(w))
            ready = w->check = true; /* is looked at again when its turn comes */
        l->active[l->n_active++] = w;
    }
    return ready;
}

void shim_loop_step(struct shim_loop *l, uint64_t max_wait_ms)
{
    uint64_t wait;
    int rc;

    if (l->prepare)
        l->prepare(l->prepare_ctx);
    if (l->stopped)
        return;
    wait = build_set(l) ? 0 : next_wait(l, max_wait_ms);
    rc = poll(l->items, l->n_active, (int)(wait < WAIT_MAX_MS ? wait : WAIT_MAX_MS));
    for (size_t i = 0; rc >= 0 && i < l->n_active; i++) {
        struct shim_watch *w = l->active[i];
        short now = 0;

        if (w && w->socket && (w->check || l->items[i].revents))
            now = socket_events(w);
        else if (w && !w->socket)
            now = fd_events(l->items[i].revents);
        if (!now)
            continue;
        w->check = true; /* the callback may leave something */
        w->fn(w->ctx, now);
    }
    l->n_active = 0;
    fire_timers(l);
}

void shim_loop_run(struct shim_loop *l)
{
    while (!l->stopped)
        shim_loop_step(l, WAIT_MAX_MS);
}
