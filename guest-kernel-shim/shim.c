/* Link messages -> kernels, kernels -> link. The steps of PREPARE, RESUME, ASSIGN are in flow.c. */
#include "guest-kernel-shim/shim.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/json.h"
#include "common/mem.h"
#include "guest-kernel-shim/init.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#define ROOM_BYTES (SHIM_LINK_QUEUE / 2) /* where gl_link calls writable */
#define START_MS_LOCAL 60000u
#define START_MS_VM 180000u /* emulated guests run at a twentieth of the speed */
#define STANDBY_MS 5000u
#define KILL_MS 3000u /* for processes to die of SIGKILL */
#define GRACE_MS_LOCAL 3000u
#define GRACE_MS_VM 5000u

/* ---- sending ---- */

bool shim_may_send(const struct shim *s)
{
    return s->link.gl && gl_link_phase(s->link.gl) != GL_PHASE_HELLO;
}

static bool running(const struct shim *s)
{
    return s->link.gl && gl_link_phase(s->link.gl) == GL_PHASE_RUNNING;
}

static int send_text(struct shim *s, enum gl_type type, uint32_t stream, struct slice text)
{
    int r = gl_link_send(s->link.gl, type, stream, &text, 1);

    if (r < 0 && r != -EAGAIN)
        log_error(&s->host.log, "%s of %zu bytes not sent: %s", gl_type_name(type), text.n,
                  strerror(-r));
    return r;
}

json_t *shim_json_text(const char *text)
{
    json_t *v = json_string(text);
    struct buf b;

    if (v)
        return v;
    buf_init(&b, 8 * strlen(text) + 16);
    buf_append_json_string(&b, slice_str(text));
    v = json_loads(buf_cstr(&b), JSON_DECODE_ANY, NULL);
    buf_fini(&b);
    return v ? v : json_string("?");
}

void shim_send_json(struct shim *s, enum gl_type type, uint32_t stream, json_t *v)
{
    CLEANUP(freep) char *text = v ? json_dumps(v, JSON_COMPACT) : NULL;

    json_decref(v);
    if (!text)
        text = xstrdup("{\"ok\":false,\"error\":\"the answer is not valid UTF-8\"}");
    send_text(s, type, stream, slice_str(text));
}

void shim_tell(struct shim *s, enum log_level level, const char *fmt, ...)
{
    static const char *const names[] = { "error", "warn", "info", "debug" };
    char text[1024];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    log_write(&s->host.log, level, "%s", text);
    if (shim_may_send(s))
        shim_send_json(
            s, GL_LOG, 0,
            json_pack("{s:s, s:o}", "level", names[level], "text", shim_json_text(text)));
}

/* ---- kernel states ---- */

static const char *public_state(const struct shim_kernel *k)
{
    if (k->held && shim_kernel_alive(k))
        return "starting";
    switch ((enum shim_kernel_state)k->sm.state) {
    case SHIM_KERNEL_STARTING:
        return "starting";
    case SHIM_KERNEL_RUNNING:
    case SHIM_KERNEL_STOPPING:
    case SHIM_KERNEL_DRAINING:
        return "running";
    default:
        return "exited";
    }
}

static void append_number(struct buf *b, const char *key, int v)
{
    if (v < 0)
        buf_printf(b, ",\"%s\":null", key);
    else
        buf_printf(b, ",\"%s\":%d", key, v);
}

static void state_text(struct buf *b, struct shim_kernel *k)
{
    buf_printf(b, "{\"state\":\"%s\",\"pid\":%d", public_state(k), (int)k->pid);
    if (k->sm.state == SHIM_KERNEL_EXITED) {
        append_number(b, "exit_code", k->exit.code);
        append_number(b, "signal", k->exit.signal);
        buf_printf(b, ",\"reason\":\"%s\",\"tail\":", k->exit.reason);
        buf_append_json_string(b, buf_slice(&k->tail));
    } else if (k->sm.state == SHIM_KERNEL_RUNNING && !k->held && k->info) {
        buf_append_str(b, ",\"info\":");
        buf_append_str(b, k->info);
    }
    buf_append_byte(b, '}');
}

