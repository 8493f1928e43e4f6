/* The vm_service of this machine. It owns the budget and decides, whenever something has changed
 * (kick), in this order: user starts that wait, room for them, refills of the pools. User starts
 * have a limit of their own because on few cores many starts at once make all of them late; refills
 * wait while users start, but not for ever. */
#include "vm/host.h"
#include "common/cleanup.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/proc.h"
#include "vm/pool.h"
#include "vm/qemu.h"
#include "vm/rundir.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TICK_MS 1000u
#define REFILL_PATIENCE_MS 2000u /* refills wait for user starts at most this long */
#define SPECS_MAX (8u << 20)

struct vm_host {
    struct vm_service service; /* first */
    struct loop *loop;
    struct log_ctx log;
    struct metrics *metrics;
    struct vm_host_config cfg; /* strings are ours */
    struct vm_accel_verdict verdict;
    struct vm_rundir rundir;
    struct vm_backend *qemu, *local;
    struct vm_budget budget;
    struct list pools, retired;
    struct vm_template_desc *descs;
    size_t n_descs;
    struct loop_timer *tick;
    uint64_t last_refill_ms;
    unsigned jobs; /* memory loads on pool threads */
    bool kicked, closing, closed_due;
    void (*closed)(void *ctx);
    void *closed_ctx;
};

void vm_host_config_defaults(struct vm_host_config *c)
{
    *c = (struct vm_host_config) {
        .accel = VM_ACCEL_AUTO,
        .pool_parked = 2,
        .pool_deferred = 1,
        .pool_max = 8,
        .start_timeout_ms = 30000,
    };
}

/* ---- balance ---- */

static void balance(void *ctx);

static void kick(void *ctx)
{
    struct vm_host *h = ctx;

    if (h->kicked)
        return;
    h->kicked = true;
    loop_defer(h->loop, balance, h);
}

static const struct vm_pool_ops pool_ops = { kick };

/* RAM of a template is copied into its memfd on a pool thread; starts wait for it. */
struct memory_job {
    struct vm_host *host;
    struct vm_pool *pool;
    int fd;
    struct err e;
};

static void memory_work(void *ctx)
{
    struct memory_job *j = ctx;

    if (vm_template_open_memory(j->pool->tmpl, &j->fd, &j->e) < 0)
        j->fd = -1;
}

static void fail_queued(struct vm_pool *p, const char *why)
{
    struct vm_guest *g;

    while ((g = vm_pool_next_queued(p)))
        vm_guest_fail(g, VM_EXIT_START_FAILED, "%.190s", why);
}

static void memory_done(void *ctx)
{
    struct memory_job *j = ctx;
    struct vm_pool *p = j->pool;

    p->memory_loading = false;
    j->host->jobs--;
    if (j->fd >= 0) {
        p->class.mem_fd = j->fd;
        log_info(&p->class.log, "snapshot in memory, %" PRIu64 " MB",
                 p->tmpl->memory_bytes_used >> 20);
    } else {
        p->why_not = xstrdup(j->e.msg);
        log_error(&p->class.log, "%s", j->e.msg);
        fail_queued(p, j->e.msg);
    }
    kick(j->host);
    free(j);
}

static void load_memory(struct vm_host *h, struct vm_pool *p)
{
    struct memory_job *j;

    if (p->local || p->why_not || p->retired || p->class.mem_fd >= 0 || p->memory_loading)
        return;
    if (!vm_pool_next_queued(p) && !(p->active && (p->want || p->want_deferred)))
        return;
    j = xnew(struct memory_job);
    j->host = h;
    j->pool = p;
    p->memory_loading = true;
    h->jobs++;
    loop_work(h->loop, memory_work, memory_done, j);
}

static void count(struct vm_host *h)
{
    h->budget.user_starts = h->budget.refills = 0;
    LIST_FOR_EACH (&h->pools, n) {
        struct vm_pool_counts c = vm_pool_count(list_entry(n, struct vm_pool, link));

        h->budget.user_starts += c.starting;
        h->budget.refills += c.refilling;
    }
}

