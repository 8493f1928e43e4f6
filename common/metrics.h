#pragma once
/* Counters, gauges and histograms with fixed names, in Prometheus text exposition format 0.0.4.
 * A registry is an object (no globals): the manager owns one and hands it down. */
#include "common/buf.h"

struct metrics;
struct metrics *metrics_new(void);
void metrics_free(struct metrics *m);

struct metric; /* owned by the registry */
/* labels: "" or "kind=\"a\"" exactly as printed. Same name + labels gives the same metric. */
struct metric *metrics_counter(struct metrics *m, const char *name, const char *labels,
                               const char *help);
struct metric *metrics_gauge(struct metrics *m, const char *name, const char *labels,
                             const char *help);
struct metric *metrics_histogram(struct metrics *m, const char *name, const char *labels,
                                 const char *help, const double *bounds, size_t n_bounds);
void metric_add(struct metric *c, double v); /* counter or gauge; NULL is ignored */
void metric_set(struct metric *g, double v);
void metric_observe(struct metric *h, double v);
double metric_value(const struct metric *c); /* histogram: count */
int metrics_write(const struct metrics *m, struct buf *out);
