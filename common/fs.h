#pragma once
/* Small file-system helpers (blocking: start-up, tools and loop_work only). */
#include "common/buf.h"
#include "common/err.h"
#include <sys/types.h>

int fs_read_file(const char *path, size_t max, struct buf *out, struct err *e); /* inits out */
/* Write to a temporary beside it, fsync, rename. */
int fs_write_atomic(const char *path, struct slice data, mode_t mode, struct err *e);
int fs_mkdir_p(const char *path, mode_t mode, struct err *e);
int fs_rm_rf(const char *path, struct err *e); /* missing is success; never follows links */
bool fs_exists(const char *path);
/* dir + "/" + name; caller frees. */
char *fs_join(const char *dir, const char *name);
/* Hex SHA-256 of a file's content. */
int fs_sha256_file(const char *path, char ret[65], struct err *e);
void fs_sha256(struct slice data, char ret[65]);
uint64_t fs_free_bytes(const char *path); /* 0 when unknown */
