/* QMP client: fed by hand on a virtual loop, and over a socketpair where descriptors travel. */
#include "common/mem.h"
#include "vm/qmp.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#define GREETING                                                                                   \
    "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}}, "            \
    "\"capabilities\": []}}\r\n"

static struct loop *loop;
static struct vm_qmp *qmp;
static int n_ready, n_closed, n_replies;
static struct err closed_err, reply_err;
static char trace[512];
static bool free_on_reply, free_on_ready;

static void note(const char *s)
{
    strncat(trace, s, sizeof(trace) - strlen(trace) - 1);
}

static void on_ready(void *ctx)
{
    (void)ctx;
    n_ready++;
    if (free_on_ready) {
        vm_qmp_free(qmp);
        qmp = NULL;
    }
}

static void on_event(void *ctx, const char *name, json_t *data)
{
    const char *status = json_string_value(json_object_get(data, "status"));
    (void)ctx;
    note(name);
    if (status) {
        note(":");
        note(status);
    }
    note(" ");
}

static void on_closed(void *ctx, const struct err *e)
{
    (void)ctx;
    n_closed++;
    closed_err = *e;
}

static const struct vm_qmp_events events = { on_ready, on_event, on_closed };

static void on_reply(void *ctx, json_t *result, const struct err *e)
{
    const char *name = ctx;
    n_replies++;
    note(name);
    note(e ? "! " : "=");
    if (e)
        reply_err = *e;
    else
        note(json_is_object(result) ? "{} " : "? ");
    if (free_on_reply) {
        vm_qmp_free(qmp);
        qmp = NULL;
    }
}

static void feed(const char *s)
{
    vm_qmp_feed(qmp, slice_str(s));
}

static int setup(void **state)
{
    (void)state;
    loop = loop_new_virtual();
    n_ready = n_closed = n_replies = 0;
    trace[0] = '\0';
    free_on_reply = free_on_ready = false;
    memset(&closed_err, 0, sizeof(closed_err));
    memset(&reply_err, 0, sizeof(reply_err));
    qmp = vm_qmp_new(loop, -1, 1000, NULL, &events, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    vm_qmp_free(qmp);
    qmp = NULL;
    loop_free(loop);
    return 0;
}

static void negotiate(void)
{
    feed(GREETING);
    feed("{\"return\": {}, \"id\": 1}\r\n");
}

static void *named(const char *s)
{
    return (void *)(uintptr_t)s;
}

static int command(const char *name)
{
    return vm_qmp_command(qmp, name, NULL, -1, 500, on_reply, named(name));
}

static void test_is_ready_after_greeting_and_capabilities(void **state)
{
    (void)state;
    assert_int_equal(command("query-status"), -ENOTCONN);
    feed(GREETING);
    assert_int_equal(n_ready, 0);
    feed("{\"return\": {}, \"id\": 1}\r\n");
    assert_int_equal(n_ready, 1);
    assert_int_equal(command("query-status"), 0);
}

static void test_replies_reach_their_commands_in_order(void **state)
{
    (void)state;
    negotiate();
    command("stop");
    command("cont");
    feed("{\"return\": {}, \"id\": 2}\r\n{\"return\": {}, \"id\": 3}\r\n");
    assert_string_equal(trace, "stop={} cont={} ");
    assert_int_equal(n_closed, 0);
}

static void test_lines_may_come_in_any_pieces(void **state)
{
    static const char text[] = GREETING "{\"return\": {}, \"id\": 1}\r\n"
                                        "{\"event\": \"STOP\", \"data\": {\"status\": \"x\"}}\r\n";
    (void)state;
    for (size_t i = 0; i < sizeof(text) - 1; i++)
        vm_qmp_feed(qmp, slice_of(text + i, 1));
    assert_int_equal(n_ready, 1);
    assert_string_equal(trace, "STOP:x ");
}

static void test_an_error_reply_carries_qemus_text(void **state)
{
    (void)state;
    negotiate();
    command("migrate");
    feed("{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such fd\"}, \"id\": 2}\r\n");
    assert_int_equal(reply_err.code, -EREMOTEIO);
    assert_non_null(strstr(reply_err.msg, "migrate"));
    assert_non_null(strstr(reply_err.msg, "no such fd"));
    assert_int_equal(n_closed, 0);
    assert_int_equal(command("cont"), 0);
}

static void test_a_reply_with_a_foreign_id_ends_the_conversation(void **state)
{
    (void)state;
    negotiate();
    command("stop");
    feed("{\"return\": {}, \"id\": 7}\r\n");
    assert_int_equal(n_closed, 1);
    assert_int_equal(closed_err.code, -EPROTO);
    assert_string_equal(trace, "stop! "); /* it was answered, with the error */
    assert_int_equal(command("cont"), -ENOTCONN);
}

static void test_replies_out_of_order_end_the_conversation(void **state)
{
    (void)state;
    negotiate();
    command("stop");
    command("cont");
    feed("{\"return\": {}, \"id\": 3}\r\n");
    assert_int_equal(closed_err.code, -EPROTO);
    assert_int_equal(n_replies, 2);
}

static void test_a_reply_that_nobody_waits_for_ends_the_conversation(void **state)
{
    (void)state;
    negotiate();
    feed("{\"return\": {}, \"id\": 2}\r\n");
    assert_int_equal(closed_err.code, -EPROTO);
}

static void test_what_is_no_json_object_ends_the_conversation(void **state)
{
    static const char *const bad[] = { "hello\r\n", "[]\r\n", "{\"QMP\": 1}\r\n", "{}\r\n",
                                       "{\"QMP\": {}\r\n" };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        feed(bad[i]);
        assert_int_equal(closed_err.code, -EPROTO);
        teardown(state);
        setup(state);
    }
    assert_int_equal(n_closed, 0);
}

