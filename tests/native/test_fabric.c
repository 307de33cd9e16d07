/* Tests of the fabric between devices of one process: frames both ways, slow readers, fair turns, and the thread that
 * reads. */
#include "support.h"
#include "support_fabric.h"
#include "support_threads.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/memfd.h"
#include "soft/fabric/poll_loop.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/stream_rx.h"
#include "soft/objects/comp_channel.h"

static struct node *a, *b;
static unsigned int open_before; /* the first case */

/* Count the gates: memory that peers may write to, each piece a mapping of its own. */
static unsigned int count_gates(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned int count = 0;
    char line[512];

    REQUIRE(maps != NULL);
    while (fgets(line, sizeof(line), maps))
        count += strstr(line, "/dev/zero") != NULL;
    fclose(maps);
    return count;
}

static void open_both(void)
{
    new_directory();
    if (!open_before) /* later, a thread of an earlier case may still be closing some */
        open_before = open_descriptors();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
}

static void close_both(void)
{
    node_close(a);
    node_close(b);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK_EQ(rmdir(directory()), 0); /* nothing is left in it */
    CHECK_EQ(count_gates(), 0);
    EVENTUALLY(open_descriptors() == open_before); /* another thread closes some */
}

static void frames_go_both_ways(void)
{
    static const uint32_t sizes[] = {0, 1, 8, 4096, 65537, SOFT_FRAGMENT};
    struct soft_stream_stats streams[4];
    struct sender sender;
    unsigned int i, expected = 0;
    uint64_t bytes = 0;

    open_both();
    sender_open(&sender, a, &b->device.gids[1], 5);
    for (i = 0; i < COUNT_OF(sizes); i++) {
        sender_want(&sender, IBV_WR_RDMA_WRITE, 20, sizes[i]);
        CHECK(sender_finish(&sender));
        expected += 20;
        bytes += 20ull * sizes[i];
        EVENTUALLY(a->responses == expected);
    }
    CHECK_EQ(b->requests, expected);
    CHECK_EQ(b->bytes, bytes);
    for (i = 0; i < COUNT_OF(sizes); i++) {
        sender_want(&sender, IBV_WR_RDMA_READ, 20, sizes[i]);
        CHECK(sender_finish(&sender));
        expected += 20;
        EVENTUALLY(a->responses == expected);
    }
    CHECK_EQ(a->bytes, bytes);
    CHECK(b->batches >= 1);
    REQUIRE_EQ(soft_fabric_get_streams(&a->device, streams, 4), 1);
    CHECK(streams[0].is_link && streams[0].connected && streams[0].is_unix);
    CHECK_EQ(streams[0].frames_out, expected);
    CHECK_EQ(streams[0].frames_in, expected);
    CHECK_EQ(streams[0].pid, getpid());
    CHECK(!memcmp(streams[0].peer, b->device.gids, 32));
    REQUIRE_EQ(soft_fabric_get_streams(&b->device, streams, 4), 1);
    CHECK(!streams[0].is_link && streams[0].connected);
    CHECK_EQ(streams[0].frames_in, expected);
    CHECK(!memcmp(streams[0].peer, a->device.gids, 32));
    CHECK_EQ(stats_of(b).accepted, 1);
    CHECK(stats_of(b).listening && !stats_of(a).listening);
    sender_close(&sender);
    close_both();
}

/* Both devices connect to each other: there are two streams, and requests and answers are not mixed up. */
static void requests_in_both_directions(void)
{
    struct sender from_a, from_b;

    open_both();
    REQUIRE_EQ(soft_fabric_listen(&a->device), 0);
    sender_open(&from_a, a, &b->device.gids[0], 5);
    sender_open(&from_b, b, &a->device.gids[0], 6);
    sender_want(&from_a, IBV_WR_RDMA_WRITE, 300, SOFT_FRAGMENT);
    sender_want(&from_b, IBV_WR_RDMA_READ, 300, SOFT_FRAGMENT);
    CHECK(sender_finish(&from_a) && sender_finish(&from_b));
    EVENTUALLY(a->responses == 300 && b->responses == 300);
    CHECK_EQ(stats_of(a).streams, 2);
    sender_close(&from_a);
    sender_close(&from_b);
    close_both();
}

/* No device listens there: waiting ends, and a later attempt succeeds. */
static void a_peer_may_come_later(void)
{
    struct sender sender;

    new_directory();
    a = node_open();
    b = node_open();
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    CHECK_EQ(sender.error, ENOTCONN);
    EVENTUALLY(sender.error == EHOSTUNREACH);
    CHECK_EQ(sender.kicks, 1);
    EVENTUALLY(stats_of(a).failed_connects >= 1);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    CHECK(sender_finish(&sender));
    EVENTUALLY(a->responses == 1);
    sender_close(&sender);
    close_both();
}

