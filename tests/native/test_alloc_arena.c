/* Tests of the arena: blocks of a chunk, chunks, large pieces, and its state after pages ran out. */
#include "support.h"
#include "support_alloc.h"
#include "support_fork.h"
#include "support_kernel.h"
#include "support_threads.h"

#include "alloc/buddy.h"

#include <unistd.h>

#define CHUNK (256 * KIB)

static struct alloc_source *arena_over(struct alloc_source *pages)
{
    struct alloc_source *arena = alloc_arena_create(pages, CHUNK, 64);

    REQUIRE(arena != NULL);
    alloc_release(pages);
    return arena;
}

/* ---- Blocks ---------------------------------------------------------------------------------------------- */

#define ORDER 7
#define UNITS (1u << ORDER)

/* Compare the tree with a plain map of units: the order of the block that begins there, or no block. */
struct model {
    uint8_t tree[2 * UNITS];
    int begins[UNITS]; /* -1: none does */
    bool taken[UNITS];
};

static bool fits(const struct model *model, size_t unit, unsigned int order)
{
    size_t i;

    for (i = unit; i < unit + (1u << order); i++)
        if (model->taken[i])
            return false;
    return true;
}

static unsigned int largest_free(const struct model *model)
{
    unsigned int order = ORDER + 1;
    size_t unit;

    while (order--)
        for (unit = 0; unit < UNITS; unit += 1u << order)
            if (fits(model, unit, order))
                return order + 1;
    return 0;
}

static void mark(struct model *model, size_t unit, unsigned int order, bool taken)
{
    size_t i;

    model->begins[unit] = taken ? (int)order : -1;
    for (i = unit; i < unit + (1u << order); i++)
        model->taken[i] = taken;
}

static void model_take(struct model *model, unsigned int order)
{
    size_t unit = buddy_allocate(model->tree, ORDER, order);

    REQUIRE(unit + (1u << order) <= UNITS);
    CHECK_EQ(unit % (1u << order), 0);
    CHECK(fits(model, unit, order));
    mark(model, unit, order, true);
}

static void model_give(struct model *model, size_t unit)
{
    bool begins = model->begins[unit] >= 0;

    CHECK_EQ(buddy_free(model->tree, ORDER, unit), begins);
    if (begins)
        mark(model, unit, (unsigned int)model->begins[unit], false);
}

static void blocks(void)
{
    struct model model = {0};
    unsigned int state = 7;
    size_t i;

    CHECK_EQ(buddy_bytes(ORDER), sizeof(model.tree));
    buddy_init(model.tree, ORDER);
    memset(model.begins, -1, sizeof(model.begins));
    for (i = 0; i < 20000; i++) {
        unsigned int order = next_random(&state, ORDER + 1);

        if (next_random(&state, 2) && buddy_largest(model.tree) > order)
            model_take(&model, order);
        else
            model_give(&model, next_random(&state, UNITS));
        CHECK_EQ(buddy_largest(model.tree), largest_free(&model));
    }
    for (i = 0; i < UNITS; i++)
        model_give(&model, i);
    CHECK_EQ(buddy_largest(model.tree), ORDER + 1);
}

/* ---- Pieces ---------------------------------------------------------------------------------------------- */

static void doorbell_records(void)
{
    enum { COUNT = 10000 };
    static char *record[COUNT];
    struct alloc_source *arena = arena_over(base_pages());
    struct alloc_counts counts;
    size_t i;

    for (i = 0; i < COUNT; i++) {
        REQUIRE((record[i] = sound_piece(arena, 8, 8)) != NULL);
        CHECK(is_aligned(record[i], 64)); /* a cache line to itself */
    }
    counts = counts_of(arena);
    CHECK_EQ(counts.mappings, 3);
    CHECK(counts.mapped_bytes + counts.bookkeeping_bytes <= MIB);
    for (i = 0; i < COUNT; i++)
        CHECK_EQ(alloc_return(arena, record[i], TYPE_RECORD), 0);
    CHECK_EQ(counts_of(arena).mappings, 1); /* the one that is kept */
    for (i = 0; i < COUNT; i++)
        CHECK_EQ(alloc_return(arena, record[i], TYPE_RECORD), EINVAL);
    alloc_release(arena);
}

struct held {
    char *address;
    size_t size;
    char mark;
};

static bool disjoint(const struct held *held, size_t count, const char *address, size_t size)
{
    size_t i;

    for (i = 0; i < count; i++)
        if (held[i].address && held[i].address < address + size && address < held[i].address + held[i].size)
            return false;
    return true;
}

