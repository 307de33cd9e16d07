/* Tests of a parent domain whose queues are in memory of the caller: requested as mlx5 does, used, and freed. */
#include "support.h"
#include "support_srq.h"

#include <unistd.h>

#define TYPE_QP (1ull << 32 | 1)
#define TYPE_RECORD (1ull << 32 | 3)
#define TYPE_SRQ (1ull << 32 | 4)
#define TYPE_CQ (1ull << 32 | 5)

enum answer { GOOD, USE_DEFAULT, NOTHING, MISALIGNED, DIRTY_FIRST, DIRTY_MIDDLE, DIRTY_LAST, DIRTY };

struct block {
    void *address, *memory; /* what was returned, and what to free */
    size_t size, alignment;
    uint64_t type;
    bool freed;
};

struct pool {
    struct ibv_context *context;
    struct ibv_pd *parent;
    struct block blocks[64];
    unsigned int count, live;
    enum answer answer; /* to the request number `spoiled`, counted from 0 */
    unsigned int spoiled;
    int error; /* errno with NOTHING */
    bool calls_verbs;
};

static size_t page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static void call_verbs(struct pool *pool)
{
    struct ibv_pd *pd = soft_verbs.alloc_pd(pool->context);

    CHECK(pd && soft_verbs.dealloc_pd(pd) == 0);
}

static void *pool_alloc(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
    struct pool *pool = pd_context;
    enum answer answer = pool->count == pool->spoiled ? pool->answer : GOOD;
    struct block *block = &pool->blocks[pool->count++];
    uint8_t *bytes;

    REQUIRE(pool->count < COUNT_OF(pool->blocks));
    if (pool->parent) /* NULL while it is being made: no call is expected then */
        CHECK(pd == pool->parent);
    if (pool->calls_verbs)
        call_verbs(pool);
    *block = (struct block){.size = size, .alignment = alignment, .type = type};
    if (answer == NOTHING) {
        errno = pool->error;
        return NULL;
    }
    if (answer == USE_DEFAULT)
        return IBV_ALLOCATOR_USE_DEFAULT;
    REQUIRE_EQ(posix_memalign(&block->memory, page(), size + alignment), 0);
    memset(block->memory, 0, size + alignment);
    bytes = block->memory;
    if (answer == MISALIGNED)
        bytes += alignment / 2;
    if (answer == DIRTY_FIRST)
        bytes[0] = 1;
    if (answer == DIRTY_MIDDLE)
        bytes[size / 2] = 1;
    if (answer == DIRTY_LAST)
        bytes[size - 1] = 1;
    if (answer == DIRTY)
        memset(bytes, 1, size);
    block->address = bytes;
    pool->live++;
    return bytes;
}

static void pool_free(struct ibv_pd *pd, void *pd_context, void *address, uint64_t type)
{
    struct pool *pool = pd_context;
    unsigned int i;

    CHECK(pd == pool->parent);
    if (pool->calls_verbs)
        call_verbs(pool);
    for (i = 0; i < pool->count; i++) {
        struct block *block = &pool->blocks[i];

        if (block->freed || !block->address || block->address != address)
            continue;
        CHECK_EQ(type, block->type);
        block->freed = true;
        pool->live--;
        free(block->memory);
        return;
    }
    CHECK(!"memory was given back that was not taken, or twice");
}

/* Replace the home's domain for queues by one with the allocator. */
static void pool_open(struct pool *pool, struct home *home, struct home *with_pool)
{
    struct ibv_parent_domain_init_attr attr = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = pool_alloc,
        .free = pool_free,
        .pd_context = pool,
    };

    home_open(home);
    memset(pool, 0, sizeof(*pool));
    pool->context = home->context;
    pool->spoiled = UINT32_MAX;
    attr.pd = home->base;
    attr.td = home->td;
    *with_pool = *home;
    with_pool->pd = verbs_alloc_parent_domain(home->context, &attr);
    REQUIRE(with_pool->pd != NULL);
    CHECK_EQ(pool->count, 0);
    pool->parent = with_pool->pd;
}

