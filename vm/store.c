#include "vm/store.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/log.h"
#include "common/mem.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

static void closedirp(DIR **d)
{
    if (*d)
        closedir(*d);
}

char *vm_store_path(const char *state_dir, const char *sub, const char *name)
{
    return name ? xasprintf("%s/%s/%s", state_dir, sub, name) : xasprintf("%s/%s", state_dir, sub);
}

int vm_store_init(const char *state_dir, struct err *e)
{
    static const char *const subs[] = { "templates", "builds", "cache", "locks" };
    int r = fs_mkdir_p(state_dir, 0700, e);
    for (size_t i = 0; r == 0 && i < sizeof(subs) / sizeof(*subs); i++) {
        CLEANUP(freep) char *p = vm_store_path(state_dir, subs[i], NULL);
        r = fs_mkdir_p(p, 0755, e);
    }
    return r;
}

int vm_store_current(const char *state_dir, const char *name, char **ret_dir, struct err *e)
{
    CLEANUP(freep) char *link = vm_store_path(state_dir, "templates", name);
    char *real = realpath(link, NULL);
    if (!real && errno == ENOENT)
        return err_set(e, -ENOENT,
                       "template \"%s\" is not built: run `cellvisor template build %s`", name,
                       name);
    if (!real)
        return err_errno(e, errno, "%s", link);
    *ret_dir = real;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

json_t *vm_store_names(const char *state_dir)
{
    json_t *out = json_array();
    CLEANUP(freep) char *dir = vm_store_path(state_dir, "templates", NULL);
    struct dirent **list = NULL;
    int n = scandir(dir, &list, NULL, NULL);
    char **names = xcalloc(n > 0 ? (size_t)n : 1, sizeof(*names));
    size_t count = 0;
    for (int i = 0; i < n; i++) {
        CLEANUP(freep) char *manifest = xasprintf("%s/%s/manifest.json", dir, list[i]->d_name);
        if (list[i]->d_name[0] != '.' && fs_exists(manifest))
            names[count++] = xstrdup(list[i]->d_name);
        free(list[i]);
    }
    free(list);
    qsort(names, count, sizeof(*names), by_name);
    for (size_t i = 0; i < count; i++) {
        json_array_append_new(out, json_string(names[i]));
        free(names[i]);
    }
    free(names);
    return out;
}

int vm_store_publish(const char *state_dir, const char *name, const char *folder, struct err *e)
{
    CLEANUP(freep) char *link = vm_store_path(state_dir, "templates", name);
    CLEANUP(freep) char *tmp = xasprintf("%s/templates/.new-%s", state_dir, name);
    CLEANUP(freep) char *target = xasprintf("../builds/%s", folder);
    if (unlink(tmp) < 0 && errno != ENOENT)
        return err_errno(e, errno, "%s", tmp);
    if (symlink(target, tmp) < 0)
        return err_errno(e, errno, "%s", tmp);
    if (rename(tmp, link) < 0) {
        int saved = errno;
        unlink(tmp);
        return err_errno(e, saved, "%s", link);
    }
    return 0;
}

int vm_store_unpublish(const char *state_dir, const char *name, struct err *e)
{
    CLEANUP(freep) char *link = vm_store_path(state_dir, "templates", name);
    if (unlink(link) == 0)
        return 0;
    if (errno == ENOENT)
        return err_set(e, -ENOENT, "no template \"%s\"", name);
    return err_errno(e, errno, "%s", link);
}

/* ---- locks ---- */

int vm_store_try_lock(const char *state_dir, const char *key, int *ret_fd, pid_t *ret_holder,
                      struct err *e)
{
    CLEANUP(freep) char *path = vm_store_path(state_dir, "locks", key);
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    char text[32] = "";
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return err_errno(e, errno, "%s", path);
        ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
        *ret_holder = n > 0 ? (pid_t)strtol(text, NULL, 10) : 0;
        return err_set(e, -EBUSY, "%s is locked by process %d", key, (int)*ret_holder);
    }
    /* The holder's number is for people only; the lock itself is the descriptor. */
    int n = snprintf(text, sizeof(text), "%d\n", (int)getpid());
    if (ftruncate(fd, 0) < 0 || pwrite(fd, text, (size_t)n, 0) < 0)
        return err_errno(e, errno, "%s", path);
    *ret_fd = TAKE_FD(fd);
    return 0;
}

