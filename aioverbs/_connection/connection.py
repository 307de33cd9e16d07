"""Connections: messages, one-sided requests and grants between two processes, with a queue pair at each end."""

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
)  # what the queue pair lets the peer do; the keys of the granted memory decide where
# Errors of ibv_modify_qp that every further attempt would meet, too. All others may pass: the path to the peer, a
# shortage, a device that is being removed and comes back.
_PERMANENT_ERRNOS = {errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_LINGER_S = 0.02  # completions may arrive after the report that the peer is gone

Local = RegionSlice | MemoryRegion | list[RegionSlice] | tuple[RegionSlice, ...]


class ControlChannel(Protocol):
    """Channel that carries the handshake and reports the loss of the peer.

    Implemented by `TcpControlChannel` and `CmControlChannel`.
    """

    async def send(self, data: bytes) -> None:
        """Send one message of the handshake.

        :raises BrokenResourceError: the peer does not acknowledge the message (rdma_cm). By TCP nothing is raised:
            `receive` reports that the peer is gone.
        """

    async def receive(self) -> bytes:
        """Receive the peer's next message of the handshake.

        :returns: the message, header included.
        :raises HandshakeError: the data is not a message of the handshake.
        :raises BrokenResourceError: the peer is gone.
        """

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call `on_lost` with the cause when the peer is gone; at once if the peer is gone already."""

    def unwatch(self) -> None:
        """Stop watching: the callback is not called any more."""

    def address(self, which: str) -> Address | None:
        """Return the local address for ``"sockname"``, the peer's for ``"peername"``; None if the channel is closed."""

    def abort(self) -> None:
        """Close at once, without waiting for the peer."""

    async def aclose(self) -> None:
        """Close, and wait a limited time for the peer to close, too."""


class _ConnectionMonitor:
    """Monitor of a connection: keepalive, detection of a lost peer, and teardown.

    The lifecycle holds this object and not the user's `Connection`, so that a forgotten connection can be collected.

    :param block: memory of the connection's buffers; released by `destroy`.
    :param keep_alive_s: time in seconds after which a silent peer counts as lost; None: never.
    """

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
        """Watch the control channel and start the keepalive timer. Called when the handshake is done."""
        self.control = control
        control.watch(self.on_lost)
        if self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """Probe the peer's device if nothing was sent or received since the last tick, and start the timer again.

        If the peer is gone, the probe fails within the time limit of the queue pair.
        """
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
        """Fail the connection because the peer or the device is gone, after taking what arrived before.

        Returns at once. The connection fails a moment later, or now if the peer has sent END.

        :param error: the cause.
        """
        # The peer's last messages may be in the completion queue already, or arrive in a moment.
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
        """Fail the channel because of `error`, unless closed. Retry soon if a thread is inside a verb."""
        assert self.channel is not None
        if self.channel.closed:
            return
        if not self.channel.poll():
            self._loop.call_soon(self._fail_lost, error)
        elif self.channel.eof_received:
            self.channel.fail("the peer closed the connection")
        elif isinstance(error, DeviceRemovedError):
            self.channel.fail("the device was removed", error)
        else:
            self.channel.fail(f"the peer is gone: {error}", error)

    def on_channel_end(self) -> None:
        """Fail waiting grants and abort the control channel, when the message channel breaks or closes."""
        if self.grants is not None and self.channel is not None:
            self.grants.fail(self.channel.closed_error())
        if self.control is not None and self.channel is not None and self.channel.broken is not None:
            self.control.abort()  # tells the peer

    def stop(self) -> None:
        """Stop the timer and the watching, and close the message channel. First step of closing."""
        if self._timer is not None:
            self._timer.cancel()
        if self.control is not None:
            self.control.unwatch()
        if self.channel is not None:
            self.channel.close()

    async def drain(self) -> None:
        """Close the control channel, and wait a limited time for the peer to close, too.

        The lifecycle calls this when it has closed the queue pair.
        """
        if self.control is not None:
            try:
                await self.control.aclose()
            finally:
                self.control.abort()

    def destroy(self) -> None:
        """Return the buffers to the shared pool and report that the connection is closed."""
        self._block.release()
        self.closed_callback()


class Connection(Resource, anyio.abc.ObjectStream[bytes]):
    """Connection to a peer: messages in both directions, and access to memory that one end grants the other.

    Made by `connect`, `listen` and `serve`. A connection is open when it is returned; `aclose`, or the end of its
    ``async with`` block, closes it. It belongs to the event loop that made it, even if any loop may use its domain:
    calls on another loop raise `AffinityError` and do nothing.

    Messages are `bytes` of any size up to the peer's `ConnectionSettings.max_message`. They arrive whole and in order.
    One task at a time may receive, any number may send.

    When the connection breaks, every waiting and every later call raises `BrokenResourceError` with the cause. When the
    peer has closed or called `send_eof`, receiving raises `anyio.EndOfStream` after the last message.
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

    # ---- Opening and closing

    def _owner(self) -> Affinity:
        """Return the owner of the connection: that of the domain if it is bound to a loop, else the running loop.

        The buffers and the state belong to the loop that made the connection, even where any loop may call the verbs of
        the domain.
        """
        owner = queue_location_of(self._domain).owner
        return owner if owner is not None and owner.bound else Affinity.of_running_loop()

    def _open(self) -> None:
        """Create the queue pair, move it to INIT and post its receives, with the memory and the completion queue that
        `_prepare` obtained.

        :raises VerbsError: the device has no more queue pairs.
        :raises ValueError: the device has no such port or GID.
        :raises HandshakeError: the port has no GID now.
        """
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
        """Create the queue pair with its receives posted, once.

        :returns: the offer that describes this end to the peer; each call returns the same one.
        :raises VerbsError: the device has no queue pair, completion queue or memory region left.
        :raises MemoryError: no memory is left for the buffers.
        :raises ValueError: the device has no such port or GID, or ``spin_ns`` has no meaning for the domain.
        :raises HandshakeError: the port has no GID now.
        """
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
        """Return the offer that `_open` made."""
        assert self._offer is not None
        return self._offer

    def _make_offer(self, qp: QueuePair) -> Offer:
        """Return the offer that describes this end to the peer.

        :raises HandshakeError: the port has no GID now.
        """
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
        """Return the endpoint of the queue pair.

        :raises HandshakeError: the port has no GID now; the reason is TEMPORARY.
        """
        try:
            return qp.local_endpoint()
        except ValueError as error:  # A port loses its GID with its address, and may get both back.
            raise HandshakeError(Reason.TEMPORARY, str(error)) from error

    async def _connect_queue_pair(self, peer: Offer, control: "ControlChannel", handshake_messages: int) -> None:
        """Connect the queue pair to the peer's, unless rdma_cm has done that. Messages may arrive from then on.

        :param peer: the peer's offer.
        :param control: the channel of the handshake.
        :param handshake_messages: number of handshake messages still to be received.
        :raises HandshakeError: the queue pair cannot be connected. The reason is TEMPORARY if another attempt may
            succeed, else DEVICE.
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
                self._endpoint(qp)  # if the GID is gone, the kernel says EINVAL: then raise TEMPORARY
            raise HandshakeError(Reason.TEMPORARY if is_temporary else Reason.DEVICE, str(error)) from error

    def _watch_peer(self, control: ControlChannel) -> None:
        """Watch the control channel before the queue pair is connected.

        If the peer or the device is lost meanwhile, the waiting handshake fails with that cause.
        """
        assert self._monitor is not None
        control.watch(self._monitor.on_lost)

    @property
    def _is_modify_pending(self) -> bool:
        """Whether closing may take long, because a thread is inside ibv_modify_qp for this queue pair."""
        return self._channel is not None and is_modify_pending(self._channel.qp)

    def _finish_handshake(self, control: ControlChannel) -> None:
        """Mark the connection as open. Both ends have completed the handshake."""
        assert self._channel is not None
        assert self._monitor is not None
        assert self._peer is not None
        self._channel.peer = f"{format_address(control.address('peername'))} ({self._peer.device})"
        self._lifecycle.label = f"with {self._channel.peer}"
        self._monitor.start(control)
        self._established = True

    async def open(self) -> "Connection":
        """Return this connection. It is open when it is returned; entering its block does not open it again.

        :raises ClosedResourceError: the connection is closed, or its handshake was never completed.
        """
        if not self._established:
            raise ClosedResourceError(f"{self!r} cannot be opened: its handshake was not completed; connect again")
        self._check_open()
        return self

    async def aclose(self) -> None:
        """Deliver what was sent, notify the peer of the end, and close. Closing twice has no effect.

        Waits until all sent messages are in the peer's memory, where the peer can still receive them. This takes at
        most ``close_timeout_s`` of the settings. After that time, or when this call is cancelled, the rest is lost and
        the peer gets a `BrokenResourceError`. Messages that this end has not received are lost.

        If the event loop of the connection is closed, another loop may close the connection; nothing is delivered then.
        In the child of a fork nothing is done: the connection is the parent's.

        :raises AffinityError: another running event loop owns the connection; nothing was done.
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
        """Close without delivering anything. Requests in flight are dropped, and the peer finds the connection broken.

        Closing twice has no effect.

        :raises AffinityError: another running event loop owns the connection; nothing was done.
        """
        await super().aclose()

    def _open_channel(self) -> MessageChannel:
        """Return the message channel.

        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._channel is not None
        return self._channel

    # ---- Properties

    @property
    def qp(self) -> QueuePair:
        """The queue pair of this end. Only the connection may post sends and receives on it.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._open_channel().qp

    @property
    def peer(self) -> Offer:
        """The peer's offer: its queue pair, sizes, capabilities and the name of its device.

        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._peer is not None
        return self._peer

    @property
    def settings(self) -> ConnectionSettings:
        """`ConnectionSettings` in use at this end: sizes of buffers and queues, and time limits."""
        return self._settings

    @property
    def local_address(self) -> Address | None:
        """Host and port of this end of the control channel (TCP or rdma_cm); None if the channel is closed.

        :raises ClosedResourceError: this connection is closed.
        """
        return self._address("sockname")

    @property
    def remote_address(self) -> Address | None:
        """Host and port of the peer's end of the control channel (TCP or rdma_cm); None if the channel is closed.

        :raises ClosedResourceError: this connection is closed.
        """
        return self._address("peername")

    def _address(self, which: str) -> Address | None:
        """Return the address that the control channel has for ``"sockname"`` or ``"peername"``; None without a channel.

        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._monitor is not None
        return self._monitor.control.address(which) if self._monitor.control is not None else None

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Typed attributes of anyio: `anyio.abc.SocketAttribute.local_address` and ``remote_address``.

        :returns: for each attribute a function without arguments that returns the address, or raises
            `ClosedResourceError`.
        """
        return {
            anyio.abc.SocketAttribute.local_address: lambda: self.local_address,
            anyio.abc.SocketAttribute.remote_address: lambda: self.remote_address,
        }

    def traffic(self) -> ConnectionStatistics:
        """Return current counters of messages and credits.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._open_channel().statistics()

    # ---- Messages

    def send(self, item: "Buffer", *, immediate: int | None = None) -> Coroutine[Any, Any, None]:
        """Send a message. Returns an awaitable; once awaited the message is in flight and `item` may be changed.

        Waits while the peer has no receive posted for the message, or while all send buffers are in flight. If the call
        is cancelled, the peer receives nothing of the message.

        :param item: the message, a contiguous buffer of 0 bytes up to the peer's ``max_message``.
        :param immediate: immediate data, 0..2**32-1, that `receive_with_immediate` returns at the peer; None for no
            immediate data.
        :raises BrokenResourceError: when awaited: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises ValueError: when awaited: the message is longer than the peer accepts, or `immediate` does not fit in 32
            bits.
        :raises AffinityError: when awaited: another event loop owns the connection; nothing was done.
        """
        return self._open_channel().send(item, immediate)

    def receive(self) -> Coroutine[Any, Any, bytes]:
        """Receive the next message, without its immediate data.

        Returns an awaitable; a cancelled call loses no message.

        :returns: the message.
        :raises anyio.EndOfStream: the peer sends no more.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises BusyResourceError: another task is waiting for a message.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        return self._open_channel().receive()

    async def receive_with_immediate(self) -> tuple[bytes, int | None]:
        """Receive the next message with its immediate data. A cancelled call loses no message.

        :returns: the message and its immediate data, 0..2**32-1, or None if it has none.
        :raises anyio.EndOfStream: as `receive`; so are the other exceptions.
        """
        received: tuple[bytes, int | None] = await self._open_channel().receive(with_immediate=True)
        return received

    async def send_eof(self) -> None:
        """Notify the peer that no more messages follow. Receiving goes on.

        Waits as `send` does. If the call is cancelled, the peer is not notified and messages can still be sent.

        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        channel = self._open_channel()
        channel.check_caller("send_eof")
        await channel.send_frame(FrameKind.END)

    # ---- Memory of the peer

    def write(self, local: Local, remote: "RemoteRegion | RemoteGrant", *, fence: bool = False) -> Operation[None]:
        """Post an RDMA write to memory that the peer granted: `QueuePair.write`.

        :param local: registered memory to read from, one region or slice, or a list of slices.
        :param remote: the peer's grant, or a slice of it; as many bytes as `local`.
        :param fence: start after all earlier reads and atomics on this connection are done (IBV_SEND_FENCE).
        :returns: an operation to await, until the peer's device has acknowledged the data. Cancelling the await follows
            the rules of `QueuePair.write`.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises BrokenResourceError: the connection is broken.
        :raises ValueError: an argument is out of range, or has a wrong length; nothing was done.
        :raises WorkCompletionError: when awaited: the request failed, and the connection breaks.
        """
        return self._qp_for("write").write(local, self._region_of(remote), fence=fence)

    def read(self, local: Local, remote: "RemoteRegion | RemoteGrant", *, fence: bool = False) -> Operation[None]:
        """Post an RDMA read of memory that the peer granted: `QueuePair.read`.

        :param local: registered memory to write to, one region or slice, or a list of slices.
        :param remote: the peer's grant, or a slice of it; as many bytes as `local`.
        :param fence: start after all earlier reads and atomics on this connection are done (IBV_SEND_FENCE).
        :returns: an operation to await, until the data is in `local`.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises BrokenResourceError: the connection is broken.
        :raises ValueError: an argument is out of range, or has a wrong length; nothing was done.
        :raises WorkCompletionError: when awaited: the request failed, and the connection breaks.
        """
        return self._qp_for("read").read(local, self._region_of(remote), fence=fence)

    def compare_and_swap(
        self, remote: "RemoteRegion | RemoteGrant", compare: int, swap: int, *, fence: bool = False
    ) -> Operation[int]:
        """Post an atomic compare-and-swap on 8 bytes that the peer granted: `QueuePair.compare_and_swap`.

        :param remote: 8 aligned bytes of the peer's grant.
        :param compare: the expected value, 0..2**64-1.
        :param swap: the value to store if the expected one is found, 0..2**64-1.
        :param fence: start after all earlier reads and atomics on this connection are done (IBV_SEND_FENCE).
        :returns: an operation; awaiting it returns the value before the swap.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises BrokenResourceError: the connection is broken.
        :raises ValueError: an argument is out of range, or has a wrong length; nothing was done.
        :raises WorkCompletionError: when awaited: the request failed, and the connection breaks.
        """
        return self._qp_for("compare_and_swap").compare_and_swap(self._region_of(remote), compare, swap, fence=fence)

    def fetch_and_add(self, remote: "RemoteRegion | RemoteGrant", add: int, *, fence: bool = False) -> Operation[int]:
        """Post an atomic fetch-and-add on 8 bytes that the peer granted: `QueuePair.fetch_and_add`.

        :param remote: 8 aligned bytes of the peer's grant.
        :param add: the number to add, 0..2**64-1, modulo 2**64.
        :param fence: start after all earlier reads and atomics on this connection are done (IBV_SEND_FENCE).
        :returns: an operation; awaiting it returns the value before the addition.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises BrokenResourceError: the connection is broken.
        :raises ValueError: an argument is out of range, or has a wrong length; nothing was done.
        :raises WorkCompletionError: when awaited: the request failed, and the connection breaks.
        """
        return self._qp_for("fetch_and_add").fetch_and_add(self._region_of(remote), add, fence=fence)

    async def write_with_immediate(
        self, local: Local, remote: "RemoteRegion | RemoteGrant", immediate: int, *, fence: bool = False
    ) -> None:
        """Write to memory that the peer granted, then send an empty message with immediate data.

        When the peer receives the message, the written bytes are in its memory. The message takes a credit, as any
        other.

        :param local: registered memory to read from, one region or slice, or a list of slices.
        :param remote: the peer's grant, or a slice of it; as many bytes as `local`.
        :param immediate: immediate data, 0..2**32-1.
        :param fence: start after all earlier reads and atomics on this connection are done (IBV_SEND_FENCE).
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises ValueError: `immediate` does not fit in 32 bits, or `local` and `remote` differ in length.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises WorkCompletionError: the write failed, and the connection breaks.
        """
        channel = self._open_channel()
        channel.check_caller("write_with_immediate")  # all checks come before the write is posted
        channel.check_sending()
        check_immediate(immediate)
        written = self.write(local, remote, fence=fence)
        await channel.send(b"", immediate)
        channel._keep_until_done(written)  # a cancellation must not withdraw the announced write
        await written

    def _region_of(self, remote: "RemoteRegion | RemoteGrant") -> RemoteRegion:
        """Return the address, length and key of a grant or of a slice of one.

        :raises GrantRevokedError: the peer has revoked the grant.
        """
        region = remote.remote if isinstance(remote, RemoteGrant) else remote
        assert self._grants is not None
        if self._grants.revoked:
            self._grants.check(region)
        return region

    def _qp_for(self, operation: str) -> QueuePair:
        """Return the queue pair, after checking that the caller may use it for a one-sided request.

        The queue pair itself refuses calls from a forked child, and from a loop that does not own its domain. If no
        loop owns the domain, any loop may use the queue pair but only one may use the connection: checked here.

        :param operation: name of the method for the error.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection.
        """
        if self._lifecycle.state is not OPEN:
            self._check_open()
        if self._caller_affinity is not None:
            self._caller_affinity.check(self, operation)
        assert self._channel is not None
        return self._channel.qp

    async def grant(self, local: RegionSlice | MemoryRegion, access: AccessFlags) -> Grant:
        """Let the peer access memory until the grant is revoked or the connection ends, and notify the peer.

        If the region was registered with ``MW_BIND`` and the device supports it, a memory window of type 2 is bound to
        the memory, which only this connection's peer can use. Otherwise, and for parts of regions on soft-RoCE, which
        does not check the bounds of windows, the memory is registered once more. In both cases revoking the grant
        affects no other user of the memory.

        :param local: the memory to grant, a region or a slice of one, at least 1 byte.
        :param access: what the peer may do: any of ``REMOTE_READ``, ``REMOTE_WRITE`` and ``REMOTE_ATOMIC``.
        :returns: the grant, for `Grant.revoke`.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises ValueError: `access` has other flags or none, `local` is empty, the region was not registered for this
            access, or 65,535 grants exist.
        :raises VerbsError: the device cannot bind a window or register the memory.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.grant(self, local[:] if isinstance(local, MemoryRegion) else local, access)

    async def receive_grant(self) -> RemoteGrant:
        """Receive the next grant of the peer, in the order in which the peer made them.

        A cancelled call loses no grant.

        A grant that was revoked meanwhile is returned as well, with ``revoked`` set. If the peer makes very
        many grants that are not received, the oldest revoked ones are dropped.

        :returns: the grant, for `read`, `write` and the atomics. It needs no release.
        :raises anyio.EndOfStream: the peer sends no more.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.receive()

    # ---- Byte stream

    def as_byte_stream(self) -> "anyio.abc.ByteStream":
        """Return an `anyio.abc.ByteStream` over this connection, without message boundaries.

        Closing the stream closes the connection.

        :returns: the stream; two streams over one connection would share its messages.
        :raises ClosedResourceError: the connection is closed.
        """
        channel = self._open_channel()
        return MessageByteStream(self, channel.fragment_size, channel.check_caller)


def on_closed(connection: Connection, callback: Callable[[], object]) -> None:
    """Call `callback` when an open connection is closed. A later call replaces the callback."""
    assert connection._monitor is not None
    connection._monitor.closed_callback = callback


async def _retry_while_busy(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat a call until no other thread is inside a verb on the unlocked domain (`ConcurrentAccessError`)."""
    while True:
        with contextlib.suppress(ConcurrentAccessError):
            await call()
            return
        await asyncio.sleep(0)


publish(__name__)
