/* Parsing of options in four layers: defaults, configuration file, environment, command line. Each
 * layer goes through opt_store(), so that every text is checked by the same rules. */
#include "cli/opts.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/json.h"
#include "common/mem.h"
#include <ctype.h>
#include <errno.h>
#include <string.h>

#define CONFIG_MAX (1u << 20)
#define NAME_MAX_LEN 64
extern char **environ;

/* Where a value comes from, for error texts. */
struct origin {
    char text[NAME_MAX_LEN + 32]; /* "--port", "CELLVISOR_PORT", "gw.json: port" */
};

static void *field(void *target, const struct opt *o)
{
    return (char *)target + o->offset;
}

static void option_key(const struct opt *o, char ret[NAME_MAX_LEN])
{
    snprintf(ret, NAME_MAX_LEN, "%s", o->flag);
    for (char *p = ret; *p; p++)
        if (*p == '-')
            *p = '_';
}

#define ENV_PREFIX "CELLVISOR_"
#define ENV_PREFIX_LEN (sizeof(ENV_PREFIX) - 1)

static void env_suffix(const struct opt *o, char ret[NAME_MAX_LEN])
{
    snprintf(ret, NAME_MAX_LEN, "%s", o->flag);
    for (char *p = ret; *p; p++)
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
}

static void option_env(const struct opt *o, char ret[NAME_MAX_LEN])
{
    char suffix[NAME_MAX_LEN];
    env_suffix(o, suffix);
    snprintf(ret, NAME_MAX_LEN, ENV_PREFIX "%.*s", (int)(NAME_MAX_LEN - sizeof(ENV_PREFIX)),
             suffix);
}

static void list_clear(char ***list)
{
    for (char **p = *list; p && *p; p++)
        free(*p);
    free(*list);
    *list = NULL;
}

static void list_add(char ***list, const char *item, size_t len)
{
    size_t n = 0;
    while (*list && (*list)[n])
        n++;
    *list = xrealloc(*list, (n + 2) * sizeof(char *));
    (*list)[n] = xstrndup(item, len);
    (*list)[n + 1] = NULL;
}

/* So that nobody takes seconds for milliseconds. */
static const char *unit_text(const struct opt *o)
{
    if (o->arg && strcmp(o->arg, "SECONDS") == 0)
        return " of seconds";
    return o->arg && strcmp(o->arg, "MIB") == 0 ? " of MiB" : "";
}

static int store_uint(const struct opt *o, uint64_t *ret, const char *text,
                      const struct origin *from, struct err *e)
{
    char *end = NULL;
    errno = 0;
    unsigned long long v = isdigit((unsigned char)text[0]) ? strtoull(text, &end, 10) : 0;
    if (!end || *end || errno || v < o->min || v > o->max)
        return err_set(e, -EINVAL, "%s: \"%.40s\" is not a whole number%s from %llu to %llu",
                       from->text, text, unit_text(o), (unsigned long long)o->min,
                       (unsigned long long)o->max);
    *ret = v;
    return 0;
}

static int store_bool(bool *ret, const char *text, const struct origin *from, struct err *e)
{
    static const char *const yes[] = { "true", "1", "yes", "on", NULL };
    static const char *const no[] = { "false", "0", "no", "off", NULL };
    for (size_t i = 0; yes[i]; i++) {
        if (strcmp(text, yes[i]) == 0 || strcmp(text, no[i]) == 0) {
            *ret = strcmp(text, yes[i]) == 0;
            return 0;
        }
    }
    return err_set(e, -EINVAL, "%s: \"%.40s\" is neither true nor false", from->text, text);
}

