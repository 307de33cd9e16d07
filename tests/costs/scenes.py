"""A program that performs each counted operation `OPERATIONS` times, and prints the counts as JSON.

`tests.costs.test_costs` starts it under `system_calls`, with the library of `allocations.c` preloaded.
"""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import aioverbs
from aioverbs import AccessFlags, ConnectionSettings, Device, MessageModel, QueuePair, WorkerPool
from aioverbs._providers import peer_log
from tests.costs.counting import Counting, Counts
from tests.listening import own_address

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
OPERATIONS = 128
"""Number of operations per scene: small integers need no allocation, and an event once in 64 occurs twice."""
WARM_UP = 64
BATCH = 16
SETTINGS = ConnectionSettings(keep_alive_s=None)


@dataclass(frozen=True)
class Scene:
    """A scene to count.

    :param operations: performs the given number of operations.
    :param queue_pairs: queue pairs whose doorbells are counted.
    :param hold: numbers of threads that do not run meanwhile.
    """

    operations: Callable[[int], Awaitable[None]]
    queue_pairs: Collection[QueuePair] = ()
    hold: Collection[int] = ()

    async def warm_up(self) -> None:
        await self.operations(WARM_UP)

    async def measured(self) -> None:
        await self.operations(OPERATIONS)

    def doorbells(self) -> int:
        return sum(
            each.statistics().sends.doorbells + each.statistics().receives.doorbells for each in self.queue_pairs
        )


def other_threads() -> set[int]:
    """Return the numbers of the other threads of this process."""
    return {int(each.name) for each in Path("/proc/self/task").iterdir()} - {os.getpid()}


