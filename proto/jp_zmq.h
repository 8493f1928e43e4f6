#pragma once
/* ZMQ multipart codec: [identities...] <IDS|MSG> signature header parent metadata content
 * buffers... (jupyter.md 3.2). Pure: frames in and out as slices; sockets are the caller's. */
#include "proto/jp_msg.h"
#include "proto/jp_sign.h"

#define JP_ZMQ_DELIM "<IDS|MSG>"
#define JP_ZMQ_IDS_MAX 16u

/* Verify first, then parse. *ret_n_ids = number of frames before the delimiter.
 * -EBADMSG: no delimiter or too few frames; -EACCES: bad signature; else as jp_msg_new. */
int jp_zmq_decode(struct jp_signer *s, enum jp_channel channel, const struct slice *frames,
                  size_t n, size_t *ret_n_ids, struct jp_msg **ret, struct err *e);
/* Frames from the delimiter on: writes 6 + n_buffers slices to ret (which point into m and sig). */
size_t jp_zmq_encode(struct jp_signer *s, const struct jp_msg *m, char sig[JP_SIG_LEN + 1],
                     struct slice *ret);
