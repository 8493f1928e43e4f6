/* The parts of the loop that need no kernel: timer heap, deferred calls, watchdog, virtual loop.
 *
 * Invariants: a timer is in the heap iff armed (pos != NOT_ARMED) and heap[pos] == it. A timer is
 * re-armed or disarmed before its callback runs and not touched afterwards, so that the callback
 * may free it at once. */
#include "common/log.h"
#include "common/loop_priv.h"
#include "common/mem.h"
#include <assert.h>
#include <inttypes.h>
#include <time.h>

#define NOT_ARMED SIZE_MAX
#define SLOW_US 50000
/* A virtual loop whose callbacks never let time pass is a bug in the test; better a clear end. */
#define VIRTUAL_SPIN_MAX 1000000
#define VIRTUAL_EPOCH_US UINT64_C(1767225600000000) /* 2026-01-01T00:00:00Z */
#define VIRTUAL_START_US UINT64_C(1000000000)

struct loop_timer {
    struct loop *loop;
    struct list_node link; /* loop::timers */
    loop_timer_fn fn;
    void *ctx;
    uint64_t due_ms, seq, repeat_ms;
    size_t pos;
};

uint64_t loop_clock_us(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}

uint64_t loop_watch_begin(const struct loop *l)
{
    return l->uv ? loop_clock_us() : 0;
}

void loop_watch_end(struct loop *l, uint64_t begin, const char *what)
{
    if (!l->uv)
        return;
    uint64_t took = loop_clock_us() - begin;
    if (took <= SLOW_US)
        return;
    l->slow_callbacks++;
    log_debug(NULL, "slow loop callback (%s): %" PRIu64 " ms", what, took / 1000);
}

uint64_t loop_slow_callbacks(const struct loop *l)
{
    return l->slow_callbacks;
}

void loop_core_init(struct loop *l)
{
    list_init(&l->timers);
    list_init(&l->deferred);
    list_init(&l->running);
    list_init(&l->works);
    list_init(&l->handles);
}

static void drop_all(struct list *q)
{
    LIST_FOR_EACH_SAFE (q, n)
        free(list_entry(n, struct deferred, link));
    list_init(q);
}

void loop_core_fini(struct loop *l)
{
    LIST_FOR_EACH_SAFE (&l->timers, n)
        free(list_entry(n, struct loop_timer, link));
    drop_all(&l->deferred);
    drop_all(&l->running);
    drop_all(&l->works);
    free(l->heap);
}

/* ---- timers ---- */

static bool before(const struct loop_timer *a, const struct loop_timer *b)
{
    return a->due_ms != b->due_ms ? a->due_ms < b->due_ms : a->seq < b->seq;
}

static void place(struct loop *l, size_t pos, struct loop_timer *t)
{
    l->heap[pos] = t;
    t->pos = pos;
}

static void sift_up(struct loop *l, size_t pos, struct loop_timer *t)
{
    while (pos && before(t, l->heap[(pos - 1) / 2])) {
        place(l, pos, l->heap[(pos - 1) / 2]);
        pos = (pos - 1) / 2;
    }
    place(l, pos, t);
}

static void sift_down(struct loop *l, size_t pos, struct loop_timer *t)
{
    for (;;) {
        size_t child = 2 * pos + 1;
        if (child >= l->heap_n)
            break;
        if (child + 1 < l->heap_n && before(l->heap[child + 1], l->heap[child]))
            child++;
        if (!before(l->heap[child], t))
            break;
        place(l, pos, l->heap[child]);
        pos = child;
    }
    place(l, pos, t);
}

static void heap_push(struct loop *l, struct loop_timer *t)
{
    if (l->heap_n == l->heap_cap) {
        l->heap_cap = l->heap_cap ? 2 * l->heap_cap : 16;
        l->heap = xrealloc(l->heap, l->heap_cap * sizeof(struct loop_timer *));
    }
    sift_up(l, l->heap_n++, t);
}

static void heap_remove(struct loop *l, struct loop_timer *t)
{
    size_t pos = t->pos;
    struct loop_timer *last = l->heap[--l->heap_n];
    t->pos = NOT_ARMED;
    if (last == t)
        return;
    if (pos && before(last, l->heap[(pos - 1) / 2]))
        sift_up(l, pos, last);
    else
        sift_down(l, pos, last);
}

struct loop_timer *loop_timer_new(struct loop *l, loop_timer_fn fn, void *ctx)
{
    struct loop_timer *t = xnew(struct loop_timer);
    t->loop = l;
    t->fn = fn;
    t->ctx = ctx;
    t->pos = NOT_ARMED;
    list_push_back(&l->timers, &t->link);
    return t;
}

static void arm(struct loop_timer *t, uint64_t from_ms, uint64_t after_ms)
{
    t->due_ms = after_ms > UINT64_MAX - from_ms ? UINT64_MAX : from_ms + after_ms;
    t->seq = t->loop->timer_seq++;
    heap_push(t->loop, t);
}

void loop_timer_start(struct loop_timer *t, uint64_t after_ms, uint64_t repeat_ms)
{
    loop_timer_stop(t);
    t->repeat_ms = repeat_ms;
    /* From the time it really is, not from the iteration's: never early after a slow callback. */
    arm(t, loop_now_us(t->loop) / 1000, after_ms);
}

