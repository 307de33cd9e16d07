"""Sending of long messages by announcing their memory, which the peer reads: see `announced_messages`."""

import array
import asyncio
import copy
import functools
import io
import mmap
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

from aioverbs._connection.credits import max_announced
from aioverbs._connection.frame_wait import FrameWait
from aioverbs._connection.grants import Grants
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.recycled_memory import RecycledMemory
from aioverbs._connection.staging import Copy, Staging
from aioverbs._connection.wire import IMMEDIATE, MAX_READ_PARTS, AnnouncedPart, announcement_size, pack_announcement
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import running_loop, wait_uncancelled
from aioverbs._lifecycle.resource import lifecycle_of
from aioverbs._lifecycle.turns import BYTES_PER_UNIT, spend
from aioverbs._memory.region import MemoryRegion, MemoryWindow, is_large
from aioverbs._memory.registration_cache import RegistrationCache, is_temporary
from aioverbs._verbs.capability_checks import has_windows
from aioverbs.errors import VerbsError
from aioverbs.types import AccessFlags

__all__ = ["Announcer"]

# Length below which a message is copied before it is announced. The copy takes some 30 us for each MiB, less than the
# work of a memory window; for longer ones, memory bandwidth matters more.
_COPIED_BYTES = 4 << 20
_SHORT_BYTES = 4096  # shorter parts of a message are sent with its announcement
_MAX_UNREAD_BYTES = 12 << 20  # of messages that the peer has not read although `send` has returned
_WITHDRAW_TIMEOUT_S = 5.0

# Objects that their owner may resize or close after the message, which a registration that stays would prevent.
_RESIZABLE = (bytearray, array.array, mmap.mmap, type(io.BytesIO().getbuffer().obj))


class _Announcement:
    """Message that was announced to the peer.

    :param number: number of the message.
    :param length: its length in bytes.
    :param is_constant: whether its memory cannot change, as it belongs to `bytes`.
    :param answered: future that is done when the peer no longer accesses the memory, and cancelled when the connection
        ends first.
    :param memory: keeps the memory registered, and its keys valid, until it is closed.
    """

    __slots__ = ("answered", "is_constant", "length", "memory", "number")

    def __init__(
        self, number: int, length: int, is_constant: bool, answered: asyncio.Future[None], memory: AsyncExitStack
    ) -> None:
        self.number = number
        self.length = length
        self.is_constant = is_constant
        self.answered = answered
        self.memory = memory


async def _finished() -> None:
    """Finish a message whose memory the sender may change already."""


