"""The volumes of a server: making them and taking them away, opening them, and who uses them.

All of this happens on one loop, the server's own, which sessions on the pool's workers ask (`Volumes.ask`): so nothing
here is shared between threads but what `Volume` says of itself. Each volume has a lock of that loop. Whoever changes
what a volume is (its size, its memory, whether it is there), or who uses it and how, has it; the users are told on
their own loops meanwhile, and ask for no lock there. So there is one order, and nobody waits in a circle.

What blocks, as the catalog and files do, is done in threads.
"""

import asyncio
import contextlib
import errno
import logging
import mmap
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from aioverbs import ProtectionDomain, VerbsError
from storage_server.backings import ACCESS, Backing, Cached, Mapped
from storage_server.cancelling import to_its_end
from storage_server.catalog import VolumeRow, check_size
from storage_server.commits import Commits
from storage_server.errors import (
    BusyError,
    DiskError,
    InvalidError,
    NoRoomError,
    RefusedError,
    StorageError,
    UnknownVolumeError,
)
from storage_server.files import File
from storage_server.folder import Folder
from storage_server.metrics import Metrics
from storage_server.protocol import Mode, VolumeInfo

__all__ = ["User", "Volume", "Volumes", "told"]

logger = logging.getLogger("storage_server")

LETTING_GO_S = 10.0  # for those who use a volume
_LOOK_S = 1.0  # for rights that were changed by another process
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

P = ParamSpec("P")
T = TypeVar("T")


def told(error: Exception) -> StorageError:
    """What clients are told of an error."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return NoRoomError(f"the disk has no room: {error}")
    return DiskError(f"the server could not do that: {type(error).__name__}: {error}")


class User(Protocol):
    """Who has a volume open: one session's handle of it. Its methods are called on its loop, one at a time."""

    client: str
    mode: Mode
    loop: asyncio.AbstractEventLoop

    async def begin(self, volume: "Volume") -> None:
        """Begin to grant the client the volume's memory; what it has granted stays as it is.

        :raises ChangedError: the user wants no more.
        """

    async def pause(self) -> None:
        """Take that back for a while: when this returns nothing writes there."""

    async def expel(self, why: str) -> None:
        """Take it back for good."""


class Volume:
    """A volume. Its users' loops look at `backing` while they have it open, and call `commits`; all else is the loop's.

    :param executor: the threads of its flushes.
    """

    def __init__(self, row: VolumeRow, executor: Executor, metrics: Metrics) -> None:
        self.row = row
        self.lock = asyncio.Lock()
        self.users: set[User] = set()
        self.gone = False
        self.file: File | None = None
        self.map: mmap.mmap | None = None
        self.backing: Backing | None = None
        self.touched = False  # somebody could write since it was opened
        self.commits = Commits(self._sync, executor, metrics.synced)

    def _sync(self) -> None:
        assert self.backing is not None  # who flushes has it open
        self.backing.sync()


