#pragma once
/* A connected socket on the loop, plain or TLS (OpenSSL, non-blocking), with level-triggered
 * interest. SIGPIPE must be ignored by the process (cli/main.c does it): OpenSSL uses write(2).
 * Owner: the connection, which embeds it. on_ready is never called from inside a call of these. */
#include "common/err.h"
#include "common/loop.h"
#include <openssl/ssl.h>
#include <sys/types.h>

struct gw_stream {
    int fd;
    struct loop *loop;
    struct loop_fd *watch;
    SSL *ssl;         /* NULL: plain */
    uint64_t written; /* plain: bytes that the socket took */
    bool handshaking;
    bool want_read, want_write; /* the owner's interest */
    bool tls_wants_write;       /* TLS must send before it can go on reading (or the handshake) */
    void (*on_ready)(void *ctx, int events); /* LOOP_READ | LOOP_WRITE | LOOP_HUP */
    void *ctx;
};

/* Takes fd over. tls NULL: plain. */
int gw_stream_init(struct gw_stream *s, struct loop *l, int fd, SSL_CTX *tls,
                   void (*on_ready)(void *ctx, int events), void *ctx);
void gw_stream_fini(struct gw_stream *s); /* closes; idempotent */
void gw_stream_want(struct gw_stream *s, bool read, bool write);
/* > 0 bytes; 0 the peer has ended its side; -EAGAIN; -errno. */
ssize_t gw_stream_read(struct gw_stream *s, void *p, size_t n);
/* >= 0 bytes taken; -EAGAIN; -errno (-EPIPE ...). */
ssize_t gw_stream_write(struct gw_stream *s, const void *p, size_t n);
/* No more output: lets the peer read what it has before the close. */
void gw_stream_shutdown(struct gw_stream *s);
/* Has the peer closed (or reset) its side? Asked of the kernel, works while input is not read. */
bool gw_stream_peer_left(const struct gw_stream *s);
/* Bytes written to the socket (with TLS' overhead) since it was accepted; how many of them the
 * peer's TCP has acknowledged; how many have not even been sent. Also after the peer has left. */
uint64_t gw_stream_sent(const struct gw_stream *s);
uint64_t gw_stream_acked(const struct gw_stream *s);
size_t gw_stream_unsent(const struct gw_stream *s);
/* Wake up for writing only when less than this is unsent: keeps pings and closes near the wire. */
void gw_stream_lowat(struct gw_stream *s, unsigned bytes);

/* Server context: TLS 1.2 and newer, ALPN http/1.1 only. -ENOENT, -EACCES, -EINVAL: e names the
 * file. */
int gw_tls_context(const char *cert, const char *key, SSL_CTX **ret, struct err *e);
