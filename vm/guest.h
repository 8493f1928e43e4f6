#pragma once
/* One VM from spawn to death: a declared state machine over a machine (vm/backend.h) and its guest
 * link. What users hold is the embedded struct vm.
 *
 *   NEW -> SPAWNING -> DEFERRED -> LOADING -> LINKING -> [PREPARING] -> RESUMING -> PARKED ->
 * ASSIGNING -> RUNNING any with a machine -> STOPPING -> DEAD;   a claimed VM that its pool had let
 * die: -> SPAWNING once more
 *
 * NEW: waits for its turn. DEFERRED: VMM up, nothing loaded. LINKING: guest runs, HELLO expected.
 * PREPARING: local only, its kernel starts. RESUMING: entropy, clock, identity, reseed hooks (and
 * warm-up when nobody waits yet); anything but ok ends the VM: fail closed. PARKED: waits for a
 * user. A VM that was RUNNING is never parked again.
 *
 * How far it goes by itself is its goal; a claim (user request) raises the goal to RUN at any
 * stage. Private to vm/. */
#include "common/list.h"
#include "common/metrics.h"
#include "common/sm.h"
#include "vm/backend.h"
#include "vm/channel.h"

enum vm_guest_state {
    VM_GUEST_NEW,
    VM_GUEST_SPAWNING,
    VM_GUEST_DEFERRED,
    VM_GUEST_LOADING,
    VM_GUEST_LINKING,
    VM_GUEST_PREPARING,
    VM_GUEST_RESUMING,
    VM_GUEST_PARKED,
    VM_GUEST_ASSIGNING,
    VM_GUEST_RUNNING,
    VM_GUEST_STOPPING,
    VM_GUEST_DEAD,
    VM_GUEST_STATES
};
extern const struct sm_def vm_guest_machine;
enum vm_guest_goal { VM_GOAL_DEFERRED, VM_GOAL_PARKED, VM_GOAL_RUN };
enum vm_guest_stage {
    VM_STAGE_QUEUE,
    VM_STAGE_SPAWN,
    VM_STAGE_LOAD,
    VM_STAGE_RESUME,
    VM_STAGE_ASSIGN,
    VM_STAGE_TOTAL,
    VM_STAGES
};

struct vm_guest;
struct vm_guest_ops {
    /* The state has changed; never inside a call of the owner's other than vm_guest_start. */
    void (*changed)(void *owner, struct vm_guest *g);
    /* It is dead and everything of it is gone: take it off your lists. It frees itself after the
     * user's down(). */
    void (*gone)(void *owner, struct vm_guest *g, const struct vm_exit *why);
};

/* What all VMs of a pool share; outlives them. */
struct vm_guest_class {
    struct loop *loop;
    struct log_ctx log;
    struct vm_backend *backend;
    const struct vm_template *tmpl; /* NULL: local */
    int mem_fd;
    const char *name; /* of the template */
    enum vm_tier tier;
    const char *default_spec;
    uint64_t generation; /* of the last GL_RESUME */
    unsigned start_timeout_ms;
    unsigned hello_ms; /* for the restored guest's first word; 0 = default */
    struct metric *stage_seconds[VM_STAGES];
    const struct vm_guest_ops *ops;
    void *owner;
};

struct vm_guest {
    struct vm vm;          /* first */
    struct list_node link; /* vm_pool::guests */
    struct vm_guest_class *class;
    struct sm sm;
    struct log_ctx log;
    enum vm_guest_goal goal;
    struct vm_machine *machine;
    struct vm_channel *channel;
    struct loop_timer *stage_timer, *start_timer;
    uint64_t stage_us, claim_us, log_refill_ms, born_ms;
    unsigned log_tokens, log_dropped;
    unsigned hellos; /* of the guest, on this channel */
    bool stuck;      /* ended because a stage took too long; worth another try */
    /* the claim */
    bool claimed, up, releasing, retried;
    const struct vm_events *ev;
    void *ctx;
    char *hostname, *cwd;
    json_t *env;
    char *kernel_info;  /* from GL_PREPARED (local) */
    struct vm_exit why; /* text set: decided by us, before the machine's own end */
};

struct vm_guest *vm_guest_new(struct vm_guest_class *class, enum vm_guest_goal goal);
/* NEW -> SPAWNING. On error the guest stays NEW. */
int vm_guest_start(struct vm_guest *g, struct err *e);
void vm_guest_set_goal(struct vm_guest *g, enum vm_guest_goal goal);
/* Give it to a user. Callbacks come later, from the loop. */
void vm_guest_claim(struct vm_guest *g, const struct vm_request *r, const struct vm_events *ev,
                    void *ctx);
/* End it with this reason (text kept unless one was set before); gone() follows from the loop. */
void vm_guest_fail(struct vm_guest *g, enum vm_exit_reason reason, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void vm_guest_free(struct vm_guest *g); /* abandon: kills, no callback; NULL ok */
static inline enum vm_guest_state vm_guest_state(const struct vm_guest *g)
{
    return (enum vm_guest_state)g->sm.state;
}

/* Between guest.c and guest_link.c: the conversation (GL_HELLO .. GL_ASSIGNED, log, forwarding). */
extern const struct vm_channel_events vm_guest_channel_events;
void vm_guest_linked(struct vm_guest *g, int fd); /* the machine runs: open the channel */
void vm_guest_resume(struct vm_guest *g);
void vm_guest_assign(struct vm_guest *g);
void vm_guest_shutdown(struct vm_guest *g, unsigned grace_ms);
void vm_guest_move(struct vm_guest *g, enum vm_guest_state to, unsigned deadline_ms);
void vm_guest_stage_done(struct vm_guest *g, enum vm_guest_stage stage);
void vm_guest_parked(struct vm_guest *g);  /* RESUMED ok: park, or assign at once */
void vm_guest_running(struct vm_guest *g); /* ASSIGNED ok */
