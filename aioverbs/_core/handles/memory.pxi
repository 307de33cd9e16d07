# Part of handles.pyx: protection domains and memory regions.

cdef class ProtectionDomain(Handle):
    """Protection domain (``ibv_alloc_pd``). The base class of parent domains.

    :param context: the device.
    :raises ClosedResourceError: the context is closed.
    :raises VerbsError: with ENOMEM if memory ran out.
    """

    def __init__(self, Context context not None):
        cdef int error = 0
        self._begin()
        context._enter()
        self.context = context
        try:
            with nogil:
                self.pointer = context.table.alloc_pd(context.pointer)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_alloc_pd", error)
            self._opened(f"{self.pointer.handle}")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            context._leave()
            raise

    cdef str _destroy_name(self):
        return "ibv_dealloc_pd"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error = 0
        cdef bint last
        if self._lender_slot != NULL:
            return 0                            # borrowed
        last = self.lease is None or self.lease.is_last()
        if last:
            with nogil:
                error = self.context.table.dealloc_pd(self.pointer)
        # Objects that a killed process left in the domain stay known to the kernel until the device's last descriptor
        # is closed. The kernel's domain also stays until then, and nothing is left to do here.
        if not last or (self.lease is not None and abs(error) == EBUSY):
            with nogil:
                self.context.table.unimport_pd(self.pointer)
            error = 0
        if self.lease is not None:
            self.lease.leave(last, bool(error))
        return error

    cdef void _leave_parents(self) noexcept:
        self.context._leave()

    @property
    def handle(self):
        """Number that identifies the domain in the kernel, an int, for `import_pd`.

        :raises ClosedResourceError: the domain is closed.
        """
        self._enter()
        try:
            return self.pointer.handle
        finally:
            self._leave()

    @staticmethod
    def import_pd(Context context not None, uint32_t handle, lease):
        """Open another instance of a protection domain over the same command descriptor (``ibv_import_pd``).

        :param context: the domain's own context, or a context that was opened over the same descriptor.
        :param handle: value of the property `handle` of the domain.
        :param lease: object that is asked when the instance is destroyed. If ``is_last()`` returns True, no other
            instance is left, and this instance deallocates the domain; otherwise this instance only unimports the
            domain (``ibv_unimport_pd``). ``leave(last, failed)`` is called afterwards.
        :returns: a new `ProtectionDomain`; the caller destroys it.
        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: the verb failed; with EOPNOTSUPP if the provider does not support it.
        """
        cdef int error = 0
        cdef ProtectionDomain self = ProtectionDomain.__new__(ProtectionDomain)
        self._begin()
        context._enter()
        self.context = context
        try:
            with nogil:
                self.pointer = context.table.import_pd(context.pointer, handle)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_import_pd", error)
            self._opened(f"{self.pointer.handle}")
        except BaseException:
            if self.pointer:
                with nogil:
                    context.table.unimport_pd(self.pointer)
            context._leave()
            raise
        self.lease = lease
        return self

    @staticmethod
    def adopt(Context context not None, capsule, owner):
        """Use a protection domain that other code created. That code must not destroy the domain before the handle is
        destroyed.

        :param context: the handle of the domain's context.
        :param capsule: capsule "ibv_pd *" from `pyverbs_bridge`: the address of the lender's pointer.
        :param owner: object that contains that pointer.
        :returns: a new `ProtectionDomain`; the caller destroys it, which does not destroy the lender's domain.
        :raises ClosedResourceError: the context is closed.
        :raises ValueError: the domain belongs to another context, or `capsule` is not such a capsule.
        """
        cdef ProtectionDomain self = ProtectionDomain.__new__(ProtectionDomain)
        self._begin()
        context._enter()
        self.context = context
        try:
            self._borrow(capsule, "ibv_pd *", owner)
            self.pointer = <ibv_pd *>self._lent_pointer
            if self.pointer.context != context.pointer:
                raise ValueError(f"{owner!r} belongs to a different context than {context!r}")
            self._opened(f"{self.pointer.handle}")
        except BaseException:
            context._leave()
            raise
        return self

    cdef object _take_cause(self):
        # Return and clear the exception that an allocator raised during the verb that just failed in this thread; None
        # if there is none. Only a parent domain has an allocator.
        return None


# Combining flags takes as long as registering some pages.
cdef int LOCAL_WRITE = AccessFlags.LOCAL_WRITE
cdef int REMOTE_WRITES = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
cdef int WRITES = LOCAL_WRITE | REMOTE_WRITES


