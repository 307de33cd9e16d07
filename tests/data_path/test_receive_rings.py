"""Receives of a ring share one slot, are posted again one by one, and end like others."""

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    Device,
    QpCapabilities,
    QpState,
    VerbsError,
    WorkCompletionError,
)
from aioverbs._core.data_path.data_path import Inbox, ReceiveRing, post_receives
from aioverbs._verbs.queue_pair import qp_work_state_of
from tests.capabilities import Capability, needs
from tests.data_path.ends import Ends, ends
from tests.pace import patience
from tests.waiting import until

SIZE = 16


class Ring:
    """Ring of receives of the far queue pair, which returns what arrived and posts none again by itself."""

    def __init__(
        self, pair: Ends, count: int, memory: Any = None, wrap: Callable[..., object] = lambda *message: message
    ) -> None:
        work = qp_work_state_of(pair.far)
        assert work is not None
        assert work.receive_queue is not None
        self.pair = pair
        self.failed = 0
        self.inbox = Inbox(work.receive_queue, wrap, self.fail)
        self.ring = ReceiveRing(self.inbox, pair.target[:] if memory is None else memory, count, SIZE)

    def fail(self, local: object) -> None:
        assert local is None
        self.failed += 1

    def post(self, first: int, count: int) -> None:
        post_receives(self.pair.far, self.ring, first, count)

    async def send(self, data: bytes, immediate: int | None = None) -> None:
        self.pair.source.buffer[: len(data)] = data
        await self.pair.near.send(self.pair.source[: len(data)], immediate=immediate)

    async def next(self) -> Any:
        with anyio.fail_after(patience(20)):
            return await self.inbox.__anext__()

    @property
    def in_flight(self) -> int:
        return self.pair.far.statistics().receives.in_flight


@pytest.mark.every_way
async def test_messages_fill_the_receives_of_a_ring_in_order(device: Device) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 3)
        ring.post(0, 3)
        assert ring.in_flight == len(pair.target.pins) == 3
        await ring.send(b"one", 7)
        await ring.send(b"")
        await pair.near.write_with_immediate(pair.source[:4], pair.target.remote()[100:104], 9)
        assert [await ring.next() for _ in range(3)] == [
            (0, b"one", 7, False),
            (1, b"", None, False),
            (2, b"", 9, True),
        ]
        assert ring.in_flight == 0
        assert pair.is_idle()
        for index in (1, 0, 1):  # in any order, and again after the ring was empty
            ring.post(index, 1)
            await ring.send(b"x" * SIZE)
            assert await ring.next() == (index, b"x" * SIZE, None, False)
        assert pair.is_idle()


async def test_a_ring_may_post_a_receive_again_while_it_handles_its_message(device: Device) -> None:
    async with ends(device) as pair:

        def again(index: int, data: bytes, *_: object) -> bytes:
            ring.post(index, 1)
            return data

        ring = Ring(pair, 2, wrap=again)
        ring.post(0, 2)
        for number in range(100):
            await ring.send(bytes([number]))
            assert await ring.next() == bytes([number])
            assert ring.in_flight == len(pair.target.pins) == 2


async def test_a_ring_holds_as_many_receives_as_its_queue(device: Device) -> None:
    async with ends(device, capabilities=QpCapabilities(max_recv_wr=100)) as pair:
        ring = Ring(pair, 101)
        with pytest.raises(anyio.WouldBlock):
            ring.post(0, 101)
        assert pair.is_idle()
        ring.post(0, 100)
        with pytest.raises(anyio.WouldBlock):
            ring.post(100, 1)
        for number in range(100):
            await ring.send(bytes([number]))
            assert await ring.next() == (number, bytes([number]), None, False)


async def test_wrong_receives_of_a_ring_are_refused(device: Device) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 2)
        for first, count in ((0, 3), (2, 1), (1, 2), (0, 0), (2**32 - 1, 1)):
            with pytest.raises(IndexError):
                ring.post(first, count)
        with pytest.raises(ValueError, match="does not have the receive queue"):
            post_receives(pair.near, ring.ring, 0, 1)
        for count in (0, 1025):
            with pytest.raises(ValueError, match="count"):
                ReceiveRing(ring.inbox, pair.target[:], count, 1)
        for size in (0, 2**31 + 1):
            with pytest.raises(ValueError, match="size"):
                ReceiveRing(ring.inbox, pair.target[:], 1, size)
        with pytest.raises(ValueError, match="need 6 bytes"):
            ReceiveRing(ring.inbox, pair.target[:5], 3, 2)
        async with pair.domain.register(64, AccessFlags(0)) as memory:
            with pytest.raises(ValueError, match="LOCAL_WRITE"):
                Ring(pair, 2, memory[:]).post(0, 1)
        async with pair.domain.register(64) as memory:
            unusable = Ring(pair, 2, memory[:])
        with pytest.raises(ClosedResourceError):
            unusable.post(0, 1)
        assert pair.is_idle()


