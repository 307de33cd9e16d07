# Part of data_path.pyx: verbs of queue pairs and shared receive queues, checked before they are posted.

cdef enum:
    RDMA_WRITE = 0                      # enum ibv_wr_opcode
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    CMP_AND_SWP = 5
    FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    RC = 2                              # enum ibv_qp_type
    UC = 3
    UD = 4
    XRC_SEND = 9
    RESET = 0                           # enum ibv_qp_state
    INIT = 1
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    LOCAL_WRITE = 1                     # enum ibv_access_flags
    MW_BIND = 16

cdef uint32_t _sends = 1 << SEND | 1 << SEND_WITH_IMM
cdef uint32_t _keys = 1 << BIND_MW | 1 << LOCAL_INV | 1 << SEND_WITH_INV
cdef uint32_t _writes = _sends | _keys | 1 << RDMA_WRITE | 1 << RDMA_WRITE_WITH_IMM
cdef uint32_t _reads = _writes | 1 << RDMA_READ | 1 << CMP_AND_SWP | 1 << FETCH_AND_ADD
cdef dict _opcodes_of_type = {RC: _reads, UC: _writes, UD: _sends, XRC_SEND: _reads}


@cython.final
cdef class Destination:
    """Destination of datagrams: an address handle, and the queue pair number and Q_Key of the peer.

    Made by `AddressHandle.to`.

    :param handle: the address handle's handle (``struct ibv_ah``).
    :param pins: in-flight counter of the address handle, which keeps it open while a datagram is in flight.
    :param remote_qpn: queue pair number of the peer, 0..2**24-1.
    :param remote_qkey: Q_Key that the peer's queue pair accepts, 0..2**32-1.
    :raises ValueError: a number does not fit in its width.
    """

    cdef AddressHandle handle
    cdef InFlightCount pins
    cdef readonly uint32_t remote_qpn
    cdef readonly uint32_t remote_qkey

    def __init__(self, AddressHandle handle not None, InFlightCount pins not None, remote_qpn, remote_qkey):
        self.handle = handle
        self.pins = pins
        self.remote_qpn = _uint(remote_qpn, 24, "remote_qpn")
        self.remote_qkey = _uint(remote_qkey, 32, "remote_qkey")

    def __repr__(self):
        return f"<Destination queue pair {self.remote_qpn} by {self.handle!r}>"


