#include "kernelmgr/router.h"
#include "tests/support/fake_vm.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct km_router r;

static int setup(void **state)
{
    (void)state;
    km_router_init(&r);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    km_router_fini(&r);
    return 0;
}

static struct km_req *add(const char *type, const char *id, uint32_t peer)
{
    struct jp_msg *m = fake_request(JP_SHELL, type, "s", id, "{}");
    struct km_req *q = km_router_add(&r, m, peer, 1);
    jp_msg_unref(m);
    return q;
}

static void a_request_is_found_by_its_id_until_reply_and_idle_have_passed(void **state)
{
    (void)state;
    struct km_req *q = add("execute_request", "a", 3);
    assert_ptr_equal(km_router_find(&r, "a"), q);
    assert_null(km_router_find(&r, ""));
    assert_null(km_router_find(&r, "b"));
    assert_true(q->wants_reply);
    assert_false(km_router_replied(&r, q, 5));
    assert_int_equal(r.n_half, 1);
    assert_true(km_router_idled(&r, q, 6));
    assert_null(km_router_find(&r, "a"));
    assert_int_equal(r.n, 0);
    assert_int_equal(r.n_half, 0);
}

static void a_message_without_a_reply_ends_with_its_idle(void **state)
{
    (void)state;
    struct km_req *q = add("comm_msg", "a", 3);
    assert_false(q->wants_reply);
    assert_true(km_router_idled(&r, q, 6));
    assert_int_equal(r.n, 0);
}

static void the_header_survives_its_message(void **state)
{
    (void)state;
    struct km_req *q = add("execute_request", "a", 3);
    assert_non_null(memmem(q->header.p, q->header.n, "\"msg_id\": \"a\"", 13));
    assert_string_equal(q->session, "s");
    assert_string_equal(q->msg_type, "execute_request");
}

static void the_running_request_is_the_oldest_busy_one_that_counts(void **state)
{
    (void)state;
    struct km_req *info = add("kernel_info_request", "i", 1);
    struct km_req *a = add("execute_request", "a", 1), *b = add("execute_request", "b", 1);
    assert_null(km_router_running(&r));
    km_router_busy(&r, info, true);
    assert_null(km_router_running(&r));
    km_router_busy(&r, b, true);
    assert_ptr_equal(km_router_running(&r), b);
    km_router_busy(&r, a, true);
    km_router_busy(&r, a, true);
    assert_ptr_equal(km_router_running(&r), a);
    km_router_remove(&r, a);
    km_router_busy(&r, b, false);
    assert_null(km_router_running(&r));
    assert_int_equal(r.n_busy, 0);
}

static void a_peer_waits_for_replies_on_a_channel(void **state)
{
    (void)state;
    add("comm_msg", "c", 1);
    assert_false(km_router_peer_waits(&r, 1, JP_SHELL));
    struct km_req *q = add("execute_request", "a", 1);
    assert_true(km_router_peer_waits(&r, 1, JP_SHELL));
    assert_false(km_router_peer_waits(&r, 1, JP_CONTROL));
    assert_false(km_router_peer_waits(&r, 2, JP_SHELL));
    km_router_replied(&r, q, 1);
    assert_false(km_router_peer_waits(&r, 1, JP_SHELL));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_request_is_found_by_its_id_until_reply_and_idle_have_passed),
        TEST(a_message_without_a_reply_ends_with_its_idle),
        TEST(the_header_survives_its_message),
        TEST(the_running_request_is_the_oldest_busy_one_that_counts),
        TEST(a_peer_waits_for_replies_on_a_channel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
