/* The verdict about the accelerator, with a file in place of /dev/kvm and a script in place of
 * QEMU: nothing here touches the real device. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "fake_program.h"
#include "vm/accel.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

static char dir[64];
static char *device;

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/cv-accel-XXXXXX");
    if (!mkdtemp(dir) || chmod(dir, 0755) < 0)
        return -1;
    device = fs_join(dir, "kvm");
    return fs_write_atomic(device, SLICE_LIT(""), 0600, NULL);
}

static int teardown(void **state)
{
    (void)state;
    free(device);
    return fs_rm_rf(dir, NULL);
}

static int resolve(const char *mode, enum vm_accel want, struct vm_accel_verdict *v, struct err *e)
{
    CLEANUP(freep) char *program = fake_program(dir, mode);

    return vm_accel_resolve_on(device, want, program, dir, v, e);
}

static void test_names_are_parsed(void **state)
{
    enum vm_accel a;
    (void)state;
    assert_int_equal(vm_accel_parse("auto", &a), 0);
    assert_int_equal(a, VM_ACCEL_AUTO);
    assert_int_equal(vm_accel_parse("kvm", &a), 0);
    assert_int_equal(a, VM_ACCEL_KVM);
    assert_int_equal(vm_accel_parse("tcg", &a), 0);
    assert_int_equal(a, VM_ACCEL_TCG);
    assert_int_equal(vm_accel_parse("hvf", &a), -EINVAL);
    assert_int_equal(vm_accel_parse(NULL, &a), -EINVAL);
    assert_string_equal(vm_accel_name(VM_ACCEL_TCG), "tcg");
}

static void test_tcg_asks_nobody(void **state)
{
    struct vm_accel_verdict v;
    (void)state;
    assert_int_equal(
        vm_accel_resolve_on("/nowhere", VM_ACCEL_TCG, "/nowhere/qemu", "/nowhere", &v, NULL), 0);
    assert_int_equal(v.accel, VM_ACCEL_TCG);
}

static void test_auto_without_the_device_is_tcg(void **state)
{
    CLEANUP(freep) char *program = fake_program(dir, "probe-ok");
    struct vm_accel_verdict v;
    (void)state;
    assert_int_equal(vm_accel_resolve_on("/nowhere/kvm", VM_ACCEL_AUTO, program, dir, &v, NULL), 0);
    assert_int_equal(v.accel, VM_ACCEL_TCG);
    assert_string_equal(v.reason, "no /nowhere/kvm");
}

static void test_a_guest_that_passes_means_kvm_and_is_remembered(void **state)
{
    struct vm_accel_verdict v;
    (void)state;
    assert_int_equal(resolve("probe-ok", VM_ACCEL_AUTO, &v, NULL), 0);
    assert_int_equal(v.accel, VM_ACCEL_KVM);
    assert_false(v.cached);
    assert_non_null(strstr(v.reason, "ran under kvm"));
    assert_int_equal(resolve("probe-ok", VM_ACCEL_KVM, &v, NULL), 0);
    assert_true(v.cached);
    assert_int_equal(v.accel, VM_ACCEL_KVM);
}

static void test_a_guest_that_fails_means_tcg_with_the_reason(void **state)
{
    struct vm_accel_verdict v;
    struct err e = { 0 };
    (void)state;
    assert_int_equal(resolve("probe-fail", VM_ACCEL_AUTO, &v, NULL), 0);
    assert_int_equal(v.accel, VM_ACCEL_TCG);
    assert_non_null(strstr(v.reason, "Permission denied"));
    assert_int_equal(resolve("probe-fail", VM_ACCEL_AUTO, &v, NULL), 0);
    assert_true(v.cached);
    assert_int_equal(resolve("probe-fail", VM_ACCEL_KVM, &v, &e), -ENOTSUP);
    assert_non_null(strstr(e.msg, "Permission denied"));
    assert_non_null(strstr(e.msg, "accel.json"));
}

static void test_a_guest_that_hangs_is_ended_at_the_deadline(void **state)
{
    CLEANUP(freep) char *program = fake_program(dir, "probe-hang");
    struct vm_accel_verdict v = { 0 };
    (void)state;
    assert_false(vm_accel_probe(VM_ACCEL_KVM, program, 200, &v));
    assert_non_null(strstr(v.reason, "did not finish within 200 ms"));
}

static void test_the_verdict_is_not_believed_when_the_device_has_changed(void **state)
{
    struct vm_accel_verdict v;
    (void)state;
    assert_int_equal(resolve("probe-fail", VM_ACCEL_AUTO, &v, NULL), 0);
    chmod(device, 0666);
    assert_int_equal(resolve("probe-fail", VM_ACCEL_AUTO, &v, NULL), 0);
    assert_false(v.cached);
}

static void test_a_broken_cache_only_costs_a_probe(void **state)
{
    CLEANUP(freep) char *cache = fs_join(dir, "accel.json");
    static const char *const bad[] = { "", "{", "[]", "{\"key\":3}",
                                       "{\"key\":\"x\",\"accel\":\"kvm\",\"reason\":\"\"}" };
    struct vm_accel_verdict v;
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        assert_int_equal(fs_write_atomic(cache, slice_str(bad[i]), 0600, NULL), 0);
        assert_int_equal(resolve("probe-fail", VM_ACCEL_AUTO, &v, NULL), 0);
        assert_false(v.cached);
        assert_int_equal(v.accel, VM_ACCEL_TCG);
    }
}

static void test_no_qemu_is_an_error_that_names_the_package(void **state)
{
    struct vm_accel_verdict v;
    struct err e = { 0 };
    (void)state;
    assert_int_equal(vm_accel_resolve_on(device, VM_ACCEL_AUTO, "/nowhere/qemu", dir, &v, &e),
                     -ENOENT);
    assert_non_null(strstr(e.msg, "qemu-system-x86"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_are_parsed),
        cmocka_unit_test_setup_teardown(test_tcg_asks_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(test_auto_without_the_device_is_tcg, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_guest_that_passes_means_kvm_and_is_remembered, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_guest_that_fails_means_tcg_with_the_reason, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_guest_that_hangs_is_ended_at_the_deadline, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_the_verdict_is_not_believed_when_the_device_has_changed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_broken_cache_only_costs_a_probe, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_qemu_is_an_error_that_names_the_package, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
