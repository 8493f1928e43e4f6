/* Life of one QEMU process.
 *
 *   STARTING -> READY -> LOADING -> RUNNING        clone
 *                  \---> SAVING  -> SAVED          template build
 *   any -> EXITED (the process is reaped)
 *
 * Everything that QEMU or its guest writes (QMP, stderr, console) is bounded: lines by vm/qmp.c,
 * stderr to a tail, the console to a tail and a capped file, and console reads pause when they come
 * too fast. */
#include "vm/qemu.h"
#include "common/cleanup.h"
#include "common/mem.h"
#include "common/proc.h"
#include "common/sm.h"
#include "vm/channel.h"
#include "vm/drain.h"
#include "vm/jail.h"
#include "vm/qemu_args.h"
#include "vm/qmp.h"
#include "vm/usock.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum { STARTING, READY, LOADING, RUNNING, SAVING, SAVED, EXITED };
static const struct sm_state states[] = {
    [STARTING] = { "starting", SM_TO(READY) | SM_TO(EXITED) },
    [READY] = { "ready", SM_TO(LOADING) | SM_TO(SAVING) | SM_TO(EXITED) },
    [LOADING] = { "loading", SM_TO(RUNNING) | SM_TO(EXITED) },
    [RUNNING] = { "running", SM_TO(EXITED) },
    [SAVING] = { "saving", SM_TO(SAVED) | SM_TO(EXITED) },
    [SAVED] = { "saved", SM_TO(EXITED) },
    [EXITED] = { "exited", 0 },
};
static const struct sm_def machine = { "vm_qemu", states, sizeof(states) / sizeof(*states) };

struct vm_qemu {
    struct loop *loop;
    struct log_ctx log;
    const struct vm_qemu_events *ev;
    void *ctx;
    struct sm sm;
    struct proc *proc;
    struct vm_qmp *qmp;
    char *link_path;
    struct vm_drain errors, console;
    /* the operation under way */
    vm_qemu_done_fn op_fn;
    void *op_ctx;
    struct loop_timer *op_timer;
    /* why it ends, when we know before the process does */
    bool killed, guest_shutdown;
    struct vm_exit why; /* text set: this is the reason */
    bool freed;
    unsigned busy;
};

static void release(struct vm_qemu *q)
{
    if (--q->busy > 0 || !q->freed)
        return;
    free(q->link_path);
    free(q);
}

/* ---- operations ---- */

static void op_finish(struct vm_qemu *q, const struct err *e)
{
    vm_qemu_done_fn fn = q->op_fn;
    void *ctx = q->op_ctx;

    if (!fn)
        return;
    loop_timer_stop(q->op_timer);
    q->op_fn = NULL;
    if (!e)
        sm_move(&q->sm, q->sm.state == LOADING ? RUNNING : SAVED);
    fn(ctx, e);
}

static void on_op_timeout(void *ctx)
{
    struct vm_qemu *q = ctx;
    struct err e;

    err_set(&e, -ETIMEDOUT, "QEMU did not finish %s the device state in time", sm_name(&q->sm));
    op_finish(q, &e);
}

/* Reply of a step on whose success nothing waits: only an error matters. */
static void on_step(void *ctx, json_t *result, const struct err *e)
{
    (void)result;
    if (e)
        op_finish(ctx, e);
}

static void on_cont(void *ctx, json_t *result, const struct err *e)
{
    (void)result;
    op_finish(ctx, e);
}

/* Commands are sent without waiting for each other's answers: QEMU runs them in order, and the
 * first error ends the operation. */
static void step(struct vm_qemu *q, const char *name, json_t *args, int fd)
{
    int r = vm_qmp_command(q->qmp, name, args, fd, VM_QEMU_COMMAND_MS, on_step, q);
    struct err e;

    if (r < 0 && q->op_fn) {
        err_errno(&e, -r, "cannot send '%s' to QEMU", name);
        op_finish(q, &e);
    }
}

static bool op_begin(struct vm_qemu *q, unsigned state, unsigned deadline_ms, vm_qemu_done_fn fn,
                     void *ctx)
{
    struct err e;

    if (q->op_fn || !sm_can(&q->sm, state)) {
        err_set(&e, -EBUSY, "QEMU is %s", sm_name(&q->sm));
        fn(ctx, &e);
        return false;
    }
    sm_move(&q->sm, state);
    q->op_fn = fn;
    q->op_ctx = ctx;
    loop_timer_start(q->op_timer, deadline_ms, 0);
    return true;
}

