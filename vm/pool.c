#include "vm/pool.h"
#include "common/cleanup.h"
#include "common/mem.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- counting ---- */

uint64_t vm_pool_cost_mb(const struct vm_pool *p)
{
    return p->tmpl ? p->tmpl->memory_mb + VM_OVERHEAD_MB : VM_LOCAL_MB;
}

struct vm_pool_counts vm_pool_count(const struct vm_pool *p)
{
    struct vm_pool_counts c = { 0 };

    LIST_FOR_EACH (&p->guests, n) {
        const struct vm_guest *g = list_entry(n, struct vm_guest, link);
        enum vm_guest_state s = vm_guest_state(g);

        if (s == VM_GUEST_STOPPING)
            c.stopping++;
        else if (g->claimed)
            *(s == VM_GUEST_NEW       ? &c.queued
              : s == VM_GUEST_RUNNING ? &c.running
                                      : &c.starting) += 1;
        else if (s == VM_GUEST_PARKED)
            c.parked++;
        else if (g->goal == VM_GOAL_DEFERRED)
            c.deferred++;
        else
            c.refilling++;
    }
    return c;
}

/* The host-wide numbers follow from all pools' lists; each pool adds its own. */
static void budget_add(struct vm_pool *p, int vms, int users)
{
    struct vm_budget *b = p->budget;
    int64_t cost = (int64_t)vm_pool_cost_mb(p);

    b->vms = (unsigned)((int)b->vms + vms);
    b->users = (unsigned)((int)b->users + users);
    b->used_mb = (uint64_t)((int64_t)b->used_mb + vms * cost);
    b->users_mb = (uint64_t)((int64_t)b->users_mb + users * cost);
}

static bool fits(const struct vm_pool *p, unsigned vms, uint64_t mb)
{
    const struct vm_budget *b = p->budget;

    return (!b->max_vms || vms < b->max_vms) && mb + vm_pool_cost_mb(p) <= b->limit_mb;
}

/* ---- callbacks of the guests ---- */

static void on_changed(void *owner, struct vm_guest *g)
{
    struct vm_pool *p = owner;
    enum vm_guest_state s = vm_guest_state(g);

    if (s == VM_GUEST_PARKED || s == VM_GUEST_RUNNING) {
        if (p->failures)
            log_info(&p->class.log, "starts work again");
        p->failures = 0;
    }
    if (s == VM_GUEST_PARKED)
        p->refill_ms = (double)(loop_now_ms(p->class.loop) - g->born_ms);
    p->ops->kick(p->host);
}

static void note_failure(struct vm_pool *p, const char *text)
{
    unsigned shift = p->failures < 10 ? p->failures : 10;
    uint64_t wait = (uint64_t)VM_POOL_BACKOFF_MS << shift;

    if (wait > VM_POOL_BACKOFF_MAX_MS)
        wait = VM_POOL_BACKOFF_MAX_MS;
    p->failures++;
    p->retry_at_ms = loop_now_ms(p->class.loop) + wait;
    snprintf(p->last_error, sizeof(p->last_error), "%s", text);
    log_warn(&p->class.log, "start failed (%u in a row): %s; next try in %" PRIu64 " ms",
             p->failures, text, wait);
}

static void on_gone(void *owner, struct vm_guest *g, const struct vm_exit *why)
{
    struct vm_pool *p = owner;

    list_remove(&g->link);
    budget_add(p, -1, g->claimed ? -1 : 0);
    metric_add(p->exits[why->reason], 1);
    if (!g->up && why->reason != VM_EXIT_RELEASED)
        note_failure(p, why->text);
    p->ops->kick(p->host);
}

static const struct vm_guest_ops guest_ops = { on_changed, on_gone };

/* ---- making and ending ---- */

static struct vm_guest *add_guest(struct vm_pool *p, enum vm_guest_goal goal)
{
    struct vm_guest *g = vm_guest_new(&p->class, goal);

    list_push_back(&p->guests, &g->link);
    budget_add(p, 1, 0);
    return g;
}

