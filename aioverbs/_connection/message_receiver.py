"""Receiving of messages: posted receives, frames, reassembly, and the return of credits."""

import functools
from typing import TYPE_CHECKING, Any, NoReturn, cast

import anyio

from aioverbs._connection.announced_messages import AnnouncedMessage, AnnouncedMessages
from aioverbs._connection.channel_state import ChannelState
from aioverbs._connection.gather import join_into
from aioverbs._connection.message_sender import MessageSender
from aioverbs._connection.reassembly import Assembly, ReceivedMessage
from aioverbs._connection.recycled_memory import recycled_memory_of
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.wire import CREDITS_AT, FrameKind, parse_header
from aioverbs._core.data_path.data_path import (
    Credits,
    Inbox,
    MessageFrame,
    ReceiveRing,
    UnreadMessages,
    close_inbox,
    post_receives,
)
from aioverbs._lifecycle.turns import yield_to_loop
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._verbs.base_domain import Domain
from aioverbs.errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    QueuePairStateError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MessageReceiver"]

_DEFERRED = object()
_UNLIMITED = 1 << 30
_HANDSHAKE_MESSAGES = 4  # limit for each end
_ENDS = (StopAsyncIteration, BrokenResourceError, ClosedResourceError, WorkCompletionError)  # of an inbox


