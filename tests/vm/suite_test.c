/* Real VMs: QEMU under TCG with a built template. No test judges how long something took; deadlines
 * only end what hangs, with the one exception that the product promises: a killed VMM is noticed
 * within a second. */
#include "client.h"
#include "common/cleanup.h"
#include "common/fs.h"
#include "common/json.h"
#include "common/mem.h"
#include "vm/template.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define CLONES 20
#define UP_MS 60000

static char state_dir[4096];
static const char *template_name;
static struct client_host host;
static bool is_open;

static struct vm_host_config config(void)
{
    struct vm_host_config c;

    vm_host_config_defaults(&c);
    c.state_dir = state_dir;
    c.accel = VM_ACCEL_TCG;
    c.template_only = template_name;
    c.pool_parked = c.pool_deferred = c.pool_max = 0;
    c.start_timeout_ms = UP_MS;
    return c;
}

static void open_host(const struct vm_host_config *c)
{
    struct err e = { 0 };

    if (client_open(&host, c, &e) < 0)
        fail_msg("%s", e.msg);
    is_open = true;
}

static void open_plain(void)
{
    struct vm_host_config c = config();

    open_host(&c);
}

static void shut_host(void)
{
    is_open = false;
    assert_true(client_close(&host));
}

static int teardown(void **state)
{
    (void)state;
    if (is_open) {
        is_open = false;
        client_close(&host);
    }
    return 0;
}

static void start(struct client_vm *v)
{
    struct err e = { 0 };

    if (client_start(&host, v, template_name, &e) < 0)
        fail_msg("%s", e.msg);
    if (!client_wait_up(v, UP_MS))
        fail_msg("not up: %s", v->why.text);
}

static void expect(struct client_vm *v, const char *code, const char *words)
{
    const char *text = client_run(v, code);

    if (!text || !strstr(text, words))
        fail_msg("%s\ngave: %s\nwanted: %s", code, text ? text : "no answer", words);
}

static const struct vm_template_desc *desc(void)
{
    const struct vm_template_desc *d;

    assert_int_equal(vm_templates(vm_host_service(host.host), &d), 1);
    return d;
}

static bool wait_parked(unsigned n)
{
    uint64_t end = loop_now_ms(host.loop) + UP_MS;

    while (desc()->parked < n && loop_now_ms(host.loop) < end)
        loop_step(host.loop, 50);
    return desc()->parked >= n;
}

/* ---- processes, descriptors ---- */

static unsigned open_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    unsigned n = 0;

    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static unsigned children(void)
{
    char path[64], text[4096] = "";
    unsigned n = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
    f = fopen(path, "re");
    if (f && fgets(text, sizeof(text), f))
        for (char *p = text; (p = strchr(p, ' ')); p++)
            n++;
    if (f)
        fclose(f);
    return n;
}

static void read_text(const char *path, char *ret, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, ret, size - 1) : -1;

    ret[n > 0 ? n : 0] = '\0';
    if (fd >= 0)
        close(fd);
}

/* ---- tests ---- */

static void test_a_vm_without_pool_comes_up_and_computes(void **state)
{
    static struct client_vm v;
    (void)state;
    open_plain();
    start(&v);
    assert_string_equal(v.vm->info.timings.origin, "cold");
    assert_int_equal(v.vm->info.tier, VM_TIER_TCG);
    assert_int_equal(v.vm->info.kernel_stream, 1);
    assert_non_null(strstr(v.vm->info.kernel_info, "python"));
    print_message("cold start: %.1f ms (spawn %.1f load %.1f resume %.1f assign %.1f; guest: "
                  "entropy %.1f clock %.1f "
                  "hooks %.1f)\n",
                  v.vm->info.timings.total_ms, v.vm->info.timings.spawn_ms,
                  v.vm->info.timings.load_ms, v.vm->info.timings.resume_ms,
                  v.vm->info.timings.assign_ms, v.vm->info.timings.guest_entropy_ms,
                  v.vm->info.timings.guest_clock_ms, v.vm->info.timings.guest_hooks_ms);
    expect(&v, "6*7", "42");
    expect(&v, "1/0", "ERROR ZeroDivisionError");
    client_end(&v, 0);
    assert_int_equal(v.why.reason, VM_EXIT_RELEASED);
}

