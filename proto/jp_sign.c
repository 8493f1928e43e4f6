/* HMAC-SHA256 over the four JSON parts, see jp_sign.h. One keyed context is re-initialised for each
 * message: no allocation per signature. */
#include "proto/jp_sign.h"
#include "common/id.h"
#include "common/mem.h"
#include <assert.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

struct jp_signer {
    EVP_MAC_CTX *ctx; /* NULL: empty key, messages are not signed */
};

/* libcrypto fails here only when it is broken or out of memory; a gateway that cannot sign cannot
 * work, so both end the process. */
static void must(bool ok)
{
    if (!ok)
        abort();
}

struct jp_signer *jp_signer_new(struct slice key)
{
    struct jp_signer *s = xnew(struct jp_signer);
    char digest[] = "SHA256";
    OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
        OSSL_PARAM_construct_end(),
    };
    EVP_MAC *mac;

    if (key.n == 0)
        return s;
    mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    must(mac != NULL);
    s->ctx = EVP_MAC_CTX_new(mac);
    EVP_MAC_free(mac); /* the context holds its own reference */
    must(s->ctx && EVP_MAC_init(s->ctx, key.p, key.n, params));
    return s;
}

void jp_signer_free(struct jp_signer *s)
{
    if (!s)
        return;
    EVP_MAC_CTX_free(s->ctx);
    free(s);
}

void jp_sign(struct jp_signer *s, const struct slice part[4], char ret[JP_SIG_LEN + 1])
{
    uint8_t mac[JP_SIG_LEN / 2];
    size_t n = 0;

    ret[0] = '\0';
    if (!s->ctx)
        return;
    must(EVP_MAC_init(s->ctx, NULL, 0, NULL)); /* same key again */
    for (size_t i = 0; i < 4; i++)
        if (part[i].n)
            must(EVP_MAC_update(s->ctx, part[i].p, part[i].n));
    must(EVP_MAC_final(s->ctx, mac, &n, sizeof(mac)) && n == sizeof(mac));
    id_hex(ret, mac, sizeof(mac));
}

bool jp_verify(struct jp_signer *s, const struct slice part[4], struct slice sig)
{
    char want[JP_SIG_LEN + 1];

    if (!s->ctx)
        return true; /* as every peer does: no key, no check */
    if (sig.n != JP_SIG_LEN)
        return false;
    jp_sign(s, part, want);
    return CRYPTO_memcmp(want, sig.p, JP_SIG_LEN) == 0;
}
