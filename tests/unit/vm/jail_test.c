/* What the jail's prefix does to a process, seen from inside. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "vm/jail.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

static struct buf out;

/* Runs `program arg` in the jail with its limits; its output in `out`. */
static int run_jailed(unsigned uid, const char *program, const char *arg)
{
    struct vm_jail j;
    const char *argv[32];
    struct proc_spec spec = { .argv = argv };
    char path[64];
    size_t n = 0;
    int fd = memfd_create("out", MFD_CLOEXEC), r;

    assert_int_equal(vm_jail_prefix(uid, false, &j, NULL), 0);
    for (; j.prefix[n]; n++)
        argv[n] = j.prefix[n];
    argv[n++] = program;
    argv[n++] = arg;
    argv[n] = NULL;
    spec.n_limits = vm_jail_limits(&spec.limits);
    r = proc_run(&spec, fd, NULL);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    assert_int_equal(fs_read_file(path, 65536, &out, NULL), 0);
    close(fd);
    assert_non_null(buf_cstr(&out));
    return r;
}

static int teardown(void **state)
{
    (void)state;
    buf_fini(&out);
    return 0;
}

static void test_no_privileges_are_left(void **state)
{
    unsigned uid = vm_jail_uid(7);
    char want[64];
    (void)state;
    assert_int_equal(run_jailed(uid, "cat", "/proc/self/status"), 0);
    const char *text = buf_cstr(&out);
    assert_non_null(strstr(text, "NoNewPrivs:\t1"));
    assert_non_null(strstr(text, "CapInh:\t0000000000000000"));
    if (geteuid() != 0)
        return;
    assert_non_null(strstr(text, "CapEff:\t0000000000000000"));
    assert_non_null(strstr(text, "CapPrm:\t0000000000000000"));
    assert_non_null(strstr(text, "CapBnd:\t0000000000000000"));
    snprintf(want, sizeof(want), "Uid:\t%u\t%u\t%u\t%u", uid, uid, uid, uid);
    assert_non_null(strstr(text, want));
    snprintf(want, sizeof(want), "Gid:\t%u\t%u\t%u\t%u", uid, uid, uid, uid);
    assert_non_null(strstr(text, want));
    assert_non_null(strstr(text, "Groups:\t \n"));
}

static void test_limits_are_in_force(void **state)
{
    (void)state;
    assert_int_equal(run_jailed(vm_jail_uid(7), "cat", "/proc/self/limits"), 0);
    const char *text = buf_cstr(&out);
    assert_non_null(strstr(text, "Max core file size        0                    0"));
    assert_non_null(strstr(text, "Max open files            256                  256"));
    assert_non_null(strstr(text, "Max file size             67108864             67108864"));
}

static void test_every_slot_has_a_uid_of_its_own_when_we_are_root(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        assert_int_equal(vm_jail_uid(0), 0);
        return;
    }
    assert_int_not_equal(vm_jail_uid(0), 0);
    if (vm_jail_uid(0) == 65534)
        return; /* a small user namespace */
    assert_int_equal(vm_jail_uid(1), vm_jail_uid(0) + 1);
    assert_int_equal(vm_jail_uid(VM_JAIL_SLOTS - 1), vm_jail_uid(0) + VM_JAIL_SLOTS - 1);
    assert_int_equal(vm_jail_uid(VM_JAIL_SLOTS), vm_jail_uid(0));
}

static void test_files_of_the_owner_are_out_of_reach(void **state)
{
    char path[] = "/tmp/cv-jail-XXXXXX";
    int fd = mkstemp(path);
    (void)state;
    assert_true(fd >= 0);
    if (geteuid() == 0)
        assert_int_not_equal(run_jailed(vm_jail_uid(7), "cat", path), 0);
    unlink(path);
    close(fd);
}

static void test_the_prefix_is_terminated_and_fits(void **state)
{
    struct vm_jail j;
    size_t n = 0;
    (void)state;
    assert_int_equal(vm_jail_prefix(UINT32_MAX, true, &j, NULL), 0);
    while (j.prefix[n])
        n++;
    assert_in_range(n, 4, 20);
    assert_string_equal(j.prefix[n - 1], "--");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_no_privileges_are_left, teardown),
        cmocka_unit_test_teardown(test_limits_are_in_force, teardown),
        cmocka_unit_test(test_every_slot_has_a_uid_of_its_own_when_we_are_root),
        cmocka_unit_test_teardown(test_files_of_the_owner_are_out_of_reach, teardown),
        cmocka_unit_test(test_the_prefix_is_terminated_and_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
