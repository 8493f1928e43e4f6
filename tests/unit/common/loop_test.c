/* The real loop. Callbacks record, tests assert afterwards; a guard timer ends a loop that would
 * hang, and no test depends on how long anything took. */
#include "common/loop.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static struct loop *loop;
static char trace[256];
static bool hung;

static void note(void *ctx)
{
    const char *name = ctx;
    strncat(trace, name, sizeof(trace) - strlen(trace) - 1);
}

static void *name(const char *s)
{
    return (void *)(uintptr_t)s;
}

static void on_guard(void *ctx)
{
    (void)ctx;
    hung = true;
    loop_stop(loop);
}

static int setup(void **state)
{
    (void)state;
    loop = loop_new();
    trace[0] = '\0';
    hung = false;
    loop_timer_start(loop_timer_new(loop, on_guard, NULL), 20000, 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    loop_free(loop);
    return hung ? -1 : 0;
}

static void stop_it(void *ctx)
{
    if (ctx)
        note(ctx);
    loop_stop(loop);
}

static void test_timers_fire_in_order_and_not_early(void **state)
{
    (void)state;
    uint64_t begin = loop_now_us(loop);
    loop_timer_start(loop_timer_new(loop, stop_it, name("c")), 30, 0);
    loop_timer_start(loop_timer_new(loop, note, name("a")), 10, 0);
    loop_timer_start(loop_timer_new(loop, note, name("b")), 20, 0);
    loop_run(loop);
    assert_string_equal(trace, "abc");
    assert_true(loop_now_us(loop) - begin >= 29000);
}

static void test_stop_before_run_ends_it_at_once_and_it_can_run_again(void **state)
{
    (void)state;
    loop_stop(loop);
    loop_run(loop);
    loop_defer(loop, stop_it, name("x"));
    loop_run(loop);
    assert_string_equal(trace, "x");
    assert_false(hung);
}

static void defer_chain(void *ctx)
{
    int *left = ctx;
    if (--*left == 0)
        loop_stop(loop);
    else
        loop_defer(loop, defer_chain, left);
}

static void test_a_loop_with_deferred_calls_does_not_sleep(void **state)
{
    (void)state;
    int left = 1000;
    loop_defer(loop, defer_chain, &left);
    loop_run(loop);
    assert_int_equal(left, 0);
    assert_false(hung);
}

static void starve(void *ctx)
{
    loop_defer(loop, starve, ctx);
}

static void test_endless_deferring_does_not_starve_timers(void **state)
{
    (void)state;
    loop_defer(loop, starve, &loop);
    loop_timer_start(loop_timer_new(loop, stop_it, name("t")), 5, 0);
    loop_run(loop);
    assert_string_equal(trace, "t");
    assert_false(hung);
    loop_cancel_deferred(loop, &loop);
}

static void test_step_returns_without_events(void **state)
{
    (void)state;
    loop_step(loop, 0);
    loop_step(loop, 5);
    assert_false(hung);
    loop_defer(loop, note, name("d"));
    loop_step(loop, 100000);
    assert_string_equal(trace, "d");
    assert_false(hung);
}

struct pipe_reader {
    struct loop_fd *h;
    int fd, calls, events;
    char text[64];
    bool eof;
};

static void on_readable(void *ctx, int events)
{
    struct pipe_reader *r = ctx;
    r->calls++;
    r->events |= events;
    char byte;
    ssize_t n = read(r->fd, &byte, 1); /* one byte a call: level-triggered */
    if (n == 1)
        strncat(r->text, &byte, 1);
    if (n == 0) {
        r->eof = true;
        loop_fd_free(r->h);
        loop_stop(loop);
    }
}

static void test_descriptors_are_level_triggered(void **state)
{
    (void)state;
    int pair[2];
    assert_int_equal(pipe(pair), 0);
    struct pipe_reader r = { .fd = pair[0] };
    r.h = loop_fd_new(loop, pair[0], on_readable, &r);
    loop_fd_set(r.h, LOOP_READ);
    assert_int_equal(write(pair[1], "hello", 5), 5);
    close(pair[1]);
    loop_run(loop);
    assert_string_equal(r.text, "hello");
    assert_true(r.eof);
    assert_int_equal(r.calls, 6);
    close(pair[0]);
}

static void test_silent_descriptors_do_not_call(void **state)
{
    (void)state;
    int pair[2];
    assert_int_equal(pipe(pair), 0);
    struct pipe_reader r = { .fd = pair[0] };
    r.h = loop_fd_new(loop, pair[0], on_readable, &r);
    assert_int_equal(write(pair[1], "x", 1), 1);
    loop_step(loop, 5);
    loop_fd_set(r.h, LOOP_READ);
    loop_fd_set(r.h, 0);
    loop_step(loop, 5);
    assert_int_equal(r.calls, 0);
    loop_fd_set(r.h, LOOP_READ);
    while (!r.calls && !hung)
        loop_step(loop, 1000);
    assert_string_equal(r.text, "x");
    loop_fd_free(r.h);
    close(pair[0]);
    close(pair[1]);
}

static void on_event(void *ctx, int events)
{
    *(int *)ctx |= events;
}

static void test_write_and_hang_up_are_reported(void **state)
{
    (void)state;
    int pair[2], events = 0;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    struct loop_fd *h = loop_fd_new(loop, pair[0], on_event, &events);
    loop_fd_set(h, LOOP_WRITE);
    while (!events && !hung)
        loop_step(loop, 1000);
    assert_int_equal(events, LOOP_WRITE);
    events = 0;
    loop_fd_set(h, LOOP_HUP);
    loop_step(loop, 5);
    assert_int_equal(events, 0);
    close(pair[1]);
    while (!events && !hung)
        loop_step(loop, 1000);
    assert_true(events & LOOP_HUP);
    assert_false(events & LOOP_WRITE);
    loop_fd_free(h);
    close(pair[0]);
}

static void test_a_broken_pipe_wakes_the_writer_again_and_again(void **state)
{
    (void)state;
    int pair[2], events = 0;
    assert_int_equal(pipe(pair), 0);
    assert_int_equal(fcntl(pair[1], F_SETFL, O_NONBLOCK), 0);
    char block[4096] = { 0 };
    while (write(pair[1], block, sizeof(block)) > 0)
        continue;
    struct loop_fd *h = loop_fd_new(loop, pair[1], on_event, &events);
    loop_fd_set(h, LOOP_WRITE);
    loop_step(loop, 5);
    assert_int_equal(events, 0); /* full */
    close(pair[0]);
    for (int i = 0; i < 3; i++) {
        events = 0;
        while (!events && !hung)
            loop_step(loop, 1000);
        assert_true(events & LOOP_WRITE);
    }
    loop_fd_free(h);
    close(pair[1]);
}

static void test_what_cannot_be_polled_gives_null(void **state)
{
    (void)state;
    int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_null(loop_fd_new(loop, fd, on_event, NULL));
    close(fd);
    assert_null(loop_fd_new(loop, fd, on_event, NULL));
}

static void test_a_number_can_be_watched_again_after_free(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++) {
        int pair[2];
        assert_int_equal(pipe(pair), 0);
        struct pipe_reader r = { .fd = pair[0] };
        r.h = loop_fd_new(loop, pair[0], on_readable, &r);
        assert_non_null(r.h);
        loop_fd_set(r.h, LOOP_READ);
        assert_int_equal(write(pair[1], "y", 1), 1);
        while (!r.calls && !hung)
            loop_step(loop, 1000);
        assert_string_equal(r.text, "y");
        loop_fd_free(r.h);
        close(pair[0]);
        close(pair[1]);
    }
}

