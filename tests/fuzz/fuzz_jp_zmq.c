/* ZMQ multipart messages of a kernel. Input: u8 flags (bit 0: with a key; bit 1: put the right
 * signature in; bits 4-5: channel), then frames as u16le length + bytes. Property: a wrong
 * signature is never accepted; what decodes encodes to frames that decode to the same message. */
#include "common/rdwr.h"
#include "fuzz_jp.h"
#include "proto/jp_zmq.h"
#include <errno.h>

#define FRAMES_MAX 256u

/* The place of the delimiter, or n. */
static size_t delimiter(const struct slice *frames, size_t n)
{
    size_t i = 0;

    while (i < n && !slice_eq_str(frames[i], JP_ZMQ_DELIM))
        i++;
    return i;
}

static void round_trip(struct jp_signer *s, const struct jp_msg *m)
{
    struct slice out[6 + FRAMES_MAX];
    char sig[JP_SIG_LEN + 1];
    size_t n = jp_zmq_encode(s, m, sig, out), ids;
    struct jp_msg *again;

    FUZZ_CHECK(n == 6 + m->parts.n_buffers);
    FUZZ_CHECK(jp_zmq_decode(s, m->parts.channel, out, n, &ids, &again, NULL) == 0 && ids == 0);
    fuzz_check_same(m, again);
    jp_msg_unref(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct rd r = rd_of(slice_of(data, size));
    struct slice frames[FRAMES_MAX];
    uint8_t flags = rd_u8(&r);
    struct jp_signer *s = jp_signer_new(slice_str(flags & 1 ? "secret" : ""));
    char sig[JP_SIG_LEN + 1];
    size_t n = 0, at, ids;
    struct err e = { 0 };
    struct jp_msg *m;
    bool valid = !(flags & 1);
    int rc;

    while (n < FRAMES_MAX && rd_ok(&r) && r.left)
        frames[n++] = rd_bytes(&r, rd_u16le(&r));
    if (!rd_ok(&r) && n)
        n--; /* the cut one */
    at = delimiter(frames, n);
    if ((flags & 3) == 3 && n - at >= 6) {
        jp_sign(s, frames + at + 2, sig);
        frames[at + 1] = slice_str(sig);
        valid = true;
    } else if (n - at >= 6) {
        valid = jp_verify(s, frames + at + 2, frames[at + 1]);
    }
    rc = jp_zmq_decode(s, (enum jp_channel)(flags >> 4 & 3), frames, n, &ids, &m, &e);
    if (rc == 0) {
        FUZZ_CHECK(valid && ids == at && ids <= JP_ZMQ_IDS_MAX);
        fuzz_check_message(m);
        round_trip(s, m);
        jp_msg_unref(m);
    } else {
        FUZZ_CHECK(e.code == rc && e.msg[0]);
    }
    jp_signer_free(s);
    return 0;
}
