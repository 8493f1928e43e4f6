/* cellvisor template build|list|inspect|rm: the store of templates and its builder. */
#include "cli/cli.h"
#include "cli/opts.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/timefmt.h"
#include "vm/build.h"
#include "vm/recipe.h"
#include "vm/store.h"
#include "vm/template.h"
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#define BAR_WIDTH 24
/* Lines without a terminal: one per stage, and inside long stages at most one per so long. */
#define PLAIN_STEP_S 15

struct template_opts {
    char *state, *accel, *qemu, *shim, *mirror;
    bool refresh, force, json, all;
};

#define AT(f) offsetof(struct template_opts, f)
static const char *const accel_words[] = { "auto", "kvm", "tcg", NULL };

#define OPT_STATE                                                                                  \
    {                                                                                              \
        .flag = "state", .offset = AT(state), .arg = "DIR", .def = "~/.local/share/cellvisor",     \
        .help = "state directory"                                                                  \
    }
#define OPT_JSON                                                                                   \
    {                                                                                              \
        .flag = "json", .type = OPT_BOOL, .flags = OPT_FLAG_ONLY, .offset = AT(json),              \
        .def = "false", .help = "print JSON"                                                       \
    }

static const struct opt build_options[] = {
    { .flag = "refresh",
      .type = OPT_BOOL,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(refresh),
      .def = "false",
      .help = "fetch packages and guest kernel again instead of reusing finished stages" },
    { .flag = "force",
      .type = OPT_BOOL,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(force),
      .def = "false",
      .help = "make the snapshot again even if nothing has changed" },
    { .flag = "mirror",
      .offset = AT(mirror),
      .arg = "URL",
      .help = "Debian mirror (the one that apt on this machine uses)" },
    { .flag = "accel",
      .offset = AT(accel),
      .arg = "WORD",
      .def = "auto",
      .choices = accel_words,
      .help = "acceleration the snapshot is made for" },
    OPT_STATE,
    { .flag = "qemu",
      .offset = AT(qemu),
      .arg = "FILE",
      .help = "QEMU binary (qemu-system-x86_64 from PATH)" },
    { .flag = "shim",
      .offset = AT(shim),
      .arg = "FILE",
      .help = "cellvisor-shim for the guest (beside this program)" },
    OPT_JSON,
};
static const struct opt list_options[] = { OPT_STATE, OPT_JSON };
static const struct opt rm_options[] = {
    { .flag = "all",
      .type = OPT_BOOL,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(all),
      .def = "false",
      .help = "also remove finished stages that wait for reuse (kernel, downloads)" },
    OPT_STATE,
};

static const struct opt_command build_command = {
    .name = "template build",
    .synopsis = "[OPTION ...] NAME | FOLDER | template.json ...",
    .summary = "Build templates from their recipes: packages, image, guest kernel, snapshot.\n"
               "Finished stages are reused; an interrupted build goes on where it stopped.",
    .opts = build_options,
    .n_opts = sizeof(build_options) / sizeof(*build_options),
    .max_args = 32,
    .examples = "  cellvisor template build python\n"
                "  cellvisor template build --refresh python minimal\n"
                "  cellvisor template build ./my-template\n",
    .exits = "  0    built, or nothing had to be done\n"
             "  1    a stage failed; the text names it, and the log file\n"
             "  2    wrong option or recipe\n"
             "  3    this machine cannot: program missing, disk full, mirror unreachable ...\n"
             "  130  interrupted by Ctrl-C\n",
};
static const struct opt_command list_command = {
    .name = "template list",
    .synopsis = "[OPTION ...]",
    .summary = "List the templates that are built, and whether they can be used here.",
    .opts = list_options,
    .n_opts = sizeof(list_options) / sizeof(*list_options),
};
static const struct opt_command inspect_command = {
    .name = "template inspect",
    .synopsis = "[OPTION ...] NAME",
    .summary = "Show what a template holds: recipe, versions, sizes, kernels, build times.",
    .opts = list_options,
    .n_opts = sizeof(list_options) / sizeof(*list_options),
    .max_args = 1,
};
static const struct opt_command rm_command = {
    .name = "template rm",
    .synopsis = "[OPTION ...] NAME ...",
    .summary = "Remove templates. A build that runs VMs now stays on disk until they are gone.",
    .opts = rm_options,
    .n_opts = sizeof(rm_options) / sizeof(*rm_options),
    .max_args = 32,
};

/* ---- recipes ---- */

static char *recipe_in(const char *folder, const char *name)
{
    CLEANUP(freep) char *path = xasprintf("%s/%s/template.json", folder, name);
    return fs_exists(path) ? TAKE_PTR(path) : NULL;
}

