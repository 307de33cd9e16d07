/* Answers to messages in a ring whose reader sleeps: the doorbell for them is owed, and the next one for a message to
 * the same peer pays for it, or a poll, or the fabric thread, or the end of the stream. The fabric thread of the side
 * that reads yields to this thread, and comes back when the test lets it: poll() is replaced (build.py).
 */
#include "support.h"
#include "support_fabric.h"
#include "support_threads.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/base/address.h"
#include "soft/base/epoch.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/link.h"
#include "soft/fabric/ring.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/stream_rx.h"
#include "soft/objects/comp_channel.h"

static atomic_bool held; /* threads stay in poll(): they yield to this thread */

int __real_poll(struct pollfd *fds, nfds_t count, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout);

int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout)
{
    int ready;

    do
        ready = __real_poll(fds, count, timeout);
    while (!ready && atomic_load(&held));
    return ready;
}

/* The sleeping side, and the one that this thread reads for; a link in each direction. */
static struct node *a, *b;
static struct sender from_a, from_b;
static struct soft_stream *served, *link_of_b; /* of b */
static unsigned int sent, replies;             /* messages of a and of b since both sides are ready */

static void open_nodes(void)
{
    new_directory();
    settings.rings = true;
    settings.spin_ns = 0;
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&a->device), 0);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(&from_a, a, &b->device.gids[0], 5);
    sender_want(&from_a, IBV_WR_SEND, 1, 64);
    EVENTUALLY(a->responses == 1);
}

/* Return whether the peers of a node's streams ring, and no thread of the node is about to look by itself. */
static bool sleeps(struct node *node)
{
    struct soft_fabric *fabric = node->device.fabric;
    struct soft_stream *stream;
    bool asleep;

    soft_mutex_take(&fabric->progress);
    asleep = !fabric->unarmed;
    for (stream = fabric->armed_rings; stream; stream = stream->next_ring)
        asleep = asleep && atomic_load(&stream->ring_in.own->wants) & SOFT_WANTS_BYTES;
    soft_mutex_give(&fabric->progress);
    return asleep;
}

/* Have b's thread yield for good, which it does once a frame has shown it that another thread polls. */
static void hold_thread(void)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    unsigned int before;

    atomic_store(&held, true);
    while (!atomic_load(&b->device.fabric->thread_yields) && now_ns() < end) {
        before = a->responses;
        sender_want(&from_a, IBV_WR_SEND, 1, 64);
        while (a->responses == before && now_ns() < end)
            soft_fabric_poll(&b->device, false);
    }
    CHECK(atomic_load(&b->device.fabric->thread_yields));
}

/* Begin: both sides have a link to the other if `both`, a's sleeps, and no sweep finds what no doorbell tells. */
static void begin(bool both)
{
    unsigned int i;

    if (both) {
        sender_open(&from_b, b, &a->device.gids[0], 6);
        sender_want(&from_b, IBV_WR_SEND, 1, 64);
        EVENTUALLY(b->responses == 1);
        link_of_b = soft_link_stream(from_b.link);
    }
    hold_thread();
    for (i = 0; i < 200; i++) /* past the last look at the sockets */
        soft_fabric_poll(&b->device, false);
    EVENTUALLY(sleeps(a));
    soft_mutex_take(&a->device.fabric->progress);
    atomic_store(&a->device.fabric->sweep_at, UINT64_MAX);
    soft_mutex_give(&a->device.fabric->progress);
    soft_mutex_take(&b->device.fabric->progress);
    for (served = b->device.fabric->streams; served->is_link;)
        served = served->next;
    soft_mutex_give(&b->device.fabric->progress);
    sent = a->responses;
    replies = a->requests;
}

static void finish(bool both)
{
    atomic_store(&held, false);
    sender_close(&from_a);
    if (both)
        sender_close(&from_b);
    node_close(a);
    node_close(b);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK_EQ(rmdir(directory()), 0);
}

/* Have b read a message of a. */
static void read_message(void)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    unsigned int before = b->requests;

    sender_want(&from_a, IBV_WR_SEND, 1, 64);
    sent++;
    while (b->requests == before && now_ns() < end)
        soft_fabric_poll(&b->device, false);
    CHECK_EQ(b->requests, before + 1);
}

