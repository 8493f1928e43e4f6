/* The pool of one template: parked, deferred, demand, failures, capacity. A tiny host balances it.
 */
#include "common/mem.h"
#include "fake_machine.h"
#include "vm/pool.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct loop *loop;
static struct fake_world world;
static struct vm_budget budget;
static struct metrics *metrics;
static struct vm_pool *pool;
static struct loop_timer *tick;
static bool kicked, refills;
static int n_up, n_down;
static struct vm_exit down_why;

static void balance(void *ctx)
{
    struct vm_guest *g;
    (void)ctx;
    kicked = false;
    vm_pool_trim(pool);
    while ((g = vm_pool_next_queued(pool)))
        vm_pool_start_queued(pool, g);
    while (refills && vm_pool_count(pool).refilling < 1 && vm_pool_refill(pool))
        ;
    vm_pool_publish(pool);
}

static void kick(void *host)
{
    (void)host;
    if (!kicked)
        loop_defer(loop, balance, NULL);
    kicked = true;
}

static const struct vm_pool_ops ops = { kick };

static void on_tick(void *ctx)
{
    kick(ctx);
}

static void on_up(void *ctx)
{
    (void)ctx;
    n_up++;
}

static void on_down(void *ctx, const struct vm_exit *why)
{
    (void)ctx;
    n_down++;
    down_why = *why;
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    (void)type;
    (void)stream;
    (void)payload;
}

static const struct vm_events events = { on_up, on_message, NULL, on_down };

static struct vm_template *make_template(void)
{
    struct vm_template *t = xnew(struct vm_template);

    t->name = xstrdup("python");
    t->default_spec = xstrdup("python3");
    t->memory_mb = 904; /* a VM counts 1000 MB */
    t->vcpus = 1;
    t->accel = VM_ACCEL_TCG;
    t->specs = json_pack("{s:s, s:{}}", "default", "python3", "kernelspecs");
    t->use_fd = -1;
    return t;
}

static void make_pool(unsigned parked, unsigned deferred, unsigned max)
{
    struct vm_pool_spec s = { .loop = loop,
                              .name = "python",
                              .tmpl = make_template(),
                              .backend = &world.base,
                              .budget = &budget,
                              .metrics = metrics,
                              .ops = &ops };

    pool = vm_pool_new(&s);
    pool->class.mem_fd = 1000; /* "loaded"; no machine of this backend looks */
    pool->active = true;
    pool->want = pool->want_min = parked;
    pool->want_max = max;
    pool->want_deferred = deferred;
    kick(NULL);
}

static int setup(void **state)
{
    (void)state;
    loop = loop_new();
    fake_world_init(&world, loop);
    metrics = metrics_new();
    budget = (struct vm_budget) { .limit_mb = 100000, .max_starts = 4, .max_refills = 1 };
    tick = loop_timer_new(loop, on_tick, NULL);
    loop_timer_start(tick, 20, 20);
    kicked = false;
    refills = true;
    n_up = n_down = 0;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    loop_timer_free(tick);
    loop_cancel_deferred(loop, NULL);
    pool->class.mem_fd = -1;
    vm_pool_free(pool);
    fake_world_fini(&world);
    metrics_free(metrics);
    loop_free(loop);
    return world.alive || budget.vms || budget.users || budget.used_mb ? -1 : 0;
}

/* Up to ten seconds for the numbers to become these. */
static bool reaches(unsigned parked, unsigned deferred)
{
    uint64_t end = loop_now_ms(loop) + 10000;
    struct vm_pool_counts c = { 0 };

    while (loop_now_ms(loop) < end) {
        c = vm_pool_count(pool);
        if (c.parked == parked && c.deferred == deferred && !c.refilling && !c.stopping)
            return true;
        loop_step(loop, 20);
    }
    print_message("parked %u deferred %u refilling %u\n", c.parked, c.deferred, c.refilling);
    return false;
}

static bool wait_count(const int *n, int want)
{
    uint64_t end = loop_now_ms(loop) + 10000;

    while (*n < want && loop_now_ms(loop) < end)
        loop_step(loop, 20);
    return *n >= want;
}

