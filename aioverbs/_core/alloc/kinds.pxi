# Part of allocators.pyx: the sources of memory.

@cython.final
cdef class DefaultAllocator(NativeAllocator):
    """Allocator that leaves all memory to the provider: ``allocate`` returns `USE_DEFAULT`.

    For a `RecordingAllocator` around it, which records what a provider allocates.
    """

    def __init__(self):
        self._begin(alloc_default_create())


@cython.final
cdef class SharedPageAllocator(NativeAllocator):
    """Allocator of anonymous shared pages with ``MADV_DONTFORK``: one mapping for each piece.

    A piece takes at least one page; an `ArenaAllocator` puts small pieces together.
    """

    def __init__(self):
        self._begin(alloc_pages_create(ALLOC_BASE_PAGES, ALLOC_ANY_NODE, True))


@cython.final
cdef class SharedMemoryAllocator(NativeAllocator):
    """Allocator of memory in a shared protection domain, which queue pairs of all its processes reach.

    Made by `ProtectionDomain.shared_memory`. A piece takes at least 64 KiB of addresses, but only the pages that are
    touched; an `ArenaAllocator` puts small pieces together. Pieces of a process return to the other processes when it
    dies. The child of a fork has none of the memory and cannot allocate: import the domain there.

    :param area: capsule from the protection domain.
    :raises ValueError: `area` is another object.
    """

    def __init__(self, area):
        self._begin(alloc_area_create(<const alloc_area *>PyCapsule_GetPointer(area, "aioverbs.alloc_area")))

    def close(self):
        """Allocate nothing more, as when the protection domain is closed; the memory goes with its last piece.

        Allocated pieces stay valid, and can be freed. From here on `allocate` raises OSError.
        """
        cdef alloc_source *source = _source_of(self)
        with nogil:
            alloc_area_close(source)


@cython.final
cdef class NumaAllocator(NativeAllocator):
    """Allocator of pages of one NUMA node, otherwise like `SharedPageAllocator`.

    Inside an `ArenaAllocator`, small pieces share pages.

    :param node: number of the NUMA node.
    :param strict: whether `allocate` raises OSError where the kernel cannot take pages from the node alone. Otherwise
        pages come from the node while it has some; ``statistics().bound_bytes`` tells whether the kernel bound them.
    :raises ValueError: `node` is out of range.
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
    """Allocator that serves many small and large pieces from few mappings.

    Small pieces share chunks. There each takes a power of two of bytes, at least a cache line, so that 8-byte doorbell
    records that different processors write do not slow each other down. A piece of more than half a chunk has pages of
    its own. Freed memory is used again, zeroed; a chunk without pieces is freed, except for one.

    :param inner: allocator of chunks and large pieces; None: a `SharedPageAllocator`.
    :param chunk_bytes: size of a chunk, a power of two from 4 KiB to 1 GiB.
    :raises ValueError: `chunk_bytes` is out of range.
    :raises TypeError: `inner` works in Python, or is no allocator of this module.
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
    # Return an arena on a source that has no other user, and that the arena owns from here on; NULL where either could
    # not be made.
    cdef alloc_source *arena
    if not under:
        return NULL
    arena = alloc_arena_create(under, chunk_bytes, unit_bytes)
    alloc_release(under)
    return arena


cdef alloc_source *_huge_tier(size_t page_bytes) noexcept:
    # Return a new source of pieces in huge pages; NULL where there is no memory for it. Pieces of a few bytes must not
    # make the bookkeeping of a whole 1 GiB page as fine as their size.
    cdef alloc_source *pages = alloc_pages_create(page_bytes, ALLOC_ANY_NODE, True)
    pages = _arena_over(pages, max(page_bytes, <size_t>TWO_MIB), HUGE_UNIT_BYTES)
    return _arena_over(pages, CHUNK_BYTES, UNIT_BYTES)


@cython.final
cdef class HugePageAllocator(NativeAllocator):
    """Allocator of huge pages (``MAP_HUGETLB``), which pieces share as in an `ArenaAllocator`.

    Few entries of the translation tables of processor and NIC then cover much memory.

    :param page_bytes: size of a page in bytes: 2 MiB, 1 GiB, or another size that the machine has.
    :param strict: whether `allocate` raises OSError if no huge page is free. Otherwise such a piece comes from smaller
        pages: 2 MiB instead of 1 GiB, then base pages; ``statistics().huge_bytes`` tells how much is in huge pages.
    :raises ValueError: no machine has huge pages of that size.
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
