"""Awaited RDMA writes: cancellation, errors, and wrong callers."""

import asyncio
import errno
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    BrokenResourceError,
    ClosedResourceError,
    DeviceRemovedError,
    EventType,
    MemoryRegion,
    ParentDomain,
    QpCapabilities,
    QpState,
    QpType,
    QueuePair,
    RemoteRegion,
    Resource,
    ResourceDomain,
    ThreadModel,
    VerbsError,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import wait_until

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
every_model = pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.name)


@dataclass
class Ends:
    """Two connected queue pairs on one completion queue, with memory."""

    domain: ResourceDomain
    cq: CompletionQueue
    near: QueuePair
    far: QueuePair
    source: MemoryRegion
    target: MemoryRegion

    async def write(self, data: bytes, offset: int = 0) -> None:
        self.source.buffer[offset : offset + len(data)] = data
        part = slice(offset, offset + len(data))
        await self.near.write(self.source[part], self.target.remote()[part])


@asynccontextmanager
async def connected(
    domain: Domain, cq: CompletionQueue, capabilities: QpCapabilities | None = None
) -> AsyncIterator[tuple[QueuePair, QueuePair]]:
    """Provide two queue pairs connected to each other."""
    async with (
        domain.queue_pair(cq, capabilities=capabilities) as near,
        domain.queue_pair(cq, capabilities=capabilities) as far,
    ):
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        yield near, far


@asynccontextmanager
async def pair_on(domain: ResourceDomain, capabilities: QpCapabilities | None = None) -> AsyncIterator[Ends]:
    wanted = capabilities or QpCapabilities()
    async with (
        domain.register(4096, REMOTE) as source,
        domain.register(4096, REMOTE) as target,
        domain.completion_queue(2 * (wanted.max_send_wr + wanted.max_recv_wr)) as cq,
        connected(domain, cq, capabilities) as (near, far),
    ):
        yield Ends(domain, cq, near, far, source, target)


@asynccontextmanager
async def ends(
    device: Device, model: ThreadModel = ThreadModel.SINGLE, capabilities: QpCapabilities | None = None
) -> AsyncIterator[Ends]:
    async with device.resource_domain(thread_model=model) as domain, pair_on(domain, capabilities) as pair:
        yield pair


@every_model
async def test_a_write_is_awaited(device: Device, model: ThreadModel) -> None:
    async with ends(device, model) as pair:
        await pair.write(b"hello")
        assert bytes(pair.target.buffer[:5]) == b"hello"
        await asyncio.gather(*(pair.write(bytes([each]) * 16, each * 16) for each in range(16)))
        assert bytes(pair.target.buffer[:256]) == b"".join(bytes([each]) * 16 for each in range(16))
        statistics = pair.cq.statistics()
        assert statistics.depth == pair.cq.handle.cqe >= 64
        assert (statistics.in_flight, statistics.completions) == (0, 17)
        sends = pair.near.statistics().sends
        assert (sends.depth, sends.posted, sends.completed, sends.bytes) == (16, 17, 17, 5 + 16 * 16)
        assert sends.failed == ()
        assert len(pair.source.pins) == 0
        assert pair.near.query().qp_state is QpState.RTS
    assert not any(count for _, count in device.statistics().objects)


async def test_queues_of_a_protection_domain_are_usable_from_any_loop(device: Device) -> None:
    async with (
        device.protection_domain() as pd,
        pd.register(64, REMOTE) as region,
        pd.completion_queue(64) as cq,
        pd.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=4)) as near,
        pd.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        assert near.owner is cq.owner is None
        assert near.capabilities.max_send_wr >= 4
        region.buffer[:2] = b"ok"

        async def elsewhere() -> None:
            await near.write(region[:2], region.remote()[32:34])

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert bytes(region.buffer[32:34]) == b"ok"


async def test_a_failed_write_is_an_error(device: Device) -> None:
    async with ends(device) as pair:
        bad = RemoteRegion(pair.target.address, 5, pair.target.rkey ^ 0x5500)
        with pytest.raises(WorkCompletionError) as caught:
            await pair.near.write(pair.source[:5], bad)
        assert caught.value.status is WcStatus.REM_ACCESS_ERR
        assert caught.value.qp_num == pair.near.qp_num
        assert pair.near.query().qp_state is QpState.ERR
        assert pair.near.statistics().sends.failed == ((WcStatus.REM_ACCESS_ERR, 1),)
        with pytest.raises(
            BrokenResourceError, match=r"is in state ERR, caused by: RDMA_WRITE .* REM_ACCESS_ERR"
        ) as broken:
            await pair.write(b"more")
        assert str(broken.value.__cause__) == str(caught.value)


