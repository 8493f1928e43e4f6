/* The whole builder with stand-ins for apt, dpkg, mmdebstrap (fake_tools.sh) and for QEMU with its
 * guest (fake_guest.py): order and reuse of stages, and what is left after each way to fail. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/proc.h"
#include "common/rdwr.h"
#include "vm/build.h"
#include "vm/store.h"
#include "vm/template.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmocka.h>

static char *dir, *state_dir, *recipe, *qemu;
static struct vm_build_spec spec;
static char begun[400], reused[400], waited[200];

static const char good_recipe[] = "{\"apt\":[\"python3\"],\"preload\":\"a = 1\",\"memory_mb\":192}";

static void put(const char *name, const char *text, mode_t mode)
{
    CLEANUP(freep) char *path = fs_join(dir, name);
    if (fs_write_atomic(path, slice_str(text), mode, NULL) < 0)
        abort();
}

static void take_away(const char *name)
{
    CLEANUP(freep) char *path = fs_join(dir, name);
    unlink(path);
}

/* A bzImage whose payload is a gzip'ed ELF header. */
static int make_kernel(void)
{
    CLEANUP(freep)
    char *script = xasprintf(
        "cd '%s' && { printf '\\177ELF'; head -c 200 /dev/zero; } | gzip -n > payload", dir);
    const char *const argv[] = { "sh", "-c", script, NULL };
    struct proc_spec p = { .argv = argv };
    if (proc_run(&p, -1, NULL) != 0)
        return -1;
    CLEANUP(freep) char *payload = fs_join(dir, "payload");
    CLEANUP(freep) char *out = fs_join(dir, "vmlinuz");
    struct buf b;
    uint8_t image[4096] = { 0 };
    if (fs_read_file(payload, 1024, &b, NULL) < 0)
        return -1;
    struct slice s = buf_slice(&b);
    memcpy(image + 0x202, "HdrS", 4);
    image[0x1f1] = 1;
    put_u32le(image + 0x248, 0);
    put_u32le(image + 0x24c, (uint32_t)s.n + 4);
    memcpy(image + 1024, s.p, s.n);
    buf_fini(&b);
    return fs_write_atomic(out, slice_of(image, sizeof(image)), 0644, NULL);
}

static int copy_here(const char *name)
{
    CLEANUP(freep) char *from = xasprintf("%s/unit/vm/%s", TEST_SOURCE_DIR, name);
    CLEANUP(freep) char *to = fs_join(dir, name);
    struct buf b;
    int r = fs_read_file(from, 1u << 20, &b, NULL);
    if (r < 0)
        return r;
    r = fs_write_atomic(to, buf_slice(&b), 0644, NULL);
    buf_fini(&b);
    return r;
}

static int make_tools(void)
{
    static const char *const names[] = { "apt-get",  "apt-cache",  "apt-config",
                                         "dpkg-deb", "mmdebstrap", "mkfs.erofs" };
    CLEANUP(freep) char *bin = fs_join(dir, "bin");
    if (fs_mkdir_p(bin, 0755, NULL) < 0)
        return -1;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        CLEANUP(freep) char *link = fs_join(bin, names[i]);
        if (symlink(FAKE_TOOLS, link) < 0)
            return -1;
    }
    CLEANUP(freep) char *path = xasprintf("%s:/usr/local/bin:/usr/bin:/bin", bin);
    setenv("PATH", path, 1);
    setenv("FAKE_DIR", dir, 1);
    qemu = fs_join(bin, "qemu");
    /* Copies, because the VMM's user need not be able to read the source tree. */
    if (copy_here("fake_guest.py") < 0 || copy_here("fake_qemu.py") < 0)
        return -1;
    CLEANUP(freep)
    char *text =
        xasprintf("#!/bin/sh\nFAKE_DIR=%s exec python3 -S -E %s/fake_guest.py \"$@\"\n", dir, dir);
    return fs_write_atomic(qemu, slice_str(text), 0755, NULL);
}

