/* The guest link against a hostile peer. Input: u8 role and phase, then operations; most forge a
 * frame with a right check word, as random bytes would hardly ever find one. Properties:
 *   - every message delivered is legal for the peer and no longer than its maximum;
 *   - credit given never exceeds bulk received; bulk sent never exceeds window plus credit got;
 *   - output is a sequence of well-formed frames, a message's frames not interleaved;
 *   - no assertion, no leak, whatever the callbacks do to the link meanwhile. */
#include "common/rdwr.h"
#include "fuzz.h"
#include "proto/gl_priv.h"
#include <errno.h>
#include <string.h>

#define MESSAGE_MAX (150u << 10)
#define QUEUE_MAX (100u << 10)
#define STREAMS 4u /* streams used; others only by forged headers */

struct world {
    struct gl_link *l;
    enum gl_role role;
    struct rd in;
    bool dead, in_call;
    uint64_t bulk_in[GL_STREAMS_MAX], credit_out[GL_STREAMS_MAX];
    uint64_t bulk_out[GL_STREAMS_MAX], credit_in[GL_STREAMS_MAX];
    /* our output, parsed as the peer would */
    uint8_t header[GL_HEADER];
    size_t header_len;
    uint32_t payload_left, payload_at;
    struct gl_header h;
    uint8_t open_type[GL_STREAMS_MAX]; /* type of a message in the making, 0 = none */
    uint8_t credit[4];
};

static const struct gl_limits limits = { MESSAGE_MAX, QUEUE_MAX };
static uint8_t zeros[GL_FRAME_MAX];

static enum gl_role peer_of(enum gl_role r)
{
    return r == GL_HOST ? GL_GUEST : GL_HOST;
}

static void reset(struct world *w)
{
    gl_link_reset(w->l);
    memset(w->bulk_in, 0, sizeof(w->bulk_in));
    memset(w->credit_out, 0, sizeof(w->credit_out));
    memset(w->bulk_out, 0, sizeof(w->bulk_out));
    memset(w->credit_in, 0, sizeof(w->credit_in));
    memset(w->open_type, 0, sizeof(w->open_type));
    w->header_len = 0;
    w->payload_left = 0;
    gl_link_set_phase(w->l, GL_PHASE_RUNNING);
}

static void send_something(struct world *w, uint8_t pick, uint32_t size)
{
    static const enum gl_type host[] = { GL_KERNEL_MSG, GL_KERNEL_CTL, GL_KERNEL_START, GL_PING };
    static const enum gl_type guest[] = { GL_KERNEL_MSG, GL_KERNEL_STATE, GL_KERNEL_DONE,
                                          GL_KERNEL_OUT };
    enum gl_type t = (w->role == GL_HOST ? host : guest)[pick & 3];
    uint32_t stream = t == GL_PING ? 0 : 1 + (pick >> 2) % (STREAMS - 1);
    const struct gl_type_info *info = gl_type_info((unsigned)t);
    struct slice parts[8];
    size_t n = 0, queued = gl_link_queued(w->l, stream);
    int r;

    if (!gl_type_legal(info, w->role, gl_link_phase(w->l)))
        return;
    size %= MESSAGE_MAX + 1000;
    while (size && n < 8) {
        size_t take = size < sizeof(zeros) ? size : sizeof(zeros);
        parts[n++] = slice_of(zeros, take);
        size -= (uint32_t)take;
    }
    r = gl_link_send(w->l, t, stream, parts, n);
    FUZZ_CHECK(r == 0 || r == -EAGAIN || r == -E2BIG || r == -EINVAL);
    if (r < 0)
        FUZZ_CHECK(gl_link_queued(w->l, stream) == queued);
}

/* What a callback does is read from the input, too. */
static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct world *w = ctx;
    const struct gl_type_info *t = gl_type_info((unsigned)type);
    volatile uint8_t sum = 0;

    FUZZ_CHECK(t && (t->from & 1u << peer_of(w->role)) && type != GL_CREDIT);
    FUZZ_CHECK((stream == 0) == (t->class == GL_CLASS_CONTROL) && stream < GL_STREAMS_MAX);
    FUZZ_CHECK(payload.n >= t->min && payload.n <= (t->max ? t->max : MESSAGE_MAX));
    for (size_t i = 0; i < payload.n; i += 997)
        sum = (uint8_t)(sum + payload.p[i]);
    if (payload.n)
        sum = (uint8_t)(sum + payload.p[payload.n - 1]);
    switch (rd_u8(&w->in) & 15) {
    case 0:
        reset(w);
        break;
    case 1:
        gl_link_free(w->l);
        w->dead = true;
        return;
    case 2:
        gl_link_close_stream(w->l, stream);
        break;
    case 3:
        send_something(w, rd_u8(&w->in), rd_u16le(&w->in));
        break;
    case 4:
        gl_link_set_phase(w->l, (enum gl_phase)(rd_u8(&w->in) % 3));
        break;
    default:
        gl_link_grant(w->l, stream, payload.n);
        break;
    }
    for (size_t i = 0; i < payload.n; i += 4096) /* still readable after all that */
        sum = (uint8_t)(sum + payload.p[i]);
}

static void on_output(void *ctx)
{
    (void)ctx;
}

static void on_writable(void *ctx, uint32_t stream)
{
    struct world *w = ctx;

    send_something(w, (uint8_t)stream, 5000);
}

static const struct gl_link_ops ops = { on_message, on_output, on_writable };

/* ---- our output as the peer sees it ---- */

