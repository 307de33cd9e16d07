#include "soft_descriptors.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "soft_lock.h"

enum { LIMIT = 1 << 20, WORD = sizeof(unsigned long) * CHAR_BIT };

static unsigned long owned[LIMIT / WORD]; /* under the lock, a bit for each descriptor */
static int highest = -1;                  /* of all that were ever owned; under the lock */
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

static void before_fork(void)
{
    soft_descriptors_hold();
    forking = true;
}

static void after_fork(void)
{
    forking = false;
    soft_descriptors_release();
}

/* In the child, by the thread that held the lock in the parent. */
static void close_all(void)
{
    int fd;

    for (fd = 0; fd <= highest; fd++)
        if (owned[fd / WORD] >> fd % WORD & 1)
            close(fd);
        else if (!owned[fd / WORD])
            fd |= WORD - 1;
    for (fd = 0; fd <= highest; fd += WORD)
        owned[fd / WORD] = 0;
    highest = -1;
    after_fork();
}

static void watch(void)
{
    watch_error = pthread_atfork(before_fork, after_fork, close_all);
}

int soft_descriptors_watch_forks(void)
{
    pthread_once(&once, watch);
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