static void set_capabilities(struct vm_qemu *q)
{
    step(q, "migrate-set-capabilities",
         json_pack("{s:[{s:s,s:b},{s:s,s:b}]}", "capabilities", "capability", "x-ignore-shared",
                   "state", 1, "capability", "events", "state", 1),
         -1);
}

void vm_qemu_save(struct vm_qemu *q, int state_fd, vm_qemu_done_fn fn, void *ctx)
{
    q->busy++;
    if (op_begin(q, SAVING, VM_QEMU_SAVE_MS, fn, ctx)) {
        step(q, "stop", NULL, -1);
        set_capabilities(q);
        step(q, "migrate-set-parameters",
             json_pack("{s:I}", "max-bandwidth", (json_int_t)107374182400), -1);
        step(q, "getfd", json_pack("{s:s}", "fdname", "state"), state_fd);
        step(q, "migrate", json_pack("{s:s}", "uri", "fd:state"), -1);
    }
    release(q);
}

void vm_qemu_load(struct vm_qemu *q, int state_fd, vm_qemu_done_fn fn, void *ctx)
{
    q->busy++;
    if (op_begin(q, LOADING, VM_QEMU_LOAD_MS, fn, ctx)) {
        set_capabilities(q);
        step(q, "getfd", json_pack("{s:s}", "fdname", "state"), state_fd);
        step(q, "migrate-incoming", json_pack("{s:s}", "uri", "fd:state"), -1);
    }
    release(q);
}

static void on_migration(struct vm_qemu *q, const char *status)
{
    struct err e;

    if (!q->op_fn)
        return;
    if (strcmp(status, "failed") == 0 || strcmp(status, "cancelled") == 0) {
        err_set(&e, -EIO, "QEMU could not finish %s the device state", sm_name(&q->sm));
        op_finish(q, &e);
    } else if (strcmp(status, "completed") == 0 && q->sm.state == SAVING) {
        op_finish(q, NULL);
    } else if (strcmp(status, "completed") == 0) {
        int r = vm_qmp_command(q->qmp, "cont", NULL, -1, VM_QEMU_COMMAND_MS, on_cont, q);

        if (r < 0) {
            err_errno(&e, -r, "cannot resume the guest");
            op_finish(q, &e);
        }
    }
}

/* ---- QMP ---- */

static void on_qmp_ready(void *ctx)
{
    struct vm_qemu *q = ctx;

    if (q->killed || q->sm.state != STARTING)
        return;
    sm_move(&q->sm, READY);
    q->ev->ready(q->ctx);
}

static void on_qmp_event(void *ctx, const char *name, json_t *data)
{
    struct vm_qemu *q = ctx;
    const char *status = json_string_value(json_object_get(data, "status"));

    if (strcmp(name, "MIGRATION") == 0 && status)
        on_migration(q, status);
    else if (strcmp(name, "SHUTDOWN") == 0 && json_is_true(json_object_get(data, "guest")))
        q->guest_shutdown = true;
}

static void on_qmp_closed(void *ctx, const struct err *e)
{
    struct vm_qemu *q = ctx;

    /* A closed connection is the process's end, which its exit explains better. */
    if (!q->killed && e->code != -ECONNRESET && e->code != -EPIPE && q->why.text[0] == '\0') {
        q->why.reason = e->code == -ETIMEDOUT ? VM_EXIT_DEADLINE : VM_EXIT_PROTOCOL;
        snprintf(q->why.text, sizeof(q->why.text), "%.190s", e->msg);
    }
    if (q->proc)
        proc_kill(q->proc, SIGKILL, false);
}

static const struct vm_qmp_events qmp_events = { on_qmp_ready, on_qmp_event, on_qmp_closed };

/* ---- the end ---- */

static void describe_exit(struct vm_qemu *q, const struct proc_exit *x, struct vm_exit *ret)
{
    char line[120], con[120];

    *ret = q->why;
    ret->code = x->code;
    ret->signal = x->signal;
    if (ret->text[0])
        return;
    vm_tail_last_line(&q->errors.tail, line, sizeof(line));
    vm_tail_last_line(&q->console.tail, con, sizeof(con));
    if (q->killed) {
        ret->reason = VM_EXIT_RELEASED;
        snprintf(ret->text, sizeof(ret->text), "ended by the gateway");
    } else if (q->guest_shutdown) {
        ret->reason = VM_EXIT_GUEST;
        snprintf(ret->text, sizeof(ret->text), "the guest shut down%s%s", con[0] ? ": " : "", con);
    } else if (x->signal) {
        ret->reason = VM_EXIT_VMM;
        snprintf(ret->text, sizeof(ret->text), "QEMU was killed by signal %d", x->signal);
    } else {
        ret->reason = VM_EXIT_VMM;
        snprintf(ret->text, sizeof(ret->text), "QEMU ended with code %d%s%s", x->code,
                 line[0] ? ": " : "", line);
    }
}

