#pragma once
/* A gl_link on a stream descriptor, driven by the loop. Knows no hypervisor. Private to vm/. */
#include "common/log.h"
#include "common/loop.h"
#include "proto/gl.h"

struct vm_channel_events {
    void (*message)(void *ctx, enum gl_type type, uint32_t stream, struct slice payload);
    void (*writable)(void *ctx, uint32_t stream);
    /* EOF, I/O error or protocol violation (-EPROTO); once; the channel is dead then. */
    void (*closed)(void *ctx, int code, const char *why);
};
struct vm_channel;
/* Takes fd (non-blocking stream), sends HELLO at once, and again while the link stays in
 * GL_PHASE_HELLO. */
struct vm_channel *vm_channel_new(struct loop *l, int fd, const struct log_ctx *log,
                                  const struct vm_channel_events *ev, void *ctx);
struct gl_link *vm_channel_link(struct vm_channel *c);
unsigned vm_channel_hellos(const struct vm_channel *c); /* sent: so many answers may come */
/* Blocking-free connect to a unix socket path: fd >= 0 or -errno. */
int vm_channel_connect(const char *path);
void vm_channel_free(struct vm_channel *c); /* NULL ok; from any callback */
