/* Machines that are QEMU clones of a template's snapshot. Each runs under a uid of its own when we
 * are root. The guest link is connected before the state is loaded, so that the restored guest
 * finds its port as it left it. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/backend.h"
#include "vm/channel.h"
#include "vm/jail.h"
#include "vm/qemu.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

struct backend {
    struct vm_backend base;
    struct loop *loop;
    char *run_dir, *qemu_path;
    uint8_t slots[VM_JAIL_SLOTS]; /* 1 = in use */
    unsigned next_slot;
};

struct machine {
    struct vm_machine base;
    struct backend *backend;
    const struct vm_template *tmpl;
    struct vm_qemu *qemu;
    const struct vm_machine_events *ev;
    void *ctx;
    char *dir;
    unsigned slot;
    int link_fd;
    char failed[200]; /* why the load failed; then we killed it */
};

static unsigned take_slot(struct backend *b)
{
    /* In turn, so that a uid is not used again right after its last owner. More machines than slots
     * is prevented by the host's capacity; if it happened, uids would be shared. */
    for (unsigned i = 0; i < VM_JAIL_SLOTS; i++) {
        unsigned slot = (b->next_slot + i) % VM_JAIL_SLOTS;

        if (!b->slots[slot]) {
            b->slots[slot] = 1;
            b->next_slot = slot + 1;
            return slot;
        }
    }
    return 0;
}

static void cleanup(struct machine *m)
{
    if (m->link_fd >= 0)
        close(m->link_fd);
    m->link_fd = -1;
    if (m->dir)
        fs_rm_rf(m->dir, NULL);
    free(m->dir);
    m->dir = NULL;
    m->backend->slots[m->slot] = 0;
}

static void on_ready(void *ctx)
{
    struct machine *m = ctx;

    m->ev->spawned(m->ctx);
}

static void on_exited(void *ctx, const struct vm_exit *x)
{
    struct machine *m = ctx;
    struct vm_exit why = *x;

    if (m->failed[0]) {
        why.reason = VM_EXIT_START_FAILED;
        snprintf(why.text, sizeof(why.text), "%s", m->failed);
    }
    cleanup(m);
    m->ev->exited(m->ctx, &why);
}

static void on_loaded(void *ctx, const struct err *e)
{
    struct machine *m = ctx;
    int fd = m->link_fd;

    if (e) {
        /* When QEMU itself has ended, its exit says more than this. */
        if (vm_qemu_pid(m->qemu))
            snprintf(m->failed, sizeof(m->failed), "%.190s", e->msg);
        vm_qemu_kill(m->qemu);
        return;
    }
    m->link_fd = -1;
    m->ev->running(m->ctx, fd);
}

static const struct vm_qemu_events qemu_events = { on_ready, on_exited };

static int spawn(struct vm_backend *base, const struct vm_launch *launch, const struct log_ctx *log,
                 const struct vm_machine_events *ev, void *ctx, struct vm_machine **ret,
                 struct err *e)
{
    struct backend *b = (struct backend *)base;
    CLEANUP(freep) char *root = fs_join(launch->tmpl->dir, "root.erofs");
    struct machine *m = xnew(struct machine);
    int r = 0;

    m->base.ops = base->ops;
    m->backend = b;
    m->tmpl = launch->tmpl;
    m->ev = ev;
    m->ctx = ctx;
    m->link_fd = -1;
    m->slot = take_slot(b);
    m->dir = fs_join(b->run_dir, launch->id);
    if (mkdir(m->dir, 0700) < 0) {
        r = err_errno(e, errno, "cannot make the run directory %s", m->dir);
    } else {
        struct vm_qemu_spec spec = {
            .qemu_path = b->qemu_path,
            .accel = launch->tmpl->accel,
            .run_dir = m->dir,
            .memory_mb = launch->tmpl->memory_mb,
            .vcpus = launch->tmpl->vcpus,
            .mem_fd = launch->mem_fd,
            .mem_private = true,
            .root_image = root,
            .unprivileged = true,
            .jail_uid = vm_jail_uid(m->slot),
        };

        r = vm_qemu_start(b->loop, &spec, log, &qemu_events, m, &m->qemu, e);
    }
    if (r == 0) {
        m->link_fd = vm_channel_connect(vm_qemu_link_path(m->qemu));
        if (m->link_fd < 0)
            r = err_errno(e, -m->link_fd, "cannot connect the guest link");
    }
    if (r < 0) {
        vm_qemu_free(m->qemu);
        cleanup(m);
        free(m);
        return r;
    }
    *ret = &m->base;
    return 0;
}

static void load(struct vm_machine *base)
{
    struct machine *m = (struct machine *)base;
    CLEANUP(closep) int fd = -1;
    struct err e;

    if (vm_template_open_state(m->tmpl, &fd, &e) < 0) {
        snprintf(m->failed, sizeof(m->failed), "%.190s", e.msg);
        vm_qemu_kill(m->qemu);
        return;
    }
    vm_qemu_load(m->qemu, fd, on_loaded, m);
}

static int get_pid(const struct vm_machine *base)
{
    return vm_qemu_pid(((const struct machine *)base)->qemu);
}

void vm_backend_set_nice(int pgid, bool background)
{
    CLEANUP(freep) char *path = xasprintf("/proc/%d/autogroup", pgid);
    CLEANUP(closep) int fd = -1;

    /* Only root can take a nice value back, so nobody else sets one. */
    if (pgid <= 0 || geteuid() != 0)
        return;
    setpriority(PRIO_PGRP, (id_t)pgid, background ? 10 : 0);
    /* Every machine has a session of its own; where sessions are scheduled as groups, the group's
     * value counts. */
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd >= 0)
        (void)!write(fd, background ? "10" : "0", background ? 2 : 1);
}

static void background(struct vm_machine *base, bool on)
{
    vm_backend_set_nice(get_pid(base), on);
}

static void kill_machine(struct vm_machine *base)
{
    vm_qemu_kill(((struct machine *)base)->qemu);
}

static void free_machine(struct vm_machine *base)
{
    struct machine *m = (struct machine *)base;

    if (!m)
        return;
    vm_qemu_free(m->qemu);
    if (m->dir)
        cleanup(m);
    free(m);
}

static void close_backend(struct vm_backend *base)
{
    struct backend *b = (struct backend *)base;

    free(b->run_dir);
    free(b->qemu_path);
    free(b);
}

struct vm_backend *vm_backend_qemu_new(struct loop *l, const char *run_dir, const char *qemu_path)
{
    static const struct vm_backend_ops ops = {
        "qemu", spawn, load, get_pid, background, kill_machine, free_machine, close_backend
    };
    struct backend *b = xnew(struct backend);

    b->base.ops = &ops;
    b->loop = l;
    b->run_dir = xstrdup(run_dir);
    b->qemu_path = xstrdup(qemu_path);
    return &b->base;
}
