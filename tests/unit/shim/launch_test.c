/* argv, environment, connection file, and the fork. */
#include "guest-kernel-shim/launch.h"
#include "shim_test.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_known_braces_are_substituted_and_others_stay(void **state)
{
    static const struct shim_subst s[] = { { "connection_file", "/c" }, { "prefix", "/p" } };
    static const char *const rows[][2] = {
        { "{connection_file}", "/c" },
        { "-f={connection_file}!", "-f=/c!" },
        { "{prefix}/{prefix}", "/p//p" },
        { "{unknown}", "{unknown}" },
        { "IRkernel::main() { x }", "IRkernel::main() { x }" },
        { "{", "{" },
        { "{prefix", "{prefix" },
        { "{{prefix}}", "{/p}" },
        { "", "" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        CLEANUP(freep) char *got = shim_substitute(rows[i][0], s, 2);
        assert_string_equal(got, rows[i][1]);
    }
}

static void test_variables_expand_as_in_jupyter_client(void **state)
{
    static const char *const rows[][2] = {
        { "${A}", "one" }, { "$A", "one" },  { "$A/${A}b", "one/oneb" },
        { "$AB", "$AB" },  { "$$A", "$A" },  { "${NONE}", "${NONE}" },
        { "$", "$" },      { "${A", "${A" }, { "100%", "100%" },
        { "$1", "$1" },    { "", "" },
    };
    struct shim_environ v;

    (void)state;
    shim_environ_init(&v);
    shim_environ_set(&v, "A", "one");
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        CLEANUP(freep) char *got = shim_environ_expand(&v, rows[i][0]);
        assert_string_equal(got, rows[i][1]);
    }
    shim_environ_fini(&v);
}

static void test_setting_a_variable_replaces_it(void **state)
{
    struct shim_environ v;

    (void)state;
    shim_environ_init(&v);
    shim_environ_set(&v, "A", "1");
    shim_environ_set(&v, "AB", "2");
    shim_environ_set(&v, "A", "3");
    assert_int_equal(v.n, 2);
    assert_string_equal(shim_environ_get(&v, "A"), "3");
    shim_environ_unset(&v, "A");
    shim_environ_unset(&v, "A");
    assert_null(shim_environ_get(&v, "A"));
    assert_string_equal(shim_environ_get(&v, "AB"), "2");
    assert_null(v.vars[1]);
    shim_environ_fini(&v);
}

static void test_secrets_of_the_gateway_are_not_inherited(void **state)
{
    struct shim_environ v;

    (void)state;
    setenv("CELLVISOR_TOKEN", "secret", 1);
    setenv("OTHER", "x=y", 1);
    shim_environ_init(&v);
    shim_environ_inherit(&v);
    assert_null(shim_environ_get(&v, "CELLVISOR_TOKEN"));
    assert_string_equal(shim_environ_get(&v, "OTHER"), "x=y");
    shim_environ_fini(&v);
}

static void test_an_environment_file_is_read_line_by_line(void **state)
{
    CLEANUP(freep) char *path = fs_join(*state, "environment");
    struct shim_environ v;

    put_file(*state, "environment",
             "# c\nA=1\n  export B=\"two words\" \nC='x'\nbad name=1\n=2\nD=\nE=a=b\nno line end=");
    shim_environ_init(&v);
    shim_environ_read_file(&v, path);
    assert_string_equal(shim_environ_get(&v, "A"), "1");
    assert_string_equal(shim_environ_get(&v, "B"), "two words");
    assert_string_equal(shim_environ_get(&v, "C"), "x");
    assert_string_equal(shim_environ_get(&v, "D"), "");
    assert_string_equal(shim_environ_get(&v, "E"), "a=b");
    assert_int_equal(v.n, 5);
    shim_environ_read_file(&v, "/nonexistent");
    assert_int_equal(v.n, 5);
    shim_environ_fini(&v);
}

static void test_a_user_is_found_in_a_passwd_file(void **state)
{
    CLEANUP(freep) char *path = fs_join(*state, "passwd");
    struct shim_user u = { 0 };

    put_file(*state, "passwd",
             "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1001:U,,:/home/user:/bin/sh\n");
    assert_int_equal(shim_user_find(path, "user", &u), 0);
    assert_int_equal(u.uid, 1000);
    assert_int_equal(u.gid, 1001);
    assert_string_equal(u.home, "/home/user");
    assert_string_equal(u.shell, "/bin/sh");
    assert_int_equal(shim_user_find(path, "use", &u), -ENOENT);
    assert_int_equal(shim_user_find("/nonexistent", "user", &u), -ENOENT);
}

static void test_the_connection_file_says_ipc_and_holds_the_key(void **state)
{
    CLEANUP(freep) char *text = shim_connection_json("/run/k/s", "abc", "py \xc3\xa4");
    json_t *v = json_loads(text, 0, NULL);

    (void)state;
    assert_string_equal(json_string_value(json_object_get(v, "transport")), "ipc");
    assert_string_equal(json_string_value(json_object_get(v, "ip")), "/run/k/s");
    assert_string_equal(json_string_value(json_object_get(v, "key")), "abc");
    assert_string_equal(json_string_value(json_object_get(v, "signature_scheme")), "hmac-sha256");
    assert_int_equal(json_integer_value(json_object_get(v, "shell_port")), 1);
    assert_int_equal(json_integer_value(json_object_get(v, "hb_port")), 5);
    json_decref(v);
}

