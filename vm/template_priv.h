#pragma once
/* What the stages of a template build share. Private to the builder (vm/template_*.c, vm/image*.c).
 */
#include "common/buf.h"
#include "common/log.h"
#include "common/loop.h"
#include "vm/build.h"
#include "vm/recipe.h"

enum tb_stage {
    TB_KERNEL,
    TB_RESOLVE,
    TB_PACKAGES,
    TB_IMAGE,
    TB_INITRAMFS,
    TB_BOOT,
    TB_PRELOAD,
    TB_SNAPSHOT,
    TB_VERIFY,
    TB_STAGES
};

struct tb {
    const struct vm_build_spec *spec;
    struct vm_recipe *recipe;
    enum vm_accel accel; /* resolved */
    vm_build_progress_fn fn;
    void *ctx;
    struct log_ctx log;

    struct loop *loop;
    struct loop_signal *sigint, *sigterm;
    bool cancelled;
    void (*on_cancel)(struct tb *b); /* of the running stage, NULL = none */

    enum tb_stage stage;
    uint64_t stage_began_us;
    uint64_t stage_ms[TB_STAGES];
    double fraction; /* of the running stage */

    int log_fd; /* build log, appended; -1 before it is open */
    char *log_path;
    char *mirror;          /* base URL of the archive */
    char *mirror_security; /* NULL = none known */

    /* Results of the stages. */
    char *kernel_dir;           /* cache: vmlinux, *.ko, modules.list, kernel.json */
    char *root_dir;             /* cache: root.erofs, root.json */
    json_t *kernel, *root;      /* their json files */
    int kernel_lock, root_lock; /* shared: keep the stages from being cleaned away until the end */
};

/* Progress. overall is computed from the stage weights. */
void tb_begin(struct tb *b, enum tb_stage s, const char *text);
void tb_step(struct tb *b, double fraction, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void tb_end(struct tb *b, bool cached);
/* Wait for lock KEY, telling the user for whom; the descriptor is ours. -EINTR when cancelled. */
int tb_lock(struct tb *b, const char *key, int *ret_fd, struct err *e);
/* Lock of a stage whose result is `facts`: shared when it is there, else exclusive as tb_lock. */
int tb_lock_stage(struct tb *b, const char *key, const char *facts, int *ret_fd, struct err *e);
/* One line into the build log. */
void tb_log(struct tb *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int tb_check_cancelled(const struct tb *b, struct err *e);

/* ---- commands (template_run.c) ---- */
struct tb_cmd {
    const char *const *argv;
    const char *const *env; /* whole environment, NULL = ours */
    const char *cwd;
    int keep_fd; /* inherited as it is (a lock), -1 = none */
    int out_fd;  /* stdout goes here instead of to the log and on_line; -1 = no */
    void (*on_line)(struct tb *b, void *ctx, const char *line); /* stdout and stderr, may be NULL */
    void *ctx;
};
/* Run to the end. 0; a positive exit code; -EINTR cancelled; -ENOSPC when the output says so; other
 * errno. *cause (may be NULL) gets a reason found in the output, one line, or "". */
int tb_run(struct tb *b, const struct tb_cmd *cmd, char *cause, size_t cause_size, struct err *e);
/* Run, and make every failure an error: "WHAT: cause". */
int tb_run_ok(struct tb *b, const struct tb_cmd *cmd, const char *what, struct err *e);
/* Same, and its standard output (at most max bytes) into *ret (initialised here). */
int tb_run_text(struct tb *b, const char *const *argv, const char *const *env, size_t max,
                struct buf *ret, const char *what, struct err *e);
/* A reason that people understand out of one line of apt, dpkg, pip, npm or mmdebstrap output; 0:
 * none. recipe (may be NULL) turns a package into its key. Returns 2 for a better one than 1. */
int tb_cause(const char *line, const struct vm_recipe *recipe, char *ret, size_t size);

/* ---- apt (image_apt.c) ---- */
struct tb_apt {
    char *dir;        /* private apt root */
    char *config_env; /* "APT_CONFIG=..." */
    char **env;       /* environment for apt commands */
};
/* Environment for the tools: ours without what would confuse them, messages in English, sbin in
 * PATH, plus extra ("K=V" or NULL). */
char **tb_env(const char *extra);
void tb_env_free(char **env);
/* mirror and mirror_security of b. -ENOENT: none found. */
int tb_mirror(struct tb *b, struct err *e);
/* How apt on this machine reaches archives (proxies, TLS, date checks): "Acquire::http::Proxy
 * "..";" lines; NULL-terminated, may be empty. */
char **tb_apt_acquire(struct tb *b);
/* URL without user and password, for what people or images get to see; the caller frees. */
char *tb_public_url(const char *url);
/* "deb URL SUITE main" lines for the recipe's suite; the caller frees. */
char *tb_sources(const struct tb *b, bool without_password);
/* A private apt root in dir (made when missing) with fresh lists. */
int tb_apt_open(struct tb *b, const char *dir, struct tb_apt *ret, struct err *e);
void tb_apt_close(struct tb_apt *a);

/* ---- stages ---- */
int tb_stage_kernel(struct tb *b, struct err *e); /* image_kernel.c */
int tb_stage_root(struct tb *b, struct err *e);   /* image.c: resolve, packages, image */
/* template_snapshot.c: boot, preload, snapshot, verify in dir (holds root.erofs, vmlinux,
 * initrd.img). Writes memory and vmstate; fills *ret_facts: {"specs","kernel":{"spec","info"},
 * "memory":{"used","digest"},"fingerprint","qemu_version"}. */
int tb_stage_snapshot(struct tb *b, const char *dir, json_t **ret_facts, struct err *e);

/* ---- pure parts, apart for tests ---- */
/* mirror and mirror_security from what `apt-get update --print-uris` says: the first archive that
 * looks like Debian's (".../debian"), else the first of all; security archives apart. */
void tb_pick_sites(struct tb *b, char *text);
struct tb_plan {
    unsigned packages;
    uint64_t download_bytes;
};
/* Lines of `apt-get --print-uris install`: "'URL' name_version_arch.deb 12345 SHA256:...". */
void tb_count_uris(const char *text, struct tb_plan *p);
/* bzImage -> its packed payload (Linux Documentation/arch/x86/boot.rst: setup_sects at 0x1f1,
 * payload_offset at 0x248 and payload_length at 0x24c, relative to the protected-mode part).
 * -EINVAL: not a bzImage. */
int tb_bzimage_payload(struct slice image, struct slice *ret);
/* The line of a modules.order or modules.builtin whose file is this module ('-' equals '_'),
 * without a compression suffix; the caller frees. NULL: none. */
char *tb_find_module(const char *list, const char *name);
/* "a,b" of "depends=a,b" in the module's .modinfo; the caller frees. */
char *tb_module_depends(struct slice ko);

/* Content key of a stage: SHA-256 of the canonical JSON; takes inputs. */
void tb_key(json_t *inputs, char ret[65]);
