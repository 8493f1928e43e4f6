/* cv-echo-kernel: a Jupyter kernel in one C file, for tests and benchmarks: starts in milliseconds
 * and does exactly what its code says. Single-threaded, but the control channel is served while
 * a command runs, so that interrupt_request and shutdown_request work at once.
 *
 *   cv-echo-kernel CONNECTION_FILE       serve (transport ipc or tcp)
 *   cv-echo-kernel --install DIR [NAME]  write DIR/kernels/NAME/kernel.json (NAME: echo) for
 *                                        JUPYTER_PATH=DIR; argv is this program
 *
 * Code: one command per line; the reply is that of the first failing line, else ok.
 *   echo TEXT        execute_result, text/plain TEXT
 *   print TEXT       stream stdout, TEXT and a line end
 *   warn TEXT        stream stderr
 *   lines N          N stream messages "line 0\n" ... (one message each)
 *   flood BYTES      stream messages of 1000 bytes, BYTES in all
 *   display BYTES    one display_data, image/png of BYTES characters
 *   raw FD TEXT      TEXT and a line end to descriptor FD, past the protocol
 *   sleep MS         ends early with KeyboardInterrupt on SIGINT or interrupt_request
 *   spin MS          the same, but deaf to both
 *   input PROMPT     input_request; the answer comes back as execute_result; without allow_stdin
 *                    an error StdinNotImplementedError
 *   error NAME VALUE error with traceback
 *   env NAME         execute_result, value of the environment variable ("" when unset)
 *   cwd              execute_result, working directory
 *   pid              execute_result
 *   spawn MS         a child process in the same group that sleeps
 *   exit N           process ends at once, without a reply
 *   abort, segv      dies by SIGABRT, SIGSEGV
 * Anything else:     an error NameError.
 * comm_open and comm_msg are answered by a comm_msg with the same data and buffers.
 * Environment: ECHO_START_DELAY_MS, ECHO_START_EXIT (exit code instead of starting). */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/json.h"
#include "common/mem.h"
#include "proto/jp_json.h"
#include "proto/jp_zmq.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define FRAMES_MAX 1024u
enum { SHELL, CONTROL, STDIN, IOPUB, HEARTBEAT, SOCKETS };

struct echo {
    void *ctx, *socket[SOCKETS];
    struct jp_signer *signer;
    char session[ID_UUID_LEN + 1];
    unsigned count;
    bool stop, interrupted, may_ask;
    /* the request under way, and who asked */
    const struct jp_msg *request;
    struct slice ids[JP_ZMQ_IDS_MAX];
    size_t n_ids;
};

/* One received message with the frames it came in. */
struct incoming {
    zmq_msg_t frames[FRAMES_MAX];
    struct slice slices[FRAMES_MAX];
    size_t n, n_ids;
    struct jp_msg *msg;
};

static volatile sig_atomic_t got_sigint;

static void on_sigint(int sig)
{
    (void)sig;
    got_sigint = 1;
}

