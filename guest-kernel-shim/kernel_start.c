/* From kernelspec to process: connection file, argv, environment, descriptors. The pure parts are
 * in launch.c, the life that follows in kernel.c. */
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/id.h"
#include "common/mem.h"
#include "guest-kernel-shim/init.h"
#include "guest-kernel-shim/kernel.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define KERNEL_NOFILE 65536
#define BACKGROUND_OOM_ADJ 1000
#define BACKGROUND_NICE 19
#define SOCKET_PATH_MAX 107 /* sockaddr_un */

struct launch {
    char **argv;
    struct shim_environ env;
    char program[512];
    int out_w[2], hook_fd; /* the child's ends */
};

static void launch_fini(struct launch *l)
{
    for (char **p = l->argv; p && *p; p++)
        free(*p);
    free(l->argv);
    shim_environ_fini(&l->env);
    closep(&l->out_w[0]);
    closep(&l->out_w[1]);
    closep(&l->hook_fd);
}

static bool wants_hook(const struct shim_kernel *k, char *const *argv)
{
    CLEANUP(freep) char *file = NULL;

    if (!k->host->hook_dir[0] || strcasecmp(k->spec->language, "python") != 0 ||
        !shim_argv_is_ipykernel(argv))
        return false;
    file = fs_join(k->host->hook_dir, "cellvisor_hook.py");
    return fs_exists(file);
}

static void build_argv(struct shim_kernel *k, struct launch *l, const char *connection_file)
{
    const struct shim_subst subst[] = {
        { "connection_file", connection_file },
        { "resource_dir", k->spec->dir },
        { "prefix", k->spec->prefix },
    };
    json_t *argv = json_object_get(k->spec->json, "argv"), *v;
    size_t i;

    l->argv = xcalloc(json_array_size(argv) + 2, sizeof(*l->argv));
    json_array_foreach(argv, i, v) l->argv[i] = shim_substitute(json_string_value(v), subst, 3);
    k->hooked = wants_hook(k, l->argv);
    if (k->hooked)
        l->argv[i] = xstrdup("--IPKernelApp.extra_extensions=cellvisor_hook");
}

static void build_env(struct shim_kernel *k, struct launch *l)
{
    struct shim_host *h = k->host;
    const char *key;
    json_t *v;

    shim_environ_init(&l->env);
    for (size_t i = 0; i < h->env.n; i++) {
        char *eq = strchr(h->env.vars[i], '=');
        CLEANUP(freep) char *name = xstrndup(h->env.vars[i], (size_t)(eq - h->env.vars[i]));
        shim_environ_set(&l->env, name, eq + 1);
    }
    json_object_foreach(json_object_get(k->spec->json, "env"), key, v)
    {
        CLEANUP(freep) char *text = shim_environ_expand(&l->env, json_string_value(v));
        shim_environ_set(&l->env, key, text);
    }
    json_object_foreach(k->env, key, v)
    {
        if (json_is_string(v) && *key && !strchr(key, '='))
            shim_environ_set(&l->env, key, json_string_value(v));
    }
    /* A kernel that believes its parent died ends itself. */
    shim_environ_unset(&l->env, "JPY_PARENT_PID");
    if (k->hooked) {
        const char *old = shim_environ_get(&l->env, "PYTHONPATH");
        CLEANUP(freep)
        char *path = xasprintf("%s%s%s", h->hook_dir, old && *old ? ":" : "", old ? old : "");
        shim_environ_set(&l->env, "PYTHONPATH", path);
        if (!shim_environ_get(&l->env, "PYDEVD_DISABLE_FILE_VALIDATION")) /* chatty at start */
            shim_environ_set(&l->env, "PYDEVD_DISABLE_FILE_VALIDATION", "1");
        shim_environ_set(&l->env, "CELLVISOR_HOOK_MODE", h->vm ? "vm" : "local");
        shim_environ_set(&l->env, "CELLVISOR_HOOK_FD", "3");
        shim_environ_set(&l->env, "CELLVISOR_OUT_FDS", "4,5");
    }
}

/* "python" is not always there, and a spec of a virtual environment means that one's Python. */
static int find_program(struct shim_kernel *k, struct launch *l, struct err *e)
{
    const char *name = l->argv[0], *path = shim_environ_get(&l->env, "PATH");
    CLEANUP(freep) char *own = xasprintf("%s/bin/%s", k->spec->prefix, name);

    if (strncmp(name, "python", 6) == 0 && !strchr(name, '/')) {
        if (shim_find_program(own, NULL, l->program, sizeof(l->program)) == 0)
            return 0;
        if (shim_find_program(name, path, l->program, sizeof(l->program)) == 0)
            return 0;
        name = "python3";
    }
    if (shim_find_program(name, path, l->program, sizeof(l->program)) == 0)
        return 0;
    return err_set(e, -ENOENT, "kernelspec \"%s\": program \"%s\" not found in PATH (%s)",
                   k->spec->name, name, path ? path : "empty");
}

