#include "vm/recipe.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/json.h"
#include "common/mem.h"
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

static const char *const top_keys[] = {
    "name",           "description", "suite",       "apt",     "pip",    "npm",
    "files",          "env",         "kernelspecs", "preload", "warmup", "memory_mb",
    "default_kernel", "vcpus",       "disk_mb",     "$schema", NULL
};
static const char *const file_keys[] = { "path", "source", "content", "mode", NULL };
static const char *const spec_keys[] = { "argv",     "display_name",   "language", "env",
                                         "metadata", "interrupt_mode", NULL };

/* Folders that are mounted over at boot: what a recipe put there could never be seen. */
static const char *const hidden_dirs[] = { "/proc", "/sys", "/dev", "/run", NULL };

static bool all_in(const char *s, const char *extra)
{
    for (; *s; s++) {
        bool alnum = (*s >= 'a' && *s <= 'z') || (*s >= '0' && *s <= '9');
        if (!alnum && !strchr(extra, *s))
            return false;
    }
    return true;
}

static bool starts_alnum(const char *s)
{
    return (*s >= 'a' && *s <= 'z') || (*s >= '0' && *s <= '9');
}

bool vm_recipe_name_ok(const char *name)
{
    return starts_alnum(name) && strlen(name) <= VM_RECIPE_NAME_MAX && all_in(name, "-_");
}

/* Debian policy 5.6.1, plus "=version". The first character also keeps options of apt out. */
static bool apt_ok(const char *s)
{
    size_t n = strcspn(s, "=");
    CLEANUP(freep) char *name = xstrndup(s, n);
    if (!starts_alnum(s) || n < 2 || n > 128 || !all_in(name, "+-."))
        return false;
    return !s[n] || (s[n + 1] && strlen(s + n) < 128 && !strpbrk(s + n + 1, " \t\n;|&$`'\"\\=/"));
}

/* Requirement of pip or npm: anything printable that is not an option. */
static bool requirement_ok(const char *s)
{
    if (!*s || *s == '-' || *s == ' ' || strlen(s) > 300)
        return false;
    for (; *s; s++) {
        if ((unsigned char)*s < 0x20 || (unsigned char)*s > 0x7e)
            return false;
    }
    return true;
}

static bool env_name_ok(const char *s)
{
    if (!*s || (*s >= '0' && *s <= '9'))
        return false;
    for (; *s; s++) {
        bool ok = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') ||
                  (*s >= '0' && *s <= '9') || *s == '_';
        if (!ok)
            return false;
    }
    return true;
}

static bool image_path_ok(const char *p)
{
    size_t n = strlen(p);
    if (*p != '/' || n < 2 || n > 1000 || p[n - 1] == '/' || strstr(p, "//") || strpbrk(p, "\n\t"))
        return false;
    for (const char *at = p; (at = strstr(at, "/.")); at += 2) {
        const char *rest = at + 2;
        if (*rest == '/' || !*rest || (*rest == '.' && (rest[1] == '/' || !rest[1])))
            return false;
    }
    return true;
}

static const char *under_hidden(const char *p)
{
    for (size_t i = 0; hidden_dirs[i]; i++) {
        size_t n = strlen(hidden_dirs[i]);
        if (!strncmp(p, hidden_dirs[i], n) && (p[n] == '/' || !p[n]))
            return hidden_dirs[i];
    }
    return NULL;
}

static void free_list(char **l)
{
    for (size_t i = 0; l && l[i]; i++)
        free(l[i]);
    free(l);
}

