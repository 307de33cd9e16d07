"""Concurrent closing: two closers, opening during closing, cancellation, and loops that ended."""

import asyncio
import errno
import threading
import time
import warnings

import anyio
import pytest

from aioverbs import BusyResourceError, MemoryRegion, Resource, ResourceState, VerbsError
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import run_on_owner
from aioverbs._verbs.completion_queue import dispatcher_of
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.holding import hold, unhold
from tests.manager.test_domains import OwnerThread
from tests.manager.test_write import REMOTE, Ends, ends
from tests.pace import patience
from tests.waiting import until


async def begin_write(device: Device, pair: Ends) -> None:
    """Start a write that stays in flight, and cancel the task that awaits it."""
    hold(device, pair.near)
    task = asyncio.create_task(pair.write(b"hello"))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert len(pair.source.pins) == 1


async def begin_closing(pair: Ends) -> "asyncio.Task[None]":
    """Start closing a queue pair whose work is held; the close waits for that work."""
    closing = asyncio.create_task(pair.near.aclose())
    await until(lambda: pair.near.state is ResourceState.CLOSING)
    return closing


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_the_second_closer_waits(device: Device) -> None:
    async with ends(device) as pair:
        await begin_write(device, pair)
        first = await begin_closing(pair)
        second = asyncio.create_task(pair.near.aclose())
        await asyncio.sleep(0.01)
        assert not second.done()
        unhold(device, pair.near)
        await second
        assert pair.near.closed
        await first


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_parent_waits_for_a_closing_child(device: Device, cancelled: bool) -> None:
    async with ends(device) as pair:
        await begin_write(device, pair)
        first = await begin_closing(pair)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            second = asyncio.create_task(pair.domain.aclose())
            await until(lambda: pair.far.closed)  # the parent closes `far` first, then waits for `near`
            for _ in range(2):
                if cancelled:
                    second.cancel()
                await asyncio.sleep(0.01)
            assert not second.done()
            unhold(device, pair.near)
            await asyncio.wait([second])
        assert second.cancelled() == cancelled
        if not cancelled:
            second.result()
        await first
        assert pair.domain.closed


@needs(Capability.FAULT_PLAN)
async def test_a_parent_cancelled_by_its_scope_waits_for_a_closing_child(device: Device) -> None:
    async with ends(device) as pair:
        await begin_write(device, pair)
        first = await begin_closing(pair)

        async def cancel() -> None:
            await until(lambda: pair.far.closed)  # as above
            scope.cancel()
            await asyncio.sleep(0.01)
            assert pair.domain.state is ResourceState.CLOSING
            unhold(device, pair.near)

        with warnings.catch_warnings(), anyio.CancelScope() as scope:
            warnings.simplefilter("ignore", ResourceWarning)
            cancelling = asyncio.create_task(cancel())
            await pair.domain.aclose()
        assert scope.cancelled_caught
        assert pair.domain.closed
        await cancelling
        await first


@pytest.mark.every_way
async def test_cancellation_while_opening_many_leaks_nothing(device: Device) -> None:
    """Cancel at each await of opening, use and closing in turn."""
    for turns in range(12):
        task = asyncio.create_task(resources_and_write(device))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert not any(count for _, count in device.statistics().objects), turns


async def resources_and_write(device: Device) -> None:
    async with ends(device) as pair:
        await pair.write(b"hello")


