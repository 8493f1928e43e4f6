#include "guest-kernel-shim/loop.h"
#include "shim_test.h"
#include <unistd.h>
#include <zmq.h>

struct fixture {
    struct shim_loop loop;
    struct shim_timer timer[3];
    struct shim_watch watch[2];
    int pipe[2][2];
    char order[16];
    size_t n;
};

static void note(struct fixture *f, char c)
{
    if (f->n + 1 < sizeof(f->order))
        f->order[f->n++] = c;
}
static void timer_a(void *ctx)
{
    note(ctx, 'a');
}
static void timer_b(void *ctx)
{
    note(ctx, 'b');
}
static void timer_stops_c(void *ctx)
{
    struct fixture *f = ctx;

    note(f, 's');
    shim_timer_stop(&f->timer[2]);
}

static void test_timers_fire_in_order_of_time_and_can_be_stopped(void **state)
{
    struct fixture f = { 0 };

    (void)state;
    shim_loop_init(&f.loop);
    shim_timer_start(&f.loop, &f.timer[0], 2, timer_b, &f);
    shim_timer_start(&f.loop, &f.timer[1], 1, timer_a, &f);
    shim_timer_start(&f.loop, &f.timer[2], 0, timer_a, &f);
    shim_timer_stop(&f.timer[2]);
    while (f.n < 2)
        shim_loop_step(&f.loop, 1000);
    assert_string_equal(f.order, "ab");
    /* A callback may stop another timer that is due in the same round. */
    shim_timer_start(&f.loop, &f.timer[0], 0, timer_stops_c, &f);
    shim_timer_start(&f.loop, &f.timer[2], 0, timer_a, &f);
    shim_loop_step(&f.loop, 10);
    shim_loop_step(&f.loop, 10);
    assert_string_equal(f.order, "abs");
    shim_loop_fini(&f.loop);
}

static void on_first(void *ctx, short revents)
{
    struct fixture *f = ctx;

    (void)revents;
    note(f, '1');
    shim_watch_stop(&f->loop, &f->watch[0]);
    shim_watch_stop(&f->loop, &f->watch[1]); /* also ready in this round: must not be called */
}
static void on_second(void *ctx, short revents)
{
    (void)revents;
    note(ctx, '2');
}

static void test_a_watch_that_was_stopped_is_not_called_in_the_same_round(void **state)
{
    struct fixture f = { 0 };

    (void)state;
    shim_loop_init(&f.loop);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pipe(f.pipe[i]), 0);
        assert_int_equal(write(f.pipe[i][1], "x", 1), 1);
    }
    shim_watch_start(&f.loop, &f.watch[0], NULL, f.pipe[0][0], ZMQ_POLLIN, on_first, &f);
    shim_watch_start(&f.loop, &f.watch[1], NULL, f.pipe[1][0], ZMQ_POLLIN, on_second, &f);
    shim_loop_step(&f.loop, 1000);
    shim_loop_step(&f.loop, 0);
    assert_string_equal(f.order, "1");
    shim_watch_start(&f.loop, &f.watch[1], NULL, f.pipe[1][0], 0, on_second, &f);
    shim_loop_step(&f.loop, 0);
    assert_string_equal(f.order, "1"); /* silent */
    f.watch[1].events = ZMQ_POLLIN;
    shim_loop_step(&f.loop, 1000);
    assert_string_equal(f.order, "12");
    for (int i = 0; i < 2; i++) {
        close(f.pipe[i][0]);
        close(f.pipe[i][1]);
    }
    shim_loop_fini(&f.loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_timers_fire_in_order_of_time_and_can_be_stopped),
        cmocka_unit_test(test_a_watch_that_was_stopped_is_not_called_in_the_same_round),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
