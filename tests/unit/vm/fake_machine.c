#include "fake_machine.h"
#include "common/json.h"
#include "common/list.h"
#include "common/mem.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct fake_machine {
    struct vm_machine base; /* first */
    struct list_node link;  /* fake_world::machines */
    struct fake_world *w;
    enum fake_mode mode;
    const struct vm_machine_events *ev;
    void *ctx;
    bool local, killed, ended;
    char text[64];
    int pid, fd;
    struct loop_fd *watch;
    struct gl_link *gl;
    unsigned received[64];
};

static void flush(struct fake_machine *m)
{
    struct slice s;
    ssize_t n;

    while (m->fd >= 0 && (s = gl_link_output(m->gl)).n > 0 &&
           (n = send(m->fd, s.p, s.n, MSG_NOSIGNAL | MSG_DONTWAIT)) > 0)
        gl_link_consumed(m->gl, (size_t)n);
}

void fake_send(struct fake_machine *m, enum gl_type type, uint32_t stream, const char *text)
{
    struct slice s = slice_str(text);

    if (gl_link_send(m->gl, type, stream, &s, 1) == 0)
        flush(m);
}

void fake_write(struct fake_machine *m, const void *bytes, size_t n)
{
    if (send(m->fd, bytes, n, MSG_NOSIGNAL) < 0)
        perror("fake_write");
}

unsigned fake_received(const struct fake_machine *m, enum gl_type type)
{
    return m->received[type];
}

static void keep(json_t **slot, struct slice payload)
{
    json_decref(*slot);
    *slot = json_parse(payload, NULL);
}

static void close_link(struct fake_machine *m)
{
    loop_fd_free(m->watch);
    m->watch = NULL;
    if (m->fd >= 0)
        close(m->fd);
    m->fd = -1;
}

static void hello(struct fake_machine *m)
{
    const char *kernels = m->local || m->mode == FAKE_NO_KERNEL
                              ? ""
                              : "{\"stream\":1,\"spec\":\"python3\",\"state\":\"running\"}";
    char text[200];

    gl_link_set_phase(m->gl, GL_PHASE_IDLE);
    snprintf(text, sizeof(text), "{\"version\":%d,\"role\":\"guest\",\"kernels\":[%s]}",
             m->mode == FAKE_OLD_VERSION ? 0 : GL_VERSION, kernels);
    if (m->mode == FAKE_SILENT || (m->mode == FAKE_DEAF_ONCE && m->received[GL_HELLO] == 1))
        return;
    if (m->mode == FAKE_SILENT_ONCE) {
        m->w->mode = FAKE_OK;
        return;
    }
    fake_send(m, GL_HELLO, 0, text);
    if (m->mode == FAKE_TWO_HELLOS)
        fake_send(m, GL_HELLO, 0, text);
    if (m->mode == FAKE_ASSIGNED_EARLY)
        fake_send(m, GL_ASSIGNED, 0, "{\"ok\":true}");
    if (m->mode == FAKE_GARBAGE)
        fake_write(m, "\xff\xff\xff\xff not a frame at all", 24);
    if (m->mode == FAKE_LINK_CLOSES)
        close_link(m);
}

static void resume(struct fake_machine *m, struct slice payload)
{
    m->w->resumes++;
    keep(&m->w->resume, payload);
    if (m->mode == FAKE_RESUME_REFUSED)
        fake_send(m, GL_RESUMED, 0, "{\"ok\":false,\"error\":\"entropy: not permitted\"}");
    else if (m->mode == FAKE_RESUME_UNPROVEN)
        fake_send(m, GL_RESUMED, 0, "{\"ok\":true}");
    else if (m->mode != FAKE_RESUME_HANGS)
        fake_send(m, GL_RESUMED, 0,
                  "{\"ok\":true,\"us\":{\"entropy\":100,\"clock\":50,\"hooks\":2000}}");
}

static void assign(struct fake_machine *m, struct slice payload)
{
    m->w->assigns++;
    keep(&m->w->assign, payload);
    if (m->mode == FAKE_ASSIGN_REFUSED) {
        fake_send(m, GL_ASSIGNED, 0, "{\"ok\":false,\"error\":\"cwd: no such folder\"}");
        return;
    }
    fake_send(m, GL_ASSIGNED, 0, "{\"ok\":true}");
    gl_link_set_phase(m->gl, GL_PHASE_RUNNING);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct fake_machine *m = ctx;

    (void)stream;
    m->received[type]++;
    if (type == GL_HELLO) {
        hello(m);
    } else if (type == GL_PREPARE) {
        m->w->prepares++;
        keep(&m->w->prepare, payload);
        fake_send(m, GL_PREPARED, 0,
                  "{\"ok\":true,\"ms\":1,\"info\":{\"implementation\":\"fake\"}}");
    } else if (type == GL_RESUME) {
        resume(m, payload);
    } else if (type == GL_ASSIGN) {
        assign(m, payload);
    } else if (type == GL_SHUTDOWN) {
        m->w->shutdowns++;
        fake_die(m, "powered off");
    }
}