@cython.final
cdef class QpWorkState:
    """State of a queue pair's work: its send and receive queues, and the error that broke the queue pair. Made by a
    `QueuePair` of the layer above when it opens.

    :param handle: the queue pair.
    :param pd: protection domain of its memory; None if the queue pair uses no local memory.
    :param sends: dispatcher of the send completion queue; None if there is no send queue.
    :param receives: dispatcher of the receive completion queue; None if there is no receive queue.
    :param send_depth: number of sends that may be in flight.
    :param receive_depth: number of receives that may be in flight.
    :param chains: whether sends are posted together, at the end of the event loop's turn (message model
        HIGH_BANDWIDTH).
    :param most_bytes: size limit of a message in bytes.
    :param read_sge: number of scatter/gather entries that an RDMA READ may use.
    :param make_scratch: callable that returns a `RegionSlice` of the given number of bytes, for the results of atomics
        and the global routing headers of datagrams.
    """

    cdef readonly QueuePair handle
    cdef uint32_t qp_num                # queue pair number; stays valid after the handle is destroyed
    cdef readonly WorkQueue send_queue
    cdef readonly WorkQueue receive_queue
    cdef ProtectionDomain pd
    cdef uint32_t opcodes               # bit mask of the opcodes that the queue pair's type supports
    cdef uint32_t read_sge
    cdef object _cause                  # see `broken`
    cdef bint err_reported              # waiters were notified of state ERR, or the user moved the queue pair to ERR
    cdef bint needs_reset               # some queued requests were not posted: no completion reports the rest
    cdef bint needs_error               # an inbox failed: the home loop has to move the queue pair to ERR
    cdef object lost_cq_error           # error of the completion queue that failed, until the reset; otherwise None
    cdef bint device_removed            # the device was removed; an error of a verb alone does not prove that
    cdef WorkQueue srq                  # the shared receive queue that this queue pair receives from, or None
    cdef object explain                 # see `explain_failures`
    cdef bint requires_sends            # see `require_sends`

    def __init__(
        self,
        QueuePair handle not None,
        ProtectionDomain pd,
        CqDispatcher sends,
        CqDispatcher receives,
        *,
        uint32_t send_depth=0,
        uint32_t receive_depth=0,
        bint chains=False,
        uint32_t most_bytes=MAX_MESSAGE_BYTES,
        uint32_t read_sge=0xFFFFFFFF,
        make_scratch=None,
    ):
        cdef section within
        self.handle = handle
        self.qp_num = handle.pointer.qp_num
        self.read_sge = read_sge
        self.pd = pd
        self.opcodes = _opcodes_of_type.get(handle._type, 0)
        depths = handle._capabilities
        if sends is not None:
            self.send_queue = _queue(handle, self, sends, send_depth, depths.max_send_sge, make_scratch)
            self.send_queue.max_inline = depths.max_inline_data
            self.send_queue.chains = chains
            self.send_queue.most_bytes = most_bytes if most_bytes < <uint32_t>MAX_MESSAGE_BYTES else MAX_MESSAGE_BYTES
            self.send_queue.scratch_bytes = 8
        if receives is not None:
            self.receive_queue = _queue(handle, self, receives, receive_depth, depths.max_recv_sge, make_scratch)
            self.receive_queue.receives = True
            self.receive_queue.kind = SLOTS_RECEIVE
            self.receive_queue.scratch_bytes = GRH
            if handle._type == UD:
                self.receive_queue.max_sge -= 1         # the first entry receives the global routing header
        dispatchers = [dispatcher for dispatcher in (sends, receives) if dispatcher is not None]
        _join(dispatchers)
        section_enter(&within, self._section())
        try:
            for dispatcher in dispatchers:
                (<CqDispatcher>dispatcher).users.add(self)
        finally:
            section_leave(&within)

    cdef PyObject *_section(self) noexcept:
        # Both queues are in the same section.
        return _section(self.send_queue if self.send_queue is not None else self.receive_queue)

    cdef list _parts(self):
        # Return a list of the dispatchers and, if there is one, the shared receive queue that this queue pair uses.
        parts = [(<WorkQueue>queue).dispatcher for queue in self.queues()]
        if self.srq is not None:
            parts.append(self.srq)
        return parts

    def queues(self):
        """Return the `WorkQueue` objects of the queue pair's own queues, a list: the send queue first, then the receive
        queue. Queues that the queue pair does not have, and a shared receive queue, are not included."""
        return [queue for queue in (self.send_queue, self.receive_queue) if queue is not None]

    @property
    def broken(self):
        """Exception for the first error that broke the queue pair; None if the queue pair is not broken."""
        cdef section within
        section_enter(&within, <PyObject *>self)    # any thread may read this property
        cause = self._cause
        section_leave(&within)
        return cause

    cdef int _set_cause(self, object cause) except -1:
        # Set `broken`.
        cdef section within
        section_enter(&within, <PyObject *>self)
        before, self._cause = self._cause, cause
        section_leave(&within)
        return 0

    @property
    def in_flight(self):
        """Number of requests in both queues that were posted and have not completed."""
        return sum(queue.in_flight for queue in self.queues())

    @property
    def watched(self):
        """Whether the home loops of both queues' dispatchers still dispatch their completions."""
        return all((<WorkQueue>queue).dispatcher.watched for queue in self.queues())

    def when_idle(self, callback):
        """Set the callback that is called when one of the queue pair's queues becomes idle.

        :param callback: called without arguments each time that one of the queues no longer has any request in flight;
            None removes the callback.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            for queue in self.queues():
                (<WorkQueue>queue).idle = callback
        finally:
            section_leave(&within)

    def explain_failures(self, explain):
        """Set the function that chooses the exceptions which requests with an error status raise.

        :param explain: called with the `WorkCompletionError` or `BatchError` of a request when its outcome is first
            asked for, in any thread; returns the exception to raise instead, which may be the same.
        """
        self.explain = explain

    def require_sends(self):
        """From now on, move the queue pair to ERR if a send cannot be posted that was to be posted later than in the
        call: at the end of the turn, or after a wait for a place. Maybe no caller awaits it, and its message must not
        be missing between others.

        The requests behind it are not posted, and end with its error, or as if they had been flushed."""
        self.requires_sends = True

    def close(self):
        """Refuse further requests with ClosedResourceError. Requests that were not posted, because they wait for a
        place in a queue or for the end of the turn, end as if they had been flushed: awaiting them raises
        WorkCompletionError with WR_FLUSH_ERR. Posted requests continue."""
        cdef section within
        section_enter(&within, self._section())
        try:
            for queue in self.queues():
                (<WorkQueue>queue).closing = True
                (<WorkQueue>queue)._refuse_waiting(FLUSHED, None)
                (<WorkQueue>queue)._refuse_chained()
        finally:
            section_leave(&within)

    def reopen(self):
        """Undo `close`: requests can be posted again. Requests that `close` ended stay ended."""
        for queue in self.queues():
            (<WorkQueue>queue).closing = False

    def abandon(self, error):
        """End all requests, in flight or waiting for a place, after the queue pair has been destroyed.

        :param error: exception that awaiting these requests raises.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            for queue in self.queues():
                (<WorkQueue>queue).dispatcher.users.discard(self)
            self._abandon(error)
        finally:
            section_leave(&within)

    cdef int _abandon(self, object error) except -1:
        # End all requests with `error`. Call after the queue pair was destroyed or reset.
        for queue in self.queues():
            (<WorkQueue>queue)._abandon(SUCCESS, error)
        return 0

    cdef int _lose_completions(self, object error) except -1:
        # Have the queue pair reset, because of `error`: the verb accepted requests that produce no completion of their
        # own, and refused the later request whose completion would have reported them.
        self._set_cause(error)
        self.needs_reset = True
        return self._queue_transition(self.send_queue.dispatcher)

    cdef int _lose_cq(self, CqDispatcher dispatcher) except -1:
        # Have the queue pair reset, because the dispatcher's completion queue failed, so that completions are lost.
        error = dispatcher.broken_error()
        if self.broken is None:
            self._set_cause(error)
        self.needs_reset = True
        self.lost_cq_error = error
        self.device_removed = self.device_removed or dispatcher.device_removed
        for queue in self.queues():
            if (<WorkQueue>queue).dispatcher is dispatcher:
                (<WorkQueue>queue)._refuse_waiting(SUCCESS, error)
                (<WorkQueue>queue)._unchain()
        dispatcher.pending_transitions.append(self)
        return 0

    cdef int _require_error(self, object error) except -1:
        # Post nothing from now on, and have the home loop move the queue pair to ERR because of `error`.
        if self.handle.closed or self.handle._state == ERR:
            return 0
        self._set_cause(error)
        self.handle._state = ERR
        self.needs_error = self.err_reported = True
        for queue in self.queues():
            (<WorkQueue>queue)._refuse_waiting(FLUSHED, None)
        return self._queue_transition(self.receive_queue.dispatcher)

    cdef int _queue_transition(self, CqDispatcher dispatcher) except -1:
        # Have the dispatcher's home loop call `_run_transition`.
        dispatcher.pending_transitions.append(self)
        return dispatcher._need_turn()

    cdef int _run_transition(self) except -1:
        # Runs on the home loop. Move the queue pair to RESET if requests in flight will never complete, so that the
        # device no longer accesses their memory. Move it to ERR, once more, if receives are in flight: they may have
        # been posted after the failure but before the failure was known here, and soft-RoCE flushes such receives only
        # on that transition.
        cdef bint to_reset = self.needs_reset
        self.needs_reset = False
        cdef bint to_error = self.needs_error
        self.needs_error = False
        if self.handle.closed or not (to_reset or to_error or self._may_hold_receives()):
            return 0
        try:
            self.handle.modify(QpState.RESET if to_reset else QpState.ERR)
        except ConcurrentAccessError:
            self.needs_reset, self.needs_error = to_reset, to_error
            raise
        except BusyResourceError:       # another thread is changing the queue pair's state: retry when that has ended
            self.needs_reset, self.needs_error = to_reset, to_error
            return self._run_transition_when_resumed()
        except AffinityError:           # this completion queue is used by any thread, the queue pair is not
            self.needs_reset, self.needs_error = to_reset, to_error
            return self._run_transition_at_owner()
        except VerbsError as error:
            if not self.device_removed or error.errno not in (EIO, ENODEV):
                _log.error(
                    "%r cannot be moved out of its state (%s): memory of its requests stays pinned until it is closed",
                    self.handle, error
                )
                return self._abandon_without_reset()
            # The device no longer does anything, so that the memory is safe.
        if to_reset:
            by, self.lost_cq_error = self.lost_cq_error or self._unknown_outcome(), None
            self._abandon(by)
            if self.receive_queue is not None:
                self.receive_queue._end_inboxes(by)
            if self.srq is not None:
                self.srq._end_if_all_cqs_failed()
        return 0

    cdef int _abandon_without_reset(self) except -1:
        # Fail the requests of queues whose completion queue failed. The queue pair cannot be reset: memory stays
        # pinned.
        for queue in self.queues():
            if (<WorkQueue>queue).dispatcher.error is not None:
                (<WorkQueue>queue)._abandon_all_still_pinned(self.lost_cq_error)
        if self.srq is not None:
            self.srq._end_if_all_cqs_failed()
        return 0

    cdef bint _may_hold_receives(self) noexcept:
        # Whether receives are in flight on a queue pair in ERR, as far as the state is known here.
        return self.receive_queue is not None and self.receive_queue.used and self.handle._state == ERR

    cdef int _run_transition_at_owner(self) except -1:
        # Have the owner's loop call `run_transition`.
        try:
            self.handle.affinity.loop.call_soon_threadsafe(self.run_transition)
        except RuntimeError:            # the owner's loop is closed: the work in flight ends when its device is closed
            pass
        return 0

    cdef int _run_transition_when_resumed(self) except -1:
        # Have the home loop call `resume` when the other thread's state change has ended.
        cdef CqDispatcher dispatcher = (<WorkQueue>self.queues()[0]).dispatcher
        if dispatcher.loop is not None:
            self.handle._call_when_resumed(dispatcher.loop, self.resume)
        return 0

    def resume(self):
        """Schedule the pending state change of the queue pair on the home loop again. This is called when a state
        change made by another thread may have ended."""
        self._queue_transition((<WorkQueue>self.queues()[0]).dispatcher)

    def end_modification(self, loop=None, callback=None):
        """Try to end a state change that was handed to another thread, so that the queue pair can be closed.

        :param loop: event loop for the callback; None for no callback.
        :param callback: called on `loop`, without arguments, when the state change may have ended.
        :returns: True if no state change is in flight any longer; False if the other thread is still making it.
        """
        if loop is not None:            # before looking at the change, which may end at any time
            self.handle._call_when_resumed(loop, callback)
        return self.handle._end_modification()

    def run_transition(self):
        """Move the queue pair to the pending state, RESET or ERR; do nothing if no state change is pending or the queue
        pair is destroyed. If the verb fails, its error is logged and not raised.

        This is called on the loop of the queue pair's owner, because the loop that dispatches the queue pair's
        completions may not change its state.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            self._run_transition()
        except ConcurrentAccessError:   # a verb is running in another thread, for a short time
            self._run_transition_at_owner()
        finally:
            section_leave(&within)

    cdef object _unknown_outcome(self):
        # Return the error for requests whose outcome is unknown because of the reset.
        cause = self.broken
        return _broken(f"{self.handle!r} was reset because of {cause}: the outcome of this request is unknown", cause)

    def recovered(self):
        """Forget the recorded errors after the queue pair has been reset, so that it can be used again."""
        self._set_cause(None)
        self.needs_error = self.err_reported = False

    cdef int _work_failed(self, Operation operation) except -1:
        # Note that the queue pair is in an error state, because the operation completed with an error status. If
        # `query` found that state earlier, it recorded no cause and notified no waiter; this completion still does.
        cdef int state = self.handle._state
        if state == ERR and (self.err_reported or operation.queue.closing):
            return 0
        if state == SQE and not operation.queue.receives and self.broken is not None:
            return 0
        connected = self.handle._type in (RC, XRC_SEND)
        self._set_cause(operation._failure())
        if state == ERR or connected or operation.queue.receives or operation.status == FLUSHED:
            self.handle._state = ERR
            self.err_reported = True
            for queue in self.queues():
                (<WorkQueue>queue)._refuse_waiting(FLUSHED, None)
            if self.receive_queue is not None:
                self.receive_queue._end_inboxes(self._state_error())
                if self.receive_queue.used:
                    self._queue_transition(self.receive_queue.dispatcher)
        else:
            self.handle._state = SQE
            self.send_queue._refuse_waiting(FLUSHED, None)
        return 0

    cdef int _check_state(self, bint receives) except -1:
        # Raise QueuePairStateError if the state does not allow a send (with `receives`, a receive), and
        # BrokenResourceError in an error state.
        cdef int state = self.handle._state
        if state == RTS or state == SQD or (receives and INIT <= state < ERR):
            return 0
        if state == ERR or state == SQE or self.broken is not None:
            raise self._state_error()
        needed = "INIT" if receives else "RTS"
        found = QpState(state).name
        raise QueuePairStateError(f"{self.handle!r} is in state {found}: first connect it or move it to {needed}")

    cdef object _state_error(self):
        # Return the BrokenResourceError or DeviceRemovedError for a queue pair in an error state, for the caller to
        # raise.
        state = QpState(self.handle._state).name
        cause = self.broken
        return _broken(f"{self.handle!r} is in state {state}, caused by: {cause or 'a change of its state'}", cause)

    def errored(self):
        """Note that the user moved the queue pair to ERR. End inboxes that have no receives in flight; the others end
        when their receives are flushed."""
        self.err_reported = True
        if self.receive_queue is not None:
            self.receive_queue._end_inboxes(self._state_error())


cdef WorkQueue _queue(Handle handle, QpWorkState requests, CqDispatcher dispatcher, limit, max_sge, make_scratch):
    # Return a new work queue; `requests` is None for a shared receive queue.
    cdef WorkQueue queue = WorkQueue.__new__(WorkQueue)
    queue.handle = handle
    queue.requests = requests
    queue.qp_num = (<QueuePair>handle).pointer.qp_num if requests is not None else 0
    queue.dispatcher = dispatcher
    queue.slots = &dispatcher.slots if dispatcher is not None else &queue.own_slots
    queue.limit = limit
    queue.max_sge = max_sge
    queue.most_bytes = MAX_MESSAGE_BYTES
    queue.make_scratch = make_scratch
    return queue


cdef inline Operation _new(WorkQueue queue, int opcode, bint unpinned):
    # Return a new operation of one request, which is not posted.
    cdef Operation operation = Operation.__new__(Operation)
    operation.queue = queue
    operation.opcode = opcode
    operation.unpinned = unpinned
    operation.requests = 1
    operation.scratch = UNUSED
    return operation


cdef int _add_piece(Operation operation, request *wr, RegionSlice piece, ProtectionDomain pd, int access) except -1:
    # Pin a piece and append it to the request's scatter/gather list. Raise ValueError if it is not suitable, for
    # example because it lacks the needed access, and ClosedResourceError if its memory is closed.
    cdef v.ibv_sge *sge
    _check_piece(operation.queue, piece, pd, access)
    operation._pin(piece.pins)
    if not piece.length:
        return 0                            # devices may read an entry of 0 bytes as one of 2 GiB
    if operation.bytes + piece.length > operation.queue.most_bytes:
        raise ValueError(
            f"a message of {operation.queue.handle!r} may have at most {operation.queue.most_bytes:,} bytes: "
            f"{piece!r} exceeds that"
        )
    sge = &wr.send.sg_list[wr.send.num_sge]
    sge.addr = piece._address
    sge.length = piece.length
    sge.lkey = piece._lkey
    wr.send.num_sge += 1
    operation.bytes += piece.length
    return 0


cdef inline int _check_piece(WorkQueue queue, RegionSlice piece, ProtectionDomain pd, int access) except -1:
    # Check that a request of the queue may use a piece of memory. Raise ValueError if it lacks the needed access or
    # belongs to another protection domain, and ClosedResourceError if its lender has closed it.
    if piece._handle.pd is not pd and not (pd._shared or piece._handle.pd._shared):
        raise ValueError(f"{piece!r} belongs to a different protection domain than {queue.handle!r}")
    if access & ~piece._access:
        raise ValueError(
            f"the device writes to {piece.region!r}: register it with AccessFlags.LOCAL_WRITE"
        )
    return _check_borrowed(piece._handle) if piece._handle._lender_slot != NULL else 0


cdef int _gather(Operation operation, request *wr, object local, ProtectionDomain pd, int access) except -1:
    # Append the pieces of `local` to the request's scatter/gather list, with the errors of `_add_piece`. Raise
    # TypeError if `local` is not registered memory.
    cdef int count
    if type(local) is RegionSlice:
        _add_piece(operation, wr, <RegionSlice>local, pd, access)
    elif isinstance(local, Registered):
        _add_piece(operation, wr, _whole_of(<Registered>local), pd, access)
    elif isinstance(local, RegionSlice):
        _add_piece(operation, wr, <RegionSlice>local, pd, access)
    elif local is not None:
        if not isinstance(local, (list, tuple)):
            raise TypeError(
                f"local memory must be a MemoryRegion, a slice of one, or a list of these, got {type(local).__name__}: "
                "register it with ProtectionDomain.register"
            )
        if type(local) is not list and type(local) is not tuple:
            local = tuple(local)                # a subclass may report a length that differs from its items
        if len(local) > operation.queue.max_sge:
            raise ValueError(
                f"{len(local)} pieces exceed the {operation.queue.max_sge} that {operation.queue.handle!r} takes: "
                "create it with more (max_send_sge, max_recv_sge)"
            )
        count = wr.send.num_sge + len(local)
        if count > REQUEST_SGES:
            _extra(operation).sges = <v.ibv_sge *>calloc(count, sizeof(v.ibv_sge))
            if operation.extra.sges == NULL:
                raise MemoryError
            wr.send.sg_list = operation.extra.sges
        for piece in local:
            if isinstance(piece, Registered):
                piece = _whole_of(<Registered>piece)
            elif not isinstance(piece, RegionSlice):
                raise TypeError(f"a piece of local memory must be a MemoryRegion or a slice of one, got {piece!r}")
            _add_piece(operation, wr, <RegionSlice>piece, pd, access)
    operation.keepalive = local
    return 0


cdef inline QpWorkState _requests_of(SendVerbs sending, section *within):
    # Return the work state; None if the object is not open. Another thread may open or close the object at the same
    # time.
    cdef QpWorkState requests
    section_enter(within, <PyObject *>sending)
    requests = sending._requests
    section_leave(within)
    return requests


cdef inline QpWorkState _begin_posting(SendVerbs sending, str verb, section *within):
    # Check the caller and begin the verb; pair each success with one `_end_posting`. Return the work state; raise
    # ClosedResourceError if the object is not open, and the errors of `Handle._use`.
    if FREE_THREADED:
        return _begin_posting_in_section(sending, verb, within)
    if sending._requests is None:
        raise ClosedResourceError(
            f"{sending!r} is not open: open it with `async with`, or create a new one if it was closed"
        )
    sending._requests.handle._use(verb)
    return sending._requests


cdef QpWorkState _begin_posting_in_section(SendVerbs sending, str verb, section *within):
    # Do the work of `_begin_posting` in builds without a GIL.
    cdef QpWorkState requests = _requests_of(sending, within)
    if requests is None:
        raise ClosedResourceError(
            f"{sending!r} is not open: open it with `async with`, or create a new one if it was closed"
        )
    _use_within(requests.handle, verb, within, requests._section())
    return requests


cdef inline int _use_within(Handle handle, str verb, section *within, PyObject *of) except -1:
    # Enter the section and begin the verb; leave the section if the verb is refused.
    cdef bint used = False
    if not FREE_THREADED:
        return handle._use(verb)
    section_enter(within, of)
    try:
        handle._use(verb)
        used = True
    finally:
        if not used:
            section_leave(within)
    return 0


cdef inline int _end_posting(Handle handle, Operation operation, section *within) except -1:
    # End the verb. If the request was not accepted, release what it holds.
    cdef bint refused = operation is not None and operation.state == NEW and not operation.unpinned
    handle._unuse()
    if refused and operation.extra is not None and operation.extra.inbox is not None:
        operation.extra.inbox.posted -= 1
    section_leave(within)
    return operation._unpin() if refused else 0


cdef inline int _check_read_atomic(QpWorkState requests, request *wr) except -1:
    # Check an RDMA READ or atomic request: raise QueuePairStateError if a depth of 0 was negotiated, with which some
    # devices wait forever, and ValueError if it has too many pieces.
    if requests.handle._max_rd_atomic == 0 and requests.handle._state == RTS:
        raise QueuePairStateError(
            f"{requests.handle!r} allows no RDMA READ and atomic requests: connect it with max_rd_atomic, "
            "and its peer with max_dest_rd_atomic"
        )
    if <uint32_t>wr.send.num_sge > requests.read_sge:
        raise ValueError(
            f"an RDMA READ of {requests.handle!r} takes at most {requests.read_sge} pieces, "
            f"got {wr.send.num_sge}"
        )
    return 0


cdef inline WorkQueue _send_queue_for(QpWorkState requests, int opcode):
    # Return the send queue; raise ValueError if the queue pair's type does not support the opcode.
    if not requests.opcodes >> opcode & 1:
        raise ValueError(
            f"{requests.handle!r} is of type {requests.handle.qp_type.name}, "
            f"which does not support {SendOpcode(opcode).name}"
        )
    return requests.send_queue


cdef class SendVerbs:
    """Verbs of a send queue: the base class of `Batch`, and, together with receives, of the public queue pair.

    The methods post their requests immediately, in the order of the calls; if the send queue is full, the request waits
    for a place, first come, first served. Each method returns an `Operation`, which the caller may await or drop: the
    request runs in both cases. Cancelling the await neither stops nor withdraws a posted request.

    Local memory is a `MemoryRegion`, a slice of one, or a list of these, which is gathered or scattered. The memory
    stays registered until the request has completed.

    Every method raises, before anything is posted:

    :raises ClosedResourceError: the queue pair, or memory of the request, is closed.
    :raises AffinityError: the caller is not on the thread and event loop that own the queue pair.
    :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
    :raises BusyResourceError: another thread is changing the queue pair's state.
    :raises QueuePairStateError: the queue pair is not connected (not in RTS or SQD).
    :raises BrokenResourceError: the queue pair is in an error state; ``__cause__`` is the first error.
    :raises ValueError: an argument is out of range, or not supported by the queue pair's type or limits.
    :raises TypeError: an argument has the wrong type, or local memory is not registered.
    :raises VerbsError: ``ibv_post_send`` failed.

    Awaiting the operation raises `WorkCompletionError` if the request completed with an error status, after which the
    queue pair is broken. `Operation` lists the other exceptions of an await.
    """

    cdef QpWorkState _requests
    cdef bint _pin_at_post              # in a batch: memory is pinned when the batch is posted, not before

    # ---- Building requests

    # Each method that returns an operation posts the request, lets it wait for a place, or adds it to the batch, and
    # raises the errors of the class.

    cdef request *_place_for(self, request *wr) except NULL:
        # Return the place in which to build the request: `wr`, or a place in the memory of a batch.
        request_begin(wr)
        return wr

    cdef int _submit_or_collect(self, Operation operation, request *wr, bint nowait) except -1:
        # Post the request, or let it wait for a place: see `WorkQueue._submit`. A batch collects it instead.
        if operation.queue.requests.handle._state != RTS:
            operation.queue.requests._check_state(operation.queue.receives)
        return operation.queue._submit(operation, wr, nowait)

    cdef Operation _rdma(
        self, int opcode, object local, RemoteRegion remote, immediate, unsigned int flags, object srq_number,
        bint nowait,
    ):
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_send", &within)
        cdef Operation operation = None
        cdef request *wr
        cdef request own_wr
        cdef WorkQueue queue
        try:
            queue = _send_queue_for(requests, opcode)
            wr = self._place_for(&own_wr)
            operation = _new(queue, opcode, self._pin_at_post)
            _gather(operation, wr, local, requests.pd, LOCAL_WRITE if opcode == RDMA_READ else 0)
            if operation.bytes != remote.length:
                raise ValueError(
                    f"{operation.bytes} bytes of local memory do not match the {remote.length} of {remote!r}: "
                    "use slices of the same length"
                )
            wr.send.opcode = <v.ibv_wr_opcode>opcode
            if opcode == RDMA_READ:
                _check_read_atomic(requests, wr)
            elif operation.bytes <= queue.max_inline:
                flags |= INLINE
            wr.send.send_flags = flags
            wr.send.wr.rdma.remote_addr = remote.address
            wr.send.wr.rdma.rkey = remote.rkey
            if opcode == RDMA_WRITE_WITH_IMM:
                wr.send.imm_data = v.htonl(_uint(immediate, 32, "immediate"))
            if srq_number is not None or requests.handle._type == XRC_SEND:
                _set_xrc_srq(requests, wr, srq_number)
            self._submit_or_collect(operation, wr, nowait)
        finally:
            _end_posting(requests.handle, operation, &within)
        return operation

    cdef Operation _message(
        self, int opcode, object local, object immediate, uint32_t rkey, unsigned int flags, Destination to,
        object srq_number, bint nowait, bint grows=False,
    ):
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_send", &within)
        cdef Operation operation = None
        cdef request *wr
        cdef request own_wr
        cdef WorkQueue queue
        try:
            queue = _send_queue_for(requests, opcode)
            wr = self._place_for(&own_wr)
            operation = _new(queue, opcode, self._pin_at_post)
            operation.grows = grows
            _gather(operation, wr, local, requests.pd, 0)
            wr.send.opcode = <v.ibv_wr_opcode>opcode
            if operation.bytes <= queue.max_inline and not grows:
                flags |= INLINE
            wr.send.send_flags = flags
            if opcode == SEND_WITH_IMM:
                wr.send.imm_data = v.htonl(_uint(immediate, 32, "immediate"))
            elif opcode == SEND_WITH_INV:
                wr.send.invalidate_rkey = rkey
            if to is not None or requests.handle._type == UD:
                _set_ud_destination(requests, operation, wr, to)
            if srq_number is not None or requests.handle._type == XRC_SEND:
                _set_xrc_srq(requests, wr, srq_number)
            self._submit_or_collect(operation, wr, nowait)
        finally:
            _end_posting(requests.handle, operation, &within)
        return operation

    cdef Operation _atomic(
        self, int opcode, RemoteRegion remote, object add, object swap, unsigned int flags, object srq_number,
        bint nowait,
    ):
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_send", &within)
        cdef Operation operation = None
        cdef request *wr
        cdef request own_wr
        try:
            wr = self._place_for(&own_wr)
            operation = _new(_send_queue_for(requests, opcode), opcode, self._pin_at_post)
            if remote.length != 8:
                raise ValueError(f"an atomic request takes 8 bytes, {remote!r} has {remote.length}: use a slice of 8")
            if remote.address % 8:
                raise ValueError(f"an atomic request takes an address that is a multiple of 8, got {remote!r}")
            operation.scratch = WANTED         # the device writes the old value to scratch memory of the queue
            operation.bytes = 8
            operation.atomic = True
            wr.send.num_sge = 1
            _check_read_atomic(requests, wr)
            wr.send.opcode = <v.ibv_wr_opcode>opcode
            wr.send.send_flags = flags
            wr.send.wr.atomic.remote_addr = remote.address
            wr.send.wr.atomic.rkey = remote.rkey
            wr.send.wr.atomic.compare_add = _uint(add, 64, "compare" if opcode == CMP_AND_SWP else "add")
            wr.send.wr.atomic.swap = _uint(swap, 64, "swap")
            if srq_number is not None or requests.handle._type == XRC_SEND:
                _set_xrc_srq(requests, wr, srq_number)
            self._submit_or_collect(operation, wr, nowait)
        finally:
            _end_posting(requests.handle, operation, &within)
        return operation

    cdef Operation _invalidate(self, object rkey, unsigned int flags, bint nowait):
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_send", &within)
        cdef Operation operation = None
        cdef request *wr
        cdef request own_wr
        try:
            wr = self._place_for(&own_wr)
            operation = _new(_send_queue_for(requests, LOCAL_INV), LOCAL_INV, self._pin_at_post)
            wr.send.opcode = <v.ibv_wr_opcode><int>LOCAL_INV
            wr.send.send_flags = flags
            wr.send.invalidate_rkey = _uint(rkey, 32, "rkey")
            self._submit_or_collect(operation, wr, nowait)
        finally:
            _end_posting(requests.handle, operation, &within)
        return operation

    cdef Operation _bind(self, MemoryWindow window, RegionSlice piece, object access, unsigned int flags, bint nowait):
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_bind_mw", &within)
        cdef Operation operation = None
        cdef request *wr
        cdef request own_wr
        try:
            wr = self._place_for(&own_wr)
            operation = _new(_send_queue_for(requests, BIND_MW), BIND_MW, self._pin_at_post)
            if piece._handle.context is not window.context:
                raise ValueError(f"{piece!r} belongs to a different context than {window!r}")
            if MW_BIND & ~piece._access:
                raise ValueError(f"a window needs MW_BIND on {piece.region!r}: register it with AccessFlags.MW_BIND")
            _check_borrowed(piece._handle)
            operation._pin(piece.pins)
            _extra(operation).window = window
            operation.keepalive = piece._handle
            operation.extra.bind_info.addr = piece._address
            operation.extra.bind_info.length = piece.length
            operation.extra.bind_info.mw_access_flags = PyNumber_Index(access)
            wr.send.opcode = <v.ibv_wr_opcode><int>BIND_MW
            wr.send.send_flags = flags
            self._submit_or_collect(operation, wr, nowait)
        finally:
            _end_posting(requests.handle, operation, &within)
        return operation

    # ---- Public verbs

    def write(self, local, RemoteRegion remote not None, *, bint fence=False, srq_number=None):
        """Write local memory to the peer's memory (RDMA WRITE, ``ibv_post_send``).

        Awaiting the operation returns None when the peer's device has acknowledged the data.

        :param local: registered memory to read from: a `MemoryRegion`, a slice of one, or a list of at most
            ``max_send_sge`` of these.
        :param remote: the peer's memory to write to, as long as `local`.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param srq_number: number of the peer's shared receive queue, 0..2**32-1; required for queue pairs of type
            XRC_SEND, and not allowed for others.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        """
        return self._rdma(RDMA_WRITE, local, remote, None, FENCE if fence else 0, srq_number, False)

    def write_with_immediate(
        self, local, RemoteRegion remote not None, immediate, *, bint fence=False, bint solicited=False,
        srq_number=None,
    ):
        """Write local memory to the peer's memory and complete one of the peer's receives (RDMA WRITE with immediate
        data).

        Awaiting the operation returns None when the peer's device has acknowledged the data. The peer's receive
        completes with ``written`` set, the number of bytes written, and the immediate data.

        :param local: registered memory to read from; None for a write of 0 bytes.
        :param remote: the peer's memory to write to, as long as `local`.
        :param immediate: immediate data for the peer's receive, 0..2**32-1.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param solicited: raise a solicited event at the peer's completion queue.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        """
        flags = (FENCE if fence else 0) | (SOLICITED if solicited else 0)
        return self._rdma(RDMA_WRITE_WITH_IMM, local, remote, immediate, flags, srq_number, False)

    def read(self, local, RemoteRegion remote not None, *, bint fence=False, srq_number=None):
        """Read the peer's memory into local memory (RDMA READ, ``ibv_post_send``).

        Awaiting the operation returns None when the data is in `local`.

        :param local: memory to write to, registered with ``LOCAL_WRITE``: a `MemoryRegion`, a slice of one, or a list
            of these, of which the device may allow fewer than ``max_send_sge`` (see ``max_sge_rd``).
        :param remote: the peer's memory to read from, as long as `local`.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        :raises QueuePairStateError: the queue pair was connected with ``max_rd_atomic`` 0.
        """
        return self._rdma(RDMA_READ, local, remote, None, FENCE if fence else 0, srq_number, False)

    def send(
        self, local, *, immediate=None, bint fence=False, bint solicited=False, Destination to=None, srq_number=None
    ):
        """Send a message into the peer's next receive (SEND, or SEND with immediate data).

        Awaiting the operation returns None when the message was sent; on a reliable connection, when the peer's device
        has acknowledged it.

        :param local: registered memory that holds the message; None for a message of 0 bytes.
        :param immediate: immediate data for the peer's receive, 0..2**32-1; None to send none.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param solicited: raise a solicited event at the peer's completion queue.
        :param to: destination of the datagram, from `AddressHandle.to`; required for queue pairs of type UD, and not
            allowed for others.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        """
        flags = (FENCE if fence else 0) | (SOLICITED if solicited else 0)
        opcode = SEND if immediate is None else SEND_WITH_IMM
        return self._message(opcode, local, immediate, 0, flags, to, srq_number, False)

    def send_with_invalidate(
        self, local, rkey, *, bint fence=False, bint solicited=False, srq_number=None
    ):
        """Send a message and have the peer's device invalidate a key (SEND with invalidate).

        Awaiting the operation returns None when the peer's device has acknowledged the message.

        :param local: registered memory that holds the message; None for a message of 0 bytes.
        :param rkey: key of a type 2 memory window that the peer bound, 0..2**32-1.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param solicited: raise a solicited event at the peer's completion queue.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        """
        flags = (FENCE if fence else 0) | (SOLICITED if solicited else 0)
        key = _uint(rkey, 32, "rkey")
        return self._message(SEND_WITH_INV, local, None, key, flags, None, srq_number, False)

    def compare_and_swap(
        self, RemoteRegion remote not None, compare, swap, *, bint fence=False, srq_number=None
    ):
        """Replace 8 bytes of the peer's memory if they equal a value, atomically (ATOMIC CMP AND SWP).

        Awaiting the operation returns the old value as an `int`: the swap took place if the old value equals `compare`.

        :param remote: 8 bytes of the peer's memory at an address that is a multiple of 8; an integer in host byte
            order.
        :param compare: the expected value, 0..2**64-1.
        :param swap: the new value, 0..2**64-1.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        :raises QueuePairStateError: the queue pair was connected with ``max_rd_atomic`` 0.
        """
        return self._atomic(CMP_AND_SWP, remote, compare, swap, FENCE if fence else 0, srq_number, False)

    def fetch_and_add(self, RemoteRegion remote not None, add, *, bint fence=False, srq_number=None):
        """Add to 8 bytes of the peer's memory, atomically and modulo 2**64 (ATOMIC FETCH AND ADD).

        Awaiting the operation returns the old value as an `int`.

        :param remote: 8 bytes of the peer's memory at an address that is a multiple of 8; an integer in host byte
            order.
        :param add: the value to add, 0..2**64-1.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        :raises QueuePairStateError: the queue pair was connected with ``max_rd_atomic`` 0.
        """
        return self._atomic(FETCH_AND_ADD, remote, add, 0, FENCE if fence else 0, srq_number, False)

    def invalidate(self, rkey, *, bint fence=False):
        """Invalidate the key of a type 2 memory window that was bound on this queue pair (LOCAL INVALIDATE).

        Awaiting the operation returns None when peers can no longer use the key.

        :param rkey: the window's key, 0..2**32-1.
        :param fence: start only after the earlier RDMA READ and atomic requests of this queue pair have completed.
        :returns: the `Operation`. See `SendVerbs` for the errors of this call and of awaiting the operation.
        """
        return self._invalidate(rkey, FENCE if fence else 0, False)


