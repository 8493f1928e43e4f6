#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/initramfs.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

static char *dir;

static int setup(void **state)
{
    (void)state;
    char path[] = "/tmp/cv-initramfs-test-XXXXXX";
    if (!mkdtemp(path))
        return -1;
    dir = xstrdup(path);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    int r = fs_rm_rf(dir, NULL);
    free(dir);
    return r;
}

struct found {
    unsigned mode, size;
    const uint8_t *data;
    unsigned times; /* how often it is in the archive */
    size_t at;      /* position among all entries */
};

static unsigned hex8(const uint8_t *p)
{
    char text[9] = "";
    memcpy(text, p, 8);
    return (unsigned)strtoul(text, NULL, 16);
}

/* An independent reader of the newc format. The whole archive is walked. */
static struct found look_up(struct slice s, const char *name)
{
    struct found f = { 0 };
    size_t at = 0, n = 0;
    for (;; n++) {
        assert_true(at + 110 <= s.n);
        assert_memory_equal(s.p + at, "070701", 6);
        unsigned mode = hex8(s.p + at + 14), size = hex8(s.p + at + 54),
                 name_size = hex8(s.p + at + 94);
        const char *path = (const char *)s.p + at + 110;
        assert_true(at + 110 + name_size <= s.n);
        assert_int_equal(path[name_size - 1], '\0');
        size_t data = (at + 110 + name_size + 3) & ~(size_t)3;
        assert_true(data + size <= s.n);
        if (!strcmp(path, "TRAILER!!!"))
            break;
        if (!strcmp(path, name)) {
            f.mode = mode;
            f.size = size;
            f.data = s.p + data;
            f.times++;
            f.at = n;
        }
        at = (data + size + 3) & ~(size_t)3;
    }
    return f;
}

static void test_files_and_their_folders_are_archived_once(void **state)
{
    (void)state;
    struct vm_cpio c;
    vm_cpio_init(&c);
    assert_int_equal(vm_cpio_file(&c, "a/b/one", 0644, SLICE_LIT("1")), 0);
    assert_int_equal(vm_cpio_file(&c, "a/b/two", 0755, SLICE_LIT("22")), 0);
    assert_int_equal(vm_cpio_dir(&c, "a"), 0);
    assert_int_equal(vm_cpio_file(&c, "empty", 0600, SLICE_NULL), 0);
    assert_int_equal(vm_cpio_finish(&c), 0);
    struct slice s = buf_slice(&c.out);
    struct found a = look_up(s, "a"), b = look_up(s, "a/b"), two = look_up(s, "a/b/two");
    assert_int_equal(a.times, 1);
    assert_int_equal(b.times, 1);
    assert_int_equal(a.mode, S_IFDIR | 0755);
    assert_int_equal(two.mode, S_IFREG | 0755);
    assert_int_equal(two.size, 2);
    assert_memory_equal(two.data, "22", 2);
    assert_true(a.at < b.at && b.at < two.at); /* a folder before what is in it */
    assert_int_equal(look_up(s, "empty").size, 0);
    vm_cpio_fini(&c);
}

static void test_libraries_of_a_program_are_found(void **state)
{
    (void)state;
    char **libs = NULL;
    struct err e = { 0 };
    if (vm_ldd("/bin/ls", &libs, &e) < 0)
        fail_msg("%s", e.msg);
    bool libc = false, loader = false;
    for (size_t i = 0; libs[i]; i++) {
        assert_int_equal(libs[i][0], '/');
        assert_true(fs_exists(libs[i]));
        libc = libc || strstr(libs[i], "/libc.so.6");
        loader = loader || strstr(libs[i], "/ld-linux");
        free(libs[i]);
    }
    free(libs);
    assert_true(libc && loader);
}

static void test_a_missing_program_is_named(void **state)
{
    (void)state;
    char **libs = NULL;
    struct err e = { 0 };
    assert_int_equal(vm_ldd("/nonexistent/shim", &libs, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "/nonexistent/shim"));
}

