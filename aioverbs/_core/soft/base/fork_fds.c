#define _GNU_SOURCE
#include "soft/base/fork_fds.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/base/lock_order.h"

enum {
    LIMIT = 1 << 20,
    WORD = sizeof(unsigned long) * CHAR_BIT,
    MESSAGE = 253, /* descriptors of one message at most: SCM_MAX_FD of the kernel */
};

struct set {
    unsigned long bits[LIMIT / WORD]; /* a bit for each descriptor */
    unsigned int count;
};

static unsigned long owned[LIMIT / WORD]; /* under the lock, a bit for each owned descriptor */
static int highest = -1;                  /* under the lock: largest descriptor that was ever owned */
static struct set to_close;               /* under the lock, like the next three: descriptors for the closing thread */
static struct set received_fds;           /* descriptors received while closing one of `to_close`; closed first */
static struct set returned_fds;           /* descriptors that are closed, and nothing else */
static bool closing;                      /* whether the closing thread runs */
static struct soft_mutex lock = SOFT_MUTEX_INITIALIZER(SOFT_RANK_DESCRIPTORS);
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int watch_error;

/* Whether this thread is forking. It holds the lock then, and its calls in between take no lock: the atfork handler of
 * another library may run Python, whose garbage collector may close descriptors. */
static _Thread_local bool forking;

void soft_descriptors_hold(void)
{
    if (!forking)
        soft_mutex_take(&lock);
}

void soft_descriptors_release(void)
{
    if (!forking)
        soft_mutex_give(&lock);
}

static void fork_fds_before_fork(void)
{
    soft_descriptors_hold();
    forking = true;
}

static void fork_fds_after_fork(void)
{
    forking = false;
    soft_descriptors_release();
}

/* Close all owned descriptors in the child, in the thread that held the lock in the parent. Descriptors that wait to be
 * closed are left to the closing thread of the child, which starts with the next such descriptor, or when
 * soft_descriptors_are_stuck is called. */
static void fork_fds_close_all(void)
{
    int fd;

    for (fd = 0; fd <= highest; fd++)
        if (!owned[fd / WORD])
            fd |= WORD - 1;
        else if (owned[fd / WORD] & 1ul << fd % WORD)
            close(fd);
    for (fd = 0; fd <= highest; fd += WORD)
        owned[fd / WORD] = 0;
    closing = false;
    fork_fds_after_fork();
}

static void fork_fds_watch(void)
{
    watch_error = pthread_atfork(fork_fds_before_fork, fork_fds_after_fork, fork_fds_close_all);
}

int soft_descriptors_watch_forks(void)
{
    pthread_once(&once, fork_fds_watch);
    return watch_error;
}

int soft_descriptor_own(int fd)
{
    assert_held(&lock);
    if (fd >= LIMIT) {
        close(fd);
        fd = -1;
        errno = EMFILE;
    }
    if (fd < 0)
        return -1;
    owned[fd / WORD] |= 1ul << fd % WORD;
    if (fd > highest)
        highest = fd;
    return fd;
}

void soft_descriptor_close(int fd)
{
    if (fd < 0)
        return;
    soft_descriptors_hold();
    owned[fd / WORD] &= ~(1ul << fd % WORD);
    close(fd); /* under the lock: the number may be reused right after */
    soft_descriptors_release();
}

/* ---- Descriptors sent by untrusted peers ---------------------------------------------------------------------- */

/* Take the lowest descriptor out of a set that is not empty. Call under the lock. */
static int take_lowest(struct set *set)
{
    int fd;

    assert_held(&lock);
    for (fd = 0; !(set->bits[fd / WORD] >> fd % WORD & 1); fd++)
        if (!set->bits[fd / WORD])
            fd |= WORD - 1;
    set->bits[fd / WORD] &= ~(1ul << fd % WORD);
    set->count--;
    return fd;
}

/* Take the next descriptor to close, which is in no set afterwards; return -1 if there is none. */
static int next_to_close(const struct set **from)
{
    struct set *set;
    int fd = -1;

    soft_descriptors_hold();
    set = received_fds.count ? &received_fds : returned_fds.count ? &returned_fds : &to_close;
    closing = set->count;
    if (closing)
        fd = take_lowest(set);
    soft_descriptors_release();
    *from = set;
    return fd;
}

/* Add a descriptor to a set. Call under the lock. */
static void put_into(struct set *set, int fd)
{
    assert_held(&lock);
    if (fd >= LIMIT) { /* cannot happen while the limit on open files is small */
        close(fd);
        return;
    }
    owned[fd / WORD] &= ~(1ul << fd % WORD);
    set->bits[fd / WORD] |= 1ul << fd % WORD;
    set->count++;
}

/* Receive from a Unix socket, as recv(fd, to, size, MSG_DONTWAIT) does. Received descriptors are added to the set as
 * far as there is room for them; the kernel closes the others in this call. Return whether there were descriptors. Call
 * without the lock: another holder of the socket may make the kernel wait in the middle of its own read, and this read
 * with it. So a child that is forked meanwhile may keep the descriptors. */
static bool take_message(int fd, void *to, size_t size, struct set *set, ssize_t *got)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(MESSAGE * sizeof(int))];
    } control;
    struct iovec piece = {to, size};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header;
    size_t i;

    *got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (*got < 0 || !(CMSG_FIRSTHDR(&message) || message.msg_flags & MSG_CTRUNC))
        return false;
    soft_descriptors_hold();
    for (header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
        for (i = 0; header->cmsg_type == SCM_RIGHTS && i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(fd); i++) {
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(fd), sizeof(fd));
            put_into(set, fd);
        }
    soft_descriptors_release();
    return true;
}

