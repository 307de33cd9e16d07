# Part of handles.pyx: memory windows.

cdef class MemoryWindow(Handle):
    """A memory window: ``ibv_alloc_mw``. A work queue binds it.

    :param mw_type: a `MwType`. A window of type 1 is bound and unbound by a verb of its own. One of type 2 is bound by
        a work request, used through that queue pair alone, and unbound by invalidating its key (``LOCAL_INV`` here,
        ``SEND_WITH_INV`` from the peer). Destroying a window of either type unbinds it, too: ``ibv_dealloc_mw``.
    :raises ValueError: there is no such type.
    :raises VerbsError: with ENOMEM, or with EOPNOTSUPP where the provider has none.
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

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = v.verbs_dealloc_mw(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.pd._leave()

    @property
    def rkey(self):
        """The key that a peer needs; it changes with each binding."""
        self._enter()
        try:
            return self.pointer.rkey
        finally:
            self._leave()
