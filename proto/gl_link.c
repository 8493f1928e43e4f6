/* The guest link: framing, legality, credit and queues of one connection (docs/guestlink.md).
 *
 * Receiving. A frame's header is judged before its payload is looked at. The payload of a message
 * that is one frame and lies in the feed buffer is handed out where it lies; a frame cut by the end
 * of the feed buffer is gathered in `frame`; a message of several frames is gathered in its
 * stream's `part`. Memory follows bytes received, never bytes promised.
 *
 * Window (per stream, bulk frames only). `left` is what the peer may still send. Bytes that the
 * user has disposed of are `owed` until they make a quarter window, then a credit frame moves them
 * to `left`. A message may be larger than the window: while it is being gathered its bytes are
 * granted before the user disposes of them; `early` remembers how many, and the user's later
 * grants pay that debt first. So left + owed never exceeds GL_WINDOW whatever the user grants. */
#include "common/buf.h"
#include "common/mem.h"
#include "common/rdwr.h"
#include "proto/gl_priv.h"
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define GRANT_STEP (GL_WINDOW / 4)
#define OUTPUT_STEP (128u << 10)                        /* bytes of one stream before the next */
#define CONTROL_QUEUE_MAX (GL_CONTROL_MAX + (1u << 20)) /* waiting bytes, stream 0 */
#define EXEMPT_RESERVE (2u << 20)  /* state reports fit above a full queue of bulk */
#define KEEP_GATHERED (256u << 10) /* a larger gather buffer is freed after its message */
#define NO_STREAM UINT32_MAX

struct gl_stream {
    struct gl_queue tx;
    uint32_t tx_credit;
    bool want_writable;

    struct buf part;        /* frames so far of a message of several */
    enum gl_type part_type; /* of `part`, or of the message that is skipped */
    bool partial;
    bool skip;   /* the bulk message being received is thrown away */
    bool closed; /* bulk messages that begin are thrown away */
    uint32_t left, owed;
    size_t early;
    size_t part_granted; /* bytes of `part` that are in `early` */
};

struct gl_link {
    enum gl_role role;
    enum gl_phase phase;
    struct gl_limits limits;
    const struct gl_link_ops *ops;
    void *ctx;

    /* the frame being received */
    uint8_t header_bytes[GL_HEADER];
    size_t header_len;
    struct gl_header rx; /* valid when header_len == GL_HEADER */
    const struct gl_type_info *rx_info;
    uint32_t rx_got;
    struct buf frame;

    /* sending */
    uint64_t ready;        /* bit k: stream k has bytes that may leave */
    uint32_t out, out_len; /* stream and length of the slice handed out */
    uint32_t mid;          /* stream whose frame is half written, NO_STREAM at a boundary */
    uint32_t turn;         /* stream to look at first */
    bool announced;        /* ops->output was called and the user has not seen the end yet */
    struct gl_chunk_pool pool;

    unsigned depth; /* callbacks on the C stack */
    bool feeding, broken, dead;
    unsigned epoch; /* counts resets */
    struct gl_stream stream[GL_STREAMS_MAX];
};

static void enter(struct gl_link *l)
{
    l->depth++;
}

static void link_destroy(struct gl_link *l)
{
    for (size_t i = 0; i < GL_STREAMS_MAX; i++) {
        gl_queue_clear(&l->stream[i].tx, &l->pool);
        buf_fini(&l->stream[i].part);
    }
    gl_chunk_pool_fini(&l->pool);
    buf_fini(&l->frame);
    free(l);
}

static void leave(struct gl_link *l)
{
    if (--l->depth == 0 && l->dead)
        link_destroy(l);
}

static void stream_init(struct gl_stream *s)
{
    *s = (struct gl_stream) { .tx_credit = GL_WINDOW, .left = GL_WINDOW };
}

struct gl_link *gl_link_new(enum gl_role role, const struct gl_limits *limits,
                            const struct gl_link_ops *ops, void *ctx)
{
    struct gl_link *l = xnew(struct gl_link);

    assert(ops->message);
    l->role = role;
    l->limits = *limits;
    l->ops = ops;
    l->ctx = ctx;
    l->mid = NO_STREAM;
    l->out = NO_STREAM;
    buf_init(&l->frame, GL_FRAME_MAX);
    for (size_t i = 0; i < GL_STREAMS_MAX; i++)
        stream_init(&l->stream[i]);
    return l;
}

void gl_link_free(struct gl_link *l)
{
    if (!l || l->dead)
        return;
    l->dead = true;
    if (l->depth == 0)
        link_destroy(l);
}

