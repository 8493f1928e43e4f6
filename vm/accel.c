/* The probe of the accelerator and its cached verdict. */
#include "vm/accel.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/proc.h"
#include "vm/accel_guest.h"
#include "vm/drain.h"
#include "vm/jail.h"
#include "vm/qemu.h"
#include "vm/qemu_args.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>

static const char *const names[] = {
    [VM_ACCEL_AUTO] = "auto", [VM_ACCEL_KVM] = "kvm", [VM_ACCEL_TCG] = "tcg"
};

const char *vm_accel_name(enum vm_accel a)
{
    return (unsigned)a < sizeof(names) / sizeof(*names) ? names[a] : "?";
}

int vm_accel_parse(const char *s, enum vm_accel *ret)
{
    for (unsigned i = 0; s && i < sizeof(names) / sizeof(*names); i++)
        if (strcmp(s, names[i]) == 0) {
            *ret = (enum vm_accel)i;
            return 0;
        }
    return -EINVAL;
}

/* ---- the probe ---- */

struct probe {
    struct loop *loop;
    struct proc *proc;
    struct vm_drain errors;
    struct proc_exit exit;
    bool ended, expired;
};

static void on_probe_exit(void *ctx, const struct proc_exit *x)
{
    struct probe *p = ctx;

    p->exit = *x;
    p->ended = true;
}

static void on_probe_deadline(void *ctx)
{
    struct probe *p = ctx;

    p->expired = true;
    proc_kill(p->proc, SIGKILL, false);
}

/* argv: jail prefix, QEMU, an empty machine with our firmware. */
static int probe_spawn(struct probe *p, enum vm_accel accel, const char *qemu, int image_fd,
                       int err_fd, struct err *e)
{
    const char *const qemu_argv[] = {
        qemu ? qemu : VM_QEMU_PROGRAM,
        "-M",
        "q35,smm=off,vmport=off,hpet=off,sata=off,smbus=off,usb=off,i8042=off",
        "-accel",
        vm_accel_name(accel),
        "-cpu",
        accel == VM_ACCEL_KVM ? VM_QEMU_CPU_KVM : VM_QEMU_CPU_TCG,
        "-m",
        "32",
        "-smp",
        "1",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-sandbox",
        VM_QEMU_SANDBOX,
        "-bios",
        "/proc/self/fd/3",
        "-device",
        "isa-debug-exit,iobase=0xf4,iosize=1",
        NULL
    };
    const char *argv[64];
    const struct proc_fd fds[] = { { image_fd, 3 }, { err_fd, STDERR_FILENO } };
    struct proc_spec spec = { .argv = argv,
                              .cwd = "/",
                              .fds = fds,
                              .n_fds = 2,
                              .new_session = true,
                              .die_with_parent = true };
    struct vm_jail jail;
    size_t n = 0;
    int r = vm_jail_prefix(vm_jail_uid(VM_JAIL_SLOTS - 2), accel == VM_ACCEL_KVM, &jail, e);

    if (r < 0)
        return r;
    for (; jail.prefix[n]; n++)
        argv[n] = jail.prefix[n];
    for (size_t i = 0; i < sizeof(qemu_argv) / sizeof(*qemu_argv); i++)
        argv[n++] = qemu_argv[i];
    spec.n_limits = vm_jail_limits(&spec.limits);
    return proc_spawn(p->loop, &spec, on_probe_exit, p, &p->proc, e);
}

static int make_image(struct err *e)
{
    CLEANUP(closep) int fd = memfd_create("probe-guest", MFD_CLOEXEC);
    CLEANUP(freep) uint8_t *image = xmalloc(VM_ACCEL_GUEST_SIZE);

    vm_accel_guest_image(image);
    if (fd < 0 || write(fd, image, VM_ACCEL_GUEST_SIZE) != (ssize_t)VM_ACCEL_GUEST_SIZE)
        return err_errno(e, errno ? errno : EIO, "cannot make the probe's guest");
    return TAKE_FD(fd);
}

static bool describe(struct probe *p, enum vm_accel accel, unsigned deadline_ms,
                     struct vm_accel_verdict *ret)
{
    char line[140];

