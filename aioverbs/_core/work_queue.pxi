# Part of work.pyx: the queues that work requests are posted to, and the order of those that wait for a place.

@cython.final
cdef class WorkQueue:
    """The send queue or the receive queue of a queue pair, or a shared receive queue: what is under way in it.

    It never has more under way than it has places, so that the device refuses nothing: what finds none waits, first
    come, first served, and is posted when others complete.
    """

    cdef readonly Handle handle         # QueuePair or SharedReceiveQueue
    cdef readonly Completer completer   # that its requests complete at; None: of a shared receive queue
    cdef Requests requests              # the queue pair's; None likewise
    cdef uint32_t qp_num                # of the queue pair, which may be destroyed; 0 likewise
    cdef list completers                # of a shared receive queue: those of its queue pairs, each once
    cdef slots own_slots                # of a shared receive queue
    cdef slots *slots                   # that its requests stand in
    cdef uint64_t kind                  # SLOTS_*
    cdef bint receives
    cdef bint chains                    # posts at the end of the loop's turn: HIGH_BANDWIDTH
    cdef bint closing
    cdef turn_share share               # of the loop's turn
    cdef uint32_t limit                 # places
    cdef uint32_t max_sge
    cdef uint32_t max_inline
    cdef uint32_t used                  # places
    cdef uint32_t waiting               # requests that wait for one
    cdef Py_ssize_t awaited             # operations that somebody sleeps for
    cdef PyObject *first                # of the operations that wait, borrowed: who is dropped takes itself out
    cdef PyObject *last
    cdef Operation chain_first
    cdef Operation chain_last
    cdef uint32_t chained
    cdef Operation uncovered            # the last one that was posted without a completion of its own
    cdef object idle                    # called when nothing is under way any more; None: nobody waits for that
    cdef object make_scratch            # gives a RegionSlice for `scratch_bytes` a place
    cdef RegionSlice scratch
    cdef list free_scratch
    cdef uint32_t scratch_bytes
    cdef readonly uint64_t posted
    cdef readonly uint64_t completed
    cdef readonly uint64_t bytes
    cdef readonly uint64_t doorbells
    cdef readonly uint32_t high_water
    cdef dict errors                    # by status

    def __dealloc__(self):
        slots_end(&self.own_slots)

    # ---- Looking

    @property
    def under_way(self):
        """Requests that have a place."""
        return self.used

    @property
    def queued(self):
        """Requests that wait for one."""
        return self.waiting

    @property
    def depth(self):
        """Places."""
        return self.limit

    @property
    def failed(self):
        """How many ended with each status but success."""
        return dict(self.errors) if self.errors is not None else {}

    def abandon(self, int status, error):
        """The object was destroyed: what was under way ends with that status or error."""
        self.closing = True
        self._abandon(status, error)

    # ---- Who awaits

    cdef object _loop_of_caller(self):
        if _is_bound(self.handle.affinity):
            return self.handle.affinity.loop    # it passed the check
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("aioverbs needs an asyncio event loop, and none is running here") from None

    cdef int _look(self, Operation operation, bint spins) except -1:
        # Somebody asks whether it is done. Whoever may not is told so, even where it is.
        cdef Completer completer = self.completer
        if completer is not None:
            completer._look(operation, spins)
            return 0
        _check_owner(self.handle)
        for each in self.completers:
            (<Completer>each)._look(operation, spins)
        return 0

    cdef int _awaited(self, Operation operation) except -1:
        if operation.state == WAITING:
            operation.held = True       # until it has a place
            Py_INCREF(operation)
        self._count_awaited(1)
        return self._need_turns()

    cdef int _unawaited(self, Operation operation) except -1:
        # In whatever thread; the operation is not done.
        self._count_awaited(-1)
        return self._unhold(operation)

    cdef int _unhold(self, Operation operation) except -1:
        # Whoever calls holds it.
        if operation.held:
            operation.held = False
            Py_DECREF(operation)
        return 0

    cdef int _count_awaited(self, int change) except -1:
        self.awaited += change
        if self.completer is not None:
            self.completer.awaited += change
            return 0
        for each in self.completers:
            (<Completer>each).awaited += change
        return 0

    cdef int _count_under_way(self, int change) except -1:
        if self.completer is not None:
            self.completer.under_way += change
            return 0
        for each in self.completers:
            (<Completer>each).under_way += change
        return 0

    cdef int _need_turns(self) except -1:
        if self.completer is not None:
            return 0 if self.completer.turn_comes else self.completer._need_turn()
        for each in self._completers():
            (<Completer>each)._need_turn()
        return 0

    cdef tuple _completers(self):
        return (self.completer,) if self.completer is not None else tuple(self.completers)

    # ---- Beginning

    cdef int _submit(self, Operation operation, bint nowait) except -1:
        # Whoever calls has passed the check for `ibv_post_send` or the like, and leaves it afterwards.
        if self.closing:
            raise ClosedResourceError(f"{self.handle!r} is closed, or about to be")
        if self.completer is not None:
            self.completer._check()
        elif self._is_deaf():
            raise (<Completer>self.completers[0]).broken_by()
        if operation.requests > self.limit:
            raise ValueError(
                f"{operation.requests} requests do not fit into the {self.limit} places of {self.handle!r}: "
                "post fewer at once, or make it with more"
            )
        if self.scratch is None and (operation.scratch == -2 or operation.elements is not None):
            self._make_scratch(operation)   # which may let another thread run: places are looked for afterwards
        if self.first != NULL or self.used + operation.requests > self.limit:
            if nowait:
                raise WouldBlock
            return self._wait(operation)
        return self._begin(operation)

    cdef bint _is_deaf(self) except -1:
        # Of a shared receive queue: whether all that it completes at are broken.
        for each in self.completers:
            if (<Completer>each).error is None:
                return False
        return len(self.completers) > 0

    cdef int _wait(self, Operation operation) except -1:
        operation.earlier = self.last
        operation.later = NULL
        if self.last != NULL:
            (<Operation>self.last).later = <PyObject *>operation
        else:
            self.first = <PyObject *>operation
        self.last = <PyObject *>operation
        operation.state = WAITING
        self.waiting += operation.requests
        return self._need_turns()

    cdef int _unlink(self, Operation operation) except -1:
        if operation.earlier != NULL:
            (<Operation>operation.earlier).later = operation.later
        else:
            self.first = operation.later
        if operation.later != NULL:
            (<Operation>operation.later).earlier = operation.earlier
        else:
            self.last = operation.earlier
        operation.earlier = operation.later = NULL
        operation.state = NEW
        self.waiting -= operation.requests
        return 0

    cdef int _begin(self, Operation operation) except -1:
        # There is a place.
        cdef int error
        if operation.scratch == -2 or operation.elements is not None:
            self._take_all_scratch(operation)
        self._place(operation)
        if self.chains and operation.window is None and operation.elements is None:
            return self._chain(operation)
        if self.chain_first is not None:
            self._flush()               # in the order of the calls
        operation.state = POSTED        # before the verb: it may be done when that returns
        operation.send_wr.send_flags |= SIGNALED
        if self.uncovered is not None:
            operation.covered, self.uncovered = self.uncovered, None
        error = self._call(operation)
        if error:
            operation.state = NEW
            operation.covered, self.uncovered = None, operation.covered
            self._displace(operation)
            if operation.error is not None:
                raise operation.error
            self.handle._check("ibv_post_recv" if self.receives else "ibv_post_send", error)
        self.posted += operation.requests
        self.bytes += operation.bytes
        self.doorbells += 1
        return 0

    cdef int _chain(self, Operation operation) except -1:
        operation.state = CHAINED
        operation.send_wr.next = NULL
        if self.chain_last is None:
            self.chain_first = operation
            self.completer.chained.append(self)
        else:
            self.chain_last.send_wr.next = &operation.send_wr
        operation.covered = self.uncovered
        self.uncovered = operation
        self.chain_last = operation
        self.chained += 1
        self.posted += 1
        self.bytes += operation.bytes
        if self.chained >= CHAIN:
            self._flush()
        else:
            self.completer._need_turn()
        return 0

    cdef int _flush(self) except -1:
        # Post what was chained, with one doorbell; the last one completes for all of them. Whoever calls has passed the
        # check.
        cdef Operation first = self.chain_first, last = self.chain_last, each, refused
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_qp *qp
        cdef uint64_t bytes = 0
        cdef int error
        if first is None:
            return 0
        last.send_wr.send_flags |= SIGNALED
        self.chain_first = self.chain_last = None
        self.chained = 0
        self.uncovered = None
        self.doorbells += 1
        each = last
        while each is not None and each.state == CHAINED:
            each.state = POSTED
            bytes += each.bytes
            each = each.covered
        qp = (<QueuePair>self.handle).pointer
        if bytes >= RELEASE_GIL_BYTES:
            with nogil:
                error = v.verbs_post_send(qp, &first.send_wr, &bad)
        else:
            error = v.verbs_post_send(qp, &first.send_wr, &bad)
        if not error:
            return 0
        # Those from `bad` on are not posted. The one before has no completion, until a later one covers it.
        each = last
        while each is not None and each.state == POSTED:
            refused, each = each, each.covered
            refused.covered = None
            refused.error = VerbsError("ibv_post_send", abs(error))
            self.completer.refused.append(refused)
            if &refused.send_wr == bad:
                break
        self.uncovered = each
        self.completer._need_turn()
        return 0

    cdef int _place(self, Operation operation) except -1:
        operation.number = slots_take(self.slots, <void *>operation, self.kind)
        if not operation.number:
            self._give_scratch(operation)
            raise MemoryError("no slot for one more request")
        Py_INCREF(operation)            # the slot's
        operation.send_wr.wr_id = operation.number
        self.used += operation.requests
        if self.used > self.high_water:
            self.high_water = self.used
        self._count_under_way(operation.requests)
        return self._need_turns()

    cdef int _displace(self, Operation operation) except -1:
        # It has its place no more.
        slots_give(self.slots, operation.number)
        self._give_scratch(operation)
        self.used -= operation.requests
        self._count_under_way(-<int>operation.requests)
        Py_DECREF(operation)
        return 0

    cdef int _call(self, Operation operation) noexcept:
        # The verb; 0 or what it answered. Whoever calls has passed the check.
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_recv_wr *bad_receive = NULL
        cdef v.ibv_recv_wr *receive = &operation.recv_wr
        cdef v.ibv_send_wr *send = &operation.send_wr
        cdef v.ibv_qp *qp
        cdef int error
        if self.receives:
            receive.wr_id = operation.number
            if self.requests is not None:
                error = v.verbs_post_recv((<QueuePair>self.handle).pointer, receive, &bad_receive)
            else:
                error = v.verbs_post_srq_recv((<SharedReceiveQueue>self.handle).pointer, receive, &bad_receive)
        elif operation.window is not None:
            error = self._bind(operation)
        else:
            if operation.elements is not None:
                send = _linked(operation)
            qp = (<QueuePair>self.handle).pointer
            if operation.bytes >= RELEASE_GIL_BYTES:
                with nogil:
                    error = v.verbs_post_send(qp, send, &bad)
            else:
                error = v.verbs_post_send(qp, send, &bad)
            if error and operation.elements is not None and bad != send:
                return _partly(operation, bad, error)
        return error

    cdef int _bind(self, Operation operation) noexcept:
        cdef v.ibv_mw_bind bind
        cdef int error
        memset(&bind, 0, sizeof(bind))
        bind.wr_id = operation.number
        bind.send_flags = operation.send_wr.send_flags
        bind.bind_info = operation.bind_info
        try:
            error = (<QueuePair>self.handle)._bind(operation.window, operation.keep, &bind, None)
            if not error:
                operation.value = RemoteRegion(
                    operation.bind_info.addr, operation.bind_info.length, operation.window.pointer.rkey
                )
        except Exception as raised:     # the window is closed, or of another context
            operation.error = raised
            return EINVAL
        return error

    cdef int _take_all_scratch(self, Operation operation) except -1:
        try:
            if operation.scratch == -2:
                self._take_scratch(operation)
            for each in operation.elements or ():
                if (<Operation>each).scratch == -2:
                    self._take_scratch(<Operation>each)
        except BaseException:
            self._give_scratch(operation)
            raise
        return 0

    cdef int _make_scratch(self, Operation operation) except -1:
        if operation.scratch != -2 and not any((<Operation>each).scratch == -2 for each in operation.elements):
            return 0
        made = self.make_scratch(self.limit * self.scratch_bytes)
        if self.scratch is None:            # no other thread was faster
            self.scratch = made
            self.free_scratch = list(range(self.limit))
        return 0

    cdef int _take_scratch(self, Operation operation) except -1:
        # A piece of memory of its own, for what the device writes beside the caller's memory.
        cdef v.ibv_sge *sges
        cdef uint32_t place
        operation.scratch = place = self.free_scratch.pop()
        sges = _sges(operation)
        sges[0].addr = self.scratch._address + place * self.scratch_bytes
        sges[0].length = self.scratch_bytes
        sges[0].lkey = self.scratch._lkey
        return 0

    cdef int _give_scratch(self, Operation operation) except -1:
        if operation.scratch >= 0:
            self.free_scratch.append(operation.scratch)
            operation.scratch = -2
        if operation.elements is not None:
            for each in operation.elements:
                self._give_scratch(<Operation>each)
        return 0

    # ---- Ending

    cdef int _completed(self, Operation operation, v.ibv_wc *wc) except -1:
        if operation.covered is None:
            return self._ended(operation, wc)
        try:
            self._cover(operation)
        finally:
            self._ended(operation, wc)
        return 0

    cdef int _ended(self, Operation operation, v.ibv_wc *wc) except -1:
        if operation.elements is not None:
            if not _element_completed(operation, wc):
                return 0
        elif <int>wc.status != SUCCESS:
            operation.status = wc.status
            operation.vendor_err = wc.vendor_err
            operation.qp_num = wc.qp_num
        elif self.receives:
            operation.value = _received(operation, wc)
        else:
            operation._take_old_value()
        if operation.status != SUCCESS:
            self._failed(operation)
        return self._retire(operation)

    cdef int _cover(self, Operation last) except -1:
        # What was posted before it without completions of its own is done: a queue completes in order.
        cdef list before = []
        cdef Operation each = last
        raised = None
        while True:
            earlier, each.covered = each.covered, None
            if earlier is None or (<Operation>earlier).state != POSTED:
                break
            each = earlier
            before.append(each)
        for each in reversed(before):
            each._take_old_value()
            try:
                self._retire(each)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
        return 0

    cdef int _failed(self, Operation operation) except -1:
        status = _status(operation.status)
        if self.errors is None:
            self.errors = {}
        self.errors[status] = self.errors.get(status, 0) + 1
        if self.requests is not None:
            self.requests._broke(operation)
        return 0

    cdef int _retire(self, Operation operation) except -1:
        # It is done, and its place is another one's: last steps, which let Python code run, after all others.
        cdef uint32_t requests = operation.requests
        if operation.state == DONE:     # meanwhile, by what ended the queue while Python code ran
            return 0
        operation.state = DONE
        slots_give(self.slots, operation.number)
        self.used -= requests
        self.completed += requests
        if operation.elements is not None:
            _end_elements(operation)
        if operation.scratch >= 0 or operation.elements is not None:
            self._give_scratch(operation)
        self._count_under_way(-<int>requests)
        try:
            self._tell(operation)
        finally:
            try:
                if self.first != NULL:
                    self._advance()
                if not self.used and self.idle is not None:
                    self.idle()
            finally:
                Py_DECREF(operation)    # the slot's
        return 0

    cdef int _tell(self, Operation operation) except -1:
        # Who waits is known before Python code runs, which may end the wait; and is told, whatever that raises.
        waiter, loop = operation.waiter, operation.loop
        if waiter is not None:
            self._count_awaited(-1)
        local, operation.keep = operation.keep, None
        try:
            operation._unpin_all()
        finally:
            try:
                if operation.inbox is not None:
                    operation.inbox._arrived(operation, local)
            finally:
                if waiter is not None:
                    _wake(waiter, loop, self.handle.affinity)
        return 0

    cdef int _advance(self) except -1:
        # Places came back: those that wait get them, in their order.
        cdef Operation operation
        while self.first != NULL:
            operation = <Operation>self.first
            if self.used + operation.requests > self.limit:
                return 0
            refused = None
            try:
                self._enter()
            except ConcurrentAccessError:   # a thread is inside of a domain that any may use: in a moment it is not
                return self._stall()
            except Exception as error:
                self._unlink(operation)
                refused = error
            else:
                self._unlink(operation)
                try:
                    self._begin(operation)
                except Exception as error:
                    refused = error
                finally:
                    self.handle._unuse()
            if refused is not None:
                operation.error = refused
                self._end(operation)
            self._unhold(operation)
        return 0

    cdef int _stall(self) except -1:
        for each in self._completers():
            (<Completer>each).stalled.append(self)
            (<Completer>each)._need_turn()
            break
        return 0

    cdef int _enter(self) except -1:
        self.handle._use("ibv_post_recv" if self.receives else "ibv_post_send")
        return 0

    cdef int _end(self, Operation operation) except -1:
        # It never had a place.
        operation.state = DONE
        if operation.elements is not None:
            for each in operation.elements:
                (<Operation>each).status = operation.status
            _end_elements(operation)
        return self._tell(operation)

    cdef int _refuse_waiting(self, int status, object error) except -1:
        # Nothing is posted here any more.
        cdef Operation operation
        while self.first != NULL:
            operation = <Operation>self.first
            self._unlink(operation)
            operation.status = status
            operation.error = error
            self._end(operation)
            self._unhold(operation)
        return 0

    cdef int _unchain(self) noexcept:
        # What was to be posted together is not.
        self.chain_first = self.chain_last = self.uncovered = None
        self.chained = 0
        return 0

    cdef int _abandon(self, int status, object error) except -1:
        # The object is destroyed: nothing of it completes any more. A completion that comes all the same finds nothing.
        cdef Operation operation
        cdef uint32_t index
        self._refuse_waiting(status, error)
        self._unchain()
        for index in range(self.slots.size):
            if self.slots.at[index].work == NULL:
                continue
            operation = <Operation>self.slots.at[index].work
            if operation.queue is self:
                operation.covered = None
                operation.status = status
                operation.error = error
                self._retire(operation)
        return 0


