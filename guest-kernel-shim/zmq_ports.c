/* See zmq_ports.h.
 *
 * End of a kernel: its last messages may still be on their way through the ZMQ I/O thread when the
 * process is reaped. A monitor on each socket tells when its connection ended; libzmq has then
 * handed over everything that the kernel wrote. */
#include "guest-kernel-shim/zmq_ports.h"
#include "common/mem.h"
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#define FRAMES_MAX (JP_ZMQ_IDS_MAX + 6u + JP_BUFFERS_MAX)
#define RECONNECT_MS 20
#define EVENTS (ZMQ_EVENT_CONNECTED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED)

struct port {
    struct shim_zmq *z;
    enum jp_channel channel;
    void *socket, *monitor;
    struct shim_watch watch, monitor_watch;
    unsigned connected, ended; /* connections made and ended so far */
    bool greeted;              /* a handshake was completed */
    bool blocked;              /* a send said EAGAIN */
};

struct shim_zmq {
    struct shim_zmq_opts o;
    struct log_ctx log;
    struct jp_signer *signer, *old_signer;
    struct port port[JP_CHANNELS];
    unsigned listen;
    zmq_msg_t *frames; /* FRAMES_MAX, reused */
    struct slice *slices;
};

static const int port_number[JP_CHANNELS] = {
    [JP_SHELL] = 1, [JP_IOPUB] = 2, [JP_STDIN] = 3, [JP_CONTROL] = 4
};

static void watch_port(struct port *p)
{
    struct shim_zmq *z = p->z;
    short events =
        (short)((z->listen & 1u << p->channel ? ZMQ_POLLIN : 0) | (p->blocked ? ZMQ_POLLOUT : 0));

    /* What was not asked for may have been taken off the descriptor unseen. */
    if (events != p->watch.events)
        p->watch.check = true;
    p->watch.events = events;
}

static void on_socket(void *ctx, short revents)
{
    struct port *p = ctx;

    if (revents & ZMQ_POLLOUT) {
        p->blocked = false;
        watch_port(p);
    }
    p->z->o.ready(p->z->o.ctx);
}

/* Monitor events are two frames: u16 event, u32 value; address. */
static void read_monitor(struct port *p)
{
    for (;;) {
        uint8_t head[6];
        char addr[256];
        uint16_t event;

        if (zmq_recv(p->monitor, head, sizeof(head), ZMQ_DONTWAIT) < 2) {
            p->monitor_watch.check = false; /* EAGAIN: news will show on the descriptor */
            return;
        }
        zmq_recv(p->monitor, addr, sizeof(addr), ZMQ_DONTWAIT);
        event = (uint16_t)(head[0] | head[1] << 8);
        if (event == ZMQ_EVENT_CONNECTED)
            p->connected++;
        else if (event == ZMQ_EVENT_DISCONNECTED)
            p->ended++;
        else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            p->greeted = true;
    }
}

static void on_monitor(void *ctx, short revents)
{
    struct port *p = ctx;

    (void)revents;
    read_monitor(p);
    p->z->o.ready(p->z->o.ctx);
}

static int set_options(struct port *p)
{
    const struct shim_zmq_opts *o = &p->z->o;
    int linger = 0, hwm = 0, ivl = RECONNECT_MS, r = 0;

    r |= zmq_setsockopt(p->socket, ZMQ_LINGER, &linger, sizeof(linger));
    r |= zmq_setsockopt(p->socket, ZMQ_RECONNECT_IVL, &ivl, sizeof(ivl));
    if (p->channel == JP_IOPUB) {
        r |= zmq_setsockopt(p->socket, ZMQ_RCVHWM, &o->iopub_hwm, sizeof(o->iopub_hwm));
        r |= zmq_setsockopt(p->socket, ZMQ_SUBSCRIBE, "", 0);
    } else {
        r |= zmq_setsockopt(p->socket, ZMQ_RCVHWM, &hwm, sizeof(hwm));
        r |= zmq_setsockopt(p->socket, ZMQ_ROUTING_ID, o->identity, strlen(o->identity));
    }
    return r;
}

static int open_port(struct shim_zmq *z, enum jp_channel c, struct err *e)
{
    struct port *p = &z->port[c];
    char addr[256];

    p->z = z;
    p->channel = c;
    p->socket = zmq_socket(z->o.zmq_ctx, c == JP_IOPUB ? ZMQ_SUB : ZMQ_DEALER);
    if (!p->socket || set_options(p) < 0)
        return err_set(e, -EIO, "%s socket: %s", jp_channel_name(c), zmq_strerror(zmq_errno()));
    snprintf(addr, sizeof(addr), "inproc://monitor-%p", p->socket);
    p->monitor = zmq_socket(z->o.zmq_ctx, ZMQ_PAIR);
    if (!p->monitor || zmq_socket_monitor(p->socket, addr, EVENTS) < 0 ||
        zmq_connect(p->monitor, addr) < 0)
        return err_set(e, -EIO, "%s monitor: %s", jp_channel_name(c), zmq_strerror(zmq_errno()));
    snprintf(addr, sizeof(addr), "ipc://%s-%d", z->o.ip, port_number[c]);
    if (zmq_connect(p->socket, addr) < 0)
        return err_set(e, -EIO, "%s: %s", addr, zmq_strerror(zmq_errno()));
    shim_watch_start(z->o.loop, &p->watch, p->socket, -1, ZMQ_POLLIN, on_socket, p);
    shim_watch_start(z->o.loop, &p->monitor_watch, p->monitor, -1, ZMQ_POLLIN, on_monitor, p);
    return 0;
}

