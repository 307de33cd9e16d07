#include "support.h"
#include "support_scene.h"
#include "support_types.h"

#include "soft/api/device.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/pd_share.h"

#include <fcntl.h>

#define SHARE_KEY 0x123456789ull

enum { DEPTH = 8 };

/* ---- Its allocator ------------------------------------------------------------------------------------------ */

static void *allocate(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
    struct scene *scene = pd_context;
    struct scene_piece *piece = &scene->pieces[scene->piece_count++];

    (void)pd;
    REQUIRE(scene->piece_count <= SCENE_PIECES);
    *piece = (struct scene_piece){.type = type};
    REQUIRE_EQ(posix_memalign(&piece->memory, alignment < sizeof(void *) ? sizeof(void *) : alignment, size), 0);
    memset(piece->memory, 0, size);
    scene->pieces_live++;
    return piece->memory;
}

static void take_back(struct ibv_pd *pd, void *pd_context, void *address, uint64_t type)
{
    struct scene *scene = pd_context;
    unsigned int i;

    CHECK(pd == scene->domain && !scene->domain_gone);
    for (i = 0; i < scene->piece_count; i++)
        if (scene->pieces[i].memory == address && !scene->pieces[i].freed)
            break;
    if (!CHECK(i < scene->piece_count)) /* it was returned before, or never allocated */
        return;
    CHECK_EQ(type, scene->pieces[i].type);
    scene->pieces[i].freed = true;
    scene->pieces_live--;
    free(address);
}

/* ---- Making and giving back --------------------------------------------------------------------------------- */

#define GIVES_BACK(name, call, type)     \
    static int give_##name(void *object) \
    {                                    \
        type *typed = object;            \
                                         \
        return call(typed);              \
    }
GIVES_BACK(pd, soft_verbs.dealloc_pd, struct ibv_pd)
GIVES_BACK(td, verbs_dealloc_td, struct ibv_td)
GIVES_BACK(xrcd, verbs_close_xrcd, struct ibv_xrcd)
GIVES_BACK(mr, soft_verbs.dereg_mr, struct ibv_mr)
GIVES_BACK(mw, verbs_dealloc_mw, struct ibv_mw)
GIVES_BACK(channel, soft_verbs.destroy_comp_channel, struct ibv_comp_channel)
GIVES_BACK(cq, soft_verbs.destroy_cq, struct ibv_cq)
GIVES_BACK(srq, soft_verbs.destroy_srq, struct ibv_srq)
GIVES_BACK(qp, soft_verbs.destroy_qp, struct ibv_qp)
GIVES_BACK(ah, soft_verbs.destroy_ah, struct ibv_ah)

/* Note an object that a verb created. Return the errno if there is none. */
static int keep(struct scene *scene, void *object, int (*give_back)(void *))
{
    if (!object)
        return errno ? errno : EPROTO;
    REQUIRE(scene->made_count < SCENE_MADE);
    scene->made[scene->made_count++] = (struct scene_made){object, give_back};
    return 0;
}

#define MAKE(scene, field, call, give) ((scene)->field = (call), keep(scene, (scene)->field, give))

/* Return from the step at the first failure. */
#define TRY(call)          \
    do {                   \
        int error_ = call; \
                           \
        if (error_)        \
            return error_; \
    } while (0)

/* ---- The steps ---------------------------------------------------------------------------------------------- */

static int negative(int answer)
{
    return answer == -1 ? errno : answer ? EPROTO : 0;
}

static int ask(struct scene *scene)
{
    struct verbs_context *verbs = verbs_context_of(scene->context);
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    struct ibv_device_attr_ex ex;
    struct ibv_device_attr attr;
    struct ibv_port_attr port;
    union ibv_gid gid;
    __be16 pkey;

    TRY(soft_verbs.query_device(scene->context, &attr));
    TRY(verbs->query_device_ex(scene->context, NULL, &ex, sizeof(ex)));
    TRY(verbs_query_port(scene->context, 1, &port));
    TRY(negative(soft_verbs.query_gid(scene->context, 1, 0, &gid)));
    TRY(negative(soft_verbs.query_pkey(scene->context, 1, 0, &pkey)));
    return verbs->query_rt_values(scene->context, &values);
}

