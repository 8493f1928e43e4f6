/* The descriptor under the guest link: a socketpair plays the host; a port that comes back is
 * imitated by `port = true` on the same socketpair. */
#include "guest-kernel-shim/link.h"
#include "shim_test.h"
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

struct fixture {
    struct shim_loop loop;
    struct shim_link link;
    struct gl_link *host;
    int peer;
    unsigned messages, downs, finals;
    enum gl_type last;
};

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct fixture *f = ctx;

    (void)stream;
    (void)payload;
    f->messages++;
    f->last = type;
    if (type == GL_HELLO)
        gl_link_set_phase(f->link.gl, GL_PHASE_IDLE);
}
static void on_writable(void *ctx, uint32_t stream)
{
    (void)ctx;
    (void)stream;
}
static void on_down(void *ctx, bool final)
{
    struct fixture *f = ctx;

    f->downs++;
    f->finals += final;
}
static const struct shim_link_ops ops = { on_message, on_writable, on_down };

static void host_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    (void)ctx;
    (void)type;
    (void)stream;
    (void)payload;
}
static const struct gl_link_ops host_ops = { .message = host_message };

static void set_up(struct fixture *f, bool port)
{
    const struct gl_limits limits = { .message_max = 1u << 20, .queue_max = 1u << 20 };
    int pair[2];

    *f = (struct fixture) { 0 };
    shim_loop_init(&f->loop);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    f->peer = pair[1];
    f->host = gl_link_new(GL_HOST, &limits, &host_ops, f);
    assert_int_equal(shim_link_open(&f->link, &f->loop, pair[0], port, &ops, f, NULL), 0);
}

static void tear_down(struct fixture *f)
{
    shim_link_close(&f->link);
    gl_link_free(f->host);
    closep(&f->peer);
    shim_loop_fini(&f->loop);
}

/* What the host has queued goes out; then the shim's side runs until it waits. */
static void exchange(struct fixture *f)
{
    struct slice out;

    while ((out = gl_link_output(f->host)).n) {
        assert_int_equal(write(f->peer, out.p, out.n), out.n);
        gl_link_consumed(f->host, out.n);
    }
    for (int i = 0; i < 10; i++)
        shim_loop_step(&f->loop, 0);
}

static void host_says(struct fixture *f, enum gl_type type)
{
    struct slice body = SLICE_LIT("{\"version\":1}");

    assert_int_equal(gl_link_send(f->host, type, 0, &body, 1), 0);
    exchange(f);
}

static void test_messages_arrive_and_answers_go_out(void **state)
{
    struct slice body = SLICE_LIT("{\"version\":1}");
    uint8_t bytes[256];
    struct fixture f;

    (void)state;
    set_up(&f, false);
    host_says(&f, GL_HELLO);
    assert_int_equal(f.messages, 1);
    assert_int_equal(gl_link_send(f.link.gl, GL_HELLO, 0, &body, 1), 0);
    shim_link_flush(&f.link);
    assert_int_equal(read(f.peer, bytes, sizeof(bytes)), GL_HEADER + body.n);
    tear_down(&f);
}

static void test_a_closed_socketpair_is_final(void **state)
{
    struct fixture f;

    (void)state;
    set_up(&f, false);
    host_says(&f, GL_HELLO);
    close(f.peer);
    f.peer = -1;
    exchange(&f);
    assert_int_equal(f.finals, 1);
    exchange(&f);
    assert_int_equal(f.downs, 1); /* once */
    tear_down(&f);
}

static void test_garbage_on_a_socketpair_ends_it(void **state)
{
    struct fixture f;

    (void)state;
    set_up(&f, false);
    host_says(&f, GL_HELLO);
    assert_int_equal(write(f.peer, "GET / HTTP/1.1\r\n\r\n", 18), 18);
    exchange(&f);
    assert_int_equal(f.finals, 1);
    tear_down(&f);
}

static void test_a_new_host_on_the_port_starts_over_with_hello(void **state)
{
    struct fixture f;

    (void)state;
    set_up(&f, true);
    host_says(&f, GL_HELLO);
    gl_link_set_phase(f.link.gl, GL_PHASE_RUNNING); /* a host that is replaced unnoticed */
    gl_link_reset(f.host);
    host_says(&f, GL_HELLO);
    assert_int_equal(f.messages, 2);
    assert_int_equal(gl_link_phase(f.link.gl), GL_PHASE_IDLE);
    assert_int_equal(f.finals, 0);
    tear_down(&f);
}

static void test_garbage_on_the_port_is_waited_out_until_the_next_hello(void **state)
{
    struct fixture f;

    (void)state;
    set_up(&f, true);
    assert_int_equal(write(f.peer, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 12), 12);
    exchange(&f);
    assert_int_equal(f.finals, 0);
    host_says(&f, GL_HELLO);
    assert_int_equal(f.messages, 1);
    tear_down(&f);
}

static void test_bytes_that_overtake_the_news_of_a_host_do_not_count_as_its_end(void **state)
{
    struct slice body = SLICE_LIT("{\"version\":1}"), out;
    struct fixture f;

    (void)state;
    set_up(&f, true);
    /* As a virtio port shows it: data to read, and nobody there. */
    assert_int_equal(gl_link_send(f.host, GL_HELLO, 0, &body, 1), 0);
    out = gl_link_output(f.host);
    assert_int_equal(write(f.peer, out.p, out.n), out.n);
    close(f.peer);
    f.peer = -1;
    for (int i = 0; i < 10; i++)
        shim_loop_step(&f.loop, 0);
    assert_int_equal(f.messages, 1);
    assert_int_equal(f.downs, 0);
    assert_int_equal(gl_link_phase(f.link.gl), GL_PHASE_IDLE);
    tear_down(&f);
}

static void test_a_host_that_was_seen_and_left_resets_the_port(void **state)
{
    struct fixture f;

    (void)state;
    set_up(&f, true);
    host_says(&f, GL_HELLO);
    close(f.peer);
    f.peer = -1;
    for (int i = 0; i < 10; i++)
        shim_loop_step(&f.loop, 0);
    assert_int_equal(f.downs, 1);
    assert_int_equal(f.finals, 0);
    assert_int_equal(gl_link_phase(f.link.gl), GL_PHASE_HELLO);
    tear_down(&f);
}

static void test_a_port_is_found_by_its_name(void **state)
{
    char path[64];

    put_file(*state, "vport1p1/name", "org.other\n");
    put_file(*state, "vport2p1/name", "org.cellvisor.link\n");
    put_file(*state, "vport3p1/other", "");
    assert_int_equal(shim_link_find_port(*state, "org.cellvisor.link", path, sizeof(path)), 0);
    assert_string_equal(path, "/dev/vport2p1");
    assert_int_equal(shim_link_find_port(*state, "org.cellvisor", path, sizeof(path)), -ENOENT);
    assert_int_equal(shim_link_find_port("/nonexistent", "x", path, sizeof(path)), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_arrive_and_answers_go_out),
        cmocka_unit_test(test_a_closed_socketpair_is_final),
        cmocka_unit_test(test_garbage_on_a_socketpair_ends_it),
        cmocka_unit_test(test_a_new_host_on_the_port_starts_over_with_hello),
        cmocka_unit_test(test_garbage_on_the_port_is_waited_out_until_the_next_hello),
        cmocka_unit_test(test_bytes_that_overtake_the_news_of_a_host_do_not_count_as_its_end),
        cmocka_unit_test(test_a_host_that_was_seen_and_left_resets_the_port),
        cmocka_unit_test_setup_teardown(test_a_port_is_found_by_its_name, make_tmp, remove_tmp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
