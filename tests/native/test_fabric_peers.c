/* Tests of faulty and hostile peers: each is refused, counted, and its reason recorded; others are not affected. */
#include "support.h"
#include "support_fabric.h"
#include "support_fork.h"
#include "support_kernel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "soft/base/fork_fds.h"
#include "soft/fabric/stream.h"

static struct node *a, *b;
static struct sender honest; /* an honest peer that must not be affected */

static void open_all(void)
{
    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(&honest, a, &b->device.gids[0], 5);
    sender_want(&honest, IBV_WR_SEND, 1, 100);
    EVENTUALLY(a->responses == 1);
}

static void close_all(void)
{
    unsigned int before = a->responses;

    sender_want(&honest, IBV_WR_SEND, 10, 100);
    EVENTUALLY(a->responses == before + 10);
    CHECK_EQ(stats_of(a).lost + stats_of(a).refused_peers + stats_of(a).refused_frames, 0);
    sender_close(&honest);
    node_close(a);
    node_close(b);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK_EQ(rmdir(directory()), 0);
}

static void expect_refused(int fd, const char *reason, uint64_t peers, uint64_t frames, struct check_place place)
{
    check_true(raw_is_closed(fd), place, "closed");
    check_true(last_reason_is(b, reason), place, reason);
    check_equal((long long)stats_of(b).refused_peers, (long long)peers, place, "refused peers", "as expected");
    check_equal((long long)stats_of(b).refused_frames, (long long)frames, place, "refused frames", "as expected");
    close(fd);
}

/* ---- The handshake --------------------------------------------------------------------------------------- */

static void peers_that_do_not_speak_the_protocol(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE];
    struct soft_hello said = {.flags = 0};
    struct soft_welcome welcome;
    int fd;

    open_all();
    fd = raw_connect(b);
    CHECK_EQ(send(fd, "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL), 16); /* the rest is not waited for */
    expect_refused(fd, "not a device of aioverbs", 1, 0, HERE);

    /* Another version gets an answer, and is recorded; its HELLO may be shorter than this version's. */
    fd = raw_connect(b);
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    hello[8] = hello[9] = 255;
    CHECK_EQ(send(fd, hello, SOFT_HEAD_SIZE, MSG_NOSIGNAL), SOFT_HEAD_SIZE);
    CHECK(raw_read(fd, bytes, sizeof(bytes)));
    CHECK(soft_welcome_parse(bytes, &welcome) == soft_refusal_text(SOFT_REFUSED_VERSION));
    expect_refused(fd, "protocol version 65535, not 3: use the same release of aioverbs on both sides", 2, 0, HERE);

    /* A peer that looks for another device is refused, too. */
    fd = raw_connect(b);
    said.wanted[15] ^= 1;
    soft_hello_pack(&said, hello);
    CHECK_EQ(send(fd, hello, sizeof(hello), MSG_NOSIGNAL), SOFT_HELLO_SIZE);
    CHECK(raw_read(fd, bytes, sizeof(bytes)));
    CHECK(soft_welcome_parse(bytes, &welcome) == soft_refusal_text(SOFT_REFUSED_GID));
    expect_refused(fd, "the GID to connect to", 3, 0, HERE);

    /* A proof that is none. */
    fd = raw_connect(b);
    raw_hello(fd, b, hello);
    CHECK(raw_read(fd, bytes, sizeof(bytes)));
    memset(bytes, 9, SOFT_PROOF_SIZE);
    CHECK_EQ(send(fd, bytes, SOFT_PROOF_SIZE, MSG_NOSIGNAL), SOFT_PROOF_SIZE);
    expect_refused(fd, "not a device of aioverbs", 4, 0, HERE);

    /* A connection that is closed during the handshake counts as lost, not as refused. */
    fd = raw_connect(b);
    CHECK_EQ(send(fd, hello, 50, MSG_NOSIGNAL), 50);
    close(fd);
    EVENTUALLY(stats_of(b).streams == 1);
    CHECK_EQ(stats_of(b).refused_peers, 4);
    close_all();
}

/* The handshake may arrive in any pieces. */
static void handshake_in_small_pieces(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE], rest[SOFT_PROOF_SIZE + SOFT_FRAME_SIZE + 50];
    static const uint8_t none[SOFT_DIGEST];
    struct soft_hello said = {.flags = 0};
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 3, 50);
    size_t i;
    int fd;

    open_all();
    fd = raw_connect(b);
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    for (i = 0; i < sizeof(hello); i++) {
        CHECK_EQ(send(fd, hello + i, 1, MSG_NOSIGNAL), 1);
        sleep_us(100);
    }
    CHECK(raw_read(fd, welcome, sizeof(welcome)));
    soft_proof_pack(none, rest);
    soft_frame_pack(&frame, rest + SOFT_PROOF_SIZE);
    fill_pattern(rest + SOFT_PROOF_SIZE + SOFT_FRAME_SIZE, 50, 3);
    for (i = 0; i < sizeof(rest); i += 3) {
        size_t part = sizeof(rest) - i < 3 ? sizeof(rest) - i : 3;

        CHECK_EQ(send(fd, rest + i, part, MSG_NOSIGNAL), (ssize_t)part);
        sleep_us(100);
    }
    EVENTUALLY(b->requests == 2);
    close(fd);
    close_all();
}

/* Send descriptors with one byte, or with none if `byte` is NULL. Return whether they were sent: the kernel may refuse
 * them for the receiver. */
