#include "common/mem.h"
#include "kernelmgr/log.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
/* cmocka needs the four above first */
#include <cmocka.h>

static struct jp_msg *message(const char *type, const char *parent_id, const char *content)
{
    char header[200], parent[200];
    struct jp_msg *m = NULL;
    snprintf(header, sizeof(header), "{\"msg_id\":\"m\",\"msg_type\":\"%s\",\"session\":\"k\"}",
             type);
    snprintf(parent, sizeof(parent),
             "{\"msg_id\":\"%s\",\"msg_type\":\"execute_request\",\"session\":\"s\"}", parent_id);
    struct jp_parts p = { .channel = JP_IOPUB,
                          .header = slice_str(header),
                          .parent = slice_str(parent),
                          .content = slice_str(content) };
    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    return m;
}

static void append(struct km_log *l, const char *type, const char *parent_id, const char *content,
                   uint32_t peer)
{
    struct jp_msg *m = message(type, parent_id, content);
    km_log_append(l, m, peer, NULL);
    jp_msg_unref(m);
}

static void append_text(struct km_log *l, const char *parent, const char *text)
{
    char content[5000];
    snprintf(content, sizeof(content), "{\"name\": \"stdout\", \"text\": \"%s\"}", text);
    append(l, "stream", parent, content, 0);
}

/* Content of the next message, or "" at the end. */
static const char *next(struct km_log *l, struct km_cursor *c)
{
    static char text[20000];
    struct jp_msg *m = km_log_pull(l, c, NULL);
    text[0] = 0;
    if (m)
        snprintf(text, sizeof(text), "%.*s", (int)m->parts.content.n,
                 (const char *)m->parts.content.p);
    jp_msg_unref(m);
    return text;
}

static void nothing_is_stored_without_a_cursor(void **state)
{
    struct km_log l;
    (void)state;
    km_log_init(&l, 1000000, 100000, 1000);
    append(&l, "status", "p", "{\"a\":1}", 0);
    assert_int_equal(l.count, 0);
    km_log_fini(&l);
}

