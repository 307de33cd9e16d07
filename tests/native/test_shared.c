/* Tests of protection domains that processes share, by two devices of one process, which are to each other like those
 * of two processes: regions that one registered serve the other, until they are deregistered; whatever is in their
 * file. */
#define _GNU_SOURCE
#include "support.h"
#include "support_fabric.h"
#include "support_threads.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "alloc/alloc.h"
#include "soft/api/device.h"
#include "soft/base/address.h"
#include "soft/objects/context.h"
#include "soft/objects/limits.h"
#include "soft/objects/pd.h"
#include "soft/objects/pd_share.h"
#include "soft/objects/shared.h"
#include "soft/objects/shared_keys.h"

#define KEY 0x1122334455667788ull
#define SIZE (64u << 10)
#define LAST (SIZE / 8 - 1)

/* One device that shares a domain, and one with an instance of it and a queue pair connected to itself. */
struct sharing {
    struct home homes[2];
    struct ibv_pd *pds[2];
    struct alloc_source *sources[2]; /* of the memory that both have */
    struct ibv_cq *cq;
    struct ibv_qp *qp;
};

static struct alloc_source *source_of(struct ibv_pd *pd)
{
    const struct alloc_area *area = soft_shared_area(pd);
    struct alloc_source *source;

    REQUIRE(area != NULL);
    source = alloc_area_create(area);
    REQUIRE(source != NULL);
    area->drop(area->handle);
    return source;
}

static void sharing_open(struct sharing *sharing)
{
    static uint16_t port; /* of one device for all cases: it stays with the process */
    struct check_variant other = *variant;
    uint32_t share;
    int fd = -1, i;

    port = port ? port : free_port();
    other.options.address = (struct soft_address){AF_INET, port, {127, 0, 0, 1}};
    home_open(&sharing->homes[0]);
    home_open_like(&sharing->homes[1], &other);
    sharing->pds[0] = soft_verbs.alloc_pd(sharing->homes[0].context);
    REQUIRE(sharing->pds[0] != NULL);
    CHECK_EQ(soft_export_shpd(sharing->pds[0], &fd), EINVAL); /* it is not shared */
    CHECK_REFUSED(soft_shared_area(sharing->pds[0]), EINVAL);
    REQUIRE_EQ(soft_alloc_shpd(sharing->pds[0], KEY, &share), 0);
    REQUIRE_EQ(soft_export_shpd(sharing->pds[0], &fd), 0);
    sharing->pds[1] = soft_import_shpd(sharing->homes[1].context, fd, KEY);
    REQUIRE(sharing->pds[1] != NULL);
    close(fd);
    for (i = 0; i < 2; i++)
        sharing->sources[i] = source_of(sharing->pds[i]);
    sharing->cq = home_cq(&sharing->homes[1], 64, NULL);
    sharing->qp = make_loop(sharing->pds[1], sharing->cq, 8);
}

static void sharing_close(struct sharing *sharing)
{
    int i;

    CHECK_EQ(soft_verbs.destroy_qp(sharing->qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(sharing->cq), 0);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(alloc_release(sharing->sources[i]), 0);
        CHECK_EQ(soft_verbs.dealloc_pd(sharing->pds[i]), 0);
        CHECK(to_soft_context(sharing->homes[i].context)->device->shared_files == NULL);
        home_close(&sharing->homes[i]);
    }
}

/* Return the address where another process has mapped a region. */
static uint8_t *seen_by_other(struct sharing *sharing, const void *address)
{
    const struct alloc_area *areas[2];
    int i;

    for (i = 0; i < 2; i++) {
        areas[i] = soft_shared_area(sharing->pds[i]);
        areas[i]->drop(areas[i]->handle);
    }
    return (uint8_t *)areas[1]->memory + ((const char *)address - areas[0]->memory);
}

static int write_all(struct ibv_qp *qp, uint64_t wr_id, const void *from, uint32_t lkey, const void *to, uint32_t rkey,
                     uint32_t size)
{
    struct ibv_sge sge = {(uintptr_t)from, size, lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, wr_id, &sge, 1);

    wr.wr.rdma.remote_addr = (uintptr_t)to;
    wr.wr.rdma.rkey = rkey;
    return post(qp, &wr);
}