static int setup(void **state)
{
    (void)state;
    char path[] = "/tmp/cv-build-test-XXXXXX";
    if (!mkdtemp(path) || chmod(path, 0755) < 0) /* the VMM's user must reach the programs */
        return -1;
    dir = xstrdup(path);
    state_dir = fs_join(dir, "state");
    recipe = fs_join(dir, "demo/template.json");
    CLEANUP(freep) char *folder = fs_join(dir, "demo");
    if (fs_mkdir_p(folder, 0755, NULL) < 0 || make_tools() < 0 || make_kernel() < 0)
        return -1;
    put("demo/template.json", good_recipe, 0644);
    unsetenv("CELLVISOR_MIRROR");
    unsetenv("FAKE_SIZE");
    spec = (struct vm_build_spec) { .state_dir = state_dir,
                                    .recipe_path = recipe,
                                    .shim_path = "/bin/true",
                                    .qemu_path = qemu,
                                    .accel = VM_ACCEL_TCG };
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    int r = fs_rm_rf(dir, NULL);
    free(dir);
    free(state_dir);
    free(recipe);
    free(qemu);
    return r;
}

static void add_word(char *list, size_t size, const char *word)
{
    size_t n = strlen(list);
    snprintf(list + n, size - n, "%s ", word);
}

static void on_progress(void *ctx, const struct vm_build_progress *p)
{
    double *last = ctx;
    if (p->phase == VM_BUILD_BEGIN)
        add_word(begun, sizeof(begun), p->stage);
    if (p->phase == VM_BUILD_END && p->cached)
        add_word(reused, sizeof(reused), p->stage);
    if (p->phase == VM_BUILD_WAIT)
        snprintf(waited, sizeof(waited), "%s", p->text);
    if (p->overall < *last)
        add_word(begun, sizeof(begun), "BACKWARDS");
    *last = p->overall;
}

static int build(struct vm_build_result *r, struct err *e)
{
    double last = 0;
    begun[0] = reused[0] = waited[0] = '\0';
    memset(r, 0, sizeof(*r));
    return vm_build(&spec, on_progress, &last, r, e);
}

static void build_ok(struct vm_build_result *r)
{
    struct err e = { 0 };
    if (build(r, &e) < 0)
        fail_msg("%s", e.msg);
}

static bool built(void)
{
    struct vm_template *t = NULL;
    int r = vm_template_read(state_dir, "demo", &t, NULL);
    vm_template_free(t);
    return r == 0;
}

/* Names in a folder of the store that start with prefix. */
static unsigned count(const char *sub, const char *prefix)
{
    CLEANUP(freep) char *path = fs_join(state_dir, sub);
    DIR *d = opendir(path);
    unsigned n = 0;
    struct dirent *de;
    assert_non_null(d);
    while ((de = readdir(d)))
        n += strcmp(de->d_name, ".") && strcmp(de->d_name, "..") &&
             !strncmp(de->d_name, prefix, strlen(prefix));
    closedir(d);
    return n;
}

static void test_a_build_runs_all_stages_and_is_published(void **state)
{
    (void)state;
    struct vm_build_result r;
    struct vm_template *t = NULL;
    int fd = -1;
    char text[13] = "";
    build_ok(&r);
    assert_string_equal(begun, "kernel resolve packages image initramfs boot preload snapshot "
                               "verify ");
    assert_string_equal(r.name, "demo");
    assert_false(r.up_to_date);
    assert_int_equal(vm_template_read(state_dir, "demo", &t, NULL), 0);
    int open_memory = vm_template_open_memory(t, &fd, NULL);
    ssize_t n = pread(fd, text, 12, 1 << 20);
    closep(&fd);
    const char *version =
        json_string_value(json_object_get(json_object_get(t->manifest, "packages"), "python3"));
    assert_string_equal(t->kernel_info, "{\"banner\":\"fake\"}");
    assert_string_equal(version, "3.13.5-1");
    assert_string_equal(t->hash, r.hash);
    vm_template_free(t);
    assert_int_equal(open_memory, 0);
    assert_int_equal(n, 12);
    assert_string_equal(text, "guest memory");
    assert_int_equal(count("builds", ".tmp"), 0);
    assert_int_equal(count("cache", ".tmp"), 0);
}

