#pragma once
/* How a kernel process is started from its kernelspec: connection file, argv, environment, and the
 * fork itself. The building parts are pure, so that unit tests read like a table. */
#include "common/slice.h"
#include "guest-kernel-shim/spec.h"
#include <stdint.h>
#include <sys/types.h>

/* Who kernels run as. uid 0 = as we are. */
struct shim_user {
    uid_t uid;
    gid_t gid;
    char name[64], home[256], shell[128];
};
/* Look a name up in a passwd file without NSS (which would load libraries of the image). -ENOENT.
 */
int shim_user_find(const char *passwd_path, const char *name, struct shim_user *ret);

/* ---- environment: NULL-terminated array of "K=V" on the heap ---- */
struct shim_environ {
    char **vars;
    size_t n;
};
void shim_environ_init(struct shim_environ *v);
void shim_environ_fini(struct shim_environ *v);
void shim_environ_set(struct shim_environ *v, const char *key, const char *value); /* replaces */
void shim_environ_unset(struct shim_environ *v, const char *key);
const char *shim_environ_get(const struct shim_environ *v, const char *key);
void shim_environ_inherit(struct shim_environ *v); /* this process's, without CELLVISOR_* */
/* /etc/environment syntax: K=V lines, quotes around the value, # comments, "export ". */
void shim_environ_read_file(struct shim_environ *v, const char *path);
/* $VAR, ${VAR}, $$ against v; unknown names stay as they are (as jupyter_client does). */
char *shim_environ_expand(const struct shim_environ *v, const char *text);

/* ---- argv ---- */
struct shim_subst {
    const char *key, *value;
};
/* {key} -> value; other braces stay. Caller frees. */
char *shim_substitute(const char *text, const struct shim_subst *subst, size_t n);
/* Full path of a program along PATH ("" when not found: *ret empty and -ENOENT). */
int shim_find_program(const char *name, const char *path, char *ret, size_t size);
bool shim_argv_is_ipykernel(char *const *argv);

/* ---- connection file (jupyter.md 3.4) ---- */
/* JSON text for transport ipc with path prefix ip; caller frees. */
char *shim_connection_json(const char *ip, const char *key, const char *kernel_name);

/* ---- process ---- */
struct shim_limit {
    int resource;
    uint64_t value;
};
struct shim_child {
    char *const *argv; /* argv[0] is a full path */
    char *const *env;
    const char *cwd;
    int fds[8]; /* fds[i] becomes descriptor i; -1: /dev/null (0..2) or closed */
    int n_fds;
    const struct shim_user *user; /* NULL: as we are */
    const struct shim_limit *limits;
    size_t n_limits;
    int oom_score_adj;
    int nice; /* 0: as we are */
    bool die_with_parent;
    const char *cgroup_procs; /* file to write the pid to; NULL: none. Best effort. */
};
/* Start in a session (and process group) of its own. Returns after exec has succeeded, or failed:
 * negative errno, e says what. */
int shim_spawn(const struct shim_child *c, pid_t *ret, struct err *e);