static int write_with(struct ibv_qp *qp, uint64_t wr_id, const void *from, uint32_t lkey, const void *to, uint32_t rkey)
{
    return write_all(qp, wr_id, from, lkey, to, rkey, 8);
}

static void reconnect(struct ibv_qp *qp)
{
    CHECK_EQ(qp_to(qp, IBV_QPS_RESET), 0);
    qp_connect(qp, &default_link, qp->qp_num);
}

/* ---- Access -------------------------------------------------------------------------------------------------- */

static void regions_of_another_process_are_served(void)
{
    struct ibv_mr *source, *target, *own, *private;
    uint64_t *words, *far, alone = 7;
    struct sharing sharing;
    uint32_t keys[2];

    sharing_open(&sharing);
    words = alloc_piece(sharing.sources[0], SIZE, 64, 0);
    far = alloc_piece(sharing.sources[1], SIZE, 64, 0);
    REQUIRE(words && far);
    CHECK(words[0] == 0 && far[0] == 0);
    source = soft_verbs.reg_mr(sharing.pds[0], &words[0], 8, ACCESS_ALL);
    target = soft_verbs.reg_mr(sharing.pds[0], &words[1], 8, ACCESS_ALL);
    own = soft_verbs.reg_mr(sharing.pds[1], far, 8, ACCESS_ALL);
    private = soft_verbs.reg_mr(sharing.pds[0], &alone, 8, ACCESS_ALL);
    REQUIRE(source && target && own && private);
    words[0] = 42;
    CHECK_EQ(((uint64_t *)(void *)seen_by_other(&sharing, words))[0], 42);
    /* Both sides of a request are another process's. */
    CHECK_EQ(write_with(sharing.qp, 1, &words[0], source->lkey, &words[1], target->rkey), 0);
    EXPECT(sharing.cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(words[1], 42);
    CHECK_EQ(write_with(sharing.qp, 2, &words[0], source->lkey, far, own->rkey), 0);
    EXPECT(sharing.cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(*far, 42);
    CHECK_EQ(write_with(sharing.qp, 3, far, own->lkey, &alone, private->rkey), 0);
    EXPECT(sharing.cq, 3, IBV_WC_REM_ACCESS_ERR);
    reconnect(sharing.qp);
    keys[0] = source->lkey;
    keys[1] = target->rkey;
    CHECK_EQ(soft_verbs.dereg_mr(target), 0);
    CHECK_EQ(write_with(sharing.qp, 4, far, own->lkey, &words[1], keys[1]), 0);
    EXPECT(sharing.cq, 4, IBV_WC_REM_ACCESS_ERR);
    reconnect(sharing.qp);
    CHECK_EQ(soft_verbs.dereg_mr(source), 0);
    CHECK_EQ(write_with(sharing.qp, 5, &words[0], keys[0], far, own->rkey), 0);
    EXPECT(sharing.cq, 5, IBV_WC_LOC_PROT_ERR);
    CHECK_EQ(soft_verbs.dereg_mr(own), 0);
    CHECK_EQ(soft_verbs.dereg_mr(private), 0);
    CHECK_EQ(alloc_return(sharing.sources[0], words, 0), 0);
    CHECK_EQ(alloc_return(sharing.sources[1], far, 0), 0);
    sharing_close(&sharing);
}

/* Requests reach a region of another process from its first byte to its last, and not the memory beside it, although
 * the same file contains that, too. */
static void bounds_of_regions_of_another_process(void)
{
    static const struct {
        int at; /* in words; the region consists of the words 2 and 3 */
        uint32_t size;
        bool is_within;
    } tries[] = {
        {2, 16, true},  {2, 8, true},   {3, 8, true},  {1, 8, false}, {1, 16, false},
        {3, 16, false}, {2, 24, false}, {4, 8, false}, {6, 8, false},
    };
    struct ibv_mr *region, *own;
    struct sharing sharing;
    uint64_t *words, *far;
    size_t i;

    sharing_open(&sharing);
    words = alloc_piece(sharing.sources[0], SIZE, 64, 0);
    far = alloc_piece(sharing.sources[1], SIZE, 64, 0);
    REQUIRE(words && far);
    region = soft_verbs.reg_mr(sharing.pds[0], &words[2], 16, ACCESS_ALL);
    own = soft_verbs.reg_mr(sharing.pds[1], far, 64, ACCESS_ALL);
    REQUIRE(region && own);
    for (i = 0; i < COUNT_OF(tries); i++) {
        const uint64_t *at = &words[tries[i].at];

        CHECK_EQ(write_all(sharing.qp, i, far, own->lkey, at, region->rkey, tries[i].size), 0);
        EXPECT(sharing.cq, i, tries[i].is_within ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
        if (!tries[i].is_within)
            reconnect(sharing.qp);
        CHECK_EQ(write_all(sharing.qp, i, at, region->lkey, far, own->rkey, tries[i].size), 0);
        EXPECT(sharing.cq, i, tries[i].is_within ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR);
        if (!tries[i].is_within)
            reconnect(sharing.qp);
    }
    CHECK_EQ(soft_verbs.dereg_mr(region), 0);
    CHECK_EQ(soft_verbs.dereg_mr(own), 0);
    CHECK_EQ(alloc_return(sharing.sources[0], words, 0), 0);
    CHECK_EQ(alloc_return(sharing.sources[1], far, 0), 0);
    sharing_close(&sharing);
}

/* Windows serve only in the process that made them, their numbers included. */
static void windows_are_not_shared(void)
{
    struct ibv_mw *windows[2];
    struct ibv_mr *regions[2];
    struct sharing sharing;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    uint64_t *words;
    int i;

    sharing_open(&sharing);
    cq = home_cq(&sharing.homes[0], 16, NULL);
    qp = make_loop(sharing.pds[0], cq, 8);
    words = alloc_piece(sharing.sources[0], SIZE, 64, 0);
    REQUIRE(words != NULL);
    for (i = 0; i < 2; i++) {
        regions[i] = soft_verbs.reg_mr(sharing.pds[i], i ? (void *)seen_by_other(&sharing, &words[1]) : words, 8,
                                       ACCESS_ALL | IBV_ACCESS_MW_BIND);
        windows[i] = verbs_alloc_mw(sharing.pds[i], IBV_MW_TYPE_1);
        REQUIRE(regions[i] && windows[i]);
    }
    for (i = 0; i < 2; i++) {
        struct ibv_mw_bind bind = {
            .wr_id = 9,
            .send_flags = IBV_SEND_SIGNALED,
            .bind_info = {regions[i], (uintptr_t)regions[i]->addr, 8, IBV_ACCESS_REMOTE_WRITE},
        };
        struct ibv_qp *at = i ? sharing.qp : qp;
        struct ibv_cq *queue = i ? sharing.cq : cq;

        CHECK_EQ(verbs_bind_mw(at, windows[i], &bind), 0);
        EXPECT(queue, 9, IBV_WC_SUCCESS);
        CHECK_EQ(write_with(at, 1, regions[i]->addr, regions[i]->lkey, regions[i]->addr, windows[i]->rkey), 0);
        EXPECT(queue, 1, IBV_WC_SUCCESS);
    }
    CHECK(windows[0]->rkey >> 8 != windows[1]->rkey >> 8);
    CHECK_EQ(write_with(sharing.qp, 2, regions[1]->addr, regions[1]->lkey, words, windows[0]->rkey), 0);
    EXPECT(sharing.cq, 2, IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(soft_verbs.dereg_mr(regions[0]), EBUSY);
    CHECK_EQ(write_with(qp, 3, words, regions[0]->lkey, words, regions[0]->rkey), 0); /* it is whole again */
    EXPECT(cq, 3, IBV_WC_SUCCESS);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(verbs_dealloc_mw(windows[i]), 0);
        CHECK_EQ(soft_verbs.dereg_mr(regions[i]), 0);
    }
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(alloc_return(sharing.sources[0], words, 0), 0);
    sharing_close(&sharing);
}

/* Closing an instance ends its regions, for the other process, too. */
static void an_instance_closes(void)
{
    struct sharing sharing;
    struct ibv_mr *dying, *own;
    struct ibv_pd *instance;
    uint64_t *words, *far;
    int fd = -1;

    sharing_open(&sharing);
    REQUIRE_EQ(soft_export_shpd(sharing.pds[0], &fd), 0);
    instance = soft_import_shpd(sharing.homes[0].context, fd, KEY); /* a second one of the same process */
    close(fd);
    REQUIRE(instance != NULL);
    CHECK(to_soft_pd(instance)->domain == to_soft_pd(sharing.pds[0])->domain);
    words = alloc_piece(sharing.sources[0], SIZE, 64, 0);
    far = alloc_piece(sharing.sources[1], SIZE, 64, 0);
    dying = soft_verbs.reg_mr(instance, words, 8, ACCESS_ALL);
    own = soft_verbs.reg_mr(sharing.pds[1], far, 8, ACCESS_ALL);
    REQUIRE(words && far && dying && own);
    CHECK_EQ(write_with(sharing.qp, 1, far, own->lkey, words, dying->rkey), 0);
    EXPECT(sharing.cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.dealloc_pd(instance), 0);
    CHECK_EQ(write_with(sharing.qp, 2, far, own->lkey, words, dying->rkey), 0);
    EXPECT(sharing.cq, 2, IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(soft_verbs.dereg_mr(dying), 0);
    CHECK_EQ(soft_verbs.dereg_mr(own), 0);
    CHECK_EQ(alloc_return(sharing.sources[0], words, 0), 0);
    CHECK_EQ(alloc_return(sharing.sources[1], far, 0), 0);
    sharing_close(&sharing);
}

/* A process that gets the slot of an exited one uses none of that one's keys. */
static void slots_are_used_again_but_no_keys(void)
{
    struct sharing sharing;
    uint32_t keys[3];
    uint64_t word;
    int fd, i;

    sharing_open(&sharing);
    CHECK_EQ(soft_verbs.destroy_qp(sharing.qp), 0);
    REQUIRE_EQ(soft_export_shpd(sharing.pds[0], &fd), 0);
    for (i = 0; i < 3; i++) {
        struct ibv_mr *mr = soft_verbs.reg_mr(sharing.pds[1], &word, 8, ACCESS_ALL);

        REQUIRE(mr != NULL);
        keys[i] = mr->rkey;
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
        CHECK_EQ(alloc_release(sharing.sources[1]), 0);
        CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[1]), 0);
        sharing.pds[1] = soft_import_shpd(sharing.homes[1].context, fd, KEY);
        REQUIRE(sharing.pds[1] != NULL);
        sharing.sources[1] = source_of(sharing.pds[1]);
    }
    close(fd);
    CHECK_EQ(keys[0] >> 8, keys[1] >> 8);
    CHECK_EQ(keys[1] >> 8, keys[2] >> 8);
    CHECK(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
    sharing.qp = make_loop(sharing.pds[1], sharing.cq, 8);
    sharing_close(&sharing);
}

/* Bindings of windows count, too, and at once: the process may be killed. */
static void a_slot_passes_on_without_the_keys_of_windows(void)
{
    struct sharing sharing;
    struct soft_shared *file;
    struct ibv_send_wr wr = request(IBV_WR_BIND_MW, 1, NULL, 0);
    struct ibv_mw *mw;
    struct ibv_mr *mr;
    uint64_t word;
    uint32_t key;
    int fd;

    sharing_open(&sharing);
    mw = verbs_alloc_mw(sharing.pds[1], IBV_MW_TYPE_2); /* it has the first place of the slot */
    mr = soft_verbs.reg_mr(sharing.pds[1], &word, 8, ACCESS_ALL | IBV_ACCESS_MW_BIND);
    REQUIRE(mw && mr);
    key = mw->rkey + 2;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = key;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)&word, 8, IBV_ACCESS_REMOTE_WRITE};
    REQUIRE_EQ(post(sharing.qp, &wr), 0);
    EXPECT(sharing.cq, 1, IBV_WC_SUCCESS);
    file = atomic_load(&to_soft_pd(sharing.pds[1])->domain->file);
    CHECK_EQ((uint8_t)(atomic_load(&file->page->keys[file->slot][0].state) >> 32), (uint8_t)key);
    CHECK_EQ(verbs_dealloc_mw(mw), 0);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);

    REQUIRE_EQ(soft_export_shpd(sharing.pds[0], &fd), 0);
    CHECK_EQ(soft_verbs.destroy_qp(sharing.qp), 0);
    CHECK_EQ(alloc_release(sharing.sources[1]), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[1]), 0);
    sharing.pds[1] = soft_import_shpd(sharing.homes[1].context, fd, KEY);
    REQUIRE(sharing.pds[1] != NULL);
    close(fd);
    sharing.sources[1] = source_of(sharing.pds[1]);
    sharing.qp = make_loop(sharing.pds[1], sharing.cq, 8);
    mr = soft_verbs.reg_mr(sharing.pds[1], &word, 8, ACCESS_ALL);
    REQUIRE(mr != NULL);
    CHECK_EQ(mr->rkey, key + 1);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    sharing_close(&sharing);
}