/* A device that was stopped and listens again is reached again; senders that waited are kicked. */
static void a_peer_may_go_and_come_back(void)
{
    struct soft_stream_stats stream;
    struct sender sender;
    unsigned int round;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    for (round = 0; round < 5; round++) {
        sender_want(&sender, IBV_WR_SEND, 10, 5000);
        CHECK(sender_finish(&sender));
        node_close(b);
        EVENTUALLY(soft_fabric_get_streams(&a->device, &stream, 1) == 1 && !stream.connected);
        CHECK(stream.reason[0]);
        REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    }
    sender_want(&sender, IBV_WR_SEND, 10, 5000);
    CHECK(sender_finish(&sender));
    CHECK_EQ(soft_fabric_get_streams(&a->device, &stream, 1), 1);
    CHECK_EQ(stream.connected_times, 6);
    CHECK_EQ(stats_of(a).lost, 5);
    sender_close(&sender);
    close_both();
}

/* A queue pair whose wait is cancelled is not kicked. */
static void a_cancelled_waiter_is_not_kicked(void)
{
    struct sender sender;

    new_directory();
    a = node_open();
    b = node_open();
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    soft_link_forget(sender.link, &sender.qp);
    grace_wait();
    sender.wanted = 0;
    sender.kicks = 0;
    sleep_us(50000);
    CHECK_EQ(sender.kicks, 0);
    sender_close(&sender);
    close_both();
}

/* ---- Slow readers ---------------------------------------------------------------------------------------- */

/* A peer by hand, which can do what no device does. */
static int welcome_by_hand(struct node *node, int listener)
{
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE], proof[SOFT_PROOF_SIZE];
    struct soft_welcome welcome = {0};
    int fd = accept_by_hand(listener, hello);

    memcpy(welcome.gids, node->device.gids, sizeof(welcome.gids));
    soft_welcome_pack(&welcome, bytes);
    REQUIRE_EQ(write(fd, bytes, sizeof(bytes)), (ssize_t)sizeof(bytes));
    REQUIRE(raw_read(fd, proof, sizeof(proof)));
    return fd;
}

static void sending_waits_for_a_peer_that_does_not_read(void)
{
    struct soft_stream_stats stats;
    uint8_t *frame = malloc(SOFT_FRAME_SIZE + SOFT_FRAGMENT);
    struct soft_directory_entry entry;
    struct sender sender;
    unsigned int i, stuck;
    int listener, fd;

    REQUIRE(frame != NULL);
    new_directory();
    a = node_open();
    b = node_open();
    listener = listen_by_hand(b, &entry);
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 100, SOFT_FRAGMENT);
    fd = welcome_by_hand(b, listener);
    EVENTUALLY(sender.error == EAGAIN);
    sleep_us(20000);
    stuck = sender.sent;
    CHECK(stuck < 20); /* what the socket and one buffer take */
    CHECK_EQ(soft_fabric_get_streams(&a->device, &stats, 1), 1);
    CHECK_EQ(stats.waiting, 1);
    for (i = 0; i < 100; i++) {
        struct soft_frame parsed;

        REQUIRE(raw_read(fd, frame, SOFT_FRAME_SIZE + SOFT_FRAGMENT));
        CHECK(!soft_frame_parse(frame, &parsed));
        CHECK_EQ(parsed.psn, i);
    }
    CHECK(sender_finish(&sender));
    sender_close(&sender);
    node_close(a);
    close(fd);
    soft_directory_unregister(&entry);
    free(frame);
    CHECK_EQ(rmdir(directory()), 0);
}

/* A peer that requests much and reads nothing: the device queues no more than one answer. */
static void a_peer_that_does_not_take_answers_is_not_served(void)
{
    enum { READS = 200 };
    uint8_t *data = malloc(SOFT_FRAME_SIZE + SOFT_FRAGMENT), header[SOFT_FRAME_SIZE];
    unsigned int i, handled;
    int fd;

    REQUIRE(data != NULL);
    open_both();
    fd = raw_open(b);
    for (i = 0; i < READS; i++) {
        struct soft_frame frame = request_frame(IBV_WR_RDMA_READ, 5, i, SOFT_FRAGMENT);

        soft_frame_pack(&frame, header);
        CHECK_EQ(write(fd, header, sizeof(header)), (ssize_t)sizeof(header));
    }
    EVENTUALLY(b->requests >= 1);
    do {
        handled = b->requests;
        sleep_us(50000);
    } while (b->requests != handled);
    CHECK(handled < 10);
    for (i = 0; i < READS; i++) {
        struct soft_frame parsed;

        REQUIRE(raw_read(fd, data, SOFT_FRAME_SIZE + SOFT_FRAGMENT));
        CHECK(!soft_frame_parse(data, &parsed));
        CHECK_EQ(parsed.psn, i);
        CHECK_EQ(parsed.size, SOFT_FRAGMENT);
    }
    EVENTUALLY(b->requests == READS);
    close(fd);
    EVENTUALLY(!stats_of(b).streams);
    free(data);
    close_both();
}

