#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/store.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmocka.h>

static char *dir;

static int setup(void **state)
{
    (void)state;
    char path[] = "/tmp/cv-store-test-XXXXXX";
    if (!mkdtemp(path))
        return -1;
    dir = xstrdup(path);
    return vm_store_init(dir, NULL);
}

static int teardown(void **state)
{
    (void)state;
    int r = fs_rm_rf(dir, NULL);
    free(dir);
    return r;
}

static void write_file(const char *where, const char *name, const char *text)
{
    CLEANUP(freep) char *folder = fs_join(dir, where);
    CLEANUP(freep) char *path = fs_join(folder, name);
    assert_int_equal(fs_mkdir_p(folder, 0755, NULL), 0);
    assert_int_equal(fs_write_atomic(path, slice_str(text), 0644, NULL), 0);
}

static bool there(const char *what)
{
    CLEANUP(freep) char *path = fs_join(dir, what);
    struct stat st;
    return lstat(path, &st) == 0;
}

static void make_build(const char *hash)
{
    CLEANUP(freep) char *where = xasprintf("builds/%s", hash);
    write_file(where, "manifest.json", "{}");
}

static void test_a_published_template_is_found_and_replaced(void **state)
{
    (void)state;
    CLEANUP(freep) char *first = NULL;
    CLEANUP(freep) char *second = NULL;
    make_build("h1");
    make_build("h2");
    assert_int_equal(vm_store_publish(dir, "a", "h1", NULL), 0);
    assert_int_equal(vm_store_current(dir, "a", &first, NULL), 0);
    assert_non_null(strstr(first, "/builds/h1"));
    assert_int_equal(vm_store_publish(dir, "a", "h2", NULL), 0);
    assert_int_equal(vm_store_current(dir, "a", &second, NULL), 0);
    assert_non_null(strstr(second, "/builds/h2"));
    assert_false(there("templates/.new-a"));
}

static void test_a_template_that_is_not_built_says_how_to_build_it(void **state)
{
    (void)state;
    char *path = NULL;
    struct err e = { 0 };
    assert_int_equal(vm_store_current(dir, "a", &path, &e), -ENOENT);
    assert_null(path);
    assert_non_null(strstr(e.msg, "cellvisor template build a"));
    assert_int_equal(vm_store_unpublish(dir, "a", &e), -ENOENT);
}

static void test_names_are_sorted_and_only_finished_builds_count(void **state)
{
    (void)state;
    make_build("h1");
    write_file("builds/h2", "root.erofs", "half");
    assert_int_equal(vm_store_publish(dir, "zeta", "h1", NULL), 0);
    assert_int_equal(vm_store_publish(dir, "alpha", "h1", NULL), 0);
    assert_int_equal(vm_store_publish(dir, "half", "h2", NULL), 0);
    assert_int_equal(vm_store_publish(dir, "gone", "h3", NULL), 0);
    json_t *names = vm_store_names(dir);
    assert_int_equal(json_array_size(names), 2);
    assert_string_equal(json_string_value(json_array_get(names, 0)), "alpha");
    assert_string_equal(json_string_value(json_array_get(names, 1)), "zeta");
    json_decref(names);
}