static uint64_t wall_us(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

static uint64_t now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

/* ---- sending ---- */

static void send_frames(void *socket, const struct slice *f, size_t n)
{
    for (size_t i = 0; i < n; i++)
        while (zmq_send(socket, f[i].p, f[i].n, i + 1 < n ? ZMQ_SNDMORE : 0) < 0 &&
               zmq_errno() == EINTR)
            ;
}

/* content is JSON text; buffers come from `like` (or NULL). */
static void send_msg(struct echo *k, int to, const char *type, const char *content,
                     const struct jp_msg *like)
{
    enum jp_channel channel = to == IOPUB     ? JP_IOPUB
                              : to == CONTROL ? JP_CONTROL
                              : to == STDIN   ? JP_STDIN
                                              : JP_SHELL;
    struct slice parent = k->request ? k->request->parts.header : SLICE_NULL;
    struct slice frames[JP_ZMQ_IDS_MAX + 6];
    CLEANUP(freep) struct slice *all = NULL;
    CLEANUP(jp_msg_unrefp) struct jp_msg *m = NULL;
    size_t n = 0, n_buffers = like ? like->parts.n_buffers : 0;
    char sig[JP_SIG_LEN + 1];

    if (jp_msg_build(channel, type, k->session, parent, slice_str(content), wall_us(), &m) < 0)
        return;
    if (to == IOPUB)
        frames[n++] = slice_str(type); /* topic */
    else
        for (size_t i = 0; i < k->n_ids; i++)
            frames[n++] = k->ids[i];
    n += jp_zmq_encode(k->signer, m, sig, frames + n);
    all = xcalloc(n + n_buffers, sizeof(*all));
    for (size_t i = 0; i < n + n_buffers; i++)
        all[i] = i < n ? frames[i] : like->parts.buffers[i - n];
    send_frames(k->socket[to], all, n + n_buffers);
}

static void send_json(struct echo *k, int to, const char *type, json_t *v)
{
    CLEANUP(freep) char *text = json_dumps(v, JSON_COMPACT);

    json_decref(v);
    send_msg(k, to, type, text ? text : "{}", NULL);
}

static void send_status(struct echo *k, const char *state)
{
    send_json(k, IOPUB, "status", json_pack("{s:s}", "execution_state", state));
}

static void send_stream(struct echo *k, const char *name, const char *text)
{
    send_json(k, IOPUB, "stream", json_pack("{s:s, s:s}", "name", name, "text", text));
}

static void send_result(struct echo *k, const char *text)
{
    send_json(k, IOPUB, "execute_result",
              json_pack("{s:i, s:{s:s}, s:{}}", "execution_count", (int)k->count, "data",
                        "text/plain", text, "metadata"));
}

/* ---- receiving ---- */

static void incoming_fini(struct incoming *in)
{
    for (size_t i = 0; i < in->n; i++)
        zmq_msg_close(&in->frames[i]);
    jp_msg_unref(in->msg);
    free(in);
}
DEFINE_CLEANUP(struct incoming *, incoming_fini)

/* The next valid message of a socket; NULL: none now. */
static struct incoming *receive(struct echo *k, int from)
{
    static const enum jp_channel channels[] = { JP_SHELL, JP_CONTROL, JP_STDIN };

    for (;;) {
        struct incoming *in = xcalloc(1, sizeof(*in));
        struct err e = { 0 };
        bool more = true;

        while (more && in->n < FRAMES_MAX) {
            zmq_msg_init(&in->frames[in->n]);
            if (zmq_msg_recv(&in->frames[in->n], k->socket[from], ZMQ_DONTWAIT) < 0)
                break;
            more = zmq_msg_more(&in->frames[in->n]);
            in->slices[in->n] =
                slice_of(zmq_msg_data(&in->frames[in->n]), zmq_msg_size(&in->frames[in->n]));
            in->n++;
        }
        if (in->n == 0) {
            incoming_fini(in);
            return NULL;
        }
        if (jp_zmq_decode(k->signer, channels[from], in->slices, in->n, &in->n_ids, &in->msg, &e) ==
            0)
            return in;
        fprintf(stderr, "echo kernel: message dropped: %s\n", e.msg);
        incoming_fini(in);
    }
}

static void heartbeat(struct echo *k)
{
    char bytes[256];
    int n;

    while ((n = zmq_recv(k->socket[HEARTBEAT], bytes, sizeof(bytes), ZMQ_DONTWAIT)) >= 0)
        zmq_send(k->socket[HEARTBEAT], bytes, (size_t)(n < 256 ? n : 256), 0);
}

static void serve_control(struct echo *k);

/* Wait until something is on `from` (or only for time); control and heartbeat are served. */
static bool wait_for(struct echo *k, int from, uint64_t ms, bool interruptible)
{
    uint64_t end = now_ms() + ms;

    for (;;) {
        uint64_t now = now_ms();
        zmq_pollitem_t items[] = { { .socket = k->socket[CONTROL], .events = ZMQ_POLLIN },
                                   { .socket = k->socket[HEARTBEAT], .events = ZMQ_POLLIN },
                                   { .socket = from >= 0 ? k->socket[from] : NULL,
                                     .events = ZMQ_POLLIN } };

        if (got_sigint) {
            got_sigint = 0;
            k->interrupted = true;
        }
        if (k->stop || (interruptible && k->interrupted) || now >= end)
            return false;
        zmq_poll(items, from >= 0 ? 3 : 2, (long)(end - now < 20 ? end - now : 20));
        if (items[0].revents)
            serve_control(k);
        if (items[1].revents)
            heartbeat(k);
        if (from >= 0 && items[2].revents)
            return true;
    }
}

/* ---- commands ---- */

struct outcome { /* of a command that failed */
    const char *name;
    char value[256];
};

static void failed(struct outcome *o, const char *name, const char *value)
{
    o->name = name;
    snprintf(o->value, sizeof(o->value), "%s", value);
}

static void run_lines(struct echo *k, unsigned long n)
{
    char text[64];

    for (unsigned long i = 0; i < n; i++) {
        snprintf(text, sizeof(text), "line %lu\n", i);
        send_stream(k, "stdout", text);
    }
}

static void run_flood(struct echo *k, unsigned long bytes)
{
    char text[1001];

    while (bytes > 0) {
        unsigned long n = bytes < 1000 ? bytes : 1000;

        memset(text, 'x', n);
        text[n] = '\0';
        text[n - 1] = '\n';
        send_stream(k, "stdout", text);
        bytes -= n;
    }
}

static void run_display(struct echo *k, unsigned long bytes)
{
    CLEANUP(freep) char *png = xmalloc(bytes + 1);

    memset(png, 'A', bytes);
    png[bytes] = '\0';
    send_json(
        k, IOPUB, "display_data",
        json_pack("{s:{s:s}, s:{}, s:{}}", "data", "image/png", png, "metadata", "transient"));
}

static void run_input(struct echo *k, const char *prompt, struct outcome *o)
{
    CLEANUP(incoming_finip) struct incoming *in = NULL;
    struct slice v;
    char text[1024] = "";

    if (!k->may_ask) {
        failed(o, "StdinNotImplementedError", "input is not allowed for this request");
        return;
    }
    send_json(k, STDIN, "input_request", json_pack("{s:s, s:b}", "prompt", prompt, "password", 0));
    if (!wait_for(k, STDIN, 3600 * 1000, true)) {
        failed(o, "KeyboardInterrupt", "");
        return;
    }
    in = receive(k, STDIN);
    if (in && jp_json_find(in->msg->parts.content, "value", &v) == 0)
        jp_json_string(v, text, sizeof(text));
    send_result(k, text);
}

static void run_spawn(unsigned long ms)
{
    if (fork() == 0) {
        usleep((useconds_t)ms * 1000);
        _exit(0);
    }
}

static const char *word(const char *line, const char *name)
{
    size_t n = strlen(name);

    if (strncmp(line, name, n) != 0 || (line[n] && line[n] != ' '))
        return NULL;
    return line[n] ? line + n + 1 : "";
}

static bool run_output(struct echo *k, const char *line)
{
    const char *a;
    char text[4096];

    if ((a = word(line, "echo"))) {
        send_result(k, a);
    } else if ((a = word(line, "print"))) {
        snprintf(text, sizeof(text), "%s\n", a);
        send_stream(k, "stdout", text);
    } else if ((a = word(line, "warn"))) {
        snprintf(text, sizeof(text), "%s\n", a);
        send_stream(k, "stderr", text);
    } else if ((a = word(line, "lines"))) {
        run_lines(k, strtoul(a, NULL, 10));
    } else if ((a = word(line, "flood"))) {
        run_flood(k, strtoul(a, NULL, 10));
    } else if ((a = word(line, "display"))) {
        run_display(k, strtoul(a, NULL, 10));
    } else if ((a = word(line, "raw"))) {
        char *end;
        int fd = (int)strtol(a, &end, 10);
        dprintf(fd, "%s\n", *end ? end + 1 : "");
    } else if ((a = word(line, "env"))) {
        send_result(k, getenv(a) ? getenv(a) : "");
    } else if (word(line, "cwd")) {
        send_result(k, getcwd(text, sizeof(text)) ? text : "");
    } else if (word(line, "pid")) {
        snprintf(text, sizeof(text), "%d", (int)getpid());
        send_result(k, text);
    } else {
        return false;
    }
    return true;
}

static void run_line(struct echo *k, const char *line, struct outcome *o)
{
    const char *a;

    if (run_output(k, line))
        return;
    if ((a = word(line, "sleep"))) {
        wait_for(k, -1, strtoul(a, NULL, 10), true);
        if (k->interrupted)
            failed(o, "KeyboardInterrupt", "");
    } else if ((a = word(line, "spin"))) {
        wait_for(k, -1, strtoul(a, NULL, 10), false);
    } else if ((a = word(line, "input"))) {
        run_input(k, a, o);
    } else if ((a = word(line, "spawn"))) {
        run_spawn(strtoul(a, NULL, 10));
    } else if ((a = word(line, "exit"))) {
        _exit((int)strtol(a, NULL, 10));
    } else if (word(line, "abort")) {
        abort();
    } else if (word(line, "segv")) {
        signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would exit instead */
        raise(SIGSEGV);
    } else if ((a = word(line, "error"))) {
        failed(o, "EchoError", a);
    } else {
        failed(o, "NameError", line);
    }
}

/* ---- requests ---- */

static void execute(struct echo *k, const struct jp_msg *m)
{
    CLEANUP(freep) char *code = NULL;
    struct outcome o = { 0 };
    struct slice v, silent;
    bool quiet =
        jp_json_find(m->parts.content, "silent", &silent) == 0 && slice_eq_str(silent, "true");
    char *line, *next;

    if (jp_json_find(m->parts.content, "code", &v) < 0 ||
        jp_json_string_dup(v, 64u << 20, &code) < 0)
        code = xstrdup("");
    k->interrupted = false;
    k->may_ask = jp_json_find(m->parts.content, "allow_stdin", &v) == 0 && slice_eq_str(v, "true");
    if (!quiet) {
        k->count++;
        send_json(k, IOPUB, "execute_input",
                  json_pack("{s:s, s:i}", "code", code, "execution_count", (int)k->count));
    }
    for (line = code; line && !o.name && !k->stop; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        if (*line)
            run_line(k, line, &o);
    }
    if (!o.name) {
        send_json(k, SHELL, "execute_reply",
                  json_pack("{s:s, s:i, s:[], s:{}}", "status", "ok", "execution_count",
                            (int)k->count, "payload", "user_expressions"));
        return;
    }
    send_json(
        k, IOPUB, "error",
        json_pack("{s:s, s:s, s:[s]}", "ename", o.name, "evalue", o.value, "traceback", o.name));
    send_json(k, SHELL, "execute_reply",
              json_pack("{s:s, s:i, s:s, s:s, s:[s]}", "status", "error", "execution_count",
                        (int)k->count, "ename", o.name, "evalue", o.value, "traceback", o.name));
}

static void kernel_info(struct echo *k, int on)
{
    send_json(k, on, "kernel_info_reply",
              json_pack("{s:s, s:s, s:s, s:s, s:{s:s, s:s, s:s, s:s}, s:s, s:[]}", "status", "ok",
                        "protocol_version", "5.3", "implementation", "echo",
                        "implementation_version", "1.0", "language_info", "name", "echo", "version",
                        "1.0", "mimetype", "text/plain", "file_extension", ".txt", "banner",
                        "echo kernel", "help_links"));
}

static void answer(struct echo *k, int on, const struct jp_msg *m)
{
    const char *t = m->msg_type;

    if (strcmp(t, "execute_request") == 0 && on == SHELL) {
        execute(k, m);
    } else if (strcmp(t, "kernel_info_request") == 0) {
        kernel_info(k, on);
    } else if (strcmp(t, "shutdown_request") == 0) {
        struct slice v;
        bool restart =
            jp_json_find(m->parts.content, "restart", &v) == 0 && slice_eq_str(v, "true");

        send_json(k, on, "shutdown_reply",
                  json_pack("{s:s, s:b}", "status", "ok", "restart", restart));
        k->stop = true;
    } else if (strcmp(t, "interrupt_request") == 0) {
        k->interrupted = true;
        send_json(k, on, "interrupt_reply", json_pack("{s:s}", "status", "ok"));
    } else if (strcmp(t, "comm_info_request") == 0) {
        send_json(k, on, "comm_info_reply", json_pack("{s:s, s:{}}", "status", "ok", "comms"));
    } else if (strcmp(t, "complete_request") == 0) {
        send_json(k, on, "complete_reply",
                  json_pack("{s:s, s:[s], s:i, s:i, s:{}}", "status", "ok", "matches", "echo",
                            "cursor_start", 0, "cursor_end", 0, "metadata"));
    } else if (strcmp(t, "is_complete_request") == 0) {
        send_json(k, on, "is_complete_reply", json_pack("{s:s}", "status", "complete"));
    } else if (strcmp(t, "comm_open") == 0 || strcmp(t, "comm_msg") == 0) {
        CLEANUP(freep) char *content = slice_dup(m->parts.content);
        send_msg(k, IOPUB, "comm_msg", content, m);
    }
}

/* Serve what waits on shell or control. Requests may nest: control inside an execution. */
static void serve(struct echo *k, int on)
{
    struct echo saved = *k;
    struct incoming *in;

    while (!(on == SHELL && k->stop) && (in = receive(k, on))) {
        k->request = in->msg;
        k->n_ids = in->n_ids;
        for (size_t i = 0; i < in->n_ids; i++)
            k->ids[i] = in->slices[i];
        send_status(k, "busy");
        answer(k, on, in->msg);
        send_status(k, "idle");
        k->request = saved.request;
        k->n_ids = saved.n_ids;
        for (size_t i = 0; i < saved.n_ids; i++)
            k->ids[i] = saved.ids[i];
        incoming_fini(in);
        if (on == SHELL)
            return; /* look at control between two requests */
    }
}

static void serve_control(struct echo *k)
{
    serve(k, CONTROL);
}

/* ---- start ---- */

static int bind_all(struct echo *k, const struct json_obj *o, struct err *e)
{
    static const int types[] = { ZMQ_ROUTER, ZMQ_ROUTER, ZMQ_ROUTER, ZMQ_XPUB, ZMQ_REP };
    static const char *const keys[] = { "shell_port", "control_port", "stdin_port", "iopub_port",
                                        "hb_port" };
    const char *ip = "127.0.0.1", *transport = "tcp";
    int one = 1, linger = 1000;

    if (json_get_str(o, "ip", &ip, e) < 0 || json_get_str(o, "transport", &transport, e) < 0)
        return e->code;
    for (int i = 0; i < SOCKETS; i++) {
        uint64_t port = 0;
        char addr[512];

        if (json_get_u64(o, keys[i], 1, 65535, &port, e) < 0)
            return e->code;
        snprintf(addr, sizeof(addr), strcmp(transport, "ipc") == 0 ? "ipc://%s-%d" : "tcp://%s:%d",
                 ip, (int)port);
        k->socket[i] = zmq_socket(k->ctx, types[i]);
        zmq_setsockopt(k->socket[i], ZMQ_LINGER, &linger, sizeof(linger));
        if (types[i] == ZMQ_ROUTER)
            zmq_setsockopt(k->socket[i], ZMQ_ROUTER_HANDOVER, &one, sizeof(one));
        if (types[i] == ZMQ_XPUB) /* wait for a slow reader instead of dropping */
            zmq_setsockopt(k->socket[i], ZMQ_XPUB_NODROP, &one, sizeof(one));
        if (zmq_bind(k->socket[i], addr) < 0)
            return err_set(e, -EIO, "bind %s: %s", addr, zmq_strerror(zmq_errno()));
    }
    return 0;
}

static int load(struct echo *k, const char *path, struct err *e)
{
    json_t *v = json_parse_file(path, 1u << 20, e);
    const char *key = "";
    struct json_obj o;
    int r = v ? json_obj_of(v, "", &o, e) : e->code;

    if (r == 0)
        r = json_get_str(&o, "key", &key, e);
    if (r == 0) {
        k->signer = jp_signer_new(slice_str(key));
        k->ctx = zmq_ctx_new();
        id_uuid4(k->session);
        r = bind_all(k, &o, e);
    }
    json_decref(v);
    return r;
}

static void loop(struct echo *k)
{
    char drop[256];

    send_status(k, "starting");
    while (!k->stop) {
        zmq_pollitem_t items[SOCKETS];

        for (int i = 0; i < SOCKETS; i++)
            items[i] = (zmq_pollitem_t) { .socket = k->socket[i], .events = ZMQ_POLLIN };
        items[STDIN].events = 0;
        zmq_poll(items, SOCKETS, 1000);
        got_sigint = 0; /* idle: nothing to interrupt */
        if (items[CONTROL].revents)
            serve(k, CONTROL);
        if (items[SHELL].revents)
            serve(k, SHELL);
        if (items[HEARTBEAT].revents)
            heartbeat(k);
        while (items[IOPUB].revents &&
               zmq_recv(k->socket[IOPUB], drop, sizeof(drop), ZMQ_DONTWAIT) >= 0)
            ; /* subscriptions */
    }
}

static int install(const char *dir, const char *name)
{
    char exe[1024];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    CLEANUP(freep) char *folder = xasprintf("%s/kernels/%s", dir, name);
    CLEANUP(freep) char *file = fs_join(folder, "kernel.json");
    CLEANUP(freep) char *text = NULL;
    struct err e = { 0 };
    json_t *v;

    exe[n > 0 ? n : 0] = '\0';
    v = json_pack("{s:[s, s], s:s, s:s}", "argv", exe, "{connection_file}", "display_name", "Echo",
                  "language", "echo");
    text = json_dumps(v, JSON_INDENT(1));
    json_decref(v);
    if (fs_mkdir_p(folder, 0755, &e) < 0 || fs_write_atomic(file, slice_str(text), 0644, &e) < 0) {
        fprintf(stderr, "echo kernel: %s\n", e.msg);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *delay = getenv("ECHO_START_DELAY_MS"), *code = getenv("ECHO_START_EXIT");
    struct sigaction sa = { .sa_handler = on_sigint };
    struct echo k = { 0 };
    struct err e = { 0 };

    if (argc >= 3 && strcmp(argv[1], "--install") == 0)
        return install(argv[2], argc > 3 ? argv[3] : "echo");
    if (argc != 2) {
        fprintf(stderr, "usage: cv-echo-kernel CONNECTION_FILE | --install DIR [NAME]\n");
        return 2;
    }
    sigaction(SIGINT, &sa, NULL);
    signal(SIGCHLD, SIG_IGN);
    if (delay)
        usleep((useconds_t)strtoul(delay, NULL, 10) * 1000);
    if (code) {
        fprintf(stderr, "echo kernel: told not to start\n");
        return (int)strtol(code, NULL, 10);
    }
    if (load(&k, argv[1], &e) < 0) {
        fprintf(stderr, "echo kernel: %s\n", e.msg);
        return 1;
    }
    loop(&k);
    for (int i = 0; i < SOCKETS; i++)
        zmq_close(k.socket[i]);
    zmq_ctx_term(k.ctx);
    jp_signer_free(k.signer);
    return 0;
}
