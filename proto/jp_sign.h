#pragma once
/* HMAC-SHA256 message signatures (jupyter.md 3.2): lower-case hex over header, parent_header,
 * metadata, content; buffers are not signed. An empty key signs with the empty string. */
#include "proto/jp_msg.h"

#define JP_SIG_LEN 64
struct jp_signer; /* keyed HMAC context, re-used */
struct jp_signer *jp_signer_new(struct slice key);
void jp_signer_free(struct jp_signer *s);
/* Empty key: ret is "". */
void jp_sign(struct jp_signer *s, const struct slice part[4], char ret[JP_SIG_LEN + 1]);
bool jp_verify(struct jp_signer *s, const struct slice part[4], struct slice sig); /* const. time */
