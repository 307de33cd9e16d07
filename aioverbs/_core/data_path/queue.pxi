# Part of work.pyx: the queues that work requests are posted to, and the order of those that wait for a place.

@cython.final
cdef class WorkQueue:
    """The send queue or the receive queue of a queue pair, or a shared receive queue: what is under way in it.

    It never has more under way than it has places, so that the device refuses nothing: what finds none waits, first
    come, first served, and is posted when others complete.
    """

    cdef readonly Handle handle         # QueuePair or SharedReceiveQueue
    cdef readonly CqDispatcher dispatcher   # that its requests complete at; None: of a shared receive queue
    cdef QpWorkState requests              # the queue pair's; None likewise
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
    cdef uint32_t most_bytes            # of a message
    cdef uint32_t used                  # places
    cdef uint32_t waiting               # requests that wait for one
    cdef Py_ssize_t awaited             # operations that somebody sleeps for
    cdef PyObject *first                # _Extra of the operations that wait, borrowed: who is dropped takes itself out
    cdef PyObject *last
    cdef finalizer_lock order           # of these
    cdef bint anybodys                  # of a shared receive queue: see `_is_anybodys`
    cdef list chain                     # operations to be posted together; None: there are none
    cdef request *links                 # their requests: room for CHAIN, or NULL
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
    cdef object inboxes                 # its, a weakref.WeakSet; None: it has none
    cdef list unended                   # memory of what was given up and the device may still write to: _Run; or None

    def __cinit__(self):
        slots_begin(&self.own_slots)
        finalizer_lock_begin(&self.order)

    def __dealloc__(self):
        slots_end(&self.own_slots)
        free(self.links)

    # ---- Looking

    @property
    def in_flight(self):
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
        if self.inboxes is None:
            self.inboxes = weakref.WeakSet()
        self.inboxes.add(inbox)
        return 0

    cdef int _end_inboxes(self, object error) except -1:
        # It takes no more receives, by that: whoever awaits messages is told.
        if self.inboxes is not None:
            for inbox in tuple(self.inboxes):
                (<Inbox>inbox)._broke(error)
        return 0

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
        cdef CqDispatcher dispatcher = self.dispatcher
        if dispatcher is not None:
            dispatcher._look(operation, spins)
            return 0
        _check_owner(self.handle)
        for each in self.completers:
            (<CqDispatcher>each)._look(operation, spins)
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
        if self.dispatcher is not None:
            self.dispatcher.awaited += change
            return 0
        for each in self.completers:
            (<CqDispatcher>each).awaited += change
        return 0

    cdef int _count_under_way(self, int change) except -1:
        if self.dispatcher is not None:
            self.dispatcher.in_flight += change
            return 0
        for each in self.completers:
            (<CqDispatcher>each).in_flight += change
        return 0

    cdef int _need_turns(self) except -1:
        if self.dispatcher is not None:
            return 0 if self.dispatcher.turn_comes else self.dispatcher._need_turn()
        for each in self._completers():
            (<CqDispatcher>each)._need_turn()
        return 0

    cdef tuple _completers(self):
        return (self.dispatcher,) if self.dispatcher is not None else tuple(self.completers)

    # ---- Beginning

    cdef int _submit(self, Operation operation, request *made, bint nowait) except -1:
        # Whoever calls has passed the check for `ibv_post_send` or the like, and leaves it afterwards.
        if self.closing:
            raise ClosedResourceError(f"{self.handle!r} is closed, or about to be")
        if self.dispatcher is not None:
            self.dispatcher._check()
        elif self._is_deaf():
            raise (<CqDispatcher>self.completers[0]).broken_by()
        if operation.requests > self.limit:
            raise ValueError(
                f"{operation.requests} requests do not fit into the {self.limit} places of {self.handle!r}: "
                "post fewer at once, or make it with more"
            )
        if operation.scratch != UNUSED and self.scratch is None:
            self._make_scratch()            # which may let another thread run: places are looked for afterwards
        if self.first != NULL or self.used + operation.requests > self.limit:
            if nowait:
                raise WouldBlock
            return self._wait(operation, made)
        return self._begin(operation, made)

    cdef bint _is_deaf(self) except -1:
        # Of a shared receive queue: whether all that it completes at are broken.
        for each in self.completers:
            if (<CqDispatcher>each).error is None:
                return False
        return len(self.completers) > 0

    cdef int _wait(self, Operation operation, request *made) except -1:
        cdef _Extra extra = _extra(operation)
        if extra.requests == NULL:
            extra.requests = request_grow(NULL, 0, 1)
            if extra.requests == NULL:
                raise MemoryError
            request_move(extra.requests, made)
        extra.weak = weak_reference(operation)
        extra.pinned = operation._all_pins()
        extra.places = operation.requests
        extra.queue = self
        operation.state = WAITING
        self._link(<PyObject *>extra)
        if not self.used:               # there is a place: those before it are being dropped
            self._stall()
        return self._need_turns()

    cdef void _link(self, PyObject *extra) noexcept:
        finalizer_lock_take(&self.order)
        (<_Extra>extra).earlier = self.last
        (<_Extra>extra).later = NULL
        if self.last != NULL:
            (<_Extra>self.last).later = extra
        else:
            self.first = extra
        self.last = extra
        self.waiting += (<_Extra>extra).places
        finalizer_lock_give(&self.order)

    cdef void _unlink(self, PyObject *extra) noexcept:
        # Whoever calls has `order`.
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
        # It is being freed, in whatever thread.
        finalizer_lock_take(&self.order)
        self._unlink(<PyObject *>extra)
        finalizer_lock_give(&self.order)

    cdef bint _fits(self) noexcept:
        # Whether there is a place for the first one.
        cdef bint fits
        finalizer_lock_take(&self.order)
        fits = self.first != NULL and self.used + (<_Extra>self.first).places <= self.limit
        finalizer_lock_give(&self.order)
        return fits

    cdef Operation _take_first(self, uint32_t room):
        # It waits no more; None: there is none that needs no more room.
        cdef Operation operation
        cdef PyObject *at
        cdef PyObject *found = NULL
        finalizer_lock_take(&self.order)
        at = self.first
        while at != NULL and (<_Extra>at).places <= room:
            found = still_there(<PyObject *>(<_Extra>at).weak, (<_Extra>at).operation)
            if found != NULL:
                self._unlink(at)
                break
            at = (<_Extra>at).later
        finalizer_lock_give(&self.order)
        if found == NULL:
            return None
        operation = <Operation>found
        Py_DECREF(operation)            # which `found` was
        operation.extra.queue = operation.extra.pinned = operation.extra.weak = None
        operation.state = NEW
        return operation

    cdef int _begin(self, Operation operation, request *made) except -1:
        # There is a place.
        cdef int error
        if operation.scratch != UNUSED:
            self._take_all_scratch(operation, made)
        self._place(operation)
        made.send.wr_id = operation.number
        if self.chains and not _is_batch(operation) and not _binds(operation):
            return self._chain(operation, made)
        if self.chain is not None:
            self._flush()               # in the order of the calls
        operation.state = POSTED        # before the verb: it may be done when that returns
        error = self._call(operation, made)
        if error:
            return self._take_back(operation, error)
        self.posted += operation.requests
        self.bytes += operation.bytes
        self.doorbells += 1
        return 0

    cdef int _take_back(self, Operation operation, int error) except -1:
        # The verb refused it.
        operation.state = NEW
        self._displace(operation)
        if operation.raises:
            raise operation.value
        self.handle._check("ibv_post_recv" if self.receives else "ibv_post_send", error)
        return 0

    cdef int _chain(self, Operation operation, request *made) except -1:
        if self.links == NULL:
            self.links = request_grow(NULL, 0, CHAIN)
            if self.links == NULL:
                self._displace(operation)
                raise MemoryError
        if self.chain is None:
            self.chain = []
            self.dispatcher.chained.append(self)
        request_move(&self.links[len(self.chain)], made)
        self.chain.append(operation)
        operation.state = CHAINED
        self.posted += 1
        self.bytes += operation.bytes
        if len(self.chain) >= CHAIN:
            self._flush()
        else:
            self.dispatcher._need_turn()
        return 0

    cdef int _flush(self) except -1:
        # Post what was chained, with one doorbell; the last one completes for all of them. Whoever calls has passed the
        # check. Of one that is refused the others know nothing: those after it are posted again, and tell of those
        # before it.
        cdef list chain = self.chain
        cdef request *requests = self.links
        if chain is None:
            return 0
        self.chain, self.links = None, NULL   # others may begin another one meanwhile
        try:
            self._post_chains(chain, requests)
        finally:
            if self.links == NULL:
                self.links = requests
            else:
                free(requests)
        return 0

    cdef int _post_chains(self, list chain, request *requests) except -1:
        cdef list before = []           # posted without a completion
        cdef Operation refused
        cdef Py_ssize_t taken
        cdef int error
        while chain:
            error = self._post_chain(before, chain, requests, &taken)
            if not error:
                break
            before += chain[:taken]
            refused = chain[taken]
            refused._fail(VerbsError("ibv_post_send", abs(error)))
            self.dispatcher.refused.append(refused)
            self.dispatcher._need_turn()
            chain = chain[taken + 1:]
            requests += taken + 1
            if before and not chain:
                self.requests._lose(refused.value)  # nothing tells of those that were taken
        return 0

    cdef int _post_chain(self, list before, list chain, request *requests, Py_ssize_t *taken) except? -1:
        # 0, or what the verb answered, and how many it took.
        cdef Operation last = chain[len(chain) - 1]
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_qp *qp = (<QueuePair>self.handle).pointer
        cdef uint64_t bytes = 0
        cdef int error
        for each in chain:
            (<Operation>each).state = POSTED    # before the verb: it may be done when that returns
            bytes += (<Operation>each).bytes
        _link(requests, len(chain))
        if before or len(chain) > 1:
            _extra(last).covers = before + chain[:len(chain) - 1]
        self.doorbells += 1
        if bytes >= RELEASE_GIL_BYTES:
            with nogil:
                error = v.verbs_post_send(qp, &requests.send, &bad)
        else:
            error = v.verbs_post_send(qp, &requests.send, &bad)
        if error:
            taken[0] = _refused(requests, len(chain), bad)
            if last.extra is not None:
                last.extra.covers = None
        return error

    cdef int _place(self, Operation operation) except -1:
        operation.number = slots_take(self.slots, <void *>operation, self.kind)
        if not operation.number:
            if operation.scratch != UNUSED:
                self._give_scratch(operation)
            raise MemoryError("no slot for one more request")
        Py_INCREF(operation)            # the slot's
        self.used += operation.requests
        if self.used > self.high_water:
            self.high_water = self.used
        self._count_under_way(operation.requests)
        return self._need_turns()

    cdef int _displace(self, Operation operation) except -1:
        # It has its place no more.
        slots_give(self.slots, operation.number)
        if operation.scratch != UNUSED:
            self._give_scratch(operation)
        self.used -= operation.requests
        self._count_under_way(-<int>operation.requests)
        Py_DECREF(operation)
        return 0

    cdef int _call(self, Operation operation, request *made) noexcept:
        # The verb; 0 or what it answered. Whoever calls has passed the check.
        cdef v.ibv_send_wr *bad = NULL
        cdef v.ibv_recv_wr *bad_receive = NULL
        cdef v.ibv_qp *qp
        cdef int error
        if self.receives:
            if self.requests is not None:
                error = v.verbs_post_recv((<QueuePair>self.handle).pointer, &made.receive, &bad_receive)
            else:
                error = v.verbs_post_srq_recv((<SharedReceiveQueue>self.handle).pointer, &made.receive, &bad_receive)
        elif _binds(operation):
            error = self._bind(operation, made)
        else:
            if _is_batch(operation):
                _number_elements(operation)
            _link(made, operation.requests)
            qp = (<QueuePair>self.handle).pointer
            if operation.bytes >= RELEASE_GIL_BYTES:
                with nogil:
                    error = v.verbs_post_send(qp, &made.send, &bad)
            else:
                error = v.verbs_post_send(qp, &made.send, &bad)
            if error and _is_batch(operation) and bad != &made.send:
                return _torn(operation, made, bad, error)
        return error

    cdef int _bind(self, Operation operation, request *made) noexcept:
        # The window's new key is good when the request has completed.
        cdef _Extra extra = operation.extra
        cdef MemoryWindow window = extra.window
        cdef MemoryRegion region = operation.keep
        cdef int error
        try:
            if window.context is not self.handle.context:
                raise ValueError(f"{window!r} is of another context than {self.handle!r}")
            window._enter()
            try:
                region._enter()
                try:
                    extra.bind_info.mr = region.pointer
                    error = self._call_bind(window, &extra.bind_info, made)
                finally:
                    region._leave()
            finally:
                window._leave()
            if not error:
                operation.value = RemoteRegion(extra.bind_info.addr, extra.bind_info.length, window.pointer.rkey)
        except Exception as raised:     # the window is closed, or of another context
            operation._fail(raised)
            return EINVAL
        return error

    cdef int _call_bind(self, MemoryWindow window, v.ibv_mw_bind_info *bind_info, request *made) except? -1:
        cdef v.ibv_qp *qp = (<QueuePair>self.handle).pointer
        cdef v.ibv_mw_bind bind
        cdef v.ibv_send_wr *bad = NULL
        cdef uint32_t key = window.pointer.rkey
        cdef int error
        made.send.send_flags |= SIGNALED
        if window.mw_type == <int>v.IBV_MW_TYPE_1:          # it has a verb of its own, and the device chooses the key
            memset(&bind, 0, sizeof(bind))
            bind.wr_id = made.send.wr_id
            bind.send_flags = made.send.send_flags
            bind.bind_info = bind_info[0]
            return v.verbs_bind_mw(qp, window.pointer, &bind)
        key = (key & 0xffffff00) | ((key + 1) & 0xff)       # the low byte is its owner's to choose
        made.send.bind_mw.mw = window.pointer
        made.send.bind_mw.rkey = key
        made.send.bind_mw.bind_info = bind_info[0]
        error = v.verbs_post_send(qp, &made.send, &bad)
        if not error:
            window.pointer.rkey = key   # providers leave this to their callers
        return error

    cdef int _take_all_scratch(self, Operation operation, request *made) except -1:
        cdef Py_ssize_t at = 0
        try:
            if operation.scratch == WANTED:
                self._take_scratch(operation, made)
            for each in _elements(operation):
                if (<Operation>each).scratch == WANTED:
                    self._take_scratch(<Operation>each, &made[at])
                at += 1
        except BaseException:
            self._give_scratch(operation)
            raise
        return 0

    cdef int _make_scratch(self) except -1:
        made = self.make_scratch(self.limit * self.scratch_bytes)
        if self.scratch is None:            # no other thread was faster
            self.scratch = made
            self.free_scratch = list(range(self.limit))
        return 0

    cdef int _take_scratch(self, Operation operation, request *made) except -1:
        # A piece of memory of its own, for what the device writes beside the caller's memory.
        cdef uint32_t place = self.free_scratch.pop()
        operation.scratch = place
        made.send.sg_list[0].addr = self._scratch_of(operation)
        made.send.sg_list[0].length = self.scratch_bytes
        made.send.sg_list[0].lkey = self.scratch._lkey
        return 0

    cdef uint64_t _scratch_of(self, Operation operation) noexcept:
        return self.scratch._address + <uint64_t>operation.scratch * self.scratch_bytes

    cdef int _give_scratch(self, Operation operation) except -1:
        if operation.scratch >= 0:
            self.free_scratch.append(operation.scratch)
            operation.scratch = WANTED
        for each in _elements(operation):
            self._give_scratch(<Operation>each)
        return 0

    # ---- Ending

    cdef int _completed(self, Operation operation, v.ibv_wc *wc) except -1:
        cdef list covers
        if operation.extra is None or operation.extra.covers is None:
            return self._ended(operation, wc)
        covers, operation.extra.covers = operation.extra.covers, None
        try:
            self._cover(covers)
        finally:
            self._ended(operation, wc)
        return 0

    cdef int _ended(self, Operation operation, v.ibv_wc *wc) except -1:
        if _is_batch(operation):
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

    cdef int _cover(self, list before) except -1:
        # What was posted without completions of its own is done: a queue completes in order, and what is flushed has a
        # completion, whatever it asked for.
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
        byte_write(&operation.state, DONE)
        slots_give(self.slots, operation.number)
        self.used -= requests
        self.completed += requests
        if _is_batch(operation):
            _end_elements(operation)
        if operation.scratch != UNUSED:
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
        if operation.waiter is None and operation.extra is None:
            operation.keep = None
            return operation._unpin()
        waiter = operation.waiter
        if waiter is not None:
            self._count_awaited(-1)
        local, operation.keep = operation.keep, None
        try:
            for each in _elements(operation):
                (<Operation>each).keep = None
            operation._unpin()
        finally:
            try:
                if operation.extra is not None and operation.extra.inbox is not None:
                    operation.extra.inbox._arrived(operation, local)
            finally:
                if waiter is not None:
                    _wake(waiter, self)
        return 0

    cdef int _advance(self) except -1:
        # Places came back: those that wait get them, in their order.
        cdef Operation operation
        while self._fits():
            refused = None
            try:
                self._enter()
            except ConcurrentAccessError:   # a thread is inside of a domain that any may use: in a moment it is not
                return self._stall()
            except BusyResourceError:       # another thread changes its state: when that is over
                return self._stall_until_resumed()
            except AffinityError:           # of a completion queue that is anybody's, where another loop took this
                return self._call_at_owner(self.advance)
            except Exception as error:
                refused = error
            operation = self._take_first(self.limit - self.used)
            if operation is None:           # dropped meanwhile
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
                self._end(operation)
            self._unhold(operation)
        return 0

    cdef int _stall(self) except -1:
        for each in self._completers():
            (<CqDispatcher>each).stalled.append(self)
            (<CqDispatcher>each)._need_turn()
            break
        return 0

    cdef int _stall_until_resumed(self) except -1:
        if self.requests is None:       # a shared receive queue's is never changed
            return self._stall()
        if self.dispatcher.loop is not None:
            self.when_resumed(self.dispatcher.loop, self.resume)
        return 0

    cdef int _call_at_owner(self, callback) except -1:
        # Not where that loop runs in another thread than the owner's: it would be called there again and again.
        loop = self.handle.affinity.loop
        if loop is asyncio._get_running_loop():
            return 0
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:            # it is closed: what waits ends with the queue
            pass
        return 0

    def advance(self):
        """On its owner's loop: those that wait get the places that came back in another one's."""
        cdef section within
        section_enter(&within, _section(self))
        try:
            self._advance()
        finally:
            section_leave(&within)

    def flush(self):
        """On its owner's loop: post what was chained, which its completion queue's loop may not do."""
        cdef section within
        section_enter(&within, _section(self))
        try:
            self._flush_by_completer()
        except ConcurrentAccessError:   # a thread is inside of a domain that any may use: in a moment it is not
            self.dispatcher._need_turn()
        finally:
            section_leave(&within)

    cdef int _flush_by_completer(self) except -1:
        # Or by the owner, if that is another one. It is not among `chained` any more, and nobody else has it posted
        # until it is there again.
        if self.chain is None:          # it was posted, or will never be
            return 0
        try:
            self._enter()
        except AffinityError:           # of a completion queue that is anybody's
            return self._call_at_owner(self.flush)
        except BusyResourceError:       # another thread changes its state: when that is over
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

    def when_resumed(self, loop, callback):
        """Of a queue pair's: have a loop call this when the change of its state that kept others off may be over."""
        (<QueuePair>self.handle)._when_resumed(loop, callback)

    def resume(self):
        """At home: those that wait get the places that came back meanwhile."""
        self._stall()

    cdef int _enter(self) except -1:
        self.handle._use("ibv_post_recv" if self.receives else "ibv_post_send")
        return 0

    cdef int _end(self, Operation operation) except -1:
        # It never had a place.
        for each in _elements(operation):
            (<Operation>each).status = operation.status
        byte_write(&operation.state, DONE)
        if _is_batch(operation):
            _end_elements(operation)
        return self._tell(operation)

    cdef int _refuse_waiting(self, int status, object error) except -1:
        # Nothing is posted here any more.
        cdef Operation operation
        while True:
            operation = self._take_first(0xFFFFFFFF)
            if operation is None:
                return 0
            operation.status = status
            if error is not None:
                operation._fail(error)
            self._end(operation)
            self._unhold(operation)

    cdef int _unchain(self) noexcept:
        # What was to be posted together is not.
        self.chain = None
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
                self._give_up(operation, status, error)
        if self.unended is not None:
            unended, self.unended = self.unended, None
            _discard_runs(unended, self.receives)
        return 0

    cdef int _abandon_unended(self, object error) except -1:
        # Whoever waits is told. The device may still write to the memory, which stays pinned until `_abandon`.
        cdef Operation operation
        cdef uint32_t index
        for index in range(self.slots.size):
            if self.slots.at[index].work != NULL:
                operation = <Operation>self.slots.at[index].work
                if operation.queue is self:
                    self._give_up_unended(operation, error)
        return self._end_inboxes(error)

    cdef int _end_if_deaf(self) except -1:
        # Of a shared receive queue: whoever waits is told where nothing completes any more, when all queue pairs that
        # took from it are reset. As long as one is there that cannot be, the device has the use of its memory.
        cdef bint in_use = False
        if not self._is_deaf():
            return 0
        for dispatcher in self.completers:
            for requests in (<CqDispatcher>dispatcher).users:
                if (<QpWorkState>requests).all_cqs_failed is not None and (<QpWorkState>requests).shared is self:
                    if (<QpWorkState>requests).needs_reset:
                        return 0            # it is to be reset
                    in_use = True
        error = (<CqDispatcher>self.completers[0]).broken_by()
        if in_use:
            return self._abandon_unended(error)
        self._abandon(SUCCESS, error)
        return self._end_inboxes(error)

    cdef int _give_up_unended(self, Operation operation, object error) except -1:
        # As of a shared receive queue for XRC, which queue pairs of other processes may take from as long as it is
        # there: its memory stays pinned until then.
        if self.unended is None:
            self.unended = []
        self.unended += operation._take_pins()
        self._refuse_waiting(SUCCESS, error)
        return self._give_up(operation, SUCCESS, error)

    cdef int _give_up(self, Operation operation, int status, object error) except -1:
        # Its completion comes no more.
        if operation.extra is not None:
            operation.extra.covers = None
        if not operation.raises:
            operation.status = status
            if error is not None:
                operation._fail(error)
        return self._retire(operation)


