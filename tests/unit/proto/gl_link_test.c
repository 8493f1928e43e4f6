#include "gl_pair.h"
#include <signal.h>
#include <sys/wait.h>

/* ---- delivery ---- */

static void a_message_in_one_frame_is_handed_out_where_it_lies(void **state)
{
    struct pair *p = *state;
    struct slice s;

    assert_int_equal(send_n(&p->host, GL_KERNEL_MSG, 3, 4000, 1), 0);
    s = gl_link_output(p->host.l);
    assert_int_equal(s.n, GL_HEADER + 4000);
    assert_int_equal(gl_link_feed(p->guest.l, s, NULL), 0);
    assert_got(&p->guest, 0, GL_KERNEL_MSG, 3, 4000, 1);
    assert_ptr_equal(p->guest.records[0].p, s.p + GL_HEADER);
}

static void bytes_may_be_cut_anywhere(void **state)
{
    static const size_t steps[] = { 1, 2, 11, 12, 13, 65547, 65548, 65549, SIZE_MAX };
    struct pair *p = *state;

    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        assert_int_equal(send_n(&p->guest, GL_LOG, 0, 100, 2), 0);
        assert_int_equal(send_n(&p->guest, GL_PING, 0, 0, 0), 0);
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 70000, 3), 0);
        assert_int_equal(send_n(&p->guest, GL_KERNEL_OUT, 2, 10, 4), 0);
        p->host.n = 0;
        move(&p->guest, &p->host, steps[i]);
        assert_int_equal(p->host.n, 4);
        assert_got(&p->host, 0, GL_LOG, 0, 100, 2);
        assert_got(&p->host, 1, GL_PING, 0, 0, 0);
        bool msg_first = p->host.records[2].type == GL_KERNEL_MSG;
        assert_got(&p->host, msg_first ? 2 : 3, GL_KERNEL_MSG, 1, 70000, 3);
        assert_got(&p->host, msg_first ? 3 : 2, GL_KERNEL_OUT, 2, 10, 4);
    }
}

static void a_message_larger_than_the_window_flows_without_grants_of_the_user(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, MESSAGE_MAX, 9), 0);
    settle(p, SIZE_MAX);
    assert_int_equal(p->host.n, 1);
    assert_got(&p->host, 0, GL_KERNEL_MSG, 1, MESSAGE_MAX, 9);
    /* What was granted early is not granted again: the window never exceeds its size. */
    gl_link_grant(p->host.l, 1, MESSAGE_MAX);
    settle(p, SIZE_MAX);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, MESSAGE_MAX, 8), 0);
    settle(p, SIZE_MAX);
    assert_got(&p->host, 1, GL_KERNEL_MSG, 1, MESSAGE_MAX, 8);
}

static void a_large_message_behind_undisposed_ones_waits_for_them_only(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 900000, (uint8_t)i), 0);
        settle(p, SIZE_MAX);
    }
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, MESSAGE_MAX, 7), 0);
    settle(p, SIZE_MAX);
    assert_int_equal(p->host.n, 4); /* back-pressure holds */
    for (unsigned i = 0; i < 4; i++)
        gl_link_grant(p->host.l, 1, 900000);
    settle(p, SIZE_MAX);
    assert_int_equal(p->host.n, 5);
    assert_got(&p->host, 4, GL_KERNEL_MSG, 1, MESSAGE_MAX, 7);
}

/* ---- order ---- */

static void control_goes_before_bulk(void **state)
{
    struct pair *p = *state;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 1), 0);
    assert_int_equal(send_n(&p->guest, GL_LOG, 0, 50, 2), 0);
    move(&p->guest, &p->host, SIZE_MAX);
    assert_got(&p->host, 0, GL_LOG, 0, 50, 2);
    assert_got(&p->host, 1, GL_KERNEL_MSG, 1, 100, 1);
}

static void a_frame_once_begun_is_finished_before_control(void **state)
{
    struct pair *p = *state;
    struct slice s;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 1), 0);
    s = gl_link_output(p->guest.l);
    assert_int_equal(gl_link_feed(p->host.l, slice_of(s.p, 20), NULL), 0);
    gl_link_consumed(p->guest.l, 20);
    assert_int_equal(send_n(&p->guest, GL_LOG, 0, 50, 2), 0);
    move(&p->guest, &p->host, SIZE_MAX);
    assert_got(&p->host, 0, GL_KERNEL_MSG, 1, 100, 1);
    assert_got(&p->host, 1, GL_LOG, 0, 50, 2);
}

