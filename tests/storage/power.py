"""A simulated disk whose power can be cut. Unsynced data is then lost or kept at random, per sector and per name."""

import contextlib
import errno
import mmap
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from storage_server.catalog import Catalog
from storage_server.files import Disk, File

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SECTOR", "Power", "PowerCutError", "SteppedCatalog"]

SECTOR = 512


class PowerCutError(OSError):
    """The power is off."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the power is off")


class Inode:
    """The durable contents of a file, independent of its name."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable


class PoweredFile(File):
    """A file on the simulated disk."""

    def __init__(self, power: "Power", file: File, inode: Inode) -> None:
        super().__init__(file.descriptor)
        self._power = power
        self._inode = inode

    def read_into(self, memory: memoryview, offset: int) -> None:
        self._power.check()
        super().read_into(memory, offset)

    def write(self, data: "Buffer", offset: int) -> None:
        self._power.step("write")
        super().write(data, offset)

    def resize(self, size: int) -> None:
        self._power.step("resize")
        super().resize(size)

    def map(self, size: int) -> mmap.mmap:
        self._power.check()
        return super().map(size)

    def copy_from(self, source: File, size: int) -> str:
        self._power.step("copy")
        return super().copy_from(source, size)

    def datasync(self) -> None:
        self._sync("datasync")

    def sync(self) -> None:
        self._sync("sync")

    def _sync(self, what: str) -> None:
        self._power.step(what)
        content = bytearray(self.size())
        super().read_into(memoryview(content), 0)
        self._power.work()
        with self._power.lock:  # atomic: either the contents become durable as a whole, or the power was cut before
            self._power.check()
            self._inode.durable = bytes(content)


class Power(Disk):
    """The disk of a server's folder, whose power is cut at a given step.

    :param cut_at: number of the step, from 1, that fails because the power is off; 0: none.
    :param sync_s: maximum duration of a sync in seconds.
    """

    def __init__(self, root: Path, cut_at: int, seed: int = 0, sync_s: float = 0.0) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.done: list[str] = []
        self.image: dict[str, bytes] | None = None
        self.failing_calls = 0  # number of the following calls that fail
        self.syncs_may_end = threading.Event()  # cleared by tests to make syncs hang
        self.syncs_may_end.set()
        self._cut_at = cut_at
        self._sync_s = sync_s
        self._random = random.Random(seed)
        self._live: dict[Path, Inode] = {}
        self._durable: dict[Path, Inode] = {}
        for path in (root / "volumes").glob("*"):  # files of an earlier server
            self._live[path] = self._durable[path] = Inode(path.read_bytes())

    # ---- Files

    def create(self, path: Path) -> PoweredFile:
        self.step("create")
        file = super().create(path)
        self._live[path] = Inode()
        return PoweredFile(self, file, self._live[path])

    def open(self, path: Path) -> PoweredFile:
        self.check()
        return PoweredFile(self, super().open(path), self._live[path])

    def remove(self, path: Path) -> None:
        self.step("remove")
        with self.lock:
            super().remove(path)
            self._live.pop(path, None)

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory")
        with self.lock:
            self._durable = dict(self._live)

    # ---- Power

    def on(self) -> bool:
        """Return whether the power is on, and not just being cut. If so, a later image reflects all earlier steps."""
        with self.lock:
            return self.image is None

    def check(self) -> None:
        """Raise PowerCutError if the power is off."""
        if self.image is not None:
            raise PowerCutError

    def work(self) -> None:
        """Take as long as a disk: data written meanwhile is not part of the sync."""
        time.sleep(self._random.random() * self._sync_s)
        assert self.syncs_may_end.wait(20)

    def step(self, what: str) -> None:
        """Count a step, and fail if the power is cut at it."""
        with self.lock:
            self.check()
            if self.failing_calls:
                self.failing_calls -= 1
                raise OSError(errno.EIO, "the disk is broken")
            self.done.append(what)
            if len(self.done) == self._cut_at:
                self.cut()
                raise PowerCutError

    def cut(self) -> None:
        """Cut the power, if it is still on."""
        with self.lock:
            if self.image is not None:
                return
            image = {}
            for path in {**self._live, **self._durable}:
                states = [self._live.get(path), self._durable.get(path)]
                inode = self._random.choice(states)
                if inode is not None:
                    # A removed file that reappears has only its durable contents.
                    live = path.read_bytes() if inode is self._live.get(path) else inode.durable
                    image[str(path.relative_to(self.root))] = self._survivor(inode.durable, live)
            for name in ("catalog.sqlite", "catalog.sqlite-wal", "owner.token"):
                with contextlib.suppress(FileNotFoundError):
                    image[name] = (self.root / name).read_bytes()
            self.image = image

    def _survivor(self, durable: bytes, live: bytes) -> bytes:
        size = self._random.choice([len(durable), len(live)])
        found = bytearray(size)
        share = self._random.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        for at in range(0, size, SECTOR):
            source = live if self._random.random() < share else durable
            sector = source[at : at + SECTOR]
            found[at : at + len(sector)] = sector
        return bytes(found)

    def restore(self, root: Path) -> None:
        """Create a folder with the surviving files."""
        assert self.image is not None
        (root / "volumes").mkdir(parents=True)
        for name, content in self.image.items():
            (root / name).write_bytes(content)


class SteppedCatalog(Catalog):
    """A catalog whose transactions count as steps, too. Each is done completely or not at all, by SQLite."""

    power: Power | None = None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if self.power is not None:
            self.power.step("commit")
        with super()._transaction():
            yield