static void pool_close(struct pool *pool, struct home *home)
{
    CHECK_EQ(pool->live, 0);
    CHECK_EQ(soft_verbs.dealloc_pd(pool->parent), 0);
    home_close(home);
}

static struct ibv_cq *try_cq(const struct home *home, uint32_t cqe)
{
    struct ibv_cq_init_attr_ex attr = {.cqe = cqe, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = home->pd};

    return cq_of(verbs_create_cq_ex(home->context, &attr));
}

static struct ibv_qp *try_qp(const struct home *home, struct ibv_cq *cq, const struct ibv_qp_cap *cap)
{
    struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .cap = *cap, .qp_type = IBV_QPT_RC};

    return soft_verbs.create_qp(home->pd, &attr);
}

static const struct ibv_qp_cap usual_cap = {16, 16, 4, 4, 64};

static void check_block(const struct block *block, size_t size, size_t alignment, uint64_t type)
{
    CHECK_EQ(block->size, size);
    CHECK_EQ(block->alignment, alignment);
    CHECK_EQ(block->type, type);
}

/* A receive entry is 16 bytes and 16 per scatter entry, rounded to a power of two; a send entry 64 bytes and its
 * gather entries or inline bytes, rounded to 64. All of it is rounded to the alignment: the larger entry's. */
static void sizes_and_alignments(void)
{
    static const struct {
        struct ibv_qp_cap cap;
        size_t size, alignment;
    } qps[] = {
        {{16, 16, 4, 4, 64}, 16 * 128 + 16 * 128, 128},
        {{1, 1, 1, 1, 0}, 64 + 128, 128},
        {{3, 0, 0, 0, 0}, 64 + 4 * 64, 64}, /* no receives, but one place */
        {{100, 7, 1, 15, 200}, 8 * 256 + 128 * 320, 512},
        {{4, 4, 32, 32, 0}, 4 * 1024 + 4 * 576, 1024},
    };
    static const struct {
        uint32_t cqe;
        size_t size;
    } cqs[] = {{1, 64}, {64, 4096}, {65, 8192}, {1000, 65536}}; /* rounded up to pages */
    struct home home, with_pool;
    struct ibv_cq *plain;
    struct pool pool;
    size_t i;

    pool_open(&pool, &home, &with_pool);
    plain = home_cq(&home, 16, NULL);
    for (i = 0; i < COUNT_OF(qps); i++) {
        struct ibv_qp *qp;

        pool.count = 0;
        qp = try_qp(&with_pool, plain, &qps[i].cap);
        REQUIRE(qp != NULL);
        REQUIRE_EQ(pool.count, 2);
        check_block(&pool.blocks[0], (qps[i].size + qps[i].alignment - 1) / qps[i].alignment * qps[i].alignment,
                    qps[i].alignment, TYPE_QP);
        check_block(&pool.blocks[1], 8, 8, TYPE_RECORD);
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
        CHECK_EQ(pool.live, 0);
    }
    for (i = 0; i < COUNT_OF(cqs); i++) {
        struct ibv_cq *cq;

        pool.count = 0;
        cq = try_cq(&with_pool, cqs[i].cqe);
        REQUIRE(cq != NULL);
        REQUIRE_EQ(pool.count, 2);
        check_block(&pool.blocks[0], (cqs[i].size + page() - 1) / page() * page(), page(), TYPE_CQ);
        check_block(&pool.blocks[1], 8, 8, TYPE_RECORD);
        CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
        CHECK_EQ(pool.live, 0);
    }
    CHECK_EQ(soft_verbs.destroy_cq(plain), 0);
    pool_close(&pool, &home);
}

static bool contains(const struct block *block, uint64_t value)
{
    const uint8_t *bytes = block->address;
    size_t i;

    for (i = 0; i + 8 <= block->size; i += 8)
        if (!memcmp(bytes + i, &value, 8))
            return true;
    return false;
}

