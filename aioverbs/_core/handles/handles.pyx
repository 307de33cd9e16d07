# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Thin handles over verbs objects, for any provider.

A handle is one object of the verbs: its constructor creates it, `destroy` destroys it, methods are verbs. Nothing
here sleeps, and no policy lives here. What it does guarantee is the lifetime of everything: a closed handle raises, a
parent with open children is refused before the verb, a buffer stays where it is as long as it is registered, and a
handle that was made before a fork is closed in the child. Addresses given as numbers are the caller's to keep good.
Some handles stand for what somebody else made and lends: they call no verb at their end. Once the lender closed it,
they and, where it was the context, all handles of that only come to their end.

Every method of a handle, and every constructor for what it is given, raises `ClosedResourceError` where the handle is
closed, `BorrowedObjectClosedError` where what was lent is, and `ForkedProcessError` in the child of a fork. Where a verb
is called, `VerbsError` has its name and errno (EIO for nearly all of them once the software device is lost), and
`ConcurrentAccessError` tells of another call inside of an object that takes no locks. In each of these cases nothing
was done. Docstrings say what is particular.

An open handle is in the ledger, which keeps it alive: forgetting one leaks it, visibly (`open_handles`), and never
destroys an object that the hardware still works with.
"""

import contextlib
import fcntl
import importlib
import os
import resource
import socket
import sys
import threading
import warnings
import weakref

from aioverbs._exports import defined_in
from aioverbs.attributes import (
    AddressVector,
    DeviceAttributes,
    PortAttributes,
    QpAttributes,
    QpCapabilities,
    SrqAttributes,
)
from aioverbs.errors import (
    AffinityError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    ForkedProcessError,
    BorrowedObjectClosedError,
    LibraryNotFoundError,
    VerbsError,
)
from aioverbs.types import (
    AccessFlags,
    AtomicCap,
    EventType,
    LinkLayer,
    Mtu,
    MwType,
    PortState,
    QpState,
    QpType,
)

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.errno cimport EAGAIN, EBUSY, EINVAL, EIO, EOPNOTSUPP, errno
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

cimport cython
cimport aioverbs._core.abi.libibverbs as v
from aioverbs._core.public_names cimport publish

cdef extern from "handles/thread_id.h":
    struct affinity_thread:
        uint64_t number
    int affinity_thread_prepare()
    affinity_thread *affinity_thread_self()
    affinity_thread *affinity_thread_remember(affinity_thread *thread)
    void affinity_thread_forget(affinity_thread *thread)
    void affinity_thread_end(void *record)
    bint affinity_thread_ended(const affinity_thread *thread)
    bint affinity_claim(int *inside)
    void affinity_yield(int *inside)

cdef extern from "handles/fork_count.h":
    uint32_t fork_count
    int fork_count_begin()

cdef extern from *:
    """
    #ifdef __OPTIMIZE__
    #define AIOVERBS_OPTIMIZED 1
    #else
    #define AIOVERBS_OPTIMIZED 0
    #endif
    """
    const bint AIOVERBS_OPTIMIZED

cdef extern from "handles/critical_section.h":
    struct section:
        pass
    void section_enter(section *, PyObject *of) noexcept
    void section_leave(section *) noexcept

cdef extern from "handles/running_loop.h":
    int running_loop_prepare()
    PyObject *running_loop_run()
    uint64_t running_loop_version()

# ---------------------------------------------------------------------------------------------------- the ledger

# Open handles by their id, in the order of their making. Changed by single dict operations, which are atomic with and
# without a GIL.
_ledger = {}
_inherited = []


def is_optimized():
    """Whether the compiler optimized this extension: CFLAGS that are set take the place of Python's own."""
    return <bint>AIOVERBS_OPTIMIZED


def open_handles():
    """The handles of this process that are open, oldest first."""
    return list(_ledger.values())


def _forget_inherited():
    # In the child of a fork: the objects are the parent's. The handles are kept, since finalising one is not for the
    # child to do either, but they are not the child's leaks.
    _inherited.extend(_ledger.values())
    _ledger.clear()


if fork_count_begin():
    raise MemoryError("pthread_atfork")
os.register_at_fork(after_in_child=_forget_inherited)


# ------------------------------------------------------------------------------------------------------- handles

