/* Life of a kernel: sandbox, process, restarts, death. Frames of the guest are guest.c's, clients
 * client.c's.
 *
 * A process generation (`gen`) ends when the guest says so, when its sandbox ends, or when we give
 * it up. Whatever was asked of it is answered at that moment, in order of asking; what was asked
 * after a restart began waits for the next generation. A dead kernel has no sandbox: a restart
 * takes a fresh one under the same id. */
#include "common/id.h"
#include "kernelmgr/km_priv.h"
#include <errno.h>
#include <inttypes.h>
#include <string.h>

static const struct sm_state states[] = {
    [KM_K_NEW] = { "new", SM_TO(KM_K_STARTING) | SM_TO(KM_K_CLOSED) },
    [KM_K_STARTING] = { "starting", SM_TO(KM_K_READY) | SM_TO(KM_K_RESTARTING) | SM_TO(KM_K_DEAD) |
                                        SM_TO(KM_K_CLOSED) },
    [KM_K_READY] = { "ready", SM_TO(KM_K_RESTARTING) | SM_TO(KM_K_DEAD) | SM_TO(KM_K_CLOSED) },
    [KM_K_RESTARTING] = { "restarting",
                          SM_TO(KM_K_STARTING) | SM_TO(KM_K_DEAD) | SM_TO(KM_K_CLOSED) },
    [KM_K_DEAD] = { "dead", SM_TO(KM_K_STARTING) | SM_TO(KM_K_CLOSED) },
    [KM_K_CLOSED] = { "closed", 0 },
};
const struct sm_def km_kernel_sm = { "kernel", states, sizeof(states) / sizeof(*states) };

enum km_kernel_state km_state(const struct km_kernel *k)
{
    return (enum km_kernel_state)k->sm.state;
}

static uint64_t now_ms(const struct km_kernel *k)
{
    return loop_now_ms(k->m->loop);
}

/* ---- timer ---- */

static uint64_t next_deadline(const struct km_kernel *k)
{
    uint64_t at = km_peers_next_expiry(k);
    if (k->start_deadline_ms && k->start_deadline_ms < at)
        at = k->start_deadline_ms;
    if (k->farewell_ms && k->farewell_ms < at)
        at = k->farewell_ms;
    LIST_FOR_EACH (&k->ops, n) {
        const struct km_op *op = list_entry(n, struct km_op, link);
        if (op->deadline_ms && op->deadline_ms < at)
            at = op->deadline_ms;
    }
    if (k->router.n_half && now_ms(k) + k->m->cfg.reply_grace_ms < at)
        at = now_ms(k) + k->m->cfg.reply_grace_ms;
    return at;
}

static void fire_at(struct km_kernel *k, uint64_t at)
{
    uint64_t now = now_ms(k);
    k->timer_at_ms = at;
    loop_timer_start(k->timer, at > now ? at - now : 0, 0);
}

void km_kernel_arm(struct km_kernel *k)
{
    if (km_state(k) == KM_K_CLOSED)
        return;
    uint64_t at = next_deadline(k);
    if (at == UINT64_MAX)
        loop_timer_stop(k->timer);
    else
        fire_at(k, at);
}

void km_kernel_poke(struct km_kernel *k, uint64_t at_ms)
{
    if (!loop_timer_active(k->timer) || k->timer_at_ms > at_ms)
        fire_at(k, at_ms);
}

/* Requests of which only the reply or only the idle came. Not while the guest waits for credit: the
 * rest may be on its way. */
static void complete_halves(struct km_kernel *k)
{
    if (k->ungranted)
        return;
    uint64_t now = now_ms(k);
    LIST_FOR_EACH_SAFE (&k->router.order, n) {
        struct km_req *q = list_entry(n, struct km_req, link);
        if (!k->router.n_half)
            return;
        if (q->half_ms && now - q->half_ms >= k->m->cfg.reply_grace_ms)
            km_synth_missing(k, q);
    }
}

