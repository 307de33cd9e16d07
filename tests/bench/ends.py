"""Queue pairs for the benchmarks of the data path, and the loops that the benchmarks measure."""

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

# Message model measured with each execution.
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
        """The first queue pair."""
        return self.qps[0]

    def place(self, length: int, offset: int = 0) -> Place:
        """Return a slice of the local region and the same slice of the remote region."""
        return self.local[offset : offset + length], self.remote.remote()[offset : offset + length]

    def places(self, length: int, count: int) -> list[Place]:
        """Return adjacent slices."""
        return [self.place(length, at * length) for at in range(count)]


@asynccontextmanager
async def ends(
    model: MessageModel, *, execution: Execution = "inline", count: int = 1, depth: int = 128, size: int = 1 << 18
) -> AsyncIterator[Ends]:
    """Open `Ends` on the software device.

    :param execution: execution of the device.
    :param count: number of queue pairs.
    :param depth: depth of the queues.
    :param size: size of each region in bytes.
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
            region.buffer[:] = bytes(size)  # touch all pages
        qps = [await stack.enter_async_context(domain.queue_pair(cq, capabilities=capabilities)) for _ in range(count)]
        for qp in qps:
            qp.connect(qp.local_endpoint(), ACCESS)
        yield Ends(device, cq, qps, local, remote)


# ---- Measured functions: run a number of operations, and return the nanoseconds for all of them


async def writes(qp: QueuePair, place: Place, operations: int) -> float:
    """Write repeatedly; await each write before the next."""
    local, remote = place
    begin = time.perf_counter_ns()
    for _ in range(operations):
        await qp.write(local, remote)
    return time.perf_counter_ns() - begin


async def windowed(
    call: Callable[[Local, Remote], Awaitable[None]], places: Sequence[tuple[Local, Remote]], operations: int
) -> float:
    """Keep one operation for each place in flight, and await the oldest."""
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
    """Read repeatedly, with one read for each place in flight."""
    return await windowed(qp.read, places, operations)


async def batches(qp: QueuePair, places: Sequence[Place], count: int) -> float:
    """Post batches with one write to each place, and await each batch."""
    begin = time.perf_counter_ns()
    for _ in range(count):
        batch = qp.batch()
        for local, remote in places:
            batch.write(local, remote)
        await batch.post()
    return time.perf_counter_ns() - begin


async def bare_awaits(operations: int) -> float:
    """Run the loop of `writes` with a C function that returns a completed awaitable: the share of the interpreter."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    call = {0: done}.get
    begin = time.perf_counter_ns()
    for _ in range(operations):
        await call(0, done)
    return time.perf_counter_ns() - begin


async def bare_window(places: Sequence[Place], operations: int) -> float:
    """Run the loop of `reads` with a C function that returns a completed awaitable."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return await windowed({0: done}.get, [(0, done)] * len(places), operations)


class Walk:
    """Cycle through slices of the regions, so that each operation uses memory that was not touched recently."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._at = 0

    @property
    def stride(self) -> int:
        """The distance between slices in bytes; 0 if there is one slice only."""
        return len(self._places[0][0]) if len(self._places) > 1 else 0

    def take(self, operations: int) -> int:
        """Return the offset of the next slice, and advance by a number of operations."""
        return self._go(operations) * self.stride

    def places(self, operations: int) -> list[Place]:
        """Return the next slices."""
        first = self._go(operations)
        return list(itertools.islice(itertools.cycle(self._places), first, first + operations))

    def _go(self, operations: int) -> int:
        first, self._at = self._at, (self._at + operations) % len(self._places)
        return first


async def writes_over(qp: QueuePair, walk: Walk, operations: int) -> float:
    """Write to one slice after another; await each write before the next."""
    places = walk.places(operations)
    begin = time.perf_counter_ns()
    for local, remote in places:
        await qp.write(local, remote)
    return time.perf_counter_ns() - begin


async def batches_over(qp: QueuePair, walk: Walk, operations: int, size: int) -> float:
    """Write to one slice after another, in batches of `size`."""
    places = walk.places(operations)
    begin = time.perf_counter_ns()
    for first in range(0, len(places), size):
        batch = qp.batch()
        for local, remote in places[first : first + size]:
            batch.write(local, remote)
        await batch.post()
    return time.perf_counter_ns() - begin
