/* Kernels as cv-bench talks to them; see bench.h. Messages are written by snprintf and looked at by
 * memmem: the client's own time is the same few microseconds on a websocket and on ZMQ. */
#include "common/json.h"
#include "common/mem.h"
#include "proto/jp_json.h"
#include "proto/jp_sign.h"
#include "tests/bench/bench.h"
#include <endian.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#define RX_SIZE (64u << 10)
#define FRAMES_MAX 32
#define PARTS_MAX 64

struct peer {
    /* websocket */
    int fd;
    bool quickack; /* acknowledge what is received at once */
    uint8_t *rx;   /* bytes read, not looked at yet: [at, have) */
    size_t at, have, cap;
    uint8_t *msg; /* message under way, when it came in fragments */
    size_t msg_len, msg_cap;
    /* ZMQ */
    void *context, *shell, *iopub;
    struct jp_signer *signer;
    zmq_msg_t frames[FRAMES_MAX];
    size_t n_frames;
    /* both */
    char session[40];
    unsigned count;
};

static bool has(struct slice s, const char *text)
{
    return memmem(s.p, s.n, text, strlen(text)) != NULL;
}

/* ---- websocket ---- */

static void ws_fill(struct peer *p)
{
    if (p->at == p->have)
        p->at = p->have = 0;
    if (p->have == p->cap && p->at) {
        memmove(p->rx, p->rx + p->at, p->have - p->at);
        p->have -= p->at;
        p->at = 0;
    }
    if (p->have == p->cap)
        p->rx = xrealloc(p->rx, p->cap *= 2);
    ssize_t n = recv(p->fd, p->rx + p->have, p->cap - p->have, 0);
    if (n <= 0)
        die("websocket ended: %s", n ? strerror(errno) : "closed");
    p->have += (size_t)n;
    if (p->quickack) {
        int one = 1; /* holds for a while only: again after each read */
        setsockopt(p->fd, IPPROTO_TCP, TCP_QUICKACK, &one, sizeof(one));
    }
}

/* Big-endian number of n bytes. */
static uint64_t be(const uint8_t *b, size_t n)
{
    uint64_t v = 0;
    while (n--)
        v = v << 8 | *b++;
    return v;
}

/* Server frame at `at`: header length and payload length, once all of it is there. */
static size_t ws_frame(struct peer *p, size_t *ret_len)
{
    for (;; ws_fill(p)) {
        size_t have = p->have - p->at;
        const uint8_t *b = p->rx + p->at;
        if (have < 2)
            continue;
        size_t len = b[1] & 0x7f, more = len == 126 ? 2 : len == 127 ? 8 : 0;
        if (have < 2 + more)
            continue;
        if (more)
            len = be(b + 2, more);
        if (have - 2 - more < len)
            continue;
        *ret_len = len;
        return 2 + more;
    }
}

static void ws_send(struct peer *p, int opcode, const uint8_t *bytes, size_t n)
{
    uint8_t *frame = xmalloc(n + 14);
    size_t head = 2;
    frame[0] = (uint8_t)(0x80 | opcode);
    if (n < 126) {
        frame[1] = (uint8_t)(0x80 | n);
    } else if (n < 65536) {
        frame[1] = 0x80 | 126;
        frame[2] = (uint8_t)(n >> 8);
        frame[3] = (uint8_t)n;
        head = 4;
    } else {
        die("message too long for this driver");
    }
    memset(frame + head, 0, 4); /* a mask of zeros: legal, and costs nobody time */
    if (n)
        memcpy(frame + head + 4, bytes, n);
    write_all(p->fd, frame, head + 4 + n);
    free(frame);
}

static void ws_take(struct peer *p, const uint8_t *bytes, size_t n)
{
    if (p->msg_len + n > p->msg_cap)
        p->msg = xrealloc(p->msg, p->msg_cap = (p->msg_len + n) * 2);
    memcpy(p->msg + p->msg_len, bytes, n);
    p->msg_len += n;
}

