/* Life of one VM; the conversation over its link is in guest_link.c. */
#include "vm/guest.h"
#include "common/cleanup.h"
#include "common/id.h"
#include "common/mem.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Stage deadlines. Generous: they catch what hangs, they do not judge a busy machine. */
#define SPAWN_MS 20000u
#define LOAD_MS 30000u
#define HELLO_MS 8000u
/* Beyond the grace that the guest was promised. */
#define SHUTDOWN_EXTRA_MS 1000u

#define ENDS SM_TO(VM_GUEST_STOPPING) | SM_TO(VM_GUEST_DEAD)
static const struct sm_state states[VM_GUEST_STATES] = {
    [VM_GUEST_NEW] = { "new", SM_TO(VM_GUEST_SPAWNING) | SM_TO(VM_GUEST_DEAD) },
    [VM_GUEST_SPAWNING] = { "spawning",
                            SM_TO(VM_GUEST_DEFERRED) | SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_DEFERRED] = { "deferred", SM_TO(VM_GUEST_LOADING) | SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_LOADING] = { "loading", SM_TO(VM_GUEST_LINKING) | SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_LINKING] = { "linking", SM_TO(VM_GUEST_PREPARING) | SM_TO(VM_GUEST_RESUMING) |
                                          SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_PREPARING] = { "preparing",
                             SM_TO(VM_GUEST_RESUMING) | SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_RESUMING] = { "resuming", SM_TO(VM_GUEST_PARKED) | SM_TO(VM_GUEST_ASSIGNING) |
                                            SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_PARKED] = { "parked", SM_TO(VM_GUEST_ASSIGNING) | ENDS },
    [VM_GUEST_ASSIGNING] = { "assigning",
                             SM_TO(VM_GUEST_RUNNING) | SM_TO(VM_GUEST_SPAWNING) | ENDS },
    [VM_GUEST_RUNNING] = { "running", ENDS },
    [VM_GUEST_STOPPING] = { "stopping", SM_TO(VM_GUEST_DEAD) },
    [VM_GUEST_DEAD] = { "dead", 0 },
};
const struct sm_def vm_guest_machine = { "vm", states, VM_GUEST_STATES };

static void spawned(void *ctx);
static void running(void *ctx, int fd);
static void exited(void *ctx, const struct vm_exit *x);
static const struct vm_machine_events machine_events = { spawned, running, exited };

/* ---- states and times ---- */

void vm_guest_move(struct vm_guest *g, enum vm_guest_state to, unsigned deadline_ms)
{
    sm_move(&g->sm, to);
    if (deadline_ms)
        loop_timer_start(g->stage_timer, deadline_ms, 0);
    else
        loop_timer_stop(g->stage_timer);
    g->class->ops->changed(g->class->owner, g);
}

/* Milliseconds since the last stage ended (or the claim, whichever is later: a pooled VM's past is
 * not the user's waiting time); the metric gets the whole stage. */
void vm_guest_stage_done(struct vm_guest *g, enum vm_guest_stage stage)
{
    uint64_t now = loop_now_us(g->class->loop);
    uint64_t from = g->claim_us > g->stage_us ? g->claim_us : g->stage_us;
    double *slots[VM_STAGES] = { &g->vm.info.timings.queue_ms,  &g->vm.info.timings.spawn_ms,
                                 &g->vm.info.timings.load_ms,   &g->vm.info.timings.resume_ms,
                                 &g->vm.info.timings.assign_ms, &g->vm.info.timings.total_ms };

    if (stage == VM_STAGE_TOTAL)
        from = g->stage_us = g->claim_us;
    if (g->claimed)
        *slots[stage] = (double)(now - from) / 1000.0;
    metric_observe(g->class->stage_seconds[stage], (double)(now - g->stage_us) / 1e6);
    g->stage_us = now;
}

/* Stage in words, for texts. */
static const char *stage_text(const struct vm_guest *g)
{
    switch (vm_guest_state(g)) {
    case VM_GUEST_NEW:
        return "waiting for its turn";
    case VM_GUEST_SPAWNING:
        return "starting the VMM";
    case VM_GUEST_DEFERRED:
    case VM_GUEST_LOADING:
        return "loading the snapshot";
    case VM_GUEST_LINKING:
        return "waiting for the guest";
    case VM_GUEST_PREPARING:
        return "starting its kernel";
    case VM_GUEST_RESUMING:
        return "giving it entropy, clock and identity";
    case VM_GUEST_ASSIGNING:
        return "assigning it";
    default:
        return sm_name(&g->sm);
    }
}