static bool send_with_descriptors_as(int flags, int fd, void *byte, int passed, unsigned int count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(8 * sizeof(int))];
    } control = {.header = {CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec piece = {byte, byte != NULL};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(count * sizeof(int))};

    REQUIRE(count <= 8);
    while (count--)
        memcpy(CMSG_DATA(&control.header) + count * sizeof(int), &passed, sizeof(passed));
    if (sendmsg(fd, &message, MSG_NOSIGNAL | flags) == (ssize_t)piece.iov_len)
        return true;
    CHECK_EQ(errno, EPERM);
    return false;
}

static bool send_with_descriptors(int fd, void *byte, int passed, unsigned int count)
{
    return send_with_descriptors_as(0, fd, byte, passed, count);
}

/* Unexpected descriptors are closed, and the stream with them: in HELLO, after it, and in data that is not read any
 * more. */
static void unexpected_descriptors(void)
{
    unsigned int before, each;
    uint8_t hello[SOFT_HELLO_SIZE];
    struct soft_hello said = {.flags = 0};
    int fd;

    if (!kernel_closes_what_finds_no_room())
        return;
    open_all();
    before = open_descriptors();
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    for (each = 1; each <= 8; each++) {
        fd = raw_connect(b);
        CHECK(send_with_descriptors(fd, hello, fd, each));
        CHECK(raw_is_closed(fd));
        CHECK(last_reason_is(b, "unexpected descriptors came"));
        close(fd);
        EVENTUALLY(open_descriptors() == before);
        fd = raw_open(b);
        CHECK(!send_with_descriptors(fd, hello, STDERR_FILENO, each) || raw_is_closed(fd));
        close(fd);
        EVENTUALLY(open_descriptors() == before);
    }
    close_all();
}

/* A received socket is closed with all descriptors queued in it, also those without data. */
static void descriptors_without_data(void)
{
    static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    struct soft_hello said = {.flags = 0};
    uint8_t hello[SOFT_HELLO_SIZE];
    unsigned int before, i;
    int fd, ends[2];

    open_all();
    before = open_descriptors();
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    for (i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        REQUIRE_EQ(socketpair(AF_UNIX, types[i] | SOCK_CLOEXEC, 0, ends), 0);
        CHECK(send_with_descriptors(ends[0], types[i] == SOCK_STREAM ? hello : NULL, STDERR_FILENO, 8));
        close(ends[0]);
        fd = raw_connect(b);
        CHECK(send_with_descriptors(fd, hello, ends[1], 1));
        close(ends[1]);
        CHECK(raw_is_closed(fd));
        close(fd);
        EVENTUALLY(open_descriptors() == before);
    }
    close_all();
}

/* A socket whose last close takes longer than any test. */
static int lingering(int *other)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    static const struct linger for_long = {1, 3 * WAIT_S};
    static const int room = 4096; /* which grows to what is sent otherwise */
    socklen_t size = sizeof(address);
    static uint8_t data[65536];

    REQUIRE_EQ(bind(listener, (struct sockaddr *)&address, size), 0);
    REQUIRE_EQ(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room)), 0);
    REQUIRE_EQ(listen(listener, 1), 0);
    REQUIRE_EQ(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    REQUIRE_EQ(connect(fd, (struct sockaddr *)&address, size), 0);
    *other = accept(listener, NULL, NULL);
    REQUIRE(*other >= 0);
    close(listener);
    while (send(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
        ;
    REQUIRE_EQ(setsockopt(fd, SOL_SOCKET, SO_LINGER, &for_long, sizeof(for_long)), 0);
    return fd;
}

/* Descriptors whose last close blocks delay no other peer, wherever they come. */
static void descriptors_whose_close_waits(void)
{
    enum { GREETING, SEVERAL, OUT_OF_BAND, OPEN, UNREAD, WAYS };
    static const union ibv_gid stranger = {.raw = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7}}; /* raw_hello's */
    struct soft_hello said = {.flags = 0};
    uint8_t hello[SOFT_HELLO_SIZE];
    struct soft_directory_entry listener;
    struct node *nobody;
    unsigned int before, way;
    int fd, passed, other;
    uint64_t begin;
    bool sent;

    if (!kernel_closes_what_finds_no_room())
        return;
    open_all();
    before = open_descriptors();
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    for (way = GREETING; way < WAYS; way++) {
        fd = way < OPEN ? raw_connect(b) : raw_open(b);
        if (way >= OPEN) /* what is behind PROOF comes later */
            EVENTUALLY(stats_of(b).accepted == way - 1);
        if (way == UNREAD)
            CHECK_EQ(soft_fabric_stall(&b->device, &stranger, true), 1);
        passed = lingering(&other);
        soft_mutex_take(&b->device.fabric->progress); /* it is read when no other one is left */
        sent = send_with_descriptors_as(way == OUT_OF_BAND ? MSG_OOB : 0, fd, hello, passed, way == SEVERAL ? 8 : 1);
        CHECK(sent || way >= OPEN);
        if (!sent)
            CHECK_EQ(setsockopt(passed, SOL_SOCKET, SO_LINGER, &(struct linger){0}, sizeof(struct linger)), 0);
        close(passed); /* the last one is on its way */
        soft_mutex_give(&b->device.fabric->progress);
        if (way == UNREAD)
            CHECK_EQ(soft_fabric_cut(&b->device, &stranger), 1);
        CHECK(!sent || raw_is_closed(fd));
        close(fd);
        sender_want(&honest, IBV_WR_SEND, 1, 100);
        EVENTUALLY(a->responses == 2 + way);
        EVENTUALLY(open_descriptors() == before + 1);
        close(other);
    }
    /* One that was not accepted before the listener is closed. */
    nobody = node_open();
    listen_by_hand(nobody, &listener);
    fd = raw_connect(nobody);
    passed = lingering(&other);
    CHECK(send_with_descriptors(fd, hello, passed, 1));
    close(passed);
    begin = now_ns();
    soft_directory_unregister(&listener);
    CHECK(now_ns() - begin < 2 * WAIT_S * 1000000000ull);
    close(fd);
    close(other);
    node_close(nobody);
    EVENTUALLY(open_descriptors() == before); /* the other thread is done */
    close_all();
}

/* Descriptors beyond the process's limit are closed by the kernel, when their message is read. */
static void descriptors_that_find_no_room(void)
{
    struct rlimit before, none;
    uint8_t byte = 0;
    int fd, passed, other;
    unsigned int open;

    open_all();
    open = open_descriptors();
    fd = raw_connect(b);
    EVENTUALLY(stats_of(b).streams == 2);
    passed = lingering(&other);
    REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){3, before.rlim_max};
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    soft_mutex_take(&b->device.fabric->progress);
    CHECK(send_with_descriptors(fd, &byte, passed, 8));
    close(passed);
    soft_mutex_give(&b->device.fabric->progress);
    CHECK(raw_is_closed(fd));
    sender_want(&honest, IBV_WR_SEND, 1, 100);
    EVENTUALLY(a->responses == 2);
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK(last_reason_is(b, "ulimit -n"));
    close(fd);
    close(other);
    EVENTUALLY(open_descriptors() == open);
    close_all();
}

