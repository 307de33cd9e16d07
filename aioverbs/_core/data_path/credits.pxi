# Part of data_path.pyx: credits, which say for how many messages of a connection the peer has a receive posted.

cdef enum:
    RESERVED = 1                        # RESERVED_CREDITS of aioverbs._connection.credits, and
    MOST_RECEIVES = 1023                # MAX_CREDITS


@cython.final
cdef class Credits:
    """Credits of one end: those that it may use, and those that it owes the peer.

    A credit stands for a receive that the peer has posted. Each message uses one. The peer returns credits with its
    next message, or with a message of kind CREDITS if it has no other message to send.

    :param peer_receives: number of receives that the peer keeps posted, 3..1023.
    :param own_receives: number of receives that this end keeps posted, 3..1023.
    :raises ValueError: a number is out of its range.
    """

    cdef int peer_receives
    cdef int peer_credits               # number of messages that the peer may send with the credits it has
    cdef int update_threshold
    cdef readonly int available         # number of messages that this end may send
    cdef readonly int owed              # number of credits of consumed messages, not yet returned to the peer
    cdef public int revocations         # number of credits reserved for withdrawing messages that were announced
    cdef public bint awaited            # whether something may wait for credits that the peer returns

    def __init__(self, peer_receives, own_receives):
        for count in (peer_receives, own_receives):
            if not 3 <= count <= MOST_RECEIVES:
                raise ValueError(f"the number of posted receives must be from 3 to {MOST_RECEIVES}, got {count}")
        self.peer_receives = self.available = peer_receives
        self.peer_credits = own_receives
        # At least 2, else each update would cause another one, endlessly.
        self.update_threshold = (own_receives + 1) // 2

    @property
    def sendable(self):
        """Whether a user message may be sent: more credits are available than the reserved ones."""
        return self._has(RESERVED)

    @property
    def update_due(self):
        """Whether this end owes enough credits for a message of kind CREDITS, and has a credit to send that message."""
        return self._is_update_due()

    cdef inline bint _has(self, int others) noexcept:
        # Whether a credit is available beside `others` and those that are reserved for withdrawing messages.
        return self.available > others + self.revocations

    cdef inline bint _is_update_due(self) noexcept:
        return self.owed >= self.update_threshold and self._has(0)

    cpdef int take(self) except -1:
        """Use a credit for a message that is about to be sent. Call only if `available` is above 0.

        :returns: number of owed credits that the caller has to return to the peer with that message, 0..1023.
        """
        assert self.available > 0
        self.available -= 1
        return self.take_owed()

    cpdef int take_owed(self) except -1:
        """Return the owed credits, to be returned to the peer with a message that uses no credit."""
        cdef int owed = self.owed
        self.owed = 0
        self.peer_credits += owed
        return owed

    cpdef undo_take(self, int returned):
        """Undo a call to `take`, because the message was not sent.

        :param returned: number that `take` returned.
        """
        self.available += 1
        self.undo_take_owed(returned)

    cpdef undo_take_owed(self, int returned):
        """Undo a call to `take_owed`, because the message was not sent.

        :param returned: number that `take_owed` returned.
        """
        self.owed += returned
        self.peer_credits -= returned   # no message has arrived since `take_owed`

    cdef inline bint _may_arrive(self, int returned) noexcept:
        # Whether the peer may send a message that returns credits: it has a credit, and this end has used those.
        return self.peer_credits > 0 and self.available + returned <= self.peer_receives

    def add(self, int count):
        """Add credits that the peer returned to the available ones.

        :param count: number of credits in the header of the peer's message.
        :raises ValueError: the peer returns more credits than this end has used.
        """
        if self.available + count > self.peer_receives:
            used = self.peer_receives - self.available
            raise ValueError(f"the peer returned {count} credits, but only {used} were used")
        self.available += count

    def on_message(self):
        """Account for a message from the peer, which has used up one of the peer's credits.

        The caller must later call `on_consumed` exactly once for each message. So the peer's credits, the messages that
        were not consumed yet and the credits owed to the peer always add up to `own_receives`, whatever the peer sends.

        :raises ValueError: the peer had no credit for the message.
        """
        if self.peer_credits <= 0:
            raise ValueError("the peer sent a message but had no credit for it")
        self.peer_credits -= 1

    cpdef bint on_consumed(self) except -1:
        """Account for a message that was consumed, so that this end owes the peer one more credit.

        :returns: True if the caller has to send a message of kind CREDITS now.
        """
        self.owed += 1
        return self._is_update_due()