static void test_the_reseed_steps_ran_in_the_guest(void **state)
{
    static struct client_vm v;
    (void)state;
    open_plain();
    start(&v);
    /* The host refuses a RESUMED without its steps; here they took time, so they were done. */
    assert_true(v.vm->info.timings.guest_entropy_ms > 0);
    assert_true(v.vm->info.timings.guest_clock_ms > 0);
    assert_true(v.vm->info.timings.guest_hooks_ms > 0);
    client_end(&v, 0);
}

static const char probe[] =
    "import os, random, uuid, secrets, socket, time, json, tempfile, ssl\n"
    "d = dict(urandom=os.urandom(16).hex(), random=random.random(), uuid4=str(uuid.uuid4()), "
    "secret=secrets.token_hex(16), hostname=socket.gethostname(), "
    "machine=open('/etc/machine-id').read().strip(), "
    "boot=open('/proc/sys/kernel/random/boot_id').read().strip(), ssl=ssl.RAND_bytes(16).hex(), "
    "temp=tempfile.mktemp(), kuuid=open('/proc/sys/kernel/random/uuid').read().strip())\n"
    "try:\n"
    "    import numpy\n"
    "    d['numpy'] = float(numpy.random.rand())\n"
    "    d['numpy_rng'] = float(numpy.random.default_rng().random())\n"
    "except ImportError:\n"
    "    pass\n"
    "d['session'] = get_ipython().kernel.session.session\n"
    "d['key'] = get_ipython().kernel.session.key.hex()\n"
    "d['time'] = time.time()\n"
    "print(json.dumps(d))\n";

/* Every value of clone i but the time differs from that of every clone before. */
static void compare(json_t *const *all, int i)
{
    const char *key;
    json_t *value;

    json_object_foreach(all[i], key, value)
    {
        for (int k = 0; k < i; k++)
            if (strcmp(key, "time") != 0 && json_equal(value, json_object_get(all[k], key)))
                fail_msg("clones %d and %d have the same %s", i, k, key);
    }
}

static void check_clock(json_t *d, double before, double after)
{
    double t = json_number_value(json_object_get(d, "time"));

    if (t < before - 0.5 || t > after + 0.5)
        fail_msg("guest clock %.3f, host %.3f to %.3f", t, before, after);
}

static void test_twenty_clones_share_no_randomness_name_or_clock_error(void **state)
{
    static struct client_vm v[CLONES];
    json_t *all[CLONES];
    struct err e = { 0 };
    struct vm_host_config c = config();
    (void)state;
    c.max_vms = CLONES;
    open_host(&c);
    for (int i = 0; i < CLONES; i++)
        if (client_start(&host, &v[i], template_name, &e) < 0)
            fail_msg("%s", e.msg);
    for (int i = 0; i < CLONES; i++)
        if (!client_wait_up(&v[i], 4 * UP_MS))
            fail_msg("clone %d is not up: %s", i, v[i].why.text);
    for (int i = 0; i < CLONES; i++) {
        double before = (double)loop_wall_us(host.loop) / 1e6;
        const char *text = client_run(&v[i], probe);

        assert_non_null(text);
        all[i] = json_parse(slice_str(text), NULL);
        if (!json_is_object(all[i]))
            fail_msg("%s", text);
        check_clock(all[i], before, (double)loop_wall_us(host.loop) / 1e6);
        compare(all, i);
    }
    assert_true(json_object_size(all[0]) >= 12);
    for (int i = 0; i < CLONES; i++) {
        json_decref(all[i]);
        client_end(&v[i], 0);
    }
}

static void test_variables_live_from_cell_to_cell_and_stay_in_their_vm(void **state)
{
    static struct client_vm a, b;
    (void)state;
    open_plain();
    start(&a);
    start(&b);
    expect(&a, "x = 'mine'", "");
    expect(&a, "x", "mine");
    expect(&b, "x", "ERROR NameError");
    client_end(&a, 0);
    expect(&b, "1+1", "2"); /* unharmed */
    client_end(&b, 0);
}

