# Part of data_path.pyx: work queues, and the order of requests that wait for a place in one.

@cython.final
cdef class WorkQueue:
    """Work queue: the send queue or the receive queue of a queue pair, or a shared receive queue. Made by a
    `QpWorkState`, or by a shared receive queue when it opens.

    A work queue posts no more requests than it has places, so that the device never refuses a request for lack of
    space. A request that finds no place waits, first come, first served, and is posted when earlier requests complete.
    """

    cdef readonly Handle handle         # QueuePair or SharedReceiveQueue
    cdef readonly CqDispatcher dispatcher   # of its completions; None for a shared receive queue without a CQ
    cdef QpWorkState requests              # of the queue pair; None for a shared receive queue
    cdef uint32_t qp_num                # of the queue pair, valid after it is destroyed; 0 for a shared one
    cdef list dispatchers               # of a shared receive queue: dispatchers of its queue pairs, each once
    cdef slots own_slots                # of a shared receive queue
    cdef slots *slots                   # slots of its requests
    cdef uint64_t kind                  # SLOTS_*
    cdef bint receives
    cdef bint chains                    # whether all requests are posted at the end of the turn (HIGH_BANDWIDTH)
    cdef bint closing
    cdef turn_share share               # share of the loop's turn
    cdef uint32_t limit                 # number of places
    cdef uint32_t max_sge
    cdef uint32_t max_inline
    cdef uint32_t most_bytes            # size limit of a message
    cdef uint32_t used                  # number of places in use
    cdef uint32_t waiting               # number of requests that wait for a place
    cdef Py_ssize_t awaited             # number of operations, and of frames, that a task is suspended for
    cdef PyObject *first                # list of waiting operations (_Extra); borrowed, a freed one removes itself
    cdef PyObject *last
    cdef finalizer_lock waiting_lock    # protects the list of waiting operations
    cdef bint any_thread                # of a shared receive queue: see `_is_any_thread`
    cdef list chain                     # operations to post together; None if there are none
    cdef request *chain_wrs             # their requests, an array of CHAIN; or NULL
    cdef object idle                    # callback for an empty queue; None if there is none
    cdef object make_scratch            # returns a RegionSlice of `scratch_bytes` for each place
    cdef RegionSlice scratch
    cdef list free_scratch
    cdef uint32_t scratch_bytes
    cdef readonly uint64_t posted
    cdef readonly uint64_t completed
    cdef readonly uint64_t bytes
    cdef readonly uint64_t doorbells
    cdef readonly uint32_t high_water
    cdef dict errors                    # number of failed requests by the number of their status
    cdef list inboxes                   # weak references to the inboxes that it fills
    cdef list still_pinned              # pins (_Run) of memory that the device may still write after an abandon

    def __cinit__(self):
        slots_begin(&self.own_slots)
        finalizer_lock_begin(&self.waiting_lock)
        self.inboxes = []

    def __dealloc__(self):
        slots_end(&self.own_slots)
        free(self.chain_wrs)

    # ---- Inspection

    @property
    def in_flight(self):
        """Number of places taken by requests that have not completed."""
        return self.used

    @property
    def queued(self):
        """Number of requests that wait for a place in the queue."""
        return self.waiting

    @property
    def depth(self):
        """Number of places in the queue, that is, of requests that may be in flight at the same time."""
        return self.limit

    @property
    def failed(self):
        """Numbers of failed requests by their status: a new dict of `WcStatus` to int, empty if no request has
        failed."""
        if self.errors is None:
            return {}
        return {_status(number): count for number, count in self.errors.copy().items()}

    def abandon(self, int status, error):
        """End all requests after the queue pair or shared receive queue has been destroyed. Iteration over inboxes ends
        without an exception.

        :param status: ``enum ibv_wc_status`` with which the requests end.
        :param error: exception that awaiting the requests raises; None if it follows from the status.
        """
        cdef section within
        section_enter(&within, _section(self))
        try:
            self.closing = True
            if self.requests is None and self.dispatcher is not None:
                self.dispatcher.receivers.discard(self)
            self._abandon(status, error)
            self._end_inboxes(StopAsyncIteration())
        finally:
            section_leave(&within)

    # ---- Inboxes

    cdef int _add_inbox(self, Inbox inbox) except -1:
        self.inboxes.append(weakref.ref(inbox, self.inboxes.remove))
        return 0

    cdef int _end_inboxes(self, object error) except -1:
        # The queue takes no more receives because of `error`: notify the tasks that await messages.
        for each in list(self.inboxes):     # tuple() and slices read the size before they allocate
            inbox = each()
            if inbox is not None:
                (<Inbox>inbox)._queue_failed(error)
        return 0

    # ---- Awaiting

    cdef object _loop_of_caller(self):
        # Return the event loop of the caller; raise RuntimeError if none is running.
        if _is_bound(self.handle.affinity):
            return self.handle.affinity.loop    # the caller passed the owner check
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("aioverbs needs an asyncio event loop, and none is running here") from None

    cdef int _poll_for(self, Operation operation, bint spins) except -1:
        # Poll for the completion of the operation, with the errors of `CqDispatcher._poll_for`. Raise AffinityError if
        # the caller is not the owner, even if the operation is done.
        cdef CqDispatcher dispatcher = self.dispatcher
        if dispatcher is not None:
            dispatcher._poll_for(operation, spins)
            return 0
        _check_owner(self.handle)
        for each in self.dispatchers:
            (<CqDispatcher>each)._poll_for(operation, spins)
        return 0

    cdef int _awaited(self, Operation operation) except -1:
        # Note that a task is about to suspend for the operation.
        if operation.state == WAITING:
            operation.held_by_queue = True  # until the operation has a place
            Py_INCREF(operation)
        self._count_awaited(1)
        return self._need_turns()

    cdef int _unawaited(self, Operation operation) except -1:
        # Note that no task waits for the operation any longer. Can be called from any thread; the operation is not
        # done.
        self._count_awaited(-1)
        return self._unhold(operation)

    cdef int _unhold(self, Operation operation) except -1:
        # Drop the queue's reference to the operation, if it has one. The caller holds a reference to the operation.
        if operation.held_by_queue:
            operation.held_by_queue = False
            Py_DECREF(operation)
        return 0

    cdef int _count_awaited(self, int change) except -1:
        self.awaited += change
        if self.dispatcher is not None:
            return self.dispatcher._count_awaited(change)
        for each in self.dispatchers:
            (<CqDispatcher>each)._count_awaited(change)
        return 0

    cdef int _count_in_flight(self, int change) except -1:
        if self.dispatcher is not None:
            self.dispatcher.in_flight += change
            return 0
        for each in self.dispatchers:
            (<CqDispatcher>each).in_flight += change
        return 0

    cdef int _need_turns(self) except -1:
        # Have each dispatcher of the queue's completions schedule a turn.
        if self.dispatcher is not None:
            return 0 if self.dispatcher.turn_scheduled else self.dispatcher._need_turn()
        for each in self._dispatchers():
            (<CqDispatcher>each)._need_turn()
        return 0

    cdef tuple _dispatchers(self):
        # Return the dispatchers of the queue's completions.
        return (self.dispatcher,) if self.dispatcher is not None else tuple(self.dispatchers)

    # ---- Posting

    cdef int _submit(self, Operation operation, request *wr, bint nowait) except -1:
        # Post the operation, or let it wait for places; with `nowait` raise WouldBlock instead. Raise
        # ClosedResourceError if the queue is closing, BrokenResourceError if no completion would be dispatched,
        # VerbsError if the verb fails. The caller has begun the verb (`Handle._use` for `ibv_post_send` or
        # `ibv_post_recv`), and ends it afterwards.
        if self.closing:
            raise ClosedResourceError(f"{self.handle!r} is closed, or about to be")
        if self.dispatcher is not None:
            self.dispatcher._check()
        elif self._all_cqs_failed():
            raise (<CqDispatcher>self.dispatchers[0]).broken_error()
        if operation.requests > self.limit:
            raise ValueError(
                f"{operation.requests} requests exceed the {self.limit} places of {self.handle!r}: "
                "post fewer at once, or create it with more places"
            )
        if operation.scratch != UNUSED and self.scratch is None:
            self._make_scratch()            # may let another thread run: look for a place afterwards
        if self.first != NULL or self.used + operation.requests > self.limit:
            if nowait:
                raise WouldBlock
            return self._wait(operation, wr)
        return self._begin(operation, wr)

    cdef bint _all_cqs_failed(self) except -1:
        # Whether all completion queues in which the receives of a shared receive queue complete have failed.
        for each in self.dispatchers:
            if (<CqDispatcher>each).error is None:
                return False
        return len(self.dispatchers) > 0

    cdef int _wait(self, Operation operation, request *wr) except -1:
        # Append the operation, with a copy of its request, to those that wait for places.
        cdef _Extra extra = _extra(operation)
        if extra.requests == NULL:
            extra.requests = request_grow(NULL, 0, 1)
            if extra.requests == NULL:
                raise MemoryError
            request_move(extra.requests, wr)
        extra.weak = weak_reference(operation)
        extra.pinned = tuple(operation._all_pins())
        extra.places = operation.requests
        extra.queue = self
        operation.state = WAITING
        self._append_waiting(<PyObject *>extra)
        if not self.used:               # places are free: the operations ahead are being freed
            self._stall()
        return self._need_turns()

    cdef void _append_waiting(self, PyObject *extra) noexcept:
        finalizer_lock_acquire(&self.waiting_lock)
        (<_Extra>extra).earlier = self.last
        (<_Extra>extra).later = NULL
        if self.last != NULL:
            (<_Extra>self.last).later = extra
        else:
            self.first = extra
        self.last = extra
        self.waiting += (<_Extra>extra).places
        finalizer_lock_release(&self.waiting_lock)

    cdef void _remove_waiting(self, PyObject *extra) noexcept:
        # The caller holds `waiting_lock`.
        cdef PyObject *earlier = (<_Extra>extra).earlier
        cdef PyObject *later = (<_Extra>extra).later
        if earlier != NULL:
            (<_Extra>earlier).later = later
        else:
            self.first = later
        if later != NULL:
            (<_Extra>later).earlier = earlier
        else:
            self.last = earlier
        (<_Extra>extra).earlier = (<_Extra>extra).later = NULL
        self.waiting -= (<_Extra>extra).places

    cdef void _withdraw(self, _Extra extra) noexcept:
        # Remove an operation that waits for places from the list while it is being freed, in any thread.
        finalizer_lock_acquire(&self.waiting_lock)
        self._remove_waiting(<PyObject *>extra)
        finalizer_lock_release(&self.waiting_lock)

    cdef bint _fits(self) noexcept:
        # Whether there are places for the first waiting operation.
        cdef bint fits
        finalizer_lock_acquire(&self.waiting_lock)
        fits = self.first != NULL and self.used + (<_Extra>self.first).places <= self.limit
        finalizer_lock_release(&self.waiting_lock)
        return fits

    cdef Operation _take_first(self, uint32_t room):
        # Remove and return the first waiting operation; None if none is left, or the first one needs more places
        # than `room`.
        cdef Operation operation
        cdef PyObject *at
        cdef PyObject *found = NULL
        finalizer_lock_acquire(&self.waiting_lock)
        at = self.first
        while at != NULL and (<_Extra>at).places <= room:
            found = weak_to_strong(<PyObject *>(<_Extra>at).weak, (<_Extra>at).operation)
            if found != NULL:
                self._remove_waiting(at)
                break
            at = (<_Extra>at).later
        finalizer_lock_release(&self.waiting_lock)
        if found == NULL:
            return None
        operation = <Operation>found
        Py_DECREF(operation)            # the reference of `found`
        operation.extra.queue = operation.extra.pinned = operation.extra.weak = None
        operation.state = NEW
        return operation

    cdef int _begin(self, Operation operation, request *wr) except -1:
        # Post an operation or chain it; the caller has made sure that there is a place. Raise VerbsError if the verb
        # refuses it.
        cdef int error
        if operation.scratch != UNUSED:
            self._take_all_scratch(operation, wr)
        self._occupy(operation)
        wr.send.wr_id = operation.wr_id
        if operation.grows or (self.chains and not _is_batch(operation) and not _binds(operation)):
            return self._chain(operation, wr)
        if self.chain is not None:
            self._flush_before(operation)
        operation.state = POSTED        # before the verb: the operation may be done when the verb returns
        error = self._call(operation, wr)
        if error:
            return self._undo_begin(operation, error)
        self.posted += operation.requests
        self.bytes += operation.bytes
        self.doorbells += 1
        return 0

    cdef int _flush_before(self, Operation operation) except -1:
        # Post the chain, which keeps the order of the calls. If that breaks the queue pair, nothing follows: release
        # the place of the operation, and raise the error.
        try:
            self._flush()
            self.requests._check_state(False)
        except BaseException:
            self._vacate(operation)
            raise
        return 0

    cdef int _undo_begin(self, Operation operation, int error) except -1:
        # Release the place of a request that the verb refused, and raise the error.
        operation.state = NEW
        self._vacate(operation)
        if operation.raises:
            raise operation.value
        self.handle._check("ibv_post_recv" if self.receives else "ibv_post_send", error)
        return 0

    cdef int _chain(self, Operation operation, request *wr) except -1:
        # Keep the request, to be posted with others at the end of the turn, or now if the chain is full. Make the list
        # first: a finalizer that runs then may begin a chain.
        cdef list fresh = [] if self.chain is None else None
        if self.chain_wrs == NULL:
            self.chain_wrs = request_grow(NULL, 0, CHAIN)
            if self.chain_wrs == NULL:
                self._vacate(operation)
                raise MemoryError
        if self.chain is None:
            self.chain = fresh
            self.dispatcher.chained.append(self)
        request_move(&self.chain_wrs[len(self.chain)], wr)
        self.chain.append(operation)
        operation.state = CHAINED
        self.posted += 1
        self.bytes += operation.bytes
        if len(self.chain) >= CHAIN:
            self._flush()
        else:
            self.dispatcher._need_turn()
        return 0

    cdef v.ibv_send_wr *_growing(self, Operation operation) except? NULL:
        # Return the request of an operation that is the last one to be posted of all that are chained or wait for
        # places, to be changed; NULL if it was posted, or others follow it.
        cdef Py_ssize_t last
        cdef PyObject *waits_last
        finalizer_lock_acquire(&self.waiting_lock)
        waits_last = self.last
        finalizer_lock_release(&self.waiting_lock)
        if operation.state == WAITING:
            return &operation.extra.requests.send if waits_last == <PyObject *>operation.extra else NULL
        if self.chain is None or waits_last != NULL:
            return NULL
        last = len(self.chain) - 1
        return &self.chain_wrs[last].send if self.chain[last] is operation else NULL

    cdef int _flush(self) except -1:
        # Post the chained requests with one doorbell; the last one completes for all of them. The caller has begun the
        # verb. If the device refuses a request, post the requests after it in another chain, whose completion also
        # covers the requests before it.
        cdef list chain = self.chain
        cdef request *requests = self.chain_wrs
        if chain is None:
            return 0
        self.chain, self.chain_wrs = None, NULL  # other threads may begin another chain from now on
        try:
            self._post_chains(chain, requests)
        finally:
            if self.chain_wrs == NULL:
                self.chain_wrs = requests
            else:
                free(requests)
        return 0

    cdef int _post_chains(self, list chain, request *requests) except -1:
        # Post the chained requests, as described for `_flush`; give each refused operation to the dispatcher, which
        # ends it with its error.
        cdef list before = []           # posted without a completion of their own
        cdef Operation refused
        cdef Py_ssize_t accepted
        cdef int error
        while chain:
            error = self._post_chain(before, chain, requests, &accepted)
            if not error:
                break
            before += chain[:accepted]
            self._refuse(chain[accepted], VerbsError("ibv_post_send", abs(error)))
            refused = chain[accepted]
            chain = chain[accepted + 1:]
            requests += accepted + 1
            if self._break_if_required(refused):
                for each in chain:
                    self._refuse(each, refused.value)
                chain = None
            if before and not chain:
                self.requests._lose_completions(refused.value)  # no completion reports the accepted requests
        return 0

    cdef bint _break_if_required(self, Operation operation) except -1:
        # Break the queue pair if it requires the operation, which could not be posted and has its error: see
        # `QpWorkState.require_sends`. Return whether it does.
        if self.receives or not self.requests.requires_sends or not _sends >> operation.opcode & 1:
            return False
        self.requests._require_error(operation.value)
        return True

    cdef int _refuse(self, Operation operation, object error) except -1:
        # Have the dispatcher end a chained operation with the error.
        operation._fail(error)
        self.dispatcher.refused.append(operation)
        return self.dispatcher._need_turn()

    cdef int _post_chain(self, list before, list chain, request *requests, Py_ssize_t *accepted) except? -1:
        # Post one chain. Return 0, or the error of the verb; then `accepted` is the number of accepted requests.
        cdef Operation last = chain[len(chain) - 1]
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_qp *qp = (<QueuePair>self.handle).pointer
        cdef uint64_t bytes = 0
        cdef int error
        for each in chain:
            (<Operation>each).state = POSTED    # before the verb: the operation may be done when it returns
            bytes += (<Operation>each).bytes
        _link_wrs(requests, len(chain))
        if before or len(chain) > 1:
            _extra(last).unsignaled = before + chain[:len(chain) - 1]
        self.doorbells += 1
        if bytes >= RELEASE_GIL_BYTES:
            with nogil:
                error = v.verbs_post_send(qp, &requests.send, &bad)
        else:
            error = v.verbs_post_send(qp, &requests.send, &bad)
        if error:
            accepted[0] = _index_of_bad_wr(requests, len(chain), bad)
            if last.extra is not None:
                last.extra.unsignaled = None
        return error

    cdef int _occupy(self, Operation operation) except -1:
        # Give the operation a place. Raise MemoryError if there is not enough memory for it.
        operation.wr_id = slots_take(self.slots, <void *>operation, self.kind)
        if not operation.wr_id:
            if operation.scratch != UNUSED:
                self._give_scratch(operation)
            raise MemoryError("no slot for one more request")
        Py_INCREF(operation)            # the slot's reference
        self.used += operation.requests
        if self.used > self.high_water:
            self.high_water = self.used
        self._count_in_flight(operation.requests)
        return self._need_turns()

    cdef int _vacate(self, Operation operation) except -1:
        # Release the place of an operation.
        slots_give(self.slots, operation.wr_id)
        if operation.scratch != UNUSED:
            self._give_scratch(operation)
        self.used -= operation.requests
        self._count_in_flight(-<int>operation.requests)
        Py_DECREF(operation)
        return 0

    cdef int _call(self, Operation operation, request *wr) noexcept:
        # Call the verb and return 0 or its error. The caller has begun the verb.
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_recv_wr *bad_receive = NULL
        cdef v.ibv_qp *qp
        cdef int error
        if self.receives:
            if self.requests is not None:
                error = v.verbs_post_recv((<QueuePair>self.handle).pointer, &wr.receive, &bad_receive)
            else:
                error = v.verbs_post_srq_recv((<SharedReceiveQueue>self.handle).pointer, &wr.receive, &bad_receive)
        elif _binds(operation):
            error = self._bind(operation, wr)
        else:
            if _is_batch(operation):
                _number_elements(operation)
            _link_wrs(wr, operation.requests)
            qp = (<QueuePair>self.handle).pointer
            if operation.bytes >= RELEASE_GIL_BYTES:
                with nogil:
                    error = v.verbs_post_send(qp, &wr.send, &bad)
            else:
                error = v.verbs_post_send(qp, &wr.send, &bad)
            if error and _is_batch(operation) and bad != &wr.send:
                return _batch_refused(operation, wr, bad, error)
        return error

    cdef int _bind(self, Operation operation, request *wr) noexcept:
        # Bind a memory window; return 0 or an errno. The operation's result is the window's `RemoteRegion`, whose new
        # key is valid when the request has completed.
        cdef _Extra extra = operation.extra
        cdef MemoryWindow window = extra.window
        cdef MemoryRegion region = operation.keepalive
        cdef int error
        try:
            if window.context is not self.handle.context:
                raise ValueError(f"{window!r} belongs to a different context than {self.handle!r}")
            window._enter()
            try:
                region._enter()
                try:
                    extra.bind_info.mr = region.pointer
                    error = self._call_bind(window, &extra.bind_info, wr)
                finally:
                    region._leave()
            finally:
                window._leave()
            if not error:
                operation.value = RemoteRegion(extra.bind_info.addr, extra.bind_info.length, window.pointer.rkey)
        except Exception as raised:     # the window is closed, or belongs to another context
            operation._fail(raised)
            return EINVAL
        return error

    cdef int _call_bind(self, MemoryWindow window, v.ibv_mw_bind_info *bind_info, request *wr) except? -1:
        # Call the verb for the window's type; return 0 or its errno.
        cdef v.ibv_qp *qp = (<QueuePair>self.handle).pointer
        cdef v.ibv_mw_bind bind
        cdef v.ibv_send_wr *bad = NULL
        cdef uint32_t key = window.pointer.rkey
        cdef int error
        wr.send.send_flags |= SIGNALED
        if window.mw_type == <int>v.IBV_MW_TYPE_1:          # ibv_bind_mw; the device chooses the key
            memset(&bind, 0, sizeof(bind))
            bind.wr_id = wr.send.wr_id
            bind.send_flags = wr.send.send_flags
            bind.bind_info = bind_info[0]
            return v.verbs_bind_mw(qp, window.pointer, &bind)
        key = (key & 0xffffff00) | ((key + 1) & 0xff)       # the owner chooses the low byte
        wr.send.bind_mw.mw = window.pointer
        wr.send.bind_mw.rkey = key
        wr.send.bind_mw.bind_info = bind_info[0]
        error = v.verbs_post_send(qp, &wr.send, &bad)
        if not error:
            window.pointer.rkey = key   # providers leave this to the caller
        return error

    cdef int _take_all_scratch(self, Operation operation, request *wr) except -1:
        # Take scratch memory for the operation and all its elements that want it, or for none.
        cdef Py_ssize_t at = 0
        try:
            if operation.scratch == WANTED:
                self._take_scratch(operation, wr)
            for each in _elements(operation):
                if (<Operation>each).scratch == WANTED:
                    self._take_scratch(<Operation>each, &wr[at])
                at += 1
        except BaseException:
            self._give_scratch(operation)
            raise
        return 0

    cdef int _make_scratch(self) except -1:
        # Register the queue's scratch memory, on its first use. Errors of the registration are raised.
        scratch = self.make_scratch(self.limit * self.scratch_bytes)
        if self.scratch is None:            # no other thread was faster
            self.scratch = scratch
            self.free_scratch = list(range(self.limit))
        return 0

    cdef int _take_scratch(self, Operation operation, request *wr) except -1:
        # Take a piece of scratch memory for data that the device writes in addition to the caller's memory.
        cdef uint32_t place = self.free_scratch.pop()
        operation.scratch = place
        wr.send.sg_list[0].addr = self._scratch_of(operation)
        wr.send.sg_list[0].length = self.scratch_bytes
        wr.send.sg_list[0].lkey = self.scratch._lkey
        return 0

    cdef uint64_t _scratch_of(self, Operation operation) noexcept:
        # Return the address of the operation's scratch memory.
        return self.scratch._address + <uint64_t>operation.scratch * self.scratch_bytes

    cdef int _give_scratch(self, Operation operation) except -1:
        # Free the scratch memory of the operation and its elements.
        if operation.scratch >= 0:
            self.free_scratch.append(operation.scratch)
            operation.scratch = WANTED
        for each in _elements(operation):
            self._give_scratch(<Operation>each)
        return 0

    # ---- Completion

    cdef int _completed(self, Operation operation, v.ibv_wc *wc) except -1:
        # Handle a completion of the operation, which also covers earlier operations that have no completion of their
        # own.
        cdef list unsignaled
        if operation.extra is None:
            return self._record_completion(operation, wc)
        if operation.extra.ring is not None:
            return operation.extra.ring._completed(wc)
        if operation.extra.unsignaled is None:
            return self._record_completion(operation, wc)
        unsignaled, operation.extra.unsignaled = operation.extra.unsignaled, None
        try:
            self._complete_unsignaled(unsignaled)
        finally:
            self._record_completion(operation, wc)
        return 0

    cdef int _record_completion(self, Operation operation, v.ibv_wc *wc) except -1:
        # Record the outcome and retire the operation; retire a batch only when its last request has completed.
        if operation.state == DONE:     # ended by Python code that ran when the operations before it completed
            return 0
        if _is_batch(operation):
            if not _element_completed(operation, wc):
                return 0
        elif <int>wc.status != SUCCESS:
            operation.status = wc.status
            operation.vendor_err = wc.vendor_err
            operation.qp_num = wc.qp_num
        elif self.receives:
            received = _received(operation, wc)
            if operation.state == DONE:     # ended by a finalizer meanwhile
                return 0
            operation.value = received
        else:
            operation._take_old_value()
        if operation.status != SUCCESS:
            self._failed(operation)
        return self._retire(operation)

    cdef int _complete_unsignaled(self, list before) except -1:
        # Complete the requests that were posted without a completion of their own: a queue completes in order, and a
        # flushed request always has a completion.
        cdef Operation operation
        raised = None
        for each in before:
            operation = <Operation>each
            if operation.state != POSTED:
                continue
            operation._take_old_value()
            try:
                self._retire(operation)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
        return 0

    cdef int _failed(self, Operation operation) except -1:
        # Count a failed request, and note that its queue pair is broken.
        if self.errors is None:
            self.errors = {}
        self.errors[operation.status] = self.errors.get(operation.status, 0) + 1
        if self.requests is not None:
            self.requests._work_failed(operation)
        return 0

    cdef int _retire(self, Operation operation) except -1:
        # Complete an operation and free its place. Steps that may run Python code come last.
        cdef uint32_t requests = operation.requests
        if operation.state == DONE:     # ended by Python code that ran in between, or with its queue
            return 0
        byte_write(&operation.state, DONE)
        slots_give(self.slots, operation.wr_id)
        self.used -= requests
        self.completed += requests
        if _is_batch(operation):
            _end_elements(operation)
        if operation.scratch != UNUSED:
            self._give_scratch(operation)
        self._count_in_flight(-<int>requests)
        try:
            self._notify(operation)
        finally:
            try:
                if self.first != NULL:
                    self._advance()
                if not self.used and self.idle is not None:
                    self.idle()
            finally:
                Py_DECREF(operation)    # the slot's reference
        return 0

    cdef int _notify(self, Operation operation) except -1:
        # Release the memory of an operation that has ended, fill its inbox and wake its waiter. The waiter is read
        # before Python code runs, which may end the await, and is woken even if that code raises.
        if operation.waiter is None and operation.extra is None:
            operation.keepalive = None
            return operation._unpin()
        waiter = operation.waiter
        if waiter is not None:
            self._count_awaited(-1)
        local, operation.keepalive = operation.keepalive, None
        try:
            for each in _elements(operation):
                (<Operation>each).keepalive = None
            operation._unpin()
        finally:
            try:
                if operation.extra is not None and operation.extra.inbox is not None:
                    operation.extra.inbox._receive_done(operation, local)
            finally:
                if waiter is not None:
                    _wake(waiter, self)
        return 0

    cdef int _advance(self) except -1:
        # Give free places to the waiting operations, in their order.
        cdef Operation operation
        while self._fits():
            refused = None
            try:
                self._enter()
            except ConcurrentAccessError:   # a thread is inside the thread domain, for a short time
                return self._stall()
            except BusyResourceError:       # another thread is changing the state: retry when that has ended
                return self._stall_until_resumed()
            except AffinityError:           # an unbound completion queue: another loop dispatches
                return self._call_at_owner(self.advance)
            except Exception as error:
                refused = error
            operation = self._take_first(self.limit - self.used)
            if operation is None:           # freed in the meantime
                if refused is None:
                    self.handle._unuse()
                return 0
            if refused is None:
                try:
                    self._begin(operation, operation.extra.requests)
                except Exception as error:
                    refused = error
                finally:
                    self.handle._unuse()
            if refused is not None:
                operation._fail(refused)
                self._break_if_required(operation)
                self._finish_unplaced(operation)
            self._unhold(operation)
        return 0

    cdef int _stall(self) except -1:
        # Have a dispatcher call `_advance` in the next turn of its loop.
        for each in self._dispatchers():
            (<CqDispatcher>each).stalled.append(self)
            (<CqDispatcher>each)._need_turn()
            break
        return 0

    cdef int _stall_until_resumed(self) except -1:
        # Have a dispatcher call `_advance` when the queue pair's state change has ended.
        if self.requests is None:       # the state of a shared receive queue never changes
            return self._stall()
        if self.dispatcher.loop is not None:
            self.when_resumed(self.dispatcher.loop, self.resume)
        return 0

    cdef int _call_at_owner(self, callback) except -1:
        # Have the owner's loop call `callback`. Do nothing if the owner's loop runs in a thread that does not own the
        # handle: the callback would repeat forever.
        loop = self.handle.affinity.loop
        if loop is asyncio._get_running_loop():
            return 0
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:            # the owner's loop is closed: waiting requests end with the queue
            pass
        return 0

    def advance(self):
        """Post waiting requests for which there are free places. This is called on the owner's loop if another loop
        dispatched the completions that freed the places."""
        cdef section within
        section_enter(&within, _section(self))
        try:
            self._advance()
        finally:
            section_leave(&within)

    def flush(self):
        """Post the chained requests, which were collected to be posted together. This is called on the owner's loop:
        by a user of the queue, or because the loop that dispatches the completions may not post them."""
        cdef section within
        section_enter(&within, _section(self))
        try:
            self._flush_chained()
        except ConcurrentAccessError:   # a thread is inside the thread domain, for a short time
            self.dispatcher._need_turn()
        finally:
            section_leave(&within)

    cdef int _flush_chained(self) except -1:
        # Post the chain. Called by the dispatcher, or on the owner's loop. The queue may be in `chained` once more for
        # each chain that was posted before the dispatcher came to it, which then finds a later chain, or none.
        if self.chain is None:          # posted, or abandoned
            return 0
        try:
            self._enter()
        except AffinityError:           # any thread uses the completion queue, the queue pair has an owner
            return self._call_at_owner(self.flush)
        except BusyResourceError:       # another thread is changing the state: retry when that has ended
            if self.dispatcher.loop is not None:
                self.when_resumed(self.dispatcher.loop, self.flush)
            return 0
        except BaseException:
            self.dispatcher.chained.append(self)
            raise
        try:
            self._flush()
        finally:
            self.handle._unuse()
        return 0

    cdef int _count_frame_awaited(self, int change) except -1:
        self.awaited += change
        if self.dispatcher is not None:
            return self.dispatcher._count_frame_awaited(change)
        for each in self.dispatchers:
            (<CqDispatcher>each)._count_frame_awaited(change)
        return 0

    def when_resumed(self, loop, callback):
        """Have a callback called when a state change of the queue pair, made by another thread, may have ended.

        :param loop: event loop that calls the callback, soon if no change is in flight.
        :param callback: called without arguments.
        """
        (<QueuePair>self.handle)._call_when_resumed(loop, callback)

    def resume(self):
        """Schedule the posting of waiting requests on the home loop. This is called when a state change made by another
        thread may have ended."""
        self._stall()

    cdef int _enter(self) except -1:
        # Begin the posting verb, with the errors of `Handle._use`; pair each success with `Handle._unuse`.
        self.handle._use("ibv_post_recv" if self.receives else "ibv_post_send")
        return 0

    cdef int _finish_unplaced(self, Operation operation) except -1:
        # End an operation that never had a place.
        for each in _elements(operation):
            (<Operation>each).status = operation.status
        byte_write(&operation.state, DONE)
        if _is_batch(operation):
            _end_elements(operation)
        return self._notify(operation)

    cdef int _refuse_waiting(self, int status, object error) except -1:
        # End all waiting operations with `status`, or with `error` if that is not None: nothing more is posted here.
        cdef Operation operation
        while True:
            operation = self._take_first(0xFFFFFFFF)
            if operation is None:
                return 0
            operation.status = status
            if error is not None:
                operation._fail(error)
            self._finish_unplaced(operation)
            self._unhold(operation)

    cdef int _refuse_chained(self) except -1:
        # End the chained requests as flushed: they never reached the device. No request may wait for their places.
        chain, self.chain = self.chain, None
        if chain is not None:
            for each in chain:
                self._abandon_operation(<Operation>each, FLUSHED, None)
        return 0

    cdef int _unchain(self) noexcept:
        # Drop the chained requests.
        self.chain = None
        return 0

    cdef int _abandon(self, int status, object error) except -1:
        # End all requests, because the object is destroyed and they will not complete. A late completion finds an empty
        # slot.
        cdef Operation operation
        cdef uint32_t index
        self._refuse_waiting(status, error)
        self._unchain()
        for index in range(self.slots.size):
            if self.slots.at[index].work == NULL:
                continue
            operation = <Operation>self.slots.at[index].work
            if operation.queue is self:
                self._abandon_operation(operation, status, error)
        if self.still_pinned is not None:
            still_pinned, self.still_pinned = self.still_pinned, None
            _discard_runs(still_pinned, self.receives)
        return 0

    cdef int _abandon_all_still_pinned(self, object error) except -1:
        # End all requests in flight with `error` and notify the waiters. The device may still write to the memory,
        # which stays pinned until `_abandon`.
        cdef Operation operation
        cdef uint32_t index
        for index in range(self.slots.size):
            if self.slots.at[index].work != NULL:
                operation = <Operation>self.slots.at[index].work
                if operation.queue is self:
                    self._abandon_still_pinned(operation, error)
        return self._end_inboxes(error)

    cdef int _end_if_all_cqs_failed(self) except -1:
        # For a shared receive queue. End its requests and notify the waiters if no completion queue works any longer
        # and every queue pair that received from the queue is reset. As long as a queue pair is not reset, the device
        # may still write to the memory.
        cdef bint in_use = False
        if not self._all_cqs_failed():
            return 0
        for dispatcher in self.dispatchers:
            for requests in (<CqDispatcher>dispatcher).users:
                if (<QpWorkState>requests).lost_cq_error is not None and (<QpWorkState>requests).srq is self:
                    if (<QpWorkState>requests).needs_reset:
                        return 0            # a reset is pending
                    in_use = True
        error = (<CqDispatcher>self.dispatchers[0]).broken_error()
        if in_use:
            return self._abandon_all_still_pinned(error)
        self._abandon(SUCCESS, error)
        return self._end_inboxes(error)

    cdef int _abandon_still_pinned(self, Operation operation, object error) except -1:
        # End an operation whose memory the device may still write, such as a receive of an XRC shared receive queue,
        # which queue pairs of other processes use as long as it exists. The memory stays pinned until `_abandon`.
        if self.still_pinned is None:
            self.still_pinned = []
        self.still_pinned += operation._take_pins() if not _is_ring(operation) else operation.extra.ring._take_pins()
        self._refuse_waiting(SUCCESS, error)
        return self._abandon_operation(operation, SUCCESS, error)

    cdef int _abandon_operation(self, Operation operation, int status, object error) except -1:
        # End an operation whose completion will not come.
        if operation.extra is not None:
            operation.extra.unsignaled = None
        if not operation.raises:
            operation.status = status
            if error is not None:
                operation._fail(error)
        return self._retire(operation) if not _is_ring(operation) else operation.extra.ring._abandon()


