# cython: language_level=3, freethreading_compatible=True, embedsignature=False
# cython: auto_pickle=False, autotestdict=False
"""Work requests: posting, waiting and completion.

This module is the data path: callers await an `Operation`, a `WorkQueue` posts requests in order, and a `CqDispatcher`
polls a completion queue and passes completions to the awaiting tasks. The resources in the layers above open, own and
close the handles.

Thread safety. Objects with one owner are used by the owner's thread alone, which every entry checks. Objects that any
thread may use are used with the GIL, which this module releases only inside verbs and between two polls; at these
points, and whenever Python code may run, each object is in a consistent state. Without a GIL, each entry enters one
critical section that all such objects share (``critical_section.h``), which is released at the same points: see
`_section`. The exceptions to this rule are:

- `InFlightCount`, which any thread changes, whichever thread owns the queue: each counter has a section of its own;
- the list of operations that wait for a place, since the thread that drops the last reference frees an operation, and
  a garbage collector runs in any thread: see `_Extra`;
- completed operations, which any thread may inspect: the outcome is written before `state` says DONE, and stays;
- `_requests` of an object that posts, and `QpWorkState.broken`, which change while other threads read them: each object
  has a section of its own.
"""

import asyncio
import collections
import logging
import struct
import sys
import types
import weakref
from collections.abc import Coroutine

from anyio import WouldBlock

