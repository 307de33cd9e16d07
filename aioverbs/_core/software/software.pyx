# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Handles of features that only the software device has: contexts, shared protection domains, peers and fault plan.

The device itself, all of ``soft/``, is compiled into this extension, and only this extension opens it. Handles and the
data path use it like any provider: through the ops of its ``struct ibv_context``, and through the table of verbs in its
`Context`.
"""

import atexit
import datetime
import socket

from aioverbs._core.handles.handles import open_handles
from aioverbs.attributes import FaultRecord
from aioverbs.errors import ClosedResourceError, VerbsError
from aioverbs.software_peers import FabricStatistics, Peer, RejectedPeer
from aioverbs.types import AccessFlags, WcStatus

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.number cimport PyNumber_Index
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport EOPNOTSUPP, errno
from libc.stdint cimport UINT32_MAX, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

cimport aioverbs._core.abi.libibverbs as v
cimport aioverbs._core.handles.handles as handles
cimport aioverbs._core.software.soft as s
from aioverbs._core.handles.handles cimport (
    CompletionQueue,
    Handle,
    MemoryRegion,
    ProtectionDomain,
    QueuePair,
    SharedReceiveQueue,
)


def discard_descriptor(int descriptor):
    """Close a file descriptor that another process sent, in a thread of its own, because closing it may block for as
    long as that process likes. Return immediately, possibly before the descriptor is closed. Never fails.

    :param descriptor: the file descriptor; nothing is done if it is negative.
    """
    s.soft_descriptor_discard(descriptor)


def _halt_devices():
    """Stop the threads of all open software devices. This is called when the interpreter shuts down."""
    # The interpreter frees registered memory when it shuts down; the device's threads must no longer write to it then.
    for handle in open_handles():
        if isinstance(handle, Context):
            try:
                (<Context>handle)._halt()
            except ClosedResourceError:
                pass                            # a daemon thread has closed the context: no request is in flight


if s.soft_watch_forks():
    raise MemoryError("pthread_atfork")
atexit.register(_halt_devices)


cdef class Context(handles.Context):
    """Open software device. Made by `open`."""

    @staticmethod
    def open(*, execution="inline", delay_ns=0, address=None, settings=None):
        """Open a software device.

        :param execution: "inline" to execute a request in the call that posts it, "thread" to execute it in a worker
            thread of the device.
        :param delay_ns: minimum time from posting to execution, in nanoseconds; only for "thread".
        :param address: address of the device: None for "soft0", or a tuple of an IP address (4 or 16 bytes) and a TCP
            port, at which other hosts find it; for IPv4, 0 for a port that the system chooses.
        :param settings: `SoftSettings` for peers in other processes, which take effect if no other context of the
            device is open; None for the defaults, as with an empty environment.
        :returns: a new `Context`; the caller destroys it.
        :raises ValueError: `execution` is neither of the two, `delay_ns` is negative or given with "inline", the IP
            address is not 4 or 16 bytes long, or `settings` exceed the limits of the device.
        :raises OverflowError: the port is not in 0..65535, or `delay_ns` exceeds 2**64-1.
        :raises VerbsError: with EINVAL if no device can have the address; with the error of listening at the address,
            such as EADDRINUSE; with EMFILE or ENOMEM if no descriptor or memory is left.
        """
        cdef s.soft_options options
        cdef int error
        cdef s.soft_settings filled
        cdef char why[s.SOFT_ERROR_TEXT]
        cdef Context self = Context.__new__(Context)
        if execution not in ("inline", "thread"):
            raise ValueError(f"`execution` must be 'inline' or 'thread', got {execution!r}")
        if delay_ns < 0 or (delay_ns and execution == "inline"):
            raise ValueError(f"`delay_ns` must be 0, or positive with execution='thread', got {delay_ns}")
        options.mode = s.SOFT_THREAD if execution == "thread" else s.SOFT_INLINE
        options.delay_ns = delay_ns
        options.error_text = why
        options.settings = NULL
        _fill_address(&options.address, address)
        if settings is not None:
            _fill_settings(&filled, settings)
            options.settings = &filled
        with nogil:
            self.pointer = s.soft_open(&options)
            error = errno
        if not self.pointer:
            raise VerbsError("ibv_open_device", error, _text(why) or None)
        self.table = s.soft_verbs
        self.software = True
        self.context = self
        self._read_device_fields()
        self._opened("")
        return self

    cdef int _halt(self) except -1:
        # Stop the device's threads, which then no longer write to registered memory. Raise ClosedResourceError if the
        # context is closed.
        self._enter()
        try:
            with nogil:
                s.soft_halt(self.pointer)
        finally:
            self._leave()
        return 0

    cdef str _unreachable_reason(self):
        # Return text that says why peers cannot find the device; empty if they can.
        cdef char why[s.SOFT_ERROR_TEXT]
        with nogil:
            s.soft_get_fabric_error(self.pointer, why)
        return _text(why)

    def counts(self):
        """Count the open objects of each kind in the context, and the overlapping calls that the context refused.

        :returns: a dict of numbers by name: ``"pds"``, ``"parent_domains"``, ``"thread_domains"``, ``"xrc_domains"``,
            ``"mrs"``, ``"mws"``, ``"ahs"``, ``"channels"``, ``"cqs"``, ``"srqs"`` and ``"qps"`` for the objects,
            ``"overlaps"`` for the refused calls.
        :raises ClosedResourceError: the context is closed.
        """
        cdef s.soft_counts counts
        self._enter()
        s.soft_get_counts(self.pointer, &counts)
        self._leave()
        return {
            "pds": counts.pds,
            "parent_domains": counts.parent_domains,
            "thread_domains": counts.thread_domains,
            "xrc_domains": counts.xrcds,
            "mrs": counts.mrs,
            "mws": counts.mws,
            "ahs": counts.ahs,
            "channels": counts.channels,
            "cqs": counts.cqs,
            "srqs": counts.srqs,
            "qps": counts.qps,
            "overlaps": counts.overlaps,
        }

    def fabric(self):
        """Return a new `FabricStatistics` for the device's links to other processes.

        :raises ClosedResourceError: the context is closed.
        :raises MemoryError: there is not enough memory for a copy of the statistics.
        """
        self._enter()
        try:
            return _fabric(self)
        finally:
            self._leave()

    @property
    def has_fabric(self):
        """Whether the device may have peers in other processes: True once a queue pair has been connected to such a
        peer.

        :raises ClosedResourceError: the context is closed.
        """
        self._enter()
        try:
            return s.soft_has_fabric(self.pointer)
        finally:
            self._leave()

    @property
    def faults(self):
        """The `FaultPlan` of the context; every use returns a new object for the same plan.

        :raises ClosedResourceError: the context is closed.
        """
        self._enter()
        self._leave()
        return FaultPlan.__new__(FaultPlan, self)

    def set_delay(self, uint64_t delay_ns):
        """Change the delay with which the device's worker thread executes requests from now on.

        :param delay_ns: minimum time from posting a request to its execution, in nanoseconds.
        :raises ClosedResourceError: the context is closed.
        :raises OverflowError: `delay_ns` is not in 0..2**64-1.
        :raises VerbsError: with EINVAL if the context executes requests inline, without a worker thread.
        """
        self._enter()
        error = s.soft_set_delay(self.pointer, delay_ns)
        self._leave()
        self._check("soft_set_delay", error)


# One extension, since only one can contain the device; one file for each feature of a context.
include "fabric.pxi"
include "sharing.pxi"
include "faults.pxi"
