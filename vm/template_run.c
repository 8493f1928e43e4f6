/* Commands of a template build: output goes line by line to the log and to whoever follows the
 * progress, a cancelled build ends the command's whole process group, and failures are explained
 * by what the tool printed. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/proc.h"
#include "vm/template_priv.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LINE_MAX_BYTES 4096u
#define TERM_GRACE_MS 8000
#define MIRROR_UNREACHABLE "the package mirror cannot be reached"

struct run {
    struct tb *b;
    const struct tb_cmd *cmd;
    struct proc *proc;
    pid_t pid; /* also of its process group */
    struct loop_fd *watch;
    struct loop_timer *kill_timer;
    int pipe_fd;
    bool exited, eof, no_space;
    struct proc_exit exit;
    struct buf line;
    char cause[300];
    int cause_rank;
    char last[300]; /* last line that said something */
};

/* ---- explaining failures ---- */

/* The word after `prefix` in line, up to a character of stops. */
static bool word_after(const char *line, const char *prefix, const char *stops, char *ret,
                       size_t size)
{
    const char *at = strstr(line, prefix);
    if (!at)
        return false;
    at += strlen(prefix);
    size_t n = strcspn(at, stops);
    if (n == 0 || n >= size)
        return false;
    memcpy(ret, at, n);
    ret[n] = '\0';
    return true;
}

/* "apt[3]" for the entry that starts with this package name. */
static void recipe_key(const struct vm_recipe *r, const char *kind, const char *package, char *ret,
                       size_t size)
{
    char **list = !r                     ? NULL
                  : !strcmp(kind, "apt") ? r->apt
                  : !strcmp(kind, "pip") ? r->pip
                                         : r->npm;
    size_t n = strlen(package);
    ret[0] = '\0';
    for (size_t i = 0; list && list[i]; i++) {
        if (!strncmp(list[i], package, n) && !isalnum((unsigned char)list[i][n])) {
            snprintf(ret, size, " (recipe key %s[%zu])", kind, i);
            return;
        }
    }
}

struct pattern {
    const char *prefix, *stops;
    const char *kind;
    const char *before, *after; /* of the package's name */
};
static const struct pattern patterns[] = {
    { "E: Unable to locate package ", " \n", "apt", "apt: Debian has no package", "" },
    { "E: Couldn't find any package by glob '", "'", "apt", "apt: Debian has no package", "" },
    { "E: Package '", "'", "apt", "apt: package", " has no installation candidate" },
    { "' for '", "'", "apt", "apt: there is no such version of", "" },
    { "dpkg: error processing package ", " :\n", "apt", "package", " could not be installed" },
    { "No matching distribution found for ", " \n;<>=!~[", "pip", "pip: there is no package",
      " for this Python" },
    { "ERROR: Failed building wheel for ", " \n", "pip", "pip:", " could not be built" },
    { "ERROR: Invalid requirement: '", "'", "pip", "pip:", " is not a requirement" },
    { "404  '", "@'", "npm", "npm: there is no package", "" },
};