static void on_process_exit(void *ctx, const struct proc_exit *x)
{
    struct vm_qemu *q = ctx;
    struct vm_exit why;
    struct err e;

    q->busy++;
    vm_qmp_drain(q->qmp); /* a SHUTDOWN event may still wait there */
    vm_drain_finish(&q->errors);
    vm_drain_finish(&q->console);
    describe_exit(q, x, &why);
    sm_move(&q->sm, EXITED);
    proc_free(q->proc);
    q->proc = NULL;
    err_set(&e, -ECONNRESET, "%s", why.text);
    op_finish(q, &e);
    if (!q->freed)
        q->ev->exited(q->ctx, &why);
    release(q);
}

void vm_qemu_kill(struct vm_qemu *q)
{
    if (!q->proc)
        return;
    q->killed = true;
    proc_kill(q->proc, SIGKILL, false);
}

void vm_qemu_free(struct vm_qemu *q)
{
    if (!q || q->freed)
        return;
    q->freed = true;
    q->busy++;
    q->op_fn = NULL;
    vm_qmp_free(q->qmp);
    proc_free(q->proc);
    q->proc = NULL;
    vm_drain_stop(&q->errors);
    vm_drain_stop(&q->console);
    loop_timer_free(q->op_timer);
    release(q);
}

/* ---- start ---- */

/* Descriptors on their way into the child. */
struct launch {
    struct proc_fd map[16];
    size_t n;
    int ours[16]; /* to be closed after the spawn */
    size_t n_ours;
};

static void pass(struct launch *l, int from, int to, bool ours)
{
    l->map[l->n++] = (struct proc_fd) { from, to };
    if (ours)
        l->ours[l->n_ours++] = from;
}

static void launch_fini(struct launch *l)
{
    for (size_t i = 0; i < l->n_ours; i++)
        close(l->ours[i]);
    l->n_ours = 0;
}

static int pass_file(struct launch *l, const char *path, int to, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return err_errno(e, errno, "cannot open %s", path);
    pass(l, fd, to, true);
    return 0;
}

/* QEMU opens kernel and initrd again by /proc/self/fd/N after its uid has changed: a memfd's mode
 * allows that whatever the mode of the file is. */
static int pass_copy(struct launch *l, const char *path, int to, struct err *e)
{
    CLEANUP(closep) int in = open(path, O_RDONLY | O_CLOEXEC);
    CLEANUP(closep) int fd = memfd_create("boot", MFD_CLOEXEC);
    struct stat st;
    ssize_t n;

    if (in < 0 || fd < 0 || fstat(in, &st) < 0)
        return err_errno(e, errno, "cannot open %s", path);
    for (off_t done = 0; done < st.st_size; done += n) {
        n = sendfile(fd, in, NULL, (size_t)(st.st_size - done));
        if (n <= 0)
            return err_errno(e, n < 0 ? errno : EIO, "cannot read %s", path);
    }
    pass(l, TAKE_FD(fd), to, true);
    return 0;
}

static int pass_listener(struct launch *l, const char *dir, const char *name, int to,
                         char **ret_path, struct err *e)
{
    CLEANUP(freep) char *path = xasprintf("%s/%s", dir, name);
    int fd = vm_usock_listen(path);

    if (fd < 0)
        return err_errno(e, -fd, "cannot listen on %s", path);
    pass(l, fd, to, true);
    *ret_path = TAKE_PTR(path);
    return 0;
}

/* Our ends of what QEMU writes: stderr, and the guest's console (a file of it for boots). */
static int make_outputs(struct vm_qemu *q, struct launch *l, const struct vm_qemu_spec *s,
                        struct err *e)
{
    CLEANUP(freep) char *path = xasprintf("%s/console.log", s->run_dir);
    int out[2], con[2], log_fd = -1;

    if (pipe2(out, O_CLOEXEC | O_NONBLOCK) < 0)
        return err_errno(e, errno, "pipe");
    vm_drain_start(&q->errors, q->loop, out[0], -1, 0);
    pass(l, out[1], STDERR_FILENO, true);
    if (s->kernel) {
        log_fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (log_fd < 0)
            return err_errno(e, errno, "cannot write %s", path);
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, con) < 0) {
        int errnum = errno;

        if (log_fd >= 0)
            close(log_fd);
        return err_errno(e, errnum, "socketpair");
    }
    vm_drain_start(&q->console, q->loop, con[0], log_fd, VM_QEMU_CONSOLE_LOG_MAX);
    pass(l, con[1], VM_QEMU_FD_CONSOLE, true);
    return 0;
}

