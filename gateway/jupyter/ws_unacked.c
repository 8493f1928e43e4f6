/* See ws_unacked.h. */
#include "gateway/jupyter/ws_unacked.h"
#include "common/mem.h"
#include <stdlib.h>
#include <string.h>

#define ACK_DELAY_MS 500u /* RFC 9293 3.8.6.3: acknowledgements come sooner */

struct parked {
    struct list_node link; /* ws_parked::all */
    char *key;             /* "kernel/session" */
    struct ws_unacked messages;
    size_t bytes;
    uint64_t expires_ms;
};

void ws_unacked_fini(struct ws_unacked *u)
{
    struct jp_msg *m;
    while ((m = ws_unacked_take(u)))
        jp_msg_unref(m);
    free(u->items);
    memset(u, 0, sizeof(*u));
}

struct jp_msg *ws_unacked_take(struct ws_unacked *u)
{
    if (!u->n)
        return NULL;
    struct jp_msg *m = u->items[u->first].msg;
    u->first = (u->first + 1) % u->cap;
    u->n--;
    return m;
}

static void grow(struct ws_unacked *u)
{
    size_t cap = u->cap ? u->cap * 2 : 16;
    struct ws_unacked_item *items = xcalloc(cap, sizeof(*items));
    for (size_t i = 0; i < u->n; i++)
        items[i] = u->items[(u->first + i) % u->cap];
    free(u->items);
    u->items = items;
    u->first = 0;
    u->cap = cap;
}

void ws_unacked_add(struct ws_unacked *u, struct jp_msg *m, uint64_t end, uint64_t now_ms)
{
    if (u->n == WS_UNACKED_MAX)
        jp_msg_unref(ws_unacked_take(u));
    if (u->n == u->cap)
        grow(u);
    u->items[(u->first + u->n++) % u->cap] =
        (struct ws_unacked_item) { .msg = jp_msg_ref(m), .end = end, .at_ms = now_ms };
}

void ws_unacked_ack(struct ws_unacked *u, uint64_t offset)
{
    while (u->n && u->items[u->first].end <= offset)
        jp_msg_unref(ws_unacked_take(u));
}

bool ws_unacked_overdue(const struct ws_unacked *u, uint64_t now_ms)
{
    return u->n && now_ms - u->items[u->first].at_ms > ACK_DELAY_MS;
}

/* ---- parking ---- */

void ws_parked_init(struct ws_parked *p)
{
    list_init(&p->all);
    p->bytes = 0;
}

static void parked_free(struct ws_parked *p, struct parked *k)
{
    list_remove(&k->link);
    p->bytes -= k->bytes;
    ws_unacked_fini(&k->messages);
    free(k->key);
    free(k);
}

void ws_parked_fini(struct ws_parked *p)
{
    struct list_node *n;
    while ((n = list_first(&p->all)))
        parked_free(p, list_entry(n, struct parked, link));
}

/* Old ones, and the oldest while there is too much. */
static void clean(struct ws_parked *p, uint64_t now_ms)
{
    struct list_node *n;
    while ((n = list_first(&p->all))) {
        struct parked *k = list_entry(n, struct parked, link);
        if (k->expires_ms > now_ms && p->bytes <= WS_PARKED_BYTES)
            return;
        parked_free(p, k);
    }
}

void ws_parked_put(struct ws_parked *p, const char *kernel, const char *session,
                   struct ws_unacked *u, uint64_t now_ms)
{
    if (!u->n)
        return;
    struct parked *k = xnew(struct parked);
    k->key = xasprintf("%s/%s", kernel, session);
    k->expires_ms = now_ms + WS_PARKED_TTL_MS;
    for (size_t i = 0; i < u->n; i++)
        k->bytes += u->items[(u->first + i) % u->cap].msg->size;
    k->messages = *u;
    memset(u, 0, sizeof(*u));
    p->bytes += k->bytes;
    list_push_back(&p->all, &k->link);
    clean(p, now_ms);
}

void ws_parked_get(struct ws_parked *p, const char *kernel, const char *session,
                   struct ws_unacked *u, uint64_t now_ms)
{
    char *key = xasprintf("%s/%s", kernel, session);
    clean(p, now_ms);
    LIST_FOR_EACH_SAFE (&p->all, n) {
        struct parked *k = list_entry(n, struct parked, link);
        if (strcmp(k->key, key) != 0)
            continue;
        struct jp_msg *m;
        while ((m = ws_unacked_take(&k->messages))) {
            ws_unacked_add(u, m, 0, now_ms);
            jp_msg_unref(m);
        }
        parked_free(p, k);
    }
    free(key);
}
