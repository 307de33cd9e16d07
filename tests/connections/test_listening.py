"""Peers that stall, violate the handshake, flood or vanish, have another secret, use TLS or another protocol."""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    ConnectionListener,
    ConnectionSettings,
    Device,
    HandshakeError,
    ResourceDomain,
    ResourceState,
    connect,
    listen,
    open_device,
    reconnect,
    serve,
)
from aioverbs._connection import establishment
from aioverbs._connection.connect import Transport
from aioverbs._connection.handshake import Handshake, Hello, MessageType, Offer, Reason, Reject, body_size, parse
from aioverbs._connection.shared_queues import lease_block
from aioverbs._connection.tcp_control import TcpControlChannel
from aioverbs._lifecycle.resource import lifecycle_of, open_part
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._server.server import Server
from aioverbs._verbs.base_domain import Domain
from tests.capabilities import Capability, needs
from tests.connections.certificates import contexts
from tests.connections.ends import HOST, SMALL, deeper, pair, works
from tests.connections.serving import echo
from tests.pace import fewer, patience
from tests.waiting import until

LONG = (1, 2)  # versions of an initiator that waits for the listener's HELLO before it sends its OFFER


@contextlib.asynccontextmanager
async def listening(device: Device, **options: Any) -> AsyncIterator[tuple[ConnectionListener, ResourceDomain]]:
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=SMALL, **options) as listener,
    ):
        yield listener, domain