/* The same with a peer that exits meanwhile: senders do not wait for it any more. */
static void a_peer_exits_while_senders_wait(void)
{
    uint8_t header[SOFT_FRAME_SIZE];
    struct soft_frame frame = request_frame(IBV_WR_RDMA_READ, 5, 0, SOFT_FRAGMENT);
    unsigned int i;
    int fd;

    open_both();
    fd = raw_open(b);
    soft_frame_pack(&frame, header);
    for (i = 0; i < 50; i++)
        CHECK_EQ(write(fd, header, sizeof(header)), (ssize_t)sizeof(header));
    EVENTUALLY(b->requests >= 1);
    sleep_us(20000);
    CHECK_EQ(stats_of(b).streams, 1);
    close(fd);
    EVENTUALLY(!stats_of(b).streams);
    close_both();
}

/* ---- Turns ----------------------------------------------------------------------------------------------- */

static void send_in_turns(unsigned int count, unsigned int each, uint32_t size, unsigned int lead)
{
    struct sender *senders = calloc(count, sizeof(*senders));
    unsigned int i;

    REQUIRE(senders != NULL);
    open_both();
    b->of = count;
    for (i = 0; i < count; i++)
        sender_open(&senders[i], a, &b->device.gids[0], i);
    soft_mutex_take(&b->device.fabric->progress); /* no peer is accepted before all wait */
    for (i = 0; i < count; i++)
        sender_want(&senders[i], IBV_WR_RDMA_WRITE, each, size);
    soft_mutex_give(&b->device.fabric->progress);
    for (i = 0; i < count; i++)
        CHECK(sender_finish(&senders[i]));
    EVENTUALLY(b->requests == count * each);
    EVENTUALLY(a->responses == count * each);
    for (i = 0; i < count; i++)
        sender_close(&senders[i]);
    close_both(); /* not written from here on */
    if (!CHECK(b->lead <= lead))
        printf("%u ahead\n", b->lead);
    free(senders);
}

static void large_messages_take_turns(void)
{
    send_in_turns(8, 40, SOFT_FRAGMENT, 4);
}

static void small_messages_take_turns(void)
{
    send_in_turns(16, 2000, 1000, 4 * SOFT_TURN_BYTES / 1096);
}

static void very_many_senders_take_turns(void)
{
    send_in_turns(64, 10, 50000, 6);
}

/* Two peers request much copying with few bytes: neither delays the other until all of it is done. */
static void peers_take_turns(void)
{
    enum { FRAMES = 300 };
    uint8_t frames[2][FRAMES][SOFT_FRAME_SIZE];
    unsigned int peer, i;
    int fds[2];

    open_both();
    atomic_store(&b->deaf, true); /* else one answer at a time is all that there is room for */
    b->of = 2;
    for (peer = 0; peer < 2; peer++) {
        for (i = 0; i < FRAMES; i++) {
            struct soft_frame frame = request_frame(IBV_WR_RDMA_READ, peer, i, SOFT_FRAGMENT);

            soft_frame_pack(&frame, frames[peer][i]);
        }
        fds[peer] = raw_open(b);
        CHECK_EQ(write(fds[peer], frames[peer], SOFT_FRAME_SIZE), SOFT_FRAME_SIZE);
    }
    EVENTUALLY(b->requests == 2);
    soft_mutex_take(&b->device.fabric->progress); /* none is read before all are there */
    for (peer = 0; peer < 2; peer++)
        CHECK_EQ(write(fds[peer], frames[peer][1], (FRAMES - 1) * SOFT_FRAME_SIZE), (FRAMES - 1) * SOFT_FRAME_SIZE);
    soft_mutex_give(&b->device.fabric->progress);
    EVENTUALLY(b->requests == 2 * FRAMES);
    for (peer = 0; peer < 2; peer++)
        close(fds[peer]);
    EVENTUALLY(!stats_of(b).streams);
    close_both();              /* not written from here on */
    if (!CHECK(b->lead <= 20)) /* a MiB for each turn, or two where one was not looked at yet */
        printf("%u ahead\n", b->lead);
}

