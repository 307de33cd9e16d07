#include "soft/base/hmac.h"

#include <string.h>

static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t value, unsigned int by)
{
    return value >> by | value << (32 - by);
}

static uint32_t load(const uint8_t *from)
{
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

static void store(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 24);
    to[1] = (uint8_t)(value >> 16);
    to[2] = (uint8_t)(value >> 8);
    to[3] = (uint8_t)value;
}

static void compress(uint32_t state[8], const uint8_t block[64])
{
    uint32_t words[64], a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    int i;

    for (i = 0; i < 16; i++)
        words[i] = load(block + (size_t)i * 4);
    for (; i < 64; i++) {
        uint32_t x = words[i - 15], y = words[i - 2];

        words[i] = words[i - 16] + (rotate(x, 7) ^ rotate(x, 18) ^ x >> 3) + words[i - 7] +
                   (rotate(y, 17) ^ rotate(y, 19) ^ y >> 10);
    }
    for (i = 0; i < 64; i++) {
        uint32_t one =
            h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + constants[i] + words[i];
        uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));

        h = g;
        g = f;
        f = e;
        e = d + one;
        d = c;
        c = b;
        b = a;
        a = one + two;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

void soft_sha256_begin(struct soft_sha256 *sha)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

    memcpy(sha->state, start, sizeof(start));
    sha->length = 0;
}

void soft_sha256_add(struct soft_sha256 *sha, const void *data, size_t size)
{
    const uint8_t *from = data;

    while (size) {
        size_t filled = sha->length % 64, part = 64 - filled < size ? 64 - filled : size;

        memcpy(sha->block + filled, from, part);
        sha->length += part;
        from += part;
        size -= part;
        if (sha->length % 64 == 0)
            compress(sha->state, sha->block);
    }
}

void soft_sha256_end(struct soft_sha256 *sha, uint8_t out[SOFT_DIGEST])
{
    static const uint8_t padding[64] = {0x80};
    uint64_t bits = sha->length * 8;
    uint8_t length[8];
    int i;

    soft_sha256_add(sha, padding, 1 + (119 - sha->length % 64) % 64);
    store(length, (uint32_t)(bits >> 32));
    store(length + 4, (uint32_t)bits);
    soft_sha256_add(sha, length, sizeof(length));
    for (i = 0; i < 8; i++)
        store(out + (size_t)i * 4, sha->state[i]);
}

void soft_hmac_begin(struct soft_hmac *hmac, const void *key, size_t size)
{
    uint8_t inner[64] = {0};
    size_t i;

    if (size > sizeof(inner)) {
        soft_sha256_begin(&hmac->inner);
        soft_sha256_add(&hmac->inner, key, size);
        soft_sha256_end(&hmac->inner, inner);
    } else if (size) {
        memcpy(inner, key, size);
    }
    for (i = 0; i < sizeof(inner); i++) {
        hmac->outer[i] = inner[i] ^ 0x5c;
        inner[i] ^= 0x36;
    }
    soft_sha256_begin(&hmac->inner);
    soft_sha256_add(&hmac->inner, inner, sizeof(inner));
}

void soft_hmac_add(struct soft_hmac *hmac, const void *data, size_t size)
{
    soft_sha256_add(&hmac->inner, data, size);
}

void soft_hmac_end(struct soft_hmac *hmac, uint8_t out[SOFT_DIGEST])
{
    struct soft_sha256 outer;

    soft_sha256_end(&hmac->inner, out);
    soft_sha256_begin(&outer);
    soft_sha256_add(&outer, hmac->outer, sizeof(hmac->outer));
    soft_sha256_add(&outer, out, SOFT_DIGEST);
    soft_sha256_end(&outer, out);
}

bool soft_digest_equal(const uint8_t a[SOFT_DIGEST], const uint8_t b[SOFT_DIGEST])
{
    volatile uint8_t differ = 0;
    int i;

    for (i = 0; i < SOFT_DIGEST; i++)
        differ |= a[i] ^ b[i];
    return !differ;
}