static int make_domains(struct scene *scene)
{
    struct ibv_xrcd_init_attr xrcd_attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
    struct ibv_parent_domain_init_attr attr = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = allocate,
        .free = take_back,
        .pd_context = scene,
    };
    struct ibv_td_init_attr td_attr = {0};
    uint32_t share;

    TRY(MAKE(scene, base, soft_verbs.alloc_pd(scene->context), give_pd));
    TRY(MAKE(scene, td, verbs_alloc_td(scene->context, &td_attr), give_td));
    attr.pd = scene->base;
    attr.td = variant->thread_domain ? scene->td : NULL;
    TRY(MAKE(scene, domain, verbs_alloc_parent_domain(scene->context, &attr), give_pd));
    TRY(soft_alloc_shpd(scene->base, SHARE_KEY, &share));
    TRY(MAKE(scene, instance, soft_share_pd(scene->context, share, SHARE_KEY), give_pd));
    return MAKE(scene, xrcd, verbs_open_xrcd(scene->context, &xrcd_attr), give_xrcd);
}

/* Change the state without a verb, which might be the one that fails. */
static struct ibv_ah_attr own_path(struct ibv_context *context)
{
    const union ibv_gid *gids = to_soft_context(context)->device->gids;

    return (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1, .dgid = gids[1]}};
}

static int make_memory(struct scene *scene)
{
    struct ibv_ah_attr path = own_path(scene->context);

    TRY(MAKE(scene, mr,
             soft_verbs.reg_mr(scene->instance, scene->memory, sizeof(scene->memory), ACCESS_ALL | IBV_ACCESS_MW_BIND),
             give_mr));
    TRY(MAKE(scene, window, verbs_alloc_mw(scene->base, IBV_MW_TYPE_1), give_mw));
    TRY(MAKE(scene, second_window, verbs_alloc_mw(scene->domain, IBV_MW_TYPE_2), give_mw));
    return MAKE(scene, ah, soft_verbs.create_ah(scene->base, &path), give_ah);
}

static int make_queues(struct scene *scene)
{
    struct ibv_modify_cq_attr moderate = {IBV_CQ_ATTR_MODERATE, {2, 100}};
    struct ibv_cq_init_attr_ex ex_attr = {
        .cqe = DEPTH, .wc_flags = IBV_WC_STANDARD_FLAGS, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD};
    struct ibv_srq_init_attr srq_attr = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    struct ibv_srq_init_attr_ex xrc_attr = {.attr = {.max_wr = DEPTH, .max_sge = 1},
                                            .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
                                                         IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
                                            .srq_type = IBV_SRQT_XRC};

    TRY(MAKE(scene, channel, soft_verbs.create_comp_channel(scene->context), give_channel));
    TRY(MAKE(scene, cq, soft_verbs.create_cq(scene->context, 2, scene, scene->channel, 0), give_cq));
    ex_attr.parent_domain = scene->domain;
    TRY(MAKE(scene, ex, verbs_create_cq_ex(scene->context, &ex_attr), give_cq));
    TRY(soft_verbs.resize_cq(scene->cq, 4 * DEPTH));
    TRY(soft_verbs.resize_cq(cq_of(scene->ex), 4 * DEPTH));
    TRY(verbs_modify_cq(scene->cq, &moderate));
    TRY(MAKE(scene, srq, soft_verbs.create_srq(scene->domain, &srq_attr), give_srq));
    xrc_attr.pd = scene->domain;
    xrc_attr.xrcd = scene->xrcd;
    xrc_attr.cq = scene->cq;
    TRY(MAKE(scene, xrc_srq, verbs_create_srq_ex(scene->context, &xrc_attr), give_srq));
    return verbs_get_srq_num(scene->xrc_srq, &scene->xrc_number);
}

static int make_queue_pairs(struct scene *scene)
{
    struct ibv_qp_init_attr attr = {
        .send_cq = cq_of(scene->ex), .recv_cq = cq_of(scene->ex), .cap = {DEPTH, DEPTH, 1, 1, 0}};
    struct ibv_qp_init_attr_ex target = {
        .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = scene->xrcd};
    struct ibv_qp_init_attr_ex sender = {.send_cq = scene->cq,
                                         .cap = {DEPTH, 0, 1, 0, 0},
                                         .qp_type = IBV_QPT_XRC_SEND,
                                         .comp_mask = IBV_QP_INIT_ATTR_PD,
                                         .pd = scene->domain};

    attr.qp_type = IBV_QPT_RC;
    TRY(MAKE(scene, qp, soft_verbs.create_qp(scene->domain, &attr), give_qp));
    attr.qp_type = IBV_QPT_UD;
    attr.srq = scene->srq;
    TRY(MAKE(scene, ud, soft_verbs.create_qp(scene->domain, &attr), give_qp));
    TRY(MAKE(scene, from, verbs_create_qp_ex(scene->context, &sender), give_qp));
    return MAKE(scene, to, verbs_create_qp_ex(scene->context, &target), give_qp);
}