/* ---- Joining --------------------------------------------------------------------------------------------------- */

enum { DEAD = 3, STUCK = 5 }; /* slots of processes */

struct joining {
    struct sharing sharing;
    int fd; /* of the file, as another process has it */
    struct soft_shared_page *page;
    atomic_bool is_over;
};

static void lock_slots(const struct joining *joining, uint32_t first, uint32_t end)
{
    struct flock what = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = end - first};

    REQUIRE_EQ(fcntl(joining->fd, F_OFD_SETLK, &what), 0);
}

static void join(struct joining *joining)
{
    struct sharing *sharing = &joining->sharing;

    sharing->pds[1] = soft_import_shpd(sharing->homes[1].context, joining->fd, KEY);
    atomic_store(&joining->is_over, true);
    REQUIRE(sharing->pds[1] != NULL);
}

/* Work while the remains of a dead process are cleared, which waits for a stuck one. */
static void do_other_things(struct joining *joining)
{
    struct ibv_context *context = joining->sharing.homes[1].context;
    struct ibv_pd *pd;

    EVENTUALLY(!atomic_load(&joining->page->readers[DEAD][0].sections));
    pd = soft_verbs.alloc_pd(context);
    REQUIRE(pd != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
    CHECK(!atomic_load(&joining->is_over));
    atomic_store(&joining->page->readers[STUCK][0].sections, 0);
}

struct joining_part {
    struct joining *joining;
    void (*play)(struct joining *);
};

static void play(void *argument)
{
    struct joining_part *part = argument;

    part->play(part->joining);
}

/* `full`: all slots but those of dead processes are used by other processes. */
static void join_beside_a_stuck_process(bool full)
{
    static struct joining joining;
    struct joining_part parts[2] = {{&joining, join}, {&joining, do_other_things}};
    struct sharing *sharing = &joining.sharing;
    struct soft_shared *file;

    atomic_store(&joining.is_over, false);
    sharing_open(sharing);
    REQUIRE_EQ(soft_export_shpd(sharing->pds[0], &joining.fd), 0);
    joining.page = atomic_load(&to_soft_pd(sharing->pds[0])->domain->file)->page;
    CHECK_EQ(soft_verbs.destroy_qp(sharing->qp), 0);
    CHECK_EQ(alloc_release(sharing->sources[1]), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing->pds[1]), 0);
    lock_slots(&joining, full ? 1 : STUCK, full ? DEAD : STUCK + 1);
    if (full)
        lock_slots(&joining, DEAD + 1, SOFT_SHARED_SLOTS);
    atomic_fetch_or(&joining.page->used_slots[0], 1u << DEAD | 1u << STUCK);
    atomic_store(&joining.page->readers[DEAD][0].sections, 1);
    atomic_store(&joining.page->readers[STUCK][0].sections, 1);

    run_threads(2, play, parts, sizeof(parts[0]));

    file = atomic_load(&to_soft_pd(sharing->pds[1])->domain->file);
    CHECK_EQ(file->slot, full ? DEAD : 1);
    CHECK(!atomic_load(&file->no_reuse));
    atomic_fetch_and(&joining.page->used_slots[0], ~((uint64_t)1 << STUCK));
    close(joining.fd);
    sharing->sources[1] = source_of(sharing->pds[1]);
    sharing->qp = make_loop(sharing->pds[1], sharing->cq, 8);
    sharing_close(sharing);
}

