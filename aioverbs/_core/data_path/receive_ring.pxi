# Part of data_path.pyx: receives that are posted again and again, and share one slot.

cdef enum:
    POSTED_AT_ONCE = 16                 # receives for each call of the verb


@cython.final
@cython.no_gc_clear                     # as Operation: its references keep alive what pins its memory
cdef class ReceiveRing:
    """Receives of equal size in one piece of memory, which fill an inbox.

    Any number of them costs one object and one slot: they share an operation, and the number of each is the element in
    its `wr_id`. `post_receives` posts them.

    When a message arrives that `UnreadMessages` does not take, its bytes are copied and the inbox's ``wrap`` is called
    with the index of the receive, the bytes, the immediate data or None, and whether the sender wrote the data
    elsewhere (RDMA WRITE with immediate data), so that there are no bytes. The receive is not posted then: ``wrap`` may
    post it again. When receives fail, the inbox's ``unused`` is called with None, once until receives of the ring are
    posted again.

    :param inbox: inbox of the receive queue of a queue pair.
    :param memory: memory registered with ``LOCAL_WRITE``, which begins with that of the receives.
    :param count: number of receives, 1..1024.
    :param size: bytes of each receive, at least 1.
    :raises ValueError: `count` or `size` is out of range, or the memory is shorter than all receives.
    """

    cdef Inbox inbox
    cdef RegionSlice memory
    cdef readonly uint32_t count
    cdef uint32_t size                  # bytes of each receive
    cdef Operation operation            # stands for all receives that are posted; None if there are none
    cdef uint32_t pinned                # how often `memory` is pinned
    cdef UnreadMessages messages        # takes what arrives first; None if all goes to the inbox
    cdef bint failed                    # whether a receive has failed since the last ones were posted

    def __init__(self, Inbox inbox not None, RegionSlice memory not None, count, size):
        if not 1 <= count <= SLOTS_ELEMENTS:
            raise ValueError(f"`count` must be from 1 to {SLOTS_ELEMENTS}, got {count}")
        if not 1 <= size <= <Py_ssize_t>MAX_MESSAGE_BYTES:
            raise ValueError(f"`size` must be from 1 to {<Py_ssize_t>MAX_MESSAGE_BYTES}, got {size}")
        if len(memory) < count * size:
            raise ValueError(f"{count} receives of {size} bytes need {count * size} bytes, got {len(memory)}")
        self.inbox = inbox
        self.memory = memory
        self.count = count
        self.size = size

    cdef int _post(self, QpWorkState requests, uint32_t first, uint32_t count) except -1:
        # Post receives; see `post_receives`. The caller has begun the verb and checked the state of the queue pair.
        cdef WorkQueue queue = self.inbox.queue
        cdef uint32_t done = 0, step
        if requests.receive_queue is not queue:
            raise ValueError(f"{requests.handle!r} does not have the receive queue of this ring")
        if not count or count > self.count or first > self.count - count:
            raise IndexError(f"receives {first} to {first + count - 1} are not among the {self.count} of the ring")
        if queue.closing:
            raise ClosedResourceError(f"{queue.handle!r} is closed, or about to be")
        queue.dispatcher._check()
        if queue.first != NULL or queue.used + count > queue.limit:
            raise WouldBlock
        _check_piece(queue, self.memory, requests.pd, LOCAL_WRITE)
        self.failed = False
        while done < count:
            step = min(count - done, <uint32_t>POSTED_AT_ONCE)
            self._post_some(queue, first + done, step)
            done += step
        return 0

    cdef int _post_some(self, WorkQueue queue, uint32_t first, uint32_t count) except -1:
        # Post up to POSTED_AT_ONCE receives with one call of the verb. Raise VerbsError if it refuses one; those before
        # are posted.
        cdef v.ibv_recv_wr wrs[POSTED_AT_ONCE]
        cdef v.ibv_sge sges[POSTED_AT_ONCE]
        cdef v.ibv_recv_wr *bad = NULL
        cdef uint32_t at
        cdef int error
        self.memory.pins._add(count, count)
        self.pinned += count
        try:
            self._occupy(queue, count)
        except BaseException:
            self._unpin(count)
            raise
        for at in range(count):
            sges[at].addr = self.memory._address + <uint64_t>(first + at) * self.size
            sges[at].length = self.size
            sges[at].lkey = self.memory._lkey
            wrs[at].wr_id = slots_with_element(self.operation.wr_id, first + at)
            wrs[at].sg_list = &sges[at]
            wrs[at].num_sge = 1
            wrs[at].next = &wrs[at + 1] if at + 1 < count else NULL
        error = v.verbs_post_recv((<QueuePair>queue.handle).pointer, wrs, &bad)
        at = count
        if error:
            at = 0
            while at < count - 1 and &wrs[at] != bad:
                at += 1
        queue.posted += at
        queue.bytes += <uint64_t>at * self.size
        queue.doorbells += 1
        if not error:
            return 0
        self.inbox.posted -= count - at
        self._vacate(queue, count - at)
        self._unpin(count - at)
        return queue.handle._check("ibv_post_recv", error)

    cdef int _occupy(self, WorkQueue queue, uint32_t count) except -1:
        # Count places for receives, and take a slot for the first ones. Raise MemoryError without memory.
        cdef Operation operation = self.operation
        if operation is None:
            operation = _new(queue, 0, False)
            _extra(operation).ring = self
            operation.requests = 0
            operation.wr_id = slots_take(queue.slots, <void *>operation, queue.kind)
            if not operation.wr_id:
                raise MemoryError("no slot for one more request")
            Py_INCREF(operation)        # the slot's reference
            operation.state = POSTED
            self.operation = operation
        operation.requests += count
        self.inbox.posted += count
        queue.used += count
        if queue.used > queue.high_water:
            queue.high_water = queue.used
        queue._count_in_flight(count)
        return queue._need_turns()

    cdef int _vacate(self, WorkQueue queue, uint32_t count) except -1:
        # Free the places of receives, and the slot if no other ones are posted.
        cdef Operation operation = self.operation
        queue.used -= count
        queue._count_in_flight(-<int>count)
        operation.requests -= count
        if operation.requests:
            return 0
        self.operation = None
        slots_give(queue.slots, operation.wr_id)
        byte_write(&operation.state, DONE)
        Py_DECREF(operation)            # the slot's reference
        return 0

    cdef int _unpin(self, uint32_t count) except -1:
        # Count receives back that no longer use the memory.
        self.pinned -= count
        return self.memory.pins._discard(count, count)

    cdef list _take_pins(self):
        # Return the pins of the posted receives, each a _Run, which the caller releases.
        cdef _Run run = _run(self.memory.pins)
        run.count, self.pinned = self.pinned, 0
        return [run]

    cdef int _completed(self, v.ibv_wc *wc) except -1:
        # Handle a completion of one of the receives. The memory stays pinned until its bytes are copied.
        cdef WorkQueue queue = self.inbox.queue
        cdef Operation operation = self.operation
        cdef uint32_t index = slots_element(wc.wr_id)
        try:
            if <int>wc.status != SUCCESS:
                operation.status = wc.status
                operation.vendor_err = wc.vendor_err
                operation.qp_num = wc.qp_num
                queue._failed(operation)
        finally:
            if operation.state != DONE:  # Python that ran meanwhile may have abandoned all receives, this one included
                self._retire(queue, operation, index, wc)
        return 0

    cdef int _retire(self, WorkQueue queue, Operation operation, uint32_t index, v.ibv_wc *wc) except -1:
        # Free the place of a completed receive, and give its message or its failure to the inbox.
        queue.completed += 1
        self._vacate(queue, 1)
        self.inbox.posted -= 1
        try:
            if <int>wc.status == SUCCESS:
                self._message(index, wc)
            elif not self.failed:
                self.failed = True
                self.inbox._receive_failed(operation, None)
        finally:
            if self.pinned:             # else the queue has taken the pins while the inbox's function ran
                self._unpin(1)
            self._proceed(queue)
        return 0

    cdef int _message(self, uint32_t index, v.ibv_wc *wc) except -1:
        # Copy the bytes of a message and give it to the inbox.
        cdef bint written = wc.opcode == v.IBV_WC_RECV_RDMA_WITH_IMM
        cdef uint32_t length = 0 if written else min(wc.byte_len, self.size)
        cdef char *data = <char *>self.memory._address + <uint64_t>index * self.size
        cdef bint has_immediate = wc.wc_flags & v.IBV_WC_WITH_IMM and not wc.wc_flags & v.IBV_WC_WITH_INV
        message = None
        try:
            if has_immediate and not written and self.messages is not None:
                message = self.messages._arrived(index, data, length, v.ntohl(wc.imm_data))
            if message is None:
                immediate = v.ntohl(wc.imm_data) if has_immediate else None
                message = self.inbox.wrap(index, data[:length], immediate, written)
        except Exception as error:
            return self.inbox._wrap_failed(error)
        return self.inbox._add_message(message)

    cdef int _abandon(self) except -1:
        # End all receives, whose completions will not come. The caller has set the outcome of the operation.
        cdef WorkQueue queue = self.inbox.queue
        cdef Operation operation = self.operation
        cdef uint32_t count
        if operation is None:
            return 0
        count = operation.requests
        queue.completed += count
        self._vacate(queue, count)
        self.inbox.posted -= count
        try:
            self.inbox._receive_failed(operation, None)
        finally:
            if self.pinned:             # else the queue keeps the pins, because the device may still write
                self._unpin(count)
            self._proceed(queue)
        return 0

    cdef int _proceed(self, WorkQueue queue) except -1:
        # Use the places that have become free, and report that the queue is empty.
        if queue.first != NULL:
            queue._advance()
        if not queue.used and queue.idle is not None:
            queue.idle()
        return 0
