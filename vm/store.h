#pragma once
/* The template store on disk, below the state directory:
 *   templates/NAME          symlink ../builds/HASH: the current build, switched by one rename
 *   builds/HASH[-N]/        one finished build (layout: vm/template.h); never changed afterwards
 *   builds/.tmp-NAME/       a build in progress, owned by whoever holds lock "template-NAME"
 *   cache/root-KEY/, cache/kernel-KEY/   finished stages, shared by builds (files are hard links)
 *   cache/.tmp-KEY/         a stage in progress, owned by the holder of lock "KEY"
 *   locks/KEY               flock files; never removed
 * Whoever uses a build holds a shared flock on its manifest.json, so that clean-up leaves it alone.
 * All calls block (tools, start-up, loop_work). Private to vm/ and cli/. */
#include "common/err.h"
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Make the folders (0700 at the top). */
int vm_store_init(const char *state_dir, struct err *e);
/* state_dir/sub/name; name may be NULL. The caller frees. */
char *vm_store_path(const char *state_dir, const char *sub, const char *name);

/* Folder of the current build; the caller frees. -ENOENT: no such template. */
int vm_store_current(const char *state_dir, const char *name, char **ret_dir, struct err *e);
/* Names of templates that have a build, sorted: JSON array of strings. */
json_t *vm_store_names(const char *state_dir);
/* Point NAME at builds/FOLDER. */
int vm_store_publish(const char *state_dir, const char *name, const char *folder, struct err *e);
/* Forget NAME (its build goes with the next clean-up). -ENOENT. */
int vm_store_unpublish(const char *state_dir, const char *name, struct err *e);
/* Remove builds that no name points at and nobody uses, and cached stages that no build shares
 * (all: also those that only wait for reuse). Returns the bytes freed. */
uint64_t vm_store_clean(const char *state_dir, bool all);

/* Take the exclusive lock KEY without waiting: 0; -EBUSY with *ret_holder (0 = unknown). The lock
 * goes with the last copy of the descriptor: children that inherit it keep it. */
int vm_store_try_lock(const char *state_dir, const char *key, int *ret_fd, pid_t *ret_holder,
                      struct err *e);
/* Shared lock on KEY: holders exclude builders and clean-up, not each other. 0 or -EBUSY. */
int vm_store_try_share(const char *state_dir, const char *key, int *ret_fd, struct err *e);
/* Make an exclusive lock a shared one. */
int vm_store_share_lock(int fd);
/* Shared use of a build: descriptor to keep open while its files are needed. */
int vm_store_use(const char *build_dir, int *ret_fd, struct err *e);

/* rm -rf that first detaches mounts left below dir by a killed package installation, and refuses
 * (-EBUSY) when one stays: never deletes through a mount. */
int vm_store_remove_tree(const char *dir, struct err *e);
/* Hard link, or copy when the file system says no. */
int vm_store_link_file(const char *from, const char *to, struct err *e);
