/* The whole build: order of the stages, what is reused, and the moment of publication. Each stage
 * is in a file of its own (vm/image*.c, vm/initramfs.c, vm/template_snapshot.c). */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include "common/timefmt.h"
#include "proto/gl.h"
#include "vm/initramfs.h"
#include "vm/qemu.h"
#include "vm/store.h"
#include "vm/template.h"
#include "vm/template_priv.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

/* Share of the bar, per cent; roughly what the stages of the `python` recipe take under TCG. */
static const struct {
    const char *name;
    unsigned weight;
} stages[TB_STAGES] = {
    [TB_KERNEL] = { "kernel", 4 },       [TB_RESOLVE] = { "resolve", 2 },
    [TB_PACKAGES] = { "packages", 42 },  [TB_IMAGE] = { "image", 2 },
    [TB_INITRAMFS] = { "initramfs", 1 }, [TB_BOOT] = { "boot", 6 },
    [TB_PRELOAD] = { "preload", 40 },    [TB_SNAPSHOT] = { "snapshot", 1 },
    [TB_VERIFY] = { "verify", 2 },
};

/* ---- progress ---- */

static double overall(const struct tb *b)
{
    double sum = 0, all = 0;
    for (unsigned i = 0; i < TB_STAGES; i++) {
        all += stages[i].weight;
        if (i < (unsigned)b->stage)
            sum += stages[i].weight;
        else if (i == (unsigned)b->stage)
            sum += stages[i].weight * b->fraction;
    }
    return sum / all;
}

static void report(struct tb *b, enum vm_build_phase phase, const char *text, bool cached)
{
    struct vm_build_progress p = {
        .phase = phase,
        .stage = stages[b->stage].name,
        .index = (unsigned)b->stage + 1,
        .total = TB_STAGES,
        .overall = overall(b),
        .text = text,
        .cached = cached,
        .ms = (loop_now_us(b->loop) - b->stage_began_us) / 1000,
    };
    if (b->fn)
        b->fn(b->ctx, &p);
}

void tb_begin(struct tb *b, enum tb_stage s, const char *text)
{
    b->stage = s;
    b->fraction = 0;
    b->stage_began_us = loop_now_us(b->loop);
    tb_log(b, "==== %s: %s", stages[s].name, text);
    report(b, VM_BUILD_BEGIN, text, false);
}

void tb_step(struct tb *b, double fraction, const char *fmt, ...)
{
    char text[160] = "";
    if (fmt) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(text, sizeof(text), fmt, ap);
        va_end(ap);
        text[strcspn(text, "\r\n")] = '\0'; /* one line, whatever the guest says */
    }
    if (fraction > b->fraction) /* a bar never goes back */
        b->fraction = fraction < 1 ? fraction : 1;
    report(b, VM_BUILD_STEP, text[0] ? text : NULL, false);
}

void tb_end(struct tb *b, bool cached)
{
    b->fraction = 1;
    b->stage_ms[b->stage] = (loop_now_us(b->loop) - b->stage_began_us) / 1000;
    report(b, VM_BUILD_END, NULL, cached);
}

void tb_log(struct tb *b, const char *fmt, ...)
{
    if (b->log_fd < 0)
        return;
    va_list ap;
    va_start(ap, fmt);
    (void)vdprintf(b->log_fd, fmt, ap);
    va_end(ap);
    (void)dprintf(b->log_fd, "\n");
}

int tb_check_cancelled(const struct tb *b, struct err *e)
{
    return b->cancelled ? err_set(e, -EINTR,
                                  "interrupted; finished stages are kept, the next build goes on "
                                  "from there")
                        : 0;
}

int tb_lock(struct tb *b, const char *key, int *ret_fd, struct err *e)
{
    pid_t told = -1;
    for (;;) {
        pid_t holder = 0;
        struct err inner = { 0 };
        int r = vm_store_try_lock(b->spec->state_dir, key, ret_fd, &holder, &inner);
        if (r != -EBUSY)
            return r < 0 ? err_set(e, r, "%s", inner.msg) : 0;
        r = tb_check_cancelled(b, e);
        if (r < 0)
            return r;
        if (holder != told) {
            char text[80];
            snprintf(text, sizeof(text), "waiting for another build (process %d)", (int)holder);
            report(b, VM_BUILD_WAIT, text, false);
            told = holder;
        }
        loop_step(b->loop, 200);
    }
}

