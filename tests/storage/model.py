"""What is known of a volume: of each block what its last acknowledged flush had, and what was written since.

A block that is written is its number and the number of the writing, over and over. After a crash each of these pairs is
of the last acknowledged writing, or of one that came after it: a disk promises no more of what was not flushed.
"""

import struct

__all__ = ["BLOCK", "Blocks"]

BLOCK = 4096
_PAIR = struct.Struct("<II")


class Blocks:
    """The blocks that one task writes, and nobody else.

    :param blocks: their numbers.
    """

    def __init__(self, blocks: range) -> None:
        self.blocks = blocks
        self.acknowledged = dict.fromkeys(blocks, 0)  # the writing; 0: zeros
        self.latest = dict.fromkeys(blocks, 0)  # that was asked for
        self._written = dict.fromkeys(blocks, 0)  # that was complete

    def write(self, block: int) -> bytes:
        """A block's next bytes, which are going to be written."""
        self.latest[block] += 1
        return _PAIR.pack(block, self.latest[block]) * (BLOCK // _PAIR.size)

    def wrote(self, block: int) -> None:
        """That is done."""
        self._written[block] = self.latest[block]

    def flush(self) -> dict[int, int]:
        """A flush is going to be asked for: what it is about."""
        return dict(self._written)

    def flushed(self, about: dict[int, int]) -> None:
        """That was acknowledged."""
        self.acknowledged.update(about)

    def check(self, volume: bytes, at_least: dict[int, int] | None = None) -> None:
        """See that what is there may be there.

        :param at_least: what was acknowledged; None: until now.
        """
        acknowledged = self.acknowledged if at_least is None else at_least
        for block in self.blocks:
            content = volume[block * BLOCK : (block + 1) * BLOCK]
            for found, writing in set(_PAIR.iter_unpack(content)):
                assert found == (block if writing else 0), f"block {block} has some of block {found}"
                assert acknowledged[block] <= writing <= self.latest[block], (
                    f"block {block} has writing {writing}, of {acknowledged[block]} to {self.latest[block]}"
                )

    def go_on(self, volume: bytes) -> None:
        """This is what is there now, and stays there: what was not flushed may be gone."""
        for block in self.blocks:
            writings = {writing for _, writing in _PAIR.iter_unpack(volume[block * BLOCK : (block + 1) * BLOCK])}
            self.acknowledged[block] = self._written[block] = min(writings)
