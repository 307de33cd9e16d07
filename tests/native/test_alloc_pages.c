/* Tests of allocators whose pieces are mappings: base pages, huge pages, pages of a NUMA node; and their fallbacks. */
#include "support.h"
#include "support_alloc.h"
#include "support_fork.h"
#include "support_kernel.h"

#include "alloc/base.h"

#include <unistd.h>

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static void pieces(void)
{
    static const size_t sizes[] = {1, 8, 4096, 4097, 100000, 3 * 1024 * 1024 + 1};
    struct alloc_source *source = base_pages();
    void *piece[COUNT_OF(sizes)];
    size_t i, expected = 0;

    for (i = 0; i < COUNT_OF(sizes); i++) {
        piece[i] = sound_piece(source, sizes[i], 8);
        REQUIRE(piece[i] != NULL);
        expected += (sizes[i] + page_bytes() - 1) / page_bytes() * page_bytes();
        CHECK_EQ(counts_of(source).pieces, i + 1);
        CHECK_EQ(counts_of(source).mappings, i + 1);
        CHECK_EQ(counts_of(source).mapped_bytes, expected);
    }
    CHECK_EQ(counts_of(source).huge_bytes + counts_of(source).bound_bytes, 0);
    for (i = 0; i < COUNT_OF(sizes); i++) {
        CHECK_EQ(alloc_return(source, piece[i], TYPE_QP), 0);
        CHECK(!is_mapped(piece[i]));
        CHECK_EQ(alloc_return(source, piece[i], TYPE_QP), EINVAL);
    }
    CHECK_EQ(counts_of(source).mapped_bytes, 0);
    alloc_release(source);
}

/* Pages that were mapped for the alignment only are unmapped. */
static void alignments(void)
{
    struct alloc_source *source = base_pages();
    size_t alignment;

    for (alignment = 1; alignment <= 64 * MIB; alignment *= 2) {
        char *piece = sound_piece(source, 5000, alignment);

        REQUIRE(piece != NULL);
        CHECK_EQ(counts_of(source).mapped_bytes, 2 * page_bytes());
        CHECK_EQ(alloc_return(source, piece, TYPE_QP), 0);
    }
    alloc_release(source);
}

