# C declarations of the verbs for Cython: the parts of abi/libibverbs.h and abi/verbs_ops.h that the extensions use.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "abi/whole_numbers.h":     # for all extensions, which cimport this file
    pass

cdef extern from "<arpa/inet.h>" nogil:
    uint32_t htonl(uint32_t)
    uint32_t ntohl(uint32_t)


cdef extern from "abi/libibverbs.h" nogil:
    union ibv_gid:
        uint8_t raw[16]

    struct ibv_gid_entry:
        ibv_gid gid
        uint32_t gid_index
        uint32_t port_num
        uint32_t gid_type

    struct ibv_device:
        char name[64]

    struct ibv_context:
        ibv_device *device
        int cmd_fd
        int async_fd
        int num_comp_vectors
        void *abi_compat

    struct verbs_context:
        pass

    verbs_context *verbs_context_of(ibv_context *)

    struct ibv_device_attr:
        char fw_ver[64]
        uint64_t node_guid
        uint64_t sys_image_guid
        uint64_t max_mr_size
        uint64_t page_size_cap
        uint32_t vendor_id
        uint32_t vendor_part_id
        uint32_t hw_ver
        int max_qp
        int max_qp_wr
        unsigned int device_cap_flags
        int max_sge
        int max_sge_rd
        int max_cq
        int max_cqe
        int max_mr
        int max_pd
        int max_qp_rd_atom
        int max_qp_init_rd_atom
        int atomic_cap
        int max_mw
        int max_ah
        int max_srq
        int max_srq_wr
        int max_srq_sge
        uint16_t max_pkeys
        uint8_t phys_port_cnt

    struct ibv_port_attr:
        int state
        int max_mtu
        int active_mtu
        int gid_tbl_len
        uint32_t port_cap_flags
        uint32_t max_msg_sz
        uint16_t pkey_tbl_len
        uint16_t lid
        uint16_t sm_lid
        uint8_t lmc
        uint8_t active_width
        uint8_t active_speed
        uint8_t phys_state
        uint8_t link_layer

    enum ibv_event_type:
        pass

    # Nested unions and structures have no names in C; these names are only reached through their parents.
    union _ibv_event_element:
        ibv_cq *cq
        ibv_qp *qp
        ibv_srq *srq
        int port_num

    struct ibv_async_event:
        _ibv_event_element element
        ibv_event_type event_type

    struct ibv_pd:
        ibv_context *context
        uint32_t handle

    struct ibv_td:
        ibv_context *context

    struct ibv_td_init_attr:
        uint32_t comp_mask

    enum:
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT

    void *IBV_ALLOCATOR_USE_DEFAULT

    struct ibv_parent_domain_init_attr:
        ibv_pd *pd
        ibv_td *td
        uint32_t comp_mask
        void *(*alloc)(ibv_pd *, void *, size_t, size_t, uint64_t) noexcept nogil
        void (*free)(ibv_pd *, void *, void *, uint64_t) noexcept nogil
        void *pd_context

    enum:
        IBV_XRCD_INIT_ATTR_FD
        IBV_XRCD_INIT_ATTR_OFLAGS

    struct ibv_xrcd:
        ibv_context *context

    struct ibv_xrcd_init_attr:
        uint32_t comp_mask
        int fd
        int oflags

    struct ibv_mr:
        ibv_pd *pd
        void *addr
        size_t length
        uint32_t lkey
        uint32_t rkey

    enum ibv_mw_type:
        IBV_MW_TYPE_1
        IBV_MW_TYPE_2

    struct ibv_mw:
        ibv_context *context
        uint32_t rkey

    struct ibv_mw_bind_info:
        ibv_mr *mr
        uint64_t addr
        uint64_t length
        unsigned int mw_access_flags

    struct ibv_mw_bind:
        uint64_t wr_id
        unsigned int send_flags
        ibv_mw_bind_info bind_info

    struct ibv_comp_channel:
        int fd

    struct ibv_cq:
        ibv_context *context
        void *cq_context
        int cqe

    struct ibv_cq_ex:
        int cqe

    enum:
        IBV_WC_EX_WITH_BYTE_LEN
        IBV_WC_EX_WITH_IMM
        IBV_WC_EX_WITH_QP_NUM
        IBV_WC_EX_WITH_SRC_QP
        IBV_CQ_INIT_ATTR_MASK_FLAGS
        IBV_CQ_INIT_ATTR_MASK_PD
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED

    struct ibv_cq_init_attr_ex:
        uint32_t cqe
        void *cq_context
        ibv_comp_channel *channel
        uint32_t comp_vector
        uint64_t wc_flags
        uint32_t comp_mask
        uint32_t flags
        ibv_pd *parent_domain

    enum:
        IBV_CQ_ATTR_MODERATE

    struct ibv_moderate_cq:
        uint16_t cq_count
        uint16_t cq_period

    struct ibv_modify_cq_attr:
        uint32_t attr_mask
        ibv_moderate_cq moderate

    enum ibv_wc_status:
        pass

    enum ibv_wc_opcode:
        IBV_WC_RECV_RDMA_WITH_IMM

    enum:
        IBV_WC_GRH
        IBV_WC_WITH_IMM
        IBV_WC_WITH_INV

    struct ibv_wc:
        uint64_t wr_id
        ibv_wc_status status
        ibv_wc_opcode opcode
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t imm_data
        uint32_t qp_num
        uint32_t src_qp
        unsigned int wc_flags

    enum:
        IBV_SRQ_MAX_WR
        IBV_SRQ_LIMIT

    struct ibv_srq_attr:
        uint32_t max_wr
        uint32_t max_sge
        uint32_t srq_limit

    struct ibv_srq_init_attr:
        void *srq_context
        ibv_srq_attr attr

    enum ibv_srq_type:
        IBV_SRQT_BASIC
        IBV_SRQT_XRC

    enum:
        IBV_SRQ_INIT_ATTR_TYPE
        IBV_SRQ_INIT_ATTR_PD
        IBV_SRQ_INIT_ATTR_XRCD
        IBV_SRQ_INIT_ATTR_CQ

    struct ibv_srq_init_attr_ex:
        void *srq_context
        ibv_srq_attr attr
        uint32_t comp_mask
        ibv_srq_type srq_type
        ibv_pd *pd
        ibv_xrcd *xrcd
        ibv_cq *cq

    struct ibv_srq:
        ibv_context *context
        void *srq_context

    struct ibv_global_route:
        ibv_gid dgid
        uint32_t flow_label
        uint8_t sgid_index
        uint8_t hop_limit
        uint8_t traffic_class

    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl
        uint8_t src_path_bits
        uint8_t static_rate
        uint8_t is_global
        uint8_t port_num

    struct ibv_ah:
        ibv_context *context

    struct ibv_qp:
        ibv_context *context
        void *qp_context
        uint32_t handle
        uint32_t qp_num

    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data

    enum ibv_qp_type:
        IBV_QPT_UD
        IBV_QPT_XRC_SEND
        IBV_QPT_XRC_RECV

    enum ibv_qp_state:
        pass

    enum ibv_mtu:
        pass

    struct ibv_qp_init_attr:
        void *qp_context
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_srq *srq
        ibv_qp_cap cap
        ibv_qp_type qp_type
        int sq_sig_all

    enum:
        IBV_QP_INIT_ATTR_XRCD

    struct ibv_qp_init_attr_ex:
        void *qp_context
        ibv_qp_cap cap
        ibv_qp_type qp_type
        uint32_t comp_mask
        ibv_xrcd *xrcd

    enum:
        IBV_QP_STATE
        IBV_QP_CUR_STATE
        IBV_QP_EN_SQD_ASYNC_NOTIFY
        IBV_QP_ACCESS_FLAGS
        IBV_QP_PKEY_INDEX
        IBV_QP_PORT
        IBV_QP_QKEY
        IBV_QP_AV
        IBV_QP_PATH_MTU
        IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT
        IBV_QP_RNR_RETRY
        IBV_QP_RQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC
        IBV_QP_MIN_RNR_TIMER
        IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_CAP
        IBV_QP_DEST_QPN

    struct ibv_qp_attr:
        ibv_qp_state qp_state
        ibv_qp_state cur_qp_state
        ibv_mtu path_mtu
        uint32_t qkey
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        unsigned int qp_access_flags
        ibv_qp_cap cap
        ibv_ah_attr ah_attr
        uint16_t pkey_index
        uint8_t en_sqd_async_notify
        uint8_t sq_draining
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry

    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey

    enum ibv_wr_opcode:
        pass

    struct _ibv_wr_rdma:
        uint64_t remote_addr
        uint32_t rkey

    struct _ibv_wr_atomic:
        uint64_t remote_addr
        uint64_t compare_add
        uint64_t swap
        uint32_t rkey

    struct _ibv_wr_ud:
        ibv_ah *ah
        uint32_t remote_qpn
        uint32_t remote_qkey

    struct _ibv_wr:
        _ibv_wr_rdma rdma
        _ibv_wr_atomic atomic
        _ibv_wr_ud ud

    struct _ibv_wr_xrc:
        uint32_t remote_srqn

    struct _ibv_wr_qp_type:
        _ibv_wr_xrc xrc

    struct _ibv_wr_bind_mw:
        ibv_mw *mw
        uint32_t rkey
        ibv_mw_bind_info bind_info

    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        ibv_wr_opcode opcode
        unsigned int send_flags
        uint32_t imm_data
        uint32_t invalidate_rkey
        _ibv_wr wr
        _ibv_wr_qp_type qp_type
        _ibv_wr_bind_mw bind_mw

    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge


