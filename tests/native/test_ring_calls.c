/* System calls of streams that use rings: frames to a peer that is awake need none; and what calls return that fail
 * seldom. The calls of this thread are counted, or answered, by functions that take the place of glibc's (WRAPPED in
 * build.py). */
#include "support.h"
#include "support_fabric.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/base/memfd.h"
#include "soft/fabric/ring.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"

static _Thread_local unsigned int calls, looks; /* epoll_wait is a look */
static atomic_uint all_calls, all_looks;        /* of all threads */
static atomic_bool held;                        /* fabric threads stay in poll(): they yield to this thread */
static _Thread_local int send_error;            /* send() fails with this errno */
static atomic_bool one_descriptor;              /* sendmsg() fails with more than one descriptor */
static atomic_bool old_kernel;                  /* setsockopt() does not know SO_PASSRIGHTS */
static atomic_bool strict;                      /* vm.overcommit_memory is 2 */
static atomic_bool no_proc;                     /* or cannot be read */
static atomic_bool forks, forked;               /* another thread forks while memory is not yet kept from its child */
static atomic_int flooder = -1;                 /* another byte is sent here whenever one is received */
static unsigned int floods;                     /* bytes that were sent so */

ssize_t __real_send(int fd, const void *from, size_t size, int flags);
ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __real_recv(int fd, void *to, size_t size, int flags);
ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
int __real_eventfd_write(int fd, eventfd_t value);
int __real_eventfd_read(int fd, eventfd_t *value);
int __real_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event);
int __real_epoll_wait(int epoll, struct epoll_event *events, int room, int timeout);
int __real_poll(struct pollfd *fds, nfds_t count, int timeout);
int __real_open(const char *path, int flags, ...);
int __real_madvise(void *memory, size_t size, int advice);
int __real_setsockopt(int fd, int level, int option, const void *value, socklen_t size);
ssize_t __wrap_send(int fd, const void *from, size_t size, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_recv(int fd, void *to, size_t size, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
int __wrap_eventfd_write(int fd, eventfd_t value);
int __wrap_eventfd_read(int fd, eventfd_t *value);
int __wrap_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int room, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout);
int __wrap_open(const char *path, int flags, ...);
int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t size);
int __wrap_madvise(void *memory, size_t size, int advice);

static void count_call(void)
{
    calls++;
    atomic_fetch_add(&all_calls, 1);
}

ssize_t __wrap_send(int fd, const void *from, size_t size, int flags)
{
    count_call();
    if (send_error) {
        errno = send_error;
        return -1;
    }
    return __real_send(fd, from, size, flags);
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    count_call();
    if (atomic_load(&one_descriptor) && message->msg_control &&
        CMSG_FIRSTHDR(message)->cmsg_len > CMSG_LEN(sizeof(int))) {
        errno = ETOOMANYREFS;
        return -1;
    }
    return __real_sendmsg(fd, message, flags);
}

ssize_t __wrap_recv(int fd, void *to, size_t size, int flags)
{
    ssize_t got = __real_recv(fd, to, size, flags);

    count_call();
    if (got > 0 && atomic_load(&flooder) >= 0 && floods < 1000) {
        floods++;
        __real_send(atomic_load(&flooder), "", 1, MSG_DONTWAIT);
    }
    return got;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    count_call();
    return __real_recvmsg(fd, message, flags);
}

int __wrap_eventfd_write(int fd, eventfd_t value)
{
    count_call();
    return __real_eventfd_write(fd, value);
}

int __wrap_eventfd_read(int fd, eventfd_t *value)
{
    count_call();
    return __real_eventfd_read(fd, value);
}

int __wrap_epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    count_call();
    return __real_epoll_ctl(epoll, operation, fd, event);
}

int __wrap_epoll_wait(int epoll, struct epoll_event *events, int room, int timeout)
{
    looks++;
    atomic_fetch_add(&all_looks, 1);
    return __real_epoll_wait(epoll, events, room, timeout);
}

int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout)
{
    int ready;

    count_call();
    do
        ready = __real_poll(fds, count, timeout);
    while (!ready && atomic_load(&held));
    return ready;
}