class Announcer:
    """Sender of announced messages.

    A message of less than 4 MiB is copied: see `Staging`. For a longer one, the peer gets keys, which give access to
    exactly its memory until it was read. These are memory windows, which cost little, over registrations that stay in
    the cache; or registrations for the one message, if it is announced without waiting, the device has no windows, the
    memory may be resized afterwards, or its object ends with the message, such as the view of an array that was made to
    send it.

    :param channel: message channel of the connection.
    :param grants: grants of the connection, which share their numbers and their revocation with announced messages.
    :param base: the protection domain.
    :param cache: its registration cache.
    :param memory: memory of the domain for messages.
    :param depth: number of receives in this end's offer.
    :raises VerbsError: the device cannot be queried.
    """

    def __init__(
        self,
        channel: MessageChannel,
        grants: Grants,
        base: handles.ProtectionDomain,
        cache: RegistrationCache,
        memory: RecycledMemory,
        depth: int,
    ) -> None:
        self._channel = channel
        self._grants = grants
        self._base = base
        self._cache = cache
        self._has_windows = has_windows(channel.qp.handle.context.attributes)
        self._limit = max_announced(depth)  # number of messages that may be unanswered
        self._answer_wait = FrameWait(channel.receive_queue)  # of the one call with the sender's lock, for that
        self._unread_bytes = 0
        self._unanswered: set[asyncio.Future[None]] = set()
        self._staging = Staging(channel, base, grants, memory, self._run)
        self._finishing: set[asyncio.Task[None]] = set()

    async def announce(
        self, parts: list[memoryview], immediate: int | None
    ) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """Announce a message, as soon as fewer than `max_announced` messages are unanswered.

        The caller holds the lock of the sender. If this is cancelled or raises, nothing was sent.

        :param parts: the message.
        :param immediate: the user's immediate data; None for none.
        :returns: a function that finishes the message; None if the message has to be sent in fragments, because it has
            too many parts, or the device cannot register its memory.
        :raises Exception: whatever `MessageSender.send` raises.
        """
        while not self._free:
            await self._answer_wait.wait()
        self._channel.check_sending()
        length = sum(map(len, parts))
        if self._may_copy(length):
            copied = await self._room_for_copy(length)
            if copied is not None and self._announce_copy(copied, parts, length, immediate):
                return _finished
        prefix = _prefix(immediate)
        pieces = self._pieces(parts, len(prefix))
        announcement = None if pieces is None else await self._send(pieces, prefix)
        if announcement is None:
            return None
        return functools.partial(self._finish, announcement)

    def announce_now(self, parts: list[memoryview], immediate: int | None, is_constant: bool) -> bool:
        """Announce a message if that needs no waiting, neither now nor until the peer has read it.

        If it is not copied, its memory is registered for the message alone: up to the 16 MiB for which that takes a
        thread, it costs less than a memory window over a registration in the cache, and the wait for it.

        :param parts: the message.
        :param immediate: the user's immediate data; None for none.
        :param is_constant: whether the memory does not change until the peer has read it.
        :returns: whether the message was announced. If not, nothing was done: `announce` has to wait, or cannot
            announce it.
        :raises Exception: whatever `MessageSender.post_announcement` raises.
        """
        length = sum(map(len, parts))
        if not self._free:
            return False
        if self._may_copy(length):
            copied = self._staging.take(length)
            return copied is not None and self._announce_copy(copied, parts, length, immediate)
        prefix = _prefix(immediate)
        pieces = self._pieces(parts, len(prefix)) if is_constant else None
        if pieces is None or is_large(sum(len(each) for each in pieces if isinstance(each, memoryview))):
            return False
        keys: list[handles.MemoryRegion] = []
        try:
            described = [self._register_now(piece, keys) for piece in pieces]
        except BaseException as error:
            self._take_back(keys)
            if isinstance(error, VerbsError):  # `announce` finds out whether fragments have to be sent
                return False
            raise
        return self._post(described, prefix, functools.partial(self._take_back, keys))

    def _may_copy(self, length: int) -> bool:
        """Return whether a message of a length in bytes is copied, as it is short and few others are unread."""
        return length < _COPIED_BYTES and self._unread_bytes + length <= _MAX_UNREAD_BYTES

    async def _room_for_copy(self, length: int) -> Copy | None:
        """Return memory for the copy of a message, when there are a credit and a buffer for its announcement.

        :param length: length of the message in bytes.
        :returns: the memory; None if it cannot be made.
        :raises Exception: whatever `MessageSender.send` raises.
        """
        copied = self._staging.take(length)
        if copied is None:
            try:
                copied = await self._staging.make(length)
            except OSError:  # as VerbsError: the device cannot register it; else the process cannot map it
                return None
        try:
            await self._channel.sender.wait_for_announcement()
        except BaseException:
            self._staging.give_back(copied)
            raise
        return copied

    def _announce_copy(self, copied: Copy, parts: list[memoryview], length: int, immediate: int | None) -> bool:
        """Copy a message and announce the copy.

        :param copied: memory for it.
        :param parts: the message.
        :param length: its length in bytes.
        :param immediate: the user's immediate data; None for none.
        :returns: whether the message was announced.
        :raises Exception: whatever `MessageSender.post_announcement` raises.
        """
        try:
            spend(length // BYTES_PER_UNIT)
            copied.fill(parts)
        except BaseException:
            self._staging.give_back(copied)
            raise
        prefix = _prefix(immediate)
        described = [AnnouncedPart(copied.remote.address, length, copied.remote.rkey)]
        self._unread_bytes += length
        return self._post(described, prefix, functools.partial(self._on_copy_read, copied, length))

    def _on_copy_read(self, copied: Copy, length: int, _: object) -> None:
        """Use the memory of a copy again."""
        self._unread_bytes -= length
        self._staging.give_back(copied)

    def _post(self, parts: list[AnnouncedPart], prefix: bytes, on_answered: Callable[[object], None]) -> bool:
        """Send an announcement, if that needs no waiting.

        Signal handlers may raise at any point here, also after the announcement was posted. So the future of the answer
        has the memory before that, and it alone releases it: at the answer, or at once if nothing was posted.

        :param parts: description of the message.
        :param prefix: encoded immediate data; empty for none.
        :param on_answered: called when the peer no longer accesses the memory, or the connection has ended.
        :returns: whether it was sent.
        :raises Exception: whatever `MessageSender.post_announcement` raises.
        """
        frames, number = self._channel.sender.frames, None
        posted = frames.posted
        answered: asyncio.Future[None] = running_loop().create_future()
        answered.add_done_callback(on_answered)
        try:
            number = self._grants.reserve_number()
            self._expect_answer(number, answered)
            self._channel.sender.post_announcement(number, prefix + pack_announcement(parts), bool(prefix))
        finally:
            is_sent = frames.posted != posted
            if not is_sent:
                if number is not None:
                    self._grants.release_number(number)
                answered.cancel()
        return is_sent

    def _pieces(self, parts: list[memoryview], prefix_bytes: int) -> list[bytes | memoryview] | None:
        """Return a message as pieces: bytes to send with the announcement, and memory that the peer reads.

        :param parts: the message.
        :param prefix_bytes: number of bytes of the announcement before its description of the pieces.
        :returns: the pieces; None if these are too many to be announced.
        """
        short_bytes = sum(len(part) for part in parts if len(part) < _SHORT_BYTES)
        if short_bytes > self._channel.sender.fragment_size:  # before they are joined
            return None
        pieces = list(_join_short(parts))
        if (
            prefix_bytes + announcement_size(len(pieces), short_bytes) > self._channel.sender.fragment_size
            or sum(isinstance(piece, memoryview) for piece in pieces) > MAX_READ_PARTS
        ):
            return None
        return pieces

    @property
    def _free(self) -> bool:
        """Whether one more message may be unanswered."""
        return len(self._unanswered) < self._limit

    def drop_copies(self) -> None:
        """Forget the memory of copies, because the queue pair has been closed."""
        self._staging.drop()

    def _expect_answer(self, number: int, answered: "asyncio.Future[None]") -> None:
        """Accept the answer to a message that is announced in this turn of the loop.

        :param number: number of the message.
        :param answered: future that is done when the peer no longer accesses the memory, and cancelled when the
            connection ends first.
        """
        answered.add_done_callback(self._on_answered)
        self._unanswered.add(answered)
        self._grants.expect_answer(number, answered)

    def _on_answered(self, answered: "asyncio.Future[None]") -> None:
        """Let a further message be announced, because the peer has answered one or the connection has ended."""
        self._unanswered.discard(answered)
        self.wake_waiter()

    def wake_waiter(self) -> None:
        """Wake the call that waits until a further message may be announced. After an answer, this is called while the
        completion is handled, and the call then runs after `_on_answered`.
        """
        self._answer_wait.wake()

    async def _send(self, pieces: list[bytes | memoryview], prefix: bytes) -> _Announcement | None:
        """Register the memory of a message, and send its announcement.

        :param pieces: the message: bytes to send with the announcement, and memory that the peer reads.
        :param prefix: encoded immediate data; empty for none.
        :returns: the announced message; None if the device cannot register its memory.
        :raises Exception: whatever `announce` raises; nothing was sent, and the memory is as it was.
        """
        number = self._grants.reserve_number()
        memory, is_sent = AsyncExitStack(), False
        try:
            try:
                parts = [await self._register(piece, memory) for piece in pieces]
            except VerbsError:  # such as the limit of locked memory: fragments need none
                return None
            await self._channel.sender.send_announcement(number, prefix + pack_announcement(parts), bool(prefix))
            is_sent = True
        finally:
            if not is_sent:
                self._grants.release_number(number)
                await wait_uncancelled(memory.aclose())
        # The announcement was posted in this turn of the loop, so no answer was handled yet.
        answered: asyncio.Future[None] = running_loop().create_future()
        self._expect_answer(number, answered)
        is_constant = all(isinstance(piece, bytes) or type(piece.obj) is bytes for piece in pieces)
        return _Announcement(number, sum(map(len, pieces)), is_constant, answered, memory)

    async def _register(self, piece: bytes | memoryview, memory: AsyncExitStack) -> AnnouncedPart:
        """Return a part of a message as the announcement describes it.

        :param piece: bytes to send with the announcement, or memory for which the peer gets a key.
        :param memory: is given the registration and the key, to be released in the end.
        :raises VerbsError: the device cannot register the memory, or has no window left.
        :raises Exception: any other exception that `RegistrationCache.region` or `Grants.make_key` raises.
        """
        if isinstance(piece, bytes):
            return AnnouncedPart(0, len(piece), 0, piece)
        is_cached = self._is_cached(piece)
        if not is_cached and not is_large(len(piece)):
            keys: list[handles.MemoryRegion] = []
            memory.callback(self._take_back, keys)
            return self._register_now(piece, keys)
        qp, access = self._channel.qp, AccessFlags.REMOTE_READ
        key: MemoryWindow | MemoryRegion
        if not is_cached:
            key, remote = await self._grants.register(qp, piece, access)
        else:
            region = await memory.enter_async_context(self._cache.region(piece, AccessFlags.MW_BIND))
            try:
                key, remote = await self._grants.make_key(qp, region[:], access)
            except asyncio.CancelledError:  # the region is in use as long as the bind is in flight
                self._run(memory.pop_all().aclose())
                raise
        memory.push_async_callback(self._grants.close_key, key)
        return AnnouncedPart(remote.address, remote.length, remote.rkey)

    def _is_cached(self, piece: memoryview) -> bool:
        """Return whether the cache registers the memory of a piece. If not, it is registered for the message alone."""
        return self._has_windows and not isinstance(piece.obj, _RESIZABLE) and not is_temporary(piece)

    def _register_now(self, piece: bytes | memoryview, keys: list[handles.MemoryRegion]) -> AnnouncedPart:
        """Return a part of a message as the announcement describes it, after registering its memory for the message.

        :param piece: bytes to send with the announcement, or memory.
        :param keys: is given the registration, for `_take_back`.
        :raises VerbsError: the device cannot register the memory.
        """
        if isinstance(piece, bytes):
            return AnnouncedPart(0, len(piece), 0, piece)
        # A resource of its own, as of a grant, would take as long as the registration. The queue pair takes the key
        # back when it is closed.
        key = handles.MemoryRegion(self._base, piece, AccessFlags.REMOTE_READ)
        keys.append(key)
        lifecycle_of(self._channel.qp).attach(key)
        return AnnouncedPart(key.address, key.length, key.rkey)

    def _take_back(self, keys: list[handles.MemoryRegion], _: object = None) -> None:
        """Take back the keys of a message that the peer no longer reads.

        :param keys: the registrations, whose memory is released.
        """
        for key in keys:
            try:
                key.destroy()
            except VerbsError as error:  # it stays attached: the end of the queue pair takes it back
                self._channel.fail(f"the key of a message could not be invalidated: {error}", copy.copy(error))
            else:
                lifecycle_of(self._channel.qp).detach(key)

    async def _finish(self, announcement: _Announcement) -> None:
        """Wait until the peer has read a message, and take the keys back. If the memory of the message cannot change
        and the peer has at most 12 MiB of such messages to read, do not wait.

        If this is cancelled, the message is withdrawn. If its memory can change, the keys are taken back before this
        raises, even if the peer does not answer within 5 seconds. If a key cannot be invalidated, the connection
        breaks.

        :raises BrokenResourceError: the connection broke first.
        :raises ClosedResourceError: this end closed the connection first.
        :raises VerbsError: a key of memory in the registration cache could not be invalidated.
        """
        answered = announcement.answered
        if announcement.is_constant and self._unread_bytes + announcement.length <= _MAX_UNREAD_BYTES:
            self._leave(announcement)
            return
        try:
            await asyncio.wait([answered])
        finally:
            if answered.done():
                await announcement.memory.aclose()
            elif announcement.is_constant:
                self._channel.sender.withdraw_announcement(announcement.number)
                self._leave(announcement)
            else:
                await wait_uncancelled(self._withdraw(announcement))
        if answered.cancelled():
            raise self._channel.closed_error()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task of its own."""
        task = running_loop().create_task(coroutine)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _leave(self, announcement: _Announcement) -> None:
        """Let a task wait for the answer to a message whose memory cannot change."""
        self._unread_bytes += announcement.length
        self._run(self._finish_later(announcement))

    async def _finish_later(self, announcement: _Announcement) -> None:
        """Wait until the peer has read or dropped a message, and take the keys back."""
        try:
            await asyncio.wait([announcement.answered])
        finally:
            self._unread_bytes -= announcement.length
            await announcement.memory.aclose()

    async def _withdraw(self, announcement: _Announcement) -> None:
        """Ask the peer to drop a message, wait a limited time for the answer, and take the keys back.

        :raises VerbsError: a key could not be invalidated; the connection breaks.
        """
        self._channel.sender.withdraw_announcement(announcement.number)
        await asyncio.wait([announcement.answered], timeout=_WITHDRAW_TIMEOUT_S)
        await announcement.memory.aclose()

    async def wait_answered(self) -> None:
        """Wait until the peer has read all announced messages, or the connection has ended."""
        while self._unanswered:
            await asyncio.wait(tuple(self._unanswered))


def _prefix(immediate: int | None) -> bytes:
    """Return what an announcement begins with: encoded immediate data, or nothing for None."""
    return b"" if immediate is None else IMMEDIATE.pack(immediate)


def _join_short(parts: list[memoryview]) -> Iterator[bytes | memoryview]:
    """Return the parts of a message with adjacent short ones joined to bytes."""
    short: list[memoryview] = []
    for part in parts:
        if len(part) < _SHORT_BYTES:
            short.append(part)
            continue
        if short:
            yield b"".join(short)
            short = []
        yield part
    if short:
        yield b"".join(short)
