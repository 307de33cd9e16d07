"""Calls that nobody waits for, until somebody does."""

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures._base import PENDING, RUNNING
from typing import TypeVar

from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs.errors import ForkedProcessError

__all__ = ["CallFuture"]

T = TypeVar("T")

logger = logging.getLogger("aioverbs.pool")


class CallFuture(concurrent.futures.Future[T]):
    """A call that `WorkerPool.start_soon` started: waited for on any loop or in any thread, cancelled, or forgotten.

    One that fails and is forgotten is an error in the log, with the logger ``aioverbs.pool``. In the child of a fork
    one that was not over before is the parent's, and nobody is told of its end.

    Where the loop that opened a pool of processes is closed, or its thread has ended, the call ends when a method waits
    for the call here or asks whether it is over; callbacks, and `concurrent.futures.wait`, do not find that out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] | None = None  # until it is over
        self._poll: Callable[[], float | None] | None = None  # likewise
        self._forks = forks.count
        self._is_retrieved = False

    def on_sent(self, withdraw: Callable[[], None], poll: Callable[[], float | None] | None) -> None:
        """Take note that the call was sent.

        :param withdraw: cancels the call where it runs.
        :param poll: ends the call where nothing tells of its end any more, and returns after how many seconds to look
            again, None for never; None where its end is told in any case.
        """
        self._withdraw, self._poll = withdraw, poll
        if super().done():
            self._withdraw = self._poll = None

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """It has ended."""
        self._withdraw = self._poll = None
        if isinstance(error, asyncio.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)  # type: ignore[arg-type]  # it is what the call returned

    def _belongs_to_parent(self) -> bool:
        """Whether it was under way at a fork that made this process. Who asks for something asks for this first."""
        if self._forks == forks.count:
            return False
        if self._state in (PENDING, RUNNING):  # without the lock: who held that at the fork is not here
            return True
        self._condition = threading.Condition()  # likewise; it is over, and nobody waits
        self._forks = forks.count
        return False

    def _check_process(self) -> None:
        if self._belongs_to_parent():
            raise ForkedProcessError(f"the {type(self).__name__}")  # its repr() takes the lock

    def done(self) -> bool:
        """Whether it is over."""
        if self._belongs_to_parent():
            return False
        self._poll_now()
        return super().done()

    def _poll_now(self) -> float | None:
        """End the call if nothing tells of its end any more; return the seconds to the next look, None for never."""
        return poll() if (poll := self._poll) is not None else None

    def _wait_polling(self, timeout: float | None) -> float | None:
        """Wait as long as there is something to look for; return the timeout for the rest, None for no limit."""
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        while (interval_s := self._poll_now()) is not None:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                return 0
            concurrent.futures.wait([self], min(remaining_s, interval_s))
        return timeout

    def cancel(self) -> bool:
        """Cancel the function where it runs. It may take its time, and may end otherwise.

        :returns: whether it was not over yet; False in the child of a fork, where nothing is done.
        """
        if self._belongs_to_parent():
            return False
        if self.done():
            return self.cancelled()
        if (withdraw := self._withdraw) is not None:
            withdraw()
        return True

    async def wait(self) -> T:
        """What it returns, or raise what it raises. Where this is cancelled, the call is, too.

        :raises ForkedProcessError: it was started before a fork, in the parent process, and was not over.
        """
        self._check_process()
        future = asyncio.wrap_future(self)
        try:
            while (interval_s := self._poll_now()) is not None and not future.done():
                await asyncio.wait([future], timeout=interval_s)
        except asyncio.CancelledError:
            if not future.cancel() and not future.cancelled():
                future.exception()  # or asyncio would log that nobody asked for it
            raise
        return await future

    def result(self, timeout: float | None = None) -> T:
        """What it returned, or raise what it raised; a thread without an event loop may wait for it.

        :raises ForkedProcessError: as `wait`.
        """
        self._check_process()
        self._is_retrieved = True
        return super().result(self._wait_polling(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it raised; a thread without an event loop may wait for it.

        :raises ForkedProcessError: as `wait`.
        """
        self._check_process()
        self._is_retrieved = True
        return super().exception(self._wait_polling(timeout))

    def __del__(self) -> None:
        self._poll = None  # a finalizer looks at no worker
        if self._is_retrieved or not self.done() or self.cancelled():
            return
        error = super().exception()
        if error is not None:
            logger.error("a call that was started in a pool failed, and nobody asked for its end", exc_info=error)


publish(__name__)
