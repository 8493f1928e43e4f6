/* The request object over a fake transport: what is decided before and after the body. */
#include "gateway/http/request.h"
#include "gateway/http/server.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct {
    unsigned replies, gone, handled;
    int status;
    char head[4000], body[4000], principal[40];
    struct gw_req *held;
} seen;

static void fake_reply(struct gw_req *r)
{
    seen.replies++;
    seen.status = r->status;
    snprintf(seen.head, sizeof(seen.head), "%s", buf_cstr(&r->head) ? buf_cstr(&r->head) : "");
    snprintf(seen.body, sizeof(seen.body), "%s", buf_cstr(&r->out) ? buf_cstr(&r->out) : "");
    gw_req_free(r);
}
static const struct gw_transport_ops fake_ops = { .reply = fake_reply };

static void h_open(struct gw_req *r)
{
    seen.handled++;
    gw_reply_empty(r, 204);
}
static void h_who(struct gw_req *r)
{
    seen.handled++;
    snprintf(seen.principal, sizeof(seen.principal), "%s", r->principal);
    gw_reply_json(r, 200, json_pack("{s:s}", "arg", gw_arg(r, 0)));
}
static void h_body(struct gw_req *r)
{
    struct err e = { 0 };
    json_t *v = NULL;
    if (gw_req_json(r, &v, &e))
        gw_reply_err(r, &e);
    else
        gw_reply_json(r, 201, v);
}
static void on_gone(struct gw_req *r)
{
    (void)r;
    seen.gone++;
}
static void h_later(struct gw_req *r)
{
    seen.held = r;
    r->on_gone = on_gone;
}
static const struct gw_route routes[] = {
    { GW_GET, "/open", h_open, GW_ROUTE_OPEN },
    { GW_GET, "/who/{}", h_who, 0 },
    { GW_POST, "/body", h_body, 0 },
    { GW_POST, "/later", h_later, 0 },
    { GW_GET, "/ws/{}", h_who, GW_ROUTE_WS },
    { GW_GET, "/metrics", h_open, GW_ROUTE_METRICS },
};
static const struct gw_token tokens[] = { { "alice", "T" } };
static struct gw_server server;

static int setup(void **state)
{
    (void)state;
    memset(&seen, 0, sizeof(seen));
    memset(&server, 0, sizeof(server));
    server.loop = loop_new_virtual();
    gw_config_defaults(&server.config);
    server.config.tokens = tokens;
    server.config.n_tokens = 1;
    server.base = strdup("/gw/");
    server.routes = routes;
    server.n_routes = sizeof(routes) / sizeof(routes[0]);
    list_init(&server.pending);
    int r = gw_auth_new(&server.config, &server.auth, NULL);
    gw_auth_set_place(server.auth, "/gw/", 8888, false);
    return r;
}

static int teardown(void **state)
{
    (void)state;
    gw_auth_free(server.auth);
    loop_free(server.loop);
    free(server.base);
    return 0;
}

static struct gw_req *make(enum gw_method m, const char *uri, const char *token)
{
    struct gw_req *r = gw_req_new(&server, m, uri);
    r->ops = &fake_ops;
    gw_req_set_header(r, GW_H_HOST, "127.0.0.1:8888");
    if (token)
        gw_req_set_header(r, GW_H_AUTHORIZATION, token);
    seen.replies = seen.handled = 0;
    return r;
}

static void run(struct gw_req *r)
{
    if (gw_req_head_done(r))
        gw_req_dispatch(r);
}

static void test_a_request_with_a_token_reaches_its_handler(void **state)
{
    (void)state;
    run(make(GW_GET, "/gw/who/me", "token T"));
    assert_int_equal(seen.status, 200);
    assert_string_equal(seen.principal, "alice");
    assert_string_equal(seen.body, "{\"arg\":\"me\"}");
    assert_non_null(strstr(seen.head, "X-Content-Type-Options: nosniff\r\n"));
    assert_non_null(strstr(seen.head, "report-uri /gw/api/security/csp-report"));
    struct gw_req *r = make(GW_GET, "/gw/who/me", NULL);
    assert_true(gw_req_add_query(r, "token=T"));
    assert_true(gw_req_add_query(r, "1723"));
    run(r);
    assert_int_equal(seen.status, 200);
}

