"""Sending of messages: fragments, credits, registered buffers, and control messages."""

import asyncio
import contextlib
import functools
import math
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import anyio

from aioverbs._connection.channel_state import ChannelState
from aioverbs._connection.credits import RESERVED_CREDITS
from aioverbs._connection.frame_wait import FrameWait
from aioverbs._connection.gather import Cursor, Payload, parts_of
from aioverbs._connection.wire import CREDITS_AT, FIRST, HAS_IMMEDIATE, IMMEDIATE, LAST, TOTAL, FrameKind, header
from aioverbs._core.data_path.data_path import Credits, FrameSender, Operation, RegionSlice, RemoteRegion
from aioverbs._lifecycle.turns import spend, yield_to_loop
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

__all__ = ["MessageSender", "check_immediate"]

_NULL_REMOTE = RemoteRegion(0, 0, 0)
# Length from which a message is announced, if it is longer than a fragment. Between two processes on soft0, with
# buffers of 64 KiB, a message of 256 KiB there and back takes 0.7 times as long as in fragments, and one of 128 KiB 1.2
# times.
_ANNOUNCED_BYTES = 192 << 10
# Length up to which messages share a frame. Between two processes on soft0, messages of 8 KiB cost both 34 us of CPU
# time each in frames of their own, and 8 us in shared ones; with the usual buffers, longer ones would share with few.
_SHARING_BYTES = 16 << 10
# Requests without an acknowledgement for each receive of the peer. An honest peer has one, and more only as long as
# completions are handled later than messages that arrived after them.
_OWN_REQUESTS_PER_RECEIVE = 4
_PIECE_BYTES = 4 << 20  # of byte streams, so that the receiver can use the first bytes before the last ones arrive