static void ops_expire(struct km_kernel *k)
{
    uint64_t now = now_ms(k);
    LIST_FOR_EACH_SAFE (&k->ops, n) {
        struct km_op *op = list_entry(n, struct km_op, link);
        if (op->deadline_ms && op->deadline_ms <= now)
            km_op_finish(op, -ETIMEDOUT, "the sandbox did not acknowledge the interrupt in %u s",
                         KM_INTERRUPT_TIMEOUT_MS / 1000);
    }
}

static void tick(void *ctx)
{
    struct km_kernel *k = ctx;
    uint64_t now = now_ms(k);
    if (k->farewell_ms && k->farewell_ms <= now) {
        km_kernel_shutdown(k, k->farewell);
        return;
    }
    ops_expire(k);
    km_peers_expire(k);
    complete_halves(k);
    if (k->start_deadline_ms && k->start_deadline_ms <= now) {
        char text[160];
        uint64_t limit = k->in_place ? k->m->cfg.restart_timeout_ms : k->m->cfg.start_timeout_ms;
        snprintf(text, sizeof(text), "kernel %s was not ready within %" PRIu64 " s", k->spec,
                 limit / 1000);
        km_kernel_failed(k, -ETIMEDOUT, text);
    }
    km_kernel_arm(k);
}

/* ---- making and freeing ---- */

struct km_kernel *km_kernel_new(struct km_manager *m, const struct km_start *s,
                                const char *public_spec, const struct km_spec_ref *ref)
{
    struct km_kernel *k = xnew(struct km_kernel);
    k->m = m;
    sm_init(&k->sm, &km_kernel_sm, KM_K_NEW);
    if (s->kernel_id && *s->kernel_id)
        snprintf(k->id, sizeof(k->id), "%s", s->kernel_id);
    else
        id_uuid4(k->id);
    log_ctx_init(&k->log_ctx, &m->log_ctx);
    log_ctx_add(&k->log_ctx, "kernel", k->id);
    k->spec = xstrdup(public_spec);
    k->template_name = xstrdup(ref->template->name);
    k->guest_spec = xstrdup(ref->guest_name);
    k->principal = xstrdup(s->principal ? s->principal : "");
    k->cwd = xstrdup(s->cwd);
    k->env = json_incref(s->env);
    k->tier_floor = s->tier_floor;
    k->memory_mb = ref->template->memory_mb;
    k->first_start = true;
    k->started_us = k->last_activity_us = loop_wall_us(m->loop);
    id_uuid4(k->session);
    km_state_set(k, "starting");
    km_log_init(&k->log, m->cfg.log_bytes_max, m->cfg.replay_bytes_max, m->cfg.coalesce_max);
    km_router_init(&k->router);
    struct list *lists[] = { &k->clients, &k->peers,  &k->wakes,      &k->urgent,
                             &k->outbox,  &k->inputs, &k->executions, &k->ops };
    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++)
        list_init(lists[i]);
    buf_init(&k->raw[0], 16);
    buf_init(&k->raw[1], 16);
    k->timer = loop_timer_new(m->loop, tick, k);
    list_push_back(&m->kernels, &k->link);
    map_put(m->by_id, k->id, k);
    m->n_kernels++;
    metric_set(m->met.running, (double)m->n_kernels);
    return k;
}

static void kernel_free(void *ctx)
{
    struct km_kernel *k = ctx;
    km_log_fini(&k->log);
    km_router_fini(&k->router);
    buf_fini(&k->raw[0]);
    buf_fini(&k->raw[1]);
    jp_msg_unref(k->raw_parent);
    json_decref(k->env);
    free(k->spec);
    free(k->template_name);
    free(k->guest_spec);
    free(k->principal);
    free(k->cwd);
    free(k->info);
    free(k->reason);
    free(k->farewell);
    free(k);
}

/* ---- the sandbox ---- */

