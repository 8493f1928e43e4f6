#pragma once
/* Public face of vm/: sandboxes as kernelmgr/ sees them. A vm_service hands out VMs; every VM ends
 * in exactly one down() callback, after which (only) the pointer is invalid. All calls and
 * callbacks are on the loop; none blocks; a callback never comes from inside the call that caused
 * it.
 *
 * The real service is vm/host.h (pools over the qemu and local backends); tests embed the same
 * structs in a fake. */
#include "common/err.h"
#include "proto/gl.h"
#include <jansson.h>

enum vm_tier { VM_TIER_LOCAL, VM_TIER_TCG, VM_TIER_KVM }; /* rising strength of isolation */
const char *vm_tier_name(enum vm_tier t);                 /* "local", "tcg", "kvm" */
int vm_tier_parse(const char *s, enum vm_tier *ret);

enum vm_exit_reason {
    VM_EXIT_RELEASED,     /* we asked for it */
    VM_EXIT_START_FAILED, /* never came up; text says at which stage and why */
    VM_EXIT_VMM,          /* the VMM process ended by itself or was killed */
    VM_EXIT_GUEST,        /* the guest powered off */
    VM_EXIT_PROTOCOL,     /* guest link desync or violation: killed by us */
    VM_EXIT_DEADLINE,     /* a start stage took too long */
};
const char *vm_exit_reason_name(enum vm_exit_reason r); /* "released", "vmm" ...: metric label */
struct vm_exit {
    enum vm_exit_reason reason;
    int code, signal; /* of the VMM, when it ended */
    char text[200];   /* one line for people */
};

/* Milliseconds of each start stage, for metrics and `cellvisor run --json`; 0 = not taken. */
struct vm_timings {
    double queue_ms, spawn_ms, load_ms, resume_ms, assign_ms, total_ms;
    const char *origin; /* "parked", "deferred", "cold", "local" */
    /* Steps of GL_RESUME as the guest reports them, whenever that was: fresh entropy, clock and
     * identity, reseed of its kernels. */
    double guest_entropy_ms, guest_clock_ms, guest_hooks_ms;
};

struct vm_info {
    char id[40]; /* sandbox id (uuid) */
    const char *template_name;
    enum vm_tier tier;
    int pid; /* of VMM or shim */
    struct vm_timings timings;
    /* The kernel that the template started before its snapshot, or stream 0 when there is none. */
    uint32_t kernel_stream;
    const char *kernel_spec;
    const char *kernel_info; /* its kernel_info_reply content, JSON text */
};

struct vm_events {
    void (*up)(void *ctx); /* assigned to you: kernel frames may be sent */
    /* Guest frames of types GL_KERNEL_*, GL_EVENT. payload valid during the call. Credited payloads
     * must be given back with vm_grant once disposed of. */
    void (*message)(void *ctx, enum gl_type type, uint32_t stream, struct slice payload);
    void (*writable)(void *ctx, uint32_t stream);
    void (*down)(void *ctx, const struct vm_exit *why); /* exactly once, last */
};

struct vm_request {
    const char *template_name;
    const char *spec;     /* kernelspec wanted; picks the pre-started kernel where it matches */
    const char *hostname; /* guest's; NULL = derived from the id */
    const char *cwd;      /* NULL = home */
    json_t *env;          /* borrowed: object of strings, or NULL */
    enum vm_tier tier_floor;
};

struct vm;
struct vm_ops {
    int (*send)(struct vm *vm, enum gl_type type, uint32_t stream, const struct slice *parts,
                size_t n);
    void (*grant)(struct vm *vm, uint32_t stream, size_t n);
    size_t (*queued)(const struct vm *vm, uint32_t stream);
    void (*close_stream)(struct vm *vm, uint32_t stream);
    void (*release)(struct vm *vm, unsigned grace_ms);
};
struct vm { /* embedded first in the implementation's struct */
    const struct vm_ops *ops;
    struct vm_info info;
};
/* 0, -EAGAIN (queue of that stream is full; writable() will come), -E2BIG, -ENOTCONN (not up). */
static inline int vm_send(struct vm *vm, enum gl_type type, uint32_t stream,
                          const struct slice *parts, size_t n)
{
    return vm->ops->send(vm, type, stream, parts, n);
}
static inline void vm_grant(struct vm *vm, uint32_t stream, size_t n)
{
    vm->ops->grant(vm, stream, n);
}
static inline size_t vm_queued(const struct vm *vm, uint32_t stream)
{
    return vm->ops->queued(vm, stream);
}
static inline void vm_close_stream(struct vm *vm, uint32_t stream)
{
    vm->ops->close_stream(vm, stream);
}
/* End it: grace_ms > 0 asks the guest to shut down first. Also cancels a start. Idempotent. */
static inline void vm_release(struct vm *vm, unsigned grace_ms)
{
    vm->ops->release(vm, grace_ms);
}

/* What can be started. Array and strings belong to the service and stay until templates_changed. */
struct vm_template_desc {
    const char *name;
    bool ready;          /* built, current and loadable */
    const char *why_not; /* when not ready */
    enum vm_tier tier;   /* that a VM of it would have on this machine now */
    uint64_t memory_mb, disk_mb;
    unsigned vcpus;
    json_t *specs; /* borrowed: as GL_SPECS: {"default":..,"kernelspecs":{..}} */
    unsigned parked, deferred, starting, running;
};
struct vm_service;
struct vm_service_ops {
    int (*acquire)(struct vm_service *s, const struct vm_request *r, const struct vm_events *ev,
                   void *ctx, struct vm **ret, struct err *e);
    size_t (*templates)(struct vm_service *s, const struct vm_template_desc **ret);
};
struct vm_service {
    const struct vm_service_ops *ops;
};
/* Start or take from the pool. 0 and *ret at once (up() or down() follow), or:
 * -ENOENT unknown template, -EPERM tier below the floor, -EAGAIN no capacity now, other: e says. */
static inline int vm_acquire(struct vm_service *s, const struct vm_request *r,
                             const struct vm_events *ev, void *ctx, struct vm **ret, struct err *e)
{
    return s->ops->acquire(s, r, ev, ctx, ret, e);
}
static inline size_t vm_templates(struct vm_service *s, const struct vm_template_desc **ret)
{
    return s->ops->templates(s, ret);
}
