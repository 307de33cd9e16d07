"""Registered memory of one connection, to which long messages are copied for the peer to read."""

import contextlib
import copy
import ctypes
import weakref
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from aioverbs._connection.gather import join_into
from aioverbs._connection.grants import Grants
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.recycled_memory import RecycledMemory, rounded
from aioverbs._core.data_path.data_path import RegionSlice, RemoteRegion
from aioverbs._core.handles import handles
from aioverbs._core.software.software import FileRegion
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.resource import lifecycle_of
from aioverbs._memory.region import MemoryRegion, MemoryWindow, WaitableInFlightCount, register_file
from aioverbs.errors import BusyResourceError, VerbsError
from aioverbs.types import AccessFlags

__all__ = ["Copy", "Staging"]

_KEEP_S = 1.0


class Copy:
    """Memory for the copy of one message.

    :param memory: the memory: that of a file of its own, or of the domain.
    :param key: gives the peer access to it.
    :param remote: its address, length and key.
    """

    __slots__ = ("key", "memory", "remote", "used_at")

    def __init__(
        self,
        memory: memoryview | FileRegion,
        key: MemoryWindow | MemoryRegion,
        remote: RemoteRegion,
    ) -> None:
        self.memory = memory
        self.key = key
        self.remote = remote
        self.used_at = 0.0  # when it was last given back, by the monotonic clock

    def __len__(self) -> int:
        return self.remote.length

    def fill(self, parts: list[memoryview]) -> None:
        """Copy a message, which fits.

        :param parts: the message, memoryviews of format ``B``.
        """
        if isinstance(self.memory, FileRegion):
            self.memory.fill(parts)
        else:
            join_into(self.memory, parts)


class Staging:
    """Copies of long messages, each of which the peer reads.

    The peer has the keys of this memory, and may read it at any time. So it contains nothing but messages that were to
    be sent to this peer, and its keys stay valid from message to message. They are memory windows, so no other peer of
    the protection domain can use them; only where the device has none, they are registrations, whose keys any of these
    peers can guess.

    On the software device, each copy is a file, which the peer maps: then it reads a message as fast as its own memory,
    without a request. On other devices, and where the process cannot make files, the memory is the domain's
    for received messages. It goes back there a second after it was last used, and when the connection has been closed:
    then the queue pair has taken back the keys.

    :param channel: message channel of the connection.
    :param base: the protection domain.
    :param grants: makes the keys.
    :param memory: memory of the domain.
    :param run: runs a coroutine in a task of its own.
    """

    def __init__(
        self,
        channel: MessageChannel,
        base: handles.ProtectionDomain,
        grants: Grants,
        memory: RecycledMemory,
        run: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._channel = channel
        self._base = base
        self._grants = grants
        self._memory = memory
        self._run = run
        self._idle: list[Copy] = []  # the last one was used last, so it may still be in the CPU's cache
        self._stuck: list[Copy] = []  # whose key could not be taken back
        self._is_waiting = False  # whether a timer will call `_trim`
        self._is_dropped = False

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
        region, memory = await self._new_memory(rounded(length))
        try:
            key, remote = await self._grants.make_key(self._channel.qp, region, AccessFlags.REMOTE_READ)
        except BaseException:
            self._run(self._release_unused(region, memory))
            raise
        return Copy(memory, key, remote)

    async def _new_memory(self, size: int) -> tuple[RegionSlice, memoryview | FileRegion]:
        """Return memory that has contained nothing, registered and for `Copy`.

        :raises Exception: whatever `make` raises.
        """
        if self._base.context.software:
            with contextlib.suppress(OSError):  # without a file, the peer reads more slowly
                return register_file(lifecycle_of(self._channel.qp), self._base, size)
        region, memory = await self._memory.take(size)
        ctypes.memset(region.address, 0, len(memory))  # messages of other peers
        return region, memory

    def give_back(self, message: Copy, _: object = None) -> None:
        """Use memory again, because the peer has read the message, or the connection has ended."""
        if self._is_dropped:
            return
        message.used_at = monotonic()
        self._idle.append(message)
        if not self._channel.closed:
            self._trim_later(_KEEP_S)

    def drop(self) -> None:
        """Forget the memory, because the queue pair has been closed."""
        self._is_dropped = True
        self._idle.clear()
        self._stuck.clear()

    def _trim_later(self, delay_s: float) -> None:
        """Call `_trim` after a delay in seconds, unless this was dropped by then."""
        if not self._is_waiting:
            self._is_waiting = True
            running_loop().call_later(delay_s, _trim, weakref.ref(self))

    def _trim(self) -> None:
        """Release the memory that was not used within the last second."""
        self._is_waiting = False
        if not self._channel.closed:
            self._run(self._close_old())

    async def _close_old(self) -> None:
        """Do the work of `_trim`. The first one is the one that was used first."""
        while self._idle:
            rest_s = self._idle[0].used_at + _KEEP_S - monotonic()
            if rest_s > 0:
                self._trim_later(rest_s)
                return
            await self._close(self._idle.pop(0))

    async def _close(self, message: Copy) -> None:
        """Take back a key. If that fails, the connection breaks, and closing the queue pair takes it back."""
        try:
            await message.key.aclose()
            self._release(message.memory)
        except (VerbsError, BusyResourceError) as error:
            self._stuck.append(message)
            self._channel.fail(f"the key of a message could not be invalidated: {error}", copy.copy(error))

    async def _release_unused(self, region: RegionSlice, memory: memoryview | FileRegion) -> None:
        """Release memory for which no key was made, when no bind of a window is in flight any more."""
        assert isinstance(region.pins, WaitableInFlightCount)
        await region.pins.wait()
        with contextlib.suppress(VerbsError, BusyResourceError):  # the end of the queue pair deregisters it
            self._release(memory)

    def _release(self, memory: memoryview | FileRegion) -> None:
        """Release memory that no key leads to. That of the domain goes back by itself.

        :raises VerbsError: a file cannot be deregistered. The end of the queue pair does that.
        :raises BusyResourceError: a window is bound to it, which could not be closed.
        """
        if isinstance(memory, FileRegion):
            memory.destroy()
            lifecycle_of(self._channel.qp).detach(memory)


def _trim(reference: "weakref.ref[Staging]") -> None:
    """Call `Staging._trim`. A timer has this weak reference, so that it does not keep a connection that is dropped."""
    staging = reference()
    if staging is not None:
        staging._trim()
