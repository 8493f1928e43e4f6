/* The dice. `sim_storm [SEED [STEPS]]` or `sim_storm --many N STEPS`. */
#include "tests/sim/sim.h"
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#define DEFAULT_SEED 20260101u
#define DEFAULT_STEPS 10000u
#define REPLAY_TTL_MS 20000u

uint64_t sim_next(struct sim_rng *r)
{
    uint64_t z = r->s += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

unsigned sim_below(struct sim_rng *r, unsigned n)
{
    return (unsigned)(sim_next(r) % n);
}

bool sim_chance(struct sim_rng *r, unsigned percent)
{
    return sim_below(r, 100) < percent;
}

void sim_fail(struct sim *s, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "sim_storm: seed %" PRIu64 ", step %u: ", s->seed, s->step);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    abort();
}

/* ---- operations whose answer must come exactly once ---- */

struct pending {
    struct sim *sim;
    bool told;
};

static void on_done(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct pending *p = ctx;
    SIM_CHECK(p->sim, !p->told, "an operation was answered twice");
    SIM_CHECK(p->sim, !k == (e && e->code < 0), "neither kernel nor error, or both");
    p->told = true;
    p->sim->ops_done++;
    free(p);
}

static void on_session(void *ctx, struct km_session *ss, const struct err *e)
{
    struct pending *p = ctx;
    SIM_CHECK(p->sim, !ss == (e && e->code < 0), "neither session nor error, or both");
    p->sim->ops_done++;
    free(p);
}

static struct pending *pending(struct sim *s)
{
    struct pending *p = xnew(struct pending);
    p->sim = s;
    s->ops_open++;
    return p;
}

static void withdraw(struct pending *p)
{
    p->sim->ops_open--;
    free(p);
}

/* ---- executions ---- */

struct sim_x {
    struct list_node link;
    struct sim *sim;
    struct km_execution *x;
    bool done;
};
static struct list executions;

static void on_execution(void *ctx, struct km_execution *x)
{
    struct sim_x *sx = ctx;
    struct buf b;
    SIM_CHECK(sx->sim, !sx->done, "an execution was done twice");
    sx->done = true;
    buf_init(&b, 256u << 20);
    SIM_CHECK(sx->sim, km_execution_write_json(x, &b) == 0, "no JSON of a result");
    json_t *o = json_loadb((const char *)buf_slice(&b).p, b.len, 0, NULL);
    SIM_CHECK(sx->sim, json_is_object(o), "the JSON of a result is none");
    SIM_CHECK(sx->sim, strcmp(km_execution_status(x), "running") != 0, "done and running");
    json_decref(o);
    buf_fini(&b);
}

static void x_free(struct sim_x *sx)
{
    list_remove(&sx->link);
    km_execution_free(sx->x);
    free(sx);
}

static void execute(struct sim *s, struct km_kernel *k)
{
    static const struct km_execution_events ev = { NULL, on_execution };
    struct km_execute_opts o;
    struct sim_x *sx = xnew(struct sim_x);
    km_execute_opts_defaults(&o);
    o.code = "print(1)";
    o.timeout_ms = sim_chance(&s->rng, 30) ? 500 : 0;
    sx->sim = s;
    int r = km_execute(k, &o, &ev, sx, &sx->x, NULL);
    SIM_CHECK(s, r == 0 || r == -ESRCH || r == -EAGAIN, "execute gave %d", r);
    if (r < 0)
        free(sx);
    else
        list_push_back(&executions, &sx->link);
}

static void reap_executions(struct sim *s, bool all)
{
    LIST_FOR_EACH_SAFE (&executions, n) {
        struct sim_x *sx = list_entry(n, struct sim_x, link);
        SIM_CHECK(s, sx->done || !all, "an execution is still running at the end");
        if (sx->done && (all || sim_chance(&s->rng, 20)))
            x_free(sx);
    }
}

/* ---- one step ---- */

static struct km_kernel *pick_kernel(struct sim *s)
{
    if (!s->m->n_kernels)
        return NULL;
    unsigned i = sim_below(&s->rng, (unsigned)s->m->n_kernels);
    LIST_FOR_EACH (&s->m->kernels, n)
        if (!i--)
            return list_entry(n, struct km_kernel, link);
    return NULL;
}

static void start_kernel(struct sim *s)
{
    struct km_start ks = { .principal = "me",
                           .spec = sim_chance(&s->rng, 20) ? "bash" : "python3" };
    struct pending *p;
    struct km_op *op;
    if (s->m->n_kernels >= SIM_KERNELS)
        return;
    p = pending(s);
    s->vms.prestarted = sim_chance(&s->rng, 50);
    s->vms.acquire_error = sim_chance(&s->rng, 5) ? -EAGAIN : 0;
    if (km_kernel_start(s->m, &ks, on_done, p, &op, NULL) < 0) {
        withdraw(p);
    } else if (sim_chance(&s->rng, 10)) {
        km_op_cancel(op);
        withdraw(p);
    }
    s->vms.acquire_error = 0;
}

