/* The last stages of a build: boot the image, let the shim start the kernel and run the recipe's
 * preload, save RAM and device state, and prove the result by starting one clone of it.
 *
 * Runs QEMU and the guest link on the build's loop; the stages wait in turn for a flag that a
 * callback sets. Callbacks only record. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/json.h"
#include "common/mem.h"
#include "vm/channel.h"
#include "vm/jail.h"
#include "vm/qemu.h"
#include "vm/store.h"
#include "vm/template.h"
#include "vm/template_priv.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define BOOT_MS 180000u
#define PREPARE_MS 900000u
#define VERIFY_MS 120000u
#define SETTLE_MS 3000u
/* The guest kernel's command line. Each instruction costs under emulation, the first time most, so
 * what the one user of a machine has no use for is off: mitigations between guest processes,
 * security modules, audit, pressure accounting, zeroing of what the kernel allocates, the lock-up
 * watchdog, huge pages (a first touch would copy 2 MB). The clock is the TSC, which QEMU saves with
 * the machine; left alone the kernel takes the ACPI timer, a port access for each look. */
#define CMDLINE                                                                                    \
    "console=ttyS0 quiet reboot=t panic=-1 clocksource=tsc tsc=reliable mitigations=off lsm= "     \
    "audit=0 psi=0 init_on_alloc=0 nowatchdog transparent_hugepage=never "                         \
    "randomize_kstack_offset=off preempt=none cpuidle.off=1"
/* Seconds that boot and preload take under TCG on an ordinary machine: only for the bar. */
#define BOOT_GUESS_S 12.0
#define PRELOAD_GUESS_S 60.0

struct snap {
    struct tb *b;
    const char *dir;
    char *run_dir;
    int mem_fd;
    struct vm_qemu *qemu;
    struct vm_channel *channel;
    struct loop_timer *tick;
    double guess_s;
    bool exited, link_closed;
    bool hello, have_specs, prepared, resumed, saved;
    json_t *specs, *info;
    struct err failed; /* first reason that a callback learnt */
};

/* ---- what the guest says ---- */