static void each_cursor_gets_everything_in_order(void **state)
{
    struct km_log l;
    struct km_cursor a, b;
    (void)state;
    km_log_init(&l, 1000000, 100000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    append(&l, "x", "p", "{\"n\":1}", 0);
    km_log_add_cursor(&l, &b, 2, true);
    append(&l, "x", "p", "{\"n\":2}", 0);
    append(&l, "x", "p", "{\"n\":3}", 0);
    assert_string_equal(next(&l, &b), "{\"n\":2}");
    assert_string_equal(next(&l, &a), "{\"n\":1}");
    assert_string_equal(next(&l, &a), "{\"n\":2}");
    assert_string_equal(next(&l, &a), "{\"n\":3}");
    assert_string_equal(next(&l, &a), "");
    assert_true(km_log_has(&b));
    assert_string_equal(next(&l, &b), "{\"n\":3}");
    assert_false(km_log_has(&b));
    assert_int_equal(l.count, 0);
    assert_int_equal(l.bytes, 0);
    km_log_remove_cursor(&l, &a);
    km_log_remove_cursor(&l, &b);
    km_log_fini(&l);
}

static void an_entry_for_one_peer_is_seen_by_no_other(void **state)
{
    struct km_log l;
    struct km_cursor a, b;
    (void)state;
    km_log_init(&l, 1000000, 100000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    km_log_add_cursor(&l, &b, 2, true);
    append(&l, "x", "p", "{\"n\":1}", 1);
    append(&l, "x", "p", "{\"n\":2}", 0);
    assert_string_equal(next(&l, &b), "{\"n\":2}");
    assert_int_equal(b.lag, 0);
    assert_string_equal(next(&l, &a), "{\"n\":1}");
    append(&l, "x", "p", "{\"n\":3}", 7);
    assert_string_equal(next(&l, &a), "{\"n\":2}");
    km_log_remove_cursor(&l, &a);
    km_log_remove_cursor(&l, &b);
    assert_int_equal(l.count, 0);
    km_log_fini(&l);
}

static void streams_are_joined_until_somebody_looks(void **state)
{
    struct km_log l;
    struct km_cursor a;
    (void)state;
    km_log_init(&l, 1000000, 100000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    append_text(&l, "p", "one\\n");
    append_text(&l, "p", "\\ud800 two\\n");
    assert_int_equal(l.count, 1);
    assert_string_equal(next(&l, &a), "{\"name\": \"stdout\", \"text\": \"one\\n\\ud800 two\\n\"}");
    append_text(&l, "p", "three");
    assert_string_equal(next(&l, &a), "{\"name\": \"stdout\", \"text\": \"three\"}");
    km_log_remove_cursor(&l, &a);
    km_log_fini(&l);
}

static void other_parents_names_and_kinds_are_not_joined(void **state)
{
    struct km_log l;
    struct km_cursor a;
    (void)state;
    km_log_init(&l, 1000000, 100000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    append_text(&l, "p", "a");
    append_text(&l, "q", "b");
    append(&l, "stream", "q", "{\"name\": \"stderr\", \"text\": \"c\"}", 0);
    append(&l, "status", "q", "{\"execution_state\": \"idle\"}", 0);
    append(&l, "stream", "q", "{\"name\": \"stderr\", \"text\": \"d\"}", 0);
    assert_int_equal(l.count, 5);
    km_log_remove_cursor(&l, &a);
    km_log_fini(&l);
}

static void a_joined_message_stays_below_the_limit(void **state)
{
    struct km_log l;
    struct km_cursor a;
    (void)state;
    km_log_init(&l, 1000000, 100000, 100);
    km_log_add_cursor(&l, &a, 1, true);
    for (int i = 0; i < 40; i++)
        append_text(&l, "p", "0123456789");
    assert_in_range(l.count, 5, 10);
    km_log_remove_cursor(&l, &a);
    km_log_fini(&l);
}

static void a_newcomer_does_not_see_what_was_said_before(void **state)
{
    struct km_log l;
    struct km_cursor a, b;
    (void)state;
    km_log_init(&l, 1000000, 100000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    append_text(&l, "p", "old");
    km_log_add_cursor(&l, &b, 2, true);
    append_text(&l, "p", "new");
    assert_string_equal(next(&l, &b), "{\"name\": \"stdout\", \"text\": \"new\"}");
    assert_string_equal(next(&l, &a), "{\"name\": \"stdout\", \"text\": \"old\"}");
    km_log_remove_cursor(&l, &a);
    km_log_remove_cursor(&l, &b);
    km_log_fini(&l);
}

static void an_absent_cursor_keeps_at_most_the_replay_limit_and_knows_its_gap(void **state)
{
    struct km_log l;
    struct km_cursor a;
    char text[600];
    unsigned left = 0;
    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = 0;
    km_log_init(&l, 1000000, 20000, 0);
    km_log_add_cursor(&l, &a, 1, false);
    append(&l, "status", "p", "{\"execution_state\": \"busy\"}", 0);
    for (int i = 0; i < 100; i++) {
        append_text(&l, "p", text);
        assert_in_range(l.bytes, 0, 20000 + 2000);
    }
    append(&l, "status", "p", "{\"execution_state\": \"idle\"}", 0);
    assert_true(a.gap_msgs > 50);
    assert_true(a.gap_bytes > 50 * 600);
    assert_non_null(strstr(a.gap_parent, "\"p\""));
    assert_string_equal(next(&l, &a), "{\"execution_state\": \"busy\"}"); /* status goes last */
    while (strstr(next(&l, &a), "xxx"))
        left++;
    assert_int_equal(left + a.gap_msgs, 100);
    assert_int_equal(l.count, 0);
    km_log_remove_cursor(&l, &a);
    km_log_fini(&l);
}

static void what_an_attached_cursor_needs_stays_up_to_the_cap(void **state)
{
    struct km_log l;
    struct km_cursor a;
    char text[600];
    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = 0;
    km_log_init(&l, 200000, 1000, 0);
    km_log_add_cursor(&l, &a, 1, true);
    for (int i = 0; i < 100; i++)
        append_text(&l, "p", text);
    assert_int_equal(a.gap_msgs, 0);
    assert_int_equal(l.count, 100);
    for (int i = 0; i < 1000; i++) {
        append_text(&l, "p", text);
        assert_in_range(l.bytes, 0, 200000);
    }
    assert_int_equal(a.gap_msgs + l.count, 1100);
    assert_int_equal(l.total_lost, a.gap_msgs);
    km_log_remove_cursor(&l, &a);
    assert_int_equal(l.count, 0);
    km_log_fini(&l);
}

static void a_slow_attached_cursor_does_not_cost_an_absent_one_its_replay(void **state)
{
    struct km_log l;
    struct km_cursor slow, away;
    char text[600];
    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = 0;
    km_log_init(&l, 1000000, 50000, 0);
    km_log_add_cursor(&l, &away, 1, false);
    append_text(&l, "p", "first");
    km_log_add_cursor(&l, &slow, 2, true);
    for (int i = 0; i < 300; i++)
        append_text(&l, "p", text);
    assert_int_equal(away.gap_msgs, 0);
    assert_non_null(strstr(next(&l, &away), "first"));
    km_log_remove_cursor(&l, &away);
    km_log_remove_cursor(&l, &slow);
    km_log_fini(&l);
}

static void one_huge_message_drops_nothing_else(void **state)
{
    struct km_log l;
    struct km_cursor a;
    char *content = xmalloc(300000);
    (void)state;
    km_log_init(&l, 200000, 1000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    append_text(&l, "p", "small");
    memset(content, 'x', 299999);
    memcpy(content, "{\"d\":\"", 6);
    memcpy(content + 299990, "\"}", 3);
    append(&l, "display_data", "p", content, 0);
    assert_int_equal(a.gap_msgs, 0);
    assert_int_equal(l.count, 2);
    free(content);
    km_log_remove_cursor(&l, &a);
    km_log_fini(&l);
}

static void pending_tells_whether_an_entry_was_pulled(void **state)
{
    struct km_log l;
    struct km_cursor a;
    uint64_t seq;
    (void)state;
    km_log_init(&l, 200000, 1000, 1000);
    km_log_add_cursor(&l, &a, 1, true);
    struct jp_msg *m = message("input_request", "p", "{}");
    km_log_append(&l, m, 1, &seq);
    jp_msg_unref(m);
    assert_true(km_log_pending(&a, seq));
    next(&l, &a);
    assert_false(km_log_pending(&a, seq));
    km_log_remove_cursor(&l, &a);
    km_log_fini(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_stored_without_a_cursor),
        cmocka_unit_test(each_cursor_gets_everything_in_order),
        cmocka_unit_test(an_entry_for_one_peer_is_seen_by_no_other),
        cmocka_unit_test(streams_are_joined_until_somebody_looks),
        cmocka_unit_test(other_parents_names_and_kinds_are_not_joined),
        cmocka_unit_test(a_joined_message_stays_below_the_limit),
        cmocka_unit_test(a_newcomer_does_not_see_what_was_said_before),
        cmocka_unit_test(an_absent_cursor_keeps_at_most_the_replay_limit_and_knows_its_gap),
        cmocka_unit_test(what_an_attached_cursor_needs_stays_up_to_the_cap),
        cmocka_unit_test(a_slow_attached_cursor_does_not_cost_an_absent_one_its_replay),
        cmocka_unit_test(one_huge_message_drops_nothing_else),
        cmocka_unit_test(pending_tells_whether_an_entry_was_pulled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
