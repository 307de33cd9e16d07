"""Listeners, servers and connections of a closed event loop: another loop closes them, or closes their device."""

import asyncio
import contextlib
import errno
import socket
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aioverbs import (
    AffinityError,
    ClosedResourceError,
    Connection,
    ConnectionListener,
    Device,
    ResourceState,
    VerbsError,
    WorkerPool,
    connect,
    listen,
    open_device,
    serve,
)
from aioverbs._server.server import Server
from tests.capabilities import Capability, needs
from tests.conftest import LOOP_FACTORIES
from tests.connections.ends import SMALL
from tests.connections.serving import echo
from tests.garbage import collect_garbage
from tests.listening import own_address
from tests.pace import patience

HOST = own_address()  # at which no other process takes a port that was given up


def accepts(port: int) -> bool:
    """Return whether a listener accepts at a port."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((HOST, port), patience(10)):
        return True
    return False


def run_and_close(coroutine: Coroutine[Any, Any, None], *, cancel: bool) -> None:
    """Run on a new loop, which is closed after its tasks are cancelled, or with its tasks still pending."""
    if cancel:
        asyncio.run(coroutine)
        return
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


class Deserted:
    """A listener with an unaccepted connection, a server on a domain and a server on a pool, of a closed loop."""

    device: Device
    pool: WorkerPool
    listener: ConnectionListener
    servers: list[Server]
    ports: list[int]

    def __init__(self, *, cancel: bool) -> None:
        run_and_close(self._open(), cancel=cancel)

    async def _open(self) -> None:
        self.device = await open_device("soft0").open()
        domain = await self.device.resource_domain().open()
        self.pool = await WorkerPool(self.device, 1).open()
        self.listener = await listen(HOST, domain=domain, settings=SMALL).open()
        self.servers = [serve(echo, HOST, domain=domain), serve(echo, HOST, pool=self.pool)]
        for server in self.servers:
            await server.open()
        self.ports = [each.port for each in (self.listener, *self.servers)]
        self._kept = domain, await connect(HOST, self.listener.port, domain=domain, settings=SMALL)
        while not self.listener._ready:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def close_device(self) -> None:
        await self.pool.aclose()  # its threads go on
        await self.device.aclose()


def end(close: Callable[[Deserted], Coroutine[Any, Any, None]], *, cancel: bool) -> None:
    """Make these objects, and close them on another loop."""

    async def close_in_time(deserted: Deserted) -> None:
        async with asyncio.timeout(patience(20)):
            await close(deserted)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what was left open, asyncio's transports among it
        asyncio.run(close_in_time(Deserted(cancel=cancel)))
        collect_garbage()


@pytest.mark.parametrize("cancel", [True, False], ids=["run", "closed"])
def test_another_loop_closes_listeners_and_servers(cancel: bool) -> None:
    async def close(deserted: Deserted) -> None:
        listener, servers = deserted.listener, deserted.servers
        for server in servers:
            with pytest.raises(AffinityError, match="is closed"):
                await server.wait_closed()
        assert all(map(accepts, deserted.ports))
        await listener.aclose()
        await servers[0].aclose()
        await servers[1].drain()
        assert not any(map(accepts, deserted.ports))
        for server in servers:
            await server.wait_closed()
            await server.aclose()
        await listener.aclose()
        await deserted.close_device()

    end(close, cancel=cancel)


@pytest.mark.parametrize("cancel", [True, False], ids=["run", "closed"])
def test_closing_the_device_closes_listeners_and_servers(cancel: bool) -> None:
    async def close(deserted: Deserted) -> None:
        await deserted.close_device()
        assert not any(map(accepts, deserted.ports))
        await deserted.listener.aclose()
        for server in deserted.servers:
            await server.aclose()
            await server.wait_closed()

    end(close, cancel=cancel)


async def test_listeners_end_with_their_domain(device: Device) -> None:
    """Soon after the domain was closed, and closing them does not keep the domain."""
    domain = await device.resource_domain().open()
    async with listen(HOST, domain=domain) as listener, serve(echo, HOST, domain=domain) as server:
        held = len(domain._lifecycle._handles)
        async with listen(HOST, domain=domain):
            assert len(domain._lifecycle._handles) == held + 1
        assert len(domain._lifecycle._handles) == held
        accepting = asyncio.create_task(listener.accept())
        ports = listener.port, server.port
        await domain.aclose()
        async with asyncio.timeout(patience(10)):
            with pytest.raises(ClosedResourceError):
                await accepting
            await server.wait_closed()
        assert not any(map(accepts, ports))


@needs(Capability.FAULT_PLAN)
async def test_listeners_go_on_if_closing_their_domain_fails(device: Device) -> None:
    """They end when it is closed again."""
    domain = await device.protection_domain().open()
    async with listen(HOST, domain=domain) as listener, serve(echo, HOST, domain=domain) as server:
        device.faults.fail("dealloc_pd", errno.EIO)
        with pytest.raises(VerbsError, match="EIO"):
            await domain.aclose()
        device.faults.clear()
        assert domain.state is ResourceState.OPEN
        await asyncio.sleep(0.01)
        assert accepts(listener.port)
        assert accepts(server.port)
        await domain.aclose()
        async with asyncio.timeout(patience(10)):
            with pytest.raises(ClosedResourceError):
                await listener.accept()
            await server.wait_closed()


# ---- Connections


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_a_device_with_waiters_of_a_closed_loop_is_closed_at_once(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:

    async def begin() -> tuple[Device, Connection, Connection]:
        device = await open_device("soft0").open()
        domain = await device.resource_domain().open()
        async with listen(HOST, domain=domain, settings=SMALL) as listener:
            near = await connect(HOST, listener.port, domain=domain, settings=SMALL)
            far = await listener.accept()
        held.extend(asyncio.create_task(each) for each in (near.receive(), far.receive(), near.receive_grant()))
        await asyncio.sleep(0)
        return device, near, far

    async def end(device: Device) -> None:
        async with asyncio.timeout(patience(10)):
            await device.aclose()

    held: list[asyncio.Task[object]] = []
    loop = factory()
    device, near, far = loop.run_until_complete(begin())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        loop.close()  # uvloop would wait for ever for a handle of which an error was made of its warning
        asyncio.run(end(device))
        assert near.closed
        assert far.closed
        del near, far
        held.clear()
        collect_garbage()


def test_another_loop_closes_connections() -> None:
    """The peer is not notified, and everything is closed."""

    async def begin() -> tuple[Device, Connection, Connection]:
        device = await open_device("soft0").open()
        domain = await device.resource_domain().open()
        async with listen(HOST, domain=domain, settings=SMALL) as listener:
            return device, await connect(HOST, listener.port, domain=domain, settings=SMALL), await listener.accept()

    async def end() -> None:
        async with asyncio.timeout(patience(10)):
            await near.aclose()
            await far.__aexit__(None, None, None)
            assert near.closed
            assert far.closed
            await device.aclose()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        device, near, far = asyncio.run(begin())
        asyncio.run(end())
        collect_garbage()