int __wrap_open(const char *path, int flags, ...)
{
    va_list more;
    mode_t mode;
    int fds[2];

    va_start(more, flags);
    mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (strcmp(path, "/proc/sys/vm/overcommit_memory") || !(atomic_load(&strict) || atomic_load(&no_proc)))
        return __real_open(path, flags, mode);
    if (atomic_load(&no_proc)) {
        errno = EMFILE;
        return -1;
    }
    REQUIRE_EQ(pipe(fds), 0);
    REQUIRE_EQ(write(fds[1], "2\n", 2), 2);
    close(fds[1]);
    return fds[0];
}

int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t size)
{
    if (atomic_load(&old_kernel) && level == SOL_SOCKET && option == 83) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return __real_setsockopt(fd, level, option, value, size);
}

static void *fork_now(void *argument)
{
    pid_t child = fork();

    (void)argument;
    if (!child)
        _exit(0);
    atomic_store(&forked, true);
    REQUIRE(child > 0);
    waitpid(child, NULL, 0);
    return NULL;
}

int __wrap_madvise(void *memory, size_t size, int advice)
{
    pthread_t thread;

    if (advice == MADV_DONTFORK && atomic_exchange(&forks, false)) {
        REQUIRE_EQ(pthread_create(&thread, NULL, fork_now, NULL), 0);
        sleep_us(50000);
        CHECK(!atomic_load(&forked));
        pthread_detach(thread);
    }
    return __real_madvise(memory, size, advice);
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

/* A thread that polls seldom looks at the sockets after a time, not only after many polls: a peer that connects does
 * not wait for those. */
static void sockets_between_rare_polls(void)
{
    uint8_t hello[SOFT_HELLO_SIZE];
    struct pollfd welcome = {.events = POLLIN};
    struct sender sender;
    unsigned int polls;

    open_polled(&sender);
    atomic_store(&held, false);
    soft_mutex_take(&b->device.fabric->progress);
    b->device.fabric->hot_polls = 0;
    soft_mutex_give(&b->device.fabric->progress);
    welcome.fd = raw_connect(b);
    raw_hello(welcome.fd, b, hello);
    for (polls = 0; polls < 64 && __real_poll(&welcome, 1, 0) == 0; polls++) {
        soft_fabric_poll(&b->device, false);
        sleep_us(500);
    }
    CHECK(polls < 40);
    close(welcome.fd);
    close_polled(&sender);
}

/* A connection over a socket, here one in its handshake, does not make each poll of rings a system call. */
static void sockets_beside_rings(void)
{
    struct sender sender;
    unsigned int i;
    int fd;

    open_polled(&sender);
    fd = raw_connect(b);
    while (stats_of(b).streams < 2)
        soft_fabric_poll(&b->device, true);
    looks = 0;
    for (i = 0; i < 128; i++)
        soft_fabric_poll(&b->device, false);
    CHECK_EQ(looks, 128 / 8);
    close(fd);
    close_polled(&sender);
}

/* ---- Calls that fail ----------------------------------------------------------------------------------------- */

/* Open two nodes, and return the sender's end of their stream. */
static struct soft_stream *open_pair(struct sender *sender)
{
    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(sender, a, &b->device.gids[0], 5);
    sender_want(sender, IBV_WR_SEND, 1, 64);
    EVENTUALLY(a->responses == 1);
    return soft_link_stream(sender->link);
}

static void close_pair(struct sender *sender)
{
    sender_close(sender);
    node_close(a);
    node_close(b);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK_EQ(rmdir(directory()), 0);
}

/* A doorbell that could not be sent, for want of memory or because it is not permitted, is sent with the next frame. */
static void a_doorbell_that_fails(void)
{
    static const int errors[] = {ENOBUFS, EPERM};
    struct soft_stream *stream;
    struct sender sender;
    unsigned int i;

    stream = open_pair(&sender);
    for (i = 0; i < COUNT_OF(errors); i++) {
        EVENTUALLY(atomic_load(&stream->ring_out.peer->wants) & SOFT_WANTS_BYTES); /* the peer sleeps */
        send_error = errors[i];
        sender_want(&sender, IBV_WR_SEND, 1, 64);
        send_error = 0;
        CHECK(atomic_load(&stream->ring_out.peer->wants) & SOFT_WANTS_BYTES);
        sender_want(&sender, IBV_WR_SEND, 1, 64);
        EVENTUALLY(a->responses == 2 * i + 3);
    }
    close_pair(&sender);
}

/* A process that forks meanwhile waits until the rings are kept from its child. */
static void a_fork_while_rings_are_mapped(void)
{
    struct sender sender;

    atomic_store(&forks, true);
    open_pair(&sender);
    EVENTUALLY(atomic_load(&forked));
    close_pair(&sender);
}

/* Return why frames do not go through rings, at the sender's end. Links connect in spite of it. */
static const char *open_without_rings(struct sender *sender, struct soft_stream_stats *stats)
{
    open_pair(sender);
    REQUIRE_EQ(soft_fabric_get_streams(&a->device, stats, 1), 1);
    CHECK(stats->connected && !stats->rings);
    close_pair(sender);
    return stats->why_not_rings;
}

/* HELLO is sent without the rings if too many descriptors are on their way. */
static void too_many_descriptors_on_their_way(void)
{
    struct soft_stream_stats stats;
    struct sender sender;

    atomic_store(&one_descriptor, true);
    CHECK(strstr(open_without_rings(&sender, &stats), "raise `ulimit -n`") != NULL);
    atomic_store(&one_descriptor, false);
}

/* Frames go through sockets if the kernel may refuse memory on its first use. */
static void strict_overcommit(void)
{
    struct soft_stream_stats stats;
    struct sender sender;

    atomic_store(&strict, true);
    CHECK(!strcmp(open_without_rings(&sender, &stats), "vm.overcommit_memory is 2, or unknown"));
    atomic_store(&strict, false);
    atomic_store(&no_proc, true);
    CHECK(!strcmp(open_without_rings(&sender, &stats), "vm.overcommit_memory is 2, or unknown"));
    atomic_store(&no_proc, false);
}

/* And if the process may not make a file of their size: a thread that does not block signals would end it. */
static void files_are_limited(void)
{
    struct soft_stream_stats stats;
    struct rlimit before, limit;
    struct sender sender;

    signal(SIGXFSZ, SIG_DFL);
    REQUIRE_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = (struct rlimit){.rlim_cur = SOFT_RINGS_FILE - 1, .rlim_max = before.rlim_max};
    REQUIRE_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_EQ(soft_sealed_create("aioverbs-test", SOFT_RINGS_FILE, F_SEAL_SEAL), -1);
    CHECK_EQ(errno, EFBIG);
    CHECK(strstr(open_without_rings(&sender, &stats), "File too large") != NULL);
    REQUIRE_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

/* ---- Doorbells ----------------------------------------------------------------------------------------------- */

/* Have a peer send doorbells as fast as they are read: a poll ends nevertheless. */
static void doorbells_without_end(void)
{
    struct soft_stream *served;
    struct sender sender;

    open_polled(&sender);
    served = b->device.fabric->streams;
    served->rights = SOFT_RIGHTS_DRAIN; /* as right after the handshake */
    floods = 0;
    atomic_store(&flooder, soft_link_stream(sender.link)->watch.fd);
    CHECK_EQ(__real_send(atomic_load(&flooder), "", 1, 0), 1);
    soft_fabric_poll(&b->device, true);
    CHECK(floods >= 1 && floods < 20);
    atomic_store(&flooder, -1);
    close_polled(&sender);
}

/* Send a doorbell with a descriptor. */
static void send_descriptor(int to)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
    struct iovec piece = {"", 1};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};

    memcpy(CMSG_DATA(&control.header), &to, sizeof(to));
    CHECK_EQ(__real_sendmsg(to, &message, 0), 1);
}

