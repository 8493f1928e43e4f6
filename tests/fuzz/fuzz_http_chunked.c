/* Chunked request bodies. Properties: the pieces in which the bytes come do not matter; never more
 * output than input or than the limit; a complete body ends within the input. */
#include "fuzz.h"
#include "gateway/http/chunked.h"
#include <errno.h>

#define LIMIT 4096

static int feed(const uint8_t *p, size_t n, size_t step, struct buf *out, size_t *ret_used)
{
    struct gw_chunked c;
    size_t at = 0;
    int r = 0;

    gw_chunked_init(&c);
    while (at < n && r == 0) {
        size_t k = n - at < step ? n - at : step, used = 0;

        r = gw_chunked_feed(&c, slice_of(p + at, k), &used, out);
        FUZZ_CHECK(r < 0 || (r ? used <= k : used == k));
        at += used;
    }
    *ret_used = at;
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct buf whole, bytes;
    size_t used_whole = 0, used_bytes = 0;

    buf_init(&whole, LIMIT);
    buf_init(&bytes, LIMIT);
    int a = feed(data, size, SIZE_MAX, &whole, &used_whole);
    int b = feed(data, size, 1, &bytes, &used_bytes);
    FUZZ_CHECK(a == b || a == -EFBIG || b == -EFBIG);
    FUZZ_CHECK(whole.len <= LIMIT && whole.len <= size);
    if (a >= 0 && b >= 0) {
        FUZZ_CHECK(used_whole == used_bytes);
        FUZZ_CHECK(slice_eq(buf_slice(&whole), buf_slice(&bytes)));
    }
    buf_fini(&whole);
    buf_fini(&bytes);
    return 0;
}