static void test_without_a_token_only_open_routes_answer(void **state)
{
    (void)state;
    run(make(GW_GET, "/gw/open", NULL));
    assert_int_equal(seen.status, 204);
    run(make(GW_GET, "/gw/who/me", NULL));
    assert_int_equal(seen.status, 401);
    assert_int_equal(seen.handled, 0);
    assert_non_null(strstr(seen.head, "WWW-Authenticate: "));
    assert_non_null(strstr(seen.body, "\"reason\":\"Unauthorized\""));
    run(make(GW_GET, "/gw/who/me", "token nope"));
    assert_int_equal(seen.status, 401);
    assert_null(strstr(seen.body, "nope"));
    run(make(GW_GET, "/gw/metrics", NULL));
    assert_int_equal(seen.status, 401);
    server.config.metrics_no_auth = true;
    run(make(GW_GET, "/gw/metrics", NULL));
    assert_int_equal(seen.status, 204);
}

static void test_unknown_paths_and_methods_are_told_apart(void **state)
{
    (void)state;
    run(make(GW_GET, "/gw/nope", "token T"));
    assert_int_equal(seen.status, 404);
    run(make(GW_GET, "/who/me", "token T"));
    assert_int_equal(seen.status, 404);
    assert_non_null(strstr(seen.body, "/gw/"));
    run(make(GW_DELETE, "/gw/who/me", NULL));
    assert_int_equal(seen.status, 405);
    assert_non_null(strstr(seen.head, "Allow: GET, HEAD, OPTIONS\r\n"));
}

static void test_a_trailing_slash_is_redirected_with_its_query(void **state)
{
    (void)state;
    struct gw_req *r = make(GW_GET, "/gw/who/a b/", NULL);
    assert_true(gw_req_add_query(r, "x=1&2"));
    run(r);
    assert_int_equal(seen.status, 302);
    assert_non_null(strstr(seen.head, "Location: /gw/who/a%20b?x=1%262\r\n"));
    run(make(GW_POST, "/gw/body/", NULL));
    assert_int_equal(seen.status, 308);
}

static void test_options_answers_everywhere_without_a_token(void **state)
{
    (void)state;
    struct gw_req *r = make(GW_OPTIONS, "/gw/later", NULL);
    gw_req_set_header(r, GW_H_ORIGIN, "https://app.example");
    run(r);
    assert_int_equal(seen.status, 204);
    assert_non_null(strstr(seen.head, "Allow: POST, OPTIONS\r\n"));
    assert_null(strstr(seen.head, "Access-Control"));
    static const char *const origins[] = { "https://app.example", NULL };
    server.config.allow_origins = origins;
    r = make(GW_OPTIONS, "/gw/later", NULL);
    gw_req_set_header(r, GW_H_ORIGIN, "https://app.example");
    gw_req_set_header(r, GW_H_AC_REQUEST_HEADERS, "authorization");
    run(r);
    assert_non_null(strstr(seen.head, "Access-Control-Allow-Origin: https://app.example\r\n"));
    run(make(GW_OPTIONS, "/gw/nope", NULL));
    assert_int_equal(seen.status, 404);
}

static void test_foreign_host_names_need_an_explicit_token(void **state)
{
    (void)state;
    struct gw_req *r = make(GW_GET, "/gw/who/me", "token T");
    gw_req_set_header(r, GW_H_HOST, "proxy.example");
    run(r);
    assert_int_equal(seen.status, 200);
    r = make(GW_GET, "/gw/who/me", NULL);
    gw_req_set_header(r, GW_H_HOST, "rebound.example");
    run(r);
    assert_int_equal(seen.status, 403);
}

static void test_on_a_websocket_the_origin_counts_even_with_a_token(void **state)
{
    (void)state;
    struct gw_req *r = make(GW_GET, "/gw/ws/1", "token T");
    r->upgrade = true;
    gw_req_set_header(r, GW_H_ORIGIN, "http://evil.example");
    assert_false(gw_req_head_done(r));
    assert_int_equal(seen.status, 403);
    r = make(GW_GET, "/gw/ws/1", "token T");
    r->upgrade = true;
    assert_true(gw_req_head_done(r));
    gw_req_free(r);
    r = make(GW_GET, "/gw/who/1", "token T");
    gw_req_set_header(r, GW_H_ORIGIN, "http://evil.example");
    run(r);
    assert_int_equal(seen.status, 200);
    r = make(GW_GET, "/gw/ws/1", NULL);
    r->upgrade = true;
    assert_false(gw_req_head_done(r));
    assert_int_equal(seen.status, 403);
}

static void test_upgrades_and_routes_must_fit(void **state)
{
    (void)state;
    run(make(GW_GET, "/gw/ws/1", "token T"));
    assert_int_equal(seen.status, 400);
    struct gw_req *r = make(GW_GET, "/gw/who/1", "token T");
    r->upgrade = true;
    assert_false(gw_req_head_done(r));
    assert_int_equal(seen.status, 400);
}

