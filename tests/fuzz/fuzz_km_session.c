/* A sandbox that its guest has taken over, and clients of it: the input is a list of moves of both,
 * each one byte and its arguments. Whatever they do: no crash, the log keeps its cap, credit is
 * neither lost nor invented, every operation is answered once, and in the end all is closed and
 * freed. */
#include "fuzz.h"
#include "kernelmgr/km_priv.h"
#include "tests/support/km_rig.h"
#include <string.h>

#define CLIENTS 3u
#define MOVES_MAX 400u

struct game {
    struct rig r;
    struct rig_client clients[CLIENTS];
    struct km_execution *x;
    char id[40]; /* of the kernel */
    unsigned asked, told;
    const uint8_t *p;
    size_t left;
};

static uint8_t take(struct game *g)
{
    if (!g->left)
        return 0;
    g->left--;
    return *g->p++;
}

static struct slice take_bytes(struct game *g)
{
    size_t n = take(g);
    if (n > g->left)
        n = g->left;
    struct slice s = slice_of(g->p, n);
    g->p += n;
    g->left -= n;
    return s;
}

static struct km_kernel *kernel(struct game *g)
{
    return km_kernel_find(g->r.m, NULL, g->id);
}

static void on_done(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct game *g = ctx;
    FUZZ_CHECK(!k == (e && e->code < 0));
    FUZZ_CHECK(!e || e->msg[0]);
    g->told++;
}

static void on_x_done(void *ctx, struct km_execution *x)
{
    struct game *g = ctx;
    FUZZ_CHECK(strcmp(km_execution_status(x), "running") != 0);
    g->told++;
}

/* ---- the guest ---- */

static const char *const msg_types[] = {
    "status",        "stream",       "execute_reply",       "kernel_info_reply",
    "input_request", "display_data", "update_display_data", "clear_output",
    "error",         "odd",          "execute_result",      "interrupt_reply",
    "comm_msg",      "iopub_welcome"
};
static const char *const contents[] = {
    "{\"execution_state\": \"busy\"}",
    "{\"execution_state\": \"idle\"}",
    "{\"execution_state\": \"starting\"}",
    "{\"execution_state\": \"\\u0000\"}",
    "{\"name\": \"stdout\", \"text\": \"a\\ud800\\n\"}",
    "{\"name\": \"stderr\", \"text\": \"b\\r\\u001b[1m\"}",
    "{\"status\": \"ok\", \"payload\": [{\"data\": {\"text/plain\": \"x\"}}, 7, NaN]}",
    "{\"status\": \"error\", \"ename\": \"E\", \"traceback\": [\"t\", [1]]}",
    "{\"data\": {\"image/png\": \"aGk=\"}, \"transient\": {\"display_id\": \"d\"}}",
    "{\"prompt\": \"?\", \"password\": true}",
    "{\"wait\": true}",
    "{}",
};
static const char *const states[] = {
    "{\"state\":\"starting\"}",
    "{\"state\":\"running\",\"info\":{\"status\":\"ok\"}}",
    "{\"state\":\"exited\",\"exit_code\":1,\"reason\":\"exit\",\"tail\":\"\\u00e9\\u00e9\"}",
    "{\"state\":\"exited\",\"signal\":9,\"reason\":\"oom\"}",
    "{\"state\":\"exited\",\"reason\":\"start_failed\"}",
    "{\"state\":\"exited\",\"signal\":99999999999,\"reason\":\"stopped\"}",
};

static void guest_message(struct game *g, struct fake_vm *v)
{
    char parent_id[8];
    uint8_t a = take(g), b = take(g);
    snprintf(parent_id, sizeof(parent_id), "r%u", b & 7u);
    struct jp_msg *parent =
        fake_request(JP_SHELL, b & 8 ? "execute_request" : "comm_msg", "s", parent_id, "{}");
    fake_vm_say(v, (enum jp_channel)(a & 3), msg_types[(a >> 2) % 14], b & 16 ? NULL : parent,
                contents[(b >> 5 | (a & 64) >> 3) % 12]);
    jp_msg_unref(parent);
}

static void guest_move(struct game *g, uint8_t move)
{
    static const enum gl_type types[] = { GL_KERNEL_STATE, GL_KERNEL_DONE, GL_KERNEL_MSG,
                                          GL_KERNEL_OUT, GL_EVENT };
    struct fake_vm *v = fake_vm_last(&g->r.vms);
    if (!v)
        return;
    switch (move) {
    case 0:
        if (!v->is_up)
            fake_vm_up(v);
        return;
    case 1:
        fake_vm_down(v, (enum vm_exit_reason)(take(g) % 6), "fuzzed");
        return;
    case 2:
        v->full = !v->full;
        if (v->is_up && !v->down_queued)
            v->ev->writable(v->ctx, v->stream);
        return;
    default:
        break;
    }
    if (!v->is_up)
        return;
    if (move == 3) {
        guest_message(g, v);
    } else if (move == 4) {
        fake_vm_state(v, states[take(g) % 6]);
    } else if (move == 5) {
        uint8_t id = take(g);
        fake_vm_done(v, id & 63, id & 64);
    } else {
        uint8_t a = take(g);
        fake_vm_raw(v, types[a % 5], a & 64 ? 9 : v->stream, take_bytes(g));
    }
}

