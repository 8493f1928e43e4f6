/* The pump between a stream and a gl_link, with a real gl_link as the guest at the other end. */
#include "common/mem.h"
#include "vm/channel.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static struct loop *loop;
static struct vm_channel *channel;
static struct gl_link *guest;
static int guest_fd;

static int n_messages, n_closed, n_writable, guest_messages;
static enum gl_type last_type, guest_last_type;
static size_t bytes_in, guest_bytes_in;
static int closed_code;
static char closed_why[200];
static bool free_in_message, free_in_closed;

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    n_messages++;
    last_type = type;
    if (stream)
        bytes_in += payload.n;
    if (free_in_message) {
        vm_channel_free(channel);
        channel = NULL;
    }
}

static void on_writable(void *ctx, uint32_t stream)
{
    (void)ctx;
    (void)stream;
    n_writable++;
}

static void on_closed(void *ctx, int code, const char *why)
{
    (void)ctx;
    n_closed++;
    closed_code = code;
    strncpy(closed_why, why, sizeof(closed_why) - 1);
    if (free_in_closed) {
        vm_channel_free(channel);
        channel = NULL;
    }
}

static const struct vm_channel_events events = { on_message, on_writable, on_closed };

static void guest_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    guest_messages++;
    guest_last_type = type;
    if (stream) {
        guest_bytes_in += payload.n;
        gl_link_grant(guest, stream, payload.n);
    }
}

static const struct gl_link_ops guest_ops = { guest_message, NULL, NULL };

/* Let the guest read and write once. */
static void guest_turn(void)
{
    char chunk[65536];
    ssize_t n;
    struct slice s;

    while ((n = recv(guest_fd, chunk, sizeof(chunk), MSG_DONTWAIT)) > 0)
        if (gl_link_feed(guest, slice_of(chunk, (size_t)n), NULL) < 0)
            return;
    while ((s = gl_link_output(guest)).n > 0 &&
           (n = send(guest_fd, s.p, s.n, MSG_DONTWAIT | MSG_NOSIGNAL)) > 0)
        gl_link_consumed(guest, (size_t)n);
}

static void turns(int n)
{
    for (int i = 0; i < n; i++) {
        loop_step(loop, 1);
        guest_turn();
    }
}

