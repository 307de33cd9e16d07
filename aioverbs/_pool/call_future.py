"""Calls that nobody waits for, until somebody does."""

import asyncio
import concurrent.futures
import logging
import threading
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
    """

    def __init__(self) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] | None = None
        self._forks = forks.count
        self._is_asked = False

    def begun(self, withdraw: Callable[[], None]) -> None:
        """It was sent."""
        self._withdraw = withdraw
        if self.done():
            self._withdraw = None

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """It has ended."""
        self._withdraw = None
        if isinstance(error, asyncio.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)  # type: ignore[arg-type]  # it is what the call returned

    def _is_the_parents(self) -> bool:
        """Whether it was under way at a fork that made this process. Who asks for something asks for this first."""
        if self._forks == forks.count:
            return False
        if self._state in (PENDING, RUNNING):  # without the lock: who held that at the fork is not here
            return True
        self._condition = threading.Condition()  # likewise; it is over, and nobody waits
        self._forks = forks.count
        return False

    def _check_process(self) -> None:
        if self._is_the_parents():
            raise ForkedProcessError(f"the {type(self).__name__}")  # its repr() takes the lock

    def done(self) -> bool:
        """Whether it is over."""
        return not self._is_the_parents() and super().done()

    def cancel(self) -> bool:
        """Cancel the function where it runs. It may take its time, and may end otherwise.

        :returns: whether it was not over yet; False in the child of a fork, where nothing is done.
        """
        if self._is_the_parents():
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
        return await asyncio.wrap_future(self)

    def result(self, timeout: float | None = None) -> T:
        """What it returned, or raise what it raised; a thread without an event loop may wait for it.

        :raises ForkedProcessError: as `wait`.
        """
        self._check_process()
        self._is_asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it raised; a thread without an event loop may wait for it.

        :raises ForkedProcessError: as `wait`.
        """
        self._check_process()
        self._is_asked = True
        return super().exception(timeout)

    def __del__(self) -> None:
        if self._is_asked or not self.done() or self.cancelled():
            return
        error = super().exception()
        if error is not None:
            logger.error("a call that was started in a pool failed, and nobody asked for its end", exc_info=error)


publish(__name__)
