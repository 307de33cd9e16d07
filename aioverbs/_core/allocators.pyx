# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Allocators of memory for queues, doorbell records and buffers, which work in C without the GIL (alloc.h)."""

import glob
import os
import warnings
from types import MappingProxyType

from aioverbs.attributes import AllocatorStatistics, AllocatorUsage, ResourceKind

from libc.errno cimport EEXIST, EINVAL, ENOSYS, EOPNOTSUPP, EPERM
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free as c_free
from libc.stdlib cimport malloc as c_malloc

cimport cython

from aioverbs._core.verbs cimport IBV_ALLOCATOR_USE_DEFAULT

cdef extern from "alloc.h" nogil:
    struct alloc_source:
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
    alloc_source *alloc_tiers_create(alloc_source **tiers, size_t count)
    alloc_source *alloc_recording_create(alloc_source *inner)
    int alloc_recording_note(alloc_source *recording, const void *address, size_t size, uint64_t resource_type)
    void alloc_recording_without(alloc_source *recording, uint64_t resource_type, bint use_default)
    size_t alloc_recording_usage(alloc_source *recording, alloc_usage *usages, size_t room)

cdef enum:
    UNIT_BYTES = 64                     # a cache line: see alloc_arena.c
    CHUNK_BYTES = 1 << 18               # 10,000 doorbell records take three, with their trees less than a MiB
    HUGE_UNIT_BYTES = 1 << 16
    TWO_MIB = 1 << 21


class UseDefault:
    """The type of `USE_DEFAULT`."""

    __slots__ = ()

    def __repr__(self):
        return "USE_DEFAULT"


USE_DEFAULT = UseDefault()


# ------------------------------------------------------------------------------------------------------ failures