struct poster {
    struct sender *sender;
    unsigned int count;
};

static void post_many(void *argument)
{
    struct poster *poster = argument;

    sender_want(poster->sender, IBV_WR_RDMA_WRITE, poster->count, 3000);
    CHECK(sender_finish(poster->sender));
}

static void threads_send_over_one_link(void)
{
    enum { POSTERS = 4 };
    static struct sender senders[POSTERS];
    struct poster posters[POSTERS];
    unsigned int i;

    open_both();
    for (i = 0; i < POSTERS; i++) {
        sender_open(&senders[i], a, &b->device.gids[0], i);
        posters[i] = (struct poster){&senders[i], SCALED(2000)};
    }
    run_threads(POSTERS, post_many, posters, sizeof(posters[0]));
    EVENTUALLY(a->responses == POSTERS * SCALED(2000));
    for (i = 0; i < POSTERS; i++)
        sender_close(&senders[i]);
    close_both();
}

/* ---- Reading threads ------------------------------------------------------------------------------------- */

/* A polling thread reads by itself: the fabric thread yields. */
static void polling_threads_read(void)
{
    struct sender sender;
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    bool thread_yields;
    unsigned int i;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    for (i = 1; i <= 500; i++) {
        sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
        while (a->responses < i && now_ns() < end)
            soft_fabric_poll(&a->device, false);
        CHECK_EQ(a->responses, i);
    }
    while (!(thread_yields = atomic_load(&a->device.fabric->thread_yields)) && now_ns() < end)
        soft_fabric_poll(&a->device, false); /* without a pause, so that the fabric thread sees the polls */
    CHECK(thread_yields);
    /* The poller stops without a call: soon the fabric thread reads again. */
    sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
    EVENTUALLY(a->responses == i);
    sender_close(&sender);
    close_both();
}

/* A polling thread sends its own messages before acknowledgements; these follow later, or soon without a call of that
 * thread. Writes are acknowledged at once. */
static void answers_to_messages_are_deferred(void)
{
    uint64_t enough = now_ns() + WAIT_S * 1000000000ull; /* fewer, where others want the processor as well */
    struct sender sender;
    unsigned int i, waited = 0;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    for (i = 1; i <= 8 || (i <= SCALED(400) && now_ns() < enough); i++) {
        enum ibv_wr_opcode opcode = i % 4 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
        uint64_t end = now_ns() + WAIT_S * 1000000000ull;

        do
            soft_fabric_poll(&b->device, false);
        while (!atomic_load(&b->device.fabric->thread_yields) && now_ns() < end);
        sender_want(&sender, opcode, 1, 8);
        while (b->requests < i && now_ns() < end)
            soft_fabric_poll(&b->device, false);
        REQUIRE_EQ(b->requests, i);
        if (opcode == IBV_WR_SEND)
            waited += atomic_load(&b->device.fabric->deferred) != NULL;
        else
            CHECK(!atomic_load(&b->device.fabric->deferred));
        if (i % 4 == 1)
            soft_fabric_poll(&b->device, false);
        EVENTUALLY(a->responses == i);
    }
    CHECK(waited > 0);
    sender_close(&sender);
    close_both();
}

static void the_thread_reads_after_polling_stops(void)
{
    struct sender sender;
    unsigned int i, n;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    for (i = 1; i <= SCALED(400); i++) {
        for (n = 0; n < 40; n++)
            soft_fabric_poll(&a->device, false);
        sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
        soft_fabric_stop_polling(&a->device, NULL);
        soft_fabric_poll(&a->device, false); /* once more, as a thread that arms does */
        EVENTUALLY(a->responses == i);
    }
    sender_close(&sender);
    close_both();
}

/* A thread that sleeps on the wakeup channel is not woken while it cannot read, since another thread does: it would
 * spin. */
static void a_thread_that_cannot_read(void)
{
    struct soft_channel channel = {0};
    struct sender sender;
    struct keeper keeper;

    open_both();
    channel.channel.fd = epoll_create1(EPOLL_CLOEXEC);
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
    EVENTUALLY(a->responses == 1);
    keep_from_reading(a->device.fabric, &keeper);
    soft_fabric_stop_polling(&a->device, &channel);
    CHECK(soft_fabric_is_wakeup_channel(&a->device, &channel));
    CHECK(!is_readable(channel.channel.fd));
    CHECK(soft_fabric_poll(&a->device, true)); /* so the channel is dropped */
    soft_fabric_drop_wakeup_channel(&a->device, &channel);
    sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
    CHECK(!is_readable(channel.channel.fd));
    let_read(&keeper);
    EVENTUALLY(a->responses == 2);
    close(channel.channel.fd);
    sender_close(&sender);
    close_both();
}

