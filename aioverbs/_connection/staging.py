"""Registered memory of one connection, to which long messages are copied for the peer to read."""

import copy
import mmap
import weakref
from time import monotonic

from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.recycled_memory import rounded
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.resource import lifecycle_of
from aioverbs._memory.region import map_pages
from aioverbs.errors import VerbsError
from aioverbs.types import AccessFlags

__all__ = ["Copy", "Staging"]

_KEEP_S = 1.0


class Copy:
    """Memory for the copy of one message.

    :param key: its registration.
    :param memory: the memory.
    """

    __slots__ = ("_memory", "key")

    def __init__(self, key: handles.MemoryRegion, memory: mmap.mmap) -> None:
        self.key = key
        self._memory = memory

    def __len__(self) -> int:
        return len(self._memory)

    def fill(self, parts: list[memoryview]) -> None:
        """Copy a message, which fits.

        :param parts: the message, memoryviews of format ``B``.
        """
        at = 0
        for part in parts:
            self._memory[at : at + len(part)] = part
            at += len(part)


class Staging:
    """Copies of long messages, each of which the peer reads.

    The peer has the keys of this memory, and may read it at any time. So it has contained nothing but messages to this
    peer, and its keys stay valid from message to message. After a second without a message it is deregistered, and so
    it is when the queue pair is closed.

    :param channel: message channel of the connection.
    :param base: the protection domain.
    """

    def __init__(self, channel: MessageChannel, base: handles.ProtectionDomain) -> None:
        self._channel = channel
        self._base = base
        self._idle: list[Copy] = []  # the last one was used last, so it may still be in the CPU's cache
        self._used_at = 0.0  # when one was last given back, by the monotonic clock
        self._is_waiting = False  # whether a timer will call `_trim`

    def take(self, length: int) -> Copy:
        """Return memory for a message of a length in bytes.

        :raises VerbsError: the device cannot register the memory.
        :raises OSError: the process cannot map it.
        :raises ClosedResourceError: the queue pair is closed.
        """
        if self._idle:
            last = self._idle.pop()
            if len(last) >= length:
                return last
            self._deregister(last)
        memory = map_pages(rounded(length))
        key = handles.MemoryRegion(self._base, memory, AccessFlags.REMOTE_READ)
        try:
            lifecycle_of(self._channel.qp).attach(key)  # closing the queue pair takes the key back
        except BaseException:
            key.destroy()
            raise
        return Copy(key, memory)

    def give_back(self, message: Copy, _: object = None) -> None:
        """Use memory again, because the peer has read the message, or the connection has ended."""
        self._used_at = monotonic()
        self._idle.append(message)
        self._trim_later(_KEEP_S)

    def _trim_later(self, delay_s: float) -> None:
        """Call `_trim` after a delay in seconds, unless this was dropped by then."""
        if not self._is_waiting and not self._has_ended:
            self._is_waiting = True
            running_loop().call_later(delay_s, _trim, weakref.ref(self))

    @property
    def _has_ended(self) -> bool:
        """Whether the queue pair is closed, or about to be, which deregisters the memory."""
        return self._channel.broken is not None or self._channel.closed

    def _trim(self) -> None:
        """Deregister the memory, unless it was used within the last second."""
        self._is_waiting = False
        rest_s = self._used_at + _KEEP_S - monotonic()
        if rest_s > 0:
            self._trim_later(rest_s)
        while rest_s <= 0 and self._idle and not self._has_ended:
            self._deregister(self._idle.pop())

    def _deregister(self, message: Copy) -> None:
        """Deregister memory. If that fails, the connection breaks, and the end of the queue pair deregisters it."""
        try:
            message.key.destroy()
        except VerbsError as error:
            self._channel.fail(f"the key of a message could not be invalidated: {error}", copy.copy(error))
        else:
            lifecycle_of(self._channel.qp).detach(message.key)


def _trim(reference: "weakref.ref[Staging]") -> None:
    """Call `Staging._trim`. A timer has this weak reference, so that it does not keep a connection that is dropped."""
    staging = reference()
    if staging is not None:
        staging._trim()
