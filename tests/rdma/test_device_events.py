"""A port that goes down and comes back, and a device that is removed, while both are in use."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    Device,
    DeviceEvent,
    DeviceNotFoundError,
    EventType,
    MemoryRegion,
    MessageModel,
    PortState,
    QueuePair,
    VerbsError,
    WorkCompletionError,
    devices,
    open_device,
)
from tests.pace import patience
from tests.rdma.spare import SpareDevice, spare_device

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(patience(60))]

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


@pytest.fixture
def spare() -> Iterator[SpareDevice]:
    with spare_device() as spare:
        yield spare


@asynccontextmanager
async def ends(device: Device, model: MessageModel) -> AsyncIterator[tuple[QueuePair, MemoryRegion]]:
    """Open a queue pair that is connected to another one, and memory."""
    async with (
        device.resource_domain(message_model=model) as domain,
        domain.register(4096, REMOTE) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        yield near, region


async def next_event(events: AsyncIterator[DeviceEvent], wanted: EventType) -> DeviceEvent:
    """Return the next event of a type; ignore others, such as changes of GIDs."""
    async with asyncio.timeout(patience(10)):
        async for event in events:
            if event.event_type is wanted:
                return event
    raise AssertionError("the events ended")


async def test_a_port_that_goes_down_and_comes_back(spare: SpareDevice) -> None:
    async with open_device(spare.name) as device:
        events = device.events()
        for state, wanted, port in (
            ("down", EventType.PORT_ERR, PortState.DOWN),
            ("up", EventType.PORT_ACTIVE, PortState.ACTIVE),
        ) * 2:
            await asyncio.to_thread(spare.set_link, state)
            event = await next_event(events, wanted)
            assert (event.resource, event.port_num) == (None, 1)
            assert device.port().state is port
            (found,) = (each for each in devices() if each.name == spare.name)
            assert found.active == (state == "up")
        await events.aclose()


@every_model
async def test_a_removed_device(spare: SpareDevice, model: MessageModel) -> None:
    """Some kernels remove a device in use immediately, others wait for its users: all waiters end in both cases."""
    written = 0

    async def write(near: QueuePair, region: MemoryRegion) -> None:
        nonlocal written
        while True:
            await near.write(region[:8], region.remote()[8:16])
            written += 1

    async with open_device(spare.name) as device:
        fatal = asyncio.create_task(next_event(device.events(), EventType.DEVICE_FATAL))
        async with ends(device, model) as (near, region):
            writing = asyncio.create_task(write(near, region))
            taking = await asyncio.create_subprocess_exec(*spare.delete_command())
            removal = asyncio.create_task(taking.wait())
            await asyncio.wait({fatal, removal}, timeout=patience(0.1), return_when=asyncio.FIRST_COMPLETED)
            before = written
            async with asyncio.timeout(patience(10)):
                while not writing.done() and written == before:  # noqa: ASYNC110  (others write)
                    await asyncio.sleep(0)
                if fatal.done() or removal.done() or writing.done():
                    with pytest.raises((VerbsError, BrokenResourceError, WorkCompletionError)):
                        await writing
            writing.cancel()
            await asyncio.wait([writing])
        fatal.cancel()
        with suppress(asyncio.CancelledError):
            await fatal
    async with asyncio.timeout(patience(10)):
        assert await removal == 0
    assert spare.name not in [each.name for each in devices()]
    with pytest.raises(DeviceNotFoundError):
        await open_device(spare.name).open()