cdef extern from "abi/verbs_ops.h" nogil:
    struct verbs_table:
        int (*close_device)(ibv_context *) noexcept nogil
        ibv_context *(*import_device)(int) noexcept nogil
        int (*query_device)(ibv_context *, ibv_device_attr *) noexcept nogil
        int (*query_gid)(ibv_context *, uint8_t, int, ibv_gid *) noexcept nogil
        int (*query_pkey)(ibv_context *, uint8_t, int, uint16_t *) noexcept nogil
        int (*get_async_event)(ibv_context *, ibv_async_event *) noexcept nogil
        void (*ack_async_event)(ibv_async_event *) noexcept nogil
        ibv_pd *(*alloc_pd)(ibv_context *) noexcept nogil
        int (*dealloc_pd)(ibv_pd *) noexcept nogil
        ibv_pd *(*import_pd)(ibv_context *, uint32_t) noexcept nogil
        void (*unimport_pd)(ibv_pd *) noexcept nogil
        ibv_mr *(*reg_mr)(ibv_pd *, void *, size_t, int) noexcept nogil
        int (*dereg_mr)(ibv_mr *) noexcept nogil
        ibv_comp_channel *(*create_comp_channel)(ibv_context *) noexcept nogil
        int (*destroy_comp_channel)(ibv_comp_channel *) noexcept nogil
        int (*get_cq_event)(ibv_comp_channel *, ibv_cq **, void **) noexcept nogil
        void (*ack_cq_events)(ibv_cq *, unsigned int) noexcept nogil
        ibv_cq *(*create_cq)(ibv_context *, int, void *, ibv_comp_channel *, int) noexcept nogil
        int (*resize_cq)(ibv_cq *, int) noexcept nogil
        int (*destroy_cq)(ibv_cq *) noexcept nogil
        ibv_srq *(*create_srq)(ibv_pd *, ibv_srq_init_attr *) noexcept nogil
        int (*modify_srq)(ibv_srq *, ibv_srq_attr *, int) noexcept nogil
        int (*query_srq)(ibv_srq *, ibv_srq_attr *) noexcept nogil
        int (*destroy_srq)(ibv_srq *) noexcept nogil
        ibv_qp *(*create_qp)(ibv_pd *, ibv_qp_init_attr *) noexcept nogil
        int (*query_qp)(ibv_qp *, ibv_qp_attr *, int, ibv_qp_init_attr *) noexcept nogil
        int (*modify_qp)(ibv_qp *, ibv_qp_attr *, int) noexcept nogil
        int (*destroy_qp)(ibv_qp *) noexcept nogil
        ibv_ah *(*create_ah)(ibv_pd *, ibv_ah_attr *) noexcept nogil
        int (*destroy_ah)(ibv_ah *) noexcept nogil

    struct verbs_devices:
        ibv_device **(*get_device_list)(int *) noexcept nogil
        void (*free_device_list)(ibv_device **) noexcept nogil
        ibv_context *(*open_device)(ibv_device *) noexcept nogil
        Py_ssize_t (*query_gid_table)(ibv_context *, ibv_gid_entry *, size_t, uint32_t, size_t) noexcept nogil

    const char *verbs_table_load(verbs_table *, const char *)
    void **verbs_table_slot(verbs_table *, const char *)
    const char *verbs_devices_load(verbs_devices *, const char *)
    void **verbs_devices_slot(verbs_devices *, const char *)
    int verbs_req_notify_cq(ibv_cq *, int)
    int verbs_post_send(ibv_qp *, ibv_send_wr *, ibv_send_wr **)
    int verbs_post_recv(ibv_qp *, ibv_recv_wr *, ibv_recv_wr **)
    int verbs_post_srq_recv(ibv_srq *, ibv_recv_wr *, ibv_recv_wr **)
    ibv_mw *verbs_alloc_mw(ibv_pd *, ibv_mw_type)
    int verbs_bind_mw(ibv_qp *, ibv_mw *, ibv_mw_bind *)
    int verbs_dealloc_mw(ibv_mw *)
    int verbs_query_port(ibv_context *, uint8_t, ibv_port_attr *)
    ibv_td *verbs_alloc_td(ibv_context *, ibv_td_init_attr *)
    int verbs_dealloc_td(ibv_td *)
    ibv_pd *verbs_alloc_parent_domain(ibv_context *, ibv_parent_domain_init_attr *)
    ibv_xrcd *verbs_open_xrcd(ibv_context *, ibv_xrcd_init_attr *)
    int verbs_close_xrcd(ibv_xrcd *)
    ibv_cq_ex *verbs_create_cq_ex(ibv_context *, ibv_cq_init_attr_ex *)
    int verbs_modify_cq(ibv_cq *, ibv_modify_cq_attr *)
    ibv_srq *verbs_create_srq_ex(ibv_context *, ibv_srq_init_attr_ex *)
    int verbs_get_srq_num(ibv_srq *, uint32_t *)
    ibv_qp *verbs_create_qp_ex(ibv_context *, ibv_qp_init_attr_ex *)