/* An array of strings that each pass ok(). what: "a Debian package name". */
static int read_list(const struct json_obj *o, const char *key, bool (*ok)(const char *),
                     const char *what, char ***ret, struct err *e)
{
    json_t *a = NULL;
    int r = json_get_array(o, key, &a, e);
    if (r < 0)
        return r;
    size_t n = json_array_size(a);
    if (n > VM_RECIPE_LIST_MAX)
        return err_set(e, -EINVAL, "%s: more than %u entries", key, VM_RECIPE_LIST_MAX);
    char **list = xcalloc(n + 1, sizeof(*list));
    for (size_t i = 0; i < n; i++) {
        const char *s = json_string_value(json_array_get(a, i));
        bool dup = false;
        for (size_t k = 0; s && k < i; k++)
            dup = dup || !strcmp(list[k], s);
        if (!s)
            r = err_set(e, -EINVAL, "%s[%zu]: not a string", key, i);
        else if (!ok(s))
            r = err_set(e, -EINVAL, "%s[%zu]: \"%.80s\" is not %s", key, i, s, what);
        else if (dup)
            r = err_set(e, -EINVAL, "%s[%zu]: \"%.80s\" is listed twice", key, i, s);
        else
            list[i] = xstrdup(s);
        if (r < 0) {
            free_list(list);
            return r;
        }
    }
    *ret = list;
    return 0;
}

/* Code: a string, or an array of lines. */
static int read_code(const struct json_obj *o, const char *key, char **ret, struct err *e)
{
    json_t *v = json_object_get(o->obj, key);
    if (!v || json_is_null(v))
        return 0;
    if (json_is_string(v)) {
        *ret = xstrdup(json_string_value(v));
        return 0;
    }
    if (!json_is_array(v))
        return err_set(e, -EINVAL, "%s: not a string nor an array of lines", key);
    struct buf b;
    buf_init(&b, VM_RECIPE_MAX);
    int r = 0;
    for (size_t i = 0; r == 0 && i < json_array_size(v); i++) {
        const char *line = json_string_value(json_array_get(v, i));
        if (!line)
            r = err_set(e, -EINVAL, "%s[%zu]: not a string", key, i);
        else
            r = buf_printf(&b, "%s\n", line);
    }
    const char *text = r == 0 ? buf_cstr(&b) : NULL;
    if (text)
        *ret = xstrdup(text);
    buf_fini(&b);
    return r;
}

static int check_string_object(json_t *v, const char *where, struct err *e)
{
    const char *k;
    json_t *s;
    json_object_foreach(v, k, s)
    {
        if (!env_name_ok(k))
            return err_set(e, -EINVAL, "%s: \"%.80s\" is not a variable name", where, k);
        if (!json_is_string(s))
            return err_set(e, -EINVAL, "%s.%.80s: not a string", where, k);
        if (strchr(json_string_value(s), '\n'))
            return err_set(e, -EINVAL, "%s.%.80s: has a line break", where, k);
    }
    return 0;
}

static int read_env(const struct json_obj *o, struct vm_recipe *r, struct err *e)
{
    json_t *env = NULL;
    int rc = json_get_obj(o, "env", &env, e);
    if (rc < 0)
        return rc;
    r->env = env ? json_incref(env) : json_object();
    return check_string_object(r->env, "env", e);
}

/* argv: strings, one of which is told where the connection file is. */
static int check_argv(json_t *argv, const char *where, struct err *e)
{
    bool file = false;
    for (size_t i = 0; i < json_array_size(argv); i++) {
        const char *s = json_string_value(json_array_get(argv, i));
        if (!s)
            return err_set(e, -EINVAL, "%s.argv[%zu]: not a string", where, i);
        file = file || strstr(s, "{connection_file}");
    }
    return file ? 0 : err_set(e, -EINVAL, "%s.argv: no word holds {connection_file}", where);
}

static int check_spec(const char *name, json_t *v, struct err *e)
{
    struct json_obj o;
    CLEANUP(freep) char *where = xasprintf("kernelspecs.%.40s", name);
    int r = json_obj_of(v, where, &o, e);
    if (r < 0 || (r = json_check_keys(&o, spec_keys, e)) < 0)
        return r;
    json_t *argv = NULL, *env = NULL;
    const char *display = NULL, *language = NULL, *mode = "signal";
    if ((r = json_get_array(&o, "argv", &argv, e)) < 0 ||
        (r = json_get_obj(&o, "env", &env, e)) < 0 ||
        (r = json_get_str(&o, "display_name", &display, e)) < 0 ||
        (r = json_get_str(&o, "language", &language, e)) < 0 ||
        (r = json_get_str(&o, "interrupt_mode", &mode, e)) < 0 ||
        (r = check_argv(argv, where, e)) < 0)
        return r;
    if (strcmp(mode, "signal") && strcmp(mode, "message"))
        return err_set(e, -EINVAL, "%s.interrupt_mode: not \"signal\" or \"message\"", where);
    if (!display || !language)
        return err_set(e, -EINVAL, "%s: needs \"%s\"", where,
                       display ? "language" : "display_name");
    return env ? check_string_object(env, where, e) : 0;
}

