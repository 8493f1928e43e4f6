#include "guest-kernel-shim/init.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/json.h"
#include "common/log.h"
#include "common/mem.h"
#include "guest-kernel-shim/guest.h"
#include "guest-kernel-shim/link.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define DISK_MB_DEFAULT 512
#define WAIT_MS 30000 /* for devices to appear: emulated machines are slow */
#define WAIT_STEP_MS 10
#define PROCESSES_MIN 192u
#define PROCESSES_MAX 4096u

/* guest.json lives in the initramfs: read before the root is switched, used after. */
static json_t *guest_config;

uint64_t init_cmdline_number(const char *cmdline, const char *key, uint64_t def)
{
    size_t n = strlen(key);
    const char *p = cmdline;

    while ((p = strstr(p, key))) {
        if ((p == cmdline || p[-1] == ' ') && p[n] == '=') {
            char *end;
            uint64_t v = strtoull(p + n + 1, &end, 10);

            if (end != p + n + 1 && (*end == '\0' || *end == ' ' || *end == '\n'))
                return v;
        }
        p += n;
    }
    return def;
}

static void sleep_ms(unsigned ms)
{
    struct timespec ts = { .tv_nsec = (long)ms * 1000000 };

    nanosleep(&ts, NULL);
}

struct mount_row {
    const char *type, *where, *options;
    unsigned long flags;
    bool must;
};

static int mount_all(const struct mount_row *rows, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        const struct mount_row *m = &rows[i];

        mkdir(m->where, 0755);
        if (mount(m->type, m->where, m->type, m->flags, m->options) < 0 && errno != EBUSY &&
            m->must)
            return err_errno(e, errno, "mount %s on %s", m->type, m->where);
    }
    return 0;
}

static int mount_early(struct err *e)
{
    static const struct mount_row rows[] = {
        { "proc", "/proc", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, true },
        { "sysfs", "/sys", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, true },
        { "devtmpfs", "/dev", "mode=0755", MS_NOSUID, true },
    };
    int r = mount_all(rows, 3, e);
    int fd = open("/dev/console", O_RDWR | O_NOCTTY);

    for (int i = 0; fd >= 0 && i < 3; i++)
        dup2(fd, i);
    if (fd > 2)
        close(fd);
    return r;
}

/* ---- modules ---- */

static int load_module(const char *path, struct err *e)
{
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return err_errno(e, errno, "kernel module %s", path);
    if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)
        return err_errno(e, errno, "kernel module %s", path);
    return 0;
}

static int load_modules(const char *list, struct err *e)
{
    CLEANUP(fclosep) FILE *f = fopen(list, "re");
    char line[512];
    int r = 0;

    if (!f)
        return 0; /* a kernel with everything built in */
    while (r == 0 && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = '\0';
        if (line[0] && line[0] != '#')
            r = load_module(line, e);
    }
    return r;
}

/* ---- root ---- */

static int wait_for(const char *path, struct err *e)
{
    for (unsigned ms = 0; ms < WAIT_MS; ms += WAIT_STEP_MS) {
        if (access(path, F_OK) == 0)
            return 0;
        sleep_ms(WAIT_STEP_MS);
    }
    return err_set(e, -ENODEV, "%s did not appear within %d s", path, WAIT_MS / 1000);
}

static int mount_image(const char *device, const char *where, struct err *e)
{
    static const char *const types[] = { "erofs", "ext4", "squashfs" };
    int code = 0;

    for (size_t i = 0; i < 3; i++) {
        if (mount(device, where, types[i], MS_RDONLY, NULL) == 0)
            return 0;
        code = errno;
        if (i == 0 && code != EINVAL && code != ENODEV)
            break;
    }
    return err_errno(e, code, "mount %s as root image", device);
}

static uint64_t disk_mb(void)
{
    char line[4096] = "";
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    uint64_t def = (uint64_t)json_integer_value(json_object_get(guest_config, "disk_mb"));

    if (fd >= 0) {
        ssize_t n = read(fd, line, sizeof(line) - 1);
        line[n > 0 ? n : 0] = '\0';
        close(fd);
    }
    return init_cmdline_number(line, "cv.disk_mb", def ? def : DISK_MB_DEFAULT);
}