static bool has_pandas(struct client_vm *v)
{
    const char *text =
        client_run(v, "import importlib.util as u\nprint(u.find_spec('pandas') is not None)");

    return text && strstr(text, "True");
}

static void test_a_dataframe_lives_from_turn_to_turn_and_a_chart_comes_back(void **state)
{
    static struct client_vm v;
    (void)state;
    open_plain();
    start(&v);
    if (!has_pandas(&v)) {
        print_message("template %s has no pandas: dataframe and chart are not tested\n",
                      template_name);
        expect(&v, "import json; rows = [dict(a=i) for i in range(4)]", "");
        expect(&v, "sum(r['a'] for r in rows)", "6");
        client_end(&v, 0);
        return;
    }
    expect(&v, "import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3, 10]})", "");
    expect(&v, "df.describe()", "mean");
    assert_non_null(client_run(&v, "df.plot()"));
    assert_int_equal(v.pngs, 1);
    client_end(&v, 0);
}

static void test_a_parked_vm_serves_with_the_right_clock_and_is_replaced(void **state)
{
    struct vm_host_config c = config();
    static struct client_vm v;
    double before;
    json_t *d;
    (void)state;
    c.pool_parked = c.pool_max = 1;
    open_host(&c);
    assert_true(wait_parked(1));
    for (uint64_t end = loop_now_ms(host.loop) + 1500; loop_now_ms(host.loop) < end;)
        loop_step(host.loop, 100);
    start(&v);
    assert_string_equal(v.vm->info.timings.origin, "parked");
    print_message("parked start: %.1f ms\n", v.vm->info.timings.total_ms);
    before = (double)loop_wall_us(host.loop) / 1e6;
    d = json_parse(slice_str(client_run(&v, probe)), NULL);
    check_clock(d, before, (double)loop_wall_us(host.loop) / 1e6);
    json_decref(d);
    assert_true(wait_parked(1));
    client_end(&v, 0);
}

static void test_a_deferred_vm_serves(void **state)
{
    struct vm_host_config c = config();
    static struct client_vm v;
    (void)state;
    c.pool_deferred = 1;
    open_host(&c);
    for (uint64_t end = loop_now_ms(host.loop) + UP_MS;
         !desc()->deferred && loop_now_ms(host.loop) < end;)
        loop_step(host.loop, 50);
    for (int i = 0; i < 5; i++)
        loop_step(host.loop, 100);
    start(&v);
    assert_string_equal(v.vm->info.timings.origin, "deferred");
    print_message("deferred start: %.1f ms\n", v.vm->info.timings.total_ms);
    expect(&v, "1+1", "2");
    client_end(&v, 0);
}

