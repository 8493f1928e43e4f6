/* Micro benchmarks of proto/: one core, no I/O. Prints one JSON object; not a test (no asserts on
 * time). Usage: bench_proto [seconds per case, default 0.5] */
#include "common/buf.h"
#include "proto/gl.h"
#include "proto/jp_json.h"
#include "proto/jp_sign.h"
#include "proto/jp_ws.h"
#include "proto/jp_zmq.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double limit_s = 0.5;

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* a busy machine does not count */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A stream message as ipykernel sends it, with about n bytes of text. */
static struct jp_msg *sample(size_t n)
{
    static const char head[] =
        "{\"msg_id\": \"5f0c6ab1-0b9f4a3b9b586d9ef6b4a3f1_17_1\", \"msg_type\": \"stream\", "
        "\"username\": \"ada\", \"session\": \"0b9f5f0c-6ab14a3b9b58b4a3f16d9ef6\", "
        "\"date\": \"2026-01-31T12:00:00.000000Z\", \"version\": \"5.4\"}";
    struct jp_parts p = { .channel = JP_IOPUB, .header = SLICE_LIT(head) };
    struct jp_msg *m;
    struct buf b;

    buf_init(&b, n + 100);
    buf_append_str(&b, "{\"name\": \"stdout\", \"text\": \"");
    for (size_t i = 0; i < n; i++)
        buf_append_byte(&b, i % 80 ? (uint8_t)('a' + i % 26) : ' ');
    buf_append_str(&b, "\"}");
    p.parent = p.header;
    p.content = buf_slice(&b);
    if (jp_msg_new(&p, &m, NULL) < 0)
        abort();
    buf_fini(&b);
    return m;
}

static bool first = true;
static void report(const char *name, double seconds, double messages, double bytes)
{
    printf("%s\n  \"%s\": {\"messages_per_s\": %.0f, \"mb_per_s\": %.1f, \"ns_per_message\": %.0f}",
           first ? "{" : ",", name, messages / seconds, bytes / seconds / 1e6,
           seconds / messages * 1e9);
    first = false;
}

/* ---- guest link ---- */

struct receiver {
    struct gl_link *l;
    double messages, bytes;
    bool decode;
};

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct receiver *r = ctx;
    struct jp_msg *m;

    (void)type;
    r->messages++;
    r->bytes += (double)payload.n;
    if (r->decode) {
        if (jp_body_decode(payload, &m, NULL) < 0)
            abort();
        jp_msg_unref(m);
    }
    gl_link_grant(r->l, stream, payload.n);
}

static void move(struct gl_link *from, struct gl_link *to)
{
    struct slice s;
    struct err e = { 0 };

    while ((s = gl_link_output(from)).n) {
        if (gl_link_feed(to, s, &e) < 0) {
            fprintf(stderr, "%s\n", e.msg);
            abort();
        }
        gl_link_consumed(from, s.n);
    }
}

static void bench_link(const char *name, size_t text, bool decode)
{
    static const struct gl_limits limits = { JP_MSG_MAX, 8u << 20 };
    static const struct gl_link_ops ops = { on_message, NULL, NULL };
    struct receiver host = { .decode = decode }, guest = { 0 };
    struct jp_msg *m = sample(text);
    uint8_t head[64];
    struct slice parts[5] = {
        { head, 4 + 4 * 4 }, m->parts.header, m->parts.parent, m->parts.metadata, m->parts.content
    };
    double start;

    host.l = gl_link_new(GL_HOST, &limits, &ops, &host);
    guest.l = gl_link_new(GL_GUEST, &limits, &ops, &guest);
    gl_link_set_phase(host.l, GL_PHASE_RUNNING);
    gl_link_set_phase(guest.l, GL_PHASE_RUNNING);
    start = now_s();
    while (now_s() - start < limit_s) {
        for (unsigned i = 0; i < 200; i++) {
            jp_body_head(m, head);
            if (gl_link_send(guest.l, GL_KERNEL_MSG, 1, parts, 5) < 0)
                move(guest.l, host.l);
        }
        move(guest.l, host.l);
        move(host.l, guest.l);
    }
    report(name, now_s() - start, host.messages, host.bytes);
    gl_link_free(host.l);
    gl_link_free(guest.l);
    jp_msg_unref(m);
}

