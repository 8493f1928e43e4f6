/* Life of a kernel: start, probe, operations, end. What flows through it is in kernel_io.c. */
#include "guest-kernel-shim/kernel.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include "guest-kernel-shim/init.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROBE_TICK_MS 20     /* a reply without its idle: iopub was late, ask again */
#define PROBE_REPEAT_MS 5000 /* no reply at all: send the probe again */
#define TERM_MS 1000         /* SIGTERM to SIGKILL */
#define DRAIN_MS 500         /* reaped to "whatever is still to come will not" */
#define INTERRUPT_REPLY_MS 5000
#define ORPHAN_MS 500 /* after an interrupt: to SIGTERM, and from there to SIGKILL */
#define OLD_KEY_MS 2000

static const struct sm_state states[] = {
    [SHIM_KERNEL_NEW] = { "new", SM_TO(SHIM_KERNEL_STARTING) | SM_TO(SHIM_KERNEL_EXITED) },
    [SHIM_KERNEL_STARTING] = { "starting",
                               SM_TO(SHIM_KERNEL_RUNNING) | SM_TO(SHIM_KERNEL_STOPPING) |
                                   SM_TO(SHIM_KERNEL_DRAINING) | SM_TO(SHIM_KERNEL_EXITED) },
    [SHIM_KERNEL_RUNNING] = { "running",
                              SM_TO(SHIM_KERNEL_STOPPING) | SM_TO(SHIM_KERNEL_DRAINING) },
    [SHIM_KERNEL_STOPPING] = { "stopping", SM_TO(SHIM_KERNEL_DRAINING) },
    [SHIM_KERNEL_DRAINING] = { "draining", SM_TO(SHIM_KERNEL_EXITED) },
    [SHIM_KERNEL_EXITED] = { "exited", SM_TO(SHIM_KERNEL_STARTING) },
};
const struct sm_def shim_kernel_sm = { "shim_kernel", states, 6 };

struct pending_op {
    struct list_node link; /* shim_kernel::pending */
    enum shim_op op;
    uint64_t id;
};

/* ---- pure parts ---- */

int shim_op_parse(const char *s, enum shim_op *ret)
{
    static const char *const names[] = { "interrupt", "restart", "stop", "kill" };

    for (unsigned i = 0; s && i < 4; i++) {
        if (strcmp(s, names[i]) == 0) {
            *ret = (enum shim_op)i;
            return 0;
        }
    }
    return -EINVAL;
}

struct shim_exit shim_exit_of(enum shim_kernel_state s, int status, bool oom)
{
    struct shim_exit x = { .reason = "exit", .code = -1, .signal = -1 };

    if (WIFEXITED(status))
        x.code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) {
        x.signal = WTERMSIG(status);
        x.reason = "signal";
    }
    if (s == SHIM_KERNEL_STOPPING)
        x.reason = "stopped";
    else if (oom && x.signal == SIGKILL)
        x.reason = "oom";
    else if (s == SHIM_KERNEL_STARTING)
        x.reason = "start_failed";
    return x;
}

/* ---- object ---- */

void shim_kernel_set_stream(struct shim_kernel *k, uint32_t stream)
{
    char text[16];

    k->stream = stream;
    snprintf(text, sizeof(text), "%u", stream);
    log_ctx_init(&k->log, &k->host->log);
    log_ctx_add(&k->log, "stream", text);
    if (k->spec)
        log_ctx_add(&k->log, "spec", k->spec->name);
}

struct shim_kernel *shim_kernel_new(struct shim_host *h, uint32_t stream)
{
    struct shim_kernel *k = xnew(struct shim_kernel);

    k->host = h;
    sm_init(&k->sm, &shim_kernel_sm, SHIM_KERNEL_NEW);
    shim_kernel_set_stream(k, stream);
    k->out_fd[0] = k->out_fd[1] = -1;
    k->hook.fd = -1;
    k->env = json_object();
    buf_init(&k->tail, 2 * SHIM_TAIL_MAX);
    for (int c = 0; c < JP_CHANNELS; c++)
        list_init(&k->inbox[c]);
    list_init(&k->outbox);
    list_init(&k->pending);
    return k;
}

bool shim_kernel_alive(const struct shim_kernel *k)
{
    return k->pid > 0;
}

static bool write_text(const char *path, const char *text)
{
    CLEANUP(closep) int fd = open(path, O_WRONLY | O_CLOEXEC);

    return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
}

static void signal_group(struct shim_kernel *k, int sig)
{
    if (k->pid > 0)
        kill(-k->pid, sig);
}

