# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Allocators of memory for queues, doorbell records and buffers, which work in C without the GIL (alloc.h)."""

import glob
import os
import warnings
from types import MappingProxyType

from aioverbs._exports import defined_in
from aioverbs.attributes import AllocatorStatistics, AllocatorUsage, ResourceKind

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.errno cimport EEXIST, EINVAL, ENODEV, ENOSYS, ENXIO, EOPNOTSUPP, EPERM
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free as c_free
from libc.stdlib cimport malloc as c_malloc

cimport cython

from aioverbs._core.abi.libibverbs cimport IBV_ALLOCATOR_USE_DEFAULT
from aioverbs._core.public_names cimport publish

cdef extern from "alloc/alloc.h" nogil:
    struct alloc_source:
        pass

    struct alloc_area:
        pass

    struct alloc_counts:
        size_t pieces, mappings, mapped_bytes, huge_bytes, bound_bytes, bookkeeping_bytes

    enum alloc_step:
        ALLOC_NOTHING
        ALLOC_ARGUMENTS
        ALLOC_MAP
        ALLOC_MAP_HUGE
        ALLOC_DONT_FORK
        ALLOC_BIND
        ALLOC_AREA
        ALLOC_BOOKKEEPING

    struct alloc_failure:
        alloc_step step
        int error
        size_t size, page_bytes
        int node

    struct alloc_usage:
        uint64_t resource_type
        size_t pieces, bytes, peak_pieces, peak_bytes
        uint64_t allocations, defaults, failures

    enum:
        ALLOC_BASE_PAGES
        ALLOC_ANY_NODE
        ALLOC_MAX_NODES

    int alloc_watch_forks()
    const alloc_failure *alloc_last_failure()
    void alloc_clear_failure()
    void *alloc_piece(void *source, size_t size, size_t alignment, uint64_t resource_type) noexcept
    int alloc_return(alloc_source *source, void *address, uint64_t resource_type)
    void alloc_free(void *source, void *address, uint64_t resource_type) noexcept
    void alloc_count(alloc_source *source, alloc_counts *counts)
    size_t alloc_release(alloc_source *source)
    alloc_source *alloc_default_create()
    alloc_source *alloc_pages_create(size_t page_bytes, int node, bint strict)
    alloc_source *alloc_arena_create(alloc_source *under, size_t chunk_bytes, size_t unit_bytes)
    alloc_source *alloc_area_create(const alloc_area *area)
    void alloc_area_close(alloc_source *source)
    alloc_source *alloc_tiers_create(alloc_source **tiers, size_t count)
    alloc_source *alloc_recording_create(alloc_source *inner)
    int alloc_recording_note(alloc_source *recording, const void *address, size_t size, uint64_t resource_type)
    void alloc_recording_without(alloc_source *recording, uint64_t resource_type, bint use_default)
    size_t alloc_recording_usage(alloc_source *recording, alloc_usage *usages, size_t room)

cdef enum:
    UNIT_BYTES = 64                     # a cache line: see alloc/arena.c
    CHUNK_BYTES = 1 << 18               # 10,000 doorbell records take three; with their trees less than 1 MiB
    HUGE_UNIT_BYTES = 1 << 16
    TWO_MIB = 1 << 21


class UseDefault:
    """The type of `USE_DEFAULT`, its only instance."""

    __slots__ = ()

    def __repr__(self):
        return "USE_DEFAULT"

    def __reduce__(self):
        return "USE_DEFAULT"


USE_DEFAULT = UseDefault()

if alloc_watch_forks():
    raise MemoryError("pthread_atfork")


include "failures.pxi"


cdef alloc_source *_source_of(NativeAllocator allocator) except NULL:
    # Return the allocator's source. Raise TypeError if the allocator was not made by a constructor of this module.
    if not allocator.source:
        raise TypeError(f"{allocator!r} was not made by one of aioverbs' own classes")
    return <alloc_source *>allocator.source


cdef void _warn(size_t pieces) noexcept:
    # Warn that an allocator was dropped while pieces were allocated from it. If warnings are turned into errors, this
    # one is reported to sys.unraisablehook. While the interpreter shuts down, globals become None.
    if warnings is not None:
        count = f"{pieces} pieces" if pieces > 1 else "a piece"
        warnings.warn(f"an allocator was dropped with {count} allocated: their memory leaks", ResourceWarning)


