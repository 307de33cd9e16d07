"""PURE: numbers of the credit-based flow control, by which the peer has a receive posted for each message sent.

`aioverbs._core.data_path.data_path.Credits` counts the credits of a connection.
"""

__all__ = ["MAX_CREDITS", "RESERVED_CREDITS", "max_announced"]

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
