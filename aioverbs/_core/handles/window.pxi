# Part of handles.pyx: memory windows.

cdef class MemoryWindow(Handle):
    """Memory window (``ibv_alloc_mw``). A `WorkQueue` binds it to a part of a memory region.

    :param pd: the protection domain.
    :param mw_type: a `MwType`. A type 1 window is bound and unbound by a verb of its own. A type 2 window is bound by a
        work request, can be used only through the queue pair of that request, and is unbound by invalidating its key
        (with ``LOCAL_INV`` here or ``SEND_WITH_INV`` by the peer). Destroying a window of either type unbinds it
        (``ibv_dealloc_mw``).
    :raises ValueError: `mw_type` is not a `MwType`.
    :raises ClosedResourceError: the protection domain is closed.
    :raises VerbsError: with ENOMEM if memory ran out; with EOPNOTSUPP if the provider has no memory windows.
    """

    def __init__(self, ProtectionDomain pd not None, mw_type):
        cdef int error = 0, kind = mw_type
        self._begin()
        self.mw_type = MwType(mw_type)
        pd._enter()
        self.context = pd.context
        self.pd = pd
        try:
            with nogil:
                self.pointer = v.verbs_alloc_mw(pd.pointer, <v.ibv_mw_type>kind)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_alloc_mw", error)
            self._opened(f"of type {kind}")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            pd._leave()
            raise

    cdef str _destroy_name(self):
        return "ibv_dealloc_mw"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = v.verbs_dealloc_mw(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.pd._leave()

    @property
    def rkey(self):
        """Remote key, an int, which a peer needs to use the window. The key changes with each binding.

        :raises ClosedResourceError: the window is closed.
        """
        self._enter()
        try:
            return self.pointer.rkey
        finally:
            self._leave()