/* The same for connections that cannot be accepted for want of descriptors when the device stops listening. */
static void descriptors_that_are_not_accepted(void)
{
    struct rlimit before, none;
    struct soft_directory_entry listener;
    unsigned int open;
    struct node *node;
    uint8_t byte = 0;
    int fd, passed, other;
    uint64_t begin;

    open_all();
    node = node_open();
    open = open_descriptors();
    listen_by_hand(node, &listener);
    fd = raw_connect(node);
    passed = lingering(&other);
    CHECK(send_with_descriptors(fd, &byte, passed, 1));
    close(passed);
    REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){3, before.rlim_max};
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    begin = now_ns();
    soft_directory_unregister(&listener);
    CHECK(now_ns() - begin < 2 * WAIT_S * 1000000000ull);
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    close(fd);
    close(other);
    EVENTUALLY(open_descriptors() == open);
    node_close(node);
    close_all();
}

/* Make the thread that closes descriptors wait until the other end is closed. */
static void hold_up_closing(int *other)
{
    int ends[2], passed = lingering(other);

    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends), 0);
    CHECK(send_with_descriptors(ends[0], NULL, passed, 1));
    close(passed);
    close(ends[0]);
    soft_descriptor_discard(ends[1]);
    EVENTUALLY(fcntl(ends[1], F_GETFD) < 0);
}

/* While the closing thread waits, no new connection can add another descriptor. */
static void accepting_pauses_while_descriptors_wait_to_be_closed(void)
{
    int other, fd;
    uint8_t byte = 0;
    unsigned int before, open;

    if (!kernel_closes_what_finds_no_room())
        return;
    open_all();
    before = open_descriptors();
    hold_up_closing(&other);
    while (!soft_descriptors_are_stuck()) {
        fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        REQUIRE(fd >= 0);
        soft_descriptor_discard(fd);
    }
    open = open_descriptors();
    fd = raw_connect(b);
    CHECK(send_with_descriptors(fd, &byte, STDERR_FILENO, 8));
    EVENTUALLY(last_reason_is(b, "descriptors that a peer sent cannot be closed"));
    CHECK_EQ(open_descriptors(), open + 1);
    close(other);
    CHECK(raw_is_closed(fd)); /* its turn has come */
    CHECK(last_reason_is(b, "unexpected descriptors came"));
    close(fd);
    EVENTUALLY(open_descriptors() == before);
    close_all();
}

/* The last close of a large file frees its pages, also those behind its end: another thread does that. That thread is
 * blocked here, so that the file stays. */
static void closing_a_large_file_does_not_delay_peers(void)
{
    static const struct {
        off_t pages; /* bytes of them */
        int seals;
        bool stays;
    } files[] = {{4096, F_SEAL_SHRINK | F_SEAL_GROW, false},
                 {4096, 0, true}, /* it may have grown by then */
                 {8 << 20, F_SEAL_SHRINK | F_SEAL_GROW, true}};
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE];
    unsigned int before, open, i, stay = 0;
    struct soft_hello said = {.flags = 0};
    int other, passed, fd;

    open_all();
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    before = open_descriptors();
    hold_up_closing(&other);
    open = open_descriptors();
    for (i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        fd = raw_connect(b);
        passed = memfd_create("large", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        REQUIRE_EQ(ftruncate(passed, 4096), 0);
        REQUIRE_EQ(fallocate(passed, FALLOC_FL_KEEP_SIZE, 0, files[i].pages), 0);
        REQUIRE_EQ(fcntl(passed, F_ADD_SEALS, files[i].seals), 0);
        CHECK(send_with_descriptors(fd, hello, passed, 1));
        CHECK_EQ(send(fd, hello + 1, sizeof(hello) - 1, MSG_NOSIGNAL), SOFT_HELLO_SIZE - 1);
        CHECK(raw_read(fd, welcome, sizeof(welcome))); /* it is let in, whatever it brought */
        close(fd);
        close(passed);
        EVENTUALLY(stats_of(b).streams == 1);
        stay += files[i].stays;
        CHECK_EQ(open_descriptors(), open + stay);
    }
    fd = raw_connect(b);
    passed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    for (i = 0; i < 2; i++)
        CHECK(send_with_descriptors(fd, hello + i, passed, 1));
    EVENTUALLY(last_reason_is(b, "unexpected descriptors came")); /* one of them is enough */
    close(fd);
    close(passed);
    close(other);
    EVENTUALLY(open_descriptors() == before);
    close_all();
}