/* A stream that is refused for a doorbell which is read before sleeping is closed, though its socket is empty then. */
static void a_descriptor_among_doorbells(void)
{
    struct soft_fabric *fabric;
    struct sender sender;
    unsigned int i;

    atomic_store(&old_kernel, true); /* it cannot refuse descriptors */
    open_polled(&sender);
    fabric = b->device.fabric;
    soft_mutex_take(&fabric->progress);
    send_descriptor(soft_link_stream(sender.link)->watch.fd);
    soft_rings_disarm(fabric->streams);
    fabric->streams->rung = true;
    CHECK(soft_rings_arm(fabric));
    CHECK(fabric->streams->refusal != NULL);
    soft_mutex_give(&fabric->progress);
    for (i = 0; i < 3; i++)
        soft_fabric_poll(&b->device, false);
    CHECK_EQ(stats_of(b).refused_frames, 1);
    close_polled(&sender);
    atomic_store(&old_kernel, false);
}

/* ---- Many processes ------------------------------------------------------------------------------------------ */

enum { CLIENTS = 64, EACH = 50 };

static struct {
    union ibv_gid gid[2];
    atomic_bool go, quiet;
    atomic_uint finished;
} *shared;

/* Connect, and return how many requests were lost: where processors are busy, the server may give up a handshake that
 * the client takes for complete. */
