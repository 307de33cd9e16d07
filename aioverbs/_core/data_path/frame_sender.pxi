# Part of data_path.pyx: sending of a connection's frames, and short messages that share one.

cdef enum:
    NO_IMMEDIATE = -1
    # As in aioverbs._connection.wire:
    CREDITS_AT = 16                     # of a header: number of the lowest bit of the credits returned
    RETURNED_MASK = 0x3FF               # credits returned
    MESSAGES_HEADER = 0                 # several messages, each after its length
    WHOLE_HEADER = 0x2C000000           # a message in one frame
    HAS_IMMEDIATE_HEADER = 0x10000000   # the message begins with immediate data
    NUMBER_BYTES = 4                    # of immediate data, and of the length of a message, in network byte order
    MESSAGES_PER_UNIT = 2               # of the budget of a turn: a message in a frame costs less than a request


cdef inline bint _turn_is_over(turn_share *share, uint64_t messages, uint64_t bytes) noexcept:
    # Charge one more message of a frame, after `messages`. Return whether other tasks should run first.
    turn_join(share)
    return turn_is_over(share, 0 if messages % MESSAGES_PER_UNIT else 1, bytes)


cdef inline char *_put_number(char *at, uint32_t number) noexcept:
    # Write a number in network byte order, and return the place after it.
    number = v.htonl(number)
    memcpy(at, &number, NUMBER_BYTES)
    return at + NUMBER_BYTES


cdef inline uint32_t _get_number(const char *at) noexcept:
    cdef uint32_t number
    memcpy(&number, at, NUMBER_BYTES)
    return v.ntohl(number)


