/* One VM from spawn to death, on machines that behave and machines that do not. */
#include "common/mem.h"
#include "fake_machine.h"
#include "vm/guest.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct loop *loop;
static struct fake_world world;
static struct vm_template tmpl;
static struct vm_guest_class class;
static char states[400];
static int n_up, n_down, n_gone, n_messages;
static struct vm_exit down_why, gone_why;
static bool release_in_up;
static struct vm *the_vm;
static enum gl_type last_type;

static void on_changed(void *owner, struct vm_guest *g)
{
    (void)owner;
    strncat(states, sm_name(&g->sm), sizeof(states) - strlen(states) - 1);
    strncat(states, " ", sizeof(states) - strlen(states) - 1);
}

static void on_gone(void *owner, struct vm_guest *g, const struct vm_exit *why)
{
    (void)owner;
    (void)g;
    n_gone++;
    gone_why = *why;
}

static const struct vm_guest_ops guest_ops = { on_changed, on_gone };

static void on_up(void *ctx)
{
    (void)ctx;
    n_up++;
    if (release_in_up)
        vm_release(the_vm, 0);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    (void)stream;
    (void)payload;
    n_messages++;
    last_type = type;
}

static void on_down(void *ctx, const struct vm_exit *why)
{
    (void)ctx;
    n_down++;
    down_why = *why;
}

static const struct vm_events events = { on_up, on_message, NULL, on_down };

static int setup(void **state)
{
    (void)state;
    loop = loop_new();
    fake_world_init(&world, loop);
    tmpl = (struct vm_template) { .name = (char *)(uintptr_t) "python",
                                  .memory_mb = 512,
                                  .default_spec = (char *)(uintptr_t) "python3",
                                  .kernel_info = (char *)(uintptr_t) "{\"status\":\"ok\"}",
                                  .warmup = (char *)(uintptr_t) "1+1" };
    class = (struct vm_guest_class) { .loop = loop,
                                      .backend = &world.base,
                                      .tmpl = &tmpl,
                                      .mem_fd = -1,
                                      .name = "python",
                                      .tier = VM_TIER_TCG,
                                      .default_spec = "python3",
                                      .start_timeout_ms = 20000,
                                      .ops = &guest_ops };
    log_ctx_init(&class.log, NULL);
    states[0] = '\0';
    n_up = n_down = n_gone = n_messages = 0;
    release_in_up = false;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fake_world_fini(&world);
    loop_free(loop);
    return world.alive ? -1 : 0;
}

static bool wait_for(const int *flag)
{
    uint64_t end = loop_now_ms(loop) + 10000;

    while (!*flag && loop_now_ms(loop) < end)
        loop_step(loop, 100);
    return *flag;
}

static void settle(void)
{
    for (int i = 0; i < 20; i++)
        loop_step(loop, 1);
}

static bool wait_state(struct vm_guest *g, enum vm_guest_state s)
{
    uint64_t end = loop_now_ms(loop) + 10000;

    while (vm_guest_state(g) != s && loop_now_ms(loop) < end)
        loop_step(loop, 10);
    return vm_guest_state(g) == s;
}

static struct vm_guest *begin(enum vm_guest_goal goal)
{
    struct vm_guest *g = vm_guest_new(&class, goal);

    the_vm = &g->vm;
    assert_int_equal(vm_guest_start(g, NULL), 0);
    return g;
}

static struct vm_guest *begin_for_user(const struct vm_request *r)
{
    static const struct vm_request plain = { .template_name = "python" };
    struct vm_guest *g = vm_guest_new(&class, VM_GOAL_RUN);

    the_vm = &g->vm;
    vm_guest_claim(g, r ? r : &plain, &events, NULL);
    assert_int_equal(vm_guest_start(g, NULL), 0);
    return g;
}

