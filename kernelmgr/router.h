#pragma once
/* Requests in flight of one kernel: who asked what, and what is still owed. A request enters when a
 * client submits it and leaves when its replies and its idle have both passed; what is left when
 * the process ends gets answers of our own (kernelmgr/synth.h). Hence "every request ends, once".
 * Bounded by KM_REQS_MAX. */
#include "common/list.h"
#include "common/map.h"
#include "proto/jp_msg.h"

#define KM_REQS_MAX 1024u

struct km_req {
    struct list_node link;                              /* km_router::order */
    const char *msg_id, *msg_type, *session, *subshell; /* into data */
    const char *ends;    /* delete_subshell_request: the subshell that it ends; else "" */
    struct slice header; /* raw header: parent of what answers it; into data */
    enum jp_channel channel;
    uint32_t peer;                   /* the asker */
    uint32_t gen;                    /* process generation it was submitted for */
    unsigned replies_due, idles_due; /* more than one when the client sent the same id again */
    bool wants_reply;                /* its type has a reply */
    bool tracked;                    /* its type counts as user activity */
    bool busy;                       /* between its busy and its idle */
    bool begun;                      /* a busy was seen */
    bool interrupt_on_busy; /* its asker gave up while it was queued: stop it when it begins */
    uint64_t half_ms; /* when the reply or the idle alone was seen, or output since; 0 = not yet */
    uint64_t submitted_us;
    char data[];
};
struct km_router {
    struct map *by_id;
    struct list order; /* of submission */
    size_t n, n_half, n_busy;
};

void km_router_init(struct km_router *r);
void km_router_fini(struct km_router *r);
struct km_req *km_router_find(const struct km_router *r, const char *msg_id);
/* Remember a shell or control message of a client. The caller has checked that the id is free. */
struct km_req *km_router_add(struct km_router *r, const struct jp_msg *m, uint32_t peer,
                             uint32_t gen);
void km_router_remove(struct km_router *r, struct km_req *q);
/* One reply or idle has passed. True: nothing is owed any more, q is gone. */
bool km_router_replied(struct km_router *r, struct km_req *q, uint64_t now_ms);
bool km_router_idled(struct km_router *r, struct km_req *q, uint64_t now_ms);
void km_router_busy(struct km_router *r, struct km_req *q, bool busy);
/* The kernel has deleted this subshell: what is in flight there may never be answered. */
void km_router_subshell_gone(struct km_router *r, const char *subshell, uint64_t now_ms);
/* Has the peer requests in flight on this channel? */
bool km_router_peer_waits(const struct km_router *r, uint32_t peer, enum jp_channel channel);
/* The oldest request that runs now and counts as activity, or NULL. */
struct km_req *km_router_running(const struct km_router *r);
