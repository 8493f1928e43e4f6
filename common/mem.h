#pragma once
/* Allocation of small fixed-size control objects: aborts when memory is out. Anything whose size a
 * peer influences goes through buf.h instead, which is capped and can fail. */
#include <stdarg.h>
#include <stddef.h>

void *xmalloc(size_t n);
void *xcalloc(size_t count, size_t size); /* zeroed */
void *xrealloc(void *p, size_t n);
char *xstrdup(const char *s); /* NULL gives NULL */
char *xstrndup(const char *s, size_t n);
char *xasprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#define xnew(type) ((type *)xcalloc(1, sizeof(type)))

/* Fault injection for torture tests: the n-th *fallible* allocation from now (buf_ API, 1 = next)
 * fails once. 0 switches it off. */
void mem_fail_at(unsigned n);
/* Used by buf.c: realloc that honours mem_fail_at; NULL when out. */
void *mem_try_realloc(void *p, size_t n);
