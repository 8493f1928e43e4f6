/* The real loop, on libuv; the only file that includes uv.h.
 *
 * One uv timer serves the whole timer heap (loop_core.c). One turn of uv_run is: uv timers,
 * prepare, poll (descriptors, signals, finished work), check, closes. Deferred calls run in
 * prepare, check and after timers; whenever some are left, an idle handle keeps the poll from
 * sleeping.
 *
 * Every uv handle lives in its own heap object and is freed in its close callback. A `dead` object
 * has been freed by its owner and only waits for that: no callback of ours is made for it. */
#include "common/log.h"
#include "common/loop_priv.h"
#include "common/mem.h"
#include <assert.h>
#include <uv.h>

struct loop_uv {
    uv_loop_t loop;
    uv_timer_t timer;
    uv_timer_t step; /* bounds the wait of loop_step */
    uv_prepare_t prepare;
    uv_check_t check;
    uv_idle_t idle;
    bool running;      /* uv_run is not re-entrant */
    bool stepping;     /* in loop_step: a turn that did something must not wait */
    uint64_t armed_ms; /* when `timer` fires, UINT64_MAX = stopped */
    size_t works;
};

struct loop_fd {
    struct handle_head head;
    struct loop *loop;
    uv_poll_t poll;
    loop_fd_fn fn;
    void *ctx;
    int events;
    bool dead;
};

struct loop_signal {
    struct handle_head head;
    struct loop *loop;
    uv_signal_t sig;
    void (*fn)(void *ctx, int signum);
    void *ctx;
    bool dead;
};

struct work {
    uv_work_t req;
    struct loop *loop;
    void (*work)(void *ctx);
    void (*done)(void *ctx);
    void *ctx;
};

/* ---- one turn ---- */

static void on_timer(uv_timer_t *h)
{
    struct loop *l = h->data;
    l->uv->armed_ms = UINT64_MAX;
    if (l->closing)
        return;
    loop_core_run_timers(l, uv_now(&l->uv->loop));
}

static void on_step(uv_timer_t *h)
{
    (void)h; /* its firing is what ends the wait */
}

static void on_idle(uv_idle_t *h)
{
    (void)h; /* an active idle handle makes the poll return at once */
}

static void arm_timer(struct loop *l)
{
    struct loop_uv *u = l->uv;
    uint64_t now = uv_now(&u->loop);
    uint64_t wait = loop_core_next_timer(l, now);
    uint64_t due = wait == UINT64_MAX ? UINT64_MAX : now + wait;
    if (due == u->armed_ms)
        return;
    u->armed_ms = due;
    if (due == UINT64_MAX)
        uv_timer_stop(&u->timer);
    else
        uv_timer_start(&u->timer, on_timer, wait, 0);
}

/* Last stop before the poll may sleep. */
static void on_prepare(uv_prepare_t *h)
{
    struct loop *l = h->data;
    bool ran = loop_core_run_deferred(l);
    if (loop_core_has_deferred(l) || (ran && l->uv->stepping))
        uv_idle_start(&l->uv->idle, on_idle);
    else
        uv_idle_stop(&l->uv->idle);
    arm_timer(l);
}

static void on_check(uv_check_t *h)
{
    loop_core_run_deferred(h->data);
}

/* ---- life ---- */

struct loop *loop_new(void)
{
    struct loop *l = xnew(struct loop);
    loop_core_init(l);
    struct loop_uv *u = l->uv = xnew(struct loop_uv);
    u->armed_ms = UINT64_MAX;
    if (uv_loop_init(&u->loop) < 0) {
        log_error(NULL, "cannot create an event loop (out of descriptors?)");
        free(u);
        free(l);
        return NULL;
    }
    uv_timer_init(&u->loop, &u->timer);
    uv_timer_init(&u->loop, &u->step);
    uv_prepare_init(&u->loop, &u->prepare);
    uv_check_init(&u->loop, &u->check);
    uv_idle_init(&u->loop, &u->idle);
    u->timer.data = u->step.data = u->prepare.data = u->check.data = u->idle.data = l;
    /* prepare stays referenced: uv_run must not return for want of handles. */
    uv_prepare_start(&u->prepare, on_prepare);
    uv_check_start(&u->check, on_check);
    return l;
}

