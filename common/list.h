#pragma once
/* Intrusive doubly linked list. A field says which list it is on:
 *     struct list_node link;  (* km_manager::kernels *)
 * A node that is on no list points to itself or is zeroed; list_remove is idempotent. */
#include "common/cleanup.h"
#include <stdbool.h>
#include <stddef.h>

struct list_node {
    struct list_node *next, *prev;
};
struct list {
    struct list_node head;
};

static inline void list_init(struct list *l)
{
    l->head.next = l->head.prev = &l->head;
}
static inline bool list_empty(const struct list *l)
{
    return l->head.next == &l->head || !l->head.next;
}
static inline bool list_linked(const struct list_node *n)
{
    return n->next && n->next != n;
}
static inline void list_push_back(struct list *l, struct list_node *n)
{
    n->prev = l->head.prev;
    n->next = &l->head;
    n->prev->next = n;
    l->head.prev = n;
}
static inline void list_push_front(struct list *l, struct list_node *n)
{
    n->next = l->head.next;
    n->prev = &l->head;
    n->next->prev = n;
    l->head.next = n;
}
static inline void list_remove(struct list_node *n)
{
    if (!list_linked(n))
        return;
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->next = n->prev = n;
}
static inline struct list_node *list_first(const struct list *l)
{
    return list_empty(l) ? NULL : l->head.next;
}
#define list_entry(node, type, member) container_of(node, type, member)
/* The body may remove `n` itself, nothing else that is iterated (use the _SAFE form's guarantee).
 */
#define LIST_FOR_EACH(l, n)                                                                        \
    for (struct list_node *n = (l)->head.next; n && n != &(l)->head; n = n->next)
#define LIST_FOR_EACH_SAFE(l, n)                                                                   \
    for (struct list_node *n = (l)->head.next, *n##_next = n ? n->next : NULL;                     \
         n && n != &(l)->head; n = n##_next, n##_next = n->next)
