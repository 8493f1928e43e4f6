#include "common/buf.h"
#include "gateway/http/auth.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define NOW UINT64_C(1700000000)

static const struct gw_token tokens[] = {
    { .principal = "alice", .token = "alpha-token" },
    { .principal = "bob", .token = "beta" },
};

static struct gw_auth *make(const struct gw_token *t, size_t n, bool open)
{
    struct gw_config c;
    struct gw_auth *a = NULL;
    gw_config_defaults(&c);
    c.tokens = t;
    c.n_tokens = n;
    c.no_auth = open;
    assert_int_equal(gw_auth_new(&c, &a, NULL), 0);
    gw_auth_set_place(a, "/gw/", 8888, false);
    return a;
}

static struct gw_identity check(struct gw_auth *a, const char *header, const char *query,
                                const char *cookie)
{
    struct gw_credentials c = { .authorization = header, .query_token = query, .cookie = cookie };
    struct gw_identity id;
    gw_auth_check(a, &c, NOW, &id);
    return id;
}

static void test_all_header_forms_are_taken(void **state)
{
    static const char *const forms[] = {
        "token alpha-token",          "Token alpha-token",  "TOKEN   alpha-token ",
        "Bearer alpha-token",         "bearer alpha-token", " token\talpha-token",
        "Basic dTphbHBoYS10b2tlbg==", /* u:alpha-token */
        "basic OmFscGhhLXRva2Vu",     /* :alpha-token */
    };
    struct gw_auth *a = make(tokens, 2, false);
    (void)state;
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        struct gw_identity id = check(a, forms[i], NULL, NULL);
        assert_int_equal(id.how, GW_AUTH_TOKEN);
        assert_string_equal(id.principal, "alice");
    }
    assert_string_equal(check(a, "token beta", NULL, NULL).principal, "bob");
    gw_auth_free(a);
}

static void test_an_empty_token_is_no_credential_and_not_a_wrong_one(void **state)
{
    static const char *const forms[] = { "token ", "token",    "Bearer",     "",
                                         "Basic",  "Digest x", "alpha-token" };
    struct gw_auth *a = make(tokens, 2, false);
    (void)state;
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        struct gw_identity id = check(a, forms[i], NULL, NULL);
        assert_int_equal(id.how, GW_AUTH_NONE);
        assert_false(id.tried);
        assert_null(id.principal);
    }
    /* ... so that the query still counts: JupyterLab's gateway client sends "token " without one.
     */
    assert_string_equal(check(a, "token ", "beta", NULL).principal, "bob");
    assert_false(check(a, NULL, "", NULL).tried);
    gw_auth_free(a);
}

static void test_wrong_credentials_are_refused(void **state)
{
    static const char *const forms[] = { "token alpha-toke",  "token alpha-tokenx",
                                         "token ALPHA-TOKEN", "Bearer x",
                                         "Basic dTp4",        "token alpha-token x" };
    struct gw_auth *a = make(tokens, 2, false);
    (void)state;
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        struct gw_identity id = check(a, forms[i], NULL, NULL);
        assert_int_equal(id.how, GW_AUTH_NONE);
        assert_true(id.tried);
    }
    assert_int_equal(check(a, "Basic !!!", NULL, NULL).how, GW_AUTH_NONE);
    assert_int_equal(check(a, "Basic bm9jb2xvbg==", NULL, NULL).how, GW_AUTH_NONE);
    char *big = calloc(1, 100000);
    memset(big, 'A', 99999);
    memcpy(big, "token ", 6);
    assert_int_equal(check(a, big, NULL, NULL).how, GW_AUTH_NONE);
    free(big);
    gw_auth_free(a);
}

static void test_an_explicit_wrong_token_is_not_rescued_by_a_good_cookie(void **state)
{
    struct gw_auth *a = make(tokens, 2, false);
    struct buf b;
    (void)state;
    buf_init(&b, 2000);
    assert_int_equal(gw_auth_set_cookies(a, "beta", NULL, NOW, &b), 0);
    char cookie[300] = { 0 };
    assert_int_equal(sscanf(buf_cstr(&b), "Set-Cookie: %299[^;]", cookie), 1);
    assert_int_equal(check(a, NULL, NULL, cookie).how, GW_AUTH_COOKIE);
    assert_string_equal(check(a, NULL, NULL, cookie).principal, "bob");
    assert_int_equal(check(a, NULL, "wrong", cookie).how, GW_AUTH_NONE);
    assert_int_equal(check(a, "token alpha-token", NULL, cookie).how, GW_AUTH_TOKEN);
    buf_fini(&b);
    gw_auth_free(a);
}