cdef enum:
    CHAIN = 64                          # requests are posted together at most


cdef int _wake(object waiter, object loop, Affinity owner) except -1:
    # Whoever awaits goes on, on its own loop.
    here = owner.loop if _is_bound(owner) else asyncio._get_running_loop()
    try:
        if loop is here:
            _set_done(waiter)
        else:
            loop.call_soon_threadsafe(_set_done, waiter)
    except RuntimeError:
        if not loop.is_closed():        # then nobody waits any more
            raise
    return 0


cpdef _set_done(waiter):
    if not waiter.done():
        waiter.set_result(None)


cdef inline v.ibv_sge *_sges(Operation operation) noexcept:
    return operation.more_sges if operation.more_sges != NULL else operation.sge


cdef object _received(Operation operation, v.ibv_wc *wc):
    cdef Received received = Received.__new__(Received)
    cdef uint32_t length = wc.byte_len
    received.local = operation.keep
    received.qp_num = wc.qp_num
    if operation.scratch >= 0:
        length -= GRH
        if wc.wc_flags & v.IBV_WC_GRH:
            received.route = (<char *>_sges(operation)[0].addr)[:GRH]
        received.src_qp = wc.src_qp
    received.byte_len = length
    if wc.wc_flags & v.IBV_WC_WITH_INV:
        received.invalidated_rkey = wc.imm_data
    elif wc.wc_flags & v.IBV_WC_WITH_IMM:
        received.immediate = v.ntohl(wc.imm_data)
    return received
