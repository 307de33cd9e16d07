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

static unsigned long owned[LIMIT / WORD];  /* under the lock, a bit for each descriptor */
static int highest = -1;                   /* of all that were ever owned; under the lock */
static unsigned long doomed[LIMIT / WORD]; /* under the lock, like the next two: the closing thread closes these */
static unsigned int doomed_count;
static bool closing; /* that thread runs */
static struct soft_mutex lock = SOFT_MUTEX_INITIALIZER(SOFT_RANK_DESCRIPTORS);
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int watch_error;

/* This thread forks, and has the lock: what others do in it meanwhile needs none. A handler of another library may come
 * between ours and run Python, whose garbage collector may close what it finds. */
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

/* In the child, by the thread that held the lock in the parent. What was to be closed by a thread is left to the one
 * that begins here with the next such descriptor, or when somebody asks whether too many wait. */
static void fork_fds_close_all(void)
{
    int fd;

    for (fd = 0; fd <= highest; fd++)
        if (!owned[fd / WORD])
            fd |= WORD - 1;
        else if (owned[fd / WORD] & ~doomed[fd / WORD] & 1ul << fd % WORD)
            close(fd);
    for (fd = 0; fd <= highest; fd += WORD)
        owned[fd / WORD] = doomed[fd / WORD];
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
    close(fd); /* under the lock: the number may be another's right after */
    soft_descriptors_release();
}

/* ---- What strangers send -------------------------------------------------------------------------------------- */

/* The number of one that is to be closed, which is nobody's from here on; -1: there is none. */
static int take_doomed(void)
{
    int fd = -1;

    soft_descriptors_hold();
    if (!doomed_count)
        closing = false;
    else
        for (fd = 0; !(doomed[fd / WORD] >> fd % WORD & 1); fd++)
            if (!doomed[fd / WORD])
                fd |= WORD - 1;
    if (fd >= 0) {
        doomed_count--;
        doomed[fd / WORD] &= ~(1ul << fd % WORD);
        owned[fd / WORD] &= ~(1ul << fd % WORD);
    }
    soft_descriptors_release();
    return fd;
}

/* Takes what waits in a Unix stream; descriptors among it are discarded, too. It is shut down, so that it ends. */
static bool empty(int fd)
{
    char bytes[4096];
    bool unwanted = false;

    while (!unwanted && soft_descriptors_receive(fd, bytes, sizeof(bytes), NULL, &unwanted) > 0)
        ;
    return !unwanted;
}

static bool socket_is(int fd, int option, int expected)
{
    int value;
    socklen_t size = sizeof(value);

    return !getsockopt(fd, SOL_SOCKET, option, &value, &size) && value == expected;
}

/* What waits in a Unix socket of messages is the kernel's to close, which this thread waits for: messages may be empty,
 * so that the last one is not told from the end. */
static void *close_doomed(void *unused)
{
    static const struct linger none = {0};
    int fd;

    (void)unused;
    prctl(PR_SET_NAME, "aioverbs-close");
    while ((fd = take_doomed()) >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none)); /* most are no sockets */
        if (socket_is(fd, SO_DOMAIN, AF_UNIX) && socket_is(fd, SO_TYPE, SOCK_STREAM)) {
            shutdown(fd, SHUT_RDWR);
            while (!empty(fd))
                ;
        }
        close(fd);
    }
    return NULL;
}

/* Under the lock. Where the thread does not start they wait for the next attempt: by who discards one, or asks. */
static void begin_closing(void)
{
    pthread_attr_t detached;
    sigset_t all, before;
    pthread_t thread;

    if (closing || !doomed_count || pthread_attr_init(&detached))
        return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are for the user's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    closing = !pthread_create(&thread, &detached, close_doomed, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

/* Under the lock. */
static void doom(int fd)
{
    if (fd < 0)
        return;
    if (fd >= LIMIT) { /* there are none where few files may be open */
        close(fd);
        return;
    }
    doomed[fd / WORD] |= 1ul << fd % WORD;
    doomed_count++;
    begin_closing();
}

void soft_descriptor_discard(int fd)
{
    soft_descriptors_hold();
    doom(fd);
    soft_descriptors_release();
}

bool soft_descriptors_are_stuck(void)
{
    bool stuck;

    soft_descriptors_hold();
    begin_closing(); /* where nobody is let in meanwhile, nobody brings another one */
    stuck = doomed_count > MESSAGE;
    soft_descriptors_release();
    return stuck;
}

/* Under the lock: those of one header. */
static void take_descriptors(const struct cmsghdr *header, int *kept, bool *unwanted)
{
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int), i;

    for (i = 0; i < count; i++) {
        int fd;

        memcpy(&fd, CMSG_DATA(header) + i * sizeof(fd), sizeof(fd));
        fd = soft_descriptor_own(fd);
        if (kept && *kept < 0 && fd >= 0 && fcntl(fd, F_GET_SEALS) >= 0) {
            *kept = fd;
            continue;
        }
        doom(fd);
        *unwanted = true;
    }
}

ssize_t soft_descriptors_receive(int fd, void *to, size_t size, int *kept, bool *unwanted)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(MESSAGE * sizeof(int))];
    } control;
    struct iovec piece = {to, size};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    bool held = kept;
    struct cmsghdr *header;
    ssize_t got;

    if (held)
        soft_descriptors_hold();
    got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    header = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL; /* they are installed, also where no byte came */
    if (header && !held) {
        soft_descriptors_hold();
        held = true;
    }
    for (; header; header = CMSG_NXTHDR(&message, header))
        if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
            take_descriptors(header, kept, unwanted);
    if (held)
        soft_descriptors_release();
    return got;
}

void soft_descriptor_hang_up(int fd)
{
    if (fd < 0)
        return;
    shutdown(fd, SHUT_RDWR);
    if (empty(fd))
        soft_descriptor_close(fd);
    else
        soft_descriptor_discard(fd); /* more may come of what waits there than is good to have open at once */
}