static void make_metrics(struct vm_pool *p)
{
    static const double bounds[] = { 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15,
                                     0.25,  0.5,   1,     2,    5,    10,   30 };
    static const char *const stages[VM_STAGES] = { "queue",  "spawn",  "load",
                                                   "resume", "assign", "total" };
    static const char *const states[] = { "parked", "deferred", "starting", "running" };
    static const char *const kinds[] = { "parked", "deferred" };
    char labels[160];

    for (unsigned i = 0; i < VM_STAGES; i++) {
        snprintf(labels, sizeof(labels), "stage=\"%s\"", stages[i]);
        p->class.stage_seconds[i] = metrics_histogram(p->metrics, "cellvisor_vm_start_seconds",
                                                      labels, "Time of each stage of a VM's start",
                                                      bounds, sizeof(bounds) / sizeof(*bounds));
    }
    for (unsigned i = 0; i < 4; i++) {
        snprintf(labels, sizeof(labels), "template=\"%.64s\",state=\"%s\"", p->name, states[i]);
        p->gauges[i] =
            metrics_gauge(p->metrics, "cellvisor_pool_vms", labels, "VMs by template and state");
    }
    for (unsigned i = 0; i < 2; i++) {
        snprintf(labels, sizeof(labels), "template=\"%.64s\",from=\"%s\"", p->name, kinds[i]);
        p->hits[i] = metrics_counter(p->metrics, "cellvisor_pool_hits_total", labels,
                                     "Requests that a pooled VM served");
    }
    snprintf(labels, sizeof(labels), "template=\"%.64s\"", p->name);
    p->hits[2] = metrics_counter(p->metrics, "cellvisor_pool_misses_total", labels,
                                 "Requests that needed a new VM");
    for (unsigned i = VM_EXIT_RELEASED; i <= VM_EXIT_DEADLINE; i++) {
        snprintf(labels, sizeof(labels), "reason=\"%s\"", vm_exit_reason_name(i));
        p->exits[i] =
            metrics_counter(p->metrics, "cellvisor_vm_exits_total", labels, "Ended VMs by reason");
    }
}

struct vm_pool *vm_pool_new(const struct vm_pool_spec *s)
{
    struct vm_pool *p = xnew(struct vm_pool);
    struct vm_template *t = s->tmpl;

    p->name = xstrdup(s->name);
    p->why_not = xstrdup(s->why_not);
    p->tmpl = t;
    p->local = s->local;
    p->specs = t ? json_incref(t->specs) : s->specs;
    p->budget = s->budget;
    p->ops = s->ops;
    p->host = s->host;
    p->metrics = s->metrics;
    list_init(&p->guests);
    p->class = (struct vm_guest_class) {
        .loop = s->loop,
        .backend = s->backend,
        .tmpl = t,
        .mem_fd = -1,
        .name = p->name,
        .tier = s->local                        ? VM_TIER_LOCAL
                : t && t->accel == VM_ACCEL_KVM ? VM_TIER_KVM
                                                : VM_TIER_TCG,
        .default_spec =
            t ? t->default_spec : json_string_value(json_object_get(p->specs, "default")),
        .start_timeout_ms = 30000,
        .ops = &guest_ops,
        .owner = p,
    };
    log_ctx_init(&p->class.log, s->log);
    log_ctx_add(&p->class.log, "template", s->name);
    if (s->metrics)
        make_metrics(p);
    return p;
}

void vm_pool_free(struct vm_pool *p)
{
    struct list_node *n;

    if (!p)
        return;
    while ((n = list_first(&p->guests))) {
        struct vm_guest *g = list_entry(n, struct vm_guest, link);

        budget_add(p, -1, g->claimed ? -1 : 0);
        vm_guest_free(g);
    }
    list_remove(&p->link);
    if (p->class.mem_fd >= 0)
        close(p->class.mem_fd);
    vm_template_free(p->tmpl);
    json_decref(p->specs);
    free(p->name);
    free(p->why_not);
    free(p);
}

/* ---- users ---- */

/* How near a VM that nobody has is to being usable; 0: not for this. A VM that is being warmed up
 * is only taken when nothing new may be started (last_resort): a fresh one is up sooner. */
