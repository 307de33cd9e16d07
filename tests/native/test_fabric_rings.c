/* Tests of streams that use rings: peers that write anything into the shared memory at any time, that wake no one, read
 * nothing or die, and files that are no rings. */
#include "support.h"
#include "support_fabric.h"
#include "support_threads.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/memfd.h"
#include "soft/fabric/poll_loop.h"
#include "soft/fabric/ring.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/stream_rx.h"

static struct node *a, *b;
static struct sender honest;     /* an honest peer of b that must not be affected */
static unsigned int open_before; /* the first case */

static void open_nodes(void)
{
    new_directory();
    settings.rings = true;
    if (!open_before) /* later, a thread of an earlier case may still be closing some */
        open_before = open_descriptors();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(&honest, a, &b->device.gids[0], 5);
    sender_want(&honest, IBV_WR_SEND, 1, 100);
    EVENTUALLY(a->responses == 1);
}

static void close_nodes(void)
{
    unsigned int before = a->responses;

    sender_want(&honest, IBV_WR_SEND, 10, 100);
    EVENTUALLY(a->responses == before + 10);
    sender_close(&honest);
    node_close(a);
    node_close(b);
    CHECK_EQ(rmdir(directory()), 0);
    EVENTUALLY(open_descriptors() == open_before);
}

/* ---- A peer whose end of the rings the test writes to by itself ---------------------------------------------- */

/* A stream that no thread reads. It has the rings and the socket. */
static void make_peer(struct soft_stream *peer, bool is_link, int fd)
{
    memset(peer, 0, sizeof(*peer));
    REQUIRE_EQ(soft_stream_init(peer, a->device.fabric, is_link), 0);
    peer->is_unix = true;
    peer->uid = geteuid();
    peer->watch.fd = fd;
}

static void drop_peer(struct soft_stream *peer)
{
    close(peer->watch.fd);
    soft_stream_destroy(peer);
}

static void send_hello(struct soft_stream *peer, struct soft_hello *hello, const int files[SOFT_MEMORY_FILES])
{
    uint8_t bytes[SOFT_HELLO_SIZE];

    memset(hello->gids, 7, sizeof(hello->gids));
    memcpy(hello->wanted, &b->device.gids[0], sizeof(hello->wanted));
    soft_hello_pack(hello, bytes);
    REQUIRE(soft_stream_send_message(peer, bytes, sizeof(bytes), files));
}

/* Complete the handshake. Return whether the peer uses rings. */
static bool expect_welcome(struct soft_stream *peer)
{
    uint8_t bytes[SOFT_WELCOME_SIZE], proof[SOFT_PROOF_SIZE];
    static const uint8_t none[SOFT_DIGEST];
    struct soft_welcome welcome;

    REQUIRE(raw_read(peer->watch.fd, bytes, SOFT_WELCOME_SIZE));
    REQUIRE(!soft_welcome_parse(bytes, &welcome));
    soft_proof_pack(none, proof);
    REQUIRE_EQ(send(peer->watch.fd, proof, sizeof(proof), MSG_NOSIGNAL), SOFT_PROOF_SIZE);
    return welcome.flags & SOFT_HELLO_RINGS;
}

/* Send HELLO with a descriptor, or -1. Return whether the peer uses the rings that it is of. */
static bool say_hello(struct soft_stream *peer, struct soft_hello *hello, int rings)
{
    send_hello(peer, hello, (const int[SOFT_MEMORY_FILES]){rings, -1});
    return expect_welcome(peer);
}

