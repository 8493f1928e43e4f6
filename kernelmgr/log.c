/* The log is a list of entries; cursors point into it. Appending and pulling cost O(cursors), never
 * O(entries), except when limits force a sweep, which frees at least an eighth of the limit each
 * time.
 *
 * Invariants: seq rises along the list; cursor->at is NULL or an entry of the list; cursor->lag is
 * the cost of the entries from `at` on that are meant for the cursor; the first entry is held by
 * somebody (else it is dropped). */
#include "kernelmgr/log.h"
#include "common/mem.h"
#include "proto/jp_json.h"
#include <string.h>

/* A parent header that is longer is not kept for gap notices. */
#define GAP_PARENT_MAX 4096u

void km_log_init(struct km_log *l, size_t bytes_max, size_t replay_max, size_t coalesce_max)
{
    *l = (struct km_log) { .next_seq = 1,
                           .bytes_max = bytes_max,
                           .replay_max = replay_max < bytes_max ? replay_max : bytes_max,
                           .coalesce_max = coalesce_max };
    list_init(&l->entries);
    list_init(&l->cursors);
}

static struct km_entry *entry_of(struct list_node *n)
{
    return list_entry(n, struct km_entry, link);
}

static struct km_cursor *cursor_of(struct list_node *n)
{
    return list_entry(n, struct km_cursor, link);
}

static struct km_entry *entry_next(struct km_log *l, struct km_entry *e)
{
    return e->link.next == &l->entries.head ? NULL : entry_of(e->link.next);
}

static bool entry_for(const struct km_entry *e, const struct km_cursor *c)
{
    return !e->peer || e->peer == c->peer;
}

/* Has the cursor still to pass this entry? */
static bool entry_ahead(const struct km_entry *e, const struct km_cursor *c)
{
    return c->at && c->at->seq <= e->seq;
}

/* ---- losing entries ---- */

static void cursor_count_gap(struct km_cursor *c, const struct km_entry *e)
{
    struct slice parent = e->msg->parts.parent;
    c->gap_msgs += 1 + e->joined;
    c->gap_bytes += e->msg->size + e->tail.len;
    c->lag -= e->cost;
    if (parent.n > GAP_PARENT_MAX || !parent.n)
        return;
    if (c->gap_parent && slice_eq(parent, slice_str(c->gap_parent)))
        return;
    free(c->gap_parent);
    c->gap_parent = slice_dup(parent);
}

/* Take an entry out; cursors that had it ahead of them count it as lost. */
static void entry_drop(struct km_log *l, struct km_entry *e)
{
    bool lost = false;
    LIST_FOR_EACH (&l->cursors, n) {
        struct km_cursor *c = cursor_of(n);
        if (!entry_ahead(e, c))
            continue;
        if (entry_for(e, c)) {
            cursor_count_gap(c, e);
            lost = true;
        }
        if (c->at == e)
            c->at = entry_next(l, e);
    }
    if (lost)
        l->total_lost += 1 + e->joined;
    l->bytes -= e->cost;
    l->count--;
    list_remove(&e->link);
    jp_msg_unref(e->msg);
    buf_fini(&e->tail);
    free(e);
}

void km_log_fini(struct km_log *l)
{
    LIST_FOR_EACH_SAFE (&l->entries, n)
        entry_drop(l, entry_of(n));
}

/* Who still needs the entry: 2 an attached cursor, 1 only absent ones, 0 nobody. */
static int entry_holders(const struct km_log *l, const struct km_entry *e)
{
    int holders = 0;
    LIST_FOR_EACH (&l->cursors, n) {
        const struct km_cursor *c = cursor_of(n);
        if (!entry_ahead(e, c))
            continue;
        /* An attached cursor holds all behind its position, so that the walk may end there. */
        if (c->attached)
            return 2;
        if (entry_for(e, c))
            holders = 1;
    }
    return holders;
}

/* Drop from the old end, at most down to `target` bytes: entries without holders, and with `force`
 * >= 1 those held by absent cursors only, >= 2 by anybody. Entries marked keep only with `keeps`.
 * Newest entry stays. */