static void streams_take_turns(void **state)
{
    struct pair *p = *state;
    size_t last_of_2 = 0;

    for (unsigned i = 0; i < 15; i++)
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 60000, 1), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 2, 100, 2), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 63, 100, 3), 0);
    move(&p->guest, &p->host, SIZE_MAX);
    assert_int_equal(p->host.n, 17);
    for (size_t i = 0; i < p->host.n; i++)
        if (p->host.records[i].stream != 1)
            last_of_2 = i;
    assert_true(last_of_2 < 8); /* not behind all of stream 1 */
}

static void a_control_request_passes_blocked_bulk(void **state)
{
    struct pair *p = *state;

    p->guest.grant = false;
    for (unsigned i = 0; i < 5; i++) {
        assert_int_equal(send_n(&p->host, GL_KERNEL_MSG, 1, 900000, 1), 0);
        move(&p->host, &p->guest, SIZE_MAX);
    }
    assert_int_equal(p->guest.n, 4); /* the window is used up */
    assert_int_equal(send_n(&p->host, GL_KERNEL_CTL, 1, 30, 2), 0);
    move(&p->host, &p->guest, SIZE_MAX);
    assert_got(&p->guest, 4, GL_KERNEL_CTL, 1, 30, 2);
}

static void state_keeps_its_place_and_done_does_not_pass_it(void **state)
{
    struct pair *p = *state;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 1), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_DONE, 1, 20, 2), 0); /* passes bulk */
    assert_int_equal(send_n(&p->guest, GL_KERNEL_STATE, 1, 30, 3), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_DONE, 1, 40, 4), 0); /* stays behind state */
    assert_int_equal(send_n(&p->guest, GL_KERNEL_DONE, 2, 50, 5), 0); /* another stream's */
    move(&p->guest, &p->host, SIZE_MAX);
    assert_got(&p->host, 0, GL_KERNEL_DONE, 1, 20, 2);
    assert_got(&p->host, 1, GL_KERNEL_DONE, 2, 50, 5);
    assert_got(&p->host, 2, GL_KERNEL_MSG, 1, 100, 1);
    assert_got(&p->host, 3, GL_KERNEL_STATE, 1, 30, 3);
    assert_got(&p->host, 4, GL_KERNEL_DONE, 1, 40, 4);
}

static void urgent_frames_may_lie_inside_a_message(void **state)
{
    struct pair *p = *state;
    struct slice s;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 300000, 1), 0);
    s = gl_link_output(p->guest.l);
    assert_int_equal(gl_link_feed(p->host.l, slice_of(s.p, GL_HEADER + GL_FRAME_MAX), NULL), 0);
    gl_link_consumed(p->guest.l, GL_HEADER + GL_FRAME_MAX);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_DONE, 1, 20, 2), 0);
    move(&p->guest, &p->host, 1000);
    assert_got(&p->host, 0, GL_KERNEL_DONE, 1, 20, 2);
    assert_got(&p->host, 1, GL_KERNEL_MSG, 1, 300000, 1);
}

/* ---- credit ---- */

static void bulk_stops_at_the_window_and_goes_on_after_a_grant(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    for (unsigned i = 0; i < 64; i++) {
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, GL_FRAME_MAX, 1), 0);
        move(&p->guest, &p->host, SIZE_MAX);
    }
    assert_int_equal(p->host.n, GL_WINDOW / GL_FRAME_MAX);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 2), 0);
    assert_int_equal(move(&p->guest, &p->host, SIZE_MAX), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 2, 100, 3), 0); /* windows are per stream */
    move(&p->guest, &p->host, SIZE_MAX);
    assert_got(&p->host, 64, GL_KERNEL_MSG, 2, 100, 3);

    gl_link_grant(p->host.l, 1, GL_WINDOW / 4 - 1);
    assert_int_equal(gl_link_output(p->host.l).n, 0); /* not yet a quarter */
    gl_link_grant(p->host.l, 1, 1);
    assert_int_equal(gl_link_output(p->host.l).n, GL_HEADER + 4);
    p->guest.outputs = 0;
    move(&p->host, &p->guest, SIZE_MAX);
    assert_int_equal(p->guest.outputs, 1); /* told that bytes may leave again */
    move(&p->guest, &p->host, SIZE_MAX);
    assert_got(&p->host, 65, GL_KERNEL_MSG, 1, 100, 2);
    assert_int_equal(p->guest.n, 0); /* credit frames are the link's own */
}

