/* Handshake of a stream: verify the peer, and find out how data can be copied. All under progress. */
#define _GNU_SOURCE
#include "soft/fabric/handshake.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "soft/base/fork_fds.h"
#include "soft/base/hmac.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/base/util.h"
#include "soft/fabric/copy_token.h"
#include "soft/fabric/direct_copy.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/fabric/link.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/objects/device.h"

static const int no_descriptors[SOFT_MEMORY_FILES] = {-1, -1};

static bool has_secret(const struct soft_stream *stream)
{
    return stream->fabric->settings.secret_size;
}

/* Compute the proof of one side over HELLO and WELCOME. */
static void prove(const struct soft_stream *stream, enum soft_role role, uint8_t proof[SOFT_DIGEST])
{
    const struct soft_settings *settings = &stream->fabric->settings;

    soft_prove(role, settings->secret, settings->secret_size, stream->hello, stream->welcome, proof);
}

static bool send_proof(struct soft_stream *stream, const uint8_t proof[SOFT_DIGEST])
{
    uint8_t message[SOFT_PROOF_SIZE];

    soft_proof_pack(proof, message);
    return soft_stream_send_message(stream, message, sizeof(message), no_descriptors);
}

/* Return NULL, or what is wrong with the peer's proof. */
static const char *check_proof(const struct soft_stream *stream, enum soft_role role, const uint8_t *bytes)
{
    uint8_t proof[SOFT_DIGEST], expected[SOFT_DIGEST];
    const char *wrong = soft_proof_parse(bytes, proof);

    prove(stream, role, expected);
    if (!wrong && !soft_digest_equal(proof, expected))
        wrong = "the peer has another secret: set AIOVERBS_SOFT_SECRET to the same value on both sides";
    return wrong;
}

/* ---- Connecting side ----------------------------------------------------------------------------------------- */

/* Send HELLO with its descriptors. Return false and errno if it was not sent. */
static bool send_hello(struct soft_link *link, const struct soft_hello *hello, int rings)
{
    struct soft_stream *stream = &link->stream;
    int tokens = hello->flags & SOFT_HELLO_DIRECT ? link->tokens_fd : -1;

    soft_hello_pack(hello, stream->hello);
    return soft_stream_send_message(stream, stream->hello, sizeof(stream->hello),
                                    (const int[SOFT_MEMORY_FILES]){tokens, rings});
}

/* Descriptors that were sent and not yet received count for this user, whose limit they may reach while many links wait
 * in their peers' backlogs. Then the rings are left out. */
bool soft_handshake_begin(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;
    struct soft_hello hello = {.flags = has_secret(stream) ? SOFT_HELLO_SECRET : 0};
    int rings;
    bool sent;

    if (getentropy(hello.nonce, SOFT_NONCE))
        return false;
    memcpy(hello.gids, stream->fabric->device->gids, sizeof(hello.gids));
    memcpy(hello.wanted, &link->remote, sizeof(hello.wanted));
    soft_direct_offer(link, &hello);
    rings = soft_rings_offer(stream, &hello);
    sent = send_hello(link, &hello, rings);
    if (!sent && rings >= 0 && errno == ETOOMANYREFS) {
        soft_rings_decline(stream, "no more descriptors may be on their way: raise `ulimit -n`");
        hello.flags &= (uint16_t)~SOFT_HELLO_RINGS;
        sent = send_hello(link, &hello, -1);
    }
    soft_descriptor_close(rings);
    return sent;
}

/* Return whether the peer can write to this process's memory; its claim alone does not count. An offer of direct copies
 * puts HELLO's nonce at the probe, and only a write by another process replaces that. A peer that has not written can
 * name only HELLO's nonce, which does not count. If nothing was offered (over TCP, for one), no peer was told where the
 * probe is, and nothing counts. */
static bool can_write_probe(struct soft_link *link, const struct soft_welcome *welcome)
{
    struct soft_hello hello;

    return welcome->flags & SOFT_HELLO_DIRECT && !soft_hello_parse(link->stream.hello, &hello) &&
           hello.flags & SOFT_HELLO_DIRECT && memcmp(welcome->nonce, hello.nonce, sizeof(hello.nonce)) &&
           soft_direct_has_probed(link, welcome->nonce);
}

