#pragma once
/* The client side of one kernel's ZMQ channels (jupyter.md 3.2, 3.3): DEALER for shell, control and
 * stdin (shell and stdin with the same identity), SUB for iopub. Transport ipc in a folder of the
 * kernel's own. Everything received is verified before it is parsed; everything sent is signed.
 * Heartbeat is not used: the death of the process is known from SIGCHLD. */
#include "common/log.h"
#include "guest-kernel-shim/loop.h"
#include "proto/jp_zmq.h"

#define SHIM_KEY_LEN 64 /* hex characters of the HMAC key */

struct shim_zmq;
struct shim_zmq_opts {
    void *zmq_ctx;
    struct shim_loop *loop;
    const struct log_ctx *log;
    const char *ip;       /* path prefix of the sockets: "ip-1" .. "ip-5" */
    const char *identity; /* session id of the shim towards this kernel */
    int iopub_hwm;        /* messages our side may hold; 0 = no limit */
    /* Something can be read, sent, or a connection ended. */
    void (*ready)(void *ctx);
    void *ctx;
};

struct shim_zmq *shim_zmq_open(const struct shim_zmq_opts *o, struct slice key, struct err *e);
void shim_zmq_close(struct shim_zmq *z); /* NULL ok */

/* Watch for input on these channels (bit = 1 << channel); default all. */
void shim_zmq_listen(struct shim_zmq *z, unsigned channels);
bool shim_zmq_readable(struct shim_zmq *z, enum jp_channel c);
/* Next valid message: 1 and *ret; 0: nothing more. Messages that are not valid (wrong signature,
 * too large, malformed) are dropped with one log line each. */
int shim_zmq_recv(struct shim_zmq *z, enum jp_channel c, struct jp_msg **ret);
/* Sign and send. 0; -EAGAIN: the kernel's queue is full (ready() comes when it is not). */
int shim_zmq_send(struct shim_zmq *z, const struct jp_msg *m);
/* From now on sign with the new key; what was signed with the old one is still accepted until
 * shim_zmq_forget_key. */
void shim_zmq_rekey(struct shim_zmq *z, struct slice key);
void shim_zmq_forget_key(struct shim_zmq *z);
/* Are all four channels up? (A router drops what it would send to an identity not yet seen.) */
bool shim_zmq_connected(struct shim_zmq *z);
/* Have all connections that were ever made ended (the kernel is gone and all its bytes are here)?
 */
bool shim_zmq_disconnected(struct shim_zmq *z);
