#pragma once
/* Declarative options: one table per subcommand gives the flags, the environment variables
 * (CELLVISOR_NAME), the keys of the configuration file (name with '_' for '-'), defaults, --help
 * and the reference in docs/OPERATIONS.md, so that none of them can drift from the others.
 *
 * Precedence: flag, then environment, then configuration file, then default. A list that is given
 * at one level replaces the list of the level below. Values are stored into the caller's struct at
 * `offset`; strings and lists there belong to the struct and are freed by opts_free. */
#include "common/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum opt_type {
    OPT_STR,  /* char *, NULL when unset */
    OPT_UINT, /* uint64_t */
    OPT_BOOL, /* bool; --name, --no-name, --name=true|false */
    OPT_LIST, /* char **, NULL-terminated, NULL when unset; flag repeats, environment: commas */
};
enum {
    OPT_SECRET = 1,    /* blanked in argv once read, so that `ps` does not show it for long */
    OPT_FLAG_ONLY = 2, /* neither environment nor configuration file */
    OPT_MAP = 4,       /* a list whose configuration form may be an object: "key:value" items */
};

struct opt {
    const char *flag; /* "pool-max"; an entry with help only (flag NULL) starts a group */
    char letter;      /* short form, 0 = none */
    enum opt_type type;
    unsigned flags;
    size_t offset;
    const char *arg;            /* what --help calls the value */
    const char *def;            /* text of the default, parsed like a flag; NULL = unset */
    uint64_t min, max;          /* OPT_UINT */
    const char *const *choices; /* OPT_STR: the only words allowed, NULL-terminated */
    const char *help;
};

struct opt_command {
    const char *name, *synopsis, *summary;
    const struct opt *opts;
    size_t n_opts;
    size_t max_args;      /* positional arguments */
    bool has_config;      /* takes --config FILE */
    const char *examples; /* shown in --help, each line indented already */
    const char *exits;    /* exit codes, same */
};

enum opts_outcome { OPTS_RUN, OPTS_HELP, OPTS_MARKDOWN }; /* what the command line asks for */
struct opts {
    enum opts_outcome outcome;
    char **args; /* positional arguments, pointing into argv */
    size_t n_args;
};

/* argv[0] is the subcommand. 0, or -EINVAL with a text that names the flag, key or variable, what
 * was wrong with it and the nearest known name; -ENOENT for a configuration file that is not there.
 */
int opts_parse(const struct opt_command *c, int argc, char **argv, void *target, struct opts *ret,
               struct err *e);
void opts_free(const struct opt_command *c, void *target, struct opts *o);

void opts_help(const struct opt_command *c, FILE *f);
void opts_markdown(const struct opt_command *c, FILE *f);
/* Variables CELLVISOR_* that nothing answers to: fn for each, with the nearest option's variable
 * without its prefix, or NULL. */
void opts_each_unknown_env(const struct opt_command *c,
                           void (*fn)(const char *name, const char *nearest));
