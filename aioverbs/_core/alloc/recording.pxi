# Part of allocators.pyx: records of what was allocated.

@cython.final
cdef class RecordingAllocator(NativeAllocator):
    """Allocator that passes all calls to another allocator, native or in Python, and records them by resource type.

    :param inner: the allocator to call. Where it works in Python, so does this one: `native` is False.
    """

    cdef readonly object inner

    def __init__(self, inner not None):
        if isinstance(inner, NativeAllocator) and (<NativeAllocator>inner).alloc:
            self._begin(alloc_recording_create(<alloc_source *>(<NativeAllocator>inner).source))
        else:
            self._begin(alloc_recording_create(NULL))
            self.alloc = NULL
            self.free_piece = NULL
        self.inner = inner

    def allocate(self, size, alignment, resource_type=0, pd=None, context=None):
        """Allocate from the inner allocator, and record the result.

        :param size: size in bytes, at least 1.
        :param alignment: alignment in bytes, a power of two; the address is a multiple of it.
        :param resource_type: resource type of ``ibv_alloc_parent_domain``; 0 for a buffer.
        :param pd: the parent domain, for an inner allocator in Python; None for a buffer.
        :param context: context of the parent domain, for an inner allocator in Python.
        :returns: the inner allocator's result: an address, which the caller passes to `free`, or `USE_DEFAULT`; from an
            allocator in Python also None.
        :raises ValueError: `size` or `alignment` is invalid, or the inner allocator returns an address that is in use.
        :raises OSError: the inner allocator has no such memory. Exceptions of an allocator in Python are raised, too.
        :raises MemoryError: there is no memory for the record; nothing is allocated.
        """
        if self.alloc:
            return NativeAllocator.allocate(self, size, alignment, resource_type, pd, context)
        _check_request(size, alignment)
        try:
            address = self.inner.allocate(size, alignment, resource_type, pd, context)
        except BaseException:
            alloc_recording_without(_source_of(self), resource_type, False)
            raise
        if not isinstance(address, int) or not 0 < address < 1 << 64:      # None, or an invalid value
            alloc_recording_without(_source_of(self), resource_type, address is USE_DEFAULT)
            return address
        error = self._note(address, size, resource_type)
        if error == EEXIST:
            raise ValueError(f"allocate() returned {address:#x}, which is in use")
        if error:
            self.inner.free(address, resource_type, pd, context)
            raise MemoryError
        return address

    def _note(self, uintptr_t address, size_t size, uint64_t resource_type):
        """Record a piece. Return 0, EEXIST where a piece is recorded at the address, or ENOMEM."""
        return alloc_recording_note(_source_of(self), <void *>address, size, resource_type)

    def free(self, address, resource_type=0, pd=None, context=None):
        """Free a piece, once, in the inner allocator.

        :param address: the address that `allocate` returned.
        :param resource_type: the resource type that `allocate` was given.
        :param pd: the parent domain, for an inner allocator in Python.
        :param context: context of the parent domain, for an inner allocator in Python.
        :raises ValueError: no allocated piece at `address` came through this allocator.
        """
        self._free(address, resource_type)
        if not self.alloc:
            self.inner.free(address, resource_type, pd, context)

    def usage(self):
        """Return current and past use by resource type: a read-only mapping of `ResourceKind` to `AllocatorUsage`.

        The mapping is a snapshot; kinds are in the order in which they were first allocated. It is empty before the
        first allocation.
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
