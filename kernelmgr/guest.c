/* What a sandbox says about its kernel. All of it is hostile: a frame that does not fit is counted
 * and dropped, never trusted, never fatal to the gateway. Credited payloads are paid back as the
 * log has room (back-pressure). */
#include "common/json.h"
#include "common/utf8.h"
#include "kernelmgr/km_priv.h"
#include "proto/jp_json.h"
#include <errno.h>
#include <signal.h>
#include <string.h>

#define TAIL_SHOWN 300 /* bytes of a failed kernel's last output that go into an error text */

/* ---- credit ---- */

void km_guest_grant(struct km_kernel *k)
{
    if (!k->ungranted || !k->box)
        return;
    /* A client that is attached and slow keeps the log full: the guest waits, nothing is lost. */
    if (k->log.bytes + KM_LOG_RESERVE > k->log.bytes_max) {
        if (!k->held_back)
            metric_add(k->m->met.held_back, 1);
        k->held_back = true;
        return;
    }
    k->held_back = false;
    size_t n = k->ungranted;
    k->ungranted = 0;
    vm_grant(k->box->vm, k->stream, n);
}

/* ---- messages ---- */

/* iopub is ordered: when a later request of the same queue begins, earlier ones are over, whatever
 * got lost. */
static void infer_lost_idles(struct km_kernel *k, const struct km_req *begun)
{
    LIST_FOR_EACH_SAFE (&k->router.order, n) {
        struct km_req *q = list_entry(n, struct km_req, link);
        if (q == begun)
            return;
        bool over = q->begun && !q->replies_due && q->idles_due == 1;
        if (over && q->channel == begun->channel && !strcmp(q->subshell, begun->subshell))
            km_synth_missing(k, q);
    }
}

static void learn_session(struct km_kernel *k, const struct jp_msg *m)
{
    if (*m->session && strcmp(k->session, m->session) != 0)
        snprintf(k->session, sizeof(k->session), "%s", m->session);
}

/* Whose is output that bypasses the protocol? That of the cell that runs. */
static void note_running(struct km_kernel *k, struct jp_msg *m, bool busy)
{
    if (busy && !jp_type_untracked(m->parent_type) && m->size <= KM_HEADER_MAX) {
        jp_msg_unref(k->raw_parent);
        k->raw_parent = jp_msg_ref(m);
    } else if (!busy && k->raw_parent && !strcmp(k->raw_parent->parent_id, m->parent_id)) {
        jp_msg_unref(TAKE_PTR(k->raw_parent));
    }
}

/* A request waits for its second half: look after it in a while. */
static void watch_half(struct km_kernel *k)
{
    if (k->router.n_half)
        km_kernel_poke(k, loop_now_ms(k->m->loop) + k->m->cfg.reply_grace_ms);
    km_unthrottle_soon(k);
}

static void on_status(struct km_kernel *k, struct jp_msg *m, struct km_req *q, const char *status)
{
    bool busy = !strcmp(status, "busy"), idle = !strcmp(status, "idle");
    if (!strcmp(status, "starting")) {
        if (k->said_starting)
            return; /* ours went out already */
        k->said_starting = true;
    }
    if (busy || idle)
        note_running(k, m, busy);
    if (busy && q) {
        infer_lost_idles(k, q);
        km_router_busy(&k->router, q, true);
    }
    km_state_observe(k, m, q, status);
    km_publish(k, m, 0, NULL);
    if (busy && q && q->interrupt_on_busy) {
        q->interrupt_on_busy = false;
        km_kernel_ctl(k, ++k->next_ctl, "interrupt");
    }
    if (idle && q && q->idles_due) {
        km_router_idled(&k->router, q, loop_now_ms(k->m->loop));
        watch_half(k);
    }
}

static void on_iopub(struct km_kernel *k, struct jp_msg *m)
{
    char status[16];
    learn_session(k, m);
    if (!strcmp(m->msg_type, "iopub_welcome"))
        return; /* between the shim and the kernel */
    struct km_req *q = km_router_find(&k->router, m->parent_id);
    jp_status_of(m, status);
    if (*status) {
        on_status(k, m, q, status);
        return;
    }
    if (q && q->half_ms)
        q->half_ms = loop_now_ms(k->m->loop); /* its output still flows */
    km_state_observe(k, m, q, "");
    if (!strcmp(m->msg_type, "update_display_data"))
        km_executions_observe(k, m);
    km_publish(k, m, 0, NULL);
}

