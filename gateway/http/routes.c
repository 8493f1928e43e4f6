/* Route matching; see routes.h. Tables are short: a linear walk is fine. */
#include "gateway/http/routes.h"
#include <stdio.h>
#include <string.h>

static const char *const names[GW_METHODS] = {
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS",
};

const char *gw_method_name(enum gw_method m)
{
    return m < GW_METHODS ? names[m] : "?";
}

static bool take_arg(struct gw_match *m, size_t *n_args, const char *p, size_t len)
{
    if (!len || len >= GW_SEGMENT_MAX || *n_args >= GW_ROUTE_ARGS)
        return false;
    memcpy(m->arg[*n_args], p, len);
    m->arg[*n_args][len] = 0;
    (*n_args)++;
    return true;
}

/* Does path match pattern? Fills m->arg. */
static bool match(const char *pattern, const char *path, struct gw_match *m)
{
    size_t n_args = 0;
    while (*pattern) {
        if (strcmp(pattern, "{*}") == 0)
            return take_arg(m, &n_args, path, strlen(path));
        if (strncmp(pattern, "{}", 2) == 0) {
            size_t len = strcspn(path, "/");
            if (!take_arg(m, &n_args, path, len))
                return false;
            path += len;
            pattern += 2;
        } else if (*pattern++ != *path++) {
            return false;
        }
    }
    return !*path;
}

static void build_allow(unsigned methods, char *ret, size_t size)
{
    if (methods & 1u << GW_GET)
        methods |= 1u << GW_HEAD;
    methods |= 1u << GW_OPTIONS;
    size_t o = 0;
    ret[0] = 0;
    for (unsigned i = 0; i < GW_METHODS; i++)
        if (methods & 1u << i) {
            int n = snprintf(ret + o, size - o, "%s%s", o ? ", " : "", names[i]);
            o += (size_t)n < size - o ? (size_t)n : size - o - 1;
        }
}

void gw_routes_match(const struct gw_route *table, size_t n, enum gw_method method,
                     const char *path, struct gw_match *ret)
{
    unsigned seen = 0;
    enum gw_method want = method == GW_HEAD ? GW_GET : method;
    memset(ret, 0, sizeof(*ret));
    for (size_t i = 0; i < n; i++) {
        struct gw_match m;
        memset(&m, 0, sizeof(m));
        if (!match(table[i].pattern, path, &m))
            continue;
        if (!seen || table[i].method == want) {
            memcpy(ret->arg, m.arg, sizeof(m.arg));
            if (method == GW_OPTIONS || table[i].method == want)
                ret->route = &table[i];
        }
        seen |= 1u << table[i].method;
    }
    ret->status = !seen ? 404 : ret->route ? 200 : 405;
    if (seen)
        build_allow(seen, ret->allow, sizeof(ret->allow));
}
