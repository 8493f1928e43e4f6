#pragma once
/* Who is asking. A token may come in four forms (jupyter.md 1.8): `Authorization: token X` or
 * `Bearer X` (scheme in any case), the password of HTTP Basic, `?token=X`, and a cookie set by
 * /login. Comparison is constant time; an empty token is no credential. Tokens never reach a log.
 *
 * The cookie holds no token: it is "<expiry>.<n>.<hmac>", keyed by a digest of token n, so that it
 * survives a restart and dies with its token. A request that relies on the cookie alone must prove
 * that it is no cross-site forgery: the `_xsrf` cookie repeated in X-XSRFToken or ?_xsrf=. */
#include "common/err.h"
#include "common/slice.h"
#include "gateway/gateway.h"
#include "gateway/http/routes.h"

struct gw_auth;
/* Copies the tokens. base (normalised), port and tls shape the cookies. -EINVAL: no token and not
 * no_auth; a token that is empty, or is used by two principals. */
int gw_auth_new(const struct gw_config *c, struct gw_auth **ret, struct err *e);
void gw_auth_free(struct gw_auth *a);
/* Where cookies live: known only after the port is bound. */
void gw_auth_set_place(struct gw_auth *a, const char *base, unsigned port, bool tls);

enum gw_auth_how {
    GW_AUTH_NONE,   /* no usable credential: 401 (403 on a websocket) */
    GW_AUTH_OPEN,   /* no_auth: everybody is "anonymous" */
    GW_AUTH_TOKEN,  /* explicit: header, Basic or query */
    GW_AUTH_COOKIE, /* ambient: origin and XSRF rules apply */
};
struct gw_credentials { /* header values as sent, NULL = absent */
    const char *authorization, *query_token, *cookie;
};
struct gw_identity {
    enum gw_auth_how how;
    const char *principal; /* NULL with GW_AUTH_NONE; lives as long as the gw_auth */
    bool tried;            /* a non-empty credential was there and did not match */
};
/* now_s: UTC seconds. Explicit credentials win over the cookie; a wrong explicit one is not rescued
 * by a good cookie. */
void gw_auth_check(const struct gw_auth *a, const struct gw_credentials *c, uint64_t now_s,
                   struct gw_identity *ret);
/* May a request that came with the cookie do this? header: X-XSRFToken; query: _xsrf; both may be
 * NULL. GET, HEAD and OPTIONS always may. */
bool gw_auth_xsrf_ok(enum gw_method m, const char *cookie, const char *header, const char *query);

#define GW_COOKIE_TTL_S (30u * 24 * 3600)
/* The principal of a token presented to /login, or NULL. */
const char *gw_auth_token(const struct gw_auth *a, const char *token);
/* Append "Set-Cookie: ...\r\n" lines for the session and, when the request has none yet, for _xsrf.
 * -EINVAL: not a token of ours. */
int gw_auth_set_cookies(const struct gw_auth *a, const char *token, const char *request_cookie,
                        uint64_t now_s, struct buf *out);
/* The line(s) that make a browser forget them. */
int gw_auth_clear_cookies(const struct gw_auth *a, struct buf *out);
/* Value of a cookie in a Cookie header; empty slice when it is not there. */
struct slice gw_cookie_get(const char *header, const char *name);
/* May this principal end the whole server? Only when it is the only one, or is called "admin". */
bool gw_auth_may_shutdown(const struct gw_auth *a, const char *principal);
