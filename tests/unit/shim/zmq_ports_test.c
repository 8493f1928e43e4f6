/* The client side of the ZMQ channels, with this test as the kernel: what is signed right passes,
 * what is not does not (case: forged messages). */
#include "guest-kernel-shim/zmq_ports.h"
#include "shim_test.h"
#include <errno.h>
#include <zmq.h>

#define KEY "0123456789abcdef"
#define IDENTITY "session-1"

struct fixture {
    struct shim_loop loop;
    struct shim_zmq *z;
    struct jp_signer *signer;
    void *ctx, *router, *stdin_router, *pub, *control;
    char *dir;
    unsigned ready, lines;
};

static void on_ready(void *ctx)
{
    ((struct fixture *)ctx)->ready++;
}
static void sink(void *ctx, enum log_level level, const char *line)
{
    (void)level;
    if (strstr(line, "dropped"))
        ((struct fixture *)ctx)->lines++;
}

static void *bind_port(struct fixture *f, int type, int number)
{
    void *s = zmq_socket(f->ctx, type);
    char addr[128];
    int linger = 0;

    zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof(linger));
    snprintf(addr, sizeof(addr), "ipc://%s/s-%d", f->dir, number);
    assert_int_equal(zmq_bind(s, addr), 0);
    return s;
}