void shim_report_state(struct shim *s, struct shim_kernel *k)
{
    struct buf b;

    s->state_owed[k->stream] = true;
    if (!shim_may_send(s))
        return; /* HELLO lists the states */
    buf_init(&b, 512u << 10);
    state_text(&b, k);
    if (send_text(s, GL_KERNEL_STATE, k->stream, buf_slice(&b)) != -EAGAIN)
        s->state_owed[k->stream] = false;
    buf_fini(&b);
}

/* A stream that has no kernel at all. */
static void report_absent(struct shim *s, uint32_t stream, const char *why)
{
    struct buf b;

    buf_init(&b, 8192);
    buf_append_str(&b, "{\"state\":\"exited\",\"pid\":0,\"exit_code\":null,\"signal\":null,"
                       "\"reason\":\"start_failed\",\"tail\":");
    buf_append_json_string(&b, slice_str(why));
    buf_append_byte(&b, '}');
    send_text(s, GL_KERNEL_STATE, stream, buf_slice(&b));
    buf_fini(&b);
}

static void on_state(void *ctx, struct shim_kernel *k)
{
    struct shim *s = ctx;

    if (k == s->standby.kernel) {
        shim_standby_state(s);
        return;
    }
    if (k->stream == 0)
        return; /* buried */
    shim_report_state(s, k);
    shim_flow_kernel_state(s, k);
}

static bool on_replace(void *ctx, struct shim_kernel *k)
{
    return k->stream != 0 && shim_standby_take(ctx, k);
}

static void on_done(void *ctx, struct shim_kernel *k, uint64_t id, const char *error)
{
    struct shim *s = ctx;
    json_t *v;

    if (id == SHIM_FLOW_OP) {
        shim_flow_op_done(s, error);
        return;
    }
    if (!running(s))
        return;
    v = json_pack("{s:I, s:b}", "id", (json_int_t)id, "ok", error == NULL);
    if (error)
        json_object_set_new(v, "error", shim_json_text(error));
    shim_send_json(s, GL_KERNEL_DONE, k->stream, v);
}

/* Before a sandbox is handed to a user there is nobody to read; afterwards nothing is dropped. */
static bool on_room(void *ctx, struct shim_kernel *k)
{
    struct shim *s = ctx;

    if (!running(s) || k->stream == 0)
        return !s->assigned || k->stream == 0;
    return gl_link_queued(s->link.gl, k->stream) <= ROOM_BYTES;
}

static int on_kernel_message(void *ctx, struct shim_kernel *k, const struct jp_msg *m)
{
    struct shim *s = ctx;
    const struct jp_parts *p = &m->parts;
    CLEANUP(freep) uint8_t *head = NULL;
    CLEANUP(freep) struct slice *parts = NULL;
    size_t n = 4 + p->n_buffers;
    int r;

    if (k->stream == 0)
        return 0; /* a standby kernel speaks to nobody */
    if (!running(s))
        return s->assigned ? -EAGAIN : 0;
    head = xmalloc(4 + 4 * n);
    parts = xcalloc(1 + n, sizeof(*parts));
    jp_body_head(m, head);
    parts[0] = slice_of(head, 4 + 4 * n);
    parts[1] = p->header;
    parts[2] = p->parent;
    parts[3] = p->metadata;
    parts[4] = p->content;
    for (size_t i = 0; i < p->n_buffers; i++)
        parts[5 + i] = p->buffers[i];
    r = gl_link_send(s->link.gl, GL_KERNEL_MSG, k->stream, parts, 1 + n);
    if (r < 0 && r != -EAGAIN) {
        shim_tell(s, LOG_LEVEL_ERROR, "a %s of %zu bytes was dropped: %s", m->msg_type, m->size,
                  strerror(-r));
        return 0;
    }
    return r;
}