/* Everything below the kernel, whatever group it put itself into. */
static void kill_tree(struct shim_kernel *k)
{
    struct shim_proc *p = xcalloc(SHIM_PROCS_MAX, sizeof(*p));
    size_t n = k->pid > 0 ? shim_procs_descendants(k->pid, p, SHIM_PROCS_MAX) : 0;

    signal_group(k, SIGKILL);
    for (size_t i = 0; i < n; i++)
        kill(p[i].pid, SIGKILL);
    free(p);
}

static void stop_timers(struct shim_kernel *k)
{
    shim_timer_stop(&k->timer);
    shim_timer_stop(&k->key_timer);
    shim_timer_stop(&k->interrupt_timer);
    shim_timer_stop(&k->orphan_timer);
    free(k->orphans);
    k->orphans = NULL;
    k->n_orphans = 0;
}

void shim_kernel_end_text(struct shim_kernel *k, char *ret, size_t size)
{
    const char *tail = k->tail.len ? buf_cstr(&k->tail) : NULL;
    char how[48] = "";

    if (k->exit.signal >= 0)
        snprintf(how, sizeof(how), ", signal %d", k->exit.signal);
    else if (k->exit.code >= 0)
        snprintf(how, sizeof(how), ", exit code %d", k->exit.code);
    snprintf(ret, size, "the kernel ended (%s%s)%s%s", k->exit.reason ? k->exit.reason : "killed",
             how, tail ? ": " : "", tail ? tail : "");
}

static void end_process_state(struct shim_kernel *k)
{
    char text[1024];

    shim_kernel_end_text(k, text, sizeof(text));
    stop_timers(k);
    shim_kernel_close_io(k);
    shim_kernel_request_done(k, text);
    shim_kernel_interrupted(k, "the kernel has ended");
    if (k->dir[0])
        fs_rm_rf(k->dir, NULL);
    k->dir[0] = '\0';
    k->busy = false;
}

void shim_kernel_free(struct shim_kernel *k)
{
    struct list_node *n;

    if (!k)
        return;
    kill_tree(k);
    end_process_state(k);
    shim_kernel_drop_inbox(k);
    while ((n = list_first(&k->pending))) {
        list_remove(n);
        free(list_entry(n, struct pending_op, link));
    }
    json_decref(k->env);
    free(k->cwd);
    free(k->info);
    buf_fini(&k->tail);
    buf_fini(&k->request.error);
    free(k);
}

/* ---- operations that wait ---- */

static void op_wait(struct shim_kernel *k, enum shim_op op, uint64_t id)
{
    struct pending_op *p = xnew(struct pending_op);

    p->op = op;
    p->id = id;
    list_push_back(&k->pending, &p->link);
}

/* Answer all waiting operations of the kinds in `ops` (bit = 1 << op). */
static void ops_done(struct shim_kernel *k, unsigned ops, const char *error)
{
    LIST_FOR_EACH_SAFE (&k->pending, n) {
        struct pending_op *p = list_entry(n, struct pending_op, link);
        uint64_t id = p->id;

        if (!(ops & 1u << p->op))
            continue;
        list_remove(n);
        free(p);
        k->host->ops->done(k->host->ctx, k, id, error);
    }
}

#define OPS_RESTART (1u << SHIM_OP_RESTART)
#define OPS_END (1u << SHIM_OP_STOP | 1u << SHIM_OP_KILL)

/* ---- start ---- */

static void on_probe_tick(void *ctx)
{
    struct shim_kernel *k = ctx;
    struct shim_request *r = &k->request;

    if (shim_now_ms() >= k->deadline_ms) {
        char text[128];
        int n = snprintf(text, sizeof(text),
                         "\nthe kernel did not answer within %" PRIu64 " s and was ended",
                         (k->deadline_ms - k->started_ms) / 1000);

        log_warn(&k->log, "%s", text + 1);
        buf_append(&k->tail, text, (size_t)n);
        kill_tree(k); /* SIGCHLD reports it: start_failed */
        return;
    }
    k->stage++;
    if (r->replied || k->stage % (PROBE_REPEAT_MS / PROBE_TICK_MS) == 0)
        shim_kernel_probe(k);
    shim_timer_start(&k->host->loop, &k->timer, PROBE_TICK_MS, on_probe_tick, k);
}