/* The budget counts VMs of the pools too, but those give way: end one elsewhere (or here) for each
 * start that has no room. */
static void make_room(struct vm_host *h, const struct vm_pool *p)
{
    const struct vm_budget *b = &h->budget;

    if ((!b->max_vms || b->vms <= b->max_vms) && b->used_mb <= b->limit_mb)
        return;
    LIST_FOR_EACH (&h->pools, n) {
        struct vm_pool *other = list_entry(n, struct vm_pool, link);

        if (other != p && vm_pool_evict(other))
            return;
    }
    LIST_FOR_EACH (&h->pools, n) {
        if (vm_pool_evict(list_entry(n, struct vm_pool, link)))
            return;
    }
}

static bool start_one_user(struct vm_host *h)
{
    struct vm_guest *oldest = NULL;
    struct vm_pool *pool = NULL;

    LIST_FOR_EACH (&h->pools, n) {
        struct vm_pool *p = list_entry(n, struct vm_pool, link);
        struct vm_guest *g = vm_pool_startable(p) ? vm_pool_next_queued(p) : NULL;

        if (g && (!oldest || g->claim_us < oldest->claim_us)) {
            oldest = g;
            pool = p;
        }
    }
    if (!oldest)
        return false;
    make_room(h, pool);
    vm_pool_start_queued(pool, oldest);
    return true;
}

static bool start_one_refill(struct vm_host *h)
{
    LIST_FOR_EACH (&h->pools, n) {
        if (vm_pool_refill(list_entry(n, struct vm_pool, link))) {
            h->last_refill_ms = loop_now_ms(h->loop);
            return true;
        }
    }
    return false;
}

static void tell_closed(void *ctx)
{
    struct vm_host *h = ctx;

    h->closed(h->closed_ctx);
}

static bool empty(const struct vm_host *h)
{
    LIST_FOR_EACH (&h->pools, n) {
        if (!list_empty(&list_entry(n, struct vm_pool, link)->guests))
            return false;
    }
    LIST_FOR_EACH (&h->retired, n) {
        if (!list_empty(&list_entry(n, struct vm_pool, link)->guests))
            return false;
    }
    return h->jobs == 0;
}

static void tidy_retired(struct vm_host *h)
{
    LIST_FOR_EACH (&h->retired, n) {
        struct vm_pool *p = list_entry(n, struct vm_pool, link);

        if (list_empty(&p->guests) && !p->memory_loading && p->class.mem_fd >= 0) {
            close(p->class.mem_fd); /* the RAM; names stay for whoever still shows them */
            p->class.mem_fd = -1;
        }
    }
}

static void balance(void *ctx)
{
    struct vm_host *h = ctx;
    uint64_t now = loop_now_ms(h->loop);

    h->kicked = false;
    if (h->closing) {
        if (!h->closed_due && empty(h)) {
            h->closed_due = true;
            loop_defer(h->loop, tell_closed, h);
        }
        return;
    }
    LIST_FOR_EACH (&h->pools, n) {
        struct vm_pool *p = list_entry(n, struct vm_pool, link);

        load_memory(h, p);
        vm_pool_trim(p);
        vm_pool_publish(p);
    }
    for (count(h); h->budget.user_starts < h->budget.max_starts && start_one_user(h); count(h))
        ;
    for (; h->budget.refills < h->budget.max_refills; count(h)) {
        if (h->budget.user_starts && now - h->last_refill_ms < REFILL_PATIENCE_MS)
            break;
        if (!start_one_refill(h))
            break;
    }
    tidy_retired(h);
}

static void on_tick(void *ctx)
{
    kick(ctx); /* backoff and decay are matters of time */
}

/* ---- the list of templates ---- */