@asynccontextmanager
async def write_scene(
    near_device: Device,
    remote_device: Device,
    message_model: MessageModel = MessageModel.DEFAULT,
    hold: Collection[int] = (),
    *,
    batches: bool = False,
    together: bool = False,
) -> AsyncIterator[Scene]:
    """Writes of 8 bytes.

    :param batches: post them as batches, which are awaited.
    :param together: post as many as a batch has one by one, and then await them.
    """
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        domain = await opened(near_device.resource_domain(message_model=message_model))
        there = domain
        cq = remote_cq = await opened(domain.completion_queue(64))
        if remote_device is not near_device:
            there = await opened(remote_device.resource_domain(message_model=message_model))
            remote_cq = await opened(there.completion_queue(64))
        source = await opened(domain.register(4096, ACCESS))
        target = await opened(there.register(4096, ACCESS))
        near, far = await opened(domain.queue_pair(cq)), await opened(there.queue_pair(remote_cq))
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        local, remote = source[:8], target.remote()[:8]

        async def write(count: int) -> None:
            for _ in range(count):
                await near.write(local, remote)

        async def write_batches(count: int) -> None:
            for _ in range(count // BATCH):
                batch = near.batch()
                for _ in range(BATCH):
                    batch.write(local, remote)
                await batch.post()

        async def write_together(count: int) -> None:
            for _ in range(count // BATCH):
                posted = [near.write(local, remote) for _ in range(BATCH)]
                for each in posted:
                    await each

        yield Scene(write_batches if batches else write_together if together else write, [near, far], hold)


@asynccontextmanager
async def message_scene(near_device: Device, remote_device: Device, length: int = 8) -> AsyncIterator[Scene]:
    """Messages, every other one an echo of the one before. Both ends sleep until a message arrives.

    :param length: of each message, in bytes.
    """
    data = bytes(length)
    async with (
        near_device.resource_domain() as domain,
        remote_device.resource_domain() as there,
        aioverbs.listen("127.0.0.1", domain=there, settings=SETTINGS) as listener,
        aioverbs.connect("127.0.0.1", listener.port, domain=domain, settings=SETTINGS) as near,
        await listener.accept() as far,
    ):

        async def echo() -> None:
            async for message in far:
                await far.send(message)

        async def exchange(count: int) -> None:
            for _ in range(count // 2):
                await near.send(data)
                await near.receive()

        echoing = asyncio.create_task(echo())
        # The other threads are held: otherwise they might read the frames in place of the loop.
        yield Scene(exchange, [near.qp, far.qp], other_threads())
        await near.send_eof()
        await echoing


@asynccontextmanager
async def stream_scene(device: Device) -> AsyncIterator[Scene]:
    """Messages in one direction, as many as a batch has in each turn of the loop."""
    async with (
        device.resource_domain() as domain,
        aioverbs.listen("127.0.0.1", domain=domain, settings=SETTINGS) as listener,
        aioverbs.connect("127.0.0.1", listener.port, domain=domain, settings=SETTINGS) as near,
        await listener.accept() as far,
    ):

        async def stream(count: int) -> None:
            for _ in range(count // BATCH):
                for _ in range(BATCH):
                    await near.send(b"8 bytes.")
                for _ in range(BATCH):
                    await far.receive()

        yield Scene(stream, [near.qp, far.qp])


@asynccontextmanager
async def lease_scene(device: Device) -> AsyncIterator[Scene]:
    """Leases of buffers of a pool."""
    async with device.resource_domain() as domain, domain.buffer_pool(4096, 4) as pool:

        async def lease(count: int) -> None:
            for _ in range(count):
                async with pool.lease():
                    pass

        yield Scene(lease)


def nothing() -> None:
    """Do nothing, on a worker."""


@asynccontextmanager
async def call_scene(device: Device, loop: str) -> AsyncIterator[Scene]:
    """Calls that run in a worker thread."""
    async with WorkerPool(device, 1, loop=loop) as pool:

        async def run(count: int) -> None:
            for _ in range(count):
                await pool.run(nothing)

        yield Scene(run)


@asynccontextmanager
async def device(transfer: str = "inline") -> AsyncIterator[Device]:
    """Open a device with this execution."""
    async with aioverbs.open_device("soft0", execution="thread" if transfer == "thread" else "inline") as opened:
        yield opened


@asynccontextmanager
async def devices(transfer: str) -> AsyncIterator[tuple[Device, Device, Collection[int]]]:
    """Open two devices linked by "direct", "rings", "socket" or "tcp"; yield both, and the threads of the first."""
    os.environ["AIOVERBS_SOFT_SPIN"] = "0"
    os.environ["AIOVERBS_SOFT_DIRECT"] = str(int(transfer == "direct"))
    os.environ["AIOVERBS_SOFT_RINGS"] = str(int(transfer == "rings"))
    folder = Path(os.environ["AIOVERBS_COSTS_FOLDER"])
    address = own_address()
    for name in ("near", "far"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    os.environ["AIOVERBS_SOFT_DIRECTORY"] = str(folder / "near")
    async with aioverbs.open_device(f"soft0@{address}:7474" if transfer == "tcp" else "soft0") as near:
        if transfer == "tcp":  # different directories, so that no Unix socket is found
            os.environ["AIOVERBS_SOFT_DIRECTORY"] = str(folder / "far")
        threads = other_threads()
        async with aioverbs.open_device(f"soft0@{address}:7475") as far:
            yield near, far, threads


@asynccontextmanager
async def on_one_device(
    transfer: str, scene: Callable[[Device], AbstractAsyncContextManager[Scene]]
) -> AsyncIterator[Scene]:
    """Run a scene on one device."""
    async with device(transfer) as opened, scene(opened) as entered:
        yield entered


@asynccontextmanager
async def on_two_devices(
    transfer: str, scene: Callable[[Device, Device, Collection[int]], AbstractAsyncContextManager[Scene]]
) -> AsyncIterator[Scene]:
    """Run a scene on two devices."""
    async with devices(transfer) as ends, scene(*ends) as entered:
        yield entered


@asynccontextmanager
async def idle_scene() -> AsyncIterator[Scene]:
    """A scene without operations, whose allocations are subtracted."""

    async def nothing_at_all(count: int) -> None:
        for _ in range(count):
            pass

    yield Scene(nothing_at_all)


def scenes(loop: str) -> dict[str, AbstractAsyncContextManager[Scene]]:
    """Return all scenes by name, to be entered one after the other."""
    high_bandwidth = MessageModel.HIGH_BANDWIDTH
    return {
        "nothing": idle_scene(),
        "write": on_one_device("inline", lambda device: write_scene(device, device)),
        "write in batches": on_one_device("inline", lambda device: write_scene(device, device, batches=True)),
        "write together": on_one_device(
            "inline", lambda device: write_scene(device, device, high_bandwidth, together=True)
        ),
        "write by the thread": on_one_device("thread", lambda device: write_scene(device, device)),
        "write in batches by the thread": on_one_device(
            "thread", lambda device: write_scene(device, device, batches=True)
        ),
        "write to another device": on_two_devices(
            "socket", lambda near, far, threads: write_scene(near, far, hold=threads)
        ),
        "message": on_one_device("inline", lambda device: message_scene(device, device)),
        "messages together": on_one_device("inline", stream_scene),
        "message by Unix socket": on_two_devices("socket", lambda near, far, _: message_scene(near, far)),
        "message by rings": on_two_devices("rings", lambda near, far, _: message_scene(near, far)),
        "message by TCP": on_two_devices("tcp", lambda near, far, _: message_scene(near, far)),
        "message of 32 KiB by rings": on_two_devices("rings", lambda near, far, _: message_scene(near, far, 1 << 15)),
        "message of 32 KiB, direct": on_two_devices("direct", lambda near, far, _: message_scene(near, far, 1 << 15)),
        "lease": on_one_device("inline", lease_scene),
        "call of a worker": on_one_device("inline", lambda device: call_scene(device, loop)),
    }


async def main(loop: str, counting: Counting) -> dict[str, Counts]:
    """Count all scenes on one kind of loop."""
    peer_log.INTERVAL_S = 3600.0  # so that no timer fires meanwhile
    counted = {}
    # All ends sleep: how many polls find something would be random.
    with patch("aioverbs._verbs.completion_queue.usable_processors", lambda: 1):
        for name, scene in scenes(loop).items():
            async with scene as entered:
                counted[name] = await counting.count(entered.warm_up, entered.measured, entered.doorbells, entered.hold)
    return counted


if __name__ == "__main__":
    loop_name, shared = sys.argv[1:]
    counters = Counting(int(shared))
    if loop_name == "uvloop":
        import uvloop

        counted = uvloop.run(main(loop_name, counters))
    else:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            counted = runner.run(main(loop_name, counters))
    print(json.dumps({name: dataclasses.asdict(each) for name, each in counted.items()}))
