/* The hook's line protocol, with this test as the Python side. */
#include "guest-kernel-shim/hook.h"
#include "shim_test.h"
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

struct fixture {
    struct shim_loop loop;
    struct shim_hook hook;
    int peer;
    char before[64], answers[256];
    unsigned hellos, n;
};

static void on_hello(void *ctx, const char *before)
{
    struct fixture *f = ctx;

    f->hellos++;
    snprintf(f->before, sizeof(f->before), "%s", before);
}
static void on_answer(void *ctx, const char *error)
{
    struct fixture *f = ctx;
    size_t used = strlen(f->answers);

    f->n++;
    snprintf(f->answers + used, sizeof(f->answers) - used, "[%s]", error ? error : "ok");
}

static int set_up(void **state)
{
    struct fixture *f = xnew(struct fixture);

    shim_loop_init(&f->loop);
    assert_int_equal(shim_hook_open(&f->hook, &f->loop, on_hello, f, &f->peer, NULL), 0);
    *state = f;
    return 0;
}
static int tear_down(void **state)
{
    struct fixture *f = *state;

    shim_hook_close(&f->hook);
    closep(&f->peer);
    shim_loop_fini(&f->loop);
    free(f);
    return 0;
}

static void say(struct fixture *f, const char *text)
{
    assert_int_equal(write(f->peer, text, strlen(text)), strlen(text));
    shim_loop_step(&f->loop, 1000);
}

static void greet(struct fixture *f)
{
    say(f, "{\"hook\":1,\"capture\":true,\"before\":\"noise\"}\n");
}

static void read_line(struct fixture *f, char *line, size_t size)
{
    ssize_t n = read(f->peer, line, size - 1);

    assert_true(n > 0);
    line[n] = '\0';
}

static void test_the_first_line_makes_it_ready(void **state)
{
    struct fixture *f = *state;

    assert_false(shim_hook_ready(&f->hook));
    shim_hook_call(&f->hook, json_object(), on_answer, f);
    assert_string_equal(f->answers, "[the kernel has no hook]");
    greet(f);
    assert_int_equal(f->hellos, 1);
    assert_string_equal(f->before, "noise");
    assert_true(shim_hook_ready(&f->hook));
    assert_true(f->hook.capture);
}

static void test_answers_come_to_their_calls_in_order(void **state)
{
    struct fixture *f = *state;
    char line[256];

    greet(f);
    shim_hook_call(&f->hook, json_pack("{s:s}", "reseed", "00"), on_answer, f);
    read_line(f, line, sizeof(line));
    assert_string_equal(line, "{\"reseed\":\"00\"}\n");
    shim_hook_call(&f->hook, json_pack("{s:b}", "gc", 1), on_answer, f);
    say(f, "{\"ok\":true}\n{\"ok\":false,\"err");
    assert_string_equal(f->answers, "[ok]");
    say(f, "or\":\"no gc\"}\n");
    assert_string_equal(f->answers, "[ok][no gc]");
}

static void test_nonsense_fails_the_call_and_surplus_answers_are_ignored(void **state)
{
    struct fixture *f = *state;

    greet(f);
    say(f, "{\"ok\":true}\n");
    assert_int_equal(f->n, 0);
    shim_hook_call(&f->hook, json_object(), on_answer, f);
    say(f, "hello?\n");
    assert_string_equal(f->answers, "[the hook's answer is no JSON object]");
    shim_hook_call(&f->hook, json_object(), on_answer, f);
    say(f, "{\"ok\":false}\n");
    assert_int_equal(f->n, 2);
}

static void test_calls_fail_when_the_kernel_goes_away(void **state)
{
    struct fixture *f = *state;

    greet(f);
    shim_hook_call(&f->hook, json_object(), on_answer, f);
    shim_hook_call(&f->hook, json_object(), on_answer, f);
    close(f->peer);
    f->peer = -1;
    shim_loop_step(&f->loop, 1000);
    assert_int_equal(f->n, 2);
    assert_false(shim_hook_ready(&f->hook));
    shim_hook_call(&f->hook, json_object(), on_answer, f);
    assert_int_equal(f->n, 3);
}

static void test_a_line_without_end_closes_the_hook(void **state)
{
    struct fixture *f = *state;
    char chunk[4096];

    memset(chunk, 'x', sizeof(chunk));
    fcntl(f->peer, F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 4096 && f->hook.fd >= 0; i++) {
        (void)!write(f->peer, chunk, sizeof(chunk));
        shim_loop_step(&f->loop, 0);
    }
    assert_int_equal(f->hook.fd, -1);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(test_the_first_line_makes_it_ready),
        T(test_answers_come_to_their_calls_in_order),
        T(test_nonsense_fails_the_call_and_surplus_answers_are_ignored),
        T(test_calls_fail_when_the_kernel_goes_away),
        T(test_a_line_without_end_closes_the_hook),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
