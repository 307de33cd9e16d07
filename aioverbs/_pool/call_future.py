"""Futures of calls that were started without waiting for them."""

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
    """Future of a call that `WorkerPool.start_soon` started.

    A task on any loop, or a thread without a loop, can wait for the call and cancel it. If the call fails and its
    result is never retrieved, the logger ``aioverbs.pool`` logs an error. In the child of a fork, a call that was in
    flight at the fork belongs to the parent, and its end is not reported.

    If the event loop that opened a pool of processes is closed, or its thread has ended, no event reports the end of
    the call. Then only the methods of this class detect the end, by polling: `done`, `wait`, `result`, `exception` and
    `cancel`. Callbacks and `concurrent.futures.wait` do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] | None = None  # None once the call has ended
        self._poll: Callable[[], float | None] | None = None  # None once the call has ended
        self._forks = forks.count
        self._is_retrieved = False

    def on_sent(self, withdraw: Callable[[], None], poll: Callable[[], float | None] | None) -> None:
        """Record how to cancel and to poll the call. The pool calls this after sending the call.

        :param withdraw: function that cancels the call on its worker.
        :param poll: function that ends the call if no event can report its end any more. It returns the number of
            seconds until the next poll, or None if no further poll is needed. None instead of a function: the end of
            the call is always reported.
        """
        self._withdraw, self._poll = withdraw, poll
        if super().done():
            self._withdraw = self._poll = None

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """Set the result or the error of the call, and wake all waiters. Call once, from any thread.

        :param result: result of the function, if `error` is None.
        :param error: exception of the call; None if the function returned. `asyncio.CancelledError` cancels the future.
        """
        self._withdraw = self._poll = None
        if isinstance(error, asyncio.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)  # type: ignore[arg-type]  # the result, of type T

    def _belongs_to_parent(self) -> bool:
        """Return whether the call was in flight at the fork that made this process. Every method checks this first."""
        if self._forks == forks.count:
            return False
        if self._state in (PENDING, RUNNING):  # without the lock: a thread that held it at the fork is missing here
            return True
        self._condition = threading.Condition()  # a free lock; the call has ended, so no thread waits
        self._forks = forks.count
        return False

    def _check_process(self) -> None:
        """Check that the call was not in flight at the fork that made this process.

        :raises ForkedProcessError: the call was in flight then.
        """
        if self._belongs_to_parent():
            raise ForkedProcessError(f"the {type(self).__name__}")  # repr(self) would take the lock

    def done(self) -> bool:
        """Return whether the call has ended. In the child of a fork: False if it was in flight at the fork."""
        if self._belongs_to_parent():
            return False
        self._poll_now()
        return super().done()

    def _poll_now(self) -> float | None:
        """End the call if no event can report its end any more.

        :returns: seconds until the next poll, or None if no further poll is needed.
        """
        return poll() if (poll := self._poll) is not None else None

    def _wait_polling(self, timeout: float | None) -> float | None:
        """Wait as long as polling is needed.

        :returns: timeout in seconds for the rest of the wait; None: no limit.
        """
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        while (interval_s := self._poll_now()) is not None:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                return 0
            concurrent.futures.wait([self], min(remaining_s, interval_s))
        return timeout

    def cancel(self) -> bool:
        """Cancel the function on its worker, without waiting for its end.

        The function may still return, or raise another exception.

        :returns: True if the call had not ended, or was cancelled before; False if it ended otherwise. False in the
            child of a fork if the call was in flight at the fork; then nothing is done.
        """
        if self._belongs_to_parent():
            return False
        if self.done():
            return self.cancelled()
        if (withdraw := self._withdraw) is not None:
            withdraw()
        return True

    async def wait(self) -> T:
        """Wait for the end of the call. Any asyncio event loop may call this.

        A cancellation of the waiting task also cancels the call, and does not wait for its end.

        :returns: the result of the function.
        :raises ForkedProcessError: the call was in flight at the fork that made this process.
        :raises asyncio.CancelledError: the call or the waiting task was cancelled.
        :raises RuntimeError: no asyncio event loop is running.
        :raises Exception: as for `WorkerPool.run`, or whatever the function raised.
        """
        self._check_process()
        future = asyncio.wrap_future(self)
        try:
            while (interval_s := self._poll_now()) is not None and not future.done():
                await asyncio.wait([future], timeout=interval_s)
        except asyncio.CancelledError:
            if not future.cancel() and not future.cancelled():
                future.exception()  # prevents asyncio's log message that it was never retrieved
            raise
        return await future

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the call, and block the calling thread meanwhile.

        :param timeout: maximum time to wait, in seconds; None: no limit.
        :returns: the result of the function.
        :raises TimeoutError: the call did not end in time. The call continues.
        :raises ForkedProcessError: the call was in flight at the fork that made this process.
        :raises concurrent.futures.CancelledError: the call was cancelled.
        :raises Exception: as for `WorkerPool.run`, or whatever the function raised.
        """
        self._check_process()
        self._is_retrieved = True
        return super().result(self._wait_polling(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the call, and return its exception. Block the calling thread meanwhile.

        :param timeout: maximum time to wait, in seconds; None: no limit.
        :returns: the exception; None if the function returned.
        :raises TimeoutError: the call did not end in time. The call continues.
        :raises ForkedProcessError: the call was in flight at the fork that made this process.
        :raises concurrent.futures.CancelledError: the call was cancelled.
        """
        self._check_process()
        self._is_retrieved = True
        return super().exception(self._wait_polling(timeout))

    def __del__(self) -> None:
        self._poll = None  # a finalizer must not poll the worker, which takes locks
        if self._is_retrieved or not self.done() or self.cancelled():
            return
        error = super().exception()
        if error is not None:
            logger.error("a call of WorkerPool.start_soon failed, and its result was never retrieved", exc_info=error)


publish(__name__)
