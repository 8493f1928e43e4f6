#pragma once
/* The options of `cellvisor serve` as plain data, and the tokens they lead to. Turning them into
 * the configurations of gateway/, kernelmgr/ and vm/ is cmd_serve.c's work. */
#include "cli/opts.h"

struct serve_opts {
    char *ip, *base_url, *tls_cert, *tls_key, *ws_protocol, *web_dir;
    uint64_t port, port_retries, ws_ping, ws_pong_timeout, max_body_mb, max_ws_message_mb;
    char **allow_host, **allow_origin;
    bool allow_credentials, proxy_no_binary, metrics_no_auth;

    char **token; /* "TOKEN" or "PRINCIPAL:TOKEN" */
    char *token_file;
    bool no_auth;

    char *default_template, *default_spec;
    uint64_t max_kernels, max_kernels_per_principal, log_mb, replay_mb, replay_ttl, start_timeout;
    uint64_t shutdown_grace, restart_limit;

    char *state, *accel, *qemu, *shim, *template_only;
    bool insecure_local, local_only;
    uint64_t pool_parked, pool_deferred, pool_max, max_vms, memory_mb;

    char *log_level;
    bool log_json, quiet;
    uint64_t ready_fd;
};
extern const struct opt_command serve_command;

/* What option parsing alone cannot see: options that exclude or need each other. -EINVAL. */
int serve_opts_check(const struct serve_opts *o, struct err *e);

struct serve_token {
    char *principal, *token;
};
struct serve_tokens {
    struct serve_token *items;
    size_t n;
    bool generated; /* the one in STATE/token; `path` names the file */
    char *path;
};
/* From --token, --token-file, or STATE/token, which is made (0600) when there is none. Empty when
 * no_auth. -EINVAL with the place of the mistake; other errno for files. */
int serve_tokens_load(const struct serve_opts *o, const char *state_dir, struct serve_tokens *ret,
                      struct err *e);
void serve_tokens_free(struct serve_tokens *t);
