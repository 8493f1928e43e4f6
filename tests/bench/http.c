/* HTTP client of cv-bench; see bench.h. Chunked answers (tornado's) are understood. */
#include "common/mem.h"
#include "tests/bench/bench.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define HEAD_MAX 8192u

void write_all(int fd, const void *bytes, size_t n)
{
    const char *p = bytes;
    while (n) {
        ssize_t r = send(fd, p, n, MSG_NOSIGNAL);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            die("send: %m");
        p += r;
        n -= (size_t)r;
    }
}

void http_open(struct http *h, const char *url, const char *token)
{
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *a;
    struct timeval limit = { .tv_sec = BENCH_TIMEOUT_S };
    int one = 1;
    if (sscanf(url, "http://%63[^:/]:%7[0-9]", h->host, h->port) != 2)
        die("not a URL of the form http://HOST:PORT/: %s", url);
    snprintf(h->token, sizeof(h->token), "%s", token);
    if (getaddrinfo(h->host, h->port, &hints, &a))
        die("unknown host %s", h->host);
    h->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (h->fd < 0 || connect(h->fd, a->ai_addr, a->ai_addrlen) < 0)
        die("connect to %s: %m", url);
    freeaddrinfo(a);
    setsockopt(h->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(h->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

void http_close(struct http *h)
{
    close(h->fd);
    h->fd = -1;
}

/* Reads until `done` bytes are there. */
static size_t read_more(struct http *h, char *p, size_t have, size_t size)
{
    if (have + 1 >= size)
        die("answer is longer than %zu bytes", size);
    ssize_t r = recv(h->fd, p + have, size - have - 1, 0);
    if (r <= 0)
        die("connection ended while an answer was due: %s", r ? strerror(errno) : "closed");
    p[have + (size_t)r] = 0;
    return have + (size_t)r;
}

/* Joins chunks in place, once they are all there; false: not yet. */
static bool join_chunks(char *body)
{
    char *in, *end, *out = body;
    for (in = body;; in = end + 2) { /* look */
        unsigned long n = strtoul(in, &end, 16);
        if (end == in || strncmp(end, "\r\n", 2) != 0 || strlen(end + 2) < n + 2)
            return false;
        if (!n)
            break;
        end += 2 + n;
    }
    for (in = body;; in = end + 2) { /* move */
        unsigned long n = strtoul(in, &end, 16);
        if (!n)
            break;
        memmove(out, end + 2, n);
        out += n;
        end += 2 + n;
    }
    *out = 0;
    return true;
}

int http_call(struct http *h, const char *method, const char *path, const char *body, char *ret,
              size_t size)
{
    char head[HEAD_MAX];
    int n = snprintf(head, sizeof(head),
                     "%s %s HTTP/1.1\r\nHost: %s:%s\r\nAuthorization: token %s\r\n"
                     "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     method, path, h->host, h->port, h->token, body ? strlen(body) : 0,
                     body ? body : "");
    if (n < 0 || (size_t)n >= sizeof(head))
        die("request too long");
    write_all(h->fd, head, (size_t)n);

    size_t cap = size + HEAD_MAX, have = 0;
    char *text = xmalloc(cap), *end;
    int status;
    do
        have = read_more(h, text, have, cap);
    while (!(end = strstr(text, "\r\n\r\n")));
    if (sscanf(text, "HTTP/1.1 %d", &status) != 1)
        die("not an HTTP answer: %.60s", text);
    *end = 0;
    char *length = strcasestr(text, "\r\nContent-Length:");
    bool chunked = strcasestr(text, "\r\nTransfer-Encoding: chunked");
    size_t at = (size_t)(end - text) + 4;
    size_t want = length ? strtoul(length + strlen("\r\nContent-Length:"), NULL, 10) : 0;
    while (chunked ? !join_chunks(text + at) : have - at < want)
        have = read_more(h, text, have, cap);
    snprintf(ret, size, "%s", text + at);
    free(text);
    return status;
}

bool json_text_of(const char *json, const char *key, char *ret, size_t size)
{
    char name[64];
    snprintf(name, sizeof(name), "\"%s\":", key);
    const char *p = strstr(json, name);
    if (!p)
        return false;
    p += strlen(name);
    p += strspn(p, " ");
    if (*p++ != '"')
        return false;
    size_t n = strcspn(p, "\"");
    if (n >= size)
        return false;
    memcpy(ret, p, n);
    ret[n] = 0;
    return true;
}
