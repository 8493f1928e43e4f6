/* Options: layers and their precedence, texts of mistakes, help generated from the table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/opts.h"
#include "common/cleanup.h"
#include "common/mem.h"
#include <cmocka.h>
#include <errno.h>
#include <string.h>

struct target {
    char *ip, *color;
    uint64_t port;
    bool fast;
    char **hosts;
    char *secret;
};
static const char *const colors[] = { "red", "blue", NULL };
#define AT(f) offsetof(struct target, f)
static const struct opt table[] = {
    { .help = "Group one" },
    { .flag = "ip", .offset = AT(ip), .arg = "A", .def = "127.0.0.1", .help = "address" },
    { .flag = "port",
      .letter = 'p',
      .type = OPT_UINT,
      .offset = AT(port),
      .arg = "N",
      .def = "8888",
      .max = 65535,
      .help = "port" },
    { .flag = "go-fast", .type = OPT_BOOL, .offset = AT(fast), .def = "false", .help = "speed" },
    { .flag = "allow-host",
      .type = OPT_LIST,
      .flags = OPT_MAP,
      .offset = AT(hosts),
      .arg = "H",
      .help = "hosts" },
    { .flag = "color", .offset = AT(color), .def = "red", .choices = colors, .help = "a color" },
    { .flag = "secret",
      .flags = OPT_SECRET | OPT_FLAG_ONLY,
      .offset = AT(secret),
      .arg = "S",
      .help = "a secret" },
};
static const struct opt_command command = {
    .name = "demo",
    .synopsis = "[OPTION ...]",
    .summary = "A command.",
    .opts = table,
    .n_opts = sizeof(table) / sizeof(table[0]),
    .max_args = 1,
    .has_config = true,
    .examples = "  cellvisor demo --port 1\n",
    .exits = "  0  fine\n",
};

struct parsed {
    struct target t;
    struct opts o;
    struct err e;
    int r;
    char *copy[12];
};

/* Parse a command line; arguments are copied, since secrets are blanked in place. */
static void parse(struct parsed *p, const char *const *args)
{
    memset(p, 0, sizeof(*p));
    int n = 0;
    p->copy[n++] = xstrdup("demo");
    for (; *args; args++)
        p->copy[n++] = xstrdup(*args);
    p->r = opts_parse(&command, n, p->copy, &p->t, &p->o, &p->e);
}
#define PARSE(p, ...) parse(p, (const char *const[]) { __VA_ARGS__, NULL })

static void done(struct parsed *p)
{
    opts_free(&command, &p->t, &p->o);
    for (size_t i = 0; i < 12; i++)
        free(p->copy[i]);
}

static char config_path[] = "/tmp/cv-opts-XXXXXX";
static void write_config(const char *text)
{
    CLEANUP(fclosep) FILE *f = fopen(config_path, "we");
    assert_non_null(f);
    fputs(text, f);
}

static int setup(void **state)
{
    (void)state;
    int fd = mkstemp(config_path);
    if (fd >= 0)
        close(fd);
    return fd < 0;
}
static int teardown(void **state)
{
    (void)state;
    return unlink(config_path);
}

static void defaults_come_from_the_table(void **state)
{
    (void)state;
    struct parsed p;
    parse(&p, (const char *const[]) { NULL });
    assert_int_equal(p.r, 0);
    assert_string_equal(p.t.ip, "127.0.0.1");
    assert_int_equal(p.t.port, 8888);
    assert_false(p.t.fast);
    assert_null(p.t.hosts);
    assert_null(p.t.secret);
    done(&p);
}

static void flags_are_taken_in_all_their_forms(void **state)
{
    (void)state;
    struct parsed p;
    PARSE(&p, "--ip=::1", "-p9", "--go-fast", "--allow-host", "a", "--allow-host=b", "file");
    assert_int_equal(p.r, 0);
    assert_string_equal(p.t.ip, "::1");
    assert_int_equal(p.t.port, 9);
    assert_true(p.t.fast);
    assert_string_equal(p.t.hosts[0], "a");
    assert_string_equal(p.t.hosts[1], "b");
    assert_null(p.t.hosts[2]);
    assert_int_equal(p.o.n_args, 1);
    assert_string_equal(p.o.args[0], "file");
    done(&p);
    PARSE(&p, "--go-fast", "--no-go-fast", "--", "--ip");
    assert_int_equal(p.r, 0);
    assert_false(p.t.fast);
    assert_string_equal(p.o.args[0], "--ip");
    done(&p);
}