static int store_str(const struct opt *o, char **ret, const char *text, const struct origin *from,
                     struct err *e)
{
    if (o->choices) {
        char all[160] = "";
        bool found = false;
        for (size_t i = 0; o->choices[i]; i++) {
            size_t n = strlen(all);
            snprintf(all + n, sizeof(all) - n, "%s%s", i ? ", " : "", o->choices[i]);
            found = found || strcmp(o->choices[i], text) == 0;
        }
        if (!found)
            return err_set(e, -EINVAL, "%s: \"%.40s\" is not one of: %s", from->text, text, all);
    }
    free(*ret);
    *ret = xstrdup(text);
    return 0;
}

static int opt_store(const struct opt *o, void *target, const char *text, const struct origin *from,
                     struct err *e)
{
    void *f = field(target, o);
    switch (o->type) {
    case OPT_UINT:
        return store_uint(o, f, text, from, e);
    case OPT_BOOL:
        return store_bool(f, text, from, e);
    case OPT_STR:
        return store_str(o, f, text, from, e);
    case OPT_LIST:
        list_add(f, text, strlen(text));
        return 0;
    }
    return 0;
}

static void store_commas(const struct opt *o, void *target, const char *text)
{
    list_clear(field(target, o));
    while (*text) {
        size_t n = strcspn(text, ",");
        if (n)
            list_add(field(target, o), text, n);
        text += n + (text[n] == ',');
    }
}

/* All names of one kind (flags, keys or variables) as json_nearest wants them. */
enum name_kind { NAME_FLAG, NAME_KEY, NAME_ENV };
static const char *nearest(const struct opt_command *c, enum name_kind kind, const char *word,
                           char ret[NAME_MAX_LEN])
{
    const char **known = xcalloc(c->n_opts + 3, sizeof(char *));
    char(*text)[NAME_MAX_LEN] = xcalloc(c->n_opts + 2, NAME_MAX_LEN);
    size_t n = 0;
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (!o->flag || (kind != NAME_FLAG && (o->flags & OPT_FLAG_ONLY)))
            continue;
        if (kind == NAME_FLAG)
            snprintf(text[n], NAME_MAX_LEN, "%s", o->flag);
        else if (kind == NAME_KEY)
            option_key(o, text[n]);
        else
            env_suffix(o, text[n]);
        known[n] = text[n];
        n++;
    }
    if (kind == NAME_FLAG) {
        known[n++] = "help";
        if (c->has_config)
            known[n] = "config";
    }
    const char *found = json_nearest(word, known);
    snprintf(ret, NAME_MAX_LEN, "%s", found ? found : "");
    free(known);
    free(text);
    return ret[0] ? ret : NULL;
}

/* ---- configuration file ---- */

