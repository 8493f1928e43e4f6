/* Listening and accepting; see listen.h. */
#include "gateway/http/listen.h"
#include "gateway/http/conn.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#define BACKLOG 512
#define ACCEPTS 16 /* per turn of the loop, so that nobody else starves */

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static int parse_ip(const char *ip, unsigned port, union address *a, socklen_t *len)
{
    memset(a, 0, sizeof(*a));
    if (strcmp(ip, "localhost") == 0)
        ip = "127.0.0.1";
    if (inet_pton(AF_INET, ip, &a->v4.sin_addr) == 1) {
        a->v4.sin_family = AF_INET;
        a->v4.sin_port = htons((uint16_t)port);
        *len = sizeof(a->v4);
        return 0;
    }
    if (inet_pton(AF_INET6, ip, &a->v6.sin6_addr) == 1) {
        a->v6.sin6_family = AF_INET6;
        a->v6.sin6_port = htons((uint16_t)port);
        *len = sizeof(a->v6);
        return 0;
    }
    return -EINVAL;
}

static int try_port(struct gw_server *s, unsigned port)
{
    union address a;
    socklen_t len;
    int one = 1;
    if (parse_ip(s->config.ip, port, &a, &len))
        return -EINVAL;
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, &a.any, len) || listen(fd, BACKLOG) || getsockname(fd, &a.any, &len)) {
        int r = -errno;
        close(fd);
        return r;
    }
    s->listen_fd = fd;
    s->port = ntohs(a.any.sa_family == AF_INET ? a.v4.sin_port : a.v6.sin6_port);
    return 0;
}

int gw_listen_open(struct gw_server *s, struct err *e)
{
    const struct gw_config *c = &s->config;
    if (c->port > 65535)
        return err_set(e, -EINVAL, "port %u: a port is a number from 0 to 65535", c->port);
    int r = try_port(s, c->port);
    for (unsigned i = 1; r == -EADDRINUSE && c->port && i <= c->port_retries; i++)
        r = c->port + i <= 65535 ? try_port(s, c->port + i) : r;
    switch (r) {
    case 0:
        return 0;
    case -EADDRINUSE:
        return err_set(e, r, "%s port %u%s is taken: choose another port, or 0 for any free one",
                       c->ip, c->port, c->port_retries ? " (and those tried after it)" : "");
    case -EINVAL:
        return err_set(e, r, "ip \"%s\": not an IPv4 or IPv6 address", c->ip);
    case -EACCES:
        return err_set(e, r, "%s port %u needs privileges: choose one above 1023", c->ip, c->port);
    default:
        return err_errno(e, -r, "cannot listen on %s port %u", c->ip, c->port);
    }
}

static void peer_text(const union address *a, char *ret, size_t size)
{
    char ip[INET6_ADDRSTRLEN] = "?";
    bool v4 = a->any.sa_family == AF_INET;
    inet_ntop(a->any.sa_family, v4 ? (const void *)&a->v4.sin_addr : (const void *)&a->v6.sin6_addr,
              ip, sizeof(ip));
    snprintf(ret, size, "%s", ip);
}

/* Too many connections: say so, as far as one write goes (not inside TLS). */
static void turn_away(struct gw_server *s, int fd)
{
    static const char text[] =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        "Content-Length: 65\r\nRetry-After: 5\r\nConnection: close\r\n\r\n"
        "{\"message\":\"Too many connections\",\"reason\":\"Service Unavailable\"}";
    metric_add(s->count.rejected, 1);
    if (!s->config.tls_cert && send(fd, text, sizeof(text) - 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        log_debug(&s->log, "a refused connection was gone already");
    close(fd);
}

static void adopt(struct gw_server *s, int fd, const union address *from)
{
    char peer[48];
    peer_text(from, peer, sizeof(peer));
    if (!gw_conn_new(s, fd, peer))
        log_warn(&s->log, "a connection from %s could not be set up", peer);
    gw_server_arm(s);
}

static void on_acceptable(void *ctx, int events)
{
    struct gw_server *s = ctx;
    (void)events;
    for (int i = 0; i < ACCEPTS; i++) {
        union address a;
        socklen_t len = sizeof(a);
        int fd = accept4(s->listen_fd, &a.any, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            if (s->n_conns >= GW_CONNECTIONS_MAX)
                turn_away(s, fd);
            else
                adopt(s, fd, &a);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            /* The connection stays in the backlog: look again at the next tick. */
            log_warn(&s->log, "cannot accept connections now: %s", strerror(errno));
            loop_fd_set(s->listener, 0);
            s->accept_paused = true;
            gw_server_arm(s);
        }
        return;
    }
}

void gw_listen_start(struct gw_server *s)
{
    s->listener = loop_fd_new(s->loop, s->listen_fd, on_acceptable, s);
    loop_fd_set(s->listener, LOOP_READ);
}

void gw_listen_close(struct gw_server *s)
{
    loop_fd_free(s->listener);
    s->listener = NULL;
    if (s->listen_fd >= 0)
        close(s->listen_fd);
    s->listen_fd = -1;
}