    vm_drain_finish(&p->errors);
    vm_tail_last_line(&p->errors.tail, line, sizeof(line));
    if (p->expired)
        snprintf(ret->reason, sizeof(ret->reason),
                 "a test guest under %s did not finish within %u ms", vm_accel_name(accel),
                 deadline_ms);
    else if (p->exit.code == VM_ACCEL_GUEST_PASSED)
        snprintf(ret->reason, sizeof(ret->reason), "a test guest ran under %s in %" PRIu64 " ms",
                 vm_accel_name(accel), ret->probe_ms);
    else
        snprintf(ret->reason, sizeof(ret->reason),
                 "a test guest under %s failed (code %d, signal %d)%s%s", vm_accel_name(accel),
                 p->exit.code, p->exit.signal, line[0] ? ": " : "", line);
    return !p->expired && p->exit.code == VM_ACCEL_GUEST_PASSED;
}

bool vm_accel_probe(enum vm_accel accel, const char *qemu, unsigned deadline_ms,
                    struct vm_accel_verdict *ret)
{
    CLEANUP(closep) int image = -1;
    CLEANUP(closep) int err_fd = -1;
    struct probe p = { .errors = { .fd = -1, .log_fd = -1 } };
    struct loop_timer *deadline;
    uint64_t start;
    struct err e;
    bool passed = false;
    int out[2], r;

    p.loop = loop_new(); /* our own: callers block */
    start = loop_now_us(p.loop);
    image = r = make_image(&e);
    if (r >= 0 && pipe2(out, O_CLOEXEC | O_NONBLOCK) < 0)
        r = err_errno(&e, errno, "pipe");
    if (r >= 0) {
        err_fd = out[1];
        vm_drain_start(&p.errors, p.loop, out[0], -1, 0);
        r = probe_spawn(&p, accel, qemu, image, err_fd, &e);
    }
    if (r >= 0) {
        deadline = loop_timer_new(p.loop, on_probe_deadline, &p);
        loop_timer_start(deadline, deadline_ms, 0);
        while (!p.ended)
            loop_step(p.loop, 1000);
        loop_timer_free(deadline);
        ret->probe_ms = (loop_now_us(p.loop) - start) / 1000;
        passed = describe(&p, accel, deadline_ms, ret);
        proc_free(p.proc);
    } else {
        snprintf(ret->reason, sizeof(ret->reason), "%.190s", e.msg);
    }
    vm_drain_stop(&p.errors);
    loop_free(p.loop);
    return passed;
}

/* ---- the cache ---- */

static void add_module_parameters(struct buf *b)
{
    static const char *const modules[] = { "kvm", "kvm_intel", "kvm_amd", "kvm_pvm" };

    for (size_t i = 0; i < sizeof(modules) / sizeof(*modules); i++) {
        CLEANUP(freep) char *dir = xasprintf("/sys/module/%s/parameters", modules[i]);
        struct dirent **list;
        int n = scandir(dir, &list, NULL, alphasort);

        for (int k = 0; k < n; k++) {
            CLEANUP(freep) char *path = fs_join(dir, list[k]->d_name);
            struct buf value = { .max = 4096 };

            if (list[k]->d_name[0] != '.' && fs_read_file(path, 4096, &value, NULL) == 0)
                buf_printf(b, "%s=%.*s", path, SLICE_FMT(buf_slice(&value)));
            buf_fini(&value);
            free(list[k]);
        }
        if (n >= 0)
            free(list);
    }
}

/* What the verdict depends on. The owner of the device counts: a VMM without privileges must open
 * it. */
