/* The clients, and the promises that they hold kernelmgr/ to: numbered outputs come once, in order,
 * and holes are announced; a request gets one reply, on its channel, in order; one idle ends it. */
#include "tests/sim/sim.h"
#include <errno.h>
#include <string.h>

static struct sim_client *of(struct km_client *c)
{
    return (struct sim_client *)(void *)c;
}

static void numbers_of(struct sim *s, struct sim_session *ss, const struct jp_msg *m)
{
    struct slice rest = m->parts.content;
    const uint8_t *hash;
    while ((hash = memchr(rest.p, '#', rest.n))) {
        uint64_t v = 0;
        const uint8_t *p = hash + 1, *end = rest.p + rest.n;
        while (p < end && *p >= '0' && *p <= '9')
            v = v * 10 + (uint64_t)(*p++ - '0');
        rest = slice_of(p, (size_t)(end - p));
        uint64_t last = ss->number ? ss->number : ss->from;
        SIM_CHECK(s, v > last, "session %s: output %llu came again or late, %llu was seen",
                  ss->name, (unsigned long long)v, (unsigned long long)last);
        uint64_t missing = v - last - 1;
        SIM_CHECK(s, missing <= ss->allowed, "session %s: %llu outputs lost in silence before %llu",
                  ss->name, (unsigned long long)missing, (unsigned long long)v);
        ss->allowed -= missing;
        ss->number = v;
    }
}

static bool gap_of(struct sim *s, struct sim_session *ss, const struct jp_msg *m)
{
    static const char mark[] = "[cellvisor] ";
    struct slice content = m->parts.content;
    const char *p = memmem(content.p, content.n, mark, strlen(mark));
    if (!p || !memmem(content.p, content.n, "are missing here", 16))
        return false;
    SIM_CHECK(s, ss->behind, "session %s lost something although it was attached all the time",
              ss->name);
    ss->allowed += strtoull(p + strlen(mark), NULL, 10);
    s->gaps++;
    return true;
}

static void reply_of(struct sim *s, unsigned session, const struct jp_msg *m)
{
    struct sim_req *q = map_get(s->by_id, m->parent_id);
    struct sim_session *ss = &s->sessions[session];
    SIM_CHECK(s, q != NULL, "a reply to nothing: %s", m->parent_id);
    SIM_CHECK(s, q->session == session, "%s answered to session %u, asked by %u", q->id, session,
              q->session);
    SIM_CHECK(s, q->channel == m->parts.channel, "%s answered on another channel", q->id);
    q->replies++;
    s->answered++;
    SIM_CHECK(s, q->replies == 1, "%s answered %u times", q->id, q->replies);
    if (q->channel == JP_SHELL && !q->lost) {
        SIM_CHECK(s, q->order > ss->order, "%s (%s) answered after r%llu: %.*s", q->id, m->msg_type,
                  (unsigned long long)ss->order - 1, SLICE_FMT(m->parts.content));
        ss->order = q->order;
    }
}

static void see(struct sim *s, struct sim_client *c, const struct jp_msg *m)
{
    struct sim_session *ss = &s->sessions[c->session];
    char status[16];
    s->pulled++;
    if (m->parts.channel == JP_SHELL || m->parts.channel == JP_CONTROL) {
        reply_of(s, c->session, m);
        return;
    }
    if (m->parts.channel == JP_STDIN || gap_of(s, ss, m))
        return;
    struct sim_req *q = map_get(s->by_id, m->parent_id);
    jp_status_of(m, status);
    if (q && q->session == c->session && !strcmp(status, "idle")) {
        q->idles++;
        SIM_CHECK(s, q->idles == 1, "%s got %u idles", q->id, q->idles);
    }
    if (!strcmp(m->msg_type, "stream") || !strcmp(m->msg_type, "display_data")) {
        SIM_CHECK(s, !q || q->session != c->session || !q->idles, "output of %s after its idle",
                  m->parent_id);
        numbers_of(s, ss, m);
    }
}

void sim_client_pull(struct sim *s, struct sim_client *c, unsigned max)
{
    struct jp_msg *m;
    while (max--) {
        m = km_client_next(&c->c);
        if (!m) {
            s->sessions[c->session].behind = false;
            return;
        }
        see(s, c, m);
        jp_msg_unref(m);
    }
}

