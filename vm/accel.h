#pragma once
/* Which accelerator this machine really has. /dev/kvm that opens proves nothing (microvm.md 7.1): `auto`
 * boots a tiny real guest under KVM with a deadline, in a child, once; the verdict is cached in the state
 * directory, keyed by kernel release, QEMU version, kvm module parameters and CPU model. */
#include "common/err.h"
#include "common/loop.h"

enum vm_accel { VM_ACCEL_AUTO, VM_ACCEL_KVM, VM_ACCEL_TCG };
int vm_accel_parse(const char *s, enum vm_accel *ret); /* "auto", "kvm", "tcg"; -EINVAL */
const char *vm_accel_name(enum vm_accel a);

struct vm_accel_verdict {
    enum vm_accel accel; /* VM_ACCEL_KVM or VM_ACCEL_TCG, never AUTO */
    bool cached;
    uint64_t probe_ms;
    char reason[200]; /* "KVM guest booted in 412 ms" / "no /dev/kvm" / "guest did not boot within 4 s" */
};
#define VM_ACCEL_PROBE_MS 4000
/* Blocking (start-up and doctor): resolve `want`. AUTO never fails; KVM that does not work is an error. */
int vm_accel_resolve(enum vm_accel want, const char *qemu_path, const char *state_dir,
                     struct vm_accel_verdict *ret, struct err *e);