static bool reply_ok(const struct jp_msg *m)
{
    struct slice status;
    return jp_json_find(m->parts.content, "status", &status) == 0 && slice_eq_str(status, "\"ok\"");
}

static void on_reply(struct km_kernel *k, struct jp_msg *m)
{
    struct km_req *q = km_router_find(&k->router, m->parent_id);
    if (!q || !q->replies_due) {
        log_debug(&k->log_ctx, "%s without a request in flight dropped", m->msg_type);
        return;
    }
    km_inputs_drop(k, q->msg_id);
    if (!strcmp(m->msg_type, "kernel_info_reply") && m->parts.content.n <= KM_INFO_MAX) {
        free(k->info);
        k->info = slice_dup(m->parts.content);
    }
    km_publish(k, m, q->peer, NULL);
    /* ipykernel 7 may drop the task that was about to say idle for the subshell's last message. */
    if (*q->ends && reply_ok(m))
        km_router_subshell_gone(&k->router, q->ends, loop_now_ms(k->m->loop));
    km_router_replied(&k->router, q, loop_now_ms(k->m->loop));
    watch_half(k);
}

static bool peer_known(const struct km_kernel *k, uint32_t peer)
{
    LIST_FOR_EACH (&k->peers, n)
        if (list_entry(n, struct km_peer, link)->id == peer)
            return true;
    return false;
}

/* At most once a second: the guest may ask as often as it likes. */
static void interrupt_prompt(struct km_kernel *k)
{
    uint64_t now = loop_now_ms(k->m->loop);
    if (k->prompt_ms && now - k->prompt_ms < KM_PROMPT_INTERVAL_MS)
        return;
    k->prompt_ms = now ? now : 1;
    log_info(&k->log_ctx, "a prompt without an asker: interrupting it");
    km_kernel_ctl(k, ++k->next_ctl, "interrupt");
}

/* A prompt goes to the asker alone. Nobody there to answer, now or later: stop the cell instead of
 * a hang. */
static void on_input_request(struct km_kernel *k, struct jp_msg *m)
{
    struct km_req *q = km_router_find(&k->router, m->parent_id);
    unsigned open = 0;
    if (!q || !peer_known(k, q->peer)) {
        interrupt_prompt(k);
        return;
    }
    if (m->size > KM_HEADER_MAX) { /* not worth remembering */
        km_publish(k, m, q->peer, NULL);
        return;
    }
    LIST_FOR_EACH (&k->inputs, n)
        open++;
    struct list_node *oldest = list_first(&k->inputs);
    if (open >= KM_INPUTS_MAX && oldest) {
        struct km_input *old = list_entry(oldest, struct km_input, link);
        list_remove(&old->link);
        jp_msg_unref(old->msg);
        free(old);
    }
    struct km_input *in = xnew(struct km_input);
    in->msg = jp_msg_ref(m);
    in->peer = q->peer;
    list_push_back(&k->inputs, &in->link);
    km_publish(k, m, q->peer, &in->seq);
}

static void bad_message(struct km_kernel *k, const char *why)
{
    uint64_t n = ++k->bad_messages;
    metric_add(k->m->met.bad_messages, 1);
    if (!(n & (n - 1)))
        log_warn(&k->log_ctx,
                 "a message of the sandbox cannot be read and was dropped (%llu so far): %s",
                 (unsigned long long)n, why);
}

static void on_message(struct km_kernel *k, struct slice payload)
{
    CLEANUP(jp_msg_unrefp) struct jp_msg *m = NULL;
    struct err e = { 0 };
    if (jp_body_decode(payload, &m, &e) < 0) {
        bad_message(k, e.msg);
        return;
    }
    switch (m->parts.channel) {
    case JP_IOPUB:
        on_iopub(k, m);
        return;
    case JP_SHELL:
    case JP_CONTROL:
        on_reply(k, m);
        return;
    case JP_STDIN:
        on_input_request(k, m);
        return;
    }
}

