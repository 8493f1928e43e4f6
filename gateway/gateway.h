#pragma once
/* The HTTP and websocket front: listener, TLS, REST routes, auth, kernel websockets.
 * Reaches kernels only through kernelmgr/. Wired by cli/cmd_serve.c. */
#include "common/log.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "kernelmgr/km.h"

struct gw_token {
    const char *principal; /* who the token belongs to */
    const char *token;     /* never logged */
};
struct gw_config {
    const char *ip;        /* "127.0.0.1" */
    unsigned port;         /* 8888; 0 = any free one, see gw_server_port */
    unsigned port_retries; /* following ports to try when taken (0) */
    const char *base_url;  /* any spelling: "", "/", "gw", "/gw/"; normalised */
    const struct gw_token *tokens;
    size_t n_tokens;                  /* 0: only with no_auth */
    bool no_auth;                     /* everybody is principal "anonymous" */
    const char *const *allow_origins; /* exact origins, or "*"; NULL-terminated or NULL */
    bool allow_credentials;
    const char *const
        *allow_hosts; /* Host names accepted besides localhost/IP literals and ip; "*" = any */
    const char *tls_cert, *tls_key; /* PEM files, both or none */
    size_t max_body;                /* request body (default 16 MiB); more: 413 */
    size_t max_ws_message;          /* websocket message (default 128 MiB); more: close 1009 */
    unsigned ws_ping_s;             /* 25; 0 = off */
    unsigned ws_pong_timeout_s;     /* 75; must be > ping */
    const char *ws_protocol;        /* NULL: v1 when offered; "legacy": never v1 */
    bool proxy_no_binary; /* never send binary frames on legacy sockets (old jupyter_server proxies)
                           */
    bool metrics_no_auth;
    const char *web_dir; /* static console, NULL = none */
};
void gw_config_defaults(struct gw_config *c);

struct gw_server;
/* -EADDRINUSE (e names address and port), -EINVAL (option), -ENOENT (TLS file). */
int gw_server_new(struct loop *l, const struct gw_config *c, struct km_manager *km,
                  struct metrics *m, const struct log_ctx *log, struct gw_server **ret,
                  struct err *e);
unsigned gw_server_port(const struct gw_server *s);
/* "http://127.0.0.1:8888/base/" */
const char *gw_server_url(const struct gw_server *s);
/* Called when POST /api/shutdown is accepted. */
void gw_server_on_shutdown(struct gw_server *s, void (*fn)(void *ctx), void *ctx);
/* Stop listening, answer what is in flight, close websockets with 1012; closed(ctx) when done. */
void gw_server_close(struct gw_server *s, void (*closed)(void *ctx), void *ctx);
void gw_server_free(struct gw_server *s);
