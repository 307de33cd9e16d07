#define _GNU_SOURCE
#include "soft/fabric/handshake_wire.h"

#include <string.h>

#include "soft/base/endian.h"
#include "soft/base/hmac.h"

static const uint8_t magic[8] = {'a', 'i', 'o', 'v', 'e', 'r', 'b', 's'};

/* Offsets of fields. Both messages begin alike in all versions, so that another version can be recognized. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_FLAGS = 10,
    AT_GIDS = 16,
    HELLO_AT_PID = 12,
    HELLO_AT_PROBE = 48,
    HELLO_AT_WANTED = 56,
    HELLO_AT_NONCE = 72,
    HELLO_AT_RESERVED = 104,
    WELCOME_AT_REFUSED = 12,
    WELCOME_AT_NONCE = 48,
    WELCOME_AT_RESERVED = 80,
    PROOF_AT_PROOF = 8,
};
_Static_assert(AT_GIDS == SOFT_HEAD_SIZE && WELCOME_AT_REFUSED == HELLO_AT_PID, "");
_Static_assert(HELLO_AT_RESERVED + 8 == SOFT_HELLO_SIZE, "");
_Static_assert(WELCOME_AT_RESERVED + 32 == SOFT_WELCOME_SIZE, "");
_Static_assert(PROOF_AT_PROOF + SOFT_DIGEST == SOFT_PROOF_SIZE, "");

const char soft_other_version[] = "the peer speaks another version";

static const char *const no_peer = "the peer is not a device of aioverbs";

static void pack_head(uint8_t *out, uint16_t flags, uint32_t fourth, const uint8_t gids[2][16])
{
    memcpy(out + AT_MAGIC, magic, sizeof(magic));
    soft_put16(out + AT_VERSION, SOFT_VERSION);
    soft_put16(out + AT_FLAGS, flags);
    soft_put32(out + HELLO_AT_PID, fourth);
    memcpy(out + AT_GIDS, gids, 32);
}

const char *soft_head_parse(const uint8_t in[SOFT_HEAD_SIZE], uint16_t *version)
{
    *version = soft_get16(in + AT_VERSION);
    if (memcmp(in + AT_MAGIC, magic, sizeof(magic)))
        return no_peer;
    return *version == SOFT_VERSION ? NULL : soft_other_version;
}

static const char *check_head(const uint8_t *in)
{
    uint16_t version;
    const char *wrong = soft_head_parse(in, &version);

    if (wrong)
        return wrong;
    if (soft_get16(in + AT_FLAGS) & ~(SOFT_HELLO_SECRET | SOFT_HELLO_DIRECT | SOFT_HELLO_RINGS))
        return "the peer sent an invalid message";
    return NULL;
}

void soft_hello_pack(const struct soft_hello *hello, uint8_t out[SOFT_HELLO_SIZE])
{
    pack_head(out, hello->flags, hello->pid, hello->gids);
    soft_put64(out + HELLO_AT_PROBE, hello->probe);
    memcpy(out + HELLO_AT_WANTED, hello->wanted, sizeof(hello->wanted));
    memcpy(out + HELLO_AT_NONCE, hello->nonce, sizeof(hello->nonce));
    soft_put64(out + HELLO_AT_RESERVED, 0);
}

const char *soft_hello_parse(const uint8_t in[SOFT_HELLO_SIZE], struct soft_hello *hello)
{
    const char *wrong = check_head(in);

    if (wrong)
        return wrong;
    hello->flags = soft_get16(in + AT_FLAGS);
    hello->pid = soft_get32(in + HELLO_AT_PID);
    memcpy(hello->gids, in + AT_GIDS, sizeof(hello->gids));
    hello->probe = soft_get64(in + HELLO_AT_PROBE);
    memcpy(hello->wanted, in + HELLO_AT_WANTED, sizeof(hello->wanted));
    memcpy(hello->nonce, in + HELLO_AT_NONCE, sizeof(hello->nonce));
    if (soft_get64(in + HELLO_AT_RESERVED) || (!(hello->flags & SOFT_HELLO_DIRECT) && (hello->pid || hello->probe)))
        return "the peer sent an invalid message";
    return NULL;
}

void soft_welcome_pack(const struct soft_welcome *welcome, uint8_t out[SOFT_WELCOME_SIZE])
{
    pack_head(out, welcome->flags, welcome->refused, welcome->gids);
    memcpy(out + WELCOME_AT_NONCE, welcome->nonce, sizeof(welcome->nonce));
    memset(out + WELCOME_AT_RESERVED, 0, SOFT_WELCOME_SIZE - WELCOME_AT_RESERVED);
}

const char *soft_welcome_parse(const uint8_t in[SOFT_WELCOME_SIZE], struct soft_welcome *welcome)
{
    static const uint8_t zeroes[SOFT_WELCOME_SIZE - WELCOME_AT_RESERVED];
    const char *wrong = check_head(in);

    if (wrong)
        return wrong;
    if (memcmp(in + WELCOME_AT_RESERVED, zeroes, sizeof(zeroes)))
        return "the peer sent an invalid message";
    welcome->flags = soft_get16(in + AT_FLAGS);
    welcome->refused = soft_get32(in + WELCOME_AT_REFUSED);
    memcpy(welcome->gids, in + AT_GIDS, sizeof(welcome->gids));
    memcpy(welcome->nonce, in + WELCOME_AT_NONCE, sizeof(welcome->nonce));
    return soft_refusal_text(welcome->refused);
}

void soft_proof_pack(const uint8_t proof[SOFT_DIGEST], uint8_t out[SOFT_PROOF_SIZE])
{
    memcpy(out + AT_MAGIC, magic, sizeof(magic));
    memcpy(out + PROOF_AT_PROOF, proof, SOFT_DIGEST);
}

const char *soft_proof_parse(const uint8_t in[SOFT_PROOF_SIZE], uint8_t proof[SOFT_DIGEST])
{
    memcpy(proof, in + PROOF_AT_PROOF, SOFT_DIGEST);
    return memcmp(in + AT_MAGIC, magic, sizeof(magic)) ? no_peer : NULL;
}

const char *soft_refusal_text(uint32_t refused)
{
    switch (refused) {
    case SOFT_WELCOMED:
        return NULL;
    case SOFT_REFUSED_VERSION:
        return soft_other_version;
    case SOFT_REFUSED_GID:
        return "the peer does not have the GID to connect to";
    case SOFT_REFUSED_SECRET:
        return "one side has no secret: set AIOVERBS_SOFT_SECRET to the same value on both sides";
    case SOFT_REFUSED_CLAIM:
        return "the connecting side claims a GID of another device";
    default:
        return "the peer sent an invalid message";
    }
}

void soft_prove(enum soft_role role, const void *secret, size_t size, const uint8_t hello[SOFT_HELLO_SIZE],
                const uint8_t welcome[SOFT_WELCOME_SIZE], uint8_t proof[SOFT_DIGEST])
{
    uint8_t side = (uint8_t)role;
    struct soft_hmac hmac;

    if (!size) {
        memset(proof, 0, SOFT_DIGEST);
        return;
    }
    soft_hmac_begin(&hmac, secret, size);
    soft_hmac_add(&hmac, &side, 1);
    soft_hmac_add(&hmac, hello, SOFT_HELLO_SIZE);
    soft_hmac_add(&hmac, welcome, WELCOME_AT_RESERVED);
    soft_hmac_end(&hmac, proof);
}