static uint32_t counter(const struct block *record, unsigned int index)
{
    return ((const uint32_t *)record->address)[index];
}

/* The queues are in that memory: requests, completions, and the counters of the doorbell records. */
static void memory_is_used(void)
{
    const uint64_t send_id = 0x5e5e111122223333, recv_id = 0x4ece444455556666;
    struct ibv_send_wr wr = request(IBV_WR_SEND, send_id, NULL, 0);
    struct ibv_recv_wr recv = {.wr_id = recv_id}, *bad;
    struct home home, with_pool;
    struct block *cq_block, *cq_record, *qp_block, *qp_record;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct pool pool;

    pool_open(&pool, &home, &with_pool);
    cq = try_cq(&with_pool, 16);
    qp = try_qp(&with_pool, cq, &usual_cap);
    REQUIRE(cq && qp && pool.count == 4);
    cq_block = &pool.blocks[0], cq_record = &pool.blocks[1];
    qp_block = &pool.blocks[2], qp_record = &pool.blocks[3];
    qp_connect(qp, &default_link, qp->qp_num);

    CHECK_EQ(verbs_post_recv(qp, &recv, &bad), 0);
    CHECK_EQ(verbs_post_recv(qp, &recv, &bad), 0);
    CHECK_EQ(verbs_post_recv(qp, &recv, &bad), 0);
    CHECK_EQ(counter(qp_record, 0), 3); /* receives stand first, as on mlx5 */
    CHECK_EQ(counter(qp_record, 1), 0);
    CHECK(contains(qp_block, recv_id));
    CHECK_EQ(post(qp, &wr), 0);
    CHECK_EQ(post(qp, &wr), 0);
    CHECK_EQ(counter(qp_record, 1), 2);
    CHECK(contains(qp_block, send_id));
    CHECK_EQ(counter(cq_record, 0), 0);
    EXPECT(cq, recv_id, IBV_WC_SUCCESS);
    CHECK_EQ(counter(cq_record, 0), 1); /* how many the driver has consumed */
    EXPECT(cq, send_id, IBV_WC_SUCCESS);
    EXPECT(cq, recv_id, IBV_WC_SUCCESS);
    EXPECT(cq, send_id, IBV_WC_SUCCESS);
    CHECK_EQ(counter(cq_record, 0), 4);
    CHECK(contains(cq_block, send_id) && contains(cq_block, recv_id));
    CHECK_EQ(qp_to(qp, IBV_QPS_RESET), 0);
    CHECK_EQ(counter(qp_record, 0), 0);
    CHECK_EQ(counter(qp_record, 1), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(qp_block->freed + qp_record->freed, 2);
    CHECK_EQ(cq_block->freed + cq_record->freed, 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(cq_block->freed + cq_record->freed, 2);
    pool_close(&pool, &home);
}

/* If the allocator defers to the device, its free function is not called for that memory. */
static void default_memory(void)
{
    struct home home, with_pool;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct pool pool;
    unsigned int which;

    for (which = 0; which < 4; which++) {
        pool_open(&pool, &home, &with_pool);
        pool.answer = USE_DEFAULT;
        pool.spoiled = which;
        cq = try_cq(&with_pool, 16);
        qp = try_qp(&with_pool, cq, &usual_cap);
        REQUIRE(cq && qp);
        CHECK_EQ(pool.count, 4);
        CHECK_EQ(pool.live, 3);
        qp_connect(qp, &default_link, qp->qp_num);
        CHECK_EQ(post(qp, &(struct ibv_send_wr){.wr_id = 1, .send_flags = IBV_SEND_SIGNALED}), 0);
        EXPECT(cq, 1, IBV_WC_SUCCESS);
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
        CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
        pool_close(&pool, &home);
    }
}

/* Wrong memory from an allocator is refused and freed, and no object is left. */
static void refused_memory(void)
{
    static const struct {
        enum answer answer;
        int error, expected;
    } table[] = {
        {NOTHING, ENOSPC, ENOSPC}, {NOTHING, EPERM, EPERM},   {NOTHING, 0, ENOMEM},    {MISALIGNED, 0, EINVAL},
        {DIRTY_FIRST, 0, EINVAL},  {DIRTY_MIDDLE, 0, EINVAL}, {DIRTY_LAST, 0, EINVAL}, {DIRTY, 0, EINVAL},
    };
    struct soft_counts before, after;
    struct home home, with_pool;
    struct ibv_cq *plain;
    struct ibv_qp *qp;
    struct pool pool;
    unsigned int second;
    size_t i;

    pool_open(&pool, &home, &with_pool);
    plain = home_cq(&home, 16, NULL);
    soft_get_counts(home.context, &before);
    for (i = 0; i < COUNT_OF(table); i++) {
        for (second = 0; second < 2; second++) { /* the queue's memory, or its record's */
            pool.answer = table[i].answer;
            pool.error = table[i].error;
            pool.spoiled = second;
            pool.count = 0;
            CHECK_REFUSED(try_qp(&with_pool, plain, &usual_cap), table[i].expected);
            CHECK_EQ(pool.count, 1 + second);
            CHECK_EQ(pool.live, 0);
            pool.count = 0;
            CHECK_REFUSED(try_cq(&with_pool, 16), table[i].expected);
            CHECK_EQ(pool.count, 1 + second);
            CHECK_EQ(pool.live, 0);
        }
    }
    soft_get_counts(home.context, &after);
    CHECK(!memcmp(&before, &after, sizeof(before)));
    pool.answer = GOOD;
    pool.count = 0;
    qp = try_qp(&with_pool, plain, &usual_cap);
    REQUIRE(qp != NULL);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(plain), 0);
    pool_close(&pool, &home);
}

/* An entry of a shared receive queue has 16 bytes and 16 for each scatter entry, rounded to a power of two and 32 at
 * least; the whole is not rounded, but begins a page. A resized queue requests new memory for its ring, but not for its
 * record. */
static void shared_receive_queues(void)
{
    static const struct {
        uint32_t max_wr, max_sge;
        size_t size;
    } table[] = {{1, 0, 32}, {1, 1, 32}, {3, 2, 4 * 64}, {100, 3, 128 * 64}, {16, 32, 16 * 1024}};
    const uint64_t wr_id = 0x5edefeed11112222;
    struct home home, with_pool;
    struct ibv_srq *srq;
    struct pool pool;
    size_t i;

    pool_open(&pool, &home, &with_pool);
    for (i = 0; i < COUNT_OF(table); i++) {
        pool.count = 0;
        srq = try_srq(&with_pool, table[i].max_wr, table[i].max_sge);
        REQUIRE(srq != NULL);
        REQUIRE_EQ(pool.count, 2);
        check_block(&pool.blocks[0], table[i].size, page(), TYPE_SRQ);
        check_block(&pool.blocks[1], 8, 8, TYPE_RECORD);
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
        CHECK_EQ(pool.live, 0);
    }
    pool.count = 0;
    srq = make_srq(&with_pool, 4);
    CHECK_EQ(srq_post(srq, wr_id), 0);
    CHECK_EQ(srq_post(srq, wr_id + 1), 0);
    CHECK(contains(&pool.blocks[0], wr_id));
    CHECK_EQ(counter(&pool.blocks[1], 0), 2);
    CHECK_EQ(srq_resize(srq, 64), 0);
    REQUIRE_EQ(pool.count, 3);
    check_block(&pool.blocks[2], 64 * 128, page(), TYPE_SRQ);
    CHECK(pool.blocks[0].freed && !pool.blocks[1].freed && !pool.blocks[2].freed);
    CHECK(contains(&pool.blocks[2], wr_id) && contains(&pool.blocks[2], wr_id + 1));
    CHECK_EQ(srq_resize(srq, 1), EINVAL); /* refused with the memory in hand, which is given back */
    CHECK_EQ(pool.count, 4);
    CHECK_EQ(pool.live, 2);
    CHECK_EQ(srq_resize(srq, 0), EINVAL); /* refused before */
    CHECK_EQ(pool.count, 4);
    srq_expect(srq, wr_id);
    srq_expect(srq, wr_id + 1);
    CHECK_EQ(soft_verbs.dealloc_pd(with_pool.pd), EBUSY); /* its free is needed yet */
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    pool_close(&pool, &home);
}

/* Memory that the device provided itself is not passed to the allocator; a resize may change which of them provides
 * it. */
static void default_memory_of_shared_queues(void)
{
    struct home home, with_pool;
    struct ibv_srq *srq;
    struct pool pool;
    unsigned int which;

    for (which = 0; which < 3; which++) {
        pool_open(&pool, &home, &with_pool);
        pool.answer = USE_DEFAULT;
        pool.spoiled = which;
        srq = make_srq(&with_pool, 4);
        CHECK_EQ(srq_post(srq, 1), 0);
        CHECK_EQ(srq_resize(srq, 8), 0);
        CHECK_EQ(pool.count, 3);
        CHECK_EQ(pool.live, which == 0 ? 2 : 1);
        CHECK_EQ(srq_resize(srq, 16), 0);
        CHECK_EQ(pool.live, which == 1 ? 1 : 2);
        srq_expect(srq, 1);
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
        pool_close(&pool, &home);
    }
}

/* A refused creation leaves no queue, a refused resize the queue as it was. */
static void refused_memory_of_shared_queues(void)
{
    static const struct {
        enum answer answer;
        int error, expected;
    } table[] = {{NOTHING, ENOSPC, ENOSPC}, {NOTHING, 0, ENOMEM}, {MISALIGNED, 0, EINVAL}, {DIRTY_LAST, 0, EINVAL}};
    struct soft_counts before, after;
    struct home home, with_pool;
    struct ibv_srq *srq;
    struct pool pool;
    unsigned int which;
    size_t i;

    pool_open(&pool, &home, &with_pool);
    for (i = 0; i < COUNT_OF(table); i++) {
        soft_get_counts(home.context, &before);
        pool.answer = table[i].answer;
        pool.error = table[i].error;
        for (which = 0; which < 2; which++) {
            pool.count = 0;
            pool.spoiled = which;
            CHECK_REFUSED(try_srq(&with_pool, 4, 1), table[i].expected);
            CHECK_EQ(pool.count, 1 + which);
            CHECK_EQ(pool.live, 0);
        }
        soft_get_counts(home.context, &after);
        CHECK(!memcmp(&before, &after, sizeof(before)));
        pool.count = 0;
        pool.spoiled = 2;
        srq = make_srq(&with_pool, 4);
        CHECK_EQ(srq_post(srq, 7), 0);
        CHECK_EQ(srq_resize(srq, 8), table[i].expected);
        CHECK_EQ(pool.live, 2);
        CHECK_EQ(srq_query(srq).max_wr, 4);
        srq_expect(srq, 7);
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
        CHECK_EQ(pool.live, 0);
    }
    pool_close(&pool, &home);
}

/* A creation that fails for another reason frees the memory, too: here none is requested. */
static void wrong_attributes_allocate_nothing(void)
{
    struct ibv_qp_cap cap = usual_cap;
    struct home home, with_pool;
    struct ibv_cq *plain;
    struct pool pool;

    pool_open(&pool, &home, &with_pool);
    plain = home_cq(&home, 16, NULL);
    cap.max_send_sge = 1000;
    CHECK_REFUSED(try_qp(&with_pool, plain, &cap), EINVAL);
    CHECK_REFUSED(try_cq(&with_pool, 0), EINVAL);
    CHECK_EQ(pool.count, 0);
    CHECK_EQ(soft_verbs.destroy_cq(plain), 0);
    pool_close(&pool, &home);
}

/* Other domains of the same base are not affected, nor are regions. */
static void only_this_domain(void)
{
    struct home home, with_pool;
    struct ibv_mr *mr;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct pool pool;
    char memory[64];

    pool_open(&pool, &home, &with_pool);
    cq = home_cq(&home, 16, NULL);
    qp = try_qp(&home, cq, &usual_cap);
    mr = soft_verbs.reg_mr(with_pool.pd, memory, 64, 0);
    REQUIRE(qp && mr);
    CHECK_EQ(pool.count, 0);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    pool_close(&pool, &home);
}

static void *context_seen = &context_seen;

static void *note_context(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
    (void)pd, (void)size, (void)alignment, (void)type;
    context_seen = pd_context;
    return IBV_ALLOCATOR_USE_DEFAULT;
}

static void never_free(struct ibv_pd *pd, void *pd_context, void *address, uint64_t type)
{
    (void)pd, (void)pd_context, (void)address, (void)type;
    CHECK(!"nothing was taken");
}

/* Both callbacks or neither; the masks say which fields count. */
static void attributes(void)
{
    struct ibv_parent_domain_init_attr good = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS,
        .alloc = note_context,
        .free = never_free,
        .pd_context = &good,
    };
    struct ibv_parent_domain_init_attr attr;
    struct home home, other;
    struct ibv_cq *cq;

    home_open(&home);
    good.pd = home.base;
    attr = good, attr.free = NULL;
    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL);
    attr = good, attr.alloc = NULL;
    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL);
    attr.free = NULL;
    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL);

    other = home;
    other.pd = verbs_alloc_parent_domain(home.context, &good);
    REQUIRE(other.pd != NULL);
    cq = try_cq(&other, 4);
    REQUIRE(cq != NULL);
    CHECK(context_seen == NULL); /* the context without its bit */
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(other.pd), 0);

    attr = good, attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    attr.free = NULL; /* not looked at */
    context_seen = &other;
    other.pd = verbs_alloc_parent_domain(home.context, &attr);
    REQUIRE(other.pd != NULL);
    cq = try_cq(&other, 4);
    REQUIRE(cq != NULL);
    CHECK(context_seen == &other); /* never called */
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(other.pd), 0);
    home_close(&home);
}