static void test_a_cookie_needs_the_xsrf_proof_for_changes(void **state)
{
    struct buf b;
    char cookie[400] = "_xsrf=abc; ";
    (void)state;
    buf_init(&b, 1000);
    assert_int_equal(
        gw_auth_set_cookies(server.auth, "T", "_xsrf=abc", loop_wall_us(server.loop) / 1000000, &b),
        0);
    size_t n = strcspn(buf_cstr(&b) + 12, ";");
    strncat(cookie, buf_cstr(&b) + 12, n);
    buf_fini(&b);
    struct gw_req *r = make(GW_POST, "/gw/body", NULL);
    gw_req_set_header(r, GW_H_COOKIE, cookie);
    run(r);
    assert_int_equal(seen.status, 403);
    r = make(GW_POST, "/gw/body", NULL);
    gw_req_set_header(r, GW_H_COOKIE, cookie);
    gw_req_set_header(r, GW_H_XSRF, "abc");
    run(r);
    assert_int_equal(seen.status, 201);
    r = make(GW_GET, "/gw/who/x", NULL);
    gw_req_set_header(r, GW_H_COOKIE, cookie);
    gw_req_set_header(r, GW_H_ORIGIN, "http://evil.example");
    run(r);
    assert_int_equal(seen.status, 403);
}

static void test_bodies_are_objects_or_empty(void **state)
{
    static const struct {
        const char *body;
        int status;
    } table[] = {
        { "", 201 },
        { " \r\n", 201 },
        { "{}", 201 },
        { " {\"a\":1} ", 201 },
        { "[]", 400 },
        { "null", 400 },
        { "{", 400 },
        { "{}x", 400 },
        { "{\"a\":1,\"a\":2}", 400 },
        { "\xff", 400 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        struct gw_req *r = make(GW_POST, "/gw/body", "token T");
        assert_int_equal(buf_append_str(&r->body, table[i].body), 0);
        run(r);
        assert_int_equal(seen.status, table[i].status);
        if (seen.status == 400)
            assert_non_null(strstr(seen.body, "Invalid JSON in body of request"));
    }
}

static void test_a_peer_that_leaves_is_reported_once(void **state)
{
    (void)state;
    run(make(GW_POST, "/gw/later", "token T"));
    assert_int_equal(seen.replies, 0);
    assert_false(list_empty(&server.pending));
    gw_req_gone(seen.held);
    assert_int_equal(seen.gone, 1);
    assert_true(list_empty(&server.pending));
    run(make(GW_POST, "/gw/later", "token T"));
    gw_reply_error(seen.held, 500, "late %d", 1);
    assert_int_equal(seen.replies, 1);
    assert_int_equal(seen.gone, 1);
    assert_true(list_empty(&server.pending));
}

static void test_a_closing_server_takes_no_more_requests(void **state)
{
    (void)state;
    server.closing = true;
    run(make(GW_GET, "/gw/open", NULL));
    assert_int_equal(seen.status, 503);
    assert_non_null(strstr(seen.head, "Retry-After: "));
}

static void test_header_values_cannot_hold_line_ends(void **state)
{
    (void)state;
    struct gw_req *r = make(GW_GET, "/gw/open", NULL);
    gw_reply_header(r, "X-Good", "%s", "fine");
    gw_reply_header(r, "X-Bad", "%s", "a\r\nX-Injected: 1");
    gw_reply_location(r, "/api/x\r\ny");
    gw_reply_empty(r, 204);
    assert_non_null(strstr(seen.head, "X-Good: fine\r\n"));
    assert_null(strstr(seen.head, "X-Injected"));
    assert_non_null(strstr(seen.head, "Location: /gw/api/x%0D%0Ay\r\n"));
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_a_request_with_a_token_reaches_its_handler),
        T(test_without_a_token_only_open_routes_answer),
        T(test_unknown_paths_and_methods_are_told_apart),
        T(test_a_trailing_slash_is_redirected_with_its_query),
        T(test_options_answers_everywhere_without_a_token),
        T(test_foreign_host_names_need_an_explicit_token),
        T(test_on_a_websocket_the_origin_counts_even_with_a_token),
        T(test_upgrades_and_routes_must_fit),
        T(test_a_cookie_needs_the_xsrf_proof_for_changes),
        T(test_bodies_are_objects_or_empty),
        T(test_a_peer_that_leaves_is_reported_once),
        T(test_a_closing_server_takes_no_more_requests),
        T(test_header_values_cannot_hold_line_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