static void start_failed(struct shim_kernel *k, const struct err *e)
{
    log_warn(&k->log, "kernel does not start: %s", e->msg);
    buf_clear(&k->tail);
    buf_append_str(&k->tail, e->msg);
    k->exit = (struct shim_exit) { .reason = "start_failed", .code = -1, .signal = -1 };
    end_process_state(k);
    sm_move(&k->sm, SHIM_KERNEL_EXITED);
    k->host->ops->state(k->host->ctx, k);
    shim_kernel_drop_inbox(k);
    ops_done(k, OPS_RESTART, e->msg);
    ops_done(k, OPS_END, NULL);
}

static void start_process(struct shim_kernel *k)
{
    struct err e = { 0 };

    buf_clear(&k->tail);
    free(k->info);
    k->info = NULL;
    k->restart = k->drain_forced = k->busy = false;
    k->stage = 0;
    k->started_ms = shim_now_ms();
    k->deadline_ms = k->started_ms + k->host->start_timeout_ms;
    sm_move(&k->sm, SHIM_KERNEL_STARTING);
    if (shim_kernel_launch(k, &e) < 0) {
        start_failed(k, &e);
        return;
    }
    log_info(&k->log, "kernel \"%s\" started, pid %d%s", k->spec->name, (int)k->pid,
             k->hooked ? ", with hook" : "");
    k->host->ops->state(k->host->ctx, k);
    shim_kernel_probe(k);
    shim_timer_start(&k->host->loop, &k->timer, PROBE_TICK_MS, on_probe_tick, k);
}

/* A new process for k: a kernel that waits for this, else one from scratch. */
static void restart_process(struct shim_kernel *k)
{
    const struct shim_kernel_ops *ops = k->host->ops;

    k->restart = false;
    if (!ops->replace || !ops->replace(k->host->ctx, k))
        start_process(k);
}

static void move_list(struct list *from, struct list *to)
{
    struct list_node *n;

    while ((n = list_first(from))) {
        list_remove(n);
        list_push_back(to, n);
    }
}

void shim_kernel_hand_over(struct shim_kernel *from, struct shim_kernel *to)
{
    for (int c = 0; c < JP_CHANNELS; c++)
        move_list(&from->inbox[c], &to->inbox[c]);
    move_list(&from->pending, &to->pending);
    shim_kernel_set_stream(to, from->stream);
    shim_kernel_set_env(to, from->env, from->cwd);
    to->held = true;
}

void shim_kernel_release(struct shim_kernel *k)
{
    char path[64], text[16];

    k->held = false;
    k->background = false;
    setpriority(PRIO_PGRP, (id_t)k->pid, 0);
    snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", (int)k->pid);
    snprintf(text, sizeof(text), "%d", k->host->vm ? SHIM_KERNEL_OOM_ADJ : 0);
    if (k->host->vm && !write_text(path, text))
        log_debug(&k->log, "oom_score_adj stays as it is");
    k->host->ops->state(k->host->ctx, k);
    ops_done(k, OPS_RESTART, NULL);
    shim_kernel_pump(k);
}

void shim_kernel_set_env(struct shim_kernel *k, json_t *env, const char *cwd)
{
    if (env)
        json_object_update(k->env, env);
    if (cwd) {
        free(k->cwd);
        k->cwd = xstrdup(cwd);
    }
}

void shim_kernel_start(struct shim_kernel *k, const struct shim_spec *spec, json_t *env,
                       const char *cwd)
{
    assert(!shim_kernel_alive(k));
    k->spec = spec;
    log_ctx_add(&k->log, "spec", spec->name);
    shim_kernel_set_env(k, env, cwd);
    start_process(k);
}

void shim_kernel_running(struct shim_kernel *k)
{
    shim_timer_stop(&k->timer);
    buf_clear(&k->tail);
    sm_move(&k->sm, SHIM_KERNEL_RUNNING);
    log_info(&k->log, "kernel runs after %" PRIu64 " ms", shim_now_ms() - k->started_ms);
    k->host->ops->state(k->host->ctx, k);
    ops_done(k, OPS_RESTART, NULL);
}

/* ---- end ---- */

static void stop_step(void *ctx)
{
    struct shim_kernel *k = ctx;

    switch (k->stage++) {
    case 0:
        signal_group(k, SIGTERM);
        shim_timer_start(&k->host->loop, &k->timer, TERM_MS, stop_step, k);
        break;
    default:
        kill_tree(k);
        break;
    }
}

/* Ask it to end, then insist. A kernel that is busy is interrupted first, as jupyter_client does:
 * it would not look at the request otherwise. */