static void nothing_and_nonsense(void)
{
    struct alloc_source *source = base_pages();
    int on_the_stack = 0;
    void *piece;

    piece = alloc_piece(source, 0, 0, TYPE_QP); /* as malloc does */
    REQUIRE(piece != NULL);
    CHECK_REFUSED(alloc_piece(source, 8, 24, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_last_failure()->step, ALLOC_ARGUMENTS);
    CHECK_REFUSED(alloc_piece(source, SIZE_MAX, 8, TYPE_QP), ENOMEM);
    CHECK_REFUSED(alloc_piece(source, SIZE_MAX / 2, 8, TYPE_QP), ENOMEM);
    CHECK_REFUSED(alloc_piece(source, 8, (size_t)1 << 63, TYPE_QP), ENOMEM);
    CHECK_REFUSED(alloc_piece(source, (size_t)1 << 50, 8, TYPE_QP), ENOMEM);
    CHECK_EQ(alloc_last_failure()->step, ALLOC_MAP);
    CHECK_EQ(alloc_last_failure()->error, ENOMEM);
    CHECK_EQ(alloc_last_failure()->size, (size_t)1 << 50);
    CHECK_REFUSED(alloc_piece(source, (size_t)1 << 50, 64 * MIB, TYPE_QP), ENOMEM);
    alloc_clear_failure();
    CHECK_EQ(alloc_last_failure()->step, ALLOC_NOTHING);
    CHECK_EQ(alloc_return(source, NULL, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(source, &on_the_stack, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(source, (char *)piece + 1, TYPE_QP), EINVAL);
    CHECK_EQ(counts_of(source).pieces, 1);
    alloc_free(source, piece, TYPE_QP);
    CHECK_EQ(counts_of(source).pieces, 0);
    alloc_release(source);

    CHECK_REFUSED(alloc_pages_create(3 * MIB, ALLOC_ANY_NODE, true), EINVAL);
    CHECK_REFUSED(alloc_pages_create(ALLOC_BASE_PAGES, -2, true), EINVAL);
    CHECK_REFUSED(alloc_pages_create(ALLOC_BASE_PAGES, ALLOC_MAX_NODES, true), EINVAL);
}

/* Many pieces, freed in another order: the table of addresses grows and shrinks. */
static void many_pieces(void)
{
    enum { COUNT = 1000, STEP = 389 };
    static void *piece[COUNT];
    struct alloc_source *source = base_pages();
    size_t empty, i;

    REQUIRE_EQ(alloc_return(source, sound_piece(source, 1, 1), TYPE_QP), 0);
    empty = counts_of(source).bookkeeping_bytes;
    for (i = 0; i < COUNT; i++)
        REQUIRE((piece[i] = sound_piece(source, 8, 8)) != NULL);
    CHECK(counts_of(source).bookkeeping_bytes < empty + COUNT * 100);
    for (i = 0; i < COUNT; i++)
        CHECK_EQ(alloc_return(source, piece[i * STEP % COUNT], TYPE_QP), 0);
    CHECK_EQ(counts_of(source).pieces, 0);
    CHECK_EQ(counts_of(source).bookkeeping_bytes, empty);
    alloc_release(source);
}

/* ---- Huge pages: mostly none are configured -------------------------------------------------------------- */

static size_t free_huge_pages(size_t bytes)
{
    unsigned long pages = 0;
    char path[100];
    FILE *file;

    snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/hugepages-%zukB/free_hugepages", bytes / KIB);
    file = fopen(path, "r");
    if (file && fscanf(file, "%lu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return pages;
}

static void huge_pages(void)
{
    struct alloc_source *source = alloc_pages_create(2 * MIB, ALLOC_ANY_NODE, true);
    void *piece;

    REQUIRE(source != NULL);
    if (free_huge_pages(2 * MIB)) {
        piece = sound_piece(source, 8, 4 * MIB);
        REQUIRE(piece != NULL);
        CHECK_EQ(counts_of(source).mapped_bytes, 2 * MIB);
        CHECK_EQ(counts_of(source).huge_bytes, 2 * MIB);
        CHECK_EQ(alloc_return(source, piece, TYPE_QP), 0);
    } else {
        CHECK_REFUSED(alloc_piece(source, 8, 8, TYPE_QP), ENOMEM);
        CHECK_REFUSED(alloc_piece(source, 8, 4 * MIB, TYPE_QP), ENOMEM);
        CHECK_EQ(alloc_last_failure()->step, ALLOC_MAP_HUGE);
        CHECK_EQ(alloc_last_failure()->page_bytes, 2 * MIB);
        CHECK_EQ(alloc_last_failure()->size, 2 * MIB);
    }
    CHECK_EQ(counts_of(source).mapped_bytes, 0);
    alloc_release(source);

    if (!kernel_knows_sizes_of_pages())
        return;
    source = alloc_pages_create(MIB, ALLOC_ANY_NODE, true); /* no processor has pages of that size */
    REQUIRE(source != NULL);
    CHECK_REFUSED(alloc_piece(source, 8, 8, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_last_failure()->step, ALLOC_MAP_HUGE);
    alloc_release(source);
}

static void falling_back(void)
{
    size_t left = 1;
    struct alloc_source *tier[2] = {limited_pages(&left), base_pages()};
    struct alloc_source *source = alloc_tiers_create(tier, COUNT_OF(tier));
    void *first, *second, *third;

    REQUIRE(source != NULL);
    first = sound_piece(source, 100, 8);
    second = sound_piece(source, 100, 8);
    REQUIRE(first && second);
    CHECK_EQ(counts_of(tier[0]).pieces, 1);
    CHECK_EQ(counts_of(tier[1]).pieces, 1);
    CHECK_EQ(counts_of(source).pieces, 2);
    CHECK_EQ(counts_of(source).mapped_bytes, 2 * page_bytes());
    CHECK(counts_of(source).bookkeeping_bytes > /* its own, too */
          counts_of(tier[0]).bookkeeping_bytes + counts_of(tier[1]).bookkeeping_bytes);
    CHECK_EQ(alloc_return(source, first, TYPE_QP), 0);
    third = sound_piece(source, 100, 8); /* the first has one again */
    CHECK_EQ(counts_of(tier[0]).pieces, 1);
    CHECK_EQ(alloc_return(source, first == third ? &left : first, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(source, second, TYPE_QP), 0);
    CHECK_EQ(alloc_return(source, third, TYPE_QP), 0);
    alloc_release(tier[0]);
    alloc_release(tier[1]);
    alloc_release(source); /* the tiers go with it */

    CHECK_REFUSED(alloc_tiers_create(tier, 0), EINVAL);
    CHECK_REFUSED(alloc_tiers_create(tier, ALLOC_MAX_TIERS + 1), EINVAL);
}

/* ---- Nodes ----------------------------------------------------------------------------------------------- */

/* If the kernel can bind pages to a node, they are bound; if not, strict requests fail, and others use any node. */
static void nodes(void)
{
    static const int numbers[] = {0, 63, 64, ALLOC_MAX_NODES - 1};
    size_t i;

    for (i = 0; i < COUNT_OF(numbers); i++) {
        struct alloc_source *strict = alloc_pages_create(ALLOC_BASE_PAGES, numbers[i], true);
        struct alloc_source *other = alloc_pages_create(ALLOC_BASE_PAGES, numbers[i], false);
        void *one, *two;

        REQUIRE(strict && other);
        two = sound_piece(other, 10000, 8);
        REQUIRE(two != NULL);
        one = alloc_piece(strict, 10000, 8, TYPE_QP);
        if (one) {
            CHECK(is_zero(one, 10000));
            CHECK_EQ(counts_of(strict).bound_bytes, counts_of(strict).mapped_bytes);
            CHECK_EQ(counts_of(other).bound_bytes, counts_of(other).mapped_bytes);
            CHECK_EQ(alloc_return(strict, one, TYPE_QP), 0);
        } else {
            CHECK(errno == EINVAL || errno == ENOSYS || errno == EPERM);
            CHECK_EQ(alloc_last_failure()->step, ALLOC_BIND);
            CHECK_EQ(alloc_last_failure()->node, numbers[i]);
            CHECK_EQ(counts_of(other).bound_bytes, 0);
        }
        CHECK_EQ(counts_of(strict).mapped_bytes + counts_of(strict).bound_bytes, 0);
        CHECK_EQ(alloc_return(other, two, TYPE_QP), 0);
        CHECK_EQ(counts_of(other).bound_bytes, 0);
        alloc_release(strict);
        alloc_release(other);
    }
}

/* ---- Life ------------------------------------------------------------------------------------------------ */

static void providers_own_memory(void)
{
    struct alloc_source *source = alloc_default_create();

    REQUIRE(source != NULL);
    CHECK(alloc_piece(source, 8, 8, TYPE_QP) == IBV_ALLOCATOR_USE_DEFAULT);
    CHECK_EQ(counts_of(source).pieces + counts_of(source).mappings, 0);
    CHECK_EQ(alloc_return(source, &source, TYPE_QP), EINVAL);
    alloc_release(source);
}

/* A piece can be written and freed after the last reference to its source was dropped. */
static void a_piece_outlives_its_maker(void)
{
    struct alloc_source *source = base_pages();
    char *one = sound_piece(source, 8, 8), *two = sound_piece(source, 8, 8);

    REQUIRE(one && two);
    alloc_source_hold(source); /* as one on top of it does */
    CHECK_EQ(alloc_release(source), 0);
    CHECK_EQ(alloc_release(source), 2);
    one[0] = 1;
    CHECK_EQ(alloc_return(source, one, TYPE_QP), 0);
    two[0] = 1;
    CHECK_EQ(counts_of(source).pieces, 1);
    CHECK_EQ(alloc_return(source, two, TYPE_QP), 0); /* and now it is gone, as address sanitizers can tell */
    CHECK(!is_mapped(two));
}

struct inherited {
    struct alloc_source *source;
    char *piece;
};

static void use_in_child(void *argument)
{
    struct inherited *inherited = argument;
    char *piece;

    CHECK(!is_mapped(inherited->piece) || !kernel_keeps_pages_from_children());
    CHECK_EQ(counts_of(inherited->source).pieces, 0);
    CHECK_EQ(counts_of(inherited->source).mapped_bytes, 0);
    CHECK_EQ(alloc_return(inherited->source, inherited->piece, TYPE_QP), EINVAL);
    piece = sound_piece(inherited->source, 100, 64);
    REQUIRE(piece != NULL);
    CHECK_EQ(alloc_return(inherited->source, piece, TYPE_QP), 0);
    alloc_release(inherited->source);
}

static void forks(void)
{
    struct inherited inherited = {.source = base_pages()};

    kernel_keeps_pages_from_children(); /* it is asked here, and the child knows */
    inherited.piece = sound_piece(inherited.source, 100, 8);
    REQUIRE(inherited.piece != NULL);
    in_child(use_in_child, &inherited);
    CHECK_EQ((uint8_t)inherited.piece[0], 0xa5);
    CHECK_EQ(counts_of(inherited.source).pieces, 1);
    CHECK_EQ(alloc_return(inherited.source, inherited.piece, TYPE_QP), 0);
    alloc_release(inherited.source);
}

CHECK_MAIN(CASE(pieces), CASE(alignments), CASE(nothing_and_nonsense), CASE(many_pieces), CASE(huge_pages),
           CASE(falling_back), CASE(nodes), CASE(providers_own_memory), CASE(a_piece_outlives_its_maker), CASE(forks))