/* /newroot = image below, tmpfs above. */
static int mount_root(struct err *e)
{
    char options[64];

    if (wait_for("/dev/vda", e) < 0)
        return e->code;
    mkdir("/lower", 0755);
    mkdir("/rw", 0755);
    mkdir("/newroot", 0755);
    if (mount_image("/dev/vda", "/lower", e) < 0)
        return e->code;
    snprintf(options, sizeof(options), "size=%llum,mode=0755", (unsigned long long)disk_mb());
    if (mount("tmpfs", "/rw", "tmpfs", 0, options) < 0)
        return err_errno(e, errno, "tmpfs for writes");
    mkdir("/rw/upper", 0755);
    mkdir("/rw/work", 0700);
    if (mount("overlay", "/newroot", "overlay", 0,
              "lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work") < 0)
        return err_errno(e, errno, "overlay of image and tmpfs");
    return 0;
}

/* The hook travels in the initramfs, so that it always fits this shim. */
static void copy_hook(void)
{
    struct buf text = { 0 };
    struct err e = { 0 };

    if (fs_read_file("/cellvisor/python/cellvisor_hook.py", 1u << 20, &text, &e) < 0)
        return; /* then the image's own, if it has one */
    if (fs_mkdir_p("/newroot" INIT_HOOK_DIR, 0755, &e) < 0 ||
        fs_write_atomic("/newroot" INIT_HOOK_DIR "/cellvisor_hook.py", buf_slice(&text), 0644, &e) <
            0)
        log_warn(NULL, "hook not installed: %s", e.msg);
    buf_fini(&text);
}

/* Free the RAM of the initramfs: files of this device only; what is mapped stays in use. */
static void remove_tree(int dir_fd, dev_t device)
{
    DIR *d = fdopendir(dir_fd);
    struct dirent *entry;

    if (!d) {
        close(dir_fd);
        return;
    }
    while ((entry = readdir(d))) {
        struct stat st;

        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
            fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || st.st_dev != device)
            continue;
        if (S_ISDIR(st.st_mode)) {
            int sub = openat(dirfd(d), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (sub >= 0)
                remove_tree(sub, device);
        } else {
            unlinkat(dirfd(d), entry->d_name, 0);
        }
    }
    closedir(d);
}

static int switch_root(struct err *e)
{
    static const char *const moved[] = { "/proc", "/sys", "/dev" };
    int old = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat st;

    for (size_t i = 0; i < 3; i++) {
        char to[32];

        snprintf(to, sizeof(to), "/newroot%s", moved[i]);
        mkdir(to, 0755);
        if (mount(moved[i], to, NULL, MS_MOVE, NULL) < 0)
            return err_errno(e, errno, "move %s", moved[i]);
    }
    if (chdir("/newroot") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 ||
        chdir("/") < 0)
        return err_errno(e, errno, "switch root");
    if (old >= 0 && fstat(old, &st) == 0)
        remove_tree(old, st.st_dev);
    else if (old >= 0)
        close(old);
    return 0;
}

static int mount_late(struct err *e)
{
    static const struct mount_row rows[] = {
        { "tmpfs", "/run", "mode=0755,size=64m", MS_NOSUID | MS_NODEV, true },
        { "tmpfs", "/tmp", "mode=1777,size=50%", MS_NOSUID | MS_NODEV, true },
        { "devpts", "/dev/pts", "gid=5,mode=0620,ptmxmode=0666", MS_NOSUID | MS_NOEXEC, true },
        { "tmpfs", "/dev/shm", "mode=1777,size=50%", MS_NOSUID | MS_NODEV, true },
        { "cgroup2", "/sys/fs/cgroup", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, false },
    };

    umask(0);
    int r = mount_all(rows, 5, e);
    umask(022);
    (void)!symlink("/proc/self/fd", "/dev/fd");
    (void)!symlink("/proc/self/fd/0", "/dev/stdin");
    (void)!symlink("/proc/self/fd/1", "/dev/stdout");
    (void)!symlink("/proc/self/fd/2", "/dev/stderr");
    mkdir("/run/lock", 01777);
    return r;
}

/* ---- the rest ---- */

static void write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd >= 0) {
        (void)!write(fd, text, strlen(text));
        close(fd);
    }
}

static void loopback_up(void)
{
    struct ifreq r = { .ifr_name = "lo" };
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return;
    if (ioctl(fd, SIOCGIFFLAGS, &r) == 0) {
        r.ifr_flags |= IFF_UP | IFF_RUNNING;
        if (ioctl(fd, SIOCSIFFLAGS, &r) < 0)
            log_warn(NULL, "loopback interface: %s", strerror(errno));
    }
    close(fd);
}

unsigned init_process_limit(void)
{
    struct sysinfo info;
    unsigned mb = sysinfo(&info) == 0 ? (unsigned)(info.totalram * info.mem_unit >> 20) : 0;
    unsigned n = mb / 4;

    return n < PROCESSES_MIN ? PROCESSES_MIN : n > PROCESSES_MAX ? PROCESSES_MAX : n;
}