cdef class QueuePairVerbs(SendVerbs):
    """Verbs of a queue pair: those of `SendVerbs`, their ``_nowait`` forms, and receives.

    A ``_nowait`` form raises `anyio.WouldBlock` and posts nothing if the queue is full. Its other errors, and the
    result of awaiting its operation, are those of the method without ``_nowait``.
    """

    def _requests_begin(self, QpWorkState requests):
        """Set the work state that the verbs use to `requests`. This is called when the queue pair opens, and with None
        when it closes."""
        cdef section within
        section_enter(&within, <PyObject *>self)
        before, self._requests = self._requests, requests
        section_leave(&within)

    def write_nowait(self, local, RemoteRegion remote not None, *, bint fence=False, srq_number=None):
        """Post a request as `write` does, but never wait for a place in the send queue.

        :param local: registered memory to read from.
        :param remote: the peer's memory to write to, as long as `local`.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of `write`.
        """
        return self._rdma(RDMA_WRITE, local, remote, None, FENCE if fence else 0, srq_number, True)

    def write_with_immediate_nowait(
        self, local, RemoteRegion remote not None, immediate, *, bint fence=False, bint solicited=False,
        srq_number=None,
    ):
        """Post a request as `write_with_immediate` does, but never wait for a place in the send queue.

        :param local: registered memory to read from; None for a write of 0 bytes.
        :param remote: the peer's memory to write to, as long as `local`.
        :param immediate: immediate data for the peer's receive, 0..2**32-1.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param solicited: raise a solicited event at the peer's completion queue.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of
            `write_with_immediate`.
        """
        flags = (FENCE if fence else 0) | (SOLICITED if solicited else 0)
        return self._rdma(RDMA_WRITE_WITH_IMM, local, remote, immediate, flags, srq_number, True)

    def read_nowait(self, local, RemoteRegion remote not None, *, bint fence=False, srq_number=None):
        """Post a request as `read` does, but never wait for a place in the send queue.

        :param local: memory to write to, registered with ``LOCAL_WRITE``.
        :param remote: the peer's memory to read from, as long as `local`.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of `read`.
        """
        return self._rdma(RDMA_READ, local, remote, None, FENCE if fence else 0, srq_number, True)

    def send_nowait(
        self, local, *, immediate=None, bint fence=False, bint solicited=False, Destination to=None, srq_number=None
    ):
        """Post a request as `send` does, but never wait for a place in the send queue.

        :param local: registered memory that holds the message; None for a message of 0 bytes.
        :param immediate: immediate data for the peer's receive, 0..2**32-1; None to send none.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param solicited: raise a solicited event at the peer's completion queue.
        :param to: destination of the datagram; for queue pairs of type UD only.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of `send`.
        """
        flags = (FENCE if fence else 0) | (SOLICITED if solicited else 0)
        opcode = SEND if immediate is None else SEND_WITH_IMM
        return self._message(opcode, local, immediate, 0, flags, to, srq_number, True)

    def send_with_invalidate_nowait(
        self, local, rkey, *, bint fence=False, bint solicited=False, srq_number=None
    ):
        """Post a request as `send_with_invalidate` does, but never wait for a place in the send queue.

        :param local: registered memory that holds the message; None for a message of 0 bytes.
        :param rkey: key of a type 2 memory window that the peer bound, 0..2**32-1.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param solicited: raise a solicited event at the peer's completion queue.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of
            `send_with_invalidate`.
        """
        flags = (FENCE if fence else 0) | (SOLICITED if solicited else 0)
        key = _uint(rkey, 32, "rkey")
        return self._message(SEND_WITH_INV, local, None, key, flags, None, srq_number, True)

    def compare_and_swap_nowait(
        self, RemoteRegion remote not None, compare, swap, *, bint fence=False, srq_number=None
    ):
        """Post a request as `compare_and_swap` does, but never wait for a place in the send queue.

        :param remote: 8 bytes of the peer's memory at an address that is a multiple of 8.
        :param compare: the expected value, 0..2**64-1.
        :param swap: the new value, 0..2**64-1.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of
            `compare_and_swap`.
        """
        return self._atomic(CMP_AND_SWP, remote, compare, swap, FENCE if fence else 0, srq_number, True)

    def fetch_and_add_nowait(self, RemoteRegion remote not None, add, *, bint fence=False, srq_number=None):
        """Post a request as `fetch_and_add` does, but never wait for a place in the send queue.

        :param remote: 8 bytes of the peer's memory at an address that is a multiple of 8.
        :param add: the value to add, 0..2**64-1.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :param srq_number: number of the peer's shared receive queue; for queue pairs of type XRC_SEND only.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of `fetch_and_add`.
        """
        return self._atomic(FETCH_AND_ADD, remote, add, 0, FENCE if fence else 0, srq_number, True)

    def invalidate_nowait(self, rkey, *, bint fence=False):
        """Post a request as `invalidate` does, but never wait for a place in the send queue.

        :param rkey: the window's key, 0..2**32-1.
        :param fence: start only after the earlier RDMA READ and atomic requests have completed.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue is full; nothing is posted. Other errors are those of `invalidate`.
        """
        return self._invalidate(rkey, FENCE if fence else 0, True)

    def _bind_window(self, MemoryWindow window not None, RegionSlice piece not None, access, fence, nowait):
        """Post a request that binds a memory window to a part of a memory region.

        :returns: the `Operation`; awaiting it returns a `RemoteRegion` with the window's new key.
        :raises ValueError: the region was registered without ``MW_BIND``, or belongs to a different context than the
            window; or the queue pair's type does not support memory windows. See `SendVerbs` for other errors.
        :raises anyio.WouldBlock: the send queue is full and `nowait` is True; nothing is posted.
        """
        return self._bind(window, piece, access, FENCE if fence else 0, nowait)

    def receive(self, local):
        """Receive the next message into local memory (``ibv_post_recv``).

        Messages fill receives in the order in which the receives were posted; if the receive queue is full, the request
        waits for a place. Awaiting the operation returns a `Received`; it raises `WorkCompletionError` if the receive
        was flushed or the message did not fit, or another exception that `Operation` lists.

        :param local: memory for the message, registered with ``LOCAL_WRITE`` and at least as long as the message: a
            `MemoryRegion`, a slice of one, or a list of at most ``max_recv_sge`` of these. None for a message of 0
            bytes.
        :returns: the `Operation`.
        :raises ClosedResourceError: the queue pair or the memory is closed.
        :raises AffinityError: the caller is not on the thread and event loop that own the queue pair.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        :raises BusyResourceError: another thread is changing the queue pair's state.
        :raises TypeError: local memory is not registered.
        :raises QueuePairStateError: the queue pair is in RESET.
        :raises BrokenResourceError: the queue pair is in an error state; ``__cause__`` is the first error.
        :raises ValueError: the queue pair has no receive queue of its own, or the memory is not suitable (no
            ``LOCAL_WRITE``, another protection domain, too many pieces, too long).
        :raises VerbsError: ``ibv_post_recv`` failed.
        """
        return self._receive(local, False)

    def receive_nowait(self, local):
        """Post a request as `receive` does, but never wait for a place in the receive queue.

        :param local: memory for the message, registered with ``LOCAL_WRITE``; None for a message of 0 bytes.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the receive queue is full; nothing is posted. Other errors are those of `receive`.
        """
        return self._receive(local, True)

    def _receive_into(self, Inbox inbox not None, local):
        # Post a receive whose message goes to an inbox; the caller has made sure that the queue has a free place.
        return self._receive(local, True, inbox)

    cpdef _post_receives(self, ReceiveRing ring, uint32_t first, uint32_t count):
        # Post receives of a ring: see `post_receives`.
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_recv", &within)
        try:
            requests._check_state(True)
            ring._post(requests, first, count)
        finally:
            requests.handle._unuse()
            section_leave(&within)

    cdef Operation _receive(self, object local, bint nowait, Inbox inbox=None):
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_recv", &within)
        cdef Operation operation = None
        cdef request own_wr
        try:
            if requests.receive_queue is None:
                raise ValueError(f"{requests.handle!r} has no receive queue of its own")
            request_begin(&own_wr)
            operation = _new(requests.receive_queue, 0, False)
            _scatter(operation, &own_wr, local, requests.pd, requests.handle._type == UD)
            if inbox is not None:
                _extra(operation).inbox = inbox
                inbox.posted += 1
            self._submit_or_collect(operation, &own_wr, nowait)
        finally:
            _end_posting(requests.handle, operation, &within)
        return operation


