/* Sockets and TLS; see stream.h. */
#include "gateway/http/stream.h"
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define TCP_STATE_CLOSE 7 /* include/net/tcp_states.h of the kernel */
#define TCP_STATE_CLOSE_WAIT 8
#define TCP_STATE_LAST_ACK 9

static void set_interest(struct gw_stream *s)
{
    int events = 0;
    if (s->want_read || s->handshaking)
        events |= LOOP_READ;
    if (s->want_write || s->tls_wants_write)
        events |= LOOP_WRITE;
    if (s->watch)
        loop_fd_set(s->watch, events);
}

/* Result of an SSL call, in the terms of stream.h. */
static ssize_t tls_result(struct gw_stream *s, int r)
{
    int why = SSL_get_error(s->ssl, r);
    s->tls_wants_write = false;
    switch (why) {
    case SSL_ERROR_NONE:
        return r;
    case SSL_ERROR_WANT_READ:
        set_interest(s);
        return -EAGAIN;
    case SSL_ERROR_WANT_WRITE:
        s->tls_wants_write = true;
        set_interest(s);
        return -EAGAIN;
    case SSL_ERROR_ZERO_RETURN:
        return 0;
    default:
        ERR_clear_error();
        return -ECONNRESET;
    }
}

static bool handshake(struct gw_stream *s)
{
    ERR_clear_error();
    ssize_t r = tls_result(s, SSL_accept(s->ssl));
    if (r == -EAGAIN)
        return false;
    s->handshaking = false; /* done, or failed: then the next read says so */
    set_interest(s);
    return true;
}

static void on_fd(void *ctx, int events)
{
    struct gw_stream *s = ctx;
    if (s->handshaking && !handshake(s))
        return;
    if (s->ssl)
        events |= LOOP_READ | LOOP_WRITE; /* either may unblock both */
    s->on_ready(s->ctx, events);
}

/* OpenSSL holds decrypted bytes that no event will announce. */
static void on_pending(void *ctx)
{
    struct gw_stream *s = ctx;
    if (s->fd >= 0 && s->want_read)
        s->on_ready(s->ctx, LOOP_READ);
}