/* A group for kernels: fork bombs end at its pids limit, whoever runs them. Best effort. */
static void cgroup_for_kernels(void)
{
    char max[16];

    write_text("/sys/fs/cgroup/cgroup.subtree_control", "+pids");
    mkdir("/sys/fs/cgroup/kernels", 0755);
    snprintf(max, sizeof(max), "%u", init_process_limit());
    write_text("/sys/fs/cgroup/kernels/pids.max", max);
}

static void set_limits(void)
{
    struct rlimit files = { 65536, 65536 }, core = { 0, 0 };

    setrlimit(RLIMIT_NOFILE, &files);
    setrlimit(RLIMIT_CORE, &core);
    write_text("/proc/self/oom_score_adj", "-1000");
    /* A list of all tasks on the console for every kill takes seconds under emulation. */
    write_text("/proc/sys/vm/oom_dump_tasks", "0");
    /* A group for each session would make the standby's low priority count for nothing. */
    write_text("/proc/sys/kernel/sched_autogroup_enabled", "0");
    reboot(RB_DISABLE_CAD);
}

static int open_port(int *ret_fd, struct err *e)
{
    char path[300];

    for (unsigned ms = 0; ms < WAIT_MS; ms += WAIT_STEP_MS) {
        int fd;

        if (shim_link_find_port("/sys/class/virtio-ports", INIT_PORT_NAME, path, sizeof(path)) ==
            0) {
            fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
            if (fd >= 0) {
                *ret_fd = fd;
                return 0;
            }
            if (errno != ENOENT)
                return err_errno(e, errno, "%s", path);
        }
        sleep_ms(WAIT_STEP_MS);
    }
    return err_set(e, -ENODEV, "no virtio port named " INIT_PORT_NAME " within %d s",
                   WAIT_MS / 1000);
}

int init_system(int *ret_link_fd, struct err *e)
{
    struct err ignored = { 0 };
    int r;

    if ((r = mount_early(e)) < 0)
        return r;
    log_info(NULL, "init: cellvisor-shim " CELLVISOR_VERSION);
    guest_config = json_parse_file("/cellvisor/guest.json", 1u << 20, &ignored);
    if ((r = load_modules("/modules.list", e)) < 0 || (r = mount_root(e)) < 0)
        return r;
    copy_hook();
    if ((r = switch_root(e)) < 0 || (r = mount_late(e)) < 0)
        return r;
    loopback_up();
    if ((r = fs_mkdir_p(INIT_RUN_DIR, 0711, e)) < 0)
        return r;
    guest_identity_prepare(INIT_RUN_DIR);
    if (guest_set_hostname("cellvisor", &ignored) < 0)
        log_warn(NULL, "init: hostname: %s", ignored.msg);
    cgroup_for_kernels();
    set_limits();
    if ((r = open_port(ret_link_fd, e)) < 0)
        return r;
    log_info(NULL, "init: root is up, link port is open");
    return 0;
}

void init_kernel_environment(struct shim_environ *env, struct shim_user *user)
{
    const char *name = json_string_value(json_object_get(guest_config, "user")), *key;
    json_t *v;

    if (shim_user_find("/etc/passwd", name ? name : INIT_USER, user) < 0 &&
        shim_user_find("/etc/passwd", "root", user) < 0)
        *user = (struct shim_user) { .name = "root", .home = "/root", .shell = "/bin/sh" };
    shim_environ_set(env, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    shim_environ_set(env, "LANG", "C.UTF-8");
    shim_environ_set(env, "HOME", user->home);
    shim_environ_set(env, "USER", user->name);
    shim_environ_set(env, "LOGNAME", user->name);
    shim_environ_set(env, "SHELL", user->shell);
    /* Each arena of the allocator dirties pages of its own in every clone. */
    shim_environ_set(env, "MALLOC_ARENA_MAX", "2");
    shim_environ_read_file(env, "/etc/environment");
    json_object_foreach(json_object_get(guest_config, "env"), key, v)
    {
        if (json_is_string(v))
            shim_environ_set(env, key, json_string_value(v));
    }
    json_decref(guest_config);
    guest_config = NULL;
    /* Kernelspecs are looked for along the kernels' own environment. */
    for (size_t i = 0; i < env->n; i++) {
        char *eq = strchr(env->vars[i], '=');
        CLEANUP(freep) char *k = xstrndup(env->vars[i], (size_t)(eq - env->vars[i]));
        setenv(k, eq + 1, 1);
    }
}

void init_power_off(void)
{
    kill(-1, SIGKILL);
    sync();
    reboot(RB_POWER_OFF);
    for (;;)
        pause();
}
