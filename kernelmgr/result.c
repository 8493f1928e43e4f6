/* Outputs of one execution. Streams are joined as JSON text (nothing is decoded until somebody
 * wants plain text); rich outputs are kept as references to their messages, so that data and
 * metadata go out byte for byte. Content comes from user code: every key may be missing or of
 * another type, which then reads as empty. */
#include "kernelmgr/result.h"
#include "common/mem.h"
#include "kernelmgr/text.h"
#include "proto/jp_json.h"
#include <string.h>

static struct km_output *out_of(struct list_node *n)
{
    return list_entry(n, struct km_output, link);
}

void km_result_init(struct km_result *r, size_t bytes_max)
{
    *r = (struct km_result) { .bytes_max = bytes_max };
    list_init(&r->outputs);
}

static void output_free(struct km_output *o)
{
    list_remove(&o->link);
    buf_fini(&o->text);
    jp_msg_unref(o->msg);
    free(o->display_id);
    free(o);
}

static void clear(struct km_result *r)
{
    LIST_FOR_EACH_SAFE (&r->outputs, n)
        output_free(out_of(n));
    r->bytes = 0;
    r->clear_next = false;
}

void km_result_fini(struct km_result *r)
{
    clear(r);
    jp_msg_unref(r->reply);
    r->reply = NULL;
}

static struct slice value_of(const struct jp_msg *m, const char *key)
{
    struct slice v;
    return jp_json_find(m->parts.content, key, &v) == 0 ? v : SLICE_NULL;
}

static struct km_output *output_new(struct km_result *r, enum km_output_kind kind)
{
    struct km_output *o = xnew(struct km_output);
    o->kind = kind;
    buf_init(&o->text, r->bytes_max + 16);
    list_push_back(&r->outputs, &o->link);
    return o;
}

/* ---- streams ---- */

/* The longest part of JSON string text within max bytes that cuts no escape and no UTF-8 sequence.
 */
static size_t safe_cut(struct slice s, size_t max)
{
    size_t i = 0;
    while (i < s.n) {
        uint8_t c = s.p[i];
        size_t step = 1;
        if (c == '\\')
            step = i + 1 < s.n && s.p[i + 1] == 'u' ? 6 : 2;
        else if (c >= 0xc0)
            step = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
        if (i + step > max || i + step > s.n)
            break;
        i += step;
    }
    return i;
}

static void add_stream(struct km_result *r, const struct jp_msg *m)
{
    struct slice text = value_of(m, "text");
    bool is_stderr = slice_eq_str(value_of(m, "name"), "\"stderr\"");
    if (text.n < 2 || text.p[0] != '"')
        return;
    text = slice_of(text.p + 1, text.n - 2);
    size_t room = r->bytes_max - r->bytes;
    size_t keep = text.n <= room ? text.n : safe_cut(text, room);
    r->truncated += text.n - keep;
    if (!keep)
        return;
    struct km_output *o = list_empty(&r->outputs) ? NULL : out_of(r->outputs.head.prev);
    if (!o || o->kind != KM_OUT_STREAM || o->is_stderr != is_stderr) {
        o = output_new(r, KM_OUT_STREAM);
        o->is_stderr = is_stderr;
    }
    if (buf_append(&o->text, text.p, keep) < 0)
        r->truncated += keep;
    else
        r->bytes += keep;
}

/* ---- rich outputs ---- */

static char *display_id_of(const struct jp_msg *m)
{
    struct slice transient = value_of(m, "transient"), id;
    if (!transient.n || !jp_json_is_object(transient) ||
        jp_json_find(transient, "display_id", &id) < 0)
        return NULL;
    return id.n && id.p[0] == '"' ? slice_dup(id) : NULL;
}

static void add_rich(struct km_result *r, struct jp_msg *m, enum km_output_kind kind)
{
    if (r->bytes + m->size > r->bytes_max) {
        r->truncated += m->size;
        return;
    }
    struct km_output *o = output_new(r, kind);
    o->msg = jp_msg_ref(m);
    o->display_id = kind == KM_OUT_ERROR ? NULL : display_id_of(m);
    r->bytes += m->size;
}