static void others_go_on_while_a_process_joins(void)
{
    join_beside_a_stuck_process(false);
}

static void others_go_on_when_only_dead_processes_slots_are_left(void)
{
    join_beside_a_stuck_process(true);
}

/* Remaining objects of an instance keep the file open, not the domain. */
static void regions_outlive_the_domain(void)
{
    struct sharing sharing;
    struct ibv_mr *left[2];
    uint64_t word = 0;
    int i;

    sharing_open(&sharing);
    CHECK_EQ(soft_verbs.destroy_qp(sharing.qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(sharing.cq), 0);
    for (i = 0; i < 2; i++) {
        left[i] = soft_verbs.reg_mr(sharing.pds[i], &word, 8, ACCESS_ALL);
        REQUIRE(left[i] != NULL);
        CHECK_EQ(alloc_release(sharing.sources[i]), 0);
        CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[i]), 0);
        CHECK(to_soft_context(sharing.homes[i].context)->device->shared_files != NULL);
    }
    for (i = 0; i < 2; i++) {
        CHECK_EQ(soft_verbs.dereg_mr(left[i]), 0);
        CHECK(to_soft_context(sharing.homes[i].context)->device->shared_files == NULL);
        home_close(&sharing.homes[i]);
    }
}

/* ---- Under fire ------------------------------------------------------------------------------------------------ */

