"""Wakeups of completion queues: many completions, concurrent threads, failed queues."""

import asyncio
import contextlib
import errno
import itertools
import select
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    BrokenResourceError,
    ConcurrentAccessError,
    EventType,
    QpCapabilities,
    SendFlags,
    SendOpcode,
    ThreadModel,
    VerbsError,
)
from aioverbs._core.data_path.data_path import CqDispatcher
from aioverbs._core.handles import handles
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, needs
from tests.core.pairs import connect
from tests.holding import hold, unhold
from tests.manager.held_verbs import StayingAllocator, thread_inside
from tests.manager.test_write import REMOTE, connected, ends, pair_on
from tests.pace import patience
from tests.raw_verbs import post_send
from tests.waiting import until, wait_until

TURN = 256  # completions polled in one iteration of the loop


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_an_idle_loop_is_woken(device: Device) -> None:
    async with ends(device) as pair, asyncio.timeout(patience(10)):
        faults = device.faults
        hold(device, pair.near)
        faults.count_calls()
        write = asyncio.create_task(pair.write(b"hello"))
        await until(lambda: faults.calls("req_notify_cq"))
        assert pair.cq.statistics().wakeups == 0
        await asyncio.to_thread(faults.unhold)
        await write
        assert pair.cq.statistics().wakeups == 1


async def test_more_completions_than_one_turn_takes(device: Device) -> None:
    """Other callbacks run between two batches of completions."""
    many = 2 * TURN + 88
    async with (
        ends(device, capabilities=QpCapabilities(max_send_wr=many, max_recv_wr=1)) as pair,
        asyncio.timeout(patience(10)),
    ):
        hold(device, pair.near)
        pair.source.buffer[:many] = bytes(each % 251 for each in range(many))
        writes = [
            pair.near.write(pair.source[each : each + 1], pair.target.remote()[each:][:1]) for each in range(many)
        ]
        await asyncio.sleep(0.01)
        unhold(device, pair.near)
        seen = [0]
        while seen[-1] < many:
            await asyncio.sleep(0)
            seen.append(pair.cq.statistics().completions)
        assert max(after - before for before, after in itertools.pairwise(seen)) <= TURN
        assert all(write.done() for write in writes)
        assert pair.target.buffer[:many] == pair.source.buffer[:many]


@pytest.mark.every_way
async def test_an_overflow_fails_all_waiters(device: Device) -> None:
    """Posting through raw handles, since public queue pairs reserve their space in the queue."""
    async with ends(device) as pair, asyncio.timeout(patience(10)):
        cq, pd = pair.cq.handle, pair.domain.handle
        many = QpCapabilities(max_send_wr=2 * cq.cqe)
        near, far = (handles.QueuePair(pd, cq, cq, each, affinity=pair.domain.owner) for each in (many, None))
        connect(near, far)
        hold(device, pair.near)
        write = asyncio.create_task(pair.write(b"hello"))
        await asyncio.sleep(0.01)
        target = pair.target.remote()
        for _ in range(2 * cq.cqe):
            post_send(
                near,
                SendOpcode.RDMA_WRITE,
                [pair.source[:1].sge],
                flags=SendFlags.SIGNALED,
                remote_addr=target.address,
                rkey=target.rkey,
            )
        # No await before the overflow: the loop would poll completions and make space.
        assert select.select([device.handle.async_fd], [], [], patience(10))[0]
        unhold(device, pair.near)
        async with contextlib.aclosing(pair.cq.events()) as events:
            assert (await anext(events)).event_type is EventType.CQ_ERR
        await asyncio.wait([write])
        for _ in range(2):
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await pair.write(b"more")
        assert pair.cq.statistics().in_flight == len(pair.source.pins) == 0
        for qp in (near, far):
            qp.destroy()


@needs(Capability.FAULT_PLAN)
async def test_a_failed_queue_fails_waiters_for_space(device: Device) -> None:
    async with (
        ends(device, capabilities=QpCapabilities(max_send_wr=2, max_recv_wr=1)) as pair,
        asyncio.timeout(patience(10)),
    ):
        hold(device, pair.near)
        writes = [asyncio.create_task(pair.write(b"x", each)) for each in range(5)]
        await asyncio.sleep(0.01)
        assert pair.near.statistics().sends.queued == 3
        device.faults.break_completion_queue(pair.cq.handle)
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(result) for result in results] == [BrokenResourceError] * 5
        assert pair.cq.statistics().in_flight == pair.near.statistics().sends.queued == len(pair.source.pins) == 0
        unhold(device, pair.near)


