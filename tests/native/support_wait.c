#include "support.h"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "soft/api/device.h"
#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/qp.h"
#include "soft/objects/worker_thread.h"

uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void sleep_us(unsigned int microseconds)
{
    struct timespec time = {microseconds / 1000000, (long)(microseconds % 1000000) * 1000};

    nanosleep(&time, NULL);
}

/* Return whether a context's thread has nothing to do before `moment`, and sleeps. */
static bool is_quiet(struct soft_context *context, uint64_t until)
{
    struct soft_worker *worker = &context->worker;
    bool quiet;

    soft_mutex_take(&worker->lock);
    quiet = !worker->started || worker->stop ||
            (atomic_load(&worker->sleeper.asleep) && !atomic_load(&worker->submitted) && !worker->first &&
             (!worker->timer_count || worker->timers[0]->due > until));
    soft_mutex_give(&worker->lock);
    return quiet;
}

void settle(struct ibv_context *of)
{
    struct soft_device *device = to_soft_context(of)->device;
    uint64_t until = now_ns() + 10000000 + variant->options.delay_ns;
    unsigned int passes = 0;

    while (passes < 2 && now_ns() < until) { /* one thread may have given work to another one */
        struct soft_context *context;
        bool quiet = true;

        soft_mutex_take(&device->lock);
        for (context = device->contexts; context; context = context->next)
            quiet = is_quiet(context, until) && quiet;
        soft_mutex_give(&device->lock);
        passes = quiet ? passes + 1 : 0;
        sched_yield();
    }
}

static uint64_t deadline(void)
{
    return now_ns() + WAIT_S * 1000000000ull;
}

bool wait_completion(struct ibv_cq *cq, struct ibv_wc *wc)
{
    uint64_t end = deadline();

    do {
        int n = verbs_poll_cq(cq, 1, wc);

        if (n)
            return n == 1;
        sched_yield();
    } while (now_ns() < end);
    return false;
}

struct ibv_wc expect_at(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status, struct check_place place)
{
    struct ibv_wc wc = {0};

    if (!check_true(wait_completion(cq, &wc), place, "no completion came"))
        check_stop();
    check_equal((long long)wc.wr_id, (long long)wr_id, place, "wc.wr_id", "what was expected");
    check_equal(wc.status, status, place, "wc.status", "what was expected");
    return wc;
}

void start_poll(struct ibv_cq_ex *cq)
{
    struct ibv_poll_cq_attr attr = {0};
    uint64_t end = deadline();
    int answer;

    while ((answer = cq->start_poll(cq, &attr)) == ENOENT && now_ns() < end)
        sched_yield();
    REQUIRE_EQ(answer, 0);
}

void next_poll(struct ibv_cq_ex *cq)
{
    uint64_t end = deadline();
    int answer;

    while ((answer = cq->next_poll(cq)) == ENOENT && now_ns() < end)
        sched_yield();
    REQUIRE_EQ(answer, 0);
}

void expect_nothing_at(struct ibv_cq *cq, struct check_place place)
{
    struct ibv_wc wc;

    settle(cq->context);
    check_equal(verbs_poll_cq(cq, 1, &wc), 0, place, "poll_cq", "nothing");
}

void wait_begun(struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr = {0};
    uint64_t end = deadline();

    while (!attr.sq_draining) {
        REQUIRE(now_ns() < end);
        sched_yield();
        if (qp_to(qp, IBV_QPS_SQD))
            break;
        REQUIRE_EQ(soft_verbs.query_qp(qp, &attr, IBV_QP_STATE, &init_attr), 0);
        if (qp_to(qp, IBV_QPS_RTS))
            break;
    }
}

void end_wait(struct ibv_qp *ibv_qp)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);

    soft_lock_take(&qp->sq_lock);
    CHECK(qp->req.waiting);
    if (qp->req.pause)
        qp->req.pause = 1;
    else
        qp->req.deadline = 0;
    soft_lock_give(&qp->sq_lock);
    soft_worker_set_timer(qp->context, &qp->timer, 0);
}

void wait_left(const struct soft_half *half)
{
    uint64_t end = deadline();

    while (half->exclusive && atomic_load(&half->exclusive->owner)) {
        REQUIRE(now_ns() < end);
        sched_yield();
    }
}

bool wait_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
    uint64_t end = deadline();

    do {
        if (qp_state(qp) == state)
            return true;
        sched_yield();
    } while (now_ns() < end);
    return false;
}

void wait_executed(struct ibv_qp *qp, uint32_t count)
{
    uint32_t psn = (default_link.sq_psn + count) & 0xffffff;
    struct ibv_qp_init_attr init_attr;
    uint64_t end = deadline();
    struct ibv_qp_attr attr;

    for (;;) {
        REQUIRE_EQ(soft_verbs.query_qp(qp, &attr, IBV_QP_SQ_PSN, &init_attr), 0);
        if (attr.sq_psn == psn)
            return;
        REQUIRE(now_ns() < end);
        sched_yield();
    }
}

bool is_readable(int fd)
{
    struct pollfd poller = {.fd = fd, .events = POLLIN};

    return poll(&poller, 1, 0) == 1;
}

bool wait_readable(int fd)
{
    struct pollfd poller = {.fd = fd, .events = POLLIN};

    return poll(&poller, 1, WAIT_S * 1000) == 1;
}

struct elsewhere {
    int (*call)(void *);
    void *argument;
    int answer;
};

static void *run_elsewhere(void *argument)
{
    struct elsewhere *elsewhere = argument;

    elsewhere->answer = elsewhere->call(elsewhere->argument);
    return NULL;
}

int call_elsewhere(int (*call)(void *), void *argument)
{
    struct elsewhere elsewhere = {call, argument, -1};
    pthread_t thread;

    REQUIRE_EQ(pthread_create(&thread, NULL, run_elsewhere, &elsewhere), 0);
    REQUIRE_EQ(pthread_join(thread, NULL), 0);
    return elsewhere.answer;
}

char *stderr_of(void (*function)(void *), void *argument)
{
    int file = memfd_create("stderr", MFD_CLOEXEC), before = dup(STDERR_FILENO);
    char *text = calloc(1, 4096);

    REQUIRE(file >= 0 && before >= 0 && text);
    fflush(stderr);
    REQUIRE(dup2(file, STDERR_FILENO) >= 0);
    function(argument);
    fflush(stderr);
    REQUIRE(dup2(before, STDERR_FILENO) >= 0);
    CHECK(pread(file, text, 4095, 0) >= 0);
    close(before);
    close(file);
    return text;
}
