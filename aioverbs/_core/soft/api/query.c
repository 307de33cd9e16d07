/* Queries of the device: attributes, port, GIDs, P_Keys, clock. */
#define _GNU_SOURCE
#include "soft/api/query.h"

#include <string.h>

#include "soft/base/epoch.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"

#define SOFT_CLOCK_KHZ 1000000u /* timestamps are nanoseconds of CLOCK_MONOTONIC */

/* ---- The device ------------------------------------------------------------------------------------------ */

/* To users of verbs, MEM_MGT_EXTENSIONS means that keys can be invalidated, locally and by a peer's message. Windows of
 * type 2 belong to a queue pair and to its protection domain, which is type 2B. */
#define SOFT_CAPABILITIES                                                                                        \
    (IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID |                   \
     IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B | \
     IBV_DEVICE_MEM_MGT_EXTENSIONS | IBV_DEVICE_XRC)

static void fill_attr(const struct soft_device *device, struct ibv_device_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    strcpy(attr->fw_ver, "soft-1");
    memcpy(&attr->node_guid, device->gids[0].raw + 8, sizeof(attr->node_guid)); /* both are in network byte order */
    attr->sys_image_guid = attr->node_guid;
    attr->max_mr_size = UINT64_MAX;
    attr->page_size_cap = soft_page();
    attr->max_qp = SOFT_MAX_NUMBER - SOFT_FIRST_QPN;
    attr->max_qp_wr = SOFT_MAX_QP_WR;
    attr->device_cap_flags = SOFT_CAPABILITIES;
    attr->max_sge = SOFT_MAX_SGE;
    attr->max_sge_rd = SOFT_MAX_SGE;
    attr->max_cq = INT32_MAX;
    attr->max_cqe = SOFT_MAX_CQE;
    attr->max_mr = SOFT_MAX_NUMBER - SOFT_FIRST_MR;
    attr->max_pd = INT32_MAX;
    attr->max_qp_rd_atom = SOFT_MAX_RD_ATOMIC;
    attr->max_qp_init_rd_atom = SOFT_MAX_RD_ATOMIC;
    attr->max_res_rd_atom = SOFT_MAX_RD_ATOMIC * attr->max_qp;
    attr->atomic_cap = IBV_ATOMIC_GLOB; /* executed by atomic instructions of the processor */
    /* the limit applies to regions and windows together, since they share the key numbers */
    attr->max_mw = attr->max_mr;
    attr->max_ah = INT32_MAX;
    attr->max_srq = SOFT_MAX_NUMBER - SOFT_FIRST_SRQ;
    attr->max_srq_wr = SOFT_MAX_SRQ_WR;
    attr->max_srq_sge = SOFT_MAX_SGE;
    attr->max_pkeys = 1;
    attr->phys_port_cnt = 1;
}

int soft_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    fill_attr(to_soft_context(context)->device, attr);
    return 0;
}

/* Members of the extended attributes that stay 0 belong to features that the device does not have. */
int soft_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                         struct ibv_device_attr_ex *out, size_t size)
{
    struct ibv_device_attr_ex attr = {
        .completion_timestamp_mask = UINT64_MAX,
        .hca_core_clock = SOFT_CLOCK_KHZ,
        .device_cap_flags_ex = SOFT_CAPABILITIES,
        .cq_mod_caps = {.max_cq_count = UINT16_MAX, .max_cq_period = UINT16_MAX},
        .phys_port_cnt_ex = 1,
    };

    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if (input && input->comp_mask)
        return EINVAL;
    if (size < sizeof(attr.orig_attr))
        return EINVAL;
    fill_attr(to_soft_context(context)->device, &attr.orig_attr);
    memset(out, 0, size);
    memcpy(out, &attr, size < sizeof(attr) ? size : sizeof(attr));
    return 0;
}

/* As with mlx5, `tv_nsec` has the whole value of the clock, however many seconds that is. */
int soft_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if (values->comp_mask & ~(uint32_t)IBV_VALUES_MASK_RAW_CLOCK)
        return EINVAL;
    if (values->comp_mask & IBV_VALUES_MASK_RAW_CLOCK)
        values->raw_clock = (struct timespec){.tv_nsec = (long)soft_now_ns()};
    return 0;
}

/* ---- The port and its tables ----------------------------------------------------------------------------- */

int soft_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out, size_t size)
{
    struct ibv_port_attr attr = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = SOFT_GIDS,
        .port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
        .max_msg_sz = SOFT_MAX_MESSAGE,
        .pkey_tbl_len = 1,
        .max_vl_num = 1,
        .active_width = 2,  /* 4x */
        .active_speed = 32, /* EDR */
        .phys_state = 5,    /* link up */
        .link_layer = IBV_LINK_LAYER_ETHERNET,
        .flags = IBV_QPF_GRH_REQUIRED,
    };

    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if (port != 1)
        return EINVAL;
    if (atomic_load(&to_soft_context(context)->device->port_down)) {
        attr.state = IBV_PORT_DOWN;
        attr.phys_state = 3; /* disabled */
    }
    memset(out, 0, size);
    memcpy(out, &attr, size < sizeof(attr) ? size : sizeof(attr));
    return 0;
}

/* As with libibverbs, queries of the tables return -1 and errno. */
int soft_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    bool stale = soft_stale(to_soft_context(context));

    if (stale || port != 1 || index < 0 || index >= (int)SOFT_GIDS) {
        errno = stale ? ENODEV : EINVAL;
        return -1;
    }
    *gid = to_soft_context(context)->device->gids[index];
    return 0;
}

int soft_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
    bool stale = soft_stale(to_soft_context(context));

    if (stale || port != 1 || index != 0) {
        errno = stale ? ENODEV : EINVAL;
        return -1;
    }
    memset(pkey, 0xff, sizeof(*pkey)); /* the default partition, full membership */
    return 0;
}
