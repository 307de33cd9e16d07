"""Who may use an object: thread models, owners, and the way to them."""

import asyncio
import contextlib
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

import anyio

from aioverbs._core.engine import Affinity
from aioverbs.errors import AffinityError, BrokenResourceError, ForkedProcessError

__all__ = ["Affinity", "Bell", "ThreadModel", "owner_for", "run_on_owner", "running_loop", "to_the_end"]

P = ParamSpec("P")
T = TypeVar("T")

# How often somebody who waits for another loop looks whether that is still there. A loop that is closed drops what it
# was asked to do, and tells nobody.
_LOOK_S = 0.1


class ThreadModel(enum.Enum):
    """How the objects of a resource domain may be used, as documented for resource domains."""

    SAFE = "safe"
    """Any thread may use them at any time; the provider locks."""

    UNSAFE = "unsafe"
    """Any thread may use them, and the callers see to it that their verbs do not overlap. Those that do are refused."""

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


async def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def to_the_end(awaited: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Wait for something whatever cancels who waits, however often; only then raise the cancellation.

    :raises RuntimeError: no asyncio event loop is running.
    """
    try:
        future = asyncio.ensure_future(awaited, loop=running_loop())
    except RuntimeError:
        if inspect.iscoroutine(awaited):
            awaited.close()  # or it is warned of as never awaited
        raise
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # it was looked at
    raise cancelled


class Bell:
    """Wakes, from any thread, who waits on whatever loop for something to become so."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def ring(self) -> None:
        """It may be so now."""
        for loop, event in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(event.set)

    async def wait_while(self, condition: Callable[[], object]) -> None:
        """Wait as long as a condition holds, which is looked at now and at each ring.

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
                    await waiting[1].wait()
        finally:
            self._waiting.remove(waiting)


class _Errand:
    """A call on its way to another loop and back. What is not said to be of a loop is the caller's."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, object]], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop  # the owner's
        self._caller = running_loop()
        self._back = asyncio.Event()
        self._task: asyncio.Task[object] | None = None  # the owner's, like all but the event from `start` on
        self.result: object = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """On the owner's loop."""
        self._task = self._loop.create_task(self._call())
        self._task.add_done_callback(self._done)  # comes also where it is cancelled before it began

    def withdraw(self) -> None:
        """On the owner's loop, after the start."""
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[object]) -> None:
        if task.cancelled():
            self.error = asyncio.CancelledError()
        else:
            self.error = task.exception()
            self.result = None if self.error is not None else task.result()
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self._caller.call_soon_threadsafe(self._back.set)

    async def wait(self, owner: Affinity) -> None:
        """Until it is back.

        :raises AffinityError: it cannot come any more.
        """
        while not self._back.is_set():
            await self._look()
            if not self._back.is_set() and self._is_lost(owner):
                raise AffinityError(f"the owner {self._loop!r} is gone, and with it the call that was carried there")

    async def wait_withdrawn(self, owner: Affinity) -> None:
        """Until it is back or cannot come, but not for a loop that stands still; whatever cancels who waits."""
        with anyio.CancelScope(shield=True):
            while not self._back.is_set() and self._loop.is_running() and not self._is_lost(owner):
                with contextlib.suppress(asyncio.CancelledError):  # the first is the one that is raised
                    await self._look()

    async def _look(self) -> None:
        with anyio.move_on_after(_LOOK_S):
            await self._back.wait()

    def _is_lost(self, owner: Affinity) -> bool:
        # Somebody may have taken over what the loop owned.
        return owner.orphaned or owner.loop is not self._loop


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

    Context variables go with it. A coroutine function is awaited there. Without an owner, or by the owner itself, it is
    called at once. A cancellation goes there, too, once, and is raised here when the function has ended.

    :raises AffinityError: the owner is gone.
    :raises RuntimeError: it is called from elsewhere than an asyncio event loop.
    :raises ForkedProcessError: the owner is of the process that this one was forked from.
    :raises BrokenResourceError: the owner's loop cancelled the function, as it does when it ends.
    """
    call = functools.partial(_call, function, *args, **kwargs)
    if owner is None or owner.owns():
        return await call()
    if owner.inherited:
        raise ForkedProcessError(repr(owner))
    if owner.loop is None or owner.orphaned:
        raise AffinityError(f"{owner!r} is gone: nothing can be called there")
    loop = owner.loop
    errand = _Errand(call, loop)
    try:
        loop.call_soon_threadsafe(errand.start)
    except RuntimeError as error:
        raise AffinityError(f"{owner!r} is gone: nothing can be called there") from error
    try:
        await errand.wait(owner)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(errand.withdraw)
        await errand.wait_withdrawn(owner)
        raise
    if isinstance(errand.error, asyncio.CancelledError):
        raise BrokenResourceError(f"{owner!r} cancelled what was called there") from errand.error
    if errand.error is not None:
        raise errand.error
    return errand.result
