#pragma once
/* One QEMU process: command line (vm/qemu_args.h), QMP conversation (vm/qmp.h), life. Used by the
 * backend (clones) and by the template builder (boot, save). Machine facts: microvm.md 2.2, 2.5.
 * Private to vm/.
 *
 * Files in run_dir: qmp.sock and link.sock (made and listened on by us, handed over as descriptors,
 * so that we can connect at once and the VMM needs no write access), and for boots console.log
 * (what the guest printed, at most VM_QEMU_CONSOLE_LOG_MAX bytes). The owner of run_dir removes
 * them with it. */
#include "common/log.h"
#include "common/loop.h"
#include "vm/accel.h"
#include "vm/vm.h"

#define VM_QEMU_CONSOLE_LOG_MAX (1u << 20)
#define VM_QEMU_CONSOLE_TAIL 4096u
#define VM_QEMU_GREETING_MS 10000u
#define VM_QEMU_COMMAND_MS 10000u
#define VM_QEMU_LOAD_MS 20000u
#define VM_QEMU_SAVE_MS 60000u

struct vm_qemu_spec {
    const char *qemu_path; /* NULL: from PATH */
    enum vm_accel accel;   /* KVM or TCG */
    const char *run_dir;   /* exists, 0700, owned by the VMM's uid or ours */
    uint64_t memory_mb;
    unsigned vcpus;
    unsigned tb_mb;   /* TCG translation cache; 0 = 64 for clones, 256 for boots */
    int mem_fd;       /* guest RAM (memfd); stays the caller's */
    bool mem_private; /* clones: map it copy-on-write */
    const char
        *root_image; /* erofs, read-only, virtio-blk; opened by us, the VMM needs no access */
    /* Boot only (template build); NULL for clones, which start with -incoming defer. Opened by us.
     */
    const char *kernel, *initrd, *cmdline;
    bool unprivileged; /* drop uid/caps through vm/jail.h */
    unsigned jail_uid; /* used when we are root (vm_jail_uid) */
};

struct vm_qemu_events {
    /* QMP negotiated; a boot is running already, a clone waits for vm_qemu_load. */
    void (*ready)(void *ctx);
    void (*exited)(void *ctx, const struct vm_exit *x); /* exactly once, last */
};
struct vm_qemu;
/* 0 and *ret: ready() or exited() follow, from the loop. -ENOENT: no QEMU or no setpriv (e names
 * the package), other errno: e says. */
int vm_qemu_start(struct loop *l, const struct vm_qemu_spec *spec, const struct log_ctx *log,
                  const struct vm_qemu_events *ev, void *ctx, struct vm_qemu **ret, struct err *e);
/* e NULL = success. Called once per operation, also when QEMU ends meanwhile (then before
 * exited()); not after vm_qemu_free. One operation at a time. */
typedef void (*vm_qemu_done_fn)(void *ctx, const struct err *e);
/* stop, x-ignore-shared, migrate into state_fd; RAM stays in mem_fd (shared). Guest is stopped
 * after. */
void vm_qemu_save(struct vm_qemu *q, int state_fd, vm_qemu_done_fn fn, void *ctx);
/* Clone: migrate-incoming from a fresh open description of the state file, then cont. state_fd may
 * be closed when this returns. */
void vm_qemu_load(struct vm_qemu *q, int state_fd, vm_qemu_done_fn fn, void *ctx);
/* Unix socket of the guest link; connect with vm_channel_connect, at any time after vm_qemu_start.
 */
const char *vm_qemu_link_path(const struct vm_qemu *q);
int vm_qemu_pid(const struct vm_qemu *q); /* 0 when it has ended */
/* The end of what the guest printed on its console, for error texts. Valid until the next loop
 * turn. */
const char *vm_qemu_console_tail(const struct vm_qemu *q);
void vm_qemu_kill(struct vm_qemu *q); /* SIGKILL; exited() follows */
void vm_qemu_free(struct vm_qemu *q); /* after exited, or to abandon: kills, no callback; NULL ok */

/* Everything that must be equal for a snapshot to load: QEMU version, machine, devices, CPU model.
 * Hex SHA-256; blocking (runs qemu --version once, cached in the process); callable from loop_work.
 */
int vm_qemu_fingerprint(const struct vm_qemu_spec *spec, char ret[65], struct err *e);
/* "7.2.22"; -ENOENT with a text that names the package when QEMU is missing. */
int vm_qemu_version(const char *qemu_path, char ret[32], struct err *e);
