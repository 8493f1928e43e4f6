#include "vm/template.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/json.h"
#include "common/mem.h"
#include "proto/gl.h"
#include "vm/qemu.h"
#include "vm/store.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MANIFEST_MAX (16u << 20)
#define BLOCK (64u << 10)

/* ---- RAM images ---- */

static void md_freep(EVP_MD_CTX **c)
{
    EVP_MD_CTX_free(*c);
}

static int read_full(int fd, uint8_t *p, size_t n, uint64_t at)
{
    size_t have = 0;
    while (have < n) {
        ssize_t r = pread(fd, p + have, n - have, (off_t)(at + have));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -errno;
        if (r == 0)
            return -ENODATA;
        have += (size_t)r;
    }
    return 0;
}

static int write_full(int fd, const uint8_t *p, size_t n, uint64_t at)
{
    while (n) {
        ssize_t r = pwrite(fd, p, n, (off_t)at);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -errno;
        p += r;
        at += (uint64_t)r;
        n -= (size_t)r;
    }
    return 0;
}

static bool all_zero(const uint8_t *p, size_t n)
{
    return p[0] == 0 && !memcmp(p, p + 1, n - 1);
}

static int copy_block(int in, int out, uint64_t at, size_t n, uint8_t *block, EVP_MD_CTX *md,
                      uint64_t *used)
{
    int r = read_full(in, block, n, at);
    if (r < 0 || all_zero(block, n))
        return r;
    uint8_t where[8];
    for (int i = 0; i < 8; i++)
        where[i] = (uint8_t)(at >> (8 * i));
    if (EVP_DigestUpdate(md, where, sizeof(where)) != 1 || EVP_DigestUpdate(md, block, n) != 1)
        return -EIO;
    *used += n;
    return write_full(out, block, n, at);
}

int vm_memory_copy(int in, int out, uint64_t size, uint64_t *ret_used, char ret_digest[65],
                   struct err *e)
{
    CLEANUP(md_freep) EVP_MD_CTX *md = EVP_MD_CTX_new();
    CLEANUP(freep) uint8_t *block = xmalloc(BLOCK);
    uint64_t used = 0, at = 0;
    int r = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 ? 0 : -ENOMEM;
    while (r == 0 && at < size) {
        /* Skip holes; no SEEK_DATA on this file system means reading everything. */
        off_t data = lseek(in, (off_t)at, SEEK_DATA);
        if (data < 0 && errno == ENXIO)
            break;
        if (data > (off_t)at)
            at = (uint64_t)data & ~(uint64_t)(BLOCK - 1);
        if (at >= size)
            break;
        size_t n = size - at < BLOCK ? (size_t)(size - at) : BLOCK;
        r = copy_block(in, out, at, n, block, md, &used);
        at += n;
    }
    uint8_t sum[32];
    unsigned len = sizeof(sum);
    if (r == 0 && EVP_DigestFinal_ex(md, sum, &len) != 1)
        r = -EIO;
    if (r < 0)
        return err_errno(e, -r, "copying guest memory");
    *ret_used = used;
    id_hex(ret_digest, sum, sizeof(sum));
    return 0;
}

int vm_template_open_memory(const struct vm_template *t, int *ret_fd, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(t->dir, "memory");
    CLEANUP(closep) int in = open(path, O_RDONLY | O_CLOEXEC);
    if (in < 0)
        return err_errno(e, errno, "%s", path);
    CLEANUP(closep) int fd = memfd_create("cellvisor-template", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    uint64_t size = t->memory_mb << 20, used = 0;
    if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
        return err_errno(e, errno, "memory for template %s (%" PRIu64 " MB)", t->name,
                         t->memory_mb);
    char digest[65];
    int r = vm_memory_copy(in, fd, size, &used, digest, e);
    if (r < 0)
        return r;
    const char *want = NULL;
    json_unpack(t->manifest, "{s:{s:{s:s}}}", "files", "memory", "digest", &want);
    if (!want || strcmp(want, digest) != 0)
        return err_set(e, -EINVAL,
                       "%s is corrupt (digest differs): run `cellvisor template build %s --force`",
                       path, t->name);
    /* Sealed: no VMM process, whatever happens to it, can change what later clones start from. */
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0)
        return err_errno(e, errno, "sealing the memory of template %s", t->name);
    *ret_fd = TAKE_FD(fd);
    return 0;
}