static size_t some_size(unsigned int *state)
{
    size_t most = (size_t)1 << next_random(state, 22);

    return 1 + next_random(state, (unsigned int)most);
}

/* Allocate and free at random; each piece keeps its content. */
static void use_at_random(struct alloc_source *arena, unsigned int state, size_t rounds)
{
    struct held held[40] = {0};
    size_t i;

    for (i = 0; i < rounds; i++) {
        struct held *one = &held[next_random(&state, COUNT_OF(held))];

        if (one->address) {
            CHECK(one->address[0] == one->mark && one->address[one->size - 1] == one->mark);
            CHECK(!memcmp(one->address, one->address + 1, one->size - 1));
            CHECK_EQ(alloc_return(arena, one->address, TYPE_QP), 0);
            one->address = NULL;
        } else {
            one->size = some_size(&state);
            one->address = sound_piece(arena, one->size, (size_t)1 << next_random(&state, 22));
            REQUIRE(one->address != NULL);
            CHECK(disjoint(held, (size_t)(one - held), one->address, one->size));
            CHECK(disjoint(one + 1, COUNT_OF(held) - (size_t)(one - held) - 1, one->address, one->size));
            one->mark = (char)i;
            memset(one->address, one->mark, one->size);
        }
    }
    for (i = 0; i < COUNT_OF(held); i++)
        if (held[i].address)
            CHECK_EQ(alloc_return(arena, held[i].address, TYPE_QP), 0);
}

static void at_random(void)
{
    struct alloc_source *arena = arena_over(base_pages());

    use_at_random(arena, 1, 1500);
    CHECK_EQ(counts_of(arena).pieces, 0);
    CHECK(counts_of(arena).mapped_bytes <= CHUNK);
    alloc_release(arena);
}