@needs(Capability.FAULT_PLAN)
async def test_a_refused_receive_of_a_ring_holds_nothing(device: Device) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 2)
        device.faults.fail("post_recv", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ENOMEM"):
            ring.post(0, 2)
        assert pair.is_idle()
        ring.post(0, 1)
        device.faults.fail("post_recv", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ENOMEM"):
            ring.post(1, 1)
        assert ring.in_flight == len(pair.target.pins) == 1
        await ring.send(b"one")
        assert await ring.next() == (0, b"one", None, False)


async def test_a_message_that_does_not_fit_fails_the_ring(device: Device) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 3)
        ring.post(0, 3)
        with pytest.raises(WorkCompletionError):
            await ring.send(bytes(SIZE + 1))
        status = "LOC_LEN_ERR" if pair.far.handle.context.software else "LOC_LEN_ERR|LOC_QP_OP_ERR"  # that of rxe
        with pytest.raises(WorkCompletionError, match=status):
            await ring.next()
        await until(lambda: not pair.far.statistics().receives.in_flight)
        assert ring.failed == 1
        assert pair.is_idle()
        with pytest.raises(BrokenResourceError):
            ring.post(0, 1)


@pytest.mark.parametrize("how", ["to_error", "to_reset", "close"])
async def test_receives_of_a_ring_end_with_their_queue_pair(device: Device, how: str) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 3)
        ring.post(0, 3)
        await ring.send(b"first")
        await until(lambda: len(ring.inbox))
        if how == "to_error":
            pair.far.to_error()
            await until(lambda: not ring.in_flight)
        elif how == "to_reset":
            pair.far.to_error()
            await until(lambda: not ring.in_flight)
            pair.far.to_reset()
        else:
            await pair.far.aclose()
        assert await ring.next() == (0, b"first", None, False)
        with pytest.raises((WorkCompletionError, BrokenResourceError) if how != "close" else StopAsyncIteration):
            await ring.inbox.__anext__()
        assert ring.failed
        assert len(pair.target.pins) == 0


async def test_receives_of_a_ring_end_when_their_completion_queue_breaks(device: Device) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 3)
        ring.post(0, 3)
        waiting = asyncio.ensure_future(ring.next())
        await asyncio.sleep(0)
        pair.remote_cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))
        with pytest.raises(BrokenResourceError):
            await waiting
        assert ring.failed
        assert len(pair.target.pins) == ring.in_flight == 0, "the reset queue pair no longer uses the memory"


@needs(Capability.FAULT_PLAN)
async def test_memory_stays_pinned_if_the_queue_pair_cannot_be_reset(device: Device) -> None:
    async with ends(device) as pair:
        ring = Ring(pair, 3)
        ring.post(0, 3)
        device.faults.fail("modify_qp", errno.EIO, times=2)  # both queue pairs are reset
        pair.remote_cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))
        with pytest.raises(BrokenResourceError):
            await ring.next()
        assert len(pair.target.pins) == 3, "the device may still write"
        with pytest.raises(BusyResourceError):
            await pair.target.aclose()
        await pair.far.aclose()
        assert len(pair.target.pins) == 0


async def test_an_exception_while_handling_a_message_breaks_the_queue_pair(device: Device) -> None:
    async with ends(device) as pair:

        def refuse(*_: object) -> None:
            raise ZeroDivisionError

        ring = Ring(pair, 2, wrap=refuse)
        ring.post(0, 2)
        await ring.send(b"one")
        with pytest.raises(BrokenResourceError, match="ZeroDivisionError"):
            await ring.next()
        await until(lambda: pair.far.query().qp_state is QpState.ERR and not ring.in_flight)
        assert len(pair.target.pins) == 0
