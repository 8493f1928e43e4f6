/* Child processes.
 *
 * The parent prepares everything that allocates (path, descriptor table); between fork and exec the
 * child makes only async-signal-safe calls on that memory. It reports the step that failed and
 * errno through a close-on-exec pipe, which the parent reads to its end: exec success is
 * end-of-file. The child is never reaped by number while its pidfd is open, so no signal can hit
 * another process.
 */
#include "common/proc.h"
#include "common/cleanup.h"
#include "common/log.h"
#include "common/mem.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

struct proc {
    struct loop *loop;
    pid_t pid;
    int pidfd;
    bool reaped;
    struct loop_fd *watch;
    proc_exit_fn fn;
    void *ctx;
};

/* What the child says when it cannot exec. */
enum step { STEP_SESSION, STEP_PARENT, STEP_CWD, STEP_FDS, STEP_LIMITS, STEP_EXEC };
static const char *const step_names[] = { "setsid/setpgid",      "watch the parent",
                                          "enter the directory", "arrange descriptors",
                                          "set limits",          "exec" };
struct report {
    int step;
    int errnum;
};

/* Everything the child needs, made before fork. */
struct plan {
    const struct proc_spec *spec;
    char *path;
    char *const *env;
    int *temps;     /* one a mapping: where the child parks `from` */
    int first_temp; /* above every target */
    int report_fd;  /* write end; moved above first_temp by the child */
    int null_fd;
    pid_t parent;
};

extern char **environ;

/* ---- before fork ---- */

static int try_path(const char *path)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return -errno;
    return S_ISREG(st.st_mode) && access(path, X_OK) == 0 ? 0 : -EACCES;
}

/* argv[0] as exec wants it. With a slash it is taken as it is (relative: to the child's cwd). */
static int find_program(const char *name, char **ret)
{
    if (strchr(name, '/')) {
        *ret = xstrdup(name);
        return 0;
    }
    if (!*name)
        return -ENOENT;
    const char *p = getenv("PATH");
    if (!p || !*p)
        p = "/usr/local/bin:/usr/bin:/bin";
    int why = -ENOENT;
    for (;;) {
        size_t n = strcspn(p, ":");
        CLEANUP(freep) char *path = xasprintf("%.*s/%s", n ? (int)n : 1, n ? p : ".", name);
        int r = try_path(path);
        if (r == 0) {
            *ret = TAKE_PTR(path);
            return 0;
        }
        if (r == -EACCES)
            why = r;
        if (!p[n])
            return why;
        p += n + 1;
    }
}

/* Descriptors that are ours for a moment must not collide with 0..2 in the child. */
static int high_fd(int fd)
{
    if (fd < 0 || fd > 2)
        return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int saved = errno;
    close(fd);
    errno = saved;
    return high;
}

/* ---- in the child: async-signal-safe only ---- */

