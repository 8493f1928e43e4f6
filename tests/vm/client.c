#include "client.h"
#include "common/cleanup.h"
#include "common/json.h"
#include "common/mem.h"
#include "proto/jp_msg.h"
#include "vm/template.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

const char *client_template(char *state_dir, size_t size)
{
    static const char *const candidates[] = { "python", "minimal" };
    const char *env = getenv("CELLVISOR_STATE"), *want = getenv("CELLVISOR_VM_TEMPLATE"),
               *home = getenv("HOME");
    struct err e = { 0 };

    if (env)
        snprintf(state_dir, size, "%s", env);
    else
        snprintf(state_dir, size, "%s/.local/share/cellvisor", home ? home : "/root");
    for (size_t i = 0; i < (want ? 1u : 2u); i++) {
        const char *name = want ? want : candidates[i];
        struct vm_template *t = NULL;

        if (vm_template_load(state_dir, name, &t, &e) == 0) {
            vm_template_free(t);
            return name;
        }
        fprintf(stderr, "template %s: %s\n", name, e.msg);
    }
    fprintf(stderr,
            "\n*** NO VM TEMPLATE IS BUILT in %s: real VMs are NOT TESTED. Build one with "
            "`cellvisor template "
            "build minimal`. ***\n\n",
            state_dir);
    return NULL;
}

int client_open(struct client_host *h, const struct vm_host_config *c, struct err *e)
{
    int r;

    memset(h, 0, sizeof(*h));
    h->loop = loop_new();
    h->metrics = metrics_new();
    r = vm_host_new(h->loop, c, h->metrics, NULL, &h->host, e);
    if (r < 0) {
        metrics_free(h->metrics);
        loop_free(h->loop);
    }
    return r;
}

static void on_closed(void *ctx)
{
    struct client_host *h = ctx;

    h->closed = 1;
}

bool client_close(struct client_host *h)
{
    uint64_t end = loop_now_ms(h->loop) + 10000;

    vm_host_close(h->host, 0, on_closed, h);
    while (!h->closed && loop_now_ms(h->loop) < end)
        loop_step(h->loop, 50);
    vm_host_free(h->host);
    metrics_free(h->metrics);
    loop_free(h->loop);
    return h->closed;
}

/* ---- callbacks ---- */

static void on_up(void *ctx)
{
    struct client_vm *v = ctx;

    v->up = 1;
}

static void on_down(void *ctx, const struct vm_exit *why)
{
    struct client_vm *v = ctx;

    v->down = 1;
    v->down_us = loop_now_us(v->h->loop);
    v->why = *why;
    v->vm = NULL;
}

static void add_text(struct client_vm *v, json_t *s)
{
    if (json_is_string(s))
        buf_append(&v->text, json_string_value(s), json_string_length(s));
}

static void on_output(struct client_vm *v, const struct jp_msg *m)
{
    json_t *content = json_parse(m->parts.content, NULL), *data = json_object_get(content, "data");
    char state[16];

    jp_status_of(m, state);
    if (strcmp(state, "idle") == 0)
        v->idle = true;
    if (strcmp(m->msg_type, "stream") == 0)
        add_text(v, json_object_get(content, "text"));
    add_text(v, json_object_get(data, "text/plain"));
    v->pngs += json_object_get(data, "image/png") != NULL;
    if (strcmp(m->msg_type, "error") == 0) {
        buf_append_str(&v->text, "ERROR ");
        add_text(v, json_object_get(content, "ename"));
        buf_append_str(&v->text, ": ");
        add_text(v, json_object_get(content, "evalue"));
    }
    json_decref(content);
}

static void on_message(void *ctx, enum gl_type type, uint32_t stream, struct slice payload)
{
    struct client_vm *v = ctx;
    struct jp_msg *m = NULL;

    if (type == GL_KERNEL_MSG || type == GL_KERNEL_OUT)
        vm_grant(v->vm, stream, payload.n);
    if (type != GL_KERNEL_MSG || jp_body_decode(payload, &m, NULL) < 0)
        return;
    if (strcmp(m->parent_id, v->msg_id) == 0) {
        if (m->parts.channel == JP_IOPUB)
            on_output(v, m);
        else if (strcmp(m->msg_type, "execute_reply") == 0)
            v->replied = true;
    }
    jp_msg_unref(m);
}

static const struct vm_events events = { on_up, on_message, NULL, on_down };

/* ---- use ---- */

int client_start(struct client_host *h, struct client_vm *v, const char *template_name,
                 struct err *e)
{
    struct vm_request r = { .template_name = template_name };

    memset(v, 0, sizeof(*v));
    v->h = h;
    buf_init(&v->text, 4u << 20);
    return vm_acquire(vm_host_service(h->host), &r, &events, v, &v->vm, e);
}

static bool wait_for(struct client_vm *v, const int *flag, uint64_t ms)
{
    uint64_t end = loop_now_ms(v->h->loop) + ms;

    while (!*flag && loop_now_ms(v->h->loop) < end)
        loop_step(v->h->loop, 100);
    return *flag;
}

bool client_wait_up(struct client_vm *v, uint64_t ms)
{
    uint64_t end = loop_now_ms(v->h->loop) + ms;

    while (!v->up && !v->down && loop_now_ms(v->h->loop) < end)
        loop_step(v->h->loop, 100);
    return v->up && !v->down;
}

bool client_wait_down(struct client_vm *v, uint64_t ms)
{
    return wait_for(v, &v->down, ms);
}

int client_send(struct client_vm *v, const char *code)
{
    json_t *content =
        json_pack("{s:s, s:b, s:b, s:{}, s:b, s:b}", "code", code, "silent", 0, "store_history", 1,
                  "user_expressions", "allow_stdin", 0, "stop_on_error", 1);
    CLEANUP(freep) char *text = json_dumps(content, JSON_COMPACT);
    CLEANUP(freep) uint8_t *head = NULL;
    struct jp_msg *m = NULL;
    int r;

    json_decref(content);
    v->replied = v->idle = false;
    v->pngs = 0;
    buf_clear(&v->text);
    r = jp_msg_build(JP_SHELL, "execute_request", "client", SLICE_NULL, slice_str(text),
                     loop_wall_us(v->h->loop), &m);
    if (r < 0)
        return r;
    snprintf(v->msg_id, sizeof(v->msg_id), "%s", m->msg_id);
    head = xmalloc(4 + 4 * 4);
    jp_body_head(m, head);
    const struct slice parts[] = { slice_of(head, 20), m->parts.header, m->parts.parent,
                                   m->parts.metadata, m->parts.content };
    r = v->vm ? vm_send(v->vm, GL_KERNEL_MSG, v->vm->info.kernel_stream, parts, 5) : -ENOTCONN;
    jp_msg_unref(m);
    return r;
}

bool client_wait_cell(struct client_vm *v, uint64_t ms)
{
    uint64_t end = loop_now_ms(v->h->loop) + ms;

    while (!(v->replied && v->idle) && !v->down && loop_now_ms(v->h->loop) < end)
        loop_step(v->h->loop, 100);
    return v->replied && v->idle;
}

const char *client_run(struct client_vm *v, const char *code)
{
    if (client_send(v, code) < 0 || !client_wait_cell(v, 60000))
        return NULL;
    return buf_cstr(&v->text);
}

void client_end(struct client_vm *v, unsigned grace_ms)
{
    if (v->vm) {
        vm_release(v->vm, grace_ms);
        client_wait_down(v, grace_ms + 10000);
    }
    buf_fini(&v->text);
}