cdef int _scatter(Operation operation, request *wr, object local, ProtectionDomain pd, bint datagrams) except -1:
    # Make `local` the memory of a receive, with the errors of `_gather`. With `datagrams`, a global routing header
    # comes before the message and goes to scratch memory of the queue.
    if datagrams:
        operation.scratch = WANTED
        wr.receive.num_sge = 1
    return _gather(operation, wr, local, pd, LOCAL_WRITE)


cdef class ReceiveVerbs:
    """Verbs of a shared receive queue. Each method returns an `Operation`, which the caller may await or drop."""

    cdef WorkQueue _queue
    cdef ProtectionDomain _queue_pd

    def _receives_begin(self, SharedReceiveQueue handle not None, ProtectionDomain pd not None, max_wr, max_sge, cq):
        # Make a `WorkQueue` for the shared receive queue that is being opened, and return it.
        cdef section within
        cdef WorkQueue queue = _queue(handle, None, cq, max_wr, max_sge, None)
        queue.receives = True
        queue.kind = SLOTS_RECEIVE if cq is not None else SLOTS_RECEIVE | SLOTS_SHARED
        queue.dispatchers = []
        queue.any_thread = not _is_bound(handle.affinity)
        if cq is not None:
            _join([queue, cq])
            (<CqDispatcher>cq).receivers.add(queue)
        section_enter(&within, <PyObject *>self)
        self._queue_pd = pd
        before, self._queue = self._queue, queue
        section_leave(&within)
        return queue

    def receive(self, local):
        """Receive the next message that arrives at any attached queue pair into local memory (``ibv_post_srq_recv``).

        If the queue is full, the request waits for a place. Awaiting the operation returns a `Received`, whose
        ``qp_num`` is the number of the queue pair that received the message; it raises `WorkCompletionError` if the
        receive failed, for example because the message did not fit, or another exception that `Operation` lists.

        :param local: memory for the message, as for `QueuePair.receive`; None for a message of 0 bytes.
        :returns: the `Operation`.
        :raises ClosedResourceError: the shared receive queue or the memory is closed.
        :raises AffinityError: the caller is not on the thread and event loop that own the queue.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        :raises TypeError: local memory is not registered.
        :raises BrokenResourceError: all completion queues in which the receives complete have failed.
        :raises ValueError: the memory is not suitable (no ``LOCAL_WRITE``, another protection domain, too many pieces,
            too long).
        :raises VerbsError: ``ibv_post_srq_recv`` failed.
        """
        return self._receive(local, False)

    def receive_nowait(self, local):
        """Post a request as `receive` does, but never wait for a place in the queue.

        :param local: memory for the message, registered with ``LOCAL_WRITE``; None for a message of 0 bytes.
        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the queue is full; nothing is posted. Other errors are those of `receive`.
        """
        return self._receive(local, True)

    def _receive_into(self, Inbox inbox not None, local):
        # Post a receive whose message goes to an inbox; the caller has made sure that the queue has a free place.
        return self._receive(local, True, inbox)

    cdef Operation _receive(self, object local, bint nowait, Inbox inbox=None):
        cdef WorkQueue queue
        cdef Operation operation = None
        cdef request own_wr
        cdef section within
        section_enter(&within, <PyObject *>self)
        queue = self._queue             # another thread may be opening the object
        section_leave(&within)
        if queue is None:
            raise ClosedResourceError(
                f"{self!r} is not open: open it with `async with`, or create a new one if it was closed"
            )
        _use_within(queue.handle, "ibv_post_srq_recv", &within, _section(queue))
        try:
            request_begin(&own_wr)
            operation = _new(queue, 0, False)
            _scatter(operation, &own_wr, local, self._queue_pd, False)
            if inbox is not None:
                _extra(operation).inbox = inbox
                inbox.posted += 1
            queue._submit(operation, &own_wr, nowait)
        finally:
            _end_posting(queue.handle, operation, &within)
        return operation