int vm_store_try_share(const char *state_dir, const char *key, int *ret_fd, struct err *e)
{
    CLEANUP(freep) char *path = vm_store_path(state_dir, "locks", key);
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    if (flock(fd, LOCK_SH | LOCK_NB) < 0)
        return err_errno(e, errno == EWOULDBLOCK ? EBUSY : errno, "%s", path);
    *ret_fd = TAKE_FD(fd);
    return 0;
}

int vm_store_share_lock(int fd)
{
    return flock(fd, LOCK_SH) < 0 ? -errno : 0;
}

int vm_store_use(const char *build_dir, int *ret_fd, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(build_dir, "manifest.json");
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    if (flock(fd, LOCK_SH | LOCK_NB) < 0)
        return err_errno(e, errno == EWOULDBLOCK ? ENOENT : errno, "%s is being removed",
                         build_dir);
    *ret_fd = TAKE_FD(fd);
    return 0;
}

/* ---- removing ---- */

/* "/proc/self/mountinfo" writes blanks and backslashes as \ooo. */
static void unescape_mount(char *s)
{
    char *out = s;
    for (; *s; s++) {
        if (s[0] == '\\' && s[1] && s[2] && s[3]) {
            *out++ = (char)((s[1] - '0') * 64 + (s[2] - '0') * 8 + (s[3] - '0'));
            s += 3;
        } else {
            *out++ = *s;
        }
    }
    *out = '\0';
}

/* Detach everything mounted below dir; the last mounted first. 1: there was something. */
static int detach_mounts(const char *dir, struct err *e)
{
    CLEANUP(fclosep) FILE *f = fopen("/proc/self/mountinfo", "re");
    CLEANUP(freep) char *line = NULL;
    CLEANUP(freep) char *last = NULL;
    size_t cap = 0, n = strlen(dir);
    if (!f)
        return err_errno(e, errno, "/proc/self/mountinfo");
    while (getline(&line, &cap, f) > 0) {
        char *save, *field = strtok_r(line, " ", &save);
        for (int i = 0; field && i < 4; i++)
            field = strtok_r(NULL, " ", &save);
        if (!field)
            continue;
        unescape_mount(field);
        if (strncmp(field, dir, n) != 0 || field[n] != '/')
            continue;
        free(last);
        last = xstrdup(field);
    }
    if (!last)
        return 0;
    if (umount2(last, MNT_DETACH | UMOUNT_NOFOLLOW) < 0)
        return err_set(e, -EBUSY, "%s is still mounted (%s): unmount it and try again", last,
                       strerror(errno));
    return 1;
}

int vm_store_remove_tree(const char *dir, struct err *e)
{
    CLEANUP(freep) char *real = realpath(dir, NULL);
    if (!real)
        return errno == ENOENT ? 0 : err_errno(e, errno, "%s", dir);
    int r;
    for (int guard = 0; (r = detach_mounts(real, e)) > 0 && guard < 1000; guard++)
        continue;
    return r < 0 ? r : fs_rm_rf(real, e);
}

