/* SHA-256 (FIPS 180-4) and HMAC (RFC 2104) with SHA-256. Pure: no I/O, no locks. */
#ifndef AIOVERBS_SOFT_BASE_HMAC_H
#define AIOVERBS_SOFT_BASE_HMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SOFT_DIGEST = 32 };

struct soft_sha256 {
    uint32_t state[8];
    uint64_t length; /* number of bytes so far */
    uint8_t block[64];
};

void soft_sha256_begin(struct soft_sha256 *sha);
void soft_sha256_add(struct soft_sha256 *sha, const void *data, size_t size);
void soft_sha256_end(struct soft_sha256 *sha, uint8_t out[SOFT_DIGEST]);

struct soft_hmac {
    struct soft_sha256 inner;
    uint8_t outer[64]; /* key block of the outer hash */
};

void soft_hmac_begin(struct soft_hmac *hmac, const void *key, size_t size);
void soft_hmac_add(struct soft_hmac *hmac, const void *data, size_t size);
void soft_hmac_end(struct soft_hmac *hmac, uint8_t out[SOFT_DIGEST]);

/* Compare digests in a time that does not depend on where they differ. */
bool soft_digest_equal(const uint8_t a[SOFT_DIGEST], const uint8_t b[SOFT_DIGEST]);

#endif