static void test_a_second_builder_learns_who_holds_the_lock(void **state)
{
    (void)state;
    int ready[2], go[2], fd = -1, status;
    char c = 0;
    pid_t holder = 0;
    assert_int_equal(pipe(ready) | pipe(go), 0);
    pid_t child = fork();
    if (child == 0) {
        int mine;
        c = vm_store_try_lock(dir, "k", &mine, &holder, NULL) == 0 ? 'y' : 'n';
        if (write(ready[1], &c, 1) != 1 || read(go[0], &c, 1) != 1)
            _exit(1);
        _exit(0);
    }
    assert_int_equal(read(ready[0], &c, 1), 1);
    struct err e = { 0 };
    int while_held = vm_store_try_lock(dir, "k", &fd, &holder, &e);
    pid_t seen = holder;
    assert_int_equal(write(go[1], "x", 1), 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    int after = vm_store_try_lock(dir, "k", &fd, &holder, NULL);
    close(fd);
    for (int i = 0; i < 2; i++) {
        close(ready[i]);
        close(go[i]);
    }
    assert_int_equal(c, 'y');
    assert_int_equal(while_held, -EBUSY);
    assert_int_equal(seen, child);
    assert_int_equal(after, 0); /* a dead holder holds nothing */
}

static void test_shared_locks_exclude_builders_only(void **state)
{
    (void)state;
    int one = -1, two = -1, builder = -1;
    pid_t holder = 0;
    assert_int_equal(vm_store_try_share(dir, "k", &one, NULL), 0);
    assert_int_equal(vm_store_try_share(dir, "k", &two, NULL), 0);
    int while_shared = vm_store_try_lock(dir, "k", &builder, &holder, NULL);
    close(one);
    close(two);
    assert_int_equal(vm_store_try_lock(dir, "k", &builder, &holder, NULL), 0);
    int while_built = vm_store_try_share(dir, "k", &one, NULL);
    assert_int_equal(vm_store_share_lock(builder), 0);
    int after = vm_store_try_share(dir, "k", &two, NULL);
    close(builder);
    close(two);
    assert_int_equal(while_shared, -EBUSY);
    assert_int_equal(while_built, -EBUSY);
    assert_int_equal(after, 0);
}

static void test_clean_removes_what_no_name_points_at(void **state)
{
    (void)state;
    make_build("old");
    make_build("new");
    assert_int_equal(vm_store_publish(dir, "a", "new", NULL), 0);
    vm_store_clean(dir, false);
    assert_false(there("builds/old"));
    assert_true(there("builds/new/manifest.json"));
}

static void test_clean_leaves_a_build_that_is_in_use(void **state)
{
    (void)state;
    int use = -1;
    CLEANUP(freep) char *build = fs_join(dir, "builds/old");
    make_build("old");
    assert_int_equal(vm_store_use(build, &use, NULL), 0);
    vm_store_clean(dir, true);
    bool kept = there("builds/old/manifest.json");
    close(use);
    vm_store_clean(dir, true);
    assert_true(kept);
    assert_false(there("builds/old"));
}

static void test_a_killed_build_is_cleared_away_but_not_a_living_one(void **state)
{
    (void)state;
    int lock = -1;
    pid_t holder;
    write_file("builds/.tmp-dead", "memory", "x");
    write_file("builds/.tmp-alive", "memory", "x");
    assert_int_equal(vm_store_try_lock(dir, "template-alive", &lock, &holder, NULL), 0);
    vm_store_clean(dir, false);
    close(lock);
    assert_false(there("builds/.tmp-dead"));
    assert_true(there("builds/.tmp-alive/memory"));
}

static void test_stages_stay_while_a_build_shares_them(void **state)
{
    (void)state;
    CLEANUP(freep) char *from = fs_join(dir, "cache/root-1/root.erofs");
    CLEANUP(freep) char *to = fs_join(dir, "builds/h/root.erofs");
    write_file("cache/root-1", "root.erofs", "image");
    write_file("cache/root-2", "root.erofs", "image");
    write_file("cache/kernel-1", "vmlinux", "kernel");
    write_file("cache/.tmp-root-3", "debs", "half");
    make_build("h");
    assert_int_equal(vm_store_link_file(from, to, NULL), 0);
    assert_int_equal(vm_store_publish(dir, "a", "h", NULL), 0);
    vm_store_clean(dir, false);
    assert_true(there("cache/root-1"));
    assert_false(there("cache/root-2"));
    assert_true(there("cache/kernel-1"));    /* waits for reuse */
    assert_true(there("cache/.tmp-root-3")); /* goes on where it stopped */
    vm_store_clean(dir, true);
    assert_true(there("cache/root-1"));
    assert_false(there("cache/kernel-1"));
    assert_false(there("cache/.tmp-root-3"));
}

static void test_link_file_refuses_to_overwrite(void **state)
{
    (void)state;
    CLEANUP(freep) char *from = fs_join(dir, "cache/a");
    CLEANUP(freep) char *to = fs_join(dir, "cache/b");
    write_file("cache", "a", "1");
    assert_int_equal(vm_store_link_file(from, to, NULL), 0);
    assert_int_equal(vm_store_link_file(from, to, NULL), -EEXIST);
}

/* The worst thing an installer that was killed can leave: the host's folders mounted in its tree.
 */
static void test_removing_a_tree_never_goes_through_a_mount(void **state)
{
    (void)state;
    if (geteuid() != 0)
        skip();
    CLEANUP(freep) char *precious = fs_join(dir, "precious");
    CLEANUP(freep) char *tree = fs_join(dir, "tree");
    CLEANUP(freep) char *target = fs_join(dir, "tree/a b/dev");
    write_file("precious", "file", "keep me");
    assert_int_equal(fs_mkdir_p(target, 0755, NULL), 0);
    if (mount(precious, target, NULL, MS_BIND, NULL) < 0)
        skip(); /* a container without the right to mount cannot have the problem */
    bool mounted = there("tree/a b/dev/file");
    int r = vm_store_remove_tree(tree, NULL);
    assert_true(mounted);
    assert_int_equal(r, 0);
    assert_false(there("tree"));
    assert_true(there("precious/file"));
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_a_published_template_is_found_and_replaced),
        T(test_a_template_that_is_not_built_says_how_to_build_it),
        T(test_names_are_sorted_and_only_finished_builds_count),
        T(test_a_second_builder_learns_who_holds_the_lock),
        T(test_shared_locks_exclude_builders_only),
        T(test_clean_removes_what_no_name_points_at),
        T(test_clean_leaves_a_build_that_is_in_use),
        T(test_a_killed_build_is_cleared_away_but_not_a_living_one),
        T(test_stages_stay_while_a_build_shares_them),
        T(test_link_file_refuses_to_overwrite),
        T(test_removing_a_tree_never_goes_through_a_mount),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
