/* cellvisor run: one kernel in a fresh sandbox inside this process, one execute request, its
 * output. */
#include "cli/cli.h"
#include "cli/opts.h"
#include "cli/run_output.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "kernelmgr/km.h"
#include "kernelmgr/km_execution.h"
#include "vm/host.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#define CODE_MAX (16u << 20)
#define STOP_LIMIT_MS 15000
#define PRINCIPAL "cli"

struct run_opts {
    char *code, *template_name, *spec, *save_images, *state, *accel, *qemu, *shim;
    uint64_t timeout;
    bool json, insecure_local, verbose;
};

struct run {
    struct run_opts o;
    struct opts parsed;
    char *state_dir, *shim;
    struct buf code;
    struct log_ctx log;
    struct loop *loop;
    struct metrics *metrics;
    struct vm_host *host;
    struct km_manager *km;
    struct loop_signal *sigint, *sigterm;
    struct loop_timer *stop_limit;
    struct km_op *op; /* pending start */
    struct km_execution *execution;
    char kernel_id[64], sandbox_id[40], template_used[80];
    enum vm_tier tier;
    struct vm_timings timings;
    struct run_output out;
    bool interrupted, stopping;
    int exit_code;
};

static const char *const accel_words[] = { "auto", "kvm", "tcg", NULL };
#define AT(f) offsetof(struct run_opts, f)
static const struct opt options[] = {
    { .flag = "code",
      .letter = 'c',
      .flags = OPT_FLAG_ONLY,
      .offset = AT(code),
      .arg = "CODE",
      .help = "the code itself, instead of FILE" },
    { .flag = "template",
      .letter = 't',
      .flags = OPT_FLAG_ONLY,
      .offset = AT(template_name),
      .arg = "NAME",
      .help = "template of the sandbox (python where it is built, else the first)" },
    { .flag = "spec",
      .flags = OPT_FLAG_ONLY,
      .offset = AT(spec),
      .arg = "NAME",
      .help = "kernelspec in the template (its default)" },
    { .flag = "timeout",
      .type = OPT_UINT,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(timeout),
      .def = "0",
      .arg = "SECONDS",
      .max = 7 * 86400,
      .help = "interrupt the code after so long; 0 = never" },
    { .flag = "save-images",
      .flags = OPT_FLAG_ONLY,
      .offset = AT(save_images),
      .arg = "DIR",
      .help = "write charts and other images there as image-NNN.png, .svg ..." },
    { .flag = "json",
      .type = OPT_BOOL,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(json),
      .def = "false",
      .help = "print the whole result as one JSON object instead of text" },
    { .flag = "insecure-local",
      .type = OPT_BOOL,
      .offset = AT(insecure_local),
      .def = "false",
      .help = "run as a plain process of this machine: NO ISOLATION" },
    { .flag = "accel",
      .offset = AT(accel),
      .arg = "WORD",
      .def = "auto",
      .choices = accel_words,
      .help = "acceleration" },
    { .flag = "state",
      .offset = AT(state),
      .arg = "DIR",
      .def = "~/.local/share/cellvisor",
      .help = "state directory" },
    { .flag = "qemu",
      .offset = AT(qemu),
      .arg = "FILE",
      .help = "QEMU binary (qemu-system-x86_64 from PATH)" },
    { .flag = "shim",
      .offset = AT(shim),
      .arg = "FILE",
      .help = "cellvisor-shim for --insecure-local (beside this program)" },
    { .flag = "verbose",
      .letter = 'v',
      .type = OPT_BOOL,
      .flags = OPT_FLAG_ONLY,
      .def = "false",
      .offset = AT(verbose),
      .help = "show log lines and start times on stderr" },
};
static const struct opt_command run_command = {
    .name = "run",
    .synopsis = "[OPTION ...] FILE | - | -c CODE",
    .summary =
        "Run code in a fresh sandbox and end it. Text appears while the code runs, tracebacks\n"
        "and stderr of the code on stderr.",
    .opts = options,
    .n_opts = sizeof(options) / sizeof(options[0]),
    .max_args = 1,
    .examples = "  cellvisor run -c 'print(6 * 7)'\n"
                "  cellvisor run --timeout 60 --save-images charts analysis.py\n"
                "  echo 'import sys; sys.version' | cellvisor run --json -\n",
    .exits = "  0    the code ended without an error\n"
             "  1    the code raised, or its kernel died\n"
             "  2    wrong option, argument or unreadable file\n"
             "  3    this machine cannot: template not built, QEMU missing, no memory ...\n"
             "  124  --timeout\n"
             "  130  interrupted by Ctrl-C\n",
};