static struct vm_pool *find_pool(const struct vm_host *h, const char *name)
{
    LIST_FOR_EACH (&h->pools, n) {
        struct vm_pool *p = list_entry(n, struct vm_pool, link);

        if (strcmp(p->name, name) == 0)
            return p;
    }
    return NULL;
}

static struct vm_pool *add_pool(struct vm_host *h, const char *name, struct vm_template *t,
                                json_t *local_specs, const char *why_not)
{
    bool local = local_specs || strcmp(name, "local") == 0;
    struct vm_pool_spec spec = {
        .loop = h->loop,
        .name = name,
        .tmpl = t,
        .specs = local_specs,
        .why_not = why_not,
        .local = local,
        .backend = local ? h->local : h->qemu,
        .budget = &h->budget,
        .metrics = h->metrics,
        .log = &h->log,
        .ops = &pool_ops,
        .host = h,
    };
    struct vm_pool *p = vm_pool_new(&spec);

    p->want_min = p->want = h->cfg.pool_parked;
    p->want_max = h->cfg.pool_max > h->cfg.pool_parked ? h->cfg.pool_max : h->cfg.pool_parked;
    p->want_deferred = h->cfg.pool_deferred;
    p->class.start_timeout_ms = h->cfg.start_timeout_ms;
    list_push_back(&h->pools, &p->link);
    if (why_not)
        log_warn(&p->class.log, "not usable: %s", why_not);
    return p;
}

static void retire(struct vm_host *h, struct vm_pool *p)
{
    list_remove(&p->link);
    p->retired = true;
    fail_queued(p, "its template was replaced while it waited");
    vm_pool_drain(p, false, 0);
    list_push_back(&h->retired, &p->link);
}

/* Bring the pool of one built template up to date. */
static void reload_one(struct vm_host *h, const char *name)
{
    struct vm_pool *old = find_pool(h, name);
    struct vm_template *t = NULL;
    struct err e;
    int r = vm_template_read(h->cfg.state_dir, name, &t, &e);

    if (r == 0 && t->accel == VM_ACCEL_KVM && h->verdict.accel != VM_ACCEL_KVM)
        r = err_set(&e, -ESTALE,
                    "its snapshot was made under KVM, which does not work here; run `cellvisor "
                    "template build %s`",
                    name);
    if (r == 0)
        r = vm_template_check(t, h->cfg.qemu_path, &e);
    if (r == 0 && old && old->tmpl && !old->why_not && strcmp(old->tmpl->hash, t->hash) == 0 &&
        strcmp(old->tmpl->fingerprint, t->fingerprint) == 0) {
        vm_template_free(t);
        return;
    }
    if (r < 0) {
        vm_template_free(t);
        t = NULL;
    }
    if (old)
        retire(h, old);
    add_pool(h, name, t, NULL, r < 0 ? e.msg : NULL);
}

static bool listed(json_t *names, const char *name)
{
    json_t *v;
    size_t i;

    json_array_foreach(names, i, v)
    {
        if (strcmp(json_string_value(v), name) == 0)
            return true;
    }
    return false;
}

/* The default template first: it is the one that people start. */
static void choose_default(struct vm_host *h)
{
    struct vm_pool *best = find_pool(h, h->cfg.template_only ? h->cfg.template_only : "python");

    LIST_FOR_EACH (&h->pools, n) {
        struct vm_pool *p = list_entry(n, struct vm_pool, link);

        if ((!best || best->why_not) && !p->why_not)
            best = p;
    }
    if (!best)
        return;
    best->active = true;
    list_remove(&best->link);
    list_push_front(&h->pools, &best->link);
}

