/* The guest's kernel: Debian's cloud kernel out of its package, which is unpacked but never
 * installed. Kept of it: the uncompressed ELF kernel and the few modules our init loads.
 *
 * Uncompressed, because a guest under TCG would spend seconds on its own decompressor; QEMU boots
 * the ELF by its PVH note. Modules likewise. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/rdwr.h"
#include "vm/store.h"
#include "vm/template_priv.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#define META_PACKAGE "linux-image-cloud-amd64"
#define KERNEL_MAX (256u << 20)
#define MODULE_MAX (32u << 20)
#define MODULES_MAX 64u

/* What init needs beyond the kernel proper; dependencies are found in the modules themselves. */
static const char *const wanted[] = { "virtio_blk", "erofs", "overlay", "virtio_rng" };

struct modules {
    char *tree;      /* .../lib/modules/VERSION */
    char *order;     /* modules.order: paths of all modules */
    char *builtin;   /* modules.builtin */
    const char *out; /* where .ko files go */
    char *done[MODULES_MAX];
    size_t n_done;
};

static bool same_module(const char *file, size_t n, const char *name)
{
    if (n != strlen(name))
        return false;
    for (size_t i = 0; i < n; i++) {
        char a = file[i] == '-' ? '_' : file[i], b = name[i] == '-' ? '_' : name[i];
        if (a != b)
            return false;
    }
    return true;
}

char *tb_find_module(const char *list, const char *name)
{
    while (*list) {
        size_t n = strcspn(list, "\n");
        CLEANUP(freep) char *line = xstrndup(list, n);
        char *base = strrchr(line, '/');
        char *dot = base ? strstr(base, ".ko") : NULL;
        if (dot && same_module(base + 1, (size_t)(dot - base - 1), name)) {
            dot[3] = '\0'; /* without a compression suffix */
            return xstrdup(line);
        }
        list += n + (list[n] == '\n');
    }
    return NULL;
}

char *tb_module_depends(struct slice ko)
{
    static const char key[] = "\0depends=";
    const uint8_t *at = memmem(ko.p, ko.n, key, sizeof(key) - 1);
    if (!at)
        return xstrdup("");
    at += sizeof(key) - 1;
    return xstrndup((const char *)at, strnlen((const char *)at, ko.n - (size_t)(at - ko.p)));
}

/* The module's bytes, decompressed by the tool its suffix asks for. */
static int read_module(struct tb *b, const struct modules *m, const char *path, struct buf *ret,
                       struct err *e)
{
    static const char *const tools[][2] = {
        { "", NULL }, { ".xz", "xz" }, { ".zst", "zstd" }, { ".gz", "gzip" }
    };
    for (size_t i = 0; i < sizeof(tools) / sizeof(*tools); i++) {
        CLEANUP(freep) char *full = xasprintf("%s/%s%s", m->tree, path, tools[i][0]);
        if (!fs_exists(full))
            continue;
        if (!tools[i][1])
            return fs_read_file(full, MODULE_MAX, ret, e);
        const char *const argv[] = { tools[i][1], "-dc", full, NULL };
        return tb_run_text(b, argv, NULL, MODULE_MAX, ret, "decompressing a kernel module", e);
    }
    return err_set(e, -ENOENT, "kernel module %s is listed but not in the package", path);
}

static int add_module(struct tb *b, struct modules *m, const char *name, unsigned depth,
                      struct err *e);

static int add_depends(struct tb *b, struct modules *m, char *depends, unsigned depth,
                       struct err *e)
{
    char *save;
    int r = 0;
    for (char *d = strtok_r(depends, ",", &save); r == 0 && d; d = strtok_r(NULL, ",", &save))
        r = add_module(b, m, d, depth + 1, e);
    return r;
}

