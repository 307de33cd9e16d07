# Handles and their pointers, for the other extensions of the core.

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from aioverbs._core.abi.libibverbs cimport (
    ibv_ah,
    ibv_ah_attr,
    ibv_async_event,
    ibv_comp_channel,
    ibv_context,
    ibv_cq,
    ibv_cq_ex,
    ibv_mr,
    ibv_mw,
    ibv_pd,
    ibv_qp,
    ibv_qp_cap,
    ibv_qp_init_attr,
    ibv_srq,
    ibv_xrcd,
    verbs_table,
)

cdef extern from "handles/handle_gate.h":
    int GATE_CLOSED
    bint gate_enter(int *)
    void gate_leave(int *)
    bint gate_hold(int *)
    bint gate_close(int *)
    bint gate_leave_many(int *, int)
    void gate_reopen(int *)
    int gate_holders(int *)
    void gate_suspend(int *)
    void gate_resume(int *)


cdef class Affinity:
    cdef void *_thread                  # struct affinity_thread of the owner, with a reference; NULL: any thread
    cdef readonly object loop           # event loop of the owner; None if there is none
    cdef readonly str thread_name
    cdef object _run                    # loop run that was seen last, see handles/running_loop.h
    cdef uint64_t _version              # version of the thread's dictionary then; 0: unknown
    cdef PyObject *_verb                # name of the verb in flight, a str that the caller keeps; valid while `_inside`
    cdef int _inside                    # 1 while a verb is in flight, see affinity_claim
    cdef uint32_t _forks                # fork_count when the affinity was created

    @staticmethod
    cdef uint32_t _fork_count() noexcept    # fork_count, for other modules
    cdef int _bind(self) except -1
    cdef int _enter(self, object what, str verb) except -1
    cdef void _leave(self) noexcept
    cdef bint _is_owner(self) except -1
    cdef bint _has_same_owner(self, Affinity other) noexcept
    cdef str _wrong_caller_text(self, object what, str verb)
    cdef str _overlap_text(self, object what, str verb)
    cdef str _owner(self)


cdef class Handle:
    cdef int _gate                      # calls in flight and open children, see handles/handle_gate.h
    cdef int _constructor_gate          # a gate that the constructor closes
    cdef int _async_events              # events taken and not acknowledged, counted by the functions of handle_gate.h
    cdef uint32_t _forks                # fork_count when the handle was created
    cdef str _label                     # text for repr, which must not read the object itself
    cdef readonly Context context
    cdef readonly Affinity affinity     # owner that may call the object's verbs; None if any thread may
    cdef void **_lender_slot            # address of the lender's pointer to the object; NULL: not borrowed
    cdef void *_lent_pointer            # value of that pointer when it was borrowed
    cdef object _lender                 # the lender's object, which contains the slot
    cdef object __weakref__

    cdef str _name(self)
    cdef bint _is_inherited(self) noexcept
    cdef int _begin(self) except -1
    cdef int _enter(self) except -1
    cdef int _enter_memory(self) except -1
    cdef object _entry_error(self)
    cdef void _leave(self) noexcept
    cdef int _use(self, str verb) except -1
    cdef int _use_memory(self, str verb) except -1
    cdef void _unuse(self) noexcept
    cdef int _enter_owner(self, Affinity affinity, str verb) except -1
    cdef void _leave_owner(self) noexcept
    cdef int _opened(self, str label) except -1
    cdef int _destroy(self) except -1
    cdef void *_verbs_object(self) except NULL
    cdef int _destroy_verb(self) except? -1
    cdef int _borrow(self, capsule, const char *name, owner) except -1
    cdef int _drop_after_lender(self) except -1
    cdef str _destroy_name(self)
    cdef str _users(self)
    cdef str _dependants(self)
    cdef bint _refuses_overlap(self) noexcept
    cdef void _leave_parents(self) noexcept
    cdef int _check(self, str verb, int error) except -1
    cdef object _verb_error(self, str verb, int error, object cause)


