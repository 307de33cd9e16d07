"""Requests that fail with each status, and the effect on their queue pair and on others."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    Device,
    MessageModel,
    MwType,
    QpState,
    QpType,
    QueuePairStateError,
    RemoteRegion,
    WcOpcode,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._core.data_path.data_path import Operation
from tests.capabilities import Capability, needs
from tests.data_path.ends import CAPABILITIES, PEERS, Ends, ends
from tests.devices import remote_device
from tests.holding import go_on, hold, unhold
from tests.statuses import accepted_statuses

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


def valid_write(pair: Ends) -> Operation[None]:
    return pair.near.write(pair.source[:8], pair.target.remote()[:8])


async def status_of(operation: Operation[Any]) -> WcStatus:
    with pytest.raises(WorkCompletionError) as caught:
        await operation
    return caught.value.status


# ---- Requests that the peer or the device rejects

FailingRequest = tuple[WcStatus, WcOpcode, dict[str, Any], Callable[[Ends], Operation[Any]]]

FAILING_REQUESTS: dict[str, FailingRequest] = {
    "unknown key": (
        WcStatus.REM_ACCESS_ERR,
        WcOpcode.RDMA_WRITE,
        {},
        lambda p: p.near.write(p.source[:8], RemoteRegion(p.target.address, 8, p.target.rkey ^ 0x5500)),
    ),
    "beyond the end": (
        WcStatus.REM_ACCESS_ERR,
        WcOpcode.RDMA_READ,
        {},
        lambda p: p.near.read(p.source[:8], RemoteRegion(p.target.address + 4089, 8, p.target.rkey)),
    ),
    "no reads granted": (
        WcStatus.REM_INV_REQ_ERR,
        WcOpcode.RDMA_READ,
        {"peer": AccessFlags.REMOTE_WRITE},
        lambda p: p.near.read(p.source[:8], p.target.remote()[:8]),
    ),
    "no atomics granted": (
        WcStatus.REM_INV_REQ_ERR,
        WcOpcode.FETCH_ADD,
        {"peer": AccessFlags.REMOTE_WRITE},
        lambda p: p.near.fetch_and_add(p.target.remote()[:8], 1),
    ),
    "no receive": (
        WcStatus.RNR_RETRY_EXC_ERR,
        WcOpcode.SEND,
        {"rnr_retry": 0},
        lambda p: p.near.send(p.source[:8]),
    ),
    "no receive for immediate data": (
        WcStatus.RNR_RETRY_EXC_ERR,
        WcOpcode.RDMA_WRITE,
        {"rnr_retry": 0},
        lambda p: p.near.write_with_immediate(p.source[:8], p.target.remote()[:8], 1),
    ),
    "message too long": (
        WcStatus.REM_INV_REQ_ERR,
        WcOpcode.SEND,
        {"receive": 7},
        lambda p: p.near.send(p.source[:8]),
    ),
    "unknown key to invalidate": (
        WcStatus.REM_OP_ERR,
        WcOpcode.SEND,
        {"receive": 8},
        lambda p: p.near.send_with_invalidate(p.source[:8], p.target.rkey ^ 0x5500),
    ),
    "unknown local key to invalidate": (
        WcStatus.LOC_QP_OP_ERR,
        WcOpcode.LOCAL_INV,
        {},
        lambda p: p.near.invalidate(p.source.rkey ^ 0x5500),
    ),
    "no answer": (
        WcStatus.RETRY_EXC_ERR,
        WcOpcode.RDMA_WRITE,
        {"timeout": 1, "retry_cnt": 1, "far": QpState.RESET},
        lambda p: p.near.write(p.source[:8], p.target.remote()[:8]),
    ),
}


# Capabilities of devices that detect the failure.
FAILURE_CAPABILITIES = {
    "unknown key to invalidate": needs(Capability.CHECKS_INVALIDATED_KEYS),
}


def reconnect(
    pair: Ends, *, peer: AccessFlags = PEERS, far: QpState | None = None, receive: int = 0, **attributes: Any
) -> None:
    for qp in (pair.near, pair.far):
        qp.to_reset()
    here, there = pair.near.local_endpoint(), pair.far.local_endpoint()
    pair.near.connect(there, PEERS, **attributes)
    pair.far.connect(here, peer)
    if receive:
        _ = pair.far.receive(pair.target[:receive])
    if far is QpState.RESET:
        pair.far.to_reset()


@pytest.mark.parametrize(
    ("model", "status", "opcode", "setting", "post"),
    [
        pytest.param(model, *each, id=f"{name}-{model.name}", marks=FAILURE_CAPABILITIES.get(name, ()))
        for model, (name, each) in zip(itertools.cycle(MessageModel), FAILING_REQUESTS.items(), strict=False)
    ],
)
async def test_a_rejected_request_fails_and_later_ones_are_flushed(
    device: Device,
    model: MessageModel,
    status: WcStatus,
    opcode: WcOpcode,
    setting: dict[str, Any],
    post: Callable[[Ends], Operation[Any]],
) -> None:
    async with ends(device, message_model=model) as pair:
        reconnect(pair, **setting)
        receive = pair.near.receive(pair.source[64:72])
        failed = post(pair)
        behind = [valid_write(pair) for _ in range(3)]
        with pytest.raises(WorkCompletionError, match=f"{opcode.name} on queue pair {pair.near.qp_num}") as caught:
            await failed
        error = caught.value
        assert error.status in accepted_statuses(device, status)
        status = error.status
        assert (error.opcode, error.qp_num) == (opcode, pair.near.qp_num)
        for each in behind:
            assert await status_of(each) is WcStatus.WR_FLUSH_ERR
        assert await status_of(receive) is WcStatus.WR_FLUSH_ERR
        assert len(pair.source.pins) == 0
        assert dict(pair.near.statistics().sends.failed) == {status: 1, WcStatus.WR_FLUSH_ERR: 3}
        assert dict(pair.near.statistics().receives.failed) == {WcStatus.WR_FLUSH_ERR: 1}
        for call in (lambda: valid_write(pair), lambda: pair.near.receive(None)):
            with pytest.raises(BrokenResourceError, match=f"is in state ERR, caused by: .*{status.name}") as broken:
                call()
            assert isinstance(broken.value.__cause__, WorkCompletionError)
            assert broken.value.__cause__.status is status
        await pair.wait_far_receives()
        reconnect(pair)
        await valid_write(pair)
        await pair.near.read(pair.source[:8], pair.target.remote()[:8])


async def test_reads_beyond_max_rd_atomic_are_refused(device: Device) -> None:
    """Reads beyond max_rd_atomic are refused at once, and break nothing; some devices would let them wait forever."""
    async with ends(device) as pair:
        reconnect(pair, max_rd_atomic=0)
        remote = pair.target.remote()[:8]
        for post in (
            lambda: pair.near.read(pair.source[:8], remote),
            lambda: pair.near.compare_and_swap(remote, 1, 2),
            lambda: pair.near.batch().fetch_and_add(remote, 1),
        ):
            with pytest.raises(QueuePairStateError, match="connect it with max_rd_atomic"):
                post()
        await valid_write(pair)
        assert pair.is_idle()


@every_model
async def test_a_receive_posted_after_the_failure_is_flushed(device: Device, model: MessageModel) -> None:
    """Flush a receive that is posted before the failure is noticed."""
    async with ends(device, message_model=model) as pair:
        failed = pair.near.write(pair.source[:8], RemoteRegion(pair.target.address, 8, pair.target.rkey ^ 0x5500))
        receive = pair.near.receive(pair.source[64:72])
        assert await status_of(failed) is WcStatus.REM_ACCESS_ERR
        assert await status_of(receive) is WcStatus.WR_FLUSH_ERR
        assert pair.is_idle()


async def test_a_window_with_more_access_than_its_region_fails_to_bind(device: Device) -> None:
    async with (
        ends(device) as pair,
        pair.domain.register(64, AccessFlags.REMOTE_READ | AccessFlags.MW_BIND) as region,
        pair.domain.memory_window(MwType.TYPE_2) as window,
    ):
        with pytest.raises(WorkCompletionError, match="BIND_MW") as caught:
            await pair.near.bind_window(window, region, AccessFlags.REMOTE_WRITE)
        assert (caught.value.status, caught.value.opcode) == (WcStatus.MW_BIND_ERR, WcOpcode.BIND_MW)
        assert len(region.pins) == 0


@pytest.mark.every_way
async def test_memory_deregistered_by_its_handle_fails_the_request(device: Device) -> None:
    """Deregister through the handle, which does not wait for requests in flight as the resource does."""
    async with ends(device) as pair, pair.domain.register(4096) as region:
        pair.near.to_sqd()
        write = pair.near.write(region, pair.target.remote())  # too large to be inline
        region.handle.destroy()
        go_on(device, pair.near)
        with pytest.raises(WorkCompletionError) as caught:
            await write
        assert caught.value.status in accepted_statuses(device, WcStatus.LOC_PROT_ERR)


@pytest.mark.every_way
async def test_a_receive_that_is_too_small_breaks_both(device: Device) -> None:
    async with ends(device) as pair:
        receive, second = pair.receive(pair.target[:7]), pair.receive()
        assert await status_of(pair.near.send(pair.source[:8])) in accepted_statuses(device, WcStatus.REM_INV_REQ_ERR)
        with pytest.raises(WorkCompletionError, match="RECV") as caught:
            await receive
        error = caught.value
        assert error.status in accepted_statuses(device, WcStatus.LOC_LEN_ERR)
        assert (error.opcode, error.qp_num) == (WcOpcode.RECV, pair.far.qp_num)
        assert await status_of(second) is WcStatus.WR_FLUSH_ERR
        with pytest.raises(BrokenResourceError, match=error.status.name):
            _ = pair.far.send(None)
        assert bytes(pair.target.buffer[:8]) == bytes(8)


# ---- The fault plan


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_every_status_is_reported(device: Device) -> None:
    async with ends(device) as pair:
        for status in filter(None, WcStatus):
            pair.target.buffer[:3] = bytes(3)
            device.faults.fail_request(status, pair.near.handle, first=2, vendor_err=77)
            first, failed, last = (pair.write(bytes([65 + number]), number) for number in range(3))
            await first
            with pytest.raises(WorkCompletionError, match=status.name) as caught:
                await failed
            error = caught.value
            assert (error.status, error.vendor_err, error.qp_num) == (status, 77, pair.near.qp_num)
            assert error.opcode is WcOpcode.RDMA_WRITE
            assert await status_of(last) is WcStatus.WR_FLUSH_ERR
            assert bytes(pair.target.buffer[:3]) == b"A\0\0"
            with pytest.raises(BrokenResourceError, match=status.name):
                _ = valid_write(pair)
            assert pair.is_idle()
            pair.near.to_reset()
            pair.far.to_reset()
            pair.connect()
            await pair.write(b"again")


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("status", [WcStatus.LOC_LEN_ERR, WcStatus.LOC_PROT_ERR, WcStatus.GENERAL_ERR])
async def test_a_receive_fails_and_breaks_both_ends(device: Device, status: WcStatus) -> None:
    async with ends(device) as pair:
        remote_device(device).faults.fail_request(status, pair.far.handle, receives=True, vendor_err=5)
        receive, second = pair.receive(), pair.receive()
        send = pair.near.send(pair.source[:8])
        with pytest.raises(WorkCompletionError) as caught:
            await receive
        assert (caught.value.status, caught.value.opcode, caught.value.vendor_err) == (status, WcOpcode.RECV, 5)
        assert await status_of(second) is WcStatus.WR_FLUSH_ERR
        expected = WcStatus.REM_INV_REQ_ERR if status is WcStatus.LOC_LEN_ERR else WcStatus.REM_OP_ERR
        assert await status_of(send) is expected
        with pytest.raises(BrokenResourceError, match=status.name):
            _ = pair.far.receive(None)
        with pytest.raises(BrokenResourceError, match=expected.name):
            _ = pair.near.send(None)


@needs(Capability.FAULT_PLAN)
@every_model
async def test_a_failure_leaves_other_queue_pairs_alone(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair, AsyncExitStack() as stack:
        others = [
            await stack.enter_async_context(pair.domain.queue_pair(pair.cq, capabilities=CAPABILITIES))
            for _ in range(4)
        ]
        for other in others:
            other.connect(other.local_endpoint(), PEERS)
        device.faults.fail_request(WcStatus.GENERAL_ERR, pair.near.handle, first=3)
        operations: list[Operation[None]] = []
        for _ in range(5):
            operations.append(valid_write(pair))
            operations += [other.write(pair.source[:8], pair.target.remote()[8:16]) for other in others]
        results = await asyncio.gather(*operations, return_exceptions=True)
        assert [isinstance(result, WorkCompletionError) for result in results[::5]] == [False, False, True, True, True]
        assert [result for index, result in enumerate(results) if index % 5] == 20 * [None]
        for other in others:
            assert other.statistics().sends.failed == ()
            await other.read(pair.source[:8], pair.target.remote()[:8])
        assert pair.is_idle()


@every_model
async def test_a_move_to_error_flushes_all(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        receive = pair.near.receive(None)
        hold(device, pair.near)
        writes = [asyncio.ensure_future(valid_write(pair)) for _ in range(20)]
        await asyncio.sleep(0.01)
        pair.near.to_error()
        unhold(device, pair.near)
        results = await asyncio.gather(*writes, return_exceptions=True)
        statuses = [result.status for result in results if isinstance(result, WorkCompletionError)]
        assert len(statuses) >= 4
        assert set(statuses) == {WcStatus.WR_FLUSH_ERR}, "waiting requests were not flushed"
        assert await status_of(receive) is WcStatus.WR_FLUSH_ERR
        with pytest.raises(BrokenResourceError, match="is in state ERR"):
            _ = valid_write(pair)
        assert pair.is_idle()


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_a_queue_pair_that_breaks_by_itself_flushes_its_requests(device: Device) -> None:
    async with ends(device) as pair:
        pair.near.to_sqd()
        write = valid_write(pair)
        device.faults.break_queue_pair(pair.near.handle)
        assert await status_of(write) is WcStatus.WR_FLUSH_ERR
        with pytest.raises(BrokenResourceError, match=r"is in state ERR, caused by: .*WR_FLUSH_ERR"):
            _ = valid_write(pair)


# ---- Unreliable types: the send queue stops (SQE), and receives go on


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize(
    ("qp_type", "model"),
    list(zip((QpType.UC, QpType.UD) * 2, MessageModel, strict=True)),
    ids=lambda each: each.name,
)
async def test_a_send_queue_stops_and_goes_on(device: Device, qp_type: QpType, model: MessageModel) -> None:
    async with ends(device, qp_type, message_model=model) as pair:
        near_receive = pair.near.receive(pair.source[64:128])
        device.faults.fail_request(WcStatus.LOC_PROT_ERR, pair.near.handle)
        sends = [pair.near.send(pair.source[:8], **pair.addressing) for _ in range(20)]
        assert [await status_of(send) for send in sends] == [WcStatus.LOC_PROT_ERR] + 19 * [WcStatus.WR_FLUSH_ERR]
        with pytest.raises(BrokenResourceError, match=r"is in state SQE, caused by: .*LOC_PROT_ERR"):
            _ = pair.near.send(None, **pair.addressing)
        assert pair.near.query().qp_state is QpState.SQE
        second = pair.near.receive(pair.source[64:128])
        go_on(device, pair.near)
        receive = pair.receive()
        await pair.near.send(pair.source[:8], **pair.addressing)
        assert (await receive).byte_len == 8
        if qp_type is QpType.UC:
            await pair.far.send(pair.target[:8])
            assert (await near_receive).byte_len == 8
        pair.near.to_error()
        with pytest.raises(BrokenResourceError, match="caused by: a change of its state"):
            _ = pair.near.send(None, **pair.addressing)
        assert await status_of(second) is WcStatus.WR_FLUSH_ERR
