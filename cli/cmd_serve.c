/* cellvisor serve: builds the tower loop > vm_host > km_manager > gw_server from the options, runs
 * it, and takes it down in the opposite order when a signal asks for it. */
#include "cli/cli.h"
#include "cli/serve_config.h"
#include "common/cleanup.h"
#include "common/log.h"
#include "common/loop.h"
#include "common/mem.h"
#include "common/metrics.h"
#include "gateway/gateway.h"
#include "kernelmgr/km.h"
#include "vm/host.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define STOP_SLACK_MS 12000 /* beyond --shutdown-grace, before a stop is called failed */
#define N_SIGNALS 3

struct serve {
    struct serve_opts o;
    struct opts parsed;
    char *state_dir, *shim;
    struct serve_tokens tokens;
    struct log_ctx log;
    struct loop *loop;
    struct metrics *metrics;
    struct vm_host *host;
    struct km_manager *km;
    struct gw_server *gw;
    struct loop_signal *signals[N_SIGNALS];
    struct loop_timer *stop_deadline;
    const char *stop_stage; /* NULL: not stopping */
    int exit_code;
};

/* ---- stopping: gateway, then kernels, then machines ---- */

static void on_host_closed(void *ctx)
{
    struct serve *s = ctx;
    s->stop_stage = "done";
    loop_stop(s->loop);
}

static void on_km_closed(void *ctx)
{
    struct serve *s = ctx;
    s->stop_stage = "sandboxes";
    vm_host_close(s->host, 0, on_host_closed, s); /* only the pools are left: nothing to wait for */
}

static void on_gw_closed(void *ctx)
{
    struct serve *s = ctx;
    s->stop_stage = "kernels";
    km_manager_close(s->km, on_km_closed, s);
}

static void on_stop_deadline(void *ctx)
{
    struct serve *s = ctx;
    log_error(&s->log, "stop took too long, left behind: stage=%s", s->stop_stage);
    s->exit_code = CLI_FAILED;
    loop_stop(s->loop);
}

static void serve_stop(struct serve *s, const char *why)
{
    if (s->stop_stage)
        return;
    log_info(&s->log, "stopping: %s", why);
    s->stop_stage = "requests";
    loop_timer_start(s->stop_deadline, s->o.shutdown_grace * 1000 + STOP_SLACK_MS, 0);
    gw_server_close(s->gw, on_gw_closed, s);
}

static void on_shutdown_request(void *ctx)
{
    serve_stop(ctx, "POST /api/shutdown");
}

static void on_signal(void *ctx, int signum)
{
    struct serve *s = ctx;
    if (signum == SIGHUP) {
        struct err e = { 0 };
        if (vm_host_reload(s->host, &e) < 0)
            log_error(&s->log, "template store not read again: %s", e.msg);
        else
            log_info(&s->log, "template store read again");
        return;
    }
    if (s->stop_stage) { /* asked twice: now */
        log_warn(&s->log, "second signal, ending at once: stage=%s", s->stop_stage);
        s->exit_code = CLI_FAILED;
        loop_stop(s->loop);
        return;
    }
    serve_stop(s, signum == SIGINT ? "SIGINT" : "SIGTERM");
}

/* ---- building ---- */

static int start_host(struct serve *s, struct err *e)
{
    const struct serve_opts *o = &s->o;
    struct vm_host_config c;
    vm_host_config_defaults(&c);
    if (o->insecure_local) {
        s->shim = cli_shim_path(o->shim, e);
        if (!s->shim)
            return -ENOENT;
    }
    c.state_dir = s->state_dir;
    c.shim_path = s->shim;
    c.qemu_path = o->qemu;
    c.insecure_local = o->insecure_local;
    c.local_only = o->local_only;
    c.template_only = o->template_only;
    c.pool_parked = (unsigned)o->pool_parked;
    c.pool_deferred = (unsigned)o->pool_deferred;
    c.pool_max = (unsigned)o->pool_max;
    c.max_vms = (unsigned)o->max_vms;
    c.memory_mb = (unsigned)o->memory_mb;
    int r = vm_accel_parse(o->accel, &c.accel);
    if (r)
        return err_set(e, r, "accel \"%s\"", o->accel);
    return vm_host_new(s->loop, &c, s->metrics, &s->log, &s->host, e);
}

static int start_kernels(struct serve *s, struct err *e)
{
    const struct serve_opts *o = &s->o;
    struct km_config c;
    km_config_defaults(&c);
    c.default_spec = o->default_spec;
    c.default_template = o->default_template;
    c.max_kernels = (unsigned)o->max_kernels;
    c.max_kernels_per_principal = (unsigned)o->max_kernels_per_principal;
    c.log_bytes_max = (size_t)o->log_mb << 20;
    c.replay_bytes_max = (size_t)o->replay_mb << 20;
    c.replay_ttl_ms = o->replay_ttl * 1000;
    c.start_timeout_ms = o->start_timeout * 1000;
    c.shutdown_grace_ms = (unsigned)o->shutdown_grace * 1000;
    c.restart_limit = (unsigned)o->restart_limit;
    s->km = km_manager_new(s->loop, vm_host_service(s->host), &c, s->metrics, &s->log);
    return s->km ? 0 : err_set(e, -ENOMEM, "out of memory");
}