from aioverbs._exports import defined_in
from aioverbs.errors import (
    AffinityError,
    BatchError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceRemovedError,
    BorrowedObjectClosedError,
    QueuePairStateError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.types import QpState, SendOpcode, WcOpcode, WcStatus

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject, PyTypeObject
from cpython.pyport cimport PY_SSIZE_T_MAX
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EBUSY, EINVAL, EIO, ENODEV
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

cimport cython
cimport aioverbs._core.abi.libibverbs as v
from aioverbs._core.handles.handles cimport (
    AddressHandle,
    Affinity,
    CompletionQueue,
    Handle,
    MemoryRegion,
    MemoryWindow,
    ProtectionDomain,
    QueuePair,
    SharedReceiveQueue,
)
from aioverbs._core.public_names cimport publish

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from "data_path/wr_id_table.h" nogil:
    enum:
        SLOTS_ELEMENTS
    uint64_t SLOTS_RECEIVE
    uint64_t SLOTS_SHARED

    struct slot:
        void *work

    struct slots:
        slot *at
        uint32_t size

    void slots_begin(slots *)
    void slots_end(slots *)
    uint64_t slots_take(slots *, void *work, uint64_t kind)
    void *slots_find(const slots *, uint64_t number)
    void slots_give(slots *, uint64_t number)
    uint32_t slots_element(uint64_t number)
    uint64_t slots_with_element(uint64_t number, uint32_t element)

cdef extern from "data_path/loop_budget.h" nogil:
    struct turn:
        uint64_t number
        uint64_t spun
    turn turn_now
    uint64_t turn_clock()
    void turn_advance(uint64_t number)
    struct turn_share:
        pass
    void turn_join(turn_share *)
    uint64_t turn_spend(uint32_t units)
    void turn_note_sleep()
    bint turn_is_over(turn_share *, uint32_t units, uint64_t bytes)
    uint64_t turn_used_up(const turn_share *)

cdef extern from "data_path/spin_estimate.h" nogil:
    struct spin_estimate:
        bint idle
    void spin_estimate_begin(spin_estimate *)
    uint32_t spin_budget(const spin_estimate *)
    void spin_note_polled(spin_estimate *, uint64_t waited_ns)
    void spin_note_asleep(spin_estimate *, uint64_t waited_ns, bint slept)
    const uint64_t SLEEPS_UNKNOWN
    uint64_t thread_sleeps()
    void spinner_note(uint64_t until)
    bint spinner_begin(uint64_t now, uint64_t until, uint32_t processors)

cdef extern from "data_path/cq_poll.h" nogil:
    int poll_take(v.ibv_cq *, v.ibv_cq_ex *, int wanted, v.ibv_wc *)
    int poll_spin(v.ibv_cq *, v.ibv_cq_ex *, int wanted, v.ibv_wc *, uint64_t until)

cdef extern from "handles/critical_section.h":
    const bint FREE_THREADED
    struct section:
        pass
    void section_enter(section *, PyObject *of) noexcept
    void section_leave(section *) noexcept
    struct finalizer_lock:
        pass
    void finalizer_lock_begin(finalizer_lock *) noexcept
    void finalizer_lock_acquire(finalizer_lock *) noexcept
    void finalizer_lock_release(finalizer_lock *) noexcept
    object weak_reference(object)
    PyObject *weak_to_strong(PyObject *weak, PyObject *) noexcept
    uint8_t byte_read(const uint8_t *) noexcept
    void byte_write(uint8_t *, uint8_t) noexcept

cdef extern from "data_path/work_request.h" nogil:
    enum:
        REQUEST_SGES

    struct request:
        v.ibv_send_wr send
        v.ibv_recv_wr receive           # begins like ibv_send_wr
        v.ibv_sge sge[2]

    void request_begin(request *)
    void request_move(request *to, const request *from_)
    request *request_grow(request *, size_t count, size_t size)

cdef extern from "data_path/am_send.h":
    ctypedef int (*send_function)(PyObject *, PyObject *, PyObject **) except -1
    int set_am_send(PyTypeObject *, send_function)
    enum:
        PYGEN_RETURN
        PYGEN_NEXT

# The software device executes a request inside the verb that posts it. For messages of this size or more, that takes
# longer than releasing and reacquiring the GIL, and other threads may want to run in the meantime.
cdef uint64_t RELEASE_GIL_BYTES = 1 << 20

_log = logging.getLogger("aioverbs")

cdef enum:
    POLL_BATCH = 16                 # completions per poll
    MAX_DRAIN = 256                 # completions per round of the dispatcher

cdef enum state:
    NEW                             # of an Operation
    WAITING                         # waits for a place in its queue
    CHAINED                         # has a place, and is posted at the end of the turn
    POSTED
    DONE

cdef enum phase:
    NOT_AWAITED                     # phases of an await
    YIELDING                        # the operation is done; other tasks run first
    BEGINNING                       # the await is about to suspend
    SUSPENDED
    FINISHED
    IN_BATCH                        # part of a batch, which is awaited instead

cdef enum:                          # values instead of an index in scratch memory
    UNUSED = -1
    WANTED = -2
    BY_ELEMENTS = -3                # of a batch: some of its operations want scratch memory

cdef enum:
    SUCCESS = 0                     # enum ibv_wc_status
    FLUSHED = 5
    SIGNALED = 2                    # enum ibv_send_flags
    SOLICITED = 4
    FENCE = 1
    INLINE = 8
    GRH = 40                        # bytes of the global routing header, before a datagram
    MAX_MESSAGE_BYTES = 0x7FFFFFFF  # size limit of a message

cdef class Operation
cdef class Inbox
cdef class ReceiveRing
cdef class UnreadMessages
cdef class WorkQueue
cdef class CqDispatcher
cdef class QpWorkState
cdef class SendVerbs

cdef list _of_all = []                  # the object whose section all users of unbound objects enter
cdef PyObject *_section_of_all = <PyObject *>_of_all
Py_INCREF(_of_all)                      # outlives the module's variables, which go before the last finalizers run

cdef object _broken(str text, object cause):
    # Return the error of a broken object, for the caller to raise: a DeviceRemovedError if the device was removed, a
    # BrokenResourceError if the object can be recreated.
    kind = DeviceRemovedError if isinstance(cause, DeviceRemovedError) else BrokenResourceError
    broken = kind(text)
    broken.__cause__ = cause
    return broken


# One extension, since the classes use each other's private fields; one file per concept.

include "region_slice.pxi"
include "operation.pxi"
include "queue.pxi"
include "cq_dispatcher.pxi"
include "posting.pxi"
include "batch.pxi"
include "inbox.pxi"
include "receive_ring.pxi"
include "credits.pxi"
include "frame_sender.pxi"
include "frames.pxi"
include "loop_budget.pxi"

publish(defined_in(__name__), globals())