/* A user's start that hangs before the guest has said anything gets one more VMM. */
static bool may_retry(const struct vm_guest *g)
{
    return g->claimed && !g->up && !g->releasing && !g->retried && !g->why.text[0] &&
           sm_can(&g->sm, VM_GUEST_SPAWNING);
}

static void on_stage_timeout(void *ctx)
{
    struct vm_guest *g = ctx;
    enum vm_guest_state s = vm_guest_state(g);

    if (s == VM_GUEST_STOPPING) {
        vm_channel_free(g->channel);
        g->channel = NULL;
        if (g->machine)
            g->machine->ops->kill(g->machine);
    } else if (s >= VM_GUEST_SPAWNING && s <= VM_GUEST_LINKING && may_retry(g)) {
        log_warn(&g->log, "%s took too long: once more with a fresh VMM", stage_text(g));
        g->stuck = true;
        g->machine->ops->kill(g->machine);
    } else if (!g->channel && vm_guest_state(g) >= VM_GUEST_LINKING) {
        vm_guest_fail(g, VM_EXIT_GUEST, "the guest closed its link");
    } else {
        vm_guest_fail(g, VM_EXIT_DEADLINE, "%s took too long", stage_text(g));
    }
}

static void on_start_timeout(void *ctx)
{
    struct vm_guest *g = ctx;

    vm_guest_fail(g, VM_EXIT_DEADLINE, "not up after %u ms, while %s", g->class->start_timeout_ms,
                  stage_text(g));
}

/* ---- the end ---- */

static void drop_machine(struct vm_guest *g)
{
    vm_channel_free(g->channel);
    g->channel = NULL;
    g->hellos = 0;
    if (g->machine)
        g->machine->ops->free(g->machine);
    g->machine = NULL;
}

static void finish(struct vm_guest *g, const struct vm_exit *why)
{
    struct vm_exit x = *why;

    drop_machine(g);
    loop_timer_stop(g->start_timer);
    loop_cancel_deferred(g->class->loop, g);
    loop_timer_stop(g->stage_timer);
    sm_move(&g->sm, VM_GUEST_DEAD);
    g->class->ops->gone(g->class->owner, g, &x);
    if (g->claimed)
        g->ev->down(g->ctx, &x);
    vm_guest_free(g);
}

static void on_finish(void *ctx)
{
    struct vm_guest *g = ctx;

    finish(g, &g->why);
}

void vm_guest_fail(struct vm_guest *g, enum vm_exit_reason reason, const char *fmt, ...)
{
    va_list ap;

    if (vm_guest_state(g) == VM_GUEST_DEAD)
        return;
    if (!g->why.text[0]) {
        g->why.reason = reason;
        va_start(ap, fmt);
        vsnprintf(g->why.text, sizeof(g->why.text), fmt, ap);
        va_end(ap);
    }
    if (!g->machine) {
        loop_cancel_deferred(g->class->loop, g);
        loop_defer(g->class->loop, on_finish, g);
        return;
    }
    loop_timer_stop(g->start_timer);
    if (vm_guest_state(g) != VM_GUEST_STOPPING)
        vm_guest_move(g, VM_GUEST_STOPPING, 0);
    vm_channel_free(g->channel); /* nothing more is said; a local shim ends with its link */
    g->channel = NULL;
    g->machine->ops->kill(g->machine);
}

/* What the machine said, as the user's reason: before up() the start has failed, whatever ended it.
 */
static struct vm_exit exit_reason(const struct vm_guest *g, const struct vm_exit *x)
{
    struct vm_exit why = *x;

    if (g->why.text[0]) {
        why.reason = g->why.reason;
        memcpy(why.text, g->why.text, sizeof(why.text));
    } else if (vm_guest_state(g) < VM_GUEST_RUNNING && vm_guest_state(g) != VM_GUEST_PARKED) {
        why.reason = VM_EXIT_START_FAILED;
        snprintf(why.text, sizeof(why.text), "failed while %s: %.140s", stage_text(g), x->text);
    }
    return why;
}

/* A VM that died in the pool, or on its way there, is no reason to refuse the user who got it: once
 * more. */
