/* The message object, see jp_msg.h. Layout of its one allocation:
 *     struct jp_msg | struct slice buffers[] | decoded ids, NUL-terminated | bytes of all parts */
#include "proto/jp_msg.h"
#include "common/buf.h"
#include "common/cleanup.h"
#include "common/id.h"
#include "common/mem.h"
#include "common/rdwr.h"
#include "common/timefmt.h"
#include "proto/jp_json.h"
#include "proto/jp_priv.h"
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *const channel_names[JP_CHANNELS] = { "shell", "control", "stdin", "iopub" };

const char *jp_channel_name(enum jp_channel c)
{
    return (unsigned)c < JP_CHANNELS ? channel_names[c] : "?";
}

int jp_channel_parse(struct slice name, enum jp_channel *ret)
{
    for (unsigned i = 0; i < JP_CHANNELS; i++) {
        if (!slice_eq_str(name, channel_names[i]))
            continue;
        *ret = (enum jp_channel)i;
        return 0;
    }
    return -EINVAL;
}

int jp_slices_init(struct jp_slices *s, size_t n)
{
    s->v = s->few;
    if (n <= JP_SLICES_INLINE)
        return 0;
    s->v = malloc(n * sizeof(*s->v));
    return s->v ? 0 : -ENOMEM;
}

void jp_slices_fini(struct jp_slices *s)
{
    if (s->v != s->few)
        free(s->v);
}

/* ---- the two headers ---- */

enum id { MSG_ID, MSG_TYPE, SESSION, USERNAME, SUBSHELL, IDS_OF_HEADER };
static const struct slice id_keys[IDS_OF_HEADER] = {
    { (const uint8_t *)"msg_id", 6 },       { (const uint8_t *)"msg_type", 8 },
    { (const uint8_t *)"session", 7 },      { (const uint8_t *)"username", 8 },
    { (const uint8_t *)"subshell_id", 11 },
};
#define IDS (IDS_OF_HEADER + 3) /* then the first three of the parent header */

struct ids {
    char text[IDS][JP_ID_MAX];
    size_t len[IDS];
    bool present[IDS]; /* as a string */
};

/* One pass over a header; keys from `first` on in ids, `n` of them. Values that are not strings
 * (null) count as absent; of a key given twice the last counts, as in Python. */
static int read_header(struct slice header, struct ids *ids, size_t first, size_t n,
                       const char *what, struct err *e)
{
    struct slice key, value;
    size_t pos = 0;
    int r;

    while ((r = jp_json_member(header, &pos, &key, &value)) > 0) {
        size_t k = 0;
        while (k < n && !jp_json_key_eq(key, id_keys[k]))
            k++;
        if (k == n)
            continue;
        ids->present[first + k] = value.p[0] == '"';
        ids->text[first + k][0] = '\0';
        ids->len[first + k] = 0;
        if (value.p[0] != '"')
            continue;
        r = jp_json_decode(value, ids->text[first + k], JP_ID_MAX, &ids->len[first + k]);
        if (r == -ENOBUFS)
            return err_set(e, -E2BIG, "%s.%s is longer than %u bytes", what,
                           (const char *)id_keys[k].p, JP_ID_MAX - 1);
        if (r < 0)
            return err_set(e, -EINVAL, "%s.%s is not a valid JSON string", what,
                           (const char *)id_keys[k].p);
    }
    if (r < 0)
        return err_set(e, -EINVAL, "%s is not a JSON object", what);
    return 0;
}

/* Metadata and content stay opaque: only the brackets are looked at. */
static bool looks_like_object(struct slice s)
{
    size_t a = 0, b = s.n;

    while (a < b && (s.p[a] == ' ' || (s.p[a] >= '\t' && s.p[a] <= '\r')))
        a++;
    while (b > a && (s.p[b - 1] == ' ' || (s.p[b - 1] >= '\t' && s.p[b - 1] <= '\r')))
        b--;
    return b - a >= 2 && s.p[a] == '{' && s.p[b - 1] == '}';
}

static int read_ids(const struct jp_parts *p, struct ids *ids, struct err *e)
{
    int r;

    for (size_t i = 0; i < IDS; i++) {
        ids->text[i][0] = '\0';
        ids->len[i] = 0;
        ids->present[i] = false;
    }
    r = read_header(p->header, ids, 0, IDS_OF_HEADER, "header", e);
    if (r < 0)
        return r;
    if (!ids->present[MSG_TYPE] || !ids->text[MSG_TYPE][0])
        return err_set(e, -EINVAL, "header.msg_type is missing or not a string");
    r = read_header(p->parent, ids, IDS_OF_HEADER, IDS - IDS_OF_HEADER, "parent_header", e);
    if (r < 0)
        return r;
    if (!looks_like_object(p->metadata))
        return err_set(e, -EINVAL, "metadata is not a JSON object");
    if (!looks_like_object(p->content))
        return err_set(e, -EINVAL, "content is not a JSON object");
    return 0;
}

