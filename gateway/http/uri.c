/* Paths and queries; see uri.h. */
#include "gateway/http/uri.h"
#include "common/mem.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool unreserved(uint8_t c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.' || c == '~';
}

int gw_base_normalise(const char *in, char **ret, struct err *e)
{
    if (!in)
        in = "";
    size_t n = strlen(in), o = 0;
    char *out = xmalloc(n + 3);
    out[o++] = '/';
    for (size_t i = 0; i < n; i++) {
        if (in[i] == '/') {
            if (out[o - 1] != '/')
                out[o++] = '/';
        } else if (unreserved((uint8_t)in[i]) || in[i] == '@' || in[i] == '+') {
            out[o++] = in[i];
        } else {
            free(out);
            return err_set(
                e, -EINVAL,
                "base_url \"%s\": use letters, digits, '-', '_', '.', '~', '@' and '/' only", in);
        }
    }
    if (out[o - 1] != '/')
        out[o++] = '/';
    out[o] = 0;
    if (strstr(out, "/../") || strstr(out, "/./")) {
        free(out);
        return err_set(e, -EINVAL, "base_url \"%s\": no \".\" or \"..\" parts, please", in);
    }
    *ret = out;
    return 0;
}

const char *gw_base_strip(const char *base, const char *path)
{
    size_t n = strlen(base) - 1; /* without the last slash */
    if (strncmp(path, base, n) != 0)
        return NULL;
    if (path[n] == 0)
        return "/";
    return path[n] == '/' ? path + n : NULL;
}

int gw_uri_encode(struct buf *out, const char *path, const char *keep)
{
    static const char hex[] = "0123456789ABCDEF";
    for (const char *p = path; *p; p++) {
        uint8_t c = (uint8_t)*p;
        int r;
        if (unreserved(c) || c == '/' || (keep && strchr(keep, c)))
            r = buf_append_byte(out, c);
        else
            r = buf_append(out, (char[]) { '%', hex[c >> 4], hex[c & 15] }, 3);
        if (r)
            return r;
    }
    return 0;
}

const char *gw_query_get(char *const *args, size_t n, const char *name)
{
    size_t len = strlen(name);
    for (size_t i = 0; i < n; i++) {
        if (strncmp(args[i], name, len) != 0)
            continue;
        if (args[i][len] == '=')
            return args[i] + len + 1;
        if (!args[i][len])
            return "";
    }
    return NULL;
}

bool gw_segment_ok(const char *s)
{
    if (!*s || strcmp(s, ".") == 0 || strcmp(s, "..") == 0)
        return false;
    for (; *s; s++)
        if (*s == '/' || (uint8_t)*s < 0x20 || *s == 0x7f)
            return false;
    return true;
}
