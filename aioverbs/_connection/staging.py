"""Registered memory of one connection, to which long messages are copied for the peer to read."""

import copy
import weakref
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from aioverbs._connection.grants import Grants, has_windows
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.recycled_memory import rounded
from aioverbs._core.data_path.data_path import RemoteRegion
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.resource import open_part
from aioverbs._memory.region import MemoryRegion, MemoryWindow, map_pages
from aioverbs.errors import VerbsError
from aioverbs.types import AccessFlags

__all__ = ["Copy", "Staging"]

_KEEP_S = 1.0


class Copy:
    """Memory for the copy of one message.

    :param region: the memory.
    :param key: gives the peer access to it.
    :param remote: its address, length and key.
    """

    __slots__ = ("_region", "key", "remote")

    def __init__(self, region: MemoryRegion, key: MemoryWindow | MemoryRegion, remote: RemoteRegion) -> None:
        self._region = region
        self.key = key
        self.remote = remote

    def __len__(self) -> int:
        return len(self.remote)

    def fill(self, parts: list[memoryview]) -> None:
        """Copy a message, which fits.

        :param parts: the message, memoryviews of format ``B``.
        """
        at, memory = 0, self._region.buffer
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)

    async def close(self) -> None:
        """Take back the key, and deregister the memory.

        :raises VerbsError: a verb failed.
        """
        await self.key.aclose()
        await self._region.aclose()


class Staging:
    """Copies of long messages, each of which the peer reads.

    The peer has the keys of this memory, and may read it at any time. So it contains nothing but messages that were to
    be sent to this peer, and its keys stay valid from message to message. They are memory windows, so no other peer of
    the protection domain can use them; only where the device has none, they are registrations, whose keys any of these
    peers can guess.

    After a second without a message the memory is deregistered, and so it is when the queue pair is closed.

    :param channel: message channel of the connection.
    :param grants: makes the keys.
    :param base: the protection domain.
    :param run: runs a coroutine in a task of its own.
    """

    def __init__(
        self,
        channel: MessageChannel,
        grants: Grants,
        base: handles.ProtectionDomain,
        run: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._channel = channel
        self._grants = grants
        self._base = base
        self._run = run
        self._has_windows = has_windows(channel.qp.handle.context)
        self._idle: list[Copy] = []  # the last one was used last, so it may still be in the CPU's cache
        self._used_at = 0.0  # when one was last given back, by the monotonic clock
        self._is_waiting = False  # whether a timer will call `_trim`

    def take(self, length: int) -> Copy | None:
        """Return memory for a message of a length in bytes; None if `make` has to make it."""
        return self._idle.pop() if self._idle and len(self._idle[-1]) >= length else None

    async def make(self, length: int) -> Copy:
        """Return new memory for a message of a length in bytes, in place of memory that is too short.

        :raises VerbsError: the device cannot register the memory, or has no window left.
        :raises OSError: the process cannot map it.
        :raises Exception: any other exception that `Grants.make_key` raises.
        """
        if self._idle:
            await self._close(self._idle.pop())
        access = AccessFlags.MW_BIND if self._has_windows else AccessFlags.REMOTE_READ
        region = MemoryRegion(self._channel.qp, self._base, map_pages(rounded(length)), access)
        await open_part(region)
        if not self._has_windows:
            return Copy(region, region, region.remote())
        try:
            key, remote = await self._grants.make_key(self._channel.qp, region[:], AccessFlags.REMOTE_READ)
        except BaseException:  # the region is in use as long as the bind is in flight
            self._run(region.aclose())
            raise
        return Copy(region, key, remote)

    def give_back(self, message: Copy, _: object = None) -> None:
        """Use memory again, because the peer has read the message, or the connection has ended."""
        if self._channel.closed:
            return  # as `drop` does
        self._used_at = monotonic()
        self._idle.append(message)
        self._trim_later(_KEEP_S)

    def drop(self) -> None:
        """Forget the memory, because the connection is being closed, and the queue pair closes it."""
        self._idle.clear()

    def _trim_later(self, delay_s: float) -> None:
        """Call `_trim` after a delay in seconds, unless this was dropped by then."""
        if not self._is_waiting:
            self._is_waiting = True
            running_loop().call_later(delay_s, _trim, weakref.ref(self))

    def _trim(self) -> None:
        """Deregister the memory, unless it was used within the last second."""
        self._is_waiting = False
        rest_s = self._used_at + _KEEP_S - monotonic()
        if rest_s > 0:
            self._trim_later(rest_s)
        elif self._idle:
            self._run(self._close_idle())

    async def _close_idle(self) -> None:
        """Deregister all memory that is not in use."""
        while self._idle:
            await self._close(self._idle.pop())

    async def _close(self, message: Copy) -> None:
        """Deregister memory. If that fails, the connection breaks, and closing the queue pair deregisters it."""
        try:
            await message.close()
        except VerbsError as error:
            self._channel.fail(f"the key of a message could not be invalidated: {error}", copy.copy(error))


def _trim(reference: "weakref.ref[Staging]") -> None:
    """Call `Staging._trim`. A timer has this weak reference, so that it does not keep a connection that is dropped."""
    staging = reference()
    if staging is not None:
        staging._trim()
