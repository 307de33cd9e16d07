"""Messages arrive in order, in receive buffers that are posted again once released."""

import asyncio
from typing import Any, cast

import pytest

from aioverbs import (
    BrokenResourceError,
    CompletionQueue,
    ConcurrentAccessError,
    Device,
    Message,
    QpCapabilities,
    QpType,
    QueuePair,
    WcStatus,
    WorkCompletionError,
)
from tests.data_path.ends import PEERS, Ends, ends
from tests.pace import patience
from tests.statuses import accepted_statuses
from tests.waiting import until


class Postbox:
    """A queue pair that keeps receives posted, with a sender connected to it."""

    def __init__(self, pair: Ends, depth: int = 4, size: int = 64, send_cq: CompletionQueue | None = None) -> None:
        self.pair = pair
        self.qp = pair.far_domain.queue_pair(
            send_cq or pair.far_cq,
            pair.far_cq,
            qp_type=pair.near.qp_type,
            receive_depth=depth,
            receive_size=size,
        )

    async def __aenter__(self) -> "Postbox":
        await self.qp.open()
        if self.qp.qp_type is QpType.UD:
            self.qp.activate()
            self.handle = await self.pair.domain.address_handle(self.qp.local_endpoint()).open()
        else:
            self.pair.near.to_reset()
            self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.qp.aclose()
        if self.qp.qp_type is QpType.UD:
            await self.handle.aclose()

    def connect(self) -> None:
        here, there = self.pair.near.local_endpoint(), self.qp.local_endpoint()
        if self.qp.qp_type is QpType.RC:
            self.pair.near.connect(there, PEERS, rnr_retry=3)
            self.qp.connect(here, PEERS, min_rnr_timer=1)
        else:
            self.pair.near.connect(there, PEERS)
            self.qp.connect(here, PEERS)

    async def send(self, data: bytes) -> None:
        self.pair.source.buffer[: len(data)] = data
        to = self.handle.to() if self.qp.qp_type is QpType.UD else None
        await self.pair.near.send(self.pair.source[: len(data)], to=to)


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD], ids=lambda qp_type: qp_type.name)
async def test_messages_come_in_their_order(device: Device, qp_type: QpType) -> None:
    async with ends(device, qp_type) as pair, Postbox(pair) as box:
        assert box.qp.statistics().receives.in_flight == 4
        for number in range(20):
            await box.send(b"message %d" % number)
            with await anext(box.qp.messages()) as message:
                assert bytes(message.data) == b"message %d" % number
                assert (message.route is not None) == (qp_type is QpType.UD)
        assert box.qp.statistics().receives.in_flight == 4
        for number in range(3):
            await box.send(bytes([number]))
        async for message in box.qp.messages():
            with message:
                if message.data[0] == 2:
                    break


async def test_a_write_with_immediate_data_brings_no_bytes(device: Device) -> None:
    """The data is where it was written; the receive buffer holds an earlier message, or nothing."""
    async with ends(device) as pair, Postbox(pair, depth=1, size=32) as box:
        await box.send(b"earlier")
        with await anext(box.qp.messages()) as message:
            assert (message.written, bytes(message.data)) == (False, b"earlier")
        await pair.near.write_with_immediate(pair.source[:40], pair.target.remote()[:40], 5)
        with await anext(box.qp.messages()) as message:
            assert (message.byte_len, message.immediate, bytes(message.data)) == (40, 5, b"")
            assert message.written


class Meanwhile:
    """A requester that posts receives: the first post drops the messages of the caller, the next raises once.

    After the first post `kept` is cleared, which releases further buffers; the next post is refused as if another
    thread were inside.
    """

    def __init__(self, requester: Any, kept: list[Message]) -> None:
        self._requester = requester
        self._kept = kept
        self._refused = False

    def _receive_into(self, inbox: Any, local: Any) -> Any:
        if not self._kept and not self._refused:
            self._refused = True
            raise ConcurrentAccessError("another thread is inside")
        posted = self._requester._receive_into(inbox, local)
        self._kept.clear()
        return posted


async def test_what_was_posted_is_not_posted_twice_where_another_could_not_be(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair, depth=2) as box:
        messages, kept = box.qp.messages(), []
        for number in range(2):
            await box.send(bytes([number]))
            kept.append(await anext(messages))
        refiller = box.qp._refiller
        assert refiller is not None
        refiller._requester = cast(Any, Meanwhile(refiller._requester, kept))
        message = kept.pop()
        message.release()
        message.release()
        await until(lambda: box.qp.statistics().receives.in_flight == 2)
        for number in range(4):
            await box.send(bytes([number]))
            with await anext(messages) as message:
                assert bytes(message.data) == bytes([number])
        assert not refiller._free


