#pragma once
/* cv-bench: the client side of the measurements, one small process for both sides of every
 * comparison: blocking sockets, one thread (libzmq adds its own), no JSON library on the way of a
 * message. A program of tests: any failure prints a line and ends it. */
#include "common/slice.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BENCH_TIMEOUT_S 120 /* longest wait for one answer */

uint64_t now_us(void);
_Noreturn void die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* ---- http.c: HTTP/1.1 over one connection that is kept ---- */
struct http {
    int fd;
    char host[64], port[8], token[256];
};
/* url: http://HOST:PORT/ (no other prefix). token may be "". */
void http_open(struct http *h, const char *url, const char *token);
/* Returns the status; the body (NUL-terminated, cut at size) in ret. */
int http_call(struct http *h, const char *method, const char *path, const char *body, char *ret,
              size_t size);
void http_close(struct http *h);
/* Value of a string member anywhere in JSON text: good enough for kernel models. */
bool json_text_of(const char *json, const char *key, char *ret, size_t size);
void write_all(int fd, const void *bytes, size_t n);

/* ---- peer.c: a kernel, over a websocket or directly over ZMQ ---- */
struct peer;
/* The websocket of a kernel, v1 framing. quickack: the client does not delay its TCP
 * acknowledgements, for servers that leave Nagle's algorithm on. */
struct peer *peer_ws(const struct http *h, const char *kernel_id, bool quickack);
/* The kernel of a connection file. */
struct peer *peer_zmq(const char *connection_file);
void peer_free(struct peer *p);

struct answer {         /* microseconds since the request was sent */
    uint64_t result_us; /* first execute_result or display_data, 0: none */
    uint64_t done_us;   /* both execute_reply and idle have come */
    uint64_t messages, stream_bytes;
    bool ok; /* status of the reply */
};
/* Execute and wait for its end. */
void peer_execute(struct peer *p, const char *code, struct answer *ret);
/* Ask for kernel_info until the kernel answers and its iopub is heard (ZMQ's slow joiner). */
void peer_settle(struct peer *p);

/* One received message, as far as the driver looks. */
struct seen {
    bool shell; /* else iopub or another */
    struct slice header, parent, content;
};
