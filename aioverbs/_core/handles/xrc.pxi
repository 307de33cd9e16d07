# Part of handles.pyx: XRC domains. Exported as `parent_domain.XrcDomain`; queue pairs and shared receive queues, in the
# layer below that module, use its private fields.

cdef class XrcDomain(Handle):
    """XRC domain (``ibv_open_xrcd``).

    `destroy` calls ``ibv_close_xrcd`` and raises BusyResourceError as long as a queue pair or a shared receive queue
    created with this handle exists. The domain ends when its last handle in any process is destroyed.

    :param context: the device.
    :param fd: file descriptor whose inode identifies the domain, in all processes that open a file of that inode; -1
        for a domain without a file.
    :param oflag: ``os.O_CREAT`` creates the domain if it does not exist; ``os.O_CREAT | os.O_EXCL`` fails if it exists.
    :raises ClosedResourceError: the context is closed.
    :raises VerbsError: with EINVAL if the domain exists and ``os.O_EXCL`` was given, if `oflag` has other flags, or if
        there is no file and ``os.O_CREAT`` was not given; with EAGAIN if the domain does not exist and ``os.O_CREAT``
        was not given; with EBADF if `fd` is not an open file; with EOPNOTSUPP if the provider has no XRC domains; with
        ETIMEDOUT if another process of the software device has stopped, or a foreign process holds the domain's lock,
        for ten seconds.
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

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = v.verbs_close_xrcd(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.context._leave()
