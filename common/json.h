#pragma once
/* Typed getters over jansson with error texts that carry the path: "vm.memory_mb: not an integer".
 * Used for configuration, recipes and REST bodies; never for message content (proto/jp_json.h). */
#include "common/err.h"
#include "common/slice.h"
#include <jansson.h>

/* Parse; numbers beyond 64 bits, duplicate keys, NUL and trailing bytes are errors (-EINVAL, with
 * line and column). */
json_t *json_parse(struct slice text, struct err *e);
json_t *json_parse_file(const char *path, size_t max, struct err *e);

/* A reader over one object. `where` prefixes paths ("" at the top). */
struct json_obj {
    json_t *obj; /* borrowed */
    char where[96];
};
int json_obj_of(json_t *v, const char *where, struct json_obj *ret, struct err *e);
/* Missing key or null: *ret stays as it is (put the default there first). Wrong type or out of
 * range: -EINVAL. Strings are borrowed from the document. */
int json_get_str(const struct json_obj *o, const char *key, const char **ret, struct err *e);
int json_get_bool(const struct json_obj *o, const char *key, bool *ret, struct err *e);
int json_get_u64(const struct json_obj *o, const char *key, uint64_t min, uint64_t max,
                 uint64_t *ret, struct err *e);
int json_get_obj(const struct json_obj *o, const char *key, json_t **ret, struct err *e);
int json_get_array(const struct json_obj *o, const char *key, json_t **ret, struct err *e);
/* Every key must be in the NULL-terminated list, else -EINVAL naming it and the nearest known key.
 */
int json_check_keys(const struct json_obj *o, const char *const *known, struct err *e);
/* The nearest of `known` by edit distance, or NULL when none is near. */
const char *json_nearest(const char *word, const char *const *known);
