"""Receives that several queue pairs share, on one completion queue and on several."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from aioverbs import (
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    CompletionQueue,
    Device,
    MessageModel,
    QpState,
    QueuePair,
    ResourceState,
    SharedReceiveQueue,
    ThreadModel,
    WcOpcode,
    WcStatus,
    WorkCompletionError,
)
from tests.capabilities import Capability, needs
from tests.core.children import in_child
from tests.data_path.ends import PEERS, Ends, ends
from tests.data_path.turns import polled_turns
from tests.pace import patience
from tests.statuses import accepted_statuses
from tests.waiting import until, wait_until

queue_counts = pytest.mark.parametrize("queues", [1, 3])


@asynccontextmanager
async def shared_receivers(
    device: Device, queues: int, model: MessageModel = MessageModel.DEFAULT
) -> AsyncIterator[tuple[Ends, SharedReceiveQueue, list[QueuePair], list[CompletionQueue]]]:
    """Open three queue pairs that each send to themselves, on `queues` completion queues."""
    async with ends(device, message_model=model) as pair, AsyncExitStack() as stack:
        opened = stack.enter_async_context
        srq = await opened(pair.domain.shared_receive_queue(8))
        cqs = [await opened(pair.domain.completion_queue(128)) for _ in range(queues)]
        qps = [await opened(pair.domain.queue_pair(cqs[n % queues], srq=srq)) for n in range(3)]
        for qp in qps:
            qp.connect(qp.local_endpoint(), PEERS, rnr_retry=0)
        yield pair, srq, qps, cqs


@queue_counts
@pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)
async def test_a_shared_receive_serves_the_next_message_of_any_queue_pair(
    device: Device, queues: int, model: MessageModel
) -> None:
    async with shared_receivers(device, queues, model) as (pair, srq, qps, cqs):
        receives = [srq.receive(pair.target[n : n + 1]) for n in range(12)]  # four wait for a slot
        assert (srq.statistics().in_flight, srq.statistics().queued) == (8, 4)
        for n in range(12):
            pair.source.buffer[0] = n + 1
            await qps[n % 3].send(pair.source[:1])
            received = await receives[n]
            assert (received.qp_num, received.byte_len, received.data[0]) == (qps[n % 3].qp_num, 1, n + 1)
        assert (srq.statistics().in_flight, srq.statistics().posted, srq.statistics().completed) == (0, 12, 12)
        assert [cq.statistics().in_flight for cq in cqs] == [0] * queues
        assert len(pair.target.pins) == 0


@queue_counts
async def test_queue_pairs_join_and_leave_a_shared_receive_queue(device: Device, queues: int) -> None:
    async with shared_receivers(device, queues) as (pair, srq, qps, cqs):
        receives = [srq.receive(pair.target[8 * n : 8 * n + 8]) for n in range(6)]
        reserved = [cq.statistics().reserved for cq in cqs]
        async with pair.domain.queue_pair(cqs[0], srq=srq) as added:
            added.connect(added.local_endpoint(), PEERS)
            await added.send(pair.source[:8])
            assert (await receives[0]).qp_num == added.qp_num
        assert [cq.statistics().reserved for cq in cqs] == reserved
        await qps[0].aclose()
        await qps[1].send(pair.source[:8])
        assert (await receives[1]).qp_num == qps[1].qp_num
        assert len(pair.target.pins) == 4
        await qps[1].aclose()
        await qps[2].aclose()
        assert [cq.statistics().in_flight for cq in cqs] == [0] * queues
        assert len(pair.target.pins) == 4, "receives belong to the shared queue, which is open"
        await srq.aclose()
        assert len(pair.target.pins) == 0
        with pytest.raises(WorkCompletionError) as caught:
            receives[5].result()
        assert caught.value.status is WcStatus.WR_FLUSH_ERR
        with pytest.raises(ClosedResourceError):
            _ = srq.receive(pair.target[:8])


async def test_a_reset_loses_no_message_that_took_a_shared_receive(device: Device) -> None:
    async with (
        shared_receivers(device, 1) as (pair, srq, qps, _),
        pair.domain.completion_queue(64) as cq,
        pair.domain.queue_pair(cq) as sender,
    ):
        qps[0].to_reset()
        sender.connect(qps[0].local_endpoint(), PEERS)
        qps[0].connect(sender.local_endpoint(), PEERS)
        receives = [srq.receive(pair.target[n : n + 1]) for n in range(2)]
        pair.source.buffer[0] = 7
        wait_until(sender.send(pair.source[:1]).done)  # polls the sender's completion queue alone
        qps[0].to_reset()
        received = await asyncio.wait_for(receives[0], patience(10))
        assert (received.qp_num, received.data[0]) == (qps[0].qp_num, 7)
        assert (srq.statistics().in_flight, len(pair.target.pins), qps[0].qp_state) == (1, 1, QpState.RESET)
        qps[0].to_reset()
        await qps[1].send(pair.source[:1])  # others go on
        assert (await receives[1]).qp_num == qps[1].qp_num


@queue_counts
async def test_a_shared_receive_that_is_too_small_breaks_one_queue_pair(device: Device, queues: int) -> None:
    async with shared_receivers(device, queues) as (pair, srq, qps, _):
        receive, second = srq.receive(pair.target[:7]), srq.receive(pair.target[:8])
        with pytest.raises(WorkCompletionError) as refused:
            await qps[1].send(pair.source[:8])
        assert refused.value.status in accepted_statuses(device, WcStatus.REM_INV_REQ_ERR)
        with pytest.raises(WorkCompletionError) as caught:
            await receive
        error = caught.value
        assert error.status in accepted_statuses(device, WcStatus.LOC_LEN_ERR)
        assert (error.opcode, error.qp_num) == (WcOpcode.RECV, qps[1].qp_num)
        await qps[2].send(pair.source[:8])  # others go on
        assert (await second).qp_num == qps[2].qp_num


async def test_queue_pairs_with_a_shared_queue_have_no_receives_of_their_own(device: Device) -> None:
    async with shared_receivers(device, 1) as (pair, srq, qps, cqs):
        with pytest.raises(ValueError, match="has no receive queue of its own"):
            _ = qps[0].receive(pair.target[:8])
        with pytest.raises(ValueError, match="a receive queue of its own"):
            pair.domain.queue_pair(cqs[0], srq=srq, receive_depth=4, receive_size=8)
        with pytest.raises(WorkCompletionError, match="RNR_RETRY_EXC_ERR"):
            await qps[0].send(pair.source[:8])


@pytest.mark.every_way
async def test_a_pool_may_be_closed_before_the_queue_that_it_fills(device: Device) -> None:
    """Close the pool before the queue, as one `async with` does: the pool ends silently with the queue's receives."""
    async with ends(device) as pair:
        async with (
            pair.domain.shared_receive_queue(8) as srq,
            pair.domain.completion_queue(128) as cq,
            pair.domain.buffer_pool(64, 12) as pool,
            pair.domain.queue_pair(cq, srq=srq) as qp,
            srq.messages(pool) as messages,
        ):
            qp.connect(qp.local_endpoint(), PEERS)
            pair.source.buffer[:2] = b"ok"
            await qp.send(pair.source[:2])
            with await anext(messages) as message:
                assert bytes(message.data) == b"ok"
            await qp.send(pair.source[:8])  # not consumed
            await until(lambda: srq.statistics().completed == 2)
            region = pool._free_list.slabs[0]
        await until(lambda: pool.closed)
        assert region.closed
        assert len(region.pins) == 0


