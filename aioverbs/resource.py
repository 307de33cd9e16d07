"""The life of every resource: what it was made from, who owns it, and how it ends."""

import asyncio
import contextlib
import enum
import itertools
import operator
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import anyio
import anyio.abc

from aioverbs._core.engine import Affinity
from aioverbs.affinity import Bell, to_the_end
from aioverbs.errors import BusyResourceError, ClosedResourceError, ForkedProcessError

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = ["Handled", "Life", "Resource", "ResourceInfo", "ResourceStatistics", "State"]

# Guards children and states of all trees: sections are short, call no verb and wait for nothing. A finalizer may run
# inside of one, and therefore takes it never.
_tree = threading.RLock()  # a user's finalizer may open something all the same
_serials = itertools.count(1)
_forks = 0  # of this process and those that it comes from


def _forked() -> None:
    global _forks, _tree
    _forks += 1
    _tree = threading.RLock()  # who held it is not here


os.register_at_fork(after_in_child=_forked)


class State(enum.Enum):
    """Where a resource is in its life."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"
    """Its opening failed, and so did undoing what was made until then. It has no use; closing it tries that again."""


# Looking one up in the enumeration costs as much as a lock.
_NEW, _OPENING, _OPEN, _CLOSING, _CLOSED, _FAILED = State


class _Destroyable(Protocol):
    def destroy(self) -> None: ...


@dataclass(frozen=True)
class ResourceInfo:
    """A resource in the tree of its device, at one moment."""

    kind: str
    label: str
    owner: str | None
    state: State
    created: str
    children: tuple["ResourceInfo", ...]

    def __str__(self) -> str:
        return "\n".join(self._lines(""))

    def _text(self) -> str:
        parts = [f"{self.kind} {self.label}".rstrip(), self.state.value]
        parts += [f"owner: {self.owner}"] if self.owner else []
        return ", ".join([*parts, f"opened at {self.created}"])

    def _lines(self, indent: str) -> Iterator[str]:
        yield indent + self._text()
        for child in self.children:
            yield from child._lines(indent + "  ")

    def __rich__(self) -> "Tree":
        from rich.tree import Tree

        tree = Tree(self._text(), highlight=True)
        for child in self.children:
            tree.add(child.__rich__())
        return tree


@dataclass(frozen=True)
class ResourceStatistics:
    """Counts of a resource, at one moment.

    :param children: how many open resources were made from it.
    """

    children: int


class Life:
    """What a resource is apart from its user's object: handles, parents, children, owner.

    Parents keep the lives of their children, so that what a user forgets is still known and can be ended.
    """

    __slots__ = (
        "_bell", "_forks", "_handles", "_serial", "_site", "children", "drain", "kind", "label", "late", "owner",
        "parents", "quiet", "state", "stop", "user",
    )  # fmt: skip

    def __init__(self, kind: str, site: "Site | None", user: "weakref.ref[Resource]") -> None:
        self.kind = kind
        self.label = ""
        self.owner: Affinity | None = None
        self.state = _NEW
        self.parents: tuple[Life, ...] = ()
        self.children: dict[int, Life] = {}
        self.stop: Callable[[], None] | None = None  # called first when it is closed
        self.drain: Callable[[], Awaitable[None]] | None = None
        self.late = False  # its siblings' work needs it: it is closed after them
        self.quiet = False  # a part of another resource, or warned of before: nobody left it open
        self.user = user
        self._site = site
        self._serial = next(_serials)
        self._forks = _forks  # when it was opened
        self._handles: list[_Destroyable] = []
        self._bell: Bell | None = None  # its opening or closing is over; made by the first who waits for that

    def __repr__(self) -> str:
        return f"<{self.kind}{f' {self.label}' if self.label else ''} ({self.state.value}), opened at {self.created}>"

    @property
    def created(self) -> str:
        """The line of the user's that made it."""
        return line_of(self._site)

    @property
    def inherited(self) -> bool:
        """Whether it was opened in the process that this one was forked from."""
        return self._forks != _forks and self.state is not _NEW

    # ---- Beginning

    def begin(self, parents: "tuple[Life, ...]", owner: Affinity | None) -> None:
        """Become a child of its parents, which cannot close without it from here on.

        :raises ClosedResourceError: it was open before, or a parent is not open.
        :raises ForkedProcessError: so it was in the process that this one was forked from.
        """
        with _tree:
            if self.state is not _NEW:
                self._check_process()
                raise ClosedResourceError(f"{self!r} cannot be opened again: make a new one")
            for parent in parents:
                parent._check_process()
                if parent.state is not _OPEN and parent.state is not _OPENING:  # this is to be a part of it
                    raise ClosedResourceError(f"{parent!r} is not open: nothing can be made from it")
            for parent in parents:
                parent.children[self._serial] = self
            self.parents, self.owner, self._forks, self.state = parents, owner, _forks, _OPENING

    def _check_process(self) -> None:
        if self.inherited:
            raise ForkedProcessError(repr(self))

    def hold(self, handle: _Destroyable) -> None:
        """Destroy that handle at the end, before those that are held already."""
        self._handles.append(handle)

    def opened(self) -> None:
        """The end of its making."""
        self._settle(_OPEN)

    def undo(self) -> None:
        """Its making failed: it is as it was before. Its parts had no use yet.

        :raises VerbsError: a verb failed; it and its parts have no use any more, and can be closed.
        """
        try:
            for part in reversed(tuple(self.children.values())):
                part.undo()
            self._destroy_handles()
        except BaseException:
            for life in self.subtree():
                life._settle(_FAILED)
            raise
        self._settle(_NEW)

    # ---- Who waits for the end of its opening or closing, which others do

    def _settle(self, state: State) -> None:
        with _tree:
            self.state = state
            if state is _NEW or state is _CLOSED:
                for parent in self.parents:
                    parent.children.pop(self._serial, None)
                self.parents = ()
            bell = self._bell
        if bell is not None:
            bell.ring()

    async def _settled(self) -> None:
        with _tree:  # whoever settles it after this sees the bell
            if self._bell is None:
                self._bell = Bell()
            bell = self._bell
        await bell.wait_while(lambda: self.state in (_OPENING, _CLOSING))

    # ---- Ending

    def _check_can_close(self) -> None:
        # Under the tree's lock. Who is not the owner must not close what another thread may be inside of; where the
        # owner is gone nobody is, and who closes it takes its place.
        if self.owner is not None and not self.owner.orphaned:
            self.owner.check(self, "aclose")
            if not self.children:
                return
        orphans = []
        for life in self.subtree():
            owner = life.owner
            if owner is None or owner.owns():
                continue
            if not owner.orphaned:
                raise BusyResourceError(
                    f"{self!r} cannot be closed here: {life!r} belongs to {owner!r}; close that there first"
                )
            orphans.append(owner)
        for owner in orphans:
            if owner.orphaned:  # it may have come more than once
                owner.take_over()

    def subtree(self) -> "list[Life]":
        """It and all that was made from it, parents before children."""
        lives = [self]
        for life in lives:
            if life.children:
                lives.extend(life.children.values())
        return lives

    async def close(self) -> None:
        """End it: first what was made from it, newest first, each with a warning, then its work, then itself.

        Cancellation ends waiting for its work, never the rest; nor does a warning that is an error. Where a verb fails
        it stays open, and can be closed again. What somebody else is opening or closing is waited for. What was opened
        before a fork is not ended in the child.

        :raises BusyResourceError: another owner's object is made from it; nothing was touched.
        :raises VerbsError: a verb failed.
        """
        interruptions: list[BaseException] = []
        try:
            while not await self._close(interruptions):
                await self._settled()
        except Exception as error:
            for each in interruptions:
                if not isinstance(each, Warning):  # whoever cancelled is to see that, and the error with it
                    each.add_note(f"and closing {self!r} failed: {type(error).__name__}: {error}")
                    raise each  # noqa: B904: the error is its context, and no cause
                error.add_note(f"and a warning was an error: {each}")
            raise
        if interruptions:
            raise min(interruptions, key=lambda each: isinstance(each, Warning))  # a cancellation first

    async def _close(self, interruptions: list[BaseException]) -> bool:
        """Whether it is closed or never was open; if not, somebody else is opening or closing it."""
        before = self._begin_closing()
        if before is None:
            return self.inherited or self.state in (_NEW, _CLOSED)
        try:
            if self.stop is not None:
                try:
                    self.stop()
                except ResourceWarning as raised:  # warnings are errors
                    interruptions.append(raised)
            if self.children:
                await self._close_children(interruptions)
            if self.drain is not None:
                try:
                    await self.drain()
                except anyio.get_cancelled_exc_class() as raised:
                    interruptions.append(raised)
            self._destroy_handles()
        except BaseException:
            self._settle(before)
            raise
        self._settle(_CLOSED)
        user = self.user()
        if user is not None:
            user._parents = ()  # a whole and its parts hold each other: no garbage is left
        return True

    def _begin_closing(self) -> State | None:
        """Its state before, where there is something to close and nobody else is at it."""
        with _tree:
            before = self.state
            if (before is not _OPEN and before is not _FAILED) or self.inherited:
                return None
            self._check_can_close()
            self.state = _CLOSING
            return before

    async def _close_children(self, interruptions: list[BaseException]) -> None:
        children = list(self.children.values())
        children.reverse()
        children.sort(key=_is_late)
        for child in children:
            left_open = not child.quiet and child.state is not _CLOSING
            while not await child._close(interruptions):
                try:
                    await child._settled()
                except anyio.get_cancelled_exc_class() as raised:
                    interruptions.append(raised)
                    await child._settled_at_last(interruptions)
            if left_open and child.state is _CLOSED:
                try:
                    _warn_open(child, f"{self!r} was closed before it")
                except ResourceWarning as raised:  # warnings are errors
                    interruptions.append(raised)

    async def _settled_at_last(self, interruptions: list[BaseException]) -> None:
        try:
            await to_the_end(self._settled())
        except asyncio.CancelledError as raised:
            interruptions.append(raised)

    def _destroy_handles(self) -> None:
        while self._handles:
            self._handles[-1].destroy()
            self._handles.pop()

    # ---- Looking

    def find(self, handle: object) -> "Resource | None":
        """The user's object that stands for a handle, among it and what was made from it; None if it was forgotten."""
        for life in self.subtree():
            if any(held is handle for held in life._handles):
                return life.user()
        return None

    def info(self) -> ResourceInfo:
        """It and what was made from it, as they are now; what was made from several is with the first of them."""
        children = tuple(child.info() for child in tuple(self.children.values()) if child.parents[:1] == (self,))
        owner = repr(self.owner) if self.owner is not None else None
        return ResourceInfo(self.kind, self.label, owner, self.state, self.created, children)


