"""Two ways to connect a volume's file with registered memory: mapping the file, or caching it.

`Mapped` maps and registers the file's own pages. When a client's one-sided write completes, its data is in the page
cache, so a later fdatasync covers it: see `Mapped.sync`. It is for the software device. A NIC's driver pins registered
pages for a long time, which kernels refuse for pages of files, since the file system could not detect writes to them.

`Cached` registers anonymous memory, reads the file into it, and writes changes back. Only the client knows which ranges
it wrote one-sidedly, so its flush lists them: see `Cached.sync`.
"""

import threading
from collections.abc import Iterable
from typing import Protocol

from aioverbs import AccessFlags, MemoryRegion
from storage_server.files import File
from storage_server.ranges import Ranges

__all__ = ["Backing", "Cached", "Mapped"]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.MW_BIND
_PIECE = 64 * 1024  # bytes compared at a time


class Backing(Protocol):
    """A volume's bytes in registered memory: `Mapped` or `Cached`. Made by `Volumes`.

    `region` is the registered memory, `memory` a view of it with the volume's size.
    """

    region: MemoryRegion
    memory: memoryview
    report_writes: bool
    """Whether a flush must list the ranges that were written one-sidedly."""

    def written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Record ranges of the memory that may differ from the file. Can be called from any thread.

        :param ranges: pairs of start and end (exclusive).
        """

    def sync(self) -> None:
        """Make the ranges recorded with `written` durable, with the contents that they have at the time of the call.

        Blocks the calling thread. There is at most one call at a time.

        :raises OSError: the disk failed.
        """

    def write_back(self) -> None:
        """Write all changes back to the file, whether they were recorded or not, and make them durable.

        Blocks the calling thread. No client may write meanwhile.

        :raises OSError: the disk failed.
        """


class Mapped:
    """The file's own pages, mapped and registered.

    :param file: the file.
    :param region: memory region of a mapping of the file.
    """

    report_writes = False

    def __init__(self, file: File, region: MemoryRegion) -> None:
        self._file = file
        self.region = region
        self.memory = region.buffer

    def written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing, because the kernel tracks dirty pages."""

    def sync(self) -> None:
        """Call fdatasync, which is sufficient for the following reasons.

        A client flushes after its writes have completed. An RDMA write completes at the client when the server's device
        has acknowledged it, and the software device acknowledges after copying the bytes. It copies either with stores
        to the mapping, which mark the pages dirty in the page tables, or with process_vm_writev, in which the kernel
        marks them when it unpins them. Both happen before the flush request is received. fdatasync collects the dirty
        marks of the page tables (and write-protects the pages, so that a later store marks them again), writes the
        pages, and waits. A store that arrives in between belongs to a write that had not completed when the flush was
        requested.

        :raises OSError: the disk failed.
        """
        self._file.datasync()

    def write_back(self) -> None:
        """Call fdatasync; no write bypasses the kernel's tracking of dirty pages.

        :raises OSError: the disk failed.
        """
        self._file.datasync()


class Cached:
    """Anonymous memory as a cache of the file.

    Dirty ranges come from two sources: writes by message, which the server sees, and the ranges that a flush lists as
    written one-sidedly by its client. A client that dies before its flush leaves its writes in memory, where other
    clients read them, but not marked as dirty. Their durability was not promised, and other clients lose nothing: a
    flush writes back the whole of the ranges it lists from memory, including bytes that other clients wrote there. To
    keep such unflushed writes unless the server crashes, `write_back` compares memory and file: when the last client
    closes the volume, before the volume is copied, and when the server ends.

    :param region: memory region of the volume's size, to be filled from the file.
    """

    report_writes = True

    def __init__(self, file: File, region: MemoryRegion) -> None:
        self._file = file
        self.region = region
        self.memory = region.buffer
        self._dirty = Ranges()
        self._lock = threading.Lock()  # guards the ranges

    def written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Record ranges that may differ from the file.

        :param ranges: pairs of start and end (exclusive).
        """
        with self._lock:
            self._dirty.update(ranges)

    def sync(self) -> None:
        """Write the recorded ranges back to the file, then call fdatasync.

        The ranges are taken before any of them is read, so a write that comes later is recorded later and left to the
        next sync. If a write fails, no later sync succeeds (see `Commits`), so the ranges are not put back.

        :raises OSError: the disk failed.
        """
        with self._lock:
            ranges = self._dirty.take()
        for start, end in ranges:
            self._file.write(self.memory[start:end], start)
        self._file.datasync()

    def write_back(self) -> None:
        """Write all bytes back that differ from the file, whether they were recorded or not, then call fdatasync.

        :raises OSError: the disk failed.
        """
        with self._lock:
            self._dirty.take()
        for start in range(0, len(self.memory), _PIECE):
            piece = self.memory[start : start + _PIECE]
            in_file = bytearray(len(piece))
            self._file.read_into(memoryview(in_file), start)
            if in_file != piece:
                self._file.write(piece, start)
        self._file.datasync()
