/* Attached clients: cursors into the log on the way down, the outbox on the way up.
 *
 * Down: km_publish appends to the log and marks who must be woken; wakes run after the current
 * callback, so that a burst of frames costs one wake and streams can be joined. Up: messages go
 * straight to the guest link while it takes them, else they wait in two queues (control and stdin
 * first, so that an interrupted or asking kernel is reached past a pile of cells); order per
 * channel is kept. */
#include "common/id.h"
#include "kernelmgr/km_priv.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct km_peer *peer_of(struct list_node *n)
{
    return list_entry(n, struct km_peer, link);
}

/* ---- peers ---- */

static struct km_peer *peer_find(struct km_kernel *k, const char *session)
{
    LIST_FOR_EACH (&k->peers, n)
        if (!peer_of(n)->internal && !strcmp(peer_of(n)->session, session))
            return peer_of(n);
    return NULL;
}

static struct km_peer *peer_new(struct km_kernel *k, const char *session)
{
    size_t n = strlen(session) + 1;
    struct km_peer *p = xcalloc(1, sizeof(*p) + n);
    memcpy(p->session, session, n);
    p->id = ++k->next_peer;
    list_push_back(&k->peers, &p->link);
    km_log_add_cursor(&k->log, &p->cursor, p->id, true);
    return p;
}

void km_peer_free(struct km_kernel *k, struct km_peer *p)
{
    list_remove(&p->link);
    km_log_remove_cursor(&k->log, &p->cursor);
    free(p);
}

/* The session will not come back: a prompt of its own would block the kernel for ever (case-44). */
static void peer_expire(struct km_kernel *k, struct km_peer *p)
{
    bool prompts = false;
    LIST_FOR_EACH_SAFE (&k->inputs, n) {
        struct km_input *in = list_entry(n, struct km_input, link);
        if (in->peer != p->id)
            continue;
        prompts = true;
        list_remove(&in->link);
        jp_msg_unref(in->msg);
        free(in);
    }
    km_peer_free(k, p);
    if (prompts && km_state(k) == KM_K_READY) {
        log_info(&k->log_ctx, "interrupting a prompt whose client did not come back");
        km_kernel_ctl(k, ++k->next_ctl, "interrupt");
    }
}

void km_peers_expire(struct km_kernel *k)
{
    uint64_t now = loop_now_ms(k->m->loop);
    LIST_FOR_EACH_SAFE (&k->peers, n)
        if (!peer_of(n)->client && peer_of(n)->expires_ms <= now)
            peer_expire(k, peer_of(n));
}

uint64_t km_peers_next_expiry(const struct km_kernel *k)
{
    uint64_t at = UINT64_MAX;
    LIST_FOR_EACH (&k->peers, n)
        if (!peer_of(n)->client && peer_of(n)->expires_ms < at)
            at = peer_of(n)->expires_ms;
    return at;
}

/* Too many sessions are away: the one that left first goes. */
static void peers_limit(struct km_kernel *k)
{
    unsigned away = 0;
    struct km_peer *oldest = NULL;
    LIST_FOR_EACH (&k->peers, n) {
        struct km_peer *p = peer_of(n);
        if (p->client)
            continue;
        away++;
        if (!oldest || p->expires_ms < oldest->expires_ms)
            oldest = p;
    }
    if (away > KM_PEERS_AWAY_MAX)
        peer_expire(k, oldest);
}

/* ---- attach and detach ---- */

static void attach(struct km_client *c, struct km_kernel *k, struct km_peer *p,
                   const struct km_client_ops *ops)
{
    c->ops = ops;
    c->kernel = k;
    c->peer = p;
    c->cursor = 0;
    c->awake = c->throttled = false;
    c->link = c->wake_link = (struct list_node) { 0 };
    snprintf(c->session, sizeof(c->session), "%s", p->session);
    p->client = c;
    list_push_back(&k->clients, &c->link);
    if (km_log_has(&p->cursor)) {
        c->awake = true;
        list_push_back(&k->wakes, &c->wake_link);
        km_flush_soon(k);
    }
}

/* Prompts that the session saw before it left, and nobody answered, are asked again. */
static void inputs_again(struct km_kernel *k, struct km_peer *p)
{
    LIST_FOR_EACH (&k->inputs, n) {
        struct km_input *in = list_entry(n, struct km_input, link);
        if (in->peer == p->id && !km_log_pending(&p->cursor, in->seq))
            km_publish(k, in->msg, p->id, &in->seq);
    }
}

