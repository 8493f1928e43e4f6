#pragma once
/* The one place where an errno becomes an HTTP status, and the error body that all clients read:
 * {"message":..,"reason":..}, always both keys (jupyter.md 1.2). */
#include "common/buf.h"
#include "common/err.h"

/* 0 -> 200; a code without an entry -> 500. */
int gw_status_of(int code);
/* "Not Found"; "Unknown" for a status we never send. */
const char *gw_status_phrase(int status);
/* Appends the body. reason NULL: the phrase. */
int gw_error_body(struct buf *out, int status, const char *reason, const char *message);
