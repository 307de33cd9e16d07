# Part of work.pyx: what is awaited.

cdef object _get_running_loop = asyncio._get_running_loop
cdef object _current_task = asyncio.current_task


@cython.final
@cython.freelist(64)
@cython.no_gc_clear                 # what waits with it is there until it is freed
cdef class _Extra:
    """What few operations have beside the rest. It comes and goes with its operation.

    An operation that waits for a place is dropped in whatever thread forgets it, and is taken out of the order there.
    With a GIL that is one step. Without one `WorkQueue.waiting_lock` is taken by everybody who is at the links, and only by
    them; who looks for the first that waits passes over those that are being freed, which take themselves out.
    """

    cdef v.ibv_sge *sges                # where those of the request are too few
    cdef request *requests              # of a batch, or of one that waits for a place
    cdef v.ibv_mw_bind_info bind_info
    cdef MemoryWindow window            # to be bound
    cdef list pins                      # of its memory, beyond the first: _Run
    cdef list unsignaled                # operations that were posted before it without a completion of their own
    cdef list elements                  # of a batch
    cdef Inbox inbox                    # where it goes when it is done, of a receive; that it asks, of a message
    cdef bint awaits_message
    cdef object message                 # that it was given, and nobody took yet
    cdef WorkQueue queue                # that it waits in for a place; None: it does not
    cdef uint32_t places                # that it needs there
    cdef PyObject *operation            # borrowed
    cdef object weak                    # to that, since it waits
    cdef PyObject *earlier              # of those that wait, borrowed: who is dropped takes itself out
    cdef PyObject *later
    cdef list pinned                    # to be given back if it is dropped there

    def __dealloc__(self):
        cdef WorkQueue queue = self.queue
        cdef list pinned = self.pinned
        if queue is not None:
            queue._withdraw(self)
            _discard_runs(pinned, queue.receives)
        if self.message is not None:
            self.inbox._return_message(self.message)
        free(self.sges)
        free(self.requests)


