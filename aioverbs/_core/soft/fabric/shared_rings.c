/* Rings of a stream: how they are made and mapped, and how the two sides wake each other. */
#define _GNU_SOURCE
#include "soft/fabric/shared_rings.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/memfd.h"
#include "soft/base/settings.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/fabric/link.h"
#include "soft/fabric/ring.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/stream_rx.h"

/* The file: the words of both sides, then the ring of the connecting side, then that of the accepting one. Parts begin
 * at multiples of the page size of every kernel. */
#define WORDS_SIZE (64u << 10)
_Static_assert(SOFT_RINGS_FILE == WORDS_SIZE + 2 * SOFT_RING_SIZE, "");
#define MAPPED_SIZE (WORDS_SIZE + 4 * SOFT_RING_SIZE)

#define GIVE_BACK_NS 2000000u /* time after which it was slow to give the pages of a ring back */
#define SLOW_WEIGHT 8u        /* number of quick ones that make up for it */

enum {
    POLLED_STREAMS = 16, /* streams at which each poll looks, although they are idle or armed */
    IDLE_LOOKS = 256,    /* looks that find nothing after which one of more streams is idle: as long as a doorbell */
};

struct ring_words {
    struct soft_ring_side sides[2]; /* connecting, accepting */
};
_Static_assert(sizeof(struct ring_words) <= 4096, "one page");

/* ---- Mapping ------------------------------------------------------------------------------------------------- */

static bool map_part(uint8_t *at, size_t size, int fd, off_t offset)
{
    return mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, offset) != MAP_FAILED;
}

