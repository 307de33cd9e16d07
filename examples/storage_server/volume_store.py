"""The server's folder: the catalog, the volume files, and the steps that keep both consistent through any crash.

    ROOT/catalog.sqlite    the volumes, and the clients' rights
    ROOT/volumes/7.volume  the bytes of volume 7
    ROOT/owner.token       the token of the client "owner", created with the folder
    ROOT/lock              locked by the running server

Each method is a sequence of steps, each of which is durable before the next begins. If a crash interrupts the sequence,
`start` undoes or completes it. All methods block and are called in threads. The caller holds the volume's lock (see
volumes.py), so that no two changes of a volume overlap.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from storage_server.catalog import Catalog, VolumeRow, new_token
from storage_server.errors import InvalidError
from storage_server.files import Disk, File

__all__ = ["VolumeStore", "open_volume_store"]

logger = logging.getLogger("storage_server")


class VolumeStore:
    """The folder of a server. Created by `open_volume_store`.

    All methods raise OSError if the disk fails.

    :param root: path of the folder.
    :param disk: the file system.
    :param catalog: the folder's database.
    """

    def __init__(self, root: Path, disk: Disk, catalog: Catalog) -> None:
        self.catalog = catalog
        self._root = root
        self._volumes = root / "volumes"
        self._disk = disk

    def start(self) -> list[VolumeRow]:
        """Complete or undo interrupted changes. If there is no client, create the client "owner".

        :returns: the volumes, sorted by name.
        :raises InvalidError: a volume's file is missing or too short.
        """
        self._disk.sync_directory(self._root)
        for row in self.catalog.unfinished():
            logger.warning("removing volume %r, whose creation or deletion was interrupted", row.name)
            self.remove(row)
        volumes = self.catalog.volumes()
        for row in volumes:
            self._check(row)
        if not self.catalog.clients():
            self._make_owner()
        return volumes

    def _check(self, row: VolumeRow) -> None:
        """Check the size of a volume's file, and cut off bytes beyond the end of the volume.

        After an interrupted resize, the file may be longer than its size in the catalog, but never shorter.

        :raises InvalidError: the file is missing or too short.
        """
        try:
            file = self.open(row)
        except FileNotFoundError as error:
            raise InvalidError(f"file {self._path(row)} of volume {row.name!r} is missing: restore it") from error
        with contextlib.closing(file):
            if file.size() < row.size:
                raise InvalidError(
                    f"{self._path(row)} of volume {row.name!r} has {file.size():,} of {row.size:,} bytes"
                )
            if file.size() > row.size:
                file.resize(row.size)
                file.sync()

    def _make_owner(self) -> None:
        """Create the client "owner", which may do everything, and store its token in the folder.

        The token file is durable before the catalog contains the client; otherwise a crash could leave an owner whose
        token is lost.
        """
        token = new_token("owner")
        path = self._root / "owner.token"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(descriptor)
        self._disk.sync_directory(self._root)
        self.catalog.add_client("owner", admin=True, token=token)

    def _path(self, row: VolumeRow) -> Path:
        """Return the path of a volume's file."""
        return self._volumes / f"{row.id}.volume"

    def open(self, row: VolumeRow) -> File:
        """Open the file of a volume and return it; the caller must close it.

        :raises FileNotFoundError: the file does not exist.
        """
        return self._disk.open(self._path(row))

    def make(self, name: str, size: int, fill: Callable[[File], object], *, read_only: bool = False) -> VolumeRow:
        """Create a volume: reserve the name, create the file, then mark the volume as ready.

        :param name: the volume's name.
        :param size: the volume's size in bytes.
        :param fill: function that sets the size and contents of the file with which it is called.
        :param read_only: whether the volume is a snapshot.
        :returns: the volume's row.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name or the size is invalid.
        :raises OSError: the disk failed or is full; the volume is removed.
        """
        row = self.catalog.begin(name, size, read_only=read_only)
        try:
            with contextlib.closing(self._disk.create(self._path(row))) as file:
                fill(file)
                file.sync()
            self._disk.sync_directory(self._volumes)
        except OSError:
            self.remove(row)  # if this fails as well, the next start removes the volume
            raise
        self.catalog.finish(row.id)
        return row

    def remove(self, row: VolumeRow) -> None:
        """Delete a volume: free its name, delete the file, then delete the row."""
        self.catalog.begin_delete(row.id)
        self._disk.remove(self._path(row))
        self._disk.sync_directory(self._volumes)
        self.catalog.forget(row.id)

    def resize(self, row: VolumeRow, size: int) -> VolumeRow:
        """Change the size of a volume; return its new row.

        The file is never shorter than its size in the catalog. Bytes beyond that size do not belong to the volume: they
        are cut off here or at the next start.

        :param row: the volume's row.
        :param size: new size in bytes.
        :raises InvalidError: the size is invalid.
        :raises OSError: the disk failed or is full; the volume keeps its size.
        """
        with contextlib.closing(self.open(row)) as file:
            if size < row.size:
                self.catalog.set_size(row.id, size)
                try:
                    file.resize(size)
                    file.sync()
                except OSError:
                    logger.exception("volume %r was made smaller, but truncating its file failed", row.name)
            else:
                if file.size() > row.size:
                    file.resize(row.size)
                try:
                    file.resize(size)
                    file.sync()
                except OSError:
                    file.resize(row.size)
                    raise
                self.catalog.set_size(row.id, size)
        return row._replace(size=size)

    def copy(self, row: VolumeRow, name: str, *, read_only: bool) -> VolumeRow:
        """Create a volume with the contents of another volume's file.

        Raises the same exceptions as `make`.

        :param row: row of the volume to copy.
        :param name: name of the copy.
        :param read_only: whether the copy is a snapshot.
        :returns: the row of the copy.
        """
        with contextlib.closing(self.open(row)) as source:
            return self.make(name, row.size, lambda file: file.copy_from(source, row.size), read_only=read_only)


@contextlib.contextmanager
def open_volume_store(root: Path, disk: Disk) -> Iterator[VolumeStore]:
    """Lock and open a server's folder for the duration of the block; yield a `VolumeStore`. Create the folder if it is
    missing.

    :param root: path of the folder.
    :param disk: the file system.
    :raises InvalidError: another server has locked the folder, or its catalog has a different version.
    :raises OSError: the folder cannot be created or written to.
    """
    (root / "volumes").mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidError(f"another server uses {root}: stop it, or choose another folder") from error
        with contextlib.closing(Catalog(root / "catalog.sqlite")) as catalog:
            yield VolumeStore(root, disk, catalog)
