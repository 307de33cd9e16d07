"""What a resource is apart from its user's object: where it stands in the tree, its handles, and how it ends."""

import asyncio
import contextlib
import enum
import functools
import itertools
import operator
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from aioverbs._core.handles.handles import Affinity
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import CrossLoopCondition, wait_uncancelled
from aioverbs.errors import BusyResourceError, ClosedResourceError, ConcurrentAccessError, ForkedProcessError

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = [
    "CLOSED",
    "FAILED",
    "OPEN",
    "Destroyable",
    "Lifecycle",
    "ResourceInfo",
    "ResourceState",
    "Site",
    "format_site",
    "reap",
]

# How often closing a part is tried again that met another thread inside of its domain, in as many turns of the loop.
_CLOSE_ATTEMPTS = 1000
# Guards children and states of all trees: sections are short, call no verb and wait for nothing. A finalizer may run
# inside of one, and therefore takes it never.
_tree = threading.RLock()  # a user's finalizer may open something all the same
_serials = itertools.count(1)


def _renew_tree_lock() -> None:
    global _tree
    _tree = threading.RLock()  # who held it is not here


os.register_at_fork(after_in_child=_renew_tree_lock)


class ResourceState(enum.Enum):
    """Where a resource is in its life."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"
    """Its opening failed, and so did undoing what was made until then. It has no use; closing it tries that again."""


# Looking one up in the enumeration costs as much as a lock.
NEW, OPENING, OPEN, CLOSING, CLOSED, FAILED = ResourceState


class Destroyable(Protocol):
    """A handle, and whatever else a resource is to give back."""

    def destroy(self) -> None:
        """Give it back, once."""


class User(Protocol):
    """A user's object."""

    def _drop_parents(self) -> None:
        """It is closed, and needs its parents no more."""


@dataclass(frozen=True)
class ResourceInfo:
    """A resource in the tree of its device, at one moment."""

    kind: str
    label: str
    owner: str | None
    state: ResourceState
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
        from rich.highlighter import ReprHighlighter
        from rich.tree import Tree

        tree = Tree(ReprHighlighter()(self._text()))  # not markup: a peer's words may be in it
        for child in self.children:
            tree.add(child.__rich__())
        return tree


_is_closed_last = operator.attrgetter("close_last")


# How often who waits for another loop to close something looks whether that loop is still there: its end tells nobody.
_POLL_S = 0.1

Site = tuple[CodeType, int]


def format_site(site: Site | None) -> str:
    """The file and line of a piece of code and an instruction in it."""
    if site is None:
        return "?"
    code, instruction = site
    line, *_ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return f"{code.co_filename}:{line}"


class _Closing:
    """A closing of a resource: what it was before, whose loop and thread do it, and what goes on there.

    The tree's lock guards which one a resource has. Who closes goes on only where it is still the resource's: it may
    have been taken back.
    """

    __slots__ = ("_task", "background", "before", "closer", "work")

    def __init__(self, before: ResourceState) -> None:
        self.before = before
        loop = asyncio._get_running_loop()  # None: another library's, which refuses to wait
        self.closer = Affinity.of_running_loop() if loop is not None else None
        task = asyncio.current_task(loop) if loop is not None else None
        self._task = weakref.ref(task) if task is not None else None  # a user's, which has more than this
        self.work: Coroutine[Any, Any, None] | None = None
        self.background: asyncio.Task[None] | None = None  # who closed it was cancelled: what does that now

    @property
    def is_deserted(self) -> bool:
        """Whether it does not go on: its loop was closed in the middle of it, or the thread of that has ended."""
        return (
            self.closer is not None
            and self.closer.orphaned
            and not (self.closer.loop and self.closer.loop.is_running())
        )

    @property
    def may_never_end(self) -> bool:
        """Whether it may take for ever: a task does it that it was left to, or another loop, which need not run."""
        return self.background is not None or (self.closer is not None and not self.closer.owns())

    def stop_work(self) -> None:
        """End what does not go on. Nobody is inside of it: its loop does not run."""
        if self.background is not None:
            _background_tasks.discard(self.background)
        if self.work is not None:
            # What the work waited for may be all that holds the task, whose end in the middle of this would end it.
            task = self._task() if self._task is not None else None
            with contextlib.suppress(RuntimeError):  # of a cancel scope, which only its own task may leave
                self.work.close()
            del task


