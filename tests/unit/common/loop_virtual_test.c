/* The loop without a kernel: timers, deferred calls and work on a clock that the test moves. */
#include "common/loop.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Callbacks record; the tests assert afterwards. */
static struct loop *loop;
static char trace[256];

static void note(void *ctx)
{
    const char *name = ctx;
    strncat(trace, name, sizeof(trace) - strlen(trace) - 1);
}

static int setup(void **state)
{
    (void)state;
    loop = loop_new_virtual();
    trace[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    loop_free(loop);
    return 0;
}

static void *name(const char *s)
{
    return (void *)(uintptr_t)s;
}

static void test_the_clock_moves_only_when_told(void **state)
{
    (void)state;
    uint64_t now = loop_now_ms(loop), wall = loop_wall_us(loop);
    loop_step(loop, 1000);
    assert_int_equal(loop_now_ms(loop), now);
    loop_virtual_advance(loop, 250);
    assert_int_equal(loop_now_ms(loop), now + 250);
    assert_int_equal(loop_now_us(loop), (now + 250) * 1000);
    assert_int_equal(loop_wall_us(loop), wall + 250000);
}

static void test_timers_fire_in_order_of_time_then_of_start(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint64_t after;
    } plan[] = { { "e", 30 }, { "c", 20 }, { "a", 5 }, { "d", 20 }, { "b", 10 }, { "f", 31 } };
    for (size_t i = 0; i < 6; i++)
        loop_timer_start(loop_timer_new(loop, note, name(plan[i].name)), plan[i].after, 0);
    loop_virtual_advance(loop, 30);
    assert_string_equal(trace, "abcde");
    loop_virtual_advance(loop, 1);
    assert_string_equal(trace, "abcdef");
}

static void test_a_timer_fires_once_and_is_inactive_then(void **state)
{
    (void)state;
    struct loop_timer *t = loop_timer_new(loop, note, name("x"));
    assert_false(loop_timer_active(t));
    loop_timer_start(t, 10, 0);
    assert_true(loop_timer_active(t));
    loop_virtual_advance(loop, 9);
    assert_string_equal(trace, "");
    loop_virtual_advance(loop, 100);
    assert_string_equal(trace, "x");
    assert_false(loop_timer_active(t));
    loop_timer_free(t);
    loop_timer_free(NULL);
}

static void test_repeating_restarting_and_stopping(void **state)
{
    (void)state;
    struct loop_timer *t = loop_timer_new(loop, note, name("x"));
    loop_timer_start(t, 10, 5);
    loop_virtual_advance(loop, 22); /* 10, 15, 20 */
    assert_string_equal(trace, "xxx");
    loop_timer_start(t, 10, 0); /* re-arms: 32 */
    loop_virtual_advance(loop, 9);
    assert_string_equal(trace, "xxx");
    loop_virtual_advance(loop, 1);
    assert_string_equal(trace, "xxxx");
    loop_timer_start(t, 10, 0);
    loop_timer_stop(t);
    loop_timer_stop(t);
    loop_virtual_advance(loop, 100);
    assert_string_equal(trace, "xxxx");
}

static struct loop_timer *victim, *self;

static void free_victim(void *ctx)
{
    note(ctx);
    loop_timer_free(victim);
}

static void free_self(void *ctx)
{
    note(ctx);
    loop_timer_free(self);
}

static void test_no_callback_after_free_even_within_a_batch(void **state)
{
    (void)state;
    struct loop_timer *killer = loop_timer_new(loop, free_victim, name("k"));
    victim = loop_timer_new(loop, note, name("v"));
    loop_timer_start(killer, 10, 0);
    loop_timer_start(victim, 10, 0); /* same moment, after the killer */
    loop_virtual_advance(loop, 20);
    assert_string_equal(trace, "k");
}

static void test_a_timer_may_free_itself(void **state)
{
    (void)state;
    self = loop_timer_new(loop, free_self, name("s"));
    loop_timer_start(self, 1, 1);
    loop_virtual_advance(loop, 10);
    assert_string_equal(trace, "s");
}

static int rearmed;

static void rearm(void *ctx)
{
    struct loop_timer **t = ctx;
    if (++rearmed < 50)
        loop_timer_start(*t, 0, 0);
}

static void test_rearming_at_zero_does_not_starve_others(void **state)
{
    (void)state;
    static struct loop_timer *t;
    rearmed = 0;
    t = loop_timer_new(loop, rearm, &t);
    loop_timer_start(t, 5, 0);
    loop_timer_start(loop_timer_new(loop, note, name("o")), 5, 0);
    loop_virtual_advance(loop, 5);
    assert_string_equal(trace, "o");
    assert_int_equal(rearmed, 50);
}

static void test_many_timers_keep_the_heap_in_order(void **state)
{
    (void)state;
    enum { N = 500 };
    static struct loop_timer *t[N];
    static uint64_t due[N];
    unsigned seed = 12345;
    uint64_t start = loop_now_ms(loop);
    for (int i = 0; i < N; i++) {
        seed = seed * 1103515245 + 12345;
        due[i] = seed >> 16 & 1023;
        t[i] = loop_timer_new(loop, note, name(""));
        loop_timer_start(t[i], due[i], 0);
    }
    for (int i = 0; i < N; i += 3)
        loop_timer_stop(t[i]);
    while (loop_now_ms(loop) < start + 1024) {
        loop_virtual_advance(loop, 1);
        uint64_t now = loop_now_ms(loop) - start;
        for (int i = 0; i < N; i++)
            assert_int_equal(loop_timer_active(t[i]), i % 3 != 0 && due[i] > now);
    }
}

