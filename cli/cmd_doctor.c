/* cellvisor doctor: what this machine offers, what is missing, and what that costs. Each check adds
 * one row; the exit code says whether kernels in microVMs can be served here and now. */
#include "cli/cli.h"
#include "cli/opts.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/timefmt.h"
#include "vm/accel.h"
#include "vm/qemu.h"
#include "vm/template.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <string.h>
#include <sys/utsname.h>

#define MEMORY_PER_VM_MB 512 /* rough: what a busy sandbox of the python template takes */
#define DISK_WANTED (4ull << 30)

struct doctor_opts {
    char *state, *qemu, *accel, *shim;
    bool json;
};
static const char *const accel_words[] = { "auto", "kvm", "tcg", NULL };
#define AT(f) offsetof(struct doctor_opts, f)
static const struct opt options[] = {
    { .flag = "json",
      .type = OPT_BOOL,
      .flags = OPT_FLAG_ONLY,
      .offset = AT(json),
      .def = "false",
      .help = "print one JSON object instead of text" },
    { .flag = "accel",
      .offset = AT(accel),
      .arg = "WORD",
      .def = "auto",
      .choices = accel_words,
      .help = "acceleration to ask for" },
    { .flag = "state",
      .offset = AT(state),
      .arg = "DIR",
      .def = "~/.local/share/cellvisor",
      .help = "state directory" },
    { .flag = "qemu",
      .offset = AT(qemu),
      .arg = "FILE",
      .help = "QEMU binary (qemu-system-x86_64 from PATH)" },
    { .flag = "shim",
      .offset = AT(shim),
      .arg = "FILE",
      .help = "cellvisor-shim (beside this program)" },
};
static const struct opt_command doctor_command = {
    .name = "doctor",
    .synopsis = "[--json]",
    .summary = "Say what this machine offers for kernels in microVMs, what is missing and what "
               "that costs.",
    .opts = options,
    .n_opts = sizeof(options) / sizeof(options[0]),
    .examples = "  cellvisor doctor\n"
                "  cellvisor doctor --json | python3 -m json.tool\n",
    .exits =
        "  0  kernels in microVMs can be served here (warnings are possible)\n"
        "  1  something that is needed is missing; the lines marked \"missing\" say what to do\n"
        "  2  wrong option\n",
};

enum verdict { V_OK, V_WARN, V_MISSING };
static const char *const verdict_names[] = { "ok", "warn", "missing" };

struct doctor {
    struct doctor_opts o;
    char *state_dir;
    json_t *rows;
    bool missing;
};

