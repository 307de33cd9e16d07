/* Tests of the code between a parent domain's callbacks and an allocator, as the extension module uses it. */
#include "handles/pd_allocator.h"

#include "support.h"
#include "support_alloc.h"
#include "support_threads.h"

static struct {
    void *answer;
    int error;
    unsigned int freed;
} other;

static void *other_alloc(void *self, size_t size, size_t alignment, uint64_t resource_type)
{
    CHECK(self == &other && size == 100 && alignment == 64 && resource_type == TYPE_QP);
    errno = other.error;
    return other.answer;
}

static void other_free(void *self, void *address, uint64_t resource_type)
{
    CHECK(self == &other && address == other.answer && resource_type == TYPE_QP);
    other.freed++;
}

static void results_of_callbacks(void)
{
    static _Alignas(64) char memory[200];
    struct domain_memory domain = {other_alloc, other_free, &other, 0}, another = domain;

    other.freed = 0;
    other.answer = memory;
    CHECK(domain_memory_alloc(NULL, &domain, 100, 64, TYPE_QP) == memory);
    CHECK_EQ(domain_memory_held(&domain), 1);
    domain_memory_free(NULL, &domain, memory, TYPE_QP);
    CHECK_EQ(domain_memory_held(&domain), 0);
    CHECK_EQ(other.freed, 1);

    other.answer = IBV_ALLOCATOR_USE_DEFAULT;
    CHECK(domain_memory_alloc(NULL, &domain, 100, 64, TYPE_QP) == IBV_ALLOCATOR_USE_DEFAULT);
    CHECK_EQ(domain_memory_held(&domain), 0);
    CHECK(!domain_memory_take_failure(&domain));

    other.answer = memory + 8; /* it goes back */
    CHECK_REFUSED(domain_memory_alloc(NULL, &domain, 100, 64, TYPE_QP), EINVAL);
    CHECK_EQ(other.freed, 2);
    CHECK_EQ(domain_memory_held(&domain), 0);
    CHECK(!domain_memory_take_failure(&another));
    CHECK(domain_memory_take_failure(&domain));
    CHECK(!domain_memory_take_failure(&domain)); /* once */

    other.answer = NULL;
    other.error = ENOSPC;
    CHECK_REFUSED(domain_memory_alloc(NULL, &domain, 100, 64, TYPE_QP), ENOSPC);
    other.answer = memory; /* what succeeds later has nothing to do with that */
    CHECK(domain_memory_alloc(NULL, &domain, 100, 64, TYPE_QP) == memory);
    CHECK(!domain_memory_take_failure(&domain));
    domain_memory_free(NULL, &domain, memory, TYPE_QP);
}

static void use(void *argument)
{
    struct domain_memory *domain = *(struct domain_memory **)argument;
    struct domain_memory full = {other_alloc, other_free, &other, 0};
    void *piece[10];
    size_t round, i;

    for (round = 0; round < SCALED(100); round++) {
        for (i = 0; i < COUNT_OF(piece); i++)
            REQUIRE((piece[i] = domain_memory_alloc(NULL, domain, 100, 64, TYPE_QP)) != NULL);
        CHECK(domain_memory_held(domain) >= COUNT_OF(piece));
        for (i = 0; i < COUNT_OF(piece); i++)
            domain_memory_free(NULL, domain, piece[i], TYPE_QP);
        CHECK_REFUSED(domain_memory_alloc(NULL, &full, 100, 64, TYPE_QP), ENOSPC);
        CHECK(domain_memory_take_failure(&full)); /* each thread has its own */
    }
}

static void threads(void)
{
    struct alloc_source *pages = base_pages(), *arena = alloc_arena_create(pages, 256 * KIB, 64);
    struct domain_memory domain = {alloc_piece, alloc_free, arena, 0},
                         *arguments[4] = {&domain, &domain, &domain, &domain};

    REQUIRE(arena != NULL);
    other.answer = NULL;
    other.error = ENOSPC;
    run_threads(COUNT_OF(arguments), use, arguments, sizeof(arguments[0]));
    CHECK_EQ(domain_memory_held(&domain), 0);
    CHECK_EQ(counts_of(arena).pieces, 0);
    alloc_release(arena);
    alloc_release(pages);
}

CHECK_MAIN(CASE(results_of_callbacks), CASE(threads))