int gw_stream_init(struct gw_stream *s, struct loop *l, int fd, SSL_CTX *tls,
                   void (*on_ready)(void *ctx, int events), void *ctx)
{
    int one = 1;
    *s = (struct gw_stream) { .fd = fd, .loop = l, .on_ready = on_ready, .ctx = ctx };
    if (tls) {
        s->ssl = SSL_new(tls);
        if (!s->ssl || SSL_set_fd(s->ssl, fd) != 1)
            return -ENOMEM;
        SSL_set_accept_state(s->ssl);
        s->handshaking = true;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    s->watch = loop_fd_new(l, fd, on_fd, s);
    s->want_read = true;
    set_interest(s);
    return 0;
}

void gw_stream_fini(struct gw_stream *s)
{
    if (s->fd < 0)
        return;
    loop_cancel_deferred(s->loop, s);
    loop_fd_free(s->watch);
    s->watch = NULL;
    if (s->ssl && !s->handshaking) {
        ERR_clear_error();
        SSL_shutdown(s->ssl);
    }
    SSL_free(s->ssl);
    s->ssl = NULL;
    close(s->fd);
    s->fd = -1;
}

void gw_stream_want(struct gw_stream *s, bool read, bool write)
{
    if (s->fd < 0)
        return;
    bool resumed = read && !s->want_read;
    if (s->want_read == read && s->want_write == write)
        return;
    s->want_read = read;
    s->want_write = write;
    set_interest(s);
    if (resumed && s->ssl && SSL_has_pending(s->ssl))
        loop_defer(s->loop, on_pending, s);
}

ssize_t gw_stream_read(struct gw_stream *s, void *p, size_t n)
{
    if (s->fd < 0)
        return -EBADF;
    if (s->ssl) {
        ERR_clear_error();
        return tls_result(s, SSL_read(s->ssl, p, n > INT32_MAX ? INT32_MAX : (int)n));
    }
    ssize_t r = recv(s->fd, p, n, MSG_DONTWAIT);
    return r >= 0 ? r : errno == EINTR ? -EAGAIN : -errno;
}

ssize_t gw_stream_write(struct gw_stream *s, const void *p, size_t n)
{
    if (s->fd < 0)
        return -EBADF;
    if (!n)
        return 0;
    if (s->ssl) {
        ERR_clear_error();
        ssize_t r = tls_result(s, SSL_write(s->ssl, p, n > INT32_MAX ? INT32_MAX : (int)n));
        return r ? r : -EPIPE;
    }
    ssize_t r = send(s->fd, p, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    s->written += r > 0 ? (size_t)r : 0;
    return r >= 0 ? r : errno == EINTR ? -EAGAIN : -errno;
}

void gw_stream_shutdown(struct gw_stream *s)
{
    if (s->fd < 0)
        return;
    if (s->ssl && !s->handshaking) {
        ERR_clear_error();
        SSL_shutdown(s->ssl);
    }
    shutdown(s->fd, SHUT_WR);
}

static bool info(const struct gw_stream *s, struct tcp_info *ti)
{
    socklen_t n = sizeof(*ti);
    memset(ti, 0, sizeof(*ti));
    return s->fd >= 0 && getsockopt(s->fd, IPPROTO_TCP, TCP_INFO, ti, &n) == 0;
}

bool gw_stream_peer_left(const struct gw_stream *s)
{
    struct tcp_info ti;
    return !info(s, &ti) || ti.tcpi_state == TCP_STATE_CLOSE ||
           ti.tcpi_state == TCP_STATE_CLOSE_WAIT || ti.tcpi_state == TCP_STATE_LAST_ACK;
}

uint64_t gw_stream_sent(const struct gw_stream *s)
{
    return s->ssl ? BIO_number_written(SSL_get_wbio(s->ssl)) : s->written;
}

uint64_t gw_stream_acked(const struct gw_stream *s)
{
    int queued = 0;
    uint64_t sent = gw_stream_sent(s);
    if (s->fd < 0 || ioctl(s->fd, SIOCOUTQ, &queued) != 0 || queued < 0)
        return 0;
    return sent > (uint64_t)queued ? sent - (uint64_t)queued : 0;
}

size_t gw_stream_unsent(const struct gw_stream *s)
{
    int n = 0;
    return s->fd >= 0 && ioctl(s->fd, SIOCOUTQNSD, &n) == 0 && n > 0 ? (size_t)n : 0;
}

void gw_stream_lowat(struct gw_stream *s, unsigned bytes)
{
    if (s->fd >= 0)
        setsockopt(s->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof(bytes));
}

/* ---- TLS context ---- */

static int choose_alpn(SSL *ssl, const unsigned char **out, unsigned char *out_len,
                       const unsigned char *in, unsigned in_len, void *arg)
{
    static const unsigned char ours[] = "\x08http/1.1";
    unsigned char *hit = NULL;
    (void)ssl;
    (void)arg;
    if (SSL_select_next_proto(&hit, out_len, ours, sizeof(ours) - 1, in, in_len) !=
        OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_NOACK;
    *out = hit;
    return SSL_TLSEXT_ERR_OK;
}

int gw_tls_context(const char *cert, const char *key, SSL_CTX **ret, struct err *e)
{
    if (access(cert, R_OK))
        return err_errno(e, errno, "tls_cert %s", cert);
    if (access(key, R_OK))
        return err_errno(e, errno, "tls_key %s", key);
    SSL_CTX *t = SSL_CTX_new(TLS_server_method());
    int r = 0;
    if (!t)
        return err_set(e, -ENOMEM, "TLS cannot be set up");
    if (SSL_CTX_use_certificate_chain_file(t, cert) != 1)
        r = err_set(e, -EINVAL, "tls_cert %s: no PEM certificate chain", cert);
    else if (SSL_CTX_use_PrivateKey_file(t, key, SSL_FILETYPE_PEM) != 1 ||
             SSL_CTX_check_private_key(t) != 1)
        r = err_set(e, -EINVAL, "tls_key %s: no PEM key that belongs to %s", key, cert);
    ERR_clear_error();
    if (r) {
        SSL_CTX_free(t);
        return r;
    }
    SSL_CTX_set_min_proto_version(t, TLS1_2_VERSION);
    SSL_CTX_set_options(t, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_mode(t, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                            SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_alpn_select_cb(t, choose_alpn, NULL);
    *ret = t;
    return 0;
}
