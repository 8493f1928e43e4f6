/* cv-bench: what scripts/bench runs and times. Each command prints one JSON object.
 *
 *   start URL TOKEN SPEC CODE        POST /api/kernels, open the websocket, execute CODE, DELETE:
 *                                    microseconds from the POST to 201, 101, result, end
 *   cells N WARMUP PAUSE_MS CODE TARGET...
 *                                    N executions on each target in turn, starting with another one
 *                                    each round, after WARMUP that do not count; a pause before
 * each once CODE[;;CODE...] TARGET      each code once, in order: time to its end attach URL TOKEN
 * SPEC N CODE     start N kernels, a websocket each, one execution each; print and stay until stdin
 * ends; then delete them
 *
 * TARGET: zmq:CONNECTION_FILE, ws:URL,TOKEN,KERNEL_ID, or wsq: with TCP_QUICKACK. CODE is text of a
 * JSON string without its quotes (so a line end is \n). SPEC "" is the server's default. */
#include "common/mem.h"
#include "tests/bench/bench.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MODEL_MAX (256u << 10)
#define TARGETS_MAX 16
#define ATTACH_MAX 1000

uint64_t now_us(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

void die(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("cv-bench: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    exit(1);
}

static unsigned long number(const char *text, unsigned long max)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*end || end == text || n > max)
        die("not a number up to %lu: %s", max, text);
    return n;
}

static char model[MODEL_MAX];

static void create(struct http *h, const char *spec, char id[64])
{
    char body[256] = "{}";
    if (*spec)
        snprintf(body, sizeof(body), "{\"name\":\"%s\"}", spec);
    int status = http_call(h, "POST", "/api/kernels", body, model, sizeof(model));
    if (status != 201 || !json_text_of(model, "id", id, 64))
        die("POST /api/kernels: %d %s", status, model);
}

static void end_kernel(struct http *h, const char *id)
{
    char path[128];
    snprintf(path, sizeof(path), "/api/kernels/%s", id);
    (void)http_call(h, "DELETE", path, NULL, model, sizeof(model));
}

static int cmd_start(char **arg)
{
    struct http h;
    struct answer a;
    char id[64];
    http_open(&h, arg[0], arg[1]);
    /* The connection and the server's first-use costs of it are not part of the start. */
    (void)http_call(&h, "GET", "/api", NULL, model, sizeof(model));
    uint64_t start = now_us();
    create(&h, arg[2], id);
    uint64_t created = now_us();
    struct peer *p = peer_ws(&h, id, false);
    uint64_t open = now_us();
    peer_execute(p, arg[3], &a);
    char path[128];
    snprintf(path, sizeof(path), "/api/kernels/%s", id);
    (void)http_call(&h, "GET", path, NULL, model, sizeof(model));
    printf("{\"created_us\":%lu,\"open_us\":%lu,\"result_us\":%lu,\"done_us\":%lu,\"ok\":%s,"
           "\"model\":%s}\n",
           (unsigned long)(created - start), (unsigned long)(open - start),
           (unsigned long)(open - start + a.result_us), (unsigned long)(open - start + a.done_us),
           a.ok ? "true" : "false", model);
    peer_free(p);
    end_kernel(&h, id);
    http_close(&h);
    return 0;
}

static struct peer *target(const char *text)
{
    struct http h = { .fd = -1 };
    char id[64], kind[4];
    if (strncmp(text, "zmq:", 4) == 0)
        return peer_zmq(text + 4);
    if (sscanf(text, "%3[^:]:http://%63[^:]:%7[0-9]/,%255[^,],%63s", kind, h.host, h.port, h.token,
               id) == 5)
        return peer_ws(&h, id, strcmp(kind, "wsq") == 0);
    die("not a target: %s", text);
}

static int cmd_cells(int n_args, char **arg)
{
    size_t n = number(arg[0], 1000000), warmup = number(arg[1], 100000);
    size_t n_targets = (size_t)n_args - 4;
    useconds_t pause = (useconds_t)number(arg[2], 1000) * 1000;
    const char *code = arg[3];
    struct peer *p[TARGETS_MAX];
    if (n_targets < 1 || n_targets > TARGETS_MAX)
        die("1 to %d targets", TARGETS_MAX);
    unsigned *us = xcalloc(n * n_targets, sizeof(*us));
    for (size_t t = 0; t < n_targets; t++) {
        p[t] = target(arg[4 + t]);
        peer_settle(p[t]);
    }
    for (size_t round = 0; round < warmup + n; round++)
        for (size_t i = 0; i < n_targets; i++) {
            size_t t = (i + round) % n_targets;
            struct answer a;
            if (pause)
                usleep(pause);
            peer_execute(p[t], code, &a);
            if (!a.ok)
                die("%s: the cell failed", arg[4 + t]);
            if (round >= warmup)
                us[t * n + round - warmup] = (unsigned)a.done_us;
        }
    printf("{\"targets\":[");
    for (size_t t = 0; t < n_targets; t++) {
        printf("%s[", t ? "," : "");
        for (size_t i = 0; i < n; i++)
            printf("%s%u", i ? "," : "", us[t * n + i]);
        printf("]");
        peer_free(p[t]);
    }
    printf("]}\n");
    free(us);
    return 0;
}

static int cmd_once(char **arg)
{
    struct peer *p = target(arg[1]);
    bool first = true;
    printf("{\"cells\":[");
    for (char *code = arg[0], *end; code; code = end) {
        struct answer a;
        end = strstr(code, ";;");
        if (end) {
            *end = 0;
            end += 2;
        }
        peer_execute(p, code, &a);
        printf("%s{\"done_us\":%lu,\"result_us\":%lu,\"messages\":%lu,\"stream_bytes\":%lu,"
               "\"ok\":%s}",
               first ? "" : ",", (unsigned long)a.done_us, (unsigned long)a.result_us,
               (unsigned long)a.messages, (unsigned long)a.stream_bytes, a.ok ? "true" : "false");
        first = false;
    }
    printf("]}\n");
    peer_free(p);
    return 0;
}

static int cmd_attach(char **arg)
{
    size_t n = number(arg[3], ATTACH_MAX);
    struct peer *peers[ATTACH_MAX];
    char ids[ATTACH_MAX][64], byte;
    struct http h;
    http_open(&h, arg[0], arg[1]);
    for (size_t i = 0; i < n; i++) {
        struct answer a;
        create(&h, arg[2], ids[i]);
        peers[i] = peer_ws(&h, ids[i], false);
        peer_execute(peers[i], arg[4], &a);
        if (!a.ok)
            die("kernel %zu: the cell failed", i);
    }
    printf("{\"attached\":%zu}\n", n);
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    for (size_t i = 0; i < n; i++) {
        peer_free(peers[i]);
        end_kernel(&h, ids[i]);
    }
    http_close(&h);
    return 0;
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "start") == 0 && argc == 6)
        return cmd_start(argv + 2);
    if (strcmp(command, "cells") == 0 && argc >= 7)
        return cmd_cells(argc - 2, argv + 2);
    if (strcmp(command, "once") == 0 && argc == 4)
        return cmd_once(argv + 2);
    if (strcmp(command, "attach") == 0 && argc == 7)
        return cmd_attach(argv + 2);
    fputs("usage: cv-bench start|cells|once|attach ... (see tests/bench/driver.c)\n", stderr);
    return 2;
}
