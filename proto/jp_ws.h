#pragma once
/* The three websocket framings of a kernel connection (jupyter.md 2.2, 2.3):
 * legacy text JSON, legacy binary (big-endian table, only with buffers), and
 * v1.kernel.websocket.jupyter.org (little-endian table, always binary). */
#include "common/buf.h"
#include "proto/jp_msg.h"

#define JP_WS_V1_NAME "v1.kernel.websocket.jupyter.org"
enum jp_ws_proto { JP_WS_LEGACY, JP_WS_V1 };

/* Decode one whole frame from a client. Legacy: text or binary is told by the first byte ('{' or
 * white space = JSON), not by the opcode (some proxies re-send binary frames as text).
 * Legacy text: channel may be missing (shell), buffers may be {} or [] and, when it is an array of
 * base64 strings, is decoded. Header ids may be missing: msg_id is required for shell/control.
 * Errors: -EINVAL (malformed, e says how), -E2BIG, -ENOMEM, -ENOENT (unknown channel: ignore). */
int jp_ws_decode(enum jp_ws_proto proto, struct slice frame, struct jp_msg **ret, struct err *e);

struct jp_ws_opts {
    bool no_binary; /* legacy only: never send a binary frame; buffers go as base64 strings */
};
/* Append one frame; *ret_binary is its opcode. Legacy text carries msg_id and msg_type beside the
 * parts, and NaN/Infinity tokens inside a part become null. 0, -ENOBUFS, -ENOMEM. */
int jp_ws_encode(enum jp_ws_proto proto, const struct jp_ws_opts *opts, const struct jp_msg *m,
                 struct buf *out, bool *ret_binary);
/* v1 only: write the offset table + channel name (the head of the frame) so that the parts can be
 * sent from where they lie. Appends to out; total frame length in *ret_total. */
int jp_ws_v1_head(const struct jp_msg *m, struct buf *out, uint64_t *ret_total);
