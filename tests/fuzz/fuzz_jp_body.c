/* Bodies of GL_KERNEL_MSG, as a guest sends them. Property: decode, encode, decode is the identity;
 * a body without empty JSON parts encodes to the very same bytes. */
#include "fuzz_jp.h"
#include "proto/jp_priv.h"

static struct slice encode(const struct jp_msg *m)
{
    const struct jp_parts *p = &m->parts;
    const struct slice json[] = { p->header, p->parent, p->metadata, p->content };
    size_t n = jp_body_size(m), at = 4 + 4 * (4 + p->n_buffers);
    uint8_t *bytes = malloc(n);

    FUZZ_CHECK(bytes && at <= n);
    jp_body_head(m, bytes);
    for (size_t i = 0; i < 4 + p->n_buffers; i++) {
        struct slice s = i < 4 ? json[i] : p->buffers[i - 4];
        FUZZ_CHECK(s.n <= n - at);
        if (s.n)
            memcpy(bytes + at, s.p, s.n);
        at += s.n;
    }
    FUZZ_CHECK(at == n);
    return slice_of(bytes, n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct jp_msg *m, *again;
    struct err e = { 0 };
    struct slice body;
    char text[JP_ID_MAX], status[16];
    int r = jp_body_decode(slice_of(data, size), &m, &e);

    if (r < 0) {
        FUZZ_CHECK(e.code == r && e.msg[0]);
        return 0;
    }
    fuzz_check_message(m);
    body = encode(m);
    FUZZ_CHECK(body.n >= size && body.n <= size + 8);
    if (body.n == size)
        FUZZ_CHECK(memcmp(body.p, data, size) == 0);
    FUZZ_CHECK(jp_body_decode(body, &again, NULL) == 0);
    fuzz_check_same(m, again);
    jp_status_of(m, status);
    FUZZ_CHECK(strlen(status) < sizeof(status));
    if (jp_reply_type(m->msg_type, text))
        FUZZ_CHECK(strlen(text) < sizeof(text));
    jp_type_untracked(m->msg_type);
    free((void *)(uintptr_t)body.p);
    jp_msg_unref(m);
    jp_msg_unref(again);
    return 0;
}