static void begin_stop(struct shim_kernel *k, bool restart, bool now)
{
    bool running = k->sm.state == SHIM_KERNEL_RUNNING;

    if (!sm_can(&k->sm, SHIM_KERNEL_STOPPING)) {
        if (now)
            kill_tree(k);
        return;
    }
    sm_move(&k->sm, SHIM_KERNEL_STOPPING);
    k->stage = 0;
    if (now) {
        kill_tree(k);
        return;
    }
    if (!running) {
        stop_step(k);
        return;
    }
    if (k->busy)
        signal_group(k, SIGINT);
    shim_kernel_send_own(k, JP_CONTROL, "shutdown_request",
                         restart ? "{\"restart\":true}" : "{\"restart\":false}", NULL);
    shim_timer_start(&k->host->loop, &k->timer, k->host->grace_ms, stop_step, k);
}

void shim_kernel_renew(struct shim_kernel *k)
{
    k->held = k->background = false;
    k->restart = true;
    begin_stop(k, true, true);
}

static void on_drain_timer(void *ctx)
{
    struct shim_kernel *k = ctx;

    k->drain_forced = true;
    shim_kernel_pump(k);
}

void shim_kernel_reaped(struct shim_kernel *k, int wait_status)
{
    enum shim_kernel_state s = (enum shim_kernel_state)k->sm.state;
    bool oom = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL &&
               shim_oom_was(&k->host->oom, k->pid);

    k->exit = shim_exit_of(s, wait_status, oom);
    log_info(&k->log, "kernel ended: %s, code %d, signal %d", k->exit.reason, k->exit.code,
             k->exit.signal);
    kill(-k->pid, SIGKILL); /* what it left behind in its group */
    k->pid = 0;
    shim_timer_stop(&k->timer);
    shim_timer_stop(&k->orphan_timer);
    sm_move(&k->sm, SHIM_KERNEL_DRAINING);
    shim_timer_start(&k->host->loop, &k->timer, DRAIN_MS, on_drain_timer, k);
    shim_kernel_pump(k);
}

void shim_kernel_finish(struct shim_kernel *k)
{
    const char *died = "the kernel ended while it was starting";

    end_process_state(k);
    sm_move(&k->sm, SHIM_KERNEL_EXITED);
    if (k->restart) {
        ops_done(k, OPS_END, NULL); /* none by rule, but an answer is owed in any case */
        restart_process(k);
        return;
    }
    k->host->ops->state(k->host->ctx, k);
    shim_kernel_drop_inbox(k);
    ops_done(k, OPS_RESTART, died);
    ops_done(k, OPS_END, NULL);
}

/* ---- interrupt ---- */

void shim_kernel_interrupted(struct shim_kernel *k, const char *error)
{
    if (!k->interrupt_id)
        return;
    free(k->interrupt_id);
    k->interrupt_id = NULL;
    shim_timer_stop(&k->interrupt_timer);
    k->host->ops->done(k->host->ctx, k, k->interrupt_op, error);
}

static void on_interrupt_timeout(void *ctx)
{
    shim_kernel_interrupted(ctx, "the kernel did not answer interrupt_request within 5 s");
}

/* Processes that the interrupted cell had started and that are now orphans in the kernel's group
 * (a shell's background jobs ignore SIGINT): nobody waits for them any more. Daemons that the user
 * detached on purpose left the group, and what was an orphan before is not in the list. */
static void on_orphan_timer(void *ctx)
{
    struct shim_kernel *k = ctx;
    int sig = k->orphan_round++ == 0 ? SIGTERM : SIGKILL;
    bool any = false;

    for (size_t i = 0; i < k->n_orphans; i++) {
        struct shim_proc now;
        const struct shim_proc *was = &k->orphans[i];

        if (!shim_procs_get(was->pid, &now) || now.start != was->start || now.pgrp != k->pid ||
            now.ppid != getpid())
            continue;
        kill(now.pid, sig);
        any = true;
    }
    if (any && sig == SIGTERM)
        shim_timer_start(&k->host->loop, &k->orphan_timer, ORPHAN_MS, on_orphan_timer, k);
}

static void interrupt_by_signal(struct shim_kernel *k)
{
    free(k->orphans);
    k->orphans = xcalloc(SHIM_PROCS_MAX, sizeof(*k->orphans));
    k->n_orphans = shim_procs_descendants(k->pid, k->orphans, SHIM_PROCS_MAX);
    k->orphan_round = 0;
    signal_group(k, SIGINT);
    for (size_t i = 0; i < k->n_orphans; i++)
        if (k->orphans[i].pgrp != k->pid)
            kill(k->orphans[i].pid, SIGINT);
    if (k->n_orphans)
        shim_timer_start(&k->host->loop, &k->orphan_timer, ORPHAN_MS, on_orphan_timer, k);
}

