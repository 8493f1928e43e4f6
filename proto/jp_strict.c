/* Strict JSON for browsers: the one place where a message part is rewritten, and only when it must
 * be (jp_priv.h). */
#include "common/utf8.h"
#include "proto/jp_priv.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Does s hold a byte that needs care: a control character other than JSON white space, or one of a
 * multi-byte sequence? Eight bytes a step. *ret_high: any byte >= 0x80. */
static bool has_control(struct slice s, bool *ret_high)
{
    const uint64_t ones = UINT64_C(0x0101010101010101), highs = ones << 7;
    uint64_t low = 0, high = 0;
    bool control = false;
    size_t i = 0;

    for (; i + 8 <= s.n; i += 8) {
        uint64_t w;
        memcpy(&w, s.p + i, sizeof(w));
        high |= w & highs;
        low |= (w - ones * 0x20) & ~w & highs; /* some byte < 0x20 */
    }
    for (; i < s.n; i++) {
        high |= s.p[i] & 0x80;
        control = control || s.p[i] < 0x20;
    }
    *ret_high = high != 0;
    return control || low != 0;
}

static bool utf8_ok(struct slice s)
{
    for (size_t i = 0; i < s.n;) {
        size_t n = utf8_len(s.p + i, s.n - i);
        if (n == 0)
            return false;
        i += n;
    }
    return true;
}

/* Copies with corrections; runs that need none are copied whole. */
struct rewrite {
    struct buf *out;
    struct slice s;
    size_t plain; /* start of the run not yet copied */
    int r;
};

static void replace(struct rewrite *w, size_t from, size_t to, const char *text)
{
    if (w->r == 0)
        w->r = buf_append(w->out, w->s.p + w->plain, from - w->plain);
    if (w->r == 0)
        w->r = buf_append_str(w->out, text);
    w->plain = to;
}

/* One byte or character of a string from i; the place behind it. */
static size_t fix_in_string(struct rewrite *w, size_t i)
{
    uint8_t c = w->s.p[i];
    size_t n;

    if (c == '\\') {
        if (i + 1 < w->s.n && w->s.p[i + 1] && strchr("\"\\/bfnrtu", w->s.p[i + 1]))
            return i + 2;
        replace(w, i, i + 1, "\\\\"); /* not an escape: stands for itself */
        return i + 1;
    }
    if (c < 0x20) {
        static const char hex[] = "0123456789abcdef";
        char esc[] = { '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15], 0 };
        replace(w, i, i + 1, esc);
        return i + 1;
    }
    n = utf8_len(w->s.p + i, w->s.n - i);
    if (n == 0) {
        replace(w, i, i + 1, UTF8_REPLACEMENT);
        return i + 1;
    }
    return i + n;
}

static int rewrite(struct buf *out, struct slice s)
{
    struct rewrite w = { out, s, 0, 0 };
    bool in_string = false, nonfinite;
    size_t end;

    for (size_t i = 0; i < s.n && w.r == 0;) {
        uint8_t c = s.p[i];
        if (c == '"') {
            in_string = !in_string;
            i++;
        } else if (in_string) {
            i = fix_in_string(&w, i);
        } else if ((end = jp_json_token(s, i, &nonfinite)) > i) {
            if (nonfinite)
                replace(&w, i, end, "null");
            i = end;
        } else if (c >= 0x80 || (c < 0x20 && c != '\n' && c != '\r' && c != '\t')) {
            replace(&w, i, i + 1, " "); /* stray byte between tokens */
            i++;
        } else {
            i++;
        }
    }
    replace(&w, s.n, s.n, "");
    return w.r;
}

static bool blank(struct slice s)
{
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] != ' ' && s.p[i] != '\n' && s.p[i] != '\r' && s.p[i] != '\t')
            return false;
    return true;
}

int jp_json_append_strict(struct buf *out, struct slice value)
{
    size_t before = out->len;
    struct slice v, rest;
    bool high, care;
    int r;

    if (jp_json_value(value, &v, &rest) < 0 || v.p[0] != '{' || !blank(rest))
        return buf_append_str(out, "{}");
    care = has_control(v, &high);
    if (!care && high)
        care = !utf8_ok(v);
    if (!care)
        care = jp_json_has_nonfinite(v);
    r = care ? rewrite(out, v) : buf_append_slice(out, v);
    if (r < 0)
        buf_truncate(out, before);
    return r;
}