static void box_release(struct km_kernel *k)
{
    struct km_box *box = TAKE_PTR(k->box);
    k->ungranted = 0;
    if (!box)
        return;
    box->kernel = NULL;
    vm_release(box->vm, k->m->cfg.shutdown_grace_ms);
}

/* Have our kernel started beside (or instead of) the one that the template brought along. */
static void start_process(struct km_kernel *k)
{
    struct vm *vm = k->box->vm;
    CLEANUP(json_decrefp) json_t *req = json_object();
    json_object_set_new(req, "spec", json_string(k->guest_spec));
    json_object_set_new(req, "env", k->env ? json_incref(k->env) : json_object());
    json_object_set_new(req, "cwd", k->cwd ? json_string(k->cwd) : json_null());
    CLEANUP(freep) char *text = json_dumps(req, JSON_COMPACT);
    if (vm->info.kernel_stream) { /* not wanted: its memory goes back */
        static const char stop[] = "{\"id\":0,\"op\":\"stop\"}";
        struct slice part = SLICE_LIT(stop);
        vm_send(vm, GL_KERNEL_CTL, vm->info.kernel_stream, &part, 1);
    }
    k->stream = vm->info.kernel_stream == 1 ? 2 : 1;
    struct slice part = slice_str(text);
    int r = text ? vm_send(vm, GL_KERNEL_START, k->stream, &part, 1) : -EINVAL;
    if (r < 0)
        km_kernel_failed(k, r, "the sandbox took no request to start a kernel");
}

static void box_up(void *ctx)
{
    struct km_box *box = ctx;
    struct km_kernel *k = box->kernel;
    box->up = true;
    if (!k || km_state(k) != KM_K_STARTING)
        return;
    const struct vm_info *vi = &box->vm->info;
    if (vi->kernel_stream && vi->kernel_spec && !strcmp(vi->kernel_spec, k->guest_spec)) {
        k->stream = vi->kernel_stream;
        km_kernel_ready(k, slice_str(vi->kernel_info));
    } else {
        start_process(k);
    }
}

static void box_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct km_box *box = ctx;
    if (box->kernel && box->up)
        km_guest_message(box->kernel, type, stream, payload);
}

static void box_writable(void *ctx, uint32_t stream)
{
    struct km_box *box = ctx;
    if (box->kernel && box->kernel->stream == stream)
        km_flush_out(box->kernel);
}

static void box_down(void *ctx, const struct vm_exit *why)
{
    struct km_box *box = ctx;
    struct km_manager *m = box->m;
    struct km_kernel *k = box->kernel;
    char text[300];
    list_remove(&box->link);
    free(box);
    if (k) {
        k->box = NULL;
        k->ungranted = 0;
        snprintf(text, sizeof(text), "the sandbox ended: %s",
                 why->text[0] ? why->text : "no reason given");
        if (km_state(k) == KM_K_STARTING)
            km_kernel_failed(k, why->reason == VM_EXIT_DEADLINE ? -ETIMEDOUT : -EIO, text);
        else
            km_kernel_died(k, text, true);
    }
    km_manager_settle(m);
}

static const struct vm_events box_events = { box_up, box_message, box_writable, box_down };

int km_kernel_acquire(struct km_kernel *k, struct err *e)
{
    struct km_manager *m = k->m;
    struct km_box *box = xnew(struct km_box);
    struct vm_request req = { .template_name = k->template_name,
                              .spec = k->guest_spec,
                              .cwd = k->cwd,
                              .env = k->env,
                              .tier_floor = k->tier_floor };
    box->m = m;
    box->kernel = k;
    int r = vm_acquire(m->vms, &req, &box_events, box, &box->vm, e);
    if (r < 0) {
        free(box);
        return r;
    }
    list_push_back(&m->boxes, &box->link);
    k->box = box;
    k->stream = 0;
    k->in_place = false;
    k->start_us = loop_now_us(m->loop);
    k->start_deadline_ms = now_ms(k) + m->cfg.start_timeout_ms;
    k->said_starting = false;
    sm_move(&k->sm, KM_K_STARTING);
    metric_add(m->met.starts, 1);
    km_kernel_arm(k);
    return 0;
}