static int raise(struct ibv_qp *qp, uint32_t dest)
{
    struct ibv_qp_attr attr = default_link;

    attr.port_num = 1;
    attr.qkey = TEST_QKEY;
    attr.dest_qp_num = dest;
    attr.ah_attr = own_path(qp->context);
    attr.qp_state = IBV_QPS_INIT;
    TRY(soft_verbs.modify_qp(qp, &attr, init_mask(qp->qp_type)));
    attr.qp_state = IBV_QPS_RTR;
    TRY(soft_verbs.modify_qp(qp, &attr, rtr_mask(qp->qp_type)));
    attr.qp_state = IBV_QPS_RTS;
    return soft_verbs.modify_qp(qp, &attr, rts_mask(qp->qp_type));
}

static int connect_all(struct scene *scene)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;

    TRY(raise(scene->qp, scene->qp->qp_num));
    TRY(raise(scene->ud, 0));
    TRY(raise(scene->from, scene->to->qp_num));
    TRY(raise(scene->to, scene->from->qp_num));
    TRY(soft_verbs.query_qp(scene->qp, &attr, IBV_QP_STATE, &init_attr));
    CHECK_EQ(attr.qp_state, IBV_QPS_RTS);
    return 0;
}

/* Wait without a verb, so that the same calls are made whenever completions come. */
static void wait_present(struct ibv_cq *ibv_cq, uint32_t count)
{
    const struct soft_cq *cq = to_soft_cq(ibv_cq);
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (atomic_load(&cq->producer) - atomic_load(cq->consumer) < count) {
        REQUIRE(now_ns() < end);
        sched_yield();
    }
}

/* Take `count` successful completions in one session. */
static int take_extended(struct scene *scene, uint32_t count)
{
    struct ibv_poll_cq_attr attr = {0};

    wait_present(cq_of(scene->ex), count);
    TRY(scene->ex->start_poll(scene->ex, &attr));
    for (;;) {
        CHECK_EQ(scene->ex->status, IBV_WC_SUCCESS);
        if (!--count)
            break;
        CHECK_EQ(scene->ex->next_poll(scene->ex), 0);
    }
    scene->ex->end_poll(scene->ex);
    return 0;
}

static int take_basic(struct scene *scene, int count)
{
    struct ibv_wc wcs[4];
    int answer, i;

    wait_present(scene->cq, (uint32_t)count);
    answer = verbs_poll_cq(scene->cq, count, wcs);
    if (answer < 0)
        return -answer;
    CHECK_EQ(answer, count);
    for (i = 0; i < answer; i++)
        CHECK_EQ(wcs[i].status, IBV_WC_SUCCESS);
    return 0;
}

static struct ibv_sge entry(struct scene *scene, size_t offset, uint32_t length)
{
    return (struct ibv_sge){(uintptr_t)scene->memory + offset, length, scene->mr->lkey};
}

/* A refused post reports its request. */
static int post_to(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad = NULL;
    int error = verbs_post_send(qp, wr, &bad);

    CHECK(!error || bad == wr);
    return error;
}

static int post_shared(struct scene *scene, struct ibv_srq *srq)
{
    struct ibv_sge sge = entry(scene, 0, 128);
    struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad = NULL;
    int error = verbs_post_srq_recv(srq, &wr, &bad);

    CHECK(!error || bad == &wr);
    return error;
}

static int send_to_itself(struct scene *scene)
{
    struct ibv_sge to = entry(scene, 0, 8), from = entry(scene, 200, 8);
    struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = &to, .num_sge = 1}, *bad = NULL;
    struct ibv_send_wr wr = request(IBV_WR_SEND, 2, &from, 1);
    int error = verbs_post_recv(scene->qp, &recv, &bad);

    CHECK(!error || bad == &recv);
    TRY(error);
    memcpy(scene->memory + 200, "to itself", 8);
    TRY(post_to(scene->qp, &wr));
    TRY(take_extended(scene, 2));
    CHECK(!memcmp(scene->memory, "to itself", 8));
    return 0;
}

