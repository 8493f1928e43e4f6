#include "common/fs.h"
#include "common/cleanup.h"
#include "common/id.h"
#include "common/mem.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define RM_DEPTH_MAX 200 /* one descriptor a level */

/* Append the rest of fd to b. */
static int read_all(int fd, struct buf *b)
{
    for (;;) {
        /* One byte over the maximum is asked for by buf_reserve(0)'s slack: full means try 0. */
        size_t room = b->max - b->len;
        size_t chunk = room < 65536 ? room : 65536;
        uint8_t extra;
        uint8_t *p = chunk ? buf_reserve(b, chunk) : &extra;
        if (!p)
            return -ENOMEM;
        ssize_t n = read(fd, p, chunk ? chunk : 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            return 0;
        if (!chunk)
            return -EFBIG;
        buf_commit(b, (size_t)n);
    }
}

int fs_read_file(const char *path, size_t max, struct buf *out, struct err *e)
{
    buf_init(out, max);
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    struct stat st;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 && (size_t)st.st_size < max)
        buf_reserve(out, (size_t)st.st_size); /* only a hint: failure shows below */
    int r = read_all(fd, out);
    if (r < 0)
        buf_fini(out);
    if (r == -EFBIG)
        return err_set(e, r, "%s: larger than the limit of %zu bytes", path, max);
    return r < 0 ? err_errno(e, -r, "%s", path) : 0;
}

static int write_all(int fd, struct slice data)
{
    while (data.n) {
        ssize_t n = write(fd, data.p, data.n);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        data.p += n;
        data.n -= (size_t)n;
    }
    return 0;
}

/* The directory part of path ("." when it has none); caller frees. */
static char *parent_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return xstrdup(".");
    return slash == path ? xstrdup("/") : xstrndup(path, (size_t)(slash - path));
}

/* A rename is on disk only when the directory is; failing to sync it is not worth an error. */
static void sync_dir(const char *path)
{
    CLEANUP(freep) char *dir = parent_of(path);
    CLEANUP(closep) int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0)
        (void)fsync(fd);
}

int fs_write_atomic(const char *path, struct slice data, mode_t mode, struct err *e)
{
    CLEANUP(freep) char *tmp = xasprintf("%s.XXXXXX", path);
    CLEANUP(closep) int fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, errno, "%s: cannot create a temporary file beside it", path);
    int r = write_all(fd, data);
    if (r == 0 && fchmod(fd, mode) < 0)
        r = -errno;
    if (r == 0 && fsync(fd) < 0)
        r = -errno;
    if (r == 0 && rename(tmp, path) < 0)
        r = -errno;
    if (r < 0) {
        unlink(tmp);
        return err_errno(e, -r, "%s: cannot write", path);
    }
    sync_dir(path);
    return 0;
}

int fs_mkdir_p(const char *path, mode_t mode, struct err *e)
{
    CLEANUP(freep) char *p = xstrdup(path);
    for (char *s = p; *p; s++) {
        if (s == p || (*s != '/' && *s != '\0'))
            continue;
        char saved = *s;
        *s = '\0';
        if (mkdir(p, mode) < 0 && errno != EEXIST)
            return err_errno(e, errno, "%s: cannot create the directory", p);
        *s = saved;
        if (!saved)
            break;
    }
    struct stat st;
    if (stat(path, &st) < 0)
        return err_errno(e, errno, "%s", path);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, -ENOTDIR, "%s: exists and is not a directory", path);
    return 0;
}

static int rm_entry(int dir, const char *name, int depth);

static bool is_dot(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

static int rm_children(int dir, const char *name, int depth)
{
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(dir, name, flags);
    if (fd < 0 && errno == EACCES && fchmodat(dir, name, 0700, 0) == 0)
        fd = openat(dir, name, flags);
    if (fd < 0)
        return -errno;
    DIR *d = fdopendir(fd);
    if (!d) {
        int r = -errno;
        close(fd);
        return r;
    }
    int r = 0;
    struct dirent *de;
    while (r == 0 && (errno = 0, de = readdir(d)))
        if (!is_dot(de->d_name))
            r = rm_entry(fd, de->d_name, depth + 1);
    if (r == 0 && errno)
        r = -errno;
    closedir(d);
    return r;
}

/* Remove one name below dir; a directory with all that is in it. */
static int rm_entry(int dir, const char *name, int depth)
{
    if (depth > RM_DEPTH_MAX)
        return -ELOOP;
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
        return 0;
    int why = errno;
    /* Linux says EISDIR for a directory; EACCES/EPERM may mean a parent without write permission.
     */
    if (why == EACCES && dir != AT_FDCWD && fchmod(dir, 0700) == 0 && unlinkat(dir, name, 0) == 0)
        return 0;
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISDIR(st.st_mode))
        return -why;
    int r = rm_children(dir, name, depth);
    if (r < 0)
        return r == -ENOENT ? 0 : r;
    if (unlinkat(dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
        return -errno;
    return 0;
}

int fs_rm_rf(const char *path, struct err *e)
{
    if (!*path || strcmp(path, "/") == 0)
        return err_set(e, -EINVAL, "\"%s\": refusing to remove", path);
    int r = rm_entry(AT_FDCWD, path, 0);
    return r < 0 ? err_errno(e, -r, "%s: cannot remove", path) : 0;
}

bool fs_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

char *fs_join(const char *dir, const char *name)
{
    size_t n = strlen(dir);
    return xasprintf("%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name);
}

int fs_sha256_file(const char *path, char ret[65], struct err *e)
{
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    if (!md || !EVP_DigestInit_ex(md, EVP_sha256(), NULL)) {
        EVP_MD_CTX_free(md);
        return err_set(e, -ENOMEM, "%s: SHA-256 is not available", path);
    }
    CLEANUP(freep) uint8_t *chunk = xmalloc(1 << 16);
    int r = 0;
    for (;;) {
        ssize_t n = read(fd, chunk, 1 << 16);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            r = -errno;
        if (n <= 0)
            break;
        EVP_DigestUpdate(md, chunk, (size_t)n);
    }
    uint8_t digest[32];
    EVP_DigestFinal_ex(md, digest, NULL);
    EVP_MD_CTX_free(md);
    if (r < 0)
        return err_errno(e, -r, "%s", path);
    id_hex(ret, digest, sizeof(digest));
    return 0;
}

void fs_sha256(struct slice data, char ret[65])
{
    uint8_t digest[32] = { 0 };
    if (!EVP_Digest(data.n ? (const void *)data.p : "", data.n, digest, NULL, EVP_sha256(), NULL))
        abort(); /* every libcrypto has SHA-256 */
    id_hex(ret, digest, sizeof(digest));
}

uint64_t fs_free_bytes(const char *path)
{
    struct statvfs v;
    if (statvfs(path, &v) < 0)
        return 0;
    return (uint64_t)v.f_bavail * v.f_frsize;
}
