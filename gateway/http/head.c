/* Request heads; see head.h. Framing rules: RFC 9112 section 6; anything ambiguous is refused and
 * the connection closed, so that no second reading of the same bytes is possible. */
#include "gateway/http/head.h"
#include "common/mem.h"
#include "gateway/http/conn.h"
#include <libwebsockets.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const struct {
    int tok;
    enum gw_header header;
} copied[] = {
    { WSI_TOKEN_HOST, GW_H_HOST },
    { WSI_TOKEN_ORIGIN, GW_H_ORIGIN },
    { WSI_TOKEN_HTTP_AUTHORIZATION, GW_H_AUTHORIZATION },
    { WSI_TOKEN_HTTP_COOKIE, GW_H_COOKIE },
    { WSI_TOKEN_HTTP_CONTENT_TYPE, GW_H_CONTENT_TYPE },
    { WSI_TOKEN_HTTP_USER_AGENT, GW_H_USER_AGENT },
    { WSI_TOKEN_HTTP_IF_NONE_MATCH, GW_H_IF_NONE_MATCH },
    { WSI_TOKEN_HTTP_AC_REQUEST_HEADERS, GW_H_AC_REQUEST_HEADERS },
};

static enum gw_method method_of(int lws_method)
{
    switch (lws_method) {
    case LWSHUMETH_GET:
        return GW_GET;
    case LWSHUMETH_POST:
        return GW_POST;
    case LWSHUMETH_OPTIONS:
        return GW_OPTIONS;
    case LWSHUMETH_PUT:
        return GW_PUT;
    case LWSHUMETH_PATCH:
        return GW_PATCH;
    case LWSHUMETH_DELETE:
        return GW_DELETE;
    case LWSHUMETH_HEAD:
        return GW_HEAD;
    default:
        return GW_METHODS;
    }
}

char *gw_head_copy(struct gw_conn *c, int tok)
{
    int n = lws_hdr_total_length(c->wsi, (enum lws_token_indexes)tok);
    if (n <= 0 || n > (int)GW_HEADER_MAX)
        return NULL;
    char *p = xmalloc((size_t)n + 2);
    if (lws_hdr_copy(c->wsi, p, n + 2, (enum lws_token_indexes)tok) < 0) {
        free(p);
        return NULL;
    }
    return p;
}

static void refuse(struct gw_framing *f, int status, const char *why)
{
    f->status = status;
    f->why = why;
}

void gw_framing_of(struct gw_framing *f, enum gw_method m, const char *length, const char *encoding)
{
    f->chunked = false;
    f->length = 0;
    if (*encoding) {
        /* lws reads bodies without Content-Length for these three only: elsewhere the chunks would
         * be taken for the next request. */
        bool body = m == GW_POST || m == GW_PUT || m == GW_PATCH;
        if (*length)
            return refuse(f, 400, "Content-Length and Transfer-Encoding exclude each other");
        if (strcasecmp(encoding, "chunked") != 0)
            return refuse(f, 501, "No other transfer coding than chunked is understood");
        if (!body)
            return refuse(f, 411, "A body of this request needs a Content-Length");
        f->chunked = true;
        return;
    }
    size_t n = strlen(length);
    if (!n)
        return;
    if (n > 18 || strspn(length, "0123456789") != n)
        return refuse(f, 400, "The Content-Length is no number");
    f->length = strtoull(length, NULL, 10);
}

bool gw_keepalive_of(const char *version, const char *connection)
{
    /* Exactly as lws decides it: both must agree on who closes. */
    if (strcasecmp(connection, "keep-alive") == 0)
        return true;
    if (strcasecmp(connection, "close") == 0)
        return false;
    return strncmp(version, "HTTP/1.1", 8) == 0;
}

static void read_query(struct gw_conn *c, struct gw_req *r, struct gw_framing *f)
{
    char *arg = xmalloc(GW_URI_MAX + 1);
    for (int i = 0;
         lws_hdr_copy_fragment(c->wsi, arg, GW_URI_MAX + 1, WSI_TOKEN_HTTP_URI_ARGS, i) >= 0; i++)
        if (*arg && !gw_req_add_query(r, arg))
            refuse(f, 400, "Too many query arguments");
    free(arg);
}

static size_t known_bytes(struct gw_conn *c)
{
    size_t sum = 0;
    for (int t = 0; t < WSI_TOKEN_COUNT; t++) {
        int n = lws_hdr_total_length(c->wsi, (enum lws_token_indexes)t);
        sum += n > 0 ? (size_t)n : 0;
    }
    return sum;
}

static void read_framing(struct gw_conn *c, struct gw_req *r, struct gw_framing *f)
{
    char *length = gw_head_copy(c, WSI_TOKEN_HTTP_CONTENT_LENGTH);
    char *encoding = gw_head_copy(c, WSI_TOKEN_HTTP_TRANSFER_ENCODING);
    char *version = gw_head_copy(c, WSI_TOKEN_HTTP);
    char *connection = gw_head_copy(c, WSI_TOKEN_CONNECTION);
    char *expect = gw_head_copy(c, WSI_TOKEN_HTTP_EXPECT);
    gw_framing_of(f, r->method, length ? length : "", encoding ? encoding : "");
    f->keepalive = gw_keepalive_of(version ? version : "", connection ? connection : "");
    f->expect_continue = expect && strcasecmp(expect, "100-continue") == 0;
    /* Without a length lws waits for 100 MB after these: the next request would never be seen. */
    bool implied =
        !length && (r->method == GW_POST || r->method == GW_PUT || r->method == GW_PATCH);
    if (implied)
        f->keepalive = false;
    free(length);
    free(encoding);
    free(version);
    free(connection);
    free(expect);
}

struct gw_req *gw_head_read(struct gw_conn *c, struct gw_framing *f)
{
    char *uri = NULL;
    int uri_len = 0;
    *f = (struct gw_framing) { 0 };
    int lm = lws_http_get_uri_and_method(c->wsi, &uri, &uri_len);
    enum gw_method m = method_of(lm);
    char *path = uri && uri_len > 0 ? xstrndup(uri, (size_t)uri_len) : xstrdup("/");
    struct gw_req *r = gw_req_new(c->server, m == GW_METHODS ? GW_GET : m, path);
    free(path);
    if (m == GW_METHODS) {
        refuse(f, 501, "This method is not supported");
        return r;
    }
    int args = lws_hdr_total_length(c->wsi, WSI_TOKEN_HTTP_URI_ARGS);
    if ((size_t)uri_len + (size_t)(args > 0 ? args : 0) > GW_URI_MAX) {
        refuse(f, 414, "The URI is too long");
        return r;
    }
    if (known_bytes(c) > GW_HEADER_MAX) {
        refuse(f, 431, "The request headers are too long");
        return r;
    }
    read_query(c, r, f);
    for (size_t i = 0; i < sizeof(copied) / sizeof(copied[0]); i++)
        r->header[copied[i].header] = gw_head_copy(c, copied[i].tok);
    char xsrf[256];
    if (lws_hdr_custom_copy(c->wsi, xsrf, sizeof(xsrf), "x-xsrftoken:", 12) > 0)
        gw_req_set_header(r, GW_H_XSRF, xsrf);
    if (!f->status)
        read_framing(c, r, f);
    return r;
}
