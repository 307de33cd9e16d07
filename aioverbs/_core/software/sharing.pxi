# Part of software.pyx: protection domains that several contexts and processes share, and regions of other processes.
#
# An instance of a domain is a protection domain as any. What is asked of another device answers EOPNOTSUPP.


def share(ProtectionDomain pd not None, uint64_t share_key):
    """Let other contexts of the device open a protection domain: ``ibv_alloc_shpd``.

    :param pd: the domain, or a parent domain of it.
    :param share_key: a secret of 64 bits that they need, too.
    :return: the number that `open_shared` takes.
    :raises OverflowError: the key has more than 64 bits.
    :raises VerbsError: with EEXIST where it is shared already, with EOPNOTSUPP on other devices.
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
    """Open a further instance of a protection domain that was shared: ``ibv_share_pd``.

    Any context of the device will do. What is made with an instance is the instance's, and is destroyed before it;
    regions of one may be used by queue pairs of another. The domain goes with its last instance.

    :param number: what `share` returned.
    :param share_key: the 64 bits that `share` was given.
    :raises VerbsError: with ENOENT where nothing is shared by that number, with EACCES where the key is another, with
        EOPNOTSUPP on other devices.
    """
    return _open_instance(context, number, NULL, share_key)


def import_shared(handles.Context context not None, int fd, uint64_t share_key):
    """Open an instance of a protection domain of another process.

    :param fd: what `export` returned there; it stays the caller's.
    :param share_key: for further instances in this process, by `open_shared`.
    :raises VerbsError: with ENOENT where the last instance went, with EPROTO where it is no such descriptor, with
        EMFILE where too many processes have it, with ENOMEM, with EOPNOTSUPP on other devices.
    """
    return _open_instance(context, 0, &fd, share_key)


cdef ProtectionDomain _open_instance(handles.Context context, uint32_t number, int *fd, uint64_t share_key):
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
    """A descriptor by which another process can make an instance, with `import_shared`; the caller's to close.

    It is what all processes have of the domain, and memory that regions of it can be of: see `shared_area`.

    :raises VerbsError: with EINVAL where it is not shared, with EOPNOTSUPP on other devices, with EMFILE or ENOMEM.
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
    """The memory that queue pairs of other processes reach, too, as a capsule for `SharedMemoryAllocator`.

    :raises VerbsError: as `export`.
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
    cdef s.alloc_area *area = <s.alloc_area *>PyCapsule_GetPointer(capsule, "aioverbs.alloc_area")
    area.drop(area.handle)


cdef class ImportedRegion(MemoryRegion):
    """A memory region that another process registered with an instance of the protection domain.

    Its `address` is the one that it has there; `here` is where its memory is in this process, `access` what it was
    registered for.

    :param key: its ``lkey``, which is its ``rkey``, too.
    :raises VerbsError: with ENOENT where no region of the domain has that key, with EFAULT where its memory is its
        process' alone, with EOPNOTSUPP on other devices.
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
        """Where the first byte is in this process."""
        self._enter()
        try:
            return <uintptr_t>self._here
        finally:
            self._leave()
