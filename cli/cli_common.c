/* What several subcommands need: error lines, state directory, where the shim is. */
#include "cli/cli.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include <errno.h>
#include <limits.h>
#include <pwd.h>
#include <string.h>
#include <unistd.h>

int cli_fail(const char *cmd, int code, const struct err *e)
{
    fflush(stdout);
    fprintf(stderr, "cellvisor %s: %s\n", cmd, e && e->msg[0] ? e->msg : "failed");
    return code;
}

static const char *home_dir(void)
{
    const char *home = getenv("HOME");
    if (home && home[0])
        return home;
    const struct passwd *pw = getpwuid(getuid());
    return pw && pw->pw_dir ? pw->pw_dir : "/root";
}

char *cli_state_dir(const char *given, struct err *e)
{
    CLEANUP(freep) char *path = NULL;
    char cwd[PATH_MAX];
    if (!given || !given[0])
        path = xasprintf("%s/.local/share/cellvisor", home_dir());
    else if (strncmp(given, "~/", 2) == 0)
        path = xasprintf("%s/%s", home_dir(), given + 2);
    else if (given[0] == '/' || !getcwd(cwd, sizeof(cwd)))
        path = xstrdup(given);
    else
        path = xasprintf("%s/%s", cwd, given);
    if (fs_mkdir_p(path, 0700, e) < 0) {
        err_wrap(e, e && e->code ? e->code : -EIO, "state directory");
        return NULL;
    }
    return TAKE_PTR(path);
}

char *cli_shim_path(const char *given, struct err *e)
{
    if (given && given[0]) {
        if (access(given, X_OK) == 0)
            return xstrdup(given);
        err_errno(e, errno, "shim %s", given);
        return NULL;
    }
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n > 0) {
        self[n] = 0;
        char *slash = strrchr(self, '/');
        if (slash)
            *slash = 0;
        static const char *const places[] = { "cellvisor-shim",
                                              "../libexec/cellvisor/cellvisor-shim" };
        for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
            CLEANUP(freep) char *p = xasprintf("%s/%s", self, places[i]);
            if (access(p, X_OK) == 0)
                return TAKE_PTR(p);
        }
    }
    err_set(e, -ENOENT,
            "cellvisor-shim is not beside this program nor in ../libexec/cellvisor; "
            "give its path with --shim");
    return NULL;
}
