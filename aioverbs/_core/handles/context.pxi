# Part of handles.pyx: open devices.


# Exported verbs of libibverbs, copied into each context, and its functions that find and open devices.
cdef v.verbs_table _exported
cdef v.verbs_devices _devices
cdef bint _is_exported = False


cdef int _load_exported() except -1:
    # Load libibverbs on the first call. Raise LibraryNotFoundError if it cannot be loaded or lacks a verb.
    global _is_exported
    cdef const char *problem = NULL
    cdef int error
    with library_lock:
        if not _is_exported:
            problem = v.verbs_table_load(&_exported, "libibverbs.so.1")
            if not problem:
                problem = v.verbs_devices_load(&_devices, "libibverbs.so.1")
            error = errno
            if problem:
                raise LibraryNotFoundError(
                    "libibverbs.so.1", problem.decode(errors="replace"), outdated=error == ENOSYS
                )
            _is_exported = True
    return 0


cdef v.ibv_device **_device_list() except NULL:
    # Return the RDMA devices, with NULL at the end; the caller frees the list. Raise the errors of `device_names`.
    cdef int error
    cdef v.ibv_device **found
    _load_exported()
    with library_lock, nogil:
        libc.errno.errno = 0        # that of an earlier call must not tell why this one fails
        found = _devices.get_device_list(NULL)
        error = errno
    if not found:
        raise VerbsError("ibv_get_device_list", error or EIO)
    return found


cdef list _names_in(v.ibv_device **found):
    # Return a new list of the names of the devices in a list that ends with NULL.
    names = []
    while found[0]:
        names.append(os.fsdecode(found[0].name))
        found += 1
    return names


def device_names():
    """Return the names of the RDMA devices for which libibverbs has a provider (``ibv_get_device_list``).

    :returns: a new list of str, in the order of libibverbs; empty if there is no such device.
    :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
    :raises VerbsError: the verb failed; with ENOSYS if the kernel's RDMA modules are not loaded.
    """
    cdef v.ibv_device **found = _device_list()
    try:
        return _names_in(found)
    finally:
        _devices.free_device_list(found)


cdef uintptr_t _slot(void **slot, verb) except 0:
    # Return the address `slot` as a number. Raise ValueError if it is NULL, because the table lacks the verb `verb`.
    if not slot:
        raise ValueError(f"ibv_{verb} is not in the table of exported verbs")
    return <uintptr_t>slot


def table_slot(verb):
    """Return the address, an int, of the process's pointer to an exported verb, so that other code can replace the
    pointer and intercept the verb.

    A replaced pointer takes effect at once for the verbs ``"get_device_list"``, ``"free_device_list"``,
    ``"open_device"`` and ``"query_gid_table"``. Each context of an RDMA device copies the pointers to all other verbs
    when it is opened: for an open context, use `Context.table_slot`. No verb may run while a pointer is being replaced.

    :param verb: name of the verb without ``ibv_``.
    :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
    :raises ValueError: the table has no such verb.
    """
    cdef bytes name = verb.encode()
    cdef void **slot
    _load_exported()
    slot = v.verbs_devices_slot(&_devices, name)
    return _slot(slot or v.verbs_table_slot(&_exported, name), verb)


