"""Two connected ends in one process, and helpers for tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest

from aioverbs import Connection, ConnectionListener, ConnectionSettings, Device, ResourceDomain, connect, listen
from aioverbs._connection.connection import end_of
from tests.pace import patience
from tests.waiting import until

__all__ = [
    "SMALL",
    "Pair",
    "cancel_by_its_scope",
    "cancel_by_its_task",
    "every_way_to_cancel",
    "pair",
    "receive_while_pages_are_given_back",
    "root_of",
    "use_up",
    "works",
]

SMALL = ConnectionSettings(buffer_size=1024, receive_depth=4, send_buffers=2, send_depth=16, max_message=1 << 20)
"""Of few and small buffers, so that everything has to wait."""

HOST = "127.0.0.1"


@dataclass
class Pair:
    """Both ends, their common domain, and the listener of the far end."""

    near: Connection
    far: Connection
    domain: ResourceDomain
    listener: ConnectionListener


@contextlib.asynccontextmanager
async def pair(
    device: Device,
    settings: ConnectionSettings = SMALL,
    peer_settings: ConnectionSettings | None = None,
    **both: Any,
) -> AsyncIterator[Pair]:
    """Connect two ends. The block may close either end."""
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=peer_settings or settings, **both) as listener,
    ):
        near = await connect(HOST, listener.port, domain=domain, settings=settings, **both)
        try:
            far = await listener.accept()
            try:
                yield Pair(near, far, domain, listener)
            finally:
                far.abort()
        finally:
            near.abort()


def deeper(settings: ConnectionSettings, **changes: Any) -> ConnectionSettings:
    """Return these settings with some fields replaced."""
    return replace(settings, **changes)


def root_of(error: BaseException) -> BaseException:
    """Return the exception at the end of the chain of causes."""
    return error if error.__cause__ is None else root_of(error.__cause__)


async def use_up(connection: Connection) -> int:
    """Send messages until no credit is left but those that are reserved, and return the number of messages.

    Messages with immediate data share no frame, so that each uses a credit.
    """
    credit = end_of(connection).channel.sender._credits
    assert credit is not None
    count = 0
    while credit.sendable:
        await connection.send(b"one of them", immediate=0)
        count += 1
    return count


async def works(near: Connection, far: Connection) -> None:
    """Check that both ends send and receive."""
    async with asyncio.timeout(patience(10)):
        for one, other in ((near, far), (far, near)):
            await one.send(b"as ever")
            assert await other.receive() == b"as ever"


async def receive_while_pages_are_given_back(sender: Connection, receiver: Connection, *ends: Connection) -> None:
    """Check that messages of many lengths arrive, while ends give their pages back in each turn of the loop.

    :param receiver: end that gets what `sender` sends, which may be the same, with a peer that echoes.
    """
    is_over = False

    async def give_back() -> None:
        while not is_over:
            for each in ends:
                end_of(each).channel.give_back_pages()
            await asyncio.sleep(0)

    async def send() -> None:
        for number in range(200):
            await sender.send(bytes([number]) * (number * 613))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(give_back())
        tasks.create_task(send())
        for number in range(200):
            assert await receiver.receive() == bytes([number]) * (number * 613)
        is_over = True


Cancel = Callable[[Coroutine[Any, Any, object], Callable[[], object]], Coroutine[Any, Any, None]]


async def cancel_by_its_task(awaited: Coroutine[Any, Any, object], when: Callable[[], object]) -> None:
    """Await a call, and cancel its task when a condition holds, as asyncio does; and again in the next iteration of the
    loop.
    """
    task = asyncio.ensure_future(awaited)
    await until(when)
    assert not task.done()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def cancel_by_its_scope(awaited: Coroutine[Any, Any, object], when: Callable[[], object]) -> None:
    """Await a call, and cancel it when a condition holds, as anyio does: at each await from then on."""
    scope = anyio.CancelScope()

    async def wait() -> None:
        with scope:
            await awaited

    task = asyncio.create_task(wait())
    await until(when)
    assert not task.done()
    scope.cancel()
    await task
    assert scope.cancelled_caught


every_way_to_cancel = pytest.mark.parametrize("cancel", [cancel_by_its_task, cancel_by_its_scope])