static void fail(struct snap *s, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void fail(struct snap *s, int code, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (!s->failed.code)
        err_set(&s->failed, code, "%s", text);
}

/* {"ok":true,...} or {"ok":false,"error":text}. */
static bool said_ok(struct snap *s, json_t *v, const char *what)
{
    const char *why = json_string_value(json_object_get(v, "error"));
    if (json_is_true(json_object_get(v, "ok")))
        return true;
    fail(s, -EIO, "%s: %.350s", what, why ? why : "the guest says no");
    return false;
}

static void on_log(struct snap *s, json_t *v)
{
    const char *text = json_string_value(json_object_get(v, "text"));
    if (!text)
        return;
    tb_log(s->b, "guest: %s", text);
    tb_step(s->b, -1, "%.60s", text);
}

static void on_specs(struct snap *s, json_t *v)
{
    json_t *all = json_object_get(v, "kernelspecs");
    const char *want = s->b->recipe->default_kernel;
    s->have_specs = true;
    json_decref(s->specs);
    s->specs = json_incref(v);
    if (!json_object_get(all, want)) {
        const char *any = json_string_value(json_object_get(v, "default"));
        fail(s, -EINVAL, "the image has no kernel \"%s\" (recipe key default_kernel)%s%s%s", want,
             any ? "; it has \"" : "", any ? any : "", any ? "\"" : "");
    }
}

static void on_prepared(struct snap *s, json_t *v)
{
    s->prepared = true;
    if (!said_ok(s, v, "preload"))
        return;
    json_t *info = json_object_get(v, "info");
    if (!json_is_object(info))
        fail(s, -EPROTO, "the guest sent no kernel information");
    s->info = json_incref(info);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct snap *s = ctx;
    if (type == GL_KERNEL_MSG || type == GL_KERNEL_OUT) {
        gl_link_grant(vm_channel_link(s->channel), stream, payload.n);
        return;
    }
    struct err e = { 0 };
    json_t *v = json_parse(payload, &e);
    if (!v) {
        fail(s, -EPROTO, "guest link: %s: %s", gl_type_name(type), e.msg);
        return;
    }
    if (type == GL_HELLO) {
        s->hello = true;
        gl_link_set_phase(vm_channel_link(s->channel), GL_PHASE_IDLE);
    } else if (type == GL_SPECS) {
        on_specs(s, v);
    } else if (type == GL_PREPARED) {
        on_prepared(s, v);
    } else if (type == GL_RESUMED) {
        s->resumed = said_ok(s, v, "resuming the clone");
    } else if (type == GL_LOG) {
        on_log(s, v);
    }
    json_decref(v);
}

static void on_link_closed(void *ctx, int code, const char *why)
{
    struct snap *s = ctx;
    s->link_closed = true;
    /* When QEMU has ended, its exit says more. */
    tb_log(s->b, "guest link closed: %s (%d)", why, code);
    if (code == -EPROTO)
        fail(s, code, "%s", why);
}

static const struct vm_channel_events channel_events = { on_message, NULL, on_link_closed };

/* ---- QEMU ---- */

static void on_ready(void *ctx)
{
    (void)ctx; /* boots run by themselves; the clone is loaded once `ready` is seen below */
}

static void on_clone_ready(void *ctx);

static void on_exited(void *ctx, const struct vm_exit *x)
{
    struct snap *s = ctx;
    s->exited = true;
    tb_log(s->b, "VM ended: %s", x->text);
    fail(s, -EIO, "%s", x->text);
}

static const struct vm_qemu_events boot_events = { on_ready, on_exited };
static const struct vm_qemu_events clone_events = { on_clone_ready, on_exited };

static void on_saved(void *ctx, const struct err *e)
{
    struct snap *s = ctx;
    if (e)
        fail(s, e->code, "%s", e->msg);
    else
        s->saved = true;
}

static void on_tick(void *ctx)
{
    struct snap *s = ctx;
    double t = (double)(loop_now_us(s->b->loop) - s->b->stage_began_us) / 1e6;
    double f = t / s->guess_s;
    tb_step(s->b, f < 0.8 ? f : 1 - 0.2 / (1 + (f - 0.8) * 2), NULL);
}

/* Run the loop until *flag; failure, cancellation and the deadline end it. */
static int wait_for(struct snap *s, const bool *flag, unsigned deadline_ms, const char *what,
                    struct err *e)
{
    uint64_t end = loop_now_ms(s->b->loop) + deadline_ms;
    while (!*flag && !s->failed.code && !s->b->cancelled) {
        if (loop_now_ms(s->b->loop) > end)
            return err_set(e, -ETIMEDOUT, "%s did not happen within %u s", what,
                           deadline_ms / 1000);
        loop_step(s->b->loop, 200);
    }
    int r = tb_check_cancelled(s->b, e);
    if (r < 0)
        return r;
    /* "saved" and the like count even if the VM ended a moment later. */
    return *flag && !s->failed.code ? 0 : err_set(e, s->failed.code, "%s", s->failed.msg);
}

static int open_link(struct snap *s, struct err *e)
{
    int fd = vm_channel_connect(vm_qemu_link_path(s->qemu));
    if (fd < 0)
        return err_errno(e, -fd, "guest link");
    s->link_closed = s->hello = false;
    s->channel = vm_channel_new(s->b->loop, fd, &s->b->log, &channel_events, s);
    return 0;
}

static void close_vm(struct snap *s)
{
    vm_channel_free(s->channel);
    vm_qemu_free(s->qemu);
    s->channel = NULL;
    s->qemu = NULL;
    s->exited = false;
}

static int start_vm(struct snap *s, bool clone, const struct vm_qemu_events *ev, struct err *e)
{
    CLEANUP(freep) char *root = fs_join(s->dir, "root.erofs");
    CLEANUP(freep) char *kernel = fs_join(s->dir, "vmlinux");
    CLEANUP(freep) char *initrd = fs_join(s->dir, "initrd.img");
    struct vm_qemu_spec q = {
        .qemu_path = s->b->spec->qemu_path,
        .accel = s->b->accel,
        .run_dir = s->run_dir,
        .memory_mb = s->b->recipe->memory_mb,
        .vcpus = s->b->recipe->vcpus,
        .mem_fd = s->mem_fd,
        .mem_private = clone,
        .root_image = root,
        .kernel = clone ? NULL : kernel,
        .initrd = clone ? NULL : initrd,
        .cmdline = clone ? NULL : CMDLINE,
        .unprivileged = true,
        .jail_uid = vm_jail_uid(VM_JAIL_SLOTS - 1 - (unsigned)getpid() % 64),
    };
    int r = vm_store_remove_tree(s->run_dir, e);
    if (r == 0)
        r = fs_mkdir_p(s->run_dir, 0700, e);
    if (r == 0)
        r = vm_qemu_start(s->b->loop, &q, &s->b->log, ev, s, &s->qemu, e);
    return r < 0 ? r : open_link(s, e);
}

/* The kernel's last words make a failed boot understandable. */
static void log_console(struct snap *s)
{
    CLEANUP(freep) char *path = fs_join(s->run_dir, "console.log");
    struct buf b;
    if (fs_read_file(path, VM_QEMU_CONSOLE_LOG_MAX + 1, &b, NULL) < 0)
        return;
    const char *text = buf_cstr(&b);
    if (text)
        tb_log(s->b, "---- guest console ----\n%s\n----", text);
    buf_fini(&b);
}

/* ---- the stages ---- */

static int boot(struct snap *s, struct err *e)
{
    struct tb *b = s->b;
    tb_begin(b, TB_BOOT, "booting the guest");
    s->guess_s = BOOT_GUESS_S;
    s->mem_fd = memfd_create("cellvisor-build", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (s->mem_fd < 0 || ftruncate(s->mem_fd, (off_t)(b->recipe->memory_mb << 20)) < 0)
        return err_errno(e, errno, "guest memory");
    int r = start_vm(s, false, &boot_events, e);
    if (r == 0)
        r = wait_for(s, &s->hello, BOOT_MS, "the guest's hello", e);
    if (r == 0)
        r = wait_for(s, &s->have_specs, BOOT_MS, "the list of kernels", e);
    if (r < 0) {
        log_console(s);
        return r == -EINTR ? r : err_wrap(e, r, "booting the guest");
    }
    tb_end(b, false);
    return 0;
}

static int prepare(struct snap *s, struct err *e)
{
    struct tb *b = s->b;
    const struct vm_recipe *r = b->recipe;
    tb_begin(b, TB_PRELOAD, "starting the kernel");
    s->guess_s = PRELOAD_GUESS_S;
    json_t *m = json_pack("{s:s,s:s?,s:s?,s:i}", "spec", r->default_kernel, "preload", r->preload,
                          "warmup", r->warmup, "timeout_ms", (int)PREPARE_MS);
    CLEANUP(freep) char *text = json_dumps(m, JSON_COMPACT);
    json_decref(m);
    struct slice part = slice_str(text);
    int rc = gl_link_send(vm_channel_link(s->channel), GL_PREPARE, 0, &part, 1);
    if (rc < 0)
        return err_errno(e, -rc, "asking the guest to start the kernel");
    rc = wait_for(s, &s->prepared, PREPARE_MS + 10000, "the kernel's start and preload", e);
    if (rc < 0) {
        log_console(s);
        return rc == -EINTR ? rc : err_wrap(e, rc, "starting kernel %s", r->default_kernel);
    }
    tb_end(b, false);
    return 0;
}

static int write_memory(struct snap *s, json_t **ret, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(s->dir, "memory");
    uint64_t size = s->b->recipe->memory_mb << 20, used = 0;
    char digest[65];
    CLEANUP(closep) int out = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out < 0 || ftruncate(out, (off_t)size) < 0)
        return err_errno(e, errno, "%s", path);
    int r = vm_memory_copy(s->mem_fd, out, size, &used, digest, e);
    if (r == 0 && fdatasync(out) < 0)
        r = err_errno(e, errno, "%s", path);
    if (r == 0)
        *ret = json_pack("{s:I,s:I,s:s}", "bytes", (json_int_t)size, "used", (json_int_t)used,
                         "digest", digest);
    return r;
}

static int save(struct snap *s, json_t **ret_memory, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(s->dir, "vmstate");
    tb_begin(s->b, TB_SNAPSHOT, "saving the snapshot");
    /* The shim sees its port close and waits for the next host: that moment is what we save. Timers
     * of the last cell, of RCU and of work queues run out first, else every clone runs them. */
    vm_channel_free(s->channel);
    s->channel = NULL;
    loop_step(s->b->loop, 0);
    uint64_t settle = loop_now_ms(s->b->loop) + SETTLE_MS;
    while (loop_now_ms(s->b->loop) < settle && !s->failed.code)
        loop_step(s->b->loop, 50);
    CLEANUP(closep) int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_errno(e, errno, "%s", path);
    vm_qemu_save(s->qemu, fd, on_saved, s);
    int r = wait_for(s, &s->saved, VM_QEMU_SAVE_MS + 10000, "saving the device state", e);
    if (r < 0)
        return r == -EINTR ? r : err_wrap(e, r, "saving the snapshot");
    if (fdatasync(fd) < 0)
        return err_errno(e, errno, "%s", path);
    close_vm(s);
    tb_step(s->b, 0.3, "writing guest memory");
    r = write_memory(s, ret_memory, e);
    if (r == 0)
        tb_end(s->b, false);
    return r;
}

/* ---- proof ---- */

static void on_loaded(void *ctx, const struct err *e)
{
    struct snap *s = ctx;
    if (e)
        fail(s, e->code, "%s", e->msg);
}

static void on_clone_ready(void *ctx)
{
    struct snap *s = ctx;
    CLEANUP(freep) char *path = fs_join(s->dir, "vmstate");
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail(s, -errno, "%s: %s", path, strerror(errno));
        return;
    }
    vm_qemu_load(s->qemu, fd, on_loaded, s);
}

