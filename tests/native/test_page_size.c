/* Tests with pages of 64 KiB: queues request whole pages from the kernel, and freeing one piece does not affect
 * others. */
#include "support.h"
#include "support_alloc.h"
#include "support_kernel.h"
#include "support_srq.h"

#include "alloc/area.h"
#include "soft/objects/context.h"
#include "soft/objects/pd.h"
#include "soft/objects/pd_share.h"
#include "soft/objects/shared.h"

/* All objects of this program call these functions, see WRAPPED in build.py. */
#define REAL(name) __real_##name
#define WIDE(name) __wrap_##name
#define REFUSED() atomic_fetch_add(&refused, 1)

static atomic_uint refused;

#include "wide_pages.h"

/* ---- Cases ------------------------------------------------------------------------------------------------- */

static void try_memory(const struct home *home, char *memory, size_t size, int error)
{
    static const int accesses[] = {0, ACCESS_ALL};
    size_t i;

    for (i = 0; i < COUNT_OF(accesses); i++) {
        struct ibv_mr *mr;

        if (error) {
            CHECK_REFUSED(soft_verbs.reg_mr(home->base, memory, size, accesses[i]), error);
            continue;
        }
        mr = soft_verbs.reg_mr(home->base, memory, size, accesses[i]);
        if (CHECK(mr != NULL))
            CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    }
}

static void memory_is_registered(void)
{
    char *memory = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct home home;
    int knows;

    REQUIRE(memory != MAP_FAILED);
    REQUIRE_EQ(munmap(memory + 2 * PAGE, PAGE), 0);
    home_open(&home);
    for (knows = 0; knows < 1 + kernel_tells_what_is_mapped(); knows++) {
        knows_populate = knows;
        atomic_store(&populated, 0);
        atomic_store(&looked_at, 0);
        try_memory(&home, memory, 2 * PAGE, 0);
        try_memory(&home, memory + 4096, 1, 0);
        try_memory(&home, memory + PAGE - 1, PAGE + 1, 0);
        try_memory(&home, memory + 2 * PAGE - 1, 2, EFAULT);
        CHECK_EQ(atomic_load(&populated) > 0, knows);
        CHECK_EQ(atomic_load(&looked_at) > 0, !knows);
    }
    home_close(&home);
    munmap(memory, 2 * PAGE);
}

static void *check_alloc(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
    unsigned int *rings = pd_context;

    (void)pd;
    if ((type & 0xffffffff) == 5) { /* of a completion queue */
        CHECK_EQ(size % PAGE, 0);
        CHECK_EQ(alignment, PAGE);
        ++*rings;
    } else if ((type & 0xffffffff) == 4) { /* of a shared receive queue */
        CHECK_EQ(alignment, PAGE);
        ++*rings;
    }
    return IBV_ALLOCATOR_USE_DEFAULT;
}

static void never_free(struct ibv_pd *pd, void *pd_context, void *address, uint64_t type)
{
    (void)pd, (void)pd_context, (void)address, (void)type;
    CHECK(!"nothing was given");
}

static void queues_have_pages_of_their_own(void)
{
    unsigned int rings = 0;
    struct ibv_parent_domain_init_attr attr = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = check_alloc,
        .free = never_free,
        .pd_context = &rings,
    };
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD};
    struct home home, with_check;
    struct ibv_device_attr device;
    struct ibv_cq *cq;
    struct ibv_srq *srq;

    home_open(&home);
    CHECK_EQ(soft_verbs.query_device(home.context, &device), 0);
    CHECK_EQ(device.page_size_cap, PAGE);
    attr.pd = home.base;
    attr.td = home.td;
    with_check = home;
    cq_attr.parent_domain = with_check.pd = verbs_alloc_parent_domain(home.context, &attr);
    REQUIRE(with_check.pd != NULL);
    cq = cq_of(verbs_create_cq_ex(home.context, &cq_attr));
    srq = make_srq(&with_check, 4);
    REQUIRE(cq != NULL);
    CHECK_EQ(rings, 2);
    CHECK_EQ(soft_verbs.resize_cq(cq, 3000), 0);
    CHECK_EQ(rings, 3);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(with_check.pd), 0);
    home_close(&home);
}

/* ---- Allocators ---------------------------------------------------------------------------------------------- */

static void pieces_are_whole_pages(void)
{
    static const struct {
        size_t size, alignment;
    } asked[] = {{1, 8}, {4096, 4096}, {PAGE, PAGE}, {PAGE + 1, 64}, {100, 4 * PAGE}};
    struct alloc_source *source = base_pages();
    char *pieces[COUNT_OF(asked)];
    size_t i, mapped = 0;

    atomic_store(&refused, 0);
    for (i = 0; i < COUNT_OF(asked); i++) {
        pieces[i] = sound_piece(source, asked[i].size, asked[i].alignment);
        REQUIRE(pieces[i] != NULL);
        CHECK(is_aligned(pieces[i], PAGE));
        mapped += to_pages(asked[i].size);
        CHECK_EQ(counts_of(source).mapped_bytes, mapped);
    }
    for (i = 0; i < COUNT_OF(asked); i++) {
        CHECK_EQ((uint8_t)pieces[i][asked[i].size - 1], 0xa5);
        CHECK_EQ(alloc_return(source, pieces[i], TYPE_QP), 0);
        CHECK(!is_mapped(pieces[i]));
    }
    CHECK_EQ(counts_of(source).mapped_bytes, 0);
    CHECK_EQ(atomic_load(&refused), 0);
    alloc_release(source);
}