@pytest.mark.every_way
async def test_a_queue_of_a_closed_loop_refuses_work(device: Device) -> None:
    async with device.protection_domain() as pd, pd.register(64, REMOTE) as region:
        cq = pd.completion_queue(64)
        await asyncio.to_thread(asyncio.run, cq.open())
        async with connected(pd, cq) as (near, _):
            with pytest.raises(BrokenResourceError, match="no loop watches it any longer"):
                await near.write(region, region.remote())
            with pytest.raises(BrokenResourceError, match="no loop watches it any longer"):
                await near.receive(region)
            assert len(region.pins) == 0
        await cq.aclose()


@pytest.mark.every_way
async def test_work_posted_before_its_loop_closed_is_polled_but_not_awaited(device: Device) -> None:
    async with device.protection_domain() as pd, pd.register(64, REMOTE) as region, asyncio.timeout(patience(10)):
        loop = asyncio.new_event_loop()
        cq = pd.completion_queue(64)
        await asyncio.to_thread(loop.run_until_complete, cq.open())
        async with connected(pd, cq) as (near, _):
            hold(device, near)
            first, second = (near.write(region[:8], region.remote()[8:16]) for _ in range(2))
            loop.close()
            with pytest.raises(BrokenResourceError, match="no loop watches it any longer"):
                await first
            unhold(device, near)
            await asyncio.to_thread(wait_until, second.done)
            await second
            assert len(region.pins) == 0
        await cq.aclose()


@needs(Capability.FAULT_PLAN)
async def test_a_queue_that_failed_to_close_refuses_work(device: Device) -> None:
    async with device.protection_domain() as pd, pd.register(64, REMOTE) as region:
        cq = await pd.completion_queue(64).open()
        device.faults.fail("destroy_cq", errno.EIO)
        with pytest.raises(VerbsError, match="EIO"):
            await cq.aclose()
        async with connected(pd, cq) as (near, _), asyncio.timeout(patience(5)):
            with pytest.raises(BrokenResourceError, match="no loop watches it any longer"):
                await near.write(region, region.remote())
        await cq.aclose()


@needs(Capability.FAULT_PLAN)
async def test_a_queue_being_closed_is_not_polled(device: Device) -> None:
    """A scheduled poll must not enter the queue while another thread destroys it."""
    faults = device.faults
    async with device.protection_domain() as pd, pd.register(64, REMOTE) as region:
        cq = await pd.completion_queue(64).open()
        async with connected(pd, cq) as (near, _):
            faults.count_calls()
            write = near.write(region[:8], region.remote()[8:16])  # schedules a poll
            cq._cq_dispatcher.let_go()
            for _ in range(5):
                await asyncio.sleep(0)
            assert faults.calls("poll_cq") == faults.calls("req_notify_cq") == 0
            faults.count_calls(False)
            await near.aclose()
            with pytest.raises(BrokenResourceError, match="was closed before this request completed"):
                await write
        await cq.aclose()


@needs(Capability.FAULT_PLAN)
async def test_a_failed_queue_does_not_affect_others(device: Device) -> None:
    async with ends(device) as pair, ends(device) as other, asyncio.timeout(patience(10)):
        hold(device, other.near)
        writing = asyncio.create_task(other.write(b"goes on"))
        await asyncio.sleep(0)
        device.faults.break_completion_queue(pair.cq.handle)
        async with contextlib.aclosing(pair.cq.events()) as events:
            assert (await anext(events)).event_type is EventType.CQ_ERR
        await asyncio.sleep(0.01)
        with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
            await pair.write(b"x")
        unhold(device, other.near)
        await writing
        assert bytes(other.target.buffer[:7]) == b"goes on"


@pytest.mark.every_way
@needs(Capability.PARENT_DOMAINS)
async def test_an_event_during_a_verb_of_another_thread_is_not_lost(device: Device) -> None:
    staying = StayingAllocator()
    async with (
        device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain,
        pair_on(domain) as pair,
        asyncio.timeout(patience(10)),
    ):
        assert domain.native
        hold(device, pair.near)
        write = asyncio.create_task(pair.write(b"hello"))
        await asyncio.sleep(0.01)
        async with thread_inside(domain, staying) as leave:
            unhold(device, pair.near)
            for _ in range(1000):
                await asyncio.sleep(0.002)
                if pair.cq.statistics().wakeups:
                    break
            assert pair.cq.statistics().wakeups
            assert not write.done()
            leave()
            await write
        assert bytes(pair.target.buffer[:5]) == b"hello"


