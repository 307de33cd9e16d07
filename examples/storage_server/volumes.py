"""The volumes of a server: creating, opening, resizing, copying and deleting them.

All methods run on the server's own event loop; sessions on worker loops call them through `Volumes.ask`. So threads
share nothing except the fields that `Volume` names. Each volume has an asyncio lock on the server's loop. It is held
while the volume itself changes (size, memory, existence), and while a user is added, paused or removed. During that
time the server's loop calls the users on their own loops, where no lock is requested: the order of locks is fixed, and
there is no deadlock.

Blocking calls (catalog, files) run in threads.
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
from storage_server.cancelling import wait_uncancelled
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
from storage_server.metrics import Metrics
from storage_server.protocol import Mode, VolumeInfo
from storage_server.volume_store import VolumeStore

__all__ = ["User", "Volume", "Volumes", "to_client_error"]

logger = logging.getLogger("storage_server")

RELEASE_TIMEOUT_S = 10.0  # for the users of a volume
_RIGHTS_POLL_S = 1.0  # interval of checking for rights changed by another process
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

P = ParamSpec("P")
T = TypeVar("T")


def to_client_error(error: Exception) -> StorageError:
    """Return the error that the client receives for an exception: the exception itself if it is a StorageError,
    NoRoomError for a full disk, otherwise DiskError.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return NoRoomError(f"the disk has no room: {error}")
    return DiskError(f"the request failed on the server: {type(error).__name__}: {error}")


class User(Protocol):
    """A session's handle of an open volume, `Handle`. Methods are called on the session's loop, one at a time.

    `client` is the client's name, `mode` the mode that it opened the volume in, `loop` the session's loop.
    """

    client: str
    mode: Mode
    loop: asyncio.AbstractEventLoop

    async def begin(self, volume: "Volume") -> None:
        """Start granting the volume's memory to the client. A grant that already exists stays valid.

        :raises ChangedError: the handle is closed.
        """

    async def pause(self) -> None:
        """Revoke the grant temporarily. After this returns, the client neither reads nor writes the memory."""

    async def expel(self, reason: str) -> None:
        """Revoke the grant permanently, and make later operations of the client fail with `ChangedError`.

        :param reason: text of the error.
        """


class Volume:
    """A volume. Made by `Volumes`.

    Loops of its users read `backing` while they have it open, and call `commits`. Everything else belongs to the
    server's loop.

    :param row: the volume's row in the catalog.
    :param executor: executor that runs its syncs.
    :param metrics: counters, which count its syncs.
    """

    def __init__(self, row: VolumeRow, executor: Executor, metrics: Metrics) -> None:
        self.row = row
        self.lock = asyncio.Lock()
        self.users: set[User] = set()
        self.deleted = False
        self.file: File | None = None
        self.map: mmap.mmap | None = None
        self.backing: Backing | None = None
        self.maybe_modified = False  # whether a client could write since the volume was loaded
        self.commits = Commits(self._sync, executor, metrics.synced)

    def _sync(self) -> None:
        """Make the writes that clients have reported durable. Blocks the calling thread.

        :raises OSError: the disk failed.
        """
        assert self.backing is not None  # a client that flushes has the volume open
        self.backing.sync()