/* Depth first, so that done[] is in load order. */
static int add_module(struct tb *b, struct modules *m, const char *name, unsigned depth,
                      struct err *e)
{
    CLEANUP(freep) char *path = tb_find_module(m->order, name);
    if (!path) {
        CLEANUP(freep) char *built_in = tb_find_module(m->builtin, name);
        if (built_in)
            return 0;
        return err_set(e, -ENOENT, "the guest kernel has no module %s", name);
    }
    const char *base = strrchr(path, '/') + 1;
    for (size_t i = 0; i < m->n_done; i++) {
        if (!strcmp(m->done[i], base))
            return 0;
    }
    if (depth > 8 || m->n_done == MODULES_MAX)
        return err_set(e, -E2BIG, "module %s has too many dependencies", name);
    struct buf ko;
    int r = read_module(b, m, path, &ko, e);
    if (r < 0)
        return r;
    CLEANUP(freep) char *depends = tb_module_depends(buf_slice(&ko));
    CLEANUP(freep) char *out = fs_join(m->out, base);
    r = add_depends(b, m, depends, depth, e);
    if (r == 0)
        r = fs_write_atomic(out, buf_slice(&ko), 0644, e);
    buf_fini(&ko);
    if (r == 0)
        m->done[m->n_done++] = xstrdup(base);
    return r;
}

static char *slurp(const char *dir, const char *name)
{
    CLEANUP(freep) char *path = fs_join(dir, name);
    struct buf b;
    if (fs_read_file(path, 4u << 20, &b, NULL) < 0)
        return xstrdup("");
    char *text = xstrdup(buf_cstr(&b) ? buf_cstr(&b) : "");
    buf_fini(&b);
    return text;
}

static int take_modules(struct tb *b, const char *tree, const char *out, struct err *e)
{
    struct modules m = { .tree = xstrdup(tree), .out = out };
    struct buf list;
    int r = 0;
    m.order = slurp(tree, "modules.order");
    m.builtin = slurp(tree, "modules.builtin");
    buf_init(&list, 64u << 10);
    for (size_t i = 0; r == 0 && i < sizeof(wanted) / sizeof(*wanted); i++)
        r = add_module(b, &m, wanted[i], 0, e);
    for (size_t i = 0; i < m.n_done; i++) {
        if (r == 0)
            r = buf_printf(&list, "%s\n", m.done[i]);
        free(m.done[i]);
    }
    CLEANUP(freep) char *path = fs_join(out, "modules.list");
    if (r == 0)
        r = fs_write_atomic(path, buf_slice(&list), 0644, e);
    buf_fini(&list);
    free(m.tree);
    free(m.order);
    free(m.builtin);
    return r;
}

int tb_bzimage_payload(struct slice image, struct slice *ret)
{
    if (image.n < 0x250 || memcmp(image.p + 0x202, "HdrS", 4) != 0)
        return -EINVAL;
    struct rd r = rd_of(slice_of(image.p + 0x248, 8));
    uint64_t offset = rd_u32le(&r), length = rd_u32le(&r);
    size_t sects = image.p[0x1f1] ? image.p[0x1f1] : 4;
    uint64_t start = (sects + 1) * 512 + offset;
    if (start > image.n || length > image.n - start || length < 8)
        return -EINVAL;
    *ret = slice_of(image.p + start, (size_t)length);
    return 0;
}

static const char *decompressor(struct slice payload)
{
    static const struct {
        const char *magic;
        size_t n;
        const char *tool;
    } known[] = { { "\x28\xb5\x2f\xfd", 4, "zstd" },
                  { "\xfd\x37\x7a\x58\x5a", 5, "xz" },
                  { "\x1f\x8b", 2, "gzip" },
                  { "\x02\x21\x4c\x18", 4, "lz4" } };
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (payload.n > known[i].n && !memcmp(payload.p, known[i].magic, known[i].n))
            return known[i].tool;
    }
    return NULL;
}