int km_client_attach(struct km_client *c, struct km_kernel *k, const char *session,
                     const struct km_client_ops *ops)
{
    char made[ID_UUID_LEN + 1];
    if (!k || km_state(k) == KM_K_CLOSED)
        return -ESRCH;
    if (session && strlen(session) >= JP_ID_MAX)
        return -E2BIG;
    if (!session || !*session) {
        id_uuid4(made);
        session = made;
    }
    struct km_peer *p = peer_find(k, session);
    if (p && p->client) {
        struct km_client *old = p->client;
        km_client_detach(old);
        old->ops->closed(old, KM_CLOSE_REPLACED,
                         "another client attached with the same session id");
        if (km_state(k) == KM_K_CLOSED)
            return -ESRCH;
        p = peer_find(k, session);
    }
    bool back = p != NULL;
    if (!back)
        p = peer_new(k, session);
    km_log_set_attached(&k->log, &p->cursor, true);
    attach(c, k, p, ops);
    if (back)
        inputs_again(k, p);
    return 0;
}

void km_client_attach_internal(struct km_client *c, struct km_kernel *k, const char *session,
                               const struct km_client_ops *ops)
{
    struct km_peer *p = peer_new(k, session);
    p->internal = true;
    attach(c, k, p, ops);
}

void km_client_detach(struct km_client *c)
{
    struct km_kernel *k = c->kernel;
    struct km_peer *p = c->peer;
    if (!k)
        return;
    list_remove(&c->link);
    list_remove(&c->wake_link);
    c->kernel = NULL;
    c->peer = NULL;
    c->awake = c->throttled = false;
    p->client = NULL;
    if (p->internal) {
        km_peer_free(k, p);
    } else {
        p->expires_ms = loop_now_ms(k->m->loop) + k->m->cfg.replay_ttl_ms;
        km_log_set_attached(&k->log, &p->cursor, false);
        peers_limit(k);
        km_kernel_arm(k);
    }
    km_guest_grant(k);
}

/* ---- down ---- */

static bool has_room(const struct km_kernel *k)
{
    return k->outbox_bytes <= KM_OUTBOX_MAX / 2 && k->outbox_count <= KM_OUTBOX_COUNT_MAX / 2 &&
           k->router.n <= KM_REQS_MAX / 2;
}

static struct km_client *next_throttled(struct km_kernel *k)
{
    LIST_FOR_EACH (&k->clients, n) {
        struct km_client *c = list_entry(n, struct km_client, link);
        if (c->throttled && c->pass != k->pass)
            return c;
    }
    return NULL;
}

/* Clients that were refused may submit again. Each gets one chance in a pass: what it kept may be
 * too large for the room there is, so that it is refused at once. */
static void unthrottle(struct km_kernel *k)
{
    struct km_client *c;
    k->pass++;
    while (has_room(k) && (c = next_throttled(k))) {
        c->pass = k->pass;
        c->throttled = false;
        c->ops->throttle(c, false);
    }
}

static void send_waiting(struct km_kernel *k);

/* Wakes, and clients that may submit again. Each step may change the lists: start over from their
 * heads. */
static void flush(void *ctx)
{
    struct km_kernel *k = ctx;
    struct list_node *n;
    k->flush_queued = false;
    send_waiting(k);
    while ((n = list_first(&k->wakes))) {
        struct km_client *c = list_entry(n, struct km_client, wake_link);
        list_remove(&c->wake_link);
        if (km_log_has(&c->peer->cursor))
            c->ops->wake(c);
        else
            c->awake = false;
    }
    unthrottle(k);
}

void km_flush_soon(struct km_kernel *k)
{
    if (k->flush_queued || km_state(k) == KM_K_CLOSED)
        return;
    k->flush_queued = true;
    loop_defer(k->m->loop, flush, k);
}

void km_publish(struct km_kernel *k, struct jp_msg *m, uint32_t peer, uint64_t *ret_seq)
{
    bool any = false;
    uint64_t joined = k->log.total_joined, lost = k->log.total_lost;
    km_log_append(&k->log, m, peer, ret_seq);
    metric_add(k->m->met.messages, 1);
    metric_add(k->m->met.joined, (double)(k->log.total_joined - joined));
    metric_add(k->m->met.lost, (double)(k->log.total_lost - lost));
    LIST_FOR_EACH (&k->clients, n) {
        struct km_client *c = list_entry(n, struct km_client, link);
        if (c->awake || !km_log_has(&c->peer->cursor))
            continue;
        c->awake = true;
        list_push_back(&k->wakes, &c->wake_link);
        any = true;
    }
    if (any)
        km_flush_soon(k);
}

