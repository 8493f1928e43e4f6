#pragma once
/* Method + path -> handler. Patterns are below base_url: "/api/kernels/{}/interrupt"; "{}" is one
 * segment, "{*}" at the end the rest (one or more segments). A HEAD is answered by the GET handler,
 * OPTIONS by the server itself. */
#include <stdbool.h>
#include <stddef.h>

enum gw_method { GW_GET, GW_HEAD, GW_POST, GW_PUT, GW_PATCH, GW_DELETE, GW_OPTIONS, GW_METHODS };
const char *gw_method_name(enum gw_method m);

struct gw_req;
typedef void (*gw_handler)(struct gw_req *r);

enum {
    GW_ROUTE_OPEN = 1,    /* no credentials needed */
    GW_ROUTE_METRICS = 2, /* open when the configuration says so */
    GW_ROUTE_PAGE = 4,    /* HTML or assets: no API security policy header */
    GW_ROUTE_WS = 8,      /* websocket upgrades only */
};
struct gw_route {
    enum gw_method method;
    const char *pattern;
    gw_handler fn;
    unsigned flags;
};

#define GW_ROUTE_ARGS 2
#define GW_SEGMENT_MAX 256
struct gw_match {
    const struct gw_route *route;            /* NULL: see status */
    int status;                              /* 200, 404, 405 */
    char allow[80];                          /* for 405 and OPTIONS: "GET, HEAD, OPTIONS" */
    char arg[GW_ROUTE_ARGS][GW_SEGMENT_MAX]; /* what {} and {*} matched */
};
/* Find (method, path). The path is known when any method has it: then status is 200 or 405 and
 * allow is filled; OPTIONS gives 200 with route = some route of that path. */
void gw_routes_match(const struct gw_route *table, size_t n, enum gw_method method,
                     const char *path, struct gw_match *ret);