/* Connect to b. Return another mapping of the rings' file if `mapped`. */
static uint8_t *open_peer_mapped(struct soft_stream *peer, bool mapped)
{
    uint8_t *memory = NULL;
    struct soft_hello hello = {.flags = 0};
    int fd;

    make_peer(peer, true, raw_connect(b));
    soft_mutex_take(&a->device.fabric->progress);
    fd = soft_rings_offer(peer, &hello);
    soft_mutex_give(&a->device.fabric->progress);
    REQUIRE(fd >= 0);
    REQUIRE(say_hello(peer, &hello, fd));
    if (mapped)
        memory = mmap(NULL, SOFT_RINGS_FILE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(memory != MAP_FAILED);
    soft_descriptor_close(fd);
    return memory;
}

static void open_peer(struct soft_stream *peer)
{
    open_peer_mapped(peer, false);
}

static void ring_bell(struct soft_stream *peer)
{
    (void)send(peer->watch.fd, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT); /* the stream may be closed by now */
}

/* Write a request into the ring. Return how much of it there was room for. */
static int32_t write_request(struct soft_stream *peer, enum ibv_wr_opcode opcode, uint32_t psn, uint32_t size)
{
    struct soft_frame frame = request_frame(opcode, 7, psn, size);
    static uint8_t data[SOFT_FRAGMENT];
    uint8_t header[SOFT_FRAME_SIZE];
    struct iovec pieces[2] = {{header, sizeof(header)}, {data, frame.size}};

    soft_frame_pack(&frame, header);
    fill_pattern(data, frame.size, psn);
    return soft_ring_write(&peer->ring_out, pieces, 2);
}

/* Wait until `frames` streams were closed because of what came, the last one for this reason. */
static void expect_refused(struct soft_stream *peer, const char *reason, uint64_t frames, struct check_place place)
{
    check_true(raw_is_closed(peer->watch.fd), place, "closed");
    EVENTUALLY(stats_of(b).refused_frames == frames);
    check_true(last_reason_is(b, reason), place, reason);
    drop_peer(peer);
}

/* ---- Hostile bytes and indices ------------------------------------------------------------------------------- */

static void indices_out_of_range(void)
{
    static const uint32_t tails[] = {SOFT_RING_SIZE + 1, 1u << 31, UINT32_MAX, UINT32_MAX - SOFT_RING_SIZE};
    struct soft_stream peer;
    unsigned int i;

    open_nodes();
    for (i = 0; i < COUNT_OF(tails); i++) {
        open_peer(&peer);
        atomic_store(&peer.ring_out.own->tail, tails[i]);
        ring_bell(&peer);
        expect_refused(&peer, "an invalid index of a ring", i + 1, HERE);
    }
    /* The index of bytes that were read, which is looked at when the ring is full of answers. */
    for (i = 0; i < COUNT_OF(tails); i++) {
        open_peer(&peer);
        atomic_store(&peer.ring_in.own->head, tails[i]);
        while (write_request(&peer, IBV_WR_RDMA_READ, 1, SOFT_FRAGMENT) == SOFT_FRAME_SIZE)
            ;
        ring_bell(&peer);
        expect_refused(&peer, "an invalid index of a ring", COUNT_OF(tails) + i + 1, HERE);
    }
    close_nodes();
}

/* An index that goes back would have frames handled twice. */
static void an_index_that_goes_back(void)
{
    unsigned int before;
    struct soft_stream peer;

    open_nodes();
    before = b->requests;
    open_peer(&peer);
    CHECK_EQ(write_request(&peer, IBV_WR_SEND, 1, 500), SOFT_FRAME_SIZE + 500);
    ring_bell(&peer);
    EVENTUALLY(b->requests == before + 1);
    atomic_store(&peer.ring_out.own->tail, 0);
    ring_bell(&peer);
    expect_refused(&peer, "an invalid index of a ring", 1, HERE);
    CHECK_EQ(b->requests, before + 1);
    close_nodes();
}

/* Return how many pages of a ring were used behind its begin, to which a producer goes back. */
static unsigned int used_behind(const uint8_t *ring)
{
    static unsigned char resident[SOFT_RING_SIZE / 4096];
    uint32_t begin = SOFT_RING_SPAN + (64u << 10); /* more than is written before it is empty, and looked at */
    unsigned int i, used = 0;

    REQUIRE_EQ(mincore((void *)(uintptr_t)(ring + begin), SOFT_RING_SIZE - begin, resident), 0);
    for (i = 0; i < (SOFT_RING_SIZE - begin) / soft_page(); i++)
        used += resident[i] & 1;
    return used;
}

/* Small frames use the begin of both rings only, however many they are. Large ones use all. */
static void small_frames_leave_most_of_a_ring(void)
{
    struct soft_stream_stats stats;
    unsigned int i, before;

    open_nodes();
    for (i = 0; i < 2000; i++) {
        before = a->responses;
        sender_want(&honest, IBV_WR_RDMA_READ, 20, 500);
        EVENTUALLY(a->responses == before + 20);
    }
    CHECK_EQ(soft_fabric_get_streams(&a->device, &stats, 1), 1);
    CHECK(stats.bytes_in > 4 * SOFT_RING_SIZE && stats.bytes_out > 3 * SOFT_RING_SIZE);
    CHECK_EQ(used_behind(honest.link->stream.ring_in.data), 0);
    CHECK_EQ(used_behind(honest.link->stream.ring_out.data), 0);
    before = a->responses;
    sender_want(&honest, IBV_WR_SEND, 100, SOFT_FRAGMENT);
    EVENTUALLY(a->responses == before + 100);
    CHECK(used_behind(honest.link->stream.ring_out.data) > 0);
    close_nodes();
}

static void write_skip(struct soft_stream *peer, uint32_t size, uint32_t from)
{
    struct soft_frame frame = {.kind = SOFT_FRAME_SKIP, .size = size, .from = from};
    uint8_t header[SOFT_FRAME_SIZE];

    soft_frame_pack(&frame, header);
    CHECK_EQ(soft_ring_write(&peer->ring_out, &(struct iovec){header, sizeof(header)}, 1), SOFT_FRAME_SIZE);
}

static void bytes_to_skip(void)
{
    struct soft_stream peer;
    unsigned int before;

    open_nodes();
    before = b->requests;
    open_peer(&peer);
    write_skip(&peer, 0, 0);
    CHECK(write_request(&peer, IBV_WR_SEND, 1, 100) > 0);
    write_skip(&peer, 300000, 0);
    soft_ring_pass(&peer.ring_out, 300000);
    CHECK(write_request(&peer, IBV_WR_SEND, 2, 100) > 0);
    ring_bell(&peer);
    EVENTUALLY(b->requests == before + 2);
    CHECK_EQ(b->wrong, 0);
    write_skip(&peer, 1000, 0); /* as the begin of a frame of which the rest does not come */
    soft_ring_pass(&peer.ring_out, 999);
    ring_bell(&peer);
    drop_peer(&peer);
    EVENTUALLY(stats_of(b).streams == 1);
    CHECK_EQ(stats_of(b).refused_frames, 0);

    open_peer(&peer);
    write_skip(&peer, 10, 1);
    ring_bell(&peer);
    expect_refused(&peer, "a reserved field is not zero", 1, HERE);
    open_peer(&peer);
    write_skip(&peer, SOFT_RING_SIZE, 0);
    ring_bell(&peer);
    expect_refused(&peer, "more bytes are to be skipped than there are", 2, HERE);
    close_nodes();
}

static void garbage_closes_the_stream(void)
{
    struct soft_stream peer;

    open_nodes();
    open_peer(&peer);
    memset(peer.ring_out.data, 0xa5, SOFT_RING_SIZE);
    atomic_store(&peer.ring_out.own->tail, SOFT_FRAME_SIZE);
    ring_bell(&peer);
    EVENTUALLY(stats_of(b).refused_frames == 1);
    CHECK(raw_is_closed(peer.watch.fd));
    drop_peer(&peer);
    close_nodes();
}

/* Doorbells mean nothing but to look: their values are ignored, and any number may come. */
static void doorbells_for_nothing(void)
{
    unsigned int before, i;
    struct soft_stream peer;
    char bytes[4096];

    open_nodes();
    before = b->requests;
    open_peer(&peer);
    memset(bytes, 0x5a, sizeof(bytes));
    for (i = 0; i < 100; i++)
        send(peer.watch.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
    CHECK_EQ(write_request(&peer, IBV_WR_SEND, 1, 500), SOFT_FRAME_SIZE + 500);
    for (i = 0; i < 100; i++)
        send(peer.watch.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
    EVENTUALLY(b->requests == before + 1);
    CHECK_EQ(stats_of(b).refused_frames + stats_of(b).lost, 0);
    drop_peer(&peer);
    EVENTUALLY(stats_of(b).streams == 1);
    close_nodes();
}

/* A frame whose bytes come one after the other is handled once it is complete, as over a socket. */
static void a_frame_in_pieces(void)
{
    struct soft_frame frame = request_frame(IBV_WR_SEND, 7, 3, 50);
    uint8_t bytes[SOFT_FRAME_SIZE + 50];
    unsigned int before, i;
    struct soft_stream peer;

    open_nodes();
    before = b->requests;
    open_peer(&peer);
    soft_frame_pack(&frame, bytes);
    fill_pattern(bytes + SOFT_FRAME_SIZE, 50, 3);
    for (i = 0; i < sizeof(bytes); i++) {
        struct iovec piece = {bytes + i, 1};

        CHECK_EQ(b->requests, before);
        CHECK_EQ(soft_ring_write(&peer.ring_out, &piece, 1), 1);
        ring_bell(&peer);
    }
    EVENTUALLY(b->requests == before + 1);
    CHECK_EQ(b->wrong, 0);
    drop_peer(&peer);
    close_nodes();
}

/* Read all answers that are in the ring, and say so as an honest peer does. */
static void read_answers(struct soft_stream *peer)
{
    uint32_t available;

    REQUIRE(soft_ring_available(&peer->ring_in, &available));
    peer->ring_in.head += available;
    soft_ring_release(&peer->ring_in);
    soft_rings_notify(peer, SOFT_WANTS_ROOM);
}

/* A peer that reads no answers has no more requests handled than there is memory for answers, and delays no other. */
static void a_peer_that_reads_nothing(void)
{
    unsigned int handled, i;
    struct soft_stream peer;

    open_nodes();
    open_peer(&peer);
    for (i = 0; i < 2000; i++)
        (void)(write_request(&peer, IBV_WR_RDMA_READ, i, 4096));
    ring_bell(&peer);
    EVENTUALLY(b->requests >= 64);
    do {
        handled = b->requests;
        sleep_us(20000);
    } while (handled != b->requests);
    CHECK(handled <= (SOFT_RING_SIZE + SOFT_OUT_ANSWERS) / 4096 + 2);
    sender_want(&honest, IBV_WR_SEND, 10, 100);
    EVENTUALLY(a->responses == 11);
    /* It reads on, and says so as an honest one does: the rest is handled. */
    while (b->requests < 2000) {
        read_answers(&peer);
        sleep_us(100);
    }
    drop_peer(&peer);
    close_nodes();
}

/* A ring is marked as full before room is asked for: the thread that reads the doorbell sends only if it is. */
static void room_that_is_asked_for(void)
{
    struct soft_stream peer;

    open_nodes();
    open_peer(&peer);
    soft_mutex_take(&b->device.fabric->progress); /* nothing is read */
    while (write_request(&peer, IBV_WR_SEND, 1, SOFT_FRAGMENT) > 0)
        ;
    soft_mutex_take(&peer.tx);
    CHECK(!soft_rings_want_room(&peer));
    CHECK(atomic_load(&peer.starved));
    soft_mutex_give(&peer.tx);
    soft_mutex_give(&b->device.fabric->progress);
    drop_peer(&peer);
    close_nodes();
}

/* ---- Many peers ---------------------------------------------------------------------------------------------- */

enum {
    MANY = 40,     /* more than one poll serves, and than one looks at while they are idle */
    PAUSING = 400, /* reads of 4 KiB whose answers do not fit into the ring and what is queued for it */
};

static void open_many(struct soft_stream *peers)
{
    unsigned int i;

    for (i = 0; i < MANY; i++)
        open_peer(&peers[i]);
    EVENTUALLY(stats_of(b).accepted == MANY + 1);
    REQUIRE(grace_ready());
    soft_mutex_take(&b->device.fabric->progress);
    while (b->device.fabric->armed_rings)
        soft_rings_disarm(b->device.fabric->armed_rings);
    CHECK_EQ(b->device.fabric->unarmed, MANY + 1);
}

static void drop_many(struct soft_stream *peers)
{
    unsigned int i;

    soft_mutex_give(&b->device.fabric->progress);
    for (i = 0; i < MANY; i++)
        drop_peer(&peers[i]);
    EVENTUALLY(stats_of(b).streams == 1);
}

/* A poll takes a bounded time, however many peers have written; the next one goes on with the other peers. */
static void many_peers_that_write(void)
{
    struct soft_stream peers[MANY], *stream;
    struct soft_fabric *fabric;
    unsigned int i, j;

    open_nodes();
    fabric = b->device.fabric;
    open_many(peers);
    for (i = 0; i < MANY; i++)
        for (j = 0; j < 600; j++)
            CHECK(write_request(&peers[i], IBV_WR_SEND, j, 0) > 0);
    CHECK(soft_fabric_poll_locked(fabric, false));
    CHECK(b->requests > 32 * 200 && b->requests <= 32 * 260);
    CHECK(soft_fabric_poll_locked(fabric, false));
    for (stream = fabric->unarmed_rings; stream; stream = stream->next_ring)
        CHECK(stream->frames_in > 0);
    drop_many(peers);
    close_nodes();
}

/* Bytes to skip are work, too. */
static void many_peers_that_skip(void)
{
    struct soft_stream peers[MANY], *stream;
    struct soft_fabric *fabric;
    unsigned int i, j, served;

    open_nodes();
    fabric = b->device.fabric;
    open_many(peers);
    for (i = 0; i < MANY; i++)
        for (j = 0; j < 2000; j++)
            write_skip(&peers[i], 0, 0);
    for (j = 1; j <= 3; j++) {
        CHECK(soft_fabric_poll_locked(fabric, false));
        for (served = 0, stream = fabric->unarmed_rings; stream; stream = stream->next_ring)
            served += stream->ring_in.head / SOFT_FRAME_SIZE;
        CHECK(served > j * 32 * 200 && served <= j * 32 * 260);
    }
    drop_many(peers);
    close_nodes();
}

/* A thread that polls looks at few of many peers that write nothing. It hears of the others by their doorbells. */
static void many_peers_that_are_idle(void)
{
    struct soft_fabric *fabric;
    struct soft_stream peers[MANY];
    unsigned int i, before;

    open_nodes();
    fabric = b->device.fabric;
    open_many(peers);
    for (i = 0; i < 1000; i++)
        soft_fabric_poll_locked(fabric, false);
    CHECK_EQ(fabric->unarmed, 16);
    before = b->requests;
    for (i = 0; i < MANY; i++) {
        CHECK(write_request(&peers[i], IBV_WR_SEND, 1, 0) > 0);
        soft_rings_notify(&peers[i], SOFT_WANTS_BYTES);
    }
    for (i = 0; i < 200; i++)
        soft_fabric_poll_locked(fabric, false);
    CHECK_EQ(b->requests, before + MANY);
    CHECK(fabric->unarmed > 16);
    drop_many(peers);
    close_nodes();
}

/* Have 40 peers write more requests than there is room for answers, which they do not read, and give each a turn. */
static void pause_many(struct soft_stream *peers)
{
    struct soft_fabric *fabric = b->device.fabric;
    struct soft_stream *stream;
    unsigned int i, j;

    for (i = 0; i < MANY; i++)
        for (j = 0; j < PAUSING; j++)
            CHECK(write_request(&peers[i], IBV_WR_RDMA_READ, j, 4096) == SOFT_FRAME_SIZE);
    for (i = 0; i < 100; i++)
        soft_fabric_poll_locked(fabric, false);
    for (i = 0, stream = fabric->streams; stream; stream = stream->next)
        i += stream->paused;
    CHECK_EQ(i, MANY);
}

/* Peers that read no answers cost a thread that polls, or that is about to sleep, nothing: they ring when they read. */
static void many_peers_that_read_nothing(void)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    struct soft_stream peers[MANY];
    struct soft_fabric *fabric;
    unsigned int i, before;

    open_nodes();
    fabric = b->device.fabric;
    before = b->requests;
    open_many(peers);
    pause_many(peers);
    for (i = 0; i < 1000; i++)
        soft_fabric_poll_locked(fabric, false);
    CHECK_EQ(fabric->unarmed, 16);
    CHECK(!soft_rings_arm(fabric)); /* no thread is kept from sleeping */
    CHECK_EQ(fabric->unarmed, 0);
    while (b->requests < before + MANY * PAUSING && now_ns() < end) {
        for (i = 0; i < MANY; i++)
            read_answers(&peers[i]);
        soft_fabric_poll_locked(fabric, true);
    }
    CHECK_EQ(b->requests, before + MANY * PAUSING);
    drop_many(peers);
    close_nodes();
}

/* Nor is a stream that is stalled looked at, and it is heard again once it is not. */
static void many_peers_that_are_stalled(void)
{
    struct soft_stream peers[MANY];
    struct soft_fabric *fabric;
    unsigned int i, before;

    open_nodes();
    fabric = b->device.fabric;
    before = b->requests;
    open_many(peers);
    soft_mutex_give(&fabric->progress);
    CHECK_EQ(soft_fabric_stall(&b->device, NULL, true), MANY + 1);
    soft_mutex_take(&fabric->progress);
    for (i = 0; i < MANY; i++)
        CHECK(write_request(&peers[i], IBV_WR_SEND, 1, 0) > 0);
    CHECK(!soft_rings_arm(fabric));
    CHECK_EQ(fabric->unarmed, 0);
    soft_mutex_give(&fabric->progress);
    CHECK_EQ(soft_fabric_stall(&b->device, NULL, false), MANY + 1);
    EVENTUALLY(b->requests == before + MANY);
    for (i = 0; i < MANY; i++) {
        CHECK(write_request(&peers[i], IBV_WR_SEND, 2, 0) > 0);
        soft_rings_notify(&peers[i], SOFT_WANTS_BYTES);
    }
    EVENTUALLY(b->requests == before + 2 * MANY);
    soft_mutex_take(&fabric->progress);
    drop_many(peers);
    close_nodes();
}

/* A peer that writes its frames byte by byte takes turns as others do, of which a poll has a bounded number. */
static void many_peers_that_trickle(void)
{
    struct soft_stream peers[MANY], *stream;
    struct iovec piece = {"A", 1};
    struct soft_fabric *fabric;
    unsigned int i, heard = 0;

    open_nodes();
    fabric = b->device.fabric;
    open_many(peers);
    for (i = 0; i < MANY; i++)
        CHECK_EQ(soft_ring_write(&peers[i].ring_out, &piece, 1), 1);
    CHECK(soft_fabric_poll_locked(fabric, false));
    for (stream = fabric->streams; stream; stream = stream->next)
        heard += stream->ring_in.tail == 1;
    CHECK_EQ(heard, 32);
    drop_many(peers);
    close_nodes();
}

/* A peer that does not ring although it was asked to is heard all the same, with the next sweep. */
static void a_peer_that_does_not_ring(void)
{
    struct soft_stream peer;
    unsigned int before;

    open_nodes();
    before = b->requests;
    open_peer(&peer);
    EVENTUALLY(stats_of(b).accepted == 2 && atomic_load(&peer.ring_out.peer->wants) & SOFT_WANTS_BYTES);
    CHECK(write_request(&peer, IBV_WR_SEND, 1, 0) > 0);
    EVENTUALLY(b->requests == before + 1);
    drop_peer(&peer);
    close_nodes();
}

/* ---- Memory that changes while it is read -------------------------------------------------------------------- */

struct scribbler {
    uint8_t *memory; /* a mapping of its own */
    atomic_bool stop;
};

/* Write anything anywhere, as fast as possible: into frames, and now and then into the words of both sides. */
static void *scribble(void *argument)
{
    struct scribbler *scribbler = argument;
    struct soft_ring_side *sides = (struct soft_ring_side *)(void *)scribbler->memory;
    uint8_t *ring = scribbler->memory + SOFT_RINGS_FILE - 2 * SOFT_RING_SIZE;
    unsigned int state = 11;

    while (!atomic_load_explicit(&scribbler->stop, memory_order_relaxed)) {
        unsigned int i;

        for (i = 0; i < 64; i++) {
            uint32_t at = next_random(&state, SOFT_RING_SIZE);

            __atomic_store_n(&ring[at], (uint8_t)next_random(&state, 256), __ATOMIC_RELAXED);
        }
        atomic_store(&sides[next_random(&state, 2)].wants, next_random(&state, 8));
        if (!next_random(&state, 200))
            atomic_fetch_add(&sides[0].head, next_random(&state, 1000));
    }
    return NULL;
}

/* A peer that changes what is being checked: nothing is handled that was not checked, and nothing out of bounds is
 * touched. The stream may be closed for it at any time; then the peer comes again. */
static void memory_that_changes_while_it_is_read(void)
{
    unsigned int frames = SCALED(400000), written = 0;
    bool was_refused = false;

    open_nodes();
    while (written < frames) {
        struct scribbler scribbler = {.stop = false};
        struct pollfd ended = {.events = POLLIN};
        struct soft_stream peer;
        pthread_t thread;

        scribbler.memory = open_peer_mapped(&peer, true);
        ended.fd = peer.watch.fd;
        REQUIRE_EQ(pthread_create(&thread, NULL, scribble, &scribbler), 0);
        while (written < frames || (!was_refused && written < 20 * frames)) {
            if (write_request(&peer, written % 3 ? IBV_WR_SEND : IBV_WR_RDMA_READ, written, written % 300) < 0) {
                was_refused = true; /* the other thread wrote that index */
                break;
            }
            written++;
            peer.ring_in.tail = atomic_load(&peer.ring_in.peer->tail); /* read all answers, whatever they are */
            peer.ring_in.head = peer.ring_in.tail;
            soft_ring_release(&peer.ring_in);
            if (written % 16 == 0) {
                ring_bell(&peer);
                if (poll(&ended, 1, 0) > 0 && recv(ended.fd, &(char){0}, 1, MSG_DONTWAIT) == 0) {
                    was_refused = true;
                    break;
                }
            }
        }
        atomic_store(&scribbler.stop, true);
        pthread_join(thread, NULL);
        munmap(scribbler.memory, SOFT_RINGS_FILE);
        drop_peer(&peer);
    }
    CHECK(was_refused);
    close_nodes();
}

/* ---- A hostile accepting side -------------------------------------------------------------------------------- */

/* Take HELLO with its descriptors, and accept the rings. */
static int accept_rings(struct soft_stream *peer, int listener)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(SOFT_MEMORY_FILES * sizeof(int))];
    } control;
    struct soft_welcome welcome = {.flags = SOFT_HELLO_RINGS};
    uint8_t hello_bytes[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE], proof[SOFT_PROOF_SIZE];
    struct iovec piece = {hello_bytes, sizeof(hello_bytes)};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    struct pollfd readable = {.fd = listener, .events = POLLIN};
    struct soft_hello hello;
    bool mapped;

    REQUIRE_EQ(poll(&readable, 1, WAIT_S * 1000), 1);
    make_peer(peer, false, accept(listener, NULL, NULL));
    REQUIRE_EQ(recvmsg(peer->watch.fd, &message, MSG_WAITALL), SOFT_HELLO_SIZE);
    REQUIRE(!soft_hello_parse(hello_bytes, &hello) && hello.flags & SOFT_HELLO_RINGS);
    memcpy(peer->received_fds, CMSG_DATA(&control.header), control.header.cmsg_len - CMSG_LEN(0));
    soft_mutex_take(&a->device.fabric->progress);
    mapped = soft_rings_accept(peer, &hello);
    soft_mutex_give(&a->device.fabric->progress);
    REQUIRE(mapped);
    soft_stream_drop_received(peer);
    memcpy(welcome.gids, b->device.gids, sizeof(welcome.gids));
    soft_welcome_pack(&welcome, bytes);
    CHECK_EQ(send(peer->watch.fd, bytes, SOFT_WELCOME_SIZE, MSG_NOSIGNAL), SOFT_WELCOME_SIZE);
    REQUIRE(raw_read(peer->watch.fd, proof, sizeof(proof)));
    return peer->watch.fd;
}

