/* Kernelspecs: what is found, what is refused, what is reported. */
#include "guest-kernel-shim/spec.h"
#include "shim_test.h"
#include <sys/stat.h>

#define GOOD "{\"argv\":[\"k\",\"{connection_file}\"],\"display_name\":\"K\",\"language\":\"l\"}"

static unsigned lines;
static char last_line[1024];

static void sink(void *ctx, enum log_level level, const char *line)
{
    (void)ctx;
    (void)level;
    lines++;
    snprintf(last_line, sizeof(last_line), "%s", line);
}

static void load(struct shim_catalog *c, const char *a, const char *b)
{
    const char *dirs[] = { a, b, NULL };

    lines = 0;
    last_line[0] = '\0';
    log_set_sink(sink, NULL);
    shim_catalog_load(c, dirs, NULL);
    log_set_sink(NULL, NULL);
}

static void test_names_with_spaces_brackets_and_unicode_are_kept(void **state)
{
    struct shim_catalog c;

    put_file(*state, "Python 3 [conda]/kernel.json", GOOD);
    put_file(*state, "k\xc3\xa4rnel/kernel.json", GOOD);
    load(&c, *state, NULL);
    assert_non_null(shim_catalog_find(&c, "Python 3 [conda]"));
    assert_non_null(shim_catalog_find(&c, "k\xc3\xa4rnel"));
    assert_null(shim_catalog_find(&c, "python 3 [conda]"));
    assert_int_equal(lines, 0);
    shim_catalog_fini(&c);
}

static void test_broken_specs_are_skipped_with_one_line_each(void **state)
{
    static const char *const broken[] = {
        "",
        "{",
        "[]",
        "{}",
        "{\"argv\":[]}",
        "{\"argv\":\"k\"}",
        "{\"argv\":[1]}",
        "{\"argv\":[\"k\"],\"env\":[]}",
        "{\"argv\":[\"k\"],\"env\":{\"A\":1}}",
        "{\"argv\":[\"k\"],\"language\":5}",
        "{\"argv\":[\"k\"],\"interrupt_mode\":true}",
    };
    struct shim_catalog c;
    char name[32];

    put_file(*state, "good/kernel.json", GOOD);
    for (size_t i = 0; i < sizeof(broken) / sizeof(*broken); i++) {
        snprintf(name, sizeof(name), "b%zu/kernel.json", i);
        put_file(*state, name, broken[i]);
    }
    load(&c, *state, NULL);
    assert_int_equal(c.n, 1);
    assert_int_equal(lines, sizeof(broken) / sizeof(*broken));
    assert_non_null(strstr(last_line, "skipped"));
    shim_catalog_fini(&c);
}

static void test_a_name_that_is_no_utf8_is_skipped(void **state)
{
    struct shim_catalog c;

    put_file(*state, "bad\xff/kernel.json", GOOD);
    load(&c, *state, NULL);
    assert_int_equal(c.n, 0);
    assert_int_equal(lines, 1);
    shim_catalog_fini(&c);
}

static void test_the_first_folder_wins(void **state)
{
    CLEANUP(freep) char *a = fs_join(*state, "a"), *b = fs_join(*state, "b");
    struct shim_catalog c;

    put_file(a, "k/kernel.json", "{\"argv\":[\"first\"]}");
    put_file(b, "k/kernel.json", "{\"argv\":[\"second\"]}");
    load(&c, a, b);
    assert_int_equal(c.n, 1);
    assert_string_equal(
        json_string_value(json_array_get(json_object_get(c.specs[0]->json, "argv"), 0)), "first");
    assert_string_equal(c.specs[0]->display_name, "k");
    shim_catalog_fini(&c);
}

static void test_resources_are_read_as_base64_and_other_files_are_not(void **state)
{
    CLEANUP(freep) char *text = NULL;
    struct shim_catalog c;
    json_t *v, *r;

    put_file(*state, "k/kernel.json", GOOD);
    put_file(*state, "k/logo-64x64.png", "\x89PNG");
    put_file(*state, "k/logo-svg.svg", "<svg/>");
    put_file(*state, "k/kernel.js", "x");
    put_file(*state, "k/secret.txt", "no");
    put_file(*state, "k/logo-64x64.exe", "no");
    load(&c, *state, NULL);
    text = shim_catalog_json(&c);
    v = json_loads(text, 0, NULL);
    r = json_object_get(json_object_get(json_object_get(v, "kernelspecs"), "k"), "resources");
    assert_int_equal(json_object_size(r), 3);
    assert_string_equal(json_string_value(json_object_get(r, "logo-64x64.png")), "iVBORw==");
    assert_string_equal(json_string_value(json_object_get(v, "default")), "k");
    json_decref(v);
    shim_catalog_fini(&c);
}

static void test_a_resource_over_the_cap_is_left_out_and_the_spec_stays(void **state)
{
    CLEANUP(freep) char *big = xcalloc(1, SHIM_RESOURCE_MAX + 2);
    struct shim_catalog c;

    memset(big, 'a', SHIM_RESOURCE_MAX + 1);
    put_file(*state, "k/kernel.json", GOOD);
    put_file(*state, "k/logo-svg.svg", big);
    load(&c, *state, NULL);
    assert_int_equal(c.n, 1);
    assert_int_equal(json_object_size(c.specs[0]->resources), 0);
    assert_int_equal(lines, 1);
    shim_catalog_fini(&c);
}

