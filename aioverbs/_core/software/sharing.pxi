# Part of software.pyx: protection domains that several contexts and processes share, and memory regions of other
# processes.
#
# An instance of a shared domain is a protection domain like any other. RDMA devices fail with EOPNOTSUPP.


def share(ProtectionDomain pd not None, uint64_t share_key):
    """Share a protection domain, so that other contexts of the device can open instances of it (``ibv_alloc_shpd``).

    :param pd: the domain, or a parent domain that is based on it.
    :param share_key: a secret, 0..2**64-1, that the other contexts need.
    :returns: the number of the domain, an int for `open_shared`.
    :raises OverflowError: `share_key` does not fit in 64 bits.
    :raises ClosedResourceError: the domain is closed.
    :raises VerbsError: with EEXIST if the domain is already shared; with EOPNOTSUPP on RDMA devices.
    """
    cdef uint32_t number = 0
    cdef int error = EOPNOTSUPP
    pd._enter()
    try:
        if pd.context.software:
            with nogil:
                error = s.soft_alloc_shpd(pd.pointer, share_key, &number)
    finally:
        pd._leave()
    pd._check("ibv_alloc_shpd", error)
    pd._shared = True
    return number


def open_shared(handles.Context context not None, uint32_t number, uint64_t share_key):
    """Open another instance of a shared protection domain (``ibv_share_pd``).

    Any context of the device can open an instance. Objects created in an instance must be destroyed before that
    instance; queue pairs of one instance may use memory regions of another. The domain ends with its last instance.

    :param context: a context of the device.
    :param number: the number that `share` returned.
    :param share_key: the key that `share` was given.
    :returns: a new `ProtectionDomain`; the caller destroys it.
    :raises OverflowError: `number` does not fit in 32 bits, or `share_key` in 64 bits.
    :raises ClosedResourceError: the context is closed.
    :raises VerbsError: with ENOENT if no domain is shared under that number; with EACCES if the key is wrong; with
        EOPNOTSUPP on RDMA devices.
    """
    return _open_instance(context, number, NULL, share_key)


def import_shared(handles.Context context not None, int fd, uint64_t share_key):
    """Open an instance of a protection domain that another process has shared.

    :param context: a context of the software device.
    :param fd: descriptor that `export` returned in the other process; the caller keeps it.
    :param share_key: key that `open_shared` will require for further instances in this process.
    :returns: a new `ProtectionDomain`; the caller destroys it.
    :raises OverflowError: `share_key` does not fit in 64 bits.
    :raises ClosedResourceError: the context is closed.
    :raises VerbsError: with ENOENT if the domain has ended with its last instance; with EPROTO if `fd` is not such a
        descriptor; with EMFILE if too many processes share the domain; with ENOMEM if memory ran out; with EOPNOTSUPP
        on RDMA devices.
    """
    return _open_instance(context, 0, &fd, share_key)


cdef ProtectionDomain _open_instance(handles.Context context, uint32_t number, int *fd, uint64_t share_key):
    # Return a new handle of an instance, opened with the descriptor `fd`, or with `number` if `fd` is NULL. Raise
    # VerbsError as `open_shared` and `import_shared` do.
    cdef int error = EOPNOTSUPP
    cdef ProtectionDomain pd = ProtectionDomain.__new__(ProtectionDomain)
    pd._begin()
    context._enter()
    pd.context = context
    try:
        if context.software:
            with nogil:
                if fd == NULL:
                    pd.pointer = s.soft_share_pd(context.pointer, number, share_key)
                else:
                    pd.pointer = s.soft_import_shpd(context.pointer, fd[0], share_key)
                error = errno
        if not pd.pointer:
            raise VerbsError("ibv_share_pd", error)
        pd._opened(f"{pd.pointer.handle}")
        pd._shared = True
    except BaseException:
        if pd.pointer:
            pd._destroy_verb()
        context._leave()
        raise
    return pd


def export(ProtectionDomain pd not None):
    """Return a new file descriptor with which another process can open an instance, using `import_shared`. The caller
    closes the descriptor.

    The descriptor refers to the state that all processes share, and to memory for regions of the domain: see
    `shared_area`.

    :param pd: an instance of the domain.
    :raises ClosedResourceError: `pd` is closed.
    :raises VerbsError: with EINVAL if the domain is not shared; with EMFILE or ENOMEM if no descriptor or memory is
        left; with EOPNOTSUPP on RDMA devices.
    """
    cdef int error = EOPNOTSUPP
    cdef int fd = -1
    pd._enter()
    try:
        if pd.context.software:
            with nogil:
                error = s.soft_export_shpd(pd.pointer, &fd)
    finally:
        pd._leave()
    pd._check("ibv_alloc_shpd", error)
    return fd


def shared_area(ProtectionDomain pd not None):
    """Return a capsule for `SharedMemoryAllocator`, which contains the memory that the queue pairs of all processes of
    the domain can access.

    :param pd: an instance of the domain.
    :raises ClosedResourceError: `pd` is closed.
    :raises VerbsError: as for `export`.
    """
    cdef const s.alloc_area *area = NULL
    cdef int error = EOPNOTSUPP
    pd._enter()
    try:
        if pd.context.software:
            with nogil:
                area = s.soft_shared_area(pd.pointer)
                error = errno if area == NULL else 0
    finally:
        pd._leave()
    pd._check("ibv_alloc_shpd", error)
    return PyCapsule_New(<void *>area, "aioverbs.alloc_area", _drop_area)


cdef void _drop_area(object capsule) noexcept:
    # Release the shared memory area of a capsule that is being freed.
    cdef s.alloc_area *area = <s.alloc_area *>PyCapsule_GetPointer(capsule, "aioverbs.alloc_area")
    area.drop(area.handle)


