#pragma once
/* A view of bytes that somebody else owns: pointer + length, passed by value. Never NUL-terminated
 * by contract. A slice of length 0 may have any pointer. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct slice {
    const uint8_t *p;
    size_t n;
};

#define SLICE_NULL ((struct slice) { 0 })
#define SLICE_LIT(s) ((struct slice) { (const uint8_t *)(s), sizeof(s) - 1 })
/* For printf: "%.*s", SLICE_FMT(s). */
#define SLICE_FMT(s) (int)((s).n > 4096 ? 4096 : (s).n), (const char *)(s).p

struct slice slice_of(const void *p, size_t n);
struct slice slice_str(const char *s); /* NULL gives an empty slice */
bool slice_eq(struct slice a, struct slice b);
bool slice_eq_str(struct slice a, const char *s);
bool slice_starts(struct slice a, const char *prefix);
/* A NUL-terminated heap copy (embedded NULs are kept); the caller frees. */
char *slice_dup(struct slice s);
