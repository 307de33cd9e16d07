"""Connecting by rdma_cm, with a fake of it, and falling back to TCP."""

import asyncio
import contextlib
import dataclasses
import errno
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import anyio
import pytest

from aioverbs import (
    Backoff,
    BrokenResourceError,
    ClosedResourceError,
    Connection,
    ConnectionListener,
    Device,
    DeviceRemovedError,
    HandshakeError,
    QueuePair,
    UnreachableError,
    VerbsError,
    WorkCompletionError,
    connect,
    listen,
    reconnect,
)
from aioverbs._connection import connect as connect_module
from aioverbs._connection.cm_control import CmControlChannel, SharedChannel
from aioverbs._connection.connect import Transport
from aioverbs._connection.handshake import Reason
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._core.handles import handles
from aioverbs._server import acceptor as acceptor_module
from aioverbs._server.server import Server
from aioverbs._verbs import ports
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs.addresses import Address
from aioverbs.gid_selection import Gid
from aioverbs.rdma_cm import Listener as CmListener, listener as rdma_cm_listener
from aioverbs.rdma_cm.cm_id import look_up as find_address
from aioverbs.rdma_cm.state_machine import CmState
from tests.connections.ends import HOST, SMALL, root_of
from tests.connections.serving import asked, served
from tests.descriptors import descriptors, descriptors_at_first
from tests.manager.connection_manager import StubChannel, StubIdentifier, connection_manager, request
from tests.pace import patience
from tests.waiting import until


@pytest.fixture(autouse=True)
def _rdma_cm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the connecting end try rdma_cm, while the listening end accepts TCP only."""
    monkeypatch.setattr(connect_module, "uses_rdma_cm", lambda transport, domain, ssl: transport != "tcp")


def without_gids(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Hide the port's GIDs at the given read of their table, counted from 1."""
    gid_table, looks = ports.gid_table, [0]

    def read(context: handles.Context, port: int) -> list[Gid]:
        looks[0] += 1
        return [] if looks[0] == at else gid_table(context, port)

    monkeypatch.setattr(ports, "gid_table", read)