static bool try_again(struct vm_guest *g)
{
    struct err e;

    if (!may_retry(g) || (strcmp(g->vm.info.timings.origin, "cold") == 0 && !g->stuck))
        return false;
    g->retried = true;
    drop_machine(g);
    g->vm.info.timings.origin = "cold";
    return vm_guest_start(g, &e) == 0;
}

static void exited(void *ctx, const struct vm_exit *x)
{
    struct vm_guest *g = ctx;
    struct vm_exit why = exit_reason(g, x);

    if (!g->releasing && !g->stuck && vm_guest_state(g) != VM_GUEST_STOPPING)
        log_info(&g->log, "machine ended while %s: %s", sm_name(&g->sm), x->text);
    if (!try_again(g))
        finish(g, &why);
}

/* ---- struct vm: what the user calls ---- */

static int do_send(struct vm *vm, enum gl_type type, uint32_t stream, const struct slice *parts,
                   size_t n)
{
    struct vm_guest *g = (struct vm_guest *)vm;

    if (vm_guest_state(g) != VM_GUEST_RUNNING || !g->channel)
        return -ENOTCONN;
    return gl_link_send(vm_channel_link(g->channel), type, stream, parts, n);
}

static void do_grant(struct vm *vm, uint32_t stream, size_t n)
{
    struct vm_guest *g = (struct vm_guest *)vm;

    if (vm_guest_state(g) == VM_GUEST_RUNNING && g->channel)
        gl_link_grant(vm_channel_link(g->channel), stream, n);
}

static size_t do_queued(const struct vm *vm, uint32_t stream)
{
    const struct vm_guest *g = (const struct vm_guest *)vm;

    return g->channel ? gl_link_queued(vm_channel_link(g->channel), stream) : 0;
}

static void do_close_stream(struct vm *vm, uint32_t stream)
{
    struct vm_guest *g = (struct vm_guest *)vm;

    if (vm_guest_state(g) == VM_GUEST_RUNNING && g->channel)
        gl_link_close_stream(vm_channel_link(g->channel), stream);
}

static void do_release(struct vm *vm, unsigned grace_ms)
{
    struct vm_guest *g = (struct vm_guest *)vm;

    if (vm_guest_state(g) == VM_GUEST_DEAD || g->releasing)
        return;
    g->releasing = true;
    loop_timer_stop(g->start_timer);
    if (grace_ms && vm_guest_state(g) == VM_GUEST_RUNNING && g->channel) {
        g->why.reason = VM_EXIT_RELEASED;
        snprintf(g->why.text, sizeof(g->why.text), "released");
        vm_guest_shutdown(g, grace_ms);
        vm_guest_move(g, VM_GUEST_STOPPING, grace_ms + SHUTDOWN_EXTRA_MS);
        return;
    }
    vm_guest_fail(g, VM_EXIT_RELEASED, "released");
}

static const struct vm_ops vm_ops = { do_send, do_grant, do_queued, do_close_stream, do_release };

/* ---- the way up ---- */

struct vm_guest *vm_guest_new(struct vm_guest_class *class, enum vm_guest_goal goal)
{
    struct vm_guest *g = xnew(struct vm_guest);

    g->vm.ops = &vm_ops;
    g->class = class;
    g->goal = goal;
    id_uuid4(g->vm.info.id);
    g->vm.info.template_name = class->name;
    g->vm.info.tier = class->tier;
    g->vm.info.timings.origin = class->tmpl ? "cold" : "local";
    sm_init(&g->sm, &vm_guest_machine, VM_GUEST_NEW);
    log_ctx_init(&g->log, &class->log);
    log_ctx_add(&g->log, "vm", g->vm.info.id);
    g->stage_timer = loop_timer_new(class->loop, on_stage_timeout, g);
    g->start_timer = loop_timer_new(class->loop, on_start_timeout, g);
    g->stage_us = loop_now_us(class->loop);
    g->born_ms = loop_now_ms(class->loop);
    g->log_tokens = 10;
    return g;
}

int vm_guest_start(struct vm_guest *g, struct err *e)
{
    struct vm_guest_class *c = g->class;
    struct vm_launch launch = { .id = g->vm.info.id, .tmpl = c->tmpl, .mem_fd = c->mem_fd };
    int r;

    if (g->claimed)
        vm_guest_stage_done(g, VM_STAGE_QUEUE);
    g->stage_us = loop_now_us(c->loop);
    r = c->backend->ops->spawn(c->backend, &launch, &g->log, &machine_events, g, &g->machine, e);
    if (r < 0)
        return r;
    g->vm.info.pid = g->machine->ops->pid(g->machine);
    if (!g->claimed)
        g->machine->ops->background(g->machine, true);
    vm_guest_move(g, VM_GUEST_SPAWNING, SPAWN_MS);
    return 0;
}

