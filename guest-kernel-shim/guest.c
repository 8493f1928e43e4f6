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
#include <time.h>
#include <unistd.h>

#define ENTROPY_MIN 32u
#define ENTROPY_MAX 512u
#define BOOT_ID_PATH "/proc/sys/kernel/random/boot_id"

int guest_add_entropy(struct slice entropy, struct err *e)
{
    CLEANUP(closep) int fd = -1;
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
    fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
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

static int write_file(const char *path, const char *text, struct err *e)
{
    CLEANUP(fclosep) FILE *f = fopen(path, "we");

    if (!f)
        return err_errno(e, errno, "%s", path);
    if (fputs(text, f) < 0 || fflush(f) != 0)
        return err_errno(e, errno, "%s", path);
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
    if ((r = write_file("/etc/hostname", text, e)) < 0)
        return r;
    snprintf(text, sizeof(text),
             "127.0.0.1 localhost\n127.0.1.1 %s\n::1 localhost ip6-localhost ip6-loopback\n", name);
    return write_file("/etc/hosts", text, e);
}

int guest_set_machine_id(const char *hex32, struct err *e)
{
    char text[40];

    if (strlen(hex32) != 32 || strspn(hex32, "0123456789abcdef") != 32)
        return err_set(e, -EINVAL, "machine_id: must be 32 lower-case hex digits");
    snprintf(text, sizeof(text), "%s\n", hex32);
    unlink("/etc/machine-id"); /* may be a link, or mode 0444 and empty in the image */
    unlink("/var/lib/systemd/random-seed");
    return write_file("/etc/machine-id", text, e);
}

int guest_new_boot_id(const char *run_dir, struct err *e)
{
    CLEANUP(freep) char *file = fs_join(run_dir, "boot_id");
    char text[ID_UUID_LEN + 2];
    bool mounted = access(file, F_OK) == 0;
    int r;

    id_uuid4(text);
    text[ID_UUID_LEN] = '\n';
    text[ID_UUID_LEN + 1] = '\0';
    /* Written in place: a bind mount shows the file's new content. */
    if ((r = write_file(file, text, e)) < 0)
        return r;
    if (!mounted && mount(file, BOOT_ID_PATH, NULL, MS_BIND, NULL) < 0) {
        r = err_errno(e, errno, "mount over " BOOT_ID_PATH);
        unlink(file);
    }
    return r;
}