cdef enum:
    CHAIN = 64                          # maximum number of requests that are posted together


cdef list _no_elements = []             # never changed


cdef inline list _elements(Operation operation):
    # Return the operations of a batch; an empty list for a single request. This makes no object: a finalizer that ran
    # between the search for a place and `_occupy` could take the place.
    return operation.extra.elements if _is_batch(operation) else _no_elements


cdef inline bint _is_any_thread(WorkQueue queue) noexcept:
    # Whether any thread may use the objects that the queue belongs to: a completion queue or a shared receive queue
    # without an owner, and everything that is used with one, such as a queue pair whose other completion queue has an
    # owner. The thread that polls a completion notifies its waiter. All other objects are used by their owner's thread
    # alone.
    return queue.dispatcher.any_thread if queue.dispatcher is not None else queue.any_thread


cdef inline PyObject *_section(WorkQueue queue) noexcept:
    # Return the object whose section protects the queue; NULL if only its owner's thread uses the queue.
    return _section_of_all if FREE_THREADED and queue is not None and _is_any_thread(queue) else NULL


cdef int _join(list parts) except -1:
    # Note that the parts are used together from now on. If any thread may use one of them, any thread may use all of
    # them, and everything that is used with them. Parts with an owner have the same owner, whose thread calls this: no
    # other thread uses them.
    for part in parts:
        if (<CqDispatcher>part).any_thread if isinstance(part, CqDispatcher) else (<WorkQueue>part).any_thread:
            for each in parts:
                _make_any_thread(each)
            break
    return 0