static void close_uv(struct loop *l)
{
    struct loop_uv *u = l->uv;
    uv_close((uv_handle_t *)&u->timer, NULL);
    uv_close((uv_handle_t *)&u->step, NULL);
    uv_close((uv_handle_t *)&u->prepare, NULL);
    uv_close((uv_handle_t *)&u->check, NULL);
    uv_close((uv_handle_t *)&u->idle, NULL);
    uv_run(&u->loop, UV_RUN_NOWAIT);
    /* Freed descriptors and signals close in a turn or two. */
    for (int turn = 0; uv_loop_close(&u->loop) == UV_EBUSY && turn < 100; turn++)
        uv_run(&u->loop, UV_RUN_NOWAIT);
    free(u);
}

void loop_free(struct loop *l)
{
    if (!l)
        return;
    assert(!l->uv || !l->uv->running);
    l->closing = true; /* no more timers, descriptors, signals */
    l->stopped = false;
    /* Deferred calls and finished work may own memory and queue more; let them come to an end. A
     * thread's work cannot be taken back, so it is waited for. */
    do {
        while (loop_core_run_deferred(l))
            continue;
        if (!l->uv)
            loop_virtual_ready(l);
        else if (l->uv->works)
            uv_run(&l->uv->loop, UV_RUN_ONCE);
    } while (loop_core_has_deferred(l) || (l->uv && l->uv->works) || !list_empty(&l->works));
    struct list_node *n;
    while ((n = list_first(&l->handles))) {
        struct handle_head *h = list_entry(n, struct handle_head, link);
        h->free(h);
    }
    if (l->uv)
        close_uv(l);
    loop_core_fini(l);
    free(l);
}

static void run_uv(struct loop *l, uv_run_mode mode)
{
    assert(!l->uv->running);
    l->uv->running = true;
    uv_run(&l->uv->loop, mode);
    l->uv->running = false;
}

void loop_run(struct loop *l)
{
    if (!l->uv) {
        while (!l->stopped && (loop_core_has_deferred(l) || !list_empty(&l->works)))
            loop_virtual_step(l);
        l->stopped = false;
        return;
    }
    while (!l->stopped)
        run_uv(l, UV_RUN_DEFAULT);
    l->stopped = false;
}

void loop_stop(struct loop *l)
{
    l->stopped = true;
    if (l->uv)
        uv_stop(&l->uv->loop);
}

void loop_step(struct loop *l, uint64_t max_wait_ms)
{
    if (!l->uv) {
        loop_virtual_step(l);
        return;
    }
    uv_run_mode mode = UV_RUN_NOWAIT;
    if (max_wait_ms) {
        mode = UV_RUN_ONCE;
        uv_update_time(&l->uv->loop);
        /* Repeating: when it is due already before the turn polls, the next firing ends the wait.
         */
        uv_timer_start(&l->uv->step, on_step, max_wait_ms, max_wait_ms);
    }
    l->uv->stepping = true;
    run_uv(l, mode);
    l->uv->stepping = false;
    uv_timer_stop(&l->uv->step);
    loop_core_run_deferred(l);
}

uint64_t loop_now_ms(const struct loop *l)
{
    return l->uv ? uv_now(&l->uv->loop) : l->virtual_us / 1000;
}

uint64_t loop_now_us(const struct loop *l)
{
    return l->uv ? loop_clock_us() : l->virtual_us;
}

/* ---- descriptors ---- */

static void fd_start(struct loop_fd *h);

static int from_uv(int uv_events)
{
    return (uv_events & UV_READABLE ? LOOP_READ : 0) | (uv_events & UV_WRITABLE ? LOOP_WRITE : 0) |
           (uv_events & UV_DISCONNECT ? LOOP_HUP : 0);
}

static void on_poll(uv_poll_t *p, int status, int uv_events)
{
    struct loop_fd *h = p->data;
    if (h->dead || h->loop->closing)
        return;
    /* On EPOLLERR libuv stops the handle. The owner learns the reason from its read or write, so it
     * gets all it asked for, and polling goes on as long as it does not change its mind. */
    int events = status < 0 ? h->events | LOOP_HUP : from_uv(uv_events) & h->events;
    if (status < 0)
        fd_start(h);
    if (!events)
        return;
    struct loop *l = h->loop;
    uint64_t begin = loop_watch_begin(l);
    h->fn(h->ctx, events);
    loop_watch_end(l, begin, "descriptor");
}