/* The next whole message; valid until the next call. */
static struct slice ws_recv(struct peer *p)
{
    p->msg_len = 0;
    for (;;) {
        size_t len, head = ws_frame(p, &len);
        const uint8_t *b = p->rx + p->at;
        int opcode = b[0] & 15;
        bool final = b[0] & 0x80;
        p->at += head + len;
        if (opcode == 9)
            ws_send(p, 10, b + head, len);
        if (opcode == 8)
            die("websocket closed by the server: %d %.*s",
                len >= 2 ? b[head] << 8 | b[head + 1] : 0, len >= 2 ? (int)len - 2 : 0,
                (const char *)b + head + 2);
        if (opcode > 2)
            continue;
        if (final && !p->msg_len)
            return slice_of(b + head, len);
        ws_take(p, b + head, len);
        if (final)
            return slice_of(p->msg, p->msg_len);
    }
}

/* v1 framing: u64le count, u64le offsets, channel and four JSON parts (jupyter.md 2.3). */
static void ws_send_v1(struct peer *p, const char *const part[5])
{
    uint8_t out[16384];
    uint64_t n = htole64(6), at = 8 * 7;
    memcpy(out, &n, 8);
    for (int i = 0; i < 5; i++) {
        uint64_t le = htole64(at);
        size_t len = strlen(part[i]);
        memcpy(out + 8 * (i + 1), &le, 8);
        if (at + len > sizeof(out))
            die("message too long for this driver");
        memcpy(out + at, part[i], len);
        at += len;
    }
    uint64_t le = htole64(at);
    memcpy(out + 8 * 6, &le, 8);
    ws_send(p, 2, out, at);
}

static void ws_next(struct peer *p, struct seen *ret)
{
    struct slice m = ws_recv(p);
    uint64_t n, off[PARTS_MAX];
    memcpy(&n, m.p, m.n < 8 ? 0 : 8);
    n = le64toh(n);
    if (m.n < 8 || n < 6 || n > PARTS_MAX || m.n < 8 * (n + 1))
        die("not a v1 message of the kernel websocket");
    memcpy(off, m.p + 8, 8 * n);
    struct slice part[5];
    for (int i = 0; i < 5; i++) {
        off[i + 1] = le64toh(off[i + 1]);
        if (i == 0)
            off[0] = le64toh(off[0]);
        if (off[i] > off[i + 1] || off[i + 1] > m.n)
            die("bad offsets in a v1 message");
        part[i] = slice_of(m.p + off[i], off[i + 1] - off[i]);
    }
    *ret = (struct seen) { .shell = slice_eq_str(part[0], "shell"),
                           .header = part[1],
                           .parent = part[2],
                           .content = part[4] };
}

struct peer *peer_ws(const struct http *h, const char *kernel_id, bool quickack)
{
    struct peer *p = xcalloc(1, sizeof(*p));
    p->quickack = quickack;
    char text[2048];
    snprintf(p->session, sizeof(p->session), "bench-%d-%06x", (int)getpid(),
             (unsigned)(now_us() & 0xffffff));
    snprintf(text, sizeof(text), "http://%s:%s/", h->host, h->port);
    struct http own;
    http_open(&own, text, h->token);
    p->fd = own.fd;
    p->rx = xmalloc(p->cap = RX_SIZE);
    int n = snprintf(text, sizeof(text),
                     "GET /api/kernels/%s/channels?session_id=%s HTTP/1.1\r\nHost: %s:%s\r\n"
                     "Authorization: token %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                     "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
                     "Sec-WebSocket-Protocol: v1.kernel.websocket.jupyter.org\r\n\r\n",
                     kernel_id, p->session, h->host, h->port, h->token);
    write_all(p->fd, text, (size_t)n);
    const uint8_t *end;
    do
        ws_fill(p);
    while (!(end = memmem(p->rx, p->have, "\r\n\r\n", 4)));
    if (memcmp(p->rx, "HTTP/1.1 101", 12) != 0)
        die("no websocket: %.*s", (int)(end - p->rx), (const char *)p->rx);
    p->at = (size_t)(end - p->rx) + 4;
    return p;
}

/* ---- ZMQ ---- */

