#pragma once
/* The event loop: the only pair of files that knows libuv. One thread; every callback runs on it.
 * Two kinds share the API: loop_new() is real; loop_new_virtual() has no fds, signals or threads,
 * and its clock moves only by loop_virtual_advance (tests, simulation).
 *
 * Handles are heap objects made by _new and ended by _free, which may be called from any callback,
 * their own included; memory goes away later by itself. A callback never comes after _free. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct loop;
struct loop *loop_new(void);
struct loop *loop_new_virtual(void);
/* Ends queued work and deferred calls (done and fn are called), frees what is still open, runs
 * pending closes. NULL ok. */
void loop_free(struct loop *l);
/* Real loops: run, step and free are never called from a callback. */
void loop_run(struct loop *l); /* until loop_stop; virtual: until nothing is ready */
void loop_stop(struct loop *l);
/* Run what is ready; wait at most max_wait_ms for something. */
void loop_step(struct loop *l, uint64_t max_wait_ms);
void loop_virtual_advance(struct loop *l, uint64_t ms); /* fires timers in order of time */
uint64_t loop_now_ms(const struct loop *l);             /* monotonic; cached once per iteration */
uint64_t loop_now_us(const struct loop *l);             /* monotonic; real loops: read afresh */
uint64_t loop_wall_us(const struct loop *l);            /* UTC microseconds since 1970 */

struct loop_timer;
typedef void (*loop_timer_fn)(void *ctx);
struct loop_timer *loop_timer_new(struct loop *l, loop_timer_fn fn, void *ctx);
void loop_timer_start(struct loop_timer *t, uint64_t after_ms, uint64_t repeat_ms); /* re-arms */
void loop_timer_stop(struct loop_timer *t);
bool loop_timer_active(const struct loop_timer *t);
void loop_timer_free(struct loop_timer *t); /* NULL ok */

enum { LOOP_READ = 1, LOOP_WRITE = 2, LOOP_HUP = 4 };
struct loop_fd;
typedef void (*loop_fd_fn)(void *ctx, int events);
/* Does not own fd, but makes it non-blocking. Level-triggered. A new handle is silent (events 0)
 * until loop_fd_set. One handle per fd number. On a socket error (EPOLLERR) all requested events
 * and LOOP_HUP are reported: read or write to learn the reason. NULL when fd cannot be polled
 * (closed, a regular file, already watched). In a virtual loop it never fires. */
struct loop_fd *loop_fd_new(struct loop *l, int fd, loop_fd_fn fn, void *ctx);
void loop_fd_set(struct loop_fd *h, int events);
void loop_fd_free(struct loop_fd *h); /* NULL ok; call before close(fd) */

struct loop_signal;
struct loop_signal *loop_signal_new(struct loop *l, int signum, void (*fn)(void *ctx, int signum),
                                    void *ctx);
void loop_signal_free(struct loop_signal *s);

/* fn(ctx) once, after the current callback has returned (never inside loop_defer itself). In FIFO
 * order. loop_cancel_deferred drops everything queued with this ctx. */
void loop_defer(struct loop *l, void (*fn)(void *ctx), void *ctx);
void loop_cancel_deferred(struct loop *l, void *ctx);

/* Callbacks of a real loop that took more than 50 ms (each is logged at debug). */
uint64_t loop_slow_callbacks(const struct loop *l);

/* Blocking file or CPU work: work(ctx) on a thread of the pool (no shared state), then done(ctx) on
 * the loop. In a virtual loop both run on the next step. */
void loop_work(struct loop *l, void (*work)(void *ctx), void (*done)(void *ctx), void *ctx);
