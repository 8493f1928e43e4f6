/* The VMM's privileges. setpriv(1) does the work between our fork and QEMU's exec, so that no
 * complex code runs after fork and nothing of it has to be trusted twice. It sets the parent-death
 * signal itself, after the change of uid, because the kernel clears it there. */
#include "vm/jail.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* First candidates for the range of VM uids. 0x70000000 upwards is left free by systemd's UID map
 * and by the subuid defaults; containers map less, so lower ones follow. */
static const unsigned uid_bases[] = { 0x70000000u, 500000u, 61184u };

static bool uid_mapped(unsigned first, unsigned count)
{
    CLEANUP(fclosep) FILE *f = fopen("/proc/self/uid_map", "re");
    unsigned long in, out, n;

    while (f && fscanf(f, "%lu %lu %lu", &in, &out, &n) == 3)
        if (first >= in && (unsigned long)first + count <= in + n)
            return true;
    return false;
}

unsigned vm_jail_uid(unsigned slot)
{
    static unsigned base; /* found once; the map of a namespace does not change */

    if (geteuid() != 0)
        return 0;
    for (size_t i = 0; !base && i < sizeof(uid_bases) / sizeof(*uid_bases); i++)
        if (uid_mapped(uid_bases[i], VM_JAIL_SLOTS))
            base = uid_bases[i];
    return base ? base + slot % VM_JAIL_SLOTS : 65534; /* a tiny namespace: all share nobody */
}

static const char *find_setpriv(void)
{
    static const char *const places[] = { "/usr/bin/setpriv", "/bin/setpriv" };

    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++)
        if (access(places[i], X_OK) == 0)
            return places[i];
    return NULL;
}

int vm_jail_prefix(unsigned uid, bool kvm, struct vm_jail *ret, struct err *e)
{
    const char *setpriv = find_setpriv();
    struct stat st;
    size_t n = 0;

    if (!setpriv)
        return err_set(e, -ENOENT,
                       "setpriv is not installed (package util-linux): it takes the VMM's "
                       "privileges away");
    memset(ret, 0, sizeof(*ret));
    ret->prefix[n++] = setpriv;
    if (geteuid() == 0 && uid) {
        snprintf(ret->text[0], sizeof(ret->text[0]), "--reuid=%u", uid);
        snprintf(ret->text[1], sizeof(ret->text[1]), "--regid=%u", uid);
        ret->prefix[n++] = ret->text[0];
        ret->prefix[n++] = ret->text[1];
        if (kvm && stat("/dev/kvm", &st) == 0 && st.st_gid != 0 && (st.st_mode & S_IWGRP)) {
            snprintf(ret->text[2], sizeof(ret->text[2]), "--groups=%u", (unsigned)st.st_gid);
            ret->prefix[n++] = ret->text[2];
        } else {
            ret->prefix[n++] = "--clear-groups";
        }
        ret->prefix[n++] = "--bounding-set=-all";
    }
    ret->prefix[n++] = "--inh-caps=-all";
    ret->prefix[n++] = "--no-new-privs";
    ret->prefix[n++] = "--pdeathsig=KILL";
    ret->prefix[n++] = "--";
    ret->prefix[n] = NULL;
    return 0;
}

size_t vm_jail_limits(const struct proc_limit **ret)
{
    /* FSIZE: the only file a VMM may write is the device state of a template build (under 1 MB);
     * guest RAM is mapped, not written. */
    static const struct proc_limit limits[] = {
        { RLIMIT_CORE, 0 },
        { RLIMIT_NOFILE, 256 },
        { RLIMIT_FSIZE, 64u << 20 },
    };

    *ret = limits;
    return sizeof(limits) / sizeof(*limits);
}
