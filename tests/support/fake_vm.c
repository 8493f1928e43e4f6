#include "tests/support/fake_vm.h"
#include "common/buf.h"
#include "common/id.h"
#include "common/mem.h"
#include <errno.h>
#include <string.h>

static struct fake_vm *fake_of(struct vm *vm)
{
    return (struct fake_vm *)(void *)vm;
}

static const struct fake_vm *fake_of_const(const struct vm *vm)
{
    return (const struct fake_vm *)(const void *)vm;
}

void fake_frame_free(struct fake_frame *f)
{
    if (!f)
        return;
    list_remove(&f->link);
    jp_msg_unref(f->msg);
    free(f->text);
    free(f);
}

static void vm_gone(struct fake_vm *v)
{
    struct list_node *n;
    while ((n = list_first(&v->sent)))
        fake_frame_free(list_entry(n, struct fake_frame, link));
    list_remove(&v->link);
    json_decref(v->env);
    v->service->alive--;
    free(v);
}

static void run_down(void *ctx)
{
    struct fake_vm *v = ctx;
    v->is_down = true;
    v->ev->down(v->ctx, &v->exit);
    vm_gone(v);
}

static void queue_down(struct fake_vm *v, enum vm_exit_reason why, const char *text)
{
    if (v->down_queued)
        return;
    v->down_queued = true;
    v->exit.reason = why;
    snprintf(v->exit.text, sizeof(v->exit.text), "%s", text);
    loop_defer(v->service->loop, run_down, v);
}

void fake_vm_down(struct fake_vm *v, enum vm_exit_reason why, const char *text)
{
    queue_down(v, why, text);
}

static int op_send(struct vm *vm, enum gl_type type, uint32_t stream, const struct slice *parts,
                   size_t n)
{
    struct fake_vm *v = fake_of(vm);
    struct buf b;
    if (!v->is_up || v->down_queued)
        return -ENOTCONN;
    if (v->ctl_error && type != GL_KERNEL_MSG)
        return v->ctl_error;
    if (v->send_error && type == GL_KERNEL_MSG)
        return v->send_error;
    if (v->full && type == GL_KERNEL_MSG)
        return -EAGAIN;
    if (v->room && type == GL_KERNEL_MSG && --v->room == 0)
        v->full = true;
    buf_init(&b, (size_t)1 << 30);
    for (size_t i = 0; i < n; i++)
        buf_append_slice(&b, parts[i]);
    struct fake_frame *f = xnew(struct fake_frame);
    f->type = type;
    f->stream = stream;
    if (type == GL_KERNEL_START)
        v->stream = stream;
    if (type == GL_KERNEL_MSG)
        jp_body_decode(buf_slice(&b), &f->msg, NULL);
    else
        f->text = slice_dup(buf_slice(&b));
    buf_fini(&b);
    list_push_back(&v->sent, &f->link);
    v->n_sent++;
    return 0;
}

static void op_grant(struct vm *vm, uint32_t stream, size_t n)
{
    (void)stream;
    fake_of(vm)->window += n;
    fake_of(vm)->granted += n;
}

static size_t op_queued(const struct vm *vm, uint32_t stream)
{
    (void)stream;
    return fake_of_const(vm)->queued;
}

static void op_close_stream(struct vm *vm, uint32_t stream)
{
    (void)stream;
    fake_of(vm)->closed_streams++;
    fake_of(vm)->queued = 0;
    fake_of(vm)->window = GL_WINDOW;
}

static void op_release(struct vm *vm, unsigned grace_ms)
{
    (void)grace_ms;
    fake_of(vm)->released = true;
    queue_down(fake_of(vm), VM_EXIT_RELEASED, "released");
}

static const struct vm_ops ops = { op_send, op_grant, op_queued, op_close_stream, op_release };