@cython.final
cdef class FrameSender:
    """Sender of a connection's frames: copies each to a send buffer and posts it, which uses a credit.

    The buffers are used in turn, and from the first one again if none is in flight, so that an end that sends one
    message at a time uses no more memory. Sends of a queue pair complete in order, so those in flight are neighbours.
    An idle connection has used none.

    Short messages share a frame: a send that is posted at the end of the loop's turn, or before the next request of its
    queue. Until then, messages are added to it, each after its length.

    :param owner: owner of the connection, whose loop alone sends.
    :param what: the connection, for error messages.
    :param requester: queue pair to post to.
    :param queue: a queue of the queue pair.
    :param memory: memory that contains the send buffers.
    :param start: number of the first byte of the first buffer.
    :param count: number of the buffers.
    :param size: size of a send buffer in bytes.
    """

    cdef Affinity owner
    cdef object what
    cdef SendVerbs requester
    cdef WorkQueue queue
    cdef readonly RegionSlice memory
    cdef Py_ssize_t begin               # of the first buffer in the memory
    cdef uint32_t size
    cdef uint32_t count                 # of buffers
    cdef uint32_t next                  # buffer that is used next
    cdef uint32_t in_flight             # number of buffers before it that are not known to be free
    # By buffer: its send, or None; only buffers that were used. The reference keeps a send that waits for a place in
    # the send queue from being withdrawn.
    cdef list sends
    cdef Credits credits
    cdef bint refuses                   # whether no user message is sent at once: before the start, and after the end
    # Number of senders in more than one step, which others must not overtake; one that posts a frame is another one.
    cdef public uint32_t in_line
    cdef Py_ssize_t capacity            # size limit of a frame in bytes
    cdef Py_ssize_t max_message         # length of the longest message that the peer accepts, in bytes
    cdef Py_ssize_t max_shared          # the same of one that shares a frame
    cdef Operation shared               # the send of the shared frame; None if no message can be added
    cdef char *shared_at                # its memory
    cdef uint32_t used                  # bytes of the shared frame so far
    cdef bint is_shared                 # whether several messages shared the last shared frame
    cdef turn_share share
    cdef uint64_t added                 # number of messages that were added to a shared frame
    cdef readonly uint64_t posted       # number of frames and messages of the handshake
    cdef readonly uint64_t sent         # number of user messages that `send` and `send_parts` have sent

    def __init__(
        self,
        Affinity owner not None,
        what,
        SendVerbs requester not None,
        WorkQueue queue not None,
        RegionSlice memory not None,
        Py_ssize_t start,
        uint32_t count,
        uint32_t size,
    ):
        self.owner = owner
        self.what = what
        self.requester = requester
        self.queue = queue
        self.memory = memory
        self.size = size
        self.begin = start
        self.count = count
        self.sends = []
        self.refuses = True

    def start(self, Credits credit not None, Py_ssize_t capacity, uint64_t max_message, Py_ssize_t max_shared):
        """Begin to send frames with credits.

        :param credit: credits of this end.
        :param capacity: size limit of a frame in bytes, at most the size of a buffer.
        :param max_message: length of the longest message that the peer accepts, in bytes.
        :param max_shared: length of the longest message that shares a frame, in bytes.
        """
        self.credits = credit
        self.capacity = min(capacity, <Py_ssize_t>self.size)
        self.max_message = <Py_ssize_t>min(max_message, <uint64_t>PY_SSIZE_T_MAX)
        self.max_shared = min(self.max_message, max_shared)
        self.refuses = False

    def refuse(self):
        """From now on, do not send user messages at once: the connection has ended, or sends no more of them."""
        self.refuses = True

    def close(self):
        """Post the shared frame, if that was not done, and add no more messages to it."""
        cdef Operation operation = self.shared
        self.shared = None
        if operation is not None and operation.state == CHAINED:
            operation.queue.flush()

    @property
    def turn_over(self):
        """Number of the loop's turn if so many messages were sent in it that other tasks should run now; else 0."""
        return turn_used_up(&self.share)

    # ---- Buffers

    @property
    def free_buffers(self):
        """Number of send buffers that are free."""
        self._has_buffer()
        return self.count - self.in_flight

    @property
    def unused_memory(self):
        """Address and length of the send buffers if all of them are free; else of no memory."""
        self._has_buffer()
        return self.memory._address + self.begin, 0 if self.in_flight else <uint64_t>self.count * self.size

    @property
    def awaited(self):
        """The oldest send in flight, an `Operation`, if no buffer is free; else None."""
        return None if self._has_buffer() else self.sends[self._oldest()]

    cdef inline uint32_t _oldest(self) noexcept:
        # Return the number of the oldest buffer in flight.
        return self.next - self.in_flight + (self.count if self.next < self.in_flight else 0)

    cdef bint _has_buffer(self) except -1:
        # Whether a buffer is free, after those were freed whose sends have ended.
        cdef uint32_t oldest
        while self.in_flight:
            oldest = self._oldest()
            if not (<Operation>self.sends[oldest])._has_ended():
                break
            self.sends[oldest] = None
            self.in_flight -= 1
        return self.in_flight < self.count

    cdef inline char *_buffer(self) noexcept:
        # Return the memory of the next buffer, which is free.
        if not self.in_flight:
            self.next = 0
        return <char *><uintptr_t>(self.memory._address + self._offset())

    cdef inline Py_ssize_t _offset(self) noexcept:
        # Return where the next buffer begins in the memory.
        return self.begin + <Py_ssize_t>self.next * self.size

    cdef Operation _post(self, uint32_t length, int opcode, uint32_t header, bint later):
        # Post the next buffer, with an opcode and immediate data. If that raises, the buffer is free again.
        cdef RegionSlice local = RegionSlice.__new__(RegionSlice)
        cdef Operation operation
        local._set_part(self.memory, self._offset(), length)
        immediate = header if opcode == SEND_WITH_IMM else None
        if self.next == <uint32_t>len(self.sends):
            self.sends.append(None)
        operation = self.requester._message(opcode, local, immediate, 0, 0, None, None, False, later)
        self.sends[self.next] = operation
        self.next = self.next + 1 if self.next + 1 < self.count else 0
        self.in_flight += 1
        self.posted += 1
        return operation

    cdef Operation _post_frame(self, uint32_t length, uint32_t header, bint later):
        # Post the next buffer as a frame, which uses a credit and returns those that are owed. If that raises, nothing
        # is used.
        cdef uint32_t returned = self.credits.take()
        try:
            return self._post(length, SEND_WITH_IMM, header | returned << CREDITS_AT, later)
        except BaseException:           # such as AffinityError: nothing was posted
            self.credits.undo_take(returned)
            raise

    def post(self, list parts not None, header, *, bint later=False):
        """Post a frame. The caller has made sure that there are a free buffer and a credit.

        :param parts: bytes of the frame, memoryviews of format ``B``.
        :param header: header of the frame, without the number of credits; None for a message of the handshake, which
            has no header and uses no credit.
        :param later: whether to post it together with the next frame, or at the end of the loop's turn.
        :returns: the `Operation` that sends it.
        :raises ValueError: the frame is longer than a buffer. Other errors are those of `SendVerbs`; nothing is posted
            then.
        """
        cdef section within
        cdef Py_ssize_t length = _length_of(parts)
        if length > <Py_ssize_t>self.size:
            raise ValueError(f"a frame of {length:,} bytes does not fit in a buffer of {self.size:,}")
        assert self._has_buffer()
        section_enter(&within, _section(self.queue))
        try:
            self.memory.pins._check()
            _copy_parts(self._buffer(), parts)
            if header is None:
                return self._post(length, SEND, 0, False)
            return self._post_frame(length, header, later)
        finally:
            section_leave(&within)

    # ---- User messages

    def send(self, payload, immediate=None, *, bint nowait=False):
        """Send a user message in one frame, if that is possible without waiting, and if not so many were sent in this
        turn of the loop that other tasks should run.

        :param payload: the message; only contiguous buffers are sent.
        :param immediate: the user's immediate data, 0..2**32-1; None for no immediate data.
        :param nowait: whether to send even though other tasks should run.
        :returns: whether the message was sent. If not, the caller finds out what is wrong with it, or waits.
        :raises AffinityError: another event loop owns the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises ForkedProcessError: the connection was made in the process that this one was forked from.
        :raises ValueError: `immediate` does not fit in 32 bits.
        :raises TypeError: `immediate` is not an integer.
        :raises Exception: any other error of `SendVerbs`; nothing is sent then.
        """
        cdef Py_buffer view
        self.owner._enter(self.what, "send")
        self.owner._leave()
        if type(payload) is bytes:
            return self._send(None, PyBytes_AS_STRING(payload), len(<bytes>payload), immediate, nowait)
        try:
            PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        except (BufferError, TypeError, ValueError):
            return False
        try:
            return self._send(None, <const char *>view.buf, view.len, immediate, nowait)
        finally:
            PyBuffer_Release(&view)

    def send_parts(self, list parts not None, immediate=None, *, bint nowait=False):
        """Do the same as `send`, with a message of several parts.

        :param parts: the message, memoryviews of format ``B``.
        """
        self.owner._enter(self.what, "send")
        self.owner._leave()
        return self._send(parts, NULL, _length_of(parts), immediate, nowait)

    cdef bint _send(self, list parts, const char *data, Py_ssize_t length, immediate, bint nowait) except -1:
        # Do the work of `send`. The message is in `parts`, or at `data`.
        cdef section within
        cdef int64_t number = NO_IMMEDIATE if immediate is None else <int64_t>_uint(immediate, 32, "immediate")
        cdef bint sent
        section_enter(&within, _section(self.queue))
        try:
            sent = (self.shared is not None and number == NO_IMMEDIATE and self._add(parts, data, length)) or (
                (nowait or not turn_used_up(&self.share)) and self._send_alone(parts, data, length, number)
            )
        finally:
            section_leave(&within)
        self.sent += sent
        return sent

    cdef bint _add(self, list parts, const char *data, Py_ssize_t length) except -1:
        # Add a message to the shared frame, if it fits and the budget of the turn is not used up. Return whether
        # that was done.
        cdef Operation operation = self.shared
        cdef v.ibv_send_wr *wr
        cdef uint32_t whole
        if length > self.max_shared or _turn_is_over(&self.share, self.added, length):
            return False
        whole = <uint32_t>length + NUMBER_BYTES
        wr = operation.queue._growing(operation)
        if wr == NULL or whole > self.capacity - self.used:
            self.shared = None
            return False
        _copy(_put_number(self.shared_at + self.used, <uint32_t>length), parts, data, length)
        wr.sg_list[0].length += whole
        operation.bytes += whole
        if operation.state == CHAINED:
            operation.queue.bytes += whole      # one that waits for a place is counted later
        self.used += whole
        self.is_shared = True
        self.added += 1
        return True

    cdef bint _send_alone(self, list parts, const char *data, Py_ssize_t length, int64_t immediate) except -1:
        # Send a message in a frame of its own. If other frames are in flight, later messages can be added to this one.
        # Return False if the caller has to wait.
        cdef uint32_t before = 0 if immediate == NO_IMMEDIATE else NUMBER_BYTES
        if (
            self.refuses
            or self.in_line
            or length > self.max_message
            or length + before > self.capacity
            or not self.credits._has(RESERVED)
            or not self._has_buffer()
        ):
            return False
        self.in_line += 1   # posting makes objects: finalizers that run then must not use the same buffer
        try:
            self._post_alone(parts, data, length, immediate)
        finally:
            self.in_line -= 1
        return True

    cdef int _post_alone(self, list parts, const char *data, Py_ssize_t length, int64_t immediate) except -1:
        # Do the rest of `_send_alone`: a buffer and a credit are there.
        cdef uint32_t before = 0 if immediate == NO_IMMEDIATE else NUMBER_BYTES
        cdef uint32_t header = WHOLE_HEADER
        cdef char *buffer
        cdef Operation operation
        cdef bint shares = (
            immediate == NO_IMMEDIATE
            and (self.in_flight or self.is_shared)
            and length <= self.max_shared
            and length + NUMBER_BYTES <= self.capacity
            and self.credits._has(RESERVED + 1)     # the last one may be missed for long
        )
        self.memory.pins._check()
        buffer = self._buffer()
        if shares:
            before = NUMBER_BYTES
            header = MESSAGES_HEADER
            _put_number(buffer, <uint32_t>length)
        elif immediate != NO_IMMEDIATE:
            header |= HAS_IMMEDIATE_HEADER
            _put_number(buffer, <uint32_t>immediate)
        _copy(buffer + before, parts, data, length)
        operation = self._post_frame(<uint32_t>length + before, header, shares)
        if shares:
            self.shared_at = buffer
            self.used = <uint32_t>length + before
            self.is_shared = False
            self.shared = operation
        return 0


cdef Py_ssize_t _length_of(list parts) except -1:
    # Return the number of bytes of memoryviews of format ``B``.
    cdef Py_buffer view
    cdef Py_ssize_t length = 0
    for each in parts:
        PyObject_GetBuffer(each, &view, PyBUF_SIMPLE)
        length += view.len
        PyBuffer_Release(&view)
    return length


cdef int _copy_parts(char *to, list parts) except -1:
    # Copy the bytes of the parts, one after the other.
    cdef Py_buffer view
    for each in parts:
        PyObject_GetBuffer(each, &view, PyBUF_SIMPLE)
        memcpy(to, view.buf, view.len)
        to += view.len
        PyBuffer_Release(&view)
    return 0


cdef inline int _copy(char *to, list parts, const char *data, Py_ssize_t length) except -1:
    # Copy a message, which is in `parts`, or at `data`.
    if parts is not None:
        return _copy_parts(to, parts)
    memcpy(to, data, length)
    return 0
