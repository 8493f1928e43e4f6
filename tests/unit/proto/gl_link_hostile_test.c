/* gl_link against bytes that no honest peer sends. */
#include "gl_pair.h"

struct hostile {
    const char *text; /* in the reason */
    int want;
    enum gl_role peer;
    enum gl_phase phase;
    struct {
        unsigned type;
        uint32_t stream;
        uint8_t flags;
        uint32_t n;
        unsigned times;
    } frames[4];
};

static const struct hostile hostile[] = {
    { "in phase hello", -EPROTO, GL_GUEST, GL_PHASE_HELLO, { { GL_PING, 0, 0, 1, 1 } } },
    { "in phase hello", -EPROTO, GL_GUEST, GL_PHASE_HELLO, { { GL_KERNEL_MSG, 1, 0, 30, 1 } } },
    { "in phase idle", -EPROTO, GL_GUEST, GL_PHASE_IDLE, { { GL_KERNEL_MSG, 1, 0, 30, 1 } } },
    { "in phase running", -EPROTO, GL_GUEST, GL_PHASE_RUNNING, { { GL_HELLO, 0, 0, 2, 1 } } },
    { "frame from the guest", -EPROTO, GL_GUEST, GL_PHASE_IDLE, { { GL_PREPARE, 0, 0, 2, 1 } } },
    { "frame from the guest",
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_KERNEL_CTL, 1, 0, 2, 1 } } },
    { "frame from the host", -EPROTO, GL_HOST, GL_PHASE_RUNNING, { { GL_LOG, 0, 0, 2, 1 } } },
    { "frame from the host",
      -EPROTO,
      GL_HOST,
      GL_PHASE_RUNNING,
      { { GL_KERNEL_OUT, 1, 0, 2, 1 } } },
    { "inside a kernel_msg message",
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_KERNEL_MSG, 1, 1, 30, 1 }, { GL_KERNEL_STATE, 1, 0, 30, 1 } } },
    { "inside a kernel_msg message",
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_KERNEL_MSG, 1, 1, 30, 1 }, { GL_KERNEL_OUT, 1, 1, 30, 1 } } },
    { "inside a specs message",
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_SPECS, 0, 1, 30, 1 }, { GL_PING, 0, 0, 3, 1 } } },
    { "at least 20", -EPROTO, GL_GUEST, GL_PHASE_RUNNING, { { GL_KERNEL_MSG, 1, 0, 19, 1 } } },
    { "at least 20",
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_KERNEL_MSG, 1, 1, 9, 2 }, { GL_KERNEL_MSG, 1, 0, 1, 1 } } },
    { "at least 4", -EPROTO, GL_GUEST, GL_PHASE_RUNNING, { { GL_CREDIT, 1, 0, 3, 1 } } },
    { "over 4 bytes", -E2BIG, GL_GUEST, GL_PHASE_RUNNING, { { GL_CREDIT, 1, 0, 5, 1 } } },
    { "over 64 bytes", -E2BIG, GL_GUEST, GL_PHASE_RUNNING, { { GL_PING, 0, 0, 65, 1 } } },
    { "over 65536 bytes",
      -E2BIG,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_EVENT, 0, 1, 65536, 1 }, { GL_EVENT, 0, 0, 1, 1 } } },
    { "over 16777216 bytes",
      -E2BIG,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_SPECS, 0, 1, 65536, 256 }, { GL_SPECS, 0, 0, 1, 1 } } },
    { "window is 0",
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_KERNEL_MSG, 1, 0, 65536, 64 }, { GL_KERNEL_MSG, 1, 0, 20, 1 } } },
    { "credit of 2021161080", /* xxxx */
      -EPROTO,
      GL_GUEST,
      GL_PHASE_RUNNING,
      { { GL_CREDIT, 1, 0, 4, 1 } } },
    { "lost step", -EPROTO, GL_GUEST, GL_PHASE_RUNNING, { { GL_PING, 0, 0, 0, 0 } } },
};

