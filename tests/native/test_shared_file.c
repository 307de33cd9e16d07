/* Tests of the file of a protection domain that processes share: valid files, its users, and remains of dead
 * processes. */
#define _GNU_SOURCE
#include "support.h"
#include "support_fabric.h"
#include "support_fork.h"
#include "support_kernel.h"
#include "support_threads.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "alloc/alloc.h"
#include "soft/api/device.h"
#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"
#include "soft/objects/pd.h"
#include "soft/objects/pd_share.h"
#include "soft/objects/shared_keys.h"
#include "soft/base/memfd.h"
#include "soft/objects/shared.h"

#define KEY 0x1122334455667788ull

/* A domain that has a file. */
struct shared {
    struct home home;
    struct ibv_pd *pd;
    struct soft_shared *file;
    int fd; /* as another process would have it */
};

static void shared_open(struct shared *shared)
{
    uint32_t share;

    home_open(&shared->home);
    shared->pd = soft_verbs.alloc_pd(shared->home.context);
    REQUIRE(shared->pd != NULL);
    REQUIRE_EQ(soft_alloc_shpd(shared->pd, KEY, &share), 0);
    REQUIRE_EQ(soft_export_shpd(shared->pd, &shared->fd), 0);
    shared->file = atomic_load(&to_soft_pd(shared->pd)->domain->file);
}

static void shared_close(struct shared *shared)
{
    close(shared->fd);
    CHECK_EQ(soft_verbs.dealloc_pd(shared->pd), 0);
    home_close(&shared->home);
}

/* Look like another process to the kernel: lock the slot's byte by another description. */
static int lock_slots(const struct shared *shared, short type, uint32_t first, uint32_t count)
{
    struct flock what = {.l_type = type, .l_whence = SEEK_SET, .l_start = first, .l_len = count};

    return fcntl(shared->fd, F_OFD_SETLK, &what) ? errno : 0;
}

static struct alloc_source *source_of(const struct shared *shared)
{
    struct alloc_source *source = alloc_area_create(&shared->file->area);

    REQUIRE(source != NULL);
    return source;
}

/* ---- What is used for one ----------------------------------------------------------------------------------- */

static void expect_refused(struct shared *shared, int fd, struct check_place place)
{
    struct ibv_pd *pd;

    errno = 0;
    pd = soft_import_shpd(shared->home.context, fd, KEY);
    check_refused(pd, errno, EPROTO, place, "soft_import_shpd");
    CHECK(to_soft_context(shared->home.context)->device->shared_files->next == NULL);
    close(fd);
}

