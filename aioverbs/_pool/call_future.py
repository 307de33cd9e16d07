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
from aioverbs._lifecycle.cross_loop import for_future
from aioverbs.errors import ForkedProcessError

__all__ = ["CallFuture"]

T = TypeVar("T")

logger = logging.getLogger("aioverbs.pool")


class CallFuture(concurrent.futures.Future[T]):
    """Future of a call that `WorkerPool.start_soon` started.

    A task on any loop, or a thread without a loop, can wait for the call and cancel it. If the call fails and its
    result is never retrieved, the logger ``aioverbs.pool`` logs the exception. In a forked child, a call that was in
    flight at the fork belongs to the parent process, and its end is not reported.

    If the event loop that opened a pool of processes is closed, or its thread has ended, no event reports the end of
    the call. Then only the methods `done`, `wait`, `result`, `exception` and `cancel` detect the end, by polling.
    Callbacks and `concurrent.futures.wait` do not detect it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] | None = None  # None once the call has ended
        self._poll: Callable[[], float | None] | None = None  # None once the call has ended
        self._forks = forks.count
        self._is_retrieved = False

    def on_sent(self, withdraw: Callable[[], None], poll: Callable[[], float | None] | None) -> None:
        """Record the functions that cancel and poll the call. The pool calls this after sending the call.

        :param withdraw: function that cancels the call on its worker.
        :param poll: function that ends the call if its worker has ended and no event reported this. It returns the
            number of seconds until the next poll, or None if no further poll is needed. Pass None instead of a function
            if an event always reports the end of the call.
        """
        self._withdraw, self._poll = withdraw, poll
        if super().done():
            self._withdraw = self._poll = None

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """Set the result or the exception of the call, and wake all waiters.

        This can be called from any thread, but only once for each future.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned. `asyncio.CancelledError`
            cancels the future.
        """
        self._withdraw = self._poll = None
        if isinstance(error, asyncio.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(for_future(error))
        else:
            self.set_result(result)  # type: ignore[arg-type]  # the result, of type T

    def _belongs_to_parent(self) -> bool:
        """Return whether this process was forked while the call was in flight, so that the call belongs to the parent.

        All methods for the user of the future check this first.
        """
        if self._forks == forks.count:
            return False
        if self._state in (PENDING, RUNNING):  # without the lock: a thread that held it at the fork is missing here
            return True
        self._condition = threading.Condition()  # a free lock; the call has ended, so no thread waits
        self._forks = forks.count
        return False

    def _check_process(self) -> None:
        """Check that the call does not belong to the parent process.

        :raises ForkedProcessError: this process was forked while the call was in flight.
        """
        if self._belongs_to_parent():
            raise ForkedProcessError(f"the {type(self).__name__}")  # repr(self) would take the lock

    def done(self) -> bool:
        """Return whether the call has ended: it returned, raised an exception or was cancelled.

        Always False in a forked child if the call was in flight at the fork.
        """
        if self._belongs_to_parent():
            return False
        self._poll_now()
        return super().done()

    def _poll_now(self) -> float | None:
        """End the call if its worker has ended and no event reported this.

        :returns: seconds until the next poll; None if no further poll is needed.
        """
        return poll() if (poll := self._poll) is not None else None

    def _wait_polling(self, timeout: float | None) -> float | None:
        """Poll the call until the call has ended, no further poll is needed or the timeout has expired.

        :param timeout: maximum time to poll, in seconds; None if there is no limit.
        :returns: timeout for the wait that follows: 0 if the time has expired, else `timeout`.
        """
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        while (interval_s := self._poll_now()) is not None:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                return 0
            concurrent.futures.wait([self], min(remaining_s, interval_s))
        return timeout

    def cancel(self) -> bool:
        """Request the cancellation of the function on its worker, without waiting for the function to end.

        The function may still return, or raise another exception.

        :returns: True if the cancellation was requested, or if the call had already been cancelled; False if the call
            had already ended in another way. False in a forked child if the call was in flight at the fork; then
            nothing is done.
        """
        if self._belongs_to_parent():
            return False
        if self.done():
            return self.cancelled()
        if (withdraw := self._withdraw) is not None:
            withdraw()
        return True

    async def wait(self) -> T:
        """Wait until the call has ended and return the result of the function.

        This can be called from any asyncio event loop. If the waiting task is cancelled, the call is cancelled as well,
        as by `cancel`, but the task does not wait until the call has ended.

        :returns: the result of the function.
        :raises ForkedProcessError: this process was forked while the call was in flight.
        :raises asyncio.CancelledError: the call or the waiting task was cancelled.
        :raises RuntimeError: no asyncio event loop is running. The call continues.
        :raises Exception: whatever the function raised; or another exception that `WorkerPool.run` lists, such as
            `WorkerDiedError`.
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
        """Block the calling thread until the call has ended, and return the result of the function.

        :param timeout: maximum time to wait, in seconds; None if there is no limit.
        :returns: the result of the function.
        :raises TimeoutError: the call did not end in time. The call continues.
        :raises ForkedProcessError: this process was forked while the call was in flight.
        :raises concurrent.futures.CancelledError: the call was cancelled.
        :raises Exception: whatever the function raised; or another exception that `WorkerPool.run` lists, such as
            `WorkerDiedError`.
        """
        self._check_process()
        self._is_retrieved = True
        return super().result(self._wait_polling(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block the calling thread until the call has ended, and return its exception instead of raising it.

        :param timeout: maximum time to wait, in seconds; None if there is no limit.
        :returns: whatever the function raised, or another exception that `WorkerPool.run` lists, such as a
            `WorkerDiedError`; None if the function returned.
        :raises TimeoutError: the call did not end in time. The call continues.
        :raises ForkedProcessError: this process was forked while the call was in flight.
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