cdef class NativeAllocator:
    """Base class of the allocators that work in C: providers call them without the GIL.

    An allocated piece stays valid until it is freed, even if the allocator object is dropped. The child of a fork finds
    the allocator empty, as if it were new, and has none of the parent's pieces.
    """

    def __init__(self):
        raise TypeError("NativeAllocator is a base class: use SharedPageAllocator, ArenaAllocator or another subclass")

    def __dealloc__(self):
        cdef size_t kept
        if self.source:
            kept = alloc_release(<alloc_source *>self.source)
            if kept:
                _warn(kept)

    cdef int _begin(self, void *source) except -1:
        # Record the allocator's new source; the last step of each constructor. Raise OSError or MemoryError if the
        # source could not be created, so that `source` is NULL. Raise RuntimeError if __init__ is called again: the
        # allocated pieces would be lost.
        if not source:
            _raise_failure()
        if self.source:
            alloc_release(<alloc_source *>source)
            raise RuntimeError(f"{self!r} was created before: call its constructor once")
        self.source = source
        self.alloc = alloc_piece
        self.free_piece = alloc_free
        return 0

    cdef object _failure(self):
        # Return this thread's last failure as an exception, and clear it; None if there is none.
        return _take_failure()

    @property
    def native(self):
        """Whether providers call the allocator in C, without the GIL. False only for a `RecordingAllocator` around an
        allocator written in Python."""
        return self.alloc != NULL

    @property
    def c_functions(self):
        """Addresses of the C functions ``alloc`` and ``free`` and of their first argument, a tuple of three ints, for
        other native code.

        ``void *alloc(void *self, size_t size, size_t alignment, uint64_t resource_type)`` and ``void free(void *self,
        void *address, uint64_t resource_type)`` behave like the callbacks of ``ibv_alloc_parent_domain``. Any thread
        may call them as long as this object exists.

        :raises TypeError: the allocator calls Python code: `native` is False.
        """
        if not self.alloc:
            raise TypeError(f"{self!r} is an allocator in Python, which has no C functions")
        return <uintptr_t>self.alloc, <uintptr_t>self.free_piece, <uintptr_t>self.source

    def allocate(self, size, alignment, resource_type=0, pd=None, context=None):
        """Allocate a piece of zeroed memory that a fork does not copy.

        :param size: size in bytes, at least 1.
        :param alignment: alignment in bytes, a power of two; the address is a multiple of it.
        :param resource_type: resource type of ``ibv_alloc_parent_domain``; 0 for a buffer.
        :param pd: the parent domain; ignored.
        :param context: context of the parent domain; ignored.
        :returns: the address, an int, which the caller passes to `free`; a `DefaultAllocator` always returns
            `USE_DEFAULT`, which must not be freed.
        :raises ValueError: `size` is less than 1, or `alignment` is not a power of two.
        :raises OverflowError: `size`, `alignment` or `resource_type` does not fit in 64 bits.
        :raises OSError: no such memory is available; the message says what to do.
        :raises MemoryError: there is not enough memory for the allocator's bookkeeping.
        """
        _check_request(size, alignment)
        return self._allocate(size, alignment, resource_type)

    def _allocate(self, size_t size, size_t alignment, uint64_t resource_type):
        """Allocate a piece; the caller has checked `size` and `alignment`. Return the address of the piece, or
        `USE_DEFAULT`.

        :raises OverflowError: an argument does not fit in 64 bits.
        :raises OSError: no such memory is available.
        :raises MemoryError: there is not enough memory for the allocator's bookkeeping.
        """
        cdef alloc_source *source = _source_of(self)
        cdef void *address
        with nogil:
            address = alloc_piece(source, size, alignment, resource_type)
        if address == IBV_ALLOCATOR_USE_DEFAULT:
            return USE_DEFAULT
        if not address:
            _raise_failure()
        return <uintptr_t>address

    def free(self, address, resource_type=0, pd=None, context=None):
        """Free an allocated piece, once.

        :param address: the address that `allocate` returned.
        :param resource_type: the resource type that `allocate` was given.
        :param pd: the parent domain; ignored.
        :param context: context of the parent domain; ignored.
        :raises ValueError: this allocator has no allocated piece at `address`.
        """
        self._free(address, resource_type)

    def _free(self, address, uint64_t resource_type):
        """Free the piece at `address`. Raise ValueError if this allocator has no allocated piece there."""
        cdef alloc_source *source = _source_of(self)
        cdef uintptr_t number = address
        cdef int error
        with nogil:
            error = alloc_return(source, <void *>number, resource_type)
        if error:
            raise ValueError(f"{address:#x} is not a piece of {self!r}: it was never allocated, or was freed")

    def statistics(self):
        """Return a new `AllocatorStatistics`: the number of pieces that are allocated now, and the number and sizes of
        the memory mappings, which include memory that is kept for later pieces."""
        cdef alloc_source *source = _source_of(self)
        cdef alloc_counts counts
        with nogil:
            alloc_count(source, &counts)
        return AllocatorStatistics(
            pieces=counts.pieces,
            mappings=counts.mappings,
            mapped_bytes=counts.mapped_bytes,
            huge_bytes=counts.huge_bytes,
            bound_bytes=counts.bound_bytes,
            bookkeeping_bytes=counts.bookkeeping_bytes,
        )


def _check_request(size, alignment):
    """Raise ValueError if `size` is less than 1 or `alignment` is not a power of two."""
    if size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}")
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"`alignment` must be a power of two, got {alignment}")


cdef alloc_source *_native_source(NativeAllocator inner) except NULL:
    # Return the source of an allocator that works in C. Raise TypeError if `inner` calls Python code.
    if not inner.alloc:
        raise TypeError(f"{inner!r} is an allocator in Python: pass one that works in C")
    return <alloc_source *>inner.source


include "kinds.pxi"
include "recording.pxi"

publish(defined_in(__name__), globals())
