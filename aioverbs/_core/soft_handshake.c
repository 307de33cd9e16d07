/* The handshake of a stream: who is there, whether it may be, and how data can be moved. All under progress. */
#define _GNU_SOURCE
#include "soft_stream.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "soft.h"

static bool fill_nonce(uint8_t nonce[SOFT_NONCE])
{
    ssize_t filled;

    do
        filled = getrandom(nonce, SOFT_NONCE, 0);
    while (filled < 0 && errno == EINTR);
    return filled == SOFT_NONCE; /* up to 256 bytes come in one piece */
}

static bool has_secret(const struct soft_stream *stream)
{
    return stream->fabric->settings.secret_size;
}

static void prove(const struct soft_stream *stream, enum soft_role role, uint8_t proof[SOFT_DIGEST])
{
    const struct soft_settings *settings = &stream->fabric->settings;

    soft_prove(role, settings->secret, settings->secret_size, stream->hello, stream->welcome, proof);
}

/* ---- Who connects -------------------------------------------------------------------------------------------- */

bool soft_handshake_begin(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;
    struct soft_hello hello = {.flags = has_secret(stream) ? SOFT_HELLO_SECRET : 0};

    if (!fill_nonce(hello.nonce))
        return false;
    memcpy(hello.gids, stream->fabric->device->gids, sizeof(hello.gids));
    memcpy(hello.wanted, &link->remote, sizeof(hello.wanted));
    soft_direct_offer(link, &hello);
    soft_hello_pack(&hello, stream->hello);
    return soft_stream_say(stream, stream->hello, sizeof(stream->hello),
                           hello.flags & SOFT_HELLO_DIRECT ? link->leases_fd : -1);
}

/* NULL, or why the peer is not the one. */
static const char *check_welcome(struct soft_link *link, const struct soft_welcome *welcome)
{
    struct soft_stream *stream = &link->stream;
    uint8_t proof[SOFT_DIGEST];

    memcpy(stream->peer, welcome->gids, sizeof(stream->peer));
    if (!soft_stream_is_from(stream, &link->remote))
        return "the peer has other GIDs than the one that is looked for";
    if (!(welcome->flags & SOFT_HELLO_SECRET) == has_secret(stream))
        return soft_refused_text(SOFT_REFUSED_SECRET);
    prove(stream, SOFT_ROLE_ACCEPTING, proof);
    if (!soft_digest_equal(proof, welcome->proof))
        return "the peer does not know the secret: AIOVERBS_SOFT_SECRET is to be the same on both sides";
    return NULL;
}

static void handle_welcome(struct soft_link *link, const uint8_t *bytes)
{
    struct soft_stream *stream = &link->stream;
    uint8_t proof[SOFT_DIGEST], message[SOFT_PROOF_SIZE];
    struct soft_welcome welcome;
    const char *wrong = soft_welcome_parse(bytes, &welcome);

    memcpy(stream->welcome, bytes, sizeof(stream->welcome));
    if (!wrong)
        wrong = check_welcome(link, &welcome);
    prove(stream, SOFT_ROLE_CONNECTING, proof);
    soft_proof_pack(proof, message);
    if (!wrong && !soft_stream_say(stream, message, sizeof(message), -1))
        wrong = "the peer takes no proof";
    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return;
    }
    /* The peer's word alone is not enough: it has written here. */
    if (welcome.flags & SOFT_HELLO_DIRECT && !memcmp(link->probe, welcome.nonce, sizeof(link->probe))) {
        stream->why_not_direct[0] = 0;
        atomic_store(&stream->direct, true);
    } else if (!stream->why_not_direct[0]) {
        strcpy(stream->why_not_direct, "the peer cannot reach this process's memory");
    }
    soft_licence_take(link);
    soft_link_opened(link);
}

/* ---- Who accepts --------------------------------------------------------------------------------------------- */

