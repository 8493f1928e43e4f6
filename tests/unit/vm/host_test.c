/* The service of this machine with the local backend, whose shim is a program without kernels. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/host.h"
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct loop *loop;
static struct metrics *metrics;
static struct vm_host *host;
static struct vm_host_config cfg;
static char dir[64];
static int n_up, n_down, n_messages, closed;
static struct vm_exit down_why;

static void on_up(void *ctx)
{
    (void)ctx;
    n_up++;
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    (void)stream;
    (void)payload;
    n_messages += type == GL_KERNEL_STATE;
}

static void on_down(void *ctx, const struct vm_exit *why)
{
    (void)ctx;
    n_down++;
    down_why = *why;
}

static const struct vm_events events = { on_up, on_message, NULL, on_down };

static void on_closed(void *ctx)
{
    (void)ctx;
    closed++;
}

static int setup(void **state)
{
    (void)state;
    unsetenv("FAKE_SHIM");
    snprintf(dir, sizeof(dir), "/tmp/cv-host-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    loop = loop_new();
    metrics = metrics_new();
    host = NULL;
    n_up = n_down = n_messages = closed = 0;
    vm_host_config_defaults(&cfg);
    cfg.state_dir = dir;
    cfg.shim_path = FAKE_SHIM;
    cfg.insecure_local = cfg.local_only = true;
    cfg.pool_parked = cfg.pool_deferred = cfg.pool_max = 0;
    return 0;
}

static bool wait_count(const int *n, int want)
{
    uint64_t end = loop_now_ms(loop) + 10000;

    while (*n < want && loop_now_ms(loop) < end)
        loop_step(loop, 50);
    return *n >= want;
}

static int teardown(void **state)
{
    (void)state;
    if (host && !closed) {
        vm_host_close(host, 0, on_closed, NULL);
        wait_count(&closed, 1);
    }
    vm_host_free(host);
    metrics_free(metrics);
    loop_free(loop);
    return fs_rm_rf(dir, NULL);
}

static void make_host(void)
{
    struct err e = { 0 };

    if (vm_host_new(loop, &cfg, metrics, NULL, &host, &e) < 0)
        fail_msg("%s", e.msg);
}

static struct vm *acquire(const char *template_name, struct err *e)
{
    struct vm_request r = { .template_name = template_name };
    struct vm *vm = NULL;

    return vm_acquire(vm_host_service(host), &r, &events, NULL, &vm, e) == 0 ? vm : NULL;
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

static unsigned entries(const char *path)
{
    DIR *d = opendir(path);
    unsigned n = 0;
    struct dirent *ent;

    while (d && (ent = readdir(d)))
        n += ent->d_name[0] != '.';
    if (d)
        closedir(d);
    return n;
}

static const struct vm_template_desc *desc(void)
{
    const struct vm_template_desc *d;

    assert_int_equal(vm_templates(vm_host_service(host), &d), 1);
    return d;
}

static void test_local_is_listed_with_the_kernelspecs_of_this_machine(void **state)
{
    (void)state;
    make_host();
    assert_string_equal(desc()->name, "local");
    assert_true(desc()->ready);
    assert_int_equal(desc()->tier, VM_TIER_LOCAL);
    assert_non_null(json_object_get(json_object_get(desc()->specs, "kernelspecs"), "echo"));
}

static void test_a_sandbox_comes_up_runs_and_leaves_nothing_behind(void **state)
{
    struct slice s = SLICE_LIT("{\"spec\":\"echo\",\"env\":{},\"cwd\":null}");
    CLEANUP(freep) char *run = fs_join(dir, "run");
    struct vm *vm;
    int pid;
    (void)state;
    make_host();
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    pid = vm->info.pid;
    assert_string_equal(vm->info.timings.origin, "local");
    assert_int_equal(desc()->running, 1);
    assert_int_equal(vm_send(vm, GL_KERNEL_START, 3, &s, 1), 0);
    assert_true(wait_count(&n_messages, 1));
    vm_release(vm, 1000);
    assert_true(wait_count(&n_down, 1));
    assert_int_equal(down_why.reason, VM_EXIT_RELEASED);
    assert_int_equal(kill(pid, 0), -1);
    vm_host_close(host, 0, on_closed, NULL);
    assert_true(wait_count(&closed, 1));
    vm_host_free(host);
    host = NULL;
    assert_int_equal(entries(run), 0);
}

static void test_a_local_pool_parks_prepared_shims(void **state)
{
    struct vm *vm;
    (void)state;
    cfg.pool_parked = cfg.pool_max = 2;
    make_host();
    for (int i = 0; i < 200 && desc()->parked < 2; i++)
        loop_step(loop, 50);
    assert_int_equal(desc()->parked, 2);
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    assert_string_equal(vm->info.timings.origin, "parked");
    assert_int_equal(vm->info.kernel_stream, 1);
    assert_string_equal(vm->info.kernel_spec, "echo");
}

static void test_an_unknown_template_is_named_with_what_there_is(void **state)
{
    struct err e = { 0 };
    (void)state;
    make_host();
    assert_null(acquire("rust", &e));
    assert_int_equal(e.code, -ENOENT);
    assert_non_null(strstr(e.msg, "\"rust\""));
    assert_non_null(strstr(e.msg, "local"));
}

static void test_a_shim_that_ends_at_once_is_reported_with_its_last_words(void **state)
{
    (void)state;
    make_host();
    setenv("FAKE_SHIM", "crash", 1);
    assert_non_null(acquire(NULL, NULL));
    assert_true(wait_count(&n_down, 1));
    assert_int_equal(down_why.reason, VM_EXIT_START_FAILED);
    assert_non_null(strstr(down_why.text, "no spoon"));
    assert_int_equal(n_up, 0);
}

static void test_a_shim_without_kernelspecs_is_listed_as_not_ready(void **state)
{
    struct err e = { 0 };
    (void)state;
    setenv("FAKE_SHIM", "nospecs", 1);
    make_host();
    assert_false(desc()->ready);
    assert_non_null(desc()->why_not);
    assert_null(acquire(NULL, &e));
    assert_string_equal(e.msg, desc()->why_not);
}

static void test_a_killed_shim_brings_its_user_down(void **state)
{
    struct vm *vm;
    (void)state;
    make_host();
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    kill(vm->info.pid, SIGKILL);
    assert_true(wait_count(&n_down, 1));
    assert_int_equal(down_why.reason, VM_EXIT_VMM);
    assert_int_equal(down_why.signal, SIGKILL);
}

static void test_many_requests_at_once_all_come_up_in_turn(void **state)
{
    struct vm *vms[12];
    (void)state;
    make_host();
    for (int i = 0; i < 12; i++)
        assert_non_null(vms[i] = acquire(NULL, NULL));
    assert_true(wait_count(&n_up, 12));
    for (int i = 0; i < 12; i++)
        vm_release(vms[i], 0);
    assert_true(wait_count(&n_down, 12));
}

static void test_capacity_is_enforced_and_freed(void **state)
{
    struct err e = { 0 };
    struct vm *vm;
    (void)state;
    cfg.max_vms = 1;
    make_host();
    vm = must_acquire();
    assert_null(acquire(NULL, &e));
    assert_int_equal(e.code, -EAGAIN);
    vm_release(vm, 0);
    assert_true(wait_count(&n_down, 1));
    assert_non_null(acquire(NULL, &e));
}

static void test_closing_ends_everything_and_refuses_new_requests(void **state)
{
    struct err e = { 0 };
    (void)state;
    cfg.pool_parked = cfg.pool_max = 1;
    make_host();
    assert_non_null(acquire(NULL, NULL));
    assert_true(wait_count(&n_up, 1));
    assert_non_null(acquire(NULL, NULL)); /* still starting */
    vm_host_close(host, 100, on_closed, NULL);
    assert_null(acquire(NULL, &e));
    assert_int_equal(e.code, -ESHUTDOWN);
    assert_true(wait_count(&closed, 1));
    assert_int_equal(n_down, 2);
}