static void an_accepting_side_that_lies(void)
{
    static const char *const reasons[] = {"an invalid index of a ring", "an invalid index of a ring", ""};
    struct soft_directory_entry entry;
    struct soft_stream_stats stream;
    struct sender looking;
    unsigned int i;

    for (i = 0; i < COUNT_OF(reasons); i++) {
        struct soft_stream peer;

        new_directory();
        settings.rings = true;
        a = node_open();
        b = node_open();
        listen_by_hand(b, &entry);
        sender_open(&looking, a, &b->device.gids[0], 5);
        sender_want(&looking, IBV_WR_SEND, 1, 100);
        accept_rings(&peer, entry.fd);
        EVENTUALLY(soft_fabric_get_streams(&a->device, &stream, 1) == 1 && stream.connected && stream.rings);
        if (i == 0) {
            atomic_store(&peer.ring_out.own->tail, SOFT_RING_SIZE + 1);
        } else if (i == 1) {
            atomic_store(&peer.ring_in.own->head, 1u << 30);
            sender_want(&looking, IBV_WR_SEND, 20, 60000);
        } else { /* a request on the side of responses */
            CHECK_EQ(write_request(&peer, IBV_WR_SEND, 1, 0), SOFT_FRAME_SIZE);
        }
        ring_bell(&peer);
        CHECK(raw_is_closed(peer.watch.fd));
        EVENTUALLY(stats_of(a).refused_frames >= 1);
        CHECK(last_reason_is(a, reasons[i]));
        sender_close(&looking);
        drop_peer(&peer);
        node_close(a);
        node_close(b);
        soft_directory_unregister(&entry);
        CHECK_EQ(rmdir(directory()), 0);
    }
}