/* Descriptors queued in a socket that is being closed are not all open at once. */
static void descriptors_of_one_message_at_a_time(void)
{
    enum { MESSAGES = 5, EACH = 8 };
    int ends[2], first[2], passed, other;
    unsigned int open, i;
    struct pollfd hung_up = {.events = 0};
    uint8_t byte = 0;

    REQUIRE_EQ(soft_descriptors_watch_forks(), 0);
    open = open_descriptors();
    passed = lingering(&other);
    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, first), 0);
    CHECK(send_with_descriptors(first[0], NULL, passed, 1));
    close(passed);
    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    for (i = 0; i < MESSAGES; i++)
        CHECK(send_with_descriptors(ends[0], &byte, i ? STDERR_FILENO : first[1], EACH));
    close(first[1]);
    close(ends[0]);
    soft_descriptor_discard(ends[1]);
    hung_up.fd = first[0];
    CHECK_EQ(poll(&hung_up, 1, WAIT_S * 1000), 1);
    /* All of the first message were closed, the last one of which waits for what is in it. */
    CHECK_EQ(open_descriptors(), open + 3); /* ends[1], first[0], other */
    close(other);
    close(first[0]);
    EVENTUALLY(open_descriptors() == open);
}

/* With a kernel that cannot refuse descriptors, a peer of the same user is read with one call, which reports
 * descriptors only where the data comes with some. */
static void reading_where_descriptors_may_come(void)
{
    unsigned int open;
    bool unwanted = false;
    uint8_t byte = 7, bytes[4];
    int ends[2];

    REQUIRE_EQ(soft_descriptors_watch_forks(), 0);
    open = open_descriptors();
    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    CHECK_EQ(soft_descriptors_receive_discarding(ends[1], bytes, sizeof(bytes), &unwanted), -1);
    CHECK(errno == EAGAIN && !unwanted);
    CHECK_EQ(send(ends[0], &byte, 1, 0), 1);
    CHECK_EQ(soft_descriptors_receive_discarding(ends[1], bytes, sizeof(bytes), &unwanted), 1);
    CHECK(bytes[0] == 7 && !unwanted);
    CHECK(send_with_descriptors(ends[0], &byte, STDERR_FILENO, 3));
    CHECK_EQ(soft_descriptors_receive_discarding(ends[1], bytes, sizeof(bytes), &unwanted), 1);
    CHECK(unwanted);
    unwanted = false;
    close(ends[0]);
    CHECK_EQ(soft_descriptors_receive_discarding(ends[1], bytes, sizeof(bytes), &unwanted), 0);
    CHECK(!unwanted);
    close(ends[1]);
    EVENTUALLY(open_descriptors() == open);
}

/* ---- Probing for a listener ------------------------------------------------------------------------------ */

/* A listener that has sent a descriptor by the time the connecting side continues. */
static int listener = -1, sent_at_once;

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    uint8_t byte = 0;
    int accepted;

    if (syscall(SYS_connect, fd, address, size))
        return -1;
    if (address->sa_family != AF_UNIX || listener < 0)
        return 0;
    accepted = accept(listener, NULL, NULL);
    REQUIRE(accepted >= 0);
    CHECK(send_with_descriptors(accepted, &byte, sent_at_once, 1));
    close(sent_at_once);
    close(accepted);
    listener = -1;
    return 0;
}

static void probing_a_live_listener_does_not_block(void)
{
    struct soft_directory_entry listening, none;
    unsigned int open;
    char why[256];
    uint64_t begin;
    int other;

    new_directory();
    a = node_open();
    listen_by_hand(a, &listening);
    open = open_descriptors();
    sent_at_once = lingering(&other);
    listener = listening.fd;
    begin = now_ns();
    CHECK_EQ(soft_directory_register(&settings, a->device.gids, &none, why, sizeof(why)), EADDRINUSE);
    CHECK(now_ns() - begin < 2 * WAIT_S * 1000000000ull);
    CHECK_EQ(listener, -1);
    EVENTUALLY(open_descriptors() == open + 1);
    close(other);
    soft_directory_unregister(&listening);
    node_close(a);
    CHECK_EQ(rmdir(directory()), 0);
}

static void is_not_stuck(void *argument)
{
    (void)argument;
    EVENTUALLY(!soft_descriptors_are_stuck());
}