int vm_host_reload(struct vm_host *h, struct err *e)
{
    json_t *names, *v;
    size_t i;

    if (h->cfg.local_only)
        return 0;
    names = h->cfg.template_only ? json_pack("[s]", h->cfg.template_only)
                                 : vm_template_names(h->cfg.state_dir);
    if (!json_is_array(names)) {
        json_decref(names);
        return err_set(e, -EIO, "cannot read the template store in %s", h->cfg.state_dir);
    }
    LIST_FOR_EACH_SAFE (&h->pools, n) {
        struct vm_pool *p = list_entry(n, struct vm_pool, link);

        if (!p->local && !listed(names, p->name))
            retire(h, p);
    }
    json_array_foreach(names, i, v)
    {
        reload_one(h, json_string_value(v));
    }
    json_decref(names);
    choose_default(h);
    kick(h);
    return 0;
}

/* Kernelspecs of this machine, as the shim sees them. */
static json_t *local_specs(const char *shim_path, struct err *e)
{
    const char *const argv[] = { shim_path, "--specs", NULL };
    struct proc_spec spec = { .argv = argv };
    CLEANUP(closep) int fd = memfd_create("specs", MFD_CLOEXEC);
    char path[64];
    json_t *v;
    int r = fd < 0 ? err_errno(e, errno, "memfd_create") : proc_run(&spec, fd, e);

    if (r < 0)
        return NULL;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    v = r == 0 ? json_parse_file(path, SPECS_MAX, e) : NULL;
    if (r != 0)
        err_set(e, -EINVAL, "'%s --specs' ended with code %d", shim_path, r);
    else if (v && !json_is_object(json_object_get(v, "kernelspecs")))
        err_set(e, -EINVAL, "'%s --specs' does not list kernelspecs", shim_path);
    else
        return v;
    json_decref(v);
    return NULL;
}

static void add_local(struct vm_host *h)
{
    struct err e;
    const char *shim = h->cfg.shim_path ? h->cfg.shim_path : "cellvisor-shim";
    json_t *specs = local_specs(shim, &e);

    h->local = vm_backend_local_new(h->loop, h->rundir.path, shim);
    log_warn(&h->log,
             "template \"local\" is offered: its kernels run on this host without isolation");
    add_pool(h, "local", NULL, specs, specs ? NULL : e.msg);
}

/* ---- the service ---- */

static size_t do_templates(struct vm_service *s, const struct vm_template_desc **ret)
{
    struct vm_host *h = (struct vm_host *)s;
    size_t n = 0, i = 0;

    LIST_FOR_EACH (&h->pools, node) {
        (void)node;
        n++;
    }
    if (!h->descs || n != h->n_descs) { /* else callers may still hold the array */
        free(h->descs);
        h->descs = xcalloc(n ? n : 1, sizeof(*h->descs));
        h->n_descs = n;
    }
    LIST_FOR_EACH (&h->pools, node) {
        const struct vm_pool *p = list_entry(node, struct vm_pool, link);
        struct vm_pool_counts c = vm_pool_count(p);

        h->descs[i++] = (struct vm_template_desc) {
            .name = p->name,
            .ready = !p->why_not,
            .why_not = p->why_not,
            .tier = p->class.tier,
            .memory_mb = p->tmpl ? p->tmpl->memory_mb : 0,
            .disk_mb = p->tmpl ? p->tmpl->disk_mb : 0,
            .vcpus = p->tmpl ? p->tmpl->vcpus : 0,
            .specs = p->specs,
            .parked = c.parked,
            .deferred = c.deferred,
            .starting = c.refilling + c.queued + c.starting,
            .running = c.running,
        };
    }
    *ret = h->descs;
    return n;
}

static int refuse_unknown(struct vm_host *h, const char *name, struct err *e)
{
    char known[200] = "";
    size_t used = 0;

    LIST_FOR_EACH (&h->pools, n) {
        int len = snprintf(known + used, sizeof(known) - used, "%s%s", used ? ", " : "",
                           list_entry(n, struct vm_pool, link)->name);

        if (len < 0 || (size_t)len >= sizeof(known) - used)
            break;
        used += (size_t)len;
    }
    if (!name)
        return err_set(e, -ENOENT, "no template is built: run `cellvisor template build python`");
    return err_set(e, -ENOENT,
                   "no template named \"%.64s\" (there are: %s); run `cellvisor template build "
                   "%.64s` or check the name",
                   name, known[0] ? known : "none", name);
}