/* ---- Files that are no rings --------------------------------------------------------------------------------- */

static void files_that_are_no_rings(void)
{
    struct soft_stream_stats streams[4];
    unsigned int i;

    open_nodes();
    for (i = 0; i < 4; i++) {
        struct soft_hello hello = {.flags = SOFT_HELLO_RINGS};
        struct soft_stream peer;
        int fd = -1;

        if (i == 1)
            fd = memfd_create("aioverbs-test", MFD_CLOEXEC | MFD_ALLOW_SEALING); /* not sealed */
        else if (i == 2)
            fd = soft_sealed_create("aioverbs-test", 4096, F_SEAL_SEAL); /* too small */
        else if (i == 3)
            fd = soft_sealed_create("aioverbs-test", SOFT_RINGS_FILE, F_SEAL_WRITE); /* cannot be mapped */
        make_peer(&peer, true, raw_connect(b));
        if (i == 1) { /* which is rejected at once: its last close may take long */
            uint8_t bytes[SOFT_WELCOME_SIZE];

            REQUIRE_EQ(ftruncate(fd, SOFT_RINGS_FILE), 0);
            send_hello(&peer, &hello, (const int[SOFT_MEMORY_FILES]){fd, -1});
            REQUIRE(raw_read(peer.watch.fd, bytes, SOFT_WELCOME_SIZE));
            CHECK(!(bytes[10] & SOFT_HELLO_RINGS));
        } else {
            CHECK(!say_hello(&peer, &hello, fd));
            EVENTUALLY(soft_fabric_get_streams(&b->device, streams, 4) == 2 && streams[0].connected);
            CHECK(!streams[0].rings);
            CHECK(strstr(streams[0].why_not_rings, "the file of rings") != NULL);
        }
        close(fd);
        drop_peer(&peer);
        EVENTUALLY(stats_of(b).streams == 1);
    }
    close_nodes();
}

