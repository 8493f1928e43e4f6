#include "gateway/http/head.h"
#include "gateway/jupyter/ws_conn.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct gw_framing framing(enum gw_method m, const char *length, const char *encoding)
{
    struct gw_framing f = { 0 };
    gw_framing_of(&f, m, length, encoding);
    return f;
}

static void test_content_length_must_be_a_plain_number(void **state)
{
    static const char *const bad[] = {
        "-1", "+5", "5, 5", "0x10", "5 ", "1e3", "12345678901234567890", "abc"
    };
    (void)state;
    assert_int_equal(framing(GW_POST, "", "").length, 0);
    assert_int_equal(framing(GW_POST, "0", "").status, 0);
    assert_int_equal(framing(GW_POST, "1234", "").length, 1234);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(framing(GW_POST, bad[i], "").status, 400);
}

static void test_ambiguous_framing_is_refused(void **state)
{
    (void)state;
    assert_true(framing(GW_POST, "", "chunked").chunked);
    assert_true(framing(GW_PATCH, "", "Chunked").chunked);
    assert_int_equal(framing(GW_POST, "5", "chunked").status, 400);
    assert_int_equal(framing(GW_POST, "", "gzip, chunked").status, 501);
    assert_int_equal(framing(GW_POST, "", "chunked, chunked").status, 501);
    assert_int_equal(framing(GW_GET, "", "chunked").status, 411);
    assert_int_equal(framing(GW_DELETE, "", "chunked").status, 411);
    assert_false(framing(GW_GET, "", "chunked").chunked);
}

static void test_keep_alive_follows_version_and_header(void **state)
{
    (void)state;
    assert_true(gw_keepalive_of("HTTP/1.1", ""));
    assert_false(gw_keepalive_of("HTTP/1.0", ""));
    assert_true(gw_keepalive_of("HTTP/1.0", "Keep-Alive"));
    assert_false(gw_keepalive_of("HTTP/1.1", "CLOSE"));
    assert_true(gw_keepalive_of("HTTP/1.1", "Upgrade"));
    assert_false(gw_keepalive_of("", ""));
}

static void test_the_offered_subprotocols_are_searched_for_ours(void **state)
{
    char first[GW_WS_NAME_MAX];
    (void)state;
    assert_true(gw_ws_offers_v1("v1.kernel.websocket.jupyter.org", first));
    assert_string_equal(first, "v1.kernel.websocket.jupyter.org");
    assert_true(gw_ws_offers_v1("a, v1.kernel.websocket.jupyter.org", first));
    assert_string_equal(first, "a");
    assert_false(gw_ws_offers_v1("v1.kernel.websocket.jupyter.orgx,  other", first));
    assert_false(gw_ws_offers_v1("", first));
    assert_string_equal(first, "");
    assert_false(gw_ws_offers_v1(" , ,", first));
    char longname[200];
    memset(longname, 'x', sizeof(longname));
    longname[199] = 0;
    assert_false(gw_ws_offers_v1(longname, first));
    assert_string_equal(first, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_content_length_must_be_a_plain_number),
        cmocka_unit_test(test_ambiguous_framing_is_refused),
        cmocka_unit_test(test_keep_alive_follows_version_and_header),
        cmocka_unit_test(test_the_offered_subprotocols_are_searched_for_ours),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