/* ---- the end: kernels, machines, loop ---- */

static void on_host_closed(void *ctx)
{
    struct run *r = ctx;
    loop_stop(r->loop);
}

static void on_km_closed(void *ctx)
{
    struct run *r = ctx;
    vm_host_close(r->host, 0, on_host_closed, r);
}

static void on_stop_limit(void *ctx)
{
    struct run *r = ctx;
    fputs("cellvisor run: the sandbox did not stop in time\n", stderr);
    loop_stop(r->loop);
}

static void run_stop(struct run *r)
{
    if (r->stopping)
        return;
    r->stopping = true;
    loop_timer_start(r->stop_limit, STOP_LIMIT_MS, 0);
    if (r->km)
        km_manager_close(r->km, on_km_closed, r);
    else if (r->host)
        on_km_closed(r);
}

static void deferred_stop(void *ctx)
{
    run_stop(ctx);
}

/* ---- execution ---- */

static int exit_code_of(const struct run *r, const char *status)
{
    if (strcmp(status, "ok") == 0)
        return CLI_OK;
    if (strcmp(status, "timeout") == 0)
        return CLI_TIMEOUT;
    return r->interrupted ? CLI_INTERRUPTED : CLI_FAILED;
}

static void print_json(const struct run *r)
{
    struct buf b;
    buf_init(&b, (size_t)1 << 31);
    if (km_execution_write_json(r->execution, &b) < 0) {
        fputs("cellvisor run: result too large for memory\n", stderr);
    } else {
        printf("{\"sandbox\":{\"id\":\"%s\",\"template\":\"%s\",\"tier\":\"%s\",\"origin\":\"%s\","
               "\"start_ms\":%.1f},\"execution\":",
               r->sandbox_id, r->template_used, vm_tier_name(r->tier),
               r->timings.origin ? r->timings.origin : "", r->timings.total_ms);
        fwrite(buf_slice(&b).p, 1, buf_slice(&b).n, stdout);
        puts("}");
    }
    buf_fini(&b);
}

static void on_done(void *ctx, struct km_execution *x)
{
    struct run *r = ctx;
    const char *status = km_execution_status(x);
    r->exit_code = exit_code_of(r, status);
    run_output_payload(&r->out, x);
    if (run_output_images(&r->out, x) < 0)
        r->exit_code = cli_fail("run", CLI_ENVIRONMENT, &r->out.error);
    if (r->o.json)
        print_json(r);
    else if (strcmp(status, "timeout") == 0)
        fprintf(stderr, "cellvisor run: interrupted after %llu s (--timeout)\n",
                (unsigned long long)r->o.timeout);
    else if (strcmp(status, "dead") == 0)
        fputs("cellvisor run: the kernel died while it ran the code\n", stderr);
    loop_defer(r->loop, deferred_stop, r);
}

static void on_output(void *ctx, const struct jp_msg *m)
{
    struct run *r = ctx;
    run_output_message(&r->out, m);
}

static void remember_sandbox(struct run *r, const struct km_kernel *k)
{
    struct km_kernel_info info;
    km_kernel_info(k, &info);
    snprintf(r->kernel_id, sizeof(r->kernel_id), "%s", info.id);
    if (!info.vm)
        return;
    snprintf(r->sandbox_id, sizeof(r->sandbox_id), "%s", info.vm->id);
    snprintf(r->template_used, sizeof(r->template_used), "%s", info.vm->template_name);
    r->tier = info.vm->tier;
    r->timings = info.vm->timings;
    if (r->o.verbose)
        fprintf(stderr, "sandbox %s: template %s, isolation %s, started in %.0f ms (%s)\n",
                r->sandbox_id, r->template_used, vm_tier_name(r->tier), r->timings.total_ms,
                r->timings.origin ? r->timings.origin : "?");
}

