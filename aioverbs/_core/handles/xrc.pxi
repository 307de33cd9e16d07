# Part of handles.pyx: XRC domains. They are `domains.XrcDomain` to their users; queue pairs and shared receive
# queues, which stand below that module, need their insides.

cdef class XrcDomain(Handle):
    """An XRC domain: ``ibv_open_xrcd``.

    :param fd: a file whose inode it is associated with, or -1 for none. All that name one inode open one domain, in
        whichever process.
    :param oflag: ``os.O_CREAT`` makes the domain where there is none yet, with ``os.O_EXCL`` only there.
    :raises VerbsError: with EINVAL where the domain is there and ``os.O_EXCL`` was given, or for other flags, or for no
        file without ``os.O_CREAT``; with EAGAIN where the domain is not there and ``os.O_CREAT`` was not given; with
        EBADF where `fd` is no open file; with EOPNOTSUPP where the provider has none; with ETIMEDOUT where another
        process of the software device stands still, or a stranger locks what only they should, for ten seconds.

    `destroy` is ``ibv_close_xrcd``: busy while a queue pair or a shared receive queue was made with this handle. The
    domain goes with its last handle.
    """

    def __init__(self, Context context not None, int fd=-1, int oflag=os.O_CREAT):
        cdef v.ibv_xrcd_init_attr attr
        cdef int error = 0
        self._begin()
        memset(&attr, 0, sizeof(attr))
        attr.comp_mask = v.IBV_XRCD_INIT_ATTR_FD | v.IBV_XRCD_INIT_ATTR_OFLAGS
        attr.fd = fd
        attr.oflags = oflag
        context._enter()
        self.context = context
        try:
            with nogil:
                self.pointer = v.verbs_open_xrcd(context.pointer, &attr)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_open_xrcd", error)
            self._opened("")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            context._leave()
            raise

    cdef str _destroy_name(self):
        return "ibv_close_xrcd"

    cdef str _dependants(self):
        return "a queue pair or a shared receive queue is associated with it; destroy that first"

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = v.verbs_close_xrcd(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.context._leave()

    @property
    def address(self):
        """The address of the ``struct ibv_xrcd``."""
        self._enter()
        try:
            return <uintptr_t>self.pointer
        finally:
            self._leave()
