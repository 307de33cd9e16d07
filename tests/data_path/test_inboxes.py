"""Waiting for messages ends when no message can arrive any more, and unclaimed messages are returned."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    ConcurrentAccessError,
    Device,
    QpState,
    QueuePair,
    SharedReceiveQueue,
    VerbsError,
)
from aioverbs._core.data_path.data_path import Inbox
from tests.capabilities import Capability, needs
from tests.data_path.ends import PEERS, Ends, ends
from tests.data_path.test_messages import MessageReceiver
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.waiting import until, wait_until


async def test_a_dropped_message_goes_to_a_waiting_task(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        messages = receiver.qp.messages()
        await receiver.send(b"hello")
        await until(lambda: len(messages))  # type: ignore[arg-type]
        first = anext(messages)
        second = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        third = asyncio.create_task(asyncio.wait([second], timeout=patience(20)))
        await asyncio.sleep(0)
        assert not second.done()
        del first
        collect_garbage()
        await third
        with second.result() as message:
            assert bytes(message.data) == b"hello"


async def test_a_message_of_a_garbage_request_goes_to_the_next(device: Device) -> None:
    """The collector must not finalize the message with the request that holds it."""
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        messages = receiver.qp.messages()
        await receiver.send(b"hello")
        await until(lambda: len(messages))  # type: ignore[arg-type]
        in_flight = receiver.qp.statistics().receives.in_flight
        cycle: list[object] = [anext(messages)]
        cycle.append(cycle)
        del cycle
        collect_garbage()
        assert receiver.qp.statistics().receives.in_flight == in_flight, "the buffer was posted again"
        with anyio.fail_after(patience(20)):
            with await anext(messages) as message:
                assert bytes(message.data) == b"hello"


async def test_a_dropped_message_goes_to_a_later_request(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair) as receiver:
        messages = receiver.qp.messages()
        await receiver.send(b"hello")
        await until(lambda: len(messages))  # type: ignore[arg-type]
        first = anext(messages)
        second = anext(messages)
        del first
        collect_garbage()
        with anyio.fail_after(patience(20)):
            with await second as message:
                assert bytes(message.data) == b"hello"


@pytest.mark.parametrize(
    "cause",
    ["failed request", "failed request that was polled", "to_error", "broken receive queue", "broken send queue"],
)
async def test_waiting_for_messages_fails_when_broken_with_nothing_posted(device: Device, cause: str) -> None:
    """The iterator raises whatever broke the queue pair."""
    async with (
        ends(device) as pair,
        pair.remote_domain.completion_queue(64) as sends,
        MessageReceiver(pair, depth=2, send_cq=sends) as receiver,
    ):
        messages = receiver.qp.messages()
        held = []
        for _ in range(2):
            await receiver.send(b"hello")
            held.append(await anext(messages))
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        if cause.startswith("failed request"):  # to an address that does not exist
            write = receiver.qp.write(pair.source[:8], type(pair.target.remote())(0, 8, 1))
            if "polled" in cause:  # without a turn of the loop, which would take the completion
                wait_until(lambda: receiver.qp.query().qp_state is QpState.ERR)
            with pytest.raises(Exception, match="REM_ACCESS_ERR"):
                await write
        elif cause == "to_error":
            receiver.qp.to_error()
        else:
            cq = sends if cause == "broken send queue" else pair.remote_cq
            cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))
        await asyncio.wait([waiting], timeout=patience(20))
        broken = waiting.exception()
        assert isinstance(broken, BrokenResourceError)
        if cause.startswith("failed request"):
            assert "REM_ACCESS_ERR" in str(broken)
        for message in held:
            message.release()


async def test_messages_received_before_the_failure_are_returned_first(device: Device) -> None:
    async with ends(device) as pair, MessageReceiver(pair, depth=2) as receiver:
        messages = receiver.qp.messages()
        for text in (b"one", b"two"):
            await receiver.send(text)
        receiver.qp.to_error()
        for text in (b"one", b"two"):
            message = await anext(messages)
            assert bytes(message.data) == text
        with pytest.raises(BrokenResourceError):
            await anext(messages)


async def test_waiting_for_shared_messages_fails_when_broken_with_nothing_posted(device: Device) -> None:
    async with (
        ends(device) as pair,
        pair.domain.buffer_pool(64, 4) as pool,
        pair.remote_domain.shared_receive_queue(2) as srq,
        pair.remote_domain.completion_queue(256) as cq,
        pair.remote_domain.queue_pair(cq, srq=srq) as far,
    ):
        pair.near.to_reset()
        pair.near.connect(far.local_endpoint(), PEERS)
        far.connect(pair.near.local_endpoint(), PEERS)
        async with srq.messages(pool, 1) as messages:
            await until(lambda: srq.statistics().in_flight == 2)
            others = [await pool.lease() for _ in range(pool.statistics().free)]  # so that the queue is not refilled
            held = []
            for _ in range(2):
                await pair.near.send(pair.source[:8])
                held.append(await anext(messages))
            assert not srq.statistics().in_flight
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))
            await asyncio.wait([waiting], timeout=patience(20))
            assert isinstance(waiting.exception(), BrokenResourceError)
            for message in held:
                message.release()
            for buffer in others:
                buffer.release()


@needs(Capability.XRC_DOMAINS)
async def test_waiting_for_xrc_messages_fails_when_broken_with_nothing_posted(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        device.xrc_domain() as xrc_domain,
        domain.completion_queue(16) as cq,
        domain.shared_receive_queue(4, xrc_domain=xrc_domain, cq=cq) as srq,
    ):
        inbox = Inbox(srq._receive_queue, lambda received: received, lambda _: None)
        waiting = asyncio.ensure_future(anext(inbox))
        await asyncio.sleep(0)
        cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))
        await asyncio.wait([waiting], timeout=patience(20))
        assert isinstance(waiting.exception(), BrokenResourceError)


async def test_unclaimed_messages_return_to_the_pool_on_cancellation(device: Device) -> None:
    count = 600  # more than are awaited before other tasks run
    async with (
        ends(device) as pair,
        pair.remote_domain.buffer_pool(64, count) as pool,
        pair.remote_domain.completion_queue(1024) as cq,
        pair.remote_domain.shared_receive_queue(count) as srq,
        pair.remote_domain.queue_pair(cq, srq=srq) as far,
    ):
        pair.near.to_reset()
        pair.near.connect(far.local_endpoint(), PEERS)
        far.connect(pair.near.local_endpoint(), PEERS)
        with anyio.CancelScope() as scope:
            async with srq.messages(pool, 1) as messages:
                for _ in range(count):
                    await pair.near.send(pair.source[:8])
                await until(lambda: len(messages) == count)  # type: ignore[arg-type]
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert pool.statistics().leased == 0


@asynccontextmanager
async def open_shared_queue(pair: Ends) -> AsyncIterator[tuple[SharedReceiveQueue, QueuePair]]:
    """Open a shared receive queue and a queue pair that uses it; near is connected to that queue pair."""
    async with (
        pair.remote_domain.shared_receive_queue(2) as srq,
        pair.remote_domain.completion_queue(256) as cq,
        pair.remote_domain.queue_pair(cq, srq=srq) as far,
    ):
        pair.near.to_reset()
        pair.near.connect(far.local_endpoint(), PEERS, rnr_retry=7)
        far.connect(pair.near.local_endpoint(), PEERS, min_rnr_timer=1)
        yield srq, far


async def test_closing_a_shared_queue_ends_its_messages(device: Device) -> None:
    """Nothing is posted, so no receive is flushed that would end the iteration."""
    async with (
        ends(device) as pair,
        pair.remote_domain.buffer_pool(64, 2, limit=2) as pool,
        open_shared_queue(pair) as (srq, far),
    ):
        held = []

        async def read() -> None:
            async with srq.messages(pool, 1) as messages:
                held.extend([message async for message in messages])

        reading = asyncio.create_task(read())
        await until(lambda: srq.statistics().in_flight == 2)
        for _ in range(2):
            await pair.near.send(pair.source[:8])
        await until(lambda: srq.statistics().completed == 2)
        await far.aclose()
        await srq.aclose()
        await asyncio.wait([reading], timeout=patience(20))
        assert reading.done()
        reading.result()
        assert len(held) == 2
        for message in held:
            message.release()


async def test_a_shared_queue_is_refilled_after_concurrent_access(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ends(device) as pair, pair.remote_domain.buffer_pool(64, 4) as pool, open_shared_queue(pair) as (srq, _):
        post = srq._receive_into
        refused_posts: list[object] = []

        def post_later(*args: Any) -> Any:
            if len(refused_posts) < 3:
                refused_posts.append(args)
                raise ConcurrentAccessError("another thread is inside")
            return post(*args)

        async with srq.messages(pool, 1) as messages, asyncio.timeout(patience(20)):
            monkeypatch.setattr(srq, "_receive_into", post_later)
            for number in range(8):
                pair.source.buffer[0] = number
                await pair.near.send(pair.source[:1])
                with await anext(messages) as message:
                    assert message.data[0] == number
        assert len(refused_posts) == 3


async def test_a_failed_message_breaks_the_queue_pair_after_a_concurrent_modify(device: Device) -> None:
    """Move the queue pair to ERR afterwards, even if no receive is left that would trigger the move."""

    def fail(_: object) -> None:
        raise RuntimeError("a planted mistake")

    async with ends(device) as pair, asyncio.timeout(patience(20)):
        work = pair.far._work
        assert work is not None
        assert work.receive_queue is not None
        inbox = Inbox(work.receive_queue, fail, lambda _: None)
        _ = pair.far._receive_into(inbox, pair.target[:8])
        change = pair.far.handle.begin_modify()
        await pair.near.send(pair.source[:8])
        with pytest.raises(BrokenResourceError, match="a planted mistake"):
            await anext(inbox)
        for _ in range(3):  # turns of the loop, in which the move is attempted
            await asyncio.sleep(0)
        change.end()
        await until(lambda: pair.far.query().qp_state is QpState.ERR)
