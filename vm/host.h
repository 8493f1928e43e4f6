#pragma once
/* The vm_service of this machine: loads templates, keeps the pools, starts VMs on the qemu and
 * local backends. Owned by cli/ (serve, run); kernelmgr/ only sees host->service. */
#include "common/log.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "vm/accel.h"
#include "vm/vm.h"

struct vm_host_config {
    const char *state_dir;     /* templates/, run/ below it */
    const char *shim_path;     /* cellvisor-shim for the local backend */
    const char *qemu_path;     /* NULL: qemu-system-x86_64 from PATH */
    enum vm_accel accel;       /* auto, kvm, tcg */
    bool insecure_local;       /* offer the template "local" (no isolation) */
    bool local_only;           /* do not load VM templates at all (tests) */
    const char *template_only; /* load just this one (NULL: all that are built) */
    unsigned pool_parked;      /* wanted ready VMs per template; grows with demand up to pool_max */
    unsigned pool_deferred;    /* wanted VMM processes with nothing loaded yet */
    unsigned pool_max;
    unsigned max_vms;   /* of users, running + starting, all templates; 0 = by memory alone */
    unsigned memory_mb; /* for all sandboxes; 0 = nine tenths of what is available at start */
    unsigned start_timeout_ms; /* a start that takes longer fails (default 30000; TCG cold boots
                                  never happen here) */
};
void vm_host_config_defaults(struct vm_host_config *c);
/* The pool of the default template ("python", else the first that is usable) is kept from the
 * start, that of others from their first use. Blocking for a moment (reads manifests; `auto`
 * without a cached verdict probes KVM, up to VM_ACCEL_PROBE_MS); RAM of templates is loaded in the
 * background. Templates that cannot be used are listed with the reason; only what makes all service
 * impossible is an error: -ENOENT no QEMU and nothing else to offer, an accelerator that was
 * demanded and does not work, a state directory that cannot be written. */
struct vm_host;
int vm_host_new(struct loop *l, const struct vm_host_config *c, struct metrics *m,
                const struct log_ctx *log, struct vm_host **ret, struct err *e);
struct vm_service *vm_host_service(struct vm_host *h);
/* Re-read the store (after `template build`), keeping what runs. VMs of a template that was rebuilt
 * live on; its pool is filled anew. */
int vm_host_reload(struct vm_host *h, struct err *e);
/* Drain pools and end all VMs; closed(ctx) when nothing of ours is left running. */
void vm_host_close(struct vm_host *h, unsigned grace_ms, void (*closed)(void *ctx), void *ctx);
void vm_host_free(struct vm_host *h); /* after closed */
/* JSON for /api/pools and doctor: per template parked, deferred, hits, misses, refill times. */
json_t *vm_host_status(const struct vm_host *h);
