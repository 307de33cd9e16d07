#include "support_verbs.h"

#include <fcntl.h>

#include "support.h"
#include "support_async.h"
#include "support_srq.h"

#define WORLD_KEY 0x1234567890abcdefull

static struct ibv_ah *make_ah(struct world *world)
{
    struct ibv_ah_attr path = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}};

    return soft_verbs.create_ah(world->home.base, &path);
}

static struct ibv_mr *make_mr(struct world *world)
{
    return soft_verbs.reg_mr(world->home.base, world->memory, sizeof(world->memory), ACCESS_ALL | IBV_ACCESS_MW_BIND);
}

static struct ibv_cq_ex *make_ex(struct world *world)
{
    struct ibv_cq_init_attr_ex attr = {.cqe = 8, .channel = world->channel};

    return verbs_create_cq_ex(world->home.context, &attr);
}

static struct ibv_qp_init_attr qp_attr(struct world *world)
{
    return (struct ibv_qp_init_attr){
        .send_cq = world->cq,
        .recv_cq = world->cq,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
}

static struct ibv_qp *make_plain_qp(struct world *world)
{
    struct ibv_qp_init_attr attr = qp_attr(world);

    return soft_verbs.create_qp(world->home.base, &attr);
}

static struct ibv_srq *make_plain_srq(struct world *world)
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 8, .max_sge = 1}};

    return soft_verbs.create_srq(world->home.base, &attr);
}

void world_open(struct world *world)
{
    struct ibv_td_init_attr td_attr = {0};
    int flags;

    memset(world, 0, sizeof(*world));
    home_open(&world->home);
    async_nonblocking(world->home.context);
    world->shared = soft_verbs.alloc_pd(world->home.context);
    REQUIRE(world->shared != NULL);
    REQUIRE_EQ(soft_alloc_shpd(world->shared, WORLD_KEY, &world->share), 0);
    world->td = verbs_alloc_td(world->home.context, &td_attr);
    world->xrcd = make_xrcd(world->home.context);
    world->channel = soft_verbs.create_comp_channel(world->home.context);
    REQUIRE(world->td && world->channel);
    flags = fcntl(world->channel->fd, F_GETFL);
    REQUIRE_EQ(fcntl(world->channel->fd, F_SETFL, flags | O_NONBLOCK), 0);
    world->cq = soft_verbs.create_cq(world->home.context, 64, NULL, world->channel, 0);
    world->ex = make_ex(world);
    REQUIRE(world->cq && world->ex);
    world->srq = make_plain_srq(world);
    world->xrc_srq = try_xrc_srq(&world->home, world->xrcd, world->cq, 8);
    world->qp = make_plain_qp(world);
    REQUIRE(world->srq && world->xrc_srq && world->qp);
    qp_connect(world->qp, &default_link, world->qp->qp_num);
    world->mr = make_mr(world);
    world->mw = verbs_alloc_mw(world->home.base, IBV_MW_TYPE_1);
    world->ah = make_ah(world);
    REQUIRE(world->mr && world->mw && world->ah);
}

