/* Header codec of the guest link and the table of legal frames (docs/guestlink.md).
 * The check word is no checksum of the payload: the transport is reliable. It tells at the first
 * wrong header that the two sides lost step (a truncated write, a stale buffer after a restore)
 * instead of taking payload bytes for a length. */
#include "common/rdwr.h"
#include "proto/gl_priv.h"
#include <errno.h>

#define KIB(n) ((n) << 10)

static const struct gl_type_info types[GL_TYPE_END] = {
    [GL_HELLO] = { "hello", GL_FROM_BOTH, GL_IN_HELLO | GL_IN_IDLE, GL_CLASS_CONTROL, 2, KIB(64u) },
    [GL_SPECS] = { "specs", GL_FROM_GUEST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, GL_CONTROL_MAX },
    [GL_PREPARE] = { "prepare", GL_FROM_HOST, GL_IN_IDLE, GL_CLASS_CONTROL, 2, GL_CONTROL_MAX },
    [GL_PREPARED] = { "prepared", GL_FROM_GUEST, GL_IN_IDLE, GL_CLASS_CONTROL, 2, KIB(1024u) },
    [GL_RESUME] = { "resume", GL_FROM_HOST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, GL_CONTROL_MAX },
    [GL_RESUMED] = { "resumed", GL_FROM_GUEST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, KIB(1024u) },
    [GL_ASSIGN] = { "assign", GL_FROM_HOST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, KIB(1024u) },
    [GL_ASSIGNED] = { "assigned", GL_FROM_GUEST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, KIB(1024u) },
    [GL_SHUTDOWN] = { "shutdown", GL_FROM_HOST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, KIB(64u) },
    [GL_PING] = { "ping", GL_FROM_BOTH, GL_IN_LIFE, GL_CLASS_CONTROL, 0, 64 },
    [GL_PONG] = { "pong", GL_FROM_BOTH, GL_IN_LIFE, GL_CLASS_CONTROL, 0, 64 },
    [GL_LOG] = { "log", GL_FROM_GUEST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, KIB(1024u) },
    [GL_EVENT] = { "event", GL_FROM_GUEST, GL_IN_LIFE, GL_CLASS_CONTROL, 2, KIB(64u) },
    [GL_CREDIT] = { "credit", GL_FROM_BOTH, GL_IN_LIFE, GL_CLASS_URGENT, 4, 4 },
    [GL_KERNEL_START] = { "kernel_start", GL_FROM_HOST, GL_IN_RUNNING, GL_CLASS_ORDERED, 2,
                          KIB(1024u) },
    /* Also while parked: a kernel that dies in the pool must be able to say so. */
    [GL_KERNEL_STATE] = { "kernel_state", GL_FROM_GUEST, GL_IN_LIFE, GL_CLASS_ORDERED, 2,
                          KIB(1024u) },
    [GL_KERNEL_CTL] = { "kernel_ctl", GL_FROM_HOST, GL_IN_RUNNING, GL_CLASS_URGENT, 2, KIB(64u) },
    [GL_KERNEL_DONE] = { "kernel_done", GL_FROM_GUEST, GL_IN_RUNNING, GL_CLASS_URGENT, 2,
                         KIB(64u) },
    [GL_KERNEL_MSG] = { "kernel_msg", GL_FROM_BOTH, GL_IN_RUNNING, GL_CLASS_BULK, 20, 0 },
    [GL_KERNEL_OUT] = { "kernel_out", GL_FROM_GUEST, GL_IN_RUNNING, GL_CLASS_BULK, 1, KIB(1024u) },
};

const struct gl_type_info *gl_type_info(unsigned type)
{
    return type < GL_TYPE_END && types[type].name ? &types[type] : NULL;
}

const char *gl_type_name(enum gl_type t)
{
    const struct gl_type_info *info = gl_type_info((unsigned)t);
    return info ? info->name : "unknown";
}

bool gl_type_legal(const struct gl_type_info *t, enum gl_role sender, enum gl_phase phase)
{
    return (t->from & (1u << sender)) && (t->phases & (1u << phase));
}

const char *gl_phase_name(enum gl_phase p)
{
    static const char *const names[] = { "hello", "idle", "running" };
    return (unsigned)p < 3 ? names[p] : "?";
}

const char *gl_role_name(enum gl_role r)
{
    return r == GL_HOST ? "host" : "guest";
}

static uint16_t check_word(const struct gl_header *h)
{
    uint32_t sum = h->length * UINT32_C(0x9E3779B1) +
                   (h->type | (uint32_t)h->flags << 8) * UINT32_C(0x85EBCA77) +
                   h->stream * UINT32_C(0xC2B2AE3D);
    return (uint16_t)(sum >> 16);
}

void gl_header_put(uint8_t ret[GL_HEADER], const struct gl_header *h)
{
    uint16_t check = check_word(h);

    put_u32le(ret, h->length);
    ret[4] = h->type;
    ret[5] = h->flags;
    ret[6] = (uint8_t)check;
    ret[7] = (uint8_t)(check >> 8);
    put_u32le(ret + 8, h->stream);
}

int gl_header_get(const uint8_t bytes[GL_HEADER], struct gl_header *ret,
                  const struct gl_type_info **ret_info, struct err *e)
{
    struct rd r = rd_of(slice_of(bytes, GL_HEADER));
    struct gl_header h;
    const struct gl_type_info *info;
    uint16_t check;

    h.length = rd_u32le(&r);
    h.type = rd_u8(&r);
    h.flags = rd_u8(&r);
    check = rd_u16le(&r);
    h.stream = rd_u32le(&r);

    if (check != check_word(&h))
        return err_set(e, -EPROTO, "lost step: header check is %04x, must be %04x", check,
                       check_word(&h));
    if (h.length > GL_FRAME_MAX)
        return err_set(e, -EPROTO, "frame of %u bytes, at most %u", h.length, GL_FRAME_MAX);
    if (h.flags & ~GL_FLAG_MORE)
        return err_set(e, -EPROTO, "unknown frame flags %02x", h.flags);
    info = gl_type_info(h.type);
    if (!info)
        return err_set(e, -EPROTO, "frame type %u is not known to link version %u", h.type,
                       GL_VERSION);
    if (h.stream >= GL_STREAMS_MAX)
        return err_set(e, -EPROTO, "%s frame on stream %u, streams end at %u", info->name, h.stream,
                       GL_STREAMS_MAX - 1);
    if ((info->class == GL_CLASS_CONTROL) != (h.stream == 0))
        return err_set(e, -EPROTO, "%s frame on stream %u belongs on %s", info->name, h.stream,
                       h.stream ? "stream 0" : "a kernel stream");
    if ((h.flags & GL_FLAG_MORE) && h.length == 0)
        return err_set(e, -EPROTO, "empty %s frame that promises more", info->name);
    if ((h.flags & GL_FLAG_MORE) && info->class == GL_CLASS_URGENT)
        return err_set(e, -EPROTO, "%s message cut into several frames", info->name);
    *ret = h;
    *ret_info = info;
    return 0;
}