@pytest.mark.every_way
async def test_messages_that_arrive_after_the_iterator_closed_are_discarded(device: Device) -> None:
    async with (
        ends(device) as pair,
        pair.domain.buffer_pool(64, 8) as pool,
        pair.domain.shared_receive_queue(8) as srq,
        pair.domain.completion_queue(128) as cq,
        pair.domain.queue_pair(cq, srq=srq) as qp,
    ):
        qp.connect(qp.local_endpoint(), PEERS)
        async with srq.messages(pool) as messages:
            pass
        assert (pool.statistics().under_dma, pool.statistics().free) == (8, 0)
        await qp.send(pair.source[:8])
        await until(lambda: pool.statistics().free == 1)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)


@pytest.mark.every_way
@pytest.mark.parametrize(("depth", "low"), [(1, None), (1, 1), (2, 2), (3, 1)])
async def test_messages_of_a_queue_are_refilled_from_any_limit(device: Device, depth: int, low: int | None) -> None:
    async with (
        ends(device) as pair,
        pair.domain.buffer_pool(64, depth) as pool,
        pair.domain.shared_receive_queue(depth) as srq,
        pair.domain.completion_queue(128) as cq,
        pair.domain.queue_pair(cq, srq=srq) as qp,
        asyncio.timeout(patience(60)),
    ):
        qp.connect(qp.local_endpoint(), PEERS, rnr_retry=7, min_rnr_timer=1)
        async with srq.messages(pool, low) as messages:
            for number in range(20):
                pair.source.buffer[0] = number
                await qp.send(pair.source[:1])
                with await anext(messages) as message:
                    assert bytes(message.data) == bytes([number])


