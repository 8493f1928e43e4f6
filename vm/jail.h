#pragma once
/* Seam for confining the VMM: today setpriv (own uid, no capabilities, no_new_privs) and rlimits; bubblewrap
 * and cgroups plug in here. Private to vm/. */
#include "common/err.h"
#include <stddef.h>
#include <sys/types.h>

struct vm_jail {
    const char *prefix[24]; /* argv words that precede the VMM's own, NULL-terminated */
    char text[12][64];      /* storage for formatted words */
};
int vm_jail_prefix(unsigned uid, struct vm_jail *ret, struct err *e);
