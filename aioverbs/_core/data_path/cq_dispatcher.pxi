# Part of data_path.pyx: polling completion queues, and waiting for completions.

cdef enum model:
    SLEEPS                              # HIGH_BANDWIDTH: poll once, then sleep
    SPINS                               # LOW_LATENCY: poll for some time, then sleep
    POLLS                               # FORCE_LOW_LATENCY: poll for some time, then in each turn of the loop
    ADAPTS                              # DEFAULT: poll in each turn of the loop for as long as that pays, then sleep

cdef enum wait:
    NO_WAIT                             # no task awaits an operation
    WAIT_ENDED                          # no task awaits an operation, but one was woken that polls, and may await more
    WAIT_ASLEEP                         # sleeps, and did not poll before
    WAIT_POLLED                         # sleeps, after polling in vain
    WAIT_BEGUN                          # whether to poll is not decided yet
    WAIT_SPUN                           # the same, but the task spun before it suspended
    WAIT_POLLING

cdef uint64_t PROCESSORS_NS = 10**9     # interval at which processors are counted again, at the earliest


cdef inline bint _is_bound(Affinity owner) noexcept:
    # Whether one thread and event loop own the object with this affinity, which may be None.
    return owner is not None and owner._thread != NULL


cdef bint _owner_gone(Handle handle) except -1:
    # Whether there is no owner left to be disturbed: the handle is closed, or the owner's loop or thread has ended.
    return handle.closed or (handle.affinity is not None and handle.affinity.orphaned)


