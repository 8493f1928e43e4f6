/* ZMQ multipart codec, see jp_zmq.h. The signature is checked over the raw frames before anything
 * in them is parsed. */
#include "proto/jp_zmq.h"
#include <errno.h>

/* Frames that follow the delimiter before the buffers: signature and four JSON parts. */
#define FIXED 5u

int jp_zmq_decode(struct jp_signer *s, enum jp_channel channel, const struct slice *frames,
                  size_t n, size_t *ret_n_ids, struct jp_msg **ret, struct err *e)
{
    const struct slice *f;
    struct jp_parts p;
    size_t ids = 0;
    int r;

    while (ids < n && ids <= JP_ZMQ_IDS_MAX && !slice_eq_str(frames[ids], JP_ZMQ_DELIM))
        ids++;
    if (ids == n || ids > JP_ZMQ_IDS_MAX)
        return err_set(e, -EBADMSG, "no %s delimiter in the first %zu frames", JP_ZMQ_DELIM,
                       n < JP_ZMQ_IDS_MAX + 1 ? n : (size_t)JP_ZMQ_IDS_MAX + 1);
    if (n - ids - 1 < FIXED)
        return err_set(e, -EBADMSG, "%zu frames after the delimiter, at least %u", n - ids - 1,
                       FIXED);
    f = frames + ids + 1;
    if (!jp_verify(s, f + 1, f[0]))
        return err_set(e, -EACCES, "message signature does not match");
    p = (struct jp_parts) { channel, f[1], f[2], f[3], f[4], f + FIXED, n - ids - 1 - FIXED };
    r = jp_msg_new(&p, ret, e);
    if (r == 0)
        *ret_n_ids = ids;
    return r;
}

size_t jp_zmq_encode(struct jp_signer *s, const struct jp_msg *m, char sig[JP_SIG_LEN + 1],
                     struct slice *ret)
{
    const struct jp_parts *p = &m->parts;

    ret[0] = SLICE_LIT(JP_ZMQ_DELIM);
    ret[2] = p->header;
    ret[3] = p->parent;
    ret[4] = p->metadata;
    ret[5] = p->content;
    jp_sign(s, ret + 2, sig);
    ret[1] = slice_str(sig);
    for (size_t i = 0; i < p->n_buffers; i++)
        ret[6 + i] = p->buffers[i];
    return 6 + p->n_buffers;
}
