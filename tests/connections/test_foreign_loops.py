"""Connections, listeners and servers belong to a loop: another one is refused, before anything has changed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from aioverbs import AccessFlags, AffinityError, Connection, Device, ForkedProcessError, ThreadModel, connect, listen
from aioverbs.domain import Domain
from tests.connections.ends import HOST, SMALL, pair
from tests.connections.serving import asked, served
from tests.core.children import in_child
from tests.pace import patience
from tests.waiting import until

pytestmark = pytest.mark.once

READ = AccessFlags.REMOTE_READ
Call = Callable[[], Awaitable[object]]


async def refused(*calls: Call) -> None:
    """Each of them raises AffinityError, and waits for nothing, on a loop that owns nothing."""

    async def call_all() -> None:
        for call in calls:
            async with asyncio.timeout(patience(5)):
                with pytest.raises(AffinityError, match="belongs to thread 'MainThread'"):
                    await call()

    await asyncio.to_thread(asyncio.run, call_all())


async def works(near: Connection, far: Connection) -> None:
    async with asyncio.timeout(patience(10)):
        for one, other in ((near, far), (far, near)):
            await one.send(b"as ever")
            assert await other.receive() == b"as ever"


@asynccontextmanager
async def placed(device: Device, where: str) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connected ends on a domain of another kind than `pair` has: nobody in particular owns what is made there."""
    async with AsyncExitStack() as stack:
        domain: Domain = await stack.enter_async_context(device.protection_domain())
        if where != "PD":
            domain = await stack.enter_async_context(device.resource_domain(thread_model=ThreadModel[where]))
        listener = await stack.enter_async_context(listen(HOST, domain=domain, settings=SMALL))
        near = await stack.enter_async_context(connect(HOST, listener.port, domain=domain, settings=SMALL))
        yield near, await stack.enter_async_context(await listener.accept())


@pytest.mark.parametrize("where", ["PD", "SAFE", "UNSAFE"])
async def test_a_connection_is_its_loops_wherever_it_is_made(device: Device, where: str) -> None:
    async with placed(device, where) as (near, far):
        assert near.owner is not None
        assert near.owner.loop is asyncio.get_running_loop()
        before = near.traffic()
        await refused(lambda: near.send(b"x"), near.receive, near.send_eof, near.receive_grant, near.abort, near.aclose)
        assert near.traffic() == before
        await works(near, far)


async def test_sending_beside_the_owner(device: Device) -> None:
    """While the owner waits for credits, under its lock: that stays the owner's."""
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


async def test_a_call_that_is_made_here_and_awaited_elsewhere(device: Device) -> None:
    """As with `asyncio.run_coroutine_threadsafe`: it counts where it runs."""
    async with pair(device) as ends:
        sending, receiving = ends.near.send(b"x"), ends.near.receive()
        await refused(lambda: sending, lambda: receiving)
        sent = await asyncio.to_thread(lambda: ends.near.send(b"y"))
        await sent
        assert await ends.far.receive() == b"y"


async def test_the_end_of_sending(device: Device) -> None:
    async with pair(device) as ends:
        await refused(ends.near.send_eof, ends.near.as_byte_stream().send_eof)
        await works(ends.near, ends.far)
        await ends.near.send_eof()
        with pytest.raises(anyio.EndOfStream):
            await ends.far.receive()


async def test_what_is_left_of_a_message_as_bytes(device: Device) -> None:
    async with pair(device) as ends:
        stream = ends.near.as_byte_stream()
        await ends.far.send(b"abcdef")
        assert await stream.receive(2) == b"ab"
        await refused(stream.receive, lambda: stream.send(b"x"), stream.aclose)
        assert await stream.receive() == b"cdef"


async def test_grants(device: Device) -> None:
    """One that is there, one that is waited for, and taking one back."""
    async with pair(device) as ends, ends.domain.register(64) as memory, ends.domain.register(64) as local:
        memory.buffer[:5] = b"hello"
        grant = await ends.near.grant(memory, READ)
        objects = ends.near.statistics()
        await refused(lambda: ends.near.grant(memory, READ), grant.revoke)
        assert ends.near.statistics() == objects
        assert not grant.revoked
        await until(lambda: ends.far._grants is not None and ends.far._grants._news)
        await refused(ends.far.receive_grant)
        granted = await ends.far.receive_grant()
        waiting = asyncio.create_task(ends.far.receive_grant())
        await asyncio.sleep(0)
        await refused(ends.far.receive_grant)
        async with asyncio.timeout(patience(10)):
            second = await ends.near.grant(memory, READ)
            assert (await waiting).remote == second.remote
            await ends.far.read(local[:5], granted[:5])
            assert bytes(local.buffer[:5]) == b"hello"
            await grant.revoke()
            await second.revoke()
        assert granted.revoked
        await works(ends.near, ends.far)


# ---- Listeners and servers


async def test_a_listener(device: Device) -> None:
    """With a connection that is ready, while the owner waits for one, and after its end."""
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=SMALL) as listener:
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as near:
            await until(lambda: listener.statistics().connections)
            await refused(listener.accept, lambda: anext(aiter(listener)), listener.aclose)
            async with await listener.accept() as far:
                await works(near, far)
        accepting = asyncio.create_task(listener.accept())
        await asyncio.sleep(0)
        await refused(listener.accept, listener.aclose)
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as near, await accepting as far:
            await works(near, far)
        await listener.aclose()
        await asyncio.to_thread(asyncio.run, listener.aclose())  # which is fine, as it is twice here


async def test_a_server(device: Device) -> None:
    async with device.resource_domain() as domain, served(domain) as server:
        await refused(server.wait_closed)
        waiting = asyncio.create_task(server.wait_closed())
        async with asyncio.timeout(patience(20)), asked(server, domain) as connection:
            await refused(server.stop, lambda: server.stop(0), server.wait_closed, server.aclose)
            assert not waiting.done()
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
            async with asked(server, domain) as another:
                await another.send(b"still served")
                assert await another.receive() == b"still served"
            await connection.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await connection.receive()
        async with asyncio.timeout(patience(10)):
            await server.stop()
            await waiting
        await asyncio.to_thread(asyncio.run, server.aclose())


async def test_the_child_of_a_fork(device: Device) -> None:
    """Closing there does nothing: both are the parent's."""
    async with (
        device.resource_domain() as domain,
        served(domain) as server,
        listen(HOST, domain=domain, settings=SMALL) as listener,
    ):

        async def close() -> None:
            async with asyncio.timeout(patience(5)):
                await listener.aclose()
                await server.aclose()
                with pytest.raises(ForkedProcessError):
                    await server.stop()

        in_child(lambda: asyncio.run(close()))
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as near, await listener.accept() as far:
            await works(near, far)
        async with asked(server, domain) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