/* A configuration value as the texts opt_store takes. */
static int store_json(const struct opt *o, void *target, json_t *v, const struct origin *from,
                      struct err *e)
{
    char number[32];
    switch (json_typeof(v)) {
    case JSON_STRING:
        if (o->type == OPT_UINT || o->type == OPT_BOOL)
            break;
        if (o->type == OPT_LIST)
            list_clear(field(target, o));
        return opt_store(o, target, json_string_value(v), from, e);
    case JSON_INTEGER:
        if (o->type != OPT_UINT)
            break;
        snprintf(number, sizeof(number), "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        return opt_store(o, target, number, from, e);
    case JSON_TRUE:
    case JSON_FALSE:
        if (o->type != OPT_BOOL)
            break;
        return opt_store(o, target, json_is_true(v) ? "true" : "false", from, e);
    default:
        break;
    }
    static const char *const wanted[] = { "a string", "a whole number", "true or false",
                                          "a list of strings" };
    return err_set(e, -EINVAL, "%s: must be %s", from->text, wanted[o->type]);
}

static int store_json_list(const struct opt *o, void *target, json_t *v, const struct origin *from,
                           struct err *e)
{
    list_clear(field(target, o));
    size_t i;
    json_t *item;
    json_array_foreach(v, i, item)
    {
        if (!json_is_string(item))
            return err_set(e, -EINVAL, "%s[%zu]: not a string", from->text, i);
        list_add(field(target, o), json_string_value(item), json_string_length(item));
    }
    return 0;
}

static int store_json_map(const struct opt *o, void *target, json_t *v, const struct origin *from,
                          struct err *e)
{
    list_clear(field(target, o));
    const char *key;
    json_t *item;
    json_object_foreach(v, key, item)
    {
        if (!json_is_string(item))
            return err_set(e, -EINVAL, "%s.%.60s: not a string", from->text, key);
        CLEANUP(freep) char *pair = xasprintf("%s:%s", key, json_string_value(item));
        list_add(field(target, o), pair, strlen(pair));
    }
    return 0;
}

static int config_value(const struct opt *o, void *target, json_t *v, const char *path,
                        struct err *e)
{
    char key[NAME_MAX_LEN];
    option_key(o, key);
    struct origin from;
    const char *base = strrchr(path, '/');
    snprintf(from.text, sizeof(from.text), "%.24s: %s", base ? base + 1 : path, key);
    if (o->type == OPT_LIST && json_is_array(v))
        return store_json_list(o, target, v, &from, e);
    if ((o->flags & OPT_MAP) && json_is_object(v))
        return store_json_map(o, target, v, &from, e);
    return store_json(o, target, v, &from, e);
}

static const struct opt *by_key(const struct opt_command *c, const char *word)
{
    char key[NAME_MAX_LEN];
    for (size_t i = 0; i < c->n_opts; i++) {
        if (!c->opts[i].flag || (c->opts[i].flags & OPT_FLAG_ONLY))
            continue;
        option_key(&c->opts[i], key);
        if (strcmp(key, word) == 0)
            return &c->opts[i];
    }
    return NULL;
}

static int parse_config(const struct opt_command *c, const char *path, void *target, struct err *e)
{
    json_t *root = json_parse_file(path, CONFIG_MAX, e);
    if (!root)
        return err_wrap(e, e && e->code ? e->code : -EINVAL, "configuration file %.200s", path);
    int r = 0;
    if (!json_is_object(root))
        r = err_set(e, -EINVAL, "%.200s: not a JSON object", path);
    const char *key;
    json_t *v;
    json_object_foreach(root, key, v)
    {
        if (r)
            break;
        const struct opt *o = by_key(c, key);
        char near[NAME_MAX_LEN];
        if (o)
            r = json_is_null(v) ? 0 : config_value(o, target, v, path, e);
        else if (nearest(c, NAME_KEY, key, near))
            r = err_set(e, -EINVAL, "%.200s: unknown key \"%.60s\"; did you mean \"%s\"?", path,
                        key, near);
        else
            r = err_set(e, -EINVAL, "%.200s: unknown key \"%.60s\"; see `cellvisor %s --help`",
                        path, key, c->name);
    }
    json_decref(root);
    return r;
}

/* ---- environment ---- */

static int parse_env(const struct opt_command *c, void *target, struct err *e)
{
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (!o->flag || (o->flags & OPT_FLAG_ONLY))
            continue;
        char name[NAME_MAX_LEN];
        option_env(o, name);
        const char *v = getenv(name);
        if (!v || !v[0]) /* empty counts as unset, as shells and service files expect */
            continue;
        struct origin from;
        snprintf(from.text, sizeof(from.text), "%s", name);
        if (o->type == OPT_LIST) {
            store_commas(o, target, v);
            continue;
        }
        int r = opt_store(o, target, v, &from, e);
        if (r)
            return r;
    }
    return 0;
}

/* Of other subcommands, the scripts and the tests. */
static bool known_elsewhere(const char *suffix)
{
    static const char *const names[] = { "CONFIG",    "CACHE",        "TEMPLATES", "MIRROR",
                                         "TEST_MARK", "NODE_MODULES", "BIN",       "SCREENSHOT" };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcmp(names[i], suffix) == 0)
            return true;
    return false;
}

