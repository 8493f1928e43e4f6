/* The standby kernel: a second process of the template's kernelspec, preloaded and idle, so that a
 * restart inside a VM does not wait for an interpreter to start under emulation.
 *
 * It is started during PREPARE (and lies in the snapshot, shared copy-on-write), and again some
 * seconds after each promotion, with low priority. It has no stream and nobody sees it. RESUME does
 * not touch it: promotion reseeds it, gives it a key, a session, environment and folder of its own
 * before it is reported, and if any of that fails it is killed and an ordinary start takes over. */
#include "common/cleanup.h"
#include "common/mem.h"
#include "guest-kernel-shim/shim.h"
#include <stdio.h>
#include <string.h>

#define MEMORY_MIN_KB (192u << 10) /* available; else the user needs it more */

void shim_bury(struct shim *s, struct shim_kernel *k)
{
    if (k)
        list_push_back(&s->buried, &k->grave);
}

void shim_empty_graves(struct shim *s)
{
    struct list_node *n;

    while ((n = list_first(&s->buried))) {
        list_remove(n);
        shim_kernel_free(list_entry(n, struct shim_kernel, grave));
    }
}

static unsigned long memory_available_kb(void)
{
    CLEANUP(fclosep) FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    unsigned long kb = 0;

    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "MemAvailable: %lu kB", &kb) == 1)
            break;
    return kb;
}

/* The attempt is over, well or not; PREPARE may be waiting for it. */
static void settled(struct shim *s, const char *error)
{
    struct shim_standby *b = &s->standby;

    if (error) {
        log_warn(&s->host.log, "no standby kernel: %s", error);
        shim_bury(s, b->kernel);
        b->kernel = NULL;
    } else {
        log_info(&s->host.log, "standby kernel is ready, pid %d", (int)b->kernel->pid);
        b->ready = true;
    }
    shim_flow_standby(s, error);
}

static void on_gc(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (s->standby.kernel)
        settled(s, error);
}

static void on_preload(void *ctx, const char *error)
{
    struct shim *s = ctx;

    if (!s->standby.kernel)
        return;
    if (error)
        settled(s, error);
    else
        shim_hook_call(&s->standby.kernel->hook, json_pack("{s:b}", "gc", 1), on_gc, s);
}

void shim_standby_state(struct shim *s)
{
    struct shim_standby *b = &s->standby;
    struct shim_kernel *k = b->kernel;

    if (k->sm.state == SHIM_KERNEL_EXITED) {
        char text[512];

        shim_kernel_end_text(k, text, sizeof(text));
        b->ready = false;
        settled(s, text);
    } else if (k->sm.state == SHIM_KERNEL_RUNNING) {
        if (!shim_hook_ready(&k->hook))
            settled(s, "it has no hook");
        else if (b->preload && *b->preload)
            shim_kernel_execute(k, b->preload, on_preload, s);
        else
            on_preload(s, NULL);
    }
}

void shim_standby_remember(struct shim *s, const struct shim_spec *spec, const char *preload)
{
    struct shim_standby *b = &s->standby;

    b->spec = spec;
    free(b->preload);
    b->preload = xstrdup(preload);
}

bool shim_standby_begin(struct shim *s)
{
    struct shim_standby *b = &s->standby;

    if (!b->enabled || !b->spec || b->kernel || s->ending || s->failed)
        return false;
    if (memory_available_kb() < MEMORY_MIN_KB) {
        log_info(&s->host.log, "no standby kernel: too little memory is free");
        return false;
    }
    b->ready = false;
    b->kernel = shim_kernel_new(&s->host, 0);
    /* During PREPARE nobody else wants the processor. */
    b->kernel->background = s->assigned;
    shim_kernel_start(b->kernel, b->spec, NULL, NULL);
    return true;
}

static void on_again(void *ctx)
{
    struct shim *s = ctx;

    /* Whoever waits for a kernel needs the processor more. */
    for (uint32_t i = 1; i < GL_STREAMS_MAX; i++) {
        if (s->kernels[i] && s->kernels[i]->sm.state == SHIM_KERNEL_STARTING) {
            shim_timer_start(&s->host.loop, &s->standby.timer, s->standby.again_ms, on_again, s);
            return;
        }
    }
    shim_standby_begin(s);
}

/* ---- promotion ---- */

#define PROMOTE_MS 10000u

struct promotion {
    struct shim_kernel *kernel;
    unsigned waiting;
    bool failed;
    struct shim_timer timer;
};

static void give_up(struct promotion *p, const char *error)
{
    if (p->failed)
        return;
    log_warn(&p->kernel->log, "standby kernel not usable: %s", error);
    p->failed = true;
}

/* Frozen, or stuck in native code: its end makes the waiting calls fail, which ends the promotion.
 */
static void on_promotion_timeout(void *ctx)
{
    struct promotion *p = ctx;

    give_up(p, "its hook does not answer");
    shim_hook_close(&p->kernel->hook);
}

static void promoted(void *ctx, const char *error)
{
    struct promotion *p = ctx;
    struct shim_kernel *k = p->kernel;

    if (error)
        give_up(p, error);
    if (--p->waiting > 0)
        return;
    /* A failed one must not be served: whoever gets it would share its random numbers. */
    if (p->failed)
        shim_kernel_renew(k);
    else
        shim_kernel_release(k);
    shim_timer_stop(&p->timer);
    free(p);
}

static json_t *environment_command(struct shim *s, const struct shim_kernel *k)
{
    json_t *env = json_copy(s->assigned_env), *cmd = json_object();
    const char *cwd = k->cwd ? k->cwd : s->host.cwd;

    json_object_update(env, k->env);
    json_object_set_new(cmd, "env", env);
    if (cwd)
        json_object_set_new(cmd, "cwd", json_string(cwd));
    return cmd;
}

bool shim_standby_take(struct shim *s, struct shim_kernel *old)
{
    struct shim_standby *b = &s->standby;
    struct shim_kernel *k = b->kernel;
    struct promotion *p;

    if (b->enabled && b->spec)
        shim_timer_start(&s->host.loop, &b->timer, s->standby.again_ms, on_again, s);
    if (!k || old->spec != b->spec)
        return false;
    b->kernel = NULL;
    if (!b->ready || !shim_kernel_alive(k) || !shim_hook_ready(&k->hook)) {
        shim_bury(s, k); /* two interpreters starting at once help nobody */
        return false;
    }
    b->ready = false;
    s->kernels[old->stream] = k;
    shim_kernel_hand_over(old, k);
    shim_bury(s, old);
    log_info(&k->log, "standby kernel takes over, pid %d", (int)k->pid);
    shim_report_state(s, k); /* held: "starting" */
    p = xnew(struct promotion);
    *p = (struct promotion) { .kernel = k, .waiting = 2 };
    shim_timer_start(&s->host.loop, &p->timer, PROMOTE_MS, on_promotion_timeout, p);
    shim_kernel_reseed(k, promoted, p);
    shim_hook_call(&k->hook, environment_command(s, k), promoted, p);
    return true;
}

void shim_standby_end(struct shim *s)
{
    struct shim_standby *b = &s->standby;
    struct shim_kernel *k = b->kernel;

    shim_timer_stop(&b->timer);
    b->enabled = false;
    b->kernel = NULL;
    shim_kernel_free(k);
    free(b->preload);
    b->preload = NULL;
}