static void load(struct vm_guest *g)
{
    g->stage_us = loop_now_us(g->class->loop);
    vm_guest_move(g, VM_GUEST_LOADING, LOAD_MS);
    g->machine->ops->load(g->machine);
}

static void spawned(void *ctx)
{
    struct vm_guest *g = ctx;

    if (vm_guest_state(g) != VM_GUEST_SPAWNING)
        return;
    vm_guest_stage_done(g, VM_STAGE_SPAWN);
    vm_guest_move(g, VM_GUEST_DEFERRED, 0);
    if (g->goal > VM_GOAL_DEFERRED)
        load(g);
}

static void running(void *ctx, int fd)
{
    struct vm_guest *g = ctx;

    if (vm_guest_state(g) != VM_GUEST_LOADING) {
        close(fd);
        return;
    }
    vm_guest_stage_done(g, VM_STAGE_LOAD);
    vm_guest_linked(g, fd);
    vm_guest_move(g, VM_GUEST_LINKING, g->class->hello_ms ? g->class->hello_ms : HELLO_MS);
}

void vm_guest_parked(struct vm_guest *g)
{
    vm_guest_stage_done(g, VM_STAGE_RESUME);
    if (g->claimed) {
        vm_guest_assign(g);
        return;
    }
    g->machine->ops->background(g->machine, false); /* costs nothing while it waits */
    vm_guest_move(g, VM_GUEST_PARKED, 0);
}

void vm_guest_running(struct vm_guest *g)
{
    vm_guest_stage_done(g, VM_STAGE_ASSIGN);
    vm_guest_stage_done(g, VM_STAGE_TOTAL);
    loop_timer_stop(g->start_timer);
    g->up = true;
    vm_guest_move(g, VM_GUEST_RUNNING, 0);
    log_info(&g->log, "up in %.1f ms (%s)", g->vm.info.timings.total_ms, g->vm.info.timings.origin);
    g->ev->up(g->ctx);
}

void vm_guest_set_goal(struct vm_guest *g, enum vm_guest_goal goal)
{
    if (goal <= g->goal)
        return;
    g->goal = goal;
    if (vm_guest_state(g) == VM_GUEST_DEFERRED)
        load(g);
}

void vm_guest_claim(struct vm_guest *g, const struct vm_request *r, const struct vm_events *ev,
                    void *ctx)
{
    const char *local = g->class->tmpl ? NULL : "local";

    g->claimed = true;
    g->ev = ev;
    g->ctx = ctx;
    g->claim_us = loop_now_us(g->class->loop);
    if (vm_guest_state(g) == VM_GUEST_NEW)
        g->stage_us = g->claim_us;
    g->hostname = r->hostname ? xstrdup(r->hostname) : xasprintf("cv-%.8s", g->vm.info.id);
    g->cwd = xstrdup(r->cwd);
    g->env = json_deep_copy(r->env);
    switch (vm_guest_state(g)) {
    case VM_GUEST_NEW:
        break;
    case VM_GUEST_DEFERRED:
        g->vm.info.timings.origin = local ? local : "deferred";
        break;
    case VM_GUEST_PARKED:
        g->vm.info.timings.origin = "parked";
        break;
    default:
        g->vm.info.timings.origin = local ? local : "deferred";
        break;
    }
    loop_timer_start(g->start_timer, g->class->start_timeout_ms, 0);
    if (g->machine)
        g->machine->ops->background(g->machine, false);
    if (vm_guest_state(g) == VM_GUEST_PARKED)
        vm_guest_assign(g);
    else
        vm_guest_set_goal(g, VM_GOAL_RUN);
}

void vm_guest_free(struct vm_guest *g)
{
    if (!g)
        return;
    loop_cancel_deferred(g->class->loop, g);
    drop_machine(g);
    loop_timer_free(g->stage_timer);
    loop_timer_free(g->start_timer);
    list_remove(&g->link);
    json_decref(g->env);
    free(g->hostname);
    free(g->cwd);
    free(g->kernel_info);
    free(g);
}
