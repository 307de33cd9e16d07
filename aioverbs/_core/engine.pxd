# What other extensions of the core build on: handles and their pointers.

from libc.stdint cimport uint32_t

from aioverbs._core.verbs cimport (
    ibv_comp_channel,
    ibv_context,
    ibv_cq,
    ibv_cq_ex,
    ibv_mr,
    ibv_pd,
    ibv_qp,
    verbs_table,
)


cdef class Handle:
    cdef int _gate                      # handle_gate.h
    cdef int _unmade                    # a gate, too: the constructor closes it
    cdef uint32_t _forks                # soft_fork_count() when it was made
    cdef str _label                     # for repr, which must not look at the object itself
    cdef readonly Context context
    cdef object __weakref__

    cdef str _name(self)
    cdef int _begin(self) except -1
    cdef int _enter(self) except -1
    cdef void _leave(self) noexcept
    cdef int _opened(self, str label) except -1
    cdef int _destroy_verb(self) except? -1
    cdef str _destroy_name(self)
    cdef str _users(self)
    cdef void _leave_parents(self) noexcept
    cdef int _check(self, str verb, int error) except -1


cdef class Context(Handle):
    cdef ibv_context *pointer
    cdef verbs_table table
    cdef readonly str name
    cdef readonly int async_fd
    cdef readonly int num_comp_vectors
    cdef readonly bint software
    cdef object _owner

    cdef int _halt(self) except -1


cdef class ProtectionDomain(Handle):
    cdef ibv_pd *pointer

    cdef object _take_cause(self)


cdef class MemoryRegion(Handle):
    cdef ibv_mr *pointer
    cdef readonly ProtectionDomain pd
    cdef Py_buffer _buffer
    cdef bint _has_buffer

    cdef void _release(self) noexcept


cdef class CompletionChannel(Handle):
    cdef ibv_comp_channel *pointer


cdef class CompletionQueue(Handle):
    cdef ibv_cq *pointer
    cdef ibv_cq_ex *extended_pointer
    cdef readonly CompletionChannel channel
    cdef readonly ProtectionDomain parent_domain
    cdef int _unacknowledged            # events taken, counted by the functions of handle_gate.h

    cdef list _poll(self, int count)


cdef class WorkCompletion:
    cdef readonly object wr_id
    cdef readonly object status
    cdef readonly int opcode
    cdef readonly uint32_t vendor_err
    cdef readonly uint32_t byte_len
    cdef readonly uint32_t imm_data
    cdef readonly uint32_t qp_num
    cdef readonly uint32_t src_qp
    cdef readonly unsigned int wc_flags


cdef class QueuePair(Handle):
    cdef ibv_qp *pointer
    cdef readonly ProtectionDomain pd
    cdef readonly CompletionQueue send_cq
    cdef readonly CompletionQueue recv_cq
    cdef readonly object capabilities
