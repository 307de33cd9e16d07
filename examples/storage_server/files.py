"""All file system operations of the server, in one replaceable layer.

Three calls decide what is durable and when: `File.datasync`, `File.sync` and `Disk.sync_directory`. Tests replace this
layer with a disk that forgets unsynced data, or that fails at a given call. All functions block: the server calls them
in threads, except for some calls of `File.datasync`.
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

_FICLONE = 0x40049409  # linux/fs.h: share all blocks of the source until one of the two files is written to
_NO_REFLINK = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS}
_READAHEAD_BYTES = 256 << 20  # read ahead when a file is mapped
_MAX_COPY = 64 << 20  # limit of one copy_file_range call


class File:
    """A file that is open for reading and writing. Made by `Disk`; the caller must close it.

    All methods raise OSError if the operating system reports an error.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def size(self) -> int:
        """Return the file's size in bytes."""
        return os.fstat(self.descriptor).st_size

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` from the file, beginning at byte `offset` of the file.

        :raises OSError: the file ends before `memory` is full.
        """
        at = 0
        while at < len(memory):
            count = os.preadv(self.descriptor, [memory[at:]], offset + at)
            if not count:
                raise OSError(errno.EIO, f"unexpected end of file at byte {offset + at:,}")
            at += count

    def write(self, data: "Buffer", offset: int) -> None:
        """Write all of `data` to the file, beginning at byte `offset`."""
        rest = memoryview(data).cast("B")
        while rest:
            count = os.pwrite(self.descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def resize(self, size: int) -> None:
        """Change the file's size. All new blocks are allocated now, so that ENOSPC is raised here and not by a later
        write.

        :param size: new size in bytes.
        :raises OSError: the disk is full.
        """
        if size > self.size():
            # A store to a mapped page without disk space raises SIGBUS and ends the server: allocate now.
            os.posix_fallocate(self.descriptor, 0, size)
        else:
            os.ftruncate(self.descriptor, size)

    def map(self, size: int) -> mmap.mmap:
        """Return a shared mapping of the first `size` bytes of the file.

        A store to a mapping dirties the whole folio of the page cache that contains the page. Kernels create large
        folios when they read ahead on their own; a flush of 4 KiB would then write many times that much and take three
        times as long. MADV_RANDOM turns that off. The explicit POSIX_FADV_WILLNEED reads ahead page by page.
        """
        mapped = mmap.mmap(self.descriptor, size)
        mapped.madvise(mmap.MADV_RANDOM)
        os.posix_fadvise(self.descriptor, 0, min(size, _READAHEAD_BYTES), os.POSIX_FADV_WILLNEED)
        return mapped

    def copy_from(self, source: "File", size: int) -> str:
        """Copy the file `source` into this file.

        :param source: the file to copy.
        :param size: number of bytes to copy.
        :returns: ``"reflink"`` if the two files share their blocks, ``"copy"`` if the bytes were copied.
        :raises OSError: the disk lacks space for a full copy, or the source is shorter than `size`.
        """
        free = os.fstatvfs(self.descriptor)
        if free.f_bavail * free.f_frsize < size:
            # Required for a reflink too: shared blocks need space of their own once either file is written to.
            raise OSError(
                errno.ENOSPC, f"a copy needs {size:,} bytes, but the disk has {free.f_bavail * free.f_frsize:,}"
            )
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
            count = os.copy_file_range(source.descriptor, self.descriptor, min(size - at, _MAX_COPY), at, at)
            if not count:
                raise OSError(errno.EIO, f"the source of a copy ends at {at:,} of {size:,} bytes")
            at += count
        return "copy"

    def datasync(self) -> None:
        """Make all bytes of the file durable, including those written through a mapping."""
        os.fdatasync(self.descriptor)

    def sync(self) -> None:
        """Make all bytes and the size of the file durable."""
        os.fsync(self.descriptor)
        # Drop the large folios that writing the file in one go left in the page cache: see `map`.
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class Disk:
    """The file system of this machine."""

    def create(self, path: Path) -> File:
        """Create an empty file and return it, open.

        :raises FileExistsError: the file already exists.
        """
        return File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def open(self, path: Path) -> File:
        """Open an existing file and return it.

        :raises FileNotFoundError: the file does not exist.
        """
        return File(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def remove(self, path: Path) -> None:
        """Delete a file if it exists."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable, so that files created in it exist and files deleted from it are
        gone.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
