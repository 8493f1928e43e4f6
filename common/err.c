#include "common/err.h"
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* strerror_r in its GNU form: thread-safe, never fails. */
static const char *errno_text(int errnum, char *scratch, size_t size)
{
    return strerror_r(errnum, scratch, size);
}

/* Format into e->msg; then ": tail" when there is one. Uses a copy, since the arguments and the
 * tail may point into the message that is being replaced. */
static void __attribute__((format(printf, 2, 0)))
format(struct err *e, const char *fmt, va_list ap, const char *tail)
{
    char text[2 * sizeof(e->msg)] = { 0 };
    vsnprintf(text, sizeof(e->msg), fmt, ap);
    size_t n = strlen(text);
    if (tail)
        snprintf(text + n, sizeof(text) - n, ": %s", tail);
    memcpy(e->msg, text, sizeof(e->msg) - 1);
    e->msg[sizeof(e->msg) - 1] = '\0';
}

int err_set(struct err *e, int code, const char *fmt, ...)
{
    assert(code <= 0);
    if (!e)
        return code;
    va_list ap;
    va_start(ap, fmt);
    format(e, fmt, ap, NULL);
    va_end(ap);
    e->code = code;
    return code;
}

int err_wrap(struct err *e, int code, const char *fmt, ...)
{
    assert(code <= 0);
    if (!e)
        return code;
    char scratch[128];
    const char *inner = e->code ? e->msg : errno_text(-code, scratch, sizeof(scratch));
    va_list ap;
    va_start(ap, fmt);
    format(e, fmt, ap, inner);
    va_end(ap);
    e->code = code;
    return code;
}

int err_errno(struct err *e, int errnum, const char *fmt, ...)
{
    assert(errnum >= 0);
    if (!e)
        return -errnum;
    char scratch[128];
    va_list ap;
    va_start(ap, fmt);
    format(e, fmt, ap, errno_text(errnum, scratch, sizeof(scratch)));
    va_end(ap);
    e->code = -errnum;
    return -errnum;
}
