/* Wrappers of the verbs, and the two tables of verbs with them. Each wrapper checks whether the call fails before it
 * does anything, because the device is lost or by the fault plan; on the usual path that is one relaxed load. The
 * device itself calls the verbs without their wrappers. */
#include "soft/api/ops.h"

#include "soft/api/device.h"
#include "soft/api/post.h"
#include "soft/api/qp.h"
#include "soft/api/query.h"
#include "soft/api/unsupported.h"
#include "soft/fault/injection.h"
#include "soft/objects/ah.h"
#include "soft/objects/async_event.h"
#include "soft/objects/comp_channel.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_poll.h"
#include "soft/objects/cq_push.h"
#include "soft/objects/mr.h"
#include "soft/objects/mw.h"
#include "soft/objects/pd.h"
#include "soft/objects/srq.h"
#include "soft/objects/verbs.h"
#include "soft/objects/xrcd.h"

/* WRAPPER(result, failed, name, context, (arguments), parameters...): wrap a verb; `failed` is the value to return
 * where the call fails with `error`. The macros below cover the usual conventions. The check is a function of its own,
 * so that the usual path saves no registers and ends in a jump. */
#define WRAPPER(result, failed, name, from, arguments, ...)                              \
    __attribute__((noinline, cold)) static result check_##name(__VA_ARGS__)              \
    {                                                                                    \
        int error = soft_fault_verb_error(to_soft_context(from), SOFT_VERB_##name);      \
                                                                                         \
        return error ? (failed) : soft_##name arguments;                                 \
    }                                                                                    \
    static result wrap_##name(__VA_ARGS__)                                               \
    {                                                                                    \
        if (atomic_load_explicit(&to_soft_context(from)->special, memory_order_relaxed)) \
            return check_##name arguments;                                               \
        return soft_##name arguments;                                                    \
    }
#define RETURNS_ERRNO(name, from, arguments, ...) WRAPPER(int, error, name, from, arguments, __VA_ARGS__)
#define RETURNS_MINUS_ONE(name, from, arguments, ...) \
    WRAPPER(int, (errno = error, -1), name, from, arguments, __VA_ARGS__)
#define RETURNS_BAD(name, from, arguments, ...) WRAPPER(int, (*bad = wr, error), name, from, arguments, __VA_ARGS__)
#define RETURNS_OBJECT(type, name, from, arguments, ...) \
    WRAPPER(struct type *, (errno = error, NULL), name, from, arguments, __VA_ARGS__)

/* ---- The device ------------------------------------------------------------------------------------------ */

RETURNS_ERRNO(close_device, context, (context), struct ibv_context *context)
RETURNS_ERRNO(query_device, context, (context, attr), struct ibv_context *context, struct ibv_device_attr *attr)
RETURNS_ERRNO(query_device_ex, context, (context, input, attr, size), struct ibv_context *context,
              const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr, size_t size)
RETURNS_ERRNO(query_port, context, (context, port, attr, size), struct ibv_context *context, uint8_t port,
              struct ibv_port_attr *attr, size_t size)
RETURNS_MINUS_ONE(query_gid, context, (context, port, index, gid), struct ibv_context *context, uint8_t port, int index,
                  union ibv_gid *gid)
RETURNS_MINUS_ONE(query_pkey, context, (context, port, index, pkey), struct ibv_context *context, uint8_t port,
                  int index, __be16 *pkey)
RETURNS_ERRNO(query_rt_values, context, (context, values), struct ibv_context *context, struct ibv_values_ex *values)
RETURNS_MINUS_ONE(get_async_event, context, (context, event), struct ibv_context *context,
                  struct ibv_async_event *event)

/* ---- Domains --------------------------------------------------------------------------------------------- */

RETURNS_OBJECT(ibv_pd, alloc_pd, context, (context), struct ibv_context *context)
RETURNS_ERRNO(dealloc_pd, pd->context, (pd), struct ibv_pd *pd)
RETURNS_OBJECT(ibv_td, alloc_td, context, (context, attr), struct ibv_context *context, struct ibv_td_init_attr *attr)
RETURNS_ERRNO(dealloc_td, td->context, (td), struct ibv_td *td)
RETURNS_OBJECT(ibv_pd, alloc_parent_domain, context, (context, attr), struct ibv_context *context,
               struct ibv_parent_domain_init_attr *attr)
RETURNS_OBJECT(ibv_xrcd, open_xrcd, context, (context, attr), struct ibv_context *context,
               struct ibv_xrcd_init_attr *attr)
RETURNS_ERRNO(close_xrcd, xrcd->context, (xrcd), struct ibv_xrcd *xrcd)

/* ---- Memory ---------------------------------------------------------------------------------------------- */

RETURNS_OBJECT(ibv_mr, reg_mr, pd->context, (pd, address, length, access), struct ibv_pd *pd, void *address,
               size_t length, int access)
RETURNS_ERRNO(dereg_mr, mr->context, (mr), struct ibv_mr *mr)
RETURNS_OBJECT(ibv_mw, alloc_mw, pd->context, (pd, type), struct ibv_pd *pd, enum ibv_mw_type type)
RETURNS_ERRNO(bind_mw, qp->context, (qp, mw, bind), struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
RETURNS_ERRNO(dealloc_mw, mw->context, (mw), struct ibv_mw *mw)

/* ---- Completion channels and queues ---------------------------------------------------------------------- */

RETURNS_OBJECT(ibv_comp_channel, create_comp_channel, context, (context), struct ibv_context *context)
RETURNS_ERRNO(destroy_comp_channel, channel->context, (channel), struct ibv_comp_channel *channel)
RETURNS_MINUS_ONE(get_cq_event, channel->context, (channel, cq, cq_context), struct ibv_comp_channel *channel,
                  struct ibv_cq **cq, void **cq_context)
RETURNS_OBJECT(ibv_cq, create_cq, context, (context, cqe, cq_context, channel, comp_vector),
               struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
               int comp_vector)
RETURNS_OBJECT(ibv_cq_ex, create_cq_ex, context, (context, attr), struct ibv_context *context,
               struct ibv_cq_init_attr_ex *attr)
RETURNS_ERRNO(resize_cq, cq->context, (cq, cqe), struct ibv_cq *cq, int cqe)
RETURNS_ERRNO(modify_cq, cq->context, (cq, attr), struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
RETURNS_ERRNO(destroy_cq, cq->context, (cq), struct ibv_cq *cq)
RETURNS_ERRNO(req_notify_cq, cq->context, (cq, solicited_only), struct ibv_cq *cq, int solicited_only)
WRAPPER(int, -error, poll_cq, cq->context, (cq, count, wc), struct ibv_cq *cq, int count, struct ibv_wc *wc)

/* ---- Shared receive queues ------------------------------------------------------------------------------- */

RETURNS_OBJECT(ibv_srq, create_srq, pd->context, (pd, attr), struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
RETURNS_OBJECT(ibv_srq, create_srq_ex, context, (context, attr), struct ibv_context *context,
               struct ibv_srq_init_attr_ex *attr)
RETURNS_ERRNO(modify_srq, srq->context, (srq, attr, mask), struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
RETURNS_ERRNO(query_srq, srq->context, (srq, attr), struct ibv_srq *srq, struct ibv_srq_attr *attr)
RETURNS_ERRNO(get_srq_num, srq->context, (srq, number), struct ibv_srq *srq, uint32_t *number)
RETURNS_ERRNO(destroy_srq, srq->context, (srq), struct ibv_srq *srq)
RETURNS_BAD(post_srq_recv, srq->context, (srq, wr, bad), struct ibv_srq *srq, struct ibv_recv_wr *wr,
            struct ibv_recv_wr **bad)

/* ---- Queue pairs and address handles ---------------------------------------------------------------------- */

RETURNS_OBJECT(ibv_qp, create_qp, pd->context, (pd, attr), struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
RETURNS_OBJECT(ibv_qp, create_qp_ex, context, (context, attr), struct ibv_context *context,
               struct ibv_qp_init_attr_ex *attr)
RETURNS_ERRNO(query_qp, qp->context, (qp, attr, mask, init_attr), struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
              struct ibv_qp_init_attr *init_attr)
RETURNS_ERRNO(modify_qp, qp->context, (qp, attr, mask), struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
RETURNS_ERRNO(destroy_qp, qp->context, (qp), struct ibv_qp *qp)
RETURNS_BAD(post_send, qp->context, (qp, wr, bad), struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
RETURNS_BAD(post_recv, qp->context, (qp, wr, bad), struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
RETURNS_OBJECT(ibv_ah, create_ah, pd->context, (pd, attr), struct ibv_pd *pd, struct ibv_ah_attr *attr)
RETURNS_ERRNO(destroy_ah, ah->context, (ah), struct ibv_ah *ah)

/* ---- The tables ------------------------------------------------------------------------------------------ */

void soft_ops_fill(struct verbs_context *verbs)
{
    soft_unsupported_fill(verbs);
    verbs->query_port = wrap_query_port;
    verbs->query_device_ex = wrap_query_device_ex;
    verbs->query_rt_values = wrap_query_rt_values;
    verbs->alloc_td = wrap_alloc_td;
    verbs->dealloc_td = wrap_dealloc_td;
    verbs->alloc_parent_domain = wrap_alloc_parent_domain;
    verbs->open_xrcd = wrap_open_xrcd;
    verbs->close_xrcd = wrap_close_xrcd;
    verbs->create_cq_ex = wrap_create_cq_ex;
    verbs->modify_cq = wrap_modify_cq;
    verbs->create_srq_ex = wrap_create_srq_ex;
    verbs->get_srq_num = wrap_get_srq_num;
    verbs->create_qp_ex = wrap_create_qp_ex;
    verbs->context.ops.poll_cq = wrap_poll_cq;
    verbs->context.ops.req_notify_cq = wrap_req_notify_cq;
    verbs->context.ops.post_send = wrap_post_send;
    verbs->context.ops.post_recv = wrap_post_recv;
    verbs->context.ops.post_srq_recv = wrap_post_srq_recv;
    verbs->context.ops.alloc_mw = wrap_alloc_mw;
    verbs->context.ops.bind_mw = wrap_bind_mw;
    verbs->context.ops.dealloc_mw = wrap_dealloc_mw;
}

const struct verbs_table soft_verbs = {
    .close_device = wrap_close_device,
    .query_device = wrap_query_device,
    .query_gid = wrap_query_gid,
    .query_pkey = wrap_query_pkey,
    .get_async_event = wrap_get_async_event,
    .ack_async_event = soft_ack_async_event,
    .alloc_pd = wrap_alloc_pd,
    .dealloc_pd = wrap_dealloc_pd,
    .reg_mr = wrap_reg_mr,
    .dereg_mr = wrap_dereg_mr,
    .create_comp_channel = wrap_create_comp_channel,
    .destroy_comp_channel = wrap_destroy_comp_channel,
    .get_cq_event = wrap_get_cq_event,
    .ack_cq_events = soft_ack_cq_events,
    .create_cq = wrap_create_cq,
    .resize_cq = wrap_resize_cq,
    .destroy_cq = wrap_destroy_cq,
    .create_srq = wrap_create_srq,
    .modify_srq = wrap_modify_srq,
    .query_srq = wrap_query_srq,
    .destroy_srq = wrap_destroy_srq,
    .create_qp = wrap_create_qp,
    .query_qp = wrap_query_qp,
    .modify_qp = wrap_modify_qp,
    .destroy_qp = wrap_destroy_qp,
    .create_ah = wrap_create_ah,
    .destroy_ah = wrap_destroy_ah,
    .import_device = soft_import_device,
    .import_pd = soft_import_pd,
    .unimport_pd = soft_unimport_pd,
    .attach_mcast = soft_attach_mcast,
    .detach_mcast = soft_detach_mcast,
};
