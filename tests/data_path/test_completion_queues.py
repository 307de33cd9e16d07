"""Completion queues: reserved capacity, insufficient capacity, and statistics."""

import asyncio

import pytest

from aioverbs import Device, MessageModel, QpCapabilities, SendFlags, SendOpcode
from tests.capabilities import Capability, needs
from tests.data_path.ends import PEERS, ends
from tests.holding import hold, unhold
from tests.raw_verbs import post_send

SMALL = QpCapabilities(max_send_wr=8, max_recv_wr=4)


async def test_capacity_is_reserved_for_queue_pairs(device: Device) -> None:
    async with device.protection_domain() as pd, pd.completion_queue(15) as cq:
        depth = cq.statistics().depth
        assert depth >= 15
        fit = depth // 12
        qps = [await pd.queue_pair(cq, capabilities=SMALL).open() for _ in range(fit)]
        assert cq.statistics().reserved == 12 * fit
        refused = pd.queue_pair(cq, capabilities=SMALL)
        free = depth - 12 * fit
        match = rf"holds {depth} completions, {12 * fit + (8 if free >= 8 else 0)} of them reserved"
        with pytest.raises(ValueError, match=match):
            await refused.open()
        await refused.aclose()
        assert cq.statistics().reserved == 12 * fit, "the reservation was not released"
        with pytest.raises(ValueError, match=rf"must be at least {12 * fit} for .*, got {12 * fit - 1}$"):
            cq.resize(12 * fit - 1)
        cq.resize(depth + 12)
        assert cq.statistics().depth >= depth + 12
        qps.append(await pd.queue_pair(cq, capabilities=SMALL).open())
        for qp in qps:
            await qp.aclose()
        assert cq.statistics().reserved == 0
        cq.resize(1)
        with pytest.raises(ValueError, match=r"must be at least 1 for .*, got 0$"):
            cq.resize(0)


@pytest.mark.every_way
async def test_resizing_keeps_completions(device: Device) -> None:
    async with ends(device) as pair:
        hold(device, pair.near)
        writes = [pair.write(bytes([65 + number]), number) for number in range(10)]
        unhold(device, pair.near)
        pair.cq.resize(1024)
        await asyncio.gather(*writes)
        assert bytes(pair.target.buffer[:11]) == b"ABCDEFGHIJ\0"


@pytest.mark.every_way
async def test_completions_and_wakeups_are_counted(device: Device) -> None:
    async with ends(device) as pair:
        before = pair.cq.statistics()
        assert (before.completions, before.late, before.in_flight, before.spins) == (0, 0, 0, 0)
        hold(device, pair.near)
        tasks = [asyncio.ensure_future(pair.write(b"x", number)) for number in range(5)]
        await asyncio.sleep(0.01)
        assert pair.cq.statistics().in_flight == 5
        unhold(device, pair.near)
        await asyncio.gather(*tasks)
        after = pair.cq.statistics()
        assert (after.completions, after.in_flight, after.late) == (5, 0, 0)
        assert after.wakeups >= 1


@pytest.mark.every_way
async def test_spins_are_counted(device: Device) -> None:
    async with ends(device, message_model=MessageModel.LOW_LATENCY, spin_ns=2_000_000) as pair:
        hold(device, pair.near)
        task = asyncio.ensure_future(pair.write(b"x"))
        await asyncio.sleep(0.01)
        statistics = pair.cq.statistics()
        assert (statistics.spins, statistics.spins_paid) == (1, 0)
        unhold(device, pair.near)
        await task


async def test_completions_with_unknown_wr_ids_are_counted_as_late(device: Device) -> None:
    async with ends(device) as pair:
        for wr_id in (0, 1, 2**62, 2**63, 2**64 - 1):
            post_send(pair.near.handle, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED, wr_id=wr_id)
        await pair.write(b"x")
        assert pair.cq.statistics().late == 5


@pytest.mark.every_way
async def test_a_late_completion_does_not_end_another_request(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of a closed queue pair do not end the request that reuses their slot."""
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.02)
    async with ends(device) as pair, pair.domain.queue_pair(pair.cq) as other:
        other.connect(other.local_endpoint(), PEERS)
        hold(device, pair.near)
        old = pair.write(b"old")
        await pair.near.aclose()
        assert old.done()
        hold(device, other)
        new = other.write(pair.source[:8], pair.target.remote()[:8])
        await asyncio.sleep(0.01)
        assert not new.done()
        unhold(device, other)
        await new
        assert pair.is_idle()


async def test_wrong_arguments_of_completion_queues_are_refused(device: Device) -> None:
    async with device.protection_domain() as pd:
        for model in (MessageModel.DEFAULT, MessageModel.HIGH_BANDWIDTH):
            with pytest.raises(ValueError, match=f"LOW_LATENCY or FORCE_LOW_LATENCY, got {model.name}: leave it out"):
                pd.completion_queue(8, message_model=model, spin_ns=100)
        for spin_ns in (-1, 10**9 + 1):
            with pytest.raises(ValueError, match=r"`spin_ns` must be 0 to 1,000,000,000, got"):
                pd.completion_queue(8, message_model=MessageModel.LOW_LATENCY, spin_ns=spin_ns)
        with pytest.raises(ValueError, match="`depth` must be at least 1, got 0"):
            pd.completion_queue(0)


@needs(Capability.FAULT_PLAN, Capability.CQ_MODERATION)
async def test_events_are_moderated_for_bandwidth(device: Device) -> None:
    async with device.protection_domain() as pd:
        for model in MessageModel:
            async with pd.completion_queue(8, message_model=model) as cq:
                assert cq.moderated == (model is MessageModel.HIGH_BANDWIDTH)
        device.faults.fail("modify_cq", 95)  # EOPNOTSUPP
        async with pd.completion_queue(8, message_model=MessageModel.HIGH_BANDWIDTH) as cq:
            assert not cq.moderated
