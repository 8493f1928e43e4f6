/* Names that appear in APIs and metrics. */
#include "vm/vm.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_every_tier_is_parsed_from_its_own_name(void **state)
{
    (void)state;
    for (int i = VM_TIER_LOCAL; i <= VM_TIER_KVM; i++) {
        enum vm_tier t = VM_TIER_LOCAL;
        assert_int_equal(vm_tier_parse(vm_tier_name((enum vm_tier)i), &t), 0);
        assert_int_equal(t, i);
    }
}

static void test_unknown_tiers_are_refused(void **state)
{
    enum vm_tier t = VM_TIER_TCG;
    (void)state;
    assert_int_equal(vm_tier_parse("hardware", &t), -EINVAL);
    assert_int_equal(vm_tier_parse("", &t), -EINVAL);
    assert_int_equal(vm_tier_parse(NULL, &t), -EINVAL);
    assert_int_equal(t, VM_TIER_TCG);
    assert_string_equal(vm_tier_name((enum vm_tier)77), "?");
}

static void test_tiers_rise_with_isolation(void **state)
{
    (void)state;
    assert_true(VM_TIER_LOCAL < VM_TIER_TCG && VM_TIER_TCG < VM_TIER_KVM);
}

static void test_exit_reasons_have_distinct_names(void **state)
{
    (void)state;
    for (int i = VM_EXIT_RELEASED; i <= VM_EXIT_DEADLINE; i++)
        for (int k = VM_EXIT_RELEASED; k < i; k++)
            assert_string_not_equal(vm_exit_reason_name((enum vm_exit_reason)i),
                                    vm_exit_reason_name((enum vm_exit_reason)k));
    assert_string_equal(vm_exit_reason_name((enum vm_exit_reason)77), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_tier_is_parsed_from_its_own_name),
        cmocka_unit_test(test_unknown_tiers_are_refused),
        cmocka_unit_test(test_tiers_rise_with_isolation),
        cmocka_unit_test(test_exit_reasons_have_distinct_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
