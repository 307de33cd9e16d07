# Part of work.pyx: taking completions, and waiting for them.

cdef enum model:
    SLEEPS                              # DEFAULT and HIGH_BANDWIDTH: polls once, then sleeps
    SPINS                               # LOW_LATENCY: polls for a while, then sleeps
    POLLS                               # FORCE_LOW_LATENCY: polls for a while, then in each turn of the loop


cdef inline bint _is_bound(Affinity owner) noexcept:
    return owner is not None and owner._thread != NULL


cdef bint _owner_gone(Handle handle) except -1:
    # Whether nobody is there any more whom it could be taken from.
    return handle.closed or (handle.affinity is not None and handle.affinity.orphaned)


@cython.final
cdef class CqDispatcher:
    """Takes what completes in a completion queue, and wakes those who wait for it.

    One routine waits, `_turn`. While completions come it is called in each turn of the home loop, and takes them
    without an event; in a turn that had none it arms the queue, looks once more, and the loop sleeps until the
    channel's descriptor wakes it. It runs as long as anything is under way, awaited or not: places come back and memory
    is unpinned without anybody's help.

    Whoever awaits looks for completions first, and spins, as the message model has it.

    In the child of a fork a loop of the parent's may run on, as `asyncio.run` lets it after a SystemExit: it calls what
    the parent asked it to call. Nothing is done there, since all of this is the parent's. Nor is the descriptor taken
    from that loop: what the kernel watches for it is one set for both processes.

    :param handle: the completion queue, with a channel.
    :param loop: the home loop, which the channel wakes.
    :param home: its affinity.
    :param model: 0 sleeps, 1 spins, 2 polls.
    :param spin_ns: how long an await may spin.
    """

    cdef readonly CompletionQueue handle
    cdef readonly object loop           # None: nobody watches the channel any more
    cdef readonly Affinity home
    cdef slots slots
    cdef int model
    cdef readonly uint64_t spin_ns
    cdef bint any_thread                # see `_is_any_thread`
    cdef bint turn_scheduled            # `_turn` will be called
    cdef uint64_t turn_number           # in which that was arranged
    cdef bint armed
    cdef int dispatching                # threads that tell of what they took: taken meanwhile, newer would overtake it
    cdef bint poll_skipped              # somebody looked meanwhile
    cdef uint32_t unacknowledged
    cdef readonly Py_ssize_t in_flight
    cdef Py_ssize_t awaited             # of these: somebody sleeps until they are done
    cdef list chained                   # queues with something to be posted at the end of the turn
    cdef list refused                   # operations that the verb then refused
    cdef list pending_transitions       # Requests that are to be moved to another state
    cdef list stalled                   # queues whose waiting operations found another thread inside
    cdef dict srqs                      # queue pair number -> its shared receive queue
    cdef set users                      # Requests of the queue pairs that complete here, until those are destroyed
    cdef set receivers                  # shared receive queues of its own, for XRC, until they are destroyed
    cdef object turn                    # the bound method
    cdef readonly object error          # that it broke by
    cdef bint device_removed            # the device is, as DEVICE_FATAL told
    cdef readonly uint64_t completions
    cdef readonly uint64_t late         # completions of what is not there any more
    cdef readonly uint64_t wakeups
    cdef readonly uint64_t spins
    cdef readonly uint64_t spins_paid

    def __init__(self, CompletionQueue handle not None, loop, Affinity home not None, int model, uint64_t spin_ns):
        self.handle = handle
        self.any_thread = not _is_bound(handle.affinity)
        self.loop = loop
        self.home = home
        self.model = model
        self.spin_ns = spin_ns
        self.chained = []
        self.refused = []
        self.pending_transitions = []
        self.stalled = []
        self.srqs = {}
        self.users = set()
        self.receivers = set()
        self.turn = self._turn

    def __cinit__(self, *_):
        slots_begin(&self.slots)

    def __dealloc__(self):
        slots_end(&self.slots)

    cdef PyObject *_section(self) noexcept:
        return _section_of_all if FREE_THREADED and self.any_thread else NULL

    # ---- Waiting

    cdef int _need_turn(self) except -1:
        # In whatever thread. An armed queue wakes its home by itself.
        if self.turn_scheduled or self.loop is None:
            return 0
        if not self.any_thread or self.home.owns():
            self.loop.call_soon(self.turn)
            self.turn_scheduled = True
            self.turn_number = turn_now.number
        elif not self.armed or self.chained or self.refused or self.pending_transitions or self.stalled:
            self.turn_scheduled = True  # before it does: home may run at once
            try:
                self.loop.call_soon_threadsafe(self.turn)
            except RuntimeError:
                self.turn_scheduled = False
                if not self.loop.is_closed():   # nobody watches any more: whoever posts or awaits is told
                    raise
        return 0

    def _turn(self):
        """At home, once in a turn of the loop."""
        cdef section within
        section_enter(&within, self._section())
        try:
            self._run_turn()
        finally:
            section_leave(&within)

    cdef int _run_turn(self) except -1:
        self.turn_scheduled = False
        if self.loop is None or self.handle._is_inherited():
            return 0
        turn_advance(self.turn_number)
        try:
            self._wait()
        except ConcurrentAccessError:   # a thread is inside of a domain that any may use: in a moment it is not
            self._need_turn()
        except VerbsError as error:
            self.broke(error)
        except BaseException:
            self._need_turn()           # others still wait
            raise
        return 0

    def readable(self):
        """At home: the channel has an event."""
        cdef section within
        section_enter(&within, self._section())
        try:
            self._read()
        finally:
            section_leave(&within)

    cdef int _read(self) except -1:
        if self.loop is None or self.handle._is_inherited():
            return 0
        self.wakeups += 1
        try:
            # One is all that an armed queue raises; were there more, the loop would come again. None where what woke
            # the loop was a peer of the software device, whose request it then did.
            if self.handle.channel.get_event() is None:
                self.wakeups -= 1
                return 0
            self.unacknowledged += 1
            self.armed = False
            self.acknowledge()
        except ConcurrentAccessError:
            return self._need_turn()
        except VerbsError as error:
            self.loop.remove_reader(self.handle.channel.fileno())   # what cannot be read stays readable
            self.broke(error)
            return 0
        return self._run_turn()

    def acknowledge(self):
        """Acknowledge the events that were taken."""
        if self.unacknowledged:
            self.handle.ack_events(self.unacknowledged)
            self.unacknowledged = 0

    cdef int _wait(self) except -1:
        cdef int found
        self._flush()
        found = self._drain(MAX_DRAIN)
        if not self.in_flight or self.error is not None:
            return 0
        if found or (self.model == POLLS and self.awaited):
            return self._need_turn()
        if not self.armed:
            # What completes from here on is an event; what did before is taken now.
            self._arm()
            if self._drain(MAX_DRAIN):
                return self._need_turn()
        return 0

    cdef int _arm(self) except -1:
        cdef int error
        self.handle._use("ibv_req_notify_cq")
        error = v.verbs_req_notify_cq(self.handle.pointer, 0)
        self.handle._unuse()
        self.handle._check("ibv_req_notify_cq", error)
        self.armed = True
        return 0

    cdef int _flush(self) except -1:
        cdef WorkQueue queue
        cdef Operation operation
        while self.chained:
            queue = self.chained.pop()
            queue._flush_chained()
        stalled, self.stalled = self.stalled, []
        for queue in stalled:
            queue._advance()
        while self.refused:
            operation = self.refused.pop()
            if operation.state != DONE:         # as where its queue pair was destroyed meanwhile
                operation.queue._retire(operation)
        return self._run_transitions()

    cdef int _run_transitions(self) except -1:
        while self.pending_transitions:
            requests = self.pending_transitions.pop()
            try:
                (<QpWorkState>requests)._run_transition()
            except ConcurrentAccessError:
                self.pending_transitions.append(requests)
                raise
        return 0

    cdef int _check(self) except -1:
        # Whether what is posted now would be heard of. A loop that owns the queue runs: its own call came here.
        if (
            self.error is not None
            or self.loop is None
            or self.home.loop is not self.loop
            or (self.handle.affinity is not self.home and self.home.orphaned)
        ):
            raise self.broken_error()
        return 0

    # ---- Looking

    cdef int _poll_for(self, Operation operation, bint spins) except -1:
        # Whoever awaits or asks. Whoever may not is told so, even where the answer is known.
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef int found
        if operation.state != POSTED and operation.state != WAITING:
            return _check_owner(self.handle)    # which may be destroyed: what was told stays told
        if self.dispatching:
            self.poll_skipped = True
            return _check_owner(self.handle)
        self.handle._use("ibv_poll_cq")
        found = self._poll(wcs)
        self.handle._unuse()
        if found < 0:
            return self._poll_failed(found)
        self._dispatch_all(wcs, found)
        if spins and operation.state == POSTED and self.model != SLEEPS:
            self._spin(operation)
        return 0

    cdef int _poll(self, v.ibv_wc *wcs) noexcept:
        # Whoever calls has passed the check. No more than what is under way is asked for: that the queue is empty then
        # need not be asked.
        cdef int found, wanted = POLL_BATCH
        if self.in_flight < POLL_BATCH:
            wanted = self.in_flight if self.in_flight > 0 else 1
        if self.handle._resizing:
            # Whoever resizes may hold the queue's lock while an allocator waits for the GIL.
            self.dispatching += 1
            with nogil:
                found = poll_take(self.handle.pointer, self.handle.extended_pointer, wanted, wcs)
            self.dispatching -= 1
            return found
        return poll_take(self.handle.pointer, self.handle.extended_pointer, wanted, wcs)

    cdef int _drain(self, int max_completions) except -1:
        # Until there is nothing, or so many were taken.
        if self.dispatching:
            self.poll_skipped = True
            return 0
        return self._drain_now(max_completions)

    cdef int _drain_now(self, int max_completions) except -1:
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef int total = 0, found
        while total < max_completions:
            self.handle._use("ibv_poll_cq")
            found = self._poll(wcs)
            self.handle._unuse()
            if found < 0:
                return self._poll_failed(found)
            self._dispatch_all(wcs, found)
            total += found
            if found < POLL_BATCH or not self.in_flight:
                break
        return total

    cdef int _spin(self, Operation operation) except -1:
        # Until it is done, or the turn's time for that is up. Beyond a moment without the GIL; where calls of several
        # threads must not overlap, only between two polls.
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef uint64_t began = turn_clock(), now = began, until, end
        cdef bint shared = self.handle.affinity is not None and self.handle.affinity._thread == NULL
        cdef bint unlocked
        cdef int found
        if turn_now.spun >= self.spin_ns:
            return 0
        until = began + self.spin_ns - turn_now.spun
        self.spins += 1
        while operation.state == POSTED and now < until:
            if self.dispatching:        # another thread: what is waited for may be among that
                self.poll_skipped = True
                with nogil:
                    pass
                now = turn_clock()
                continue
            end = min(until, now + (SLICE_NS if now - began >= MOMENT_NS else MOMENT_NS))
            self.handle._use("ibv_poll_cq")
            unlocked = now - began >= MOMENT_NS and not shared
            if unlocked:
                self.dispatching += 1
                with nogil:
                    found = poll_spin(self.handle.pointer, self.handle.extended_pointer, POLL_BATCH, wcs, end)
                self.dispatching -= 1
            else:
                found = poll_spin(self.handle.pointer, self.handle.extended_pointer, POLL_BATCH, wcs, now)
            self.handle._unuse()
            if found < 0:
                return self._poll_failed(found)
            self._dispatch_all(wcs, found)
            if now - began >= MOMENT_NS:
                PyErr_CheckSignals()
                if shared:
                    with nogil:
                        pass            # others' turn
            now = turn_clock()
        turn_now.spun += now - began
        if operation.state == DONE:
            self.spins_paid += 1
        return 0

    cdef int _poll_failed(self, int found) except -1:
        # The software device tells the error, others just fail.
        if -found == EBUSY and self.handle.context.software:
            self.handle._check("ibv_poll_cq", EBUSY)
        verb = "ibv_start_poll" if self.handle.extended_pointer != NULL else "ibv_poll_cq"
        self.broke(VerbsError(verb, -found if self.handle.context.software else EIO))
        return 0

    cdef int _dispatch_all(self, v.ibv_wc *wcs, int found) except -1:
        # Threads may overlap here, in any order: only when the last of them is through may somebody look again. Whoever
        # looked in vain meanwhile, home among them, is made up for then; also where nothing was found, for what came
        # after that look, and before home armed the queue, is no event.
        if found > 0:
            self.dispatching += 1
            try:
                if found == 1:
                    self._dispatch(wcs)
                else:
                    self._dispatch_many(wcs, found)
            finally:
                self.dispatching -= 1
                self._repeat_skipped_poll()
        else:
            self._repeat_skipped_poll()
        return 0

    cdef inline int _repeat_skipped_poll(self) except -1:
        if self.poll_skipped and self.dispatching == 0:
            self.poll_skipped = self.armed = False  # home is to come, whether there will be an event or not
            self._need_turn()
        return 0

    cdef int _dispatch_many(self, v.ibv_wc *wcs, int found) except -1:
        # They were taken and come no more: what is raised meanwhile, as by a signal's handler, keeps none of them back.
        cdef int i = 0
        raised = None
        while i < found:
            try:
                while i < found:
                    i += 1
                    self._dispatch(&wcs[i - 1])
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
        return 0

    cdef int _dispatch(self, v.ibv_wc *wc) except -1:
        cdef slots *table = &self.slots
        cdef WorkQueue queue
        cdef Operation operation
        cdef void *work
        self.completions += 1
        if wc.wr_id & SLOTS_SHARED:
            queue = self.srqs.get(wc.qp_num)
            table = queue.slots if queue is not None else NULL
        work = slots_find(table, wc.wr_id) if table != NULL else NULL
        if work == NULL:
            self.late += 1              # of what was destroyed meanwhile, or of who posts beside this
            return 0
        operation = <Operation>work
        return operation.queue._completed(operation, wc)

    # ---- Its end

    def drain(self):
        """Take all that has completed, even where that overtakes what is being told of: the queue ends."""
        cdef section within
        section_enter(&within, self._section())
        try:
            while self._drain_now(MAX_DRAIN) == MAX_DRAIN:
                pass
        finally:
            section_leave(&within)

    def broke(self, error, bint gone=False):
        """Nothing completes here any more, by this error: whoever waits is told.

        First the queue pairs that complete here are reset. Until then the device has the use of what they have under
        way, which stays pinned: a peer's next message would go to memory that is somebody else's by then.

        :param gone: so is the device (DEVICE_FATAL), which does nothing any more; it may be told after another error.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            self._break(error, gone)
        finally:
            section_leave(&within)

    cdef int _break(self, object error, bint gone) except -1:
        cdef Operation operation
        cdef uint32_t index
        if self.error is not None and (self.device_removed or not gone):
            return 0
        self.device_removed = gone
        if self.error is None:
            self.error = error
        for requests in tuple(self.users):
            (<QpWorkState>requests)._lose_cq(self)
        try:
            self._run_transitions()
        except ConcurrentAccessError:   # a thread is inside of a domain that any may use: in a moment it is not
            self._need_turn()
        for index in range(self.slots.size):
            if self.slots.at[index].work != NULL:
                operation = <Operation>self.slots.at[index].work
                if operation.queue.requests is None:
                    operation.queue._abandon_still_pinned(operation, self.broken_error())
        for queue in tuple(self.receivers):
            (<WorkQueue>queue)._end_inboxes(self.broken_error())
        return 0

    def broken_error(self):
        """The error for who asks something of it."""
        return _broken(f"{self.handle!r} is broken: {self.error or 'no loop watches it any more'}", self.error)

    @property
    def watched(self):
        """Whether a loop still takes what completes."""
        return (
            self.error is None and self.loop is not None and self.home.loop is self.loop and not self.home.orphaned
            and not self.handle._is_inherited()
        )

    def let_go(self):
        """At home, or where home is gone: wake up no more."""
        self.loop = None


cdef int _check_owner(Handle handle) except -1:
    cdef Affinity owner = handle.affinity
    if owner is not None and owner._thread != NULL:
        owner._enter(handle, "ibv_poll_cq")
        owner._leave()
    return 0


cdef enum:
    MOMENT_NS = 2000                    # of spinning with the GIL
    SLICE_NS = 100000                   # of spinning without: signals are looked for in between