class Lifecycle:
    """What a resource is apart from its user's object: handles, parents, children, owner.

    Parents keep the lives of their children, so that what a user forgets is still known and can be ended.
    """

    __slots__ = (
        "_closing",
        "_condition",
        "_handles",
        "_site",
        "children",
        "close_last",
        "drain",
        "forks",
        "kind",
        "label",
        "must_drain",
        "opener",
        "owner",
        "parents",
        "resume",
        "serial",
        "state",
        "stop",
        "suppress_warning",
        "user",
    )  # fmt: skip

    def __init__(self, kind: str, site: Site | None, user: "weakref.ref[User]") -> None:
        self.kind = kind
        self.label = ""
        self.owner: Affinity | None = None
        self.state = NEW
        self.parents: tuple[Lifecycle, ...] = ()
        self.children: dict[int, Lifecycle] = {}
        self.stop: Callable[[], None] | None = None  # called first when it is closed
        self.drain: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.resume: Callable[[], None] | None = None  # its closing failed: `drain` is taken back
        self.close_last = False  # its siblings' work needs it: it is closed after them
        self.must_drain = False  # it is not destroyed before `drain` is done, whoever is cancelled: it may be under DMA
        self._closing: _Closing | None = None  # as long as it is CLOSING
        self.opener: asyncio.AbstractEventLoop | None = None  # closes it where it is forgotten and has no parents
        self.suppress_warning = False  # a part of another resource, or warned of before: nobody left it open
        self.user = user
        self._site = site
        self.serial = next(_serials)
        self.forks = forks.count  # when it was opened
        self._handles: list[Destroyable] = []
        self._condition: CrossLoopCondition | None = None  # made by the first who waits

    def __repr__(self) -> str:
        return f"<{self.kind}{f' {self.label}' if self.label else ''} ({self.state.value}), opened at {self.created}>"

    @property
    def created(self) -> str:
        """The line of the user's that made it."""
        return format_site(self._site)

    def inherit_site(self, other: "Lifecycle") -> None:
        """Nobody's line made it, but that of another one did."""
        self._site = other._site

    @property
    def inherited(self) -> bool:
        """Whether it was opened in the process that this one was forked from."""
        return self.forks != forks.count and self.state is not NEW

    # ---- Beginning

    def begin(self, parents: "tuple[Lifecycle, ...]", owner: Affinity | None) -> None:
        """Become a child of its parents, which cannot close without it from here on.

        :raises ClosedResourceError: it was open before, or a parent is not open.
        :raises ForkedProcessError: so it was in the process that this one was forked from.
        """
        with _tree:
            if self.state is not NEW:
                self._check_process()
                raise ClosedResourceError(f"{self!r} cannot be opened again: make a new one")
            for parent in parents:
                parent._check_process()
                if parent.state is not OPEN and parent.state is not OPENING:  # this is to be a part of it
                    raise ClosedResourceError(f"{parent!r} is not open: nothing can be made from it")
            for parent in parents:
                parent.children[self.serial] = self
            self.parents, self.owner, self.forks, self.state = parents, owner, forks.count, OPENING

    def _check_process(self) -> None:
        if self.inherited:
            raise ForkedProcessError(repr(self))

    def hold(self, handle: Destroyable) -> None:
        """Destroy that handle at the end, before those that are held already."""
        self._handles.append(handle)

    def hold_below(self, handle: Destroyable) -> None:
        """Destroy that handle at the end, after those that are held already."""
        self._handles.insert(0, handle)

    def attach(self, handle: Destroyable) -> None:
        """Destroy something at the end, before what is held, that is not made from it, and may `detach` itself before.

        :raises ClosedResourceError: it is not open.
        :raises ForkedProcessError: so it was in the process that this one was forked from.
        """
        with _tree:  # whoever begins to close it after this finds that
            self._check_process()
            if self.state is not OPEN:
                raise ClosedResourceError(f"{self!r} is not open")
            self._handles.append(handle)

    def detach(self, handle: Destroyable) -> None:
        """Do not, where it is not being done."""
        with _tree:
            if self.state is OPEN and handle in self._handles:
                self._handles.remove(handle)

    def opened(self) -> None:
        """The end of its making."""
        self._settle(OPEN)

    def undo(self) -> None:
        """Its making failed: it is as it was before. Its parts had no use yet.

        :raises VerbsError: a verb failed; it and its parts have no use any more, and can be closed.
        """
        try:
            for part in reversed(tuple(self.children.values())):
                part.undo()
            self._destroy_handles()
        except BaseException:
            for lifecycle in self.subtree():
                lifecycle._settle(FAILED)
            raise
        self._settle(NEW)

    # ---- Who waits for the end of its opening or closing, which others do

    def _settle(self, state: ResourceState) -> None:
        with _tree:
            self.state = state
            if state is NEW or state is CLOSED:
                for parent in self.parents:
                    parent.children.pop(self.serial, None)
                self.parents = ()
            condition = self._condition
        if condition is not None:
            condition.notify()

    def condition(self) -> CrossLoopCondition:
        """What rings when its opening or closing is over."""
        with _tree:  # whoever settles it after this sees the bell
            if self._condition is None:
                self._condition = CrossLoopCondition()
            return self._condition

    async def wait_settled(self) -> None:
        """Until nobody opens or closes it; a closing whose loop is gone is taken back."""
        await self.condition().wait_while(self._is_changing, poll_s=_POLL_S)

    def _is_changing(self) -> bool:
        self._abort_deserted_closing()
        return self.state is OPENING or self.state is CLOSING

    # ---- Ending

    def check_owner(self, verb: str) -> None:
        """Check that the owner calls, or that it is gone: then who comes first takes its place.

        :raises AffinityError: the owner is another loop.
        :raises ConcurrentAccessError: a verb is under way.
        """
        if self.owner is not None and not self.owner.orphaned:
            self.owner.check(self, verb)

    def _check_can_close(self) -> None:
        # Under the tree's lock. Who is not the owner must not close what another thread may be inside of; where the
        # owner is gone nobody is, and who closes it takes its place.
        if self.owner is not None and not self.owner.orphaned:
            self.owner.check(self, "aclose")
            if not self.children:
                return
        foreign = self._foreign_parts()
        for lifecycle, owner in foreign:
            if not owner.orphaned:
                raise BusyResourceError(
                    f"{self!r} cannot be closed here: {lifecycle!r} belongs to {owner!r}; close that there first"
                )
        for _, owner in foreign:
            if owner.orphaned:  # it may have come more than once
                owner.take_over()

    def _foreign_parts(self) -> "list[tuple[Lifecycle, Affinity]]":
        """Return the parts of its subtree that others own, with their owners. Call under the tree's lock."""
        owned = ((lifecycle, lifecycle.owner) for lifecycle in self.subtree())
        return [(lifecycle, owner) for lifecycle, owner in owned if owner is not None and not owner.owns()]

    def has_foreign_parts(self) -> bool:
        """Return whether another owner, which is not gone, has to close a part of it first."""
        with _tree:
            return any(not owner.orphaned for _, owner in self._foreign_parts())

    def subtree(self) -> "list[Lifecycle]":
        """It and all that was made from it, parents before children."""
        lives = [self]
        for lifecycle in lives:
            if lifecycle.children:
                lives.extend(lifecycle.children.values())
        return lives

    async def close(self) -> None:
        """End it: first what was made from it, newest first, each with a warning, then its work, then itself.

        Cancellation ends waiting for its work, never the rest; nor does a warning that is an error. But where that is
        work with memory, or another loop's closing, the rest is left to a task, which ends it after that. Where a verb
        fails it stays open, and can be closed again. What somebody else is opening or closing is waited for; where that
        one's loop is gone in the middle of it, this goes on with it. What was opened before a fork is not ended in the
        child.

        :raises BusyResourceError: another owner's object is made from it; nothing was touched.
        :raises VerbsError: a verb failed.
        """
        interruptions: list[BaseException] = []
        try:
            while not await self._close(interruptions):
                await self.wait_settled()
        except Exception as error:
            for each in interruptions:
                if not isinstance(each, Warning):  # who cancelled is to see that; the error is no cause
                    each.add_note(f"and closing {self!r} failed: {type(error).__name__}: {error}")
                    raise each  # noqa: B904
                error.add_note(f"and a warning was an error: {each}")
            raise
        if interruptions:
            raise min(interruptions, key=lambda each: isinstance(each, Warning))  # a cancellation first

    def close_later(self) -> None:
        """Begin to end it, and leave the rest to a task of the running loop.

        :raises BusyResourceError: another owner's object is made from it; nothing was touched.
        """
        closing = self._begin_closing()
        if closing is None:
            return
        try:
            if self.stop is not None:
                self.stop()
        finally:  # a warning that is an error does not keep it open
            self._finish_in_background(closing)

    async def _close(self, interruptions: list[BaseException], in_task: bool = False) -> bool:
        """Whether it is closed or never was open; if not, somebody else is opening or closing it.

        :param in_task: who awaits it is what others left it to: it stays open where that is cancelled.
        """
        closing = self._begin_closing()
        if closing is None:
            return self.inherited or self.state in (NEW, CLOSED)
        try:
            if self.stop is not None:
                try:
                    self.stop()
                except ResourceWarning as raised:  # warnings are errors
                    interruptions.append(raised)
            closing.work = self._finish(interruptions, in_task)
            await closing.work
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and not in_task:
                self._finish_in_background(closing)
            else:
                self._abort_closing(closing)
            raise
        self._closed()
        return True

    async def _finish(self, interruptions: list[BaseException], in_task: bool) -> None:
        # A cancellation that is raised here came while memory was in use, its own or a child's.
        if self.children:
            await self._close_children(interruptions, in_task)
        if self.drain is not None:
            try:
                await self.drain()
            except anyio.get_cancelled_exc_class() as raised:
                if self.must_drain:
                    raise
                interruptions.append(raised)
                if raised.__cause__ is not None:  # of `wait_uncancelled`: it is not drained, and stays open
                    raise raised.__cause__  # noqa: B904
        self._destroy_handles()

    def _abort_closing(self, closing: _Closing) -> None:
        """Its closing failed, or was given up; nothing where it was taken back before."""
        with _tree:
            if self._closing is not closing:
                return
            self._closing = None
        self._reopen(closing)

    def _abort_deserted_closing(self) -> None:
        """Where it is being closed by a loop that is gone, it is as it was before that. Of several one does this."""
        with _tree:
            closing = self._closing
            if closing is None or not closing.is_deserted:
                return
            self._closing = None
        # It is CLOSING until this is over: nobody else closes it before the work has ended, whose end finds that it is
        # not the resource's any more.
        closing.stop_work()
        self._reopen(closing)

    def _reopen(self, closing: _Closing) -> None:
        if self.resume is not None:
            self.resume()
        self._settle(closing.before)

    def _closed(self) -> None:
        self._closing = None
        self._settle(CLOSED)
        user = self.user()
        if user is not None:
            user._drop_parents()

    def _finish_in_background(self, closing: _Closing) -> None:
        """Leave its closing to a task, which is cancelled only at the end of the loop; it stays open then."""
        closing.work = self._finish_in_task(closing)
        closing.background = task = asyncio.get_running_loop().create_task(closing.work)
        _background_tasks.add(task)
        task.add_done_callback(functools.partial(_on_background_end, self, closing))

    async def _finish_in_task(self, closing: _Closing) -> None:
        try:
            await self._finish([], True)
        except BaseException:
            self._abort_closing(closing)
            raise
        self._closed()

    def _begin_closing(self) -> _Closing | None:
        """What closes it from here on, where there is something to close and nobody else is at it."""
        self._abort_deserted_closing()
        with _tree:
            before = self.state
            if (before is not OPEN and before is not FAILED) or self.inherited:
                return None
            self._check_can_close()
            closing = _Closing(before)
            self.state, self._closing = CLOSING, closing
            return closing

    async def _close_children(self, interruptions: list[BaseException], in_task: bool) -> None:
        children = list(self.children.values())
        children.reverse()
        children.sort(key=_is_closed_last)
        for child in children:
            left_open = not child.suppress_warning and child.state is not CLOSING
            try:
                while not await child._close_as_part(interruptions, in_task):
                    await self._wait_for_child(child, interruptions)
            finally:
                if left_open and child.state in (CLOSING, CLOSED):
                    try:
                        _warn_open(child, f"{self!r} was closed before it")
                    except ResourceWarning as raised:  # warnings are errors
                        interruptions.append(raised)

    async def _close_as_part(self, interruptions: list[BaseException], in_task: bool) -> bool:
        """As `_close`, and again for a while where another thread is inside of a domain that any may use.

        That is for what is part of another resource, of which half would be closed.
        """
        for _ in range(_CLOSE_ATTEMPTS if self.suppress_warning else 0):
            with contextlib.suppress(ConcurrentAccessError):
                return await self._close(interruptions, in_task)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as raised:
                if in_task:
                    raise
                interruptions.append(raised)
        return await self._close(interruptions, in_task)

    async def _wait_for_child(self, child: "Lifecycle", interruptions: list[BaseException]) -> None:
        """Until who closes a child has done so."""
        try:
            await child.wait_settled()
        except anyio.get_cancelled_exc_class() as raised:
            closing = child._closing
            if child.must_drain or (closing is not None and closing.may_never_end):  # it may take for ever
                raise
            interruptions.append(raised)
            await child._wait_settled_uncancelled(interruptions)

    async def _wait_settled_uncancelled(self, interruptions: list[BaseException]) -> None:
        try:
            await wait_uncancelled(self.wait_settled())
        except asyncio.CancelledError as raised:
            interruptions.append(raised)

    def _destroy_handles(self) -> None:
        while self._handles:
            self._handles[-1].destroy()
            self._handles.pop()

    def on_user_collected(self) -> None:
        """Its user's object is garbage: warn, and have somebody close it. For a finalizer: no verb and no lock."""
        if self.state not in (OPEN, FAILED) or self.suppress_warning or self.inherited:
            return
        self.suppress_warning = True
        # Verbs are the owner's to call. Where there is none, or it is gone, the parents' end is also this one's.
        if self.owner is not None and self.owner.loop is not None and not self.owner.orphaned:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self.owner.loop.call_soon_threadsafe(_close_forgotten, self)
        elif not self.parents:  # a device
            _forgotten.append(self)
            if self.opener is not None:
                with contextlib.suppress(RuntimeError):  # closed: the next who opens a device closes this
                    self.opener.call_soon_threadsafe(reap)
        _warn_open(self, "it was forgotten")

    # ---- Looking

    def find(self, handle: object) -> User | None:
        """The user's object that stands for a handle, among it and what was made from it; None if it was forgotten."""
        for lifecycle in self.subtree():
            if any(held is handle for held in lifecycle._handles):
                return lifecycle.user()
        return None

    def info(self) -> ResourceInfo:
        """It and what was made from it, as they are now; what was made from several is with the first of them."""
        children = tuple(child.info() for child in tuple(self.children.values()) if child.parents[:1] == (self,))
        owner = repr(self.owner) if self.owner is not None else None
        return ResourceInfo(self.kind, self.label, owner, self.state, self.created, children)


