#include "guest-kernel-shim/spec.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/json.h"
#include "common/mem.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static void spec_free(struct shim_spec *s)
{
    free(s->name);
    free(s->dir);
    free(s->prefix);
    json_decref(s->json);
    json_decref(s->resources);
    free(s);
}
DEFINE_CLEANUP(struct shim_spec *, spec_free)

static bool is_resource(const char *file)
{
    if (strcmp(file, "kernel.js") == 0 || strcmp(file, "kernel.css") == 0)
        return true;
    const char *dot = strrchr(file, '.');
    return strncmp(file, "logo-", 5) == 0 && dot &&
           (strcmp(dot, ".png") == 0 || strcmp(dot, ".svg") == 0);
}

/* Read one resource into spec->resources; what does not fit is left out with a log line. */
static void read_resource(struct shim_catalog *c, struct shim_spec *s, const char *file,
                          const struct log_ctx *log)
{
    CLEANUP(freep) char *path = fs_join(s->dir, file);
    CLEANUP(freep) char *text = NULL;
    struct buf data = { 0 };
    struct err e = { 0 };
    struct stat st;

    if (stat(path, &st) < 0 || !S_ISREG(st.st_mode))
        return;
    if (fs_read_file(path, SHIM_RESOURCE_MAX, &data, &e) < 0) {
        log_warn(log, "kernelspec \"%s\": %s left out: %s", s->name, file, e.msg);
    } else if (c->resource_bytes + data.len > SHIM_RESOURCES_MAX) {
        log_warn(log, "kernelspec \"%s\": %s left out: all resources together exceed %u bytes",
                 s->name, file, SHIM_RESOURCES_MAX);
    } else {
        c->resource_bytes += data.len;
        text = xmalloc(id_base64_len(data.len) + 1);
        id_base64(text, buf_slice(&data));
        /* A name that is no UTF-8 cannot be a JSON key: set fails and the file is left out. */
        if (json_object_set_new(s->resources, file, json_string(text)) < 0)
            log_warn(log, "kernelspec \"%s\": a resource name is not UTF-8", s->name);
    }
    buf_fini(&data);
}

static void read_resources(struct shim_catalog *c, struct shim_spec *s, const struct log_ctx *log)
{
    DIR *d = opendir(s->dir);
    struct dirent *entry;

    s->resources = json_object();
    if (!d)
        return;
    while ((entry = readdir(d)))
        if (is_resource(entry->d_name))
            read_resource(c, s, entry->d_name, log);
    closedir(d);
}

static int check_argv(const json_t *argv, struct err *e)
{
    size_t i;
    json_t *v;

    if (!json_is_array(argv) || json_array_size(argv) == 0)
        return err_set(e, -EINVAL, "argv: must be a non-empty array of strings");
    json_array_foreach(argv, i, v)
    {
        if (!json_is_string(v))
            return err_set(e, -EINVAL, "argv[%zu]: not a string", i);
    }
    return 0;
}

static int check_env(const json_t *env, struct err *e)
{
    const char *key;
    json_t *v;

    if (!env || json_is_null(env))
        return 0;
    if (!json_is_object(env))
        return err_set(e, -EINVAL, "env: not an object");
    json_object_foreach((json_t *)(uintptr_t)env, key, v)
    {
        if (!json_is_string(v))
            return err_set(e, -EINVAL, "env.%s: not a string", key);
    }
    return 0;
}

static int check_spec(struct shim_spec *s, struct err *e)
{
    const char *mode = "signal";
    struct json_obj o;
    int r;

    r = json_obj_of(s->json, "", &o, e);
    if (r < 0)
        return r;
    s->display_name = s->name;
    s->language = "";
    if ((r = check_argv(json_object_get(s->json, "argv"), e)) < 0 ||
        (r = check_env(json_object_get(s->json, "env"), e)) < 0 ||
        (r = json_get_str(&o, "display_name", &s->display_name, e)) < 0 ||
        (r = json_get_str(&o, "language", &s->language, e)) < 0 ||
        (r = json_get_str(&o, "interrupt_mode", &mode, e)) < 0)
        return r;
    s->interrupt_by_message = strcmp(mode, "message") == 0;
    return 0;
}

/* PREFIX/share/jupyter/kernels/NAME -> PREFIX; other shapes give "/usr". */
static char *prefix_of(const char *kernels_dir)
{
    const char *tail = "/share/jupyter/kernels";
    size_t n = strlen(kernels_dir), t = strlen(tail);

    if (n > t && strcmp(kernels_dir + n - t, tail) == 0)
        return xstrndup(kernels_dir, n - t);
    return xstrdup("/usr");
}

