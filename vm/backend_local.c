/* Machines that are the shim as a plain process on this host: no isolation at all, for development,
 * tests and benchmarks; vm/host.c offers it only with insecure_local. The link is a socketpair. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/proc.h"
#include "vm/backend.h"
#include "vm/drain.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define KILL_MS 1000u  /* from the end of its link to SIGKILL: enough to end its kernels */
#define LINK_FD 3      /* in the shim */
#define DIR_LEN_MAX 72 /* the shim puts ZMQ sockets below it, and sun_path holds 107 bytes */

struct backend {
    struct vm_backend base;
    struct loop *loop;
    char *run_dir, *shim_path;
};

struct machine {
    struct vm_machine base;
    struct loop *loop;
    const struct vm_machine_events *ev;
    void *ctx;
    struct log_ctx log;
    struct proc *proc;
    struct vm_drain errors;
    struct loop_timer *kill_timer;
    char *dir;
    int link_fd;
    bool killed;
};

static void cleanup(struct machine *m)
{
    loop_cancel_deferred(m->loop, m);
    loop_timer_free(m->kill_timer);
    m->kill_timer = NULL;
    vm_drain_stop(&m->errors);
    if (m->link_fd >= 0)
        close(m->link_fd);
    m->link_fd = -1;
    if (m->dir)
        fs_rm_rf(m->dir, NULL);
    free(m->dir);
    m->dir = NULL;
}

static void on_kill_timer(void *ctx)
{
    struct machine *m = ctx;

    if (m->proc)
        proc_kill(m->proc, SIGKILL, true);
}

static void on_exited(void *ctx, const struct proc_exit *x)
{
    struct machine *m = ctx;
    struct vm_exit why = { .reason = VM_EXIT_VMM, .code = x->code, .signal = x->signal };
    char line[120];

    vm_drain_finish(&m->errors);
    vm_tail_last_line(&m->errors.tail, line, sizeof(line));
    if (m->killed) {
        why.reason = VM_EXIT_RELEASED;
        snprintf(why.text, sizeof(why.text), "ended by the gateway");
    } else if (x->signal) {
        snprintf(why.text, sizeof(why.text), "the local shim was killed by signal %d", x->signal);
    } else {
        why.reason = x->code == 0 ? VM_EXIT_GUEST : VM_EXIT_VMM;
        snprintf(why.text, sizeof(why.text), "the local shim ended with code %d%s%s", x->code,
                 line[0] ? ": " : "", line);
    }
    proc_free(m->proc);
    m->proc = NULL;
    cleanup(m);
    m->ev->exited(m->ctx, &why);
}

static void on_spawned(void *ctx)
{
    struct machine *m = ctx;

    m->ev->spawned(m->ctx);
}

static void on_running(void *ctx)
{
    struct machine *m = ctx;
    int fd = m->link_fd;

    m->link_fd = -1;
    if (fd >= 0)
        m->ev->running(m->ctx, fd);
}

static int start(struct machine *m, const char *shim_path, struct err *e)
{
    CLEANUP(closep) int theirs = -1;
    CLEANUP(closep) int err_fd = -1;
    const char *const argv[] = {
        shim_path, "--local", "--link-fd", "3", "--run-dir", m->dir, NULL
    };
    struct proc_fd fds[2];
    struct proc_spec spec = {
        .argv = argv, .fds = fds, .n_fds = 2, .new_session = true, .die_with_parent = true
    };
    int pair[2], out[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        return err_errno(e, errno, "socketpair");
    m->link_fd = pair[0];
    theirs = pair[1];
    if (pipe2(out, O_CLOEXEC) < 0)
        return err_errno(e, errno, "pipe");
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    vm_drain_start(&m->errors, m->loop, out[0], -1, 0);
    err_fd = out[1];
    fds[0] = (struct proc_fd) { theirs, LINK_FD };
    fds[1] = (struct proc_fd) { err_fd, STDERR_FILENO };
    return proc_spawn(m->loop, &spec, on_exited, m, &m->proc, e);
}

/* The machine's folder: in the host's run directory, or in /tmp where that is too deep. */
static int make_dir(struct machine *m, const char *run_dir, const char *id, struct err *e)
{
    m->dir = xasprintf("%s/%.8s", run_dir, id);
    if (strlen(m->dir) <= DIR_LEN_MAX)
        return mkdir(m->dir, 0700) < 0
                   ? err_errno(e, errno, "cannot make the run directory %s", m->dir)
                   : 0;
    free(m->dir);
    m->dir = xstrdup("/tmp/cellvisor-XXXXXX");
    if (mkdtemp(m->dir))
        return 0;
    free(m->dir);
    m->dir = NULL;
    return err_errno(e, errno, "cannot make a run directory in /tmp");
}

static int spawn(struct vm_backend *base, const struct vm_launch *launch, const struct log_ctx *log,
                 const struct vm_machine_events *ev, void *ctx, struct vm_machine **ret,
                 struct err *e)
{
    struct backend *b = (struct backend *)base;
    struct machine *m = xnew(struct machine);
    int r;

    m->base.ops = base->ops;
    m->loop = b->loop;
    m->ev = ev;
    m->ctx = ctx;
    m->link_fd = m->errors.fd = m->errors.log_fd = -1;
    log_ctx_init(&m->log, log);
    m->kill_timer = loop_timer_new(m->loop, on_kill_timer, m);
    r = make_dir(m, b->run_dir, launch->id, e);
    if (!r)
        r = start(m, b->shim_path, e);
    if (r < 0) {
        cleanup(m);
        free(m);
        return r;
    }
    loop_defer(b->loop, on_spawned, m);
    *ret = &m->base;
    return 0;
}

static void load(struct vm_machine *base)
{
    struct machine *m = (struct machine *)base;

    loop_defer(m->loop, on_running, m);
}

static int get_pid(const struct vm_machine *base)
{
    const struct machine *m = (const struct machine *)base;

    return m->proc ? (int)proc_pid(m->proc) : 0;
}

static void background(struct vm_machine *base, bool on)
{
    /* Kernels would inherit the nice value and, in groups of their own, keep it. */
    (void)base;
    (void)on;
}

/* The end of its link tells the shim to end its kernels (which have groups of their own) and
 * itself, so that nothing is left when exited() comes. One that does not is killed; its kernels die
 * with it then (parent-death signal), a moment after we have looked away. */
static void kill_machine(struct vm_machine *base)
{
    struct machine *m = (struct machine *)base;

    if (!m->proc || m->killed)
        return;
    m->killed = true;
    if (m->link_fd >= 0)
        close(m->link_fd);
    m->link_fd = -1;
    loop_timer_start(m->kill_timer, KILL_MS, 0);
}

static void free_machine(struct vm_machine *base)
{
    struct machine *m = (struct machine *)base;

    if (!m)
        return;
    if (m->proc) {
        proc_kill(m->proc, SIGKILL, true);
        proc_free(m->proc);
    }
    cleanup(m);
    free(m);
}

static void close_backend(struct vm_backend *base)
{
    struct backend *b = (struct backend *)base;

    free(b->run_dir);
    free(b->shim_path);
    free(b);
}

struct vm_backend *vm_backend_local_new(struct loop *l, const char *run_dir, const char *shim_path)
{
    static const struct vm_backend_ops ops = {
        "local", spawn, load, get_pid, background, kill_machine, free_machine, close_backend
    };
    struct backend *b = xnew(struct backend);

    b->base.ops = &ops;
    b->loop = l;
    b->run_dir = xstrdup(run_dir);
    b->shim_path = xstrdup(shim_path ? shim_path : "cellvisor-shim");
    return &b->base;
}