@cython.final
@cython.freelist(256)
@cython.no_gc_clear                 # what pins its memory is there until it is freed
cdef class Operation:
    """A work request from its posting to its end. It can be awaited, once, and need not be.

    It was posted, or stands in the order of those that wait for a place in their queue, when it is handed out. Dropping
    one that waits for a place withdraws it. One that was posted goes on whatever becomes of who awaits it: cancelled,
    timed out or forgotten, its memory stays pinned and its place taken until it completes.

    It is a `collections.abc.Coroutine`: tasks and cancel scopes take it, and so does ``yield from`` its ``__await__``.
    A second await raises RuntimeError, whatever task, thread or loop it is of, and does not disturb the first; so do
    `send`, `throw` and `close` of anybody but the task that awaits it. Made by the methods of a queue pair.
    """

    # Few Python objects, since each field for one takes its time in every operation's life.
    cdef WorkQueue queue
    cdef _Extra extra                   # None: it has nothing of that
    cdef InFlightCount pins                      # of its memory
    cdef object keepalive               # alive as long as it is under way: what it was given
    cdef object value                   # what it gives, or raises
    cdef object waiter                  # the future that who awaits waits for
    cdef PyObject *awaiter              # who awaits: see `_caller`
    cdef uint64_t wr_id                 # `wr_id` since it has a place
    cdef uint64_t bytes
    cdef uint64_t turn                  # in which whoever awaits let the loop go round
    cdef uint32_t requests              # 1, of a batch more
    cdef uint32_t vendor_err
    cdef uint32_t qp_num                # where it failed, of a shared receive
    cdef int status                     # enum ibv_wc_status
    cdef int scratch                    # its place in the queue's scratch memory; below 0: none
    cdef uint8_t opcode                 # enum ibv_wr_opcode, of a send
    cdef uint8_t state
    cdef uint8_t phase
    cdef bint raises                    # `value`, which it ended by
    cdef bint atomic                    # gives what was there before, which the device writes to its scratch memory
    cdef bint held_by_queue             # its queue keeps it while it waits for a place: somebody awaits it
    cdef bint unpinned                     # a part of a batch, which pins its memory
    cdef object __weakref__             # see _Extra

    def __init__(self):
        raise TypeError("operations come from the methods of a queue pair")

    @classmethod
    def __class_getitem__(cls, item):
        return types.GenericAlias(cls, item)

    # ---- Looking

    def __repr__(self):
        names = {NEW: "new", WAITING: "waits for a place", CHAINED: "to be posted", POSTED: "posted", DONE: "done"}
        what = "BATCH" if _is_batch(self) else self._opcode_name()
        return f"<Operation {what} on {self.queue.handle!r} ({names[self.state]})>"

    cdef str _opcode_name(self):
        if self.queue.receives:
            return "RECV"
        return SendOpcode(self.opcode).name

    def done(self):
        """Whether it has ended, well or not. This looks for completions, and never waits.

        :raises AffinityError: another thread or event loop owns it.
        """
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            self.queue._poll_for(self, False)
        finally:
            section_leave(&within)
        return self._has_ended()

    @property
    def ended(self):
        """Whether it is known to have ended. Unlike `done` this does not look, and any thread may ask."""
        return self._has_ended()

    cdef inline bint _has_ended(self) noexcept:
        # Whether it has ended, in whatever thread. What it ended by was written before, and stays.
        return byte_read(&self.state) == DONE

    def result(self):
        """What awaiting it would give, or raise, where it is done; as often as you like.

        :raises asyncio.InvalidStateError: it is not done.
        """
        if not self._has_ended():
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        return self._outcome()

    cdef object _outcome(self):
        cdef section within
        if self.status != SUCCESS:
            section_enter(&within, <PyObject *>self)    # several threads may ask: one error is given to all of them
            try:
                if not self.raises:
                    self._fail(self._failure())
            finally:
                section_leave(&within)
        if self.raises:
            raise self.value
        return self.value

    cdef int _fail(self, object error) except -1:
        self.value = error
        self.raises = True
        return 0

    cdef object _failure(self):
        # What it ended by, as an error; None: well.
        if self.raises:
            return self.value
        if self.status == SUCCESS:
            return None
        if _is_batch(self):
            return BatchError([(<Operation>each)._failure() for each in self.extra.elements])
        opcode = WcOpcode.RECV if self.queue.receives else _wc_opcodes.get(self.opcode)
        return WorkCompletionError(_status(self.status), opcode, self.vendor_err, self.queue.qp_num or self.qp_num)

    cdef inline int _take_old_value(self) except -1:
        # It succeeded: what an atomic gives lies in its scratch memory, which is another one's soon.
        if self.atomic:
            self.value = (<uint64_t *>self.queue._scratch_of(self))[0]
        return 0

    # ---- Memory

    cdef inline int _pin(self, InFlightCount pins) except -1:
        if self.unpinned:
            pins._check()
        else:
            pins._add(1, self.queue.receives)
        if self.pins is None:
            self.pins = pins
            return 0
        return self._pin_more(pins)

    cdef int _pin_more(self, InFlightCount pins) except -1:
        cdef _Extra extra = _extra(self)
        if extra.pins is None:
            extra.pins = []
        extra.pins.append(_run(pins))
        return 0

    cdef inline int _unpin(self) except -1:
        # Once; it may run Python code, and is among the last steps therefore.
        if self.extra is not None and self.extra.pins is not None:
            return _discard_runs(self._all_pins(), self.queue.receives)
        return 0 if self.pins is None else self.pins._discard(1, self.queue.receives)

    cdef list _all_pins(self):
        cdef list pins = [] if self.pins is None else [_run(self.pins)]
        if self.extra is not None and self.extra.pins is not None:
            pins += self.extra.pins
        return pins

    cdef list _take_pins(self):
        # They are given back by whoever takes them.
        cdef list pins = self._all_pins()
        self.pins = None
        if self.extra is not None:
            self.extra.pins = None
        return pins

    # ---- Awaiting

    # Whoever finds the phase FRESH, with the GIL or in the section, takes it. While it is BEGINNING Python code runs,
    # and everybody is refused; from then on only the task that awaits goes on or leaves, and that is at one place at a
    # time.

    def __await__(self):
        if self.phase != NOT_AWAITED:
            self._raise_already_awaited()
        return self

    def __iter__(self):
        # What `yield from operation.__await__()` asks for.
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As of every coroutine: begin, or go on.

        :raises RuntimeError: somebody else awaits it, or it was awaited before.
        """
        cdef PyObject *result = NULL
        cdef int kind = operation_send(<PyObject *>self, <PyObject *>value, &result)
        returned = <object>result
        Py_DECREF(returned)
        if kind == PYGEN_RETURN:
            raise StopIteration(returned)
        return returned

    def throw(self, kind, value=None, traceback=None):
        """As of every coroutine: whoever awaits it is cancelled. What was posted goes on.

        :raises RuntimeError: somebody else awaits it.
        """
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            if not self._may_stop_awaiting():
                self._raise_already_awaited()
            self._stop_awaiting()
        finally:
            section_leave(&within)
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        raise value.with_traceback(traceback) if traceback is not None else value

    def close(self):
        """As of every coroutine: nobody awaits it any more. What was posted goes on.

        :raises RuntimeError: somebody else awaits it.
        """
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            if self._may_stop_awaiting() or self._is_orphaned():
                self._stop_awaiting()
            elif self.state != DONE:    # else whoever awaits it is given what it ended by, and has nothing to leave
                self._raise_already_awaited()
        finally:
            section_leave(&within)

    cdef bint _may_stop_awaiting(self) except -1:
        # Whether whoever calls is who awaits it, or may await it.
        if self.phase == NOT_AWAITED:
            if self.queue is not None and not _owner_gone(self.queue.handle):
                _check_owner(self.queue.handle)
            return True
        if self.phase == SUSPENDED or self.phase == YIELDING:
            return self.awaiter == _caller()
        return self.phase != BEGINNING

    cdef bint _is_orphaned(self) except -1:
        # Whether who awaits it will never go on: its loop is closed, or is of the process that this one was forked
        # from. The task is dropped then, and its coroutine closes this, in whatever task or thread that is. Before, the
        # future that the task waits for keeps the task.
        return self.phase == SUSPENDED and (self.waiter.get_loop().is_closed() or self.queue.handle.closed)

    cdef int _raise_already_awaited(self) except -1:
        # Another one awaits it, or did.
        if self.phase == IN_BATCH:
            raise RuntimeError(f"{self!r} is a part of a batch: await what its post() returns")
        if self.phase == FINISHED:
            raise RuntimeError(f"{self!r} was awaited before: once is all")
        _check_owner(self.queue.handle)
        raise RuntimeError(f"{self!r} is awaited already: once is all")

    cdef int _stop_awaiting(self) except -1:
        if self.phase == IN_BATCH:      # nobody can await it
            return 0
        if self.phase == SUSPENDED:
            self._unsuspend()
        if self.extra is not None and self.extra.awaits_message and self.phase != FINISHED:
            self.extra.inbox._withdraw(self)
        self.phase = FINISHED
        return 0

    cdef int _begin(self, PyObject **result) except -1:
        if self.queue is None:
            raise TypeError("operations come from the methods of a queue pair")
        self.queue._poll_for(self, True)  # who may not is refused by this, before anything has changed
        if self.phase != NOT_AWAITED:   # meanwhile, by another thread, or by Python code that ran
            self._raise_already_awaited()
        turn_join(&self.queue.share)
        if self.state == DONE and not turn_is_over(&self.queue.share, self.bytes):
            return self._deliver(result)
        return self._begin_waiting(result)

    cdef int _begin_waiting(self, PyObject **result) except -1:
        # Where it fails, it can be awaited as if nothing was.
        self.phase = BEGINNING
        try:
            self.awaiter = _caller()
            return self._suspend(result) if self.state != DONE else self._yield(result)
        except BaseException:
            if self.phase == BEGINNING:
                self.phase = NOT_AWAITED
            raise

    cdef int _yield(self, PyObject **result) except -1:
        # It is done; others run first.
        self.phase = YIELDING
        self.turn = turn_now.number
        Py_INCREF(None)
        result[0] = <PyObject *>None
        return PYGEN_NEXT

    cdef int _suspend(self, PyObject **result) except -1:
        loop = self.queue._loop_of_caller()
        if self.queue.dispatcher is not None:
            self.queue.dispatcher._check()
        waiter = loop.create_future()
        waiter._asyncio_future_blocking = True
        if self.state == DONE:          # meanwhile, by another thread or a finalizer: nobody knew of this waiter
            return self._deliver(result)
        self.waiter = waiter
        self.turn = turn_now.number
        turn_note_sleep()
        try:
            self.queue._awaited(self)
        except BaseException:
            self._unsuspend()
            raise
        self.phase = SUSPENDED
        Py_INCREF(waiter)
        result[0] = <PyObject *>waiter
        return PYGEN_NEXT

    cdef int _unsuspend(self) except -1:
        # Nobody waits for its future any more.
        self.waiter = None
        return self.queue._unawaited(self) if self.state != DONE else 0

    cdef int _deliver(self, PyObject **result) except -1:
        self.phase = FINISHED
        if self.waiter is not None:
            self.waiter = None
        if self.extra is not None:
            self.extra.message = None   # it is taken
        if self.status != SUCCESS or self.raises:
            self._outcome()
        Py_INCREF(self.value)
        result[0] = <PyObject *>self.value
        return PYGEN_RETURN


cdef int operation_send(PyObject *operation, PyObject *value, PyObject **result) except -1:
    # The `am_send` of Operation: what `await` calls, first with None and then with what the loop gives it.
    cdef Operation self = <Operation>operation
    cdef PyObject *shared = _section(self.queue)
    cdef section within
    if shared == NULL:
        return _continue_await(self, result)
    section_enter(&within, shared)
    try:
        return _continue_await(self, result)
    finally:
        section_leave(&within)


cdef inline int _continue_await(Operation self, PyObject **result) except -1:
    result[0] = NULL
    if self.phase == NOT_AWAITED:
        try:
            return self._begin(result)
        except AffinityError:           # of who may not ask, and has not asked
            raise
        except BaseException:
            if self.phase == NOT_AWAITED and self.extra is not None and self.extra.awaits_message:
                self._stop_awaiting()   # another one may ask
            raise
    if (self.phase != SUSPENDED and self.phase != YIELDING) or self.awaiter != _caller():
        self._raise_already_awaited()
    turn_advance(self.turn)             # the loop calls who let it
    if self.state != DONE:              # the future was ended by somebody else
        self._unsuspend()
        return self._begin_waiting(result)
    return self._deliver(result)


cdef PyObject *_caller() except? NULL:
    # Who calls, to be compared alone: the running task, or, where there is none, the running loop, or NULL. That is not
    # held: who awaits lives as long as anybody would be disturbed, and who has its address afterwards disturbs nobody.
    loop = _get_running_loop()
    if loop is None:
        return NULL
    task = _current_task(loop)
    if task is None:
        return <PyObject *>loop
    return <PyObject *>task


cdef inline bint _is_batch(Operation operation) noexcept:
    return operation.extra is not None and operation.extra.elements is not None


cdef inline bint _binds(Operation operation) noexcept:
    return operation.extra is not None and operation.extra.window is not None


cdef _Extra _extra(Operation operation):
    cdef _Extra extra = operation.extra
    if extra is None:
        extra = _Extra.__new__(_Extra)
        extra.operation = <PyObject *>operation
        operation.extra = extra
    return extra


cdef _Run _run(InFlightCount pins):
    cdef _Run run = _Run.__new__(_Run)
    run.pins = pins
    run.count = 1
    return run


cdef int _discard_runs(list runs, bint receives) except -1:
    # Each of them, whatever one of them raises.
    cdef _Run run
    raised = None
    for each in runs:
        run = <_Run>each
        try:
            run.pins._discard(run.count, run.count if receives else 0)
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised
    return 0


set_am_send(<PyTypeObject *>Operation, <send_function>operation_send)
Coroutine.register(Operation)


cdef dict _wc_opcodes = {
    0: WcOpcode.RDMA_WRITE,
    1: WcOpcode.RDMA_WRITE,
    2: WcOpcode.SEND,
    3: WcOpcode.SEND,
    4: WcOpcode.RDMA_READ,
    5: WcOpcode.COMP_SWAP,
    6: WcOpcode.FETCH_ADD,
    7: WcOpcode.LOCAL_INV,
    8: WcOpcode.BIND_MW,
    9: WcOpcode.SEND,
}


cdef object _status(int status):
    try:
        return WcStatus(status)
    except ValueError:                  # newer than this list
        return status


cdef class Received:
    """What arrived in a receive.

    :param local: where, as it was given to `QueuePairVerbs.receive`.
    :param byte_len: how many bytes; those of a datagram's route do not count.
    :param written: the sender wrote them where it chose, by a write with immediate data: nothing is in ``local``.
    :param immediate: the sender's immediate data, 32 bits; None: there were none.
    :param invalidated_rkey: the key that the sender invalidated; None: it did not.
    :param qp_num: of the queue pair that it arrived at.
    :param src_qp: the sender's number, of a datagram.
    :param route: of a datagram: the 40 bytes of its global routing header; None where it had none.
    """

    cdef readonly object local
    cdef readonly uint32_t qp_num
    cdef readonly uint32_t byte_len
    cdef readonly bint written
    cdef readonly uint32_t src_qp
    cdef readonly object immediate
    cdef readonly object invalidated_rkey
    cdef readonly object route

    def __init__(self):
        raise TypeError("what was received comes from awaiting a receive")

    def __repr__(self):
        return f"<Received {self.byte_len} bytes>"

    @property
    def data(self):
        """What arrived, where it lies: a view of memory that is registered, and used again when you post it again.

        Of a write with immediate data it is empty, whatever ``byte_len`` says: nothing arrived in that memory.

        :raises ValueError: it was received into several pieces: look there.
        """
        whole = self.local if not self.written else None
        if isinstance(whole, (list, tuple)):
            if len(whole) != 1:
                raise ValueError(f"it was received into {len(whole)} pieces: look there")
            whole = whole[0]
        return memoryview(b"") if whole is None else whole.buffer[: self.byte_len]