cdef enum:
    CHAIN = 64                          # requests are posted together at most


cdef inline list _elements(Operation operation):
    return operation.extra.elements if _is_batch(operation) else []


cdef inline bint _is_anybodys(WorkQueue queue) noexcept:
    # Whether any thread may be at what the queue is a part of. That is so of a completion queue or a shared receive
    # queue without an owner, and of all that is used with it, as by a queue pair whose other completion queue has one:
    # what completes is told of in whatever thread takes it. All else is touched by its owner's thread alone.
    return queue.dispatcher.anybodys if queue.dispatcher is not None else queue.anybodys


cdef inline PyObject *_section(WorkQueue queue) noexcept:
    return _section_of_all if FREE_THREADED and queue is not None and _is_anybodys(queue) else NULL


cdef int _join(list parts) except -1:
    # They are used together from here on: where one of them is anybody's, all are, and what they were used with before.
    # Those that have an owner have one and the same, whose thread this is: nobody else is at them yet.
    for part in parts:
        if (<CqDispatcher>part).anybodys if isinstance(part, CqDispatcher) else (<WorkQueue>part).anybodys:
            for each in parts:
                _make_anybodys(each)
            break
    return 0


cdef int _make_anybodys(object part) except -1:
    cdef CqDispatcher dispatcher
    cdef WorkQueue queue
    if isinstance(part, WorkQueue):
        queue = part
        if not queue.anybodys:
            queue.anybodys = True
            for each in queue._completers():
                _make_anybodys(each)
        return 0
    dispatcher = part
    if not dispatcher.anybodys:
        dispatcher.anybodys = True
        for requests in dispatcher.users:
            for each in (<QpWorkState>requests)._parts():
                _make_anybodys(each)
    return 0