static void granting_too_much_never_opens_more_than_the_window(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    gl_link_grant(p->host.l, 1, SIZE_MAX);
    gl_link_grant(p->host.l, 0, 100);
    gl_link_grant(p->host.l, GL_STREAMS_MAX, 100);
    assert_int_equal(gl_link_output(p->host.l).n, 0);
    for (unsigned i = 0; i < 20; i++) {
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 500000, 1), 0);
        move(&p->guest, &p->host, SIZE_MAX);
        gl_link_grant(p->host.l, 1, SIZE_MAX);
        move(&p->host, &p->guest, SIZE_MAX); /* the guest refuses credit beyond the window */
    }
    assert_int_equal(p->host.n, 20);
}

/* ---- queues ---- */

static void a_full_queue_refuses_and_says_when_it_takes_more(void **state)
{
    struct pair *p = *state;
    unsigned sent = 0;

    while (send_n(&p->guest, GL_KERNEL_MSG, 5, 50000, 1) == 0)
        sent++;
    assert_int_equal(sent, QUEUE_MAX / (50000 + GL_HEADER));
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 5, 50000, 1), -EAGAIN);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 6, 50000, 1), 0); /* its own queue */
    assert_int_equal(gl_link_queued(p->guest.l, 5), sent * (50000 + GL_HEADER));
    assert_int_equal(send_n(&p->guest, GL_KERNEL_STATE, 5, 500, 1), 0); /* reserve for states */
    assert_int_equal(p->guest.n_writable, 0);
    move(&p->guest, &p->host, SIZE_MAX);
    assert_int_equal(p->guest.n_writable, 1);
    assert_int_equal(p->guest.writable[0], 5);
    assert_int_equal(p->host.n, sent + 2);
    assert_int_equal(gl_link_queued(p->guest.l, 5), 0);
    assert_int_equal(gl_link_queued(p->guest.l, GL_STREAMS_MAX), 0);
}

static void an_empty_queue_takes_a_message_above_its_maximum(void **state)
{
    struct pair *p = *state;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, QUEUE_MAX * 3, 1), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 1), -EAGAIN);
    settle(p, SIZE_MAX);
    assert_got(&p->host, 0, GL_KERNEL_MSG, 1, QUEUE_MAX * 3, 1);
    assert_int_equal(p->guest.n_writable, 1);
}

static void pings_that_nobody_reads_are_refused_in_the_end(void **state)
{
    struct pair *p = *state;
    unsigned n = 0;
    int r;

    while ((r = send_n(&p->guest, GL_PONG, 0, 64, 1)) == 0 && n < 1000000)
        n++;
    assert_int_equal(r, -EAGAIN);
    assert_true(gl_link_queued(p->guest.l, 0) <= GL_CONTROL_MAX + (1 << 20));
    settle(p, SIZE_MAX);
    assert_int_equal(p->host.n, n);
    assert_int_equal(p->guest.writable[0], 0);
}

static void sizes_outside_the_limits_are_refused_on_send(void **state)
{
    struct pair *p = *state;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, MESSAGE_MAX + 1, 1), -E2BIG);
    assert_int_equal(send_n(&p->guest, GL_PING, 0, 65, 1), -E2BIG);
    assert_int_equal(send_n(&p->guest, GL_LOG, 0, 1, 1), -EINVAL);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_OUT, 1, 0, 1), -EINVAL);
    assert_int_equal(gl_link_output(p->guest.l).n, 0);
}

