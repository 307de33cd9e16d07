/* The doors of the device: the two tables by which verbs come in. */
#include "soft.h"

void soft_entry_fill(struct verbs_context *verbs)
{
    verbs->query_port = soft_query_port;
    verbs->query_device_ex = soft_query_device_ex;
    verbs->query_rt_values = soft_query_rt_values;
    verbs->alloc_td = soft_alloc_td;
    verbs->dealloc_td = soft_dealloc_td;
    verbs->alloc_parent_domain = soft_alloc_parent_domain;
    verbs->open_xrcd = soft_open_xrcd;
    verbs->close_xrcd = soft_close_xrcd;
    verbs->create_cq_ex = soft_create_cq_ex;
    verbs->modify_cq = soft_modify_cq;
    verbs->create_srq_ex = soft_create_srq_ex;
    verbs->get_srq_num = soft_get_srq_num;
    verbs->create_qp_ex = soft_create_qp_ex;
    verbs->context.ops.poll_cq = soft_poll_cq;
    verbs->context.ops.req_notify_cq = soft_req_notify_cq;
    verbs->context.ops.post_send = soft_post_send;
    verbs->context.ops.post_recv = soft_post_recv;
    verbs->context.ops.post_srq_recv = soft_post_srq_recv;
    verbs->context.ops.alloc_mw = soft_alloc_mw;
    verbs->context.ops.bind_mw = soft_bind_mw;
    verbs->context.ops.dealloc_mw = soft_dealloc_mw;
}

const struct verbs_table soft_verbs = {
    .close_device = soft_close_device,
    .query_device = soft_query_device,
    .query_gid = soft_query_gid,
    .query_pkey = soft_query_pkey,
    .get_async_event = soft_get_async_event,
    .ack_async_event = soft_ack_async_event,
    .alloc_pd = soft_alloc_pd,
    .dealloc_pd = soft_dealloc_pd,
    .reg_mr = soft_reg_mr,
    .dereg_mr = soft_dereg_mr,
    .create_comp_channel = soft_create_comp_channel,
    .destroy_comp_channel = soft_destroy_comp_channel,
    .get_cq_event = soft_get_cq_event,
    .ack_cq_events = soft_ack_cq_events,
    .create_cq = soft_create_cq,
    .resize_cq = soft_resize_cq,
    .destroy_cq = soft_destroy_cq,
    .create_srq = soft_create_srq,
    .modify_srq = soft_modify_srq,
    .query_srq = soft_query_srq,
    .destroy_srq = soft_destroy_srq,
    .create_qp = soft_create_qp,
    .query_qp = soft_query_qp,
    .modify_qp = soft_modify_qp,
    .destroy_qp = soft_destroy_qp,
    .create_ah = soft_create_ah,
    .destroy_ah = soft_destroy_ah,
};
