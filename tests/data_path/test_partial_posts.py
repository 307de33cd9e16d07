"""Requests posted together of which the device takes only some: all of them end."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aioverbs import (
    BrokenResourceError,
    Device,
    MessageModel,
    QpCapabilities,
    QpState,
    SendOpcode,
    VerbsError,
)
from aioverbs.errors import BatchError
from tests.capabilities import Capability, needs
from tests.data_path.ends import Ends, ends
from tests.holding import hold, unhold
from tests.pace import patience
from tests.raw_verbs import post_send

DEPTH = 8


@asynccontextmanager
async def almost_full(device: Device, model: MessageModel, free: int) -> AsyncIterator[Ends]:
    """Open a pair whose send queue has `free` slots left, the rest being held by requests that are not started."""
    capabilities = QpCapabilities(max_send_wr=DEPTH, max_recv_wr=1)
    async with (
        ends(device, message_model=model, capabilities=capabilities) as pair,
        asyncio.timeout(patience(10)),
    ):
        pair.source.buffer[:DEPTH] = b"12345678"
        hold(device, pair.near)
        room = fill(pair)
        for qp in (pair.near, pair.far):
            qp.to_reset()
        pair.connect()
        hold(device, pair.near)
        assert fill(pair, room - free) == room - free
        yield pair
        unhold(device, pair.near)


def fill(pair: Ends, most: int = 4 * DEPTH) -> int:
    """Post unsignaled requests until the send queue refuses one, and return the number posted.

    Devices may take more than the capability of the queue pair says.
    """
    for posted in range(most):
        try:
            post_send(pair.near.handle, SendOpcode.RDMA_WRITE)
        except VerbsError as error:
            if error.errno != errno.ENOMEM:
                raise
            return posted
    return most


async def check(pair: Ends, failures: list[BaseException | None], accepted: int) -> None:
    """Check the errors of the `accepted` requests and of the refused ones, and that the pair works after a reset.

    The outcome of accepted requests is unknown, so they fail by the reset; the others fail by the verb.
    """
    for at, failure in enumerate(failures):
        if at >= accepted:
            assert isinstance(failure, VerbsError)
            assert failure.errno == errno.ENOMEM
        else:
            assert isinstance(failure, BrokenResourceError)
            assert "was reset because of" in str(failure)
            assert isinstance(failure.__cause__, VerbsError)
    assert pair.is_idle()
    assert pair.near.handle.query().qp_state is QpState.RESET
    with pytest.raises(BrokenResourceError, match="ENOMEM"):
        _ = pair.near.send(None)
    for qp in (pair.near, pair.far):
        qp.to_reset()
    unhold(pair.device, pair.near)
    pair.connect()
    await pair.write(b"again")


@pytest.mark.parametrize(("model", "free"), list(zip(MessageModel, (1, 3) * 2, strict=True)))
async def test_all_parts_of_a_partially_posted_batch_end(device: Device, model: MessageModel, free: int) -> None:
    async with almost_full(device, model, free) as pair:
        batch = pair.near.batch()
        parts = [batch.write(pair.source[at : at + 1], pair.target.remote()[at : at + 1]) for at in range(5)]
        with pytest.raises(BatchError) as caught:
            await batch.post()
        assert all(part.done() for part in parts)
        await check(pair, list(caught.value.errors), free)


@pytest.mark.parametrize("free", [1, 3])
async def test_all_requests_of_a_partially_posted_chain_end(device: Device, free: int) -> None:
    async with almost_full(device, MessageModel.HIGH_BANDWIDTH, free) as pair:
        operations = [pair.near.write(pair.source[at : at + 1], pair.target.remote()[at : at + 1]) for at in range(5)]
        failures = await asyncio.gather(*operations, return_exceptions=True)
        await check(pair, failures, free)


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_requests_after_a_refused_one_are_posted(device: Device) -> None:
    async with ends(device, message_model=MessageModel.HIGH_BANDWIDTH) as pair, asyncio.timeout(10):
        device.faults.fail("post_send", errno.EINVAL)
        operations = [pair.write(b"%d" % at, at) for at in range(4)]
        failures = await asyncio.gather(*operations, return_exceptions=True)
        assert isinstance(failures[0], VerbsError)
        assert failures[1:] == [None] * 3
        assert bytes(pair.target.buffer[:4]) == b"\x00123"
        assert pair.is_idle()
        await pair.write(b"again")


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_requests_of_a_queue_pair_that_cannot_be_reset_end_on_close(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioverbs._verbs.queue_pair._FLUSH_S", 0.02)
    async with almost_full(device, MessageModel.HIGH_BANDWIDTH, 3) as pair:
        device.faults.fail("modify_qp", errno.EIO)
        operations = [pair.near.write(pair.source[at : at + 1], pair.target.remote()[at : at + 1]) for at in range(5)]
        waiting = asyncio.gather(*operations, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await pair.near.aclose()
        failures = await waiting
        assert isinstance(failures[4], VerbsError)
        assert all(isinstance(each, BrokenResourceError) for each in failures[:3])
        assert pair.is_idle()