/* Files that come with HELLO and serve no purpose do not stay open as long as the stream. */
static void files_that_nobody_asked_for(void)
{
    static const uint16_t flags[] = {0, SOFT_HELLO_RINGS, SOFT_HELLO_DIRECT}; /* the last two: of the first file */
    struct soft_hello hello = {.flags = 0};
    unsigned int before, i;

    open_nodes();
    before = open_descriptors();
    for (i = 0; i < COUNT_OF(flags); i++) {
        int files[SOFT_MEMORY_FILES] = {soft_sealed_create("aioverbs-test", 4096, F_SEAL_SEAL),
                                        soft_sealed_create("aioverbs-test", 4096, F_SEAL_SEAL)};
        struct soft_stream peer;

        hello.flags = flags[i];
        make_peer(&peer, true, raw_connect(b));
        send_hello(&peer, &hello, files);
        close(files[0]);
        close(files[1]);
        CHECK(!expect_welcome(&peer));
        EVENTUALLY(stats_of(b).accepted == i + 2);
        CHECK_EQ(open_descriptors(), before + 2); /* both ends of the socket */
        drop_peer(&peer);
        EVENTUALLY(open_descriptors() == before);
    }
    close_nodes();
}

/* A link accepts one file with WELCOME. */
static void more_files_than_welcome_has(void)
{
    struct soft_welcome welcome = {.flags = 0};
    struct soft_directory_entry entry;
    uint8_t bytes[SOFT_WELCOME_SIZE];
    int file = soft_sealed_create("aioverbs-test", 4096, F_SEAL_SEAL);
    struct soft_stream peer;
    struct sender looking;

    new_directory();
    a = node_open();
    b = node_open();
    listen_by_hand(b, &entry);
    sender_open(&looking, a, &b->device.gids[0], 5);
    sender_want(&looking, IBV_WR_SEND, 1, 100);
    make_peer(&peer, false, accept_by_hand(entry.fd, bytes));
    memcpy(welcome.gids, b->device.gids, sizeof(welcome.gids));
    soft_welcome_pack(&welcome, bytes);
    CHECK(soft_stream_send_message(&peer, bytes, sizeof(bytes), (const int[SOFT_MEMORY_FILES]){file, file}));
    CHECK(raw_is_closed(peer.watch.fd));
    EVENTUALLY(stats_of(a).refused_peers == 1);
    CHECK(last_reason_is(a, "unexpected descriptors"));
    sender_close(&looking);
    drop_peer(&peer);
    soft_descriptor_close(file);
    node_close(a);
    node_close(b);
    soft_directory_unregister(&entry);
    CHECK_EQ(rmdir(directory()), 0);
}

