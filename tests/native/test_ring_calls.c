/* System calls of threads that poll: frames to a peer that is awake need none. The calls of this thread are counted by
 * functions that take the place of glibc's (WRAPPED in build.py). */
#include "support.h"
#include "support_fabric.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/fabric/ring.h"
#include "soft/fabric/stream.h"

static _Thread_local unsigned int calls, looks; /* epoll_wait without waiting is a look */
static atomic_bool held;                        /* fabric threads stay in poll(): they yield to this thread */

ssize_t __real_send(int fd, const void *from, size_t size, int flags);
ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __real_recv(int fd, void *to, size_t size, int flags);
ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
int __real_eventfd_write(int fd, eventfd_t value);
int __real_eventfd_read(int fd, eventfd_t *value);
int __real_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event);
int __real_epoll_wait(int epoll, struct epoll_event *events, int room, int timeout);
int __real_poll(struct pollfd *fds, nfds_t count, int timeout);
ssize_t __wrap_send(int fd, const void *from, size_t size, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_recv(int fd, void *to, size_t size, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
int __wrap_eventfd_write(int fd, eventfd_t value);
int __wrap_eventfd_read(int fd, eventfd_t *value);
int __wrap_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int room, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout);

ssize_t __wrap_send(int fd, const void *from, size_t size, int flags)
{
    calls++;
    return __real_send(fd, from, size, flags);
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    calls++;
    return __real_sendmsg(fd, message, flags);
}

ssize_t __wrap_recv(int fd, void *to, size_t size, int flags)
{
    calls++;
    return __real_recv(fd, to, size, flags);
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    calls++;
    return __real_recvmsg(fd, message, flags);
}

int __wrap_eventfd_write(int fd, eventfd_t value)
{
    calls++;
    return __real_eventfd_write(fd, value);
}

int __wrap_eventfd_read(int fd, eventfd_t *value)
{
    calls++;
    return __real_eventfd_read(fd, value);
}

int __wrap_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    calls++;
    return __real_epoll_ctl(epoll, operation, fd, event);
}

int __wrap_epoll_wait(int epoll, struct epoll_event *events, int room, int timeout)
{
    looks++;
    return __real_epoll_wait(epoll, events, room, timeout);
}

int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout)
{
    int ready;

    calls++;
    do
        ready = __real_poll(fds, count, timeout);
    while (!ready && atomic_load(&held));
    return ready;
}

static struct node *a, *b;

static void poll_both(void)
{
    soft_fabric_poll(&a->device, false);
    soft_fabric_poll(&b->device, false);
}

/* Poll until the responses to all requests that were sent have come. */
static void finish(struct sender *sender)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (a->responses < atomic_load(&sender->sent) && now_ns() < end)
        poll_both();
    CHECK_EQ(a->responses, sender->sent);
}

/* Send requests, while this thread polls both devices and their threads yield to it. */
static void open_polled(struct sender *sender)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    unsigned int i;

    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(sender, a, &b->device.gids[0], 5);
    sender_want(sender, IBV_WR_SEND, 1, 64);
    EVENTUALLY(a->responses == 1);
    atomic_store(&held, true);
    while (!(atomic_load(&a->device.fabric->thread_yields) && atomic_load(&b->device.fabric->thread_yields)) &&
           now_ns() < end) {
        sender_want(sender, IBV_WR_SEND, 1,
                    64); /* a frame wakes a thread that sleeps, and shows it that another polls */
        finish(sender);
    }
    CHECK(atomic_load(&a->device.fabric->thread_yields) && atomic_load(&b->device.fabric->thread_yields));
    /* The last frame may have come before a thread asked to be woken: that is answered by the next one, and once the
     * sockets are looked at, the doorbells are read. */
    sender_want(sender, IBV_WR_SEND, 1, 64);
    finish(sender);
    for (i = 0; i < 200; i++)
        poll_both();
}

static void close_polled(struct sender *sender)
{
    atomic_store(&held, false);
    sender_close(sender);
    node_close(a);
    node_close(b);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK_EQ(rmdir(directory()), 0);
}

/* No system call for a frame in either direction, however large; only the look at the sockets, with every 64th poll. */
static void frames_to_an_awake_peer(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    static const uint32_t sizes[] = {0, 64, 4096, SOFT_FRAGMENT};
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    unsigned int i, j, polls;
    struct sender sender;

    open_polled(&sender);
    for (i = 0; i < COUNT_OF(opcodes); i++)
        for (j = 0; j < COUNT_OF(sizes); j++) {
            unsigned int k;

            calls = looks = 0;
            for (k = 0, polls = 0; k < 128; k++) {
                sender_want(&sender, opcodes[i], 1, sizes[j]);
                do {
                    poll_both();
                    polls++;
                } while (a->responses < atomic_load(&sender.sent) && now_ns() < end);
            }
            CHECK_EQ(calls, 0);
            CHECK(looks <= 2 * (polls / 64 + 1));
        }
    close_polled(&sender);
}

/* Nor for many frames at a time, which queue up in the ring. */
static void many_frames_to_an_awake_peer(void)
{
    struct sender sender;
    unsigned int i;

    open_polled(&sender);
    calls = 0;
    for (i = 0; i < 20; i++) {
        sender_want(&sender, IBV_WR_SEND, 100, 64);
        finish(&sender);
    }
    CHECK_EQ(calls, 0);
    close_polled(&sender);
}

/* A peer that sleeps is woken by one call for any number of frames, until it has looked. */
static void frames_to_a_peer_that_sleeps(void)
{
    struct sender sender;
    unsigned int before;

    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 64);
    EVENTUALLY(a->responses == 1);
    soft_mutex_take(&b->device.fabric->progress); /* its thread does not get to look */
    before = calls;
    sender_want(&sender, IBV_WR_SEND, 100, 64);
    CHECK_EQ(sender.sent, 101);
    CHECK(calls - before <= 1);
    soft_mutex_give(&b->device.fabric->progress);
    EVENTUALLY(a->responses == 101);
    sender_close(&sender);
    node_close(a);
    node_close(b);
    CHECK_EQ(rmdir(directory()), 0);
}

CHECK_MAIN_ONCE(CASE(frames_to_an_awake_peer), CASE(many_frames_to_an_awake_peer), CASE(frames_to_a_peer_that_sleeps))
