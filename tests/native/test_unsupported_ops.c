/* Tests of ops that the device does not support: each exists and fails with EOPNOTSUPP, whatever its arguments. */
#include "support.h"

static void no_op_is_missing(void)
{
    struct verbs_context *verbs;
    struct home home;

    home_open(&home);
    verbs = verbs_context_of(home.context);
    REQUIRE(verbs != NULL);
    /* Applications do not compare ops with NULL; placeholders and ops of libibverbs itself are excluded. */
#define HAS(op) CHECK(VERBS_HAS_OP(verbs, op))
    HAS(query_port), HAS(alloc_parent_domain), HAS(dealloc_td), HAS(alloc_td), HAS(modify_cq), HAS(query_rt_values);
    HAS(create_cq_ex), HAS(query_device_ex), HAS(create_qp_ex), HAS(get_srq_num), HAS(create_srq_ex), HAS(open_xrcd);
    HAS(close_xrcd);
    HAS(advise_mr), HAS(alloc_null_mr), HAS(read_counters), HAS(attach_counters_point_flow), HAS(create_counters);
    HAS(destroy_counters), HAS(reg_dm_mr), HAS(alloc_dm), HAS(free_dm), HAS(modify_flow_action_esp);
    HAS(destroy_flow_action), HAS(create_flow_action_esp), HAS(modify_qp_rate_limit), HAS(post_srq_ops);
    HAS(destroy_rwq_ind_table), HAS(create_rwq_ind_table), HAS(destroy_wq), HAS(modify_wq), HAS(create_wq);
    HAS(ibv_destroy_flow), HAS(ibv_create_flow), HAS(open_qp);
    HAS(context.ops.alloc_mw), HAS(context.ops.bind_mw), HAS(context.ops.dealloc_mw), HAS(context.ops.poll_cq);
    HAS(context.ops.req_notify_cq), HAS(context.ops.post_srq_recv), HAS(context.ops.post_send);
    HAS(context.ops.post_recv);
#undef HAS
    home_close(&home);
}

