#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "proto/gl.h"
#include "vm/qemu.h"
#include "vm/store.h"
#include "vm/template.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cmocka.h>

#define MB ((uint64_t)1 << 20)

static char *dir, *build;
static json_t *manifest;

static void write_file(const char *name, struct slice text)
{
    CLEANUP(freep) char *path = fs_join(build, name);
    assert_int_equal(fs_write_atomic(path, text, 0644, NULL), 0);
}

static void write_manifest(void)
{
    CLEANUP(freep) char *text = json_dumps(manifest, 0);
    write_file("manifest.json", slice_str(text));
}

/* "memory": 4 MB, with something in two blocks. */
static void make_memory(char digest[65], uint64_t *used)
{
    CLEANUP(freep) char *path = fs_join(build, "memory");
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    CLEANUP(closep) int in = memfd_create("in", MFD_CLOEXEC);
    assert_true(fd >= 0 && in >= 0);
    assert_int_equal(ftruncate(fd, 4 * MB) | ftruncate(in, 4 * MB), 0);
    assert_int_equal(pwrite(in, "hello", 5, 100), 5);
    assert_int_equal(pwrite(in, "world", 5, 3 * MB), 5);
    assert_int_equal(vm_memory_copy(in, fd, 4 * MB, used, digest, NULL), 0);
}

static int setup(void **state)
{
    (void)state;
    char path[] = "/tmp/cv-template-test-XXXXXX", digest[65], sha[65];
    uint64_t used;
    if (!mkdtemp(path) || vm_store_init(path, NULL) < 0)
        return -1;
    dir = xstrdup(path);
    build = fs_join(dir, "builds/h1");
    if (fs_mkdir_p(build, 0755, NULL) < 0)
        return -1;
    make_memory(digest, &used);
    fs_sha256(SLICE_LIT("state"), sha);
    write_file("vmstate", SLICE_LIT("state"));
    write_file("root.erofs", SLICE_LIT("image"));
    manifest =
        json_pack("{s:i,s:i,s:s,s:s,s:s,s:{s:s,s:s,s:s,s:i,s:i,s:i},s:{s:{s:s},s:s},s:{s:s,s:{}},"
                  "s:{s:{s:i},s:{s:i,s:s},s:{s:i,s:i,s:s}}}",
                  "format", VM_TEMPLATE_FORMAT, "link_version", GL_VERSION, "name", "demo", "hash",
                  "h1", "warmup", "1+1", "machine", "accel", "tcg", "fingerprint", "f",
                  "qemu_version", "7.2.1", "memory_mb", 4, "disk_mb", 3, "vcpus", 1, "kernel",
                  "info", "banner", "hi", "spec", "python3", "specs", "default", "python3",
                  "kernelspecs", "files", "root.erofs", "bytes", 5, "vmstate", "bytes", 5, "sha256",
                  sha, "memory", "bytes", (int)(4 * MB), "used", (int)used, "digest", digest);
    if (!manifest)
        return -1;
    write_manifest();
    return vm_store_publish(dir, "demo", "h1", NULL);
}

static int teardown(void **state)
{
    (void)state;
    json_decref(manifest);
    int r = fs_rm_rf(dir, NULL);
    free(dir);
    free(build);
    return r;
}

static void test_a_good_build_is_read(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    struct err e = { 0 };
    if (vm_template_read(dir, "demo", &t, &e) < 0)
        fail_msg("%s", e.msg);
    assert_string_equal(t->name, "demo");
    assert_string_equal(t->hash, "h1");
    assert_int_equal(t->memory_mb, 4);
    assert_int_equal(t->accel, VM_ACCEL_TCG);
    assert_string_equal(t->default_spec, "python3");
    assert_string_equal(t->kernel_info, "{\"banner\":\"hi\"}");
    assert_string_equal(t->warmup, "1+1");
    assert_true(json_is_object(t->specs));
    assert_int_equal(t->memory_bytes_used, 128 << 10);
    vm_template_free(t);
}

