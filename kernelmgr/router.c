/* One allocation per request: the struct and the bytes that answers need (ids, type, the raw header
 * as their parent). The content is not kept: it may be large, and no answer of ours needs it. */
#include "kernelmgr/router.h"
#include "common/mem.h"
#include "proto/jp_json.h"
#include <string.h>

static struct km_req *req_of(struct list_node *n)
{
    return list_entry(n, struct km_req, link);
}

void km_router_init(struct km_router *r)
{
    *r = (struct km_router) { .by_id = map_new() };
    list_init(&r->order);
}

void km_router_fini(struct km_router *r)
{
    LIST_FOR_EACH_SAFE (&r->order, n)
        km_router_remove(r, req_of(n));
    map_free(r->by_id);
    r->by_id = NULL;
}

struct km_req *km_router_find(const struct km_router *r, const char *msg_id)
{
    return *msg_id ? map_get(r->by_id, msg_id) : NULL;
}

static const char *put(char **at, const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = *at;
    memcpy(p, s, n);
    *at += n;
    return p;
}

/* The subshell that a request ends, "" for all other requests. */
static void ended_subshell(const struct jp_msg *m, char ret[JP_ID_MAX])
{
    struct slice id;
    *ret = 0;
    if (strcmp(m->msg_type, "delete_subshell_request") != 0)
        return;
    if (jp_json_find(m->parts.content, "subshell_id", &id) < 0 ||
        jp_json_string(id, ret, JP_ID_MAX) < 0)
        *ret = 0;
}

struct km_req *km_router_add(struct km_router *r, const struct jp_msg *m, uint32_t peer,
                             uint32_t gen)
{
    char reply[JP_ID_MAX], ends[JP_ID_MAX];
    ended_subshell(m, ends);
    size_t texts = strlen(m->msg_id) + strlen(m->msg_type) + strlen(m->session) +
                   strlen(m->subshell) + strlen(ends) + 5;
    struct km_req *q = xcalloc(1, sizeof(*q) + texts + m->parts.header.n);
    char *at = q->data;
    q->msg_id = put(&at, m->msg_id);
    q->msg_type = put(&at, m->msg_type);
    q->session = put(&at, m->session);
    q->subshell = put(&at, m->subshell);
    q->ends = put(&at, ends);
    memcpy(at, m->parts.header.p, m->parts.header.n);
    q->header = slice_of(at, m->parts.header.n);
    q->channel = m->parts.channel;
    q->peer = peer;
    q->gen = gen;
    q->wants_reply = jp_reply_type(m->msg_type, reply);
    q->tracked = !jp_type_untracked(m->msg_type);
    q->replies_due = q->wants_reply;
    q->idles_due = 1;
    list_push_back(&r->order, &q->link);
    map_put(r->by_id, q->msg_id, q);
    r->n++;
    return q;
}

void km_router_remove(struct km_router *r, struct km_req *q)
{
    if (q->half_ms)
        r->n_half--;
    if (q->busy && q->tracked)
        r->n_busy--;
    r->n--;
    list_remove(&q->link);
    map_del(r->by_id, q->msg_id);
    free(q);
}

static void note_half(struct km_router *r, struct km_req *q, uint64_t now_ms)
{
    if (q->half_ms)
        return;
    q->half_ms = now_ms ? now_ms : 1;
    r->n_half++;
}

/* Nothing owed: forget. One of the two owed: note since when, so that the other can be made up. */
static bool settle(struct km_router *r, struct km_req *q, uint64_t now_ms)
{
    if (!q->replies_due && !q->idles_due) {
        km_router_remove(r, q);
        return true;
    }
    if (!q->idles_due || (q->wants_reply && !q->replies_due))
        note_half(r, q, now_ms);
    return false;
}

bool km_router_replied(struct km_router *r, struct km_req *q, uint64_t now_ms)
{
    if (q->replies_due)
        q->replies_due--;
    return settle(r, q, now_ms);
}

bool km_router_idled(struct km_router *r, struct km_req *q, uint64_t now_ms)
{
    km_router_busy(r, q, false);
    if (q->idles_due)
        q->idles_due--;
    return settle(r, q, now_ms);
}

void km_router_busy(struct km_router *r, struct km_req *q, bool busy)
{
    if (busy)
        q->begun = true;
    if (q->busy == busy)
        return;
    q->busy = busy;
    if (q->tracked)
        r->n_busy += busy ? 1 : (size_t)-1;
}

void km_router_subshell_gone(struct km_router *r, const char *subshell, uint64_t now_ms)
{
    LIST_FOR_EACH (&r->order, n) {
        struct km_req *q = req_of(n);
        if (*subshell && !strcmp(q->subshell, subshell))
            note_half(r, q, now_ms);
    }
}

bool km_router_peer_waits(const struct km_router *r, uint32_t peer, enum jp_channel channel)
{
    LIST_FOR_EACH (&r->order, n) {
        const struct km_req *q = req_of(n);
        if (q->peer == peer && q->channel == channel && q->replies_due)
            return true;
    }
    return false;
}

struct km_req *km_router_running(const struct km_router *r)
{
    if (!r->n_busy)
        return NULL;
    LIST_FOR_EACH (&r->order, n) {
        struct km_req *q = req_of(n);
        if (q->busy && q->tracked)
            return q;
    }
    return NULL;
}