class MessageReceiver:
    """Receiver of a message channel.

    A receive is posted again as soon as its bytes are copied, but its credit is returned only when the user receives
    the message. So the unread data here is never more than the receives can hold, plus one incomplete message.

    :param state: state of the channel.
    :param sender: sender of the same end, which returns credits and gets those that the peer returns.
    :param block: memory that begins with that of the receives, and ends with a buffer that nothing else uses.
    :param count: number of receives, one more than the peer gets credits.
    :param settings: sizes of this end.
    :param domain: domain that the memory for received messages is registered with.
    """

    def __init__(
        self,
        state: ChannelState,
        sender: MessageSender,
        block: LeasedBuffer,
        count: int,
        settings: ConnectionSettings,
        domain: Domain,
    ) -> None:
        self.max_announced = 0  # number of messages that the peer may announce before it gets an answer
        self._announced: AnnouncedMessages | None = None
        self._recycled_memory = recycled_memory_of(domain)
        self._block = block
        self._settings = settings
        self._state = state
        self._sender = sender
        self._credits: Credits | None = None
        self._assembly: Assembly | None = None  # None before the first fragment
        self._cache = domain.cache
        self._handshake_messages_left = _UNLIMITED
        self.inbox = Inbox(state.receive_queue, self._on_received, self._on_flushed)
        self._ring = ReceiveRing(self.inbox, block, count, settings.buffer_size)
        self.unread = UnreadMessages(state.owner, state, self._ring, self._on_not_posted, sender)

    def post_receives(self) -> None:
        """Post all receives to the queue pair, which the caller has moved to INIT.

        :raises VerbsError: a receive cannot be posted.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        post_receives(self._state.qp, self._ring, 0, self._ring.count)

    def start(self, credit: Credits, handshake_messages: int) -> None:
        """Expect framed messages from now on, after the remaining messages of the handshake.

        :param credit: credits of this end.
        :param handshake_messages: number of handshake messages that have yet to arrive on the queue pair.
        """
        self._credits = credit
        self._handshake_messages_left = handshake_messages
        if not handshake_messages:
            self._expect_frames()

    def _expect_frames(self) -> None:
        """Expect nothing but framed messages from now on."""
        assert self._credits is not None
        self.unread.start(self._credits, self._state.qp, self._settings.max_message)

    @property
    def announced(self) -> AnnouncedMessages:
        """Messages that the peer announced. Made when they are first used: most idle connections have none."""
        if self._announced is None:
            spare = self._block[-self._settings.buffer_size :]
            self._announced = AnnouncedMessages(
                self._state,
                self._sender,
                self.max_announced,
                self._settings.max_message,
                self._recycled_memory,
                spare,
            )
        return self._announced

    def discard(self) -> None:
        """Drop all announced messages and all further ones, because this end receives no more."""
        self._state.discards = True
        if self._announced is not None:
            self._announced.withdraw_all()

    # ---- Calls of the user

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
        :raises VerbsError: ``ibv_post_send`` failed.
        :raises MemoryError: the process has no memory for the message.
        """
        is_next = self.unread.begin("receive")
        try:
            if is_next:  # the usual case, without another coroutine
                try:
                    item = await self.inbox.__anext__()
                except _ENDS as error:
                    self._raise_end(error)
                if type(item) is not bytes:
                    item = await self._next(item)
            else:
                item = await self._next()
            while type(item) is AnnouncedMessage:
                copied = await self.announced.read_mapped(item)
                if isinstance(copied, bytes) and self.announced.finish(item):
                    item = copied if item.immediate is None else ReceivedMessage([copied], item.immediate)
                    break
                view = await self.announced.read(item, may_be_mapped=False)
                if view is not None:
                    item = ReceivedMessage([view], item.immediate)
                else:
                    item = await self._next()
            data = item if type(item) is bytes else self._join(item)
        finally:
            self.unread.receiving = False
        self.unread.finish()
        if with_immediate:
            return data, None if type(item) is bytes else item.immediate
        return data

    async def receive_into(self, buffer: "Buffer") -> int:
        """Wait for the next user message, and copy it to memory of the caller. A cancelled call loses no message.

        After the call has ended, however it ends, the memory is no longer written to. If the peer's device does not
        answer within 5 seconds after the call was cancelled, the channel breaks.

        :param buffer: contiguous, writable buffer.
        :returns: length of the message in bytes.
        :raises ValueError: the message is longer than the buffer. It stays the next one.
        :raises TypeError: `buffer` is not a contiguous, writable buffer.
        :raises VerbsError: the device cannot register the buffer. The message stays the next one.
        :raises Exception: any other exception that `receive` raises.
        """
        self.unread.begin("receive_into")
        try:
            view = memoryview(buffer)
            if view.readonly:
                raise TypeError(f"`buffer` must be writable, got {buffer!r:.100}")
            view = view.cast("B") if view.nbytes else memoryview(bytearray())
            while True:
                item = await self._next()
                if type(item) is not AnnouncedMessage:
                    parts = (item,) if type(item) is bytes else item.parts
                    length = self._check_fits(item, sum(map(len, parts)), view)
                    join_into(view, parts)
                    break
                length = self._check_fits(item, item.length, view)
                if item.reading is not None:  # another call, which was cancelled, has begun to read it
                    message = await self.announced.read(item)
                    if message is None:
                        continue
                    view[:length] = message
                    break
                if await self.announced.read_mapped(item, view[:length]) and self.announced.finish(item):
                    break
                with self._cache.registered(view, AccessFlags.LOCAL_WRITE) as region:
                    if region is not None:
                        await self.announced.read_into(item, region[:length])
                if region is None:
                    async with self._cache.region(view) as region:
                        await self.announced.read_into(item, region[:length])
                if self.announced.finish(item):  # only now, because the end of the block may raise
                    break
        finally:
            self.unread.receiving = False
        self.unread.finish()
        return length

    def _join(self, message: ReceivedMessage, is_writable: bool = False) -> bytes | memoryview:
        """Return the bytes of a message. If there is no memory for them, it stays the next message.

        :param is_writable: True to return writable memory, as a memoryview of format ``B``.
        :raises MemoryError: there is no memory for the message.
        """
        try:
            return message.writable_data if is_writable else message.data
        except MemoryError:
            self.unread.held = message
            raise

    def _check_fits(self, item: object, length: int, view: memoryview) -> int:
        """Check that a message fits in a buffer. If it does not, it stays the next message.

        :returns: `length`, the length of the message in bytes.
        :raises ValueError: the message is longer than the buffer.
        """
        if length > len(view):
            self.unread.held = item
            raise ValueError(
                f"the next message has {length:,} bytes, but `buffer` only {len(view):,}: receive it with a larger one"
            )
        return length

    async def receive_view(self, operation: str, *, is_writable: bool = False) -> bytes | memoryview:
        """Wait for the next user message, and return it without a further copy. A cancelled call loses no message.

        :param operation: name of the caller's method, for error messages.
        :param is_writable: True to return writable memory, as a memoryview of format ``B``.
        :returns: the message. A memoryview is one of memory that is used for nothing else while it, or an object made
            from it, exists.
        :raises Exception: whatever `receive` raises.
        """
        item: Any = self.unread.take()
        if item is None:
            self.unread.begin(operation)
            try:
                item = await self._next()
                while type(item) is AnnouncedMessage:
                    item = await self.announced.read(item)
                    if item is None:
                        item = await self._next()
                if type(item) is ReceivedMessage:
                    item = self._join(item, is_writable)
            finally:
                self.unread.receiving = False
            self.unread.finish()
        message: bytes | memoryview = item
        return memoryview(bytearray(message)) if is_writable and type(message) is bytes else message

    async def _next(self, item: Any = None) -> Any:
        """Wait for the next message that is not withdrawn. An announced one stays the next one until it is consumed.

        :param item: the next item of the inbox, which the caller has taken; None to wait for it.
        :returns: the message: bytes, a `ReceivedMessage` or an `AnnouncedMessage`.
        :raises Exception: whatever `receive` raises.
        """
        unread = self.unread
        while True:
            if item is None:
                item = unread.held
            if item is None and unread.frame is not None:
                turn = unread.turn_over
                if turn:
                    await yield_to_loop(turn)
                return unread.next_of_frame()
            if item is None:
                try:
                    item = await self.inbox.__anext__()
                except _ENDS as error:
                    self._raise_end(error)
            if type(item) is MessageFrame:
                return unread.open(item)
            if type(item) is not AnnouncedMessage:
                return item
            if not item.withdrawn:
                unread.held = item
                return item
            self.unread.consume()
            item = None

    def _raise_end(self, error: Exception) -> NoReturn:
        """Raise the exception for the caller of a receive method, instead of the one with which the inbox has ended.

        :param error: exception of the inbox.
        :raises Exception: whatever `receive` raises.
        """
        if isinstance(error, StopAsyncIteration) and self._state.eof_received:
            error.__traceback__ = None  # the inbox raises the same exception each time
            raise anyio.EndOfStream from None
        self._state.raise_ended(error)

    async def receive_handshake(self) -> bytes:
        """Wait for the peer's next message of the handshake.

        :returns: the message, header included.
        :raises BrokenResourceError: the peer is gone, or the channel broke for another reason.
        :raises ClosedResourceError: this end closed the channel.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        try:
            return cast(bytes, await self.inbox.__anext__())
        except _ENDS as error:
            self._state.raise_ended(error)

    # ---- Completions

    def _on_received(self, index: int, data: bytes, immediate: int | None, is_written: bool) -> object:
        """Handle the completion of a receive that `UnreadMessages` does not take, and post the receive again. Fail the
        channel if the protocol is violated.

        :param index: index of the receive.
        :param data: the received bytes.
        :param immediate: immediate data of the message; None if it has none.
        :param is_written: whether the peer sent the message as an RDMA write, whose bytes are elsewhere.
        :returns: a complete message for the caller of `receive`, as bytes or a `ReceivedMessage`, or a message of
            the handshake for the caller of `receive_handshake`, as bytes; None if there is none.
        """
        credit = self._credits
        if is_written:
            self._state.fail("protocol violation: the peer sent a message as a write with immediate data")
            return None
        if credit is None or self._handshake_messages_left:
            return self._on_handshake_message(index, data)
        is_answer = False
        try:
            is_answer = immediate is not None and self._take_answer(immediate)
            if not is_answer:
                credit.on_message()
            item = self._handle_frame(data, immediate)
            self._post(index)
            if immediate is not None:
                self._sender.add_credits(immediate >> CREDITS_AT & 0x3FF)
        except ValueError as error:
            self._state.fail(f"protocol violation: {error}")
            return None
        if item is None and not is_answer and credit.on_consumed():
            self._sender.return_credits()
        return None if item is _DEFERRED else item

    def _take_answer(self, immediate: int) -> bool:
        """Return whether a frame is the one answer to an announced message, which uses no credit."""
        kind, _, _, number = parse_header(immediate)
        return kind == FrameKind.REVOKED and self._sender.take_answer(number)

    def _on_handshake_message(self, index: int, data: bytes) -> bytes | None:
        """Take an unframed message of the handshake, and post its receive again.

        If 4 messages are already waiting for `receive_handshake`, fail the channel instead.

        :param index: index of the receive.
        :param data: the message.
        :returns: the message; None if the channel was failed.
        """
        if len(self.inbox) >= _HANDSHAKE_MESSAGES:
            self._state.fail(
                f"protocol violation: the peer sent more than the {_HANDSHAKE_MESSAGES} messages of a handshake"
            )
            return None
        self._handshake_messages_left -= 1
        if not self._handshake_messages_left:
            self._expect_frames()
        self._post(index)
        return data

    def _post(self, index: int) -> None:
        """Post a receive again.

        :param index: index of the receive.
        """
        try:
            post_receives(self._state.qp, self._ring, index, 1)
        except Exception as error:
            self._on_not_posted(index, error)

    def _on_not_posted(self, index: int, error: Exception) -> None:
        """Post a receive later if a thread is inside a verb, and never if the queue pair is closed or broken.

        If the verb failed, fail the channel soon: the peer has more credits than there are receives left.

        :param index: index of the receive.
        :param error: exception that posting it raised.
        :raises Exception: `error`, if it is none of these.
        """
        if isinstance(error, ConcurrentAccessError):  # another thread is inside a verb: retry soon
            self._state.loop.call_soon(self._post, index)
        elif isinstance(error, BusyResourceError):  # a modify is in flight in a thread: retry after it
            self._state.receive_queue.when_resumed(self._state.loop, functools.partial(self._post, index))
        elif isinstance(error, ClosedResourceError | BrokenResourceError | QueuePairStateError | AffinityError):
            return  # the end is reported elsewhere
        elif isinstance(error, VerbsError):  # after the caller has delivered the message that arrived in this receive
            self._state.loop.call_soon(self._state.fail, f"a receive cannot be posted again: {error}", error)
        else:
            raise error

    def _on_flushed(self, _: None) -> None:
        """Fail the channel because the device flushed a receive: the queue pair is in ERR or destroyed.

        This has no effect if the channel is broken or closed.
        """
        self._state.fail_queue_pair(None)

    # ---- Frames

    def _handle_frame(self, data: bytes, immediate: int | None) -> object:
        """Handle a frame: a fragment of a user message, or a control message.

        :param data: bytes of the frame.
        :param immediate: its immediate data, which contains the header; None if it has none.
        :returns: the user message that the frame completes; None if it completes none; ``_DEFERRED`` if it completes
            none and its credit must be returned later.
        :raises ValueError: the frame violates the protocol.
        """
        if immediate is None:
            raise ValueError("the peer sent a message without immediate data")
        kind, flags, _, number = parse_header(immediate)
        if kind == FrameKind.DATA:
            return self._add_fragment(data, flags, number)
        if kind == FrameKind.MESSAGES:
            return self._add_messages(data, flags, number)
        if kind == FrameKind.ANNOUNCE:
            if self._state.eof_received:
                raise ValueError("the peer announced a message after END")
            self._drop_incomplete()
            return self.announced.add(number, data, flags)
        if flags:
            raise ValueError(f"the peer sent a message of kind {kind} with flags {flags:#x}, expected none")
        if kind == FrameKind.END:
            self._state.eof_received = True
            self.unread.stop()
            self._drop_incomplete()
            close_inbox(self.inbox)
            self._state.user.on_control(FrameKind.END, number, b"")
        elif kind != FrameKind.CREDITS:
            try:
                known = FrameKind(kind)
            except ValueError:
                raise ValueError(f"the peer sent a message of unknown kind {kind}") from None
            if self._announced is not None:
                if known is FrameKind.REVOKE and self._announced.withdraw(number):
                    return None
                if known is FrameKind.GRANT:
                    self._announced.expect_no_withdrawal(number)
            self._state.user.on_control(known, number, data)
        return None

    def _add_messages(self, data: bytes, flags: int, number: int) -> MessageFrame:
        """Accept whole user messages that arrived in one frame.

        :param data: bytes of the frame.
        :param flags: flags of its header, which must be 0.
        :param number: number in its header, which must be 0.
        :returns: the messages.
        :raises ValueError: the frame violates the protocol.
        """
        if self._state.eof_received:
            raise ValueError("the peer sent messages after END")
        if flags or number:
            raise ValueError(f"the peer sent messages with flags {flags:#x} and number {number}, expected none")
        self._drop_incomplete()
        return MessageFrame(data, self._settings.max_message)

    def _drop_incomplete(self) -> None:
        """Drop the incomplete message, if there is one."""
        if self._assembly is not None:
            self._assembly.drop()
        self.unread.incomplete = False

    def _add_fragment(self, data: bytes, flags: int, number: int) -> object:
        """Add a fragment to a user message.

        :param data: bytes of the fragment.
        :param flags: flags of its header.
        :param number: number in its header, which must be 0.
        :returns: the same as `_handle_frame`.
        :raises ValueError: the fragment violates the protocol.
        """
        if self._state.eof_received:
            raise ValueError("the peer sent a message after END")
        if number:
            raise ValueError(f"the peer sent a user message with number {number}, expected 0")
        if self._assembly is None:
            self._assembly = Assembly(self._settings.max_message)
        whole = self._assembly.add(data, flags)
        self.unread.incomplete = whole is None
        if whole is not None:
            return whole
        # Limit the fragments of unread messages: return their credits later.
        if len(self.unread) or self.unread.held is not None:
            self.unread.deferred += 1
            return _DEFERRED
        return None

    def end_inbox(self) -> None:
        """End the inbox with the exception for later calls, and drop the incomplete message."""
        if self._state.closed:
            self.unread.close()
        close_inbox(self.inbox, self._state.closed_error())
        self._drop_incomplete()
