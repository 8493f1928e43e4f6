#include "gateway/jupyter/ws_unacked.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct jp_msg *message(unsigned i)
{
    char header[100];
    struct jp_msg *m = NULL;
    snprintf(header, sizeof(header), "{\"msg_id\":\"%u\",\"msg_type\":\"stream\"}", i);
    struct jp_parts p = { .channel = JP_IOPUB,
                          .header = slice_str(header),
                          .content = SLICE_LIT("{}") };
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    return m;
}

/* Messages from..to-1, each 10 bytes long on the wire. */
static void fill(struct ws_unacked *u, unsigned from, unsigned to)
{
    for (unsigned i = from; i < to; i++) {
        struct jp_msg *m = message(i);
        ws_unacked_add(u, m, (i + 1) * 10, 1000 + i);
        jp_msg_unref(m);
    }
}

static void expect(struct ws_unacked *u, unsigned from, unsigned to)
{
    for (unsigned i = from; i < to; i++) {
        char id[20];
        struct jp_msg *m = ws_unacked_take(u);
        snprintf(id, sizeof(id), "%u", i);
        assert_non_null(m);
        assert_string_equal(m->msg_id, id);
        assert_int_equal(m->refs, 1);
        jp_msg_unref(m);
    }
    assert_null(ws_unacked_take(u));
}

static void test_what_is_acknowledged_goes_and_the_rest_stays_in_order(void **state)
{
    struct ws_unacked u = { 0 };
    (void)state;
    fill(&u, 0, 40);
    ws_unacked_ack(&u, 99); /* nine whole messages and most of the tenth */
    fill(&u, 40, 100);
    ws_unacked_ack(&u, 250);
    expect(&u, 25, 100);
    ws_unacked_ack(&u, UINT64_MAX);
    assert_false(ws_unacked_overdue(&u, 1000000));
    fill(&u, 0, 2);
    assert_false(ws_unacked_overdue(&u, 1500));
    assert_true(ws_unacked_overdue(&u, 1501));
    ws_unacked_fini(&u);
}

static void test_the_number_is_bounded_and_the_oldest_give_way(void **state)
{
    struct ws_unacked u = { 0 };
    (void)state;
    fill(&u, 0, WS_UNACKED_MAX + 5);
    assert_int_equal(u.n, WS_UNACKED_MAX);
    expect(&u, 5, WS_UNACKED_MAX + 5);
    ws_unacked_fini(&u);
}

static void test_a_session_gets_back_what_was_parked_for_it_once(void **state)
{
    struct ws_parked p;
    struct ws_unacked u = { 0 };
    (void)state;
    ws_parked_init(&p);
    fill(&u, 0, 3);
    ws_parked_put(&p, "k", "s", &u, 0);
    assert_int_equal(u.n, 0);
    fill(&u, 3, 5);
    ws_parked_put(&p, "k", "s", &u, 1);
    fill(&u, 7, 8);
    ws_parked_put(&p, "k", "other", &u, 1);
    ws_parked_get(&p, "k", "nobody", &u, 2);
    assert_int_equal(u.n, 0);
    ws_parked_get(&p, "k", "s", &u, 2);
    expect(&u, 0, 5);
    ws_parked_get(&p, "k", "s", &u, 2);
    assert_int_equal(u.n, 0);
    ws_unacked_fini(&u);
    ws_parked_fini(&p);
    assert_int_equal(p.bytes, 0);
}

static void test_parked_messages_do_not_stay_for_ever(void **state)
{
    struct ws_parked p;
    struct ws_unacked u = { 0 };
    (void)state;
    ws_parked_init(&p);
    fill(&u, 0, 3);
    ws_parked_put(&p, "k", "s", &u, 0);
    ws_parked_get(&p, "k", "s", &u, WS_PARKED_TTL_MS);
    assert_int_equal(u.n, 0);
    assert_int_equal(p.bytes, 0);
    ws_parked_put(&p, "k", "empty", &u, 0);
    assert_true(list_empty(&p.all));
    ws_unacked_fini(&u);
    ws_parked_fini(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_acknowledged_goes_and_the_rest_stays_in_order),
        cmocka_unit_test(test_the_number_is_bounded_and_the_oldest_give_way),
        cmocka_unit_test(test_a_session_gets_back_what_was_parked_for_it_once),
        cmocka_unit_test(test_parked_messages_do_not_stay_for_ever),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
