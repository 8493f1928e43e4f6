#include "common/list.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

struct item {
    char name;
    struct list_node link; /* the list of the test */
};

static const char *names(const struct list *l)
{
    static char text[16];
    size_t n = 0;
    LIST_FOR_EACH (l, node)
        text[n++] = list_entry(node, struct item, link)->name;
    text[n] = '\0';
    return text;
}

static void test_items_stand_in_the_order_of_pushing(void **state)
{
    (void)state;
    struct list l;
    list_init(&l);
    struct item a = { .name = 'a' }, b = { .name = 'b' }, c = { .name = 'c' };
    assert_true(list_empty(&l));
    assert_null(list_first(&l));
    list_push_back(&l, &b.link);
    list_push_back(&l, &c.link);
    list_push_front(&l, &a.link);
    assert_string_equal(names(&l), "abc");
    assert_ptr_equal(list_first(&l), &a.link);
}

static void test_removing_twice_is_harmless(void **state)
{
    (void)state;
    struct list l;
    list_init(&l);
    struct item a = { .name = 'a' }, b = { .name = 'b' };
    list_remove(&a.link); /* never linked */
    list_push_back(&l, &a.link);
    list_push_back(&l, &b.link);
    assert_true(list_linked(&a.link));
    list_remove(&a.link);
    list_remove(&a.link);
    assert_false(list_linked(&a.link));
    assert_string_equal(names(&l), "b");
    list_push_back(&l, &a.link);
    assert_string_equal(names(&l), "ba");
}

static void test_the_safe_walk_allows_removing_the_current_item(void **state)
{
    (void)state;
    struct list l;
    list_init(&l);
    struct item items[4] = { { .name = 'a' }, { .name = 'b' }, { .name = 'c' }, { .name = 'd' } };
    for (int i = 0; i < 4; i++)
        list_push_back(&l, &items[i].link);
    int seen = 0;
    LIST_FOR_EACH_SAFE (&l, n) {
        if (seen++ % 2 == 0)
            list_remove(n);
    }
    assert_int_equal(seen, 4);
    assert_string_equal(names(&l), "bd");
}

static void test_a_zeroed_list_is_empty(void **state)
{
    (void)state;
    struct list l;
    memset(&l, 0, sizeof(l));
    assert_true(list_empty(&l));
    assert_string_equal(names(&l), "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_items_stand_in_the_order_of_pushing),
        cmocka_unit_test(test_removing_twice_is_harmless),
        cmocka_unit_test(test_the_safe_walk_allows_removing_the_current_item),
        cmocka_unit_test(test_a_zeroed_list_is_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