struct fire {
    struct sharing sharing;
    struct ibv_mr *own;
    uint64_t *words, *far;
    atomic_uint key;
    atomic_bool stop;
};

struct firing {
    struct fire *fire;
    bool comes_and_goes;
};

static void come_and_go(struct fire *fire)
{
    struct sharing *sharing = &fire->sharing;
    unsigned int i, seed = 3;

    for (i = 0; i < SCALED(200u); i++) {
        struct ibv_mr *mr = soft_verbs.reg_mr(sharing->pds[0], fire->words, SIZE, ACCESS_ALL);

        if (!CHECK(mr != NULL))
            break;
        atomic_store(&fire->key, mr->rkey);
        sleep_us(next_random(&seed, 200));
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
        fire->words[LAST] = i; /* no thread writes any more */
        sleep_us(50);
        CHECK_EQ(fire->words[LAST], i);
    }
    atomic_store(&fire->stop, true);
}

static void write_there(struct fire *fire)
{
    struct ibv_wc wc;

    while (!atomic_load(&fire->stop)) {
        if (!CHECK_EQ(
                write_all(fire->sharing.qp, 1, fire->far, fire->own->lkey, fire->words, atomic_load(&fire->key), SIZE),
                0) ||
            !CHECK(wait_completion(fire->sharing.cq, &wc)))
            return;
        if (wc.status == IBV_WC_SUCCESS)
            continue;
        CHECK_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
        reconnect(fire->sharing.qp);
    }
}