int vm_template_open_state(const struct vm_template *t, int *ret_fd, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(t->dir, "vmstate");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    *ret_fd = fd;
    return 0;
}

/* ---- manifest ---- */

void vm_template_free(struct vm_template *t)
{
    if (!t)
        return;
    char *strings[] = { t->name,         t->dir,         t->hash,  t->fingerprint,
                        t->default_spec, t->kernel_info, t->warmup };
    for (size_t i = 0; i < sizeof(strings) / sizeof(*strings); i++)
        free(strings[i]);
    json_decref(t->specs);
    json_decref(t->manifest);
    closep(&t->use_fd);
    free(t);
}

static int check_file(const struct vm_template *t, const char *name, json_t *v, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(t->dir, name);
    struct stat st;
    json_int_t bytes = -1;
    const char *sha = NULL;
    if (json_unpack(v, "{s:I}", "bytes", &bytes) < 0)
        return err_set(e, -EINVAL, "files.%s: no size", name);
    json_unpack(v, "{s:s}", "sha256", &sha);
    if (stat(path, &st) < 0)
        return err_set(e, -EINVAL, "%s is missing", name);
    if (st.st_size != bytes)
        return err_set(e, -EINVAL, "%s has %jd bytes, not %jd", name, (intmax_t)st.st_size,
                       (intmax_t)bytes);
    /* Big files: the image is read on demand by guests, RAM is checked when it is loaded. */
    char have[65];
    if (!sha || strcmp(name, "vmstate") != 0)
        return 0;
    int r = fs_sha256_file(path, have, e);
    if (r < 0)
        return r;
    return strcmp(have, sha) ? err_set(e, -EINVAL, "%s: SHA-256 differs", name) : 0;
}

static int check_files(const struct vm_template *t, struct err *e)
{
    static const char *const needed[] = { "root.erofs", "memory", "vmstate" };
    json_t *files = json_object_get(t->manifest, "files");
    for (size_t i = 0; i < sizeof(needed) / sizeof(*needed); i++) {
        json_t *v = json_object_get(files, needed[i]);
        int r =
            v ? check_file(t, needed[i], v, e) : err_set(e, -EINVAL, "files: no \"%s\"", needed[i]);
        if (r < 0)
            return r;
    }
    return 0;
}

static int read_machine(struct vm_template *t, struct err *e)
{
    struct json_obj o;
    const char *accel = "", *fingerprint = NULL;
    uint64_t vcpus = 1;
    int r = json_obj_of(json_object_get(t->manifest, "machine"), "machine", &o, e);
    if (r < 0 || (r = json_get_u64(&o, "memory_mb", 1, 1u << 20, &t->memory_mb, e)) < 0 ||
        (r = json_get_u64(&o, "disk_mb", 0, 1u << 20, &t->disk_mb, e)) < 0 ||
        (r = json_get_u64(&o, "vcpus", 1, 32, &vcpus, e)) < 0 ||
        (r = json_get_str(&o, "accel", &accel, e)) < 0 ||
        (r = json_get_str(&o, "fingerprint", &fingerprint, e)) < 0)
        return r;
    t->vcpus = (unsigned)vcpus;
    if (!t->memory_mb || !fingerprint || vm_accel_parse(accel, &t->accel) < 0 ||
        t->accel == VM_ACCEL_AUTO)
        return err_set(e, -EINVAL, "machine: memory_mb, accel or fingerprint is missing");
    t->fingerprint = xstrdup(fingerprint);
    return 0;
}

