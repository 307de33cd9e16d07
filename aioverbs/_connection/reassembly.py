"""PURE: reassembly of fragments into messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from aioverbs._connection.wire import FIRST, HAS_IMMEDIATE, IMMEDIATE, LAST, TOTAL

__all__ = ["Assembly", "ReceivedMessage"]

# Length in bytes. Shorter fragments are merged, because an object for each would be much larger than the fragment.
_SHORT_FRAGMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message that arrived in several parts or with immediate data. The parts are joined when the user receives it,
    into the kind of memory that the user asks for.

    :param parts: the bytes of the message.
    :param immediate: its immediate data; None if it has none.
    """

    parts: Sequence[bytes | bytearray | memoryview]
    immediate: int | None

    @property
    def data(self) -> bytes:
        """The message as new bytes."""
        return b"".join(self.parts)

    @property
    def writable_data(self) -> memoryview:
        """The message in new writable memory."""
        return memoryview(bytearray().join(self.parts))


class Assembly:
    """The message being reassembled.

    :param max_message: size of the longest message accepted, in bytes.
    """

    __slots__ = ("_immediate", "_max_message", "_parts", "_received", "_total")

    def __init__(self, max_message: int) -> None:
        self._max_message = max_message
        self._parts: list[memoryview | bytearray] | None = None  # fragments; short ones are merged at once
        self._total = self._received = 0
        self._immediate: int | None = None

    def drop(self) -> None:
        """Drop the incomplete message, if any, because the sender cancelled it or sends no more fragments."""
        self._parts = None

    def add(self, data: bytes, flags: int) -> "ReceivedMessage | None":
        """Add a fragment to the message; the first fragment of a message begins a new one.

        :param data: bytes of the fragment.
        :param flags: flags of its header.
        :returns: the whole message if the fragment was its last one; None if fragments are still missing.
        :raises ValueError: the fragment violates the protocol.
        """
        offset = 0
        if flags & FIRST:  # the sender has cancelled an earlier message that is incomplete
            self._immediate = None
            total = None
            if not flags & LAST:
                (total,) = TOTAL.unpack_from(_require(data, TOTAL.size))
                offset = TOTAL.size
            if flags & HAS_IMMEDIATE:
                (self._immediate,) = IMMEDIATE.unpack_from(_require(data, offset + IMMEDIATE.size), offset)
                offset += IMMEDIATE.size
            self._total = len(data) - offset if total is None else total
            if self._total > self._max_message:
                raise ValueError(
                    f"the peer sent a message of {self._total:,} bytes, but at most {self._max_message:,} are accepted"
                )
            self._parts, self._received = [], 0
        if self._parts is None:
            raise ValueError("the peer sent a fragment without the first one of its message")
        view = memoryview(data)[offset:]
        if len(data) >= _SHORT_FRAGMENT_BYTES:
            self._parts.append(view)
        elif self._parts and isinstance(last := self._parts[-1], bytearray):
            last += view
        else:
            self._parts.append(bytearray(view))
        self._received += len(data) - offset
        is_last, received = bool(flags & LAST), self._received
        if received > self._total or (received < self._total) == is_last or not (is_last or data):
            raise ValueError(f"the peer sent {received:,} bytes of a message of {self._total:,}")
        if not is_last:
            return None
        parts, self._parts = self._parts, None
        return ReceivedMessage(parts, self._immediate)


def _require(data: bytes, size: int) -> bytes:
    """Check that a fragment has at least `size` bytes, and return it unchanged.

    :raises ValueError: the fragment is shorter.
    """
    if len(data) < size:
        raise ValueError(f"the peer sent a fragment of {len(data)} bytes, but its flags require at least {size}")
    return data
