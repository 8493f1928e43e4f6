#pragma once
/* One kernel: its process, its channels, its hook, and what is under way. Owned by the shim, one
 * per guest-link stream; a kernel object outlives its processes (restart keeps the object).
 *
 *   NEW -> STARTING -> RUNNING -> DRAINING -> EXITED
 *             |           |          ^           |
 *             +--> STOPPING ---------+           +--> STARTING (restart)
 *
 * STARTING: the process runs, we probe with kernel_info until its reply *and* the idle of that
 * probe have been seen, so that no output can be lost to a late subscription.
 * STOPPING: asked to end; shutdown_request, then SIGTERM, then SIGKILL.
 * DRAINING: the process is reaped; its last bytes are being delivered.
 *
 * Order of what goes to the host: bytes of descriptors 1 and 2 that were written before an iopub
 * message precede it; iopub messages that can be read precede a reply on shell or stdin. */
#include "common/sm.h"
#include "guest-kernel-shim/hook.h"
#include "guest-kernel-shim/launch.h"
#include "guest-kernel-shim/procs.h"
#include "guest-kernel-shim/zmq_ports.h"

enum shim_kernel_state {
    SHIM_KERNEL_NEW,
    SHIM_KERNEL_STARTING,
    SHIM_KERNEL_RUNNING,
    SHIM_KERNEL_STOPPING,
    SHIM_KERNEL_DRAINING,
    SHIM_KERNEL_EXITED,
};
extern const struct sm_def shim_kernel_sm;

#define SHIM_TAIL_MAX 8192u         /* last bytes of descriptors 1 and 2 in exit reports */
#define SHIM_KERNEL_OOM_ADJ 500     /* a kernel goes before the shim */
#define SHIM_PIPE_BYTES (256 << 10) /* behind descriptors 1 and 2 */

struct shim_exit {
    const char *reason; /* "exit", "signal", "oom", "start_failed", "stopped" */
    int code, signal;   /* -1: not that way */
};
/* Pure: how the end of a process is reported. */
struct shim_exit shim_exit_of(enum shim_kernel_state s, int wait_status, bool oom);

enum shim_op { SHIM_OP_INTERRUPT, SHIM_OP_RESTART, SHIM_OP_STOP, SHIM_OP_KILL };
int shim_op_parse(const char *s, enum shim_op *ret); /* -EINVAL */

struct shim_kernel;
struct shim_kernel_ops {
    void (*state)(void *ctx, struct shim_kernel *k); /* report it */
    void (*done)(void *ctx, struct shim_kernel *k, uint64_t id, const char *error);
    /* k wants a new process. true: another kernel object has taken its stream, its waiting
     * operations and messages (shim_kernel_hand_over); k is done. May be NULL. */
    bool (*replace)(void *ctx, struct shim_kernel *k);
    /* May more be taken from the kernel now? */
    bool (*room)(void *ctx, struct shim_kernel *k);
    /* 0, or -EAGAIN: keep it, shim_kernel_pump is called when there is room. */
    int (*message)(void *ctx, struct shim_kernel *k, const struct jp_msg *m);
    int (*output)(void *ctx, struct shim_kernel *k, int fd, struct slice bytes);
    void (*consumed)(void *ctx, struct shim_kernel *k, size_t n); /* host's bytes are disposed of */
};

/* What all kernels of a shim share. */
struct shim_host {
    struct shim_loop loop;
    void *zmq_ctx;
    const struct shim_kernel_ops *ops;
    void *ctx;
    struct log_ctx log;
    char run_dir[80];   /* short: unix socket paths end at 107 bytes */
    char hook_dir[256]; /* folder of cellvisor_hook.py; "" = none */
    bool vm;
    struct shim_user user;   /* kernels run as; uid 0 = as we are */
    struct shim_environ env; /* base environment of kernels */
    char *cwd;
    struct shim_oom oom;
    unsigned start_timeout_ms, grace_ms;
    unsigned processes; /* started so far: numbers their folders */
};

/* A request of our own to the kernel; one at a time. */
struct shim_request {
    char *msg_id; /* NULL: none under way */
    bool replied, idle;
    struct buf error; /* traceback of an error, or text of the reply's failure */
    void (*fn)(void *ctx, const char *error);
    void *ctx;
};

struct shim_kernel {
    struct shim_host *host;
    uint32_t stream;
    struct sm sm;
    struct log_ctx log;
    const struct shim_spec *spec;
    json_t *env; /* of GL_KERNEL_START and GL_ASSIGN; object */
    char *cwd;
    bool background;        /* started with low priority, first to go when memory is short */
    bool held;              /* runs, but is not to be served yet; reported as starting */
    struct list_node grave; /* shim::buried */

