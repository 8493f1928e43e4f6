/* Names of what vm.h declares. */
#include "vm/vm.h"
#include <errno.h>
#include <string.h>

static const char *const tiers[] = {
    [VM_TIER_LOCAL] = "local", [VM_TIER_TCG] = "tcg", [VM_TIER_KVM] = "kvm"
};
static const char *const reasons[] = {
    [VM_EXIT_RELEASED] = "released", [VM_EXIT_START_FAILED] = "start_failed",
    [VM_EXIT_VMM] = "vmm",           [VM_EXIT_GUEST] = "guest",
    [VM_EXIT_PROTOCOL] = "protocol", [VM_EXIT_DEADLINE] = "deadline",
};

const char *vm_tier_name(enum vm_tier t)
{
    return (unsigned)t < sizeof(tiers) / sizeof(*tiers) ? tiers[t] : "?";
}

int vm_tier_parse(const char *s, enum vm_tier *ret)
{
    for (unsigned i = 0; s && i < sizeof(tiers) / sizeof(*tiers); i++)
        if (strcmp(s, tiers[i]) == 0) {
            *ret = (enum vm_tier)i;
            return 0;
        }
    return -EINVAL;
}

const char *vm_exit_reason_name(enum vm_exit_reason r)
{
    return (unsigned)r < sizeof(reasons) / sizeof(*reasons) ? reasons[r] : "?";
}
