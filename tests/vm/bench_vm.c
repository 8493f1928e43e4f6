/* bench-vm [N]: starts of real VMs without gateway, N times (default 20) in each way, as JSON on
 * stdout: cold      no pool: VMM spawned on request; "ready" = assigned, kernel takes cells; "cell"
 * = result of 1+1 deferred  VMM process waits with nothing loaded parked    resumed and warmed VM
 * waits Times in milliseconds from vm_acquire. */
#include "client.h"
#include "common/cleanup.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX 1000

struct series {
    double v[MAX];
    int n;
};

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static json_t *summary(struct series *s)
{
    qsort(s->v, (size_t)s->n, sizeof(double), compare);
    if (!s->n)
        return json_null();
    return json_pack("{s:i, s:f, s:f, s:f, s:f}", "n", s->n, "min", s->v[0], "p50", s->v[s->n / 2],
                     "p95", s->v[(s->n * 95) / 100], "max", s->v[s->n - 1]);
}

static void add(struct series *s, double v)
{
    if (s->n < MAX)
        s->v[s->n++] = v;
}

static double since(struct client_host *h, uint64_t from)
{
    return (double)(loop_now_us(h->loop) - from) / 1000.0;
}

/* Until the pool has what it wants: refills must not disturb the measurement. */
static void settle(struct client_host *h, const char *name)
{
    uint64_t end = loop_now_ms(h->loop) + 60000;

    while (loop_now_ms(h->loop) < end) {
        const struct vm_template_desc *d;
        size_t n = vm_templates(vm_host_service(h->host), &d);

        loop_step(h->loop, 50);
        for (size_t i = 0; i < n; i++)
            if (!strcmp(d[i].name, name) && d[i].starting == 0)
                return;
    }
}

static unsigned long private_kb(int pid)
{
    char path[64], line[128];
    unsigned long kb = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", pid);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "Private_Dirty: %lu kB", &kb) == 1)
            break;
    if (f)
        fclose(f);
    return kb;
}

static json_t *measure(const char *state, const char *name, const char *way, int n)
{
    static struct series ready, cell, second, spawn, load, resume, assign, entropy, hooks, memory;
    struct vm_host_config c;
    struct client_host h;
    struct err e = { 0 };

    ready.n = cell.n = second.n = spawn.n = load.n = resume.n = assign.n = entropy.n = hooks.n =
        memory.n = 0;
    vm_host_config_defaults(&c);
    c.state_dir = state;
    c.accel = VM_ACCEL_TCG;
    c.template_only = name;
    c.pool_parked = c.pool_max = !strcmp(way, "parked");
    c.pool_deferred = !strcmp(way, "deferred");
    if (client_open(&h, &c, &e) < 0) {
        fprintf(stderr, "bench-vm: %s\n", e.msg);
        exit(1);
    }
    for (int i = 0; i <= n; i++) { /* the first one loads RAM and files into caches: not counted */
        struct client_vm v;
        uint64_t t0;

        settle(&h, name);
        t0 = loop_now_us(h.loop);
        if (client_start(&h, &v, name, &e) < 0 || !client_wait_up(&v, 60000)) {
            fprintf(stderr, "bench-vm: %s\n", v.down ? v.why.text : e.msg);
            exit(1);
        }
        double up_ms = since(&h, t0);
        if (!client_run(&v, "1+1"))
            exit(1);
        double cell_ms = since(&h, t0);
        uint64_t t1 = loop_now_us(h.loop);
        if (!client_run(&v, "2+2"))
            exit(1);
        if (i > 0) {
            const struct vm_timings *t = &v.vm->info.timings;

            add(&ready, up_ms);
            add(&cell, cell_ms);
            add(&second, since(&h, t1));
            add(&spawn, t->spawn_ms);
            add(&load, t->load_ms);
            add(&resume, t->resume_ms);
            add(&assign, t->assign_ms);
            add(&entropy, t->guest_entropy_ms + t->guest_clock_ms);
            add(&hooks, t->guest_hooks_ms);
            add(&memory, (double)private_kb(v.vm->info.pid) / 1024.0);
        }
        client_end(&v, 0);
    }
    client_close(&h);
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "ready", summary(&ready),
                     "cell", summary(&cell), "second_cell", summary(&second), "spawn",
                     summary(&spawn), "load", summary(&load), "resume", summary(&resume), "assign",
                     summary(&assign), "guest_entropy_clock", summary(&entropy), "guest_hooks",
                     summary(&hooks), "private_dirty_mb", summary(&memory));
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 20;
    char state[4096];
    const char *name = client_template(state, sizeof(state));
    json_t *all;
    char *text;

    log_configure(LOG_LEVEL_WARN, false);
    if (!name)
        return 77;
    if (n < 1 || n > MAX) {
        fprintf(stderr, "usage: bench-vm [1..%d]\n", MAX);
        return 2;
    }
    all = json_object();
    json_object_set_new(all, "template", json_string(name));
    for (int i = 0; i < 3; i++) {
        static const char *const ways[] = { "cold", "deferred", "parked" };

        json_object_set_new(all, ways[i], measure(state, name, ways[i], n));
    }
    text = json_dumps(all, JSON_INDENT(1) | JSON_REAL_PRECISION(5));
    puts(text);
    free(text);
    json_decref(all);
    return 0;
}