void gl_link_set_phase(struct gl_link *l, enum gl_phase p)
{
    l->phase = p;
}

enum gl_phase gl_link_phase(const struct gl_link *l)
{
    return l->phase;
}

void gl_link_reset(struct gl_link *l)
{
    for (size_t i = 0; i < GL_STREAMS_MAX; i++) {
        struct gl_stream *s = &l->stream[i];
        gl_queue_clear(&s->tx, &l->pool);
        buf_fini(&s->part);
        stream_init(s);
    }
    buf_clear(&l->frame);
    l->header_len = 0;
    l->rx_got = 0;
    l->ready = 0;
    l->out = l->mid = NO_STREAM;
    l->out_len = 0;
    l->turn = 0;
    l->announced = false;
    l->broken = false;
    l->phase = GL_PHASE_HELLO;
    l->epoch++;
}

/* ---- sending ---- */

static void update_ready(struct gl_link *l, uint32_t stream)
{
    const struct gl_stream *s = &l->stream[stream];

    if (gl_queue_ready(&s->tx, s->tx_credit))
        l->ready |= UINT64_C(1) << stream;
    else
        l->ready &= ~(UINT64_C(1) << stream);
}

static void announce_output(struct gl_link *l)
{
    if (!l->ready || l->announced || !l->ops->output)
        return;
    l->announced = true;
    enter(l);
    l->ops->output(l->ctx);
    leave(l);
}

/* Bytes that may wait in the queue of a message of this class. */
static size_t queue_cap(const struct gl_link *l, uint32_t queue, enum gl_class class)
{
    if (queue == 0)
        return CONTROL_QUEUE_MAX;
    return class == GL_CLASS_BULK ? l->limits.queue_max : l->limits.queue_max + EXEMPT_RESERVE;
}

/* Urgent frames travel with control. Only a reply to a control request waits for state reports of
 * its stream that are still queued, so that "restarted" never arrives before "starting". */
static uint32_t queue_of(const struct gl_link *l, const struct gl_type_info *t, uint32_t stream)
{
    if (t->class == GL_CLASS_URGENT && l->stream[stream].tx.n_exempt == 0)
        return 0;
    return stream;
}

static void queue_credit(struct gl_link *l, uint32_t stream, uint32_t n)
{
    uint8_t bytes[4];
    struct gl_stream *s = &l->stream[stream];
    struct slice part;

    put_u32le(bytes, n);
    part = slice_of(bytes, sizeof(bytes));
    if (gl_queue_put(&l->stream[0].tx, &l->pool, GL_CREDIT, stream, &part, 1) < 0)
        return; /* out of memory: stays owed, the next grant tries again */
    s->left += n;
    s->owed -= n;
    update_ready(l, 0);
}

static void __attribute__((noreturn, cold))
misuse(const struct gl_link *l, enum gl_type type, uint32_t stream)
{
    fprintf(stderr, "BUG: gl_link_send: %s may not send %s (%u) on stream %u in phase %s\n",
            gl_role_name(l->role), gl_type_name(type), (unsigned)type, stream,
            gl_phase_name(l->phase));
    abort();
}

/* -EAGAIN when n payload bytes do not fit behind what waits; an empty queue takes anything. */
static int check_room(struct gl_link *l, uint32_t q, enum gl_class class, size_t n)
{
    size_t waiting = l->stream[q].tx.bytes, cap = queue_cap(l, q, class);

    if (!waiting || (waiting < cap && gl_queue_framed(n) <= cap - waiting))
        return 0;
    l->stream[q].want_writable = true;
    return -EAGAIN;
}

int gl_link_send(struct gl_link *l, enum gl_type type, uint32_t stream, const struct slice *parts,
                 size_t n)
{
    const struct gl_type_info *t = gl_type_info((unsigned)type);
    size_t size = 0;
    uint32_t q;
    int r;

    if (!t || !gl_type_legal(t, l->role, l->phase) || type == GL_CREDIT ||
        stream >= GL_STREAMS_MAX || (t->class == GL_CLASS_CONTROL) != (stream == 0))
        misuse(l, type, stream);
    for (size_t i = 0; i < n; i++)
        size += parts[i].n;
    if (size > (t->max ? t->max : l->limits.message_max))
        return -E2BIG;
    if (size < t->min)
        return -EINVAL;

    q = queue_of(l, t, stream);
    r = check_room(l, q, t->class, size);
    if (r == 0)
        r = gl_queue_put(&l->stream[q].tx, &l->pool, type, stream, parts, n);
    if (r < 0)
        return r;
    if (t->class != GL_CLASS_CONTROL && type != GL_KERNEL_CTL)
        l->stream[stream].closed = false; /* whoever speaks on a stream listens again */
    if (l->stream[q].tx.bytes > queue_cap(l, q, GL_CLASS_BULK) / 2)
        l->stream[q].want_writable = true;
    update_ready(l, q);
    announce_output(l);
    return 0;
}

