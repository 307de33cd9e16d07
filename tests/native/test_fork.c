/* Tests of forks: the child finds the device closed; the parent is not affected. */
#include "support.h"
#include "support_fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "soft/base/epoch.h"

/* Objects that the child inherits. */
struct inherited {
    struct home home;
    struct pair pair;
    struct ibv_comp_channel *channel;
    struct ibv_cq_ex *cq;
    struct ibv_qp *qp; /* on `cq` */
    union ibv_gid gids[2];
};

#define CHECK_CHILD_ERRNO(expression) \
    do {                              \
        errno = 0;                    \
        CHECK_EQ(expression, -1);     \
        CHECK_EQ(errno, ENODEV);      \
    } while (0)

static void check_verbs_that_make(const struct inherited *inherited)
{
    struct ibv_context *context = inherited->home.context;
    struct verbs_context *verbs = verbs_context_of(context);
    struct ibv_pd *pd = inherited->home.pd;
    struct ibv_td_init_attr td_attr = {0};
    struct ibv_parent_domain_init_attr parent_attr = {.pd = inherited->home.base};
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 4};
    struct ibv_qp_init_attr qp_attr = {
        .send_cq = inherited->pair.a.send_cq, .recv_cq = inherited->pair.a.send_cq, .qp_type = IBV_QPT_RC};
    struct ibv_qp_init_attr_ex ex_attr = {.send_cq = inherited->pair.a.send_cq,
                                          .recv_cq = inherited->pair.a.send_cq,
                                          .qp_type = IBV_QPT_RC,
                                          .comp_mask = IBV_QP_INIT_ATTR_PD,
                                          .pd = pd};
    char memory[8];

    CHECK_REFUSED(soft_verbs.alloc_pd(context), ENODEV);
    CHECK_REFUSED(verbs_alloc_td(context, &td_attr), ENODEV);
    td_attr.comp_mask = 1;
    CHECK_REFUSED(verbs_alloc_td(context, &td_attr), ENODEV);
    CHECK_REFUSED(verbs_alloc_parent_domain(context, &parent_attr), ENODEV);
    CHECK_REFUSED(soft_verbs.reg_mr(pd, memory, 8, 0), ENODEV);
    CHECK_REFUSED(soft_verbs.create_comp_channel(context), ENODEV);
    CHECK_REFUSED(soft_verbs.create_cq(context, 4, NULL, NULL, 0), ENODEV);
    CHECK_REFUSED(verbs_create_cq_ex(context, &cq_attr), ENODEV);
    CHECK_REFUSED(soft_verbs.create_qp(pd, &qp_attr), ENODEV);
    CHECK_REFUSED(verbs->create_qp_ex(context, &ex_attr), ENODEV);
}

static void check_verbs_that_use(const struct inherited *inherited)
{
    struct ibv_context *context = inherited->home.context;
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 66, NULL, 0), *bad = NULL;
    struct ibv_recv_wr recv = {.wr_id = 67}, *bad_recv = NULL;
    struct ibv_modify_cq_attr moderation = {.attr_mask = IBV_CQ_ATTR_MODERATE};
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_qp *qp = inherited->pair.a.qp;
    struct ibv_qp_init_attr init_attr;
    struct ibv_device_attr_ex device_ex;
    struct ibv_device_attr device_attr;
    struct ibv_port_attr port_attr;
    struct ibv_qp_attr attr;
    union ibv_gid gid;
    struct ibv_wc wc;
    struct ibv_cq *cq;
    void *cq_context;
    __be16 pkey;

    CHECK(soft_is_stale(context));
    CHECK_EQ(soft_verbs.query_device(context, &device_attr), ENODEV);
    CHECK_EQ(verbs_context_of(context)->query_device_ex(context, NULL, &device_ex, sizeof(device_ex)), ENODEV);
    CHECK_EQ(verbs_query_port(context, 1, &port_attr), ENODEV);
    CHECK_CHILD_ERRNO(soft_verbs.query_gid(context, 1, 0, &gid));
    CHECK_CHILD_ERRNO(soft_verbs.query_pkey(context, 1, 0, &pkey));
    CHECK_EQ(verbs_post_send(qp, &wr, &bad), ENODEV);
    CHECK(bad == &wr);
    CHECK_EQ(verbs_post_recv(qp, &recv, &bad_recv), ENODEV);
    CHECK(bad_recv == &recv);
    CHECK_EQ(verbs_poll_cq(inherited->pair.a.send_cq, 1, &wc), -ENODEV);
    CHECK_EQ(verbs_req_notify_cq(cq_of(inherited->cq), 0), ENODEV);
    CHECK_EQ(soft_verbs.resize_cq(cq_of(inherited->cq), 64), ENODEV);
    CHECK_EQ(verbs_modify_cq(cq_of(inherited->cq), &moderation), ENODEV);
    CHECK_EQ(soft_verbs.query_qp(qp, &attr, IBV_QP_STATE, &init_attr), ENODEV);
    CHECK_EQ(qp_to(qp, IBV_QPS_ERR), ENODEV);
    CHECK_CHILD_ERRNO(soft_verbs.get_cq_event(inherited->channel, &cq, &cq_context));
    soft_verbs.ack_cq_events(cq_of(inherited->cq), 1);
    CHECK_EQ(inherited->cq->next_poll(inherited->cq), ENODEV); /* the parent is in the middle of it */
    inherited->cq->end_poll(inherited->cq);
    CHECK_EQ(inherited->cq->start_poll(inherited->cq, &poll_attr), ENODEV);
    soft_halt(context);
}