cdef int _make_any_thread(object part) except -1:
    # Let any thread use the part and everything that is used with it.
    cdef CqDispatcher dispatcher
    cdef WorkQueue queue
    if isinstance(part, WorkQueue):
        queue = part
        if not queue.any_thread:
            queue.any_thread = True
            for each in queue._dispatchers():
                _make_any_thread(each)
        return 0
    dispatcher = part
    if not dispatcher.any_thread:
        dispatcher.any_thread = True
        for requests in dispatcher.users:
            for each in (<QpWorkState>requests)._parts():
                _make_any_thread(each)
    return 0


cdef int _wake(object waiter, WorkQueue queue) except -1:
    # Wake the awaiting task on its own loop.
    cdef Affinity owner = queue.handle.affinity
    bound = _is_bound(owner) and not _is_any_thread(queue)
    loop = owner.loop if bound else waiter.get_loop()
    try:
        if bound or loop is asyncio._get_running_loop():
            _set_done(waiter)
        else:
            loop.call_soon_threadsafe(_set_done, waiter)
    except RuntimeError:
        if not waiter.get_loop().is_closed():   # a closed loop runs no task that could wait
            raise
    return 0


cpdef _set_done(waiter):
    # Complete the future `waiter`, unless it is completed or cancelled.
    if not waiter.done():
        waiter.set_result(None)