static void out_of_memory_leaves_the_queue_as_it_was(void **state)
{
    struct pair *p = *state;

    mem_fail_at(1);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 1), -ENOMEM);
    mem_fail_at(0);
    assert_int_equal(gl_link_queued(p->guest.l, 1), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 1), 0);
    move(&p->guest, &p->host, SIZE_MAX);
    assert_got(&p->host, 0, GL_KERNEL_MSG, 1, 100, 1);
}

static void output_is_announced_once_until_seen_empty(void **state)
{
    struct pair *p = *state;

    send_n(&p->guest, GL_LOG, 0, 10, 1);
    send_n(&p->guest, GL_LOG, 0, 10, 1);
    assert_int_equal(p->guest.outputs, 1);
    move(&p->guest, &p->host, 5);
    assert_int_equal(p->guest.outputs, 1);
    send_n(&p->guest, GL_LOG, 0, 10, 1);
    assert_int_equal(p->guest.outputs, 2);
}

/* ---- closing streams ---- */

static void closing_drops_the_queue_but_finishes_what_is_begun(void **state)
{
    struct pair *p = *state;
    struct slice s;

    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 200000, 1), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 2), 0);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_STATE, 1, 50, 3), 0);
    s = gl_link_output(p->guest.l);
    assert_int_equal(gl_link_feed(p->host.l, slice_of(s.p, 1000), NULL), 0);
    gl_link_consumed(p->guest.l, 1000);
    gl_link_close_stream(p->guest.l, 1);
    move(&p->guest, &p->host, SIZE_MAX);
    assert_int_equal(p->host.n, 2);
    assert_got(&p->host, 0, GL_KERNEL_MSG, 1, 200000, 1);
    assert_got(&p->host, 1, GL_KERNEL_STATE, 1, 50, 3);
}

static void bulk_to_a_closed_stream_is_thrown_away_and_its_window_kept_open(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 1000000, 1), 0);
    settle(p, SIZE_MAX);
    gl_link_close_stream(p->host.l, 1);
    for (unsigned i = 0; i < 30; i++) {
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 900000, 1), 0);
        settle(p, SIZE_MAX);
    }
    assert_int_equal(send_n(&p->guest, GL_KERNEL_STATE, 1, 50, 3), 0);
    settle(p, SIZE_MAX);
    assert_int_equal(p->host.n, 2); /* the message before, the state after */
    assert_got(&p->host, 1, GL_KERNEL_STATE, 1, 50, 3);

    assert_int_equal(send_n(&p->host, GL_KERNEL_START, 1, 10, 4), 0);
    settle(p, SIZE_MAX);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 100, 5), 0);
    settle(p, SIZE_MAX);
    assert_got(&p->host, 2, GL_KERNEL_MSG, 1, 100, 5);
}

static void closing_in_the_midst_of_a_message_skips_its_rest(void **state)
{
    static const size_t cuts[] = { 5, GL_HEADER, 1000, GL_HEADER + GL_FRAME_MAX, 150000 };
    struct pair *p = *state;

    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        struct slice s;

        p->host.n = 0;
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 200000, 1), 0);
        for (size_t left = cuts[i]; left;) {
            s = gl_link_output(p->guest.l);
            if (s.n > left)
                s.n = left;
            assert_int_equal(gl_link_feed(p->host.l, s, NULL), 0);
            gl_link_consumed(p->guest.l, s.n);
            left -= s.n;
        }
        gl_link_close_stream(p->host.l, 1);
        assert_int_equal(send_n(&p->host, GL_KERNEL_START, 1, 10, 4), 0); /* opens it again */
        settle(p, SIZE_MAX);
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 300, 2), 0);
        settle(p, SIZE_MAX);
        bool early = cuts[i] < GL_HEADER; /* the message had not begun when the stream closed */
        assert_int_equal(p->host.n, early ? 2 : 1);
        assert_got(&p->host, early ? 1 : 0, GL_KERNEL_MSG, 1, 300, 2);
    }
}

