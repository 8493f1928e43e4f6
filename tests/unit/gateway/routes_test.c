#include "gateway/http/routes.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void h_list(struct gw_req *r)
{
    (void)r;
}
static void h_start(struct gw_req *r)
{
    (void)r;
}
static void h_one(struct gw_req *r)
{
    (void)r;
}
static void h_stop(struct gw_req *r)
{
    (void)r;
}
static void h_file(struct gw_req *r)
{
    (void)r;
}

static const struct gw_route table[] = {
    { GW_GET, "/api/kernels", h_list, 0 },
    { GW_POST, "/api/kernels", h_start, 0 },
    { GW_GET, "/api/kernels/{}", h_one, 0 },
    { GW_POST, "/api/kernels/{}/interrupt", h_stop, 0 },
    { GW_GET, "/kernelspecs/{}/{*}", h_file, 0 },
};
#define N (sizeof(table) / sizeof(table[0]))

static struct gw_match find(enum gw_method m, const char *path)
{
    struct gw_match r;
    gw_routes_match(table, N, m, path, &r);
    return r;
}

static void test_method_and_path_choose_the_handler(void **state)
{
    (void)state;
    assert_ptr_equal(find(GW_GET, "/api/kernels").route->fn, h_list);
    assert_ptr_equal(find(GW_POST, "/api/kernels").route->fn, h_start);
    struct gw_match m = find(GW_GET, "/api/kernels/abc-1");
    assert_int_equal(m.status, 200);
    assert_ptr_equal(m.route->fn, h_one);
    assert_string_equal(m.arg[0], "abc-1");
    m = find(GW_POST, "/api/kernels/x/interrupt");
    assert_ptr_equal(m.route->fn, h_stop);
    assert_string_equal(m.arg[0], "x");
}

static void test_the_rest_pattern_takes_several_segments_but_not_none(void **state)
{
    (void)state;
    struct gw_match m = find(GW_GET, "/kernelspecs/py 3/a/b.png");
    assert_string_equal(m.arg[0], "py 3");
    assert_string_equal(m.arg[1], "a/b.png");
    assert_int_equal(find(GW_GET, "/kernelspecs/py/").status, 404);
    assert_int_equal(find(GW_GET, "/kernelspecs//x").status, 404);
}

static void test_unknown_paths_are_404_and_slashes_count(void **state)
{
    static const char *const paths[] = { "",
                                         "/",
                                         "/api",
                                         "/api/kernels/",
                                         "/api/kernels/x/",
                                         "/api/kernels/x/y",
                                         "/api/kernelsx",
                                         "/API/kernels" };
    (void)state;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
        assert_int_equal(find(GW_GET, paths[i]).status, 404);
}

static void test_a_wrong_method_names_those_that_work(void **state)
{
    (void)state;
    struct gw_match m = find(GW_DELETE, "/api/kernels");
    assert_int_equal(m.status, 405);
    assert_null(m.route);
    assert_string_equal(m.allow, "GET, HEAD, POST, OPTIONS");
    assert_string_equal(find(GW_GET, "/api/kernels/x/interrupt").allow, "POST, OPTIONS");
}

static void test_head_is_answered_by_get_and_options_by_any(void **state)
{
    (void)state;
    assert_ptr_equal(find(GW_HEAD, "/api/kernels").route->fn, h_list);
    assert_int_equal(find(GW_HEAD, "/api/kernels/x/interrupt").status, 405);
    struct gw_match m = find(GW_OPTIONS, "/api/kernels/x/interrupt");
    assert_int_equal(m.status, 200);
    assert_non_null(m.route);
    assert_int_equal(find(GW_OPTIONS, "/nope").status, 404);
}

static void test_segments_longer_than_the_limit_match_nothing(void **state)
{
    char path[GW_SEGMENT_MAX + 40] = "/api/kernels/";
    (void)state;
    size_t n = strlen(path);
    memset(path + n, 'a', GW_SEGMENT_MAX - 1);
    assert_int_equal(find(GW_GET, path).status, 200);
    path[n + GW_SEGMENT_MAX - 1] = 'a';
    assert_int_equal(find(GW_GET, path).status, 404);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_method_and_path_choose_the_handler),
        cmocka_unit_test(test_the_rest_pattern_takes_several_segments_but_not_none),
        cmocka_unit_test(test_unknown_paths_are_404_and_slashes_count),
        cmocka_unit_test(test_a_wrong_method_names_those_that_work),
        cmocka_unit_test(test_head_is_answered_by_get_and_options_by_any),
        cmocka_unit_test(test_segments_longer_than_the_limit_match_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
