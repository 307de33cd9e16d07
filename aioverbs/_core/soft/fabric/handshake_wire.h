/* What two devices say to each other before the first frame. Pure, as soft/fabric/frame.h. Layout, and what each field is
 * worth that comes from a hostile peer, are in aioverbs/_docs/protocol.md.
 *
 *   connecting side        accepting side
 *   HELLO            --->
 *                    <---  WELCOME         or why not
 *   PROOF            --->
 *                    <---  PROOF           with a secret only
 *
 * With a secret, each PROOF is an HMAC over HELLO and WELCOME. The connecting side proves first: who connects is told
 * nothing that helps to guess the secret before he has shown that he knows it. A PROOF of zeroes is the answer to a
 * wrong one. Without a secret PROOF is all zeroes, and frames may follow it at once. */
#ifndef AIOVERBS_SOFT_FABRIC_HANDSHAKE_WIRE_H
#define AIOVERBS_SOFT_FABRIC_HANDSHAKE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/base/hmac.h"

#define SOFT_VERSION 1u    /* counted up with each change of the handshake or of frames that the other side must know */
#define SOFT_HEAD_SIZE 16u /* how HELLO and WELCOME begin in all versions: magic, version, flags, a number */
#define SOFT_HELLO_SIZE 112u
#define SOFT_WELCOME_SIZE 112u
#define SOFT_PROOF_SIZE 40u
#define SOFT_NONCE 32u

enum {
    SOFT_HELLO_SECRET = 1, /* there is one, which the other side is to know */
    SOFT_HELLO_DIRECT =
        2, /* HELLO: data may be moved directly, and copy tokens come with it. WELCOME: that was tried */
};

struct soft_hello {
    uint16_t flags;
    uint32_t pid;
    uint8_t gids[2][16]; /* that who connects says it has; soft/fabric/handshake.c says which ones are not believed */
    uint8_t wanted[16];  /* the GID that is looked for */
    uint64_t probe;      /* direct: where `nonce` stands in the memory of who connects */
    uint8_t nonce[SOFT_NONCE];
};

/* Why the accepting side does not want to go on. */
enum soft_refused { SOFT_WELCOMED, SOFT_REFUSED_VERSION, SOFT_REFUSED_GID, SOFT_REFUSED_SECRET, SOFT_REFUSED_CLAIM };

struct soft_welcome {
    uint16_t flags;
    uint32_t refused;    /* enum soft_refused; then no proof is expected */
    uint8_t gids[2][16]; /* of who accepts */
    uint8_t nonce[SOFT_NONCE];
};

void soft_hello_pack(const struct soft_hello *hello, uint8_t out[SOFT_HELLO_SIZE]);
void soft_welcome_pack(const struct soft_welcome *welcome, uint8_t out[SOFT_WELCOME_SIZE]);
void soft_proof_pack(const uint8_t proof[SOFT_DIGEST], uint8_t out[SOFT_PROOF_SIZE]);

/* NULL, or what is wrong. */
const char *soft_hello_parse(const uint8_t in[SOFT_HELLO_SIZE], struct soft_hello *hello);
const char *soft_welcome_parse(const uint8_t in[SOFT_WELCOME_SIZE], struct soft_welcome *welcome);
const char *soft_proof_parse(const uint8_t in[SOFT_PROOF_SIZE], uint8_t proof[SOFT_DIGEST]);

/* What parsing answers where another version is spoken: the only case in which the rest cannot be judged. */
extern const char soft_other_version[];

/* Judges a head, from which other versions can be told whatever the size of their messages: NULL, soft_other_version,
 * or that it is no device of aioverbs. `version` is what is spoken, where it is one. */
const char *soft_head_parse(const uint8_t in[SOFT_HEAD_SIZE], uint16_t *version);
const char *soft_refusal_text(uint32_t refused);

/* The proof of one side, over all that was said before it but the reserved end of WELCOME. Zeroes without a secret. */
enum soft_role { SOFT_ROLE_ACCEPTING = 'A', SOFT_ROLE_CONNECTING = 'C' };
void soft_prove(enum soft_role role, const void *secret, size_t size, const uint8_t hello[SOFT_HELLO_SIZE],
                const uint8_t welcome[SOFT_WELCOME_SIZE], uint8_t proof[SOFT_DIGEST]);

#endif
