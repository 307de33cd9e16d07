/* Tests of running out of memory, descriptors or threads: an errno, and no object half made. This program defines the
 * allocating functions itself, in front of the C library's. */
#include "support.h"
#include "support_fabric.h"
#include "support_fork.h"
#include "support_srq.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Set while no other thread calls a verb of the tested context. */
static bool no_descriptors, no_threads;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_MEMORY 0 /* the sanitizers have theirs */
#else
#define OWN_MEMORY 1

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *memory);

static _Thread_local int until_failure = -1; /* allocations to go; -1: none fails */
static _Thread_local long balance;           /* what was taken less what was given back */

static bool fails(void)
{
    if (until_failure < 0)
        return false;
    if (until_failure-- > 0)
        return false;
    errno = ENOMEM;
    return true;
}

static void *counted(void *memory)
{
    balance += memory != NULL;
    return memory;
}

void *malloc(size_t size)
{
    return fails() ? NULL : counted(__libc_malloc(size));
}

void *calloc(size_t count, size_t size)
{
    return fails() ? NULL : counted(__libc_calloc(count, size));
}

void *realloc(void *memory, size_t size)
{
    if (fails())
        return NULL;
    balance -= memory != NULL;
    return counted(__libc_realloc(memory, size));
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return fails() ? NULL : counted(__libc_memalign(alignment, size));
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (fails())
        return ENOMEM;
    *memory = counted(__libc_memalign(alignment, size));
    return *memory ? 0 : ENOMEM;
}

void free(void *memory)
{
    balance -= memory != NULL;
    __libc_free(memory);
}
#endif

int eventfd(unsigned int count, int flags)
{
    int (*real)(unsigned int, int);

    if (no_descriptors) {
        errno = EMFILE;
        return -1;
    }
    *(void **)&real = dlsym(RTLD_NEXT, "eventfd");
    return real(count, flags);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *argument)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

    if (no_threads)
        return EAGAIN;
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attr, start, argument);
}

static int until_no_mutex = -1; /* mutexes to create before one fails; -1: none fails */

int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attr)
{
    int (*real)(pthread_mutex_t *, const pthread_mutexattr_t *);

    if (until_no_mutex >= 0 && until_no_mutex-- == 0)
        return ENOMEM;
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_init");
    return real(mutex, attr);
}

static void open_without_mutexes(void *unused)
{
    struct ibv_context *context = NULL;
    unsigned int before, at;

    (void)unused;
    REQUIRE(grace_ready());
    before = open_descriptors();
    for (at = 0; !context && at < 100; at++) {
        until_no_mutex = (int)at;
        context = soft_open(&variant->options);
        if (context)
            break;
        CHECK_EQ(errno, ENOMEM);
        CHECK_EQ(until_no_mutex, -1);
        CHECK(open_descriptors() <= before + 1); /* a device that was created before its context failed keeps one */
    }
    REQUIRE(context != NULL);
    CHECK(at > 5); /* the device has more than five mutexes */
    until_no_mutex = -1;
    CHECK_EQ(soft_close_device(context), 0);
    CHECK_EQ(open_descriptors(), before + 1);
}

/* A device that cannot be created keeps no descriptor, and neither does a closed context. A created device stays in the
 * process, with one descriptor, so the case runs in a child process, which has no device yet. */
static void no_mutexes(void)
{
    in_child(open_without_mutexes, NULL);
}

static void descriptors(void)
{
    struct home home;

    home_open(&home);
    no_descriptors = true;
    CHECK_REFUSED(soft_open(&variant->options), EMFILE);
    CHECK_REFUSED(soft_verbs.create_comp_channel(home.context), EMFILE);
    no_descriptors = false;
    home_close(&home);
}

static void no_worker_thread(void)
{
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC};
    struct soft_counts counts;
    struct ibv_qp *qp;
    struct home home;

    home_open(&home);
    attr.send_cq = attr.recv_cq = home_cq(&home, 4, NULL);
    no_threads = true;
    qp = soft_verbs.create_qp(home.pd, &attr);
    if (variant->options.mode == SOFT_THREAD) { /* a queue pair that cannot be executed is not created */
        CHECK(!qp && errno == EAGAIN);
        soft_get_counts(home.context, &counts);
        CHECK_EQ(counts.qps, 0);
    } else { /* inline mode does not need the thread yet */
        CHECK(qp && soft_verbs.destroy_qp(qp) == 0);
    }
    no_threads = false;
    qp = soft_verbs.create_qp(home.pd, &attr);
    REQUIRE(qp != NULL);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(attr.send_cq), 0);
    home_close(&home);
}

