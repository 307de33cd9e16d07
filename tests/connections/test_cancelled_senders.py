"""Cancelled senders: what was sent goes out, and waiting callers are notified."""

import asyncio
import errno
from collections.abc import Callable
from typing import Any
from unittest import mock

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    BusyResourceError,
    ConcurrentAccessError,
    Connection,
    Device,
    MemoryRegion,
    QpState,
    RemoteGrant,
    VerbsError,
    connect,
)
from aioverbs._connection.connection import end_of
from aioverbs._core.data_path.data_path import Operation
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL, cancel_by_its_task, deeper, pair, root_of, use_up
from tests.connections.serving import asked, served
from tests.garbage import collect_garbage
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

TARGET = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
NARROW = deeper(SMALL, send_depth=6, receive_depth=8, close_timeout_s=2)
"""Two buffers, and a send queue that is soon full."""


async def granted(giver: Connection, taker: Connection, memory: MemoryRegion) -> RemoteGrant:
    await giver.grant(memory, AccessFlags.REMOTE_WRITE)
    return await taker.receive_grant()


def fill(connection: Connection, source: MemoryRegion, target: RemoteGrant) -> list[Operation[None]]:
    """Use all places of a blocked send queue, and wait for one more."""
    writes: list[Operation[None]] = []
    while not connection.qp.statistics().sends.queued:
        assert len(writes) < 20
        writes.append(connection.write(source[8:16], target[8:16]))
    return writes


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_cancelling_a_send_does_not_withdraw_the_message_before(device: Device) -> None:
    """Messages with immediate data share no frame, so that each takes a buffer."""
    async with (
        pair(device, NARROW) as ends,
        ends.domain.register(64) as source,
        ends.domain.register(64, TARGET) as target,
    ):
        there = await granted(ends.far, ends.near, target)
        hold(device, ends.near.qp)
        writes = fill(ends.near, source, there)
        await ends.near.send(b"one", immediate=1)
        await ends.near.send(b"two", immediate=2)
        waits = ends.near.traffic().waits
        await cancel_by_its_task(ends.near.send(b"three", immediate=3), lambda: ends.near.traffic().waits > waits)
        collect_garbage()
        waits = ends.near.traffic().waits
        sending = asyncio.create_task(ends.near.send(b"four", immediate=4))
        await until(lambda: ends.near.traffic().waits > waits)
        unhold(device, ends.near.qp)
        with anyio.fail_after(patience(20)):
            for write in writes:
                await write
            await sending
            assert [await ends.far.receive() for _ in range(3)] == [b"one", b"two", b"four"]


@pytest.mark.every_way
@needs(Capability.FAULT_PLAN)
async def test_cancelling_write_with_immediate_keeps_an_announced_write(device: Device) -> None:
    async with (
        pair(device, NARROW) as ends,
        ends.domain.register(64) as source,
        ends.domain.register(64, TARGET) as target,
    ):
        source.buffer[:8] = b"the data"
        there = await granted(ends.far, ends.near, target)
        hold(device, ends.near.qp)
        writes = fill(ends.near, source, there)
        sent = ends.near.traffic().messages_sent
        await cancel_by_its_task(
            ends.near.write_with_immediate(source[:8], there[:8], 7), lambda: ends.near.traffic().messages_sent > sent
        )
        collect_garbage()
        unhold(device, ends.near.qp)
        with anyio.fail_after(patience(20)):
            for write in writes:
                await write
            assert await ends.far.receive_with_immediate() == (b"", 7)
        assert bytes(target.buffer[:8]) == b"the data"


class InUse:
    """A verb that fails with ConcurrentAccessError a few times."""

    def __init__(self, verb: Callable[..., Any], times: int, error: type[Exception] = ConcurrentAccessError) -> None:
        self._verb = verb
        self._error = error
        self.left = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self._error("another thread is inside")
        return self._verb(*args, **options)


