"""The work of `rdma_baseline.c` with this library: measure one thing, with the same arguments and output.

    python rdma_library.py WHAT MODEL LENGTH WINDOW OPERATIONS GID_INDEX NEAR FAR

MODEL is the name of a message model.
"""

import logging
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import uvloop

from aioverbs import (
    AccessFlags,
    CompletionQueue,
    Endpoint,
    MemoryRegion,
    MessageModel,
    Operation,
    QpCapabilities,
    QueuePair,
    Received,
    RegionSlice,
    open_device,
)

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE

Receives = deque[tuple[Operation[Received], RegionSlice]]  # in the order of arrival


@dataclass(frozen=True)
class Parameters:
    """Parameters of both ends."""

    model: MessageModel
    length: int
    window: int
    gid_index: int

    @asynccontextmanager
    async def end(self, device_name: str) -> AsyncIterator[tuple[QueuePair, MemoryRegion, CompletionQueue]]:
        """Open a queue pair, and memory for twice as many messages as are in flight."""
        places = 2 * self.window
        async with (
            open_device(device_name) as device,
            device.resource_domain(message_model=self.model) as domain,
            domain.register(places * self.length, ACCESS) as region,
            domain.completion_queue(2 * places) as cq,
            domain.queue_pair(cq, capabilities=QpCapabilities(places, places), gid_index=self.gid_index) as qp,
        ):
            region.buffer[:] = bytes(len(region))
            yield qp, region, cq

    def slices(self, region: MemoryRegion) -> list[RegionSlice]:
        """Return the slices for messages."""
        return [region[at : at + self.length] for at in range(0, len(region), self.length)]


async def write_one_by_one(qp: QueuePair, local: RegionSlice, region: MemoryRegion, operations: int) -> None:
    remote = region.remote()[: len(local)]
    for _ in range(operations):
        await qp.write(local, remote)


async def write_all(qp: QueuePair, local: list[RegionSlice], region: MemoryRegion, operations: int) -> None:
    length = len(local[0])
    remote = [region.remote()[at : at + length] for at in range(0, len(local) * length, length)]
    source = islice(cycle(zip(local, remote, strict=True)), operations)
    window = deque(qp.write(near, far) for near, far in islice(source, len(local)))
    for near, far in source:
        await window.popleft()
        window.append(qp.write(near, far))
    for operation in window:
        await operation


async def ask_all(qp: QueuePair, window: list[RegionSlice], receives: Receives, operations: int) -> None:
    """Send messages with `window` in flight, each from a slice of its own."""
    places = deque((local, qp.send(local)) for local in window[:operations])
    for remaining in range(operations, 0, -1):
        arriving, free = receives.popleft()
        await arriving
        receives.append((qp.receive(free), free))
        local, sent = places.popleft()
        await sent
        if remaining > len(window):
            places.append((local, qp.send(local)))


async def answer_all(qp: QueuePair, window: int, receives: Receives, operations: int) -> None:
    """Send each message back from its slice, and receive into that slice again once it is sent."""
    sending: deque[tuple[Operation[None], RegionSlice]] = deque()
    for _ in range(operations):
        arriving, local = receives.popleft()
        await arriving
        sending.append((qp.send(local), local))
        if len(sending) == window:
            sent, free = sending.popleft()
            await sent
            receives.append((qp.receive(free), free))
    for sent, free in sending:
        await sent
        receives.append((qp.receive(free), free))


def exchange_lines(line: str) -> str:
    """Send a line to the other process, and return its line."""
    print(line, flush=True)
    return sys.stdin.readline().strip()


async def timed(work: Callable[[int], Awaitable[None]], cq: CompletionQueue, operations: int) -> str:
    """Run a tenth of the operations as a warm-up, then measure all; return the output line."""
    await work(operations // 10 + 1)
    slept, began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.perf_counter_ns()
    woken = cq.statistics().wakeups
    await work(operations)
    took = time.perf_counter_ns() - began
    slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept
    woken = cq.statistics().wakeups - woken
    return f"{took / operations} {slept / operations} {woken / operations}"


async def writes(how: Parameters, near: str, far: str, operations: int) -> str:
    async with how.end(near) as (qp, local, cq), how.end(far) as (peer, remote, _):
        if near == far:
            peer, remote = qp, local
        qp.connect(peer.local_endpoint(), ACCESS)
        if peer is not qp:
            peer.connect(qp.local_endpoint(), ACCESS)
        places = how.slices(local)[: how.window]
        if how.window == 1:
            return await timed(partial(write_one_by_one, qp, places[0], remote), cq, operations)
        return await timed(partial(write_all, qp, places, remote), cq, operations)


async def echo(how: Parameters, what: str, near: str, operations: int) -> str:
    async with how.end(near) as (qp, region, cq):
        places = how.slices(region)
        qp.to_init()
        receives = deque((qp.receive(local), local) for local in (places[how.window :] if what == "ask" else places))
        qp.connect(Endpoint.from_bytes(bytes.fromhex(exchange_lines(bytes(qp.local_endpoint()).hex()))))
        exchange_lines("ready")
        if what == "ask":
            answer = await timed(partial(ask_all, qp, places[: how.window], receives), cq, operations)
        else:
            answer = await timed(partial(answer_all, qp, how.window, receives), cq, operations)
        exchange_lines("done")
        return answer


def main() -> None:
    # the warning that the device lacks native thread domains is expected
    logging.getLogger("aioverbs").setLevel(logging.ERROR)
    what, model, *numbers, near, far = sys.argv[1:]
    length, window, operations, gid_index = map(int, numbers)
    how = Parameters(MessageModel[model], length, window, gid_index)
    print(uvloop.run(writes(how, near, far, operations) if what == "writes" else echo(how, what, near, operations)))


if __name__ == "__main__":
    main()
