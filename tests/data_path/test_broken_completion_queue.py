"""A completion queue that breaks: waiters are notified once the device can no longer write to their memory."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    BufferPool,
    CompletionQueue,
    Device,
    DeviceRemovedError,
    QpState,
    QueuePair,
    WorkCompletionError,
    WorkerPool,
)
from tests.capabilities import Capability, needs
from tests.waiting import until

SIZE = 64
OTHER_DATA = b"M" * SIZE


async def lease_again(pool: BufferPool, stack: contextlib.AsyncExitStack) -> bytearray | memoryview:
    """Lease the pool's only buffer, and fill it with other data."""
    buffer = (await stack.enter_async_context(pool.lease())).buffer
    buffer[:] = OTHER_DATA
    return buffer


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_a_receive_ends_when_its_completion_queue_breaks(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.register(SIZE) as source,
        domain.buffer_pool(SIZE, 1) as pool,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64) as other,
        domain.queue_pair(cq) as near,
        domain.queue_pair(other) as far,
        contextlib.AsyncExitStack() as stack,
    ):
        near.connect(far.local_endpoint())
        far.connect(near.local_endpoint(), timeout=8)
        async with pool.lease() as first:
            receive = near.receive(first)
            device.faults.break_completion_queue(cq.handle)
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await receive
        assert near.query().qp_state is QpState.RESET
        assert pool.statistics().under_dma == 0
        buffer = await lease_again(pool, stack)
        with pytest.raises(WorkCompletionError, match="RETRY_EXC_ERR"):
            await far.send(source)
        assert bytes(buffer) == OTHER_DATA


@contextlib.asynccontextmanager
async def unresettable(device: Device, number: int) -> AsyncIterator[tuple[QueuePair, BufferPool]]:
    """Open a queue pair in RTS whose completions are lost and which still holds the pool's only buffer."""
    async with (
        device.resource_domain() as domain,
        domain.buffer_pool(SIZE, 1) as pool,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64) as other,
        domain.queue_pair(cq, receive_depth=4, receive_size=SIZE) as near,
        domain.queue_pair(other) as far,
    ):
        near.connect(far.local_endpoint())
        far.connect(near.local_endpoint())
        async with pool.lease() as first:
            receive = asyncio.ensure_future(near.receive(first))
            await asyncio.sleep(0)  # the receive is awaited
            device.faults.fail("modify_qp", number, times=1)
            device.faults.break_completion_queue(cq.handle)
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await receive
        with pytest.raises(BrokenResourceError):
            await anext(near.messages())
        yield near, pool


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.ENOMEM], ids=errno.errorcode.get)
@needs(Capability.FAULT_PLAN)
async def test_memory_stays_pinned_while_a_queue_pair_cannot_be_reset(device: Device, number: int) -> None:
    """The queue pair keeps the memory until it is closed, whatever errno the verb returned."""
    async with unresettable(device, number) as (near, pool):
        assert near.query().qp_state is QpState.RTS
        assert pool.statistics().under_dma == 1
        await near.aclose()
        assert pool.statistics().under_dma == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_memory_is_unpinned_when_the_device_is_lost_as_well(device: Device) -> None:
    async with unresettable(device, errno.EIO) as (near, pool):
        assert pool.statistics().under_dma == 1
        device.faults.lose_device()
        await until(lambda: pool.statistics().under_dma == 0)
        assert not near.closed


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV], ids=errno.errorcode.get)
@needs(Capability.FAULT_PLAN)
async def test_memory_is_unpinned_whichever_error_the_lost_device_reports(device: Device, number: int) -> None:
    async with unresettable(device, errno.EIO) as (near, pool):
        assert pool.statistics().under_dma == 1
        device.faults.fail("modify_qp", number, times=1)
        assert near._send_cq is not None
        near._send_cq._cq_dispatcher.broke(DeviceRemovedError("removed"), gone=True)
        assert pool.statistics().under_dma == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_shared_receives_stay_pinned_while_a_queue_pair_cannot_be_reset(
    device: Device,
) -> None:
    async with (
        device.resource_domain() as domain,
        domain.buffer_pool(SIZE, 1) as pool,
        domain.completion_queue(64) as one,
        domain.completion_queue(64) as another,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(one, srq=srq) as at_one,
        domain.queue_pair(another, srq=srq) as at_another,
    ):
        at_one.connect(at_another.local_endpoint())
        at_another.connect(at_one.local_endpoint())
        async with pool.lease() as first:
            receive = asyncio.ensure_future(srq.receive(first))
            await asyncio.sleep(0)  # the receive is awaited
            device.faults.fail("modify_qp", errno.EIO, times=1)
            device.faults.break_completion_queue(one.handle)
            device.faults.break_completion_queue(another.handle)
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await receive
        assert {at_one.query().qp_state, at_another.query().qp_state} == {QpState.RTS, QpState.RESET}
        assert pool.statistics().under_dma == 1
        await (at_one if at_one.query().qp_state is QpState.RTS else at_another).aclose()
        assert pool.statistics().under_dma == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_shared_receives_go_on_with_another_queue_pair(device: Device) -> None:
    """Receives go on as long as one of the queue pairs can complete them."""
    async with (
        device.resource_domain() as domain,
        domain.register(SIZE) as source,
        domain.buffer_pool(SIZE, 1) as pool,
        domain.completion_queue(64) as one,
        domain.completion_queue(64) as another,
        domain.completion_queue(64) as other,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(one, srq=srq) as at_one,
        domain.queue_pair(another, srq=srq) as at_another,
        domain.queue_pair(other) as far,
        contextlib.AsyncExitStack() as stack,
    ):
        at_one.connect(far.local_endpoint())
        at_another.connect(far.local_endpoint())
        async with pool.lease() as first:
            receive = srq.receive(first)
            device.faults.break_completion_queue(one.handle)
            with pytest.raises(BrokenResourceError):
                await at_one.write(source, source.remote())
            assert at_one.query().qp_state is QpState.RESET
            assert not receive.done()
            assert len(first.pins) == 1
            device.faults.break_completion_queue(another.handle)
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await receive
        assert at_another.query().qp_state is QpState.RESET
        assert pool.statistics().under_dma == 0
        far.connect(at_another.local_endpoint(), timeout=8)
        buffer = await lease_again(pool, stack)
        with pytest.raises(WorkCompletionError, match="RETRY_EXC_ERR"):
            await far.send(source)
        assert bytes(buffer) == OTHER_DATA


