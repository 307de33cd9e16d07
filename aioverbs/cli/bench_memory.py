"""Memory of one side of a contender, by which both see that the bytes of each turn arrived.

What goes out is a pattern that both sides know, with the turn's number at the beginning and the end of each place.
"""

import random
import struct
import zlib
from functools import cache

from aioverbs.cli.measuring import MEMORY, Operation

__all__ = ["Memory", "expected"]

_STAMP = struct.Struct("<II")  # the number of the turn, and of the place


@cache
def _pattern() -> bytes:
    return random.Random(0).randbytes(MEMORY)


def _stamp(memory: "bytearray | memoryview[int]", size: int, places: int, turn: int) -> None:
    for place in range(places):
        stamp = _STAMP.pack(turn, place)
        begin, end = place * size, (place + 1) * size
        memory[end - len(stamp) : end] = stamp
        memory[begin : begin + len(stamp)] = stamp


def _prepared(size: int, places: int, turn: int) -> bytearray:
    data = bytearray(_pattern()[: size * places])
    _stamp(data, size, places, turn)
    return data


def expected(operation: Operation, size: int, places: int, turn: int) -> int:
    """The checksum of what arrives in a turn: of all places, or of the last message's bytes, which are any place's."""
    return zlib.crc32(_prepared(size, places, turn))


class Memory:
    """Bytes that go out, and room for those that come in.

    :param outgoing: as much as is ever under way.
    :param incoming: the same.
    """

    def __init__(self, outgoing: "memoryview[int] | None" = None, incoming: "memoryview[int] | None" = None) -> None:
        self.outgoing = outgoing if outgoing is not None else memoryview(bytearray(MEMORY))
        self.incoming = incoming if incoming is not None else memoryview(bytearray(MEMORY))
        self._turn = 0

    def begin(self, size: int, places: int, turn: int) -> None:
        """Have the bytes of a turn go out, and none of them here."""
        self._turn = turn
        self.outgoing[: size * places] = _prepared(size, places, turn)
        self.incoming[: size * places] = bytes(size * places)

    def message(self, data: bytes) -> None:
        """Keep a message where the one of its place is to be."""
        _, place = _STAMP.unpack_from(data)
        self.incoming[place * len(data) : (place + 1) * len(data)] = data

    def check_answer(self, answer: bytes, size: int, place: int) -> None:
        """See that the answer to a message is the beginning of that message.

        :raises ValueError: it is not.
        """
        if answer != self.outgoing[place * size : place * size + len(answer)]:
            raise ValueError(
                f"message {place} of turn {self._turn} was answered by {answer!r}, which is not its beginning"
            )

    def checksum(self, size: int, places: int) -> int:
        """Of what came in."""
        return zlib.crc32(self.incoming[: size * places])
