"""Connections: messages, one-sided requests and grants between two ends, over a queue pair of each."""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc

from aioverbs._connection.byte_stream import MessageByteStream
from aioverbs._connection.cm_control import CmControlChannel
from aioverbs._connection.grants import Grant, Grants, RemoteGrant, has_windows
from aioverbs._connection.handshake import Capabilities, Offer, Reason
from aioverbs._connection.message_channel import ConnectionStatistics, MessageChannel, check_immediate
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.shared_queues import completion_queue_for, lease_block
from aioverbs._connection.wire import FrameKind
from aioverbs._core.data_path.data_path import Operation, RegionSlice, RemoteRegion
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, running_loop
from aioverbs._lifecycle.lifecycle import OPEN
from aioverbs._lifecycle.resource import Resource, open_part_now
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._memory.region import MemoryRegion
from aioverbs._verbs.base_domain import Domain, queue_location_of
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs._verbs.endpoint import Endpoint
from aioverbs._verbs.qp_modify import establish_cancellable, is_modify_pending
from aioverbs._verbs.queue_pair import QueuePair, qp_work_state_of
from aioverbs.addresses import Address, format_address
from aioverbs.attributes import QpCapabilities
from aioverbs.errors import (
    BrokenResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceRemovedError,
    HandshakeError,
    TransitionError,
    VerbsError,
)
from aioverbs.types import AccessFlags, AtomicCap

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Connection", "ControlChannel", "on_closed"]