static unsigned nearness(const struct vm_guest *g, bool last_resort)
{
    bool link_lost = vm_guest_state(g) >= VM_GUEST_LINKING && !g->channel;

    if (g->claimed || link_lost)
        return 0;
    switch (vm_guest_state(g)) {
    case VM_GUEST_PARKED:
        return 7;
    case VM_GUEST_PREPARING:
        return 6;
    case VM_GUEST_LINKING:
        return 5;
    case VM_GUEST_LOADING:
        return 4;
    case VM_GUEST_DEFERRED:
        return 3;
    case VM_GUEST_SPAWNING:
        return 2;
    case VM_GUEST_RESUMING:
        return last_resort || !g->class->tmpl ? 1 : 0;
    default:
        return 0;
    }
}

static struct vm_guest *pick(struct vm_pool *p, const struct vm_request *r, bool last_resort)
{
    struct vm_guest *best = NULL;
    unsigned best_nearness = 0;

    /* A local shim of the pool holds a kernel of the default kind; for another kind a fresh one is
     * better. A VM holds the template's kernel in any case. */
    if (p->local && r->spec && p->class.default_spec && strcmp(r->spec, p->class.default_spec) != 0)
        return NULL;
    LIST_FOR_EACH (&p->guests, n) {
        struct vm_guest *g = list_entry(n, struct vm_guest, link);
        unsigned near = nearness(g, last_resort);

        if (near > best_nearness) {
            best = g;
            best_nearness = near;
        }
    }
    return best;
}

static int refuse_full(const struct vm_pool *p, struct err *e)
{
    const struct vm_budget *b = p->budget;

    if (b->max_vms && b->users >= b->max_vms)
        return err_set(e, -EAGAIN,
                       "no capacity: %u sandboxes run or start, at most %u are allowed "
                       "(max_vms); end one and try again",
                       b->users, b->max_vms);
    return err_set(e, -EAGAIN,
                   "no capacity: %u sandboxes use %" PRIu64 " of the %" PRIu64 " MB set aside "
                   "for them and one of \"%s\" needs %" PRIu64 " MB; end one and try again",
                   b->users, b->users_mb, b->limit_mb, p->name, vm_pool_cost_mb(p));
}

static void count_origin(struct vm_pool *p, const struct vm_guest *g)
{
    bool parked = vm_guest_state(g) == VM_GUEST_PARKED, pooled = vm_guest_state(g) != VM_GUEST_NEW;

    *(parked ? &p->hits_parked : pooled ? &p->hits_deferred : &p->misses) += 1;
    metric_add(p->hits[parked ? 0 : pooled ? 1 : 2], 1);
    if (!parked) {
        p->last_miss_ms = loop_now_ms(p->class.loop);
        if (p->want_min && p->want < p->want_max)
            p->want++;
    }
}

int vm_pool_acquire(struct vm_pool *p, const struct vm_request *r, const struct vm_events *ev,
                    void *ctx, struct vm **ret, struct err *e)
{
    struct vm_guest *g;

    if (p->why_not)
        return err_set(e, -ESTALE, "%s", p->why_not);
    if (p->class.tier < r->tier_floor)
        return err_set(e, -EPERM, "template \"%s\" runs in tier %s here, at least %s was asked for",
                       p->name, vm_tier_name(p->class.tier), vm_tier_name(r->tier_floor));
    if (!fits(p, p->budget->users, p->budget->users_mb))
        return refuse_full(p, e);
    g = pick(p, r, !fits(p, p->budget->vms, p->budget->used_mb));
    if (!g && p->failures >= VM_POOL_REFUSE_AFTER && vm_pool_backoff_ms(p))
        return err_set(e, -EAGAIN,
                       "template \"%s\" failed to start %u times in a row (%.200s); next try in "
                       "%" PRIu64 " ms",
                       p->name, p->failures, p->last_error, vm_pool_backoff_ms(p));
    if (!g)
        g = add_guest(p, VM_GOAL_RUN);
    p->active = true;
    count_origin(p, g);
    budget_add(p, 0, 1);
    vm_guest_claim(g, r, ev, ctx);
    *ret = &g->vm;
    p->ops->kick(p->host);
    return 0;
}