/* ---- ready, dead, closed ---- */

void km_kernel_ready(struct km_kernel *k, struct slice info)
{
    struct km_metrics *met = &k->m->met;
    if (info.n && info.n <= KM_INFO_MAX && jp_json_is_object(info)) {
        free(k->info);
        k->info = slice_dup(info);
    }
    sm_move(&k->sm, KM_K_READY);
    k->first_start = k->auto_restart = k->in_place = false;
    k->ready_ms = now_ms(k);
    k->start_deadline_ms = 0;
    free(TAKE_PTR(k->reason));
    metric_observe(met->start_seconds, (double)(loop_now_us(k->m->loop) - k->start_us) / 1e6);
    if (!k->said_starting)
        km_synth_status(k, "starting", SLICE_NULL, 0);
    k->said_starting = true;
    km_state_set(k, "idle");
    k->last_activity_us = loop_wall_us(k->m->loop);
    km_synth_status(k, "idle", SLICE_NULL, 0);
    log_info(&k->log_ctx, "kernel %s is ready", k->spec);
    km_ops_finish(k, KM_OP_START, 0, "");
    km_ops_finish(k, KM_OP_RESTART, 0, "");
    km_flush_out(k);
    km_kernel_arm(k);
}

void km_kernel_answer_all(struct km_kernel *k, const char *text)
{
    km_out_drop(k, k->gen);
    LIST_FOR_EACH_SAFE (&k->router.order, n) {
        struct km_req *q = list_entry(n, struct km_req, link);
        if (q->gen < k->gen)
            km_synth_answer(k, q, "DeadKernelError", text);
    }
    km_unthrottle_soon(k);
}

void km_kernel_process_ended(struct km_kernel *k, const char *text)
{
    km_kernel_answer_all(k, text);
    /* What the link still holds was meant for the old process. */
    if (k->box && k->box->up && vm_queued(k->box->vm, k->stream)) {
        vm_close_stream(k->box->vm, k->stream);
        k->ungranted = 0;
    }
    km_inputs_drop(k, NULL);
    buf_clear(&k->raw[0]);
    buf_clear(&k->raw[1]);
    jp_msg_unref(TAKE_PTR(k->raw_parent));
    k->said_starting = false;
}

static void become_dead(struct km_kernel *k, int code, const char *text)
{
    k->gen++;
    km_kernel_process_ended(k, text);
    box_release(k);
    sm_move(&k->sm, KM_K_DEAD);
    k->start_deadline_ms = 0;
    k->auto_restart = false;
    free(k->reason);
    k->reason = xstrdup(text);
    km_state_set(k, "dead");
    km_synth_status(k, "dead", SLICE_NULL, 0);
    log_warn(&k->log_ctx, "kernel is dead: %s", text);
    km_ops_finish(k, KM_OP_INTERRUPT, -ESRCH, text);
    km_ops_finish(k, KM_OP_RESTART, code, text);
    km_kernel_arm(k);
}

/* A restart inside the sandbox did not work out: a fresh sandbox under the same id is what the user
 * wants more than a dead kernel. The files of the old one are gone with it; clients are told. */
static bool move_to_fresh_sandbox(struct km_kernel *k, const char *text)
{
    struct err e = { 0 };
    struct buf b;
    char line[700];
    if (!k->in_place || !k->box)
        return false;
    log_warn(&k->log_ctx, "%s; taking a fresh sandbox", text);
    km_kernel_process_ended(k, "the kernel was restarted");
    box_release(k);
    if (km_kernel_acquire(k, &e) < 0) {
        log_warn(&k->log_ctx, "no fresh sandbox: %s", e.msg);
        return false;
    }
    km_state_set(k, "restarting");
    snprintf(line, sizeof(line),
             "[cellvisor] The kernel could not be started again in its sandbox (%.400s). It gets a "
             "fresh one: files "
             "that were written in the old one are gone.\n",
             text);
    buf_init(&b, 8192);
    buf_append_str(&b, "{\"name\": \"stderr\", \"text\": ");
    buf_append_json_string(&b, slice_str(line));
    buf_append_byte(&b, '}');
    km_synth(k, JP_IOPUB, "stream", SLICE_NULL, buf_cstr(&b), 0);
    buf_fini(&b);
    return true;
}