/* Control first, then the kernel streams in turn; a frame once begun is finished first. */
static uint32_t next_stream(const struct gl_link *l)
{
    uint64_t later;

    if (l->mid != NO_STREAM)
        return l->mid;
    if (l->ready == 0)
        return NO_STREAM;
    if (l->ready & 1)
        return 0;
    later = l->ready & ~UINT64_C(0) << l->turn;
    return (uint32_t)__builtin_ctzll(later ? later : l->ready);
}

struct slice gl_link_output(struct gl_link *l)
{
    struct slice out = SLICE_NULL;

    l->out = next_stream(l);
    if (l->out == NO_STREAM)
        l->announced = false;
    else
        out = gl_queue_front(&l->stream[l->out].tx, l->stream[l->out].tx_credit, OUTPUT_STEP);
    l->out_len = (uint32_t)out.n;
    return out;
}

void gl_link_consumed(struct gl_link *l, size_t n)
{
    uint32_t k = l->out;
    struct gl_stream *s;

    assert(n <= l->out_len);
    if (n == 0)
        return;
    s = &l->stream[k];
    gl_queue_consume(&s->tx, &l->pool, n, &s->tx_credit);
    l->out = NO_STREAM;
    l->out_len = 0;
    l->mid = s->tx.frame_left ? k : NO_STREAM;
    l->turn = (k + 1) % GL_STREAMS_MAX;
    update_ready(l, k);
    if (!l->ready)
        l->announced = false;
    if (s->want_writable && s->tx.bytes <= queue_cap(l, k, GL_CLASS_BULK) / 2) {
        s->want_writable = false;
        if (!l->ops->writable)
            return;
        enter(l);
        l->ops->writable(l->ctx, k);
        leave(l);
    }
}

size_t gl_link_queued(const struct gl_link *l, uint32_t stream)
{
    return stream < GL_STREAMS_MAX ? l->stream[stream].tx.bytes : 0;
}

/* ---- window ---- */

/* n more bytes may be granted; never more than the peer has used. */
static void window_open(struct gl_link *l, uint32_t stream, size_t n)
{
    struct gl_stream *s = &l->stream[stream];
    uint32_t used = GL_WINDOW - s->left - s->owed;

    s->owed += n < used ? (uint32_t)n : used;
    if (s->owed >= GRANT_STEP)
        queue_credit(l, stream, s->owed);
}

void gl_link_grant(struct gl_link *l, uint32_t stream, size_t n)
{
    struct gl_stream *s;
    size_t debt;

    if (stream == 0 || stream >= GL_STREAMS_MAX)
        return;
    s = &l->stream[stream];
    debt = s->early < n ? s->early : n;
    s->early -= debt;
    window_open(l, stream, n - debt);
    announce_output(l);
}

/* A bulk message is being gathered: keep the peer going when the window runs out in its midst. */
static void grant_early(struct gl_link *l, uint32_t stream)
{
    struct gl_stream *s = &l->stream[stream];
    size_t n = s->part.len - s->part_granted;
    uint32_t used = GL_WINDOW - s->left - s->owed;

    if (s->left >= GL_WINDOW / 2 || n < GRANT_STEP)
        return;
    if (n > used)
        n = used;
    s->early += n;
    s->part_granted += n;
    window_open(l, stream, n);
}

void gl_link_close_stream(struct gl_link *l, uint32_t stream)
{
    struct gl_stream *s;
    bool in_frame;

    if (stream == 0 || stream >= GL_STREAMS_MAX)
        return;
    s = &l->stream[stream];
    gl_queue_prune(&s->tx, &l->pool);
    s->want_writable = false;
    if (l->out == stream) { /* the slice handed out is void */
        l->out = NO_STREAM;
        l->out_len = 0;
    }
    update_ready(l, stream);

    in_frame =
        l->header_len == GL_HEADER && l->rx.stream == stream && l->rx_info->class == GL_CLASS_BULK;
    if (in_frame || (s->partial && gl_type_info(s->part_type)->class == GL_CLASS_BULK)) {
        if (in_frame) {
            s->part_type = (enum gl_type)l->rx.type;
            buf_clear(&l->frame);
        }
        s->skip = true;
        s->partial = false;
        buf_fini(&s->part);
    }
    s->closed = true;
    s->early = s->part_granted = 0;
    window_open(l, stream, GL_WINDOW);
    announce_output(l);
}