static void on_started(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct run *r = ctx;
    r->op = NULL;
    if (!k) {
        r->exit_code = cli_fail("run", CLI_ENVIRONMENT, e);
        loop_defer(r->loop, deferred_stop, r);
        return;
    }
    remember_sandbox(r, k);
    struct km_execute_opts x;
    km_execute_opts_defaults(&x);
    x.code = (const char *)buf_slice(&r->code).p;
    x.code_len = buf_slice(&r->code).n;
    x.timeout_ms = r->o.timeout * 1000;
    static const struct km_execution_events events = { .output = on_output, .done = on_done };
    struct err xe = { 0 };
    if (km_execute(k, &x, &events, r, &r->execution, &xe) < 0) {
        r->exit_code = cli_fail("run", CLI_FAILED, &xe);
        loop_defer(r->loop, deferred_stop, r);
    }
}

static void on_interrupted(void *ctx, struct km_kernel *k, const struct err *e)
{
    (void)ctx;
    if (!k)
        fprintf(stderr, "cellvisor run: %s; Ctrl-C again ends the sandbox\n", e ? e->msg : "");
}

static void on_signal(void *ctx, int signum)
{
    struct run *r = ctx;
    struct km_op *op = NULL;
    (void)signum;
    struct km_kernel *k = r->km ? km_kernel_find(r->km, PRINCIPAL, r->kernel_id) : NULL;
    if (r->stopping) {
        loop_stop(r->loop);
    } else if (k && r->execution && !r->interrupted) {
        km_kernel_interrupt(k, on_interrupted, r, &op);
    } else {
        r->exit_code = CLI_INTERRUPTED;
        km_op_cancel(TAKE_PTR(r->op));
        run_stop(r);
    }
    r->interrupted = true;
}

/* ---- start ---- */

static int run_code(struct run *r, struct err *e)
{
    buf_init(&r->code, CODE_MAX);
    const char *file = r->parsed.n_args ? r->parsed.args[0] : NULL;
    if (!r->o.code == !file)
        return err_set(e, -EINVAL,
                       r->o.code ? "give either FILE or -c CODE, not both"
                                 : "nothing to run: give FILE, - or -c CODE");
    if (r->o.code)
        return buf_append_str(&r->code, r->o.code) < 0
                   ? err_set(e, -E2BIG, "code is larger than %u bytes", CODE_MAX)
                   : 0;
    size_t n = strlen(file);
    if (n > 6 && strcmp(file + n - 6, ".ipynb") == 0)
        return err_set(e, -EINVAL,
                       "%.200s is a notebook: run those with nbclient or papermill through "
                       "`cellvisor serve` (README)",
                       file);
    return fs_read_file(strcmp(file, "-") == 0 ? "/dev/stdin" : file, CODE_MAX, &r->code, e);
}

/* Templates that are built but cannot be used here have a reason: say it instead of "no
 * kernelspec". */
static int check_templates(const struct run *r, struct err *e)
{
    const struct vm_template_desc *t = NULL;
    size_t n = vm_templates(vm_host_service(r->host), &t);
    const char *wanted = r->o.template_name;
    for (size_t i = 0; i < n; i++)
        if (t[i].ready && (!wanted || strcmp(t[i].name, wanted) == 0))
            return 0;
    for (size_t i = 0; i < n; i++)
        if (!wanted || strcmp(t[i].name, wanted) == 0)
            return err_set(e, -ENOENT, "template %s cannot be used: %s", t[i].name,
                           t[i].why_not ? t[i].why_not : "unknown reason");
    return err_set(e, -ENOENT, "template %s is not built: run `cellvisor template build %s`",
                   wanted ? wanted : "python", wanted ? wanted : "python");
}