def _in_words(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def _huge_page_sizes():
    names = glob.glob("/sys/kernel/mm/hugepages/hugepages-*kB")
    return sorted(int(name.rpartition("-")[2].removesuffix("kB")) << 10 for name in names)


def _no_huge_pages(error, size, page_size):
    if error == EINVAL:
        sizes = ", ".join(map(_in_words, _huge_page_sizes())) or "none"
        return f"this kernel has no huge pages of {_in_words(page_size)}; it has: {sizes}"
    count = size // page_size
    where = "/proc/sys/vm/nr_hugepages"
    if page_size != TWO_MIB:
        where = f"/sys/kernel/mm/hugepages/hugepages-{page_size >> 10}kB/nr_hugepages"
    return (
        f"{count} huge page{'s' if count > 1 else ''} of {_in_words(page_size)} cannot be had: root configures them by "
        f"`echo NUMBER > {where}`, or as the kernel boots by `hugepagesz={page_size >> 20}M hugepages=NUMBER`"
    )


def _not_bound(error, node):
    if error in (ENOSYS, EOPNOTSUPP):
        return "this kernel cannot bind memory to a NUMA node"
    if error == EPERM:
        return "this process may not bind memory to a NUMA node: a sandbox forbids mbind()"
    return f"memory cannot be bound to NUMA node {node}: /sys/devices/system/node/online has those that are there"


cdef object _take_failure():
    cdef alloc_failure failure = alloc_last_failure()[0]
    if failure.step == ALLOC_NOTHING:
        return None
    alloc_clear_failure()
    if failure.step == ALLOC_BOOKKEEPING:
        return MemoryError("of the process, for an allocator's own use")
    if failure.step == ALLOC_MAP_HUGE:
        text = _no_huge_pages(failure.error, failure.size, failure.page_bytes)
    elif failure.step == ALLOC_BIND:
        text = _not_bound(failure.error, failure.node)
    elif failure.step == ALLOC_DONT_FORK:
        text = "pages cannot be kept from the children of forks: madvise(MADV_DONTFORK) failed"
    elif failure.step == ALLOC_MAP:
        text = f"{failure.size} bytes of shared memory cannot be mapped: {os.strerror(failure.error)}"
    else:
        text = f"{failure.size} is no size or alignment that memory can have"
    return OSError(failure.error, text)


cdef int _no_source() except -1:
    raise _take_failure() or MemoryError()


# -------------------------------------------------------------------------------------------------------- common

cdef alloc_source *_source_of(NativeAllocator allocator) except NULL:
    if not allocator.source:
        raise TypeError(f"{allocator!r} was not made by one of aioverbs' own classes")
    return <alloc_source *>allocator.source


cdef void _warn(size_t pieces) noexcept:
    # Where warnings are errors, this one ends in sys.unraisablehook. As the interpreter ends, globals become None.
    if warnings is not None:
        count = f"{pieces} pieces" if pieces > 1 else "a piece"
        warnings.warn(f"an allocator was forgotten with {count} out: their memory stays", ResourceWarning)


cdef class NativeAllocator:
    """An allocator whose pieces come from C: providers call it without the GIL.

    A piece that is out keeps what it came from, whatever becomes of the allocator's object. A child of a fork finds
    the allocator empty, as if it were new, and has none of the parent's pieces.
    """

    def __init__(self):
        raise TypeError("NativeAllocator is what SharedPageAllocator, ArenaAllocator and others have in common")

    def __dealloc__(self):
        cdef size_t kept
        if self.source:
            kept = alloc_release(<alloc_source *>self.source)
            if kept:
                _warn(kept)

    cdef int _begin(self, void *source) except -1:
        # Each constructor ends here; one that ran twice would lose what it has given out.
        if not source:
            _no_source()
        if self.source:
            alloc_release(<alloc_source *>source)
            raise RuntimeError(f"{self!r} was made before")
        self.source = source
        self.alloc = alloc_piece
        self.give = alloc_free
        return 0

    cdef object _failure(self):
        return _take_failure()

    @property
    def native(self):
        """Whether providers call it in C, without the GIL."""
        return self.alloc != NULL

    @property
    def c_functions(self):
        """The addresses of its ``alloc`` and ``free`` and of their first argument, for native code of others.

        ``void *alloc(void *self, size_t size, size_t alignment, uint64_t resource_type)`` answers as the callback of
        ``ibv_alloc_parent_domain`` does, ``void free(void *self, void *address, uint64_t resource_type)`` likewise.
        They may be called in any thread, as long as this object lives.
        """
        if not self.alloc:
            raise TypeError(f"{self!r} is an allocator in Python")
        return <uintptr_t>self.alloc, <uintptr_t>self.give, <uintptr_t>self.source

    def allocate(self, size, alignment, resource_type=0):
        """Get a piece of zeroed memory that a fork does not copy.

        :param size: bytes, 1 at least.
        :param alignment: bytes, a power of two; the address is a multiple of it.
        :param resource_type: what it is for, as ``ibv_alloc_parent_domain`` has it; 0 for a buffer.
        :returns: its address, or `USE_DEFAULT`.
        :raises ValueError: size or alignment are none.
        :raises OSError: there is no such memory; it says what to do.
        """
        _check_request(size, alignment)
        return self._allocate(size, alignment, resource_type)

    def _allocate(self, size_t size, size_t alignment, uint64_t resource_type):
        cdef alloc_source *source = _source_of(self)
        cdef void *address
        with nogil:
            address = alloc_piece(source, size, alignment, resource_type)
        if address == IBV_ALLOCATOR_USE_DEFAULT:
            return USE_DEFAULT
        if not address:
            _no_source()
        return <uintptr_t>address

    def free(self, address, resource_type=0):
        """Give a piece back, once.

        :param address: what `allocate` returned.
        :param resource_type: what it was asked for with.
        :raises ValueError: no piece of this allocator is there.
        """
        self._free(address, resource_type)

    def _free(self, address, uint64_t resource_type):
        cdef alloc_source *source = _source_of(self)
        cdef uintptr_t number = address
        cdef int error
        with nogil:
            error = alloc_return(source, <void *>number, resource_type)
        if error:
            raise ValueError(f"{address:#x} is no piece of {self!r}: it never was, or was given back")

    def statistics(self):
        """What it has out, and what that takes: an `AllocatorStatistics`."""
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
    if size < 1:
        raise ValueError(f"a piece has 1 byte at least, not {size}")
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"an alignment is a power of two, not {alignment}")


cdef alloc_source *_under(NativeAllocator inner) except NULL:
    if not inner.alloc:
        raise TypeError(f"{inner!r} is an allocator in Python: pages come from one that works in C")
    return <alloc_source *>inner.source


# --------------------------------------------------------------------------------------------------------- kinds

@cython.final
cdef class DefaultAllocator(NativeAllocator):
    """Leaves all memory to the provider: it answers `USE_DEFAULT`.

    For a `RecordingAllocator` around it, which tells what a provider asks for.
    """

    def __init__(self):
        self._begin(alloc_default_create())