static int on_output(void *ctx, struct shim_kernel *k, int fd, struct slice bytes)
{
    struct shim *s = ctx;
    uint8_t number = (uint8_t)fd;
    const struct slice parts[] = { slice_of(&number, 1), bytes };

    if (k->stream == 0)
        return 0;
    if (!running(s)) {
        if (!s->assigned)
            shim_tell(s, LOG_LEVEL_INFO, "kernel says on descriptor %d: %.*s", fd,
                      SLICE_FMT(bytes));
        return s->assigned ? -EAGAIN : 0;
    }
    return gl_link_send(s->link.gl, GL_KERNEL_OUT, k->stream, parts, 2) == -EAGAIN ? -EAGAIN : 0;
}

static void on_consumed(void *ctx, struct shim_kernel *k, size_t n)
{
    struct shim *s = ctx;

    if (n && s->link.gl)
        gl_link_grant(s->link.gl, k->stream, n);
}

static const struct shim_kernel_ops kernel_ops = {
    .state = on_state,
    .done = on_done,
    .replace = on_replace,
    .room = on_room,
    .message = on_kernel_message,
    .output = on_output,
    .consumed = on_consumed,
};

/* ---- host's messages ---- */

static void say_hello(struct shim *s)
{
    json_t *kernels = json_array();

    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++) {
        struct shim_kernel *k = s->kernels[i];
        if (k && k->spec)
            json_array_append_new(kernels, json_pack("{s:i, s:s, s:s}", "stream", (int)i, "spec",
                                                     k->spec->name, "state", public_state(k)));
    }
    shim_send_json(s, GL_HELLO, 0,
                   json_pack("{s:i, s:s, s:s, s:s, s:b, s:o}", "version", GL_VERSION, "role",
                             "guest", "shim", CELLVISOR_VERSION, "mode",
                             s->host.vm ? "vm" : "local", "assigned", s->assigned, "kernels",
                             kernels));
}

static void on_hello(struct shim *s, struct slice payload)
{
    struct err e = { 0 };
    json_t *v = json_parse(payload, &e);
    int version = (int)json_integer_value(json_object_get(v, "version"));
    bool specs = json_is_true(json_object_get(v, "specs"));

    json_decref(v);
    if (version != GL_VERSION) {
        log_error(&s->host.log, "the host speaks link version %d, this shim %d", version,
                  GL_VERSION);
        return;
    }
    /* A host that follows another unnoticed: what was queued for that one is not for this one. */
    if (gl_link_phase(s->link.gl) != GL_PHASE_HELLO) {
        shim_flow_abort(s);
        gl_link_reset(s->link.gl);
    }
    gl_link_set_phase(s->link.gl, GL_PHASE_IDLE);
    say_hello(s);
    /* Of a prepared template the host has them in its manifest. */
    if (!s->prepared || specs) {
        CLEANUP(freep) char *text = shim_catalog_json(&s->catalog);
        send_text(s, GL_SPECS, 0, slice_str(text));
    }
}

const char *shim_usable_cwd(struct shim *s, const char *cwd)
{
    const char *home = s->host.user.home[0] ? s->host.user.home : "/";
    struct stat st;

    if (cwd && stat(cwd, &st) == 0 && S_ISDIR(st.st_mode))
        return cwd;
    if (cwd)
        shim_tell(s, LOG_LEVEL_WARN, "folder %s is not there: using %s", cwd, home);
    return home;
}

static void start_kernel(struct shim *s, uint32_t stream, json_t *v)
{
    const char *name = json_string_value(json_object_get(v, "spec"));
    const char *cwd = json_string_value(json_object_get(v, "cwd"));
    json_t *env = json_object_get(v, "env");
    const struct shim_spec *spec = name ? shim_catalog_find(&s->catalog, name) : NULL;
    struct shim_kernel *k = s->kernels[stream];
    char known[200], text[400];

    if (s->failed) {
        report_absent(s, stream, "this sandbox failed to resume safely and serves no kernels");
        return;
    }
    if (!spec) {
        shim_catalog_names(&s->catalog, known, sizeof(known));
        snprintf(text, sizeof(text), "no kernelspec named \"%.100s\"; there are: %s",
                 name ? name : "", known);
        report_absent(s, stream, text);
        return;
    }
    if (k && (shim_kernel_alive(k) || k->sm.state == SHIM_KERNEL_DRAINING)) {
        /* The template's own kernel is taken as it is. */
        if (k->spec != spec)
            log_warn(&s->host.log, "stream %u runs \"%s\", not started as \"%s\"", stream,
                     k->spec->name, name);
        shim_report_state(s, k);
        return;
    }
    if (!k)
        k = s->kernels[stream] = shim_kernel_new(&s->host, stream);
    k->spec = spec;
    shim_kernel_set_env(k, json_is_object(env) ? env : NULL, cwd ? shim_usable_cwd(s, cwd) : NULL);
    if (!shim_standby_take(s, k))
        shim_kernel_start(k, spec, NULL, NULL);
}