static void use_session(struct sim *s)
{
    char path[8];
    struct km_op *op;
    snprintf(path, sizeof(path), "p%u", sim_below(&s->rng, 3));
    struct km_session_req r = { .path = path, .type = "notebook" };
    struct pending *p = pending(s);
    if (s->m->n_kernels >= SIM_KERNELS) {
        withdraw(p);
        return;
    }
    if (km_session_create(s->m, "me", &r, on_session, p, &op, NULL) < 0) {
        withdraw(p);
    } else if (sim_chance(&s->rng, 20)) {
        km_op_cancel(op);
        withdraw(p);
    }
    if (!list_empty(&s->m->sessions) && sim_chance(&s->rng, 30))
        km_session_delete(s->m, list_entry(list_first(&s->m->sessions), struct km_session, link));
}

static void kernel_op(struct sim *s, struct km_kernel *k, unsigned dice)
{
    struct km_op *op;
    struct pending *p;
    if (dice < 3) {
        km_kernel_shutdown(k, "the storm");
        return;
    }
    p = pending(s);
    if (dice < 50)
        km_kernel_restart(k, on_done, p, &op);
    else
        km_kernel_interrupt(k, on_done, p, &op);
    if (sim_chance(&s->rng, 10)) {
        km_op_cancel(op);
        withdraw(p);
    }
}

static void client_step(struct sim *s)
{
    struct sim_client *c = &s->clients[sim_below(&s->rng, SIM_CLIENTS)];
    unsigned dice = sim_below(&s->rng, 100);
    struct km_kernel *k = pick_kernel(s);
    if (!c->attached) {
        if (k && dice < 50)
            sim_client_attach(s, c, k, sim_below(&s->rng, SIM_SESSIONS));
        return;
    }
    if (dice < 4)
        sim_client_detach(s, c);
    else if (dice < 70)
        for (unsigned n = s->mood == SIM_PILE ? sim_below(&s->rng, 100) : 1;
             n && c->attached && !c->throttled; n--)
            sim_client_submit(s, c);
    else
        sim_client_pull(s, c, sim_below(&s->rng, s->mood == SIM_FLOOD ? 4 : 60));
}

static void check(struct sim *s)
{
    LIST_FOR_EACH (&s->m->kernels, n) {
        struct km_kernel *k = list_entry(n, struct km_kernel, link);
        size_t cap = k->log.bytes_max;
        SIM_CHECK(s, k->log.bytes <= cap, "the log holds %zu bytes, cap %zu", k->log.bytes, cap);
        SIM_CHECK(s, k->router.n <= KM_REQS_MAX, "%zu requests in flight", k->router.n);
        if (!k->box)
            continue;
        s->held += k->ungranted > 0;
        struct fake_vm *v = (struct fake_vm *)(void *)k->box->vm;
        SIM_CHECK(s, v->window + k->ungranted == GL_WINDOW, "credit leaks: window %zu, held %zu",
                  v->window, k->ungranted);
    }
}

static void step(struct sim *s)
{
    static const enum sim_mood moods[] = { SIM_CALM, SIM_FLOOD, SIM_PILE };
    unsigned dice = sim_below(&s->rng, 1000);
    struct km_kernel *k = pick_kernel(s);
    s->mood = moods[s->step / SIM_MOOD_STEPS % 3];
    if (dice < 20)
        start_kernel(s);
    else if (dice < 24)
        use_session(s);
    else if (dice < 28)
        sim_guest_kill(s);
    else if (dice < 30)
        sim_guest_crash(s);
    else if (dice < 40 && k)
        kernel_op(s, k, sim_below(&s->rng, 100));
    else if (dice < 60 && k)
        execute(s, k);
    else if (dice < 70)
        reap_executions(s, false);
    else if (dice < 700)
        client_step(s);
    else
        sim_guests_turn(s);
    if (sim_chance(&s->rng, 30))
        loop_virtual_advance(s->loop, sim_chance(&s->rng, 1) ? 30000 : sim_below(&s->rng, 100));
    check(s);
}

/* ---- begin and end ---- */

static void on_manager_closed(void *ctx)
{
    ((struct sim *)ctx)->closed = true;
}