int tb_cause(const char *line, const struct vm_recipe *recipe, char *ret, size_t size)
{
    if (strstr(line, "No space left on device")) {
        snprintf(ret, size, "the disk is full");
        return 3;
    }
    for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++) {
        const struct pattern *p = &patterns[i];
        char word[128], key[64];
        if (!strcmp(p->prefix, "' for '") && strncmp(line, "E: Version '", 12) != 0)
            continue;
        if (!word_after(line, p->prefix, p->stops, word, sizeof(word)))
            continue;
        recipe_key(recipe, p->kind, word, key, sizeof(key));
        snprintf(ret, size, "%s \"%s\"%s%s", p->before, word, p->after, key);
        return 2;
    }
    if (strstr(line, "unable to pick chroot mode")) {
        snprintf(ret, size,
                 "mmdebstrap needs user namespaces here: install the Debian package uidmap, check "
                 "that /etc/subuid has a line for you, or build as root");
        return 2;
    }
    static const char *const unreachable[] = {
        "Temporary failure resolving", "Could not resolve", "Could not connect",
        "Unable to connect",           "Connection failed", "Network is unreachable"
    };
    for (size_t i = 0; i < sizeof(unreachable) / sizeof(*unreachable); i++) {
        if (!strstr(line, unreachable[i]))
            continue;
        snprintf(ret, size, MIRROR_UNREACHABLE ": %.200s", line);
        return 2;
    }
    if (strstr(line, "/finish.sh: ")) {
        snprintf(ret, size, "%.250s", line);
        return 2;
    }
    if (strstr(line, "update-alternatives: error: alternative path /usr/share/man"))
        return 0; /* harmless: man pages are left out on purpose */
    if (!strncmp(line, "E: ", 3) || !strncmp(line, "ERROR: ", 7) || strstr(line, ": error: ")) {
        snprintf(ret, size, "%.250s", line);
        return 1;
    }
    return 0;
}

/* ---- output ---- */

static void take_line(struct run *r)
{
    const char *line = buf_cstr(&r->line);
    if (line) {
        char cause[300];
        int rank = tb_cause(line, r->b->recipe, cause, sizeof(cause));
        if (rank > r->cause_rank) {
            r->cause_rank = rank;
            memcpy(r->cause, cause, sizeof(cause));
        }
        r->no_space = r->no_space || rank == 3;
        if (*line)
            snprintf(r->last, sizeof(r->last), "%s", line);
        tb_log(r->b, "%s", line);
        if (r->cmd->on_line)
            r->cmd->on_line(r->b, r->cmd->ctx, line);
    }
    buf_clear(&r->line);
}

static void take_bytes(struct run *r, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        /* Tools redraw with \r and \b; each state is a line to us. Too long ones are cut. */
        if (p[i] == '\n' || p[i] == '\r')
            take_line(r);
        else if (p[i] == '\t' || (unsigned char)p[i] >= 0x20)
            (void)buf_append_byte(&r->line, (uint8_t)p[i]);
    }
}

static void check_done(struct run *r)
{
    if (r->exited && r->eof)
        loop_stop(r->b->loop);
}

static void on_output(void *ctx, int events)
{
    struct run *r = ctx;
    char chunk[8192];
    (void)events;
    ssize_t n = read(r->pipe_fd, chunk, sizeof(chunk));
    if (n > 0) {
        take_bytes(r, chunk, (size_t)n);
        return;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (buf_slice(&r->line).n)
        take_line(r);
    r->eof = true;
    loop_fd_set(r->watch, 0);
    check_done(r);
}

static void on_exit_of(void *ctx, const struct proc_exit *x)
{
    struct run *r = ctx;
    r->exited = true;
    r->exit = *x;
    /* What is in the pipe is read; a leftover that keeps it open must not hold us up. */
    loop_timer_start(r->kill_timer, 1000, 0);
    check_done(r);
}

static void on_kill_timer(void *ctx)
{
    struct run *r = ctx;
    if (r->exited) {
        /* Something it started lives on and holds the pipe (and perhaps a lock). While a member
         * is alive, the group's number cannot be anybody else's. */
        (void)kill(-r->pid, SIGKILL);
        r->eof = true;
    } else {
        (void)proc_kill(r->proc, SIGKILL, true);
    }
    check_done(r);
}

static void on_cancel(struct tb *b);

static struct run *current; /* the loop runs one command at a time */

static void on_cancel(struct tb *b)
{
    (void)b;
    if (!current || current->exited)
        return;
    (void)proc_kill(current->proc, SIGTERM, true);
    loop_timer_start(current->kill_timer, TERM_GRACE_MS, 0);
}

/* ---- running ---- */

static int start(struct run *r, struct err *e)
{
    struct tb *b = r->b;
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0)
        return err_errno(e, errno, "pipe");
    r->pipe_fd = p[0];
    struct proc_fd fds[3] = { { .from = r->cmd->out_fd >= 0 ? r->cmd->out_fd : p[1], .to = 1 },
                              { .from = p[1], .to = 2 },
                              { .from = r->cmd->keep_fd, .to = 9 } };
    struct proc_spec spec = {
        .argv = r->cmd->argv,
        .env = r->cmd->env,
        .cwd = r->cmd->cwd,
        .fds = fds,
        .n_fds = r->cmd->keep_fd >= 0 ? 3 : 2,
        .new_group = true,
        .die_with_parent = true,
    };
    tb_log(b, "+ %s", r->cmd->argv[0]);
    int rc = proc_spawn(b->loop, &spec, on_exit_of, r, &r->proc, e);
    close(p[1]);
    if (rc < 0)
        return rc;
    r->pid = proc_pid(r->proc);
    r->kill_timer = loop_timer_new(b->loop, on_kill_timer, r);
    r->watch = loop_fd_new(b->loop, r->pipe_fd, on_output, r);
    loop_fd_set(r->watch, LOOP_READ);
    return 0;
}