static void sweep(struct km_log *l, size_t target, int force, bool keeps)
{
    LIST_FOR_EACH_SAFE (&l->entries, n) {
        struct km_entry *e = entry_of(n);
        if (l->bytes <= target || e->link.next == &l->entries.head)
            return;
        int holders = entry_holders(l, e);
        if (holders > force)
            return;
        if (!holders || keeps || !e->keep)
            entry_drop(l, e);
    }
}

/* Entries that nobody needs any more go at once; the walk stops at the first that somebody does. */
static void drop_unheld(struct km_log *l)
{
    LIST_FOR_EACH_SAFE (&l->entries, n) {
        struct km_entry *e = entry_of(n);
        if (entry_holders(l, e))
            return;
        entry_drop(l, e);
    }
}

static size_t attached_lag(const struct km_log *l)
{
    size_t lag = 0;
    LIST_FOR_EACH (&l->cursors, n) {
        const struct km_cursor *c = cursor_of(n);
        if (c->attached && c->lag > lag)
            lag = c->lag;
    }
    return lag;
}

static void trim(struct km_log *l)
{
    drop_unheld(l);
    /* What the slowest attached cursor still needs does not count against the absent ones. In steps
     * of an eighth, so that a flood does not walk past the kept entries for each message. */
    size_t live = attached_lag(l);
    if (l->bytes - live > l->replay_max) {
        size_t target = live + l->replay_max - l->replay_max / 8;
        sweep(l, target, 1, false);
        if (l->bytes - live > l->replay_max)
            sweep(l, target, 1, true);
    }
    /* One message larger than half the log may stand over the cap: dropping others for it would be
     * a loss that back-pressure cannot prevent (it arrived as one piece). */
    size_t hard = l->bytes_max;
    if (!list_empty(&l->entries)) {
        const struct km_entry *last = entry_of(l->entries.head.prev);
        if (last->cost > l->bytes_max / 8)
            hard += last->cost;
    }
    if (l->bytes > hard) {
        sweep(l, hard - hard / 8, 2, false);
        if (l->bytes > hard)
            sweep(l, hard - hard / 8, 2, true);
    }
}

/* ---- joining streams ---- */

/* A stream message that may be joined: no buffers, content {"name":..,"text":"..."}. text without
 * quotes. */
static bool stream_parts(const struct jp_msg *m, struct slice *ret_name, struct slice *ret_text)
{
    if (m->parts.channel != JP_IOPUB || strcmp(m->msg_type, "stream") != 0 || m->parts.n_buffers)
        return false;
    if (m->parts.metadata.n > 2)
        return false;
    if (jp_json_find(m->parts.content, "name", ret_name) < 0 ||
        jp_json_find(m->parts.content, "text", ret_text) < 0)
        return false;
    if (ret_text->n < 2 || ret_text->p[0] != '"')
        return false;
    *ret_text = slice_of(ret_text->p + 1, ret_text->n - 2);
    return true;
}

/* Splice m's text behind the last entry when nobody has seen that yet. */
static bool join_last(struct km_log *l, const struct jp_msg *m)
{
    struct slice name, text, name0, text0;
    if (list_empty(&l->entries))
        return false;
    struct km_entry *e = entry_of(l->entries.head.prev);
    if (e->sealed || !e->stream || e->peer || !stream_parts(m, &name, &text))
        return false;
    if (e->msg->parts.content.n + e->tail.len + text.n > l->coalesce_max)
        return false;
    if (strcmp(e->msg->parent_id, m->parent_id) != 0 ||
        strcmp(e->msg->parent_session, m->parent_session) != 0 ||
        strcmp(e->msg->session, m->session) != 0 || strcmp(e->msg->subshell, m->subshell) != 0)
        return false;
    if (!stream_parts(e->msg, &name0, &text0) || !slice_eq(name, name0))
        return false;
    e->tail.max = l->coalesce_max;
    if (buf_append_slice(&e->tail, text) < 0)
        return false;
    e->joined++;
    e->cost += text.n;
    l->bytes += text.n;
    l->total_joined++;
    LIST_FOR_EACH (&l->cursors, n) {
        struct km_cursor *c = cursor_of(n);
        if (entry_ahead(e, c))
            c->lag += text.n;
    }
    return true;
}

/* Build the one message of a joined entry: header of the first, content with the longer text.
 * Without memory the first part stays and the rest counts as lost by the caller. */
