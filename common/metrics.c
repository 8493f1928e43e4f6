/* Families (one name, type and help) in order of creation; each has its metrics by labels. */
#include "common/metrics.h"
#include "common/list.h"
#include "common/map.h"
#include "common/mem.h"
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum kind { COUNTER, GAUGE, HISTOGRAM };
static const char *const kind_names[] = { "counter", "gauge", "histogram" };

struct metric {
    struct list_node link; /* family::metrics */
    enum kind kind;
    char *labels;
    double value;      /* histogram: sum */
    double *bounds;    /* histogram only */
    uint64_t *buckets; /* n_bounds + 1, not cumulative */
    size_t n_bounds;
    uint64_t count;
};

struct family {
    struct list_node link; /* metrics::families */
    enum kind kind;
    char *name, *help;
    struct list metrics;
};

struct metrics {
    struct list families;
    struct map *by_name; /* -> family */
};

struct metrics *metrics_new(void)
{
    struct metrics *m = xnew(struct metrics);
    list_init(&m->families);
    m->by_name = map_new();
    return m;
}

static void family_free(struct family *f)
{
    LIST_FOR_EACH_SAFE (&f->metrics, n) {
        struct metric *x = list_entry(n, struct metric, link);
        free(x->labels);
        free(x->bounds);
        free(x->buckets);
        free(x);
    }
    free(f->name);
    free(f->help);
    free(f);
}

void metrics_free(struct metrics *m)
{
    if (!m)
        return;
    LIST_FOR_EACH_SAFE (&m->families, n)
        family_free(list_entry(n, struct family, link));
    map_free(m->by_name);
    free(m);
}

static struct metric *get(struct metrics *m, enum kind kind, const char *name, const char *labels,
                          const char *help)
{
    struct family *f = map_get(m->by_name, name);
    if (!f) {
        f = xnew(struct family);
        f->kind = kind;
        f->name = xstrdup(name);
        f->help = xstrdup(help ? help : "");
        list_init(&f->metrics);
        list_push_back(&m->families, &f->link);
        map_put(m->by_name, name, f);
    }
    assert(f->kind == kind); /* one name, one type */
    if (!labels)
        labels = "";
    LIST_FOR_EACH (&f->metrics, n) {
        struct metric *x = list_entry(n, struct metric, link);
        if (strcmp(x->labels, labels) == 0)
            return x;
    }
    struct metric *x = xnew(struct metric);
    x->kind = kind;
    x->labels = xstrdup(labels);
    list_push_back(&f->metrics, &x->link);
    return x;
}

struct metric *metrics_counter(struct metrics *m, const char *name, const char *labels,
                               const char *help)
{
    return m ? get(m, COUNTER, name, labels, help) : NULL;
}

struct metric *metrics_gauge(struct metrics *m, const char *name, const char *labels,
                             const char *help)
{
    return m ? get(m, GAUGE, name, labels, help) : NULL;
}

struct metric *metrics_histogram(struct metrics *m, const char *name, const char *labels,
                                 const char *help, const double *bounds, size_t n_bounds)
{
    if (!m)
        return NULL;
    struct metric *x = get(m, HISTOGRAM, name, labels, help);
    if (x->buckets)
        return x;
    x->n_bounds = n_bounds;
    x->bounds = xcalloc(n_bounds, sizeof(double));
    x->buckets = xcalloc(n_bounds + 1, sizeof(uint64_t));
    for (size_t i = 0; i < n_bounds; i++) {
        assert(i == 0 || bounds[i] > bounds[i - 1]);
        x->bounds[i] = bounds[i];
    }
    return x;
}

void metric_add(struct metric *c, double v)
{
    if (!c)
        return;
    assert(c->kind != HISTOGRAM && (c->kind == GAUGE || v >= 0));
    c->value += v;
}

void metric_set(struct metric *g, double v)
{
    if (!g)
        return;
    assert(g->kind == GAUGE);
    g->value = v;
}

void metric_observe(struct metric *h, double v)
{
    if (!h)
        return;
    assert(h->kind == HISTOGRAM);
    size_t i = 0;
    while (i < h->n_bounds && !(v <= h->bounds[i]))
        i++;
    h->buckets[i]++;
    h->count++;
    h->value += v;
}

double metric_value(const struct metric *c)
{
    if (!c)
        return 0;
    return c->kind == HISTOGRAM ? (double)c->count : c->value;
}

/* The shortest decimal that reads back as v. */
static void number(char *ret, size_t size, double v)
{
    if (isnan(v)) {
        snprintf(ret, size, "NaN");
    } else if (isinf(v)) {
        snprintf(ret, size, "%s", v > 0 ? "+Inf" : "-Inf");
    } else {
        for (int digits = 15; digits <= 17; digits++) {
            snprintf(ret, size, "%.*g", digits, v);
            if (strtod(ret, NULL) == v)
                break;
        }
    }
}

static int write_sample(struct buf *out, const char *name, const char *suffix, const char *labels,
                        const char *le, double v)
{
    char text[40];
    number(text, sizeof(text), v);
    const char *open = *labels || le ? "{" : "";
    const char *close = *labels || le ? "}" : "";
    const char *comma = *labels && le ? "," : "";
    if (!le)
        return buf_printf(out, "%s%s%s%s%s %s\n", name, suffix, open, labels, close, text);
    return buf_printf(out, "%s%s%s%s%sle=\"%s\"%s %s\n", name, suffix, open, labels, comma, le,
                      close, text);
}

static int write_histogram(struct buf *out, const char *name, const struct metric *x)
{
    uint64_t sum = 0;
    for (size_t i = 0; i <= x->n_bounds; i++) {
        char le[40];
        number(le, sizeof(le), i < x->n_bounds ? x->bounds[i] : HUGE_VAL);
        sum += x->buckets[i];
        int r = write_sample(out, name, "_bucket", x->labels, le, (double)sum);
        if (r < 0)
            return r;
    }
    int r = write_sample(out, name, "_sum", x->labels, NULL, x->value);
    return r < 0 ? r : write_sample(out, name, "_count", x->labels, NULL, (double)x->count);
}

static int write_family(struct buf *out, const struct family *f)
{
    int r = buf_printf(out, "# HELP %s ", f->name);
    for (const char *p = f->help; *p && r == 0; p++) {
        if (*p == '\\' || *p == '\n')
            r = buf_append_str(out, *p == '\\' ? "\\\\" : "\\n");
        else
            r = buf_append_byte(out, (uint8_t)*p);
    }
    if (r == 0)
        r = buf_printf(out, "\n# TYPE %s %s\n", f->name, kind_names[f->kind]);
    LIST_FOR_EACH (&f->metrics, n) {
        if (r < 0)
            return r;
        const struct metric *x = list_entry(n, struct metric, link);
        if (f->kind == HISTOGRAM)
            r = write_histogram(out, f->name, x);
        else
            r = write_sample(out, f->name, "", x->labels, NULL, x->value);
    }
    return r;
}

int metrics_write(const struct metrics *m, struct buf *out)
{
    LIST_FOR_EACH (&m->families, n) {
        int r = write_family(out, list_entry(n, struct family, link));
        if (r < 0)
            return r;
    }
    return 0;
}
