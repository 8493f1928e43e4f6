#include "kernelmgr/km_execution.h"
#include "tests/support/km_rig.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct bench {
    struct rig r;
    struct fake_vm *vm;
    struct km_kernel *k;
    struct rig_client a;
    struct km_execution *x, *y;
    unsigned done, outputs;
    struct buf b;
};

static int setup(void **state)
{
    struct bench *t = calloc(1, sizeof(*t));
    rig_init(&t->r);
    buf_init(&t->b, 1u << 20);
    *state = t;
    return 0;
}

static int teardown(void **state)
{
    struct bench *t = *state;
    km_execution_free(t->x);
    km_execution_free(t->y);
    rig_client_fini(&t->a);
    rig_fini(&t->r);
    buf_fini(&t->b);
    free(t);
    return 0;
}

static void on_output(void *ctx, const struct jp_msg *m)
{
    (void)m;
    ((struct bench *)ctx)->outputs++;
}

static void on_done(void *ctx, struct km_execution *x)
{
    (void)x;
    ((struct bench *)ctx)->done++;
}

static const struct km_execution_events events = { on_output, on_done };

static struct km_execution *run(struct bench *t, const char *code, uint64_t timeout_ms,
                                size_t output_max)
{
    struct km_execute_opts o;
    struct km_execution *x = NULL;
    if (!t->k)
        t->k = rig_kernel(&t->r, &t->vm);
    km_execute_opts_defaults(&o);
    o.code = code;
    o.timeout_ms = timeout_ms;
    if (output_max)
        o.output_max = output_max;
    assert_int_equal(km_execute(t->k, &o, &events, t, &x, NULL), 0);
    return x;
}

static struct jp_msg *request(struct bench *t)
{
    struct jp_msg *m = fake_vm_take_msg(t->vm);
    assert_non_null(m);
    return m;
}

static void busy(struct bench *t, struct jp_msg *q)
{
    fake_vm_say(t->vm, JP_IOPUB, "status", q, "{\"execution_state\": \"busy\"}");
}

static void finish(struct bench *t, struct jp_msg *q, const char *reply)
{
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", q, reply);
    fake_vm_say(t->vm, JP_IOPUB, "status", q, "{\"execution_state\": \"idle\"}");
    rig_turn(&t->r);
}

static const char *json_of(struct bench *t, struct km_execution *x)
{
    buf_clear(&t->b);
    assert_int_equal(km_execution_write_json(x, &t->b), 0);
    return buf_cstr(&t->b);
}

static const char *text_of(struct bench *t, struct km_execution *x)
{
    buf_clear(&t->b);
    assert_int_equal(km_execution_write_text(x, &t->b), 0);
    return buf_cstr(&t->b);
}

static void the_request_says_what_was_asked(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "print('\"\xc3\xa9')\n", 0, 0);
    struct jp_msg *q = request(t);
    assert_string_equal(q->msg_type, "execute_request");
    assert_string_equal(q->msg_id, km_execution_id(t->x));
    assert_true(rig_content_has(q, "\"code\": \"print('\\\"\xc3\xa9')\\n\""));
    assert_true(rig_content_has(q, "\"allow_stdin\": false"));
    assert_true(rig_content_has(q, "\"stop_on_error\": false"));
    assert_string_equal(km_execution_status(t->x), "running");
    jp_msg_unref(q);
}

