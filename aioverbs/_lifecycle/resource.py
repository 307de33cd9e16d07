"""What all resources have in common for their users: opening, closing, owners, statistics."""

import sys
import weakref
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Generic, Self, TypeVar

import anyio.abc

from aioverbs._core.handles.handles import Affinity
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.lifecycle import CLOSED, FAILED, OPEN, Destroyable, Lifecycle, ResourceState, Site
from aioverbs._lifecycle.turns import OPENING, spend, yield_to_loop
from aioverbs.errors import ClosedResourceError, ForkedProcessError

__all__ = [
    "HandleResource", "Resource", "ResourceStatistics", "check_open", "lifecycle_of", "open_now", "open_part",
    "open_part_now", "suppress_warning",
]  # fmt: skip


@dataclass(frozen=True)
class ResourceStatistics:
    """Counts of a resource, at one moment.

    :param children: how many open resources were made from it.
    """

    children: int


def creation_site() -> Site | None:
    """Of the innermost frame that is the user's: its code and instruction, of which `line_of` makes a line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("aioverbs.", "contextlib")):
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None else None


class Resource(anyio.abc.AsyncResource):
    """Base of everything that is opened and closed: devices, domains, queues, regions.

    ``async with`` opens it and closes it; outside of a block `open` and `aclose` do the same. It keeps its parents
    open: closing one of those closes what was made from it, with a `ResourceWarning` for each.
    """

    def __init__(self, *parents: "Resource") -> None:
        for parent in parents:
            if not isinstance(parent, Resource):
                raise TypeError(f"{type(self).__name__} is made from domains, queues and the like, not from {parent!r}")
        self._lifecycle = Lifecycle(type(self).__name__, creation_site(), weakref.ref(self))
        self._parents = parents

    def __repr__(self) -> str:
        label = f" {self._lifecycle.label}" if self._lifecycle.label else ""
        return f"<{type(self).__name__}{label} ({self._lifecycle.state.value})>"

    # ---- What a kind of resource says of itself

    def _owner(self) -> Affinity | None:
        """Who is to own it; called when it is opened."""
        return None

    def _open(self) -> None:
        """Make its handles, each given to ``self._lifecycle.hold`` at once; what fails undoes those."""
        raise NotImplementedError

    def _drop_parents(self) -> None:
        self._parents = ()  # a whole and its parts hold each other: no garbage is left

    # ---- Life

    @property
    def state(self) -> ResourceState:
        """Where it is in its life."""
        return self._lifecycle.state

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is of the process that this one was forked from."""
        lifecycle = self._lifecycle
        if lifecycle.state is OPEN and lifecycle.forks == forks.count:  # as most often: without a further call
            return False
        return lifecycle.state is CLOSED or lifecycle.inherited

    @property
    def owner(self) -> Affinity | None:
        """The event loop and thread that it belongs to; None where anyone may use it."""
        return self._lifecycle.owner

    def statistics(self) -> ResourceStatistics:
        """Its counts as they are now."""
        return ResourceStatistics(len(self._lifecycle.children))

    def _check_open(self) -> None:
        lifecycle = self._lifecycle
        if lifecycle.state is OPEN and lifecycle.forks == forks.count:
            return
        if lifecycle.inherited:
            raise ForkedProcessError(repr(self))
        advice = ": its opening failed, and it can only be closed" if lifecycle.state is FAILED else ""
        raise ClosedResourceError(f"{self!r} is not open{advice}")

    async def open(self) -> Self:
        """Open it; what its block would do at its beginning.

        :raises ClosedResourceError: it was opened before, or one of those that it is made from is closed.
        :raises ForkedProcessError: so it was in the process that this one was forked from.
        """
        if turn := spend(OPENING):
            await yield_to_loop(turn)
        self._open_now()
        return self

    def _open_now(self) -> None:
        # Without an await: a cancellation finds it either unopened or open.
        lifecycle = self._lifecycle
        lifecycle.begin(tuple([parent._lifecycle for parent in self._parents]), self._owner())
        try:
            self._open()
        except BaseException as error:
            try:
                lifecycle.undo()
            except Exception as another:
                error.add_note(f"and undoing what was made failed: {another}; {self!r} is to be closed")
            raise
        lifecycle.opened()

    async def aclose(self) -> None:
        """Close it, and before it what was made from it and is open, each with a `ResourceWarning`.

        Closing twice is fine; who comes second waits for the first. Where this is cancelled, it is closed nevertheless,
        memory as soon as no work request has the use of it; where a verb fails then, too, the cancellation is raised,
        with the error as its context and in a note.
        In the child of a fork nothing is done: it is the parent's.

        :raises BusyResourceError: something that another event loop owns was made from it; nothing was done.
        :raises AffinityError: another event loop owns it; nothing was done.
        :raises ConcurrentAccessError: another thread is inside of its domain; it is still open.
        :raises VerbsError: a verb failed; it is still open, and can be closed again.
        """
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            return
        # What went wrong in the block is what the caller is to hear of.
        try:
            await self.aclose()
        except Exception as another:
            error.add_note(f"and closing {self!r} failed: {type(another).__name__}: {another}")

    def __del__(self) -> None:
        lifecycle = getattr(self, "_lifecycle", None)
        if lifecycle is not None:  # a subclass refused its arguments
            lifecycle.on_user_collected()


R = TypeVar("R", bound=Resource)


def lifecycle_of(resource: Resource) -> Lifecycle:
    """Return the tree node of a resource, for other packages of the library."""
    return resource._lifecycle


def open_now(resource: Resource) -> None:
    """Open what is a user's, without an await, in which others could come in. It raises what `Resource.open` does."""
    resource._open_now()


def check_open(resource: Resource) -> None:
    """See that a resource is open.

    :raises ClosedResourceError: it is not.
    :raises ForkedProcessError: it was opened in the process that this one was forked from.
    """
    resource._check_open()


def suppress_warning(resource: Resource, suppress: bool = True) -> None:
    """Warn no user of a resource that is left open, as the library opened it; with False, warn again."""
    resource._lifecycle.suppress_warning = suppress


async def open_part(part: R, *, keeps_parents: bool = True) -> R:
    """Open what the library makes for itself: no user is warned that it was left open.

    :param keeps_parents: whether the part keeps the objects of its parents, and not only their lives; without that a
        user who forgets the whole is warned while the whole still has the part.
    :raises VerbsError: a verb failed, or another error of its `Resource.open`.
    """
    suppress_warning(part)
    await part.open()
    if not keeps_parents:
        part._drop_parents()
    return part


def open_part_now(part: R, *, keeps_parents: bool = True) -> R:
    """Open what the library makes for itself as `open_part` does, without an await, in which others could come in."""
    suppress_warning(part)
    part._open_now()
    if not keeps_parents:
        part._drop_parents()
    return part


H = TypeVar("H", bound=Destroyable)


class HandleResource(Resource, Generic[H]):
    """A resource that one object of the compiled core stands for."""

    _handle: H | None = None

    @property
    def handle(self) -> H:
        """The verbs object.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._handle is not None
        return self._handle


publish(__name__)
