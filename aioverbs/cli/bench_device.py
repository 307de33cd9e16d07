"""What programs do with aioverbs, either side of it: a connection, and memory that is granted over it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import anyio

from aioverbs._connection.connect import connect
from aioverbs._connection.connection import Connection
from aioverbs._connection.grants import RemoteGrant
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._memory.region import MemoryRegion
from aioverbs._server.server import serve
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import open_device
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs.cli.bench_memory import Memory
from aioverbs.cli.measuring import MEMORY, WINDOW, Operation
from aioverbs.types import AccessFlags

__all__ = ["DeviceClient", "DeviceServer", "device_client", "device_server"]

HERE = "127.0.0.1"  # where the two meet; what is measured goes from device to device

_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.MW_BIND
# Answers have a receive each, besides those of the messages that are under way: neither side waits for the other's.
_SETTINGS = ConnectionSettings(receive_depth=2 * WINDOW + 4, send_depth=2 * WINDOW + 4)


@asynccontextmanager
async def _end(name: str, model: MessageModel) -> AsyncIterator[tuple[ResourceDomain, MemoryRegion, MemoryRegion]]:
    """A device, a domain, and memory for what goes out and what comes in."""
    async with (
        open_device(name) as device,
        device.resource_domain(message_model=model) as domain,
        domain.register(MEMORY, _ACCESS) as outgoing,
        domain.register(MEMORY, _ACCESS) as incoming,
    ):
        yield domain, outgoing, incoming


class DeviceClient:
    """The side that asks."""

    def __init__(
        self,
        connection: Connection,
        local: tuple[MemoryRegion, MemoryRegion],
        remote: tuple[RemoteGrant, RemoteGrant],
    ) -> None:
        self._connection = connection
        self._outgoing, self._incoming = local
        self._remote_outgoing, self._remote_incoming = remote
        self.memory = Memory(self._outgoing.buffer, self._incoming.buffer)

    async def one(self, operation: Operation, size: int) -> None:
        """Do it once."""
        if operation == "send":
            await self._connection.send(self.memory.outgoing[:size])
            self.memory.check_answer(await self._connection.receive(), size, 0)
        else:
            await self._post(operation, size, 0)

    async def many(self, operation: Operation, size: int, window: int, count: int) -> None:
        """Do it so often, with a window of them under way."""
        if operation == "send":
            await self._messages(size, window, count)
            return
        in_flight = deque[Awaitable[None]]()
        for at in range(count):
            if len(in_flight) == window:
                await in_flight.popleft()
            in_flight.append(self._post(operation, size, at % window))
        for each in in_flight:
            await each

    def _post(self, operation: Operation, size: int, place: int) -> Awaitable[None]:
        part = slice(place * size, (place + 1) * size)
        if operation == "write":
            return self._connection.write(self._outgoing[part], self._remote_incoming[part])
        return self._connection.read(self._incoming[part], self._remote_outgoing[part])

    async def _messages(self, size: int, window: int, count: int) -> None:
        send, receive, memory = self._connection.send, self._connection.receive, self.memory
        for at in range(min(window, count)):
            await send(memory.outgoing[at * size : (at + 1) * size])
        for at in range(count):
            place = at % window
            memory.check_answer(await receive(), size, place)
            if at + window < count:
                await send(memory.outgoing[place * size : (place + 1) * size])


@asynccontextmanager
async def device_client(name: str, model: MessageModel, port: int, secret: bytes) -> AsyncIterator[DeviceClient]:
    """Connect with the other process, which serves the same device there."""
    async with (
        _end(name, model) as (domain, outgoing, incoming),
        connect(HERE, port, domain=domain, transport="tcp", secret=secret, settings=_SETTINGS) as connection,
    ):
        remote = await connection.receive_grant(), await connection.receive_grant()
        yield DeviceClient(connection, (outgoing, incoming), remote)


class DeviceServer:
    """The side that answers.

    :param memory: what a peer reads and writes.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.port = 0  # where it listens, when it does
        self._connection: Connection | None = None
        self._answering: asyncio.Task[None] | None = None

    async def handle(self, connection: Connection, outgoing: MemoryRegion, incoming: MemoryRegion) -> None:
        """Grant the memory, and be there until the server ends."""
        self._connection = connection
        await connection.grant(outgoing, AccessFlags.REMOTE_READ)
        await connection.grant(incoming, AccessFlags.REMOTE_WRITE)
        await asyncio.Event().wait()

    async def begin(self, operation: Operation) -> None:
        """A turn begins. Only now, where messages come, is one awaited: some message models poll as long as one is."""
        if operation == "send":
            self._answering = asyncio.create_task(self._answer())

    async def end(self) -> None:
        """It is over."""
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                await answering  # where the connection broke the client knows it by itself

    async def _answer(self) -> None:
        connection = self._connection
        assert connection is not None
        async for message in connection:
            self.memory.message(message)
            await connection.send(message[:8])


@asynccontextmanager
async def device_server(name: str, model: MessageModel, secret: bytes) -> AsyncIterator[DeviceServer]:
    """Serve a device to the other process."""
    async with _end(name, model) as (domain, outgoing, incoming):
        server = DeviceServer(Memory(outgoing.buffer, incoming.buffer))

        async def handle(connection: Connection) -> None:
            await server.handle(connection, outgoing, incoming)

        async with serve(
            handle,
            HERE,
            domain=domain,
            transport="tcp",
            secret=secret,
            settings=_SETTINGS,
            max_connections=1,
            drain_timeout_s=0,
        ) as listening:
            server.port = listening.port
            yield server
