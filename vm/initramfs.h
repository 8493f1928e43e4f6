#pragma once
/* The initramfs of a template: an uncompressed cpio archive ("newc", kernel
 * Documentation/driver-api/early-userspace/buffer-format.rst) with the shim as /init, the shared
 * libraries it needs, kernel modules and guest.json. Times and inode numbers are fixed, so equal
 * content gives equal bytes. Blocking. Private to vm/. */
#include "common/buf.h"
#include "common/err.h"
#include <jansson.h>

#define VM_INITRAMFS_MAX (256u << 20)

/* Archive writer. All return 0 or a negative errno. Paths have no leading slash; parents are added
 * as needed, each once. */
struct vm_cpio {
    struct buf out;
    unsigned next_inode;
    char **dirs; /* added so far */
    size_t n_dirs;
};
void vm_cpio_init(struct vm_cpio *c);
void vm_cpio_fini(struct vm_cpio *c);
int vm_cpio_dir(struct vm_cpio *c, const char *path);
int vm_cpio_file(struct vm_cpio *c, const char *path, unsigned mode, struct slice content);
int vm_cpio_copy(struct vm_cpio *c, const char *path, unsigned mode, const char *host_path,
                 struct err *e);
int vm_cpio_finish(struct vm_cpio *c);

struct vm_initramfs_spec {
    const char *shim_path;   /* becomes /init */
    const char *python_dir;  /* its files go to /cellvisor/python; NULL: none */
    const char *modules_dir; /* holds modules.list (names in load order) and the .ko files */
    json_t *guest;           /* written to /cellvisor/guest.json */
};
/* Build the whole archive at `path`. Errors name the file or library that is missing. */
int vm_initramfs_write(const struct vm_initramfs_spec *spec, const char *path, struct err *e);

/* Host paths of the shared libraries (and the loader) that a program needs, as `ldd` tells.
 * NULL-terminated, sorted; the caller frees each and the array. A static program gives none. */
int vm_ldd(const char *program, char ***ret, struct err *e);