static void flag_beats_environment_beats_file_beats_default(void **state)
{
    (void)state;
    struct parsed p;
    write_config("{\"ip\":\"1.1.1.1\",\"port\":1,\"color\":\"blue\",\"go_fast\":true,"
                 "\"allow_host\":[\"x\"]}");
    setenv("CELLVISOR_PORT", "2", 1);
    setenv("CELLVISOR_IP", "2.2.2.2", 1);
    setenv("CELLVISOR_ALLOW_HOST", "y,,z", 1);
    PARSE(&p, "--ip", "3.3.3.3", "--config", config_path);
    unsetenv("CELLVISOR_PORT");
    unsetenv("CELLVISOR_IP");
    unsetenv("CELLVISOR_ALLOW_HOST");
    assert_int_equal(p.r, 0);
    assert_string_equal(p.t.ip, "3.3.3.3");
    assert_int_equal(p.t.port, 2);
    assert_string_equal(p.t.color, "blue");
    assert_true(p.t.fast);
    assert_string_equal(p.t.hosts[0], "y");
    assert_string_equal(p.t.hosts[1], "z");
    assert_null(p.t.hosts[2]);
    done(&p);
}

static void a_map_in_the_file_becomes_pairs(void **state)
{
    (void)state;
    struct parsed p;
    write_config("{\"allow_host\":{\"alice\":\"one\",\"bob\":\"two\"}}");
    PARSE(&p, "--config", config_path);
    assert_int_equal(p.r, 0);
    assert_string_equal(p.t.hosts[0], "alice:one");
    assert_string_equal(p.t.hosts[1], "bob:two");
    done(&p);
}

static void mistakes_on_the_command_line_are_explained(void **state)
{
    (void)state;
    static const struct {
        const char *args[4];
        const char *text;
    } cases[] = {
        { { "--prot", "1" }, "unknown option --prot; did you mean --port?" },
        { { "--zzzzzzzz" }, "unknown option --zzzzzzzz; see `cellvisor demo --help`" },
        { { "-q" }, "unknown option -q" },
        { { "--port", "x" }, "--port: \"x\" is not a whole number from 0 to 65535" },
        { { "--port=65536" }, "--port: \"65536\" is not a whole number from 0 to 65535" },
        { { "--port=-1" }, "--port: \"-1\" is not a whole number" },
        { { "--port", "" }, "--port: \"\" is not a whole number" },
        { { "--port" }, "--port needs a value" },
        { { "--config" }, "--config needs a value" },
        { { "--go-fast=maybe" }, "--go-fast: \"maybe\" is neither true nor false" },
        { { "--color", "green" }, "--color: \"green\" is not one of: red, blue" },
        { { "a", "b" }, "unexpected argument \"b\"" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct parsed p;
        parse(&p, cases[i].args);
        assert_int_equal(p.r, -EINVAL);
        if (!strstr(p.e.msg, cases[i].text))
            fail_msg("\"%s\" does not say \"%s\"", p.e.msg, cases[i].text);
        done(&p);
    }
}

static void mistakes_in_the_file_are_explained(void **state)
{
    (void)state;
    static const struct {
        const char *file, *text;
    } cases[] = {
        { "{\"prot\":1}", "unknown key \"prot\"; did you mean \"port\"?" },
        { "{\"go-fast\":true}", "did you mean \"go_fast\"?" },
        { "{\"secret\":\"s\"}", "unknown key \"secret\"" },
        { "{\"port\":\"1\"}", "port: must be a whole number" },
        { "{\"port\":1.5}", "port: must be a whole number" },
        { "{\"port\":-1}", "is not a whole number from 0 to 65535" },
        { "{\"go_fast\":\"true\"}", "go_fast: must be true or false" },
        { "{\"ip\":5}", "ip: must be a string" },
        { "{\"ip\":{\"a\":\"b\"}}", "ip: must be a string" },
        { "{\"allow_host\":[\"a\",1]}", "allow_host[1]: not a string" },
        { "{\"allow_host\":{\"a\":1}}", "allow_host.a: not a string" },
        { "[]", "not a JSON object" },
        { "{\"port\":", config_path },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct parsed p;
        write_config(cases[i].file);
        PARSE(&p, "--config", config_path);
        assert_true(p.r < 0);
        if (!strstr(p.e.msg, cases[i].text))
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].file, p.e.msg, cases[i].text);
        done(&p);
    }
    struct parsed p;
    PARSE(&p, "--config", "/nonexistent/x.json");
    assert_true(p.r < 0);
    assert_non_null(strstr(p.e.msg, "/nonexistent/x.json"));
    done(&p);
}