cdef class Handle:
    """One verbs object.

    The gate counts the calls under way and the open children; a handle is destroyed only when both are none.
    """

    def __cinit__(self, *_, **__):
        self._gate = GATE_CLOSED
        self._forks = fork_count

    @property
    def closed(self):
        """Whether it was destroyed, or belongs to the process that this one was forked from."""
        return gate_holders(&self._gate) == GATE_CLOSED or self._is_inherited()

    cdef bint _is_inherited(self) noexcept:
        # Whether it belongs to the process that this one was forked from.
        return self._forks != fork_count

    cdef int _begin(self) except -1:
        # Each constructor begins here: one that ran twice would lose the object that it made first.
        if not gate_close(&self._constructor_gate):
            raise RuntimeError(f"{self!r} was made before: a handle is one object, once")
        return 0

    cdef int _enter(self) except -1:
        # Every use passes here; each success is followed by one _leave.
        self._enter_memory()
        if not _is_open_at_lender(self):
            self._leave()
            raise BorrowedObjectClosedError(repr(self))
        return 0

    cdef int _enter_memory(self) except -1:
        # The same for what asks nothing of the provider: the object's memory is there, whatever its lender did.
        if self._forks != fork_count:
            raise ForkedProcessError(repr(self))
        if not gate_enter(&self._gate):
            raise self._entry_error()
        return 0

    cdef void _leave(self) noexcept:
        gate_leave(&self._gate)

    cdef object _entry_error(self):
        # For who is not let in.
        if gate_holders(&self._gate) == GATE_CLOSED:
            return ClosedResourceError(f"{self!r} is closed")
        return BusyResourceError(f"{self!r} is in a verb that another thread waits for: await what moves it first")

    def __repr__(self):
        return f"<{self._name()}{' (closed)' if self.closed else ''}>"

    # Verbs on the object pass here instead, by their names; each success is followed by one _unuse. Who is not let in
    # leaves no trace: its owner may destroy the object meanwhile.
    cdef int _use(self, str verb) except -1:
        # The way of nearly every call first: its owner's, in the run of the loop that was seen last, with what is ours.
        if (
            self._forks == fork_count and self.affinity is not None
            and _is_unchanged_owner(self.affinity._thread, self.affinity._inside, self.affinity._version)
            and self._lender_slot == NULL and self.context is not None and self.context._lender_slot == NULL
            and gate_enter(&self._gate)
        ):
            self.affinity._inside = 1
            self.affinity._verb = <PyObject *>verb
            return 0
        self._use_memory(verb)
        if not _is_open_at_lender(self):
            self._unuse()
            raise BorrowedObjectClosedError(repr(self))
        return 0

    cdef int _use_memory(self, str verb) except -1:
        if self._forks != fork_count:
            raise ForkedProcessError(repr(self))
        if self.affinity is not None:
            self.affinity._enter(self, verb)
        if not gate_enter(&self._gate):
            if self.affinity is not None:
                self.affinity._leave()
            raise self._entry_error()
        return 0

    cdef void _unuse(self) noexcept:
        gate_leave(&self._gate)
        if self.affinity is not None:
            self.affinity._leave()

    # A constructor's verb, on behalf of those that it belongs to; each success is followed by one _leave_owner.
    cdef int _enter_owner(self, Affinity affinity, str verb) except -1:
        self.affinity = affinity
        if affinity is not None:
            affinity._enter(self, verb)
        return 0

    cdef void _leave_owner(self) noexcept:
        if self.affinity is not None:
            self.affinity._leave()

    cdef str _name(self):
        label = f" {self._label}" if self._label else ""
        device = f" of {self.context.name}" if self.context is not None else ""
        return f"{type(self).__name__}{label}{device}"

    cdef int _opened(self, str label) except -1:
        # The last step of each constructor, which cannot fail any more after it. Whatever fails between the verb and
        # here (a signal handler may raise, memory may run out) makes the constructor destroy what the verb made.
        self._label = label
        _ledger[id(self)] = self
        gate_reopen(&self._gate)
        return 0

    cdef int _check(self, str verb, int error) except -1:
        if not error:
            return 0
        if error < 0:
            error = -error                      # some providers have it so
        if error == EBUSY and self._refuses_overlap() and self.context is not None and self.context.software:
            # The software device answers so only to calls that overlap: children were counted before the verb.
            raise ConcurrentAccessError(
                f"{verb} on <{self._name()}>: another call is inside of it or its thread domain; this one was refused"
            )
        raise VerbsError(verb, error)

    cdef object _verb_error(self, str verb, int error, object cause):
        # What is raised for a verb that may have asked an allocator, and failed: its error, by what the allocator
        # raised, if anything. What is no Exception, as a KeyboardInterrupt, only came by there, and goes on as itself.
        if cause is not None and not isinstance(cause, Exception):
            return cause
        failure = VerbsError(verb, error)
        failure.__cause__ = cause
        return failure

    # ---- What is lent

    cdef int _borrow(self, capsule, const char *name, owner) except -1:
        # The lender's own pointer is looked at on every use: it is how the lender's end is seen, which nobody tells.
        self._lender_slot = <void **>PyCapsule_GetPointer(capsule, name)
        self._lent_pointer = self._lender_slot[0]
        self._lender = owner
        return 0

    cdef int _drop_after_lender(self) except -1:
        # Its end where the lender was first: in the kernel it is gone, and the provider cannot be asked any more.
        return 0

    cdef str _dependants(self):
        # What keeps the object, where the destroying verb answers EBUSY and no overlapping call can be meant.
        return None

    cdef bint _refuses_overlap(self) noexcept:
        # Whether calls on it may meet inside of it or its thread domain, which the software device refuses with EBUSY:
        # so it is with queues. Of all else EBUSY says that something refers to it.
        return False

    cdef int _destroy_verb(self) except? -1:
        raise NotImplementedError

    cdef str _destroy_name(self):
        return "destroy"

    cdef void _leave_parents(self) noexcept:
        pass

    cdef str _users(self):
        # Each event holds the gate: the verb would wait for it, for ever where nobody acknowledges.
        if self._async_events:
            return f"{self._async_events} of its asynchronous events were not acknowledged"
        return f"{gate_holders(&self._gate)} open objects or calls use it"

    def destroy(self):
        """Destroy the object. Nothing happens where that was done already, or where it belongs to another process.

        It never waits for an acknowledgement: an event that was taken and not acknowledged is a user of the object.

        :raises BusyResourceError: something made from it is open, a call is under way, or an event of it was not
            acknowledged; nothing was done.
        :raises VerbsError: the verb failed; the object is still open.
        :raises AffinityError: it belongs to another thread or event loop; nothing was done.
        """
        if self.closed:
            return
        if self.affinity is not None:
            self.affinity._enter(self, self._destroy_name())
        try:
            self._destroy()
        finally:
            if self.affinity is not None:
                self.affinity._leave()

    cdef int _destroy(self) except -1:
        cdef int error
        if not gate_close(&self._gate):
            if gate_holders(&self._gate) == GATE_CLOSED:
                return 0                        # another thread was faster
            if gate_holders(&self._gate) < 0:
                raise self._entry_error()
            raise BusyResourceError(f"{self!r} cannot be destroyed: {self._users()}; end those first")
        there = _is_open_at_lender(self)
        try:
            error = self._destroy_verb() if there else self._drop_after_lender()
            if abs(error) == EBUSY and self._dependants() is not None:
                raise BusyResourceError(f"{self!r} cannot be destroyed: {self._dependants()}")
            self._check(self._destroy_name(), error)
        except BaseException:
            gate_reopen(&self._gate)
            raise
        self._leave_parents()
        del _ledger[id(self)]
        self._lender_slot, self._lender = NULL, None
        if not there and self.context is self:
            warnings.warn(f"{self!r} was closed by its user before what was made from it, of which memory leaks",
                          ResourceWarning)
        return 0


