#pragma once
/* One QEMU process: command line, QMP conversation, life. Used by the backend (clones) and by the template
 * builder (boot, save). Machine facts: microvm.md 2.2, 2.5. Private to vm/. */
#include "common/log.h"
#include "common/loop.h"
#include "vm/accel.h"
#include "vm/vm.h"

struct vm_qemu_spec {
    const char *qemu_path; /* NULL: from PATH */
    enum vm_accel accel;   /* KVM or TCG */
    const char *run_dir;   /* exists, 0700, owned by the VMM's uid; qmp.sock, link.sock, console.log live there */
    uint64_t memory_mb;
    unsigned vcpus;
    int mem_fd;            /* guest RAM (memfd); stays the caller's */
    bool mem_private;      /* clones: map it copy-on-write */
    const char *root_image; /* erofs, read-only, virtio-blk */
    /* Boot only (template build); NULL for clones, which start with -incoming defer. */
    const char *kernel, *initrd, *cmdline;
    bool unprivileged;     /* drop uid/caps through vm/jail.h */
    unsigned jail_uid;     /* used when we are root */
};

struct vm_qemu_events {
    void (*ready)(void *ctx);                         /* QMP negotiated; a boot is running already */
    void (*exited)(void *ctx, const struct vm_exit *x); /* exactly once, last */
};
struct vm_qemu;
int vm_qemu_start(struct loop *l, const struct vm_qemu_spec *spec, const struct log_ctx *log,
                  const struct vm_qemu_events *ev, void *ctx, struct vm_qemu **ret, struct err *e);
typedef void (*vm_qemu_done_fn)(void *ctx, const struct err *e); /* e NULL = success */
/* stop, x-ignore-shared, migrate into state_fd; RAM stays in mem_fd (shared). Guest is stopped after. */
void vm_qemu_save(struct vm_qemu *q, int state_fd, vm_qemu_done_fn fn, void *ctx);
/* Clone: migrate-incoming from a fresh open description of the state file, then cont. */
void vm_qemu_load(struct vm_qemu *q, int state_fd, vm_qemu_done_fn fn, void *ctx);
const char *vm_qemu_link_path(const struct vm_qemu *q); /* unix socket of the guest link */
int vm_qemu_pid(const struct vm_qemu *q);
void vm_qemu_kill(struct vm_qemu *q); /* SIGKILL; exited() follows */
void vm_qemu_free(struct vm_qemu *q); /* after exited (or to abandon: kills, no callback) */

/* Everything that must be equal for a snapshot to load: QEMU version, machine, devices, CPU model.
 * Hex SHA-256; blocking (runs qemu --version once, cached in the process). */
int vm_qemu_fingerprint(const struct vm_qemu_spec *spec, char ret[65], struct err *e);
/* "7.2.22"; -ENOENT with a text that names the package when QEMU is missing. */
int vm_qemu_version(const char *qemu_path, char ret[32], struct err *e);
