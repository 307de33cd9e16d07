# Part of work.pyx: what is awaited.

@cython.final
@cython.freelist(256)
@cython.no_gc_clear                 # what pins its memory is there until it is freed
cdef class Operation:
    """A work request from its posting to its end. It can be awaited, once, and need not be.

    It was posted, or stands in the order of those that wait for a place in their queue, when it is handed out. Dropping
    one that waits for a place withdraws it. One that was posted goes on whatever becomes of who awaits it: cancelled,
    timed out or forgotten, its memory stays pinned and its place taken until it completes.

    It is a `collections.abc.Coroutine`: tasks and cancel scopes take it. Made by the methods of a queue pair.
    """

    cdef WorkQueue queue
    cdef v.ibv_send_wr send_wr          # one of both
    cdef v.ibv_recv_wr recv_wr
    cdef v.ibv_sge sge[2]
    cdef v.ibv_sge *more_sges           # where two are too few
    cdef v.ibv_mw_bind_info bind_info
    cdef MemoryWindow window            # to be bound
    cdef uint64_t number                # `wr_id` since it has a place
    cdef uint64_t bytes
    cdef uint32_t requests              # 1, of a batch more
    cdef uint32_t posted                # of a batch, where the verb refused the others; 0: all
    cdef uint32_t vendor_err
    cdef uint32_t qp_num                # where it failed, of a shared receive
    cdef int status                     # enum ibv_wc_status
    cdef int scratch                    # its part of the queue's scratch memory; -1: none
    cdef uint64_t turn                  # in which whoever awaits let the loop go round
    cdef uint8_t state
    cdef uint8_t phase
    cdef bint atomic                    # gives what was there before, which the device writes to its scratch memory
    cdef bint held                      # its queue keeps it while it waits for a place: somebody awaits it
    cdef Pins pins                      # of its memory
    cdef list more_pins
    cdef bint loose                     # not pinned now: a part of a batch that is not posted
    cdef object keep                    # alive as long as it is: what it was given
    cdef object waiter                  # the future of `loop` that who awaits waits for
    cdef object loop
    cdef object value                   # what it gives
    cdef object error                   # what it ended by, where that was no completion
    cdef Operation covered              # posted before it without a completion of its own: done when this is
    cdef list elements                  # of a batch
    cdef Inbox inbox                    # where it goes when it is done, of a receive; that it asks, of a message
    cdef bint asks
    cdef PyObject *earlier              # among those that wait for a place
    cdef PyObject *later

    def __init__(self):
        raise TypeError("operations come from the methods of a queue pair")

    @classmethod
    def __class_getitem__(cls, item):
        return types.GenericAlias(cls, item)

    def __dealloc__(self):
        if self.state == WAITING:
            self.queue._unlink(self)
        if self.state != DONE:
            self._unpin()
        elif self.asks and self.phase == FRESH and self.error is None:
            self.inbox.ready.appendleft(self.value)     # nobody took it
        free(self.more_sges)

    # ---- Looking

    def __repr__(self):
        names = {NEW: "new", WAITING: "waits for a place", CHAINED: "to be posted", POSTED: "posted", DONE: "done"}
        what = "BATCH" if self.elements is not None else self._opcode_name()
        return f"<Operation {what} on {self.queue.handle!r} ({names[self.state]})>"

    cdef str _opcode_name(self):
        if self.queue.receives:
            return "RECV"
        return "BIND_MW" if self.window is not None else SendOpcode(<int>self.send_wr.opcode).name

    def done(self):
        """Whether it has ended, well or not. This looks for completions, and never waits.

        :raises AffinityError: another thread or event loop owns it.
        """
        self.queue._look(self, False)
        return self.state == DONE

    def result(self):
        """What awaiting it would give, or raise, where it is done; as often as you like.

        :raises asyncio.InvalidStateError: it is not done.
        """
        if self.state != DONE:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        return self._outcome()

    cdef object _outcome(self):
        if self.error is not None:
            raise self.error
        if self.status != SUCCESS:
            self.error = self._failure()
            raise self.error
        return self.value

    cdef object _failure(self):
        # What it ended by, as an error.
        if self.elements is not None:
            errors = [(<Operation>each).error or (<Operation>each)._error_of_status() for each in self.elements]
            return BatchError(errors)
        return self._error_of_status()

    cdef object _error_of_status(self):
        if self.status == SUCCESS:
            return None
        opcode = WcOpcode.RECV if self.queue.receives else _wc_opcodes.get(<int>self.send_wr.opcode)
        if self.window is not None:
            opcode = WcOpcode.BIND_MW
        return WorkCompletionError(_status(self.status), opcode, self.vendor_err, self.queue.qp_num or self.qp_num)

    cdef int _take_old_value(self) except -1:
        # It succeeded: what an atomic gives lies in its scratch memory, which is another one's soon.
        if self.atomic:
            self.value = (<uint64_t *>_sges(self)[0].addr)[0]
        return 0

    # ---- Memory

    cdef int _pin(self, Pins pins) except -1:
        if self.loose:
            pins.check()
        else:
            pins._add(self.queue.receives)
        if self.pins is None:
            self.pins = pins
        elif self.more_pins is None:
            self.more_pins = [pins]
        else:
            self.more_pins.append(pins)
        return 0

    cdef int _unpin_all(self) except -1:
        # This may run Python code: all else is done before.
        if self.elements is None:
            return self._unpin()
        raised = None
        for each in self.elements:
            try:
                (<Operation>each)._unpin()
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
        return 0

    cdef int _unpin(self) except -1:
        cdef Pins pins = self.pins
        cdef list more
        cdef bint receives
        if pins is None:
            return 0
        more = self.more_pins
        receives = self.queue.receives
        self.pins = self.more_pins = None
        if self.loose:
            return 0
        if more is None:
            pins._discard(receives)
            return 0
        try:
            pins._discard(receives)
        finally:
            while more:
                pins = more.pop()
                pins._discard(receives)
        return 0

    cdef int _loosen(self) except -1:
        # Its memory is not pinned until it is posted.
        self.loose = True
        if self.pins is not None:
            self.pins._discard(False)
        if self.more_pins is not None:
            for each in self.more_pins:
                (<Pins>each)._discard(False)
        return 0

    cdef int _fasten(self) except -1:
        cdef Py_ssize_t held = 0
        if self.pins is not None:
            self.pins._add(False)
        if self.more_pins is not None:
            try:
                for each in self.more_pins:
                    (<Pins>each)._add(False)
                    held += 1
            except BaseException:
                self.pins._discard(False)
                for each in self.more_pins[:held]:
                    (<Pins>each)._discard(False)
                raise
        self.loose = False
        return 0

    # ---- Awaiting

    def __await__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As of every coroutine: begin, or go on."""
        cdef PyObject *result = NULL
        cdef int kind = operation_send(<PyObject *>self, <PyObject *>value, &result)
        returned = <object>result
        Py_DECREF(returned)
        if kind == PYGEN_RETURN:
            raise StopIteration(returned)
        return returned

    def throw(self, kind, value=None, traceback=None):
        """As of every coroutine: whoever awaits it is cancelled. What was posted goes on."""
        self._leave()
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        raise value.with_traceback(traceback) if traceback is not None else value

    def close(self):
        """As of every coroutine: nobody awaits it any more. What was posted goes on."""
        self._leave()

    cdef int _leave(self) except -1:
        if self.phase == SUSPENDED:
            self.waiter = self.loop = None
            if self.state != DONE:
                self.queue._unawaited(self)
        if self.asks and self.phase != OVER:
            self.inbox._withdraw(self)
        self.phase = OVER
        return 0

    cdef int _begin(self, PyObject **result) except -1:
        if self.queue is None:
            raise TypeError("operations come from the methods of a queue pair")
        self.queue._look(self, True)
        if self.state != DONE:
            return self._suspend(result)
        if not turn_is_over(&self.queue.share, self.bytes):
            return self._deliver(result)
        self.phase = YIELDING
        self.turn = turn_now.number
        Py_INCREF(None)
        result[0] = <PyObject *>None
        return PYGEN_NEXT

    cdef int _suspend(self, PyObject **result) except -1:
        loop = self.queue._loop_of_caller()
        if self.queue.completer is not None:
            self.queue.completer._check()
        waiter = loop.create_future()
        waiter._asyncio_future_blocking = True
        if self.state == DONE:          # meanwhile, by another thread or a finalizer: nobody knew of this waiter
            return self._deliver(result)
        self.waiter = waiter
        self.loop = loop
        self.phase = SUSPENDED
        self.turn = turn_now.number
        self.queue._awaited(self)
        Py_INCREF(waiter)
        result[0] = <PyObject *>waiter
        return PYGEN_NEXT

    cdef int _deliver(self, PyObject **result) except -1:
        self.phase = OVER
        self.waiter = self.loop = None
        value = self._outcome()
        Py_INCREF(value)
        result[0] = <PyObject *>value
        return PYGEN_RETURN


cdef int operation_send(PyObject *operation, PyObject *value, PyObject **result) except -1:
    # The `am_send` of Operation: what `await` calls, first with None and then with what the loop gives it.
    cdef Operation self = <Operation>operation
    result[0] = NULL
    if self.phase == FRESH:
        try:
            return self._begin(result)
        except BaseException:
            if self.asks:
                self._leave()           # another one may ask
            raise
    if self.phase == PART:
        raise RuntimeError(f"{self!r} is a part of a batch: await what its post() returns")
    if self.phase == OVER:
        raise RuntimeError(f"{self!r} was awaited before: once is all")
    turn_went_round(self.turn)          # the loop calls who let it
    if self.state != DONE:              # the future was ended by somebody else
        self.queue._unawaited(self)
        return self._suspend(result)
    return self._deliver(result)


awaiting_by(<PyTypeObject *>Operation, <send_function>operation_send)
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

    :param local: where, as it was given to `receive`.
    :param byte_len: how many bytes; those of a datagram's route do not count.
    :param immediate: the sender's immediate data, 32 bits; None: there were none.
    :param invalidated_rkey: the key that the sender invalidated; None: it did not.
    :param qp_num: of the queue pair that it arrived at.
    :param src_qp: the sender's number, of a datagram.
    :param route: of a datagram: the 40 bytes of its global routing header; None where it had none.
    """

    cdef readonly object local
    cdef readonly uint32_t qp_num
    cdef readonly uint32_t byte_len
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

        :raises ValueError: it was received into several pieces: look there.
        """
        whole = self.local
        if isinstance(whole, (list, tuple)):
            if len(whole) != 1:
                raise ValueError(f"it was received into {len(whole)} pieces: look there")
            whole = whole[0]
        return memoryview(b"") if whole is None else whole.buffer[: self.byte_len]
