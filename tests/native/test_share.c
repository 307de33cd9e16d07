/* Tests of protection domains shared by contexts: all may reach their memory, and closing an instance ends its
 * regions. */
#include "support.h"
#include "support_fork.h"
#include "support_srq.h"
#include "support_threads.h"

#include <stdatomic.h>

#define KEY 0x1122334455667788ull

/* Two contexts with an instance each of one domain. */
struct sharing {
    struct home homes[2];
    struct ibv_pd *pds[2];
    uint32_t share;
};

static void sharing_open(struct sharing *sharing)
{
    int i;

    memset(sharing, 0, sizeof(*sharing));
    for (i = 0; i < 2; i++)
        home_open(&sharing->homes[i]);
    sharing->pds[0] = soft_verbs.alloc_pd(sharing->homes[0].context);
    REQUIRE(sharing->pds[0] != NULL);
    REQUIRE_EQ(soft_alloc_shpd(sharing->pds[0], KEY, &sharing->share), 0);
    sharing->pds[1] = soft_share_pd(sharing->homes[1].context, sharing->share, KEY);
    REQUIRE(sharing->pds[1] != NULL);
}

/* Objects that the test destroyed itself are NULL. */
static void sharing_close(struct sharing *sharing)
{
    int i;

    for (i = 0; i < 2; i++)
        if (sharing->pds[i])
            CHECK_EQ(soft_verbs.dealloc_pd(sharing->pds[i]), 0);
    CHECK_REFUSED(soft_share_pd(sharing->homes[0].context, sharing->share, KEY), ENOENT);
    for (i = 0; i < 2; i++)
        home_close(&sharing->homes[i]);
}

static void give_back(struct sharing *sharing, int which)
{
    CHECK_EQ(soft_verbs.dealloc_pd(sharing->pds[which]), 0);
    sharing->pds[which] = NULL;
}

/* Create a queue pair on an instance, connected to itself. */
static struct ibv_qp *loop_on(struct sharing *sharing, int which, struct ibv_cq *cq)
{
    return make_loop(sharing->pds[which], cq, 8);
}

static int write_with(struct ibv_qp *qp, uint64_t wr_id, void *from, uint32_t lkey, void *to, uint32_t rkey)
{
    struct ibv_sge sge = {(uintptr_t)from, 8, lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, wr_id, &sge, 1);

    wr.wr.rdma.remote_addr = (uintptr_t)to;
    wr.wr.rdma.rkey = rkey;
    return post(qp, &wr);
}

static void reconnect(struct ibv_qp *qp)
{
    CHECK_EQ(qp_to(qp, IBV_QPS_RESET), 0);
    qp_connect(qp, &default_link, qp->qp_num);
}

/* ---- Names ------------------------------------------------------------------------------------------------- */

