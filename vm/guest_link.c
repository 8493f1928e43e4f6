/* The conversation of a VM's start: HELLO, [PREPARE,] RESUME, ASSIGN; then frames are handed on to
 * the user. The guest is hostile: whatever it says out of turn ends it, what it logs is
 * rate-limited, and nothing but the declared fields is read. */
#include "common/cleanup.h"
#include "common/id.h"
#include "common/json.h"
#include "common/mem.h"
#include "vm/guest.h"
#include <errno.h>
#include <string.h>

#define RESUME_MS 30000u
#define PARK_MS 120000u /* with warm-up */
#define PREPARE_MS 120000u
#define ASSIGN_MS 20000u
#define LINK_LOST_MS 500u
#define ENTROPY_BYTES 64
#define LOG_BURST 10u
#define LOG_EVERY_MS 1000u

static void violation(struct vm_guest *g, const char *what)
{
    log_warn(&g->log, "guest broke the link's rules: %s", what);
    vm_guest_fail(g, VM_EXIT_PROTOCOL, "guest link: %s", what);
}

/* Takes msg. Control frames are small; a guest that lets them pile up is hung or hostile. */
static void send_json(struct vm_guest *g, enum gl_type type, json_t *msg)
{
    CLEANUP(freep) char *text = msg ? json_dumps(msg, JSON_COMPACT) : NULL;
    struct slice part = slice_str(text);
    int r = !g->channel ? -ENOTCONN
            : text      ? gl_link_send(vm_channel_link(g->channel), type, 0, &part, 1)
                        : -EINVAL;

    json_decref(msg);
    if (r < 0)
        vm_guest_fail(g, VM_EXIT_PROTOCOL, "cannot send %s to the guest: %s", gl_type_name(type),
                      strerror(-r));
}

/* ---- towards the guest ---- */

void vm_guest_linked(struct vm_guest *g, int fd)
{
    g->channel = vm_channel_new(g->class->loop, fd, &g->log, &vm_guest_channel_events, g);
}

/* Local only, and only on the way into the pool: VMs have their kernel in the snapshot. */
static void prepare(struct vm_guest *g)
{
    vm_guest_move(g, VM_GUEST_PREPARING, PREPARE_MS);
    send_json(g, GL_PREPARE,
              json_pack("{s:s*, s:s, s:i}", "spec", g->class->default_spec, "preload", "",
                        "timeout_ms", (int)PREPARE_MS - 10000));
}

void vm_guest_resume(struct vm_guest *g)
{
    uint8_t entropy[ENTROPY_BYTES];
    char b64[(ENTROPY_BYTES + 2) / 3 * 4 + 1], machine_id[33], name[16];
    const char *warmup = g->class->tmpl && !g->claimed ? g->class->tmpl->warmup : NULL;

    id_random(entropy, sizeof(entropy));
    id_base64(b64, slice_of(entropy, sizeof(entropy)));
    memset(entropy, 0, sizeof(entropy));
    id_token(machine_id, 16);
    snprintf(name, sizeof(name), "cv-%.8s", g->vm.info.id);
    vm_guest_move(g, VM_GUEST_RESUMING, warmup ? PARK_MS : RESUME_MS);
    send_json(g, GL_RESUME,
              json_pack("{s:I, s:s, s:I, s:s, s:s, s:s?}", "generation",
                        (json_int_t)++g->class->generation, "entropy", b64, "realtime_us",
                        (json_int_t)loop_wall_us(g->class->loop), "hostname",
                        g->hostname ? g->hostname : name, "machine_id", machine_id, "warmup",
                        warmup));
    memset(b64, 0, sizeof(b64));
}

void vm_guest_assign(struct vm_guest *g)
{
    json_t *env = g->env ? json_incref(g->env) : json_object();

    g->stage_us = loop_now_us(g->class->loop);
    vm_guest_move(g, VM_GUEST_ASSIGNING, ASSIGN_MS);
    send_json(g, GL_ASSIGN,
              json_pack("{s:I, s:s, s:o, s:s?}", "realtime_us",
                        (json_int_t)loop_wall_us(g->class->loop), "hostname", g->hostname, "env",
                        env, "cwd", g->cwd));
}

void vm_guest_shutdown(struct vm_guest *g, unsigned grace_ms)
{
    send_json(g, GL_SHUTDOWN, json_pack("{s:i}", "grace_ms", (int)grace_ms));
}

/* ---- from the guest ---- */

static json_t *parse_object(struct vm_guest *g, struct slice payload, const char *what)
{
    struct err e;
    json_t *v = json_parse(payload, &e);

    if (!json_is_object(v)) {
        json_decref(v);
        violation(g, what);
        return NULL;
    }
    return v;
}