struct jp_msg *km_client_next(struct km_client *c)
{
    struct km_kernel *k = c->kernel;
    if (!k)
        return NULL;
    struct km_cursor *cur = &c->peer->cursor;
    if (cur->gap_msgs) {
        struct jp_msg *gap = km_synth_gap(k, cur);
        if (gap)
            return gap;
    }
    struct jp_msg *m = km_log_pull(&k->log, cur, &c->cursor);
    if (!m) {
        c->awake = false;
        list_remove(&c->wake_link);
    }
    km_guest_grant(k);
    return m;
}

size_t km_client_lag(const struct km_client *c)
{
    return c->peer ? c->peer->cursor.lag : 0;
}

/* ---- up ---- */

static int send_now(struct km_kernel *k, const struct jp_msg *m)
{
    uint8_t small[4 + 4 * 12];
    struct slice few[5 + 8];
    size_t n = 4 + m->parts.n_buffers, head = 4 + 4 * n;
    CLEANUP(freep) uint8_t *big = head > sizeof(small) ? xmalloc(head) : NULL;
    CLEANUP(freep) struct slice *many = n + 1 > 13 ? xmalloc((n + 1) * sizeof(*many)) : NULL;
    uint8_t *table = big ? big : small;
    struct slice *parts = many ? many : few;
    jp_body_head(m, table);
    parts[0] = slice_of(table, head);
    parts[1] = m->parts.header;
    parts[2] = m->parts.parent;
    parts[3] = m->parts.metadata;
    parts[4] = m->parts.content;
    for (size_t i = 0; i < m->parts.n_buffers; i++)
        parts[5 + i] = m->parts.buffers[i];
    return vm_send(k->box->vm, GL_KERNEL_MSG, k->stream, parts, n + 1);
}

/* The link will never take this message. */
static void refuse_unsendable(struct km_kernel *k, const struct jp_msg *m, int r)
{
    char text[200];
    struct km_req *q = km_router_find(&k->router, m->msg_id);
    snprintf(text, sizeof(text), "the message of %zu bytes could not be sent to the kernel: %s",
             m->size, r == -E2BIG ? "it is larger than the sandbox link allows" : strerror(-r));
    log_warn(&k->log_ctx, "%s refused: %s", m->msg_type, text);
    if (q)
        km_synth_answer(k, q, "MessageRefusedError", text);
}

static bool flush_queue(struct km_kernel *k, struct list *queue)
{
    struct list_node *n;
    while ((n = list_first(queue))) {
        struct km_out *o = list_entry(n, struct km_out, link);
        int r = send_now(k, o->msg);
        if (r == -EAGAIN || r == -ENOTCONN)
            return false; /* writable() or down() will come */
        list_remove(&o->link);
        k->outbox_bytes -= o->msg->size;
        k->outbox_count--;
        if (r < 0)
            refuse_unsendable(k, o->msg, r);
        jp_msg_unref(o->msg);
        free(o);
    }
    return true;
}

static void send_waiting(struct km_kernel *k)
{
    if (km_state(k) != KM_K_READY || !k->box)
        return;
    if (flush_queue(k, &k->urgent))
        flush_queue(k, &k->outbox);
}

void km_flush_out(struct km_kernel *k)
{
    send_waiting(k);
    km_unthrottle_soon(k);
}

void km_unthrottle_soon(struct km_kernel *k)
{
    if (!has_room(k))
        return;
    LIST_FOR_EACH (&k->clients, n)
        if (list_entry(n, struct km_client, link)->throttled) {
            km_flush_soon(k);
            return;
        }
}

static void queue_out(struct km_kernel *k, struct jp_msg *m, struct list *queue)
{
    struct km_out *o = xnew(struct km_out);
    o->msg = jp_msg_ref(m);
    o->gen = k->gen;
    k->outbox_bytes += m->size;
    k->outbox_count++;
    list_push_back(queue, &o->link);
}

static void out_drop_from(struct km_kernel *k, struct list *queue, uint32_t before_gen)
{
    LIST_FOR_EACH_SAFE (queue, n) {
        struct km_out *o = list_entry(n, struct km_out, link);
        if (o->gen >= before_gen)
            continue;
        list_remove(&o->link);
        k->outbox_bytes -= o->msg->size;
        k->outbox_count--;
        jp_msg_unref(o->msg);
        free(o);
    }
}