@cython.final
cdef class CqDispatcher:
    """Dispatcher of the completions of one completion queue: polls it and wakes the tasks that await operations. Made
    by a `CompletionQueue` of the layer above when it opens.

    The home loop is the event loop that watches the completion channel. The method `_turn` runs there. While
    completions arrive, `_turn` runs in every turn of the loop and polls without an event. After a turn without
    completions `_turn` arms the queue (``ibv_req_notify_cq``), polls once more, and the loop sleeps until the channel's
    descriptor is readable. This continues as long as requests are in flight, awaited or not, so that their places and
    pins are released:

        completions found        -> run again in the next turn
        none found, polling      -> run again in the next turn
        none found, not armed    -> arm, poll once more
        none found, armed        -> sleep until the channel is readable

    A task that awaits an operation first polls by itself, and spins (polls for some time) if the message model says so.

    If the message model adapts, `_turn` polls in every turn while a task awaits an operation, for as long as the waits
    before it show that this pays (``spin_estimate.h``), which it does not while the loop always has other tasks to run.
    While the loop has nothing else to do, `_turn` also spins for a moment, and so does a task that is the only one to
    await an operation, for so short a time that it matters little if something comes up meanwhile.

    A wait begins when a task suspends for an operation, and ends with the completion of an operation that a task is
    suspended for; if further tasks are suspended then, the next wait begins. A wait also ends, for as long as it took,
    when another task suspends for an operation, which begins the next wait, and when the last task is cancelled.

    In the child of a fork, a loop of the parent may continue to run (`asyncio.run` allows that after a SystemExit) and
    call what the parent scheduled. The dispatcher does nothing there: the objects are the parent's. The dispatcher does
    not remove the descriptor from the loop either, since parent and child share one epoll set.

    :param handle: the completion queue, with a completion channel.
    :param loop: the home loop, which watches the channel.
    :param home: affinity of the home loop.
    :param model: message model: 0 sleeps, 1 spins, 2 polls, 3 adapts; see the enumeration above.
    :param spin_ns: time in nanoseconds that awaits may spin in one turn of the loop, if the model spins or polls.
    :param processors: callable that counts the processors that the calling thread may use; called at once and then at
        most once per second, on the home loop, if the model adapts.
    """

    cdef readonly CompletionQueue handle
    cdef readonly object loop           # home loop; None if no loop watches the channel any longer
    cdef readonly Affinity home
    cdef slots slots
    cdef int model
    cdef readonly uint64_t spin_ns
    cdef bint any_thread                # see `_is_any_thread`
    cdef bint turn_scheduled            # whether `_turn` is scheduled
    cdef bint turn_needed               # whether it is to be scheduled at the end of a dispatch
    cdef uint64_t turn_number           # number of the turn in which it was scheduled
    cdef bint armed
    cdef readonly int dispatching       # number of threads inside a dispatch: newer completions must not overtake
    cdef bint poll_skipped              # whether a poll was skipped during a dispatch
    cdef uint32_t unacknowledged
    cdef readonly Py_ssize_t in_flight
    cdef Py_ssize_t awaited             # number of operations in flight, and of frames, that a task is suspended for
    cdef list chained                   # work queues with requests to post at the end of the turn
    cdef list refused                   # operations of these that the verb refused
    cdef list pending_transitions       # QpWorkStates to move to another state
    cdef list stalled                   # work queues whose waiting operations met another thread inside a verb
    cdef dict srqs                      # queue pair number -> WorkQueue of its shared receive queue
    cdef set users                      # QpWorkStates that complete here, until their queue pairs are destroyed
    cdef set receivers                  # XRC shared receive queues that complete here, until they are destroyed
    cdef object turn                    # the bound method `_turn`
    cdef readonly object error          # error of the completion queue
    cdef bint device_removed            # whether DEVICE_FATAL reported the device lost
    cdef readonly uint64_t completions
    cdef readonly uint64_t late         # completions of objects that no longer exist
    cdef readonly uint64_t wakeups
    cdef readonly uint64_t spins
    cdef readonly uint64_t spins_paid
    cdef int wait                       # if the model adapts: how the wait in progress waits
    cdef uint64_t wait_began
    cdef uint64_t spin_until            # time at which the wait in progress begins to sleep, while it polls in turns
    cdef uint64_t spun                  # time for which the task spun that is about to suspend
    cdef uint64_t sleeps                # `thread_sleeps` when the wait in progress went asleep
    cdef uint64_t left_at               # time at which the wait in progress last left the loop to others
    cdef uint64_t left_in               # number of the turn in which that was
    cdef bint quiet                     # whether the loop seems to have had nothing else to do since then
    cdef spin_estimate estimate
    cdef object count_processors
    cdef uint32_t processors            # number of processors that the thread of the home loop may use
    cdef uint64_t processors_due        # time at which to count them again

    def __init__(
        self,
        CompletionQueue handle not None,
        loop,
        Affinity home not None,
        int model,
        uint64_t spin_ns,
        processors not None,
    ):
        self.handle = handle
        self.any_thread = not _is_bound(handle.affinity)
        self.loop = loop
        self.home = home
        self.model = model
        self.spin_ns = spin_ns
        self.count_processors = processors
        if model == ADAPTS:
            self._count_processors()    # before a wait: this may read files
        spin_estimate_begin(&self.estimate)
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
        # Return the object whose section protects this one; NULL if only the owner's thread uses this one.
        return _section_of_all if FREE_THREADED and self.any_thread else NULL

    # ---- Waiting

    cdef int _need_turn(self) except -1:
        # Schedule `_turn` on the home loop, unless it is already scheduled. Can be called from any thread. An armed
        # queue wakes its home loop through an event. A dispatch that posts, as one that refills receives does, has
        # `_turn` scheduled behind the tasks that it wakes: their posts need no further turn, and the peer hears of all
        # at once.
        if self.turn_scheduled or self.loop is None:
            return 0
        if self.dispatching and not self.any_thread:
            self.turn_needed = True
            return 0
        if not self.any_thread or self.home.owns():
            self.loop.call_soon(self.turn)
            self.turn_scheduled = True
            self.turn_number = turn_now.number
        elif not self.armed or self.chained or self.refused or self.pending_transitions or self.stalled:
            self.turn_scheduled = True  # before the call: the home loop may run at once
            try:
                self.loop.call_soon_threadsafe(self.turn)
            except RuntimeError:
                self.turn_scheduled = False
                if not self.loop.is_closed():   # no loop watches the queue: posting and awaiting raise
                    raise
        return 0

    def _turn(self):
        """Poll for completions and dispatch them, which wakes the tasks that await them. If more work may follow,
        schedule the next call. If a verb fails, its error is not raised, but breaks the queue as described for `broke`.
        This runs on the home loop, at most once in each of that loop's turns."""
        cdef section within
        section_enter(&within, self._section())
        try:
            self.turn_scheduled = False
            self._run_turn()
        finally:
            section_leave(&within)

    cdef int _run_turn(self) except -1:
        # Do the work of `_turn` in the section. A VerbsError is not raised, but breaks the queue.
        if self.loop is None or self.handle._is_inherited():
            return 0
        turn_advance(self.turn_number)
        try:
            self._wait()
        except ConcurrentAccessError:   # a thread is inside the thread domain, for a short time
            self._need_turn()
        except VerbsError as error:
            self.broke(error)
        except BaseException:
            self._need_turn()           # other tasks still wait
            raise
        return 0

    def readable(self):
        """Take an event from the completion channel, then poll for completions and dispatch them.

        The home loop calls this when the channel is readable. If a verb fails, its error is not raised, but breaks the
        queue as described for `broke`.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            self._read()
        finally:
            section_leave(&within)

    cdef int _read(self) except -1:
        # Do the work of `readable` in the section.
        if self.loop is None or self.handle._is_inherited():
            return 0
        self.wakeups += 1
        try:
            # An armed queue raises a single event; for further events the loop would call again. There is no event if a
            # peer of the software device woke the loop to have the peer's request executed.
            if self.handle.channel.get_event() is None:
                self.wakeups -= 1
                return 0
            self.unacknowledged += 1
            self.armed = False
            self.acknowledge()
        except ConcurrentAccessError:
            return self._need_turn()
        except VerbsError as error:
            self.loop.remove_reader(self.handle.channel.fileno())   # it stays readable
            self.broke(error)
            return 0
        return self._run_turn()

    def acknowledge(self):
        """Acknowledge the events that were taken and not yet acknowledged (``ibv_ack_cq_events``), if there are any.

        :raises AffinityError: there are such events, but the caller is not on the thread and event loop that own the
            queue.
        :raises ClosedResourceError: there are such events, but the queue is destroyed.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        """
        if self.unacknowledged:
            self.handle.ack_events(self.unacknowledged)
            self.unacknowledged = 0

    cdef int _wait(self) except -1:
        # Post waiting requests, dispatch completions, and make sure that the next completion is found: arm the queue,
        # or schedule another turn.
        cdef int found
        if self.wait >= WAIT_BEGUN and turn_now.number != self.left_in:
            self.quiet = self.estimate.idle and turn_clock() - self.left_at < QUIET_TURN_NS
        self._flush()
        found = self._drain(MAX_DRAIN)
        if not self.in_flight or self.error is not None:
            return 0
        if found or self._polls_again():
            return self._need_turn()
        if not self.armed:
            # Completions from now on raise an event; earlier ones are polled now.
            self._arm()
            if self._drain(MAX_DRAIN):
                return self._need_turn()
        return 0

    cdef bint _polls_again(self) except -1:
        # Whether to poll again in the next turn, although no completion was found. If a wait polls while the loop has
        # nothing else to do, poll for a moment.
        cdef uint64_t now, began, until
        if self.model == POLLS:
            if not self.awaited:
                return False
            spinner_note(turn_clock() + POLLED_TURN_NS)
            return True
        if self.model == SPINS:         # for a frame: tasks spin themselves for operations
            now = turn_clock()
            if not self.awaited or now >= self.spin_until:
                return False
            spinner_note(min(now + POLLED_TURN_NS, self.spin_until))
            return True
        if self.wait == WAIT_ENDED:     # the woken task runs in this turn of the loop, maybe after this
            self.wait = NO_WAIT
            return True
        if not self.awaited or self.wait < WAIT_BEGUN:
            return False
        now = turn_clock()
        if self.wait != WAIT_POLLING:
            self.spin_until = self._may_poll(spin_budget(&self.estimate))
            if not self.spin_until:
                self._fall_asleep()
                return False
            now = turn_clock()
            if self.wait == WAIT_BEGUN:
                self.spins += 1
                now = self._yield_processor(now)
            self.wait = WAIT_POLLING
        elif self.spin_until <= now:
            self.wait = WAIT_POLLED
            return False
        if self.quiet and turn_now.spun < MOMENT_NS:    # all queues of the loop share the moment
            began, until = now, now + MOMENT_NS - turn_now.spun
            while now < until and not self._drain(MAX_DRAIN):
                now = turn_clock()
            turn_now.spun += now - began
        self._leave_loop(now)
        return True

    cdef void _leave_loop(self, uint64_t now) noexcept:
        # Note that the wait in progress leaves the loop to others.
        self.left_at = now
        self.left_in = turn_now.number

    cdef void _fall_asleep(self) noexcept:
        # Note that the wait in progress sleeps without having polled in turns.
        if self.wait == WAIT_SPUN:
            self.wait = WAIT_POLLED
        else:
            self.wait = WAIT_ASLEEP
            self.sleeps = thread_sleeps() if self.processors > 1 else SLEEPS_UNKNOWN

    cdef uint64_t _may_poll(self, uint32_t spin_ns) except? 0:
        # Return the time until which this thread may poll that wants to poll for `spin_ns` from now; 0 if it may not,
        # because other threads of this process poll on all processors.
        cdef uint64_t now
        if not spin_ns:
            return 0
        now = turn_clock()
        if now >= self.processors_due:
            self._count_processors()
            now = turn_clock()
        return now + spin_ns if spinner_begin(now, now + spin_ns, self.processors) else 0

    cdef uint64_t _yield_processor(self, uint64_t now) noexcept:
        # Let run what waits for this processor. That may be the peer, which polling would keep from answering: the
        # kernel often wakes it on the processor of the thread that wakes it. Do nothing if other threads may change the
        # state meanwhile. Return the time after that; if it took long, since others need the processor, awaits have
        # spun for that time in this turn.
        cdef uint64_t after
        if self.any_thread:
            return now
        with nogil:
            sched_yield()
        after = turn_clock()
        if after - now > QUIET_SPIN_NS:
            turn_now.spun += after - now
        return after

    cdef int _count_processors(self) except -1:
        self.processors_due = turn_clock() + PROCESSORS_NS
        self.processors = self.count_processors()
        return 0

    cdef int _count_awaited(self, int change) except -1:
        # Count operations that a task suspends for, or no longer. If the model adapts, a wait begins with each such
        # operation. A dispatch ends the wait by itself.
        cdef uint64_t now
        self.awaited += change
        if self.model != ADAPTS or (change < 0 and (self.awaited or self.dispatching)):
            return 0
        now = turn_clock()
        if change < 0:
            self._note_wait(now)
            self.wait = NO_WAIT
            return 0
        if self.awaited > 1:
            self._note_wait(now)
        self.wait = WAIT_SPUN if self.spun else WAIT_BEGUN
        self.wait_began = now - self.spun
        self.spun = 0
        self._leave_loop(now)
        return 0

    cdef int _count_frame_awaited(self, int change) except -1:
        # Count frames that a task suspends for, or no longer, like operations. If the model spins, poll in turns.
        self._count_awaited(change)
        if change > 0 and self.model == SPINS:
            self.spin_until = turn_clock() + self.spin_ns
        return 0

    cdef bint _note_wait(self, uint64_t now) except -1:
        # Note for how long the wait in progress has polled or slept. Return whether it polled.
        cdef bint polled = self.wait == WAIT_POLLED or self.wait > WAIT_BEGUN
        if polled:
            spin_note_polled(&self.estimate, now - self.wait_began)
        elif self.wait == WAIT_ASLEEP:
            spin_note_asleep(&self.estimate, now - self.wait_began, self._thread_slept())
        return polled

    cdef bint _thread_slept(self) except -1:
        # Whether the thread of the home loop has slept since the wait in progress went asleep, or this is unknown.
        if self.sleeps == SLEEPS_UNKNOWN or (self.any_thread and not self.home.owns()):
            return True
        return thread_sleeps() != self.sleeps

    cdef int _end_wait(self) except -1:
        # Note that an operation has completed that a task is suspended for, while a wait is in progress.
        cdef uint64_t now = turn_clock()
        cdef bint polled = self._note_wait(now)
        self.spins_paid += self.wait > WAIT_BEGUN
        self.wait = WAIT_BEGUN if self.awaited else WAIT_ENDED if polled else NO_WAIT
        self.wait_began = now
        self._leave_loop(now)
        return 0

    cdef int _arm(self) except -1:
        # Request an event for the next completion. Raise VerbsError if the verb fails.
        cdef int error
        self.handle._use("ibv_req_notify_cq")
        error = v.verbs_req_notify_cq(self.handle.pointer, 0)
        self.handle._unuse()
        self.handle._check("ibv_req_notify_cq", error)
        self.armed = True
        return 0

    cdef int _flush(self) except -1:
        # Post chained and waiting requests, end refused ones, and make pending state changes.
        cdef WorkQueue queue
        cdef Operation operation
        self._flush_chained()
        stalled, self.stalled = self.stalled, []
        for queue in stalled:
            queue._advance()
        while self.refused:
            operation = self.refused.pop()
            if operation.state != DONE:         # not destroyed with its queue pair in the meantime
                operation.queue._retire(operation)
        return self._run_transitions()

    cdef inline int _flush_chained(self) except -1:
        # Post chained requests.
        cdef WorkQueue queue
        while self.chained:
            queue = self.chained.pop()
            queue._flush_chained()
        return 0

    cdef int _run_transitions(self) except -1:
        # Make the pending state changes of queue pairs. Raise ConcurrentAccessError if a thread is inside the thread
        # domain; the remaining changes then stay pending.
        while self.pending_transitions:
            requests = self.pending_transitions.pop()
            try:
                (<QpWorkState>requests)._run_transition()
            except ConcurrentAccessError:
                self.pending_transitions.append(requests)
                raise
        return 0

    cdef int _check(self) except -1:
        # Raise the error of `broken_error` if the completion of a request posted now would not be dispatched. If a loop
        # owns the queue, that loop is running, because it made this call.
        if (
            self.error is not None
            or self.loop is None
            or self.home.loop is not self.loop
            or (self.handle.affinity is not self.home and self.home.orphaned)
        ):
            raise self.broken_error()
        return 0

    # ---- Polling

    cdef int _poll_for(self, Operation operation, bint spins) except -1:
        # Poll and dispatch for a task that awaits or inspects the operation; with `spins`, continue for some time.
        # Raise AffinityError if the caller is not the owner, even if the outcome is known.
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef int found
        if spins:
            self.spun = 0
        if operation.state != POSTED and operation.state != WAITING:
            return _check_owner(self.handle)    # the handle may be destroyed: a known outcome stays known
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
            self._flush_chained()       # the peer may wait for these
            if self.model != ADAPTS:
                self._spin(operation, self.spin_ns)
            elif self.quiet and not self.awaited and not self.any_thread:
                self._spin_while_quiet(operation)
        return 0

    cdef int _poll(self, v.ibv_wc *wcs) noexcept:
        # Poll once; return the number of completions in `wcs`, or a negative errno. The caller has begun the verb. Ask
        # for no more completions than there are requests in flight, which saves the poll that would find the queue
        # empty.
        cdef int found, wanted = POLL_BATCH
        if self.in_flight < POLL_BATCH:
            wanted = self.in_flight if self.in_flight > 0 else 1
        if self.handle._resizing:
            # A thread that resizes may hold the queue's lock while an allocator waits for the GIL.
            self.dispatching += 1
            with nogil:
                found = poll_take(self.handle.pointer, self.handle.extended_pointer, wanted, wcs)
            self.dispatching -= 1
            return found
        return poll_take(self.handle.pointer, self.handle.extended_pointer, wanted, wcs)

    cdef int _drain(self, int max_completions) except -1:
        # Poll and dispatch until the queue is empty, or until `max_completions` were dispatched. Return the number of
        # dispatched completions. During a dispatch, return 0 without polling.
        if self.dispatching:
            self.poll_skipped = True
            return 0
        return self._drain_now(max_completions)

    cdef int _drain_now(self, int max_completions) except -1:
        # Do the same as `_drain`, but also during a dispatch.
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

    cdef int _spin_while_quiet(self, Operation operation) except -1:
        # Spin for a short time before the task suspends, if its wait would poll.
        if not spin_budget(&self.estimate) or not self._may_poll(QUIET_SPIN_NS):
            return 0
        self.spun = self._spin(operation, QUIET_SPIN_NS)
        if operation.state == DONE and self.spun:
            spin_note_polled(&self.estimate, self.spun)
            self.spun = 0
            self.wait = WAIT_ENDED
        return 0

    cdef int64_t _spin(self, Operation operation, uint64_t spin_ns) except -1:
        # Yield the processor, and poll until the operation is done, or until awaits have spun for `spin_ns` in this
        # turn. Return the time that this one took, with that of the yield. After a first moment, poll without the GIL.
        # If calls of several threads must not overlap (a thread domain without an owner), release the GIL only between
        # two polls. With POLLS, which is to have a processor for each end, yield only after polling in vain without it.
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef uint64_t began = turn_clock(), yielded, now, until, end, moment
        cdef bint shared = self.handle.affinity is not None and self.handle.affinity._thread == NULL
        cdef bint unlocked, yields_later = self.model == POLLS
        cdef int found
        if turn_now.spun >= spin_ns:
            return 0
        self.spins += 1
        now = yielded = began if yields_later else self._yield_processor(began)
        until = now + spin_ns - min(turn_now.spun, spin_ns)
        moment = now + MOMENT_NS
        while operation.state == POSTED and (now < until or now == yielded):
            if self.dispatching:        # another thread may be dispatching the completion
                self.poll_skipped = True
                with nogil:
                    pass
                now = turn_clock()
                continue
            end = min(until, moment if now < moment else now + (QUIET_SPIN_NS if yields_later else SLICE_NS))
            spinner_note(end)
            self.handle._use("ibv_poll_cq")
            unlocked = now >= moment and not shared
            if unlocked:
                self.dispatching += 1
                with nogil:
                    found = poll_spin(self.handle.pointer, self.handle.extended_pointer, POLL_BATCH, wcs, end)
                self.dispatching -= 1
            else:
                found = poll_spin(self.handle.pointer, self.handle.extended_pointer, POLL_BATCH, wcs, now)
            self.handle._unuse()
            if found < 0:
                self._poll_failed(found)
                break
            self._dispatch_all(wcs, found)
            if now >= moment:
                PyErr_CheckSignals()
                if shared:
                    with nogil:
                        pass            # lets other threads run
            now = turn_clock()
            if yields_later and unlocked and operation.state == POSTED:
                yields_later = False
                turn_now.spun += now - yielded
                now = yielded = self._yield_processor(now)  # the next poll finds what came meanwhile
        turn_now.spun += now - yielded
        if operation.state == DONE:
            self.spins_paid += 1
        return <int64_t>(now - began)

    cdef int _poll_failed(self, int found) except -1:
        # Break the queue because of the negative errno `found`; for overlapping calls, raise ConcurrentAccessError
        # instead. Only the software device reports the actual errno.
        try:
            self._finish_dispatch()
        finally:
            if -found == EBUSY and self.handle.context.software:
                self.handle._check("ibv_poll_cq", EBUSY)
            verb = "ibv_start_poll" if self.handle.extended_pointer != NULL else "ibv_poll_cq"
            self.broke(VerbsError(verb, -found if self.handle.context.software else EIO))
        return 0

    cdef int _dispatch_all(self, v.ibv_wc *wcs, int found) except -1:
        # Dispatch `found` completions, possibly 0. Threads may dispatch at the same time, in any order. Only when the
        # last of them has finished may a thread poll again; newer completions would otherwise overtake older ones.
        # Polls skipped in the meantime, including those of the home loop, are then repeated. That also holds if no
        # completion was found: a completion that arrived after the skipped poll and before the home loop armed the
        # queue raises no event.
        cdef Py_ssize_t awaited = self.awaited
        if found > 0:
            self.dispatching += 1
            try:
                if found == 1:
                    self._dispatch(wcs)
                else:
                    self._dispatch_many(wcs, found)
            finally:
                self.dispatching -= 1
                if self.wait > WAIT_ENDED and self.awaited < awaited:
                    self._end_wait()
                self._finish_dispatch()
        else:
            self._finish_dispatch()
        return 0

    cdef inline int _finish_dispatch(self) except -1:
        # After the last dispatch, have the home loop poll if a poll was skipped or a turn is needed.
        if self.dispatching == 0 and (self.poll_skipped or self.turn_needed):
            if self.poll_skipped:
                self.armed = False      # the home loop polls, whether an event will come or not
            self.poll_skipped = self.turn_needed = False
            self._need_turn()
        return 0

    cdef int _dispatch_many(self, v.ibv_wc *wcs, int found) except -1:
        # Dispatch each of the completions, even if dispatching one of them raises, for example because of a signal
        # handler: they have been polled and do not come again. The last exception is then raised.
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
        # Pass a completion to the queue of its operation.
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
            self.late += 1              # of an object destroyed since then, or of requests posted by other code
            return 0
        operation = <Operation>work
        return operation.queue._completed(operation, wc)

    # ---- The end

    def drain(self):
        """Poll for completions and dispatch them until the queue is empty.

        Unlike other polls, this one is not skipped while another thread is dispatching older completions: the queue may
        be about to end. If polling fails, its error is not raised, but breaks the queue as described for `broke`.

        :raises AffinityError: the caller is not on the thread and event loop that own the queue.
        :raises ClosedResourceError: the queue is destroyed.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            while self._drain_now(MAX_DRAIN) == MAX_DRAIN:
                pass
        finally:
            section_leave(&within)

    def broke(self, error, bint gone=False):
        """Fail all requests that complete in this queue, because no more completions will arrive.

        The queue pairs that complete here are reset first. Until a queue pair is reset, the device may write to the
        memory of its requests, which therefore stays pinned: a peer's next message would otherwise arrive in memory
        that has been reused. Do nothing if the queue has already failed, unless `gone` is True for the first time.

        :param error: exception that is the cause; kept only if the queue has not failed before.
        :param gone: whether the device is lost (DEVICE_FATAL) and no longer does anything. This may be reported after
            another error.
        """
        cdef section within
        section_enter(&within, self._section())
        try:
            self._break(error, gone)
        finally:
            section_leave(&within)

    cdef int _break(self, object error, bint gone) except -1:
        # Do the work of `broke` in the section.
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
        except ConcurrentAccessError:   # a thread is inside the thread domain, for a short time
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
        """Return a new exception to raise when the failed queue is used: a `BrokenResourceError`, or a
        `DeviceRemovedError` if the device is lost. Its ``__cause__`` is the exception that broke the queue; None if
        the queue has only lost its home loop."""
        return _broken(f"{self.handle!r} is broken: {self.error or 'no loop watches it any longer'}", self.error)

    @property
    def watched(self):
        """Whether the home loop still dispatches the completions: False if the queue has failed, if that loop is closed
        or was detached by `let_go`, and in the child of a fork."""
        return (
            self.error is None and self.loop is not None and self.home.loop is self.loop and not self.home.orphaned
            and not self.handle._is_inherited()
        )

    def let_go(self):
        """Detach the queue from its home loop, which then no longer dispatches the queue's completions. Call this on
        the home loop, or when that loop is gone."""
        self.loop = None


cdef int _check_owner(Handle handle) except -1:
    # Raise AffinityError, ConcurrentAccessError or ForkedProcessError if the handle has an owner and the caller may not
    # call its verbs now.
    cdef Affinity owner = handle.affinity
    if owner is not None and owner._thread != NULL:
        owner._enter(handle, "ibv_poll_cq")
        owner._leave()
    return 0


cdef enum:
    MOMENT_NS = 2000                    # time to spin with the GIL
    QUIET_TURN_NS = 10000               # time within which a loop that has nothing else to do goes round
    QUIET_SPIN_NS = 20000               # time to spin in a turn of such a loop, if the model adapts
    SLICE_NS = 100000                   # time to spin without the GIL between two checks for signals
    POLLED_TURN_NS = 1000000            # time until the next poll, at most, of a loop that polls in each turn
