#include "common/map.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static int values[3000];

static void test_put_get_and_replace(void **state)
{
    (void)state;
    struct map *m = map_new();
    assert_null(map_get(m, "a"));
    assert_null(map_put(m, "a", &values[1]));
    assert_ptr_equal(map_get(m, "a"), &values[1]);
    assert_ptr_equal(map_put(m, "a", &values[2]), &values[1]);
    assert_ptr_equal(map_get(m, "a"), &values[2]);
    assert_int_equal(map_size(m), 1);
    assert_ptr_equal(map_del(m, "a"), &values[2]);
    assert_null(map_del(m, "a"));
    assert_int_equal(map_size(m), 0);
    map_free(m);
    map_free(NULL);
}

static void test_keys_are_copied_and_may_hold_any_byte(void **state)
{
    (void)state;
    struct map *m = map_new();
    char key[] = "key";
    map_put(m, key, &values[0]);
    key[0] = 'X';
    assert_ptr_equal(map_get(m, "key"), &values[0]);
    map_put_slice(m, slice_of("a\0b", 3), &values[1]);
    map_put_slice(m, slice_of("a\0c", 3), &values[2]);
    map_put_slice(m, SLICE_NULL, &values[3]);
    assert_ptr_equal(map_get_slice(m, slice_of("a\0b", 3)), &values[1]);
    assert_ptr_equal(map_get_slice(m, slice_of("a\0c", 3)), &values[2]);
    assert_null(map_get(m, "a"));
    assert_ptr_equal(map_get(m, ""), &values[3]);
    assert_ptr_equal(map_del_slice(m, slice_of("a\0b", 3)), &values[1]);
    map_free(m);
}

static void test_thousands_of_keys_survive_growth_and_removal(void **state)
{
    (void)state;
    struct map *m = map_new();
    char key[64];
    for (int i = 0; i < 3000; i++) {
        /* Lengths 1..40 cover every tail length of the hash. */
        snprintf(key, sizeof(key), "%0*d", 5 + i % 36, i);
        assert_null(map_put(m, key, &values[i]));
    }
    assert_int_equal(map_size(m), 3000);
    for (int i = 0; i < 3000; i += 2) {
        snprintf(key, sizeof(key), "%0*d", 5 + i % 36, i);
        assert_ptr_equal(map_del(m, key), &values[i]);
    }
    for (int i = 0; i < 3000; i++) {
        snprintf(key, sizeof(key), "%0*d", 5 + i % 36, i);
        assert_ptr_equal(map_get(m, key), i % 2 ? &values[i] : NULL);
    }
    map_free(m);
}

static void test_iteration_follows_the_order_of_insertion(void **state)
{
    (void)state;
    struct map *m = map_new();
    static const char *const keys[] = { "zeta", "alpha", "mid", "beta" };
    for (int i = 0; i < 4; i++)
        map_put(m, keys[i], &values[i]);
    map_put(m, "alpha", &values[9]); /* keeps its place */
    struct map_iter it = { 0 };
    int n = 0;
    while (map_next(m, &it)) {
        assert_string_equal(it.key, keys[n]);
        assert_ptr_equal(it.value, n == 1 ? &values[9] : &values[n]);
        n++;
    }
    assert_int_equal(n, 4);
    assert_false(map_next(m, &it));
    map_free(m);
}

static void test_the_current_entry_may_be_deleted_while_iterating(void **state)
{
    (void)state;
    struct map *m = map_new();
    char key[16];
    for (int i = 0; i < 100; i++) {
        snprintf(key, sizeof(key), "k%d", i);
        map_put(m, key, &values[i]);
    }
    struct map_iter it = { 0 };
    int seen = 0;
    while (map_next(m, &it)) {
        assert_ptr_equal(it.value, &values[seen]);
        seen++;
        if (seen % 3 == 0 || seen == 100)
            assert_non_null(map_del(m, it.key));
    }
    assert_int_equal(seen, 100);
    assert_int_equal(map_size(m), 100 - 34);
    map_free(m);
}

static void test_an_empty_map_iterates_over_nothing(void **state)
{
    (void)state;
    struct map *m = map_new();
    struct map_iter it = { 0 };
    assert_false(map_next(m, &it));
    map_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_put_get_and_replace),
        cmocka_unit_test(test_keys_are_copied_and_may_hold_any_byte),
        cmocka_unit_test(test_thousands_of_keys_survive_growth_and_removal),
        cmocka_unit_test(test_iteration_follows_the_order_of_insertion),
        cmocka_unit_test(test_the_current_entry_may_be_deleted_while_iterating),
        cmocka_unit_test(test_an_empty_map_iterates_over_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
