/* Options of `serve` that depend on each other, and tokens: given, from a file, made at first
 * start. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/cli.h"
#include "cli/serve_config.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include <cmocka.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

static char dir[] = "/tmp/cv-serve-XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) == NULL;
}
static int teardown(void **state)
{
    (void)state;
    return fs_rm_rf(dir, NULL);
}

struct parsed {
    struct serve_opts o;
    struct opts opts;
    struct err e;
    char *copy[16];
};
static int parse(struct parsed *p, const char *const *args)
{
    memset(p, 0, sizeof(*p));
    int n = 0;
    p->copy[n++] = xstrdup("serve");
    for (; *args; args++)
        p->copy[n++] = xstrdup(*args);
    int r = opts_parse(&serve_command, n, p->copy, &p->o, &p->opts, &p->e);
    return r ? r : serve_opts_check(&p->o, &p->e);
}
#define PARSE(p, ...) parse(p, (const char *const[]) { __VA_ARGS__, NULL })
static void done(struct parsed *p)
{
    opts_free(&serve_command, &p->o, &p->opts);
    for (size_t i = 0; i < 16; i++)
        free(p->copy[i]);
}

static void options_that_contradict_each_other_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *args[6];
        const char *text;
    } cases[] = {
        { { "--no-auth", "--token", "x" }, "exclude each other" },
        { { "--no-auth", "--ip", "0.0.0.0" }, "only for loopback addresses" },
        { { "--tls-cert", "a" }, "--tls-key is missing" },
        { { "--tls-key", "a" }, "--tls-cert is missing" },
        { { "--local-only" }, "needs --insecure-local" },
        { { "--local-only", "--insecure-local", "--template-only", "x" }, "exclude each other" },
        { { "--ws-ping", "80" }, "must be longer than --ws-ping" },
        { { "--pool-parked", "9", "--pool-max", "8" }, "more than --pool-max" },
        { { "--max-body", "0" }, "at least 1" },
        { { "--log-memory", "0" }, "at least 1" },
        { { "--allow-credentials", "--allow-origin", "*" }, "exact origins" },
        { { "--ready-fd", "1" }, "not an open descriptor" },
        { { "--ready-fd", "999" }, "not an open descriptor" },
        { { "--accel", "xen" }, "not one of: auto, kvm, tcg" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct parsed p;
        assert_int_equal(parse(&p, cases[i].args), -EINVAL);
        if (!strstr(p.e.msg, cases[i].text))
            fail_msg("\"%s\" does not say \"%s\"", p.e.msg, cases[i].text);
        done(&p);
    }
    struct parsed p;
    assert_int_equal(PARSE(&p, "--no-auth", "--ip", "::1", "--ws-ping", "0"), 0);
    done(&p);
}

static void tokens_belong_to_principals(void **state)
{
    (void)state;
    struct parsed p;
    struct serve_tokens t;
    assert_int_equal(PARSE(&p, "--token", "alice:s1", "--token", "s2", "--token", "alice:s3"), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &t, &p.e), 0);
    assert_int_equal(t.n, 3);
    assert_false(t.generated);
    assert_string_equal(t.items[0].principal, "alice");
    assert_string_equal(t.items[0].token, "s1");
    assert_string_equal(t.items[1].principal, "default");
    assert_string_equal(t.items[1].token, "s2");
    assert_string_equal(t.items[2].principal, "alice");
    serve_tokens_free(&t);
    done(&p);
}

static void bad_tokens_are_refused_without_showing_them(void **state)
{
    (void)state;
    static const char *const bad[] = { ":hunter2",  "a b:hunter2",    "alice:",     "hunter2 x",
                                       "hunter2\n", "h\xc3\xbcnter2", "a/b:hunter2" };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct parsed p;
        struct serve_tokens t;
        assert_int_equal(PARSE(&p, "--token", "fine", "--token", bad[i]), 0);
        assert_int_equal(serve_tokens_load(&p.o, dir, &t, &p.e), -EINVAL);
        assert_non_null(strstr(p.e.msg, "token 2"));
        assert_null(strstr(p.e.msg, "hunter2"));
        assert_int_equal(t.n, 0);
        done(&p);
    }
    struct parsed p;
    struct serve_tokens t;
    assert_int_equal(PARSE(&p, "--token", "a:same", "--token", "b:same"), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &t, &p.e), -EINVAL);
    assert_non_null(strstr(p.e.msg, "given before (for \"a\")"));
    done(&p);
}

static void a_token_file_has_comments_and_names(void **state)
{
    (void)state;
    CLEANUP(freep) char *path = fs_join(dir, "tokens");
    assert_int_equal(
        fs_write_atomic(path, SLICE_LIT("# head\n\n  bob:t1  note\r\nt2\n"), 0600, NULL), 0);
    struct parsed p;
    struct serve_tokens t;
    assert_int_equal(PARSE(&p, "--token-file", path), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &t, &p.e), 0);
    assert_int_equal(t.n, 2);
    assert_string_equal(t.items[0].principal, "bob");
    assert_string_equal(t.items[0].token, "t1");
    assert_string_equal(t.items[1].token, "t2");
    serve_tokens_free(&t);
    assert_int_equal(fs_write_atomic(path, SLICE_LIT("# nothing\n"), 0600, NULL), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &t, &p.e), -EINVAL);
    assert_non_null(strstr(p.e.msg, "holds no token"));
    done(&p);
}

static void the_first_start_makes_a_private_token_and_keeps_it(void **state)
{
    (void)state;
    CLEANUP(freep) char *path = fs_join(dir, "token");
    struct parsed p;
    struct serve_tokens a, b;
    assert_int_equal(parse(&p, (const char *const[]) { NULL }), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &a, &p.e), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &b, &p.e), 0);
    assert_true(a.generated);
    assert_string_equal(a.path, path);
    assert_true(strlen(a.items[0].token) >= 32);
    assert_string_equal(a.items[0].token, b.items[0].token);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    serve_tokens_free(&a);
    serve_tokens_free(&b);
    assert_int_equal(chmod(path, 0644), 0);
    assert_int_equal(serve_tokens_load(&p.o, dir, &a, &p.e), -EPERM);
    assert_non_null(strstr(p.e.msg, "chmod 600"));
    done(&p);
}

static void no_auth_needs_no_token(void **state)
{
    (void)state;
    struct parsed p;
    struct serve_tokens t;
    assert_int_equal(PARSE(&p, "--no-auth"), 0);
    assert_int_equal(serve_tokens_load(&p.o, "/nonexistent", &t, &p.e), 0);
    assert_int_equal(t.n, 0);
    done(&p);
}

static void the_state_directory_is_made_private(void **state)
{
    (void)state;
    CLEANUP(freep) char *wanted = fs_join(dir, "a/b");
    struct err e = { 0 };
    CLEANUP(freep) char *got = cli_state_dir(wanted, &e);
    assert_string_equal(got, wanted);
    struct stat st;
    assert_int_equal(stat(got, &st), 0);
    assert_int_equal(st.st_mode & 077, 0);
    setenv("HOME", dir, 1);
    CLEANUP(freep) char *home = cli_state_dir("~/state", &e);
    CLEANUP(freep) char *expected = fs_join(dir, "state");
    assert_string_equal(home, expected);
    assert_null(cli_state_dir("/proc/nope", &e));
    assert_non_null(strstr(e.msg, "state directory"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_that_contradict_each_other_are_refused),
        cmocka_unit_test(tokens_belong_to_principals),
        cmocka_unit_test(bad_tokens_are_refused_without_showing_them),
        cmocka_unit_test(a_token_file_has_comments_and_names),
        cmocka_unit_test(the_first_start_makes_a_private_token_and_keeps_it),
        cmocka_unit_test(no_auth_needs_no_token),
        cmocka_unit_test(the_state_directory_is_made_private),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
