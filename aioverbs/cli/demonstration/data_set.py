"""PURE: the files of a client: how many, how large, what is in them, and whether what was found is that."""

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BLOCK", "DataFile", "batches", "contents", "data_files", "end_of", "fault_of"]

BLOCK = 4096  # what volumes are made of: files begin at one
SMALLEST = 3
LARGEST = 32 << 20
_LEAST_BYTES = 16 * BLOCK
_PIECE = 1 << 20


@dataclass(frozen=True)
class DataFile:
    """A file of the data set.

    :param seed: its contents are made from.
    :param offset: where it lies in its volume.
    """

    name: str
    seed: str
    offset: int
    size: int

    @property
    def room(self) -> int:
        """Bytes that it takes in its volume: whole blocks."""
        return -(-self.size // BLOCK) * BLOCK


def data_files(total: int, seed: str) -> list[DataFile]:
    """So many bytes in files of mixed sizes, as many of some bytes as of some KiB or MiB; always the same ones.

    The largest has a quarter of all bytes, or 32 MiB where that is less.

    :raises ValueError: that is too little for files of mixed sizes.
    """
    if total < _LEAST_BYTES:
        raise ValueError(f"files of mixed sizes have {_LEAST_BYTES:,} bytes together, or more, not {total:,}")
    chance = random.Random(seed)
    largest = min(LARGEST, total // 4)
    sizes = [largest, SMALLEST]
    rest = total - sum(sizes)
    while rest:
        size = min(rest, round(math.exp(chance.uniform(math.log(SMALLEST), math.log(largest)))))
        sizes.append(size)
        rest -= size
    chance.shuffle(sizes)
    return list(_placed(sizes, seed))


def _placed(sizes: list[int], seed: str) -> Iterator[DataFile]:
    offset = 0
    for number, size in enumerate(sizes):
        file = DataFile(f"file-{number:04}", f"{seed}/{number}", offset, size)
        yield file
        offset += file.room


def end_of(files: list[DataFile]) -> int:
    """Bytes that a volume has which they all lie in."""
    return files[-1].offset + files[-1].room


def contents(file: DataFile) -> Iterator[bytes]:
    """What is in a file, in pieces."""
    chance = random.Random(file.seed)
    for at in range(0, file.size, _PIECE):
        yield chance.randbytes(min(_PIECE, file.size - at))


def batches(files: list[DataFile], room: int) -> Iterator[list[tuple[DataFile, int]]]:
    """Files that fit into so much memory together, each with its place there.

    :param room: bytes; no file has more.
    """
    batch: list[tuple[DataFile, int]] = []
    used = 0
    for file in files:
        if used + file.room > room:
            yield batch
            batch, used = [], 0
        batch.append((file, used))
        used += file.room
    if batch:
        yield batch


def fault_of(file: DataFile, digest: bytes, made: bytes | memoryview, found: bytes | memoryview) -> str | None:
    """What is wrong with the bytes of a file; None where each is the one that was made, and the SHA-256 is, too.

    :param digest: the SHA-256 of what was made, as it was made.
    :param made: the file as it is on the disk.
    :param found: what was read back.
    """
    if len(found) != file.size:
        return f"{file.name} has {len(found):,} bytes, and not {file.size:,}"
    for at in range(0, file.size, _PIECE):
        here, there = bytes(made[at : at + _PIECE]), bytes(found[at : at + _PIECE])
        if here != there:
            wrong = [index for index, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]
            first = at + wrong[0]
            return (
                f"{file.name}, of {file.size:,} bytes, is not what was written from byte {first:,} on"
                f" ({len(wrong):,} bytes of the {len(here):,} from {at:,} on)"
            )
    if hashlib.sha256(found).digest() != digest:
        return f"{file.name}, of {file.size:,} bytes, has another SHA-256 than what was made"
    return None
