# Part of engine.pyx: queue pairs and posting.

cdef class QueuePair(Handle):
    """A queue pair: ``ibv_create_qp``.

    :param pd: a protection domain, or a parent domain that it takes locks and memory from.
    :param capabilities: the depths that are needed; `capabilities` tells those that were granted.
    :param sq_sig_all: every send work request completes visibly.
    """

    def __init__(
        self,
        ProtectionDomain pd not None,
        CompletionQueue send_cq not None,
        CompletionQueue recv_cq not None,
        capabilities=None,
        *,
        qp_type=QpType.RC,
        bint sq_sig_all=False,
    ):
        cdef v.ibv_qp_init_attr attr
        cdef int error
        self._begin()
        wanted = capabilities if capabilities is not None else QpCapabilities()
        for part in (send_cq, recv_cq):
            if (<Handle>part).context is not pd.context:
                raise ValueError(f"{part!r} is of another context than {pd!r}")
        memset(&attr, 0, sizeof(attr))
        attr.cap.max_send_wr = wanted.max_send_wr
        attr.cap.max_recv_wr = wanted.max_recv_wr
        attr.cap.max_send_sge = wanted.max_send_sge
        attr.cap.max_recv_sge = wanted.max_recv_sge
        attr.cap.max_inline_data = wanted.max_inline_data
        attr.qp_type = <v.ibv_qp_type><int>qp_type
        attr.sq_sig_all = sq_sig_all
        held = _enter_all((pd, send_cq, recv_cq))
        self.context = pd.context
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        try:
            attr.send_cq = send_cq.pointer
            attr.recv_cq = recv_cq.pointer
            with nogil:
                self.pointer = pd.context.table.create_qp(pd.pointer, &attr)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_create_qp", error) from pd._take_cause()
            self.capabilities = QpCapabilities(
                max_send_wr=attr.cap.max_send_wr,
                max_recv_wr=attr.cap.max_recv_wr,
                max_send_sge=attr.cap.max_send_sge,
                max_recv_sge=attr.cap.max_recv_sge,
                max_inline_data=attr.cap.max_inline_data,
            )
            self._opened(f"{self.pointer.qp_num}")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            _leave_all(held)
            raise

    cdef str _destroy_name(self):
        return "ibv_destroy_qp"

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_qp(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.pd._leave()
        self.send_cq._leave()
        self.recv_cq._leave()

    @property
    def qp_num(self):
        """Its number, which the peer needs."""
        self._enter()
        try:
            return self.pointer.qp_num
        finally:
            self._leave()

    def modify(
        self,
        qp_state=None,
        *,
        path_mtu=None,
        rq_psn=None,
        sq_psn=None,
        dest_qp_num=None,
        qp_access_flags=None,
        av=None,
        pkey_index=None,
        port_num=None,
        max_rd_atomic=None,
        max_dest_rd_atomic=None,
        min_rnr_timer=None,
        timeout=None,
        retry_cnt=None,
        rnr_retry=None,
    ):
        """Change its state or attributes; what is given makes up the mask: ``ibv_modify_qp``.

        :param av: an `AddressVector`.
        :param timeout: how long to wait for an answer, 4.096 us * 2**timeout; 0 for ever.
        :param min_rnr_timer: the code, 0 to 31, of how long a peer waits when no receive is posted here.
        """
        cdef v.ibv_qp_attr attr
        cdef int mask = 0, error
        memset(&attr, 0, sizeof(attr))
        if qp_state is not None:
            mask |= v.IBV_QP_STATE
            attr.qp_state = <v.ibv_qp_state><int>qp_state
        if path_mtu is not None:
            mask |= v.IBV_QP_PATH_MTU
            attr.path_mtu = <v.ibv_mtu><int>path_mtu
        if rq_psn is not None:
            mask |= v.IBV_QP_RQ_PSN
            attr.rq_psn = rq_psn
        if sq_psn is not None:
            mask |= v.IBV_QP_SQ_PSN
            attr.sq_psn = sq_psn
        if dest_qp_num is not None:
            mask |= v.IBV_QP_DEST_QPN
            attr.dest_qp_num = dest_qp_num
        if qp_access_flags is not None:
            mask |= v.IBV_QP_ACCESS_FLAGS
            attr.qp_access_flags = qp_access_flags
        if av is not None:
            mask |= v.IBV_QP_AV
            _fill_av(&attr.ah_attr, av)
        if pkey_index is not None:
            mask |= v.IBV_QP_PKEY_INDEX
            attr.pkey_index = pkey_index
        if port_num is not None:
            mask |= v.IBV_QP_PORT
            attr.port_num = port_num
        if max_rd_atomic is not None:
            mask |= v.IBV_QP_MAX_QP_RD_ATOMIC
            attr.max_rd_atomic = max_rd_atomic
        if max_dest_rd_atomic is not None:
            mask |= v.IBV_QP_MAX_DEST_RD_ATOMIC
            attr.max_dest_rd_atomic = max_dest_rd_atomic
        if min_rnr_timer is not None:
            mask |= v.IBV_QP_MIN_RNR_TIMER
            attr.min_rnr_timer = min_rnr_timer
        if timeout is not None:
            mask |= v.IBV_QP_TIMEOUT
            attr.timeout = timeout
        if retry_cnt is not None:
            mask |= v.IBV_QP_RETRY_CNT
            attr.retry_cnt = retry_cnt
        if rnr_retry is not None:
            mask |= v.IBV_QP_RNR_RETRY
            attr.rnr_retry = rnr_retry
        self._enter()
        try:
            with nogil:
                error = self.context.table.modify_qp(self.pointer, &attr, mask)
        finally:
            self._leave()
        self._check("ibv_modify_qp", error)

    def query(self):
        """Its state and attributes, a `QpAttributes`: ``ibv_query_qp``."""
        cdef v.ibv_qp_attr attr
        cdef v.ibv_qp_init_attr init
        cdef int error, mask
        mask = (
            v.IBV_QP_STATE | v.IBV_QP_PATH_MTU | v.IBV_QP_RQ_PSN | v.IBV_QP_SQ_PSN | v.IBV_QP_DEST_QPN
            | v.IBV_QP_ACCESS_FLAGS | v.IBV_QP_CAP | v.IBV_QP_AV | v.IBV_QP_PKEY_INDEX | v.IBV_QP_PORT
            | v.IBV_QP_MAX_QP_RD_ATOMIC | v.IBV_QP_MAX_DEST_RD_ATOMIC | v.IBV_QP_MIN_RNR_TIMER | v.IBV_QP_TIMEOUT
            | v.IBV_QP_RETRY_CNT | v.IBV_QP_RNR_RETRY
        )
        memset(&attr, 0, sizeof(attr))
        memset(&init, 0, sizeof(init))
        self._enter()
        try:
            with nogil:
                error = self.context.table.query_qp(self.pointer, &attr, mask, &init)
        finally:
            self._leave()
        self._check("ibv_query_qp", error)
        return QpAttributes(
            qp_state=QpState(<int>attr.qp_state),
            path_mtu=<int>attr.path_mtu,
            rq_psn=attr.rq_psn,
            sq_psn=attr.sq_psn,
            dest_qp_num=attr.dest_qp_num,
            qp_access_flags=AccessFlags(attr.qp_access_flags),
            cap=QpCapabilities(
                max_send_wr=attr.cap.max_send_wr,
                max_recv_wr=attr.cap.max_recv_wr,
                max_send_sge=attr.cap.max_send_sge,
                max_recv_sge=attr.cap.max_recv_sge,
                max_inline_data=attr.cap.max_inline_data,
            ),
            av=_read_av(&attr.ah_attr),
            pkey_index=attr.pkey_index,
            port_num=attr.port_num,
            max_rd_atomic=attr.max_rd_atomic,
            max_dest_rd_atomic=attr.max_dest_rd_atomic,
            min_rnr_timer=attr.min_rnr_timer,
            timeout=attr.timeout,
            retry_cnt=attr.retry_cnt,
            rnr_retry=attr.rnr_retry,
            sq_sig_all=bool(init.sq_sig_all),
        )

    def post_send(
        self,
        opcode,
        sges=(),
        *,
        uint64_t wr_id=0,
        int flags=0,
        uint64_t remote_addr=0,
        uint32_t rkey=0,
        uint32_t imm_data=0,
        uint64_t compare_add=0,
        uint64_t swap=0,
    ):
        """Post a send work request: ``ibv_post_send``.

        :param opcode: a `SendOpcode`.
        :param sges: local memory as ``(address, length, lkey)``, in order.
        :param flags: `SendFlags`.
        :param imm_data: 32 bits for the ``WITH_IMM`` forms, in host order.
        """
        cdef v.ibv_send_wr wr
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_sge *list_ = NULL
        cdef uint64_t total = 0
        cdef int error, kind = opcode
        memset(&wr, 0, sizeof(wr))
        wr.wr_id = wr_id
        wr.opcode = <v.ibv_wr_opcode>kind
        wr.send_flags = flags
        wr.imm_data = socket.htonl(imm_data)
        if kind == <int>v.IBV_WR_ATOMIC_CMP_AND_SWP or kind == <int>v.IBV_WR_ATOMIC_FETCH_AND_ADD:
            wr.wr.atomic.remote_addr = remote_addr
            wr.wr.atomic.rkey = rkey
            wr.wr.atomic.compare_add = compare_add
            wr.wr.atomic.swap = swap
        else:
            wr.wr.rdma.remote_addr = remote_addr
            wr.wr.rdma.rkey = rkey
        self._enter()
        try:
            list_ = _make_sges(sges, &wr.num_sge, &total)
            wr.sg_list = list_
            if total >= RELEASE_GIL_BYTES:
                with nogil:
                    error = v.verbs_post_send(self.pointer, &wr, &bad)
            else:
                error = v.verbs_post_send(self.pointer, &wr, &bad)
        finally:
            PyMem_Free(list_)
            self._leave()
        self._check("ibv_post_send", error)

    def post_recv(self, sges=(), *, uint64_t wr_id=0):
        """Post a receive: ``ibv_post_recv``.

        :param sges: where a message goes, as ``(address, length, lkey)``, in order.
        """
        cdef v.ibv_recv_wr wr
        cdef v.ibv_recv_wr *bad = NULL
        cdef v.ibv_sge *list_ = NULL
        cdef uint64_t total = 0
        cdef int error
        memset(&wr, 0, sizeof(wr))
        wr.wr_id = wr_id
        self._enter()
        try:
            list_ = _make_sges(sges, &wr.num_sge, &total)
            wr.sg_list = list_
            error = v.verbs_post_recv(self.pointer, &wr, &bad)
        finally:
            PyMem_Free(list_)
            self._leave()
        self._check("ibv_post_recv", error)


cdef v.ibv_sge *_make_sges(sges, int *entries, uint64_t *total) except? NULL:
    cdef Py_ssize_t count = len(sges), i
    cdef v.ibv_sge *result
    if count > MAX_SGE:
        raise ValueError(f"a work request has {MAX_SGE} scatter/gather entries at most, not {count}")
    entries[0] = count
    if not count:
        return NULL
    result = <v.ibv_sge *>PyMem_Malloc(count * sizeof(v.ibv_sge))
    if not result:
        raise MemoryError
    try:
        for i in range(count):
            address, length, lkey = sges[i]
            result[i].addr = PyNumber_Index(address)     # a float would be cut off
            result[i].length = PyNumber_Index(length)
            result[i].lkey = PyNumber_Index(lkey)
            total[0] += result[i].length
    except BaseException:
        PyMem_Free(result)
        raise
    return result


cdef int _fill_av(v.ibv_ah_attr *to, av) except -1:
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
            raise ValueError(f"a GID has 16 bytes, this one {dgid.shape[0]}")
        memcpy(to.grh.dgid.raw, &dgid[0], 16)
        to.grh.flow_label = av.flow_label
        to.grh.sgid_index = av.sgid_index
        to.grh.hop_limit = av.hop_limit
        to.grh.traffic_class = av.traffic_class
    return 0


cdef object _read_av(v.ibv_ah_attr *av):
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