static struct soft_stream *payer_of_b(void)
{
    struct soft_stream *payer;

    soft_mutex_take(&b->device.fabric->progress);
    payer = served->payer;
    soft_mutex_give(&b->device.fabric->progress);
    return payer;
}

/* ---- Who pays ------------------------------------------------------------------------------------------------ */

/* A reply pays: one doorbell, with which a reads both. */
static void a_reply(void)
{
    unsigned int i, answers, messages;

    open_nodes();
    begin(true);
    answers = served->doorbells;
    messages = link_of_b->doorbells;
    for (i = 1; i <= 20; i++) {
        EVENTUALLY(sleeps(a));
        read_message();
        CHECK_EQ(payer_of_b() == link_of_b, true);
        sender_want(&from_b, IBV_WR_SEND, 1, 64);
        EVENTUALLY(a->responses == sent && a->requests == replies + i);
        soft_fabric_poll(&b->device, true);
        CHECK(!payer_of_b());
        CHECK_EQ(served->doorbells, answers);
        CHECK_EQ(link_of_b->doorbells, messages + i);
    }
    finish(true);
}

/* Without one, some polls pay, and until then the peer sleeps on: a task may poll before it replies. */
static void polls(void)
{
    unsigned int i, j, answers;

    open_nodes();
    begin(true);
    answers = served->doorbells;
    for (i = 1; i <= 20; i++) {
        EVENTUALLY(sleeps(a));
        read_message();
        for (j = 0; j < 16; j++)
            soft_fabric_poll(&b->device, false);
        CHECK_EQ(served->doorbells, answers + i - 1);
        CHECK(sleeps(a));
        soft_fabric_poll(&b->device, false);
        CHECK_EQ(served->doorbells, answers + i);
        EVENTUALLY(a->responses == sent);
    }
    finish(true);
}

/* Nothing is owed to a peer to which there is no link; its answers are deferred like those to a peer that is awake. */
static void a_poll_without_a_link(void)
{
    open_nodes();
    begin(false);
    read_message();
    CHECK(!payer_of_b());
    soft_fabric_poll(&b->device, false);
    EVENTUALLY(a->responses == sent);
    finish(false);
}

/* A thread that stops polling, to sleep, pays before. */
static void a_thread_that_falls_asleep(void)
{
    struct soft_channel channel = {.channel.fd = epoll_create1(EPOLL_CLOEXEC)};
    unsigned int answers;

    open_nodes();
    begin(true);
    answers = served->doorbells;
    read_message();
    soft_fabric_stop_polling(&b->device, &channel);
    CHECK_EQ(served->doorbells, answers + 1);
    EVENTUALLY(a->responses == sent);
    soft_fabric_drop_wakeup_channel(&b->device, &channel);
    close(channel.channel.fd);
    finish(true);
}

/* The fabric thread pays where this thread does nothing more. */
static void the_fabric_thread(void)
{
    unsigned int answers;

    open_nodes();
    begin(true);
    answers = served->doorbells;
    read_message();
    atomic_store(&held, false);
    EVENTUALLY(a->responses == sent);
    CHECK_EQ(served->doorbells, answers + 1);
    finish(true);
}

/* A message that rings pays for no answer after it: the peer may have looked before. */
static void an_answer_behind_the_reply(void)
{
    unsigned int answers, messages;
    struct keeper keeper;

    open_nodes();
    begin(true);
    REQUIRE(grace_ready());
    answers = served->doorbells;
    messages = link_of_b->doorbells;
    keep_from_reading(a->device.fabric, &keeper);
    read_message();
    sender_want(&from_b, IBV_WR_SEND, 1, 64);
    sender_want(&from_a, IBV_WR_SEND, 1, 64);
    sent++;
    soft_mutex_take(&b->device.fabric->progress);
    CHECK(soft_stream_receive_ring(served)); /* a poll would pay before */
    CHECK_EQ(served->payer == link_of_b && served->owed_at == messages + 1, true);
    soft_mutex_give(&b->device.fabric->progress);
    soft_fabric_poll(&b->device, true);
    CHECK_EQ(link_of_b->doorbells, messages + 1);
    CHECK_EQ(served->doorbells, answers + 1);
    let_read(&keeper);
    EVENTUALLY(a->responses == sent && a->requests == replies + 1);
    finish(true);
}

