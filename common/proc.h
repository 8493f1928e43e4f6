#pragma once
/* Child processes: spawn with an exact descriptor list, exit by pidfd. Between fork and exec only
 * async-signal-safe calls are made. */
#include "common/err.h"
#include "common/loop.h"
#include <sys/types.h>

struct proc_fd {
    int from; /* our descriptor (stays ours) */
    int to;   /* its number in the child */
};
struct proc_limit {
    int resource; /* RLIMIT_* */
    uint64_t value;
};
struct proc_spec {
    const char *const *argv; /* argv[0] is looked up in PATH; NULL-terminated */
    const char *const *env;  /* NULL = inherit */
    const char *cwd;         /* NULL = inherit */
    const struct proc_fd *fds;
    size_t n_fds;     /* 0,1,2 not listed: /dev/null. All other descriptors are closed. */
    bool keep_stderr; /* inherit fd 2 unless listed */
    const struct proc_limit *limits;
    size_t n_limits;
    bool new_session;     /* setsid */
    bool new_group;       /* setpgid(0, 0) */
    bool die_with_parent; /* PR_SET_PDEATHSIG SIGKILL */
};

struct proc_exit {
    int code;   /* exit code, -1 if killed */
    int signal; /* signal number, 0 if exited */
};

struct proc;
typedef void (*proc_exit_fn)(void *ctx, const struct proc_exit *x);
/* Start and watch. fn is called once, on the loop, when the process has ended and is reaped.
 * Errors: -ENOENT (no such program), any other errno; e says which program. */
int proc_spawn(struct loop *l, const struct proc_spec *spec, proc_exit_fn fn, void *ctx,
               struct proc **ret, struct err *e);
pid_t proc_pid(const struct proc *p);
/* 0 or -ESRCH; by pidfd, so never somebody else's process. group: kill(-pid). */
int proc_kill(struct proc *p, int signum, bool group);
/* Forget it: kills (SIGKILL) and reaps if still running, fn is not called. */
void proc_free(struct proc *p);

/* Blocking helper for tools (template build): run to the end, return exit code >= 0, or -errno
 * (-EINTR: killed by a signal). Output goes to out_fd (-1: /dev/null). */
int proc_run(const struct proc_spec *spec, int out_fd, struct err *e);
