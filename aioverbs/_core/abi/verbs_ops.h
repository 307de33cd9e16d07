/* Call verbs of any provider.
 *
 * libibverbs has verbs of two kinds. Inline verbs go through public structures: the wrappers `verbs_...` below do the
 * same for any provider, and fail with EOPNOTSUPP where the provider lacks an op. Exported verbs use private tables of
 * libibverbs and crash on a context that libibverbs did not create: they are called through a `struct verbs_table`,
 * which libibverbs.so.1 or the software device fills. */
#ifndef AIOVERBS_VERBS_OPS_H
#define AIOVERBS_VERBS_OPS_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include "abi/libibverbs.h"

/* X(result, name, parameters): the exported verb ibv_<name>. */
#define VERBS_EXPORTED(X)                                                                            \
    X(int, close_device, (struct ibv_context *))                                                     \
    X(struct ibv_context *, import_device, (int cmd_fd))                                             \
    X(int, query_device, (struct ibv_context *, struct ibv_device_attr *))                           \
    X(int, query_gid, (struct ibv_context *, uint8_t port, int index, union ibv_gid *))              \
    X(int, query_pkey, (struct ibv_context *, uint8_t port, int index, __be16 *))                    \
    X(int, get_async_event, (struct ibv_context *, struct ibv_async_event *))                        \
    X(void, ack_async_event, (struct ibv_async_event *))                                             \
    X(struct ibv_pd *, alloc_pd, (struct ibv_context *))                                             \
    X(int, dealloc_pd, (struct ibv_pd *))                                                            \
    X(struct ibv_pd *, import_pd, (struct ibv_context *, uint32_t handle))                           \
    X(void, unimport_pd, (struct ibv_pd *))                                                          \
    X(struct ibv_mr *, reg_mr, (struct ibv_pd *, void *, size_t, int access))                        \
    X(int, dereg_mr, (struct ibv_mr *))                                                              \
    X(struct ibv_comp_channel *, create_comp_channel, (struct ibv_context *))                        \
    X(int, destroy_comp_channel, (struct ibv_comp_channel *))                                        \
    X(int, get_cq_event, (struct ibv_comp_channel *, struct ibv_cq **, void **cq_context))           \
    X(void, ack_cq_events, (struct ibv_cq *, unsigned int))                                          \
    X(struct ibv_cq *, create_cq,                                                                    \
      (struct ibv_context *, int cqe, void *cq_context, struct ibv_comp_channel *, int comp_vector)) \
    X(int, resize_cq, (struct ibv_cq *, int cqe))                                                    \
    X(int, destroy_cq, (struct ibv_cq *))                                                            \
    X(struct ibv_srq *, create_srq, (struct ibv_pd *, struct ibv_srq_init_attr *))                   \
    X(int, modify_srq, (struct ibv_srq *, struct ibv_srq_attr *, int mask))                          \
    X(int, query_srq, (struct ibv_srq *, struct ibv_srq_attr *))                                     \
    X(int, destroy_srq, (struct ibv_srq *))                                                          \
    X(struct ibv_qp *, create_qp, (struct ibv_pd *, struct ibv_qp_init_attr *))                      \
    X(int, query_qp, (struct ibv_qp *, struct ibv_qp_attr *, int mask, struct ibv_qp_init_attr *))   \
    X(int, modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int mask))                             \
    X(int, destroy_qp, (struct ibv_qp *))                                                            \
    X(struct ibv_ah *, create_ah, (struct ibv_pd *, struct ibv_ah_attr *))                           \
    X(int, destroy_ah, (struct ibv_ah *))                                                            \
    X(int, attach_mcast, (struct ibv_qp *, const union ibv_gid *, uint16_t lid))                     \
    X(int, detach_mcast, (struct ibv_qp *, const union ibv_gid *, uint16_t lid))

struct verbs_table {
#define X(result, name, parameters) result(*name) parameters;
    VERBS_EXPORTED(X)
#undef X
};

/* Fill `table` from a shared library: "libibverbs.so.1", except in tests. Return NULL, or the reason of the failure:
 * text of the dynamic linker, valid until the thread's next call to it. errno is then ENOENT if the library cannot be
 * loaded, or ENOSYS if it lacks a verb. Before rdma-core 31, libibverbs lacks import_device, import_pd and unimport_pd;
 * these then fail with EOPNOTSUPP. */
const char *verbs_table_load(struct verbs_table *table, const char *library);

/* Return the address of the pointer to the exported verb ibv_<name> in `table`, or NULL. For code that intercepts
 * verbs, such as tests. */
void **verbs_table_slot(struct verbs_table *table, const char *name);

