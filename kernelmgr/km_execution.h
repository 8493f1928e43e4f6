#pragma once
/* One execute request with everything it produced, bounded; the one result builder behind REST
 * execute, `cellvisor run`, MCP and E2B views (design.md section 8). Streams are coalesced and kept
 * in order with rich outputs; display ids are honoured (update_display_data changes all earlier
 * outputs with that id, case-77); clear_output(wait) is honoured; carriage returns fold in the text
 * view (case-16). */
#include "common/buf.h"
#include "kernelmgr/km.h"

struct km_execution;
struct km_execute_opts {
    const char *code; /* or code_len bytes */
    size_t code_len;
    bool silent, store_history;
    /* An error aborts the requests queued behind this one, whoever sent them. Off by default: calls
     * that share a kernel are independent of each other, and a cancelled one (which ends in an
     * error as well) must not take the next along (case-66). */
    bool stop_on_error;
    uint64_t timeout_ms; /* interrupt on expiry, error "Timeout"; 0 = none */
    size_t output_max;   /* bytes of outputs kept (default 64 MiB): beyond, the rest is counted, not
                            kept */
};
struct km_execution_events {
    void (*output)(void *ctx, const struct jp_msg *m); /* live, may be NULL */
    void (*done)(void *ctx, struct km_execution *x);   /* once; also on kernel death */
};
void km_execute_opts_defaults(struct km_execute_opts *o);
/* -ESRCH, -EAGAIN as km_client_submit; -E2BIG. stdin is never allowed: code that asks for input all
 * the same is interrupted and ends with the error StdinNotImplementedError. */
int km_execute(struct km_kernel *k, const struct km_execute_opts *o,
               const struct km_execution_events *ev, void *ctx, struct km_execution **ret,
               struct err *e);
/* Stop waiting. interrupt: also stop the code (a REST client that went away, case-66). No done()
 * after. */
void km_execution_cancel(struct km_execution *x, bool interrupt);
void km_execution_free(struct km_execution *x); /* after done, or cancels without interrupt */

const char *km_execution_id(const struct km_execution *x); /* = msg_id of the request */
const char *
km_execution_status(const struct km_execution *x); /* ok, error, aborted, timeout, dead, running */
/* {"id","status","execution_count","outputs":[nbformat
 * outputs],"error":{ename,evalue,traceback}|null,
 *  "payload":[...],"truncated_bytes":n,"timing":{"queued_ms","run_ms"}} appended as JSON text.
 * Content parts go in byte for byte (no re-encoding). */
int km_execution_write_json(const struct km_execution *x, struct buf *out);
/* Plain text of the outputs: streams, text/plain of results, tracebacks without escape codes. */
int km_execution_write_text(const struct km_execution *x, struct buf *out);
/* Call fn for each rich output datum whose mime type starts with prefix ("image/"); value is raw
 * JSON. */
void km_execution_each_mime(const struct km_execution *x, const char *prefix,
                            void (*fn)(void *ctx, struct slice mime, struct slice json_value),
                            void *ctx);