void opts_each_unknown_env(const struct opt_command *c,
                           void (*fn)(const char *name, const char *nearest))
{
    for (char **p = environ; *p; p++) {
        const char *eq = strchr(*p, '=');
        if (strncmp(*p, ENV_PREFIX, ENV_PREFIX_LEN) != 0 || !eq || eq - *p >= NAME_MAX_LEN)
            continue;
        char name[NAME_MAX_LEN], known[NAME_MAX_LEN], near[NAME_MAX_LEN];
        snprintf(name, sizeof(name), "%.*s", (int)(eq - *p), *p);
        bool found = known_elsewhere(name + ENV_PREFIX_LEN);
        for (size_t i = 0; i < c->n_opts && !found; i++) {
            if (!c->opts[i].flag || (c->opts[i].flags & OPT_FLAG_ONLY))
                continue;
            option_env(&c->opts[i], known);
            found = strcmp(known, name) == 0;
        }
        /* The prefix is left out, or every name would be near to every other. */
        if (!found)
            fn(name, nearest(c, NAME_ENV, name + ENV_PREFIX_LEN, near));
    }
}

/* ---- command line ---- */

struct cmdline {
    const struct opt_command *c;
    void *target;
    char **argv;
    int argc, i;
    bool *seen; /* per option: a flag replaces the list of the levels below, then adds */
    struct opts *out;
    bool only_config; /* first pass: look for --config and --help, store nothing */
    const char *config;
};

static const struct opt *by_flag(const struct opt_command *c, const char *name, size_t len)
{
    for (size_t i = 0; i < c->n_opts; i++)
        if (c->opts[i].flag && strlen(c->opts[i].flag) == len &&
            strncmp(c->opts[i].flag, name, len) == 0)
            return &c->opts[i];
    return NULL;
}

static int need_value(struct cmdline *l, const char *flag, char **ret, struct err *e)
{
    if (l->i + 1 >= l->argc)
        return err_set(e, -EINVAL, "%s needs a value", flag);
    *ret = l->argv[++l->i];
    return 0;
}

static int take_option(struct cmdline *l, const struct opt *o, const char *shown, char *value,
                       struct err *e)
{
    int r;
    if (!value && o->type != OPT_BOOL && (r = need_value(l, shown, &value, e)) < 0)
        return r;
    if (l->only_config)
        return 0;
    size_t index = (size_t)(o - l->c->opts);
    if (o->type == OPT_LIST && !l->seen[index])
        list_clear(field(l->target, o));
    l->seen[index] = true;
    struct origin from;
    snprintf(from.text, sizeof(from.text), "%.60s", shown);
    r = opt_store(o, l->target, value ? value : "true", &from, e);
    if (value && (o->flags & OPT_SECRET))
        memset(value, 'x', strlen(value));
    return r;
}

static int unknown_flag(const struct cmdline *l, const char *arg, size_t len, struct err *e)
{
    char word[NAME_MAX_LEN], near[NAME_MAX_LEN];
    snprintf(word, sizeof(word), "%.*s", (int)len, arg);
    const char *name = word + strspn(word, "-");
    if (nearest(l->c, NAME_FLAG, name, near))
        return err_set(e, -EINVAL, "unknown option %s; did you mean --%s?", word, near);
    return err_set(e, -EINVAL, "unknown option %s; see `cellvisor %s --help`", word, l->c->name);
}