/* Objects of these ops cannot be created, so no valid ones can be passed. */
static void every_unsupported_op_returns_eopnotsupp(void)
{
    struct ibv_ops_wr *no_ops = (struct ibv_ops_wr *)(void *)&no_ops, *bad = NULL;
    struct ibv_alloc_dm_attr dm_attr = {.length = 64};
    struct ibv_qp_rate_limit_attr rate_attr = {.rate_limit = 1};
    struct ibv_qp_open_attr open_attr = {0};
    const union ibv_gid group = {.raw = {0xff, 0x0e}};
    struct ibv_sge sge = {0};
    struct verbs_context *v;
    struct pair pair;

    PAIR_OPEN(&pair, .unconnected = true);
    v = verbs_context_of(pair.own.context);
    CHECK_EQ(v->advise_mr(pair.own.base, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EOPNOTSUPP);
    CHECK_REFUSED(v->alloc_null_mr(pair.own.base), EOPNOTSUPP);
    CHECK_REFUSED(v->create_counters(pair.own.context, NULL), EOPNOTSUPP);
    CHECK_EQ(v->destroy_counters(NULL), EOPNOTSUPP);
    CHECK_EQ(v->read_counters(NULL, NULL, 0, 0), EOPNOTSUPP);
    CHECK_EQ(v->attach_counters_point_flow(NULL, NULL, NULL), EOPNOTSUPP);
    CHECK_REFUSED(v->alloc_dm(pair.own.context, &dm_attr), EOPNOTSUPP);
    CHECK_EQ(v->free_dm(NULL), EOPNOTSUPP);
    CHECK_REFUSED(v->reg_dm_mr(pair.own.base, NULL, 0, 64, 0), EOPNOTSUPP);
    CHECK_REFUSED(v->ibv_create_flow(pair.a.qp, NULL), EOPNOTSUPP);
    CHECK_EQ(v->ibv_destroy_flow(NULL), EOPNOTSUPP);
    CHECK_REFUSED(v->create_flow_action_esp(pair.own.context, NULL), EOPNOTSUPP);
    CHECK_EQ(v->modify_flow_action_esp(NULL, NULL), EOPNOTSUPP);
    CHECK_EQ(v->destroy_flow_action(NULL), EOPNOTSUPP);
    CHECK_REFUSED(v->create_wq(pair.own.context, NULL), EOPNOTSUPP);
    CHECK_EQ(v->modify_wq(NULL, NULL), EOPNOTSUPP);
    CHECK_EQ(v->destroy_wq(NULL), EOPNOTSUPP);
    CHECK_REFUSED(v->create_rwq_ind_table(pair.own.context, NULL), EOPNOTSUPP);
    CHECK_EQ(v->destroy_rwq_ind_table(NULL), EOPNOTSUPP);
    CHECK_EQ(v->modify_qp_rate_limit(pair.a.qp, &rate_attr), EOPNOTSUPP);
    CHECK_REFUSED(v->open_qp(pair.own.context, &open_attr), EOPNOTSUPP);
    CHECK_EQ(v->post_srq_ops(NULL, no_ops, &bad), EOPNOTSUPP);
    CHECK(bad == no_ops);
    CHECK_REFUSED(soft_verbs.import_device(-1), EOPNOTSUPP);
    CHECK_REFUSED(soft_verbs.import_pd(pair.own.context, pair.own.base->handle), EOPNOTSUPP);
    soft_verbs.unimport_pd(pair.own.base); /* as libibverbs' own: nothing happens */
    CHECK_EQ(soft_verbs.attach_mcast(pair.a.qp, &group, 0), EOPNOTSUPP);
    CHECK_EQ(soft_verbs.detach_mcast(pair.a.qp, &group, 0), EOPNOTSUPP);
    pair_close(&pair);
}

/* Features that flags request: on-demand paging, and features of extended objects. */
static void optional_features(void)
{
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 4, .wc_flags = IBV_WC_EX_WITH_CVLAN};
    struct ibv_qp_init_attr_ex qp_attr = {.qp_type = IBV_QPT_RC};
    struct ibv_device_attr_ex attr;
    struct verbs_context *verbs;
    struct pair pair;
    char memory[8];

    PAIR_OPEN(&pair, .unconnected = true);
    verbs = verbs_context_of(pair.own.context);
    CHECK_REFUSED(soft_verbs.reg_mr(pair.own.base, memory, sizeof(memory), IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
    CHECK_REFUSED(verbs->create_cq_ex(pair.own.context, &cq_attr), EOPNOTSUPP);
    qp_attr.pd = pair.own.pd;
    qp_attr.send_cq = qp_attr.recv_cq = pair.a.send_cq;
    qp_attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    CHECK_REFUSED(verbs->create_qp_ex(pair.own.context, &qp_attr), EOPNOTSUPP);
    CHECK_EQ(verbs->query_device_ex(pair.own.context, NULL, &attr, sizeof(attr)), 0);
    CHECK_EQ(attr.odp_caps.general_caps, 0);
    CHECK_EQ(attr.max_dm_size, 0);
    CHECK_EQ(attr.max_wq_type_rq, 0);
    CHECK_EQ(attr.tm_caps.max_num_tags, 0);
    CHECK_EQ(attr.orig_attr.max_mcast_grp, 0);
    CHECK_EQ(attr.orig_attr.device_cap_flags & IBV_DEVICE_MANAGED_FLOW_STEERING, 0);
    pair_close(&pair);
}

/* Supported features are reported, too. */
static void supported_ops(void)
{
    const unsigned int flags = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_XRC |
                               IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    struct ibv_device_attr_ex attr;
    struct verbs_context *verbs;
    struct home home;

    home_open(&home);
    verbs = verbs_context_of(home.context);
    CHECK_EQ(verbs->query_device_ex(home.context, NULL, &attr, sizeof(attr)), 0);
    CHECK_EQ(attr.orig_attr.device_cap_flags & flags, flags);
    CHECK_EQ(attr.device_cap_flags_ex, attr.orig_attr.device_cap_flags);
    CHECK_EQ(attr.completion_timestamp_mask, UINT64_MAX);
    CHECK_EQ(attr.hca_core_clock, 1000000);
    CHECK_EQ(attr.cq_mod_caps.max_cq_count, UINT16_MAX);
    CHECK_EQ(attr.cq_mod_caps.max_cq_period, UINT16_MAX);
    CHECK_EQ(attr.phys_port_cnt_ex, 1);
    home_close(&home);
}

static void the_clock(void)
{
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK, .raw_clock = {.tv_sec = 7}};
    uint64_t before = now_ns(), told;
    struct verbs_context *verbs;
    struct home home;

    home_open(&home);
    verbs = verbs_context_of(home.context);
    CHECK_EQ(verbs->query_rt_values(home.context, &values), 0);
    told = (uint64_t)values.raw_clock.tv_nsec;
    CHECK_EQ(values.raw_clock.tv_sec, 0);
    CHECK(before <= told && told <= now_ns());
    CHECK_EQ(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
    values = (struct ibv_values_ex){.raw_clock = {.tv_nsec = 7}};
    CHECK_EQ(verbs->query_rt_values(home.context, &values), 0);
    CHECK_EQ(values.raw_clock.tv_nsec, 7);
    values.comp_mask = IBV_VALUES_MASK_RESERVED;
    CHECK_EQ(verbs->query_rt_values(home.context, &values), EINVAL);
    home_close(&home);
}

CHECK_MAIN(CASE(no_op_is_missing), CASE(every_unsupported_op_returns_eopnotsupp), CASE(optional_features),
           CASE(supported_ops), CASE(the_clock))
