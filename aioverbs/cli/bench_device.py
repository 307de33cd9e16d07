"""Client and server side of a device in `aioverbs bench`: a connection, and memory granted over it."""

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

LOOPBACK = "127.0.0.1"  # for connection setup; the measured data goes through the device

_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.MW_BIND
# A receive for each message in flight and one for each answer, so that neither side waits for the other's receives.
_SETTINGS = ConnectionSettings(receive_depth=2 * WINDOW + 4, send_depth=2 * WINDOW + 4)


@asynccontextmanager
async def _open_endpoint(
    name: str, model: MessageModel
) -> AsyncIterator[tuple[ResourceDomain, MemoryRegion, MemoryRegion]]:
    """Open a device and register memory; yield the resource domain, the region for outgoing bytes and the region for
    incoming bytes.

    All of them are closed when the block ends.

    :raises DeviceNotFoundError: no device has that name.
    :raises ValueError: an environment variable of the software device, or the address in its name, is invalid.
    :raises OSError: the device is unusable, or memory cannot be registered.
    """
    async with (
        open_device(name) as device,
        device.resource_domain(message_model=model) as domain,
        domain.register(MEMORY, _ACCESS) as outgoing,
        domain.register(MEMORY, _ACCESS) as incoming,
    ):
        yield domain, outgoing, incoming


class DeviceClient:
    """Client side: posts operations on a connection. Made by `device_client`.

    :param connection: connection to the peer process.
    :param local: regions of this process, for outgoing and for incoming bytes.
    :param remote: grants of the peer's regions, for its outgoing and for its incoming bytes.
    """

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

    async def run_one(self, operation: Operation, size: int) -> None:
        """Run one operation of `size` bytes and wait until it completes.

        A message completes when the peer's answer has arrived and has been checked.

        :raises WorkCompletionError: a write or read failed; the connection is then broken.
        :raises BrokenResourceError: the connection broke.
        :raises ClosedResourceError: the connection is closed.
        :raises ValueError: the answer to a message is wrong.
        :raises anyio.EndOfStream: the peer process closed the connection.
        """
        if operation == "send":
            await self._connection.send(self.memory.outgoing[:size])
            self.memory.check_answer(await self._connection.receive(), size, 0)
        else:
            await self._post(operation, size, 0)

    async def run_many(self, operation: Operation, size: int, window: int, count: int) -> None:
        """Run ``count`` operations of ``size`` bytes, at most ``window`` of them in flight; wait until all complete.

        This raises the same exceptions as `run_one`; operations that are in flight then continue.
        """
        if operation == "send":
            await self._exchange_messages(size, window, count)
            return
        in_flight = deque[Awaitable[None]]()
        for index in range(count):
            if len(in_flight) == window:
                await in_flight.popleft()
            in_flight.append(self._post(operation, size, index % window))
        for operation_result in in_flight:
            await operation_result

    def _post(self, operation: Operation, size: int, slot: int) -> Awaitable[None]:
        """Post a write or a read of ``size`` bytes at slot number ``slot`` of the memory on both sides.

        :returns: the operation, to be awaited by the caller; this raises `WorkCompletionError` if the operation fails.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        """
        span = slice(slot * size, (slot + 1) * size)
        if operation == "write":
            return self._connection.write(self._outgoing[span], self._remote_incoming[span])
        return self._connection.read(self._incoming[span], self._remote_outgoing[span])

    async def _exchange_messages(self, size: int, window: int, count: int) -> None:
        """Send ``count`` messages, at most ``window`` of them unanswered, and check the answers.

        This raises the same exceptions as `run_one`.
        """
        send, receive, memory = self._connection.send, self._connection.receive, self.memory
        for index in range(min(window, count)):
            await send(memory.outgoing[index * size : (index + 1) * size])
        for index in range(count):
            slot = index % window
            memory.check_answer(await receive(), size, slot)
            if index + window < count:
                await send(memory.outgoing[slot * size : (slot + 1) * size])