static void identifiers(void)
{
    uint32_t first = 0, second = 0, unused = 77;
    struct ibv_pd *pds[2], *instance, *parent;
    struct soft_counts counts;
    struct home home;
    int i;

    home_open(&home);
    for (i = 0; i < 2; i++) {
        pds[i] = soft_verbs.alloc_pd(home.context);
        REQUIRE(pds[i] != NULL);
    }
    parent = home_parent(&home, NULL);
    REQUIRE(parent != NULL);
    CHECK_EQ(soft_alloc_shpd(parent, KEY, &first), 0); /* which takes the place of its protection domain */
    CHECK_EQ(soft_alloc_shpd(home.base, KEY, &unused), EEXIST);
    CHECK_EQ(soft_verbs.dealloc_pd(parent), 0);
    instance = soft_share_pd(home.context, first, KEY);
    REQUIRE(instance != NULL);
    CHECK(to_soft_pd(instance)->domain == to_soft_pd(home.base)->domain);
    CHECK_EQ(soft_verbs.dealloc_pd(instance), 0);
    CHECK_EQ(soft_alloc_shpd(pds[0], KEY, &first), 0);
    CHECK_EQ(soft_alloc_shpd(pds[1], KEY, &second), 0);
    CHECK(first && second && first != second);
    CHECK_EQ(soft_alloc_shpd(pds[0], KEY, &unused), EEXIST);
    CHECK_EQ(unused, 77);
    CHECK_REFUSED(soft_share_pd(home.context, 0, KEY), ENOENT);
    CHECK_REFUSED(soft_share_pd(home.context, second + 1, KEY), ENOENT);
    CHECK_REFUSED(soft_share_pd(home.context, first, KEY + 1), EACCES);
    CHECK_REFUSED(soft_share_pd(home.context, first, (uint32_t)KEY), EACCES); /* all 64 bits count */

    instance = soft_share_pd(home.context, first, KEY);
    REQUIRE(instance != NULL);
    CHECK(instance->context == home.context && instance->handle != pds[0]->handle);
    CHECK(to_soft_pd(instance)->domain == to_soft_pd(pds[0])->domain);
    CHECK_EQ(soft_alloc_shpd(instance, KEY, &unused), EEXIST);
    soft_get_counts(home.context, &counts);
    CHECK_EQ(counts.pds, 4);
    CHECK_EQ(soft_verbs.dealloc_pd(pds[0]), 0); /* the first one is no more than any other */
    pds[0] = soft_share_pd(home.context, first, KEY);
    REQUIRE(pds[0] != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(instance), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(pds[0]), 0);
    CHECK_REFUSED(soft_share_pd(home.context, first, KEY), ENOENT); /* the last one went */
    CHECK_EQ(soft_verbs.dealloc_pd(pds[1]), 0);

    pds[0] = soft_verbs.alloc_pd(home.context);
    REQUIRE(pds[0] != NULL);
    CHECK_EQ(soft_alloc_shpd(pds[0], KEY, &unused), 0);
    CHECK(unused != first && unused != second); /* an old number belongs to no domain */
    CHECK_EQ(soft_verbs.dealloc_pd(pds[0]), 0);
    home_close(&home);
}

/* The verb fails with the fault plan's errno, and nothing is left. */
static void planned_failure(void)
{
    const struct soft_strike once = {1, 0, 1};
    struct ibv_context *context;
    struct sharing sharing;
    struct ibv_pd *pd;
    uint32_t share;

    sharing_open(&sharing);
    context = sharing.homes[0].context;
    pd = soft_verbs.alloc_pd(context);
    REQUIRE(pd != NULL);
    CHECK_EQ(soft_fault_verb(context, SOFT_VERB_share_pd, once, EPERM), 0);
    CHECK_EQ(soft_fault_verb(context, SOFT_VERB_alloc_shpd, once, EPERM), 0);
    CHECK_REFUSED(soft_share_pd(context, sharing.share, KEY), EPERM);
    CHECK_EQ(soft_alloc_shpd(pd, KEY, &share), EPERM);
    CHECK_EQ(soft_alloc_shpd(pd, KEY, &share), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
    sharing_close(&sharing);
}

/* ---- Access ------------------------------------------------------------------------------------------------ */

/* A queue pair reaches memory of each instance, on both sides; memory of another domain it does not. */
static void one_domain(void)
{
    uint64_t from = 42, to = 0, secret = 0;
    struct ibv_mr *source, *target, *foreign;
    struct sharing sharing;
    struct ibv_cq *cq;
    struct ibv_qp *qp;

    sharing_open(&sharing);
    cq = home_cq(&sharing.homes[0], 16, NULL);
    qp = loop_on(&sharing, 0, cq);
    source = soft_verbs.reg_mr(sharing.pds[1], &from, 8, ACCESS_ALL);
    target = soft_verbs.reg_mr(sharing.pds[1], &to, 8, ACCESS_ALL);
    foreign = soft_verbs.reg_mr(sharing.homes[1].base, &secret, 8, ACCESS_ALL);
    REQUIRE(source && target && foreign);
    CHECK_EQ(write_with(qp, 1, &from, source->lkey, &to, target->rkey), 0);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(to, 42);
    CHECK_EQ(write_with(qp, 2, &from, source->lkey, &secret, foreign->rkey), 0);
    EXPECT(cq, 2, IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(secret, 0);
    CHECK_EQ(soft_verbs.dereg_mr(source), 0);
    CHECK_EQ(soft_verbs.dereg_mr(target), 0);
    CHECK_EQ(soft_verbs.dereg_mr(foreign), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    sharing_close(&sharing);
}

/* ---- An instance goes --------------------------------------------------------------------------------------- */

/* An instance with objects other than regions and windows is busy, and unchanged afterwards. */
static void busy_instance(void)
{
    struct ibv_pd *parent;
    uint64_t to = 0, from = 7;
    struct sharing sharing;
    struct home on_shared;
    struct ibv_srq *srq;
    struct ibv_mr *mr;
    struct ibv_cq *cq;
    struct ibv_qp *qp;

    sharing_open(&sharing);
    on_shared = sharing.homes[0];
    on_shared.base = on_shared.pd = sharing.pds[0];
    cq = home_cq(&sharing.homes[0], 16, NULL);
    mr = soft_verbs.reg_mr(sharing.pds[0], &to, 8, ACCESS_ALL);
    REQUIRE(mr != NULL);
    qp = loop_on(&sharing, 0, cq);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[0]), EBUSY);
    CHECK_EQ(write_with(qp, 1, &to, mr->lkey, &to, mr->rkey), 0);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    srq = make_srq(&on_shared, 4);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[0]), EBUSY);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    parent = home_parent(&on_shared, NULL);
    REQUIRE(parent != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[0]), EBUSY);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    mr = soft_verbs.reg_mr(parent, &from, 8, ACCESS_ALL); /* what is on a parent domain does not die */
    REQUIRE(mr != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(parent), EBUSY);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing.pds[0]), EBUSY);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(parent), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    sharing_close(&sharing);
}