/* A start that must end in down() with this reason and words. */
static void expect_failed_start(enum fake_mode mode, enum vm_exit_reason reason, const char *words)
{
    world.mode = mode;
    begin_for_user(NULL);
    assert_true(wait_for(&n_down));
    assert_int_equal(n_up, 0);
    assert_int_equal(n_gone, 1);
    assert_int_equal(down_why.reason, reason);
    if (!strstr(down_why.text, words))
        print_message("text is: %s\n", down_why.text);
    assert_non_null(strstr(down_why.text, words));
    settle();
    assert_int_equal(n_down, 1);
    assert_int_equal(world.alive, 0);
}

static void test_a_cold_start_goes_through_every_state(void **state)
{
    struct vm_guest *g = begin_for_user(NULL);
    (void)state;
    assert_true(wait_for(&n_up));
    assert_string_equal(states, "spawning deferred loading linking resuming assigning running ");
    assert_string_equal(g->vm.info.timings.origin, "cold");
    assert_true(g->vm.info.timings.total_ms > 0);
    assert_true(g->vm.info.timings.guest_entropy_ms > 0);
    assert_true(g->vm.info.timings.guest_hooks_ms > 0);
    assert_int_equal(g->vm.info.kernel_stream, 1);
    assert_string_equal(g->vm.info.kernel_spec, "python3");
    assert_string_equal(g->vm.info.kernel_info, "{\"status\":\"ok\"}");
    vm_release(the_vm, 0);
    assert_true(wait_for(&n_down));
    assert_int_equal(down_why.reason, VM_EXIT_RELEASED);
}

static void test_nobody_waits_means_warmup_and_somebody_waits_means_none(void **state)
{
    struct vm_guest *g;
    (void)state;
    begin_for_user(NULL);
    assert_true(wait_for(&n_up));
    assert_true(json_is_null(json_object_get(world.resume, "warmup")));
    vm_release(the_vm, 0);
    assert_true(wait_for(&n_down));
    g = begin(VM_GOAL_PARKED);
    assert_true(wait_state(g, VM_GUEST_PARKED));
    assert_string_equal(json_string_value(json_object_get(world.resume, "warmup")), "1+1");
    vm_guest_free(g);
}

static void test_every_resume_brings_fresh_entropy_identity_and_the_time(void **state)
{
    char entropy[200], machine_id[64], hostname[64];
    json_int_t generation, us;
    (void)state;
    struct vm_guest *a = begin(VM_GOAL_PARKED);
    assert_true(wait_state(a, VM_GUEST_PARKED));
    snprintf(entropy, sizeof(entropy), "%s",
             json_string_value(json_object_get(world.resume, "entropy")));
    snprintf(machine_id, sizeof(machine_id), "%s",
             json_string_value(json_object_get(world.resume, "machine_id")));
    snprintf(hostname, sizeof(hostname), "%s",
             json_string_value(json_object_get(world.resume, "hostname")));
    generation = json_integer_value(json_object_get(world.resume, "generation"));
    us = json_integer_value(json_object_get(world.resume, "realtime_us"));
    assert_int_equal(strlen(entropy), 88); /* base64 of 64 bytes */
    assert_int_equal(strlen(machine_id), 32);
    assert_true(us > 1700000000000000);
    struct vm_guest *b = begin(VM_GOAL_PARKED);
    assert_true(wait_state(b, VM_GUEST_PARKED));
    assert_string_not_equal(entropy, json_string_value(json_object_get(world.resume, "entropy")));
    assert_string_not_equal(machine_id,
                            json_string_value(json_object_get(world.resume, "machine_id")));
    assert_string_not_equal(hostname, json_string_value(json_object_get(world.resume, "hostname")));
    assert_true(json_integer_value(json_object_get(world.resume, "generation")) > generation);
    vm_guest_free(a);
    vm_guest_free(b);
}

