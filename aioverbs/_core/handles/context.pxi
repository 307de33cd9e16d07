# Part of handles.pyx: open devices.


# Exported verbs of libibverbs, copied into each context, and its functions that find and open devices.
cdef v.verbs_table _exported
cdef v.verbs_devices _devices
_exporting = threading.Lock()
cdef bint _is_exported = False


cdef int _load_exported() except -1:
    # Load libibverbs in the first call. Raise LibraryNotFoundError where it cannot be loaded, or lacks a verb.
    global _is_exported
    cdef const char *problem = NULL
    with _exporting:
        if not _is_exported:
            problem = v.verbs_table_load(&_exported, "libibverbs.so.1")
            if not problem:
                problem = v.verbs_devices_load(&_devices, "libibverbs.so.1")
            if problem:
                raise LibraryNotFoundError("libibverbs.so.1", problem.decode(errors="replace"))
            _is_exported = True
    return 0


cdef v.ibv_device **_device_list() except NULL:
    # Return the RDMA devices, with NULL at the end; the caller frees the list. Raises as `device_names`.
    cdef int error
    cdef v.ibv_device **found
    _load_exported()
    with nogil:
        found = _devices.get_device_list(NULL)
        error = errno
    if not found:
        raise VerbsError("ibv_get_device_list", error or EIO)
    return found


cdef list _names_in(v.ibv_device **found):
    names = []
    while found[0]:
        names.append(found[0].name.decode())
        found += 1
    return names


def device_names():
    """Return the names of the RDMA devices for which libibverbs has a provider: ``ibv_get_device_list``.

    :returns: a new list of str, in the order of libibverbs.
    :raises LibraryNotFoundError: libibverbs cannot be loaded.
    :raises VerbsError: the verb failed.
    """
    cdef v.ibv_device **found = _device_list()
    try:
        return _names_in(found)
    finally:
        _devices.free_device_list(found)


cdef uintptr_t _slot(void **slot, verb) except 0:
    # Return the address of the pointer to a verb. Raise ValueError for NULL: the table has no such verb.
    if not slot:
        raise ValueError(f"ibv_{verb} is not in the table of exported verbs")
    return <uintptr_t>slot


def table_slot(verb):
    """Return the address, an int, of the pointer to an exported verb that is called before there is a context, or from
    which contexts opened after this call copy theirs.

    Like `Context.table_slot`; also for ``"query_gid_table"``.

    :param verb: name without ``ibv_``.
    :raises LibraryNotFoundError: libibverbs cannot be loaded.
    :raises ValueError: there is no such verb.
    """
    cdef bytes name = verb.encode()
    cdef void **slot
    _load_exported()
    slot = v.verbs_devices_slot(&_devices, name)
    return _slot(slot or v.verbs_table_slot(&_exported, name), verb)