static int run_start(struct run *r, struct err *e)
{
    struct vm_host_config hc;
    struct km_config kc;
    vm_host_config_defaults(&hc);
    km_config_defaults(&kc);
    if (r->o.insecure_local) {
        r->shim = cli_shim_path(r->o.shim, e);
        if (!r->shim)
            return -ENOENT;
    }
    hc.state_dir = r->state_dir;
    hc.shim_path = r->shim;
    hc.qemu_path = r->o.qemu;
    vm_accel_parse(r->o.accel, &hc.accel);
    hc.insecure_local = hc.local_only = r->o.insecure_local;
    hc.template_only = r->o.template_name;
    hc.pool_parked = hc.pool_deferred = hc.pool_max = 0; /* one sandbox, started for this code */
    kc.default_template = r->o.template_name;
    kc.restart_limit = 0;
    kc.shutdown_grace_ms = 0; /* nothing in it is worth waiting for */
    int rc = vm_host_new(r->loop, &hc, r->metrics, &r->log, &r->host, e);
    if (!rc)
        rc = check_templates(r, e);
    if (rc)
        return rc;
    r->km = km_manager_new(r->loop, vm_host_service(r->host), &kc, r->metrics, &r->log);
    struct km_start s = { .principal = PRINCIPAL, .spec = r->o.spec };
    return km_kernel_start(r->km, &s, on_started, r, &r->op, e);
}

static int run_configure(struct run *r, int argc, char **argv, struct err *e)
{
    int rc = opts_parse(&run_command, argc, argv, &r->o, &r->parsed, e);
    if (rc || r->parsed.outcome != OPTS_RUN)
        return rc;
    if (r->o.insecure_local && r->o.template_name)
        return err_set(e, -EINVAL, "--template and --insecure-local exclude each other");
    log_configure(r->o.verbose ? LOG_LEVEL_INFO : LOG_LEVEL_ERROR, false);
    log_ctx_init(&r->log, NULL);
    rc = run_code(r, e);
    if (rc)
        return rc;
    r->state_dir = cli_state_dir(r->o.state, e);
    return r->state_dir ? 0 : e->code;
}

static void run_free(struct run *r)
{
    if (r->execution)
        km_execution_free(r->execution);
    if (r->km)
        km_manager_free(r->km);
    if (r->host)
        vm_host_free(r->host);
    loop_signal_free(r->sigint);
    loop_signal_free(r->sigterm);
    loop_timer_free(r->stop_limit);
    if (r->loop)
        loop_free(r->loop);
    if (r->metrics)
        metrics_free(r->metrics);
    buf_fini(&r->code);
    free(r->state_dir);
    free(r->shim);
    opts_free(&run_command, &r->o, &r->parsed);
}

static void run_in_loop(struct run *r)
{
    struct err e = { 0 };
    r->loop = loop_new();
    r->metrics = metrics_new();
    r->sigint = loop_signal_new(r->loop, SIGINT, on_signal, r);
    r->sigterm = loop_signal_new(r->loop, SIGTERM, on_signal, r);
    r->stop_limit = loop_timer_new(r->loop, on_stop_limit, r);
    r->out = (struct run_output) { .save_dir = r->o.save_images,
                                   .color = isatty(STDERR_FILENO),
                                   .quiet = r->o.json };
    if (run_start(r, &e) < 0) {
        r->exit_code = cli_fail("run", CLI_ENVIRONMENT, &e);
        if (!r->host)
            return;
        run_stop(r);
    }
    loop_run(r->loop);
}

int cmd_run(int argc, char **argv)
{
    struct run r = { .exit_code = CLI_FAILED };
    struct err e = { 0 };
    int rc = run_configure(&r, argc, argv, &e);
    if (rc)
        r.exit_code = cli_fail("run", CLI_USAGE, &e);
    else if (r.parsed.outcome == OPTS_HELP)
        opts_help(&run_command, stdout);
    else if (r.parsed.outcome == OPTS_MARKDOWN)
        opts_markdown(&run_command, stdout);
    else
        run_in_loop(&r);
    if (!rc && r.parsed.outcome != OPTS_RUN)
        r.exit_code = CLI_OK;
    int code = r.exit_code;
    run_free(&r);
    return code;
}