/* Map the words, and each ring twice. Return NULL and errno if that fails. */
static uint8_t *try_to_map(int fd)
{
    uint8_t *memory = mmap(NULL, MAPPED_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t *at = memory == MAP_FAILED ? NULL : memory + WORDS_SIZE;
    unsigned int i;
    bool mapped;

    if (!at)
        return NULL;
    mapped = map_part(memory, WORDS_SIZE, fd, 0);
    for (i = 0; i < 4 && mapped; i++)
        mapped = map_part(at + i * SOFT_RING_SIZE, SOFT_RING_SIZE, fd, WORDS_SIZE + i / 2 * SOFT_RING_SIZE);
    if (mapped && !madvise(memory, MAPPED_SIZE, MADV_DONTFORK))
        return memory;
    i = (unsigned int)errno;
    munmap(memory, MAPPED_SIZE);
    errno = (int)i;
    return NULL;
}

/* Do the same. The child of a fork has none of it: no fork comes between mapping and that advice. */
static uint8_t *map_rings(int fd)
{
    uint8_t *memory;

    soft_descriptors_hold();
    memory = try_to_map(fd);
    soft_descriptors_release();
    return memory;
}

/* Have the stream use the mapping. The file is new: all indices are 0. */
static void set_rings(struct soft_stream *stream, uint8_t *memory)
{
    struct soft_ring_side *sides = ((struct ring_words *)(void *)memory)->sides;
    uint8_t *rings[2] = {memory + WORDS_SIZE, memory + WORDS_SIZE + 2 * SOFT_RING_SIZE};
    unsigned int own = stream->is_link ? 0 : 1;

    soft_mutex_take(&stream->tx);
    stream->ring_memory = memory;
    atomic_store(&stream->has_rings, true);
    stream->ring_in = (struct soft_ring_consumer){.data = rings[!own], .own = &sides[own], .peer = &sides[!own]};
    stream->ring_out = (struct soft_ring_producer){.data = rings[own], .own = &sides[own], .peer = &sides[!own]};
    soft_mutex_give(&stream->tx);
    stream->why_not_rings[0] = 0;
}

bool soft_link_has_rings(const struct soft_link *link)
{
    return atomic_load_explicit(&link->stream.has_rings, memory_order_relaxed);
}

/* ---- Lists of streams ---------------------------------------------------------------------------------------- */

static void list_add(struct soft_stream **list, struct soft_stream *stream)
{
    stream->next_ring = *list;
    stream->ring_place = list;
    if (stream->next_ring)
        stream->next_ring->ring_place = &stream->next_ring;
    *list = stream;
}

static void list_remove(struct soft_stream *stream)
{
    if (stream->fabric->next_unarmed == stream)
        stream->fabric->next_unarmed = stream->next_ring;
    *stream->ring_place = stream->next_ring;
    if (stream->next_ring)
        stream->next_ring->ring_place = stream->ring_place;
    stream->ring_place = NULL;
}

static void set_armed(struct soft_stream *stream, bool armed)
{
    struct soft_fabric *fabric = stream->fabric;

    stream->armed = armed;
    fabric->unarmed += armed ? -1u : 1u;
    list_remove(stream);
    list_add(armed ? &fabric->armed_rings : &fabric->unarmed_rings, stream);
}

struct soft_stream *soft_rings_next(struct soft_fabric *fabric)
{
    struct soft_stream *stream = fabric->next_unarmed ? fabric->next_unarmed : fabric->unarmed_rings;

    assert_held(&fabric->progress);
    fabric->next_unarmed = stream ? stream->next_ring : NULL;
    return stream;
}

void soft_rings_unmap(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    if (!stream->ring_memory)
        return;
    if (stream->ring_place) {
        list_remove(stream);
        fabric->ring_count--;
        fabric->unarmed -= !stream->armed;
    }
    munmap(stream->ring_memory, MAPPED_SIZE);
    stream->ring_memory = NULL;
    atomic_store(&stream->has_rings, false);
    stream->ring_in = (struct soft_ring_consumer){.data = NULL};
    stream->ring_out = (struct soft_ring_producer){.data = NULL};
}

/* No byte of an empty ring is read again, and only this side makes it another one, under tx. The kernel removes the
 * pages from all mappings of the file, in less than 1 ms. That is slow if a peer maps it very often, or removes pages
 * itself: after some slow ones in a row, no ring of the device gives back any more. */
static void give_back_ring(struct soft_stream *stream)
{
    struct soft_ring_producer *ring = &stream->ring_out;
    struct soft_fabric *fabric = stream->fabric;
    uint64_t began = soft_now_ns();
    uint32_t room = 0;

    soft_mutex_take(&stream->tx);
    if (ring->given_back != ring->tail && soft_ring_room(ring, &room) && room == SOFT_RING_SIZE &&
        !madvise(ring->data, SOFT_RING_SIZE, MADV_REMOVE)) /* fails if the pages are locked */
        ring->given_back = ring->tail;
    soft_mutex_give(&stream->tx);
    if (soft_now_ns() - began > GIVE_BACK_NS) /* or the thread was interrupted for a while */
        fabric->slow_rings += SLOW_WEIGHT;
    else if (fabric->slow_rings)
        fabric->slow_rings--;
}

static bool gives_back(const struct soft_fabric *fabric)
{
    return fabric->slow_rings < 3 * SLOW_WEIGHT;
}

void soft_rings_give_back(struct soft_link *link)
{
    struct soft_stream *stream;

    assert_held(&link->stream.fabric->progress);
    if (!soft_stream_uses_rings(&link->stream) || !gives_back(link->stream.fabric))
        return;
    give_back_ring(&link->stream);
    for (stream = link->stream.fabric->streams; stream && gives_back(stream->fabric); stream = stream->next)
        if (!stream->is_link && stream->pid == link->stream.pid && soft_stream_uses_rings(stream))
            give_back_ring(stream);
}

/* ---- The handshake ------------------------------------------------------------------------------------------- */

static void set_why_not(struct soft_stream *stream, const char *what, int error)
{
    snprintf(stream->why_not_rings, sizeof(stream->why_not_rings), "%s%s%s", what, error ? ": " : "",
             error ? strerror(error) : "");
}

/* Return whether the kernel may refuse pages of a file that was made: it provides them on first use, also again after
 * a peer has punched a hole, and ends a process for which it has none left. */
static bool is_memory_limited(void)
{
    int fd = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
    char value = 0;
    bool limited = fd < 0 || read(fd, &value, 1) != 1 || value == '2';

    if (fd >= 0)
        close(fd);
    return limited;
}

/* Return NULL, or why the stream has no rings. */
static const char *find_obstacle(const struct soft_stream *stream)
{
    if (!stream->is_unix)
        return "the connection is over TCP";
    if (!stream->fabric->settings.rings)
        return "AIOVERBS_SOFT_RINGS is 0";
    if (stream->uid != geteuid())
        return "the peer runs as another user";
    if (is_memory_limited())
        return "vm.overcommit_memory is 2, or unknown";
    return NULL;
}

int soft_rings_offer(struct soft_stream *stream, struct soft_hello *hello)
{
    const char *why = find_obstacle(stream);
    uint8_t *memory = NULL;
    int fd;

    assert_held(&stream->fabric->progress);
    if (why) {
        set_why_not(stream, why, 0);
        return -1;
    }
    fd = soft_sealed_create("aioverbs-rings", SOFT_RINGS_FILE, F_SEAL_SEAL);
    if (fd >= 0)
        memory = map_rings(fd);
    if (!memory) {
        set_why_not(stream, "no memory to share", errno);
        soft_descriptor_close(fd);
        return -1;
    }
    set_rings(stream, memory);
    hello->flags |= SOFT_HELLO_RINGS;
    return fd;
}

bool soft_rings_accept(struct soft_stream *stream, const struct soft_hello *hello)
{
    int fd = stream->received_fds[hello->flags & SOFT_HELLO_DIRECT ? 1 : 0]; /* behind the copy tokens */
    const char *why = find_obstacle(stream);
    uint8_t *memory = NULL;
    int error = 0;

    assert_held(&stream->fabric->progress);
    if (!(hello->flags & SOFT_HELLO_RINGS)) {
        set_why_not(stream, why ? why : "the peer does not offer rings", 0);
        return false;
    }
    /* A file that can shrink would make accesses fail. */
    if (!why && (fd < 0 || soft_sealed_bytes(fd) != (off_t)SOFT_RINGS_FILE))
        why = "the file of rings is not sealed or has another size";
    if (!why) {
        memory = map_rings(fd);
        error = memory ? 0 : errno;
        why = memory ? NULL : "the file of rings cannot be mapped";
    }
    if (why)
        set_why_not(stream, why, error);
    else
        set_rings(stream, memory);
    return memory;
}

void soft_rings_decline(struct soft_stream *stream, const char *why)
{
    if (!stream->ring_memory)
        return;
    soft_mutex_take(&stream->tx);
    soft_rings_unmap(stream);
    soft_mutex_give(&stream->tx);
    set_why_not(stream, why, 0);
}

void soft_rings_open(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    assert_held(&fabric->progress);
    stream->armed = stream->wants_bytes = stream->rung = stream->ended = false;
    if (!stream->ring_memory)
        return;
    if (fabric->hot == stream)
        fabric->hot = NULL; /* its socket is no more to be read with each poll */
    stream->idle_looks = 0;
    list_add(&fabric->unarmed_rings, stream);
    fabric->ring_count++;
    fabric->unarmed++;
}

/* ---- Waking the peer ----------------------------------------------------------------------------------------- */

void soft_rings_notify(struct soft_stream *stream, uint32_t what)
{
    uint32_t taken = soft_ring_answer(stream->ring_out.peer, what);

    if (!taken)
        return;
    atomic_fetch_add(&stream->doorbells, 1); /* before it is sent: soft_rings_pay() relies on that */
    /* A socket that is full has enough doorbells. One that has ended needs none, and any other error may pass. */
    if (send(stream->watch.fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN)
        soft_ring_want(stream->ring_out.peer, taken);
}

struct soft_stream *soft_rings_find_payer(const struct soft_stream *served)
{
    struct soft_link *link;
    unsigned int i;

    assert_held(&served->fabric->progress);
    if (!soft_stream_uses_rings(served) ||
        !(atomic_load_explicit(&served->ring_out.peer->wants, memory_order_relaxed) & SOFT_WANTS_BYTES))
        return NULL;
    for (i = 0; i < 2; i++) {
        link = soft_link_find(served->fabric, &served->peer[i]);
        /* Of two processes that had the same GIDs, one after the other, only one reads the doorbell. */
        if (link && soft_stream_uses_rings(&link->stream) && link->stream.pid == served->pid)
            return &link->stream;
    }
    return NULL;
}

void soft_rings_owe(struct soft_stream *served, struct soft_stream *payer)
{
    assert_held(&served->fabric->progress);
    assert(!served->is_link && payer->is_link && payer->fabric == served->fabric);
    atomic_thread_fence(memory_order_seq_cst);
    served->payer = payer;
    served->owed_at = atomic_load(&payer->doorbells);
}

void soft_rings_pay(struct soft_stream *served)
{
    assert_held(&served->fabric->progress);
    if (!served->payer)
        return;
    assert(soft_stream_uses_rings(served) && soft_stream_uses_rings(served->payer));
    if (served->owed_at == atomic_load(&served->payer->doorbells))
        soft_rings_notify(served, SOFT_WANTS_BYTES);
    served->payer = NULL;
}

/* The consumer wakes this side with its next store that leaves SOFT_RING_ROOM; or that was before, and is seen here.
 * The doorbell may be read at once, by a thread that sends what is queued if it sees `starved`. So that is set before
 * the fence, too: where that thread does not see it, the consumer's store was before, and is seen here. */
bool soft_rings_want_room(struct soft_stream *stream)
{
    uint32_t room = 0;

    assert_held(&stream->tx);
    atomic_store_explicit(&stream->starved, true, memory_order_relaxed);
    soft_ring_want(stream->ring_out.own, SOFT_WANTS_ROOM);
    atomic_thread_fence(memory_order_seq_cst);
    if (!soft_ring_room(&stream->ring_out, &room))
        soft_stream_break(stream);
    if (room < SOFT_RING_ROOM)
        return false;
    soft_ring_unwant(stream->ring_out.own, SOFT_WANTS_ROOM);
    return true;
}

/* ---- Being woken --------------------------------------------------------------------------------------------- */

/* Take the wish for bytes back. If the peer has taken it, a doorbell has come or will come. */
static void unwant_bytes(struct soft_stream *stream)
{
    if (stream->wants_bytes)
        stream->rung |= !soft_ring_unwant(stream->ring_in.own, SOFT_WANTS_BYTES);
    stream->wants_bytes = false;
}

void soft_rings_disarm(struct soft_stream *stream)
{
    assert_held(&stream->fabric->progress);
    stream->idle_looks = 0;
    if (!stream->armed)
        return;
    unwant_bytes(stream);
    set_armed(stream, false);
}

void soft_rings_look_aside(struct soft_stream *served)
{
    struct soft_link *link;
    unsigned int i;

    assert_held(&served->fabric->progress);
    for (i = 0; i < 2; i++) {
        link = soft_link_find(served->fabric, &served->peer[i]);
        if (link && soft_stream_uses_rings(&link->stream) && soft_ring_has_news(&link->stream.ring_in))
            soft_rings_disarm(&link->stream);
    }
}

/* Return whether the stream needs a turn, whatever its peer does. */
static bool needs_turn(const struct soft_stream *stream)
{
    return stream->refusal ||
           (stream->unfinished && !stream->paused && !stream->stalled && !atomic_load(&stream->broken));
}

/* Return whether bytes are to be handled when they come. A stream that is paused waits for room only, as does one that
 * is stalled. One that has ended or is broken waits for nothing: epoll reports that until it is closed. */
static bool waits_for_bytes(const struct soft_stream *stream)
{
    return !stream->stalled && !stream->paused && !stream->ended && !atomic_load(&stream->broken);
}

/* Ask for room again if the ring is full: a doorbell for bytes took that wish away. Return whether it is there. */
static bool want_room_again(struct soft_stream *stream)
{
    bool room;

    if (!atomic_load_explicit(&stream->starved, memory_order_relaxed))
        return false;
    soft_mutex_take(&stream->tx);
    room = atomic_load_explicit(&stream->starved, memory_order_relaxed) && soft_rings_want_room(stream);
    soft_mutex_give(&stream->tx);
    return room;
}

/* Ask for a doorbell when bytes come, if they are waited for. The caller looks again after a fence. */
static void want_bytes(struct soft_stream *stream)
{
    if (needs_turn(stream) || !waits_for_bytes(stream))
        return;
    soft_stream_drain_doorbells(stream);
    if (stream->refusal) /* for what came with one */
        return;
    soft_ring_want(stream->ring_in.own, SOFT_WANTS_BYTES);
    stream->wants_bytes = true;
}

/* Arm a stream that has asked for a doorbell, unless it has something to handle: it needs a turn, there is room for
 * what waits, or its peer has written meanwhile, or so before it could ask (soft_rings_look_aside). Return whether it
 * has. Another thread may have broken it since it asked: that is reported by epoll. */
static bool look_again(struct soft_stream *stream)
{
    bool room = want_room_again(stream); /* also because a doorbell for room may have been drained */

    if (!room && !needs_turn(stream) && !(waits_for_bytes(stream) && soft_ring_has_news(&stream->ring_in))) {
        set_armed(stream, true);
        return false;
    }
    unwant_bytes(stream);
    return true;
}

bool soft_rings_arm(struct soft_fabric *fabric)
{
    struct soft_stream *stream, *next;
    bool something = false;

    assert_held(&fabric->progress);
    if (!fabric->unarmed)
        return false;
    for (stream = fabric->unarmed_rings; stream; stream = stream->next_ring)
        want_bytes(stream);
    atomic_thread_fence(memory_order_seq_cst);
    for (stream = fabric->unarmed_rings; stream; stream = next) {
        next = stream->next_ring;
        something |= look_again(stream);
    }
    return something;
}

void soft_rings_found_nothing(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    assert_held(&fabric->progress);
    if (fabric->unarmed <= POLLED_STREAMS || ++stream->idle_looks < IDLE_LOOKS)
        return;
    want_bytes(stream);
    atomic_thread_fence(memory_order_seq_cst);
    look_again(stream);
}

void soft_rings_look(struct soft_fabric *fabric)
{
    if (fabric->ring_count <= POLLED_STREAMS)
        soft_rings_sweep(fabric);
}

void soft_rings_sweep(struct soft_fabric *fabric)
{
    struct soft_stream *stream, *next;

    assert_held(&fabric->progress);
    for (stream = fabric->armed_rings; stream; stream = next) {
        next = stream->next_ring;
        if (soft_ring_has_news(&stream->ring_in) || atomic_load_explicit(&stream->starved, memory_order_relaxed))
            soft_rings_disarm(stream);
    }
}
