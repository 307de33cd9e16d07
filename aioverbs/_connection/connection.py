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
from aioverbs._lifecycle.lifecycle import OPEN, Lifecycle
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
)  # operations that the queue pair allows the peer; the keys of the granted memory decide where
# Errors of ibv_modify_qp with which every further attempt would fail, too. All others may go away, such as an
# interrupted path to the peer, a shortage, or a device that is being removed and comes back.
_PERMANENT_ERRNOS = {errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_LINGER_S = 0.02  # completions may still arrive after the report that the peer is gone

Local = RegionSlice | MemoryRegion | list[RegionSlice] | tuple[RegionSlice, ...]


class ControlChannel(Protocol):
    """Channel that carries the handshake and reports the loss of the peer.

    Implemented by `TcpControlChannel` and `CmControlChannel`.
    """

    async def send(self, data: bytes) -> None:
        """Send one message of the handshake.

        :param data: the message, header included.
        :raises BrokenResourceError: with rdma_cm: the peer's device does not acknowledge the message. With TCP this
            method raises nothing: `receive` reports that the peer is gone.
        :raises Exception: with rdma_cm: any other exception that `CmControlChannel.send` raises.
        """

    async def receive(self) -> bytes:
        """Wait for the peer's next message of the handshake.

        :returns: the message, header included.
        :raises HandshakeError: with TCP: the data is not a message of the handshake.
        :raises BrokenResourceError: the peer is gone.
        :raises Exception: with rdma_cm: any other exception that `CmControlChannel.receive` raises.
        """

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call `on_lost` with the cause, an exception, once the peer is gone; within this call if it already is."""

    def unwatch(self) -> None:
        """Stop watching: the callback passed to `watch` is no longer called."""

    def address(self, which: str) -> Address | None:
        """Return the local address if `which` is ``"sockname"``, or the peer's if it is ``"peername"``.

        :returns: the address; None if the channel is not connected yet. After the channel is closed: None with rdma_cm,
            None or the last address with TCP.
        """

    def abort(self) -> bool:
        """End the connection to the peer at once, without waiting for the peer.

        :returns: True if nothing is left to do; False if `aclose` still has to be awaited.
        """

    async def aclose(self) -> None:
        """Close the channel, and wait a limited time for the peer to close its end.

        :raises VerbsError: with rdma_cm: a verb failed.
        """


class _ConnectionMonitor:
    """Monitor of a connection: keepalive, detection of a lost peer, and teardown.

    The lifecycle holds this object and not the user's `Connection`, so that a forgotten connection can be
    garbage-collected.

    :param lifecycle: node of the connection.
    :param block: memory of the connection's buffers, which `destroy` releases.
    :param keep_alive_s: time in seconds after which a silent peer counts as lost; None for no limit.
    """

    def __init__(self, lifecycle: Lifecycle, block: LeasedBuffer, keep_alive_s: float | None) -> None:
        self._lifecycle = lifecycle
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
        """Watch the control channel and start the keepalive timer. Call when the handshake is complete."""
        self.control = control
        control.watch(self.on_lost)
        if self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """Probe the peer's device if no send or receive has completed since the last tick, and restart the timer.

        If the channel is broken or closed, neither probe nor restart the timer. If the peer is gone, the probe fails
        within the time limit of the queue pair, and the connection breaks.
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
        """Fail the connection because the peer or the device is gone, after receiving the peer's last messages.

        This does not wait. The connection fails 20 ms later; or immediately, if the peer has said that it sends no
        more. If the channel is closed, nothing is done.

        :param error: exception that is the cause.
        """
        # The peer's last messages may already be in the completion queue, or arrive in a moment.
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
        """Fail the message channel because of the exception `error`, unless the channel is closed.

        If another thread is inside a verb, do this in a later iteration of the event loop.
        """
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
        """Fail the tasks that wait for grants. If the message channel is broken, also abort the control channel, and
        let the connection be dropped without a warning.

        This is called when the message channel breaks or is closed.
        """
        if self.grants is not None and self.channel is not None:
            self.grants.fail(self.channel.closed_error())
        if self.channel is not None and self.channel.broken is not None:
            self._lifecycle.ended_by_peer = True
            if self.control is not None:
                self.control.abort()  # tells the peer

    def stop(self) -> None:
        """Stop the timer, stop watching the peer, and close the message channel. This is the first step of closing."""
        if self._timer is not None:
            self._timer.cancel()
        if self.control is not None:
            self.control.unwatch()
        if self.channel is not None:
            self.channel.close()

    async def drain(self) -> None:
        """Close the control channel, and wait a limited time for the peer to close its end.

        The lifecycle calls this after it has closed the queue pair.

        :raises VerbsError: with rdma_cm: a verb failed.
        """
        if self.control is not None:
            try:
                await self.control.aclose()
            finally:
                self.control.abort()

    def drain_now(self) -> bool:
        """Do what `drain` does without waiting for the peer.

        :returns: False if `drain` still has to be awaited.
        """
        return self.control is None or self.control.abort()

    def destroy(self) -> None:
        """Return the buffers to the pool that connections share, and call the callback set with `on_closed`."""
        self._block.release()
        self.closed_callback()


class Connection(Resource, anyio.abc.ObjectStream[bytes]):
    """Connection to a peer: messages in both directions, and access to memory that one end grants to the other.

    Use `connect`, `listen` or `serve` to create one. A connection is open when it is returned; `aclose`, or the end of
    its ``async with`` block, closes it. It belongs to the event loop that made it, even if any loop may use its domain:
    calls on another loop raise `AffinityError` and do nothing.

    Messages are `bytes` of any size up to the peer's `ConnectionSettings.max_message`. They arrive whole and in order.
    Only one task at a time may receive; any number of tasks may send.

    When the connection breaks, every waiting and every later call raises `BrokenResourceError` with the first cause,
    which is also `broken`; `wait_lost` waits for that. If the peer has closed the connection or called `send_eof`,
    receiving raises `anyio.EndOfStream` after the last message. A connection that was lost can be dropped; any other
    one has to be closed.
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
        """Return the owner of the connection: the domain's owner if it is bound to a loop, else the running loop.

        The buffers and the state belong to the loop that made the connection, even if any loop may call the verbs of
        the domain.

        :raises ClosedResourceError: the domain is not open.
        :raises RuntimeError: the domain is bound to no loop, and no asyncio event loop is running.
        """
        owner = queue_location_of(self._domain).owner
        return owner if owner is not None and owner.bound else Affinity.of_running_loop()

    def _open(self) -> None:
        """Create the queue pair, move it to INIT, post its receives and make the offer for the peer.

        This uses the memory and the completion queue that `_prepare` obtained.

        :raises VerbsError: the device has no queue pair left, or another verb failed.
        :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings.
        :raises HandshakeError: the port has no GID at the moment.
        :raises ClosedResourceError: the domain is not open.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        block, cq, settings, owner = self._block, self._cq, self._settings, self._lifecycle.owner
        assert block is not None
        assert cq is not None
        assert owner is not None
        monitor = _ConnectionMonitor(self._lifecycle, block, settings.keep_alive_s)
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
        self._lifecycle.drain, self._lifecycle.drain_now = monitor.drain, monitor.drain_now
        self._offer = self._make_offer(qp)

    async def _prepare(self) -> Offer:
        """Create the queue pair and post its receives, unless an earlier call has done so.

        :returns: the offer that describes this end to the peer; each call returns the same one.
        :raises VerbsError: the device has no queue pair, completion queue or memory region left.
        :raises OSError: the process cannot map the memory for the buffers, or has no file descriptor left.
        :raises MemoryError: no memory is left for the buffers.
        :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or
            the domain cannot use ``spin_ns``.
        :raises HandshakeError: the port has no GID at the moment.
        :raises ClosedResourceError: the domain is not open.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
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
        """Return the offer that `_open` made, which describes this end to the peer."""
        assert self._offer is not None
        return self._offer

    def _make_offer(self, qp: QueuePair) -> Offer:
        """Return a new offer that describes this end to the peer.

        :raises HandshakeError: the port has no GID at the moment.
        :raises VerbsError: the device or the port cannot be queried.
        :raises ClosedResourceError: the queue pair is closed.
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
        """Return the endpoint of the queue pair, to be sent to the peer.

        :raises HandshakeError: the port has no GID at the moment; the reason is TEMPORARY.
        :raises VerbsError: the device or the port cannot be queried.
        :raises ClosedResourceError: the queue pair is closed.
        """
        try:
            return qp.local_endpoint()
        except ValueError as error:  # A port loses its GID with its address, and may get both back.
            raise HandshakeError(Reason.TEMPORARY, str(error)) from error

    async def _connect_queue_pair(self, peer: Offer, control: "ControlChannel", handshake_messages: int) -> None:
        """Connect the queue pair to the peer's, unless rdma_cm has already done so. Messages may then arrive.

        :param peer: the peer's offer.
        :param control: the channel that carries the handshake.
        :param handshake_messages: number of handshake messages that the peer has yet to send.
        :raises HandshakeError: the queue pair cannot be connected. The reason is TEMPORARY if another attempt may
            succeed, else DEVICE.
        :raises ClosedResourceError: the queue pair was closed during the call.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: connecting failed with a permanent error, and then the device could not be queried.
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
                self._endpoint(qp)  # if the GID is gone, the kernel reports EINVAL: then raise TEMPORARY
            raise HandshakeError(Reason.TEMPORARY if is_temporary else Reason.DEVICE, str(error)) from error

    def _watch_peer(self, control: ControlChannel) -> None:
        """Start watching the control channel before the queue pair is connected.

        So if the peer or the device is lost during the handshake, the task that performs the handshake gets an
        exception.
        """
        assert self._monitor is not None
        control.watch(self._monitor.on_lost)

    @property
    def _is_modify_pending(self) -> bool:
        """Whether closing may take a long time because a thread is inside ibv_modify_qp for this queue pair."""
        return self._channel is not None and is_modify_pending(self._channel.qp)

    def _finish_handshake(self, control: ControlChannel) -> None:
        """Mark the connection as open and start monitoring the peer. Call when the handshake is complete."""
        assert self._channel is not None
        assert self._monitor is not None
        assert self._peer is not None
        self._channel.peer = f"{format_address(control.address('peername'))} ({self._peer.device})"
        self._lifecycle.label = f"with {self._channel.peer}"
        self._monitor.start(control)
        self._established = True

    async def open(self) -> "Connection":
        """Return this connection itself, after checking that it is open. ``async with`` calls this.

        Connections are opened by `connect`, `listen` and `serve`, not by this method.

        :raises ClosedResourceError: the connection is closed, or its handshake was never completed.
        """
        if not self._established:
            raise ClosedResourceError(f"{self!r} cannot be opened: its handshake was not completed; connect again")
        self._check_open()
        return self

    async def aclose(self) -> None:
        """Deliver all sent messages, notify the peer that no more follow, and close the connection.

        Closing twice has no effect.

        Before closing, this waits until all sent messages are in the peer's memory, from which the peer can still
        receive them, but at most ``close_timeout_s`` of the settings. After that time, or if this call is cancelled,
        messages that were not delivered are lost and the peer's calls raise `BrokenResourceError`. A cancelled call
        closes the connection nevertheless. Messages from the peer that this end has not received yet are lost.

        If the event loop of the connection is closed, another loop may close the connection; no messages are delivered
        then. In a forked child this method does nothing: the connection belongs to the parent.

        :raises AffinityError: another running event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain. The connection is
            not closed, but no longer sends or receives: close it again.
        :raises VerbsError: a verb failed. If the connection is not `closed`, it no longer sends or receives, but can be
            closed again.
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

    def abort(self) -> None:
        """Close the connection without waiting. Messages that are still in flight may be lost.

        This can be called at any moment, in a callback or while the event loop is shutting down. When it returns, the
        peer has been notified, whose calls raise `BrokenResourceError`, and all calls that wait on this end raise
        `ClosedResourceError`. Memory that the device may still access stays pinned until the device is done; a
        background task then closes the rest, and `aclose` waits for that. Aborting twice has no effect.

        On another thread or event loop than that of the connection, as in a finalizer, this only schedules the call on
        the loop of the connection. If that loop is closed, the peer is notified, and closing the domain closes the
        rest. In a forked child this method does nothing: the connection belongs to the parent.

        :raises VerbsError: a verb failed. If the connection is not `closed`, it no longer sends or receives, but can be
            closed again.
        """
        monitor, lifecycle = self._monitor, self._lifecycle
        owner = lifecycle.owner
        if monitor is None or owner is None or lifecycle.inherited or self.closed:
            return
        lifecycle.suppress_warning = True
        if owner.owns():
            _abort(lifecycle, monitor)
            return
        try:
            assert owner.loop is not None
            owner.loop.call_soon_threadsafe(_abort, lifecycle, monitor)
        except RuntimeError:  # the loop is closed
            monitor.drain_now()

    def _open_channel(self) -> MessageChannel:
        """Return the message channel, after checking that the connection is open.

        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._channel is not None
        return self._channel

    # ---- Properties

    @property
    def broken(self) -> BrokenResourceError | None:
        """Exception with which the connection was lost, which all later calls raise; None if it was not lost.

        A connection that the peer has closed counts as lost. This can be read at any time.
        """
        return self._channel.broken if self._channel is not None else None

    async def wait_lost(self) -> BrokenResourceError:
        """Wait until the connection is lost: the peer closed it or is gone, or the device failed.

        :returns: the exception, the same as `broken`.
        :raises ClosedResourceError: this end closed the connection, before or during the call.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        self._check_open()
        assert self._channel is not None
        self._channel.check_caller("wait_lost")
        return await self._channel.wait_broken()

    @property
    def qp(self) -> QueuePair:
        """The `QueuePair` of this end. Only the connection itself may post sends and receives on it.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._open_channel().qp

    @property
    def peer(self) -> Offer:
        """The `Offer` of the peer: its queue pair, sizes, capabilities and the name of its device.

        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._peer is not None
        return self._peer

    @property
    def settings(self) -> ConnectionSettings:
        """The `ConnectionSettings` in use at this end: sizes of buffers and queues, and time limits."""
        return self._settings

    @property
    def local_address(self) -> Address | None:
        """Host and port of this end of the control channel (TCP or rdma_cm); may be None after the channel has ended.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._address("sockname")

    @property
    def remote_address(self) -> Address | None:
        """Host and port of the peer's end of the control channel (TCP or rdma_cm); may be None after it has ended.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._address("peername")

    def _address(self, which: str) -> Address | None:
        """Return an address of the control channel: this end's if `which` is ``"sockname"``, or the peer's if it is
        ``"peername"``.

        :returns: the address; None if there is no control channel, or if `ControlChannel.address` returns None.
        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._monitor is not None
        return self._monitor.control.address(which) if self._monitor.control is not None else None

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Typed attributes of anyio: `anyio.abc.SocketAttribute.local_address` and ``remote_address``.

        :returns: a mapping from each attribute to a function without arguments. The function returns the address, or
            raises `ClosedResourceError` if the connection is closed.
        """
        return {
            anyio.abc.SocketAttribute.local_address: lambda: self.local_address,
            anyio.abc.SocketAttribute.remote_address: lambda: self.remote_address,
        }

    def traffic(self) -> ConnectionStatistics:
        """Return a `ConnectionStatistics`: the numbers of messages sent and received so far, of credits available and
        not yet returned to the peer, of waits, and of messages that only returned credits.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._open_channel().statistics()

    # ---- Messages

    def send(self, item: "Buffer", *, immediate: int | None = None) -> Coroutine[Any, Any, None]:
        """Send a message. This returns an awaitable; when the await returns, the message is in flight and `item` may be
        changed.

        The await waits while the peer has no receive posted for the message, or while all send buffers are in flight.
        If it is cancelled, the peer receives no part of the message.

        :param item: the message, a contiguous buffer of 0 bytes up to the peer's ``max_message``.
        :param immediate: immediate data, 0..2**32-1, which the peer's `receive_with_immediate` returns; None for no
            immediate data.
        :raises BrokenResourceError: when awaited: the connection is broken.
        :raises ClosedResourceError: the connection is closed; when awaited: `send_eof` was called.
        :raises ValueError: when awaited: the message is longer than the peer accepts, or `immediate` does not fit in 32
            bits.
        :raises TypeError: when awaited: `item` is not a contiguous buffer, or `immediate` is not an integer.
        :raises AffinityError: when awaited: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: when awaited: another thread is executing a verb on the same unlocked domain; the
            peer receives no part of the message.
        :raises VerbsError: when awaited: ``ibv_post_send`` failed; the peer receives no part of the message.
        """
        return self._open_channel().send(item, immediate)

    def receive(self) -> Coroutine[Any, Any, bytes]:
        """Wait for the next message. Its immediate data, if it has any, is dropped.

        This returns an awaitable, which raises the exceptions below. A cancelled await loses no message.

        :returns: an awaitable that returns the message as bytes.
        :raises anyio.EndOfStream: the peer sends no more messages, and all that it sent were returned.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises BusyResourceError: another task is already waiting for a message.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; no message is
            lost.
        """
        return self._open_channel().receive()

    async def receive_with_immediate(self) -> tuple[bytes, int | None]:
        """Wait for the next message, and return it with its immediate data. A cancelled call loses no message.

        :returns: a tuple of the message and its immediate data, which is an integer in 0..2**32-1, or None if the peer
            sent no immediate data.
        :raises anyio.EndOfStream: the peer sends no more messages, and all that it sent were returned.
        :raises Exception: any other exception that `receive` raises.
        """
        received: tuple[bytes, int | None] = await self._open_channel().receive(with_immediate=True)
        return received

    async def send_eof(self) -> None:
        """Notify the peer that no more messages or grants follow. This end can still receive, and revoke its grants. A
        second call has no effect.

        This waits in the same cases as `send`. If the call is cancelled or raises `ConcurrentAccessError` or
        `VerbsError`, the peer is not notified and messages can still be sent.

        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        """
        channel = self._open_channel()
        channel.check_caller("send_eof")
        await channel.send_frame(FrameKind.END)

    # ---- Memory of the peer

    def write(self, local: Local, remote: "RemoteRegion | RemoteGrant", *, fence: bool = False) -> Operation[None]:
        """Post an RDMA write to memory that the peer granted: `QueuePair.write`.

        :param local: registered memory that is the source: a region, a slice, or a list of slices.
        :param remote: the peer's grant or a slice of it, of the same length as `local`.
        :param fence: True to start only when all earlier reads and atomics on the connection are done (IBV_SEND_FENCE).
        :returns: an operation. Awaiting it returns None when the peer's device has acknowledged the data. Cancelling
            the await does not stop a request that was posted. If the send queue is full, the request first waits for a
            slot.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed; also when awaited, if that happened before the request
            completed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; nothing was done.
            If the await raises this, the request is unaffected, and the operation can be awaited again.
        :raises BrokenResourceError: the connection is broken; also when awaited, if it broke before the request
            completed, or because the peer is gone.
        :raises ValueError: an argument is out of range or has the wrong length; nothing was done.
        :raises TypeError: `local` is not registered memory, or `remote` is not memory of the peer; nothing was done.
        :raises VerbsError: ``ibv_post_send`` failed; also when awaited, if the request was posted after this call.
        :raises WorkCompletionError: when awaited: the peer's device refused the request. The connection is then broken.
        """
        try:
            return self._qp_for("write").write(local, self._region_of(remote), fence=fence)
        except BrokenResourceError as error:
            raise self._lost(error) from error.__cause__

    def read(self, local: Local, remote: "RemoteRegion | RemoteGrant", *, fence: bool = False) -> Operation[None]:
        """Post an RDMA read of memory that the peer granted: `QueuePair.read`.

        :param local: registered memory that receives the data: a region, a slice, or a list of slices.
        :param remote: the peer's grant or a slice of it, of the same length as `local`.
        :param fence: True to start only when all earlier reads and atomics on the connection are done (IBV_SEND_FENCE).
        :returns: an operation. Awaiting it returns None when the data is in `local`. Cancelling the await does not stop
            a request that was posted. If the send queue is full, the request first waits for a slot.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed; also when awaited, if that happened before the request
            completed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; nothing was done.
            If the await raises this, the request is unaffected, and the operation can be awaited again.
        :raises BrokenResourceError: the connection is broken; also when awaited, if it broke before the request
            completed, or because the peer is gone.
        :raises QueuePairStateError: the device of one end allows no requests of this kind in flight (``max_rd_atomic``
            is 0); nothing was done.
        :raises ValueError: an argument is out of range or has the wrong length; nothing was done.
        :raises TypeError: `local` is not registered memory, or `remote` is not memory of the peer; nothing was done.
        :raises VerbsError: ``ibv_post_send`` failed; also when awaited, if the request was posted after this call.
        :raises WorkCompletionError: when awaited: the peer's device refused the request. The connection is then broken.
        """
        try:
            return self._qp_for("read").read(local, self._region_of(remote), fence=fence)
        except BrokenResourceError as error:
            raise self._lost(error) from error.__cause__

    def compare_and_swap(
        self, remote: "RemoteRegion | RemoteGrant", compare: int, swap: int, *, fence: bool = False
    ) -> Operation[int]:
        """Post an atomic compare-and-swap on 8 bytes that the peer granted: `QueuePair.compare_and_swap`.

        :param remote: 8 aligned bytes of the peer's grant.
        :param compare: the expected value, 0..2**64-1.
        :param swap: the value to store if the expected one is found, 0..2**64-1.
        :param fence: True to start only when all earlier reads and atomics on the connection are done (IBV_SEND_FENCE).
        :returns: an operation; awaiting it returns the value before the swap. If the send queue is full, the request
            first waits for a slot.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed; also when awaited, if that happened before the request
            completed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; nothing was done.
            If the await raises this, the request is unaffected, and the operation can be awaited again.
        :raises BrokenResourceError: the connection is broken; also when awaited, if it broke before the request
            completed, or because the peer is gone.
        :raises QueuePairStateError: the device of one end allows no requests of this kind in flight (``max_rd_atomic``
            is 0); nothing was done.
        :raises ValueError: an argument is out of range or has the wrong length; nothing was done.
        :raises TypeError: `remote` is not memory of the peer, or a value is not an integer; nothing was done.
        :raises VerbsError: ``ibv_post_send`` failed; also when awaited, if the request was posted after this call.
        :raises WorkCompletionError: when awaited: the peer's device refused the request. The connection is then broken.
        """
        try:
            return self._qp_for("compare_and_swap").compare_and_swap(
                self._region_of(remote), compare, swap, fence=fence
            )
        except BrokenResourceError as error:
            raise self._lost(error) from error.__cause__

    def fetch_and_add(self, remote: "RemoteRegion | RemoteGrant", add: int, *, fence: bool = False) -> Operation[int]:
        """Post an atomic fetch-and-add on 8 bytes that the peer granted: `QueuePair.fetch_and_add`.

        :param remote: 8 aligned bytes of the peer's grant.
        :param add: the number to add, 0..2**64-1; the sum is taken modulo 2**64.
        :param fence: True to start only when all earlier reads and atomics on the connection are done (IBV_SEND_FENCE).
        :returns: an operation; awaiting it returns the value before the addition. If the send queue is full, the
            request first waits for a slot.
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises ClosedResourceError: the connection is closed; also when awaited, if that happened before the request
            completed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; nothing was done.
            If the await raises this, the request is unaffected, and the operation can be awaited again.
        :raises BrokenResourceError: the connection is broken; also when awaited, if it broke before the request
            completed, or because the peer is gone.
        :raises QueuePairStateError: the device of one end allows no requests of this kind in flight (``max_rd_atomic``
            is 0); nothing was done.
        :raises ValueError: an argument is out of range or has the wrong length; nothing was done.
        :raises TypeError: `remote` is not memory of the peer, or `add` is not an integer; nothing was done.
        :raises VerbsError: ``ibv_post_send`` failed; also when awaited, if the request was posted after this call.
        :raises WorkCompletionError: when awaited: the peer's device refused the request. The connection is then broken.
        """
        try:
            return self._qp_for("fetch_and_add").fetch_and_add(self._region_of(remote), add, fence=fence)
        except BrokenResourceError as error:
            raise self._lost(error) from error.__cause__

    async def write_with_immediate(
        self, local: Local, remote: "RemoteRegion | RemoteGrant", immediate: int, *, fence: bool = False
    ) -> None:
        """Write to memory that the peer granted, then send an empty message with immediate data.

        When the peer receives the message, the written bytes are in its memory. Like any other message, this one waits
        for a credit. The call returns when the peer's device has acknowledged the written data. If the call is
        cancelled or raises, the data may have been written, with or without the message.

        :param local: registered memory that is the source: a region, a slice, or a list of slices.
        :param remote: the peer's grant or a slice of it, of the same length as `local`.
        :param immediate: immediate data, 0..2**32-1.
        :param fence: True to start only when all earlier reads and atomics on the connection are done (IBV_SEND_FENCE).
        :raises GrantRevokedError: the peer has revoked the grant; nothing was done.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises ValueError: `immediate` does not fit in 32 bits, or `local` and `remote` differ in length.
        :raises TypeError: an argument has the wrong type; nothing was done.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        :raises WorkCompletionError: the write failed. The connection is then broken.
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
        """Return the address, length and key of a grant, or of a slice of a grant, as a `RemoteRegion`.

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
        loop owns the domain, any loop may use the queue pair but only one may use the connection, which this method
        checks.

        :param operation: name of the caller's method, for the error message.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection.
        """
        if self._lifecycle.state is not OPEN:
            self._check_open()
        if self._caller_affinity is not None:
            self._caller_affinity.check(self, operation)
        assert self._channel is not None
        if self._channel.broken is not None:
            raise self._channel.broken
        return self._channel.qp

    def _lost(self, error: BrokenResourceError) -> BrokenResourceError:
        """Return the exception for a request that was refused because the connection or its queue pair is broken.

        :param error: exception with which the request was refused.
        :returns: the exception with the first cause, which all calls raise.
        """
        assert self._channel is not None
        self._channel.fail_queue_pair(error)
        return self._channel.broken or error

    async def grant(self, local: RegionSlice | MemoryRegion, access: AccessFlags) -> Grant:
        """Let the peer access memory until the grant is revoked or the connection ends, and notify the peer.

        This waits in the same cases as `send`. A call that is cancelled or raises grants nothing.

        If the region was registered with ``MW_BIND`` and the device supports it, a memory window of type 2 is bound to
        the memory, which only this connection's peer can use. Otherwise, and for parts of regions on soft-RoCE, which
        does not check the bounds of windows, the memory is registered a second time. In both cases, revoking the grant
        affects no other user of the memory.

        :param local: the memory to grant, a region or a slice of one, at least 1 byte.
        :param access: what the peer may do: any of ``REMOTE_READ``, ``REMOTE_WRITE`` and ``REMOTE_ATOMIC``.
        :returns: the grant, for `Grant.revoke`.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection or the region of `local` is closed, or `send_eof` was called.
        :raises ValueError: `access` is empty or has other flags, `local` is empty, `access` permits writes or atomics
            and the region was registered with ``MW_BIND`` but without ``LOCAL_WRITE``, or 65,535 grants already exist,
            including revoked ones that the peer has not acknowledged yet.
        :raises BufferError: the memory is read-only, and `access` permits writes or atomics.
        :raises WorkCompletionError: a memory window cannot be bound. The connection is then broken.
        :raises VerbsError: the device cannot bind a window or register the memory.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.grant(self, local[:] if isinstance(local, MemoryRegion) else local, access)

    async def receive_grant(self) -> RemoteGrant:
        """Wait for the next grant from the peer. Grants are returned in the order in which the peer made them.

        A cancelled call loses no grant.

        A grant that the peer has already revoked is returned as well, with ``revoked`` set to True. While twice
        ``max_grants`` of the settings wait to be received, each new grant replaces the oldest revoked one.

        :returns: the grant, for `read`, `write` and the atomics. The caller does not have to release it.
        :raises anyio.EndOfStream: the peer closed the connection or called `send_eof`, and all its grants were
            returned.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        self._check_open()
        assert self._grants is not None
        return await self._grants.receive()

    # ---- Byte stream

    def as_byte_stream(self) -> "anyio.abc.ByteStream":
        """Return a new `anyio.abc.ByteStream` over this connection, without message boundaries.

        Closing the stream closes the connection.

        :returns: the stream. Make only one for each connection: two would each receive some of its messages.
        :raises ClosedResourceError: the connection is closed.
        """
        channel = self._open_channel()
        return MessageByteStream(self, channel.fragment_size, channel.check_caller)


def _abort(lifecycle: Lifecycle, monitor: _ConnectionMonitor) -> None:
    """Notify the peer of a connection, and close the connection without waiting. Call on the loop of the connection.

    If another thread is executing a verb on the same unlocked domain, close the connection in a later turn of the loop.

    :param lifecycle: node of the connection.
    :param monitor: monitor of the connection.
    :raises VerbsError: a verb failed. The connection stays open, but no longer sends or receives.
    """
    monitor.drain_now()
    try:
        lifecycle.abort()
    except ConcurrentAccessError:
        running_loop().call_soon(_abort, lifecycle, monitor)


def on_closed(connection: Connection, callback: Callable[[], object]) -> None:
    """Set the function that is called without arguments when the connection, which is open, is closed. This replaces
    the `callback` of an earlier call.
    """
    assert connection._monitor is not None
    connection._monitor.closed_callback = callback


async def _retry_while_busy(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await `call()`, and repeat that as long as it raises `ConcurrentAccessError` because another thread is executing
    a verb on the same unlocked domain.

    :param call: function that returns a new coroutine each time.
    :raises Exception: whatever the coroutine raises, except for `ConcurrentAccessError`.
    """
    while True:
        with contextlib.suppress(ConcurrentAccessError):
            await call()
            return
        await asyncio.sleep(0)


publish(__name__)