struct shim_zmq *shim_zmq_open(const struct shim_zmq_opts *o, struct slice key, struct err *e)
{
    struct shim_zmq *z = xnew(struct shim_zmq);

    z->o = *o;
    log_ctx_init(&z->log, o->log);
    z->signer = jp_signer_new(key);
    z->listen = ~0u;
    z->frames = xcalloc(FRAMES_MAX, sizeof(*z->frames));
    z->slices = xcalloc(FRAMES_MAX, sizeof(*z->slices));
    for (enum jp_channel c = 0; c < JP_CHANNELS; c++) {
        if (open_port(z, c, e) < 0) {
            shim_zmq_close(z);
            return NULL;
        }
    }
    return z;
}

static void close_port(struct port *p)
{
    if (!p->z)
        return;
    shim_watch_stop(p->z->o.loop, &p->watch);
    shim_watch_stop(p->z->o.loop, &p->monitor_watch);
    if (p->socket) {
        zmq_socket_monitor(p->socket, NULL, 0);
        zmq_close(p->socket);
    }
    if (p->monitor)
        zmq_close(p->monitor);
}

void shim_zmq_close(struct shim_zmq *z)
{
    if (!z)
        return;
    for (enum jp_channel c = 0; c < JP_CHANNELS; c++)
        close_port(&z->port[c]);
    jp_signer_free(z->signer);
    jp_signer_free(z->old_signer);
    free(z->frames);
    free(z->slices);
    free(z);
}

void shim_zmq_listen(struct shim_zmq *z, unsigned channels)
{
    z->listen = channels;
    for (enum jp_channel c = 0; c < JP_CHANNELS; c++)
        watch_port(&z->port[c]);
}

bool shim_zmq_readable(struct shim_zmq *z, enum jp_channel c)
{
    int events = 0;
    size_t size = sizeof(events);

    z->port[c].watch.check = true;
    return zmq_getsockopt(z->port[c].socket, ZMQ_EVENTS, &events, &size) == 0 &&
           (events & ZMQ_POLLIN);
}

/* Receive all frames of one message: their number, 0 when there is none, -E2BIG when it had too
 * many (drained and closed). */
static int recv_frames(struct shim_zmq *z, void *socket, size_t *ret_n)
{
    size_t n = 0;
    bool too_many = false, more = true;

    while (more) {
        zmq_msg_t *f = &z->frames[n];

        zmq_msg_init(f);
        if (zmq_msg_recv(f, socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(f);
            break; /* only before the first frame: multipart messages arrive whole */
        }
        more = zmq_msg_more(f);
        z->slices[n] = slice_of(zmq_msg_data(f), zmq_msg_size(f));
        if (n + 1 < FRAMES_MAX) {
            n++;
        } else {
            too_many = true;
            zmq_msg_close(f);
        }
    }
    *ret_n = n;
    return too_many ? -E2BIG : n > 0;
}

int shim_zmq_recv(struct shim_zmq *z, enum jp_channel c, struct jp_msg **ret)
{
    for (;;) {
        struct err e = { 0 };
        size_t n = 0, n_ids;
        int r = recv_frames(z, z->port[c].socket, &n);

        /* After EAGAIN news will show on the descriptor; but what lets a blocked send go on may
         * have been taken in by this very call. */
        z->port[c].watch.check = r != 0 || z->port[c].blocked;
        if (r == 0)
            return 0;
        if (r == -E2BIG)
            err_set(&e, r, "more than %u frames", FRAMES_MAX);
        else
            r = jp_zmq_decode(z->signer, c, z->slices, n, &n_ids, ret, &e);
        if (r == -EACCES && z->old_signer)
            r = jp_zmq_decode(z->old_signer, c, z->slices, n, &n_ids, ret, &e);
        for (size_t i = 0; i < n; i++)
            zmq_msg_close(&z->frames[i]);
        if (r == 0)
            return 1;
        log_warn(&z->log, "%s message from the kernel dropped: %s", jp_channel_name(c), e.msg);
    }
}

int shim_zmq_send(struct shim_zmq *z, const struct jp_msg *m)
{
    struct port *p = &z->port[m->parts.channel];
    char sig[JP_SIG_LEN + 1];
    size_t n;

    if (m->parts.channel == JP_IOPUB)
        return -EINVAL;
    n = jp_zmq_encode(z->signer, m, sig, z->slices);
    p->watch.check = true;
    for (size_t i = 0; i < n; i++) {
        int flags = ZMQ_DONTWAIT | (i + 1 < n ? ZMQ_SNDMORE : 0);

        if (zmq_send(p->socket, z->slices[i].p, z->slices[i].n, flags) < 0) {
            /* Only the first frame of a message can be refused. */
            assert(i == 0 || zmq_errno() != EAGAIN);
            p->blocked = true;
            watch_port(p);
            return -EAGAIN;
        }
    }
    return 0;
}

void shim_zmq_rekey(struct shim_zmq *z, struct slice key)
{
    jp_signer_free(z->old_signer);
    z->old_signer = z->signer;
    z->signer = jp_signer_new(key);
}

void shim_zmq_forget_key(struct shim_zmq *z)
{
    jp_signer_free(z->old_signer);
    z->old_signer = NULL;
}

bool shim_zmq_connected(struct shim_zmq *z)
{
    for (enum jp_channel c = 0; c < JP_CHANNELS; c++) {
        read_monitor(&z->port[c]);
        if (!z->port[c].greeted)
            return false;
    }
    return true;
}

bool shim_zmq_disconnected(struct shim_zmq *z)
{
    for (enum jp_channel c = 0; c < JP_CHANNELS; c++) {
        struct port *p = &z->port[c];

        read_monitor(p);
        if (p->connected > p->ended)
            return false;
    }
    return true;
}
