#pragma once
/* The guest of the KVM probe: a 64 KiB firmware image of our own. Private to vm/. */
#include <stddef.h>
#include <stdint.h>

#define VM_ACCEL_GUEST_SIZE 65536u
#define VM_ACCEL_GUEST_VERSION 1 /* part of the cache key */
#define VM_ACCEL_GUEST_PASSED 99 /* QEMU's exit code (isa-debug-exit at port 0xf4) */
void vm_accel_guest_image(uint8_t ret[VM_ACCEL_GUEST_SIZE]);
