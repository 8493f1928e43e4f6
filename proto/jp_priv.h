#pragma once
/* Inside proto/ only. */
#include "common/buf.h"
#include "proto/jp_json.h"
#include "proto/jp_msg.h"

/* Append a message part so that a browser's JSON.parse takes it: NaN, Infinity and -Infinity become
 * null, raw control characters in strings become \u00XX, malformed UTF-8 becomes U+FFFD. Without
 * any of these it is one memcpy. A part that is not one balanced value becomes {}. -ENOBUFS,
 * -ENOMEM. */
int jp_json_append_strict(struct buf *out, struct slice value);

/* Does raw (the bytes between the quotes of a key) spell `key`? Escapes are decoded, so that
 * "msg\u005ftype" cannot hide a key from us that the kernel's parser sees. */
bool jp_json_key_is(struct slice raw, const char *key);
bool jp_json_key_eq(struct slice raw, struct slice key);

/* jp_json_string for a value that a scan has found to be a string; also tells the length. */
int jp_json_decode(struct slice value, char *out, size_t size, size_t *ret_len);

/* The bare token (letters, digits, sign, point) that starts at s.p[i]: its end. *ret_nonfinite: it
 * is NaN, Infinity or -Infinity. i itself: no token starts there. */
size_t jp_json_token(struct slice s, size_t i, bool *ret_nonfinite);

/* An array: start with *pos = 0. 1 = an element, 0 = end, -EINVAL. */
int jp_json_element(struct slice array, size_t *pos, struct slice *ret_value);

/* A list of buffer slices of bounded, peer-chosen length: small ones live on the stack. */
#define JP_SLICES_INLINE 32u
struct jp_slices {
    struct slice *v;
    struct slice few[JP_SLICES_INLINE];
};
int jp_slices_init(struct jp_slices *s, size_t n); /* -ENOMEM; the caller has checked n */
void jp_slices_fini(struct jp_slices *s);
