/* PREPARE, RESUME and ASSIGN: commands of several steps, each ending in exactly one answer.
 *
 * PREPARE   start the kernel as stream 1, run preload and warmup, try the hook, collect garbage.
 * RESUME    fail closed, in the order of microvm.md section 5: entropy, clock, names, then every
 *           running kernel is reseeded through its hook (or restarted, when it has none), then
 *           warmup. A failed step ends the service of this VM.
 * ASSIGN    clock, host name, environment and folder of the user; the phase becomes RUNNING. */
#include "common/cleanup.h"
#include "common/id.h"
#include "common/json.h"
#include "common/mem.h"
#include "guest-kernel-shim/guest.h"
#include "guest-kernel-shim/shim.h"
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define PREPARE_STREAM 1
#define PREPARE_MS 600000u
#define RESUME_MS 60000u
#define CLOCK_MIN_US UINT64_C(1500000000000000) /* 2017: anything before is a mistake */

static void flow_end(struct shim *s);

/* ---- answers ---- */

/* The first failure counts. Of a long one (a traceback) the end is what tells. */
static void flow_fail(struct shim *s, const char *error)
{
    size_t n = strlen(error), max = sizeof(s->flow.error) - 64;

    if (!s->flow.error[0])
        snprintf(s->flow.error, sizeof(s->flow.error), "%s: %s%s", s->flow.step,
                 n > max ? "..." : "", n > max ? error + n - max : error);
}

static void answer_prepare(struct shim *s, json_t *v)
{
    struct shim_kernel *k = s->kernels[PREPARE_STREAM];

    if (s->flow.error[0])
        return;
    s->prepared = true;
    json_object_set_new(v, "ms",
                        json_integer((json_int_t)(shim_now_us() - s->flow.begin_us) / 1000));
    json_object_set_new(v, "info", k && k->info ? json_loads(k->info, 0, NULL) : json_object());
}

static void answer_resume(struct shim *s, json_t *v)
{
    struct shim_flow *f = &s->flow;

    if (f->error[0]) {
        s->failed = true;
        return;
    }
    json_object_set_new(v, "us",
                        json_pack("{s:I, s:I, s:I, s:I}", "entropy", (json_int_t)f->entropy_us,
                                  "clock", (json_int_t)f->clock_us, "hooks",
                                  (json_int_t)f->hooks_us, "warmup", (json_int_t)f->warmup_us));
}

static void after_assign(struct shim *s)
{
    if (s->flow.error[0])
        return;
    s->assigned = true;
    gl_link_set_phase(s->link.gl, GL_PHASE_RUNNING);
    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++)
        if (s->kernels[i] && s->kernels[i]->sm.state != SHIM_KERNEL_NEW)
            shim_report_state(s, s->kernels[i]);
}

static void flow_end(struct shim *s)
{
    static const enum gl_type answers[] = { [SHIM_FLOW_PREPARE] = GL_PREPARED,
                                            [SHIM_FLOW_RESUME] = GL_RESUMED,
                                            [SHIM_FLOW_ASSIGN] = GL_ASSIGNED };
    struct shim_flow *f = &s->flow;
    enum shim_flow_kind kind = f->kind;
    json_t *v = json_object();

    shim_timer_stop(&f->timer);
    json_object_set_new(v, "ok", json_boolean(!f->error[0]));
    if (f->error[0]) {
        log_error(&s->host.log, "%s failed: %s", gl_type_name(answers[kind]), f->error);
        json_object_set_new(v, "error", shim_json_text(f->error));
    }
    if (kind == SHIM_FLOW_PREPARE)
        answer_prepare(s, v);
    else if (kind == SHIM_FLOW_RESUME)
        answer_resume(s, v);
    if (shim_may_send(s))
        shim_send_json(s, answers[kind], 0, v);
    else
        json_decref(v);
    if (kind == SHIM_FLOW_ASSIGN)
        after_assign(s);
    json_decref(f->args);
    f->args = NULL;
    f->kind = SHIM_FLOW_NONE;
}

static void on_flow_timeout(void *ctx)
{
    struct shim *s = ctx;

    if (s->flow.kind == SHIM_FLOW_PREPARE && strcmp(s->flow.step, "standby") == 0) {
        shim_bury(s, s->standby.kernel);
        s->standby.kernel = NULL;
        shim_flow_standby(s, "it took too long to start");
        return;
    }
    flow_fail(s, "took too long");
    flow_end(s);
}

void shim_flow_abort(struct shim *s)
{
    struct shim_flow *f = &s->flow;

    if (f->kind == SHIM_FLOW_NONE)
        return;
    /* A half resumed guest must not be served by whoever connects next. */
    if (f->kind == SHIM_FLOW_RESUME)
        s->failed = true;
    shim_timer_stop(&f->timer);
    json_decref(f->args);
    f->args = NULL;
    f->kind = SHIM_FLOW_NONE;
}

