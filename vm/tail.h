#pragma once
/* The last bytes of a text stream that a peer controls: bounded, for error messages. Private to
 * vm/. */
#include "common/slice.h"
#include <string.h>

#define VM_TAIL_MAX 4096u

struct vm_tail {
    size_t n;
    char bytes[VM_TAIL_MAX + 1]; /* NUL-terminated */
};

static inline void vm_tail_add(struct vm_tail *t, struct slice s)
{
    size_t keep;

    if (s.n > VM_TAIL_MAX)
        s = slice_of(s.p + (s.n - VM_TAIL_MAX), VM_TAIL_MAX);
    keep = t->n + s.n > VM_TAIL_MAX ? VM_TAIL_MAX - s.n : t->n;
    memmove(t->bytes, t->bytes + (t->n - keep), keep);
    if (s.n)
        memcpy(t->bytes + keep, s.p, s.n);
    t->n = keep + s.n;
    t->bytes[t->n] = '\0';
}

/* The last line that is not empty, without control characters; "" when there is none. */
static inline void vm_tail_last_line(const struct vm_tail *t, char *ret, size_t size)
{
    size_t end = t->n, start, n = 0;

    while (end > 0 && (unsigned char)t->bytes[end - 1] <= ' ')
        end--;
    for (start = end; start > 0 && t->bytes[start - 1] != '\n';)
        start--;
    for (; start < end && n + 1 < size; start++)
        ret[n++] =
            (unsigned char)t->bytes[start] < ' ' || t->bytes[start] == 0x7f ? ' ' : t->bytes[start];
    ret[n] = '\0';
}