static void check_verbs_that_destroy(const struct inherited *inherited)
{
    CHECK_EQ(soft_verbs.destroy_qp(inherited->qp), ENODEV);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(inherited->cq)), ENODEV);
    CHECK_EQ(soft_verbs.destroy_comp_channel(inherited->channel), ENODEV);
    CHECK_EQ(soft_verbs.dereg_mr(inherited->pair.a.mr), ENODEV);
    CHECK_EQ(soft_verbs.dealloc_pd(inherited->home.pd), ENODEV);
    if (inherited->home.td)
        CHECK_EQ(verbs_dealloc_td(inherited->home.td), ENODEV);
    CHECK_EQ(soft_verbs.dealloc_pd(inherited->home.base), ENODEV);
    CHECK_EQ(soft_verbs.close_device(inherited->home.context), ENODEV);
}

/* The child can open a device of its own, in any mode, with other GIDs. */
static void work_anew(const struct inherited *inherited)
{
    union ibv_gid gid;
    struct pair pair;
    uint64_t i;

    PAIR_OPEN(&pair, 0);
    CHECK(!soft_is_stale(pair.own.context));
    for (i = 0; i < 2; i++) {
        CHECK_EQ(soft_verbs.query_gid(pair.own.context, 1, (int)i, &gid), 0);
        CHECK(memcmp(&gid, &inherited->gids[i], sizeof(gid)));
    }
    for (i = 0; i < 20; i++) {
        if (UNDER_TSAN)
            CHECK_EQ(post_receive(&pair.b, i, 64), 0);
        CHECK_EQ(post_send(&pair.a, i, 64), 0);
        if (!UNDER_TSAN) /* after the send: the C thread has to come */
            CHECK_EQ(post_receive(&pair.b, i, 64), 0);
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, i, IBV_WC_SUCCESS);
    }
    pair_close(&pair);
}

static void check_closed(void *argument)
{
    const struct inherited *inherited = argument;

    check_verbs_that_make(inherited);
    check_verbs_that_use(inherited);
    check_verbs_that_destroy(inherited);
    work_anew(inherited);
    check_verbs_that_use(inherited); /* still, with a device of its own */
    check_verbs_that_destroy(inherited);
}

static void open_inherited(struct inherited *inherited)
{
    memset(inherited, 0, sizeof(*inherited));
    home_open(&inherited->home);
    for (int i = 0; i < 2; i++)
        REQUIRE_EQ(soft_verbs.query_gid(inherited->home.context, 1, i, &inherited->gids[i]), 0);
    PAIR_OPEN(&inherited->pair, .homes = {&inherited->home, &inherited->home});
    inherited->channel = soft_verbs.create_comp_channel(inherited->home.context);
    REQUIRE(inherited->channel != NULL);
    REQUIRE_EQ(fcntl(inherited->channel->fd, F_SETFL, O_NONBLOCK), 0);
    inherited->cq = home_cq_ex(&inherited->home, 16, inherited->channel);
    inherited->qp = make_loop(inherited->home.pd, cq_of(inherited->cq), 8);
}

static void close_inherited(struct inherited *inherited)
{
    CHECK_EQ(soft_verbs.destroy_qp(inherited->qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(inherited->cq)), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(inherited->channel), 0);
    pair_close(&inherited->pair);
    home_close(&inherited->home);
}