/* The payload ends with the unpacked size (u32le), which decompressors reject as garbage. */
static int unpack_kernel(struct tb *b, const char *vmlinuz, const char *out, struct err *e)
{
    struct buf image, elf;
    struct slice payload;
    int r = fs_read_file(vmlinuz, KERNEL_MAX, &image, e);
    if (r < 0)
        return r;
    const char *tool = NULL;
    if (tb_bzimage_payload(buf_slice(&image), &payload) == 0)
        tool = decompressor(payload);
    if (!tool) {
        buf_fini(&image);
        return err_set(e, -EINVAL, "%s is not a kernel image of a kind we know", vmlinuz);
    }
    CLEANUP(freep) char *packed = xasprintf("%s.packed", out);
    r = fs_write_atomic(packed, slice_of(payload.p, payload.n - 4), 0600, e);
    buf_fini(&image);
    const char *const argv[] = { tool, "-dcq", packed, NULL };
    if (r == 0)
        r = tb_run_text(b, argv, NULL, KERNEL_MAX, &elf, "decompressing the guest kernel", e);
    unlink(packed);
    if (r < 0)
        return r;
    struct slice s = buf_slice(&elf);
    if (s.n < 64 || memcmp(s.p,
                           "\x7f"
                           "ELF",
                           4) != 0)
        r = err_set(e, -EINVAL, "the guest kernel does not unpack to an ELF file");
    else
        r = fs_write_atomic(out, s, 0644, e);
    buf_fini(&elf);
    return r;
}

/* The real package behind the meta package, e.g. linux-image-6.12.117+deb13-cloud-amd64. */
static int find_package(struct tb *b, const struct tb_apt *apt, char **ret, struct err *e)
{
    const char *const argv[] = { "apt-cache", "depends", "--important", META_PACKAGE, NULL };
    struct buf out;
    int r = tb_run_text(b, argv, (const char *const *)apt->env, 1u << 20, &out,
                        "looking for Debian's cloud kernel", e);
    if (r < 0)
        return r;
    const char *text = buf_cstr(&out);
    const char *at = text ? strstr(text, "Depends: linux-image-") : NULL;
    if (at) {
        at += strlen("Depends: ");
        *ret = xstrndup(at, strcspn(at, " \n"));
    }
    buf_fini(&out);
    return at ? 0 : err_set(e, -ENOENT, "Debian %s has no " META_PACKAGE, b->recipe->suite);
}

/* First entry of dir that starts with prefix, as a path; NULL when none. */
static char *first_entry(const char *dir, const char *prefix)
{
    DIR *d = opendir(dir);
    char *found = NULL;
    struct dirent *de;
    while (d && !found && (de = readdir(d))) {
        if (de->d_name[0] != '.' && !strncmp(de->d_name, prefix, strlen(prefix)))
            found = fs_join(dir, de->d_name);
    }
    if (d)
        closedir(d);
    return found;
}

static int fetch(struct tb *b, const char *work, char **ret_package, struct err *e)
{
    CLEANUP(freep) char *apt_dir = fs_join(work, "apt");
    CLEANUP(freep) char *debs = fs_join(work, "deb");
    CLEANUP(freep) char *tree = fs_join(work, "tree");
    struct tb_apt apt;
    int r = tb_apt_open(b, apt_dir, &apt, e);
    if (r < 0)
        return r;
    CLEANUP(freep) char *package = NULL;
    r = find_package(b, &apt, &package, e);
    if (r == 0)
        r = fs_mkdir_p(debs, 0755, e);
    if (r == 0) {
        tb_step(b, 0.4, "downloading %s", package);
        const char *const argv[] = { "apt-get", "-q", "download", package, NULL };
        struct tb_cmd cmd = { .argv = argv,
                              .env = (const char *const *)apt.env,
                              .cwd = debs,
                              .keep_fd = -1,
                              .out_fd = -1 };
        r = tb_run_ok(b, &cmd, "downloading the guest kernel", e);
    }
    tb_apt_close(&apt);
    CLEANUP(freep) char *deb = r == 0 ? first_entry(debs, "linux-image-") : NULL;
    if (r == 0 && !deb)
        r = err_set(e, -EIO, "apt-get download left no file");
    if (r == 0) {
        tb_step(b, 0.6, "unpacking %s", package);
        const char *const argv[] = { "dpkg-deb", "-x", deb, tree, NULL };
        struct tb_cmd cmd = { .argv = argv, .keep_fd = -1, .out_fd = -1 };
        r = tb_run_ok(b, &cmd, "unpacking the guest kernel", e);
    }
    if (r == 0)
        *ret_package = TAKE_PTR(package);
    return r;
}

