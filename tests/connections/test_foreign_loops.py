"""Connections belong to one event loop on every kind of domain: calls on other loops are refused before anything
changes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from aioverbs import AccessFlags, AffinityError, Connection, Device, ThreadModel, connect, listen
from aioverbs._verbs.base_domain import Domain
from tests.connections.ends import HOST, SMALL, pair, works
from tests.pace import patience
from tests.waiting import until

ALL = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
CrossLoopCall = Callable[[], Awaitable[object]]


async def refused(*calls: CrossLoopCall) -> None:
    """Check that each call raises AffinityError at once on a loop that owns nothing."""

    async def call_all() -> None:
        for call in calls:
            async with asyncio.timeout(patience(5)):
                with pytest.raises(AffinityError, match="belongs to thread 'MainThread'"):
                    await call()

    await asyncio.to_thread(asyncio.run, call_all())


@asynccontextmanager
async def placed(device: Device, where: str) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two ends on a domain of some thread model. Except for SINGLE, no loop owns the domain."""
    async with AsyncExitStack() as stack:
        domain: Domain = await stack.enter_async_context(device.protection_domain())
        if where != "PD":
            domain = await stack.enter_async_context(device.resource_domain(thread_model=ThreadModel[where]))
        listener = await stack.enter_async_context(listen(HOST, domain=domain, settings=SMALL))
        near = await stack.enter_async_context(connect(HOST, listener.port, domain=domain, settings=SMALL))
        yield near, await stack.enter_async_context(await listener.accept())


@pytest.mark.parametrize("where", ["PD", "SAFE", "UNSAFE", "SINGLE"])
async def test_connection_methods_refuse_other_loops(device: Device, where: str) -> None:
    async with placed(device, where) as (near, far):
        assert near.owner is not None
        assert near.owner.loop is asyncio.get_running_loop()
        before = near.traffic()
        await refused(lambda: near.send(b"x"), near.receive, near.send_eof, near.receive_grant, near.aclose)
        assert near.traffic() == before
        await works(near, far)


@pytest.mark.parametrize("where", ["PD", "SAFE", "UNSAFE"])
async def test_one_sided_requests_refuse_other_loops(device: Device, where: str) -> None:
    async with placed(device, where) as (near, far), near._domain.register(64) as memory:
        grant = await far.grant(memory[:32], ALL)
        granted = await near.receive_grant()
        local, before = memory[32:40], near.qp.statistics().sends.posted
        await refused(
            lambda: near.write(local, granted[:8]),
            lambda: near.read(local, granted[:8]),
            lambda: near.compare_and_swap(granted[:8], 0, 1),
            lambda: near.fetch_and_add(granted[:8], 1),
            lambda: near.write_with_immediate(local, granted[:8], 7),
        )
        assert near.qp.statistics().sends.posted == before
        assert await near.fetch_and_add(granted[:8], 1) == 0
        await works(near, far)
        await grant.revoke()


@pytest.mark.every_way
async def test_sending_from_another_loop_while_the_owner_waits(device: Device) -> None:
    """The owner waits for credits and holds the lock; the refused call leaves both alone."""
    async with pair(device) as ends:
        await ends.near.send(b"unread")
        large = asyncio.create_task(ends.near.send(bytes(64 * 1024)))
        await until(lambda: ends.near.traffic().waits)
        await refused(lambda: ends.near.send(b"x"), lambda: ends.near.send(bytes(8192)), ends.near.send_eof)
        second = asyncio.create_task(ends.near.send(b"second"))
        async with asyncio.timeout(patience(10)):
            assert await ends.far.receive() == b"unread"
            assert await ends.far.receive() == bytes(64 * 1024)
            assert await ends.far.receive() == b"second"
            await large
            await second
        await works(ends.near, ends.far)


async def test_affinity_is_checked_where_a_call_is_awaited(device: Device) -> None:
    """As with `asyncio.run_coroutine_threadsafe`, where the call is made on another loop."""
    async with pair(device) as ends:
        sending, receiving = ends.near.send(b"x"), ends.near.receive()
        await refused(lambda: sending, lambda: receiving)
        sent = await asyncio.to_thread(lambda: ends.near.send(b"y"))
        await sent
        assert await ends.far.receive() == b"y"