cdef class Context(Handle):
    cdef ibv_context *pointer
    cdef verbs_table table
    cdef readonly str name
    cdef readonly int async_fd
    cdef readonly int num_comp_vectors
    cdef readonly bint software
    cdef bint _nonblocking              # whether async_fd is non-blocking
    cdef bint _was_blocking             # whether async_fd was made so here
    cdef object _attributes             # cached device attributes; None if not queried
    cdef dict _ports                    # by port number: raw bytes that `query_port` found last, and their attributes

    cdef int _complete(self) except -1
    cdef int _make_nonblocking(self) except -1
    cdef str _unreachable_reason(self)


cdef class AsyncEvent:
    cdef ibv_async_event event
    cdef readonly object event_type
    cdef readonly Handle element
    cdef readonly object port_num
    cdef Handle _pinned_handle          # element, or context: not destroyed before the acknowledgement
    cdef int _unacknowledged            # 1 or 0, changed by the functions of handles/handle_gate.h


cdef class ProtectionDomain(Handle):
    cdef ibv_pd *pointer
    cdef bint _shared                   # whether memory of other instances may also be used here
    cdef public object lease            # argument of import_pd, or None; set before other code has the domain

    cdef object _take_cause(self)


cdef class MemoryRegion(Handle):
    cdef ibv_mr *pointer
    cdef readonly ProtectionDomain pd
    cdef Py_buffer _buffer
    cdef bint _has_buffer

    cdef void _release(self) noexcept


cdef class MemoryWindow(Handle):
    cdef ibv_mw *pointer
    cdef readonly ProtectionDomain pd
    cdef readonly object mw_type


cdef class XrcDomain(Handle):
    cdef ibv_xrcd *pointer


cdef class AddressHandle(Handle):
    cdef ibv_ah *pointer
    cdef readonly ProtectionDomain pd

    @staticmethod
    cdef object read(ibv_ah_attr *av)


cdef class CompletionChannel(Handle):
    cdef ibv_comp_channel *pointer

    cdef int _create(self, Context context) except -1


cdef class CompletionQueue(Handle):
    cdef ibv_cq *pointer
    cdef ibv_cq_ex *extended_pointer
    cdef readonly CompletionChannel channel
    cdef readonly ProtectionDomain parent_domain
    cdef int _unacknowledged            # events taken, counted by the functions of handles/handle_gate.h
    cdef int _resizing                  # number of resize calls in flight, counted likewise


cdef class SharedReceiveQueue(Handle):
    cdef ibv_srq *pointer
    cdef readonly ProtectionDomain pd
    cdef readonly XrcDomain xrc_domain
    cdef readonly CompletionQueue cq


cdef class QueuePair(Handle):
    cdef ibv_qp *pointer
    cdef int _type
    cdef int _state                     # state that the queue pair was last moved to, or is known to be in
    cdef int _max_rd_atomic             # max_rd_atomic that was last set; valid in RTS
    cdef readonly object qp_type
    cdef readonly ProtectionDomain pd
    cdef readonly CompletionQueue send_cq
    cdef readonly CompletionQueue recv_cq
    cdef readonly SharedReceiveQueue srq
    cdef readonly XrcDomain xrc_domain
    cdef ibv_qp_cap _capabilities       # as the device granted them
    cdef object _pending_change         # weak reference to the Modification that suspends the gate, or None
    cdef list _resume_callbacks         # (loop, callback) to call after that modification

    cdef int _call_when_resumed(self, loop, callback) except -1
    cdef int _notify_resumed(self) except -1
    cdef bint _end_modification(self) except -1
    cdef int _make(self, ibv_qp_init_attr *attr, tuple parts, str verb) except -1
    cdef int _create(self, ibv_qp_init_attr *attr) except? -1
    cdef int _create_in_xrc_domain(self, ibv_qp_init_attr *attr) except? -1
