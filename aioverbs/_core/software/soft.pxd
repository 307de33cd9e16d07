# C declarations of the software device for Cython: the parts of the headers in soft/ that this extension uses.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from aioverbs._core.abi.libibverbs cimport (
    ibv_context,
    ibv_cq,
    ibv_mr,
    ibv_pd,
    ibv_qp,
    ibv_srq,
    ibv_wc_status,
    verbs_table,
)

cdef extern from "soft/base/settings.h" nogil:
    enum soft_mode:
        SOFT_INLINE
        SOFT_THREAD

    struct soft_address:
        int family
        uint16_t port
        uint8_t bytes[16]

    enum:
        SOFT_MAX_USERS
        SOFT_MAX_SECRET
        SOFT_MAX_PATH

    struct soft_settings:
        char directory[SOFT_MAX_PATH]
        uint32_t users[SOFT_MAX_USERS]
        unsigned int user_count
        uint8_t secret[SOFT_MAX_SECRET]
        size_t secret_size
        bint direct, rings
        uint32_t spin_ns


cdef extern from "soft/fabric/fabric.h" nogil:
    struct soft_stream_stats:
        uint8_t own[16]
        uint8_t peer[2][16]
        bint is_link
        bint connected
        bint is_unix
        bint direct, rings
        uint32_t pid
        uint32_t uid
        char why_not_direct[64]
        char why_not_rings[64]
        char reason[96]
        uint64_t frames_in
        uint64_t frames_out
        uint64_t bytes_in
        uint64_t bytes_out
        uint64_t connected_times
        uint32_t waiting

    struct soft_fabric_event:
        uint64_t time_ns
        uint8_t peer[16]
        char reason[96]

    enum:
        SOFT_FABRIC_EVENTS

    struct soft_fabric_stats:
        uint64_t accepted
        uint64_t connected
        uint64_t refused_peers
        uint64_t refused_frames
        uint64_t lost
        uint64_t failed_connects
        uint32_t streams
        bint listening
        char path[108]
        char address[64]
        uint32_t events
        soft_fabric_event event[SOFT_FABRIC_EVENTS]


cdef extern from "alloc/area.h" nogil:
    struct alloc_area:
        void *handle
        void (*drop)(void *) noexcept

cdef extern from "soft/api/device.h" nogil:
    struct soft_options:
        soft_mode mode
        uint64_t delay_ns
        soft_address address
        const soft_settings *settings
        char *error_text

    enum:
        SOFT_ERROR_TEXT

    struct soft_counts:
        uint32_t pds
        uint32_t parent_domains
        uint32_t thread_domains
        uint32_t xrcds
        uint32_t mrs
        uint32_t mws
        uint32_t ahs
        uint32_t channels
        uint32_t cqs
        uint32_t srqs
        uint32_t qps
        uint32_t overlaps

    const verbs_table soft_verbs
    ibv_context *soft_open(const soft_options *)
    void soft_get_fabric_stats(ibv_context *, soft_fabric_stats *)
    size_t soft_get_stream_stats(ibv_context *, soft_stream_stats *, size_t)
    void soft_get_fabric_error(ibv_context *, char *)
    bint soft_has_fabric(const ibv_context *)
    void soft_get_counts(ibv_context *, soft_counts *)
    int soft_set_delay(ibv_context *, uint64_t)
    int soft_set_port(ibv_context *, bint)
    int soft_lose(ibv_context *)
    int soft_break_qp(ibv_qp *)
    int soft_break_cq(ibv_cq *)
    int soft_break_srq(ibv_srq *)
    void soft_halt(ibv_context *)
    int soft_watch_forks()


cdef extern from "soft/objects/pd_share.h" nogil:
    int soft_alloc_shpd(ibv_pd *, uint64_t, uint32_t *)
    ibv_pd *soft_share_pd(ibv_context *, uint32_t, uint64_t)
    int soft_export_shpd(ibv_pd *, int *)
    ibv_pd *soft_import_shpd(ibv_context *, int, uint64_t)
    const alloc_area *soft_shared_area(ibv_pd *)


cdef extern from "soft/objects/shared_keys.h" nogil:
    ibv_mr *soft_import_mr(ibv_pd *, uint32_t, void **, int *)
    int soft_unimport_mr(ibv_mr *)


cdef extern from "soft/api/give_back.h" nogil:
    void soft_give_back(ibv_qp *, void *, size_t)


cdef extern from "soft/api/mapped_read.h" nogil:
    bint soft_read_mapped(ibv_qp *, void *, uint64_t, uint32_t, uint32_t)


cdef extern from "soft/objects/mr.h" nogil:
    ibv_mr *soft_make_file_mr(ibv_pd *, size_t, int)


cdef extern from "soft/base/fork_fds.h" nogil:
    void soft_descriptor_discard(int)


cdef extern from "soft/fault/fault.h" nogil:
    enum soft_verb:
        SOFT_ANY_VERB

    enum:
        SOFT_RECORD_VERB
        SOFT_RECORD_REQUEST
        SOFT_RECORD_RECEIVE
        SOFT_RECORD_LOSS
        SOFT_RECORD_DROP
        SOFT_RECORD_DUPLICATE
        SOFT_RECORD_DELAY
        SOFT_RECORD_CUT

    struct soft_strike:
        uint64_t first
        uint64_t every
        uint64_t times

    struct soft_fault_record:
        int what
        uint32_t which
        uint64_t ordinal
        uint32_t value

    enum:
        SOFT_FRAME_KINDS

    enum soft_frame_fault_kind:
        SOFT_DROP
        SOFT_DUPLICATE
        SOFT_DELAY
        SOFT_CUT
        SOFT_FRAME_FAULT_KINDS

    struct soft_frame_fault:
        soft_frame_fault_kind mishap
        unsigned int kinds
        uint32_t qp_num
        const uint8_t *gid
        uint64_t delay_ns
        soft_strike strike

    const char *soft_verb_name(soft_verb)
    int soft_fault_verb(ibv_context *, soft_verb, soft_strike, int)
    int soft_fault_verbs_at_random(ibv_context *, uint32_t, int)
    int soft_fault_request(ibv_context *, uint32_t, bint, soft_strike, ibv_wc_status, uint32_t)
    int soft_fault_loss(ibv_context *, uint32_t, soft_strike)
    int soft_fault_loss_at_random(ibv_context *, uint32_t)
    int soft_fault_jitter(ibv_context *, uint64_t)
    int soft_fault_frames(ibv_context *, const soft_frame_fault *)
    int soft_fault_frames_at_random(ibv_context *, const uint32_t *, uint64_t)
    int soft_fault_cut(ibv_context *, const uint8_t *, unsigned int *)
    int soft_fault_stall(ibv_context *, const uint8_t *, bint, unsigned int *)
    int soft_fault_hold(ibv_context *, uint32_t)
    size_t soft_fault_held(ibv_context *)
    size_t soft_fault_release(ibv_context *, size_t, bint)
    void soft_fault_unhold(ibv_context *)
    void soft_fault_seed(ibv_context *, uint64_t)
    void soft_fault_clear(ibv_context *)
    void soft_fault_count(ibv_context *, bint)
    uint64_t soft_fault_calls(ibv_context *, soft_verb)
    size_t soft_fault_records(ibv_context *, size_t, soft_fault_record *, size_t)
