# Part of allocators.pyx: what was asked for, and is out.

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
            self.free_piece = NULL
        self.inner = inner

    def allocate(self, size, alignment, resource_type=0, pd=None, context=None):
        """Ask the inner allocator, and remember what it answers.

        :param size: bytes, 1 at least.
        :param alignment: bytes, a power of two; the address is a multiple of it.
        :param resource_type: what it is for, as ``ibv_alloc_parent_domain`` has it; 0 for a buffer.
        :param pd: for an inner allocator in Python: the parent domain; None for a buffer.
        :param context: for an inner allocator in Python: that of the parent domain.
        :returns: the inner allocator's answer.
        :raises ValueError: size or alignment are none, or the inner allocator answers with a piece that is out.
        """
        if self.alloc:
            return NativeAllocator.allocate(self, size, alignment, resource_type, pd, context)
        _check_request(size, alignment)
        try:
            address = self.inner.allocate(size, alignment, resource_type, pd, context)
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
            self.inner.free(address, resource_type, pd, context)
            raise MemoryError
        return address

    def _note(self, uintptr_t address, size_t size, uint64_t resource_type):
        return alloc_recording_note(_source_of(self), <void *>address, size, resource_type)

    def free(self, address, resource_type=0, pd=None, context=None):
        """Give a piece back, once.

        :param address: what `allocate` returned.
        :param resource_type: what it was asked for with.
        :param pd: likewise.
        :param context: likewise.
        :raises ValueError: no piece is there that came through this allocator.
        """
        self._free(address, resource_type)
        if not self.alloc:
            self.inner.free(address, resource_type, pd, context)

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
