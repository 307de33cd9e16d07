"""PURE: how many messages one end of a connection may send, so that the other one has a receive for each."""

__all__ = ["MAX_CREDITS", "RESERVED_CREDITS", "Credits"]

MAX_CREDITS = 1023
"""As many as a message can give back."""

RESERVED_CREDITS = 1
"""The last credit is kept for a message that gives credits back: or both ends could wait for each other's."""


class Credits:
    """The credits of one end: those that it has from the peer, and those that it owes it.

    A credit is a receive that the peer has posted; each message takes one. It comes back with a later message of the
    peer's, or, where the peer has none to send, with one that has nothing else in it.

    :param theirs: receives that the peer keeps posted.
    :param ours: those that this end keeps posted.
    """

    __slots__ = ("_peer_credits", "_peer_receives", "_update_threshold", "available", "owed")

    def __init__(self, peer_receives: int, own_receives: int) -> None:
        for count in (peer_receives, own_receives):
            if not 3 <= count <= MAX_CREDITS:
                raise ValueError(f"an end of a connection has from 3 to {MAX_CREDITS} receives posted, not {count}")
        self._peer_receives = peer_receives
        self._peer_credits = own_receives  # messages that the peer may send, for all that it was given back
        self._update_threshold = (own_receives + 1) // 2  # at least 2, else updates would never stop
        self.available = peer_receives  # messages that may be sent
        self.owed = 0  # of the peer's: those that were taken in and not given back

    @property
    def sendable(self) -> bool:
        """Whether there is one for a message of the user's."""
        return self.available > RESERVED_CREDITS

    @property
    def update_due(self) -> bool:
        """Whether the peer is owed so many that it is to be told without waiting for a message; and can be."""
        return self.owed >= self._update_threshold and self.available > 0

    def take(self) -> int:
        """For a message that is sent: what it gives back."""
        assert self.available > 0
        self.available -= 1
        owed, self.owed = self.owed, 0
        self._peer_credits += owed
        return owed

    def undo_take(self, returned: int) -> None:
        """The message was not sent."""
        self.available += 1
        self.owed += returned
        self._peer_credits -= returned  # nothing has arrived since they were taken

    def add(self, count: int) -> None:
        """The peer gave so many back.

        :raises ValueError: those are more than it had.
        """
        if self.available + count > self._peer_receives:
            raise ValueError(f"it gives back {count} credits and had {self._peer_receives - self.available}")
        self.available += count

    def on_message(self) -> None:
        """A message of the peer's came. Each is `consumed` later, once: so no more of them lie here, or are owed, than
        there are credits, whatever the peer sends.

        :raises ValueError: it had no credit for that.
        """
        if self._peer_credits <= 0:
            raise ValueError("it sends a message for which it has no credit")
        self._peer_credits -= 1

    def on_consumed(self) -> bool:
        """A message that arrived was taken in, and its receive is posted again; whether an update is due now."""
        self.owed = owed = self.owed + 1
        return owed >= self._update_threshold and self.available > 0