/* Open the link: the peer is verified. */
static void open_link(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;
    struct soft_welcome welcome = {.flags = 0};

    soft_welcome_parse(stream->welcome, &welcome); /* it was checked when it came */
    if (can_write_probe(link, &welcome)) {
        stream->why_not_direct[0] = 0;
        atomic_store(&stream->direct, true);
    } else if (!stream->why_not_direct[0]) {
        strcpy(stream->why_not_direct, "the peer cannot access this process's memory");
    }
    if (!(welcome.flags & SOFT_HELLO_RINGS))
        soft_rings_decline(stream, "the peer does not use rings");
    soft_rings_open(stream);
    soft_read_cache_accept(link);
    soft_stream_drop_received(stream);
    soft_link_opened(link);
}

/* Return NULL, or why this is not the peer that the link is for. */
static const char *check_welcome(struct soft_link *link, const struct soft_welcome *welcome)
{
    struct soft_stream *stream = &link->stream;

    memcpy(stream->peer, welcome->gids, sizeof(stream->peer));
    if (!soft_stream_is_from(stream, &link->remote))
        return "the peer has other GIDs than the one to connect to";
    if (!(welcome->flags & SOFT_HELLO_SECRET) == has_secret(stream))
        return soft_refusal_text(SOFT_REFUSED_SECRET);
    return NULL;
}

/* Send the proof. Any accepting peer gets it: a peer under a forged GID can have one, and try secrets on it for as long
 * as it likes. Only a secret that cannot be guessed protects. */
static void handle_welcome(struct soft_link *link, const uint8_t *bytes)
{
    struct soft_stream *stream = &link->stream;
    uint8_t proof[SOFT_DIGEST];
    struct soft_welcome welcome;
    const char *wrong = soft_welcome_parse(bytes, &welcome);

    memcpy(stream->welcome, bytes, sizeof(stream->welcome));
    if (!wrong)
        wrong = check_welcome(link, &welcome);
    if (!wrong && welcome.flags & SOFT_HELLO_RINGS && !stream->ring_memory)
        wrong = "the peer uses rings that were not offered";
    prove(stream, SOFT_ROLE_CONNECTING, proof);
    if (!wrong && !send_proof(stream, proof))
        wrong = "the proof could not be sent to the peer";
    if (wrong)
        soft_stream_refuse(stream, wrong);
    else if (has_secret(stream))
        soft_stream_set_stage(stream, SOFT_PROVING);
    else
        open_link(link);
}

/* Check the accepting side's proof. With a secret only. */
static void handle_peer_proof(struct soft_link *link, const uint8_t *bytes)
{
    const char *wrong = check_proof(&link->stream, SOFT_ROLE_ACCEPTING, bytes);

    if (wrong)
        soft_stream_refuse(&link->stream, wrong);
    else
        open_link(link);
}

/* ---- Accepting side ------------------------------------------------------------------------------------------ */

static bool is_own_gid(const struct soft_device *device, const uint8_t gid[16])
{
    return !memcmp(&device->gids[0], gid, 16) || !memcmp(&device->gids[1], gid, 16);
}

/* Return whether the peer claims a GID of another device. A GID is a name and proves nothing: a peer that user and
 * secret let in may claim any GID. So peers that are let in are trusted not to impersonate each other. The following
 * holds without that trust:
 *
 * - no peer can claim a GID of this device: frames from these GIDs come from this process;
 * - over a Unix socket no peer can claim a GID that the directory lists for a device of another user, since the kernel
 *   reports the peer's user; over TCP nothing is checked;
 * - a peer keeps its GIDs as long as the stream lasts, and a queue pair takes requests only over streams of the GID to
 *   which it is connected. */
static bool claims_foreign_gid(const struct soft_stream *stream)
{
    const struct soft_fabric *fabric = stream->fabric;
    unsigned int i;

    for (i = 0; i < 2; i++)
        if (is_own_gid(fabric->device, stream->peer[i].raw) ||
            (stream->is_unix && !soft_directory_permits(&fabric->settings, &stream->peer[i], stream->uid)))
            return true;
    return false;
}

/* Send WELCOME with the reason of the refusal, and refuse the stream. */
static void reject_peer(struct soft_stream *stream, enum soft_refused refused, const char *reason)
{
    struct soft_welcome welcome = {.flags = has_secret(stream) ? SOFT_HELLO_SECRET : 0, .refused = refused};
    uint8_t message[SOFT_WELCOME_SIZE];

    soft_welcome_pack(&welcome, message);
    soft_stream_send_message(stream, message, sizeof(message), no_descriptors);
    soft_stream_refuse(stream, reason);
}