/* ---- construction ---- */

static struct slice or_empty(struct slice s)
{
    return s.n ? s : SLICE_LIT("{}");
}

static int total_size(const struct jp_parts *p, size_t *ret, struct err *e)
{
    size_t size = 0;
    const struct slice json[] = { p->header, p->parent, p->metadata, p->content };

    if (p->n_buffers > JP_BUFFERS_MAX)
        return err_set(e, -E2BIG, "message with %zu buffers, at most %u", p->n_buffers,
                       JP_BUFFERS_MAX);
    for (size_t i = 0; i < 4 + p->n_buffers; i++) {
        size_t n = i < 4 ? json[i].n : p->buffers[i - 4].n;
        if (n > JP_MSG_MAX - size)
            return err_set(e, -E2BIG, "message over %u MiB", JP_MSG_MAX >> 20);
        size += n;
    }
    *ret = size;
    return 0;
}

/* Copy s to *at and move *at behind it. */
static struct slice put(uint8_t **at, struct slice s)
{
    struct slice copy = { *at, s.n };

    if (s.n)
        memcpy(*at, s.p, s.n);
    *at += s.n;
    return copy;
}

static void fill(struct jp_msg *m, const struct jp_parts *p, const struct ids *ids, size_t size)
{
    struct slice *buffers = (struct slice *)(void *)(m + 1);
    uint8_t *at = (uint8_t *)(buffers + p->n_buffers);
    const char **const to[IDS] = {
        &m->msg_id,   &m->msg_type,  &m->session,     &m->username,
        &m->subshell, &m->parent_id, &m->parent_type, &m->parent_session
    };

    m->refs = 1;
    m->size = size;
    for (size_t i = 0; i < IDS; i++)
        *to[i] = (const char *)put(&at, slice_of(ids->text[i], ids->len[i] + 1)).p;
    m->parts.channel = p->channel;
    m->parts.header = put(&at, p->header);
    m->parts.parent = put(&at, p->parent);
    m->parts.metadata = put(&at, p->metadata);
    m->parts.content = put(&at, p->content);
    for (size_t i = 0; i < p->n_buffers; i++)
        buffers[i] = put(&at, p->buffers[i]);
    m->parts.buffers = buffers;
    m->parts.n_buffers = p->n_buffers;
}

int jp_msg_new(const struct jp_parts *parts, struct jp_msg **ret, struct err *e)
{
    struct jp_parts p = *parts;
    struct ids ids;
    struct jp_msg *m;
    size_t size = 0, text = 0;
    int r;

    p.header = or_empty(p.header);
    p.parent = or_empty(p.parent);
    p.metadata = or_empty(p.metadata);
    p.content = or_empty(p.content);
    r = total_size(&p, &size, e);
    if (r < 0)
        return r;
    r = read_ids(&p, &ids, e);
    if (r < 0)
        return r;
    for (size_t i = 0; i < IDS; i++)
        text += ids.len[i] + 1;
    m = mem_try_realloc(NULL, sizeof(*m) + p.n_buffers * sizeof(struct slice) + text + size);
    if (!m)
        return err_set(e, -ENOMEM, "out of memory for a message of %zu bytes", size);
    fill(m, &p, &ids, size);
    *ret = m;
    return 0;
}

struct jp_msg *jp_msg_ref(struct jp_msg *m)
{
    assert(m->refs > 0);
    m->refs++;
    return m;
}

void jp_msg_unref(struct jp_msg *m)
{
    if (!m)
        return;
    assert(m->refs > 0);
    if (--m->refs == 0)
        free(m);
}

static int build_header(struct buf *b, const char *msg_type, const char *session, uint64_t wall_us)
{
    char id[ID_UUID_LEN + 1], date[TIMEFMT_ISO_LEN + 1];
    int r;

    id_uuid4(id);
    timefmt_iso(date, wall_us);
    r = buf_printf(b, "{\"msg_id\":\"%s\",\"msg_type\":", id);
    if (r == 0)
        r = buf_append_json_string(b, slice_str(msg_type));
    if (r == 0)
        r = buf_append_str(b, ",\"session\":");
    if (r == 0)
        r = buf_append_json_string(b, slice_str(session));
    if (r == 0)
        r = buf_printf(b, ",\"username\":\"cellvisor\",\"date\":\"%s\",\"version\":\"5.3\"}", date);
    return r;
}