static void outputs_are_collected_in_order_and_byte_for_byte(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"a\\n\"}");
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"\\ud83d\"}");
    fake_vm_say(t->vm, JP_IOPUB, "stream", NULL,
                "{\"name\": \"stdout\", \"text\": \"somebody else's\"}");
    fake_vm_say(t->vm, JP_IOPUB, "display_data", q,
                "{\"data\": {\"image/png\": \"aGk=\", \"text/plain\": \"<fig>\"}, \"metadata\": "
                "{\"w\": NaN}}");
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stderr\", \"text\": \"warn\\n\"}");
    fake_vm_say(t->vm, JP_IOPUB, "execute_result", q,
                "{\"execution_count\": 4, \"data\": {\"text/plain\": \"12345678901234567890\"}, "
                "\"metadata\": {}}");
    finish(
        t, q,
        "{\"status\": \"ok\", \"execution_count\": 4, \"payload\": [], \"user_expressions\": {}}");
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "ok");
    assert_true(t->outputs >= 6);
    const char *j = json_of(t, t->x);
    assert_non_null(
        strstr(j, "\"outputs\": [{\"output_type\": \"stream\", \"name\": \"stdout\", \"text\": "
                  "\"a\\n\\ud83d\"}, {\"output_type\": \"display_data\", \"data\": {\"image/png\": "
                  "\"aGk=\", \"text/plain\": \"<fig>\"}, \"metadata\": {\"w\": NaN}}, "
                  "{\"output_type\": \"stream\", \"name\": \"stderr\", \"text\": \"warn\\n\"}, "
                  "{\"output_type\": \"execute_result\", \"execution_count\": 4, \"data\": "
                  "{\"text/plain\": \"12345678901234567890\"}, \"metadata\": {}}]"));
    assert_non_null(strstr(j, "\"execution_count\": 4, "));
    assert_non_null(strstr(j, "\"error\": null"));
    assert_string_equal(text_of(t, t->x), "a\n\xef\xbf\xbd\n<fig>\nwarn\n12345678901234567890\n");
    jp_msg_unref(q);
}

static void done_waits_for_both_reply_and_idle(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_SHELL, "execute_reply", q,
                "{\"status\": \"ok\", \"execution_count\": 1}");
    rig_turn(&t->r);
    assert_int_equal(t->done, 0);
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"late\"}");
    fake_vm_say(t->vm, JP_IOPUB, "status", q, "{\"execution_state\": \"idle\"}");
    rig_turn(&t->r);
    assert_int_equal(t->done, 1);
    assert_non_null(strstr(json_of(t, t->x), "late"));
    jp_msg_unref(q);
}

static void an_error_is_told_with_a_readable_traceback(void **state)
{
    struct bench *t = *state;
    static const char error[] = "\"ename\": \"ValueError\", \"evalue\": \"no\", \"traceback\": "
                                "[\"\\u001b[0;31mValueError\\u001b[0m: no\", \"  line 1\"]}";
    char reply[300], output[300];
    snprintf(reply, sizeof(reply), "{\"status\": \"error\", \"execution_count\": 2, %s", error);
    snprintf(output, sizeof(output), "{%s", error);
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "error", q, output);
    finish(t, q, reply);
    assert_string_equal(km_execution_status(t->x), "error");
    assert_non_null(
        strstr(json_of(t, t->x), "\"error\": {\"ename\": \"ValueError\", \"evalue\": \"no\", "));
    assert_string_equal(text_of(t, t->x), "ValueError: no\n  line 1\n");
    jp_msg_unref(q);
}

static void display_ids_change_all_outputs_even_of_finished_executions(void **state)
{
    struct bench *t = *state;
    static const char a[] = "{\"data\": {\"text/plain\": \"a\"}, \"metadata\": {}, \"transient\": "
                            "{\"display_id\": \"X\"}}";
    static const char z[] = "{\"data\": {\"text/plain\": \"z\"}, \"metadata\": {}, \"transient\": "
                            "{\"display_id\": \"X\"}}";
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "display_data", q, a);
    fake_vm_say(t->vm, JP_IOPUB, "display_data", q, a);
    finish(t, q, "{\"status\": \"ok\"}");
    jp_msg_unref(q);
    t->y = run(t, "y", 0, 0);
    q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "display_data", q, a);
    fake_vm_say(t->vm, JP_IOPUB, "update_display_data", q, z);
    finish(t, q, "{\"status\": \"ok\"}");
    jp_msg_unref(q);
    assert_string_equal(text_of(t, t->x), "z\nz\n");
    assert_string_equal(text_of(t, t->y), "z\n");
    fake_vm_say(t->vm, JP_IOPUB, "update_display_data", NULL, a); /* a thread, after both */
    assert_string_equal(text_of(t, t->x), "a\na\n");
    assert_string_equal(text_of(t, t->y), "a\n");
}

