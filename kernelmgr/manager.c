/* The manager: owner of all kernels, limits, lookups, starts and the end. A kernel counts against
 * the limits from the moment its start is accepted, and is visible in lookups from then on, so that
 * two starts cannot slip through one gap and nobody's capacity is used invisibly. What cannot be
 * started leaves no trace. */
#include "common/id.h"
#include "kernelmgr/km_priv.h"
#include <errno.h>
#include <string.h>

void km_config_defaults(struct km_config *c)
{
    *c = (struct km_config) { .log_bytes_max = 64u << 20,
                              .replay_bytes_max = 16u << 20,
                              .replay_ttl_ms = 10 * 60 * 1000,
                              .start_timeout_ms = 60 * 1000,
                              .restart_timeout_ms = 120 * 1000,
                              .reply_grace_ms = 2000,
                              .shutdown_grace_ms = 3000,
                              .restart_limit = 5,
                              .coalesce_max = 64u << 10 };
}

static void make_metrics(struct km_manager *m, struct metrics *ms)
{
    static const double bounds[] = {
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60
    };
    struct km_metrics *t = &m->met;
    if (!ms)
        return;
    t->running =
        metrics_gauge(ms, "cellvisor_kernels", "", "Kernels that exist, starting ones included.");
    t->starts = metrics_counter(ms, "cellvisor_kernel_starts_total", "", "Kernel starts begun.");
    t->start_failures =
        metrics_counter(ms, "cellvisor_kernel_start_failures_total", "", "Starts that failed.");
    t->restarts = metrics_counter(ms, "cellvisor_kernel_restarts_total", "",
                                  "Restarts, asked for and automatic.");
    t->deaths = metrics_counter(ms, "cellvisor_kernel_deaths_total", "",
                                "Kernels that ended by themselves.");
    t->messages =
        metrics_counter(ms, "cellvisor_messages_total", "", "Messages put in kernel logs.");
    t->made_up =
        metrics_counter(ms, "cellvisor_messages_synthesised_total", "", "Messages of our own.");
    t->joined = metrics_counter(ms, "cellvisor_messages_joined_total", "",
                                "Stream messages joined to the one before.");
    t->lost = metrics_counter(ms, "cellvisor_messages_lost_total", "",
                              "Messages dropped by replay limits; their readers are told.");
    t->held_back = metrics_counter(ms, "cellvisor_backpressure_total", "",
                                   "Times a guest was held back because a client reads slowly.");
    t->bad_messages =
        metrics_counter(ms, "cellvisor_guest_messages_bad_total", "", "Unreadable guest messages.");
    t->start_seconds =
        metrics_histogram(ms, "cellvisor_kernel_start_seconds", "", "From start to ready.", bounds,
                          sizeof(bounds) / sizeof(*bounds));
}

struct km_manager *km_manager_new(struct loop *l, struct vm_service *vms, const struct km_config *c,
                                  struct metrics *ms, const struct log_ctx *log)
{
    struct km_manager *m = xnew(struct km_manager);
    struct km_config *g = &m->cfg;
    m->loop = l;
    m->vms = vms;
    *g = *c;
    m->default_spec = xstrdup(c->default_spec);
    m->default_template = xstrdup(c->default_template);
    g->default_spec = m->default_spec;
    g->default_template = m->default_template;
    /* The log needs room for what the guest may send on the credit it has. */
    if (g->log_bytes_max < 2 * KM_LOG_RESERVE)
        g->log_bytes_max = 2 * KM_LOG_RESERVE;
    if (g->replay_bytes_max > (g->log_bytes_max - KM_LOG_RESERVE) / 2)
        g->replay_bytes_max = (g->log_bytes_max - KM_LOG_RESERVE) / 2;
    m->metrics = ms;
    make_metrics(m, ms);
    log_ctx_init(&m->log_ctx, log);
    list_init(&m->kernels);
    list_init(&m->boxes);
    list_init(&m->sessions);
    list_init(&m->done);
    m->by_id = map_new();
    return m;
}

static void report_closed(void *ctx)
{
    struct km_manager *m = ctx;
    void (*fn)(void *) = m->closed;
    m->closed = NULL;
    if (fn)
        fn(m->closed_ctx);
}

void km_manager_settle(struct km_manager *m)
{
    if (m->closing && m->closed && list_empty(&m->kernels) && list_empty(&m->boxes))
        loop_defer(m->loop, report_closed, m);
}

