# Part of handles.pyx: queue pairs.

cdef class QueuePair(Handle):
    """A queue pair: ``ibv_create_qp``; of type XRC_RECV ``ibv_create_qp_ex``.

    :param pd: a protection domain, or a parent domain that it takes locks and memory from. Not for XRC_RECV.
    :param send_cq: where what it sends completes. Not for XRC_RECV.
    :param recv_cq: where what it receives completes. Not for XRC_SEND and XRC_RECV.
    :param capabilities: the depths that are needed; `capabilities` tells those that were granted. Depths of a queue
        that it does not have are left out of account.
    :param qp_type: a `QpType`.
    :param sq_sig_all: every send work request completes visibly.
    :param srq: where it takes its receives from, instead of having a receive queue of its own.
    :param xrc_domain: for XRC_RECV, which has nothing else.
    :raises ValueError: a part is missing, is none of this type's, or is of another context.
    :raises VerbsError: with EINVAL where the device has no queues of those depths, with EOPNOTSUPP where it has no such
        type, with what a parent domain's allocator led to (what it raised is the cause).
    """

    def __cinit__(self, *_, **__):
        self._resume_callbacks = []

    def __init__(
        self,
        ProtectionDomain pd=None,
        CompletionQueue send_cq=None,
        CompletionQueue recv_cq=None,
        capabilities=None,
        *,
        qp_type=QpType.RC,
        bint sq_sig_all=False,
        SharedReceiveQueue srq=None,
        XrcDomain xrc_domain=None,
        Affinity affinity=None,
    ):
        cdef v.ibv_qp_init_attr attr
        self._begin()
        self._type = qp_type
        self.qp_type = QpType(qp_type)
        parts = {"pd": pd, "send_cq": send_cq, "recv_cq": recv_cq, "srq": srq, "xrc_domain": xrc_domain}
        context = _check_parts(self.qp_type, parts)
        wanted = capabilities if capabilities is not None else QpCapabilities()
        memset(&attr, 0, sizeof(attr))
        if send_cq is not None:
            attr.cap.max_send_wr = wanted.max_send_wr
            attr.cap.max_send_sge = wanted.max_send_sge
            attr.cap.max_inline_data = wanted.max_inline_data
        if recv_cq is not None and srq is None:
            attr.cap.max_recv_wr = wanted.max_recv_wr
            attr.cap.max_recv_sge = wanted.max_recv_sge
        attr.qp_context = <void *>self
        attr.qp_type = <v.ibv_qp_type>self._type
        attr.sq_sig_all = sq_sig_all
        self.context = context
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.srq = srq
        self.xrc_domain = xrc_domain
        verb = "ibv_create_qp" if xrc_domain is None else "ibv_create_qp_ex"
        self._enter_owner(_common_owner(tuple(parts.values()), affinity), verb)
        try:
            self._make(&attr, tuple(parts.values()), verb)
        finally:
            self._leave_owner()

    cdef int _make(self, v.ibv_qp_init_attr *attr, tuple parts, str verb) except -1:
        cdef int error
        held = _enter_all(parts)
        try:
            if self.xrc_domain is not None:
                error = self._create_in_xrc_domain(attr)
            else:
                error = self._create(attr)
            if not self.pointer:
                raise self._verb_error(verb, error, self.pd._take_cause() if self.pd is not None else None)
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
        return 0

    cdef int _create(self, v.ibv_qp_init_attr *attr) except? -1:
        cdef int error
        cdef ibv_pd *pd = self.pd.pointer
        attr.send_cq = self.send_cq.pointer
        if self.recv_cq is not None:
            attr.recv_cq = self.recv_cq.pointer
        if self.srq is not None:
            attr.srq = self.srq.pointer
        with nogil:
            self.pointer = self.context.table.create_qp(pd, attr)
            error = errno
        return error

    cdef int _create_in_xrc_domain(self, v.ibv_qp_init_attr *attr) except? -1:
        cdef v.ibv_qp_init_attr_ex ex
        cdef int error
        memset(&ex, 0, sizeof(ex))
        ex.qp_context = attr.qp_context
        ex.qp_type = attr.qp_type
        ex.comp_mask = v.IBV_QP_INIT_ATTR_XRCD
        ex.xrcd = self.xrc_domain.pointer
        with nogil:
            self.pointer = v.verbs_create_qp_ex(self.context.pointer, &ex)
            error = errno
        attr.cap = ex.cap
        return error

    cdef str _destroy_name(self):
        return "ibv_destroy_qp"

    cdef bint _refuses_overlap(self) noexcept:
        return True

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_qp(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        for part in (self.pd, self.send_cq, self.recv_cq, self.srq, self.xrc_domain):
            if part is not None:
                (<Handle>part)._leave()

    @property
    def handle(self):
        """The number by which the kernel knows it, in commands of this context."""
        self._enter()
        try:
            return self.pointer.handle
        finally:
            self._leave()

    @property
    def qp_num(self):
        """Its number, which the peer needs."""
        self._enter()
        try:
            return self.pointer.qp_num
        finally:
            self._leave()

    def modify(self, qp_state=None, **attributes):
        """Change its state or attributes; what is given makes up the mask: ``ibv_modify_qp``.

        Which ones a change of state must and may have depends on the type.

        :param qp_state: a `QpState`; without it, it stays in its state.
        :param path_mtu: the largest packet, an `Mtu`.
        :param rq_psn: the sequence number of the first packet that is received, 24 bits.
        :param sq_psn: the sequence number of the first packet that is sent, 24 bits.
        :param dest_qp_num: the number of the peer.
        :param qp_access_flags: which one-sided requests the peer may make at all, `AccessFlags`.
        :param av: the way to the peer, an `AddressVector`.
        :param pkey_index: a place in the port's partition table.
        :param port_num: the port, from 1 on.
        :param max_rd_atomic: how many reads and atomics may be under way from here.
        :param max_dest_rd_atomic: how many of the peer's may be.
        :param min_rnr_timer: the code, 0 to 31, of how long a peer waits when no receive is posted here.
        :param timeout: how long to wait for an answer, 4.096 us * 2**timeout; 0 for ever.
        :param retry_cnt: how often to send again what was not answered, 0 to 7.
        :param rnr_retry: how often to send again where no receive was posted, 0 to 6; 7 without end.
        :param qkey: what datagrams to it must carry.
        :param cur_qp_state: the state that it is in; where it is in another one, the verb fails.
        :param en_sqd_async_notify: raise ``EventType.SQ_DRAINED`` when all that was begun before SQD has ended.
        :raises VerbsError: with EINVAL where that change is not to be had from this state, an attribute is missing, is
            none of it, or has a value that cannot be; nothing was changed.
        """
        cdef Modification change = _modification(qp_state, **attributes)
        self._use("ibv_modify_qp")
        try:
            change._call(self)
        finally:
            self._unuse()
        change._check(self)
        change._record_success(self)

    def begin_modify(self, qp_state=None, **attributes):
        """Begin what `modify` does, for the verb to be called in a thread of its own: on some devices the kernel looks
        for the neighbour in it, for seconds where nobody answers.

        :returns: a `Modification`. Until that is ended every other use of the queue pair raises `BusyResourceError`.
        """
        cdef Modification change = _modification(qp_state, **attributes)
        change.loop = _running_loop()
        reference = weakref.ref(change)
        self._use("ibv_modify_qp")
        change.handle = self
        change.previous_state = self._state
        self._pending_change = reference
        gate_suspend(&self._gate)
        self._unuse()
        return change

    # Who meets a modification that is under way is called when it may be over. The list is added to and taken from by
    # single operations, in any thread: who comes looks at the gate after having added, and who opens it takes after
    # that, so that one of the two sees the other.

    cdef int _call_when_resumed(self, loop, callback) except -1:
        # That loop calls it, once, and soon where nothing is under way any more.
        self._resume_callbacks.append((loop, callback))
        if gate_holders(&self._gate) >= GATE_CLOSED:
            self._notify_resumed()
        return 0

    cdef int _notify_resumed(self) except -1:
        while self._resume_callbacks:
            try:
                loop, callback = self._resume_callbacks.pop()
            except IndexError:              # another thread was faster
                break
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:            # it is closed, and nobody waits there
                pass
        return 0

    cdef bint _end_modification(self) except -1:
        # For who closes it: end what its owner need not end any more, as the verb is over, or cannot, as its loop is
        # closed and will not have the verb called. False: it is not over.
        cdef Modification change = self._pending_change() if self._pending_change is not None else None
        if change is not None and change._may_be_ended():
            change._resume()
        return gate_holders(&self._gate) >= GATE_CLOSED

    @property
    def state(self):
        """The `QpState` that it was last moved to, found in by `query`, or is known to have failed into."""
        return QpState(self._state)

    def query(self):
        """Its state and attributes, a `QpAttributes`: ``ibv_query_qp``."""
        cdef v.ibv_qp_attr attr
        cdef v.ibv_qp_init_attr init
        cdef int error, mask
        mask = (
            v.IBV_QP_STATE | v.IBV_QP_PATH_MTU | v.IBV_QP_RQ_PSN | v.IBV_QP_SQ_PSN | v.IBV_QP_DEST_QPN
            | v.IBV_QP_ACCESS_FLAGS | v.IBV_QP_CAP | v.IBV_QP_AV | v.IBV_QP_PKEY_INDEX | v.IBV_QP_PORT
            | v.IBV_QP_MAX_QP_RD_ATOMIC | v.IBV_QP_MAX_DEST_RD_ATOMIC | v.IBV_QP_MIN_RNR_TIMER | v.IBV_QP_TIMEOUT
            | v.IBV_QP_RETRY_CNT | v.IBV_QP_RNR_RETRY | v.IBV_QP_QKEY | v.IBV_QP_CUR_STATE
            | v.IBV_QP_EN_SQD_ASYNC_NOTIFY
        )
        memset(&attr, 0, sizeof(attr))
        memset(&init, 0, sizeof(init))
        self._use("ibv_query_qp")
        try:
            with nogil:
                error = self.context.table.query_qp(self.pointer, &attr, mask, &init)
        finally:
            self._unuse()
        self._check("ibv_query_qp", error)
        self._state = attr.qp_state
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
            av=AddressHandle.read(&attr.ah_attr),
            pkey_index=attr.pkey_index,
            port_num=attr.port_num,
            max_rd_atomic=attr.max_rd_atomic,
            max_dest_rd_atomic=attr.max_dest_rd_atomic,
            min_rnr_timer=attr.min_rnr_timer,
            timeout=attr.timeout,
            retry_cnt=attr.retry_cnt,
            rnr_retry=attr.rnr_retry,
            qkey=attr.qkey,
            cur_qp_state=QpState(<int>attr.cur_qp_state),
            en_sqd_async_notify=bool(attr.en_sqd_async_notify),
            sq_draining=bool(attr.sq_draining),
            sq_sig_all=bool(init.sq_sig_all),
        )

