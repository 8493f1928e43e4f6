/* Chained hash table. Entries also hang on one list in order of insertion, which is the order of
 * iteration: simulations stay reproducible although the hash key is random. */
#include "common/map.h"
#include "common/id.h"
#include "common/list.h"
#include "common/mem.h"
#include <assert.h>
#include <string.h>

struct map_entry {
    struct map_entry *next; /* chain of the bucket */
    struct list_node link;  /* map::order */
    uint64_t hash;
    void *value;
    size_t key_len;
    char key[]; /* NUL-terminated copy */
};

struct map {
    struct map_entry **buckets;
    size_t n_buckets; /* a power of two */
    size_t size;
    uint64_t k0, k1;
    struct list order;
};

static uint64_t rotl(uint64_t x, int b)
{
    return x << b | x >> (64 - b);
}

static void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[1] = rotl(v[1], 13) ^ v[0];
    v[0] = rotl(v[0], 32);
    v[2] += v[3];
    v[3] = rotl(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = rotl(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = rotl(v[1], 17) ^ v[2];
    v[2] = rotl(v[2], 32);
}

static uint64_t load_le(const uint8_t *p, size_t n)
{
    uint64_t x = 0;
    for (size_t i = 0; i < n; i++)
        x |= (uint64_t)p[i] << (8 * i);
    return x;
}

/* SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012). */
static uint64_t siphash(uint64_t k0, uint64_t k1, struct slice s)
{
    uint64_t v[4] = { k0 ^ UINT64_C(0x736f6d6570736575), k1 ^ UINT64_C(0x646f72616e646f6d),
                      k0 ^ UINT64_C(0x6c7967656e657261), k1 ^ UINT64_C(0x7465646279746573) };
    size_t i = 0;
    for (; s.n - i >= 8; i += 8) {
        uint64_t w = load_le(s.p + i, 8);
        v[3] ^= w;
        sip_round(v);
        sip_round(v);
        v[0] ^= w;
    }
    uint64_t w = (uint64_t)(s.n & 0xff) << 56;
    if (s.n > i)
        w |= load_le(s.p + i, s.n - i);
    v[3] ^= w;
    sip_round(v);
    sip_round(v);
    v[0] ^= w;
    v[2] ^= 0xff;
    for (int r = 0; r < 4; r++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

struct map *map_new(void)
{
    struct map *m = xnew(struct map);
    m->n_buckets = 16;
    m->buckets = xcalloc(m->n_buckets, sizeof(struct map_entry *));
    id_random(&m->k0, sizeof(m->k0));
    id_random(&m->k1, sizeof(m->k1));
    list_init(&m->order);
    return m;
}

void map_free(struct map *m)
{
    if (!m)
        return;
    LIST_FOR_EACH_SAFE (&m->order, n)
        free(list_entry(n, struct map_entry, link));
    free(m->buckets);
    free(m);
}

size_t map_size(const struct map *m)
{
    return m->size;
}

/* The place that points to the entry, or the NULL at the end of its chain. */
static struct map_entry **find(const struct map *m, struct slice key, uint64_t hash)
{
    struct map_entry **at = &m->buckets[hash & (m->n_buckets - 1)];
    while (*at && ((*at)->hash != hash || !slice_eq(slice_of((*at)->key, (*at)->key_len), key)))
        at = &(*at)->next;
    return at;
}

static void grow(struct map *m)
{
    free(m->buckets);
    m->n_buckets *= 2;
    m->buckets = xcalloc(m->n_buckets, sizeof(struct map_entry *));
    LIST_FOR_EACH (&m->order, n) {
        struct map_entry *e = list_entry(n, struct map_entry, link);
        struct map_entry **head = &m->buckets[e->hash & (m->n_buckets - 1)];
        e->next = *head;
        *head = e;
    }
}

void *map_get_slice(const struct map *m, struct slice key)
{
    struct map_entry *e = *find(m, key, siphash(m->k0, m->k1, key));
    return e ? e->value : NULL;
}

void *map_put_slice(struct map *m, struct slice key, void *value)
{
    assert(value);
    uint64_t hash = siphash(m->k0, m->k1, key);
    struct map_entry **at = find(m, key, hash);
    if (*at) {
        void *old = (*at)->value;
        (*at)->value = value;
        return old;
    }
    if (m->size >= m->n_buckets) {
        grow(m);
        at = find(m, key, hash);
    }
    struct map_entry *e = xcalloc(1, sizeof(*e) + key.n + 1);
    e->hash = hash;
    e->value = value;
    e->key_len = key.n;
    if (key.n)
        memcpy(e->key, key.p, key.n);
    *at = e;
    list_push_back(&m->order, &e->link);
    m->size++;
    return NULL;
}

void *map_del_slice(struct map *m, struct slice key)
{
    struct map_entry **at = find(m, key, siphash(m->k0, m->k1, key));
    struct map_entry *e = *at;
    if (!e)
        return NULL;
    void *value = e->value;
    *at = e->next;
    list_remove(&e->link);
    m->size--;
    free(e);
    return value;
}

void *map_get(const struct map *m, const char *key)
{
    return map_get_slice(m, slice_str(key));
}

void *map_put(struct map *m, const char *key, void *value)
{
    return map_put_slice(m, slice_str(key), value);
}

void *map_del(struct map *m, const char *key)
{
    return map_del_slice(m, slice_str(key));
}

/* it->bucket: 0 = not begun. it->entry: the list node to visit next, so that the current entry may
 * go away in between. */
bool map_next(const struct map *m, struct map_iter *it)
{
    struct list_node *n = it->bucket ? it->entry : m->order.head.next;
    if (n == &m->order.head)
        return false;
    struct map_entry *e = list_entry(n, struct map_entry, link);
    it->bucket = 1;
    it->entry = n->next;
    it->key = e->key;
    it->value = e->value;
    return true;
}