struct vm_guest *vm_pool_next_queued(const struct vm_pool *p)
{
    LIST_FOR_EACH (&p->guests, n) {
        struct vm_guest *g = list_entry(n, struct vm_guest, link);

        if (g->claimed && vm_guest_state(g) == VM_GUEST_NEW && !g->releasing && !g->why.text[0])
            return g;
    }
    return NULL;
}

void vm_pool_start_queued(struct vm_pool *p, struct vm_guest *g)
{
    struct err e;

    (void)p;
    if (vm_guest_start(g, &e) < 0)
        vm_guest_fail(g, VM_EXIT_START_FAILED, "%.190s", e.msg);
}

bool vm_pool_startable(const struct vm_pool *p)
{
    return !p->why_not && !p->retired && (p->local || p->class.mem_fd >= 0);
}

/* ---- the pool itself ---- */

uint64_t vm_pool_backoff_ms(const struct vm_pool *p)
{
    uint64_t now = loop_now_ms(p->class.loop);

    return p->failures && p->retry_at_ms > now ? p->retry_at_ms - now : 0;
}

bool vm_pool_refill(struct vm_pool *p)
{
    struct vm_pool_counts c = vm_pool_count(p);
    enum vm_guest_goal goal;
    struct vm_guest *g;
    struct err e;

    if (!vm_pool_startable(p) || !p->active || !p->class.default_spec || vm_pool_backoff_ms(p) ||
        !fits(p, p->budget->vms, p->budget->used_mb))
        return false;
    if (c.parked + c.refilling < p->want)
        goal = VM_GOAL_PARKED;
    else if (!p->local && c.deferred < p->want_deferred)
        goal = VM_GOAL_DEFERRED;
    else
        return false;
    g = add_guest(p, goal);
    if (vm_guest_start(g, &e) < 0)
        vm_guest_fail(g, VM_EXIT_START_FAILED, "%.190s", e.msg);
    return true;
}

bool vm_pool_evict(struct vm_pool *p)
{
    LIST_FOR_EACH (&p->guests, n) {
        struct vm_guest *g = list_entry(n, struct vm_guest, link);

        if (!g->claimed && vm_guest_state(g) != VM_GUEST_STOPPING && !g->why.text[0]) {
            vm_guest_fail(g, VM_EXIT_RELEASED, "made room");
            return true;
        }
    }
    return false;
}

void vm_pool_trim(struct vm_pool *p)
{
    uint64_t now = loop_now_ms(p->class.loop);
    struct vm_pool_counts c;

    if (p->want > p->want_min && now - p->last_miss_ms >= VM_POOL_DECAY_MS) {
        p->want--;
        p->last_miss_ms = now;
    }
    c = vm_pool_count(p);
    LIST_FOR_EACH_SAFE (&p->guests, n) {
        struct vm_guest *g = list_entry(n, struct vm_guest, link);

        if (c.parked <= p->want)
            return;
        if (!g->claimed && vm_guest_state(g) == VM_GUEST_PARKED) {
            vm_guest_fail(g, VM_EXIT_RELEASED, "no longer needed");
            c.parked--;
        }
    }
}

void vm_pool_drain(struct vm_pool *p, bool users, unsigned grace_ms)
{
    p->want = p->want_min = p->want_max = p->want_deferred = 0;
    LIST_FOR_EACH_SAFE (&p->guests, n) {
        struct vm_guest *g = list_entry(n, struct vm_guest, link);

        if (!g->claimed)
            vm_guest_fail(g, VM_EXIT_RELEASED, "released");
        else if (users)
            vm_release(&g->vm, grace_ms);
    }
}

void vm_pool_publish(struct vm_pool *p)
{
    struct vm_pool_counts c = vm_pool_count(p);

    metric_set(p->gauges[0], c.parked);
    metric_set(p->gauges[1], c.deferred);
    metric_set(p->gauges[2], c.refilling + c.queued + c.starting);
    metric_set(p->gauges[3], c.running);
}
