#pragma once
/* The shim as a whole: the guest link's messages on one side, kernels on the other. One object, one
 * thread, lives as long as the process. VM mode and local mode differ only in what shim_host::vm
 * guards: mounts, identity (guest.h), user, power-off. */
#include "guest-kernel-shim/kernel.h"
#include "guest-kernel-shim/link.h"

/* A command of the host that takes several steps; one at a time. See flow.c. */
enum shim_flow_kind { SHIM_FLOW_NONE, SHIM_FLOW_PREPARE, SHIM_FLOW_RESUME, SHIM_FLOW_ASSIGN };
struct shim_flow {
    enum shim_flow_kind kind;
    json_t *args;
    const char *step; /* for error texts: what is under way */
    unsigned waiting; /* answers still to come */
    char error[4096]; /* first failure */
    uint64_t begin_us, entropy_us, clock_us, hooks_us, warmup_us, mark_us;
    struct shim_timer timer;
};

/* See standby.c. */
struct shim_standby {
    bool enabled, ready;
    unsigned again_ms;          /* after a promotion, until the next one is started */
    struct shim_kernel *kernel; /* NULL: none */
    const struct shim_spec *spec;
    char *preload;
    struct shim_timer timer;
};

struct shim {
    struct shim_host host;
    struct shim_link link;
    struct shim_catalog catalog;
    struct shim_kernel *kernels[GL_STREAMS_MAX];
    bool state_owed[GL_STREAMS_MAX]; /* a report did not fit into the link's queue */
    int signal_fd;
    struct shim_watch signal_watch;
    struct shim_flow flow;
    struct shim_standby standby;
    struct list buried;   /* struct shim_kernel: freed before the loop waits again */
    json_t *assigned_env; /* of all ASSIGNs; object */
    bool assigned;        /* handed to a user: kernel traffic is delivered, never dropped */
    bool prepared;        /* a template was prepared: its specs are known to the host */
    bool failed;          /* a resume went wrong: nothing is served any more */
    bool ending;
    struct shim_timer end_timer;
};

struct shim_config {
    int link_fd;
    bool vm;
    const char *run_dir;
    const char *hook_dir; /* NULL: none */
};
/* 0 or an error for the operator. */
int shim_init(struct shim *s, const struct shim_config *c, struct err *e);
/* Until the link has closed (local) or the machine is told to power off. */
void shim_run(struct shim *s);
void shim_fini(struct shim *s);

/* ---- between shim.c and flow.c ---- */
bool shim_may_send(const struct shim *s);
void shim_send_json(struct shim *s, enum gl_type type, uint32_t stream, json_t *v); /* takes v */
json_t *shim_json_text(const char *text); /* any bytes; what is no UTF-8 becomes U+FFFD */
/* A line for the host's build progress and log. */
void shim_tell(struct shim *s, enum log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void shim_report_state(struct shim *s, struct shim_kernel *k);
/* The folder if it can be entered, else the home folder (with a log line). */
const char *shim_usable_cwd(struct shim *s, const char *cwd);

#define SHIM_FLOW_OP UINT64_MAX /* id of kernel operations that a flow started */
void shim_flow_begin(struct shim *s, enum shim_flow_kind kind, struct slice payload);
void shim_flow_kernel_state(struct shim *s, struct shim_kernel *k);
void shim_flow_op_done(struct shim *s, const char *error);
void shim_flow_standby(struct shim *s, const char *error); /* the attempt of PREPARE is over */
void shim_flow_abort(struct shim *s); /* the link went down: nobody waits for an answer */

/* ---- standby.c ---- */
void shim_standby_remember(struct shim *s, const struct shim_spec *spec, const char *preload);
bool shim_standby_begin(struct shim *s); /* false: none is wanted now */
void shim_standby_state(struct shim *s);
/* Promote it in the place of old, which wants a new process. false: start one from scratch. */
bool shim_standby_take(struct shim *s, struct shim_kernel *old);
void shim_standby_end(struct shim *s);
/* Free k (NULL ok) once no callback of its own can be on the stack. */
void shim_bury(struct shim *s, struct shim_kernel *k);
void shim_empty_graves(struct shim *s);
