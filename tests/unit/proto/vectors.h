#pragma once
/* Golden vectors (tests/vectors/, made by the Python reference) for the tests of this folder. */
#include "common/slice.h"
#include "proto/jp_msg.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h> /* needs those above */

struct vectors {
    json_t *doc;
    void **blobs; /* decoded bytes, freed with the file */
    size_t n_blobs;
};
/* Fails the test when the file is missing or malformed. */
void vectors_load(struct vectors *v, const char *name);
void vectors_free(struct vectors *v);
const char *vec_str(json_t *obj, const char *key);
struct slice vec_bytes(struct vectors *v, json_t *base64);
struct slice vec_get(struct vectors *v, json_t *obj, const char *key);
/* All strings of an array, at most max. */
size_t vec_list(struct vectors *v, json_t *obj, const char *key, struct slice *ret, size_t max);

#define VEC_MAX 512
/* One entry of messages.json, decoded. */
struct vec_message {
    const char *name;
    struct jp_parts parts;  /* as on ZMQ */
    struct jp_parts legacy; /* as the JSON text of a client has them */
    struct slice buffers[VEC_MAX];
    struct slice zmq[VEC_MAX];
    size_t n_zmq, n_idents;
    struct slice key, ws_v1, ws_legacy, ws_legacy_base64, strict_value;
    const char *signature, *status;
    json_t *ids;
};
void vec_message(struct vectors *v, size_t i, struct vec_message *ret);
/* Asserts that m has these parts, the vector's buffers and its ids. */
void vec_check(const struct vec_message *v, const struct jp_parts *want, const struct jp_msg *m);
/* Asserts equality with a readable message. */
void assert_bytes(const char *what, struct slice got, struct slice want);
