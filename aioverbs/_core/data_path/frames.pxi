# Part of data_path.pyx: messages that have arrived at a connection, and frames that several of them share.

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
            if end - at < NUMBER_BYTES:
                raise ValueError(f"the peer sent a frame that ends after {end - at} bytes of a length")
            length = _get_number(begin + at)
            at += NUMBER_BYTES
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
        return _get_number(PyBytes_AS_STRING(self.data) + self.at)

    cdef const char *_begin(self) noexcept:
        # Return the bytes of the next message.
        return PyBytes_AS_STRING(self.data) + self.at + NUMBER_BYTES


@cython.final
cdef class UnreadMessages:
    """Messages that have arrived at a connection and that the user has not received.

    Whole messages without immediate data are handled here. Everything else that arrives goes to the inbox's ``wrap``,
    also what violates the protocol.

    :param owner: owner of the connection, whose loop alone receives.
    :param what: the connection, for error messages.
    :param ring: receives of the messages. Their inbox has the messages: bytes, `MessageFrame` objects, or others, which
        are left to the caller.
    :param not_posted: called with the index of a receive that could not be posted again, and the exception.
    :param sender: sender of the connection. Its ``return_credits()`` is called when so many are owed to the peer that a
        message returns them, and ``use_credits()`` when the peer has returned some that may be awaited.
    """

    cdef Affinity owner
    cdef object what
    cdef ReceiveRing ring
    cdef Inbox inbox
    cdef object not_posted
    cdef object sender
    cdef Credits credits
    cdef QueuePairVerbs requester       # posts receives again; None if all that arrives goes to ``wrap``
    cdef uint64_t max_message
    cdef public bint incomplete         # whether a message is incomplete, some fragments of which have arrived
    cdef public uint32_t deferred       # number of credits of fragments that arrived while messages were unread
    cdef readonly MessageFrame frame    # the item of the inbox that is being received; None if no message of it is left
    cdef public object held             # the next message, taken from the inbox but not received; or None
    cdef public bint receiving          # whether a task waits for a message, or reads one
    cdef readonly uint64_t received     # number of messages that the user has received
    cdef bint closed

    def __init__(self, Affinity owner not None, what, ReceiveRing ring not None, not_posted, sender):
        self.owner = owner
        self.what = what
        self.ring = ring
        self.inbox = ring.inbox
        self.not_posted = not_posted
        self.sender = sender

    def start(self, Credits credit not None, QueuePairVerbs requester not None, uint64_t max_message):
        """Handle messages from now on.

        :param credit: credits of this end.
        :param requester: queue pair of the receives.
        :param max_message: size of the longest message accepted, in bytes.
        """
        self.credits = credit
        self.requester = requester
        self.max_message = max_message
        self.ring.messages = self

    def stop(self):
        """Handle no further messages, because the peer may send none: what arrives goes to the inbox's ``wrap``."""
        self.ring.messages = None

    # ---- Arrival

    cdef object _arrived(self, uint32_t index, const char *data, uint32_t length, uint32_t header):
        # Return what has arrived in a receive as an item for the inbox, if it is whole messages, and post the receive
        # again. Return None, with nothing done, for everything else, and for what violates the protocol.
        cdef uint32_t returned = header >> CREDITS_AT & RETURNED_MASK
        cdef uint32_t kind = header ^ returned << CREDITS_AT
        cdef object item
        if (
            (kind != WHOLE_HEADER and kind != MESSAGES_HEADER)
            or self.incomplete
            or not self.credits._may_arrive(returned)
        ):
            return None
        item = data[:length]
        if kind == MESSAGES_HEADER:
            try:
                item = MessageFrame(item, self.max_message)
            except ValueError:
                return None
        elif length > self.max_message:
            return None
        self.credits.peer_credits -= 1
        self.credits.available += returned
        try:
            self.requester._post_receives(self.ring, index, 1)
        except Exception as error:
            self.not_posted(index, error)
        if returned and self.credits.awaited:
            self.sender.use_credits()
        return item

    # ---- Receiving

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
        item = self._next_item() if self.frame is None else self.frame
        if item is None:
            return None
        message = item if type(item) is bytes else self.open(item)
        self.finish()
        return message

    def take_into(self, buffer):
        """Receive the next message into memory, if it is there, is bytes or in a frame, and the budget of the turn is
        not used up.

        :param buffer: the memory; only contiguous, writable buffers in which the message fits are filled.
        :returns: length of the message in bytes; -1 if the caller has to receive it otherwise.
        :raises Exception: whatever `take` raises.
        """
        cdef Py_buffer view
        cdef Py_ssize_t length = -1
        cdef object item
        if not self._may_take():
            return -1
        if self.frame is None:
            item = self._next_item()
            if type(item) is MessageFrame:
                self.frame = item
            else:
                self.held = item
        # The object behind the buffer may run code, which may receive messages, when its memory is taken and when it is
        # given back: all that concerns this message is done in between.
        try:
            PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
        except (BufferError, TypeError, ValueError):    # the caller finds out what is wrong with it
            return -1
        try:
            item = self.held
            if type(item) is bytes:
                if len(<bytes>item) <= view.len:
                    length = len(<bytes>item)
                    memcpy(view.buf, PyBytes_AS_STRING(item), length)
                    self.finish()
            elif item is None and self.frame is not None and self.frame._length() <= view.len:
                length = self.frame._length()
                memcpy(view.buf, self.frame._begin(), length)
                self._go_on()
                self.finish()
        finally:
            PyBuffer_Release(&view)
        return length

    def begin(self, str operation not None):
        """Let no other task receive until `receiving` is reset.

        :param operation: name of the caller's method, for the error message.
        :returns: whether the next message is the next item of the inbox.
        :raises BusyResourceError: another task is already waiting for a message.
        :raises AffinityError: another event loop owns the connection.
        """
        self.owner._enter(self.what, operation)
        self.owner._leave()
        if self.receiving:
            raise BusyResourceError("another task is already waiting for a message on this connection")
        self.receiving = True
        return self.held is None and self.frame is None

    cpdef finish(self):
        """Count a message that the user has received, and account for it: see `consume`."""
        self.received += 1
        self.consume()

    cpdef consume(self):
        """Account for the next message, which the user has received or the peer has withdrawn, and return credits,
        unless it is followed by others that arrived in the same frame."""
        cdef section within
        cdef bint due
        self.held = None
        if self.frame is not None:
            return
        section_enter(&within, _section(self.inbox.queue))  # another thread may handle what arrives
        try:
            due = self.credits.on_consumed()
            if self.deferred and not len(self.inbox):
                while self.deferred:
                    self.deferred -= 1
                    due = self.credits.on_consumed()
        finally:
            section_leave(&within)
        if due:
            self.sender.return_credits()

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

    cdef object _next_item(self):
        # Take the next item out of the inbox if it is a frame or bytes; else return None. Another thread may put a
        # message back that it has not delivered.
        cdef section within
        cdef object item = None
        section_enter(&within, _section(self.inbox.queue))
        ready = self.inbox.ready
        if ready and (type(ready[0]) is MessageFrame or type(ready[0]) is bytes):
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
        frame.at += NUMBER_BYTES + frame._length()
        if frame.at == len(frame.data):
            self.frame = None
