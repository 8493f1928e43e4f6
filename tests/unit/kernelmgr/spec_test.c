#include "tests/support/km_rig.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct rig r;

static int setup(void **state)
{
    (void)state;
    rig_init(&r);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    rig_fini(&r);
    return 0;
}

static const char *at(json_t *o, const char *a, const char *b, const char *c, const char *d)
{
    const char *keys[] = { a, b, c, d };
    for (size_t i = 0; i < 4 && keys[i]; i++)
        o = json_object_get(o, keys[i]);
    return json_string_value(o) ? json_string_value(o) : "";
}

static void specs_of_all_ready_templates_are_listed_under_unique_names(void **state)
{
    (void)state;
    rig_start_manager(&r);
    json_t *all = km_specs(r.m), *specs = json_object_get(all, "kernelspecs");
    assert_string_equal(at(all, "default", NULL, NULL, NULL), "python3");
    assert_int_equal(json_object_size(specs), 3);
    assert_string_equal(at(specs, "python3", "name", NULL, NULL), "python3");
    assert_non_null(json_object_get(specs, "bash"));
    assert_non_null(json_object_get(specs, "minimal.python3"));
    json_t *mine =
        json_object_get(json_object_get(json_object_get(specs, "python3"), "spec"), "metadata");
    assert_string_equal(at(mine, "cellvisor", "template", NULL, NULL), "python");
    assert_string_equal(at(mine, "cellvisor", "tier", NULL, NULL), "tcg");
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(mine, "cellvisor"), "memory_mb")), 512);
    json_decref(all);
}

static void the_template_keeps_its_own_metadata_untouched(void **state)
{
    (void)state;
    rig_start_manager(&r);
    json_decref(km_specs(r.m));
    json_t *entry = json_object_get(json_object_get(r.vms.specs[0], "kernelspecs"), "python3");
    assert_null(
        json_object_get(json_object_get(json_object_get(entry, "spec"), "metadata"), "cellvisor"));
}

static void the_configured_default_wins_when_it_exists(void **state)
{
    (void)state;
    r.cfg.default_spec = "bash";
    rig_start_manager(&r);
    json_t *all = km_specs(r.m);
    assert_string_equal(at(all, "default", NULL, NULL, NULL), "bash");
    json_decref(all);
}

static void the_default_template_gives_the_bare_names(void **state)
{
    (void)state;
    r.cfg.default_template = "minimal";
    rig_start_manager(&r);
    json_t *all = km_specs(r.m), *specs = json_object_get(all, "kernelspecs");
    json_t *meta =
        json_object_get(json_object_get(json_object_get(specs, "python3"), "spec"), "metadata");
    assert_string_equal(at(meta, "cellvisor", "template", NULL, NULL), "minimal");
    assert_non_null(json_object_get(specs, "python.python3"));
    assert_non_null(json_object_get(specs, "bash"));
    json_decref(all);
}

static void without_templates_there_are_no_specs_and_no_crash(void **state)
{
    (void)state;
    r.vms.n_templates = 0;
    rig_start_manager(&r);
    json_t *all = km_specs(r.m);
    assert_string_equal(at(all, "default", NULL, NULL, NULL), "");
    assert_int_equal(json_object_size(json_object_get(all, "kernelspecs")), 0);
    json_decref(all);
}

static void resources_are_listed_with_sizes_and_given_as_bytes(void **state)
{
    uint8_t *bytes = NULL;
    size_t n = 0;
    (void)state;
    rig_start_manager(&r);
    json_t *all = km_specs(r.m);
    json_t *res =
        json_object_get(json_object_get(json_object_get(all, "kernelspecs"), "bash"), "resources");
    assert_int_equal(json_integer_value(json_object_get(res, "logo-svg.svg")), 6);
    json_decref(all);
    assert_int_equal(km_spec_resource(r.m, "bash", "logo-svg.svg", &bytes, &n), 0);
    assert_int_equal(n, 6);
    assert_memory_equal(bytes, "<svg/>", 6);
    free(bytes);
    assert_int_equal(km_spec_resource(r.m, "bash", "../x", &bytes, &n), -ENOENT);
    assert_int_equal(km_spec_resource(r.m, "nope", "logo-svg.svg", &bytes, &n), -ENOENT);
    assert_int_equal(km_spec_resource(r.m, "", "logo-svg.svg", &bytes, &n), -ENOENT);
}

static void a_long_name_leads_to_its_template(void **state)
{
    struct km_start s = { .principal = "me", .spec = "minimal.python3" };
    (void)state;
    rig_start_manager(&r);
    assert_int_equal(km_kernel_start(r.m, &s, NULL, NULL, NULL, NULL), 0);
    assert_string_equal(fake_vm_last(&r.vms)->template_name, "minimal");
    assert_string_equal(fake_vm_last(&r.vms)->spec, "python3");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(specs_of_all_ready_templates_are_listed_under_unique_names),
        TEST(the_template_keeps_its_own_metadata_untouched),
        TEST(the_configured_default_wins_when_it_exists),
        TEST(the_default_template_gives_the_bare_names),
        TEST(without_templates_there_are_no_specs_and_no_crash),
        TEST(resources_are_listed_with_sizes_and_given_as_bytes),
        TEST(a_long_name_leads_to_its_template),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
