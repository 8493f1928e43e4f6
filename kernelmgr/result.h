#pragma once
/* What one execution produced, in order: streams joined, rich outputs as the messages they came in
 * (references, no copies), display ids honoured, clear_output honoured. Bounded: what is over the
 * limit is counted, not kept. */
#include "common/buf.h"
#include "common/list.h"
#include "proto/jp_msg.h"

enum km_output_kind { KM_OUT_STREAM, KM_OUT_DISPLAY, KM_OUT_RESULT, KM_OUT_ERROR };
struct km_output {
    struct list_node link; /* km_result::outputs */
    enum km_output_kind kind;
    bool is_stderr;
    struct buf text;    /* streams: JSON text without its quotes */
    struct jp_msg *msg; /* all others */
    char *display_id;   /* raw JSON string, or NULL */
};
struct km_result {
    struct list outputs;
    size_t bytes, bytes_max, truncated;
    bool clear_next;      /* clear_output(wait=true): at the next output */
    struct jp_msg *reply; /* execute_reply */
};

void km_result_init(struct km_result *r, size_t bytes_max);
void km_result_fini(struct km_result *r);
void km_result_add(struct km_result *r, struct jp_msg *m); /* an iopub message of the execution */
void km_result_update(struct km_result *r,
                      struct jp_msg *m); /* update_display_data, from anywhere */
void km_result_set_reply(struct km_result *r, struct jp_msg *m);
/* Raw JSON of a key of the reply's content, or empty. */
struct slice km_result_reply_value(const struct km_result *r, const char *key);
int km_result_write_outputs(const struct km_result *r, struct buf *out); /* JSON array */
int km_result_write_text(const struct km_result *r, struct buf *out);
void km_result_each_mime(const struct km_result *r, const char *prefix,
                         void (*fn)(void *ctx, struct slice mime, struct slice json_value),
                         void *ctx);
