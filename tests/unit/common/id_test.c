#include "common/id.h"
#include <ctype.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_a_uuid_has_version_4_and_the_rfc_variant(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        char u[ID_UUID_LEN + 1];
        id_uuid4(u);
        assert_int_equal(strlen(u), ID_UUID_LEN);
        for (int k = 0; k < ID_UUID_LEN; k++) {
            if (k == 8 || k == 13 || k == 18 || k == 23)
                assert_int_equal(u[k], '-');
            else
                assert_true(isdigit((unsigned char)u[k]) || (u[k] >= 'a' && u[k] <= 'f'));
        }
        assert_int_equal(u[14], '4');
        assert_non_null(strchr("89ab", u[19]));
        assert_true(id_is_uuid_shaped(u));
    }
}

static void test_two_ids_differ(void **state)
{
    (void)state;
    char a[ID_UUID_LEN + 1], b[ID_UUID_LEN + 1], c[81], d[81];
    id_uuid4(a);
    id_uuid4(b);
    assert_string_not_equal(a, b);
    id_token(c, 40); /* more than one chunk */
    id_token(d, 40);
    assert_int_equal(strlen(c), 80);
    assert_string_not_equal(c, d);
}

static void test_hex_is_lower_case(void **state)
{
    (void)state;
    char text[9];
    id_hex(text, (const uint8_t *)"\x00\x9f\xa0\xff", 4);
    assert_string_equal(text, "009fa0ff");
}

static void test_uuid_shape_is_five_word_groups(void **state)
{
    (void)state;
    assert_true(id_is_uuid_shaped("a-b-c-d-e"));
    assert_true(id_is_uuid_shaped("A1_-b-c-d-e_"));
    static const char *const bad[] = { "",          "a",          "a-b-c-d",         "a-b-c-d-e-f",
                                       "-a-b-c-d",  "a-b-c-d-",   "a--c-d-e",        "a-b-c-d-e/",
                                       "a-b-c-d-.", "a-b-c-d- e", "a-b-c-d-\xc3\xa9" };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(id_is_uuid_shaped(bad[i]));
}

static void test_constant_time_compare_agrees_with_equality(void **state)
{
    (void)state;
    assert_true(id_equal_ct(SLICE_LIT("token"), SLICE_LIT("token")));
    assert_false(id_equal_ct(SLICE_LIT("token"), SLICE_LIT("tokem")));
    assert_false(id_equal_ct(SLICE_LIT("token"), SLICE_LIT("uoken")));
    assert_false(id_equal_ct(SLICE_LIT("token"), SLICE_LIT("toke")));
    assert_true(id_equal_ct(SLICE_NULL, SLICE_LIT("")));
}

static void test_base64_of_the_rfc_4648_vectors(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        { "", "" },
        { "f", "Zg==" },
        { "fo", "Zm8=" },
        { "foo", "Zm9v" },
        { "foob", "Zm9vYg==" },
        { "fooba", "Zm9vYmE=" },
        { "foobar", "Zm9vYmFy" },
        { "\xfb\xff\xfe", "+//+" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[32];
        uint8_t back[32];
        size_t n = sizeof(back);
        struct slice in = slice_str(cases[i][0]);
        id_base64(text, in);
        assert_string_equal(text, cases[i][1]);
        assert_int_equal(strlen(text), id_base64_len(in.n));
        assert_int_equal(id_base64_decode(slice_str(text), back, &n), 0);
        assert_true(slice_eq(slice_of(back, n), in));
    }
}

static void test_base64_decoding_refuses_what_is_not_canonical(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "Z",    "Zg=",  "Zg",   "====",     "Z===", "Zg=a",
        "Zh==", "Zm9=", "Zm9-", "Zg==Zg==", "Zm 9", "\xff\xff\xff\xff"
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint8_t out[16];
        size_t n = sizeof(out);
        assert_int_equal(id_base64_decode(slice_str(bad[i]), out, &n), -EINVAL);
        assert_int_equal(n, sizeof(out));
    }
}

static void test_base64_decoding_respects_the_room(void **state)
{
    (void)state;
    uint8_t out[2] = { 7, 7 };
    size_t n = 2;
    assert_int_equal(id_base64_decode(SLICE_LIT("Zm9v"), out, &n), -ENOBUFS);
    assert_int_equal(id_base64_decode(SLICE_LIT("Zm8="), out, &n), 0);
    assert_int_equal(n, 2);
    assert_memory_equal(out, "fo", 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_uuid_has_version_4_and_the_rfc_variant),
        cmocka_unit_test(test_two_ids_differ),
        cmocka_unit_test(test_hex_is_lower_case),
        cmocka_unit_test(test_uuid_shape_is_five_word_groups),
        cmocka_unit_test(test_constant_time_compare_agrees_with_equality),
        cmocka_unit_test(test_base64_of_the_rfc_4648_vectors),
        cmocka_unit_test(test_base64_decoding_refuses_what_is_not_canonical),
        cmocka_unit_test(test_base64_decoding_respects_the_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
