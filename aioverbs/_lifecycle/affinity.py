"""Who may use an object: thread models, owners, and the way to them."""

import asyncio
import contextlib
import enum
import functools
import inspect
import socket
import sys
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
    "OwnedContext",
    "OwnedIterator",
    "ThreadModel",
    "owner_for",
    "run_on_owner",
    "running_loop",
    "wait_socket_ready",
    "wait_uncancelled",
    "wake",
]

P = ParamSpec("P")
T = TypeVar("T")


class ThreadModel(enum.Enum):
    """How the objects of a resource domain may be used, as documented for resource domains."""

    SAFE = "safe"
    """Any thread may use them at any time; the provider locks.

    Any loop may await them, too. But it is the loop that opened the completion queue that its channel wakes, and that
    tells the others: a ``receive()``, or whatever else is not done at once, ends elsewhere only while that loop runs.
    Where it may stop, or stand still, open the completion queue on the loop that awaits.
    """

    UNSAFE = "unsafe"
    """Any thread may use them, and the callers see to it that their verbs do not overlap. Those that do are refused.

    What is awaited needs the loop that opened the completion queue, as for SAFE.
    """

    SINGLE = "single"
    """One thread uses all of them over their lifetime: that of the event loop that opened the domain."""


def owner_for(model: ThreadModel) -> Affinity | None:
    """Who owns what is made now under a thread model: the running loop, nobody in particular, or anyone (None).

    :raises RuntimeError: SINGLE, and no asyncio event loop is running in this thread.
    """
    match model:
        case ThreadModel.SINGLE:
            return Affinity.of_running_loop()
        case ThreadModel.UNSAFE:
            return Affinity.unbound()
        case ThreadModel.SAFE:
            return None


def running_loop() -> asyncio.AbstractEventLoop:
    """The running asyncio event loop.

    :raises RuntimeError: there is none, as in a trio task.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        trio = sys.modules.get("trio")
        here = "this is a trio task" if trio is not None and trio.lowlevel.in_trio_task() else "none is running here"
        raise RuntimeError(f"aioverbs needs an asyncio event loop, and {here}") from None


async def wait_uncancelled(awaited: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Wait for something whatever cancels who waits, however often; only then raise the cancellation.

    Where what was waited for failed, too, that failure is the cause of the cancellation that is raised.

    :raises RuntimeError: no asyncio event loop is running.
    """
    try:
        future = asyncio.ensure_future(awaited, loop=running_loop())
    except RuntimeError:
        if inspect.iscoroutine(awaited):
            awaited.close()  # or it is warned of as never awaited
        raise
    cancelled: asyncio.CancelledError | None = None
    forks_before = forks.count
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                if forks.count != forks_before:  # the thread that would end it may not be in a child
                    raise
                cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled() and (failure := future.exception()) is not None:
        raise cancelled from failure
    raise cancelled


def wake(waiter: "asyncio.Future[None] | None") -> None:
    """Have whoever waits for a future go on, where there is somebody, and the loop that it waits on is not closed."""
    if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
        waiter.set_result(None)


async def wait_socket_ready(sock: socket.socket, *, writing: bool = False) -> None:
    """Wait until a socket can be read, or written: for one task at a time.

    Not by the loop's own functions for sockets: where a task that waits there is cancelled in the child of a fork, as
    `asyncio.run` does with all, these take the socket from what the kernel watches, which is one set for the child's
    copy of the loop and the parent's.
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
    """Something that belongs to the event loop that begins it.

    Others are refused before anything has changed. A check in the body of a generator comes too late for that: what it
    raises ends the generator.

    :param name: what errors call it.
    :param may_begin: called before it begins; raises where the caller may not begin it.
    """

    def __init__(self, name: str, may_begin: Callable[[], object]) -> None:
        self._name = name
        self._may_begin = may_begin
        self._owner: Affinity | None = None

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def _enter(self, method: str) -> None:
        """Check that the owner calls; the first caller becomes the owner."""
        if self._owner is None:
            self._may_begin()
            self._owner = Affinity.of_running_loop()
        else:
            self._owner.check(self, method)

    def _leave(self, method: str) -> bool:
        """Check that the owner calls, or that it is gone; return False in the child of a fork, where nothing is ended.

        :raises AffinityError: another event loop owns it.
        """
        if self._owner is None:
            self._may_begin()
        elif self._owner.inherited:
            return False
        elif not self._owner.orphaned:
            self._owner.check(self, method)
        return True


class OwnedIterator(_Owned, AsyncGenerator[T, None]):
    """An asynchronous generator that belongs to the event loop that first asks it for an item.

    :param generator: gives the items.
    """

    def __init__(self, name: str, generator: AsyncGenerator[T, None], may_begin: Callable[[], object]) -> None:
        super().__init__(name, may_begin)
        self._generator = generator

    async def asend(self, value: None) -> T:
        """Give the next item.

        :raises AffinityError: another event loop owns it; nothing was done.
        """
        self._enter("__anext__")
        return await self._generator.asend(value)

    async def athrow(self, kind: Any, value: Any = None, traceback: TracebackType | None = None) -> T:
        """Raise an error where it was left.

        :raises AffinityError: another event loop owns it; nothing was done.
        """
        self._enter("athrow")
        error = (kind() if value is None else value) if isinstance(kind, type) else kind
        return await self._generator.athrow(error.with_traceback(traceback) if traceback is not None else error)

    async def aclose(self) -> None:
        """End it. Nothing is done in the child of a fork.

        :raises AffinityError: another event loop owns it; nothing was done.
        """
        if self._leave("aclose"):
            await self._generator.aclose()


class OwnedBlock(_Owned, AbstractAsyncContextManager[T, None], Generic[T]):
    """An ``async with`` block that belongs to the event loop that enters it. One at a time is in it.

    A subclass begins and ends what the block is for.
    """

    def __init__(self, name: str, may_begin: Callable[[], object]) -> None:
        super().__init__(name, may_begin)
        self._is_in_use = False  # from the beginning of entering on
        self._is_entered = False

    async def _begin(self) -> T:
        """Begin, for the loop that enters the block."""
        raise NotImplementedError

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what was begun: for its loop, or for any other one where that is gone."""
        raise NotImplementedError

    async def __aenter__(self) -> T:
        if self._is_in_use:
            self._enter("__aenter__")
            raise RuntimeError(f"{self!r} is in a block already: make another one for each block")
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
            raise RuntimeError(f"{self!r} is in no block: there is nothing to leave")
        self._is_in_use = self._is_entered = False
        await self._end(kind, error, traceback)