cdef inline void _link_wrs(request *requests, Py_ssize_t count) noexcept:
    # Link requests that are posted together; only the last one completes, unless one fails.
    cdef Py_ssize_t at
    for at in range(count - 1):
        requests[at].send.next = &requests[at + 1].send
    requests[count - 1].send.next = NULL
    requests[count - 1].send.send_flags |= SIGNALED


cdef Py_ssize_t _index_of_bad_wr(request *requests, Py_ssize_t count, v.ibv_send_wr *bad) noexcept:
    # Return the index of the refused request; the index of the last request if the device does not report it.
    cdef Py_ssize_t at = 0
    while at < count - 1 and &requests[at].send != bad:
        at += 1
    return at


cdef object _received(Operation operation, v.ibv_wc *wc):
    # Return a new `Received` for the completion of a receive.
    cdef Received received = Received.__new__(Received)
    cdef uint32_t length = wc.byte_len
    received.local = operation.keepalive
    received.qp_num = wc.qp_num
    if operation.scratch >= 0:
        length -= GRH
        if wc.wc_flags & v.IBV_WC_GRH:
            received.route = (<char *>operation.queue._scratch_of(operation))[:GRH]
        received.src_qp = wc.src_qp
    received.byte_len = length
    received.written = wc.opcode == v.IBV_WC_RECV_RDMA_WITH_IMM
    if wc.wc_flags & v.IBV_WC_WITH_INV:
        received.invalidated_rkey = wc.imm_data
    elif wc.wc_flags & v.IBV_WC_WITH_IMM:
        received.immediate = v.ntohl(wc.imm_data)
    return received


@cython.final
cdef class AwaitedFrame:
    """Wait of a task for what a completion of a queue will bring, without awaiting an operation. From `begin` to `end`,
    the completions are polled in each turn of the loop, or the loop sleeps, as the message model says.

    :param queue: the queue.
    """

    cdef WorkQueue queue
    cdef bint counted

    def __init__(self, WorkQueue queue not None):
        self.queue = queue

    def begin(self):
        """Note that a task waits. Call `end` then, even if this raises."""
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            if not self.counted:
                self.counted = True     # before other code runs, which may raise
                self.queue._count_frame_awaited(1)
            self.queue._need_turns()
        finally:
            section_leave(&within)

    def end(self):
        """Note that no task waits any longer. Further calls do nothing."""
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            if self.counted:
                self.counted = False
                self.queue._count_frame_awaited(-1)
        finally:
            section_leave(&within)