static void test_all_resources_together_have_a_cap(void **state)
{
    CLEANUP(freep) char *big = xcalloc(1, SHIM_RESOURCE_MAX + 1);
    struct shim_catalog c;
    char name[32];

    memset(big, 'a', SHIM_RESOURCE_MAX);
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof(name), "k%d/kernel.json", i);
        put_file(*state, name, GOOD);
        snprintf(name, sizeof(name), "k%d/logo-svg.svg", i);
        put_file(*state, name, big);
    }
    load(&c, *state, NULL);
    assert_int_equal(c.n, 5);
    assert_int_equal(c.resource_bytes, SHIM_RESOURCES_MAX);
    assert_int_equal(lines, 1);
    shim_catalog_fini(&c);
}

static void test_more_specs_than_the_cap_are_left_out(void **state)
{
    struct shim_catalog c;
    char name[32];

    for (unsigned i = 0; i < SHIM_SPECS_MAX + 2; i++) {
        snprintf(name, sizeof(name), "k%02u/kernel.json", i);
        put_file(*state, name, GOOD);
    }
    load(&c, *state, NULL);
    assert_int_equal(c.n, SHIM_SPECS_MAX);
    assert_int_equal(lines, 2);
    shim_catalog_fini(&c);
}

static void test_python3_is_the_default_then_any_python_then_the_first(void **state)
{
    CLEANUP(freep) char *a = fs_join(*state, "a"), *b = fs_join(*state, "b");
    struct shim_catalog c;

    put_file(a, "bash/kernel.json", "{\"argv\":[\"b\"],\"language\":\"bash\"}");
    load(&c, a, NULL);
    assert_string_equal(shim_catalog_default(&c), "bash");
    shim_catalog_fini(&c);
    put_file(a, "xp/kernel.json", "{\"argv\":[\"b\"],\"language\":\"python\"}");
    load(&c, a, NULL);
    assert_string_equal(shim_catalog_default(&c), "xp");
    shim_catalog_fini(&c);
    put_file(b, "python3/kernel.json", "{\"argv\":[\"b\"]}");
    load(&c, a, b);
    assert_string_equal(shim_catalog_default(&c), "python3");
    shim_catalog_fini(&c);
    load(&c, "/nonexistent", NULL);
    assert_null(shim_catalog_default(&c));
    shim_catalog_fini(&c);
}

static void test_interrupt_mode_and_prefix_come_from_file_and_place(void **state)
{
    CLEANUP(freep) char *dir = xasprintf("%s/venv/share/jupyter/kernels", (char *)*state);
    CLEANUP(freep) char *venv = fs_join(*state, "venv");
    struct shim_catalog c;

    put_file(dir, "m/kernel.json", "{\"argv\":[\"k\"],\"interrupt_mode\":\"message\"}");
    put_file(dir, "s/kernel.json", "{\"argv\":[\"k\"],\"interrupt_mode\":\"signal\"}");
    load(&c, dir, NULL);
    assert_true(shim_catalog_find(&c, "m")->interrupt_by_message);
    assert_false(shim_catalog_find(&c, "s")->interrupt_by_message);
    assert_string_equal(shim_catalog_find(&c, "m")->prefix, venv);
    shim_catalog_fini(&c);
}

static void test_the_search_path_follows_the_environment(void **state)
{
    CLEANUP(freep) char *bin = xasprintf("%s/py/bin", (char *)*state);
    CLEANUP(freep) char *python = xasprintf("%s/python3", bin);
    CLEANUP(freep) char *expect = xasprintf("%s/py/share/jupyter/kernels", (char *)*state);
    char **d;

    put_file(bin, "python3", "#!/bin/sh\n");
    assert_int_equal(chmod(python, 0755), 0);
    setenv("JUPYTER_PATH", "/one:/two", 1);
    setenv("HOME", "/h", 1);
    setenv("PATH", bin, 1);
    unsetenv("VIRTUAL_ENV");
    d = shim_spec_dirs();
    assert_string_equal(d[0], "/one/kernels");
    assert_string_equal(d[1], "/two/kernels");
    assert_string_equal(d[2], "/h/.local/share/jupyter/kernels");
    assert_string_equal(d[3], expect);
    assert_string_equal(d[4], "/usr/local/share/jupyter/kernels");
    assert_string_equal(d[5], "/usr/share/jupyter/kernels");
    assert_null(d[6]);
    shim_dirs_free(d);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, make_tmp, remove_tmp)
    const struct CMUnitTest tests[] = {
        T(test_names_with_spaces_brackets_and_unicode_are_kept),
        T(test_broken_specs_are_skipped_with_one_line_each),
        T(test_a_name_that_is_no_utf8_is_skipped),
        T(test_the_first_folder_wins),
        T(test_resources_are_read_as_base64_and_other_files_are_not),
        T(test_a_resource_over_the_cap_is_left_out_and_the_spec_stays),
        T(test_all_resources_together_have_a_cap),
        T(test_more_specs_than_the_cap_are_left_out),
        T(test_python3_is_the_default_then_any_python_then_the_first),
        T(test_interrupt_mode_and_prefix_come_from_file_and_place),
        T(test_the_search_path_follows_the_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