/* ---- receiving ---- */

/* Who may send what when. */
static int check_legal(const struct gl_link *l, const struct gl_type_info *t, struct err *e)
{
    enum gl_role peer = l->role == GL_HOST ? GL_GUEST : GL_HOST;

    if (!(t->from & 1u << peer))
        return err_set(e, -EPROTO, "%s frame from the %s", t->name, gl_role_name(peer));
    if (!gl_type_legal(t, peer, l->phase))
        return err_set(e, -EPROTO, "%s frame in phase %s", t->name, gl_phase_name(l->phase));
    return 0;
}

/* Does the frame fit to the message in the making, and the message to its limits? */
static int check_message(const struct gl_link *l, const struct gl_header *h,
                         const struct gl_type_info *t, struct err *e)
{
    const struct gl_stream *s = &l->stream[h->stream];
    size_t max = t->max ? t->max : l->limits.message_max, so_far = 0;

    if (t->class != GL_CLASS_URGENT) {
        if ((s->partial || s->skip) && s->part_type != (enum gl_type)h->type)
            return err_set(e, -EPROTO, "%s frame inside a %s message on stream %u", t->name,
                           gl_type_name(s->part_type), h->stream);
        so_far = s->partial ? s->part.len : 0;
    }
    if (h->length > max || so_far > max - h->length)
        return err_set(e, -E2BIG, "%s message over %zu bytes", t->name, max);
    if (h->flags & GL_FLAG_MORE || (s->skip && t->class == GL_CLASS_BULK))
        return 0;
    if (so_far + h->length < t->min)
        return err_set(e, -EPROTO, "%s message of %zu bytes, at least %u", t->name,
                       so_far + h->length, t->min);
    return 0;
}

/* Take the frame off the window; decide whether its message is thrown away. */
static int charge_window(struct gl_link *l, const struct gl_header *h, struct err *e)
{
    struct gl_stream *s = &l->stream[h->stream];

    if (h->length > s->left)
        return err_set(e, -EPROTO, "%s frame of %u bytes on stream %u, window is %u",
                       gl_type_name((enum gl_type)h->type), h->length, h->stream, s->left);
    s->left -= h->length;
    if (s->closed && !s->partial && !s->skip) {
        s->skip = true;
        s->part_type = (enum gl_type)h->type;
    }
    return 0;
}

/* Judge a header against the state of link and stream. */
static int frame_begin(struct gl_link *l, const uint8_t *bytes, struct err *e)
{
    const struct gl_type_info *t;
    struct gl_header h;
    int r = gl_header_get(bytes, &h, &t, e);

    if (r == 0)
        r = check_legal(l, t, e);
    if (r == 0)
        r = check_message(l, &h, t, e);
    if (r == 0 && t->class == GL_CLASS_BULK)
        r = charge_window(l, &h, e);
    if (r < 0)
        return r;
    l->rx = h;
    l->rx_info = t;
    l->rx_got = 0;
    buf_clear(&l->frame);
    return 0;
}

static int take_credit(struct gl_link *l, uint32_t stream, struct slice payload, struct err *e)
{
    struct rd r = rd_of(payload);
    struct gl_stream *s = &l->stream[stream];
    uint32_t n = rd_u32le(&r);

    if (n == 0 || n > GL_WINDOW - s->tx_credit)
        return err_set(e, -EPROTO, "credit of %u on stream %u, %u are in use", n, stream,
                       GL_WINDOW - s->tx_credit);
    s->tx_credit += n;
    update_ready(l, stream);
    announce_output(l);
    return 0;
}

static void deliver(struct gl_link *l, struct slice payload)
{
    enum gl_type type = (enum gl_type)l->rx.type;
    uint32_t stream = l->rx.stream;
    struct gl_stream *s = &l->stream[stream];
    struct buf own = { 0 };

    if (type == GL_KERNEL_START)
        s->closed = false;
    if (s->partial && l->rx_info->class != GL_CLASS_URGENT) {
        /* The callee may close or reset the stream while it reads: take the bytes out of it. */
        own = s->part;
        payload = buf_slice(&own);
        s->part = (struct buf) { 0 };
        s->partial = false;
        s->part_granted = 0;
    }
    l->ops->message(l->ctx, type, stream, payload);
    if (own.cap <= KEEP_GATHERED && !s->part.data && !l->dead) {
        buf_clear(&own);
        s->part = own;
    } else {
        buf_fini(&own);
    }
}

