/* Why these options:
 * - q35 boots under TCG every time, microvm does not (TSC calibration). What the guest has no use
 * for is switched off: less to emulate, less to attack, 2 ms less start-up.
 * - No -kernel for clones: their code is in the snapshot; leaving it out saves 25 ms and 15 MB
 * each.
 * - tb-size: the translation cache is private memory of every VM. A boot gets a large one (it ends
 * after the snapshot), clones a small one.
 * - RAM is memory-backend-file on a passed memfd: share=on for the boot, so that the migration
 * stream leaves RAM out (x-ignore-shared), share=off for clones, which then copy on write.
 * - rng-builtin: no device file needed in the jail. It does not make clones differ; GL_RESUME does.
 * - `host` without arch-capabilities: some KVM builds offer that MSR and then refuse to set it. */
#include "vm/qemu_args.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/proc.h"
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define TB_MB_CLONE 64
#define TB_MB_BOOT 256

static const char machine[] =
    "q35,memory-backend=mem0,vmport=off,smm=off,hpet=off,sata=off,smbus=off,"
    "usb=off,graphics=off,i8042=off,dump-guest-core=off,mem-merge=off";

/* The same for the template and all clones, in this order. */
static const char *const devices[] = {
    "-chardev",  "socket,id=con,fd=7",
    "-serial",   "chardev:con",
    "-device",   "virtio-serial-pci,id=vs0",
    "-chardev",  "socket,id=link,fd=5,server=on,wait=off",
    "-device",   "virtserialport,bus=vs0.0,chardev=link,name=org.cellvisor.link",
    "-object",   "rng-builtin,id=rng0",
    "-device",   "virtio-rng-pci,rng=rng0",
    "-add-fd",   "fd=6,set=1",
    "-blockdev", "driver=file,node-name=rootf,filename=/dev/fdset/1,read-only=on,locking=off",
    "-blockdev", "driver=raw,node-name=root,file=rootf,read-only=on",
    "-device",   "virtio-blk-pci,drive=root",
    "-chardev",  "socket,id=qmp,fd=4,server=on,wait=off",
    "-mon",      "chardev=qmp,mode=control",
};

static void add(struct vm_qemu_args *a, const char *word)
{
    assert(a->n + 1 < VM_QEMU_ARGS_MAX);
    a->argv[a->n++] = word;
    a->argv[a->n] = NULL;
}

__attribute__((format(printf, 2, 3))) static void addf(struct vm_qemu_args *a, const char *fmt, ...)
{
    char *at = a->text + a->used;
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(at, sizeof(a->text) - a->used, fmt, ap);
    va_end(ap);
    assert(n >= 0 && a->used + (size_t)n + 1 <= sizeof(a->text)); /* numbers only: bounded */
    a->used += (size_t)n + 1;
    add(a, at);
}

void vm_qemu_args(const struct vm_qemu_spec *s, struct vm_qemu_args *a)
{
    bool kvm = s->accel == VM_ACCEL_KVM;

    a->n = a->used = 0;
    add(a, s->qemu_path ? s->qemu_path : VM_QEMU_PROGRAM);
    add(a, "-M");
    add(a, machine);
    add(a, "-accel");
    if (kvm)
        add(a, "kvm");
    else
        addf(a, "tcg,thread=multi,tb-size=%u",
             s->tb_mb    ? s->tb_mb
             : s->kernel ? TB_MB_BOOT
                         : TB_MB_CLONE);
    add(a, "-cpu");
    add(a, kvm ? VM_QEMU_CPU_KVM : VM_QEMU_CPU_TCG);
    add(a, "-m");
    addf(a, "%" PRIu64, s->memory_mb);
    add(a, "-smp");
    addf(a, "%u", s->vcpus);
    add(a, "-object");
    addf(a,
         "memory-backend-file,id=mem0,size=%" PRIu64
         "M,mem-path=/proc/self/fd/%d,share=%s,dump=off",
         s->memory_mb, VM_QEMU_FD_MEM, s->mem_private ? "off" : "on");
    add(a, "-nodefaults");
    add(a, "-no-user-config");
    add(a, "-display");
    add(a, "none");
    add(a, "-no-reboot");
    add(a, "-sandbox");
    add(a, VM_QEMU_SANDBOX);
    for (size_t i = 0; i < sizeof(devices) / sizeof(*devices); i++)
        add(a, devices[i]);
    if (s->kernel) {
        add(a, "-kernel");
        addf(a, "/proc/self/fd/%d", VM_QEMU_FD_KERNEL);
        if (s->initrd) {
            add(a, "-initrd");
            addf(a, "/proc/self/fd/%d", VM_QEMU_FD_INITRD);
        }
        add(a, "-append");
        add(a, s->cmdline ? s->cmdline : "");
    } else {
        add(a, "-incoming");
        add(a, "defer");
    }
}