@pytest.mark.every_way
async def test_waiters_learn_of_the_end_while_a_thread_is_in_a_verb(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(device) as ends:
        await use_up(ends.near)
        waits = ends.near.traffic().waits
        waiting = [asyncio.create_task(ends.near.send(b"")), asyncio.create_task(ends.near.receive())]
        await until(lambda: ends.near.traffic().waits > waits)
        qp, traffic = ends.near.qp, end_of(ends.near).channel
        assert traffic is not None
        transition = InUse(qp._transition, 3)
        monkeypatch.setattr(qp, "_transition", transition)
        traffic.fail("a test")
        await asyncio.wait(waiting, timeout=patience(20))
        assert all(isinstance(task.exception(), BrokenResourceError) for task in waiting)
        await until(lambda: qp.qp_state is QpState.ERR)
        assert not transition.left


@pytest.mark.parametrize("error", [ConcurrentAccessError, BusyResourceError])
async def test_receives_and_credits_are_retried_after_a_concurrent_verb(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async with pair(device) as ends:
        qp = ends.far.qp
        refused = [InUse(qp._post_receives, 2, error), InUse(qp.send, 2, error)]
        for name, verb in zip(("_post_receives", "send"), refused, strict=True):
            monkeypatch.setattr(qp, name, verb)
        with anyio.fail_after(patience(20)):
            for number in range(30):
                await ends.near.send(bytes([number]))
                assert await ends.far.receive() == bytes([number])
        assert not any(verb.left for verb in refused)


@pytest.mark.parametrize("refusal", [None, ConcurrentAccessError, BusyResourceError])
async def test_a_receive_that_cannot_be_posted_again_breaks_the_connection(
    device: Device, monkeypatch: pytest.MonkeyPatch, refusal: type[Exception] | None
) -> None:
    """The cause is reported, whether the first attempt fails or a later one. Messages that arrived are not lost."""
    async with pair(device) as ends:
        failure = VerbsError("ibv_post_recv", errno.ENOMEM)
        refusals = [refusal("another thread is inside")] if refusal is not None else []
        monkeypatch.setattr(ends.far.qp, "_post_receives", mock.Mock(side_effect=[*refusals, failure]))
        await ends.near.send(b"it arrives")
        async with asyncio.timeout(patience(10)):
            assert await ends.far.receive() == b"it arrives"
            with pytest.raises(BrokenResourceError, match="ibv_post_recv") as caught:
                await ends.far.receive()
        assert root_of(caught.value) is failure
        with pytest.raises(BrokenResourceError, match="a receive cannot be posted again"):
            await ends.far.send(b"no more")
        async with asyncio.timeout(patience(10)):
            with pytest.raises(BrokenResourceError):
                await ends.near.receive()


async def test_a_grant_block_raises_the_exception_of_its_body(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64) as memory:
        grant = await ends.near.grant(memory, AccessFlags.REMOTE_READ)

        async def fail() -> None:
            async with grant:
                ends.far.abort()
                await until(lambda: ends.near.broken is not None)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            await fail()
        assert any("and revoking" in note for note in caught.value.__notes__)
        assert grant.revoked


async def test_a_broken_shared_completion_queue_is_replaced(device: Device) -> None:
    """The broken queue is closed with the last of its connections."""
    async with pair(device) as ends:
        cq = ends.near.qp._send_cq
        assert cq is not None
        cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))
        ends.near.abort()
        ends.far.abort()
        for _ in range(2):
            near = await connect(HOST, ends.listener.port, domain=ends.domain, settings=SMALL)
            far = await ends.listener.accept()
            await near.send(b"hello")
            assert await far.receive() == b"hello"
            near.abort()
            far.abort()
        await until(lambda: cq.closed)


async def test_a_second_stop_with_an_earlier_deadline_wins(device: Device) -> None:
    async def handler(_: Connection) -> None:
        await asyncio.Event().wait()

    async with (
        device.resource_domain() as domain,
        served(domain, handler, drain_timeout_s=600) as server,
        asked(server, domain),
    ):
        await until(lambda: server.statistics().connections == 1)
        first = asyncio.create_task(server.drain())
        await until(lambda: server._stopping is not None)
        with anyio.fail_after(patience(20)):
            await server.drain(0)
            await first


class With:
    """An object with some of its attributes replaced."""

    def __init__(self, whole: object, **others: object) -> None:
        self._whole = whole
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


@pytest.mark.parametrize("error", [ConcurrentAccessError, lambda _: VerbsError("ibv_poll_cq", errno.EIO)])
async def test_waiters_learn_of_a_lost_peer_even_if_polling_fails(device: Device, error: type[Exception]) -> None:
    async with pair(device) as ends:
        traffic: Any = end_of(ends.near).channel
        queue = traffic.receive_queue
        drain = InUse(queue.dispatcher.drain, 3, error)
        traffic.receive_queue = With(queue, dispatcher=With(queue.dispatcher, watched=True, drain=drain))
        receiving = asyncio.create_task(ends.near.receive())
        await asyncio.sleep(0)
        ends.far.abort()
        await asyncio.wait([receiving], timeout=patience(20))
        assert isinstance(receiving.exception(), BrokenResourceError)
        assert drain.left < 3


@pytest.mark.every_way
async def test_closing_while_a_thread_is_in_a_verb(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent data is delivered, the peer is notified of the end, and everything is closed."""
    async with pair(device) as ends:
        near: Any = ends.near
        qp = near.qp
        owner = qp._lifecycle.owner
        sender = end_of(near).channel.sender
        post, write, check = InUse(sender.frames.post, 3), InUse(qp.write, 3), InUse(owner.check, 3)
        await near.send(b"hello")
        monkeypatch.setattr(sender, "frames", With(sender.frames, post=post))
        monkeypatch.setattr(qp, "write", write)
        qp._lifecycle.owner = With(owner, check=check)
        await near.aclose()
        assert near.closed
        assert qp.closed
        assert (post.left, write.left, check.left) == (0, 0, 0)
        assert await ends.far.receive() == b"hello"
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()