@pytest.mark.parametrize("limit", [-1, 1 << 32])
async def test_an_impossible_limit_is_refused(device: Device, limit: int) -> None:
    async with device.resource_domain() as domain:
        with pytest.raises(ValueError, match=rf"`limit` must be (0 or more|at most .*) for {device.name}, got"):
            await domain.shared_receive_queue(8, limit=limit).open()


async def test_a_pool_that_cannot_fill_the_queue_is_refused(device: Device) -> None:
    async with (
        ends(device) as pair,
        pair.domain.buffer_pool(64, 2, limit=3) as pool,
        pair.domain.shared_receive_queue(4) as srq,
        asyncio.timeout(patience(20)),
    ):
        with pytest.raises(ValueError, match=r"at most 3 buffers, .* the 4 free receives .* `limit` of at least 4"):
            await srq.messages(pool).__aenter__()
        assert pool.statistics().leased == 0


async def test_shutdown_of_asyncgens_does_not_interrupt_leaving_messages(device: Device) -> None:
    """`shutdown_asyncgens` runs while leaving the block is suspended."""
    errors: list[object] = []

    async def elsewhere() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        async with (
            device.resource_domain() as domain,
            domain.buffer_pool(64, 4) as pool,
            domain.shared_receive_queue(4) as srq,
        ):
            block = srq.messages(pool)
            await block.__aenter__()
            leaving = asyncio.ensure_future(block.__aexit__(None, None, None))
            await asyncio.sleep(0)
            assert not leaving.done()
            await loop.shutdown_asyncgens()
            await leaving
            assert pool.statistics().under_dma == 4, "the block has ended"

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert errors == []


@pytest.mark.every_way
async def test_a_pool_with_receives_in_leased_buffers_is_not_closed(device: Device) -> None:
    async with ends(device) as pair:
        pool = await pair.domain.buffer_pool(64, 2).open()
        buffer = await pool.lease()
        async with pair.domain.shared_receive_queue(8) as srq:
            receive = srq.receive(buffer)
            with pytest.raises(BusyResourceError, match=r"1 receives are posted in buffers of .* were not released"):
                await pool.aclose()
            (await pool.lease()).release()  # the pool is still usable
            buffer.release()
            await pool.aclose()
            assert pool.state is ResourceState.CLOSING
            with pytest.raises(ClosedResourceError):
                await pool.lease()
            assert not receive.done()
        await until(lambda: pool.closed)


def ends_at_once(awaited: Coroutine[object, object, None]) -> bool:
    """Return whether a coroutine ends in its first step."""
    try:
        awaited.send(None)
    except StopIteration:
        return True
    return False


