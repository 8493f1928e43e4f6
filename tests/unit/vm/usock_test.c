/* Unix sockets below paths that do not fit into sun_path. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/usock.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[] = "/tmp/cv-usock-XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fs_rm_rf(dir, NULL);
}

static void check_pair(const char *path)
{
    int l = vm_usock_listen(path), c, a;
    char byte = 0;
    assert_true(l >= 0);
    c = vm_usock_connect(path); /* before anybody accepts */
    assert_true(c >= 0);
    a = accept(l, NULL, NULL);
    assert_true(a >= 0);
    assert_int_equal(send(c, "x", 1, 0), 1);
    assert_int_equal(recv(a, &byte, 1, 0), 1);
    assert_int_equal(byte, 'x');
    close(a);
    close(c);
    close(l);
}

static void test_a_short_path_works(void **state)
{
    CLEANUP(freep) char *path = fs_join(dir, "s.sock");
    (void)state;
    check_pair(path);
}

static void test_a_path_longer_than_sun_path_works(void **state)
{
    CLEANUP(freep) char *deep = xasprintf("%s/%0100d/%0100d", dir, 1, 2);
    CLEANUP(freep) char *path = fs_join(deep, "s.sock");
    (void)state;
    assert_int_equal(fs_mkdir_p(deep, 0700, NULL), 0);
    assert_true(strlen(path) > 200);
    check_pair(path);
}

static void test_errors_are_told_apart(void **state)
{
    CLEANUP(freep) char *none = xasprintf("%s/none/s.sock", dir);
    CLEANUP(freep) char *dead = fs_join(dir, "dead.sock");
    CLEANUP(freep) char *name = xasprintf("%s/%0150d", dir, 3);
    int l;
    (void)state;
    assert_int_equal(vm_usock_connect(none), -ENOENT);
    assert_int_equal(vm_usock_listen(none), -ENOENT);
    assert_int_equal(vm_usock_listen("nothing"), -EINVAL);
    assert_int_equal(vm_usock_listen(name), -ENAMETOOLONG);
    l = vm_usock_listen(dead);
    assert_true(l >= 0);
    assert_int_equal(vm_usock_listen(dead), -EADDRINUSE);
    close(l);
    assert_int_equal(vm_usock_connect(dead), -ECONNREFUSED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_short_path_works),
        cmocka_unit_test(test_a_path_longer_than_sun_path_works),
        cmocka_unit_test(test_errors_are_told_apart),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
