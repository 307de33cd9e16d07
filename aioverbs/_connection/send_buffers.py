"""Registered memory from which a connection sends its messages."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aioverbs._core.data_path.data_path import Operation, RegionSlice

__all__ = ["SendBuffer", "SendBuffers"]


class SendBuffer(NamedTuple):
    """Send buffer.

    :param view: memory of the buffer, to be filled.
    :param memory: the same memory as a registered slice, to be posted.
    """

    view: memoryview
    memory: RegionSlice


class SendBuffers:
    """Send buffers of a connection, which are free or in flight.

    The buffer that became free first is used next, because a buffer that the peer of a software device has just read is
    still in the peer's CPU cache, and slow to write to. Buffers become free in the order of sending, because the sends
    of a queue pair complete in order.

    Each buffer is made when it is first needed: an idle connection has none.

    :param memory: memory of one or more buffers.
    :param size: size of a buffer in bytes.
    """

    __slots__ = ("_awaited", "_free", "_made", "_size", "in_flight", "memory")

    def __init__(self, memory: RegionSlice, size: int) -> None:
        self.memory = memory
        self._size = size
        self._made = 0  # bytes of the memory that are buffers by now
        self._free: deque[SendBuffer] | None = None  # None before the first one, as an empty deque is not small
        # Sends that had not ended when `take` was last called; None before the first one. The references keep one that
        # waits for a place in the send queue from being withdrawn.
        self.in_flight: deque[tuple[Operation[None], SendBuffer]] | None = None
        self._awaited: Operation[None] | None = None  # operation that `wait` awaited last

    def take(self) -> SendBuffer | None:
        """Take a free buffer and return it; return None if all are in flight.

        The caller passes the buffer to `add_in_flight` or `release`.
        """
        in_flight = self.in_flight
        while in_flight and in_flight[0][0].ended:
            self.release(in_flight.popleft()[1])
        if (start := self._made) < self.memory.length:
            self._made = end = start + self._size
            memory = self.memory[start:end]
            return SendBuffer(memory.buffer, memory)
        return self._free.popleft() if self._free else None

    def add_in_flight(self, buffer: SendBuffer, operation: Operation[None]) -> None:
        """Mark a taken buffer as in flight until `operation`, which sends it, has ended."""
        if self.in_flight is None:
            self.in_flight = deque()
        self.in_flight.append((operation, buffer))

    def release(self, buffer: SendBuffer) -> None:
        """Give back a taken buffer that was not sent, so that it is free again."""
        if self._free is None:
            self._free = deque()
        self._free.append(buffer)

    async def wait(self, probe: Callable[[], Operation[None]]) -> None:
        """Wait until at least one buffer in flight is free again. Only one task at a time may wait.

        This awaits the oldest send in flight.

        :param probe: function that posts a request that completes after all earlier sends. That request is awaited
            instead if a cancelled caller has already awaited the send, as an operation can be awaited only once.
        :raises WorkCompletionError: the send or the probe completed with an error.
        :raises Exception: whatever `probe` raises, or another exception that `Operation` lists for an await.
        """
        assert self.in_flight is not None
        operation = self.in_flight[0][0]
        if operation is self._awaited:
            await probe()
        else:
            self._awaited = operation
            await operation
