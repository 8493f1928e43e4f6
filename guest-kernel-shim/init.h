#pragma once
/* Duties of PID 1 in a VM, before the event loop: devices, modules, root file system, the port of
 * the guest link. Everything here is blocking and happens once per template (a clone wakes up long
 * after it). A step that cannot work ends in a console line that names it and in power-off: the
 * host shows the console's tail.
 *
 * Files of the initramfs: /modules.list (module paths in load order), /cellvisor/guest.json
 * {"env":{K:V},"user":name,"disk_mb":n}, /cellvisor/python/cellvisor_hook.py. */
#include "common/err.h"
#include "guest-kernel-shim/launch.h"

#define INIT_PORT_NAME "org.cellvisor.link"
#define INIT_HOOK_DIR "/usr/lib/cellvisor"
#define INIT_RUN_DIR "/run/cv"
#define INIT_USER "user" /* kernels run as this account when the image has it */

/* Mounts and switches root; *ret_link_fd is the guest link. */
int init_system(int *ret_link_fd, struct err *e);
/* Environment and account of kernels, from the image and guest.json. */
void init_kernel_environment(struct shim_environ *env, struct shim_user *user);
/* Processes and threads that all kernels together may have: by memory, since each costs some. */
unsigned init_process_limit(void);
/* sync and power off; does not return. */
void init_power_off(void) __attribute__((noreturn));

/* ---- pure ---- */
/* Number after "key=" in a kernel command line; def when it is not there or not a number. */
uint64_t init_cmdline_number(const char *cmdline, const char *key, uint64_t def);
