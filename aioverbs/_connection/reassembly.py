"""PURE: the fragments of a message become one again."""

from dataclasses import dataclass

from aioverbs._connection.wire import FIRST, HAS_IMMEDIATE, IMMEDIATE, LAST, TOTAL

__all__ = ["Assembly", "MessageWithImmediate"]

_SHORT = 256  # bytes: an object for each fragment below would take much more than the fragment


@dataclass(frozen=True, slots=True)
class MessageWithImmediate:
    """A message with immediate data."""

    data: bytes
    immediate: int


class Assembly:
    """The message that is coming in.

    :param max_message: the longest that is taken, in bytes.
    """

    __slots__ = ("_have", "_mark", "_max_message", "_parts", "_total")

    def __init__(self, max_message: int) -> None:
        self._max_message = max_message
        self._parts: list[bytes | bytearray] | None = None  # those that are short are put together at once
        self._total = self._have = 0
        self._mark: int | None = None

    def drop(self) -> None:
        """What was begun is of no use: it was cancelled there, or comes no more."""
        self._parts = None

    def add(self, view: memoryview, flags: int) -> "bytes | MessageWithImmediate | None":
        """A fragment came.

        :param view: its bytes, which are copied.
        :param flags: of its header.
        :returns: the message, where that was the last one.
        :raises ValueError: no peer of ours sends such a fragment now.
        """
        at = 0
        if flags & FIRST:  # what was begun before was cancelled there
            self._mark = None
            total = None
            if not flags & LAST:
                (total,) = TOTAL.unpack_from(_enough(view, TOTAL.size))
                at = TOTAL.size
            if flags & HAS_IMMEDIATE:
                (self._mark,) = IMMEDIATE.unpack_from(_enough(view, at + IMMEDIATE.size), at)
                at += IMMEDIATE.size
            self._total = len(view) - at if total is None else total
            if self._total > self._max_message:
                raise ValueError(f"a message of {self._total:,} bytes is longer than was said to be taken")
            self._parts, self._have = [], 0
        if self._parts is None:
            raise ValueError("a fragment has no beginning")
        if len(view) >= _SHORT:
            self._parts.append(bytes(view[at:]))
        elif self._parts and isinstance(last := self._parts[-1], bytearray):
            last += view[at:]
        else:
            self._parts.append(bytearray(view[at:]))
        self._have += len(view) - at
        if self._have > self._total or (self._have < self._total) == bool(flags & LAST) or not (flags & LAST or view):
            raise ValueError(f"{self._have:,} bytes came of a message of {self._total:,}")
        if not flags & LAST:
            return None
        whole = b"".join(self._parts)
        self._parts = None
        return whole if self._mark is None else MessageWithImmediate(whole, self._mark)


def _enough(view: memoryview, size: int) -> memoryview:
    if len(view) < size:
        raise ValueError(f"{len(view)} bytes are too few for how it begins")
    return view
