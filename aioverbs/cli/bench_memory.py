"""Memory of one side of a contender of `aioverbs bench`, with checksums that verify the bytes of each turn.

Outgoing bytes are a pattern that both sides know, with the number of the turn at the start and the end of each slot.
"""

import random
import struct
import zlib
from functools import cache

from aioverbs.cli.measuring import MEMORY

__all__ = ["Memory", "expected_checksum"]

_STAMP = struct.Struct("<II")  # number of the turn, number of the slot


@cache
def _pattern() -> bytes:
    """Return the `MEMORY` pseudo-random bytes that both sides send, without the turn and slot numbers in them."""
    return random.Random(0).randbytes(MEMORY)


def _stamp(memory: "bytearray | memoryview[int]", size: int, slots: int, turn: int) -> None:
    """Write the turn number and the slot number to the start and the end of each of the first ``slots`` slots in
    ``memory``, which are ``size`` bytes long.
    """
    for slot in range(slots):
        stamp = _STAMP.pack(turn, slot)
        begin, end = slot * size, (slot + 1) * size
        memory[end - len(stamp) : end] = stamp
        memory[begin : begin + len(stamp)] = stamp


def _turn_bytes(size: int, slots: int, turn: int) -> bytearray:
    """Return the outgoing bytes of a turn: the pattern, with the turn number and the slot number in each slot."""
    data = bytearray(_pattern()[: size * slots])
    _stamp(data, size, slots, turn)
    return data


def expected_checksum(size: int, slots: int, turn: int) -> int:
    """Return the CRC-32 of the bytes that must arrive in turn number ``turn``: ``slots`` slots of ``size`` bytes."""
    return zlib.crc32(_turn_bytes(size, slots, turn))


class Memory:
    """Outgoing bytes, and space for incoming bytes.

    :param outgoing: `MEMORY` bytes; None to allocate them.
    :param incoming: `MEMORY` bytes; None to allocate them.
    """

    def __init__(self, outgoing: "memoryview[int] | None" = None, incoming: "memoryview[int] | None" = None) -> None:
        self.outgoing = outgoing if outgoing is not None else memoryview(bytearray(MEMORY))
        self.incoming = incoming if incoming is not None else memoryview(bytearray(MEMORY))
        self._turn = 0

    def prepare(self, size: int, slots: int, turn: int) -> None:
        """Write the bytes of turn number ``turn`` to the first ``slots`` outgoing slots of ``size`` bytes, and zeros to
        as many incoming slots.
        """
        self._turn = turn
        self.outgoing[: size * slots] = _turn_bytes(size, slots, turn)
        self.incoming[: size * slots] = bytes(size * slots)

    def store_message(self, data: bytes) -> None:
        """Store a received message in the incoming slot whose number the message contains.

        :raises ValueError: the memory has no such slot.
        :raises struct.error: the message has fewer than 8 bytes.
        """
        _, slot = _STAMP.unpack_from(data)
        self.incoming[slot * len(data) : (slot + 1) * len(data)] = data

    def check_answer(self, answer: bytes, size: int, slot: int) -> None:
        """Check that the answer to a message is the beginning of that message.

        :param size: size of the message in bytes.
        :param slot: number of the outgoing slot from which the message was sent.
        :raises ValueError: the answer differs from the beginning of the message.
        """
        if answer != self.outgoing[slot * size : slot * size + len(answer)]:
            raise ValueError(
                f"message {slot} of turn {self._turn}: the answer {answer!r} is not the beginning of the message"
            )

    def checksum(self, size: int, slots: int) -> int:
        """Return the CRC-32 of the first ``slots`` incoming slots of ``size`` bytes."""
        return zlib.crc32(self.incoming[: size * slots])