def attach(WorkQueue queue not None, CqDispatcher dispatcher not None, QpWorkState requests not None):
    """Attach a queue pair to a shared receive queue.

    Messages for the queue pair then fill receives of the shared receive queue, and these complete in the queue pair's
    own receive completion queue.

    :param queue: work queue of the shared receive queue.
    :param dispatcher: dispatcher of the queue pair's receive completion queue.
    :param requests: the queue pair's work state.
    """
    cdef section within
    _join([queue, dispatcher, *requests._parts()])
    section_enter(&within, _section(queue))
    try:
        known = _serves(dispatcher, queue)
        dispatcher.srqs[requests.qp_num] = queue
        dispatcher.users.add(requests)
        requests.srq = queue
        if not known:
            queue.dispatchers.append(dispatcher)
            dispatcher.in_flight += queue.used
            dispatcher.awaited += queue.awaited
            if queue.used:
                dispatcher._need_turn()
    finally:
        section_leave(&within)


def detach(WorkQueue queue not None, CqDispatcher dispatcher not None, QpWorkState requests not None):
    """Undo `attach`. Call this after the queue pair has been destroyed.

    :param queue: work queue of the shared receive queue.
    :param dispatcher: dispatcher of the queue pair's receive completion queue.
    :param requests: the queue pair's work state.
    """
    cdef section within
    section_enter(&within, _section(queue))
    try:
        dispatcher.srqs.pop(requests.qp_num, None)
        dispatcher.users.discard(requests)
        queue._end_if_all_cqs_failed()
        if not _serves(dispatcher, queue):
            queue.dispatchers.remove(dispatcher)
            dispatcher.in_flight -= queue.used
            dispatcher.awaited -= queue.awaited
    finally:
        section_leave(&within)


