#include "common/slice.h"
#include "common/mem.h"
#include <string.h>

struct slice slice_of(const void *p, size_t n)
{
    return (struct slice) { p, n };
}

struct slice slice_str(const char *s)
{
    return s ? (struct slice) { (const uint8_t *)s, strlen(s) } : SLICE_NULL;
}

bool slice_eq(struct slice a, struct slice b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

bool slice_eq_str(struct slice a, const char *s)
{
    return slice_eq(a, slice_str(s));
}

bool slice_starts(struct slice a, const char *prefix)
{
    size_t n = strlen(prefix);
    return a.n >= n && (n == 0 || memcmp(a.p, prefix, n) == 0);
}

char *slice_dup(struct slice s)
{
    char *d = xmalloc(s.n + 1);
    if (s.n)
        memcpy(d, s.p, s.n);
    d[s.n] = '\0';
    return d;
}
