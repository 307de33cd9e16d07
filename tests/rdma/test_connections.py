"""Connections by rdma_cm, through the kernel's connection manager, with both ends on one event loop."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    Connection,
    ConnectionListener,
    ConnectionRejectedError,
    ConnectionSettings,
    HandshakeError,
    UnreachableError,
    connect,
    listen,
    serve,
)
from aioverbs._connection.cm_control import CmControlChannel
from aioverbs._connection.connection import end_of
from aioverbs.rdma_cm import Channel
from tests.rdma.cm import Side, free_port, nothing_left, sides
from tests.waiting import until

pytestmark = pytest.mark.rdma

SETTINGS = ConnectionSettings(buffer_size=4096)


@contextlib.asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[tuple[Side, Side, ConnectionListener]]:
    with nothing_left():
        async with (
            sides() as (near, far),
            listen(far.address, free_port(), domain=far.domain, settings=SETTINGS, **options) as listener,
        ):
            yield near, far, listener


@contextlib.asynccontextmanager
async def pair(transport: Any = "rdmacm", **options: Any) -> AsyncIterator[tuple[Connection, Connection]]:
    async with (
        listening(transport=transport, **options) as (near, far, listener),
        connect(
            far.address, listener.port, domain=near.domain, settings=SETTINGS, transport=transport, **options
        ) as client,
        await listener.accept() as server_side,
    ):
        yield client, server_side


@pytest.mark.parametrize("transport", ["rdmacm", "auto", "tcp"])
async def test_messages_and_memory(transport: str) -> None:
    async with pair(transport) as (client, server_side):
        assert isinstance(end_of(client).control, CmControlChannel) == (transport != "tcp")
        for size in (0, 1, 4096, 4097, 300_000):
            data = random.Random(size).randbytes(size)
            sending = asyncio.create_task(client.send(data, immediate=size))
            assert await server_side.receive_with_immediate() == (data, size)
            await sending
            sending = asyncio.create_task(server_side.send(data))
            assert await client.receive() == data
            await sending
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.MW_BIND
        async with client._domain.register(4096, access) as memory, server_side._domain.register(64) as local:
            memory.buffer[:5] = b"hello"
            grant = await client.grant(memory[:1024], AccessFlags.REMOTE_READ)
            granted = await server_side.receive_grant()
            await server_side.read(local[:5], granted[:5])
            assert bytes(local.buffer[:5]) == b"hello"
            await grant.revoke()
            assert granted.revoked
            await server_side.send(b"and on")
            assert await client.receive() == b"and on"


async def test_closing_delivers_everything_sent() -> None:
    async with pair() as (client, server_side):
        for number in range(10):
            await client.send(bytes([number]) * 3000)
        await client.aclose()
        for number in range(10):
            assert await server_side.receive() == bytes([number]) * 3000
        with pytest.raises(anyio.EndOfStream):
            await server_side.receive()


async def test_abort_breaks_the_peers_connection() -> None:
    async with pair() as (client, server_side):
        client.abort()
        with pytest.raises(BrokenResourceError, match=r"is broken: the peer is gone: the peer disconnected$"):
            await server_side.receive()


async def test_same_secret_connects() -> None:
    async with pair(secret=b"one") as (client, server_side):
        await client.send(b"x")
        assert await server_side.receive() == b"x"


async def test_different_secret_is_refused() -> None:
    async with listening(transport="rdmacm", secret=b"one") as (near, far, listener):
        with pytest.raises(HandshakeError):
            await connect(far.address, listener.port, domain=near.domain, secret=b"two", transport="rdmacm")
        async with connect(
            far.address, listener.port, domain=near.domain, secret=b"one", settings=SETTINGS, transport="rdmacm"
        ):
            await (await listener.accept()).aclose()


async def test_connecting_without_a_listener() -> None:
    with nothing_left():
        async with sides() as (near, far):
            with pytest.raises(ConnectionRejectedError):
                await connect(far.address, free_port(), domain=near.domain, transport="rdmacm")
            with pytest.raises(ConnectionRefusedError):
                await connect(far.address, free_port(), domain=near.domain)


async def test_connecting_without_a_route() -> None:
    with nothing_left():
        async with sides() as (near, _):
            with pytest.raises(UnreachableError, match="loopback"):
                await connect("127.0.0.1", free_port(), domain=near.domain, transport="rdmacm")


async def test_a_listener_is_closed_while_a_peer_waits_for_the_end_of_a_handshake() -> None:
    with nothing_left():
        async with contextlib.AsyncExitStack() as stack:
            near, far = await stack.enter_async_context(sides())
            channel = await stack.enter_async_context(Channel())
            listener = await listen(
                far.address, free_port(), domain=far.domain, transport="rdmacm", max_handshakes=1
            ).open()
            stack.push_async_callback(listener.aclose)
            connecting = []
            for _ in range(6):
                qp = await stack.enter_async_context(near.queue_pair())
                silent = await stack.enter_async_context(channel.identifier())
                await silent.resolve(far.address, listener.port, source=near.address)
                connecting.append(asyncio.create_task(silent.connect(qp)))
            await until(lambda: listener.statistics().refused)  # the first one was expired for another
            await listener.aclose()
            outcomes = await asyncio.gather(*connecting, return_exceptions=True)
            assert isinstance(outcomes[-1], ConnectionRejectedError)  # the first ones had begun a handshake


async def test_serving() -> None:
    async def echo(connection: Connection) -> None:
        async for message in connection:
            await connection.send(message)

    with nothing_left():
        async with (
            sides() as (near, far),
            serve(echo, far.address, free_port(), domain=far.domain, settings=SETTINGS) as server,
        ):
            for _ in range(3):
                async with connect(
                    far.address, server.port, domain=near.domain, settings=SETTINGS, transport="rdmacm"
                ) as client:
                    await client.send(b"hello")
                    assert await client.receive() == b"hello"
