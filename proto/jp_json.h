#pragma once
/* A scanner that finds byte ranges in JSON text without decoding it, so that content stays opaque
 * (NaN, Infinity, big integers, lone surrogates and key order survive). It checks structure only as
 * far as ranges need it: balanced containers, terminated strings, depth <= 512. Hostile input. */
#include "common/slice.h"

/* Range of a whole value at the start of s (leading white space skipped): -EINVAL. */
int jp_json_value(struct slice s, struct slice *ret_value, struct slice *ret_rest);
/* Iterate an object: start with *pos = 0. 1 = a member, 0 = end (only white space may follow the
 * object), -EINVAL. key is the raw text between its quotes. */
int jp_json_member(struct slice obj, size_t *pos, struct slice *ret_key, struct slice *ret_value);
/* Value of a top-level key, last one wins; -ENOENT, -EINVAL. */
int jp_json_find(struct slice obj, const char *key, struct slice *ret_value);
bool jp_json_is_object(struct slice value);
/* Decode a JSON string value into out (UTF-8; lone surrogates become U+FFFD), NUL-terminated.
 * -EINVAL: not a string; -ENOBUFS: longer than size - 1. */
int jp_json_string(struct slice value, char *out, size_t size);
/* Same into a heap string, at most max bytes (caller frees). */
int jp_json_string_dup(struct slice value, size_t max, char **ret);
/* Does the value hold a bare NaN, Infinity or -Infinity token (not valid JSON for browsers)? */
bool jp_json_has_nonfinite(struct slice value);