async def test_a_port_without_a_gid_falls_back_to_tcp(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gids(monkeypatch, 1)
    async with (
        device.resource_domain() as domain,
        served(domain) as server,
        asked(server, domain, transport="auto") as near,
    ):
        await near.send(b"hello")
        assert await near.receive() == b"hello"


async def test_a_gid_lost_before_rdma_cm_connects(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    identifier, channel = mock.AsyncMock(), mock.AsyncMock()
    monkeypatch.setattr(connect_module, "resolve", mock.AsyncMock(return_value=CmControlChannel(identifier, channel)))
    without_gids(monkeypatch, 2)
    async with device.resource_domain() as domain:
        with pytest.raises(HandshakeError, match="has no GID") as caught:
            await connect(HOST, 1, domain=domain, transport="rdmacm", settings=SMALL)
    assert caught.value.reason == Reason.TEMPORARY
    identifier.aclose.assert_awaited_once()
    channel.release.assert_awaited_once()


class FakeCmControl(CmControlChannel):
    """A control channel of rdma_cm without librdmacm."""

    def __init__(self) -> None:
        super().__init__(mock.AsyncMock(closed=False, _state_machine=None), mock.AsyncMock())
        self.on_lost: Callable[[Exception], object] | None = None

    def _watch(self, on_lost: Callable[[Exception], object] | None) -> None:
        self.on_lost = on_lost


class DeadCmControl(FakeCmControl):
    """A peer that rdma_cm connects, and whose link then goes down: no device answers."""

    async def _connect(self, message_channel: MessageChannel, initiator: bool, attributes: QpAttrs) -> None:
        unreachable_endpoint = dataclasses.replace(message_channel.qp.local_endpoint(), qp_num=0x777)
        message_channel.qp.connect(unreachable_endpoint, timeout=1, retry_cnt=1)


@pytest.mark.parametrize("transport", ["rdmacm", "auto"])
async def test_reconnect_retries_a_link_lost_in_the_handshake(
    device: Device, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    resolve = mock.AsyncMock(side_effect=lambda *_: DeadCmControl())
    monkeypatch.setattr(connect_module, "resolve", resolve)
    twice = Backoff(0.001, 0.001, attempts=2)
    async with device.resource_domain() as domain:
        again = reconnect(HOST, 1, domain=domain, transport=transport, settings=SMALL, backoff=twice)
        with pytest.raises(BrokenResourceError, match=r"is broken: .* RETRY_EXC_ERR") as caught:
            await anext(again)
        assert isinstance(root_of(caught.value), WorkCompletionError)
    assert resolve.await_count == 2


class LostCmControl(FakeCmControl):
    """A peer whose queue pair receives, while its process dies or the device is removed.

    :param peer: the peer's queue pair.
    """

    def __init__(self, peer: QueuePair, error: Exception) -> None:
        super().__init__()
        self._peer, self._error = peer, error

    async def _connect(self, message_channel: MessageChannel, initiator: bool, attributes: QpAttrs) -> None:
        message_channel.qp.connect(self._peer.local_endpoint(), **attributes)
        self._peer.connect(message_channel.qp.local_endpoint())

    async def send(self, *messages: bytes) -> None:
        await super().send(messages[0])
        assert self.on_lost is not None
        self.on_lost(self._error)


@pytest.mark.parametrize(
    ("error", "raised", "why"),
    [
        (BrokenResourceError("the peer disconnected"), BrokenResourceError, "the peer is gone: the peer disconnected"),
        (DeviceRemovedError("the device was removed"), DeviceRemovedError, "the device was removed"),
    ],
    ids=["peer", "device"],
)
async def test_a_loss_during_the_handshake_reports_its_cause(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], why: str
) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(1024) as region,
        domain.queue_pair(cq) as peer,
    ):
        peer.to_init()
        receiving = peer.receive(region[:])
        monkeypatch.setattr(connect_module, "resolve", mock.AsyncMock(return_value=LostCmControl(peer, error)))
        with pytest.raises(raised, match=f"is broken: {why}$") as caught:
            await connect(HOST, 1, domain=domain, transport="rdmacm", settings=SMALL)
        assert type(caught.value) is raised
        assert root_of(caught.value) is error
        await receiving


class SilentCmControl(FakeCmControl):
    """A peer that does not answer."""

    async def _connect(self, message_channel: MessageChannel, initiator: bool, attributes: QpAttrs) -> None:
        await anyio.sleep_forever()


async def never_resolves(*_: object) -> CmControlChannel:
    """Stand in for an address that is never resolved."""
    await anyio.sleep_forever()
    raise AssertionError("nothing ends it but a cancellation")


async def resolves_to_silent_peer(*_: object) -> CmControlChannel:
    """Stand in for a peer whose connection manager is silent."""
    return SilentCmControl()


async def test_cancelled_close_releases_the_shared_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubIdentifier, "disconnect", mock.Mock())  # of a peer that does not answer
    with connection_manager():
        channel = SharedChannel()
        await channel.open()
        identifier = await channel.channel.identifier().open()
        assert identifier._state_machine is not None
        identifier._state_machine.state = CmState.CONNECTED
        closing = asyncio.create_task(CmControlChannel(identifier, channel).aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        assert identifier.closed
        assert channel.channel.closed


async def test_cancelled_listen_leaves_no_channel(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = asyncio.Event()

    async def look_up(host: str, port: int) -> Address:
        looking.set()
        await anyio.sleep_forever()
        raise AssertionError("nothing ends it but a cancellation")

    monkeypatch.setattr(acceptor_module, "uses_rdma_cm", lambda transport, domain, ssl: True)
    monkeypatch.setattr(rdma_cm_listener, "look_up", look_up)
    before = descriptors_at_first()
    with connection_manager():
        async with device.resource_domain() as domain:
            listener = listen(HOST, domain=domain, settings=SMALL)
            opening = asyncio.create_task(listener.open())
            await looking.wait()
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()
    assert descriptors() == before


async def test_closing_while_rdma_cm_begins_to_listen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port of TCP is free at once, and nothing is left of rdma_cm."""
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def look_up(host: str, port: int) -> Address:
        looking.set()
        await go_on.wait()
        return await find_address(host, port)

    monkeypatch.setattr(acceptor_module, "uses_rdma_cm", lambda transport, domain, ssl: True)
    monkeypatch.setattr(rdma_cm_listener, "look_up", look_up)
    before = descriptors_at_first()
    with connection_manager():
        async with device.resource_domain() as domain:
            listener = listen(HOST, domain=domain, settings=SMALL)
            opening = asyncio.create_task(listener.open())
            await looking.wait()
            port = listener.port
            listener.close()
            with pytest.raises(ConnectionRefusedError):
                await connect(HOST, port, domain=domain, transport="tcp")
            go_on.set()
            with pytest.raises(ClosedResourceError):
                await opening
            assert listener.addresses == []
    assert descriptors() == before


@pytest.fixture
def _rdma_cm_listens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let listeners and servers accept peers with a fake of rdma_cm, too."""
    monkeypatch.setattr(acceptor_module, "uses_rdma_cm", lambda transport, domain, ssl: True)
    with connection_manager():
        yield


def rdma_cm_listener_of(accepting: ConnectionListener | Server) -> CmListener:
    cm = accepting._acceptor._cm
    assert cm is not None
    return cm[1]


def cannot_be_closed(accepting: ConnectionListener | Server, monkeypatch: pytest.MonkeyPatch) -> CmListener:
    """Let closing the rdma_cm listener fail once, and return that listener."""
    found = rdma_cm_listener_of(accepting)
    failing = mock.AsyncMock(side_effect=[VerbsError("rdma_destroy_id", errno.EBUSY), mock.DEFAULT], wraps=found.aclose)
    monkeypatch.setattr(found, "aclose", failing)
    return found


@pytest.mark.usefixtures("_rdma_cm_listens")
async def test_accepting_goes_on_after_a_refused_peer_cannot_be_closed(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        device.resource_domain() as domain,
        listen(HOST, domain=domain, settings=SMALL, max_connections=1) as listener,
        connect(HOST, listener.port, domain=domain, settings=SMALL, transport="tcp"),
    ):
        failures = [VerbsError("rdma_destroy_id", errno.EBUSY)]
        destroy = StubIdentifier.destroy

        def fail_once(identifier: StubIdentifier) -> None:
            if failures:
                raise failures.pop()
            destroy(identifier)

        monkeypatch.setattr(StubIdentifier, "destroy", fail_once)
        await until(lambda: listener.statistics().connections == 1)
        for count in (1, 2):
            request(rdma_cm_listener_of(listener))
            await until(lambda: listener.statistics().refused == (("BUSY", count),))  # noqa: B023
    (warned,) = [each.message for each in caplog.records if "rdma_destroy_id" in each.message]
    assert "refused peer" in warned


@pytest.mark.usefixtures("_rdma_cm_listens")
async def test_a_failed_rdma_cm_listener_is_logged(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers can still connect by TCP."""
    async with device.resource_domain() as domain, served(domain) as server:
        failing = mock.Mock(side_effect=VerbsError("rdma_get_cm_event", errno.EIO))
        monkeypatch.setattr(StubChannel, "take_event", failing)
        request(rdma_cm_listener_of(server))
        await until(lambda: any("rdma_get_cm_event" in each.message for each in caplog.records))
        (warned,) = [each.message for each in caplog.records if "rdma_get_cm_event" in each.message]
        assert "peers can no longer connect by rdma_cm" in warned
        async with asked(server, domain, transport="tcp") as near:
            await near.send(b"hello")
            assert await near.receive() == b"hello"


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.usefixtures("_rdma_cm_listens")
async def test_handlers_end_if_the_rdma_cm_listener_cannot_be_closed(
    device: Device, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    at_work, go_on = asyncio.Event(), asyncio.Event()
    ends = []

    async def handler(_: Connection) -> None:
        at_work.set()
        try:
            await go_on.wait()
            ends.append("returned")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async with device.resource_domain() as domain, contextlib.AsyncExitStack() as stack:
        server = await served(domain, handler).open()
        await stack.enter_async_context(asked(server, domain, transport="tcp"))
        await at_work.wait()
        found = cannot_be_closed(server, monkeypatch)
        stopping = asyncio.create_task(server.drain(patience(60) if drains else 0))
        await until(lambda: not server._acceptor._tcp.is_open)
        if drains:
            assert not stopping.done()
            go_on.set()
        with pytest.raises(VerbsError, match="rdma_destroy_id"):
            await stopping
        assert ends == ["returned" if drains else "cancelled"]
        await server.wait_closed()
        assert not found.closed
        await server.aclose()
        assert found.closed, "the server has not forgotten it"


@pytest.mark.usefixtures("_rdma_cm_listens")
async def test_callers_of_accept_are_notified_if_the_rdma_cm_listener_cannot_be_closed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with device.resource_domain() as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        accepting = asyncio.create_task(listener.accept())
        await asyncio.sleep(0)
        found = cannot_be_closed(listener, monkeypatch)
        with pytest.raises(VerbsError, match="rdma_destroy_id"):
            await listener.aclose()
        async with asyncio.timeout(patience(10)):
            with pytest.raises(ClosedResourceError):
                await accepting
        assert not found.closed
        await listener.aclose()
        assert found.closed, "the listener has not forgotten it"


@pytest.mark.usefixtures("_rdma_cm_listens")
async def test_close_ends_the_handshakes_if_the_rdma_cm_listener_cannot_be_closed(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with device.resource_domain() as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        accepting = asyncio.create_task(listener.accept())
        found = rdma_cm_listener_of(listener)
        with socket.create_connection((HOST, listener.port)):
            await until(lambda: listener.statistics().handshakes)
            with monkeypatch.context() as patch:
                patch.setattr(
                    StubIdentifier, "destroy", mock.Mock(side_effect=VerbsError("rdma_destroy_id", errno.EBUSY))
                )
                listener.close()
                await until(lambda: "the rdma_cm listener could not be closed" in caplog.text)
                await until(lambda: not listener.statistics().handshakes)
            with pytest.raises(ClosedResourceError):
                await accepting
        assert not found.closed
        await listener.aclose()
        assert found.closed, "the listener has not forgotten it"


UNANSWERED = [
    (never_resolves, "rdma_cm did not resolve the peer's address"),
    (resolves_to_silent_peer, "the peer did not answer over rdma_cm"),
]


@pytest.mark.parametrize("find", [each for each, _ in UNANSWERED])
async def test_auto_leaves_time_for_tcp(
    device: Device, monkeypatch: pytest.MonkeyPatch, find: Callable[..., Coroutine[Any, Any, CmControlChannel]]
) -> None:
    monkeypatch.setattr(connect_module, "resolve", find)
    monkeypatch.setattr(connect_module, "_CM_RESOLVE_TIMEOUT_S", 60.0)
    async with (
        device.resource_domain() as domain,
        served(domain) as server,
        asked(server, domain, transport="auto", timeout_s=patience(1.6)) as near,
    ):
        await near.send(b"hello")
        assert await near.receive() == b"hello"


@pytest.mark.parametrize(("find", "awaits"), UNANSWERED)
async def test_rdma_cm_timeout_names_the_missing_step(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    find: Callable[..., Coroutine[Any, Any, CmControlChannel]],
    awaits: str,
) -> None:
    monkeypatch.setattr(connect_module, "resolve", find)
    async with device.resource_domain() as domain:
        with pytest.raises(TimeoutError, match=f"no connection with {HOST}, port 7, within 50 ms: {awaits}"):
            await connect(HOST, 7, domain=domain, transport="rdmacm", settings=SMALL, timeout_s=0.05)


async def test_a_timeout_of_rdma_cm_closes_the_identifier(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disconnecting alone, as for TCP, would leave it open."""
    control = SilentCmControl()
    monkeypatch.setattr(connect_module, "resolve", mock.AsyncMock(return_value=control))
    async with device.resource_domain() as domain:
        with pytest.raises(TimeoutError):
            await connect(HOST, 7, domain=domain, transport="rdmacm", settings=SMALL, timeout_s=0.05)
    assert isinstance(control.identifier.aclose, mock.AsyncMock)
    control.identifier.aclose.assert_awaited_once()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
async def test_tcp_timeout_names_the_missing_step(
    device: Device, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    unreachable = mock.AsyncMock(side_effect=UnreachableError("rdma_resolve_addr", errno.ENETUNREACH))
    monkeypatch.setattr(connect_module, "resolve", unreachable)
    with socket.create_server((HOST, 0)) as listening:  # and nobody accepts
        port = listening.getsockname()[1]
        async with device.resource_domain() as domain:
            with pytest.raises(TimeoutError, match=f"port {port}, within .*: the peer.* TCP") as caught:
                await connect(HOST, port, domain=domain, transport=transport, settings=SMALL, timeout_s=0.05)
    assert ("rdma_cm failed first: rdma_resolve_addr failed" in str(caught.value)) == (transport == "auto")