static void test_replies_with_both_or_neither_of_result_and_error_are_refused(void **state)
{
    static const char *const bad[] = {
        "{\"id\": 2}\r\n", "{\"return\": {}, \"error\": {\"desc\": \"x\"}, \"id\": 2}\r\n",
        "{\"error\": {}, \"id\": 2}\r\n", "{\"error\": 3, \"id\": 2}\r\n"
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        negotiate();
        command("stop");
        feed(bad[i]);
        assert_int_equal(closed_err.code, -EPROTO);
        teardown(state);
        setup(state);
    }
    assert_int_equal(n_closed, 0);
}

static void test_an_endless_line_ends_the_conversation(void **state)
{
    char chunk[4096];
    (void)state;
    negotiate();
    memset(chunk, 'x', sizeof(chunk));
    for (size_t sent = 0; sent <= VM_QMP_LINE_MAX && !n_closed; sent += sizeof(chunk))
        vm_qmp_feed(qmp, slice_of(chunk, sizeof(chunk)));
    assert_int_equal(n_closed, 1);
    assert_non_null(strstr(closed_err.msg, "too long"));
}

static void test_a_refused_negotiation_ends_the_conversation(void **state)
{
    (void)state;
    feed(GREETING);
    feed("{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no\"}, \"id\": 1}\r\n");
    assert_int_equal(n_ready, 0);
    assert_int_equal(n_closed, 1);
}

static void test_no_greeting_in_time_is_a_timeout(void **state)
{
    (void)state;
    loop_virtual_advance(loop, 999);
    assert_int_equal(n_closed, 0);
    loop_virtual_advance(loop, 1);
    assert_int_equal(closed_err.code, -ETIMEDOUT);
}

static void test_a_command_without_answer_in_time_is_a_timeout_that_names_it(void **state)
{
    (void)state;
    negotiate();
    loop_virtual_advance(loop, 100000);
    assert_int_equal(n_closed, 0); /* silence with nothing asked is fine */
    command("migrate-incoming");
    loop_virtual_advance(loop, 500);
    assert_int_equal(closed_err.code, -ETIMEDOUT);
    assert_non_null(strstr(closed_err.msg, "migrate-incoming"));
    assert_int_equal(reply_err.code, -ETIMEDOUT);
}

static void test_too_many_waiting_commands_are_refused(void **state)
{
    unsigned n = 0;
    (void)state;
    negotiate();
    while (command("stop") == 0 && n < 1000)
        n++;
    assert_int_equal(n, VM_QMP_PENDING_MAX);
    assert_int_equal(command("stop"), -ENOBUFS);
    assert_int_equal(n_closed, 0);
}

