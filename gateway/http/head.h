#pragma once
/* The head of an HTTP/1.1 request (RFC 9112), parsed from bytes: pure, hostile input, fuzzed.
 * Whatever two parsers could read differently is refused: bare CR, folded lines, space before a
 * colon, repeated framing headers, both lengths. */
#include "common/slice.h"
#include "gateway/http/routes.h"

#define GW_HEAD_MAX (32u << 10) /* request line and headers: 431 */
#define GW_URI_MAX (8u << 10)   /* path and query: 414 */
#define GW_HEAD_HEADERS 100u    /* more: 431 */

enum gw_header {
    GW_H_HOST,
    GW_H_ORIGIN,
    GW_H_AUTHORIZATION,
    GW_H_COOKIE,
    GW_H_XSRF,
    GW_H_CONTENT_TYPE,
    GW_H_CONTENT_LENGTH,
    GW_H_TRANSFER_ENCODING,
    GW_H_CONNECTION,
    GW_H_UPGRADE,
    GW_H_EXPECT,
    GW_H_USER_AGENT,
    GW_H_IF_NONE_MATCH,
    GW_H_AC_REQUEST_HEADERS,
    GW_H_WS_KEY,
    GW_H_WS_VERSION,
    GW_H_WS_PROTOCOL,
    GW_HEADERS,
};

struct gw_head {
    enum gw_method method;
    struct slice target;             /* as sent */
    struct slice header[GW_HEADERS]; /* first line of that name; {0} = absent */
    bool repeated[GW_HEADERS];       /* came more than once */
    bool http11;
    size_t size; /* bytes of the head with its empty line */
    /* derived */
    bool keepalive, chunked, expect_continue, upgrade_ws;
    uint64_t length; /* Content-Length */
    int status;      /* refuse with this; 0 = fine */
    const char *why;
};
/* 0: more bytes are needed; 1: ret is complete (look at status; slices point into in). Leading
 * empty lines are skipped (and counted in size). A head over its limit is complete with status
 * 431/414; then, as with every status, nothing behind it can be trusted: answer and close. */
int gw_head_parse(struct slice in, struct gw_head *ret);

/* Split and decode a request target: path into out (decoded once; "." and ".." segments resolved,
 * empty ones dropped) and the raw query. 0; -EINVAL: bad escape or NUL; -ENOENT: a segment that
 * holds an encoded '/' or is an encoded "." or "..": no such thing can exist here (case-138). */
int gw_target_split(struct slice target, char *out, size_t size, struct slice *ret_query);
/* Decode one query argument ("a=b", '+' is a space) in place of %XX; bad escapes stay.
 * NUL-terminates. */
void gw_query_decode(struct slice arg, char *out, size_t size);
/* Does a comma list ("keep-alive, Upgrade") hold this token, in any case? */
bool gw_list_has(struct slice list, const char *token);