/* The source tree this program was compiled from: "" when the compiler was given relative paths. */
static char *source_root(void)
{
    static const char tail[] = "/cli/cmd_template.c";
    size_t n = strlen(__FILE__);
    if (__FILE__[0] != '/' || n <= sizeof(tail) - 1)
        return xstrdup("");
    return xstrndup(__FILE__, n - (sizeof(tail) - 1));
}

static char *exe_dir(void)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n <= 0)
        return xstrdup(".");
    self[n] = '\0';
    char *slash = strrchr(self, '/');
    return slash ? xstrndup(self, (size_t)(slash - self)) : xstrdup(".");
}

/* A path as it is; a name from $CELLVISOR_TEMPLATES, STATE/recipes, ./templates, the installation,
 * the source tree. */
static char *find_recipe(const char *what, const char *state, struct err *e)
{
    if (strchr(what, '/') || (strlen(what) > 5 && !strcmp(what + strlen(what) - 5, ".json"))) {
        if (fs_exists(what))
            return xstrdup(what);
        err_set(e, -ENOENT, "no recipe at %s", what);
        return NULL;
    }
    CLEANUP(freep) char *exe = exe_dir(), *root = source_root();
    const char *env = getenv("CELLVISOR_TEMPLATES");
    char *folders[] = { xstrdup(env ? env : ""), xasprintf("%s/recipes", state),
                        xstrdup("templates"), xasprintf("%s/../share/cellvisor/templates", exe),
                        xasprintf("%s/templates", root) };
    char *found = NULL;
    for (size_t i = 0; i < sizeof(folders) / sizeof(*folders); i++) {
        if (!found && folders[i][0])
            found = recipe_in(folders[i], what);
        free(folders[i]);
    }
    if (!found)
        err_set(e, -ENOENT,
                "no recipe \"%s\": looked in ./templates, %s/recipes, the installation and "
                "$CELLVISOR_TEMPLATES; give its path, or see docs/templates.md",
                what, state);
    return found;
}

/* Where cellvisor_hook.py is; NULL: kernels start without it. */
static char *find_hook_dir(void)
{
    CLEANUP(freep) char *exe = exe_dir(), *root = source_root();
    const char *env = getenv("CELLVISOR_HOOK_DIR");
    char *dirs[] = { xstrdup(env ? env : ""), xasprintf("%s/../lib/cellvisor", exe),
                     xasprintf("%s/guest-kernel-shim/python", root) };
    char *found = NULL;
    for (size_t i = 0; i < sizeof(dirs) / sizeof(*dirs); i++) {
        CLEANUP(freep) char *file = fs_join(dirs[i], "cellvisor_hook.py");
        if (!found && dirs[i][0] && fs_exists(file))
            found = xstrdup(dirs[i]);
        free(dirs[i]);
    }
    return found;
}

/* ---- progress ---- */

