#include "guest-kernel-shim/guest.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ENTROPY_MIN 32u
#define ENTROPY_MAX 512u
#define BOOT_ID_PATH "/proc/sys/kernel/random/boot_id"

/* Files that every restore writes. Under emulation a first path walk, copy-up or mount costs
 * milliseconds each, so init lays small files of a tmpfs over them once (guest_identity_prepare)
 * and a restore only writes to descriptors that are open already. Without that (or when it failed)
 * they are written by path. */
enum { ID_HOSTNAME, ID_HOSTS, ID_MACHINE, ID_BOOT, ID_FILES };
static const struct id_file {
    const char *name, *path;
} id_files[ID_FILES] = {
    [ID_HOSTNAME] = { "hostname", "/etc/hostname" },
    [ID_HOSTS] = { "hosts", "/etc/hosts" },
    [ID_MACHINE] = { "machine-id", "/etc/machine-id" },
    [ID_BOOT] = { "boot_id", BOOT_ID_PATH },
};
static int id_fds[ID_FILES] = { -1, -1, -1, -1 };
static size_t id_sizes[ID_FILES]; /* what we wrote last */
static int urandom_fd = -1;

void guest_identity_prepare(const char *run_dir)
{
    urandom_fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    unlink("/var/lib/systemd/random-seed");
    for (int i = 0; i < ID_FILES; i++) {
        CLEANUP(freep) char *file = xasprintf("%s/%s", run_dir, id_files[i].name);
        CLEANUP(closep) int target = open(id_files[i].path, O_RDONLY | O_CREAT | O_CLOEXEC, 0644);
        CLEANUP(closep)
        int fd = open(file, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);

        (void)target; /* only has to exist: a mount needs something to cover */
        if (fd < 0 || fchmod(fd, 0644) < 0 ||
            mount(file, id_files[i].path, NULL, MS_BIND, NULL) < 0) {
            unlink(file);
            continue;
        }
        id_fds[i] = TAKE_FD(fd);
    }
}

int guest_add_entropy(struct slice entropy, struct err *e)
{
    CLEANUP(closep) int own = -1;
    int fd = urandom_fd;
    struct {
        int bits, size;
        uint8_t bytes[ENTROPY_MAX];
    } pool; /* struct rand_pool_info with room */

    if (entropy.n < ENTROPY_MIN || entropy.n > ENTROPY_MAX)
        return err_set(e, -EINVAL, "entropy of %zu bytes: between %u and %u are needed", entropy.n,
                       ENTROPY_MIN, ENTROPY_MAX);
    pool.bits = (int)entropy.n * 8;
    pool.size = (int)entropy.n;
    memcpy(pool.bytes, entropy.p, entropy.n);
    if (fd < 0)
        fd = own = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, errno, "/dev/urandom");
    if (ioctl(fd, RNDADDENTROPY, &pool) < 0)
        return err_errno(e, errno, "RNDADDENTROPY");
    if (ioctl(fd, RNDRESEEDCRNG) < 0)
        return err_errno(e, errno, "RNDRESEEDCRNG");
    return 0;
}

int guest_set_clock(uint64_t realtime_us, struct err *e)
{
    struct timespec ts = { .tv_sec = (time_t)(realtime_us / 1000000),
                           .tv_nsec = (long)(realtime_us % 1000000) * 1000 };

    if (clock_settime(CLOCK_REALTIME, &ts) < 0)
        return err_errno(e, errno, "clock_settime");
    return 0;
}

bool guest_hostname_ok(const char *name)
{
    size_t n = strlen(name);

    if (n == 0 || n > 63 || name[0] == '-' || name[0] == '.')
        return false;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '-' && name[i] != '.')
            return false;
    return true;
}

static int write_by_path(const char *path, const char *text, struct err *e)
{
    CLEANUP(fclosep) FILE *f = fopen(path, "we");

    if (!f)
        return err_errno(e, errno, "%s", path);
    if (fputs(text, f) < 0 || fflush(f) != 0)
        return err_errno(e, errno, "%s", path);
    return 0;
}

static int write_id(int i, const char *text, struct err *e)
{
    size_t n = strlen(text);

    if (id_fds[i] < 0)
        return write_by_path(id_files[i].path, text, e);
    if (pwrite(id_fds[i], text, n, 0) != (ssize_t)n ||
        (n < id_sizes[i] && ftruncate(id_fds[i], (off_t)n) < 0))
        return err_errno(e, errno ? errno : EIO, "%s", id_files[i].path);
    id_sizes[i] = n;
    return 0;
}

int guest_set_hostname(const char *name, struct err *e)
{
    char text[256];
    int r;

    if (!guest_hostname_ok(name))
        return err_set(e, -EINVAL, "hostname: letters, digits, '-' and '.' only, at most 63");
    if (sethostname(name, strlen(name)) < 0)
        return err_errno(e, errno, "sethostname");
    snprintf(text, sizeof(text), "%s\n", name);
    if ((r = write_id(ID_HOSTNAME, text, e)) < 0)
        return r;
    snprintf(text, sizeof(text),
             "127.0.0.1 localhost\n127.0.1.1 %s\n::1 localhost ip6-localhost ip6-loopback\n", name);
    return write_id(ID_HOSTS, text, e);
}

int guest_set_machine_id(const char *hex32, struct err *e)
{
    char text[40];

    if (strlen(hex32) != 32 || strspn(hex32, "0123456789abcdef") != 32)
        return err_set(e, -EINVAL, "machine_id: must be 32 lower-case hex digits");
    snprintf(text, sizeof(text), "%s\n", hex32);
    if (id_fds[ID_MACHINE] < 0)
        unlink("/etc/machine-id"); /* may be a link, or mode 0444 and empty in the image */
    return write_id(ID_MACHINE, text, e);
}

int guest_new_boot_id(const char *run_dir, struct err *e)
{
    CLEANUP(freep) char *file = fs_join(run_dir, id_files[ID_BOOT].name);
    char text[ID_UUID_LEN + 2];
    bool mounted = access(file, F_OK) == 0;
    int r;

    id_uuid4(text);
    text[ID_UUID_LEN] = '\n';
    text[ID_UUID_LEN + 1] = '\0';
    if (id_fds[ID_BOOT] >= 0)
        return write_id(ID_BOOT, text, e);
    /* Written in place: a bind mount shows the file's new content. */
    if ((r = write_by_path(file, text, e)) < 0)
        return r;
    if (!mounted && mount(file, BOOT_ID_PATH, NULL, MS_BIND, NULL) < 0) {
        r = err_errno(e, errno, "mount over " BOOT_ID_PATH);
        unlink(file);
    }
    return r;
}
