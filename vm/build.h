#pragma once
/* Building templates: recipe -> root image, guest kernel, initramfs -> booted guest -> snapshot ->
 * proven clone -> published in the store (vm/store.h).
 *
 * The call blocks and runs a loop of its own; it is meant for a tool (`cellvisor template build`).
 * Finished stages are kept under the hash of what went into them, so an interrupted or failed build
 * goes on where it stopped and a changed `preload` does not reinstall packages. Nothing becomes
 * visible before the last rename. Two builds of one template: the second waits, then finds the
 * work done. SIGINT and SIGTERM end it cleanly. */
#include "common/err.h"
#include "vm/accel.h"
#include <jansson.h>
#include <stdbool.h>

struct vm_build_spec {
    const char *state_dir;
    const char *recipe_path; /* template.json or its folder */
    const char *shim_path;   /* becomes PID 1 of the guest */
    const char *python_dir;  /* the shim's Python files (*.py), NULL = none */
    const char *qemu_path;   /* NULL = from PATH */
    const char *mirror;      /* Debian mirror; NULL = $CELLVISOR_MIRROR, else what apt here uses */
    enum vm_accel accel;
    bool refresh; /* ask the mirror again instead of reusing stages */
    bool force;   /* make the snapshot again even if nothing changed */
};

enum vm_build_phase {
    VM_BUILD_WAIT,  /* for another builder or stage lock; text says for whom */
    VM_BUILD_BEGIN, /* a stage begins */
    VM_BUILD_STEP,  /* progress inside the stage */
    VM_BUILD_END,   /* it is done (or was cached) */
};
struct vm_build_progress {
    enum vm_build_phase phase;
    const char *stage;     /* "packages", "boot", ... */
    unsigned index, total; /* 1-based */
    double overall;        /* 0..1 */
    const char *text;      /* what happens now; NULL = nothing new */
    bool cached;           /* END: nothing had to be done */
    uint64_t ms;           /* since the stage began */
};
typedef void (*vm_build_progress_fn)(void *ctx, const struct vm_build_progress *p);

struct vm_build_result {
    char name[48], hash[65];
    bool up_to_date; /* nothing had to be built */
    uint64_t ms, bytes;
};

/* 0, or: -EINVAL the recipe is wrong; -ENOENT a program or package is missing; -ENOSPC; -EINTR
 * interrupted (finished stages are kept); any other errno. e names stage, package, key or line and
 * the log file. */
int vm_build(const struct vm_build_spec *spec, vm_build_progress_fn fn, void *ctx,
             struct vm_build_result *ret, struct err *e);
