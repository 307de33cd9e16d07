"""Thread models and owners of objects, and calls to the event loop of an owner."""

import asyncio
import contextlib
import enum
import functools
import inspect
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import anyio

from aioverbs._core.handles.handles import Affinity
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.cross_loop import CrossLoopCall, CrossLoopFuture
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs.errors import AffinityError, ForkedProcessError

__all__ = [
    "Affinity",
    "CrossLoopCondition",
    "OwnedBlock",
    "OwnedIterator",
    "ThreadModel",
    "owner_for",
    "run_on_owner",
    "run_on_owner_within",
    "running_loop",
    "wait_socket_ready",
    "wait_uncancelled",
    "wake",
]

P = ParamSpec("P")
T = TypeVar("T")


class ThreadModel(enum.Enum):
    """Rules for the use of the objects of a resource domain by threads: see `ResourceDomain`."""

    SAFE = "safe"
    """Any thread may use the objects at any time; the provider takes locks.

    Tasks on any event loop may await their operations. The completion channel wakes only the loop that opened the
    completion queue, and that loop notifies the others. So an operation that does not complete at once, such as
    ``receive()``, completes on another loop only while the loop of the completion queue runs. If that loop may stop or
    block, open the completion queue on the loop that awaits.
    """

    UNSAFE = "unsafe"
    """Any thread may use the objects, one verb at a time. The callers must serialize their verbs; an overlapping verb
    raises `ConcurrentAccessError`.

    Awaited operations need the loop that opened the completion queue, as for SAFE.
    """

    SINGLE = "single"
    """Only one thread may use the objects during their lifetime: that of the event loop that opened the domain."""


def owner_for(model: ThreadModel) -> Affinity | None:
    """Return the owner for a new object that is subject to a thread model.

    :returns: for SINGLE, the running loop and its thread; for UNSAFE, an owner that is bound to no thread and detects
        overlapping verbs; for SAFE, None.
    :raises RuntimeError: the model is SINGLE, and no asyncio event loop is running in this thread.
    """
    match model:
        case ThreadModel.SINGLE:
            return Affinity.of_running_loop()
        case ThreadModel.UNSAFE:
            return Affinity.unbound()
        case ThreadModel.SAFE:
            return None


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running asyncio event loop.

    :raises RuntimeError: no asyncio event loop is running, as in a trio task.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        trio = sys.modules.get("trio")
        here = "this is a trio task" if trio is not None and trio.lowlevel.in_trio_task() else "none is running here"
        raise RuntimeError(f"aioverbs needs an asyncio event loop, and {here}") from None


