"""Senders that wait for the peer poll or sleep as the message model says, like tasks that await a request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from aioverbs import Connection, Device, MessageModel, connect, listen
from aioverbs._connection.connection import end_of
from aioverbs._verbs.completion_queue import CompletionQueue
from tests.connections.ends import HOST, SMALL, deeper, use_up
from tests.data_path.turns import TURNS, polled_turns

LONG = bytes(300_000)  # announced
SETTINGS = deeper(SMALL, max_message=1 << 20)

Fill = Callable[[Connection], Awaitable[object]]


async def fill_announced(connection: Connection) -> None:
    """Announce messages until one more would have to wait for an answer."""
    announcer = end_of(connection).announcer
    while announcer is None or announcer._free:
        await connection.send(LONG)
        announcer = end_of(connection).announcer


@contextlib.asynccontextmanager
async def ends(device: Device, model: MessageModel) -> AsyncIterator[tuple[Connection, Connection, CompletionQueue]]:
    async with (
        device.resource_domain(message_model=model) as domain,
        listen(HOST, domain=domain, settings=SETTINGS) as listener,
        connect(HOST, listener.port, domain=domain, settings=SETTINGS) as near,
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


@pytest.mark.parametrize(("fill", "message"), [(use_up, b"short"), (fill_announced, LONG)])
@pytest.mark.parametrize(
    ("model", "polled"), [(MessageModel.FORCE_LOW_LATENCY, TURNS), (MessageModel.HIGH_BANDWIDTH, 0)]
)
async def test_a_waiting_sender_polls_if_the_model_does(
    device: Device, model: MessageModel, polled: int, fill: Fill, message: bytes
) -> None:
    async with ends(device, model) as (near, far, cq):
        await fill(near)
        await until_quiet(cq)
        for _ in range(3):
            waiting = asyncio.create_task(near.send(message, immediate=0))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert await polled_turns(cq) >= polled / 2
            waiting.cancel()
            await asyncio.wait([waiting])
            await until_quiet(cq)
        waiting = asyncio.create_task(near.send(message, immediate=0))
        await asyncio.sleep(0.01)
        while not waiting.done():
            await far.receive()
        await waiting