static int acquire(struct vm_service *service, const struct vm_request *r,
                   const struct vm_events *ev, void *ctx, struct vm **ret, struct err *e)
{
    struct fake_service *s = (struct fake_service *)(void *)service;
    if (s->acquire_error)
        return err_set(e, s->acquire_error, "told to fail");
    struct fake_vm *v = xnew(struct fake_vm);
    v->vm.ops = &ops;
    id_uuid4(v->vm.info.id);
    v->service = s;
    v->ev = ev;
    v->ctx = ctx;
    v->window = GL_WINDOW;
    v->stream = 1;
    v->env = json_incref(r->env);
    list_init(&v->sent);
    snprintf(v->template_name, sizeof(v->template_name), "%s", r->template_name);
    snprintf(v->spec, sizeof(v->spec), "%s", r->spec);
    v->vm.info.template_name = v->template_name;
    v->vm.info.tier = VM_TIER_TCG;
    if (s->prestarted) {
        v->vm.info.kernel_stream = 1;
        v->vm.info.kernel_spec = "python3";
        v->vm.info.kernel_info = "{\"status\": \"ok\", \"implementation\": \"fake\"}";
    }
    list_push_back(&s->vms, &v->link);
    s->acquired++;
    s->alive++;
    *ret = &v->vm;
    return 0;
}

static size_t templates(struct vm_service *service, const struct vm_template_desc **ret)
{
    struct fake_service *s = (struct fake_service *)(void *)service;
    *ret = s->templates;
    return s->n_templates;
}

static const struct vm_service_ops service_ops = { acquire, templates };

static json_t *spec_of(const char *name)
{
    return json_pack("{s:{s:[s],s:s,s:s,s:{}},s:{s:s}}", "spec", "argv", name, "display_name", name,
                     "language", "python", "metadata", "resources", "logo-svg.svg", "PHN2Zy8+");
}

void fake_service_init(struct fake_service *s, struct loop *l)
{
    *s = (struct fake_service) { .service.ops = &service_ops, .loop = l, .n_templates = 3 };
    list_init(&s->vms);
    s->specs[0] = json_pack("{s:s,s:{s:o,s:o}}", "default", "python3", "kernelspecs", "bash",
                            spec_of("bash"), "python3", spec_of("python3"));
    s->specs[1] = json_pack("{s:s,s:{s:o}}", "default", "python3", "kernelspecs", "python3",
                            spec_of("python3"));
    s->specs[2] = json_object();
    s->templates[0] = (struct vm_template_desc) { .name = "minimal",
                                                  .ready = true,
                                                  .tier = VM_TIER_TCG,
                                                  .memory_mb = 256,
                                                  .specs = s->specs[1] };
    s->templates[1] = (struct vm_template_desc) {
        .name = "python", .ready = true, .tier = VM_TIER_TCG, .memory_mb = 512, .specs = s->specs[0]
    };
    s->templates[2] = (struct vm_template_desc) { .name = "broken",
                                                  .why_not = "not built",
                                                  .specs = s->specs[2] };
}

void fake_service_fini(struct fake_service *s)
{
    struct list_node *n;
    while ((n = list_first(&s->vms))) { /* a test that failed midway */
        struct fake_vm *v = list_entry(n, struct fake_vm, link);
        loop_cancel_deferred(s->loop, v);
        vm_gone(v);
    }
    for (size_t i = 0; i < 3; i++)
        json_decref(s->specs[i]);
}

struct fake_vm *fake_vm_last(struct fake_service *s)
{
    return list_empty(&s->vms) ? NULL : list_entry(s->vms.head.prev, struct fake_vm, link);
}

void fake_vm_up(struct fake_vm *v)
{
    if (v->down_queued)
        return;
    v->is_up = true;
    v->ev->up(v->ctx);
}

struct fake_frame *fake_vm_take(struct fake_vm *v)
{
    struct list_node *n = list_first(&v->sent);
    if (!n)
        return NULL;
    list_remove(n);
    return list_entry(n, struct fake_frame, link);
}

struct jp_msg *fake_vm_take_msg(struct fake_vm *v)
{
    struct fake_frame *f;
    while ((f = fake_vm_take(v))) {
        struct jp_msg *m = f->msg ? jp_msg_ref(f->msg) : NULL;
        fake_frame_free(f);
        if (m)
            return m;
    }
    return NULL;
}