struct pair_killer {
    struct loop_fd *a, *b;
    int calls;
};

static void on_either(void *ctx, int events)
{
    struct pair_killer *k = ctx;
    (void)events;
    k->calls++;
    loop_fd_free(k->a);
    loop_fd_free(k->b);
    k->a = k->b = NULL;
}

static void test_freeing_another_ready_descriptor_silences_it(void **state)
{
    (void)state;
    int p1[2], p2[2];
    assert_int_equal(pipe(p1), 0);
    assert_int_equal(pipe(p2), 0);
    assert_int_equal(write(p1[1], "x", 1), 1);
    assert_int_equal(write(p2[1], "x", 1), 1);
    struct pair_killer k = { 0 };
    k.a = loop_fd_new(loop, p1[0], on_either, &k);
    k.b = loop_fd_new(loop, p2[0], on_either, &k);
    loop_fd_set(k.a, LOOP_READ);
    loop_fd_set(k.b, LOOP_READ);
    while (!k.calls && !hung)
        loop_step(loop, 1000);
    loop_step(loop, 5);
    assert_int_equal(k.calls, 1);
    close(p1[0]);
    close(p1[1]);
    close(p2[0]);
    close(p2[1]);
}

static int got_signal;

static void on_signal(void *ctx, int signum)
{
    (void)ctx;
    got_signal = signum;
    loop_stop(loop);
}

