/* The device of this process, its contexts, and the two tables by which verbs reach it. */
#define _GNU_SOURCE
#include "soft.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SOFT_FIRST_QPN 0x10u /* 0 and 1 are the management queue pairs of the architecture */
#define SOFT_FIRST_MR 1u
#define SOFT_FIRST_SRQ 1u
#define SOFT_MAX_NUMBER (SOFT_CHUNKS * SOFT_CHUNK_SIZE)
#define SOFT_GUID 0x0241494fff564253ull /* locally administered */

/* Index 0 is the link-local address made from the GUID, index 1 an IPv4-mapped one (RoCE v2), as RoCE NICs have. */
const union ibv_gid soft_gids[SOFT_GIDS] = {
    {.raw = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0x41, 0x49, 0x4f, 0xff, 0x56, 0x42, 0x53}},
    {.raw = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1}},
};

bool soft_gid_is_local(const union ibv_gid *gid)
{
    unsigned int i;

    for (i = 0; i < SOFT_GIDS; i++)
        if (!memcmp(gid->raw, soft_gids[i].raw, sizeof(gid->raw)))
            return true;
    return false;
}

/* ---- The one device -------------------------------------------------------------------------------------- */

static struct soft_device *the_device; /* under device_lock; never freed, contexts and tables refer to it */
static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;

static void child_after_fork(void)
{
    /* Another thread may have held the lock at the moment of the fork: it is made anew, not released. */
    pthread_mutex_init(&device_lock, NULL);
    the_device = NULL;
    soft_sync_after_fork();
}

static void watch_forks(void)
{
    fork_error = pthread_atfork(NULL, NULL, child_after_fork);
}

int soft_watch_forks(void)
{
    pthread_once(&fork_once, watch_forks);
    return fork_error;
}

uint32_t soft_fork_count(void)
{
    return soft_generation;
}

static struct soft_device *device_get(void)
{
    struct soft_device *device;

    errno = soft_watch_forks();
    if (errno)
        return NULL;
    pthread_mutex_lock(&device_lock);
    device = the_device;
    if (!device) {
        device = calloc(1, sizeof(*device));
        if (device && (soft_table_init(&device->qps, SOFT_FIRST_QPN, SOFT_MAX_NUMBER) ||
                       soft_table_init(&device->keys, SOFT_FIRST_MR, SOFT_MAX_NUMBER) ||
                       soft_table_init(&device->srqs, SOFT_FIRST_SRQ, SOFT_MAX_NUMBER) ||
                       pthread_mutex_init(&device->lock, NULL))) {
            free(device);
            device = NULL;
        }
        if (device) {
            device->device.node_type = IBV_NODE_CA;
            device->device.transport_type = IBV_TRANSPORT_IB;
            strcpy(device->device.name, "soft0");
            strcpy(device->device.dev_name, "soft0");
            the_device = device;
        }
    }
    pthread_mutex_unlock(&device_lock);
    if (!device)
        errno = ENOMEM;
    return device;
}

/* ---- Queries --------------------------------------------------------------------------------------------- */

void soft_fill_device_attr(struct ibv_device_attr *attr)
{
    unsigned int i;

    memset(attr, 0, sizeof(*attr));
    strcpy(attr->fw_ver, "soft-1");
    for (i = 0; i < 8; i++) /* network byte order, whatever this machine's is */
        ((uint8_t *)&attr->node_guid)[i] = (uint8_t)(SOFT_GUID >> (56 - 8 * i));
    attr->sys_image_guid = attr->node_guid;
    attr->max_mr_size = UINT64_MAX;
    attr->page_size_cap = SOFT_PAGE;
    attr->max_qp = SOFT_MAX_NUMBER - SOFT_FIRST_QPN;
    attr->max_qp_wr = SOFT_MAX_QP_WR;
    attr->device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN;
    attr->max_sge = SOFT_MAX_SGE;
    attr->max_sge_rd = SOFT_MAX_SGE;
    attr->max_cq = INT32_MAX;
    attr->max_cqe = SOFT_MAX_CQE;
    attr->max_mr = SOFT_MAX_NUMBER - SOFT_FIRST_MR;
    attr->max_pd = INT32_MAX;
    attr->max_qp_rd_atom = SOFT_MAX_RD_ATOMIC;
    attr->max_qp_init_rd_atom = SOFT_MAX_RD_ATOMIC;
    attr->max_res_rd_atom = SOFT_MAX_RD_ATOMIC * attr->max_qp;
    attr->atomic_cap = IBV_ATOMIC_GLOB; /* they are the processor's own atomic instructions */
    attr->max_pkeys = 1;
    attr->phys_port_cnt = 1;
}