static void test_a_template_in_use_survives_a_clean_up(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    assert_int_equal(vm_template_read(dir, "demo", &t, NULL), 0);
    assert_int_equal(vm_store_unpublish(dir, "demo", NULL), 0);
    vm_store_clean(dir, true);
    int fd = -1, r = vm_template_open_state(t, &fd, NULL);
    closep(&fd);
    vm_template_free(t);
    assert_int_equal(r, 0);
    vm_store_clean(dir, true);
    assert_false(fs_exists(build));
}

static int read_code(struct err *e)
{
    struct vm_template *t = NULL;
    int r = vm_template_read(dir, "demo", &t, e);
    vm_template_free(t);
    return r;
}

static void test_damage_is_told_and_how_to_mend_it(void **state)
{
    (void)state;
    struct err e = { 0 };
    write_file("vmstate", SLICE_LIT("stale"));
    assert_int_equal(read_code(&e), -EINVAL);
    assert_non_null(strstr(e.msg, "vmstate: SHA-256 differs"));
    assert_non_null(strstr(e.msg, "cellvisor template build demo --force"));
    write_file("vmstate", SLICE_LIT("state"));
    write_file("root.erofs", SLICE_LIT("imag"));
    assert_int_equal(read_code(&e), -EINVAL);
    assert_non_null(strstr(e.msg, "root.erofs has 4 bytes, not 5"));
    CLEANUP(freep) char *root = fs_join(build, "root.erofs");
    unlink(root);
    assert_int_equal(read_code(&e), -EINVAL);
    assert_non_null(strstr(e.msg, "root.erofs is missing"));
}

static void test_manifests_with_missing_parts_are_refused(void **state)
{
    (void)state;
    static const char *const keys[] = { "machine", "kernel", "files", "specs", "hash" };
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
        struct err e = { 0 };
        json_t *kept = json_incref(json_object_get(manifest, keys[i]));
        json_object_del(manifest, keys[i]);
        write_manifest();
        assert_int_equal(read_code(&e), -EINVAL);
        assert_non_null(strstr(e.msg, "template \"demo\" cannot be used: "));
        json_object_set_new(manifest, keys[i], kept);
    }
    write_file("manifest.json", SLICE_LIT("{\"format\":1"));
    struct err e = { 0 };
    assert_int_equal(read_code(&e), -EINVAL);
    assert_non_null(strstr(e.msg, "manifest.json"));
}

static void test_a_build_of_another_version_is_stale(void **state)
{
    (void)state;
    struct err e = { 0 };
    json_object_set_new(manifest, "link_version", json_integer(GL_VERSION + 1));
    write_manifest();
    assert_int_equal(read_code(&e), -ESTALE);
    assert_non_null(strstr(e.msg, "another version of Cellvisor"));
    assert_null(strstr(e.msg, "--force"));
}

static void test_an_unknown_name_is_not_built(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    assert_int_equal(vm_template_load(dir, "other", &t, NULL), -ENOENT);
    assert_null(t);
}

/* A program that says it is this version of QEMU. */
static char *qemu_that_says(const char *version)
{
    char *path = fs_join(dir, "qemu");
    CLEANUP(freep)
    char *text = xasprintf("#!/bin/sh\necho 'QEMU emulator version %s (Debian x)'\n", version);
    assert_int_equal(fs_write_atomic(path, slice_str(text), 0755, NULL), 0);
    return path;
}

static void test_a_snapshot_of_another_qemu_is_never_loaded(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    struct err e = { 0 };
    char now[65];
    CLEANUP(freep) char *qemu = qemu_that_says("9.9.9");
    struct vm_qemu_spec spec = {
        .qemu_path = qemu, .accel = VM_ACCEL_TCG, .memory_mb = 4, .vcpus = 1
    };
    assert_int_equal(vm_template_read(dir, "demo", &t, NULL), 0);
    int foreign = vm_template_check(t, qemu, &e);
    assert_int_equal(vm_qemu_fingerprint(&spec, now, NULL), 0);
    free(t->fingerprint);
    t->fingerprint = xstrdup(now);
    int same = vm_template_check(t, qemu, NULL);
    vm_template_free(t);
    assert_int_equal(foreign, -ESTALE);
    assert_non_null(strstr(e.msg, "made with QEMU 7.2.1, not this one"));
    assert_non_null(strstr(e.msg, "cellvisor template build demo"));
    assert_int_equal(same, 0);
}