static struct vm *acquire(const char *spec, struct err *e)
{
    struct vm_request r = { .template_name = "python", .spec = spec };
    struct vm *vm = NULL;

    return vm_pool_acquire(pool, &r, &events, NULL, &vm, e) == 0 ? vm : NULL;
}

static struct vm *must_acquire(void)
{
    struct err e = { 0 };
    struct vm *vm = acquire(NULL, &e);

    if (!vm) {
        fail_msg("%s", e.msg);
        abort();
    }
    return vm;
}

static void test_the_pool_fills_to_what_is_wanted_one_after_the_other(void **state)
{
    (void)state;
    make_pool(3, 2, 8);
    assert_true(reaches(3, 2));
    assert_int_equal(world.spawned, 5);
    assert_int_equal(world.resumes, 3); /* deferred ones have loaded nothing */
    assert_int_equal(budget.vms, 5);
    assert_int_equal(budget.users, 0);
}

static void test_a_request_takes_a_parked_vm_and_the_pool_refills(void **state)
{
    struct vm *vm;
    (void)state;
    make_pool(2, 0, 2);
    assert_true(reaches(2, 0));
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    assert_string_equal(vm->info.timings.origin, "parked");
    assert_int_equal(pool->hits_parked, 1);
    assert_true(reaches(2, 0));
    assert_int_equal(world.spawned, 3);
}

static void test_with_nothing_parked_a_deferred_one_serves(void **state)
{
    struct vm *vm;
    (void)state;
    make_pool(0, 1, 0);
    assert_true(reaches(0, 1));
    refills = false;
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    assert_string_equal(vm->info.timings.origin, "deferred");
    assert_int_equal(world.spawned, 1);
    assert_int_equal(pool->hits_deferred, 1);
}

static void test_with_an_empty_pool_a_new_one_serves(void **state)
{
    struct vm *vm;
    (void)state;
    make_pool(0, 0, 0);
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    assert_string_equal(vm->info.timings.origin, "cold");
    assert_int_equal(pool->misses, 1);
}

static void test_a_used_vm_is_never_handed_out_again(void **state)
{
    char first[40];
    struct vm *vm;
    (void)state;
    make_pool(1, 0, 1);
    assert_true(reaches(1, 0));
    vm = must_acquire();
    snprintf(first, sizeof(first), "%s", vm->info.id);
    assert_true(wait_count(&n_up, 1));
    vm_release(vm, 0);
    assert_true(wait_count(&n_down, 1));
    assert_true(reaches(1, 0));
    vm = must_acquire();
    assert_string_not_equal(first, vm->info.id);
    assert_true(wait_count(&n_up, 2));
}

static void test_misses_raise_the_wanted_number_up_to_the_maximum(void **state)
{
    (void)state;
    make_pool(1, 0, 3);
    assert_true(reaches(1, 0));
    refills = false;
    for (int i = 0; i < 6; i++)
        assert_non_null(acquire(NULL, NULL));
    assert_int_equal(pool->want, 3);
    assert_true(wait_count(&n_up, 6));
    refills = true;
    kick(NULL);
    assert_true(reaches(3, 0));
}

static void test_quiet_minutes_lower_it_again_and_the_surplus_ends(void **state)
{
    (void)state;
    make_pool(1, 0, 3);
    pool->want = 3;
    pool->last_miss_ms = loop_now_ms(loop);
    assert_true(reaches(3, 0));
    pool->last_miss_ms = loop_now_ms(loop) - VM_POOL_DECAY_MS; /* a minute passes */
    assert_true(reaches(2, 0));
    assert_int_equal(pool->want, 2);
    pool->last_miss_ms = loop_now_ms(loop) - VM_POOL_DECAY_MS;
    assert_true(reaches(1, 0));
    pool->last_miss_ms = loop_now_ms(loop) - VM_POOL_DECAY_MS;
    assert_true(reaches(1, 0)); /* the floor */
}

static void test_a_parked_vm_that_dies_is_replaced(void **state)
{
    (void)state;
    make_pool(1, 0, 1);
    assert_true(reaches(1, 0));
    fake_die(fake_first(&world), "killed");
    for (int i = 0; i < 5; i++)
        loop_step(loop, 10);
    assert_true(reaches(1, 0));
    assert_int_equal(world.spawned, 2);
}

