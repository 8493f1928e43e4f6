#pragma once
/* The Jupyter /api/sessions object: a path bound to a kernel. Race-free: concurrent creations for
 * one path of one principal share one start (case-141). Deleting a session ends its kernel unless
 * another session still uses it (case-144). */
#include "kernelmgr/km.h"

struct km_session {
    struct list_node link; /* km_manager::sessions */
    char id[40];
    char *principal, *path, *name, *type;
    char kernel_id[40];
    bool starting;
};
struct km_session_req { /* NULL = not given */
    const char *path, *name, *type;
    const char *kernel_id, *spec;
    json_t *env;
};
typedef void (*km_session_fn)(void *ctx, struct km_session *s, const struct err *e);
/* Errors (immediate or through fn): as km_kernel_start, and -EINVAL missing path/type. */
int km_session_create(struct km_manager *m, const char *principal, const struct km_session_req *r,
                      km_session_fn fn, void *ctx, struct km_op **ret_op, struct err *e);
/* path/name/type at once; kernel_id: rebind (-EINVAL unknown); spec: start a new kernel. The old
 * kernel is shut down if no other session uses it. */
int km_session_patch(struct km_manager *m, struct km_session *s, const struct km_session_req *r,
                     km_session_fn fn, void *ctx, struct km_op **ret_op, struct err *e);
struct km_session *km_session_find(struct km_manager *m, const char *principal, const char *id);
void km_session_each(struct km_manager *m, const char *principal,
                     bool (*fn)(void *ctx, struct km_session *s), void *ctx);
/* 0, or -ENODEV: the kernel was gone already (410). The session is gone in both cases. */
int km_session_delete(struct km_manager *m, struct km_session *s);