class SlowRegistration:
    """Blocks registration of memory until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
        register = MemoryRegion._open

        def slowly(region: MemoryRegion) -> None:
            self.entered.set()
            assert self.go_on.wait(10)
            register(region)

        monkeypatch.setattr(MemoryRegion, "_open", slowly)


async def test_a_parent_waits_for_an_opening_child(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRegistration(monkeypatch)
    pd = await device.protection_domain().open()
    region = pd.register(4096)
    opening = asyncio.create_task(region.open())
    await asyncio.to_thread(slow.entered.wait, 10)
    closing = asyncio.create_task(pd.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done()
    slow.go_on.set()
    with pytest.warns(ResourceWarning, match="MemoryRegion"):
        await closing
    await opening
    assert region.closed
    assert pd.closed


@pytest.mark.every_way
async def test_opening_cancelled_repeatedly_leaks_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRegistration(monkeypatch)
    async with device.protection_domain() as pd:
        region = pd.register(4096)
        opening = asyncio.create_task(region.open())
        await asyncio.to_thread(slow.entered.wait, 10)
        for _ in range(3):
            opening.cancel()
            await asyncio.sleep(0.01)
        slow.go_on.set()
        await asyncio.wait([opening])
        assert opening.cancelled()
        assert region.closed


async def test_a_cancellation_is_not_lost_in_a_warning(device: Device) -> None:
    domain = await device.resource_domain().open()
    cq = await domain.completion_queue(64).open()
    region = await domain.register(64).open()
    region.pins.add()  # closing waits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = asyncio.create_task(domain.aclose())
        async with asyncio.timeout(patience(5)):
            while region.state is not ResourceState.CLOSING:  # noqa: ASYNC110  (it waits for other resources before)
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert cq.closed
    assert region.state is domain.state is ResourceState.CLOSING
    region.pins.discard()
    await until(lambda: domain.closed)
    assert region.closed


@pytest.mark.parametrize("cancelled_by", ["native", "native, again", "anyio"])
async def test_a_parent_closes_after_its_memory_in_use(device: Device, cancelled_by: str) -> None:
    """The first closer can be cancelled; a later one waits for the end."""
    pd = await device.protection_domain().open()
    pool = await pd.buffer_pool(64, 1).open()
    region = await pd.register(64).open()
    (await pool.lease()).release()
    for each in (region, pool._free_list.slabs[0]):
        each.pins.add()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            if cancelled_by == "anyio":
                with anyio.move_on_after(0.01) as scope:
                    await pd.aclose()
                assert scope.cancelled_caught
            else:
                task = asyncio.create_task(pd.aclose())
                await asyncio.sleep(0.01)
                task.cancel()
                if cancelled_by == "native, again":
                    await asyncio.sleep(0)
                    task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
        assert pd.state is ResourceState.CLOSING
    region.pins.discard()
    await until(lambda: pool.state is ResourceState.CLOSING)
    assert region.closed
    second = asyncio.create_task(pd.aclose())
    await asyncio.sleep(0)
    pool._free_list.slabs[0].pins.discard()
    async with asyncio.timeout(patience(5)):
        await second
    assert pool.closed
    assert pd.closed


async def cancel_all() -> None:
    """Cancel all other tasks, as `asyncio.run` does at its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others)


@pytest.mark.parametrize("cancels", [False, True])
def test_closing_interrupted_by_the_end_of_its_loop_can_be_repeated(cancels: bool) -> None:
    async def leave() -> tuple[Device, Resource, MemoryRegion]:
        device = await open_device("soft0").open()
        pd = await device.protection_domain().open()
        region = await pd.register(64).open()
        region.pins.add()
        with anyio.move_on_after(0) as scope:
            await region.aclose()
        assert scope.cancelled_caught
        assert region.state is ResourceState.CLOSING
        return device, pd, region

    async def close() -> None:
        for each in (region, pd, device):
            await each.aclose()
            assert each.closed

    loop = asyncio.new_event_loop()
    device, pd, region = loop.run_until_complete(leave())
    if cancels:
        loop.run_until_complete(cancel_all())
        assert region.state is ResourceState.OPEN
    loop.close()
    region.pins.discard()
    asyncio.run(asyncio.wait_for(close(), patience(5)))


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("kind", ["native", "anyio"])
@pytest.mark.parametrize("whole", [False, True])
async def test_a_cancellation_is_not_lost_in_an_error(device: Device, kind: str, whole: bool) -> None:
    domain = await device.resource_domain().open()
    window = await domain.memory_window().open()
    event = asyncio.Event()

    async def wait() -> None:
        await event.wait()

    window._lifecycle.drain = wait
    closed = domain if whole else window
    raised: list[BaseException] = []

    async def close() -> None:
        try:
            await closed.aclose()
        except BaseException as error:
            raised.append(error)
            raise

    device.faults.fail("dealloc_mw", errno.EIO)
    if kind == "native":
        task = asyncio.create_task(close())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    else:
        with anyio.move_on_after(0.01) as scope:
            await close()
        assert scope.cancelled_caught
    (error,) = raised
    assert isinstance(error, asyncio.CancelledError)
    assert isinstance(error.__context__, VerbsError)
    assert error.__notes__ == [f"and closing {closed._lifecycle!r} failed: VerbsError: {error.__context__}"]
    assert window.state is domain.state is ResourceState.OPEN
    event.set()
    await window.aclose()
    await domain.aclose()