@cython.final
cdef class SharedPageAllocator(NativeAllocator):
    """Anonymous shared pages, with ``MADV_DONTFORK``: a mapping for each piece.

    The least that a piece takes is a page; `ArenaAllocator` puts small ones together.
    """

    def __init__(self):
        self._begin(alloc_pages_create(ALLOC_BASE_PAGES, ALLOC_ANY_NODE, True))


@cython.final
cdef class NumaAllocator(NativeAllocator):
    """Pages of one NUMA node, as those of `SharedPageAllocator` otherwise.

    Inside of an `ArenaAllocator`, small pieces share pages.

    :param node: the number of the node.
    :param strict: pages come from this node alone, and where the kernel cannot do so, `allocate` raises. Else they
        come from there as long as the node has some; ``statistics().bound_bytes`` tells whether the kernel agreed.
    :raises ValueError: no node has that number on any machine.
    """

    cdef readonly int node
    cdef readonly bint strict

    def __init__(self, int node, *, bint strict=False):
        if not 0 <= node < ALLOC_MAX_NODES:
            raise ValueError(f"a NUMA node has a number from 0 to {ALLOC_MAX_NODES - 1}, not {node}")
        self._begin(alloc_pages_create(ALLOC_BASE_PAGES, node, strict))
        self.node = node
        self.strict = strict


@cython.final
cdef class ArenaAllocator(NativeAllocator):
    """Many small and large pieces out of few mappings.

    Small pieces share chunks. Each has a power of two of bytes there, a cache line at least: 8-byte doorbell records,
    which different processors write, do not slow each other down. What needs more than half a chunk has pages of its
    own. What is given back is used again, zeroed; a chunk without pieces goes, except for one that is kept.

    :param inner: where chunks and large pieces come from; without it, a `SharedPageAllocator`.
    :param chunk_bytes: the size of a chunk, a power of two from 4 KiB to 1 GiB.
    :raises ValueError: a chunk cannot have that size.
    """

    cdef readonly NativeAllocator inner
    cdef readonly size_t chunk_bytes

    def __init__(self, NativeAllocator inner=None, *, size_t chunk_bytes=CHUNK_BYTES):
        if chunk_bytes & (chunk_bytes - 1) or not 1 << 12 <= chunk_bytes <= 1 << 30:
            raise ValueError(f"a chunk has a power of two from 4 KiB to 1 GiB of bytes, not {chunk_bytes}")
        if inner is None:
            inner = SharedPageAllocator()
        self._begin(alloc_arena_create(_under(inner), chunk_bytes, UNIT_BYTES))
        self.inner = inner
        self.chunk_bytes = chunk_bytes


cdef alloc_source *_arena_over(alloc_source *under, size_t chunk_bytes, size_t unit_bytes) noexcept:
    # Of a source that nobody else needs; NULL where either could not be made.
    cdef alloc_source *arena
    if not under:
        return NULL
    arena = alloc_arena_create(under, chunk_bytes, unit_bytes)
    alloc_release(under)
    return arena


cdef alloc_source *_huge_tier(size_t page_bytes) noexcept:
    # Pieces of a few bytes must not make the bookkeeping of a page of a GiB as fine as that all over.
    cdef alloc_source *pages = alloc_pages_create(page_bytes, ALLOC_ANY_NODE, True)
    pages = _arena_over(pages, max(page_bytes, <size_t>TWO_MIB), HUGE_UNIT_BYTES)
    return _arena_over(pages, CHUNK_BYTES, UNIT_BYTES)