static void test_a_parked_vm_is_assigned_with_one_message(void **state)
{
    struct vm_guest *g = begin(VM_GOAL_PARKED);
    json_t *env = json_pack("{s:s}", "LANG", "C.UTF-8");
    struct vm_request r = { .hostname = "lab", .cwd = "/work", .env = env };
    (void)state;
    assert_true(wait_state(g, VM_GUEST_PARKED));
    assert_int_equal(world.background, 1);
    vm_guest_claim(g, &r, &events, NULL);
    assert_int_equal(n_up, 0); /* never from inside the call */
    assert_true(wait_for(&n_up));
    assert_string_equal(g->vm.info.timings.origin, "parked");
    assert_int_equal(world.resumes, 1);
    assert_true(g->vm.info.timings.spawn_ms == 0 && g->vm.info.timings.resume_ms == 0);
    assert_string_equal(json_string_value(json_object_get(world.assign, "hostname")), "lab");
    assert_string_equal(json_string_value(json_object_get(world.assign, "cwd")), "/work");
    assert_true(json_equal(json_object_get(world.assign, "env"), env));
    json_decref(env);
    vm_guest_free(g);
}

static void test_a_deferred_vm_waits_and_then_loads(void **state)
{
    struct vm_guest *g = begin(VM_GOAL_DEFERRED);
    struct vm_request r = { 0 };
    (void)state;
    assert_true(wait_state(g, VM_GUEST_DEFERRED));
    settle();
    assert_int_equal(vm_guest_state(g), VM_GUEST_DEFERRED);
    assert_int_equal(world.resumes, 0);
    vm_guest_claim(g, &r, &events, NULL);
    assert_true(wait_for(&n_up));
    assert_string_equal(g->vm.info.timings.origin, "deferred");
    vm_guest_free(g);
}

/* Whoever wants another kernel must know which stream is taken. */
static void test_the_templates_kernel_is_told_even_to_who_wants_another(void **state)
{
    struct vm_request r = { .spec = "bash" };
    struct vm_guest *g = begin_for_user(&r);
    (void)state;
    assert_true(wait_for(&n_up));
    assert_int_equal(g->vm.info.kernel_stream, 1);
    assert_string_equal(g->vm.info.kernel_spec, "python3");
    vm_guest_free(g);
}

static void test_a_local_shim_prepares_its_kernel_for_the_pool_only(void **state)
{
    struct vm_guest *g;
    (void)state;
    class.tmpl = NULL;
    class.tier = VM_TIER_LOCAL;
    g = begin(VM_GOAL_PARKED);
    assert_true(wait_state(g, VM_GUEST_PARKED));
    assert_string_equal(states, "spawning deferred loading linking preparing resuming parked ");
    assert_string_equal(json_string_value(json_object_get(world.prepare, "spec")), "python3");
    assert_int_equal(g->vm.info.kernel_stream, 1);
    assert_string_equal(g->vm.info.kernel_info, "{\"implementation\":\"fake\"}");
    vm_guest_free(g);
    g = begin_for_user(NULL);
    assert_true(wait_for(&n_up));
    assert_int_equal(world.prepares, 1);
    assert_int_equal(g->vm.info.kernel_stream, 0);
    assert_string_equal(g->vm.info.timings.origin, "local");
    vm_guest_free(g);
}

static void test_frames_pass_only_while_running(void **state)
{
    struct vm_guest *g = begin_for_user(NULL);
    struct slice s = SLICE_LIT("{\"id\":1,\"op\":\"interrupt\"}");
    (void)state;
    assert_int_equal(vm_send(the_vm, GL_KERNEL_CTL, 1, &s, 1), -ENOTCONN);
    assert_true(wait_for(&n_up));
    assert_int_equal(vm_send(the_vm, GL_KERNEL_CTL, 1, &s, 1), 0);
    settle();
    assert_int_equal(fake_received(fake_first(&world), GL_KERNEL_CTL), 1);
    fake_send(fake_first(&world), GL_KERNEL_STATE, 1, "{\"state\":\"running\"}");
    assert_true(wait_for(&n_messages));
    assert_int_equal(last_type, GL_KERNEL_STATE);
    vm_release(the_vm, 0);
    assert_int_equal(vm_send(the_vm, GL_KERNEL_CTL, 1, &s, 1), -ENOTCONN);
    assert_true(wait_for(&n_down));
    (void)g;
}

