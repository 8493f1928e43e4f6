#include "proto/jp_sign.h"
#include "vectors.h"
#include <string.h>

static const struct slice empty_parts[4] = { { (const uint8_t *)"{}", 2 },
                                             { (const uint8_t *)"{}", 2 },
                                             { (const uint8_t *)"{}", 2 },
                                             { (const uint8_t *)"{}", 2 } };

static void signatures_match_the_reference(void **state)
{
    struct vectors v;
    json_t *item;
    size_t i;

    (void)state;
    vectors_load(&v, "signatures.json");
    assert_true(json_array_size(v.doc) >= 7);
    json_array_foreach(v.doc, i, item)
    {
        struct slice parts[4];
        char sig[JP_SIG_LEN + 1];
        struct jp_signer *s = jp_signer_new(vec_get(&v, item, "key"));

        assert_int_equal(vec_list(&v, item, "parts", parts, 4), 4);
        for (int again = 0; again < 3; again++) { /* the context is re-used */
            jp_sign(s, parts, sig);
            assert_string_equal(sig, vec_str(item, "signature"));
            assert_true(jp_verify(s, parts, slice_str(sig)));
        }
        jp_signer_free(s);
    }
    vectors_free(&v);
}

static void any_changed_bit_is_refused(void **state)
{
    struct jp_signer *s = jp_signer_new(SLICE_LIT("secret"));
    char sig[JP_SIG_LEN + 1];

    (void)state;
    jp_sign(s, empty_parts, sig);
    for (size_t i = 0; i < JP_SIG_LEN; i++) {
        sig[i] ^= 1;
        assert_false(jp_verify(s, empty_parts, slice_str(sig)));
        sig[i] ^= 1;
    }
    assert_true(jp_verify(s, empty_parts, slice_str(sig)));
    jp_signer_free(s);
}

static void signature_of_another_length_or_case_is_refused(void **state)
{
    struct jp_signer *s = jp_signer_new(SLICE_LIT("secret"));
    char sig[JP_SIG_LEN + 1];

    (void)state;
    jp_sign(s, empty_parts, sig);
    assert_false(jp_verify(s, empty_parts, SLICE_NULL));
    assert_false(jp_verify(s, empty_parts, slice_of(sig, JP_SIG_LEN - 1)));
    assert_false(jp_verify(s, empty_parts, slice_of(sig, JP_SIG_LEN + 1)));
    for (char *c = sig; *c; c++)
        if (*c >= 'a')
            *c = (char)(*c - 'a' + 'A');
    assert_false(jp_verify(s, empty_parts, slice_str(sig)));
    jp_signer_free(s);
}

static void empty_key_signs_with_nothing_and_checks_nothing(void **state)
{
    struct jp_signer *s = jp_signer_new(SLICE_NULL);
    char sig[JP_SIG_LEN + 1] = "x";

    (void)state;
    jp_sign(s, empty_parts, sig);
    assert_string_equal(sig, "");
    assert_true(jp_verify(s, empty_parts, SLICE_NULL));
    assert_true(jp_verify(s, empty_parts, SLICE_LIT("whatever")));
    jp_signer_free(s);
    jp_signer_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(signatures_match_the_reference),
        cmocka_unit_test(any_changed_bit_is_refused),
        cmocka_unit_test(signature_of_another_length_or_case_is_refused),
        cmocka_unit_test(empty_key_signs_with_nothing_and_checks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