class BusyDispatcher:
    """Dispatcher that refuses the first calls of `acknowledge`, as if another thread were inside a verb of the domain.

    :param dispatcher: dispatcher that has all other members.
    :param refused: function that is called in each refused call.
    """

    def __init__(self, dispatcher: CqDispatcher, refused: Callable[[], object]) -> None:
        self._dispatcher = dispatcher
        self._refused = refused
        self._refusals = 3
        self.acknowledged = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    def acknowledge(self) -> None:
        if self._refusals:
            self._refusals -= 1
            self._refused()
            raise ConcurrentAccessError("another thread")
        self._dispatcher.acknowledge()
        self.acknowledged = True


async def test_a_cancelled_close_acknowledges_events_before_the_queue_is_destroyed(device: Device) -> None:
    async with device.protection_domain() as pd:
        cq = await pd.completion_queue(8).open()
        drain: Any = cq._lifecycle.drain
        closing = asyncio.create_task(cq.aclose())
        busy = drain.__self__._dispatcher = BusyDispatcher(cq._cq_dispatcher, closing.cancel)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (cq.closed, busy.acknowledged) == (True, True)


@pytest.mark.every_way
@needs(Capability.PARENT_DOMAINS, Capability.FAULT_PLAN)
@pytest.mark.parametrize("lost", ["queue", "device"])
async def test_a_failure_during_a_verb_of_another_thread_is_not_lost(device: Device, lost: str) -> None:
    """After the loss of the device, no event of the queue has the loop poll again."""
    staying = StayingAllocator()
    async with (
        device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain,
        pair_on(domain) as pair,
        asyncio.timeout(patience(10)),
    ):
        hold(device, pair.near)
        write = asyncio.create_task(pair.write(b"hello"))
        await asyncio.sleep(0.01)
        async with thread_inside(domain, staying) as leave:
            if lost == "queue":
                device.faults.break_completion_queue(pair.cq.handle)
            else:
                device.faults.lose_device()
            await asyncio.sleep(0.05)
            assert not write.done()
            leave()
            with pytest.raises(BrokenResourceError, match="EIO" if lost == "queue" else "the device was lost"):
                await write


@needs(Capability.PARENT_DOMAINS)
async def test_a_verb_that_overlaps_another_thread_raises_and_can_be_retried(device: Device) -> None:
    staying = StayingAllocator()
    async with (
        device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain,
        pair_on(domain) as pair,
        asyncio.timeout(patience(10)),
    ):
        hold(device, pair.near)
        write = pair.near.write(pair.source[:5], pair.target.remote()[:5])
        async with thread_inside(domain, staying):
            with pytest.raises(ConcurrentAccessError, match="ibv_post_send"):
                await pair.write(b"other")
            for ask in (write.done, lambda: write.send(None)):
                with pytest.raises(ConcurrentAccessError, match="ibv_poll_cq"):
                    ask()
        unhold(device, pair.near)
        await write
        assert pair.near.statistics().sends.posted == 1
        assert len(pair.source.pins) == 0


@needs(Capability.FAULT_PLAN)
async def test_a_failed_post_does_not_leave_waiters(device: Device) -> None:
    faults = device.faults
    async with (
        ends(device, capabilities=QpCapabilities(max_send_wr=1, max_recv_wr=1)) as pair,
        asyncio.timeout(patience(5)),
    ):
        faults.fail("post_send", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ENOMEM"):
            await pair.write(b"hello")
        faults.hold()
        first, second, third = (asyncio.create_task(pair.write(b"hello")) for _ in range(3))
        await asyncio.sleep(0.01)
        faults.fail("post_send", errno.ENOMEM)  # for the second request, once there is space
        faults.unhold()
        await first
        with pytest.raises(VerbsError, match="ENOMEM"):
            await second
        await third
        assert len(pair.source.pins) == pair.cq.statistics().in_flight == 0
        await pair.near.aclose()


async def test_statistics_show_free_space(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(5) as cq:
        assert cq.statistics().depth == cq.handle.cqe > 5
        cq.resize(100)
        assert cq.statistics().depth == cq.handle.cqe >= 100
