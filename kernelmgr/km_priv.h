#pragma once
/* What the files of kernelmgr/ share. Ownership: manager > kernel > {log, router, peers, ops,
 * outbox}; a sandbox is bound through a km_box, which outlives its kernel until the VM's down().
 * Clients and executions are embedded in their owners and only linked here. A kernel is freed by
 * loop_defer after it has left all lists. */
#include "common/map.h"
#include "common/mem.h"
#include "common/sm.h"
#include "kernelmgr/km.h"
#include "kernelmgr/km_execution.h"
#include "kernelmgr/km_session.h"
#include "kernelmgr/log.h"
#include "kernelmgr/router.h"
#include "proto/jp_json.h"

#define KM_PEERS_AWAY_MAX 32u     /* cursors kept for sessions that left, per kernel */
#define KM_OUTBOX_MAX (16u << 20) /* bytes of client messages that wait for the kernel */
#define KM_OUTBOX_COUNT_MAX 4096u
#define KM_HEADER_MAX (64u << 10)   /* header of a client message */
#define KM_INFO_MAX (256u << 10)    /* kernel_info_reply content that is kept */
#define KM_INPUTS_MAX 16u           /* open input_requests (one per subshell) */
#define KM_PROMPT_INTERVAL_MS 1000u /* between interrupts of prompts that nobody can answer */
#define KM_INTERRUPT_TIMEOUT_MS 10000u
#define KM_STABLE_MS 10000u /* alive so long: the count of restarts in a row starts again */
#define KM_FAREWELL_MS 250u /* between a shutdown_reply and the end of its kernel */
/* Log space kept free: for what the guest may still send on the credit it has (a small message
 * costs up to three times its payload, see KM_ENTRY_OVERHEAD; a guest that sends smaller ones than
 * Jupyter has loses some, announced), and for our own answers to all requests in flight when it
 * dies (busy, error, reply, idle: about 1 KiB each). */
#define KM_LOG_RESERVE (3 * (size_t)GL_WINDOW + KM_REQS_MAX * (size_t)4096)

enum km_kernel_state {
    KM_K_NEW,        /* checked, no sandbox yet */
    KM_K_STARTING,   /* sandbox or process is coming up */
    KM_K_READY,      /* takes requests */
    KM_K_RESTARTING, /* the old process is ending, in the same sandbox */
    KM_K_DEAD,       /* no process, no sandbox; can be restarted */
    KM_K_CLOSED,     /* gone from all lookups, freed soon */
};

/* One acquired VM; ctx of its events. `kernel` is NULL once the kernel has given it up. */
struct km_box {
    struct list_node link; /* km_manager::boxes */
    struct km_manager *m;
    struct km_kernel *kernel;
    struct vm *vm;
    bool up;
};

/* A client's session as the kernel remembers it, also while the client is away. */
struct km_peer {
    struct list_node link; /* km_kernel::peers */
    uint32_t id;
    bool internal;            /* an execution of ours: no connection, nothing kept */
    struct km_client *client; /* NULL: away */
    struct km_cursor cursor;
    uint64_t expires_ms; /* while away */
    char session[];
};

/* A client message that waits for the kernel. */
struct km_out {
    struct list_node link; /* km_kernel::urgent or ::outbox */
    struct jp_msg *msg;
    uint32_t gen;
};

/* An input_request that nobody has answered yet. */
struct km_input {
    struct list_node link; /* km_kernel::inputs */
    struct jp_msg *msg;
    uint32_t peer;
    uint64_t seq;
};

enum km_op_kind { KM_OP_START, KM_OP_RESTART, KM_OP_INTERRUPT, KM_OP_SESSION };
struct km_op {
    struct list_node link; /* km_kernel::ops, km_manager::done, or km_session_starts */
    enum km_op_kind kind;
    struct km_manager *m;
    struct km_kernel *kernel; /* NULL: gone */
    km_done_fn fn;            /* NULL: nobody waits */
    km_session_fn session_fn;
    struct km_session *session;
    void *ctx;
    uint64_t ctl_id, deadline_ms;
    char *msg_id; /* interrupt asked for by a client message: whom to answer */
    bool finished;
    struct err result;
};