void km_out_drop(struct km_kernel *k, uint32_t before_gen)
{
    out_drop_from(k, &k->urgent, before_gen);
    out_drop_from(k, &k->outbox, before_gen);
}

static void forward(struct km_kernel *k, struct jp_msg *m)
{
    bool urgent = m->parts.channel != JP_SHELL;
    struct list *queue = urgent ? &k->urgent : &k->outbox;
    bool behind = !list_empty(&k->urgent) || (!urgent && !list_empty(&k->outbox));
    if (km_state(k) == KM_K_READY && !behind) {
        int r = send_now(k, m);
        if (r == 0)
            return;
        if (r != -EAGAIN && r != -ENOTCONN) {
            refuse_unsendable(k, m, r);
            return;
        }
    }
    queue_out(k, m, queue);
}

static struct km_req *remember(struct km_client *c, const struct jp_msg *m)
{
    struct km_kernel *k = c->kernel;
    struct km_req *q = km_router_add(&k->router, m, c->peer->id, k->gen);
    q->submitted_us = loop_now_us(k->m->loop);
    return q;
}

/* kernel_info while a cell runs: from the cache, unless requests of this client are ahead of it on
 * the channel. The idle that ends it would make a front end believe that the kernel is idle, so the
 * truth follows. */
static bool answer_info_from_cache(struct km_client *c, const struct jp_msg *m)
{
    struct km_kernel *k = c->kernel;
    struct slice parent = m->parts.header;
    uint32_t id = c->peer->id;
    if (!k->info || strcmp(k->execution_state, "busy") != 0 || km_state(k) != KM_K_READY)
        return false;
    if (km_router_peer_waits(&k->router, id, m->parts.channel))
        return false;
    km_synth_status(k, "busy", parent, id);
    km_synth(k, m->parts.channel, "kernel_info_reply", parent, k->info, id);
    km_synth_status(k, "idle", parent, id);
    const struct km_req *running = km_router_running(&k->router);
    km_synth_status(k, "busy", running ? running->header : SLICE_NULL, id);
    return true;
}

/* A client asks on the wire what REST has calls for. */
static void submit_interrupt(struct km_client *c, struct jp_msg *m)
{
    remember(c, m);
    km_kernel_interrupt_for(c->kernel, m->msg_id, NULL, NULL, NULL);
}

static void submit_shutdown(struct km_client *c, struct jp_msg *m)
{
    struct km_kernel *k = c->kernel;
    struct slice v;
    bool restart = jp_json_find(m->parts.content, "restart", &v) == 0 && slice_eq_str(v, "true");
    const char *content = restart ? "{\"status\": \"ok\", \"restart\": true}"
                                  : "{\"status\": \"ok\", \"restart\": false}";
    km_synth_status(k, "busy", m->parts.header, 0);
    km_synth(k, m->parts.channel, "shutdown_reply", m->parts.header, content, c->peer->id);
    km_synth(k, JP_IOPUB, "shutdown_reply", m->parts.header, content, 0);
    km_synth_status(k, "idle", m->parts.header, 0);
    if (restart)
        km_kernel_restart(k, NULL, NULL, NULL);
    else
        km_kernel_farewell(k, "shut down by a client");
}

/* Answers to a prompt are taken from the session that was asked, once. */
static void submit_stdin(struct km_client *c, struct jp_msg *m)
{
    struct km_kernel *k = c->kernel;
    LIST_FOR_EACH_SAFE (&k->inputs, n) {
        struct km_input *in = list_entry(n, struct km_input, link);
        if (in->peer != c->peer->id)
            continue;
        if (*m->parent_id && strcmp(m->parent_id, in->msg->msg_id) != 0 &&
            strcmp(m->parent_id, in->msg->parent_id) != 0 && in->link.next != &k->inputs.head)
            continue; /* several prompts are open: the right one */
        list_remove(&in->link);
        jp_msg_unref(in->msg);
        free(in);
        forward(k, m);
        return;
    }
    log_debug(&k->log_ctx, "a %s that nobody asked this client for was dropped", m->msg_type);
}

/* Length of JSON string text in UTF-16 units, the larger of the two ways to count (protocol 5.1,
 * 5.2). */
static long long json_text_units(struct slice s)
{
    long long n = 0;
    for (size_t i = 1; i + 1 < s.n; i++) {
        uint8_t c = s.p[i];
        if (c == '\\')
            i += s.p[i + 1] == 'u' ? 5 : 1;
        n += c >= 0xf0 ? 2 : (c & 0xc0) != 0x80;
    }
    return n;
}

