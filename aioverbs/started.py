"""Calls that nobody waits for, until somebody does."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from typing import TypeVar

__all__ = ["StartedCall"]

T = TypeVar("T")

logger = logging.getLogger("aioverbs.pool")


class StartedCall(concurrent.futures.Future[T]):
    """A call that `WorkerPool.start_soon` started: waited for on any loop or in any thread, cancelled, or forgotten.

    One that fails and is forgotten is an error in the log, with the logger ``aioverbs.pool``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._withdraw: Callable[[], None] | None = None
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

    def cancel(self) -> bool:
        """Cancel the function where it runs. It may take its time, and may end otherwise.

        :returns: whether it was not over yet.
        """
        if self.done():
            return self.cancelled()
        if (withdraw := self._withdraw) is not None:
            withdraw()
        return True

    async def wait(self) -> T:
        """What it returns, or raise what it raises. Where this is cancelled, the call is, too."""
        return await asyncio.wrap_future(self)

    def result(self, timeout: float | None = None) -> T:
        """What it returned, or raise what it raised; a thread without an event loop may wait for it."""
        self._is_asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it raised; a thread without an event loop may wait for it."""
        self._is_asked = True
        return super().exception(timeout)

    def __del__(self) -> None:
        if self._is_asked or not self.done() or self.cancelled():
            return
        error = super().exception()
        if error is not None:
            logger.error("a call that was started in a pool failed, and nobody asked for its end", exc_info=error)
