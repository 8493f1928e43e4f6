/* The machine's own apt configuration tells where packages come from: mirror, proxies, credentials.
 * A private apt root (own lists, empty dpkg status, the guest's suite) resolves and downloads
 * without touching the host's state. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/template_priv.h"
#include <errno.h>
#include <string.h>

#define KEYRING "/usr/share/keyrings/debian-archive-keyring.gpg"

/* Variables of ours that would confuse tools or leak into the tree they work on. */
static bool env_dropped(const char *v)
{
    static const char *const gone[] = {
        "LC_",         "LANG",  "LANGUAGE=", "APT_CONFIG=", "TMPDIR=", "PYTHON",
        "VIRTUAL_ENV", "PATH=", "HOME=",     "CELLVISOR_",  "DEBIAN_", "DPKG_"
    };
    static const char *const kept_pip[] = { "PIP_INDEX_URL=",       "PIP_EXTRA_INDEX_URL=",
                                            "PIP_TRUSTED_HOST=",    "PIP_PROXY=",
                                            "PIP_DEFAULT_TIMEOUT=", "PIP_RETRIES=" };
    for (size_t i = 0; i < sizeof(gone) / sizeof(*gone); i++) {
        if (!strncmp(v, gone[i], strlen(gone[i])))
            return true;
    }
    for (size_t i = 0; i < sizeof(kept_pip) / sizeof(*kept_pip); i++) {
        if (!strncmp(v, kept_pip[i], strlen(kept_pip[i])))
            return false;
    }
    return !strncmp(v, "PIP_", 4);
}

char **tb_env(const char *extra)
{
    extern char **environ;
    const char *path = getenv("PATH"), *home = getenv("HOME");
    size_t n = 0, k = 0;
    while (environ[n])
        n++;
    char **env = xcalloc(n + 5, sizeof(*env));
    for (size_t i = 0; i < n; i++) {
        if (!env_dropped(environ[i]))
            env[k++] = xstrdup(environ[i]);
    }
    env[k++] = xstrdup("LC_ALL=C");
    env[k++] = xasprintf("PATH=%s%s/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                         path ? path : "", path && *path ? ":" : "");
    env[k++] = xasprintf("HOME=%s", home ? home : "/root");
    if (extra)
        env[k] = xstrdup(extra);
    return env;
}

void tb_env_free(char **env)
{
    for (size_t i = 0; env && env[i]; i++)
        free(env[i]);
    free(env);
}

/* "'http://host/debian/dists/bookworm/InRelease' name 0": base URL up to /dists/. NULL: another
 * line. */
static char *site_of(const char *line)
{
    const char *dists = strstr(line, "/dists/"), *end = strstr(line, "/InRelease' ");
    if (*line != '\'' || !dists || !end || dists > end)
        return NULL;
    return xstrndup(line + 1, (size_t)(dists - line) - 1);
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !strcmp(s + n - k, tail);
}

void tb_pick_sites(struct tb *b, char *text)
{
    char *save;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *site = site_of(line);
        if (!site)
            continue;
        char **slot = strstr(site, "security") ? &b->mirror_security : &b->mirror;
        if (!*slot || (ends_with(site, "/debian") && !ends_with(*slot, "/debian"))) {
            free(*slot);
            *slot = site;
        } else {
            free(site);
        }
    }
}

int tb_mirror(struct tb *b, struct err *e)
{
    const char *given = b->spec->mirror ? b->spec->mirror : getenv("CELLVISOR_MIRROR");
    if (given && *given) {
        if (strpbrk(given, " \t\n") || !strstr(given, ":/"))
            return err_set(e, -EINVAL, "\"%.100s\" is not the URL of a Debian mirror", given);
        b->mirror = xstrdup(given);
        return 0;
    }
    /* Unlike `indextargets` this does not depend on lists having been fetched. */
    const char *const argv[] = { "apt-get", "update", "--print-uris", NULL };
    struct buf out;
    char **env = tb_env(NULL);
    int r = tb_run_text(b, argv, (const char *const *)env, 1u << 20, &out,
                        "asking apt for the Debian mirror", e);
    tb_env_free(env);
    if (r < 0)
        return r;
    char *text = buf_cstr(&out);
    if (text)
        tb_pick_sites(b, text);
    buf_fini(&out);
    if (!b->mirror)
        return err_set(e, -ENOENT,
                       "apt on this machine names no package mirror: give one with --mirror URL or "
                       "CELLVISOR_MIRROR");
    return 0;
}

char **tb_apt_acquire(struct tb *b)
{
    const char *const argv[] = { "apt-config", "dump", NULL };
    struct buf out;
    char **list = xcalloc(17, sizeof(*list));
    size_t n = 0;
    if (tb_run_text(b, argv, NULL, 4u << 20, &out, "apt-config", NULL) < 0)
        return list;
    char *text = buf_cstr(&out), *save;
    char *line = text ? strtok_r(text, "\n", &save) : NULL;
    for (; line && n < 16; line = strtok_r(NULL, "\n", &save)) {
        bool wanted = !strncmp(line, "Acquire::http", 13) || !strncmp(line, "Acquire::Check-", 15);
        if (wanted && !strstr(line, " \"\";"))
            list[n++] = xstrdup(line);
    }
    buf_fini(&out);
    return list;
}

