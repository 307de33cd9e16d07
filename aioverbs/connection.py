"""Connections: messages, one-sided requests and grants between two ends, over a queue pair of each."""

import asyncio
import contextlib
import os
import ssl as tls
from collections.abc import Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
import anyio.abc

from aioverbs._core.work import Operation, RegionSlice, RemoteRegion
from aioverbs.affinity import Affinity, running_loop
from aioverbs.attributes import QpCapabilities
from aioverbs.buffers import LeasedBuffer
from aioverbs.byte_stream import MessageByteStream
from aioverbs.cm_line import NO_WAY, CmLine, resolve
from aioverbs.completion import CompletionQueue
from aioverbs.connection_settings import ConnectionSettings
from aioverbs.domain import Domain
from aioverbs.errors import (
    BrokenResourceError,
    ClosedResourceError,
    HandshakeError,
    StateError,
    TransitionError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.frames import FrameKind
from aioverbs.grants import Grant, Granted, Grants, has_windows
from aioverbs.handshake import Capabilities, Handshake, Offer, Reason, refusal_of
from aioverbs.identifier import Address, written
from aioverbs.life import OPEN
from aioverbs.lifeline import dial
from aioverbs.memory import MemoryRegion
from aioverbs.ports import gid_index
from aioverbs.queue_pair import QueuePair
from aioverbs.resource import Resource
from aioverbs.supplies import completion_queue_for, lease_block
from aioverbs.traffic import Traffic, TrafficStatistics
from aioverbs.types import AccessFlags, AtomicCap

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Connecting", "Connection", "Line", "Transport", "answer", "by_manager", "check_transport", "connect"]

_ACCESS = (
    AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
)  # of a peer; what it reaches of memory its keys say
_TRY_S = 2.0  # for rdma_cm to find a way to a peer that may be there by TCP only
_LINGER_S = 0.02  # completions may be behind the news that the peer is gone

Transport = Literal["tcp", "rdmacm", "auto"]
Local = RegionSlice | MemoryRegion | list[RegionSlice] | tuple[RegionSlice, ...]


class Line(Protocol):
    """What carries the handshake and tells that the peer is gone: a `Lifeline`, or what rdma_cm has for it."""

    async def send(self, data: bytes) -> None:
        """Say something."""

    async def receive(self) -> bytes:
        """Hear the peer's next message."""

    def watch(self, when_lost: Callable[[Exception], object]) -> None:
        """Call this when the peer is gone."""

    def unwatch(self) -> None:
        """Call nobody any more."""

    def address(self, which: str) -> Address | None:
        """`sockname` or `peername`."""

    def abort(self) -> None:
        """End it at once."""

    async def aclose(self) -> None:
        """End it."""


class _End:
    """How a connection ends. Its life keeps this, and not the user's object."""

    def __init__(self, block: LeasedBuffer, keep_alive_s: float | None) -> None:
        self.traffic: Traffic | None = None
        self.grants: Grants | None = None
        self.line: Line | None = None
        self._block = block
        self._tick_s = keep_alive_s / 4 if keep_alive_s is not None else None
        self._loop = running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._seen = -1
        self.when_closed: Callable[[], object] = lambda: None

    def begin(self, line: Line) -> None:
        """The handshake is over."""
        self.line = line
        line.watch(self._lost)
        if self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        # Whoever says or hears nothing for a while asks the peer's device for a sign of life. That fails within the
        # time limit of the queue pair.
        traffic = self.traffic
        if traffic is None or traffic.broken is not None or traffic.closed or self._tick_s is None:
            return
        work = traffic.qp._work
        assert work is not None
        assert work.send_queue is not None
        done = traffic.receive_queue.completed + work.send_queue.completed
        if done == self._seen:
            traffic.knock()
        self._seen = done
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _lost(self, error: Exception) -> None:
        # What it sent last may be there already, or just about to be.
        assert self.traffic is not None
        self.traffic.look()
        if self.traffic.ended:
            self._gone(error)
        elif not self.traffic.closed:
            self._loop.call_later(_LINGER_S, self._gone, error)

    def _gone(self, error: Exception) -> None:
        assert self.traffic is not None
        if self.traffic.closed:
            return
        self.traffic.look()
        if self.traffic.ended:
            self.traffic.fail("the peer closed it")
        else:
            self.traffic.fail(f"the peer is gone: {error}", error)

    def over(self) -> None:
        """It is broken, or being closed."""
        if self.grants is not None and self.traffic is not None:
            self.grants.over(self.traffic.error())
        if self.line is not None and self.traffic is not None and self.traffic.broken is not None:
            self.line.abort()  # by which the peer knows

    def stop(self) -> None:
        """It is being closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self.line is not None:
            self.line.unwatch()
        if self.traffic is not None:
            self.traffic.close()

    async def drain(self) -> None:
        """Its queue pair is closed."""
        if self.line is not None:
            try:
                await self.line.aclose()
            finally:
                self.line.abort()

    def destroy(self) -> None:
        """Give back what others have a use for."""
        self._block.release()
        self.when_closed()


class Connection(Resource, anyio.abc.ObjectStream[bytes]):
    """A connection with a peer: messages both ways, and what each lets the other do in its memory.

    Made by `connect`, `listen` and `serve`; open when it is handed out, closed by `aclose` or the end of its block. It
    belongs to the loop that made it. Its messages are `bytes` of any size up to what the peer takes, and arrive whole
    and in order. One task at a time receives; any number may send.

    What breaks it is raised as `BrokenResourceError`, with its cause, by whatever is asked of it then; that the peer
    sends no more is `anyio.EndOfStream`, after all that it sent.
    """

    def __init__(self, domain: Domain, settings: ConnectionSettings) -> None:
        super().__init__(domain)
        self._domain = domain
        self._settings = settings
        self._block: LeasedBuffer | None = None
        self._cq: CompletionQueue | None = None
        self._traffic: Traffic | None = None
        self._grants: Grants | None = None
        self._end: _End | None = None
        self._offer: Offer | None = None
        self._peer: Offer | None = None
        self._came_open = False

    # ---- Life

    def _owner(self) -> Affinity | None:
        return self._domain._placement().owner

    def _open(self) -> None:
        block, cq, settings = self._block, self._cq, self._settings
        assert block is not None
        assert cq is not None
        end = _End(block, settings.keep_alive_s)
        self._life.hold(end)
        depths = QpCapabilities(max_send_wr=settings.send_depth, max_recv_wr=settings.receive_depth + 1)
        qp = QueuePair(
            self, self._domain._placement(), cq, None, depths, port=settings.port, gid_index=settings.gid_index
        )
        qp._life.quiet = True
        qp._open_now()
        qp._drop_parents()  # its life has them: who forgets a connection is to be warned
        traffic = Traffic(qp, block, settings, lambda kind, number, data: grants.heard(kind, number, data))
        grants = Grants(traffic, self._domain.base.handle, settings.max_grants)
        traffic.when_over = end.over
        end.traffic, end.grants = traffic, grants
        self._traffic, self._grants, self._end = traffic, grants, end
        qp.to_init(qp_access_flags=_ACCESS)
        traffic.post_receives()
        self._life.stop = end.stop
        self._life.drain = end.drain
        self._offer = self._make_offer(qp)

    async def _prepare(self) -> Offer:
        """Make its queue pair, with its receives posted, once; what the peer is to know of it."""
        if self._offer is not None:
            return self._offer
        self._block = await lease_block(self._domain, self._settings)
        try:
            self._cq = await completion_queue_for(self._domain, self._settings)
            self._open_now()
        except BaseException:
            self._block.release()
            raise
        return self._made_offer()

    def _made_offer(self) -> Offer:
        assert self._offer is not None
        return self._offer

    def _make_offer(self, qp: QueuePair) -> Offer:
        context, settings = qp.handle.context, self._settings
        atomics = AtomicCap(context.attributes.atomic_cap)
        capabilities = Capabilities(0)
        if atomics is not AtomicCap.NONE:
            capabilities |= Capabilities.ATOMICS
        if has_windows(context):
            capabilities |= Capabilities.WINDOWS
        return Offer(
            qp.local_endpoint(),
            settings.buffer_size,
            settings.receive_depth,
            settings.max_message,
            capabilities,
            atomics,
            context.name,
        )

    def _agree(self, peer: Offer, line: "Line", early: int) -> None:
        """Connect the queue pair with the peer's, where it is not yet; from then on messages may come.

        :param early: messages of the handshake that are still to come.
        """
        assert self._traffic is not None
        self._peer = peer
        by_manager = isinstance(line, CmLine)
        self._traffic.begin(peer.depth, peer.buffer_size, peer.max_message, early if by_manager else 0)
        if by_manager:
            return
        try:
            self._traffic.qp.connect(peer.endpoint, timeout=self._settings.timeout)
        except (TransitionError, ValueError, VerbsError) as error:
            raise HandshakeError(Reason.DEVICE, str(error)) from error

    def _begin(self, line: Line) -> None:
        """Both are through with the handshake."""
        assert self._traffic is not None
        assert self._end is not None
        assert self._peer is not None
        self._traffic.peer = f"{written(line.address('peername'))} ({self._peer.device})"
        self._life.label = f"with {self._traffic.peer}"
        self._end.begin(line)
        self._came_open = True

    async def open(self) -> "Connection":
        """It is open when it is handed out: its block only closes it."""
        if not self._came_open:
            raise ClosedResourceError(f"{self!r} cannot be opened: connect again")
        self._check_open()
        return self

    async def aclose(self) -> None:
        """Deliver what was sent, tell the peer that no more comes, and close.

        Delivered is what lies in the peer's memory, to be received there. That takes `close_timeout_s` at most, or the
        rest is lost, as it is where this is cancelled; the peer is told of that by a `BrokenResourceError`. What the
        peer sent and was not received is lost. Closing twice is fine.

        :raises AffinityError: another event loop owns it; nothing was done.
        """
        traffic, owner = self._traffic, self._life.owner
        if owner is not None and not owner.orphaned and self._life.state is OPEN:
            owner.check(self._life, "aclose")
        try:
            if traffic is not None and self._came_open and self._life.state is OPEN and not self.closed:
                with (
                    contextlib.suppress(BrokenResourceError, ClosedResourceError),
                    anyio.move_on_after(self._settings.close_timeout_s),
                ):
                    await traffic.send_frame(FrameKind.END, last=True)
                    await traffic.delivered()
        finally:
            await super().aclose()

    async def abort(self) -> None:
        """Close without delivering anything: what is under way is given up; the peer finds the connection broken."""
        await super().aclose()

    def _now(self) -> Traffic:
        self._check_open()
        assert self._traffic is not None
        return self._traffic

    # ---- What is known

    @property
    def qp(self) -> QueuePair:
        """Its queue pair; sends and receives of it are the connection's own."""
        return self._now().qp

    @property
    def peer(self) -> Offer:
        """What the peer said of itself."""
        self._check_open()
        assert self._peer is not None
        return self._peer

    @property
    def settings(self) -> ConnectionSettings:
        """Its sizes and times."""
        return self._settings

    @property
    def local_address(self) -> Address | None:
        """Its own address."""
        return self._address("sockname")

    @property
    def remote_address(self) -> Address | None:
        """The peer's."""
        return self._address("peername")

    def _address(self, which: str) -> Address | None:
        self._check_open()
        assert self._end is not None
        return self._end.line.address(which) if self._end.line is not None else None

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Of anyio's `SocketAttribute`: both addresses."""
        return {
            anyio.abc.SocketAttribute.local_address: lambda: self.local_address,
            anyio.abc.SocketAttribute.remote_address: lambda: self.remote_address,
        }

    def traffic(self) -> TrafficStatistics:
        """What went over it, as it is now."""
        return self._now().statistics()

    # ---- Messages

    def send(self, item: "Buffer", *, immediate: int | None = None) -> Coroutine[Any, Any, None]:
        """Send a message; when this is awaited it is on its way, and its memory is the caller's again.

        It waits while the peer has no receive for it, or all send buffers are on their way. Where it is cancelled, the
        peer gets nothing of the message.

        :param item: its bytes, contiguous; bytes from 0 to what the peer takes.
        :param immediate: 32 bits that go with it: see `receive_with_immediate`.
        :raises BrokenResourceError: the connection is broken, when it is awaited, as the next.
        :raises ClosedResourceError: it is closed, or `send_eof` was called.
        :raises ValueError: the message is longer than the peer takes.
        """
        return self._now().send(item, immediate)

    def receive(self) -> Coroutine[Any, Any, bytes]:
        """The next message, without its immediate data. Where this is cancelled, nothing is lost.

        :raises anyio.EndOfStream: the peer sends no more.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: it is closed.
        :raises BusyResourceError: another task is waiting for a message.
        """
        return self._now().receive()

    async def receive_with_immediate(self) -> tuple[bytes, int | None]:
        """The next message and its immediate data, None where it has none. It raises what `receive` does."""
        received: tuple[bytes, int | None] = await self._now().receive(marked=True)
        return received

    async def send_eof(self) -> None:
        """Tell the peer that no more comes; receiving goes on.

        :raises BrokenResourceError: the connection is broken.
        """
        await self._now().send_frame(FrameKind.END)

    # ---- Memory of the peer

    def write(self, local: Local, remote: "RemoteRegion | Granted", *, fence: bool = False) -> Operation[None]:
        """Write to memory that the peer granted: `QueuePair.write`.

        :raises GrantRevokedError: the peer took it back; so do the others here.
        """
        return self._now().qp.write(local, self._reachable(remote), fence=fence)

    def read(self, local: Local, remote: "RemoteRegion | Granted", *, fence: bool = False) -> Operation[None]:
        """Read memory that the peer granted: `QueuePair.read`."""
        return self._now().qp.read(local, self._reachable(remote), fence=fence)

    def compare_and_swap(
        self, remote: "RemoteRegion | Granted", compare: int, swap: int, *, fence: bool = False
    ) -> Operation[int]:
        """Swap 8 bytes that the peer granted, where they are as expected: `QueuePair.compare_and_swap`."""
        return self._now().qp.compare_and_swap(self._reachable(remote), compare, swap, fence=fence)

    def fetch_and_add(self, remote: "RemoteRegion | Granted", add: int, *, fence: bool = False) -> Operation[int]:
        """Add to 8 bytes that the peer granted: `QueuePair.fetch_and_add`."""
        return self._now().qp.fetch_and_add(self._reachable(remote), add, fence=fence)

    async def write_with_immediate(
        self, local: Local, remote: "RemoteRegion | Granted", immediate: int, *, fence: bool = False
    ) -> None:
        """Write, and then send a message without bytes and with this immediate data: who receives it has the bytes.

        It takes a credit, as any message does.
        """
        written = self.write(local, remote, fence=fence)
        await self._now().send(b"", immediate)
        await written

    def _reachable(self, remote: "RemoteRegion | Granted") -> RemoteRegion:
        region = remote.remote if isinstance(remote, Granted) else remote
        assert self._grants is not None
        self._grants.check(region)
        return region

    async def grant(self, local: RegionSlice | MemoryRegion, access: AccessFlags) -> Grant:
        """Let the peer reach memory, until that is revoked or the connection ends; the peer is told.

        Where the region was registered with ``MW_BIND``, and the device has them, a memory window of type 2 is bound to
        it, which only this connection's peer can use; else, and for parts of regions on soft-RoCE, which does not check
        the bounds of windows, the memory is registered once more. Either way revoking it takes nothing from anybody
        else.

        :param access: what the peer may do: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``.
        :raises BrokenResourceError: the connection is broken.
        :raises ValueError: `access` is something else, or the region was not registered for it.
        :raises VerbsError: the device cannot.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.give(self, local[:] if isinstance(local, MemoryRegion) else local, access)

    async def receive_grant(self) -> Granted:
        """The next region that the peer granted, in the order of its granting.

        :raises anyio.EndOfStream: the peer sends no more.
        :raises BrokenResourceError: the connection is broken.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.next()

    # ---- As bytes

    def as_byte_stream(self) -> "anyio.abc.ByteStream":
        """An anyio `ByteStream` over it, whose bytes have no bounds of messages; closing that closes this."""
        return MessageByteStream(self, self._now().fragment)


# ---- How two ends become a connection


async def _shake_hands(
    line: Line,
    secret: bytes | None,
    connection: Connection,
    *,
    initiator: bool,
) -> Connection:
    """Both parts of `Handshake`: what it needs of the line, and the making of the connection, which is aborted where
    it fails."""
    handshake = Handshake(initiator, os.urandom(16), secret)
    try:
        if isinstance(line, CmLine):
            await _by_manager(line, connection, initiator)
        if initiator:
            await line.send(handshake.hello())
            handshake.hear_hello(await line.receive())
            await line.send(handshake.offer(await connection._prepare()))
            connection._agree(handshake.hear_offer(await line.receive()), line, 0)
            await line.send(handshake.ready())
        else:
            handshake.hear_hello(await line.receive())
            await line.send(handshake.hello())
            peer = handshake.hear_offer(await line.receive())
            ours = await connection._prepare()
            connection._agree(peer, line, 1)
            await line.send(handshake.offer(ours))
            handshake.hear_ready(await line.receive())
        connection._begin(line)
    except BaseException as error:
        if isinstance(error, HandshakeError) and not error.by_peer:
            with contextlib.suppress(OSError, BrokenResourceError, StateError, WorkCompletionError):
                await line.send(refusal_of(error))
        try:
            await connection.abort()
        finally:
            if isinstance(error, Exception) or isinstance(line, CmLine):
                await line.aclose()
            else:
                line.abort()
        raise
    return connection


async def _by_manager(line: CmLine, connection: Connection, initiator: bool) -> None:
    # rdma_cm connects the queue pairs; what there is to say goes over them, and their receives are posted before.
    await connection._prepare()
    assert connection._traffic is not None
    attributes = {"timeout": connection._settings.timeout}
    if initiator:
        await line.connect(connection._traffic, **attributes)
    else:
        await line.accept(connection._traffic, **attributes)


async def answer(line: Line, domain: Domain, secret: bytes | None, settings: ConnectionSettings) -> Connection:
    """Be the end that was asked for a connection; the line is its own.

    :raises HandshakeError: one end refuses the other.
    :raises BrokenResourceError: the peer is gone.
    """
    return await _shake_hands(line, secret, Connection(domain, settings), initiator=False)


class Connecting:
    """What `connect` returns: awaited it gives a `Connection`, ``async with`` closes that at the end."""

    __slots__ = ("_connection", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._connection: Connection | None = None

    def __await__(self) -> Generator[Any, Any, Connection]:
        made: Generator[Any, Any, Connection] = self._make().__await__()
        return made

    async def __aenter__(self) -> Connection:
        self._connection = await self
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._connection is not None
        await self._connection.__aexit__(kind, error, traceback)


def connect(
    host: str,
    port: int,
    *,
    domain: Domain,
    transport: Transport = "auto",
    ssl: tls.SSLContext | None = None,
    server_hostname: str | None = None,
    secret: bytes | None = None,
    settings: ConnectionSettings | None = None,
    timeout_s: float = 10.0,
) -> Connecting:
    """Connect to a peer that listens: ``async with connect(…) as connection``, or ``connection = await connect(…)``.

    :param host: where the peer listens: an address, or a name.
    :param domain: what the queue pair is made on; the connection belongs to the running loop.
    :param transport: by what the two ends find each other: ``"tcp"``; ``"rdmacm"``, on RDMA devices; ``"auto"``: by
        rdma_cm where the device has it and the peer is found so, without TLS; else by TCP.
    :param ssl: for TLS on the TCP connection, which carries the handshake and no data of the user's; the data goes from
        device to device as it is.
    :param server_hostname: the name in the peer's certificate; None: `host`.
    :param secret: what both ends know, and prove to each other without telling it.
    :param settings: sizes and times; None: those of `ConnectionSettings()`.
    :param timeout_s: the longest that all of it may take, in seconds.
    :raises HandshakeError: one end refuses the other.
    :raises OSError: nobody listens there; of these, `ssl.SSLError`: TLS does not come about.
    :raises TimeoutError: it took too long.
    :raises BrokenResourceError: the peer went meanwhile.
    """
    chosen = settings if settings is not None else ConnectionSettings()
    if secret is not None and not secret:
        raise ValueError("a secret has one byte at least; None is for no secret")
    check_transport(transport, ssl)
    sure = transport == "rdmacm"

    async def make() -> Connection:
        async with asyncio.timeout(timeout_s):
            if by_manager(transport, domain, ssl):
                try:
                    return await _by_rdma_cm(host, port, domain, secret, chosen, None if sure else _TRY_S)
                except (*NO_WAY, TimeoutError):
                    if sure:
                        raise
            line = await dial(host, port, ssl, server_hostname)
            return await _shake_hands(line, secret, Connection(domain, chosen), initiator=True)

    return Connecting(make)


async def _by_rdma_cm(
    host: str, port: int, domain: Domain, secret: bytes | None, settings: ConnectionSettings, timeout_s: float | None
) -> Connection:
    context = domain.handle.context
    index = settings.gid_index if settings.gid_index is not None else gid_index(context, settings.port)
    async with asyncio.timeout(timeout_s):  # where nobody answers it is asked again and again
        line = await resolve(host, port, context, context.query_gid(settings.port, index))
    return await _shake_hands(line, secret, Connection(domain, settings), initiator=True)


def check_transport(transport: Transport, ssl: tls.SSLContext | None) -> None:
    """See that there is such a transport, and that it has TLS where that is wanted."""
    if transport not in ("tcp", "rdmacm", "auto"):
        raise ValueError(f'transport is "tcp", "rdmacm" or "auto", not {transport!r}')
    if transport == "rdmacm" and ssl is not None:
        raise ValueError('TLS is for TCP: leave out ssl, or say transport="tcp"')


def by_manager(transport: Transport, domain: Domain, ssl: tls.SSLContext | None) -> bool:
    """Whether rdma_cm is to be asked."""
    context = domain.handle.context
    if transport == "rdmacm" and context.software:
        raise ValueError(f'{context.name} is a software device, which rdma_cm does not know: say transport="tcp"')
    return transport == "rdmacm" or (transport == "auto" and ssl is None and not context.software)