/* Make a file of that size, with so many bytes of a domain's own beginning, sealed or not. */
static int likeness(const struct shared *shared, off_t size, size_t head, int seals)
{
    int fd = memfd_create("likeness", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    REQUIRE(fd >= 0);
    REQUIRE_EQ(ftruncate(fd, size), 0);
    REQUIRE_EQ(pwrite(fd, shared->file->page, head, 0), (ssize_t)head);
    REQUIRE_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void invalid_files(void)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    struct shared shared;
    struct stat own;
    int i;

    shared_open(&shared);
    REQUIRE_EQ(fstat(shared.fd, &own), 0);
    expect_refused(&shared, likeness(&shared, own.st_size, 64, seals & ~F_SEAL_GROW), HERE);
    expect_refused(&shared, likeness(&shared, own.st_size, 64, seals & ~F_SEAL_SHRINK), HERE);
    /* Its maker could have its pages be written, where they are to be given back. */
    expect_refused(&shared, likeness(&shared, own.st_size, 64, seals & ~F_SEAL_SEAL), HERE);
    expect_refused(&shared, likeness(&shared, own.st_size, 0, seals), HERE);
    expect_refused(&shared, likeness(&shared, own.st_size - 4096, 64, seals), HERE);
    expect_refused(&shared, likeness(&shared, own.st_size + 4096, 64, seals), HERE);
    expect_refused(&shared, likeness(&shared, 8, 8, seals), HERE);
    expect_refused(&shared, open("/dev/zero", O_RDWR | O_CLOEXEC), HERE);
    for (i = 0; i < 3; i++) { /* an amount of memory that none has */
        const uint64_t amounts[] = {0, 4096, UINT64_MAX - ((2u << 20) - 1)};
        int fd = memfd_create("likeness", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        REQUIRE_EQ(ftruncate(fd, own.st_size), 0);
        REQUIRE_EQ(pwrite(fd, shared.file->page, 8, 0), 8);
        REQUIRE_EQ(pwrite(fd, &amounts[i], 8, 8), 8);
        REQUIRE_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
        expect_refused(&shared, fd, HERE);
    }
    CHECK_REFUSED(soft_import_shpd(shared.home.context, -1, KEY), EPROTO);
    shared_close(&shared);
}

/* Make a valid file of so much memory. */
static int file_of(const struct shared *shared, uint64_t bytes)
{
    const size_t step = (size_t)2 << 20, head = sizeof(struct soft_shared_page) + bytes / SOFT_SHARED_CHUNK * 2;
    int fd = memfd_create("likeness", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    REQUIRE(fd >= 0);
    REQUIRE_EQ(ftruncate(fd, (off_t)((head + step - 1) / step * step + bytes)), 0);
    REQUIRE_EQ(pwrite(fd, shared->file->page, 8, 0), 8);
    REQUIRE_EQ(pwrite(fd, &bytes, 8, 8), 8);
    REQUIRE_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    return fd;
}

/* Clearing the remains of dead processes in such a file would take as long as its maker likes. */
static void files_of_more_memory_than_there_is(void)
{
    struct shared shared;
    uint64_t bytes;
    int fd;

    shared_open(&shared);
    bytes = shared.file->page->head.bytes;
    expect_refused(&shared, file_of(&shared, 5 * bytes), HERE);
    fd = file_of(&shared, bytes);
    CHECK_REFUSED(soft_import_shpd(shared.home.context, fd, KEY), ENOENT); /* no process uses it */
    close(fd);
    shared_close(&shared);
}

/* Another process has a lease (F_SETLEASE) on the file: opening it would wait until that ends, 45 s at most. */
static void a_file_with_a_lease(void)
{
    struct shared shared;
    char path[64];
    uint64_t begin;
    int fd, leased;

    shared_open(&shared);
    fd = file_of(&shared, shared.file->page->head.bytes);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    leased = open(path, O_RDONLY | O_CLOEXEC);
    REQUIRE(leased >= 0);
    close(fd);
    REQUIRE_EQ(fcntl(leased, F_SETLEASE, F_RDLCK), 0);
    REQUIRE_EQ(fcntl(leased, F_SETSIG, SIGURG), 0); /* which asks for it back, and ends no process */
    begin = now_ns();
    expect_refused(&shared, leased, HERE);
    CHECK(now_ns() - begin < 30000000000ull);
    shared_close(&shared);
}

/* The size of such a file is fixed, but no memory may be left when a page is touched. */
static void files_of_huge_pages(void)
{
    int fd = memfd_create("likeness", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    struct stat own;

    if (fd < 0)
        return; /* this kernel has none */
    REQUIRE_EQ(fstat(fd, &own), 0);
    REQUIRE_EQ(ftruncate(fd, own.st_blksize), 0);
    REQUIRE_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    CHECK_EQ(soft_sealed_bytes(fd), -1);
    close(fd);
}

static void the_file_cannot_be_truncated(void)
{
    struct shared shared;

    shared_open(&shared);
    CHECK_EQ(ftruncate(shared.fd, 4096), -1);
    CHECK_EQ(errno, EPERM);
    CHECK_EQ(fcntl(shared.fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    shared_close(&shared);
}

/* ---- Limits ---------------------------------------------------------------------------------------------------- */

static void no_slot_is_left(void)
{
    struct soft_device *other = calloc(1, sizeof(*other)); /* another process' */
    struct shared shared;

    REQUIRE(other != NULL);
    shared_open(&shared);
    CHECK_EQ(shared.file->slot, 0);
    CHECK_EQ(lock_slots(&shared, F_WRLCK, 0, 1), EAGAIN);
    REQUIRE_EQ(lock_slots(&shared, F_WRLCK, 1, SOFT_SHARED_SLOTS - 1), 0);
    CHECK_EQ(soft_mutex_init(&other->lock, SOFT_RANK_DEVICE), 0);
    CHECK_REFUSED(soft_shared_import(other, shared.fd), EMFILE);
    CHECK_EQ(atomic_load(&shared.file->page->used_slots[0]), 1);
    CHECK(other->shared_files == NULL);
    soft_mutex_destroy(&other->lock);
    free(other);
    shared_close(&shared);
}

static void no_key_is_left(void)
{
    struct ibv_mw **windows = calloc(SOFT_SHARED_KEYS, sizeof(*windows));
    struct shared shared;
    uint32_t i;

    REQUIRE(windows != NULL);
    shared_open(&shared);
    for (i = 0; i < SOFT_SHARED_KEYS; i++)
        if (!(windows[i] = verbs_alloc_mw(shared.pd, IBV_MW_TYPE_2)))
            break;
    CHECK_EQ(i, SOFT_SHARED_KEYS);
    CHECK_REFUSED(verbs_alloc_mw(shared.pd, IBV_MW_TYPE_2), ENOMEM);
    while (i)
        CHECK_EQ(verbs_dealloc_mw(windows[--i]), 0);
    free(windows);
    shared_close(&shared);
}

static void no_memory_is_left(void)
{
    struct alloc_source *sources[2];
    struct shared shared;
    size_t bytes;
    char *all, *one;

    shared_open(&shared);
    bytes = shared.file->area.bytes;
    sources[0] = source_of(&shared);
    sources[1] = source_of(&shared);
    CHECK_REFUSED(alloc_piece(sources[0], bytes + 1, 1, 0), ENOMEM);
    CHECK_EQ(alloc_last_failure()->step, ALLOC_AREA);
    all = alloc_piece(sources[0], bytes, 1, 0);
    REQUIRE(all != NULL);
    CHECK_REFUSED(alloc_piece(sources[1], 1, 1, 0), ENOMEM);
    all[bytes - 1] = all[0] = 1;
    CHECK_EQ(alloc_return(sources[1], all, 0), EINVAL); /* it is the other's */
    CHECK_EQ(alloc_return(sources[0], all, 0), 0);
    one = alloc_piece(sources[1], 1, (size_t)16 << 20, 0);
    REQUIRE(one != NULL);
    CHECK_EQ((uintptr_t)one % ((size_t)16 << 20), 0);
    CHECK_EQ(one[0], 0);
    all = alloc_piece(sources[0], bytes - SOFT_SHARED_CHUNK, 1, 0); /* nowhere in one piece, but for luck */
    CHECK(!all || one == shared.file->area.memory || one == shared.file->area.memory + bytes - SOFT_SHARED_CHUNK);
    if (all)
        CHECK_EQ(alloc_return(sources[0], all, 0), 0);
    CHECK_EQ(alloc_return(sources[1], one, 0), 0);
    CHECK_EQ(alloc_release(sources[0]), 0);
    CHECK_EQ(alloc_release(sources[1]), 0);
    shared_close(&shared);
}

/* The memory stays mapped while a piece is allocated, and is unmapped with it. */
static void closed_with_an_allocated_piece(void)
{
    struct alloc_source *source;
    struct shared shared;
    struct soft_device *device;
    char *piece;

    shared_open(&shared);
    device = to_soft_context(shared.home.context)->device;
    source = source_of(&shared);
    piece = alloc_piece(source, 100, 1, 0);
    REQUIRE(piece != NULL);
    alloc_area_close(source);
    CHECK_REFUSED(alloc_piece(source, 100, 1, 0), ENXIO);
    close(shared.fd);
    CHECK_EQ(soft_verbs.dealloc_pd(shared.pd), 0);
    piece[99] = 1;
    CHECK(device->shared_files != NULL);
    CHECK_EQ(alloc_return(source, piece, 0), 0);
    CHECK(device->shared_files == NULL);
    CHECK_EQ(alloc_release(source), 0);
    home_close(&shared.home);
}

struct closer {
    struct alloc_source *source;
    bool closes;
};

static void allocate_or_close(void *argument)
{
    struct closer *closer = argument;
    void *piece;

    if (closer->closes) {
        alloc_area_close(closer->source);
        return;
    }
    while ((piece = alloc_piece(closer->source, 100, 1, 0)))
        CHECK_EQ(alloc_return(closer->source, piece, 0), 0);
    CHECK_EQ(errno, ENXIO);
}

/* A thread that allocates while another one closes the area gets memory or ENXIO. */
static void closed_while_pieces_are_allocated(void)
{
    struct alloc_source *source;
    struct closer closers[2];
    struct shared shared;

    shared_open(&shared);
    source = source_of(&shared);
    closers[0] = (struct closer){source, false};
    closers[1] = (struct closer){source, true};
    run_threads(COUNT_OF(closers), allocate_or_close, closers, sizeof(closers[0]));
    CHECK_EQ(alloc_release(source), 0);
    shared_close(&shared);
}

struct ending {
    struct shared *shared;
    atomic_int thread;
};

static void *end_of(void *argument)
{
    struct ending *ending = argument;

    atomic_store(&ending->thread, (int)syscall(SYS_gettid));
    CHECK_EQ(soft_verbs.dealloc_pd(ending->shared->pd), 0);
    return NULL;
}

/* Hold the lock of descriptors, from one meeting to the other. */
static void *holder(void *barrier)
{
    soft_descriptors_hold();
    pthread_barrier_wait(barrier);
    pthread_barrier_wait(barrier);
    soft_descriptors_release();
    return NULL;
}

static bool is_asleep(int thread)
{
    char path[64], state = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
    file = fopen(path, "r");
    REQUIRE(file != NULL);
    REQUIRE_EQ(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
    fclose(file);
    return state == 'S';
}

static bool has_files(struct soft_device *device)
{
    bool has;

    soft_mutex_take(&device->lock);
    has = device->shared_files;
    soft_mutex_give(&device->lock);
    return has;
}

/* The memory is freed when its last user closes the file, which takes the longer the more there is: not under the lock
 * of descriptors, for which forks and all streams wait. */
static void memory_is_freed_without_locks(void)
{
    struct soft_device *device;
    struct ending ending = {0};
    struct shared shared;
    pthread_barrier_t held;
    pthread_t threads[2];
    unsigned char there;
    void *page;

    shared_open(&shared);
    device = to_soft_context(shared.home.context)->device;
    page = shared.file->page;
    close(shared.fd);
    ending.shared = &shared;
    REQUIRE_EQ(pthread_barrier_init(&held, NULL, 2), 0);
    REQUIRE_EQ(pthread_create(&threads[0], NULL, holder, &held), 0);
    pthread_barrier_wait(&held);
    REQUIRE_EQ(pthread_create(&threads[1], NULL, end_of, &ending), 0);
    EVENTUALLY(!has_files(device));
    EVENTUALLY(is_asleep(atomic_load(&ending.thread))); /* it waits for that lock */
    CHECK_EQ(mincore(page, 4096, &there), 0);
    pthread_barrier_wait(&held);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    pthread_barrier_destroy(&held);
    CHECK_EQ(mincore(page, 4096, &there), -1);
    home_close(&shared.home);
}

/* ---- The dead ---------------------------------------------------------------------------------------------------- */

/* Leave traces of a process, with a region and two chunks of memory, and in the middle of an access. */
static void leave_traces(struct shared *shared, uint32_t slot)
{
    struct soft_shared_page *page = shared->file->page;
    const struct alloc_area *area = &shared->file->area;

    atomic_store(&page->readers[slot][3].sections, 1);
    atomic_store(&page->keys[slot][0].state, 1ull << 32 | SOFT_SHARED_LIVE | 1);
    atomic_store(&page->keys[slot][0].length, 4096);
    atomic_store(&page->keys[slot][0].access, ACCESS_ALL);
    atomic_store(&page->slots[slot].used, 1);
    atomic_store(&area->owners[100], slot + 1);
    atomic_store(&area->owners[102], slot + 1);
    memset(area->memory + 100 * SOFT_SHARED_CHUNK, 0xaa, SOFT_SHARED_CHUNK);
    atomic_store(&page->slots[slot].highest, 103);
    atomic_fetch_or(&page->used_slots[0], 1ull << slot);
}

static bool has_traces(const struct shared *shared, uint32_t slot)
{
    const struct soft_shared_page *page = shared->file->page;
    const struct alloc_area *area = &shared->file->area;

    return atomic_load(&page->readers[slot][3].sections) ||
           (atomic_load(&page->keys[slot][0].state) & SOFT_SHARED_LIVE) || atomic_load(&area->owners[100]) ||
           atomic_load(&area->owners[102]) || (kernel_takes_pages_back() && area->memory[100 * SOFT_SHARED_CHUNK]) ||
           (atomic_load(&page->used_slots[0]) >> slot & 1);
}

static uint32_t key_of(uint32_t slot)
{
    return (SOFT_MAX_NUMBER + slot * SOFT_SHARED_KEYS) << 8 | 1;
}

static void remains_of_dead_processes_are_cleared(void)
{
    struct soft_device *other = calloc(1, sizeof(*other));
    struct soft_shared *file;
    struct shared shared;
    int access, fd = -1;
    void *here;

    REQUIRE(other != NULL);
    shared_open(&shared);
    leave_traces(&shared, 5);
    CHECK_REFUSED(soft_import_mr(shared.pd, key_of(5), &here, &access), ENOENT);
    REQUIRE_EQ(lock_slots(&shared, F_WRLCK, 5, 1), 0); /* it lives */
    CHECK_EQ(soft_export_shpd(shared.pd, &fd), 0);
    close(fd);
    CHECK(has_traces(&shared, 5));
    REQUIRE_EQ(lock_slots(&shared, F_UNLCK, 5, 1), 0);
    CHECK_EQ(soft_export_shpd(shared.pd, &fd), 0);
    close(fd);
    CHECK(!has_traces(&shared, 5));

    leave_traces(&shared, 1); /* the next process takes another slot, and clears this one */
    CHECK_EQ(soft_mutex_init(&other->lock, SOFT_RANK_DEVICE), 0);
    file = soft_shared_import(other, shared.fd);
    REQUIRE(file != NULL);
    CHECK_EQ(file->slot, 2);
    CHECK_EQ(atomic_load(&shared.file->page->used_slots[0]), 5);
    CHECK(!has_traces(&shared, 1));
    soft_shared_drop(file);

    leave_traces(&shared, 1); /* and takes it where no other one is left */
    REQUIRE_EQ(lock_slots(&shared, F_WRLCK, 2, SOFT_SHARED_SLOTS - 2), 0);
    file = soft_shared_import(other, shared.fd);
    REQUIRE(file != NULL);
    CHECK_EQ(file->slot, 1);
    CHECK_EQ(atomic_load(&shared.file->page->used_slots[0]), 3);
    soft_shared_drop(file);
    CHECK(!has_traces(&shared, 1));
    soft_mutex_destroy(&other->lock);
    free(other);
    shared_close(&shared);
}

static void *reap(void *argument)
{
    struct ending *ending = argument;

    REQUIRE(grace_ready());
    atomic_store(&ending->thread, (int)syscall(SYS_gettid));
    soft_shared_reap(ending->shared->file);
    return NULL;
}

/* The memory of a dead process is freed only after no other process accesses its regions any more. */
static void memory_of_dead_processes_is_freed_after_accesses(void)
{
    struct soft_shared_page *page;
    struct ending ending = {0};
    struct shared shared;
    pthread_t thread;

    shared_open(&shared);
    page = shared.file->page;
    ending.shared = &shared;
    leave_traces(&shared, 5);
    REQUIRE_EQ(lock_slots(&shared, F_WRLCK, 6, 1), 0); /* it lives, and accesses the region of the dead one */
    atomic_fetch_or(&page->used_slots[0], 1u << 6);
    atomic_store(&page->readers[6][0].sections, 1);
    REQUIRE_EQ(pthread_create(&thread, NULL, reap, &ending), 0);
    EVENTUALLY(!(atomic_load(&page->keys[5][0].state) & SOFT_SHARED_LIVE));
    EVENTUALLY(is_asleep(atomic_load(&ending.thread))); /* it waits for that access */
    CHECK_EQ(atomic_load(&shared.file->area.owners[100]), 6);
    atomic_store(&page->readers[6][0].sections, 0);
    pthread_join(thread, NULL);
    CHECK(!has_traces(&shared, 5));
    CHECK(!atomic_load(&shared.file->timed_out[6]));
    shared_close(&shared);
}

/* A process in the middle of an access is waited for; not for ever, and not if it is dead. */
static void waits_for_stopped_processes_are_limited(void)
{
    struct alloc_source *source;
    struct shared shared;
    static uint8_t own[4096];
    struct ibv_mr *mr;
    uint32_t round;
    uint64_t before;
    char *piece;

    shared_open(&shared);
    source = source_of(&shared);
    piece = alloc_piece(source, 4096, 1, 0);
    REQUIRE(piece != NULL);
    leave_traces(&shared, 5);
    mr = soft_verbs.reg_mr(shared.pd, piece, 4096, ACCESS_ALL);
    REQUIRE(mr != NULL);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK(!atomic_load(&shared.file->no_reuse)); /* that is, not for as long as for one that lives */

    REQUIRE_EQ(lock_slots(&shared, F_WRLCK, 5, 1), 0); /* it was stopped */
    mr = soft_verbs.reg_mr(shared.pd, piece, 4096, ACCESS_ALL);
    REQUIRE(mr != NULL);
    before = now_ns();
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK(now_ns() - before > 1900000000u);
    CHECK(atomic_load(&shared.file->no_reuse));
    CHECK_EQ(alloc_return(source, piece, 0), 0);
    CHECK_EQ(atomic_load(&shared.file->area.owners[(piece - shared.file->area.memory) / SOFT_SHARED_CHUNK]), 1);

    /* It was waited for once, whatever it writes. */
    before = now_ns();
    for (round = 0; round < 4; round++) {
        atomic_store(&shared.file->page->readers[5][7 * round].sections, round + 2);
        mr = soft_verbs.reg_mr(shared.pd, own, sizeof(own), ACCESS_ALL);
        REQUIRE(mr != NULL);
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    }
    CHECK(now_ns() - before < 2000000000u);

    /* Another process that has its slot is not the one. */
    CHECK(atomic_load(&shared.file->timed_out[5]));
    REQUIRE_EQ(lock_slots(&shared, F_UNLCK, 5, 1), 0);
    soft_shared_reap(shared.file);
    CHECK(!atomic_load(&shared.file->timed_out[5]));
    CHECK_EQ(alloc_release(source), 0);
    shared_close(&shared);
}

/* Two threads: one deregisters regions, the other one acts as a process that is accessing each, and leaves just before
 * the end of the wait. */
struct stall {
    struct shared shared;
    atomic_uint begun, done; /* rounds */
};

enum { ROUNDS = 3 };
#define STAY_NS 1900000000ull

/* Use a new slot in each round but the last: a process may have several, of its own or by accomplices. */
static atomic_uint *word_of_round(struct stall *stall, unsigned int round)
{
    return &stall->shared.file->page->readers[5 + round % 2][round].sections;
}

static void give_back(struct stall *stall)
{
    static uint8_t memory[4096];
    uint64_t before = now_ns();
    unsigned int round;

    for (round = 0; round < ROUNDS; round++) {
        struct ibv_mr *mr = soft_verbs.reg_mr(stall->shared.pd, memory, sizeof(memory), ACCESS_ALL);

        REQUIRE(mr != NULL);
        atomic_store(word_of_round(stall, round), 1);
        atomic_store(&stall->begun, round + 1);
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
        atomic_store(&stall->done, round + 1);
    }
    CHECK(now_ns() - before < 2 * STAY_NS);
}

static void stay_and_leave(struct stall *stall)
{
    unsigned int round;

    for (round = 0; round < ROUNDS; round++) {
        uint64_t begin;

        EVENTUALLY(atomic_load(&stall->begun) > round);
        begin = now_ns();
        while (atomic_load(&stall->done) <= round && now_ns() - begin < STAY_NS)
            sleep_us(500);
        atomic_store(word_of_round(stall, round), 0);
    }
}

struct stall_part {
    struct stall *stall;
    void (*play)(struct stall *);
};

static void play(void *argument)
{
    struct stall_part *part = argument;

    part->play(part->stall);
}

static void waits_for_a_slow_process_are_limited_in_sum(void)
{
    static struct stall stall;
    struct stall_part parts[2] = {{&stall, give_back}, {&stall, stay_and_leave}};

    shared_open(&stall.shared);
    REQUIRE_EQ(lock_slots(&stall.shared, F_WRLCK, 5, 2), 0);
    atomic_fetch_or(&stall.shared.file->page->used_slots[0], 3u << 5);
    run_threads(2, play, parts, sizeof(parts[0]));
    CHECK(atomic_load(&stall.shared.file->timed_out[6]));
    shared_close(&stall.shared);
}

/* ---- Two processes ---------------------------------------------------------------------------------------------- */

#define SIZE (1u << 20)

/* Memory that both processes see. */
struct signals {
    atomic_uint key;
    atomic_ullong address;
    atomic_uint written, refused;
    atomic_bool stop;
};

static void write_from_there(const struct shared *shared, struct signals *signals)
{
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct home home;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    static uint8_t own[SIZE];

    home_open(&home);
    pd = soft_import_shpd(home.context, shared->fd, KEY);
    REQUIRE(pd != NULL);
    memset(own, 0xff, SIZE);
    mr = soft_verbs.reg_mr(pd, own, SIZE, ACCESS_ALL);
    cq = home_cq(&home, 16, NULL);
    qp = make_loop(pd, cq, 8);
    REQUIRE(mr && qp);
    while (!atomic_load(&signals->stop)) {
        struct ibv_sge sge = {(uintptr_t)own, SIZE, mr->lkey};
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, 1);
        struct ibv_wc wc;

        wr.wr.rdma.remote_addr = atomic_load(&signals->address);
        wr.wr.rdma.rkey = atomic_load(&signals->key);
        REQUIRE_EQ(post(qp, &wr), 0);
        REQUIRE(wait_completion(cq, &wc));
        atomic_fetch_add(wc.status == IBV_WC_SUCCESS ? &signals->written : &signals->refused, 1);
        if (wc.status == IBV_WC_SUCCESS)
            continue;
        CHECK_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
        CHECK_EQ(qp_to(qp, IBV_QPS_RESET), 0);
        qp_connect(qp, &default_link, qp->qp_num);
    }
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
    home_close(&home);
}

/* Return whether the other process came both with the region and without it; it may start late. */
static bool met_often(struct signals *signals)
{
    return atomic_load(&signals->written) > 10 && atomic_load(&signals->refused) > 10;
}

/* After a region was deregistered, no other process writes to its memory. */
static void regions_deregistered_under_load(void)
{
    struct signals *signals = mmap(NULL, sizeof(*signals), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct alloc_source *source;
    volatile uint64_t *words;
    struct shared shared;
    unsigned int i, j, seed = 7;
    unsigned int before = check_failures();
    uint64_t end;
    int status = 0;
    pid_t other;

    REQUIRE(signals != MAP_FAILED);
    shared_open(&shared);
    source = source_of(&shared);
    words = alloc_piece(source, SIZE, 1, 0);
    REQUIRE(words != NULL);
    atomic_store(&signals->address, (uintptr_t)words);
    other = fork();
    REQUIRE(other >= 0);
    if (!other) {
        write_from_there(&shared, signals);
        _exit(check_failures() != before);
    }
    end = now_ns() + WAIT_S * 1000000000ull;
    for (i = 0; i < SCALED(300u) || (!met_often(signals) && now_ns() < end); i++) {
        struct ibv_mr *mr = soft_verbs.reg_mr(shared.pd, (void *)(uintptr_t)words, SIZE, ACCESS_ALL);

        REQUIRE(mr != NULL);
        atomic_store(&signals->key, mr->rkey);
        sleep_us(next_random(&seed, 1000));
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
        for (j = 0; j < SIZE / 8; j += 512)
            words[j] = i;
        sleep_us(50);
        for (j = 0; j < SIZE / 8 && words[j] == i; j += 512)
            ;
        CHECK(j >= SIZE / 8);
    }
    atomic_store(&signals->stop, true);
    CHECK_EQ(waitpid(other, &status, 0), other);
    CHECK_EQ(status, 0);
    CHECK(met_often(signals));
    CHECK_EQ(alloc_return(source, (void *)(uintptr_t)words, 0), 0);
    CHECK_EQ(alloc_release(source), 0);
    munmap(signals, sizeof(*signals));
    shared_close(&shared);
}

/* ---- Forks ------------------------------------------------------------------------------------------------------ */

static void in_the_child(void *argument)
{
    struct shared *shared = ((void **)argument)[0];
    struct alloc_source *source = ((void **)argument)[1];
    char byte;
    int fd;

    CHECK_EQ(soft_export_shpd(shared->pd, &fd), ENODEV);
    CHECK_REFUSED(alloc_piece(source, 100, 1, 0), ENODEV);
    CHECK(mincore(shared->file->page, 4096, (unsigned char *)&byte) || !kernel_keeps_pages_from_children());
    CHECK_EQ(fcntl(shared->file->fd, F_GETFD), -1);
    CHECK_EQ(alloc_release(source), 0);
}

static void a_child_does_not_inherit_the_file(void)
{
    struct alloc_source *source;
    struct shared shared;
    void *piece;

    shared_open(&shared);
    source = source_of(&shared);
    piece = alloc_piece(source, 100, 1, 0);
    REQUIRE(piece != NULL);
    kernel_keeps_pages_from_children(); /* it is asked here, and the child knows */
    in_child(in_the_child, (void *[]){&shared, source});
    CHECK_EQ(atomic_load(&shared.file->area.owners[0]), 1); /* and takes none away */
    CHECK_EQ(alloc_return(source, piece, 0), 0);
    CHECK_EQ(alloc_release(source), 0);
    shared_close(&shared);
}

CHECK_MAIN_ONCE(CASE(invalid_files), CASE(files_of_more_memory_than_there_is), CASE(a_file_with_a_lease),
                CASE(files_of_huge_pages), CASE(the_file_cannot_be_truncated), CASE(no_slot_is_left),
                CASE(no_key_is_left), CASE(no_memory_is_left), CASE(closed_with_an_allocated_piece),
                CASE(closed_while_pieces_are_allocated), CASE(memory_is_freed_without_locks),
                CASE(remains_of_dead_processes_are_cleared), CASE(memory_of_dead_processes_is_freed_after_accesses),
                CASE(waits_for_stopped_processes_are_limited), CASE(waits_for_a_slow_process_are_limited_in_sum),
                CASE(regions_deregistered_under_load), CASE(a_child_does_not_inherit_the_file))
