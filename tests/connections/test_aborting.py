"""`abort` of connections and `close` of listeners and servers: at once, and from any place at any moment."""

import asyncio
import contextlib
import errno
import functools
import gc
import os
import resource
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    Connection,
    ConnectionListener,
    Device,
    ResourceState,
    ThreadModel,
    VerbsError,
    connect,
    listen,
    open_device,
    serve,
)
from aioverbs._connection.connection import end_of
from aioverbs._connection.connection_end import ConnectionEnd
from aioverbs._connection.tcp_control import TcpControlChannel
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs.types import AccessFlags
from tests.capabilities import Capability, needs
from tests.conftest import LOOP_FACTORIES
from tests.connections.certificates import contexts
from tests.connections.ends import SMALL, deeper, pair
from tests.connections.serving import echo, served
from tests.core.children import in_child
from tests.garbage import collect_garbage
from tests.holding import hold, unhold
from tests.listening import own_address
from tests.manager.held_verbs import StayingAllocator, thread_inside
from tests.pace import patience
from tests.waiting import until

REACHABLE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
HOST = own_address()  # at which no other process takes a port that was given up


def is_notified(connection: Connection) -> bool:
    """Return whether the peer of a connection has ended its TCP connection, as far as the kernel knows."""
    control = end_of(connection).control
    assert isinstance(control, TcpControlChannel)
    with socket.socket(fileno=os.dup(control.fileno())) as own:
        try:
            return own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


def is_free(port: int) -> bool:
    """Return whether another listener can use a port of this process's own address."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


# ---- By the owner


@pytest.mark.every_way
async def test_abort_notifies_the_peer_before_it_returns(device: Device) -> None:
    async with pair(device) as ends:
        waiting = [asyncio.create_task(call) for call in (ends.near.receive(), ends.near.receive_grant())]
        await asyncio.sleep(0)
        assert not is_notified(ends.far)
        ends.near.abort()
        assert is_notified(ends.far)
        assert ends.near.state in (ResourceState.CLOSING, ResourceState.CLOSED)
        with pytest.raises(ClosedResourceError):
            await ends.near.send(b"too late")
        for task in waiting:
            with pytest.raises(ClosedResourceError):
                await task
        with pytest.raises(BrokenResourceError, match="gone"):
            await ends.far.receive()
        await ends.near.aclose()
        assert ends.near.closed
        ends.near.abort()


async def test_abort_closes_everything_that_the_device_does_not_use() -> None:
    """The device flushes requests in flight as soon as the queue pair fails, so that nothing is left to wait for."""
    async with (
        open_device("soft0", execution="inline") as device,
        pair(device) as ends,
        ends.domain.register(64, AccessFlags.LOCAL_WRITE) as memory,
    ):
        await ends.near.grant(memory, AccessFlags.REMOTE_READ)
        await ends.near.send(b"on its way")
        ends.near.abort()
        assert ends.near.closed


async def test_a_connection_whose_abort_failed_is_closed_when_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        open_device("soft0", execution="inline") as device,
        device.resource_domain() as domain,
        listen("127.0.0.1", domain=domain, settings=SMALL) as listener,
    ):
        near = await connect("127.0.0.1", listener.port, domain=domain, settings=SMALL)
        async with await listener.accept():
            node = near._lifecycle
            with monkeypatch.context() as patch:
                patch.setattr(ConnectionEnd, "destroy", _fail)
                with pytest.raises(VerbsError):
                    near.abort()
            assert node.state is ResourceState.OPEN
            del near
            collect_garbage()
            await until(lambda: node.state is ResourceState.CLOSED)


def _fail(end: ConnectionEnd) -> None:
    raise VerbsError("ibv_destroy_qp", errno.EIO)


async def test_abort_within_a_verb(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a finalizer: the connection is closed after the verb, but nothing waits for that."""
    async with pair(device) as ends:
        abort, is_inside = Lifecycle.abort, True

        def refuse(lifecycle: Lifecycle) -> None:
            if is_inside and lifecycle is ends.near._lifecycle:
                raise ConcurrentAccessError("a verb is in flight")
            abort(lifecycle)

        monkeypatch.setattr(Lifecycle, "abort", refuse)
        waiting = asyncio.create_task(ends.near.receive())
        await asyncio.sleep(0)
        ends.near.abort()
        assert is_notified(ends.far)
        with pytest.raises(ClosedResourceError):
            await waiting
        await asyncio.sleep(0.1)
        assert (ends.near.broken, ends.near.state) == (None, ResourceState.OPEN)
        is_inside = False
        await until(lambda: ends.near.closed)