static int read_specs(const struct json_obj *o, struct vm_recipe *r, struct err *e)
{
    json_t *specs = NULL;
    int rc = json_get_obj(o, "kernelspecs", &specs, e);
    if (rc < 0)
        return rc;
    r->kernelspecs = specs ? json_incref(specs) : json_object();
    const char *name;
    json_t *v;
    json_object_foreach(r->kernelspecs, name, v)
    {
        if (!vm_recipe_name_ok(name))
            return err_set(e, -EINVAL,
                           "kernelspecs: \"%.80s\" is not a kernel name (a-z, 0-9, - and _)", name);
        if ((rc = check_spec(name, v, e)) < 0)
            return rc;
    }
    return 0;
}

static int read_mode(const struct json_obj *o, unsigned *ret, struct err *e)
{
    const char *text = "0644";
    int r = json_get_str(o, "mode", &text, e);
    if (r < 0)
        return r;
    char *end;
    unsigned long m = strtoul(text, &end, 8);
    if (!*text || *end || m > 0777)
        return err_set(e, -EINVAL,
                       "%s.mode: \"%.20s\" is not octal permission bits such as \"0644\"", o->where,
                       text);
    *ret = (unsigned)m;
    return 0;
}

static int check_path(const char *path, const char *where, struct err *e)
{
    if (!path || !image_path_ok(path))
        return err_set(e, -EINVAL, "%s.path: not an absolute path without . and ..", where);
    const char *hidden = under_hidden(path);
    return hidden ? err_set(e, -EINVAL, "%s.path: %s is mounted over at boot", where, hidden) : 0;
}

static int check_source(const char *given, const char *path, const char *where, struct err *e)
{
    struct stat st;
    if (*given == '/' || strstr(given, ".."))
        return err_set(e, -EINVAL, "%s.source: not a path inside the recipe's folder", where);
    if (stat(path, &st) < 0 || !S_ISREG(st.st_mode))
        return err_set(e, -EINVAL, "%s.source: no file %s", where, path);
    if (st.st_size > (off_t)VM_RECIPE_FILE_MAX)
        return err_set(e, -EINVAL, "%s.source: over %u MiB", where, VM_RECIPE_FILE_MAX >> 20);
    return 0;
}

static int read_file_entry(json_t *v, size_t i, const char *folder, struct vm_recipe_file *f,
                           struct err *e)
{
    struct json_obj o;
    char where[32];
    snprintf(where, sizeof(where), "files[%zu]", i);
    int r = json_obj_of(v, where, &o, e);
    if (r < 0 || (r = json_check_keys(&o, file_keys, e)) < 0)
        return r;
    const char *path = NULL, *source = NULL, *content = NULL;
    if ((r = json_get_str(&o, "path", &path, e)) < 0 ||
        (r = json_get_str(&o, "source", &source, e)) < 0 ||
        (r = json_get_str(&o, "content", &content, e)) < 0 ||
        (r = read_mode(&o, &f->mode, e)) < 0 || (r = check_path(path, where, e)) < 0)
        return r;
    if (!source == !content)
        return err_set(e, -EINVAL, "%s: needs either \"source\" or \"content\"", where);
    f->path = xstrdup(path);
    f->content = xstrdup(content);
    f->source = source ? fs_join(folder, source) : NULL;
    return source ? check_source(source, f->source, where, e) : 0;
}