void loop_timer_stop(struct loop_timer *t)
{
    if (t->pos != NOT_ARMED)
        heap_remove(t->loop, t);
}

bool loop_timer_active(const struct loop_timer *t)
{
    return t->pos != NOT_ARMED;
}

void loop_timer_free(struct loop_timer *t)
{
    if (!t)
        return;
    loop_timer_stop(t);
    list_remove(&t->link);
    free(t);
}

void loop_core_run_timers(struct loop *l, uint64_t now_ms)
{
    uint64_t batch_end = l->timer_seq;
    while (l->heap_n) {
        struct loop_timer *t = l->heap[0];
        if (t->due_ms > now_ms || t->seq >= batch_end)
            return;
        heap_remove(l, t);
        /* Missed beats of a repeating timer are skipped, not made up for. */
        if (t->repeat_ms)
            arm(t, now_ms, t->repeat_ms);
        loop_timer_fn fn = t->fn;
        void *ctx = t->ctx;
        uint64_t begin = loop_watch_begin(l);
        fn(ctx);
        loop_watch_end(l, begin, "timer");
    }
}

uint64_t loop_core_next_timer(const struct loop *l, uint64_t now_ms)
{
    if (!l->heap_n)
        return UINT64_MAX;
    uint64_t due = l->heap[0]->due_ms;
    return due > now_ms ? due - now_ms : 0;
}

/* ---- deferred calls ---- */

void loop_defer(struct loop *l, void (*fn)(void *ctx), void *ctx)
{
    struct deferred *d = xnew(struct deferred);
    d->fn = fn;
    d->ctx = ctx;
    list_push_back(&l->deferred, &d->link);
}

static void cancel_in(struct list *q, const void *ctx)
{
    LIST_FOR_EACH_SAFE (q, n) {
        struct deferred *d = list_entry(n, struct deferred, link);
        if (d->ctx != ctx)
            continue;
        list_remove(n);
        free(d);
    }
}

void loop_cancel_deferred(struct loop *l, void *ctx)
{
    cancel_in(&l->deferred, ctx);
    cancel_in(&l->running, ctx);
}

bool loop_core_has_deferred(const struct loop *l)
{
    return !list_empty(&l->deferred) || !list_empty(&l->running);
}

bool loop_core_run_deferred(struct loop *l)
{
    /* In a nested step of a virtual loop, what is left of the outer batch is older and goes first.
     */
    struct list_node *n;
    while ((n = list_first(&l->deferred))) {
        list_remove(n);
        list_push_back(&l->running, n);
    }
    if (list_empty(&l->running))
        return false;
    while ((n = list_first(&l->running))) {
        struct deferred *d = list_entry(n, struct deferred, link);
        void (*fn)(void *) = d->fn;
        void *ctx = d->ctx;
        list_remove(n);
        free(d);
        uint64_t begin = loop_watch_begin(l);
        fn(ctx);
        loop_watch_end(l, begin, "deferred");
    }
    return true;
}

/* ---- the virtual loop ---- */

struct loop *loop_new_virtual(void)
{
    struct loop *l = xnew(struct loop);
    loop_core_init(l);
    l->virtual_us = VIRTUAL_START_US;
    return l;
}

static void check_spin(unsigned spins)
{
    if (spins < VIRTUAL_SPIN_MAX)
        return;
    log_error(NULL, "virtual loop: %u rounds of callbacks without time passing", spins);
    abort();
}

static bool run_one_work(struct loop *l)
{
    struct list_node *n = list_first(&l->works);
    if (!n)
        return false;
    struct deferred *w = list_entry(n, struct deferred, link);
    list_remove(n);
    struct deferred copy = *w;
    free(w);
    copy.fn(copy.ctx);
    if (copy.done)
        copy.done(copy.ctx);
    return true;
}

void loop_virtual_ready(struct loop *l)
{
    for (unsigned spins = 0; loop_core_run_deferred(l) || run_one_work(l);) {
        check_spin(++spins);
        if (l->stopped)
            return;
    }
}

void loop_virtual_step(struct loop *l)
{
    loop_virtual_ready(l);
    loop_core_run_timers(l, loop_now_ms(l));
    loop_virtual_ready(l);
}

void loop_virtual_advance(struct loop *l, uint64_t ms)
{
    assert(!l->uv);
    uint64_t target = l->virtual_us / 1000 + ms;
    unsigned spins = 0;
    loop_virtual_ready(l);
    while (loop_core_next_timer(l, 0) <= target) {
        uint64_t due = loop_core_next_timer(l, 0);
        if (due > loop_now_ms(l)) {
            l->virtual_us = due * 1000;
            spins = 0;
        }
        check_spin(++spins);
        loop_core_run_timers(l, loop_now_ms(l));
        loop_virtual_ready(l);
    }
    if (target > loop_now_ms(l))
        l->virtual_us = target * 1000;
}

uint64_t loop_wall_us(const struct loop *l)
{
    if (!l->uv)
        return VIRTUAL_EPOCH_US + l->virtual_us;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}