static int set_up(void **state)
{
    struct fixture *f = xnew(struct fixture);
    char ip[64];
    struct shim_zmq_opts o = { .ip = ip, .identity = IDENTITY, .ready = on_ready, .ctx = f };

    f->dir = xstrdup("/tmp/cv-shim-zmq-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(ip, sizeof(ip), "%s/s", f->dir);
    f->ctx = zmq_ctx_new();
    f->router = bind_port(f, ZMQ_ROUTER, 1);
    f->pub = bind_port(f, ZMQ_PUB, 2);
    f->stdin_router = bind_port(f, ZMQ_ROUTER, 3);
    f->control = bind_port(f, ZMQ_ROUTER, 4);
    f->signer = jp_signer_new(slice_str(KEY));
    shim_loop_init(&f->loop);
    o.zmq_ctx = f->ctx;
    o.loop = &f->loop;
    f->z = shim_zmq_open(&o, slice_str(KEY), NULL);
    assert_non_null(f->z);
    while (!shim_zmq_connected(f->z))
        shim_loop_step(&f->loop, 100);
    usleep(200000); /* the routers' side of the handshakes: they drop what they cannot route yet */
    log_set_sink(sink, f);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    log_set_sink(NULL, NULL);
    shim_zmq_close(f->z);
    zmq_close(f->router);
    zmq_close(f->pub);
    zmq_close(f->stdin_router);
    zmq_close(f->control);
    zmq_ctx_term(f->ctx);
    jp_signer_free(f->signer);
    shim_loop_fini(&f->loop);
    fs_rm_rf(f->dir, NULL);
    free(f->dir);
    free(f);
    return 0;
}

/* A message of the kernel to our shell socket; `sig` replaces the signature, `content` is what
 * travels while `signed_content` is what was signed. */
static void kernel_says(struct fixture *f, struct jp_signer *signer, const char *sig,
                        const char *signed_content, const char *content)
{
    CLEANUP(jp_msg_unrefp) struct jp_msg *m = NULL;
    char own[JP_SIG_LEN + 1];
    struct slice frames[8];
    size_t n;

    assert_int_equal(
        jp_msg_build(JP_SHELL, "x_reply", "k", SLICE_NULL, slice_str(signed_content), 0, &m), 0);
    n = jp_zmq_encode(signer, m, own, frames);
    if (sig)
        frames[1] = slice_str(sig);
    frames[5] = slice_str(content);
    /* The router may not have seen the handshake yet: it would drop the message. */
    int mandatory = 1;
    zmq_setsockopt(f->router, ZMQ_ROUTER_MANDATORY, &mandatory, sizeof(mandatory));
    while (zmq_send(f->router, IDENTITY, strlen(IDENTITY), ZMQ_SNDMORE) < 0 &&
           zmq_errno() == EHOSTUNREACH)
        usleep(1000);
    for (size_t i = 0; i < n; i++)
        zmq_send(f->router, frames[i].p, frames[i].n, i + 1 < n ? ZMQ_SNDMORE : 0);
}

/* The next message, waiting for it; NULL when there is none in a second. */
static struct jp_msg *next(struct fixture *f, enum jp_channel c)
{
    struct jp_msg *m = NULL;
    uint64_t deadline = shim_now_ms() + 5000; /* steps end early for other sockets' news */

    while (shim_now_ms() < deadline) {
        if (shim_zmq_recv(f->z, c, &m) == 1)
            return m;
        shim_loop_step(&f->loop, 50);
    }
    return NULL;
}

static void
test_forged_messages_are_dropped_with_a_line_each_and_the_next_good_one_passes(void **state)
{
    struct fixture *f = *state;
    char zeros[JP_SIG_LEN + 1];
    struct jp_msg *m;

    memset(zeros, '0', JP_SIG_LEN);
    zeros[JP_SIG_LEN] = '\0';
    kernel_says(f, f->signer, zeros, "{\"a\":1}", "{\"a\":1}");
    kernel_says(f, f->signer, "", "{\"a\":1}", "{\"a\":1}");
    kernel_says(f, f->signer, NULL, "{\"a\":1}", "{\"a\":2}");
    kernel_says(f, f->signer, NULL, "{\"good\":1}", "{\"good\":1}");
    m = next(f, JP_SHELL);
    assert_non_null(m);
    assert_true(slice_eq_str(m->parts.content, "{\"good\":1}"));
    jp_msg_unref(m);
    assert_int_equal(f->lines, 3);
    assert_int_equal(shim_zmq_recv(f->z, JP_SHELL, &m), 0);
}

static void test_frames_that_are_no_message_are_dropped(void **state)
{
    struct fixture *f = *state;
    struct jp_msg *m;

    zmq_send(f->router, IDENTITY, strlen(IDENTITY), ZMQ_SNDMORE);
    zmq_send(f->router, "hello", 5, 0);
    zmq_send(f->router, IDENTITY, strlen(IDENTITY), ZMQ_SNDMORE);
    for (int i = 0; i < 6000; i++) /* more frames than a message may have */
        zmq_send(f->router, "x", 1, ZMQ_SNDMORE);
    zmq_send(f->router, "x", 1, 0);
    kernel_says(f, f->signer, NULL, "{}", "{}");
    m = next(f, JP_SHELL);
    assert_non_null(m);
    jp_msg_unref(m);
    assert_int_equal(f->lines, 2);
}

static void test_what_we_send_is_signed_and_its_header_is_unchanged(void **state)
{
    static const char header[] = "{\"msg_type\":\"x_request\",  \"msg_id\":\"1\", \"zz\":1e999}";
    struct fixture *f = *state;
    struct jp_parts p = { .channel = JP_SHELL, .header = SLICE_LIT(header) };
    struct slice frames[16];
    zmq_msg_t parts[16];
    struct jp_msg *m = NULL, *got = NULL;
    size_t n = 0, n_ids = 0;

    assert_int_equal(jp_msg_new(&p, &m, NULL), 0);
    assert_int_equal(shim_zmq_send(f->z, m), 0);
    jp_msg_unref(m);
    do {
        zmq_msg_init(&parts[n]);
        assert_true(zmq_msg_recv(&parts[n], f->router, 0) >= 0);
        frames[n] = slice_of(zmq_msg_data(&parts[n]), zmq_msg_size(&parts[n]));
    } while (zmq_msg_more(&parts[n++]) && n < 16);
    assert_true(slice_eq_str(frames[0], IDENTITY));
    assert_int_equal(jp_zmq_decode(f->signer, JP_SHELL, frames, n, &n_ids, &got, NULL), 0);
    assert_true(slice_eq_str(got->parts.header, header));
    assert_true(slice_eq_str(got->parts.parent, "{}"));
    jp_msg_unref(got);
    while (n)
        zmq_msg_close(&parts[--n]);
}

static void test_after_a_rekey_both_keys_are_accepted_until_the_old_one_is_forgotten(void **state)
{
    struct fixture *f = *state;
    struct jp_signer *fresh = jp_signer_new(SLICE_LIT("fresh"));
    struct jp_msg *m;

    shim_zmq_rekey(f->z, SLICE_LIT("fresh"));
    kernel_says(f, f->signer, NULL, "{\"n\":1}", "{\"n\":1}");
    kernel_says(f, fresh, NULL, "{\"n\":2}", "{\"n\":2}");
    for (int i = 1; i <= 2; i++) {
        m = next(f, JP_SHELL);
        assert_non_null(m);
        jp_msg_unref(m);
    }
    shim_zmq_forget_key(f->z);
    kernel_says(f, f->signer, NULL, "{\"n\":3}", "{\"n\":3}");
    kernel_says(f, fresh, NULL, "{\"n\":4}", "{\"n\":4}");
    m = next(f, JP_SHELL);
    assert_non_null(m);
    assert_true(slice_eq_str(m->parts.content, "{\"n\":4}"));
    jp_msg_unref(m);
    jp_signer_free(fresh);
}

static void test_the_end_of_all_connections_is_noticed(void **state)
{
    struct fixture *f = *state;

    assert_false(shim_zmq_disconnected(f->z));
    zmq_close(f->router);
    zmq_close(f->pub);
    zmq_close(f->stdin_router);
    zmq_close(f->control);
    for (int i = 0; i < 100 && !shim_zmq_disconnected(f->z); i++)
        shim_loop_step(&f->loop, 50);
    assert_true(shim_zmq_disconnected(f->z));
    f->router = bind_port(f, ZMQ_ROUTER, 11);
    f->pub = bind_port(f, ZMQ_PUB, 12);
    f->stdin_router = bind_port(f, ZMQ_ROUTER, 13);
    f->control = bind_port(f, ZMQ_ROUTER, 14);
}

static void test_a_channel_that_is_not_listened_to_wakes_nobody(void **state)
{
    struct fixture *f = *state;
    unsigned before;

    for (int i = 0; i < 5; i++)
        shim_loop_step(&f->loop, 20);
    shim_zmq_listen(f->z, 0);
    before = f->ready;
    kernel_says(f, f->signer, NULL, "{}", "{}");
    for (int i = 0; i < 5; i++)
        shim_loop_step(&f->loop, 20);
    assert_int_equal(f->ready, before);
    assert_true(shim_zmq_readable(f->z, JP_SHELL));
    shim_zmq_listen(f->z, ~0u);
    shim_loop_step(&f->loop, 1000);
    assert_true(f->ready > before);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(test_forged_messages_are_dropped_with_a_line_each_and_the_next_good_one_passes),
        T(test_frames_that_are_no_message_are_dropped),
        T(test_what_we_send_is_signed_and_its_header_is_unchanged),
        T(test_after_a_rekey_both_keys_are_accepted_until_the_old_one_is_forgotten),
        T(test_the_end_of_all_connections_is_noticed),
        T(test_a_channel_that_is_not_listened_to_wakes_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