void km_kernel_failed(struct km_kernel *k, int code, const char *text)
{
    metric_add(k->m->met.start_failures, 1);
    if (k->first_start) {
        log_warn(&k->log_ctx, "start failed: %s", text);
        km_ops_finish(k, KM_OP_START, code, text);
        km_kernel_close(k, KM_CLOSE_DELETED, text);
    } else if (!move_to_fresh_sandbox(k, text)) {
        become_dead(k, code, text);
    }
}

/* Ask the guest for a new process on the same stream. */
static void ask_restart(struct km_kernel *k)
{
    k->restart_ctl = ++k->next_ctl;
    k->in_place = true;
    k->start_us = loop_now_us(k->m->loop);
    k->start_deadline_ms = now_ms(k) + k->m->cfg.restart_timeout_ms;
    km_state_set(k, "restarting");
    metric_add(k->m->met.restarts, 1);
    int r = km_kernel_ctl(k, k->restart_ctl, "restart");
    if (r < 0)
        km_kernel_failed(k, r, "the sandbox took no request to restart the kernel");
    else
        km_kernel_arm(k);
}

void km_kernel_died(struct km_kernel *k, const char *text, bool sandbox_gone)
{
    const struct km_config *cfg = &k->m->cfg;
    metric_add(k->m->met.deaths, 1);
    if (k->ready_ms && now_ms(k) - k->ready_ms >= KM_STABLE_MS)
        k->restarts_row = 0;
    k->ready_ms = 0;
    if (sandbox_gone || k->restarts_row >= cfg->restart_limit) {
        become_dead(k, -EIO, text);
        return;
    }
    log_warn(&k->log_ctx, "kernel ended: %s; restarting it", text);
    k->gen++;
    km_kernel_process_ended(k, text);
    km_ops_finish(k, KM_OP_INTERRUPT, -ESRCH, text);
    k->restarts_row++;
    k->restarts++;
    k->auto_restart = true;
    sm_move(&k->sm, KM_K_RESTARTING);
    km_synth_status(k, "restarting", SLICE_NULL, 0);
    ask_restart(k);
}

void km_kernel_close(struct km_kernel *k, enum km_close_why why, const char *text)
{
    struct km_manager *m = k->m;
    struct list_node *n;
    if (km_state(k) == KM_K_CLOSED)
        return;
    sm_move(&k->sm, KM_K_CLOSED);
    log_info(&k->log_ctx, "kernel closed: %s", text);
    list_remove(&k->link);
    map_del(m->by_id, k->id);
    m->n_kernels--;
    metric_set(m->met.running, (double)m->n_kernels);
    loop_timer_free(TAKE_PTR(k->timer));
    km_ops_drop_kernel(k);
    while ((n = list_first(&k->clients))) {
        struct km_client *c = list_entry(n, struct km_client, link);
        km_client_detach(c);
        c->ops->closed(c, why, text);
    }
    while ((n = list_first(&k->peers)))
        km_peer_free(k, list_entry(n, struct km_peer, link));
    km_executions_forget(k);
    km_inputs_drop(k, NULL);
    km_out_drop(k, UINT32_MAX);
    box_release(k);
    loop_cancel_deferred(m->loop, k);
    loop_defer(m->loop, kernel_free, k);
}

/* ---- public ---- */

int km_kernel_ctl(struct km_kernel *k, uint64_t id, const char *op)
{
    char text[80];
    if (!k->box || !k->box->up)
        return -ENOTCONN;
    snprintf(text, sizeof(text), "{\"id\":%" PRIu64 ",\"op\":\"%s\"}", id, op);
    struct slice part = slice_str(text);
    return vm_send(k->box->vm, GL_KERNEL_CTL, k->stream, &part, 1);
}