/* ---- codecs ---- */

static void bench_msg_new(const char *name, size_t text)
{
    struct jp_msg *m = sample(text), *copy;
    double start = now_s(), n = 0;

    while (now_s() - start < limit_s)
        for (unsigned i = 0; i < 200; i++, n++) {
            if (jp_msg_new(&m->parts, &copy, NULL) < 0)
                abort();
            jp_msg_unref(copy);
        }
    report(name, now_s() - start, n, n * (double)m->size);
    jp_msg_unref(m);
}

static void bench_encode(const char *name, enum jp_ws_proto proto, size_t text)
{
    struct jp_msg *m = sample(text);
    struct buf out;
    double start = now_s(), n = 0;
    bool binary;

    buf_init(&out, text + 10000);
    while (now_s() - start < limit_s)
        for (unsigned i = 0; i < 200; i++, n++) {
            buf_clear(&out);
            if (jp_ws_encode(proto, NULL, m, &out, &binary) < 0)
                abort();
        }
    report(name, now_s() - start, n, n * (double)m->size);
    buf_fini(&out);
    jp_msg_unref(m);
}

static void bench_decode(const char *name, enum jp_ws_proto proto, size_t text)
{
    struct jp_msg *m = sample(text), *copy;
    struct buf out;
    double start, n = 0;
    bool binary;

    buf_init(&out, text + 10000);
    if (jp_ws_encode(proto, NULL, m, &out, &binary) < 0)
        abort();
    start = now_s();
    while (now_s() - start < limit_s)
        for (unsigned i = 0; i < 200; i++, n++) {
            if (jp_ws_decode(proto, buf_slice(&out), &copy, NULL) < 0)
                abort();
            jp_msg_unref(copy);
        }
    report(name, now_s() - start, n, n * (double)m->size);
    buf_fini(&out);
    jp_msg_unref(m);
}

static void bench_zmq(const char *name, size_t text)
{
    struct jp_signer *s = jp_signer_new(SLICE_LIT("a-key-of-usual-length-0123456789"));
    struct jp_msg *m = sample(text), *copy;
    struct slice frames[6];
    char sig[JP_SIG_LEN + 1];
    double start = now_s(), n = 0;
    size_t ids;

    while (now_s() - start < limit_s)
        for (unsigned i = 0; i < 50; i++, n++) {
            size_t k = jp_zmq_encode(s, m, sig, frames);
            if (jp_zmq_decode(s, JP_IOPUB, frames, k, &ids, &copy, NULL) < 0)
                abort();
            jp_msg_unref(copy);
        }
    report(name, now_s() - start, n, n * (double)m->size);
    jp_msg_unref(m);
    jp_signer_free(s);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        limit_s = strtod(argv[1], NULL);
    bench_link("link_100B", 100, false);
    bench_link("link_4kB", 4000, false);
    bench_link("link_1MB", 1 << 20, false);
    bench_link("link_4kB_decoded", 4000, true);
    bench_msg_new("msg_new_100B", 100);
    bench_msg_new("msg_new_4kB", 4000);
    bench_encode("ws_v1_encode_4kB", JP_WS_V1, 4000);
    bench_encode("ws_legacy_encode_4kB", JP_WS_LEGACY, 4000);
    bench_encode("ws_legacy_encode_1MB", JP_WS_LEGACY, 1 << 20);
    bench_decode("ws_v1_decode_4kB", JP_WS_V1, 4000);
    bench_decode("ws_legacy_decode_4kB", JP_WS_LEGACY, 4000);
    bench_decode("ws_legacy_decode_1MB", JP_WS_LEGACY, 1 << 20);
    bench_zmq("zmq_sign_and_verify_4kB", 4000);
    printf("\n}\n");
    return 0;
}