/* ---- The peer ------------------------------------------------------------------------------------------------ */

/* A peer with many streams looks at those of the one that rang only. */
static void a_peer_with_many_streams(void)
{
    enum { MANY = 20 };
    struct node *others[MANY];
    struct sender senders[MANY];
    unsigned int i;

    open_nodes();
    for (i = 0; i < MANY; i++) {
        others[i] = node_open();
        sender_open(&senders[i], others[i], &a->device.gids[0], 10 + i);
        sender_want(&senders[i], IBV_WR_SEND, 1, 64);
        EVENTUALLY(others[i]->responses == 1);
    }
    begin(true);
    for (i = 1; i <= 10; i++) {
        EVENTUALLY(sleeps(a));
        read_message();
        sender_want(&from_b, IBV_WR_SEND, 1, 64);
        EVENTUALLY(a->responses == sent && a->requests == replies + i);
    }
    for (i = 0; i < MANY; i++) {
        sender_close(&senders[i]);
        node_close(others[i]);
    }
    finish(true);
}

/* A peer that sees the message before the doorbell reads that before it sleeps, and then finds the answer. */
static void a_doorbell_that_is_read_late(void)
{
    struct soft_stream *peer_served, *peer_link;
    struct soft_fabric *fabric;

    open_nodes();
    begin(true);
    REQUIRE(grace_ready());
    fabric = a->device.fabric;
    peer_link = soft_link_stream(from_a.link);
    read_message();
    soft_mutex_take(&fabric->progress);
    for (peer_served = fabric->streams; peer_served->is_link;)
        peer_served = peer_served->next;
    sender_want(&from_b, IBV_WR_SEND, 1, 64);
    CHECK(soft_stream_receive_ring(peer_served));
    CHECK_EQ(a->requests, replies + 1);
    CHECK(peer_link->armed && a->responses == sent - 1);
    CHECK(soft_rings_arm(fabric));
    CHECK(!peer_served->rung && !peer_link->armed);
    soft_mutex_give(&fabric->progress);
    EVENTUALLY(a->responses == sent);
    finish(true);
}

/* ---- Ends ---------------------------------------------------------------------------------------------------- */

static void a_device_that_closes(void)
{
    open_nodes();
    begin(true);
    read_message();
    atomic_store(&held, false);
    sender_close(&from_b);
    node_close(b);
    EVENTUALLY(a->responses == sent);
    sender_close(&from_a);
    node_close(a);
    CHECK_EQ(rmdir(directory()), 0);
}

/* A doorbell that a link was to pay for is sent before the link is freed. */
static void a_link_that_is_freed(void)
{
    struct soft_fabric *fabric;

    open_nodes();
    begin(true);
    fabric = b->device.fabric;
    REQUIRE(grace_ready());
    read_message();
    sender_close(&from_b);
    soft_mutex_take(&fabric->progress);
    CHECK(served->payer == link_of_b);
    soft_links_sweep(fabric, UINT64_MAX);
    CHECK(!served->payer);
    soft_mutex_give(&fabric->progress);
    EVENTUALLY(a->responses == sent);
    finish(false);
}

static void a_fork(void)
{
    pid_t child;

    open_nodes();
    begin(true);
    read_message();
    child = fork();
    REQUIRE(child >= 0);
    if (!child)
        _exit(0);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    CHECK_EQ(payer_of_b() == link_of_b, true);
    soft_fabric_poll(&b->device, true); /* as a loop that wakes up */
    EVENTUALLY(a->responses == sent);
    finish(true);
}

static struct {
    union ibv_gid gids[2][2];
    atomic_bool go;
    atomic_uint answered; /* messages that the child has answered */
} *shared;

/* Be b: read messages until the doorbell for an answer is owed, and die. */
static void be_killed(void)
{
    b = node_open_at(shared->gids[1], 0);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    while (!atomic_load(&shared->go))
        sleep_us(1000);
    sender_open(&from_b, b, &shared->gids[0][0], 6);
    sender_want(&from_b, IBV_WR_SEND, 1, 64);
    EVENTUALLY(b->responses == 1);
    link_of_b = soft_link_stream(from_b.link);
    for (;;) {
        soft_fabric_poll(&b->device, false);
        soft_mutex_take(&b->device.fabric->progress);
        atomic_store(&shared->answered, b->requests);
        for (served = b->device.fabric->streams; served && served->is_link;)
            served = served->next;
        if (served && served->payer)
            kill(getpid(), SIGKILL);
        soft_mutex_give(&b->device.fabric->progress);
    }
}

