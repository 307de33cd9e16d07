/* Fuzzer: a peer that sends arbitrary bytes, to a device that accepts it, and to a link that connected to it.
 *
 * Bits of the first byte: bit 0 selects device or link; bit 1: the input follows an honest handshake, instead of being
 * the handshake; bit 3: there is a secret; bit 2: the input arrives in small pieces; bit 4, with bit 1: the handshake
 * agrees on rings, and the input is what the peer writes into them, indices included, also while a frame is handled.
 * Everything runs in this thread: a run depends on its input alone, except for nonces. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/hmac.h"
#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/objects/device.h"
#include "soft/objects/qp.h"
#include "soft/base/fork_fds.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/copy_token.h"
#include "soft/fabric/handshake.h"
#include "soft/fabric/poll_loop.h"
#include "soft/fabric/ring.h"
#include "soft/fabric/shared_rings.h"

enum { LINK = 1, OPENED = 2, PIECES = 4, SECRET = 8, RINGS = 16 };

#define REQUIRE(condition)                                                                       \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, strerror(errno)); \
            abort();                                                                             \
        }                                                                                        \
    } while (0)

static struct soft_device device;
static struct soft_link *the_link;
static uint64_t sum;
static bool scribbles; /* the peer changes the bytes of a frame while it is handled */

/* Reads all data that a frame offers, and answers with as much as allowed. */
static bool on_request(struct soft_stream *from, const struct soft_frame *frame, const uint8_t *payload)
{
    static uint8_t data[SOFT_FRAGMENT];
    struct soft_frame answer = {.kind = SOFT_FRAME_RESPONSE, .to = frame->from, .from = frame->to, .psn = frame->psn};
    struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS];
    struct iovec piece = {data, 0};
    uint32_t i;

    for (i = 0; i < frame->size; i++)
        sum += payload[i];
    if (scribbles)
        memset((uint8_t *)(uintptr_t)payload - SOFT_FRAME_SIZE, (int)sum, SOFT_FRAME_SIZE + frame->size);
    REQUIRE(frame->kind == SOFT_FRAME_REQUEST && frame->size <= SOFT_FRAGMENT && frame->to < 1u << 24);
    if (frame->flags & SOFT_FRAME_DIRECT && soft_segments_parse(frame, payload, segments))
        return false;
    if (frame->opcode == IBV_WR_RDMA_READ && frame->part <= SOFT_FRAGMENT)
        answer.part = answer.size = frame->part;
    piece.iov_len = answer.size;
    soft_stream_answer(from, &answer, &piece, 1);
    return frame->to != 0xfffffe;
}

static bool on_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload)
{
    uint32_t i;

    for (i = 0; i < frame->size; i++)
        sum += payload[i];
    if (scribbles)
        memset((uint8_t *)(uintptr_t)payload - SOFT_FRAME_SIZE, (int)sum, SOFT_FRAME_SIZE + frame->size);
    REQUIRE(by == the_link && frame->kind == SOFT_FRAME_RESPONSE && frame->size <= SOFT_FRAGMENT);
    return frame->to != 0xfffffe;
}

static void on_batch(struct soft_stream *from)
{
    (void)soft_stream_gid(from, 1);
}

static void on_kick(struct soft_qp *qp)
{
    (void)qp;
}

static bool is_expected(const struct soft_stream *from)
{
    return soft_stream_gid(from, 0)->raw[15] & 1;
}

static const struct soft_fabric_user user = {on_request, on_response, on_batch, on_kick, is_expected};

/* The fabric without its thread: soft_fabric_poll_locked is called from here. */
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct soft_fabric *fabric;

    (void)argc;
    (void)argv;
    device.gids[0] = (union ibv_gid){.raw = {0xfe, 0x80, [15] = 1}};
    device.gids[1] = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 127, 1, 1, 1}};
    REQUIRE(!soft_fabric_new(&device, &user));
    strcpy(device.fabric->settings.directory, "/nonexistent");
    device.fabric->settings.direct = false;
    REQUIRE(grace_ready());
    fabric = device.fabric;
    soft_descriptors_hold();
    fabric->epoll = soft_descriptor_own(epoll_create1(EPOLL_CLOEXEC));
    soft_descriptors_release();
    REQUIRE(fabric->epoll >= 0);
    return 0;
}

static void open_pair(int fds[2])
{
    soft_descriptors_hold();
    REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds));
    REQUIRE(soft_descriptor_own(fds[0]) >= 0);
    soft_descriptors_release();
}

/* Drains incoming data: the device's output is ignored. */
static void drain_output(int peer)
{
    static uint8_t output[1 << 18];

    while (soft_fabric_poll_locked(device.fabric, true))
        while (read(peer, output, sizeof(output)) > 0)
            ;
}