async def test_wrong_arguments_are_refused_before_the_verb(device: Device) -> None:
    async with ends(device) as pair:
        with pytest.raises(ValueError, match="5 bytes of local memory do not match the 6"):
            await pair.near.write(pair.source[:5], pair.target.remote()[:6])
        with pytest.raises(IndexError):
            await pair.near.write(pair.source[:5], pair.target.remote()[4095:4100])
        with pytest.raises(ValueError, match="`depth` must be at least 1"):
            pair.domain.completion_queue(0)
        assert pair.near.query().qp_state is QpState.RTS
    with pytest.raises(ClosedResourceError):
        await pair.near.write(pair.source[:5], RemoteRegion(0, 5, 0))


@needs(Capability.FAULT_PLAN)
async def test_a_write_that_is_not_posted_leaks_nothing(device: Device) -> None:
    async with ends(device) as pair:
        device.faults.fail("post_send", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ENOMEM"):
            await pair.write(b"hello")
        assert pair.cq.statistics().in_flight == len(pair.source.pins) == 0
        await pair.write(b"hello")


@pytest.mark.parametrize("kind", ["native", "anyio"])
async def test_a_cancelled_write_continues_and_keeps_its_memory(device: Device, kind: str) -> None:
    async with ends(device) as pair:
        hold(device, pair.near)
        if kind == "anyio":
            with anyio.move_on_after(0.01) as scope:
                await pair.write(b"hello")
            assert scope.cancelled_caught
        else:
            task = asyncio.create_task(pair.write(b"hello"))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(pair.source.pins) == 1
        closing = asyncio.create_task(pair.source.aclose())
        await asyncio.sleep(0.02)
        assert not closing.done(), "closing waits for the write"
        unhold(device, pair.near)
        await closing
        assert len(pair.source.pins) == 0


def stop_answering(pair: Ends) -> None:
    """Reset the far end, so that requests of the near end get no answer and are retried for half a minute."""
    pair.far.to_reset()
    pair.near.to_reset()
    pair.near.connect(pair.far.local_endpoint(), timeout=20)


async def test_closing_the_queue_pair_flushes_its_writes(device: Device) -> None:
    async with ends(device) as pair:
        stop_answering(pair)
        writes = [asyncio.create_task(pair.write(b"x", each)) for each in range(3)]
        await asyncio.sleep(0.01)
        await pair.near.aclose()
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(result, WorkCompletionError) for result in results), results
        assert {result.status for result in results if isinstance(result, WorkCompletionError)} == {
            WcStatus.WR_FLUSH_ERR
        }


@needs(Capability.FAULT_PLAN)
async def test_writes_that_never_complete_end_with_their_queue_pair(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.05)
    async with ends(device) as pair:
        hold(device, pair.near)
        write = asyncio.create_task(pair.write(b"hello"))
        await asyncio.sleep(0.01)
        await pair.near.aclose()
        with pytest.raises(BrokenResourceError, match="was closed before this request completed"):
            await write
        unhold(device, pair.near)


@needs(Capability.FAULT_PLAN)
async def test_a_failed_completion_queue_fails_all_writes(device: Device) -> None:
    async with ends(device) as pair:
        hold(device, pair.near)
        writes = [asyncio.create_task(pair.write(b"x", each)) for each in range(3)]
        await asyncio.sleep(0.01)
        device.faults.break_completion_queue(pair.cq.handle)
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(result) for result in results] == [BrokenResourceError] * 3
        unhold(device, pair.near)


@needs(Capability.FAULT_PLAN)
@every_model
async def test_a_lost_device_ends_its_writes(device: Device, model: ThreadModel) -> None:
    async with open_device("soft0", execution="thread") as other, ends(other, model) as pair:
        stop_answering(pair)
        writes = [asyncio.create_task(pair.write(b"x", each)) for each in range(3)]
        await asyncio.sleep(0.01)
        other.faults.lose_device()
        results = await asyncio.wait_for(asyncio.gather(*writes, return_exceptions=True), patience(10))
        assert [type(result) for result in results] == [DeviceRemovedError] * 3
        assert "DEVICE_FATAL" in str(results[0])
        with pytest.raises(DeviceRemovedError, match="DEVICE_FATAL"):
            await pair.write(b"more")
        events = other.events()
        assert (await anext(events)).event_type is EventType.DEVICE_FATAL, "later listeners still receive it"