/* The kernel of the snapshot, as stream 1, when the guest says that it runs. */
static void note_kernels(struct vm_guest *g, json_t *hello)
{
    json_t *kernels = json_object_get(hello, "kernels"), *k;
    size_t i;

    json_array_foreach(kernels, i, k)
    {
        const char *state = json_string_value(json_object_get(k, "state"));

        if (json_integer_value(json_object_get(k, "stream")) == 1 && state &&
            !strcmp(state, "running")) {
            g->vm.info.kernel_stream = 1;
            g->vm.info.kernel_spec = g->class->default_spec;
            g->vm.info.kernel_info = g->class->tmpl ? g->class->tmpl->kernel_info : NULL;
        }
    }
}

/* After HELLO. A local shim on its way into the pool starts a kernel first; for a user, who names
 * one, it is started later by GL_KERNEL_START. */
static void advance(struct vm_guest *g)
{
    const struct vm_guest_class *c = g->class;

    if (c->tmpl && !g->vm.info.kernel_stream && !g->claimed)
        vm_guest_fail(g, VM_EXIT_START_FAILED, "the snapshot's kernel does not run");
    else if (c->tmpl || g->claimed)
        vm_guest_resume(g);
    else
        prepare(g);
}

static void on_hello(struct vm_guest *g, struct slice payload)
{
    json_t *hello;
    json_int_t version;

    if (++g->hellos > vm_channel_hellos(g->channel)) {
        violation(g, "hello out of turn");
        return;
    }
    if (vm_guest_state(g) != VM_GUEST_LINKING)
        return; /* the answer to a repeated one */
    hello = parse_object(g, payload, "hello is no JSON object");
    if (!hello)
        return;
    version = json_integer_value(json_object_get(hello, "version"));
    if (version != GL_VERSION) {
        vm_guest_fail(g, VM_EXIT_START_FAILED,
                      "the guest speaks link version %d, this gateway %d: rebuild the template",
                      (int)version, GL_VERSION);
    } else {
        gl_link_set_phase(vm_channel_link(g->channel), GL_PHASE_IDLE);
        note_kernels(g, hello);
        advance(g);
    }
    json_decref(hello);
}

static void on_prepared(struct vm_guest *g, struct slice payload)
{
    json_t *v, *info;

    if (vm_guest_state(g) != VM_GUEST_PREPARING) {
        violation(g, "prepared out of turn");
        return;
    }
    v = parse_object(g, payload, "prepared is no JSON object");
    if (!v)
        return;
    if (!json_is_true(json_object_get(v, "ok"))) {
        const char *text = json_string_value(json_object_get(v, "error"));

        vm_guest_fail(g, VM_EXIT_START_FAILED, "its kernel did not start: %.120s",
                      text ? text : "?");
    } else {
        info = json_object_get(v, "info");
        free(g->kernel_info);
        g->kernel_info = info ? json_dumps(info, JSON_COMPACT) : NULL;
        g->vm.info.kernel_info = g->kernel_info;
        g->vm.info.kernel_spec = g->class->default_spec;
        g->vm.info.kernel_stream = 1;
        vm_guest_resume(g);
    }
    json_decref(v);
}

/* RESUMED must tell the steps that it took: outputs that differ between clones prove nothing, since
 * the guest's generator may have been reseeded by luck (microvm.md section 10). */
static bool note_steps(struct vm_guest *g, json_t *us)
{
    json_t *entropy = json_object_get(us, "entropy"), *clock = json_object_get(us, "clock");
    json_t *hooks = json_object_get(us, "hooks");
    struct vm_timings *t = &g->vm.info.timings;

    if (!json_is_integer(entropy) || !json_is_integer(clock) || !json_is_integer(hooks))
        return false;
    t->guest_entropy_ms = (double)json_integer_value(entropy) / 1000.0;
    t->guest_clock_ms = (double)json_integer_value(clock) / 1000.0;
    t->guest_hooks_ms = (double)json_integer_value(hooks) / 1000.0;
    return true;
}