struct km_kernel {
    struct list_node link; /* km_manager::kernels */
    struct km_manager *m;
    struct sm sm;
    struct log_ctx log_ctx;
    /* identity */
    char id[40];
    char *spec, *template_name, *guest_spec, *principal, *cwd;
    json_t *env;
    enum vm_tier tier_floor;
    uint64_t memory_mb;
    /* sandbox and process */
    struct km_box *box;
    uint32_t stream;
    uint32_t gen;            /* process generation; raised when a restart begins */
    char session[JP_ID_MAX]; /* the kernel's own session id, for messages of ours */
    char *info;              /* kernel_info_reply content */
    bool first_start;        /* never was ready: a failure undoes it */
    bool in_place;           /* the restart that runs is one inside the sandbox */
    bool auto_restart;       /* the start that runs is one */
    bool said_starting;      /* `status: starting` is in the log for this process */
    unsigned restarts, restarts_row;
    uint64_t ready_ms, start_deadline_ms, farewell_ms;
    char *farewell;
    uint64_t start_us; /* when the running start began, for the histogram */
    /* the model */
    char execution_state[16];
    uint64_t last_activity_us, started_us;
    char *reason;
    /* traffic */
    struct km_log log;
    struct km_router router;
    struct list clients, peers, wakes, urgent, outbox, inputs, executions, ops;
    size_t outbox_bytes, outbox_count;
    bool held_back;
    size_t ungranted; /* guest payload bytes whose credit we hold back */
    uint32_t next_peer;
    uint64_t next_ctl, restart_ctl; /* ids of GL_KERNEL_CTL; of the running restart */
    struct buf raw[2];              /* per fd: an unfinished UTF-8 sequence of GL_KERNEL_OUT */
    struct jp_msg *raw_parent; /* last tracked busy status: its parent header owns raw output */
    bool flush_queued;
    uint32_t pass;         /* see unthrottle() */
    uint64_t prompt_ms;    /* last interrupt of a prompt without an asker */
    uint64_t events;       /* GL_EVENT, logged at powers of two */
    uint64_t bad_messages; /* of the guest; logged at powers of two */
    struct loop_timer *timer;
    uint64_t timer_at_ms;
};

struct km_metrics {
    struct metric *running, *starts, *start_failures, *restarts, *deaths, *messages, *joined, *lost,
        *made_up, *bad_messages, *start_seconds, *held_back;
};

struct km_manager {
    struct loop *loop;
    struct vm_service *vms;
    struct km_config cfg;
    char *default_spec, *default_template;
    struct metrics *metrics;
    struct km_metrics met;
    struct log_ctx log_ctx;
    struct list kernels, boxes, sessions, done;
    struct map *by_id;
    size_t n_kernels;
    bool closing, done_queued;
    void (*closed)(void *ctx);
    void *closed_ctx;
};

/* ---- manager.c ---- */
void km_manager_settle(struct km_manager *m); /* closed() when closing and nothing is left */

/* ---- spec.c: where a public kernelspec name leads ---- */
struct km_spec_ref {
    const struct vm_template_desc *template;
    const char *guest_name; /* name inside the template */
    json_t *entry;          /* borrowed: {"spec","resources"} */
};
/* -ENOENT with what exists. ret_name: the public name (malloc'd). */
int km_spec_resolve(struct km_manager *m, const char *name, char **ret_name,
                    struct km_spec_ref *ret, struct err *e);

/* ---- op.c ---- */
struct km_op *km_op_new(struct km_manager *m, struct km_kernel *k, enum km_op_kind kind,
                        km_done_fn fn, void *ctx);
