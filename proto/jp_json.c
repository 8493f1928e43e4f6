/* JSON scanner, see jp_json.h. All positions are offsets into the caller's bytes; nothing is
 * copied but by the string decoders. Recursion-free: open containers are bits of a small stack. */
#include "proto/jp_json.h"
#include "common/utf8.h"
#include "proto/jp_priv.h"
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 512u

static size_t skip_space(struct slice s, size_t i)
{
    while (i < s.n && (s.p[i] == ' ' || s.p[i] == '\n' || s.p[i] == '\r' || s.p[i] == '\t'))
        i++;
    return i;
}

#define ONES UINT64_C(0x0101010101010101)
#define HIGHS (ONES << 7)
/* High bit set in (at least) each byte of w that equals c; false positives only above a true one.
 */
static uint64_t bytes_equal(uint64_t w, uint8_t c)
{
    uint64_t x = w ^ ONES * c;
    return (x - ONES) & ~x & HIGHS;
}

/* Eight bytes, the first one lowest. */
static uint64_t load8(const uint8_t *p)
{
    uint64_t w;
    memcpy(&w, p, sizeof(w));
    return le64toh(w);
}

/* Place of the first byte of s[i..to) that is a quote or a backslash, or `to`. Short strings (keys,
 * ids) end within the first words; libc's wide memchr finds the end of long ones. *quote caches
 * where the next quote is, so that text full of escapes is not searched for it again and again. */
static size_t string_stop(struct slice s, size_t i, size_t *quote)
{
    const uint8_t *at;

    for (size_t words = 0; words < 4 && i + 8 <= s.n; words++, i += 8) {
        uint64_t w = load8(s.p + i), hit = bytes_equal(w, '"') | bytes_equal(w, '\\');
        if (hit)
            return i + (size_t)__builtin_ctzll(hit) / 8;
    }
    if (i >= s.n)
        return s.n;
    if (*quote < i) {
        at = memchr(s.p + i, '"', s.n - i);
        *quote = at ? (size_t)(at - s.p) : s.n;
    }
    at = memchr(s.p + i, '\\', *quote - i);
    return at ? (size_t)(at - s.p) : *quote;
}

/* i is behind the opening quote; the result is the place of the closing quote, or s.n. */
static size_t string_end(struct slice s, size_t i)
{
    size_t quote = 0;

    for (;;) {
        i = string_stop(s, i, &quote);
        if (i >= s.n || s.p[i] == '"')
            return i;
        if (s.n - i < 2)
            return s.n;
        i += 2; /* the backslash and what it escapes */
    }
}

static bool scalar_byte(uint8_t c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '+' || c == '.';
}

/* Open containers: bit set = object. */
struct nesting {
    uint64_t bits[DEPTH_MAX / 64];
    size_t depth;
};

static int nesting_push(struct nesting *n, bool object)
{
    uint64_t bit;

    if (n->depth == DEPTH_MAX)
        return -EINVAL;
    bit = UINT64_C(1) << n->depth % 64;
    if (object)
        n->bits[n->depth / 64] |= bit;
    else
        n->bits[n->depth / 64] &= ~bit;
    n->depth++;
    return 0;
}

static int nesting_pop(struct nesting *n, bool object)
{
    n->depth--; /* the walk ends at the outermost bracket: never empty here */
    return (n->bits[n->depth / 64] >> n->depth % 64 & 1) == object ? 0 : -EINVAL;
}

/* Containers from s.p[i], which is '{' or '[', inside `outer` others. The place behind the matching
 * bracket, or 0. */
static size_t container_end(struct slice s, size_t i, size_t outer)
{
    struct nesting nest;
    int r = 0;

    nest.depth = outer;
    do {
        switch (s.p[i]) {
        case '"':
            i = string_end(s, i + 1);
            if (i >= s.n)
                return 0;
            break;
        case '{':
        case '[':
            r = nesting_push(&nest, s.p[i] == '{');
            break;
        case '}':
        case ']':
            r = nesting_pop(&nest, s.p[i] == '}');
            break;
        default:
            break;
        }
        if (r < 0)
            return 0;
        i++;
    } while (nest.depth > outer && i < s.n);
    return nest.depth > outer ? 0 : i;
}

