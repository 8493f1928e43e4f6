/* The JSON scanner and the strict rewriter. Properties: ranges lie inside the text; the member walk
 * and the value scan agree on what is an object; what a strict parser takes, the scanner takes and
 * the rewriter leaves alone; rewriting is idempotent. */
#include "fuzz_jp.h"
#include "proto/jp_priv.h"
#include <errno.h>
#include <jansson.h>

static bool inside(struct slice part, struct slice whole)
{
    return part.p >= whole.p && part.p + part.n <= whole.p + whole.n;
}

static void check_string(struct slice v)
{
    char text[64], *dup = NULL;
    int r = jp_json_string(v, text, sizeof(text)),
        d = jp_json_string_dup(v, sizeof(text) - 1, &dup);

    FUZZ_CHECK(r == d);
    if (r == 0) {
        FUZZ_CHECK(strcmp(text, dup) == 0);
        for (size_t i = 0, n; text[i]; i += n)
            FUZZ_CHECK((n = utf8_len((const uint8_t *)text + i, strlen(text + i))) > 0);
    }
    free(dup);
}

static int walk(struct slice s)
{
    struct slice k, v, found;
    size_t pos = 0;
    int r;

    while ((r = jp_json_member(s, &pos, &k, &v)) > 0) {
        FUZZ_CHECK(inside(k, s) && inside(v, s) && pos <= s.n && v.n > 0);
        check_string(v);
    }
    if (r == 0) {
        r = jp_json_find(s, "a", &found);
        FUZZ_CHECK(r == -ENOENT || (r == 0 && inside(found, s)));
        return 0;
    }
    return r;
}

static void check_strict(struct slice s, bool object, bool valid)
{
    struct buf once, twice;
    struct slice v, rest;

    buf_init(&once, 8 * s.n + 100);
    buf_init(&twice, 8 * s.n + 100);
    FUZZ_CHECK(jp_json_append_strict(&once, s) == 0);
    fuzz_check_strict(buf_slice(&once));
    FUZZ_CHECK(jp_json_is_object(buf_slice(&once)));
    FUZZ_CHECK(jp_json_append_strict(&twice, buf_slice(&once)) == 0);
    FUZZ_CHECK(slice_eq(buf_slice(&once), buf_slice(&twice)));
    if (object && valid) {
        FUZZ_CHECK(jp_json_value(s, &v, &rest) == 0);
        FUZZ_CHECK(slice_eq(v, buf_slice(&once)));
    }
    buf_fini(&once);
    buf_fini(&twice);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct slice s = slice_of(data, size), v, rest;
    bool object = jp_json_is_object(s), valid;
    json_t *parsed = json_loadb((const char *)data, size, JSON_ALLOW_NUL, NULL);
    size_t pos = 0;

    valid = parsed != NULL;
    if (valid && !object) /* an array, or deeper than the scanner goes */
        FUZZ_CHECK(!json_is_object(parsed) || size > 500);
    json_decref(parsed);
    if (jp_json_value(s, &v, &rest) == 0) {
        FUZZ_CHECK(inside(v, s) && inside(rest, s) && v.p + v.n == rest.p);
        FUZZ_CHECK(rest.p + rest.n == s.p + s.n);
        check_string(v);
    }
    if (walk(s) == 0)
        FUZZ_CHECK(object);
    while (jp_json_element(s, &pos, &v) > 0)
        FUZZ_CHECK(inside(v, s) && pos <= s.n);
    if (valid)
        FUZZ_CHECK(!jp_json_has_nonfinite(s));
    check_strict(s, object, valid);
    return 0;
}
