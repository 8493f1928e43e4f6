#include "vm/initramfs.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/proc.h"
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define LDD_MAX (256u << 10)
#define LIBS_MAX 128u
/* What our PID 1 mounts on or writes to before it has a root file system. */
static const char *const guest_dirs[] = { "proc", "sys", "dev",     "run",
                                          "tmp",  "rw",  "newroot", "lower" };

/* ---- cpio ---- */

void vm_cpio_init(struct vm_cpio *c)
{
    *c = (struct vm_cpio) { .next_inode = 1 };
    buf_init(&c->out, VM_INITRAMFS_MAX);
}

void vm_cpio_fini(struct vm_cpio *c)
{
    buf_fini(&c->out);
    for (size_t i = 0; i < c->n_dirs; i++)
        free(c->dirs[i]);
    free(c->dirs);
    c->dirs = NULL;
    c->n_dirs = 0;
}

static int pad4(struct vm_cpio *c)
{
    static const uint8_t zeros[4];
    size_t over = buf_slice(&c->out).n % 4;
    return over ? buf_append(&c->out, zeros, 4 - over) : 0;
}

static int entry(struct vm_cpio *c, const char *path, unsigned mode, struct slice content)
{
    /* magic ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize
     * check */
    int r = buf_printf(&c->out, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
                       c->next_inode++, mode, 0u, 0u, S_ISDIR(mode) ? 2u : 1u, 0u,
                       (unsigned)content.n, 0u, 0u, 0u, 0u, (unsigned)strlen(path) + 1, 0u);
    if (r == 0)
        r = buf_append(&c->out, path, strlen(path) + 1);
    if (r == 0)
        r = pad4(c);
    if (r == 0)
        r = buf_append_slice(&c->out, content);
    return r == 0 ? pad4(c) : r;
}

static int one_dir(struct vm_cpio *c, const char *path)
{
    for (size_t i = 0; i < c->n_dirs; i++) {
        if (!strcmp(c->dirs[i], path))
            return 0;
    }
    int r = entry(c, path, S_IFDIR | 0755, SLICE_NULL);
    if (r < 0)
        return r;
    c->dirs = xrealloc(c->dirs, (c->n_dirs + 1) * sizeof(*c->dirs));
    c->dirs[c->n_dirs++] = xstrdup(path);
    return 0;
}

static int parents(struct vm_cpio *c, const char *path)
{
    for (const char *s = strchr(path, '/'); s; s = strchr(s + 1, '/')) {
        CLEANUP(freep) char *dir = xstrndup(path, (size_t)(s - path));
        int r = one_dir(c, dir);
        if (r < 0)
            return r;
    }
    return 0;
}

int vm_cpio_dir(struct vm_cpio *c, const char *path)
{
    int r = parents(c, path);
    return r < 0 ? r : one_dir(c, path);
}

int vm_cpio_file(struct vm_cpio *c, const char *path, unsigned mode, struct slice content)
{
    int r = parents(c, path);
    return r < 0 ? r : entry(c, path, S_IFREG | mode, content);
}

int vm_cpio_copy(struct vm_cpio *c, const char *path, unsigned mode, const char *host_path,
                 struct err *e)
{
    struct buf b;
    int r = fs_read_file(host_path, VM_INITRAMFS_MAX, &b, e);
    if (r < 0)
        return r;
    r = vm_cpio_file(c, path, mode, buf_slice(&b));
    buf_fini(&b);
    return r < 0 ? err_errno(e, -r, "%s does not fit into the initramfs", host_path) : 0;
}

int vm_cpio_finish(struct vm_cpio *c)
{
    c->next_inode = 0;
    return entry(c, "TRAILER!!!", 0, SLICE_NULL);
}

/* ---- libraries ---- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* "\tlibc.so.6 => /lib/.../libc.so.6 (0x..)", "\t/lib64/ld-linux-x86-64.so.2 (0x..)",
 * "\tlinux-vdso.so.1 (0x..)", "\tlibx.so.1 => not found". 1: *ret is a path; 0: nothing to copy. */
static int ldd_line(char *line, const char *program, char **ret, struct err *e)
{
    line += strspn(line, " \t");
    char *arrow = strstr(line, " => ");
    char *path = arrow ? arrow + 4 : line;
    if (arrow && !strncmp(path, "not found", 9)) {
        *arrow = '\0';
        return err_set(e, -ENOENT, "%s needs the library %.100s, which is not installed", program,
                       line);
    }
    if (*path != '/')
        return 0;
    path[strcspn(path, " ")] = '\0';
    *ret = path;
    return 1;
}

static int parse_ldd(char *text, const char *program, char **list, struct err *e)
{
    char *save;
    size_t n = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *path;
        int r = ldd_line(line, program, &path, e);
        if (r < 0)
            return r;
        if (r > 0 && n == LIBS_MAX)
            return err_set(e, -E2BIG, "%s needs more than %u libraries", program, LIBS_MAX);
        if (r > 0)
            list[n++] = xstrdup(path);
    }
    qsort(list, n, sizeof(*list), by_text);
    return 0;
}