cdef inline bint _is_open_at_lender(Handle handle) noexcept:
    # Neither it nor its context was closed by who lent it.
    cdef Context context = handle.context
    return (handle._lender_slot == NULL or handle._lender_slot[0] == handle._lent_pointer) and (
        context is None or context._lender_slot == NULL or context._lender_slot[0] == context._lent_pointer
    )


cdef Affinity _common_owner(tuple handles, Affinity affinity):
    # What is made of several handles belongs to the first one's owner among them; those without one are anyone's. Two
    # domains of one loop have one owner: it alone is ever inside of either.
    cdef Affinity other
    for handle in handles:
        other = (<Handle>handle).affinity if handle is not None else None
        if other is None or other is affinity:
            continue
        if affinity is None:
            affinity = other
        elif not affinity._has_same_owner(other):
            raise ValueError(f"{handle!r} belongs to {other!r}, and something else to {affinity!r}")
    return affinity


cdef list _enter_all(tuple handles):
    entered = []
    try:
        for handle in handles:
            if handle is not None:
                (<Handle>handle)._enter()
                entered.append(handle)
    except BaseException:
        _leave_all(entered)
        raise
    return entered


cdef void _leave_all(list handles):
    for handle in handles:
        (<Handle>handle)._leave()


# One extension, since handles use each other's insides; a file per kind of object.
include "affinity.pxi"
include "context.pxi"
include "events.pxi"
include "memory.pxi"
include "window.pxi"
include "address.pxi"
include "xrc.pxi"
include "completion.pxi"
include "shared_receive.pxi"
include "queue_pair.pxi"

publish(defined_in(__name__), globals())
