# Part of handles.pyx: address handles.

cdef class AddressHandle(Handle):
    """Address handle, the path of datagrams to a peer (``ibv_create_ah``).

    :param pd: the protection domain.
    :param av: path to the peer, an `AddressVector`; over RoCE with a `dgid`.
    :raises ValueError: the `dgid` is not 16 bytes long.
    :raises OverflowError: a number of `av` does not fit in its field.
    :raises ClosedResourceError: the protection domain is closed.
    :raises VerbsError: with EINVAL if this device has no such path: it lacks the port or the GID index, or `av` lacks a
        `dgid`.
    """

    def __init__(self, ProtectionDomain pd not None, av):
        cdef v.ibv_ah_attr attr
        cdef int error = 0
        self._begin()
        memset(&attr, 0, sizeof(attr))
        _fill_av(&attr, av)
        pd._enter()
        self.context = pd.context
        self.pd = pd
        try:
            with nogil:
                self.pointer = pd.context.table.create_ah(pd.pointer, &attr)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_create_ah", error)
            self._opened(f"to {bytes(av.dgid).hex() if av.dgid else f'LID {av.dlid}'}")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            pd._leave()
            raise

    cdef str _destroy_name(self):
        return "ibv_destroy_ah"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_ah(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.pd._leave()

    @staticmethod
    cdef object read(v.ibv_ah_attr *av):
        # Return the path as a new `AddressVector`, whose `dgid` is empty if there is no global route.
        return AddressVector(
            dgid=(<char *>av.grh.dgid.raw)[:16] if av.is_global else b"",
            sgid_index=av.grh.sgid_index,
            port_num=av.port_num,
            hop_limit=av.grh.hop_limit,
            flow_label=av.grh.flow_label,
            traffic_class=av.grh.traffic_class,
            dlid=av.dlid,
            sl=av.sl,
            src_path_bits=av.src_path_bits,
            static_rate=av.static_rate,
        )


cdef int _fill_av(v.ibv_ah_attr *to, av) except -1:
    # Fill `to` from an `AddressVector`. Raise ValueError if the `dgid` is not empty and not 16 bytes long.
    cdef const unsigned char[:] dgid
    to.dlid = av.dlid
    to.sl = av.sl
    to.src_path_bits = av.src_path_bits
    to.static_rate = av.static_rate
    to.port_num = av.port_num
    to.is_global = 1 if av.dgid else 0
    if av.dgid:
        dgid = av.dgid
        if dgid.shape[0] != 16:
            raise ValueError(f"`dgid` must have 16 bytes, got {dgid.shape[0]}")
        memcpy(to.grh.dgid.raw, &dgid[0], 16)
        to.grh.flow_label = av.flow_label
        to.grh.sgid_index = av.sgid_index
        to.grh.hop_limit = av.hop_limit
        to.grh.traffic_class = av.traffic_class
    return 0