/* ---- PREPARE ---- */

static const char *flow_str(const struct shim *s, const char *key)
{
    return json_string_value(json_object_get(s->flow.args, key));
}

static void took(struct shim *s, const char *what)
{
    uint64_t now = shim_now_us();

    shim_tell(s, LOG_LEVEL_INFO, "%s in %" PRIu64 " ms", what, (now - s->flow.mark_us) / 1000);
    s->flow.mark_us = now;
}

/* The standby is a convenience: PREPARE succeeds without it. */
void shim_flow_standby(struct shim *s, const char *error)
{
    if (s->flow.kind != SHIM_FLOW_PREPARE || strcmp(s->flow.step, "standby") != 0)
        return;
    if (error)
        shim_tell(s, LOG_LEVEL_WARN, "no standby kernel for restarts: %s", error);
    else
        took(s, "standby kernel started");
    flow_end(s);
}

static void on_prepare_gc(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->flow.kind != SHIM_FLOW_PREPARE)
        return;
    if (error) {
        flow_fail(s, error);
        flow_end(s);
        return;
    }
    took(s, "hook tried, garbage collected");
    s->flow.step = "standby";
    shim_standby_remember(s, s->kernels[PREPARE_STREAM]->spec, flow_str(s, "preload"));
    if (!shim_standby_begin(s))
        flow_end(s);
}

static void on_prepare_reseed(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->flow.kind != SHIM_FLOW_PREPARE)
        return;
    if (error) {
        on_prepare_gc(s, error);
        return;
    }
    shim_hook_call(&s->kernels[PREPARE_STREAM]->hook, json_pack("{s:b}", "gc", 1), on_prepare_gc,
                   s);
}

static void prepare_hook(struct shim *s)
{
    struct shim_kernel *k = s->kernels[PREPARE_STREAM];

    s->flow.step = "hook";
    if (!k->hooked) {
        shim_tell(s, LOG_LEVEL_INFO,
                  "kernel \"%s\" has no hook: clones restart it unless its kernel.json says "
                  "metadata.cellvisor.resume = \"share\"",
                  k->spec->name);
        flow_end(s);
        return;
    }
    if (!shim_hook_ready(&k->hook)) {
        flow_fail(s, "the extension cellvisor_hook was not loaded by the kernel");
        flow_end(s);
        return;
    }
    shim_kernel_reseed(k, on_prepare_reseed, s);
}

static void prepare_run(struct shim *s, const char *what, void (*next)(void *, const char *))
{
    const char *code = flow_str(s, what);

    s->flow.step = what;
    if (!code || !*code) {
        next(s, NULL);
        return;
    }
    shim_tell(s, LOG_LEVEL_INFO, "running %s", what);
    shim_kernel_execute(s->kernels[PREPARE_STREAM], code, next, s);
}

static void on_prepare_warmup(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->flow.kind != SHIM_FLOW_PREPARE)
        return;
    if (error) {
        flow_fail(s, error);
        flow_end(s);
        return;
    }
    if (flow_str(s, "warmup"))
        took(s, "warmup done");
    prepare_hook(s);
}

static void on_prepare_preload(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->flow.kind != SHIM_FLOW_PREPARE)
        return;
    if (error) {
        flow_fail(s, error);
        flow_end(s);
        return;
    }
    if (flow_str(s, "preload"))
        took(s, "preload done");
    prepare_run(s, "warmup", on_prepare_warmup);
}

static void begin_prepare(struct shim *s)
{
    const char *name = flow_str(s, "spec");
    const struct shim_spec *spec;
    char known[200];

    s->flow.step = "kernel";
    if (!name)
        name = shim_catalog_default(&s->catalog);
    spec = name ? shim_catalog_find(&s->catalog, name) : NULL;
    if (!spec) {
        shim_catalog_names(&s->catalog, known, sizeof(known));
        snprintf(s->flow.error, sizeof(s->flow.error),
                 "there is no kernelspec \"%s\" in the image; there are: %s", name ? name : "",
                 known);
        flow_end(s);
        return;
    }
    if (s->kernels[PREPARE_STREAM] && shim_kernel_alive(s->kernels[PREPARE_STREAM])) {
        flow_fail(s, "a kernel runs already");
        flow_end(s);
        return;
    }
    if (!s->kernels[PREPARE_STREAM])
        s->kernels[PREPARE_STREAM] = shim_kernel_new(&s->host, PREPARE_STREAM);
    shim_tell(s, LOG_LEVEL_INFO, "starting kernel \"%s\"", spec->name);
    shim_kernel_start(s->kernels[PREPARE_STREAM], spec, NULL, NULL);
}