@asynccontextmanager
async def device_client(name: str, model: MessageModel, port: int, secret: bytes) -> AsyncIterator[DeviceClient]:
    """Open a device, connect to the peer process and yield a `DeviceClient`; an async context manager.

    The device, the memory and the connection are closed when the block ends.

    :param name: name of the device; the peer process must have opened the same device.
    :param model: message model of the completion queues.
    :param port: TCP port on the loopback address at which the peer process listens.
    :param secret: shared secret of both processes.
    :raises DeviceNotFoundError: no device has that name.
    :raises ValueError: an environment variable of the software device, or the address in its name, is invalid.
    :raises OSError: the device is unusable, or the connection cannot be made, for example because one end does not know
        the secret.
    :raises BrokenResourceError: the connection broke.
    :raises anyio.EndOfStream: the peer process closed the connection.
    """
    async with (
        _open_endpoint(name, model) as (domain, outgoing, incoming),
        connect(LOOPBACK, port, domain=domain, transport="tcp", secret=secret, settings=_SETTINGS) as connection,
    ):
        remote = await connection.receive_grant(), await connection.receive_grant()
        yield DeviceClient(connection, (outgoing, incoming), remote)


class DeviceServer:
    """Server side: grants memory and answers messages. Made by `device_server`.

    :param memory: the memory that the client process reads and writes.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.port = 0  # port at which the server listens; 0 until it does
        self._connection: Connection | None = None
        self._answer_task: asyncio.Task[None] | None = None

    async def handle(self, connection: Connection, outgoing: MemoryRegion, incoming: MemoryRegion) -> None:
        """Grant the peer access to both regions and keep the connection open until the server cancels this call.

        :param connection: connection to the peer.
        :param outgoing: region that the peer may read.
        :param incoming: region that the peer may write.
        :raises BrokenResourceError: the connection broke before both grants were sent.
        :raises VerbsError: a memory window cannot be bound.
        """
        self._connection = connection
        await connection.grant(outgoing, AccessFlags.REMOTE_READ)
        await connection.grant(incoming, AccessFlags.REMOTE_WRITE)
        await asyncio.Event().wait()

    async def start_turn(self, operation: Operation) -> None:
        """Start a turn of ``operation``: if it is ``"send"``, start a task that answers messages; otherwise do nothing.

        There is no such task in other turns, because some message models poll while a call waits for a message.
        """
        if operation == "send":
            self._answer_task = asyncio.create_task(self._answer_messages())

    async def end_turn(self) -> None:
        """End a turn: cancel the task that answers messages, if there is one, and wait until it has ended.

        If that task failed because the connection is closed or broken, its exception is ignored. Any other exception of
        the task, such as the `ValueError` of `Memory.store_message`, is raised.
        """
        task, self._answer_task = self._answer_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                await task  # the client notices a broken connection itself

    async def _answer_messages(self) -> None:
        """Store each received message and answer it with its first eight bytes; return when the client closes the
        connection.

        :raises BrokenResourceError: the connection broke.
        :raises ClosedResourceError: the connection was closed here.
        :raises ValueError: a message contains the number of a slot that the memory does not have.
        """
        connection = self._connection
        assert connection is not None
        async for message in connection:
            self.memory.store_message(message)
            await connection.send(message[:8])


@asynccontextmanager
async def device_server(name: str, model: MessageModel, secret: bytes) -> AsyncIterator[DeviceServer]:
    """Open a device, serve it to the client process and yield a `DeviceServer` that is listening; an async context
    manager.

    The server and the device are closed when the block ends.

    :param name: name of the device.
    :param model: message model of the completion queues.
    :param secret: secret that the client process must know.
    :raises DeviceNotFoundError: no device has that name.
    :raises ValueError: an environment variable of the software device, or the address in its name, is invalid.
    :raises OSError: the device is unusable, or listening failed.
    """
    async with _open_endpoint(name, model) as (domain, outgoing, incoming):
        server = DeviceServer(Memory(outgoing.buffer, incoming.buffer))

        async def handle(connection: Connection) -> None:
            await server.handle(connection, outgoing, incoming)

        async with serve(
            handle,
            LOOPBACK,
            domain=domain,
            transport="tcp",
            secret=secret,
            settings=_SETTINGS,
            max_connections=1,
            drain_timeout_s=0,
        ) as listening:
            server.port = listening.port
            yield server
