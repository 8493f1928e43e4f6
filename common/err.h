#pragma once
/* Errors: functions return 0 or a negative errno; where a person will read the reason, a
 * caller-owned struct err comes last. It is fixed-size: nothing to free, no failure path of its
 * own. e may be NULL everywhere. */

struct err {
    int code; /* the negative errno, 0 = none */
    char msg[480];
};

/* Store code and text; returns code, so that `return err_set(e, -EINVAL, ...)` reads as one step.
 * A positive code is a programmer error (asserted). Overwrites what was there. */
int err_set(struct err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Put "context: " before what is there (or before strerror(code) when e holds nothing). */
int err_wrap(struct err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* err_set with ": strerror" appended. errnum is positive (errno). Returns -errnum. */
int err_errno(struct err *e, int errnum, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
