# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Handles of what only the software device has: its contexts, shared protection domains, peers and fault plan.

The device itself, all of ``soft/``, is compiled into this extension, which alone opens it. Handles and the data path
reach it as any provider: by the ops of its ``struct ibv_context``, and by the table of verbs that its `Context` has.
"""

import atexit
import datetime
import socket

from aioverbs._core.handles.handles import open_handles
from aioverbs.attributes import FaultRecord
from aioverbs.errors import ClosedResourceError, VerbsError
from aioverbs.software_peers import FabricStatistics, Peer, RejectedPeer
from aioverbs.types import AccessFlags, WcStatus

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.number cimport PyNumber_Index
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport EOPNOTSUPP, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
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
    """Close a file descriptor that a stranger sent, in a thread: its last close may take as long as he likes."""
    s.soft_descriptor_discard(descriptor)


def _halt_devices():
    # The end of the interpreter frees registered memory; the device's threads must not write into it any more.
    for handle in open_handles():
        if isinstance(handle, Context):
            try:
                (<Context>handle)._halt()
            except ClosedResourceError:
                pass                            # a daemon thread closes it: then nothing is in flight


if s.soft_watch_forks():
    raise MemoryError("pthread_atfork")
atexit.register(_halt_devices)


cdef class Context(handles.Context):
    """An open software device: made by `open`."""

    @staticmethod
    def open(*, execution="inline", delay_ns=0, address=None, settings=None):
        """Open a software device.

        :param execution: "inline" executes a request in the call that posts it, "thread" in a thread of the device.
        :param delay_ns: with "thread" only: the least time from posting to execution, in nanoseconds.
        :param address: which one: None for "soft0"; else an IP address, 4 or 16 bytes, and a TCP port, by which other
            hosts find it.
        :param settings: `SoftSettings` for its peers in other processes, taken over where no other context of it is
            open; None: as where the environment says nothing of them.
        :raises ValueError: `delay_ns` is negative, or given with "inline"; `execution` or `address` is none.
        :raises VerbsError: with EINVAL where no device can have the address; with what listening there answers, as
            EADDRINUSE; with EMFILE or ENOMEM.
        """
        cdef s.soft_options options
        cdef int error
        cdef s.soft_settings filled
        cdef char why[s.SOFT_WHY]
        cdef Context self = Context.__new__(Context)
        if execution not in ("inline", "thread"):
            raise ValueError(f"`execution` must be 'inline' or 'thread', got {execution!r}")
        if delay_ns < 0 or (delay_ns and execution == "inline"):
            raise ValueError(f"`delay_ns` must be 0, or positive with execution='thread', got {delay_ns}")
        options.mode = s.SOFT_ENGINE if execution == "thread" else s.SOFT_INLINE
        options.delay_ns = delay_ns
        options.why = why
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
        self._enter()
        try:
            with nogil:
                s.soft_halt(self.pointer)
        finally:
            self._leave()
        return 0

    cdef str _unreachable_reason(self):
        cdef char why[s.SOFT_WHY]
        with nogil:
            s.soft_tell_problem(self.pointer, why)
        return _text(why)

    def counts(self):
        """What is alive in the context, by kind, and how many overlapping calls it refused."""
        cdef s.soft_counts counts
        self._enter()
        s.soft_count(self.pointer, &counts)
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
        """What the device has to do with those of other processes: `FabricStatistics`."""
        self._enter()
        try:
            return _fabric(self)
        finally:
            self._leave()

    @property
    def has_fabric(self):
        """Whether the device may have peers in other processes: from the first queue pair that has one."""
        self._enter()
        try:
            return s.soft_has_fabric(self.pointer)
        finally:
            self._leave()

    @property
    def faults(self):
        """The context's `FaultPlan`."""
        self._enter()
        self._leave()
        return FaultPlan.__new__(FaultPlan, self)

    def set_delay(self, uint64_t delay_ns):
        """Change how long after its posting the device's engine executes a request, from here on."""
        self._enter()
        error = s.soft_set_delay(self.pointer, delay_ns)
        self._leave()
        self._check("soft_set_delay", error)


# One extension, since only one can have the device; a file for each thing that a context has.
include "fabric.pxi"
include "sharing.pxi"
include "faults.pxi"
