"""Base classes of all resources: opening, closing, owner and statistics."""

import inspect
import sys
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Generic, Self, TypeVar

import anyio.abc

from aioverbs._core.handles.handles import Affinity
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.lifecycle import CLOSED, FAILED, OPEN, Destroyable, Lifecycle, ResourceState, Site
from aioverbs._lifecycle.turns import OPENING, spend, yield_to_loop
from aioverbs.errors import ClosedResourceError, ForkedProcessError

__all__ = [
    "HandleResource", "Resource", "ResourceStatistics", "check_open", "close_after_error", "lifecycle_of",
    "loop_callback", "open_now", "open_part", "open_part_now", "suppress_warning",
]  # fmt: skip


@dataclass(frozen=True)
class ResourceStatistics:
    """Counts of a resource at one moment. `Resource.statistics` returns one.

    :param children: number of open resources that were made from this one.
    """

    children: int


_NOT_THE_USERS = ("aioverbs.", "anyio.")
_BELOW_THE_USERS = ("asyncio.", "concurrent.futures.")

_loop_callbacks: set[CodeType] = set()

_Callback = TypeVar("_Callback", bound=Callable[..., object])


def loop_callback(function: _Callback) -> _Callback:
    """Mark a function of the library that event loops call, and that opens resources: no code of the user opened them.

    The stack does not show the functions of loops that are not written in Python, such as uvloop: it seems as if the
    code which runs the loop had called the function.
    """
    assert isinstance(function, FunctionType)
    _loop_callbacks.add(function.__code__)
    return function


def creation_site() -> Site | None:
    """Return the place in the user's code that called the library. `format_site` formats the place as text.

    :returns: place of the innermost frame outside of the library and of the modules through which users call it; None
        if there is no such frame, because an event loop or a thread runs a function of the library.
    """
    frame: FrameType | None = sys._getframe(2)
    inner: FrameType | None = None
    while frame is not None:
        if frame.f_code in _loop_callbacks:
            return None
        module = str(frame.f_globals.get("__name__", ""))  # any object, if the code was executed by exec()
        if not module.startswith(_NOT_THE_USERS) and module != "contextlib":
            is_below = module.startswith(_BELOW_THE_USERS) or module == "threading" or _runs_loop(frame, inner)
            return None if is_below else (frame.f_code, frame.f_lasti, module)
        inner, frame = frame, frame.f_back
    return None


def _runs_loop(frame: FrameType, inner: FrameType | None) -> bool:
    """Return whether a frame of the user called an event loop, which called an inner frame of the library.

    The stack does not show the functions of loops that are not written in Python, such as uvloop. But only a loop calls
    a coroutine from a function that cannot await it.

    :param inner: frame of the library that `frame` seems to have called; None if that one is left out of the stack.
    """
    return (
        inner is not None
        and bool(inner.f_code.co_flags & inspect.CO_COROUTINE)
        and not frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
    )


