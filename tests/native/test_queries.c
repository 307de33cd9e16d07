/* Tests of queries of the device, and of verbs that it does not have. */
#include "support.h"

static void opening(void)
{
    static const struct soft_options delayed_inline = {.mode = SOFT_INLINE, .delay_ns = 1};
    static const struct soft_options unknown = {.mode = (enum soft_mode)7};
    struct ibv_context *context;
    struct verbs_context *verbs;

    CHECK_REFUSED(soft_open(&delayed_inline), EINVAL);
    CHECK_REFUSED(soft_open(&unknown), EINVAL);
    context = soft_open(&variant->options);
    REQUIRE(context != NULL);
    verbs = verbs_context_of(context);
    REQUIRE(verbs != NULL);
    CHECK_EQ(verbs->sz, sizeof(*verbs));
    CHECK(!strcmp(context->device->name, "soft0"));
    CHECK_EQ(context->device->node_type, IBV_NODE_CA);
    CHECK_EQ(context->device->transport_type, IBV_TRANSPORT_IB);
    CHECK_EQ(context->cmd_fd, -1);
    CHECK(context->num_comp_vectors >= 1);
    CHECK(!is_readable(context->async_fd));
    CHECK(!soft_is_stale(context));
    CHECK_EQ(soft_verbs.close_device(context), 0);
}

static void delay(void)
{
    struct home home;

    home_open(&home);
    CHECK_EQ(soft_set_delay(home.context, 5), variant->options.mode == SOFT_THREAD ? 0 : EINVAL);
    home_close(&home);
}

static void counts(void)
{
    struct soft_counts counts;
    struct pair pair;

    PAIR_OPEN(&pair, .unconnected = true);
    soft_get_counts(pair.own.context, &counts);
    CHECK_EQ(counts.pds, 1);
    CHECK_EQ(counts.parent_domains, variant->thread_domain);
    CHECK_EQ(counts.thread_domains, variant->thread_domain);
    CHECK_EQ(counts.mrs, 2);
    CHECK_EQ(counts.channels, 0);
    CHECK_EQ(counts.cqs, 4);
    CHECK_EQ(counts.qps, 2);
    CHECK_EQ(counts.overlaps, 0);
    pair_close(&pair);
}

static void device(void)
{
    struct ibv_query_device_ex_input input = {.comp_mask = 1};
    struct verbs_context *verbs;
    struct ibv_device_attr_ex ex;
    struct ibv_device_attr attr;
    struct home home;

    home_open(&home);
    verbs = verbs_context_of(home.context);
    memset(&attr, 0xff, sizeof(attr));
    CHECK_EQ(soft_verbs.query_device(home.context, &attr), 0);
    CHECK(memchr(attr.fw_ver, 0, sizeof(attr.fw_ver)) != NULL);
    CHECK(attr.node_guid != 0);
    CHECK_EQ(attr.phys_port_cnt, 1);
    CHECK_EQ(attr.max_pkeys, 1);
    CHECK(attr.max_qp >= 10000 && attr.max_cq > 0 && attr.max_pd > 0 && attr.max_mr > 0);
    CHECK(attr.max_qp_wr > 0 && attr.max_cqe > 0 && attr.max_sge > 0);
    CHECK(attr.max_qp_rd_atom > 0 && attr.max_qp_init_rd_atom > 0);
    CHECK_EQ(attr.atomic_cap, IBV_ATOMIC_GLOB);
    CHECK(attr.max_srq > 0 && attr.max_srq_wr > 0 && attr.max_srq_sge > 0);
    CHECK(attr.max_mw > 0);
    CHECK(attr.max_ah > 0);

    memset(&ex, 0xff, sizeof(ex));
    CHECK_EQ(verbs->query_device_ex(home.context, NULL, &ex, sizeof(ex)), 0);
    CHECK(!memcmp(&ex.orig_attr, &attr, sizeof(attr)));
    CHECK_EQ(ex.odp_caps.general_caps, 0);
    CHECK_EQ(ex.xrc_odp_caps, 0);
    CHECK_EQ(verbs->query_device_ex(home.context, &input, &ex, sizeof(ex)), EINVAL);
    CHECK_EQ(verbs->query_device_ex(home.context, NULL, &ex, sizeof(attr) - 1), EINVAL);

    memset(&ex, 0xff, sizeof(ex)); /* an older caller's struct is shorter */
    CHECK_EQ(verbs->query_device_ex(home.context, NULL, &ex, sizeof(attr)), 0);
    CHECK_EQ(ex.comp_mask, UINT32_MAX);
    home_close(&home);
}