/* A folder of its own for sockets and connection file, owned by the kernel's user. */
static int make_dir(struct shim_kernel *k, char *ret_file, size_t size, struct err *e)
{
    struct shim_host *h = k->host;
    CLEANUP(freep) char *ip = NULL, *text = NULL;
    uint8_t key[SHIM_KEY_LEN / 2];

    snprintf(k->dir, sizeof(k->dir), "%s/k%u-%u", h->run_dir, k->stream, ++h->processes);
    fs_rm_rf(k->dir, NULL);
    if (strlen(k->dir) + strlen("/s-5") > SOCKET_PATH_MAX)
        return err_set(e, -ENAMETOOLONG, "%s is too long for unix sockets: use a shorter --run-dir",
                       k->dir);
    if (mkdir(k->dir, 0700) < 0)
        return err_errno(e, errno, "mkdir %s", k->dir);
    id_random(key, sizeof(key));
    id_hex(k->key, key, sizeof(key));
    id_uuid4(k->session);
    ip = xasprintf("%s/s", k->dir);
    text = shim_connection_json(ip, k->key, k->spec->name);
    snprintf(ret_file, size, "%s/connection.json", k->dir);
    if (fs_write_atomic(ret_file, slice_str(text), 0600, e) < 0)
        return e ? e->code : -EIO;
    if (h->user.uid && (chown(k->dir, h->user.uid, h->user.gid) < 0 ||
                        chown(ret_file, h->user.uid, h->user.gid) < 0))
        return err_errno(e, errno, "chown %s", k->dir);
    return 0;
}

static int make_pipes(struct shim_kernel *k, struct launch *l, struct err *e)
{
    for (int i = 0; i < 2; i++) {
        int p[2];

        if (pipe2(p, O_CLOEXEC) < 0)
            return err_errno(e, errno, "pipe");
        fcntl(p[0], F_SETPIPE_SZ, SHIM_PIPE_BYTES); /* else it is a slower 64 KiB */
        k->out_fd[i] = p[0];
        l->out_w[i] = p[1];
    }
    if (k->hooked)
        return shim_hook_open(&k->hook, &k->host->loop, NULL, k, &l->hook_fd, e);
    return 0;
}

int shim_kernel_launch(struct shim_kernel *k, struct err *e)
{
    struct shim_host *h = k->host;
    CLEANUP(launch_fini) struct launch l = { .out_w = { -1, -1 }, .hook_fd = -1 };
    const struct shim_limit limits[] = { { RLIMIT_CORE, 0 },
                                         { RLIMIT_NOFILE, KERNEL_NOFILE },
                                         { RLIMIT_NPROC, h->vm ? init_process_limit() : 0 } };
    char file[160];
    struct shim_child c = {
        .user = &h->user,
        .cwd = k->cwd ? k->cwd : h->cwd,
        .limits = limits,
        .n_limits = h->vm ? 3 : 1,
        .oom_score_adj = !h->vm          ? 0
                         : k->background ? BACKGROUND_OOM_ADJ
                                         : SHIM_KERNEL_OOM_ADJ,
        .nice = k->background ? BACKGROUND_NICE : 0,
        .die_with_parent = !h->vm,
        .cgroup_procs = h->vm ? "/sys/fs/cgroup/kernels/cgroup.procs" : NULL,
    };
    int r;

    if ((r = make_dir(k, file, sizeof(file), e)) < 0)
        return r;
    build_argv(k, &l, file);
    build_env(k, &l);
    if ((r = find_program(k, &l, e)) < 0 || (r = make_pipes(k, &l, e)) < 0 ||
        (r = shim_kernel_open_io(k, e)) < 0)
        return r;
    free(l.argv[0]);
    l.argv[0] = xstrdup(l.program);
    c.argv = l.argv;
    c.env = l.env.vars;
    c.n_fds = k->hooked ? 6 : 3;
    c.fds[0] = -1;
    c.fds[1] = l.out_w[0];
    c.fds[2] = l.out_w[1];
    c.fds[3] = l.hook_fd;
    c.fds[4] = k->out_fd[0];
    c.fds[5] = k->out_fd[1];
    return shim_spawn(&c, &k->pid, e);
}