static void finish(struct run *r)
{
    loop_fd_free(r->watch);
    loop_timer_free(r->kill_timer);
    proc_free(r->proc);
    closep(&r->pipe_fd);
    buf_fini(&r->line);
}

int tb_run(struct tb *b, const struct tb_cmd *cmd, char *cause, size_t cause_size, struct err *e)
{
    struct run r = { .b = b, .cmd = cmd, .pipe_fd = -1 };
    int rc = tb_check_cancelled(b, e);
    if (rc < 0)
        return rc;
    buf_init(&r.line, LINE_MAX_BYTES);
    rc = start(&r, e);
    if (rc == 0) {
        current = &r;
        b->on_cancel = on_cancel;
        loop_run(b->loop);
        b->on_cancel = NULL;
        current = NULL;
        if (b->cancelled)
            rc = tb_check_cancelled(b, e);
        else if (r.no_space && r.exit.code != 0)
            rc = err_set(e, -ENOSPC, "the disk is full");
        else
            rc = r.exit.code >= 0
                     ? r.exit.code
                     : err_set(e, -EIO, "%s was killed by signal %d", cmd->argv[0], r.exit.signal);
    }
    if (cause)
        snprintf(cause, cause_size, "%s", r.cause_rank ? r.cause : r.last);
    finish(&r);
    return rc;
}

int tb_run_ok(struct tb *b, const struct tb_cmd *cmd, const char *what, struct err *e)
{
    char cause[300] = "";
    struct err inner = { 0 };
    int r = tb_run(b, cmd, cause, sizeof(cause), &inner);
    if (r == 0)
        return 0;
    if (r == -EINTR)
        return err_set(e, r, "%s", inner.msg);
    if (r < 0)
        return err_set(e, r, "%s: %s", what, inner.msg);
    if (!cause[0])
        snprintf(cause, sizeof(cause), "%s failed with exit code %d", cmd->argv[0], r);
    bool away = !strncmp(cause, MIRROR_UNREACHABLE, sizeof(MIRROR_UNREACHABLE) - 1);
    return err_set(e, away ? -EHOSTUNREACH : -EIO, "%s: %s", what, cause);
}

int tb_run_text(struct tb *b, const char *const *argv, const char *const *env, size_t max,
                struct buf *ret, const char *what, struct err *e)
{
    CLEANUP(closep) int fd = memfd_create("output", MFD_CLOEXEC);
    if (fd < 0)
        return err_errno(e, errno, "memfd_create");
    struct tb_cmd cmd = { .argv = argv, .env = env, .keep_fd = -1, .out_fd = fd };
    int r = tb_run_ok(b, &cmd, what, e);
    if (r < 0)
        return r;
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return fs_read_file(path, max, ret, e);
}