static void test_nothing_is_done_twice(void **state)
{
    (void)state;
    struct vm_build_result first, second;
    build_ok(&first);
    build_ok(&second);
    assert_true(second.up_to_date);
    assert_string_equal(first.hash, second.hash);
    assert_string_equal(reused, "kernel image ");
    assert_string_equal(begun, "kernel image initramfs ");
}

static void test_new_preload_keeps_the_packages(void **state)
{
    (void)state;
    struct vm_build_result first, second;
    build_ok(&first);
    put("demo/template.json", "{\"apt\":[\"python3\"],\"preload\":\"b\",\"memory_mb\":192}", 0644);
    build_ok(&second);
    assert_string_not_equal(first.hash, second.hash);
    assert_string_equal(reused, "kernel image ");
    assert_int_equal(count("builds", ""), 1); /* the old build is gone */
}

static void test_force_makes_the_snapshot_again(void **state)
{
    (void)state;
    struct vm_build_result r;
    build_ok(&r);
    spec.force = true;
    build_ok(&r);
    assert_false(r.up_to_date);
    assert_string_equal(reused, "kernel image ");
}

static void test_refresh_asks_the_mirror_again(void **state)
{
    (void)state;
    struct vm_build_result r;
    build_ok(&r);
    spec.refresh = true;
    build_ok(&r);
    assert_string_equal(reused, "");
    assert_true(built());
}

static void test_a_damaged_build_is_made_again(void **state)
{
    (void)state;
    struct vm_build_result r;
    build_ok(&r);
    CLEANUP(freep) char *path = fs_join(state_dir, "templates/demo/vmstate");
    assert_int_equal(fs_write_atomic(path, SLICE_LIT("damaged!!"), 0644, NULL), 0);
    assert_false(built());
    build_ok(&r);
    assert_false(r.up_to_date);
    assert_true(built());
}

static void test_a_gateway_keeps_the_build_it_uses(void **state)
{
    (void)state;
    struct vm_build_result r;
    struct vm_template *old = NULL, *new = NULL;
    build_ok(&r);
    assert_int_equal(vm_template_read(state_dir, "demo", &old, NULL), 0);
    spec.force = true;
    build_ok(&r);
    int fd = -1, memory = vm_template_open_memory(old, &fd, NULL); /* still whole */
    closep(&fd);
    int read_new = vm_template_read(state_dir, "demo", &new, NULL);
    bool apart = new &&strcmp(old->dir, new->dir) != 0;
    vm_template_free(old);
    vm_template_free(new);
    assert_int_equal(memory, 0);
    assert_int_equal(read_new, 0);
    assert_true(apart);
    spec.force = false;
    build_ok(&r);
    assert_true(r.up_to_date);
    assert_int_equal(count("builds", ""), 1); /* nobody uses the old one any more */
}

static void test_a_build_of_an_earlier_recipe_is_taken_again(void **state)
{
    (void)state;
    struct vm_build_result first, r;
    struct vm_template *used = NULL;
    build_ok(&first);
    assert_int_equal(vm_template_read(state_dir, "demo", &used, NULL), 0);
    put("demo/template.json", "{\"apt\":[\"python3\"],\"preload\":\"b\",\"memory_mb\":192}", 0644);
    build_ok(&r);
    put("demo/template.json", good_recipe, 0644);
    build_ok(&r);
    vm_template_free(used);
    assert_true(r.up_to_date);
    assert_string_equal(r.hash, first.hash);
}

/* Failures: nothing is published, the text says what to do, and finished stages stay. */
static void check_failure(int want, const char *says)
{
    struct vm_build_result r;
    struct err e = { 0 };
    int rc = build(&r, &e);
    if (rc != want || !strstr(e.msg, says))
        fail_msg("%d, not %d: %s", rc, want, e.msg);
    assert_false(built());
    assert_int_equal(count("builds", ""), 0);
}

static void test_a_package_that_does_not_exist_is_named_with_its_key(void **state)
{
    (void)state;
    put("demo/template.json", "{\"apt\":[\"python3\",\"nope\"]}", 0644);
    check_failure(-EIO, "Debian has no package \"nope\" (recipe key apt[1])");
    assert_string_equal(begun, "kernel resolve ");
}