@needs(Capability.FAULT_PLAN)
async def test_a_warning_is_not_lost_in_an_error(device: Device) -> None:
    pd = await device.protection_domain().open()
    child = await pd.parent_domain().open()
    device.faults.fail("dealloc_pd", errno.EIO, first=2)  # the parent domain's own deallocation is the first call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(VerbsError, match="EIO") as caught:
            await pd.aclose()
    assert [note for note in caught.value.__notes__ if "a warning was raised as an exception: <ParentDomain" in note]
    assert child.closed
    await pd.aclose()


async def test_memory_is_closed_after_queues_that_use_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.05)
    pd = await device.protection_domain().open()
    cq = await pd.completion_queue(64).open()
    near, far = await pd.queue_pair(cq).open(), await pd.queue_pair(cq).open()
    near.connect(far.local_endpoint(), REMOTE)
    far.connect(near.local_endpoint(), REMOTE)
    source = await pd.register(64, REMOTE).open()
    hold(device, near)
    task = asyncio.create_task(near.write(source, source.remote()))
    await asyncio.sleep(0.01)
    task.cancel()
    async with asyncio.timeout(patience(5)):
        with pytest.warns(ResourceWarning) as caught:
            await pd.aclose()
    assert "MemoryRegion" in str(caught[-1].message)
    unhold(device, near)


@pytest.mark.every_way
async def test_a_queue_pair_of_a_closed_loop_with_work_in_flight_is_closed() -> None:
    device = await open_device("soft0").open()

    async def leave_open() -> None:
        domain = await device.resource_domain().open()
        source, target = await domain.register(4096, REMOTE).open(), await domain.register(4096, REMOTE).open()
        cq = await domain.completion_queue(64).open()
        near, far = await domain.queue_pair(cq).open(), await domain.queue_pair(cq).open()
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        opened.append(Ends(domain, cq, near, far, source, target))
        await begin_write(device, opened[0])

    opened: list[Ends] = []
    await asyncio.to_thread(asyncio.run, leave_open())
    async with asyncio.timeout(patience(5)):
        with pytest.warns(ResourceWarning):
            await device.aclose()
    assert handles.open_handles() == []


async def test_resources_of_a_closed_loop_can_be_closed_by_any_loop(device: Device) -> None:
    async def leave_open() -> None:
        domain = await device.resource_domain().open()
        opened.append(domain)
        opened.append(await domain.completion_queue(64).open())

    opened: list[Resource] = []
    await asyncio.to_thread(asyncio.run, leave_open())
    for resource in reversed(opened):
        await resource.aclose()
        assert resource.closed


@needs(Capability.FAULT_PLAN)
async def test_a_queue_pair_that_cannot_be_flushed_is_closed(device: Device) -> None:
    async with ends(device) as pair:
        await begin_write(device, pair)
        device.faults.fail("modify_qp", errno.EIO)
        await pair.near.aclose()
        assert pair.near.closed
        assert len(pair.source.pins) == 0
        unhold(device, pair.near)


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_writes_keep_their_memory_where_destroying_fails(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.05)
    async with ends(device) as pair:
        await begin_write(device, pair)
        device.faults.fail("destroy_qp", errno.EIO)
        with pytest.raises(OSError, match="EIO"):
            await pair.near.aclose()
        assert len(pair.source.pins) == 1
        await pair.near.aclose()
        assert len(pair.source.pins) == 0
        unhold(device, pair.near)