static int read_files(const struct json_obj *o, struct vm_recipe *r, struct err *e)
{
    json_t *a = NULL;
    int rc = json_get_array(o, "files", &a, e);
    if (rc < 0)
        return rc;
    size_t n = json_array_size(a);
    if (n > VM_RECIPE_LIST_MAX)
        return err_set(e, -EINVAL, "files: more than %u entries", VM_RECIPE_LIST_MAX);
    r->files = xcalloc(n + 1, sizeof(*r->files));
    for (size_t i = 0; i < n; i++) {
        r->n_files = i + 1; /* before filling: freed whatever happens */
        rc = read_file_entry(json_array_get(a, i), i, r->folder, &r->files[i], e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_limits(const struct json_obj *o, struct vm_recipe *r, struct err *e)
{
    uint64_t vcpus = 1;
    int rc;
    r->memory_mb = 1024;
    if ((rc = json_get_u64(o, "memory_mb", 192, 1u << 20, &r->memory_mb, e)) < 0 ||
        (rc = json_get_u64(o, "disk_mb", 0, 1u << 20, &r->disk_mb, e)) < 0 ||
        (rc = json_get_u64(o, "vcpus", 1, 32, &vcpus, e)) < 0)
        return rc;
    r->vcpus = (unsigned)vcpus;
    if (r->disk_mb > r->memory_mb)
        return err_set(e, -EINVAL, "disk_mb: more than memory_mb (%" PRIu64 "), in which it lives",
                       r->memory_mb);
    if (!r->disk_mb)
        r->disk_mb = r->memory_mb * 3 / 4;
    return 0;
}

static bool has_package(char **list, const char *name)
{
    for (; *list; list++) {
        if (!strncmp(*list, name, strlen(name)) && strchr("=", (*list)[strlen(name)]))
            return true;
    }
    return false;
}

/* pip and npm run inside the image: what runs them must be there. */
static int check_tools(const struct vm_recipe *r, struct err *e)
{
    if (*r->pip && !has_package(r->apt, "python3-pip"))
        return err_set(e, -EINVAL, "pip: needs \"python3-pip\" in apt");
    if (*r->npm && !has_package(r->apt, "npm"))
        return err_set(e, -EINVAL, "npm: needs \"npm\" in apt");
    return 0;
}

static int read_names(const struct json_obj *o, const char *name, struct vm_recipe *r,
                      struct err *e)
{
    const char *own = name, *description = "", *suite = "stable", *kernel = "python3";
    int rc;
    if ((rc = json_get_str(o, "name", &own, e)) < 0 ||
        (rc = json_get_str(o, "description", &description, e)) < 0 ||
        (rc = json_get_str(o, "suite", &suite, e)) < 0 ||
        (rc = json_get_str(o, "default_kernel", &kernel, e)) < 0)
        return rc;
    if (!vm_recipe_name_ok(own))
        return err_set(e, -EINVAL, "name: \"%.80s\" is not a template name (a-z, 0-9, - and _)",
                       own);
    if (!starts_alnum(suite) || !all_in(suite, "-") || strlen(suite) > 40)
        return err_set(e, -EINVAL, "suite: \"%.80s\" is not a Debian suite", suite);
    if (!vm_recipe_name_ok(kernel))
        return err_set(e, -EINVAL, "default_kernel: \"%.80s\" is not a kernel name", kernel);
    r->name = xstrdup(own);
    r->description = xstrdup(description);
    r->suite = xstrdup(suite);
    r->default_kernel = xstrdup(kernel);
    return 0;
}

static int read_all(const struct json_obj *o, const char *name, struct vm_recipe *r, struct err *e)
{
    int rc;
    if ((rc = json_check_keys(o, top_keys, e)) < 0 || (rc = read_names(o, name, r, e)) < 0 ||
        (rc = read_list(o, "apt", apt_ok, "a Debian package name", &r->apt, e)) < 0 ||
        (rc = read_list(o, "pip", requirement_ok, "a pip requirement", &r->pip, e)) < 0 ||
        (rc = read_list(o, "npm", requirement_ok, "an npm package", &r->npm, e)) < 0 ||
        (rc = read_files(o, r, e)) < 0 || (rc = read_env(o, r, e)) < 0 ||
        (rc = read_specs(o, r, e)) < 0 || (rc = read_code(o, "preload", &r->preload, e)) < 0 ||
        (rc = read_code(o, "warmup", &r->warmup, e)) < 0 || (rc = read_limits(o, r, e)) < 0)
        return rc;
    return check_tools(r, e);
}

int vm_recipe_parse(struct slice text, const char *name, const char *folder, struct vm_recipe **ret,
                    struct err *e)
{
    json_t *doc = json_parse(text, e);
    if (!doc)
        return -EINVAL;
    struct vm_recipe *r = xnew(struct vm_recipe);
    struct json_obj o;
    r->folder = xstrdup(folder);
    int rc = json_obj_of(doc, "", &o, e);
    if (rc == 0)
        rc = read_all(&o, name, r, e);
    json_decref(doc);
    if (rc < 0) {
        vm_recipe_free(r);
        return rc;
    }
    *ret = r;
    return 0;
}

int vm_recipe_load(const char *path, struct vm_recipe **ret, struct err *e)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return err_errno(e, errno, "%s", path);
    CLEANUP(freep) char *real = S_ISDIR(st.st_mode) ? realpath(path, NULL) : NULL;
    CLEANUP(freep) char *file = real ? fs_join(real, "template.json") : realpath(path, NULL);
    if (!file)
        return err_errno(e, errno, "%s", path);
    CLEANUP(freep) char *folder = xstrndup(file, (size_t)(strrchr(file, '/') - file));
    const char *base = strrchr(folder, '/');
    struct buf b;
    int r = fs_read_file(file, VM_RECIPE_MAX, &b, e);
    if (r < 0)
        return r;
    struct err inner = { 0 };
    r = vm_recipe_parse(buf_slice(&b), base ? base + 1 : "template", folder, ret, &inner);
    buf_fini(&b);
    return r < 0 ? err_set(e, r, "%s: %s", file, inner.msg) : 0;
}

void vm_recipe_free(struct vm_recipe *r)
{
    if (!r)
        return;
    free_list(r->apt);
    free_list(r->pip);
    free_list(r->npm);
    for (size_t i = 0; i < r->n_files; i++) {
        free(r->files[i].path);
        free(r->files[i].source);
        free(r->files[i].content);
    }
    free(r->files);
    json_decref(r->env);
    json_decref(r->kernelspecs);
    char *strings[] = { r->name,           r->description, r->folder, r->suite,
                        r->default_kernel, r->preload,     r->warmup };
    for (size_t i = 0; i < sizeof(strings) / sizeof(*strings); i++)
        free(strings[i]);
    free(r);
}

static json_t *list_json(char **list)
{
    json_t *a = json_array();
    for (; *list; list++)
        json_array_append_new(a, json_string(*list));
    return a;
}

int vm_recipe_root_inputs(const struct vm_recipe *r, json_t **ret, struct err *e)
{
    json_t *files = json_array();
    for (size_t i = 0; i < r->n_files; i++) {
        const struct vm_recipe_file *f = &r->files[i];
        char sha[65];
        int rc = 0;
        if (f->source)
            rc = fs_sha256_file(f->source, sha, e);
        else
            fs_sha256(slice_str(f->content), sha);
        if (rc < 0) {
            json_decref(files);
            return rc;
        }
        json_array_append_new(files, json_pack("{s:s,s:s,s:i}", "path", f->path, "sha256", sha,
                                               "mode", (int)f->mode));
    }
    *ret = json_pack("{s:s,s:o,s:o,s:o,s:o,s:O,s:O}", "suite", r->suite, "apt", list_json(r->apt),
                     "pip", list_json(r->pip), "npm", list_json(r->npm), "files", files,
                     "kernelspecs", r->kernelspecs, "env", r->env);
    return 0;
}

json_t *vm_recipe_snapshot_inputs(const struct vm_recipe *r)
{
    return json_pack("{s:s,s:s?,s:s?,s:I,s:I,s:i}", "default_kernel", r->default_kernel, "preload",
                     r->preload, "warmup", r->warmup, "memory_mb", (json_int_t)r->memory_mb,
                     "disk_mb", (json_int_t)r->disk_mb, "vcpus", (int)r->vcpus);
}
