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

    __slots__ = ("_ours", "_theirs", "_update_at", "free", "owed")

    def __init__(self, theirs: int, ours: int) -> None:
        for count in (theirs, ours):
            if not 3 <= count <= CREDITS_MOST:
                raise ValueError(f"an end of a connection has from 3 to {CREDITS_MOST} receives posted, not {count}")
        self._theirs = theirs
        self._ours = ours
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
        return owed

    def untake(self, returned: int) -> None:
        """The message was not sent."""
        self.free += 1
        self.owed += returned

    def came(self, count: int) -> None:
        """The peer gave so many back.

        :raises ValueError: those are more than it had.
        """
        if self.free + count > self._theirs:
            raise ValueError(f"it gives back {count} credits and had {self._theirs - self.free}")
        self.free += count

    def consumed(self) -> None:
        """A message was taken in, and its receive is posted again."""
        assert self.owed < self._ours
        self.owed += 1
