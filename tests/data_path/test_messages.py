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


class MessageReceiver:
    """A queue pair that keeps receives posted, with a sender connected to it."""

    def __init__(self, pair: Ends, depth: int = 4, size: int = 64, send_cq: CompletionQueue | None = None) -> None:
        self.pair = pair
        self.qp = pair.remote_domain.queue_pair(
            send_cq or pair.remote_cq,
            pair.remote_cq,
            qp_type=pair.near.qp_type,
            receive_depth=depth,
            receive_size=size,
        )

    async def __aenter__(self) -> "MessageReceiver":
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
async def test_messages_arrive_in_order(device: Device, qp_type: QpType) -> None:
    async with ends(device, qp_type) as pair, MessageReceiver(pair) as receiver:
        assert receiver.qp.statistics().receives.in_flight == 4
        for number in range(20):
            await receiver.send(b"message %d" % number)
            with await anext(receiver.qp.messages()) as message:
                assert bytes(message.data) == b"message %d" % number
                assert (message.route is not None) == (qp_type is QpType.UD)
        assert receiver.qp.statistics().receives.in_flight == 4
        for number in range(3):
            await receiver.send(bytes([number]))
        async for message in receiver.qp.messages():
            with message:
                if message.data[0] == 2:
                    break


async def test_a_write_with_immediate_data_has_no_message_bytes(device: Device) -> None:
    """The data is where it was written; the receive buffer holds an earlier message, or nothing."""
    async with ends(device) as pair, MessageReceiver(pair, depth=1, size=32) as receiver:
        await receiver.send(b"earlier")
        with await anext(receiver.qp.messages()) as message:
            assert (message.written, bytes(message.data)) == (False, b"earlier")
        await pair.near.write_with_immediate(pair.source[:40], pair.target.remote()[:40], 5)
        with await anext(receiver.qp.messages()) as message:
            assert (message.byte_len, message.immediate, bytes(message.data)) == (40, 5, b"")
            assert message.written


class RacingRequester:
    """A requester that posts receives: the first post drops the messages of the caller, the next raises once.

    After the first post `held` is cleared, which releases further buffers; the next post is refused as if another
    thread were inside.
    """

    def __init__(self, requester: Any, held: list[Message]) -> None:
        self._requester = requester
        self._kept = held
        self._refused = False

    def _receive_into(self, inbox: Any, local: Any) -> Any:
        if not self._kept and not self._refused:
            self._refused = True
            raise ConcurrentAccessError("another thread is inside")
        posted = self._requester._receive_into(inbox, local)
        self._kept.clear()
        return posted


async def test_a_buffer_is_not_posted_twice_after_a_refused_post(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair, depth=2) as receiver:
        messages, held = receiver.qp.messages(), []
        for number in range(2):
            await receiver.send(bytes([number]))
            held.append(await anext(messages))
        refiller = receiver.qp._refiller
        assert refiller is not None
        refiller._requester = cast(Any, RacingRequester(refiller._requester, held))
        message = held.pop()
        message.release()
        message.release()
        await until(lambda: receiver.qp.statistics().receives.in_flight == 2)
        for number in range(4):
            await receiver.send(bytes([number]))
            with await anext(messages) as message:
                assert bytes(message.data) == bytes([number])
        assert not refiller._free


