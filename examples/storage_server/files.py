"""The file layer: all that the server asks of a disk, behind one small seam.

What is durable and when is decided by very few calls: `File.datasync`, `File.sync` and `Disk.sync_directory`. Tests
put a disk there that forgets what was not synced, and that fails at any call. All of this blocks: the server calls it
beside its loops, but for a `datasync` here and there.
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Disk", "File"]

_FICLONE = 0x40049409  # linux/fs.h: the whole file shares the other's blocks, until one of them is written to
_NO_REFLINK = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS}
_AHEAD_BYTES = 256 << 20  # that are read when a file is mapped
_COPY_BYTES = 64 << 20  # of one call


class File:
    """A file that is open for reading and writing, by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def size(self) -> int:
        """Its bytes."""
        return os.fstat(self.descriptor).st_size

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory from there on. What lies beyond the file's end is an OSError."""
        at = 0
        while at < len(memory):
            count = os.preadv(self.descriptor, [memory[at:]], offset + at)
            if not count:
                raise OSError(errno.EIO, f"the file ends at {offset + at:,} bytes, and should not")
            at += count

    def write(self, data: "Buffer", offset: int) -> None:
        """Write all of it."""
        rest = memoryview(data).cast("B")
        while rest:
            count = os.pwrite(self.descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def resize(self, size: int) -> None:
        """Give it so many bytes, with room on the disk for each: ENOSPC now, and not when they are written."""
        if size > self.size():
            # Writing to a mapping where the disk has no room is a SIGBUS, which ends the server: have the room now.
            os.posix_fallocate(self.descriptor, 0, size)
        else:
            os.ftruncate(self.descriptor, size)

    def map(self, size: int) -> mmap.mmap:
        """Its first bytes as shared memory.

        A store to a mapping makes dirty all of the piece of the page cache that it is in. Kernels make these pieces
        large where they read ahead by themselves, so that a flush of 4 KiB would write many times that and take three
        times as long: they are not to. What they are asked for ahead comes page by page.
        """
        mapped = mmap.mmap(self.descriptor, size)
        mapped.madvise(mmap.MADV_RANDOM)
        os.posix_fadvise(self.descriptor, 0, min(size, _AHEAD_BYTES), os.POSIX_FADV_WILLNEED)
        return mapped

    def copy_from(self, source: "File", size: int) -> str:
        """Become a copy of another one, at once where the file system can share blocks; "reflink" or "copy"."""
        free = os.fstatvfs(self.descriptor)
        if free.f_bavail * free.f_frsize < size:
            # Asked of a reflink as well: the blocks that are shared now want room when either file is written to.
            raise OSError(errno.ENOSPC, f"a copy wants {size:,} bytes of the disk, which has fewer")
        try:
            fcntl.ioctl(self.descriptor, _FICLONE, source.descriptor)
        except OSError as error:
            if error.errno not in _NO_REFLINK:
                raise
        else:
            return "reflink"
        self.resize(size)
        at = 0
        while at < size:
            count = os.copy_file_range(source.descriptor, self.descriptor, min(size - at, _COPY_BYTES), at, at)
            if not count:
                raise OSError(errno.EIO, f"the file to be copied ends at {at:,} of {size:,} bytes")
            at += count
        return "copy"

    def datasync(self) -> None:
        """Its bytes are durable, those that were written through a mapping as well."""
        os.fdatasync(self.descriptor)

    def sync(self) -> None:
        """So is its size."""
        os.fsync(self.descriptor)
        # What was written as a whole is in large pieces: see `map`.
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)


class Disk:
    """The files of this machine."""

    def create(self, path: Path) -> File:
        """An empty one that was not there before."""
        return File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def open(self, path: Path) -> File:
        """One that is there."""
        return File(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def remove(self, path: Path) -> None:
        """Take it away, if it is there."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Which files there are in it is durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
