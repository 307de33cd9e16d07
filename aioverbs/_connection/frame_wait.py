"""Waiting for something that a frame of the peer brings, such as a credit."""

import asyncio

from aioverbs._core.data_path.data_path import WorkQueue
from aioverbs._lifecycle.affinity import running_loop, wake

__all__ = ["FrameWait"]


class FrameWait:
    """Wait of one task at a time. Meanwhile, the message model of the completion queue decides whether to poll or to
    sleep, as if the task awaited a request: the frame may arrive as soon as a message.

    :param queue: receive queue of the connection.
    """

    __slots__ = ("_queue", "_waiter")

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the next call of `wake`."""
        assert self._waiter is None
        self._waiter = waiter = running_loop().create_future()
        self._queue.count_waiting(1)
        try:
            await waiter
        finally:
            if self._waiter is waiter:  # cancelled
                self._end()

    def wake(self) -> None:
        """Wake the task, if one waits."""
        waiter = self._waiter
        if waiter is not None:
            self._end()
            wake(waiter)

    def _end(self) -> None:
        self._waiter = None
        self._queue.count_waiting(-1)
