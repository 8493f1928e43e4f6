/* Request heads and targets. Properties: a complete head stays complete and the same when bytes
 * follow; no prefix of an accepted head is accepted; decoded paths have no NUL, dot segment or
 * empty segment, and fit. */
#include "fuzz.h"
#include "gateway/http/head.h"
#include <errno.h>
#include <string.h>

static void check_path(const char *path)
{
    size_t n = strlen(path);

    FUZZ_CHECK(n > 0 && path[0] == '/');
    FUZZ_CHECK(!strstr(path, "//") && !strstr(path, "/../") && !strstr(path, "/./"));
    FUZZ_CHECK(n < 3 || strcmp(path + n - 3, "/..") != 0);
}

static void check_query(struct slice q)
{
    char out[64];

    gw_query_decode(q, out, sizeof(out));
    FUZZ_CHECK(memchr(out, 0, sizeof(out)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gw_head h, again;
    char path[GW_URI_MAX + 8];
    struct slice q = SLICE_NULL;

    if (!gw_head_parse(slice_of(data, size), &h)) {
        FUZZ_CHECK(size <= GW_HEAD_MAX);
        return 0;
    }
    FUZZ_CHECK(h.size > 0 && h.size <= size);
    FUZZ_CHECK(!h.status || h.why);
    if (h.status)
        return 0;
    FUZZ_CHECK(h.target.n && h.target.n <= GW_URI_MAX);
    FUZZ_CHECK(!(h.chunked && h.header[GW_H_CONTENT_LENGTH].p));
    FUZZ_CHECK(gw_head_parse(slice_of(data, h.size), &again) == 1);
    FUZZ_CHECK(again.size == h.size && again.length == h.length && again.method == h.method);
    FUZZ_CHECK(gw_head_parse(slice_of(data, h.size - 1), &again) == 0);
    if (gw_target_split(h.target, path, sizeof(path), &q) == 0) {
        check_path(path);
        check_query(q);
    }
    return 0;
}