static void limits_hold(void)
{
    struct ibv_device_attr attr;
    struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC};
    struct ibv_qp *qp;
    struct home home;

    home_open(&home);
    CHECK_EQ(soft_verbs.query_device(home.context, &attr), 0);
    init.send_cq = init.recv_cq = home_cq(&home, 16, NULL);
    init.cap = (struct ibv_qp_cap){
        .max_send_wr = (uint32_t)attr.max_qp_wr,
        .max_recv_wr = (uint32_t)attr.max_qp_wr,
        .max_send_sge = (uint32_t)attr.max_sge,
        .max_recv_sge = (uint32_t)attr.max_sge,
    };
    qp = soft_verbs.create_qp(home.pd, &init);
    REQUIRE(qp != NULL);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(init.send_cq), 0);
    CHECK_REFUSED(soft_verbs.create_cq(home.context, attr.max_cqe + 1, NULL, NULL, 0), EINVAL);
    home_close(&home);
}

static void port(void)
{
    struct verbs_context *verbs;
    struct ibv_port_attr attr, part;
    struct home home;

    home_open(&home);
    verbs = verbs_context_of(home.context);
    memset(&attr, 0xff, sizeof(attr));
    CHECK_EQ(verbs_query_port(home.context, 1, &attr), 0);
    CHECK_EQ(attr.state, IBV_PORT_ACTIVE);
    CHECK_EQ(attr.link_layer, IBV_LINK_LAYER_ETHERNET);
    CHECK_EQ(attr.flags, IBV_QPF_GRH_REQUIRED);
    CHECK_EQ(attr.active_mtu, IBV_MTU_4096);
    CHECK_EQ(attr.gid_tbl_len, 2);
    CHECK_EQ(attr.pkey_tbl_len, 1);
    CHECK_EQ(attr.lid, 0);
    CHECK(attr.max_msg_sz >= 1u << 30);
    CHECK_EQ(verbs_query_port(home.context, 0, &attr), EINVAL);
    CHECK_EQ(verbs_query_port(home.context, 2, &attr), EINVAL);

    memset(&part, 0xff, sizeof(part));
    CHECK_EQ(verbs->query_port(home.context, 1, &part, offsetof(struct ibv_port_attr, flags)), 0);
    CHECK_EQ(part.state, IBV_PORT_ACTIVE);
    CHECK_EQ(part.flags, 0xff);
    home_close(&home);
}

static void tables(void)
{
    struct ibv_device_attr attr;
    union ibv_gid gid, other;
    struct home home;
    __be16 pkey = 0;
    int i;

    home_open(&home);
    CHECK_EQ(soft_verbs.query_gid(home.context, 1, 0, &gid), 0);
    CHECK_EQ(gid.raw[0], 0xfe);
    CHECK_EQ(gid.raw[1], 0x80);
    CHECK_EQ(soft_verbs.query_device(home.context, &attr), 0);
    CHECK(!memcmp(gid.raw + 8, &attr.node_guid, sizeof(attr.node_guid)));
    CHECK_EQ(soft_verbs.query_gid(home.context, 1, 1, &other), 0);
    CHECK(memcmp(&gid, &other, sizeof(gid)));
    CHECK_EQ(other.raw[10], 0xff); /* RoCE v2: an IPv4 address in an IPv6 one */
    for (i = -1; i < 4; i++) {
        errno = 0;
        CHECK_EQ(soft_verbs.query_gid(home.context, 1, i, &gid), i == 0 || i == 1 ? 0 : -1);
        CHECK_EQ(errno, i == 0 || i == 1 ? 0 : EINVAL);
    }
    CHECK_EQ(soft_verbs.query_gid(home.context, 2, 0, &gid), -1);
    CHECK_EQ(soft_verbs.query_pkey(home.context, 1, 0, &pkey), 0);
    CHECK_EQ(pkey, 0xffff);
    errno = 0;
    CHECK_EQ(soft_verbs.query_pkey(home.context, 1, 1, &pkey), -1);
    CHECK_EQ(errno, EINVAL);
    CHECK_EQ(soft_verbs.query_pkey(home.context, 0, 0, &pkey), -1);
    home_close(&home);
}

/* A context with fewer ops than this library's: its `sz` decides, not the memory before it. */
static void short_context(void)
{
    struct ibv_td_init_attr td_attr = {0};
    struct verbs_context *verbs;
    struct ibv_port_attr port_attr;
    struct home home;
    size_t size;

    home_open(&home);
    verbs = verbs_context_of(home.context);
    size = verbs->sz;
    verbs->sz = VERBS_OP_DISTANCE(create_cq_ex);
    CHECK_EQ(verbs_query_port(home.context, 1, &port_attr), EOPNOTSUPP);
    CHECK_REFUSED(verbs_alloc_td(home.context, &td_attr), EOPNOTSUPP);
    verbs->sz = size;
    home.context->abi_compat = NULL; /* not extended at all */
    CHECK_EQ(verbs_query_port(home.context, 1, &port_attr), EOPNOTSUPP);
    home.context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    CHECK_EQ(verbs_query_port(home.context, 1, &port_attr), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(opening), CASE(delay), CASE(counts), CASE(device), CASE(limits_hold), CASE(port), CASE(tables),
           CASE(short_context))