static void load_one(struct shim_catalog *c, const char *kernels_dir, const char *name,
                     const struct log_ctx *log)
{
    CLEANUP(spec_freep) struct shim_spec *s = xnew(struct shim_spec);
    CLEANUP(freep) char *file = NULL;
    struct err e = { 0 };

    s->name = xstrdup(name);
    s->dir = fs_join(kernels_dir, name);
    file = fs_join(s->dir, "kernel.json");
    if (!fs_exists(file))
        return;
    if (shim_catalog_find(c, name))
        return; /* an earlier folder has it */
    if (c->n == SHIM_SPECS_MAX) {
        log_warn(log, "kernelspec \"%s\" skipped: there are more than %u", name, SHIM_SPECS_MAX);
        return;
    }
    s->prefix = prefix_of(kernels_dir);
    s->json = json_parse_file(file, SHIM_RESOURCE_MAX, &e);
    if (!s->json || check_spec(s, &e) < 0) {
        log_warn(log, "kernelspec \"%s\" skipped: %s: %s", name, file, e.msg);
        return;
    }
    json_t *as_json = json_string(name);
    if (!as_json) {
        log_warn(log, "kernelspec \"%s\" skipped: its name is not UTF-8", name);
        return;
    }
    json_decref(as_json);
    read_resources(c, s, log);
    c->specs[c->n++] = TAKE_PTR(s);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

void shim_catalog_load(struct shim_catalog *c, const char *const *dirs, const struct log_ctx *log)
{
    *c = (struct shim_catalog) { 0 };
    for (; *dirs; dirs++) {
        struct dirent **entries;
        int n = scandir(*dirs, &entries, NULL, by_name);

        for (int i = 0; i < n; i++) {
            if (entries[i]->d_name[0] != '.')
                load_one(c, *dirs, entries[i]->d_name, log);
            free(entries[i]);
        }
        if (n >= 0)
            free(entries);
    }
}

void shim_catalog_fini(struct shim_catalog *c)
{
    for (size_t i = 0; i < c->n; i++)
        spec_free(c->specs[i]);
    c->n = 0;
}

/* ---- search path ---- */

struct dir_list {
    char **dirs;
    size_t n;
};

static void add_dir(struct dir_list *l, char *dir) /* takes dir */
{
    for (size_t i = 0; i < l->n; i++) {
        if (strcmp(l->dirs[i], dir) == 0) {
            free(dir);
            return;
        }
    }
    l->dirs = xrealloc(l->dirs, (l->n + 2) * sizeof(*l->dirs));
    l->dirs[l->n++] = dir;
    l->dirs[l->n] = NULL;
}

/* The folder above the bin folder that PATH finds python3 in; NULL: none. Links stay unresolved:
 * a virtual environment's python3 is a link to the system's. */
static char *python_prefix(void)
{
    const char *path = getenv("PATH");

    while (path && *path) {
        size_t n = strcspn(path, ":");
        CLEANUP(freep) char *bin = xstrndup(path, n);
        CLEANUP(freep) char *python = fs_join(bin, "python3");
        char *slash;

        if (n && access(python, X_OK) == 0 && (slash = strrchr(bin, '/'))) {
            *slash = '\0';
            return xstrdup(*bin ? bin : "/");
        }
        path += n + (path[n] == ':');
    }
    return NULL;
}

char **shim_spec_dirs(void)
{
    struct dir_list l = { 0 };
    const char *path = getenv("JUPYTER_PATH"), *home = getenv("HOME"), *env;
    char *prefix;

    while (path && *path) {
        size_t n = strcspn(path, ":");
        if (n)
            add_dir(&l, xasprintf("%.*s/kernels", (int)n, path));
        path += n + (path[n] == ':');
    }
    if (home && *home)
        add_dir(&l, xasprintf("%s/.local/share/jupyter/kernels", home));
    env = getenv("VIRTUAL_ENV");
    if (env && *env)
        add_dir(&l, xasprintf("%s/share/jupyter/kernels", env));
    prefix = python_prefix();
    if (prefix)
        add_dir(&l, xasprintf("%s/share/jupyter/kernels", prefix));
    free(prefix);
    add_dir(&l, xstrdup("/usr/local/share/jupyter/kernels"));
    add_dir(&l, xstrdup("/usr/share/jupyter/kernels"));
    return l.dirs;
}

void shim_dirs_free(char **dirs)
{
    for (char **d = dirs; d && *d; d++)
        free(*d);
    free(dirs);
}

/* ---- queries ---- */

const struct shim_spec *shim_catalog_find(const struct shim_catalog *c, const char *name)
{
    for (size_t i = 0; i < c->n; i++)
        if (strcmp(c->specs[i]->name, name) == 0)
            return c->specs[i];
    return NULL;
}

const char *shim_catalog_default(const struct shim_catalog *c)
{
    if (shim_catalog_find(c, "python3"))
        return "python3";
    for (size_t i = 0; i < c->n; i++)
        if (strcmp(c->specs[i]->language, "python") == 0)
            return c->specs[i]->name;
    return c->n ? c->specs[0]->name : NULL;
}

char *shim_catalog_json(const struct shim_catalog *c)
{
    const char *def = shim_catalog_default(c);
    json_t *specs = json_object(), *root;
    char *text;

    for (size_t i = 0; i < c->n; i++)
        json_object_set_new(specs, c->specs[i]->name,
                            json_pack("{s:s, s:O, s:O}", "name", c->specs[i]->name, "spec",
                                      c->specs[i]->json, "resources", c->specs[i]->resources));
    root = json_pack("{s:s?, s:o}", "default", def, "kernelspecs", specs);
    text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

void shim_catalog_names(const struct shim_catalog *c, char *ret, size_t size)
{
    size_t used = 0;

    snprintf(ret, size, "none");
    for (size_t i = 0; i < c->n && used < size; i++)
        used += (size_t)snprintf(ret + used, size - used, "%s%s", i ? ", " : "", c->specs[i]->name);
}