/* ---- bytes past the protocol ---- */

/* Length of the part of s that ends on a whole UTF-8 sequence. */
static size_t whole_utf8(struct slice s)
{
    for (size_t back = 1; back <= 3 && back <= s.n; back++) {
        uint8_t c = s.p[s.n - back];
        if ((c & 0xc0) == 0x80)
            continue;
        size_t need = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return need > back ? s.n - back : s.n;
    }
    return s.n;
}

static void on_raw_output(struct km_kernel *k, struct slice payload)
{
    if (payload.n < 2 || payload.p[0] < 1 || payload.p[0] > 2)
        return;
    struct buf *rest = &k->raw[payload.p[0] - 1];
    struct slice parent = k->raw_parent ? k->raw_parent->parts.parent : SLICE_NULL;
    struct buf text, content;
    struct jp_msg *m = NULL;
    buf_init(&text, payload.n + rest->len);
    buf_init(&content, 6 * (payload.n + rest->len) + 64);
    buf_append_slice(&text, buf_slice(rest));
    buf_append(&text, payload.p + 1, payload.n - 1);
    buf_clear(rest);
    size_t n = whole_utf8(buf_slice(&text));
    buf_append(rest, text.data + text.off + n, text.len - n);
    int r = buf_printf(&content,
                       "{\"name\": \"%s\", \"text\": ", payload.p[0] == 1 ? "stdout" : "stderr");
    if (r == 0)
        r = buf_append_json_string(&content, slice_of(text.data + text.off, n));
    if (r == 0)
        r = buf_append_str(&content, "}");
    if (r == 0 && n)
        r = jp_msg_build(JP_IOPUB, "stream", k->session, parent, buf_slice(&content),
                         loop_wall_us(k->m->loop), &m);
    if (m) {
        km_publish(k, m, 0, NULL);
        jp_msg_unref(m);
    } else if (r < 0) {
        log_error(&k->log_ctx, "%zu bytes of output lost: %s", payload.n, strerror(-r));
    }
    buf_fini(&text);
    buf_fini(&content);
}

/* ---- process state ---- */

