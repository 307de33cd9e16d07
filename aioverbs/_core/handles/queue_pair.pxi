# Part of handles.pyx: queue pairs.

cdef class QueuePair(Handle):
    """Queue pair, created with ``ibv_create_qp``, or with ``ibv_create_qp_ex`` for the type XRC_RECV.

    :param pd: protection domain, or a parent domain that provides locks and memory. Not for XRC_RECV.
    :param send_cq: completion queue of its sends. Not for XRC_RECV.
    :param recv_cq: completion queue of its receives. Not for XRC_SEND and XRC_RECV.
    :param capabilities: the required `QpCapabilities`; the property `capabilities` has the granted ones. Depths of a
        queue that the type does not have are ignored.
    :param qp_type: a `QpType`.
    :param sq_sig_all: whether every send work request produces a completion.
    :param srq: shared receive queue to receive from; None for a receive queue of its own.
    :param xrc_domain: XRC domain, for XRC_RECV, which takes none of the other objects.
    :param affinity: owner of the queue pair; None for the owner of the other arguments. If these have none either, any
        thread may use the queue pair.
    :raises ValueError: an argument is missing or not supported by the type, or belongs to another context or another
        owner.
    :raises ClosedResourceError: an argument is closed.
    :raises AffinityError: the caller is not the owner of the new queue pair.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner, or of the same thread domain.
    :raises VerbsError: the verb failed; with EINVAL if the device has no queues of those depths; with EOPNOTSUPP if the
        device does not support the type; also if a parent domain's allocator failed: its exception is then the cause,
        or propagates unchanged if it is not an `Exception`.
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
        # Create the queue pair with `verb` and count it as a user of its parents. If that fails, raise and leave these
        # unchanged.
        cdef int error
        held = _enter_all(parts)
        try:
            if self.xrc_domain is not None:
                error = self._create_in_xrc_domain(attr)
            else:
                error = self._create(attr)
            if not self.pointer:
                raise self._verb_error(verb, error, self.pd._take_cause() if self.pd is not None else None)
            self._capabilities = attr.cap
            self._opened(f"{self.pointer.qp_num}")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            _leave_all(held)
            raise
        return 0

    cdef int _create(self, v.ibv_qp_init_attr *attr) except? -1:
        # Call ibv_create_qp and set `pointer`, to NULL on failure. Return errno, which is valid only on failure.
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
        # Call ibv_create_qp_ex and set `pointer`, to NULL on failure. Return errno, which is valid only on failure.
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

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

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
        """Number that identifies the queue pair in kernel commands of this context, an int; not the `qp_num`.

        :raises ClosedResourceError: the queue pair is closed.
        :raises BusyResourceError: a modification made by `begin_modify` has not ended.
        """
        self._enter()
        try:
            return self.pointer.handle
        finally:
            self._leave()

    @property
    def qp_num(self):
        """Queue pair number, 0..2**24-1, which the peer needs.

        :raises ClosedResourceError: the queue pair is closed.
        :raises BusyResourceError: a modification made by `begin_modify` has not ended.
        """
        self._enter()
        try:
            return self.pointer.qp_num
        finally:
            self._leave()

    def modify(self, qp_state=None, **attributes):
        """Change the state, other attributes, or both, whichever are given (``ibv_modify_qp``). Return None.

        The attributes that a state change requires or allows depend on the queue pair's type.

        :param qp_state: the new `QpState`; None to keep the state.
        :param attributes: attributes by name, as listed here.
        :param path_mtu: path MTU, an `Mtu`.
        :param rq_psn: packet sequence number of the first received packet, 0..2**24-1.
        :param sq_psn: packet sequence number of the first sent packet, 0..2**24-1.
        :param dest_qp_num: queue pair number of the peer, 0..2**24-1.
        :param qp_access_flags: one-sided requests that the peer may make, `AccessFlags`.
        :param av: path to the peer, an `AddressVector`.
        :param pkey_index: index in the port's partition key table.
        :param port_num: number of the port, from 1.
        :param max_rd_atomic: number of RDMA READ and atomic requests that may be in flight from here.
        :param max_dest_rd_atomic: number of RDMA READ and atomic requests of the peer that may be in flight.
        :param min_rnr_timer: code, 0..31, of the time that a peer waits when no receive is posted here.
        :param timeout: local ACK timeout of 4.096 us * 2**timeout; 0 for no timeout.
        :param retry_cnt: number of retries without an acknowledgement, 0..7.
        :param rnr_retry: number of retries when the peer has no receive posted, 0..6; 7 for no limit.
        :param qkey: Q_Key that datagrams to the queue pair must carry, 0..2**32-1.
        :param cur_qp_state: the expected current state; the verb fails if the state is a different one.
        :param en_sqd_async_notify: raise ``EventType.SQ_DRAINED`` when all requests begun before SQD have ended.
        :raises TypeError: there is no attribute of that name.
        :raises ValueError: the `dgid` of `av` is not 16 bytes long.
        :raises OverflowError: a number does not fit in its field.
        :raises VerbsError: with EINVAL if the current state does not allow the change, or if an attribute is missing,
            not part of the change, or out of range; nothing is changed.
        :raises BusyResourceError: another thread is changing the state.
        :raises AffinityError: the caller is not the queue pair's owner.
        :raises ClosedResourceError: the queue pair is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
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
        """Prepare a change of the queue pair like that of `modify`, but do not call the verb: another thread may do so.

        On some devices the verb resolves the peer's address in the kernel, which takes seconds if the peer does not
        answer. Until the modification has ended, every other use of the queue pair raises `BusyResourceError`.

        :param qp_state: the new `QpState`; None to keep the state.
        :param attributes: attributes by name, as for `modify`.
        :returns: a `Modification`. Its `run` calls the verb; the caller must call its `end`, which reports the result.
        :raises TypeError: there is no attribute of that name.
        :raises ValueError: the `dgid` of `av` is not 16 bytes long.
        :raises OverflowError: a number does not fit in its field.
        :raises BusyResourceError: another call is changing the state.
        :raises AffinityError: the caller is not the queue pair's owner.
        :raises ClosedResourceError: the queue pair is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
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

    # A caller that meets a pending modification registers a callback for its end. Threads append to and pop from the
    # list with single operations:
    #
    #     caller                        thread that ends the modification
    #     1. append its callback        1. reopen the gate
    #     2. look at the gate           2. pop the callbacks
    #
    # so that at least one of the two sees the other.

    cdef int _call_when_resumed(self, loop, callback) except -1:
        # Have the loop call `callback` once, when the pending modification has ended; soon, if none is pending.
        self._resume_callbacks.append((loop, callback))
        if gate_holders(&self._gate) >= GATE_CLOSED:
            self._notify_resumed()
        return 0

    cdef int _notify_resumed(self) except -1:
        # Have each loop call its callback of `_call_when_resumed`, once; callbacks of closed loops are dropped.
        while self._resume_callbacks:
            try:
                loop, callback = self._resume_callbacks.pop()
            except IndexError:              # another thread was faster
                break
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:            # the loop is closed, and runs no callback
                pass
        return 0

    cdef bint _end_modification(self) except -1:
        # For closing the queue pair: end a modification that its owner no longer needs to end, because the verb has
        # returned, or cannot end, because the owner's loop is closed and will not have the verb called. Return whether
        # no modification is pending any longer.
        cdef Modification change = self._pending_change() if self._pending_change is not None else None
        if change is not None and change._may_be_ended():
            change._resume()
        return gate_holders(&self._gate) >= GATE_CLOSED

    @property
    def capabilities(self):
        """The granted `QpCapabilities`."""
        return _capabilities(&self._capabilities)

    @property
    def state(self):
        """The last known `QpState`: the state to which the queue pair was moved, that `query` found, or into which the
        queue pair is known to have failed. No verb is called, and this never raises, even after `destroy`."""
        return QpState(self._state)

    def query(self):
        """Query the state and the other attributes (``ibv_query_qp``). The property `state` is set to the state found.

        :returns: a new `QpAttributes`.
        :raises AffinityError: the caller is not the queue pair's owner.
        :raises ClosedResourceError: the queue pair is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises BusyResourceError: a modification made by `begin_modify` has not ended.
        :raises VerbsError: the verb failed.
        """
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
            cap=_capabilities(&attr.cap),
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
    # Check the arguments against the queue pair's type, and return the context that all of them share. Raise ValueError
    # if an argument is missing or not taken by the type, or belongs to another context.
    cdef Handle first = None
    needed, optional = _parts_of_type.get(qp_type, (("pd", "send_cq", "recv_cq"), ("srq",)))
    for name, part in parts.items():
        if part is None and name in needed:
            raise ValueError(f"a queue pair of type {qp_type.name} needs {name}")
        if part is not None and name not in needed and name not in optional:
            raise ValueError(f"a queue pair of type {qp_type.name} takes no {name}: leave it out")
    for part in parts.values():
        if part is None:
            continue
        if first is None:
            first = part
        elif (<Handle>part).context is not first.context:
            raise ValueError(f"{part!r} belongs to a different context than {first!r}")
    return first.context


cdef dict _parts_of_type = {QpType.XRC_RECV: (("xrc_domain",), ()), QpType.XRC_SEND: (("pd", "send_cq"), ())}


@cython.final
cdef class Modification:
    """Change of a queue pair's state or attributes, made by `QueuePair.begin_modify`.

    `run`, which any thread may call once, calls the verb. The owner calls `end` when the verb has returned or will not
    be called. A modification that is dropped is ended automatically.
    """

    # Fields of a modification that `begin_modify` made. The thread that calls the verb writes the result before it sets
    # `in_flight` to 0; other threads read the result only after they have read 0. Only the thread that closes
    # `end_gate` records the result, while the queue pair's gate is suspended: during that time, only a failed
    # completion changes the known state.
    cdef v.ibv_qp_attr attr
    cdef int mask
    cdef int error
    cdef str problem
    cdef QueuePair handle
    cdef object loop                    # event loop that ran at its creation; None if there was none
    cdef int previous_state             # the known state at its creation
    cdef int call_gate                  # a gate: closed by the thread that calls the verb, or that ends without a call
    cdef int in_flight                  # 1 until the verb has returned or will not be called
    cdef int end_gate                   # a gate: closed by the thread that ends the modification
    cdef bint called
    cdef object __weakref__

    def __cinit__(self):
        self.in_flight = 1

    def __init__(self):
        raise TypeError("modifications come from QueuePair.begin_modify")

    cdef int _call(self, QueuePair handle) except -1:
        # Call the verb and store its error, which `_check` raises. The caller holds the handle's gate for the verb, or
        # no other thread can, since the gate is suspended.
        with nogil:
            self.error = handle.context.table.modify_qp(handle.pointer, &self.attr, self.mask)
        if self.error not in (0, EINVAL, EBUSY):
            self.problem = handle.context._unreachable_reason()
        return 0

    cdef int _check(self, QueuePair handle) except -1:
        # Raise VerbsError or ConcurrentAccessError if the verb failed.
        if self.problem:
            raise VerbsError("ibv_modify_qp", self.error, self.problem)
        handle._check("ibv_modify_qp", self.error)
        return 0

    cdef int _record_success(self, QueuePair handle) except -1:
        # Record what the verb, which succeeded, has changed.
        if self.mask & v.IBV_QP_STATE:
            handle._state = self.attr.qp_state
        if self.mask & v.IBV_QP_MAX_QP_RD_ATOMIC:
            handle._max_rd_atomic = self.attr.max_rd_atomic
        return 0

    def run(self):
        """Call the verb and block until it returns. Do nothing if the modification has already ended.

        Return None, even if the verb fails: `end` raises its error.

        :raises RuntimeError: `run` was called before.
        """
        if not gate_close(&self.call_gate):
            if self.called:
                raise RuntimeError("the verb was called before")
            return
        self.called = True
        try:
            self._call(self.handle)
        finally:
            gate_reopen(&self.in_flight)
            self.handle._notify_resumed()   # a thread that closes the queue pair ends this, if no other does

    def end(self):
        """End the modification: make the queue pair usable again and report the result of the verb.

        If `run` was not called before, the verb will not be called. Further calls of `end` report the same result.

        :returns: True if the verb was called and succeeded; False if it was not called.
        :raises RuntimeError: the verb is running; nothing is done.
        :raises VerbsError: the verb failed, as for `QueuePair.modify`; the queue pair is usable again.
        :raises ConcurrentAccessError: the software device refused the verb, because another verb was in flight on the
            queue pair or in its thread domain; the queue pair is usable again.
        """
        if not self._verb_is_over():
            raise RuntimeError("the verb is running: wait until run() returns")
        self._resume()
        if self.called:
            self._check(self.handle)
        return self.called

    def __del__(self):
        if self.handle is not None and self._verb_is_over():
            self._resume()

    cdef bint _verb_is_over(self) noexcept:
        # Return whether the verb has returned or will not be called. If it has not been called yet, prevent that from
        # now on.
        if gate_close(&self.call_gate):
            gate_reopen(&self.in_flight)
        return gate_holders(&self.in_flight) == 0

    cdef bint _may_be_ended(self) except -1:
        # Return whether the modification may be ended without waiting for its owner.
        if gate_holders(&self.in_flight) == 0:
            return True
        return self.loop is not None and self.loop.is_closed() and self._verb_is_over()

    cdef int _resume(self) except -1:
        # Record a success and make the queue pair usable, once; further calls do nothing.
        cdef QueuePair handle = self.handle
        if not gate_close(&self.end_gate):
            return 0
        if self.called and not self.error and handle._state == self.previous_state:  # else it failed since
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
    """Return a new `Modification` with the given attributes, which are those of `QueuePair.modify`, and their mask.

    The modification does not belong to a queue pair yet.

    :raises TypeError: there is no attribute of that name.
    :raises ValueError: the `dgid` of `av` is not 16 bytes long.
    :raises OverflowError: a number does not fit in its field.
    """
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


cdef object _capabilities(const v.ibv_qp_cap *cap):
    # Return the `QpCapabilities` for the numbers of the ABI.
    return QpCapabilities(
        max_send_wr=cap.max_send_wr,
        max_recv_wr=cap.max_recv_wr,
        max_send_sge=cap.max_send_sge,
        max_recv_sge=cap.max_recv_sge,
        max_inline_data=cap.max_inline_data,
    )
