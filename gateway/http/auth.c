/* Token, cookie and XSRF checks; see auth.h. */
#include "gateway/http/auth.h"
#include "common/buf.h"
#include "common/id.h"
#include "common/mem.h"
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define CREDENTIAL_MAX 4096 /* longer ones match nothing of ours */

struct token {
    char *principal, *value;
    uint8_t key[32]; /* of its cookies: SHA-256("cellvisor cookie key" || value) */
};
struct gw_auth {
    struct token *tokens;
    size_t n;
    bool open;
    char *path;    /* cookie path: base_url */
    char name[32]; /* session cookie: cookies do not tell ports apart, so the name does */
    bool tls;
};

static void token_key(struct token *t)
{
    static const char label[] = "cellvisor cookie key";
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    if (!md || EVP_DigestInit_ex(md, EVP_sha256(), NULL) != 1 ||
        EVP_DigestUpdate(md, label, sizeof(label)) != 1 ||
        EVP_DigestUpdate(md, t->value, strlen(t->value)) != 1 ||
        EVP_DigestFinal_ex(md, t->key, NULL) != 1)
        id_random(t->key, sizeof(t->key)); /* cookies then end with this process */
    EVP_MD_CTX_free(md);
}

static int add_token(struct gw_auth *a, const struct gw_token *t, struct err *e)
{
    if (!t->token || !*t->token)
        return err_set(e, -EINVAL, "the token of %s is empty", t->principal ? t->principal : "?");
    if (strlen(t->token) >= CREDENTIAL_MAX)
        return err_set(e, -EINVAL, "the token of %s is longer than %d characters", t->principal,
                       CREDENTIAL_MAX - 1);
    for (size_t i = 0; i < a->n; i++)
        if (strcmp(a->tokens[i].value, t->token) == 0 &&
            strcmp(a->tokens[i].principal, t->principal ? t->principal : "default") != 0)
            return err_set(e, -EINVAL, "%s and %s have the same token", a->tokens[i].principal,
                           t->principal);
    struct token *n = &a->tokens[a->n++];
    n->principal = xstrdup(t->principal ? t->principal : "default");
    n->value = xstrdup(t->token);
    token_key(n);
    return 0;
}

int gw_auth_new(const struct gw_config *c, struct gw_auth **ret, struct err *e)
{
    if (!c->n_tokens && !c->no_auth)
        return err_set(e, -EINVAL, "no token is configured: set one, or ask for no authentication");
    struct gw_auth *a = xnew(struct gw_auth);
    a->tokens = xcalloc(c->n_tokens ? c->n_tokens : 1, sizeof(*a->tokens));
    a->open = c->no_auth;
    gw_auth_set_place(a, "/", 0, false);
    for (size_t i = 0; i < c->n_tokens; i++) {
        int r = add_token(a, &c->tokens[i], e);
        if (r) {
            gw_auth_free(a);
            return r;
        }
    }
    *ret = a;
    return 0;
}

void gw_auth_free(struct gw_auth *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->n; i++) {
        OPENSSL_cleanse(a->tokens[i].value, strlen(a->tokens[i].value));
        free(a->tokens[i].value);
        free(a->tokens[i].principal);
    }
    free(a->tokens);
    free(a->path);
    free(a);
}

void gw_auth_set_place(struct gw_auth *a, const char *base, unsigned port, bool tls)
{
    free(a->path);
    a->path = xstrdup(base);
    snprintf(a->name, sizeof(a->name), "cellvisor-%u", port);
    a->tls = tls;
}

/* Every token is compared, so that the time does not tell which one matched. */
static const struct token *find_token(const struct gw_auth *a, struct slice s)
{
    const struct token *hit = NULL;
    for (size_t i = 0; i < a->n; i++)
        if (id_equal_ct(s, slice_str(a->tokens[i].value)))
            hit = &a->tokens[i];
    return s.n ? hit : NULL;
}

const char *gw_auth_token(const struct gw_auth *a, const char *token)
{
    const struct token *t = find_token(a, slice_str(token));
    return t ? t->principal : NULL;
}

static struct slice trim(struct slice s)
{
    while (s.n && isspace(s.p[0]))
        s.p++, s.n--;
    while (s.n && isspace(s.p[s.n - 1]))
        s.n--;
    return s;
}

/* "Basic dXNlcjpwYXNz": the part behind the first colon; out holds it. */
static struct slice basic_password(struct slice b64, uint8_t *out, size_t size)
{
    size_t n = size;
    if (id_base64_decode(b64, out, &n))
        return SLICE_NULL;
    uint8_t *colon = memchr(out, ':', n);
    return colon ? slice_of(colon + 1, n - (size_t)(colon + 1 - out)) : SLICE_NULL;
}

/* The credential inside an Authorization header; empty: none, or a scheme that we do not know. */
static struct slice header_credential(const char *header, uint8_t *scratch, size_t size)
{
    struct slice s = trim(slice_str(header));
    size_t n = 0;
    while (n < s.n && !isspace(s.p[n]))
        n++;
    struct slice rest = trim(slice_of(s.p + n, s.n - n));
    const char *scheme = (const char *)s.p;
    if ((n == 5 && strncasecmp(scheme, "token", n) == 0) ||
        (n == 6 && strncasecmp(scheme, "bearer", n) == 0))
        return rest;
    if (n == 5 && strncasecmp(scheme, "basic", n) == 0)
        return basic_password(rest, scratch, size);
    return SLICE_NULL;
}