cdef class MemoryRegion(Handle):
    """Memory region (``ibv_reg_mr``).

    :param pd: the protection domain; if it is a parent domain, the region belongs to its base.
    :param memory: an object with the buffer protocol, which stays exported until `destroy`, or a tuple ``(address,
        length)`` for memory that the caller keeps valid.
    :param access: `AccessFlags`. Remote writes and atomics require ``LOCAL_WRITE``, as the verbs do. With ``MW_BIND``
        memory windows may be bound to the region; a bound window makes `destroy` raise BusyResourceError.
    :raises TypeError: `memory` is neither such an object nor a tuple.
    :raises BufferError: `memory` is not contiguous, or is read-only although `access` includes writes.
    :raises ValueError: `memory` has no bytes, or ``LOCAL_WRITE`` is missing.
    :raises ClosedResourceError: the protection domain is closed.
    :raises VerbsError: with EFAULT if the memory does not exist or may not be written; with EOPNOTSUPP if the device
        does not support the access (``ON_DEMAND``, ``ZERO_BASED`` on the software device).
    """

    def __init__(self, ProtectionDomain pd not None, memory, access=AccessFlags.LOCAL_WRITE):
        cdef int error = 0, flags = access
        cdef void *address
        cdef size_t length
        self._begin()
        if flags & REMOTE_WRITES and not flags & LOCAL_WRITE:
            raise ValueError("REMOTE_WRITE and REMOTE_ATOMIC also need LOCAL_WRITE")
        pd._enter()
        self.context = pd.context
        self.pd = pd
        try:
            if isinstance(memory, tuple):
                start, size = memory
                address, length = <void *><uintptr_t>PyNumber_Index(start), PyNumber_Index(size)
            else:
                if not PyObject_CheckBuffer(memory):
                    raise TypeError(f"`memory` must support the buffer protocol, got {type(memory).__name__}")
                PyObject_GetBuffer(memory, &self._buffer, PyBUF_WRITABLE if flags & WRITES else PyBUF_SIMPLE)
                self._has_buffer = True
                address, length = self._buffer.buf, self._buffer.len
            if not length:
                raise ValueError("`memory` has no bytes: register at least 1")
            with nogil:
                self.pointer = pd.context.table.reg_mr(pd.pointer, address, length, flags)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_reg_mr", error)
            self._opened(f"lkey {self.pointer.lkey:#x}, {self.pointer.length} bytes")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            self._release()
            pd._leave()
            raise

    @staticmethod
    def adopt(ProtectionDomain pd not None, capsule, owner):
        """Use a memory region that other code registered. That code must not deregister the region before the handle is
        destroyed.

        :param pd: handle of the region's protection domain.
        :param capsule: capsule "ibv_mr *" from `pyverbs_bridge`: the address of the lender's pointer.
        :param owner: object that contains that pointer.
        :returns: a new `MemoryRegion`; the caller destroys it, which does not deregister the lender's region.
        :raises ClosedResourceError: the protection domain is closed.
        :raises ValueError: the region belongs to another protection domain, or `capsule` is not such a capsule.
        """
        cdef MemoryRegion self = MemoryRegion.__new__(MemoryRegion)
        cdef ibv_pd *lender_pd
        self._begin()
        pd._enter()
        self.context = pd.context
        self.pd = pd
        try:
            self._borrow(capsule, "ibv_mr *", owner)
            self.pointer = <ibv_mr *>self._lent_pointer
            # A parent domain of the lender has the handle number of its base, and its regions belong to the base.
            lender_pd = self.pointer.pd
            if lender_pd == NULL or lender_pd.context != pd.pointer.context or lender_pd.handle != pd.pointer.handle:
                raise ValueError(f"{owner!r} belongs to a different protection domain than {pd!r}")
            self._opened(f"lkey {self.pointer.lkey:#x}, {self.pointer.length} bytes")
        except BaseException:
            pd._leave()
            raise
        return self

    cdef void _release(self) noexcept:
        # Release the exported buffer, once.
        if self._has_buffer:
            self._has_buffer = False
            PyBuffer_Release(&self._buffer)

    cdef str _destroy_name(self):
        return "ibv_dereg_mr"

    cdef str _dependants(self):
        return "a memory window is bound to it; unbind that first"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error = 0
        if self._lender_slot == NULL:
            with nogil:
                error = self.context.table.dereg_mr(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self._release()
        self.pd._leave()

    @property
    def address(self):
        """Address of the first byte, an int.

        :raises ClosedResourceError: the region is closed.
        """
        return self._read(0)

    @property
    def length(self):
        """Length in bytes, an int.

        :raises ClosedResourceError: the region is closed.
        """
        return self._read(1)

    @property
    def lkey(self):
        """Local key, an int, for scatter/gather entries of this process's work requests.

        :raises ClosedResourceError: the region is closed.
        """
        return self._read(2)

    @property
    def rkey(self):
        """Remote key, an int, which a peer needs to access the region.

        :raises ClosedResourceError: the region is closed.
        """
        return self._read(3)

    def _read(self, int field):
        """Return a field, an int: the address if `field` is 0, the length if it is 1, the lkey if 2, the rkey if 3.

        :raises ClosedResourceError: the region is closed.
        """
        self._enter()
        try:
            if field == 0:
                return <uintptr_t>self.pointer.addr
            if field == 1:
                return self.pointer.length
            return self.pointer.lkey if field == 2 else self.pointer.rkey
        finally:
            self._leave()


def span(memory):
    """Return a tuple ``(address, length)`` of the memory of an object with the buffer protocol, two ints; the length is
    in bytes.

    The address is valid as long as the caller has the object's buffer exported in another way.

    :param memory: the object.
    :raises TypeError: the object does not support the buffer protocol.
    :raises BufferError: the memory is not contiguous.
    """
    cdef Py_buffer buffer
    PyObject_GetBuffer(memory, &buffer, PyBUF_SIMPLE)
    try:
        return <uintptr_t>buffer.buf, buffer.len
    finally:
        PyBuffer_Release(&buffer)