cdef int _wake(object waiter, WorkQueue queue) except -1:
    # Whoever awaits goes on, on its own loop.
    cdef Affinity owner = queue.handle.affinity
    bound = _is_bound(owner) and not _is_anybodys(queue)
    loop = owner.loop if bound else waiter.get_loop()
    try:
        if bound or loop is asyncio._get_running_loop():
            _set_done(waiter)
        else:
            loop.call_soon_threadsafe(_set_done, waiter)
    except RuntimeError:
        if not waiter.get_loop().is_closed():   # then nobody waits any more
            raise
    return 0


cpdef _set_done(waiter):
    if not waiter.done():
        waiter.set_result(None)


cdef inline void _link(request *requests, Py_ssize_t count) noexcept:
    # What is posted together; only the last one completes, unless one fails.
    cdef Py_ssize_t at
    for at in range(count - 1):
        requests[at].send.next = &requests[at + 1].send
    requests[count - 1].send.next = NULL
    requests[count - 1].send.send_flags |= SIGNALED


cdef Py_ssize_t _refused(request *requests, Py_ssize_t count, v.ibv_send_wr *bad) noexcept:
    # Which one that is: of a device that does not say, the last one.
    cdef Py_ssize_t at = 0
    while at < count - 1 and &requests[at].send != bad:
        at += 1
    return at


cdef object _received(Operation operation, v.ibv_wc *wc):
    cdef Received received = Received.__new__(Received)
    cdef uint32_t length = wc.byte_len
    received.local = operation.keep
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
