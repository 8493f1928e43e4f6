#pragma once
/* Inside proto/ only: the header codec and the table that says which frame is legal where. The
 * table is the single source of docs/guestlink.md's frame table (a unit test compares them). */
#include "proto/gl.h"

#define GL_CONTROL_MAX (16u << 20) /* bytes of one control message, whatever its type */
#define GL_TYPE_END 22u            /* first number above the known types */

enum {
    GL_FROM_HOST = 1 << GL_HOST,
    GL_FROM_GUEST = 1 << GL_GUEST,
    GL_FROM_BOTH = GL_FROM_HOST | GL_FROM_GUEST,
};
enum {
    GL_IN_HELLO = 1 << GL_PHASE_HELLO,
    GL_IN_IDLE = 1 << GL_PHASE_IDLE,
    GL_IN_RUNNING = 1 << GL_PHASE_RUNNING,
    GL_IN_LIFE = GL_IN_IDLE | GL_IN_RUNNING,
};
/* How a type is scheduled and counted. */
enum gl_class {
    GL_CLASS_CONTROL, /* stream 0, sent before everything else, in order */
    GL_CLASS_URGENT, /* kernel stream, one frame, travels with control: passes bulk of its stream */
    GL_CLASS_ORDERED, /* kernel stream, keeps its place among the bulk, costs no credit */
    GL_CLASS_BULK,    /* kernel stream, credited */
};

struct gl_type_info {
    const char *name; /* "hello"; NULL in a hole of the table */
    uint8_t from;     /* GL_FROM_ */
    uint8_t phases;   /* GL_IN_ */
    enum gl_class class;
    uint32_t min, max; /* bytes of a whole message; max 0 = gl_limits.message_max */
};
/* NULL: unknown or reserved type. */
const struct gl_type_info *gl_type_info(unsigned type);
bool gl_type_legal(const struct gl_type_info *t, enum gl_role sender, enum gl_phase phase);
const char *gl_phase_name(enum gl_phase p);
const char *gl_role_name(enum gl_role r);

struct gl_header {
    uint32_t length;
    uint8_t type, flags;
    uint32_t stream;
};
void gl_header_put(uint8_t ret[GL_HEADER], const struct gl_header *h);
/* Everything that can be told without state: check word, flags, length, type, stream range and the
 * kind of stream. *ret_info is the type's row. -EPROTO. */
int gl_header_get(const uint8_t bytes[GL_HEADER], struct gl_header *ret,
                  const struct gl_type_info **ret_info, struct err *e);

/* ---- send queue: a FIFO of ready-made frames in a chain of chunks ----
 * A frame lies in one chunk whole, chunks never move, so a slice handed out stays valid until the
 * bytes are consumed. One memcpy per part on the way in, none on the way out. */
struct gl_chunk {
    struct gl_chunk *next;
    uint32_t off, len, cap;
    uint8_t data[];
};
struct gl_chunk_pool { /* of a link: spares the allocator the steady state */
    struct gl_chunk *spare[2];
};
struct gl_queue {
    struct gl_chunk *head, *tail;
    size_t bytes;        /* not yet consumed, headers included */
    unsigned n_exempt;   /* frames not yet begun that cost no credit */
    uint32_t frame_left; /* bytes left of the frame being written; 0 = at a boundary */
    bool mid_message;    /* the last frame begun promised more */
};
/* Bytes that a message of n payload bytes takes in a queue. */
size_t gl_queue_framed(size_t n);
/* Append one message; -ENOMEM leaves the queue as it was. */
int gl_queue_put(struct gl_queue *q, struct gl_chunk_pool *pool, enum gl_type type, uint32_t stream,
                 const struct slice *parts, size_t n);
/* May bytes leave now? Bulk frames need their whole payload in credit. */
bool gl_queue_ready(const struct gl_queue *q, uint32_t credit);
/* Contiguous bytes at the front that credit allows: whole frames until about `want` bytes. */
struct slice gl_queue_front(const struct gl_queue *q, uint32_t credit, size_t want);
/* Drop n bytes from the front; credit is charged for each bulk frame begun. */
void gl_queue_consume(struct gl_queue *q, struct gl_chunk_pool *pool, size_t n, uint32_t *credit);
/* Forget bulk messages that are not begun; the rest of a begun one and exempt frames stay. */
void gl_queue_prune(struct gl_queue *q, struct gl_chunk_pool *pool);
void gl_queue_clear(struct gl_queue *q, struct gl_chunk_pool *pool);
void gl_chunk_pool_fini(struct gl_chunk_pool *pool);