/* Either side may do without rings: then frames go through the socket, and both say why. */
static void either_side_may_decline(void)
{
    static const char *const links[] = {"AIOVERBS_SOFT_RINGS is 0", "the peer does not use rings"};
    static const char *const served[] = {"the peer does not offer rings", "AIOVERBS_SOFT_RINGS is 0"};
    struct soft_stream_stats stream;
    struct sender sender;
    unsigned int i;

    for (i = 0; i < 2; i++) {
        new_directory();
        settings.rings = i;
        a = node_open();
        settings.rings = !i;
        b = node_open();
        REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
        sender_open(&sender, a, &b->device.gids[0], 5);
        sender_want(&sender, IBV_WR_RDMA_READ, 20, 5000);
        CHECK(sender_finish(&sender));
        EVENTUALLY(a->responses == 20);
        REQUIRE_EQ(soft_fabric_get_streams(&a->device, &stream, 1), 1);
        CHECK(!stream.rings && !strcmp(stream.why_not_rings, links[i]));
        REQUIRE_EQ(soft_fabric_get_streams(&b->device, &stream, 1), 1);
        CHECK(!stream.rings && !strcmp(stream.why_not_rings, served[i]));
        sender_close(&sender);
        node_close(a);
        node_close(b);
        CHECK_EQ(a->wrong + b->wrong, 0);
        CHECK_EQ(rmdir(directory()), 0);
    }
}