static void test_failing_starts_back_off_instead_of_storming(void **state)
{
    uint64_t end = loop_now_ms(loop) + 700;
    (void)state;
    world.mode = FAKE_RESUME_REFUSED;
    make_pool(2, 0, 2);
    while (loop_now_ms(loop) < end)
        loop_step(loop, 10);
    /* 0, 500 (, 1000 on a slow machine ...): certainly not one per turn */
    assert_in_range(world.spawned, 1, 3);
    assert_true(pool->failures >= 1);
    assert_non_null(strstr(pool->last_error, "not permitted"));
    assert_true(vm_pool_backoff_ms(pool) > 0);
}

static void test_a_template_that_works_again_forgets_its_failures(void **state)
{
    (void)state;
    world.mode = FAKE_DIES_LOADING;
    make_pool(1, 0, 1);
    for (int i = 0; i < 200 && !pool->failures; i++)
        loop_step(loop, 20);
    assert_int_equal(pool->failures, 1);
    world.mode = FAKE_OK;
    assert_true(reaches(1, 0));
    assert_int_equal(pool->failures, 0);
}

static void test_users_of_a_failing_template_are_told_why(void **state)
{
    struct err e = { 0 };
    (void)state;
    make_pool(0, 0, 0);
    world.mode = FAKE_SPAWN_FAILS;
    for (int i = 1; i <= (int)VM_POOL_REFUSE_AFTER; i++) {
        assert_non_null(acquire(NULL, &e));
        assert_true(wait_count(&n_down, i));
        assert_int_equal(down_why.reason, VM_EXIT_START_FAILED);
        assert_non_null(strstr(down_why.text, "no fake machine"));
    }
    assert_null(acquire(NULL, &e));
    assert_int_equal(e.code, -EAGAIN);
    assert_non_null(strstr(e.msg, "no fake machine"));
    assert_non_null(strstr(e.msg, "3 times"));
}

static void test_the_number_of_users_is_limited(void **state)
{
    struct err e = { 0 };
    struct vm *first;
    (void)state;
    budget.max_vms = 2;
    make_pool(0, 0, 0);
    first = must_acquire();
    assert_non_null(acquire(NULL, NULL));
    assert_null(acquire(NULL, &e)); /* pending starts count */
    assert_int_equal(e.code, -EAGAIN);
    assert_non_null(strstr(e.msg, "at most 2"));
    vm_release(first, 0);
    assert_true(wait_count(&n_down, 1));
    assert_non_null(acquire(NULL, &e));
}

static void test_memory_is_a_limit_and_the_text_says_how_much(void **state)
{
    struct err e = { 0 };
    (void)state;
    budget.limit_mb = 2500;
    make_pool(0, 0, 0);
    assert_non_null(acquire(NULL, NULL));
    assert_non_null(acquire(NULL, NULL));
    assert_null(acquire(NULL, &e));
    assert_int_equal(e.code, -EAGAIN);
    assert_non_null(strstr(e.msg, "2000 of the 2500 MB"));
    assert_non_null(strstr(e.msg, "1000 MB"));
}

static void test_the_pool_stays_within_the_budget_and_serves_when_it_is_full(void **state)
{
    struct vm *vm;
    (void)state;
    budget.max_vms = 2;
    make_pool(5, 0, 5);
    assert_true(reaches(2, 0));
    vm = must_acquire();
    assert_non_null(acquire(NULL, NULL));
    assert_true(wait_count(&n_up, 2));
    assert_string_equal(vm->info.timings.origin, "parked");
    assert_int_equal(world.spawned, 2);
}

static void test_evicting_ends_one_that_nobody_has(void **state)
{
    (void)state;
    make_pool(1, 0, 1);
    assert_true(reaches(1, 0));
    refills = false;
    assert_non_null(acquire(NULL, NULL));
    assert_true(wait_count(&n_up, 1));
    assert_false(vm_pool_evict(pool));
    refills = true;
    kick(NULL);
    assert_true(reaches(1, 0));
    refills = false;
    assert_true(vm_pool_evict(pool));
    assert_false(vm_pool_evict(pool));
    assert_true(reaches(0, 0));
    assert_int_equal(n_down, 0);
    assert_int_equal(pool->failures, 0); /* nobody's fault */
}

