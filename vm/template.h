#pragma once
/* Built templates: what is in the store and how to open it. Recipe: vm/recipe.h; building:
 * vm/build.h. Store layout: STATE/templates/NAME -> current build (symlink to ../builds/HASH); a
 * build folder is complete once its manifest.json exists (written last, atomically). root.erofs,
 * vmlinux, initrd.img, memory (sparse RAM image), vmstate, manifest.json */
#include "common/err.h"
#include "vm/accel.h"
#include <jansson.h>
#include <stdbool.h>

struct vm_template {
    char *name, *dir, *hash;
    uint64_t memory_mb, disk_mb, image_bytes, memory_bytes_used;
    unsigned vcpus;
    enum vm_accel accel; /* the snapshot was made under */
    char *fingerprint;   /* vm_qemu_fingerprint at build time */
    char *default_spec;  /* kernel that runs in the snapshot as stream 1 */
    char *kernel_info;   /* its kernel_info_reply content (JSON) */
    char *warmup;        /* code run silently while parking; NULL = none */
    json_t *specs;       /* as GL_SPECS */
    json_t *manifest;    /* whole */
    int use_fd;          /* shared lock: keeps the build's files on disk while we live */
};
/* Read the manifest and check the files' sizes and the device state's hash; asks nothing of the
 * machine. -ENOENT: not built; -EINVAL: corrupt; -ESTALE: written by another version of us. */
int vm_template_read(const char *state_dir, const char *name, struct vm_template **ret,
                     struct err *e);
/* The same for a build folder that NAME need not point at. */
int vm_template_read_dir(const char *dir, const char *name, struct vm_template **ret,
                         struct err *e);
/* Would its snapshot load here? -ESTALE: made with another QEMU, CPU or machine line; -ENOENT: no
 * QEMU. */
int vm_template_check(const struct vm_template *t, const char *qemu_path, struct err *e);
/* Both, with QEMU from PATH. -ENOENT: not built;
 * -ESTALE: for another QEMU or machine: e says what differs and to rebuild; -EINVAL corrupt. */
int vm_template_load(const char *state_dir, const char *name, struct vm_template **ret,
                     struct err *e);
void vm_template_free(struct vm_template *t);
/* Names of all built templates: JSON array of strings. */
json_t *vm_template_names(const char *state_dir);
/* Sealed memfd holding the template's RAM (blocking; 0.1-0.5 s). -EINVAL: content does not match
 * its digest. */
int vm_template_open_memory(const struct vm_template *t, int *ret_fd, struct err *e);
/* A fresh read-only description of the device state (its offset is consumed by a load). */
int vm_template_open_state(const struct vm_template *t, int *ret_fd, struct err *e);

/* RAM images: only 64 KiB blocks that hold something are stored and hashed (SHA-256 over offset and
 * bytes of each), so the digest does not depend on how the file happens to be sparse.
 * Copies size bytes from in to out (both seekable; out reads as zero) and reports both. */
int vm_memory_copy(int in, int out, uint64_t size, uint64_t *ret_used, char ret_digest[65],
                   struct err *e);
#define VM_TEMPLATE_FORMAT 1
