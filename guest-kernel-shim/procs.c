#include "guest-kernel-shim/procs.h"
#include "common/mem.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool shim_procs_parse_stat(const char *line, struct shim_proc *ret)
{
    const char *rest = strrchr(line, ')');
    struct shim_proc p = { .pid = (pid_t)strtol(line, NULL, 10) };
    char state;
    int ppid, pgrp;

    /* After the command: state ppid pgrp, and start time as field 22 of the whole line. */
    if (p.pid <= 0 || !rest || sscanf(rest + 1, " %c %d %d", &state, &ppid, &pgrp) != 3)
        return false;
    if (state == 'Z' || state == 'X')
        return false;
    for (int field = 2; field < 22 && *rest; rest++)
        if (*rest == ' ')
            field++;
    p.ppid = ppid;
    p.pgrp = pgrp;
    p.start = strtoull(rest, NULL, 10);
    *ret = p;
    return true;
}

bool shim_procs_get(pid_t pid, struct shim_proc *ret)
{
    char path[64], line[1024];
    int fd;
    ssize_t n;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    n = read(fd, line, sizeof(line) - 1);
    close(fd);
    if (n <= 0)
        return false;
    line[n] = '\0';
    return shim_procs_parse_stat(line, ret);
}

static size_t all_procs(struct shim_proc *ret, size_t max)
{
    DIR *d = opendir("/proc");
    struct dirent *entry;
    size_t n = 0;

    if (!d)
        return 0;
    while (n < max && (entry = readdir(d)))
        if (isdigit((unsigned char)entry->d_name[0]) &&
            shim_procs_get((pid_t)strtol(entry->d_name, NULL, 10), &ret[n]))
            n++;
    closedir(d);
    return n;
}

size_t shim_procs_descendants(pid_t root, struct shim_proc *ret, size_t max)
{
    size_t cap = 4 * SHIM_PROCS_MAX, n_all, n = 0;
    struct shim_proc *all = xcalloc(cap, sizeof(*all));
    bool grew = true;

    n_all = all_procs(all, cap);
    /* Children of what is already in the set, until nothing is added. */
    while (grew) {
        grew = false;
        for (size_t i = 0; i < n_all && n < max; i++) {
            bool in = all[i].ppid == root && all[i].pid != root;

            for (size_t k = 0; k < n && !in; k++)
                in = ret[k].pid == all[i].ppid;
            if (all[i].pid > 0 && in) {
                ret[n++] = all[i];
                all[i].pid = 0;
                grew = true;
            }
        }
    }
    free(all);
    return n;
}

/* ---- out of memory ---- */

static uint64_t oom_counter(void)
{
    FILE *f = fopen("/proc/vmstat", "re");
    char line[128];
    uint64_t n = 0;

    if (!f)
        return 0;
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "oom_kill %" SCNu64, &n) == 1)
            break;
    fclose(f);
    return n;
}

pid_t shim_oom_parse(const char *line)
{
    const char *what = strstr(line, "Killed process ");

    if (!what || !strstr(line, "ut of memory"))
        return 0;
    return (pid_t)strtol(what + strlen("Killed process "), NULL, 10);
}

void shim_oom_init(struct shim_oom *o, bool read_kmsg)
{
    *o = (struct shim_oom) { .kmsg_fd = -1, .counter = oom_counter() };
    if (!read_kmsg)
        return;
    o->kmsg_fd = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (o->kmsg_fd >= 0)
        lseek(o->kmsg_fd, 0, SEEK_END);
}

void shim_oom_fini(struct shim_oom *o)
{
    if (o->kmsg_fd >= 0)
        close(o->kmsg_fd);
    o->kmsg_fd = -1;
}

/* Whether records were lost: a kill dumps much, and the log is a ring. */
static bool read_kmsg(struct shim_oom *o)
{
    char line[8192]; /* the longest record */
    bool lost = false;

    for (int i = 0; o->kmsg_fd >= 0 && i < 4096; i++) {
        ssize_t n = read(o->kmsg_fd, line, sizeof(line) - 1);
        pid_t pid;

        if (n < 0 && errno == EPIPE) {
            lost = true;
            continue;
        }
        if (n <= 0)
            break;
        line[n] = '\0';
        pid = shim_oom_parse(line);
        if (pid > 0)
            o->killed[o->n_killed++ % 16] = pid;
    }
    return lost;
}

bool shim_oom_was(struct shim_oom *o, pid_t pid)
{
    uint64_t now = oom_counter();
    bool counted = now > o->counter, lost;

    o->counter = now;
    lost = read_kmsg(o);
    for (size_t i = 0; i < 16 && i < o->n_killed; i++)
        if (o->killed[i] == pid)
            return true;
    /* Without the log, a new kill since the last death is the best evidence there is. */
    return (o->kmsg_fd < 0 || lost) && counted;
}