static bool is_ours(const struct soft_device *device, const uint8_t gid[16])
{
    return !memcmp(&device->gids[0], gid, 16) || !memcmp(&device->gids[1], gid, 16);
}

static void turn_away(struct soft_stream *stream, struct soft_welcome *welcome, enum soft_refused refused)
{
    uint8_t message[SOFT_WELCOME_SIZE];

    welcome->refused = refused;
    soft_welcome_pack(welcome, message);
    soft_stream_say(stream, message, sizeof(message), -1); /* as far as it goes: the reason is kept here, too */
    soft_stream_refuse(stream, soft_refused_text(refused));
}

static void handle_hello(struct soft_stream *stream, const uint8_t *bytes)
{
    struct soft_fabric *fabric = stream->fabric;
    struct soft_welcome welcome = {.flags = has_secret(stream) ? SOFT_HELLO_SECRET : 0};
    struct soft_hello hello;
    const char *wrong = soft_hello_parse(bytes, &hello);

    if (!wrong && !fill_nonce(welcome.nonce))
        wrong = "no random numbers are to be had";
    if (wrong == soft_other_version) {
        turn_away(stream, &welcome, SOFT_REFUSED_VERSION);
        return;
    }
    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return;
    }
    memcpy(stream->peer, hello.gids, sizeof(stream->peer));
    memcpy(welcome.gids, fabric->device->gids, sizeof(welcome.gids));
    if (!is_ours(fabric->device, hello.wanted)) {
        turn_away(stream, &welcome, SOFT_REFUSED_GID);
        return;
    }
    if (!(hello.flags & SOFT_HELLO_SECRET) == has_secret(stream)) {
        turn_away(stream, &welcome, SOFT_REFUSED_SECRET);
        return;
    }
    soft_direct_probe(stream, &hello, welcome.nonce);
    if (atomic_load(&stream->direct))
        welcome.flags |= SOFT_HELLO_DIRECT;
    else
        soft_lease_drop(stream);
    memcpy(stream->hello, bytes, sizeof(stream->hello));
    soft_welcome_pack(&welcome, stream->welcome);
    prove(stream, SOFT_ROLE_ACCEPTING, welcome.proof);
    soft_welcome_pack(&welcome, stream->welcome);
    if (!soft_stream_say(stream, stream->welcome, sizeof(stream->welcome), soft_licence_offer(stream)))
        soft_stream_refuse(stream, "the peer takes no answer");
    soft_stream_set_stage(stream, SOFT_PROVING);
}

static void handle_proof(struct soft_stream *stream, const uint8_t *bytes)
{
    uint8_t proof[SOFT_DIGEST], expected[SOFT_DIGEST];
    const char *wrong = soft_proof_parse(bytes, proof);

    prove(stream, SOFT_ROLE_CONNECTING, expected);
    if (!wrong && !soft_digest_equal(proof, expected))
        wrong = "the peer does not know the secret: AIOVERBS_SOFT_SECRET is to be the same on both sides";
    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return;
    }
    stream->fabric->stats.accepted++;
    pthread_mutex_lock(&stream->tx);
    stream->connected_times++;
    pthread_mutex_unlock(&stream->tx);
    soft_stream_set_stage(stream, SOFT_OPEN);
}

/* ---- Either -------------------------------------------------------------------------------------------------- */

uint32_t soft_handshake_handle(struct soft_stream *stream, const uint8_t *bytes, uint32_t size)
{
    uint32_t wanted = stream->is_link                  ? SOFT_WELCOME_SIZE
                      : stream->stage == SOFT_GREETING ? SOFT_HELLO_SIZE
                                                       : SOFT_PROOF_SIZE;

    if (size < wanted)
        return 0;
    if (stream->is_link)
        handle_welcome(container_of(stream, struct soft_link, stream), bytes);
    else if (stream->stage == SOFT_GREETING)
        handle_hello(stream, bytes);
    else
        handle_proof(stream, bytes);
    return wanted;
}
