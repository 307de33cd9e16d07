# Part of allocators.pyx: records of what was allocated.

@cython.final
cdef class RecordingAllocator(NativeAllocator):
    """Allocator that passes all calls to another allocator, native or written in Python, and records them by resource
    type.

    :param inner: the allocator to call. If it is written in Python, providers call this one in Python as well: `native`
        is False.
    :raises MemoryError: there is not enough memory for the allocator itself.
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
        """Allocate a piece from the inner allocator and record the result.

        :param size: size in bytes, at least 1.
        :param alignment: alignment in bytes, a power of two; the address is a multiple of it.
        :param resource_type: resource type of ``ibv_alloc_parent_domain``; 0 for a buffer.
        :param pd: the parent domain, for an inner allocator written in Python; None for a buffer.
        :param context: context of the parent domain, for an inner allocator written in Python.
        :returns: the inner allocator's result: an address, which the caller passes to `free`, or `USE_DEFAULT`. An
            allocator written in Python may also return None, which means that it has no memory. An invalid result of
            such an allocator is returned unchanged and recorded as a failure.
        :raises ValueError: `size` or `alignment` is invalid, or the inner allocator returns an address that is in use.
        :raises OverflowError: `size`, `alignment` or `resource_type` does not fit in 64 bits.
        :raises OSError: the inner allocator has no such memory. Exceptions that an allocator written in Python raises
            propagate unchanged.
        :raises MemoryError: there is not enough memory for the record; nothing is allocated.
        """
        if self.alloc:
            return NativeAllocator.allocate(self, size, alignment, resource_type, pd, context)
        _check_request(size, alignment)
        return self._allocate_in_python(size, alignment, resource_type, pd, context)

    def _allocate_in_python(self, size_t size, uint64_t alignment, uint64_t resource_type, pd, context):
        """Allocate a piece as `allocate` does, from an inner allocator written in Python.

        The numbers have their C types on entry: one that does not fit must raise OverflowError before there is a piece.
        """
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
        """Record the piece of `size` bytes that the inner allocator returned at `address`.

        :returns: 0; EEXIST if a piece is already recorded at that address; ENOMEM if there is not enough memory.
        """
        return alloc_recording_note(_source_of(self), <void *>address, size, resource_type)

    def free(self, address, resource_type=0, pd=None, context=None):
        """Free an allocated piece, once, in the inner allocator.

        :param address: the address that `allocate` returned.
        :param resource_type: the resource type that `allocate` was given.
        :param pd: the parent domain, for an inner allocator written in Python.
        :param context: context of the parent domain, for an inner allocator written in Python.
        :raises ValueError: no piece at `address` is allocated through this allocator; the inner allocator is not
            called. Exceptions that an inner allocator written in Python raises propagate unchanged, and the record is
            removed all the same.
        """
        self._free(address, resource_type)
        if not self.alloc:
            self.inner.free(address, resource_type, pd, context)

    def usage(self):
        """Return how much was allocated, now and in the past, for each kind of resource.

        :returns: a read-only mapping of `ResourceKind` to `AllocatorUsage`, in the order in which the kinds were first
            allocated. The mapping is a snapshot, and empty before the first allocation.
        :raises MemoryError: there is not enough memory for the snapshot.
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
