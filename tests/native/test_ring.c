/* Tests of rings: bytes in their order, full and empty rings, indices of a hostile peer, and two threads that sleep. */
#include "support.h"
#include "support_threads.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "soft/fabric/ring.h"

/* A ring with both of its ends. */
struct scene {
    struct soft_ring_side sides[2]; /* producer's, consumer's */
    uint8_t *data;
    struct soft_ring_producer producer;
    struct soft_ring_consumer consumer;
};

/* Open a ring whose indices begin at `at`. */
static void open_ring(struct scene *scene, uint32_t at)
{
    int fd = memfd_create("aioverbs-test-ring", MFD_CLOEXEC), i;

    memset(scene, 0, sizeof(*scene));
    REQUIRE(fd >= 0);
    REQUIRE_EQ(ftruncate(fd, SOFT_RING_SIZE), 0);
    scene->data = mmap(NULL, 2 * SOFT_RING_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(scene->data != MAP_FAILED);
    for (i = 0; i < 2; i++)
        REQUIRE(mmap(scene->data + i * SOFT_RING_SIZE, SOFT_RING_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     fd, 0) != MAP_FAILED);
    close(fd);
    atomic_store(&scene->sides[0].tail, at);
    atomic_store(&scene->sides[1].head, at);
    scene->producer = (struct soft_ring_producer){
        .data = scene->data, .own = &scene->sides[0], .peer = &scene->sides[1], .tail = at, .head = at};
    scene->consumer = (struct soft_ring_consumer){
        .data = scene->data, .own = &scene->sides[1], .peer = &scene->sides[0], .head = at, .released = at, .tail = at};
}

static void close_ring(struct scene *scene)
{
    munmap(scene->data, 2 * SOFT_RING_SIZE);
}

static uint8_t byte_at(uint32_t index)
{
    return (uint8_t)(index * 2654435761u >> 24);
}

/* Write up to `size` bytes, in pieces. Return how many were written, as soft_ring_write() does. */
static int32_t write_bytes(struct scene *scene, uint32_t size, unsigned int piece_count)
{
    static uint8_t bytes[2 * SOFT_RING_SIZE];
    struct iovec pieces[4];
    uint32_t i, done = 0;

    for (i = 0; i < size; i++)
        bytes[i] = byte_at(scene->producer.tail + i);
    for (i = 0; i < piece_count; i++) {
        uint32_t part = i + 1 == piece_count ? size - done : size / piece_count;

        pieces[i] = (struct iovec){bytes + done, part};
        done += part;
    }
    return soft_ring_write(&scene->producer, pieces, piece_count);
}

static void read_bytes(struct scene *scene, uint32_t size)
{
    const uint8_t *bytes = soft_ring_bytes(&scene->consumer);
    uint32_t i, wrong = 0;

    for (i = 0; i < size; i++)
        wrong += bytes[i] != byte_at(scene->consumer.head + i);
    CHECK_EQ(wrong, 0);
    scene->consumer.head += size;
}

/* Write and read at random, and compare with a ring that only counts. */
static void bytes_come_in_their_order(void)
{
    static const uint32_t begins[] = {0, 5, UINT32_MAX - 3 * SOFT_RING_SIZE, UINT32_MAX};
    unsigned int state = 7, i, step;

    for (i = 0; i < COUNT_OF(begins); i++) {
        uint32_t written = 0, seen = 0, read = 0, released = 0; /* bytes, since the begin */
        struct scene scene;

        open_ring(&scene, begins[i]);
        for (step = 0; step < 4000; step++) {
            uint32_t size = next_random(&state, 3) ? next_random(&state, 400)
                                                   : next_random(&state, SOFT_RING_SIZE + SOFT_RING_SIZE / 8);
            uint32_t room = SOFT_RING_SIZE - (written - released), available;

            switch (next_random(&state, 4)) {
            case 0:
                CHECK_EQ(write_bytes(&scene, size, 1 + next_random(&state, 4)), size < room ? size : room);
                written += size < room ? size : room;
                break;
            case 1:
                CHECK_EQ(soft_ring_has_news(&scene.consumer), seen != written);
                CHECK(soft_ring_available(&scene.consumer, &available));
                seen = written;
                CHECK_EQ(available, written - read);
                break;
            case 2:
                size = size < seen - read ? size : seen - read;
                read_bytes(&scene, size);
                read += size;
                break;
            default:
                soft_ring_release(&scene.consumer);
                released = read;
                CHECK(soft_ring_room(&scene.producer, &available));
                CHECK_EQ(available, SOFT_RING_SIZE - (written - released));
                break;
            }
        }
        close_ring(&scene);
    }
}

/* A peer's index is accepted exactly where an honest peer may be: no byte is read that was not written, and none is
 * written over that may still be read. */
static void indices_of_a_hostile_peer(void)
{
    static const int32_t differences[] = {INT32_MIN,
                                          -(int32_t)SOFT_RING_SIZE - 1,
                                          -(int32_t)SOFT_RING_SIZE,
                                          -1000,
                                          -1,
                                          0,
                                          1,
                                          500,
                                          SOFT_RING_SIZE / 2,
                                          SOFT_RING_SIZE - 1,
                                          SOFT_RING_SIZE,
                                          SOFT_RING_SIZE + 1,
                                          SOFT_RING_SIZE * 2,
                                          INT32_MAX};
    unsigned int state = 3, step, i;
    uint32_t left, available;

    for (step = 0; step < 40; step++)
        for (i = 0; i < COUNT_OF(differences) + 20; i++) {
            uint32_t begin = next_random(&state, 2) ? 0u - next_random(&state, 2 * SOFT_RING_SIZE) : step;
            int32_t difference = i < COUNT_OF(differences)
                                     ? differences[i]
                                     : (int32_t)next_random(&state, 2 * SOFT_RING_SIZE) - (int32_t)SOFT_RING_SIZE;
            uint32_t filled = next_random(&state, SOFT_RING_SIZE + 1);
            struct scene scene;

            open_ring(&scene, begin);
            CHECK_EQ(write_bytes(&scene, filled, 1), filled);
            CHECK(soft_ring_available(&scene.consumer, &available));
            atomic_fetch_add(&scene.sides[0].tail, (uint32_t)difference);
            atomic_fetch_add(&scene.sides[1].head, (uint32_t)difference);
            left = SOFT_RING_SIZE - filled;
            CHECK_EQ(soft_ring_available(&scene.consumer, &available), difference >= 0 && (uint32_t)difference <= left);
            CHECK_EQ(soft_ring_room(&scene.producer, &available), difference >= 0 && (uint32_t)difference <= filled);
            CHECK(scene.consumer.tail - scene.consumer.released <= SOFT_RING_SIZE);
            CHECK(scene.producer.tail - scene.producer.head <= SOFT_RING_SIZE);
            close_ring(&scene);
        }
}

/* A full ring with an invalid index takes nothing; one with room does not look at it. */
static void an_invalid_index_refuses_writes(void)
{
    struct scene scene;

    open_ring(&scene, 0);
    atomic_store(&scene.sides[1].head, 77);
    CHECK_EQ(write_bytes(&scene, SOFT_RING_SIZE, 1), SOFT_RING_SIZE);
    CHECK_EQ(atomic_load(&scene.sides[0].tail), SOFT_RING_SIZE);
    atomic_store(&scene.sides[1].head, SOFT_RING_SIZE + 1);
    CHECK_EQ(write_bytes(&scene, 1, 1), -1);
    CHECK_EQ(atomic_load(&scene.sides[0].tail), SOFT_RING_SIZE);
    close_ring(&scene);
}

/* The rest of a ring is left out when the ring is empty and its first part was used. */
static void the_rest_is_left_out(void)
{
    uint32_t available, rest, used = SOFT_RING_SPAN + 2000;
    struct scene scene;

    open_ring(&scene, 0);
    CHECK_EQ(write_bytes(&scene, SOFT_RING_SPAN - 1, 1), SOFT_RING_SPAN - 1);
    CHECK(soft_ring_available(&scene.consumer, &available));
    read_bytes(&scene, available);
    soft_ring_release(&scene.consumer);
    CHECK_EQ(soft_ring_rest(&scene.producer, 1), 0); /* not used up */
    CHECK_EQ(write_bytes(&scene, 1, 1), 1);
    CHECK_EQ(soft_ring_rest(&scene.producer, 1), 0); /* not empty */
    CHECK_EQ(write_bytes(&scene, used - SOFT_RING_SPAN, 1), used - SOFT_RING_SPAN);
    CHECK(soft_ring_available(&scene.consumer, &available));
    read_bytes(&scene, available);
    CHECK_EQ(soft_ring_rest(&scene.producer, 1), 0); /* empty, but not known to be */
    soft_ring_release(&scene.consumer);
    CHECK_EQ(soft_ring_rest(&scene.producer, 1), 0); /* known, but just looked at */
    CHECK_EQ(write_bytes(&scene, 1000, 1), 1000);
    CHECK_EQ(soft_ring_rest(&scene.producer, 1), 0);
    CHECK_EQ(write_bytes(&scene, 24, 1), 24);
    CHECK(soft_ring_available(&scene.consumer, &available));
    read_bytes(&scene, available);
    soft_ring_release(&scene.consumer);
    rest = soft_ring_rest(&scene.producer, 1);
    CHECK_EQ(rest, SOFT_RING_SIZE - used - 1024);
    soft_ring_pass(&scene.producer, rest);
    CHECK(soft_ring_available(&scene.consumer, &available));
    CHECK_EQ(available, rest);
    scene.consumer.head += rest;
    CHECK(soft_ring_bytes(&scene.consumer) == scene.data);
    CHECK_EQ(write_bytes(&scene, 100, 1), 100);
    CHECK(soft_ring_available(&scene.consumer, &available));
    read_bytes(&scene, available);
    close_ring(&scene);
}

/* Write bytes and read them. */
static void carry(struct scene *scene, uint32_t size)
{
    uint32_t available;

    CHECK_EQ(write_bytes(scene, size, 1), size);
    CHECK(soft_ring_available(&scene->consumer, &available));
    read_bytes(scene, available);
    soft_ring_release(&scene->consumer);
}

/* After something large, more of a ring is used, once. */
static void large_data_uses_more_of_a_ring(void)
{
    struct scene scene;
    unsigned int lap;

    open_ring(&scene, 0);
    for (lap = 0; lap < 2; lap++) {
        carry(&scene, SOFT_RING_SPAN);
        CHECK_EQ(soft_ring_rest(&scene.producer, SOFT_RING_LARGE), 0);
        carry(&scene, SOFT_RING_LARGE_SPAN - SOFT_RING_SPAN - 1);
        CHECK_EQ(soft_ring_rest(&scene.producer, 1), 0);
        carry(&scene, 1 + SOFT_RING_LARGE);
        CHECK_EQ(soft_ring_rest(&scene.producer, 1), SOFT_RING_SIZE - SOFT_RING_LARGE_SPAN - SOFT_RING_LARGE);
        carry(&scene, SOFT_RING_SIZE - SOFT_RING_LARGE_SPAN - SOFT_RING_LARGE);
        carry(&scene, SOFT_RING_SPAN);
        CHECK_EQ(soft_ring_rest(&scene.producer, 1), SOFT_RING_SIZE - SOFT_RING_SPAN);
        carry(&scene, SOFT_RING_SIZE - SOFT_RING_SPAN);
    }
    close_ring(&scene);
}

/* A wish is answered once, and only if it is for what came. */
static void a_wish_is_answered_once(void)
{
    struct soft_ring_side side = {0};

    CHECK(!soft_ring_answer(&side, SOFT_WANTS_BYTES));
    soft_ring_want(&side, SOFT_WANTS_ROOM);
    CHECK(!soft_ring_answer(&side, SOFT_WANTS_BYTES));
    soft_ring_want(&side, SOFT_WANTS_BYTES);
    soft_ring_unwant(&side, SOFT_WANTS_ROOM);
    CHECK(!soft_ring_answer(&side, SOFT_WANTS_ROOM));
    CHECK(soft_ring_answer(&side, SOFT_WANTS_BYTES));
    CHECK(!soft_ring_answer(&side, SOFT_WANTS_BYTES));
    soft_ring_want(&side, SOFT_WANTS_BYTES | SOFT_WANTS_ROOM);
    CHECK(soft_ring_answer(&side, SOFT_WANTS_ROOM)); /* also of the other wish, so the peer looks at both */
    CHECK(!soft_ring_answer(&side, SOFT_WANTS_BYTES));
}

/* ---- Two threads --------------------------------------------------------------------------------------------- */

/* Messages of a length and as many bytes. Each side sleeps where it finds nothing to do. */
struct one_side {
    struct scene *scene;
    const int *doorbells; /* producer's, consumer's */
    unsigned int messages;
    void (*run)(struct one_side *end);
    unsigned int sleeps, rings;
};

static void ring_bell(struct one_side *end, unsigned int of, uint32_t what)
{
    if (!soft_ring_answer(&end->scene->sides[of], what))
        return;
    end->rings++;
    CHECK_EQ(eventfd_write(end->doorbells[of], 1), 0);
}

/* Sleep until the other side rings. Fail the case if it does not. */
static void sleep_until_rung(struct one_side *end, unsigned int own)
{
    struct pollfd bell = {.fd = end->doorbells[own], .events = POLLIN};
    eventfd_t value;

    end->sleeps++;
    REQUIRE_EQ(poll(&bell, 1, WAIT_S * 1000), 1);
    CHECK_EQ(eventfd_read(end->doorbells[own], &value), 0);
}

static void produce(struct one_side *end)
{
    struct soft_ring_producer *ring = &end->scene->producer;
    static uint8_t message[2048];
    unsigned int state = 5, i;

    for (i = 0; i < end->messages; i++) {
        uint32_t size = 4 + next_random(&state, i % 64 ? 200 : 2000), done = 0, room;

        memset(message, (int)(i & 255), size);
        memcpy(message, &size, 4);
        while (done < size) {
            struct iovec rest = {message + done, size - done};
            int32_t written = soft_ring_write(ring, &rest, 1);

            REQUIRE(written >= 0);
            done += (uint32_t)written;
            if (written)
                ring_bell(end, 1, SOFT_WANTS_BYTES);
            if (done == size)
                break;
            soft_ring_want(ring->own, SOFT_WANTS_ROOM);
            atomic_thread_fence(memory_order_seq_cst);
            REQUIRE(soft_ring_room(ring, &room));
            if (room < SOFT_RING_ROOM)
                sleep_until_rung(end, 0);
        }
    }
}

static void consume(struct one_side *end)
{
    struct soft_ring_consumer *ring = &end->scene->consumer;
    uint32_t available, size, i;
    unsigned int handled = 0;

    while (handled < end->messages) {
        REQUIRE(soft_ring_available(ring, &available));
        for (;;) {
            const uint8_t *bytes = soft_ring_bytes(ring);

            available = ring->tail - ring->head;
            if (available < 4)
                break;
            memcpy(&size, bytes, 4);
            if (available < size)
                break;
            for (i = 4; i < size; i += 64)
                if (bytes[i] != (uint8_t)handled)
                    CHECK_EQ(bytes[i], (uint8_t)handled);
            handled++;
            ring->head += size;
        }
        soft_ring_release(ring);
        if (soft_ring_free(ring) >= SOFT_RING_ROOM)
            ring_bell(end, 0, SOFT_WANTS_ROOM);
        if (handled == end->messages)
            break;
        soft_ring_want(ring->own, SOFT_WANTS_BYTES);
        atomic_thread_fence(memory_order_seq_cst);
        if (!soft_ring_has_news(ring))
            sleep_until_rung(end, 1);
    }
}

static void run_end(void *argument)
{
    struct one_side *end = argument;

    end->run(end);
}

/* A million messages under the thread sanitizer, and no wake-up is lost. */
static void threads_that_sleep(void)
{
    int doorbells[2] = {eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC)};
    struct one_side ends[2];
    struct scene scene;
    unsigned int i;

    open_ring(&scene, UINT32_MAX - 1000);
    for (i = 0; i < 2; i++)
        ends[i] = (struct one_side){
            .scene = &scene, .doorbells = doorbells, .messages = SCALED(2000000), .run = i ? consume : produce};
    run_threads(2, run_end, ends, sizeof(ends[0]));
    CHECK(ends[0].sleeps + ends[1].sleeps >= 1); /* one of them is the faster one */
    CHECK_EQ(scene.consumer.head, scene.producer.tail);
    close_ring(&scene);
    close(doorbells[0]);
    close(doorbells[1]);
}

CHECK_MAIN_ONCE(CASE(bytes_come_in_their_order), CASE(indices_of_a_hostile_peer), CASE(an_invalid_index_refuses_writes),
                CASE(the_rest_is_left_out), CASE(large_data_uses_more_of_a_ring), CASE(a_wish_is_answered_once),
                CASE(threads_that_sleep))
