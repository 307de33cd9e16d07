"""Registered memory from which a connection sends its messages."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aioverbs._core.data_path.data_path import Operation, RegionSlice

__all__ = ["SendBuffer", "SendBuffers"]


class SendBuffer(NamedTuple):
    """A send buffer.

    :param view: its bytes.
    :param memory: the same bytes as registered memory, to post.
    """

    view: memoryview
    memory: RegionSlice


class SendBuffers:
    """Send buffers, free and in flight.

    The buffer that was freed first is used next. A buffer that the peer of a software device has just read is still in
    the peer's CPU cache, and slow to write to. Buffers become free in the order of sending, as the completions of a
    queue pair come in order.

    :param buffers: one or more buffers.
    """

    __slots__ = ("_awaited", "_free", "_in_flight")

    def __init__(self, buffers: list[SendBuffer]) -> None:
        self._free = deque(buffers)
        # References to the operations: a dropped operation that waits for a place in the send queue would be withdrawn.
        self._in_flight: deque[tuple[Operation[None], SendBuffer]] = deque()
        self._awaited: Operation[None] | None = None  # operation that `wait` awaited last

    def take(self) -> SendBuffer | None:
        """Return a free buffer, to be passed to `add_in_flight` or `release`; None if all are in flight."""
        in_flight = self._in_flight
        while in_flight and in_flight[0][0].ended:
            self._free.append(in_flight.popleft()[1])
        return self._free.popleft() if self._free else None

    def add_in_flight(self, buffer: SendBuffer, operation: Operation[None]) -> None:
        """Mark a buffer as in flight until `operation` has ended."""
        self._in_flight.append((operation, buffer))

    def release(self, buffer: SendBuffer) -> None:
        """Return a buffer that was not sent."""
        self._free.append(buffer)

    async def wait(self, probe: Callable[[], Operation[None]]) -> None:
        """Wait until the first buffer in flight is free. One task at a time may wait.

        :param probe: posts a request that completes after all sent messages. It is awaited if the operation was awaited
            before by a cancelled caller, as an operation can be awaited only once.
        :raises WorkCompletionError: the operation failed.
        """
        operation = self._in_flight[0][0]
        if operation is self._awaited:
            await probe()
        else:
            self._awaited = operation
            await operation
