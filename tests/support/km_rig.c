#include "tests/support/km_rig.h"
#include "common/mem.h"
#include <string.h>

void rig_init(struct rig *r)
{
    *r = (struct rig) { .loop = loop_new_virtual() };
    log_configure(LOG_LEVEL_ERROR, false);
    fake_service_init(&r->vms, r->loop);
    km_config_defaults(&r->cfg);
}

void rig_start_manager(struct rig *r)
{
    r->m = km_manager_new(r->loop, &r->vms.service, &r->cfg, r->metrics, NULL);
}

static void on_closed(void *ctx)
{
    ((struct rig *)ctx)->closed = true;
}

void rig_turn(struct rig *r)
{
    loop_virtual_advance(r->loop, 0);
}

void rig_advance(struct rig *r, uint64_t ms)
{
    loop_virtual_advance(r->loop, ms);
}

void rig_fini(struct rig *r)
{
    if (r->m) {
        km_manager_close(r->m, on_closed, r);
        rig_advance(r, 10000);
        km_manager_free(r->m);
    }
    metrics_free(r->metrics);
    fake_service_fini(&r->vms);
    loop_free(r->loop);
}

void rig_on_done(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct rig_done *d = ctx;
    d->calls++;
    d->k = k;
    d->e = e ? *e : (struct err) { 0 };
}

struct km_kernel *rig_kernel(struct rig *r, struct fake_vm **ret_vm)
{
    struct km_start s = { .principal = "me" };
    struct rig_done done = { 0 };
    if (!r->m)
        rig_start_manager(r);
    if (km_kernel_start(r->m, &s, rig_on_done, &done, NULL, NULL) < 0)
        return NULL;
    struct fake_vm *v = fake_vm_last(&r->vms);
    fake_vm_up(v);
    if (!r->vms.prestarted)
        fake_vm_state(
            v, "{\"state\":\"running\",\"info\":{\"status\":\"ok\",\"implementation\":\"fake\"}}");
    rig_turn(r);
    struct fake_frame *f;
    while ((f = fake_vm_take(v)))
        fake_frame_free(f);
    *ret_vm = v;
    return done.k;
}

static struct rig_client *of(struct km_client *c)
{
    return (struct rig_client *)(void *)c;
}

void rig_pull(struct rig_client *c)
{
    struct jp_msg *m;
    while ((m = km_client_next(&c->c))) {
        if (c->n_got == c->room) {
            c->room = c->room ? 2 * c->room : 64;
            c->got = xrealloc(c->got, c->room * sizeof(struct jp_msg *));
        }
        c->got[c->n_got++] = m;
    }
}

static void client_wake(struct km_client *c)
{
    of(c)->wakes++;
    if (!of(c)->lazy)
        rig_pull(of(c));
}

static void client_closed(struct km_client *c, enum km_close_why why, const char *text)
{
    of(c)->closes++;
    of(c)->why = why;
    snprintf(of(c)->why_text, sizeof(of(c)->why_text), "%s", text);
}

static void client_throttle(struct km_client *c, bool on)
{
    if (on)
        of(c)->throttles_on++;
    else
        of(c)->throttles_off++;
    if (!on && of(c)->eager)
        rig_submit(of(c), JP_SHELL, "execute_request", "again", of(c)->eager);
}

static const struct km_client_ops ops = { client_wake, client_closed, client_throttle };

int rig_attach(struct rig_client *c, struct km_kernel *k, const char *session)
{
    return km_client_attach(&c->c, k, session, &ops);
}

void rig_forget(struct rig_client *c)
{
    for (size_t i = 0; i < c->n_got; i++)
        jp_msg_unref(c->got[i]);
    c->n_got = 0;
}

void rig_client_fini(struct rig_client *c)
{
    km_client_detach(&c->c);
    rig_forget(c);
    free(c->got);
    c->got = NULL;
    c->room = 0;
}

int rig_submit(struct rig_client *c, enum jp_channel ch, const char *type, const char *id,
               const char *content)
{
    struct jp_msg *m = fake_request(ch, type, c->c.session, id, content ? content : "{}");
    int r = km_client_submit(&c->c, m);
    jp_msg_unref(m);
    return r;
}

size_t rig_count(const struct rig_client *c, const char *type, const char *parent,
                 const struct jp_msg **ret_last)
{
    size_t n = 0;
    if (ret_last)
        *ret_last = NULL;
    for (size_t i = 0; i < c->n_got; i++) {
        if ((type && strcmp(c->got[i]->msg_type, type) != 0) ||
            (parent && strcmp(c->got[i]->parent_id, parent) != 0))
            continue;
        n++;
        if (ret_last)
            *ret_last = c->got[i];
    }
    return n;
}

char *rig_story(const struct rig_client *c, const char *parent)
{
    struct buf b;
    buf_init(&b, 1u << 20);
    for (size_t i = 0; i < c->n_got; i++) {
        char status[16];
        if (parent && strcmp(c->got[i]->parent_id, parent) != 0)
            continue;
        jp_status_of(c->got[i], status);
        buf_printf(&b, "%s%s", b.len ? " " : "", *status ? status : c->got[i]->msg_type);
    }
    char *s = xstrdup(buf_cstr(&b));
    buf_fini(&b);
    return s;
}

bool rig_content_has(const struct jp_msg *m, const char *text)
{
    return m && memmem(m->parts.content.p, m->parts.content.n, text, strlen(text));
}

const char *rig_state(const struct km_kernel *k)
{
    static struct km_kernel_info i;
    km_kernel_info(k, &i);
    return i.execution_state;
}