static void test_a_missing_qemu_is_said(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    struct err e = { 0 };
    assert_int_equal(vm_template_read(dir, "demo", &t, NULL), 0);
    int r = vm_template_check(t, "/nonexistent/qemu", &e);
    vm_template_free(t);
    assert_int_equal(r, -ENOENT);
    assert_non_null(strstr(e.msg, "qemu-system-x86"));
}

static void test_memory_comes_back_sealed(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    int fd = -1;
    char text[6] = "";
    assert_int_equal(vm_template_read(dir, "demo", &t, NULL), 0);
    int r = vm_template_open_memory(t, &fd, NULL);
    vm_template_free(t);
    assert_int_equal(r, 0);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, 4 * MB);
    assert_int_equal(pread(fd, text, 5, 3 * MB), 5);
    assert_string_equal(text, "world");
    assert_int_equal(pwrite(fd, "x", 1, 0), -1); /* nobody changes the template */
    assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    char *own = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    assert_ptr_not_equal(own, MAP_FAILED); /* but clones may have it copy-on-write */
    munmap(own, 4096);
    close(fd);
}

static void test_corrupt_memory_is_refused(void **state)
{
    (void)state;
    struct vm_template *t = NULL;
    struct err e = { 0 };
    int fd = -1;
    CLEANUP(freep) char *path = fs_join(build, "memory");
    CLEANUP(closep) int file = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(file, "HELLO", 5, 100), 5);
    assert_int_equal(vm_template_read(dir, "demo", &t, NULL), 0);
    int r = vm_template_open_memory(t, &fd, &e);
    vm_template_free(t);
    assert_int_equal(r, -EINVAL);
    assert_int_equal(fd, -1);
    assert_non_null(strstr(e.msg, "corrupt"));
}

static void test_the_digest_does_not_depend_on_holes(void **state)
{
    (void)state;
    CLEANUP(closep) int sparse = memfd_create("sparse", MFD_CLOEXEC);
    CLEANUP(closep) int full = memfd_create("full", MFD_CLOEXEC);
    CLEANUP(closep) int out = memfd_create("out", MFD_CLOEXEC);
    CLEANUP(freep) char *zeros = xcalloc(1, MB);
    char a[65], b[65], c[65];
    uint64_t used = 0;
    /* An odd size: the last block is short. */
    uint64_t size = 2 * MB + 5000;
    assert_int_equal(ftruncate(sparse, (off_t)size) | ftruncate(out, (off_t)size), 0);
    for (uint64_t at = 0; at < size; at += MB)
        assert_true(pwrite(full, zeros, size - at < MB ? size - at : MB, (off_t)at) > 0);
    assert_int_equal(pwrite(sparse, "end", 3, (off_t)size - 3), 3);
    assert_int_equal(pwrite(full, "end", 3, (off_t)size - 3), 3);
    assert_int_equal(vm_memory_copy(sparse, out, size, &used, a, NULL), 0);
    assert_int_equal(used, 5000);
    assert_int_equal(vm_memory_copy(full, out, size, &used, b, NULL), 0);
    assert_int_equal(vm_memory_copy(out, full, size, &used, c, NULL), 0);
    assert_string_equal(a, b);
    assert_string_equal(a, c);
    /* The same bytes elsewhere are another memory. */
    assert_int_equal(pwrite(sparse, "end", 3, 0), 3);
    assert_int_equal(pwrite(sparse, "\0\0\0", 3, (off_t)size - 3), 3);
    assert_int_equal(vm_memory_copy(sparse, out, size, &used, b, NULL), 0);
    assert_string_not_equal(a, b);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_a_good_build_is_read),
        T(test_a_template_in_use_survives_a_clean_up),
        T(test_damage_is_told_and_how_to_mend_it),
        T(test_manifests_with_missing_parts_are_refused),
        T(test_a_build_of_another_version_is_stale),
        T(test_an_unknown_name_is_not_built),
        T(test_a_snapshot_of_another_qemu_is_never_loaded),
        T(test_a_missing_qemu_is_said),
        T(test_memory_comes_back_sealed),
        T(test_corrupt_memory_is_refused),
        T(test_the_digest_does_not_depend_on_holes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