static void cookie_of(struct gw_auth *a, const char *token, char ret[300])
{
    struct buf b;
    buf_init(&b, 2000);
    assert_int_equal(gw_auth_set_cookies(a, token, NULL, NOW, &b), 0);
    assert_int_equal(sscanf(buf_cstr(&b), "Set-Cookie: %299[^;]", ret), 1);
    buf_fini(&b);
}

static void test_a_cookie_holds_no_token_expires_and_cannot_be_forged(void **state)
{
    struct gw_auth *a = make(tokens, 2, false);
    struct gw_identity id;
    char cookie[300];
    (void)state;
    cookie_of(a, "alpha-token", cookie);
    assert_null(strstr(cookie, "alpha"));
    struct gw_credentials c = { .cookie = cookie };
    gw_auth_check(a, &c, NOW + GW_COOKIE_TTL_S - 1, &id);
    assert_int_equal(id.how, GW_AUTH_COOKIE);
    gw_auth_check(a, &c, NOW + GW_COOKIE_TTL_S, &id);
    assert_int_equal(id.how, GW_AUTH_NONE);
    /* Any changed character spoils it. */
    char *value = strchr(cookie, '=') + 1;
    for (size_t i = 0; value[i]; i++) {
        char keep = value[i];
        value[i] = keep == '0' ? '1' : '0';
        assert_int_equal(check(a, NULL, NULL, cookie).how, GW_AUTH_NONE);
        value[i] = keep;
    }
    assert_int_equal(check(a, NULL, NULL, cookie).how, GW_AUTH_COOKIE);
    value[strlen(value) - 1] = 0;
    assert_int_equal(check(a, NULL, NULL, cookie).how, GW_AUTH_NONE);
    gw_auth_free(a);
}

static void test_a_cookie_survives_a_restart_and_dies_with_its_token(void **state)
{
    static const struct gw_token changed[] = { { "alice", "alpha-token-2" }, { "bob", "beta" } };
    struct gw_auth *a = make(tokens, 2, false), *again = make(tokens, 2, false),
                   *other = make(changed, 2, false);
    char cookie[300];
    (void)state;
    cookie_of(a, "alpha-token", cookie);
    assert_string_equal(check(again, NULL, NULL, cookie).principal, "alice");
    assert_int_equal(check(other, NULL, NULL, cookie).how, GW_AUTH_NONE);
    gw_auth_free(a);
    gw_auth_free(again);
    gw_auth_free(other);
}

static void test_cookie_lines_are_scoped_and_xsrf_is_set_once(void **state)
{
    struct gw_auth *a = make(tokens, 2, false);
    struct buf b;
    (void)state;
    buf_init(&b, 2000);
    assert_int_equal(gw_auth_set_cookies(a, "beta", "x=1", NOW, &b), 0);
    const char *text = buf_cstr(&b);
    assert_non_null(strstr(text, "cellvisor-8888="));
    assert_non_null(strstr(text, "Path=/gw/"));
    assert_non_null(strstr(text, "HttpOnly"));
    assert_non_null(strstr(text, "SameSite=Lax"));
    assert_non_null(strstr(text, "_xsrf="));
    assert_null(strstr(text, "Secure"));
    buf_clear(&b);
    gw_auth_set_place(a, "/", 1, true);
    assert_int_equal(gw_auth_set_cookies(a, "beta", "_xsrf=abc", NOW, &b), 0);
    assert_null(strstr(buf_cstr(&b), "_xsrf"));
    assert_non_null(strstr(buf_cstr(&b), "; Secure"));
    assert_int_equal(gw_auth_set_cookies(a, "nope", NULL, NOW, &b), -EINVAL);
    buf_fini(&b);
    gw_auth_free(a);
}

