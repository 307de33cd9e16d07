/* Minimal thread that wakes an event loop: on request, the thread wakes up, waits for its delay, and makes an
 * eventfd readable. The software device's thread does the same around a request, without the request here. */
#define _GNU_SOURCE
#include "baselines.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

struct waker {
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t wake;
    bool asked, asleep, stop;
    uint64_t due; /* CLOCK_MONOTONIC */
    uint64_t delay_ns;
    pthread_t thread;
    int eventfd;
};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Called with the lock held. */
static void sleep_until_due(struct waker *waker)
{
    struct timespec due = {.tv_sec = (time_t)(waker->due / 1000000000u), .tv_nsec = (long)(waker->due % 1000000000u)};

    waker->asleep = true;
    if (waker->asked)
        pthread_cond_timedwait(&waker->wake, &waker->lock, &due);
    else
        pthread_cond_wait(&waker->wake, &waker->lock);
    waker->asleep = false;
}

static void *serve(void *argument)
{
    static const uint64_t one = 1;
    struct waker *waker = argument;

    prctl(PR_SET_TIMERSLACK, 1000); /* nanoseconds, as in the device's thread */
    pthread_mutex_lock(&waker->lock);
    while (!waker->stop) {
        if (!waker->asked || (waker->delay_ns && now_ns() < waker->due)) {
            sleep_until_due(waker);
            continue;
        }
        waker->asked = false;
        pthread_mutex_unlock(&waker->lock);
        if (write(waker->eventfd, &one, sizeof(one)) != sizeof(one))
            return NULL; /* the waiting side times out and reports that */
        pthread_mutex_lock(&waker->lock);
    }
    pthread_mutex_unlock(&waker->lock);
    return NULL;
}

struct waker *waker_start(int eventfd, uint64_t delay_ns)
{
    struct waker *waker = calloc(1, sizeof(*waker));
    pthread_condattr_t attr;

    if (!waker)
        return NULL;
    waker->eventfd = eventfd;
    waker->delay_ns = delay_ns;
    pthread_mutex_init(&waker->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&waker->wake, &attr);
    pthread_condattr_destroy(&attr);
    if ((errno = pthread_create(&waker->thread, NULL, serve, waker))) {
        free(waker);
        return NULL;
    }
    return waker;
}

void waker_ask(struct waker *waker)
{
    bool asleep;

    pthread_mutex_lock(&waker->lock);
    waker->asked = true;
    if (waker->delay_ns)
        waker->due = now_ns() + waker->delay_ns;
    asleep = waker->asleep;
    pthread_mutex_unlock(&waker->lock);
    if (asleep)
        pthread_cond_signal(&waker->wake);
}

void waker_stop(struct waker *waker)
{
    pthread_mutex_lock(&waker->lock);
    waker->stop = true;
    pthread_cond_signal(&waker->wake);
    pthread_mutex_unlock(&waker->lock);
    pthread_join(waker->thread, NULL);
    pthread_cond_destroy(&waker->wake);
    pthread_mutex_destroy(&waker->lock);
    free(waker);
}
