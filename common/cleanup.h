#pragma once
/* Scope-bound ownership: CLEANUP(x_freep) struct x *v = NULL; ... return TAKE_PTR(v); */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CLEANUP(fn) __attribute__((cleanup(fn)))
#define TAKE_PTR(p)                                                                                \
    ({                                                                                             \
        __typeof__(p) *_pp = &(p);                                                                 \
        __typeof__(p) _v = *_pp;                                                                   \
        *_pp = NULL;                                                                               \
        _v;                                                                                        \
    })
#define TAKE_FD(fd)                                                                                \
    ({                                                                                             \
        int *_pfd = &(fd);                                                                         \
        int _v = *_pfd;                                                                            \
        *_pfd = -1;                                                                                \
        _v;                                                                                        \
    })
/* Declares static inline void fn##p(type **p) that calls fn(*p). Lives next to the destructor. */
#define DEFINE_CLEANUP(type, fn)                                                                   \
    static inline void fn##p(type *p)                                                              \
    {                                                                                              \
        if (*p)                                                                                    \
            fn(*p);                                                                                \
    }

static inline void freep(void *p)
{
    free(*(void **)p);
}
static inline void closep(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}
static inline void fclosep(FILE **f)
{
    if (*f)
        fclose(*f);
}
#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))