/* With inline execution a retry needs the worker thread: without it the request fails instead. */
static void waking_thread(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    no_threads = true;
    CHECK_EQ(post_receive(&pair.a, 2, 8), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0); /* finds no receive there */
    if (variant->options.mode == SOFT_INLINE) {
        EXPECT(pair.a.send_cq, 1, IBV_WC_GENERAL_ERR);
        EXPECT(pair.a.recv_cq, 2, IBV_WC_WR_FLUSH_ERR);
        CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
    } else { /* it has been there from the first queue pair on */
        CHECK_EQ(post_receive(&pair.b, 3, 8), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    }
    no_threads = false;
    pair_close(&pair);
}

/* With inline execution the timeout of an acknowledgement needs the worker thread, too: without it, a request to a peer
 * that does not answer fails at once. */
static void timeout_thread(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;

    link.timeout = 1;
    link.retry_cnt = 0;
    PAIR_OPEN(&pair, .link = &link);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
    no_threads = true;
    CHECK_EQ(post_receive(&pair.a, 2, 8), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    EXPECT(pair.a.send_cq, 1, variant->options.mode == SOFT_INLINE ? IBV_WC_GENERAL_ERR : IBV_WC_RETRY_EXC_ERR);
    EXPECT(pair.a.recv_cq, 2, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
    no_threads = false;
    pair_close(&pair);
}

static int moderate(struct ibv_cq *cq)
{
    struct ibv_modify_cq_attr attr = {IBV_CQ_ATTR_MODERATE, {UINT16_MAX, UINT16_MAX}};

    return verbs_modify_cq(cq, &attr);
}

/* Check that the queue still raises an event for each completion. */
static void check_unmoderated(const struct home *home, struct ibv_cq *cq)
{
    struct ibv_qp *qp = make_loop(home->pd, cq, 4);
    struct ibv_cq *event_cq;
    void *context;

    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
    CHECK_EQ(post_nothing(qp, 1), 0);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK(wait_readable(cq->channel->fd));
    CHECK_EQ(soft_verbs.get_cq_event(cq->channel, &event_cq, &context), 0);
    soft_verbs.ack_cq_events(cq, 1);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
}

/* A queue is not moderated if no thread could run its timer. */
static void moderating_thread(void)
{
    struct ibv_comp_channel *channel;
    struct home home;
    struct ibv_cq *cq;

    home_open(&home);
    channel = soft_verbs.create_comp_channel(home.context);
    REQUIRE(channel != NULL);
    cq = home_cq(&home, 4, channel);
    no_threads = true;
    CHECK_EQ(moderate(cq), EAGAIN);
    no_threads = false;
    check_unmoderated(&home, cq);
    CHECK_EQ(moderate(cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    home_close(&home);
}

#if OWN_MEMORY
/* Changes of a queue that fail change nothing. */
static void memory_for_changes(void)
{
    struct ibv_comp_channel *channel;
    struct home home;
    struct ibv_cq *cq;
    long taken;

    home_open(&home);
    channel = soft_verbs.create_comp_channel(home.context);
    REQUIRE(channel != NULL);
    cq = home_cq(&home, 4, channel);
    taken = balance;
    until_failure = 0;
    CHECK_EQ(soft_verbs.resize_cq(cq, 64), ENOMEM);
    until_failure = 0;
    CHECK_EQ(moderate(cq), ENOMEM);
    CHECK_EQ(until_failure, -1); /* both asked for memory */
    CHECK_EQ(balance, taken);
    CHECK_EQ(cq->cqe, 4);
    check_unmoderated(&home, cq);
    CHECK_EQ(soft_verbs.resize_cq(cq, 64), 0);
    CHECK_EQ(moderate(cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    home_close(&home);
}

struct makings {
    struct home home;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_pd *shared;
    uint32_t share;
    struct ibv_xrcd *xrcd;
    char memory[64];
};

/* Each verb that creates an object, and the verb that destroys it. */
static void *make(struct makings *makings, unsigned int what)
{
    struct ibv_td_init_attr td_attr = {0};
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 100};
    struct ibv_xrcd_init_attr xrcd_attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        .fd = STDERR_FILENO,
        .oflags = O_CREAT,
    };
    struct ibv_qp_init_attr qp_attr = {
        .send_cq = makings->cq,
        .recv_cq = makings->cq,
        .cap = {100, 100, 4, 4, 64},
        .qp_type = IBV_QPT_RC,
    };

    switch (what) {
    case 0:
        return soft_open(&variant->options);
    case 1:
        return soft_verbs.alloc_pd(makings->home.context);
    case 2:
        return verbs_alloc_td(makings->home.context, &td_attr);
    case 3:
        return home_parent(&makings->home, makings->home.td);
    case 4:
        return soft_verbs.reg_mr(makings->home.base, makings->memory, 64, 0);
    case 5:
        return soft_verbs.create_comp_channel(makings->home.context);
    case 6:
        return soft_verbs.create_cq(makings->home.context, 100, NULL, makings->channel, 0);
    case 7:
        return verbs_create_cq_ex(makings->home.context, &cq_attr);
    case 8:
        return soft_share_pd(makings->home.context, makings->share, 1);
    case 9:
        return verbs_alloc_mw(makings->home.base, IBV_MW_TYPE_2);
    case 10:
        return verbs_open_xrcd(makings->home.context, &xrcd_attr);
    case 11:
        return try_srq(&makings->home, 100, 4);
    case 12:
        return try_xrc_srq(&makings->home, makings->xrcd, makings->cq, 100);
    default:
        return soft_verbs.create_qp(makings->home.pd, &qp_attr);
    }
}

static int unmake(void *made, unsigned int what)
{
    switch (what) {
    case 0:
        return soft_verbs.close_device(made);
    case 1:
    case 3:
    case 8:
        return soft_verbs.dealloc_pd(made);
    case 2:
        return verbs_dealloc_td(made);
    case 4:
        return soft_verbs.dereg_mr(made);
    case 5:
        return soft_verbs.destroy_comp_channel(made);
    case 6:
    case 7:
        return soft_verbs.destroy_cq(made);
    case 9:
        return verbs_dealloc_mw(made);
    case 10:
        return verbs_close_xrcd(made);
    case 11:
    case 12:
        return soft_verbs.destroy_srq(made);
    default:
        return soft_verbs.destroy_qp(made);
    }
}

/* Fail the first allocation of each verb, then the second one, and so on until the verb succeeds. */
static void memory(void)
{
    struct soft_counts before, after;
    struct makings makings;
    unsigned int what;

    home_open(&makings.home);
    makings.channel = soft_verbs.create_comp_channel(makings.home.context);
    makings.cq = home_cq(&makings.home, 4, NULL);
    makings.xrcd = make_xrcd(makings.home.context);
    makings.shared = soft_verbs.alloc_pd(makings.home.context);
    REQUIRE(makings.channel && makings.cq && makings.shared);
    REQUIRE_EQ(soft_alloc_shpd(makings.shared, 1, &makings.share), 0);
    for (what = 0; what < 14; what++) {
        int allowed;

        /* Once before: tables and the worker thread keep what they grow. */
        CHECK_EQ(unmake(make(&makings, what), what), 0);
        soft_get_counts(makings.home.context, &before);
        for (allowed = 0; allowed < 20; allowed++) {
            long taken = balance;
            void *made;

            until_failure = allowed;
            errno = 0;
            made = make(&makings, what);
            until_failure = -1;
            if (made) {
                CHECK(allowed > 0); /* at least one was needed */
                CHECK_EQ(unmake(made, what), 0);
                CHECK_EQ(balance, taken);
                break;
            }
            CHECK_EQ(errno, ENOMEM);
            CHECK_EQ(balance, taken);
            soft_get_counts(makings.home.context, &after);
            CHECK(!memcmp(&before, &after, sizeof(before)));
        }
        CHECK(allowed < 20);
    }
    CHECK_EQ(soft_verbs.dealloc_pd(makings.shared), 0);
    CHECK_EQ(verbs_close_xrcd(makings.xrcd), 0);
    CHECK_EQ(soft_verbs.destroy_cq(makings.cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(makings.channel), 0);
    home_close(&makings.home);
}

static void *come_in(void *argument)
{
    struct pair *pair = argument;

    until_failure = 0;
    CHECK_EQ(post_write(&pair->a, &pair->b, 1, 8), ENOMEM);
    until_failure = 0;
    CHECK_EQ(post_receive(&pair->a, 1, 8), ENOMEM);
    until_failure = 0;
    CHECK_EQ(qp_to(pair->a.qp, IBV_QPS_SQD), ENOMEM);
    until_failure = 0;
    CHECK_EQ(soft_break_qp(pair->a.qp), ENOMEM);
    until_failure = 0;
    CHECK_EQ(soft_lose(pair->own.context), ENOMEM);
    CHECK_EQ(until_failure, -1); /* each of them asked for memory */
    CHECK_EQ(post_write(&pair->a, &pair->b, 2, 8), 0);
    EXPECT(pair->a.send_cq, 2, IBV_WC_SUCCESS);
    return NULL;
}

static void let_one_come(void *argument)
{
    pthread_t thread;
    struct pair pair;

    (void)argument;
    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, come_in, &pair), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    pair_close(&pair);
}

/* A thread's first request allocates memory, or reuses that of a thread that ended: a child process has none. */
static void first_request_of_a_thread(void)
{
    in_child(let_one_come, NULL);
}
#endif

CHECK_MAIN(CASE(no_mutexes), CASE(descriptors), CASE(no_worker_thread), CASE(waking_thread), CASE(timeout_thread),
           CASE(moderating_thread),
#if OWN_MEMORY
           CASE(memory_for_changes), CASE(memory), CASE(first_request_of_a_thread)
#endif
)
