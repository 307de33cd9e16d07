"""Servers: handlers, limits, draining, stopping in time; and reconnecting clients."""

import asyncio
import contextlib
import errno
import logging

import anyio
import pytest

from aioverbs import (
    AffinityError,
    Backoff,
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    Device,
    Endpoint,
    HandshakeError,
    QueuePair,
    WorkerPool,
    connect,
    open_device,
    reconnect,
    serve,
)
from aioverbs._connection.handshake import Reason
from aioverbs._core.handles import handles
from aioverbs._server.server import Server
from aioverbs._verbs import ports
from aioverbs.gid_selection import Gid
from tests.capabilities import Capability, needs
from tests.connections.ends import HOST, SMALL
from tests.connections.serving import asked, echo, served
from tests.listening import listens
from tests.pace import patience
from tests.waiting import until

FAST = Backoff(0.01, 0.05)


async def test_the_handler_runs_for_each_connection(device: Device) -> None:
    async with device.resource_domain() as domain, served(domain) as server:
        for _ in range(2):
            async with contextlib.AsyncExitStack() as stack:
                ends = [await stack.enter_async_context(asked(server, domain)) for _ in range(3)]
                for at, end in enumerate(ends):
                    await end.send(bytes([at]))
                assert [await end.receive() for end in ends] == [b"\0", b"\1", b"\2"]
                assert server.statistics().connections == 3
            await until(lambda: server.statistics().connections == 0)
        assert server.statistics().accepted == 6


async def test_wait_closed_of_an_unopened_server(device: Device) -> None:
    """A caller on another loop does not keep the owner waiting either."""
    async with device.resource_domain() as domain:
        server = served(domain)

        async def ask(error: type[Exception], match: str) -> None:
            async with asyncio.timeout(patience(5)):
                with pytest.raises(error, match=match):
                    await server.wait_closed()

        await asyncio.to_thread(asyncio.run, ask(AffinityError, "^wait_closed on"))
        await ask(ClosedResourceError, "is not open: open it first")
        async with server:
            waiting = asyncio.create_task(server.wait_closed())
            await asyncio.sleep(0)
            assert not waiting.done()
        async with asyncio.timeout(patience(5)):
            await waiting
            stopped = served(domain)
            await stopped.drain()
            await stopped.wait_closed()


async def test_data_sent_by_a_handler_is_delivered(device: Device) -> None:
    async def handler(connection: Connection) -> None:
        await connection.send(b"goodbye")

    async with (
        device.resource_domain() as domain,
        served(domain, handler) as server,
        asked(server, domain) as near,
    ):
        assert await near.receive() == b"goodbye"
        with pytest.raises(anyio.EndOfStream):
            await near.receive()