cdef class ImportedRegion(MemoryRegion):
    """Memory region that another process registered with an instance of the protection domain.

    `address` is the region's address in the process that registered it; `here` is the address of its memory in this
    process, and `access` the `AccessFlags` of the registration. `destroy` ends the import, but the region stays
    registered.

    :param pd: an instance of the domain.
    :param key: the region's ``lkey``, which equals its ``rkey``.
    :raises OverflowError: `key` does not fit in 32 bits.
    :raises ClosedResourceError: `pd` is closed.
    :raises VerbsError: with ENOENT if no region of the domain has that key; with EFAULT if the memory is private to the
        other process; with EOPNOTSUPP on RDMA devices.
    """

    cdef void *_here
    cdef readonly object access

    def __init__(self, ProtectionDomain pd not None, uint32_t key):
        cdef int error = EOPNOTSUPP, access = 0
        self._begin()
        pd._enter()
        self.context = pd.context
        self.pd = pd
        try:
            if pd.context.software:
                with nogil:
                    self.pointer = s.soft_import_mr(pd.pointer, key, &self._here, &access)
                    error = errno
            if not self.pointer:
                raise VerbsError("ibv_import_mr", error)
            self.access = AccessFlags(access)
            self._opened(f"lkey {self.pointer.lkey:#x}, {self.pointer.length} bytes, of another process")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            pd._leave()
            raise

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = s.soft_unimport_mr(self.pointer)
        return error

    @property
    def here(self):
        """Address, in this process, of the first byte of the region, an int.

        :raises ClosedResourceError: the region is closed.
        """
        self._enter()
        try:
            return <uintptr_t>self._here
        finally:
            self._leave()


cdef class FileRegion(MemoryRegion):
    """Memory region in a memory file of its own, which peers on this host map: they read it without a request.

    Peers that have a key for a part of it can read and write all of it, at any time until it is deregistered. Only the
    library's own process fills it, and nothing is read from it.

    :param pd: the protection domain.
    :param length: size in bytes, 1..4 MiB.
    :param access: `AccessFlags`.
    :raises OverflowError: `length` is negative.
    :raises ClosedResourceError: `pd` is closed.
    :raises VerbsError: as of `MemoryRegion`; with EINVAL for another length; with EMFILE if more than half of the
        process's descriptors are in use; with EOPNOTSUPP on RDMA devices.
    """

    def __init__(self, ProtectionDomain pd not None, size_t length, access):
        cdef int error = EOPNOTSUPP, flags = access
        self._begin()
        pd._enter()
        self.context = pd.context
        self.pd = pd
        try:
            if pd.context.software:
                with nogil:
                    self.pointer = s.soft_make_file_mr(pd.pointer, length, flags)
                    error = errno
            if not self.pointer:
                raise VerbsError("ibv_reg_mr", error)
            self._opened(f"lkey {self.pointer.lkey:#x}, {length} bytes of a file")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            pd._leave()
            raise

    def fill(self, parts):
        """Copy bytes, one part after the other, to the begin of the memory.

        :param parts: objects with the buffer protocol, contiguous.
        :raises ValueError: they are longer than the memory.
        :raises ClosedResourceError: the region is closed.
        """
        cdef Py_buffer part
        cdef size_t at = 0
        self._enter()
        try:
            for each in parts:
                PyObject_GetBuffer(each, &part, PyBUF_SIMPLE)
                try:
                    if <size_t>part.len > self.pointer.length - at:
                        raise ValueError(f"the parts have more than {self.pointer.length} bytes")
                    memcpy(<char *>self.pointer.addr + at, part.buf, part.len)
                    at += part.len
                finally:
                    PyBuffer_Release(&part)
        finally:
            self._leave()


def read_mapped(QueuePair qp not None, uint64_t address, uint32_t key, buffer):
    """Read the peer's memory at once, if it is that of a memory file which is mapped here, because a read has led there
    before: see `FileRegion`. This is no request: it does not wait for those that are in flight.

    :param qp: a connected queue pair.
    :param address: address of the memory in the peer's process.
    :param key: key of the memory.
    :param buffer: contiguous, writable buffer for the bytes; of none, or more than 4 MiB, none are read.
    :returns: whether the bytes were read. If not, a read has to be posted, and the buffer may have any content.
    :raises AffinityError: the caller is not on the thread and event loop that own the queue pair.
    :raises BusyResourceError: another thread is changing the state of the queue pair.
    :raises ClosedResourceError: the queue pair is destroyed.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        return _read_mapped(qp, address, key, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


def read_mapped_bytes(QueuePair qp not None, uint64_t address, uint32_t key, uint32_t length):
    """Do the same as `read_mapped`, and return the bytes; None if a read has to be posted.

    :param length: number of bytes.
    :raises OverflowError: `length` does not fit in 32 bits.
    :raises MemoryError: there is no memory for the bytes.
    """
    cdef bytes data = PyBytes_FromStringAndSize(NULL, length)
    return data if _read_mapped(qp, address, key, PyBytes_AS_STRING(data), length) else None


cdef bint _read_mapped(QueuePair qp, uint64_t address, uint32_t key, void *to, size_t length) except -1:
    # Do the work of `read_mapped`.
    cdef bint done = False
    qp._use("soft_read_mapped")
    try:
        if qp.context.software and length <= UINT32_MAX:
            with nogil:
                done = s.soft_read_mapped(qp.pointer, to, address, key, <uint32_t>length)
    finally:
        qp._unuse()
    return done