/* The answers of a process that died are handled, although no doorbell came. */
static void a_process_that_is_killed(void)
{
    char path[100], name[SOFT_GID_NAME];
    bool ended = false;
    unsigned int i;
    pid_t child;
    int status = 0;

    new_directory();
    settings.rings = true;
    settings.spin_ns = 0;
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    shared->gids[0][0] = (union ibv_gid){.raw = {0xfe, 0x80, [15] = 8}};
    shared->gids[0][1] = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 127, 8, 8, 8}};
    shared->gids[1][0] = (union ibv_gid){.raw = {0xfe, 0x80, [15] = 9}};
    shared->gids[1][1] = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 127, 9, 9, 9}};
    fflush(stdout);
    child = fork();
    REQUIRE(child >= 0);
    if (!child)
        be_killed();
    a = node_open_at(shared->gids[0], 0);
    REQUIRE_EQ(soft_fabric_listen(&a->device), 0);
    atomic_store(&shared->go, true);
    EVENTUALLY(a->requests == 1);
    sender_open(&from_a, a, &shared->gids[1][0], 5);
    do {
        sender_want(&from_a, IBV_WR_SEND, 1, 64);
        EVENTUALLY(a->responses == from_a.wanted || (ended = waitpid(child, &status, WNOHANG) == child));
    } while (!ended);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    EVENTUALLY(a->responses == shared->answered);
    sender_close(&from_a);
    node_close(a);
    for (i = 0; i < 2; i++) { /* the killed process left them */
        soft_gid_name(&shared->gids[1][i], name);
        snprintf(path, sizeof(path), "%s/%s", directory(), name);
        unlink(path);
    }
    CHECK_EQ(rmdir(directory()), 0);
    munmap(shared, sizeof(*shared));
}

/* ---- Threads ------------------------------------------------------------------------------------------------- */

static void post_replies(void *argument)
{
    unsigned int i, count = *(unsigned int *)argument;

    for (i = 0; i < count; i++) {
        uint64_t end = now_ns() + WAIT_S * 1000000000ull;

        sender_want(&from_b, IBV_WR_SEND, 1, 64);
        while (a->requests < replies + i + 1 && now_ns() < end)
            sleep_us(i % 40);
        CHECK(a->requests >= replies + i + 1);
    }
}

static void post_and_poll(void *argument)
{
    unsigned int i, count = *(unsigned int *)argument;

    for (i = 0; i < count; i++) {
        uint64_t end = now_ns() + WAIT_S * 1000000000ull;

        sender_want(&from_a, IBV_WR_SEND, 1, 64);
        sent++;
        while (a->responses < sent && now_ns() < end) {
            soft_fabric_poll(&b->device, false);
            if (i % 3)
                sleep_us(i % 30);
        }
        CHECK_EQ(a->responses, sent);
    }
}

static void run_part(void *argument)
{
    struct {
        void (*function)(void *);
        unsigned int count;
    } *part = argument;

    part->function(&part->count);
}

/* One thread reads and owes, another one sends messages that pay: a hears of each answer and of each message. */
static void messages_of_another_thread(void)
{
    struct {
        void (*function)(void *);
        unsigned int count;
    } parts[2] = {{post_replies, SCALED(4000)}, {post_and_poll, SCALED(4000)}};

    open_nodes();
    begin(true);
    run_threads(2, run_part, parts, sizeof(parts[0]));
    finish(true);
}

CHECK_MAIN_ONCE(CASE(a_reply), CASE(polls), CASE(a_poll_without_a_link), CASE(a_thread_that_falls_asleep),
                CASE(the_fabric_thread), CASE(an_answer_behind_the_reply), CASE(a_peer_with_many_streams),
                CASE(a_doorbell_that_is_read_late), CASE(a_device_that_closes), CASE(a_link_that_is_freed),
                CASE(a_fork), CASE(a_process_that_is_killed), CASE(messages_of_another_thread))