static uint64_t tree_bytes(const char *dir)
{
    CLEANUP(closedirp) DIR *d = opendir(dir);
    uint64_t sum = 0;
    struct dirent *de;
    while (d && (de = readdir(d))) {
        struct stat st;
        if (!strcmp(de->d_name, ".") || !strcmp(de->d_name, "..") ||
            fstatat(dirfd(d), de->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        CLEANUP(freep) char *sub = fs_join(dir, de->d_name);
        if (S_ISDIR(st.st_mode))
            sum += tree_bytes(sub);
        else if (st.st_nlink == 1) /* the rest lives on under another name */
            sum += (uint64_t)st.st_blocks * 512;
    }
    return sum;
}

/* No template name points at this build. */
static bool unreferenced(const char *state_dir, const char *build_dir)
{
    json_t *names = vm_store_names(state_dir), *v;
    bool used = false;
    size_t i;
    json_array_foreach(names, i, v)
    {
        char *current = NULL;
        if (vm_store_current(state_dir, json_string_value(v), &current, NULL) == 0)
            used = used || !strcmp(current, build_dir);
        free(current);
    }
    json_decref(names);
    return !used;
}

static uint64_t clean_build(const char *state_dir, const char *name)
{
    CLEANUP(freep) char *dir = vm_store_path(state_dir, "builds", name);
    CLEANUP(freep) char *real = realpath(dir, NULL);
    if (!real || !unreferenced(state_dir, real))
        return 0;
    CLEANUP(freep) char *manifest = fs_join(real, "manifest.json");
    CLEANUP(closep) int fd = open(manifest, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
        return 0; /* somebody runs VMs from it */
    uint64_t bytes = tree_bytes(real);
    unlink(manifest); /* from here on it is not a build any more, whatever happens */
    struct err e = { 0 };
    if (vm_store_remove_tree(real, &e) < 0) {
        log_warn(NULL, "cannot remove old build: %s", e.msg);
        return 0;
    }
    return bytes;
}

/* A build or stage in progress that nobody works on any more, or a stage that no build shares. */
static uint64_t clean_locked(const char *state_dir, const char *sub, const char *name,
                             const char *key)
{
    CLEANUP(closep) int lock = -1;
    pid_t holder;
    if (vm_store_try_lock(state_dir, key, &lock, &holder, NULL) < 0)
        return 0;
    CLEANUP(freep) char *dir = vm_store_path(state_dir, sub, name);
    uint64_t bytes = tree_bytes(dir);
    return vm_store_remove_tree(dir, NULL) == 0 ? bytes : 0;
}

/* Its files have other names too: a build shares them. */
static bool stage_shared(const char *dir)
{
    CLEANUP(closedirp) DIR *d = opendir(dir);
    struct dirent *de;
    while (d && (de = readdir(d))) {
        struct stat st;
        if (fstatat(dirfd(d), de->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
            st.st_nlink > 1)
            return true;
    }
    return false;
}

static uint64_t clean_cache(const char *state_dir, const char *name, bool all)
{
    CLEANUP(freep) char *dir = vm_store_path(state_dir, "cache", name);
    if (!strncmp(name, ".tmp-", 5))
        return all ? clean_locked(state_dir, "cache", name, name + 5) : 0;
    if (stage_shared(dir) || (!all && strncmp(name, "root-", 5) != 0))
        return 0;
    return clean_locked(state_dir, "cache", name, name);
}

uint64_t vm_store_clean(const char *state_dir, bool all)
{
    static const char *const subs[] = { "builds", "cache" };
    uint64_t freed = 0;
    for (size_t i = 0; i < 2; i++) {
        CLEANUP(freep) char *path = vm_store_path(state_dir, subs[i], NULL);
        CLEANUP(closedirp) DIR *d = opendir(path);
        struct dirent *de;
        while (d && (de = readdir(d))) {
            const char *name = de->d_name;
            CLEANUP(freep) char *key = NULL;
            if (!strcmp(name, ".") || !strcmp(name, ".."))
                continue;
            if (i == 1) {
                freed += clean_cache(state_dir, name, all);
            } else if (!strncmp(name, ".tmp-", 5)) {
                key = xasprintf("template-%s", name + 5);
                freed += clean_locked(state_dir, "builds", name, key);
            } else {
                freed += clean_build(state_dir, name);
            }
        }
    }
    return freed;
}

/* ---- files ---- */

static int copy_file(const char *from, const char *to, struct err *e)
{
    CLEANUP(closep) int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0)
        return err_errno(e, errno, "%s", from);
    CLEANUP(closep) int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (out < 0)
        return err_errno(e, errno, "%s", to);
    ssize_t n;
    do
        n = sendfile(out, in, NULL, 64u << 20);
    while (n > 0 || (n < 0 && errno == EINTR));
    return n < 0 ? err_errno(e, errno, "%s", to) : 0;
}

int vm_store_link_file(const char *from, const char *to, struct err *e)
{
    if (link(from, to) == 0)
        return 0;
    if (errno == EXDEV || errno == EPERM || errno == EMLINK || errno == ENOTSUP)
        return copy_file(from, to, e);
    return err_errno(e, errno, "%s", to);
}