static void other_frames_inside_a_skipped_message_are_still_refused(void **state)
{
    static const struct {
        unsigned type;
        uint32_t n;
    } next[] = { { GL_KERNEL_STATE, 30 }, { GL_KERNEL_STATE, 1 }, { GL_KERNEL_OUT, 30 } };
    struct pair *p = *state;

    for (size_t i = 0; i < sizeof(next) / sizeof(next[0]); i++) {
        struct buf b;
        struct err e = { 0 };

        gl_link_reset(p->host.l);
        gl_link_set_phase(p->host.l, GL_PHASE_RUNNING);
        buf_init(&b, 1000);
        raw(&b, GL_KERNEL_MSG, 1, GL_FLAG_MORE, 100);
        gl_link_close_stream(p->host.l, 1);
        assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), &e), 0);
        buf_clear(&b);
        raw(&b, next[i].type, 1, 0, next[i].n);
        assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), &e), -EPROTO);
        assert_non_null(strstr(e.msg, "inside a kernel_msg"));
        buf_fini(&b);
    }
    assert_int_equal(p->host.n, 0);
}

static void the_window_is_whole_after_closing(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    for (unsigned i = 0; i < 5; i++) {
        send_n(&p->guest, GL_KERNEL_MSG, 1, 900000, 1);
        move(&p->guest, &p->host, SIZE_MAX);
    }
    assert_int_equal(p->host.n, 4);
    gl_link_close_stream(p->host.l, 1);
    gl_link_close_stream(p->host.l, 0);              /* no such kernel: no effect */
    gl_link_close_stream(p->host.l, GL_STREAMS_MAX); /* likewise */
    send_n(&p->host, GL_KERNEL_START, 1, 10, 4);
    settle(p, SIZE_MAX);
    p->host.n = 0;
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, 900000, 1), 0);
        settle(p, SIZE_MAX);
    }
    assert_true(p->host.n >= 4);
}

/* ---- re-entrance ---- */

static void hook_running(struct side *s, enum gl_type type, uint32_t stream)
{
    (void)stream;
    if (type == GL_ASSIGNED)
        gl_link_set_phase(s->l, GL_PHASE_RUNNING);
}

static void a_new_phase_holds_for_the_next_frame_of_the_same_buffer(void **state)
{
    struct pair *p = *state;
    struct buf b;

    buf_init(&b, 1000);
    raw(&b, GL_ASSIGNED, 0, 0, 2);
    raw(&b, GL_KERNEL_MSG, 1, 0, 20);
    gl_link_set_phase(p->host.l, GL_PHASE_IDLE);
    p->host.hook = hook_running;
    assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), NULL), 0);
    assert_int_equal(p->host.n, 2);
    buf_fini(&b);
}

static void hook_reset(struct side *s, enum gl_type type, uint32_t stream)
{
    (void)stream;
    if (type == GL_KERNEL_MSG)
        gl_link_reset(s->l);
}

static void a_reset_from_the_callback_drops_the_rest(void **state)
{
    struct pair *p = *state;
    struct buf b;

    buf_init(&b, 1 << 20);
    raw(&b, GL_KERNEL_MSG, 1, GL_FLAG_MORE, 40000);
    raw(&b, GL_KERNEL_MSG, 1, 0, 40000);
    raw(&b, GL_KERNEL_MSG, 1, 0, 20);
    p->host.hook = hook_reset;
    p->host.grant = false;
    assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), NULL), 0);
    assert_int_equal(p->host.n, 1);
    assert_int_equal(gl_link_phase(p->host.l), GL_PHASE_HELLO);
    buf_fini(&b);
}

static void hook_free(struct side *s, enum gl_type type, uint32_t stream)
{
    (void)type;
    (void)stream;
    gl_link_free(s->l);
}

static void the_callback_may_free_the_link(void **state)
{
    struct pair *p = *state;
    struct buf b;

    buf_init(&b, 1 << 20);
    raw(&b, GL_KERNEL_MSG, 1, GL_FLAG_MORE, 40000);
    raw(&b, GL_KERNEL_MSG, 1, 0, 400);
    raw(&b, GL_KERNEL_MSG, 1, 0, 400);
    p->host.hook = hook_free;
    assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), NULL), 0);
    assert_int_equal(p->host.n, 1);
    p->host.l = NULL;
    buf_fini(&b);
}

static void hook_close(struct side *s, enum gl_type type, uint32_t stream)
{
    (void)type;
    gl_link_close_stream(s->l, stream);
}

