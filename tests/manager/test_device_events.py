"""Asynchronous events of devices: iterators on one loop and on several loops."""

import asyncio
import contextlib
import errno
import os
import select
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    Device,
    DeviceEvent,
    EventType,
    ThreadModel,
    open_device,
)
from aioverbs._verbs.async_events import AsyncEventSource, EventPump
from tests.capabilities import Capability, needs
from tests.descriptors import descriptors, descriptors_at_first
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.waiting import until

WRITTEN = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


async def take_events(events: AsyncIterator[DeviceEvent], count: int) -> list[DeviceEvent]:
    """Return the next events."""
    return [await asyncio.wait_for(anext(events), patience(10)) for _ in range(count)]


async def start_listening(events: AsyncIterator[DeviceEvent]) -> "asyncio.Task[DeviceEvent]":
    """Return a task that waits for the next event; it is suspended there already."""
    task = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return task


@needs(Capability.FAULT_PLAN)
async def test_events_of_ports_and_objects(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.shared_receive_queue(4) as srq,
    ):
        events = device.events()
        faults = device.faults
        faults.set_port(False)
        faults.set_port(True)
        assert await take_events(events, 2) == [
            DeviceEvent(EventType.PORT_ERR, None, 1),
            DeviceEvent(EventType.PORT_ACTIVE, None, 1),
        ]
        faults.break_queue_pair(qp.handle)
        faults.break_shared_receive_queue(srq.handle)
        assert await take_events(events, 2) == [
            DeviceEvent(EventType.QP_FATAL, qp, None),
            DeviceEvent(EventType.SRQ_ERR, srq, None),
        ]


@needs(Capability.FAULT_PLAN)
async def test_events_of_one_object(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.queue_pair(cq) as other,
    ):
        of_one, of_all = device.events(qp), device.events()
        first, second = await start_listening(of_one), await start_listening(of_all)
        device.faults.break_queue_pair(other.handle)
        device.faults.break_queue_pair(qp.handle)
        assert (await first).resource is qp
        assert [(await second).resource, *(event.resource for event in await take_events(of_all, 1))] == [other, qp]


@needs(Capability.FAULT_PLAN)
async def test_each_object_has_its_own_events(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        domain.queue_pair(cq) as other,
        domain.shared_receive_queue(4) as srq,
    ):
        objects: list[AsyncEventSource[Any]] = [qp, srq, cq]
        tasks = [await start_listening(each.events()) for each in objects]
        faults = device.faults
        faults.set_port(False)
        faults.break_queue_pair(other.handle)
        faults.break_queue_pair(qp.handle)
        faults.break_shared_receive_queue(srq.handle)
        faults.break_completion_queue(cq.handle)
        types = [EventType.QP_FATAL, EventType.SRQ_ERR, EventType.CQ_ERR]
        assert await asyncio.wait_for(asyncio.gather(*tasks), patience(10)) == [
            DeviceEvent(kind, each, None) for kind, each in zip(types, objects, strict=True)
        ]
        # Events without a listener stay queued for the next one.
        rest = await take_events(device.events(), 2)
        assert [(event.event_type, event.resource) for event in rest] == [
            (EventType.PORT_ERR, None),
            (EventType.QP_FATAL, other),
        ]


