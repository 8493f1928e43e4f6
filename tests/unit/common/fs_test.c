#include "common/cleanup.h"
#include "common/fs.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[] = "/tmp/cv-fs-test-XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    int r = fs_rm_rf(dir, NULL);
    return r == 0 && !fs_exists(dir) ? 0 : -1;
}

static void test_what_is_written_is_read_back(void **state)
{
    (void)state;
    CLEANUP(freep) char *path = fs_join(dir, "file");
    struct err e = { 0 };
    assert_int_equal(fs_write_atomic(path, slice_of("a\0b", 3), 0640, &e), 0);
    assert_int_equal(fs_write_atomic(path, slice_of("a\0bc", 4), 0640, &e), 0);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0640);
    struct buf b;
    assert_int_equal(fs_read_file(path, 100, &b, &e), 0);
    assert_true(slice_eq(buf_slice(&b), slice_of("a\0bc", 4)));
    buf_fini(&b);
}

static void test_a_file_of_exactly_the_limit_is_read(void **state)
{
    (void)state;
    CLEANUP(freep) char *path = fs_join(dir, "limit");
    struct err e = { 0 };
    assert_int_equal(fs_write_atomic(path, SLICE_LIT("12345"), 0600, &e), 0);
    struct buf b;
    assert_int_equal(fs_read_file(path, 5, &b, &e), 0);
    assert_int_equal(b.len, 5);
    buf_fini(&b);
    assert_int_equal(fs_read_file(path, 4, &b, &e), -EFBIG);
    assert_non_null(strstr(e.msg, "limit of 4 bytes"));
    assert_null(b.data);
    assert_int_equal(fs_write_atomic(path, SLICE_NULL, 0600, &e), 0);
    assert_int_equal(fs_read_file(path, 0, &b, &e), 0);
    assert_int_equal(b.len, 0);
    buf_fini(&b);
}

static void test_files_without_a_size_are_read(void **state)
{
    (void)state;
    struct buf b;
    assert_int_equal(fs_read_file("/proc/self/status", 1 << 20, &b, NULL), 0);
    assert_true(slice_starts(buf_slice(&b), "Name:"));
    buf_fini(&b);
}

static void test_read_errors_name_the_file(void **state)
{
    (void)state;
    struct buf b;
    struct err e = { 0 };
    assert_int_equal(fs_read_file("/nonexistent/x", 10, &b, &e), -ENOENT);
    assert_string_equal(e.msg, "/nonexistent/x: No such file or directory");
    assert_int_equal(fs_read_file(dir, 10, &b, &e), -EISDIR);
    buf_fini(&b);
}

static int count_entries(const char *prefix)
{
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    struct dirent *de;
    while ((de = readdir(d)))
        n += slice_starts(slice_str(de->d_name), prefix);
    closedir(d);
    return n;
}

static void test_a_failed_write_leaves_nothing_behind(void **state)
{
    (void)state;
    CLEANUP(freep) char *sub = fs_join(dir, "taken");
    CLEANUP(freep) char *inner = fs_join(sub, "x");
    struct err e = { 0 };
    assert_int_equal(fs_mkdir_p(inner, 0700, &e), 0);
    assert_int_not_equal(fs_write_atomic(sub, SLICE_LIT("x"), 0600, &e), 0);
    assert_non_null(strstr(e.msg, "taken: cannot write"));
    assert_int_not_equal(fs_write_atomic("/nonexistent/x", SLICE_LIT("x"), 0600, &e), 0);
    assert_int_equal(count_entries("taken"), 1);
}

static void test_mkdir_makes_every_part_and_accepts_what_exists(void **state)
{
    (void)state;
    CLEANUP(freep) char *path = fs_join(dir, "a//b/c/");
    struct err e = { 0 };
    assert_int_equal(fs_mkdir_p(path, 0755, &e), 0);
    assert_int_equal(fs_mkdir_p(path, 0755, &e), 0);
    assert_true(fs_exists(path));
    assert_int_equal(fs_mkdir_p("/", 0755, &e), 0);
    assert_int_not_equal(fs_mkdir_p("", 0755, &e), 0);
    CLEANUP(freep) char *file = fs_join(dir, "plain");
    CLEANUP(freep) char *below = fs_join(file, "x");
    assert_int_equal(fs_write_atomic(file, SLICE_LIT("x"), 0600, &e), 0);
    assert_int_equal(fs_mkdir_p(file, 0755, &e), -ENOTDIR);
    assert_int_equal(fs_mkdir_p(below, 0755, &e), -ENOTDIR);
}