struct poller {
    atomic_bool *stop;
};

static void poll_on(void *argument)
{
    struct poller *poller = argument;
    unsigned int n = 0;

    while (!atomic_load(poller->stop)) {
        soft_fabric_poll(&a->device, false);
        if (++n % 64 == 0)
            soft_fabric_stop_polling(&a->device, NULL);
        if (n % 1024 == 0)
            sleep_us(2000);
    }
}

static void poll_or_send(void *argument)
{
    struct poller *poller = argument;
    struct sender sender;

    if (poller->stop) {
        poll_on(argument);
        return;
    }
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_RDMA_READ, SCALED(2000), 3000);
    CHECK(sender_finish(&sender));
    EVENTUALLY(a->responses == SCALED(2000));
    sender_close(&sender);
}

static atomic_bool polled_enough;

static void poll_or_send_and_stop(void *argument)
{
    poll_or_send(argument);
    atomic_store(&polled_enough, true);
}

static void many_threads_poll_at_once(void)
{
    struct poller pollers[4] = {{NULL}, {&polled_enough}, {&polled_enough}, {&polled_enough}};

    atomic_store(&polled_enough, false);
    open_both();
    run_threads(4, poll_or_send_and_stop, pollers, sizeof(pollers[0]));
    close_both();
}

/* An unused link is closed after a while, and connected again when needed. */
static void unused_links_are_closed(void)
{
    struct sender sender;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(a->responses == 1);
    sender_close(&sender);
    CHECK_EQ(stats_of(a).streams, 1); /* not at once */
    EVENTUALLY(!stats_of(a).streams);
    CHECK_EQ(soft_fabric_get_streams(&a->device, NULL, 0), 0);
    EVENTUALLY(!stats_of(b).streams);
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(a->responses == 2);
    sender_close(&sender);
    close_both();
}

/* ---- What networks do -------------------------------------------------------------------------------------- */

static uint64_t times_connected(void)
{
    struct soft_stream_stats stream = {.connected_times = 0};

    CHECK_EQ(soft_fabric_get_streams(&a->device, &stream, 1), 1);
    return stream.connected_times;
}

static bool sends_one(struct sender *sender)
{
    sender_want(sender, IBV_WR_SEND, 1, 8);
    return sender_finish(sender);
}

static void connections_are_cut(void)
{
    struct sender sender;
    unsigned int round;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    for (round = 1; round <= 12; round++) {
        struct node *who = round % 2 ? a : b, *from = round % 2 ? b : a;

        sender_want(&sender, IBV_WR_RDMA_WRITE, 50, SOFT_FRAGMENT);
        EVENTUALLY(times_connected() == round);
        EVENTUALLY(stats_of(b).streams == 1);
        CHECK_EQ(soft_fabric_cut(&who->device, round % 3 ? NULL : &from->device.gids[round % 4 / 2]), 1);
        CHECK(sender_finish(&sender)); /* what it was told is on its way may be lost */
        EVENTUALLY(sends_one(&sender) && times_connected() == round + 1);
    }
    CHECK_EQ(soft_fabric_cut(&a->device, &a->device.gids[0]), 0); /* it has no connection with itself */
    sender_close(&sender);
    close_both();
}

static void a_peer_falls_silent(void)
{
    struct sender sender;
    unsigned int before;

    open_both();
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(a->responses == 1);
    CHECK_EQ(soft_fabric_stall(&b->device, &a->device.gids[1], true), 1);
    before = b->requests;
    sender_want(&sender, IBV_WR_SEND, 100, SOFT_FRAGMENT);
    sleep_us(20000);
    CHECK_EQ(b->requests, before);
    CHECK(sender.sent < 20);
    CHECK_EQ(sender.error, EAGAIN);
    CHECK_EQ(soft_fabric_stall(&b->device, NULL, false), 1);
    CHECK(sender_finish(&sender));
    EVENTUALLY(a->responses == 101);
    CHECK_EQ(soft_fabric_stall(&b->device, &b->device.gids[0], true), 0); /* no device has that GID */
    sender_close(&sender);
    close_both();
}

/* ---- Files of the owner --------------------------------------------------------------------------------------- */

static bool is_mapped(const struct soft_link *link, uint32_t number, uint64_t length)
{
    const struct soft_read_cache_owner *owner = atomic_load(&link->read_cache_owner);
    struct soft_read_cache_entry entry = {0};
    bool mapped;

    REQUIRE(owner != NULL);
    REQUIRE(soft_read_cache_note(link, 17 << 8, 5, &entry));
    entry.length = length;
    soft_read_cache_map(link, &entry, number);
    mapped = entry.memory;
    if (mapped)
        CHECK(entry.memory[length - 1] == 0xa5);
    soft_read_cache_clear(&entry, 1);
    CHECK(!entry.memory && !entry.owner_serial);
    return mapped;
}

