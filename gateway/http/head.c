/* Request heads; see head.h. */
#include "gateway/http/head.h"
#include <errno.h>
#include <string.h>
#include <strings.h>

static const struct {
    const char *name;
    enum gw_header id;
} known[] = {
    { "host", GW_H_HOST },
    { "origin", GW_H_ORIGIN },
    { "authorization", GW_H_AUTHORIZATION },
    { "cookie", GW_H_COOKIE },
    { "x-xsrftoken", GW_H_XSRF },
    { "content-type", GW_H_CONTENT_TYPE },
    { "content-length", GW_H_CONTENT_LENGTH },
    { "transfer-encoding", GW_H_TRANSFER_ENCODING },
    { "connection", GW_H_CONNECTION },
    { "upgrade", GW_H_UPGRADE },
    { "expect", GW_H_EXPECT },
    { "user-agent", GW_H_USER_AGENT },
    { "if-none-match", GW_H_IF_NONE_MATCH },
    { "access-control-request-headers", GW_H_AC_REQUEST_HEADERS },
    { "sec-websocket-key", GW_H_WS_KEY },
    { "sec-websocket-version", GW_H_WS_VERSION },
    { "sec-websocket-protocol", GW_H_WS_PROTOCOL },
};

static int refuse(struct gw_head *h, int status, const char *why)
{
    if (!h->status) {
        h->status = status;
        h->why = why;
    }
    return 1;
}