static void begin(struct sim *s, uint64_t seed)
{
    struct km_config cfg;
    *s = (struct sim) { .seed = seed, .rng = { seed }, .loop = loop_new_virtual() };
    log_configure(LOG_LEVEL_ERROR, false);
    list_init(&executions);
    fake_service_init(&s->vms, s->loop);
    km_config_defaults(&cfg);
    cfg.log_bytes_max = 1; /* the smallest there is */
    cfg.replay_bytes_max = 1u << 20;
    cfg.replay_ttl_ms = REPLAY_TTL_MS;
    cfg.coalesce_max = 4096;
    s->m = km_manager_new(s->loop, &s->vms.service, &cfg, NULL, NULL);
    s->reqs = xcalloc(SIM_REQS_MAX, sizeof(*s->reqs));
    s->by_id = map_new();
    s->numbers = map_new();
    for (unsigned i = 0; i < SIM_SESSIONS; i++)
        snprintf(s->sessions[i].name, sizeof(s->sessions[i].name), "S%u", i);
    for (unsigned i = 0; i < SIM_CLIENTS; i++)
        s->clients[i].sim = s;
}

/* Everybody who asked something of a kernel that lives, and whose session it still keeps, has the
 * answer now. */
static void check_answers(struct sim *s)
{
    for (size_t i = 0; i < s->n_reqs; i++) {
        const struct sim_req *q = &s->reqs[i];
        const struct sim_session *ss = &s->sessions[q->session];
        if (!q->wants_reply || q->replies || strcmp(ss->kernel, q->kernel) != 0 || !ss->attached)
            continue;
        const struct km_kernel *k = km_kernel_find(s->m, NULL, q->kernel);
        if (!k || ss->from || ss->allowed)
            continue; /* joined late (an earlier stay was forgotten), or was told of losses */
        const struct km_req *open = km_router_find(&k->router, q->id);
        SIM_CHECK(s, false, "%s was never answered (kernel %s, %s, link %s, %zu waiting)", q->id,
                  sm_name(&k->sm), open ? open->msg_type : "forgotten", k->box ? "there" : "gone",
                  k->outbox_count);
    }
    LIST_FOR_EACH (&s->m->kernels, n) {
        struct km_kernel *k = list_entry(n, struct km_kernel, link);
        SIM_CHECK(s, k->router.n_half == 0 || km_state(k) != KM_K_READY,
                  "half-answered requests are left");
    }
}

static void end(struct sim *s)
{
    sim_guests_finish(s);
    loop_virtual_advance(s->loop, 15000);
    sim_guests_finish(s);
    check_answers(s);
    for (unsigned i = 0; i < SIM_CLIENTS; i++)
        SIM_CHECK(s, !s->clients[i].throttled || km_state(s->clients[i].c.kernel) != KM_K_READY,
                  "client %u is throttled by a kernel that has caught up", i);
    loop_virtual_advance(s->loop, 120000);
    km_manager_close(s->m, on_manager_closed, s);
    loop_virtual_advance(s->loop, 10000);
    SIM_CHECK(s, s->closed, "the manager did not close");
    SIM_CHECK(s, s->vms.alive == 0, "%u sandboxes are left", s->vms.alive);
    SIM_CHECK(s, s->ops_open == s->ops_done, "%u operations, %u answers", s->ops_open, s->ops_done);
    for (unsigned i = 0; i < SIM_CLIENTS; i++)
        SIM_CHECK(s, !s->clients[i].attached, "a client was not told of the end");
    reap_executions(s, true);
    km_manager_free(s->m);
    sim_guests_free(s);
    fake_service_fini(&s->vms);
    loop_free(s->loop);
    struct map_iter it = { 0 };
    while (map_next(s->numbers, &it))
        free(it.value);
    map_free(s->numbers);
    map_free(s->by_id);
    free(s->reqs);
}

static void storm(uint64_t seed, unsigned steps)
{
    static struct sim s;
    begin(&s, seed);
    for (s.step = 0; s.step < steps; s.step++)
        step(&s);
    end(&s);
    printf("sim_storm: seed %" PRIu64
           ", %u steps: %zu requests, %lu answers, %lu outputs, %lu pulled, %lu gap "
           "notices, %lu deaths, %u sandboxes, %lu steps held back, %lu throttled\n",
           seed, steps, s.n_reqs, s.answered, s.said, s.pulled, s.gaps, s.deaths, s.vms.acquired,
           s.held, s.throttled);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    if (argc == 4 && !strcmp(argv[1], "--many")) {
        for (uint64_t i = 0; i < strtoull(argv[2], NULL, 10); i++)
            storm(1000 + i, (unsigned)strtoul(argv[3], NULL, 10));
        return 0;
    }
    storm(argc > 1 ? strtoull(argv[1], NULL, 10) : DEFAULT_SEED,
          argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : DEFAULT_STEPS);
    return 0;
}