static const char *json_str(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

/* "exit code 7", "SIGKILL", "out of memory (512 MB)" */
static void death_text(const struct km_kernel *k, const json_t *o, char *ret, size_t size)
{
    const char *reason = json_str(o, "reason");
    long long sig = json_integer_value(json_object_get(o, "signal"));
    long long code = json_integer_value(json_object_get(o, "exit_code"));
    const char *name = sig > 0 && sig < NSIG ? sigabbrev_np((int)sig) : NULL;
    if (!strcmp(reason, "oom"))
        snprintf(ret, size, "out of memory (%llu MB)", (unsigned long long)k->memory_mb);
    else if (name)
        snprintf(ret, size, "SIG%s", name);
    else if (sig > 0)
        snprintf(ret, size, "signal %lld", sig);
    else if (!strcmp(reason, "start_failed") && !json_is_integer(json_object_get(o, "exit_code")))
        snprintf(ret, size, "it could not be started");
    else
        snprintf(ret, size, "exit code %lld", code);
}

static void with_tail(char *text, size_t size, const json_t *o)
{
    const char *tail = json_str(o, "tail");
    size_t n = strlen(tail), have = strlen(text);
    if (n > TAIL_SHOWN) {
        tail += n - TAIL_SHOWN;
        while ((*tail & 0xc0) == 0x80)
            tail++;
    }
    if (*tail)
        snprintf(text + have, size - have, "; its last output: %s", tail);
}

static void on_exited(struct km_kernel *k, const json_t *o)
{
    char why[120], text[480];
    death_text(k, o, why, sizeof(why));
    switch (km_state(k)) {
    case KM_K_READY:
        km_kernel_died(k, why, false);
        return;
    case KM_K_STARTING:
        if (k->auto_restart) {
            km_kernel_died(k, why, false);
            return;
        }
        snprintf(text, sizeof(text), "kernel %s ended while it was starting: %s", k->spec, why);
        with_tail(text, sizeof(text), o);
        km_kernel_failed(k, -EIO, text);
        return;
    case KM_K_RESTARTING:
        if (!strcmp(json_str(o, "reason"), "start_failed")) {
            snprintf(text, sizeof(text), "kernel %s could not be started again: %s", k->spec, why);
            with_tail(text, sizeof(text), o);
            km_kernel_failed(k, -EIO, text);
        } else {
            km_kernel_process_ended(k, "the kernel was restarted");
        }
        return;
    case KM_K_NEW:
    case KM_K_DEAD:
    case KM_K_CLOSED:
        return;
    }
}

static void on_starting(struct km_kernel *k)
{
    if (km_state(k) == KM_K_RESTARTING) {
        km_kernel_process_ended(k, "the kernel was restarted");
        sm_move(&k->sm, KM_K_STARTING);
    }
    if (km_state(k) != KM_K_STARTING || k->said_starting)
        return;
    k->said_starting = true;
    if (k->first_start || k->auto_restart || strcmp(k->execution_state, "restarting") == 0)
        km_state_set(k, "starting");
    km_synth_status(k, "starting", SLICE_NULL, 0);
}

static void on_running(struct km_kernel *k, const json_t *o)
{
    CLEANUP(freep) char *info = json_dumps(json_object_get(o, "info"), JSON_COMPACT);
    if (km_state(k) == KM_K_RESTARTING)
        on_starting(k);
    if (km_state(k) == KM_K_STARTING)
        km_kernel_ready(k, slice_str(info));
}

static void on_state(struct km_kernel *k, json_t *o)
{
    const char *state = json_str(o, "state");
    if (!strcmp(state, "starting"))
        on_starting(k);
    else if (!strcmp(state, "running"))
        on_running(k, o);
    else if (!strcmp(state, "exited"))
        on_exited(k, o);
}

static void on_done(struct km_kernel *k, json_t *o)
{
    uint64_t id = (uint64_t)json_integer_value(json_object_get(o, "id"));
    bool ok = json_is_true(json_object_get(o, "ok"));
    const char *why = json_str(o, "error");
    LIST_FOR_EACH_SAFE (&k->ops, n) {
        struct km_op *op = list_entry(n, struct km_op, link);
        if (op->kind != KM_OP_INTERRUPT || op->ctl_id != id)
            continue;
        km_op_finish(op, ok ? 0 : -EIO, "the kernel could not be interrupted: %s", why);
        return;
    }
    bool restarting = km_state(k) == KM_K_RESTARTING || km_state(k) == KM_K_STARTING;
    if (id && id == k->restart_ctl && !ok && restarting) {
        char text[300];
        snprintf(text, sizeof(text), "the kernel could not be restarted: %.200s", why);
        km_kernel_failed(k, -EIO, text);
    }
}

void km_guest_message(struct km_kernel *k, enum gl_type type, uint32_t stream, struct slice payload)
{
    if (type == GL_EVENT) {
        uint64_t n = ++k->events;
        if (!(n & (n - 1))) /* as often as the guest likes: say it ever more rarely */
            log_info(&k->log_ctx, "sandbox event %llu: %.*s", (unsigned long long)n,
                     SLICE_FMT(payload));
        return;
    }
    if (stream != k->stream || km_state(k) == KM_K_CLOSED || km_state(k) == KM_K_DEAD) {
        if (k->box && (type == GL_KERNEL_MSG || type == GL_KERNEL_OUT))
            vm_grant(k->box->vm, stream, payload.n);
        return;
    }
    if (type == GL_KERNEL_MSG || type == GL_KERNEL_OUT) {
        k->ungranted += payload.n;
        if (type == GL_KERNEL_MSG)
            on_message(k, payload);
        else
            on_raw_output(k, payload);
        km_guest_grant(k);
        return;
    }
    struct err e = { 0 };
    CLEANUP(json_decrefp) json_t *o = json_parse(payload, &e);
    if (!json_is_object(o)) {
        bad_message(k, e.msg);
        return;
    }
    if (type == GL_KERNEL_STATE)
        on_state(k, o);
    else if (type == GL_KERNEL_DONE)
        on_done(k, o);
}