/* The parent's closing thread is busy; the child, which inherited the descriptors, has no such thread. */
static void a_child_closes_what_waits_to_be_closed(void)
{
    int ends[2], other, passed, fd;

    if (UNDER_TSAN) /* the child of a process with threads starts none */
        return;
    REQUIRE_EQ(soft_descriptors_watch_forks(), 0);
    passed = lingering(&other);
    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends), 0);
    CHECK(send_with_descriptors(ends[0], NULL, passed, 1));
    close(passed);
    close(ends[0]);
    soft_descriptor_discard(ends[1]); /* whose close waits for the one in it */
    EVENTUALLY(fcntl(ends[1], F_GETFD) < 0);
    while (!soft_descriptors_are_stuck()) {
        fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        REQUIRE(fd >= 0);
        soft_descriptor_discard(fd);
    }
    in_child(is_not_stuck, NULL);
    CHECK(soft_descriptors_are_stuck());
    close(other);
    EVENTUALLY(!soft_descriptors_are_stuck());
}

/* ---- Frames ---------------------------------------------------------------------------------------------- */

static void send_frame(int fd, const struct soft_frame *frame)
{
    uint8_t bytes[SOFT_FRAME_SIZE];

    soft_frame_pack(frame, bytes);
    CHECK_EQ(send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL), SOFT_FRAME_SIZE);
}

static void invalid_frames(void)
{
    struct soft_frame frame;
    uint8_t garbage[1000];
    int fd;

    open_all();
    fd = raw_open(b);
    memset(garbage, 0xee, sizeof(garbage));
    CHECK_EQ(send(fd, garbage, sizeof(garbage), MSG_NOSIGNAL), (ssize_t)sizeof(garbage));
    expect_refused(fd, "out of range", 0, 1, HERE);

    fd = raw_open(b); /* more than anybody keeps memory for */
    frame = request_frame(IBV_WR_SEND, 6, 0, 100);
    frame.size = frame.part = frame.total = SOFT_FRAGMENT + 4096;
    send_frame(fd, &frame);
    expect_refused(fd, "a part is too long", 0, 2, HERE);

    fd = raw_open(b); /* an answer, where requests come */
    frame = (struct soft_frame){.kind = SOFT_FRAME_RESPONSE, .to = 5, .from = 6};
    send_frame(fd, &frame);
    expect_refused(fd, "does not belong on this side", 0, 3, HERE);

    fd = raw_open(b); /* bytes to skip, which only rings have */
    frame = (struct soft_frame){.kind = SOFT_FRAME_SKIP};
    send_frame(fd, &frame);
    expect_refused(fd, "does not belong on this side", 0, 4, HERE);

    fd = raw_open(b); /* directly, which was not agreed on */
    frame = request_frame(IBV_WR_RDMA_WRITE, 6, 0, 100);
    frame.flags |= SOFT_FRAME_DIRECT;
    frame.segments = 1;
    frame.size = SOFT_SEGMENT_SIZE;
    send_frame(fd, &frame);
    expect_refused(fd, "not negotiated", 0, 5, HERE);

    fd = raw_open(b); /* what a queue pair finds wrong */
    frame = request_frame(IBV_WR_SEND_WITH_INV, 6, 0, 0);
    send_frame(fd, &frame);
    expect_refused(fd, "nobody here invalidates", 0, 6, HERE);
    CHECK_EQ(b->requests, 1);
    close_all();
}

/* The batch of a refused stream ends, too: its coalesced acknowledgement is not sent on the next stream. */
static void a_batch_ends_where_its_stream_is_refused(void)
{
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 0, 0);
    uint8_t bytes[2 * SOFT_FRAME_SIZE];
    int fd;

    open_all();
    fd = raw_open(b);
    soft_frame_pack(&frame, bytes);
    memset(bytes + SOFT_FRAME_SIZE, 0xee, SOFT_FRAME_SIZE);
    CHECK_EQ(b->batches, 1);
    CHECK_EQ(send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL), (ssize_t)sizeof(bytes));
    expect_refused(fd, "out of range", 0, 1, HERE);
    CHECK_EQ(b->requests, 2);
    CHECK_EQ(b->batches, 2);
    close_all();
}

/* An incomplete frame is not handled when the peer closes the connection. */
static void half_frames(void)
{
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 0, 5000);
    uint8_t bytes[SOFT_FRAME_SIZE + 4999];
    int fd;

    open_all();
    fd = raw_open(b);
    soft_frame_pack(&frame, bytes);
    fill_pattern(bytes + SOFT_FRAME_SIZE, 4999, 0);
    CHECK_EQ(send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL), (ssize_t)sizeof(bytes));
    sleep_us(10000);
    CHECK_EQ(stats_of(b).streams, 2);
    close(fd);
    EVENTUALLY(stats_of(b).streams == 1);
    CHECK_EQ(b->requests, 1);
    CHECK_EQ(stats_of(b).refused_frames, 0);
    close_all();
}

/* The last reasons are recorded, the oldest first; all are counted. */
static void reasons_are_kept(void)
{
    struct soft_fabric_stats stats;
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 0, 0);
    unsigned int i;
    int fd;

    open_all();
    for (i = 0; i < SOFT_FABRIC_EVENTS + 3; i++) {
        fd = raw_open(b);
        frame.kind = i == SOFT_FABRIC_EVENTS + 2 ? 0 : SOFT_FRAME_RESPONSE;
        send_frame(fd, &frame);
        CHECK(raw_is_closed(fd));
        close(fd);
    }
    EVENTUALLY(stats_of(b).refused_frames == SOFT_FABRIC_EVENTS + 3);
    stats = stats_of(b);
    CHECK_EQ(stats.events, SOFT_FABRIC_EVENTS);
    CHECK(strstr(stats.event[SOFT_FABRIC_EVENTS - 1].reason, "kind of frame is unknown") != NULL);
    CHECK(strstr(stats.event[0].reason, "reserved field") != NULL);
    for (i = 0; i < SOFT_FABRIC_EVENTS; i++) {
        CHECK_EQ(stats.event[i].peer[3], 7); /* as raw_hello says */
        CHECK(!i || stats.event[i].time_ns >= stats.event[i - 1].time_ns);
    }
    close_all();
}

