"""Completion queues wake whom they should: more than a turn, events that meet other threads, queues that break."""

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import BrokenResourceError, ConcurrentAccessError, QpCapabilities, ThreadModel, VerbsError
from aioverbs.completion import Work
from aioverbs.device import Device
from tests.manager.test_write import REMOTE, ends


async def test_more_than_a_turn(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs.completion._TURN", 4)
    async with ends(device) as pair, asyncio.timeout(10):
        device.handle.faults.hold()
        writes = [asyncio.create_task(pair.write(bytes([each]), each)) for each in range(16)]
        await asyncio.sleep(0.01)
        device.handle.faults.unhold()
        await asyncio.gather(*writes)
        assert pair.cq.statistics().completions == 16
        assert bytes(pair.target.buffer[:16]) == bytes(range(16))


async def test_a_queue_that_overflows_tells_everybody(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.register(4096, REMOTE) as region,
        domain.completion_queue(4) as cq,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=64)) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.address, REMOTE)
        far.connect(near.address, REMOTE)
        async with asyncio.timeout(10):
            # The loop does not come to look before all of them are done.
            device.handle.faults.hold()
            writes = [
                asyncio.create_task(near.write(region[each : each + 1], region.remote()[2048:2049]))
                for each in range(32)
            ]
            await asyncio.sleep(0.01)
            device.handle.faults.release(32)
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert {type(result) for result in results} == {type(None), BrokenResourceError}
            for _ in range(2):
                with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                    await near.write(region[:1], region.remote()[:1])
        assert cq.statistics().under_way == len(region.pins) == 0


async def test_a_queue_whose_loop_is_gone_takes_no_work(device: Device) -> None:
    async with device.protection_domain() as pd, pd.register(64, REMOTE) as region:
        cq = pd.completion_queue(8)
        await asyncio.to_thread(asyncio.run, cq.open())
        async with pd.queue_pair(cq) as near, pd.queue_pair(cq) as far:
            near.connect(far.address, REMOTE)
            far.connect(near.address, REMOTE)
            with pytest.raises(BrokenResourceError, match="no loop watches it any more"):
                await near.write(region, region.remote())
            assert len(region.pins) == 0
        await cq.aclose()


async def test_a_queue_that_could_not_be_closed_takes_no_work(device: Device) -> None:
    async with device.protection_domain() as pd, pd.register(64, REMOTE) as region:
        cq = await pd.completion_queue(8).open()
        device.handle.faults.fail("destroy_cq", errno.EIO)
        with pytest.raises(VerbsError, match="EIO"):
            await cq.aclose()
        async with pd.queue_pair(cq) as near, pd.queue_pair(cq) as far, asyncio.timeout(5):
            near.connect(far.address, REMOTE)
            far.connect(near.address, REMOTE)
            with pytest.raises(BrokenResourceError, match="no loop watches it any more"):
                await near.write(region, region.remote())
        await cq.aclose()


async def test_a_queue_that_was_let_go_of_is_not_looked_into(device: Device) -> None:
    """A further turn that was due comes while another thread closes the queue: it must not be inside then."""
    async with device.protection_domain() as pd:
        cq = await pd.completion_queue(8).open()
        meeting = Meeting(cq._handle, "request_notify")
        cq._handle = meeting  # type: ignore[assignment]
        await cq._stop()
        cq._readable()
        assert not meeting.met
        await cq.aclose()


class Meeting:
    """A handle whose method meets another thread once."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name, self.met = handle, name, 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == self._name and not self.met:
            self.met += 1
            return self._meet
        found: Callable[..., object] = getattr(self._handle, name)
        return found

    def _meet(self, *_: object) -> None:
        raise ConcurrentAccessError("another thread is inside")


@pytest.mark.parametrize("name", ["ack_events", "request_notify", "poll"])
async def test_an_event_that_meets_another_thread_is_not_lost(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with ends(device, ThreadModel.UNSAFE) as pair, asyncio.timeout(10):
        with monkeypatch.context() as patch:
            meeting = Meeting(pair.cq._handle, name)
            patch.setattr(pair.cq, "_handle", meeting)
            await pair.write(b"hello")
            assert meeting.met == 1


async def test_what_is_not_posted_keeps_nobody_waiting(device: Device) -> None:
    async with ends(device) as pair, asyncio.timeout(5):
        work = Work(pair.near, [pair.source[:]])
        pair.cq._add(work)
        settled = asyncio.create_task(pair.cq._settled(pair.near))
        await asyncio.sleep(0)
        assert not settled.done()
        pair.cq._withdraw(work)
        await settled


async def test_statistics_tell_what_fits(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(5) as cq:
        assert cq.statistics().depth == cq.handle.cqe > 5
