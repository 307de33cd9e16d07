"""Messages that the peer announced: the receiver reads them from the peer's memory.

    sender                                       receiver
    registers the memory, ANNOUNCE number  ->
                                                 queues the message
                                                 user calls a receive method: reads the memory
                                           <-    REVOKED number
    takes the key back, reuses the number

If the call of the sender is cancelled, it sends REVOKE number. The receiver then drops the message, or completes the
read that is in flight, and answers with REVOKED.

ANNOUNCE uses a credit until the user has received the message, so no more messages wait here than with fragments. The
answer uses no credit: see `max_announced`.
"""

from collections import deque
from collections.abc import Iterator

from aioverbs._connection.channel_state import ChannelState
from aioverbs._connection.message_sender import MessageSender
from aioverbs._connection.wire import HAS_IMMEDIATE, IMMEDIATE, AnnouncedPart, parse_announcement
from aioverbs._core.data_path.data_path import Operation, RegionSlice, RemoteRegion
from aioverbs._lifecycle.affinity import wait_uncancelled
from aioverbs._memory.region import WaitableInFlightCount
from aioverbs.errors import BrokenResourceError, ClosedResourceError, WorkCompletionError

__all__ = ["AnnouncedMessage", "AnnouncedMessages"]

# The reads that are in flight when the peer withdraws a message have to end within the time for which the peer waits,
# and small messages share the send queue with them.
_READ_BYTES = 8 << 20
_READS_IN_FLIGHT = 8


class AnnouncedMessage:
    """Message that the peer announced and that was not read yet.

    :param number: number of the message, by which the peer knows it.
    :param parts: the parts of the message.
    :param immediate: the user's immediate data; None if there is none.
    """

    __slots__ = ("immediate", "length", "number", "parts", "withdrawn")

    def __init__(self, number: int, parts: list[AnnouncedPart], immediate: int | None) -> None:
        self.number = number
        self.parts = parts
        self.length = sum(part.length for part in parts)
        self.immediate = immediate
        self.withdrawn = False  # the user does not get it


class AnnouncedMessages:
    """All messages that the peer announced and that were not answered yet.

    :param state: state of the channel.
    :param sender: sender of the same end, for the answers.
    :param max_message: size of the longest message accepted from the peer, in bytes.
    """

    def __init__(self, state: ChannelState, sender: MessageSender, max_message: int) -> None:
        self._state = state
        self._sender = sender
        self._max_message = max_message
        self._limit = 0
        self._unanswered: dict[int, AnnouncedMessage] = {}  # by number
        # Numbers that the peer may still withdraw before it gets the answer, at most `_limit`.
        self._answered: list[int] = []
        self._reading: AnnouncedMessage | None = None

    def start(self, limit: int) -> None:
        """Accept announced messages from now on.

        :param limit: number of messages that the peer may have unanswered at once.
        """
        self._limit = limit

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
        if message is not self._reading:
            self._answer(message)
        return True

    def expect_no_withdrawal(self, number: int) -> None:
        """Forget the last message of a number, because the peer uses the number again, so it has got the answer."""
        if number in self._answered:
            self._answered.remove(number)

    def discard(self) -> None:
        """Drop all messages and all further ones, because this end receives no more."""
        self._state.discards = True
        for number in tuple(self._unanswered):
            self.withdraw(number)

    def _answer(self, message: AnnouncedMessage) -> None:
        """Notify the peer that its memory is no longer accessed."""
        assert self._unanswered[message.number] is message
        del self._unanswered[message.number]
        self._answered.append(message.number)
        del self._answered[: -self._limit]
        self._sender.send_answer(message.number)

    async def read(self, message: AnnouncedMessage, memory: RegionSlice) -> None:
        """Read a message, unless it is withdrawn. If this is cancelled or raises, no request accesses the memory any
        longer. Until `finish` is called, the message can be read again.

        :param message: the message, which may have been withdrawn and answered while the caller made room for it.
        :param memory: registered memory of at least its length.
        :raises BrokenResourceError: the connection is broken, or the peer's memory cannot be read, which breaks it.
        :raises ClosedResourceError: this end closed the connection.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: ``ibv_post_send`` failed.
        """
        if self._unanswered.get(message.number) is not message:
            return
        self._reading = message
        try:
            await self._read(message, memory)
        except (BrokenResourceError, ClosedResourceError, WorkCompletionError) as error:
            self._state.raise_ended(error)
        finally:
            self._reading = None
            if message.withdrawn:
                self._answer(message)

    def finish(self, message: AnnouncedMessage) -> bool:
        """Answer a message that was read.

        :returns: True if the user gets the message; False if it was withdrawn.
        """
        if message.withdrawn:
            return False
        self._answer(message)
        return True

    async def _read(self, message: AnnouncedMessage, memory: RegionSlice) -> None:
        """Read the parts of a message into memory, in their order, until the message is withdrawn.

        :raises Exception: whatever `QueuePair.read` raises, at once or when awaited. No request accesses the memory
            then.
        """
        # A count of its own, because others may use the same registration for any length of time.
        pins = WaitableInFlightCount(memory.pins)
        reads: deque[Operation[None]] = deque()
        try:
            for local, remote in _ranges(message.parts, RegionSlice(memory.region, memory.offset, len(memory), pins)):
                if len(reads) == _READS_IN_FLIGHT:
                    await reads.popleft()
                if message.withdrawn:
                    break
                reads.append(self._state.qp.read(local, remote))
            while reads:
                await reads.popleft()
        except BaseException:
            reads.clear()  # those that wait for a place in the send queue are withdrawn
            await wait_uncancelled(pins.wait())
            raise


def _ranges(parts: list[AnnouncedPart], memory: RegionSlice) -> Iterator[tuple[RegionSlice, RemoteRegion]]:
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
            for start in range(0, part.length, _READ_BYTES):
                step = min(_READ_BYTES, part.length - start)
                yield memory[at + start : at + start + step], remote[start : start + step]
        at = end