/* Frames that a peer wrote before it ended are handled, but no frame that is not complete. */
static void a_peer_that_ends(void)
{
    struct soft_frame frame = request_frame(IBV_WR_SEND, 7, 3, 5000);
    uint8_t header[SOFT_FRAME_SIZE];
    struct iovec part = {header, sizeof(header)};
    unsigned int before, i;
    struct soft_stream peer;

    open_nodes();
    before = b->requests;
    open_peer(&peer);
    for (i = 0; i < 1000; i++)
        CHECK_EQ(write_request(&peer, IBV_WR_SEND, i, 100), SOFT_FRAME_SIZE + 100);
    soft_frame_pack(&frame, header);
    CHECK_EQ(soft_ring_write(&peer.ring_out, &part, 1), SOFT_FRAME_SIZE);
    drop_peer(&peer); /* without a doorbell */
    EVENTUALLY(stats_of(b).streams == 1);
    CHECK_EQ(b->requests, before + 1000);
    CHECK_EQ(stats_of(b).lost, 1);
    CHECK_EQ(b->wrong, 0);
    close_nodes();
}

/* ---- Streams that end between two turns ---------------------------------------------------------------------- */

/* Take progress of b, and return its stream of the peer that the test plays; if it is not open yet, return NULL. */
static struct soft_stream *take_served(void)
{
    struct soft_stream *stream;