struct screen {
    bool tty, quiet;
    const char *name;
    char text[200];
    double last_step_s;
    bool open; /* an unfinished bar line is on the screen */
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static unsigned columns(void)
{
    struct winsize w;
    return ioctl(2, TIOCGWINSZ, &w) == 0 && w.ws_col > 30 ? w.ws_col : 80;
}

static void draw_bar(struct screen *s, const struct vm_build_progress *p)
{
    char bar[BAR_WIDTH + 1], line[512];
    unsigned full = (unsigned)(p->overall * BAR_WIDTH);
    for (unsigned i = 0; i < BAR_WIDTH; i++)
        bar[i] = i < full ? '#' : '.';
    bar[BAR_WIDTH] = '\0';
    int n = snprintf(line, sizeof(line), "[%s] %3.0f %%  %u/%u %-9s %s", bar, p->overall * 100,
                     p->index, p->total, p->stage, s->text);
    unsigned width = columns() - 1;
    fprintf(stderr, "\r\033[K%.*s", n > (int)width ? (int)width : n, line);
    fflush(stderr);
    s->open = true;
}

static void end_line(struct screen *s)
{
    if (s->open)
        fputs("\r\033[K", stderr);
    s->open = false;
}

static void plain_line(struct screen *s, const struct vm_build_progress *p)
{
    if (p->phase == VM_BUILD_STEP && now_s() - s->last_step_s < PLAIN_STEP_S)
        return;
    if (p->phase == VM_BUILD_STEP && !p->text)
        return;
    s->last_step_s = now_s();
    fprintf(stderr, "%s: %3.0f %%  %u/%u %s: %s\n", s->name, p->overall * 100, p->index, p->total,
            p->stage, s->text);
}

static void on_progress(void *ctx, const struct vm_build_progress *p)
{
    struct screen *s = ctx;
    char span[32];
    if (s->quiet)
        return;
    if (p->text)
        snprintf(s->text, sizeof(s->text), "%s", p->text);
    if (p->phase == VM_BUILD_END) {
        end_line(s);
        timefmt_span(span, sizeof(span), p->ms);
        fprintf(stderr, "%s: %u/%u %-9s %s\n", s->name, p->index, p->total, p->stage,
                p->cached ? "reused" : span);
    } else if (s->tty) {
        draw_bar(s, p);
    } else {
        plain_line(s, p);
    }
}

/* ---- build ---- */

static int exit_code_of(int r)
{
    switch (r) {
    case 0:
        return CLI_OK;
    case -EINVAL:
        return CLI_USAGE;
    case -EINTR:
        return CLI_INTERRUPTED;
    case -ENOENT:
    case -ENOSPC:
    case -ENOTSUP:
    case -EHOSTUNREACH:
    case -EACCES:
    case -EPERM:
        return CLI_ENVIRONMENT;
    default:
        return CLI_FAILED;
    }
}

static void print_built(const struct vm_build_result *r, bool json)
{
    char span[32], size[32];
    timefmt_span(span, sizeof(span), r->ms);
    timefmt_bytes(size, sizeof(size), r->bytes);
    if (json)
        printf("{\"name\":\"%s\",\"hash\":\"%s\",\"up_to_date\":%s,\"ms\":%llu,\"bytes\":%llu}\n",
               r->name, r->hash, r->up_to_date ? "true" : "false", (unsigned long long)r->ms,
               (unsigned long long)r->bytes);
    else if (r->up_to_date)
        printf("template %s is up to date (%.12s)\n", r->name, r->hash);
    else
        printf("template %s is built: %s in %s (%.12s)\n", r->name, size, span, r->hash);
    fflush(stdout);
}

static int build_one(const struct template_opts *o, const char *state, const char *shim,
                     const char *what)
{
    struct err e = { 0 };
    CLEANUP(freep) char *recipe = find_recipe(what, state, &e);
    if (!recipe)
        return cli_fail("template build", CLI_USAGE, &e);
    CLEANUP(freep) char *hook = find_hook_dir();
    struct screen s = { .tty = isatty(2), .name = what };
    struct vm_build_spec spec = {
        .state_dir = state,
        .recipe_path = recipe,
        .shim_path = shim,
        .python_dir = hook,
        .qemu_path = o->qemu,
        .mirror = o->mirror,
        .refresh = o->refresh,
        .force = o->force,
    };
    struct vm_build_result result;
    if (vm_accel_parse(o->accel, &spec.accel) < 0)
        return CLI_USAGE; /* the option table allows known words only */
    int r = vm_build(&spec, on_progress, &s, &result, &e);
    end_line(&s);
    if (r < 0)
        return cli_fail("template build", exit_code_of(r), &e);
    print_built(&result, o->json);
    return CLI_OK;
}

static int run_build(const struct template_opts *o, const struct opts *p, const char *state)
{
    struct err e = { 0 };
    if (!p->n_args) {
        err_set(&e, -EINVAL, "name at least one template, for example `python`");
        return cli_fail("template build", CLI_USAGE, &e);
    }
    CLEANUP(freep) char *shim = cli_shim_path(o->shim, &e);
    if (!shim)
        return cli_fail("template build", CLI_ENVIRONMENT, &e);
    int code = CLI_OK;
    for (size_t i = 0; code == CLI_OK && i < p->n_args; i++)
        code = build_one(o, state, shim, p->args[i]);
    return code;
}

/* ---- list, inspect, rm ---- */

/* {"name","state":"ready|stale|broken","why",...} */
static json_t *describe(const char *state, const char *qemu, const char *name)
{
    struct vm_template *t = NULL;
    struct err e = { 0 };
    int r = vm_template_read(state, name, &t, &e);
    if (r < 0)
        return json_pack("{s:s,s:s,s:s}", "name", name, "state", r == -ESTALE ? "stale" : "broken",
                         "why", e.msg);
    const char *created = "?";
    json_unpack(t->manifest, "{s:s}", "created", &created);
    r = vm_template_check(t, qemu, &e);
    json_t *o = json_pack("{s:s,s:s,s:s?,s:s,s:s,s:s,s:I,s:i,s:I,s:I}", "name", name, "state",
                          r == 0         ? "ready"
                          : r == -ESTALE ? "stale"
                                         : "unusable",
                          "why", r < 0 ? e.msg : NULL, "created", created, "hash", t->hash, "accel",
                          vm_accel_name(t->accel), "memory_mb", (json_int_t)t->memory_mb, "vcpus",
                          (int)t->vcpus, "image_bytes", (json_int_t)t->image_bytes,
                          "snapshot_bytes", (json_int_t)t->memory_bytes_used);
    vm_template_free(t);
    return o;
}

static void print_json(json_t *v)
{
    CLEANUP(freep) char *text = json_dumps(v, JSON_INDENT(2));
    puts(text ? text : "null");
}

static const char *text_of(json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static void size_of(json_t *o, const char *key, char *ret, size_t size)
{
    json_int_t n = json_integer_value(json_object_get(o, key));
    ret[0] = '\0';
    if (n > 0)
        timefmt_bytes(ret, size, (uint64_t)n);
}

static void print_row(json_t *t)
{
    char image[32], ram[32];
    size_of(t, "image_bytes", image, sizeof(image));
    size_of(t, "snapshot_bytes", ram, sizeof(ram));
    printf("%-16s %-9s %-5s %6lld MB %9s %9s  %.19s\n", text_of(t, "name"), text_of(t, "state"),
           text_of(t, "accel"), (long long)json_integer_value(json_object_get(t, "memory_mb")),
           image, ram, text_of(t, "created"));
    if (text_of(t, "why")[0])
        printf("    %s\n", text_of(t, "why"));
}

static int run_list(const struct template_opts *o, const struct opts *p, const char *state)
{
    (void)p;
    json_t *names = vm_template_names(state), *all = json_array(), *v;
    size_t i;
    json_array_foreach(names, i, v)
        json_array_append_new(all, describe(state, o->qemu, json_string_value(v)));
    if (o->json)
        print_json(all);
    else if (!json_array_size(all))
        puts("no templates; build one with `cellvisor template build python`");
    else
        printf("%-16s %-9s %-5s %9s %9s %9s  %s\n", "NAME", "STATE", "ACCEL", "MEMORY", "IMAGE",
               "SNAPSHOT", "CREATED");
    json_array_foreach(all, i, v)
    {
        if (!o->json)
            print_row(v);
    }
    json_decref(names);
    json_decref(all);
    return CLI_OK;
}

static void print_words(const char *label, json_t *list)
{
    size_t i;
    json_t *v;
    if (!json_array_size(list))
        return;
    printf("%s", label);
    json_array_foreach(list, i, v) printf(" %s", json_string_value(v));
    putchar('\n');
}

static void print_stages(json_t *stages)
{
    const char *stage;
    json_t *v;
    char span[32];
    printf("stages:    ");
    json_object_foreach(stages, stage, v)
    {
        timefmt_span(span, sizeof(span), (uint64_t)json_integer_value(v));
        if (json_integer_value(v))
            printf(" %s %s;", stage, span);
    }
    putchar('\n');
}

static void print_template(const struct vm_template *t)
{
    json_t *recipe = json_object_get(t->manifest, "recipe");
    json_t *specs = json_object_get(t->specs, "kernelspecs"), *v;
    const char *description = "", *suite = "", *kernel = "", *created = "", *name;
    char image[32], ram[32];
    json_unpack(t->manifest, "{s:s,s:{s:s,s:s},s:{s:s}}", "created", &created, "recipe",
                "description", &description, "suite", &suite, "guest_kernel", "version", &kernel);
    timefmt_bytes(image, sizeof(image), t->image_bytes);
    timefmt_bytes(ram, sizeof(ram), t->memory_bytes_used);
    printf("name:       %s\ndescription: %s\nhash:       %s\ncreated:    %s\nfolder:     %s\n",
           t->name, description, t->hash, created, t->dir);
    printf("guest:      Debian %s, kernel %s, %u vCPU, %llu MB memory, %llu MB disk (%s)\n", suite,
           kernel, t->vcpus, (unsigned long long)t->memory_mb, (unsigned long long)t->disk_mb,
           vm_accel_name(t->accel));
    printf("image:      %s; snapshot %s of memory\n", image, ram);
    printf("kernels:   ");
    json_object_foreach(specs, name, v)
        printf(" %s%s", name, !strcmp(name, t->default_spec) ? " (running in the snapshot)" : "");
    putchar('\n');
    print_words("apt:       ", json_object_get(recipe, "apt"));
    print_words("pip:       ", json_object_get(recipe, "pip"));
    print_words("npm:       ", json_object_get(recipe, "npm"));
    printf("packages:   %zu installed (--json lists their versions)\n",
           json_object_size(json_object_get(t->manifest, "packages")));
    print_stages(json_object_get(t->manifest, "stage_ms"));
}

static int run_inspect(const struct template_opts *o, const struct opts *p, const char *state)
{
    struct err e = { 0 };
    struct vm_template *t = NULL;
    if (p->n_args != 1) {
        err_set(&e, -EINVAL, "name one template");
        return cli_fail("template inspect", CLI_USAGE, &e);
    }
    int r = vm_template_read(state, p->args[0], &t, &e);
    if (r < 0)
        return cli_fail("template inspect", r == -ENOENT ? CLI_ENVIRONMENT : CLI_FAILED, &e);
    if (o->json)
        print_json(t->manifest);
    else
        print_template(t);
    if (!o->json && vm_template_check(t, o->qemu, &e) < 0)
        printf("NOT USABLE: %s\n", e.msg);
    vm_template_free(t);
    return CLI_OK;
}

static int run_rm(const struct template_opts *o, const struct opts *p, const char *state)
{
    struct err e = { 0 };
    int code = CLI_OK;
    if (!p->n_args && !o->all) {
        err_set(&e, -EINVAL, "name at least one template");
        return cli_fail("template rm", CLI_USAGE, &e);
    }
    for (size_t i = 0; i < p->n_args; i++) {
        int r = vm_recipe_name_ok(p->args[i])
                    ? vm_store_unpublish(state, p->args[i], &e)
                    : err_set(&e, -EINVAL, "\"%.60s\" is not a name", p->args[i]);
        if (r < 0)
            code = cli_fail("template rm", exit_code_of(r), &e);
        else
            printf("removed template %s\n", p->args[i]);
    }
    char size[32];
    timefmt_bytes(size, sizeof(size), vm_store_clean(state, o->all));
    printf("freed %s\n", size);
    return code;
}

/* ---- the command ---- */

static const struct verb {
    const char *word;
    const struct opt_command *command;
    int (*run)(const struct template_opts *o, const struct opts *p, const char *state);
} verbs[] = {
    { "build", &build_command, run_build },
    { "list", &list_command, run_list },
    { "inspect", &inspect_command, run_inspect },
    { "rm", &rm_command, run_rm },
};
#define N_VERBS (sizeof(verbs) / sizeof(*verbs))

static void usage(FILE *f)
{
    fputs("Usage: cellvisor template VERB [OPTION ...] [NAME ...]\n\n"
          "A template is what sandboxes start from: a root image and a snapshot of a guest whose\n"
          "kernel already runs. Verbs:\n"
          "  build     make templates from recipes (docs/templates.md)\n"
          "  list      those that are built\n"
          "  inspect   what is in one\n"
          "  rm        remove some\n\n"
          "`cellvisor template VERB --help` shows the options.\n",
          f);
}

static int run_verb(const struct verb *v, int argc, char **argv)
{
    struct template_opts o = { 0 };
    struct opts p = { 0 };
    struct err e = { 0 };
    int r = opts_parse(v->command, argc, argv, &o, &p, &e);
    int code = CLI_OK;
    if (r < 0) {
        code = cli_fail(v->command->name, CLI_USAGE, &e);
    } else if (p.outcome == OPTS_HELP) {
        opts_help(v->command, stdout);
    } else if (p.outcome == OPTS_MARKDOWN) {
        opts_markdown(v->command, stdout);
    } else {
        CLEANUP(freep) char *state = cli_state_dir(o.state, &e);
        code = state ? v->run(&o, &p, state) : cli_fail(v->command->name, CLI_ENVIRONMENT, &e);
    }
    opts_free(v->command, &o, &p);
    return code;
}

int cmd_template(int argc, char **argv)
{
    const char *known[N_VERBS + 1] = { NULL };
    if (argc < 2) {
        usage(stderr);
        return CLI_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return CLI_OK;
    }
    for (size_t i = 0; i < N_VERBS; i++) {
        if (!strcmp(argv[1], verbs[i].word))
            return run_verb(&verbs[i], argc - 1, argv + 1);
        known[i] = verbs[i].word;
    }
    const char *near = json_nearest(argv[1], known);
    struct err e = { 0 };
    if (near)
        err_set(&e, -EINVAL, "unknown verb \"%.60s\"; did you mean \"%s\"?", argv[1], near);
    else
        err_set(&e, -EINVAL, "unknown verb \"%.60s\"; see `cellvisor template --help`", argv[1]);
    return cli_fail("template", CLI_USAGE, &e);
}