def _warn_open(lifecycle: Lifecycle, reason: str) -> None:
    warnings.warn(f"{lifecycle!r} was still open: {reason}", ResourceWarning, stacklevel=2, source=lifecycle)


_forgotten: deque[Lifecycle] = deque()  # devices that nobody closes yet
_background_tasks: set[asyncio.Task[None]] = set()  # loops keep weak references only; touched by single operations


def reap() -> None:
    """Have the running loop close the devices that were forgotten."""
    with contextlib.suppress(IndexError):  # another loop took the last
        for _ in range(len(_forgotten)):  # those that cannot be closed yet come back
            _close_forgotten(_forgotten.popleft())


def _close_forgotten(lifecycle: Lifecycle) -> None:
    if not lifecycle.parents and lifecycle.has_foreign_parts():
        # The owner of the part reaps when it has closed that. It may have done both since, before this was to be found.
        _forgotten.append(lifecycle)
        if lifecycle.has_foreign_parts():
            return
        try:
            _forgotten.remove(lifecycle)
        except ValueError:  # that owner took it
            return
    task = asyncio.get_running_loop().create_task(lifecycle.close())
    _background_tasks.add(task)
    task.add_done_callback(functools.partial(_on_forgotten_closed, lifecycle))


def _on_forgotten_closed(lifecycle: Lifecycle, task: asyncio.Task[None]) -> None:
    _background_tasks.discard(task)
    if lifecycle.state is CLOSED:
        reap()  # it may be what kept a device
    elif not lifecycle.parents and not lifecycle.inherited:
        _forgotten.append(lifecycle)
    with contextlib.suppress(asyncio.CancelledError, BusyResourceError):  # another loop closes what is its own there
        task.result()


def _on_background_end(lifecycle: Lifecycle, closing: _Closing, task: asyncio.Task[None]) -> None:
    _background_tasks.discard(task)
    lifecycle._abort_closing(closing)  # where it was cancelled before it began
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error  # nobody awaits it: the loop logs it


publish(__name__)