/* Half a chunk is a block; a larger piece has pages of its own, which are freed with it. */
static void large_pieces(void)
{
    struct alloc_source *arena = arena_over(base_pages());
    char *half = sound_piece(arena, CHUNK / 2, 64), *other_half = sound_piece(arena, CHUNK / 2, CHUNK / 2), *more;

    REQUIRE(half && other_half);
    CHECK_EQ(counts_of(arena).mappings, 1);
    more = sound_piece(arena, CHUNK / 2 + 1, 64);
    REQUIRE(more != NULL);
    CHECK_EQ(counts_of(arena).mappings, 2);
    CHECK_EQ(counts_of(arena).mapped_bytes, CHUNK + CHUNK / 2 + (size_t)sysconf(_SC_PAGESIZE));
    CHECK_EQ(alloc_return(arena, more + 64, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(arena, more, TYPE_QP), 0);
    CHECK(!is_mapped(more));
    CHECK_EQ(alloc_return(arena, more, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(arena, half + 64, TYPE_QP), EINVAL); /* in the middle of a piece */
    CHECK_EQ(alloc_return(arena, half + 1, TYPE_QP), EINVAL);
    CHECK_EQ(alloc_return(arena, half, TYPE_QP), 0);
    CHECK_EQ(alloc_return(arena, other_half, TYPE_QP), 0);
    CHECK_EQ(counts_of(arena).mapped_bytes, CHUNK);
    alloc_release(arena);
}

/* An arena's chunks may come from another arena. */
static void arenas_on_arenas(void)
{
    struct alloc_source *below = alloc_arena_create(base_pages(), 2 * MIB, 64 * KIB), *arena;

    REQUIRE(below != NULL);
    arena = arena_over(below);
    use_at_random(arena, 2, 500);
    CHECK_EQ(counts_of(arena).pieces, 0);
    CHECK(counts_of(arena).mapped_bytes <= 4 * MIB);
    alloc_release(arena);
}

/* A request that finds no pages leaves nothing behind, and other requests succeed. */
static void pages_run_out(void)
{
    static const size_t sizes[] = {8, 3000, CHUNK / 2, CHUNK / 2, CHUNK, 8, 100000, CHUNK / 2};
    void *piece[COUNT_OF(sizes)];
    size_t most, left, i;

    for (most = 0; most < 6; most++) {
        struct alloc_source *arena;

        left = most;
        arena = arena_over(limited_pages(&left));
        for (i = 0; i < COUNT_OF(sizes); i++) {
            errno = 0;
            piece[i] = alloc_piece(arena, sizes[i], 8, TYPE_QP);
            CHECK(piece[i] || errno == ENOSPC);
        }
        CHECK_EQ(piece[0] != NULL, most > 0);
        CHECK_EQ(piece[COUNT_OF(sizes) - 1] != NULL, most >= 4);
        CHECK_EQ(counts_of(arena).mappings, most < 4 ? most : 4);
        for (i = 0; i < COUNT_OF(sizes); i++)
            CHECK_EQ(alloc_return(arena, piece[i], TYPE_QP), piece[i] ? 0 : EINVAL);
        CHECK_EQ(counts_of(arena).pieces, 0);
        alloc_release(arena);
        CHECK_EQ(left, most);
    }
}

/* If the source of pages defers to the provider, the arena does so, too, for pieces that need pages. */
static void without_a_source_of_pages(void)
{
    struct alloc_source *arena = arena_over(alloc_default_create());

    CHECK(alloc_piece(arena, 8, 8, TYPE_QP) == IBV_ALLOCATOR_USE_DEFAULT);
    CHECK(alloc_piece(arena, CHUNK, 8, TYPE_QP) == IBV_ALLOCATOR_USE_DEFAULT);
    CHECK_EQ(counts_of(arena).pieces, 0);
    alloc_release(arena);
}

static void wrong_sizes(void)
{
    struct alloc_source *pages = base_pages();

    CHECK_REFUSED(alloc_arena_create(pages, 100000, 64), EINVAL);
    CHECK_REFUSED(alloc_arena_create(pages, CHUNK, 0), EINVAL);
    CHECK_REFUSED(alloc_arena_create(pages, 64, 64), EINVAL);
    CHECK_REFUSED(alloc_arena_create(pages, GIB, 16), EINVAL);
    alloc_release(pages);
}

/* ---- Threads and forks ----------------------------------------------------------------------------------- */

struct user {
    struct alloc_source *arena;
    unsigned int seed;
};

static void use(void *argument)
{
    struct user *user = argument;

    use_at_random(user->arena, user->seed, SCALED(400));
}

static void threads(void)
{
    struct alloc_source *arena = arena_over(base_pages());
    struct user users[4];
    size_t i;

    for (i = 0; i < COUNT_OF(users); i++)
        users[i] = (struct user){arena, (unsigned int)i + 10};
    run_threads(COUNT_OF(users), use, users, sizeof(users[0]));
    CHECK_EQ(counts_of(arena).pieces, 0);
    CHECK(counts_of(arena).mapped_bytes <= CHUNK);
    alloc_release(arena);
}

struct forker {
    struct alloc_source *arena;
    char *piece;
    bool forks;
};

static void use_in_child(void *argument)
{
    struct forker *forker = argument;

    CHECK(!is_mapped(forker->piece) || !kernel_keeps_pages_from_children());
    CHECK_EQ(counts_of(forker->arena).pieces, 0);
    CHECK_EQ(counts_of(forker->arena).mappings, 0);
    CHECK_EQ(alloc_return(forker->arena, forker->piece, TYPE_QP), EINVAL);
    use_at_random(forker->arena, 3, 100);
}

static void fork_or_use(void *argument)
{
    struct forker *forker = argument;
    int i;

    pthread_setname_np(pthread_self(), "arena"); /* see support_fork.h */
    for (i = 0; i < 5; i++)
        if (forker->forks)
            in_child(use_in_child, forker);
        else
            use_at_random(forker->arena, (unsigned int)i + 20, SCALED(200));
}

/* A child of a fork finds the arena whole and empty, even if threads were inside of it. */
static void forks(void)
{
    struct alloc_source *arena = arena_over(base_pages());
    struct forker forkers[3] = {{arena, sound_piece(arena, 8, 8), true}, {arena, NULL, false}, {arena, NULL, false}};

    REQUIRE(forkers[0].piece != NULL);
    kernel_keeps_pages_from_children(); /* it is asked here, and the children know */
    run_threads(COUNT_OF(forkers), fork_or_use, forkers, sizeof(forkers[0]));
    CHECK_EQ(counts_of(arena).pieces, 1);
    CHECK_EQ((uint8_t)forkers[0].piece[7], 0xa5);
    CHECK_EQ(alloc_return(arena, forkers[0].piece, TYPE_QP), 0);
    alloc_release(arena);
}

CHECK_MAIN(CASE(blocks), CASE(doorbell_records), CASE(at_random), CASE(large_pieces), CASE(arenas_on_arenas),
           CASE(pages_run_out), CASE(without_a_source_of_pages), CASE(wrong_sizes), CASE(threads), CASE(forks))
