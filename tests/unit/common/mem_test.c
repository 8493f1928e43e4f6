#include "common/mem.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_zero_sizes_give_a_pointer_that_can_be_freed(void **state)
{
    (void)state;
    void *a = xmalloc(0), *b = xcalloc(0, 8);
    assert_non_null(a);
    assert_non_null(b);
    a = xrealloc(a, 0);
    assert_non_null(a);
    free(a);
    free(b);
}

static void test_new_is_zeroed(void **state)
{
    (void)state;
    struct thing {
        uint64_t a[16];
    } *t = xnew(struct thing);
    static const struct thing zero;
    assert_memory_equal(t, &zero, sizeof(zero));
    free(t);
}

static void test_string_copies(void **state)
{
    (void)state;
    assert_null(xstrdup(NULL));
    char *a = xstrdup("kernel"), *b = xstrndup("kernel", 3), *c = xstrndup("ab", 100);
    char *d = xasprintf("%s-%d", "vm", 7);
    assert_string_equal(a, "kernel");
    assert_string_equal(b, "ker");
    assert_string_equal(c, "ab");
    assert_string_equal(d, "vm-7");
    free(a);
    free(b);
    free(c);
    free(d);
}

static void test_the_nth_fallible_allocation_fails_once(void **state)
{
    (void)state;
    mem_fail_at(2);
    void *a = mem_try_realloc(NULL, 10);
    assert_non_null(a);
    assert_null(mem_try_realloc(NULL, 10));
    void *b = mem_try_realloc(NULL, 10);
    assert_non_null(b);
    mem_fail_at(1);
    mem_fail_at(0);
    a = mem_try_realloc(a, 20);
    assert_non_null(a);
    free(a);
    free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zero_sizes_give_a_pointer_that_can_be_freed),
        cmocka_unit_test(test_new_is_zeroed),
        cmocka_unit_test(test_string_copies),
        cmocka_unit_test(test_the_nth_fallible_allocation_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