async def test_a_failing_handler_breaks_its_connection(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """The server goes on, and logs the error."""

    async def handler(connection: Connection) -> None:
        if await connection.receive() == b"fail":
            raise RuntimeError("what went wrong")
        await connection.send(b"fine")

    async with device.resource_domain() as domain, served(domain, handler) as server:
        async with asked(server, domain) as near:
            await near.send(b"fail")
            with pytest.raises(BrokenResourceError):
                await near.receive()
        async with asked(server, domain) as near:
            await near.send(b"go on")
            assert await near.receive() == b"fine"
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "handler" in record.message
    assert record.exc_info is not None
    assert "what went wrong" in str(record.exc_info[1])


async def test_a_leaving_peer_is_not_logged_as_an_error(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    async with device.resource_domain() as domain, served(domain) as server:
        near = await asked(server, domain)
        near.abort()
        await until(lambda: server.statistics().accepted == 1 and not server.statistics().connections)
    warned = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert not [each for each in warned if "native" not in each]  # of the device's own there may be some


@pytest.mark.every_way
async def test_stop_waits_for_handlers(device: Device) -> None:
    """No peers are accepted meanwhile."""
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def handler(connection: Connection) -> None:
        at_work.set()
        await go_on.wait()
        await connection.send(b"done")

    async with (
        device.resource_domain() as domain,
        served(domain, handler) as server,
        asked(server, domain) as near,
    ):
        port = server.port
        await at_work.wait()
        stopping = asyncio.create_task(server.drain())
        waiting = asyncio.create_task(server.wait_closed())
        await until(lambda: not listens(port))
        with pytest.raises(ConnectionRefusedError):
            await connect(HOST, port, domain=domain, settings=SMALL)
        assert not stopping.done()
        go_on.set()
        assert await near.receive() == b"done"
        await stopping
        await waiting


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
async def test_invalid_times_to_drain(device: Device, timeout_s: float) -> None:
    async with device.resource_domain() as domain:
        with pytest.raises(ValueError, match="`drain_timeout_s` must be 0 or more"):
            served(domain, drain_timeout_s=timeout_s)
        async with served(domain) as server:
            with pytest.raises(ValueError, match="`timeout_s` must be 0 or more"):
                await server.drain(timeout_s)
            async with asked(server, domain):
                pass


@pytest.mark.every_way
async def test_stop_cancels_handlers_after_the_deadline(device: Device) -> None:
    """The peers find their connections broken."""
    cancelled = 0
    counts = [0] * 3

    async def handler(connection: Connection) -> None:
        nonlocal cancelled
        try:
            while True:
                await connection.send(await connection.receive())
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async def load(at: int) -> None:
        with contextlib.suppress(BrokenResourceError, anyio.EndOfStream):
            while True:
                await nears[at].send(b"x" * 3000)
                await nears[at].receive()
                counts[at] += 1

    async with device.resource_domain() as domain, served(domain, handler) as server:
        nears = [await asked(server, domain) for _ in range(3)]
        loads = [asyncio.create_task(load(at)) for at in range(3)]
        await until(lambda: all(counts))
        async with asyncio.timeout(patience(5)):
            await server.drain(0.1)
        assert cancelled == 3
        await asyncio.gather(*loads)
        for near in nears:
            await near.aclose()


@pytest.mark.every_way
async def test_cancelled_aclose_cancels_handlers(device: Device) -> None:
    async def handler(connection: Connection) -> None:
        await asyncio.sleep(60)

    async with device.resource_domain() as domain:
        near: list[Connection] = []

        with anyio.CancelScope() as scope:
            async with served(domain, handler, drain_timeout_s=60) as server:
                near.append(await asked(server, domain))
                await until(lambda: server.statistics().connections)
                scope.deadline = anyio.current_time() + 0.2
        assert scope.cancelled_caught
        with pytest.raises(BrokenResourceError):
            await near[0].receive()
        await near[0].aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_server_stops_when_all_tasks_are_cancelled(device: Device, turns: int) -> None:
    """As `asyncio.run` does at its end."""
    async with device.resource_domain() as domain:
        server = await served(domain).open()
        async with asked(server, domain) as near:
            stopping = asyncio.create_task(server.drain())
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.wait([stopping])
            async with asyncio.timeout(patience(10)):
                await server.aclose()
                await server.wait_closed()
            assert not server.addresses
            near.abort()


async def test_exactly_one_of_domain_and_pool(device: Device) -> None:
    async with device.resource_domain() as domain:
        with pytest.raises(ValueError, match="exactly one of"):
            serve(echo, HOST)
        with pytest.raises(ValueError, match="exactly one of"):
            serve(echo, HOST, domain=domain, pool=WorkerPool(device, 1))
        with pytest.raises(ValueError, match="`key` chooses a worker"):
            serve(echo, HOST, domain=domain, key=lambda address: address[0])


# ---- Again and again


@pytest.mark.every_way
async def test_reconnect_after_loss(device: Device) -> None:
    """After the server went away and came back, and after it closed the connection."""
    async with device.resource_domain() as domain:
        answers: list[bytes] = []
        server: Server | None = await served(domain).open()
        assert server is not None
        port = server.port

        async def client() -> None:
            async for connection in reconnect(HOST, port, domain=domain, settings=SMALL, backoff=FAST):
                try:
                    for _ in range(2):
                        await connection.send(b"hello")
                        answers.append(await connection.receive())
                    if len(answers) >= 6:
                        break
                    await connection.receive()
                except (BrokenResourceError, anyio.EndOfStream):
                    continue

        task = asyncio.create_task(client())
        for more in (2, 4):
            await until(lambda more=more: len(answers) == more)  # type: ignore[misc]
            await server.drain(0)
            await asyncio.sleep(0.03)
            server = await serve(echo, HOST, port, domain=domain, settings=SMALL).open()
        await task
        assert answers == [b"hello"] * 6
        await server.aclose()


async def test_reconnect_gives_up_after_its_attempts(device: Device) -> None:
    async with device.resource_domain() as domain, served(domain) as server:
        port = server.port
        await server.drain()
        again = reconnect(HOST, port, domain=domain, backoff=Backoff(0.001, 0.01, attempts=3))
        with pytest.raises(ConnectionRefusedError):
            await anext(again)


async def test_reconnect_raises_permanent_refusals(device: Device) -> None:
    async with device.resource_domain() as domain, served(domain, secret=b"one") as server:
        with pytest.raises(HandshakeError) as caught:
            await anext(reconnect(HOST, server.port, domain=domain, secret=b"two"))
        assert caught.value.reason == Reason.SECRET


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize(
    ("end", "number"),
    [
        ("near", errno.ETIMEDOUT),
        ("far", errno.ETIMEDOUT),
        ("near", errno.ENETUNREACH),
        ("near", errno.ENODEV),
        ("near", errno.EMFILE),
        ("near", errno.EIO),
        ("near", errno.ECONNRESET),
        ("near", errno.EADDRINUSE),
    ],
)
async def test_reconnect_outlasts_a_device_outage(
    device: Device, caplog: pytest.LogCaptureFixture, end: str, number: int
) -> None:
    caplog.set_level(logging.DEBUG, "aioverbs")
    async with (
        open_device("soft0") as other,
        device.resource_domain() as domain,
        other.resource_domain() as peer_domain,
        served(peer_domain) as server,
        contextlib.aclosing(
            reconnect(HOST, server.port, domain=domain, settings=SMALL, backoff=Backoff(0.01, 0.05, attempts=2))
        ) as again,
    ):
        (device if end == "near" else other).faults.fail("modify_qp", number, first=2)  # to RTR, after INIT
        connection = await anext(again)
        await connection.send(b"hello")
        assert await connection.receive() == b"hello"
        refused = server.statistics().refused
    (text,) = (message for message in caplog.messages if message.startswith("reconnecting to "))
    assert f"ibv_modify_qp failed: {errno.errorcode[number]}" in text
    assert "are incompatible" not in text
    assert refused == (("TEMPORARY", 1),)


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
async def test_reconnect_ends_with_incompatible_devices(device: Device, number: int) -> None:
    async with (
        open_device("soft0") as other,
        device.resource_domain() as domain,
        other.resource_domain() as peer_domain,
        served(peer_domain) as server,
    ):
        device.faults.fail("modify_qp", number, first=2)
        with pytest.raises(HandshakeError, match="are incompatible") as caught:
            await anext(reconnect(HOST, server.port, domain=domain, settings=SMALL, backoff=FAST))
        assert caught.value.reason == Reason.DEVICE


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("at", [1, 2], ids=["near", "far"])
async def test_reconnect_waits_for_a_gid(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    """An IPv6 address goes away with its link, and the port's GIDs with it."""
    caplog.set_level(logging.DEBUG, "aioverbs")
    gid_table, looks = ports.gid_table, [0]

    def without_gids_once(context: handles.Context, port: int) -> list[Gid]:
        looks[0] += 1
        return [] if looks[0] == at else gid_table(context, port)

    async with device.resource_domain() as domain, served(domain) as server:
        monkeypatch.setattr(ports, "gid_table", without_gids_once)
        async with contextlib.aclosing(
            reconnect(HOST, server.port, domain=domain, settings=SMALL, backoff=Backoff(0.01, 0.05, attempts=2))
        ) as again:
            connection = await anext(again)
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
    (text,) = (message for message in caplog.messages if message.startswith("reconnecting to "))
    assert "has no GID" in text


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("end", ["near", "far"])
async def test_reconnect_waits_for_a_gid_lost_after_the_offer(
    device: Device, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The kernel's EINVAL alone does not show that the cause may pass."""
    local_endpoint, looks = QueuePair.local_endpoint, [0]
    async with (
        open_device("soft0") as other,
        device.resource_domain() as domain,
        other.resource_domain() as peer_domain,
        served(peer_domain) as server,
        contextlib.aclosing(
            reconnect(HOST, server.port, domain=domain, settings=SMALL, backoff=Backoff(0.01, 0.05, attempts=2))
        ) as again,
    ):
        at = device if end == "near" else other

        def without_a_gid_once(qp: QueuePair) -> Endpoint:
            if qp.handle.context is at.handle:
                looks[0] += 1
                if looks[0] == 2:  # the first is for the offer
                    raise ValueError("port 1 has no GID at index 1")
            return local_endpoint(qp)

        monkeypatch.setattr(QueuePair, "local_endpoint", without_a_gid_once)
        at.faults.fail("modify_qp", errno.EINVAL, first=2)
        connection = await anext(again)
        await connection.send(b"hello")
        assert await connection.receive() == b"hello"
        assert server.statistics().refused == (("TEMPORARY", 1),)


async def test_reconnect_closes_the_last_connection(device: Device) -> None:
    async with device.resource_domain() as domain, served(domain) as server:
        async with contextlib.aclosing(
            reconnect(HOST, server.port, domain=domain, settings=SMALL, backoff=FAST)
        ) as again:
            first = await anext(again)
            second = await anext(again)
            assert (first.closed, second.closed) == (True, False)
        assert (first.closed, second.closed) == (True, True)
        await until(lambda: not server.statistics().connections)
