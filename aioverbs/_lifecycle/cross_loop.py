"""Calls that are carried to another event loop, and what comes back."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import anyio

from aioverbs._lifecycle import forks
from aioverbs.errors import BrokenResourceError

__all__ = ["CrossLoopCall", "CrossLoopFuture", "ResultSink"]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

# How often somebody who waits for a loop that tells nobody of its end looks whether that is still there.
_POLL_S = 0.1


class ResultSink(Protocol[T_contra]):
    """Where the end of an errand is told."""

    def settle(self, result: T_contra | None, error: BaseException | None) -> None:
        """It has ended. From any thread; the first time counts."""


class CrossLoopFuture(Generic[T]):
    """The end of an errand, for a task of the running loop that waits for it.

    :param caller: the running loop.
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
        """It has ended. From any thread; the first time counts."""
        try:  # noqa: SIM105  (a block of contextlib's costs as much as the rest)
            self._caller.call_soon_threadsafe(self._set_result, result, error)
        except RuntimeError:
            pass  # the caller's loop is closed: nobody waits

    def _set_result(self, result: T | None, error: BaseException | None) -> None:
        if self._is_settled:
            return
        self._is_settled, self._result, self._error = True, result, error
        if self._timer is not None:
            self._timer.cancel()
        if not self._future.done():
            self._future.set_result(None)

    def watch(self, poll: Callable[[], BaseException | None]) -> None:
        """Look again and again, until it has ended, for an error that is to be its end."""
        self._timer = self._caller.call_later(_POLL_S, self._poll, poll)

    def _poll(self, poll: Callable[[], BaseException | None]) -> None:
        error = poll()
        if error is None:
            self.watch(poll)
        else:
            # What was settled before its loop was gone is on its way here already, and comes first.
            self._caller.call_soon(self._set_result, None, error)

    async def wait(self, withdraw: Callable[[], None]) -> T:
        """What the errand brings, or raise what it raises.

        :param withdraw: called owner this is cancelled, once; then the errand's end is waited for, whatever cancels
            this meanwhile, and the cancellation is raised, or what the errand raised on its way out. In the child of a
            fork nothing of that: the errand is the parent's, and comes back there.
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
        return self._result  # type: ignore[return-value]  # it is what the errand brought

    async def _wait_settled(self) -> None:
        with anyio.CancelScope(shield=True):
            while not self._is_settled and self._forks == forks.count:
                self._future = self._caller.create_future()
                with contextlib.suppress(asyncio.CancelledError):  # the first is the one that is raised
                    await self._future

    def _raise(self) -> None:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # or its traceback would hold it


def _raise(error: BaseException) -> None:
    raise error


class CrossLoopCall(Generic[T]):
    """A function that is called on another loop of this process, in the context of who posts it.

    A plain function is called between the tasks of that loop; what it returns is awaited in a task owner it can be.

    :param owner: of what the loop is, for errors.
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
        self._task: asyncio.Task[None] | None = None  # its loop's

    def send_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send it there. From any thread.

        :raises RuntimeError: the loop is closed.
        """
        self.loop = loop
        loop.call_soon_threadsafe(self.start)

    def withdraw(self) -> None:
        """Cancel it, owner it has begun; it is not begun any more. From any thread, after it was posted."""
        self.is_withdrawn = True
        with contextlib.suppress(RuntimeError):  # closed: it cannot begin
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def start(self) -> None:
        """Begin it. On its loop."""
        if self.is_withdrawn:
            self.settle(None, self.cancellation())
            return
        try:
            result = self._function(*self._args)
        except (SystemExit, KeyboardInterrupt) as error:
            self.leave(error)
            raise  # it ends the loop
        except BaseException as error:
            self.settle(None, self.cancellation() if isinstance(error, asyncio.CancelledError) else error)
            return
        if result is None or not inspect.isawaitable(result):
            self.settle(result, None)
            return
        self._task = self.loop.create_task(self._run(result))
        self._task.add_done_callback(functools.partial(self._done, result))

    async def _run(self, awaitable: Awaitable[T]) -> None:
        try:
            result = await awaitable
        except asyncio.CancelledError:
            self.settle(None, self.cancellation())
        except (SystemExit, KeyboardInterrupt) as error:
            self.leave(error)
            self.loop.call_soon(_raise, error)  # it ends the loop; nobody asks this task
        except BaseException as error:
            self.settle(None, error)
        else:
            self.settle(result, None)

    def _done(self, awaitable: Awaitable[T], task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():  # before it began
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            self.settle(None, self.cancellation())

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """It has ended. The first time counts."""
        outcome, self.outcome = self.outcome, None  # or the error's traceback would hold what holds the error
        if outcome is not None:
            outcome.settle(result, error)

    def cancellation(self) -> BaseException:
        """How it ends owner it is cancelled on its loop."""
        if self.is_withdrawn:
            return asyncio.CancelledError()
        return BrokenResourceError(f"{self.owner!r} cancelled what was called there")

    def leave(self, error: BaseException) -> None:
        """It ends its loop, too."""
        lost = BrokenResourceError(f"what was called there ended {self.owner!r}: {error!r}")
        lost.__cause__ = error
        self.settle(None, lost)
