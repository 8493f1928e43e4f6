/* The root image of a template: packages installed by mmdebstrap into a throw-away tree, recipe
 * files on top, a finishing script inside, then one uncompressed erofs file (decompression under
 * TCG costs more than the disk space).
 *
 * mmdebstrap runs as root or, for other users, in a user namespace where our files cannot be read:
 * so everything goes in and out by its tar-in, sync-in, sync-out and copy-out hooks, which run on
 * the outside. Its temporary tree lies in our work folder, where the next build clears it away if
 * this one is killed. Downloaded packages are kept there until the image is done. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "vm/store.h"
#include "vm/template_priv.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#define IMAGE_FORMAT 3 /* raise when the finishing script or the options change */
#define ARGS_MAX 96u
#define CA_BUNDLE "/etc/ssl/certs/ca-certificates.crt"
/* Where the recipe's own things lie in the tree while it is being made. */
#define STAGE_DIR "cellvisor-build"

/* Runs inside the tree, as its root. Order: what may need the network, then what must be last.
 * Never touches /tmp: the configuration that keeps mmdebstrap's apt inside the tree is there, and
 * without it apt would work on the host. (The image leaves out what is in /tmp anyway.) */
static const char finish_script[] =
    "set -eu\n"
    "cd /\n"
    "S=/" STAGE_DIR "\n"
    "export HOME=/root DEBIAN_FRONTEND=noninteractive\n"
    "[ -s $S/ca.crt ] && export PIP_CERT=$S/ca.crt SSL_CERT_FILE=$S/ca.crt "
    "NODE_EXTRA_CA_CERTS=$S/ca.crt\n"
    "if [ -s $S/pip.txt ]; then\n"
    "    if [ -s $S/pip.conf ]; then export PIP_CONFIG_FILE=$S/pip.conf; fi\n"
    "    python3 -m pip install --break-system-packages --no-cache-dir --root-user-action=ignore "
    "--progress-bar off -r $S/pip.txt\n"
    "fi\n"
    "if [ -s $S/npm.txt ]; then\n"
    "    xargs -d '\\n' npm install --global --prefix /usr/local --no-audit --no-fund "
    "< $S/npm.txt\n"
    "fi\n"
    "if ! grep -q '^user:' /etc/passwd; then\n"
    "    echo 'user:x:1000:1000::/home/user:/bin/bash' >> /etc/passwd\n"
    "    echo 'user:x:1000:' >> /etc/group\n"
    "    echo 'user:*:19000:0:99999:7:::' >> /etc/shadow\n"
    "    cp -r /etc/skel /home/user\n"
    "    chown -R 1000:1000 /home/user\n"
    "    chmod 0755 /home/user\n"
    "fi\n"
    /* File by file: folders that exist keep their modes, links among them stay links. */
    "if [ -d $S/files ]; then\n"
    "    (cd $S/files && find . -type f -exec sh -c 'for f; do mkdir -p \"/${f%/*}\"; "
    "cp -p \"$f\" \"/$f\"; done' sh {} +)\n"
    "    chown -R 1000:1000 /home/user\n"
    "fi\n"
    "mkdir -p /var/cache/cellvisor/matplotlib\n"
    "if [ -e /usr/lib/python3/dist-packages/matplotlib/font_manager.py ] || "
    "python3 -c 'import matplotlib' 2>/dev/null; then\n"
    "    MPLCONFIGDIR=/var/cache/cellvisor/matplotlib python3 -c 'import matplotlib.font_manager'\n"
    "fi\n"
    "chmod -R a+rwX /var/cache/cellvisor/matplotlib\n"
    "mkdir -p /usr/share/cellvisor\n"
    "dpkg-query -W -f '${Package} ${Version}\\n' > /usr/share/cellvisor/packages\n"
    "cp $S/sources.list /etc/apt/sources.list\n"
    "rm -f /etc/apt/apt.conf.d/99mmdebstrap /etc/resolv.conf\n"
    "rm -f /etc/ssh/ssh_host_* /var/lib/systemd/random-seed /var/lib/dbus/machine-id\n"
    ": > /etc/machine-id\n"
    "echo cellvisor > /etc/hostname\n"
    "printf '127.0.0.1\\tlocalhost cellvisor\\n::1\\tlocalhost ip6-localhost ip6-loopback\\n' > "
    "/etc/hosts\n"
    "rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/apt/*.bin /var/log/*.log "
    "/var/log/apt /root/.cache /root/.npm\n"
    "rm -rf $S\n";