static void test_a_failed_installation_is_explained(void **state)
{
    (void)state;
    put("mmdebstrap.fail", "dpkg: error processing package python3 (--configure):\nE: failed\n",
        0644);
    check_failure(-EIO, "packages: installing packages: package \"python3\" could not be");
    take_away("mmdebstrap.fail");
    struct vm_build_result r;
    build_ok(&r); /* and the next one goes on */
    assert_string_equal(reused, "kernel ");
}

static void test_a_disk_that_fills_up_is_told(void **state)
{
    (void)state;
    put("mmdebstrap.fail", "cp: error writing: No space left on device\n", 0644);
    check_failure(-ENOSPC, "the disk is full");
}

static void test_too_little_room_is_told_before_anything_is_installed(void **state)
{
    (void)state;
    setenv("FAKE_SIZE", "900000000000000", 1);
    check_failure(-ENOSPC, "not enough room in ");
    assert_string_equal(begun, "kernel resolve ");
}

static void test_a_mirror_must_be_known(void **state)
{
    (void)state;
    put("apt-get.fail", "", 0644);
    check_failure(-EIO, "asking apt for the Debian mirror");
    take_away("apt-get.fail");
    spec.mirror = "not a url";
    check_failure(-EINVAL, "\"not a url\" is not the URL of a Debian mirror");
}

static void test_missing_programs_are_named_with_their_package(void **state)
{
    (void)state;
    spec.qemu_path = "/nonexistent/qemu";
    struct vm_build_result r;
    struct err e = { 0 };
    assert_int_equal(build(&r, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "qemu-system-x86"));
}

static void test_a_wrong_recipe_starts_nothing(void **state)
{
    (void)state;
    put("demo/template.json", "{\"apt\":[\"a b\"]}", 0644);
    struct vm_build_result r;
    struct err e = { 0 };
    assert_int_equal(build(&r, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "demo/template.json: apt[0]"));
    assert_string_equal(begun, "");
}

static void test_a_guest_that_fails_leaves_no_template(void **state)
{
    (void)state;
    static const struct {
        const char *mode;
        int code;
        const char *says;
    } cases[] = {
        { "preload-fail", -EIO, "preload line 2: NameError: name 'nope' is not defined" },
        { "no-kernel", -EINVAL, "has no kernel \"python3\" (recipe key default_kernel)" },
        { "no-resume", -EIO, "the snapshot does not start: resuming the clone: no entropy" },
        { "bad-frame", -EPROTO, "booting the guest: " },
        { "panic", -EIO, "fake QEMU: no such machine" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        put("guest.mode", cases[i].mode, 0644);
        check_failure(cases[i].code, cases[i].says);
    }
    put("guest.mode", "ok", 0644);
    struct vm_build_result r;
    build_ok(&r);
    assert_string_equal(reused, "kernel image ");
}

static void test_a_failed_rebuild_keeps_the_old_template(void **state)
{
    (void)state;
    struct vm_build_result first, r;
    struct err e = { 0 };
    build_ok(&first);
    put("guest.mode", "preload-fail", 0644);
    put("demo/template.json", "{\"apt\":[\"python3\"],\"preload\":\"x\",\"memory_mb\":192}", 0644);
    assert_true(build(&r, &e) < 0);
    struct vm_template *t = NULL;
    assert_int_equal(vm_template_read(state_dir, "demo", &t, NULL), 0);
    assert_string_equal(t->hash, first.hash);
    vm_template_free(t);
}

/* ---- several processes ---- */

static pid_t build_in_child(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct vm_build_result r;
        struct err e = { 0 };
        int rc = build(&r, &e);
        _exit(rc == 0 ? (r.up_to_date ? 7 : 0) : rc == -EINTR ? 130 : 1);
    }
    return pid;
}

