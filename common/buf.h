#pragma once
/* A growable byte buffer with a mandatory maximum. All writers return 0 or -ENOBUFS (over the
 * maximum) / -ENOMEM; on failure nothing is appended. Consuming from the front is cheap (offset,
 * compacted lazily). Not NUL-terminated, except right after buf_cstr. */
#include "common/slice.h"
#include <stdarg.h>

struct buf {
    uint8_t *data;
    size_t off, len, cap; /* live bytes: data[off .. off+len) */
    size_t max;
};

void buf_init(struct buf *b, size_t max);
void buf_fini(struct buf *b); /* also for a zeroed struct; afterwards zeroed, max kept */
struct slice buf_slice(const struct buf *b);
void buf_clear(struct buf *b);              /* keeps the memory */
void buf_consume(struct buf *b, size_t n);  /* asserts n <= len */
void buf_truncate(struct buf *b, size_t n); /* keep the first n bytes */
int buf_append(struct buf *b, const void *p, size_t n);
int buf_append_slice(struct buf *b, struct slice s);
int buf_append_str(struct buf *b, const char *s);
int buf_append_byte(struct buf *b, uint8_t c);
int buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int buf_vprintf(struct buf *b, const char *fmt, va_list ap) __attribute__((format(printf, 2, 0)));
/* JSON string with quotes; invalid UTF-8 becomes U+FFFD. */
int buf_append_json_string(struct buf *b, struct slice s);
/* Make room for n more bytes and return where they go (NULL on failure); then buf_commit(<= n). */
uint8_t *buf_reserve(struct buf *b, size_t n);
void buf_commit(struct buf *b, size_t n);
/* NUL-terminate behind the live bytes and return them; NULL when out of room. */
char *buf_cstr(struct buf *b);
/* Hand the bytes over as a malloc'd block (NUL behind); the buffer is empty afterwards. */
uint8_t *buf_steal(struct buf *b, size_t *ret_len);
