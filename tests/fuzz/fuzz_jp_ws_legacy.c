/* Legacy websocket frames, text and binary. Property: what decodes encodes to strict JSON (both
 * with binary frames and without) that decodes to the same ids, channel and buffers. */
#include "common/rdwr.h"
#include "fuzz_jp.h"
#include "proto/jp_ws.h"
#include <errno.h>

/* The envelope is one level deeper than the part, and the scanner has a limit. */
static bool too_deep(struct slice s)
{
    size_t open = 0;

    for (size_t i = 0; i < s.n; i++)
        open += s.p[i] == '{' || s.p[i] == '[';
    return open >= 500;
}

static void round_trip(const struct jp_msg *m, const struct jp_ws_opts *opts)
{
    struct jp_msg *again;
    struct buf out;
    struct slice text;
    bool binary;
    int r;

    buf_init(&out, 16 * m->size + (1 << 20));
    FUZZ_CHECK(jp_ws_encode(JP_WS_LEGACY, opts, m, &out, &binary) == 0);
    FUZZ_CHECK(binary == (m->parts.n_buffers && !opts->no_binary));
    text = buf_slice(&out);
    if (binary) {
        struct rd rd = rd_of(text);
        uint32_t n = rd_u32be(&rd), from = rd_u32be(&rd), to = rd_u32be(&rd);
        FUZZ_CHECK(n == m->parts.n_buffers + 1 && from <= to && to <= text.n);
        text = slice_of(text.p + from, to - from);
    }
    fuzz_check_strict(text);
    r = jp_ws_decode(JP_WS_LEGACY, buf_slice(&out), &again, NULL);
    if (r == 0) {
        fuzz_check_same_ids(m, again);
        jp_msg_unref(again);
    } else {
        FUZZ_CHECK(r == -EINVAL && too_deep(text));
    }
    buf_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct jp_ws_opts binary = { 0 }, text = { .no_binary = true };
    struct jp_msg *m;
    struct err e = { 0 };
    int r = jp_ws_decode(JP_WS_LEGACY, slice_of(data, size), &m, &e);

    if (r < 0) {
        FUZZ_CHECK(e.code == r && e.msg[0]);
        return 0;
    }
    fuzz_check_message(m);
    round_trip(m, &binary);
    round_trip(m, &text);
    jp_msg_unref(m);
    return 0;
}