static void clear_output_clears_now_or_at_the_next_output(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"1\"}");
    fake_vm_say(t->vm, JP_IOPUB, "clear_output", q, "{\"wait\": false}");
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"2\"}");
    fake_vm_say(t->vm, JP_IOPUB, "clear_output", q, "{\"wait\": true}");
    rig_turn(&t->r);
    assert_string_equal(text_of(t, t->x), "2");
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"3\"}");
    fake_vm_say(t->vm, JP_IOPUB, "clear_output", q, "{\"wait\": true}");
    finish(t, q, "{\"status\": \"ok\"}");
    assert_string_equal(text_of(t, t->x), "3"); /* nothing came after the last one */
    jp_msg_unref(q);
}

static void output_over_the_limit_is_counted_and_cut_between_characters(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 0, 20);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "stream", q,
                "{\"name\": \"stdout\", \"text\": \"0123456789\\u00e9\\u00e9tail\"}");
    finish(t, q, "{\"status\": \"ok\"}");
    assert_non_null(strstr(json_of(t, t->x), "\"text\": \"0123456789\\u00e9\"}"));
    assert_non_null(strstr(json_of(t, t->x), "\"truncated_bytes\": 10"));
    assert_non_null(strstr(text_of(t, t->x), "[10 bytes of output left out]"));
    jp_msg_unref(q);
}

static void a_timeout_interrupts_and_keeps_the_partial_output(void **state)
{
    struct bench *t = *state;
    char op[16];
    t->x = run(t, "x", 3000, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "stream", q, "{\"name\": \"stdout\", \"text\": \"p\\n\"}");
    rig_advance(&t->r, 2999);
    assert_int_equal(fake_vm_take_ctl(t->vm, op), 0);
    rig_advance(&t->r, 1);
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_string_equal(op, "interrupt");
    assert_int_equal(t->done, 0);
    finish(t, q,
           "{\"status\": \"error\", \"ename\": \"KeyboardInterrupt\", \"evalue\": \"\", "
           "\"traceback\": []}");
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "timeout");
    assert_non_null(strstr(json_of(t, t->x), "\"ename\": \"Timeout\""));
    assert_non_null(strstr(json_of(t, t->x), "p\\n"));
    jp_msg_unref(q);
}

static void a_timeout_ends_also_when_the_code_ignores_the_interrupt(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 3000, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    rig_advance(&t->r, 3500);
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "timeout");
    assert_string_equal(rig_state(t->k), "busy");
    jp_msg_unref(q);
}

static void code_that_asks_for_input_is_stopped_with_a_clear_error(void **state)
{
    struct bench *t = *state;
    char op[16];
    t->x = run(t, "input()", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_STDIN, "input_request", q, "{\"prompt\": \"?\"}");
    rig_turn(&t->r);
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_string_equal(op, "interrupt");
    finish(t, q, "{\"status\": \"error\", \"ename\": \"KeyboardInterrupt\"}");
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "error");
    assert_non_null(strstr(json_of(t, t->x), "\"ename\": \"StdinNotImplementedError\""));
    assert_non_null(strstr(text_of(t, t->x), "StdinNotImplementedError: the code asked"));
    jp_msg_unref(q);
}

static void code_that_asks_for_input_and_ignores_the_interrupt_ends_too(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "input()", 0, 0);
    struct jp_msg *q = request(t);
    fake_vm_say(t->vm, JP_STDIN, "input_request", q, "{\"prompt\": \"?\"}");
    rig_advance(&t->r, 1000);
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "error");
    jp_msg_unref(q);
}

static void a_queued_execution_that_is_cancelled_never_interrupts_another(void **state)
{
    struct bench *t = *state;
    char op[16];
    t->x = run(t, "first", 0, 0);
    t->y = run(t, "second", 0, 0);
    struct jp_msg *q1 = request(t), *q2 = request(t);
    busy(t, q1);
    km_execution_cancel(t->y, true);
    assert_int_equal(fake_vm_take_ctl(t->vm, op), 0);
    finish(t, q1, "{\"status\": \"ok\"}");
    assert_int_equal(t->done, 1);
    busy(t, q2); /* now it is its turn */
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_string_equal(op, "interrupt");
    assert_int_equal(t->done, 1);
    jp_msg_unref(q1);
    jp_msg_unref(q2);
}

static void cancel_with_interrupt_stops_the_running_code(void **state)
{
    struct bench *t = *state;
    char op[16];
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    km_execution_cancel(t->x, true);
    assert_int_not_equal(fake_vm_take_ctl(t->vm, op), 0);
    assert_string_equal(op, "interrupt");
    finish(t, q, "{\"status\": \"error\"}");
    assert_int_equal(t->done, 0);
    jp_msg_unref(q);
}

