"""PURE: messages whose bytes are in several buffers."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Cursor", "Payload", "join_into", "parts_of"]

Payload = Union["Buffer", Sequence["Buffer"]]
"""Bytes of a message: a contiguous buffer, or a list or tuple of them."""


def parts_of(payload: "Payload") -> list[memoryview]:
    """Return the bytes of a message as memoryviews with the format ``B``; empty buffers are left out.

    :param payload: a contiguous buffer of any format and shape, or a list or tuple of such buffers.
    :raises TypeError: an object has no buffer protocol, or its memory is not contiguous.
    """
    buffers = payload if isinstance(payload, list | tuple) else (payload,)
    views = [memoryview(each) for each in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def join_into(memory: memoryview, parts: "Iterable[Buffer]") -> None:
    """Copy bytes, one part after the other, to the begin of memory in which they fit.

    :param memory: the memory, with the format ``B``.
    :param parts: the bytes.
    """
    at = 0
    for part in parts:
        end = at + len(memoryview(part))
        memory[at:end] = part
        at = end


class Cursor:
    """Position in the bytes of several buffers.

    :param parts: memoryviews with the format ``B``.
    """

    __slots__ = ("_at", "_parts")

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts[::-1]  # the next part is the last one
        self._at = 0  # bytes of the next part that were taken

    def take(self, length: int) -> list[memoryview]:
        """Return the next bytes, as slices of the buffers, and move the position behind them.

        :param length: number of bytes, at most as many as are left.
        """
        taken = []
        while length:
            part = self._parts[-1][self._at : self._at + length]
            taken.append(part)
            length -= len(part)
            self._at += len(part)
            if self._at == len(self._parts[-1]):
                self._parts.pop()
                self._at = 0
        return taken
