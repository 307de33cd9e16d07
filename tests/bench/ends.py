"""What the benchmarks of the data path work on, and the loops that they measure."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from aioverbs import AccessFlags, MemoryRegion, QpCapabilities, QueuePair, RegionSlice, RemoteRegion, open_device
from aioverbs._verbs.completion_queue import CompletionQueue, MessageModel
from aioverbs._verbs.device import Device
from aioverbs.attributes import Execution

__all__ = [
    "MODELS",
    "Ends",
    "Place",
    "Walk",
    "bare_awaits",
    "bare_window",
    "batches",
    "batches_over",
    "ends",
    "reads",
    "windowed",
    "writes",
    "writes_over",
]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ

# The message model that is measured with each execution.
MODELS: dict[Execution, MessageModel] = {"thread": MessageModel.DEFAULT, "inline": MessageModel.FORCE_LOW_LATENCY}

Place = tuple[RegionSlice, RemoteRegion]

Local = TypeVar("Local")
Remote = TypeVar("Remote")


@dataclass(frozen=True)
class Ends:
    """Queue pairs of the running loop, each connected to itself, with one completion queue and two regions."""

    device: Device
    cq: CompletionQueue
    qps: Sequence[QueuePair]
    local: MemoryRegion
    remote: MemoryRegion

    @property
    def qp(self) -> QueuePair:
        """The first."""
        return self.qps[0]

    def place(self, length: int, offset: int = 0) -> Place:
        """A part of the one region and the same part of the other."""
        return self.local[offset : offset + length], self.remote.remote()[offset : offset + length]

    def places(self, length: int, count: int) -> list[Place]:
        """So many of them, side by side."""
        return [self.place(length, at * length) for at in range(count)]


@asynccontextmanager
async def ends(
    model: MessageModel, *, execution: Execution = "inline", count: int = 1, depth: int = 128, size: int = 1 << 18
) -> AsyncIterator[Ends]:
    """Open `Ends` on the software device.

    :param execution: of the device.
    :param count: of queue pairs.
    :param depth: of each.
    :param size: of each region, in bytes.
    """
    capabilities = QpCapabilities(max_send_wr=depth, max_recv_wr=1)
    async with (
        open_device("soft0", execution=execution) as device,
        device.resource_domain(message_model=model) as domain,
        domain.register(size, ACCESS) as local,
        domain.register(size, ACCESS) as remote,
        domain.completion_queue(count * (depth + 1)) as cq,
        AsyncExitStack() as stack,
    ):
        for region in (local, remote):
            region.buffer[:] = bytes(size)  # every page is there
        qps = [await stack.enter_async_context(domain.queue_pair(cq, capabilities=capabilities)) for _ in range(count)]
        for qp in qps:
            qp.connect(qp.local_endpoint(), ACCESS)
        yield Ends(device, cq, qps, local, remote)


# ---- What is measured: so many operations; nanoseconds for all of them.


async def writes(qp: QueuePair, place: Place, operations: int) -> float:
    """Writes one after the other, each awaited."""
    local, remote = place
    begin = time.perf_counter_ns()
    for _ in range(operations):
        await qp.write(local, remote)
    return time.perf_counter_ns() - begin


async def windowed(
    call: Callable[[Local, Remote], Awaitable[None]], places: Sequence[tuple[Local, Remote]], operations: int
) -> float:
    """Operations, as many of them under way as there are places; the oldest is awaited."""
    window = deque[Awaitable[None]]()
    source = itertools.cycle(places)
    begin = time.perf_counter_ns()
    for local, remote in itertools.islice(source, min(operations, len(places))):
        window.append(call(local, remote))
    for local, remote in itertools.islice(source, operations - len(window)):
        await window.popleft()
        window.append(call(local, remote))
    for operation in window:
        await operation
    return time.perf_counter_ns() - begin


async def reads(qp: QueuePair, places: Sequence[Place], operations: int) -> float:
    """Reads, so many of them under way."""
    return await windowed(qp.read, places, operations)


async def batches(qp: QueuePair, places: Sequence[Place], count: int) -> float:
    """Batches of writes, one to each place, each batch awaited."""
    begin = time.perf_counter_ns()
    for _ in range(count):
        batch = qp.batch()
        for local, remote in places:
            batch.write(local, remote)
        await batch.post()
    return time.perf_counter_ns() - begin


async def bare_awaits(operations: int) -> float:
    """The loop of `writes` where the call does nothing, in C, and what it gives was done before: Python's own share."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    call = {0: done}.get
    begin = time.perf_counter_ns()
    for _ in range(operations):
        await call(0, done)
    return time.perf_counter_ns() - begin


async def bare_window(places: Sequence[Place], operations: int) -> float:
    """The loop of `reads`, likewise."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return await windowed({0: done}.get, [(0, done)] * len(places), operations)


class Walk:
    """Goes through places, on and on: whoever takes its turn finds memory that was not touched for long."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._at = 0

    @property
    def stride(self) -> int:
        """From one place to the next; 0 where there is one."""
        return len(self._places[0][0]) if len(self._places) > 1 else 0

    def take(self, operations: int) -> int:
        """The offset of the next place; so many are gone over."""
        return self._go(operations) * self.stride

    def places(self, operations: int) -> list[Place]:
        """So many of the next places."""
        first = self._go(operations)
        return list(itertools.islice(itertools.cycle(self._places), first, first + operations))

    def _go(self, operations: int) -> int:
        first, self._at = self._at, (self._at + operations) % len(self._places)
        return first


async def writes_over(qp: QueuePair, walk: Walk, operations: int) -> float:
    """Writes one after the other, each to another place."""
    places = walk.places(operations)
    begin = time.perf_counter_ns()
    for local, remote in places:
        await qp.write(local, remote)
    return time.perf_counter_ns() - begin


async def batches_over(qp: QueuePair, walk: Walk, operations: int, size: int) -> float:
    """The same in batches of so many."""
    places = walk.places(operations)
    begin = time.perf_counter_ns()
    for first in range(0, len(places), size):
        batch = qp.batch()
        for local, remote in places[first : first + size]:
            batch.write(local, remote)
        await batch.post()
    return time.perf_counter_ns() - begin
