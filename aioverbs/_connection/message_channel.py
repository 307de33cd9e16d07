"""Messages of any size over a queue pair: fragments, credits and posted receives."""

import asyncio
import functools
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import anyio

from aioverbs._connection.credits import RESERVED_CREDITS, Credits
from aioverbs._connection.reassembly import Assembly
from aioverbs._connection.send_buffers import SendBuffer, SendBuffers
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.wire import (
    CREDITS_AT,
    FIRST,
    HAS_IMMEDIATE,
    IMMEDIATE,
    LAST,
    TOTAL,
    WHOLE,
    FrameKind,
    header,
    parse_header,
)
from aioverbs._core.data_path.data_path import (
    Inbox,
    Operation,
    Received,
    RegionSlice,
    RemoteRegion,
    close_inbox,
    receive_into,
)
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, CrossLoopCondition, running_loop, wake
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._verbs.queue_pair import QueuePair, qp_work_state_of
from aioverbs.errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceRemovedError,
    QueuePairStateError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.types import WcStatus

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ConnectionStatistics", "MessageChannel", "check_immediate"]

_CREDITS_MASK = 0x3FF << CREDITS_AT
_NULL_REMOTE = RemoteRegion(0, 0, 0)


class _Receive(RegionSlice):
    """Registered memory of a receive; `view` is the same memory as a memoryview."""

    __slots__ = ("view",)
    view: memoryview


@dataclass(frozen=True)
class ConnectionStatistics:
    """Counters of a connection. Returned by `Connection.traffic`.

    :param messages_sent: number of user messages sent.
    :param messages_received: number of user messages returned by ``receive``.
    :param credits: number of credits available, each for one message. One of them is reserved for returning credits.
    :param owed: number of credits not yet returned to the peer.
    :param waits: number of times that a message waited for a credit or a buffer.
    :param updates: number of messages sent only to return credits.
    """

    messages_sent: int
    messages_received: int
    credits: int
    owed: int
    waits: int
    updates: int


