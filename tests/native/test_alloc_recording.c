/* Tests of the recording wrapper: allocated memory by resource type; and queues of the device in an allocator's
 * memory. */
#include "support.h"
#include "support_alloc.h"
#include "support_fork.h"
#include "support_srq.h"
#include "support_threads.h"

#include <unistd.h>

#define TYPE_SRQ (1ull << 32 | 4)
#define TYPE_CQ (1ull << 32 | 5)

static struct alloc_source *recording_of(struct alloc_source *inner)
{
    struct alloc_source *recording = alloc_recording_create(inner);

    REQUIRE(recording != NULL);
    if (inner)
        alloc_release(inner);
    return recording;
}

static struct alloc_usage usage_of(struct alloc_source *recording, uint64_t type)
{
    struct alloc_usage usages[20];
    size_t types = alloc_recording_usage(recording, usages, COUNT_OF(usages)), i;

    for (i = 0; i < types && i < COUNT_OF(usages); i++)
        if (usages[i].resource_type == type)
            return usages[i];
    return (struct alloc_usage){.resource_type = type};
}

static void check_usage(struct alloc_source *recording, uint64_t type, size_t pieces, size_t bytes, size_t peak_pieces,
                        size_t peak_bytes)
{
    struct alloc_usage usage = usage_of(recording, type);

    CHECK_EQ(usage.pieces, pieces);
    CHECK_EQ(usage.bytes, bytes);
    CHECK_EQ(usage.peak_pieces, peak_pieces);
    CHECK_EQ(usage.peak_bytes, peak_bytes);
}

static void by_type(void)
{
    struct alloc_source *recording = recording_of(base_pages());
    void *one = alloc_piece(recording, 100, 8, TYPE_QP), *two = alloc_piece(recording, 8, 8, TYPE_RECORD);
    void *three = alloc_piece(recording, 8, 8, TYPE_RECORD);

    REQUIRE(one && two && three);
    check_usage(recording, TYPE_QP, 1, 100, 1, 100);
    check_usage(recording, TYPE_RECORD, 2, 16, 2, 16);
    CHECK_EQ(alloc_return(recording, two, TYPE_RECORD), 0);
    check_usage(recording, TYPE_RECORD, 1, 8, 2, 16);
    CHECK_EQ(alloc_return(recording, two, TYPE_RECORD), EINVAL);
    check_usage(recording, TYPE_RECORD, 1, 8, 2, 16);
    CHECK_EQ(alloc_return(recording, three, TYPE_QP), 0); /* counts as what it was asked for */
    check_usage(recording, TYPE_RECORD, 0, 0, 2, 16);
    check_usage(recording, TYPE_QP, 1, 100, 1, 100);
    CHECK_EQ(usage_of(recording, TYPE_RECORD).allocations, 2);
    CHECK_EQ(alloc_recording_usage(recording, NULL, 0), 2);
    CHECK_EQ(alloc_return(recording, one, TYPE_QP), 0);
    CHECK_EQ(counts_of(recording).mapped_bytes + counts_of(recording).pieces, 0);
    alloc_release(recording);
}

static void out_of_memory(void)
{
    size_t left = 1;
    struct alloc_source *recording = recording_of(limited_pages(&left));
    void *piece = alloc_piece(recording, 8, 8, TYPE_QP);

    REQUIRE(piece != NULL);
    CHECK_REFUSED(alloc_piece(recording, 8, 8, TYPE_QP), ENOSPC);
    CHECK_EQ(usage_of(recording, TYPE_QP).failures, 1);
    check_usage(recording, TYPE_QP, 1, 8, 1, 8);
    CHECK_EQ(alloc_return(recording, piece, TYPE_QP), 0);
    alloc_release(recording);

    recording = recording_of(alloc_default_create());
    CHECK(alloc_piece(recording, 8, 8, TYPE_QP) == IBV_ALLOCATOR_USE_DEFAULT);
    CHECK_EQ(usage_of(recording, TYPE_QP).defaults, 1);
    CHECK_EQ(usage_of(recording, TYPE_QP).allocations, 0);
    CHECK_EQ(counts_of(recording).pieces, 0);
    alloc_release(recording);
}

static void many_types(void)
{
    struct alloc_source *recording = recording_of(alloc_arena_create(base_pages(), 256 * KIB, 64));
    struct alloc_usage usages[100];
    void *piece[100];
    size_t i;

    for (i = 0; i < COUNT_OF(piece); i++)
        REQUIRE((piece[i] = alloc_piece(recording, 8 * (i + 1), 8, 21ull << 32 | i)) != NULL);
    REQUIRE_EQ(alloc_recording_usage(recording, usages, COUNT_OF(usages)), COUNT_OF(usages));
    for (i = 0; i < COUNT_OF(piece); i++) {
        CHECK_EQ(usages[i].resource_type, 21ull << 32 | i); /* in the order of the asking */
        CHECK_EQ(usages[i].bytes, 8 * (i + 1));
        CHECK_EQ(alloc_return(recording, piece[i], 21ull << 32 | i), 0);
    }
    alloc_release(recording);
}