    soft_mutex_take(&b->device.fabric->progress);
    for (stream = b->device.fabric->streams; stream; stream = stream->next)
        if (stream->peer[0].raw[0] == 7 && soft_stream_uses_rings(stream))
            return stream;
    soft_mutex_give(&b->device.fabric->progress);
    return NULL;
}

/* Take progress of b, have 400 small requests written, and give the stream one turn. Return the stream at b: it has
 * complete frames left. The caller gives progress back. */
static struct soft_stream *leave_unfinished(struct soft_stream *peer, enum ibv_wr_opcode opcode, uint32_t size)
{
    struct soft_stream *stream;
    unsigned int i;

    REQUIRE(grace_ready());
    while (!(stream = take_served()))
        sleep_us(200);
    for (i = 0; i < 400; i++)
        CHECK(write_request(peer, opcode, i, size) > 0);
    CHECK(soft_stream_receive_ring(stream));
    CHECK(stream->unfinished);
    return stream;
}

/* A stream that this side breaks while it has frames left is closed, and so is one that is stalled when its peer dies:
 * neither is read any more. */
static void an_unfinished_stream_that_ends(void)
{
    struct soft_stream peer, *stream;

    open_nodes();
    open_peer(&peer);
    stream = leave_unfinished(&peer, IBV_WR_SEND, 10);
    soft_mutex_take(&stream->tx);
    soft_stream_break(stream);
    soft_mutex_give(&stream->tx);
    soft_mutex_give(&b->device.fabric->progress);
    EVENTUALLY(stats_of(b).streams == 1 && stats_of(b).lost == 1);
    drop_peer(&peer);

    open_peer(&peer);
    stream = leave_unfinished(&peer, IBV_WR_SEND, 10);
    soft_mutex_take(&stream->tx);
    stream->stalled = true; /* as soft_fabric_stall() does */
    soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
    soft_mutex_give(&b->device.fabric->progress);
    drop_peer(&peer);
    EVENTUALLY(stats_of(b).streams == 1 && stats_of(b).lost == 2);
    close_nodes();
}

/* The reason is known although the peer takes its invalid index back before the stream is closed. */
static void an_index_that_is_restored(void)
{
    struct soft_stream peer, *stream;

    open_nodes();
    open_peer(&peer);
    atomic_store(&peer.ring_in.own->head, 1u << 31);
    stream = leave_unfinished(&peer, IBV_WR_RDMA_READ, 4000);
    CHECK(atomic_load(&stream->broken));
    atomic_store(&peer.ring_in.own->head, 0);
    soft_mutex_give(&b->device.fabric->progress);
    expect_refused(&peer, "an invalid index of a ring", 1, HERE);
    close_nodes();
}

/* A link is closed likewise, and then the queue pairs that wait for it are told. */
static void an_unfinished_link_that_breaks(void)
{
    struct soft_link *link;
    unsigned int i, before;

    open_nodes();
    REQUIRE(grace_ready());
    link = honest.link;
    soft_mutex_take(&a->device.fabric->progress);
    before = b->requests;
    for (i = 0; i < 4; i++) { /* each time as many answers as have room */
        sender_want(&honest, IBV_WR_SEND, 100, 10);
        EVENTUALLY(b->requests == before + (i + 1) * 100);
    }
    EVENTUALLY(soft_ring_has_news(&link->stream.ring_in));
    while (!link->stream.unfinished)
        soft_stream_receive_ring(&link->stream);
    soft_copy_tokens_give_up(link); /* while no other thread gives the stream a turn */
    soft_mutex_give(&a->device.fabric->progress);
    EVENTUALLY(stats_of(a).lost == 1);
    before = a->responses;
    sender_want(&honest, IBV_WR_SEND, 1, 10);
    CHECK(sender_finish(&honest)); /* over a new connection */
    EVENTUALLY(a->responses == before + 1);
    CHECK_EQ(stats_of(a).connected, 2);
    close_nodes();
}

CHECK_MAIN_ONCE(CASE(indices_out_of_range), CASE(an_index_that_goes_back), CASE(small_frames_leave_most_of_a_ring),
                CASE(bytes_to_skip), CASE(garbage_closes_the_stream), CASE(doorbells_for_nothing),
                CASE(a_frame_in_pieces), CASE(a_peer_that_reads_nothing), CASE(room_that_is_asked_for),
                CASE(many_peers_that_write), CASE(many_peers_that_skip), CASE(many_peers_that_are_idle),
                CASE(many_peers_that_read_nothing), CASE(many_peers_that_are_stalled), CASE(many_peers_that_trickle),
                CASE(a_peer_that_does_not_ring), CASE(memory_that_changes_while_it_is_read),
                CASE(an_accepting_side_that_lies), CASE(files_that_are_no_rings), CASE(files_that_nobody_asked_for),
                CASE(more_files_than_welcome_has), CASE(either_side_may_decline), CASE(a_peer_that_ends),
                CASE(an_unfinished_stream_that_ends), CASE(an_index_that_is_restored),
                CASE(an_unfinished_link_that_breaks))
