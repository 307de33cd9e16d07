"""Messages that the peer announced: the receiver reads them from the peer's memory.

    sender                                       receiver
    registers the memory, ANNOUNCE number  ->
                                                 queues the message
                                                 user calls a receive method: reads the memory
                                           <-    REVOKED number
    takes the key back, reuses the number

If the call of the sender is cancelled, it sends REVOKE number. The receiver then drops the message, or completes the
reads that are in flight, and answers with REVOKED.

If the call of the receiver is cancelled, the reads go on, and the next call gets the message. Only memory of the caller
is not written to after the call.

A message that the sender has copied to a file which this process has mapped is copied from there, without a request.

Answers to messages of less than 4 MiB, which the sender has mostly copied and does not wait for, leave at the end of
the loop's turn, or before the next message is read: so the peer is woken once for the answer and what this end sends
then. While one is in flight, a posted read behind it could not end before the peer's device is awake.

ANNOUNCE uses a credit until the user has received the message, so no more messages wait here than with fragments. The
answer uses no credit: see `max_announced`.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

import anyio

from aioverbs._connection.channel_state import ChannelState
from aioverbs._connection.message_sender import MessageSender
from aioverbs._connection.recycled_memory import RecycledMemory
from aioverbs._connection.wire import HAS_IMMEDIATE, IMMEDIATE, AnnouncedPart, parse_announcement
from aioverbs._core.data_path.data_path import Operation, RegionSlice, RemoteRegion
from aioverbs._core.software.software import read_mapped, read_mapped_bytes
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled
from aioverbs._lifecycle.turns import BYTES_PER_UNIT, take_turn
from aioverbs._memory.region import WaitableInFlightCount
from aioverbs.errors import (
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    QueuePairStateError,
    VerbsError,
    WorkCompletionError,
)

__all__ = ["AnnouncedMessage", "AnnouncedMessages"]

# Small messages share the send queue with the reads. Those that are in flight when the peer withdraws a message have to
# end within the 5 seconds for which the peer waits, also if the connection becomes slower meanwhile. So they are as
# long as what the connection transfers in half a second. A long read is alone: then two processes copy its bytes at the
# same time. Between two processes on soft0, 64 MiB take 9.6 ms in one read, and 17 ms in reads of 8 MiB.
_READS_IN_FLIGHT = 8
_IN_FLIGHT_S = 0.5
_FIRST_BYTES_IN_FLIGHT = 1 << 20
_MIN_BYTES_IN_FLIGHT = 128 << 10
_MAX_BYTES_IN_FLIGHT = 64 << 20
_READ_BYTES = 64 << 20
_HELD_BYTES = 4 << 20  # from which the answer to a message leaves at once; no file that peers map is longer
_END_TIMEOUT_S = 5.0  # for the reads of a cancelled call to memory of the caller

_ENDED = (BrokenResourceError, ClosedResourceError, WorkCompletionError)


class AnnouncedMessage:
    """Message that the peer announced and that was not read yet.

    :param number: number of the message, by which the peer knows it.
    :param parts: the parts of the message.
    :param immediate: the user's immediate data; None if there is none.
    """

    __slots__ = ("immediate", "length", "number", "parts", "reading", "withdrawn")

    def __init__(self, number: int, parts: list[AnnouncedPart], immediate: int | None) -> None:
        self.number = number
        self.parts = parts
        self.length = sum(part.length for part in parts)
        self.immediate = immediate
        self.withdrawn = False  # the user does not get it any more
        self.reading: _Reading | None = None  # None if it is not being read, and was not read yet


class _Pace:
    """Length of the reads of a connection, from the time that earlier ones took."""

    __slots__ = ("bytes_in_flight",)

    def __init__(self) -> None:
        self.bytes_in_flight = _FIRST_BYTES_IN_FLIGHT  # limit for all of them together

    @property
    def read_bytes(self) -> int:
        """Length of the next read."""
        return min(self.bytes_in_flight, _READ_BYTES)

    def on_ended(self, length: int, seconds: float) -> None:
        """Choose the length of the next reads.

        :param length: number of bytes that were in flight when a read was posted, with its own.
        :param seconds: time from then to its end, which is also the end of those before it.
        """
        transferred = int(length * _IN_FLIGHT_S / max(seconds, 1e-6))
        self.bytes_in_flight = min(max(transferred, _MIN_BYTES_IN_FLIGHT), _MAX_BYTES_IN_FLIGHT)


class _Posted(NamedTuple):
    """Read that was posted.

    :param read: its operation.
    :param length: its length in bytes.
    :param in_flight: number of bytes that were in flight with it.
    :param time: when it was posted, by the monotonic clock.
    """

    read: Operation[None]
    length: int
    in_flight: int
    time: float


class _Reading:
    """Reads of an announced message, in progress or complete.

    :param parts: parts of the message.
    :param memory: registered memory of its length, which the reads write to; None if it is read by pieces.
    :param pace: length of the reads.
    :param view: the same memory for the user, if it is the library's.
    """

    __slots__ = ("in_flight", "is_complete", "next", "pins", "posted", "ranges", "rest", "view")

    def __init__(
        self, parts: list[AnnouncedPart], memory: RegionSlice | None, pace: _Pace, view: memoryview | None = None
    ) -> None:
        # A count of its own, because others may use the same registration for any length of time.
        self.pins = WaitableInFlightCount(memory.pins if memory is not None else None)
        self.ranges: Iterator[tuple[RegionSlice, RemoteRegion]] = iter(())
        if memory is not None:
            self.ranges = _ranges(parts, RegionSlice(memory.region, memory.offset, len(memory), self.pins), pace)
        self.next = next(self.ranges, None)  # what has to be read next
        self.posted: deque[_Posted] = deque()  # reads, in their order, that were not found complete yet
        self.in_flight = 0  # sum of their lengths
        self.is_complete = False
        self.rest: asyncio.Task[None] | None = None  # goes on to read after the call that began has ended
        self.view = view


class AnnouncedMessages:
    """All messages that the peer announced and that were not answered yet.

    :param state: state of the channel.
    :param sender: sender of the same end, for the answers.
    :param limit: number of messages that the peer may have unanswered at once.
    :param max_message: size of the longest message accepted from the peer, in bytes.
    :param memory: memory of the library for messages.
    :param spare: registered memory that nothing else uses.
    """

    def __init__(
        self,
        state: ChannelState,
        sender: MessageSender,
        limit: int,
        max_message: int,
        memory: RecycledMemory,
        spare: RegionSlice,
    ) -> None:
        self._state = state
        self._sender = sender
        self._max_message = max_message
        self._memory = memory
        self._spare = spare
        self._spare_lock = asyncio.Lock()  # held while a message is read by pieces
        self._pace = _Pace()
        self._limit = limit
        self._unanswered: dict[int, AnnouncedMessage] = {}  # by number
        # Numbers that the peer may still withdraw before it gets the answer, at most `_limit`.
        self._answered: list[int] = []
        self._held: deque[int] = deque()  # numbers whose answers are sent at the end of the loop's turn
        self._is_scheduled = False  # whether a callback will send them
        self._is_mapped = False  # whether the last message that could be was copied from a file

    def add(self, number: int, data: bytes, flags: int) -> AnnouncedMessage | None:
        """Accept an announced message.

        :param number: number of the message.
        :param data: payload of ANNOUNCE.
        :param flags: flags of its header.
        :returns: the message; None if messages are discarded.
        :raises ValueError: the peer violates the protocol.
        """
        immediate = None
        if flags & HAS_IMMEDIATE:
            immediate = int.from_bytes(data[: IMMEDIATE.size])
            data = data[IMMEDIATE.size :]
        if flags & ~HAS_IMMEDIATE:
            raise ValueError(f"the peer announced a message with flags {flags:#x}")
        if len(self._unanswered) >= self._limit or number in self._unanswered:
            raise ValueError(f"the peer announced message {number}, which exists already or exceeds {self._limit}")
        message = AnnouncedMessage(number, parse_announcement(data), immediate)
        if message.length > self._max_message:
            raise ValueError(
                f"the peer announced a message of {message.length:,} bytes, but at most {self._max_message:,} are "
                "accepted"
            )
        self.expect_no_withdrawal(number)
        self._unanswered[number] = message
        if self._state.discards:
            self.withdraw(number)
            return None
        return message

    def withdraw(self, number: int) -> bool:
        """Drop a message, and answer as soon as it is not being read.

        :param number: number of the message.
        :returns: whether there is such a message, or was until it was answered just now.
        """
        message = self._unanswered.get(number)
        if message is None:
            return number in self._answered
        message.withdrawn = True
        if message.reading is None or message.reading.is_complete:
            self._answer(message)
        return True

    def expect_no_withdrawal(self, number: int) -> None:
        """Forget the last message of a number, because the peer uses the number again, so it has got the answer."""
        if number in self._answered:
            self._answered.remove(number)

    def withdraw_all(self) -> None:
        """Drop all messages, as `withdraw` does."""
        for number in tuple(self._unanswered):
            self.withdraw(number)
        self._send_answers()

    def _answer(self, message: AnnouncedMessage) -> None:
        """Notify the peer that its memory is no longer accessed."""
        assert self._unanswered[message.number] is message
        del self._unanswered[message.number]
        message.withdrawn = True  # if a signal handler raises before the caller has consumed it
        message.reading = None
        self._answered.append(message.number)
        del self._answered[: -self._limit]
        self._held.append(message.number)
        if message.length >= _HELD_BYTES or len(self._held) > self._limit // 2:
            self._send_answers()
        elif not self._is_scheduled:
            running_loop().call_soon(self._send_answers)
            self._is_scheduled = True

    def _send_answers(self) -> None:
        """Send the answers that are held back, each once, also if a finalizer calls this in the middle."""
        self._is_scheduled = False
        try:
            while self._held:
                self._sender.send_answer(self._held.popleft())
        except BaseException:  # such as KeyboardInterrupt
            self._is_scheduled = True
            running_loop().call_soon(self._send_answers)
            raise

    async def read_mapped(self, message: AnnouncedMessage, buffer: memoryview | None = None) -> bytes | bool:
        """Copy a message from the peer's file that this process has mapped, without a request. This waits only for a
        turn of the loop in which there is time to copy.

        :param message: the message.
        :param buffer: writable memory of its length; None for new bytes.
        :returns: the bytes, or True if they are in `buffer`; False if the message has to be read otherwise or was
            withdrawn, and `buffer` may have any content.
        :raises BrokenResourceError: the connection is broken.
        :raises BusyResourceError: another thread is changing the state of the queue pair.
        :raises ClosedResourceError: this end closed the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises MemoryError: the process has no memory for the message.
        """
        (part, *others), qp = message.parts, self._state.qp.handle
        if others or part.data is not None or message.reading is not None:
            return False
        if part.length >= _HELD_BYTES or not qp.context.software:
            return False
        if self._held:  # the peer can send again while this end copies
            self._send_answers()
        await take_turn(1 + self._is_mapped * part.length // BYTES_PER_UNIT)
        if message.withdrawn:
            return False
        self._state.check_usable()
        copied: bytes | bool
        if buffer is None:
            copied = read_mapped_bytes(qp, part.address, part.rkey, part.length) or False
        else:
            copied = read_mapped(qp, part.address, part.rkey, buffer)
        self._is_mapped = bool(copied)
        return copied

    async def read(self, message: AnnouncedMessage, may_be_mapped: bool = True) -> memoryview | None:
        """Read a message into memory of the library, and answer it.

        If this is cancelled or raises, the message can be read again: the reads go on, and the next call gets what they
        have read. The memory is used for nothing else until they have ended.

        If memory of its length cannot be registered, the message is read by pieces.

        :param message: the message.
        :param may_be_mapped: False if `read_mapped` was tried.
        :returns: the message, in memory that is used for nothing else while the memoryview, or an object made from it,
            exists; None if it was withdrawn.
        :raises BrokenResourceError: the connection is broken, or the peer's memory cannot be read, which breaks it.
        :raises ClosedResourceError: this end closed the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        :raises MemoryError: the process has no memory for the message.
        """
        reading = message.reading
        if reading is not None and reading.rest is not None:  # an earlier call was cancelled
            await asyncio.wait([reading.rest])
        if (reading is None or not reading.is_complete) and not message.withdrawn:
            try:
                memory, view = await self._memory.take(message.length)
            except OSError:  # as VerbsError: the device cannot register it; else the process cannot map it
                reading = _Reading(message.parts, None, self._pace, memoryview(bytearray(message.length)))
            else:
                if may_be_mapped and await self.read_mapped(message, view):
                    return view if self.finish(message) else None
                reading = _Reading(message.parts, memory, self._pace, view)
            if not message.withdrawn:
                await self._read(message, reading)
        return reading.view if self.finish(message) and reading is not None else None

    async def _read(self, message: AnnouncedMessage, reading: _Reading) -> None:
        """Read a message, unless it is withdrawn meanwhile. If this ends early, a task goes on.

        :raises Exception: whatever `read` raises.
        """
        message.reading = reading
        if reading.next is None:
            await self._wait_for_pieces(message, reading)
            return
        try:
            await self._read_rest(message, reading)
        except BaseException as error:
            reading.rest = running_loop().create_task(self._go_on(message, reading))
            if isinstance(error, _ENDED):
                self._state.raise_ended(error)
            raise
        self._on_ended(message, reading)

    async def _go_on(self, message: AnnouncedMessage, reading: _Reading) -> None:
        """Go on to read a message because the call that began has ended. If that fails, the next call begins again, and
        raises the exception.
        """
        try:
            await reading.pins.wait()  # as an operation can be awaited only once
            while reading.posted:
                reading.posted.popleft().read.result()
            reading.in_flight = 0
            await self._read_rest(message, reading)
        except (*_ENDED, BusyResourceError, ConcurrentAccessError, QueuePairStateError, VerbsError):
            reading.posted.clear()
            await reading.pins.wait()
        finally:
            self._on_ended(message, reading)

    async def _wait_for_pieces(self, message: AnnouncedMessage, reading: _Reading) -> None:
        """Let a task read a message by pieces, and wait for it.

        :raises Exception: whatever `read` raises.
        """
        reading.rest = rest = running_loop().create_task(self._read_by_pieces(message, reading))
        rest.add_done_callback(lambda rest: rest.cancelled() or rest.exception())  # of a cancelled call: read again
        await asyncio.wait([rest])
        try:
            rest.result()
        except _ENDED as error:
            self._state.raise_ended(error)

    async def _read_by_pieces(self, message: AnnouncedMessage, reading: _Reading) -> None:
        """Read a message through the spare buffer, piece by piece, until it is withdrawn.

        :raises Exception: whatever `QueuePair.read` raises, at once or when awaited.
        """
        assert reading.view is not None
        spare, at = self._spare, 0
        try:
            async with self._spare_lock:
                for part in message.parts:
                    end = at + part.length
                    remote = RemoteRegion(part.address, part.length, part.rkey)
                    if part.data is not None:
                        reading.view[at:end] = part.data
                        at = end
                    while at < end:
                        self._poll()
                        if message.withdrawn:
                            return
                        step, start = min(len(spare), end - at), at - end + part.length
                        await self._state.qp.read(spare[:step], remote[start : start + step])
                        reading.view[at : at + step] = spare.buffer[:step]
                        at += step
            reading.is_complete = True
        finally:
            self._on_ended(message, reading)

    def _poll(self) -> None:
        """Handle what has arrived. A withdrawal may have arrived long ago, while this end was busy: then the key of the
        message may be invalid.

        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        if not self._state.poll():
            raise ConcurrentAccessError("another thread is executing a verb on the domain of the connection")

    def _on_ended(self, message: AnnouncedMessage, reading: _Reading) -> None:
        """Handle that no read of a message is in flight any longer."""
        if not reading.is_complete:
            message.reading = None
        if message.withdrawn:
            self._answer(message)

    async def read_into(self, message: AnnouncedMessage, memory: RegionSlice) -> None:
        """Read a message into memory of the caller, unless it is withdrawn. Until `finish` is called, the message can
        be read again.

        If this is cancelled or raises, no request accesses the memory any longer. If the peer's device does not answer
        the requests in flight within 5 seconds, this breaks the connection.

        :param message: the message, which no earlier call of `read` has begun to read. It may have been withdrawn while
            the caller made room for it.
        :param memory: registered memory of its length.
        :raises Exception: whatever `read` raises.
        """
        if message.withdrawn:
            return
        reading = message.reading = _Reading(message.parts, memory, self._pace)
        try:
            await self._read_rest(message, reading)
        except BaseException as error:
            await wait_uncancelled(self._end_reads(reading))
            if isinstance(error, _ENDED):
                self._state.raise_ended(error)
            raise
        finally:
            self._on_ended(message, reading)
            message.reading = None

    async def _end_reads(self, reading: _Reading) -> None:
        """Wait until no read is in flight. After 5 seconds, break the connection, which ends them."""
        reading.posted.clear()  # those that wait for a place in the send queue are withdrawn
        with anyio.move_on_after(_END_TIMEOUT_S) as scope:
            await reading.pins.wait()
        if scope.cancelled_caught:
            self._state.fail(f"the peer's device has not answered reads of a cancelled call for {_END_TIMEOUT_S:g} s")
            await reading.pins.wait()

    def finish(self, message: AnnouncedMessage) -> bool:
        """Answer a message that was read.

        :returns: True if the user gets the message; False if it was withdrawn.
        """
        if message.withdrawn:
            return False
        self._answer(message)
        return True

    async def _read_rest(self, message: AnnouncedMessage, reading: _Reading) -> None:
        """Read what was not read yet of a message, in its order, until the message is withdrawn.

        :raises Exception: whatever `QueuePair.read` raises, at once or when awaited.
        """
        while reading.next is not None:
            local, remote = reading.next
            in_flight = reading.in_flight + len(local)
            if reading.posted and (len(reading.posted) == _READS_IN_FLIGHT or in_flight > self._pace.bytes_in_flight):
                await self._end_first_read(reading)
                continue
            self._poll()
            if message.withdrawn:
                break
            reading.posted.append(_Posted(self._state.qp.read(local, remote), len(local), in_flight, monotonic()))
            reading.in_flight = in_flight
            reading.next = next(reading.ranges, None)
        while reading.posted:
            await self._end_first_read(reading)
        reading.is_complete = reading.next is None

    async def _end_first_read(self, reading: _Reading) -> None:
        """Wait until the read that was posted first has ended.

        :raises Exception: whatever `QueuePair.read` raises when awaited.
        """
        read, length, in_flight, time = reading.posted[0]
        await read
        del reading.posted[0]
        reading.in_flight -= length
        self._pace.on_ended(in_flight, monotonic() - time)


def _ranges(parts: list[AnnouncedPart], memory: RegionSlice, pace: _Pace) -> Iterator[tuple[RegionSlice, RemoteRegion]]:
    """Copy the parts of a message that the announcement contains to memory, and yield what has to be read: ranges of
    the memory, each with the peer's memory of the same length.
    """
    at = 0
    for part in parts:
        end = at + part.length
        if part.data is not None:
            memory.buffer[at:end] = part.data
        else:
            remote = RemoteRegion(part.address, part.length, part.rkey)
            start = 0
            while start < part.length:
                step = min(pace.read_bytes, part.length - start)
                yield memory[at + start : at + start + step], remote[start : start + step]
                start += step
        at = end