int tb_lock_stage(struct tb *b, const char *key, const char *facts, int *ret_fd, struct err *e)
{
    /* Finished and in use by another build: share it. */
    if (!b->spec->refresh && fs_exists(facts) &&
        vm_store_try_share(b->spec->state_dir, key, ret_fd, NULL) == 0) {
        if (fs_exists(facts))
            return 0;
        closep(ret_fd); /* cleaned away in between */
        *ret_fd = -1;
    }
    return tb_lock(b, key, ret_fd, e);
}

void tb_key(json_t *inputs, char ret[65])
{
    assert(inputs); /* a failed json_pack would give every build the same key */
    CLEANUP(freep) char *text = json_dumps(inputs, JSON_COMPACT | JSON_SORT_KEYS);
    fs_sha256(slice_str(text), ret);
    json_decref(inputs);
}

/* ---- before anything is done ---- */

static bool in_path(const char *path, const char *program)
{
    while (path && *path) {
        size_t n = strcspn(path, ":");
        CLEANUP(freep) char *file = xasprintf("%.*s/%s", (int)n, path, program);
        if (access(file, X_OK) == 0)
            return true;
        path += n + (path[n] == ':');
    }
    return false;
}

static int check_programs(struct err *e)
{
    static const char *const needed[][2] = {
        { "mmdebstrap", "mmdebstrap" },
        { "mkfs.erofs", "erofs-utils" },
        { "apt-get", "apt" },
        { "dpkg-deb", "dpkg" },
        { "xz", "xz-utils" },
        { "zstd", "zstd" },
        { "tar", "tar" },
        { "ldd", "libc-bin" },
    };
    for (size_t i = 0; i < sizeof(needed) / sizeof(*needed); i++) {
        bool found = in_path(getenv("PATH"), needed[i][0]) ||
                     in_path("/usr/sbin:/sbin:/usr/bin:/bin", needed[i][0]);
        if (!found)
            return err_set(e, -ENOENT,
                           "%s is missing: install the Debian package %s (apt-get install %s)",
                           needed[i][0], needed[i][1], needed[i][1]);
    }
    return 0;
}

static void on_signal(void *ctx, int signum)
{
    struct tb *b = ctx;
    (void)signum;
    b->cancelled = true;
    if (b->on_cancel)
        b->on_cancel(b);
}

