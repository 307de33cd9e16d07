# Part of handles.pyx: open devices.


def load_libibverbs(library="libibverbs.so.1"):
    """See that libibverbs is there and has every verb that is needed: `Context.adopt` loads it.

    :raises LibraryNotFoundError: it cannot be loaded, or lacks a verb.
    """
    cdef v.verbs_table table
    _load(&table, library)


cdef int _load(v.verbs_table *table, library) except -1:
    cdef bytes name = library.encode()
    cdef const char *problem = v.verbs_table_load(table, name)
    if problem:
        raise LibraryNotFoundError(library, problem.decode(errors="replace"))
    return 0


# libibverbs' verbs as contexts get them.
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
    """The address from which RDMA contexts opened from here on take their pointer to an exported verb.

    As `Context.table_slot`, for ``"import_device"``, which comes before there is one.

    :raises LibraryNotFoundError: libibverbs cannot be loaded.
    """
    cdef v.verbs_table table
    _copy_exported(&table)
    return _slot(&_exported, verb)


cdef class Context(Handle):
    """An open device: ``struct ibv_context``. Made by `adopt` or `import_device`.
    The software device's extension has a class of its own.

    Any thread may use it, and what is made from it as far as no thread domain is involved.
    """

    def __cinit__(self, *_, **__):
        self._ports = {}

    def __init__(self):
        raise TypeError("use Context.adopt, Context.import_device or software.Context.open")

    @staticmethod
    def adopt(capsule, owner):
        """Use a context that somebody else opened through libibverbs.

        :param capsule: a capsule "ibv_context *", from `pyverbs_bridge`: where the pointer stands while it is open.
        :param owner: what keeps that place and the context; its ``close()`` is called when the handle was destroyed.
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
        """Open a context over the descriptor of another one, of this process or another one: ``ibv_import_device``.

        What is made in one of them is known to the other by its number: see `ProtectionDomain.import_pd`.

        :param cmd_fd: what `dup_cmd_fd` returned there; it stays the caller's.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        :raises VerbsError: with EOPNOTSUPP where the provider has no such contexts, with EINVAL where it is no
            descriptor of an RDMA device, with ENODEV where that device is not here.
        """
        cdef int error, own
        cdef Context self = Context.__new__(Context)
        _copy_exported(&self.table)
        # Whether a verb that fails has closed its descriptor depends on how far it came. It gets a number that nobody
        # else is given meanwhile, so that what is there afterwards is either this or nothing.
        lowest = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        own = fcntl.fcntl(cmd_fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        with nogil:
            self.pointer = self.table.import_device(own)
            error = errno
        if not self.pointer:
            with contextlib.suppress(OSError):      # it was closed
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
        # Why peers do not find the device, where that may be what made a queue pair's way to one fail; None: no reason.
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
        """A duplicate of the descriptor of this context's commands, for `import_device`; the caller's to close.

        :raises VerbsError: with EOPNOTSUPP for the software device, which has none.
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
        """The address of the ``struct ibv_context``."""
        self._enter()
        try:
            return <uintptr_t>self.pointer
        finally:
            self._leave()

    @property
    def extended_address(self):
        """The address of the ``struct verbs_context`` around it; 0 where there is none."""
        self._enter()
        try:
            return <uintptr_t>v.verbs_context_of(self.pointer)
        finally:
            self._leave()

    def table_slot(self, verb):
        """The address at which this context keeps its pointer to an exported verb: ``table_slot("dealloc_pd")``.

        For those who put themselves between aioverbs and a provider. No verb may run meanwhile.
        """
        slot = _slot(&self.table, verb)
        self._enter()
        self._leave()
        return slot

    @property
    def attributes(self):
        """What `query_device` told first: what a device can do does not change while it is open."""
        cdef section within
        section_enter(&within, <PyObject *>self)    # any thread may ask first
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
        """How many bytes a message by a port has at most; asked once, likewise."""
        found = self._ports.get(port_num)
        if found is None:
            found = self._ports[port_num] = self.query_port(port_num).max_msg_sz
        return found

    def query_device(self):
        """The device's limits: ``ibv_query_device``."""
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
        """The state of a port: ``ibv_query_port``."""
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
        """An entry of a port's GID table, 16 bytes: ``ibv_query_gid``."""
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
        """An entry of a port's partition table, in host order: ``ibv_query_pkey``."""
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
        """Take an asynchronous event, or None where none waits; this never blocks: ``ibv_get_async_event``.

        `async_fd` is readable while one waits. From the first call on that descriptor is non-blocking. Each event is an
        `AsyncEvent`, and to be acknowledged before what it is about, or this context, can be destroyed. The software
        device does not tell twice of one that nobody took yet.
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
        raise ValueError(f"{name} must be from 0 to 255, not {value}")
    return value