_ACCESS = (
    AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
)  # of a peer; what it reaches of memory its keys say
# Error numbers of connecting a queue pair that any other attempt would meet, too; all else may pass: the path to the
# peer, a shortage, a device that is being removed and comes back.
_PERMANENT_ERRNOS = {errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_LINGER_S = 0.02  # completions may be behind the news that the peer is gone

Local = RegionSlice | MemoryRegion | list[RegionSlice] | tuple[RegionSlice, ...]


class ControlChannel(Protocol):
    """What carries the handshake and tells that the peer is gone: a `TcpControlChannel`, or what rdma_cm has for it."""

    async def send(self, data: bytes) -> None:
        """Say something."""

    async def receive(self) -> bytes:
        """Hear the peer's next message."""

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call this when the peer is gone."""

    def unwatch(self) -> None:
        """Call nobody any more."""

    def address(self, which: str) -> Address | None:
        """`sockname` or `peername`."""

    def abort(self) -> None:
        """End it at once."""

    async def aclose(self) -> None:
        """End it."""


class _ConnectionMonitor:
    """How a connection ends. Its life keeps this, and not the user's object."""

    def __init__(self, block: LeasedBuffer, keep_alive_s: float | None) -> None:
        self.channel: MessageChannel | None = None
        self.grants: Grants | None = None
        self.control: ControlChannel | None = None
        self._block = block
        self._tick_s = keep_alive_s / 4 if keep_alive_s is not None else None
        self._loop = running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_completed = -1
        self.closed_callback: Callable[[], object] = lambda: None

    def start(self, control: ControlChannel) -> None:
        """The handshake is over."""
        self.control = control
        control.watch(self.on_lost)
        if self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        # Whoever says or hears nothing for a while asks the peer's device for a sign of life. That fails within the
        # time limit of the queue pair.
        channel = self.channel
        if channel is None or channel.broken is not None or channel.closed or self._tick_s is None:
            return
        work = qp_work_state_of(channel.qp)
        assert work is not None
        assert work.send_queue is not None
        completed = channel.receive_queue.completed + work.send_queue.completed
        if completed == self._last_completed:
            channel.send_keepalive()
        self._last_completed = completed
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def on_lost(self, error: Exception) -> None:
        """The peer or the device is gone."""
        # What it sent last may be there already, or just about to be.
        assert self.channel is not None
        if self.channel.closed:
            return
        if not self.channel.poll():
            self._loop.call_soon(self.on_lost, error)
        elif self.channel.eof_received:
            self._fail_lost(error)
        else:
            self._loop.call_later(_LINGER_S, self._fail_lost, error)

    def _fail_lost(self, error: Exception) -> None:
        assert self.channel is not None
        if self.channel.closed:
            return
        if not self.channel.poll():
            self._loop.call_soon(self._fail_lost, error)
        elif self.channel.eof_received:
            self.channel.fail("the peer closed it")
        elif isinstance(error, DeviceRemovedError):
            self.channel.fail("the device was removed", error)
        else:
            self.channel.fail(f"the peer is gone: {error}", error)

    def on_channel_end(self) -> None:
        """It is broken, or being closed."""
        if self.grants is not None and self.channel is not None:
            self.grants.fail(self.channel.closed_error())
        if self.control is not None and self.channel is not None and self.channel.broken is not None:
            self.control.abort()  # by which the peer knows

    def stop(self) -> None:
        """It is being closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self.control is not None:
            self.control.unwatch()
        if self.channel is not None:
            self.channel.close()

    async def drain(self) -> None:
        """Its queue pair is closed."""
        if self.control is not None:
            try:
                await self.control.aclose()
            finally:
                self.control.abort()

    def destroy(self) -> None:
        """Give back what others have a use for."""
        self._block.release()
        self.closed_callback()


class Connection(Resource, anyio.abc.ObjectStream[bytes]):
    """A connection with a peer: messages both ways, and what each lets the other do in its memory.

    Made by `connect`, `listen` and `serve`; open when it is handed out, closed by `aclose` or the end of its block. It
    belongs to the loop that made it, whoever may use its domain: elsewhere what is asked of it raises `AffinityError`,
    and nothing is done. Its messages are `bytes` of any size up to what the peer takes, and arrive whole and in order.
    One task at a time receives; any number may send.

    What breaks it is raised as `BrokenResourceError`, with its cause, by whatever is asked of it then; that the peer
    sends no more is `anyio.EndOfStream`, after all that it sent.
    """

    def __init__(self, domain: Domain, settings: ConnectionSettings) -> None:
        super().__init__(domain)
        self._domain = domain
        self._settings = settings
        self._block: LeasedBuffer | None = None
        self._cq: CompletionQueue | None = None
        self._channel: MessageChannel | None = None
        self._grants: Grants | None = None
        self._monitor: _ConnectionMonitor | None = None
        self._offer: Offer | None = None
        self._peer: Offer | None = None
        self._established = False
        self._caller_affinity: Affinity | None = None

    # ---- Life

    def _owner(self) -> Affinity:
        # Its buffers and its state are the loop's that made it, also where the verbs of its domain are anybody's.
        owner = queue_location_of(self._domain).owner
        return owner if owner is not None and owner.bound else Affinity.of_running_loop()

    def _open(self) -> None:
        block, cq, settings, owner = self._block, self._cq, self._settings, self._lifecycle.owner
        assert block is not None
        assert cq is not None
        assert owner is not None
        monitor = _ConnectionMonitor(block, settings.keep_alive_s)
        self._lifecycle.hold(monitor)
        qp_owner = queue_location_of(self._domain).owner
        self._caller_affinity = owner if qp_owner is None or not qp_owner.bound else None  # else the queue pair checks
        depths = QpCapabilities(max_send_wr=settings.send_depth, max_recv_wr=settings.receive_depth + 1)
        qp = QueuePair(
            self, queue_location_of(self._domain), cq, None, depths, port=settings.port, gid_index=settings.gid_index
        )
        open_part_now(qp, keeps_parents=False)
        channel = MessageChannel(
            qp, owner, block, settings, lambda kind, number, data: grants.on_frame(kind, number, data)
        )
        grants = Grants(channel, self._domain.base.handle, settings.max_grants)
        channel.on_end = monitor.on_channel_end
        monitor.channel, monitor.grants = channel, grants
        self._channel, self._grants, self._monitor = channel, grants, monitor
        qp.to_init(qp_access_flags=_ACCESS)
        channel.post_receives()
        self._lifecycle.stop = monitor.stop
        self._lifecycle.drain = monitor.drain
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
        return self._prepared_offer()

    def _prepared_offer(self) -> Offer:
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
            self._endpoint(qp),
            settings.buffer_size,
            settings.receive_depth,
            settings.max_message,
            capabilities,
            atomics,
            context.name,
        )

    def _endpoint(self, qp: QueuePair) -> Endpoint:
        try:
            return qp.local_endpoint()
        except ValueError as error:  # a port without a GID, which goes and comes with its address
            raise HandshakeError(Reason.TEMPORARY, str(error)) from error

    async def _connect_queue_pair(self, peer: Offer, control: "ControlChannel", handshake_messages: int) -> None:
        """Connect the queue pair with the peer's, where it is not yet; from then on messages may come.

        :param early: messages of the handshake that are still to come.
        """
        assert self._channel is not None
        self._peer = peer
        is_rdma_cm = isinstance(control, CmControlChannel)
        self._channel.start(peer.depth, peer.buffer_size, peer.max_message, handshake_messages if is_rdma_cm else 0)
        if is_rdma_cm:
            return
        qp = self._channel.qp
        try:
            here = self._endpoint(qp)
            attributes = self._settings.repetitions(software=qp.handle.context.software)
            attributes["av"] = here.path_to(peer.endpoint, port_num=self._settings.port, sgid_index=qp.gid_index)
            await establish_cancellable(qp, peer.endpoint, attributes)
        except (BrokenResourceError, TransitionError, ValueError, VerbsError) as error:
            is_temporary = isinstance(error, BrokenResourceError) or (
                isinstance(error, VerbsError) and error.errno not in _PERMANENT_ERRNOS
            )
            if not is_temporary:
                self._endpoint(qp)  # a GID may have gone before the kernel looked at it, which then says EINVAL
            raise HandshakeError(Reason.TEMPORARY if is_temporary else Reason.DEVICE, str(error)) from error

    def _watch_peer(self, control: ControlChannel) -> None:
        """The queue pair is about to be connected: who waits there is to know why the peer, or the device, is gone."""
        assert self._monitor is not None
        control.watch(self._monitor.on_lost)

    @property
    def _is_modify_pending(self) -> bool:
        """Whether its closing may take long, as a thread is in a verb for its queue pair."""
        return self._channel is not None and is_held_up(self._channel.qp)

    def _finish_handshake(self, control: ControlChannel) -> None:
        """Both are through with the handshake."""
        assert self._channel is not None
        assert self._monitor is not None
        assert self._peer is not None
        self._channel.peer = f"{written(control.address('peername'))} ({self._peer.device})"
        self._lifecycle.label = f"with {self._channel.peer}"
        self._monitor.start(control)
        self._established = True

    async def open(self) -> "Connection":
        """It is open when it is handed out: its block only closes it."""
        if not self._established:
            raise ClosedResourceError(f"{self!r} cannot be opened: connect again")
        self._check_open()
        return self

    async def aclose(self) -> None:
        """Deliver what was sent, tell the peer that no more comes, and close. In the child of a fork nothing is done.

        Delivered is what lies in the peer's memory, to be received there. That takes ``close_timeout_s`` at most, or
        the rest is lost, as it is where this is cancelled; the peer is told of that by a `BrokenResourceError`. What
        the peer sent and was not received is lost. So is all of it where the connection's loop is closed, and another
        one closes this. Closing twice is fine.

        :raises AffinityError: another event loop owns it; nothing was done.
        """
        channel, owner = self._channel, self._lifecycle.owner
        try:
            if (
                channel is not None
                and owner is not None
                and not owner.orphaned
                and self._established
                and self._lifecycle.state is OPEN
                and not self.closed
            ):
                owner.check(self._lifecycle, "aclose")
                with (
                    contextlib.suppress(BrokenResourceError, ClosedResourceError),
                    anyio.move_on_after(self._settings.close_timeout_s),
                ):
                    await _retry_while_busy(lambda: channel.send_frame(FrameKind.END, last=True))
                    await _retry_while_busy(channel.wait_delivered)
        finally:
            await super().aclose()

    async def abort(self) -> None:
        """Close without delivering anything: what is under way is given up; the peer finds the connection broken."""
        await super().aclose()

    def _open_channel(self) -> MessageChannel:
        self._check_open()
        assert self._channel is not None
        return self._channel

    # ---- What is known

    @property
    def qp(self) -> QueuePair:
        """Its queue pair; sends and receives of it are the connection's own."""
        return self._open_channel().qp

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
        assert self._monitor is not None
        return self._monitor.control.address(which) if self._monitor.control is not None else None

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Of `anyio.abc.SocketAttribute`: both addresses."""
        return {
            anyio.abc.SocketAttribute.local_address: lambda: self.local_address,
            anyio.abc.SocketAttribute.remote_address: lambda: self.remote_address,
        }

    def traffic(self) -> ConnectionStatistics:
        """What went over it, as it is now."""
        return self._open_channel().statistics()

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
        return self._open_channel().send(item, immediate)

    def receive(self) -> Coroutine[Any, Any, bytes]:
        """The next message, without its immediate data. Where this is cancelled, nothing is lost.

        :raises anyio.EndOfStream: the peer sends no more.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: it is closed.
        :raises BusyResourceError: another task is waiting for a message.
        """
        return self._open_channel().receive()

    async def receive_with_immediate(self) -> tuple[bytes, int | None]:
        """The next message and its immediate data, None where it has none. It raises what `receive` does."""
        received: tuple[bytes, int | None] = await self._open_channel().receive(with_immediate=True)
        return received

    async def send_eof(self) -> None:
        """Tell the peer that no more comes; receiving goes on.

        It waits as `send` does. Where it is cancelled the peer is told nothing, and more can be sent.

        :raises BrokenResourceError: the connection is broken.
        """
        channel = self._open_channel()
        channel.check_caller("send_eof")
        await channel.send_frame(FrameKind.END)

    # ---- Memory of the peer

    def write(self, local: Local, remote: "RemoteRegion | RemoteGrant", *, fence: bool = False) -> Operation[None]:
        """Write to memory that the peer granted: `QueuePair.write`.

        :raises GrantRevokedError: the peer took it back; so do the others here.
        """
        return self._qp_for("write").write(local, self._region_of(remote), fence=fence)

    def read(self, local: Local, remote: "RemoteRegion | RemoteGrant", *, fence: bool = False) -> Operation[None]:
        """Read memory that the peer granted: `QueuePair.read`."""
        return self._qp_for("read").read(local, self._region_of(remote), fence=fence)

    def compare_and_swap(
        self, remote: "RemoteRegion | RemoteGrant", compare: int, swap: int, *, fence: bool = False
    ) -> Operation[int]:
        """Swap 8 bytes that the peer granted, where they are as expected: `QueuePair.compare_and_swap`."""
        return self._qp_for("compare_and_swap").compare_and_swap(self._region_of(remote), compare, swap, fence=fence)

    def fetch_and_add(self, remote: "RemoteRegion | RemoteGrant", add: int, *, fence: bool = False) -> Operation[int]:
        """Add to 8 bytes that the peer granted: `QueuePair.fetch_and_add`."""
        return self._qp_for("fetch_and_add").fetch_and_add(self._region_of(remote), add, fence=fence)

    async def write_with_immediate(
        self, local: Local, remote: "RemoteRegion | RemoteGrant", immediate: int, *, fence: bool = False
    ) -> None:
        """Write, and then send a message without bytes and with this immediate data: who receives it has the bytes.

        It takes a credit, as any message does.
        """
        channel = self._open_channel()
        channel.check_caller("write_with_immediate")  # this, and what follows, before anything is written
        channel.check_sending()
        check_immediate(immediate)
        written = self.write(local, remote, fence=fence)
        await channel.send(b"", immediate)
        channel._keep_until_done(written)  # a cancellation must not withdraw the announced write
        await written

    def _region_of(self, remote: "RemoteRegion | RemoteGrant") -> RemoteRegion:
        region = remote.remote if isinstance(remote, RemoteGrant) else remote
        assert self._grants is not None
        if self._grants.revoked:
            self._grants.check(region)
        return region

    def _qp_for(self, operation: str) -> QueuePair:
        # What comes from another process than its own, or from another loop than that of its domain, the queue pair
        # refuses by itself. Of a domain that is nobody's, anybody may use the queue pair, but not the connection.
        if self._lifecycle.state is not OPEN:
            self._check_open()
        if self._caller_affinity is not None:
            self._caller_affinity.check(self, operation)
        assert self._channel is not None
        return self._channel.qp

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
        return await self._grants.grant(self, local[:] if isinstance(local, MemoryRegion) else local, access)

    async def receive_grant(self) -> RemoteGrant:
        """The next region that the peer granted, in the order of its granting.

        One that was revoked since is given, too, and says so, unless there are very many that nobody asked for: then
        the oldest that were revoked are left out.

        :raises anyio.EndOfStream: the peer sends no more.
        :raises BrokenResourceError: the connection is broken.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.receive()

    # ---- As bytes

    def as_byte_stream(self) -> "anyio.abc.ByteStream":
        """An `anyio.abc.ByteStream` over it, whose bytes have no bounds of messages; closing that closes this."""
        channel = self._open_channel()
        return MessageByteStream(self, channel.fragment_size, channel.check_caller)


def on_closed(connection: Connection, callback: Callable[[], object]) -> None:
    """Call a function, one for each connection, when an open connection is closed."""
    assert connection._monitor is not None
    connection._monitor.closed_callback = callback


async def _retry_while_busy(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call that until no other thread is inside of a domain that any may use."""
    while True:
        with contextlib.suppress(ConcurrentAccessError):
            await call()
            return
        await asyncio.sleep(0)


publish(__name__)
