/* Websocket frames from a client. Properties: the pieces in which the bytes come do not matter; no
 * message above the limit, no control payload above 125 bytes. */
#include "fuzz.h"
#include "gateway/jupyter/ws_frame.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT 2000

/* A digest of the events, and the error. */
struct story {
    uint64_t hash;
    unsigned events;
    int error;
};

static void tell(struct story *s, enum gw_ws_event ev, struct slice p)
{
    s->hash = (s->hash ^ (uint64_t)ev) * UINT64_C(0x100000001b3);
    for (size_t i = 0; i < p.n; i++)
        s->hash = (s->hash ^ p.p[i]) * UINT64_C(0x100000001b3);
    s->hash = (s->hash ^ p.n) * UINT64_C(0x100000001b3);
    s->events++;
}

static struct story feed(const uint8_t *data, size_t size, size_t step)
{
    struct story s = { 0 };
    struct gw_ws_rx r;
    uint8_t *copy = malloc(size + 1);

    FUZZ_CHECK(copy);
    memcpy(copy, data, size);
    gw_ws_rx_init(&r, LIMIT);
    for (size_t at = 0; at < size && !s.error;) {
        size_t k = size - at < step ? size - at : step, used = 0;
        enum gw_ws_event ev = GW_WS_MORE;
        struct slice p = SLICE_NULL;

        s.error = gw_ws_rx_feed(&r, copy + at, k, &used, &ev, &p);
        FUZZ_CHECK(used <= k && (used || s.error || ev != GW_WS_MORE));
        at += used;
        if (s.error || ev == GW_WS_MORE)
            continue;
        FUZZ_CHECK(p.n <= (ev == GW_WS_MESSAGE ? LIMIT : 125));
        tell(&s, ev, p);
    }
    gw_ws_rx_fini(&r);
    free(copy);
    return s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct story whole = feed(data, size, SIZE_MAX), bytes = feed(data, size, 1),
                 some = feed(data, size, 7);

    FUZZ_CHECK(whole.error == bytes.error && whole.error == some.error);
    FUZZ_CHECK(whole.events == bytes.events && whole.hash == bytes.hash);
    FUZZ_CHECK(whole.events == some.events && whole.hash == some.hash);
    FUZZ_CHECK(!whole.error || whole.error == -EPROTO || whole.error == -EMSGSIZE);
    return 0;
}