@needs(Capability.FAULT_PLAN)
async def test_a_closed_queue_pair_does_not_keep_shared_receives_pinned(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.buffer_pool(SIZE, 1) as pool,
        domain.completion_queue(64) as sends,
        domain.completion_queue(64) as receives,
        domain.shared_receive_queue(4) as srq,
        domain.queue_pair(sends, receives, srq=srq),
    ):
        async with domain.queue_pair(sends, receives, srq=srq) as closed:
            closed.connect(closed.local_endpoint())
        async with pool.lease() as leased:
            receive = srq.receive(leased)
            device.faults.break_completion_queue(receives.handle)
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await receive
        assert pool.statistics().under_dma == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_receives_for_xrc_stay_pinned_until_their_queue_is_closed(device: Device) -> None:
    """Queue pairs of other processes, which cannot be reset from here, may take these receives."""
    async with (
        device.xrc_domain() as xrc_domain,
        device.resource_domain() as domain,
        domain.buffer_pool(SIZE, 1) as pool,
        domain.completion_queue(64) as cq,
        domain.shared_receive_queue(4, xrc_domain=xrc_domain, cq=cq) as srq,
    ):
        async with pool.lease() as first:
            receive = srq.receive(first)
            device.faults.break_completion_queue(cq.handle)
            with pytest.raises(BrokenResourceError, match=r"is broken: .*EIO"):
                await receive
        assert pool.statistics().under_dma == 1
        await srq.aclose()
        assert pool.statistics().under_dma == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_a_queue_pair_of_another_loop_is_reset_by_that_loop(device: Device) -> None:
    """The completion queue belongs to no loop, and one loop watches it; another loop owns the queue pair, and resets
    it.
    """
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE

    async def open_there() -> CompletionQueue:
        return await pd.completion_queue(64).open()

    async with (
        device.protection_domain() as pd,
        WorkerPool(device, 1, pd=pd) as workers,
        device.resource_domain(pd) as domain,
        pd.register(SIZE, access) as region,
        contextlib.aclosing(await workers.run(open_there)) as cq,
        domain.queue_pair(cq) as qp,
    ):
        qp.connect(qp.local_endpoint(), access)
        receive = qp.receive(region)
        device.faults.break_completion_queue(cq.handle)
        await until(lambda: qp.query().qp_state is QpState.RESET)  # without an await that would poll
        with pytest.raises(BrokenResourceError):
            await receive
        assert len(region.pins) == 0