static int send_resume(struct snap *s, struct err *e)
{
    uint8_t entropy[64];
    char coded[89], id[33];
    id_random(entropy, sizeof(entropy));
    id_base64(coded, slice_of(entropy, sizeof(entropy)));
    id_token(id, 16);
    json_t *m = json_pack("{s:i,s:s,s:I,s:s,s:s,s:s?}", "generation", 1, "entropy", coded,
                          "realtime_us", (json_int_t)loop_wall_us(s->b->loop), "hostname",
                          "cellvisor", "machine_id", id, "warmup", s->b->recipe->warmup);
    CLEANUP(freep) char *text = json_dumps(m, JSON_COMPACT);
    json_decref(m);
    struct slice part = slice_str(text);
    int r = gl_link_send(vm_channel_link(s->channel), GL_RESUME, 0, &part, 1);
    return r < 0 ? err_errno(e, -r, "resuming the clone") : 0;
}

static int verify(struct snap *s, struct err *e)
{
    tb_begin(s->b, TB_VERIFY, "starting a clone");
    if (fcntl(s->mem_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0)
        return err_errno(e, errno, "sealing guest memory");
    int r = start_vm(s, true, &clone_events, e);
    if (r == 0)
        r = wait_for(s, &s->hello, VERIFY_MS, "the clone's hello", e);
    if (r == 0)
        r = send_resume(s, e);
    if (r == 0)
        r = wait_for(s, &s->resumed, VERIFY_MS, "the clone's answer", e);
    close_vm(s);
    if (r < 0)
        return r == -EINTR ? r : err_wrap(e, r, "the snapshot does not start");
    tb_end(s->b, false);
    return 0;
}

static int facts(struct snap *s, json_t *memory, json_t **ret, struct err *e)
{
    struct vm_qemu_spec q = {
        .qemu_path = s->b->spec->qemu_path,
        .accel = s->b->accel,
        .memory_mb = s->b->recipe->memory_mb,
        .vcpus = s->b->recipe->vcpus,
    };
    char fingerprint[65], version[32];
    int r = vm_qemu_fingerprint(&q, fingerprint, e);
    if (r == 0)
        r = vm_qemu_version(q.qemu_path, version, e);
    if (r == 0)
        *ret = json_pack("{s:O,s:{s:s,s:O},s:O,s:s,s:s}", "specs", s->specs, "kernel", "spec",
                         s->b->recipe->default_kernel, "info", s->info, "memory", memory,
                         "fingerprint", fingerprint, "qemu_version", version);
    return r;
}

int tb_stage_snapshot(struct tb *b, const char *dir, json_t **ret_facts, struct err *e)
{
    struct snap s = { .b = b, .dir = dir, .mem_fd = -1 };
    json_t *memory = NULL;
    s.run_dir = fs_join(dir, "run");
    s.tick = loop_timer_new(b->loop, on_tick, &s);
    loop_timer_start(s.tick, 300, 300);
    int r = boot(&s, e);
    if (r == 0)
        r = prepare(&s, e);
    loop_timer_stop(s.tick);
    if (r == 0)
        r = save(&s, &memory, e);
    if (r == 0)
        r = verify(&s, e);
    if (r == 0)
        r = facts(&s, memory, ret_facts, e);
    close_vm(&s);
    loop_timer_free(s.tick);
    loop_step(b->loop, 0); /* let closed handles go */
    (void)vm_store_remove_tree(s.run_dir, NULL);
    closep(&s.mem_fd);
    json_decref(memory);
    json_decref(s.specs);
    json_decref(s.info);
    free(s.run_dir);
    return r;
}