static void frame_out(struct world *w)
{
    const struct gl_type_info *t;
    uint32_t k;

    FUZZ_CHECK(gl_header_get(w->header, &w->h, &t, NULL) == 0);
    FUZZ_CHECK(t->from & 1u << w->role);
    k = w->h.stream;
    w->payload_left = w->h.length;
    w->payload_at = 0;
    if (t->class == GL_CLASS_BULK) {
        w->bulk_out[k] += w->h.length;
        FUZZ_CHECK(w->bulk_out[k] <= GL_WINDOW + w->credit_in[k]);
    }
    if (t->class == GL_CLASS_URGENT)
        return;
    FUZZ_CHECK(!w->open_type[k] || w->open_type[k] == w->h.type);
    w->open_type[k] = w->h.flags & GL_FLAG_MORE ? w->h.type : 0;
}

static void bytes_out(struct world *w, struct slice s)
{
    for (size_t i = 0; i < s.n;) {
        if (w->payload_left) {
            size_t take = s.n - i < w->payload_left ? s.n - i : w->payload_left;
            for (size_t k = 0; w->h.type == GL_CREDIT && k < take; k++)
                w->credit[w->payload_at + k] = s.p[i + k];
            w->payload_at += (uint32_t)take;
            w->payload_left -= (uint32_t)take;
            i += take;
        } else {
            w->header[w->header_len++] = s.p[i++];
            if (w->header_len < GL_HEADER)
                continue;
            w->header_len = 0;
            frame_out(w);
        }
        if (w->payload_left == 0 && w->header_len == 0 && w->h.type == GL_CREDIT) {
            struct rd r = rd_of(slice_of(w->credit, 4));
            w->credit_out[w->h.stream] += rd_u32le(&r);
            FUZZ_CHECK(w->credit_out[w->h.stream] <= w->bulk_in[w->h.stream]);
            w->h.type = 0;
        }
    }
}

static void write_out(struct world *w, size_t max)
{
    struct slice s = gl_link_output(w->l);

    if (s.n > max)
        s.n = max;
    bytes_out(w, s);
    gl_link_consumed(w->l, s.n);
}

/* ---- the peer's bytes ---- */

static void feed(struct world *w, struct slice s, size_t step)
{
    struct err e = { 0 };

    while (s.n && !w->dead) {
        size_t n = s.n < step ? s.n : step;
        int r = gl_link_feed(w->l, slice_of(s.p, n), &e);
        if (w->dead)
            return;
        FUZZ_CHECK(r == 0 || r == -EPROTO || r == -E2BIG);
        if (r < 0) {
            FUZZ_CHECK(e.code == r && e.msg[0]);
            reset(w);
            return;
        }
        s.p += n;
        s.n -= n;
    }
}

/* Account before feeding: an accepted frame can only have been counted. */
static void forge(struct world *w, uint8_t type, uint8_t flags, uint32_t stream, uint32_t n)
{
    static uint8_t frame[GL_HEADER + GL_FRAME_MAX];
    struct gl_header h = { n, type, flags & GL_FLAG_MORE, stream };
    struct slice some;

    n %= GL_FRAME_MAX + 1;
    h.length = n;
    gl_header_put(frame, &h);
    memset(frame + GL_HEADER, 'x', n);
    some = rd_bytes(&w->in, w->in.left < n ? (w->in.left < 8 ? w->in.left : 8) : (n < 8 ? n : 8));
    if (some.n && some.n <= n)
        memcpy(frame + GL_HEADER, some.p, some.n);
    if (type == GL_CREDIT && n == 4 && stream < GL_STREAMS_MAX) {
        struct rd r = rd_of(slice_of(frame + GL_HEADER, 4));
        w->credit_in[stream] += rd_u32le(&r);
    }
    if ((type == GL_KERNEL_MSG || type == GL_KERNEL_OUT) && stream < GL_STREAMS_MAX)
        w->bulk_in[stream] += n;
    feed(w, slice_of(frame, GL_HEADER + n), flags & 2 && n < 600 ? 7 : flags & 4 ? 5000 : SIZE_MAX);
}

static void step(struct world *w)
{
    uint8_t op = rd_u8(&w->in), a = rd_u8(&w->in), b = rd_u8(&w->in);
    uint32_t stream = b % STREAMS, n = rd_u16le(&w->in);

    switch (op & 15) {
    case 0:
        feed(w, rd_bytes(&w->in, a < w->in.left ? a : w->in.left), 1 + b);
        break;
    case 1:
        gl_link_grant(w->l, stream, n * 64);
        break;
    case 2:
        gl_link_close_stream(w->l, b % GL_STREAMS_MAX);
        break;
    case 3:
    case 4:
        send_something(w, b, n * (1 + a % 8));
        break;
    case 5:
        write_out(w, n);
        break;
    case 6:
        write_out(w, SIZE_MAX);
        break;
    case 7:
        if (a == 0)
            reset(w);
        else
            gl_link_set_phase(w->l, (enum gl_phase)(b % 3));
        break;
    case 8: /* any header */
        forge(w, a, op >> 4, b, n);
        break;
    default: /* a likely one */
        forge(w, 1 + a % 21, op >> 4, a % 21 + 1 < GL_CREDIT ? 0 : 1 + b % (STREAMS - 1), n);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct world w = { .in = rd_of(slice_of(data, size)) };
    uint8_t start = rd_u8(&w.in);

    w.role = start & 1 ? GL_GUEST : GL_HOST;
    w.l = gl_link_new(w.role, &limits, &ops, &w);
    gl_link_set_phase(w.l, (enum gl_phase)((start >> 1) % 3));
    for (unsigned i = 0; i < 2000 && rd_ok(&w.in) && w.in.left && !w.dead; i++)
        step(&w);
    if (!w.dead)
        gl_link_free(w.l);
    return 0;
}
