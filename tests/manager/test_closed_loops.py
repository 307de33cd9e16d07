"""Closing that was started on a loop that is closed or does not run: another loop finishes it without hanging."""

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from aioverbs import BusyResourceError, MemoryRegion, Resource, ResourceDomain, ResourceState, ThreadModel
from aioverbs._lifecycle.affinity import wait_uncancelled
from aioverbs._verbs.device import Device, open_device
from tests.descriptors import descriptors, descriptors_at_first
from tests.garbage import collect_garbage
from tests.holding import hold
from tests.manager.test_write import REMOTE
from tests.pace import patience
from tests.waiting import until


@contextlib.contextmanager
def new_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


class HangingClose:
    """Close that does not end, because a write is held.

    :param left: True if the closing task is cancelled.
    """

    def __init__(self, what: str, left: bool = False) -> None:
        self.device = open_device("soft0", execution="thread")
        self._what = what
        self._left = left

    async def begin(self) -> None:
        await self.device.open()
        self.domain: ResourceDomain = await self.device.resource_domain(thread_model=ThreadModel.SAFE).open()
        self.region: MemoryRegion = await self.domain.register(64, REMOTE).open()
        cq = await self.domain.completion_queue(64).open()
        near, far = await self.domain.queue_pair(cq).open(), await self.domain.queue_pair(cq).open()
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        self._kept = cq, near, far
        hold(self.device, near)
        _ = near.write(self.region[:8], self.region.remote()[:8])
        closed: dict[str, Resource] = {"queue pair": near, "region": self.region, "domain": self.domain}
        self.closed = closed[self._what]
        self.closing = asyncio.create_task(self.closed.aclose())
        await until(lambda: self.closed.state is ResourceState.CLOSING)
        if self._left:
            self.closing.cancel()
            await asyncio.wait([self.closing])
            assert self.closed.state is ResourceState.CLOSING

    def drop_task(self) -> None:
        del self.closing
        collect_garbage()


async def check_ends(awaited: "asyncio.Task[Any]") -> None:
    """Check that a task ends successfully in time; a hanging task is not cancelled, because that may hang as well."""
    await asyncio.wait([awaited], timeout=patience(20))
    assert awaited.done()
    awaited.result()


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # about children closed by their parent
        yield


@pytest.mark.parametrize(
    ("what", "left"), [("queue pair", False), ("region", False), ("region", True), ("domain", False)]
)
def test_a_device_finishes_a_close_begun_on_a_closed_loop(what: str, left: bool) -> None:
    begun = HangingClose(what, left)
    with new_loop() as loop:
        loop.run_until_complete(begun.begin())
    begun.drop_task()
    with new_loop() as another:
        begun.device.faults.unhold()
        another.run_until_complete(check_ends(another.create_task(begun.device.aclose())))
    assert begun.closed.closed
    assert begun.device.closed


def test_a_device_finishes_a_close_begun_in_an_ended_thread() -> None:
    """The loop itself stays unclosed."""
    begun = HangingClose("region")
    with new_loop() as loop, new_loop() as another:
        thread = threading.Thread(target=loop.run_until_complete, args=[begun.begin()])
        thread.start()
        thread.join()
        begun.device.faults.unhold()
        another.run_until_complete(check_ends(another.create_task(begun.device.aclose())))
        assert begun.region.closed


@pytest.mark.parametrize("model", ThreadModel)
async def test_a_completion_queue_of_a_closed_loop_leaves_no_descriptor(device: Device, model: ThreadModel) -> None:
    async def make() -> ResourceDomain:
        domain = await device.resource_domain(thread_model=model).open()
        kept.append(await domain.completion_queue(64).open())
        return domain

    kept: list[Resource] = []
    before = descriptors_at_first()
    with new_loop() as loop:
        domain = await asyncio.to_thread(loop.run_until_complete, make())
    await domain.aclose()
    assert descriptors() == before
    assert kept[0].closed


@pytest.mark.parametrize("left", [False, True])
def test_a_waiting_closer_takes_over_when_the_other_loop_closes(left: bool) -> None:
    begun = HangingClose("region", left)

    async def wait() -> None:
        second = asyncio.create_task(begun.region.aclose())
        condition = begun.region._lifecycle.condition()
        await until(lambda: condition._waiting)
        assert not second.done()
        loop.close()
        begun.device.faults.unhold()
        await check_ends(asyncio.create_task(begun.device.aclose()))  # its completion queues are not watched any more
        await check_ends(second)
        assert begun.region.closed

    with new_loop() as loop, new_loop() as another:
        loop.run_until_complete(begun.begin())
        another.run_until_complete(wait())


def test_waiting_for_a_stalled_loop_can_be_cancelled() -> None:
    begun = HangingClose("queue pair")

    async def leave() -> None:
        second = asyncio.create_task(begun.domain.aclose())
        condition = begun.closed._lifecycle.condition()
        await until(lambda: condition._waiting)
        second.cancel()
        await asyncio.wait([second], timeout=patience(20))
        assert second.cancelled()
        loop.close()  # the close of the stalled loop is taken over now
        begun.device.faults.unhold()
        await check_ends(asyncio.create_task(begun.device.aclose()))
        assert begun.domain.closed

    with new_loop() as loop, new_loop() as another:
        loop.run_until_complete(begun.begin())
        another.run_until_complete(leave())


# ---- Failed closing with a cancelled closer


@pytest.mark.every_way
@pytest.mark.parametrize("whole", [False, True])
async def test_a_resource_that_cannot_be_drained_stays_open_after_a_cancellation(device: Device, whole: bool) -> None:
    """A note of the CancelledError reports the failure."""
    domain = await device.resource_domain().open()
    window = await domain.memory_window().open()
    answered, began = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        began.set()
        await answered.wait()
        raise BusyResourceError("no answer")

    def drain() -> Any:
        return wait_uncancelled(fail())

    window._lifecycle.drain = drain
    closed = domain if whole else window
    closing = asyncio.create_task(closed.aclose())
    await began.wait()
    closing.cancel()
    await asyncio.sleep(0)
    answered.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await closing
    assert any("BusyResourceError: no answer" in note for note in caught.value.__notes__)
    assert window.state is domain.state is ResourceState.OPEN
    window._lifecycle.drain = None
    await domain.aclose()
