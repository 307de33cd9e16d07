# Part of allocators.pyx: where memory comes from.

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
cdef class SharedMemoryAllocator(NativeAllocator):
    """Memory of a shared protection domain, which queue pairs of all its processes reach.

    Made by `ProtectionDomain.shared_memory`. The least that a piece takes of it is 64 KiB of addresses, though no more
    pages than are touched; `ArenaAllocator` puts small ones together. What a process has out when it dies comes back to
    the others. A child of a fork has none of it, and cannot allocate: let it import the domain.

    :param area: a capsule, from the protection domain.
    """

    def __init__(self, area):
        self._begin(alloc_area_create(<const alloc_area *>PyCapsule_GetPointer(area, "aioverbs.alloc_area")))

    def close(self):
        """Give out nothing more, as when the protection domain is closed; the memory goes with the last piece."""
        cdef alloc_source *source = _source_of(self)
        with nogil:
            alloc_area_close(source)


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
        self._begin(alloc_arena_create(_native_source(inner), chunk_bytes, UNIT_BYTES))
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
        cdef size_t count, made = 0
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
