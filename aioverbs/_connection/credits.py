"""PURE: how many messages one end of a connection may send, so that the other one has a receive for each."""

__all__ = ["CREDITS_MOST", "KEPT", "Credits"]

CREDITS_MOST = 1023
"""As many as a message can give back."""

KEPT = 1
"""The last credit is kept for a message that gives credits back: or both ends could wait for each other's."""


class Credits:
    """The credits of one end: those that it has from the peer, and those that it owes it.

    A credit is a receive that the peer has posted; each message takes one. It comes back with a later message of the
    peer's, or, where the peer has none to send, with one that has nothing else in it.

    :param theirs: receives that the peer keeps posted.
    :param ours: those that this end keeps posted.
    """

    __slots__ = ("_left", "_theirs", "_update_at", "free", "owed")

    def __init__(self, theirs: int, ours: int) -> None:
        for count in (theirs, ours):
            if not 3 <= count <= CREDITS_MOST:
                raise ValueError(f"an end of a connection has from 3 to {CREDITS_MOST} receives posted, not {count}")
        self._theirs = theirs
        self._left = ours  # messages that the peer may send, for all that it was given back
        self._update_at = (ours + 1) // 2  # 2 at least, or two ends would tell each other of nothing else for ever
        self.free = theirs  # messages that may be sent
        self.owed = 0  # of the peer's: those that were taken in and not given back

    @property
    def sendable(self) -> bool:
        """Whether there is one for a message of the user's."""
        return self.free > KEPT

    @property
    def update_due(self) -> bool:
        """Whether the peer is owed so many that it is to be told without waiting for a message; and can be."""
        return self.owed >= self._update_at and self.free > 0

    def take(self) -> int:
        """For a message that is sent: what it gives back."""
        assert self.free > 0
        self.free -= 1
        owed, self.owed = self.owed, 0
        self._left += owed
        return owed

    def untake(self, returned: int) -> None:
        """The message was not sent."""
        self.free += 1
        self.owed += returned
        self._left -= returned  # nothing has arrived since they were taken

    def came(self, count: int) -> None:
        """The peer gave so many back.

        :raises ValueError: those are more than it had.
        """
        if self.free + count > self._theirs:
            raise ValueError(f"it gives back {count} credits and had {self._theirs - self.free}")
        self.free += count

    def arrived(self) -> None:
        """A message of the peer's came. Each is `consumed` later, once: so no more of them lie here, or are owed, than
        there are credits, whatever the peer sends.

        :raises ValueError: it had no credit for that.
        """
        if self._left <= 0:
            raise ValueError("it sends a message for which it has no credit")
        self._left -= 1

    def consumed(self) -> bool:
        """A message that arrived was taken in, and its receive is posted again; whether an update is due now."""
        self.owed = owed = self.owed + 1
        return owed >= self._update_at and self.free > 0
