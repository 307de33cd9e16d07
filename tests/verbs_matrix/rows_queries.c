/* The device, its port, and closing a context. */
#include "probe.h"

#include <fcntl.h>

ROW(close_device, "without objects")
{
    REPORT_INT(verbs->close_device(context));
}

ROW(close_device, "with a protection domain alive")
{
    domain();
    REPORT_INT(verbs->close_device(context));
}

ROW(query_device, "all attributes")
{
    struct ibv_device_attr attr;

    memset(&attr, 0, sizeof(attr));
    REPORT_INT(verbs->query_device(context, &attr));
    report("%u port", attr.phys_port_cnt);
    report("atomics %s", attr.atomic_cap == IBV_ATOMIC_HCA    ? "of the device"
                         : attr.atomic_cap == IBV_ATOMIC_GLOB ? "with the CPU"
                                                              : "none");
}

ROW(query_device, "capability flags")
{
    struct ibv_device_attr attr = device_attr();
    static const struct {
        unsigned int flag;
        const char *name;
    } flags[] = {
        {IBV_DEVICE_RESIZE_MAX_WR, "RESIZE_MAX_WR"},
        {IBV_DEVICE_CURR_QP_STATE_MOD, "CURR_QP_STATE_MOD"},
        {IBV_DEVICE_PORT_ACTIVE_EVENT, "PORT_ACTIVE"},
        {IBV_DEVICE_RC_RNR_NAK_GEN, "RC_RNR_NAK_GEN"},
        {IBV_DEVICE_SRQ_RESIZE, "SRQ_RESIZE"},
        {IBV_DEVICE_MEM_WINDOW, "MEM_WINDOW"},
        {IBV_DEVICE_XRC, "XRC"},
        {IBV_DEVICE_MEM_WINDOW_TYPE_2A, "TYPE_2A"},
        {IBV_DEVICE_MEM_WINDOW_TYPE_2B, "TYPE_2B"},
    };

    for (size_t i = 0; i < ROWS_OF(flags); i++) {
        if (attr.device_cap_flags & flags[i].flag)
            report("%s", flags[i].name);
    }
}

static void report_device_ex(uint32_t comp_mask, size_t size)
{
    struct ibv_query_device_ex_input input = {.comp_mask = comp_mask};
    struct ibv_device_attr_ex attr;

    memset(&attr, 0, sizeof(attr));
    if (!REPORT_INT(CALL_OP(EOPNOTSUPP, query_device_ex, context, &input, &attr, size)))
        report("ODP %s, timestamps %s, moderation %s", attr.odp_caps.general_caps ? "yes" : "no",
               attr.completion_timestamp_mask ? "yes" : "no", attr.cq_mod_caps.max_cq_count ? "yes" : "no");
}

ROW(query_device_ex, "all attributes")
{
    report_device_ex(0, sizeof(struct ibv_device_attr_ex));
}

ROW(query_device_ex, "an unknown bit in the input's comp_mask")
{
    report_device_ex(1u << 31, sizeof(struct ibv_device_attr_ex));
}

ROW(query_device_ex, "a buffer shorter than the original attributes")
{
    report_device_ex(0, 8);
}

static void report_port(uint8_t port)
{
    struct ibv_port_attr attr = {0};

    if (!REPORT_INT(verbs_query_port(context, port, &attr)))
        report("%s, MTU %u, %s", attr.state == IBV_PORT_ACTIVE ? "ACTIVE" : "not active", 128u << attr.active_mtu,
               attr.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "not Ethernet");
}

ROW(query_port, "port 1")
{
    report_port(1);
}

ROW(query_port, "port 0")
{
    report_port(0);
}

ROW(query_port, "a port beyond the last")
{
    report_port(2);
}

ROW(query_gid, "entry 1")
{
    union ibv_gid gid = {{0}};

    REPORT_INT(verbs->query_gid(context, 1, 1, &gid));
    report("%s", gid.raw[10] == 0xff && gid.raw[11] == 0xff ? "of an IPv4 address" : "of something else");
}

ROW(query_gid, "an index beyond the table")
{
    union ibv_gid gid;

    REPORT_INT(verbs->query_gid(context, 1, 100000, &gid));
}

ROW(query_gid, "a port beyond the last")
{
    union ibv_gid gid;

    REPORT_INT(verbs->query_gid(context, 2, 0, &gid));
}

ROW(query_pkey, "entry 0")
{
    __be16 pkey = 0;

    REPORT_INT(verbs->query_pkey(context, 1, 0, &pkey));
    report("%#x", pkey);
}

ROW(query_pkey, "an index beyond the table")
{
    __be16 pkey;

    REPORT_INT(verbs->query_pkey(context, 1, 100000, &pkey));
}

ROW(query_rt_values, "the raw clock")
{
    struct ibv_values_ex values = {.comp_mask = 1};

    REPORT_INT(CALL_OP(EOPNOTSUPP, query_rt_values, context, &values));
}

ROW(get_async_event, "when there is none, without blocking")
{
    struct ibv_async_event event;

    fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
    REPORT_INT(verbs->get_async_event(context, &event));
}