static int end_of(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* Process number of a stand-in that hangs, once it does. */
static pid_t wait_for_hang(const char *name)
{
    CLEANUP(freep) char *path = xasprintf("%s/%s.pid", dir, name);
    struct buf b;
    for (int i = 0; i < 600; i++) {
        if (fs_read_file(path, 64, &b, NULL) == 0) {
            pid_t pid = (pid_t)strtol(buf_cstr(&b), NULL, 10);
            buf_fini(&b);
            return pid;
        }
        usleep(50000);
    }
    return -1;
}

static void test_an_interrupted_build_ends_cleanly_and_goes_on_later(void **state)
{
    (void)state;
    put("mmdebstrap.hang", "", 0644);
    pid_t child = build_in_child();
    pid_t tool = wait_for_hang("mmdebstrap");
    kill(child, SIGTERM);
    int code = end_of(child);
    assert_true(tool > 0);
    assert_int_equal(code, 130);
    assert_int_equal(kill(tool, 0), -1); /* what it had started is gone and was waited for */
    assert_false(built());
    take_away("mmdebstrap.hang");
    struct vm_build_result r;
    build_ok(&r);
    assert_string_equal(reused, "kernel ");
}

static void test_a_killed_build_leaves_nothing_that_is_ever_used(void **state)
{
    (void)state;
    put("mmdebstrap.hang", "", 0644);
    pid_t child = build_in_child();
    pid_t tool = wait_for_hang("mmdebstrap");
    kill(child, SIGKILL);
    assert_int_equal(end_of(child), -SIGKILL);
    assert_false(built());
    /* Half-made results of the dead build must not count. */
    CLEANUP(freep) char *pattern = xasprintf("%s/cache/.tmp-root-*/out", state_dir);
    glob_t found;
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    CLEANUP(freep) char *half = fs_join(found.gl_pathv[0], "root.erofs");
    globfree(&found);
    assert_int_equal(fs_write_atomic(half, SLICE_LIT("half"), 0644, NULL), 0);
    take_away("mmdebstrap.hang");
    if (tool > 0)
        kill(tool, SIGKILL); /* should it have outlived its parent: it is ours */
    struct vm_build_result r;
    build_ok(&r);
    CLEANUP(freep) char *image = fs_join(state_dir, "templates/demo/root.erofs");
    struct buf b;
    assert_int_equal(fs_read_file(image, 100, &b, NULL), 0);
    assert_string_equal(buf_cstr(&b), "image\n");
    buf_fini(&b);
    assert_int_equal(count("cache", ".tmp"), 0);
}

static void test_of_two_builders_one_waits_and_finds_the_work_done(void **state)
{
    (void)state;
    put("mmdebstrap.hang", "", 0644);
    pid_t first = build_in_child();
    pid_t tool = wait_for_hang("mmdebstrap");
    take_away("mmdebstrap.hang");
    pid_t second = build_in_child();
    usleep(500000);
    int status;
    assert_int_equal(waitpid(second, &status, WNOHANG), 0); /* it waits */
    kill(tool, SIGKILL); /* the first one's installation fails ... */
    int one = end_of(first), two = end_of(second);
    assert_int_equal(one, 1);
    assert_int_equal(two, 0); /* ... so the second does the work */
    first = build_in_child();
    second = build_in_child();
    assert_int_equal(end_of(first), 7);
    assert_int_equal(end_of(second), 7);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_a_build_runs_all_stages_and_is_published),
        T(test_nothing_is_done_twice),
        T(test_new_preload_keeps_the_packages),
        T(test_force_makes_the_snapshot_again),
        T(test_refresh_asks_the_mirror_again),
        T(test_a_damaged_build_is_made_again),
        T(test_a_gateway_keeps_the_build_it_uses),
        T(test_a_build_of_an_earlier_recipe_is_taken_again),
        T(test_a_package_that_does_not_exist_is_named_with_its_key),
        T(test_a_failed_installation_is_explained),
        T(test_a_disk_that_fills_up_is_told),
        T(test_too_little_room_is_told_before_anything_is_installed),
        T(test_a_mirror_must_be_known),
        T(test_missing_programs_are_named_with_their_package),
        T(test_a_wrong_recipe_starts_nothing),
        T(test_a_guest_that_fails_leaves_no_template),
        T(test_a_failed_rebuild_keeps_the_old_template),
        T(test_an_interrupted_build_ends_cleanly_and_goes_on_later),
        T(test_a_killed_build_leaves_nothing_that_is_ever_used),
        T(test_of_two_builders_one_waits_and_finds_the_work_done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