static int start_gateway(struct serve *s, struct err *e)
{
    const struct serve_opts *o = &s->o;
    struct gw_config c;
    gw_config_defaults(&c);
    CLEANUP(freep) struct gw_token *tokens = xcalloc(s->tokens.n + 1, sizeof(*tokens));
    for (size_t i = 0; i < s->tokens.n; i++)
        tokens[i] = (struct gw_token) { s->tokens.items[i].principal, s->tokens.items[i].token };
    c.ip = o->ip;
    c.port = (unsigned)o->port;
    c.port_retries = (unsigned)o->port_retries;
    c.base_url = o->base_url;
    c.tokens = tokens;
    c.n_tokens = s->tokens.n;
    c.no_auth = o->no_auth;
    c.allow_origins = (const char *const *)o->allow_origin;
    c.allow_credentials = o->allow_credentials;
    c.allow_hosts = (const char *const *)o->allow_host;
    c.tls_cert = o->tls_cert;
    c.tls_key = o->tls_key;
    c.max_body = (size_t)o->max_body_mb << 20;
    c.max_ws_message = (size_t)o->max_ws_message_mb << 20;
    c.ws_ping_s = (unsigned)o->ws_ping;
    c.ws_pong_timeout_s = (unsigned)o->ws_pong_timeout;
    c.ws_protocol = strcmp(o->ws_protocol, "legacy") == 0 ? "legacy" : NULL;
    c.proxy_no_binary = o->proxy_no_binary;
    c.metrics_no_auth = o->metrics_no_auth;
    c.web_dir = o->web_dir;
    int r = gw_server_new(s->loop, &c, s->km, s->metrics, &s->log, &s->gw, e);
    if (!r)
        gw_server_on_shutdown(s->gw, on_shutdown_request, s);
    return r;
}

static int start_signals(struct serve *s, struct err *e)
{
    static const int signums[N_SIGNALS] = { SIGTERM, SIGINT, SIGHUP };
    for (size_t i = 0; i < N_SIGNALS; i++) {
        s->signals[i] = loop_signal_new(s->loop, signums[i], on_signal, s);
        if (!s->signals[i])
            return err_set(e, -ENOMEM, "cannot watch signals");
    }
    s->stop_deadline = loop_timer_new(s->loop, on_stop_deadline, s);
    return 0;
}

/* A kernel costs a few descriptors; the usual soft limit of 1024 is a few hundred kernels. */
static void raise_descriptor_limit(const struct log_ctx *log)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) < 0 || l.rlim_cur == l.rlim_max)
        return;
    l.rlim_cur = l.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &l) < 0)
        log_warn(log, "descriptor limit stays at its soft value: %s", strerror(errno));
}

/* ---- what people see ---- */

static void print_kernels(const struct serve *s)
{
    const struct vm_template_desc *t = NULL;
    size_t n = vm_templates(vm_host_service(s->host), &t), ready = 0;
    for (size_t i = 0; i < n; i++) {
        if (t[i].ready) {
            ready++;
            printf("Template:    %s (isolation: %s%s)\n", t[i].name, vm_tier_name(t[i].tier),
                   t[i].tier == VM_TIER_LOCAL ? ", NONE: processes of this machine" : "");
        } else {
            printf("Template:    %s is not usable: %s\n", t[i].name,
                   t[i].why_not ? t[i].why_not : "unknown");
        }
    }
    if (!ready)
        puts("Template:    none is ready: no kernel can start. Build one with\n"
             "             `cellvisor template build python`, then send this process SIGHUP.");
}

static void print_banner(const struct serve *s)
{
    const char *url = gw_server_url(s->gw);
    printf("Cellvisor " CELLVISOR_VERSION " serves %s\n", url);
    print_kernels(s);
    if (s->tokens.n) {
        const char *token = s->tokens.generated ? s->tokens.items[0].token : "TOKEN";
        if (s->tokens.generated)
            printf("Token:       %s   (kept in %s)\n", token, s->tokens.path);
        else
            printf("Token:       as configured (%zu)\n", s->tokens.n);
        printf("JupyterLab:  jupyter lab --gateway-url=%s --GatewayClient.auth_token=%s\n", url,
               token);
    } else {
        printf("Token:       none needed (--no-auth)\n"
               "JupyterLab:  jupyter lab --gateway-url=%s\n",
               url);
    }
    puts("Stop with Ctrl-C.");
    fflush(stdout);
}