class Volumes:
    """All volumes of a server. Created, used and closed on one loop, except for `ask`. Use it inside `running`.

    Methods with a parameter ``client``, the name of the client that asks, check the client's rights.

    :param store: the server's folder.
    :param pd: protection domain that registers the volumes' memory.
    :param metrics: counters of the server.
    :param mapped: whether clients access mapped file pages; otherwise, a cache.
    :param memory: limit of all caches together, in bytes.
    """

    def __init__(
        self, store: VolumeStore, pd: ProtectionDomain, metrics: Metrics, *, mapped: bool, memory: int
    ) -> None:
        self._store = store
        self._catalog = store.catalog
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
        """Serve requests for the duration of the block. Interrupted changes are completed or undone first.

        When the block ends, no session may exist any longer; changes are then written back to the files.

        :raises InvalidError: a volume's file is missing or too short.
        :raises OSError: the disk failed.
        """
        with self._threads, self._syncs:
            for row in await self._in_thread(self._store.start):
                self._add(row)
            watching = asyncio.create_task(self._watch_rights())
            try:
                yield
            finally:
                await wait_uncancelled(self._end(watching))

    def _add(self, row: VolumeRow) -> None:
        """Add the `Volume` for a row of the catalog."""
        self._volumes[row.id] = Volume(row, self._syncs, self._metrics)

    async def _end(self, watching: asyncio.Task[None]) -> None:
        """Stop watching the rights, then unload all volumes."""
        watching.cancel()
        await asyncio.wait([watching])
        await self._close_all()

    async def _close_all(self) -> None:
        """Unload all volumes, including those that still have users, for which an error is logged."""
        for volume in self._volumes.values():
            async with volume.lock:
                if volume.users:
                    logger.error("volume %r still has %d users", volume.row.name, len(volume.users))
                await self._unload(volume)

    # ---- Threads and loops

    async def ask(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of this object from any event loop; return its result or raise its exception.

        If the caller is cancelled, the call continues.

        :param function: a coroutine method of this object, called with the remaining arguments.
        """
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop))
        # mark the exception as retrieved: the caller may be cancelled
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    async def _call_user(self, user: User, call: Coroutine[Any, Any, None]) -> None:
        """Run a method of a user on the user's loop and wait until it ends. If that loop is closed, do nothing.

        :param user: the user.
        :param call: coroutine of the method.
        :raises BusyError: the method took too long and was cancelled.
        """
        try:
            doing = asyncio.run_coroutine_threadsafe(call, user.loop)
        except RuntimeError:  # the loop is closed, hence so are the connection and its grants
            call.close()
            return
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await asyncio.wrap_future(doing)
        except TimeoutError as error:
            raise BusyError(f"client {user.client!r} does not release the volume: try again") from error

    async def _call_users(
        self, volume: Volume, call: Callable[[User], Coroutine[Any, Any, None]], least: Mode = Mode.READ
    ) -> None:
        """Run a method of the users of a volume concurrently.

        :param volume: the volume.
        :param call: function that returns the coroutine for a user.
        :param least: call only users that have at least this mode.
        :raises BusyError: a user took too long.
        """
        await asyncio.gather(*(self._call_user(user, call(user)) for user in volume.users if user.mode >= least))

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function in a thread; return its result or raise its exception."""
        return await self._loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    # ---- Rights

    async def key(self, client: str) -> bytes | None:
        """Return a client's key; None if there is no such client."""
        return await self._in_thread(self._catalog.key, client)

    async def _check_admin(self, client: str, call: str) -> None:
        """Check that a client is an admin.

        :param client: name of the client.
        :param call: verb for the error text, such as "create".
        :raises RefusedError: the client is not an admin.
        """
        if not await self._in_thread(self._catalog.is_admin, client):
            raise RefusedError(f"client {client!r} may not {call} volumes: only admins may")

    async def _watch_rights(self) -> None:
        """Close the volumes of users whose rights another process, running the command `access`, has taken away. Run
        until cancelled.
        """
        seen = await self._in_thread(self._catalog.version)
        while True:
            await asyncio.sleep(_RIGHTS_POLL_S)
            version = await self._in_thread(self._catalog.version)
            if version != seen:
                seen = version
                for volume in list(self._volumes.values()):
                    with contextlib.suppress(BusyError):  # the grant is revoked even if the user does not respond
                        await self._check_rights(volume)

    async def _check_rights(self, volume: Volume) -> None:
        """Expel the users of a volume that have lost their right.

        :raises BusyError: a user took too long.
        """
        async with volume.lock:
            for user in list(volume.users):
                if await self._in_thread(self._catalog.mode, user.client, volume.row.id) < user.mode:
                    await self._call_user(user, user.expel("the client lost its right"))

    # ---- Volumes

    async def list_volumes(self, client: str) -> tuple[VolumeInfo, ...]:
        """Return the volumes that a client may read, sorted by name."""

        def listed() -> tuple[VolumeInfo, ...]:
            return tuple(
                VolumeInfo(row.name, row.size, row.read_only)
                for row in self._catalog.volumes()
                if self._catalog.mode(client, row.id) >= Mode.READ
            )

        return await self._in_thread(listed)

    async def create(self, client: str, name: str, size: int) -> None:
        """Create a volume of zeros.

        :param client: the client that asks.
        :param name: name of the volume.
        :param size: size in bytes.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name or the size is invalid.
        :raises OSError: the disk failed or is full.
        :raises RefusedError: the client is not an admin.
        """
        await self._check_admin(client, "create")
        self._add(await self._in_thread(self._store.make, name, size, lambda file: file.resize(size)))

    async def _find(self, name: str) -> Volume:
        """Return the volume with the given name.

        :raises UnknownVolumeError: there is no such volume.
        """
        return self._volumes[(await self._in_thread(self._catalog.find, name)).id]

    @contextlib.asynccontextmanager
    async def _locked_volume(self, name: str) -> AsyncIterator[Volume]:
        """Find a volume by name and yield it; hold its lock for the duration of the block.

        :raises UnknownVolumeError: there is no such volume.
        """
        volume = await self._find(name)
        async with volume.lock:
            if volume.deleted:
                raise UnknownVolumeError(f"there is no volume {name!r}")
            yield volume

    async def copy(self, client: str, source: str, name: str, *, read_only: bool) -> None:
        """Copy a volume in its present state. Clients that write to the source wait until the copy is complete.

        :param client: the client that asks.
        :param source: name of the volume to copy.
        :param name: name of the copy.
        :param read_only: True for a snapshot, False for a clone.
        :raises BusyError: a writer did not release the volume in time.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name is invalid.
        :raises DiskError: unflushed data could not be written back.
        :raises OSError: the disk failed or is full.
        :raises RefusedError: the client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._check_admin(client, "copy")
        async with self._locked_volume(source) as volume:
            await self._call_users(volume, lambda user: user.pause(), Mode.WRITE)
            if volume.backing is not None:
                await self._in_thread(volume.commits.exclusively, volume.backing.write_back)
            self._add(await self._in_thread(self._store.copy, volume.row, name, read_only=read_only))

    async def resize(self, client: str, name: str, size: int) -> None:
        """Change the size of a volume. Operations of clients that have it open raise `ChangedError`.

        :param client: the client that asks.
        :param name: name of the volume.
        :param size: new size in bytes.
        :raises BusyError: a client did not release the volume in time.
        :raises InvalidError: the size is invalid, or the volume is a snapshot.
        :raises OSError: the disk failed or is full.
        :raises RefusedError: the client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._check_admin(client, "resize")
        check_size(size)
        async with self._locked_volume(name) as volume:
            if volume.row.read_only:
                raise InvalidError(
                    f"{name!r} is a snapshot, which cannot be resized: make a clone and resize the clone"
                )
            await self._call_users(volume, lambda user: user.expel("it was resized: open it again"))
            await self._unload(volume)
            volume.row = await self._in_thread(self._store.resize, volume.row, size)

    async def delete(self, client: str, name: str) -> None:
        """Delete a volume. Operations of clients that have it open raise `ChangedError`.

        :param client: the client that asks.
        :param name: name of the volume.
        :raises BusyError: a client did not release the volume in time.
        :raises OSError: the disk failed.
        :raises RefusedError: the client is not an admin.
        :raises UnknownVolumeError: there is no such volume.
        """
        await self._check_admin(client, "delete")
        async with self._locked_volume(name) as volume:
            await self._call_users(volume, lambda user: user.expel("it was deleted"))
            volume.maybe_modified = False
            await self._unload(volume)
            volume.deleted = True
            del self._volumes[volume.row.id]
            await self._in_thread(self._store.remove, volume.row)

    # ---- Users

    async def open(self, client: str, name: str, mode: Mode, user: User) -> None:
        """Open a volume for a client until `close` is called. If no other client has it open, load it into memory.

        :param client: the client that asks.
        :param name: name of the volume.
        :param mode: READ or WRITE.
        :param user: the client's handle, on which `User.begin` is called.
        :raises BusyError: the client's handle did not respond in time.
        :raises DiskError: the device cannot register the file's pages.
        :raises NoRoomError: the volume does not fit into the caches.
        :raises OSError: the file cannot be read.
        :raises RefusedError: the client may not write to the volume.
        :raises UnknownVolumeError: there is no such volume, or the client may not read it.
        """
        volume = await self._find(name)
        may = await self._in_thread(self._catalog.mode, client, volume.row.id)
        if may is Mode.NONE:
            raise UnknownVolumeError(f"there is no volume {name!r}")
        if may < mode:
            raise RefusedError(f"client {client!r} may read {name!r}, but not write to it")
        async with self._locked_volume(name) as volume:
            if mode is Mode.WRITE and volume.row.read_only:
                raise RefusedError(f"{name!r} is a snapshot: it is read only")
            if volume.backing is None:
                await self._load(volume)
            volume.maybe_modified |= mode is Mode.WRITE
            volume.users.add(user)
            try:
                await self._call_user(user, user.begin(volume))
            except BaseException:
                volume.users.discard(user)
                if not volume.users:
                    await self._unload(volume)
                raise

    async def resume(self, volume: Volume, user: User) -> None:
        """Resume a paused user; do nothing if the user no longer has the volume open.

        Holding the lock means that the operation that paused the user has ended.

        :raises BusyError: the user did not respond in time.
        :raises ChangedError: the user was expelled.
        """
        async with volume.lock:
            if user in volume.users:
                await self._call_user(user, user.begin(volume))

    async def close(self, volume: Volume, user: User) -> None:
        """Close a user's handle of a volume. If that was the last handle, unload the volume.

        :raises BusyError: the user did not respond in time; the handle is closed nevertheless.
        """
        async with volume.lock:
            try:
                await self._call_user(user, user.expel("it was closed"))
            finally:
                volume.users.discard(user)
                if not volume.users:
                    await self._unload(volume)

    # ---- Memory

    async def _load(self, volume: Volume) -> None:
        """Load a volume into registered memory and set its `backing`.

        :raises DiskError: the device cannot register the file's pages.
        :raises NoRoomError: the volume does not fit into the caches.
        :raises OSError: the file cannot be read.
        """
        size = volume.row.size
        if not self._mapped:
            if self._cached + size > self._memory:
                raise NoRoomError(
                    f"volume {volume.row.name!r} needs {size:,} bytes, but the cache has "
                    f"{self._memory - self._cached:,} left: close other volumes, or start the server with more --memory"
                )
            self._cached += size
        try:
            volume.file = await self._in_thread(self._store.open, volume.row)
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
            volume.maybe_modified = False
            await self._unload(volume, loaded=False)
            if isinstance(error, VerbsError) and self._mapped:
                raise DiskError(
                    f"the device cannot register pages of a file: serve with --backing cached ({error})"
                ) from error
            raise
        if not self._mapped:
            self._metrics.cached.set(self._cached)

    async def _unload(self, volume: Volume, *, loaded: bool = True) -> None:
        """Write the unflushed changes of a volume back, then unload it from memory. If writing back fails, that is
        logged.

        :param loaded: False if loading the volume failed; what exists of it is then undone.
        """
        backing, file = volume.backing, volume.file
        if loaded and file is None:
            return
        if backing is not None:
            if volume.maybe_modified:
                try:
                    await self._in_thread(volume.commits.exclusively, backing.write_back)
                except DiskError:
                    logger.exception("unflushed writes to volume %r may be lost", volume.row.name)
            backing.memory.release()
            await backing.region.aclose()
        volume.backing, volume.file, volume.maybe_modified = None, None, False
        if volume.map is not None:
            volume.map.close()
            volume.map = None
        if file is not None:
            await self._in_thread(file.close)
        if not self._mapped:
            self._cached -= volume.row.size
            self._metrics.cached.set(self._cached)