/* ---- Secrets --------------------------------------------------------------------------------------------- */

static struct node *node_with(const char *secret)
{
    struct node *node;

    settings.secret_size = secret ? strlen(secret) : 0;
    memcpy(settings.secret, secret ? secret : "", settings.secret_size);
    node = node_open();
    settings.secret_size = 0;
    return node;
}

static void meet(const char *of_a, const char *of_b, const char *reason_a, const char *reason_b)
{
    struct sender sender;

    new_directory();
    a = node_with(of_a);
    b = node_with(of_b);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 100);
    if (!reason_a) {
        CHECK(sender_finish(&sender));
        EVENTUALLY(a->responses == 1);
    } else {
        EVENTUALLY(sender.error == EHOSTUNREACH);
        CHECK(last_reason_is(a, reason_a));
        CHECK_EQ(stats_of(a).refused_peers, 1);
        if (reason_b) {
            EVENTUALLY(last_reason_is(b, reason_b));
            CHECK_EQ(stats_of(b).refused_peers, 1);
        }
        CHECK_EQ(b->requests, 0);
    }
    sender_close(&sender);
    node_close(a);
    node_close(b);
    CHECK_EQ(rmdir(directory()), 0);
}

static void secrets(void)
{
    meet("open sesame", "open sesame", NULL, NULL);
    meet("open sesame", "open Sesame", "has another secret", "has another secret");
    meet("open sesame", NULL, "AIOVERBS_SOFT_SECRET", "AIOVERBS_SOFT_SECRET");
    meet(NULL, "open sesame", "AIOVERBS_SOFT_SECRET", "AIOVERBS_SOFT_SECRET");
}

/* The connecting side proves first, and learns nothing before that would help to guess the secret. */
static void the_connecting_side_proves_first(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE], proof[SOFT_DIGEST], expected[SOFT_DIGEST];
    uint8_t message[SOFT_PROOF_SIZE + SOFT_FRAME_SIZE];
    static const uint8_t zeroes[SOFT_DIGEST];
    struct soft_hello said = {.flags = SOFT_HELLO_SECRET};
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 0, 0);
    int right, fd;

    new_directory();
    b = node_with("open sesame");
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    for (right = 0; right < 2; right++) {
        fd = raw_connect(b);
        CHECK_EQ(send(fd, hello, sizeof(hello), MSG_NOSIGNAL), SOFT_HELLO_SIZE);
        CHECK(raw_read(fd, bytes, sizeof(bytes)));
        CHECK(!memcmp(bytes + sizeof(bytes) - SOFT_DIGEST, zeroes, SOFT_DIGEST));
        soft_prove(SOFT_ROLE_CONNECTING, "open sesame", right ? 11 : 10, hello, bytes, proof);
        soft_proof_pack(proof, message);
        soft_frame_pack(&frame, message + SOFT_PROOF_SIZE);
        CHECK_EQ(send(fd, message, sizeof(message), MSG_NOSIGNAL), (ssize_t)sizeof(message));
        if (right) {
            EVENTUALLY(b->requests == 1);
            CHECK(raw_read(fd, message, SOFT_PROOF_SIZE));
            CHECK(!soft_proof_parse(message, proof));
            soft_prove(SOFT_ROLE_ACCEPTING, "open sesame", 11, hello, bytes, expected);
            CHECK(soft_digest_equal(proof, expected));
            close(fd);
        } else {
            CHECK(raw_read(fd, message, SOFT_PROOF_SIZE));
            CHECK(!soft_proof_parse(message, proof) && soft_digest_equal(proof, zeroes));
            expect_refused(fd, "has another secret", 1, 0, HERE);
            CHECK_EQ(b->requests, 0);
        }
    }
    node_close(b);
    CHECK_EQ(rmdir(directory()), 0);
}

/* ---- Accepting side -------------------------------------------------------------------------------------- */

/* A sender for a node whose GIDs lead to a listener by hand. */
static struct sender looking;
static struct soft_directory_entry entry;

static int be_found(const char *secret, uint8_t hello[SOFT_HELLO_SIZE])
{
    new_directory();
    a = node_with(secret);
    b = node_open();
    listen_by_hand(b, &entry);
    sender_open(&looking, a, &b->device.gids[0], 5);
    sender_want(&looking, IBV_WR_SEND, 1, 0);
    return accept_by_hand(entry.fd, hello);
}

static void be_lost(int fd)
{
    close(fd);
    sender_close(&looking);
    node_close(a);
    node_close(b);
    soft_directory_unregister(&entry);
    CHECK_EQ(rmdir(directory()), 0);
}

static void say_welcome(int fd, struct soft_welcome *welcome, uint8_t bytes[SOFT_WELCOME_SIZE])
{
    memcpy(welcome->gids, b->device.gids, sizeof(welcome->gids));
    soft_welcome_pack(welcome, bytes);
    CHECK_EQ(send(fd, bytes, SOFT_WELCOME_SIZE, MSG_NOSIGNAL), SOFT_WELCOME_SIZE);
}

