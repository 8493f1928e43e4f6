/* The option table of `cellvisor serve`, checks across options, and tokens. */
#include "cli/serve_config.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#define TOKEN_FILE_MAX (1u << 20)
#define TOKEN_LEN_MAX 512
#define TOKEN_BYTES 24 /* of a generated token: 192 bits */
#define SECONDS_MAX (7 * 86400u)
#define PING_MAX 3600u /* seconds; more is a mistake: milliseconds (case-35) */

static const char *const accel_words[] = { "auto", "kvm", "tcg", NULL };
static const char *const ws_words[] = { "v1", "legacy", NULL };
static const char *const level_words[] = { "error", "warn", "info", "debug", NULL };

#define AT(f) offsetof(struct serve_opts, f)
#define GROUP(title)                                                                               \
    {                                                                                              \
        .help = title                                                                              \
    }
#define STR(flag_, f, arg_, def_, help_)                                                           \
    {                                                                                              \
        .flag = flag_, .type = OPT_STR, .offset = AT(f), .arg = arg_, .def = def_, .help = help_   \
    }
#define WORD(flag_, f, words, def_, help_)                                                         \
    {                                                                                              \
        .flag = flag_, .type = OPT_STR, .offset = AT(f), .arg = "WORD", .def = def_,               \
        .choices = words, .help = help_                                                            \
    }
#define UINT(flag_, f, arg_, def_, max_, help_)                                                    \
    {                                                                                              \
        .flag = flag_, .type = OPT_UINT, .offset = AT(f), .arg = arg_, .def = def_, .max = max_,   \
        .help = help_                                                                              \
    }
#define BOOL(flag_, f, help_)                                                                      \
    {                                                                                              \
        .flag = flag_, .type = OPT_BOOL, .offset = AT(f), .def = "false", .help = help_            \
    }
#define LIST(flag_, f, arg_, help_)                                                                \
    {                                                                                              \
        .flag = flag_, .type = OPT_LIST, .offset = AT(f), .arg = arg_, .help = help_               \
    }