char *tb_public_url(const char *url)
{
    const char *host = strstr(url, "://");
    if (!host)
        return xstrdup(url);
    host += 3;
    const char *at = memchr(host, '@', strcspn(host, "/"));
    return at ? xasprintf("%.*s%s", (int)(host - url), url, at + 1) : xstrdup(url);
}

char *tb_sources(const struct tb *b, bool without_password)
{
    const char *suite = b->recipe->suite;
    const char *by = without_password ? "[signed-by=" KEYRING "] " : "";
    CLEANUP(freep)
    char *main_url = without_password ? tb_public_url(b->mirror) : xstrdup(b->mirror);
    bool rolling = !strcmp(suite, "sid") || !strcmp(suite, "unstable");
    if (!b->mirror_security || rolling) /* those have no security archive */
        return xasprintf("deb %s%s %s main\n", by, main_url, suite);
    CLEANUP(freep)
    char *security =
        without_password ? tb_public_url(b->mirror_security) : xstrdup(b->mirror_security);
    return xasprintf("deb %s%s %s main\ndeb %s%s %s-security main\n", by, main_url, suite, by,
                     security, suite);
}

/* Own Dir for state, the host's for configuration: proxies, credentials and trust are the host's.
 */
static char *config_text(const char *dir)
{
    return xasprintf("Dir::State \"%s/state\";\n"
                     "Dir::State::lists \"%s/lists\";\n"
                     "Dir::State::status \"%s/status\";\n"
                     "Dir::Cache \"%s/cache\";\n"
                     "Dir::Etc::sourcelist \"%s/sources.list\";\n"
                     "Dir::Etc::sourceparts \"/dev/null\";\n"
                     "Dir::Etc::preferences \"/dev/null\";\n"
                     "Dir::Etc::preferencesparts \"/dev/null\";\n"
                     "APT::Architecture \"amd64\";\n"
                     "APT::Architectures \"amd64\";\n"
                     "APT::Install-Recommends \"false\";\n"
                     "APT::Sandbox::User \"root\";\n"
                     "Acquire::Languages \"none\";\n"
                     "Acquire::Retries \"3\";\n"
                     "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n"
                     "Debug::NoLocking \"true\";\n",
                     dir, dir, dir, dir, dir);
}

static int write_tree(struct tb *b, const char *dir, struct err *e)
{
    static const char *const subs[] = { "state", "lists/partial", "cache/archives/partial" };
    int r = 0;
    for (size_t i = 0; r == 0 && i < sizeof(subs) / sizeof(*subs); i++) {
        CLEANUP(freep) char *p = fs_join(dir, subs[i]);
        r = fs_mkdir_p(p, 0755, e);
    }
    CLEANUP(freep) char *sources = tb_sources(b, false);
    CLEANUP(freep) char *signed_sources = NULL;
    if (fs_exists(KEYRING)) { /* else the host's own trusted keys decide */
        struct buf t;
        buf_init(&t, 64u << 10);
        char *save, *copy = sources;
        for (char *l = strtok_r(copy, "\n", &save); l; l = strtok_r(NULL, "\n", &save))
            (void)buf_printf(&t, "deb [signed-by=" KEYRING "] %s\n", l + 4);
        signed_sources = xstrdup(buf_cstr(&t) ? buf_cstr(&t) : "");
        buf_fini(&t);
    }
    CLEANUP(freep) char *config = config_text(dir);
    CLEANUP(freep) char *config_path = fs_join(dir, "apt.conf");
    CLEANUP(freep) char *sources_path = fs_join(dir, "sources.list");
    CLEANUP(freep) char *status_path = fs_join(dir, "status");
    if (r == 0)
        r = fs_write_atomic(config_path, slice_str(config), 0600, e);
    if (r == 0)
        r = fs_write_atomic(sources_path, slice_str(signed_sources ? signed_sources : sources),
                            0600, e);
    return r < 0 ? r : fs_write_atomic(status_path, SLICE_NULL, 0644, e);
}

int tb_apt_open(struct tb *b, const char *dir, struct tb_apt *ret, struct err *e)
{
    int r = write_tree(b, dir, e);
    if (r < 0)
        return r;
    struct tb_apt a = { .dir = xstrdup(dir) };
    a.config_env = xasprintf("APT_CONFIG=%s/apt.conf", dir);
    a.env = tb_env(a.config_env);
    const char *const argv[] = { "apt-get", "update", "-q", "--error-on=any", NULL };
    struct tb_cmd cmd = {
        .argv = argv, .env = (const char *const *)a.env, .keep_fd = -1, .out_fd = -1
    };
    CLEANUP(freep) char *url = tb_public_url(b->mirror);
    CLEANUP(freep)
    char *what = xasprintf("reading the package lists of Debian %s from %s", b->recipe->suite, url);
    r = tb_run_ok(b, &cmd, what, e);
    if (r < 0) {
        tb_apt_close(&a);
        return r;
    }
    *ret = a;
    return 0;
}

void tb_apt_close(struct tb_apt *a)
{
    free(a->dir);
    free(a->config_env);
    tb_env_free(a->env);
    *a = (struct tb_apt) { 0 };
}
