#pragma once
/* Built templates: what is in the store and how to open it. Recipe: vm/recipe.h; building: vm/build.h.
 * Store layout: STATE/templates/NAME -> current build (symlink to ../builds/HASH); a build folder is
 * complete once its manifest.json exists (written last, atomically).
 *   root.erofs, vmlinuz, initrd.img, memory (sparse RAM image), vmstate, manifest.json, build.log */
#include "common/err.h"
#include "vm/accel.h"
#include <jansson.h>
#include <stdbool.h>

struct vm_template {
    char *name, *dir, *hash;
    uint64_t memory_mb, disk_mb, image_bytes, memory_bytes_used;
    unsigned vcpus;
    enum vm_accel accel;   /* the snapshot was made under */
    char *fingerprint;     /* vm_qemu_fingerprint at build time */
    char *default_spec;    /* kernel that runs in the snapshot as stream 1 */
    char *kernel_info;     /* its kernel_info_reply content (JSON) */
    char *warmup;          /* code run silently while parking; NULL = none */
    json_t *specs;         /* as GL_SPECS */
    json_t *manifest;      /* whole */
};
/* Read and check the manifest (sizes, hashes of small files, format version). -ENOENT: not built;
 * -ESTALE: for another QEMU, accelerator or shim: e says what differs and to rebuild; -EINVAL corrupt. */
int vm_template_load(const char *state_dir, const char *name, struct vm_template **ret, struct err *e);
void vm_template_free(struct vm_template *t);
/* Names of all built templates: JSON array of strings. */
json_t *vm_template_names(const char *state_dir);
/* Sealed memfd holding the template's RAM (blocking; 0.1-0.3 s). */
int vm_template_open_memory(const struct vm_template *t, int *ret_fd, struct err *e);
/* A fresh read-only description of the device state (its offset is consumed by a load). */
int vm_template_open_state(const struct vm_template *t, int *ret_fd, struct err *e);
