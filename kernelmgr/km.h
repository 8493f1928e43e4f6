#pragma once
/* kernelmgr/ as its users (gateway/, cli/) see it: kernels in sandboxes, their ordered log,
 * attached clients. Everything is asynchronous and on the loop; nothing blocks; ids are global
 * strings, so that a node may be remote one day. Objects are owned by the manager: hold a `struct
 * km_kernel *` only between an attach and its closed() or inside a call; otherwise look it up by
 * id.
 *
 * Ownership of data: every kernel belongs to a principal; lookups take the principal and do not see
 * others'. */
#include "common/err.h"
#include "common/list.h"
#include "common/log.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "proto/jp_msg.h"
#include "vm/vm.h"

struct km_manager;
struct km_kernel;

struct km_config {
    const char *default_spec;     /* NULL: that of the default template */
    const char *default_template; /* NULL: "python" where built, else the first ready one */
    unsigned max_kernels;         /* running + starting; 0 = no limit of our own */
    unsigned max_kernels_per_principal;
    size_t log_bytes_max;      /* per kernel, in memory (default 64 MiB) */
    size_t replay_bytes_max;   /* kept for absent clients when nobody needs it (default 16 MiB) */
    uint64_t replay_ttl_ms;    /* a cursor of a client that left is kept so long (default 10 min) */
    uint64_t start_timeout_ms; /* default 60 s */
    /* A restart inside the sandbox gets so long (default 120 s: an emulated machine starts Python
     * slowly); after that, or when it fails, the kernel moves to a fresh sandbox. */
    uint64_t restart_timeout_ms;
    uint64_t reply_grace_ms; /* idle seen but no reply: synthesise one after this (default 2 s) */
    unsigned shutdown_grace_ms; /* default 3 s */
    unsigned restart_limit;     /* automatic restarts in a row (default 5), 0 = never */
    size_t coalesce_max; /* join consecutive stream messages of one parent up to so many bytes (64
                            KiB) */
};
void km_config_defaults(struct km_config *c);

struct km_manager *km_manager_new(struct loop *l, struct vm_service *vms, const struct km_config *c,
                                  struct metrics *m, const struct log_ctx *log);
/* Shut all kernels down; clients get closed(KM_CLOSE_SHUTDOWN); closed(ctx) when all VMs are down.
 */
void km_manager_close(struct km_manager *m, void (*closed)(void *ctx), void *ctx);
void km_manager_free(struct km_manager *m);

/* ---- kernelspecs ---- */
/* {"default":name,"kernelspecs":{name:{"name","spec","resources":{file:size}}}} of all ready
 * templates, new ref. spec.metadata.cellvisor = {"template":..,"tier":..,"memory_mb":..}. Resource
 * URLs are the gateway's business. */
json_t *km_specs(struct km_manager *m);
/* Bytes of a resource file of a spec, into a malloc'd block. -ENOENT. */
int km_spec_resource(struct km_manager *m, const char *spec, const char *file, uint8_t **ret,
                     size_t *ret_len);

/* ---- kernels ---- */
struct km_start {
    const char *principal;
    const char *spec;      /* NULL or "": default */
    const char *kernel_id; /* wanted id (uuid-shaped) or NULL */
    const char *cwd;
    json_t *env; /* borrowed */
    enum vm_tier tier_floor;
};
struct km_op; /* a pending start, restart or interrupt */
/* k is NULL on failure; e then says why (codes below). Once; never after km_op_cancel. */
typedef void (*km_done_fn)(void *ctx, struct km_kernel *k, const struct err *e);
/* 0: fn will be called once (201 can be sent when it is). Immediate errors, nothing started:
 * -ENOENT unknown spec (e names it and what exists), -EEXIST id in use, -EINVAL bad id or env,
 * -EDQUOT a limit (e says which), -EAGAIN no capacity now (try later), -EPERM tier floor. */
int km_kernel_start(struct km_manager *m, const struct km_start *s, km_done_fn fn, void *ctx,
                    struct km_op **ret_op, struct err *e);
/* The requester went away: a start is undone, anything else just loses its callback. NULL ok. */
void km_op_cancel(struct km_op *op);

struct km_kernel *km_kernel_find(struct km_manager *m, const char *principal, const char *id);
/* fn(ctx, k) for each kernel of the principal (NULL: all), in order of start; stop when it returns
 * false. */