static void op_interrupt(struct shim_kernel *k, uint64_t id)
{
    struct shim_host *h = k->host;

    if (k->sm.state != SHIM_KERNEL_RUNNING) {
        h->ops->done(h->ctx, k, id, "the kernel is not running");
    } else if (!k->spec->interrupt_by_message) {
        interrupt_by_signal(k);
        h->ops->done(h->ctx, k, id, NULL);
    } else if (k->interrupt_id) {
        h->ops->done(h->ctx, k, id, "an interrupt is already under way");
    } else {
        k->interrupt_op = id;
        shim_kernel_send_own(k, JP_CONTROL, "interrupt_request", "{}", &k->interrupt_id);
        shim_timer_start(&h->loop, &k->interrupt_timer, INTERRUPT_REPLY_MS, on_interrupt_timeout,
                         k);
    }
}

void shim_kernel_op(struct shim_kernel *k, enum shim_op op, uint64_t id)
{
    struct shim_host *h = k->host;
    bool ended = k->sm.state == SHIM_KERNEL_EXITED || k->sm.state == SHIM_KERNEL_NEW;

    switch (op) {
    case SHIM_OP_INTERRUPT:
        op_interrupt(k, id);
        return;
    case SHIM_OP_RESTART:
        if (!k->spec) {
            h->ops->done(h->ctx, k, id, "no kernel was ever started on this stream");
            return;
        }
        op_wait(k, op, id);
        if (ended) {
            restart_process(k);
        } else {
            k->restart = true;
            shim_kernel_drop_inbox(k);
            begin_stop(k, true, false);
        }
        return;
    case SHIM_OP_STOP:
    case SHIM_OP_KILL:
        if (ended) {
            h->ops->done(h->ctx, k, id, NULL);
            return;
        }
        op_wait(k, op, id);
        if (k->restart) {
            k->restart = false;
            ops_done(k, OPS_RESTART, "the kernel was stopped");
        }
        shim_kernel_drop_inbox(k);
        begin_stop(k, false, op == SHIM_OP_KILL);
        return;
    }
}

/* ---- reseed ---- */

static void on_old_key(void *ctx)
{
    struct shim_kernel *k = ctx;

    if (k->zmq)
        shim_zmq_forget_key(k->zmq);
}

/* The new key into the connection file, in place: both have the same length. Done here because the
 * kernel's own language would take a tenth of the whole resume for it under emulation. Whoever
 * reads the file later (a user's %connect_info) finds the truth; nothing of ours does. */
static void replace_key(struct shim_kernel *k, const char *fresh)
{
    CLEANUP(freep) char *file = xasprintf("%s/connection.json", k->dir);
    CLEANUP(closep) int fd = open(file, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    char text[1024];
    ssize_t n = fd >= 0 ? pread(fd, text, sizeof(text), 0) : -1;
    char *at = n > 0 ? memmem(text, (size_t)n, k->key, strlen(k->key)) : NULL;

    if (!at || pwrite(fd, fresh, strlen(k->key), at - text) < 0)
        log_warn(&k->log, "connection file keeps the old key");
}

void shim_kernel_reseed(struct shim_kernel *k, shim_hook_fn fn, void *ctx)
{
    uint8_t seed[64], key[SHIM_KEY_LEN / 2];
    char seed_hex[129], key_hex[SHIM_KEY_LEN + 1], session[ID_UUID_LEN + 1];

    id_random(seed, sizeof(seed));
    id_hex(seed_hex, seed, sizeof(seed));
    id_random(key, sizeof(key));
    id_hex(key_hex, key, sizeof(key));
    id_uuid4(session);
    if (!shim_hook_ready(&k->hook)) {
        fn(ctx, "the kernel has no hook");
        return;
    }
    shim_zmq_rekey(k->zmq, slice_str(key_hex));
    replace_key(k, key_hex);
    snprintf(k->key, sizeof(k->key), "%s", key_hex);
    shim_timer_start(&k->host->loop, &k->key_timer, OLD_KEY_MS, on_old_key, k);
    shim_hook_call(&k->hook,
                   json_pack("{s:s, s:{s:s, s:s}}", "reseed", seed_hex, "rekey", "session", session,
                             "key", key_hex),
                   fn, ctx);
}
