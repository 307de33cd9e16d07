"""Two connected queue pairs with memory, and a check that they are idle at the end of a test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aioverbs import (
    AccessFlags,
    CompletionQueue,
    Device,
    MemoryRegion,
    MessageModel,
    QpCapabilities,
    QueuePair,
    ResourceDomain,
    ThreadModel,
)
from aioverbs._core.data_path.data_path import Operation
from tests.data_path.ends import LONG_TIMEOUT
from tests.holding import hold, unhold
from tests.pace import patience

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
PATIENCE_S = patience(20)


@dataclass
class Pair:
    """A near queue pair that posts requests, and a far one that answers them."""

    device: Device
    domain: ResourceDomain
    cq: CompletionQueue
    near: QueuePair
    far: QueuePair
    source: MemoryRegion
    target: MemoryRegion

    def write(self, offset: int = 0, data: bytes = b"12345678") -> Operation[None]:
        part = slice(offset, offset + len(data))
        self.source.buffer[part] = data
        return self.near.write(self.source[part], self.target.remote()[part])

    def read(self, offset: int = 0, length: int = 8) -> Operation[None]:
        part = slice(offset, offset + length)
        return self.near.read(self.source[part], self.target.remote()[part])

    def written(self, offset: int = 0, length: int = 8) -> bytes:
        return bytes(self.target.buffer[offset : offset + length])

    def hold(self) -> None:
        hold(self.device, self.near)

    def unhold(self) -> None:
        unhold(self.device, self.near)

    async def check_idle(self) -> None:
        """Check that no request is in flight, all slots are free, and the queue pair still works."""
        await until(lambda: not self.near.statistics().sends.in_flight)
        assert self.cq.statistics().in_flight == self.far.statistics().receives.in_flight
        for queues in (self.near.statistics(), self.far.statistics()):
            assert (queues.sends.in_flight, queues.sends.queued) == (0, 0)
            assert queues.sends.posted == queues.sends.completed
        assert len(self.source.pins) == len(self.target.pins) == 0
        await asyncio.wait_for(self.write(4088, b"it works"), PATIENCE_S)
        assert self.written(4088) == b"it works"


async def until(condition: Callable[[], object]) -> None:
    """Yield to the loop until `condition` holds, for `PATIENCE_S` at most."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (the condition may be anything)
            await asyncio.sleep(0)


Opened = Callable[[Any], Awaitable[Any]]


async def open_pair(
    device: Device,
    message_model: MessageModel = MessageModel.DEFAULT,
    thread_model: ThreadModel = ThreadModel.SINGLE,
    *,
    sends: int = 16,
    spin_ns: int | None = None,
    receive_depth: int = 0,
    receive_size: int = 0,
    opened: Opened = lambda resource: resource.open(),
) -> Pair:
    """Open a pair; `opened` opens each resource, and decides how the resource is closed."""
    domain = await opened(device.resource_domain(thread_model=thread_model, message_model=message_model))
    source = await opened(domain.register(4096, ACCESS))
    target = await opened(domain.register(4096, ACCESS))
    cq = await opened(domain.completion_queue(512, spin_ns=spin_ns))
    near = await opened(domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=sends)))
    far = await opened(domain.queue_pair(cq, receive_depth=receive_depth, receive_size=receive_size))
    near.connect(far.local_endpoint(), ACCESS, **LONG_TIMEOUT)
    far.connect(near.local_endpoint(), ACCESS, **LONG_TIMEOUT)
    return Pair(device, domain, cq, near, far, source, target)


@asynccontextmanager
async def pair_on(
    device: Device,
    message_model: MessageModel = MessageModel.DEFAULT,
    thread_model: ThreadModel = ThreadModel.SINGLE,
    **sizes: Any,
) -> AsyncIterator[Pair]:
    """Open a pair for the duration of a block."""
    async with AsyncExitStack() as stack:
        yield await open_pair(device, message_model, thread_model, opened=stack.enter_async_context, **sizes)