static void test_programs_are_found_along_the_path(void **state)
{
    CLEANUP(freep) char *bin = fs_join(*state, "bin"), *file = fs_join(bin, "prog");
    CLEANUP(freep) char *path = xasprintf("/nonexistent::%s", bin);
    char got[256];

    put_file(bin, "prog", "#!/bin/sh\n");
    assert_int_equal(shim_find_program("prog", path, got, sizeof(got)), -ENOENT);
    assert_int_equal(chmod(file, 0755), 0);
    assert_int_equal(shim_find_program("prog", path, got, sizeof(got)), 0);
    assert_string_equal(got, file);
    assert_int_equal(shim_find_program("bin", *state, got, sizeof(got)), -ENOENT); /* a folder */
    assert_int_equal(shim_find_program(file, NULL, got, sizeof(got)), 0);
    assert_int_equal(shim_find_program("/nonexistent/x", path, got, sizeof(got)), -ENOENT);
    assert_int_equal(shim_find_program("prog", NULL, got, sizeof(got)), -ENOENT);
}

static void test_only_ipykernel_gets_the_hook(void **state)
{
    char *a[] = { (char[]) { "python3" }, (char[]) { "-m" }, (char[]) { "ipykernel_launcher" },
                  NULL };
    char *b[] = { (char[]) { "xpython" }, (char[]) { "-f" }, NULL };

    (void)state;
    assert_true(shim_argv_is_ipykernel(a));
    assert_false(shim_argv_is_ipykernel(b));
}

/* ---- spawn ---- */

static int run(struct shim_child *c, struct err *e)
{
    pid_t pid;
    int status = -1, r = shim_spawn(c, &pid, e);

    if (r < 0)
        return r;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* execve takes writable strings that it does not write. */
#define ARGV(...)                                                                                  \
    (char *const *)(uintptr_t)(const char *const[])                                                \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }

static void test_a_program_that_cannot_run_is_named(void **state)
{
    struct shim_child c = { .argv = ARGV("/nonexistent/kernel"), .env = ARGV("A=1") };
    struct err e = { 0 };

    (void)state;
    assert_int_equal(run(&c, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "/nonexistent/kernel"));
}

static void test_a_missing_working_directory_is_named(void **state)
{
    struct shim_child c = { .argv = ARGV("/bin/true"), .env = ARGV("A=1"), .cwd = "/nonexistent" };
    struct err e = { 0 };

    (void)state;
    assert_int_equal(run(&c, &e), -ENOENT);
    assert_non_null(strstr(e.msg, "/nonexistent"));
}

static void test_the_child_has_its_descriptors_and_no_others(void **state)
{
    CLEANUP(freep) char *out = fs_join(*state, "out");
    int fd = open(out, O_RDWR | O_CREAT, 0600), extra = dup(fd); /* both without O_CLOEXEC */
    struct shim_child c = {
        .env = ARGV("PATH=/bin:/usr/bin"), .fds = { -1, fd, fd, fd }, .n_fds = 4, .cwd = "/"
    };
    struct buf text;

    c.argv = ARGV("/bin/sh", "-c",
                  "echo out; echo err >&2; echo three >&3; pwd; "
                  "for f in 4 5 6 7 8 9; do [ -e /proc/self/fd/$f ] && echo leak $f; done; "
                  "[ $(ps -o pgid= -p $$) = $$ ] || echo group; exit 3");
    assert_int_equal(run(&c, NULL), 3);
    assert_int_equal(fs_read_file(out, 4096, &text, NULL), 0);
    assert_string_equal(buf_cstr(&text), "out\nerr\nthree\n/\n");
    buf_fini(&text);
    close(extra);
    close(fd);
}

static void test_limits_and_signals_are_set_for_the_child(void **state)
{
    static const struct shim_limit limits[] = { { RLIMIT_NOFILE, 77 }, { RLIMIT_CORE, 0 } };
    struct shim_child c = { .env = ARGV("PATH=/bin:/usr/bin"), .limits = limits, .n_limits = 2 };
    sigset_t set, old;

    (void)state;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, &old);
    signal(SIGTERM, SIG_IGN);
    c.argv =
        ARGV("/bin/sh", "-c", "[ $(ulimit -n) = 77 ] && [ $(ulimit -c) = 0 ] && kill -TERM $$");
    assert_int_equal(run(&c, NULL), -SIGTERM);
    signal(SIGTERM, SIG_DFL);
    sigprocmask(SIG_SETMASK, &old, NULL);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, make_tmp, remove_tmp)
    const struct CMUnitTest tests[] = {
        T(test_known_braces_are_substituted_and_others_stay),
        T(test_variables_expand_as_in_jupyter_client),
        T(test_setting_a_variable_replaces_it),
        T(test_secrets_of_the_gateway_are_not_inherited),
        T(test_an_environment_file_is_read_line_by_line),
        T(test_a_user_is_found_in_a_passwd_file),
        T(test_the_connection_file_says_ipc_and_holds_the_key),
        T(test_programs_are_found_along_the_path),
        T(test_only_ipykernel_gets_the_hook),
        T(test_a_program_that_cannot_run_is_named),
        T(test_a_missing_working_directory_is_named),
        T(test_the_child_has_its_descriptors_and_no_others),
        T(test_limits_and_signals_are_set_for_the_child),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