static bool entry_splice(struct km_log *l, struct km_entry *e)
{
    struct slice name, text, content = e->msg->parts.content;
    struct buf b;
    struct jp_msg *m = NULL;
    buf_init(&b, content.n + e->tail.len + 1);
    if (!stream_parts(e->msg, &name, &text))
        return false;
    size_t cut = (size_t)(text.p + text.n - content.p);
    int r = buf_append(&b, content.p, cut);
    if (r == 0)
        r = buf_append_slice(&b, buf_slice(&e->tail));
    if (r == 0)
        r = buf_append(&b, content.p + cut, content.n - cut);
    if (r == 0) {
        struct jp_parts parts = e->msg->parts;
        parts.content = buf_slice(&b);
        r = jp_msg_new(&parts, &m, NULL);
    }
    buf_fini(&b);
    if (r == 0) {
        jp_msg_unref(e->msg);
        e->msg = m;
    } else {
        l->total_lost += e->joined;
    }
    buf_fini(&e->tail);
    return r == 0;
}

/* ---- appending and pulling ---- */

static bool type_keeps(const struct jp_msg *m)
{
    return m->parts.channel != JP_IOPUB || strcmp(m->msg_type, "status") == 0 ||
           strcmp(m->msg_type, "error") == 0;
}

static bool wanted(const struct km_log *l, uint32_t peer)
{
    LIST_FOR_EACH (&l->cursors, n)
        if (!peer || cursor_of(n)->peer == peer)
            return true;
    return false;
}

void km_log_append(struct km_log *l, struct jp_msg *m, uint32_t peer, uint64_t *ret_seq)
{
    if (ret_seq)
        *ret_seq = 0;
    if (!wanted(l, peer))
        return;
    if (!peer && join_last(l, m)) {
        trim(l);
        return;
    }
    struct slice name, text;
    struct km_entry *e = xnew(struct km_entry);
    e->msg = jp_msg_ref(m);
    e->seq = l->next_seq++;
    e->cost = m->size + KM_ENTRY_OVERHEAD;
    e->peer = peer;
    e->keep = type_keeps(m);
    e->stream = stream_parts(m, &name, &text);
    buf_init(&e->tail, l->coalesce_max);
    list_push_back(&l->entries, &e->link);
    l->bytes += e->cost;
    l->count++;
    LIST_FOR_EACH (&l->cursors, n) {
        struct km_cursor *c = cursor_of(n);
        if (!entry_for(e, c))
            continue; /* a cursor at the end stays there: the entry is not its own */
        c->lag += e->cost;
        if (!c->at)
            c->at = e;
    }
    if (ret_seq)
        *ret_seq = e->seq;
    trim(l);
}

void km_log_add_cursor(struct km_log *l, struct km_cursor *c, uint32_t peer, bool attached)
{
    *c = (struct km_cursor) { .peer = peer, .attached = attached };
    /* What is joined to the last entry from now on would be behind this cursor's back. */
    if (!list_empty(&l->entries))
        entry_of(l->entries.head.prev)->sealed = true;
    list_push_back(&l->cursors, &c->link);
}

void km_log_remove_cursor(struct km_log *l, struct km_cursor *c)
{
    list_remove(&c->link);
    free(TAKE_PTR(c->gap_parent));
    c->at = NULL;
    trim(l);
}

void km_log_set_attached(struct km_log *l, struct km_cursor *c, bool attached)
{
    c->attached = attached;
    trim(l);
}

struct jp_msg *km_log_pull(struct km_log *l, struct km_cursor *c, uint64_t *ret_seq)
{
    while (c->at) {
        struct km_entry *e = c->at;
        c->at = entry_next(l, e);
        if (!entry_for(e, c))
            continue;
        c->lag -= e->cost;
        e->sealed = true;
        if (e->joined && e->tail.len && !entry_splice(l, e)) {
            c->gap_msgs += e->joined;
        }
        struct jp_msg *m = jp_msg_ref(e->msg);
        if (ret_seq)
            *ret_seq = e->seq;
        trim(l);
        return m;
    }
    trim(l);
    return NULL;
}

bool km_log_has(const struct km_cursor *c)
{
    if (c->gap_msgs)
        return true;
    /* Position may rest on entries of others; those in front of the own ones do not count. */
    return c->lag > 0;
}

bool km_log_pending(const struct km_cursor *c, uint64_t seq)
{
    return c->at && c->at->seq <= seq;
}