/* A file that the owner of memory names is mapped only if it is sealed, small and long enough. */
static void only_sealed_small_files_are_mapped(void)
{
    struct sender sender;
    int pipes[2], sockets[2], fd, unsealed;
    uint8_t byte = 0xa5, got = 0;
    unsigned int i, before;

    open_both();
    sender_open(&sender, a, &b->device.gids[1], 5);
    sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
    CHECK(sender_finish(&sender));
    EVENTUALLY(a->responses == 1);
    if (!atomic_load(&sender.link->read_cache_owner)) { /* this host forbids it */
        sender_close(&sender);
        close_both();
        return;
    }
    fd = soft_sealed_create("aioverbs-test", 8192, 0);
    REQUIRE(fd >= 0 && !pipe(pipes) && !socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    REQUIRE(write(sockets[0], &byte, 1) == 1);
    unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(unsealed >= 0 && !ftruncate(unsealed, 8192) && !fcntl(unsealed, F_ADD_SEALS, F_SEAL_GROW));
    for (i = 4095; i < 8192; i += 4096)
        REQUIRE(pwrite(fd, &byte, 1, i) == 1 && pwrite(unsealed, &byte, 1, i) == 1);
    before = open_descriptors();
    CHECK(is_mapped(sender.link, (uint32_t)fd, 8192));
    CHECK(is_mapped(sender.link, (uint32_t)fd, 4096));
    CHECK(!is_mapped(sender.link, (uint32_t)fd, 8193));
    CHECK(!is_mapped(sender.link, (uint32_t)fd, UINT64_MAX));
    CHECK(!is_mapped(sender.link, (uint32_t)unsealed, 4096));
    CHECK(!is_mapped(sender.link, (uint32_t)pipes[0], 4096));
    CHECK(!is_mapped(sender.link, (uint32_t)sockets[1], 4096));
    CHECK(!is_mapped(sender.link, UINT32_MAX, 4096));
    close(fd);
    CHECK(!is_mapped(sender.link, (uint32_t)fd, 4096));
    fd = soft_sealed_create("aioverbs-test", (4 << 20) + 4096, 0); /* too large */
    REQUIRE(fd >= 0);
    CHECK(!is_mapped(sender.link, (uint32_t)fd, 4096));
    EVENTUALLY(open_descriptors() == before);             /* those of other kinds are closed by a thread */
    CHECK(read(sockets[1], &got, 1) == 1 && got == byte); /* which does nothing else to them */
    CHECK(write(sockets[1], &byte, 1) == 1);
    close(sockets[0]);
    close(sockets[1]);
    soft_descriptor_close(fd);
    close(unsealed);
    close(pipes[0]);
    close(pipes[1]);
    sender_close(&sender);
    close_both();
}

/* ---- The end of the process ----------------------------------------------------------------------------------- */

static struct {
    atomic_bool ready;
    struct soft_link *link;
    int error;
} asked;

/* Look for another link, as a sender of datagrams does, while the device is halted. */
static void *ask_for_a_way(void *argument)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    struct grace_reader *grace;

    REQUIRE(grace_ready());
    grace = grace_enter();
    atomic_store(&asked.ready, true);
    while (soft_fabric_has_begun(&a->device) && now_ns() < end)
        sched_yield();
    asked.link = soft_link_get(&a->device, &b->device.gids[1]);
    asked.error = errno;
    grace_leave(grace);
    return argument;
}

static void halting_does_not_wait_for_senders(void)
{
    struct sender sender;
    pthread_t thread;

    open_both();
    sender_open(&sender, a, &b->device.gids[1], 5);
    sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
    CHECK(sender_finish(&sender));
    EVENTUALLY(a->responses == 1);
    REQUIRE(atomic_load(&sender.link->read_cache_owner) != NULL); /* no thread may be reading by it when it is freed */
    sender_close(&sender);
    atomic_store(&asked.ready, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, ask_for_a_way, NULL), 0);
    EVENTUALLY(atomic_load(&asked.ready));
    soft_fabric_halt(&a->device);
    REQUIRE_EQ(pthread_join(thread, NULL), 0);
    CHECK(asked.link == NULL);
    CHECK_EQ(asked.error, ECANCELED);
    /* Senders may still write to the eventfd: its number must not be another file's. */
    CHECK(fcntl(a->device.fabric->wake.fd, F_GETFD) >= 0);
    close_both();
    CHECK_EQ(a->device.fabric->wake.fd, -1);
}