/* ---- the recipe's part, as a tar file ---- */

struct staging {
    char *dir; /* what becomes /STAGE_DIR */
    char *tar;
};

static int stage_text(const struct staging *s, const char *name, struct slice text, mode_t mode,
                      struct err *e)
{
    CLEANUP(freep) char *path = fs_join(s->dir, name);
    CLEANUP(freep) char *parent = xstrndup(path, (size_t)(strrchr(path, '/') - path));
    int r = fs_mkdir_p(parent, 0755, e);
    if (r == 0)
        r = fs_write_atomic(path, text, mode, e);
    if (r == 0 && chmod(path, mode) < 0) /* umask has no say here */
        r = err_errno(e, errno, "%s", path);
    return r;
}

static int stage_list(const struct staging *s, const char *name, char **list, struct err *e)
{
    struct buf b;
    int r = 0;
    buf_init(&b, 1u << 20);
    for (; r == 0 && *list; list++)
        r = buf_printf(&b, "%s\n", *list);
    if (r == 0)
        r = stage_text(s, name, buf_slice(&b), 0644, e);
    buf_fini(&b);
    return r;
}

static int stage_files(const struct staging *s, const struct vm_recipe *recipe, struct err *e)
{
    for (size_t i = 0; i < recipe->n_files; i++) {
        const struct vm_recipe_file *f = &recipe->files[i];
        CLEANUP(freep) char *name = xasprintf("files%s", f->path);
        struct buf b;
        int r = 0;
        buf_init(&b, VM_RECIPE_FILE_MAX);
        if (f->source)
            r = fs_read_file(f->source, VM_RECIPE_FILE_MAX, &b, e);
        else
            r = buf_append_str(&b, f->content);
        if (r == 0)
            r = stage_text(s, name, buf_slice(&b), f->mode, e);
        buf_fini(&b);
        if (r < 0)
            return r;
    }
    return 0;
}

static int stage_specs(const struct staging *s, const struct vm_recipe *recipe, struct err *e)
{
    const char *name;
    json_t *spec;
    json_object_foreach(recipe->kernelspecs, name, spec)
    {
        CLEANUP(freep)
        char *path = xasprintf("files/usr/local/share/jupyter/kernels/%s/kernel.json", name);
        CLEANUP(freep) char *text = json_dumps(spec, JSON_INDENT(1) | JSON_SORT_KEYS);
        int r = stage_text(s, path, slice_str(text), 0644, e);
        if (r < 0)
            return r;
    }
    return 0;
}

/* The host's trusted certificates and pip configuration, for as long as the build lasts: package
 * indexes may be private, or behind a proxy that terminates TLS. */
static int stage_host(const struct staging *s, struct err *e)
{
    static const char *const copies[][2] = { { CA_BUNDLE, "ca.crt" },
                                             { "/etc/pip.conf", "pip.conf" } };
    int r = 0;
    for (size_t i = 0; r == 0 && i < 2; i++) {
        struct buf b;
        if (fs_read_file(copies[i][0], 8u << 20, &b, NULL) < 0)
            continue;
        r = stage_text(s, copies[i][1], buf_slice(&b), 0644, e);
        buf_fini(&b);
    }
    return r;
}