@pytest.mark.every_way
async def test_a_completion_queue_of_a_stalled_loop_is_busy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._verbs.completion_queue._UNWATCH_S", 0.05)
    pd = await device.protection_domain().open()
    loop = asyncio.new_event_loop()
    cq = pd.completion_queue(64)
    await asyncio.to_thread(loop.run_until_complete, cq.open())
    async with asyncio.timeout(patience(5)):
        with pytest.raises(BusyResourceError, match="does not respond"):
            await cq.aclose()
        assert cq.state is ResourceState.OPEN
        loop.close()
        await cq.aclose()
    await pd.aclose()


@pytest.mark.every_way
@pytest.mark.parametrize("waits_for_closing", [False, True])
async def test_a_completion_queue_of_a_blocked_loop_is_busy(
    device: Device, monkeypatch: pytest.MonkeyPatch, waits_for_closing: bool
) -> None:
    """The limit holds even if the loop that watches the queue waits for the thread that closes it."""
    monkeypatch.setattr("aioverbs._verbs.completion_queue._UNWATCH_S", 0.05)
    blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait(patience(10))
        blocked.clear()

    async with device.protection_domain() as pd:
        with OwnerThread() as elsewhere:
            cq = pd.completion_queue(64)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(cq.open(), elsewhere.loop))
            dispatcher = dispatcher_of(cq)
            elsewhere.loop.call_soon_threadsafe(block)
            await asyncio.to_thread(blocked.wait)
            ending = None if waits_for_closing else asyncio.get_running_loop().call_later(patience(2), go_on.set)
            with pytest.raises(BusyResourceError, match="does not respond"):
                await cq.aclose()
            assert blocked.is_set(), "closing waited until the loop was no longer blocked"
            assert cq.state is ResourceState.OPEN
            go_on.set()
            if ending is not None:
                ending.cancel()
            await run_on_owner(elsewhere.owner, lambda: None)
            assert dispatcher.watched, "the call that was given up has run"
            await cq.aclose()
            assert not dispatcher.watched


@pytest.mark.every_way
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_close_still_removes_the_queue_from_its_loop(device: Device, times: int) -> None:
    async with device.protection_domain() as pd:
        with OwnerThread() as elsewhere:
            cq = pd.completion_queue(64)
            opened = asyncio.run_coroutine_threadsafe(cq.open(), elsewhere.loop)
            await asyncio.wrap_future(opened)
            descriptor = cq.handle.channel
            assert descriptor is not None
            fd = descriptor.fileno()
            elsewhere.loop.call_soon_threadsafe(time.sleep, 0.05)  # later callbacks run in one iteration
            task = asyncio.create_task(cq.aclose())
            for _ in range(times):
                await asyncio.sleep(0.01)
                task.cancel()
            await asyncio.wait([task], timeout=5)
            assert cq.closed

            async def removed() -> bool:
                return not asyncio.get_running_loop().remove_reader(fd)

            assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(removed(), elsewhere.loop))


@needs(Capability.FAULT_PLAN)
async def test_an_error_of_the_block_of_a_loop_domain_is_raised(device: Device) -> None:
    async def body() -> None:
        async with device.loop_domain():
            device.faults.fail("dealloc_td", errno.EIO)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for lifecycle in tuple(device._lifecycle.children.values()):
            await lifecycle.close()


@needs(Capability.OBJECT_COUNTS)
async def test_a_collected_queue_pair_is_closed_by_its_owner(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:

        async def open_and_drop() -> None:
            await domain.queue_pair(cq).open()

        with pytest.warns(ResourceWarning, match=r"QueuePair .* was still open: it was forgotten"):
            await open_and_drop()
        for _ in range(10):
            await asyncio.sleep(0)
        assert dict(device.statistics().objects)["qps"] == 0


async def test_registering_large_memory_needs_asyncio(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
    async with device.protection_domain() as pd:
        region = pd.register(64)

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="aioverbs needs an asyncio event loop"):
                region.open().send(None)

        await asyncio.to_thread(elsewhere)
        assert region.state is ResourceState.NEW
