#pragma once
/* String -> pointer map (open hashing, SipHash with a random key, so that a peer who chooses keys
 * cannot make it slow). Keys are copied; values are not owned. */
#include "common/slice.h"

struct map;
struct map *map_new(void);
void map_free(struct map *m);
size_t map_size(const struct map *m);
void *map_get(const struct map *m, const char *key); /* NULL = not there */
void *map_get_slice(const struct map *m, struct slice key);
/* Returns the value that was there before, or NULL. value must not be NULL. */
void *map_put(struct map *m, const char *key, void *value);
void *map_put_slice(struct map *m, struct slice key, void *value);
void *map_del(struct map *m, const char *key); /* returns the value, or NULL */
void *map_del_slice(struct map *m, struct slice key);
/* Iterate: struct map_iter it = {0}; while (map_next(m, &it)) use it.key, it.value.
 * Only the current entry may be deleted while iterating. */
struct map_iter {
    size_t bucket;
    void *entry;
    const char *key;
    void *value;
};
bool map_next(const struct map *m, struct map_iter *it);