    pid_t pid;     /* 0: none */
    char dir[108]; /* of this process */
    char key[SHIM_KEY_LEN + 1];
    char session[40]; /* our session id towards this process */
    struct shim_zmq *zmq;
    struct shim_hook hook;
    bool hooked; /* started with the hook */
    int out_fd[2];
    struct shim_watch out_watch[2];
    struct buf tail;
    bool busy;
    char *info; /* kernel_info_reply content */
    struct shim_exit exit;
    uint64_t started_ms, deadline_ms;
    bool probe_counts; /* all channels were up when it was sent */
    unsigned stage;    /* of STOPPING and of probing */
    bool drain_forced; /* DRAINING has taken long enough (an orphan holds a pipe) */
    struct shim_timer timer, key_timer;

    struct shim_request request;
    struct list inbox[JP_CHANNELS]; /* struct in_item: from the host, not yet sent */
    struct list outbox;             /* struct out_item: for the host, not yet sent */
    struct list pending;            /* struct pending_op */
    bool restart;                   /* start anew when this process has ended */
    char *interrupt_id;             /* msg_id of an interrupt_request under way */
    uint64_t interrupt_op;
    struct shim_timer interrupt_timer, orphan_timer;
    struct shim_proc *orphans; /* descendants at the time of the last interrupt */
    size_t n_orphans;
    unsigned orphan_round;
};

struct shim_kernel *shim_kernel_new(struct shim_host *h, uint32_t stream);
void shim_kernel_free(struct shim_kernel *k); /* kills what runs; NULL ok */
/* NEW or EXITED only. env (object or NULL, borrowed) and cwd may be NULL. Failures come as a state
 * report (EXITED, start_failed), never as a return value. */
void shim_kernel_start(struct shim_kernel *k, const struct shim_spec *spec, json_t *env,
                       const char *cwd);
void shim_kernel_set_env(struct shim_kernel *k, json_t *env, const char *cwd);
/* Answered by ops->done, possibly at once. */
void shim_kernel_op(struct shim_kernel *k, enum shim_op op, uint64_t id);
/* Message from the host; takes the reference. credited: bytes to give back when it is sent. */
void shim_kernel_submit(struct shim_kernel *k, struct jp_msg *m, size_t credited);
/* Deliver what is there (also called when the host can take more). */
void shim_kernel_pump(struct shim_kernel *k);
/* The process was reaped. */
void shim_kernel_reaped(struct shim_kernel *k, int wait_status);
/* Run code silently, without history. fn(ctx, NULL) or the error's text; RUNNING only. */
void shim_kernel_execute(struct shim_kernel *k, const char *code, void (*fn)(void *, const char *),
                         void *ctx);
/* New session id and HMAC key for the process, through its hook, with fresh entropy. */
void shim_kernel_reseed(struct shim_kernel *k, shim_hook_fn fn, void *ctx);
bool shim_kernel_alive(const struct shim_kernel *k); /* a process exists */
/* One line for people: reason, code or signal, and the tail. */
void shim_kernel_end_text(struct shim_kernel *k, char *ret, size_t size);
bool shim_kernel_drained(const struct shim_kernel *k); /* inside: all delivered */

/* Give stream, environment, waiting operations and messages of `from` to `to`, which runs already;
 * from is left without anything to do. `to` is held until shim_kernel_release. */
void shim_kernel_hand_over(struct shim_kernel *from, struct shim_kernel *to);
void shim_kernel_set_stream(struct shim_kernel *k, uint32_t stream);
void shim_kernel_release(struct shim_kernel *k); /* report running, serve what waits */
void shim_kernel_renew(struct shim_kernel *k);   /* kill the process, start another */

/* ---- kernel.c, kernel_start.c and kernel_io.c between themselves ---- */
/* Start a process with its channels and hook; sets pid, dir, key, session. */
int shim_kernel_launch(struct shim_kernel *k, struct err *e);
int shim_kernel_open_io(struct shim_kernel *k, struct err *e);
void shim_kernel_close_io(struct shim_kernel *k);
void shim_kernel_probe(struct shim_kernel *k);
void shim_kernel_running(struct shim_kernel *k);
void shim_kernel_send_own(struct shim_kernel *k, enum jp_channel c, const char *type,
                          const char *content, char **ret_id);
void shim_kernel_request_done(struct shim_kernel *k, const char *error);
void shim_kernel_interrupted(struct shim_kernel *k, const char *error);
void shim_kernel_drop_inbox(struct shim_kernel *k);
void shim_kernel_finish(struct shim_kernel *k); /* DRAINING is over */