class Volumes:
    """The volumes of a folder. Made, used and closed on one loop, but for `ask`.

    :param pd: where memory is registered.
    :param mapped: whether clients reach the pages of files, or a cache before them.
    :param memory: bytes that caches have at most, all together.
    """

    def __init__(self, folder: Folder, pd: ProtectionDomain, metrics: Metrics, *, mapped: bool, memory: int) -> None:
        self._folder = folder
        self._catalog = folder.catalog
        self._pd = pd
        self._metrics = metrics
        self._mapped = mapped
        self._memory = memory
        self._cached = 0
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(8, "files")
        self._syncs = ThreadPoolExecutor(8, "syncs")
        self._volumes: dict[int, Volume] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From here to the end of the block they can be used; at first what was left unfinished is put right."""
        with self._threads, self._syncs:
            for row in await self._in_thread(self._folder.start):
                self._add(row)
            watching = asyncio.create_task(self._watch_rights())
            try:
                yield
            finally:
                await to_its_end(self._end(watching))

    def _add(self, row: VolumeRow) -> None:
        self._volumes[row.id] = Volume(row, self._syncs, self._metrics)

    async def _end(self, watching: asyncio.Task[None]) -> None:
        watching.cancel()
        await asyncio.wait([watching])
        await self._close_all()

    async def _close_all(self) -> None:
        for volume in self._volumes.values():
            async with volume.lock:
                if volume.users:
                    logger.error("volume %r is still used by %d", volume.row.name, len(volume.users))
                await self._unload(volume)

    # ---- Threads and loops

    async def ask(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call one of these methods from any loop. What was begun goes on where this is cancelled."""
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # who asked may be gone
        return await asyncio.shield(future)

    async def _tell(self, user: User, what: Coroutine[Any, Any, None]) -> None:
        """Have a user do something, on its loop."""
        try:
            doing = asyncio.run_coroutine_threadsafe(what, user.loop)
        except RuntimeError:  # the loop is closed, and with it went the connection and its grants
            what.close()
            return
        try:
            async with asyncio.timeout(LETTING_GO_S):
                await asyncio.wrap_future(doing)
        except TimeoutError as error:
            raise BusyError(f"client {user.client!r} does not let go of the volume: try again") from error

    async def _tell_all(
        self, volume: Volume, what: Callable[[User], Coroutine[Any, Any, None]], least: Mode = Mode.READ
    ) -> None:
        await asyncio.gather(*(self._tell(user, what(user)) for user in volume.users if user.mode >= least))

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    # ---- Rights

    async def key(self, client: str) -> bytes | None:
        """What a client proves to know; None: there is no such client."""
        return await self._in_thread(self._catalog.key, client)

    async def _check_admin(self, client: str, what: str) -> None:
        if not await self._in_thread(self._catalog.is_admin, client):
            raise RefusedError(f"client {client!r} may not {what} volumes: only admins may")

    async def _watch_rights(self) -> None:
        """Who lost a right to another process, that of the command `access`, loses it here."""
        seen = await self._in_thread(self._catalog.version)
        while True:
            await asyncio.sleep(_LOOK_S)
            version = await self._in_thread(self._catalog.version)
            if version != seen:
                seen = version
                for volume in list(self._volumes.values()):
                    with contextlib.suppress(BusyError):  # it is revoked all the same
                        await self._check_rights(volume)

    async def _check_rights(self, volume: Volume) -> None:
        async with volume.lock:
            for user in list(volume.users):
                if await self._in_thread(self._catalog.mode, user.client, volume.row.id) < user.mode:
                    await self._tell(user, user.expel("the right to it was taken back"))

    # ---- Volumes

    async def list_volumes(self, client: str) -> tuple[VolumeInfo, ...]:
        """Those that a client may read."""

        def listed() -> tuple[VolumeInfo, ...]:
            return tuple(
                VolumeInfo(row.name, row.size, row.read_only)
                for row in self._catalog.volumes()
                if self._catalog.mode(client, row.id) >= Mode.READ
            )

        return await self._in_thread(listed)

    async def create(self, client: str, name: str, size: int) -> None:
        """Make one of zeros."""
        await self._check_admin(client, "make")
        self._add(await self._in_thread(self._folder.make, name, size, lambda file: file.resize(size)))

    async def _find(self, name: str) -> Volume:
        return self._volumes[(await self._in_thread(self._catalog.find, name)).id]

    @contextlib.asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[Volume]:
        """A volume by its name, with its lock."""
        volume = await self._find(name)
        async with volume.lock:
            if volume.gone:
                raise UnknownVolumeError(f"there is no volume {name!r}")
            yield volume

    async def copy(self, client: str, source: str, name: str, *, read_only: bool) -> None:
        """Make one that is as another one is now. Whoever writes there waits until it is made."""
        await self._check_admin(client, "copy")
        async with self._held(source) as volume:
            await self._tell_all(volume, lambda user: user.pause(), Mode.WRITE)
            if volume.backing is not None:
                await self._in_thread(volume.commits.exclusively, volume.backing.settle)
            self._add(await self._in_thread(self._folder.copy, volume.row, name, read_only=read_only))

    async def resize(self, client: str, name: str, size: int) -> None:
        """Give it another size. Who has it open has it so no more."""
        await self._check_admin(client, "resize")
        check_size(size)
        async with self._held(name) as volume:
            if volume.row.read_only:
                raise InvalidError(f"{name!r} is a snapshot, which stays as it is: make a clone of it to resize that")
            await self._tell_all(volume, lambda user: user.expel("it was resized: open it again"))
            await self._unload(volume)
            volume.row = await self._in_thread(self._folder.resize, volume.row, size)

    async def delete(self, client: str, name: str) -> None:
        """Take it away, from those as well who have it open."""
        await self._check_admin(client, "delete")
        async with self._held(name) as volume:
            await self._tell_all(volume, lambda user: user.expel("it was deleted"))
            volume.touched = False
            await self._unload(volume)
            volume.gone = True
            del self._volumes[volume.row.id]
            await self._in_thread(self._folder.remove, volume.row)

    # ---- Users

    async def open(self, client: str, name: str, mode: Mode, user: User) -> None:
        """Let a client use a volume, until `close`."""
        volume = await self._find(name)
        may = await self._in_thread(self._catalog.mode, client, volume.row.id)
        if may is Mode.NONE:
            raise UnknownVolumeError(f"there is no volume {name!r}")
        if may < mode:
            raise RefusedError(f"client {client!r} may read {name!r}, and not write to it")
        async with self._held(name) as volume:
            if mode is Mode.WRITE and volume.row.read_only:
                raise RefusedError(f"{name!r} is a snapshot: it is read only")
            if volume.backing is None:
                await self._load(volume)
            volume.touched |= mode is Mode.WRITE
            volume.users.add(user)
            try:
                await self._tell(user, user.begin(volume))
            except BaseException:
                volume.users.discard(user)
                if not volume.users:
                    await self._unload(volume)
                raise

    async def resume(self, volume: Volume, user: User) -> None:
        """A user that was paused goes on; what it was paused for is over when this has the lock."""
        async with volume.lock:
            if user in volume.users:
                await self._tell(user, user.begin(volume))

    async def close(self, volume: Volume, user: User) -> None:
        """A user is gone, or wants no more."""
        async with volume.lock:
            try:
                await self._tell(user, user.expel("it was closed"))
            finally:
                volume.users.discard(user)
                if not volume.users:
                    await self._unload(volume)

    # ---- Memory

    async def _load(self, volume: Volume) -> None:
        """Have its bytes in registered memory."""
        size = volume.row.size
        if not self._mapped:
            if self._cached + size > self._memory:
                raise NoRoomError(
                    f"volume {volume.row.name!r} has {size:,} bytes, and the cache {self._memory - self._cached:,} "
                    "left: close others, or start the server with more --memory"
                )
            self._cached += size
        try:
            volume.file = await self._in_thread(self._folder.open, volume.row)
            if self._mapped:
                volume.map = await self._in_thread(volume.file.map, size)
                region = self._pd.register(volume.map, ACCESS)
                await region.open()
                volume.backing = Mapped(volume.file, region)
            else:
                region = self._pd.register(size, ACCESS)
                await region.open()
                volume.backing = Cached(volume.file, region)
                await self._in_thread(volume.file.read_into, volume.backing.memory, 0)
        except BaseException as error:
            volume.touched = False
            await self._unload(volume, loaded=False)
            if isinstance(error, VerbsError) and self._mapped:
                raise DiskError(
                    f"the device cannot register pages of a file: serve with --backing cached ({error})"
                ) from error
            raise
        if not self._mapped:
            self._metrics.cached.set(self._cached)

    async def _unload(self, volume: Volume, *, loaded: bool = True) -> None:
        """Let go of its memory; what somebody wrote there is in its file then."""
        backing, file = volume.backing, volume.file
        if loaded and file is None:
            return
        if backing is not None:
            if volume.touched:
                try:
                    await self._in_thread(volume.commits.exclusively, backing.settle)
                except DiskError:
                    logger.exception("what was written to volume %r and not flushed may be lost", volume.row.name)
            backing.memory.release()
            await backing.region.aclose()
        volume.backing, volume.file, volume.touched = None, None, False
        if volume.map is not None:
            volume.map.close()
            volume.map = None
        if file is not None:
            await self._in_thread(file.close)
        if not self._mapped:
            self._cached -= volume.row.size
            self._metrics.cached.set(self._cached)