void shim_flow_kernel_state(struct shim *s, struct shim_kernel *k)
{
    if (s->flow.kind != SHIM_FLOW_PREPARE || k->stream != PREPARE_STREAM)
        return;
    if (k->sm.state == SHIM_KERNEL_RUNNING && strcmp(s->flow.step, "kernel") == 0) {
        took(s, "kernel started");
        prepare_run(s, "preload", on_prepare_preload);
    } else if (k->sm.state == SHIM_KERNEL_EXITED) {
        char text[1024];

        shim_kernel_end_text(k, text, sizeof(text));
        flow_fail(s, text);
        flow_end(s);
    }
}

/* ---- RESUME ---- */

static void on_resume_warmup(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->flow.kind != SHIM_FLOW_RESUME)
        return;
    s->flow.warmup_us = shim_now_us() - s->flow.mark_us;
    if (error)
        flow_fail(s, error);
    flow_end(s);
}

static void resume_warmup(struct shim *s)
{
    struct shim_kernel *k = s->kernels[PREPARE_STREAM];
    const char *code = flow_str(s, "warmup");

    s->flow.hooks_us = shim_now_us() - s->flow.mark_us;
    s->flow.mark_us = shim_now_us();
    s->flow.step = "warmup";
    if (s->flow.error[0] || !code || !*code || !k || k->sm.state != SHIM_KERNEL_RUNNING) {
        flow_end(s);
        return;
    }
    shim_kernel_execute(k, code, on_resume_warmup, s);
}

/* One of the answers that RESUME or ASSIGN waits for. */
static void one_done(struct shim *s, const char *error)
{
    if (error)
        flow_fail(s, error);
    if (s->flow.waiting == 0 || --s->flow.waiting > 0)
        return;
    if (s->flow.kind == SHIM_FLOW_RESUME)
        resume_warmup(s);
    else
        flow_end(s);
}

static void on_hook_done(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->flow.kind == SHIM_FLOW_RESUME || s->flow.kind == SHIM_FLOW_ASSIGN)
        one_done(s, error);
}

void shim_flow_op_done(struct shim *s, const char *error)
{
    on_hook_done(s, error);
}

/* Kernels of clones must not share their random state. Without a hook the only cure is a new
 * process; a spec may declare that its kernel has no such state. */
static bool may_share(const struct shim_spec *spec)
{
    const char *resume = json_string_value(json_object_get(
        json_object_get(json_object_get(spec->json, "metadata"), "cellvisor"), "resume"));

    return resume && strcmp(resume, "share") == 0;
}

static void resume_kernels(struct shim *s)
{
    s->flow.step = "reseed";
    s->flow.mark_us = shim_now_us();
    s->flow.waiting = 1; /* ours: callbacks may come at once */
    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++) {
        struct shim_kernel *k = s->kernels[i];

        if (!k || !shim_kernel_alive(k))
            continue;
        if (shim_hook_ready(&k->hook)) {
            s->flow.waiting++;
            shim_kernel_reseed(k, on_hook_done, s);
        } else if (!may_share(k->spec)) {
            s->flow.waiting++;
            shim_kernel_op(k, SHIM_OP_RESTART, SHIM_FLOW_OP);
        }
    }
    one_done(s, NULL);
}

static int flow_clock(struct shim *s, bool needed, struct err *e)
{
    json_t *v = json_object_get(s->flow.args, "realtime_us");
    uint64_t us = json_is_integer(v) ? (uint64_t)json_integer_value(v) : 0;

    if (!s->host.vm || (!v && !needed))
        return 0;
    if (us < CLOCK_MIN_US)
        return err_set(e, -EINVAL, "realtime_us: not a time of our days");
    return guest_set_clock(us, e);
}

static int resume_identity(struct shim *s, struct err *e)
{
    const char *entropy = flow_str(s, "entropy"), *hostname = flow_str(s, "hostname");
    const char *machine_id = flow_str(s, "machine_id");
    struct shim_flow *f = &s->flow;
    uint8_t bytes[512];
    size_t n = sizeof(bytes);
    uint64_t t = shim_now_us();
    int r;

    f->step = "entropy";
    if (!entropy || id_base64_decode(slice_str(entropy), bytes, &n) < 0)
        return err_set(e, -EINVAL, "must be base64 of 64 bytes");
    if (s->host.vm && (r = guest_add_entropy(slice_of(bytes, n), e)) < 0)
        return r;
    f->entropy_us = shim_now_us() - t;
    t = shim_now_us();
    f->step = "clock";
    if ((r = flow_clock(s, true, e)) < 0)
        return r;
    f->step = "identity";
    if (s->host.vm) {
        if ((hostname && (r = guest_set_hostname(hostname, e)) < 0) ||
            (machine_id && (r = guest_set_machine_id(machine_id, e)) < 0) ||
            (r = guest_new_boot_id(s->host.run_dir, e)) < 0)
            return r;
    }
    f->clock_us = shim_now_us() - t;
    return 0;
}