static int take_long(struct cmdline *l, char *arg, struct err *e)
{
    const char *name = arg + 2;
    size_t len = strcspn(name, "=");
    char *value = name[len] == '=' ? arg + 2 + len + 1 : NULL;
    char shown[NAME_MAX_LEN];
    snprintf(shown, sizeof(shown), "--%.*s", (int)len, name);
    if (strcmp(shown, "--help") == 0 || strcmp(shown, "--help-markdown") == 0) {
        l->out->outcome = shown[6] ? OPTS_MARKDOWN : OPTS_HELP;
        return 0;
    }
    if (l->c->has_config && strcmp(shown, "--config") == 0) {
        int r = value ? 0 : need_value(l, shown, &value, e);
        l->config = value;
        return r;
    }
    const struct opt *o = by_flag(l->c, name, len);
    if (o)
        return take_option(l, o, shown, value, e);
    if (len > 3 && strncmp(name, "no-", 3) == 0 && !value) {
        char off[] = "false";
        o = by_flag(l->c, name + 3, len - 3);
        if (o && o->type == OPT_BOOL)
            return take_option(l, o, shown, off, e);
    }
    return unknown_flag(l, arg, len + 2, e);
}

static int take_short(struct cmdline *l, char *arg, struct err *e)
{
    char shown[3] = { '-', arg[1], 0 };
    if (arg[1] == 'h') {
        l->out->outcome = OPTS_HELP;
        return 0;
    }
    for (size_t i = 0; i < l->c->n_opts; i++)
        if (l->c->opts[i].flag && l->c->opts[i].letter == arg[1])
            return take_option(l, &l->c->opts[i], shown, arg[2] ? arg + 2 : NULL, e);
    return unknown_flag(l, arg, strlen(arg), e);
}

static int parse_line(struct cmdline *l, struct err *e)
{
    bool literal = false;
    l->out->n_args = 0;
    for (l->i = 1; l->i < l->argc; l->i++) {
        char *arg = l->argv[l->i];
        int r = 0;
        if (!literal && strcmp(arg, "--") == 0)
            literal = true;
        else if (!literal && strncmp(arg, "--", 2) == 0)
            r = take_long(l, arg, e);
        else if (!literal && arg[0] == '-' && arg[1])
            r = take_short(l, arg, e);
        else if (l->out->n_args >= l->c->max_args)
            r = err_set(e, -EINVAL, "unexpected argument \"%.60s\"; see `cellvisor %s --help`", arg,
                        l->c->name);
        else
            l->out->args[l->out->n_args++] = arg;
        if (r || l->out->outcome != OPTS_RUN)
            return r;
    }
    return 0;
}

static int parse_defaults(const struct opt_command *c, void *target, struct err *e)
{
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        struct origin from;
        if (!o->flag || !o->def)
            continue;
        snprintf(from.text, sizeof(from.text), "default of --%.60s", o->flag);
        int r = opt_store(o, target, o->def, &from, e);
        if (r)
            return r;
    }
    return 0;
}

int opts_parse(const struct opt_command *c, int argc, char **argv, void *target, struct opts *ret,
               struct err *e)
{
    *ret = (struct opts) { .args = xcalloc((size_t)argc + 1, sizeof(char *)) };
    CLEANUP(freep) bool *seen = xcalloc(c->n_opts, sizeof(bool));
    struct cmdline l = {
        .c = c,
        .target = target,
        .argv = argv,
        .argc = argc,
        .seen = seen,
        .out = ret,
    };
    /* First pass: --help wins over everything, and --config must be read before the flags. */
    l.only_config = true;
    int r = parse_line(&l, e);
    if (r || ret->outcome != OPTS_RUN)
        return r;
    const char *config = l.config ? l.config : c->has_config ? getenv("CELLVISOR_CONFIG") : NULL;
    r = parse_defaults(c, target, e);
    if (!r && config && config[0])
        r = parse_config(c, config, target, e);
    if (!r)
        r = parse_env(c, target, e);
    l.only_config = false;
    return r ? r : parse_line(&l, e);
}

void opts_free(const struct opt_command *c, void *target, struct opts *o)
{
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *opt = &c->opts[i];
        if (!opt->flag)
            continue;
        if (opt->type == OPT_LIST)
            list_clear(field(target, opt));
        if (opt->type == OPT_STR) {
            char **s = field(target, opt);
            free(*s);
            *s = NULL;
        }
    }
    free(o->args);
    o->args = NULL;
}