static void test_ping_is_answered_and_logs_are_not_passed_on(void **state)
{
    struct vm_guest *g = begin_for_user(NULL);
    (void)state;
    assert_true(wait_for(&n_up));
    for (int i = 0; i < 200; i++)
        fake_send(fake_first(&world), GL_LOG, 0, "{\"level\":\"debug\",\"text\":\"flood\"}");
    fake_send(fake_first(&world), GL_PING, 0, "abc");
    for (int i = 0; i < 100 && !fake_received(fake_first(&world), GL_PONG); i++)
        loop_step(loop, 10);
    assert_int_equal(fake_received(fake_first(&world), GL_PONG), 1);
    assert_int_equal(n_messages, 0);
    assert_int_equal(n_down, 0);
    assert_true(g->log_dropped > 100);
    vm_guest_free(g);
}

static void test_release_with_grace_asks_the_guest_first(void **state)
{
    begin_for_user(NULL);
    (void)state;
    assert_true(wait_for(&n_up));
    vm_release(the_vm, 5000);
    vm_release(the_vm, 5000);
    assert_true(wait_for(&n_down));
    assert_int_equal(world.shutdowns, 1);
    assert_int_equal(down_why.reason, VM_EXIT_RELEASED);
    assert_int_equal(n_down, 1);
}

static void test_release_cancels_a_start_at_any_stage(void **state)
{
    (void)state;
    for (int steps = 0; steps < 14; steps++) {
        struct vm_guest *g = vm_guest_new(&class, VM_GOAL_RUN);
        struct vm_request r = { 0 };

        n_up = n_down = n_gone = 0;
        the_vm = &g->vm;
        vm_guest_claim(g, &r, &events, NULL);
        if (steps > 0)
            assert_int_equal(vm_guest_start(g, NULL), 0);
        for (int i = 0; i < steps; i++)
            loop_step(loop, 1);
        vm_release(the_vm, 0);
        assert_int_equal(n_down, 0);
        assert_true(wait_for(&n_down));
        assert_int_equal(down_why.reason, VM_EXIT_RELEASED);
        settle();
        assert_int_equal(n_down, 1);
        assert_int_equal(n_gone, 1);
        assert_int_equal(world.alive, 0);
    }
}

static void test_release_from_inside_up_works(void **state)
{
    (void)state;
    release_in_up = true;
    begin_for_user(NULL);
    assert_true(wait_for(&n_down));
    assert_int_equal(n_up, 1);
    assert_int_equal(down_why.reason, VM_EXIT_RELEASED);
}

static void test_a_machine_that_dies_fails_the_start_with_stage_and_cause(void **state)
{
    (void)state;
    expect_failed_start(FAKE_DIES_SPAWNING, VM_EXIT_START_FAILED,
                        "starting the VMM: died while spawning");
    teardown(state);
    setup(state);
    expect_failed_start(FAKE_DIES_LOADING, VM_EXIT_START_FAILED,
                        "loading the snapshot: load of migration failed");
}

static void test_a_refused_resume_is_fail_closed(void **state)
{
    (void)state;
    expect_failed_start(FAKE_RESUME_REFUSED, VM_EXIT_START_FAILED, "entropy: not permitted");
    assert_int_equal(world.assigns, 0);
}

static void test_a_resume_without_proof_of_its_steps_is_fail_closed(void **state)
{
    (void)state;
    expect_failed_start(FAKE_RESUME_UNPROVEN, VM_EXIT_START_FAILED, "reseeded");
    assert_int_equal(world.assigns, 0);
}

static void test_a_refused_assignment_fails_the_start(void **state)
{
    (void)state;
    expect_failed_start(FAKE_ASSIGN_REFUSED, VM_EXIT_START_FAILED, "no such folder");
}

static void test_another_link_version_asks_for_a_rebuild(void **state)
{
    (void)state;
    expect_failed_start(FAKE_OLD_VERSION, VM_EXIT_START_FAILED, "rebuild the template");
}

static void test_garbage_on_the_link_kills_the_vm(void **state)
{
    (void)state;
    expect_failed_start(FAKE_GARBAGE, VM_EXIT_PROTOCOL, "guest link");
}