static int prepare(struct vm_qemu *q, struct launch *l, const struct vm_qemu_spec *s, struct err *e)
{
    CLEANUP(freep) char *qmp_path = NULL;
    int fd, r;

    pass(l, s->mem_fd, VM_QEMU_FD_MEM, false);
    if ((r = make_outputs(q, l, s, e)) < 0 ||
        (r = pass_listener(l, s->run_dir, "qmp.sock", VM_QEMU_FD_QMP, &qmp_path, e)) < 0 ||
        (r = pass_listener(l, s->run_dir, "link.sock", VM_QEMU_FD_LINK, &q->link_path, e)) < 0 ||
        (r = pass_file(l, s->root_image, VM_QEMU_FD_ROOT, e)) < 0)
        return r;
    if (s->kernel && (r = pass_copy(l, s->kernel, VM_QEMU_FD_KERNEL, e)) < 0)
        return r;
    if (s->kernel && s->initrd && (r = pass_copy(l, s->initrd, VM_QEMU_FD_INITRD, e)) < 0)
        return r;
    fd = vm_usock_connect(qmp_path); /* waits in the backlog until QEMU accepts */
    if (fd < 0)
        return err_errno(e, -fd, "cannot connect to %s", qmp_path);
    q->qmp = vm_qmp_new(q->loop, fd, VM_QEMU_GREETING_MS, &q->log, &qmp_events, q);
    return 0;
}

static int spawn(struct vm_qemu *q, struct launch *l, const struct vm_qemu_spec *s, struct err *e)
{
    const char *argv[VM_QEMU_ARGS_MAX + 24];
    /* QEMU reads its caches and debug switches from the environment: give it none of ours. */
    static const char *const env[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", NULL };
    struct proc_spec ps = { .argv = argv,
                            .env = env,
                            .cwd = "/",
                            .fds = l->map,
                            .n_fds = l->n,
                            .new_session = true,
                            .die_with_parent = true };
    CLEANUP(freep) struct vm_qemu_args *args = xnew(struct vm_qemu_args);
    struct vm_jail jail;
    char version[32];
    size_t n = 0;
    int r = vm_qemu_version(s->qemu_path, version, e); /* setpriv would hide a missing program */

    if (r < 0)
        return r;
    if (s->unprivileged) {
        r = vm_jail_prefix(s->jail_uid, s->accel == VM_ACCEL_KVM, &jail, e);
        if (r < 0)
            return r;
        for (; jail.prefix[n]; n++)
            argv[n] = jail.prefix[n];
    }
    vm_qemu_args(s, args);
    for (size_t i = 0; i <= args->n; i++)
        argv[n++] = args->argv[i];
    ps.n_limits = vm_jail_limits(&ps.limits);
    return proc_spawn(q->loop, &ps, on_process_exit, q, &q->proc, e);
}

int vm_qemu_start(struct loop *l, const struct vm_qemu_spec *s, const struct log_ctx *log,
                  const struct vm_qemu_events *ev, void *ctx, struct vm_qemu **ret, struct err *e)
{
    struct vm_qemu *q = xnew(struct vm_qemu);
    struct launch launch = { .n = 0 };
    int r;

    q->loop = l;
    q->ev = ev;
    q->ctx = ctx;
    log_ctx_init(&q->log, log);
    sm_init(&q->sm, &machine, STARTING);
    q->errors.fd = q->errors.log_fd = q->console.fd = q->console.log_fd = -1;
    q->op_timer = loop_timer_new(l, on_op_timeout, q);
    r = prepare(q, &launch, s, e);
    if (r == 0)
        r = spawn(q, &launch, s, e);
    launch_fini(&launch);
    if (r < 0) {
        vm_qemu_free(q);
        return r;
    }
    log_debug(&q->log, "QEMU started pid=%d", (int)proc_pid(q->proc));
    *ret = q;
    return 0;
}

const char *vm_qemu_link_path(const struct vm_qemu *q)
{
    return q->link_path;
}

int vm_qemu_pid(const struct vm_qemu *q)
{
    return q->proc ? (int)proc_pid(q->proc) : 0;
}

const char *vm_qemu_console_tail(const struct vm_qemu *q)
{
    return q->console.tail.bytes;
}