/* X(result, name, parameters): the exported verb ibv_<name>, which is for RDMA devices only. */
#define VERBS_DEVICES(X)                                   \
    X(struct ibv_device **, get_device_list, (int *count)) \
    X(void, free_device_list, (struct ibv_device **))      \
    X(struct ibv_context *, open_device, (struct ibv_device *))

struct verbs_devices {
#define X(result, name, parameters) result(*name) parameters;
    VERBS_DEVICES(X)
#undef X
    /* _ibv_query_gid_table, the function behind the inline verb; without it, before rdma-core 32, -EOPNOTSUPP. */
    ssize_t (*query_gid_table)(struct ibv_context *, struct ibv_gid_entry *, size_t max_entries, uint32_t flags,
                               size_t entry_size);
};

/* The same for this table. */
const char *verbs_devices_load(struct verbs_devices *table, const char *library);
void **verbs_devices_slot(struct verbs_devices *table, const char *name);

/* ---- Inline verbs, for any provider ---------------------------------------------------------------------- */

static inline int verbs_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
    return cq->context->ops.poll_cq(cq, count, wc);
}

static inline int verbs_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    return cq->context->ops.req_notify_cq(cq, solicited_only);
}

static inline int verbs_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    return qp->context->ops.post_send(qp, wr, bad);
}

static inline int verbs_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return qp->context->ops.post_recv(qp, wr, bad);
}

/* Use an extended op of a context; without it, return `absent` from the calling function, with errno EOPNOTSUPP. */
#define VERBS_REQUIRE(vctx, op, absent) \
    do {                                \
        if (!VERBS_HAS_OP(vctx, op)) {  \
            errno = EOPNOTSUPP;         \
            return absent;              \
        }                               \
    } while (0)

static inline int verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, query_port, EOPNOTSUPP);
    memset(attr, 0, sizeof(*attr));
    return vctx->query_port(context, port, attr, sizeof(*attr));
}

static inline struct ibv_td *verbs_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, alloc_td, NULL);
    return vctx->alloc_td(context, attr);
}

static inline int verbs_dealloc_td(struct ibv_td *td)
{
    struct verbs_context *vctx = verbs_context_of(td->context);

    VERBS_REQUIRE(vctx, dealloc_td, EOPNOTSUPP);
    return vctx->dealloc_td(td);
}

static inline struct ibv_pd *verbs_alloc_parent_domain(struct ibv_context *context,
                                                       struct ibv_parent_domain_init_attr *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, alloc_parent_domain, NULL);
    return vctx->alloc_parent_domain(context, attr);
}

static inline struct ibv_xrcd *verbs_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, open_xrcd, NULL);
    return vctx->open_xrcd(context, attr);
}

static inline int verbs_close_xrcd(struct ibv_xrcd *xrcd)
{
    struct verbs_context *vctx = verbs_context_of(xrcd->context);

    VERBS_REQUIRE(vctx, close_xrcd, EOPNOTSUPP);
    return vctx->close_xrcd(xrcd);
}

static inline int verbs_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return srq->context->ops.post_srq_recv(srq, wr, bad);
}

static inline struct ibv_mw *verbs_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
    return pd->context->ops.alloc_mw(pd, type);
}

static inline int verbs_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    return mw->context->ops.bind_mw(qp, mw, bind);
}

static inline int verbs_dealloc_mw(struct ibv_mw *mw)
{
    return mw->context->ops.dealloc_mw(mw);
}

static inline int verbs_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
    struct verbs_context *vctx = verbs_context_of(cq->context);

    VERBS_REQUIRE(vctx, modify_cq, EOPNOTSUPP);
    return vctx->modify_cq(cq, attr);
}

static inline struct ibv_srq *verbs_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, create_srq_ex, NULL);
    return vctx->create_srq_ex(context, attr);
}

static inline int verbs_get_srq_num(struct ibv_srq *srq, uint32_t *number)
{
    struct verbs_context *vctx = verbs_context_of(srq->context);

    VERBS_REQUIRE(vctx, get_srq_num, EOPNOTSUPP);
    return vctx->get_srq_num(srq, number);
}

/* Not for attributes that ibv_create_qp takes: libibverbs handles those itself. */
static inline struct ibv_qp *verbs_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, create_qp_ex, NULL);
    return vctx->create_qp_ex(context, attr);
}

/* The provider of create_cq_ex (libibverbs around its providers, or the software device) initializes the queue's mutex
 * and condition. */
static inline struct ibv_cq_ex *verbs_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_context_of(context);

    VERBS_REQUIRE(vctx, create_cq_ex, NULL);
    return vctx->create_cq_ex(context, attr);
}

#endif
