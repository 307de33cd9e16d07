/* A kernel with pages of 64 KiB, as some have on arm64 and POWER: the device speaks to it of whole pages only, and asks
 * allocators for such. */
#include "support.h"
#include "support_kernel.h"
#include "support_srq.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE ((size_t)64 << 10)

/* Since Linux 5.14; headers may be older. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* ---- That kernel, in front of the C library's functions ---------------------------------------------------- */

static bool knows_populate;
static unsigned int populated, looked_at;

/* The thread sanitizer asks for something else before it can watch anything. */
__attribute__((no_sanitize("thread"))) long sysconf(int name)
{
    long (*original)(int);

    if (name == _SC_PAGESIZE)
        return PAGE;
    *(void **)&original = dlsym(RTLD_NEXT, "sysconf");
    return original(name);
}

static int refuse(void)
{
    errno = EINVAL;
    return -1;
}

int madvise(void *address, size_t size, int advice)
{
    bool populates = advice == MADV_POPULATE_READ || advice == MADV_POPULATE_WRITE;

    if ((uintptr_t)address % PAGE || (populates && !knows_populate))
        return refuse();
    populated += populates;
    return (int)syscall(SYS_madvise, address, size, advice);
}

int msync(void *address, size_t size, int flags)
{
    if ((uintptr_t)address % PAGE)
        return refuse();
    looked_at++;
    return (int)syscall(SYS_msync, address, size, flags);
}

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
    char *room = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *memory;
    struct home home;
    int knows;

    REQUIRE(room != MAP_FAILED);
    memory = room + (-(uintptr_t)room & (PAGE - 1));
    REQUIRE_EQ(munmap(memory + 2 * PAGE, PAGE), 0);
    home_open(&home);
    for (knows = 0; knows < 1 + kernel_tells_what_is_mapped(); knows++) {
        knows_populate = knows;
        populated = looked_at = 0;
        try_memory(&home, memory, 2 * PAGE, 0);
        try_memory(&home, memory + 4096, 1, 0);
        try_memory(&home, memory + PAGE - 1, PAGE + 1, 0);
        try_memory(&home, memory + 2 * PAGE - 1, 2, EFAULT);
        CHECK(knows ? populated && !looked_at : looked_at && !populated);
    }
    home_close(&home);
    munmap(room, 4 * PAGE);
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

CHECK_MAIN_ONCE(CASE(memory_is_registered), CASE(queues_have_pages_of_their_own))