static void on_start(struct shim *s, uint32_t stream, struct slice payload)
{
    struct err e = { 0 };
    json_t *v = json_parse(payload, &e);

    if (json_is_object(v))
        start_kernel(s, stream, v);
    else
        report_absent(s, stream, e.msg[0] ? e.msg : "the start request is no JSON object");
    json_decref(v);
}

static void on_ctl(struct shim *s, uint32_t stream, struct slice payload)
{
    struct shim_kernel *k = s->kernels[stream];
    json_t *v = json_parse(payload, NULL);
    const char *name = json_string_value(json_object_get(v, "op"));
    uint64_t id = (uint64_t)json_integer_value(json_object_get(v, "id"));
    enum shim_op op;

    if (shim_op_parse(name, &op) < 0)
        shim_send_json(s, GL_KERNEL_DONE, stream,
                       json_pack("{s:I, s:b, s:s}", "id", (json_int_t)id, "ok", 0, "error",
                                 "unknown operation: interrupt, restart, stop and kill are known"));
    else if (!k)
        shim_send_json(s, GL_KERNEL_DONE, stream,
                       json_pack("{s:I, s:b, s:s}", "id", (json_int_t)id, "ok", 0, "error",
                                 "there is no kernel on this stream"));
    else
        shim_kernel_op(k, op, id);
    json_decref(v);
}

static void on_host_msg(struct shim *s, uint32_t stream, struct slice payload)
{
    struct shim_kernel *k = s->kernels[stream];
    struct jp_msg *m = NULL;
    struct err e = { 0 };

    if (!k || k->sm.state == SHIM_KERNEL_NEW) {
        gl_link_grant(s->link.gl, stream, payload.n);
        report_absent(s, stream, "there is no kernel on this stream");
        return;
    }
    if (k->sm.state == SHIM_KERNEL_EXITED) {
        gl_link_grant(s->link.gl, stream, payload.n);
        shim_report_state(s, k);
        return;
    }
    if (jp_body_decode(payload, &m, &e) < 0) {
        gl_link_grant(s->link.gl, stream, payload.n);
        log_warn(&k->log, "message from the host dropped: %s", e.msg);
        return;
    }
    shim_kernel_submit(k, m, payload.n);
}

static void end_now(void *ctx)
{
    struct shim *s = ctx;

    shim_link_flush(&s->link);
    shim_loop_stop(&s->host.loop);
}

static bool any_alive(const struct shim *s)
{
    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++)
        if (s->kernels[i] && s->kernels[i]->sm.state != SHIM_KERNEL_EXITED &&
            s->kernels[i]->sm.state != SHIM_KERNEL_NEW)
            return true;
    return false;
}

/* Stop all kernels, then the service; at the latest after grace_ms. */
static void begin_end(struct shim *s, uint64_t grace_ms)
{
    s->ending = true;
    shim_standby_end(s);
    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++)
        if (s->kernels[i])
            shim_kernel_op(s->kernels[i], grace_ms ? SHIM_OP_STOP : SHIM_OP_KILL, SHIM_FLOW_OP);
    if (grace_ms == 0 || !any_alive(s))
        end_now(s);
    else
        shim_timer_start(&s->host.loop, &s->end_timer, grace_ms, end_now, s);
}

