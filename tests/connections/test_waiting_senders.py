"""Senders that wait for the peer poll or sleep as the message model says, like tasks that await a request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from aioverbs import BrokenResourceError, Connection, Device, MessageModel, connect, listen
from aioverbs._connection.connection import end_of
from aioverbs._verbs.completion_queue import CompletionQueue
from tests.connections.ends import HOST, SMALL, deeper, use_up
from tests.data_path.turns import TURNS, polled_turns
from tests.waiting import until

LONG = bytes(300_000)  # announced
SETTINGS = deeper(SMALL, max_message=1 << 20)
SPINNING = deeper(SETTINGS, spin_ns=20_000_000)  # both ends are on this loop, which spins for one of them

Fill = Callable[[Connection], Awaitable[object]]


async def fill_announced(connection: Connection) -> None:
    """Announce messages until one more would have to wait for an answer."""
    announcer = end_of(connection).announcer
    while announcer is None or announcer._free:
        await connection.send(LONG)
        announcer = end_of(connection).announcer


@contextlib.asynccontextmanager
async def ends(device: Device, model: MessageModel) -> AsyncIterator[tuple[Connection, Connection, CompletionQueue]]:
    settings = SPINNING if model is MessageModel.LOW_LATENCY else SETTINGS
    async with (
        device.resource_domain(message_model=model) as domain,
        listen(HOST, domain=domain, settings=settings) as listener,
        connect(HOST, listener.port, domain=domain, settings=settings) as near,
        await listener.accept() as far,
    ):
        cq = end_of(near).qp._recv_cq
        assert cq is not None
        yield near, far, cq


async def until_quiet(cq: CompletionQueue) -> None:
    """Wait until no turn polls the completion queue."""
    async with asyncio.timeout(20):
        while await polled_turns(cq):  # noqa: ASYNC110  (it is counted)
            await asyncio.sleep(0.002)


def is_waiting(connection: Connection) -> bool:
    """Return whether a sender waits for a credit, or for the answer to a message."""
    end = end_of(connection)
    waits = [end.channel.sender._credit_wait]
    if end.announcer is not None:
        waits.append(end.announcer._answer_wait)
    return any(wait.is_waiting for wait in waits)


every_fill = pytest.mark.parametrize(("fill", "message"), [(use_up, b"short"), (fill_announced, LONG)])


@every_fill
@pytest.mark.parametrize(
    ("model", "is_polled"),
    [
        (MessageModel.FORCE_LOW_LATENCY, True),
        (MessageModel.LOW_LATENCY, True),
        (MessageModel.HIGH_BANDWIDTH, False),
    ],
)
async def test_a_waiting_sender_polls_if_the_model_does(
    device: Device, model: MessageModel, is_polled: bool, fill: Fill, message: bytes
) -> None:
    async with ends(device, model) as (near, far, cq):
        await fill(near)
        await until_quiet(cq)
        for _ in range(3):
            waiting = asyncio.create_task(near.send(message, immediate=0))
            await until(lambda: is_waiting(near))
            count = await polled_turns(cq)
            assert count >= TURNS / 2 if is_polled else count <= 1
            waiting.cancel()
            await asyncio.wait([waiting])
            assert not is_waiting(near)
            await until_quiet(cq)
        waiting = asyncio.create_task(near.send(message, immediate=0))
        await until(lambda: is_waiting(near))
        while not waiting.done():
            await far.receive()
        await waiting


@every_fill
async def test_waits_of_senders_poll_sometimes_by_default(
    device: Device, fill: Fill, message: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one of many, to find out whether that pays."""
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", lambda: 8)
    async with ends(device, MessageModel.DEFAULT) as (near, _, cq):
        await fill(near)
        before = cq.statistics().spins
        for _ in range(200):
            waiting = asyncio.create_task(near.send(message, immediate=0))
            for _ in range(4):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert cq.statistics().spins > before


@every_fill
async def test_a_waiting_sender_fails_with_the_connection(device: Device, fill: Fill, message: bytes) -> None:
    async with ends(device, MessageModel.FORCE_LOW_LATENCY) as (near, far, cq):
        await fill(near)
        waiting = asyncio.create_task(near.send(message, immediate=0))
        await until(lambda: is_waiting(near))
        far.abort()
        with pytest.raises(BrokenResourceError):
            await waiting
        assert not is_waiting(near)
        await until_quiet(cq)


async def test_an_interrupt_loses_no_wake_up(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that raises while a sender is woken: a later message wakes it."""
    async with ends(device, MessageModel.HIGH_BANDWIDTH) as (near, far, _):
        await use_up(near)
        waiting = asyncio.create_task(near.send(b"short", immediate=0))
        await until(lambda: is_waiting(near))
        wait = end_of(near).channel.sender._credit_wait

        def interrupt(_: object) -> None:
            monkeypatch.undo()
            raise ZeroDivisionError

        monkeypatch.setattr("aioverbs._connection.frame_wait.wake", interrupt)
        with pytest.raises(ZeroDivisionError):
            wait.wake()
        assert is_waiting(near)
        while not waiting.done():
            await far.receive()
        await waiting
