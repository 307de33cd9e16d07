# Part of handles.pyx: open devices.


def load_libibverbs(library="libibverbs.so.1"):
    """Check that libibverbs can be loaded and has every verb that is needed; `Context.adopt` loads it.

    :param library: name of the shared library.
    :raises LibraryNotFoundError: the library cannot be loaded, or lacks a verb.
    """
    cdef v.verbs_table table
    _load(&table, library)


cdef int _load(v.verbs_table *table, library) except -1:
    cdef bytes name = library.encode()
    cdef const char *problem = v.verbs_table_load(table, name)
    if problem:
        raise LibraryNotFoundError(library, problem.decode(errors="replace"))
    return 0


# Exported verbs of libibverbs, copied into each context.
cdef v.verbs_table _exported
_exporting = threading.Lock()
cdef bint _is_exported = False


cdef int _copy_exported(v.verbs_table *table) except -1:
    global _is_exported
    with _exporting:
        if not _is_exported:
            _load(&_exported, "libibverbs.so.1")
            _is_exported = True
        table[0] = _exported
    return 0


cdef uintptr_t _slot(v.verbs_table *table, verb) except 0:
    cdef bytes name = verb.encode()
    cdef void **slot = v.verbs_table_slot(table, name)
    if not slot:
        raise ValueError(f"ibv_{verb} is not in the table of exported verbs")
    return <uintptr_t>slot


def table_slot(verb):
    """Return the address from which contexts opened from here on copy their pointer to an exported verb.

    Like `Context.table_slot`, for ``"import_device"``, which is called before there is a context.

    :param verb: name without ``ibv_``.
    :raises LibraryNotFoundError: libibverbs cannot be loaded.
    :raises ValueError: the table has no such verb.
    """
    cdef v.verbs_table table
    _copy_exported(&table)
    return _slot(&_exported, verb)


