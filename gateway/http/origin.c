/* Host, Origin and CORS; see origin.h. */
#include "gateway/http/origin.h"
#include <arpa/inet.h>
#include <ctype.h>
#include <string.h>
#include <strings.h>

#define HOST_MAX 256
#define CORS_DEFAULT_HEADERS "accept, authorization, content-type, x-xsrftoken"

/* "name:port", "[v6]:port" -> name (lower case, no brackets). False: too long or malformed. */
static bool host_name(const char *host, char ret[HOST_MAX])
{
    size_t n;
    if (*host == '[') {
        const char *end = strchr(host, ']');
        if (!end || (end[1] && end[1] != ':'))
            return false;
        host++;
        n = (size_t)(end - host);
    } else {
        n = strcspn(host, ":");
        if (strchr(host + n, ':') != strrchr(host + n, ':'))
            return false;
    }
    if (!n || n >= HOST_MAX)
        return false;
    for (size_t i = 0; i < n; i++)
        ret[i] = (char)tolower((unsigned char)host[i]);
    ret[n] = 0;
    if (ret[n - 1] == '.')
        ret[n - 1] = 0; /* the absolute form of a name */
    return true;
}

static bool is_ip(const char *s)
{
    struct in6_addr a;
    return inet_pton(AF_INET, s, &a) == 1 || inet_pton(AF_INET6, s, &a) == 1;
}

static bool listed(const char *const *list, const char *s)
{
    for (; list && *list; list++)
        if (strcmp(*list, "*") == 0 || strcasecmp(*list, s) == 0)
            return true;
    return false;
}

bool gw_host_ok(const struct gw_config *c, const char *host)
{
    char name[HOST_MAX];
    if (!host || !*host)
        return true;
    if (!host_name(host, name))
        return false;
    size_t n = strlen(name);
    return is_ip(name) || strcmp(name, "localhost") == 0 ||
           (n > 10 && strcmp(name + n - 10, ".localhost") == 0) || strcasecmp(name, c->ip) == 0 ||
           listed(c->allow_hosts, name) || listed(c->allow_hosts, host);
}

/* Origins differ only in case where schemes and hosts do; a trailing slash in the option is meant
 * kindly. */
static bool origin_listed(const struct gw_config *c, const char *origin)
{
    for (const char *const *p = c->allow_origins; p && *p; p++) {
        size_t n = strlen(*p);
        while (n && (*p)[n - 1] == '/')
            n--;
        if (strcmp(*p, "*") == 0 || (strlen(origin) == n && strncasecmp(*p, origin, n) == 0))
            return true;
    }
    return false;
}

bool gw_origin_ok(const struct gw_config *c, const char *origin, const char *host)
{
    if (!origin || !*origin)
        return true;
    const char *sep = strstr(origin, "://");
    if (sep && host && strcasecmp(sep + 3, host) == 0)
        return true;
    return origin_listed(c, origin);
}

static bool any_origin(const struct gw_config *c)
{
    for (const char *const *p = c->allow_origins; p && *p; p++)
        if (strcmp(*p, "*") == 0)
            return true;
    return false;
}

/* Header names and commas only: nothing that could end the line. */
static bool header_list_ok(const char *s)
{
    if (!s || !*s || strlen(s) > 512)
        return false;
    for (; *s; s++)
        if (!isalnum((unsigned char)*s) && !strchr("-_, ", *s))
            return false;
    return true;
}

static bool header_value_ok(const char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s <= 0x20 || (unsigned char)*s >= 0x7f)
            return false;
    return true;
}

int gw_cors_headers(const struct gw_config *c, const char *origin, bool preflight,
                    const char *allow, const char *request_headers, struct buf *out)
{
    if (!c->allow_origins || !c->allow_origins[0])
        return 0;
    bool echo = origin && *origin && header_value_ok(origin) && origin_listed(c, origin);
    bool star = any_origin(c) && !c->allow_credentials;
    if (!echo && !star)
        return buf_append_str(out, "Vary: Origin\r\n");
    int r =
        buf_printf(out, "Access-Control-Allow-Origin: %s\r\nVary: Origin\r\n", star ? "*" : origin);
    if (!r && c->allow_credentials)
        r = buf_append_str(out, "Access-Control-Allow-Credentials: true\r\n");
    if (!r && !preflight)
        r = buf_append_str(out, "Access-Control-Expose-Headers: Location\r\n");
    if (!r && preflight)
        r = buf_printf(out,
                       "Access-Control-Allow-Methods: %s\r\nAccess-Control-Allow-Headers: %s\r\n"
                       "Access-Control-Max-Age: 600\r\n",
                       allow,
                       header_list_ok(request_headers) ? request_headers : CORS_DEFAULT_HEADERS);
    return r;
}