@pytest.mark.parametrize("by", ["itself", "its device", "its device's events"])
async def test_closing_an_object_ends_its_events(by: str) -> None:
    device = await open_device("soft0").open()
    domain = await device.resource_domain(thread_model=ThreadModel.SAFE).open()
    srq = await domain.shared_receive_queue(4).open()
    events = device.events(srq) if "events" in by else srq.events()
    here, received = asyncio.get_running_loop(), asyncio.Event()
    found: list[EventType] = []

    async def listen() -> None:
        async for event in events:
            found.append(event.event_type)
            here.call_soon_threadsafe(received.set)

    def elsewhere() -> None:
        asyncio.run(asyncio.wait_for(listen(), patience(10)))

    thread = asyncio.create_task(asyncio.to_thread(elsewhere))
    device.faults.break_shared_receive_queue(srq.handle)
    await asyncio.wait_for(received.wait(), patience(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        await (device if "device" in by else srq).aclose()
        await thread
        await device.aclose()
    assert found == [EventType.SRQ_ERR]
    with pytest.raises(ClosedResourceError, match="SharedReceiveQueue"):
        srq.events()


@needs(Capability.FAULT_PLAN)
async def test_unread_events_keep_no_object_alive(device: Device) -> None:
    async with device.resource_domain(thread_model=ThreadModel.SAFE) as domain:
        kept = [await domain.shared_receive_queue(4).open()]
        device.faults.break_shared_receive_queue(kept[0].handle)
        async with domain.shared_receive_queue(4) as other:
            device.faults.break_shared_receive_queue(other.handle)
            assert (await take_events(other.events(), 1))[0].resource is other  # the first queue has no listener
        with pytest.warns(ResourceWarning, match="SharedReceiveQueue"):
            kept.clear()
        assert await take_events(device.events(), 1) == [DeviceEvent(EventType.SRQ_ERR, None, None)]


@needs(Capability.FAULT_PLAN)
async def test_listeners_on_several_loops_all_receive_events(device: Device) -> None:
    ready = asyncio.Event()
    here = asyncio.get_running_loop()

    async def elsewhere() -> DeviceEvent:
        task = await start_listening(device.events())
        here.call_soon_threadsafe(ready.set)
        return await task

    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    await ready.wait()
    task = await start_listening(device.events())
    device.faults.set_port(False)
    assert await task == await thread == DeviceEvent(EventType.PORT_ERR, None, 1)


@needs(Capability.FAULT_PLAN)
async def test_events_before_the_first_listener_are_queued(device: Device) -> None:
    device.faults.set_port(False)
    events = device.events()
    assert (await take_events(events, 1))[0].event_type is EventType.PORT_ERR


async def test_closing_the_device_ends_its_events() -> None:
    device = await open_device("soft0").open()
    found: list[EventType] = []

    async def listen() -> None:
        async for event in device.events():
            found.append(event.event_type)  # noqa: PERF401

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    device.faults.lose_device()
    await asyncio.sleep(0.01)
    await device.aclose()
    await asyncio.wait_for(task, patience(10))
    assert found == [EventType.DEVICE_FATAL]
    with pytest.raises(ClosedResourceError):
        device.events()


async def test_closing_a_device_right_after_listening() -> None:
    """No loop may poll the descriptor after it was closed: libuv aborts the process then."""
    async with open_device("soft0") as device:
        async with device.resource_domain() as domain, domain.completion_queue(64):
            device.faults.set_port(False)
            await asyncio.sleep(0.01)  # the queue's loop reads the event, which has no listener
        await asyncio.sleep(0.01)
        events = device.events()
        assert (await anext(events)).event_type is EventType.PORT_ERR
        device.faults.set_port(True)
    await asyncio.sleep(0.01)


@needs(Capability.FAULT_PLAN)
async def test_listeners_end_when_descriptors_run_out(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "too many")

    pump = EventPump.of(device.handle)
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", refuse)
        with pytest.raises(OSError, match="too many"):
            await anext(device.events())
        with pytest.raises(OSError, match="too many"):
            pump.watch(lambda _: None)
    device.faults.set_port(False)
    device.faults.lose_device()
    await asyncio.sleep(0.01)
    assert [event.event_type for event in await take_events(device.events(), 2)] == [
        EventType.PORT_ERR,
        EventType.DEVICE_FATAL,
    ], "events stay queued for a listener"


@pytest.mark.parametrize("loop_is", ["running", "stalled", "closed"])
async def test_loops_release_their_descriptors(loop_is: str) -> None:
    before = descriptors_at_first()
    device = await open_device("soft0").open()
    loop = asyncio.new_event_loop()
    listener = loop.create_task(listen_to_all(device))
    await asyncio.to_thread(loop.run_until_complete, asyncio.sleep(0.01))
    if loop_is == "closed":
        loop.close()
    thread = asyncio.to_thread(loop.run_until_complete, listener) if loop_is == "running" else asyncio.sleep(0)
    task = asyncio.create_task(thread)
    await asyncio.sleep(0.01)
    await device.aclose()
    await task
    if loop_is == "stalled":
        await asyncio.to_thread(loop.run_until_complete, listener)
    if loop_is != "closed":
        assert listener.result() == 0
        loop.close()
    del listener, task, thread
    collect_garbage()
    assert descriptors() == before


@needs(Capability.FAULT_PLAN)
async def test_a_listener_of_a_closed_loop_takes_no_events_from_others(device: Device) -> None:
    before = descriptors_at_first()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        listener = loop.create_task(listen_to_all(device))
        await asyncio.to_thread(loop.run_until_complete, asyncio.sleep(0))
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64),
    ):  # its loop reads events
        device.faults.set_port(False)
        await until(lambda: not select.select([device.handle.async_fd], [], [], 0)[0])
        others = device.events()
        assert [event.event_type for event in await take_events(others, 1)] == [EventType.PORT_ERR]
        await others.aclose()
    device.faults.set_port(True)
    assert not listener.done()
    assert descriptors() == before
    listener._log_destroy_pending = False  # type: ignore[attr-defined]


async def listen_to_all(device: Device) -> int:
    return len([event async for event in device.events()])


@needs(Capability.FAULT_PLAN)
async def test_a_device_is_lost_when_reading_events_fails(device: Device) -> None:
    events = device.events()
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        device.faults.fail("get_async_event", errno.EIO, times=0)
        device.faults.set_port(False)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiting, patience(10))
        async with asyncio.timeout(patience(10)), domain.queue_pair(cq) as qp, domain.register(8, WRITTEN) as region:
            qp.connect(qp.local_endpoint(), WRITTEN)
            with pytest.raises(BrokenResourceError, match="the device was lost"):
                await qp.write(region[:4], region.remote()[4:])
    device.faults.clear()


@needs(Capability.FAULT_PLAN)
async def test_a_delivered_event_does_not_block_closing(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        events = device.events()
        async with domain.queue_pair(cq) as qp:
            task = await start_listening(events)
            device.faults.break_queue_pair(qp.handle)
            assert (await task).resource is qp
        assert qp.closed