_is_late = operator.attrgetter("late")


def _warn_open(life: Life, why: str) -> None:
    warnings.warn(f"{life!r} was still open: {why}", ResourceWarning, stacklevel=2, source=life)


Site = tuple[CodeType, int]


def creation_site() -> Site | None:
    """Of the innermost frame that is the user's: its code and instruction, of which `line_of` makes a line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("aioverbs.", "contextlib")):
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None else None


def line_of(site: Site | None) -> str:
    """Its file and line."""
    if site is None:
        return "?"
    code, instruction = site
    line, *_ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return f"{code.co_filename}:{line}"


class Resource(anyio.abc.AsyncResource):
    """Base of everything that is opened and closed: devices, domains, queues, regions.

    ``async with`` opens it and closes it; outside of a block `open` and `aclose` do the same. It keeps its parents
    open: closing one of those closes what was made from it, with a `ResourceWarning` for each.
    """

    def __init__(self, *parents: "Resource") -> None:
        self._life = Life(type(self).__name__, creation_site(), weakref.ref(self))
        self._parents = parents

    def __repr__(self) -> str:
        label = f" {self._life.label}" if self._life.label else ""
        return f"<{type(self).__name__}{label} ({self._life.state.value})>"

    # ---- What a kind of resource says of itself

    def _owner(self) -> Affinity | None:
        """Who is to own it; called when it is opened."""
        return None

    def _open(self) -> None:
        """Make its handles, each given to ``self._life.hold`` at once; what fails undoes those."""
        raise NotImplementedError

    # ---- Life

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._life.state

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is of the process that this one was forked from."""
        return self._life.state is _CLOSED or self._life.inherited

    @property
    def owner(self) -> Affinity | None:
        """The event loop and thread that it belongs to; None where anyone may use it."""
        return self._life.owner

    def statistics(self) -> ResourceStatistics:
        """Its counts as they are now."""
        return ResourceStatistics(len(self._life.children))

    def _check_open(self) -> None:
        if self._life.inherited:
            raise ForkedProcessError(repr(self))
        if self._life.state is not _OPEN:
            advice = ": its opening failed, and it can only be closed" if self._life.state is _FAILED else ""
            raise ClosedResourceError(f"{self!r} is not open{advice}")

    async def open(self) -> Self:
        """Open it; what its block would do at its beginning.

        :raises ClosedResourceError: it was opened before, or one of those that it is made from is closed.
        :raises ForkedProcessError: so it was in the process that this one was forked from.
        """
        self._open_now()
        return self

    def _open_now(self) -> None:
        # Without an await: a cancellation finds it either unopened or open.
        life = self._life
        life.begin(tuple([parent._life for parent in self._parents]), self._owner())
        try:
            self._open()
        except BaseException as error:
            try:
                life.undo()
            except Exception as another:
                error.add_note(f"and undoing what was made failed: {another}; {self!r} is to be closed")
            raise
        life.opened()

    async def aclose(self) -> None:
        """Close it, and before it what was made from it and is open, each with a `ResourceWarning`.

        Closing twice is fine; who comes second waits for the first. Where this is cancelled, it is closed nevertheless;
        where a verb fails then, too, the cancellation is raised, with the error as its context and in a note.
        In the child of a fork nothing is done: it is the parent's.

        :raises BusyResourceError: something that another event loop owns was made from it; nothing was done.
        :raises AffinityError: another event loop owns it; nothing was done.
        :raises ConcurrentAccessError: another thread is inside of its domain; it is still open.
        :raises VerbsError: a verb failed; it is still open, and can be closed again.
        """
        await self._life.close()

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
        life = getattr(self, "_life", None)
        if life is None or life.state not in (_OPEN, _FAILED) or life.quiet or life.inherited:
            return
        life.quiet = True
        # Verbs are the owner's to call. Where there is none, or it is gone, the parents' end is also this one's.
        owner = life.owner
        if owner is not None and owner.loop is not None and not owner.orphaned:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                owner.loop.call_soon_threadsafe(_close_on_owner, owner.loop, life)
        _warn_open(life, "it was forgotten")


H = TypeVar("H", bound=_Destroyable)


class Handled(Resource, Generic[H]):
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


_closing: set[asyncio.Task[None]] = set()  # loops keep weak references only


def _close_on_owner(loop: asyncio.AbstractEventLoop, life: Life) -> None:
    task = loop.create_task(life.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