void world_close(struct world *world)
{
    CHECK_EQ(soft_verbs.destroy_ah(world->ah), 0);
    CHECK_EQ(soft_verbs.destroy_qp(world->qp), 0);
    CHECK_EQ(verbs_dealloc_mw(world->mw), 0);
    CHECK_EQ(soft_verbs.dereg_mr(world->mr), 0);
    CHECK_EQ(soft_verbs.destroy_srq(world->srq), 0);
    CHECK_EQ(soft_verbs.destroy_srq(world->xrc_srq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(world->cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(world->ex)), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(world->channel), 0);
    CHECK_EQ(verbs_close_xrcd(world->xrcd), 0);
    CHECK_EQ(verbs_dealloc_td(world->td), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(world->shared), 0);
    home_close(&world->home);
}

bool verb_destroys(enum soft_verb verb)
{
    switch (verb) {
    case SOFT_VERB_close_device:
    case SOFT_VERB_dealloc_pd:
    case SOFT_VERB_dealloc_td:
    case SOFT_VERB_close_xrcd:
    case SOFT_VERB_dereg_mr:
    case SOFT_VERB_dealloc_mw:
    case SOFT_VERB_destroy_comp_channel:
    case SOFT_VERB_destroy_cq:
    case SOFT_VERB_destroy_srq:
    case SOFT_VERB_destroy_qp:
    case SOFT_VERB_destroy_ah:
        return true;
    default:
        return false;
    }
}

/* Return 0 if the verb created an object, else errno. */
#define MAKES(call, destroy)        \
    do {                            \
        errno = 0;                  \
        made = (call);              \
        if (!made)                  \
            return errno;           \
        CHECK_EQ(destroy(made), 0); \
        return 0;                   \
    } while (0)

static int destroy_ex(void *made)
{
    return soft_verbs.destroy_cq(cq_of(made));
}

static int make(struct world *world, enum soft_verb verb)
{
    struct ibv_context *context = world->home.context;
    struct ibv_parent_domain_init_attr parent_attr = {.pd = world->home.base};
    struct ibv_xrcd_init_attr xrcd_attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
    struct ibv_srq_init_attr_ex srq_attr = {.attr = {.max_wr = 4, .max_sge = 1},
                                            .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
                                                         IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
                                            .srq_type = IBV_SRQT_XRC,
                                            .pd = world->home.base,
                                            .xrcd = world->xrcd,
                                            .cq = world->cq};
    struct ibv_qp_init_attr_ex ex_attr = {.send_cq = world->cq,
                                          .recv_cq = world->cq,
                                          .qp_type = IBV_QPT_RC,
                                          .comp_mask = IBV_QP_INIT_ATTR_PD,
                                          .pd = world->home.base};
    struct ibv_td_init_attr td_attr = {0};
    void *made;

    switch (verb) {
    case SOFT_VERB_alloc_pd:
        MAKES(soft_verbs.alloc_pd(context), soft_verbs.dealloc_pd);
    case SOFT_VERB_alloc_td:
        MAKES(verbs_alloc_td(context, &td_attr), verbs_dealloc_td);
    case SOFT_VERB_alloc_parent_domain:
        MAKES(verbs_alloc_parent_domain(context, &parent_attr), soft_verbs.dealloc_pd);
    case SOFT_VERB_share_pd:
        MAKES(soft_share_pd(context, world->share, WORLD_KEY), soft_verbs.dealloc_pd);
    case SOFT_VERB_open_xrcd:
        MAKES(verbs_open_xrcd(context, &xrcd_attr), verbs_close_xrcd);
    case SOFT_VERB_reg_mr:
        MAKES(make_mr(world), soft_verbs.dereg_mr);
    case SOFT_VERB_alloc_mw:
        MAKES(verbs_alloc_mw(world->home.base, IBV_MW_TYPE_2), verbs_dealloc_mw);
    case SOFT_VERB_create_comp_channel:
        MAKES(soft_verbs.create_comp_channel(context), soft_verbs.destroy_comp_channel);
    case SOFT_VERB_create_cq:
        MAKES(soft_verbs.create_cq(context, 4, NULL, NULL, 0), soft_verbs.destroy_cq);
    case SOFT_VERB_create_cq_ex:
        MAKES(make_ex(world), destroy_ex);
    case SOFT_VERB_create_srq:
        MAKES(make_plain_srq(world), soft_verbs.destroy_srq);
    case SOFT_VERB_create_srq_ex:
        MAKES(verbs_create_srq_ex(context, &srq_attr), soft_verbs.destroy_srq);
    case SOFT_VERB_create_qp:
        MAKES(make_plain_qp(world), soft_verbs.destroy_qp);
    case SOFT_VERB_create_qp_ex:
        MAKES(verbs_create_qp_ex(context, &ex_attr), soft_verbs.destroy_qp);
    case SOFT_VERB_create_ah:
        MAKES(make_ah(world), soft_verbs.destroy_ah);
    default:
        return -1; /* the verb creates nothing */
    }
}

#define DESTROYS(create, destroy)       \
    do {                                \
        made = (create);                \
        REQUIRE(made != NULL);          \
        error = destroy(made);          \
        if (error)                      \
            CHECK_EQ(destroy(made), 0); \
        return error;                   \
    } while (0)

static int destroy(struct world *world, enum soft_verb verb)
{
    struct ibv_context *context = world->home.context;
    struct ibv_td_init_attr td_attr = {0};
    void *made;
    int error;

    switch (verb) {
    case SOFT_VERB_close_device:
        error = soft_verbs.close_device(context); /* in use: refused, whatever else is wrong */
        return error == EBUSY ? 0 : error;
    case SOFT_VERB_dealloc_pd:
        DESTROYS(soft_verbs.alloc_pd(context), soft_verbs.dealloc_pd);
    case SOFT_VERB_dealloc_td:
        DESTROYS(verbs_alloc_td(context, &td_attr), verbs_dealloc_td);
    case SOFT_VERB_close_xrcd:
        DESTROYS(make_xrcd(context), verbs_close_xrcd);
    case SOFT_VERB_dereg_mr:
        DESTROYS(make_mr(world), soft_verbs.dereg_mr);
    case SOFT_VERB_dealloc_mw:
        DESTROYS(verbs_alloc_mw(world->home.base, IBV_MW_TYPE_1), verbs_dealloc_mw);
    case SOFT_VERB_destroy_comp_channel:
        DESTROYS(soft_verbs.create_comp_channel(context), soft_verbs.destroy_comp_channel);
    case SOFT_VERB_destroy_cq:
        DESTROYS(soft_verbs.create_cq(context, 4, NULL, NULL, 0), soft_verbs.destroy_cq);
    case SOFT_VERB_destroy_srq:
        DESTROYS(make_plain_srq(world), soft_verbs.destroy_srq);
    case SOFT_VERB_destroy_qp:
        DESTROYS(make_plain_qp(world), soft_verbs.destroy_qp);
    default:
        DESTROYS(make_ah(world), soft_verbs.destroy_ah);
    }
}

/* Convert the result of queries of tables and of verbs that take events: -1; that no event is pending counts as
 * success. */
static int minus_one(int answer)
{
    if (answer != -1)
        return answer ? EPROTO : 0;
    return errno == EAGAIN ? 0 : errno;
}

static int alloc_shpd(struct world *world)
{
    struct ibv_pd *pd = soft_verbs.alloc_pd(world->home.context);
    uint32_t share;
    int error;

    REQUIRE(pd != NULL);
    error = soft_alloc_shpd(pd, 1, &share);
    CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
    return error;
}

static int query(struct world *world, enum soft_verb verb)
{
    struct ibv_context *context = world->home.context;
    struct verbs_context *verbs = verbs_context_of(context);
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    struct ibv_qp_init_attr init_attr;
    struct ibv_device_attr_ex ex;
    struct ibv_device_attr attr;
    struct ibv_srq_attr srq_attr;
    struct ibv_port_attr port;
    struct ibv_qp_attr qp;
    union ibv_gid gid;
    uint32_t number;
    __be16 pkey;

    switch (verb) {
    case SOFT_VERB_query_device:
        return soft_verbs.query_device(context, &attr);
    case SOFT_VERB_query_device_ex:
        return verbs->query_device_ex(context, NULL, &ex, sizeof(ex));
    case SOFT_VERB_query_port:
        return verbs_query_port(context, 1, &port);
    case SOFT_VERB_query_gid:
        return minus_one(soft_verbs.query_gid(context, 1, 0, &gid));
    case SOFT_VERB_query_pkey:
        return minus_one(soft_verbs.query_pkey(context, 1, 0, &pkey));
    case SOFT_VERB_query_rt_values:
        return verbs->query_rt_values(context, &values);
    case SOFT_VERB_query_srq:
        return soft_verbs.query_srq(world->srq, &srq_attr);
    case SOFT_VERB_get_srq_num:
        return verbs_get_srq_num(world->xrc_srq, &number);
    case SOFT_VERB_query_qp:
        return soft_verbs.query_qp(world->qp, &qp, IBV_QP_STATE, &init_attr);
    default:
        return -1; /* nothing is requested */
    }
}

/* Take completions that come meanwhile, so that the queues never fill. */
static int drained(struct world *world, int error)
{
    struct ibv_wc wc;

    if (!error)
        REQUIRE(wait_completion(world->cq, &wc));
    return error;
}

static int use(struct world *world, enum soft_verb verb)
{
    struct ibv_mw_bind bind = {.wr_id = 1, .send_flags = IBV_SEND_SIGNALED, .bind_info = {.mr = world->mr}};
    struct ibv_modify_cq_attr moderate = {IBV_CQ_ATTR_MODERATE, {0, 0}};
    struct ibv_srq_attr srq_attr = {.srq_limit = 1};
    struct ibv_qp_attr qp_attr = {.min_rnr_timer = 1};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 2, NULL, 0), *bad = NULL;
    struct ibv_recv_wr recv = {.wr_id = 3}, *bad_recv = NULL;
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_async_event event;
    struct ibv_wc completion;
    struct ibv_cq *cq;
    void *cq_context;
    int error;

    switch (verb) {
    case SOFT_VERB_get_async_event:
        return minus_one(soft_verbs.get_async_event(world->home.context, &event));
    case SOFT_VERB_get_cq_event:
        return minus_one(soft_verbs.get_cq_event(world->channel, &cq, &cq_context));
    case SOFT_VERB_alloc_shpd:
        return alloc_shpd(world);
    case SOFT_VERB_bind_mw:
        bind.bind_info.addr = (uintptr_t)world->memory;
        bind.bind_info.length = 8;
        return drained(world, verbs_bind_mw(world->qp, world->mw, &bind));
    case SOFT_VERB_resize_cq:
        return soft_verbs.resize_cq(world->cq, 64);
    case SOFT_VERB_modify_cq:
        return verbs_modify_cq(world->cq, &moderate);
    case SOFT_VERB_req_notify_cq:
        return verbs_req_notify_cq(cq_of(world->ex), 0);
    case SOFT_VERB_poll_cq:
        return -verbs_poll_cq(world->cq, 1, &completion); /* nothing is there */
    case SOFT_VERB_start_poll:
        error = world->ex->start_poll(world->ex, &poll_attr);
        return error == ENOENT ? 0 : error;
    case SOFT_VERB_modify_srq:
        return soft_verbs.modify_srq(world->srq, &srq_attr, IBV_SRQ_LIMIT);
    case SOFT_VERB_post_srq_recv:
        error = verbs_post_srq_recv(world->srq, &recv, &bad_recv);
        CHECK(!error || bad_recv == &recv);
        return error;
    case SOFT_VERB_modify_qp:
        return soft_verbs.modify_qp(world->qp, &qp_attr, IBV_QP_MIN_RNR_TIMER);
    case SOFT_VERB_post_send:
        error = verbs_post_send(world->qp, &wr, &bad);
        CHECK(!error || bad == &wr);
        return drained(world, error);
    case SOFT_VERB_post_recv:
        error = verbs_post_recv(world->qp, &recv, &bad_recv);
        CHECK(!error || bad_recv == &recv);
        return error;
    default:
        return -1; /* unknown verb: its caller expects something else */
    }
}

int call_verb(struct world *world, enum soft_verb verb)
{
    int error;

    if (verb_destroys(verb))
        return destroy(world, verb);
    error = make(world, verb);
    if (error == -1)
        error = query(world, verb);
    if (error == -1)
        error = use(world, verb);
    return error;
}
