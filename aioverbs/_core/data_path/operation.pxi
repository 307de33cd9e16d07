# Part of data_path.pyx: operations, which callers await.

cdef object _get_running_loop = asyncio._get_running_loop
cdef object _current_task = asyncio.current_task
# Up to Python 3.11, that is a Python function, which looks up this dictionary.
cdef dict _current_tasks = asyncio.tasks._current_tasks if sys.version_info < (3, 12) else None


@cython.final
@cython.freelist(64)
@cython.no_gc_clear                 # its references keep alive what waits with it until it is freed
cdef class _Extra:
    """Fields that few operations need, kept apart so that an `Operation` stays small. Exists as long as its operation.

    An operation that waits for a place may be dropped by any thread; the thread that frees the operation removes it
    from the list of waiting operations. With a GIL that is one step. Without a GIL, `WorkQueue.waiting_lock` protects
    the links: each thread that reads or changes them holds it, and holds it for nothing else. A thread that looks for
    the first waiting operation skips operations that are being freed, which remove themselves.
    """

    cdef v.ibv_sge *sges                # scatter/gather list that does not fit into the request
    cdef request *requests              # requests of a batch, or of an operation that waits for a place
    cdef v.ibv_mw_bind_info bind_info
    cdef MemoryWindow window            # memory window to bind
    cdef list pins                      # pins of the memory beyond the first, each a _Run
    cdef list unsignaled                # operations posted before this one without a completion of their own
    cdef list elements                  # operations of a batch
    cdef Inbox inbox                    # inbox that a receive fills, or that an await reads from
    cdef ReceiveRing ring               # ring whose receives all have this operation; None for any other operation
    cdef bint awaits_message
    cdef PyObject *message              # message not yet returned to the caller, or NULL: see `_hold_message`
    cdef WorkQueue queue                # queue in which the operation waits for a place; None if it does not
    cdef uint32_t places                # number of places that the operation needs
    cdef PyObject *operation            # borrowed reference
    cdef object weak                    # weak reference to the operation while it waits
    cdef PyObject *earlier              # neighbours among waiting operations; borrowed, a freed one removes itself
    cdef PyObject *later
    cdef tuple pinned                   # pins to release if freed while waiting; the collector empties no tuples

    def __dealloc__(self):
        cdef WorkQueue queue = self.queue
        cdef tuple pinned = self.pinned
        if queue is not None:
            queue._withdraw(self)
            _discard_runs(pinned, queue.receives)
        message = self._take_message()
        if message is not None:
            self.inbox._return_message(message)
        free(self.sges)
        free(self.requests)

    cdef void _hold_message(self, object message) noexcept:
        # Hold the message by a reference that is hidden from the garbage collector. Otherwise the collector would
        # finalize the message together with a cycle that contains the operation, and another message could be received
        # into its memory before the inbox gets the message back.
        Py_INCREF(message)
        self.message = <PyObject *>message

    cdef object _take_message(self):
        # Return the message and forget it; None if there is none.
        cdef PyObject *held = self.message
        if held == NULL:
            return None
        self.message = NULL
        message = <object>held
        Py_DECREF(message)
        return message