static const struct opt options[] = {
    GROUP("Network"),
    STR("ip", ip, "ADDRESS", "127.0.0.1", "address to listen on"),
    UINT("port", port, "PORT", "8888", 65535, "port to listen on; 0 takes any free one"),
    UINT("port-retries", port_retries, "N", "0", 1000, "following ports to try when it is taken"),
    STR("base-url", base_url, "PATH", "/", "prefix of every route"),
    STR("tls-cert", tls_cert, "FILE", NULL, "PEM certificate chain: serve https and wss"),
    STR("tls-key", tls_key, "FILE", NULL, "PEM private key of --tls-cert"),
    LIST("allow-host", allow_host, "NAME",
         "Host names accepted besides localhost and IP addresses; * for any (repeatable)"),
    LIST("allow-origin", allow_origin, "ORIGIN",
         "origins of web pages that may call the API, as scheme://host:port, or * (repeatable)"),
    BOOL("allow-credentials", allow_credentials, "let those pages send cookies"),
    UINT("max-body", max_body_mb, "MIB", "16", 4096,
         "largest request body; more is answered with 413"),
    UINT("max-ws-message", max_ws_message_mb, "MIB", "128", 256,
         "largest websocket message; more closes with 1009"),
    UINT("ws-ping", ws_ping, "SECONDS", "25", PING_MAX, "interval of websocket pings; 0 = off"),
    UINT("ws-pong-timeout", ws_pong_timeout, "SECONDS", "75", SECONDS_MAX,
         "close a websocket that has not answered for so long"),
    WORD("ws-protocol", ws_protocol, ws_words, "v1", "newest websocket framing offered to clients"),
    BOOL("proxy-no-binary", proxy_no_binary,
         "never send binary frames on legacy websockets (old jupyter_server proxies)"),
    STR("web-dir", web_dir, "DIR", NULL, "static files to serve at the base URL"),

    GROUP("Access"),
    { .flag = "token",
      .type = OPT_LIST,
      .flags = OPT_SECRET | OPT_MAP,
      .offset = AT(token),
      .arg = "[PRINCIPAL:]TOKEN",
      .help =
          "token of a principal (repeatable; in the file a list, or an object principal: token). "
          "None given: STATE/token, made at the first start" },
    STR("token-file", token_file, "FILE", NULL, "one [PRINCIPAL:]TOKEN a line, # starts a comment"),
    BOOL("no-auth", no_auth, "no token needed; only on a loopback address"),
    BOOL("metrics-no-auth", metrics_no_auth, "let /metrics be read without a token"),

    GROUP("Kernels"),
    STR("default-template", default_template, "NAME", NULL,
        "template of the default kernelspec (python where it is built, else the first)"),
    STR("default-spec", default_spec, "NAME", NULL, "default kernelspec (that of the template)"),
    UINT("max-kernels", max_kernels, "N", "0", 100000,
         "running and starting kernels; 0 = no limit"),
    UINT("max-kernels-per-principal", max_kernels_per_principal, "N", "0", 100000,
         "the same for each principal"),
    UINT("log-memory", log_mb, "MIB", "64", 65536, "messages kept in memory for each kernel"),
    UINT("replay-memory", replay_mb, "MIB", "16", 65536,
         "messages kept for clients that are away, for each kernel"),
    UINT("replay-ttl", replay_ttl, "SECONDS", "600", SECONDS_MAX,
         "how long a client that left may come back and continue"),
    UINT("start-timeout", start_timeout, "SECONDS", "60", SECONDS_MAX,
         "a kernel that is not ready by then has failed"),
    UINT("shutdown-grace", shutdown_grace, "SECONDS", "3", 3600,
         "time a kernel gets to stop by itself"),
    UINT("restart-limit", restart_limit, "N", "5", 1000,
         "automatic restarts in a row of a kernel that dies; 0 = never"),

    GROUP("Sandboxes"),
    STR("state", state, "DIR", "~/.local/share/cellvisor",
        "state directory: templates, run directories, token"),
    WORD("accel", accel, accel_words, "auto",
         "acceleration: auto takes KVM only where a guest really boots"),
    STR("qemu", qemu, "FILE", NULL, "QEMU binary (qemu-system-x86_64 from PATH)"),
    STR("shim", shim, "FILE", NULL, "cellvisor-shim for local kernels (beside this program)"),
    STR("template-only", template_only, "NAME", NULL,
        "offer just this template (all that are built)"),
    UINT("pool-parked", pool_parked, "N", "2", 1000,
         "sandboxes kept ready for each template; grows with demand"),
    UINT("pool-deferred", pool_deferred, "N", "1", 1000,
         "VMM processes kept started with nothing loaded yet"),
    UINT("pool-max", pool_max, "N", "8", 1000, "most sandboxes a pool may hold"),
    UINT("max-vms", max_vms, "N", "0", 100000,
         "running and starting sandboxes of users; 0 = as memory allows"),
    UINT("memory", memory_mb, "MIB", "0", 1 << 24,
         "memory for all sandboxes; 0 = nine tenths of what is available at the start"),
    BOOL("insecure-local", insecure_local,
         "also offer kernels as plain processes of this machine: NO ISOLATION, for development"),
    BOOL("local-only", local_only, "offer no microVM at all (needs --insecure-local)"),

    GROUP("Process"),
    WORD("log-level", log_level, level_words, "info", "least important log line written to stderr"),
    BOOL("log-json", log_json, "log lines as JSON"),
    BOOL("quiet", quiet, "do not print the banner with URL and token"),
    { .flag = "ready-fd",
      .type = OPT_UINT,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(ready_fd),
      .arg = "N",
      .max = 1 << 20,
      .def = "0",
      .help = "write \"URL TOKEN\\n\" to this descriptor once requests are answered (0 = none)" },
};

const struct opt_command serve_command = {
    .name = "serve",
    .synopsis = "[OPTION ...]",
    .summary = "Serve Jupyter kernels, each in a microVM of its own, until SIGTERM or SIGINT.\n"
               "SIGHUP reads the template store again.",
    .opts = options,
    .n_opts = sizeof(options) / sizeof(options[0]),
    .has_config = true,
    .examples =
        "  cellvisor serve\n"
        "  cellvisor serve --port 9000 --base-url /lab/ --allow-origin https://lab.example.org\n"
        "  cellvisor serve --token alice:SECRET1 --token bob:SECRET2 --max-kernels-per-principal "
        "4\n"
        "  CELLVISOR_TOKEN=SECRET cellvisor serve --config gateway.json\n"
        "  cellvisor serve --insecure-local --local-only     (development, no isolation)\n",
    .exits = "  0   stopped by a signal or POST /api/shutdown\n"
             "  1   stopped, but something had to be left behind\n"
             "  2   wrong option, configuration file or token\n"
             "  3   this machine cannot: port taken, QEMU missing,\n"
             "      TLS file unreadable, KVM demanded but not working\n",
};