/* ---- the clients ---- */

static void client_submit(struct game *g, struct rig_client *c)
{
    static const char *const types[] = { "execute_request",   "kernel_info_request",
                                         "interrupt_request", "shutdown_request",
                                         "input_reply",       "comm_msg",
                                         "complete_request",  "debug_request" };
    uint8_t a = take(g), b = take(g);
    char id[8];
    snprintf(id, sizeof(id), "r%u", b & 7u);
    rig_submit(c, (enum jp_channel)(a & 3), types[(a >> 2) & 7], b & 64 ? "" : id,
               b & 128 ? "{\"restart\": true}" : contents[b >> 3 & 7]);
}

static void client_move(struct game *g, uint8_t move)
{
    uint8_t a = take(g);
    struct rig_client *c = &g->clients[a % CLIENTS];
    struct km_kernel *k = kernel(g);
    char session[4] = { 'S', (char)('0' + a / CLIENTS % 3), 0 };
    c->lazy = a & 128;
    switch (move) {
    case 0:
        if (!c->c.kernel && k)
            rig_attach(c, k, session);
        return;
    case 1:
        km_client_detach(&c->c);
        return;
    case 2:
        rig_pull(c);
        rig_forget(c);
        return;
    default:
        if (c->c.kernel)
            client_submit(g, c);
        return;
    }
}

/* ---- who owns the kernel ---- */

static void start(struct game *g)
{
    struct km_start s = { .principal = "me", .spec = take(g) & 1 ? "bash" : NULL };
    struct km_op *op;
    if (kernel(g) || km_kernel_start(g->r.m, &s, on_done, g, &op, NULL) < 0)
        return;
    g->asked++;
    snprintf(g->id, sizeof(g->id), "%s", op->kernel->id);
}

static void execute(struct game *g, struct km_kernel *k)
{
    static const struct km_execution_events ev = { .done = on_x_done };
    struct km_execute_opts o;
    km_execute_opts_defaults(&o);
    o.code = "x";
    o.timeout_ms = take(g) & 1 ? 50 : 0;
    if (!g->x && km_execute(k, &o, &ev, g, &g->x, NULL) == 0)
        g->asked++;
}

static void end_execution(struct game *g, bool interrupt)
{
    struct buf b;
    if (!g->x)
        return;
    buf_init(&b, 1u << 20);
    FUZZ_CHECK(km_execution_write_json(g->x, &b) == 0);
    buf_clear(&b);
    FUZZ_CHECK(km_execution_write_text(g->x, &b) == 0);
    buf_fini(&b);
    /* Cancelled before it was told: the answer will not come. */
    unsigned before = g->told;
    if (!strcmp(km_execution_status(g->x), "running")) {
        km_execution_cancel(g->x, interrupt);
        g->asked--;
    } else {
        rig_turn(&g->r);
        FUZZ_CHECK(g->told >= before);
    }
    km_execution_free(g->x);
    g->x = NULL;
}

static void owner_move(struct game *g, uint8_t move)
{
    struct km_kernel *k = kernel(g);
    if (move == 0)
        start(g);
    if (!k)
        return;
    switch (move) {
    case 1:
        g->asked++;
        km_kernel_restart(k, on_done, g, NULL);
        return;
    case 2:
        g->asked++;
        km_kernel_interrupt(k, on_done, g, NULL);
        return;
    case 3:
        if (take(g) < 64)
            km_kernel_shutdown(k, "fuzzed");
        return;
    case 4:
        execute(g, k);
        return;
    case 5:
        end_execution(g, take(g) & 1);
        return;
    default:
        rig_advance(&g->r, (uint64_t)take(g) << (take(g) & 7));
        return;
    }
}

static void check(struct game *g)
{
    const struct km_kernel *k = kernel(g);
    if (!k)
        return;
    FUZZ_CHECK(k->log.bytes <= k->log.bytes_max);
    if (!k->box)
        return;
    const struct fake_vm *v = (const struct fake_vm *)(const void *)k->box->vm;
    FUZZ_CHECK(v->window + k->ungranted == GL_WINDOW);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct game *g = xnew(struct game);
    g->p = data;
    g->left = size;
    rig_init(&g->r);
    log_configure(LOG_LEVEL_ERROR, false);
    g->r.cfg.replay_bytes_max = 2000;
    g->r.vms.prestarted = take(g) & 1;
    rig_start_manager(&g->r);
    start(g);
    for (unsigned n = 0; g->left && n < MOVES_MAX; n++) {
        uint8_t move = take(g);
        if (move < 112)
            guest_move(g, move % 7);
        else if (move < 200)
            client_move(g, move % 5);
        else
            owner_move(g, move % 7);
        if (move & 1)
            rig_turn(&g->r);
        check(g);
    }
    end_execution(g, false);
    rig_advance(&g->r, 100000);
    for (unsigned i = 0; i < CLIENTS; i++)
        rig_client_fini(&g->clients[i]);
    rig_fini(&g->r);
    FUZZ_CHECK(g->r.closed);
    FUZZ_CHECK(g->r.vms.alive == 0);
    FUZZ_CHECK(g->asked == g->told);
    free(g);
    return 0;
}