class OwnedContext(OwnedBlock[T]):
    """A block of a context manager that looks at no caller, and is entered once.

    :param context: the context manager.
    """

    def __init__(
        self, name: str, context: AbstractAsyncContextManager[T, bool | None], may_begin: Callable[[], object]
    ) -> None:
        super().__init__(name, may_begin)
        self._context = context
        self._was_entered = False  # also where entering failed: a generator begins once

    async def __aenter__(self) -> T:
        if self._was_entered:
            self._enter("__aenter__")
            raise RuntimeError(f"{self!r} is for one block, which was begun: make another one for each block")
        return await super().__aenter__()

    async def _begin(self) -> T:
        self._was_entered = True
        return await self._context.__aenter__()

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, traceback)


class CrossLoopCondition:
    """Wakes, from any thread, who waits on whatever loop for something to become so."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def notify(self) -> None:
        """It may be so now."""
        for loop, event in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(event.set)

    async def wait_while(self, condition: Callable[[], object], *, poll_s: float | None = None) -> None:
        """Wait as long as a condition holds, which is looked at now and at each ring.

        :param poll_s: look as often as that, in seconds, too: what may become so without a ring.
        :raises RuntimeError: it holds now, and no asyncio event loop is running.
        """
        if not condition():
            return
        waiting = running_loop(), asyncio.Event()
        self._waiting.append(waiting)
        try:
            while condition():
                # Whoever rings after this is heard, and what became so before it is seen here.
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
    """Call a function where `owner` is, from any asyncio event loop; what it returns or raises comes back.

    Context variables go with it. A plain function is called between the owner's tasks, a coroutine function is awaited
    in one of its own. Without an owner, or by the owner itself, it is called at once. A cancellation goes there, too,
    once, and is raised here when the function has ended, or what that raised on its way out.

    :raises AffinityError: the owner is gone.
    :raises RuntimeError: it is called from elsewhere than an asyncio event loop.
    :raises ForkedProcessError: the owner is of the process that this one was forked from.
    :raises BrokenResourceError: the owner's loop cancelled the function, as it does when it ends; or the function ended
        that loop, by a SystemExit.
    """
    if owner is None or owner.owns():
        if turn := spend(LIGHT):
            await yield_to_loop(turn)
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    if owner.inherited:
        raise ForkedProcessError(repr(owner))
    if owner.loop is None or owner.orphaned:
        raise AffinityError(f"{owner!r} is gone: nothing can be called there")
    awaited: CrossLoopFuture[object] = CrossLoopFuture(running_loop())
    call = CrossLoopCall(functools.partial(function, **kwargs) if kwargs else function, args, awaited, owner)
    try:
        call.send_to(owner.loop)
    except RuntimeError as error:
        raise AffinityError(f"{owner!r} is gone: nothing can be called there") from error
    awaited.watch(functools.partial(_lost, owner, call))
    return await awaited.wait(call.withdraw)


def _lost(owner: Affinity, call: CrossLoopCall[object]) -> BaseException | None:
    """Why it cannot come back any more: a loop that is closed drops what it was asked to do, and tells nobody."""
    if owner.orphaned or owner.loop is not call.loop:  # somebody may have taken over what the loop owned
        return AffinityError(f"the owner {call.loop!r} is gone, and with it the call that was carried there")
    if call.is_withdrawn and not call.loop.is_running():
        return asyncio.CancelledError()  # it will not begin; a loop that stands still is not waited for
    return None


publish(__name__)