/* Greet like a link, with rings if the peer is to have some. */
static void greet_server(int peer, bool with_rings)
{
    uint8_t bytes[SOFT_HELLO_SIZE], proof[SOFT_PROOF_SIZE];
    struct soft_stream link = {.is_unix = true, .uid = geteuid()};
    static const uint8_t none[SOFT_DIGEST];
    struct soft_hello hello = {.flags = 0};
    int rings = -1;

    REQUIRE(!soft_stream_init(&link, device.fabric, true));
    link.watch.fd = peer;
    if (with_rings)
        rings = soft_rings_offer(&link, &hello);
    REQUIRE(rings >= 0 || !with_rings);
    memcpy(hello.wanted, &device.gids[0], sizeof(hello.wanted));
    soft_hello_pack(&hello, bytes);
    REQUIRE(soft_stream_send_message(&link, bytes, sizeof(bytes), (const int[SOFT_MEMORY_FILES]){rings, -1}));
    soft_descriptor_close(rings);
    soft_stream_destroy(&link);
    drain_output(peer);
    soft_proof_pack(none, proof);
    REQUIRE(write(peer, proof, sizeof(proof)) == sizeof(proof));
    drain_output(peer);
}

static void greet_link(int peer, bool with_rings)
{
    struct soft_welcome welcome = {.flags = with_rings ? SOFT_HELLO_RINGS : 0};
    uint8_t bytes[SOFT_WELCOME_SIZE];

    memcpy(welcome.gids, &the_link->remote, sizeof(the_link->remote));
    soft_welcome_pack(&welcome, bytes);
    REQUIRE(write(peer, bytes, sizeof(bytes)) == sizeof(bytes));
    drain_output(peer);
}

static struct soft_stream *begin_served(int fd)
{
    struct soft_stream *stream = calloc(1, sizeof(*stream));

    REQUIRE(stream && !soft_stream_init(stream, device.fabric, false));
    stream->uid = geteuid();
    REQUIRE(!soft_stream_begin(stream, fd, true, SOFT_GREETING));
    return stream;
}

static void begin_link(int fd)
{
    the_link = calloc(1, sizeof(*the_link));
    REQUIRE(the_link && !soft_stream_init(&the_link->stream, device.fabric, true));
    the_link->tokens_fd = -1;
    the_link->stream.uid = geteuid();
    the_link->stream.is_unix = true;
    the_link->remote = (union ibv_gid){.raw = {0xfe, 0x80, [15] = 2}};
    REQUIRE(!soft_stream_begin(&the_link->stream, fd, true, SOFT_GREETING));
    REQUIRE(soft_handshake_begin(the_link));
}

/* Do what the peer can do in shared memory: append bytes to the ring, or set any word of either side to any value. The
 * device's own mapping serves as the peer's. */
static void write_to_rings(struct soft_stream *stream, const uint8_t *data, size_t size)
{
    struct soft_ring_side *own = stream->ring_in.peer, *other = stream->ring_in.own;
    uint32_t value = 0, tail = atomic_load(&own->tail);
    size_t i;

    memcpy(&value, data, size < sizeof(value) ? size : sizeof(value));
    switch (data[size - 1]) {
    case 200:
        atomic_store(&own->tail, value);
        break;
    case 201:
        atomic_store(&own->head, value);
        break;
    case 202:
        atomic_store(&own->wants, value);
        break;
    case 203:
        atomic_store(&other->wants, value);
        break;
    case 204: /* all answers are read, as an honest peer does */
        atomic_store(&own->head, atomic_load(&other->tail));
        break;
    default:
        for (i = 0; i < size; i++)
            ((uint8_t *)(uintptr_t)stream->ring_in.data)[(tail + i) % SOFT_RING_SIZE] = data[i];
        atomic_store(&own->tail, tail + (uint32_t)size);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct soft_fabric *fabric = device.fabric;
    size_t piece, at;
    int fds[2], mode;
    bool in_rings;

    if (!size)
        return 0;
    mode = data[0];
    fabric->settings.secret_size = mode & SECRET && !(mode & OPENED) ? SOFT_DIGEST : 0;
    open_pair(fds);
    soft_mutex_take(&fabric->progress);
    if (mode & LINK)
        begin_link(fds[0]);
    else
        begin_served(fds[0]);
    if (mode & OPENED && mode & LINK)
        greet_link(fds[1], mode & RINGS);
    else if (mode & OPENED)
        greet_server(fds[1], mode & RINGS);
    REQUIRE(!(mode & OPENED) || (fabric->streams && fabric->streams->stage == SOFT_OPEN));
    in_rings = mode & OPENED && mode & RINGS;
    REQUIRE(!in_rings || fabric->unarmed_rings);
    scribbles = in_rings && mode & SECRET;
    piece = mode & PIECES ? 7 : in_rings ? 133 : 65536;
    for (at = 1; at < size && fabric->streams; at += piece) {
        size_t part = size - at < piece ? size - at : piece;

        if (in_rings)
            write_to_rings(fabric->streams, data + at, part);
        if (send(fds[1], data + at, in_rings ? 1 : part, MSG_NOSIGNAL) < 0)
            break;
        drain_output(fds[1]);
    }
    scribbles = false;
    close(fds[1]);
    while (fabric->streams && soft_fabric_poll_locked(fabric, true))
        ;
    REQUIRE(!fabric->streams && !fabric->handshakes && !fabric->stream_count);
    if (the_link) {
        soft_copy_tokens_destroy(the_link);
        soft_stream_destroy(&the_link->stream);
        free(the_link);
        the_link = NULL;
    }
    soft_mutex_give(&fabric->progress);
    return 0;
}
