/* Messages that the gateway writes itself. They carry the kernel's session id in the header: a
 * front end takes a change of it for a restart (jupyter.md 2.8). */
#include "kernelmgr/km_priv.h"
#include <string.h>

#define CONTENT_MAX (64u << 10)

void km_synth(struct km_kernel *k, enum jp_channel ch, const char *type, struct slice parent,
              const char *content, uint32_t peer)
{
    struct jp_msg *m;
    if (jp_msg_build(ch, type, k->session, parent, slice_str(content), loop_wall_us(k->m->loop),
                     &m) < 0) {
        log_error(&k->log_ctx, "no memory for a %s message", type);
        return;
    }
    metric_add(k->m->met.made_up, 1);
    km_publish(k, m, peer, NULL);
    jp_msg_unref(m);
}

void km_synth_status(struct km_kernel *k, const char *state, struct slice parent, uint32_t peer)
{
    char content[64];
    snprintf(content, sizeof(content), "{\"execution_state\": \"%s\"}", state);
    km_synth(k, JP_IOPUB, "status", parent, content, peer);
}

/* Content of an error reply (with status) or error output (without). */
static char *error_content(const char *ename, const char *evalue, bool reply, bool debug)
{
    struct buf b;
    char line[700];
    buf_init(&b, CONTENT_MAX);
    snprintf(line, sizeof(line), "%s: %s", ename, evalue);
    buf_append_str(&b, reply ? "{\"status\": \"error\", \"ename\": " : "{\"ename\": ");
    buf_append_json_string(&b, slice_str(ename));
    buf_append_str(&b, ", \"evalue\": ");
    buf_append_json_string(&b, slice_str(evalue));
    buf_append_str(&b, ", \"traceback\": [");
    buf_append_json_string(&b, slice_str(line));
    buf_append_str(&b, "]");
    if (debug) { /* the shape of a DAP response, too */
        buf_append_str(&b, ", \"type\": \"response\", \"success\": false, \"message\": ");
        buf_append_json_string(&b, slice_str(line));
    }
    buf_append_str(&b, "}");
    char *s = (char *)buf_cstr(&b) ? (char *)buf_steal(&b, NULL) : NULL;
    buf_fini(&b);
    return s ? s : xstrdup("{\"status\": \"error\"}");
}

static void error_output(struct km_kernel *k, struct slice parent, const char *ename,
                         const char *evalue)
{
    CLEANUP(freep) char *content = error_content(ename, evalue, false, false);
    km_synth(k, JP_IOPUB, "error", parent, content, 0);
}

static void error_reply(struct km_kernel *k, enum jp_channel ch, const char *msg_type,
                        struct slice parent, uint32_t peer, const char *ename, const char *evalue)
{
    char type[JP_ID_MAX];
    if (!jp_reply_type(msg_type, type))
        return;
    CLEANUP(freep)
    char *content = error_content(ename, evalue, true, !strcmp(msg_type, "debug_request"));
    km_synth(k, ch, type, parent, content, peer);
}

void km_synth_answer(struct km_kernel *k, struct km_req *q, const char *ename, const char *evalue)
{
    if (!q->begun && q->idles_due)
        km_synth_status(k, "busy", q->header, 0);
    if (q->replies_due && !strcmp(q->msg_type, "execute_request"))
        error_output(k, q->header, ename, evalue);
    for (; q->replies_due; q->replies_due--)
        error_reply(k, q->channel, q->msg_type, q->header, q->peer, ename, evalue);
    for (; q->idles_due; q->idles_due--)
        km_synth_status(k, "idle", q->header, 0);
    km_router_remove(&k->router, q);
}

/* What a client needs to tell whose parent it is, for headers that are too long to be sent back. */
static char *minimal_header(const struct jp_msg *m)
{
    const char *const fields[][2] = { { "msg_id", m->msg_id },
                                      { "msg_type", m->msg_type },
                                      { "session", m->session } };
    struct buf b;
    buf_init(&b, 8192);
    for (size_t i = 0; i < 3; i++) {
        buf_printf(&b, "%s\"%s\": ", i ? ", " : "{", fields[i][0]);
        buf_append_json_string(&b, slice_str(fields[i][1]));
    }
    buf_append_byte(&b, '}');
    char *s = xstrdup(buf_cstr(&b));
    buf_fini(&b);
    return s;
}

void km_synth_refuse(struct km_kernel *k, const struct jp_msg *m, uint32_t peer, const char *ename,
                     const char *evalue)
{
    char type[JP_ID_MAX];
    CLEANUP(freep) char *minimal = NULL;
    struct slice parent = m->parts.header;
    if (!jp_reply_type(m->msg_type, type))
        return;
    if (parent.n > KM_HEADER_MAX) {
        minimal = minimal_header(m);
        parent = slice_str(minimal);
    }
    km_synth_status(k, "busy", parent, peer);
    if (!strcmp(m->msg_type, "execute_request")) {
        CLEANUP(freep) char *content = error_content(ename, evalue, false, false);
        km_synth(k, JP_IOPUB, "error", parent, content, peer);
    }
    error_reply(k, m->parts.channel, m->msg_type, parent, peer, ename, evalue);
    km_synth_status(k, "idle", parent, peer);
}

void km_synth_missing(struct km_kernel *k, struct km_req *q)
{
    log_warn(&k->log_ctx, "%s %s: the kernel's %s never came, made one up", q->msg_type, q->msg_id,
             q->idles_due ? "idle status" : "reply");
    /* What is missing is filled in; an execute keeps the outputs it has. */
    for (; q->replies_due; q->replies_due--)
        error_reply(k, q->channel, q->msg_type, q->header, q->peer, "MissingReplyError",
                    "the kernel finished this request without sending a reply");
    for (; q->idles_due; q->idles_due--)
        km_synth_status(k, "idle", q->header, 0);
    km_router_remove(&k->router, q);
    if (!k->router.n_busy && !strcmp(k->execution_state, "busy"))
        km_state_set(k, "idle");
}

struct jp_msg *km_synth_gap(struct km_kernel *k, struct km_cursor *c)
{
    char content[400];
    struct jp_msg *m = NULL;
    snprintf(content, sizeof(content),
             "{\"name\": \"stderr\", \"text\": \"[cellvisor] %llu messages (%llu bytes of output) "
             "are missing here: "
             "more was printed while this client was away or slow than the gateway keeps.\\n\"}",
             (unsigned long long)c->gap_msgs, (unsigned long long)c->gap_bytes);
    if (jp_msg_build(JP_IOPUB, "stream", k->session, slice_str(c->gap_parent), slice_str(content),
                     loop_wall_us(k->m->loop), &m) < 0)
        return NULL;
    c->gap_msgs = c->gap_bytes = 0;
    free(TAKE_PTR(c->gap_parent));
    metric_add(k->m->met.made_up, 1);
    return m;
}
