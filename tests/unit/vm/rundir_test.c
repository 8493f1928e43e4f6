/* STATE/run: what living hosts own stays, what dead ones left goes. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/rundir.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char state_dir[] = "/tmp/cv-rundir-XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(state_dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fs_rm_rf(state_dir, NULL);
}

static void test_the_folder_is_private_and_goes_away(void **state)
{
    struct vm_rundir d = { 0 };
    struct stat st;
    CLEANUP(freep) char *path = NULL;
    (void)state;
    assert_int_equal(vm_rundir_open(state_dir, &d, NULL), 0);
    assert_int_equal(stat(d.path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    path = xstrdup(d.path);
    vm_rundir_close(&d);
    assert_false(fs_exists(path));
    vm_rundir_close(&d); /* idempotent */
}

static void test_two_hosts_do_not_disturb_each_other(void **state)
{
    struct vm_rundir a = { 0 }, b = { 0 };
    (void)state;
    assert_int_equal(vm_rundir_open(state_dir, &a, NULL), 0);
    assert_int_equal(vm_rundir_open(state_dir, &b, NULL), 0);
    assert_string_not_equal(a.path, b.path);
    assert_true(fs_exists(a.path));
    vm_rundir_close(&a);
    assert_true(fs_exists(b.path));
    vm_rundir_close(&b);
}

static void test_leftovers_of_a_killed_host_are_removed(void **state)
{
    CLEANUP(freep) char *stale = xasprintf("%s/run/host-dead", state_dir);
    CLEANUP(freep) char *deep = xasprintf("%s/vm-1", stale);
    CLEANUP(freep) char *other = xasprintf("%s/run/notes", state_dir);
    struct vm_rundir d = { 0 };
    (void)state;
    assert_int_equal(fs_mkdir_p(deep, 0700, NULL), 0);
    assert_int_equal(fs_mkdir_p(other, 0700, NULL), 0);
    assert_int_equal(vm_rundir_open(state_dir, &d, NULL), 0);
    assert_false(fs_exists(stale));
    assert_true(fs_exists(other)); /* not ours to judge */
    vm_rundir_close(&d);
}

static void test_a_state_directory_that_cannot_be_made_is_a_clear_error(void **state)
{
    struct vm_rundir d = { 0 };
    struct err e = { 0 };
    (void)state;
    assert_true(vm_rundir_open("/proc/nowhere", &d, &e) < 0);
    assert_non_null(strstr(e.msg, "/proc/nowhere"));
    assert_null(d.path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_folder_is_private_and_goes_away),
        cmocka_unit_test(test_two_hosts_do_not_disturb_each_other),
        cmocka_unit_test(test_leftovers_of_a_killed_host_are_removed),
        cmocka_unit_test(test_a_state_directory_that_cannot_be_made_is_a_clear_error),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