@pytest.mark.every_way
async def test_buffers_of_held_messages_are_not_reused(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        held = []
        for number in range(4):
            await receiver.send(bytes([number]))
            held.append(await anext(receiver.qp.messages()))
        assert receiver.qp.statistics().receives.in_flight == 0
        assert [message.data[0] for message in held] == [0, 1, 2, 3]
        held[2].release()
        held[2].release()
        assert receiver.qp.statistics().receives.in_flight == 1
        await receiver.send(b"next")
        message = await anext(receiver.qp.messages())
        assert bytes(message.data) == b"next"
        assert [held[number].data[0] for number in (0, 1, 3)] == [0, 1, 3]
        message.release()
        await receiver.send(b"the last place")
        with pytest.raises(WorkCompletionError, match="RNR_RETRY_EXC_ERR"):
            await receiver.send(b"too many")


@pytest.mark.every_way
async def test_buffers_of_dropped_messages_are_posted_again(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver, asyncio.timeout(patience(5)):
        for _ in range(12):
            await receiver.send(b"x")
            await anext(receiver.qp.messages())
            await until(lambda: receiver.qp.statistics().receives.in_flight == 4)


@pytest.mark.every_way
async def test_cancelled_waiters_lose_no_message(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        for number in range(10):
            task = asyncio.ensure_future(anext(receiver.qp.messages()))
            await asyncio.sleep(0)
            if number % 2:
                task.cancel()
                await receiver.send(bytes([number]))
            else:
                await receiver.send(bytes([number]))
                task.cancel()
            try:
                message = await task
            except asyncio.CancelledError:
                message = await anext(receiver.qp.messages())
            with message:
                assert message.data[0] == number


async def test_a_second_waiter_for_messages_is_refused(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        task = asyncio.ensure_future(anext(receiver.qp.messages()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task is waiting for the next message"):
            await anext(receiver.qp.messages())
        await receiver.send(b"x")
        (await task).release()


@pytest.mark.every_way
async def test_messages_end_when_their_queue_pair_is_closed(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        messages = receiver.qp.messages()
        await receiver.send(b"last")

        async def read() -> list[bytes]:
            received = []
            async for message in messages:
                with message:
                    received.append(bytes(message.data))
            return received

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        await receiver.qp.aclose()
        assert await asyncio.wait_for(task, patience(5)) == [b"last"]


@pytest.mark.every_way
async def test_a_failure_is_reported_and_a_reset_starts_over(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver, asyncio.timeout(patience(10)):
        for _ in range(3):
            await receiver.send(b"good")
            with pytest.raises(WorkCompletionError) as refused:
                await receiver.send(b"much too long" * 10)
            assert refused.value.status in accepted_statuses(device, WcStatus.REM_INV_REQ_ERR)
            with await anext(receiver.qp.messages()) as message:
                assert bytes(message.data) == b"good"
            with pytest.raises(WorkCompletionError) as caught:
                await anext(receiver.qp.messages())
            assert caught.value.status in accepted_statuses(device, WcStatus.LOC_LEN_ERR)
            assert caught.value.qp_num == receiver.qp.qp_num
            await until(lambda: not receiver.qp.statistics().in_flight)
            receiver.qp.to_reset()
            pair.near.to_reset()
            receiver.connect()
            assert receiver.qp.statistics().receives.in_flight == 4


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
async def test_dropped_requests_for_messages_lose_none(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver, asyncio.timeout(patience(5)):
        for _ in range(2):
            forgotten = anext(receiver.qp.messages())  # before a message arrives, and before another waiter asks
            del forgotten
        await receiver.send(b"first")
        assert bytes((await anext(receiver.qp.messages())).data) == b"first"
        await receiver.send(b"second")
        await asyncio.sleep(0.01)
        forgotten = anext(receiver.qp.messages())  # after the message arrived
        del forgotten
        assert bytes((await anext(receiver.qp.messages())).data) == b"second"


# ---- Where the iterator ends and begins again


async def next_message(qp: QueuePair) -> bytes:
    async for message in qp.messages():
        with message:
            return bytes(message.data)
    return b"end"


@pytest.mark.every_way
async def test_messages_end_on_close_with_nothing_posted(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair, depth=1) as receiver:
        await receiver.send(b"one")
        held = await anext(receiver.qp.messages())
        waiting = asyncio.create_task(next_message(receiver.qp))
        await asyncio.sleep(0)
        await receiver.qp.aclose()
        async with asyncio.timeout(patience(3)):
            assert await waiting == b"end"
        held.release()


@pytest.mark.every_way
async def test_messages_begin_again_after_a_reset(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair, depth=2) as receiver, asyncio.timeout(patience(10)):
        for _ in range(3):
            for _ in range(3):
                await receiver.send(b"one")
                assert await next_message(receiver.qp) == b"one"
            receiver.qp.to_error()
            with pytest.raises((WorkCompletionError, BrokenResourceError)):
                await next_message(receiver.qp)
            await until(lambda: not receiver.qp.statistics().in_flight)
            receiver.qp.to_reset()
            pair.near.to_reset()
            receiver.connect()
