/* Life of one QEMU process, with a script that plays QEMU. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "fake_program.h"
#include "vm/channel.h"
#include "vm/qemu.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static struct loop *loop;
static struct vm_qemu *qemu;
static char dir[64];
static int mem_fd, n_ready, n_exited, n_done;
static struct vm_exit why;
static struct err done_err;
static bool done_failed, exited_before_done;

static void on_ready(void *ctx)
{
    (void)ctx;
    n_ready++;
}

static void on_exited(void *ctx, const struct vm_exit *x)
{
    (void)ctx;
    n_exited++;
    why = *x;
}

static void on_done(void *ctx, const struct err *e)
{
    (void)ctx;
    n_done++;
    exited_before_done = n_exited > 0;
    done_failed = e != NULL;
    if (e)
        done_err = *e;
}

static const struct vm_qemu_events events = { on_ready, on_exited };

static int setup(void **state)
{
    char *root;
    (void)state;
    loop = loop_new();
    snprintf(dir, sizeof(dir), "/tmp/cv-qemu-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    root = fs_join(dir, "root.erofs");
    fs_write_atomic(root, SLICE_LIT("image"), 0600, NULL);
    free(root);
    mem_fd = memfd_create("ram", MFD_CLOEXEC);
    n_ready = n_exited = n_done = 0;
    done_failed = exited_before_done = false;
    memset(&why, 0, sizeof(why));
    qemu = NULL;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    vm_qemu_free(qemu);
    qemu = NULL;
    close(mem_fd);
    loop_free(loop);
    return fs_rm_rf(dir, NULL);
}

static int start_as(const char *mode, bool boot, struct err *e)
{
    CLEANUP(freep) char *program = fake_program(dir, mode);
    CLEANUP(freep) char *root = fs_join(dir, "root.erofs");
    struct vm_qemu_spec s = { .qemu_path = program,
                              .accel = VM_ACCEL_TCG,
                              .run_dir = dir,
                              .memory_mb = 64,
                              .vcpus = 1,
                              .mem_fd = mem_fd,
                              .mem_private = !boot,
                              .root_image = root };

    if (boot) {
        s.kernel = root;
        s.initrd = root;
        s.cmdline = "quiet";
    }
    return vm_qemu_start(loop, &s, NULL, &events, NULL, &qemu, e);
}

/* Until *flag or ten seconds. */
static bool wait_for(const int *flag)
{
    uint64_t end = loop_now_ms(loop) + 10000;

    while (!*flag && loop_now_ms(loop) < end)
        loop_step(loop, 100);
    return *flag;
}

static int state_file(const char *content)
{
    int fd = memfd_create("state", MFD_CLOEXEC);

    if (write(fd, content, strlen(content)) < 0 || lseek(fd, 0, SEEK_SET) < 0)
        abort();
    return fd;
}

static void load(const char *content)
{
    int fd = state_file(content);

    vm_qemu_load(qemu, fd, on_done, NULL);
    close(fd);
}