static struct {
    atomic_bool expected; /* the next stream to end is ended by soft_fabric_halt() */
    atomic_bool started;  /* soft_fabric_halt() ends that stream */
    atomic_bool held;     /* another thread holds the lock of links */
} halting;

static atomic_bool unwatchable; /* the next descriptor to be watched cannot be */

int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    if (operation == EPOLL_CTL_ADD && atomic_exchange(&unwatchable, false)) {
        errno = ENOSPC;
        return -1;
    }
    if (operation == EPOLL_CTL_DEL && atomic_exchange(&halting.expected, false)) {
        atomic_store(&halting.started, true);
        EVENTUALLY(atomic_load(&halting.held));
    }
    return (int)syscall(SYS_epoll_ctl, epoll, operation, fd, event);
}

/* Hold the lock of links while another thread halts the fabric, and check that the link does not change meanwhile. */
static void *hold_links(void *argument)
{
    struct soft_link *link = argument;
    struct soft_fabric *fabric = link->stream.fabric;

    EVENTUALLY(atomic_load(&halting.started));
    soft_mutex_take(&fabric->links);
    link->unused_since = 17;
    atomic_store(&halting.held, true);
    sleep_us(50000);
    CHECK_EQ(link->unused_since, 17);
    soft_mutex_give(&fabric->links);
    return NULL;
}

static void halting_waits_for_the_lock_of_links(void)
{
    struct soft_link *link;
    pthread_t thread;
    int fd;

    open_both();
    REQUIRE_EQ(soft_fabric_listen(&a->device), 0);
    link = soft_link_get(&a->device, &b->device.gids[0]);
    REQUIRE(link != NULL);
    fd = raw_open(a);
    atomic_store(&halting.started, false);
    atomic_store(&halting.held, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, hold_links, link), 0);
    atomic_store(&halting.expected, true);
    soft_fabric_halt(&a->device);
    REQUIRE_EQ(pthread_join(thread, NULL), 0);
    soft_link_put(link);
    close(fd);
    close_both();
}

/* ---- Kicks -------------------------------------------------------------------------------------------------- */

/* A thread that polls consumes wakeups for other reasons, but not the request that the fabric thread stop. */
static void polling_leaves_the_stop_request_to_the_thread(void)
{
    struct soft_watch wake = {.what = SOFT_WATCH_WAKE};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &wake};
    struct soft_fabric *fabric;

    open_both();
    wake.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fabric = a->device.fabric; /* whose thread does not run */
    fabric->wake.fd = wake.fd;
    soft_mutex_take(&fabric->progress);
    soft_fabric_wake(fabric);
    soft_fabric_handle_events(fabric, &event, 1);
    CHECK(!is_readable(wake.fd));
    soft_fabric_wake(fabric);
    atomic_store(&fabric->stop, true);
    soft_fabric_handle_events(fabric, &event, 1);
    CHECK(is_readable(wake.fd));
    atomic_store(&fabric->stop, false);
    soft_mutex_give(&fabric->progress);
    fabric->wake.fd = -1;
    close(wake.fd);
    close_both();
}

/* soft_fabric_poll() returns whether there was anything, so that the caller can poll again; also if a turn ended among
 * frames that had been read. */
static void polling_reports_whether_anything_came(void)
{
    enum { FRAMES = 600 };
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 0, 0);
    static uint8_t bytes[FRAMES][SOFT_FRAME_SIZE];
    unsigned int i, before, turns = 0;
    struct soft_fabric *fabric;
    struct soft_stream *stream;
    bool something;
    int fd;

    open_both();
    REQUIRE(grace_ready());
    fabric = b->device.fabric;
    fd = raw_open(b);
    EVENTUALLY(stats_of(b).accepted == 1);
    for (i = 0; i < FRAMES; i++)
        soft_frame_pack(&frame, bytes[i]);
    soft_mutex_take(&fabric->progress);
    stream = fabric->streams;
    CHECK_EQ(send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL), (ssize_t)sizeof(bytes));
    do {
        before = b->requests;
        something = soft_stream_receive(stream);
        CHECK_EQ(something, b->requests > before);
    } while (something && ++turns < FRAMES);
    CHECK(turns > 1);
    CHECK_EQ(b->requests, FRAMES);
    soft_mutex_give(&fabric->progress);
    close(fd);
    EVENTUALLY(!stats_of(b).streams);
    close_both();
}

