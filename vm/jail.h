#pragma once
/* Seam for confining the VMM: today setpriv (own uid, no capabilities, no_new_privs, dies with us);
 * bubblewrap and cgroups plug in here. The rlimits that go with it are in vm_jail_limits. Private
 * to vm/. */
#include "common/err.h"
#include "common/proc.h"
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define VM_JAIL_SLOTS 4096u /* VMs that can have a uid of their own at a time */

struct vm_jail {
    const char *prefix[24]; /* argv words that precede the VMM's own, NULL-terminated */
    char text[12][64];      /* storage for formatted words */
};
/* As root: become uid (not 0); `kvm` keeps the group that owns /dev/kvm. Otherwise we stay who we
 * are, and only lose what could be gained back. -ENOENT when setpriv is not installed (e names the
 * package). */
int vm_jail_prefix(unsigned uid, bool kvm, struct vm_jail *ret, struct err *e);
/* Limits that every VMM runs under. */
size_t vm_jail_limits(const struct proc_limit **ret);
/* The uid of slot n (< VM_JAIL_SLOTS), from a range that this user namespace maps and no
 * distribution hands out; 0 when we are not root (no uid is changed then). */
unsigned vm_jail_uid(unsigned slot);