static void a_wrong_environment_variable_is_named(void **state)
{
    (void)state;
    struct parsed p;
    setenv("CELLVISOR_PORT", "many", 1);
    parse(&p, (const char *const[]) { NULL });
    unsetenv("CELLVISOR_PORT");
    assert_int_equal(p.r, -EINVAL);
    assert_non_null(strstr(p.e.msg, "CELLVISOR_PORT: \"many\""));
    done(&p);
}

static unsigned n_unknown;
static char unknown_name[64], unknown_near[64];
static void on_unknown(const char *name, const char *nearest)
{
    n_unknown++;
    snprintf(unknown_name, sizeof(unknown_name), "%s", name);
    snprintf(unknown_near, sizeof(unknown_near), "%s", nearest ? nearest : "");
}

static void unknown_variables_are_reported_with_the_nearest(void **state)
{
    (void)state;
    setenv("CELLVISOR_PROT", "1", 1);
    setenv("CELLVISOR_IP", "1", 1);
    setenv("CELLVISOR_CACHE", "1", 1);
    opts_each_unknown_env(&command, on_unknown);
    unsetenv("CELLVISOR_PROT");
    unsetenv("CELLVISOR_IP");
    unsetenv("CELLVISOR_CACHE");
    assert_int_equal(n_unknown, 1);
    assert_string_equal(unknown_name, "CELLVISOR_PROT");
    assert_string_equal(unknown_near, "PORT");
}

static void secrets_are_blanked_in_argv(void **state)
{
    (void)state;
    struct parsed p;
    PARSE(&p, "--secret", "hunter2", "--secret=hunter3");
    assert_int_equal(p.r, 0);
    assert_string_equal(p.t.secret, "hunter3");
    assert_string_equal(p.copy[2], "xxxxxxx");
    assert_string_equal(p.copy[3], "--secret=xxxxxxx");
    done(&p);
}

static void help_wins_even_beside_mistakes_that_follow(void **state)
{
    (void)state;
    struct parsed p;
    PARSE(&p, "--help", "--nonsense");
    assert_int_equal(p.r, 0);
    assert_int_equal(p.o.outcome, OPTS_HELP);
    done(&p);
    PARSE(&p, "-h");
    assert_int_equal(p.o.outcome, OPTS_HELP);
    done(&p);
    PARSE(&p, "--help-markdown");
    assert_int_equal(p.o.outcome, OPTS_MARKDOWN);
    done(&p);
}

static void help_shows_every_option_with_its_default(void **state)
{
    (void)state;
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    opts_help(&command, f);
    opts_markdown(&command, f);
    fclose(f);
    static const char *const wanted[] = {
        "Usage: cellvisor demo [OPTION ...]",
        "Group one:",
        "-p, --port N",
        "[default: 8888]",
        "(red, blue)",
        "--config FILE",
        "Examples:\n  cellvisor demo --port 1",
        "Exit codes:\n  0  fine",
        "| `--allow-host H` | `allow_host` | `CELLVISOR_ALLOW_HOST` | - | hosts |",
        "| `--secret S` | - | - | - | a secret |",
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++)
        if (!strstr(text, wanted[i]))
            fail_msg("help does not show \"%s\":\n%s", wanted[i], text);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_come_from_the_table),
        cmocka_unit_test(flags_are_taken_in_all_their_forms),
        cmocka_unit_test(flag_beats_environment_beats_file_beats_default),
        cmocka_unit_test(a_map_in_the_file_becomes_pairs),
        cmocka_unit_test(mistakes_on_the_command_line_are_explained),
        cmocka_unit_test(mistakes_in_the_file_are_explained),
        cmocka_unit_test(a_wrong_environment_variable_is_named),
        cmocka_unit_test(unknown_variables_are_reported_with_the_nearest),
        cmocka_unit_test(secrets_are_blanked_in_argv),
        cmocka_unit_test(help_wins_even_beside_mistakes_that_follow),
        cmocka_unit_test(help_shows_every_option_with_its_default),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