async def test_abort_without_a_free_descriptor_notifies_the_peer(device: Device) -> None:
    async with pair(device) as ends:
        control, (soft, hard) = end_of(ends.far).control, resource.getrlimit(resource.RLIMIT_NOFILE)
        assert isinstance(control, TcpControlChannel)
        with socket.socket(fileno=os.dup(control.fileno())) as far:
            os.close(lowest := os.dup(far.fileno()))
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    os.dup(far.fileno())
                ends.near.abort()
                assert far.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_abort_with_tls_notifies_the_peer(device: Device, tmp_path: Path) -> None:
    server, client = contexts(tmp_path)
    async with (
        device.resource_domain() as domain,
        listen("127.0.0.1", domain=domain, settings=SMALL, ssl=server) as listener,
    ):
        near = await connect("127.0.0.1", listener.port, domain=domain, settings=SMALL, ssl=client)
        async with await listener.accept() as far:
            near.abort()
            assert is_notified(far)


async def test_abort_ends_an_orderly_close(device: Device) -> None:
    """The peer reads nothing, so `aclose` would wait for `close_timeout_s`."""
    async with pair(device, deeper(SMALL, close_timeout_s=60)) as ends:
        while ends.near.traffic().credits > 1:
            await ends.near.send(b"one of them")
        sending = asyncio.create_task(ends.near.send(b"one more"))
        closing = asyncio.create_task(ends.near.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        async with asyncio.timeout(patience(5)):
            asyncio.get_running_loop().call_soon(ends.near.abort)  # in a callback, without a task
            await closing
        with pytest.raises(ClosedResourceError):
            await sending
        assert ends.near.closed


@pytest.mark.every_way
async def test_closing_a_listener_frees_its_port_before_it_returns(device: Device) -> None:
    """Peers that were not accepted yet are notified, those in the handshake as well, and the others keep connected."""
    async with device.resource_domain() as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        port = listener.port
        kept = await connect(HOST, port, domain=domain, settings=SMALL)
        async with await listener.accept() as far:
            not_accepted = await connect(HOST, port, domain=domain, settings=SMALL)
            await until(lambda: listener._ready)
            with socket.create_connection((HOST, port)) as silent:
                await until(lambda: listener.statistics().handshakes)
                await until(lambda: all(each._control for each in listener._acceptor._tasks.values()))
                accepting = asyncio.create_task(listener.accept())  # of the peer that is there
                another = asyncio.create_task(listener.accept())
                await asyncio.sleep(0)
                async with await accepting as last:
                    listener.close()
                    assert is_free(port)
                    assert silent.recv(1) == b""
                    assert not listener.addresses
                    with pytest.raises(ClosedResourceError):
                        await another
                    assert not is_notified(not_accepted)
                    await last.send(b"as ever")
                    assert await not_accepted.receive() == b"as ever"
                await listener.aclose()
                listener.close()
            await kept.send(b"as ever")
            assert await far.receive() == b"as ever"
        await kept.aclose()
        await not_accepted.aclose()


async def test_closing_a_listener_aborts_connections_that_were_not_accepted(device: Device) -> None:
    async with device.resource_domain() as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        async with connect(HOST, listener.port, domain=domain, settings=SMALL) as near:
            await until(lambda: listener._ready)
            listener.close()
            assert is_notified(near)
            with pytest.raises(BrokenResourceError):
                await near.receive()


@pytest.mark.every_way
async def test_closing_a_server_ends_its_handlers_and_frees_its_port(device: Device) -> None:
    ended = asyncio.Event()

    async def handler(connection: Connection) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with device.resource_domain() as domain:
        server = await served(domain, handler).open()
        port = server.port
        near = await connect("127.0.0.1", port, domain=domain, settings=SMALL)
        await until(lambda: server.statistics().connections)
        waiting = asyncio.create_task(server.wait_closed())
        await asyncio.sleep(0)
        server.close()
        assert is_notified(near)
        with socket.create_server(("127.0.0.1", port)):
            pass
        async with asyncio.timeout(patience(5)):
            await waiting
            await server.aclose()
        assert ended.is_set()
        assert server.statistics().connections == 0
        near.abort()


async def test_closing_twice_does_not_cancel_the_cleanup_of_a_handler(device: Device) -> None:
    seen: list[str] = []

    async def handler(connection: Connection) -> None:
        try:
            await connection.receive()
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0.1)
            seen.append("cleaned up")
            raise

    async with device.resource_domain() as domain:
        server = await served(domain, handler, drain_timeout_s=0).open()
        async with connect("127.0.0.1", server.port, domain=domain, settings=SMALL):
            await until(lambda: server.statistics().connections)
            server.close()
            await until(lambda: seen)
            server.close()
            await server.aclose()
            assert seen == ["cancelled", "cleaned up"]


