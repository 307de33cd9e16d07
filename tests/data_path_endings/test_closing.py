"""A queue pair that is closed with work outstanding: its waiters are notified, and other queue pairs go on."""

import asyncio
import errno
import logging

import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    Device,
    MessageModel,
    QpCapabilities,
    SendOpcode,
    VerbsError,
    WcStatus,
    WorkCompletionError,
)
from tests.capabilities import Capability, needs
from tests.data_path_endings.pair import ACCESS, PATIENCE_S, Pair, pair_on, until
from tests.holding import hold
from tests.pace import patience
from tests.raw_verbs import post_send

SIGNALED = 2  # of enum ibv_send_flags
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


async def outcomes(*awaited: object) -> list[object]:
    gathered = asyncio.gather(*awaited, return_exceptions=True)  # type: ignore[call-overload]
    return list(await asyncio.wait_for(gathered, PATIENCE_S))


def flushed(results: list[object]) -> bool:
    return all(isinstance(each, WorkCompletionError) and each.status is WcStatus.WR_FLUSH_ERR for each in results)


async def stop_answering(pair: Pair) -> None:
    """Close far, so that requests of near are retransmitted without an answer."""
    await pair.far.aclose()


@needs(Capability.FAULT_PLAN)
@every_model
async def test_all_awaited_requests_are_flushed(device: Device, model: MessageModel) -> None:
    async with pair_on(device, model, sends=4) as pair:
        await stop_answering(pair)
        device.faults.lose_messages_at_random(1_000_000)
        posted = [pair.write(8 * each) for each in range(4)]
        queued = [pair.write(8 * each) for each in range(4, 8)]
        receives = [pair.near.receive(pair.target[:8]) for _ in range(2)]
        waiting = asyncio.create_task(outcomes(*posted, *queued, *receives))
        await asyncio.sleep(0)
        await asyncio.wait_for(pair.near.aclose(), patience(5))
        results = await waiting
        assert flushed(results), results
        assert len(pair.source.pins) == len(pair.target.pins) == pair.cq.statistics().in_flight == 0
        with pytest.raises(ClosedResourceError):
            _ = pair.write()
        assert pair.near.statistics().sends.queued == 0
        device.faults.lose_messages_at_random(0)