async def test_a_pool_is_not_closed_without_a_loop_for_its_background_task(device: Device) -> None:
    async with device.resource_domain(thread_model=ThreadModel.SAFE) as domain:
        pool = await domain.buffer_pool(64, 1).open()
        async with domain.shared_receive_queue(8) as srq:
            with await pool.lease() as buffer:
                receive = srq.receive(buffer)
            with pytest.raises(RuntimeError, match="no asyncio event loop is running"):
                await asyncio.to_thread(pool.aclose().send, None)
            assert in_child(lambda: ends_at_once(pool.aclose()))  # the pool is the parent's: nothing is done
            states = [pool.state]
            await pool.aclose()
            states.append(pool.state)
            assert states == [ResourceState.OPEN, ResourceState.CLOSING]
            assert not receive.done()
        await until(lambda: pool.closed)


# ---- Waking the waiters


@pytest.mark.every_way
async def test_receives_posted_before_the_queue_pair_exists_are_woken(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64) as another,
        domain.register(64, PEERS) as memory,
        domain.shared_receive_queue(8) as srq,
    ):
        receives = [asyncio.create_task(srq.receive(memory[:8])) for _ in range(2)]
        await asyncio.sleep(0)
        async with domain.queue_pair(another) as near, domain.queue_pair(cq, srq=srq) as far:
            near.connect(far.local_endpoint(), PEERS)
            far.connect(near.local_endpoint(), PEERS)
            await near.send(memory[8:16])
            async with asyncio.timeout(patience(5)):
                await receives[0]
            await near.send(memory[8:16])
            async with asyncio.timeout(patience(5)):
                await receives[1]


@pytest.mark.every_way
async def test_a_shared_receive_queue_counts_each_completion_queue_once(device: Device) -> None:
    async with (
        device.resource_domain(message_model=MessageModel.FORCE_LOW_LATENCY) as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, PEERS) as memory,
        domain.shared_receive_queue(8) as srq,
    ):
        task = asyncio.create_task(srq.receive(memory[:8]))
        await asyncio.sleep(0)
        async with domain.queue_pair(cq, srq=srq) as near:
            assert cq.statistics().in_flight == 1
            async with domain.queue_pair(cq, srq=srq) as far:
                more = srq.receive(memory[:8])
                assert cq.statistics().in_flight == 2
                near.connect(far.local_endpoint(), PEERS)
                far.connect(near.local_endpoint(), PEERS)
                await near.send(memory[8:16])
                async with asyncio.timeout(patience(5)):
                    await task
                assert cq.statistics().in_flight == 1
            assert cq.statistics().in_flight == 1
            assert not more.done()
            await polled_turns(cq)  # polling stops
            assert await polled_turns(cq) == 0, "polled without an awaiter"
        assert cq.statistics().in_flight == 0


@pytest.mark.every_way
async def test_a_received_message_survives_closing_its_queue_pair(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64) as another,
        domain.register(64, PEERS) as memory,
        domain.shared_receive_queue(8) as srq,
        domain.queue_pair(another) as near,
    ):
        receive = asyncio.create_task(srq.receive(memory[:8]))
        async with domain.queue_pair(cq, srq=srq) as far:
            near.connect(far.local_endpoint(), PEERS)
            far.connect(near.local_endpoint(), PEERS)
            await asyncio.sleep(0)
            send = near.send(memory[8:16])
            while not send.done():
                pass
        async with asyncio.timeout(patience(2)):
            await receive
        assert srq.statistics().in_flight == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_receives_of_a_shared_queue_fail_when_the_device_is_lost(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, PEERS) as memory,
        domain.shared_receive_queue(8) as srq,
        domain.queue_pair(cq, srq=srq),
    ):
        receive = asyncio.create_task(srq.receive(memory[:8]))
        await asyncio.sleep(0)
        device.faults.lose_device()
        with pytest.raises(BrokenResourceError):
            async with asyncio.timeout(patience(5)):
                await receive