static bool is_token_char(uint8_t c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_token(struct slice s)
{
    for (size_t i = 0; i < s.n; i++)
        if (!is_token_char(s.p[i]))
            return false;
    return s.n > 0;
}

static bool same(struct slice s, const char *name)
{
    return s.n == strlen(name) && strncasecmp((const char *)s.p, name, s.n) == 0;
}

static struct slice trim(struct slice s)
{
    while (s.n && (s.p[0] == ' ' || s.p[0] == '\t'))
        s.p++, s.n--;
    while (s.n && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t'))
        s.n--;
    return s;
}

/* "GET /path HTTP/1.1" */
static void request_line(struct gw_head *h, struct slice line)
{
    const uint8_t *sp = memchr(line.p, ' ', line.n);
    size_t n = sp ? (size_t)(sp - line.p) : 0;
    struct slice method = slice_of(line.p, n);
    if (!sp || !is_token(method)) {
        refuse(h, 400, "This is no HTTP request");
        return;
    }
    struct slice rest = slice_of(sp + 1, line.n - n - 1);
    if (rest.n < 9 || memcmp(rest.p + rest.n - 9, " HTTP/1.", 8) != 0) {
        refuse(h, rest.n >= 9 && memcmp(rest.p + rest.n - 9, " HTTP/", 6) == 0 ? 505 : 400,
               "Only HTTP/1.0 and HTTP/1.1 are spoken here");
        return;
    }
    uint8_t minor = rest.p[rest.n - 1];
    h->http11 = minor != '0';
    h->target = slice_of(rest.p, rest.n - 9);
    bool bad = minor < '0' || minor > '9' || !h->target.n;
    for (size_t i = 0; i < h->target.n; i++)
        bad = bad || h->target.p[i] <= ' ' || h->target.p[i] == 0x7f;
    if (bad)
        refuse(h, 400, "The request line is malformed");
    else if (h->target.n > GW_URI_MAX)
        refuse(h, 414, "The URI is too long");
    for (unsigned m = 0; m < GW_METHODS; m++)
        if (slice_eq_str(method, gw_method_name((enum gw_method)m))) {
            h->method = (enum gw_method)m;
            return;
        }
    refuse(h, 501, "This method is not supported");
}

static void header_line(struct gw_head *h, struct slice line)
{
    const uint8_t *colon = memchr(line.p, ':', line.n);
    size_t n = colon ? (size_t)(colon - line.p) : 0;
    if (!is_token(slice_of(line.p, n))) {
        refuse(h, 400, "A header line is malformed");
        return;
    }
    struct slice value = trim(slice_of(colon + 1, line.n - n - 1));
    for (size_t i = 0; i < value.n; i++)
        if (value.p[i] < 0x20 && value.p[i] != '\t') {
            refuse(h, 400, "A header holds a control character");
            return;
        }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (!same(slice_of(line.p, n), known[i].name))
            continue;
        enum gw_header id = known[i].id;
        h->repeated[id] = h->header[id].p != NULL;
        if (!h->header[id].p)
            h->header[id] = value;
        return;
    }
}

bool gw_list_has(struct slice list, const char *token)
{
    size_t at = 0;
    while (at < list.n) {
        size_t end = at;
        while (end < list.n && list.p[end] != ',')
            end++;
        if (same(trim(slice_of(list.p + at, end - at)), token))
            return true;
        at = end + 1;
    }
    return false;
}

static void framing(struct gw_head *h)
{
    struct slice length = h->header[GW_H_CONTENT_LENGTH], enc = h->header[GW_H_TRANSFER_ENCODING];
    if (h->repeated[GW_H_CONTENT_LENGTH] || h->repeated[GW_H_TRANSFER_ENCODING] ||
        h->repeated[GW_H_HOST]) {
        refuse(h, 400, "Host, Content-Length and Transfer-Encoding may come once only");
        return;
    }
    if (enc.p && length.p) {
        refuse(h, 400, "Content-Length and Transfer-Encoding exclude each other");
        return;
    }
    if (enc.p && !same(enc, "chunked")) {
        refuse(h, 501, "No other transfer coding than chunked is understood");
        return;
    }
    if (enc.p && !h->http11) {
        refuse(h, 400, "HTTP/1.0 has no chunked bodies");
        return;
    }
    h->chunked = enc.p != NULL;
    if (!length.p)
        return;
    if (!length.n || length.n > 18) {
        refuse(h, 400, "The Content-Length is no number");
        return;
    }
    for (size_t i = 0; i < length.n; i++) {
        if (length.p[i] < '0' || length.p[i] > '9') {
            refuse(h, 400, "The Content-Length is no number");
            return;
        }
        h->length = h->length * 10 + (length.p[i] - '0');
    }
}

static void derive(struct gw_head *h)
{
    struct slice conn = h->header[GW_H_CONNECTION];
    framing(h);
    if (h->http11 && !h->header[GW_H_HOST].p)
        refuse(h, 400, "The Host header is missing");
    h->keepalive = h->http11 ? !gw_list_has(conn, "close") : gw_list_has(conn, "keep-alive");
    h->expect_continue = h->http11 && same(h->header[GW_H_EXPECT], "100-continue");
    h->upgrade_ws = gw_list_has(h->header[GW_H_UPGRADE], "websocket");
}

/* Next line of in from *at, without its end (CRLF or LF). False: no line end within the limit. */
static bool next_line(struct slice in, size_t *at, struct slice *ret)
{
    const uint8_t *nl = memchr(in.p + *at, '\n', in.n - *at);
    if (!nl)
        return false;
    size_t n = (size_t)(nl - (in.p + *at));
    *ret = slice_of(in.p + *at, n && nl[-1] == '\r' ? n - 1 : n);
    *at += n + 1;
    return true;
}

static int too_long(struct slice in, struct gw_head *h)
{
    if (in.n <= GW_HEAD_MAX)
        return 0;
    h->size = in.n;
    return h->target.n ? refuse(h, 431, "The request headers are too long")
                       : refuse(h, 414, "The request line is too long");
}

/* No request line yet. Bytes that cannot start one (TLS on a plain port) are not waited for. */
static int no_line(struct slice in, size_t at, struct gw_head *h)
{
    if (at < in.n && in.p[at] != '\r' && !is_token_char(in.p[at])) {
        h->size = in.n;
        return refuse(h, 400, "This is no HTTP request");
    }
    return too_long(in, h);
}

int gw_head_parse(struct slice in, struct gw_head *h)
{
    struct slice line;
    size_t at = 0;
    unsigned n = 0;
    memset(h, 0, sizeof(*h));
    do { /* RFC 9112 2.2: an empty line or two before a request are forgiven */
        if (!next_line(in, &at, &line))
            return no_line(in, at, h);
    } while (!line.n);
    request_line(h, line);
    for (;;) {
        if (h->status && h->status != 414 && h->status != 501) {
            h->size = at;
            return 1; /* no sense in waiting for the rest */
        }
        if (!next_line(in, &at, &line))
            return too_long(in, h);
        if (at > GW_HEAD_MAX)
            return too_long(slice_of(in.p, at), h);
        if (!line.n)
            break;
        if (++n > GW_HEAD_HEADERS)
            refuse(h, 431, "There are too many request headers");
        else
            header_line(h, line);
    }
    h->size = at;
    derive(h);
    return 1;
}

/* ---- targets ---- */

static int hex(uint8_t c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* %XX at s[i]: its value, or -1. */
static int escape(struct slice s, size_t i)
{
    if (i + 2 >= s.n || hex(s.p[i + 1]) < 0 || hex(s.p[i + 2]) < 0)
        return -1;
    return hex(s.p[i + 1]) * 16 + hex(s.p[i + 2]);
}

static int decode_segment(struct slice seg, char *out, size_t size, size_t *ret_n)
{
    size_t o = 0;
    bool escaped = false;
    for (size_t i = 0; i < seg.n; i++) {
        int c = seg.p[i];
        if (c == '%') {
            c = escape(seg, i);
            if (c <= 0)
                return -EINVAL;
            if (c == '/')
                return -ENOENT;
            escaped = true;
            i += 2;
        }
        if (!c || o + 1 >= size)
            return -EINVAL;
        out[o++] = (char)c;
    }
    out[o] = 0;
    if (escaped && (strcmp(out, ".") == 0 || strcmp(out, "..") == 0))
        return -ENOENT;
    *ret_n = o;
    return 0;
}

/* "http://host/path" -> "/path"; other forms unchanged. */
static struct slice strip_authority(struct slice t)
{
    if (!t.n || t.p[0] == '/' || t.p[0] == '*')
        return t;
    const uint8_t *s = memmem(t.p, t.n, "://", 3);
    if (!s)
        return t;
    size_t at = (size_t)(s - t.p) + 3;
    while (at < t.n && t.p[at] != '/' && t.p[at] != '?')
        at++;
    return slice_of(t.p + at, t.n - at);
}

/* ".", ".." and empty segments; *o is the length of out. last: nothing follows. */
static bool dot_segment(struct slice seg, bool last, char *out, size_t size, size_t *o)
{
    bool up = slice_eq_str(seg, "..");
    if (seg.n && !up && !slice_eq_str(seg, "."))
        return false;
    if (up)
        while (*o && out[--*o] != '/')
            ;
    /* "a/", "a/." and "a/b/.." name the folder. */
    if (last && *o + 1 < size && (!*o || out[*o - 1] != '/'))
        out[(*o)++] = '/';
    out[*o] = 0;
    return true;
}

static int decode_path(struct slice path, char *out, size_t size)
{
    size_t o = 0, at = 0;
    out[0] = 0;
    while (at < path.n) {
        size_t end = ++at, n = 0; /* behind the slash */
        while (end < path.n && path.p[end] != '/')
            end++;
        struct slice seg = slice_of(path.p + at, end - at);
        at = end;
        if (dot_segment(seg, end == path.n, out, size, &o))
            continue;
        if (o + 2 >= size)
            return -EINVAL;
        out[o++] = '/';
        int r = decode_segment(seg, out + o, size - o, &n);
        if (r)
            return r;
        o += n;
    }
    if (!o)
        memcpy(out, "/", 2);
    return 0;
}

int gw_target_split(struct slice target, char *out, size_t size, struct slice *ret_query)
{
    struct slice t = strip_authority(target);
    const uint8_t *q = t.n ? memchr(t.p, '?', t.n) : NULL;
    *ret_query = q ? slice_of(q + 1, (size_t)(t.p + t.n - q) - 1) : SLICE_NULL;
    struct slice path = slice_of(t.p, q ? (size_t)(q - t.p) : t.n);
    if (size < 2 || (path.n && path.p[0] != '/'))
        return -EINVAL;
    return decode_path(path, out, size);
}

void gw_query_decode(struct slice arg, char *out, size_t size)
{
    size_t o = 0;
    for (size_t i = 0; i < arg.n && o + 1 < size; i++) {
        int c = arg.p[i];
        int esc = c == '%' ? escape(arg, i) : -1;
        if (esc > 0) {
            c = esc;
            i += 2;
        } else if (c == '+') {
            c = ' ';
        }
        out[o++] = (char)c;
    }
    out[o] = 0;
}
