#include "common/id.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

void id_random(void *p, size_t n)
{
    uint8_t *q = p;
    while (n) {
        ssize_t r = getrandom(q, n, 0);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            abort(); /* an identifier that can be guessed is worse than no gateway */
        q += r;
        n -= (size_t)r;
    }
}

void id_hex(char *ret, const uint8_t *bytes, size_t n)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        ret[2 * i] = digits[bytes[i] >> 4];
        ret[2 * i + 1] = digits[bytes[i] & 15];
    }
    ret[2 * n] = '\0';
}

void id_uuid4(char ret[ID_UUID_LEN + 1])
{
    uint8_t b[16];
    id_random(b, sizeof(b));
    b[6] = (uint8_t)((b[6] & 0x0f) | 0x40); /* version 4 (RFC 4122 section 4.4) */
    b[8] = (uint8_t)((b[8] & 0x3f) | 0x80); /* variant 1 */
    static const size_t groups[] = { 4, 2, 2, 2, 6 };
    const uint8_t *from = b;
    char *to = ret;
    for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) {
        if (g)
            *to++ = '-';
        id_hex(to, from, groups[g]);
        from += groups[g];
        to += 2 * groups[g];
    }
}

void id_token(char *ret, size_t n_bytes)
{
    uint8_t chunk[32];
    while (n_bytes) {
        size_t n = n_bytes < sizeof(chunk) ? n_bytes : sizeof(chunk);
        id_random(chunk, n);
        id_hex(ret, chunk, n);
        ret += 2 * n;
        n_bytes -= n;
    }
    *ret = '\0';
    explicit_bzero(chunk, sizeof(chunk));
}

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

bool id_is_uuid_shaped(const char *s)
{
    int groups = 0;
    bool in_group = false;
    for (; *s; s++) {
        if (is_word(*s)) {
            groups += !in_group;
            in_group = true;
        } else if (*s == '-' && in_group) {
            in_group = false;
        } else {
            return false;
        }
    }
    return in_group && groups == 5;
}

bool id_equal_ct(struct slice a, struct slice b)
{
    if (a.n != b.n)
        return false;
    volatile uint8_t diff = 0; /* volatile: no early exit by the optimiser */
    for (size_t i = 0; i < a.n; i++)
        diff = (uint8_t)(diff | (a.p[i] ^ b.p[i]));
    return diff == 0;
}

size_t id_base64_len(size_t n)
{
    return (n + 2) / 3 * 4;
}

void id_base64(char *ret, struct slice s)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < s.n; i += 3) {
        size_t have = s.n - i < 3 ? s.n - i : 3;
        uint32_t v = (uint32_t)s.p[i] << 16;
        if (have > 1)
            v |= (uint32_t)s.p[i + 1] << 8;
        if (have > 2)
            v |= s.p[i + 2];
        *ret++ = digits[v >> 18];
        *ret++ = digits[v >> 12 & 63];
        *ret++ = have > 1 ? digits[v >> 6 & 63] : '=';
        *ret++ = have > 2 ? digits[v & 63] : '=';
    }
    *ret = '\0';
}

static int base64_value(uint8_t c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

int id_base64_decode(struct slice s, uint8_t *ret, size_t *inout_len)
{
    if (s.n % 4)
        return -EINVAL;
    size_t pad = 0;
    while (pad < 2 && pad < s.n && s.p[s.n - 1 - pad] == '=')
        pad++;
    size_t len = s.n / 4 * 3 - pad;
    if (len > *inout_len)
        return -ENOBUFS;
    size_t out = 0;
    for (size_t i = 0; i < s.n; i += 4) {
        uint32_t v = 0;
        size_t padded = i + 4 == s.n ? pad : 0;
        for (size_t k = 0; k < 4; k++) {
            int d = k >= 4 - padded ? 0 : base64_value(s.p[i + k]);
            if (d < 0)
                return -EINVAL;
            v = v << 6 | (uint32_t)d;
        }
        /* Bits that the padding cuts off must be zero: one text per value. */
        if (padded && v & (padded == 1 ? 0xff : 0xffff))
            return -EINVAL;
        for (size_t k = 0; k < 3 - padded; k++)
            ret[out++] = (uint8_t)(v >> (16 - 8 * k));
    }
    *inout_len = out;
    return 0;
}