static void defer_more(void *ctx)
{
    note(ctx);
    loop_defer(loop, note, name("3"));
    note(name("1"));
}

static void test_deferred_calls_run_in_order_after_the_callback(void **state)
{
    (void)state;
    loop_defer(loop, defer_more, name("0"));
    loop_defer(loop, note, name("2"));
    assert_string_equal(trace, ""); /* never inside loop_defer */
    loop_step(loop, 0);
    assert_string_equal(trace, "0123");
}

static char object_a, object_b;
static int calls_a, calls_b;

static void count(void *ctx)
{
    *(ctx == &object_a ? &calls_a : &calls_b) += 1;
}

static void cancel_a(void *ctx)
{
    (void)ctx;
    loop_cancel_deferred(loop, &object_a);
}

static void test_cancelling_drops_all_of_one_context_only(void **state)
{
    (void)state;
    calls_a = calls_b = 0;
    loop_defer(loop, count, &object_a);
    loop_defer(loop, count, &object_b);
    loop_defer(loop, count, &object_a);
    loop_cancel_deferred(loop, &object_a);
    loop_step(loop, 0);
    assert_int_equal(calls_a, 0);
    assert_int_equal(calls_b, 1);
    /* Also from a call of the same batch. */
    loop_defer(loop, cancel_a, NULL);
    loop_defer(loop, count, &object_a);
    loop_step(loop, 0);
    assert_int_equal(calls_a, 0);
}

static void test_deferred_calls_run_before_time_moves_on(void **state)
{
    (void)state;
    loop_defer(loop, note, name("d"));
    loop_timer_start(loop_timer_new(loop, note, name("t")), 1, 0);
    loop_virtual_advance(loop, 1);
    assert_string_equal(trace, "dt");
}

static void work_w(void *ctx)
{
    (void)ctx;
    note(name("w"));
}

static void work_done(void *ctx)
{
    (void)ctx;
    note(name("d"));
}

static void test_work_and_done_run_on_the_next_step(void **state)
{
    (void)state;
    loop_work(loop, work_w, work_done, NULL);
    loop_work(loop, work_w, NULL, NULL);
    assert_string_equal(trace, "");
    loop_step(loop, 0);
    assert_string_equal(trace, "wdw");
}

static void on_fd(void *ctx, int events)
{
    (void)events;
    note(ctx);
}

static void on_signal(void *ctx, int signum)
{
    (void)signum;
    note(ctx);
}

static void test_descriptors_and_signals_exist_but_never_fire(void **state)
{
    (void)state;
    struct loop_fd *h = loop_fd_new(loop, 0, on_fd, name("f"));
    struct loop_signal *s = loop_signal_new(loop, 10, on_signal, name("s"));
    assert_non_null(h);
    assert_non_null(s);
    loop_fd_set(h, LOOP_READ | LOOP_WRITE | LOOP_HUP);
    loop_virtual_advance(loop, 1000);
    assert_string_equal(trace, "");
    loop_fd_free(h);
    loop_fd_free(NULL);
    loop_signal_free(s);
    loop_signal_free(NULL);
    (void)loop_fd_new(loop, 1, on_fd, NULL); /* loop_free takes what is left */
}

static void free_it(void *ctx)
{
    note(name("f"));
    free(ctx);
}

static void test_freeing_the_loop_runs_what_was_deferred(void **state)
{
    (void)state;
    struct loop *l = loop_new_virtual();
    loop_defer(l, free_it, malloc(10)); /* a leak if it were dropped */
    loop_work(l, work_w, free_it, malloc(10));
    loop_timer_start(loop_timer_new(l, note, name("never")), 0, 0);
    loop_free(l);
    assert_string_equal(trace, "fwf");
    loop_free(NULL);
}

static void stop_it(void *ctx)
{
    note(ctx);
    loop_stop(loop);
}

static void test_run_ends_when_nothing_is_ready_or_stopped(void **state)
{
    (void)state;
    loop_run(loop);
    loop_defer(loop, note, name("a"));
    loop_defer(loop, stop_it, name("s"));
    loop_run(loop);
    assert_string_equal(trace, "as");
    loop_defer(loop, note, name("b"));
    loop_run(loop);
    assert_string_equal(trace, "asb");
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_the_clock_moves_only_when_told),
        T(test_timers_fire_in_order_of_time_then_of_start),
        T(test_a_timer_fires_once_and_is_inactive_then),
        T(test_repeating_restarting_and_stopping),
        T(test_no_callback_after_free_even_within_a_batch),
        T(test_a_timer_may_free_itself),
        T(test_rearming_at_zero_does_not_starve_others),
        T(test_many_timers_keep_the_heap_in_order),
        T(test_deferred_calls_run_in_order_after_the_callback),
        T(test_cancelling_drops_all_of_one_context_only),
        T(test_deferred_calls_run_before_time_moves_on),
        T(test_work_and_done_run_on_the_next_step),
        T(test_descriptors_and_signals_exist_but_never_fire),
        T(test_freeing_the_loop_runs_what_was_deferred),
        T(test_run_ends_when_nothing_is_ready_or_stopped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
