"""A garbage-collected device is closed by its opener's loop, or by the next loop that opens a device."""

import asyncio
import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import Device, ResourceDomain, ResourceState, open_device
from aioverbs._core.handles import handles
from aioverbs._lifecycle import lifecycle
from aioverbs._lifecycle.affinity import run_on_owner
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._lifecycle.resource import lifecycle_of
from tests.conftest import LOOP_FACTORIES
from tests.garbage import collect_garbage
from tests.manager.test_domains import OwnerThread
from tests.pace import patience
from tests.waiting import until, wait_until


async def open_and_drop() -> None:
    """Open a device and two domains, and drop all references."""
    device = await open_device("soft0").open()
    await device.protection_domain().open()
    await device.resource_domain().open()
    del device
    collect_garbage()


async def all_closed() -> bool:
    """Return whether all handles are closed within a few seconds."""
    for _ in range(1000):
        if not handles.open_handles():
            return True
        await asyncio.sleep(0.005)
    return False


async def test_a_collected_device_is_closed_by_its_openers_loop() -> None:
    with pytest.warns(ResourceWarning, match="it was forgotten") as caught:
        await open_and_drop()
    classes = sorted(str(warning.message).split()[0] for warning in caught)
    assert classes == ["<Device", "<ProtectionDomain", "<ResourceDomain"]
    assert len(handles.open_handles()) == 5, "a finalizer calls no verb"
    assert await all_closed()


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_a_collected_device_of_a_closed_loop_is_closed_by_the_next_opener(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = factory()
    devices: list[Device] = [loop.run_until_complete(open_device("soft0").open())]
    loop.close()
    with pytest.warns(ResourceWarning, match="it was forgotten"):
        devices.clear()
    (left,) = handles.open_handles()
    with pytest.raises(RuntimeError, match="no running event loop"):
        lifecycle.reap()
    check_closed_by_the_next_opener(factory, left)


def check_closed_by_the_next_opener(factory: Callable[[], asyncio.AbstractEventLoop], *left: handles.Handle) -> None:
    """Check that handles are closed soon after another loop has opened a device."""

    async def main() -> None:
        async with open_device("soft0"):
            await until(lambda: all(handle.closed for handle in left))

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("waits", [False, True], ids=["before it begins", "while it waits for work"])
def test_a_loop_may_end_while_it_closes_a_collected_device(waits: bool) -> None:
    """The next loop that opens a device closes it."""
    loop = asyncio.SelectorEventLoop()
    kept: list[Any] = []

    async def open_device_and_region() -> None:
        device = await open_device("soft0").open()
        kept.extend([device, await (await device.protection_domain().open()).register(64).open()])

    loop.run_until_complete(open_device_and_region())
    pins = kept[1].pins
    if waits:
        pins.add()
    loop.call_soon(loop.stop)
    with pytest.warns(ResourceWarning, match="it was forgotten"):
        drop_all(kept)
    left = handles.open_handles()
    loop.run_forever()  # one turn: the task that closes the device is created, but does not begin
    if waits:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert not any(handle.closed for handle in left)
    if waits:
        pins.discard()
    check_closed_by_the_next_opener(asyncio.SelectorEventLoop, *left)


@pytest.mark.parametrize("by", ["reap", "stop_work"])
async def test_a_coroutine_of_a_closed_loop_may_be_closed_by_two_threads(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, go_on = threading.Event(), threading.Event()

    async def close() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closing.set()
            go_on.wait(patience(10))

    def begin() -> asyncio.Task[None]:
        loop = asyncio.new_event_loop()
        task = loop.create_task(close())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return task

    task = await asyncio.to_thread(begin)
    coroutine: Any = task.get_coro()
    other = asyncio.create_task(asyncio.to_thread(coroutine.close))
    await until(closing.is_set)
    try:
        if by == "reap":
            async with open_device("soft0") as device:
                monkeypatch.setitem(lifecycle._forgotten, lifecycle_of(device), task)
                lifecycle.reap()
                await until(lambda: device.closed)
        else:
            attempt = lifecycle._Closing(ResourceState.OPEN)
            attempt.work = coroutine
            attempt.stop_work()
    finally:
        go_on.set()
        await other
        task._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_a_collected_device_closes_after_domains_of_other_loops() -> None:
    with OwnerThread() as elsewhere:

        async def open_domain(device: Device) -> ResourceDomain:
            return await device.resource_domain().open()

        async def open_and_drop() -> None:
            device = await open_device("soft0").open()
            opening = asyncio.run_coroutine_threadsafe(open_domain(device), elsewhere.loop)
            domain = await asyncio.wrap_future(opening)
            await run_on_owner(elsewhere.owner, lambda: None)  # clears both loops' last references to it
            elsewhere.loop.call_soon_threadsafe(time.sleep, 0.05)
            del opening, device, domain
            collect_garbage()

        with pytest.warns(ResourceWarning, match="it was forgotten"):
            await open_and_drop()
        assert await all_closed()


async def test_a_domain_closes_on_another_loop_while_its_device_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other loop closes the domain just after this loop has found that it must wait for that."""
    closing = threading.Event()
    has_foreign_parts = Lifecycle.has_foreign_parts

    def delayed(device: Lifecycle) -> bool:
        found = has_foreign_parts(device)
        if found and threading.get_ident() == this_thread and not closing.is_set():
            closing.set()
            while has_foreign_parts(device):
                time.sleep(0.001)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), elsewhere.loop).result(30)
        return found

    async def open_domain(device: Device) -> ResourceDomain:
        return await device.resource_domain().open()

    async def open_and_drop() -> None:
        device = await open_device("soft0").open()
        domain = await run_on_owner(elsewhere.owner, open_domain, device)
        await run_on_owner(elsewhere.owner, lambda: None)
        elsewhere.loop.call_soon_threadsafe(closing.wait, 30)
        dropped = weakref.ref(device)
        del device, domain

        def is_collected() -> bool:
            collect_garbage()
            return dropped() is None

        wait_until(is_collected)  # the other thread may have it for a moment yet

    this_thread = threading.get_ident()
    monkeypatch.setattr(Lifecycle, "has_foreign_parts", delayed)
    with OwnerThread() as elsewhere:
        with pytest.warns(ResourceWarning, match="it was forgotten"):
            await open_and_drop()
        assert await all_closed()
        assert closing.is_set()


async def test_a_collected_device_that_fails_to_close_is_logged_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    devices = [await open_device("soft0").open()]
    pds = [await devices[0].protection_domain().open()]
    devices[0].faults.fail("dealloc_pd", errno.EIO)
    with caplog.at_level(logging.ERROR):
        with pytest.warns(ResourceWarning, match="it was forgotten"):
            drop_all(devices, pds)
        await until(lambda: "ibv_dealloc_pd failed: EIO" in caplog.text)
    assert len(handles.open_handles()) == 2
    async with open_device("soft0"):
        await asyncio.sleep(0)
    assert await all_closed()


def drop_all(*kept: list[Any]) -> None:
    for each in kept:
        each.clear()
    collect_garbage()