static void counts_without_allocating(void)
{
    struct alloc_source *recording = recording_of(NULL);
    char memory[2];

    CHECK_EQ(alloc_recording_note(recording, &memory[0], 100, TYPE_QP), 0);
    CHECK_EQ(alloc_recording_note(recording, &memory[1], 50, TYPE_QP), 0);
    CHECK_EQ(alloc_recording_note(recording, &memory[1], 50, TYPE_QP), EEXIST);
    check_usage(recording, TYPE_QP, 2, 150, 2, 150);
    CHECK_EQ(counts_of(recording).pieces, 2);
    CHECK_EQ(alloc_return(recording, &memory[0], TYPE_QP), 0);
    CHECK_EQ(alloc_return(recording, &memory[0], TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(recording, &memory[1], TYPE_QP), 0);
    alloc_recording_without(recording, TYPE_CQ, true);
    alloc_recording_without(recording, TYPE_CQ, false);
    CHECK_EQ(usage_of(recording, TYPE_CQ).defaults, 1);
    CHECK_EQ(usage_of(recording, TYPE_CQ).failures, 1);
    alloc_release(recording);
}

static void use(void *argument)
{
    struct alloc_source *recording = *(struct alloc_source **)argument;
    void *piece[20];
    size_t round, i;

    for (round = 0; round < SCALED(50); round++) {
        for (i = 0; i < COUNT_OF(piece); i++)
            REQUIRE((piece[i] = sound_piece(recording, 8, 8)) != NULL);
        for (i = 0; i < COUNT_OF(piece); i++)
            CHECK_EQ(alloc_return(recording, piece[i], TYPE_QP), 0);
    }
}

static void threads(void)
{
    struct alloc_source *recording = recording_of(alloc_arena_create(base_pages(), 256 * KIB, 64));
    struct alloc_source *arguments[4] = {recording, recording, recording, recording};

    run_threads(COUNT_OF(arguments), use, arguments, sizeof(arguments[0]));
    CHECK_EQ(usage_of(recording, TYPE_QP).pieces, 0);
    CHECK_EQ(usage_of(recording, TYPE_QP).allocations, 4 * 20 * SCALED(50));
    CHECK(usage_of(recording, TYPE_QP).peak_pieces <= 4 * 20);
    alloc_release(recording);
}

static void use_in_child(void *argument)
{
    struct alloc_source *recording = argument;

    CHECK_EQ(alloc_recording_usage(recording, NULL, 0), 0);
    use(&recording);
    CHECK_EQ(alloc_recording_usage(recording, NULL, 0), 1);
}

static void forks(void)
{
    struct alloc_source *recording = recording_of(base_pages());
    void *piece = alloc_piece(recording, 100, 8, TYPE_CQ);

    REQUIRE(piece != NULL);
    in_child(use_in_child, recording);
    check_usage(recording, TYPE_CQ, 1, 100, 1, 100);
    CHECK_EQ(alloc_return(recording, piece, TYPE_CQ), 0);
    alloc_release(recording);
}

/* ---- Queues ---------------------------------------------------------------------------------------------- */

static void *domain_alloc(struct ibv_pd *pd, void *source, size_t size, size_t alignment, uint64_t type)
{
    (void)pd;
    return alloc_piece(source, size, alignment, type);
}

static void domain_free(struct ibv_pd *pd, void *source, void *address, uint64_t type)
{
    (void)pd;
    alloc_free(source, address, type);
}

static void use_queues(const struct home *home)
{
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 64, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = home->pd};
    struct ibv_qp_init_attr qp_attr = {.cap = {16, 16, 4, 4, 64}, .qp_type = IBV_QPT_RC};
    struct ibv_cq *cq = cq_of(verbs_create_cq_ex(home->context, &cq_attr));
    struct ibv_srq *srq = make_srq(home, 4);
    struct ibv_qp *qp;

    REQUIRE(cq != NULL);
    qp_attr.send_cq = qp_attr.recv_cq = cq;
    qp = soft_verbs.create_qp(home->pd, &qp_attr);
    REQUIRE(qp != NULL);
    qp_connect(qp, &default_link, qp->qp_num);
    CHECK_EQ(post(qp, &(struct ibv_send_wr){.wr_id = 1, .send_flags = IBV_SEND_SIGNALED}), 0);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.resize_cq(cq, 1000), 0);
    CHECK_EQ(srq_post(srq, 1), 0);
    CHECK_EQ(srq_resize(srq, 64), 0);
    srq_expect(srq, 1);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
}

static void queues_in(struct alloc_source *inner)
{
    struct alloc_source *recording = recording_of(inner);
    struct ibv_parent_domain_init_attr attr = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = domain_alloc,
        .free = domain_free,
        .pd_context = recording,
    };
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct home home, with_memory;

    home_open(&home);
    attr.pd = home.base;
    attr.td = home.td;
    with_memory = home;
    with_memory.pd = verbs_alloc_parent_domain(home.context, &attr);
    REQUIRE(with_memory.pd != NULL);
    use_queues(&with_memory);
    check_usage(recording, TYPE_CQ, 0, 0, 2, (page > 4096 ? page : 4096) + 65536); /* both rings while it is resized */
    check_usage(recording, TYPE_SRQ, 0, 0, 2, 64 * 128 + 4 * 128);
    check_usage(recording, TYPE_RECORD, 0, 0, 3, 24);
    CHECK_EQ(usage_of(recording, TYPE_QP).allocations, 1);
    CHECK_EQ(counts_of(recording).pieces, 0);
    CHECK_EQ(soft_verbs.dealloc_pd(with_memory.pd), 0);
    home_close(&home);
    alloc_release(recording);
}

static void queues(void)
{
    struct alloc_source *pages = base_pages();

    queues_in(alloc_arena_create(pages, 256 * KIB, 64));
    queues_in(pages);
}

CHECK_MAIN(CASE(by_type), CASE(out_of_memory), CASE(many_types), CASE(counts_without_allocating), CASE(threads),
           CASE(forks), CASE(queues))