/* The fork happens during a poll session, with a pending event and requests in flight. */
static void fork_with_work_in_flight(void)
{
    struct inherited inherited;
    struct ibv_cq *cq;
    void *context;
    uint64_t i;

    open_inherited(&inherited);
    CHECK_EQ(verbs_req_notify_cq(cq_of(inherited.cq), 0), 0);
    for (i = 0; i < 3; i++)
        CHECK_EQ(post_nothing(inherited.qp, i), 0);
    start_poll(inherited.cq);
    wait_executed(inherited.qp, 3);
    if (variant->options.mode == SOFT_THREAD)
        CHECK_EQ(soft_set_delay(inherited.home.context, 30000000), 0);
    memset(inherited.pair.a.memory, 9, 64);
    CHECK_EQ(post_write(&inherited.pair.a, &inherited.pair.b, 5, 64), 0);
    CHECK_EQ(post_send(&inherited.pair.a, 6, 64), 0);
    in_child(check_closed, &inherited);

    CHECK_EQ(inherited.cq->wr_id, 0);
    next_poll(inherited.cq);
    CHECK_EQ(inherited.cq->wr_id, 1);
    inherited.cq->end_poll(inherited.cq);
    EXPECT(cq_of(inherited.cq), 2, IBV_WC_SUCCESS);
    CHECK(is_readable(inherited.channel->fd));
    REQUIRE_EQ(soft_verbs.get_cq_event(inherited.channel, &cq, &context), 0);
    soft_verbs.ack_cq_events(cq, 1);
    EXPECT(inherited.pair.a.send_cq, 5, IBV_WC_SUCCESS);
    CHECK_EQ(inherited.pair.b.memory[63], 9);
    CHECK_EQ(post_receive(&inherited.pair.b, 7, 64), 0);
    EXPECT(inherited.pair.a.send_cq, 6, IBV_WC_SUCCESS);
    EXPECT(inherited.pair.b.recv_cq, 7, IBV_WC_SUCCESS);
    close_inherited(&inherited);
}

static void check_grandchild(void *argument)
{
    check_verbs_that_use(argument);
}

struct generations {
    struct inherited grand, own;
};

static void check_both_generations(void *argument)
{
    struct generations *generations = argument;

    check_verbs_that_use(&generations->grand);
    check_verbs_that_use(&generations->own);
    work_anew(&generations->own);
}

/* The child's own device is closed in its child in turn. */
static void fork_again(void *argument)
{
    struct generations *generations = argument;

    open_inherited(&generations->own);
    in_child(check_both_generations, generations);
    CHECK(!soft_is_stale(generations->own.home.context));
    close_inherited(&generations->own);
    check_grandchild(&generations->grand);
}

static void grandchildren(void)
{
    struct generations generations;

    open_inherited(&generations.grand);
    in_child(fork_again, &generations);
    close_inherited(&generations.grand);
}

static void count_in_child(void *argument)
{
    CHECK_EQ(soft_generation, *(uint32_t *)argument + 1);
}

static void forks_are_counted(void)
{
    uint32_t before;

    CHECK_EQ(soft_watch_forks(), 0);
    before = soft_generation;
    in_child(count_in_child, &before);
    CHECK_EQ(soft_generation, before);
}

struct busy {
    struct inherited *inherited;
    atomic_bool stop;
    atomic_ullong done, registered;
};

/* Post and poll without a break, so that a fork finds every lock held now and then. */
static void *keep_busy(void *argument)
{
    struct busy *busy = argument;
    struct pair *pair = &busy->inherited->pair;

    CHECK_EQ(pthread_setname_np(pthread_self(), "busy"), 0);
    while (!atomic_load(&busy->stop)) {
        CHECK_EQ(post_write(&pair->a, &pair->b, busy->done, 4096), 0);
        EXPECT(pair->a.send_cq, busy->done, IBV_WC_SUCCESS);
        atomic_fetch_add(&busy->done, 1);
    }
    return NULL;
}

static void *keep_registering(void *argument)
{
    struct busy *busy = argument;
    char memory[64];

    CHECK_EQ(pthread_setname_np(pthread_self(), "registering"), 0);
    while (!atomic_load(&busy->stop)) {
        struct ibv_mr *mr;

        allocating_begin();
        mr = soft_verbs.reg_mr(busy->inherited->home.base, memory, 64, 0);
        CHECK(mr && soft_verbs.dereg_mr(mr) == 0);
        allocating_end();
        atomic_fetch_add(&busy->registered, 1);
    }
    return NULL;
}