static void test_frames_out_of_turn_kill_the_vm(void **state)
{
    (void)state;
    expect_failed_start(FAKE_TWO_HELLOS, VM_EXIT_PROTOCOL, "hello out of turn");
    teardown(state);
    setup(state);
    expect_failed_start(FAKE_ASSIGNED_EARLY, VM_EXIT_PROTOCOL, "assigned out of turn");
}

static void test_garbage_while_running_kills_the_vm_too(void **state)
{
    begin_for_user(NULL);
    (void)state;
    assert_true(wait_for(&n_up));
    fake_write(fake_first(&world),
               "\x7f"
               "ELF garbage garbage",
               18);
    assert_true(wait_for(&n_down));
    assert_int_equal(down_why.reason, VM_EXIT_PROTOCOL);
}

static void test_a_silent_guest_meets_the_start_deadline(void **state)
{
    (void)state;
    class.start_timeout_ms = 100;
    expect_failed_start(FAKE_SILENT, VM_EXIT_DEADLINE, "waiting for the guest");
    teardown(state);
    setup(state);
    class.start_timeout_ms = 100;
    expect_failed_start(FAKE_NEVER_SPAWNED, VM_EXIT_DEADLINE, "starting the VMM");
    teardown(state);
    setup(state);
    class.start_timeout_ms = 100;
    expect_failed_start(FAKE_RESUME_HANGS, VM_EXIT_DEADLINE, "entropy, clock and identity");
}

static void test_a_guest_that_missed_our_hello_gets_another(void **state)
{
    (void)state;
    world.mode = FAKE_DEAF_ONCE;
    begin_for_user(NULL);
    assert_true(wait_for(&n_up));
    assert_true(fake_received(fake_first(&world), GL_HELLO) >= 2);
    assert_int_equal(world.spawned, 1);
    vm_release(the_vm, 0);
    assert_true(wait_for(&n_down));
}

static void test_a_start_that_hangs_gets_one_more_vmm(void **state)
{
    (void)state;
    world.mode = FAKE_SILENT_ONCE;
    class.hello_ms = 100;
    begin_for_user(NULL);
    assert_true(wait_for(&n_up));
    assert_int_equal(world.spawned, 2);
    vm_release(the_vm, 0);
    assert_true(wait_for(&n_down));
    teardown(state);
    setup(state);
    class.hello_ms = 100;
    expect_failed_start(FAKE_SILENT, VM_EXIT_DEADLINE, "waiting for the guest took too long");
    assert_int_equal(world.spawned, 2);
}

static void test_a_guest_that_closes_its_link_is_ended(void **state)
{
    (void)state;
    expect_failed_start(FAKE_LINK_CLOSES, VM_EXIT_GUEST, "closed its link");
}

static void test_a_killed_machine_brings_the_user_down_at_once(void **state)
{
    begin_for_user(NULL);
    (void)state;
    assert_true(wait_for(&n_up));
    fake_die(fake_first(&world), "QEMU was killed by signal 9");
    assert_true(wait_for(&n_down));
    assert_int_equal(down_why.reason, VM_EXIT_VMM);
    assert_int_equal(down_why.signal, 9);
    assert_non_null(strstr(down_why.text, "signal 9"));
}

static void test_a_pooled_vm_that_dies_under_its_new_user_is_started_again_once(void **state)
{
    struct vm_guest *g = begin(VM_GOAL_PARKED);
    struct vm_request r = { 0 };
    (void)state;
    assert_true(wait_state(g, VM_GUEST_PARKED));
    fake_die(fake_first(&world), "somebody killed it");
    vm_guest_claim(g, &r, &events, NULL); /* we do not know yet */
    assert_true(wait_for(&n_up));
    assert_int_equal(n_down, 0);
    assert_int_equal(world.spawned, 2);
    assert_string_equal(g->vm.info.timings.origin, "cold");
    vm_release(the_vm, 0);
    assert_true(wait_for(&n_down));
}