/* RESUMED and ASSIGNED: anything but {"ok":true} in its turn ends the VM. */
static void on_step(struct vm_guest *g, enum gl_type type, struct slice payload)
{
    bool resumed = type == GL_RESUMED;
    json_t *v;

    if (vm_guest_state(g) != (resumed ? VM_GUEST_RESUMING : VM_GUEST_ASSIGNING)) {
        violation(g, resumed ? "resumed out of turn" : "assigned out of turn");
        return;
    }
    v = parse_object(g, payload, "an answer is no JSON object");
    if (!v)
        return;
    if (!json_is_true(json_object_get(v, "ok"))) {
        const char *text = json_string_value(json_object_get(v, "error"));

        vm_guest_fail(g, VM_EXIT_START_FAILED, "%s was refused by the guest: %.120s",
                      resumed ? "entropy, clock and identity" : "assignment", text ? text : "?");
    } else if (resumed && !note_steps(g, json_object_get(v, "us"))) {
        vm_guest_fail(g, VM_EXIT_START_FAILED, "the guest does not say that it was reseeded");
    } else if (resumed) {
        vm_guest_parked(g);
    } else {
        gl_link_set_phase(vm_channel_link(g->channel), GL_PHASE_RUNNING);
        vm_guest_running(g);
    }
    json_decref(v);
}

/* A guest may say what it likes, but not as often as it likes. */
static bool may_log(struct vm_guest *g)
{
    uint64_t now = loop_now_ms(g->class->loop);
    uint64_t gained = (now - g->log_refill_ms) / LOG_EVERY_MS;

    if (gained) {
        g->log_tokens =
            gained >= LOG_BURST - g->log_tokens ? LOG_BURST : g->log_tokens + (unsigned)gained;
        g->log_refill_ms = now;
    }
    if (!g->log_tokens) {
        g->log_dropped++;
        return false;
    }
    g->log_tokens--;
    if (g->log_dropped) {
        log_info(&g->log, "%u lines of the guest were not shown", g->log_dropped);
        g->log_dropped = 0;
    }
    return true;
}

static void on_log(struct vm_guest *g, struct slice payload)
{
    struct err e;
    json_t *v;
    const char *text, *level;

    if (!may_log(g))
        return;
    v = json_parse(payload, &e);
    text = json_string_value(json_object_get(v, "text"));
    level = json_string_value(json_object_get(v, "level"));
    if (text && level && (!strcmp(level, "error") || !strcmp(level, "warn")))
        log_warn(&g->log, "guest says: %.400s", text);
    else if (text)
        log_debug(&g->log, "guest says: %.400s", text);
    json_decref(v);
}

/* Frames of a guest that nobody has yet: its kernel may die while it waits. */
static void before_running(struct vm_guest *g, enum gl_type type, struct slice payload)
{
    struct err e;
    json_t *v;
    const char *state;

    if (type != GL_KERNEL_STATE)
        return; /* events of a parked guest concern nobody */
    v = json_parse(payload, &e);
    state = json_string_value(json_object_get(v, "state"));
    if (state && !strcmp(state, "exited"))
        vm_guest_fail(g, VM_EXIT_START_FAILED, "its kernel ended before it was handed out");
    json_decref(v);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct vm_guest *g = ctx;

    if (vm_guest_state(g) == VM_GUEST_STOPPING)
        return;
    switch (type) {
    case GL_HELLO:
        on_hello(g, payload);
        break;
    case GL_SPECS: /* known already: from the manifest, or from `cellvisor-shim --specs` */
        break;
    case GL_PREPARED:
        on_prepared(g, payload);
        break;
    case GL_RESUMED:
    case GL_ASSIGNED:
        on_step(g, type, payload);
        break;
    case GL_PING:
        /* Full queue: the guest asks faster than it reads; it gets fewer answers. */
        (void)gl_link_send(vm_channel_link(g->channel), GL_PONG, 0, &payload, 1);
        break;
    case GL_PONG:
        break;
    case GL_LOG:
        on_log(g, payload);
        break;
    default:
        if (vm_guest_state(g) == VM_GUEST_RUNNING)
            g->ev->message(g->ctx, type, stream, payload);
        else
            before_running(g, type, payload);
    }
}

static void on_writable(void *ctx, uint32_t stream)
{
    struct vm_guest *g = ctx;

    if (vm_guest_state(g) == VM_GUEST_RUNNING && g->ev->writable)
        g->ev->writable(g->ctx, stream);
}

static void on_closed(void *ctx, int code, const char *why)
{
    struct vm_guest *g = ctx;

    if (code == -EPROTO) {
        violation(g, why);
        return;
    }
    vm_channel_free(g->channel);
    g->channel = NULL;
    /* Most likely the machine is ending: its exit explains it better and comes any moment. */
    if (vm_guest_state(g) != VM_GUEST_STOPPING)
        loop_timer_start(g->stage_timer, LINK_LOST_MS, 0);
}

const struct vm_channel_events vm_guest_channel_events = { on_message, on_writable, on_closed };
