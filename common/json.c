#include "common/json.h"
#include "common/fs.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define DEPTH_MAX 100 /* the parser recurses; nothing we read nests deeper than a handful */
#define KEY_SHOWN 48

/* Nesting of brackets outside strings: checked before the recursive parser sees the text. */
static bool too_deep(struct slice text)
{
    size_t depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < text.n; i++) {
        uint8_t c = text.p[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > DEPTH_MAX)
                return true;
        } else if ((c == ']' || c == '}') && depth) {
            depth--;
        }
    }
    return false;
}

json_t *json_parse(struct slice text, struct err *e)
{
    if (too_deep(text)) {
        err_set(e, -EINVAL, "JSON nests deeper than %d levels", DEPTH_MAX);
        return NULL;
    }
    json_error_t je;
    json_t *v = json_loadb(text.n ? (const char *)text.p : "", text.n,
                           JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &je);
    if (!v)
        err_set(e, -EINVAL, "line %d column %d: %s", je.line, je.column, je.text);
    return v;
}

json_t *json_parse_file(const char *path, size_t max, struct err *e)
{
    struct buf b;
    int r = fs_read_file(path, max, &b, e);
    if (r < 0)
        return NULL;
    struct err inner = { 0 };
    json_t *v = json_parse(buf_slice(&b), &inner);
    if (!v)
        err_set(e, inner.code, "%s: %s", path, inner.msg);
    buf_fini(&b);
    return v;
}

/* Keys come from peers: shown without control characters, and cut. */
static void show_key(char ret[KEY_SHOWN + 4], const char *key)
{
    size_t n = 0;
    for (; key[n] && n < KEY_SHOWN; n++)
        ret[n] = (unsigned char)key[n] < 0x20 || key[n] == 0x7f ? '?' : key[n];
    snprintf(ret + n, 4, "%s", key[n] ? "..." : "");
}

static int fail(const struct json_obj *o, const char *key, struct err *e, const char *what)
{
    char shown[KEY_SHOWN + 4];
    show_key(shown, key);
    return err_set(e, -EINVAL, "%s%s%s: %s", o->where, *o->where ? "." : "", shown, what);
}

int json_obj_of(json_t *v, const char *where, struct json_obj *ret, struct err *e)
{
    if (!json_is_object(v))
        return err_set(e, -EINVAL, "%s%snot an object", where, *where ? ": " : "");
    ret->obj = v;
    snprintf(ret->where, sizeof(ret->where), "%s", where);
    return 0;
}

/* NULL when the key is missing or null. */
static json_t *lookup(const struct json_obj *o, const char *key)
{
    json_t *v = json_object_get(o->obj, key);
    return json_is_null(v) ? NULL : v;
}

int json_get_str(const struct json_obj *o, const char *key, const char **ret, struct err *e)
{
    json_t *v = lookup(o, key);
    if (!v)
        return 0;
    if (!json_is_string(v))
        return fail(o, key, e, "not a string");
    *ret = json_string_value(v);
    return 0;
}

int json_get_bool(const struct json_obj *o, const char *key, bool *ret, struct err *e)
{
    json_t *v = lookup(o, key);
    if (!v)
        return 0;
    if (!json_is_boolean(v))
        return fail(o, key, e, "not true or false");
    *ret = json_is_true(v);
    return 0;
}

int json_get_u64(const struct json_obj *o, const char *key, uint64_t min, uint64_t max,
                 uint64_t *ret, struct err *e)
{
    json_t *v = lookup(o, key);
    if (!v)
        return 0;
    if (!json_is_integer(v))
        return fail(o, key, e, "not an integer");
    json_int_t i = json_integer_value(v);
    if (i < 0 || (uint64_t)i < min || (uint64_t)i > max) {
        char what[120];
        snprintf(what, sizeof(what), "%" JSON_INTEGER_FORMAT " is not in %" PRIu64 "..%" PRIu64, i,
                 min, max);
        return fail(o, key, e, what);
    }
    *ret = (uint64_t)i;
    return 0;
}

int json_get_obj(const struct json_obj *o, const char *key, json_t **ret, struct err *e)
{
    json_t *v = lookup(o, key);
    if (!v)
        return 0;
    if (!json_is_object(v))
        return fail(o, key, e, "not an object");
    *ret = v;
    return 0;
}

int json_get_array(const struct json_obj *o, const char *key, json_t **ret, struct err *e)
{
    json_t *v = lookup(o, key);
    if (!v)
        return 0;
    if (!json_is_array(v))
        return fail(o, key, e, "not an array");
    *ret = v;
    return 0;
}

static size_t min3(size_t a, size_t b, size_t c)
{
    size_t m = a < b ? a : b;
    return m < c ? m : c;
}

/* Edit distance with insert, delete, replace and swap of neighbours; both at most 63 long. */
static size_t distance(const char *a, size_t na, const char *b, size_t nb)
{
    size_t row[3][65];
    for (size_t k = 0; k <= nb; k++)
        row[0][k] = k;
    for (size_t i = 1; i <= na; i++) {
        size_t *cur = row[i % 3], *prev = row[(i - 1) % 3], *prev2 = row[(i + 1) % 3];
        cur[0] = i;
        for (size_t k = 1; k <= nb; k++) {
            cur[k] = min3(cur[k - 1] + 1, prev[k] + 1, prev[k - 1] + (a[i - 1] != b[k - 1]));
            if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1] &&
                prev2[k - 2] + 1 < cur[k])
                cur[k] = prev2[k - 2] + 1;
        }
    }
    return row[na % 3][nb];
}

const char *json_nearest(const char *word, const char *const *known)
{
    const char *best = NULL;
    size_t n = strnlen(word, 64), best_d = n / 3 + 1;
    if (n >= 64)
        return NULL;
    for (; *known; known++) {
        size_t nk = strlen(*known);
        if (nk >= 64)
            continue;
        size_t d = distance(word, n, *known, nk);
        /* Near: at most about a third of the letters differ, and not all of them. */
        if (d < nk && (d < best_d || (d == best_d && !best))) {
            best = *known;
            best_d = d;
        }
    }
    return best;
}

static void list_keys(char *ret, size_t size, const char *const *known)
{
    size_t n = 0;
    for (size_t i = 0; known[i] && n < size; i++)
        n += (size_t)snprintf(ret + n, size - n, "%s%s", i ? ", " : "", known[i]);
}

int json_check_keys(const struct json_obj *o, const char *const *known, struct err *e)
{
    const char *key;
    json_t *v;
    json_object_foreach(o->obj, key, v)
    {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key) != 0)
            i++;
        if (known[i])
            continue;
        char what[360];
        const char *near = json_nearest(key, known);
        if (near) {
            snprintf(what, sizeof(what), "unknown key; did you mean \"%s\"?", near);
        } else {
            char all[300] = "none";
            list_keys(all, sizeof(all), known);
            snprintf(what, sizeof(what), "unknown key (known: %s)", all);
        }
        return fail(o, key, e, what);
    }
    return 0;
}
