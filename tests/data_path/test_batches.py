"""Requests that are posted together: one doorbell, one completion, one await, and which of them failed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import (
    BrokenResourceError,
    Device,
    MessageModel,
    QpCapabilities,
    QpState,
    QpType,
    RemoteRegion,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._memory.region import RegionSlice, WaitableInFlightCount
from aioverbs.errors import BatchError, ClosedResourceError
from tests.capabilities import Capability, needs
from tests.data_path.ends import Ends, ends

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


def unknown_key(pair: Ends) -> RemoteRegion:
    return RemoteRegion(pair.target.address, 1, pair.target.rkey ^ 0x5500)


@every_model
async def test_a_batch_has_one_doorbell_and_one_completion(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        pair.source.buffer[:10] = b"0123456789"
        batch = pair.near.batch()
        elements = [batch.write(pair.source[n : n + 1], pair.target.remote()[9 - n : 10 - n]) for n in range(10)]
        assert len(batch) == 10
        assert len(pair.source.pins) == 0, "memory is pinned only by posting"
        assert not any(element.done() for element in elements)
        assert pair.near.statistics().sends.doorbells == pair.near.statistics().sends.posted == 0
        await batch.post()
        assert bytes(pair.target.buffer[:11]) == b"9876543210\0"
        statistics = pair.near.statistics().sends
        assert (statistics.doorbells, statistics.posted, statistics.completed, statistics.bytes) == (1, 10, 10, 10)
        assert pair.cq.statistics().completions == 1
        assert all(element.done() and element.result() is None for element in elements)
        assert pair.is_idle()


@pytest.mark.every_way
async def test_a_batch_accepts_all_kinds_of_requests(device: Device) -> None:
    async with ends(device) as pair:
        receives = [pair.receive(pair.target[512 + 8 * n : 520 + 8 * n]) for n in range(3)]
        pair.source.buffer[:8] = b"kind ..."
        remote = pair.target.remote()
        async with pair.near.batch() as batch:
            batch.write(pair.source[:8], remote[:8])
            batch.send(pair.source[:4])
            batch.send(pair.source[:4], immediate=1, solicited=True)
            batch.write_with_immediate(pair.source[:4], remote[64:68], 2, fence=True)
            added = [batch.fetch_and_add(remote[128:136], 3) for _ in range(3)]
            swapped = batch.compare_and_swap(remote[128:136], 9, 5)
            batch.read(pair.source[256:264], remote[:8])
            assert pair.near.statistics().sends.posted == 0
            with pytest.raises(asyncio.InvalidStateError):
                swapped.result()
        assert pair.cq.statistics().in_flight == 0
        assert [element.result() for element in (*added, swapped)] == [0, 3, 6, 9]
        assert int.from_bytes(pair.target.buffer[128:136], "little") == 5
        assert bytes(pair.source.buffer[256:264]) == b"kind ..."
        assert [(await receive).immediate for receive in receives] == [None, 1, 2]
        assert pair.is_idle()


@pytest.mark.every_way
async def test_a_batch_of_datagrams(device: Device) -> None:
    async with ends(device, QpType.UD) as pair:
        receives = [pair.receive(pair.target[8 * n : 8 * n + 8]) for n in range(3)]
        pair.source.buffer[:3] = b"abc"
        batch = pair.near.batch()
        for n in range(3):
            batch.send(pair.source[n : n + 1], **pair.addressing)
        await batch.post()
        assert [bytes((await receive).data) for receive in receives] == [b"a", b"b", b"c"]


@every_model
async def test_a_batch_reports_which_request_failed(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        pair.source.buffer[:8] = b"xxxxxxxx"
        remote = pair.target.remote()
        batch = pair.near.batch()
        elements = [
            batch.write(pair.source[:1], remote[:1]),
            batch.fetch_and_add(remote[64:72], 1),
            batch.write(pair.source[:1], unknown_key(pair)),
            batch.write(pair.source[:1], remote[1:2]),
            batch.fetch_and_add(remote[64:72], 1),
        ]
        with pytest.raises(BatchError, match=r"request 2 of 5 in a batch failed, and 2 others: RDMA_WRITE") as caught:
            await batch.post()
        error = caught.value
        assert (error.index, error.status, error.qp_num) == (2, WcStatus.REM_ACCESS_ERR, pair.near.qp_num)
        assert error.errors[:2] == (None, None)
        assert [each.status for each in error.errors[2:] if isinstance(each, WorkCompletionError)] == [
            WcStatus.REM_ACCESS_ERR,
            WcStatus.WR_FLUSH_ERR,
            WcStatus.WR_FLUSH_ERR,
        ]
        assert bytes(pair.target.buffer[:2]) == b"x\0", "a request behind the failure was executed"
        assert [element.result() for element in elements[:2]] == [None, 0]
        for element, status in zip(elements[2:], [WcStatus.REM_ACCESS_ERR] + 2 * [WcStatus.WR_FLUSH_ERR], strict=True):
            assert element.done()
            with pytest.raises(WorkCompletionError) as of_element:
                element.result()
            assert of_element.value.status is status
        assert pair.is_idle()
        with pytest.raises(BrokenResourceError, match="REM_ACCESS_ERR") as broken:
            _ = pair.near.send(None)
        assert broken.value.__cause__ is not None
        another = pair.near.batch()
        another.send(None)
        with pytest.raises(BrokenResourceError, match="REM_ACCESS_ERR"):
            _ = another.post()


@pytest.mark.every_way
async def test_a_batch_that_waits_behind_a_failure_is_flushed(device: Device) -> None:
    async with ends(device, capabilities=QpCapabilities(max_send_wr=4)) as pair:
        first, second = pair.near.batch(), pair.near.batch()
        first.write(pair.source[:1], unknown_key(pair))
        for _ in range(3):
            first.write(pair.source[:1], pair.target.remote()[:1])
            second.write(pair.source[:1], pair.target.remote()[:1])
        failed, waits = first.post(), second.post()
        with pytest.raises(BatchError) as caught:
            await failed
        assert caught.value.index == 0
        with pytest.raises(BatchError) as caught:
            await waits
        assert (caught.value.index, caught.value.status) == (0, WcStatus.WR_FLUSH_ERR)
        assert all(isinstance(each, WorkCompletionError) for each in caught.value.errors)
        assert pair.is_idle()


@pytest.mark.every_way
async def test_a_batch_reports_that_its_last_request_failed(device: Device) -> None:
    async with ends(device) as pair:
        batch = pair.near.batch()
        batch.write(pair.source[:1], pair.target.remote()[:1])
        batch.write(pair.source[:1], unknown_key(pair))
        with pytest.raises(BatchError) as caught:
            await batch.post()
        assert (caught.value.index, caught.value.errors[0]) == (1, None)


async def test_batches_that_are_too_large_or_empty_are_refused(device: Device) -> None:
    async with ends(device, capabilities=QpCapabilities(max_send_wr=4)) as pair:
        with pytest.raises(ValueError, match="the batch is empty"):
            _ = pair.near.batch().post()
        async with pair.near.batch():
            pass
        batch = pair.near.batch()
        for _ in range(5):
            batch.write(pair.source[:1], pair.target.remote()[:1])
        with pytest.raises(ValueError, match="5 requests exceed the 4 places"):
            _ = batch.post()
        assert len(pair.source.pins) == 0, "memory is pinned only by posting"
        del batch
        assert pair.is_idle()
        batch = pair.near.batch()
        for _ in range(1024):
            batch.send(None)
        with pytest.raises(ValueError, match="a batch takes at most 1024 requests"):
            batch.send(None)


async def test_a_batch_is_posted_once(device: Device) -> None:
    async with ends(device, capabilities=QpCapabilities(max_send_wr=4)) as pair:
        batch = pair.near.batch()
        batch.write(pair.source[:1], pair.target.remote()[:1])
        async with batch:
            await batch.post()  # the end of the block does not post again
        calls: list[Callable[[], object]] = [batch.post, batch.post_nowait, lambda: batch.send(None)]
        for call in calls:
            with pytest.raises(RuntimeError, match="was posted before: create a new batch"):
                call()
        assert pair.near.statistics().sends.posted == 1
        assert pair.is_idle()


async def test_parts_of_a_batch_are_not_awaited(device: Device) -> None:
    async with ends(device) as pair:
        batch = pair.near.batch()
        part: Any = batch.write(pair.source[:1], pair.target.remote()[:1])
        with pytest.raises(RuntimeError, match="is part of a batch"):
            await part
        await batch.post()
        with pytest.raises(RuntimeError, match="is part of a batch"):
            await part
        assert part.result() is None


async def test_a_block_that_fails_posts_nothing(device: Device) -> None:
    async with ends(device) as pair:

        async def fail() -> None:
            async with pair.near.batch() as batch:
                batch.write(pair.source[:1], pair.target.remote()[:1])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert pair.near.statistics().sends.posted == 0
        assert pair.is_idle()


@needs(Capability.FAULT_PLAN)
async def test_a_batch_refused_by_the_verb_can_be_posted_again(device: Device) -> None:
    async with ends(device) as pair:
        batch = pair.near.batch()
        batch.write(pair.source[:1], pair.target.remote()[:1])
        added = batch.fetch_and_add(pair.target.remote()[64:72], 1)
        device.faults.fail("post_send", 12)
        with pytest.raises(OSError, match="ENOMEM"):
            _ = batch.post()
        assert pair.cq.statistics().in_flight == 0
        await batch.post()
        assert added.result() == 0
        assert pair.is_idle()


async def test_a_batch_with_closed_memory_pins_nothing(device: Device) -> None:
    async with ends(device) as pair:
        batch = pair.near.batch()
        pins = WaitableInFlightCount()
        batch.write(RegionSlice(pair.source, 0, 1, pins), pair.target.remote()[:1])
        async with pair.domain.register(64) as region:
            batch.write(region[:1], pair.target.remote()[:1])
        with pytest.raises(ClosedResourceError):
            _ = batch.post()
        assert len(pins) == 0


async def test_a_batch_is_not_posted_to_a_closed_queue_pair(device: Device) -> None:
    async with ends(device) as pair:
        batch = pair.near.batch()
        batch.write(pair.source[:1], pair.target.remote()[:1])
        await pair.near.aclose()
        with pytest.raises(ClosedResourceError):
            _ = batch.post()
        del batch
        assert pair.is_idle()


@pytest.mark.every_way
async def test_a_batch_is_flushed_by_closing(device: Device) -> None:
    async with ends(device) as pair:
        pair.near.to_sqd()
        batch = pair.near.batch()
        parts = [batch.write(pair.source[:1], pair.target.remote()[:1]) for _ in range(3)]
        posted = batch.post()
        await pair.near.aclose()
        assert posted.done()
        with pytest.raises(BatchError) as caught:
            posted.result()
        assert [each.status for each in caught.value.errors if isinstance(each, WorkCompletionError)] == 3 * [
            WcStatus.WR_FLUSH_ERR
        ]
        assert all(part.done() for part in parts)
        assert pair.is_idle()


@pytest.mark.every_way
async def test_a_batch_is_flushed_by_the_error_state(device: Device) -> None:
    async with ends(device) as pair:
        pair.near.to_sqd()
        batch = pair.near.batch()
        batch.write(pair.source[:1], pair.target.remote()[:1])
        posted = batch.post()
        pair.near.to_error()
        with pytest.raises(BatchError) as caught:
            await posted
        assert caught.value.status is WcStatus.WR_FLUSH_ERR
        assert pair.near.query().qp_state is QpState.ERR
