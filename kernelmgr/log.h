#pragma once
/* The ordered message log of one kernel: replay after a reconnect, late joiners, several clients
 * and slow readers are one mechanism (design.md section 4). Entries are references to immutable
 * messages, each meant for everybody or for one peer (a client's session). Readers hold cursors;
 * nothing is queued per client.
 *
 * Who keeps an entry alive:
 *   - an attached cursor that has not pulled it: always, up to `hard` bytes (the owner stops
 * granting guest credit long before that, so only a guest that cheats with tiny messages gets
 * there);
 *   - an absent cursor (client away): as long as the log holds at most replay_max bytes; replies,
 * errors and status go last. What a cursor loses is counted in it (gap_*), so that its owner can be
 * told: never a silent hole.
 *
 * Consecutive stream messages of one parent and name are joined while nobody has pulled the last
 * entry: their JSON text is appended as it is (no decoding) and becomes one message at the first
 * pull. */
#include "common/buf.h"
#include "common/list.h"
#include "proto/jp_msg.h"

struct km_entry {
    struct list_node link; /* km_log::entries */
    struct jp_msg *msg;
    struct buf tail; /* JSON text to splice behind content.text, quotes excluded */
    uint64_t seq;    /* strictly rising along the list */
    size_t cost;     /* bytes it counts for */
    uint32_t peer;   /* 0 = everybody */
    uint32_t joined; /* messages spliced into tail */
    bool sealed;     /* somebody has looked at it, or must not see it grow: no more joining */
    bool keep;       /* dropped last: status, replies, errors, input requests */
    bool stream;     /* plain stream message that can be joined to */
};

struct km_cursor {
    struct list_node link; /* km_log::cursors */
    uint32_t peer;         /* id of its owner, > 0 */
    bool attached;
    struct km_entry *at;          /* next entry to look at, NULL: at the end */
    size_t lag;                   /* bytes meant for it and not pulled */
    uint64_t gap_msgs, gap_bytes; /* lost since the last pull */
    char *gap_parent;             /* raw parent header of the last message lost, or NULL */
};

struct km_log {
    struct list entries, cursors;
    uint64_t next_seq;
    size_t bytes, count;
    size_t bytes_max, replay_max, coalesce_max;
    uint64_t total_joined, total_lost; /* messages, for metrics */
};

/* Bytes charged per entry beside the message's own: what the structs take. */
#define KM_ENTRY_OVERHEAD 512u

void km_log_init(struct km_log *l, size_t bytes_max, size_t replay_max, size_t coalesce_max);
void km_log_fini(struct km_log *l); /* cursors must be gone */
/* Append for everybody (peer 0) or one peer; keeps a reference. *ret_seq (may be NULL) is the
 * entry's number, 0 when nobody wants it and it was not stored. */
void km_log_append(struct km_log *l, struct jp_msg *m, uint32_t peer, uint64_t *ret_seq);
/* A new cursor stands at the end. */
void km_log_add_cursor(struct km_log *l, struct km_cursor *c, uint32_t peer, bool attached);
void km_log_remove_cursor(struct km_log *l, struct km_cursor *c);
void km_log_set_attached(struct km_log *l, struct km_cursor *c, bool attached);
/* Next message for the cursor (new reference) and its number, or NULL at the end. Gaps are the
 * caller's to report (and to clear) before it pulls. */
struct jp_msg *km_log_pull(struct km_log *l, struct km_cursor *c, uint64_t *ret_seq);
bool km_log_has(const struct km_cursor *c); /* something to pull or a gap to report */
/* Is the entry with this number still to be pulled by the cursor? */
bool km_log_pending(const struct km_cursor *c, uint64_t seq);