/* Some kernels answer nothing at all to a cursor that is not in the code (case-86). */
static bool refuse_cursor(struct km_client *c, const struct jp_msg *m)
{
    struct slice v, code;
    char number[24], text[120], *end;
    if (strcmp(m->msg_type, "complete_request") != 0 && strcmp(m->msg_type, "inspect_request") != 0)
        return false;
    if (jp_json_find(m->parts.content, "cursor_pos", &v) < 0 || v.n >= sizeof(number) ||
        jp_json_find(m->parts.content, "code", &code) < 0 || code.n < 2 || code.p[0] != '"')
        return false;
    snprintf(number, sizeof(number), "%.*s", SLICE_FMT(v));
    long long at = strtoll(number, &end, 10), length = json_text_units(code);
    if (*end || (at >= 0 && at <= length))
        return false;
    snprintf(text, sizeof(text), "cursor_pos %lld is outside of the code (0 to %lld)", at, length);
    km_synth_refuse(c->kernel, m, c->peer->id, "ValueError", text);
    return true;
}

/* Shell and control. */
static void submit_request(struct km_client *c, struct jp_msg *m)
{
    struct km_kernel *k = c->kernel;
    bool control = m->parts.channel == JP_CONTROL;
    if (!strcmp(m->msg_type, "shutdown_request")) {
        submit_shutdown(c, m);
        return;
    }
    if (!strcmp(m->msg_type, "kernel_info_request") && answer_info_from_cache(c, m))
        return;
    if (!*m->msg_id) {
        forward(k, m);
        return;
    }
    if (refuse_cursor(c, m))
        return;
    struct km_req *q = km_router_find(&k->router, m->msg_id);
    if (q && (q->peer != c->peer->id || q->channel != m->parts.channel)) {
        km_synth_refuse(k, m, c->peer->id, "DuplicateIdError",
                        "a request with this msg_id is in flight already");
        return;
    }
    if (control && !strcmp(m->msg_type, "interrupt_request")) {
        if (!q)
            submit_interrupt(c, m);
        return;
    }
    if (q) { /* sent twice on purpose: both run, both are answered */
        q->replies_due += q->wants_reply;
        q->idles_due++;
    } else {
        remember(c, m);
    }
    forward(k, m);
}

static bool outbox_full(const struct km_kernel *k, const struct jp_msg *m)
{
    if (!k->outbox_count)
        return k->router.n >= KM_REQS_MAX;
    return k->outbox_bytes + m->size > KM_OUTBOX_MAX || k->outbox_count >= KM_OUTBOX_COUNT_MAX ||
           k->router.n >= KM_REQS_MAX;
}

int km_client_submit(struct km_client *c, struct jp_msg *m)
{
    struct km_kernel *k = c->kernel;
    if (!k)
        return -ESRCH;
    if (m->parts.header.n > KM_HEADER_MAX) {
        km_synth_refuse(k, m, c->peer->id, "MessageRefusedError",
                        "the header of the message is longer than 64 KiB");
        return 0;
    }
    if (km_state(k) == KM_K_DEAD && strcmp(m->msg_type, "shutdown_request") != 0) {
        char text[400];
        snprintf(text, sizeof(text),
                 "the kernel is dead (%s); restart it to go on, its variables are lost",
                 k->reason ? k->reason : "no reason known");
        km_synth_refuse(k, m, c->peer->id, "DeadKernelError", text);
        return -ESRCH;
    }
    if (outbox_full(k, m)) {
        if (!c->throttled) {
            c->throttled = true;
            c->ops->throttle(c, true);
        }
        return -EAGAIN;
    }
    switch (m->parts.channel) {
    case JP_SHELL:
    case JP_CONTROL:
        submit_request(c, m);
        return 0;
    case JP_STDIN:
        submit_stdin(c, m);
        return 0;
    case JP_IOPUB:
        break; /* clients have nothing to say there */
    }
    return 0;
}

void km_inputs_drop(struct km_kernel *k, const char *parent_id)
{
    LIST_FOR_EACH_SAFE (&k->inputs, n) {
        struct km_input *in = list_entry(n, struct km_input, link);
        if (parent_id && strcmp(in->msg->parent_id, parent_id) != 0)
            continue;
        list_remove(&in->link);
        jp_msg_unref(in->msg);
        free(in);
    }
}