void km_result_update(struct km_result *r, struct jp_msg *m)
{
    CLEANUP(freep) char *id = display_id_of(m);
    if (!id)
        return;
    LIST_FOR_EACH (&r->outputs, n) {
        struct km_output *o = out_of(n);
        if (!o->display_id || strcmp(o->display_id, id) != 0)
            continue;
        if (r->bytes - o->msg->size + m->size > r->bytes_max) {
            r->truncated += m->size;
            continue;
        }
        r->bytes += m->size - o->msg->size;
        jp_msg_unref(o->msg);
        o->msg = jp_msg_ref(m);
    }
}

void km_result_add(struct km_result *r, struct jp_msg *m)
{
    const char *t = m->msg_type;
    bool stream = !strcmp(t, "stream"), display = !strcmp(t, "display_data");
    bool result = !strcmp(t, "execute_result"), error = !strcmp(t, "error");
    if (!strcmp(t, "update_display_data")) {
        km_result_update(r, m);
        return;
    }
    if (!strcmp(t, "clear_output")) {
        if (slice_eq_str(value_of(m, "wait"), "true"))
            r->clear_next = true;
        else
            clear(r);
        return;
    }
    if (!stream && !display && !result && !error)
        return;
    if (r->clear_next)
        clear(r);
    if (stream)
        add_stream(r, m);
    else
        add_rich(r, m, display ? KM_OUT_DISPLAY : result ? KM_OUT_RESULT : KM_OUT_ERROR);
}

void km_result_set_reply(struct km_result *r, struct jp_msg *m)
{
    jp_msg_unref(r->reply);
    r->reply = jp_msg_ref(m);
}

struct slice km_result_reply_value(const struct km_result *r, const char *key)
{
    return r->reply ? value_of(r->reply, key) : SLICE_NULL;
}

/* ---- nbformat ---- */

static int put_value(struct buf *out, const char *key, struct slice v, const char *otherwise)
{
    int r = buf_printf(out, ", \"%s\": ", key);
    if (r == 0)
        r = v.n ? buf_append_slice(out, v) : buf_append_str(out, otherwise);
    return r;
}

static int put_output(const struct km_output *o, struct buf *out)
{
    int r;
    if (o->kind == KM_OUT_STREAM) {
        r = buf_printf(out, "{\"output_type\": \"stream\", \"name\": \"%s\", \"text\": \"",
                       o->is_stderr ? "stderr" : "stdout");
        if (r == 0)
            r = buf_append_slice(out, buf_slice(&o->text));
        return r < 0 ? r : buf_append_str(out, "\"}");
    }
    if (o->kind == KM_OUT_ERROR) {
        r = buf_append_str(out, "{\"output_type\": \"error\"");
        if (r == 0)
            r = put_value(out, "ename", value_of(o->msg, "ename"), "\"\"");
        if (r == 0)
            r = put_value(out, "evalue", value_of(o->msg, "evalue"), "\"\"");
        if (r == 0)
            r = put_value(out, "traceback", value_of(o->msg, "traceback"), "[]");
    } else {
        bool result = o->kind == KM_OUT_RESULT;
        r = buf_printf(out, "{\"output_type\": \"%s\"", result ? "execute_result" : "display_data");
        if (r == 0 && result)
            r = put_value(out, "execution_count", value_of(o->msg, "execution_count"), "null");
        if (r == 0)
            r = put_value(out, "data", value_of(o->msg, "data"), "{}");
        if (r == 0)
            r = put_value(out, "metadata", value_of(o->msg, "metadata"), "{}");
    }
    return r < 0 ? r : buf_append_byte(out, '}');
}

int km_result_write_outputs(const struct km_result *r, struct buf *out)
{
    int rc = buf_append_byte(out, '[');
    bool first = true;
    LIST_FOR_EACH (&r->outputs, n) {
        if (rc == 0 && !first)
            rc = buf_append_str(out, ", ");
        if (rc == 0)
            rc = put_output(out_of(n), out);
        first = false;
    }
    return rc < 0 ? rc : buf_append_byte(out, ']');
}

/* ---- text ---- */