static void test_may_be_freed_from_its_own_callbacks(void **state)
{
    (void)state;
    free_on_reply = true;
    negotiate();
    command("a");
    command("b");
    feed("{\"return\": {}, \"id\": 2}\r\n{\"return\": {}, \"id\": 3}\r\n");
    assert_string_equal(trace, "a={} "); /* b was dropped with the client */
    assert_null(qmp);
    assert_int_equal(n_closed, 0);
    teardown(state);
    setup(state);
    free_on_ready = true;
    negotiate();
    assert_null(qmp);
}

static void test_descriptors_travel_with_their_command(void **state)
{
    struct loop *real = loop_new();
    char bytes[1024], control[64];
    struct iovec iov = { bytes, sizeof(bytes) };
    struct msghdr msg = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)
    };
    struct cmsghdr *h;
    struct vm_qmp *q;
    int pair[2], fd = open("/dev/null", O_RDONLY), got = -1;
    ssize_t n;

    (void)state;
    socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair);
    q = vm_qmp_new(real, pair[0], 5000, NULL, &events, NULL);
    assert_int_equal(write(pair[1], GREETING, strlen(GREETING)), strlen(GREETING));
    loop_step(real, 1000);
    n = read(pair[1], bytes, sizeof(bytes));
    assert_true(n > 0);
    assert_int_equal(write(pair[1], "{\"return\": {}, \"id\": 1}\n", 24), 24);
    loop_step(real, 1000);
    assert_int_equal(n_ready, 1);
    assert_int_equal(
        vm_qmp_command(q, "getfd", json_pack("{s:s}", "fdname", "st"), fd, 5000, NULL, NULL), 0);
    close(fd); /* it has its own */
    n = recvmsg(pair[1], &msg, 0);
    assert_true(n > 0);
    bytes[n] = '\0';
    assert_non_null(strstr(bytes, "\"getfd\""));
    h = CMSG_FIRSTHDR(&msg);
    assert_non_null(h);
    if (h)
        memcpy(&got, CMSG_DATA(h), sizeof(got));
    assert_int_equal(read(got, bytes, 1), 0); /* /dev/null it is */
    close(got);
    close(pair[1]);
    for (int i = 0; i < 50 && !n_closed; i++)
        loop_step(real, 100);
    assert_int_equal(closed_err.code, -ECONNRESET);
    vm_qmp_free(q);
    loop_free(real);
}

static void test_drain_reads_what_a_dead_peer_left(void **state)
{
    struct loop *real = loop_new();
    struct vm_qmp *q;
    int pair[2];
    (void)state;
    socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair);
    q = vm_qmp_new(real, pair[0], 5000, NULL, &events, NULL);
    assert_true(write(pair[1], GREETING, strlen(GREETING)) > 0);
    assert_true(write(pair[1], "{\"return\": {}, \"id\": 1}\n", 24) > 0);
    assert_true(write(pair[1], "{\"event\": \"SHUTDOWN\"}\n", 22) > 0);
    close(pair[1]);
    vm_qmp_drain(q);
    /* The capability command could not be sent any more, so its answer is not believed. */
    assert_int_equal(n_closed, 1);
    vm_qmp_free(q);
    loop_free(real);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_is_ready_after_greeting_and_capabilities, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_replies_reach_their_commands_in_order, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_lines_may_come_in_any_pieces, setup, teardown),
        cmocka_unit_test_setup_teardown(test_an_error_reply_carries_qemus_text, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_reply_with_a_foreign_id_ends_the_conversation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_replies_out_of_order_end_the_conversation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_reply_that_nobody_waits_for_ends_the_conversation,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_no_json_object_ends_the_conversation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_replies_with_both_or_neither_of_result_and_error_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_an_endless_line_ends_the_conversation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_refused_negotiation_ends_the_conversation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_no_greeting_in_time_is_a_timeout, setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_a_command_without_answer_in_time_is_a_timeout_that_names_it, setup, teardown),
        cmocka_unit_test_setup_teardown(test_too_many_waiting_commands_are_refused, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_may_be_freed_from_its_own_callbacks, setup, teardown),
        cmocka_unit_test_setup_teardown(test_descriptors_travel_with_their_command, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_drain_reads_what_a_dead_peer_left, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