class MessageChannel:
    """Messages over the queue pair of a connection. The lifecycle holds this object and not the user's `Connection`.

    Each message uses a receive of the peer. The sender has a credit for each receive that the peer has posted, so no
    send is ever answered with an RNR NAK. A receive is posted again as soon as its bytes are copied, but its credit is
    returned only when the user receives the message: a peer whose messages are not read cannot send more. A peer that
    sends without a credit breaks the connection. So the unread data here is never more than the receives can hold, plus
    one incomplete message.

        sender                                     receiver
        uses a credit, sends a fragment   ->
                                                   copies the bytes, posts the receive again
                                                   queues the message
                                                   user calls receive(): credit is owed
        adds the credits                  <-       next message, or CREDITS, returns what is owed

    Before `start` is called, messages are sent and received unframed: they are the handshake over a queue pair that
    rdma_cm connected.

    Methods that the user calls check first that the owner's event loop is running, because neither the credits nor
    asyncio's locks are thread-safe.

    :param qp: queue pair of type RC, in RESET.
    :param owner: owner of the connection, even if any loop may use the queue pair.
    :param block: memory for the buffers.
    :param settings: sizes of this end.
    :param on_control: called with the kind, number and bytes of each control message, except for CREDITS; raises
        ValueError if the message violates the protocol.

    The attribute `on_end` is a function that is called when the channel breaks or is closed.
    """

    def __init__(
        self,
        qp: QueuePair,
        owner: Affinity,
        block: LeasedBuffer,
        settings: ConnectionSettings,
        on_control: Callable[[FrameKind, int, bytes], None],
    ) -> None:
        self.qp = qp
        self._owner = owner
        self.peer = "its peer"
        self.broken: BrokenResourceError | None = None
        self.closed = False
        self.eof_received = False  # the peer sends no more user messages
        self.eof_sent = False
        self.messages_received = self.messages_sent = self.waits = self.updates = 0
        self._settings = settings
        self._on_control = on_control
        self.on_end: Callable[[], object] = lambda: None
        self._ended = CrossLoopCondition()  # notified when the channel breaks or is closed
        self._loop = running_loop()
        self._credits: Credits | None = None
        self.fragment_size = 0  # bytes of a message that fit the buffers of both ends
        self._lock = asyncio.Lock()  # held while a message is sent in more than one step
        self._waiter: asyncio.Future[None] | None = None  # the sender that waits for a credit
        self._pending_controls: dict[int, bool] = {}  # header: fenced; not sent yet for lack of a credit
        # requests that no user awaits; dropping one would withdraw it
        self._own_requests: deque[Operation[None]] = deque()
        self._assembly = Assembly(settings.max_message)
        self._deferred_credits = 0  # credits of fragments that arrived while messages were unread
        self._receive_pending = False
        self._handshake_messages_left = _UNLIMITED
        work = qp_work_state_of(qp)
        assert work is not None
        assert work.receive_queue is not None
        self.receive_queue = work.receive_queue
        self.inbox = Inbox(work.receive_queue, self._on_received, self._on_flushed)
        work.explain_failures(self._explain)
        self._split_block(block)

    def _split_block(self, block: LeasedBuffer) -> None:
        """Divide the leased memory into the receive buffers and the send buffers."""
        size, memory = self._settings.buffer_size, block.buffer
        self._receives: list[_Receive] = []
        offset = 0
        for _ in range(self._settings.receive_depth + 1):  # one more than there are credits, for the handshake
            receive = _Receive(block.region, block.offset + offset, size, block.pins)
            receive.view = memory[offset : offset + size]
            self._receives.append(receive)
            offset += size
        starts = range(offset, offset + self._settings.send_buffers * size, size)
        self._buffers = SendBuffers(
            [SendBuffer(memory[start : start + size], block[start : start + size]) for start in starts]
        )
        self._empty_slice = block[:0]

    def __repr__(self) -> str:
        return f"<Connection with {self.peer}>"

    def check_caller(self, operation: str) -> None:
        """Check that the owner's event loop is running.

        :param operation: name of the caller's method, for the error message.
        :raises AffinityError: another event loop or none is running in this thread.
        :raises ForkedProcessError: the connection was made in the process that this one was forked from.
        """
        self._owner.check(self, operation)

    def post_receives(self) -> None:
        """Post all receives to the queue pair, which the caller has moved to INIT.

        :raises VerbsError: a receive cannot be posted.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        for receive in self._receives:
            _ = receive_into(self.qp, self.inbox, receive)  # the inbox gets the result

    def start(self, depth: int, buffer_size: int, max_message: int, handshake_messages: int) -> None:
        """Set the sizes and credits from the peer's offer. From now on, messages are framed.

        Only the remaining handshake messages still arrive unframed.

        :param depth: number of receives that the peer keeps posted.
        :param buffer_size: size of each of these receives, in bytes.
        :param max_message: size of the longest message that the peer accepts, in bytes.
        :param handshake_messages: number of handshake messages that have yet to arrive on the queue pair.
        :raises ValueError: `depth` is not in 3..1023.
        """
        self._handshake_messages_left = handshake_messages
        self._credits = Credits(depth, self._settings.receive_depth)
        self.fragment_size = min(buffer_size, self._settings.buffer_size)
        self._max_message = max_message

    def statistics(self) -> ConnectionStatistics:
        """Return a `ConnectionStatistics`: the numbers of messages sent and received so far, of credits available and
        not yet returned to the peer, of waits, and of messages that only returned credits. All are 0 before `start` is
        called.
        """
        credit = self._credits
        free, owed = (credit.available, credit.owed) if credit is not None else (0, 0)
        return ConnectionStatistics(self.messages_sent, self.messages_received, free, owed, self.waits, self.updates)

    # ---- Failing and closing

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Mark the channel as broken, fail all waiting callers and move the queue pair to ERR.

        Only the first call has an effect. Waiting and later callers of other methods get a `BrokenResourceError`, or a
        `DeviceRemovedError` if `cause` is one.

        :param reason: text for the message of that exception.
        :param cause: exception that caused the failure; None if there is none.
        """
        if self.broken is not None:
            return
        kind = DeviceRemovedError if isinstance(cause, DeviceRemovedError) else BrokenResourceError
        self.broken = kind(f"the connection with {self.peer} is broken: {reason}")
        self.broken.__cause__ = cause
        close_inbox(self.inbox, self.broken)
        self._wake_all()
        self._end_queue_pair()

    def _end_queue_pair(self) -> None:
        """Move the queue pair to ERR, unless it is broken or closed. If a thread is inside a verb, do so later.

        This is called after all waiting callers were notified, so a delay does no harm. Errors are ignored.
        """
        try:
            work = qp_work_state_of(self.qp)
            if work is not None and work.broken is None:
                self.qp.to_error()
        except ConcurrentAccessError:  # a thread is inside a verb on the unlocked domain: retry soon
            self._loop.call_soon(self._end_queue_pair)
        except BusyResourceError:  # a modify is in flight in a thread: retry after it
            self.receive_queue.when_resumed(self._loop, self._end_queue_pair)
        except (ClosedResourceError, VerbsError, AffinityError):
            return  # closed, or the device is gone, or another loop took over after this one was closed

    def close(self) -> None:
        """Close the channel from this end, and fail all waiting callers with `ClosedResourceError`.

        The queue pair stays open: the connection's lifecycle closes it next.
        """
        self.closed = True
        close_inbox(self.inbox, ClosedResourceError("the connection was closed"))
        self._wake_all()

    def _wake_all(self) -> None:
        """Drop the incomplete message, wake all waiting tasks, and call `on_end`."""
        self._assembly.drop()
        self._wake()
        self._ended.notify()
        self.on_end()

    async def wait_broken(self) -> BrokenResourceError:
        """Wait until the channel breaks, and return the exception that `fail` set.

        :raises ClosedResourceError: the channel is closed.
        """
        await self._ended.wait_while(lambda: self.broken is None and not self.closed)
        if self.broken is None:
            raise self.closed_error()
        return self.broken

    def _wake(self) -> None:
        wake(self._waiter)

    def _on_flushed(self, receive: RegionSlice) -> None:
        """Fail the channel because the device flushed a receive: the queue pair is in ERR or destroyed.

        This has no effect if the channel is broken or closed.

        :param receive: memory of the flushed receive.
        """
        self.fail_queue_pair(None)

    def fail_queue_pair(self, error: Exception | None) -> None:
        """Fail the channel because its queue pair has failed, unless the channel is broken or closed.

        :param error: exception with which a request ended; the cause, unless the queue pair has recorded an earlier
            one. None if there is no such exception.
        """
        if self.broken is None and not self.closed:
            work = qp_work_state_of(self.qp)
            cause = (work.broken if work is not None else None) or error
            self.fail(f"{cause or 'its queue pair is in the error state'}", cause)

    def _explain(self, error: WorkCompletionError) -> Exception:
        """Return the exception that a failed request of the connection raises. This is called in any thread.

        A request that the peer's device refused keeps its own error. All others ended because the peer is gone, or
        because the queue pair had failed before or was closed.

        :param error: error of the request.
        """
        if error.status not in _ENDED_BY_CONNECTION:
            return error
        if self._owner.owns():
            self.fail_queue_pair(error)
        return self.closed_error()

    def closed_error(self) -> Exception:
        """Return the exception for calls on a channel that is closed or broken.

        :returns: the exception that `fail` set; a new `ClosedResourceError` if this end has closed the channel, or if
            `fail` was never called.
        """
        return ClosedResourceError("the connection was closed") if self.closed or not self.broken else self.broken

    def poll(self) -> bool:
        """Process the completions that have arrived, so that received messages are handled.

        :returns: False if nothing was processed because another thread is inside a verb on the unlocked domain: the
            caller has to retry; else True, even if the completion queue has failed.
        """
        dispatcher = self.receive_queue.dispatcher
        if dispatcher is not None and dispatcher.watched:
            try:
                dispatcher.drain()
            except ConcurrentAccessError:
                return False
            except VerbsError:
                return True  # no more completions come
        return True

    # ---- Receiving

    def _on_received(self, received: Received) -> object:
        """Handle the completion of a receive, and post the receive again. Fail the channel if the protocol is violated.

        :param received: the completed receive.
        :returns: a complete message for the caller of `receive`, as bytes or a `MessageWithImmediate`, or a message of
            the handshake for the caller of `receive_handshake`, as bytes; None if there is none.
        """
        receive = cast(_Receive, received.local)
        immediate = received.immediate
        credit = self._credits
        if received.written:  # the receive's memory holds data of an earlier message, maybe of another peer
            self.fail("protocol violation: the peer sent a message as a write with immediate data")
            return None
        if credit is None or self._handshake_messages_left:
            return self._on_handshake_message(receive, received.byte_len)
        try:
            credit.on_message()
            if immediate is not None and not (immediate ^ WHOLE) & ~_CREDITS_MASK and not self.eof_received:
                item: object = bytes(receive.view[: received.byte_len])
                self._assembly.drop()
                self._post(receive)
                if immediate & _CREDITS_MASK:
                    self._add_credits(immediate >> CREDITS_AT & 0x3FF)
                return item
            item = self._handle_frame(receive.view[: received.byte_len], immediate)
            self._post(receive)
            if immediate is not None:
                self._add_credits(immediate >> CREDITS_AT & 0x3FF)
        except ValueError as error:
            self.fail(f"protocol violation: {error}")
            return None
        if item is None and credit.on_consumed():
            self._send_credit_update()
        return None if item is _DEFERRED else item

    def _on_handshake_message(self, receive: _Receive, length: int) -> bytes | None:
        """Copy an unframed message of the handshake, and post its receive again.

        If 4 messages are already waiting for `receive_handshake`, fail the channel instead.

        :param receive: memory of the receive.
        :param length: length of the message in bytes.
        :returns: the copy; None if the channel was failed.
        """
        if len(self.inbox) >= _HANDSHAKE_MESSAGES:
            self.fail(f"protocol violation: the peer sent more than the {_HANDSHAKE_MESSAGES} messages of a handshake")
            return None
        self._handshake_messages_left -= 1
        data = bytes(receive.view[:length])
        self._post(receive)
        return data

    def _post(self, receive: _Receive) -> None:
        """Post a receive again; later if a thread is inside a verb, and never if the queue pair is closed or broken.

        If the verb fails, fail the channel soon: the peer has more credits than there are receives left.
        """
        try:
            _ = receive_into(self.qp, self.inbox, receive)  # the inbox gets the result
        except ConcurrentAccessError:  # another thread is inside a verb: retry soon
            self._loop.call_soon(self._post, receive)
        except BusyResourceError:  # a modify is in flight in a thread: retry after it
            self.receive_queue.when_resumed(self._loop, functools.partial(self._post, receive))
        except (ClosedResourceError, BrokenResourceError, QueuePairStateError, AffinityError):
            return  # the end is reported elsewhere
        except VerbsError as error:  # after the caller has delivered the message that arrived in this receive
            self._loop.call_soon(self.fail, f"a receive cannot be posted again: {error}", error)

    def _handle_frame(self, view: memoryview, immediate: int | None) -> object:
        """Handle a frame: a fragment of a user message, or a control message.

        :param view: bytes of the frame.
        :param immediate: its immediate data, which contains the header; None if it has none.
        :returns: the user message that the frame completes; None if it completes none; ``_DEFERRED`` if it completes
            none and its credit must be returned later.
        :raises ValueError: the frame violates the protocol.
        """
        if immediate is None:
            raise ValueError("the peer sent a message without immediate data")
        kind, flags, _, number = parse_header(immediate)
        if kind == FrameKind.DATA:
            return self._add_fragment(view, flags, number)
        if flags:
            raise ValueError(f"the peer sent a message of kind {kind} with flags {flags:#x}, expected none")
        if kind == FrameKind.END:
            self.eof_received = True
            self._assembly.drop()
            close_inbox(self.inbox)
            self._on_control(FrameKind.END, number, b"")
        elif kind != FrameKind.CREDITS:
            try:
                known = FrameKind(kind)
            except ValueError:
                raise ValueError(f"the peer sent a message of unknown kind {kind}") from None
            self._on_control(known, number, bytes(view))
        return None

    def _add_fragment(self, view: memoryview, flags: int, number: int) -> object:
        """Add a fragment to a user message.

        :param view: bytes of the fragment.
        :param flags: flags of its header.
        :param number: number in its header, which must be 0.
        :returns: the same as `_handle_frame`.
        :raises ValueError: the fragment violates the protocol.
        """
        if self.eof_received:
            raise ValueError("the peer sent a message after END")
        if number:
            raise ValueError(f"the peer sent a user message with number {number}, expected 0")
        whole = self._assembly.add(view, flags)
        if whole is not None:
            return whole
        if len(self.inbox):  # limit the fragments of unread messages: return their credits later
            self._deferred_credits += 1
            return _DEFERRED
        return None

    async def receive(self, with_immediate: bool = False) -> Any:
        """Wait for the next user message. A cancelled call loses no message.

        :param with_immediate: True to return the immediate data as well.
        :returns: the message as bytes; if `with_immediate`, a tuple of the message and its immediate data, which is
            None if the message has none.
        :raises anyio.EndOfStream: the peer sends no more messages, and all that it sent were returned.
        :raises BusyResourceError: another task is already waiting for a message.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        :raises AffinityError: another event loop owns the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        self._owner.check(self, "receive")
        if self._receive_pending:
            raise BusyResourceError("another task is already waiting for a message on this connection")
        self._receive_pending = True
        try:
            item = await self.inbox.__anext__()
        except StopAsyncIteration:
            if self.eof_received:
                raise anyio.EndOfStream from None
            raise self.closed_error() from None
        except BrokenResourceError as error:
            raise self.broken or error from error.__cause__
        except WorkCompletionError as error:
            raise self.closed_error() from error
        finally:
            self._receive_pending = False
        self.messages_received += 1
        credit = self._credits
        assert credit is not None
        due = credit.on_consumed()
        if self._deferred_credits and not len(self.inbox):
            while self._deferred_credits:
                self._deferred_credits -= 1
                due = credit.on_consumed()
        if due:
            self._send_credit_update()
        if type(item) is bytes:
            return (item, None) if with_immediate else item
        return (item.data, item.immediate) if with_immediate else item.data

    async def receive_handshake(self) -> bytes:
        """Wait for the peer's next message of the handshake.

        :returns: the message, header included.
        :raises BrokenResourceError: the peer is gone, or the channel broke for another reason.
        :raises ClosedResourceError: this end closed the channel.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        try:
            return cast(bytes, await self.inbox.__anext__())
        except (StopAsyncIteration, WorkCompletionError) as error:
            raise self.broken or BrokenResourceError("the peer went away during the handshake") from error

    # ---- Credits

    def _add_credits(self, count: int) -> None:
        """Add credits that the peer returned, and send messages that are waiting for credits.

        :param count: number of credits returned.
        :raises ValueError: the peer returns more credits than this end has used.
        """
        assert self._credits is not None
        self._credits.add(count)
        self._send_controls()
        if self._credits.available:
            self._wake()

    def _send_controls(self) -> None:
        """Send the pending control messages, as many as there are credits for. The others stay pending."""
        assert self._credits is not None
        while self._pending_controls and self._credits.sendable:
            immediate, fence = next(iter(self._pending_controls.items()))
            if not self._send_control(immediate, fence, self._send_controls):
                return
            del self._pending_controls[immediate]

    def _send_credit_update(self) -> None:
        """Send a message of kind CREDITS if `Credits.update_due` is True; otherwise do nothing.

        If another thread is inside a verb, try again later.
        """
        assert self._credits is not None
        if self._credits.update_due and self._send_control(header(FrameKind.CREDITS), False, self._send_credit_update):
            self.updates += 1

    def send_control(self, kind: FrameKind, number: int = 0, *, fence: bool = False) -> None:
        """Send a control message that has no payload, now or as soon as a credit is available.

        This does not wait until the message is sent, and reports no errors.

        :param kind: kind of the message.
        :param number: number of the grant, 0..65535.
        :param fence: True to send it only when all earlier reads and atomics are done (IBV_SEND_FENCE).
        """
        self._pending_controls[header(kind, 0, 0, number)] = fence
        self._send_controls()

    def is_control_pending(self, kind: FrameKind, number: int) -> bool:
        """Return whether a control message of this kind and grant number is still waiting for a credit."""
        return header(kind, 0, 0, number) in self._pending_controls

    def _send_control(self, immediate: int, fence: bool, retry: Callable[[], None]) -> bool:
        """Send a control message that has no payload. The caller has checked that a credit is available.

        :param immediate: header of the message, without the number of credits.
        :param fence: True to send it only when all earlier reads and atomics are done (IBV_SEND_FENCE).
        :param retry: called later if a thread that is inside a verb prevents sending now.
        :returns: True if the message was sent, or can never be sent because the queue pair is closed or broken; False
            if `retry` will be called.
        """
        assert self._credits is not None
        returned = self._credits.take()
        try:
            sent = self.qp.send(None, immediate=immediate | returned << CREDITS_AT, fence=fence)
        except BaseException as error:
            self._credits.undo_take(returned)
            if isinstance(error, ConcurrentAccessError):  # another thread is inside a verb: retry soon
                self._loop.call_soon(retry)
                return False
            if isinstance(error, BusyResourceError):
                self.receive_queue.when_resumed(self._loop, retry)
                return False
            if isinstance(error, VerbsError):  # the peer would wait for the message, or for its credits
                self._loop.call_soon(self.fail, f"a control message cannot be sent: {error}", error)
                return True
            if isinstance(error, ClosedResourceError | BrokenResourceError | QueuePairStateError | AffinityError):
                return True  # the end is reported elsewhere
            raise
        self._keep_until_done(sent)
        return True

    def _keep_until_done(self, operation: Operation[None]) -> None:
        """Keep a reference to an operation that no task of the user awaits, until it has ended.

        Without a reference, an operation that waits for a place in the send queue would be withdrawn.
        """
        # Do not poll for completions here: those found would overtake others that were found earlier.
        requests = self._own_requests
        while requests and requests[0].ended:
            del requests[0]
        requests.append(operation)

    async def _wait_for_credit(self, reserved: int) -> None:
        """Wait until more than `reserved` credits are available. No credit is used.

        The caller holds the channel's lock.

        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        """
        assert self._credits is not None
        self.check_usable()
        while self._credits.available <= reserved:
            self.waits += 1
            self._waiter = self._loop.create_future()
            await self._waiter
            self.check_usable()

    def check_usable(self) -> None:
        """Check that the channel is neither broken nor closed.

        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        """
        if self.broken is not None or self.closed:
            raise self.closed_error()

    def check_sending(self) -> None:
        """Check that user messages and grants can still be sent.

        :raises ClosedResourceError: END was sent, or the channel is closed.
        :raises BrokenResourceError: the channel is broken.
        """
        if self.eof_sent:
            raise ClosedResourceError("send_eof() was called: no more messages or grants can be sent")
        self.check_usable()

    # ---- Sending

    async def send_handshake(self, data: bytes) -> None:
        """Send a message of the handshake, and wait until the peer's device acknowledges it.

        :param data: the message, header included.
        :raises BrokenResourceError: the peer's device does not acknowledge the message. The channel is then broken.
        :raises ClosedResourceError: the channel is closed.
        :raises Exception: any other exception that `QueuePair.send` raises.
        """
        buffer = self._buffers.take()
        assert buffer is not None  # no user message is in flight yet
        buffer.view[: len(data)] = data
        sent = self.qp.send(buffer.memory[: len(data)])
        self._buffers.add_in_flight(buffer, sent)
        try:
            await sent
        except WorkCompletionError as error:
            raise self._fail_send(error) from error

    async def send(self, data: "Buffer", immediate: int | None = None) -> None:
        """Send a user message. When this method returns, the message is in flight and `data` may be changed.

        This waits until a credit and a send buffer are available for each fragment. If the call is cancelled or raises,
        the peer receives no part of the message.

        :param data: the message, a contiguous buffer.
        :param immediate: the user's immediate data, 0..2**32-1; None for no immediate data.
        :raises ValueError: the message is longer than the peer accepts, or `immediate` does not fit in 32 bits.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed, or END was sent.
        :raises AffinityError: another event loop owns the connection.
        :raises TypeError: `data` is not a contiguous buffer, or `immediate` is not an integer.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        """
        self._owner.check(self, "send")
        if type(data) is not bytes:
            data = memoryview(data).cast("B")
        length = len(data)
        credit = self._credits
        assert credit is not None
        if (
            length <= self.fragment_size
            and immediate is None
            and self.broken is None
            and not self.closed
            and credit.available > 1
            and not self._lock.locked()
            and not self.eof_sent
        ):
            buffer = self._buffers.take()
            if buffer is not None:
                buffer.view[:length] = data
                self._post_buffer(buffer, length, WHOLE)
                self.messages_sent += 1
                return
        await self._send_slowly(memoryview(data), immediate)

    async def _send_slowly(self, data: memoryview, immediate: int | None) -> None:
        """Send a user message that has several fragments or immediate data, or that has to wait.

        :param data: the message.
        :param immediate: the user's immediate data, 0..2**32-1; None for no immediate data.
        :raises Exception: whatever `send` raises.
        """
        if immediate is not None:
            check_immediate(immediate)
        if len(data) > self._max_message:
            raise ValueError(f"the peer accepts messages of at most {self._max_message:,} bytes, got {len(data):,}")
        async with self._lock:
            self.check_sending()
            flags, prefix = FIRST, b""
            if immediate is not None:
                flags |= HAS_IMMEDIATE
                prefix = IMMEDIATE.pack(immediate)
            if len(prefix) + len(data) > self.fragment_size:
                prefix = TOTAL.pack(len(data)) + prefix
            offset = 0
            while True:
                step = min(len(data) - offset, self.fragment_size - len(prefix))
                last = offset + step == len(data)
                await self._send_frame(
                    header(FrameKind.DATA, flags | (LAST if last else 0)), prefix, data[offset : offset + step]
                )
                offset += step
                if last:
                    break
                flags, prefix = 0, b""
            self.messages_sent += 1

    async def send_frame(self, kind: FrameKind, number: int = 0, data: bytes = b"", *, last: bool = False) -> None:
        """Send a control message after all user messages sent before it.

        This waits until a credit and a send buffer are available. If the call is cancelled or raises, nothing is sent.
        END is sent only once; further calls with END do nothing.

        :param kind: kind of the message.
        :param number: number of the grant, 0..65535; 0 for kinds that concern no grant.
        :param data: payload of the message, at most `fragment_size` bytes, which is not checked.
        :param last: True if this end has no more credits to return, so that even the reserved credit may be used.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed, or END was sent and `kind` is another kind.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises Exception: any other exception that `QueuePair.send` raises, such as `VerbsError`.
        """
        async with self._lock:
            if kind is FrameKind.END and self.eof_sent:
                return
            self.check_sending()
            await self._send_frame(header(kind, 0, 0, number), b"", memoryview(data), 0 if last else RESERVED_CREDITS)
            if kind is FrameKind.END:
                # only now, as a cancelled call has sent nothing; the lock excludes other senders until here
                self.eof_sent = True

    async def _send_frame(
        self, immediate: int, prefix: bytes, data: memoryview, reserved: int = RESERVED_CREDITS
    ) -> None:
        """Wait for a credit and a buffer, then post a fragment or control message. The caller holds the channel's lock.

        :param immediate: header of the message, without the number of credits.
        :param prefix: bytes to send before `data`.
        :param data: bytes of the fragment or control message.
        :param reserved: number of credits to leave for other messages.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        :raises Exception: any other exception that `QueuePair.send` raises; nothing was posted.
        """
        await self._wait_for_credit(reserved)
        buffer = self._buffers.take()
        if buffer is None:
            self.waits += 1
            try:
                await self._buffers.wait(self.probe)
            except WorkCompletionError as error:
                raise self._fail_send(error) from error
            await self._wait_for_credit(reserved)
            buffer = self._buffers.take()
            assert buffer is not None
        end = len(prefix) + len(data)
        buffer.view[: len(prefix)] = prefix
        buffer.view[len(prefix) : end] = data
        self._post_buffer(buffer, end, immediate)

    def _post_buffer(self, buffer: SendBuffer, length: int, immediate: int) -> None:
        """Use a credit and post a send of a filled buffer. If posting fails, the credit and the buffer are free again.

        :param buffer: the buffer, which the caller took from the free ones.
        :param length: number of bytes to send.
        :param immediate: header of the message, without the number of credits.
        :raises Exception: whatever `QueuePair.send` raises.
        """
        credit = self._credits
        assert credit is not None
        returned = credit.take()
        try:
            sent = self.qp.send(buffer.memory[:length], immediate=immediate | returned << CREDITS_AT)
        except BaseException:  # such as AffinityError: nothing was posted
            credit.undo_take(returned)
            self._buffers.release(buffer)
            raise
        self._buffers.add_in_flight(buffer, sent)

    def _fail_send(self, error: WorkCompletionError) -> Exception:
        """Fail the channel because a send failed, and return the exception that the sending method has to raise.

        :param error: exception of the send.
        :returns: the same as `closed_error`.
        """
        self.fail(str(error), error)
        return self.closed_error()

    def probe(self) -> Operation[None]:
        """Post an RDMA write of 0 bytes. When it completes, the peer's device has received all earlier sends.

        :returns: an operation, which the caller awaits or keeps. Awaiting it raises `WorkCompletionError` if the peer's
            device does not answer, or another exception that `Operation` lists.
        :raises ClosedResourceError: the queue pair is closed.
        :raises BrokenResourceError: the queue pair is in ERR.
        :raises Exception: any other exception that `QueuePair.write` raises.
        """
        return self.qp.write(self._empty_slice, _NULL_REMOTE)

    def send_keepalive(self) -> None:
        """Post a probe without waiting for it. If the peer's device does not answer, the queue pair goes to ERR.

        If the probe cannot be posted, nothing is done.
        """
        try:
            keepalive = self.probe()
        except ConcurrentAccessError:
            return  # another thread is inside a verb: the next call retries
        except (ClosedResourceError, BrokenResourceError, QueuePairStateError, AffinityError, VerbsError):
            return  # the end is reported elsewhere
        self._keep_until_done(keepalive)

    async def wait_delivered(self) -> None:
        """Wait until all sent messages are in the peer's memory. The time is not limited here.

        :raises BrokenResourceError: the peer's device does not acknowledge the messages. The channel is then broken.
        :raises ClosedResourceError: the channel is closed.
        :raises Exception: any other exception that `probe` raises, such as `ConcurrentAccessError`.
        """
        try:
            await self.probe()
        except WorkCompletionError as error:
            raise self._fail_send(error) from error


def check_immediate(immediate: int) -> None:
    """Check that a value can be sent as immediate data: an integer in 0..2**32-1.

    :raises TypeError: the value is not an integer.
    :raises ValueError: the integer does not fit in 32 bits.
    """
    if not 0 <= operator.index(immediate) < 1 << 32:
        raise ValueError(f"`immediate` must fit in 32 bits, got {immediate}")


# Statuses of requests that failed with the connection, and not by themselves.
_ENDED_BY_CONNECTION = {WcStatus.WR_FLUSH_ERR, WcStatus.RETRY_EXC_ERR, WcStatus.RNR_RETRY_EXC_ERR}
_DEFERRED = object()
_UNLIMITED = 1 << 30
_HANDSHAKE_MESSAGES = 4  # limit for each end


publish(__name__)
