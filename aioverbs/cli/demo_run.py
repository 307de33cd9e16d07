"""Work of `aioverbs demo`: a pool with one worker process, and a connection to it."""

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
from aioverbs.cli.inventory import inspect_device
from aioverbs.errors import AffinityError
from aioverbs.types import AccessFlags

__all__ = ["Outcome", "demonstrate"]

_LOOPBACK = "127.0.0.1"  # for connection setup; the data goes through the device
_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
_PIECE = 1 << 20  # bytes of a read
_WINDOW = 4  # reads in flight
_MESSAGE = 64  # bytes


@dataclass(frozen=True)
class Outcome:
    """Result of a demonstration. Made by `demonstrate`.

    :param device: the device's name.
    :param reason: why this device was chosen.
    :param native: whether the device implements each of `aioverbs.cli.inventory.FEATURES`.
    :param processes: process IDs of the client and of the server.
    :param messages: number of round trips.
    :param round_trip_ns: percentiles of the duration of a round trip, in nanoseconds.
    :param bytes: number of bytes that were read one-sidedly and compared.
    :param read_seconds: duration of all reads.
    :param affinity_error: message of the AffinityError raised by the call from a foreign loop; None if none was raised.
    :param faults: descriptions of everything that went wrong.
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
    def verified(self) -> bool:
        """True if nothing went wrong, so that `faults` is empty."""
        return not self.faults


async def demonstrate(name: str | None, size: int, messages: int) -> Outcome:
    """Start the worker process, exchange messages with it, and read its memory. Then read from another thread and event
    loop, which must raise AffinityError, and once more from the owner's loop, and stop the process.

    :param name: the device's name; None for the device in AIOVERBS_DEVICE, or for the best available one.
    :param size: number of bytes of memory to read, a multiple of 1 MiB.
    :param messages: number of round trips.
    :returns: the outcome. Its `faults` are strings that say what went wrong without an exception: wrong answers, wrong
        bytes, or a read from the other loop that raised no AffinityError or changed memory.
    :raises DeviceNotFoundError: no device has that name.
    :raises OSError: the device is unusable, or the worker process cannot be started or connected to.
    :raises ValueError: an environment variable of the software device, or the address in its name, is invalid.
    :raises BrokenResourceError: the worker process ended, or the connection to it broke.
    :raises anyio.EndOfStream: the worker process closed the connection.
    :raises WorkCompletionError: a read failed.
    """
    async with contextlib.AsyncExitStack() as stack:
        with _Reasons() as reasons:
            device = await stack.enter_async_context(open_device(name))
        found = await inspect_device(device.name)
        if found.problem is not None:
            raise OSError(f"{found.name} cannot be used: {found.problem}; run `aioverbs doctor`")
        seed = random.randrange(1 << 32)
        pool = WorkerPool(device, 1, processes=True, setup=partial(_owned_memory, seed, size))
        await stack.enter_async_context(pool)
        secret = secrets.token_bytes(32)
        server = await stack.enter_async_context(serve(_answer, _LOOPBACK, pool=pool, secret=secret))
        domain = await stack.enter_async_context(device.resource_domain())
        local = await stack.enter_async_context(domain.register(_WINDOW * _PIECE, _ACCESS))
        connection = await stack.enter_async_context(
            connect(_LOOPBACK, server.port, domain=domain, transport="tcp", secret=secret)
        )
        client = _Client(connection, local, await connection.receive_grant(), seed)
        peer = int(await connection.receive())
        round_trips = await client.exchange(messages)
        read_seconds = await client.read_all(size)
        error = await client.call_from_wrong_loop()
        percentiles = {f"p{percent:g}": round_trips.percentile(percent) for percent in (50, 99, 99.9)}
        return Outcome(
            device.name,
            reasons.text(name),
            found.native,
            (os.getpid(), peer),
            messages,
            {**percentiles, "max": round_trips.maximum},
            size,
            read_seconds,
            error,
            tuple(client.faults),
        )


class _Reasons(logging.Handler):
    """Log handler that keeps the reason that `open_device` logs when it selects the software device.

    It handles messages of the logger ``aioverbs``, from INFO up, for the duration of its ``with`` block.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._reason = "the first RDMA device with an active port"
        self._logger = logging.getLogger("aioverbs")
        self._level_before = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        selected, _, reason = record.getMessage().partition(": ")
        if selected.startswith("opening the software device"):
            self._reason = reason

    def text(self, name: str | None) -> str:
        """Return text that says why `open_device` selected its device in this handler's ``with`` block.

        The text names ``--device`` if ``name`` is not None, otherwise AIOVERBS_DEVICE if that is set. If neither
        applies, it is the reason that `open_device` logged; if nothing was logged, that the device is the first RDMA
        device with an active port.

        :param name: name that `open_device` was called with; None if it was called without a name.
        """
        if name is not None:
            return "selected by --device"
        return "selected by AIOVERBS_DEVICE" if os.environ.get("AIOVERBS_DEVICE") else self._reason

    def __enter__(self) -> "_Reasons":
        self._level_before = self._logger.level
        self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)


# ---- Worker process


def _content(seed: int, piece: int) -> bytes:
    """Return block number ``piece``, of 1 MiB, of the worker's memory. The result depends only on ``seed`` and
    ``piece``.
    """
    return random.Random(f"{seed}/{piece}").randbytes(_PIECE)


