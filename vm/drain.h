#pragma once
/* Takes what a child process writes (stderr, a guest's console) off a descriptor: keeps the last
 * bytes for error texts, optionally copies into a file up to a cap, and never reads faster than
 * VM_DRAIN_BURST per VM_DRAIN_PAUSE_MS, so that a flood slows its author instead of us. Embedded;
 * private to vm/. */
#include "common/loop.h"
#include "common/slice.h"

#define VM_TAIL_MAX 4096u
#define VM_DRAIN_BURST (64u << 10)
#define VM_DRAIN_PAUSE_MS 100u

struct vm_tail {
    size_t n;
    char bytes[VM_TAIL_MAX + 1]; /* NUL-terminated */
};
void vm_tail_add(struct vm_tail *t, struct slice s);
/* The last line that is not empty, control characters as spaces, cut to size; "" when there is
 * none. */
void vm_tail_last_line(const struct vm_tail *t, char *ret, size_t size);

struct vm_drain {
    int fd; /* ours, non-blocking; -1: not started or at its end */
    struct loop_fd *watch;
    struct loop_timer *timer;
    size_t burst;
    int log_fd; /* ours; -1: none */
    size_t logged, log_max;
    struct vm_tail tail;
};
/* Before vm_drain_start only fd and log_fd must be set (to -1). Takes both descriptors. */
void vm_drain_start(struct vm_drain *d, struct loop *l, int fd, int log_fd, size_t log_max);
void vm_drain_finish(struct vm_drain *d); /* the writer is gone: read what is left (bounded) */
void vm_drain_stop(struct vm_drain *d);   /* idempotent; the tail stays */
