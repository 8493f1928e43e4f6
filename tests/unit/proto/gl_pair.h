#pragma once
/* Two links back to back, and one link against forged bytes: the fixture of the gl_link tests. */
#include "common/buf.h"
#include "common/mem.h"
#include "common/rdwr.h"
#include "proto/gl_priv.h"
#include "vectors.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGE_MAX (10u << 20)
#define QUEUE_MAX (1u << 20)

/* What a link told its user. Callbacks only record; tests assert afterwards. */
struct record {
    enum gl_type type;
    uint32_t stream;
    size_t n;
    uint64_t hash;
    const uint8_t *p; /* where the payload lay; to compare, not to read */
};
struct side {
    struct gl_link *l;
    struct record *records;
    size_t n, cap;
    unsigned outputs;
    uint32_t writable[64];
    size_t n_writable;
    bool grant; /* dispose of bulk at once */
    void (*hook)(struct side *s, enum gl_type type, uint32_t stream);
};

struct pair {
    struct side host, guest;
};

extern const struct gl_link_ops pair_ops;
int pair_setup(void **state); /* both RUNNING, granting at once */
int pair_teardown(void **state);
/* Move what one side has to the other, `step` bytes a write. Bytes moved. */
size_t move(struct side *from, struct side *to, size_t step);
void settle(struct pair *p, size_t step); /* until neither has anything to say */
/* Send n bytes of a pattern that `seed` starts. */
int send_n(struct side *s, enum gl_type type, uint32_t stream, size_t n, uint8_t seed);
uint64_t hash_n(size_t n, uint8_t seed); /* what record.hash of such a message is */
void assert_got(const struct side *s, size_t i, enum gl_type type, uint32_t stream, size_t n,
                uint8_t seed);
/* Append a frame of n times 'x' with a right check word. */
void raw(struct buf *b, unsigned type, uint32_t stream, uint8_t flags, uint32_t n);