static void the_callback_may_close_its_own_stream(void **state)
{
    struct pair *p = *state;
    struct buf b;

    buf_init(&b, 1 << 20);
    raw(&b, GL_KERNEL_MSG, 1, GL_FLAG_MORE, 40000);
    raw(&b, GL_KERNEL_MSG, 1, 0, 40000);
    raw(&b, GL_KERNEL_MSG, 1, 0, 20);
    raw(&b, GL_KERNEL_MSG, 2, 0, 20);
    p->host.hook = hook_close;
    assert_int_equal(gl_link_feed(p->host.l, buf_slice(&b), NULL), 0);
    assert_int_equal(p->host.n, 2); /* one of each stream */
    assert_int_equal(p->host.records[1].stream, 2);
    buf_fini(&b);
}

/* ---- misuse, reset, storm ---- */

static void an_illegal_send_aborts(void **state)
{
    static const struct {
        enum gl_role role;
        enum gl_phase phase;
        enum gl_type type;
        uint32_t stream;
    } cases[] = {
        { GL_HOST, GL_PHASE_RUNNING, GL_LOG, 0 },
        { GL_HOST, GL_PHASE_RUNNING, GL_HELLO, 0 },
        { GL_GUEST, GL_PHASE_HELLO, GL_PING, 0 },
        { GL_HOST, GL_PHASE_RUNNING, GL_CREDIT, 1 },
        { GL_HOST, GL_PHASE_RUNNING, GL_KERNEL_MSG, 0 },
        { GL_HOST, GL_PHASE_RUNNING, 15, 0 },
        { GL_HOST, GL_PHASE_RUNNING, GL_PING, 1 },
    };
    struct pair *p = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct gl_link *l = cases[i].role == GL_HOST ? p->host.l : p->guest.l;
        struct slice part = SLICE_LIT("{\"some\":\"thing of 28 bytes\"}");
        int status = 0;
        pid_t pid;

        gl_link_set_phase(l, cases[i].phase);
        pid = fork();
        if (pid == 0) {
            signal(SIGABRT, SIG_DFL);
            if (!freopen("/dev/null", "w", stderr))
                _exit(3);
            gl_link_send(l, cases[i].type, cases[i].stream, &part, 1);
            _exit(0);
        }
        assert_true(pid > 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

static void reset_forgets_everything(void **state)
{
    struct pair *p = *state;

    p->host.grant = false;
    for (unsigned i = 0; i < 5; i++) {
        send_n(&p->guest, GL_KERNEL_MSG, 1, 900000, 1);
        move(&p->guest, &p->host, SIZE_MAX);
    }
    assert_true(gl_link_queued(p->guest.l, 1) > 0);
    gl_link_reset(p->host.l);
    gl_link_reset(p->guest.l);
    assert_int_equal(gl_link_queued(p->guest.l, 1), 0);
    assert_int_equal(gl_link_output(p->guest.l).n, 0);
    assert_int_equal(gl_link_phase(p->guest.l), GL_PHASE_HELLO);
    p->host.n = 0;
    assert_int_equal(send_n(&p->guest, GL_HELLO, 0, 10, 1), 0);
    settle(p, SIZE_MAX);
    gl_link_set_phase(p->host.l, GL_PHASE_RUNNING);
    gl_link_set_phase(p->guest.l, GL_PHASE_RUNNING);
    assert_int_equal(send_n(&p->guest, GL_KERNEL_MSG, 1, GL_WINDOW, 1), 0); /* whole window */
    settle(p, SIZE_MAX);
    assert_got(&p->host, 1, GL_KERNEL_MSG, 1, GL_WINDOW, 1);
}

static uint32_t rnd(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

struct storm {
    uint32_t seed;
    size_t sizes[8][4000]; /* what was sent per stream, in order */
    size_t sent[8], seen[8];
};

static void storm_send(struct storm *s, struct side *from)
{
    uint32_t stream = 1 + rnd(&s->seed) % 7;
    size_t n = 20 + rnd(&s->seed) % (rnd(&s->seed) % 20 ? 3000 : 2000000);

    if (s->sent[stream] == 4000)
        return;
    if (send_n(from, GL_KERNEL_MSG, stream, n, (uint8_t)s->sent[stream]) < 0)
        return;
    s->sizes[stream][s->sent[stream]++] = n;
}

/* A random number of bytes in random steps; the receiver grants later than it receives. */
static void storm_move(struct storm *s, struct side *from, struct side *to)
{
    for (unsigned k = rnd(&s->seed) % 40; k; k--) {
        struct slice out = gl_link_output(from->l);
        struct err e = { 0 };

        if (!out.n)
            return;
        if (rnd(&s->seed) % 2)
            out.n = 1 + rnd(&s->seed) % out.n;
        if (gl_link_feed(to->l, out, &e) < 0)
            fail_msg("%s", e.msg);
        gl_link_consumed(from->l, out.n);
    }
}

static void storm_check(struct storm *s, struct side *to)
{
    for (size_t i = 0; i < to->n; i++) {
        const struct record *r = &to->records[i];
        size_t k = s->seen[r->stream]++;

        assert_true(k < s->sent[r->stream]);
        assert_int_equal(r->n, s->sizes[r->stream][k]);
        assert_true(r->hash == hash_n(r->n, (uint8_t)k));
        gl_link_grant(to->l, r->stream, r->n);
    }
    to->n = 0;
}

static void a_storm_of_messages_arrives_whole_and_in_order(void **state)
{
    struct pair *p = *state;
    struct storm *s = xnew(struct storm);

    s->seed = 20260131;
    p->host.grant = p->guest.grant = false;
    for (unsigned round = 0; round < 600; round++) {
        for (unsigned k = rnd(&s->seed) % 6; k; k--)
            storm_send(s, &p->guest);
        storm_move(s, &p->guest, &p->host);
        if (rnd(&s->seed) % 3 == 0)
            storm_check(s, &p->host);
        storm_move(s, &p->host, &p->guest);
    }
    for (unsigned round = 0; round < 1000; round++) {
        move(&p->guest, &p->host, SIZE_MAX);
        storm_check(s, &p->host);
        if (move(&p->host, &p->guest, SIZE_MAX) == 0 && p->host.n == 0)
            break;
    }
    for (uint32_t k = 1; k < 8; k++) {
        assert_int_equal(s->seen[k], s->sent[k]);
        assert_true(s->sent[k] > 50);
        assert_int_equal(gl_link_queued(p->guest.l, k), 0);
    }
    free(s);
}

#define T(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_message_in_one_frame_is_handed_out_where_it_lies),
        T(bytes_may_be_cut_anywhere),
        T(a_message_larger_than_the_window_flows_without_grants_of_the_user),
        T(a_large_message_behind_undisposed_ones_waits_for_them_only),
        T(control_goes_before_bulk),
        T(a_frame_once_begun_is_finished_before_control),
        T(streams_take_turns),
        T(a_control_request_passes_blocked_bulk),
        T(state_keeps_its_place_and_done_does_not_pass_it),
        T(urgent_frames_may_lie_inside_a_message),
        T(bulk_stops_at_the_window_and_goes_on_after_a_grant),
        T(granting_too_much_never_opens_more_than_the_window),
        T(a_full_queue_refuses_and_says_when_it_takes_more),
        T(an_empty_queue_takes_a_message_above_its_maximum),
        T(pings_that_nobody_reads_are_refused_in_the_end),
        T(sizes_outside_the_limits_are_refused_on_send),
        T(out_of_memory_leaves_the_queue_as_it_was),
        T(output_is_announced_once_until_seen_empty),
        T(closing_drops_the_queue_but_finishes_what_is_begun),
        T(bulk_to_a_closed_stream_is_thrown_away_and_its_window_kept_open),
        T(closing_in_the_midst_of_a_message_skips_its_rest),
        T(other_frames_inside_a_skipped_message_are_still_refused),
        T(the_window_is_whole_after_closing),
        T(a_new_phase_holds_for_the_next_frame_of_the_same_buffer),
        T(a_reset_from_the_callback_drops_the_rest),
        T(the_callback_may_free_the_link),
        T(the_callback_may_close_its_own_stream),
        T(an_illegal_send_aborts),
        T(reset_forgets_everything),
        T(a_storm_of_messages_arrives_whole_and_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
