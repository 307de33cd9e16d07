"""Opening twice: the second call fails and the object stays open."""

import asyncio

import pytest

from aioverbs import ClosedResourceError, Device, ResourceState, WorkerPool, connect, listen
from aioverbs._lifecycle.turns import OPENING, spend
from tests.connections.ends import HOST, SMALL
from tests.connections.serving import asked, served
from tests.pace import patience

AGAIN = "cannot be opened again: make a new one"


async def test_opening_a_listener_twice(device: Device) -> None:
    async with device.resource_domain() as domain:
        async with listen(HOST, domain=domain, settings=SMALL) as listener:
            addresses = listener.addresses
            with pytest.raises(ClosedResourceError, match=AGAIN):
                await listener.open()
            with pytest.raises(ClosedResourceError, match=AGAIN):
                await listener.__aenter__()
            assert listener.addresses == addresses
            async with (
                asyncio.timeout(patience(10)),
                connect(HOST, listener.port, domain=domain, settings=SMALL) as near,
                await listener.accept() as far,
            ):
                await near.send(b"hello")
                assert await far.receive() == b"hello"
        with pytest.raises(ClosedResourceError, match=AGAIN):
            await listener.open()
        with pytest.raises(ClosedResourceError, match="has no port"):
            assert listener.port


async def test_opening_while_being_opened(device: Device) -> None:
    async with device.resource_domain() as domain:
        listener = listen(HOST, domain=domain, settings=SMALL)
        opening = asyncio.create_task(listener.open())
        await asyncio.sleep(0)
        with pytest.raises(ClosedResourceError, match=AGAIN):
            await listener.open()
        await opening
        async with connect(HOST, listener.port, domain=domain, settings=SMALL), await listener.accept():
            pass
        await listener.aclose()


async def test_a_failed_open_can_be_retried(device: Device) -> None:
    async with device.resource_domain() as domain, listen(HOST, domain=domain, settings=SMALL) as first:
        second = listen(HOST, first.port, domain=domain, settings=SMALL)
        for _ in range(2):
            with pytest.raises(OSError, match="in use"):
                await second.open()
        await first.aclose()
        async with second, connect(HOST, second.port, domain=domain, settings=SMALL), await second.accept():
            pass


@pytest.mark.parametrize("what", ["region", "pool"])
async def test_cancelled_second_open_of_a_large_region(device: Device, what: str) -> None:
    """The first open runs in a thread, and refuses the second one after that was cancelled."""
    size = 16 << 20
    async with (
        device.protection_domain() as pd,
        pd.register(size) if what == "region" else pd.buffer_pool(size, 1) as opened,
    ):
        again = asyncio.create_task(opened.open())
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError) as raised:
            await again
        assert AGAIN in str(raised.value.__cause__)
        assert opened.state is ResourceState.OPEN


@pytest.mark.parametrize("own", [True, False], ids=["of its own", "of the user's"])
async def test_opening_a_worker_pool_twice_at_once(device: Device, own: bool) -> None:
    """If opening yields to the loop, the second caller must not end what the first one opens."""
    async with device.protection_domain() as pd:
        pool = WorkerPool(device, 1, pd=None if own else pd)
        while not spend(OPENING):
            pass
        first, second = await asyncio.gather(pool.open(), pool.open(), return_exceptions=True)
        assert first is pool
        assert isinstance(second, ClosedResourceError)
        assert AGAIN in str(second)
        assert await pool.run(int) == 0
        await pool.aclose()
        assert pool.pd.closed is own


async def test_opening_a_server_twice(device: Device) -> None:
    async with device.resource_domain() as domain, served(domain) as server:
        addresses = server.addresses
        with pytest.raises(ClosedResourceError, match=AGAIN):
            await server.open()
        with pytest.raises(ClosedResourceError, match=AGAIN):
            await server.__aenter__()
        assert server.addresses == addresses
        async with asyncio.timeout(patience(10)), asked(server, domain) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
        await server.drain()
        with pytest.raises(ClosedResourceError, match=AGAIN):
            await server.open()


async def test_opening_a_stopped_server(device: Device) -> None:
    async with device.resource_domain() as domain:
        server = served(domain)
        await server.drain()
        with pytest.raises(ClosedResourceError, match=AGAIN):
            await server.open()


async def test_entering_a_pending_connection_twice(device: Device) -> None:
    """Blocks in turn get a connection each. The inner of two nested blocks gets none, and the outer keeps its own."""
    async with device.resource_domain() as domain, served(domain) as server:
        connecting = asked(server, domain)
        for _ in range(2):
            async with connecting as connection:
                with pytest.raises(RuntimeError, match="for each block"):
                    await connecting.__aenter__()
                await connection.send(b"hello")
                assert await connection.receive() == b"hello"
            assert connection.closed
        at_once = await asyncio.gather(*(connecting.__aenter__() for _ in range(2)), return_exceptions=True)
        assert [type(each) for each in at_once[1:]] == [RuntimeError]
        await connecting.__aexit__(None, None, None)
        assert server.statistics().accepted == 3


async def test_entering_a_pending_lease_twice(device: Device) -> None:
    async with device.protection_domain() as pd, pd.buffer_pool(64, 4) as pool:
        leasing = pool.lease()
        for _ in range(2):
            async with leasing as buffer:
                with pytest.raises(RuntimeError, match="for each block"):
                    await leasing.__aenter__()
                assert pool.statistics().leased == 1
                buffer.buffer[:1] = b"x"
            assert pool.statistics().leased == 0