static void put(const char *name, const char *text)
{
    CLEANUP(freep) char *path = fs_join(dir, name);
    CLEANUP(freep) char *parent = xstrndup(path, (size_t)(strrchr(path, '/') - path));
    assert_int_equal(fs_mkdir_p(parent, 0755, NULL), 0);
    assert_int_equal(fs_write_atomic(path, slice_str(text), 0644, NULL), 0);
}

static int write_archive(const char *out, struct err *e)
{
    CLEANUP(freep) char *modules = fs_join(dir, "modules");
    CLEANUP(freep) char *python = fs_join(dir, "python");
    CLEANUP(freep) char *path = fs_join(dir, out);
    struct vm_initramfs_spec s = { .shim_path = "/bin/ls",
                                   .python_dir = python,
                                   .modules_dir = modules,
                                   .guest = json_pack("{s:s}", "template", "t") };
    int r = vm_initramfs_write(&s, path, e);
    json_decref(s.guest);
    return r;
}

static void test_the_archive_holds_what_the_guest_expects(void **state)
{
    (void)state;
    struct err e = { 0 };
    put("modules/modules.list", "b.ko\na.ko\n");
    put("modules/a.ko", "A");
    put("modules/b.ko", "BB");
    put("modules/ignored.ko", "x");
    put("python/cellvisor_hook.py", "pass");
    put("python/notes.txt", "x");
    if (write_archive("one.img", &e) < 0 || write_archive("two.img", &e) < 0)
        fail_msg("%s", e.msg);
    CLEANUP(freep) char *one = fs_join(dir, "one.img");
    CLEANUP(freep) char *two = fs_join(dir, "two.img");
    struct buf b;
    char sha[2][65];
    assert_int_equal(fs_read_file(one, VM_INITRAMFS_MAX, &b, NULL), 0);
    struct slice s = buf_slice(&b);
    assert_int_equal(look_up(s, "init").mode, S_IFREG | 0755);
    assert_true(look_up(s, "init").size > 1000);
    struct found list = look_up(s, "modules.list");
    assert_int_equal(list.size, strlen("/modules/b.ko\n/modules/a.ko\n"));
    assert_memory_equal(list.data, "/modules/b.ko\n/modules/a.ko\n", list.size);
    assert_int_equal(look_up(s, "modules/b.ko").size, 2);
    assert_int_equal(look_up(s, "modules/ignored.ko").times, 0);
    assert_int_equal(look_up(s, "cellvisor/python/cellvisor_hook.py").times, 1);
    assert_int_equal(look_up(s, "cellvisor/python/notes.txt").times, 0);
    assert_memory_equal(look_up(s, "cellvisor/guest.json").data, "{\"template\":\"t\"}", 16);
    assert_int_equal(look_up(s, "newroot").mode, S_IFDIR | 0755);
    buf_fini(&b);
    assert_int_equal(fs_sha256_file(one, sha[0], NULL) | fs_sha256_file(two, sha[1], NULL), 0);
    assert_string_equal(sha[0], sha[1]); /* no times, no inode numbers of the host */
}

static void test_a_missing_module_stops_the_build(void **state)
{
    (void)state;
    struct err e = { 0 };
    put("modules/modules.list", "gone.ko\n");
    put("python/a.py", "");
    assert_int_equal(write_archive("x.img", &e), -ENOENT);
    assert_non_null(strstr(e.msg, "initramfs: "));
    assert_non_null(strstr(e.msg, "gone.ko"));
    CLEANUP(freep) char *path = fs_join(dir, "x.img");
    assert_false(fs_exists(path));
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_files_and_their_folders_are_archived_once),
        T(test_libraries_of_a_program_are_found),
        T(test_a_missing_program_is_named),
        T(test_the_archive_holds_what_the_guest_expects),
        T(test_a_missing_module_stops_the_build),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
