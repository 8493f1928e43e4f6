/* Sessions: a path bound to a kernel. One session per path and principal also while its kernel is
 * still starting: later askers join the start (case-141). A session whose kernel has gone stays
 * until it is deleted (410) or the next listing, as with Jupyter's own server. */
#include "common/id.h"
#include "kernelmgr/km_priv.h"
#include <errno.h>
#include <string.h>

struct session {
    struct km_session pub; /* first */
    struct km_manager *m;
    struct list waiters; /* km_op of KM_OP_SESSION */
    struct km_op *start; /* the kernel start that runs, or NULL */
    bool patching;       /* ... replaces a kernel that exists */
};

static struct session *session_of(struct list_node *n)
{
    return (struct session *)(void *)list_entry(n, struct km_session, link);
}

static struct session *priv(struct km_session *s)
{
    return (struct session *)(void *)s;
}

static bool kernel_used(struct km_manager *m, const char *kernel_id)
{
    LIST_FOR_EACH (&m->sessions, n)
        if (!strcmp(session_of(n)->pub.kernel_id, kernel_id))
            return true;
    return false;
}

/* No session uses it any more: end it. */
static int kernel_unuse(struct km_manager *m, const char *principal, const char *kernel_id)
{
    struct km_kernel *k = km_kernel_find(m, principal, kernel_id);
    if (!k)
        return -ENODEV;
    if (!kernel_used(m, kernel_id))
        km_kernel_shutdown(k, "its session was deleted");
    return 0;
}

static void waiters_finish(struct session *s, int code, const char *text)
{
    struct list_node *n;
    while ((n = list_first(&s->waiters)))
        km_op_finish(list_entry(n, struct km_op, link), code, "%s", text);
}

static void session_free(struct session *s)
{
    list_remove(&s->pub.link);
    waiters_finish(s, -ESRCH, "the session was deleted");
    LIST_FOR_EACH (&s->m->done, n) {
        struct km_op *op = list_entry(n, struct km_op, link);
        if (op->session != &s->pub)
            continue;
        op->session = NULL;
        if (!op->result.code)
            err_set(&op->result, -ESRCH, "the session was deleted");
    }
    if (s->start)
        km_op_cancel(TAKE_PTR(s->start));
    free(s->pub.principal);
    free(s->pub.path);
    free(s->pub.name);
    free(s->pub.type);
    free(s);
}

void km_sessions_free(struct km_manager *m)
{
    struct list_node *n;
    while ((n = list_first(&m->sessions)))
        session_free(session_of(n));
}

/* Neither a kernel nor one on its way. */
static bool session_stale(struct session *s)
{
    return !s->start && !km_kernel_find(s->m, s->pub.principal, s->pub.kernel_id);
}

static struct session *find_path(struct km_manager *m, const char *principal, const char *path)
{
    LIST_FOR_EACH_SAFE (&m->sessions, n) {
        struct session *s = session_of(n);
        if (strcmp(s->pub.principal, principal) != 0 || strcmp(s->pub.path, path) != 0)
            continue;
        if (!session_stale(s))
            return s;
        session_free(s);
    }
    return NULL;
}

static struct session *session_new(struct km_manager *m, const char *principal,
                                   const struct km_session_req *r)
{
    struct session *s = xnew(struct session);
    s->m = m;
    list_init(&s->waiters);
    id_uuid4(s->pub.id);
    s->pub.principal = xstrdup(principal);
    s->pub.path = xstrdup(r->path);
    s->pub.name = xstrdup(r->name ? r->name : "");
    s->pub.type = xstrdup(r->type);
    list_push_back(&m->sessions, &s->pub.link);
    return s;
}

static struct km_op *wait_for(struct session *s, km_session_fn fn, void *ctx)
{
    struct km_op *op = km_op_new(s->m, NULL, KM_OP_SESSION, NULL, ctx);
    op->session_fn = fn;
    op->session = &s->pub;
    list_push_back(&s->waiters, &op->link);
    return op;
}

static void bind_kernel(struct session *s, const char *id)
{
    snprintf(s->pub.kernel_id, sizeof(s->pub.kernel_id), "%s", id);
}

static void start_done(void *ctx, struct km_kernel *k, const struct err *e)
{
    struct session *s = ctx;
    char old[sizeof(s->pub.kernel_id)];
    s->start = NULL;
    s->pub.starting = false;
    if (!k) {
        waiters_finish(s, e->code, e->msg);
        if (!s->patching)
            session_free(s);
        else
            s->patching = false;
        return;
    }
    memcpy(old, s->pub.kernel_id, sizeof(old));
    bind_kernel(s, k->id);
    if (s->patching)
        kernel_unuse(s->m, s->pub.principal, old);
    s->patching = false;
    waiters_finish(s, 0, "");
}

