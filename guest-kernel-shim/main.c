/* cellvisor-shim: PID 1 of a Cellvisor guest, and the same services as a plain process.
 *   (as PID 1)                             boot the guest, serve the virtio port
 *   --local --link-fd N --run-dir DIR      serve descriptor N on this machine; no isolation
 *   --specs                                print the kernelspecs found, as JSON */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/log.h"
#include "common/mem.h"
#include "guest-kernel-shim/init.h"
#include "guest-kernel-shim/shim.h"
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "Usage: cellvisor-shim --local --link-fd N --run-dir DIR   serve kernels on this machine\n"
    "       cellvisor-shim --specs                             print the kernelspecs found\n"
    "       cellvisor-shim --version\n"
    "As PID 1 of a guest it takes no arguments: it boots the guest and serves its virtio port.\n"
    "Environment: JUPYTER_PATH, VIRTUAL_ENV, PATH (where kernelspecs are looked for),\n"
    "CELLVISOR_HOOK_DIR (folder of cellvisor_hook.py), CELLVISOR_LOG=debug|info|warn|error,\n"
    "CELLVISOR_START_TIMEOUT_MS, CELLVISOR_GRACE_MS.\n";

static int print_specs(void)
{
    struct shim_catalog c;
    char **dirs = shim_spec_dirs();
    CLEANUP(freep) char *text = NULL;

    shim_catalog_load(&c, (const char *const *)dirs, NULL);
    shim_dirs_free(dirs);
    text = shim_catalog_json(&c);
    printf("%s\n", text);
    shim_catalog_fini(&c);
    return fflush(stdout) == 0 ? 0 : 1;
}

/* cellvisor_hook.py: from the environment, beside the installed binary, or in the source tree that
 * a build directory was made from. NULL: there is none, kernels run without. */
static char *find_hook_dir(void)
{
    const char *env = getenv("CELLVISOR_HOOK_DIR");
    char exe[512];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    char *slash;

    if (env && *env)
        return xstrdup(env);
    if (n > 0) {
        exe[n] = '\0';
        if ((slash = strrchr(exe, '/')))
            *slash = '\0';
        CLEANUP(freep) char *dir = xasprintf("%s/../lib/cellvisor", exe);
        CLEANUP(freep) char *file = fs_join(dir, "cellvisor_hook.py");
        if (fs_exists(file))
            return TAKE_PTR(dir);
    }
    if (fs_exists(SHIM_SOURCE_DIR "/python/cellvisor_hook.py"))
        return xstrdup(SHIM_SOURCE_DIR "/python");
    return NULL;
}

static int serve(const struct shim_config *c)
{
    struct shim *s = xnew(struct shim);
    struct err e = { 0 };
    int r = shim_init(s, c, &e);

    if (r < 0)
        log_error(NULL, "%s", e.msg);
    else
        shim_run(s);
    shim_fini(s);
    free(s);
    return r < 0 ? 1 : 0;
}

static void __attribute__((noreturn)) run_init(void)
{
    struct shim_config c = { .vm = true, .run_dir = INIT_RUN_DIR, .hook_dir = INIT_HOOK_DIR };
    struct err e = { 0 };

    if (init_system(&c.link_fd, &e) < 0)
        log_error(NULL, "init: %s", e.msg);
    else
        serve(&c);
    init_power_off();
}

static void set_log_level(void)
{
    const char *text = getenv("CELLVISOR_LOG");
    enum log_level level = LOG_LEVEL_INFO;

    if (text && log_level_parse(text, &level) < 0)
        fprintf(stderr, "cellvisor-shim: CELLVISOR_LOG=%s is none of error, warn, info, debug\n",
                text);
    log_configure(level, false);
}

int main(int argc, char **argv)
{
    enum { OPT_LOCAL = 1, OPT_FD, OPT_DIR, OPT_SPECS, OPT_VERSION, OPT_HELP };
    static const struct option options[] = {
        { "local", no_argument, NULL, OPT_LOCAL },
        { "link-fd", required_argument, NULL, OPT_FD },
        { "run-dir", required_argument, NULL, OPT_DIR },
        { "specs", no_argument, NULL, OPT_SPECS },
        { "version", no_argument, NULL, OPT_VERSION },
        { "help", no_argument, NULL, OPT_HELP },
        { 0 },
    };
    struct shim_config c = { .link_fd = -1 };
    CLEANUP(freep) char *hook_dir = NULL;
    bool local = false;
    int o;

    set_log_level();
    /* The kernel hands options that it does not know to init: ignore them. */
    if (getpid() == 1 && (argc < 2 || strcmp(argv[1], "--local") != 0))
        run_init();
    while ((o = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (o == OPT_LOCAL) {
            local = true;
        } else if (o == OPT_FD) {
            c.link_fd = (int)strtol(optarg, NULL, 10);
        } else if (o == OPT_DIR) {
            c.run_dir = optarg;
        } else if (o == OPT_SPECS) {
            return print_specs();
        } else if (o == OPT_VERSION) {
            printf("cellvisor-shim %s\n", CELLVISOR_VERSION);
            return 0;
        } else {
            fputs(usage, o == OPT_HELP ? stdout : stderr);
            return o == OPT_HELP ? 0 : 2;
        }
    }
    if (!local || c.link_fd < 0 || !c.run_dir) {
        fputs(usage, stderr);
        return 2;
    }
    hook_dir = find_hook_dir();
    c.hook_dir = hook_dir;
    return serve(&c);
}