static void on_wake(struct km_client *c)
{
    if (!of(c)->lazy)
        sim_client_pull(of(c)->sim, of(c), UINT32_MAX);
}

static void left(struct sim *s, struct sim_client *c)
{
    c->attached = c->throttled = false;
    s->sessions[c->session].attached = false;
    s->sessions[c->session].behind = true;
    s->sessions[c->session].left_ms = loop_now_ms(s->loop);
}

static void on_closed(struct km_client *c, enum km_close_why why, const char *text)
{
    (void)why;
    (void)text;
    left(of(c)->sim, of(c));
}

static void on_throttle(struct km_client *c, bool on)
{
    SIM_CHECK(of(c)->sim, of(c)->throttled != on, "throttle(%d) twice", on);
    of(c)->throttled = on;
    of(c)->sim->throttled += on;
}

static const struct km_client_ops ops = { on_wake, on_closed, on_throttle };

void sim_client_attach(struct sim *s, struct sim_client *c, struct km_kernel *k, unsigned session)
{
    struct sim_session *ss = &s->sessions[session];
    bool same = !strcmp(ss->kernel, k->id);
    bool kept =
        same && (ss->attached || loop_now_ms(s->loop) - ss->left_ms < k->m->cfg.replay_ttl_ms);
    /* Sessions are per kernel: this one moves only when its old kernel cannot know it any more. */
    if (!same && *ss->kernel && km_kernel_find(s->m, NULL, ss->kernel) &&
        (ss->attached || loop_now_ms(s->loop) - ss->left_ms <= k->m->cfg.replay_ttl_ms))
        return;
    snprintf(ss->kernel, sizeof(ss->kernel), "%s", k->id);
    int r = km_client_attach(&c->c, k, ss->name, &ops);
    SIM_CHECK(s, r == 0, "attach failed: %d", r);
    if (!kept) {
        ss->number = ss->allowed = ss->order = 0;
        ss->from = *sim_numbers(s, k->id);
    }
    c->session = session;
    c->attached = true;
    c->lazy = sim_chance(&s->rng, 40);
    ss->attached = true;
}

void sim_client_detach(struct sim *s, struct sim_client *c)
{
    if (!c->attached)
        return;
    km_client_detach(&c->c);
    left(s, c);
}

void sim_client_submit(struct sim *s, struct sim_client *c)
{
    static const struct {
        enum jp_channel channel;
        const char *type;
        unsigned weight;
    } kinds[] = { { JP_SHELL, "execute_request", 50 },
                  { JP_SHELL, "complete_request", 15 },
                  { JP_SHELL, "comm_msg", 10 },
                  { JP_SHELL, "kernel_info_request", 10 },
                  { JP_CONTROL, "usage_request", 6 },
                  { JP_CONTROL, "interrupt_request", 4 },
                  { JP_CONTROL, "kernel_info_request", 5 } };
    unsigned dice = sim_below(&s->rng, 100), kind = 0;
    char reply[JP_ID_MAX];
    while (dice >= kinds[kind].weight)
        dice -= kinds[kind++].weight;
    if (s->n_reqs == SIM_REQS_MAX)
        return;
    struct sim_req *q = &s->reqs[s->n_reqs];
    *q = (struct sim_req) { .session = c->session,
                            .channel = kinds[kind].channel,
                            .order = s->n_reqs + 1 };
    snprintf(q->id, sizeof(q->id), "r%zu", s->n_reqs);
    snprintf(q->kernel, sizeof(q->kernel), "%s", c->c.kernel->id);
    q->wants_reply = jp_reply_type(kinds[kind].type, reply);
    struct jp_msg *m = fake_request(q->channel, kinds[kind].type, "front-end", q->id, "{}");
    map_put(s->by_id, q->id, q);
    int r = km_client_submit(&c->c, m);
    jp_msg_unref(m);
    SIM_CHECK(s, r == 0 || r == -EAGAIN || r == -ESRCH, "submit gave %d", r);
    if (r == -EAGAIN) {
        map_del(s->by_id, q->id);
        SIM_CHECK(s, c->throttled, "refused without throttle");
        return;
    }
    q->refused = r == -ESRCH;
    s->n_reqs++;
}