@contextlib.asynccontextmanager
async def _owned_memory(seed: int, size: int, worker: Worker) -> AsyncIterator[MemoryRegion]:
    """Yield a registered region of the worker process, filled with bytes that the worker and the client each compute
    from `seed`.

    The pool uses this function as its ``setup``: the region is the worker's state and is closed when the worker ends.

    :param size: length of the region in bytes, a multiple of 1 MiB.
    :raises VerbsError: the memory cannot be registered.
    """
    async with worker.domain.register(size, _ACCESS) as region:
        for at in range(0, size, _PIECE):
            region.buffer[at : at + _PIECE] = _content(seed, at // _PIECE)
        yield region


async def _answer(connection: Connection) -> None:
    """Grant the peer read access to the worker's memory, send it this process's ID, then send back each message
    reversed.

    This returns when the peer closes the connection.

    :raises BrokenResourceError: the connection broke.
    :raises VerbsError: a memory window cannot be bound.
    """
    async with await connection.grant(current_worker().state, AccessFlags.REMOTE_READ):
        await connection.send(str(os.getpid()).encode())
        async for message in connection:
            await connection.send(message[::-1])


# ---- Client process


class _Client:
    """Client side: sends messages, reads the worker's memory and compares it. Differences are added to `faults`.

    :param local: memory of this process, which the reads fill.
    :param grant: the worker's memory.
    """

    def __init__(self, connection: Connection, local: MemoryRegion, grant: RemoteGrant, seed: int) -> None:
        self._connection = connection
        self._local = local
        self._grant = grant
        self._seed = seed
        self.faults: list[str] = []

    async def exchange(self, count: int) -> Histogram:
        """Send ``count`` messages, each after the answer to the previous one. If answers are wrong, their number is
        added to `faults`.

        :returns: a histogram of the round-trip times in nanoseconds.
        :raises BrokenResourceError: the connection broke.
        :raises anyio.EndOfStream: the worker process closed the connection.
        """
        round_trips, wrong = Histogram(), 0
        for number in range(count):
            message = number.to_bytes(_MESSAGE, "little")
            began = time.perf_counter_ns()
            await self._connection.send(message)
            answer = await self._connection.receive()
            round_trips.record(time.perf_counter_ns() - began)
            wrong += answer != message[::-1]
        if wrong:
            self.faults.append(f"{wrong:,} of {count:,} messages had a wrong answer")
        return round_trips

    async def read_all(self, size: int) -> float:
        """Read the first ``size`` bytes of the worker's memory, 4 MiB at a time, and compare them with the expected
        bytes. If bytes differ, their number is added to `faults`.

        :returns: the seconds spent in reads.
        :raises WorkCompletionError: a read failed; the connection is then broken.
        :raises BrokenResourceError: the connection broke before.
        """
        seconds, wrong = 0.0, 0
        for first in range(0, size, _WINDOW * _PIECE):
            offsets = range(first, min(first + _WINDOW * _PIECE, size), _PIECE)
            self._local.buffer[:] = bytes(len(self._local))  # so that a read that wrote nothing is noticed
            began = time.perf_counter()
            for read in [self._read(offset) for offset in offsets]:
                await read
            seconds += time.perf_counter() - began
            for offset in offsets:
                found = bytes(self._local.buffer[offset - first : offset - first + _PIECE])
                if found != (expected := _content(self._seed, offset // _PIECE)):
                    wrong += sum(map(int.__ne__, found, expected))
        if wrong:
            self.faults.append(f"{wrong:,} of {size:,} bytes differ from the worker's memory")
        return seconds

    def _read(self, offset: int) -> Operation[None]:
        """Post a read of the 1 MiB at ``offset`` in the worker's memory to its place in local memory.

        :returns: the operation, to be awaited by the caller; this raises `WorkCompletionError` if the read fails.
        :raises BrokenResourceError: the connection is broken.
        :raises AffinityError: the caller is not on the event loop that owns the connection.
        """
        place = offset % (_WINDOW * _PIECE)
        return self._connection.read(self._local[place : place + _PIECE], self._grant[offset : offset + _PIECE])

    async def call_from_wrong_loop(self) -> str | None:
        """Read through the connection from another thread and event loop, which must fail, then from the loop that owns
        it.

        If the first read succeeds or changes memory, or the second one reads wrong bytes, this is added to `faults`.

        :returns: the message of the AffinityError that the first read raised; None if the first read succeeded.
        :raises Exception: the first read raised an exception other than AffinityError, or the second read failed.
        """

        async def read() -> None:
            await self._read(0)

        expected, error = _content(self._seed, 0), None
        self._local.buffer[:_PIECE] = bytes(_PIECE)
        try:
            await asyncio.to_thread(asyncio.run, read())
        except AffinityError as found:
            error = str(found)
        else:
            self.faults.append("a call from a foreign loop did not raise AffinityError")
        if any(self._local.buffer[:_PIECE]):
            self.faults.append("a call from a foreign loop changed memory")
        await read()
        if bytes(self._local.buffer[:_PIECE]) != expected:
            self.faults.append("after a call from a foreign loop, the owner's loop read wrong bytes")
        return error
