"""Server side of an open volume: the grant to the client, and the operations that use the volume's memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aioverbs import AccessFlags, BrokenResourceError, ClosedResourceError, Connection, Grant
from storage_server.errors import BusyError, ChangedError, InvalidError, RefusedError
from storage_server.metrics import Metrics
from storage_server.protocol import Mode
from storage_server.volumes import Volume, Volumes

__all__ = ["Handle"]

_REVOKE_TIMEOUT_S = 5.0
_GRANT_TIMEOUT_S = 10.0  # for the client to receive the grant


class Handle:
    """A volume that a client has open. Used on the session's loop, where the server's loop calls the methods of `User`.

    Code that checks `usable` and then copies from or to memory does not await in between, so the memory cannot be taken
    away. Code that awaits does so inside `use`; `pause` and `expel` wait for that block to end.

    :param connection: the session's connection to the client.
    :param client: the client's name.
    :param number: number of the handle in the client's requests.
    :param mode: the mode that the client opened the volume in, READ or WRITE.
    :param metrics: counts the grants.
    """

    def __init__(self, connection: Connection, client: str, number: int, mode: Mode, metrics: Metrics) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.mode = mode
        self.number = number
        self.opened: Volume | None = None  # set once the volume must be closed
        self.grant: Grant | None = None
        self._granting: asyncio.Task[None] | None = None  # until the handle is paused
        self.close_reason = ""  # reason why the volume is closed; empty: it is open
        self._connection = connection
        self._gauge = metrics.grants.labels(mode.name.lower())
        self._paused = False
        # serializes calls of the server's loop: one that timed out may still be running
        self._changing = asyncio.Lock()
        self._uses = 0
        self._unused = asyncio.Event()
        self._unused.set()

    # ---- Called by the server's loop on this one, one at a time

    async def begin(self, volume: Volume) -> None:
        """Start granting the volume's memory to the client, unless that has been done since the last pause. Do not wait
        for the grant.

        Only operations that use the memory wait for the grant, since a client may be slow to receive it.

        :param volume: the volume that the client has opened.
        :raises ChangedError: the handle is closed.
        """
        async with self._changing:
            if self.close_reason:
                raise ChangedError(self.close_reason)
            self._paused = False
            if self._granting is None:
                self.opened = volume
                self._granting = asyncio.create_task(self._grant(volume))

    async def _grant(self, volume: Volume) -> None:
        """Grant the memory and wait until the client has received the grant.

        :param volume: the volume whose memory is granted.
        :raises BusyError: the client did not receive the grant in time; the connection has been aborted.
        :raises BrokenResourceError: the connection broke.
        :raises ClosedResourceError: the connection is closed.
        """
        backing = volume.backing
        assert backing is not None
        writes = AccessFlags.REMOTE_WRITE if self.mode is Mode.WRITE else AccessFlags(0)
        try:
            async with asyncio.timeout(_GRANT_TIMEOUT_S):
                self.grant = await self._connection.grant(backing.region, AccessFlags.REMOTE_READ | writes)
        except TimeoutError as error:
            self._connection.abort()
            raise BusyError(f"client {self.client!r} does not receive its grant") from error
        self._gauge.inc()

    async def pause(self) -> None:
        """Revoke the grant. After this returns, neither the client nor its requests use the memory.

        A caller that timed out may call this again: the grant stays until all uses of the memory have ended. A
        revocation that has begun is completed even if the caller is cancelled.

        :raises VerbsError: the revocation failed, and the connection broke.
        """
        self._paused = True
        async with self._changing:
            if self._granting is not None:
                self._granting.cancel()
                await asyncio.wait([self._granting])
                # the operation that waited for the grant has raised this
                _ = self._granting.cancelled() or self._granting.exception()
                self._granting = None
            await self._unused.wait()
            if self.grant is not None:
                try:
                    # A broken connection invalidates the client's key as well.
                    with contextlib.suppress(BrokenResourceError, ClosedResourceError):
                        await self.grant.revoke(timeout_s=_REVOKE_TIMEOUT_S)
                finally:
                    self.grant = None
                    self._gauge.dec()

    async def expel(self, reason: str) -> None:
        """Close the volume for this client: do what `pause` does, and make later operations fail with `ChangedError`.

        :param reason: text of the error; a reason that was set earlier is kept.
        :raises VerbsError: the revocation of the grant failed, and the connection broke.
        """
        self.close_reason = self.close_reason or reason
        await self.pause()

    # ---- Called by the session

    @property
    def volume(self) -> Volume:
        """The volume that the client has opened; available once it has been opened."""
        assert self.opened is not None
        return self.opened

    @property
    def usable(self) -> bool:
        """True if the client has a grant of the memory, and the memory may be used now.

        :raises ChangedError: the volume is closed.
        """
        if self.close_reason:
            raise ChangedError(f"volume {self.volume.row.name!r} is closed: {self.close_reason}")
        return self.grant is not None and not self._paused

    def piece(self, offset: int, length: int) -> memoryview:
        """Return a view of a range of the volume's memory. Call only while the handle is usable.

        :param offset: first byte in the volume.
        :param length: number of bytes.
        :raises InvalidError: the range exceeds the volume.
        """
        size = self.volume.row.size
        if offset + length > size:
            raise InvalidError(f"bytes {offset:,} to {offset + length:,} exceed the volume of {size:,} bytes")
        assert self.volume.backing is not None
        return self.volume.backing.memory[offset : offset + length]

    def check_writable(self) -> None:
        """Check that the volume is open for writing.

        :raises RefusedError: the volume is open for reading only.
        """
        if self.mode is not Mode.WRITE:
            raise RefusedError(f"volume {self.volume.row.name!r} is open for reading only")

    @contextlib.asynccontextmanager
    async def use(self, volumes: Volumes) -> AsyncIterator[None]:
        """Keep the memory usable for the duration of a block that awaits. If the handle is paused, wait until it is
        resumed.

        :param volumes: the volumes, which resume a paused handle.
        :raises ChangedError: the volume is closed.
        :raises BusyError: the client did not receive its grant.
        :raises BrokenResourceError: the connection broke.
        :raises ClosedResourceError: the connection is closed.
        """
        while not self.usable:
            granting = self._granting
            if granting is None or self._paused:
                await volumes.ask(volumes.resume, self.volume, self)
                continue
            await asyncio.wait([granting])
            if not granting.cancelled():
                granting.result()
        self._uses += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._unused.set()
