#include "gl_pair.h"

static uint64_t hash_of(struct slice s)
{
    uint64_t h = 1469598103934665603u;

    for (size_t i = 0; i < s.n; i++)
        h = (h ^ s.p[i]) * 1099511628211u;
    return h;
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct side *s = ctx;

    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 64;
        s->records = xrealloc(s->records, s->cap * sizeof(*s->records));
    }
    s->records[s->n++] = (struct record) { type, stream, payload.n, hash_of(payload), payload.p };
    if (s->grant && (type == GL_KERNEL_MSG || type == GL_KERNEL_OUT))
        gl_link_grant(s->l, stream, payload.n);
    if (s->hook)
        s->hook(s, type, stream);
}

static void on_output(void *ctx)
{
    ((struct side *)ctx)->outputs++;
}

static void on_writable(void *ctx, uint32_t stream)
{
    struct side *s = ctx;

    if (s->n_writable < 64)
        s->writable[s->n_writable++] = stream;
}

const struct gl_link_ops pair_ops = { on_message, on_output, on_writable };

int pair_setup(void **state)
{
    static const struct gl_limits limits = { MESSAGE_MAX, QUEUE_MAX };
    struct pair *p = xnew(struct pair);

    p->host.l = gl_link_new(GL_HOST, &limits, &pair_ops, &p->host);
    p->guest.l = gl_link_new(GL_GUEST, &limits, &pair_ops, &p->guest);
    p->host.grant = p->guest.grant = true;
    gl_link_set_phase(p->host.l, GL_PHASE_RUNNING);
    gl_link_set_phase(p->guest.l, GL_PHASE_RUNNING);
    *state = p;
    return 0;
}

int pair_teardown(void **state)
{
    struct pair *p = *state;

    gl_link_free(p->host.l);
    gl_link_free(p->guest.l);
    free(p->host.records);
    free(p->guest.records);
    free(p);
    return 0;
}

size_t move(struct side *from, struct side *to, size_t step)
{
    size_t moved = 0;
    struct slice s;
    struct err e = { 0 };

    while ((s = gl_link_output(from->l)).n) {
        if (s.n > step)
            s.n = step;
        if (gl_link_feed(to->l, s, &e) < 0)
            fail_msg("%s", e.msg);
        gl_link_consumed(from->l, s.n);
        moved += s.n;
    }
    return moved;
}

void settle(struct pair *p, size_t step)
{
    while (move(&p->host, &p->guest, step) + move(&p->guest, &p->host, step))
        ;
}

int send_n(struct side *s, enum gl_type type, uint32_t stream, size_t n, uint8_t seed)
{
    uint8_t *bytes = xmalloc(n + 1);
    struct slice part = slice_of(bytes, n);

    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(seed + i * 31 + (i >> 9));
    int r = gl_link_send(s->l, type, stream, &part, 1);
    free(bytes);
    return r;
}

uint64_t hash_n(size_t n, uint8_t seed)
{
    uint64_t h = 1469598103934665603u;

    for (size_t i = 0; i < n; i++)
        h = (h ^ (uint8_t)(seed + i * 31 + (i >> 9))) * 1099511628211u;
    return h;
}

void assert_got(const struct side *s, size_t i, enum gl_type type, uint32_t stream, size_t n,
                uint8_t seed)
{
    assert_true(i < s->n);
    assert_int_equal(s->records[i].type, type);
    assert_int_equal(s->records[i].stream, stream);
    assert_int_equal(s->records[i].n, n);
    assert_true(s->records[i].hash == hash_n(n, seed));
}

void raw(struct buf *b, unsigned type, uint32_t stream, uint8_t flags, uint32_t n)
{
    struct gl_header h = { n, (uint8_t)type, flags, stream };
    uint8_t bytes[GL_HEADER];

    gl_header_put(bytes, &h);
    buf_append(b, bytes, GL_HEADER);
    memset(buf_reserve(b, n), 'x', n);
    buf_commit(b, n);
}