void km_kernel_info(const struct km_kernel *k, struct km_kernel_info *ret)
{
    unsigned connections = 0;
    LIST_FOR_EACH (&k->clients, n)
        connections += !list_entry(n, struct km_client, link)->peer->internal;
    *ret = (struct km_kernel_info) { .id = k->id,
                                     .spec = k->spec,
                                     .principal = k->principal,
                                     .execution_state = k->execution_state,
                                     .last_activity_us = k->last_activity_us,
                                     .started_us = k->started_us,
                                     .connections = connections,
                                     .reason = k->reason,
                                     .vm = k->box ? &k->box->vm->info : NULL,
                                     .kernel_info = k->info,
                                     .restarts = k->restarts };
}

void km_kernel_interrupt_for(struct km_kernel *k, const char *msg_id, km_done_fn fn, void *ctx,
                             struct km_op **ret_op)
{
    struct km_op *op = km_op_new(k->m, k, KM_OP_INTERRUPT, fn, ctx);
    op->msg_id = xstrdup(msg_id);
    if (ret_op)
        *ret_op = op;
    switch (km_state(k)) {
    case KM_K_READY: {
        op->ctl_id = ++k->next_ctl;
        op->deadline_ms = now_ms(k) + KM_INTERRUPT_TIMEOUT_MS;
        int r = km_kernel_ctl(k, op->ctl_id, "interrupt");
        if (r < 0)
            km_op_finish(op, r, "the sandbox takes no interrupt now: %s", strerror(-r));
        km_kernel_arm(k);
        return;
    }
    case KM_K_STARTING:
    case KM_K_RESTARTING:
        km_op_finish(op, 0, " "); /* nothing runs that could be interrupted */
        return;
    case KM_K_DEAD:
    case KM_K_CLOSED:
    case KM_K_NEW:
        break;
    }
    km_op_finish(op, -ESRCH, "the kernel is dead%s%s", k->reason ? ": " : "",
                 k->reason ? k->reason : "");
}

void km_kernel_interrupt(struct km_kernel *k, km_done_fn fn, void *ctx, struct km_op **ret_op)
{
    km_kernel_interrupt_for(k, NULL, fn, ctx, ret_op);
}

void km_kernel_restart(struct km_kernel *k, km_done_fn fn, void *ctx, struct km_op **ret_op)
{
    struct err e = { 0 };
    struct km_op *op = km_op_new(k->m, k, KM_OP_RESTART, fn, ctx);
    if (ret_op)
        *ret_op = op;
    switch (km_state(k)) {
    case KM_K_NEW:
    case KM_K_STARTING:
    case KM_K_RESTARTING:
        break; /* a fresh process is on its way already */
    case KM_K_READY:
        k->gen++;
        k->restarts++;
        k->restarts_row = 0;
        sm_move(&k->sm, KM_K_RESTARTING);
        ask_restart(k);
        break;
    case KM_K_DEAD:
        k->gen++;
        k->restarts++;
        k->restarts_row = 0;
        if (km_kernel_acquire(k, &e) < 0)
            km_op_finish(op, e.code, "no sandbox for the restart: %s", e.msg);
        else
            km_state_set(k, "restarting");
        break;
    case KM_K_CLOSED:
        km_op_finish(op, -ESRCH, "the kernel is gone");
        break;
    }
}

void km_kernel_farewell(struct km_kernel *k, const char *text)
{
    if (k->farewell)
        return;
    k->farewell = xstrdup(text);
    k->farewell_ms = now_ms(k) + KM_FAREWELL_MS;
    km_kernel_arm(k);
}

void km_kernel_shutdown(struct km_kernel *k, const char *reason)
{
    km_kernel_close(k, KM_CLOSE_DELETED, reason ? reason : "shut down");
}