static void an_arena_takes_whole_pages(void)
{
    enum { SMALL = 5000 }; /* more than a chunk has room for */
    struct alloc_source *pages = base_pages(), *arena = alloc_arena_create(pages, 4 * PAGE, 64);
    static char *small[SMALL];
    char *large;
    size_t i;

    REQUIRE(arena != NULL);
    alloc_release(pages);
    atomic_store(&refused, 0);
    for (i = 0; i < SMALL; i++)
        REQUIRE((small[i] = sound_piece(arena, 64, 64)) != NULL);
    CHECK_EQ(counts_of(arena).mapped_bytes, 8 * PAGE);
    large = sound_piece(arena, 3 * PAGE + 1, 8); /* by itself, and rounded no further */
    REQUIRE(large != NULL);
    CHECK_EQ(counts_of(arena).mapped_bytes, 12 * PAGE);
    CHECK_EQ(alloc_return(arena, large, TYPE_QP), 0);
    CHECK(!is_mapped(large));
    for (i = 0; i < SMALL; i++) {
        CHECK_EQ((uint8_t)small[i][63], 0xa5);
        CHECK_EQ(alloc_return(arena, small[i], TYPE_QP), 0);
    }
    CHECK_EQ(counts_of(arena).mapped_bytes, 4 * PAGE); /* a chunk is kept */
    CHECK_EQ(atomic_load(&refused), 0);
    alloc_release(arena);
}

/* Huge pages of 2 MiB, which such a kernel has, too; if none is left, base pages are used. */
static void huge_pages_fall_back_to_whole_pages(void)
{
    struct alloc_source *tiers[] = {alloc_pages_create(2 * MIB, ALLOC_ANY_NODE, true), base_pages()};
    struct alloc_source *source = alloc_tiers_create(tiers, COUNT_OF(tiers));
    size_t i, mapped;
    char *piece;

    REQUIRE(source != NULL);
    for (i = 0; i < COUNT_OF(tiers); i++)
        alloc_release(tiers[i]);
    atomic_store(&refused, 0);
    piece = sound_piece(source, PAGE + 1, 4 * MIB);
    REQUIRE(piece != NULL);
    mapped = counts_of(source).mapped_bytes;
    CHECK(mapped == (counts_of(source).huge_bytes ? 2 * MIB : 2 * PAGE));
    CHECK_EQ(alloc_return(source, piece, TYPE_QP), 0);
    CHECK_EQ(counts_of(source).mapped_bytes, 0);
    CHECK_EQ(atomic_load(&refused), 0);
    alloc_release(source);
}

/* Memory of a domain that processes share: freed memory becomes zero, and memory beside it is not touched. */
static void shared_memory_comes_back_by_whole_pages(void)
{
    struct alloc_source *source;
    struct soft_shared *file;
    char *pieces[3], *again;
    struct ibv_pd *pd;
    struct home home;
    uint32_t share;
    int fd = -1;
    size_t i;

    atomic_store(&refused, 0);
    home_open(&home);
    pd = soft_verbs.alloc_pd(home.context);
    REQUIRE(pd != NULL);
    REQUIRE_EQ(soft_alloc_shpd(pd, 1, &share), 0);
    REQUIRE_EQ(soft_export_shpd(pd, &fd), 0); /* makes the file, and maps it */
    close(fd);
    file = atomic_load(&to_soft_pd(pd)->domain->file);
    CHECK(is_aligned(file->area.memory, PAGE));
    CHECK_EQ(file->area.chunk_bytes % PAGE, 0);
    source = alloc_area_create(&file->area);
    REQUIRE(source != NULL);
    for (i = 0; i < COUNT_OF(pieces); i++) {
        pieces[i] = sound_piece(source, 5000, 8);
        REQUIRE(pieces[i] != NULL);
        CHECK(is_aligned(pieces[i], PAGE));
    }
    CHECK_EQ(alloc_return(source, pieces[1], TYPE_QP), 0);
    if (kernel_takes_pages_back())
        CHECK(is_zero(pieces[1], 5000));
    CHECK_EQ((uint8_t)pieces[0][4999], 0xa5);
    CHECK_EQ((uint8_t)pieces[2][0], 0xa5);
    again = alloc_piece(source, 2 * PAGE, 2 * PAGE, TYPE_QP);
    REQUIRE(again != NULL);
    CHECK(is_aligned(again, 2 * PAGE));
    CHECK_EQ(alloc_return(source, again, TYPE_QP), 0);
    CHECK_EQ(alloc_return(source, pieces[0], TYPE_QP), 0);
    CHECK_EQ(alloc_return(source, pieces[2], TYPE_QP), 0);
    CHECK_EQ(alloc_release(source), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
    home_close(&home);
    CHECK_EQ(atomic_load(&refused), 0);
}

CHECK_MAIN_ONCE(CASE(memory_is_registered), CASE(queues_have_pages_of_their_own), CASE(pieces_are_whole_pages),
                CASE(an_arena_takes_whole_pages), CASE(huge_pages_fall_back_to_whole_pages),
                CASE(shared_memory_comes_back_by_whole_pages))