static int setup(void **state)
{
    static const struct gl_limits limits = { 64u << 20, 8u << 20 };
    int pair[2];
    (void)state;
    loop = loop_new();
    n_messages = n_closed = n_writable = guest_messages = closed_code = 0;
    bytes_in = guest_bytes_in = 0;
    free_in_message = free_in_closed = false;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
        return -1;
    guest_fd = pair[1];
    guest = gl_link_new(GL_GUEST, &limits, &guest_ops, NULL);
    channel = vm_channel_new(loop, pair[0], NULL, &events, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    vm_channel_free(channel);
    channel = NULL;
    gl_link_free(guest);
    if (guest_fd >= 0)
        close(guest_fd);
    loop_free(loop);
    return 0;
}

static void guest_send(enum gl_type type, uint32_t stream, const char *text)
{
    struct slice s = slice_str(text);
    assert_int_equal(gl_link_send(guest, type, stream, &s, 1), 0);
}

static void both_running(void)
{
    turns(3);
    guest_send(GL_HELLO, 0, "{\"version\":1}");
    turns(3);
    gl_link_set_phase(guest, GL_PHASE_RUNNING);
    gl_link_set_phase(vm_channel_link(channel), GL_PHASE_RUNNING);
}

static void test_hello_is_sent_at_once(void **state)
{
    (void)state;
    turns(3);
    assert_int_equal(guest_messages, 1);
    assert_int_equal(guest_last_type, GL_HELLO);
}

static void test_messages_pass_both_ways(void **state)
{
    (void)state;
    both_running();
    struct slice s = SLICE_LIT("{\"spec\":\"x\"}");
    assert_int_equal(gl_link_send(vm_channel_link(channel), GL_KERNEL_START, 1, &s, 1), 0);
    guest_send(GL_KERNEL_STATE, 1, "{\"state\":\"starting\"}");
    turns(5);
    assert_int_equal(guest_last_type, GL_KERNEL_START);
    assert_int_equal(last_type, GL_KERNEL_STATE);
    assert_int_equal(n_closed, 0);
}

static void test_large_messages_pass_in_spite_of_small_socket_buffers(void **state)
{
    size_t n = 6u << 20; /* more than the credit window */
    char *big = xmalloc(n);
    struct slice s = slice_of(big, n);
    (void)state;
    both_running();
    memset(big, 'x', n);
    assert_int_equal(gl_link_send(vm_channel_link(channel), GL_KERNEL_MSG, 1, &s, 1), 0);
    for (int i = 0; i < 2000 && guest_bytes_in < n; i++)
        turns(1);
    assert_int_equal(guest_bytes_in, n);
    assert_int_equal(gl_link_send(guest, GL_KERNEL_MSG, 1, &s, 1), 0);
    for (int i = 0; i < 2000 && bytes_in < n; i++)
        turns(1);
    assert_int_equal(bytes_in, n);
    assert_int_equal(n_closed, 0);
    free(big);
}

static void test_a_flood_stops_when_nobody_grants_credit(void **state)
{
    char *big = xmalloc(1u << 20);
    struct slice s = slice_of(big, 1u << 20);
    (void)state;
    both_running();
    memset(big, 'x', 1u << 20);
    for (int i = 0; i < 64; i++) {
        (void)gl_link_send(guest, GL_KERNEL_MSG, 1, &s, 1);
        turns(2);
    }
    turns(50);
    assert_true(bytes_in > 0);
    assert_true(bytes_in <= GL_WINDOW);
    assert_int_equal(n_closed, 0);
    free(big);
}

static void test_garbage_is_a_violation_and_closes_once(void **state)
{
    (void)state;
    turns(3);
    assert_int_equal(write(guest_fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27), 27);
    turns(5);
    assert_int_equal(n_closed, 1);
    assert_int_equal(closed_code, -EPROTO);
    assert_true(strlen(closed_why) > 0);
}

static void test_a_frame_out_of_its_phase_is_a_violation(void **state)
{
    static const struct gl_limits limits = { 1u << 20, 1u << 20 };
    struct gl_link *liar = gl_link_new(GL_GUEST, &limits, &guest_ops, NULL);
    struct slice s = SLICE_LIT("{\"state\":\"running\"}"), bytes;
    (void)state;
    turns(3);
    gl_link_set_phase(liar, GL_PHASE_RUNNING);
    gl_link_send(liar, GL_KERNEL_STATE, 1, &s, 1); /* before HELLO */
    bytes = gl_link_output(liar);
    assert_int_equal(write(guest_fd, bytes.p, bytes.n), bytes.n);
    turns(5);
    assert_int_equal(closed_code, -EPROTO);
    gl_link_free(liar);
}

static void test_end_of_file_closes_without_blame(void **state)
{
    (void)state;
    turns(3);
    close(guest_fd);
    guest_fd = -1;
    for (int i = 0; i < 20 && !n_closed; i++)
        loop_step(loop, 50);
    assert_int_equal(n_closed, 1);
    assert_int_equal(closed_code, -ECONNRESET);
}

static void test_may_be_freed_inside_message_and_closed(void **state)
{
    (void)state;
    free_in_message = true;
    turns(3);
    guest_send(GL_HELLO, 0, "{\"version\":1}");
    turns(5);
    assert_null(channel);
    assert_int_equal(n_messages, 1);
    assert_int_equal(n_closed, 0);
    teardown(state);
    setup(state);
    free_in_closed = true;
    close(guest_fd);
    guest_fd = -1;
    for (int i = 0; i < 20 && channel; i++)
        loop_step(loop, 50);
    assert_null(channel);
}

static void test_connect_says_what_is_wrong(void **state)
{
    (void)state;
    assert_int_equal(vm_channel_connect("/nowhere/at/all.sock"), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hello_is_sent_at_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_messages_pass_both_ways, setup, teardown),
        cmocka_unit_test_setup_teardown(test_large_messages_pass_in_spite_of_small_socket_buffers,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_flood_stops_when_nobody_grants_credit, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_garbage_is_a_violation_and_closes_once, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_frame_out_of_its_phase_is_a_violation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_end_of_file_closes_without_blame, setup, teardown),
        cmocka_unit_test_setup_teardown(test_may_be_freed_inside_message_and_closed, setup,
                                        teardown),
        cmocka_unit_test(test_connect_says_what_is_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