/* tree -> out (vmlinux, *.ko, modules.list, kernel.json). */
static int extract(struct tb *b, const char *work, const char *out, const char *package,
                   struct err *e)
{
    CLEANUP(freep) char *boot = fs_join(work, "tree/boot");
    CLEANUP(freep) char *usr = fs_join(work, "tree/usr/lib/modules");
    CLEANUP(freep) char *lib = fs_join(work, "tree/lib/modules");
    CLEANUP(freep) char *vmlinuz = first_entry(boot, "vmlinuz-");
    CLEANUP(freep) char *modules = first_entry(fs_exists(usr) ? usr : lib, "");
    CLEANUP(freep) char *elf = fs_join(out, "vmlinux");
    CLEANUP(freep) char *facts_path = fs_join(out, "kernel.json");
    if (!vmlinuz || !modules)
        return err_set(e, -ENOENT, "%s holds no kernel or no modules", package);
    int r = fs_mkdir_p(out, 0755, e);
    if (r == 0)
        r = unpack_kernel(b, vmlinuz, elf, e);
    if (r == 0)
        r = take_modules(b, modules, out, e);
    char sha[65];
    if (r == 0)
        r = fs_sha256_file(elf, sha, e);
    if (r < 0)
        return r;
    json_t *facts = json_pack("{s:s,s:s,s:s}", "package", package, "version",
                              strrchr(modules, '/') + 1, "sha256", sha);
    CLEANUP(freep) char *text = json_dumps(facts, JSON_INDENT(1));
    json_decref(facts);
    return fs_write_atomic(facts_path, slice_str(text), 0644, e);
}

static int build_kernel(struct tb *b, const char *work, const char *final, struct err *e)
{
    CLEANUP(freep) char *out = fs_join(work, "out");
    CLEANUP(freep) char *package = NULL;
    int r = vm_store_remove_tree(work, e);
    if (r == 0)
        r = fs_mkdir_p(work, 0700, e);
    if (r == 0)
        r = tb_mirror(b, e);
    if (r == 0)
        r = fetch(b, work, &package, e);
    if (r == 0) {
        tb_step(b, 0.8, "taking kernel and modules out of %s", package);
        r = extract(b, work, out, package, e);
    }
    if (r == 0)
        r = vm_store_remove_tree(final, e);
    if (r == 0 && rename(out, final) < 0)
        r = err_errno(e, errno, "%s", final);
    (void)vm_store_remove_tree(work, NULL);
    return r;
}

int tb_stage_kernel(struct tb *b, struct err *e)
{
    char key[65];
    tb_key(json_pack("{s:i,s:s}", "kernel", 1, "suite", b->recipe->suite), key);
    CLEANUP(freep) char *name = xasprintf("kernel-%.16s", key);
    CLEANUP(freep) char *dir = vm_store_path(b->spec->state_dir, "cache", name);
    CLEANUP(freep) char *work = xasprintf("%s/cache/.tmp-%s", b->spec->state_dir, name);
    CLEANUP(freep) char *facts = fs_join(dir, "kernel.json");
    tb_begin(b, TB_KERNEL, "guest kernel");
    int r = tb_lock_stage(b, name, facts, &b->kernel_lock, e);
    if (r < 0)
        return r;
    bool cached = !b->spec->refresh && fs_exists(facts);
    if (!cached)
        r = build_kernel(b, work, dir, e);
    if (r < 0)
        return r;
    b->kernel = json_load_file(facts, 0, NULL);
    if (!json_is_string(json_object_get(b->kernel, "sha256")))
        return err_set(e, -EINVAL, "%s is damaged: remove the folder and build again", facts);
    (void)vm_store_share_lock(b->kernel_lock);
    b->kernel_dir = TAKE_PTR(dir);
    tb_end(b, cached);
    return 0;
}
