#include "common/metrics.h"
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void expect_text(const struct metrics *m, const char *text)
{
    struct buf b;
    buf_init(&b, 10000);
    assert_int_equal(metrics_write(m, &b), 0);
    assert_string_equal(buf_cstr(&b), text);
    buf_fini(&b);
}

static void test_same_name_and_labels_give_the_same_metric(void **state)
{
    (void)state;
    struct metrics *m = metrics_new();
    struct metric *a = metrics_counter(m, "x_total", "k=\"a\"", "help");
    assert_ptr_equal(metrics_counter(m, "x_total", "k=\"a\"", "other"), a);
    assert_ptr_not_equal(metrics_counter(m, "x_total", "k=\"b\"", "help"), a);
    metric_add(a, 2);
    metric_add(metrics_counter(m, "x_total", "k=\"a\"", ""), 3);
    assert_true(metric_value(a) == 5);
    metrics_free(m);
    metrics_free(NULL);
}

static void test_families_are_grouped_with_help_and_type(void **state)
{
    (void)state;
    struct metrics *m = metrics_new();
    metric_add(metrics_counter(m, "a_total", "k=\"1\"", "line\none \\ two"), 1);
    metric_set(metrics_gauge(m, "g", "", "gauge"), -1.5);
    metric_add(metrics_counter(m, "a_total", "k=\"2\"", ""), 123456789);
    expect_text(m, "# HELP a_total line\\none \\\\ two\n"
                   "# TYPE a_total counter\n"
                   "a_total{k=\"1\"} 1\n"
                   "a_total{k=\"2\"} 123456789\n"
                   "# HELP g gauge\n"
                   "# TYPE g gauge\n"
                   "g -1.5\n");
    metrics_free(m);
}

static void test_histogram_buckets_are_cumulative(void **state)
{
    (void)state;
    struct metrics *m = metrics_new();
    static const double bounds[] = { 0.1, 1, 10 };
    struct metric *h = metrics_histogram(m, "t_seconds", "", "time", bounds, 3);
    struct metric *l = metrics_histogram(m, "t_seconds", "k=\"v\"", "time", bounds, 3);
    metric_observe(h, 0.1);
    metric_observe(h, 0.5);
    metric_observe(h, 0.25);
    metric_observe(h, 100);
    metric_observe(l, NAN);
    assert_true(metric_value(h) == 4);
    expect_text(m, "# HELP t_seconds time\n"
                   "# TYPE t_seconds histogram\n"
                   "t_seconds_bucket{le=\"0.1\"} 1\n"
                   "t_seconds_bucket{le=\"1\"} 3\n"
                   "t_seconds_bucket{le=\"10\"} 3\n"
                   "t_seconds_bucket{le=\"+Inf\"} 4\n"
                   "t_seconds_sum 100.85\n"
                   "t_seconds_count 4\n"
                   "t_seconds_bucket{k=\"v\",le=\"0.1\"} 0\n"
                   "t_seconds_bucket{k=\"v\",le=\"1\"} 0\n"
                   "t_seconds_bucket{k=\"v\",le=\"10\"} 0\n"
                   "t_seconds_bucket{k=\"v\",le=\"+Inf\"} 1\n"
                   "t_seconds_sum{k=\"v\"} NaN\n"
                   "t_seconds_count{k=\"v\"} 1\n");
    metrics_free(m);
}

static void test_numbers_read_back_exactly(void **state)
{
    (void)state;
    static const double values[] = { 0.1, 1.0 / 3, 1e300, 9007199254740991.0, 1e-9 };
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        struct metrics *m = metrics_new();
        metric_set(metrics_gauge(m, "g", "", ""), values[i]);
        struct buf b;
        buf_init(&b, 1000);
        assert_int_equal(metrics_write(m, &b), 0);
        const char *v = strstr(buf_cstr(&b), "\ng ");
        assert_non_null(v);
        assert_true(strtod(v + 3, NULL) == values[i]);
        buf_fini(&b);
        metrics_free(m);
    }
}

static void test_null_metrics_are_ignored(void **state)
{
    (void)state;
    assert_null(metrics_counter(NULL, "x", "", ""));
    assert_null(metrics_gauge(NULL, "x", "", ""));
    assert_null(metrics_histogram(NULL, "x", "", "", NULL, 0));
    metric_add(NULL, 1);
    metric_set(NULL, 1);
    metric_observe(NULL, 1);
    assert_true(metric_value(NULL) == 0);
}

static void test_a_buffer_too_small_is_reported(void **state)
{
    (void)state;
    struct metrics *m = metrics_new();
    static const double bounds[] = { 1 };
    metric_observe(metrics_histogram(m, "h", "", "help", bounds, 1), 0.5);
    metric_add(metrics_counter(m, "c", "", "help"), 1);
    struct buf whole;
    buf_init(&whole, 1000);
    assert_int_equal(metrics_write(m, &whole), 0);
    for (size_t max = 0; max < whole.len; max++) {
        struct buf b;
        buf_init(&b, max);
        assert_int_equal(metrics_write(m, &b), -ENOBUFS);
        buf_fini(&b);
    }
    buf_fini(&whole);
    metrics_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_name_and_labels_give_the_same_metric),
        cmocka_unit_test(test_families_are_grouped_with_help_and_type),
        cmocka_unit_test(test_histogram_buckets_are_cumulative),
        cmocka_unit_test(test_numbers_read_back_exactly),
        cmocka_unit_test(test_null_metrics_are_ignored),
        cmocka_unit_test(test_a_buffer_too_small_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
