#pragma once
/* The identity of a guest, set anew after every restore of a snapshot (microvm.md section 5):
 * random numbers, clock, names. Only called in VM mode, as root. Blocking, but each is one system
 * call or one small file. */
#include "common/err.h"
#include "common/slice.h"

/* Once, by init, with run_dir (tmpfs) there: opens what the functions below write, so that they
 * cost little after a restore. They work without it too. */
void guest_identity_prepare(const char *run_dir);
/* Mix into the kernel's generator, credit the bits, and make it reseed at once, so that no two
 * clones draw the same numbers. entropy: 32 bytes at least. */
int guest_add_entropy(struct slice entropy, struct err *e);
int guest_set_clock(uint64_t realtime_us, struct err *e);
/* sethostname, /etc/hostname, /etc/hosts. Letters, digits, '-' and '.', at most 63: -EINVAL. */
int guest_set_hostname(const char *name, struct err *e);
int guest_set_machine_id(const char *hex32, struct err *e);
/* A fresh /proc/sys/kernel/random/boot_id (a file mounted over it). run_dir is on a tmpfs. */
int guest_new_boot_id(const char *run_dir, struct err *e);
bool guest_hostname_ok(const char *name);