/* Move to the done list; its function runs after the current callback. code 0 or negative. */
void km_op_finish(struct km_op *op, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void km_ops_finish(struct km_kernel *k, enum km_op_kind kind, int code, const char *text);
void km_ops_drop_kernel(struct km_kernel *k); /* also those on the done list */
void km_ops_free_done(struct km_manager *m);

/* ---- kernel.c: life ---- */
extern const struct sm_def km_kernel_sm;
enum km_kernel_state km_state(const struct km_kernel *k);
struct km_kernel *km_kernel_new(struct km_manager *m, const struct km_start *s,
                                const char *public_spec, const struct km_spec_ref *ref);
int km_kernel_acquire(struct km_kernel *k, struct err *e);
void km_kernel_close(struct km_kernel *k, enum km_close_why why, const char *text);
void km_kernel_ready(struct km_kernel *k, struct slice info);
/* The process (or its sandbox) is gone without our asking; text says why. */
void km_kernel_died(struct km_kernel *k, const char *text, bool sandbox_gone);
/* Answer all requests made to the process that has ended. */
void km_kernel_answer_all(struct km_kernel *k, const char *text);
/* msg_id: a client's interrupt_request to answer, or NULL. */
void km_kernel_interrupt_for(struct km_kernel *k, const char *msg_id, km_done_fn fn, void *ctx,
                             struct km_op **ret_op);
int km_kernel_ctl(struct km_kernel *k, uint64_t id, const char *op);
void km_kernel_failed(struct km_kernel *k, int code, const char *text);
void km_kernel_arm(struct km_kernel *k);                  /* re-compute when the timer must fire */
void km_kernel_poke(struct km_kernel *k, uint64_t at_ms); /* it must fire then at the latest */
void km_kernel_process_ended(struct km_kernel *k, const char *text); /* after gen was raised */
void km_kernel_farewell(struct km_kernel *k, const char *text);

/* ---- guest.c: frames of the sandbox ---- */
void km_guest_message(struct km_kernel *k, enum gl_type type, uint32_t stream,
                      struct slice payload);
void km_guest_grant(struct km_kernel *k); /* give credit back as the log allows */

/* ---- client.c ---- */
void km_client_attach_internal(struct km_client *c, struct km_kernel *k, const char *session,
                               const struct km_client_ops *ops);
void km_publish(struct km_kernel *k, struct jp_msg *m, uint32_t peer, uint64_t *ret_seq);
void km_flush_out(struct km_kernel *k); /* send what waits, as far as the link takes it */
void km_flush_soon(struct km_kernel *k);
void km_unthrottle_soon(struct km_kernel *k); /* when there is room again */
void km_out_drop(struct km_kernel *k, uint32_t before_gen);
void km_peers_expire(struct km_kernel *k);
uint64_t km_peers_next_expiry(const struct km_kernel *k);
void km_peer_free(struct km_kernel *k, struct km_peer *p);
void km_inputs_drop(struct km_kernel *k, const char *parent_id); /* NULL: all */

/* ---- state.c: execution_state and last_activity (jupyter.md 2.5) ---- */
void km_state_set(struct km_kernel *k, const char *state);
void km_state_observe(struct km_kernel *k, const struct jp_msg *m, const struct km_req *q,
                      const char *status);

/* ---- synth.c: messages of our own ---- */
void km_synth(struct km_kernel *k, enum jp_channel ch, const char *type, struct slice parent,
              const char *content, uint32_t peer);
void km_synth_status(struct km_kernel *k, const char *state, struct slice parent, uint32_t peer);
/* The whole answer to a request that the kernel will not answer: busy (if none was), error output
 * of an execute, error reply, idle; only what is still owed. Removes q. */
void km_synth_answer(struct km_kernel *k, struct km_req *q, const char *ename, const char *evalue);
/* The same for a message that never became a request. */
void km_synth_refuse(struct km_kernel *k, const struct jp_msg *m, uint32_t peer, const char *ename,
                     const char *evalue);
void km_synth_missing(struct km_kernel *k,
                      struct km_req *q); /* the half of its end that never came */
struct jp_msg *km_synth_gap(struct km_kernel *k, struct km_cursor *c);

/* ---- session.c ---- */
void km_sessions_free(struct km_manager *m);
void km_session_op_cancel(struct km_op *op);

/* ---- execution.c ---- */
void km_executions_observe(struct km_kernel *k, const struct jp_msg *m);
void km_executions_forget(struct km_kernel *k);