class MessageSender:
    """Sender of a message channel.

    Each frame uses a credit and, if it has a payload, a send buffer, and waits until there are both. Control messages
    without a payload do not make their caller wait: they are pending until there is a credit.

    A user message is sent at once if the peer has acknowledged all earlier ones, so that a single message is not
    delayed. Short messages that follow it share a frame, which is sent at the end of the loop's turn:

        send           frame, no other is in flight: posted
        send, send     the next frame, begun and added to
        turn's end     posted

    :param state: state of the channel.
    :param memory: memory that contains the send buffers.
    :param start: number of the first byte of the first send buffer.
    :param count: number of send buffers.
    :param size: size of a send buffer in bytes.
    """

    def __init__(self, state: ChannelState, memory: RegionSlice, start: int, count: int, size: int) -> None:
        self.waits = self.updates = 0
        self.frames = FrameSender(state.owner, state, state.qp, state.receive_queue, memory, start, count, size)
        self.fragment_size = 0  # bytes of a message that fit the buffers of both ends
        self._state = state
        self._qp = state.qp
        self._max_message = 0
        self._credits: Credits | None = None
        self._lock: asyncio.Lock | None = None  # held while a message is sent in more than one step
        self._credit_wait = FrameWait(state.receive_queue)  # of the sender that has the lock
        self._awaited: Operation[None] | None = None  # the send that a sender awaited last, for its buffer
        self._announced_bytes: float = math.inf  # length from which messages are announced
        self._pending_controls: dict[int, bool] = {}  # header: fenced; not sent yet for lack of a credit
        self._sends_controls = False  # whether they are being sent
        # By number: the announced messages that the peer has not answered, and whether a credit is reserved to withdraw
        # the message.
        self._announced: dict[int, bool] = {}
        # requests that no user awaits; dropping one would withdraw it
        self._own_requests: deque[Operation[None]] | None = None  # None before the first one
        self._max_own_requests = 0
        self._sent_slowly = 0

    def start(self, credit: Credits, depth: int, fragment_size: int, max_message: int, announces: bool) -> None:
        """Begin to send framed messages, after the handshake.

        :param credit: credits of this end.
        :param depth: number of receives that the peer keeps posted, for credits and for answers.
        :param fragment_size: bytes of a message that fit the buffers of both ends.
        :param max_message: size of the longest message that the peer accepts, in bytes.
        :param announces: whether both ends announce long messages.
        """
        self._credits = credit
        if announces:
            self._announced_bytes = max(fragment_size, _ANNOUNCED_BYTES)
        self._max_own_requests = _OWN_REQUESTS_PER_RECEIVE * (depth + 1)
        self.fragment_size = fragment_size
        self._max_message = max_message
        self.frames.start(credit, fragment_size, max_message, _SHARING_BYTES)

    @property
    def messages(self) -> int:
        """Number of user messages sent."""
        return self.frames.sent + self._sent_slowly

    # ---- User messages

    async def send(self, payload: Payload, immediate: int | None = None) -> None:
        """Send a user message. When this method returns, its memory may be changed, and it is in flight or leaves at
        the end of the loop's turn. Tasks that call this at the same time have no order among each other.

        This waits until a credit and a send buffer are available for each fragment. If both are there for the only
        fragment, it returns without waiting, unless so many messages were sent in this turn of the loop that other
        tasks should run. A long message is announced, below 4 MiB from a copy. For a longer one, this waits until the
        peer has read it, unless its memory cannot change. If the call is cancelled or raises, the peer receives no part
        of the message; or all of it, if the peer has read it by then.

        :param payload: the message, a contiguous buffer or a list or tuple of them.
        :param immediate: the user's immediate data, 0..2**32-1; None for no immediate data.
        :raises ValueError: the message is longer than the peer accepts, or `immediate` does not fit in 32 bits.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed, or END was sent.
        :raises AffinityError: another event loop owns the connection.
        :raises TypeError: `payload` is not a contiguous buffer, nor a list or tuple of them, or `immediate` is not an
            integer.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        """
        self._state.owner.check(self._state, "send")
        if immediate is not None:
            check_immediate(immediate)
        parts = parts_of(payload)
        turn = self.frames.turn_over
        if turn:
            await yield_to_loop(turn)
        if not self.frames.send_parts(parts, immediate):
            await self._send_slowly(parts, immediate)

    def send_nowait(self, payload: Payload, immediate: int | None = None) -> None:
        """Send a user message of one fragment, if that is possible without waiting.

        :param payload: the message, as for `send`.
        :param immediate: the user's immediate data, as for `send`.
        :raises anyio.WouldBlock: there is no credit or no send buffer, or other messages are waiting to be sent, such
            as a long one that the peer does not receive yet; nothing was sent.
        :raises ValueError: the message does not fit in a fragment, is longer than the peer accepts, or `immediate` does
            not fit in 32 bits.
        :raises Exception: any other exception that `send` raises.
        """
        self._state.owner.check(self._state, "send_nowait")
        if immediate is not None:
            check_immediate(immediate)
        parts = parts_of(payload)
        if self.frames.send_parts(parts, immediate, nowait=True):
            return
        self._state.check_sending()
        length, limit = sum(map(len, parts)), self.fragment_size - (0 if immediate is None else IMMEDIATE.size)
        self._check_length(length)
        if length > limit:
            raise ValueError(
                f"without waiting, messages of at most {limit:,} bytes can be sent, got {length:,}: await `send`"
            )
        raise anyio.WouldBlock

    def send_constant_nowait(self, payload: Payload) -> bool:
        """Send a user message whose memory does not change until the peer has received it, if that is possible without
        waiting.

        :param payload: the message, as for `send`.
        :returns: whether the message was sent. If not, `send` has to wait, or refuses it.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed, or END was sent.
        :raises Exception: any other exception that `send` raises; nothing was sent.
        """
        self._state.owner.check(self._state, "send_constant_nowait")
        self._state.check_sending()
        parts = parts_of(payload)
        length = sum(map(len, parts))
        if length > self._max_message:
            return False
        if length <= self.fragment_size:
            return self.frames.send_parts(parts, nowait=True)
        if length >= self._announced_bytes:
            return self._announce_now(parts, None, True)
        if self.frames.in_line:
            return False
        self.frames.in_line += 1  # finalizers and signal handlers, which may run in the middle, must not send
        try:
            is_sent = self._post_fragments(parts, length)
        finally:
            self.frames.in_line -= 1
        self._sent_slowly += is_sent
        return is_sent

    def _announce_now(self, parts: list[memoryview], immediate: int | None, is_constant: bool) -> bool:
        """Announce a message if that needs no waiting: see `Announcer.announce_now`.

        :raises Exception: whatever `send` raises; nothing was sent.
        """
        self._state.check_sending()
        assert self._credits is not None
        if self.frames.in_line or not self._credits.sendable or not self.frames.free_buffers:
            return False
        self.frames.in_line += 1  # finalizers and signal handlers, which may run in the middle, must not send
        try:
            is_sent = self._state.user.announce_now(parts, immediate, is_constant)
        finally:
            self.frames.in_line -= 1
        self._sent_slowly += is_sent
        return is_sent

    def _check_length(self, length: int) -> None:
        """Check that the peer accepts messages of a length in bytes.

        :raises ValueError: the message is too long.
        """
        if length > self._max_message:
            raise ValueError(f"the peer accepts messages of at most {self._max_message:,} bytes, got {length:,}")

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Wait for the lock, and hold it for the block."""
        self.frames.close()  # no message may overtake this sender
        if self._lock is None:
            self._lock = asyncio.Lock()
        self.frames.in_line += 1
        try:
            async with self._lock:
                yield
        finally:
            self.frames.in_line -= 1

    async def _send_slowly(self, parts: list[memoryview], immediate: int | None) -> None:
        """Send a user message that has several fragments, or that has to wait.

        :param parts: the message.
        :param immediate: the user's immediate data, which was checked; None for no immediate data.
        :raises Exception: whatever `send` raises.
        """
        length = sum(map(len, parts))
        self._check_length(length)
        finish = None
        is_announced = length >= self._announced_bytes
        if is_announced:
            if turn := spend(1):
                await yield_to_loop(turn)
            if self._announce_now(parts, immediate, False):
                return
        async with self._exclusive():
            self._state.check_sending()
            if is_announced:
                finish = await self._state.user.announce(parts, immediate)
            if finish is None:
                await self._send_fragments(parts, length, immediate)
            self._sent_slowly += 1
        if finish is not None:
            await finish()

    async def _send_fragments(self, parts: list[memoryview], length: int, immediate: int | None) -> None:
        """Send a user message in as many fragments as necessary. The caller holds the lock.

        :param parts: the message.
        :param length: its length in bytes.
        :param immediate: the user's immediate data, which was checked; None for no immediate data.
        :raises Exception: whatever `send` raises.
        """
        for head, fragment in self._fragments(parts, length, immediate):
            await self._send_frame(head, fragment)

    def _post_fragments(self, parts: list[memoryview], length: int) -> bool:
        """Send a user message in fragments without waiting, if there are credits and send buffers for all of them.

        :param parts: the message.
        :param length: its length in bytes, more than that of a fragment.
        :returns: whether the message was sent.
        :raises Exception: whatever `QueuePair.send` raises; the peer drops the fragments that were sent.
        """
        count = -(-(length + TOTAL.size) // self.fragment_size)
        credit = self._credits
        assert credit is not None
        if credit.available < count + RESERVED_CREDITS + credit.revocations or self.frames.free_buffers < count:
            return False
        for head, fragment in self._fragments(parts, length, None):
            # One after the other would wake the peer for each.
            _ = self.frames.post(fragment, head, later=not head & LAST)
        return True

    def _fragments(
        self, parts: list[memoryview], length: int, immediate: int | None
    ) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield the fragments of a user message, each as its header and its bytes.

        :param parts: the message.
        :param length: its length in bytes.
        :param immediate: the user's immediate data, which was checked; None for no immediate data.
        """
        flags, prefix = FIRST, b""
        if immediate is not None:
            flags |= HAS_IMMEDIATE
            prefix = IMMEDIATE.pack(immediate)
        if len(prefix) + length > self.fragment_size:
            prefix = TOTAL.pack(length) + prefix
        cursor, left = Cursor(parts), length
        while True:
            step = min(left, self.fragment_size - len(prefix))
            left -= step
            yield header(FrameKind.DATA, flags | (0 if left else LAST)), [memoryview(prefix), *cursor.take(step)]
            if not left:
                return
            flags, prefix = 0, b""

    async def send_announcement(self, number: int, data: bytes, has_immediate: bool) -> None:
        """Send ANNOUNCE, and reserve a credit to withdraw the message with. The caller holds the lock. This waits like
        `send_frame`; if it raises, nothing was sent.

        :param number: number of the message.
        :param data: payload, at most `fragment_size` bytes.
        :param has_immediate: whether it begins with immediate data.
        :raises Exception: whatever `send_frame` raises.
        """
        flags = HAS_IMMEDIATE if has_immediate else 0
        await self._send_frame(header(FrameKind.ANNOUNCE, flags, 0, number), [memoryview(data)], RESERVED_CREDITS + 1)
        self._announced[number] = True
        self._reserve_credits()

    async def wait_for_announcement(self) -> None:
        """Wait until `post_announcement` can send one. The caller holds the lock.

        :raises Exception: whatever `send_frame` raises.
        """
        await self._wait_for_frame(RESERVED_CREDITS)

    def post_announcement(self, number: int, data: bytes, has_immediate: bool) -> None:
        """Send ANNOUNCE without waiting, for a message that is not withdrawn. The caller has checked that no other
        sender waits, and that there are a credit and a send buffer.

        :param number: number of the message.
        :param data: payload, at most `fragment_size` bytes.
        :param has_immediate: whether it begins with immediate data.
        :raises Exception: whatever `QueuePair.send` raises. If `frames.posted` is what it was, nothing was sent.
        """
        flags, posted = HAS_IMMEDIATE if has_immediate else 0, self.frames.posted
        self._announced[number] = False
        try:
            _ = self.frames.post([memoryview(data)], header(FrameKind.ANNOUNCE, flags, 0, number))
        finally:
            if self.frames.posted == posted:
                del self._announced[number]

    def _reserve_credits(self) -> None:
        """Reserve a credit for each message that may have to be withdrawn, and send what waits for the others."""
        assert self._credits is not None
        self._credits.revocations = sum(self._announced.values())
        self._send_controls()
        self.wake_waiter()

    def withdraw_announcement(self, number: int) -> None:
        """Send REVOKE for an announced message, with the credit reserved for that, unless the peer has answered it."""
        if not self._announced.get(number):
            return
        retry = functools.partial(self.withdraw_announcement, number)
        if self._send_control(header(FrameKind.REVOKE, 0, 0, number), False, retry):
            self._announced[number] = False
            self._reserve_credits()

    def take_answer(self, number: int) -> bool:
        """Forget an announced message because the peer has answered it.

        :param number: number in the peer's REVOKED.
        :returns: whether there is such a message, so that the answer used no credit.
        """
        if self._announced.pop(number, None) is None:
            return False
        self._reserve_credits()
        return True

    def piece_size(self, length: int) -> int:
        """Return the size of the messages in which to send bytes that need not stay one message.

        :param length: number of the bytes.
        """
        if min(length, self._max_message) < self._announced_bytes:
            return self.fragment_size
        return min(_PIECE_BYTES, self._max_message)

    # ---- Frames

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
        async with self._exclusive():
            if kind is FrameKind.END and self._state.eof_sent:
                return
            self._state.check_sending()
            await self._send_frame(header(kind, 0, 0, number), [memoryview(data)], 0 if last else RESERVED_CREDITS)
            if kind is FrameKind.END:
                # only now, as a cancelled call has sent nothing; the lock excludes other senders until here
                self._state.eof_sent = True
                self.frames.refuse()

    async def _send_frame(self, immediate: int, parts: list[memoryview], reserved: int = RESERVED_CREDITS) -> None:
        """Wait for a credit and a buffer, then post a fragment or control message. The caller holds the channel's lock.

        :param immediate: header of the message, without the number of credits.
        :param parts: bytes of the fragment or control message.
        :param reserved: number of credits to leave for other messages, beside those for withdrawing messages.
        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        :raises Exception: any other exception that `QueuePair.send` raises; nothing was posted.
        """
        await self._wait_for_frame(reserved)
        _ = self.frames.post(parts, immediate)

    async def _wait_for_frame(self, reserved: int) -> None:
        """Wait for a credit and a buffer: see `_send_frame`. Use none."""
        await self._wait_for_credit(reserved)
        oldest = self.frames.awaited
        if oldest is not None:
            self.waits += 1
            try:
                await self._wait_for_buffer(oldest)
            except (BrokenResourceError, ClosedResourceError, WorkCompletionError) as error:
                self._state.raise_ended(error)
            await self._wait_for_credit(reserved)

    async def _wait_for_buffer(self, oldest: Operation[None]) -> None:
        """Wait until the oldest send in flight has ended, so that its buffer is free. The caller holds the lock.

        :param oldest: the send.
        :raises WorkCompletionError: the send or a probe completed with an error.
        :raises Exception: whatever `probe` raises, or another exception that `Operation` lists for an await.
        """
        if oldest is self._awaited:  # by a cancelled caller, and an operation can be awaited only once
            await self.probe()
        else:
            self._awaited = oldest
            await oldest

    async def _wait_for_credit(self, reserved: int) -> None:
        """Wait until more than `reserved` credits are available, beside those for withdrawing messages. Use none.

        The caller holds the channel's lock.

        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        """
        assert self._credits is not None
        self._state.check_usable()
        while self._credits.available <= reserved + self._credits.revocations:
            self.waits += 1
            self._credits.awaited = True
            await self._credit_wait.wait()
            self._state.check_usable()

    # ---- Control messages without a payload, and credits

    def send_control(self, kind: FrameKind, number: int = 0, *, fence: bool = False) -> None:
        """Send a control message that has no payload, now or as soon as a credit is available.

        This does not wait until the message is sent, and reports no errors.

        :param kind: kind of the message.
        :param number: number of the grant, 0..65535.
        :param fence: True to send it only when all earlier reads and atomics are done (IBV_SEND_FENCE).
        """
        self._pending_controls[header(kind, 0, 0, number)] = fence
        self._send_controls()

    def send_answer(self, number: int) -> None:
        """Send REVOKED for an announced message, for which the peer has a receive without a credit."""
        _ = self._send_control(
            header(FrameKind.REVOKED, 0, 0, number),
            False,
            functools.partial(self.send_answer, number),
            uses_credit=False,
        )

    def is_control_pending(self, kind: FrameKind, number: int) -> bool:
        """Return whether a control message of this kind and grant number is still waiting for a credit."""
        return header(kind, 0, 0, number) in self._pending_controls

    def add_credits(self, count: int) -> None:
        """Add credits that the peer returned, and send messages that are waiting for credits.

        :param count: number of credits returned.
        :raises ValueError: the peer returns more credits than this end has used.
        """
        assert self._credits is not None
        self._credits.add(count)
        if count:
            self.use_credits()

    def use_credits(self) -> None:
        """Send messages that are waiting for credits, since there are more."""
        assert self._credits is not None
        self._credits.awaited = False  # until a message waits again
        self._send_controls()
        if self._credits.available:
            self.wake_waiter()
        else:
            self._credits.awaited = True

    def _send_controls(self) -> None:
        """Send the pending control messages, as many as there are credits for. The others stay pending."""
        assert self._credits is not None
        if self._sends_controls:  # a finalizer calls this in the middle: the first call goes on
            return
        self._sends_controls = True
        try:
            while self._pending_controls:
                self._credits.awaited = True
                if not self._credits.sendable:
                    return
                immediate, fence = next(iter(self._pending_controls.items()))
                if not self._send_control(immediate, fence, self._send_controls):
                    return
                del self._pending_controls[immediate]
        except BaseException:  # such as KeyboardInterrupt
            self._state.loop.call_soon(self._send_controls)  # others may rely on this call
            raise
        finally:
            self._sends_controls = False

    def return_credits(self) -> None:
        """Send a message of kind CREDITS if `Credits.update_due` is True; otherwise do nothing.

        If another thread is inside a verb, try again later.
        """
        assert self._credits is not None
        if self._credits.update_due and self._send_control(header(FrameKind.CREDITS), False, self.return_credits):
            self.updates += 1

    def _send_control(
        self, immediate: int, fence: bool, retry: Callable[[], None], *, uses_credit: bool = True
    ) -> bool:
        """Send a control message that has no payload. If it uses a credit, the caller has checked that there is one.

        :param immediate: header of the message, without the number of credits.
        :param fence: True to send it only when all earlier reads and atomics are done (IBV_SEND_FENCE).
        :param retry: called later if a thread that is inside a verb prevents sending now.
        :param uses_credit: whether the message uses a credit.
        :returns: True if the message was sent, or can never be sent because the queue pair is closed or broken; False
            if `retry` will be called.
        """
        assert self._credits is not None
        returned = self._credits.take() if uses_credit else self._credits.take_owed()
        try:
            sent = self._qp.send(None, immediate=immediate | returned << CREDITS_AT, fence=fence)
        except BaseException as error:
            undo = self._credits.undo_take if uses_credit else self._credits.undo_take_owed
            undo(returned)
            if isinstance(error, ConcurrentAccessError):  # another thread is inside a verb: retry soon
                self._state.loop.call_soon(retry)
                return False
            if isinstance(error, BusyResourceError):
                self._state.receive_queue.when_resumed(self._state.loop, retry)
                return False
            if isinstance(error, VerbsError):  # the peer would wait for the message, or for its credits
                self._state.loop.call_soon(self._state.fail, f"a control message cannot be sent: {error}", error)
                return True
            if isinstance(error, ClosedResourceError | BrokenResourceError | QueuePairStateError | AffinityError):
                return True  # the end is reported elsewhere
            raise
        self.keep_until_done(sent)
        return True

    # ---- The handshake, probes, and the end

    async def send_handshake(self, data: bytes) -> None:
        """Send a message of the handshake, and wait until the peer's device acknowledges it.

        :param data: the message, header included.
        :raises BrokenResourceError: the peer's device does not acknowledge the message. The channel is then broken.
        :raises ClosedResourceError: the channel is closed.
        :raises Exception: any other exception that `QueuePair.send` raises.
        """
        sent = self.frames.post([memoryview(data)], None)  # there is a buffer: no user message is in flight yet
        try:
            await sent
        except (BrokenResourceError, ClosedResourceError, WorkCompletionError) as error:
            self._state.raise_ended(error)

    def probe(self) -> Operation[None]:
        """Post an RDMA write of 0 bytes. When it completes, the peer's device has received all earlier sends.

        :returns: an operation, which the caller awaits or keeps. Awaiting it raises `WorkCompletionError` if the peer's
            device does not answer, or another exception that `Operation` lists.
        :raises ClosedResourceError: the queue pair is closed.
        :raises BrokenResourceError: the queue pair is in ERR.
        :raises Exception: any other exception that `QueuePair.write` raises.
        """
        return self._qp.write(self.frames.memory[:0], _NULL_REMOTE)

    def send_keepalive(self) -> bool:
        """Post a probe without waiting for it. If the peer's device does not answer, the queue pair goes to ERR.

        :returns: whether it could be posted.
        """
        try:
            keepalive = self.probe()
        except (BusyResourceError, ConcurrentAccessError):
            return False  # another thread is inside a verb, or is changing the queue pair: the next call retries
        except (ClosedResourceError, BrokenResourceError, QueuePairStateError, AffinityError, VerbsError):
            return False  # the end is reported elsewhere
        self.keep_until_done(keepalive)
        return True

    async def wait_delivered(self) -> None:
        """Wait until all sent messages are in the peer's memory. The time is not limited here.

        :raises BrokenResourceError: the peer's device does not acknowledge the messages. The channel is then broken.
        :raises ClosedResourceError: the channel is closed.
        :raises Exception: any other exception that `probe` raises, such as `ConcurrentAccessError`.
        """
        try:
            await self.probe()
        except (BrokenResourceError, ClosedResourceError, WorkCompletionError) as error:
            self._state.raise_ended(error)

    def keep_until_done(self, operation: Operation[None]) -> None:
        """Keep a reference to an operation that no task of the user awaits, until it has ended.

        Without a reference, an operation that waits for a place in the send queue would be withdrawn.

        Each of these requests but the rare probes is, or precedes, a message that uses a receive of the peer. A peer
        that says of ever more of them that it has handled them, although its device does not acknowledge them, would
        make this end keep ever more: that breaks the connection.
        """
        # Do not poll for completions here: those found would overtake others that were found earlier.
        requests = self._own_requests
        if requests is None:
            requests = self._own_requests = deque()
        while requests and requests[0].ended:
            del requests[0]
        requests.append(operation)
        if len(requests) > self._max_own_requests:
            reason = f"the peer's device does not acknowledge {len(requests)} messages that the peer has handled"
            self._state.loop.call_soon(self._state.fail, reason)  # after the caller has delivered what arrived

    def wake_waiter(self) -> None:
        """Wake the sender that is waiting for a credit."""
        self._credit_wait.wake()


def check_immediate(immediate: int) -> None:
    """Check that a value can be sent as immediate data: an integer in 0..2**32-1.

    :raises TypeError: the value is not an integer.
    :raises ValueError: the integer does not fit in 32 bits.
    """
    if not 0 <= operator.index(immediate) < 1 << 32:
        raise ValueError(f"`immediate` must fit in 32 bits, got {immediate}")