static void the_death_of_the_kernel_ends_an_execution(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_state(t->vm, "{\"state\":\"exited\",\"exit_code\":7,\"reason\":\"exit\"}");
    rig_turn(&t->r);
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "dead");
    assert_non_null(
        strstr(json_of(t, t->x),
               "\"error\": {\"ename\": \"DeadKernelError\", \"evalue\": \"exit code 7\""));
    jp_msg_unref(q);
}

static void the_removal_of_the_kernel_ends_an_execution(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "x", 0, 0);
    km_kernel_shutdown(t->k, "deleted");
    assert_int_equal(t->done, 0); /* not from inside the call */
    rig_turn(&t->r);
    assert_int_equal(t->done, 1);
    assert_string_equal(km_execution_status(t->x), "dead");
    assert_non_null(strstr(json_of(t, t->x), "deleted"));
}

static void executions_are_no_connections_and_take_no_input(void **state)
{
    struct bench *t = *state;
    struct km_kernel_info i;
    t->x = run(t, "x", 0, 0);
    km_kernel_info(t->k, &i);
    assert_int_equal(i.connections, 0);
}

static void help_texts_come_out_of_the_payload(void **state)
{
    struct bench *t = *state;
    t->x = run(t, "len?", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    finish(
        t, q,
        "{\"status\": \"ok\", \"payload\": [{\"source\": \"page\", \"data\": {\"text/plain\": "
        "\"\\u001b[31mDocstring:\\u001b[39m x\"}, \"start\": 0}, {\"source\": \"set_next_input\", "
        "\"text\": \"x=1\"}]}");
    assert_string_equal(text_of(t, t->x), "Docstring: x\nx=1\n");
    assert_non_null(strstr(json_of(t, t->x), "\"payload\": [{\"source\": \"page\""));
    jp_msg_unref(q);
}

struct found {
    unsigned n;
    char mime[40], value[40];
};

static void on_mime(void *ctx, struct slice mime, struct slice value)
{
    struct found *f = ctx;
    f->n++;
    snprintf(f->mime, sizeof(f->mime), "%.*s", SLICE_FMT(mime));
    snprintf(f->value, sizeof(f->value), "%.*s", SLICE_FMT(value));
}

static void images_can_be_picked_out(void **state)
{
    struct bench *t = *state;
    struct found f = { 0 };
    t->x = run(t, "x", 0, 0);
    struct jp_msg *q = request(t);
    busy(t, q);
    fake_vm_say(t->vm, JP_IOPUB, "display_data", q,
                "{\"data\": {\"text/plain\": \"fig\", \"image/png\": \"aGk=\"}, \"metadata\": {}}");
    finish(t, q, "{\"status\": \"ok\"}");
    km_execution_each_mime(t->x, "image/", on_mime, &f);
    assert_int_equal(f.n, 1);
    assert_string_equal(f.mime, "image/png");
    assert_string_equal(f.value, "\"aGk=\"");
    jp_msg_unref(q);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_request_says_what_was_asked),
        TEST(outputs_are_collected_in_order_and_byte_for_byte),
        TEST(done_waits_for_both_reply_and_idle),
        TEST(an_error_is_told_with_a_readable_traceback),
        TEST(display_ids_change_all_outputs_even_of_finished_executions),
        TEST(clear_output_clears_now_or_at_the_next_output),
        TEST(output_over_the_limit_is_counted_and_cut_between_characters),
        TEST(a_timeout_interrupts_and_keeps_the_partial_output),
        TEST(a_timeout_ends_also_when_the_code_ignores_the_interrupt),
        TEST(code_that_asks_for_input_is_stopped_with_a_clear_error),
        TEST(code_that_asks_for_input_and_ignores_the_interrupt_ends_too),
        TEST(a_queued_execution_that_is_cancelled_never_interrupts_another),
        TEST(cancel_with_interrupt_stops_the_running_code),
        TEST(the_death_of_the_kernel_ends_an_execution),
        TEST(the_removal_of_the_kernel_ends_an_execution),
        TEST(executions_are_no_connections_and_take_no_input),
        TEST(help_texts_come_out_of_the_payload),
        TEST(images_can_be_picked_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