struct slice gw_cookie_get(const char *header, const char *name)
{
    size_t len = strlen(name);
    for (const char *p = header; p && *p;) {
        p += strspn(p, " ;,\t");
        size_t n = strcspn(p, ";");
        if (n > len && p[len] == '=' && strncmp(p, name, len) == 0)
            return trim(slice_of(p + len + 1, n - len - 1));
        p += n;
    }
    return SLICE_NULL;
}

/* ---- session cookie ---- */

#define MAC_HEX 64
static void cookie_mac(const struct token *t, const char *text, char ret[MAC_HEX + 1])
{
    uint8_t mac[32] = { 0 };
    unsigned n = sizeof(mac);
    if (!HMAC(EVP_sha256(), t->key, sizeof(t->key), (const uint8_t *)text, strlen(text), mac, &n))
        id_random(mac, sizeof(mac));
    id_hex(ret, mac, sizeof(mac));
}

static void cookie_text(const struct gw_auth *a, const struct token *t, uint64_t expiry, char *ret,
                        size_t size)
{
    snprintf(ret, size, "%" PRIu64 ".%zu", expiry, (size_t)(t - a->tokens));
}

static const struct token *check_cookie(const struct gw_auth *a, struct slice v, uint64_t now_s)
{
    char text[64], mac[MAC_HEX + 1];
    if (v.n < MAC_HEX + 4 || v.n >= sizeof(text) + MAC_HEX)
        return NULL;
    struct slice given = slice_of(v.p + v.n - MAC_HEX, MAC_HEX);
    size_t n = v.n - MAC_HEX - 1;
    if (v.p[n] != '.')
        return NULL;
    memcpy(text, v.p, n);
    text[n] = 0;
    char *end = NULL;
    uint64_t expiry = strtoull(text, &end, 10);
    if (*end != '.')
        return NULL;
    unsigned long i = strtoul(end + 1, &end, 10);
    if (*end || i >= a->n)
        return NULL;
    cookie_mac(&a->tokens[i], text, mac);
    if (!id_equal_ct(given, slice_str(mac)) || expiry <= now_s)
        return NULL;
    return &a->tokens[i];
}

void gw_auth_check(const struct gw_auth *a, const struct gw_credentials *c, uint64_t now_s,
                   struct gw_identity *ret)
{
    *ret = (struct gw_identity) { .how = GW_AUTH_NONE };
    if (a->open) {
        *ret = (struct gw_identity) { .how = GW_AUTH_OPEN, .principal = "anonymous" };
        return;
    }
    uint8_t scratch[CREDENTIAL_MAX];
    struct slice cred = SLICE_NULL;
    if (c->authorization && strlen(c->authorization) < CREDENTIAL_MAX)
        cred = header_credential(c->authorization, scratch, sizeof(scratch));
    if (!cred.n && c->query_token)
        cred = trim(slice_str(c->query_token));
    const struct token *t = NULL;
    if (cred.n) {
        ret->tried = true;
        t = find_token(a, cred);
        ret->how = t ? GW_AUTH_TOKEN : GW_AUTH_NONE;
    } else if (c->cookie) {
        struct slice v = gw_cookie_get(c->cookie, a->name);
        ret->tried = v.n > 0;
        t = check_cookie(a, v, now_s);
        ret->how = t ? GW_AUTH_COOKIE : GW_AUTH_NONE;
    }
    ret->principal = t ? t->principal : NULL;
    OPENSSL_cleanse(scratch, sizeof(scratch));
}

bool gw_auth_xsrf_ok(enum gw_method m, const char *cookie, const char *header, const char *query)
{
    if (m == GW_GET || m == GW_HEAD || m == GW_OPTIONS)
        return true;
    struct slice want = gw_cookie_get(cookie, "_xsrf");
    if (!want.n)
        return false;
    const char *given = header && *header ? header : query;
    return given && id_equal_ct(want, slice_str(given));
}

int gw_auth_set_cookies(const struct gw_auth *a, const char *token, const char *request_cookie,
                        uint64_t now_s, struct buf *out)
{
    const struct token *t = find_token(a, slice_str(token));
    if (!t)
        return -EINVAL;
    char text[64], mac[MAC_HEX + 1];
    cookie_text(a, t, now_s + GW_COOKIE_TTL_S, text, sizeof(text));
    cookie_mac(t, text, mac);
    const char *secure = a->tls ? "; Secure" : "";
    int r =
        buf_printf(out, "Set-Cookie: %s=%s.%s; Path=%s; Max-Age=%u; HttpOnly; SameSite=Lax%s\r\n",
                   a->name, text, mac, a->path, GW_COOKIE_TTL_S, secure);
    if (r || gw_cookie_get(request_cookie, "_xsrf").n)
        return r;
    char xsrf[33];
    id_token(xsrf, 16);
    return buf_printf(out, "Set-Cookie: _xsrf=%s; Path=%s; SameSite=Lax%s\r\n", xsrf, a->path,
                      secure);
}

int gw_auth_clear_cookies(const struct gw_auth *a, struct buf *out)
{
    return buf_printf(out, "Set-Cookie: %s=; Path=%s; Max-Age=0; HttpOnly; SameSite=Lax\r\n",
                      a->name, a->path);
}

bool gw_auth_may_shutdown(const struct gw_auth *a, const char *principal)
{
    if (strcmp(principal, "admin") == 0)
        return true;
    for (size_t i = 1; i < a->n; i++)
        if (strcmp(a->tokens[i].principal, a->tokens[0].principal) != 0)
            return false;
    return true;
}