/* A message of another version may have any size, but begins like that of all versions. */
static void a_peer_of_another_version(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE];
    struct soft_welcome welcome = {.flags = 0};
    int fd = be_found(NULL, hello);

    soft_welcome_pack(&welcome, bytes);
    bytes[8] = 2;
    bytes[9] = 1;
    CHECK_EQ(send(fd, bytes, SOFT_HEAD_SIZE, MSG_NOSIGNAL), SOFT_HEAD_SIZE);
    EVENTUALLY(looking.error == EHOSTUNREACH);
    CHECK(last_reason_is(a, "protocol version 258, not 3: use the same release"));
    CHECK(raw_is_closed(fd));
    be_lost(fd);
}

/* Nothing is sent to a peer that got a proof and has sent none. */
static void a_peer_that_does_not_prove(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE], message[SOFT_PROOF_SIZE], proof[SOFT_DIGEST];
    static const char secret[] = "open sesame";
    int right;

    for (right = 0; right < 2; right++) {
        struct soft_welcome welcome = {.flags = SOFT_HELLO_SECRET};
        int fd = be_found(secret, hello);

        say_welcome(fd, &welcome, bytes);
        CHECK(raw_read(fd, message, sizeof(message)));
        CHECK_EQ(stats_of(a).connected, 0);
        soft_prove(SOFT_ROLE_ACCEPTING, secret, right ? 11 : 10, hello, bytes, proof);
        soft_proof_pack(proof, message);
        CHECK_EQ(send(fd, message, sizeof(message), MSG_NOSIGNAL), SOFT_PROOF_SIZE);
        if (right) {
            uint8_t frame[SOFT_FRAME_SIZE];

            CHECK(raw_read(fd, frame, sizeof(frame)));
            CHECK_EQ(stats_of(a).connected, 1);
        } else {
            EVENTUALLY(looking.error == EHOSTUNREACH);
            CHECK(last_reason_is(a, "has another secret"));
            CHECK(!raw_read(fd, message, 1));
        }
        be_lost(fd);
    }
}

/* Descriptor 0 is valid. */
static void the_process_of_a_peer_has_the_first_number(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE];
    struct soft_hello said = {.flags = SOFT_HELLO_DIRECT};
    struct soft_stream_stats streams[2];
    int fd, before;

    open_all();
    fd = raw_connect(b);
    EVENTUALLY(stats_of(b).streams == 2);
    before = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
    close(STDIN_FILENO);
    memset(said.gids, 7, sizeof(said.gids));
    memcpy(said.wanted, &b->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    CHECK_EQ(send(fd, hello, sizeof(hello), MSG_NOSIGNAL), SOFT_HELLO_SIZE);
    CHECK(raw_read(fd, welcome, sizeof(welcome)));
    CHECK_EQ(soft_fabric_get_streams(&b->device, streams, 2), 2);
    CHECK(strstr(streams[streams[0].connected].why_not_direct, "no copy tokens came") != NULL);
    close(fd);
    EVENTUALLY(stats_of(b).streams == 1);
    if (before >= 0) {
        CHECK_EQ(dup2(before, STDIN_FILENO), STDIN_FILENO);
        close(before);
    }
    sender_close(&honest);
    node_close(a);
    node_close(b);
    CHECK_EQ(rmdir(directory()), 0);
}

/* The peer claims that direct copies work, and has not written to this process's memory: it sends the nonce that was
 * there before. */
static void a_peer_that_has_not_written(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE];
    struct soft_welcome welcome = {.flags = SOFT_HELLO_DIRECT};
    struct soft_stream_stats stream;
    struct soft_hello said;
    int fd = be_found(NULL, hello);

    CHECK(!soft_hello_parse(hello, &said) && said.flags & SOFT_HELLO_DIRECT);
    memcpy(welcome.nonce, said.nonce, sizeof(welcome.nonce));
    say_welcome(fd, &welcome, bytes);
    EVENTUALLY(soft_fabric_get_streams(&a->device, &stream, 1) == 1 && stream.connected);
    CHECK(!stream.direct);
    CHECK(strstr(stream.why_not_direct, "cannot access") != NULL);
    be_lost(fd);
}

/* Over TCP direct copies were not offered: zeroes are in the place of the nonce. */
static void a_peer_that_cannot_write(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE];
    struct soft_welcome welcome = {.flags = SOFT_HELLO_DIRECT};
    int fd, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t size = sizeof(address);
    struct soft_stream_stats stream;

    new_directory();
    REQUIRE_EQ(bind(listener, (struct sockaddr *)&address, size), 0);
    REQUIRE_EQ(listen(listener, 1), 0);
    REQUIRE_EQ(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    a = node_with_port(free_port());
    b = node_with_port(ntohs(address.sin_port));
    sender_open(&looking, a, &b->device.gids[1], 5);
    sender_want(&looking, IBV_WR_SEND, 1, 0);
    fd = accept_by_hand(listener, hello);
    say_welcome(fd, &welcome, bytes);
    EVENTUALLY(soft_fabric_get_streams(&a->device, &stream, 1) == 1 && stream.connected);
    CHECK(!stream.direct);
    CHECK(strstr(stream.why_not_direct, "over TCP") != NULL);
    close(fd);
    close(listener);
    sender_close(&looking);
    node_close(a);
    node_close(b);
    CHECK_EQ(rmdir(directory()), 0);
}

/* ---- What the host provides --------------------------------------------------------------------------------- */

