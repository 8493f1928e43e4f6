#include "vm/usock.h"
#include "common/cleanup.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Address of path by way of an open folder; *ret_dir must stay open while the address is used. */
static int address(const char *path, struct sockaddr_un *sa, int *ret_dir)
{
    const char *slash = strrchr(path, '/');
    char parent[4096];
    size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    int dir, len;

    if (!slash || n >= sizeof(parent))
        return -EINVAL;
    memcpy(parent, path, n);
    parent[n] = '\0';
    dir = open(parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return -errno;
    memset(sa, 0, sizeof(*sa));
    sa->sun_family = AF_UNIX;
    len = snprintf(sa->sun_path, sizeof(sa->sun_path), "/proc/self/fd/%d/%s", dir, slash + 1);
    if (len < 0 || (size_t)len >= sizeof(sa->sun_path)) {
        close(dir);
        return -ENAMETOOLONG;
    }
    *ret_dir = dir;
    return 0;
}

int vm_usock_listen(const char *path)
{
    CLEANUP(closep) int dir = -1;
    CLEANUP(closep) int fd = -1;
    struct sockaddr_un sa;
    int r = address(path, &sa, &dir);

    if (r < 0)
        return r;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 || listen(fd, 4) < 0)
        return -errno;
    return TAKE_FD(fd);
}

int vm_usock_connect(const char *path)
{
    CLEANUP(closep) int dir = -1;
    CLEANUP(closep) int fd = -1;
    struct sockaddr_un sa;
    int r = address(path, &sa, &dir);

    if (r < 0)
        return r;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
        return -errno;
    return TAKE_FD(fd);
}
