"""What a client does with its files: makes them, writes them to a volume, reads them back, and compares.

Reads and writes are one-sided, from and to memory that is registered: `Tray`. The times are those in which requests
were under way; to get at files, to compare and to sum is not in them.
"""

import array
import asyncio
import hashlib
import mmap
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aioverbs._memory.region import MemoryRegion, RegionSlice
from aioverbs.cli.demonstration.data_set import BLOCK, DataFile, batches, contents, fault_of

__all__ = ["Loading", "Moved", "Sampled", "Volume"]

PIECE = 1 << 20  # bytes of a request
_FAULTS_MOST = 20  # that are told
_SAMPLES_MOST = 500_000
_OPEN_MOST = 64  # files that samples are taken of
_TELL_S = 0.1

Tell = Callable[[int], None]
"""Is told how many bytes there are, or samples, since it began."""

Verb = Callable[[RegionSlice, int], Awaitable[None]]
"""Reads, or writes, between memory and a volume from an offset on."""

Several = Callable[[Callable[[int], Coroutine[object, object, None]], Iterable[int]], Awaitable[None]]
"""Does work at each of some places, at a few at a time."""


class Volume(Protocol):
    """What is needed of a volume of the storage server."""

    def read_into(self, local: RegionSlice, offset: int) -> Awaitable[None]:
        """Read one-sidedly."""

    async def write_from(self, local: RegionSlice, offset: int) -> None:
        """Write one-sidedly."""

    async def flush(self) -> None:
        """Make durable what was written."""


@dataclass
class Moved:
    """What was written, or read.

    :param requests_s: how long requests were under way.
    :param flush_ns: how long each flush took.
    :param faults: what was not as it was written, some of it.
    :param verified_bytes: that were.
    """

    bytes: int = 0
    requests_s: float = 0.0
    flush_ns: list[int] = field(default_factory=list)
    verified_files: int = 0
    verified_bytes: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class Sampled:
    """Single reads, one after the other.

    :param took_ns: how long each took.
    :param faults: blocks that were not what was written, some of them.
    """

    took_ns: "array.array[int]"
    faults: list[str]


class Loading:
    """A client's part.

    :param files: its files.
    :param folder: where they are.
    :param tray: registered memory for some of them at a time, or for the largest.
    :param tell: is told how it goes.
    """

    def __init__(self, files: list[DataFile], folder: Path, tray: MemoryRegion, several: Several, tell: Tell) -> None:
        self._files = files
        self._folder = folder
        self._tray = tray
        self._several = several
        self._digests: dict[str, bytes] = {}
        self._progress = _Progress(tell)

    def make(self) -> None:
        """Make the files."""
        self._progress.begin()
        for file in self._files:
            digest = hashlib.sha256()
            with (self._folder / file.name).open("xb") as made:
                for piece in contents(file):
                    made.write(piece)
                    digest.update(piece)
                    self._progress.more(len(piece))
            self._digests[file.name] = digest.digest()

    async def write(self, volume: Volume) -> Moved:
        """Write them all, and flush each trayful."""
        moved = Moved()
        self._progress.begin()
        for batch in batches(self._files, len(self._tray)):
            await asyncio.to_thread(self._fill, batch)
            await self._move(batch, volume.write_from, moved)
            began = time.perf_counter_ns()
            await volume.flush()
            moved.flush_ns.append(time.perf_counter_ns() - began)
        return moved

    async def read(self, volume: Volume) -> Moved:
        """Read them all, and compare each with what it was."""
        moved = Moved()
        self._progress.begin()
        for batch in batches(self._files, len(self._tray)):
            self._tray.buffer[:] = bytes(len(self._tray))  # so that what is not read is not found
            await self._move(batch, volume.read_into, moved)
            await asyncio.to_thread(self._compare, batch, moved)
        return moved

    async def _move(self, batch: list[tuple[DataFile, int]], verb: Verb, moved: Moved) -> None:
        pieces = [
            (self._tray[place + at : place + min(at + PIECE, file.size)], file.offset + at)
            for file, place in batch
            for at in range(0, file.size, PIECE)
        ]

        async def move(number: int) -> None:
            local, offset = pieces[number]
            await verb(local, offset)
            self._progress.more(len(local))

        began = time.perf_counter()
        await self._several(move, range(len(pieces)))
        moved.requests_s += time.perf_counter() - began
        moved.bytes += sum(file.size for file, _ in batch)

    def _fill(self, batch: list[tuple[DataFile, int]]) -> None:
        for file, place in batch:
            with (self._folder / file.name).open("rb", buffering=0) as made:
                at = 0
                while at < file.size:
                    got = made.readinto(self._tray.buffer[place + at : place + file.size])
                    if not got:
                        raise OSError(f"{self._folder / file.name} ends after {at:,} of {file.size:,} bytes")
                    at += got

    def _compare(self, batch: list[tuple[DataFile, int]], moved: Moved) -> None:
        for file, place in batch:
            found = self._tray.buffer[place : place + file.size]
            with (
                (self._folder / file.name).open("rb") as opened,
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as made,
            ):
                fault = fault_of(file, self._digests[file.name], made, found)
            if fault is None:
                moved.verified_files += 1
                moved.verified_bytes += file.size
            elif len(moved.faults) < _FAULTS_MOST:
                moved.faults.append(fault)

    async def sample(self, volume: Volume, seconds: float, seed: str) -> Sampled:
        """Read blocks of 4 KiB at random for some time, one after the other, and compare each."""
        chance = random.Random(seed)
        files = [file for file in self._files if file.size >= BLOCK]
        files = chance.sample(files, min(len(files), _OPEN_MOST))
        sampled = Sampled(array.array("Q"), [])
        local = self._tray[:BLOCK]
        self._progress.begin()
        end = time.perf_counter() + seconds
        opened = {file: (self._folder / file.name).open("rb", buffering=0) for file in files}
        try:
            while time.perf_counter() < end and len(sampled.took_ns) < _SAMPLES_MOST:
                file = chance.choice(files)
                at = chance.randrange(file.size // BLOCK) * BLOCK
                local.buffer[:] = bytes(BLOCK)
                began = time.perf_counter_ns()
                await volume.read_into(local, file.offset + at)
                sampled.took_ns.append(time.perf_counter_ns() - began)
                opened[file].seek(at)
                if opened[file].read(BLOCK) != bytes(local.buffer) and len(sampled.faults) < _FAULTS_MOST:
                    sampled.faults.append(f"{file.name}: 4,096 bytes from {at:,} on are not what was written")
                self._progress.more(1)
        finally:
            for each in opened.values():
                each.close()
        return sampled


class _Progress:
    """Tells how far it is, not too often."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._done = 0
        self._next = 0.0

    def begin(self) -> None:
        self._done, self._next = 0, time.monotonic() + _TELL_S

    def more(self, done: int) -> None:
        self._done += done
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _TELL_S
            self._tell(self._done)
