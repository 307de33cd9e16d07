# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Thin handles of verbs objects, for any provider.

A handle is one object of libibverbs: the constructor creates the object, `destroy` destroys it, and methods are verbs.
No call sleeps, and handles contain no policy. They guarantee lifetimes: a closed handle raises, a parent with open
children refuses to be destroyed before the verb is called, a buffer stays in place while it is registered, and a handle
that was created before a fork is closed in the child. Memory that is given by its address is kept valid by the caller.

Some handles borrow an object that other code created and lends: such a handle calls no verb when it is destroyed. After
the lender has closed the object, the handle, and for a context all handles created from it, can only be destroyed.

Every method, and every constructor for its arguments, raises:

:raises ClosedResourceError: the handle is closed.
:raises BorrowedObjectClosedError: the lender has closed the object.
:raises ForkedProcessError: the handle belongs to the parent process.

Methods that call a verb also raise:

:raises VerbsError: the verb failed; the error has the verb's name and errno (EIO for nearly all verbs after the
    software device is lost).
:raises ConcurrentAccessError: another call is inside an object that takes no locks.

In each of these cases, nothing is done. Docstrings name ClosedResourceError only, since BorrowedObjectClosedError and
ForkedProcessError are subclasses of it.

The ledger refers to every open handle and keeps it alive: dropping a handle leaks it visibly (see `open_handles`), and
never destroys an object that the hardware still uses.
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

from aioverbs._core.handles.library_lock import library_lock
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
    DeviceNotFoundError,
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
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.errno cimport EAGAIN, EBUSY, EINVAL, EIO, ENOSYS, EOPNOTSUPP, EPROTO, errno
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

cimport cython
cimport libc.errno
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

# Open handles by id, in the order of their creation. The ledger changes by single dict operations, which are atomic
# with and without a GIL.
_ledger = {}
_inherited = []


def is_optimized():
    """Return whether this extension was compiled with optimization. A CFLAGS variable may have replaced Python's own
    flags."""
    return <bint>AIOVERBS_OPTIMIZED


def open_handles():
    """Return a new list of the open handles of this process, oldest first. In the child of a fork it is empty at
    first."""
    return list(_ledger.values())


def _forget_inherited():
    # Empty the ledger in the child of a fork, because the objects are the parent's. The child keeps the handles alive,
    # since finalizing them would destroy the parent's objects, but does not count them as leaks of its own.
    _inherited.extend(_ledger.values())
    _ledger.clear()


if fork_count_begin():
    raise MemoryError("pthread_atfork")
os.register_at_fork(after_in_child=_forget_inherited)


# ------------------------------------------------------------------------------------------------------- handles