static int open_log(struct tb *b, struct err *e)
{
    CLEANUP(freep) char *dir = vm_store_path(b->spec->state_dir, "logs", NULL);
    int r = fs_mkdir_p(dir, 0755, e);
    if (r < 0)
        return r;
    b->log_path = xasprintf("%s/build-%s.log", dir, b->recipe->name);
    b->log_fd = open(b->log_path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    return b->log_fd < 0 ? err_errno(e, errno, "%s", b->log_path) : 0;
}

static int prepare(struct tb *b, struct err *e)
{
    const struct vm_build_spec *s = b->spec;
    struct vm_accel_verdict verdict;
    char version[32];
    int r = vm_recipe_load(s->recipe_path, &b->recipe, e);
    if (r == 0)
        r = vm_store_init(s->state_dir, e);
    if (r == 0)
        r = check_programs(e);
    if (r == 0)
        r = vm_qemu_version(s->qemu_path, version, e);
    if (r == 0 && access(s->shim_path, R_OK) < 0)
        r = err_errno(e, errno, "the guest shim %s", s->shim_path);
    if (r == 0)
        r = vm_accel_resolve(s->accel, s->qemu_path, s->state_dir, &verdict, e);
    if (r == 0)
        b->accel = verdict.accel;
    return r;
}

/* ---- initramfs and the build's identity ---- */

/* Environment of kernels: the recipe's. Under TCG, vector instructions are emulated one by one, and
 * OpenBLAS's AVX2 code is about half as fast as its SSE code; so it is told to take the latter,
 * unless the recipe has a wish of its own. */
static json_t *guest_env(const struct tb *b)
{
    json_t *env = json_copy(b->recipe->env);
    if (b->accel == VM_ACCEL_TCG && !json_object_get(env, "OPENBLAS_CORETYPE"))
        json_object_set_new(env, "OPENBLAS_CORETYPE", json_string("Nehalem"));
    return env;
}

static json_t *guest_json(const struct tb *b)
{
    const struct vm_recipe *r = b->recipe;
    return json_pack("{s:i,s:s,s:s,s:o,s:I}", "version", 1, "template", r->name, "default_kernel",
                     r->default_kernel, "env", guest_env(b), "disk_mb", (json_int_t)r->disk_mb);
}

static int stage_initramfs(struct tb *b, const char *dir, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(dir, "initrd.img");
    struct vm_initramfs_spec s = {
        .shim_path = b->spec->shim_path,
        .python_dir = b->spec->python_dir,
        .modules_dir = b->kernel_dir,
        .guest = guest_json(b),
    };
    tb_begin(b, TB_INITRAMFS, "packing the initramfs");
    int r = vm_initramfs_write(&s, path, e);
    json_decref(s.guest);
    if (r == 0)
        tb_end(b, false);
    return r;
}

/* Everything that decides the snapshot: contents, recipe, and the machine that makes it. */
static int build_hash(struct tb *b, const char *dir, char ret[65], struct err *e)
{
    CLEANUP(freep) char *initrd = fs_join(dir, "initrd.img");
    struct vm_qemu_spec q = {
        .qemu_path = b->spec->qemu_path,
        .accel = b->accel,
        .memory_mb = b->recipe->memory_mb,
        .vcpus = b->recipe->vcpus,
    };
    char sha[65], fingerprint[65];
    int r = fs_sha256_file(initrd, sha, e);
    if (r == 0)
        r = vm_qemu_fingerprint(&q, fingerprint, e);
    if (r < 0)
        return r;
    tb_key(json_pack("{s:i,s:s,s:s,s:s,s:o,s:O,s:O}", "format", VM_TEMPLATE_FORMAT, "name",
                     b->recipe->name, "initrd", sha, "machine", fingerprint, "recipe",
                     vm_recipe_snapshot_inputs(b->recipe), "root",
                     json_object_get(b->root, "sha256"), "kernel",
                     json_object_get(b->kernel, "sha256")),
           ret);
    return 0;
}

/* ---- the build folder ---- */

static int link_stages(struct tb *b, const char *dir, struct err *e)
{
    CLEANUP(freep) char *root_from = fs_join(b->root_dir, "root.erofs");
    CLEANUP(freep) char *root_to = fs_join(dir, "root.erofs");
    CLEANUP(freep) char *kernel_from = fs_join(b->kernel_dir, "vmlinux");
    CLEANUP(freep) char *kernel_to = fs_join(dir, "vmlinux");
    int r = vm_store_link_file(root_from, root_to, e);
    return r < 0 ? r : vm_store_link_file(kernel_from, kernel_to, e);
}

static json_t *file_facts(const char *dir, const char *name, bool with_sha)
{
    CLEANUP(freep) char *path = fs_join(dir, name);
    struct stat st;
    char sha[65];
    if (stat(path, &st) < 0)
        return json_null();
    json_t *v = json_pack("{s:I}", "bytes", (json_int_t)st.st_size);
    if (with_sha && fs_sha256_file(path, sha, NULL) == 0)
        json_object_set_new(v, "sha256", json_string(sha));
    return v;
}

static json_t *string_array(char **list)
{
    json_t *a = json_array();
    for (; *list; list++)
        json_array_append_new(a, json_string(*list));
    return a;
}

static json_t *stage_times(const struct tb *b)
{
    json_t *o = json_object();
    for (unsigned i = 0; i < TB_STAGES; i++)
        json_object_set_new(o, stages[i].name, json_integer((json_int_t)b->stage_ms[i]));
    return o;
}

static json_t *manifest_files(struct tb *b, const char *dir, json_t *memory)
{
    json_t *files = json_object(), *root = file_facts(dir, "root.erofs", false);
    json_object_set(root, "sha256", json_object_get(b->root, "sha256"));
    json_object_set_new(files, "root.erofs", root);
    json_object_set_new(files, "vmlinux", file_facts(dir, "vmlinux", true));
    json_object_set_new(files, "initrd.img", file_facts(dir, "initrd.img", true));
    json_object_set_new(files, "vmstate", file_facts(dir, "vmstate", true));
    json_object_set(files, "memory", memory);
    return files;
}

static int write_manifest(struct tb *b, const char *dir, const char *hash, json_t *facts,
                          struct err *e)
{
    const struct vm_recipe *r = b->recipe;
    CLEANUP(freep) char *path = fs_join(dir, "manifest.json");
    char created[TIMEFMT_ISO_LEN + 1];
    timefmt_iso(created, loop_wall_us(b->loop));
    json_t *recipe =
        json_pack("{s:s,s:s,s:o,s:o,s:o,s:O,s:s?}", "description", r->description, "suite",
                  r->suite, "apt", string_array(r->apt), "pip", string_array(r->pip), "npm",
                  string_array(r->npm), "env", r->env, "preload", r->preload);
    json_t *machine =
        json_pack("{s:s,s:O,s:O,s:I,s:I,s:i}", "accel", vm_accel_name(b->accel), "fingerprint",
                  json_object_get(facts, "fingerprint"), "qemu_version",
                  json_object_get(facts, "qemu_version"), "memory_mb", (json_int_t)r->memory_mb,
                  "disk_mb", (json_int_t)r->disk_mb, "vcpus", (int)r->vcpus);
    json_t *m =
        json_pack("{s:i,s:i,s:s,s:s,s:s,s:s,s:o,s:o,s:o,s:O,s:O,s:s?,s:O,s:O,s:o}", "format",
                  VM_TEMPLATE_FORMAT, "link_version", GL_VERSION, "name", r->name, "hash", hash,
                  "created", created, "cellvisor", CELLVISOR_VERSION, "recipe", recipe, "machine",
                  machine, "files", manifest_files(b, dir, json_object_get(facts, "memory")),
                  "kernel", json_object_get(facts, "kernel"), "specs",
                  json_object_get(facts, "specs"), "warmup", r->warmup, "guest_kernel", b->kernel,
                  "packages", json_object_get(b->root, "packages"), "stage_ms", stage_times(b));
    if (!m)
        return err_set(e, -EINVAL, "cannot describe the build");
    CLEANUP(freep) char *text = json_dumps(m, JSON_INDENT(1) | JSON_SORT_KEYS);
    json_decref(m);
    return fs_write_atomic(path, slice_str(text), 0644, e);
}

/* The build in this folder is whole and of this hash: take it. */
static bool usable(struct tb *b, const char *dir, const char *hash, struct vm_template **ret)
{
    struct err why = { 0 };
    if (vm_template_read_dir(dir, b->recipe->name, ret, &why) < 0) {
        if (fs_exists(dir))
            tb_log(b, "existing build is not usable: %s", why.msg);
        return false;
    }
    if (!strcmp((*ret)->hash, hash))
        return true;
    vm_template_free(*ret);
    *ret = NULL;
    return false;
}

/* Nothing to do when the current build, or one that another recipe state left, has this hash. */
static int reuse(struct tb *b, const char *hash, bool *ret, struct err *e)
{
    CLEANUP(freep) char *other = vm_store_path(b->spec->state_dir, "builds", hash);
    CLEANUP(freep) char *current = NULL;
    struct vm_template *t = NULL;
    *ret = false;
    if (b->spec->force || b->spec->refresh)
        return 0;
    if (vm_store_current(b->spec->state_dir, b->recipe->name, &current, NULL) == 0 &&
        usable(b, current, hash, &t)) {
        *ret = true;
        vm_template_free(t);
        return 0;
    }
    if (!usable(b, other, hash, &t))
        return 0;
    /* t holds the folder's lock: no clean-up can take it before it is published. */
    int r = vm_store_publish(b->spec->state_dir, b->recipe->name, hash, e);
    vm_template_free(t);
    *ret = r == 0;
    return r;
}

/* A folder of its own every time: a gateway may still start VMs from the one before, whose memory
 * would not fit another device state. */
static int finish(struct tb *b, const char *tmp, const char *hash, struct err *e)
{
    CLEANUP(freep) char *folder = xstrdup(hash);
    CLEANUP(freep) char *dir = vm_store_path(b->spec->state_dir, "builds", folder);
    if (fs_exists(dir)) {
        char tag[9];
        id_token(tag, 4);
        free(folder);
        free(dir);
        folder = xasprintf("%s-%s", hash, tag);
        dir = vm_store_path(b->spec->state_dir, "builds", folder);
    }
    if (rename(tmp, dir) < 0)
        return err_errno(e, errno, "%s", dir);
    CLEANUP(closep) int use = -1;
    int r = vm_store_use(dir, &use, e);
    return r < 0 ? r : vm_store_publish(b->spec->state_dir, b->recipe->name, folder, e);
}

static int snapshot(struct tb *b, const char *tmp, const char *hash, struct err *e)
{
    json_t *facts = NULL;
    int r = link_stages(b, tmp, e);
    if (r == 0)
        r = tb_stage_snapshot(b, tmp, &facts, e);
    if (r == 0)
        r = write_manifest(b, tmp, hash, facts, e);
    json_decref(facts);
    return r < 0 ? r : finish(b, tmp, hash, e);
}

static int run_stages(struct tb *b, struct vm_build_result *ret, struct err *e)
{
    CLEANUP(freep) char *tmp = xasprintf("%s/builds/.tmp-%s", b->spec->state_dir, b->recipe->name);
    bool done = false;
    int r = tb_stage_kernel(b, e);
    if (r == 0)
        r = tb_stage_root(b, e);
    if (r == 0)
        r = vm_store_remove_tree(tmp, e);
    if (r == 0)
        r = fs_mkdir_p(tmp, 0755, e);
    if (r == 0)
        r = stage_initramfs(b, tmp, e);
    if (r == 0)
        r = build_hash(b, tmp, ret->hash, e);
    if (r == 0)
        r = reuse(b, ret->hash, &done, e);
    if (r == 0 && !done)
        r = snapshot(b, tmp, ret->hash, e);
    ret->up_to_date = done;
    (void)vm_store_remove_tree(tmp, NULL);
    return r;
}

static int locked_build(struct tb *b, struct vm_build_result *ret, struct err *e)
{
    CLEANUP(freep) char *key = xasprintf("template-%s", b->recipe->name);
    CLEANUP(closep) int lock = -1;
    int r = tb_lock(b, key, &lock, e);
    if (r == 0)
        r = open_log(b, e);
    if (r == 0)
        r = run_stages(b, ret, e);
    if (r == 0) {
        (void)vm_store_clean(b->spec->state_dir, false);
        struct vm_template *t = NULL;
        r = vm_template_read(b->spec->state_dir, b->recipe->name, &t, e);
        if (r == 0)
            ret->bytes = t->image_bytes + t->memory_bytes_used;
        vm_template_free(t);
    } else if (r != -EINTR && b->log_fd >= 0 && e) {
        tb_log(b, "FAILED: %s", e->msg);
        char msg[sizeof(e->msg)];
        memcpy(msg, e->msg, sizeof(msg));
        err_set(e, r, "%s: %.350s (log: %s)", stages[b->stage].name, msg, b->log_path);
    }
    return r;
}

static void tb_fini(struct tb *b)
{
    loop_signal_free(b->sigint);
    loop_signal_free(b->sigterm);
    loop_free(b->loop);
    closep(&b->log_fd);
    closep(&b->kernel_lock);
    closep(&b->root_lock);
    vm_recipe_free(b->recipe);
    json_decref(b->kernel);
    json_decref(b->root);
    char *strings[] = { b->log_path, b->mirror, b->mirror_security, b->kernel_dir, b->root_dir };
    for (size_t i = 0; i < sizeof(strings) / sizeof(*strings); i++)
        free(strings[i]);
}

int vm_build(const struct vm_build_spec *spec, vm_build_progress_fn fn, void *ctx,
             struct vm_build_result *ret, struct err *e)
{
    struct tb b = {
        .spec = spec, .fn = fn, .ctx = ctx, .log_fd = -1, .kernel_lock = -1, .root_lock = -1
    };
    struct vm_build_result result = { .up_to_date = false };
    log_ctx_init(&b.log, NULL);
    b.loop = loop_new();
    b.sigint = loop_signal_new(b.loop, SIGINT, on_signal, &b);
    b.sigterm = loop_signal_new(b.loop, SIGTERM, on_signal, &b);
    uint64_t began = loop_now_us(b.loop);
    int r = prepare(&b, e);
    if (r == 0)
        r = locked_build(&b, &result, e);
    result.ms = (loop_now_us(b.loop) - began) / 1000;
    if (r == 0) {
        snprintf(result.name, sizeof(result.name), "%s", b.recipe->name);
        *ret = result;
    }
    tb_fini(&b);
    return r;
}