@pytest.mark.every_way
async def test_what_is_kept_is_not_received_into(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box:
        kept = []
        for number in range(4):
            await box.send(bytes([number]))
            kept.append(await anext(box.qp.messages()))
        assert box.qp.statistics().receives.in_flight == 0
        assert [message.data[0] for message in kept] == [0, 1, 2, 3]
        kept[2].release()
        kept[2].release()
        assert box.qp.statistics().receives.in_flight == 1
        await box.send(b"next")
        message = await anext(box.qp.messages())
        assert bytes(message.data) == b"next"
        assert [kept[number].data[0] for number in (0, 1, 3)] == [0, 1, 3]
        message.release()
        await box.send(b"the last place")
        with pytest.raises(WorkCompletionError, match="RNR_RETRY_EXC_ERR"):
            await box.send(b"too many")


@pytest.mark.every_way
async def test_what_is_forgotten_comes_back(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box, asyncio.timeout(patience(5)):
        for _ in range(12):
            await box.send(b"x")
            await anext(box.qp.messages())
            await until(lambda: box.qp.statistics().receives.in_flight == 4)


@pytest.mark.every_way
async def test_who_is_cancelled_loses_nothing(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box:
        for number in range(10):
            task = asyncio.ensure_future(anext(box.qp.messages()))
            await asyncio.sleep(0)
            if number % 2:
                task.cancel()
                await box.send(bytes([number]))
            else:
                await box.send(bytes([number]))
                task.cancel()
            try:
                message = await task
            except asyncio.CancelledError:
                message = await anext(box.qp.messages())
            with message:
                assert message.data[0] == number


async def test_a_second_waiter_for_messages_is_refused(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box:
        task = asyncio.ensure_future(anext(box.qp.messages()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits for the next message"):
            await anext(box.qp.messages())
        await box.send(b"x")
        (await task).release()


@pytest.mark.every_way
async def test_messages_end_when_their_queue_pair_is_closed(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box:
        messages = box.qp.messages()
        await box.send(b"last")

        async def read() -> list[bytes]:
            found = []
            async for message in messages:
                with message:
                    found.append(bytes(message.data))
            return found

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        await box.qp.aclose()
        assert await asyncio.wait_for(task, patience(5)) == [b"last"]


@pytest.mark.every_way
async def test_a_failure_is_told_and_a_reset_begins_anew(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box, asyncio.timeout(patience(10)):
        for _ in range(3):
            await box.send(b"good")
            with pytest.raises(WorkCompletionError) as refused:
                await box.send(b"much too long" * 10)
            assert refused.value.status in accepted_statuses(device, WcStatus.REM_INV_REQ_ERR)
            with await anext(box.qp.messages()) as message:
                assert bytes(message.data) == b"good"
            with pytest.raises(WorkCompletionError) as caught:
                await anext(box.qp.messages())
            assert caught.value.status in accepted_statuses(device, WcStatus.LOC_LEN_ERR)
            assert caught.value.qp_num == box.qp.qp_num
            await until(lambda: not box.qp.statistics().in_flight)
            box.qp.to_reset()
            pair.near.to_reset()
            box.connect()
            assert box.qp.statistics().receives.in_flight == 4


async def test_wrong_sizes_of_receives_are_refused(device: Device) -> None:
    async with ends(device) as pair:
        with pytest.raises(ValueError, match="make it with receive_depth and receive_size"):
            pair.near.messages()
        for depth, size in ((4, 0), (0, 64), (-1, -1), (-1, 64)):
            with pytest.raises(ValueError, match="must both be positive or both be 0"):
                pair.domain.queue_pair(pair.cq, receive_depth=depth, receive_size=size)
        with pytest.raises(ValueError, match="a receive queue of its own"):
            pair.domain.queue_pair(pair.cq, qp_type=QpType.XRC_SEND, receive_depth=4, receive_size=64)
        async with pair.domain.queue_pair(
            pair.cq, capabilities=QpCapabilities(max_recv_wr=2), receive_depth=8, receive_size=8
        ) as qp:
            assert qp.statistics().receives.depth >= 8


@pytest.mark.every_way
async def test_who_forgets_to_await_loses_nothing(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair) as box, asyncio.timeout(patience(5)):
        for _ in range(2):
            forgotten = anext(box.qp.messages())  # before a message arrives, and before another waiter asks
            del forgotten
        await box.send(b"first")
        assert bytes((await anext(box.qp.messages())).data) == b"first"
        await box.send(b"second")
        await asyncio.sleep(0.01)
        forgotten = anext(box.qp.messages())  # after the message arrived
        del forgotten
        assert bytes((await anext(box.qp.messages())).data) == b"second"


# ---- Where the iterator ends and begins again


async def next_of(qp: QueuePair) -> bytes:
    async for message in qp.messages():
        with message:
            return bytes(message.data)
    return b"end"


@pytest.mark.every_way
async def test_messages_end_where_none_is_posted(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair, depth=1) as box:
        await box.send(b"one")
        kept = await anext(box.qp.messages())
        waiting = asyncio.create_task(next_of(box.qp))
        await asyncio.sleep(0)
        await box.qp.aclose()
        async with asyncio.timeout(patience(3)):
            assert await waiting == b"end"
        kept.release()


@pytest.mark.every_way
async def test_messages_begin_again_after_a_reset(device: Device) -> None:
    async with ends(device) as pair, Postbox(pair, depth=2) as box, asyncio.timeout(patience(10)):
        for _ in range(3):
            for _ in range(3):
                await box.send(b"one")
                assert await next_of(box.qp) == b"one"
            box.qp.to_error()
            with pytest.raises((WorkCompletionError, BrokenResourceError)):
                await next_of(box.qp)
            await until(lambda: not box.qp.statistics().in_flight)
            box.qp.to_reset()
            pair.near.to_reset()
            box.connect()