/* A socket that cannot be watched is closed, and makes no stream. */
static void a_socket_that_cannot_be_watched_is_refused(void)
{
    struct soft_stream *stream = calloc(1, sizeof(*stream));
    struct soft_fabric *fabric;
    int fd;

    REQUIRE(stream != NULL);
    open_both();
    fabric = b->device.fabric;
    REQUIRE_EQ(soft_stream_init(stream, fabric, false), 0);
    soft_descriptors_hold();
    fd = soft_descriptor_own(open("/dev/null", O_RDONLY | O_CLOEXEC));
    soft_descriptors_release();
    soft_mutex_take(&fabric->progress);
    CHECK_EQ(soft_stream_begin(stream, fd, false, SOFT_GREETING), EPERM);
    CHECK(fcntl(fd, F_GETFD) < 0);
    CHECK(!fabric->streams);
    soft_mutex_give(&fabric->progress);
    soft_stream_destroy(stream);
    free(stream);
    close_both();
}

static void a_peer_that_cannot_be_watched_is_refused(void)
{
    int fd;

    open_both();
    atomic_store(&unwatchable, true);
    fd = raw_connect(b);
    CHECK(raw_is_closed(fd));
    close(fd);
    EVENTUALLY(stats_of(b).refused_peers == 1);
    CHECK(last_reason_is(b, "no memory for another peer"));
    CHECK_EQ(stats_of(b).streams, 0);
    fd = raw_open(b);
    EVENTUALLY(stats_of(b).accepted == 1);
    close(fd);
    EVENTUALLY(!stats_of(b).streams);
    close_both();
}

static atomic_int accept_error; /* errno with which accepting fails, or 0 */
static atomic_uint failed_accepts;

int accept4(int listener, struct sockaddr *address, socklen_t *size, int flags)
{
    int error = atomic_load(&accept_error), (*real)(int, struct sockaddr *, socklen_t *, int);

    if (!error) {
        *(void **)&real = dlsym(RTLD_NEXT, "accept4"); /* no system call: ThreadSanitizer is to see it, too */
        return real(listener, address, size, flags);
    }
    atomic_fetch_add(&failed_accepts, 1);
    errno = error;
    return -1;
}

/* While the process or the host has nothing left for another connection, it waits; the thread tries again at times, and
 * not all the time. */
static void connections_wait_for_descriptors(void)
{
    static const int errors[] = {EMFILE, ENFILE, ENOMEM, ENOBUFS};
    size_t i;

    open_both();
    for (i = 0; i < COUNT_OF(errors); i++) {
        struct soft_fabric *fabric = b->device.fabric;
        uint64_t before = stats_of(b).refused_peers;
        int fd;

        atomic_store(&failed_accepts, 0);
        atomic_store(&accept_error, errors[i]);
        fd = raw_connect(b);
        EVENTUALLY(stats_of(b).refused_peers > before);
        CHECK(last_reason_is(b, "no descriptors are left"));
        sleep_us(10000);
        CHECK(failed_accepts <= 5); /* the first, and one in each sweep that was due */
        atomic_store(&accept_error, 0);
        atomic_store(&fabric->sweep_at, 0); /* otherwise up to a second passes until it tries again */
        soft_fabric_wake(fabric);
        EVENTUALLY(stats_of(b).streams == 1);
        close(fd);
        EVENTUALLY(!stats_of(b).streams);
    }
    close_both();
}

CHECK_MAIN_ONCE(CASE(polling_leaves_the_stop_request_to_the_thread), CASE(polling_reports_whether_anything_came),
                CASE(a_socket_that_cannot_be_watched_is_refused), CASE(a_peer_that_cannot_be_watched_is_refused),
                CASE(connections_wait_for_descriptors), CASE(frames_go_both_ways), CASE(requests_in_both_directions),
                CASE(a_peer_may_come_later), CASE(a_peer_may_go_and_come_back), CASE(a_cancelled_waiter_is_not_kicked),
                CASE(sending_waits_for_a_peer_that_does_not_read),
                CASE(a_peer_that_does_not_take_answers_is_not_served), CASE(a_peer_exits_while_senders_wait),
                CASE(large_messages_take_turns), CASE(small_messages_take_turns), CASE(very_many_senders_take_turns),
                CASE(peers_take_turns), CASE(threads_send_over_one_link), CASE(polling_threads_read),
                CASE(answers_to_messages_are_deferred), CASE(the_thread_reads_after_polling_stops),
                CASE(a_thread_that_cannot_read), CASE(many_threads_poll_at_once), CASE(unused_links_are_closed),
                CASE(connections_are_cut), CASE(a_peer_falls_silent), CASE(halting_does_not_wait_for_senders),
                CASE(only_sealed_small_files_are_mapped), CASE(halting_waits_for_the_lock_of_links))
