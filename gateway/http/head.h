#pragma once
/* Reading a request head out of libwebsockets, with our limits. */
#include "gateway/http/request.h"

struct gw_conn;
struct gw_framing {
    int status; /* refuse with this (why says it), 0 = fine */
    const char *why;
    bool keepalive; /* HTTP version and Connection header allow it */
    bool chunked;
    bool expect_continue;
    uint64_t length; /* Content-Length */
};
/* Never NULL; with ret->status set the request is good for an error reply only. */
struct gw_req *gw_head_read(struct gw_conn *c, struct gw_framing *ret);
/* Sub-checks, pure, for unit tests. Content-Length text ("" = none) and Transfer-Encoding. */
void gw_framing_of(struct gw_framing *f, enum gw_method m, const char *length,
                   const char *encoding);
bool gw_keepalive_of(const char *version, const char *connection);
/* Heap copy of a header, NULL when absent. tok: enum lws_token_indexes. */
char *gw_head_copy(struct gw_conn *c, int tok);
