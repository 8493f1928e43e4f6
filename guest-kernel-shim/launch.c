#include "guest-kernel-shim/launch.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define ENV_FILE_MAX (256u << 10)
#define EXPAND_MAX (1u << 20)

/* ---- users ---- */

static char *field(char **line)
{
    char *start = *line, *colon = start ? strchr(start, ':') : NULL;

    if (colon)
        *colon++ = '\0';
    *line = colon;
    return start;
}

int shim_user_find(const char *passwd_path, const char *name, struct shim_user *ret)
{
    CLEANUP(fclosep) FILE *f = fopen(passwd_path, "re");
    char line[1024];

    if (!f)
        return -ENOENT;
    while (fgets(line, sizeof(line), f)) {
        char *rest = line, *user, *uid, *gid, *home, *shell;

        line[strcspn(line, "\n")] = '\0';
        user = field(&rest);
        field(&rest);
        uid = field(&rest);
        gid = field(&rest);
        field(&rest);
        home = field(&rest);
        shell = field(&rest);
        if (!uid || !gid || !home || strcmp(user, name) != 0)
            continue;
        ret->uid = (uid_t)strtoul(uid, NULL, 10);
        ret->gid = (gid_t)strtoul(gid, NULL, 10);
        snprintf(ret->name, sizeof(ret->name), "%.63s", user);
        snprintf(ret->home, sizeof(ret->home), "%.255s", home);
        snprintf(ret->shell, sizeof(ret->shell), "%.127s", shell && *shell ? shell : "/bin/sh");
        return 0;
    }
    return -ENOENT;
}

/* ---- environment ---- */

void shim_environ_init(struct shim_environ *v)
{
    v->vars = xcalloc(1, sizeof(*v->vars));
    v->n = 0;
}

void shim_environ_fini(struct shim_environ *v)
{
    for (size_t i = 0; i < v->n; i++)
        free(v->vars[i]);
    free(v->vars);
    *v = (struct shim_environ) { 0 };
}

static char **find_var(const struct shim_environ *v, const char *key, size_t len)
{
    for (size_t i = 0; i < v->n; i++)
        if (strncmp(v->vars[i], key, len) == 0 && v->vars[i][len] == '=')
            return &v->vars[i];
    return NULL;
}

void shim_environ_set(struct shim_environ *v, const char *key, const char *value)
{
    char **slot = find_var(v, key, strlen(key));

    if (!slot) {
        v->vars = xrealloc(v->vars, (v->n + 2) * sizeof(*v->vars));
        slot = &v->vars[v->n++];
        v->vars[v->n] = NULL;
        *slot = NULL;
    }
    free(*slot);
    *slot = xasprintf("%s=%s", key, value);
}

void shim_environ_unset(struct shim_environ *v, const char *key)
{
    char **slot = find_var(v, key, strlen(key));

    if (!slot)
        return;
    free(*slot);
    *slot = v->vars[--v->n];
    v->vars[v->n] = NULL;
}

const char *shim_environ_get(const struct shim_environ *v, const char *key)
{
    char **slot = find_var(v, key, strlen(key));

    return slot ? *slot + strlen(key) + 1 : NULL;
}

void shim_environ_inherit(struct shim_environ *v)
{
    for (char **p = environ; p && *p; p++) {
        const char *eq = strchr(*p, '=');

        if (!eq || strncmp(*p, "CELLVISOR_", 10) == 0)
            continue;
        CLEANUP(freep) char *key = xstrndup(*p, (size_t)(eq - *p));
        shim_environ_set(v, key, eq + 1);
    }
}

static bool is_name_char(char c, bool first)
{
    return c == '_' || isalpha((unsigned char)c) || (!first && isdigit((unsigned char)c));
}

static void read_env_line(struct shim_environ *v, char *line)
{
    char *eq, *value;
    size_t n;

    line += strspn(line, " \t");
    if (strncmp(line, "export ", 7) == 0)
        line += 7;
    if (*line == '#' || !(eq = strchr(line, '=')) || eq == line)
        return;
    *eq = '\0';
    value = eq + 1;
    n = strlen(value);
    while (n && isspace((unsigned char)value[n - 1]))
        value[--n] = '\0';
    if (n >= 2 && (*value == '"' || *value == '\'') && value[n - 1] == *value) {
        value[n - 1] = '\0';
        value++;
    }
    for (const char *p = line; *p; p++)
        if (!is_name_char(*p, p == line))
            return;
    shim_environ_set(v, line, value);
}

