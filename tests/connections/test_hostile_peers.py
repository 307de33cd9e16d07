"""Peers that violate the protocol after the handshake: only their own connection breaks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    Connection,
    Device,
    QpState,
    RegionSlice,
    WcStatus,
    WorkCompletionError,
    connect,
)
from aioverbs._connection.connection import end_of
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.wire import FIRST, TOTAL, WHOLE, FrameKind, GrantNotice, header
from tests.connections.ends import HOST, SMALL, Pair, pair, use_up
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

LOCAL, READ = AccessFlags.LOCAL_WRITE, AccessFlags.REMOTE_READ


Talk = Callable[[], Awaitable[None]]


def traffic_of(connection: Connection) -> MessageChannel:
    return end_of(connection).channel


@contextlib.asynccontextmanager
async def beside(ends: Pair) -> AsyncIterator[Talk]:
    """Another connection on the same completion queue. Returns a function that sends over it."""
    async with (
        connect(HOST, ends.listener.port, domain=ends.domain, settings=SMALL) as near,
        await ends.listener.accept() as far,
    ):

        async def talk() -> None:
            await near.send(b"as ever")
            assert await far.receive() == b"as ever"

        yield talk


Frames = Iterator[tuple[int, bytes]]


def credits_alone() -> Frames:
    while True:
        yield header(FrameKind.CREDITS), b""


def messages() -> Frames:
    while True:
        yield WHOLE, b"unread"


def fragments() -> Frames:
    yield WHOLE, b"unread"
    yield header(FrameKind.DATA, FIRST), TOTAL.pack(1 << 19) + b"x"
    while True:
        yield header(FrameKind.DATA), b"x"


def grants() -> Frames:
    for number in count():
        yield header(FrameKind.GRANT, number=number), GrantNotice(4096, 64, number, READ).pack()
        yield header(FrameKind.REVOKE, number=number), b""


async def send_until_broken(ends: Pair, frames: Frames, memory: RegionSlice, after: Talk) -> int:
    """Send without regard to credits until the connection breaks, and return the number of messages."""
    near, far = traffic_of(ends.near), traffic_of(ends.far)
    near.sender.add_credits = lambda count: None  # type: ignore[method-assign]
    near.sender.return_credits = lambda: None  # type: ignore[method-assign]
    near.user.on_control = lambda *_: None  # type: ignore[method-assign]
    sent = 0
    with contextlib.suppress(WorkCompletionError, BrokenResourceError):
        for immediate, data in frames:
            if far.broken is not None or sent == 100:
                break
            memory.buffer[: len(data)] = data
            await ends.near.qp.send(memory[: len(data)] if data else None, immediate=immediate)
            sent += 1
            await after()
    return sent


@pytest.mark.parametrize("frames", [credits_alone, messages, fragments, grants])
async def test_messages_without_credits_break_the_connection(device: Device, frames: Callable[[], Frames]) -> None:
    """No more messages are kept than there are credits, and other connections are not affected."""
    async with pair(device) as ends, beside(ends) as talk, ends.domain.register(64, LOCAL) as memory:
        far = traffic_of(ends.far)
        sent = await send_until_broken(ends, frames(), memory[:], talk)
        await until(lambda: far.broken is not None)
        assert "no credit" in str(far.broken), far.broken
        assert sent < 50
        assert (
            len(far.receiver.inbox) + far.receiver.unread.deferred + len(far.sender._pending_controls)
            <= SMALL.receive_depth
        )
        for _ in range(len(far.receiver.inbox)):  # what came before is the user's
            assert await ends.far.receive() == b"unread"
        with pytest.raises(BrokenResourceError, match="protocol violation"):
            await ends.far.receive()
        await talk()


async def test_too_many_handshake_messages_break_the_connection(device: Device) -> None:
    """When the handshake goes over the queue pair, no more is kept before the secret is proved."""
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        far = traffic_of(ends.far)
        far.receiver._handshake_messages_left = 1 << 30  # as with rdma_cm, until the peer's offer is known
        with contextlib.suppress(WorkCompletionError, BrokenResourceError):
            for _ in range(20):
                await ends.near.qp.send(memory[:8])
        await until(lambda: far.broken is not None)
        assert "handshake" in str(far.broken)
        assert len(far.receiver.inbox) <= 4


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
async def test_a_message_by_write_with_immediate_is_not_delivered(device: Device, early: bool) -> None:
    """The receive holds data of an earlier message, maybe of another peer, which must not be delivered."""
    access = LOCAL | AccessFlags.REMOTE_WRITE
    async with pair(device) as ends, ends.domain.register(64, access) as memory:
        for _ in range(2 * SMALL.receive_depth):
            await ends.near.send(b"somebody's password")
            await ends.far.receive()
        await ends.far.grant(memory[:32], AccessFlags.REMOTE_WRITE)
        granted = await ends.near.receive_grant()
        far = traffic_of(ends.far)
        if early:
            await until(lambda: ends.near.traffic().credits + ends.far.traffic().owed == SMALL.receive_depth)
            far.receiver._handshake_messages_left = 1 << 30  # nothing is on its way
        with contextlib.suppress(WorkCompletionError, BrokenResourceError):
            await ends.near.qp.write_with_immediate(memory[32:51], granted.remote[:19], WHOLE)
        async with asyncio.timeout(patience(20)):
            with pytest.raises(BrokenResourceError, match=r"protocol violation.*immediate"):
                await ends.far.receive()


async def test_an_internal_error_breaks_only_its_connection(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """An error while a message is processed neither appears in awaits of other connections nor is lost."""
    async with pair(device) as ends, beside(ends) as talk:
        far = traffic_of(ends.far)

        def fail(*_: object) -> None:
            raise RuntimeError("a planted mistake")

        far.user.on_control = fail  # type: ignore[assignment, method-assign]
        receiving = asyncio.create_task(ends.far.receive())
        await asyncio.sleep(0)
        await traffic_of(ends.near).sender.send_frame(FrameKind.REVOKE, 1)
        await talk()
        with pytest.raises(BrokenResourceError, match="a planted mistake"):
            await receiving
        await until(lambda: far.broken is not None)
        assert "a planted mistake" in str(far.broken)
        assert ends.far.qp.query().qp_state is QpState.ERR
        with pytest.raises(BrokenResourceError):
            await ends.far.send(b"too late")
        with pytest.raises(BrokenResourceError):
            await ends.near.receive()
        await talk()
    assert [record.exc_info is not None for record in caplog.records if "planted" in record.message] == [True]


# ---- Grants


async def test_revoke_does_not_wait_for_a_stalled_send_queue(device: Device) -> None:
    """The peer acknowledges late or never."""
    async with (
        pair(device) as ends,
        ends.domain.register(64, LOCAL | READ | AccessFlags.MW_BIND) as memory,
        ends.domain.register(64) as local,
    ):
        grant = await ends.near.grant(memory, READ)
        granted = await ends.far.receive_grant()
        hold(device, ends.near.qp)
        try:
            revoking = asyncio.create_task(grant.revoke(timeout_s=0.01))
            await until(lambda: grant.revoked, 5)
            with pytest.raises(WorkCompletionError) as caught:
                await ends.far.qp.read(local, granted.remote)
            assert caught.value.status is WcStatus.REM_ACCESS_ERR
        finally:
            unhold(device, ends.near.qp)
        await asyncio.wait([revoking])
        assert revoking.exception() is None or isinstance(revoking.exception(), BrokenResourceError)


async def test_unread_revoked_grants_are_bounded(device: Device) -> None:
    """Revoked grants are returned as well, since the peer may have named them in messages, but only a limited number is
    kept.
    """
    settings = replace(SMALL, max_grants=2)
    async with pair(device, settings) as ends, ends.domain.register(64, LOCAL) as memory:
        grants = []
        for _ in range(7):
            async with await ends.near.grant(memory, READ) as grant:
                grants.append(grant)
        grants.append(await ends.near.grant(memory[:32], READ))
        news = end_of(ends.far).grants
        assert news is not None
        await until(lambda: news._remote_grants)
        received = [await ends.far.receive_grant() for _ in range(4)]
        assert [each.remote for each in received] == [each.remote for each in grants[-4:]]
        assert [each.revoked for each in received] == [True, True, True, False]
        assert not news._unread


async def test_reusing_a_grant_number_too_early_breaks_the_connection(device: Device) -> None:
    """At most one acknowledgement for each number waits for a credit."""
    async with pair(device) as ends, ends.domain.register(64, LOCAL) as memory:
        await use_up(ends.far)
        grant = await ends.near.grant(memory, READ)
        await grant.revoke(timeout_s=0)
        await until(lambda: traffic_of(ends.far).sender._pending_controls)
        notice = GrantNotice(grant.remote.address, 64, grant.remote.rkey, READ)
        await traffic_of(ends.near).sender.send_frame(FrameKind.GRANT, grant._number, notice.pack())
        with pytest.raises(BrokenResourceError, match="again"):
            await ends.far.receive()