@contextlib.asynccontextmanager
async def stranger(
    listener: ConnectionListener,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def heard(reader: asyncio.StreamReader) -> tuple[MessageType, bytes]:
    async with asyncio.timeout(patience(10)):
        head = await reader.readexactly(8)
        data = head + await reader.readexactly(body_size(head))
    return parse(data)[0], data


def refused(listener: ConnectionListener) -> dict[str, int]:
    return dict(listener.statistics().refused)


async def talks(listener: ConnectionListener, domain: ResourceDomain, **options: Any) -> None:
    """Check that other peers are still served."""
    async with (
        connect(HOST, listener.port, domain=domain, settings=SMALL, **options) as near,
        await listener.accept() as far,
    ):
        await near.send(b"fine")
        assert await far.receive() == b"fine"
        await near.aclose()


async def test_same_secret_connects(device: Device) -> None:
    async with pair(device, secret=b"correct horse") as ends:
        await ends.near.send(b"x")
        assert await ends.far.receive() == b"x"


async def test_different_secret_is_refused(device: Device) -> None:
    async with listening(device, secret=b"one") as (listener, domain):
        with pytest.raises(HandshakeError) as caught:
            await connect(HOST, listener.port, domain=domain, secret=b"two")
        assert (caught.value.reason, caught.value.by_peer) == (Reason.SECRET, True)
        await until(lambda: refused(listener) == {"SECRET": 1})
        assert listener.statistics().accepted == 0
        await talks(listener, domain, secret=b"one")


@contextlib.asynccontextmanager
async def impostor() -> AsyncIterator[int]:
    """A listener that claims to have the secret and cannot prove it. Gives its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guess = Handshake(False, os.urandom(16), b"a guess")
        guess.receive_hello((await heard(reader))[1])
        writer.write(guess.hello())
        _, offer = await heard(reader)
        theirs, _ = Offer.parse_body(parse(offer)[2], 32)
        writer.write(guess.offer(theirs))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(talk, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_a_listener_without_the_secret_is_refused(device: Device) -> None:
    async with device.resource_domain() as domain, impostor() as port:
        with pytest.raises(HandshakeError) as caught:
            await connect(HOST, port, domain=domain, secret=b"the secret")
        assert (caught.value.reason, caught.value.by_peer) == (Reason.SECRET, False)


async def test_a_refusal_that_is_cancelled_leaves_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over rdma_cm, sending waits for the peer's acknowledgement, which a refused peer may withhold."""
    send, refusing = TcpControlChannel.send, []

    async def send_and_wait(control: TcpControlChannel, *messages: bytes) -> None:
        await send(control, *messages)
        if parse(messages[-1])[0] is MessageType.REJECT:
            refusing.append(control)
            await asyncio.Event().wait()

    monkeypatch.setattr(TcpControlChannel, "send", send_and_wait)
    async with device.resource_domain() as domain, impostor() as port:
        connecting = asyncio.ensure_future(connect(HOST, port, domain=domain, secret=b"the secret"))
        await until(lambda: refusing)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
        assert not [each for each in domain._lifecycle.children.values() if each.kind == "Connection"]
        await until(lambda: refusing[0].fileno() == -1)


async def test_another_version_is_refused(device: Device) -> None:
    async with listening(device) as (listener, domain):
        async with stranger(listener) as (reader, writer):
            writer.write(Hello(7, 9, False, os.urandom(16)).pack())
            kind, data = await heard(reader)
            assert kind is MessageType.REJECT
            assert Reject.parse_body(parse(data)[2]).reason == Reason.VERSION
        await until(lambda: refused(listener) == {"VERSION": 1})
        await talks(listener, domain)


async def test_a_stalling_peer_is_dropped_after_the_timeout(device: Device) -> None:
    """At each point of the handshake, and while it sends single bytes."""
    async with (
        listening(device, handshake_timeout_s=patience(1)) as (listener, domain),
        contextlib.AsyncExitStack() as stack,
    ):
        silent = await stack.enter_async_context(stranger(listener))
        half = await stack.enter_async_context(stranger(listener))
        half[1].write(b"aiov\1")
        greeted = await stack.enter_async_context(stranger(listener))
        greeted[1].write(Handshake(True, os.urandom(16), versions=LONG).hello())
        assert (await heard(greeted[0]))[0] is MessageType.HELLO
        offered = await stack.enter_async_context(stranger(listener))
        await _offer(offered, domain, device)
        await until(lambda: listener.statistics().handshakes == 4)
        for reader, _ in (silent, half, greeted, offered):
            async with asyncio.timeout(patience(10)):
                assert await reader.read() == b""
        await until(lambda: refused(listener) == {"TimeoutError": 4})
        await talks(listener, domain)


async def _offer(
    peer: tuple[asyncio.StreamReader, asyncio.StreamWriter], domain: ResourceDomain, device: Device
) -> None:
    """Perform all but the last message, with the endpoint of another queue pair."""
    reader, writer = peer
    us = Handshake(True, os.urandom(16), versions=LONG)
    writer.write(us.hello())
    us.receive_hello((await heard(reader))[1])
    async with domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        writer.write(us.offer(Offer(qp.local_endpoint(), 1024, 4, 1000)))
        us.receive_offer((await heard(reader))[1])


async def test_many_connections_at_once_are_made_in_many_turns(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise peers would wait for messages of the handshake until all queue pairs are made."""
    open_connection, loop, opened, most = Connection._open, asyncio.get_running_loop(), 0, 0

    def count(connection: Connection) -> None:
        nonlocal opened
        opened += 1
        open_connection(connection)

    def next_turn() -> None:
        nonlocal opened, most
        most, opened = max(most, opened), 0
        loop.call_soon(next_turn)

    monkeypatch.setattr(Connection, "_open", count)
    async with listening(device) as (listener, domain):
        next_turn()
        attempts = (connect(HOST, listener.port, domain=domain, settings=SMALL).__aenter__() for _ in range(64))
        for near in await asyncio.gather(*attempts):
            near.abort()
    assert 1 <= most <= 16


@pytest.mark.parametrize("kind", ["leases", "regions"])
async def test_connecting_goes_on_beside_a_task_that_uses_up_each_turn(device: Device, kind: str) -> None:
    async def work_on(domain: Domain) -> None:
        memory = bytearray(8192)
        async with domain.buffer_pool(4096, 4) as pool:
            while True:
                async with pool.lease() if kind == "leases" else domain.cache.region(memory):
                    pass

    async with device.resource_domain() as domain, listen(HOST, domain=domain) as listener:
        working = asyncio.create_task(work_on(domain))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(patience(20)):
            async with (
                connect(HOST, listener.port, domain=domain) as near,
                await listener.accept() as far,
            ):
                await works(near, far)
        working.cancel()
        await asyncio.wait([working])


async def test_connect_times_out_at_a_silent_listener(device: Device) -> None:
    with socket.create_server((HOST, 0)) as silent:
        async with device.resource_domain() as domain:
            with pytest.raises(TimeoutError):
                await connect(HOST, silent.getsockname()[1], domain=domain, timeout_s=0.1)


async def test_connecting_without_a_listener_fails(device: Device) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    async with device.resource_domain() as domain:
        with pytest.raises(ConnectionRefusedError):
            await connect(HOST, port, domain=domain)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"aiov\1\1\x00\x13" + bytes(19),
        b"aiov\1\3\x00\x00",
        b"aiov\1\4\x00\x02\x00\x03",
    ],
    ids=["http", "version 0", "out of turn", "refusal"],
)
async def test_invalid_handshakes_are_refused(device: Device, words: bytes) -> None:
    async with listening(device) as (listener, domain):
        async with stranger(listener) as (reader, writer):
            writer.write(words)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(patience(10)):
                    await reader.read()
        await until(lambda: sum(refused(listener).values()) == 1)
        await talks(listener, domain)


async def test_a_vanishing_peer_leaves_nothing(device: Device) -> None:
    """At each point of the handshake: the listener goes on, and the domain has only the end that is ready."""
    async with listening(device) as (listener, domain):
        hello = Handshake(True, os.urandom(16), versions=LONG).hello()
        for step in range(3):
            async with stranger(listener) as peer:
                if step == 1:
                    peer[1].write(hello)
                    await heard(peer[0])
                elif step == 2:
                    await _offer(peer, domain, device)
                peer[1].transport.abort()
        await until(lambda: refused(listener) == {"BrokenResourceError": 3})
        await until(lambda: [each.kind for each in domain._lifecycle.children.values()].count("Connection") == 1)
        await talks(listener, domain)


@pytest.mark.parametrize("limit", ["max_handshakes", "max_connections"])
async def test_silent_peers_do_not_block_others(device: Device, limit: str) -> None:
    """The number of handshakes is limited; then the oldest peer is dropped, those that have sent nothing first."""
    async with (
        listening(device, **{limit: 3}, handshake_timeout_s=patience(60)) as (listener, domain),
        contextlib.AsyncExitStack() as stack,
    ):
        reader, writer = await stack.enter_async_context(stranger(listener))
        writer.write(Handshake(True, os.urandom(16), versions=LONG).hello())
        assert (await heard(reader))[0] is MessageType.HELLO
        for _ in range(2):
            await stack.enter_async_context(stranger(listener))
        await until(lambda: listener.statistics().handshakes == 3)
        for arrival in listener._acceptor._tasks.values():
            arrival.count_silence()
            arrival.silence = 1000  # as if they had come so long ago
        for _ in range(fewer(3)):
            await talks(listener, domain)
        await until(lambda: listener.statistics().handshakes == 2)
        assert refused(listener) == {"TimeoutError": 1}
        writer.write(b"what is no offer")
        assert (await heard(reader))[0] is MessageType.REJECT, "who has said something still has its place"
        await stack.aclose()
        await until(lambda: listener.statistics().handshakes == 0)
        await talks(listener, domain)


async def test_peers_of_a_busy_listener_wait_and_are_not_refused(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More peers than handshakes at once, each of which blocks the loop, so that all of them take long."""
    open_connection, count = Connection._open, 12

    def slow(connection: Connection) -> None:
        time.sleep(0.1)
        open_connection(connection)

    async with listening(device, max_handshakes=4, handshake_timeout_s=patience(60)) as (listener, domain):
        monkeypatch.setattr(Connection, "_open", slow)
        nears = await asyncio.gather(
            *(connect(HOST, listener.port, domain=domain, settings=SMALL, timeout_s=patience(60)) for _ in range(count))
        )
        fars = [await listener.accept() for _ in range(count)]
        assert refused(listener) == {}
        for end in (*nears, *fars):
            end.abort()


async def test_the_time_that_a_listener_takes_itself_is_not_the_peers(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another peer waits for the only place, and the listener waits for its own buffers, not for the peer."""

    async def lease_late(place: Domain, settings: ConnectionSettings) -> LeasedBuffer:
        if place is domain:
            await asyncio.sleep(1)
        return await lease_block(place, settings)

    monkeypatch.setattr(establishment, "lease_block", lease_late)
    async with listening(device, max_handshakes=1) as (listener, domain), device.resource_domain() as other:
        nears = await asyncio.gather(
            *(connect(HOST, listener.port, domain=other, settings=SMALL, timeout_s=patience(60)) for _ in range(2))
        )
        fars = [await listener.accept() for _ in nears]
        assert refused(listener) == {}
        for end in (*nears, *fars):
            end.abort()


async def test_an_exception_of_a_handshake_is_logged_and_counted(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = deeper(SMALL, port=200)
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=wrong) as listener,
    ):
        with pytest.raises(BrokenResourceError):
            await connect(HOST, listener.port, domain=domain, settings=SMALL)
        await until(lambda: listener.statistics().handshakes == 0)
        assert refused(listener) == {"ValueError": 1}
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "could not be handled" in record.message
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


@needs(Capability.FAULT_PLAN)
async def test_listeners_end_when_the_device_is_lost(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """At the next peer."""
    async with (
        open_device("soft0") as another,
        another.resource_domain() as domain,
        device.resource_domain() as lost,
        listen(HOST, domain=lost) as listener,
        serve(echo, HOST, domain=lost) as server,
    ):
        device.faults.lose_device()
        for port in (listener.port, server.port):
            attempts = (connect(HOST, port, domain=domain).__aenter__() for _ in range(8))
            results = await asyncio.gather(*attempts, return_exceptions=True)
            assert all(isinstance(each, BrokenResourceError | HandshakeError | OSError) for each in results), results
        await check_ended(listener, server, caplog)


async def check_ended(listener: ConnectionListener, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a listener and a server end by themselves, which each of them logs once."""
    async with asyncio.timeout(patience(10)):
        with pytest.raises(ClosedResourceError):
            await listener.accept()
        await server.wait_closed()
    assert not any(each.exc_info for each in caplog.records)
    assert [each.message for each in caplog.records].count(
        "no longer listening: the domain was closed, or its device is lost"
    ) == 2


async def test_listeners_end_while_their_domain_is_being_closed(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next peer."""
    domain = await device.resource_domain().open()
    queue = lifecycle_of(await open_part(domain.completion_queue(8)))
    drain, go_on = queue.drain, asyncio.Event()
    assert drain is not None

    async def drain_later() -> None:
        await go_on.wait()
        await drain()

    queue.drain = drain_later
    async with (
        device.resource_domain() as other,
        listen(HOST, domain=domain) as listener,
        serve(echo, HOST, domain=domain) as server,
    ):
        closing = asyncio.create_task(domain.aclose())
        await until(lambda: queue.state is ResourceState.CLOSING)
        try:
            for port in (listener.port, server.port):
                with pytest.raises((BrokenResourceError, HandshakeError)):
                    await connect(HOST, port, domain=other)
            await check_ended(listener, server, caplog)
            assert domain.state is ResourceState.CLOSING
        finally:
            go_on.set()
        await closing


async def test_max_connections_is_enforced(device: Device) -> None:
    async with listening(device, max_connections=2) as (listener, domain):
        ends = []
        for _ in range(2):
            ends.append(await connect(HOST, listener.port, domain=domain, settings=SMALL))
            ends.append(await listener.accept())
        with pytest.raises(HandshakeError, match="has reached its maximum number of connections"):
            await connect(HOST, listener.port, domain=domain)
        for end in ends[:2]:
            await end.aclose()
        await until(lambda: listener.statistics().connections == 1)
        await talks(listener, domain)
        for end in ends[2:]:
            await end.aclose()


async def test_closing_aborts_connections_not_accepted(device: Device) -> None:
    async with device.resource_domain() as domain:
        listener = listen(HOST, domain=domain, settings=SMALL)
        async with listener:
            near = await connect(HOST, listener.port, domain=domain, settings=SMALL)
            waiting = near.receive()
        with pytest.raises(BrokenResourceError, match="gone"):
            await waiting
        near.abort()
        with pytest.raises(ClosedResourceError):
            await listener.accept()
        assert [each async for each in listener] == []


async def test_listening_on_a_used_address_fails(device: Device) -> None:
    async with listening(device) as (listener, domain):
        with pytest.raises(OSError, match="in use") as caught:
            await listen(HOST, listener.port, domain=domain).open()
        assert caught.value.errno == errno.EADDRINUSE


async def test_listening_on_all_addresses(device: Device) -> None:
    async with device.resource_domain() as domain, listen(domain=domain, settings=SMALL) as listener:
        assert len({address[1] for address in listener.addresses}) == 1
        for address in listener.addresses:
            host = "::1" if ":" in address[0] else HOST
            async with connect(host, listener.port, domain=domain, settings=SMALL) as near:
                far = await listener.accept()
                assert near.remote_address == far.local_address
                await far.aclose()


async def test_tls_handshake(device: Device, tmp_path: Path) -> None:
    server, client = contexts(tmp_path)
    async with listening(device, ssl=server, secret=b"s") as (listener, domain):
        await talks(listener, domain, ssl=client, secret=b"s")
        with pytest.raises(ssl.SSLError):
            await connect(HOST, listener.port, domain=domain, ssl=ssl.create_default_context())
        with pytest.raises(ssl.SSLError, match="mismatch"):
            await connect(HOST, listener.port, domain=domain, ssl=client, server_hostname="example.org")
        with pytest.raises((HandshakeError, BrokenResourceError, TimeoutError)):
            await connect(HOST, listener.port, domain=domain, timeout_s=2)
        await talks(listener, domain, ssl=client, server_hostname="localhost", secret=b"s")


async def test_many_connections_at_once(device: Device) -> None:
    count = fewer(20)
    async with listening(device) as (listener, domain):
        nears = await asyncio.gather(
            *(connect(HOST, listener.port, domain=domain, settings=SMALL).__aenter__() for _ in range(count))
        )
        fars = [await listener.accept() for _ in range(count)]
        for at, near in enumerate(nears):
            await near.send(at.to_bytes(2))
        assert {await far.receive() for far in fars} == {at.to_bytes(2) for at in range(count)}
        for end in (*nears, *fars):
            await end.aclose()


async def test_connections_of_two_devices(device: Device) -> None:
    """As between two processes, but on one event loop."""
    if not device.software:
        pytest.skip("software devices, of which there may be two, are what this is about")
    async with (
        open_device("soft0") as other,
        other.resource_domain() as domain,
        listening(device) as (listener, _),
    ):
        await talks(listener, domain)


@pytest.mark.parametrize("wrong", [{"secret": b""}, {"max_handshakes": 0}, {"handshake_timeout_s": 0}])
async def test_invalid_arguments(device: Device, wrong: dict[str, Any]) -> None:
    async with device.resource_domain() as domain:
        with pytest.raises(ValueError, match=r"secret|be 1|above 0"):
            listen(HOST, domain=domain, **wrong)
        if "secret" in wrong:
            with pytest.raises(ValueError, match="secret"):
                await connect(HOST, 1, domain=domain, **wrong)


@pytest.mark.parametrize("transport", ["tcp", "rdmacm"])
@pytest.mark.parametrize("port", [-1, 65536])
async def test_ports_out_of_range_are_refused(device: Device, port: int, transport: Transport) -> None:
    async with device.resource_domain() as domain:
        for make in (listen, functools.partial(serve, echo)):
            with pytest.raises(ValueError, match=f"`port` must be from 0 to 65535, got {port}"):
                make(HOST, port, domain=domain, transport=transport)
        for each in (port, 0):
            for begin in (connect, reconnect):
                with pytest.raises(ValueError, match=f"`port` must be from 1 to 65535, got {each}"):
                    begin(HOST, each, domain=domain, transport=transport)


async def test_invalid_transports(device: Device, tmp_path: Path) -> None:
    server, client = contexts(tmp_path)
    async with device.resource_domain() as domain:
        with pytest.raises(ValueError, match="`transport` must be"):
            await connect(HOST, 1, domain=domain, transport="udp")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="rdma_cm does not support TLS"):
            await connect(HOST, 1, domain=domain, transport="rdmacm", ssl=client)
        with pytest.raises(ValueError, match="rdma_cm does not support TLS"):
            listen(HOST, domain=domain, transport="rdmacm", ssl=server)
        if device.software:
            with pytest.raises(ValueError, match="software device"):
                await connect(HOST, 1, domain=domain, transport="rdmacm")
            with pytest.raises(ValueError, match="software device"):
                await listen(HOST, domain=domain, transport="rdmacm").open()