uint64_t fake_vm_take_ctl(struct fake_vm *v, char op[16])
{
    LIST_FOR_EACH (&v->sent, n) {
        struct fake_frame *f = list_entry(n, struct fake_frame, link);
        if (f->type != GL_KERNEL_CTL)
            continue;
        json_t *o = json_loads(f->text, 0, NULL);
        uint64_t id = (uint64_t)json_integer_value(json_object_get(o, "id"));
        snprintf(op, 16, "%s", json_string_value(json_object_get(o, "op")));
        json_decref(o);
        fake_frame_free(f);
        return id;
    }
    op[0] = 0;
    return 0;
}

int fake_vm_raw(struct fake_vm *v, enum gl_type type, uint32_t stream, struct slice payload)
{
    if (v->down_queued)
        return -ENOTCONN;
    if (type == GL_KERNEL_MSG || type == GL_KERNEL_OUT) {
        if (payload.n > v->window)
            return -ENOSPC;
        v->window -= payload.n;
        v->sent_credits += payload.n;
    }
    v->ev->message(v->ctx, type, stream, payload);
    return 0;
}

static int say_msg(struct fake_vm *v, const struct jp_msg *m)
{
    struct buf b;
    const struct slice json[] = { m->parts.header, m->parts.parent, m->parts.metadata,
                                  m->parts.content };
    buf_init(&b, (size_t)1 << 30);
    size_t head = 4 + 4 * (4 + m->parts.n_buffers);
    jp_body_head(m, buf_reserve(&b, head));
    buf_commit(&b, head);
    for (size_t i = 0; i < 4; i++)
        buf_append_slice(&b, json[i]);
    for (size_t i = 0; i < m->parts.n_buffers; i++)
        buf_append_slice(&b, m->parts.buffers[i]);
    int r = fake_vm_raw(v, GL_KERNEL_MSG, v->stream, buf_slice(&b));
    buf_fini(&b);
    return r;
}

int fake_vm_say(struct fake_vm *v, enum jp_channel ch, const char *type,
                const struct jp_msg *parent, const char *content)
{
    struct jp_msg *m;
    int r = jp_msg_build(ch, type, "kernel-session", parent ? parent->parts.header : SLICE_NULL,
                         slice_str(content), 1700000000000000, &m);
    if (r < 0)
        return r;
    r = say_msg(v, m);
    jp_msg_unref(m);
    return r;
}

void fake_vm_state(struct fake_vm *v, const char *json)
{
    fake_vm_raw(v, GL_KERNEL_STATE, v->stream, slice_str(json));
}

void fake_vm_done(struct fake_vm *v, uint64_t id, bool ok)
{
    char text[80];
    snprintf(text, sizeof(text), "{\"id\":%llu,\"ok\":%s}", (unsigned long long)id,
             ok ? "true" : "false,\"error\":\"no\"");
    fake_vm_raw(v, GL_KERNEL_DONE, v->stream, slice_str(text));
}

void fake_vm_serve(struct fake_vm *v, const struct jp_msg *request)
{
    char reply[JP_ID_MAX];
    fake_vm_say(v, JP_IOPUB, "status", request, "{\"execution_state\": \"busy\"}");
    if (jp_reply_type(request->msg_type, reply))
        fake_vm_say(v, request->parts.channel, reply, request,
                    "{\"status\": \"ok\", \"execution_count\": 1}");
    fake_vm_say(v, JP_IOPUB, "status", request, "{\"execution_state\": \"idle\"}");
}

struct jp_msg *fake_request(enum jp_channel ch, const char *type, const char *session,
                            const char *msg_id, const char *content)
{
    char header[1024];
    struct jp_msg *m = NULL;
    snprintf(header, sizeof(header),
             "{\"msg_id\": \"%s\", \"msg_type\": \"%s\", \"session\": \"%s\", \"username\": \"u\", "
             "\"version\": \"5.3\"}",
             msg_id, type, session);
    struct jp_parts parts = { .channel = ch,
                              .header = slice_str(header),
                              .content = slice_str(content) };
    jp_msg_new(&parts, &m, NULL);
    return m;
}