static void test_the_vmm_runs_without_privileges_and_with_a_sealed_template(void **state)
{
    char path[64], text[8192], want[32];
    static struct client_vm v;
    int fd, seals;
    (void)state;
    open_plain();
    start(&v);
    snprintf(path, sizeof(path), "/proc/%d/status", v.vm->info.pid);
    read_text(path, text, sizeof(text));
    assert_non_null(strstr(text, "NoNewPrivs:\t1"));
    assert_non_null(strstr(text, "Seccomp:\t2"));
    assert_non_null(strstr(text, "CapEff:\t0000000000000000"));
    snprintf(want, sizeof(want), "Uid:\t%u\t", geteuid());
    if (geteuid() == 0)
        assert_null(strstr(text, want));
    snprintf(path, sizeof(path), "/proc/%d/fd/3", v.vm->info.pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    seals = fcntl(fd, F_GET_SEALS);
    close(fd);
    assert_int_equal(seals & (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW),
                     F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW);
    snprintf(path, sizeof(path), "/proc/%d/net", v.vm->info.pid);
    client_end(&v, 0);
}

static void test_the_guest_has_no_network_card_and_a_bounded_disk(void **state)
{
    static struct client_vm v;
    char code[200], want[32];
    (void)state;
    open_plain();
    start(&v);
    expect(&v, "import os; print(sorted(set(os.listdir('/sys/class/net')) - {'lo'}))", "[]");
    snprintf(code, sizeof(code),
             "import os; s = os.statvfs('/'); print('disk', s.f_blocks * s.f_frsize >> 20 <= %d)",
             (int)(desc()->disk_mb ? desc()->disk_mb : desc()->memory_mb));
    snprintf(want, sizeof(want), "disk True");
    expect(&v, code, want);
    client_end(&v, 0);
}

static void test_a_killed_vmm_is_noticed_within_a_second_in_the_middle_of_a_cell(void **state)
{
    static struct client_vm v;
    uint64_t t0;
    int pid;
    (void)state;
    open_plain();
    start(&v);
    pid = v.vm->info.pid;
    assert_int_equal(client_send(&v, "while True: pass"), 0);
    for (int i = 0; i < 5; i++)
        loop_step(host.loop, 50);
    t0 = loop_now_us(host.loop);
    kill(pid, SIGKILL);
    assert_true(client_wait_down(&v, 10000));
    assert_int_equal(v.why.reason, VM_EXIT_VMM);
    assert_int_equal(v.why.signal, SIGKILL);
    assert_true(v.down_us - t0 < 1000000);
    buf_fini(&v.text);
    start(&v); /* and the next one works */
    expect(&v, "1+1", "2");
    client_end(&v, 0);
}

static void test_killed_parked_vms_are_replaced_and_users_do_not_notice(void **state)
{
    struct vm_host_config c = config();
    static struct client_vm v;
    char path[64], pids[256];
    (void)state;
    c.pool_parked = c.pool_max = 1;
    open_host(&c);
    assert_true(wait_parked(1));
    snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
    read_text(path, pids, sizeof(pids));
    assert_true(strtol(pids, NULL, 10) > 1);
    kill((pid_t)strtol(pids, NULL, 10), SIGKILL);
    start(&v); /* at once: the host may not know yet */
    expect(&v, "1+1", "2");
    client_end(&v, 0);
    assert_true(wait_parked(1));
}

static void test_release_with_grace_lets_the_guest_power_off(void **state)
{
    static struct client_vm v;
    (void)state;
    open_plain();
    start(&v);
    vm_release(v.vm, 15000);
    assert_true(client_wait_down(&v, 20000));
    assert_int_equal(v.why.reason, VM_EXIT_RELEASED);
    buf_fini(&v.text);
}

static void test_nothing_is_left_behind(void **state)
{
    struct vm_host_config c = config();
    CLEANUP(freep) char *run = fs_join(state_dir, "run");
    unsigned fds, kids;
    (void)state;
    open_plain(); /* whatever is made once is made now */
    shut_host();
    fds = open_fds();
    kids = children();
    for (int round = 0; round < 3; round++) {
        static struct client_vm v[3];

        c.pool_parked = c.pool_max = c.pool_deferred = 1;
        open_host(&c);
        assert_true(wait_parked(1));
        for (int i = 0; i < 3; i++)
            start(&v[i]);
        kill(v[0].vm->info.pid, SIGKILL);
        assert_true(client_wait_down(&v[0], 10000));
        client_end(&v[1], 0);
        shut_host(); /* one still runs */
        assert_int_equal(v[2].down, 1);
        for (int i = 0; i < 3; i++)
            buf_fini(&v[i].text);
    }
    assert_int_equal(children(), kids);
    assert_int_equal(open_fds(), fds);
    (void)run;
}

/* ---- templates that must not be used ---- */

static char bad_state[64];

static void copy_text(const char *from, const char *to, const char *find, const char *replace)
{
    struct buf b, out;
    const char *text, *at;

    buf_init(&out, 16u << 20);
    assert_int_equal(fs_read_file(from, 8u << 20, &b, NULL), 0);
    text = buf_cstr(&b);
    at = find ? strstr(text, find) : NULL;
    if (at) {
        buf_append(&out, text, (size_t)(at - text));
        buf_append_str(&out, replace);
        buf_append_str(&out, at + strlen(replace)); /* same length */
    } else {
        buf_append_slice(&out, buf_slice(&b));
    }
    assert_int_equal(fs_write_atomic(to, buf_slice(&out), 0600, NULL), 0);
    buf_fini(&b);
    buf_fini(&out);
}

/* A store whose template is the real one, but for the manifest and the device state, which the
 * caller changes. */
static void make_bad_store(const char *find, const char *replace, char **ret_manifest,
                           char **ret_vmstate)
{
    static const char *const big[] = { "memory", "root.erofs", "vmlinux", "initrd.img" };
    struct vm_template *t = NULL;
    CLEANUP(freep) char *dir = NULL;
    CLEANUP(freep) char *templates = NULL;
    CLEANUP(freep) char *link = NULL;
    CLEANUP(freep) char *manifest = NULL;
    CLEANUP(freep) char *vmstate = NULL;
    CLEANUP(freep) char *target = NULL;

    assert_int_equal(vm_template_load(state_dir, template_name, &t, NULL), 0);
    snprintf(bad_state, sizeof(bad_state), "/tmp/cv-suite-XXXXXX");
    assert_non_null(mkdtemp(bad_state));
    dir = xasprintf("%s/builds/%s", bad_state, t->hash);
    templates = xasprintf("%s/templates", bad_state);
    assert_int_equal(fs_mkdir_p(dir, 0755, NULL), 0);
    assert_int_equal(fs_mkdir_p(templates, 0755, NULL), 0);
    link = fs_join(templates, template_name);
    target = xasprintf("../builds/%s", t->hash);
    assert_int_equal(symlink(target, link), 0);
    for (size_t i = 0; i < 4; i++) {
        CLEANUP(freep) char *from = fs_join(t->dir, big[i]);
        CLEANUP(freep) char *to = fs_join(dir, big[i]);

        assert_int_equal(symlink(from, to), 0);
    }
    manifest = fs_join(t->dir, "manifest.json");
    *ret_manifest = fs_join(dir, "manifest.json");
    copy_text(manifest, *ret_manifest, find, replace);
    vmstate = fs_join(t->dir, "vmstate");
    *ret_vmstate = fs_join(dir, "vmstate");
    copy_text(vmstate, *ret_vmstate, NULL, NULL);
    vm_template_free(t);
}

static int bad_teardown(void **state)
{
    teardown(state);
    return fs_rm_rf(bad_state, NULL);
}

static void expect_refused(const char *words)
{
    struct vm_host_config c = config();
    static struct client_vm v;
    struct err e = { 0 };

    c.state_dir = bad_state;
    open_host(&c);
    assert_false(desc()->ready);
    assert_int_not_equal(client_start(&host, &v, template_name, &e), 0);
    if (!strstr(e.msg, words) || !strstr(e.msg, "cellvisor template build"))
        fail_msg("%s", e.msg);
    buf_fini(&v.text);
}

static void test_a_snapshot_of_another_machine_is_refused(void **state)
{
    CLEANUP(freep) char *manifest = NULL;
    CLEANUP(freep) char *vmstate = NULL;
    (void)state;
    make_bad_store("\"fingerprint\": \"", "\"fingerprint\": \"0000", &manifest, &vmstate);
    expect_refused("stale");
}

static void test_a_damaged_device_state_is_refused(void **state)
{
    CLEANUP(freep) char *manifest = NULL;
    CLEANUP(freep) char *vmstate = NULL;
    int fd;
    (void)state;
    make_bad_store(NULL, NULL, &manifest, &vmstate);
    fd = open(vmstate, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "damage", 6, 5000), 6);
    close(fd);
    expect_refused("");
}

