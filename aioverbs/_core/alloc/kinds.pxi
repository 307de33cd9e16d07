# Part of allocators.pyx: the sources of memory.

@cython.final
cdef class DefaultAllocator(NativeAllocator):
    """Allocator that leaves all memory to the provider: ``allocate`` returns `USE_DEFAULT`.

    It is meant as the inner allocator of a `RecordingAllocator`, which then records what a provider allocates.

    :raises MemoryError: there is not enough memory for the allocator itself.
    """

    def __init__(self):
        self._begin(alloc_default_create())


@cython.final
cdef class SharedPageAllocator(NativeAllocator):
    """Allocator of anonymous shared pages with ``MADV_DONTFORK``, with a separate mapping for each piece.

    A piece takes at least one page; an `ArenaAllocator` packs small pieces together.

    :raises MemoryError: there is not enough memory for the allocator itself.
    """

    def __init__(self):
        self._begin(alloc_pages_create(ALLOC_BASE_PAGES, ALLOC_ANY_NODE, True))


@cython.final
cdef class SharedMemoryAllocator(NativeAllocator):
    """Allocator of memory in a shared protection domain, which the queue pairs of all its processes can access.

    Use `ProtectionDomain.shared_memory` to create one. A piece takes at least 64 KiB of address space, but physical
    memory only for the pages that are accessed; an `ArenaAllocator` packs small pieces together. When a process dies,
    its pieces become free for the other processes. A forked child does not inherit the memory and cannot allocate:
    import the domain there.

    :param area: capsule from the protection domain.
    :raises ValueError: `area` is not such a capsule.
    :raises MemoryError: there is not enough memory for the allocator itself.
    """

    def __init__(self, area):
        self._begin(alloc_area_create(<const alloc_area *>PyCapsule_GetPointer(area, "aioverbs.alloc_area")))

    def close(self):
        """Stop allocating, as happens when the protection domain is closed. The memory is released with its last piece.

        Allocated pieces stay valid and can still be freed. From now on, `allocate` raises OSError with ENXIO. Further
        calls do nothing.
        """
        cdef alloc_source *source = _source_of(self)
        with nogil:
            alloc_area_close(source)


@cython.final
cdef class NumaAllocator(NativeAllocator):
    """Allocator of pages of one NUMA node, otherwise like `SharedPageAllocator`.

    Inside an `ArenaAllocator`, small pieces share pages.

    :param node: number of the NUMA node, 0..1023.
    :param strict: whether `allocate` raises OSError if the kernel cannot take all pages from this node. If False, pages
        come from the node as long as it has free ones; ``statistics().bound_bytes`` tells whether the kernel bound
        them.
    :raises ValueError: `node` is out of range.
    :raises MemoryError: there is not enough memory for the allocator itself.
    """

    cdef readonly int node
    cdef readonly bint strict

    def __init__(self, int node, *, bint strict=False):
        if not 0 <= node < ALLOC_MAX_NODES:
            raise ValueError(f"`node` must be from 0 to {ALLOC_MAX_NODES - 1}, got {node}")
        self._begin(alloc_pages_create(ALLOC_BASE_PAGES, node, strict))
        self.node = node
        self.strict = strict


@cython.final
cdef class ArenaAllocator(NativeAllocator):
    """Allocator that serves many small and large pieces from a small number of mappings.

    Small pieces share chunks. The size of each is rounded up to a power of two of at least one cache line, so that
    8-byte doorbell records written by different processors do not slow each other down. A piece larger than half a
    chunk has pages of its own. Freed memory is zeroed and used again; chunks without pieces are freed, except for one.

    :param inner: allocator of chunks and large pieces; None for a new `SharedPageAllocator`.
    :param chunk_bytes: size of a chunk, a power of two from 4 KiB to 1 GiB.
    :raises ValueError: `chunk_bytes` is not a power of two, or is out of range.
    :raises TypeError: `inner` calls Python code, or is not an allocator of this module.
    :raises MemoryError: there is not enough memory for the allocator itself.
    """

    cdef readonly NativeAllocator inner
    cdef readonly size_t chunk_bytes

    def __init__(self, NativeAllocator inner=None, *, size_t chunk_bytes=CHUNK_BYTES):
        if chunk_bytes & (chunk_bytes - 1) or not 1 << 12 <= chunk_bytes <= 1 << 30:
            raise ValueError(f"`chunk_bytes` must be a power of two from 4 KiB to 1 GiB, got {chunk_bytes}")
        if inner is None:
            inner = SharedPageAllocator()
        self._begin(alloc_arena_create(_native_source(inner), chunk_bytes, UNIT_BYTES))
        self.inner = inner
        self.chunk_bytes = chunk_bytes


cdef alloc_source *_arena_over(alloc_source *under, size_t chunk_bytes, size_t unit_bytes) noexcept:
    # Return an arena on top of `under`, which has no other user and is then owned by the arena; NULL if `under` is NULL
    # or the arena could not be made.
    cdef alloc_source *arena
    if not under:
        return NULL
    arena = alloc_arena_create(under, chunk_bytes, unit_bytes)
    alloc_release(under)
    return arena


cdef alloc_source *_huge_tier(size_t page_bytes) noexcept:
    # Return a new source of pieces in huge pages; NULL if there is not enough memory for it. Pieces of a few bytes must
    # not make the bookkeeping of a whole 1 GiB page as fine as their size.
    cdef alloc_source *pages = alloc_pages_create(page_bytes, ALLOC_ANY_NODE, True)
    pages = _arena_over(pages, max(page_bytes, <size_t>TWO_MIB), HUGE_UNIT_BYTES)
    return _arena_over(pages, CHUNK_BYTES, UNIT_BYTES)


@cython.final
cdef class HugePageAllocator(NativeAllocator):
    """Allocator of huge pages (``MAP_HUGETLB``), which pieces share as in an `ArenaAllocator`.

    With huge pages, few entries in the translation tables of the processor and the NIC cover a lot of memory.

    :param page_bytes: size of a page in bytes: 2 MiB, 1 GiB, or another size that the machine has.
    :param strict: whether `allocate` raises OSError if no huge page is free. If False, the piece comes from smaller
        pages instead: 2 MiB instead of 1 GiB, then base pages; ``statistics().huge_bytes`` tells how much is in huge
        pages.
    :raises ValueError: `page_bytes` is not a power of two from 64 KiB to 16 GiB.
    :raises MemoryError: there is not enough memory for the allocator itself.
    """

    cdef readonly size_t page_bytes
    cdef readonly bint strict

    def __init__(self, size_t page_bytes=TWO_MIB, *, bint strict=False):
        cdef alloc_source *tiers[3]
        cdef alloc_source *source = NULL
        cdef size_t count, made = 0
        if page_bytes & (page_bytes - 1) or not 1 << 16 <= page_bytes <= 1 << 34:
            raise ValueError(
                f"`page_bytes` must be 2 MiB, 1 GiB or another power of two from 64 KiB to 16 GiB, got {page_bytes}"
            )
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
        for i in range(count):
            made += tiers[i] != NULL
        if made == count:
            source = alloc_tiers_create(tiers, count)
        for i in range(count):
            if tiers[i]:
                alloc_release(tiers[i])
        self._begin(source)
        self.page_bytes = page_bytes
        self.strict = strict
