#pragma once
/* QMP client: one conversation with one QEMU over a unix stream socket, on the loop.
 *
 * The VMM at the other end may be taken over by its guest, so its bytes are hostile: lines are
 * capped (VM_QMP_LINE_MAX), every line must be one JSON object, replies must come in order and
 * carry the id of the oldest command that waits (QEMU answers in-band commands in order), and every
 * command has a deadline. Any violation ends the conversation; the owner kills the process.
 *
 * Protocol: QEMU docs/interop/qmp-spec.rst. Private to vm/. */
#include "common/err.h"
#include "common/log.h"
#include "common/loop.h"
#include "common/slice.h"
#include <jansson.h>

#define VM_QMP_LINE_MAX (256u << 10) /* bytes of one line from the VMM */
#define VM_QMP_OUT_MAX (64u << 10)   /* bytes that may wait for a VMM that does not read */
#define VM_QMP_PENDING_MAX 32u       /* commands without an answer */

struct vm_qmp;
struct vm_qmp_events {
    /* Greeting seen and capabilities negotiated; commands may be sent. */
    void (*ready)(void *ctx);
    /* data is borrowed and may be NULL. */
    void (*event)(void *ctx, const char *name, json_t *data);
    /* EOF (-ECONNRESET), I/O error, violation (-EPROTO) or deadline (-ETIMEDOUT): once, last;
     * commands that waited have been answered with the same error before. */
    void (*closed)(void *ctx, const struct err *e);
};
/* result is borrowed, never NULL when e is NULL. e->code is -EREMOTEIO when QEMU answered with an
 * error (its text is in e->msg). */
typedef void (*vm_qmp_reply_fn)(void *ctx, json_t *result, const struct err *e);

/* Takes fd (non-blocking, connected). fd -1: no I/O, for tests that use vm_qmp_feed. The greeting
 * must come within greeting_ms. */
struct vm_qmp *vm_qmp_new(struct loop *l, int fd, unsigned greeting_ms, const struct log_ctx *log,
                          const struct vm_qmp_events *ev, void *ctx);
/* Queue one command. args is taken (NULL: none), also on failure. pass_fd >= 0 travels with the
 * command (SCM_RIGHTS, for getfd); it stays the caller's. fn may be NULL. 0, -ENOTCONN (closed or
 * not ready), -ENOBUFS (too much waits already). */
int vm_qmp_command(struct vm_qmp *q, const char *name, json_t *args, int pass_fd,
                   unsigned deadline_ms, vm_qmp_reply_fn fn, void *ctx);
/* Bytes from the VMM: what the descriptor's watcher calls; also the door for tests and fuzzing. */
void vm_qmp_feed(struct vm_qmp *q, struct slice bytes);
/* Read what is left in the socket, up to its end: the process has ended. closed() comes from
 * inside. */
void vm_qmp_drain(struct vm_qmp *q);
/* NULL ok; from any callback of it. No callback comes afterwards, waiting commands are dropped. */
void vm_qmp_free(struct vm_qmp *q);