void km_kernel_each(struct km_manager *m, const char *principal,
                    bool (*fn)(void *ctx, struct km_kernel *k), void *ctx);

struct km_kernel_info {
    const char *id, *spec, *principal;
    const char *execution_state; /* starting idle busy restarting dead */
    uint64_t last_activity_us;   /* UTC */
    uint64_t started_us;
    unsigned connections;
    const char *reason;       /* why dead (exit code 7, SIGKILL, out of memory ...), or NULL */
    const struct vm_info *vm; /* NULL once it is gone */
    const char *kernel_info;  /* kernel_info_reply content, JSON, or NULL */
    unsigned restarts;
};
void km_kernel_info(const struct km_kernel *k, struct km_kernel_info *ret);

/* done with k when the guest has acknowledged: -ESRCH the kernel is dead, -ETIMEDOUT. */
void km_kernel_interrupt(struct km_kernel *k, km_done_fn fn, void *ctx, struct km_op **ret_op);
/* Same id, same websockets, fresh process; done when it is ready. In-flight requests get error
 * replies. */
void km_kernel_restart(struct km_kernel *k, km_done_fn fn, void *ctx, struct km_op **ret_op);
/* Gone from all lookups at once; clients get closed(KM_CLOSE_DELETED). Idempotent. */
void km_kernel_shutdown(struct km_kernel *k, const char *reason);

/* ---- clients ---- */
enum km_close_why {
    KM_CLOSE_DELETED,  /* kernel is gone for good */
    KM_CLOSE_REPLACED, /* another client attached with the same session id */
    KM_CLOSE_SHUTDOWN, /* gateway stops; come back later */
};
struct km_client;
struct km_client_ops {
    /* km_client_next has something: an edge, the next comes only after next() has returned NULL.
     * Always from the loop, never inside a km_ call. */
    void (*wake)(struct km_client *c);
    void (*closed)(struct km_client *c, enum km_close_why why,
                   const char *text); /* detached already */
    /* Stop / resume reading from this client. on comes inside km_client_submit, off from the loop.
     */
    void (*throttle)(struct km_client *c, bool on);
};
struct km_peer;
struct km_client { /* embedded by its owner; fields belong to kernelmgr */
    const struct km_client_ops *ops;
    struct km_kernel *kernel; /* NULL: not attached */
    struct km_peer *peer;     /* its session in the kernel: cursor and gaps */
    char session[JP_ID_MAX];
    uint64_t cursor;            /* sequence number of the last message pulled */
    struct list_node link;      /* km_kernel::clients */
    struct list_node wake_link; /* km_kernel::wakes */
    uint32_t pass;              /* of handing out chances to submit again */
    bool awake, throttled;
};
/* session "" makes one up. A cursor kept for this session (client was here before) continues:
 * missed messages come first; otherwise the client starts at the present end of the log, after a
 * fresh `status` of the kernel is known from the REST model. Counts as a connection. An
 * input_request that this session has seen and not answered comes again. Messages lost meanwhile
 * (replay limits) are announced by a stderr stream message with their number. A client that is
 * attached with the same session gets closed(KM_CLOSE_REPLACED) before this returns. -ESRCH: the
 * kernel is gone; -E2BIG: session id too long. */
int km_client_attach(struct km_client *c, struct km_kernel *k, const char *session,
                     const struct km_client_ops *ops);
void km_client_detach(struct km_client *c); /* idempotent; keeps the cursor for replay_ttl */
/* Hand a message of the client to the kernel (keeps a reference). Messages before the kernel is
 * ready wait in order. 0; -EAGAIN: refused, throttle(on) is in force: keep it and try again after
 * throttle(off); -ESRCH kernel dead (an error reply has been put in the log for requests).
 * Whatever else is wrong with a request (header over 64 KiB, too large for the sandbox link, an id
 * that another client has in flight) is told to the client by an error reply. */
int km_client_submit(struct km_client *c, struct jp_msg *m);
/* Next message for this client, a new reference, or NULL: nothing now (wake will come). */
struct jp_msg *km_client_next(struct km_client *c);
size_t km_client_lag(const struct km_client *c); /* bytes of log not yet pulled */