static void fd_start(struct loop_fd *h)
{
    int want = (h->events & LOOP_READ ? UV_READABLE : 0) |
               (h->events & LOOP_WRITE ? UV_WRITABLE : 0) |
               (h->events & LOOP_HUP ? UV_DISCONNECT : 0);
    if (want)
        uv_poll_start(&h->poll, want, on_poll);
    else
        uv_poll_stop(&h->poll);
}

static void on_fd_closed(uv_handle_t *h)
{
    free(h->data);
}

static void fd_free(struct handle_head *head)
{
    struct loop_fd *h = container_of(head, struct loop_fd, head);
    assert(!h->dead);
    h->dead = true;
    list_remove(&head->link);
    if (h->loop->uv)
        uv_close((uv_handle_t *)&h->poll, on_fd_closed);
    else
        free(h);
}

struct loop_fd *loop_fd_new(struct loop *l, int fd, loop_fd_fn fn, void *ctx)
{
    struct loop_fd *h = xnew(struct loop_fd);
    h->head.free = fd_free;
    h->loop = l;
    h->fn = fn;
    h->ctx = ctx;
    int r = l->uv ? uv_poll_init(&l->uv->loop, &h->poll, fd) : 0;
    if (r < 0) {
        log_debug(NULL, "cannot watch descriptor %d: %s", fd, uv_strerror(r));
        free(h);
        return NULL;
    }
    h->poll.data = h;
    list_push_back(&l->handles, &h->head.link);
    return h;
}

void loop_fd_set(struct loop_fd *h, int events)
{
    if (h->events == events)
        return;
    h->events = events;
    if (h->loop->uv)
        fd_start(h);
}

void loop_fd_free(struct loop_fd *h)
{
    if (h)
        fd_free(&h->head);
}

/* ---- signals ---- */

static void on_signal(uv_signal_t *sig, int signum)
{
    struct loop_signal *s = sig->data;
    if (s->dead || s->loop->closing)
        return;
    struct loop *l = s->loop;
    uint64_t begin = loop_watch_begin(l);
    s->fn(s->ctx, signum);
    loop_watch_end(l, begin, "signal");
}

static void signal_free(struct handle_head *head)
{
    struct loop_signal *s = container_of(head, struct loop_signal, head);
    assert(!s->dead);
    s->dead = true;
    list_remove(&head->link);
    if (s->loop->uv)
        uv_close((uv_handle_t *)&s->sig, on_fd_closed);
    else
        free(s);
}

struct loop_signal *loop_signal_new(struct loop *l, int signum, void (*fn)(void *ctx, int signum),
                                    void *ctx)
{
    struct loop_signal *s = xnew(struct loop_signal);
    s->head.free = signal_free;
    s->loop = l;
    s->fn = fn;
    s->ctx = ctx;
    list_push_back(&l->handles, &s->head.link);
    if (!l->uv)
        return s;
    uv_signal_init(&l->uv->loop, &s->sig);
    s->sig.data = s;
    int r = uv_signal_start(&s->sig, on_signal, signum);
    if (r < 0) {
        log_debug(NULL, "cannot watch signal %d: %s", signum, uv_strerror(r));
        signal_free(&s->head);
        return NULL;
    }
    return s;
}

void loop_signal_free(struct loop_signal *s)
{
    if (s)
        signal_free(&s->head);
}

/* ---- work ---- */

static void on_work(uv_work_t *req)
{
    struct work *w = req->data;
    w->work(w->ctx);
}

static void on_work_done(uv_work_t *req, int status)
{
    struct work *w = req->data;
    struct loop *l = w->loop;
    void (*done)(void *) = w->done;
    void *ctx = w->ctx;
    (void)status; /* we never cancel */
    l->uv->works--;
    free(w);
    uint64_t begin = loop_watch_begin(l);
    if (done)
        done(ctx);
    loop_watch_end(l, begin, "work done");
}

void loop_work(struct loop *l, void (*work)(void *ctx), void (*done)(void *ctx), void *ctx)
{
    if (!l->uv) {
        struct deferred *d = xnew(struct deferred);
        d->fn = work;
        d->done = done;
        d->ctx = ctx;
        list_push_back(&l->works, &d->link);
        return;
    }
    struct work *w = xnew(struct work);
    w->req.data = w;
    w->loop = l;
    w->work = work;
    w->done = done;
    w->ctx = ctx;
    l->uv->works++;
    uv_queue_work(&l->uv->loop, &w->req, on_work, on_work_done);
}
