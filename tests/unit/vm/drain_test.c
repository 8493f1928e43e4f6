/* What a child writes: the tail for error texts, the capped copy, the pause under a flood. */
#include "vm/drain.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static struct loop *loop;
static struct vm_drain d;
static int in;

static int setup(void **state)
{
    int p[2];
    (void)state;
    loop = loop_new();
    memset(&d, 0, sizeof(d));
    if (pipe2(p, O_NONBLOCK | O_CLOEXEC) < 0)
        return -1;
    in = p[1];
    vm_drain_start(&d, loop, p[0], -1, 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    vm_drain_stop(&d);
    if (in >= 0)
        close(in);
    loop_free(loop);
    return 0;
}

static void say(const char *s)
{
    assert_int_equal(write(in, s, strlen(s)), strlen(s));
}

static void test_the_tail_keeps_the_last_bytes_only(void **state)
{
    static struct vm_tail t;
    char line[32];
    (void)state;
    for (int i = 0; i < 5000; i++)
        vm_tail_add(&t, slice_str("0123456789\n"));
    vm_tail_add(&t, slice_str("the end\n"));
    assert_int_equal(t.n, VM_TAIL_MAX);
    assert_int_equal(strlen(t.bytes), VM_TAIL_MAX);
    vm_tail_last_line(&t, line, sizeof(line));
    assert_string_equal(line, "the end");
}

static void test_one_huge_piece_keeps_its_end(void **state)
{
    static struct vm_tail t;
    static char big[3 * VM_TAIL_MAX];
    (void)state;
    memset(big, 'a', sizeof(big));
    big[sizeof(big) - 1] = 'z';
    vm_tail_add(&t, slice_of(big, sizeof(big)));
    assert_int_equal(t.n, VM_TAIL_MAX);
    assert_int_equal(t.bytes[VM_TAIL_MAX - 1], 'z');
}

static void test_the_last_line_is_clean_and_cut(void **state)
{
    static struct vm_tail t;
    char line[12];
    (void)state;
    vm_tail_last_line(&t, line, sizeof(line));
    assert_string_equal(line, "");
    vm_tail_add(&t, slice_str("first\n\x1b[31mred\x07 alert and more\n\n  \n"));
    vm_tail_last_line(&t, line, sizeof(line));
    assert_string_equal(line, " [31mred  a");
}

static void test_bytes_reach_the_tail_until_the_end(void **state)
{
    (void)state;
    say("one\n");
    loop_step(loop, 1000);
    assert_string_equal(d.tail.bytes, "one\n");
    say("two\n");
    close(in);
    in = -1;
    for (int i = 0; i < 20 && d.fd >= 0; i++)
        loop_step(loop, 100);
    assert_string_equal(d.tail.bytes, "one\ntwo\n");
    assert_int_equal(d.fd, -1);
}

static void test_finish_takes_what_is_left(void **state)
{
    (void)state;
    say("last words");
    vm_drain_finish(&d);
    assert_string_equal(d.tail.bytes, "last words");
}

static void test_a_flood_pauses_reading(void **state)
{
    static char chunk[8192];
    size_t taken = 0;
    (void)state;
    /* As much as it takes within one turn after the other, without the timer's time passing. */
    for (int i = 0; i < 100; i++) {
        ssize_t n = write(in, chunk, sizeof(chunk));
        if (n > 0)
            taken += (size_t)n;
        loop_step(loop, 0);
    }
    /* The pipe itself holds 64 KiB; more than burst + pipe must not have been accepted per pause. A
     * slow machine may have passed a pause or two. */
    assert_true(taken >= VM_DRAIN_BURST);
    assert_true(taken < 100 * sizeof(chunk) || d.burst < VM_DRAIN_BURST);
    /* and it goes on afterwards */
    for (int i = 0; i < 100 && write(in, "more", 4) != 4; i++)
        loop_step(loop, 50);
    for (int i = 0; i < 100 && !strstr(d.tail.bytes + (d.tail.n > 8 ? d.tail.n - 8 : 0), "more");
         i++)
        loop_step(loop, 50);
    assert_memory_equal(d.tail.bytes + d.tail.n - 4, "more", 4);
}

static void test_the_copy_ends_at_its_cap(void **state)
{
    struct stat st;
    int p[2], log = memfd_create("log", MFD_CLOEXEC), keep = dup(log);
    struct vm_drain c = { 0 };
    (void)state;
    assert_int_equal(pipe2(p, O_NONBLOCK | O_CLOEXEC), 0);
    vm_drain_start(&c, loop, p[0], log, 10);
    assert_int_equal(write(p[1], "0123456", 7), 7);
    loop_step(loop, 1000);
    assert_int_equal(write(p[1], "789abcd", 7), 7);
    loop_step(loop, 1000);
    vm_drain_finish(&c);
    assert_string_equal(c.tail.bytes, "0123456789abcd");
    fstat(keep, &st);
    assert_int_equal(st.st_size, 10);
    vm_drain_stop(&c);
    vm_drain_stop(&c); /* idempotent */
    close(p[1]);
    close(keep);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_tail_keeps_the_last_bytes_only),
        cmocka_unit_test(test_one_huge_piece_keeps_its_end),
        cmocka_unit_test(test_the_last_line_is_clean_and_cut),
        cmocka_unit_test_setup_teardown(test_bytes_reach_the_tail_until_the_end, setup, teardown),
        cmocka_unit_test_setup_teardown(test_finish_takes_what_is_left, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_flood_pauses_reading, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_copy_ends_at_its_cap, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
