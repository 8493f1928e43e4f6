#pragma once
/* The QEMU command line as a pure function of a vm_qemu_spec. Device order and ids decide whether a
 * snapshot loads, so everything of a template and its clones comes from here. Private to vm/. */
#include "vm/qemu.h"

/* Descriptors that QEMU inherits, by their numbers in the child. */
enum vm_qemu_fd {
    VM_QEMU_FD_MEM = 3,
    VM_QEMU_FD_QMP = 4,  /* listening */
    VM_QEMU_FD_LINK = 5, /* listening */
    VM_QEMU_FD_ROOT = 6,
    VM_QEMU_FD_CONSOLE = 7,
    VM_QEMU_FD_KERNEL = 8, /* boots only */
    VM_QEMU_FD_INITRD = 9,
};
#define VM_QEMU_PROGRAM "qemu-system-x86_64"
#define VM_QEMU_ARGS_MAX 96
#define VM_QEMU_SANDBOX "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
#define VM_QEMU_CPU_KVM "host,-arch-capabilities"
#define VM_QEMU_CPU_TCG "max"

struct vm_qemu_args {
    const char *argv[VM_QEMU_ARGS_MAX]; /* NULL-terminated */
    size_t n;
    char text[1024]; /* storage of formatted words */
    size_t used;
};
/* Without a jail prefix; argv[0] is the program. Words point into spec, the struct and constants.
 */
void vm_qemu_args(const struct vm_qemu_spec *spec, struct vm_qemu_args *ret);