static void report_ready(const struct serve *s)
{
    if (!s->o.ready_fd)
        return;
    CLEANUP(freep)
    char *line =
        xasprintf("%s %s\n", gw_server_url(s->gw), s->tokens.n ? s->tokens.items[0].token : "-");
    ssize_t w = write((int)s->o.ready_fd, line, strlen(line));
    if (w < 0)
        log_warn(&s->log, "--ready-fd: %s", strerror(errno));
    close((int)s->o.ready_fd);
}

static void warn_unknown_env(const char *name, const char *nearest)
{
    if (nearest)
        log_warn(NULL, "environment variable %s is no option; did you mean CELLVISOR_%s?", name,
                 nearest);
    else
        log_warn(NULL, "environment variable %s is no option", name);
}

static void warn_exposure(const struct serve *s)
{
    bool loopback = strncmp(s->o.ip, "127.", 4) == 0 || strcmp(s->o.ip, "::1") == 0;
    if (!loopback && !s->o.tls_cert)
        log_warn(&s->log, "listening on %s without TLS: tokens travel in the clear", s->o.ip);
    if (s->o.insecure_local)
        log_warn(&s->log,
                 "insecure-local is on: local kernels are NOT isolated from this machine%s",
                 loopback ? "" : ", and others can reach the port");
}

/* ---- life ---- */

/* Exit code of a failed start: what the user wrote, or what the machine lacks. */
static int start_exit_code(int r)
{
    return r == -EINVAL ? CLI_USAGE : CLI_ENVIRONMENT;
}

static int serve_start(struct serve *s, struct err *e)
{
    s->loop = loop_new();
    s->metrics = metrics_new();
    if (!s->loop || !s->metrics)
        return err_set(e, -ENOMEM, "out of memory");
    int r = start_signals(s, e);
    if (!r)
        r = start_host(s, e);
    if (!r)
        r = start_kernels(s, e);
    return r ? r : start_gateway(s, e);
}

static void serve_free(struct serve *s)
{
    if (s->gw)
        gw_server_free(s->gw);
    if (s->km)
        km_manager_free(s->km);
    if (s->host)
        vm_host_free(s->host);
    for (size_t i = 0; i < N_SIGNALS; i++)
        loop_signal_free(s->signals[i]);
    loop_timer_free(s->stop_deadline);
    if (s->loop)
        loop_free(s->loop);
    if (s->metrics)
        metrics_free(s->metrics);
    serve_tokens_free(&s->tokens);
    free(s->state_dir);
    free(s->shim);
    opts_free(&serve_command, &s->o, &s->parsed);
}

/* A start that failed half way still has machines to end. */
static void serve_unwind(struct serve *s)
{
    if (!s->host)
        return;
    s->stop_stage = "start";
    loop_timer_start(s->stop_deadline, STOP_SLACK_MS, 0);
    if (s->km)
        km_manager_close(s->km, on_km_closed, s);
    else
        on_km_closed(s);
    loop_run(s->loop);
}

static int serve_configure(struct serve *s, int argc, char **argv, struct err *e)
{
    int r = opts_parse(&serve_command, argc, argv, &s->o, &s->parsed, e);
    if (r || s->parsed.outcome != OPTS_RUN)
        return r;
    r = serve_opts_check(&s->o, e);
    if (r)
        return r;
    enum log_level level = LOG_LEVEL_INFO;
    log_level_parse(s->o.log_level, &level);
    log_configure(level, s->o.log_json);
    log_ctx_init(&s->log, NULL);
    opts_each_unknown_env(&serve_command, warn_unknown_env);
    s->state_dir = cli_state_dir(s->o.state, e);
    if (!s->state_dir)
        return e->code ? e->code : -EIO;
    return serve_tokens_load(&s->o, s->state_dir, &s->tokens, e);
}

int cmd_serve(int argc, char **argv)
{
    struct serve s = { .exit_code = CLI_OK };
    struct err e = { 0 };
    umask(077);
    int r = serve_configure(&s, argc, argv, &e);
    if (r || s.parsed.outcome != OPTS_RUN) {
        if (r)
            s.exit_code = cli_fail("serve", start_exit_code(r == -ENOENT ? -EINVAL : r), &e);
        else if (s.parsed.outcome == OPTS_HELP)
            opts_help(&serve_command, stdout);
        else
            opts_markdown(&serve_command, stdout);
        serve_free(&s);
        return s.exit_code;
    }
    raise_descriptor_limit(&s.log);
    warn_exposure(&s);
    r = serve_start(&s, &e);
    if (r) {
        s.exit_code = cli_fail("serve", start_exit_code(r), &e);
        int code = s.exit_code;
        serve_unwind(&s);
        s.exit_code = code;
    } else {
        if (!s.o.quiet)
            print_banner(&s);
        report_ready(&s);
        loop_run(s.loop);
        log_info(&s.log, "stopped");
    }
    int code = s.exit_code;
    serve_free(&s);
    return code;
}