@pytest.mark.every_way
async def test_unawaited_requests_are_flushed(device: Device) -> None:
    async with pair_on(device, sends=2) as pair:
        await stop_answering(pair)
        number = pair.near.qp_num
        operations = [pair.write(8 * each) for each in range(4)]
        await asyncio.wait_for(pair.near.aclose(), patience(5))
        for each in operations:
            assert each.done()
            with pytest.raises(WorkCompletionError) as caught:
                each.result()
            assert caught.value.qp_num == number, "qp_num is lost after closing"
        assert len(pair.source.pins) == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_requests_not_flushed_in_time_end_on_close(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.02)
    async with pair_on(device, sends=2) as pair:
        pair.hold()
        waiting = asyncio.create_task(outcomes(*(pair.write(8 * each) for each in range(3))))
        await asyncio.sleep(0)
        with caplog.at_level(logging.WARNING, "aioverbs"):
            await asyncio.wait_for(pair.near.aclose(), patience(5))
        assert "2 work requests were not flushed within 20 ms" in caplog.text
        first, second, queued = await waiting
        assert isinstance(first, BrokenResourceError)
        assert isinstance(second, BrokenResourceError)
        assert flushed([queued])
        assert len(pair.source.pins) == 0
        pair.unhold()


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("refused", [False, True], ids=["chained", "refused"])
@pytest.mark.every_way
async def test_closing_before_a_chain_is_posted_leaves_others_alone(device: Device, refused: bool) -> None:
    async with (
        pair_on(device, MessageModel.HIGH_BANDWIDTH) as pair,
        pair.domain.queue_pair(pair.cq, capabilities=QpCapabilities(max_send_wr=128)) as near,
        pair.domain.queue_pair(pair.cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        source, remote = pair.source[:8], pair.target.remote()[:8]
        if refused:
            device.faults.fail("post_send", errno.ENOMEM)
        count = 70 if refused else 3  # at most 64 are posted together
        operations = [near.write(source, remote) for _ in range(count)]
        device.faults.fail("modify_qp", errno.EIO)  # so that the queue pair cannot be flushed, and is destroyed at once
        await near.aclose()
        device.faults.clear()
        assert all(each.done() for each in operations)
        posted, chained = (operations[:64], operations[64:]) if refused else ([], operations)
        results = await outcomes(*posted)
        assert [isinstance(each, VerbsError) for each in results[:1]] == [True] * refused
        assert all(each is None or isinstance(each, BrokenResourceError) for each in results[1:])
        assert flushed(await outcomes(*chained))
        await pair.check_idle()
        await outcomes(*(pair.write(8 * each) for each in range(100)))
        await pair.check_idle()


@needs(Capability.FAULT_PLAN)
@every_model
async def test_an_error_breaks_one_queue_pair_and_no_other(device: Device, model: MessageModel) -> None:
    async with (
        pair_on(device, model) as pair,
        pair.domain.queue_pair(pair.cq) as near,
        pair.domain.queue_pair(pair.cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        device.faults.fail_request(WcStatus.REM_ACCESS_ERR, near.handle, first=3)
        source, remote = pair.source[:8], pair.target.remote()[:8]
        results = await outcomes(*(near.write(source, remote) for _ in range(5)), pair.write())
        assert results[:2] == [None, None]
        assert isinstance(results[2], WorkCompletionError)
        assert results[2].status is WcStatus.REM_ACCESS_ERR
        assert flushed(results[3:5]) or all(isinstance(each, BrokenResourceError) for each in results[3:5])
        assert results[5] is None
        with pytest.raises(BrokenResourceError, match="REM_ACCESS_ERR"):
            await near.write(source, remote)
        await pair.check_idle()


@pytest.mark.every_way
async def test_messages_end_with_their_queue_pair(device: Device) -> None:
    async with pair_on(device, receive_depth=4, receive_size=8) as pair:
        await pair.near.send(pair.source[:8])
        received = []

        async def read() -> None:
            async for message in pair.far.messages():
                with message:
                    received.append(bytes(message.data))

        reading = asyncio.create_task(read())
        await until(lambda: received)
        await pair.far.aclose()
        await asyncio.wait_for(reading, patience(5))
        assert received == [bytes(8)]


# ---- Completions that arrive after the end of their request


FIRST = 1 << 32  # wr_id of the first request on a completion queue: generation 1, slot 0


@pytest.mark.parametrize("slot_reused", [False, True], ids=["slot-free", "slot-reused"])
@pytest.mark.every_way
async def test_a_late_completion_ends_no_request(device: Device, slot_reused: bool) -> None:
    async with pair_on(device) as pair:
        await pair.write()  # uses the first slot
        hold(device, pair.near)  # holds the next request in that slot, not the late completion
        waiting = asyncio.create_task(outcomes(*([pair.write(8)] if slot_reused else [])))
        await asyncio.sleep(0)
        post_send(
            pair.far.handle,
            SendOpcode.RDMA_WRITE,
            [pair.source[:8].sge],
            wr_id=FIRST,
            flags=SIGNALED,
            remote_addr=pair.target.address,
            rkey=pair.target.rkey,
        )
        if not slot_reused:
            await pair.far.write(pair.source[:0], pair.target.remote()[:0])  # polls the completion queue
        await until(lambda: pair.cq.statistics().late == 1)
        assert len(pair.source.pins) == pair.cq.statistics().in_flight == slot_reused
        assert not slot_reused or not waiting.done()
        pair.unhold()
        assert await waiting == [None] * slot_reused
        await pair.check_idle()
        assert pair.cq.statistics().late == 1


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_a_held_request_ends_when_its_queue_pair_is_destroyed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.01)
    async with (
        pair_on(device) as pair,
        pair.domain.queue_pair(pair.cq) as near,
        pair.domain.queue_pair(pair.cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        device.faults.hold()
        first = asyncio.create_task(outcomes(near.write(pair.source[:8], pair.target.remote()[:8])))
        await until(lambda: device.faults.held() == 1)
        await near.aclose()
        assert [type(each) for each in await first] == [BrokenResourceError]
        second = asyncio.create_task(outcomes(pair.write(8)))  # in the same slot
        await until(lambda: device.faults.held() >= 1)
        assert not second.done()
        device.faults.unhold()
        assert await second == [None]
        await pair.check_idle()