static void *zmq_to(struct peer *p, int type, const char *address, int port)
{
    char where[256];
    void *s = zmq_socket(p->context, type);
    snprintf(where, sizeof(where), strncmp(address, "ipc", 3) == 0 ? "%s-%d" : "%s:%d", address,
             port);
    if (!s)
        die("zmq_socket: %s", zmq_strerror(errno));
    if (type == ZMQ_DEALER)
        zmq_setsockopt(s, ZMQ_IDENTITY, p->session, strlen(p->session));
    else
        zmq_setsockopt(s, ZMQ_SUBSCRIBE, "", 0);
    if (zmq_connect(s, where) < 0)
        die("zmq_connect %s: %s", where, zmq_strerror(errno));
    return s;
}

struct peer *peer_zmq(const char *connection_file)
{
    struct peer *p = xcalloc(1, sizeof(*p));
    json_error_t err;
    json_t *o = json_load_file(connection_file, 0, &err);
    const char *ip, *transport, *key;
    int shell, iopub;
    char address[200];
    if (!o || json_unpack(o, "{s:s,s:s,s:s,s:i,s:i}", "ip", &ip, "transport", &transport, "key",
                          &key, "shell_port", &shell, "iopub_port", &iopub))
        die("%s: not a connection file", connection_file);
    snprintf(p->session, sizeof(p->session), "bench-%d-%06x", (int)getpid(),
             (unsigned)(now_us() & 0xffffff));
    snprintf(address, sizeof(address), "%s://%s", transport, ip);
    p->fd = -1;
    p->context = zmq_ctx_new();
    p->signer = jp_signer_new(slice_str(key));
    p->shell = zmq_to(p, ZMQ_DEALER, address, shell);
    p->iopub = zmq_to(p, ZMQ_SUB, address, iopub);
    json_decref(o);
    return p;
}

static void zmq_drop(struct peer *p)
{
    for (size_t i = 0; i < p->n_frames; i++)
        zmq_msg_close(&p->frames[i]);
    p->n_frames = 0;
}

static bool zmq_take(struct peer *p, void *socket)
{
    zmq_drop(p);
    do {
        if (p->n_frames == FRAMES_MAX)
            die("ZMQ message of too many frames");
        zmq_msg_init(&p->frames[p->n_frames]);
        if (zmq_msg_recv(&p->frames[p->n_frames], socket, ZMQ_DONTWAIT) < 0)
            return false;
    } while (zmq_msg_more(&p->frames[p->n_frames++]));
    return true;
}

static void zmq_next(struct peer *p, struct seen *ret)
{
    zmq_pollitem_t items[2] = { { .socket = p->shell, .events = ZMQ_POLLIN },
                                { .socket = p->iopub, .events = ZMQ_POLLIN } };
    bool shell = false;
    while (!(shell = zmq_take(p, p->shell)) && !zmq_take(p, p->iopub))
        if (zmq_poll(items, 2, BENCH_TIMEOUT_S * 1000L) <= 0)
            die("kernel silent for %d s", BENCH_TIMEOUT_S);
    struct slice f[FRAMES_MAX];
    size_t d = p->n_frames;
    for (size_t i = p->n_frames; i-- > 0;) {
        f[i] = slice_of(zmq_msg_data(&p->frames[i]), zmq_msg_size(&p->frames[i]));
        if (slice_eq_str(f[i], "<IDS|MSG>"))
            d = i;
    }
    if (d + 6 > p->n_frames)
        die("ZMQ message without its parts");
    *ret = (struct seen) {
        .shell = shell, .header = f[d + 2], .parent = f[d + 3], .content = f[d + 5]
    };
}

static void zmq_send_parts(struct peer *p, const char *const part[5])
{
    char signature[JP_SIG_LEN + 1];
    struct slice s[4];
    for (int i = 0; i < 4; i++)
        s[i] = slice_str(part[i + 1]);
    jp_sign(p->signer, s, signature);
    zmq_send(p->shell, "<IDS|MSG>", 9, ZMQ_SNDMORE);
    zmq_send(p->shell, signature, strlen(signature), ZMQ_SNDMORE);
    for (int i = 0; i < 4; i++)
        if (zmq_send(p->shell, s[i].p, s[i].n, i < 3 ? ZMQ_SNDMORE : 0) < 0)
            die("zmq_send: %s", zmq_strerror(errno));
}

/* ---- both ---- */