void km_manager_close(struct km_manager *m, void (*closed)(void *ctx), void *ctx)
{
    struct list_node *n;
    m->closing = true;
    m->closed = closed;
    m->closed_ctx = ctx;
    while ((n = list_first(&m->kernels)))
        km_kernel_close(list_entry(n, struct km_kernel, link), KM_CLOSE_SHUTDOWN,
                        "the gateway is stopping");
    km_manager_settle(m);
}

void km_manager_free(struct km_manager *m)
{
    if (!m)
        return;
    loop_cancel_deferred(m->loop, m);
    km_sessions_free(m);
    km_ops_free_done(m);
    map_free(m->by_id);
    free(m->default_spec);
    free(m->default_template);
    free(m);
}

/* ---- starting ---- */

static int check_env(json_t *env, struct err *e)
{
    const char *key;
    json_t *v;
    if (!env)
        return 0;
    if (!json_is_object(env))
        return err_set(e, -EINVAL, "env must be an object of strings");
    json_object_foreach(env, key, v)
    {
        if (!*key || strchr(key, '='))
            return err_set(e, -EINVAL, "env: \"%.100s\" is no name of an environment variable",
                           key);
        if (!json_is_string(v))
            return err_set(e, -EINVAL, "env: the value of %.100s is not a string", key);
        if (strlen(json_string_value(v)) != json_string_length(v))
            return err_set(e, -EINVAL, "env: the value of %.100s holds a NUL character", key);
    }
    return 0;
}

static size_t count_of(struct km_manager *m, const char *principal)
{
    size_t n = 0;
    LIST_FOR_EACH (&m->kernels, ln)
        n += !strcmp(list_entry(ln, struct km_kernel, link)->principal, principal);
    return n;
}

/* Kernels that are still starting count as well (jupyter.md section 6, 32). */
static int check_limits(struct km_manager *m, const char *principal, struct err *e)
{
    if (m->closing)
        return err_set(e, -EAGAIN, "the gateway is stopping");
    if (m->cfg.max_kernels && m->n_kernels >= m->cfg.max_kernels)
        return err_set(e, -EDQUOT,
                       "this gateway runs at most %u kernels (max_kernels): shut one down first",
                       m->cfg.max_kernels);
    unsigned mine = m->cfg.max_kernels_per_principal;
    if (mine && count_of(m, principal) >= mine)
        return err_set(
            e, -EDQUOT,
            "you may run at most %u kernels (max_kernels_per_principal): shut one down first",
            mine);
    return 0;
}

static int check_start(struct km_manager *m, const struct km_start *s, struct err *e)
{
    const char *id = s->kernel_id;
    if (id && *id) {
        if (strlen(id) != ID_UUID_LEN || !id_is_uuid_shaped(id))
            return err_set(
                e, -EINVAL,
                "kernel_id \"%.60s\" is not a UUID like 01234567-89ab-cdef-0123-456789abcdef", id);
        if (map_get(m->by_id, id))
            return err_set(e, -EEXIST, "a kernel with the id %s exists already", id);
    }
    int r = check_env(s->env, e);
    return r < 0 ? r : check_limits(m, s->principal ? s->principal : "", e);
}

int km_kernel_start(struct km_manager *m, const struct km_start *s, km_done_fn fn, void *ctx,
                    struct km_op **ret_op, struct err *e)
{
    CLEANUP(freep) char *name = NULL;
    struct km_spec_ref ref;
    int r = check_start(m, s, e);
    if (r == 0)
        r = km_spec_resolve(m, s->spec, &name, &ref, e);
    if (r < 0)
        return r;
    struct km_kernel *k = km_kernel_new(m, s, name, &ref);
    r = km_kernel_acquire(k, e);
    if (r < 0) {
        km_kernel_close(k, KM_CLOSE_DELETED, "no sandbox for it");
        return r;
    }
    struct km_op *op = km_op_new(m, k, KM_OP_START, fn, ctx);
    if (ret_op)
        *ret_op = op;
    return 0;
}

/* ---- lookups ---- */

struct km_kernel *km_kernel_find(struct km_manager *m, const char *principal, const char *id)
{
    struct km_kernel *k = id && *id ? map_get(m->by_id, id) : NULL;
    return k && (!principal || !strcmp(k->principal, principal)) ? k : NULL;
}

void km_kernel_each(struct km_manager *m, const char *principal,
                    bool (*fn)(void *ctx, struct km_kernel *k), void *ctx)
{
    LIST_FOR_EACH_SAFE (&m->kernels, n) {
        struct km_kernel *k = list_entry(n, struct km_kernel, link);
        if ((!principal || !strcmp(k->principal, principal)) && !fn(ctx, k))
            return;
    }
}
