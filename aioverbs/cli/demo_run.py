"""What `aioverbs demo` does, on the public library alone: a pool with one worker process, and a connection to it."""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from aioverbs._connection.connect import connect
from aioverbs._connection.connection import Connection
from aioverbs._connection.grants import RemoteGrant
from aioverbs._memory.region import MemoryRegion
from aioverbs._pool.pool import Worker, WorkerPool, current_worker
from aioverbs._server.server import serve
from aioverbs._verbs.device import open_device
from aioverbs._verbs.queue_pair import Operation
from aioverbs.cli.histogram import Histogram
from aioverbs.cli.inventory import look_at
from aioverbs.errors import AffinityError
from aioverbs.types import AccessFlags

__all__ = ["Outcome", "demonstrate"]

_HERE = "127.0.0.1"  # where the two processes meet; the data goes from device to device
_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
_PIECE = 1 << 20  # bytes of a read
_WINDOW = 4  # reads in flight
_MESSAGE = 64  # bytes


@dataclass(frozen=True)
class Outcome:
    """Result of a demonstration.

    :param reason: why this device was chosen.
    :param native: whether the device has each of `aioverbs.cli.inventory.FEATURES` itself.
    :param processes: the process ids of this process and of the other one.
    :param messages: number of round trips.
    :param bytes: number of bytes that were read one-sidedly and compared.
    :param affinity_error: text of the error that stopped the call from a wrong loop; None: nothing stopped it.
    :param faults: what was not as it should be.
    """

    device: str
    reason: str
    native: dict[str, bool]
    processes: tuple[int, int]
    messages: int
    round_trip_ns: dict[str, int]
    bytes: int
    read_seconds: float
    affinity_error: str | None
    faults: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether all was as it should be."""
        return not self.faults


async def demonstrate(name: str | None, size: int, messages: int) -> Outcome:
    """Start the other process, talk to it, read its memory, and have it ended.

    :param name: the device's name; None: the best there is.
    :param size: bytes of memory to read, a multiple of 1 MiB.
    :param messages: number of messages to send and get back.
    :raises DeviceNotFoundError: there is no such device.
    :raises OSError: the device cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        with _Reasons() as reasons:
            device = await stack.enter_async_context(open_device(name))
        found = await look_at(device.name)
        if found.problem is not None:
            raise OSError(f"{found.name} cannot be used: {found.problem}; `aioverbs doctor` helps")
        seed = random.randrange(1 << 32)
        pool = WorkerPool(device, 1, processes=True, setup=partial(_owned_memory, seed, size))
        await stack.enter_async_context(pool)
        secret = secrets.token_bytes(32)
        server = await stack.enter_async_context(serve(_answer, _HERE, pool=pool, secret=secret))
        domain = await stack.enter_async_context(device.resource_domain())
        local = await stack.enter_async_context(domain.register(_WINDOW * _PIECE, _ACCESS))
        connection = await stack.enter_async_context(
            connect(_HERE, server.port, domain=domain, transport="tcp", secret=secret)
        )
        client = _Client(connection, local, await connection.receive_grant(), seed)
        peer = int(await connection.receive())
        trips = await client.exchange(messages)
        read_seconds = await client.read_all(size)
        error = await client.call_from_wrong_loop()
        told = {f"p{percent:g}": trips.percentile(percent) for percent in (50, 99, 99.9)}
        return Outcome(
            device.name,
            reasons.text(name),
            found.native,
            (os.getpid(), peer),
            messages,
            {**told, "max": trips.maximum},
            size,
            read_seconds,
            error,
            tuple(client.faults),
        )