static void test_a_device_state_that_qemu_rejects_fails_the_start_with_the_reason(void **state)
{
    struct vm_host_config c = config();
    CLEANUP(freep) char *manifest = NULL;
    CLEANUP(freep) char *vmstate = NULL;
    static struct client_vm v;
    struct err e = { 0 };
    char digest[65];
    json_t *doc, *file;
    int fd;
    (void)state;
    /* A manifest that vouches for the damage: what a wrong but complete build would look like. */
    make_bad_store(NULL, NULL, &manifest, &vmstate);
    fd = open(vmstate, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "damage", 6, 20), 6);
    close(fd);
    assert_int_equal(fs_sha256_file(vmstate, digest, NULL), 0);
    doc = json_parse_file(manifest, 8u << 20, NULL);
    file = json_object_get(json_object_get(doc, "files"), "vmstate");
    json_object_set_new(file, "sha256", json_string(digest));
    assert_int_equal(json_dump_file(doc, manifest, 0), 0);
    json_decref(doc);
    c.state_dir = bad_state;
    open_host(&c);
    assert_int_equal(client_start(&host, &v, template_name, &e), 0);
    assert_true(client_wait_down(&v, UP_MS));
    assert_int_equal(v.up, 0);
    assert_int_equal(v.why.reason, VM_EXIT_START_FAILED);
    if (!strstr(v.why.text, "loading the snapshot"))
        fail_msg("%s", v.why.text);
    buf_fini(&v.text);
}