@cython.final
@cython.freelist(256)
@cython.no_gc_clear                 # its references keep alive what pins its memory until it is freed
cdef class Operation:
    """A work request, from its posting to its completion. A caller may await an operation once, but need not.

    When a method returns an operation, the request is posted, or waits for a place in its queue. Dropping the operation
    while it waits withdraws the request. A posted request continues, whatever happens to the awaiting task: after a
    cancellation or a timeout, or if the operation is dropped, its memory stays pinned and its place stays taken until
    it completes.

    Awaiting it returns the result that the method names: None, the old value of an atomic request, or a `Received`. It
    raises one of these exceptions (see `send` for those that concern the caller):

    - `WorkCompletionError`, or `BatchError` for a batch, if the request completed with an error status. The status is
      WR_FLUSH_ERR if the request still waited for a place when the queue pair failed or was closed.
    - `BrokenResourceError` if the request will never complete, because its completion queue failed, or its queue pair
      was reset after an error or destroyed.
    - `VerbsError` if the request was not posted by the method that returned the operation, but later, and the posting
      verb failed; or `ClosedResourceError` if the queue pair could not be used by then.

    An operation is a `collections.abc.Coroutine`: tasks, cancel scopes and ``yield from operation.__await__()`` accept
    it. A second await raises RuntimeError, no matter which task, thread or loop makes it, and does not disturb the
    first. `send`, `throw` and `close` do the same if they are called by a task other than the awaiting one. Operations
    come from the methods of a queue pair.
    """

    # Few Python objects: each such field takes time in the life of every operation.
    cdef WorkQueue queue
    cdef _Extra extra                   # None if the operation needs none of these fields
    cdef InFlightCount pins                      # in-flight counter of its memory
    cdef object keepalive               # object kept alive while the request is in flight: the caller's `local`
    cdef object value                   # result to return, or exception to raise
    cdef object waiter                  # future that the awaiting task waits for
    cdef PyObject *awaiter              # task that awaits the operation: see `_caller`
    cdef uint64_t wr_id                 # `wr_id`, valid while the operation has a place
    cdef uint64_t bytes
    cdef uint64_t turn                  # number of the loop's turn in which the awaiting task suspended
    cdef uint32_t requests              # number of requests: 1, in a batch more
    cdef uint32_t vendor_err
    cdef uint32_t qp_num                # queue pair of a failed receive of a shared receive queue
    cdef int status                     # enum ibv_wc_status
    cdef int scratch                    # index in the queue's scratch memory; negative: none
    cdef uint8_t opcode                 # enum ibv_wr_opcode, of a send
    cdef uint8_t state
    cdef uint8_t phase
    cdef bint raises                    # whether `value` is an exception to raise
    cdef bint atomic                    # whether the result is the old value, which the device writes to scratch memory
    cdef bint held_by_queue             # whether the queue holds a reference, as it waits for a place and is awaited
    cdef bint grows                     # whether it is chained, and may grow: see `FrameSender`
    cdef bint unpinned                     # whether the operation is part of a batch, which pins its memory
    cdef object __weakref__             # see `_Extra`

    def __init__(self):
        raise TypeError("operations come from the methods of a queue pair")

    @classmethod
    def __class_getitem__(cls, item):
        """Return ``Operation[item]``, a `types.GenericAlias` for annotations; `item` is the type of the result."""
        return types.GenericAlias(cls, item)

    # ---- Inspection

    def __repr__(self):
        names = {NEW: "new", WAITING: "waits for a place", CHAINED: "to be posted", POSTED: "posted", DONE: "done"}
        what = "BATCH" if _is_batch(self) else self._opcode_name()
        return f"<Operation {what} on {self.queue.handle!r} ({names[self.state]})>"

    cdef str _opcode_name(self):
        # Return the name of the request's kind, for repr.
        if self.queue.receives:
            return "RECV"
        return SendOpcode(self.opcode).name

    def done(self):
        """Poll for completions once, without waiting, and return whether the operation has completed, successfully or
        not.

        :raises AffinityError: the caller is not on the thread and event loop that own the queue.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        :raises ForkedProcessError: the request was posted in the parent process, before this process was forked.
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
        """Whether the operation is known to have completed. Unlike `done`, this does not poll, and it can be read from
        any thread."""
        return self._has_ended()

    cdef inline bint _has_ended(self) noexcept:
        # Whether the operation has completed; can be called from any thread. The outcome was written before `state` and
        # does not change.
        return byte_read(&self.state) == DONE

    def result(self):
        """Return the result that awaiting the operation would return, or raise the error that it would raise.

        This can be called any number of times and from any thread. It does not poll: see `done`.

        :raises asyncio.InvalidStateError: the operation is not known to be done.
        :raises WorkCompletionError: the request completed with an error status. See the class for other errors.
        """
        if not self._has_ended():
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        return self._outcome()

    cdef object _outcome(self):
        # Return the result of an operation that has ended, or raise its exception, always the same object.
        cdef section within
        if self.status != SUCCESS:
            section_enter(&within, <PyObject *>self)    # concurrent callers get one exception object
            try:
                if not self.raises:
                    self._fail(self._explained_failure())
            finally:
                section_leave(&within)
        if self.raises:
            raise self.value
        return self.value

    cdef int _fail(self, object error) except -1:
        # Make `error` the exception that the operation raises. The caller ends the operation.
        self.value = error
        self.raises = True
        return 0

    cdef object _failure(self):
        # Return the exception with which the operation ended; None if it succeeded.
        if self.raises:
            return self.value
        if self.status == SUCCESS:
            return None
        if _is_batch(self):
            return BatchError([(<Operation>each)._failure() for each in self.extra.elements])
        opcode = WcOpcode.RECV if self.queue.receives else _wc_opcodes.get(self.opcode)
        return WorkCompletionError(_status(self.status), opcode, self.vendor_err, self.queue.qp_num or self.qp_num)

    cdef object _explained_failure(self):
        # Return the exception that the operation raises: its failure, unless the queue pair's user explains it.
        cdef QpWorkState requests = self.queue.requests
        failure = self._failure()
        return failure if requests is None or requests.explain is None else requests.explain(failure)

    cdef inline int _take_old_value(self) except -1:
        # Copy the result of a successful atomic request before its scratch memory is reused.
        if self.atomic:
            self.value = (<uint64_t *>self.queue._scratch_of(self))[0]
        return 0

    # ---- Memory

    cdef inline int _pin(self, InFlightCount pins) except -1:
        # Count the request as a user of the memory that `pins` belongs to, until `_unpin`. Raise ClosedResourceError if
        # that memory is closed.
        if self.unpinned:
            pins._check()
        else:
            pins._add(1, self.queue.receives)
        if self.pins is None:
            self.pins = pins
            return 0
        return self._pin_more(pins)

    cdef int _pin_more(self, InFlightCount pins) except -1:
        # Record a second or later pin.
        cdef _Extra extra = _extra(self)
        if extra.pins is None:
            extra.pins = []
        extra.pins.append(_run(pins))
        return 0

    cdef inline int _unpin(self) except -1:
        # Release the pins, once. This may run Python code, and is therefore among the last steps.
        if self.extra is not None and self.extra.pins is not None:
            return _discard_runs(self._all_pins(), self.queue.receives)
        return 0 if self.pins is None else self.pins._discard(1, self.queue.receives)

    cdef list _all_pins(self):
        # Return the pins, each a _Run; the operation keeps them.
        cdef list pins = [] if self.pins is None else [_run(self.pins)]
        if self.extra is not None and self.extra.pins is not None:
            pins += self.extra.pins
        return pins

    cdef list _take_pins(self):
        # Take the pins, each a _Run, out of the operation and return them; the caller releases them.
        cdef list pins = self._all_pins()
        self.pins = None
        if self.extra is not None:
            self.extra.pins = None
        return pins

    # ---- Awaiting

    # A thread that finds the phase NOT_AWAITED, with the GIL or in the section, takes the operation. In the phase
    # BEGINNING Python code may run, and every other await is refused. From then on only the awaiting task continues or
    # stops the await, and a task runs in one place at a time.

    def __await__(self):
        """Return the operation itself, as the iterator for ``await``.

        :raises RuntimeError: the operation is or was awaited, or is part of a batch.
        :raises AffinityError: the operation is awaited, and the caller is not on the thread and event loop that own the
            queue.
        """
        if self.phase != NOT_AWAITED:
            self._raise_already_awaited()
        return self

    def __iter__(self):
        # Called by `yield from operation.__await__()`.
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """Start or continue the await, like ``send`` of any coroutine.

        :param value: ignored.
        :returns: a future that the task has to wait for, or None if the task should run again in the loop's next turn.
        :raises StopIteration: the operation is done; ``value`` of the exception is the result. If the request failed,
            its exception is raised instead: see the class.
        :raises AffinityError: the caller is not on the thread and event loop that own the queue.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        :raises ForkedProcessError: the request was posted in the parent process, before this process was forked.
        :raises BrokenResourceError: the completion queue is broken, so that the operation would never complete.
        :raises RuntimeError: another task awaits the operation, or the operation was awaited before or is part of a
            batch; or no asyncio event loop is running.
        """
        cdef PyObject *result = NULL
        cdef int kind = operation_send(<PyObject *>self, <PyObject *>value, &result)
        returned = <object>result
        Py_DECREF(returned)
        if kind == PYGEN_RETURN:
            raise StopIteration(returned)
        return returned

    def throw(self, kind, value=None, traceback=None):
        """Stop awaiting and raise the given exception, like ``throw`` of any coroutine; used to cancel the awaiting
        task.

        A posted request continues. This method never returns.

        :param kind: exception type or exception.
        :param value: exception, if `kind` is a type; None for a new one of that type.
        :param traceback: traceback to raise the exception with; None to leave the exception's own.
        :raises AffinityError: the caller is not on the thread and event loop that own the queue; nothing is done.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain; nothing is done.
        :raises RuntimeError: another task awaits the operation; nothing is done.
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
        """Stop awaiting, like ``close`` of any coroutine, so that the operation can no longer be awaited. A posted
        request continues. If another task awaits an operation that is done, do nothing: that task gets the result.

        :raises AffinityError: the caller is not on the thread and event loop that own the queue; nothing is done.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain; nothing is done.
        :raises RuntimeError: another task awaits the operation, which is not done; nothing is changed.
        """
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            if self._may_stop_awaiting() or self._is_orphaned():
                self._stop_awaiting()
            elif self.state != DONE:    # else the awaiting task gets the outcome, and there is nothing to stop
                self._raise_already_awaited()
        finally:
            section_leave(&within)

    cdef bint _may_stop_awaiting(self) except -1:
        # Whether the caller is the task that awaits the operation, or may become that task.
        if self.phase == NOT_AWAITED:
            if self.queue is not None and not _owner_gone(self.queue.handle):
                _check_owner(self.queue.handle)
            return True
        if self.phase == SUSPENDED or self.phase == YIELDING:
            return self.awaiter == _caller(self.queue)
        return self.phase != BEGINNING

    cdef bint _is_orphaned(self) except -1:
        # Whether the awaiting task will never continue: its loop is closed, or belongs to the process that this one was
        # forked from. The task is then dropped, and its coroutine closes this operation from any task or thread. Before
        # that, the future that the task waits for keeps the task alive.
        return self.phase == SUSPENDED and (self.waiter.get_loop().is_closed() or self.queue.handle.closed)

    cdef int _raise_already_awaited(self) except -1:
        # Raise the error for an operation that is or was already awaited: RuntimeError, or AffinityError if the caller
        # is not the owner.
        if self.phase == IN_BATCH:
            raise RuntimeError(f"{self!r} is part of a batch: await the operation that post() returns")
        if self.phase == FINISHED:
            raise RuntimeError(f"{self!r} was awaited before: an operation can be awaited once")
        _check_owner(self.queue.handle)
        raise RuntimeError(f"{self!r} is awaited by another task: an operation can be awaited once")

    cdef int _stop_awaiting(self) except -1:
        # End the await without a result; a message taken for it goes back to the inbox.
        if self.phase == IN_BATCH:      # a part of a batch cannot be awaited
            return 0
        if self.phase == SUSPENDED:
            self._unsuspend()
        if self.extra is not None and self.extra.awaits_message and self.phase != FINISHED:
            self.extra.inbox._withdraw(self)
        self.phase = FINISHED
        return 0

    # The methods with the argument `result` return PYGEN_NEXT and store in `result` a future to wait for, or None to
    # run again in the next turn; or they return PYGEN_RETURN and store the operation's result; or they raise the
    # operation's exception.

    cdef int _begin(self, PyObject **result) except -1:
        if self.queue is None:
            raise TypeError("operations come from the methods of a queue pair")
        self.queue._poll_for(self, True)  # refuses a wrong caller before anything has changed
        if self.phase != NOT_AWAITED:   # changed by another thread, or by Python code that ran in between
            self._raise_already_awaited()
        turn_join(&self.queue.share)
        if self.state == DONE and not turn_is_over(&self.queue.share, 1, self.bytes):
            return self._deliver(result)
        return self._begin_waiting(result)

    cdef int _begin_waiting(self, PyObject **result) except -1:
        # Suspend or yield. After an error, the operation can be awaited as if nothing had happened.
        self.phase = BEGINNING
        try:
            self.awaiter = _caller(self.queue)
            return self._suspend(result) if self.state != DONE else self._yield(result)
        except BaseException:
            if self.phase == BEGINNING:
                self.phase = NOT_AWAITED
            raise

    cdef int _yield(self, PyObject **result) except -1:
        # The operation is done; let other tasks run first.
        self.phase = YIELDING
        self.turn = turn_now.number
        Py_INCREF(None)
        result[0] = <PyObject *>None
        return PYGEN_NEXT

    cdef int _suspend(self, PyObject **result) except -1:
        # Wait for a new future, which the completion sets.
        loop = self.queue._loop_of_caller()
        if self.queue.dispatcher is not None:
            self.queue.dispatcher._check()
        waiter = loop.create_future()
        waiter._asyncio_future_blocking = True
        if self.state == DONE:          # completed by another thread or a finalizer before the waiter was known
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
        # Forget the future: nothing waits for it any longer.
        self.waiter = None
        return self.queue._unawaited(self) if self.state != DONE else 0

    cdef int _deliver(self, PyObject **result) except -1:
        # End the await with the outcome.
        self.phase = FINISHED
        if self.waiter is not None:
            self.waiter = None
        if self.extra is not None:
            self.extra._take_message()  # the message is delivered
        if self.status != SUCCESS or self.raises:
            self._outcome()
        Py_INCREF(self.value)
        result[0] = <PyObject *>self.value
        return PYGEN_RETURN