/* The callbacks run with no lock held: they may call verbs themselves. */
static void allocators_may_call_verbs(void)
{
    struct home home, with_pool;
    struct ibv_srq *srq;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct pool pool;

    pool_open(&pool, &home, &with_pool);
    pool.calls_verbs = true;
    cq = try_cq(&with_pool, 16);
    qp = try_qp(&with_pool, cq, &usual_cap);
    srq = make_srq(&with_pool, 4);
    REQUIRE(cq && qp);
    CHECK_EQ(srq_resize(srq, 8), 0);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    pool_close(&pool, &home);
}

/* A connection on such memory works both ways. */
static void working_connection(void)
{
    struct home home, with_pool;
    struct pool pool;
    struct pair pair;
    uint64_t i;

    pool_open(&pool, &home, &with_pool);
    PAIR_OPEN(&pair, .homes = {&with_pool, &with_pool});
    CHECK_EQ(pool.count, variant->thread_domain ? 12 : 4);
    for (i = 0; i < 100; i++) {
        CHECK_EQ(post_receive(&pair.b, i, 64), 0);
        CHECK_EQ(post_send(&pair.a, i, 64), 0);
        CHECK_EQ(post_write(&pair.b, &pair.a, i, 64), 0);
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, i, IBV_WC_SUCCESS);
        EXPECT(pair.b.send_cq, i, IBV_WC_SUCCESS);
    }
    pair_close(&pair);
    pool_close(&pool, &home);
}

CHECK_MAIN(CASE(sizes_and_alignments), CASE(memory_is_used), CASE(default_memory), CASE(refused_memory),
           CASE(shared_receive_queues), CASE(default_memory_of_shared_queues), CASE(refused_memory_of_shared_queues),
           CASE(wrong_attributes_allocate_nothing), CASE(only_this_domain), CASE(attributes),
           CASE(allocators_may_call_verbs), CASE(working_connection))