@contextlib.asynccontextmanager
async def not_accepted(device: Device, count: int) -> AsyncIterator[tuple[ConnectionListener, list[Connection]]]:
    """Give a listener and connections that it has not accepted."""
    async with device.resource_domain() as domain:
        listener = await listen(HOST, domain=domain, settings=SMALL).open()
        nears = [await connect(HOST, listener.port, domain=domain, settings=SMALL) for _ in range(count)]
        await until(lambda: len(listener._ready) == count)
        yield listener, list(listener._ready)
        for near in nears:
            near.abort()


async def test_aclose_after_close_waits_for_the_connections(device: Device) -> None:
    async with not_accepted(device, 3) as (listener, connections):
        for each in connections:
            each._lifecycle.drain_now = lambda: False  # so that the rest is done in the background
        listener.close()
        assert not any(each.closed for each in connections)
        await until(lambda: listener._closed)
        await listener.aclose()
        assert all(each.closed for each in connections)


async def test_a_connection_that_cannot_be_closed_does_not_keep_the_others_open(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    async with not_accepted(device, 3) as (listener, connections):
        failing = connections[0]._lifecycle
        drain_now, failing.drain_now = failing.drain_now, _fail_to_drain
        listener.close()
        assert "could not be closed: ibv_destroy_qp" in caplog.text
        await until(lambda: all(each.closed for each in connections[1:]))
        assert connections[0].state is ResourceState.OPEN
        failing.drain_now = drain_now
        await listener.aclose()
        assert connections[0].closed


def _fail_to_drain() -> bool:
    raise VerbsError("ibv_destroy_qp", errno.EIO)


@pytest.mark.every_way
@pytest.mark.parametrize("make", [listen, functools.partial(serve, echo)], ids=["listener", "server"])
@pytest.mark.parametrize("waits", [False, True], ids=["close", "aclose"])
async def test_closing_while_listening_begins(device: Device, make: Callable[..., Any], waits: bool) -> None:
    """Nothing listens afterwards: `open` waits for the addresses of the name at that moment."""
    async with device.resource_domain() as domain:
        each = make("localhost", domain=domain)
        opening = asyncio.create_task(each.open())
        await asyncio.sleep(0)
        assert not opening.done()
        if waits:
            await each.aclose()
        else:
            each.close()
        with pytest.raises(ClosedResourceError):
            await opening
        assert each.addresses == []
        with pytest.raises(ClosedResourceError, match="make a new one"):
            await each.open()
        await each.aclose()


async def test_unopened_listeners_and_servers_can_be_closed(device: Device) -> None:
    async with device.resource_domain() as domain:
        for unopened in (listen(HOST, domain=domain), served(domain)):
            unopened.close()
            await unopened.aclose()


# ---- At the end of the loop


class _Left:
    """Objects that are used until the end of their loop, and what was true when they were closed there."""

    device: Device
    near: Connection
    far: Connection
    listener: ConnectionListener
    seen: tuple[bool, bool] | None = None

    async def open(self) -> None:
        self.device = await open_device("soft0").open()
        domain = await self.device.resource_domain().open()
        self.listener = await listen(HOST, domain=domain, settings=SMALL).open()
        self.near = await connect(HOST, self.listener.port, domain=domain, settings=SMALL)
        self.far = await self.listener.accept()

    def leave(self) -> None:
        port = self.listener.port
        self.near.abort()
        self.listener.close()
        self.seen = is_notified(self.far), is_free(port)
        self.far.abort()

    async def in_a_cancelled_task(self) -> None:
        """`asyncio.run` cancels the task."""

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                self.leave()

        self.task = asyncio.create_task(work())
        await asyncio.sleep(0)

    async def in_a_callback_after_the_cancellation(self) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                asyncio.get_running_loop().call_soon(self.leave)

        self.task = asyncio.create_task(work())
        await asyncio.sleep(0)

    async def in_a_generator(self) -> None:
        """`asyncio.run` closes the generator after it has cancelled all tasks."""

        async def values() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                self.leave()

        self.values = values()
        await anext(self.values)


@pytest.mark.parametrize(
    "place", [_Left.in_a_cancelled_task, _Left.in_a_callback_after_the_cancellation, _Left.in_a_generator]
)
@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_everything_can_be_left_while_the_loop_shuts_down(
    place: Callable[[_Left], Coroutine[Any, Any, None]], factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    left = _Left()

    async def use() -> None:
        await left.open()
        await place(left)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(use())
    assert left.seen == (True, True)
    assert left.near.state is not ResourceState.OPEN
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Domain|.*Queue|.*Pool", ResourceWarning)  # they were left open
        asyncio.run(left.device.aclose())
    assert left.near.closed
    collect_garbage()


def test_abort_after_the_end_of_the_loop_notifies_the_peer() -> None:
    left = _Left()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(left.open())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what was left open, asyncio's transports among it
        loop.close()
        assert not is_notified(left.far)
        left.near.abort()
        left.listener.close()
        assert is_notified(left.far)
        asyncio.run(left.device.aclose())
        collect_garbage()


@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_everything_can_be_left_while_the_loop_is_stopped(
    factory: Callable[[], asyncio.AbstractEventLoop], runs_again: bool
) -> None:
    """The peer is notified and the port is free; the rest is done if the loop runs again, else with the device."""
    left = _Left()
    loop = factory()
    loop.run_until_complete(left.open())
    port = left.listener.port
    left.near.abort()
    left.listener.close()
    assert is_notified(left.far)
    assert is_free(port)
    left.near.abort()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what was left open, asyncio's transports among it
        if runs_again:
            loop.run_until_complete(until(lambda: left.near.closed))
            loop.run_until_complete(left.listener.aclose())
        loop.close()
        asyncio.run(left.device.aclose())
        collect_garbage()
    assert left.near.closed


# ---- By others


@pytest.mark.every_way
async def test_abort_in_another_thread_is_carried_to_the_owner(device: Device) -> None:
    async with pair(device) as ends:
        thread = threading.Thread(target=ends.near.abort)
        thread.start()
        thread.join()
        await until(lambda: ends.near.closed)
        await asyncio.to_thread(asyncio.run, _abort(ends.far))  # by another loop
        await until(lambda: ends.far.closed)


async def _abort(connection: Connection) -> None:
    connection.abort()


async def test_close_in_another_thread_is_carried_to_the_owner(device: Device) -> None:
    async with device.resource_domain() as domain:
        closed = [await listen(HOST, domain=domain).open(), await served(domain).open()]
        for each in closed:
            await asyncio.to_thread(each.close)
            await until(lambda each=each: not each.addresses)  # type: ignore[misc]
            await each.aclose()


class _Owner:
    """User's object that aborts its connection when it is forgotten."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.itself = self  # only the garbage collector finds it

    def __del__(self) -> None:
        self.connection.abort()


async def test_abort_in_a_finalizer(device: Device) -> None:
    """Also in one that the garbage collector calls in the middle of something else, in any thread."""
    async with pair(device) as ends:
        for connection, collect in ((ends.near, gc.collect), (ends.far, lambda: None)):
            _Owner(connection)
            collect()
        await asyncio.to_thread(gc.collect)
        await until(lambda: ends.near.closed and ends.far.closed)


async def test_a_forked_child_aborts_nothing(device: Device) -> None:
    async with pair(device) as ends:

        def leave() -> None:
            ends.near.abort()
            ends.listener.close()

        in_child(leave)
        await ends.near.send(b"as ever")
        assert await ends.far.receive() == b"as ever"
        async with connect("127.0.0.1", ends.listener.port, domain=ends.domain, settings=SMALL):
            await (await ends.listener.accept()).aclose()


# ---- Memory


@needs(Capability.FAULT_PLAN)
async def test_memory_stays_pinned_until_the_device_is_done(device: Device) -> None:
    async with pair(device) as ends, ends.domain.register(64, REACHABLE) as memory:
        await ends.far.grant(memory[32:], AccessFlags.REMOTE_WRITE)
        remote = await ends.near.receive_grant()
        hold(device, ends.near.qp)
        writing = asyncio.ensure_future(ends.near.write(memory[:8], remote[:8]))
        await asyncio.sleep(0)
        ends.near.abort()
        closing = asyncio.create_task(ends.near.aclose())
        await asyncio.sleep(0.05)
        assert (len(memory.pins), ends.near.closed, closing.done()) == (1, False, False)
        unhold(device)
        await closing
        assert (len(memory.pins), ends.near.closed) == (0, True)
        await asyncio.wait([writing])


@needs(Capability.PARENT_DOMAINS)
@pytest.mark.parametrize("stays_s", [0, 0.1])
async def test_abort_while_another_thread_is_in_a_verb(device: Device, stays_s: float) -> None:
    """The peer is notified all the same, and the connection is closed afterwards."""
    staying = StayingAllocator()
    async with (
        device.resource_domain(thread_model=ThreadModel.UNSAFE, allocator=staying) as domain,
        listen("127.0.0.1", domain=domain, settings=SMALL) as listener,
    ):
        near = await connect("127.0.0.1", listener.port, domain=domain, settings=SMALL)
        async with await listener.accept() as far:
            async with thread_inside(domain, staying):
                near.abort()
                assert is_notified(far)
                assert not near.closed
                with pytest.raises(ClosedResourceError):
                    await near.send(b"too late")
                await asyncio.sleep(stays_s)
            await until(lambda: near.closed)