static void test_rm_rf_removes_trees_and_not_what_links_point_to(void **state)
{
    (void)state;
    CLEANUP(freep) char *keep = fs_join(dir, "keep");
    CLEANUP(freep) char *kept = fs_join(keep, "file");
    CLEANUP(freep) char *tree = fs_join(dir, "tree");
    CLEANUP(freep) char *deep = fs_join(tree, "x/y/z");
    CLEANUP(freep) char *link = fs_join(tree, "x/link");
    CLEANUP(freep) char *locked = fs_join(tree, "x/locked/in");
    struct err e = { 0 };
    assert_int_equal(fs_mkdir_p(keep, 0700, &e), 0);
    assert_int_equal(fs_write_atomic(kept, SLICE_LIT("x"), 0600, &e), 0);
    assert_int_equal(fs_mkdir_p(deep, 0700, &e), 0);
    assert_int_equal(fs_mkdir_p(locked, 0700, &e), 0);
    *strrchr(locked, '/') = '\0';
    assert_int_equal(chmod(locked, 0), 0);
    assert_int_equal(symlink(keep, link), 0);
    assert_int_equal(fs_rm_rf(tree, &e), 0);
    assert_false(fs_exists(tree));
    assert_true(fs_exists(kept));
    assert_int_equal(fs_rm_rf(tree, &e), 0); /* missing is success */
    CLEANUP(freep) char *bare = fs_join(dir, "bare-link");
    assert_int_equal(symlink(keep, bare), 0);
    assert_int_equal(fs_rm_rf(bare, &e), 0);
    assert_false(fs_exists(bare));
    assert_true(fs_exists(kept));
}

static void test_rm_rf_refuses_the_root(void **state)
{
    (void)state;
    struct err e = { 0 };
    assert_int_equal(fs_rm_rf("/", &e), -EINVAL);
    assert_int_equal(fs_rm_rf("", &e), -EINVAL);
}

static void test_join_puts_one_slash(void **state)
{
    (void)state;
    CLEANUP(freep) char *a = fs_join("/x", "y");
    CLEANUP(freep) char *b = fs_join("/x/", "y");
    CLEANUP(freep) char *c = fs_join("/", "y");
    assert_string_equal(a, "/x/y");
    assert_string_equal(b, "/x/y");
    assert_string_equal(c, "/y");
}

static void test_sha256_of_known_texts(void **state)
{
    (void)state;
    static const char abc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    char hex[65];
    fs_sha256(SLICE_LIT("abc"), hex);
    assert_string_equal(hex, abc);
    fs_sha256(SLICE_NULL, hex);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CLEANUP(freep) char *path = fs_join(dir, "abc");
    struct err e = { 0 };
    assert_int_equal(fs_write_atomic(path, SLICE_LIT("abc"), 0600, &e), 0);
    assert_int_equal(fs_sha256_file(path, hex, &e), 0);
    assert_string_equal(hex, abc);
    assert_int_equal(fs_sha256_file("/nonexistent", hex, &e), -ENOENT);
    assert_int_equal(fs_sha256_file(dir, hex, &e), -EISDIR);
}

static void test_free_bytes_are_known_for_a_directory(void **state)
{
    (void)state;
    assert_true(fs_free_bytes(dir) > 0);
    assert_true(fs_free_bytes("/nonexistent") == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_written_is_read_back),
        cmocka_unit_test(test_a_file_of_exactly_the_limit_is_read),
        cmocka_unit_test(test_files_without_a_size_are_read),
        cmocka_unit_test(test_read_errors_name_the_file),
        cmocka_unit_test(test_a_failed_write_leaves_nothing_behind),
        cmocka_unit_test(test_mkdir_makes_every_part_and_accepts_what_exists),
        cmocka_unit_test(test_rm_rf_removes_trees_and_not_what_links_point_to),
        cmocka_unit_test(test_rm_rf_refuses_the_root),
        cmocka_unit_test(test_join_puts_one_slash),
        cmocka_unit_test(test_sha256_of_known_texts),
        cmocka_unit_test(test_free_bytes_are_known_for_a_directory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