static void test_signals_arrive_on_the_loop(void **state)
{
    (void)state;
    got_signal = 0;
    struct loop_signal *s = loop_signal_new(loop, SIGUSR1, on_signal, NULL);
    assert_non_null(s);
    assert_null(loop_signal_new(loop, SIGKILL, on_signal, NULL));
    raise(SIGUSR1);
    loop_run(loop);
    assert_int_equal(got_signal, SIGUSR1);
    loop_signal_free(s);
}

static pthread_t worker;

static void do_work(void *ctx)
{
    worker = pthread_self();
    *(char *)ctx = 'w';
}

static void on_done(void *ctx)
{
    char *text = ctx;
    text[1] = text[0] == 'w' ? 'd' : '?';
    loop_stop(loop);
}

static void test_work_runs_on_another_thread_and_done_on_the_loop(void **state)
{
    (void)state;
    char text[8] = "";
    loop_work(loop, do_work, on_done, text);
    loop_run(loop);
    assert_string_equal(text, "wd");
    assert_false(pthread_equal(worker, pthread_self()));
}

static void slow_work(void *ctx)
{
    (void)ctx;
    usleep(20000);
}

static void free_it(void *ctx)
{
    note(name("f"));
    free(ctx);
}

static void test_freeing_the_loop_waits_for_work_and_deferred_calls(void **state)
{
    (void)state;
    struct loop *l = loop_new();
    int pair[2];
    assert_int_equal(pipe(pair), 0);
    assert_int_equal(write(pair[1], "x", 1), 1);
    loop_work(l, slow_work, free_it, malloc(10));
    loop_defer(l, free_it, malloc(10));
    loop_timer_start(loop_timer_new(l, note, name("never")), 0, 1);
    loop_fd_set(loop_fd_new(l, pair[0], on_event, NULL), LOOP_READ); /* must not be called */
    (void)loop_signal_new(l, SIGUSR2, on_signal, NULL);
    loop_free(l);
    assert_string_equal(trace, "ff");
    close(pair[0]);
    close(pair[1]);
}

static void slow_call(void *ctx)
{
    (void)ctx;
    uint64_t end = loop_now_us(loop) + 60000;
    while (loop_now_us(loop) < end)
        continue;
}

static void test_slow_callbacks_are_counted(void **state)
{
    (void)state;
    assert_int_equal(loop_slow_callbacks(loop), 0);
    loop_defer(loop, slow_call, NULL);
    loop_step(loop, 0);
    assert_int_equal(loop_slow_callbacks(loop), 1);
}

static void test_wall_clock_is_utc_now(void **state)
{
    (void)state;
    assert_true(loop_wall_us(loop) / 1000000 - (uint64_t)time(NULL) + 2 <= 4);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_timers_fire_in_order_and_not_early),
        T(test_stop_before_run_ends_it_at_once_and_it_can_run_again),
        T(test_a_loop_with_deferred_calls_does_not_sleep),
        T(test_endless_deferring_does_not_starve_timers),
        T(test_step_returns_without_events),
        T(test_descriptors_are_level_triggered),
        T(test_silent_descriptors_do_not_call),
        T(test_write_and_hang_up_are_reported),
        T(test_a_broken_pipe_wakes_the_writer_again_and_again),
        T(test_what_cannot_be_polled_gives_null),
        T(test_a_number_can_be_watched_again_after_free),
        T(test_freeing_another_ready_descriptor_silences_it),
        T(test_signals_arrive_on_the_loop),
        T(test_work_runs_on_another_thread_and_done_on_the_loop),
        T(test_freeing_the_loop_waits_for_work_and_deferred_calls),
        T(test_slow_callbacks_are_counted),
        T(test_wall_clock_is_utc_now),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
