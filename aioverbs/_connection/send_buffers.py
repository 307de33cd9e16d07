"""The registered memory that a connection sends its messages from."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aioverbs._core.data_path.data_path import Operation, RegionSlice

__all__ = ["SendBuffer", "SendBuffers"]


class SendBuffer(NamedTuple):
    """A buffer.

    :param view: its bytes.
    :param memory: the same, as it is posted.
    """

    view: memoryview
    memory: RegionSlice


class SendBuffers:
    """Buffers that are free, and those that are on their way.

    The one that came back first is used next: what the software device's peer has just read is still in the cache of
    his processor, and slow to write to. They come back in the order of their sending, as a queue pair's completions do.

    :param buffers: one or more.
    """

    __slots__ = ("_awaited", "_free", "_in_flight")

    def __init__(self, buffers: list[SendBuffer]) -> None:
        self._free = deque(buffers)
        # Each is kept here until it has ended: one that waits for a place in the send queue would be withdrawn.
        self._in_flight: deque[tuple[Operation[None], SendBuffer]] = deque()
        self._awaited: Operation[None] | None = None  # the last that was awaited here

    def take(self) -> SendBuffer | None:
        """One that is free, which is to be `sent`, or given back; None: all that are known of are on their way."""
        in_flight = self._in_flight
        while in_flight and in_flight[0][0].ended:
            self._free.append(in_flight.popleft()[1])
        return self._free.popleft() if self._free else None

    def add_in_flight(self, buffer: SendBuffer, operation: Operation[None]) -> None:
        """It is on its way until that is done."""
        self._in_flight.append((operation, buffer))

    def release(self, buffer: SendBuffer) -> None:
        """It was not sent."""
        self._free.append(buffer)

    async def wait(self, probe: Callable[[], Operation[None]]) -> None:
        """Until the first of those that are on their way is back: for one task at a time.

        :param probe: posts what is done after all that was sent: it is awaited in place of what somebody awaited before
            and was cancelled, which cannot be awaited again.
        :raises WorkCompletionError: it failed.
        """
        operation = self._in_flight[0][0]
        if operation is self._awaited:
            await probe()
        else:
            self._awaited = operation
            await operation