static void test_abandoning_the_host_kills_without_callbacks(void **state)
{
    struct vm *vm;
    int pid;
    (void)state;
    make_host();
    vm = must_acquire();
    assert_true(wait_count(&n_up, 1));
    pid = vm->info.pid;
    vm_host_free(host);
    host = NULL;
    for (int i = 0; i < 200 && kill(pid, 0) == 0; i++)
        loop_step(loop, 10); /* it is reaped by the loop */
    assert_int_equal(n_down, 0);
    assert_int_equal(kill(pid, 0), -1);
}

static void test_without_qemu_the_error_names_the_package(void **state)
{
    struct err e = { 0 };
    (void)state;
    cfg.local_only = cfg.insecure_local = false;
    cfg.qemu_path = "/nowhere/qemu-system-x86_64";
    cfg.accel = VM_ACCEL_TCG;
    assert_int_equal(vm_host_new(loop, &cfg, metrics, NULL, &host, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "qemu-system-x86"));
    assert_null(host);
}

static void test_without_qemu_but_with_local_the_rest_works(void **state)
{
    (void)state;
    cfg.local_only = false;
    cfg.qemu_path = "/nowhere/qemu-system-x86_64";
    cfg.accel = VM_ACCEL_TCG;
    make_host();
    assert_true(desc()->ready);
    assert_non_null(acquire(NULL, NULL));
    assert_true(wait_count(&n_up, 1));
}

static void test_the_status_shows_pools_and_budget(void **state)
{
    json_t *status, *pool;
    (void)state;
    cfg.max_vms = 5;
    make_host();
    acquire(NULL, NULL);
    assert_true(wait_count(&n_up, 1));
    status = vm_host_status(host);
    assert_non_null(status);
    assert_int_equal(json_integer_value(json_object_get(status, "max_vms")), 5);
    pool = json_array_get(json_object_get(status, "pools"), 0);
    assert_string_equal(json_string_value(json_object_get(pool, "template")), "local");
    assert_int_equal(json_integer_value(json_object_get(pool, "running")), 1);
    assert_int_equal(json_integer_value(json_object_get(pool, "misses")), 1);
    json_decref(status);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_local_is_listed_with_the_kernelspecs_of_this_machine),
        T(test_a_sandbox_comes_up_runs_and_leaves_nothing_behind),
        T(test_a_local_pool_parks_prepared_shims),
        T(test_an_unknown_template_is_named_with_what_there_is),
        T(test_a_shim_that_ends_at_once_is_reported_with_its_last_words),
        T(test_a_shim_without_kernelspecs_is_listed_as_not_ready),
        T(test_a_killed_shim_brings_its_user_down),
        T(test_many_requests_at_once_all_come_up_in_turn),
        T(test_capacity_is_enforced_and_freed),
        T(test_closing_ends_everything_and_refuses_new_requests),
        T(test_abandoning_the_host_kills_without_callbacks),
        T(test_without_qemu_the_error_names_the_package),
        T(test_without_qemu_but_with_local_the_rest_works),
        T(test_the_status_shows_pools_and_budget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