int jp_msg_build(enum jp_channel channel, const char *msg_type, const char *session,
                 struct slice parent_header, struct slice content, uint64_t wall_us,
                 struct jp_msg **ret)
{
    CLEANUP(buf_fini) struct buf header;
    struct jp_parts p = { .channel = channel, .parent = parent_header, .content = content };
    int r;

    buf_init(&header, 4096);
    r = build_header(&header, msg_type, session, wall_us);
    if (r < 0)
        return r;
    p.header = buf_slice(&header);
    return jp_msg_new(&p, ret, NULL);
}

/* ---- classification ---- */

bool jp_type_untracked(const char *msg_type)
{
    static const char *const types[] = {
        "comm_info_request",
        "comm_info_reply",
        "kernel_info_request",
        "kernel_info_reply",
        "shutdown_request",
        "shutdown_reply",
        "interrupt_request",
        "interrupt_reply",
        "debug_request",
        "debug_reply",
        "stream",
        "display_data",
        "update_display_data",
        "execute_input",
        "execute_result",
        "error",
        "status",
        "clear_output",
        "debug_event",
        "input_request",
        "input_reply",
    };

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (strcmp(types[i], msg_type) == 0)
            return true;
    return false;
}

bool jp_reply_type(const char *request, char ret[JP_ID_MAX])
{
    static const char tail[] = "_request", reply[] = "_reply";
    size_t n = strlen(request), stem;

    if (n < sizeof(tail) || n >= JP_ID_MAX)
        return false;
    stem = n - (sizeof(tail) - 1);
    if (strcmp(request + stem, tail) != 0)
        return false;
    memcpy(ret, request, stem);
    memcpy(ret + stem, reply, sizeof(reply));
    return true;
}

void jp_status_of(const struct jp_msg *m, char ret[16])
{
    struct slice v;

    ret[0] = '\0';
    if (m->parts.channel != JP_IOPUB || strcmp(m->msg_type, "status") != 0)
        return;
    if (jp_json_find(m->parts.content, "execution_state", &v) < 0 || jp_json_string(v, ret, 16) < 0)
        ret[0] = '\0';
}

/* ---- body of a GL_KERNEL_MSG ---- */

static struct slice part_at(const struct jp_msg *m, size_t i)
{
    const struct jp_parts *p = &m->parts;
    const struct slice json[] = { p->header, p->parent, p->metadata, p->content };

    return i < 4 ? json[i] : p->buffers[i - 4];
}

size_t jp_body_size(const struct jp_msg *m)
{
    return 4 + 4 * (4 + m->parts.n_buffers) + m->size;
}

void jp_body_head(const struct jp_msg *m, uint8_t *ret)
{
    size_t n = 4 + m->parts.n_buffers;

    ret[0] = (uint8_t)m->parts.channel;
    ret[1] = 0;
    ret[2] = (uint8_t)n;
    ret[3] = (uint8_t)(n >> 8);
    for (size_t i = 0; i < n; i++)
        put_u32le(ret + 4 + 4 * i, (uint32_t)part_at(m, i).n);
}

/* Lengths are the table (4 bytes each), r the bytes behind it; v[0..3] become the JSON parts. */
static int body_parts(struct rd *lengths, struct rd *r, struct slice *v, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        v[i] = rd_bytes(r, rd_u32le(lengths));
    if (!rd_end(r))
        return err_set(e, -EINVAL, "message body: part lengths do not add up to its size");
    return 0;
}

int jp_body_decode(struct slice body, struct jp_msg **ret, struct err *e)
{
    struct rd r = rd_of(body), lengths;
    uint8_t channel = rd_u8(&r), zero = rd_u8(&r);
    uint16_t n = rd_u16le(&r);
    struct jp_slices parts;
    struct jp_parts p;
    int rc;

    lengths = rd_of(rd_bytes(&r, 4u * (uint64_t)n));
    if (!rd_ok(&r) || n < 4 || zero != 0)
        return err_set(e, -EINVAL, "message body: bad table");
    if (channel >= JP_CHANNELS)
        return err_set(e, -EINVAL, "message body: channel %u does not exist", channel);
    if (n - 4u > JP_BUFFERS_MAX)
        return err_set(e, -E2BIG, "message with %u buffers, at most %u", n - 4u, JP_BUFFERS_MAX);
    rc = jp_slices_init(&parts, n);
    if (rc < 0)
        return err_set(e, rc, "out of memory for %u buffers", n);
    rc = body_parts(&lengths, &r, parts.v, n, e);
    if (rc == 0) {
        p = (struct jp_parts) { (enum jp_channel)channel,
                                parts.v[0],
                                parts.v[1],
                                parts.v[2],
                                parts.v[3],
                                parts.v + 4,
                                n - 4u };
        rc = jp_msg_new(&p, ret, e);
    }
    jp_slices_fini(&parts);
    return rc;
}