int soft_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    soft_fill_device_attr(attr);
    return 0;
}

int soft_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                         struct ibv_device_attr_ex *attr, size_t size)
{
    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if (input && input->comp_mask)
        return EINVAL;
    if (size < sizeof(attr->orig_attr))
        return EINVAL;
    memset(attr, 0, size);
    soft_fill_device_attr(&attr->orig_attr);
    return 0;
}

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
    memset(out, 0, size);
    memcpy(out, &attr, size < sizeof(attr) ? size : sizeof(attr));
    return 0;
}

/* As with libibverbs, the queries of tables answer -1 with errno. */
int soft_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    bool stale = soft_stale(to_soft_context(context));

    if (stale || port != 1 || index < 0 || index >= (int)SOFT_GIDS) {
        errno = stale ? ENODEV : EINVAL;
        return -1;
    }
    *gid = soft_gids[index];
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

/* ---- Contexts -------------------------------------------------------------------------------------------- */

struct ibv_context *soft_open(const struct soft_options *options)
{
    struct soft_device *device;
    struct soft_context *context;
    struct verbs_context *verbs;
    int error;

    if ((options->mode != SOFT_INLINE && options->mode != SOFT_ENGINE) ||
        (options->mode == SOFT_INLINE && options->delay_ns)) {
        errno = EINVAL;
        return NULL;
    }
    device = device_get();
    if (!device)
        return NULL;
    context = calloc(1, sizeof(*context));
    if (!context) {
        errno = ENOMEM;
        return NULL;
    }
    context->device = device;
    context->generation = soft_generation;
    context->mode = options->mode;
    atomic_init(&context->delay_ns, options->delay_ns);
    context->faults = soft_faults_new();
    error = context->faults ? soft_engine_init(context) : ENOMEM;
    if (error)
        goto free_context;

    verbs = &context->verbs;
    verbs->sz = sizeof(*verbs);
    soft_entry_fill(verbs);
    verbs->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    verbs->context.device = &device->device;
    verbs->context.cmd_fd = -1;
    verbs->context.num_comp_vectors = 1;
    error = soft_events_init(context);
    if (error)
        goto destroy_engine;
    error = pthread_mutex_init(&verbs->context.mutex, NULL);
    if (error)
        goto destroy_events;
    return &verbs->context;

destroy_events:
    soft_events_destroy(context);
destroy_engine:
    soft_engine_destroy(context);
free_context:
    soft_faults_free(context->faults);
    free(context);
    errno = error;
    return NULL;
}

int soft_close_device(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (soft_stale(context))
        return ENODEV;
    if (context->pds || context->parent_domains || context->thread_domains || context->xrcds || context->mrs ||
        context->mws || context->ahs || context->channels || context->cqs || context->srqs || context->qps)
        return EBUSY;
    soft_engine_destroy(context);
    soft_events_destroy(context);
    pthread_mutex_destroy(&ibv_context->mutex);
    soft_faults_free(context->faults);
    free(context);
    return 0;
}

bool soft_is_stale(const struct ibv_context *context)
{
    return soft_stale(to_soft_context(context));
}

void soft_count(struct ibv_context *ibv_context, struct soft_counts *counts)
{
    struct soft_context *context = to_soft_context(ibv_context);

    counts->pds = context->pds;
    counts->parent_domains = context->parent_domains;
    counts->thread_domains = context->thread_domains;
    counts->mrs = context->mrs;
    counts->xrcds = context->xrcds;
    counts->mws = context->mws;
    counts->ahs = context->ahs;
    counts->channels = context->channels;
    counts->cqs = context->cqs;
    counts->srqs = context->srqs;
    counts->qps = context->qps;
    counts->overlaps = context->overlaps;
}

int soft_set_delay(struct ibv_context *ibv_context, uint64_t delay_ns)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (context->mode != SOFT_ENGINE)
        return EINVAL;
    atomic_store(&context->delay_ns, delay_ns);
    return 0;
}

/* ---- To come ---- */

int soft_set_port(struct ibv_context *context, bool up)
{
    (void)context, (void)up;
    return EOPNOTSUPP;
}

int soft_lose(struct ibv_context *context)
{
    (void)context;
    return EOPNOTSUPP;
}