async def test_other_callers_cannot_write(device: Device) -> None:
    async with ends(device) as pair, pair.domain.completion_queue(64) as cq:

        async def wrong() -> None:
            with pytest.raises(AffinityError, match="ibv_post_send on <QueuePair"):
                await pair.near.write(pair.source[:5], pair.target.remote()[:5])
            with pytest.raises(AffinityError, match="ibv_query_qp"):
                pair.near.query()
            with pytest.raises(AffinityError, match="ibv_query_qp"):
                pair.near.connect(pair.far.local_endpoint())
            for resource in (pair.near, pair.cq, pair.domain):
                with pytest.raises(AffinityError, match="aclose on"):
                    await resource.aclose()
            for make in (
                lambda: pair.domain.completion_queue(64),
                lambda: pair.domain.queue_pair(cq),
            ):
                made: Resource = make()
                with pytest.raises(AffinityError):
                    await made.open()

        await asyncio.to_thread(asyncio.run, wrong())
        assert pair.cq.statistics().in_flight == len(pair.source.pins) == 0
        await pair.write(b"still")
        assert (await pair.domain.run(pair.near.query)).qp_state is QpState.RTS


@needs(Capability.FAULT_PLAN)
async def test_failure_of_any_verb_leaks_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = device.faults
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", lambda: 1)  # so that awaits sleep

    async def use() -> None:
        async with ends(device) as pair:
            # The write completes only after the queue is armed, with an event, whichever thread executes the request:
            # the sequence of verbs is the same each time.
            hold(device, pair.near)
            writing = asyncio.create_task(pair.write(b"hello"))
            for _ in range(2):  # one iteration to post, one to arm the queue
                await asyncio.sleep(0)
            unhold(device, pair.near)
            await writing

    faults.count_calls()
    await use()
    calls = faults.calls()
    faults.count_calls(False)
    assert calls > 25
    assert all(faults.calls(verb) for verb in ("req_notify_cq", "get_cq_event"))
    for k in range(1, calls + 1):
        before = len(faults.records())
        faults.fail(None, errno.EIO, first=k)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # parents close resources whose closing failed
            try:
                await use()
            except (VerbsError, BrokenResourceError):
                pass
            else:
                # Results of some verbs are cached, so that the k-th call did not happen.
                assert len(faults.records()) == before, k
            faults.clear()
            for lifecycle in reversed(tuple(device._lifecycle.children.values())):
                await lifecycle.close()
        assert not any(count for _, count in device.statistics().objects), k


async def test_resource_states(device: Device) -> None:
    async with device.resource_domain() as domain:
        cq = domain.completion_queue(64)
        qp = domain.queue_pair(cq)
        with pytest.raises(ClosedResourceError):
            await qp.open()
        assert (cq.state, qp.state) == (ResourceState.NEW, ResourceState.NEW)
        assert isinstance(domain.parent, ParentDomain)


@pytest.mark.parametrize("kind", [QpType.UC, QpType.RC], ids=lambda kind: kind.name)
async def test_queue_pair_types_that_write(device: Device, kind: QpType) -> None:
    async with (
        device.resource_domain() as domain,
        domain.register(64, REMOTE) as region,
        domain.completion_queue(64) as cq,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(cq, qp_type=kind, srq=srq) as near,
        domain.queue_pair(cq, qp_type=kind) as far,
    ):
        assert near.handle.srq is srq.handle
        assert near.owner is srq.owner is domain.owner
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        region.buffer[:2] = b"ok"
        await near.write(region[:2], region.remote()[8:10])
        wait_until(lambda: bytes(region.buffer[8:10]) == b"ok")  # an unreliable write completes when sent


async def test_datagrams_are_not_connected(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, qp_type=QpType.UD) as qp,
        domain.register(64) as region,
    ):
        with pytest.raises(ValueError, match="of type UD, which is connectionless"):
            qp.connect(qp.local_endpoint())
        with pytest.raises(ValueError, match="of type UD, which does not support RDMA_WRITE"):
            await qp.write(region, region.remote())