/* Value at s.p[i] (no space before it) inside `outer` containers: the place behind it, or 0 when
 * malformed. */
static size_t value_end(struct slice s, size_t i, size_t outer)
{
    size_t at = i;

    if (i >= s.n)
        return 0;
    if (s.p[i] == '"') {
        i = string_end(s, i + 1);
        return i < s.n ? i + 1 : 0;
    }
    if (s.p[i] == '{' || s.p[i] == '[')
        return container_end(s, i, outer);
    while (i < s.n && scalar_byte(s.p[i]))
        i++;
    return i > at ? i : 0;
}

static struct slice sub(struct slice s, size_t from, size_t to)
{
    return (struct slice) { s.p + from, to - from };
}

int jp_json_value(struct slice s, struct slice *ret_value, struct slice *ret_rest)
{
    size_t from = skip_space(s, 0);
    size_t to = value_end(s, from, 0);

    if (!to)
        return -EINVAL;
    *ret_value = sub(s, from, to);
    *ret_rest = sub(s, to, s.n);
    return 0;
}

/* The shared walk of jp_json_member and jp_json_element: 1 = *pos is at the start of an item. */
static int next_item(struct slice s, size_t *pos, uint8_t open, uint8_t close)
{
    size_t i = skip_space(s, *pos);
    bool first = false;

    if (*pos == 0) {
        if (i >= s.n || s.p[i] != open)
            return -EINVAL;
        i = skip_space(s, i + 1);
        first = true;
    }
    if (i >= s.n)
        return -EINVAL;
    if (s.p[i] == close) {
        if (skip_space(s, i + 1) != s.n)
            return -EINVAL;
        return 0;
    }
    if (!first) {
        if (s.p[i] != ',')
            return -EINVAL;
        i = skip_space(s, i + 1);
    }
    *pos = i;
    return 1;
}

int jp_json_member(struct slice obj, size_t *pos, struct slice *ret_key, struct slice *ret_value)
{
    size_t i = *pos, key, key_end, value, end;
    int r = next_item(obj, &i, '{', '}');

    if (r <= 0)
        return r;
    if (i >= obj.n || obj.p[i] != '"')
        return -EINVAL;
    key = i + 1;
    key_end = string_end(obj, key);
    i = skip_space(obj, key_end + 1);
    if (i >= obj.n || obj.p[i] != ':')
        return -EINVAL;
    value = skip_space(obj, i + 1);
    end = value_end(obj, value, 1);
    if (!end)
        return -EINVAL;
    *ret_key = sub(obj, key, key_end);
    *ret_value = sub(obj, value, end);
    *pos = end;
    return 1;
}

int jp_json_element(struct slice array, size_t *pos, struct slice *ret_value)
{
    size_t i = *pos, end;
    int r = next_item(array, &i, '[', ']');

    if (r <= 0)
        return r;
    end = value_end(array, i, 1);
    if (!end)
        return -EINVAL;
    *ret_value = sub(array, i, end);
    *pos = end;
    return 1;
}

int jp_json_find(struct slice obj, const char *key, struct slice *ret_value)
{
    struct slice k, v, found = SLICE_NULL;
    size_t pos = 0;
    int r;

    while ((r = jp_json_member(obj, &pos, &k, &v)) > 0)
        if (jp_json_key_is(k, key))
            found = v;
    if (r < 0)
        return r;
    if (!found.p)
        return -ENOENT;
    *ret_value = found;
    return 0;
}

bool jp_json_is_object(struct slice value)
{
    struct slice v, rest;

    return jp_json_value(value, &v, &rest) == 0 && v.p[0] == '{' && skip_space(rest, 0) == rest.n;
}

/* ---- strings ---- */

