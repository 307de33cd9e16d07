"""A device's asynchronous events, as an iterator, on one loop and on several."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from aioverbs import ClosedResourceError, Device, DeviceEvent, EventType, open_device


async def take(events: AsyncIterator[DeviceEvent], count: int) -> list[DeviceEvent]:
    """The next events."""
    return [await asyncio.wait_for(anext(events), 10) for _ in range(count)]


async def listening(events: AsyncIterator[DeviceEvent]) -> "asyncio.Task[DeviceEvent]":
    """The task of somebody who waits for the next event."""
    task = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return task


async def test_events_of_ports_and_objects(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(4) as cq,
        domain.queue_pair(cq) as qp,
        domain.shared_receive_queue(4) as srq,
    ):
        events = device.events()
        faults = device.handle.faults
        faults.set_port(False)
        faults.set_port(True)
        assert await take(events, 2) == [
            DeviceEvent(EventType.PORT_ERR, None, 1),
            DeviceEvent(EventType.PORT_ACTIVE, None, 1),
        ]
        faults.break_queue_pair(qp.handle)
        faults.break_shared_receive_queue(srq.handle)
        assert await take(events, 2) == [
            DeviceEvent(EventType.QP_FATAL, qp, None),
            DeviceEvent(EventType.SRQ_ERR, srq, None),
        ]


async def test_events_of_one_object(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(4) as cq,
        domain.queue_pair(cq) as qp,
        domain.queue_pair(cq) as other,
    ):
        of_one, of_all = device.events(qp), device.events()
        first, second = await listening(of_one), await listening(of_all)
        device.handle.faults.break_queue_pair(other.handle)
        device.handle.faults.break_queue_pair(qp.handle)
        assert (await first).resource is qp
        assert [(await second).resource, *(event.resource for event in await take(of_all, 1))] == [other, qp]


async def test_listeners_on_several_loops_all_hear(device: Device) -> None:
    ready = asyncio.Event()
    here = asyncio.get_running_loop()

    async def elsewhere() -> DeviceEvent:
        task = await listening(device.events())
        here.call_soon_threadsafe(ready.set)
        return await task

    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    await ready.wait()
    task = await listening(device.events())
    device.handle.faults.set_port(False)
    assert await task == await thread == DeviceEvent(EventType.PORT_ERR, None, 1)


async def test_what_came_before_waits(device: Device) -> None:
    device.handle.faults.set_port(False)
    events = device.events()
    assert (await take(events, 1))[0].event_type is EventType.PORT_ERR


async def test_the_end_of_the_device_is_their_end() -> None:
    device = await open_device("soft0").open()
    found: list[EventType] = []

    async def listen() -> None:
        async for event in device.events():
            found.append(event.event_type)  # noqa: PERF401

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    device.handle.faults.lose_device()
    await asyncio.sleep(0.01)
    await device.aclose()
    await asyncio.wait_for(task, 10)
    assert found == [EventType.DEVICE_FATAL]
    with pytest.raises(ClosedResourceError):
        device.events()


async def test_an_event_that_was_told_keeps_nothing_from_being_closed(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(4) as cq:
        events = device.events()
        async with domain.queue_pair(cq) as qp:
            task = await listening(events)
            device.handle.faults.break_queue_pair(qp.handle)
            assert (await task).resource is qp
        assert qp.closed
