"""PURE: the files of a client: how many, how large, and where they lie in its volume."""

import math
import random
from dataclasses import dataclass

from storage_server.catalog import BLOCK
from storage_server.errors import InvalidError

__all__ = ["LARGEST", "LEAST_BYTES", "SMALLEST", "DataFile", "data_files", "end_of"]

SMALLEST = 3
LARGEST = 32 << 20
LEAST_BYTES = 16 * BLOCK


@dataclass(frozen=True)
class DataFile:
    """A file.

    :param seed: the seed of its contents.
    :param offset: where it begins in its volume, at a block.
    """

    name: str
    seed: str
    offset: int
    size: int

    def contents(self) -> bytes:
        """Its bytes, the same ones each time."""
        return random.Random(self.seed).randbytes(self.size)


def data_files(total: int, seed: str) -> list[DataFile]:
    """Files of mixed sizes: as many of some bytes as of some KiB or MiB, always the same ones for a seed.

    The largest has a quarter of all bytes, or 32 MiB where that is less.

    :param total: bytes of all files together.
    :raises InvalidError: that is too little for files of mixed sizes.
    """
    if total < LEAST_BYTES:
        raise InvalidError(f"files of mixed sizes have {LEAST_BYTES:,} bytes together, or more, not {total:,}")
    chance = random.Random(seed)
    largest = min(LARGEST, total // 4)
    sizes = [largest, SMALLEST]
    rest = total - sum(sizes)
    while rest:
        size = min(rest, round(math.exp(chance.uniform(math.log(SMALLEST), math.log(largest)))))
        sizes.append(size)
        rest -= size
    chance.shuffle(sizes)
    files: list[DataFile] = []
    for number, size in enumerate(sizes):
        files.append(DataFile(f"file-{number:04}", f"{seed}/{number}", end_of(files), size))
    return files


def end_of(files: list[DataFile]) -> int:
    """Bytes that a volume has in which they all lie: whole blocks."""
    return -(-(files[-1].offset + files[-1].size) // BLOCK) * BLOCK if files else 0
