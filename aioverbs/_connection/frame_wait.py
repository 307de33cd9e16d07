"""Waiting for something that a frame of the peer brings, such as a credit."""

import asyncio

from aioverbs._core.data_path.data_path import AwaitedFrame, WorkQueue
from aioverbs._lifecycle.affinity import running_loop, wake

__all__ = ["FrameWait"]


class FrameWait:
    """Wait of one task at a time. Meanwhile, the message model of the completion queue decides whether to poll in each
    turn of the loop or to sleep, as if the task awaited a request: the frame may arrive as soon as a message.

    :param queue: receive queue of the connection.
    """

    __slots__ = ("_awaited", "_waiter")

    def __init__(self, queue: WorkQueue) -> None:
        self._awaited = AwaitedFrame(queue)
        self._waiter: asyncio.Future[None] | None = None  # of the last wait

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits."""
        return self._waiter is not None and not self._waiter.done()

    async def wait(self) -> None:
        """Wait until the next call of `wake`."""
        self._waiter = waiter = running_loop().create_future()
        try:
            self._awaited.begin()
            await waiter
        finally:
            self._awaited.end()

    def wake(self) -> None:
        """Wake the task, if one waits. If this raises, as a signal handler may have it do, a later call wakes it."""
        wake(self._waiter)
        self._awaited.end()