static int child_close_on_exec_all(void)
{
    if (close_range(3, ~0U, CLOSE_RANGE_CLOEXEC) == 0)
        return 0;
    struct rlimit rl;
    if (getrlimit(RLIMIT_NOFILE, &rl) < 0)
        return -1;
    int end = rl.rlim_cur > 65536 ? 65536 : (int)rl.rlim_cur;
    for (int fd = 3; fd < end; fd++)
        (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    return 0;
}

static bool is_target(const struct proc_spec *s, int fd)
{
    for (size_t i = 0; i < s->n_fds; i++)
        if (s->fds[i].to == fd)
            return true;
    return false;
}

/* First park every source above all targets, then put them in place: overlaps and swaps are safe.
 * dup2 clears close-on-exec of the targets only. */
static int child_fds(const struct plan *p)
{
    const struct proc_spec *s = p->spec;
    for (size_t i = 0; i < s->n_fds; i++) {
        p->temps[i] = fcntl(s->fds[i].from, F_DUPFD_CLOEXEC, p->first_temp);
        if (p->temps[i] < 0)
            return -1;
    }
    int null_fd = fcntl(p->null_fd, F_DUPFD_CLOEXEC, p->first_temp);
    if (null_fd < 0 || child_close_on_exec_all() < 0)
        return -1;
    for (size_t i = 0; i < s->n_fds; i++)
        if (dup2(p->temps[i], s->fds[i].to) < 0)
            return -1;
    for (int fd = 0; fd <= 2; fd++) {
        if (is_target(s, fd) || (fd == 2 && s->keep_stderr))
            continue;
        if (dup2(null_fd, fd) < 0)
            return -1;
    }
    return 0;
}

static void child_reset_signals(void)
{
    struct sigaction dfl = { .sa_handler = SIG_DFL };
    for (int sig = 1; sig < NSIG; sig++)
        (void)sigaction(sig, &dfl, NULL);
    sigset_t none;
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Returns the step that failed, with errno set. */
static enum step child_setup(const struct plan *p)
{
    const struct proc_spec *s = p->spec;
    if (s->new_session ? setsid() < 0 : s->new_group && setpgid(0, 0) < 0)
        return STEP_SESSION;
    if (s->die_with_parent) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
            return STEP_PARENT;
        if (getppid() != p->parent) /* it died before the call above */
            _exit(127);
    }
    if (s->cwd && chdir(s->cwd) < 0)
        return STEP_CWD;
    if (child_fds(p) < 0)
        return STEP_FDS;
    for (size_t i = 0; i < s->n_limits; i++) {
        struct rlimit rl = { .rlim_cur = s->limits[i].value, .rlim_max = s->limits[i].value };
        if (setrlimit(s->limits[i].resource, &rl) < 0)
            return STEP_LIMITS;
    }
    /* Handlers of ours would run on a copy of our memory; blocked signals would stay blocked. */
    child_reset_signals();
    execve(p->path, (char *const *)(uintptr_t)s->argv, p->env);
    return STEP_EXEC;
}

static void __attribute__((noreturn)) child_main(struct plan *p)
{
    int fd = fcntl(p->report_fd, F_DUPFD_CLOEXEC, p->first_temp);
    if (fd < 0)
        fd = p->report_fd;
    struct report r;
    r.step = (int)child_setup(p);
    r.errnum = errno;
    ssize_t n = write(fd, &r, sizeof(r));
    (void)n;
    _exit(127);
}

/* ---- spawn ---- */

static void plan_fini(struct plan *p)
{
    free(p->path);
    free(p->temps);
    closep(&p->null_fd);
    closep(&p->report_fd);
}

static int plan_init(struct plan *p, const struct proc_spec *spec, struct err *e)
{
    *p = (struct plan) { .spec = spec, .report_fd = -1, .null_fd = -1, .parent = getpid() };
    int r = find_program(spec->argv[0], &p->path);
    if (r == -ENOENT)
        return err_set(e, r, "%s: no such program in PATH", spec->argv[0]);
    if (r < 0)
        return err_errno(e, -r, "%s", spec->argv[0]);
    p->env = spec->env ? (char *const *)(uintptr_t)spec->env : environ;
    p->temps = xcalloc(spec->n_fds, sizeof(int));
    p->first_temp = 3;
    for (size_t i = 0; i < spec->n_fds; i++)
        if (spec->fds[i].to >= p->first_temp)
            p->first_temp = spec->fds[i].to + 1;
    p->null_fd = high_fd(open("/dev/null", O_RDWR | O_CLOEXEC));
    if (p->null_fd < 0)
        return err_errno(e, errno, "%s: cannot open /dev/null", spec->argv[0]);
    return 0;
}

/* Wait until the child has executed its program or said why not. */
static int read_report(int fd, struct report *ret)
{
    size_t have = 0;
    while (have < sizeof(*ret)) {
        ssize_t n = read(fd, (char *)ret + have, sizeof(*ret) - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        have += (size_t)n;
    }
    return have == sizeof(*ret);
}

static int reap(int pidfd, struct proc_exit *x, int flags)
{
    siginfo_t si = { 0 };
    int r;
    do
        r = waitid(P_PIDFD, (id_t)pidfd, &si, WEXITED | flags);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return -errno;
    if (si.si_pid == 0)
        return -EAGAIN;
    bool exited = si.si_code == CLD_EXITED;
    *x = (struct proc_exit) { .code = exited ? si.si_status : -1,
                              .signal = exited ? 0 : si.si_status };
    return 0;
}

static pid_t fork_child(struct plan *p)
{
    /* No handler of ours may run in the child before its handlers are reset. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pid_t pid = fork();
    if (pid == 0)
        child_main(p);
    int saved = errno;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    errno = saved;
    return pid;
}

/* Start the program; on success it runs, *ret_pidfd is ours. */
static int start(const struct proc_spec *spec, pid_t *ret_pid, int *ret_pidfd, struct err *e)
{
    CLEANUP(plan_fini) struct plan p;
    int r = plan_init(&p, spec, e);
    if (r < 0)
        return r;
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) < 0)
        return err_errno(e, errno, "%s: cannot start", spec->argv[0]);
    CLEANUP(closep) int report_in = high_fd(pair[0]);
    p.report_fd = high_fd(pair[1]);
    if (report_in < 0 || p.report_fd < 0)
        return err_errno(e, EMFILE, "%s: cannot start", spec->argv[0]);
    pid_t pid = fork_child(&p);
    if (pid < 0)
        return err_errno(e, errno, "%s: cannot start", spec->argv[0]);
    close(p.report_fd);
    p.report_fd = -1;
    CLEANUP(closep) int pidfd = pidfd_open(pid, 0);
    int pidfd_errno = errno;
    if (pidfd < 0)
        kill(pid, SIGKILL); /* ours and not reaped: the number is safe */
    struct report why;
    bool failed = read_report(report_in, &why);
    if (failed || pidfd < 0) {
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            continue;
        if (!failed)
            return err_errno(e, pidfd_errno, "%s: cannot watch the process", spec->argv[0]);
        if (why.step == STEP_EXEC)
            return err_errno(e, why.errnum, "%s", spec->argv[0]);
        return err_errno(e, why.errnum, "%s: cannot %s", spec->argv[0], step_names[why.step]);
    }
    *ret_pid = pid;
    *ret_pidfd = TAKE_FD(pidfd);
    return 0;
}

static void on_exit_event(void *ctx, int events)
{
    struct proc *p = ctx;
    (void)events;
    struct proc_exit x = { .code = -1 };
    int r = reap(p->pidfd, &x, WNOHANG);
    if (r == -EAGAIN)
        return;
    if (r < 0) /* ECHILD: SIGCHLD is ignored or somebody else waited; it is gone all the same */
        log_debug(NULL, "process %d was reaped by somebody else", (int)p->pid);
    p->reaped = true;
    loop_fd_free(p->watch);
    p->watch = NULL;
    p->fn(p->ctx, &x); /* may free p */
}

int proc_spawn(struct loop *l, const struct proc_spec *spec, proc_exit_fn fn, void *ctx,
               struct proc **ret, struct err *e)
{
    struct proc *p = xnew(struct proc);
    int r = start(spec, &p->pid, &p->pidfd, e);
    if (r < 0) {
        free(p);
        return r;
    }
    p->loop = l;
    p->fn = fn;
    p->ctx = ctx;
    p->watch = loop_fd_new(l, p->pidfd, on_exit_event, p);
    if (!p->watch) {
        proc_free(p);
        return err_set(e, -ENOMEM, "%s: cannot watch the process", spec->argv[0]);
    }
    loop_fd_set(p->watch, LOOP_READ);
    *ret = p;
    return 0;
}

pid_t proc_pid(const struct proc *p)
{
    return p->pid;
}

int proc_kill(struct proc *p, int signum, bool group)
{
    if (p->reaped)
        return -ESRCH;
    /* Not reaped, so neither the process nor its group number can be anybody else's. */
    if (group && kill(-p->pid, signum) == 0)
        return 0;
    if (pidfd_send_signal(p->pidfd, signum, NULL, 0) < 0)
        return -errno;
    return 0;
}

static void free_reaped(void *ctx)
{
    struct proc *p = ctx;
    close(p->pidfd);
    free(p);
}

static void wait_for_end(void *ctx)
{
    struct proc *p = ctx;
    struct proc_exit x;
    /* The loop made the pidfd non-blocking, hence waitid too: poll does the waiting. */
    struct pollfd pfd = { .fd = p->pidfd, .events = POLLIN };
    while (reap(p->pidfd, &x, WNOHANG) == -EAGAIN)
        (void)poll(&pfd, 1, -1);
}

void proc_free(struct proc *p)
{
    if (!p)
        return;
    loop_fd_free(p->watch);
    struct proc_exit x;
    if (!p->reaped) {
        (void)pidfd_send_signal(p->pidfd, SIGKILL, NULL, 0);
        /* A big process takes a while to come down: wait on a thread, not on the loop. */
        if (reap(p->pidfd, &x, WNOHANG) == -EAGAIN) {
            loop_work(p->loop, wait_for_end, free_reaped, p);
            return;
        }
    }
    free_reaped(p);
}

int proc_run(const struct proc_spec *spec, int out_fd, struct err *e)
{
    CLEANUP(freep) struct proc_fd *fds = xcalloc(spec->n_fds + 2, sizeof(*fds));
    struct proc_spec s = *spec;
    if (spec->n_fds)
        memcpy(fds, spec->fds, spec->n_fds * sizeof(*fds));
    s.fds = fds;
    for (int to = 1; to <= 2 && out_fd >= 0; to++) {
        if (is_target(&s, to) || (to == 2 && s.keep_stderr))
            continue;
        fds[s.n_fds++] = (struct proc_fd) { .from = out_fd, .to = to };
    }
    pid_t pid;
    CLEANUP(closep) int pidfd = -1;
    int r = start(&s, &pid, &pidfd, e);
    if (r < 0)
        return r;
    struct proc_exit x = { .code = -1 };
    r = reap(pidfd, &x, 0);
    if (r < 0)
        return err_errno(e, -r, "%s: cannot wait", spec->argv[0]);
    if (x.signal)
        return err_set(e, -EINTR, "%s: killed by signal %d (%s)", spec->argv[0], x.signal,
                       strsignal(x.signal));
    return x.code;
}