cdef class Context(Handle):
    """Open device (``struct ibv_context``). Created by `open_device`, `import_device` or `adopt`;
    ``software.Context.open`` creates the subclass for the software device.

    Any thread may use a context, and those objects created from it that do not belong to a thread domain.
    """

    def __cinit__(self, *_, **__):
        self._ports = {}

    def __init__(self):
        raise TypeError("use Context.open_device, Context.import_device, Context.adopt or software.Context.open")

    @staticmethod
    def open_device(str name):
        """Open an RDMA device (``ibv_open_device``).

        :param name: one of `device_names`.
        :returns: a new `Context`; the caller destroys it.
        :raises DeviceNotFoundError: `device_names` does not contain `name`.
        :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
        :raises VerbsError: the verb failed, or the verb that lists the devices did: then as for `device_names`.
        """
        cdef int error = 0
        cdef v.ibv_device *device
        cdef Context self = Context.__new__(Context)
        cdef v.ibv_device **found = _device_list()
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
        self._complete()
        return self

    @staticmethod
    def adopt(capsule, owner):
        """Return a handle of a context that other code, the lender, has opened through libibverbs. The lender must not
        close the context before the handle is destroyed.

        :param capsule: capsule "ibv_context *" from `pyverbs_bridge`: the address of the lender's pointer.
        :param owner: object that contains that pointer; the handle keeps it alive.
        :returns: a new `Context`; the caller destroys it, which leaves the lender's context open.
        :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
        :raises ValueError: `capsule` is not such a capsule.
        """
        cdef Context self = Context.__new__(Context)
        self._borrow(capsule, "ibv_context *", owner)
        self.pointer = <ibv_context *>self._lent_pointer
        _load_exported()
        self.table = _exported
        self._complete()
        return self

    @staticmethod
    def import_device(int cmd_fd):
        """Open a context that uses the command descriptor of another context, in this or another process
        (``ibv_import_device``).

        Objects created in one of the two contexts can be imported into the other by their numbers: see
        `ProtectionDomain.import_pd`.

        :param cmd_fd: descriptor that `dup_cmd_fd` of the other context returned. The new context uses a duplicate:
            the caller closes `cmd_fd`, also if this raises.
        :returns: a new `Context`; the caller destroys it.
        :raises OSError: `cmd_fd` is not an open descriptor (EBADF), or no descriptor is left for a duplicate (EMFILE).
        :raises ValueError: `cmd_fd` is negative.
        :raises LibraryNotFoundError: libibverbs cannot be loaded, or lacks a verb.
        :raises VerbsError: the verb failed; with EOPNOTSUPP if the provider does not support it, with EINVAL if
            `cmd_fd` is not a descriptor of an RDMA device, with ENODEV if this machine does not have the device.
        """
        cdef int error, own
        cdef Context self = Context.__new__(Context)
        _load_exported()
        self.table = _exported
        # Whether a failing verb has closed its descriptor depends on how far it got. The duplicate gets a high number,
        # which no other open call is given in the meantime, so that the number then refers either to the duplicate or
        # to nothing.
        lowest = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        own = fcntl.fcntl(cmd_fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        with library_lock, nogil:
            self.pointer = self.table.import_device(own)
            error = errno
        if not self.pointer:
            with contextlib.suppress(OSError):      # closed by the verb
                if os.path.sameopenfile(own, cmd_fd):
                    os.close(own)
            raise VerbsError("ibv_import_device", error or EIO)
        self._complete()
        return self

    cdef int _complete(self) except -1:
        # Complete the handle of a context that is open. If this fails, close the context, unless it is a lender's.
        try:
            self.context = self
            self._read_device_fields()
            self._opened("")
        except BaseException:
            self._destroy_verb()
            raise
        return 0

    def _read_device_fields(self):
        """Set the attributes `name`, `async_fd` and `num_comp_vectors` to the values of the open device."""
        self.name = os.fsdecode(self.pointer.device.name)
        self.async_fd = self.pointer.async_fd
        self.num_comp_vectors = self.pointer.num_comp_vectors

    cdef str _destroy_name(self):
        return "ibv_close_device"

    cdef str _unreachable_reason(self):
        # Return text that says why peers cannot find the device, which may be why a queue pair could not be connected;
        # None or empty if no such reason is known.
        return None

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error = 0
        if self._lender is None:
            with nogil:
                error = self.table.close_device(self.pointer)
        elif self._was_blocking:                # the lender reads its events as before
            os.set_blocking(self.async_fd, True)
        return error

    def dup_cmd_fd(self):
        """Return a duplicate of the context's command descriptor, an int, for `import_device`. The caller closes it.

        :raises ClosedResourceError: the context is closed.
        :raises OSError: no descriptor is left (EMFILE).
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
        """Address of the enclosing ``struct verbs_context``, an int; 0 if there is none.

        :raises ClosedResourceError: the context is closed.
        """
        self._enter()
        try:
            return <uintptr_t>v.verbs_context_of(self.pointer)
        finally:
            self._leave()

    def table_slot(self, verb):
        """Return the address, an int, of this context's pointer to an exported verb, so that other code can replace the
        pointer and intercept the verb.

        The address is valid as long as the handle exists. No verb may run while the pointer is being replaced.

        :param verb: name of the verb without ``ibv_``, such as ``"dealloc_pd"``.
        :raises ValueError: the table has no such verb.
        :raises ClosedResourceError: the context is closed.
        """
        cdef bytes name = verb.encode()
        slot = _slot(v.verbs_table_slot(&self.table, name), verb)
        self._enter()
        self._leave()
        return slot

    @property
    def attributes(self):
        """Limits of the device, a `DeviceAttributes`, which do not change while the device is open.

        The first use queries the device with `query_device` and keeps the result; later uses return the same result,
        even after the context has been closed.

        :raises VerbsError: the query on the first use failed; the next use queries again.
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
        """Return the largest size, in bytes, of a message that can be sent over a port, an int.

        A port that was not queried before is queried with `query_port`.

        :param port_num: number of the port, from 1.
        :raises ValueError: as for `query_port`.
        :raises VerbsError: as for `query_port`.
        :raises ClosedResourceError: the context is closed, and the port has not been queried before.
        """
        found = self._ports.get(port_num)
        return (found[1] if found is not None else self.query_port(port_num)).max_msg_sz

    def query_device(self):
        """Query the limits and the version numbers of the device (``ibv_query_device``).

        :returns: a new `DeviceAttributes`.
        :raises VerbsError: the verb failed; with EPROTO if the provider reports a number that `AtomicCap` does not
            have.
        :raises ClosedResourceError: the context is closed.
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
            atomic_cap=_known(AtomicCap, attr.atomic_cap, "ibv_query_device", "the device"),
            phys_port_cnt=attr.phys_port_cnt,
        )

    def query_port(self, port_num=1):
        """Query the state and the limits of a port (``ibv_query_port``).

        :param port_num: number of the port, from 1.
        :returns: `PortAttributes`, the same object as before if nothing has changed.
        :raises ValueError: `port_num` is not in 0..255.
        :raises VerbsError: the verb failed, for example with EINVAL because the device has no such port; with EPROTO if
            the provider reports a number that `PortState`, `Mtu` or `LinkLayer` does not have.
        :raises ClosedResourceError: the context is closed.
        """
        cdef v.ibv_port_attr attr
        cdef int error, port = _byte(port_num, "port_num")
        memset(&attr, 0, sizeof(attr))
        self._enter()
        try:
            with nogil:
                error = v.verbs_query_port(self.pointer, port, &attr)
        finally:
            self._leave()
        self._check("ibv_query_port", error)
        raw = (<char *>&attr)[:sizeof(attr)]
        found = self._ports.get(port)
        if found is not None and found[0] == raw:
            return found[1]
        where = f"port {port}"
        attributes = PortAttributes(
            state=_known(PortState, attr.state, "ibv_query_port", where),
            max_mtu=_known(Mtu, attr.max_mtu, "ibv_query_port", where),
            active_mtu=_known(Mtu, attr.active_mtu, "ibv_query_port", where),
            gid_tbl_len=attr.gid_tbl_len,
            pkey_tbl_len=attr.pkey_tbl_len,
            max_msg_sz=attr.max_msg_sz,
            lid=attr.lid,
            sm_lid=attr.sm_lid,
            lmc=attr.lmc,
            link_layer=_known(LinkLayer, attr.link_layer, "ibv_query_port", where),
            port_cap_flags=attr.port_cap_flags,
            active_width=attr.active_width,
            active_speed=attr.active_speed,
            phys_state=attr.phys_state,
        )
        self._ports[port] = raw, attributes
        return attributes

    def query_gid(self, port_num=1, index=0):
        """Query an entry of a port's GID table (``ibv_query_gid``).

        :param port_num: number of the port, from 1.
        :param index: index in the table, from 0.
        :returns: the GID, 16 bytes.
        :raises ValueError: `port_num` is not in 0..255.
        :raises OverflowError: `index` does not fit in 32 bits.
        :raises VerbsError: the verb failed, for example because there is no such port or entry.
        :raises ClosedResourceError: the context is closed.
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
        """Query the GIDs of all ports, and the types of the GIDs (``ibv_query_gid_table``).

        :param max_entries: sum of the sizes of the ports' GID tables, not negative.
        :returns: a new list with a tuple for each GID that is not empty: number of the port, index in the port's table,
            the GID (16 bytes), and its type (a number of `GidType`).
        :raises ValueError: `max_entries` is negative.
        :raises OverflowError: `max_entries` does not fit in 32 bits.
        :raises MemoryError: there is not enough memory for `max_entries` entries.
        :raises VerbsError: the verb failed; with EOPNOTSUPP for the software device, and if libibverbs is older than
            rdma-core 32 and lacks the verb.
        :raises ClosedResourceError: the context is closed.
        """
        cdef Py_ssize_t index, count = -EOPNOTSUPP
        cdef v.ibv_gid_entry *entries
        if max_entries < 0:
            raise ValueError(f"`max_entries` must not be negative, got {max_entries}")
        entries = <v.ibv_gid_entry *>PyMem_Calloc(max_entries, sizeof(v.ibv_gid_entry))
        if not entries:
            raise MemoryError
        try:
            self._enter()
            try:
                if not self.software:
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
        """Query an entry of a port's partition key table (``ibv_query_pkey``).

        :param port_num: number of the port, from 1.
        :param index: index in the table, from 0.
        :returns: the partition key, an int in 0..65535, converted to host byte order.
        :raises ValueError: `port_num` is not in 0..255.
        :raises OverflowError: `index` does not fit in 32 bits.
        :raises VerbsError: the verb failed, for example because there is no such port or entry.
        :raises ClosedResourceError: the context is closed.
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
        """Take the device's next asynchronous event, without waiting (``ibv_get_async_event``).

        `async_fd` is readable while an event is waiting; the first call makes that descriptor non-blocking. Destroying
        the handle of a borrowed context makes it blocking again, if it was. The caller
        must acknowledge each event before its object or this context is destroyed. An event about an object that is
        being destroyed is acknowledged here and not returned. The software device does not report an event again while
        the same event is still waiting.

        :returns: a new `AsyncEvent`; None if no event is waiting.
        :raises VerbsError: the verb failed.
        :raises ClosedResourceError: the context is closed.
        """
        self._enter()
        try:
            self._make_nonblocking()
            return _take_event(self)
        finally:
            self._leave()

    cdef int _make_nonblocking(self) except -1:
        # Make `async_fd` non-blocking: reading an event keeps the GIL. A lender may make its descriptor blocking again
        # at any time, so it is looked at before each event.
        if self._nonblocking and self._lender is None:
            return 0
        if os.get_blocking(self.async_fd):
            os.set_blocking(self.async_fd, False)
            self._was_blocking = True
        self._nonblocking = True
        return 0


cdef object _known(kind, int number, str verb, str where):
    # Return the member of an enumeration that a provider reported for `where`; raise VerbsError if there is none.
    found = (<dict>_members[kind]).get(number)
    if found is None:
        advice = f"the provider reports {number} for {where}, which is no {kind.__name__} that aioverbs knows"
        raise VerbsError(verb, EPROTO, advice)
    return found


# Members by number: calling an enumeration takes five times as long.
cdef dict _members = {kind: {int(member): member for member in kind} for kind in (AtomicCap, LinkLayer, Mtu, PortState)}


cdef int _byte(value, str name) except -1:
    # Return `value`; raise ValueError, with the argument's name `name`, if it is not in 0..255.
    if not 0 <= value <= 255:
        raise ValueError(f"`{name}` must be from 0 to 255, got {value}")
    return value