static int stage_all(struct tb *b, const struct staging *s, struct err *e)
{
    CLEANUP(freep) char *sources = tb_sources(b, true);
    CLEANUP(freep) char *parent = xstrndup(s->dir, (size_t)(strrchr(s->dir, '/') - s->dir));
    int r = vm_store_remove_tree(s->dir, e);
    if (r == 0)
        r = fs_mkdir_p(s->dir, 0755, e);
    if (r == 0)
        r = stage_text(s, "finish.sh", slice_str(finish_script), 0644, e);
    if (r == 0)
        r = stage_text(s, "sources.list", slice_str(sources), 0644, e);
    if (r == 0)
        r = stage_list(s, "pip.txt", b->recipe->pip, e);
    if (r == 0)
        r = stage_list(s, "npm.txt", b->recipe->npm, e);
    if (r == 0)
        r = stage_files(s, b->recipe, e);
    if (r == 0)
        r = stage_specs(s, b->recipe, e);
    if (r == 0)
        r = stage_host(s, e);
    if (r < 0)
        return r;
    const char *const argv[] = { "tar", "-C",   parent,    "--owner=0", "--group=0",
                                 "-cf", s->tar, STAGE_DIR, NULL };
    struct tb_cmd cmd = { .argv = argv, .keep_fd = -1, .out_fd = -1 };
    return tb_run_ok(b, &cmd, "packing the recipe's files", e);
}

/* ---- resolve: do the packages exist, how many, how big ---- */

void tb_count_uris(const char *text, struct tb_plan *p)
{
    for (; text && *text; text += strcspn(text, "\n"), text += *text == '\n') {
        if (*text != '\'')
            continue;
        const char *size = memchr(text, ' ', strcspn(text, "\n"));
        size = size ? strchr(size + 1, ' ') : NULL;
        p->packages++;
        p->download_bytes += size ? strtoull(size + 1, NULL, 10) : 0;
    }
}

static int resolve(struct tb *b, const char *work, struct tb_plan *ret, struct err *e)
{
    CLEANUP(freep) char *dir = fs_join(work, "apt");
    struct tb_apt apt;
    if (!b->mirror) {
        int rc = tb_mirror(b, e);
        if (rc < 0)
            return rc;
    }
    int r = tb_apt_open(b, dir, &apt, e);
    if (r < 0)
        return r;
    const char **argv = xcalloc(VM_RECIPE_LIST_MAX + 16, sizeof(*argv));
    static const char *const base[] = { "apt-get", "-qq",        "--print-uris", "install",
                                        "--",      "base-files", "apt" };
    size_t n = 0;
    for (size_t i = 0; i < sizeof(base) / sizeof(*base); i++)
        argv[n++] = base[i];
    for (char **p = b->recipe->apt; *p; p++)
        argv[n++] = *p;
    struct buf out;
    r = tb_run_text(b, argv, (const char *const *)apt.env, 4u << 20, &out, "resolving packages", e);
    free(argv);
    tb_apt_close(&apt);
    if (r < 0)
        return r;
    tb_count_uris(buf_cstr(&out), ret);
    buf_fini(&out);
    (void)vm_store_remove_tree(dir, NULL);
    return 0;
}

/* Rough, and rather high: tree and image are each about five times the packages. */
static int check_space(struct tb *b, const struct tb_plan *p, struct err *e)
{
    uint64_t need = p->download_bytes * 12 + (b->recipe->memory_mb << 20) + (200u << 20);
    uint64_t have = fs_free_bytes(b->spec->state_dir);
    if (!have || have >= need)
        return 0;
    return err_set(e, -ENOSPC,
                   "not enough room in %s: the build needs about %" PRIu64 " MB, %" PRIu64
                   " MB are free",
                   b->spec->state_dir, need >> 20, have >> 20);
}

/* ---- packages ---- */

struct install {
    struct tb_plan plan;
    unsigned fetched, unpacked, configured;
};

static void on_install_line(struct tb *b, void *ctx, const char *line)
{
    struct install *in = ctx;
    double n = in->plan.packages ? in->plan.packages : 1;
    if (!strncmp(line, "Get:", 4))
        in->fetched++;
    else if (!strncmp(line, "Unpacking ", 10))
        in->unpacked++;
    else if (!strncmp(line, "Setting up ", 11))
        in->configured++;
    else if (strncmp(line, "Collecting ", 11) != 0 &&
             strncmp(line, "Installing collected", 20) != 0)
        return;
    double f = 0.15 * in->fetched / n + 0.25 * in->unpacked / n + 0.5 * in->configured / n;
    tb_step(b, f < 0.95 ? f : 0.95, "%.60s", line);
}

