#pragma once
/* Shared by loop.c (the real loop, libuv) and loop_core.c (timers, deferred calls, watchdog and the
 * virtual loop); nobody else includes it. loop_core.c never blocks and knows no descriptor. */
#include "common/list.h"
#include "common/loop.h"

struct loop_uv; /* loop.c */

struct deferred {
    struct list_node link; /* loop::deferred, loop::running or, virtual only, loop::works */
    void (*fn)(void *ctx);
    void (*done)(void *ctx); /* works only */
    void *ctx;
};

struct loop {
    struct loop_uv *uv; /* NULL = virtual */
    uint64_t virtual_us;
    bool stopped;
    bool closing; /* loop_free has begun: only deferred calls and work go on */
    uint64_t slow_callbacks;

    /* Binary heap by (due, seq): equal times fire in the order in which they were started. */
    struct loop_timer **heap;
    size_t heap_n, heap_cap;
    uint64_t timer_seq;
    struct list timers; /* all of them, armed or not */

    struct list deferred;
    struct list running; /* the batch that loop_core_run_deferred works off */
    struct list works;   /* virtual only */
    struct list handles; /* handle_head::link: descriptors and signals */
};

/* First member of what hangs on loop::handles. */
struct handle_head {
    struct list_node link; /* loop::handles */
    void (*free)(struct handle_head *h);
};

void loop_core_init(struct loop *l);
void loop_core_fini(struct loop *l);
/* Fire what is due at `now`. Timers that callbacks arm meanwhile wait for the next call. */
void loop_core_run_timers(struct loop *l, uint64_t now_ms);
/* ms from now to the first timer, or UINT64_MAX. */
uint64_t loop_core_next_timer(const struct loop *l, uint64_t now_ms);
/* Run what is queued now; what it queues itself waits for the next call. False: queue was empty. */
bool loop_core_run_deferred(struct loop *l);
bool loop_core_has_deferred(const struct loop *l);
/* Deferred calls and work until none is left; time stands still. */
void loop_virtual_ready(struct loop *l);
void loop_virtual_step(struct loop *l);

/* Watchdog around every callback; `what` names its kind. Virtual loops measure nothing. */
uint64_t loop_watch_begin(const struct loop *l);
void loop_watch_end(struct loop *l, uint64_t begin, const char *what);
uint64_t loop_clock_us(void);