static int read_kernel(struct vm_template *t, struct err *e)
{
    struct json_obj o, top;
    const char *spec = NULL, *warmup = NULL, *hash = NULL;
    json_t *info = NULL, *specs = NULL;
    int r;
    if ((r = json_obj_of(t->manifest, "", &top, e)) < 0 ||
        (r = json_obj_of(json_object_get(t->manifest, "kernel"), "kernel", &o, e)) < 0 ||
        (r = json_get_str(&o, "spec", &spec, e)) < 0 ||
        (r = json_get_obj(&o, "info", &info, e)) < 0 ||
        (r = json_get_str(&top, "warmup", &warmup, e)) < 0 ||
        (r = json_get_str(&top, "hash", &hash, e)) < 0 ||
        (r = json_get_obj(&top, "specs", &specs, e)) < 0)
        return r;
    if (!spec || !info || !specs || !hash)
        return err_set(e, -EINVAL, "hash, specs, kernel.spec or kernel.info is missing");
    t->default_spec = xstrdup(spec);
    t->kernel_info = json_dumps(info, JSON_COMPACT);
    t->specs = json_incref(specs);
    t->warmup = xstrdup(warmup);
    t->hash = xstrdup(hash);
    return 0;
}

static int read_all(struct vm_template *t, struct err *e)
{
    json_int_t format = 0, link = 0, used = 0, image = 0;
    json_unpack(t->manifest, "{s:I,s:I}", "format", &format, "link_version", &link);
    if (format != VM_TEMPLATE_FORMAT || link != GL_VERSION)
        return err_set(e, -ESTALE, "built by another version of Cellvisor");
    json_unpack(t->manifest, "{s:{s:{s:I},s:{s:I}}}", "files", "memory", "used", &used,
                "root.erofs", "bytes", &image);
    t->memory_bytes_used = (uint64_t)used;
    t->image_bytes = (uint64_t)image;
    int r = read_machine(t, e);
    if (r == 0)
        r = read_kernel(t, e);
    return r < 0 ? r : check_files(t, e);
}

int vm_template_read_dir(const char *dir, const char *name, struct vm_template **ret, struct err *e)
{
    struct vm_template *t = xnew(struct vm_template);
    struct err inner = { 0 };
    t->name = xstrdup(name);
    t->dir = xstrdup(dir);
    t->use_fd = -1;
    int r = vm_store_use(dir, &t->use_fd, e);
    if (r < 0) {
        vm_template_free(t);
        return r;
    }
    CLEANUP(freep) char *path = fs_join(dir, "manifest.json");
    t->manifest = json_parse_file(path, MANIFEST_MAX, &inner);
    r = t->manifest ? read_all(t, &inner) : -EINVAL;
    if (r < 0) {
        err_set(e, r, "template \"%s\" cannot be used: %s; run `cellvisor template build %s%s`",
                name, inner.msg, name, r == -ESTALE ? "" : " --force");
        vm_template_free(t);
        return r;
    }
    *ret = t;
    return 0;
}

int vm_template_read(const char *state_dir, const char *name, struct vm_template **ret,
                     struct err *e)
{
    CLEANUP(freep) char *dir = NULL;
    int r = vm_store_current(state_dir, name, &dir, e);
    return r < 0 ? r : vm_template_read_dir(dir, name, ret, e);
}

int vm_template_check(const struct vm_template *t, const char *qemu_path, struct err *e)
{
    struct vm_qemu_spec spec = {
        .qemu_path = qemu_path,
        .accel = t->accel,
        .memory_mb = t->memory_mb,
        .vcpus = t->vcpus,
    };
    char now[65], version[32];
    int r = vm_qemu_version(qemu_path, version, e);
    if (r < 0 || (r = vm_qemu_fingerprint(&spec, now, e)) < 0)
        return r;
    if (!strcmp(now, t->fingerprint))
        return 0;
    const char *was = "?";
    json_unpack(t->manifest, "{s:{s:s}}", "machine", "qemu_version", &was);
    return err_set(e, -ESTALE,
                   "template \"%s\" is stale: its snapshot was made %s%s%s; run "
                   "`cellvisor template build %s`",
                   t->name, strcmp(was, version) ? "with QEMU " : "for another CPU or machine type",
                   strcmp(was, version) ? was : "", strcmp(was, version) ? ", not this one" : "",
                   t->name);
}

int vm_template_load(const char *state_dir, const char *name, struct vm_template **ret,
                     struct err *e)
{
    struct vm_template *t = NULL;
    int r = vm_template_read(state_dir, name, &t, e);
    if (r < 0)
        return r;
    r = vm_template_check(t, NULL, e);
    if (r < 0) {
        vm_template_free(t);
        return r;
    }
    *ret = t;
    return 0;
}

json_t *vm_template_names(const char *state_dir)
{
    return vm_store_names(state_dir);
}