cdef class Context(Handle):
    """Open device: ``struct ibv_context``. Created by `adopt` or `import_device`; the software device has a subclass.

    Any thread may use a context, and the objects made from it that belong to no thread domain.
    """

    def __cinit__(self, *_, **__):
        self._ports = {}

    def __init__(self):
        raise TypeError("use Context.adopt, Context.import_device or software.Context.open")

    @staticmethod
    def adopt(capsule, owner):
        """Use a context that other code opened through libibverbs.

        :param capsule: capsule "ibv_context *" from `pyverbs_bridge`: the address of the lender's pointer.
        :param owner: object that contains that pointer and keeps the context open; ``close()`` is called after the
            handle is destroyed.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        """
        cdef Context self = Context.__new__(Context)
        self._borrow(capsule, "ibv_context *", owner)
        self.pointer = <ibv_context *>self._lent_pointer
        _copy_exported(&self.table)
        self.context = self
        self._read_device_fields()
        self._opened("")
        return self

    @staticmethod
    def import_device(int cmd_fd):
        """Open a context over the command descriptor of another context, of this process or another one:
        ``ibv_import_device``.

        Objects made in one of them are known to the other by their numbers: see `ProtectionDomain.import_pd`.

        :param cmd_fd: descriptor that `dup_cmd_fd` returned there; the caller keeps it.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        :raises VerbsError: with EOPNOTSUPP where the provider does not support it, with EINVAL where `cmd_fd` is no
            descriptor of an RDMA device, with ENODEV where this machine does not have the device.
        """
        cdef int error, own
        cdef Context self = Context.__new__(Context)
        _copy_exported(&self.table)
        # Whether a failing verb has closed its descriptor depends on how far it came. The duplicate gets a high number
        # that no other open call is given meanwhile, so that the number afterwards refers to the duplicate or to
        # nothing.
        lowest = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        own = fcntl.fcntl(cmd_fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        with nogil:
            self.pointer = self.table.import_device(own)
            error = errno
        if not self.pointer:
            with contextlib.suppress(OSError):      # closed by the verb
                if os.path.sameopenfile(own, cmd_fd):
                    os.close(own)
            raise VerbsError("ibv_import_device", error)
        self.context = self
        self._read_device_fields()
        self._opened("")
        return self

    def _read_device_fields(self):
        self.name = self.pointer.device.name.decode()
        self.async_fd = self.pointer.async_fd
        self.num_comp_vectors = self.pointer.num_comp_vectors

    cdef str _destroy_name(self):
        return "ibv_close_device"

    cdef str _unreachable_reason(self):
        # Text that says why peers do not find the device, where that may be why a queue pair was not connected; None
        # for none.
        return None

    cdef int _destroy_verb(self) except? -1:
        cdef int error = 0
        if self._lender is not None:
            self._lender.close()
        else:
            with nogil:
                error = self.table.close_device(self.pointer)
        return error

    def dup_cmd_fd(self):
        """Return a duplicate of the context's command descriptor, for `import_device`. The caller closes it.

        :raises VerbsError: with EOPNOTSUPP for the software device, which has no such descriptor.
        """
        self._enter()
        try:
            if self.pointer.cmd_fd < 0:
                raise VerbsError("ibv_import_device", EOPNOTSUPP)
            return fcntl.fcntl(self.pointer.cmd_fd, fcntl.F_DUPFD_CLOEXEC, 0)
        finally:
            self._leave()

    @property
    def address(self):
        """Address of the ``struct ibv_context``."""
        self._enter()
        try:
            return <uintptr_t>self.pointer
        finally:
            self._leave()

    @property
    def extended_address(self):
        """Address of the enclosing ``struct verbs_context``; 0 without one."""
        self._enter()
        try:
            return <uintptr_t>v.verbs_context_of(self.pointer)
        finally:
            self._leave()

    def table_slot(self, verb):
        """Return the address of this context's pointer to an exported verb, for code that intercepts verbs.

        No verb may run while the pointer is changed.

        :param verb: name without ``ibv_``, such as ``"dealloc_pd"``.
        :raises ValueError: the table has no such verb.
        """
        slot = _slot(&self.table, verb)
        self._enter()
        self._leave()
        return slot

    @property
    def attributes(self):
        """Limits of the device, queried on first use: they do not change while the device is open."""
        cdef section within
        section_enter(&within, <PyObject *>self)    # several threads may query first
        attributes = self._attributes
        section_leave(&within)
        if attributes is None:
            attributes = self.query_device()
            section_enter(&within, <PyObject *>self)
            if self._attributes is None:
                self._attributes = attributes
            section_leave(&within)
        return attributes

    def max_message(self, port_num=1):
        """Return the size limit of a message over a port, in bytes; queried once.

        :param port_num: number of the port, from 1.
        """
        found = self._ports.get(port_num)
        if found is None:
            found = self._ports[port_num] = self.query_port(port_num).max_msg_sz
        return found

    def query_device(self):
        """Query the device's limits, a `DeviceAttributes`: ``ibv_query_device``."""
        cdef v.ibv_device_attr attr
        cdef int error
        self._enter()
        try:
            with nogil:
                error = self.table.query_device(self.pointer, &attr)
        finally:
            self._leave()
        self._check("ibv_query_device", error)
        return DeviceAttributes(
            fw_ver=attr.fw_ver.decode(errors="replace"),
            node_guid=(<char *>&attr.node_guid)[:8],
            sys_image_guid=(<char *>&attr.sys_image_guid)[:8],
            vendor_id=attr.vendor_id,
            vendor_part_id=attr.vendor_part_id,
            hw_ver=attr.hw_ver,
            max_mr_size=attr.max_mr_size,
            page_size_cap=attr.page_size_cap,
            device_cap_flags=attr.device_cap_flags,
            max_qp=attr.max_qp,
            max_qp_wr=attr.max_qp_wr,
            max_sge=attr.max_sge,
            max_sge_rd=attr.max_sge_rd,
            max_cq=attr.max_cq,
            max_cqe=attr.max_cqe,
            max_mr=attr.max_mr,
            max_pd=attr.max_pd,
            max_qp_rd_atom=attr.max_qp_rd_atom,
            max_qp_init_rd_atom=attr.max_qp_init_rd_atom,
            max_srq=attr.max_srq,
            max_srq_wr=attr.max_srq_wr,
            max_srq_sge=attr.max_srq_sge,
            max_ah=attr.max_ah,
            max_mw=attr.max_mw,
            max_pkeys=attr.max_pkeys,
            atomic_cap=AtomicCap(attr.atomic_cap),
            phys_port_cnt=attr.phys_port_cnt,
        )

    def query_port(self, port_num=1):
        """Query the state of a port, a `PortAttributes`: ``ibv_query_port``.

        :param port_num: number of the port, from 1.
        :raises ValueError: `port_num` is not in 0..255.
        """
        cdef v.ibv_port_attr attr
        cdef int error, port = _byte(port_num, "port_num")
        self._enter()
        try:
            with nogil:
                error = v.verbs_query_port(self.pointer, port, &attr)
        finally:
            self._leave()
        self._check("ibv_query_port", error)
        return PortAttributes(
            state=PortState(attr.state),
            max_mtu=Mtu(attr.max_mtu),
            active_mtu=Mtu(attr.active_mtu),
            gid_tbl_len=attr.gid_tbl_len,
            pkey_tbl_len=attr.pkey_tbl_len,
            max_msg_sz=attr.max_msg_sz,
            lid=attr.lid,
            sm_lid=attr.sm_lid,
            lmc=attr.lmc,
            link_layer=LinkLayer(attr.link_layer),
            port_cap_flags=attr.port_cap_flags,
            active_width=attr.active_width,
            active_speed=attr.active_speed,
            phys_state=attr.phys_state,
        )

    def query_gid(self, port_num=1, index=0):
        """Query an entry of a port's GID table, 16 bytes: ``ibv_query_gid``.

        :param port_num: number of the port, from 1.
        :param index: index in the table.
        :raises ValueError: `port_num` is not in 0..255.
        """
        cdef v.ibv_gid gid
        cdef int failed, position = index, port = _byte(port_num, "port_num"), error = 0
        self._enter()
        try:
            with nogil:
                failed = self.table.query_gid(self.pointer, port, position, &gid)
                if failed:
                    error = errno
        finally:
            self._leave()
        self._check("ibv_query_gid", (error or EIO) if failed else 0)
        return (<char *>gid.raw)[:16]

    def query_pkey(self, port_num=1, index=0):
        """Query an entry of a port's partition key table, in host byte order: ``ibv_query_pkey``.

        :param port_num: number of the port, from 1.
        :param index: index in the table.
        :raises ValueError: `port_num` is not in 0..255.
        """
        cdef uint16_t pkey
        cdef int failed, position = index, port = _byte(port_num, "port_num"), error = 0
        self._enter()
        try:
            with nogil:
                failed = self.table.query_pkey(self.pointer, port, position, &pkey)
                if failed:
                    error = errno
        finally:
            self._leave()
        self._check("ibv_query_pkey", (error or EIO) if failed else 0)
        return socket.ntohs(pkey)

    def get_async_event(self):
        """Take an asynchronous event, an `AsyncEvent`, without waiting: ``ibv_get_async_event``.

        `async_fd` is readable while an event waits; the first call makes that descriptor non-blocking. Acknowledge each
        event before its object, or this context, is destroyed. The software device does not repeat an event that waits
        already.

        :returns: the event; None if no event is waiting.
        """
        self._enter()
        try:
            if not self._nonblocking:
                fcntl.fcntl(self.async_fd, fcntl.F_SETFL, fcntl.fcntl(self.async_fd, fcntl.F_GETFL) | os.O_NONBLOCK)
                self._nonblocking = True
            return _take_event(self)
        finally:
            self._leave()


cdef int _byte(value, str name) except -1:
    if not 0 <= value <= 255:
        raise ValueError(f"`{name}` must be from 0 to 255, got {value}")
    return value