static bool socket_is(int fd, int option, int expected)
{
    int value;
    socklen_t size = sizeof(value);

    return !getsockopt(fd, SOL_SOCKET, option, &value, &size) && value == expected;
}

/* Close the queued descriptors, in a thread.
 *
 * The data in a Unix stream is read one message at a time, and its descriptors are closed before the next read: so at
 * most one message's descriptors are open at once, however many are queued in the stream. A Unix datagram socket is
 * left to the kernel, which this thread waits for: since its messages may be empty, the last one cannot be told from
 * the end. So is a Unix stream that was received from another one. */
static void *close_queued(void *unused)
{
    static const struct linger none = {0};
    char bytes[4096];
    const struct set *from;
    ssize_t got;
    int fd;

    (void)unused;
    prctl(PR_SET_NAME, "aioverbs-close");
    while ((fd = next_to_close(&from)) >= 0) {
        if (from != &returned_fds)
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none)); /* fails for most, which are no sockets */
        if (from == &to_close && socket_is(fd, SO_DOMAIN, AF_UNIX) && socket_is(fd, SO_TYPE, SOCK_STREAM)) {
            soft_descriptors_prepare_socket(fd);
            shutdown(fd, SHUT_RDWR);
            take_message(fd, bytes, sizeof(bytes), &received_fds, &got);
            if (got > 0) {
                soft_descriptors_hold();
                put_into(&to_close, fd);
                soft_descriptors_release();
                continue;
            }
        }
        close(fd);
    }
    return NULL;
}

/* Start the closing thread if it has work. Call under the lock. Where the thread does not start, descriptors wait for
 * the next call. */
static void start_closing(void)
{
    sigset_t all, before;
    pthread_t thread;

    assert_held(&lock);
    if (closing || !(to_close.count || received_fds.count || returned_fds.count))
        return;
    sigfillset(&all); /* signals are for the user's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    closing = !pthread_create(&thread, NULL, close_queued, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (closing)
        pthread_detach(thread);
}

/* Have the closing thread close a descriptor of a set. Call under the lock. */
static void queue_close(struct set *set, int fd)
{
    put_into(set, fd);
    start_closing();
}

void soft_descriptor_discard(int fd)
{
    if (fd < 0)
        return;
    soft_descriptors_hold();
    queue_close(&to_close, fd);
    soft_descriptors_release();
}

void soft_descriptor_return(int fd)
{
    soft_descriptors_hold();
    queue_close(&returned_fds, fd);
    soft_descriptors_release();
}

bool soft_descriptors_are_stuck(void)
{
    bool stuck;

    soft_descriptors_hold();
    start_closing(); /* without new peers, no other call starts the thread */
    stuck = to_close.count + returned_fds.count > MESSAGE;
    soft_descriptors_release();
    return stuck;
}

void soft_descriptors_prepare_socket(int fd)
{
    static const int one = 1;

    setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &one, sizeof(one));
}

/* Own the descriptors of a message that was peeked at. Call under the lock. */
static void own_received(struct msghdr *message, int *memory_fds, bool *unwanted)
{
    const struct cmsghdr *header = CMSG_FIRSTHDR(message);
    unsigned int count, i;
    int fd;

    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
        return;
    count = (unsigned int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(fd));
    for (i = 0; i < count; i++) {
        memcpy(&fd, CMSG_DATA(header) + i * sizeof(fd), sizeof(fd));
        if (fcntl(fd, F_GET_SEALS) >= 0) {
            *memory_fds++ = soft_descriptor_own(fd);
        } else {
            queue_close(&to_close, fd); /* the message still refers to the file, but this close may block as well */
            *unwanted = true;
        }
    }
}

/* Peek first, which takes nothing: what does not fit here is not closed by that. Then take the message only if it has
 * no descriptors other than those that are kept. */
ssize_t soft_descriptors_receive(int fd, void *to, size_t size, int *memory_fds, unsigned int most, bool *unwanted)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(SOFT_MEMORY_FILES * sizeof(int))];
    } control;
    struct iovec piece = {to, size};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    ssize_t got;

    if (most) {
        message.msg_control = &control;
        message.msg_controllen = CMSG_LEN(most * sizeof(int)); /* padding may have space for more */
        soft_descriptors_hold();
    }
    got = recvmsg(fd, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got > 0 && message.msg_flags & MSG_CTRUNC)
        *unwanted = true;
    if (message.msg_control) {
        if (got > 0)
            own_received(&message, memory_fds, unwanted);
        soft_descriptors_release();
    }
    if (got <= 0 || *unwanted)
        return got;
    return recv(fd, to, (size_t)got, MSG_DONTWAIT);
}

ssize_t soft_descriptors_receive_discarding(int fd, void *to, size_t size, bool *unwanted)
{
    ssize_t got;

    if (take_message(fd, to, size, &to_close, &got)) {
        soft_descriptors_hold();
        start_closing();
        soft_descriptors_release();
        *unwanted = true;
    }
    return got;
}

/* Read what is queued in a Unix stream, up to a message with descriptors; return whether all was read. */
static bool drain(int fd)
{
    char bytes[4096];
    bool unwanted = false;

    while (!unwanted && soft_descriptors_receive(fd, bytes, sizeof(bytes), NULL, 0, &unwanted) > 0)
        ;
    return !unwanted;
}

void soft_descriptor_close_socket(int fd)
{
    if (fd < 0)
        return;
    soft_descriptors_prepare_socket(fd);
    shutdown(fd, SHUT_RDWR);
    if (drain(fd))
        soft_descriptor_close(fd);
    else
        soft_descriptor_discard(fd);
}