static void test_a_template_that_is_not_built_is_a_clear_error(void **state)
{
    struct vm_host_config c = config();
    static struct client_vm v;
    struct err e = { 0 };
    (void)state;
    c.template_only = "nonsense";
    open_host(&c);
    assert_int_not_equal(client_start(&host, &v, "nonsense", &e), 0);
    assert_non_null(strstr(e.msg, "cellvisor template build"));
    buf_fini(&v.text);
}

static void test_a_start_can_be_cancelled_at_any_time(void **state)
{
    static struct client_vm v;
    struct err e = { 0 };
    (void)state;
    open_plain();
    for (int ms = 0; ms < 160; ms += 20) {
        uint64_t end;

        assert_int_equal(client_start(&host, &v, template_name, &e), 0);
        for (end = loop_now_ms(host.loop) + (uint64_t)ms; loop_now_ms(host.loop) < end;)
            loop_step(host.loop, 5);
        vm_release(v.vm, 0);
        assert_true(client_wait_down(&v, 10000));
        assert_int_equal(v.why.reason, VM_EXIT_RELEASED);
        buf_fini(&v.text);
    }
    assert_int_equal(children(), 0);
}

#define T(f) cmocka_unit_test_teardown(f, teardown)
#define B(f) cmocka_unit_test_teardown(f, bad_teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_a_vm_without_pool_comes_up_and_computes),
        T(test_the_reseed_steps_ran_in_the_guest),
        T(test_twenty_clones_share_no_randomness_name_or_clock_error),
        T(test_variables_live_from_cell_to_cell_and_stay_in_their_vm),
        T(test_a_dataframe_lives_from_turn_to_turn_and_a_chart_comes_back),
        T(test_a_parked_vm_serves_with_the_right_clock_and_is_replaced),
        T(test_a_deferred_vm_serves),
        T(test_the_vmm_runs_without_privileges_and_with_a_sealed_template),
        T(test_the_guest_has_no_network_card_and_a_bounded_disk),
        T(test_a_killed_vmm_is_noticed_within_a_second_in_the_middle_of_a_cell),
        T(test_killed_parked_vms_are_replaced_and_users_do_not_notice),
        T(test_release_with_grace_lets_the_guest_power_off),
        T(test_nothing_is_left_behind),
        B(test_a_snapshot_of_another_machine_is_refused),
        B(test_a_damaged_device_state_is_refused),
        B(test_a_device_state_that_qemu_rejects_fails_the_start_with_the_reason),
        T(test_a_template_that_is_not_built_is_a_clear_error),
        T(test_a_start_can_be_cancelled_at_any_time),
    };

    log_configure(LOG_LEVEL_ERROR, false);
    template_name = client_template(state_dir, sizeof(state_dir));
    if (!template_name)
        return 77;
    print_message("template %s in %s\n", template_name, state_dir);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