static bool is_loopback(const char *ip)
{
    return strncmp(ip, "127.", 4) == 0 || strcmp(ip, "::1") == 0 || strcmp(ip, "localhost") == 0;
}

static int check_network(const struct serve_opts *o, struct err *e)
{
    if (!o->tls_cert != !o->tls_key)
        return err_set(e, -EINVAL, "--tls-cert and --tls-key go together; %s is missing",
                       o->tls_cert ? "--tls-key" : "--tls-cert");
    if (o->ws_ping && o->ws_pong_timeout <= o->ws_ping)
        return err_set(e, -EINVAL,
                       "--ws-pong-timeout (%llu seconds) must be longer than --ws-ping (%llu "
                       "seconds)",
                       (unsigned long long)o->ws_pong_timeout, (unsigned long long)o->ws_ping);
    if (o->max_body_mb == 0 || o->max_ws_message_mb == 0)
        return err_set(e, -EINVAL, "--max-body and --max-ws-message must be at least 1");
    for (char **p = o->allow_credentials ? o->allow_origin : NULL; p && *p; p++)
        if (strcmp(*p, "*") == 0)
            return err_set(e, -EINVAL,
                           "--allow-credentials needs exact origins: browsers refuse it "
                           "together with --allow-origin *");
    return 0;
}

static int check_access(const struct serve_opts *o, struct err *e)
{
    if (o->no_auth && (o->token || o->token_file))
        return err_set(e, -EINVAL, "--no-auth and --token exclude each other");
    if (o->no_auth && !is_loopback(o->ip))
        return err_set(e, -EINVAL,
                       "--no-auth is only for loopback addresses, --ip is %.60s: use a token",
                       o->ip);
    return 0;
}

static int check_sandboxes(const struct serve_opts *o, struct err *e)
{
    if (o->log_mb == 0)
        return err_set(e, -EINVAL, "--log-memory must be at least 1");
    if (o->local_only && !o->insecure_local)
        return err_set(e, -EINVAL,
                       "--local-only offers only kernels without isolation: it needs "
                       "--insecure-local as well");
    if (o->local_only && o->template_only)
        return err_set(e, -EINVAL, "--local-only and --template-only exclude each other");
    if (o->pool_parked > o->pool_max)
        return err_set(e, -EINVAL, "--pool-parked (%llu) is more than --pool-max (%llu)",
                       (unsigned long long)o->pool_parked, (unsigned long long)o->pool_max);
    return 0;
}

int serve_opts_check(const struct serve_opts *o, struct err *e)
{
    int r = check_network(o, e);
    if (!r)
        r = check_access(o, e);
    if (!r)
        r = check_sandboxes(o, e);
    if (!r && o->ready_fd && (o->ready_fd < 3 || fcntl((int)o->ready_fd, F_GETFD) < 0))
        r = err_set(e, -EINVAL, "--ready-fd %llu is not an open descriptor from 3 on",
                    (unsigned long long)o->ready_fd);
    return r;
}

/* ---- tokens ---- */

static bool principal_ok(const char *s, size_t n)
{
    if (n == 0 || n > 64)
        return false;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)s[i]) && !strchr("._-@", s[i]))
            return false;
    return true;
}

/* The text itself is a secret: messages say where it stands, never what it is. */
static int token_add(struct serve_tokens *t, const char *text, const char *where, struct err *e)
{
    const char *colon = strchr(text, ':');
    const char *secret = colon ? colon + 1 : text;
    if (colon && !principal_ok(text, (size_t)(colon - text)))
        return err_set(e, -EINVAL,
                       "%s: the name before ':' must be 1 to 64 letters, digits or any of ._-@",
                       where);
    size_t n = strlen(secret);
    if (n == 0 || n > TOKEN_LEN_MAX)
        return err_set(e, -EINVAL, "%s: a token has 1 to %d characters", where, TOKEN_LEN_MAX);
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)secret[i]))
            return err_set(e, -EINVAL, "%s: a token is printable ASCII without spaces", where);
    for (size_t i = 0; i < t->n; i++)
        if (strcmp(t->items[i].token, secret) == 0)
            return err_set(e, -EINVAL, "%s: this token was given before (for \"%s\")", where,
                           t->items[i].principal);
    t->items = xrealloc(t->items, (t->n + 1) * sizeof(*t->items));
    t->items[t->n++] = (struct serve_token) {
        .principal = colon ? xstrndup(text, (size_t)(colon - text)) : xstrdup("default"),
        .token = xstrdup(secret),
    };
    return 0;
}