void shim_environ_read_file(struct shim_environ *v, const char *path)
{
    struct buf text = { 0 };
    char *line, *next;

    if (fs_read_file(path, ENV_FILE_MAX, &text, NULL) == 0 && (line = buf_cstr(&text))) {
        for (; line; line = next) {
            next = strchr(line, '\n');
            if (next)
                *next++ = '\0';
            read_env_line(v, line);
        }
    }
    buf_fini(&text);
}

/* The name behind a '$': its length, 0 = no name; *ret_skip = characters it takes in the text. */
static size_t var_name(const char *p, const char **ret_name, size_t *ret_skip)
{
    bool braces = *p == '{';
    const char *name = p + braces;
    size_t n = 0;

    while (is_name_char(name[n], n == 0))
        n++;
    if (n == 0 || (braces && name[n] != '}'))
        return 0;
    *ret_name = name;
    *ret_skip = n + (braces ? 2 : 0);
    return n;
}

char *shim_environ_expand(const struct shim_environ *v, const char *text)
{
    struct buf out;
    char *ret;

    buf_init(&out, EXPAND_MAX);
    for (const char *p = text; *p; p++) {
        const char *name;
        size_t n, skip;
        char **slot;

        if (*p == '$' && p[1] == '$') {
            p++;
        } else if (*p == '$' && (n = var_name(p + 1, &name, &skip)) &&
                   (slot = find_var(v, name, n))) {
            buf_append_str(&out, *slot + n + 1);
            p += skip;
            continue;
        }
        buf_append_byte(&out, (uint8_t)*p);
    }
    ret = xstrdup(buf_cstr(&out));
    buf_fini(&out);
    return ret ? ret : xstrdup("");
}

/* ---- argv ---- */

char *shim_substitute(const char *text, const struct shim_subst *subst, size_t n)
{
    struct buf out;
    char *ret;

    buf_init(&out, EXPAND_MAX);
    while (*text) {
        size_t i, len = 0;

        for (i = 0; i < n && *text == '{'; i++) {
            len = strlen(subst[i].key);
            if (strncmp(text + 1, subst[i].key, len) == 0 && text[len + 1] == '}')
                break;
        }
        if (*text == '{' && i < n) {
            buf_append_str(&out, subst[i].value);
            text += len + 2;
        } else {
            buf_append_byte(&out, (uint8_t)*text++);
        }
    }
    ret = xstrdup(buf_cstr(&out));
    buf_fini(&out);
    return ret ? ret : xstrdup("");
}

int shim_find_program(const char *name, const char *path, char *ret, size_t size)
{
    if (strchr(name, '/'))
        return snprintf(ret, size, "%s", name) < (int)size && access(name, X_OK) == 0 ? 0 : -ENOENT;
    while (path && *path) {
        size_t n = strcspn(path, ":");
        struct stat st;

        if (n && snprintf(ret, size, "%.*s/%s", (int)n, path, name) < (int)size &&
            stat(ret, &st) == 0 && S_ISREG(st.st_mode) && access(ret, X_OK) == 0)
            return 0;
        path += n + (path[n] == ':');
    }
    return -ENOENT;
}

bool shim_argv_is_ipykernel(char *const *argv)
{
    for (; *argv; argv++)
        if (strstr(*argv, "ipykernel"))
            return true;
    return false;
}

char *shim_connection_json(const char *ip, const char *key, const char *kernel_name)
{
    json_t *v = json_pack("{s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:s, s:s}", "shell_port", 1,
                          "iopub_port", 2, "stdin_port", 3, "control_port", 4, "hb_port", 5, "ip",
                          ip, "transport", "ipc", "key", key, "signature_scheme", "hmac-sha256",
                          "kernel_name", kernel_name);
    char *text = v ? json_dumps(v, JSON_INDENT(2)) : NULL;

    json_decref(v);
    return text;
}

