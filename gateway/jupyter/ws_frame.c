/* Websocket framing; see ws_frame.h. */
#include "gateway/jupyter/ws_frame.h"
#include "common/id.h"
#include <errno.h>
#include <openssl/sha.h>
#include <string.h>

#define KEEP (64u << 10) /* a reassembly buffer that grew beyond this is given back */

void gw_ws_rx_init(struct gw_ws_rx *r, size_t max_message)
{
    memset(r, 0, sizeof(*r));
    buf_init(&r->msg, max_message);
}

void gw_ws_rx_fini(struct gw_ws_rx *r)
{
    buf_fini(&r->msg);
}

static bool is_control(const struct gw_ws_rx *r)
{
    return r->op & 8;
}

/* Bytes of the header, as far as its first two say; 2 before that. */
static unsigned head_size(const struct gw_ws_rx *r)
{
    if (r->head_n < 2)
        return 2;
    unsigned len = r->head[1] & 0x7f;
    return 2 + (len == 126 ? 2 : len == 127 ? 8 : 0) + 4;
}

/* After two bytes: is this frame legal here? */
static int check_head(const struct gw_ws_rx *r)
{
    uint8_t op = r->head[0] & 0x0f;
    bool fin = r->head[0] & 0x80;
    unsigned len = r->head[1] & 0x7f;
    if (r->head[0] & 0x70)
        return -EPROTO; /* no extension was negotiated */
    if (!(r->head[1] & 0x80))
        return -EPROTO; /* clients must mask (5.1) */
    if (op & 8)
        return op > GW_WS_OP_PONG || !fin || len > 125 ? -EPROTO : 0;
    if (op > GW_WS_BINARY)
        return -EPROTO;
    return (op == 0) == r->fragmented ? 0 : -EPROTO;
}

static int take_head(struct gw_ws_rx *r)
{
    unsigned len = r->head[1] & 0x7f, at = 2, bytes = len == 126 ? 2 : len == 127 ? 8 : 0;
    r->op = r->head[0] & 0x0f;
    r->fin = r->head[0] & 0x80;
    r->left = bytes ? 0 : len;
    for (unsigned i = 0; i < bytes; i++)
        r->left = r->left << 8 | r->head[at++];
    memcpy(r->mask, r->head + at, 4);
    r->mask_at = 0;
    r->head_n = 0;
    r->in_payload = true;
    r->ctl_n = 0;
    if (is_control(r))
        return 0;
    r->fragmented = true;
    return r->left > r->msg.max || r->msg.len > r->msg.max - r->left ? -EMSGSIZE : 0;
}

static void unmask(struct gw_ws_rx *r, uint8_t *p, size_t n)
{
    size_t i = 0;
    for (; i < n && r->mask_at & 3; i++)
        p[i] ^= r->mask[r->mask_at++ & 3];
    uint64_t wide = 0;
    memcpy(&wide, r->mask, 4);
    wide |= wide << 32;
    for (; n - i >= 8; i += 8) {
        uint64_t v;
        memcpy(&v, p + i, 8);
        v ^= wide;
        memcpy(p + i, &v, 8);
    }
    for (; i < n; i++)
        p[i] ^= r->mask[r->mask_at++ & 3];
    r->mask_at &= 3;
}

static enum gw_ws_event control_event(uint8_t op)
{
    return op == GW_WS_OP_PING ? GW_WS_PING : op == GW_WS_OP_PONG ? GW_WS_PONG : GW_WS_CLOSE;
}

/* Payload bytes; sets the event when the frame ends. */
static int take_payload(struct gw_ws_rx *r, uint8_t *p, size_t n, enum gw_ws_event *event,
                        struct slice *payload)
{
    unmask(r, p, n);
    r->left -= n;
    if (is_control(r)) {
        memcpy(r->ctl + r->ctl_n, p, n);
        r->ctl_n += (unsigned)n;
    } else if (!r->left && r->fin && !r->msg.len) {
        /* The whole message lies in the caller's buffer: no copy. */
        r->in_payload = r->fragmented = false;
        *event = GW_WS_MESSAGE;
        *payload = slice_of(p, n);
        return 0;
    } else {
        int e = buf_append(&r->msg, p, n);
        if (e)
            return e == -ENOBUFS ? -EMSGSIZE : e;
    }
    if (r->left)
        return 0;
    r->in_payload = false;
    if (is_control(r)) {
        *event = control_event(r->op);
        *payload = slice_of(r->ctl, r->ctl_n);
    } else if (r->fin) {
        r->fragmented = false;
        *event = GW_WS_MESSAGE;
        *payload = buf_slice(&r->msg);
    }
    return 0;
}

/* The message given out by the last call is done with. */
static void drop_message(struct gw_ws_rx *r)
{
    if (r->fragmented || !r->msg.len)
        return;
    if (r->msg.cap > KEEP)
        buf_fini(&r->msg);
    else
        buf_clear(&r->msg);
}

int gw_ws_rx_feed(struct gw_ws_rx *r, uint8_t *p, size_t n, size_t *ret_used,
                  enum gw_ws_event *ret_event, struct slice *ret_payload)
{
    size_t at = 0;
    int e = 0;
    *ret_event = GW_WS_MORE;
    *ret_payload = SLICE_NULL;
    drop_message(r);
    while (*ret_event == GW_WS_MORE && !e && (at < n || (r->in_payload && !r->left))) {
        if (r->in_payload) {
            size_t k = n - at < r->left ? n - at : (size_t)r->left;
            e = take_payload(r, p + at, k, ret_event, ret_payload);
            at += k;
            continue;
        }
        r->head[r->head_n++] = p[at++];
        if (r->head_n == 2)
            e = check_head(r);
        if (!e && r->head_n >= 2 && r->head_n == head_size(r))
            e = take_head(r);
    }
    *ret_used = at;
    return e;
}

size_t gw_ws_head(uint8_t ret[GW_WS_HEAD_MAX], unsigned op, bool fin, uint64_t len)
{
    ret[0] = (uint8_t)((fin ? 0x80 : 0) | op);
    if (len < 126) {
        ret[1] = (uint8_t)len;
        return 2;
    }
    unsigned bytes = len < 65536 ? 2 : 8;
    ret[1] = bytes == 2 ? 126 : 127;
    for (unsigned i = 0; i < bytes; i++)
        ret[2 + i] = (uint8_t)(len >> 8 * (bytes - 1 - i));
    return 2 + bytes;
}

void gw_ws_accept(struct slice key, char ret[29])
{
    static const char guid[] = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    uint8_t text[64 + sizeof(guid)], md[SHA_DIGEST_LENGTH];
    size_t n = key.n < 64 ? key.n : 64;
    memcpy(text, key.p, n);
    memcpy(text + n, guid, sizeof(guid) - 1);
    SHA1(text, n + sizeof(guid) - 1, md);
    id_base64(ret, slice_of(md, sizeof(md)));
}

bool gw_ws_code_ok(unsigned code)
{
    return (code >= 1000 && code <= 1003) || (code >= 1007 && code <= 1014) ||
           (code >= 3000 && code <= 4999);
}
