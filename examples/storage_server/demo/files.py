"""PURE: the files of a client: number, sizes and offsets in its volume."""

import math
import random
from dataclasses import dataclass

from storage_server.catalog import BLOCK
from storage_server.errors import InvalidError

__all__ = ["LARGEST", "MIN_BYTES", "SMALLEST", "DataFile", "data_files", "end_of"]

SMALLEST = 3
LARGEST = 32 << 20
MIN_BYTES = 16 * BLOCK


@dataclass(frozen=True)
class DataFile:
    """A file.

    :param name: the file's name.
    :param seed: seed of its contents.
    :param offset: position in the volume, a multiple of the block size.
    :param size: bytes.
    """

    name: str
    seed: str
    offset: int
    size: int

    def contents(self) -> bytes:
        """Return the file's contents, which are the same on each call."""
        return random.Random(self.seed).randbytes(self.size)


def data_files(total: int, seed: str) -> list[DataFile]:
    """Return files of mixed sizes, from a few bytes to MiB, in the order of their offsets; the same arguments always
    give the same files.

    The largest file has a quarter of all bytes, but at most 32 MiB.

    :param total: number of bytes of all files together.
    :param seed: seed for the sizes and contents.
    :raises InvalidError: `total` is too small.
    """
    if total < MIN_BYTES:
        raise InvalidError(f"the files of a client need at least {MIN_BYTES:,} bytes together, got {total:,}")
    rng = random.Random(seed)
    largest = min(LARGEST, total // 4)
    sizes = [largest, SMALLEST]
    rest = total - sum(sizes)
    while rest:
        size = min(rest, round(math.exp(rng.uniform(math.log(SMALLEST), math.log(largest)))))
        sizes.append(size)
        rest -= size
    rng.shuffle(sizes)
    files: list[DataFile] = []
    for number, size in enumerate(sizes):
        files.append(DataFile(f"file-{number:04}", f"{seed}/{number}", end_of(files), size))
    return files


def end_of(files: list[DataFile]) -> int:
    """Return the size in bytes of a volume that holds all the files, a multiple of the block size; 0 if there are no
    files.
    """
    return -(-(files[-1].offset + files[-1].size) // BLOCK) * BLOCK if files else 0
