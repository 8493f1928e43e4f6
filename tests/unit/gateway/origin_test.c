#include "gateway/http/origin.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct gw_config config(const char *const *origins, const char *const *hosts)
{
    struct gw_config c;
    gw_config_defaults(&c);
    c.allow_origins = origins;
    c.allow_hosts = hosts;
    return c;
}

static void test_ip_literals_localhost_and_listed_names_are_hosts_of_ours(void **state)
{
    static const char *const hosts[] = { "gw.example", NULL }, *const any[] = { "*", NULL };
    static const char *const good[] = { "127.0.0.1",   "127.0.0.1:8888", "[::1]:8888",
                                        "[fe80::1]",   "localhost",      "LOCALHOST:1",
                                        "a.localhost", "localhost.",     "10.0.0.7:8888",
                                        "gw.example",  "GW.example:443", "",
                                        NULL };
    static const char *const bad[] = { "evil.example",
                                       "evil.example:8888",
                                       "127.0.0.1.evil.example",
                                       "localhost.evil.example",
                                       "xlocalhost",
                                       "[::1",
                                       "a:b:c",
                                       ":8888",
                                       "[::1]x",
                                       "gw.example.evil" };
    struct gw_config c = config(NULL, hosts), all = config(NULL, any);
    (void)state;
    for (size_t i = 0; good[i]; i++)
        assert_true(gw_host_ok(&c, good[i]));
    assert_true(gw_host_ok(&c, NULL));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(gw_host_ok(&c, bad[i]));
    assert_true(gw_host_ok(&all, "evil.example"));
}

static void test_origins_are_refused_unless_same_or_listed(void **state)
{
    static const char *const origins[] = { "https://app.example", "http://b.example:8080/", NULL };
    struct gw_config c = config(origins, NULL);
    (void)state;
    assert_true(gw_origin_ok(&c, NULL, "127.0.0.1:8888"));
    assert_true(gw_origin_ok(&c, "", "127.0.0.1:8888"));
    assert_true(gw_origin_ok(&c, "http://127.0.0.1:8888", "127.0.0.1:8888"));
    assert_true(gw_origin_ok(&c, "https://APP.example", "x"));
    assert_true(gw_origin_ok(&c, "http://b.example:8080", "x"));
    assert_false(gw_origin_ok(&c, "http://app.example", "x"));
    assert_false(gw_origin_ok(&c, "https://app.example.evil", "x"));
    assert_false(gw_origin_ok(&c, "http://127.0.0.1:9999", "127.0.0.1:8888"));
    assert_false(gw_origin_ok(&c, "null", "127.0.0.1:8888"));
    assert_false(gw_origin_ok(&c, "127.0.0.1:8888", "127.0.0.1:8888"));
    assert_false(gw_origin_ok(&c, "http://evil.example", NULL));
}

static char *cors(const struct gw_config *c, const char *origin, bool preflight, const char *asked)
{
    struct buf b;
    buf_init(&b, 2000);
    assert_int_equal(gw_cors_headers(c, origin, preflight, "GET, OPTIONS", asked, &b), 0);
    char *out = strdup(buf_cstr(&b));
    buf_fini(&b);
    return out;
}

static void test_nothing_configured_means_no_cors_header_at_all(void **state)
{
    struct gw_config c = config(NULL, NULL);
    (void)state;
    char *h = cors(&c, "https://app.example", true, "authorization");
    assert_string_equal(h, "");
    free(h);
}

static void test_a_listed_origin_is_echoed_and_others_are_not(void **state)
{
    static const char *const origins[] = { "https://app.example", NULL };
    struct gw_config c = config(origins, NULL);
    (void)state;
    char *h = cors(&c, "https://app.example", true, "authorization, x-mine");
    assert_non_null(strstr(h, "Access-Control-Allow-Origin: https://app.example\r\n"));
    assert_non_null(strstr(h, "Access-Control-Allow-Methods: GET, OPTIONS\r\n"));
    assert_non_null(strstr(h, "Access-Control-Allow-Headers: authorization, x-mine\r\n"));
    assert_null(strstr(h, "Credentials"));
    free(h);
    h = cors(&c, "https://evil.example", true, NULL);
    assert_string_equal(h, "Vary: Origin\r\n");
    free(h);
}

static void test_bytes_of_the_peer_cannot_split_the_response(void **state)
{
    static const char *const origins[] = { "*", NULL };
    struct gw_config c = config(origins, NULL);
    (void)state;
    c.allow_credentials = true;
    char *h = cors(&c, "https://a\r\nX: y", true, "a\r\nX: y");
    assert_null(strstr(h, "X: y"));
    free(h);
    h = cors(&c, "https://a", true, "a\r\nX: y");
    assert_null(strstr(h, "X: y"));
    assert_non_null(strstr(h, "x-xsrftoken"));
    free(h);
}

static void test_any_origin_is_a_star_unless_credentials_are_allowed(void **state)
{
    static const char *const origins[] = { "*", NULL };
    struct gw_config c = config(origins, NULL);
    (void)state;
    char *h = cors(&c, "https://a.example", false, NULL);
    assert_non_null(strstr(h, "Access-Control-Allow-Origin: *\r\n"));
    assert_null(strstr(h, "Allow-Methods"));
    free(h);
    c.allow_credentials = true;
    h = cors(&c, "https://a.example", false, NULL);
    assert_non_null(strstr(h, "Access-Control-Allow-Origin: https://a.example\r\n"));
    assert_non_null(strstr(h, "Access-Control-Allow-Credentials: true\r\n"));
    free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ip_literals_localhost_and_listed_names_are_hosts_of_ours),
        cmocka_unit_test(test_origins_are_refused_unless_same_or_listed),
        cmocka_unit_test(test_nothing_configured_means_no_cors_header_at_all),
        cmocka_unit_test(test_a_listed_origin_is_echoed_and_others_are_not),
        cmocka_unit_test(test_bytes_of_the_peer_cannot_split_the_response),
        cmocka_unit_test(test_any_origin_is_a_star_unless_credentials_are_allowed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
