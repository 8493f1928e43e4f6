#pragma once
/* Which accelerator this machine really has. /dev/kvm that opens proves nothing (microvm.md 7.1):
 * `auto` runs a tiny real guest under KVM with a deadline, in a child as unprivileged as a real
 * VMM, once; the verdict is cached in the state directory (accel.json), keyed by kernel release,
 * QEMU version, kvm module parameters and CPU model. */
#include "common/err.h"
#include "common/loop.h"

enum vm_accel { VM_ACCEL_AUTO, VM_ACCEL_KVM, VM_ACCEL_TCG };
int vm_accel_parse(const char *s, enum vm_accel *ret); /* "auto", "kvm", "tcg"; -EINVAL */
const char *vm_accel_name(enum vm_accel a);

struct vm_accel_verdict {
    enum vm_accel accel; /* VM_ACCEL_KVM or VM_ACCEL_TCG, never AUTO */
    bool cached;
    uint64_t probe_ms;
    char reason[200]; /* "a guest ran under KVM in 41 ms" / "no /dev/kvm" / "the guest did not ..."
                       */
};
#define VM_ACCEL_PROBE_MS 4000
/* Blocking (start-up and doctor): resolve `want`. AUTO never fails; KVM that does not work is an
 * error (-ENOTSUP), no QEMU for KVM or AUTO too (-ENOENT). */
int vm_accel_resolve(enum vm_accel want, const char *qemu_path, const char *state_dir,
                     struct vm_accel_verdict *ret, struct err *e);

/* Parts of it, for tests. device: "/dev/kvm". */
int vm_accel_resolve_on(const char *device, enum vm_accel want, const char *qemu_path,
                        const char *state_dir, struct vm_accel_verdict *ret, struct err *e);
/* Run the probe guest under accel; true when it says that it passed before the deadline. */
bool vm_accel_probe(enum vm_accel accel, const char *qemu_path, unsigned deadline_ms,
                    struct vm_accel_verdict *ret);