static int do_acquire(struct vm_service *s, const struct vm_request *r, const struct vm_events *ev,
                      void *ctx, struct vm **ret, struct err *e)
{
    struct vm_host *h = (struct vm_host *)s;
    struct list_node *first = list_first(&h->pools);
    struct vm_pool *p = r->template_name ? find_pool(h, r->template_name)
                        : first          ? list_entry(first, struct vm_pool, link)
                                         : NULL;

    if (h->closing)
        return err_set(e, -ESHUTDOWN, "the gateway is stopping");
    if (!p)
        return refuse_unknown(h, r->template_name, e);
    return vm_pool_acquire(p, r, ev, ctx, ret, e);
}

struct vm_service *vm_host_service(struct vm_host *h)
{
    return &h->service;
}

/* ---- life ---- */

static uint64_t read_number(const char *path, const char *key)
{
    CLEANUP(fclosep) FILE *f = fopen(path, "re");
    char line[128];

    while (f && fgets(line, sizeof(line), f))
        if (strncmp(line, key, strlen(key)) == 0)
            return strtoull(line + strlen(key), NULL, 10);
    return 0;
}

static void init_budget(struct vm_host *h)
{
    uint64_t available = read_number("/proc/meminfo", "MemAvailable:") >> 10;
    uint64_t cgroup = read_number("/sys/fs/cgroup/memory.max", "") >> 20; /* "max" reads as 0 */
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);

    if (cgroup && cgroup < available)
        available = cgroup;
    h->budget.limit_mb = h->cfg.memory_mb ? h->cfg.memory_mb : available / 10 * 9;
    h->budget.max_vms = h->cfg.max_vms;
    if (h->cfg.max_vms && !h->cfg.memory_mb)
        h->budget.limit_mb = UINT64_MAX / 2; /* the operator has decided by number */
    h->budget.max_starts = cpus > 1 ? (unsigned)cpus * 2 : 2;
    h->budget.max_refills = cpus > 3 ? (unsigned)cpus / 2 : 1;
}

static void copy_config(struct vm_host *h, const struct vm_host_config *c)
{
    h->cfg = *c;
    h->cfg.state_dir = xstrdup(c->state_dir);
    h->cfg.shim_path = xstrdup(c->shim_path);
    h->cfg.qemu_path = xstrdup(c->qemu_path);
    h->cfg.template_only = xstrdup(c->template_only);
}

/* Accelerator and templates. Without QEMU a host with a local template still serves. */
static int init_templates(struct vm_host *h, struct err *e)
{
    char version[32];
    int r = vm_qemu_version(h->cfg.qemu_path, version, e);

    if (r == 0)
        r = vm_accel_resolve(h->cfg.accel, h->cfg.qemu_path, h->cfg.state_dir, &h->verdict, e);
    if (r < 0 && h->cfg.insecure_local) {
        log_warn(&h->log, "no VM templates: %s", e->msg);
        h->cfg.local_only = true;
        return 0;
    }
    if (r < 0)
        return r;
    log_info(&h->log, "QEMU %s, acceleration %s: %s", version, vm_accel_name(h->verdict.accel),
             h->verdict.reason);
    return vm_host_reload(h, e);
}