/* The frame is complete; payload is set when it is a whole message outside `part`. */
static int frame_end(struct gl_link *l, struct slice payload, struct err *e)
{
    struct gl_stream *s = &l->stream[l->rx.stream];
    bool more = l->rx.flags & GL_FLAG_MORE, bulk = l->rx_info->class == GL_CLASS_BULK;

    l->header_len = 0;
    if (bulk && s->skip) {
        s->skip = more;
        window_open(l, l->rx.stream, l->rx.length);
        announce_output(l);
        return 0;
    }
    if (more) {
        if (bulk)
            grant_early(l, l->rx.stream);
        announce_output(l);
        return 0;
    }
    if (l->rx.type == GL_CREDIT)
        return take_credit(l, l->rx.stream, payload, e);
    deliver(l, payload);
    return 0;
}

/* Gather the next bytes of a frame that is not whole in the feed buffer or not a whole message. */
static int frame_gather(struct gl_link *l, struct slice bytes, bool in_part)
{
    struct gl_stream *s = &l->stream[l->rx.stream];

    if (!in_part)
        return buf_append_slice(&l->frame, bytes);
    if (!s->partial) {
        s->partial = true;
        s->part_type = (enum gl_type)l->rx.type;
        s->part_granted = 0;
        buf_clear(&s->part);
        s->part.max = l->rx_info->max ? l->rx_info->max : l->limits.message_max;
    }
    return buf_append_slice(&s->part, bytes);
}

/* Header bytes: 1 = complete and judged. */
static int feed_header(struct gl_link *l, struct slice *bytes, struct err *e)
{
    const uint8_t *h = bytes->p;
    size_t take = GL_HEADER;
    int r;

    if (l->header_len || bytes->n < GL_HEADER) {
        take = GL_HEADER - l->header_len;
        if (take > bytes->n)
            take = bytes->n;
        for (size_t i = 0; i < take; i++)
            l->header_bytes[l->header_len + i] = bytes->p[i];
        h = l->header_bytes;
        l->header_len += take;
    } else {
        l->header_len = GL_HEADER;
    }
    bytes->p += take;
    bytes->n -= take;
    if (l->header_len < GL_HEADER)
        return 0;
    r = frame_begin(l, h, e);
    return r < 0 ? r : 1;
}

/* One step: header and as much payload as there is; at most one message is delivered. */
static int feed_step(struct gl_link *l, struct slice *bytes, struct err *e)
{
    const struct gl_stream *s;
    struct slice chunk;
    uint32_t need;
    bool in_part;

    if (l->header_len < GL_HEADER) {
        int r = feed_header(l, bytes, e);
        if (r <= 0)
            return r;
    }
    s = &l->stream[l->rx.stream];
    need = l->rx.length - l->rx_got;
    chunk = slice_of(bytes->p, need < bytes->n ? need : bytes->n);
    bytes->p += chunk.n;
    bytes->n -= chunk.n;
    l->rx_got += (uint32_t)chunk.n;

    in_part = l->rx_info->class != GL_CLASS_URGENT && (s->partial || l->rx.flags & GL_FLAG_MORE);
    if (l->rx_info->class == GL_CLASS_BULK && s->skip) {
        ; /* thrown away */
    } else if (in_part || chunk.n < l->rx.length) {
        if (frame_gather(l, chunk, in_part) < 0)
            return err_set(e, -ENOMEM, "out of memory for a %s message", l->rx_info->name);
        chunk = buf_slice(&l->frame);
    }
    return l->rx_got < l->rx.length ? 0 : frame_end(l, chunk, e);
}

int gl_link_feed(struct gl_link *l, struct slice bytes, struct err *e)
{
    unsigned epoch = l->epoch;
    int r = 0;

    assert(!l->feeding);
    if (l->broken)
        return err_set(e, -EPROTO, "the link is broken since an earlier error");
    l->feeding = true;
    enter(l);
    /* After a reset from a callback the rest of the bytes belongs to the past. */
    while (bytes.n && r == 0 && !l->dead && l->epoch == epoch)
        r = feed_step(l, &bytes, e);
    l->feeding = false;
    if (r < 0)
        l->broken = true;
    leave(l);
    return r;
}