@cython.final
cdef class HugePageAllocator(NativeAllocator):
    """Huge pages (``MAP_HUGETLB``), which pieces share as they do in an `ArenaAllocator`.

    Few entries of the processor's and the NIC's translation tables then cover much memory.

    :param page_bytes: the size of a page: 2 MiB, 1 GiB, or another that the machine has.
    :param strict: only such pages; where none is free, `allocate` raises. Else a piece that finds none comes from
        smaller pages: 2 MiB where 1 GiB was asked for, then base pages; ``statistics().huge_bytes`` tells how much.
    :raises ValueError: no huge page has that size on any machine.
    """

    cdef readonly size_t page_bytes
    cdef readonly bint strict

    def __init__(self, size_t page_bytes=TWO_MIB, *, bint strict=False):
        cdef alloc_source *tiers[3]
        cdef alloc_source *source = NULL
        cdef size_t count = 0, made
        if page_bytes & (page_bytes - 1) or not 1 << 16 <= page_bytes <= 1 << 34:
            raise ValueError(f"a huge page has 2 MiB, 1 GiB or another power of two of bytes, not {page_bytes}")
        tiers[0] = _huge_tier(page_bytes)
        count = 1
        if not strict and page_bytes > TWO_MIB:
            tiers[count] = _huge_tier(TWO_MIB)
            count += 1
        if not strict:
            tiers[count] = _arena_over(
                alloc_pages_create(ALLOC_BASE_PAGES, ALLOC_ANY_NODE, True), CHUNK_BYTES, UNIT_BYTES
            )
            count += 1
        made = sum(1 for i in range(count) if tiers[i] != NULL)
        if made == count:
            source = alloc_tiers_create(tiers, count)
        for i in range(count):
            if tiers[i]:
                alloc_release(tiers[i])
        self._begin(source)
        self.page_bytes = page_bytes
        self.strict = strict


@cython.final
cdef class RecordingAllocator(NativeAllocator):
    """Passes everything on to another allocator, native or Python's, and remembers it by resource type.

    :param inner: whom it asks. Where that is an allocator in Python, so is this one: `native` is False.
    """

    cdef readonly object inner

    def __init__(self, inner not None):
        if isinstance(inner, NativeAllocator) and (<NativeAllocator>inner).alloc:
            self._begin(alloc_recording_create(<alloc_source *>(<NativeAllocator>inner).source))
        else:
            self._begin(alloc_recording_create(NULL))
            self.alloc = NULL
            self.give = NULL
        self.inner = inner

    def allocate(self, size, alignment, resource_type=0):
        """Ask the inner allocator, and remember what it answers.

        :param size: bytes, 1 at least.
        :param alignment: bytes, a power of two; the address is a multiple of it.
        :param resource_type: what it is for, as ``ibv_alloc_parent_domain`` has it; 0 for a buffer.
        :returns: the inner allocator's answer.
        :raises ValueError: size or alignment are none, or the inner allocator answers with a piece that is out.
        """
        if self.alloc:
            return NativeAllocator.allocate(self, size, alignment, resource_type)
        _check_request(size, alignment)
        try:
            address = self.inner.allocate(size, alignment, resource_type)
        except BaseException:
            alloc_recording_without(_source_of(self), resource_type, False)
            raise
        if not isinstance(address, int) or not 0 < address < 1 << 64:      # None, or nonsense
            alloc_recording_without(_source_of(self), resource_type, address is USE_DEFAULT)
            return address
        error = self._note(address, size, resource_type)
        if error == EEXIST:
            raise ValueError(f"allocate() returned {address:#x}, which is in use")
        if error:
            self.inner.free(address, resource_type)
            raise MemoryError
        return address

    def _note(self, uintptr_t address, size_t size, uint64_t resource_type):
        return alloc_recording_note(_source_of(self), <void *>address, size, resource_type)

    def free(self, address, resource_type=0):
        """Give a piece back, once.

        :param address: what `allocate` returned.
        :param resource_type: what it was asked for with.
        :raises ValueError: no piece is there that came through this allocator.
        """
        self._free(address, resource_type)
        if not self.alloc:
            self.inner.free(address, resource_type)

    def usage(self):
        """What is out and what was, by what it was asked for: a mapping of `ResourceKind` to `AllocatorUsage`.

        It does not change any more; kinds stand in the order in which they were first asked for.
        """
        cdef alloc_source *source = _source_of(self)
        cdef alloc_usage *usages = NULL
        cdef alloc_usage *usage
        cdef size_t room = 0, types, i
        try:
            while True:
                types = alloc_recording_usage(source, usages, room)
                if types <= room:
                    break
                c_free(usages)
                room = types
                usages = <alloc_usage *>c_malloc(room * sizeof(alloc_usage))
                if not usages:
                    raise MemoryError
            result = {}
            for i in range(types):
                usage = &usages[i]
                result[ResourceKind.decode(usage.resource_type)] = AllocatorUsage(
                    pieces=usage.pieces,
                    size_bytes=usage.bytes,
                    peak_pieces=usage.peak_pieces,
                    peak_bytes=usage.peak_bytes,
                    allocations=usage.allocations,
                    defaults=usage.defaults,
                    failures=usage.failures,
                )
            return MappingProxyType(result)
        finally:
            c_free(usages)
