#pragma once
/* One Jupyter message (messaging protocol 5.x), immutable after creation and reference-counted: the
 * only refcounted type of the project. One allocation holds struct and bytes; the four JSON parts
 * and the buffers are slices into it and are never re-serialised.
 * Reference: jupyter.md 3.2 (parts), 3.5-3.9 (types). */
#include "common/err.h"
#include "common/slice.h"

enum jp_channel { JP_SHELL, JP_CONTROL, JP_STDIN, JP_IOPUB };
#define JP_CHANNELS 4
const char *jp_channel_name(enum jp_channel c);
int jp_channel_parse(struct slice name, enum jp_channel *ret); /* -EINVAL */

#define JP_MSG_MAX (256u << 20) /* bytes of one message, all parts; more is refused */
#define JP_BUFFERS_MAX 4096u
#define JP_ID_MAX 256u /* msg_id, session, msg_type, username; longer is refused */

struct jp_parts {
    enum jp_channel channel;
    struct slice header, parent, metadata, content; /* JSON objects; empty counts as {} */
    const struct slice *buffers;
    size_t n_buffers;
};

struct jp_msg {
    unsigned refs;
    struct jp_parts parts;
    /* From the header, decoded, NUL-terminated; "" when absent. */
    const char *msg_id, *msg_type, *session, *username, *subshell;
    /* From the parent header; "" when the parent is {}. */
    const char *parent_id, *parent_type, *parent_session;
    size_t size; /* bytes of all parts: what quotas count */
};

/* Copy the parts and parse the two headers. -EINVAL: a part is no JSON object, msg_type is missing
 * or not a string; -E2BIG: over a limit above; -ENOMEM. */
int jp_msg_new(const struct jp_parts *parts, struct jp_msg **ret, struct err *e);
struct jp_msg *jp_msg_ref(struct jp_msg *m);
void jp_msg_unref(struct jp_msg *m); /* NULL ok */
static inline void jp_msg_unrefp(struct jp_msg **m)
{
    jp_msg_unref(*m);
}

/* Build a message of our own: fresh msg_id, date now (wall_us), version 5.3, username "cellvisor".
 * parent_header: raw JSON of the parent's header, empty for {}. content: JSON text. */
int jp_msg_build(enum jp_channel channel, const char *msg_type, const char *session,
                 struct slice parent_header, struct slice content, uint64_t wall_us,
                 struct jp_msg **ret);

/* ---- classification (jupyter.md 2.5, 2.7) ---- */
/* Is this msg_type one that does not count as user activity (kernel_info, comm_info, ...)? */
bool jp_type_untracked(const char *msg_type);
/* Type of the reply to a request ("execute_request" -> "execute_reply"); false: it has none. */
bool jp_reply_type(const char *request, char ret[JP_ID_MAX]);
/* For iopub status messages: the execution_state value into ret ("" if it is something else). */
void jp_status_of(const struct jp_msg *m, char ret[16]);

/* ---- guest-link body of GL_KERNEL_MSG ----
 * u8 channel, u8 0, u16le n (4 + buffers), u32le length[n], bytes in order. */
size_t jp_body_size(const struct jp_msg *m);
/* The table that precedes the parts: writes 4 + 4n bytes to ret. */
void jp_body_head(const struct jp_msg *m, uint8_t *ret);
int jp_body_decode(struct slice body, struct jp_msg **ret, struct err *e); /* as jp_msg_new */