/* A plain domain stays busy with its memory. */
static void plain_domains_keep_memory(void)
{
    struct home home;
    struct ibv_mr *mr;
    struct ibv_mw *mw;
    uint64_t word = 0;

    home_open(&home);
    mr = soft_verbs.reg_mr(home.base, &word, 8, 0);
    REQUIRE(mr != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(home.base), EBUSY);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    mw = verbs_alloc_mw(home.base, IBV_MW_TYPE_1);
    REQUIRE(mw != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(home.base), EBUSY);
    CHECK_EQ(verbs_dealloc_mw(mw), 0);
    home_close(&home);
}

/* Regions end at once, as source and as target; their handles can still be freed. */
static void regions_end_with_their_instance(void)
{
    struct ibv_mr *dying[2], *living;
    struct soft_counts counts;
    uint64_t words[3] = {5, 6, 7};
    struct sharing sharing;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    int i;

    sharing_open(&sharing);
    cq = home_cq(&sharing.homes[0], 16, NULL);
    qp = loop_on(&sharing, 0, cq);
    living = soft_verbs.reg_mr(sharing.pds[0], &words[0], 8, ACCESS_ALL);
    for (i = 0; i < 2; i++)
        dying[i] = soft_verbs.reg_mr(sharing.pds[1], &words[1 + i], 8, ACCESS_ALL);
    REQUIRE(living && dying[0] && dying[1]);
    give_back(&sharing, 1);
    CHECK_EQ(write_with(qp, 1, &words[0], living->lkey, &words[1], dying[0]->rkey), 0);
    EXPECT(cq, 1, IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(words[1], 6);
    reconnect(qp);
    CHECK_EQ(write_with(qp, 2, &words[2], dying[1]->lkey, &words[0], living->rkey), 0);
    EXPECT(cq, 2, IBV_WC_LOC_PROT_ERR);
    CHECK_EQ(words[0], 5);
    reconnect(qp);
    CHECK_EQ(write_with(qp, 3, &words[0], living->lkey, &words[0], living->rkey), 0);
    EXPECT(cq, 3, IBV_WC_SUCCESS);
    soft_get_counts(sharing.homes[1].context, &counts);
    CHECK_EQ(counts.mrs, 2);
    CHECK_EQ(counts.pds, 1);
    CHECK_EQ(soft_verbs.dereg_mr(dying[1]), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    give_back(&sharing, 0); /* the last one: the domain goes, and what is left of its memory does not mind */
    CHECK_EQ(soft_verbs.dereg_mr(dying[0]), 0);
    CHECK_EQ(soft_verbs.dereg_mr(living), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    sharing_close(&sharing);
}

/* Bind a window of type 1 to one word, and wait for it. */
static void bind_window(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mw *mw, struct ibv_mr *mr)
{
    struct ibv_mw_bind bind = {
        .wr_id = 90,
        .send_flags = IBV_SEND_SIGNALED,
        .bind_info = {mr, (uintptr_t)mr->addr, 8, IBV_ACCESS_REMOTE_WRITE},
    };

    REQUIRE_EQ(verbs_bind_mw(qp, mw, &bind), 0);
    EXPECT(cq, 90, IBV_WC_SUCCESS);
}

/* Either a window or its region may be of the closed instance: a second instance in the queue pair's context, since a
 * binding is within one context. */
static void windows_end_with_their_instance(void)
{
    struct ibv_mr *regions[2], *source;
    uint64_t words[2] = {1, 2}, from = 9;
    struct ibv_mw *windows[2];
    struct sharing sharing;
    struct ibv_pd *pds[2];
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    int i;

    sharing_open(&sharing);
    cq = home_cq(&sharing.homes[0], 16, NULL);
    qp = loop_on(&sharing, 0, cq);
    pds[0] = sharing.pds[0];
    pds[1] = soft_share_pd(sharing.homes[0].context, sharing.share, KEY);
    REQUIRE(pds[1] != NULL);
    source = soft_verbs.reg_mr(sharing.pds[0], &from, 8, ACCESS_ALL);
    REQUIRE(source != NULL);
    for (i = 0; i < 2; i++) { /* the window of each instance is bound to the other's region */
        regions[i] = soft_verbs.reg_mr(pds[i], &words[i], 8, ACCESS_ALL | IBV_ACCESS_MW_BIND);
        windows[i] = verbs_alloc_mw(pds[1 - i], IBV_MW_TYPE_1);
        REQUIRE(regions[i] && windows[i]);
        bind_window(qp, cq, windows[i], regions[i]);
        CHECK_EQ(write_with(qp, 1, &from, source->lkey, &words[i], windows[i]->rkey), 0);
        EXPECT(cq, 1, IBV_WC_SUCCESS);
        CHECK_EQ(soft_verbs.dereg_mr(regions[i]), EBUSY);
        words[i] = 0;
    }
    CHECK_EQ(soft_verbs.dealloc_pd(pds[1]), 0);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(write_with(qp, 2, &from, source->lkey, &words[i], windows[i]->rkey), 0);
        EXPECT(cq, 2, IBV_WC_REM_ACCESS_ERR);
        CHECK_EQ(words[i], 0);
        reconnect(qp);
    }
    CHECK_EQ(soft_verbs.dereg_mr(regions[0]), 0);     /* its window is dead */
    CHECK_EQ(soft_verbs.dereg_mr(regions[1]), EBUSY); /* its window lives and leads to it still */
    CHECK_EQ(verbs_dealloc_mw(windows[1]), 0);
    CHECK_EQ(soft_verbs.dereg_mr(regions[1]), 0);
    CHECK_EQ(verbs_dealloc_mw(windows[0]), 0);
    CHECK_EQ(soft_verbs.dereg_mr(source), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    sharing_close(&sharing);
}

/* ---- Threads and forks --------------------------------------------------------------------------------------- */

/* One context's instances are opened and closed with their memory while the other one writes there. */
struct fire {
    struct sharing sharing;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *source;
    uint64_t from, to;
    atomic_uint key;
    atomic_bool stop;
};

struct firing {
    struct fire *fire;
    bool comes_and_goes;
};

static void come_and_go(struct fire *fire)
{
    unsigned int i, seed = 3;

    for (i = 0; i < SCALED(400u); i++) {
        struct ibv_pd *pd = soft_share_pd(fire->sharing.homes[1].context, fire->sharing.share, KEY);
        struct ibv_mr *mr = pd ? soft_verbs.reg_mr(pd, &fire->to, 8, ACCESS_ALL) : NULL;
        uint64_t before;

        if (!CHECK(pd && mr))
            break;
        atomic_store(&fire->key, mr->rkey);
        sleep_us(next_random(&seed, 200));
        CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
        before = fire->to; /* no thread writes any more; ThreadSanitizer would report it */
        fire->to = before + 1;
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    }
    atomic_store(&fire->stop, true);
}

static void write_there(struct fire *fire)
{
    struct ibv_wc wc;

    while (!atomic_load(&fire->stop)) {
        if (!CHECK_EQ(write_with(fire->qp, 1, &fire->from, fire->source->lkey, &fire->to, atomic_load(&fire->key)),
                      0) ||
            !CHECK(wait_completion(fire->cq, &wc)))
            return;
        if (wc.status == IBV_WC_SUCCESS)
            continue;
        CHECK_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
        reconnect(fire->qp);
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

static void instances_closed_under_load(void)
{
    struct fire *fire = calloc(1, sizeof(*fire));
    struct firing firings[2] = {{fire, false}, {fire, true}};

    REQUIRE(fire != NULL);
    sharing_open(&fire->sharing);
    fire->cq = home_cq(&fire->sharing.homes[0], 16, NULL);
    fire->qp = loop_on(&fire->sharing, 0, fire->cq);
    fire->source = soft_verbs.reg_mr(fire->sharing.pds[0], &fire->from, 8, ACCESS_ALL);
    REQUIRE(fire->source != NULL);
    run_threads(2, take_part, firings, sizeof(firings[0]));
    CHECK_EQ(soft_verbs.dereg_mr(fire->source), 0);
    CHECK_EQ(soft_verbs.destroy_qp(fire->qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(fire->cq), 0);
    sharing_close(&fire->sharing);
    free(fire);
}

/* One thread closes the instance while another one deregisters its memory. */
struct ending {
    struct ibv_pd *pd;
    struct ibv_mr *mrs[8];
    struct ibv_mw *mws[8];
    bool of_memory;
};

static void end_it(void *argument)
{
    struct ending *ending = argument;
    int i;

    if (!ending->of_memory) {
        CHECK_EQ(soft_verbs.dealloc_pd(ending->pd), 0);
        return;
    }
    for (i = 0; i < 8; i++) {
        CHECK_EQ(soft_verbs.dereg_mr(ending->mrs[i]), 0);
        CHECK_EQ(verbs_dealloc_mw(ending->mws[i]), 0);
    }
}

static void both_end_at_once(void)
{
    struct ending endings[2] = {{0}};
    struct sharing sharing;
    uint64_t word = 0;
    int round, i;

    sharing_open(&sharing);
    for (round = 0; round < 50; round++) {
        endings[0].pd = soft_share_pd(sharing.homes[1].context, sharing.share, KEY);
        REQUIRE(endings[0].pd != NULL);
        for (i = 0; i < 8; i++) {
            endings[0].mrs[i] = soft_verbs.reg_mr(endings[0].pd, &word, 8, 0);
            endings[0].mws[i] = verbs_alloc_mw(endings[0].pd, IBV_MW_TYPE_2);
            REQUIRE(endings[0].mrs[i] && endings[0].mws[i]);
        }
        endings[1] = endings[0];
        endings[1].of_memory = true;
        run_threads(2, end_it, endings, sizeof(endings[0]));
    }
    sharing_close(&sharing);
}

static void use_of_the_parents(void *argument)
{
    struct sharing *sharing = argument;
    struct home home;
    uint32_t share;

    CHECK_EQ(soft_alloc_shpd(sharing->homes[0].base, KEY, &share), ENODEV);
    CHECK_REFUSED(soft_share_pd(sharing->homes[0].context, sharing->share, KEY), ENODEV);
    CHECK_EQ(soft_verbs.dealloc_pd(sharing->pds[1]), ENODEV);
    home_open(&home); /* the child's device has none of them */
    CHECK_REFUSED(soft_share_pd(home.context, sharing->share, KEY), ENOENT);
    home_close(&home);
}

static void stale_after_fork(void)
{
    struct sharing sharing;

    sharing_open(&sharing);
    in_child(use_of_the_parents, &sharing);
    sharing_close(&sharing);
}

CHECK_MAIN(CASE(identifiers), CASE(planned_failure), CASE(one_domain), CASE(busy_instance),
           CASE(plain_domains_keep_memory), CASE(regions_end_with_their_instance),
           CASE(windows_end_with_their_instance), CASE(instances_closed_under_load), CASE(both_end_at_once),
           CASE(stale_after_fork))