cdef class Context(Handle):
    """Open device: ``struct ibv_context``. Created by `open_device`, `import_device` or `adopt`;
    ``software.Context.open`` makes the subclass for the software device.

    Any thread may use a context, and the objects made from it that belong to no thread domain.
    """

    def __cinit__(self, *_, **__):
        self._ports = {}

    def __init__(self):
        raise TypeError("use Context.open_device, Context.import_device, Context.adopt or software.Context.open")

    @staticmethod
    def open_device(str name):
        """Open an RDMA device: ``ibv_open_device``.

        :param name: one of `device_names`.
        :returns: a new `Context`; the caller destroys it.
        :raises DeviceNotFoundError: there is no device of that name.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        :raises VerbsError: the verb failed, or ``ibv_get_device_list`` did.
        """
        cdef int error = 0
        cdef v.ibv_device *device
        cdef v.ibv_device **found = _device_list()
        cdef Context self = Context.__new__(Context)
        try:
            names = _names_in(found)
            if name not in names:
                raise DeviceNotFoundError(name, names)
            device = found[<size_t>names.index(name)]
            with nogil:
                self.pointer = _devices.open_device(device)
                error = errno
        finally:
            _devices.free_device_list(found)
        if not self.pointer:
            raise VerbsError("ibv_open_device", error or EIO)
        self.table = _exported
        try:
            self.context = self
            self._read_device_fields()
            self._opened("")
        except BaseException:
            self._destroy_verb()
            raise
        return self

    @staticmethod
    def adopt(capsule, owner):
        """Use a context that other code opened through libibverbs.

        :param capsule: capsule "ibv_context *" from `pyverbs_bridge`: the address of the lender's pointer.
        :param owner: object that contains that pointer and keeps the context open.
        :returns: a new `Context`; the caller destroys it, which leaves the context open.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        """
        cdef Context self = Context.__new__(Context)
        self._borrow(capsule, "ibv_context *", owner)
        self.pointer = <ibv_context *>self._lent_pointer
        _load_exported()
        self.table = _exported
        self.context = self
        self._read_device_fields()
        self._opened("")
        return self

    @staticmethod
    def import_device(int cmd_fd):
        """Open a context over the command descriptor of another context, of this process or another one:
        ``ibv_import_device``.

        Objects made in one of them are known to the other by their numbers: see `ProtectionDomain.import_pd`.

        :param cmd_fd: descriptor that `dup_cmd_fd` of the other context returned; the caller keeps it.
        :returns: a new `Context`; the caller destroys it.
        :raises OSError: `cmd_fd` is not an open descriptor, or there is no descriptor left to duplicate it to.
        :raises LibraryNotFoundError: libibverbs cannot be loaded.
        :raises VerbsError: with EOPNOTSUPP where the provider does not support it, with EINVAL where `cmd_fd` is no
            descriptor of an RDMA device, with ENODEV where this machine does not have the device.
        """
        cdef int error, own
        cdef Context self = Context.__new__(Context)
        _load_exported()
        self.table = _exported
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
        """Set name, descriptor of asynchronous events and number of completion vectors from the open device."""
        self.name = self.pointer.device.name.decode()
        self.async_fd = self.pointer.async_fd
        self.num_comp_vectors = self.pointer.num_comp_vectors

    cdef str _destroy_name(self):
        return "ibv_close_device"

    cdef str _unreachable_reason(self):
        # Text that says why peers do not find the device, where that may be why a queue pair was not connected; None
        # for none.
        return None

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error = 0
        if self._lender is None:
            with nogil:
                error = self.table.close_device(self.pointer)
        return error

    def dup_cmd_fd(self):
        """Return a duplicate of the context's command descriptor, an int, for `import_device`. The caller closes it.

        :raises OSError: there is no descriptor left.
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
    def extended_address(self):
        """Address of the enclosing ``struct verbs_context``, an int; 0 without one.

        :raises ClosedResourceError: the context is closed.
        """
        self._enter()
        try:
            return <uintptr_t>v.verbs_context_of(self.pointer)
        finally:
            self._leave()

    def table_slot(self, verb):
        """Return the address, an int, of this context's pointer to an exported verb, for code that intercepts verbs.

        No verb may run while the pointer is changed.

        :param verb: name without ``ibv_``, such as ``"dealloc_pd"``.
        :raises ValueError: the table has no such verb.
        """
        cdef bytes name = verb.encode()
        slot = _slot(v.verbs_table_slot(&self.table, name), verb)
        self._enter()
        self._leave()
        return slot

    @property
    def attributes(self):
        """Limits of the device, a `DeviceAttributes`, which do not change while the device is open.

        The first use queries the device by `query_device` and keeps the result; later uses return it, also after the
        context is closed.

        :raises VerbsError: the query on first use failed.
        :raises ClosedResourceError: the context was closed before the first use.
        """
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
        """Return the size limit of a message over a port, in bytes. The first call for a port queries it.

        :param port_num: number of the port, from 1.
        :raises ValueError: `port_num` is not in 0..255.
        :raises VerbsError: the query failed, such as with EINVAL where the device has no such port.
        """
        found = self._ports.get(port_num)
        if found is None:
            found = self._ports[port_num] = self.query_port(port_num).max_msg_sz
        return found

    def query_device(self):
        """Query the device's limits: ``ibv_query_device``.

        :returns: a new `DeviceAttributes`.
        :raises VerbsError: the verb failed.
        """
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
        """Query the state of a port: ``ibv_query_port``.

        :param port_num: number of the port, from 1.
        :returns: a new `PortAttributes`.
        :raises ValueError: `port_num` is not in 0..255.
        :raises VerbsError: the verb failed, such as with EINVAL where the device has no such port.
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
        """Query an entry of a port's GID table: ``ibv_query_gid``.

        :param port_num: number of the port, from 1.
        :param index: index in the table, from 0.
        :returns: the GID, 16 bytes.
        :raises ValueError: `port_num` is not in 0..255.
        :raises VerbsError: the verb failed, such as where there is no such port or entry.
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

    def query_gid_table(self, int max_entries):
        """Query the GIDs of all ports with their types: ``ibv_query_gid_table``.

        :param max_entries: sum of the sizes of the ports' GID tables.
        :returns: a new list with a tuple for each GID that is not empty: number of the port, index in the port's table,
            the GID (16 bytes), and its type (a number of `GidType`).
        :raises VerbsError: the verb failed; with EOPNOTSUPP where libibverbs, older than rdma-core 32, lacks the verb,
            and for the software device.
        """
        cdef Py_ssize_t index, count = -EOPNOTSUPP
        cdef v.ibv_gid_entry *entries = <v.ibv_gid_entry *>PyMem_Calloc(max_entries, sizeof(v.ibv_gid_entry))
        if not entries:
            raise MemoryError
        try:
            self._enter()
            try:
                if not self.software and _devices.query_gid_table:
                    with nogil:
                        count = _devices.query_gid_table(
                            self.pointer, entries, max_entries, 0, sizeof(v.ibv_gid_entry)
                        )
            finally:
                self._leave()
            self._check("ibv_query_gid_table", <int>count if count < 0 else 0)
            return [
                (entries[index].port_num, entries[index].gid_index, (<char *>entries[index].gid.raw)[:16],
                 entries[index].gid_type)
                for index in range(count)
            ]
        finally:
            PyMem_Free(entries)

    def query_pkey(self, port_num=1, index=0):
        """Query an entry of a port's partition key table: ``ibv_query_pkey``.

        :param port_num: number of the port, from 1.
        :param index: index in the table, from 0.
        :returns: the partition key, 0..65535, in host byte order.
        :raises ValueError: `port_num` is not in 0..255.
        :raises VerbsError: the verb failed, such as where there is no such port or entry.
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
        :raises VerbsError: the verb failed.
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
    # Return `value`; raise ValueError, with the argument's name, where it is not in 0..255.
    if not 0 <= value <= 255:
        raise ValueError(f"`{name}` must be from 0 to 255, got {value}")
    return value
