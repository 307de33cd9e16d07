# Part of data_path.pyx: frames that short messages of a connection share, and messages that are there to be received.

cdef enum:
    FRAME_LENGTH_BYTES = 4              # of the length before each message, in network byte order
    MESSAGES_PER_UNIT = 2               # of the budget of a turn: a message in a frame costs less than a request


cdef inline bint _turn_is_over(turn_share *share, uint64_t messages, uint64_t bytes) noexcept:
    # Charge one more message of a frame, after `messages`. Return whether other tasks should run first.
    turn_join(share)
    return turn_is_over(share, 0 if messages % MESSAGES_PER_UNIT else 1, bytes)


@cython.final
cdef class SharedFrame:
    """Frame that short messages of a connection share: a send that is posted at the end of the loop's turn, or before
    the next request of its queue. Until then, messages are added to it, each after its length.

    :param owner: owner of the connection, whose loop alone adds messages.
    :param what: the connection, for error messages.
    """

    cdef Affinity owner
    cdef object what
    cdef Operation operation            # the send; None if no message can be added
    cdef RegionSlice memory
    cdef uint32_t used                  # bytes of the frame so far
    cdef uint32_t capacity
    cdef Py_ssize_t max_message
    cdef uint32_t messages              # in the last frame
    cdef turn_share share
    cdef readonly uint64_t added        # number of messages that `add` has added

    def __init__(self, Affinity owner not None, what):
        self.owner = owner
        self.what = what

    def start(self, uint32_t capacity, Py_ssize_t max_message):
        """Set the sizes.

        :param capacity: size limit of a frame in bytes.
        :param max_message: length of the longest message that is added, in bytes.
        """
        self.capacity = capacity
        self.max_message = max_message

    def begin(self, Operation operation not None, RegionSlice memory not None, uint32_t used):
        """Begin a frame: messages can be added from now on.

        :param operation: the send, from `send_later`.
        :param memory: memory of the frame, of which `operation` sends the beginning.
        :param used: number of bytes that the first message takes, its length included.
        """
        self.memory = memory
        self.used = used
        self.messages = 1
        self.operation = operation

    def close(self):
        """Post the frame, if that was not done, and add no more messages to it."""
        cdef Operation operation = self.operation
        self.operation = None
        if operation is not None and operation.state == CHAINED:
            operation.queue.flush()

    @property
    def is_shared(self):
        """Whether several messages shared the last frame."""
        return self.messages > 1

    @property
    def turn_over(self):
        """Number of the loop's turn if so many messages were added in it that other tasks should run now; else 0."""
        return turn_used_up(&self.share)

    def add(self, payload, immediate=None):
        """Add a message to the frame, if there is one in which it fits and the budget of the turn is not used up.

        :param payload: the message; only contiguous buffers are added.
        :param immediate: immediate data; messages that have any are not added.
        :returns: whether the message was added.
        :raises AffinityError: another event loop owns the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises ForkedProcessError: the connection was made in the process that this one was forked from.
        """
        cdef Py_buffer view
        cdef bint added
        if self.operation is None or immediate is not None:
            return False
        self.owner._enter(self.what, "send")
        self.owner._leave()
        if type(payload) is bytes:
            return self._add(PyBytes_AS_STRING(payload), len(<bytes>payload))
        try:
            PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        except (BufferError, TypeError, ValueError):    # the caller finds out what is wrong with it
            return False
        try:
            added = self._add(<const char *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        return added

    cdef bint _add(self, const char *data, Py_ssize_t length) except -1:
        cdef Operation operation = self.operation
        cdef v.ibv_send_wr *wr
        cdef section within
        cdef uint32_t whole
        cdef uint32_t head
        cdef char *end
        if operation is None or length > self.max_message:
            return False
        if _turn_is_over(&self.share, self.added, length):
            return False
        whole = <uint32_t>length + FRAME_LENGTH_BYTES
        section_enter(&within, _section(operation.queue))
        wr = operation.queue._growing(operation)
        if wr == NULL or whole > self.capacity - self.used:
            self.operation = None
        else:
            head = v.htonl(<uint32_t>length)
            end = <char *><uintptr_t>(self.memory._address + self.used)
            memcpy(end, &head, FRAME_LENGTH_BYTES)
            memcpy(end + FRAME_LENGTH_BYTES, data, length)
            wr.sg_list[0].length += whole
            operation.bytes += whole
            if operation.state == CHAINED:
                operation.queue.bytes += whole      # one that waits for a place is counted later
            self.used += whole
            self.messages += 1
            self.added += 1
        section_leave(&within)
        return self.operation is not None


def send_later(SendVerbs requester not None, RegionSlice local not None, immediate):
    """Post a send with immediate data at the end of the loop's turn, or before the next request of the queue.

    :param requester: queue pair to post to.
    :param local: registered memory to send.
    :param immediate: immediate data, 0..2**32-1.
    :returns: the `Operation`. Errors are those of `SendVerbs`.
    """
    return requester._message(SEND_WITH_IMM, local, immediate, 0, 0, None, None, False, True)


@cython.final
cdef class MessageFrame:
    """Messages that arrived in a shared frame, until the user has received them.

    :param data: bytes of the frame, which are not trusted.
    :param max_message: size of the longest message accepted, in bytes.
    :raises ValueError: the frame has no message, a message is longer than accepted, or the lengths do not add up.
    """

    cdef bytes data
    cdef Py_ssize_t at                  # where the next message begins

    def __init__(self, bytes data not None, uint64_t max_message):
        cdef const char *begin = PyBytes_AS_STRING(data)
        cdef Py_ssize_t at = 0, end = len(data)
        cdef uint32_t length
        if not end:
            raise ValueError("the peer sent a frame without messages")
        while at < end:
            if end - at < FRAME_LENGTH_BYTES:
                raise ValueError(f"the peer sent a frame that ends after {end - at} bytes of a length")
            length = _frame_length(begin + at)
            at += FRAME_LENGTH_BYTES
            if length > max_message:
                raise ValueError(
                    f"the peer sent a message of {length:,} bytes, but at most {max_message:,} are accepted"
                )
            if length > end - at:
                raise ValueError(f"the peer sent {end - at:,} bytes of a message of {length:,}")
            at += length
        self.data = data

    cdef uint32_t _length(self) noexcept:
        # Return the length of the next message.
        return _frame_length(PyBytes_AS_STRING(self.data) + self.at)

    cdef const char *_begin(self) noexcept:
        # Return the bytes of the next message.
        return PyBytes_AS_STRING(self.data) + self.at + FRAME_LENGTH_BYTES


cdef inline uint32_t _frame_length(const char *at) noexcept:
    cdef uint32_t length
    memcpy(&length, at, FRAME_LENGTH_BYTES)
    return v.ntohl(length)


@cython.final
cdef class UnreadMessages:
    """Messages that have arrived at a connection and that the user has not received.

    :param owner: owner of the connection, whose loop alone receives.
    :param what: the connection, for error messages.
    :param inbox: inbox of the messages: bytes, `MessageFrame` objects, or others, which are left to the caller.
    :param consumed: called without arguments each time that all messages of an item of the inbox were received.
    """

    cdef Affinity owner
    cdef object what
    cdef Inbox inbox
    cdef object consumed
    cdef readonly MessageFrame frame    # the item of the inbox that is being received; None if no message of it is left
    cdef public object held             # the next message, taken from the inbox but not received; or None
    cdef public bint receiving          # whether a task waits for a message, or reads one
    cdef public uint64_t received       # number of messages that the user has received
    cdef bint closed

    def __init__(self, Affinity owner not None, what, Inbox inbox not None, consumed):
        self.owner = owner
        self.what = what
        self.inbox = inbox
        self.consumed = consumed

    def __len__(self):
        """Return the number of items that are not consumed, but for one that is `held`."""
        return len(self.inbox) + (self.frame is not None)

    @property
    def turn_over(self):
        """Number of the loop's turn if so many messages were received in it that other tasks should run now; else
        0."""
        return turn_used_up(&self.inbox.queue.share)

    def take(self):
        """Receive the next message, if it is there, is bytes, and the budget of the turn is not used up.

        :returns: the message; None if the caller has to receive it otherwise.
        :raises AffinityError: another event loop owns the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises ForkedProcessError: the connection was made in the process that this one was forked from.
        """
        cdef bytes message
        if not self._may_take():
            return None
        item = self._next_item(True) if self.frame is None else self.frame
        if item is None:
            return None
        message = item if type(item) is bytes else self.open(item)
        self._count_received()
        return message

    def take_into(self, buffer):
        """Receive the next message into memory, if it is there in a frame, and the budget of the turn is not used up.

        :param buffer: the memory; only contiguous, writable buffers in which the message fits are filled.
        :returns: length of the message in bytes; -1 if the caller has to receive it otherwise.
        :raises Exception: whatever `take` raises.
        """
        cdef Py_buffer view
        cdef Py_ssize_t length = -1
        if not self._may_take():
            return -1
        if self.frame is None:
            self.frame = self._next_item(False)
        # The object behind the buffer may run code, which may receive messages, when its memory is taken and when it is
        # given back: all that concerns this message is done in between.
        try:
            PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
        except (BufferError, TypeError, ValueError):    # the caller finds out what is wrong with it
            return -1
        try:
            if self.frame is not None and self.frame._length() <= view.len:
                length = self.frame._length()
                memcpy(view.buf, self.frame._begin(), length)
                self._go_on()
                self._count_received()
        finally:
            PyBuffer_Release(&view)
        return length

    def close(self):
        """Let `take` find no more messages, because this end has closed the connection."""
        self.closed = True

    cdef bint _may_take(self) except -1:
        # Whether the caller may receive at once; raise the errors of `take`.
        if self.closed:
            return False
        self.owner._enter(self.what, "receive")
        self.owner._leave()
        if self.receiving or self.held is not None or (self.frame is None and not self.inbox.ready):
            return False
        return not _turn_is_over(&self.inbox.queue.share, self.received if self.frame is not None else 0, 0)

    cdef int _count_received(self) except -1:
        # Count a message that the user has received.
        self.received += 1
        if self.frame is None:
            self.consumed()
        return 0

    cdef object _next_item(self, bint single):
        # Take the next item out of the inbox if it is a frame, or with `single`, bytes; else return None. Another
        # thread may put a message back that it has not delivered.
        cdef section within
        cdef object item = None
        section_enter(&within, _section(self.inbox.queue))
        ready = self.inbox.ready
        if ready and (type(ready[0]) is MessageFrame or (single and type(ready[0]) is bytes)):
            item = ready.popleft()
        section_leave(&within)
        return item

    cpdef bytes open(self, MessageFrame frame):
        """Begin to receive the messages of a frame, and return the first one."""
        self.frame = frame
        return self._next_message()

    def next_of_frame(self):
        """Return the next message of the frame that is being received, which is charged to the turn; None if there is
        none."""
        if self.frame is None:
            return None
        _turn_is_over(&self.inbox.queue.share, self.received, 0)
        return self._next_message()

    cdef bytes _next_message(self):
        # Return the next message of the frame; it stays the next one if there is no memory for it.
        cdef bytes message = PyBytes_FromStringAndSize(self.frame._begin(), self.frame._length())
        self._go_on()
        return message

    cdef void _go_on(self) noexcept:
        # Go on to the message after the next one. Forget the frame if no message of it is left.
        cdef MessageFrame frame = self.frame
        frame.at += FRAME_LENGTH_BYTES + frame._length()
        if frame.at == len(frame.data):
            self.frame = None
