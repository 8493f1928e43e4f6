#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/recipe.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static char dir[] = "/tmp/cv-recipe-test-XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fs_rm_rf(dir, NULL);
}

static struct vm_recipe *parse_ok(const char *text)
{
    struct vm_recipe *r = NULL;
    struct err e = { 0 };
    int rc = vm_recipe_parse(slice_str(text), "demo", dir, &r, &e);
    if (rc < 0)
        fail_msg("%s", e.msg);
    return r;
}

static void test_an_empty_recipe_gets_sensible_defaults(void **state)
{
    (void)state;
    struct vm_recipe *r = parse_ok("{}");
    assert_string_equal(r->name, "demo");
    assert_string_equal(r->suite, "stable");
    assert_string_equal(r->default_kernel, "python3");
    assert_int_equal(r->memory_mb, 1024);
    assert_int_equal(r->disk_mb, 768);
    assert_int_equal(r->vcpus, 1);
    assert_null(r->apt[0]);
    assert_null(r->preload);
    vm_recipe_free(r);
}

static void test_every_key_is_read(void **state)
{
    (void)state;
    CLEANUP(freep) char *source = fs_join(dir, "setup.cfg");
    assert_int_equal(fs_write_atomic(source, SLICE_LIT("[x]\n"), 0644, NULL), 0);
    struct vm_recipe *r = parse_ok(
        "{\"name\":\"r-1\",\"description\":\"d\",\"suite\":\"trixie\",\"apt\":[\"python3-pip\","
        "\"npm\",\"libc6=2.41-12\"],\"pip\":[\"a>=1\"],\"npm\":[\"@x/y\"],\"files\":[{\"path\":"
        "\"/etc/a\",\"content\":\"hi\",\"mode\":\"0755\"},{\"path\":\"/etc/b\",\"source\":"
        "\"setup.cfg\"}],\"env\":{\"A_1\":\"v\"},\"kernelspecs\":{\"bash\":{\"argv\":[\"k\","
        "\"{connection_file}\"],\"display_name\":\"Bash\",\"language\":\"bash\"}},"
        "\"default_kernel\":\"bash\",\"preload\":[\"a = 1\",\"b = 2\"],\"warmup\":\"1\","
        "\"memory_mb\":512,\"disk_mb\":256,\"vcpus\":2}");
    assert_string_equal(r->name, "r-1");
    assert_string_equal(r->apt[2], "libc6=2.41-12");
    assert_null(r->apt[3]);
    assert_string_equal(r->pip[0], "a>=1");
    assert_string_equal(r->npm[0], "@x/y");
    assert_int_equal(r->n_files, 2);
    assert_int_equal(r->files[0].mode, 0755);
    assert_string_equal(r->files[0].content, "hi");
    assert_string_equal(r->files[1].source, source);
    assert_string_equal(r->preload, "a = 1\nb = 2\n");
    assert_string_equal(r->warmup, "1");
    assert_int_equal(r->disk_mb, 256);
    assert_int_equal(r->vcpus, 2);
    assert_string_equal(json_string_value(json_object_get(r->env, "A_1")), "v");
    vm_recipe_free(r);
}