static void test_cookie_headers_are_searched_by_whole_names(void **state)
{
    (void)state;
    assert_true(slice_eq_str(gw_cookie_get("a=1; bb=2;c=3", "bb"), "2"));
    assert_true(slice_eq_str(gw_cookie_get("xb=0; b=2", "b"), "2"));
    assert_true(slice_eq_str(gw_cookie_get("b= 2 ;", "b"), "2"));
    assert_int_equal(gw_cookie_get("a=b=2", "b").n, 0);
    assert_int_equal(gw_cookie_get(";;; ,", "b").n, 0);
    assert_int_equal(gw_cookie_get(NULL, "b").n, 0);
}

static void test_the_xsrf_rule_binds_cookie_to_header_or_argument(void **state)
{
    (void)state;
    assert_true(gw_auth_xsrf_ok(GW_GET, NULL, NULL, NULL));
    assert_true(gw_auth_xsrf_ok(GW_POST, "_xsrf=abc", "abc", NULL));
    assert_true(gw_auth_xsrf_ok(GW_DELETE, "x=1; _xsrf=abc", NULL, "abc"));
    assert_false(gw_auth_xsrf_ok(GW_POST, "_xsrf=abc", NULL, NULL));
    assert_false(gw_auth_xsrf_ok(GW_POST, "_xsrf=abc", "abd", "abc"));
    assert_false(gw_auth_xsrf_ok(GW_PATCH, "_xsrf=", "", NULL));
    assert_false(gw_auth_xsrf_ok(GW_POST, NULL, "abc", NULL));
}

static void test_bad_configurations_are_refused(void **state)
{
    static const struct gw_token empty[] = { { "alice", "" } },
                                 twice[] = { { "alice", "same" }, { "bob", "same" } };
    struct gw_config c;
    struct gw_auth *a = NULL;
    struct err e = { 0 };
    (void)state;
    gw_config_defaults(&c);
    assert_int_equal(gw_auth_new(&c, &a, &e), -EINVAL);
    c.tokens = empty;
    c.n_tokens = 1;
    assert_int_equal(gw_auth_new(&c, &a, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "alice"));
    c.tokens = twice;
    c.n_tokens = 2;
    assert_int_equal(gw_auth_new(&c, &a, &e), -EINVAL);
    assert_null(strstr(e.msg, "same token of"));
    assert_null(a);
}

static void test_only_a_sole_user_or_admin_may_shut_down(void **state)
{
    static const struct gw_token one[] = { { "alice", "a" }, { "alice", "b" } };
    struct gw_auth *a = make(tokens, 2, false), *sole = make(one, 2, false),
                   *open = make(NULL, 0, true);
    (void)state;
    assert_false(gw_auth_may_shutdown(a, "alice"));
    assert_true(gw_auth_may_shutdown(a, "admin"));
    assert_true(gw_auth_may_shutdown(sole, "alice"));
    assert_true(gw_auth_may_shutdown(open, "anonymous"));
    assert_int_equal(check(open, NULL, NULL, NULL).how, GW_AUTH_OPEN);
    gw_auth_free(a);
    gw_auth_free(sole);
    gw_auth_free(open);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_header_forms_are_taken),
        cmocka_unit_test(test_an_empty_token_is_no_credential_and_not_a_wrong_one),
        cmocka_unit_test(test_wrong_credentials_are_refused),
        cmocka_unit_test(test_an_explicit_wrong_token_is_not_rescued_by_a_good_cookie),
        cmocka_unit_test(test_a_cookie_holds_no_token_expires_and_cannot_be_forged),
        cmocka_unit_test(test_a_cookie_survives_a_restart_and_dies_with_its_token),
        cmocka_unit_test(test_cookie_lines_are_scoped_and_xsrf_is_set_once),
        cmocka_unit_test(test_cookie_headers_are_searched_by_whole_names),
        cmocka_unit_test(test_the_xsrf_rule_binds_cookie_to_header_or_argument),
        cmocka_unit_test(test_bad_configurations_are_refused),
        cmocka_unit_test(test_only_a_sole_user_or_admin_may_shut_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
