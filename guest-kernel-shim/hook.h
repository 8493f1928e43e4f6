#pragma once
/* Our end of the socketpair to cellvisor_hook.py inside a Python kernel. One JSON line there, one
 * JSON line back, answered in order. The hook lives on a thread of its own, so it answers while
 * a cell runs, but not while native code holds the interpreter's lock: callers set deadlines.
 *
 * First line from the hook, unasked: {"hook":1,"capture":true|false}. capture: the hook itself
 * reads the pipes behind descriptors 1 and 2 from now on (and publishes them as stream output).
 * Commands (any subset of the keys; done in this order):
 *   {"reseed":hex, "rekey":{"session":s,"key":s,"file":path}, "env":{k:v}, "cwd":s, "gc":true}
 * Answer: {"ok":true} or {"ok":false,"error":text}. */
#include "common/buf.h"
#include "common/err.h"
#include "guest-kernel-shim/loop.h"
#include <jansson.h>

/* error is NULL on success. Called once per command, also when the hook goes away. */
typedef void (*shim_hook_fn)(void *ctx, const char *error);

struct shim_hook {
    struct shim_loop *loop;
    int fd; /* -1: no hook */
    struct shim_watch watch;
    struct buf in, out;
    struct list waiting; /* struct hook_call */
    bool ready, capture;
    void (*hello)(void *ctx, const char *before); /* the first line came */
    void *ctx;
};

/* Makes the pair; *ret_child_fd (close-on-exec) is for the kernel process. */
int shim_hook_open(struct shim_hook *h, struct shim_loop *loop,
                   void (*hello)(void *ctx, const char *before), void *ctx, int *ret_child_fd,
                   struct err *e);
void shim_hook_close(struct shim_hook *h); /* idempotent; waiting calls fail */
bool shim_hook_ready(const struct shim_hook *h);
/* Takes the reference to cmd. */
void shim_hook_call(struct shim_hook *h, json_t *cmd, shim_hook_fn fn, void *ctx);