static int text_of_string(struct slice json, struct buf *out)
{
    CLEANUP(freep) char *s = NULL;
    int r = jp_json_string_dup(json, out->max, &s);
    return r < 0 ? 0 : km_text_plain(slice_str(s), out);
}

static int text_of_data(struct slice data, struct buf *out)
{
    struct slice plain;
    if (!data.n || !jp_json_is_object(data) || jp_json_find(data, "text/plain", &plain) < 0)
        return 0;
    int r = text_of_string(plain, out);
    return r < 0 ? r : km_text_newline(out);
}

static int text_of_stream(const struct km_output *o, struct buf *out)
{
    struct buf quoted;
    buf_init(&quoted, o->text.len + 3);
    int r = buf_append_byte(&quoted, '"');
    if (r == 0)
        r = buf_append_slice(&quoted, buf_slice(&o->text));
    if (r == 0)
        r = buf_append_byte(&quoted, '"');
    if (r == 0)
        r = text_of_string(buf_slice(&quoted), out);
    buf_fini(&quoted);
    return r;
}

/* The next value of a list of values (the inside of a JSON array); false at its end. */
static bool next_item(struct slice *list, struct slice *ret)
{
    while (list->n && (list->p[0] == ',' || list->p[0] == ' ' || list->p[0] == '\n'))
        *list = slice_of(list->p + 1, list->n - 1);
    return jp_json_value(*list, ret, list) == 0;
}

static struct slice array_of(struct slice v)
{
    return v.n >= 2 && v.p[0] == '[' ? slice_of(v.p + 1, v.n - 2) : SLICE_NULL;
}

static int text_line(struct slice json, struct buf *out)
{
    int r = text_of_string(json, out);
    return r < 0 ? r : km_text_newline(out);
}

/* Lines of a traceback; without one, "ename: evalue". */
static int text_of_error(const struct jp_msg *m, struct buf *out)
{
    struct slice lines = array_of(value_of(m, "traceback")), line;
    int r = 0;
    if (!lines.n) {
        r = text_of_string(value_of(m, "ename"), out);
        if (r == 0)
            r = buf_append_str(out, ": ");
        return r < 0 ? r : text_line(value_of(m, "evalue"), out);
    }
    while (r == 0 && next_item(&lines, &line))
        r = text_line(line, out);
    return r;
}

/* Help texts exist only in the reply's payload (case-07). */
static int text_of_payload(const struct km_result *res, struct buf *out)
{
    struct slice list = array_of(km_result_reply_value(res, "payload")), item, v;
    int r = 0;
    while (r == 0 && next_item(&list, &item)) {
        if (!jp_json_is_object(item))
            continue;
        if (jp_json_find(item, "data", &v) == 0)
            r = text_of_data(v, out);
        else if (jp_json_find(item, "text", &v) == 0)
            r = text_line(v, out);
    }
    return r;
}

int km_result_write_text(const struct km_result *r, struct buf *out)
{
    int rc = 0;
    LIST_FOR_EACH (&r->outputs, n) {
        const struct km_output *o = out_of(n);
        if (rc == 0 && o->kind != KM_OUT_STREAM)
            rc = km_text_newline(out);
        if (rc < 0)
            return rc;
        if (o->kind == KM_OUT_STREAM)
            rc = text_of_stream(o, out);
        else if (o->kind == KM_OUT_ERROR)
            rc = text_of_error(o->msg, out);
        else
            rc = text_of_data(value_of(o->msg, "data"), out);
    }
    return rc < 0 ? rc : text_of_payload(r, out);
}

void km_result_each_mime(const struct km_result *r, const char *prefix,
                         void (*fn)(void *ctx, struct slice mime, struct slice json_value),
                         void *ctx)
{
    LIST_FOR_EACH (&r->outputs, n) {
        const struct km_output *o = out_of(n);
        struct slice data, key, value;
        size_t pos = 0;
        if (o->kind != KM_OUT_DISPLAY && o->kind != KM_OUT_RESULT)
            continue;
        data = value_of(o->msg, "data");
        while (data.n && jp_json_is_object(data) && jp_json_member(data, &pos, &key, &value) == 1)
            if (slice_starts(key, prefix))
                fn(ctx, key, value);
    }
}