/* ---- version and fingerprint ---- */

static int run_version(const char *program, char ret[32], struct err *e)
{
    static const char banner[] = "QEMU emulator version ";
    const char *const argv[] = { program, "--version", NULL };
    struct proc_spec spec = { .argv = argv };
    CLEANUP(closep) int out = memfd_create("qemu-version", MFD_CLOEXEC);
    char text[512] = "", *at;
    ssize_t n;
    int r;

    if (out < 0)
        return err_errno(e, errno, "memfd_create");
    r = proc_run(&spec, out, e);
    if (r == -ENOENT || r == -EACCES)
        return err_set(e, -ENOENT,
                       "%s cannot be run: install QEMU (Debian package qemu-system-x86) or set "
                       "the path of the program",
                       program);
    if (r < 0)
        return r;
    n = pread(out, text, sizeof(text) - 1, 0);
    at = n > 0 ? strstr(text, banner) : NULL;
    if (r != 0 || !at)
        return err_set(e, -EINVAL, "'%s --version' does not answer like QEMU (exit code %d)",
                       program, r);
    at += sizeof(banner) - 1;
    at[strcspn(at, " \n(")] = '\0';
    snprintf(ret, 32, "%.31s", at);
    return 0;
}

int vm_qemu_version(const char *qemu_path, char ret[32], struct err *e)
{
    /* One answer per process and path: QEMU's packages are not upgraded under a running gateway
     * without a restart, and a run costs 20 ms. Called from pool threads too. */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char known_path[256], known[32];
    const char *program = qemu_path ? qemu_path : VM_QEMU_PROGRAM;
    int r = 0;

    pthread_mutex_lock(&lock);
    if (!known[0] || strcmp(known_path, program) != 0) {
        char fresh[32];

        r = run_version(program, fresh, e);
        if (r == 0) {
            snprintf(known_path, sizeof(known_path), "%s", program);
            memcpy(known, fresh, sizeof(known));
        }
    }
    if (r == 0)
        memcpy(ret, known, sizeof(known));
    pthread_mutex_unlock(&lock);
    return r;
}

/* Host CPU: under KVM the guest sees it, and under TCG its TSC rate is what the guest's clock was
 * calibrated against. The first processor's lines of /proc/cpuinfo, without what changes from read
 * to read. */
static int host_cpu(struct buf *out, bool flags)
{
    static const char *const keys[] = { "vendor_id", "cpu family", "model\t", "model name",
                                        "stepping" };
    CLEANUP(fclosep) FILE *f = fopen("/proc/cpuinfo", "re");
    CLEANUP(freep) char *line = NULL;
    size_t cap = 0;
    int r = f ? 0 : -errno;

    while (r == 0 && getline(&line, &cap, f) > 1) {
        bool take = flags && strncmp(line, "flags", 5) == 0;

        for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++)
            take |= strncmp(line, keys[i], strlen(keys[i])) == 0;
        if (take)
            r = buf_append_str(out, line);
    }
    return r;
}

int vm_qemu_fingerprint(const struct vm_qemu_spec *spec, char ret[65], struct err *e)
{
    bool kvm = spec->accel == VM_ACCEL_KVM;
    char version[32];
    struct buf b;
    int r = vm_qemu_version(spec->qemu_path, version, e);

    if (r < 0)
        return r;
    buf_init(&b, 64u << 10);
    r = buf_printf(&b, "1\n%s\n%s\n%s\n%s\n%" PRIu64 "\n%u\n", version, machine,
                   vm_accel_name(spec->accel), kvm ? VM_QEMU_CPU_KVM : VM_QEMU_CPU_TCG,
                   spec->memory_mb, spec->vcpus);
    for (size_t i = 0; r == 0 && i < sizeof(devices) / sizeof(*devices); i++)
        r = buf_printf(&b, "%s\n", devices[i]);
    if (r == 0)
        r = host_cpu(&b, kvm);
    if (r == 0)
        fs_sha256(buf_slice(&b), ret);
    else
        err_errno(e, -r, "cannot describe this machine's CPU");
    buf_fini(&b);
    return r;
}