static void test_a_tier_floor_above_the_machines_is_refused(void **state)
{
    struct vm_request r = { .tier_floor = VM_TIER_KVM };
    struct vm *vm = NULL;
    struct err e = { 0 };
    (void)state;
    make_pool(0, 0, 0);
    assert_int_equal(vm_pool_acquire(pool, &r, &events, NULL, &vm, &e), -EPERM);
    assert_non_null(strstr(e.msg, "tcg"));
    assert_non_null(strstr(e.msg, "kvm"));
    assert_null(vm);
}

static void test_draining_ends_pool_and_users(void **state)
{
    (void)state;
    make_pool(2, 1, 4);
    assert_true(reaches(2, 1));
    assert_non_null(acquire(NULL, NULL));
    assert_true(wait_count(&n_up, 1));
    vm_pool_drain(pool, true, 0);
    assert_true(wait_count(&n_down, 1));
    assert_true(reaches(0, 0));
    assert_int_equal(world.alive, 0);
}

static void test_an_inactive_pool_starts_nothing_by_itself(void **state)
{
    (void)state;
    make_pool(2, 1, 2);
    pool->active = false;
    for (int i = 0; i < 10; i++)
        loop_step(loop, 10);
    assert_int_equal(world.spawned, 0);
    assert_non_null(acquire(NULL, NULL));
    assert_true(reaches(2, 1)); /* the first use wakes it */
}

static void test_the_metrics_tell_hits_misses_states_and_exits(void **state)
{
    struct buf out;
    struct vm *vm;
    (void)state;
    make_pool(1, 0, 1);
    assert_true(reaches(1, 0));
    refills = false;
    vm = must_acquire();
    acquire(NULL, NULL);
    assert_true(wait_count(&n_up, 2));
    vm_release(vm, 0);
    assert_true(wait_count(&n_down, 1));
    vm_pool_publish(pool);
    buf_init(&out, 1u << 20);
    assert_int_equal(metrics_write(metrics, &out), 0);
    const char *text = buf_cstr(&out);
    assert_non_null(
        strstr(text, "cellvisor_pool_hits_total{template=\"python\",from=\"parked\"} 1"));
    assert_non_null(strstr(text, "cellvisor_pool_misses_total{template=\"python\"} 1"));
    assert_non_null(strstr(text, "cellvisor_pool_vms{template=\"python\",state=\"running\"} 1"));
    assert_non_null(strstr(text, "cellvisor_vm_exits_total{reason=\"released\"} 1"));
    assert_non_null(strstr(text, "cellvisor_vm_start_seconds_count{stage=\"total\"} 2"));
    buf_fini(&out);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_the_pool_fills_to_what_is_wanted_one_after_the_other),
        T(test_a_request_takes_a_parked_vm_and_the_pool_refills),
        T(test_with_nothing_parked_a_deferred_one_serves),
        T(test_with_an_empty_pool_a_new_one_serves),
        T(test_a_used_vm_is_never_handed_out_again),
        T(test_misses_raise_the_wanted_number_up_to_the_maximum),
        T(test_quiet_minutes_lower_it_again_and_the_surplus_ends),
        T(test_a_parked_vm_that_dies_is_replaced),
        T(test_failing_starts_back_off_instead_of_storming),
        T(test_a_template_that_works_again_forgets_its_failures),
        T(test_users_of_a_failing_template_are_told_why),
        T(test_the_number_of_users_is_limited),
        T(test_memory_is_a_limit_and_the_text_says_how_much),
        T(test_the_pool_stays_within_the_budget_and_serves_when_it_is_full),
        T(test_evicting_ends_one_that_nobody_has),
        T(test_a_tier_floor_above_the_machines_is_refused),
        T(test_draining_ends_pool_and_users),
        T(test_an_inactive_pool_starts_nothing_by_itself),
        T(test_the_metrics_tell_hits_misses_states_and_exits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