struct args {
    const char *argv[ARGS_MAX];
    char *owned[ARGS_MAX];
    size_t n, n_owned;
};

static void arg(struct args *a, const char *word)
{
    if (a->n + 1 < ARGS_MAX)
        a->argv[a->n++] = word;
}

__attribute__((format(printf, 2, 3))) static void argf(struct args *a, const char *fmt, ...)
{
    va_list ap;
    char *word = NULL;
    va_start(ap, fmt);
    if (a->n_owned == ARGS_MAX || vasprintf(&word, fmt, ap) < 0)
        word = NULL;
    va_end(ap);
    if (!word)
        return;
    a->owned[a->n_owned++] = word;
    arg(a, word);
}

static void args_fini(struct args *a)
{
    for (size_t i = 0; i < a->n_owned; i++)
        free(a->owned[i]);
}

static void add_options(struct args *a, struct tb *b)
{
    static const char *const fixed[] = {
        "mmdebstrap",
        "--verbose",
        "--variant=apt",
        "--format=null",
        "--architectures=amd64",
        /* The archives folder is filled before the download starts. */
        /* Its clean-up would only change a tree that nobody looks at again. */
        "--skip=download/empty,check/empty,output/dev,cleanup",
        "--aptopt=APT::Install-Recommends \"false\"",
        "--aptopt=Acquire::Languages \"none\"",
        "--aptopt=Acquire::Retries \"3\"",
        /* The tree lives for a minute: no fsync. Excluded files do not serve a kernel; tests/ of
         * Python packages must stay, or their installation fails in py3compile. */
        "--dpkgopt=force-unsafe-io",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/info/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/unicode/*",
    };
    for (size_t i = 0; i < sizeof(fixed) / sizeof(*fixed); i++)
        arg(a, fixed[i]);
    char **acquire = tb_apt_acquire(b);
    for (size_t i = 0; acquire[i]; i++) {
        argf(a, "--aptopt=%s", acquire[i]);
        free(acquire[i]);
    }
    free(acquire);
}

/* "--include=a,b,c" */
static void add_include(struct args *a, char **apt)
{
    struct buf b;
    if (!*apt)
        return;
    buf_init(&b, 1u << 20);
    for (; *apt; apt++)
        (void)buf_printf(&b, "%s,", *apt);
    buf_truncate(&b, buf_slice(&b).n - 1);
    const char *list = buf_cstr(&b);
    if (list)
        argf(a, "--include=%s", list);
    buf_fini(&b);
}

/* Names are checked by the recipe: no character that means anything to a shell. */
static void add_download_hook(struct args *a, char **apt)
{
    struct buf b;
    buf_init(&b, 1u << 20);
    for (; *apt; apt++)
        (void)buf_printf(&b, " '%s'", *apt);
    const char *list = buf_cstr(&b);
    if (list && *list)
        argf(a,
             "--essential-hook=APT_CONFIG=\"$MMDEBSTRAP_APT_CONFIG\" apt-get --yes --download-only "
             "install%s",
             list);
    buf_fini(&b);
}

static void add_hooks(struct args *a, const char *work, const struct staging *s, char **apt,
                      bool as_root)
{
    /* Packages that an interrupted run has fetched are used again; those of this run are saved
     * before the long part. */
    argf(a, "--setup-hook=mkdir -p \"$1/var/cache/apt/archives\"");
    argf(a, "--setup-hook=sync-in '%s/debs' /var/cache/apt/archives", work);
    add_download_hook(a, apt);
    argf(a, "--essential-hook=sync-out /var/cache/apt/archives '%s/debs'", work);
    argf(a, "--customize-hook=tar-in '%s' /", s->tar);
    argf(a, "--customize-hook=chroot \"$1\" /bin/sh /" STAGE_DIR "/finish.sh");
    argf(a, "--customize-hook=copy-out /usr/share/cellvisor/packages '%s/out'", work);
    /* Times are kept: Python would take every .pyc for stale and compile all it imports. */
    static const char mkfs[] =
        "mkfs.erofs --quiet -x-1 --preserve-mtime -U 00000000-0000-0000-0000-000000000000";
    if (as_root) {
        argf(a,
             "--customize-hook=%s "
             "--exclude-regex='^((dev|proc|sys|run|tmp)/.+|etc/apt/apt.conf.d/00mmdebstrap)$' "
             "'%s/out/root.erofs' \"$1\" >/dev/null",
             mkfs, work);
        return;
    }
    argf(a,
         "--customize-hook=%s "
         "--exclude-regex='^((dev|proc|sys|run|tmp)/.+|etc/apt/apt.conf.d/00mmdebstrap|\\.image)$' "
         "\"$1/.image\" \"$1\" >/dev/null",
         mkfs);
    argf(a, "--customize-hook=copy-out /.image '%s/out'", work);
}

/* Where mmdebstrap makes its tree. Our work folder as root; else a place that the users mapped into
 * the namespace can reach, which a home folder is not. */
static char *tmp_variable(const char *work)
{
    const char *own = getenv("TMPDIR");
    if (geteuid() == 0)
        return xasprintf("TMPDIR=%s/tmp", work);
    return xasprintf("TMPDIR=%s", own && *own ? own : "/var/tmp");
}

static int install(struct tb *b, const char *work, const struct tb_plan *plan, int lock_fd,
                   struct err *e)
{
    struct staging s = { .dir = xasprintf("%s/stage/" STAGE_DIR, work),
                         .tar = xasprintf("%s/stage.tar", work) };
    CLEANUP(freep) char *sources = tb_sources(b, false);
    CLEANUP(freep) char *tmp = tmp_variable(work);
    struct args a = { .n = 0 };
    struct install in = { .plan = *plan };
    int r = stage_all(b, &s, e);
    if (r == 0) {
        add_options(&a, b);
        add_include(&a, b->recipe->apt);
        add_hooks(&a, work, &s, b->recipe->apt, geteuid() == 0);
        arg(&a, b->recipe->suite);
        arg(&a, "-"); /* no output of its own */
        char *save;
        for (char *l = strtok_r(sources, "\n", &save); l; l = strtok_r(NULL, "\n", &save))
            arg(&a, l);
        char **env = tb_env(tmp);
        struct tb_cmd cmd = { .argv = a.argv,
                              .env = (const char *const *)env,
                              .keep_fd = lock_fd,
                              .out_fd = -1,
                              .on_line = on_install_line,
                              .ctx = &in };
        r = tb_run_ok(b, &cmd, "installing packages", e);
        tb_env_free(env);
    }
    args_fini(&a);
    free(s.dir);
    free(s.tar);
    return r;
}

/* ---- the stage ---- */

/* It must be on the disk before the rename that makes it count. */
static int sync_file(const char *path, struct err *e)
{
    CLEANUP(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 || fdatasync(fd) < 0 ? err_errno(e, errno, "%s", path) : 0;
}

static int write_facts(const char *out, struct err *e)
{
    CLEANUP(freep) char *image = fs_join(out, "root.erofs");
    CLEANUP(freep) char *list = fs_join(out, "packages");
    CLEANUP(freep) char *path = fs_join(out, "root.json");
    char sha[65];
    struct stat st;
    struct buf b;
    int r = sync_file(image, e);
    if (r < 0 || (r = fs_sha256_file(image, sha, e)) < 0 ||
        (r = fs_read_file(list, 4u << 20, &b, e)) < 0)
        return r;
    json_t *packages = json_object();
    char *save, *text = buf_cstr(&b);
    char *line = text ? strtok_r(text, "\n", &save) : NULL;
    for (; line; line = strtok_r(NULL, "\n", &save)) {
        char *blank = strchr(line, ' ');
        if (!blank)
            continue;
        *blank = '\0';
        json_object_set_new(packages, line, json_string(blank + 1));
    }
    buf_fini(&b);
    if (stat(image, &st) < 0) {
        json_decref(packages);
        return err_errno(e, errno, "%s", image);
    }
    json_t *facts = json_pack("{s:s,s:I,s:o}", "sha256", sha, "bytes", (json_int_t)st.st_size,
                              "packages", packages);
    CLEANUP(freep) char *out_text = json_dumps(facts, JSON_INDENT(1) | JSON_SORT_KEYS);
    json_decref(facts);
    unlink(list);
    return fs_write_atomic(path, slice_str(out_text), 0644, e);
}

/* Everything but the downloaded packages of an interrupted run is started afresh. */
static int prepare(const char *work, struct err *e)
{
    static const char *const fresh[] = { "tmp", "out", "stage", "apt" };
    for (size_t i = 0; i < sizeof(fresh) / sizeof(*fresh); i++) {
        CLEANUP(freep) char *p = fs_join(work, fresh[i]);
        int r = vm_store_remove_tree(p, e);
        if (r < 0 || (r = fs_mkdir_p(p, 0755, e)) < 0)
            return r;
    }
    CLEANUP(freep) char *debs = fs_join(work, "debs");
    CLEANUP(freep) char *tmp = fs_join(work, "tmp");
    if (chmod(tmp, 01777) < 0)
        return err_errno(e, errno, "%s", tmp);
    return fs_mkdir_p(debs, 0755, e);
}

static int build_root(struct tb *b, const char *work, const char *final, int lock_fd, struct err *e)
{
    CLEANUP(freep) char *out = fs_join(work, "out");
    CLEANUP(freep) char *hidden = fs_join(out, ".image");
    CLEANUP(freep) char *image = fs_join(out, "root.erofs");
    struct tb_plan plan = { 0 };
    tb_begin(b, TB_RESOLVE, "asking the mirror");
    int r = prepare(work, e);
    if (r == 0)
        r = resolve(b, work, &plan, e);
    if (r == 0)
        r = check_space(b, &plan, e);
    if (r < 0)
        return r;
    tb_end(b, false);
    tb_begin(b, TB_PACKAGES, "installing packages");
    r = install(b, work, &plan, lock_fd, e);
    if (r < 0)
        return r;
    tb_end(b, false);
    tb_begin(b, TB_IMAGE, "checking the root image");
    if (fs_exists(hidden) && rename(hidden, image) < 0)
        return err_errno(e, errno, "%s", image);
    r = write_facts(out, e);
    if (r == 0)
        r = vm_store_remove_tree(final, e);
    if (r == 0 && rename(out, final) < 0)
        r = err_errno(e, errno, "%s", final);
    if (r == 0)
        (void)vm_store_remove_tree(work, NULL);
    return r;
}

int tb_stage_root(struct tb *b, struct err *e)
{
    json_t *inputs = NULL;
    char key[65], script[65];
    int r = vm_recipe_root_inputs(b->recipe, &inputs, e);
    if (r < 0)
        return r;
    fs_sha256(slice_str(finish_script), script);
    json_object_set_new(inputs, "image", json_integer(IMAGE_FORMAT));
    json_object_set_new(inputs, "finish", json_string(script));
    tb_key(inputs, key);
    CLEANUP(freep) char *name = xasprintf("root-%.16s", key);
    CLEANUP(freep) char *dir = vm_store_path(b->spec->state_dir, "cache", name);
    CLEANUP(freep) char *work = xasprintf("%s/cache/.tmp-%s", b->spec->state_dir, name);
    CLEANUP(freep) char *facts = fs_join(dir, "root.json");
    b->stage = TB_RESOLVE;
    r = tb_lock_stage(b, name, facts, &b->root_lock, e);
    if (r < 0)
        return r;
    bool cached = !b->spec->refresh && fs_exists(facts);
    if (!cached)
        r = build_root(b, work, dir, b->root_lock, e);
    if (r < 0)
        return r;
    b->root = json_load_file(facts, 0, NULL);
    if (!json_is_string(json_object_get(b->root, "sha256")))
        return err_set(e, -EINVAL, "%s is damaged: remove the folder and build again", facts);
    (void)vm_store_share_lock(b->root_lock);
    b->root_dir = TAKE_PTR(dir);
    if (cached)
        tb_begin(b, TB_IMAGE, "root image");
    tb_end(b, cached);
    return 0;
}