static void test_a_clone_becomes_ready_loads_and_runs(void **state)
{
    (void)state;
    assert_int_equal(start_as("ok", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    assert_true(vm_qemu_pid(qemu) > 0);
    load("fake state");
    assert_true(wait_for(&n_done));
    assert_false(done_failed);
    assert_int_equal(n_exited, 0);
}

static void test_the_link_can_be_connected_before_qemu_listens(void **state)
{
    int fd;
    (void)state;
    assert_int_equal(start_as("ok", false, NULL), 0);
    fd = vm_channel_connect(vm_qemu_link_path(qemu));
    assert_true(fd >= 0);
    close(fd);
}

static void test_saving_a_boot_writes_the_state_file(void **state)
{
    int fd = memfd_create("state", MFD_CLOEXEC);
    char text[32] = "";
    (void)state;
    assert_int_equal(start_as("ok", true, NULL), 0);
    assert_true(wait_for(&n_ready));
    vm_qemu_save(qemu, fd, on_done, NULL);
    assert_true(wait_for(&n_done));
    assert_false(done_failed);
    assert_int_equal(pread(fd, text, sizeof(text), 0), 10);
    assert_string_equal(text, "fake state");
    close(fd);
}

static void test_one_operation_at_a_time(void **state)
{
    (void)state;
    assert_int_equal(start_as("nodone", false, NULL), 0);
    load("x"); /* not ready yet */
    assert_int_equal(n_done, 1);
    assert_int_equal(done_err.code, -EBUSY);
    assert_true(wait_for(&n_ready));
    load("x");
    load("x");
    assert_int_equal(n_done, 2);
    assert_int_equal(done_err.code, -EBUSY);
}

static void test_a_refused_load_fails_with_qemus_words(void **state)
{
    (void)state;
    assert_int_equal(start_as("refuse", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    load("fake state");
    assert_true(wait_for(&n_done));
    assert_true(done_failed);
    assert_non_null(strstr(done_err.msg, "this is not my state"));
    assert_int_equal(n_exited, 0); /* the caller decides */
}

static void test_a_foreign_state_ends_qemu_and_both_callbacks_tell(void **state)
{
    (void)state;
    assert_int_equal(start_as("ok", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    load("somebody else's");
    assert_true(wait_for(&n_exited));
    assert_true(done_failed);
    assert_false(exited_before_done);
    assert_int_equal(n_done, 1);
    assert_int_equal(why.reason, VM_EXIT_VMM);
    assert_int_equal(why.code, 1);
    assert_non_null(strstr(why.text, "foreign state"));
    assert_int_equal(vm_qemu_pid(qemu), 0);
}

static void test_an_early_end_quotes_stderr(void **state)
{
    (void)state;
    assert_int_equal(start_as("crash", false, NULL), 0);
    assert_true(wait_for(&n_exited));
    assert_int_equal(n_ready, 0);
    assert_int_equal(why.reason, VM_EXIT_VMM);
    assert_int_equal(why.code, 3);
    assert_non_null(strstr(why.text, "could not do it"));
}

static void test_garbage_instead_of_qmp_kills_it(void **state)
{
    (void)state;
    assert_int_equal(start_as("garbage", false, NULL), 0);
    assert_true(wait_for(&n_exited));
    assert_int_equal(why.reason, VM_EXIT_PROTOCOL);
    assert_non_null(strstr(why.text, "QMP"));
}

static void test_answers_with_wrong_ids_kill_it(void **state)
{
    (void)state;
    assert_int_equal(start_as("badid", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    load("fake state");
    assert_true(wait_for(&n_exited));
    assert_int_equal(why.reason, VM_EXIT_PROTOCOL);
    assert_int_equal(n_done, 1);
    assert_true(done_failed);
}

static void test_a_guest_that_powers_off_is_told_from_a_crash(void **state)
{
    (void)state;
    assert_int_equal(start_as("poweroff", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    load("fake state");
    assert_true(wait_for(&n_exited));
    assert_int_equal(why.reason, VM_EXIT_GUEST);
}

static void test_sigkill_from_outside_is_seen(void **state)
{
    (void)state;
    assert_int_equal(start_as("ok", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    kill(vm_qemu_pid(qemu), SIGKILL);
    assert_true(wait_for(&n_exited));
    assert_int_equal(why.reason, VM_EXIT_VMM);
    assert_int_equal(why.signal, SIGKILL);
}

static void test_our_kill_is_a_release(void **state)
{
    (void)state;
    assert_int_equal(start_as("silent", false, NULL), 0);
    vm_qemu_kill(qemu);
    assert_true(wait_for(&n_exited));
    assert_int_equal(why.reason, VM_EXIT_RELEASED);
    vm_qemu_kill(qemu); /* harmless now */
}

static void test_abandoning_gives_no_callback_and_leaves_no_process(void **state)
{
    int pid;
    (void)state;
    assert_int_equal(start_as("ok", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    pid = vm_qemu_pid(qemu);
    load("fake state");
    vm_qemu_free(qemu);
    qemu = NULL;
    for (int i = 0; i < 10; i++)
        loop_step(loop, 10);
    assert_int_equal(n_exited + n_done, 0);
    assert_int_equal(kill(pid, 0), -1);
    assert_int_equal(errno, ESRCH);
}

static void test_a_console_flood_is_capped_and_its_end_kept(void **state)
{
    CLEANUP(freep) char *log = fs_join(dir, "console.log");
    uint64_t end;
    (void)state;
    assert_int_equal(start_as("console", false, NULL), 0);
    assert_true(wait_for(&n_ready));
    load("fake state");
    assert_true(wait_for(&n_done));
    end = loop_now_ms(loop) + 20000;
    while (!strstr(vm_qemu_console_tail(qemu), "panic") && loop_now_ms(loop) < end)
        loop_step(loop, 100);
    assert_non_null(strstr(vm_qemu_console_tail(qemu), "Kernel panic"));
    assert_true(strlen(vm_qemu_console_tail(qemu)) <= VM_QEMU_CONSOLE_TAIL);
    assert_false(fs_exists(log)); /* clones write no file */
}

static void test_a_missing_qemu_names_the_package(void **state)
{
    struct vm_qemu_spec s = { .qemu_path = "/nowhere/qemu",
                              .accel = VM_ACCEL_TCG,
                              .run_dir = dir,
                              .memory_mb = 64,
                              .vcpus = 1,
                              .mem_fd = mem_fd,
                              .root_image = "/dev/null" };
    struct err e = { 0 };
    char version[32];
    (void)state;
    assert_int_equal(vm_qemu_start(loop, &s, NULL, &events, NULL, &qemu, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "qemu-system-x86"));
    assert_non_null(strstr(e.msg, "/nowhere/qemu"));
    assert_int_equal(vm_qemu_version("/nowhere/qemu", version, &e), -ENOENT);
    assert_int_equal(n_exited, 0);
}

static void test_a_program_that_is_not_qemu_is_refused(void **state)
{
    CLEANUP(freep) char *program = fake_program(dir, "noversion");
    struct err e = { 0 };
    char version[32];
    (void)state;
    assert_int_equal(vm_qemu_version(program, version, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "does not answer like QEMU"));
}

static void test_a_missing_root_image_is_a_clear_error(void **state)
{
    CLEANUP(freep) char *program = fake_program(dir, "ok");
    struct vm_qemu_spec s = { .qemu_path = program,
                              .accel = VM_ACCEL_TCG,
                              .run_dir = dir,
                              .memory_mb = 64,
                              .vcpus = 1,
                              .mem_fd = mem_fd,
                              .root_image = "/nowhere/root.erofs" };
    struct err e = { 0 };
    (void)state;
    assert_int_equal(vm_qemu_start(loop, &s, NULL, &events, NULL, &qemu, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "/nowhere/root.erofs"));
}

static void test_the_fingerprint_changes_with_what_matters(void **state)
{
    CLEANUP(freep) char *program = fake_program(dir, "ok");
    struct vm_qemu_spec s = {
        .qemu_path = program, .accel = VM_ACCEL_TCG, .memory_mb = 64, .vcpus = 1
    };
    char a[65], b[65];
    (void)state;
    assert_int_equal(vm_qemu_fingerprint(&s, a, NULL), 0);
    assert_int_equal(strlen(a), 64);
    assert_int_equal(vm_qemu_fingerprint(&s, b, NULL), 0);
    assert_string_equal(a, b);
    s.memory_mb = 128;
    assert_int_equal(vm_qemu_fingerprint(&s, b, NULL), 0);
    assert_string_not_equal(a, b);
    s.memory_mb = 64;
    s.accel = VM_ACCEL_KVM;
    assert_int_equal(vm_qemu_fingerprint(&s, b, NULL), 0);
    assert_string_not_equal(a, b);
    s.accel = VM_ACCEL_TCG;
    s.vcpus = 2;
    assert_int_equal(vm_qemu_fingerprint(&s, b, NULL), 0);
    assert_string_not_equal(a, b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_clone_becomes_ready_loads_and_runs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_link_can_be_connected_before_qemu_listens, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_saving_a_boot_writes_the_state_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_one_operation_at_a_time, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_refused_load_fails_with_qemus_words, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_foreign_state_ends_qemu_and_both_callbacks_tell,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_an_early_end_quotes_stderr, setup, teardown),
        cmocka_unit_test_setup_teardown(test_garbage_instead_of_qmp_kills_it, setup, teardown),
        cmocka_unit_test_setup_teardown(test_answers_with_wrong_ids_kill_it, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_guest_that_powers_off_is_told_from_a_crash, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_sigkill_from_outside_is_seen, setup, teardown),
        cmocka_unit_test_setup_teardown(test_our_kill_is_a_release, setup, teardown),
        cmocka_unit_test_setup_teardown(test_abandoning_gives_no_callback_and_leaves_no_process,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_console_flood_is_capped_and_its_end_kept, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_missing_qemu_names_the_package, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_program_that_is_not_qemu_is_refused, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_missing_root_image_is_a_clear_error, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_the_fingerprint_changes_with_what_matters, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