static int bind(struct scene *scene)
{
    struct ibv_mw_bind_info info = {
        .mr = scene->mr, .addr = (uintptr_t)scene->memory, .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_READ};
    struct ibv_mw_bind first = {.wr_id = 3, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
    struct ibv_send_wr second = request(IBV_WR_BIND_MW, 4, NULL, 0), invalidate = request(IBV_WR_LOCAL_INV, 5, NULL, 0);
    uint32_t before = scene->window->rkey;
    int error = verbs_bind_mw(scene->qp, scene->window, &first);

    CHECK_EQ(scene->window->rkey == before, error != 0); /* a window that was not bound keeps its key */
    TRY(error);
    second.bind_mw.mw = scene->second_window;
    second.bind_mw.rkey = scene->second_window->rkey ^ 1;
    second.bind_mw.bind_info = info;
    TRY(post_to(scene->qp, &second));
    invalidate.invalidate_rkey = second.bind_mw.rkey;
    TRY(post_to(scene->qp, &invalidate));
    return take_extended(scene, 3);
}

static int send_datagram(struct scene *scene)
{
    struct ibv_srq_attr larger = {.max_wr = 4 * DEPTH}, limit = {.srq_limit = 1}, told;
    struct ibv_sge sge = entry(scene, 200, 8);
    struct ibv_send_wr wr = datagram(IBV_WR_SEND, 6, &sge, 1, scene->ah, scene->ud->qp_num);

    TRY(soft_verbs.modify_srq(scene->srq, &larger, IBV_SRQ_MAX_WR));
    TRY(soft_verbs.modify_srq(scene->srq, &limit, IBV_SRQ_LIMIT));
    TRY(soft_verbs.query_srq(scene->srq, &told));
    CHECK_EQ(told.max_wr, 4 * DEPTH);
    CHECK_EQ(told.srq_limit, 1);
    TRY(post_shared(scene, scene->srq));
    TRY(post_to(scene->ud, &wr));
    return take_extended(scene, 2);
}

/* Take the events of a reached limit and of a drained queue. */
static int take_async(struct scene *scene, enum ibv_event_type type, const void *element)
{
    struct ibv_async_event event;

    REQUIRE(wait_readable(scene->context->async_fd));
    TRY(negative(soft_verbs.get_async_event(scene->context, &event)));
    CHECK_EQ(event.event_type, type);
    CHECK((const void *)event.element.qp == element);
    soft_verbs.ack_async_event(&event);
    return 0;
}

static int hear(struct scene *scene)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};

    TRY(take_async(scene, IBV_EVENT_SRQ_LIMIT_REACHED, scene->srq));
    TRY(soft_verbs.modify_qp(scene->qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    return take_async(scene, IBV_EVENT_SQ_DRAINED, scene->qp);
}

static int send_by_xrc(struct scene *scene)
{
    struct ibv_sge sge = entry(scene, 200, 8);
    struct ibv_send_wr wr = request(IBV_WR_SEND, 7, &sge, 1);
    struct ibv_cq *told;
    void *context;

    TRY(post_shared(scene, scene->xrc_srq));
    TRY(verbs_req_notify_cq(scene->cq, 0));
    wr.qp_type.xrc.remote_srqn = scene->xrc_number;
    TRY(post_to(scene->from, &wr));
    REQUIRE(wait_readable(scene->channel->fd));
    TRY(negative(soft_verbs.get_cq_event(scene->channel, &told, &context)));
    CHECK(told == scene->cq && context == scene);
    soft_verbs.ack_cq_events(told, 1);
    return take_basic(scene, 2);
}

static int (*const steps[])(struct scene *) = {
    ask,  make_domains,  make_memory, make_queues, make_queue_pairs, connect_all, send_to_itself,
    bind, send_datagram, hear,        send_by_xrc,
};

int scene_run(struct scene *scene)
{
    int error = 0;
    size_t i;

    for (i = 0; i < COUNT_OF(steps) && !error; i++)
        error = steps[i](scene);
    return error;
}