static void begin_resume(struct shim *s)
{
    struct err e = { 0 };

    if (resume_identity(s, &e) < 0) {
        flow_fail(s, e.msg);
        flow_end(s);
        return;
    }
    resume_kernels(s);
}

/* ---- ASSIGN ---- */

static void assign_kernels(struct shim *s, json_t *env, const char *cwd)
{
    s->flow.step = "environment";
    s->flow.waiting = 1;
    for (uint32_t i = 1; i < GL_STREAMS_MAX && (env || cwd); i++) {
        struct shim_kernel *k = s->kernels[i];
        json_t *cmd;

        if (!k || !shim_kernel_alive(k))
            continue;
        shim_kernel_set_env(k, env, cwd);
        s->flow.waiting++;
        if (!shim_hook_ready(&k->hook)) {
            shim_kernel_op(k, SHIM_OP_RESTART, SHIM_FLOW_OP);
            continue;
        }
        cmd = json_object();
        if (env)
            json_object_set(cmd, "env", env);
        if (cwd)
            json_object_set_new(cmd, "cwd", json_string(cwd));
        shim_hook_call(&k->hook, cmd, on_hook_done, s);
    }
    one_done(s, NULL);
}

static void begin_assign(struct shim *s)
{
    const char *hostname = flow_str(s, "hostname"), *cwd = flow_str(s, "cwd"), *key;
    json_t *env = json_object_get(s->flow.args, "env"), *v;
    struct err e = { 0 };

    s->flow.step = "clock";
    if (flow_clock(s, false, &e) < 0) {
        flow_fail(s, e.msg);
        flow_end(s);
        return;
    }
    s->flow.step = "hostname";
    if (s->host.vm && hostname && guest_set_hostname(hostname, &e) < 0) {
        flow_fail(s, e.msg);
        flow_end(s);
        return;
    }
    if (!json_is_object(env) || json_object_size(env) == 0)
        env = NULL;
    json_object_foreach(env, key, v)
    {
        if (json_is_string(v) && *key && !strchr(key, '=')) {
            shim_environ_set(&s->host.env, key, json_string_value(v));
            json_object_set(s->assigned_env, key, v);
        }
    }
    if (cwd) {
        free(s->host.cwd);
        s->host.cwd = xstrdup(shim_usable_cwd(s, cwd));
    }
    assign_kernels(s, env, cwd ? s->host.cwd : NULL);
}

/* ---- entry ---- */

static void refuse(struct shim *s, enum shim_flow_kind kind, const char *why)
{
    enum gl_type t = kind == SHIM_FLOW_PREPARE  ? GL_PREPARED
                     : kind == SHIM_FLOW_RESUME ? GL_RESUMED
                                                : GL_ASSIGNED;

    shim_send_json(s, t, 0, json_pack("{s:b, s:s}", "ok", 0, "error", why));
}

void shim_flow_begin(struct shim *s, enum shim_flow_kind kind, struct slice payload)
{
    struct shim_flow *f = &s->flow;
    struct err e = { 0 };
    json_t *args = json_parse(payload, &e);
    uint64_t ms = kind == SHIM_FLOW_PREPARE ? PREPARE_MS : RESUME_MS;

    if (!json_is_object(args)) {
        refuse(s, kind, e.msg[0] ? e.msg : "not a JSON object");
    } else if (f->kind != SHIM_FLOW_NONE) {
        refuse(s, kind, "another command is under way");
    } else if (s->failed) {
        refuse(s, kind, "an earlier resume failed; this sandbox must not be used");
    } else {
        *f = (struct shim_flow) { .kind = kind, .args = args, .step = "start" };
        f->begin_us = f->mark_us = shim_now_us();
        if (json_is_integer(json_object_get(args, "timeout_ms")))
            ms = (uint64_t)json_integer_value(json_object_get(args, "timeout_ms"));
        shim_timer_start(&s->host.loop, &f->timer, ms, on_flow_timeout, s);
        if (kind == SHIM_FLOW_PREPARE)
            begin_prepare(s);
        else if (kind == SHIM_FLOW_RESUME)
            begin_resume(s);
        else
            begin_assign(s);
        return;
    }
    json_decref(args);
}
