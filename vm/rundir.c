#include "vm/rundir.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

static void closedirp(DIR **d)
{
    if (*d)
        closedir(*d);
}

/* Called with the lock of `parent` held, so no host is between making its folder and locking it. */
static void remove_stale(const char *parent)
{
    CLEANUP(closedirp) DIR *d = opendir(parent);
    struct dirent *ent;

    while (d && (ent = readdir(d))) {
        CLEANUP(freep) char *path = fs_join(parent, ent->d_name);
        CLEANUP(closep) int fd = -1;

        if (strncmp(ent->d_name, "host-", 5) != 0)
            continue;
        fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
            fs_rm_rf(path, NULL);
    }
}

int vm_rundir_open(const char *state_dir, struct vm_rundir *ret, struct err *e)
{
    CLEANUP(freep) char *parent = fs_join(state_dir, "run");
    CLEANUP(freep) char *path = xasprintf("%s/host-XXXXXX", parent);
    CLEANUP(closep) int parent_fd = -1;
    CLEANUP(closep) int fd = -1;
    int r = fs_mkdir_p(parent, 0700, e);

    if (r < 0)
        return r;
    parent_fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent_fd < 0 || flock(parent_fd, LOCK_EX) < 0)
        return err_errno(e, errno, "cannot lock %s", parent);
    remove_stale(parent);
    if (!mkdtemp(path))
        return err_errno(e, errno, "cannot make a folder in %s", parent);
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
        return err_errno(e, errno, "cannot lock %s", path);
    ret->path = TAKE_PTR(path);
    ret->lock_fd = TAKE_FD(fd);
    return 0;
}

void vm_rundir_close(struct vm_rundir *d)
{
    if (!d->path)
        return;
    fs_rm_rf(d->path, NULL);
    close(d->lock_fd);
    free(d->path);
    d->path = NULL;
}
