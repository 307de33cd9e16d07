/* Numbers of the device's verbs. */
#ifndef AIOVERBS_SOFT_OBJECTS_VERBS_H
#define AIOVERBS_SOFT_OBJECTS_VERBS_H

/* X(name): the verbs of the device, as a fault plan names and counts them. */
#define SOFT_VERBS(X)       \
    X(close_device)         \
    X(query_device)         \
    X(query_device_ex)      \
    X(query_port)           \
    X(query_gid)            \
    X(query_pkey)           \
    X(query_rt_values)      \
    X(get_async_event)      \
    X(alloc_pd)             \
    X(dealloc_pd)           \
    X(alloc_td)             \
    X(dealloc_td)           \
    X(alloc_parent_domain)  \
    X(alloc_shpd)           \
    X(share_pd)             \
    X(open_xrcd)            \
    X(close_xrcd)           \
    X(reg_mr)               \
    X(dereg_mr)             \
    X(alloc_mw)             \
    X(bind_mw)              \
    X(dealloc_mw)           \
    X(create_comp_channel)  \
    X(destroy_comp_channel) \
    X(get_cq_event)         \
    X(create_cq)            \
    X(create_cq_ex)         \
    X(resize_cq)            \
    X(modify_cq)            \
    X(destroy_cq)           \
    X(req_notify_cq)        \
    X(poll_cq)              \
    X(start_poll)           \
    X(create_srq)           \
    X(create_srq_ex)        \
    X(modify_srq)           \
    X(query_srq)            \
    X(get_srq_num)          \
    X(destroy_srq)          \
    X(post_srq_recv)        \
    X(create_qp)            \
    X(create_qp_ex)         \
    X(query_qp)             \
    X(modify_qp)            \
    X(destroy_qp)           \
    X(post_send)            \
    X(post_recv)            \
    X(create_ah)            \
    X(destroy_ah)

enum soft_verb {
#define X(name) SOFT_VERB_##name,
    SOFT_VERBS(X)
#undef X
        SOFT_VERB_COUNT
};

#endif