static void on_shutdown(struct shim *s, struct slice payload)
{
    json_t *v = json_parse(payload, NULL);
    json_int_t grace = json_integer_value(json_object_get(v, "grace_ms"));

    json_decref(v);
    log_info(&s->host.log, "the host asks to shut down");
    begin_end(s, grace > 0 ? (uint64_t)grace : 0);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct shim *s = ctx;

    switch (type) {
    case GL_HELLO:
        on_hello(s, payload);
        break;
    case GL_PREPARE:
        shim_flow_begin(s, SHIM_FLOW_PREPARE, payload);
        break;
    case GL_RESUME:
        shim_flow_begin(s, SHIM_FLOW_RESUME, payload);
        break;
    case GL_ASSIGN:
        shim_flow_begin(s, SHIM_FLOW_ASSIGN, payload);
        break;
    case GL_SHUTDOWN:
        on_shutdown(s, payload);
        break;
    case GL_PING:
        send_text(s, GL_PONG, 0, payload);
        break;
    case GL_KERNEL_START:
        on_start(s, stream, payload);
        break;
    case GL_KERNEL_CTL:
        on_ctl(s, stream, payload);
        break;
    case GL_KERNEL_MSG:
        on_host_msg(s, stream, payload);
        break;
    default: /* GL_PONG; nothing else is legal from a host */
        break;
    }
}

static void on_writable(void *ctx, uint32_t stream)
{
    struct shim *s = ctx;
    struct shim_kernel *k = s->kernels[stream];

    if (!k)
        return;
    if (s->state_owed[stream])
        shim_report_state(s, k);
    shim_kernel_pump(k);
}

static void on_down(void *ctx, bool final)
{
    struct shim *s = ctx;

    shim_flow_abort(s);
    if (!final) {
        log_info(&s->host.log, "the host has disconnected; waiting for the next");
        return;
    }
    if (!s->ending)
        log_info(&s->host.log, "the link is closed: ending");
    begin_end(s, 0);
}

static const struct shim_link_ops link_ops = {
    .message = on_message,
    .writable = on_writable,
    .down = on_down,
};

/* ---- processes ---- */

static void on_signal(void *ctx, short revents)
{
    struct shim *s = ctx;
    struct signalfd_siginfo info;
    pid_t pid;
    int status;

    (void)revents;
    while (read(s->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
        if (info.ssi_signo != SIGCHLD && !s->host.vm)
            begin_end(s, GRACE_MS_LOCAL);
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (s->standby.kernel && s->standby.kernel->pid == pid) {
            shim_kernel_reaped(s->standby.kernel, status);
            continue;
        }
        for (uint32_t i = 1; i < GL_STREAMS_MAX; i++) {
            if (s->kernels[i] && s->kernels[i]->pid == pid) {
                shim_kernel_reaped(s->kernels[i], status);
                break;
            }
        }
    }
    if (s->ending && !any_alive(s))
        end_now(s);
}

static int watch_signals(struct shim *s, struct err *e)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &set, NULL);
    s->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s->signal_fd < 0)
        return err_errno(e, errno, "signalfd");
    shim_watch_start(&s->host.loop, &s->signal_watch, NULL, s->signal_fd, ZMQ_POLLIN, on_signal, s);
    return 0;
}

/* ---- life ---- */

static void before_wait(void *ctx)
{
    struct shim *s = ctx;

    shim_empty_graves(s);
    if (s->ending && !any_alive(s))
        end_now(s);
    shim_link_flush(&s->link);
}

static unsigned env_number(const char *name, unsigned def)
{
    const char *v = getenv(name);

    return v && *v ? (unsigned)strtoul(v, NULL, 10) : def;
}

