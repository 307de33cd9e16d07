"""What stands between a volume's file and the memory that clients reach: a mapping of the file, or a cache before it.

`Mapped`: the file's own pages are mapped and registered. What a client wrote one-sidedly is in the page cache when its
completion came, so that fdatasync after that finds it: see `Mapped.sync`. It is for the software device. A NIC's driver
pins what is registered for as long as it is, and kernels refuse that for pages of files, since a file system could not
tell when such a page is written to.

`Cached`: anonymous pages are registered, the file is read into them, and what was written is written back. Nobody but
the client knows what it wrote one-sidedly, so its flush says that: see `Cached.sync`.
"""

import threading
from collections.abc import Iterable
from typing import Protocol

from aioverbs import AccessFlags, MemoryRegion
from storage_server.files import File
from storage_server.ranges import Ranges

__all__ = ["Backing", "Cached", "Mapped"]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.MW_BIND
_PIECE = 64 * 1024  # bytes that are compared at a time


class Backing(Protocol):
    """A volume's bytes in registered memory."""

    region: MemoryRegion
    memory: memoryview
    tell: bool
    """Whether a flush is to be told what was written one-sidedly."""

    def written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These bytes of the memory may not be in the file. Called by any thread."""

    def sync(self) -> None:
        """Make durable what was in memory when this was called, of what was told by `written`. It blocks.

        One at a time.
        """

    def settle(self) -> None:
        """Bring to the file, and make durable, all that is in memory, told or not. It blocks; nobody may write."""


class Mapped:
    """The file's own pages.

    :param region: of a mapping of the file.
    """

    tell = False

    def __init__(self, file: File, region: MemoryRegion) -> None:
        self._file = file
        self.region = region
        self.memory = region.buffer

    def written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The kernel knows."""

    def sync(self) -> None:
        """Fdatasync, which is enough.

        A client flushes after its writes completed. A write of RDMA completes at its end when this end's device has
        acknowledged it, and the software device acknowledges when it has copied the bytes: by a store to the mapping,
        which marks the page dirty in the page tables, or by the kernel's process_vm_writev, which marks it when it lets
        go of it. Both are over before the request to flush is received. fdatasync takes up the dirty marks of the page
        tables (it write-protects the pages, so that who writes later marks them anew), writes, and waits. A store that
        comes in the middle of that is of a write that was not complete when the flush was asked for.
        """
        self._file.datasync()

    def settle(self) -> None:
        """The same: nothing can be written past the kernel."""
        self._file.datasync()


class Cached:
    """Memory of our own before the file.

    What is dirty is what messages wrote, which the server knows, and what a flush says that its client wrote
    one-sidedly. A client that dies before its flush leaves its writes in the memory, where others read them, and nobody
    says that they are dirty. It was promised nothing for them, and they take nothing from others: a flush writes back
    what it names from the memory, whole, whoever else has written there. So that they are not lost without a crash,
    whoever may have written is asked no more at the end: `settle` compares, when the last client closes the volume,
    before a copy is made of it, and when the server ends.

    :param region: of as many bytes as the volume has, filled from the file.
    """

    tell = True

    def __init__(self, file: File, region: MemoryRegion) -> None:
        self._file = file
        self.region = region
        self.memory = region.buffer
        self._dirty = Ranges()
        self._lock = threading.Lock()  # of the ranges

    def written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These bytes may not be in the file."""
        with self._lock:
            self._dirty.update(ranges)

    def sync(self) -> None:
        """Write back, and fdatasync.

        The ranges are taken before any of them is read: what is written to them after that is told of after that, and
        is the next sync's. Where one fails no later one succeeds (see `Commits`), so nothing is put back.
        """
        with self._lock:
            ranges = self._dirty.take()
        for start, end in ranges:
            self._file.write(self.memory[start:end], start)
        self._file.datasync()

    def settle(self) -> None:
        """Write back what is not as it is in the file, told or not."""
        with self._lock:
            self._dirty.take()
        for start in range(0, len(self.memory), _PIECE):
            piece = self.memory[start : start + _PIECE]
            there = bytearray(len(piece))
            self._file.read_into(memoryview(there), start)
            if there != piece:
                self._file.write(piece, start)
        self._file.datasync()