static void free_list(char **list)
{
    for (size_t i = 0; list && list[i]; i++)
        free(list[i]);
    free(list);
}

int vm_ldd(const char *program, char ***ret, struct err *e)
{
    const char *const argv[] = { "ldd", program, NULL };
    struct proc_spec spec = { .argv = argv };
    CLEANUP(closep) int out = memfd_create("ldd", MFD_CLOEXEC);
    CLEANUP(freep) char *text = xcalloc(1, LDD_MAX);
    if (out < 0)
        return err_errno(e, errno, "memfd_create");
    if (!fs_exists(program))
        return err_set(e, -ENOENT, "%s does not exist", program);
    int code = proc_run(&spec, out, e);
    if (code < 0)
        return code;
    if (pread(out, text, LDD_MAX - 1, 0) < 0)
        return err_errno(e, errno, "reading what ldd said");
    char **list = xcalloc(LIBS_MAX + 1, sizeof(*list));
    /* ldd fails for static programs ("not a dynamic executable"): they need nothing. */
    int r = code == 0 ? parse_ldd(text, program, list, e) : 0;
    if (r < 0) {
        free_list(list);
        return r;
    }
    *ret = list;
    return 0;
}

/* ---- the archive ---- */

static int add_init(struct vm_cpio *c, const char *shim, struct err *e)
{
    char **libs = NULL;
    int r = vm_ldd(shim, &libs, e);
    if (r == 0)
        r = vm_cpio_copy(c, "init", 0755, shim, e);
    for (size_t i = 0; r == 0 && libs[i]; i++)
        r = vm_cpio_copy(c, libs[i] + 1, 0755, libs[i], e);
    free_list(libs);
    return r;
}

static int add_modules(struct vm_cpio *c, const char *dir, struct err *e)
{
    CLEANUP(freep) char *list = fs_join(dir, "modules.list");
    struct buf names, paths;
    int r = fs_read_file(list, 64u << 10, &names, e);
    if (r < 0)
        return r;
    buf_init(&paths, 64u << 10);
    char *text = buf_cstr(&names), *save;
    char *name = text ? strtok_r(text, "\n", &save) : NULL;
    for (; r == 0 && name; name = strtok_r(NULL, "\n", &save)) {
        CLEANUP(freep) char *host = fs_join(dir, name);
        CLEANUP(freep) char *path = xasprintf("modules/%s", name);
        r = vm_cpio_copy(c, path, 0644, host, e);
        if (r == 0)
            r = buf_printf(&paths, "/%s\n", path);
    }
    if (r == 0)
        r = vm_cpio_file(c, "modules.list", 0644, buf_slice(&paths));
    buf_fini(&names);
    buf_fini(&paths);
    return r;
}

static int plain_files(const struct dirent *de)
{
    size_t n = strlen(de->d_name);
    return de->d_name[0] != '.' && n > 3 && !strcmp(de->d_name + n - 3, ".py");
}

static int add_python(struct vm_cpio *c, const char *dir, struct err *e)
{
    struct dirent **list = NULL;
    int n = scandir(dir, &list, plain_files, alphasort);
    if (n < 0)
        return err_errno(e, errno, "%s", dir);
    int r = 0;
    for (int i = 0; i < n; i++) {
        CLEANUP(freep) char *host = fs_join(dir, list[i]->d_name);
        CLEANUP(freep) char *path = xasprintf("cellvisor/python/%s", list[i]->d_name);
        if (r == 0)
            r = vm_cpio_copy(c, path, 0644, host, e);
        free(list[i]);
    }
    free(list);
    return r;
}

static int add_all(struct vm_cpio *c, const struct vm_initramfs_spec *s, struct err *e)
{
    int r = 0;
    for (size_t i = 0; r == 0 && i < sizeof(guest_dirs) / sizeof(*guest_dirs); i++)
        r = vm_cpio_dir(c, guest_dirs[i]);
    if (r == 0)
        r = add_init(c, s->shim_path, e);
    if (r == 0)
        r = add_modules(c, s->modules_dir, e);
    if (r == 0 && s->python_dir)
        r = add_python(c, s->python_dir, e);
    if (r < 0)
        return r;
    CLEANUP(freep) char *guest = json_dumps(s->guest, JSON_COMPACT | JSON_SORT_KEYS);
    r = vm_cpio_file(c, "cellvisor/guest.json", 0644, slice_str(guest));
    return r < 0 ? r : vm_cpio_finish(c);
}

int vm_initramfs_write(const struct vm_initramfs_spec *spec, const char *path, struct err *e)
{
    struct vm_cpio c;
    struct err inner = { 0 };
    vm_cpio_init(&c);
    int r = add_all(&c, spec, &inner);
    if (r < 0)
        err_set(e, r, "initramfs: %s", inner.code ? inner.msg : strerror(-r));
    else
        r = fs_write_atomic(path, buf_slice(&c.out), 0644, e);
    vm_cpio_fini(&c);
    return r;
}