int vm_host_new(struct loop *l, const struct vm_host_config *c, struct metrics *m,
                const struct log_ctx *log, struct vm_host **ret, struct err *e)
{
    static const struct vm_service_ops ops = { do_acquire, do_templates };
    struct vm_host *h = xnew(struct vm_host);
    struct err local;
    int r;

    if (!e)
        e = &local;
    h->service.ops = &ops;
    h->loop = l;
    h->metrics = m;
    log_ctx_init(&h->log, log);
    list_init(&h->pools);
    list_init(&h->retired);
    copy_config(h, c);
    init_budget(h);
    h->tick = loop_timer_new(l, on_tick, h);
    r = vm_rundir_open(c->state_dir, &h->rundir, e);
    if (r == 0) {
        h->qemu = vm_backend_qemu_new(l, h->rundir.path, c->qemu_path);
        if (c->insecure_local)
            add_local(h);
        if (!c->local_only)
            r = init_templates(h, e);
        else
            choose_default(h);
    }
    if (r < 0) {
        vm_host_free(h);
        return r;
    }
    loop_timer_start(h->tick, TICK_MS, TICK_MS);
    kick(h);
    *ret = h;
    return 0;
}

void vm_host_close(struct vm_host *h, unsigned grace_ms, void (*closed)(void *ctx), void *ctx)
{
    h->closing = true;
    h->closed = closed;
    h->closed_ctx = ctx;
    LIST_FOR_EACH (&h->pools, n) {
        vm_pool_drain(list_entry(n, struct vm_pool, link), true, grace_ms);
    }
    LIST_FOR_EACH (&h->retired, n) {
        vm_pool_drain(list_entry(n, struct vm_pool, link), true, grace_ms);
    }
    kick(h);
}

static void free_pools(struct list *l)
{
    struct list_node *n;

    while ((n = list_first(l)))
        vm_pool_free(list_entry(n, struct vm_pool, link));
}

void vm_host_free(struct vm_host *h)
{
    if (!h)
        return;
    loop_timer_free(h->tick);
    while (h->jobs) /* a thread still copies into one of our templates */
        loop_step(h->loop, 50);
    loop_cancel_deferred(h->loop, h);
    free_pools(&h->pools);
    free_pools(&h->retired);
    if (h->qemu)
        h->qemu->ops->close(h->qemu);
    if (h->local)
        h->local->ops->close(h->local);
    vm_rundir_close(&h->rundir);
    free(h->descs);
    free((char *)(uintptr_t)h->cfg.state_dir);
    free((char *)(uintptr_t)h->cfg.shim_path);
    free((char *)(uintptr_t)h->cfg.qemu_path);
    free((char *)(uintptr_t)h->cfg.template_only);
    free(h);
}

/* ---- status ---- */

static json_t *pool_status(const struct vm_pool *p)
{
    struct vm_pool_counts c = vm_pool_count(p);

    return json_pack(
        "{s:s, s:s, s:b, s:s?, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:f, s:i, s:s?}",
        "template", p->name, "tier", vm_tier_name(p->class.tier), "ready", !p->why_not, "why_not",
        p->why_not, "wanted", (int)p->want, "parked", (int)c.parked, "deferred", (int)c.deferred,
        "refilling", (int)c.refilling, "queued", (int)c.queued, "starting", (int)c.starting,
        "running", (int)c.running, "hits_parked", (json_int_t)p->hits_parked, "hits_deferred",
        (json_int_t)p->hits_deferred, "misses", (json_int_t)p->misses, "refill_ms", p->refill_ms,
        "failures", (int)p->failures, "last_error", p->last_error[0] ? p->last_error : NULL);
}

json_t *vm_host_status(const struct vm_host *h)
{
    json_t *pools = json_array();

    LIST_FOR_EACH (&h->pools, n) {
        json_array_append_new(pools, pool_status(list_entry(n, struct vm_pool, link)));
    }
    return json_pack("{s:s, s:s, s:i, s:i, s:I, s:I, s:o}", "acceleration",
                     vm_accel_name(h->verdict.accel), "acceleration_reason", h->verdict.reason,
                     "vms", (int)h->budget.vms, "max_vms", (int)h->budget.max_vms, "memory_mb",
                     (json_int_t)h->budget.used_mb, "memory_limit_mb",
                     (json_int_t)h->budget.limit_mb, "pools", pools);
}