static int cache_key(const char *device, const char *qemu, char ret[65], struct err *e)
{
    struct vm_qemu_spec spec = {
        .qemu_path = qemu, .accel = VM_ACCEL_KVM, .memory_mb = 32, .vcpus = 1
    };
    struct utsname u;
    struct stat st;
    char machine[65];
    struct buf b;
    int r = vm_qemu_fingerprint(&spec, machine, e);

    if (r < 0)
        return r;
    if (uname(&u) < 0 || stat(device, &st) < 0)
        return err_errno(e, errno, "cannot look at %s", device);
    buf_init(&b, 256u << 10);
    buf_printf(&b, "%d\n%s\n%s %s\n%s %o %u %u\n%u\n", VM_ACCEL_GUEST_VERSION, machine, u.release,
               u.version, device, (unsigned)st.st_mode, (unsigned)st.st_uid, (unsigned)st.st_gid,
               (unsigned)geteuid());
    add_module_parameters(&b);
    fs_sha256(buf_slice(&b), ret);
    buf_fini(&b);
    return 0;
}

static bool cache_read(const char *path, const char *key, struct vm_accel_verdict *ret)
{
    struct err e;
    json_t *v = json_parse_file(path, 65536, &e);
    const char *was = json_string_value(json_object_get(v, "key"));
    const char *accel = json_string_value(json_object_get(v, "accel"));
    const char *reason = json_string_value(json_object_get(v, "reason"));
    enum vm_accel a;
    bool ok = was && accel && reason && strcmp(was, key) == 0 && vm_accel_parse(accel, &a) == 0 &&
              a != VM_ACCEL_AUTO;

    if (ok) {
        *ret = (struct vm_accel_verdict) { .accel = a, .cached = true };
        ret->probe_ms = (uint64_t)json_integer_value(json_object_get(v, "probe_ms"));
        snprintf(ret->reason, sizeof(ret->reason), "%s", reason);
    }
    json_decref(v);
    return ok;
}

static void cache_write(const char *path, const char *key, const struct vm_accel_verdict *v)
{
    json_t *doc = json_pack("{s:s, s:s, s:s, s:I}", "key", key, "accel", vm_accel_name(v->accel),
                            "reason", v->reason, "probe_ms", (json_int_t)v->probe_ms);
    CLEANUP(freep) char *text = doc ? json_dumps(doc, JSON_INDENT(1)) : NULL;

    /* A cache that cannot be written only costs the next start another probe. */
    if (text)
        (void)fs_write_atomic(path, slice_str(text), 0600, NULL);
    json_decref(doc);
}

/* ---- the verdict ---- */

static int find_verdict(const char *device, const char *qemu, const char *state_dir,
                        struct vm_accel_verdict *ret, struct err *e)
{
    CLEANUP(freep) char *path = fs_join(state_dir, "accel.json");
    struct stat st;
    char key[65];
    int r;

    *ret = (struct vm_accel_verdict) { .accel = VM_ACCEL_TCG };
    if (stat(device, &st) < 0) {
        snprintf(ret->reason, sizeof(ret->reason), "no %s", device);
        return 0;
    }
    r = cache_key(device, qemu, key, e);
    if (r < 0 || cache_read(path, key, ret))
        return r;
    if (vm_accel_probe(VM_ACCEL_KVM, qemu, VM_ACCEL_PROBE_MS, ret))
        ret->accel = VM_ACCEL_KVM;
    cache_write(path, key, ret);
    return 0;
}

int vm_accel_resolve_on(const char *device, enum vm_accel want, const char *qemu,
                        const char *state_dir, struct vm_accel_verdict *ret, struct err *e)
{
    struct vm_accel_verdict v = { .accel = VM_ACCEL_TCG, .reason = "asked for" };
    int r;

    if (want != VM_ACCEL_TCG) {
        r = find_verdict(device, qemu, state_dir, &v, e);
        if (r < 0)
            return r;
        if (want == VM_ACCEL_KVM && v.accel != VM_ACCEL_KVM)
            return err_set(
                e, -ENOTSUP, "KVM was demanded but does not work here: %s%s", v.reason,
                v.cached
                    ? " (as found earlier; remove accel.json in the state directory to try again)"
                    : "");
    }
    *ret = v;
    return 0;
}

int vm_accel_resolve(enum vm_accel want, const char *qemu, const char *state_dir,
                     struct vm_accel_verdict *ret, struct err *e)
{
    return vm_accel_resolve_on("/dev/kvm", want, qemu, state_dir, ret, e);
}
