/* v1 websocket frames from a client. Property: what decodes encodes to a frame that decodes to the
 * same message; nothing is written beyond the buffer's maximum. */
#include "fuzz_jp.h"
#include "proto/jp_ws.h"
#include <errno.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct jp_msg *m, *again;
    struct err e = { 0 };
    struct buf out;
    bool binary = false;
    uint64_t total;
    int r = jp_ws_decode(JP_WS_V1, slice_of(data, size), &m, &e);

    if (r < 0) {
        FUZZ_CHECK(e.code == r && e.msg[0]);
        return 0;
    }
    fuzz_check_message(m);
    buf_init(&out, size + 8); /* empty parts become {} */
    FUZZ_CHECK(jp_ws_encode(JP_WS_V1, NULL, m, &out, &binary) == 0 && binary);
    FUZZ_CHECK(jp_ws_decode(JP_WS_V1, buf_slice(&out), &again, NULL) == 0);
    fuzz_check_same(m, again);
    jp_msg_unref(again);
    total = out.len;
    buf_fini(&out);

    buf_init(&out, total - 1); /* one too small: refused, untouched */
    FUZZ_CHECK(jp_ws_encode(JP_WS_V1, NULL, m, &out, &binary) == -ENOBUFS && out.len == 0);
    buf_fini(&out);
    jp_msg_unref(m);
    return 0;
}
