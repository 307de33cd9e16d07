/* Messages that two devices exchange before the first frame. Pure, like soft/fabric/frame.h. aioverbs/_docs/protocol.md
 * has the layout, and what each field is worth if it comes from a hostile peer.
 *
 *   connecting side        accepting side
 *   HELLO            --->
 *                    <---  WELCOME         or the reason of a refusal
 *   PROOF            --->
 *                    <---  PROOF           with a secret only
 *
 * With a secret, each PROOF is an HMAC over HELLO and WELCOME. The connecting side proves first: a peer that connects
 * learns nothing that helps to guess the secret before it has shown that it knows the secret. A PROOF of zeroes answers
 * a wrong one. Without a secret PROOF is all zeroes, and frames may follow it at once. */
#ifndef AIOVERBS_SOFT_FABRIC_HANDSHAKE_WIRE_H
#define AIOVERBS_SOFT_FABRIC_HANDSHAKE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/base/hmac.h"

#define SOFT_VERSION 3u    /* incremented with each incompatible change of the handshake or of frames */
#define SOFT_HEAD_SIZE 16u /* common start of HELLO and WELCOME in all versions: magic, version, flags, a number */
#define SOFT_HELLO_SIZE 112u
#define SOFT_WELCOME_SIZE 112u
#define SOFT_PROOF_SIZE 40u
#define SOFT_NONCE 32u
#define SOFT_WELCOME_FILES 1u /* most descriptors that come with WELCOME */

enum {
    SOFT_HELLO_SECRET = 1, /* this side has a secret, which the other side must know */
    SOFT_HELLO_DIRECT =
        /* HELLO: direct copies are possible, and copy tokens come with the message. WELCOME: a direct copy was made. */
    2,
    SOFT_HELLO_RINGS = 4, /* HELLO: rings come with the message. WELCOME: they are used from here on. */
};

struct soft_hello {
    uint16_t flags;
    uint32_t pid;
    /* GIDs that the connecting side claims; soft/fabric/handshake.c says which ones are not believed. */
    uint8_t gids[2][16];
    uint8_t wanted[16]; /* GID of the device to connect to */
    uint64_t probe;     /* direct: address of `nonce` in the memory of the connecting process */
    uint8_t nonce[SOFT_NONCE];
};

/* Reason why the accepting side ends the handshake. */
enum soft_refused { SOFT_WELCOMED, SOFT_REFUSED_VERSION, SOFT_REFUSED_GID, SOFT_REFUSED_SECRET, SOFT_REFUSED_CLAIM };

struct soft_welcome {
    uint16_t flags;
    uint32_t refused;    /* enum soft_refused; if not 0, no proof is expected */
    uint8_t gids[2][16]; /* GIDs of the accepting side */
    uint8_t nonce[SOFT_NONCE];
};

void soft_hello_pack(const struct soft_hello *hello, uint8_t out[SOFT_HELLO_SIZE]);
void soft_welcome_pack(const struct soft_welcome *welcome, uint8_t out[SOFT_WELCOME_SIZE]);
void soft_proof_pack(const uint8_t proof[SOFT_DIGEST], uint8_t out[SOFT_PROOF_SIZE]);

/* Parse a message. Return NULL, or what is wrong with it. */
const char *soft_hello_parse(const uint8_t in[SOFT_HELLO_SIZE], struct soft_hello *hello);
const char *soft_welcome_parse(const uint8_t in[SOFT_WELCOME_SIZE], struct soft_welcome *welcome);
const char *soft_proof_parse(const uint8_t in[SOFT_PROOF_SIZE], uint8_t proof[SOFT_DIGEST]);

/* Result of parsing a message of another version: the only case in which the rest cannot be checked. */
extern const char soft_other_version[];

/* Check the common start of a message, which shows the version whatever the message's size. Return NULL,
 * soft_other_version, or that the peer is no device of aioverbs. `version` is set in the first two cases. */
const char *soft_head_parse(const uint8_t in[SOFT_HEAD_SIZE], uint16_t *version);
const char *soft_refusal_text(uint32_t refused);

/* Compute the proof of one side, over HELLO, and WELCOME without its reserved end. Zeroes without a secret. */
enum soft_role { SOFT_ROLE_ACCEPTING = 'A', SOFT_ROLE_CONNECTING = 'C' };
void soft_prove(enum soft_role role, const void *secret, size_t size, const uint8_t hello[SOFT_HELLO_SIZE],
                const uint8_t welcome[SOFT_WELCOME_SIZE], uint8_t proof[SOFT_DIGEST]);

#endif