static int start_kernel(struct session *s, const struct km_session_req *r, struct err *e)
{
    struct km_start ks = {
        .principal = s->pub.principal, .spec = r->spec, .kernel_id = r->kernel_id, .env = r->env
    };
    int rc = km_kernel_start(s->m, &ks, start_done, s, &s->start, e);
    if (rc == 0 && !s->patching) {
        s->pub.starting = true;
        bind_kernel(s, s->start->kernel->id);
    }
    return rc;
}

int km_session_create(struct km_manager *m, const char *principal, const struct km_session_req *r,
                      km_session_fn fn, void *ctx, struct km_op **ret_op, struct err *e)
{
    if (!r->path || !*r->path)
        return err_set(e, -EINVAL, "Missing field in JSON data: path");
    if (!r->type || !*r->type)
        return err_set(e, -EINVAL, "Missing field in JSON data: type");
    if (!principal)
        principal = "";
    struct session *s = find_path(m, principal, r->path);
    if (!s) {
        s = session_new(m, principal, r);
        struct km_kernel *k = r->kernel_id ? km_kernel_find(m, principal, r->kernel_id) : NULL;
        int rc = 0;
        if (k)
            bind_kernel(s, k->id);
        else
            rc = start_kernel(s, r, e);
        if (rc < 0) {
            session_free(s);
            return rc;
        }
    }
    struct km_op *op = wait_for(s, fn, ctx);
    if (ret_op)
        *ret_op = op;
    if (!s->start || s->patching)
        km_op_finish(op, 0, " ");
    return 0;
}

/* An asker went away: the last one takes an unfinished start along. The op itself is freed by the
 * caller. */
void km_session_op_cancel(struct km_op *op)
{
    if (op->finished || !op->session)
        return;
    struct session *s = priv(op->session);
    list_remove(&op->link);
    if (list_empty(&s->waiters) && s->start) {
        km_op_cancel(TAKE_PTR(s->start));
        if (!s->patching)
            session_free(s);
        else
            s->patching = false;
    }
}

static void replace(char **field, const char *value)
{
    if (!value)
        return;
    char *copy = xstrdup(value);
    free(*field);
    *field = copy;
}

int km_session_patch(struct km_manager *m, struct km_session *pub, const struct km_session_req *r,
                     km_session_fn fn, void *ctx, struct km_op **ret_op, struct err *e)
{
    struct session *s = priv(pub);
    struct km_kernel *k = NULL;
    bool start = !r->kernel_id && r->spec;
    if ((r->path && !*r->path) || (r->type && !*r->type))
        return err_set(e, -EINVAL, "path and type must not be empty");
    if (r->kernel_id && !(k = km_kernel_find(m, pub->principal, r->kernel_id)))
        return err_set(e, -EINVAL, "No such kernel: %.80s", r->kernel_id);
    if ((start || k) && s->start)
        return err_set(e, -EAGAIN,
                       "a kernel of this session is starting: try again when it is ready");
    if (start) {
        s->patching = true;
        int rc = start_kernel(s, r, e);
        if (rc < 0) {
            s->patching = false;
            return rc;
        }
    }
    replace(&pub->path, r->path);
    replace(&pub->name, r->name);
    replace(&pub->type, r->type);
    if (k && strcmp(pub->kernel_id, k->id) != 0) {
        char old[sizeof(pub->kernel_id)];
        memcpy(old, pub->kernel_id, sizeof(old));
        bind_kernel(s, k->id);
        kernel_unuse(m, pub->principal, old);
    }
    struct km_op *op = wait_for(s, fn, ctx);
    if (ret_op)
        *ret_op = op;
    if (!start)
        km_op_finish(op, 0, " ");
    return 0;
}

struct km_session *km_session_find(struct km_manager *m, const char *principal, const char *id)
{
    LIST_FOR_EACH (&m->sessions, n) {
        struct km_session *s = &session_of(n)->pub;
        if (!strcmp(s->id, id) && (!principal || !strcmp(s->principal, principal)))
            return s;
    }
    return NULL;
}

void km_session_each(struct km_manager *m, const char *principal,
                     bool (*fn)(void *ctx, struct km_session *s), void *ctx)
{
    LIST_FOR_EACH_SAFE (&m->sessions, n)
        if (session_stale(session_of(n)))
            session_free(session_of(n));
    LIST_FOR_EACH_SAFE (&m->sessions, n) {
        struct km_session *s = &session_of(n)->pub;
        if ((!principal || !strcmp(s->principal, principal)) && !fn(ctx, s))
            return;
    }
}

int km_session_delete(struct km_manager *m, struct km_session *pub)
{
    char kernel_id[sizeof(pub->kernel_id)];
    struct session *s = priv(pub);
    memcpy(kernel_id, pub->kernel_id, sizeof(kernel_id));
    bool starting = pub->starting;
    session_free(s); /* takes a start that still runs along */
    int r = kernel_unuse(m, NULL, kernel_id);
    return starting ? 0 : r;
}