static void take_part(void *argument)
{
    struct firing *firing = argument;

    if (firing->comes_and_goes)
        come_and_go(firing->fire);
    else
        write_there(firing->fire);
}

static void fire_open(struct fire *fire)
{
    struct sharing *sharing = &fire->sharing;

    sharing_open(sharing);
    fire->words = alloc_piece(sharing->sources[0], SIZE, 64, 0);
    fire->far = alloc_piece(sharing->sources[1], SIZE, 64, 0);
    fire->own = soft_verbs.reg_mr(sharing->pds[1], fire->far, SIZE, ACCESS_ALL);
    REQUIRE(fire->words && fire->far && fire->own);
    memset(fire->far, 0xff, SIZE);
}

static void fire_close(struct fire *fire)
{
    CHECK_EQ(soft_verbs.dereg_mr(fire->own), 0);
    CHECK_EQ(alloc_return(fire->sharing.sources[0], fire->words, 0), 0);
    CHECK_EQ(alloc_return(fire->sharing.sources[1], fire->far, 0), 0);
    sharing_close(&fire->sharing);
}

static void regions_deregistered_under_load(void)
{
    struct fire *fire = calloc(1, sizeof(*fire));
    struct firing firings[2] = {{fire, false}, {fire, true}};

    REQUIRE(fire != NULL);
    fire_open(fire);
    run_threads(2, take_part, firings, sizeof(firings[0]));
    fire_close(fire);
    free(fire);
}

