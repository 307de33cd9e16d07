"""Calls of functions on another event loop, and their results."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import anyio

from aioverbs._lifecycle import forks
from aioverbs.errors import BrokenResourceError

__all__ = ["CrossLoopCall", "CrossLoopFuture", "ResultSink", "for_future"]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

# Interval at which a caller checks that the other loop still exists: the end of a loop causes no notification.
_POLL_S = 0.1


class ResultSink(Protocol[T_contra]):
    """Object that receives the result or the exception of a call."""

    def settle(self, result: T_contra | None, error: BaseException | None) -> None:
        """Set the result or the exception of the call. This is called at most once for each call, from any thread.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """


def for_future(error: BaseException) -> BaseException:
    """Return an exception that a future can hold: asyncio's futures refuse StopIteration, and would never be done.

    :param error: exception that a function raised.
    :returns: a RuntimeError with `error` as its cause if that is a StopIteration, as coroutines raise it; else `error`.
    """
    if not isinstance(error, StopIteration):
        return error
    substitute = RuntimeError("the function raised StopIteration")
    substitute.__cause__ = error
    return substitute


class CrossLoopFuture(Generic[T]):
    """Result of a call on another loop, for one task on the calling loop that waits for it.

    :param caller: running loop, on which the task waits.
    """

    __slots__ = ("_caller", "_error", "_forks", "_future", "_is_settled", "_result", "_timer")

    def __init__(self, caller: asyncio.AbstractEventLoop) -> None:
        self._caller = caller
        self._forks = forks.count
        self._future: asyncio.Future[None] = caller.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._is_settled = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """Set the result or the exception of the call.

        This can be called from any thread. Do nothing if the result or exception was set before, or if the caller's
        loop is closed.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """
        try:  # noqa: SIM105  (contextlib.suppress costs as much as the rest of this method)
            self._caller.call_soon_threadsafe(self._set_result, result, error)
        except RuntimeError:
            pass  # the caller's loop is closed, so no task waits

    def _set_result(self, result: T | None, error: BaseException | None) -> None:
        """Record the result or the exception of the call, and wake the waiting task.

        Call on the caller's loop. Do nothing if a result or exception was recorded before.
        """
        if self._is_settled:
            return
        self._is_settled, self._result, self._error = True, result, error
        if self._timer is not None:
            self._timer.cancel()
        if not self._future.done():
            self._future.set_result(None)

    def watch(self, poll: Callable[[], BaseException | None]) -> None:
        """Call a function every 0.1 s until the call has ended, to detect that the call can no longer complete.

        Call on the caller's loop, which also calls the function.

        :param poll: function without arguments that returns an exception to end the call with, or None if the call can
            still complete.
        """
        self._timer = self._caller.call_later(_POLL_S, self._poll, poll)

    def _poll(self, poll: Callable[[], BaseException | None]) -> None:
        """Call a polling function. If the function returns an exception, end the call with that exception.

        If the function returns None, poll again after 0.1 s.

        :param poll: function that was passed to `watch`.
        """
        error = poll()
        if error is None:
            self.watch(poll)
        else:
            # A result that was set before the other loop ended is already in the queue of this loop, and comes first.
            self._caller.call_soon(self._set_result, None, error)

    async def wait(self, withdraw: Callable[[], None]) -> T:
        """Wait until the call has ended and return its result.

        If the waiting task is cancelled, `withdraw` is called once, and the task still waits until the call has ended,
        even if the task is cancelled again. Then the first cancellation is raised, even if the call returned a result;
        but if the call raised an exception other than `asyncio.CancelledError`, that exception is raised. In a forked
        child, the cancellation is raised at once: the call belongs to the parent and ends there.

        :param withdraw: function that cancels the call on the other loop.
        :returns: the result of the call.
        :raises asyncio.CancelledError: the waiting task was cancelled.
        :raises BaseException: the exception that was passed to `settle`, or that the function passed to `watch`
            returned.
        """
        try:
            await self._future
        except asyncio.CancelledError:
            if self._forks != forks.count:
                raise
            withdraw()
            await self._wait_settled()
            if self._error is not None and not isinstance(self._error, asyncio.CancelledError):
                self._raise()
            raise
        if self._error is not None:
            self._raise()
        return self._result  # type: ignore[return-value]  # T may include None

    async def _wait_settled(self) -> None:
        """Wait until the call has ended. If the task is cancelled meanwhile, the cancellation is dropped.

        In a forked child, return at once.
        """
        with anyio.CancelScope(shield=True):
            while not self._is_settled and self._forks == forks.count:
                self._future = self._caller.create_future()
                with contextlib.suppress(asyncio.CancelledError):  # wait() raises the first cancellation
                    await self._future

    def _raise(self) -> None:
        """Raise the exception that the call ended with, and drop the reference to it.

        Call only once, and only if there is an exception.

        :raises BaseException: always: the exception that the call ended with.
        """
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # break the reference cycle between the error and its traceback


def _raise(error: BaseException) -> None:
    """Raise an exception. For use as a callback on an event loop.

    :raises BaseException: always: the given exception.
    """
    raise error


class CrossLoopCall(Generic[T]):
    """Call of a function on another event loop of this process, in a copy of the context of the sender.

    A plain function is called between the tasks of that loop. If its result is awaitable, a new task awaits it.

    :param function: function to call.
    :param args: positional arguments of the function.
    :param outcome: object that receives the result or the exception of the call.
    :param owner: owner of the loop, for error messages.
    """

    __slots__ = ("_args", "_function", "_task", "is_withdrawn", "loop", "outcome", "owner")

    def __init__(
        self, function: Callable[..., Any], args: tuple[object, ...], outcome: ResultSink[T], owner: object
    ) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.outcome: ResultSink[T] | None = outcome
        self.owner = owner
        self.is_withdrawn = False
        self._function = function
        self._args = args
        self._task: asyncio.Task[None] | None = None  # task on the loop of the call

    def send_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the call on a loop. This can be called from any thread.

        :raises RuntimeError: the loop is closed.
        """
        self.loop = loop
        loop.call_soon_threadsafe(self.start)

    def withdraw(self) -> None:
        """Cancel the task of the call if the call has started, else prevent the start.

        This can be called from any thread, after `send_to`. It has no effect on a call that has ended, or if the loop
        is closed.
        """
        self.is_withdrawn = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the call cannot start
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """Cancel the task of the call, if there is one. Call on the loop of the call."""
        if self._task is not None:
            self._task.cancel()

    def start(self) -> None:
        """Start the call, or settle it as cancelled if it was withdrawn. Call on the loop of the call.

        :raises SystemExit: the function raised it; it is raised again here to end the loop, after the call was settled
            by `leave`. The same applies to `KeyboardInterrupt`.
        """
        if self.is_withdrawn:
            self.settle(None, self.cancellation())
            return
        try:
            result = self._function(*self._args)
        except (SystemExit, KeyboardInterrupt) as error:
            self.leave(error)
            raise  # ends the loop
        except BaseException as error:
            self.settle(None, self.cancellation() if isinstance(error, asyncio.CancelledError) else error)
            return
        if result is None or not inspect.isawaitable(result):
            self.settle(result, None)
            return
        self._task = self.loop.create_task(self._run(result))
        self._task.add_done_callback(functools.partial(self._done, result))

    async def _run(self, awaitable: Awaitable[T]) -> None:
        """Await the result of the function and settle the call with its value or exception. This is the call's task.

        :param awaitable: object that the function returned.
        """
        try:
            result = await awaitable
        except asyncio.CancelledError:
            self.settle(None, self.cancellation())
        except (SystemExit, KeyboardInterrupt) as error:
            self.leave(error)
            self.loop.call_soon(_raise, error)  # ends the loop; no task awaits this one
        except BaseException as error:
            self.settle(None, error)
        else:
            self.settle(result, None)

    def _done(self, awaitable: Awaitable[T], task: asyncio.Task[None]) -> None:
        """Drop the reference to the task of the call, which has ended.

        If the task was cancelled before its first step, close the coroutine of the function and settle the call as
        cancelled.

        :param awaitable: object that the function returned.
        :param task: task of the call.
        """
        self._task = None
        if task.cancelled():  # cancelled before its first step
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            self.settle(None, self.cancellation())

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """Pass the result or the exception of the call to ``outcome``. Do nothing if that was done before.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """
        outcome, self.outcome = self.outcome, None  # avoid a reference cycle through the error's traceback
        if outcome is not None:
            outcome.settle(result, error)

    def cancellation(self) -> BaseException:
        """Return a new exception for a call that was cancelled on its loop.

        :returns: `asyncio.CancelledError` if the caller withdrew the call, else `BrokenResourceError`.
        """
        if self.is_withdrawn:
            return asyncio.CancelledError()
        return BrokenResourceError(f"{self.owner!r} cancelled the call that was sent to it")

    def leave(self, error: BaseException) -> None:
        """Settle the call with a `BrokenResourceError`, because its function ends the loop.

        :param error: SystemExit or KeyboardInterrupt that the function raised.
        """
        lost = BrokenResourceError(f"{self.owner!r} was ended by the call that was sent to it: {error!r}")
        lost.__cause__ = error
        self.settle(None, lost)