async def wait_uncancelled(awaited: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Wait until a coroutine or future is done, even if the waiting task is cancelled, once or repeatedly.

    If the waiting task was cancelled, the last cancellation is raised after the wait, and a result of the awaited
    object is dropped; a cancelled scope of anyio cancels only the next await after that. If the awaited object failed
    or was cancelled as well, its exception is the cause of that cancellation; a cancellation without a cause means that
    the awaited object is complete. In a forked child, a cancellation ends the wait and is raised at once.

    :param awaited: coroutine, which a new task on the running loop executes, or future of that loop.
    :returns: the result of the awaited object.
    :raises asyncio.CancelledError: the waiting task or the awaited object was cancelled, as the end of a loop cancels
        both.
    :raises RuntimeError: no asyncio event loop is running. If a coroutine was passed, it has been closed.
    :raises BaseException: whatever the awaited object raised, if the waiting task was not cancelled.
    """
    try:
        loop = running_loop()
    except RuntimeError:
        if inspect.iscoroutine(awaited):
            awaited.close()  # prevents the warning that it was never awaited
        raise
    is_begun = isinstance(awaited, asyncio.Future)

    async def begin() -> T:
        nonlocal is_begun
        is_begun = True
        return await awaited

    future = awaited if isinstance(awaited, asyncio.Future) else loop.create_task(begin())
    cancelled: asyncio.CancelledError | None = None
    forks_before = forks.count
    with anyio.CancelScope(shield=True):
        while not (is_begun and future.done()):
            if future.done():  # the task was cancelled before its first step, as the end of a loop cancels all tasks
                future = loop.create_task(begin())
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                if forks.count != forks_before:  # the thread that would complete the future may be missing in the child
                    raise
                cancelled = error
    try:
        result = future.result()
    except BaseException as failure:
        if cancelled is None and not future.cancelled():
            raise
        raise cancelled or asyncio.CancelledError() from failure
    if cancelled is not None:
        raise cancelled
    return result


def wake(waiter: "asyncio.Future[None] | None") -> None:
    """Wake the task that waits for a future, by setting the future's result to None. Call on the loop of that future.

    Do nothing if `waiter` is None or done, or if its loop is closed.
    """
    if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
        waiter.set_result(None)


async def wait_socket_ready(sock: socket.socket, *, writing: bool = False) -> None:
    """Wait until a socket is readable or writable.

    At most one task at a time may wait for the same socket and direction. The ``sock_*`` methods of the loop are not
    used because of forks. The copy of the loop in a forked child shares the loop's epoll set. If a task that waits in
    such a method is cancelled in the child, as `asyncio.run` does with all tasks, the method removes the socket from
    that set, and the parent is never woken again.

    :param sock: non-blocking socket.
    :param writing: True to wait until the socket is writable, False to wait until it is readable.
    :raises ValueError: the socket is closed.
    :raises RuntimeError: no asyncio event loop is running.
    """
    loop, forks_before = running_loop(), forks.count
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    waiter: asyncio.Future[None] = loop.create_future()
    descriptor = sock.fileno()
    add(descriptor, wake, waiter)
    try:
        await waiter
    finally:
        if forks.count == forks_before and not loop.is_closed():
            remove(descriptor)


class _Owned:
    """Base class of objects that belong to their owner: the event loop, and its thread, that first uses them.

    Calls from other loops raise `AffinityError` before anything has changed. A check in the body of a generator would
    come too late: the exception would end the generator.

    :param name: name of the object in error messages.
    :param may_begin: function that is called before the first use, and raises if the caller may not use the object.
    """

    def __init__(self, name: str, may_begin: Callable[[], object]) -> None:
        self._name = name
        self._may_begin = may_begin
        self._owner: Affinity | None = None

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def _enter(self, method: str) -> None:
        """Check that the calling event loop owns the object. If the object has no owner yet, make that loop the owner.

        In the second case ``may_begin`` is called first. The owner stays the same on failure.

        :param method: name of the called method, for the error message.
        :raises AffinityError: another event loop or thread owns the object, even if that has ended.
        :raises ForkedProcessError: the owner belongs to the process that this one was forked from.
        :raises RuntimeError: the object has no owner yet, and no asyncio event loop is running.
        :raises Exception: whatever ``may_begin`` raised, such as `ClosedResourceError`.
        """
        if self._owner is None:
            self._may_begin()
            self._owner = Affinity.of_running_loop()
        else:
            self._owner.check(self, method)

    def _leave(self, method: str) -> bool:
        """Check that the caller owns the object, or that the owner's loop or thread has ended.

        If the object has no owner, only ``may_begin`` is called.

        :param method: name of the called method, for the error message.
        :returns: False if the owner belongs to the process that this one was forked from, in which case the object must
            be left alone; else True.
        :raises AffinityError: another event loop or thread, which has not ended, owns the object.
        :raises Exception: whatever ``may_begin`` raised, such as `ClosedResourceError`.
        """
        if self._owner is None:
            self._may_begin()
        elif self._owner.inherited:
            return False
        elif not self._owner.orphaned:
            self._owner.check(self, method)
        return True


class OwnedIterator(_Owned, AsyncGenerator[T, None]):
    """Asynchronous generator that belongs to the event loop that requests the first item.

    :param name: name of the iterator in error messages.
    :param generator: generator that yields the items.
    :param may_begin: function that is called before the first item, and raises if the caller may not iterate.
    """

    def __init__(self, name: str, generator: AsyncGenerator[T, None], may_begin: Callable[[], object]) -> None:
        super().__init__(name, may_begin)
        self._generator = generator

    async def asend(self, value: None) -> T:
        """Advance the generator and return its next item.

        :param value: always None.
        :raises StopAsyncIteration: there are no more items.
        :raises AffinityError: another event loop owns the iterator. In this case the generator is not advanced.
        :raises ForkedProcessError: the iteration began in the process that this one was forked from.
        :raises RuntimeError: this is the first item, and no asyncio event loop is running.
        :raises Exception: whatever the generator raised, which ends the iteration; or whatever ``may_begin``, which is
            called before the first item, raised, in which case the generator is not advanced.
        """
        self._enter("__anext__")
        return await self._generator.asend(value)

    async def athrow(self, kind: Any, value: Any = None, traceback: TracebackType | None = None) -> T:
        """Raise an exception inside the generator, at its last ``yield``, or at its beginning if it has not started.

        :param kind: exception, or type of one.
        :param value: exception, if ``kind`` is a type; None to call the type without arguments.
        :param traceback: traceback of the exception; None to leave it as it is.
        :returns: the next item, if the generator catches the exception and yields one.
        :raises StopAsyncIteration: the generator catches the exception and ends.
        :raises AffinityError: another event loop owns the iterator. In this case the generator does not receive the
            exception.
        :raises ForkedProcessError: the iteration began in the process that this one was forked from.
        :raises RuntimeError: no item was requested before, and no asyncio event loop is running.
        :raises BaseException: the given exception, if the generator does not catch it; or any exception that the
            generator raises instead; or, if no item was requested before, whatever ``may_begin`` raised.
        """
        self._enter("athrow")
        error = (kind() if value is None else value) if isinstance(kind, type) else kind
        return await self._generator.athrow(error.with_traceback(traceback) if traceback is not None else error)

    async def aclose(self) -> None:
        """Close the generator, which ends the iteration.

        After the owner has ended, any event loop may do so. In a forked child, an iteration that began before the fork
        is left as it is.

        :raises AffinityError: another event loop, which has not ended, owns the iterator. In this case the generator
            stays open.
        :raises Exception: whatever the generator raised while it was closed; or, if no item was requested before,
            whatever ``may_begin`` raised, in which case the generator stays open.
        """
        if self._leave("aclose"):
            await self._generator.aclose()


class OwnedBlock(_Owned, AbstractAsyncContextManager[T, None], Generic[T]):
    """Asynchronous context manager that belongs to the event loop that enters it, for one block at a time.

    ``async with`` yields the result of `_begin`. Entering the block raises `RuntimeError` if the object is already in a
    block or no asyncio event loop is running, `AffinityError` if another event loop has entered that block,
    `ForkedProcessError` if the process that this one was forked from has entered it, and whatever `may_begin` or
    `_begin` raises. In all these cases, the block is not entered, and the object can be used for a later block.

    The end of the block raises `AffinityError` on another event loop than the one that entered it, unless that loop has
    ended, and whatever `_end` raises. In a forked child, the end of a block that was entered before the fork does
    nothing. Subclasses implement `_begin` and `_end`.

    :param name: name of the context manager in error messages.
    :param may_begin: function that is called before the block is entered, and raises if the caller may not enter it.
    """

    def __init__(self, name: str, may_begin: Callable[[], object]) -> None:
        super().__init__(name, may_begin)
        self._is_in_use = False  # True from the beginning of `__aenter__` to the end of the block
        self._is_entered = False

    async def _begin(self) -> T:
        """Enter the block on the loop that owns it. Subclasses implement this; ``async with`` calls it.

        :returns: the value for ``async with ... as``.
        :raises Exception: whatever the subclass raises, which ``async with`` raises unchanged; the block is not
            entered.
        """
        raise NotImplementedError

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the block, on the loop that owns it, or on any loop if the owner has ended.

        Subclasses implement this; ``async with`` calls it at the end of the block and does not suppress the exception
        that the block raised.

        :param kind: type of the exception that the block raised; None if it raised none.
        :param error: exception that the block raised; None if it raised none.
        :param traceback: traceback of that exception; None if there is none.
        :raises Exception: whatever the subclass raises, which ``async with`` raises unchanged; the object is no longer
            in a block.
        """
        raise NotImplementedError

    async def __aenter__(self) -> T:
        if self._is_in_use:
            self._enter("__aenter__")
            raise RuntimeError(f"{self!r} is already in a block: make a new one for each block")
        previous, self._owner = self._owner, None
        try:
            self._enter("__aenter__")
            self._is_in_use = True
            begun = await self._begin()
        except BaseException:
            self._is_in_use, self._owner = False, previous
            raise
        self._is_entered = True
        return begun

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._leave("__aexit__"):
            return
        if not self._is_entered:
            raise RuntimeError(f"{self!r} is not in a block: there is nothing to leave")
        self._is_in_use = self._is_entered = False
        await self._end(kind, error, traceback)


class CrossLoopCondition:
    """Condition variable between event loops: `notify`, from any thread, wakes the waiting tasks of all loops."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def notify(self) -> None:
        """Make all waiting tasks, on any loop, test their conditions again.

        This can be called from any thread, after the state that the conditions depend on has changed.
        """
        for loop, event in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, so no task waits there
                loop.call_soon_threadsafe(event.set)

    async def wait_while(self, condition: Callable[[], object], *, poll_s: float | None = None) -> None:
        """Wait while a condition is true. The condition is tested at the beginning and after each notification.

        :param condition: function without arguments whose result is tested for truth.
        :param poll_s: interval in seconds at which the condition is also tested, for changes without a notification;
            None if every change is notified.
        :raises RuntimeError: the condition is true at the beginning, and no asyncio event loop is running.
        :raises Exception: whatever `condition` raised, which ends the wait.
        """
        if not condition():
            return
        waiting = running_loop(), asyncio.Event()
        self._waiting.append(waiting)
        try:
            while condition():
                # A notification after clear() sets the event; a change before clear() is found by this test.
                waiting[1].clear()
                if condition():
                    again = waiting[0].call_later(poll_s, waiting[1].set) if poll_s is not None else None
                    try:
                        await waiting[1].wait()
                    finally:
                        if again is not None:
                            again.cancel()
        finally:
            self._waiting.remove(waiting)


@overload
async def run_on_owner(
    owner: Affinity | None, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
) -> T: ...
@overload
async def run_on_owner(owner: Affinity | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
async def run_on_owner(
    owner: Affinity | None, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
) -> object:
    """Call a function on the event loop of an owner, from a task on any asyncio event loop, and wait for its result.

    If there is no owner, or the caller is the owner, the function is called directly, in the caller's task. Otherwise
    it runs in a copy of the caller's context: a plain function is called between the tasks of the owner's loop; a
    coroutine function is awaited in a new task there.

    If the caller is cancelled, the task on the owner's loop is cancelled once, or the function is not called if it has
    not started. The caller still waits until the function has ended, unless the owner's loop does not run, and then
    raises the cancellation, or the exception that the function raised instead.

    :param owner: owner on whose loop the function is called; None for the running loop.
    :param function: plain function or coroutine function.
    :param args: positional arguments of the function.
    :param kwargs: keyword arguments of the function.
    :returns: the result of the function.
    :raises AffinityError: the loop or thread of the owner has ended, before or during the call; the function may have
        been executed in part.
    :raises RuntimeError: no asyncio event loop is running in this thread, and the caller is not the owner.
    :raises ForkedProcessError: the owner belongs to the process that this one was forked from.
    :raises BrokenResourceError: the owner's loop cancelled the function, as when the loop ends; or the function ended
        that loop with SystemExit or KeyboardInterrupt.
    :raises Exception: whatever the function raised.
    """
    if owner is None or owner.owns():
        if turn := spend(LIGHT):
            await yield_to_loop(turn)
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    awaited, call = _send(owner, functools.partial(function, **kwargs) if kwargs else function, args)
    return await awaited.wait(call.withdraw)


async def run_on_owner_within(limit_s: float, owner: Affinity, function: Callable[[], None]) -> None:
    """Call a plain function on the event loop of another owner, unless that loop does not begin the call in time.

    Unlike `run_on_owner`, this does not wait for a loop that is blocked, perhaps until the caller goes on. The wait
    ends at the limit even if the caller was cancelled before.

    :param limit_s: seconds until the call is given up. The function is not called after that.
    :param owner: owner on whose loop the function is called.
    :param function: function that does not wait for anything: this waits until a call that has begun has ended.
    :raises TimeoutError: the loop did not begin the call within `limit_s`.
    :raises asyncio.CancelledError: the caller was cancelled. The function may have been called.
    :raises AffinityError: as for `run_on_owner`, and so are all other exceptions that it lists.
    """
    begun = threading.Lock()  # acquired only once, by whichever comes first: the call, or giving it up

    def begin() -> None:
        if begun.acquire(blocking=False):
            function()

    def give_up() -> None:
        if begun.acquire(blocking=False):
            awaited.settle(None, TimeoutError(f"{owner!r} did not begin a call within {limit_s} s"))

    awaited, call = _send(owner, begin, ())
    limit = running_loop().call_later(limit_s, give_up)
    try:
        await awaited.wait(call.withdraw)
    finally:
        limit.cancel()


def _send(
    owner: Affinity, function: Callable[..., Any], args: tuple[object, ...]
) -> tuple[CrossLoopFuture[Any], CrossLoopCall[Any]]:
    """Schedule a call on the event loop of an owner, and return the future of its result and the call.

    The future also ends if the owner's loop or thread ends.

    :raises AffinityError: the loop or thread of the owner has ended.
    :raises RuntimeError: no asyncio event loop is running in this thread.
    :raises ForkedProcessError: the owner belongs to the process that this one was forked from.
    """
    if owner.inherited:
        raise ForkedProcessError(repr(owner))
    if owner.loop is None or owner.orphaned:
        raise AffinityError(f"the loop or thread of {owner!r} has ended: nothing can be called there")
    awaited: CrossLoopFuture[Any] = CrossLoopFuture(running_loop())
    call: CrossLoopCall[Any] = CrossLoopCall(function, args, awaited, owner)
    try:
        call.send_to(owner.loop)
    except RuntimeError as error:
        raise AffinityError(f"the event loop of {owner!r} is closed: nothing can be called there") from error
    awaited.watch(functools.partial(_lost, owner, call))
    return awaited, call


def _lost(owner: Affinity, call: CrossLoopCall[object]) -> BaseException | None:
    """Return a new exception for a call that can no longer complete on its owner's loop; None if it still can.

    A loop that is closed drops its callbacks without a notification, so the caller polls with this function.

    :param owner: owner of the loop that the call was sent to.
    :param call: call that the caller waits for.
    :returns: `AffinityError` if the owner's loop or thread has ended, or another loop has taken over the owner's
        objects; `asyncio.CancelledError` if the call was withdrawn and the loop does not run; else None.
    """
    if owner.orphaned or owner.loop is not call.loop:  # or another loop took over the objects of the owner
        return AffinityError(f"the owner {call.loop!r} has ended, and the call that was sent to it is lost")
    if call.is_withdrawn and not call.loop.is_running():
        return asyncio.CancelledError()  # the call will not start; do not wait for a loop that does not run
    return None


publish(__name__)