static unsigned int connect_client(struct sender *sender, uint32_t number)
{
    unsigned int attempt, waited;

    a = node_open();
    sender_open(sender, a, &shared->gid[0], number);
    for (attempt = 0; attempt < WAIT_S && !a->responses; attempt++) {
        sender_want(sender, IBV_WR_SEND, 1, 64);
        if (!sender_finish(sender))
            _exit(1);
        for (waited = 0; waited < 1000 && !a->responses; waited++)
            sleep_us(1000);
    }
    return atomic_load(&sender->sent) - a->responses;
}

/* Be a client: send requests as fast as they are taken, until there have been enough; then be silent. */
static void be_client(uint32_t number)
{
    struct sender sender;
    unsigned int lost;

    while (!atomic_load(&shared->go))
        sleep_us(1000);
    lost = connect_client(&sender, number);
    while (!atomic_load(&shared->quiet)) {
        sender_want(&sender, IBV_WR_SEND, 20, 512); /* of smaller ones, a ring has so many that the rest takes long */
        if (!sender_finish(&sender))
            _exit(1);
    }
    EVENTUALLY(a->responses + lost >= atomic_load(&sender.sent));
    atomic_fetch_add(&shared->finished, 1);
    for (;;)
        pause();
}

static unsigned int fewest_requests(void)
{
    unsigned int i, fewest = UINT32_MAX;

    soft_mutex_take(&b->device.fabric->progress);
    for (i = 0; i < CLIENTS; i++)
        fewest = b->requests_of[i] < fewest ? b->requests_of[i] : fewest;
    soft_mutex_give(&b->device.fabric->progress);
    return fewest;
}

/* Each of many clients is served, while all of them send as fast as they can. Once they are silent, the server makes no
 * call but the one in which it sleeps, which ends once a second, for deadlines. */
static void many_client_processes(void)
{
    pid_t children[CLIENTS];
    unsigned int i;

    new_directory();
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    shared->gid[0] = (union ibv_gid){.raw = {0xfe, 0x80, [15] = 9}};
    shared->gid[1] = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 127, 9, 9, 9}};
    /* Have the table of descriptors grow while there is one thread. Later the kernel would wait for an RCU grace period
     * in the server's accept(), which took 30 s on a busy machine. */
    REQUIRE(dup2(STDIN_FILENO, 8 * CLIENTS) >= 0 && close(8 * CLIENTS) == 0);
    fflush(stdout);
    for (i = 0; i < CLIENTS; i++) {
        children[i] = fork();
        REQUIRE(children[i] >= 0);
        if (!children[i])
            be_client(i);
    }
    b = node_open_at(shared->gid, 0);
    b->of = CLIENTS;
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    atomic_store(&shared->go, true);
    EVENTUALLY(fewest_requests() >= EACH);
    atomic_store(&shared->quiet, true);
    EVENTUALLY(atomic_load(&shared->finished) == CLIENTS);
    CHECK_EQ(stats_of(b).streams, CLIENTS);
    sleep_us(1100000); /* the deadlines of handshakes, and the last doorbells */
    atomic_store(&all_calls, 0);
    atomic_store(&all_looks, 0);
    sleep_us(2000000);
    CHECK_EQ(all_calls, 0);
    CHECK(all_looks <= 3);
    for (i = 0; i < CLIENTS; i++) {
        kill(children[i], SIGKILL);
        CHECK_EQ(waitpid(children[i], NULL, 0), children[i]);
    }
    EVENTUALLY(!stats_of(b).streams);
    CHECK_EQ(b->wrong, 0);
    node_close(b);
    munmap(shared, sizeof(*shared));
    CHECK_EQ(rmdir(directory()), 0);
}

CHECK_MAIN_ONCE(CASE(frames_to_an_awake_peer), CASE(many_frames_to_an_awake_peer), CASE(frames_to_a_peer_that_sleeps),
                CASE(sockets_between_rare_polls), CASE(sockets_beside_rings), CASE(a_doorbell_that_fails),
                CASE(a_fork_while_rings_are_mapped), CASE(too_many_descriptors_on_their_way), CASE(strict_overcommit),
                CASE(files_are_limited), CASE(doorbells_without_end), CASE(a_descriptor_among_doorbells),
                CASE(many_client_processes))