class _Reasons(logging.Handler):
    """Keeps the warning by which `open_device` says why it takes the software device, instead of having it printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._why = "the first RDMA device with an active port"

    def emit(self, record: logging.LogRecord) -> None:
        self._why = record.getMessage().partition(": ")[2] or record.getMessage()

    def text(self, name: str | None) -> str:
        """Why the device was chosen that this name opened."""
        if name is not None:
            return "it was named"
        return "AIOVERBS_DEVICE names it" if os.environ.get("AIOVERBS_DEVICE") else self._why

    def __enter__(self) -> "_Reasons":
        logging.getLogger("aioverbs").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("aioverbs").removeHandler(self)


# ---- The other process


def _content(seed: int, piece: int) -> bytes:
    return random.Random(f"{seed}/{piece}").randbytes(_PIECE)


@contextlib.asynccontextmanager
async def _owned_memory(seed: int, size: int, worker: Worker) -> AsyncIterator[MemoryRegion]:
    """Memory of the worker process, filled with what both processes can compute from the seed."""
    async with worker.domain.register(size, _ACCESS) as region:
        for at in range(0, size, _PIECE):
            region.buffer[at : at + _PIECE] = _content(seed, at // _PIECE)
        yield region


async def _answer(connection: Connection) -> None:
    """Let the peer read the worker's memory, and send back each message, reversed."""
    async with await connection.grant(current_worker().state, AccessFlags.REMOTE_READ):
        await connection.send(str(os.getpid()).encode())
        async for message in connection:
            await connection.send(message[::-1])


# ---- This process


class _Client:
    """The side that asks, and compares."""

    def __init__(self, connection: Connection, local: MemoryRegion, granted: RemoteGrant, seed: int) -> None:
        self._connection = connection
        self._local = local
        self._granted = granted
        self._seed = seed
        self.faults: list[str] = []

    async def exchange(self, count: int) -> Histogram:
        """Send messages one after the other, each when the one before came back; the nanoseconds that each took."""
        trips, wrong = Histogram(), 0
        for number in range(count):
            message = number.to_bytes(_MESSAGE, "little")
            began = time.perf_counter_ns()
            await self._connection.send(message)
            answer = await self._connection.receive()
            trips.record(time.perf_counter_ns() - began)
            wrong += answer != message[::-1]
        if wrong:
            self.faults.append(f"{wrong:,} of {count:,} messages did not come back as they should")
        return trips

    async def read_all(self, size: int) -> float:
        """Read the other process's memory, some pieces at a time, and compare; the seconds that reads took."""
        seconds, wrong = 0.0, 0
        for first in range(0, size, _WINDOW * _PIECE):
            offsets = range(first, min(first + _WINDOW * _PIECE, size), _PIECE)
            self._local.buffer[:] = bytes(len(self._local))  # so that what is not read is not found
            began = time.perf_counter()
            for read in [self._read(offset) for offset in offsets]:
                await read
            seconds += time.perf_counter() - began
            for offset in offsets:
                found = bytes(self._local.buffer[offset - first : offset - first + _PIECE])
                if found != (made := _content(self._seed, offset // _PIECE)):
                    wrong += sum(map(int.__ne__, found, made))
        if wrong:
            self.faults.append(f"{wrong:,} of {size:,} bytes are not those of the other process")
        return seconds

    def _read(self, offset: int) -> Operation[None]:
        place = offset % (_WINDOW * _PIECE)
        return self._connection.read(self._local[place : place + _PIECE], self._granted[offset : offset + _PIECE])

    async def call_from_wrong_loop(self) -> str | None:
        """Read from another thread with an event loop of its own; text of the error that stopped it, None: nothing."""

        async def read() -> None:
            await self._read(0)

        expected, error = _content(self._seed, 0), None
        self._local.buffer[:_PIECE] = bytes(_PIECE)
        try:
            await asyncio.to_thread(asyncio.run, read())
        except AffinityError as found:
            error = str(found)
        else:
            self.faults.append("a call from a wrong loop was not stopped")
        if any(self._local.buffer[:_PIECE]):
            self.faults.append("a call from a wrong loop changed memory")
        await read()
        if bytes(self._local.buffer[:_PIECE]) != expected:
            self.faults.append("after a call from a wrong loop the own loop read wrong bytes")
        return error
