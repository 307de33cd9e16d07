"""Connections: messages, one-sided requests and grants between two processes, with a queue pair at each end."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.abc

from aioverbs._connection.byte_stream import MessageByteStream
from aioverbs._connection.connection_end import ConnectionEnd
from aioverbs._connection.gather import Payload
from aioverbs._connection.grants import Grant, RemoteGrant
from aioverbs._connection.handshake import Offer
from aioverbs._connection.message_channel import ConnectionStatistics
from aioverbs._connection.message_receiver import MessageReceiver
from aioverbs._connection.one_sided import Local, OneSidedRequests, Remote
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.wire import FrameKind
from aioverbs._core.data_path.data_path import FrameSender, Operation, RegionSlice, UnreadMessages
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, running_loop
from aioverbs._lifecycle.lifecycle import OPEN, Lifecycle
from aioverbs._lifecycle.resource import Resource, open_part_now
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._memory.region import MemoryRegion
from aioverbs._verbs.base_domain import Domain, queue_location_of
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.addresses import Address
from aioverbs.attributes import QpCapabilities
from aioverbs.errors import BrokenResourceError, ClosedResourceError, ConcurrentAccessError
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Connection", "await_while_busy", "end_of", "on_closed", "send_constant_nowait"]


class Connection(Resource, anyio.abc.ObjectStream[bytes]):
    """Connection to a peer: messages in both directions, and access to memory that one end grants to the other.

    Use `connect`, `listen` or `serve` to create one. A connection is open when it is returned; `aclose`, or the end of
    its ``async with`` block, closes it. It belongs to the event loop that made it, even if any loop may use its domain:
    calls on another loop raise `AffinityError` and do nothing.

    Messages are `bytes` of any size up to the peer's `ConnectionSettings.max_message`. They arrive whole and in order.
    Only one task at a time may receive; any number of tasks may send.

    When the connection breaks, every waiting and every later call raises a `BrokenResourceError` of its own, whose
    ``__cause__`` is the first one: `broken`. `wait_lost` waits for that. If the peer has closed the connection or
    called `send_eof`, receiving raises `anyio.EndOfStream` after the last message. A connection that was lost can be
    dropped; any other one has to be closed.
    """

    def __init__(self, domain: Domain, settings: ConnectionSettings, block: LeasedBuffer, cq: CompletionQueue) -> None:
        super().__init__(domain)
        self._domain = domain
        self._settings = settings
        self._block = block
        self._cq = cq
        self._end: ConnectionEnd | None = None
        self._requests: OneSidedRequests  # those of `_end`
        self._frames: FrameSender  # of its channel, too
        self._receiver: MessageReceiver
        self._unread: UnreadMessages

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
        """Create the queue pair, in RESET: `ConnectionEnd.post_receives` comes next.

        :raises VerbsError: the device has no queue pair left, or another verb failed.
        :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings.
        :raises ClosedResourceError: the domain is not open.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        settings, lifecycle, location = self._settings, self._lifecycle, queue_location_of(self._domain)
        owner = lifecycle.owner
        assert owner is not None
        depths = _depths(settings.send_depth, settings.receive_depth + 1)
        qp = QueuePair(self, location, self._cq, None, depths, port=settings.port, gid_index=settings.gid_index)
        open_part_now(qp, keeps_parents=False)
        caller = owner if location.owner is None or not location.owner.bound else None  # else the queue pair checks
        end = ConnectionEnd(lifecycle, qp, self._block, settings, self._domain, owner, caller)
        lifecycle.hold(end)
        lifecycle.stop, lifecycle.drain, lifecycle.drain_now = end.stop, end.drain, end.drain_now
        self._end, self._requests = end, end.requests
        channel = end.channel
        self._frames, self._receiver, self._unread = channel.sender.frames, channel.receiver, channel.receiver.unread

    async def open(self) -> "Connection":
        """Return this connection itself, after checking that it is open. ``async with`` calls this.

        Connections are opened by `connect`, `listen` and `serve`, not by this method.

        :raises ClosedResourceError: the connection is closed, or its handshake was never completed.
        """
        if self._end is None or self._end.control is None:
            raise ClosedResourceError(f"{self!r} cannot be opened: its handshake was not completed; connect again")
        self._check_open()
        return self

    async def aclose(self) -> None:
        """Deliver all sent messages, notify the peer that no more follow, and close the connection.

        Closing twice has no effect.

        Before closing, this waits until all sent messages are in the peer's memory, from which the peer can still
        receive them, and those that it reads until the peer has received them, or has dropped them because it
        closes its end; but at most ``close_timeout_s`` of the settings. After that time, or if this call is cancelled,
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
        end, owner = self._end, self._lifecycle.owner
        try:
            if (
                end is not None
                and end.control is not None
                and owner is not None
                and not owner.orphaned
                and self._lifecycle.state is OPEN
                and not self.closed
            ):
                owner.check(self._lifecycle, "aclose")
                end.channel.receiver.discard()
                limit = asyncio.timeout(self._settings.close_timeout_s)
                try:
                    async with limit:
                        await _deliver(end)
                except (BrokenResourceError, ClosedResourceError):
                    pass
                except TimeoutError:
                    if not limit.expired():
                        raise
        finally:
            await super().aclose()

    def abort(self) -> None:
        """Close the connection without waiting. Messages that are still in flight may be lost.

        This can be called at any moment, in a callback or while the event loop is shutting down. When it returns, the
        peer has been notified, whose calls raise `BrokenResourceError`, and all calls that wait on this end raise
        `ClosedResourceError`. Memory that the device may still access stays pinned until the device is done; a
        background task then closes the rest, and `aclose` waits for that. Aborting twice has no effect.

        On another thread or event loop than that of the connection, or while that loop does not run, this notifies the
        peer (with rdma_cm, that is left to the loop or to the closing of the domain) and schedules the rest on the loop
        of the connection. If that loop is closed, closing the domain closes the rest. A finalizer may be called on any
        thread, on that of the loop too, within any call. In a forked child this method does nothing: the connection
        belongs to the parent.

        :raises VerbsError: a verb failed. If the connection is not `closed`, it no longer sends or receives, but can be
            closed again.
        """
        end, lifecycle = self._end, self._lifecycle
        owner = lifecycle.owner
        if end is None or owner is None or lifecycle.inherited or self.closed:
            return
        lifecycle.may_be_dropped = True
        if owner.owns():
            _abort(lifecycle, end)
            return
        lifecycle.suppress_warning = True  # until `_abort` closes the connection
        assert owner.loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            owner.loop.call_soon_threadsafe(_abort, lifecycle, end)
        end.abandon()  # only now, so that the loop finds the call before the end of the control channel

    def _open_end(self) -> ConnectionEnd:
        """Return this end of the connection, after checking that the connection is open.

        :raises ClosedResourceError: the connection is closed.
        """
        self._check_open()
        assert self._end is not None
        return self._end

    # ---- Properties

    @property
    def broken(self) -> BrokenResourceError | None:
        """Exception with which the connection was lost; None if it was not lost.

        All later calls raise exceptions of the same class and text, with this one as their ``__cause__``. To raise one
        of your own, write ``raise … from connection.broken``: an exception that is raised itself keeps the objects of
        its callers, and the connection keeps this one. A connection that the peer has closed counts as lost. This can
        be read at any time.
        """
        return self._end.channel.first_cause() if self._end is not None else None

    async def wait_lost(self) -> BrokenResourceError:
        """Wait until the connection is lost: the peer closed it or is gone, or the device failed.

        :returns: the exception, the same as `broken`.
        :raises ClosedResourceError: this end closed the connection, before or during the call.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        """
        channel = self._open_end().channel
        channel.check_caller("wait_lost")
        return await channel.wait_broken()

    @property
    def qp(self) -> QueuePair:
        """The `QueuePair` of this end. Only the connection itself may post sends and receives on it.

        A request that ended because the peer is gone, or that was flushed, raises `BrokenResourceError` or
        `ClosedResourceError` when it is awaited, like the one-sided requests of the connection, and not
        `WorkCompletionError`.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._open_end().qp

    @property
    def peer(self) -> Offer:
        """The `Offer` of the peer: its queue pair, sizes, capabilities and the name of its device.

        :raises ClosedResourceError: the connection is closed.
        """
        peer = self._open_end().peer
        assert peer is not None
        return peer

    @property
    def settings(self) -> ConnectionSettings:
        """The `ConnectionSettings` in use at this end: sizes of buffers and queues, and time limits."""
        return self._settings

    @property
    def local_address(self) -> Address | None:
        """Host and port of this end of the control channel (TCP or rdma_cm); with rdma_cm None after its end.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._address("sockname")

    @property
    def remote_address(self) -> Address | None:
        """Host and port of the peer's end of the control channel (TCP or rdma_cm); with rdma_cm None after its end.

        :raises ClosedResourceError: the connection is closed.
        """
        return self._address("peername")

    def _address(self, which: str) -> Address | None:
        """Return an address of the control channel: this end's if `which` is ``"sockname"``, or the peer's if it is
        ``"peername"``.

        :returns: the address; None if there is no control channel, or if `ControlChannel.address` returns None.
        :raises ClosedResourceError: the connection is closed.
        """
        control = self._open_end().control
        return control.address(which) if control is not None else None

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
        return self._open_end().channel.statistics()

    # ---- Messages

    async def send(self, item: Payload, *, immediate: int | None = None) -> None:
        """Send a message. When the await returns, the memory of `item` may be changed, and the message is in flight or
        leaves at the end of the loop's turn.

        The await waits while the peer has no receive posted for the message, while all send buffers are in flight, or
        before a long message while the peer has 1 + ``receive_depth`` // 8 others to receive; otherwise it returns
        without letting other tasks run, up to some dozens of messages in one turn of the loop.

        While earlier messages are in flight, messages of at most 16 KiB without immediate data that are sent in one
        turn of the loop leave together, when the turn ends or before the next request on the connection. A caller that
        then blocks the loop's thread delays them.

        Messages of one task arrive in the order of its calls. Tasks that send at the same time have no order among each
        other.

        A message of 192 KiB or more does not go through buffers: the peer's receive call reads it. Below 4 MiB it is
        copied, as long as the peer has at most 12 MiB of such messages to receive. A longer one is read from the memory
        of `item`: the await returns when the peer has received it, or has dropped it because it closes its end. As for
        a short message, that the await returns does not say that the peer's user got the message. If the memory belongs
        to `bytes`, which cannot change, the await returns earlier, within the same limit. The registration cache of the
        domain keeps the memory of a longer message registered, unless it is that of a bytearray, array or mmap, or
        `item` is a memoryview of an object that nothing else refers to.

        If the await is cancelled, the peer receives no part of the message; or all of it, if it was just receiving a
        message of 4 MiB or more.

        :param item: the message, 0 bytes up to the peer's ``max_message``: a contiguous buffer of any format, or a list
            or tuple of them, which the peer receives as one message. The parts are not joined first.
        :param immediate: immediate data, 0..2**32-1, which the peer's `receive_with_immediate` returns; None for no
            immediate data.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises ValueError: the message is longer than the peer accepts, or `immediate` does not fit in 32 bits.
        :raises TypeError: `item` is neither a contiguous buffer nor a list or tuple of them, or `immediate` is not an
            integer.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; the peer receives
            no part of the message.
        :raises VerbsError: ``ibv_post_send`` failed; the peer receives no part of the message. If it fails only after
            the await has returned, for example for messages that leave together, the connection breaks.
        """
        if self._lifecycle.state is OPEN and self._frames.send(item, immediate):
            return
        await self._open_end().channel.sender.send(item, immediate)

    def send_nowait(self, item: Payload, *, immediate: int | None = None) -> None:
        """Send a message that fits in one buffer, if that is possible without waiting.

        When this returns, the memory of `item` may be changed, and the message is in flight or leaves at the end of the
        loop's turn: see `send`.

        :param item: the message, as for `send`, but at most as long as the smaller ``buffer_size`` of both ends. 4
            bytes of that are used for immediate data, if there is any.
        :param immediate: immediate data, as for `send`.
        :raises anyio.WouldBlock: `send` would wait; nothing was sent.
        :raises ValueError: the message is too long to be sent without waiting, or longer than the peer accepts, or
            `immediate` does not fit in 32 bits.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed, or `send_eof` was called.
        :raises TypeError: `item` is neither a contiguous buffer nor a list or tuple of them, or `immediate` is not an
            integer.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; nothing was sent.
        :raises VerbsError: ``ibv_post_send`` failed; nothing was sent. If it fails only later, the connection breaks.
        """
        self._open_end().channel.sender.send_nowait(item, immediate)

    async def receive(self) -> bytes:
        """Wait for the next message. Its immediate data, if it has any, is dropped. A cancelled await loses no message.

        :returns: the message.
        :raises anyio.EndOfStream: the peer sends no more messages, and all that it sent were returned.
        :raises BrokenResourceError: the connection is broken.
        :raises ClosedResourceError: the connection is closed.
        :raises BusyResourceError: another task is already waiting for a message.
        :raises AffinityError: another event loop owns the connection; nothing was done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain; no message is
            lost.
        :raises VerbsError: ``ibv_post_send`` failed, with which a long message is read; no message is lost.
        :raises MemoryError: the process has no memory for the message, which is not lost.
        """
        if self._lifecycle.state is OPEN:
            message = self._unread.take()
            if message is not None:
                return message
        else:
            self._check_open()
        received: bytes = await self._receiver.receive()
        return received

    async def receive_into(self, buffer: "Buffer") -> int:
        """Wait for the next message, and write it to memory of the caller. Its immediate data, if it has any, is
        dropped.

        A cancelled await loses no message. After its end, `buffer` is not written to: if the device is writing to it,
        the cancellation waits for that, and if the peer's device does not answer for 5 seconds, the connection breaks.
        A long message goes directly from the peer's memory to `buffer`, which the registration cache of the domain
        keeps registered for the next time: until `RegistrationCache.drop`, a bytearray cannot be resized and an mmap
        cannot be closed.

        :param buffer: contiguous, writable buffer, of which the message fills the beginning.
        :returns: the length of the message in bytes.
        :raises ValueError: the message is longer than `buffer`. It is not lost: the next call gets it.
        :raises TypeError: `buffer` is not a contiguous, writable buffer.
        :raises VerbsError: the device cannot register `buffer`, or ``ibv_post_send`` failed; no message is lost. The
            other methods need no further registration.
        :raises Exception: any other exception that `receive` raises.
        """
        if self._lifecycle.state is OPEN:
            length = self._unread.take_into(buffer)
            if length >= 0:
                return length
        else:
            self._check_open()
        return await self._receiver.receive_into(buffer)

    def receive_buffer(self) -> Coroutine[Any, Any, memoryview]:
        """Wait for the next message, and return it in writable memory. Its immediate data, if it has any, is dropped.

        This returns an awaitable, which raises the exceptions below. A cancelled await loses no message. The memory is
        used for nothing else while the memoryview, or an object made from it such as an array or a slice, exists. After
        that, it is used for other messages, or unmapped: there is nothing to release.

        :returns: an awaitable that returns a memoryview of format ``B``, as long as the message.
        :raises Exception: whatever `receive` raises.
        """
        received = self._open_end().channel.receiver.receive_view("receive_buffer", is_writable=True)
        return cast("Coroutine[Any, Any, memoryview]", received)

    async def receive_with_immediate(self) -> tuple[bytes, int | None]:
        """Wait for the next message, and return it with its immediate data. A cancelled call loses no message.

        :returns: a tuple of the message and its immediate data, which is an integer in 0..2**32-1, or None if the peer
            sent no immediate data.
        :raises anyio.EndOfStream: the peer sends no more messages, and all that it sent were returned.
        :raises Exception: any other exception that `receive` raises.
        """
        received: tuple[bytes, int | None] = await self._open_end().channel.receiver.receive(with_immediate=True)
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
        channel = self._open_end().channel
        channel.check_caller("send_eof")
        await channel.sender.send_frame(FrameKind.END)

    # ---- Memory of the peer

    def write(self, local: Local, remote: Remote, *, fence: bool = False) -> Operation[None]:
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
        if self._lifecycle.state is not OPEN:
            self._check_open()
        return self._requests.write(local, remote, fence)

    def read(self, local: Local, remote: Remote, *, fence: bool = False) -> Operation[None]:
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
        if self._lifecycle.state is not OPEN:
            self._check_open()
        return self._requests.read(local, remote, fence)

    def compare_and_swap(self, remote: Remote, compare: int, swap: int, *, fence: bool = False) -> Operation[int]:
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
        if self._lifecycle.state is not OPEN:
            self._check_open()
        return self._requests.compare_and_swap(remote, compare, swap, fence)

    def fetch_and_add(self, remote: Remote, add: int, *, fence: bool = False) -> Operation[int]:
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
        if self._lifecycle.state is not OPEN:
            self._check_open()
        return self._requests.fetch_and_add(remote, add, fence)

    async def write_with_immediate(self, local: Local, remote: Remote, immediate: int, *, fence: bool = False) -> None:
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
        await self._open_end().requests.write_with_immediate(local, remote, immediate, fence)

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
        return await self._open_end().grants.grant(self, local[:] if isinstance(local, MemoryRegion) else local, access)

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
        return await self._open_end().grants.receive()

    # ---- Byte stream

    def as_byte_stream(self) -> "anyio.abc.ByteStream":
        """Return a new `anyio.abc.ByteStream` over this connection, without message boundaries.

        Of 4 MiB or more that are sent at once, no copy is made, but of a last piece of less than 4 MiB: the peer reads
        them from where they are.

        Closing the stream closes the connection.

        :returns: the stream. Make only one for each connection: two would each receive some of its messages.
        :raises ClosedResourceError: the connection is closed.
        """
        return MessageByteStream(self, self._open_end().channel)


@functools.lru_cache
def _depths(sends: int, receives: int) -> QpCapabilities:
    """Return the capabilities of the queue pairs of connections, the same object for all of them."""
    return QpCapabilities(max_send_wr=sends, max_recv_wr=receives)


def _abort(lifecycle: Lifecycle, end: ConnectionEnd) -> None:
    """Notify the peer of a connection, and close the connection without waiting. Call on the loop of the connection.

    If a verb is in flight on the same unlocked domain, close the connection in a later turn of the loop. The channel is
    closed first, so that until then the end of the control channel does not count as the loss of the peer. If this
    fails, dropping the connection closes it.

    :param lifecycle: node of the connection.
    :param end: this end of the connection.
    :raises VerbsError: a verb failed. The connection stays open, but no longer sends or receives.
    """
    lifecycle.suppress_warning = False
    end.stop()
    end.drain_now()
    try:
        lifecycle.abort()
    except ConcurrentAccessError:
        lifecycle.suppress_warning = True
        running_loop().call_soon(_abort, lifecycle, end)


def end_of(connection: Connection) -> ConnectionEnd:
    """Return this end of a connection that was opened. For use by other modules of the library."""
    assert connection._end is not None
    return connection._end


def on_closed(connection: Connection, callback: Callable[[], object]) -> None:
    """Set the function that is called without arguments when the connection, which is open, is closed. This replaces
    the `callback` of an earlier call.
    """
    end_of(connection).closed_callback = callback


def send_constant_nowait(connection: Connection, message: Payload) -> bool:
    """Send a message whose memory does not change until the peer has received it, if that is possible without waiting.
    For use by other packages of the library.

    :param connection: the connection.
    :param message: the message, of any length.
    :returns: whether the message was sent. If not, `Connection.send` has to wait, or refuses it.
    :raises Exception: whatever `Connection.send` raises; nothing was sent.
    """
    if connection._lifecycle.state is OPEN and connection._frames.send(message, nowait=True):
        return True
    return connection._open_end().channel.sender.send_constant_nowait(message)


async def _deliver(end: ConnectionEnd) -> None:
    """Notify the peer that no more messages follow, and wait until it has all of them.

    :raises BrokenResourceError: the connection broke first.
    :raises ClosedResourceError: this end was closed first.
    :raises Exception: any other exception that `MessageSender.send_frame` raises.
    """
    sender = end.channel.sender
    await await_while_busy(lambda: sender.send_frame(FrameKind.END, last=True))
    await await_while_busy(sender.wait_delivered)
    if end.announcer is not None:
        await end.announcer.wait_answered()


async def await_while_busy(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await `call()`, and repeat that as long as it raises `ConcurrentAccessError` because another thread is executing
    a verb on the same unlocked domain. For use by other modules of the library.

    :param call: function that returns a new coroutine each time.
    :raises Exception: whatever the coroutine raises, except for `ConcurrentAccessError`.
    """
    while True:
        with contextlib.suppress(ConcurrentAccessError):
            await call()
            return
        await asyncio.sleep(0)


publish(__name__)