cdef object _check_parts(qp_type, dict parts):
    # What a queue pair is made of depends on its type; the context of its parts is its own.
    needed = {QpType.XRC_RECV: ("xrc_domain",), QpType.XRC_SEND: ("pd", "send_cq")}.get(
        qp_type, ("pd", "send_cq", "recv_cq")
    )
    optional = () if qp_type in (QpType.XRC_RECV, QpType.XRC_SEND) else ("srq",)
    for name, part in parts.items():
        if part is None and name in needed:
            raise ValueError(f"a queue pair of type {qp_type.name} needs {name}")
        if part is not None and name not in needed + optional:
            raise ValueError(f"a queue pair of type {qp_type.name} has no {name}: leave it out")
    first, *others = (<Handle>part for part in parts.values() if part is not None)
    for part in others:
        if (<Handle>part).context is not (<Handle>first).context:
            raise ValueError(f"{part!r} is of another context than {first!r}")
    return (<Handle>first).context


@cython.final
cdef class Modification:
    """A change of a queue pair's state or attributes: made by `QueuePair.begin_modify`.

    `run` calls the verb, in any thread, once; `end` is for the owner to call when that is over, or will not be. One
    that is dropped ends by that.
    """

    # Of those that `begin_modify` makes. What the verb answered is written by who calls it, before `in_flight` is 0,
    # and read by others after they have seen that. Who closes `unended` alone takes note of it, with the queue pair's
    # gate suspended: nobody but a completion that failed changes the state that is known meanwhile.
    cdef v.ibv_qp_attr attr
    cdef int mask
    cdef int error
    cdef str problem
    cdef QueuePair handle
    cdef object loop                    # that ran where it was made; None: there was none
    cdef int previous_state             # the state that it was known to be in
    cdef int call_gate                  # a gate: closed by who calls the verb, or ends it without
    cdef int in_flight                  # 1: it is to be called, or is being called
    cdef int end_gate                   # a gate: closed by who ends it
    cdef bint called
    cdef object __weakref__

    def __cinit__(self):
        self.in_flight = 1

    def __init__(self):
        raise TypeError("modifications come from QueuePair.begin_modify")

    cdef int _call(self, QueuePair handle) except -1:
        # The caller is inside of the verb by the handle's gate, or nobody can be, as the gate is suspended.
        with nogil:
            self.error = handle.context.table.modify_qp(handle.pointer, &self.attr, self.mask)
        if self.error not in (0, EINVAL, EBUSY):
            self.problem = handle.context._unreachable_reason()
        return 0

    cdef int _check(self, QueuePair handle) except -1:
        if self.problem:
            raise VerbsError("ibv_modify_qp", self.error, self.problem)
        handle._check("ibv_modify_qp", self.error)
        return 0

    cdef int _record_success(self, QueuePair handle) except -1:
        # It succeeded.
        if self.mask & v.IBV_QP_STATE:
            handle._state = self.attr.qp_state
        if self.mask & v.IBV_QP_MAX_QP_RD_ATOMIC:
            handle._max_rd_atomic = self.attr.max_rd_atomic
        return 0

    def run(self):
        """Call the verb, for as long as that takes. Nothing happens where the modification was ended before."""
        if not gate_close(&self.call_gate):
            if self.called:
                raise RuntimeError("the verb was called before")
            return
        self.called = True
        try:
            self._call(self.handle)
        finally:
            gate_reopen(&self.in_flight)
            self.handle._notify_resumed()   # who closes it ends this, where nobody else does

    def end(self):
        """Tell what came of it. From now on the queue pair can be used again.

        :returns: whether the verb was called.
        :raises RuntimeError: it is being called.
        :raises VerbsError: as `QueuePair.modify`.
        """
        if not self._verb_is_over():
            raise RuntimeError("the verb is under way")
        self._resume()
        if self.called:
            self._check(self.handle)
        return self.called

    def __del__(self):
        if self.handle is not None and self._verb_is_over():
            self._resume()

    cdef bint _verb_is_over(self) noexcept:
        # Where the verb was not called, it will not be any more.
        if gate_close(&self.call_gate):
            gate_reopen(&self.in_flight)
        return gate_holders(&self.in_flight) == 0

    cdef bint _may_be_ended(self) except -1:
        # Whether it is over and need not wait for its owner.
        if gate_holders(&self.in_flight) == 0:
            return True
        return self.loop is not None and self.loop.is_closed() and self._verb_is_over()

    cdef int _resume(self) except -1:
        cdef QueuePair handle = self.handle
        if not gate_close(&self.end_gate):
            return 0
        if self.called and not self.error and handle._state == self.previous_state:  # else it has failed since
            self._record_success(handle)
        handle._pending_change = None
        gate_resume(&handle._gate)
        handle._notify_resumed()
        return 0


def _modification(
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
    qkey=None,
    cur_qp_state=None,
    en_sqd_async_notify=None,
):
    cdef Modification change = Modification.__new__(Modification)
    cdef v.ibv_qp_attr *attr = &change.attr
    cdef int mask = 0
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
    if qkey is not None:
        mask |= v.IBV_QP_QKEY
        attr.qkey = qkey
    if cur_qp_state is not None:
        mask |= v.IBV_QP_CUR_STATE
        attr.cur_qp_state = <v.ibv_qp_state><int>cur_qp_state
    if en_sqd_async_notify is not None:
        mask |= v.IBV_QP_EN_SQD_ASYNC_NOTIFY
        attr.en_sqd_async_notify = bool(en_sqd_async_notify)
    change.mask = mask
    return change
