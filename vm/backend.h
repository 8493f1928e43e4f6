#pragma once
/* Seam between a VM's life (vm/guest.h) and what runs it: one const table per kind of machine. A
 * machine is one process; whatever the backend, its guest link ends as one connected stream
 * descriptor. Private to vm/.
 *
 * Life of a machine: spawn -> spawned() -> load -> running(fd) -> exited(). exited() can come at
 * any point, exactly once, last; the process is reaped then and its files are gone. */
#include "common/log.h"
#include "common/loop.h"
#include "vm/template.h"
#include "vm/vm.h"

struct vm_machine {
    const struct vm_backend_ops *ops;
};
struct vm_machine_events {
    /* The process is up and waits for load. */
    void (*spawned)(void *ctx);
    /* The guest runs. fd: its link, non-blocking; the callee's from now on. */
    void (*running)(void *ctx, int fd);
    void (*exited)(void *ctx, const struct vm_exit *x);
};
struct vm_launch {
    const char *id;                 /* of the sandbox; names the run directory */
    const struct vm_template *tmpl; /* outlives the machine; NULL for local */
    int mem_fd;                     /* template's RAM, sealed; stays the caller's */
};

struct vm_backend;
struct vm_backend_ops {
    const char *name;
    int (*spawn)(struct vm_backend *b, const struct vm_launch *launch, const struct log_ctx *log,
                 const struct vm_machine_events *ev, void *ctx, struct vm_machine **ret,
                 struct err *e);
    /* Once, after spawned(). Failure ends in exited(). */
    void (*load)(struct vm_machine *m);
    int (*pid)(const struct vm_machine *m); /* 0: ended */
    /* Background work (pool refills) gives way to what users wait for. Best effort. */
    void (*background)(struct vm_machine *m, bool on);
    void (*kill)(struct vm_machine *m); /* exited() follows */
    /* After exited(); or to abandon: kills and cleans up, no callback. NULL ok. */
    void (*free)(struct vm_machine *m);
    void (*close)(struct vm_backend *b); /* no machine is left */
};
struct vm_backend {
    const struct vm_backend_ops *ops;
};

/* run_dir: this host's own directory, exists; one folder per machine is made below it. */
struct vm_backend *vm_backend_qemu_new(struct loop *l, const char *run_dir, const char *qemu_path);
struct vm_backend *vm_backend_local_new(struct loop *l, const char *run_dir, const char *shim_path);
/* For backends: nice value of a whole process group. */
void vm_backend_set_nice(int pgid, bool background);