/* ---- A torn table ------------------------------------------------------------------------------------------------ */

static uint64_t odd_number(unsigned int *seed, uint64_t near)
{
    switch (next_random(seed, 6)) {
    case 0:
        return 0;
    case 1:
        return UINT64_MAX - next_random(seed, 16);
    case 2:
        return near + next_random(seed, 32) - 16;
    case 3:
        return 1ull << next_random(seed, 64);
    default:
        return near;
    }
}

/* The shared pages are not trusted, whatever another process writes there: a request succeeds or is refused, and no
 * memory outside is touched. */
static void shared_memory_is_not_trusted(void)
{
    struct fire *fire = calloc(1, sizeof(*fire));
    unsigned int i, seed = 5, good = 0;
    struct soft_shared_key *entry;
    struct soft_shared *file;
    struct ibv_mr *mr;
    void *here;
    int access;

    REQUIRE(fire != NULL);
    fire_open(fire);
    mr = soft_verbs.reg_mr(fire->sharing.pds[0], fire->words, SIZE, ACCESS_ALL);
    REQUIRE(mr != NULL);
    file = atomic_load(&to_soft_pd(fire->sharing.pds[0])->domain->file);
    entry = &file->page->keys[file->slot][(mr->handle - SOFT_MAX_NUMBER) % SOFT_SHARED_KEYS];
    for (i = 0; i < SCALED(2000u); i++) {
        uint64_t address = (uintptr_t)fire->words + odd_number(&seed, 0);
        struct ibv_wc wc;

        atomic_store(&entry->address, odd_number(&seed, (uintptr_t)fire->words));
        atomic_store(&entry->length, odd_number(&seed, SIZE));
        atomic_store(&entry->offset, odd_number(&seed, file->area.bytes));
        atomic_store(&entry->access, (uint32_t)odd_number(&seed, ACCESS_ALL));
        if (!CHECK_EQ(write_with(fire->sharing.qp, i, fire->far, fire->own->lkey, (void *)(uintptr_t)address, mr->rkey),
                      0) ||
            !CHECK(wait_completion(fire->sharing.cq, &wc)))
            break;
        good += wc.status == IBV_WC_SUCCESS;
        if (wc.status == IBV_WC_SUCCESS)
            continue;
        CHECK_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
        reconnect(fire->sharing.qp);
    }
    CHECK(good > 0 && good < i);
    atomic_store(&entry->offset, file->area.bytes + 1);
    CHECK_REFUSED(soft_import_mr(fire->sharing.pds[1], mr->rkey, &here, &access), EFAULT);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    fire_close(fire);
    free(fire);
}

CHECK_MAIN(CASE(regions_of_another_process_are_served), CASE(bounds_of_regions_of_another_process),
           CASE(windows_are_not_shared), CASE(an_instance_closes), CASE(slots_are_used_again_but_no_keys),
           CASE(a_slot_passes_on_without_the_keys_of_windows), CASE(others_go_on_while_a_process_joins),
           CASE(others_go_on_when_only_dead_processes_slots_are_left), CASE(regions_outlive_the_domain),
           CASE(regions_deregistered_under_load), CASE(shared_memory_is_not_trusted))
