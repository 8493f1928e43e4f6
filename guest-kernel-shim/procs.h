#pragma once
/* What /proc tells about processes: who descends from a kernel, and whether memory ran out. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SHIM_PROCS_MAX 1024u

struct shim_proc {
    pid_t pid, ppid, pgrp;
    uint64_t start; /* clock ticks since boot: tells a re-used pid */
};
/* All live descendants of root (without it), at most max: their number. */
size_t shim_procs_descendants(pid_t root, struct shim_proc *ret, size_t max);
/* One process as it is now; false: gone. */
bool shim_procs_get(pid_t pid, struct shim_proc *ret);
/* One line of /proc/PID/stat (its command may hold anything, also ')' and line ends). */
bool shim_procs_parse_stat(const char *line, struct shim_proc *ret);

/* ---- out of memory ---- */
struct shim_oom {
    int kmsg_fd;      /* -1: not readable (local mode) */
    uint64_t counter; /* oom_kill of /proc/vmstat when last looked at */
    pid_t killed[16]; /* ring of pids that the kernel log named */
    size_t n_killed;
};
void shim_oom_init(struct shim_oom *o, bool read_kmsg);
void shim_oom_fini(struct shim_oom *o);
/* pid has just been found dead by SIGKILL: was it the out-of-memory killer? */
bool shim_oom_was(struct shim_oom *o, pid_t pid);
/* Pid in a kernel log line that reports an OOM kill; 0: it does not. */
pid_t shim_oom_parse(const char *line);
