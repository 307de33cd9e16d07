"""PURE: credit-based flow control, so that the peer has a receive posted for each message sent."""

__all__ = ["MAX_CREDITS", "RESERVED_CREDITS", "Credits", "max_announced"]

MAX_CREDITS = 1023
"""Largest number of credits that one message can return."""

RESERVED_CREDITS = 1
"""Number of credits reserved for messages that return credits.

Without this reserve, each end could wait for the other to return credits.
"""


def max_announced(depth: int) -> int:
    """Return the number of announced messages that an end may have unanswered at once.

    The answer to each uses a receive but no credit. Otherwise an end whose credits are used up could not say that it
    has read a message, while the sender of that message, waiting for it, returns no credits. One receive is posted for
    the handshake and free after it. The others are taken from the credits: `depth` + 1 - `max_announced(depth)` are
    left.

    :param depth: number of receives in the offer of the end that announces.
    """
    return 1 + depth // 8


class Credits:
    """Credits of one end: those that it may use, and those that it owes the peer.

    A credit stands for a receive that the peer has posted. Each message uses one. The peer returns credits with its
    next message, or with a message of kind CREDITS if it has no other message to send.

    :param peer_receives: number of receives that the peer keeps posted, 3..1023.
    :param own_receives: number of receives that this end keeps posted, 3..1023.
    :raises ValueError: a number is out of its range.
    """

    __slots__ = ("_peer_credits", "_peer_receives", "_update_threshold", "available", "owed", "revocations")

    def __init__(self, peer_receives: int, own_receives: int) -> None:
        for count in (peer_receives, own_receives):
            if not 3 <= count <= MAX_CREDITS:
                raise ValueError(f"the number of posted receives must be from 3 to {MAX_CREDITS}, got {count}")
        self._peer_receives = peer_receives
        self._peer_credits = own_receives  # messages that the peer may send with the credits it has
        # at least 2, else each update would cause another one, endlessly
        self._update_threshold = (own_receives + 1) // 2
        self.available = peer_receives  # messages that this end may send
        self.owed = 0  # credits of consumed messages, not yet returned to the peer
        self.revocations = 0  # credits reserved for withdrawing messages that were announced

    @property
    def sendable(self) -> bool:
        """Whether a user message may be sent: more credits are available than the reserved ones."""
        return self.available > RESERVED_CREDITS + self.revocations

    @property
    def update_due(self) -> bool:
        """Whether this end owes enough credits for a message of kind CREDITS, and has a credit to send that message."""
        return self.owed >= self._update_threshold and self.available > self.revocations

    def take(self) -> int:
        """Use a credit for a message that is about to be sent. Call only if `available` is above 0.

        :returns: number of owed credits that the caller has to return to the peer with that message, 0..1023.
        """
        assert self.available > 0
        self.available -= 1
        return self.take_owed()

    def take_owed(self) -> int:
        """Return the owed credits, to be returned to the peer with a message that uses no credit."""
        owed, self.owed = self.owed, 0
        self._peer_credits += owed
        return owed

    def undo_take(self, returned: int) -> None:
        """Undo a call to `take`, because the message was not sent.

        :param returned: number that `take` returned.
        """
        self.available += 1
        self.undo_take_owed(returned)

    def undo_take_owed(self, returned: int) -> None:
        """Undo a call to `take_owed`, because the message was not sent.

        :param returned: number that `take_owed` returned.
        """
        self.owed += returned
        self._peer_credits -= returned  # no message has arrived since `take_owed`

    def add(self, count: int) -> None:
        """Add credits that the peer returned to the available ones.

        :param count: number of credits in the header of the peer's message.
        :raises ValueError: the peer returns more credits than this end has used.
        """
        if self.available + count > self._peer_receives:
            used = self._peer_receives - self.available
            raise ValueError(f"the peer returned {count} credits, but only {used} were used")
        self.available += count

    def on_message(self) -> None:
        """Account for a message from the peer, which has used up one of the peer's credits.

        The caller must later call `on_consumed` exactly once for each message. So the peer's credits, the messages that
        were not consumed yet and the credits owed to the peer always add up to `own_receives`, whatever the peer sends.

        :raises ValueError: the peer had no credit for the message.
        """
        if self._peer_credits <= 0:
            raise ValueError("the peer sent a message but had no credit for it")
        self._peer_credits -= 1

    def on_consumed(self) -> bool:
        """Account for a message that was consumed, so that this end owes the peer one more credit.

        :returns: True if the caller has to send a message of kind CREDITS now.
        """
        self.owed = owed = self.owed + 1
        return owed >= self._update_threshold and self.available > self.revocations