cdef int operation_send(PyObject *operation, PyObject *value, PyObject **result) except -1:
    # The `am_send` slot of Operation: `await` calls it first with None, and then with the value that the loop sends. It
    # returns the values described above.
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
    # Do the work of `operation_send` in the section.
    result[0] = NULL
    if self.phase == NOT_AWAITED:
        try:
            return self._begin(result)
        except AffinityError:           # a wrong caller, which has not started an await
            raise
        except BaseException:
            if self.phase == NOT_AWAITED and self.extra is not None and self.extra.awaits_message:
                self._stop_awaiting()   # lets another task wait for the message
            raise
    if (self.phase != SUSPENDED and self.phase != YIELDING) or self.awaiter != _caller(self.queue):
        self._raise_already_awaited()
    turn_advance(self.turn)             # the loop has gone round since the task suspended
    if self.state != DONE:              # the future was completed from outside
        self._unsuspend()
        return self._begin_waiting(result)
    return self._deliver(result)


cdef PyObject *_caller(WorkQueue queue) except? NULL:
    # Return the identity of the caller, for comparison only: the running task, the running loop if no task is running,
    # or NULL. No reference is held: the awaiting task outlives every caller that could disturb it, and a later object
    # at the same address does no harm.
    cdef Affinity owner = queue.handle.affinity
    # Up to Python 3.11 asyncio makes a system call to find the running loop.
    is_owner = _is_bound(owner) and owner._forks == Affinity._fork_count() and owner._is_owner()
    loop = owner.loop if is_owner else _get_running_loop()
    if loop is None:
        return NULL
    task = _current_tasks.get(loop) if _current_tasks is not None else _current_task(loop)
    if task is None:
        return <PyObject *>loop
    return <PyObject *>task