static void check_closed_briefly(void *argument)
{
    const struct inherited *inherited = argument;

    check_verbs_that_make(inherited);
    check_verbs_that_destroy(inherited);
    work_anew(inherited);
}

static void while_other_threads_are_inside(void)
{
    struct inherited inherited;
    struct busy busy = {.inherited = &inherited};
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    pthread_t threads[2];
    int i;

    open_inherited(&inherited);
    REQUIRE_EQ(pthread_create(&threads[0], NULL, keep_busy, &busy), 0);
    REQUIRE_EQ(pthread_create(&threads[1], NULL, keep_registering, &busy), 0);
    /* They are inside, and not on their way there, before the first fork. */
    while (!atomic_load(&busy.done) || !atomic_load(&busy.registered)) {
        REQUIRE(now_ns() < end);
        sleep_us(100);
    }
    for (i = 0; i < 3; i++)
        in_child(check_closed_briefly, &inherited);
    atomic_store(&busy.stop, true);
    CHECK_EQ(pthread_join(threads[0], NULL), 0);
    CHECK_EQ(pthread_join(threads[1], NULL), 0);
    close_inherited(&inherited);
}

/* Memory as the documentation requires of allocators: not inherited by a child, or shared with it. */
struct arena {
    bool shared;
    size_t sizes[64];
    void *blocks[64];
    unsigned int count;
};

static void *arena_alloc(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
    struct arena *arena = pd_context;
    void *memory =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | (arena->shared ? MAP_SHARED : MAP_PRIVATE), -1, 0);

    (void)pd, (void)alignment, (void)type;
    if (memory == MAP_FAILED)
        return NULL;
    if (!arena->shared)
        CHECK_EQ(madvise(memory, size, MADV_DONTFORK), 0);
    arena->sizes[arena->count] = size;
    arena->blocks[arena->count++] = memory;
    return memory;
}

static void arena_free(struct ibv_pd *pd, void *pd_context, void *address, uint64_t type)
{
    struct arena *arena = pd_context;
    unsigned int i;

    (void)pd, (void)type;
    for (i = 0; i < arena->count; i++)
        if (arena->blocks[i] == address) {
            CHECK_EQ(munmap(address, arena->sizes[i]), 0);
            return;
        }
    CHECK(!"unknown memory");
}

static void allocator_memory(bool shared)
{
    struct arena arena = {.shared = shared};
    struct ibv_parent_domain_init_attr attr = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = arena_alloc,
        .free = arena_free,
        .pd_context = &arena,
    };
    struct ibv_cq_init_attr_ex cq_attr = {
        .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD};
    struct inherited inherited;
    uint64_t i;

    open_inherited(&inherited);
    CHECK_EQ(soft_verbs.destroy_qp(inherited.qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(inherited.cq)), 0);
    attr.pd = inherited.home.base;
    attr.td = inherited.home.td;
    cq_attr.parent_domain = verbs_alloc_parent_domain(inherited.home.context, &attr);
    REQUIRE(cq_attr.parent_domain != NULL);
    cq_attr.channel = inherited.channel;
    inherited.cq = verbs_create_cq_ex(inherited.home.context, &cq_attr);
    REQUIRE(inherited.cq != NULL);
    inherited.qp = make_loop(cq_attr.parent_domain, cq_of(inherited.cq), 8);
    for (i = 0; i < 3; i++)
        CHECK_EQ(post_nothing(inherited.qp, i), 0);
    start_poll(inherited.cq);
    wait_executed(inherited.qp, 3);
    in_child(check_closed, &inherited);
    CHECK_EQ(inherited.cq->wr_id, 0);
    next_poll(inherited.cq); /* no other process has consumed it */
    CHECK_EQ(inherited.cq->wr_id, 1);
    inherited.cq->end_poll(inherited.cq);
    EXPECT(cq_of(inherited.cq), 2, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_qp(inherited.qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(inherited.cq)), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(cq_attr.parent_domain), 0);
    inherited.cq = home_cq_ex(&inherited.home, 4, inherited.channel);
    inherited.qp = make_qp(inherited.home.pd, cq_of(inherited.cq), 1);
    close_inherited(&inherited);
}

static void memory_that_is_not_inherited(void)
{
    allocator_memory(false);
}

static void memory_that_is_shared(void)
{
    allocator_memory(true);
}

CHECK_MAIN(CASE(fork_with_work_in_flight), CASE(grandchildren), CASE(forks_are_counted),
           CASE(while_other_threads_are_inside), CASE(memory_that_is_not_inherited), CASE(memory_that_is_shared))