static void set_up_host(struct shim *s, const struct shim_config *c)
{
    struct shim_host *h = &s->host;

    h->vm = c->vm;
    h->ops = &kernel_ops;
    h->ctx = s;
    snprintf(h->run_dir, sizeof(h->run_dir), "%s", c->run_dir);
    snprintf(h->hook_dir, sizeof(h->hook_dir), "%s", c->hook_dir ? c->hook_dir : "");
    h->start_timeout_ms =
        env_number("CELLVISOR_START_TIMEOUT_MS", c->vm ? START_MS_VM : START_MS_LOCAL);
    h->grace_ms = env_number("CELLVISOR_GRACE_MS", c->vm ? GRACE_MS_VM : GRACE_MS_LOCAL);
    shim_environ_init(&h->env);
    if (c->vm)
        init_kernel_environment(&h->env, &h->user);
    else
        shim_environ_inherit(&h->env);
    if (h->user.home[0])
        h->cwd = xstrdup(h->user.home);
    shim_oom_init(&h->oom, c->vm);
}

int shim_init(struct shim *s, const struct shim_config *c, struct err *e)
{
    char **dirs;
    int r;

    *s = (struct shim) { .signal_fd = -1 };
    list_init(&s->buried);
    s->assigned_env = json_object();
    /* On metal a start takes less than the memory is worth. */
    s->standby.enabled = c->vm || env_number("CELLVISOR_STANDBY", 0);
    s->standby.again_ms = env_number("CELLVISOR_STANDBY_MS", STANDBY_MS);
    s->link.fd = -1;
    shim_loop_init(&s->host.loop);
    s->host.loop.prepare = before_wait;
    s->host.loop.prepare_ctx = s;
    log_ctx_init(&s->host.log, NULL);
    if (strlen(c->run_dir) >= sizeof(s->host.run_dir))
        return err_set(e, -ENAMETOOLONG,
                       "--run-dir %s: at most %zu characters (unix socket paths are short)",
                       c->run_dir, sizeof(s->host.run_dir) - 1);
    if ((r = fs_mkdir_p(c->run_dir, 0711, e)) < 0)
        return r;
    s->host.zmq_ctx = zmq_ctx_new();
    if (!s->host.zmq_ctx)
        return err_set(e, -ENOMEM, "no ZMQ context");
    set_up_host(s, c);
    if (!c->vm)
        prctl(PR_SET_CHILD_SUBREAPER, 1);
    if ((r = watch_signals(s, e)) < 0)
        return r;
    dirs = shim_spec_dirs();
    shim_catalog_load(&s->catalog, (const char *const *)dirs, &s->host.log);
    shim_dirs_free(dirs);
    return shim_link_open(&s->link, &s->host.loop, c->link_fd, c->vm, &link_ops, s, e);
}

void shim_run(struct shim *s)
{
    shim_loop_run(&s->host.loop);
}

/* Local mode: whatever kernels have started is below us, because we are its subreaper. Ends when
 * all of it is reaped, so that our own end means that nothing is left. */
static void kill_everything(void)
{
    struct shim_proc *p = xcalloc(SHIM_PROCS_MAX, sizeof(*p));
    uint64_t end = shim_now_ms() + KILL_MS;
    pid_t pid = 0;

    while (pid >= 0 && shim_now_ms() < end) {
        size_t n = shim_procs_descendants(getpid(), p, SHIM_PROCS_MAX);

        for (size_t i = 0; i < n; i++)
            kill(p[i].pid, SIGKILL);
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        if (pid == 0)
            usleep(5000);
    }
    free(p);
}

void shim_fini(struct shim *s)
{
    shim_flow_abort(s);
    shim_timer_stop(&s->end_timer);
    shim_standby_end(s);
    shim_empty_graves(s);
    json_decref(s->assigned_env);
    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++)
        shim_kernel_free(s->kernels[i]);
    if (!s->host.vm)
        kill_everything();
    shim_link_close(&s->link);
    shim_catalog_fini(&s->catalog);
    if (s->signal_fd >= 0)
        shim_watch_stop(&s->host.loop, &s->signal_watch);
    closep(&s->signal_fd);
    if (s->host.zmq_ctx)
        zmq_ctx_term(s->host.zmq_ctx);
    shim_environ_fini(&s->host.env);
    free(s->host.cwd);
    shim_oom_fini(&s->host.oom);
    shim_loop_fini(&s->host.loop);
}