class Resource(anyio.abc.AsyncResource):
    """Base class of everything that is opened and closed: devices, domains, queues, regions.

    ``async with`` opens the resource and closes it at the end of the block; outside of a block, `open` and `aclose` do
    the same. If the block raises an exception and closing fails as well, the second exception becomes a note on the
    first one. A resource references its parents, so that they are not garbage-collected before it. Closing a parent
    closes all resources that were made from it, with a `ResourceWarning` for each one that is still open. An open
    resource that is garbage-collected is closed in the background, or together with its parents, with a
    `ResourceWarning` as well.

    :param parents: resources that this one is made from.
    :raises TypeError: a parent is not a `Resource`.
    """

    def __init__(self, *parents: "Resource") -> None:
        for parent in parents:
            if not isinstance(parent, Resource):
                raise TypeError(
                    f"{type(self).__name__} is made from other resources, such as a domain, not from {parent!r}"
                )
        is_part = bool(parents) and parents[0].state is ResourceState.OPENING  # made while the parent is being opened
        site = None if is_part else creation_site()
        self._lifecycle = Lifecycle(type(self).__name__, site, weakref.ref(self))
        if parents and site is None:  # if it is no part: a task of the library makes it, such as that of a server
            self._lifecycle.inherit_site(parents[0]._lifecycle)
        self._parents = parents

    def __repr__(self) -> str:
        label = f" {self._lifecycle.label}" if self._lifecycle.label else ""
        return f"<{type(self).__name__}{label} ({self._lifecycle.state.value})>"

    # ---- Hooks for subclasses

    def _owner(self) -> Affinity | None:
        """Return the owner for the resource that is being opened; None if any loop may use the resource.

        Subclasses override this, and may raise `RuntimeError` if no asyncio event loop is running.
        """
        return None

    def _open(self) -> None:
        """Create the handles, and pass each one to ``self._lifecycle.hold`` as soon as it exists.

        Subclasses implement this. If this raises, for example `VerbsError`, the caller destroys the handles that have
        been passed, and raises the exception unchanged.
        """
        raise NotImplementedError

    def _drop_parents(self) -> None:
        """Drop the references to the parents. This is called after the resource has been closed."""
        self._parents = ()  # a resource and its parts may reference each other: break the cycle

    # ---- Opening, closing and state

    @property
    def state(self) -> ResourceState:
        """Current state of the resource."""
        return self._lifecycle.state

    @property
    def closed(self) -> bool:
        """True if the resource was closed, or was opened in the process that this one was forked from.

        False before the resource is opened.
        """
        lifecycle = self._lifecycle
        if lifecycle.state is OPEN and lifecycle.forks == forks.count:  # the most frequent case: avoid a further call
            return False
        return lifecycle.state is CLOSED or lifecycle.inherited

    @property
    def owner(self) -> Affinity | None:
        """Event loop and thread that the resource belongs to; None if any loop may use it, or before it is opened."""
        return self._lifecycle.owner

    def statistics(self) -> ResourceStatistics:
        """Return the current number of open resources that were made from this one, as a `ResourceStatistics`.

        Subclasses return a subclass of `ResourceStatistics` with further counts.
        """
        return ResourceStatistics(len(self._lifecycle.children))

    def _check_open(self) -> None:
        """Check that the resource is open.

        :raises ClosedResourceError: the resource is not open.
        :raises ForkedProcessError: the resource was opened in the process that this one was forked from.
        """
        lifecycle = self._lifecycle
        if lifecycle.state is OPEN and lifecycle.forks == forks.count:
            return
        if lifecycle.inherited:
            raise ForkedProcessError(repr(self))
        advice = ": its opening failed, and it can only be closed" if lifecycle.state is FAILED else ""
        raise ClosedResourceError(f"{self!r} is not open{advice}")

    async def open(self) -> Self:
        """Open the resource, as ``async with`` does. The caller must close it with `aclose`.

        If this fails or is cancelled, the resource stays unopened. If the handles created by then cannot be destroyed,
        the state is FAILED instead, the resource can only be closed, and a note on the exception says so.

        :returns: the resource itself.
        :raises ClosedResourceError: the resource was opened before, or a resource that it is made from is not open.
        :raises ForkedProcessError: the resource, or one that it is made from, was opened in the process that this one
            was forked from.
        :raises AffinityError: another event loop owns a resource that this one is made from.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain.
        :raises VerbsError: a verb failed.
        :raises RuntimeError: the resource needs an asyncio event loop, and none is running.
        :raises Exception: whatever an allocator of the user raised.
        """
        if turn := spend(OPENING):
            await yield_to_loop(turn)
        self._open_now()
        return self

    def _open_now(self) -> None:
        """Open the resource without an await. This raises the same exceptions as `open`, with the same effects."""
        # There is no await in here, so a cancellation finds the resource either unopened or open.
        lifecycle = self._lifecycle
        lifecycle.begin(tuple([parent._lifecycle for parent in self._parents]), self._owner())
        try:
            self._open()
        except BaseException as error:
            try:
                lifecycle.undo()
            except Exception as another:
                error.add_note(f"and destroying the handles made so far failed: {another}; close {self!r}")
            raise
        lifecycle.opened()

    async def aclose(self) -> None:
        """Close the resource, after closing all open resources that were made from it.

        A `ResourceWarning` is issued for each of those that the user left open. Closing a resource that is closed or
        was never opened does nothing. If another task is opening or closing the resource, wait until that task has
        finished, and close the resource if it is still open.

        If this is cancelled, the resource is still closed; memory is deregistered as soon as no work request uses it.
        If a verb fails as well, the resource stays open, and the cancellation is raised, with the exception of the verb
        as its context and in a note.

        In a forked child, nothing is done, because the parent process still uses the resource.

        :raises BusyResourceError: another event loop, which has not ended, owns a resource that was made from this one;
            in this case nothing is done. Also raised if receives are posted in memory that would be deregistered, or
            another object still uses the resource, as a bound memory window uses its region; the resource then stays
            open.
        :raises AffinityError: another event loop, which has not ended, owns the resource. In this case nothing is done.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain. The resource stays open.
        :raises VerbsError: a verb failed. The resource stays open and can be closed again; resources made from it that
            were closed before the failure stay closed.
        :raises ResourceWarning: if warnings are turned into errors and a warning was issued. The resource is closed.
        :raises RuntimeError: no asyncio event loop is running here, and another task is opening or closing the
            resource, work requests are in flight, or the owner of the resource, or of one made from it, has ended. This
            call then does not close the resource.
        :raises Exception: whatever an allocator of the user raised. The resource stays open.
        """
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            await close_after_error(error, self.aclose(), self)

    def __del__(self) -> None:
        lifecycle = getattr(self, "_lifecycle", None)
        if lifecycle is not None:  # None if the constructor of a subclass raised before this one was called
            lifecycle.on_user_collected()