/* One case; the bytes also in single steps, which must end the same way. */
static void run_hostile(const struct hostile *h, size_t step)
{
    static const struct gl_limits limits = { MESSAGE_MAX, QUEUE_MAX };
    enum gl_role role = h->peer == GL_HOST ? GL_GUEST : GL_HOST;
    struct side side = { 0 };
    struct buf b;
    struct err e = { 0 };
    int r = 0;

    buf_init(&b, 64 << 20);
    for (size_t i = 0; i < 4; i++)
        for (unsigned k = 0; k < h->frames[i].times; k++)
            raw(&b, h->frames[i].type, h->frames[i].stream, h->frames[i].flags, h->frames[i].n);
    if (b.len == 0)
        buf_append_str(&b, "GET / HTTP/1.1\r\n");
    side.l = gl_link_new(role, &limits, &pair_ops, &side);
    gl_link_set_phase(side.l, h->phase);
    for (struct slice s = buf_slice(&b); s.n && r == 0;) {
        size_t n = s.n < step ? s.n : step;
        r = gl_link_feed(side.l, slice_of(s.p, n), &e);
        s.p += n;
        s.n -= n;
    }
    if (r != h->want || !strstr(e.msg, h->text))
        fail_msg("want %d with \"%s\", got %d \"%s\"", h->want, h->text, r, e.msg);
    assert_int_equal(gl_link_feed(side.l, SLICE_LIT("x"), &e), -EPROTO); /* broken for good */
    gl_link_reset(side.l);
    assert_int_equal(gl_link_phase(side.l), GL_PHASE_HELLO);
    buf_clear(&b);
    raw(&b, GL_HELLO, 0, 0, 2);
    side.n = 0;
    assert_int_equal(gl_link_feed(side.l, buf_slice(&b), &e), 0); /* and well again */
    assert_int_equal(side.n, 1);
    gl_link_free(side.l);
    free(side.records);
    buf_fini(&b);
}

static void hostile_bytes_are_refused_with_a_reason(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(hostile) / sizeof(hostile[0]); i++) {
        run_hostile(&hostile[i], SIZE_MAX);
        run_hostile(&hostile[i], 1000);
        if (hostile[i].frames[0].times < 10)
            run_hostile(&hostile[i], 1);
    }
}

static void a_message_over_message_max_is_refused(void **state)
{
    static const struct gl_limits limits = { 100000, QUEUE_MAX };
    struct side side = { 0 };
    struct buf b;
    struct err e = { 0 };

    (void)state;
    buf_init(&b, 1 << 20);
    raw(&b, GL_KERNEL_MSG, 1, GL_FLAG_MORE, 65536);
    raw(&b, GL_KERNEL_MSG, 1, 0, 100001 - 65536);
    side.l = gl_link_new(GL_HOST, &limits, &pair_ops, &side);
    gl_link_set_phase(side.l, GL_PHASE_RUNNING);
    assert_int_equal(gl_link_feed(side.l, buf_slice(&b), &e), -E2BIG);
    assert_non_null(strstr(e.msg, "100000"));
    assert_int_equal(side.n, 0);
    gl_link_free(side.l);
    free(side.records);
    buf_fini(&b);
}

static void a_frame_promised_but_not_sent_takes_no_memory(void **state)
{
    struct pair *p = *state;
    struct buf b;

    buf_init(&b, 1 << 20);
    for (uint32_t k = 1; k < GL_STREAMS_MAX; k++) {
        raw(&b, GL_KERNEL_MSG, k, GL_FLAG_MORE, 10);
        assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), NULL), 0);
        buf_clear(&b);
    }
    raw(&b, GL_KERNEL_MSG, 1, 0, 65536);
    assert_int_equal(gl_link_feed(p->host.l, slice_of(b.data, 30), NULL), 0);
    assert_int_equal(p->host.n, 0);
    mem_fail_at(1); /* growing the gathered message fails: reported, not fatal */
    assert_int_equal(gl_link_feed(p->host.l, slice_of(b.data + 30, 60000), NULL), -ENOMEM);
    mem_fail_at(0);
    buf_fini(&b);
}

static void credit_that_was_not_used_is_refused(void **state)
{
    struct pair *p = *state;
    struct buf b;
    struct err e = { 0 };

    buf_init(&b, 100);
    raw(&b, GL_CREDIT, 1, 0, 4);
    put_u32le(b.data + b.off + GL_HEADER, 1);
    assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), &e), -EPROTO);
    gl_link_reset(p->host.l);
    gl_link_set_phase(p->host.l, GL_PHASE_RUNNING);
    put_u32le(b.data + b.off + GL_HEADER, 0);
    assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), &e), -EPROTO);
    assert_non_null(strstr(e.msg, "credit of 0"));
    buf_fini(&b);
}

#define T(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_bytes_are_refused_with_a_reason),
        cmocka_unit_test(a_message_over_message_max_is_refused),
        T(a_frame_promised_but_not_sent_takes_no_memory),
        T(credit_that_was_not_used_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