static atomic_int random_left = -1; /* calls of getentropy() before all fail; -1: none fails */

int getentropy(void *to, size_t size)
{
    int left = atomic_load(&random_left);

    if (left > 0)
        atomic_store(&random_left, left - 1);
    if (left)
        return syscall(SYS_getrandom, to, size, 0) == (long)size ? 0 : -1;
    errno = ENOSYS;
    return -1;
}

/* Without random numbers there is no handshake: others could guess the nonces. */
static void a_host_without_random_numbers(void)
{
    uint8_t hello[SOFT_HELLO_SIZE];
    struct sender sender;
    struct node *other;
    int fd;

    open_all();
    other = node_open();
    listen_by_hand(other, &entry);
    atomic_store(&random_left, 0);
    fd = raw_connect(b);
    raw_hello(fd, b, hello);
    expect_refused(fd, "no random numbers", 1, 0, HERE);
    sender_open(&sender, a, &other->device.gids[0], 6);
    sender_want(&sender, IBV_WR_SEND, 1, 0);
    EVENTUALLY(stats_of(a).failed_connects == 1);
    fd = accept(entry.fd, NULL, NULL);
    REQUIRE(fd >= 0);
    CHECK_EQ(read(fd, hello, 1), 0);
    close(fd);
    atomic_store(&random_left, -1);
    sender_close(&sender);
    soft_directory_unregister(&entry);
    node_close(other);
    close_all();
}

/* If only the read cache lacks a random number, peers are served without it. */
static void a_read_cache_without_random_numbers(void)
{
    struct soft_fabric *fabric;
    int i;

    for (i = 0; i < 2; i++) {
        atomic_store(&random_left, i ? 3 : 2); /* the first two are for HELLO and WELCOME */
        open_all();
        fabric = b->device.fabric;
        soft_mutex_take(&fabric->progress);
        CHECK_EQ(fabric->read_cache_fd >= 0, i);
        CHECK_EQ(atomic_load(&fabric->read_cache_page) != NULL, i);
        soft_mutex_give(&fabric->progress);
        CHECK_EQ(random_left, 0);
        atomic_store(&random_left, -1);
        close_all();
    }
}

static atomic_int ptrace_scope; /* digit in Yama's file of that name; 0: the file is the kernel's */
static atomic_uint permissions;

int open(const char *path, int flags, ...)
{
    char scope = (char)atomic_load(&ptrace_scope);
    mode_t mode = 0;
    va_list list;
    int fd;

    if (scope && !strcmp(path, "/proc/sys/kernel/yama/ptrace_scope")) {
        fd = memfd_create("ptrace_scope", MFD_CLOEXEC);
        CHECK_EQ(pwrite(fd, &scope, 1, 0), 1);
        return fd;
    }
    va_start(list, flags);
    if (flags & O_CREAT)
        mode = va_arg(list, mode_t);
    va_end(list);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int prctl(int option, ...)
{
    unsigned long argument;
    va_list list;

    va_start(list, option);
    argument = va_arg(list, unsigned long);
    va_end(list);
    if (option != PR_SET_PTRACER)
        return (int)syscall(SYS_prctl, option, argument, 0, 0, 0);
    CHECK(argument == PR_SET_PTRACER_ANY);
    atomic_fetch_add(&permissions, 1);
    return 0;
}

/* If Yama lets only ancestors read a process's memory, both sides permit it to their peers; otherwise neither asks the
 * kernel for that. */
static void yama_restricts_tracing(void)
{
    uint8_t hello[SOFT_HELLO_SIZE];
    int scope, fd;

    for (scope = '0'; scope <= '1'; scope++) {
        atomic_store(&ptrace_scope, scope);
        atomic_store(&permissions, 0);
        fd = be_found(NULL, hello);
        CHECK_EQ(permissions, scope - '0');
        be_lost(fd);
        atomic_store(&permissions, 0);
        new_directory();
        b = node_open();
        REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
        close(raw_open(b));
        CHECK_EQ(permissions, scope - '0');
        node_close(b);
        CHECK_EQ(rmdir(directory()), 0);
    }
    atomic_store(&ptrace_scope, 0);
}

CHECK_MAIN_ONCE(CASE(peers_that_do_not_speak_the_protocol), CASE(handshake_in_small_pieces),
                CASE(unexpected_descriptors), CASE(descriptors_without_data), CASE(descriptors_whose_close_waits),
                CASE(descriptors_that_find_no_room), CASE(descriptors_that_are_not_accepted),
                CASE(accepting_pauses_while_descriptors_wait_to_be_closed),
                CASE(closing_a_large_file_does_not_delay_peers), CASE(descriptors_of_one_message_at_a_time),
                CASE(reading_where_descriptors_may_come), CASE(probing_a_live_listener_does_not_block),
                CASE(a_child_closes_what_waits_to_be_closed), CASE(invalid_frames),
                CASE(a_batch_ends_where_its_stream_is_refused), CASE(half_frames), CASE(reasons_are_kept),
                CASE(secrets), CASE(the_connecting_side_proves_first), CASE(a_peer_of_another_version),
                CASE(a_peer_that_does_not_prove), CASE(the_process_of_a_peer_has_the_first_number),
                CASE(a_peer_that_has_not_written), CASE(a_peer_that_cannot_write), CASE(a_host_without_random_numbers),
                CASE(a_read_cache_without_random_numbers), CASE(yama_restricts_tracing))