static int hex4(struct slice s, size_t i, uint32_t *ret)
{
    uint32_t v = 0;

    if (i > s.n || s.n - i < 4)
        return -EINVAL;
    for (size_t k = i; k < i + 4; k++) {
        uint8_t c = s.p[k], low = c | 0x20;
        if (c >= '0' && c <= '9')
            v = v << 4 | (uint32_t)(c - '0');
        else if (low >= 'a' && low <= 'f')
            v = v << 4 | (uint32_t)(low - 'a' + 10);
        else
            return -EINVAL;
    }
    *ret = v;
    return 0;
}

static size_t put_utf8(char ret[4], uint32_t c)
{
    if (c < 0x80) {
        ret[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        ret[0] = (char)(0xc0 | c >> 6);
        ret[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        ret[0] = (char)(0xe0 | c >> 12);
        ret[1] = (char)(0x80 | (c >> 6 & 0x3f));
        ret[2] = (char)(0x80 | (c & 0x3f));
        return 3;
    }
    ret[0] = (char)(0xf0 | c >> 18);
    ret[1] = (char)(0x80 | (c >> 12 & 0x3f));
    ret[2] = (char)(0x80 | (c >> 6 & 0x3f));
    ret[3] = (char)(0x80 | (c & 0x3f));
    return 4;
}

/* \uXXXX at s.p[*i] (the backslash); a pair of surrogates is one character, a lone one and U+0000
 * (which would end a C string) are U+FFFD. */
static int unicode_escape(struct slice s, size_t *i, uint32_t *ret)
{
    uint32_t c, low;

    if (hex4(s, *i + 2, &c) < 0)
        return -EINVAL;
    *i += 6;
    if (c >= 0xd800 && c < 0xdc00 && s.n - *i >= 6 && s.p[*i] == '\\' && s.p[*i + 1] == 'u' &&
        hex4(s, *i + 2, &low) == 0 && low >= 0xdc00 && low < 0xe000) {
        *i += 6;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    *ret = c == 0 || (c >= 0xd800 && c < 0xe000) ? 0xfffd : c;
    return 0;
}

/* One character of the raw text between quotes: its UTF-8 into ret, *i moves on. Bytes, or
 * -EINVAL for a bad escape. */
static int decode_char(struct slice s, size_t *i, char ret[4])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    uint8_t c = s.p[*i];
    const char *at;
    uint32_t u;

    if (c == '\\') {
        if (s.n - *i < 2)
            return -EINVAL;
        c = s.p[*i + 1];
        if (c == 'u')
            return unicode_escape(s, i, &u) < 0 ? -EINVAL : (int)put_utf8(ret, u);
        at = c ? strchr(from, c) : NULL;
        if (!at)
            return -EINVAL;
        ret[0] = to[at - from];
        *i += 2;
        return 1;
    }
    size_t n = utf8_len(s.p + *i, s.n - *i);
    if (n == 0 || c == 0) {
        *i += 1;
        return (int)put_utf8(ret, 0xfffd);
    }
    memcpy(ret, s.p + *i, n);
    *i += n;
    return (int)n;
}

static int string_body(struct slice value, struct slice *ret)
{
    struct slice v, rest;

    if (jp_json_value(value, &v, &rest) < 0 || v.p[0] != '"' || skip_space(rest, 0) != rest.n)
        return -EINVAL;
    *ret = sub(v, 1, v.n - 1);
    return 0;
}

/* Bytes from s.p[i] that decode to themselves: ASCII but NUL and backslash. Whole words only. */
static size_t plain_run(struct slice s, size_t i)
{
    size_t from = i;

    while (i + 8 <= s.n) {
        uint64_t w = load8(s.p + i);
        if ((w & HIGHS) | bytes_equal(w, '\\') | bytes_equal(w, 0))
            break;
        i += 8;
    }
    return i - from;
}

static int decode_body(struct slice s, char *out, size_t size, size_t *ret_len)
{
    size_t len = 0;

    if (size == 0)
        return -ENOBUFS;
    for (size_t i = 0; i < s.n;) {
        size_t run = plain_run(s, i);
        char c[4];
        int n;

        if (run >= size - len)
            return -ENOBUFS;
        memcpy(out + len, s.p + i, run);
        len += run;
        i += run;
        if (i == s.n)
            break;
        n = decode_char(s, &i, c);
        if (n < 0)
            return n;
        if ((size_t)n >= size - len)
            return -ENOBUFS;
        memcpy(out + len, c, (size_t)n);
        len += (size_t)n;
    }
    out[len] = '\0';
    *ret_len = len;
    return 0;
}

int jp_json_decode(struct slice value, char *out, size_t size, size_t *ret_len)
{
    if (value.n < 2 || value.p[0] != '"')
        return -EINVAL;
    return decode_body(sub(value, 1, value.n - 1), out, size, ret_len);
}

int jp_json_string(struct slice value, char *out, size_t size)
{
    struct slice s;
    size_t len;

    if (string_body(value, &s) < 0)
        return -EINVAL;
    return decode_body(s, out, size, &len);
}

int jp_json_string_dup(struct slice value, size_t max, char **ret)
{
    struct slice s;
    size_t size;
    char *text;
    int r;

    if (string_body(value, &s) < 0)
        return -EINVAL;
    /* Decoding never makes text longer but where a malformed byte becomes three. */
    size = s.n > (SIZE_MAX - 1) / 3 || s.n * 3 > max ? max : s.n * 3;
    text = malloc(size + 1);
    if (!text)
        return -ENOMEM;
    r = jp_json_string(value, text, size + 1);
    if (r < 0) {
        free(text);
        return r;
    }
    *ret = text;
    return 0;
}

bool jp_json_key_is(struct slice raw, const char *key)
{
    return jp_json_key_eq(raw, slice_str(key));
}

bool jp_json_key_eq(struct slice raw, struct slice key)
{
    size_t at = 0;
    char c[4];

    if (raw.n == key.n)
        return memcmp(raw.p, key.p, key.n) == 0;
    if (raw.n < key.n || !memchr(raw.p, '\\', raw.n))
        return false; /* an escaped spelling is longer than the key */
    for (size_t i = 0; i < raw.n;) {
        int k = decode_char(raw, &i, c);
        if (k < 0 || at + (size_t)k > key.n || memcmp(key.p + at, c, (size_t)k) != 0)
            return false;
        at += (size_t)k;
    }
    return at == key.n;
}

/* ---- tokens that are not JSON ---- */

size_t jp_json_token(struct slice s, size_t i, bool *ret_nonfinite)
{
    struct slice t = { s.p + i, 0 };

    while (i < s.n && scalar_byte(s.p[i]))
        i++;
    t.n = (size_t)(s.p + i - t.p);
    if (t.n && t.p[0] == '-')
        t = sub(t, 1, t.n);
    *ret_nonfinite =
        (t.n == 3 && memcmp(t.p, "NaN", 3) == 0) || (t.n == 8 && memcmp(t.p, "Infinity", 8) == 0);
    return i;
}

static bool find_nonfinite(struct slice s)
{
    bool found = false;

    for (size_t i = 0; i < s.n && !found;) {
        size_t end;
        if (s.p[i] == '"') {
            i = string_end(s, i + 1) + 1;
            continue;
        }
        end = jp_json_token(s, i, &found);
        i = end > i ? end : i + 1;
    }
    return found;
}

/* memchr is many times faster than memmem; even in base64 the first letter is rare enough. */
static bool has_word(struct slice s, const char *word, size_t n)
{
    const uint8_t *end = s.p + s.n, *at = s.p;

    while ((size_t)(end - at) >= n && (at = memchr(at, word[0], (size_t)(end - at) - n + 1))) {
        if (memcmp(at, word, n) == 0)
            return true;
        at++;
    }
    return false;
}

bool jp_json_has_nonfinite(struct slice value)
{
    /* Text that holds neither word has neither token. */
    return (has_word(value, "NaN", 3) || has_word(value, "Infinity", 8)) && find_nonfinite(value);
}