async def close_after_error(error: BaseException, closing: Awaitable[object], what: object) -> None:
    """Close something after an exception, which the caller raises. If closing fails as well, add that as a note.

    :param error: first exception.
    :param closing: awaitable that closes something; a `BaseException` that is not an `Exception` is raised unchanged.
    :param what: object or description of what is closed, for the note.
    """
    try:
        await closing
    except Exception as another:
        error.add_note(f"and closing {what} failed: {type(another).__name__}: {another}")


R = TypeVar("R", bound=Resource)


def lifecycle_of(resource: Resource) -> Lifecycle:
    """Return the node of a resource in the resource tree. For use by other packages in the library."""
    return resource._lifecycle


def open_now(resource: Resource) -> None:
    """Open a resource of the user without an await, so that no other task runs meanwhile.

    This raises the same exceptions as `Resource.open`, with the same effects.
    """
    resource._open_now()


def check_open(resource: Resource) -> None:
    """Check that a resource is open.

    :raises ClosedResourceError: the resource is not open.
    :raises ForkedProcessError: the resource was opened in the process that this one was forked from.
    """
    resource._check_open()


def suppress_warning(resource: Resource, suppress: bool = True) -> None:
    """Turn off the warning about a resource that is left open, because the library and not the user opened it.

    :param resource: resource, open or not.
    :param suppress: False to turn the warning on again.
    """
    resource._lifecycle.suppress_warning = suppress


async def open_part(part: R, *, keeps_parents: bool = True) -> R:
    """Open a resource that the library makes for itself. No warning is issued if the resource is left open.

    :param part: unopened resource that is a part of another one.
    :param keeps_parents: True if the part is to keep references to its parents. If False, only the resource tree
        connects them, and the object of a parent can be garbage-collected, with a warning, while the part is open.
    :returns: the part.
    :raises VerbsError: a verb failed. The part stays unopened. The other exceptions that `Resource.open` lists are
        raised as well.
    """
    suppress_warning(part)
    await part.open()
    if not keeps_parents:
        part._drop_parents()
    return part


def open_part_now(part: R, *, keeps_parents: bool = True) -> R:
    """Open a part as `open_part` does, but without an await, so that no other task runs meanwhile.

    :param part: unopened resource that is a part of another one.
    :param keeps_parents: True if the part is to keep references to its parents, as for `open_part`.
    :returns: the part.
    :raises VerbsError: a verb failed. The part stays unopened. The other exceptions that `Resource.open` lists are
        raised as well.
    """
    suppress_warning(part)
    part._open_now()
    if not keeps_parents:
        part._drop_parents()
    return part


H = TypeVar("H", bound=Destroyable)


class HandleResource(Resource, Generic[H]):
    """Resource that wraps one handle of the compiled core."""

    _handle: H | None = None

    @property
    def handle(self) -> H:
        """Handle in the compiled core that wraps the verbs object. The handle's ``verbs_pointer`` is the address of the
        verbs object.

        :raises ClosedResourceError: the resource is not open.
        :raises ForkedProcessError: the resource was opened in the process that this one was forked from.
        """
        self._check_open()
        assert self._handle is not None
        return self._handle


publish(__name__)
