#pragma once
/* Identifiers and secrets. Randomness is getrandom(2); failure to get any aborts. */
#include "common/slice.h"

#define ID_UUID_LEN 36
void id_random(void *p, size_t n);
void id_uuid4(char ret[ID_UUID_LEN + 1]);               /* lower case, RFC 4122 v4 */
void id_hex(char *ret, const uint8_t *bytes, size_t n); /* 2n characters + NUL */
void id_token(char *ret, size_t n_bytes);               /* random hex token: 2n + NUL */
bool id_is_uuid_shaped(const char *s);            /* five groups of word characters joined by '-' */
bool id_equal_ct(struct slice a, struct slice b); /* constant time in the content */
size_t id_base64_len(size_t n);                   /* characters without NUL */
void id_base64(char *ret, struct slice s);        /* standard alphabet, padded, NUL */
int id_base64_decode(struct slice s, uint8_t *ret, size_t *inout_len); /* -EINVAL, -ENOBUFS */
