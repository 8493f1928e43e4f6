#pragma once
/* The VMs of one template: those of users, those that wait for one (parked, deferred), and how many
 * there should be. A pool starts and ends VMs within what the host's budget allows and never takes
 * a used one back. It is also the template's entry in the list that vm_templates() gives. Private
 * to vm/.
 *
 * Demand: every request that found nothing parked raises the wanted number by one up to `max`;
 * every quiet minute lowers it by one down to the configured floor. A template whose starts fail
 * backs off exponentially (VM_POOL_BACKOFF_MS doubling to VM_POOL_BACKOFF_MAX_MS) and says why. */
#include "vm/guest.h"

#define VM_POOL_BACKOFF_MS 500u
#define VM_POOL_BACKOFF_MAX_MS 60000u
#define VM_POOL_DECAY_MS 60000u
#define VM_POOL_REFUSE_AFTER 3u /* failures in a row, after which users are told to wait too */
#define VM_OVERHEAD_MB 96u      /* VMM heap and translation cache, beside guest RAM */
#define VM_LOCAL_MB 200u        /* what a local shim and its kernel are counted as */

/* Shared by all pools of a host. */
struct vm_budget {
    uint64_t limit_mb;   /* memory for sandboxes */
    unsigned max_vms;    /* 0: by memory alone */
    unsigned max_starts; /* user starts at a time; more wait in line */
    unsigned max_refills;
    /* current */
    unsigned vms, users, user_starts, refills;
    uint64_t used_mb, users_mb;
};

struct vm_pool_ops {
    /* Something changed that may let work start: call vm_pool_balance for all pools soon. */
    void (*kick)(void *host);
};
struct vm_pool {
    struct list_node link; /* vm_host::pools or ::retired */
    struct vm_guest_class class;
    struct list guests;       /* oldest first */
    char *name, *why_not;     /* why_not: cannot start anything */
    struct vm_template *tmpl; /* owned; NULL: local, or unusable */
    bool local, retired;
    bool active; /* default template, or used before: its pool is kept */
    bool memory_wanted, memory_loading;
    json_t *specs;                                    /* local: as its shim said */
    unsigned want_deferred, want_min, want_max, want; /* parked */
    uint64_t last_miss_ms;
    unsigned failures; /* in a row */
    uint64_t retry_at_ms;
    char last_error[200];
    uint64_t hits_parked, hits_deferred, misses;
    double refill_ms; /* of the last VM that was parked */
    struct vm_budget *budget;
    const struct vm_pool_ops *ops;
    void *host;
    struct metrics *metrics;
    struct metric *exits[8];
    struct metric *gauges[4], *hits[3];
};
struct vm_pool_counts {
    unsigned parked, deferred, refilling; /* nobody's */
    unsigned queued, starting, running;   /* users' */
    unsigned stopping;
};

struct vm_pool_spec {
    struct loop *loop;
    const char *name;
    struct vm_template *tmpl; /* taken; NULL with local, or with why_not */
    json_t *specs;            /* local: taken */
    const char *why_not;
    bool local;
    struct vm_backend *backend;
    struct vm_budget *budget;
    struct metrics *metrics; /* NULL ok */
    const struct log_ctx *log;
    const struct vm_pool_ops *ops;
    void *host;
};
struct vm_pool *vm_pool_new(const struct vm_pool_spec *s);
/* Free, killing what is left without callbacks. NULL ok. */
void vm_pool_free(struct vm_pool *p);
uint64_t vm_pool_cost_mb(const struct vm_pool *p); /* of one VM */
struct vm_pool_counts vm_pool_count(const struct vm_pool *p);
/* Ready to give VMs: memory is there, starts do not fail. */
bool vm_pool_startable(const struct vm_pool *p);
/* As vm_acquire, for this template. */
int vm_pool_acquire(struct vm_pool *p, const struct vm_request *r, const struct vm_events *ev,
                    void *ctx, struct vm **ret, struct err *e);
/* The user start that waits longest, or NULL. */
struct vm_guest *vm_pool_next_queued(const struct vm_pool *p);
void vm_pool_start_queued(struct vm_pool *p, struct vm_guest *g);
/* Start at most one VM for the pool, if it wants one and the budget allows; true when it did. */
bool vm_pool_refill(struct vm_pool *p);
/* End what is too much; adjust the wanted number. */
void vm_pool_trim(struct vm_pool *p);
/* End one VM that nobody has, to make room; false when there is none. */
bool vm_pool_evict(struct vm_pool *p);
/* Milliseconds until a refill may be tried again; 0: now. */
uint64_t vm_pool_backoff_ms(const struct vm_pool *p);
/* Nothing new: end pool VMs (users' too with grace when all). */
void vm_pool_drain(struct vm_pool *p, bool users, unsigned grace_ms);
void vm_pool_publish(struct vm_pool *p); /* gauges */
