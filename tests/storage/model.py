"""Model of a volume: for each block, the last write that was flushed, and the writes since.

A block consists of pairs (number of the block, number of the write). After a crash, each pair must come from the last
flushed write of the block or from a later write: a disk promises no more for unflushed data.
"""

import struct

__all__ = ["BLOCK", "Blocks"]

BLOCK = 4096
_PAIR = struct.Struct("<II")


class Blocks:
    """Blocks that one task writes exclusively.

    :param blocks: their numbers.
    """

    def __init__(self, blocks: range) -> None:
        self.blocks = blocks
        self.acknowledged = dict.fromkeys(blocks, 0)  # number of the last write that was flushed; 0: zeros
        self.latest = dict.fromkeys(blocks, 0)  # number of the last write that was started
        self._written = dict.fromkeys(blocks, 0)  # number of the last write that completed

    def write(self, block: int) -> bytes:
        """Start a write; return the block's new contents."""
        self.latest[block] += 1
        return _PAIR.pack(block, self.latest[block]) * (BLOCK // _PAIR.size)

    def write_completed(self, block: int) -> None:
        """Record that the write of a block completed."""
        self._written[block] = self.latest[block]

    def flush(self) -> dict[int, int]:
        """Start a flush; return the writes that it covers."""
        return dict(self._written)

    def flush_completed(self, about: dict[int, int]) -> None:
        """Record that a flush was acknowledged."""
        self.acknowledged.update(about)

    def check(self, volume: bytes, at_least: dict[int, int] | None = None) -> None:
        """Check that the contents of a volume are allowed by the model.

        :param at_least: writes that must be there; None: those acknowledged so far.
        """
        acknowledged = self.acknowledged if at_least is None else at_least
        for block in self.blocks:
            content = volume[block * BLOCK : (block + 1) * BLOCK]
            for found, writing in set(_PAIR.iter_unpack(content)):
                assert found == (block if writing else 0), f"block {block} has a pair of block {found}"
                assert acknowledged[block] <= writing <= self.latest[block], (
                    f"block {block} has writing {writing}, of {acknowledged[block]} to {self.latest[block]}"
                )

    def continue_from(self, volume: bytes) -> None:
        """Continue with the contents found after a crash, in which unflushed writes may be lost."""
        for block in self.blocks:
            writings = {writing for _, writing in _PAIR.iter_unpack(volume[block * BLOCK : (block + 1) * BLOCK])}
            self.acknowledged[block] = self._written[block] = min(writings)