/* Each wrong recipe, and what its error must say. */
static const struct {
    const char *text, *says;
} wrong[] = {
    { "", "line 1" },
    { "{\"apt\":[\"a\",]}", "line 1" },
    { "{\n\"apt\": [\n\"a\"\n\"b\"]}", "line 4" },
    { "[]", "not an object" },
    { "{\"atp\":[]}", "apt" },
    { "{\"name\":\"Über\"}", "name: " },
    { "{\"name\":\"../x\"}", "name: " },
    { "{\"suite\":\"-o\"}", "suite: " },
    { "{\"suite\":\"a b\"}", "suite: " },
    { "{\"apt\":\"python3\"}", "apt: " },
    { "{\"apt\":[1]}", "apt[0]: not a string" },
    { "{\"apt\":[\"python3\",\"Numpy\"]}", "apt[1]: \"Numpy\" is not a Debian package name" },
    { "{\"apt\":[\"--allow-unauthenticated\"]}", "apt[0]: " },
    { "{\"apt\":[\"a;b\"]}", "apt[0]: " },
    { "{\"apt\":[\"ab=$(id)\"]}", "apt[0]: " },
    { "{\"apt\":[\"ab='\"]}", "apt[0]: " },
    { "{\"apt\":[\"python3\",\"python3\"]}", "listed twice" },
    { "{\"pip\":[\"numpy\"]}", "pip: needs \"python3-pip\" in apt" },
    { "{\"apt\":[\"python3-pip\"],\"pip\":[\"--index-url=http://evil\"]}", "pip[0]: " },
    { "{\"apt\":[\"python3-pip\"],\"pip\":[\"a\\nb\"]}", "pip[0]: " },
    { "{\"npm\":[\"ijavascript\"]}", "npm: needs \"npm\" in apt" },
    { "{\"env\":[]}", "env: " },
    { "{\"env\":{\"1A\":\"x\"}}", "env: \"1A\"" },
    { "{\"env\":{\"A\":1}}", "env.A: not a string" },
    { "{\"env\":{\"A\":\"x\\ny\"}}", "env.A: has a line break" },
    { "{\"files\":[{\"path\":\"etc/x\",\"content\":\"\"}]}", "files[0].path: " },
    { "{\"files\":[{\"path\":\"/etc/../x\",\"content\":\"\"}]}", "files[0].path: " },
    { "{\"files\":[{\"path\":\"/etc/.\",\"content\":\"\"}]}", "files[0].path: " },
    { "{\"files\":[{\"path\":\"/proc/x\",\"content\":\"\"}]}", "/proc is mounted over" },
    { "{\"files\":[{\"path\":\"/a\"}]}", "either \"source\" or \"content\"" },
    { "{\"files\":[{\"path\":\"/a\",\"content\":\"\",\"source\":\"x\"}]}", "either" },
    { "{\"files\":[{\"path\":\"/a\",\"source\":\"../etc/passwd\"}]}", "files[0].source: " },
    { "{\"files\":[{\"path\":\"/a\",\"source\":\"/etc/passwd\"}]}", "files[0].source: " },
    { "{\"files\":[{\"path\":\"/a\",\"source\":\"missing\"}]}", "files[0].source: no file" },
    { "{\"files\":[{\"path\":\"/a\",\"content\":\"\",\"mode\":\"0999\"}]}", "files[0].mode: " },
    { "{\"files\":[{\"path\":\"/a\",\"content\":\"\",\"mode\":\"4755\"}]}", "files[0].mode: " },
    { "{\"files\":[{\"pathe\":\"/a\"}]}", "path" },
    { "{\"kernelspecs\":{\"B A\":{}}}", "not a kernel name" },
    { "{\"kernelspecs\":{\"b\":{\"argv\":[\"x\"],\"display_name\":\"B\",\"language\":\"b\"}}}",
      "{connection_file}" },
    { "{\"kernelspecs\":{\"b\":{\"argv\":[\"{connection_file}\"],\"language\":\"b\"}}}",
      "needs \"display_name\"" },
    { "{\"kernelspecs\":{\"b\":{\"argv\":[\"{connection_file}\"],\"language\":\"b\","
      "\"display_name\":\"B\",\"interrupt_mode\":\"x\"}}}",
      "interrupt_mode" },
    { "{\"preload\":5}", "preload: " },
    { "{\"preload\":[\"a\",5]}", "preload[1]: " },
    { "{\"memory_mb\":64}", "memory_mb: " },
    { "{\"memory_mb\":\"1G\"}", "memory_mb: " },
    { "{\"memory_mb\":512,\"disk_mb\":600}", "disk_mb: " },
    { "{\"vcpus\":0}", "vcpus: " },
};

static void test_wrong_recipes_are_refused_with_the_key_in_the_text(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        struct vm_recipe *r = NULL;
        struct err e = { 0 };
        int rc = vm_recipe_parse(slice_str(wrong[i].text), "demo", dir, &r, &e);
        if (rc == 0)
            fail_msg("accepted: %s", wrong[i].text);
        assert_int_equal(rc, -EINVAL);
        if (!strstr(e.msg, wrong[i].says))
            fail_msg("%s\n says: %s\n not: %s", wrong[i].text, e.msg, wrong[i].says);
    }
}

static void test_a_folder_or_its_file_can_be_loaded(void **state)
{
    (void)state;
    CLEANUP(freep) char *folder = fs_join(dir, "mine");
    CLEANUP(freep) char *file = fs_join(folder, "template.json");
    assert_int_equal(fs_mkdir_p(folder, 0755, NULL), 0);
    assert_int_equal(fs_write_atomic(file, SLICE_LIT("{\"memory_mb\":300}"), 0644, NULL), 0);
    const char *const paths[] = { folder, file };
    for (size_t i = 0; i < 2; i++) {
        struct vm_recipe *r = NULL;
        struct err e = { 0 };
        assert_int_equal(vm_recipe_load(paths[i], &r, &e), 0);
        assert_string_equal(r->name, "mine"); /* the folder's */
        assert_string_equal(r->folder, folder);
        vm_recipe_free(r);
    }
}

