"""A volume that a client has open, on the session's side: its grant, and who is using its memory just now."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aioverbs import AccessFlags, BrokenResourceError, ClosedResourceError, Connection, Grant
from storage_server.errors import BusyError, ChangedError, InvalidError, RefusedError
from storage_server.metrics import Metrics
from storage_server.protocol import Mode
from storage_server.volumes import Volume, Volumes

__all__ = ["Handle"]

_REVOKE_S = 5.0
_GRANT_S = 10.0  # for a client to have room for what it is told


class Handle:
    """A volume that a client has open. Used on the session's loop; the server's loop calls the methods of `User`.

    Nothing between a look at `usable` and a copy from or to memory awaits, so nobody takes the memory away in between;
    what does await is in `use`, whose end `pause` and `expel` wait for.
    """

    def __init__(self, connection: Connection, client: str, number: int, mode: Mode, metrics: Metrics) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.mode = mode
        self.number = number
        self.opened: Volume | None = None  # from the moment on from which it is to be closed
        self.grant: Grant | None = None
        self._granting: asyncio.Task[None] | None = None  # until it is paused
        self.why = ""  # it is open no more
        self._connection = connection
        self._gauge = metrics.grants.labels(mode.name.lower())
        self._paused = False
        self._changing = asyncio.Lock()  # what was given up may be at it still: it hears of that later
        self._uses = 0
        self._unused = asyncio.Event()
        self._unused.set()

    # ---- What the server's loop calls, on this one, one at a time

    async def begin(self, volume: Volume) -> None:
        """Begin to grant the client the volume's memory. Only who uses it waits for that: a client may read nothing."""
        async with self._changing:
            if self.why:
                raise ChangedError(self.why)
            self._paused = False
            if self._granting is None:
                self.opened = volume
                self._granting = asyncio.create_task(self._grant(volume))

    async def _grant(self, volume: Volume) -> None:
        backing = volume.backing
        assert backing is not None
        writes = AccessFlags.REMOTE_WRITE if self.mode is Mode.WRITE else AccessFlags(0)
        try:
            async with asyncio.timeout(_GRANT_S):
                self.grant = await self._connection.grant(backing.region, AccessFlags.REMOTE_READ | writes)
        except TimeoutError as error:
            await self._connection.abort()
            raise BusyError(f"client {self.client!r} does not read what it is told") from error
        self._gauge.inc()

    async def pause(self) -> None:
        """Nothing of this client's reads or writes the memory when this returns.

        Who waited too long and gave up may ask again: the grant is there until it is revoked.
        """
        self._paused = True
        async with self._changing:
            if self._granting is not None:
                self._granting.cancel()
                await asyncio.wait([self._granting])
                _ = self._granting.cancelled() or self._granting.exception()  # who uses it was told
                self._granting = None
            await self._unused.wait()
            if self.grant is not None:
                try:
                    # Where the connection is broken the client has no key either.
                    with contextlib.suppress(BrokenResourceError, ClosedResourceError):
                        await self.grant.revoke(timeout_s=_REVOKE_S)
                finally:
                    self.grant = None
                    self._gauge.dec()

    async def expel(self, why: str) -> None:
        """It is open no more."""
        self.why = self.why or why
        await self.pause()

    # ---- What the session asks

    @property
    def volume(self) -> Volume:
        """The volume, which is open, or was."""
        assert self.opened is not None
        return self.opened

    @property
    def usable(self) -> bool:
        """Whether its memory may be used now.

        :raises ChangedError: it never may again.
        """
        if self.why:
            raise ChangedError(f"volume {self.volume.row.name!r} is open no more: {self.why}")
        return self.grant is not None and not self._paused

    def piece(self, offset: int, length: int) -> memoryview:
        """Bytes of the volume."""
        size = self.volume.row.size
        if offset + length > size:
            raise InvalidError(f"the volume has {size:,} bytes, and none from {offset:,} to {offset + length:,}")
        assert self.volume.backing is not None
        return self.volume.backing.memory[offset : offset + length]

    def check_writable(self) -> None:
        """See that the client may write."""
        if self.mode is not Mode.WRITE:
            raise RefusedError(f"volume {self.volume.row.name!r} is open for reading only")

    @contextlib.asynccontextmanager
    async def use(self, volumes: Volumes) -> AsyncIterator[None]:
        """Have the memory for the time of a block that awaits; where it is paused, wait for that to be over."""
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