cdef bint _serves(CqDispatcher dispatcher, WorkQueue queue) except -1:
    # Return whether a queue pair that completes in the dispatcher receives from the shared receive queue.
    for each in dispatcher.srqs.values():
        if each is queue:
            return True
    return False


cdef uint64_t _uint(object value, int bits, str name) except? 0xFFFFFFFFFFFFFFF7:
    # Return the value as a number; raise ValueError if it does not fit in `bits` bits, TypeError if it is not an
    # integer.
    cdef int overflow = 0
    cdef long long fast
    number = PyNumber_Index(value)          # __index__, since __int__ would truncate a float
    fast = PyLong_AsLongLongAndOverflow(number, &overflow)
    if not overflow and fast >= 0 and (bits >= 63 or not fast >> bits):
        return <uint64_t>fast
    if number < 0 or number >> bits:
        raise ValueError(f"`{name}` must fit in {bits} bits, got {value}")
    return number


cdef int _set_ud_destination(QpWorkState requests, Operation operation, request *wr, Destination to) except -1:
    # Set and pin the destination of a datagram. Raise ValueError if `to` is None, or if the queue pair takes no
    # destination.
    if requests.handle._type != UD:
        raise ValueError(f"{requests.handle!r} is not of type UD: leave `to` out")
    if to is None:
        raise ValueError(f"{requests.handle!r} is of type UD: pass the destination of the datagram as `to`")
    if to.handle.context is not requests.handle.context:
        raise ValueError(f"{to!r} belongs to a different context than {requests.handle!r}")
    operation._pin(to.pins)
    wr.send.wr.ud.ah = to.handle.pointer
    wr.send.wr.ud.remote_qpn = to.remote_qpn
    wr.send.wr.ud.remote_qkey = to.remote_qkey
    return 0


cdef int _set_xrc_srq(QpWorkState requests, request *wr, object number) except -1:
    # Set the number of the peer's shared receive queue. Raise ValueError if `number` is None, or if the queue pair
    # takes none.
    if requests.handle._type != XRC_SEND:
        raise ValueError(f"{requests.handle!r} is not of type XRC_SEND: leave `srq_number` out")
    if number is None:
        raise ValueError(
            f"{requests.handle!r} is of type XRC_SEND: "
            "pass the number of the peer's shared receive queue as `srq_number`"
        )
    wr.send.qp_type.xrc.remote_srqn = _uint(number, 32, "srq_number")
    return 0