static void test_loading_errors_name_the_file(void **state)
{
    (void)state;
    struct vm_recipe *r = NULL;
    struct err e = { 0 };
    CLEANUP(freep) char *missing = fs_join(dir, "missing");
    assert_int_equal(vm_recipe_load(missing, &r, &e), -ENOENT);
    assert_non_null(strstr(e.msg, missing));
    CLEANUP(freep) char *folder = fs_join(dir, "wrong");
    CLEANUP(freep) char *file = fs_join(folder, "template.json");
    assert_int_equal(fs_mkdir_p(folder, 0755, NULL), 0);
    assert_int_equal(fs_write_atomic(file, SLICE_LIT("{\"vcpus\":\"x\"}"), 0644, NULL), 0);
    assert_int_equal(vm_recipe_load(folder, &r, &e), -EINVAL);
    assert_non_null(strstr(e.msg, "template.json: vcpus"));
}

static json_t *root_inputs(const char *text)
{
    struct vm_recipe *r = parse_ok(text);
    json_t *v = NULL;
    assert_int_equal(vm_recipe_root_inputs(r, &v, NULL), 0);
    vm_recipe_free(r);
    return v;
}

static void test_only_what_is_in_the_image_decides_the_image(void **state)
{
    (void)state;
    json_t *base = root_inputs("{\"apt\":[\"vim\"]}");
    json_t *preload = root_inputs("{\"apt\":[\"vim\"],\"preload\":\"1\",\"memory_mb\":2048}");
    json_t *apt = root_inputs("{\"apt\":[\"vim\",\"git\"]}");
    assert_true(json_equal(base, preload));
    assert_false(json_equal(base, apt));
    json_decref(base);
    json_decref(preload);
    json_decref(apt);
}

static void test_a_changed_source_file_changes_the_image(void **state)
{
    (void)state;
    static const char text[] = "{\"files\":[{\"path\":\"/a\",\"source\":\"s\"}]}";
    CLEANUP(freep) char *source = fs_join(dir, "s");
    assert_int_equal(fs_write_atomic(source, SLICE_LIT("1"), 0644, NULL), 0);
    json_t *before = root_inputs(text);
    assert_int_equal(fs_write_atomic(source, SLICE_LIT("2"), 0644, NULL), 0);
    json_t *after = root_inputs(text);
    assert_false(json_equal(before, after));
    json_decref(before);
    json_decref(after);
}

static void test_the_snapshot_depends_on_code_and_size(void **state)
{
    (void)state;
    struct vm_recipe *a = parse_ok("{}"), *b = parse_ok("{\"preload\":\"x\"}");
    json_t *va = vm_recipe_snapshot_inputs(a), *vb = vm_recipe_snapshot_inputs(b);
    assert_non_null(va);
    assert_false(json_equal(va, vb));
    json_decref(va);
    json_decref(vb);
    vm_recipe_free(a);
    vm_recipe_free(b);
}

static void test_the_shipped_recipes_are_right(void **state)
{
    (void)state;
    static const char *const names[] = { "python", "minimal" };
    for (size_t i = 0; i < 2; i++) {
        CLEANUP(freep) char *path = xasprintf("%s/../templates/%s", TEST_SOURCE_DIR, names[i]);
        struct vm_recipe *r = NULL;
        struct err e = { 0 };
        if (vm_recipe_load(path, &r, &e) < 0)
            fail_msg("%s", e.msg);
        assert_string_equal(r->name, names[i]);
        assert_string_equal(r->default_kernel, "python3");
        vm_recipe_free(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_empty_recipe_gets_sensible_defaults),
        cmocka_unit_test(test_every_key_is_read),
        cmocka_unit_test(test_wrong_recipes_are_refused_with_the_key_in_the_text),
        cmocka_unit_test(test_a_folder_or_its_file_can_be_loaded),
        cmocka_unit_test(test_loading_errors_name_the_file),
        cmocka_unit_test(test_only_what_is_in_the_image_decides_the_image),
        cmocka_unit_test(test_a_changed_source_file_changes_the_image),
        cmocka_unit_test(test_the_snapshot_depends_on_code_and_size),
        cmocka_unit_test(test_the_shipped_recipes_are_right),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