static void request(struct peer *p, const char *type, const char *content, char id[64])
{
    char header[512];
    snprintf(id, 64, "%s-%u", p->session, ++p->count);
    snprintf(header, sizeof(header),
             "{\"msg_id\":\"%s\",\"username\":\"bench\",\"session\":\"%s\",\"msg_type\":\"%s\","
             "\"version\":\"5.3\",\"date\":\"2026-01-01T00:00:00.000000Z\"}",
             id, p->session, type);
    const char *part[5] = { "shell", header, "{}", "{}", content };
    if (p->fd >= 0)
        ws_send_v1(p, part);
    else
        zmq_send_parts(p, part);
}

static void next(struct peer *p, struct seen *ret)
{
    if (p->fd >= 0)
        ws_next(p, ret);
    else
        zmq_next(p, ret);
}

/* Text of a stream message, in bytes of its JSON string. */
static size_t text_bytes(struct slice content)
{
    struct slice v;
    return jp_json_find(content, "text", &v) == 0 && v.n > 2 ? v.n - 2 : 0;
}

void peer_execute(struct peer *p, const char *code, struct answer *ret)
{
    char id[64], content[8192];
    bool replied = false, idle = false;
    *ret = (struct answer) { 0 };
    int n = snprintf(content, sizeof(content),
                     "{\"code\":\"%s\",\"silent\":false,\"store_history\":true,"
                     "\"user_expressions\":{},\"allow_stdin\":false,\"stop_on_error\":true}",
                     code);
    if (n < 0 || (size_t)n >= sizeof(content))
        die("code too long");
    uint64_t start = now_us();
    request(p, "execute_request", content, id);
    strncat(id, "\"", sizeof(id) - strlen(id) - 1); /* ...-1" is no prefix of ...-10" */
    while (!replied || !idle) {
        struct seen m;
        next(p, &m);
        if (!has(m.parent, id))
            continue;
        ret->messages++;
        if (m.shell && has(m.header, "\"execute_reply\"")) {
            replied = true;
            ret->ok = has(m.content, "\"ok\"");
        } else if (has(m.header, "\"stream\"")) {
            ret->stream_bytes += text_bytes(m.content);
        } else if (has(m.header, "\"status\"")) {
            idle = has(m.content, "\"idle\"");
        } else if (has(m.header, "\"execute_result\"") || has(m.header, "\"display_data\"")) {
            ret->result_us = ret->result_us ? ret->result_us : now_us() - start;
        }
    }
    ret->done_us = now_us() - start;
}

static bool readable(struct peer *p, int ms)
{
    if (p->fd >= 0) {
        struct pollfd f = { .fd = p->fd, .events = POLLIN };
        return p->at < p->have || poll(&f, 1, ms) > 0;
    }
    zmq_pollitem_t items[2] = { { .socket = p->shell, .events = ZMQ_POLLIN },
                                { .socket = p->iopub, .events = ZMQ_POLLIN } };
    return zmq_poll(items, 2, ms) > 0;
}

void peer_settle(struct peer *p)
{
    char id[64];
    bool reply = false, iopub = false;
    for (int tries = 0; !reply || !iopub; tries++) {
        if (tries == BENCH_TIMEOUT_S * 10)
            die("kernel not ready within %d s", BENCH_TIMEOUT_S);
        request(p, "kernel_info_request", "{}", id);
        uint64_t end = now_us() + 100000;
        while (now_us() < end && readable(p, 20)) {
            struct seen m;
            next(p, &m);
            reply |= m.shell && has(m.header, "\"kernel_info_reply\"");
            iopub |= !m.shell && has(m.header, "\"status\"");
        }
    }
    while (readable(p, 200)) { /* answers to what was asked in vain */
        struct seen m;
        next(p, &m);
    }
}

void peer_free(struct peer *p)
{
    if (p->fd >= 0) {
        close(p->fd);
    } else {
        int no = 0;
        zmq_drop(p);
        zmq_setsockopt(p->shell, ZMQ_LINGER, &no, sizeof(no));
        zmq_close(p->shell);
        zmq_close(p->iopub);
        zmq_ctx_destroy(p->context);
        jp_signer_free(p->signer);
    }
    free(p->rx);
    free(p->msg);
    free(p);
}
