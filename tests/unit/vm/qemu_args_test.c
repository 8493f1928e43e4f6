/* The command line that a snapshot depends on. */
#include "vm/qemu_args.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct vm_qemu_spec clone_spec(void)
{
    return (struct vm_qemu_spec) {
        .accel = VM_ACCEL_TCG, .memory_mb = 512, .vcpus = 1, .mem_private = true
    };
}

static struct vm_qemu_spec boot_spec(void)
{
    return (struct vm_qemu_spec) { .accel = VM_ACCEL_TCG,
                                   .memory_mb = 512,
                                   .vcpus = 1,
                                   .kernel = "/k",
                                   .initrd = "/i",
                                   .cmdline = "console=ttyS0" };
}

static struct vm_qemu_args args;

static bool has(const char *option, const char *value)
{
    for (size_t i = 0; i < args.n; i++)
        if (strcmp(args.argv[i], option) == 0 &&
            (!value || (args.argv[i + 1] && !strcmp(args.argv[i + 1], value))))
            return true;
    return false;
}

static const char *value_of(const char *option)
{
    for (size_t i = 0; i + 1 < args.n; i++)
        if (strcmp(args.argv[i], option) == 0)
            return args.argv[i + 1];
    return "";
}

static unsigned tb_size(void)
{
    const char *at = strstr(value_of("-accel"), "tb-size=");

    return at ? (unsigned)strtoul(at + 8, NULL, 10) : 0;
}

/* All device-like words in order: they must be equal for a snapshot to load. */
static void devices(char *ret, size_t size)
{
    ret[0] = '\0';
    for (size_t i = 0; i + 1 < args.n; i++)
        if (!strcmp(args.argv[i], "-device") || !strcmp(args.argv[i], "-serial") ||
            !strcmp(args.argv[i], "-M") || !strcmp(args.argv[i], "-m") ||
            !strcmp(args.argv[i], "-smp") || !strcmp(args.argv[i], "-cpu"))
            snprintf(ret + strlen(ret), size - strlen(ret), "%s %s\n", args.argv[i],
                     args.argv[i + 1]);
}

static void test_clone_and_boot_have_the_same_devices_in_the_same_order(void **state)
{
    struct vm_qemu_spec c = clone_spec(), b = boot_spec();
    char clone[2048], boot[2048];
    (void)state;
    vm_qemu_args(&c, &args);
    devices(clone, sizeof(clone));
    vm_qemu_args(&b, &args);
    devices(boot, sizeof(boot));
    assert_string_equal(clone, boot);
    assert_non_null(strstr(clone, "virtserialport"));
    assert_non_null(strstr(clone, "org.cellvisor.link"));
}

static void test_a_clone_waits_for_its_state_and_carries_no_kernel(void **state)
{
    struct vm_qemu_spec c = clone_spec();
    (void)state;
    vm_qemu_args(&c, &args);
    assert_true(has("-incoming", "defer"));
    assert_false(has("-kernel", NULL));
    assert_false(has("-append", NULL));
    assert_non_null(strstr(value_of("-object"), "share=off"));
}

static void test_a_boot_shares_its_memory_and_boots_the_kernel(void **state)
{
    struct vm_qemu_spec b = boot_spec();
    (void)state;
    vm_qemu_args(&b, &args);
    assert_true(has("-append", "console=ttyS0"));
    assert_true(has("-kernel", "/proc/self/fd/8"));
    assert_true(has("-initrd", "/proc/self/fd/9"));
    assert_false(has("-incoming", NULL));
    assert_non_null(strstr(value_of("-object"), "share=on"));
}

static void test_there_is_no_network_card_and_everything_is_denied_in_the_sandbox(void **state)
{
    struct vm_qemu_spec c = clone_spec();
    (void)state;
    vm_qemu_args(&c, &args);
    assert_true(has("-nodefaults", NULL));
    assert_false(has("-netdev", NULL));
    assert_false(has("-nic", NULL));
    for (size_t i = 0; i < args.n; i++)
        assert_null(strstr(args.argv[i], "virtio-net"));
    assert_string_equal(value_of("-sandbox"),
                        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
}

static void test_clones_get_a_smaller_translation_cache_than_boots(void **state)
{
    struct vm_qemu_spec c = clone_spec(), b = boot_spec();
    unsigned clone_mb, boot_mb;
    (void)state;
    vm_qemu_args(&c, &args);
    clone_mb = tb_size();
    vm_qemu_args(&b, &args);
    boot_mb = tb_size();
    assert_in_range(clone_mb, 16, 64);
    assert_true(boot_mb > clone_mb);
    c.tb_mb = 48;
    vm_qemu_args(&c, &args);
    assert_non_null(strstr(value_of("-accel"), "tb-size=48"));
}

static void test_kvm_uses_the_host_cpu(void **state)
{
    struct vm_qemu_spec c = clone_spec();
    (void)state;
    c.accel = VM_ACCEL_KVM;
    vm_qemu_args(&c, &args);
    assert_string_equal(value_of("-accel"), "kvm");
    assert_memory_equal(value_of("-cpu"), "host", 4);
}

static void test_the_largest_numbers_fit(void **state)
{
    struct vm_qemu_spec b = boot_spec();
    (void)state;
    b.memory_mb = UINT64_MAX;
    b.vcpus = b.tb_mb = UINT32_MAX;
    vm_qemu_args(&b, &args);
    assert_string_equal(value_of("-m"), "18446744073709551615");
    assert_null(args.argv[args.n]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clone_and_boot_have_the_same_devices_in_the_same_order),
        cmocka_unit_test(test_a_clone_waits_for_its_state_and_carries_no_kernel),
        cmocka_unit_test(test_a_boot_shares_its_memory_and_boots_the_kernel),
        cmocka_unit_test(test_there_is_no_network_card_and_everything_is_denied_in_the_sandbox),
        cmocka_unit_test(test_clones_get_a_smaller_translation_cache_than_boots),
        cmocka_unit_test(test_kvm_uses_the_host_cpu),
        cmocka_unit_test(test_the_largest_numbers_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