cdef inline bint _is_batch(Operation operation) noexcept:
    return operation.extra is not None and operation.extra.elements is not None


cdef inline bint _is_ring(Operation operation) noexcept:
    # Whether the operation stands for the receives of a ring.
    return operation.extra is not None and operation.extra.ring is not None


cdef inline bint _binds(Operation operation) noexcept:
    # Whether the request binds a memory window.
    return operation.extra is not None and operation.extra.window is not None


cdef _Extra _extra(Operation operation):
    # Return the operation's rarely needed fields. The first call adds them.
    cdef _Extra extra = operation.extra
    if extra is None:
        extra = _Extra.__new__(_Extra)
        extra.operation = <PyObject *>operation
        operation.extra = extra
    return extra


cdef _Run _run(InFlightCount pins):
    # Return a new _Run of one request.
    cdef _Run run = _Run.__new__(_Run)
    run.pins = pins
    run.count = 1
    return run


cdef int _discard_runs(object runs, bint receives) except -1:
    # Release each of the pins, even if one of the releases raises.
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
    # Return the `WcStatus` with this number; the number itself if there is none.
    try:
        return WcStatus(status)
    except ValueError:                  # a status newer than the enumeration
        return status


cdef class Received:
    """Result of a receive, returned by awaiting the operation of `QueuePairVerbs.receive`.

    :param local: the memory that was passed to `QueuePairVerbs.receive`.
    :param byte_len: number of bytes received, without the global routing header of a datagram.
    :param written: True if the sender wrote the data to other memory, with an RDMA WRITE with immediate data: ``local``
        is unchanged.
    :param immediate: immediate data of the sender, 0..2**32-1; None if there is none.
    :param invalidated_rkey: key that the sender invalidated; None if it invalidated none.
    :param qp_num: number of the queue pair that received the message.
    :param src_qp: queue pair number of the sender of a datagram.
    :param route: global routing header of a datagram, 40 bytes; None if there is none.
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
        raise TypeError("a Received comes from awaiting a receive")

    def __repr__(self):
        return f"<Received {self.byte_len} bytes>"

    @property
    def data(self):
        """A `memoryview` of the received bytes in registered memory, which is overwritten when the memory is posted
        again.

        The view is empty for an RDMA WRITE with immediate data, even if ``byte_len`` is not 0: ``local`` contains no
        part of the data. It is also empty if ``local`` is None.

        :raises ClosedResourceError: the region is closed, or the buffer was released to its pool.
        :raises ValueError: the message was received into several pieces of memory; read the pieces in ``local``
            instead.
        """
        whole = self.local if not self.written else None
        if isinstance(whole, (list, tuple)):
            if len(whole) != 1:
                raise ValueError(f"the message is in {len(whole)} pieces of memory: read these")
            whole = whole[0]
        return memoryview(b"") if whole is None else whole.buffer[: self.byte_len]