cdef class Handle:
    """Handle of one verbs object; the base class of all kinds of handles. Handles are made only by the constructors of
    these.

    The gate counts calls in flight and open children; a handle is destroyed only when both are 0.
    """

    def __cinit__(self, *_, **__):
        self._gate = GATE_CLOSED
        self._forks = fork_count

    @property
    def closed(self):
        """Whether the object was destroyed, or the handle was created in the parent process before this one was
        forked."""
        return gate_holders(&self._gate) == GATE_CLOSED or self._is_inherited()

    cdef bint _is_inherited(self) noexcept:
        # Whether the handle belongs to the process that this one was forked from.
        return self._forks != fork_count

    cdef int _begin(self) except -1:
        # Begin a constructor. Raise RuntimeError if __init__ is called again: the first object would be lost.
        if not gate_close(&self._constructor_gate):
            raise RuntimeError(f"{self!r} was created before: call a handle's constructor once")
        return 0

    cdef int _enter(self) except -1:
        # Begin a use that is not a verb call; pair each success with one _leave. Raise the errors of the module's
        # docstring, and BusyResourceError while a modification of a queue pair is pending.
        self._enter_memory()
        if not _is_open_at_lender(self):
            self._leave()
            raise BorrowedObjectClosedError(repr(self))
        return 0

    cdef int _enter_memory(self) except -1:
        # Begin a use that does not involve the provider, otherwise like `_enter`: the object's memory is valid even if
        # its lender has closed it.
        if self._forks != fork_count:
            raise ForkedProcessError(repr(self))
        if not gate_enter(&self._gate):
            raise self._entry_error()
        return 0

    cdef void _leave(self) noexcept:
        gate_leave(&self._gate)

    cdef object _entry_error(self):
        # Return the error to raise for a caller that cannot enter the gate.
        if gate_holders(&self._gate) == GATE_CLOSED:
            return ClosedResourceError(f"{self!r} is closed")
        return BusyResourceError(f"{self!r} is inside a verb that another thread has called: await its change of state")

    def __repr__(self):
        return f"<{self._name()}{' (closed)' if self.closed else ''}>"

    @property
    def verbs_pointer(self):
        """Address of the verbs object, an int: the address of its ``struct ibv_context``, ``struct ibv_pd`` and so on.

        Other code can pass it to verbs that aioverbs lacks. The address is valid until the object is destroyed, which
        does not wait for a verb that other code has called. Like the handle's methods, such verbs may only be called on
        the thread or event loop that owns the object, if there is one.

        :raises ClosedResourceError: the object is closed.
        :raises AffinityError: the object belongs to another thread or event loop.
        :raises ConcurrentAccessError: another call is inside the object or its thread domain.
        :raises BusyResourceError: the object is a queue pair, and a modification of it is pending.
        """
        self._use("verbs_pointer")
        try:
            return <uintptr_t>self._verbs_object()
        finally:
            self._unuse()

    cdef void *_verbs_object(self) except NULL:
        # Return the pointer to the verbs object.
        raise NotImplementedError

    # Begin a verb on the object, named by `verb`; pair each success with one _unuse. A refused call leaves no trace:
    # the object's owner may be destroying the object. Raise the errors of _enter, and those of `Affinity.check`.
    cdef int _use(self, str verb) except -1:
        # Fast path of nearly every call: a call by the owner, in the same run of the loop as the last one, on an object
        # that is not borrowed.
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
        # Begin a verb that only needs the object's memory, otherwise like `_use`: it is allowed even if a lender has
        # closed the object.
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

    # Record the affinity, None if any thread may call, and begin the constructor's verb on its behalf; pair each
    # success with one _leave_owner. Raise the errors of `Affinity.check`.
    cdef int _enter_owner(self, Affinity affinity, str verb) except -1:
        self.affinity = affinity
        if affinity is not None:
            affinity._enter(self, verb)
        return 0

    cdef void _leave_owner(self) noexcept:
        if self.affinity is not None:
            self.affinity._leave()

    cdef str _name(self):
        # Return the text of repr: class, label and device.
        label = f" {self._label}" if self._label else ""
        device = f" of {self.context.name}" if self.context is not None else ""
        return f"{type(self).__name__}{label}{device}"

    cdef int _opened(self, str label) except -1:
        # Enter the handle into the ledger and open it; the last step of each constructor, which cannot fail afterwards.
        # A failure between the verb and this step (a signal handler that raises, memory that runs out) makes the
        # constructor destroy the new object.
        self._label = label
        _ledger[id(self)] = self
        gate_reopen(&self._gate)
        return 0

    cdef int _check(self, str verb, int error) except -1:
        # Raise the error of a verb that returned the errno `error`, positive or negative. Do nothing if it is 0.
        if not error:
            return 0
        if error < 0:
            error = -error                      # as some providers return it
        if error == EBUSY and self._refuses_overlap() and self.context is not None and self.context.software:
            # The software device returns EBUSY only for overlapping calls: children were counted before the verb.
            raise ConcurrentAccessError(
                f"{verb} on <{self._name()}>: another call is inside it or its thread domain; this call was refused"
            )
        raise VerbsError(verb, error)

    cdef object _verb_error(self, str verb, int error, object cause):
        # Return, for the caller to raise, the error of a verb that may have called an allocator: a VerbsError, caused
        # by the allocator's exception if there is one. If that exception is not an Exception, such as
        # KeyboardInterrupt, return it itself.
        if cause is not None and not isinstance(cause, Exception):
            return cause
        failure = VerbsError(verb, error)
        failure.__cause__ = cause
        return failure

    # ---- Borrowed objects

    cdef int _borrow(self, capsule, const char *name, owner) except -1:
        # Record the lender `owner` and its pointer, whose address the capsule contains. Each use compares the lender's
        # own pointer, because nothing else shows that the lender has closed the object. Raise ValueError if the capsule
        # has a name other than `name`.
        self._lender_slot = <void **>PyCapsule_GetPointer(capsule, name)
        self._lent_pointer = self._lender_slot[0]
        self._lender = owner
        return 0

    cdef int _drop_after_lender(self) except -1:
        # Destroy the handle after the lender closed the object: the kernel object is gone, and the provider cannot be
        # called. Return an errno, as _destroy_verb does.
        return 0

    cdef str _dependants(self):
        # Return text that says what keeps the object, if the destroying verb may return EBUSY for a reason other than
        # overlapping calls; None if there is no other reason.
        return None

    cdef bint _refuses_overlap(self) noexcept:
        # Whether calls on the object can overlap inside it or its thread domain, which the software device refuses with
        # EBUSY: true for queues. For other objects EBUSY means that something still refers to the object.
        return False

    cdef int _destroy_verb(self) except? -1:
        # Call the destroying verb and return its errno, positive or negative; 0 on success.
        raise NotImplementedError

    cdef str _destroy_name(self):
        # Return the name of the destroying verb, for messages.
        return "destroy"

    cdef void _leave_parents(self) noexcept:
        # Leave the gates of the handles that the constructor entered, after the object is destroyed.
        pass

    cdef str _users(self):
        # Return text that says what holds the gate. Each event does, because the destroying verb would wait for its
        # acknowledgement, possibly forever.
        if self._async_events:
            return f"{self._async_events} of its asynchronous events were not acknowledged"
        return f"{gate_holders(&self._gate)} open objects or calls use it"

    def destroy(self):
        """Destroy the object, and return None. If the object is borrowed, destroy only the handle: the lender's object
        stays open.

        Do nothing if the object was destroyed before, or if the handle was created in the parent process before a fork.
        The call never waits for an acknowledgement: an event that was taken and not acknowledged counts as a user of
        the object.

        :raises BusyResourceError: a child object is open, another object depends on this one, a call is in flight, or
            an event was not acknowledged; nothing is done.
        :raises VerbsError: the verb failed; the object is still open.
        :raises AffinityError: the object belongs to another thread or event loop; nothing is done.
        :raises ConcurrentAccessError: another call is inside the object or its thread domain; nothing is done.
        :raises ResourceWarning: if warnings are turned into errors, and the object is a context that its lender closed
            before the objects created from it. The handle is closed all the same.
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
        # Do the work of `destroy`, with its errors; the caller has entered the affinity.
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
            warnings.warn(f"{self!r} was closed by its lender before the objects made from it, whose memory leaks",
                          ResourceWarning)
        return 0


cdef inline bint _is_open_at_lender(Handle handle) noexcept:
    # Whether neither the object nor its context was closed by a lender.
    cdef Context context = handle.context
    return (handle._lender_slot == NULL or handle._lender_slot[0] == handle._lent_pointer) and (
        context is None or context._lender_slot == NULL or context._lender_slot[0] == context._lent_pointer
    )


cdef Affinity _common_owner(tuple handles, Affinity affinity):
    # Return the owner of an object made from several handles: the owner of the first of them that has one. Handles
    # without an owner may be used by any thread. Two domains of one loop have the same owner, so that nothing else is
    # ever inside either of them. Return None if no handle has an owner; raise ValueError if two owners differ.
    cdef Affinity other
    for handle in handles:
        other = (<Handle>handle).affinity if handle is not None else None
        if other is None or other is affinity:
            continue
        if affinity is None:
            affinity = other
        elif not affinity._has_same_owner(other):
            raise ValueError(f"{handle!r} belongs to {other!r}, another argument to {affinity!r}")
    return affinity


cdef list _enter_all(tuple handles):
    # Enter the gates of all handles that are not None. Return a list of these, for _leave_all. If one of them cannot be
    # entered, raise its error and enter none.
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


# One extension, since handles use each other's private fields; one file per kind of object.
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