static int tokens_from_file(const char *path, struct serve_tokens *t, struct err *e)
{
    struct buf b;
    int r = fs_read_file(path, TOKEN_FILE_MAX, &b, e);
    char *text = r < 0 ? NULL : buf_cstr(&b);
    unsigned line = 0;
    for (char *save = NULL, *p = text ? strtok_r(text, "\n", &save) : NULL; p && !r;
         p = strtok_r(NULL, "\n", &save)) {
        line++;
        p += strspn(p, " \t\r");
        size_t n = strcspn(p, " \t\r");
        if (n == 0 || p[0] == '#')
            continue;
        p[n] = 0;
        char where[128];
        snprintf(where, sizeof(where), "token file %.80s, entry %u", path, line);
        r = token_add(t, p, where, e);
    }
    if (!r && t->n == 0)
        r = err_set(e, -EINVAL, "token file %.200s holds no token", path);
    buf_fini(&b);
    return r;
}

/* Two gateways that start at once must agree: the file is linked into place, never overwritten. */
static int token_generate(const char *path, struct err *e)
{
    char token[2 * TOKEN_BYTES + 2];
    id_token(token, TOKEN_BYTES);
    size_t n = strlen(token);
    token[n++] = '\n';
    CLEANUP(freep) char *tmp = xasprintf("%s.%ld", path, (long)getpid());
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_errno(e, errno, "cannot write %s", tmp);
    ssize_t w = write(fd, token, n);
    int r = w == (ssize_t)n ? 0 : err_errno(e, w < 0 ? errno : ENOSPC, "cannot write %s", tmp);
    if (fsync(fd) < 0 && !r)
        r = err_errno(e, errno, "cannot write %s", tmp);
    close(fd);
    if (!r && link(tmp, path) < 0 && errno != EEXIST)
        r = err_errno(e, errno, "cannot create %s", path);
    unlink(tmp);
    return r;
}

static int tokens_from_state(const char *state_dir, struct serve_tokens *t, struct err *e)
{
    t->path = fs_join(state_dir, "token");
    t->generated = true;
    struct stat st;
    if (stat(t->path, &st) < 0) {
        int r = errno == ENOENT ? token_generate(t->path, e)
                                : err_errno(e, errno, "cannot read %s", t->path);
        if (r)
            return r;
    } else if (st.st_mode & 077) {
        return err_set(e, -EPERM,
                       "%s can be read by others (mode %03o): chmod 600 it, or delete it for "
                       "a new token",
                       t->path, (unsigned)(st.st_mode & 0777));
    }
    return tokens_from_file(t->path, t, e);
}

int serve_tokens_load(const struct serve_opts *o, const char *state_dir, struct serve_tokens *ret,
                      struct err *e)
{
    *ret = (struct serve_tokens) { 0 };
    int r = 0;
    if (o->no_auth)
        return 0;
    for (size_t i = 0; o->token && o->token[i] && !r; i++) {
        char where[40];
        snprintf(where, sizeof(where), "token %zu", i + 1);
        r = token_add(ret, o->token[i], where, e);
    }
    if (!r && o->token_file)
        r = tokens_from_file(o->token_file, ret, e);
    if (!r && ret->n == 0)
        r = tokens_from_state(state_dir, ret, e);
    if (r)
        serve_tokens_free(ret);
    return r;
}

void serve_tokens_free(struct serve_tokens *t)
{
    for (size_t i = 0; i < t->n; i++) {
        explicit_bzero(t->items[i].token, strlen(t->items[i].token));
        free(t->items[i].token);
        free(t->items[i].principal);
    }
    free(t->items);
    free(t->path);
    *t = (struct serve_tokens) { 0 };
}