static void row(struct doctor *d, const char *name, enum verdict v, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static void row(struct doctor *d, const char *name, enum verdict v, const char *fmt, ...)
{
    char text[700];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    d->missing = d->missing || v == V_MISSING;
    json_array_append_new(d->rows, json_pack("{s:s, s:s, s:s}", "check", name, "verdict",
                                             verdict_names[v], "text", text));
}

/* ---- checks ---- */

static void check_versions(struct doctor *d)
{
    struct utsname u;
    uname(&u);
    row(d, "version", V_OK, "cellvisor %s on Linux %s (%s)", CELLVISOR_VERSION, u.release,
        u.machine);
}

static void check_qemu(struct doctor *d)
{
    char version[32];
    struct err e = { 0 };
    if (vm_qemu_version(d->o.qemu, version, &e) == 0)
        row(d, "qemu", V_OK, "QEMU %s", version);
    else
        row(d, "qemu", V_MISSING, "%s", e.msg);
}

static void check_accel(struct doctor *d)
{
    enum vm_accel want = VM_ACCEL_AUTO;
    struct vm_accel_verdict v;
    struct err e = { 0 };
    vm_accel_parse(d->o.accel, &want);
    if (vm_accel_resolve(want, d->o.qemu, d->state_dir, &v, &e) < 0) {
        row(d, "acceleration", V_MISSING, "%s", e.msg);
        return;
    }
    row(d, "acceleration", v.accel == VM_ACCEL_KVM ? V_OK : V_WARN, "%s: %s%s%s",
        vm_accel_name(v.accel), v.reason, v.cached ? " (known from before)" : "",
        v.accel == VM_ACCEL_KVM ? ""
                                : "; code runs several times slower than on the machine itself");
}

/* Is a program in PATH? */
static bool have(const char *program)
{
    const char *path = getenv("PATH");
    CLEANUP(freep) char *copy = xstrdup(path ? path : "/usr/bin:/bin");
    for (char *save = NULL, *dir = strtok_r(copy, ":", &save); dir;
         dir = strtok_r(NULL, ":", &save)) {
        CLEANUP(freep) char *p = fs_join(dir, program);
        if (access(p, X_OK) == 0)
            return true;
    }
    return false;
}

static void check_jail(struct doctor *d)
{
    if (!have("setpriv"))
        row(d, "jail", V_MISSING, "setpriv is missing: install util-linux");
    else if (geteuid() == 0)
        row(d, "jail", V_OK,
            "the VMM drops root, capabilities and new privileges (setpriv); QEMU's own "
            "seccomp filter is on");
    else
        row(d, "jail", V_OK,
            "the VMM runs as uid %u without new privileges; QEMU's own seccomp filter "
            "is on",
            (unsigned)geteuid());
    row(d, "jail-namespaces", V_WARN,
        "the VMM is not put into namespaces of its own by this version%s",
        have("bwrap") ? " (bubblewrap is installed)" : " (bubblewrap is not installed either)");
    bool cgroup2 = fs_exists("/sys/fs/cgroup/cgroup.controllers");
    row(d, "cgroup", V_WARN, "memory and CPU of a VMM are not limited by cgroups in this version%s",
        cgroup2 ? "" : " (and this machine has no cgroup v2)");
}

static uint64_t meminfo_mb(const char *key)
{
    CLEANUP(fclosep) FILE *f = fopen("/proc/meminfo", "re");
    char line[160];
    size_t n = strlen(key);
    while (f && fgets(line, sizeof(line), f))
        if (strncmp(line, key, n) == 0 && line[n] == ':')
            return strtoull(line + n + 1, NULL, 10) >> 10;
    return 0;
}

static void check_memory(struct doctor *d)
{
    uint64_t total = meminfo_mb("MemTotal"), free_mb = meminfo_mb("MemAvailable");
    row(d, "memory", free_mb >= 2048 ? V_OK : V_WARN,
        "%llu MB of %llu MB available: about %llu busy sandboxes of the python template",
        (unsigned long long)free_mb, (unsigned long long)total,
        (unsigned long long)(free_mb / MEMORY_PER_VM_MB));
}

static void check_disk(struct doctor *d)
{
    uint64_t bytes = fs_free_bytes(d->state_dir);
    char text[32];
    timefmt_bytes(text, sizeof(text), bytes);
    row(d, "disk", bytes >= DISK_WANTED ? V_OK : V_WARN, "%s free for %s%s", text, d->state_dir,
        bytes >= DISK_WANTED ? "" : "; building a template wants 4 GB");
}

static void check_shim(struct doctor *d)
{
    struct err e = { 0 };
    CLEANUP(freep) char *shim = cli_shim_path(d->o.shim, &e);
    row(d, "shim", shim ? V_OK : V_MISSING, "%s", shim ? shim : e.msg);
}

static void check_build_tools(struct doctor *d)
{
    static const char *const tools[][2] = { { "mmdebstrap", "mmdebstrap" },
                                            { "mkfs.erofs", "erofs-utils" },
                                            { "cpio", "cpio" } };
    char list[200] = "";
    for (size_t i = 0; i < sizeof(tools) / sizeof(tools[0]); i++) {
        size_t n = strlen(list);
        if (!have(tools[i][0]))
            snprintf(list + n, sizeof(list) - n, " %s", tools[i][1]);
    }
    if (list[0])
        row(d, "build-tools", V_WARN, "templates cannot be built here: apt install%s", list);
    else
        row(d, "build-tools", V_OK, "templates can be built here");
}

static void check_templates(struct doctor *d)
{
    json_t *names = vm_template_names(d->state_dir);
    size_t i, ready = 0;
    json_t *name;
    json_array_foreach(names, i, name)
    {
        const char *n = json_string_value(name);
        struct vm_template *t = NULL;
        struct err e = { 0 };
        char key[96];
        snprintf(key, sizeof(key), "template %s", n);
        if (vm_template_load(d->state_dir, n, &t, &e) < 0) {
            row(d, key, V_WARN, "%s", e.msg);
            continue;
        }
        ready++;
        char size[32];
        timefmt_bytes(size, sizeof(size), t->image_bytes + t->memory_bytes_used);
        row(d, key, V_OK, "ready: snapshot under %s, %llu MB memory, %s on disk",
            vm_accel_name(t->accel), (unsigned long long)t->memory_mb, size);
        vm_template_free(t);
    }
    json_decref(names);
    if (!ready)
        row(d, "templates", V_MISSING, "none is ready: run `cellvisor template build python`");
}

/* ---- output ---- */

static void print_text(const struct doctor *d)
{
    size_t i;
    json_t *r;
    json_array_foreach(d->rows, i, r)
        printf("%-8s %-24s %s\n", json_string_value(json_object_get(r, "verdict")),
               json_string_value(json_object_get(r, "check")),
               json_string_value(json_object_get(r, "text")));
    puts(d->missing
             ? "\nKernels in microVMs cannot be served here yet: see the lines marked \"missing\"."
             : "\nKernels in microVMs can be served here.");
}

static void print_json(const struct doctor *d)
{
    json_t *root = json_pack("{s:s, s:b, s:O}", "version", CELLVISOR_VERSION, "ready", !d->missing,
                             "checks", d->rows);
    json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

static int doctor_run(struct doctor *d)
{
    d->rows = json_array();
    check_versions(d);
    check_qemu(d);
    check_accel(d);
    check_jail(d);
    check_memory(d);
    check_disk(d);
    check_shim(d);
    check_build_tools(d);
    check_templates(d);
    d->o.json ? print_json(d) : print_text(d);
    json_decref(d->rows);
    return d->missing ? CLI_FAILED : CLI_OK;
}

int cmd_doctor(int argc, char **argv)
{
    struct doctor d = { 0 };
    struct opts parsed;
    struct err e = { 0 };
    int code = CLI_OK;
    if (opts_parse(&doctor_command, argc, argv, &d.o, &parsed, &e) < 0)
        code = cli_fail("doctor", CLI_USAGE, &e);
    else if (parsed.outcome == OPTS_HELP)
        opts_help(&doctor_command, stdout);
    else if (parsed.outcome == OPTS_MARKDOWN)
        opts_markdown(&doctor_command, stdout);
    else if (!(d.state_dir = cli_state_dir(d.o.state, &e)))
        code = cli_fail("doctor", CLI_ENVIRONMENT, &e);
    else
        code = doctor_run(&d);
    free(d.state_dir);
    opts_free(&doctor_command, &d.o, &parsed);
    return code;
}
