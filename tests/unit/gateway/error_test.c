#include "gateway/http/error.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_every_code_that_the_manager_documents_has_its_status(void **state)
{
    static const int table[][2] = {
        { 0, 200 },          { -EINVAL, 400 }, { -EPERM, 403 },  { -EDQUOT, 403 }, { -ENOENT, 404 },
        { -EEXIST, 409 },    { -ESRCH, 409 },  { -ENODEV, 410 }, { -E2BIG, 413 },  { -EAGAIN, 503 },
        { -ETIMEDOUT, 504 }, { -EIO, 500 },    { -12345, 500 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        assert_int_equal(gw_status_of(table[i][0]), table[i][1]);
        assert_string_not_equal(gw_status_phrase(table[i][1]), "Unknown");
    }
    assert_string_equal(gw_status_phrase(404), "Not Found");
    assert_string_equal(gw_status_phrase(999), "Unknown");
}

static void test_the_body_always_has_message_and_reason(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 200);
    assert_int_equal(gw_error_body(&b, 404, NULL, "no \"x\"\n"), 0);
    assert_true(
        slice_eq_str(buf_slice(&b), "{\"message\":\"no \\\"x\\\"\\n\",\"reason\":\"Not Found\"}"));
    buf_clear(&b);
    assert_int_equal(gw_error_body(&b, 403, "Resource Limit", "full"), 0);
    assert_true(
        slice_eq_str(buf_slice(&b), "{\"message\":\"full\",\"reason\":\"Resource Limit\"}"));
    buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_code_that_the_manager_documents_has_its_status),
        cmocka_unit_test(test_the_body_always_has_message_and_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