static const struct gl_link_ops link_ops = { on_message, NULL, NULL };

static void on_io(void *ctx, int events)
{
    struct fake_machine *m = ctx;
    char chunk[65536];
    ssize_t n = recv(m->fd, chunk, sizeof(chunk), MSG_DONTWAIT);

    (void)events;
    if (n > 0 && gl_link_feed(m->gl, slice_of(chunk, (size_t)n), NULL) == 0)
        flush(m);
    else if (n == 0)
        close_link(m);
}

static void on_end(void *ctx)
{
    struct fake_machine *m = ctx;
    struct vm_exit x = { .reason = m->killed ? VM_EXIT_RELEASED : VM_EXIT_VMM,
                         .code = -1,
                         .signal = 9 };

    if (m->ended)
        return;
    m->ended = true;
    m->w->alive--;
    list_remove(&m->link);
    close_link(m);
    snprintf(x.text, sizeof(x.text), "%s", m->killed ? "ended by the gateway" : m->text);
    m->ev->exited(m->ctx, &x);
}

void fake_die(struct fake_machine *m, const char *text)
{
    snprintf(m->text, sizeof(m->text), "%s", text);
    loop_defer(m->w->loop, on_end, m);
}

static void on_spawned(void *ctx)
{
    struct fake_machine *m = ctx;

    if (m->mode == FAKE_DIES_SPAWNING)
        fake_die(m, "died while spawning");
    else if (m->mode != FAKE_NEVER_SPAWNED)
        m->ev->spawned(m->ctx);
}

static int spawn(struct vm_backend *b, const struct vm_launch *launch, const struct log_ctx *log,
                 const struct vm_machine_events *ev, void *ctx, struct vm_machine **ret,
                 struct err *e)
{
    struct fake_world *w = (struct fake_world *)b;
    struct fake_machine *m;

    (void)log;
    if (w->mode == FAKE_SPAWN_FAILS)
        return err_set(e, -ENOENT, "there is no fake machine");
    m = xnew(struct fake_machine);
    m->base.ops = b->ops;
    m->w = w;
    m->mode = w->mode;
    m->ev = ev;
    m->ctx = ctx;
    m->local = !launch->tmpl;
    m->fd = -1;
    m->pid = ++w->next_pid;
    list_push_back(&w->machines, &m->link);
    w->spawned++;
    if (++w->alive > w->max_alive)
        w->max_alive = w->alive;
    loop_defer(w->loop, on_spawned, m);
    *ret = &m->base;
    return 0;
}

static void on_loaded(void *ctx)
{
    static const struct gl_limits limits = { 1u << 20, 1u << 20 };
    struct fake_machine *m = ctx;
    int pair[2];

    if (m->mode == FAKE_DIES_LOADING) {
        fake_die(m, "load of migration failed");
        return;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        return;
    m->fd = pair[1];
    m->gl = gl_link_new(GL_GUEST, &limits, &link_ops, m);
    m->watch = loop_fd_new(m->w->loop, m->fd, on_io, m);
    loop_fd_set(m->watch, LOOP_READ);
    m->ev->running(m->ctx, pair[0]);
}

static void load(struct vm_machine *base)
{
    struct fake_machine *m = (struct fake_machine *)base;

    loop_defer(m->w->loop, on_loaded, m);
}

static int get_pid(const struct vm_machine *base)
{
    return ((const struct fake_machine *)base)->pid;
}

static void background(struct vm_machine *base, bool on)
{
    struct fake_machine *m = (struct fake_machine *)base;

    m->w->background += on;
}

static void kill_machine(struct vm_machine *base)
{
    struct fake_machine *m = (struct fake_machine *)base;

    m->killed = true;
    loop_cancel_deferred(m->w->loop, m);
    loop_defer(m->w->loop, on_end, m);
}

static void free_machine(struct vm_machine *base)
{
    struct fake_machine *m = (struct fake_machine *)base;

    loop_cancel_deferred(m->w->loop, m);
    if (!m->ended) {
        m->w->alive--;
        list_remove(&m->link);
    }
    close_link(m);
    gl_link_free(m->gl);
    free(m);
}

static void close_backend(struct vm_backend *b)
{
    (void)b;
}

static const struct vm_backend_ops ops = { "fake",     spawn,        load,         get_pid,
                                           background, kill_machine, free_machine, close_backend };

void fake_world_init(struct fake_world *w, struct loop *l)
{
    memset(w, 0, sizeof(*w));
    w->base.ops = &ops;
    w->loop = l;
    w->next_pid = 1000;
    list_init(&w->machines);
}

void fake_world_fini(struct fake_world *w)
{
    json_decref(w->resume);
    json_decref(w->assign);
    json_decref(w->prepare);
    w->resume = w->assign = w->prepare = NULL;
}

struct fake_machine *fake_first(struct fake_world *w)
{
    struct list_node *n = list_first(&w->machines);

    return n ? list_entry(n, struct fake_machine, link) : NULL;
}