static void accept_peer(struct soft_stream *stream, const struct soft_hello *hello)
{
    struct soft_fabric *fabric = stream->fabric;
    struct soft_welcome welcome = {.flags = has_secret(stream) ? SOFT_HELLO_SECRET : 0};

    if (getentropy(welcome.nonce, SOFT_NONCE)) {
        soft_stream_refuse(stream, "the system provides no random numbers");
        return;
    }
    memcpy(welcome.gids, fabric->device->gids, sizeof(welcome.gids));
    if (soft_rings_accept(stream, hello))
        welcome.flags |= SOFT_HELLO_RINGS;
    soft_direct_probe(stream, hello, welcome.nonce);
    if (atomic_load(&stream->direct))
        welcome.flags |= SOFT_HELLO_DIRECT;
    else
        soft_copy_tokens_unmap(stream);
    soft_stream_drop_received(stream);
    soft_welcome_pack(&welcome, stream->welcome);
    if (!soft_stream_send_message(stream, stream->welcome, sizeof(stream->welcome),
                                  (const int[SOFT_MEMORY_FILES]){soft_read_cache_offer(stream), -1}))
        soft_stream_refuse(stream, "WELCOME could not be sent to the peer");
    soft_stream_set_stage(stream, SOFT_PROVING);
}

static void handle_hello(struct soft_stream *stream, const uint8_t *bytes)
{
    struct soft_hello hello;
    const char *wrong = soft_hello_parse(bytes, &hello);
    enum soft_refused refused = SOFT_WELCOMED;

    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return;
    }
    memcpy(stream->hello, bytes, sizeof(stream->hello));
    memcpy(stream->peer, hello.gids, sizeof(stream->peer));
    if (!is_own_gid(stream->fabric->device, hello.wanted))
        refused = SOFT_REFUSED_GID;
    else if (!(hello.flags & SOFT_HELLO_SECRET) == has_secret(stream))
        refused = SOFT_REFUSED_SECRET;
    else if (claims_foreign_gid(stream))
        refused = SOFT_REFUSED_CLAIM;
    if (refused)
        reject_peer(stream, refused, soft_refusal_text(refused));
    else
        accept_peer(stream, &hello);
}

/* Accept the peer if its proof is right. WELCOME, which the peer has received before, contains nothing that helps to
 * guess the secret. */
static void handle_proof(struct soft_stream *stream, const uint8_t *bytes)
{
    const char *wrong = check_proof(stream, SOFT_ROLE_CONNECTING, bytes);
    uint8_t proof[SOFT_DIGEST] = {0}; /* never a right proof */

    if (!wrong)
        prove(stream, SOFT_ROLE_ACCEPTING, proof);
    if (has_secret(stream) && !send_proof(stream, proof) && !wrong)
        wrong = "the proof could not be sent to the peer";
    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return;
    }
    stream->fabric->stats.accepted++;
    soft_mutex_take(&stream->tx);
    stream->connected_times++;
    soft_mutex_give(&stream->tx);
    soft_rings_open(stream);
    soft_stream_set_stage(stream, SOFT_OPEN);
}

/* ---- Both sides ---------------------------------------------------------------------------------------------- */

/* Return whether the peer is a device that speaks this version; refuse the stream if not. This is checked before the
 * message is complete: one of another version may be shorter. */
static bool check_version(struct soft_stream *stream, const uint8_t *head)
{
    uint16_t version;
    const char *wrong = soft_head_parse(head, &version);

    if (wrong == soft_other_version) {
        snprintf(stream->refusal_text, sizeof(stream->refusal_text),
                 "the peer speaks protocol version %u, not %u: use the same release of aioverbs on both sides",
                 (unsigned int)version, SOFT_VERSION);
        wrong = stream->refusal_text;
        if (!stream->is_link)
            reject_peer(stream, SOFT_REFUSED_VERSION, wrong);
    }
    if (wrong)
        soft_stream_refuse(stream, wrong);
    return !wrong;
}

static uint32_t size_of_next(const struct soft_stream *stream)
{
    if (stream->stage == SOFT_PROVING)
        return SOFT_PROOF_SIZE;
    return stream->is_link ? SOFT_WELCOME_SIZE : SOFT_HELLO_SIZE;
}

uint32_t soft_handshake_handle(struct soft_stream *stream, const uint8_t *bytes, uint32_t size)
{
    bool is_proof = stream->stage == SOFT_PROVING;
    uint32_t wanted = size_of_next(stream);

    if (!is_proof && size >= SOFT_HEAD_SIZE && !check_version(stream, bytes))
        return 0;
    if (size < wanted)
        return 0;
    if (stream->is_link && is_proof)
        handle_peer_proof(container_of(stream, struct soft_link, stream), bytes);
    else if (stream->is_link)
        handle_welcome(container_of(stream, struct soft_link, stream), bytes);
    else if (is_proof)
        handle_proof(stream, bytes);
    else
        handle_hello(stream, bytes);
    return wanted;
}
