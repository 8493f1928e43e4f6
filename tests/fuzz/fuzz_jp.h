#pragma once
/* Shared by the targets that decode Jupyter messages. */
#include "common/utf8.h"
#include "fuzz.h"
#include "proto/jp_json.h"
#include "proto/jp_msg.h"
#include <string.h>

/* The message keeps its own invariants. */
static inline void fuzz_check_message(const struct jp_msg *m)
{
    const char *const ids[] = { m->msg_id,   m->msg_type,  m->session,     m->username,
                                m->subshell, m->parent_id, m->parent_type, m->parent_session };
    const struct jp_parts *p = &m->parts;
    size_t size = p->header.n + p->parent.n + p->metadata.n + p->content.n;

    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++)
        FUZZ_CHECK(strlen(ids[i]) < JP_ID_MAX);
    FUZZ_CHECK(m->msg_type[0]);
    FUZZ_CHECK(m->refs == 1);
    FUZZ_CHECK((unsigned)p->channel < JP_CHANNELS);
    FUZZ_CHECK(p->n_buffers <= JP_BUFFERS_MAX);
    for (size_t i = 0; i < p->n_buffers; i++)
        size += p->buffers[i].n;
    FUZZ_CHECK(size == m->size && size <= JP_MSG_MAX);
    FUZZ_CHECK(jp_json_is_object(p->header));
}

static inline void fuzz_check_same_ids(const struct jp_msg *a, const struct jp_msg *b)
{
    FUZZ_CHECK(a->parts.channel == b->parts.channel);
    FUZZ_CHECK(strcmp(a->msg_id, b->msg_id) == 0);
    FUZZ_CHECK(strcmp(a->msg_type, b->msg_type) == 0);
    FUZZ_CHECK(strcmp(a->session, b->session) == 0);
    FUZZ_CHECK(strcmp(a->username, b->username) == 0);
    FUZZ_CHECK(strcmp(a->subshell, b->subshell) == 0);
    FUZZ_CHECK(strcmp(a->parent_id, b->parent_id) == 0);
    FUZZ_CHECK(strcmp(a->parent_type, b->parent_type) == 0);
    FUZZ_CHECK(strcmp(a->parent_session, b->parent_session) == 0);
    FUZZ_CHECK(a->parts.n_buffers == b->parts.n_buffers);
    for (size_t i = 0; i < a->parts.n_buffers; i++)
        FUZZ_CHECK(slice_eq(a->parts.buffers[i], b->parts.buffers[i]));
}

static inline void fuzz_check_same(const struct jp_msg *a, const struct jp_msg *b)
{
    fuzz_check_same_ids(a, b);
    FUZZ_CHECK(slice_eq(a->parts.header, b->parts.header));
    FUZZ_CHECK(slice_eq(a->parts.parent, b->parts.parent));
    FUZZ_CHECK(slice_eq(a->parts.metadata, b->parts.metadata));
    FUZZ_CHECK(slice_eq(a->parts.content, b->parts.content));
}

/* Text a browser takes: UTF-8, no raw control characters in strings, no NaN. */
static inline void fuzz_check_strict(struct slice s)
{
    bool in_string = false;

    FUZZ_CHECK(!jp_json_has_nonfinite(s));
    for (size_t i = 0; i < s.n;) {
        size_t n = utf8_len(s.p + i, s.n - i);
        uint8_t c = s.p[i];

        FUZZ_CHECK(n > 0);
        if (in_string)
            FUZZ_CHECK(c >= 0x20);
        if (c == '"')
            in_string = !in_string;
        else if (c == '\\' && in_string && i + 1 < s.n && s.p[i + 1] < 0x80)
            n = 2;
        i += n;
    }
    FUZZ_CHECK(!in_string);
}