/* ---- process ---- */

struct child_failure {
    int code;
    char step[24];
};

/* Between fork and exec: only async-signal-safe calls. */
static void __attribute__((noreturn)) child_fail(int report, const char *step)
{
    struct child_failure f = { .code = errno };

    for (size_t i = 0; step[i] && i + 1 < sizeof(f.step); i++)
        f.step[i] = step[i];
    (void)!write(report, &f, sizeof(f));
    _exit(127);
}

static void child_write(const char *path, const char *text, size_t n)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd >= 0) {
        (void)!write(fd, text, n);
        close(fd);
    }
}

/* Move our descriptors to 0..n-1 by way of high numbers, so that none overwrites another. */
static void child_fds(const struct shim_child *c, int *report)
{
    int high[8];
    int base = 64;

    *report = fcntl(*report, F_DUPFD_CLOEXEC, base);
    for (int i = 0; i < c->n_fds; i++) {
        int from = c->fds[i];

        if (from < 0)
            from = open("/dev/null", O_RDWR | O_CLOEXEC);
        high[i] = fcntl(from, F_DUPFD_CLOEXEC, base);
    }
    for (int i = 0; i < c->n_fds; i++)
        if (high[i] < 0 || dup2(high[i], i) < 0)
            child_fail(*report, "descriptors");
    close_range((unsigned)c->n_fds, ~0u, CLOSE_RANGE_CLOEXEC);
}

static void child_identity(const struct shim_child *c, int report)
{
    if (!c->user || c->user->uid == 0)
        return;
    if (setgroups(1, &c->user->gid) < 0 || setgid(c->user->gid) < 0 || setuid(c->user->uid) < 0)
        child_fail(report, "user");
}

static void __attribute__((noreturn))
child_run(const struct shim_child *c, int report, pid_t parent, const char *oom, size_t oom_len)
{
    sigset_t none;

    sigemptyset(&none);
    for (int s = 1; s < 32; s++)
        signal(s, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    child_fds(c, &report);
    setsid();
    if (c->cgroup_procs)
        child_write(c->cgroup_procs, "0", 1);
    if (oom_len)
        child_write("/proc/self/oom_score_adj", oom, oom_len);
    for (size_t i = 0; i < c->n_limits; i++) {
        struct rlimit r = { c->limits[i].value, c->limits[i].value };
        setrlimit((__rlimit_resource_t)c->limits[i].resource, &r);
    }
    if (c->nice)
        setpriority(PRIO_PROCESS, 0, c->nice);
    child_identity(c, report);
    if (c->die_with_parent) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(127);
    }
    umask(022);
    if (c->cwd && chdir(c->cwd) < 0)
        child_fail(report, "working directory");
    execve(c->argv[0], c->argv, c->env);
    child_fail(report, "exec");
}

int shim_spawn(const struct shim_child *c, pid_t *ret, struct err *e)
{
    struct child_failure f = { 0 };
    char oom[16] = "";
    int report[2], oom_len = 0;
    pid_t parent = getpid(), pid;
    ssize_t n;

    if (c->oom_score_adj)
        oom_len = snprintf(oom, sizeof(oom), "%d", c->oom_score_adj);
    if (pipe2(report, O_CLOEXEC) < 0)
        return err_errno(e, errno, "pipe");
    pid = fork();
    if (pid == 0)
        child_run(c, report[1], parent, oom, (size_t)oom_len);
    close(report[1]);
    if (pid < 0) {
        int code = errno;
        close(report[0]);
        return err_errno(e, code, "fork");
    }
    do {
        n = read(report[0], &f, sizeof(f));
    } while (n < 0 && errno == EINTR);
    close(report[0]);
    if (n == (ssize_t)sizeof(f)) {
        waitpid(pid, NULL, 0);
        if (strcmp(f.step, "exec") == 0)
            return err_errno(e, f.code, "cannot run %s", c->argv[0]);
        if (strcmp(f.step, "working directory") == 0)
            return err_errno(e, f.code, "working directory %s", c->cwd);
        return err_errno(e, f.code, "starting %s: %s", c->argv[0], f.step);
    }
    *ret = pid;
    return 0;
}