static void test_a_second_death_is_told_to_the_user(void **state)
{
    struct vm_guest *g = begin(VM_GOAL_PARKED);
    struct vm_request r = { 0 };
    (void)state;
    assert_true(wait_state(g, VM_GUEST_PARKED));
    world.mode = FAKE_DIES_LOADING;
    fake_die(fake_first(&world), "somebody killed it");
    vm_guest_claim(g, &r, &events, NULL);
    assert_true(wait_for(&n_down));
    assert_int_equal(n_up, 0);
    assert_int_equal(world.spawned, 2);
    assert_int_equal(down_why.reason, VM_EXIT_START_FAILED);
}

static void test_a_parked_vm_whose_kernel_ends_is_given_up(void **state)
{
    struct vm_guest *g = begin(VM_GOAL_PARKED);
    (void)state;
    assert_true(wait_state(g, VM_GUEST_PARKED));
    fake_send(fake_first(&world), GL_KERNEL_STATE, 1, "{\"state\":\"exited\"}");
    assert_true(wait_for(&n_gone));
    assert_non_null(strstr(gone_why.text, "kernel ended"));
    assert_int_equal(n_down, 0);
}

static void test_a_snapshot_without_its_kernel_is_not_parked(void **state)
{
    (void)state;
    world.mode = FAKE_NO_KERNEL;
    begin(VM_GOAL_PARKED);
    assert_true(wait_for(&n_gone));
    assert_non_null(strstr(gone_why.text, "kernel does not run"));
}

static void test_the_state_table_lets_nothing_used_go_back_to_the_pool(void **state)
{
    char *text = sm_describe(&vm_guest_machine);
    struct sm m;
    (void)state;
    sm_init(&m, &vm_guest_machine, VM_GUEST_RUNNING);
    assert_false(sm_can(&m, VM_GUEST_PARKED));
    assert_false(sm_can(&m, VM_GUEST_ASSIGNING));
    assert_false(sm_can(&m, VM_GUEST_SPAWNING));
    sm_init(&m, &vm_guest_machine, VM_GUEST_DEAD);
    for (unsigned s = 0; s < VM_GUEST_DEAD; s++)
        assert_false(sm_can(&m, s));
    assert_non_null(strstr(text, "parked"));
    free(text);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_a_cold_start_goes_through_every_state),
        T(test_nobody_waits_means_warmup_and_somebody_waits_means_none),
        T(test_every_resume_brings_fresh_entropy_identity_and_the_time),
        T(test_a_parked_vm_is_assigned_with_one_message),
        T(test_a_deferred_vm_waits_and_then_loads),
        T(test_the_templates_kernel_is_told_even_to_who_wants_another),
        T(test_a_local_shim_prepares_its_kernel_for_the_pool_only),
        T(test_frames_pass_only_while_running),
        T(test_ping_is_answered_and_logs_are_not_passed_on),
        T(test_release_with_grace_asks_the_guest_first),
        T(test_release_cancels_a_start_at_any_stage),
        T(test_release_from_inside_up_works),
        T(test_a_machine_that_dies_fails_the_start_with_stage_and_cause),
        T(test_a_refused_resume_is_fail_closed),
        T(test_a_resume_without_proof_of_its_steps_is_fail_closed),
        T(test_a_refused_assignment_fails_the_start),
        T(test_another_link_version_asks_for_a_rebuild),
        T(test_garbage_on_the_link_kills_the_vm),
        T(test_frames_out_of_turn_kill_the_vm),
        T(test_garbage_while_running_kills_the_vm_too),
        T(test_a_silent_guest_meets_the_start_deadline),
        T(test_a_guest_that_missed_our_hello_gets_another),
        T(test_a_start_that_hangs_gets_one_more_vmm),
        T(test_a_guest_that_closes_its_link_is_ended),
        T(test_a_killed_machine_brings_the_user_down_at_once),
        T(test_a_pooled_vm_that_dies_under_its_new_user_is_started_again_once),
        T(test_a_second_death_is_told_to_the_user),
        T(test_a_parked_vm_whose_kernel_ends_is_given_up),
        T(test_a_snapshot_without_its_kernel_is_not_parked),
        T(test_the_state_table_lets_nothing_used_go_back_to_the_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
