"""Nodes of the resource tree: state, owner, parents, children and handles of a resource, and the order of closing."""

import asyncio
import contextlib
import enum
import functools
import itertools
import operator
import os
import sys
import threading
import warnings
import weakref
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
    "reap_orphan",
    "warn_at",
]

# Number of times that closing a part is tried while another thread is in its domain; of the first ones, in consecutive
# turns of the loop.
_CLOSE_ATTEMPTS = 1000
_ATTEMPTS_IN_TURNS = 10
# Guards the children and states of all trees. Critical sections are short, call no verb and wait for nothing. The
# garbage collector may run a finalizer inside of one, so finalizers of the library never take this lock.
_tree = threading.RLock()  # reentrant, because a user's finalizer may open a resource
_serials = itertools.count(1)


def _renew_tree_lock() -> None:
    """Replace the lock of the resource trees with a new one in a forked child."""
    global _tree
    _tree = threading.RLock()  # a thread that held the old lock does not exist in the child


os.register_at_fork(after_in_child=_renew_tree_lock)


class ResourceState(enum.Enum):
    """State of a resource."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"
    """Opening failed, and so did destroying the handles that had been created. The resource can only be closed, which
    tries again to destroy them."""


# Module-level names, because an attribute lookup in the enumeration costs as much as a lock.
NEW, OPENING, OPEN, CLOSING, CLOSED, FAILED = ResourceState


class Destroyable(Protocol):
    """Handle, or another object that a resource releases when it is closed."""

    def destroy(self) -> None:
        """Release the object. This is called once or, if it raises, again at each later attempt to close the resource.

        :raises Exception: the object cannot be released. The resource then stays open.
        """


class User(Protocol):
    """Object of the user that a node of the resource tree belongs to."""

    def _drop_parents(self) -> None:
        """Drop the references to the parents. This is called after the resource has been closed."""


@dataclass(frozen=True)
class ResourceInfo:
    """Snapshot of a resource and of the resources that were made from it. `Device.resources` returns one.

    :param kind: class name of the resource, such as ``"QueuePair"``.
    :param label: text that identifies the resource among others of its kind, such as its number; may be empty.
    :param owner: representation of the owner; None if any loop may use the resource.
    :param state: state of the resource.
    :param created: file and line of the user's code that made the resource, as ``"file.py:12"``.
    :param children: snapshots of the resources that were made from this one.
    """

    kind: str
    label: str
    owner: str | None
    state: ResourceState
    created: str
    children: tuple["ResourceInfo", ...]

    def __str__(self) -> str:
        return "\n".join(self._lines(""))

    def _text(self) -> str:
        """Return one line of text about the resource: its kind, label, state, owner if any, and creation site."""
        parts = [f"{self.kind} {self.label}".rstrip(), self.state.value]
        parts += [f"owner: {self.owner}"] if self.owner else []
        return ", ".join([*parts, f"opened at {self.created}"])

    def _lines(self, indent: str) -> Iterator[str]:
        """Yield one line, a string without a line break, for the resource and for each resource made from it, indented
        by level.

        :param indent: spaces before the first line.
        """
        yield indent + self._text()
        for child in self.children:
            yield from child._lines(indent + "  ")

    def __rich__(self) -> "Tree":
        from rich.highlighter import ReprHighlighter
        from rich.tree import Tree

        tree = Tree(ReprHighlighter()(self._text()))  # not markup, because the text may contain strings of a peer
        for child in self.children:
            tree.add(child.__rich__())
        return tree


_is_closed_last = operator.attrgetter("close_last")


# Interval at which a task that waits for another loop checks that the loop still exists: its end notifies no waiter.
_POLL_S = 0.1

Site = tuple[CodeType, int, str]
"""Place in the user's code: a code object, the byte offset of an instruction in it, and the name of its module."""


def _line(site: Site) -> int | None:
    """Return the number of the line of an instruction; None if the compiler recorded none."""
    code, instruction, _ = site
    line, *_ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return line


def format_site(site: Site | None) -> str:
    """Return the file and line of a place in the user's code, as ``"file.py:12"``; ``"?"`` if it is unknown."""
    return f"{site[0].co_filename}:{_line(site)}" if site is not None else "?"


def warn_at(site: Site | None, text: str, source: object = None) -> None:
    """Issue a `ResourceWarning` that names a place in the user's code as its origin.

    The place where the warning is issued would say nothing: that is a finalizer, or the event loop.

    :param site: place, to which filters for warnings by module and line apply; None if it is unknown.
    :param text: text of the warning.
    :param source: object that the warning is about, for `tracemalloc`.
    :raises ResourceWarning: if warnings are turned into errors.
    """
    if site is None:
        warnings.warn(text, ResourceWarning, stacklevel=2, source=source)
    else:
        code, _, module = site
        scope = getattr(sys.modules.get(module), "__dict__", {})
        registry = scope.setdefault("__warningregistry__", {})  # as `warnings.warn` does: repetitions are not shown
        warnings.warn_explicit(
            text, ResourceWarning, code.co_filename, _line(site) or 0, module, registry=registry, source=source
        )


class _Closing:
    """One attempt to close a resource: the state before, the loop and thread that close it, and their coroutine.

    `Lifecycle._closing` refers to the current attempt; the tree's lock guards that reference. A closer may continue
    only while its attempt is the current one: if its loop has ended, another loop aborts the attempt.

    :param before: state of the resource to restore if the attempt fails.
    """

    __slots__ = ("_task", "background", "before", "closer", "work")

    def __init__(self, before: ResourceState) -> None:
        self.before = before
        loop = asyncio._get_running_loop()  # None: a loop of another library, on which waiting raises
        self.closer = Affinity.of_running_loop() if loop is not None else None
        task = asyncio.current_task(loop) if loop is not None else None
        self._task = weakref.ref(task) if task is not None else None  # weak, as the user's task must not be kept alive
        self.work: Coroutine[Any, Any, None] | None = None
        self.background: asyncio.Task[None] | None = None  # task that continues after the closer was cancelled

    @property
    def is_deserted(self) -> bool:
        """True if the attempt cannot continue, because its loop was closed or the thread of the loop has ended."""
        return (
            self.closer is not None
            and self.closer.orphaned
            and not (self.closer.loop and self.closer.loop.is_running())
        )

    @property
    def may_never_end(self) -> bool:
        """True if the attempt may take forever, because it runs in a background task or on another loop, which may
        stop."""
        return self.background is not None or (self.closer is not None and not self.closer.owns())

    def stop_work(self) -> None:
        """Close the coroutine of an attempt whose loop has ended.

        The coroutine is not executing, because its loop is not running, unless `reap` in another thread is closing it.
        """
        if self.background is not None:
            _background_tasks.discard(self.background)
        if self.work is not None:
            # The future that the coroutine awaits may hold the only reference to the task. Keep the task until the
            # coroutine is closed: its finalizer would otherwise run in the middle of close().
            task = self._task() if self._task is not None else None
            with contextlib.suppress(RuntimeError, ValueError):  # a cancel scope may be left by its own task only
                self.work.close()
            del task


class Lifecycle:
    """Node of the resource tree: the handles, parents, children, owner and state of one resource. Made by `Resource`.

    A parent keeps strong references to the nodes of its children, so a resource can still be closed after the user's
    object was garbage-collected.

    :param kind: class name of the resource.
    :param site: place in the user's code that made the resource; None if unknown.
    :param user: weak reference to the user's object.
    """

    __slots__ = (
        "_closing",
        "_condition",
        "_handles",
        "_site",
        "children",
        "close_last",
        "drain",
        "drain_now",
        "forks",
        "kind",
        "label",
        "may_be_dropped",
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
        self.stop: Callable[[], None] | None = None  # called first when the resource is closed
        self.drain: Callable[[], Coroutine[Any, Any, None]] | None = None  # waits for work in flight
        self.drain_now: Callable[[], bool] | None = None  # as `drain`, without waiting; False if `drain` has to wait
        self.resume: Callable[[], None] | None = None  # undoes `drain` after a failed attempt
        self.close_last = False  # work of its siblings uses the resource, so they are closed first
        self.must_drain = False  # handles stay until `drain` is done, even if cancelled: memory under DMA
        self._closing: _Closing | None = None  # current attempt, if the state is CLOSING
        self.opener: asyncio.AbstractEventLoop | None = None  # closes a device that was garbage-collected
        self.suppress_warning = False  # part of another resource, or warned of before
        self.may_be_dropped = False  # dropping the resource loses nothing: it is closed without a warning
        self.user = user
        self._site = site
        self.serial = next(_serials)
        self.forks = forks.count  # fork count at the time of opening
        self._handles: list[Destroyable] = []
        self._condition: CrossLoopCondition | None = None  # made by the first waiter

    def __repr__(self) -> str:
        return f"<{self.kind}{f' {self.label}' if self.label else ''} ({self.state.value}), opened at {self.created}>"

    @property
    def created(self) -> str:
        """File and line of the user's code that made the resource, as ``"file.py:12"``; ``"?"`` if unknown."""
        return format_site(self._site)

    def inherit_site(self, other: "Lifecycle") -> None:
        """Use the creation site of another resource as that of this one, in messages and in `created`.

        :param other: node of the other resource.
        """
        self._site = other._site

    @property
    def inherited(self) -> bool:
        """True if the resource was opened in the process that this one was forked from."""
        return self.forks != forks.count and self.state is not NEW

    # ---- Opening

    def begin(self, parents: "tuple[Lifecycle, ...]", owner: Affinity | None) -> None:
        """Begin to open the resource: make it a child of its parents and set its state to OPENING.

        From then on, closing a parent closes this resource as well. Nothing is changed on failure.

        :param parents: nodes of the parents.
        :param owner: owner of the resource; None if any loop may use it.
        :raises ClosedResourceError: the resource was opened before, is being opened or is FAILED; or a parent is
            neither open nor being opened.
        :raises ForkedProcessError: the resource or a parent was opened in the process that this one was forked from.
        """
        with _tree:
            if self.state is not NEW:
                self._check_process()
                advice = ", or use it as it is, without `async with`" if self.state is OPEN else ""
                raise ClosedResourceError(f"{self!r} cannot be opened again: make a new one{advice}")
            for parent in parents:
                parent._check_process()
                if parent.state is not OPEN and parent.state is not OPENING:  # OPENING: this one is a part of it
                    raise ClosedResourceError(f"{parent!r} is not open: nothing can be made from it")
            for parent in parents:
                parent.children[self.serial] = self
            self.parents, self.owner, self.forks, self.state = parents, owner, forks.count, OPENING

    def _check_process(self) -> None:
        """Check that the resource was not opened before this process was forked.

        :raises ForkedProcessError: the resource was opened in the process that this one was forked from.
        """
        if self.inherited:
            raise ForkedProcessError(repr(self))

    def hold(self, handle: Destroyable) -> None:
        """Add a handle that is destroyed when the resource is closed, before the handles that were added so far."""
        self._handles.append(handle)

    def hold_below(self, handle: Destroyable) -> None:
        """Add a handle that is destroyed when the resource is closed, after all other handles; only a handle of a later
        call to this method is destroyed after it.
        """
        self._handles.insert(0, handle)

    def attach(self, handle: Destroyable) -> None:
        """Add an object to an open resource. Closing the resource destroys the object, unless it is detached before.

        :param handle: object, which is destroyed before the handles that were added so far.
        :raises ClosedResourceError: the resource is not open.
        :raises ForkedProcessError: the resource was opened in the process that this one was forked from.
        """
        with _tree:  # a task that begins to close the resource after this finds the handle
            self._check_process()
            if self.state is not OPEN:
                raise ClosedResourceError(
                    f"{self!r} is not open: open it with `async with`, or create a new one if it was closed"
                )
            self._handles.append(handle)

    def detach(self, handle: Destroyable) -> None:
        """Detach an object from the resource, so that closing the resource does not destroy the object.

        Do nothing if the resource is not open, or if the object is not attached.

        :param handle: object that was passed to `attach`.
        """
        with _tree:
            if self.state is OPEN and handle in self._handles:
                self._handles.remove(handle)

    def opened(self) -> None:
        """Finish the opening: set the state to OPEN and notify waiting tasks."""
        self._settle(OPEN)

    def undo(self) -> None:
        """Destroy the handles of the resource and of its parts after opening failed, and set the state back to NEW.

        The parts have not been used yet, so there is no work in flight to wait for.

        :raises Exception: whatever destroying a handle raised, such as `VerbsError`. The state of the resource, and of
            each part that was not undone before, is set to FAILED; these can only be closed.
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

    # ---- Waiting for another task that opens or closes the resource

    def _settle(self, state: ResourceState) -> None:
        """Set the state and notify waiting tasks. This can be called from any thread.

        If the new state is NEW or CLOSED, remove the resource from the tree.
        """
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
        """Return the `CrossLoopCondition` that is notified when opening or closing the resource has ended."""
        with _tree:  # a later change of the state finds the condition
            if self._condition is None:
                self._condition = CrossLoopCondition()
            return self._condition

    async def wait_settled(self) -> None:
        """Wait until no task is opening or closing the resource. An attempt to close whose loop has ended is aborted.

        :raises RuntimeError: a task is opening or closing the resource, and no asyncio event loop is running here.
        """
        await self.condition().wait_while(self._is_changing, poll_s=_POLL_S)

    def _is_changing(self) -> bool:
        """Return whether a task is opening or closing the resource.

        First, abort any attempt to close the resource whose event loop has ended.
        """
        self._abort_deserted_closing()
        return self.state is OPENING or self.state is CLOSING

    # ---- Closing

    def check_owner(self, verb: str) -> None:
        """Check that the caller is the owner of the resource, if there is one.

        After the end of the owner's loop or thread, any caller is accepted.

        :param verb: name of the verb or method, for the error message.
        :raises AffinityError: the owner is another loop or thread.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        :raises ForkedProcessError: the owner belongs to the process that this one was forked from.
        """
        if self.owner is not None and not self.owner.orphaned:
            self.owner.check(self, verb)

    def _check_can_close(self) -> None:
        """Check that the caller may close the resource and everything that was made from it.

        If the owner of the resource or of a descendant has ended, make the running loop the new owner.

        :raises AffinityError: another event loop, which has not ended, owns the resource.
        :raises ConcurrentAccessError: a verb is in flight on an object of the same owner.
        :raises BusyResourceError: a descendant belongs to another event loop that has not ended.
        :raises RuntimeError: an owner has ended, and no asyncio event loop is running here to become the new owner.
        """
        # Call under the tree's lock. Only the owner may close the resource, because the owner's thread may be in one of
        # its verbs. After that thread has ended, no thread is in a verb, and the closing loop becomes the owner.
        if self.owner is not None and not self.owner.orphaned:
            self.owner.check(self, "aclose")
            if not self.children:
                return
        foreign = self._foreign_parts()
        for lifecycle, owner in foreign:
            if not owner.orphaned:
                raise BusyResourceError(
                    f"{self!r} cannot be closed here: {lifecycle!r} belongs to {owner!r}; "
                    "close that resource there first"
                )
        for _, owner in foreign:
            if owner.orphaned:  # several parts may have the same owner
                owner.take_over()

    def _foreign_parts(self) -> "list[tuple[Lifecycle, Affinity]]":
        """Return a list of tuples: the nodes in the subtree that the caller does not own, each with its owner.

        Owners that have ended are included. Call with the tree's lock.
        """
        owned = ((lifecycle, lifecycle.owner) for lifecycle in self.subtree())
        return [(lifecycle, owner) for lifecycle, owner in owned if owner is not None and not owner.owns()]

    def has_foreign_parts(self) -> bool:
        """Return whether a node in the subtree belongs to another owner that has not ended and must close it first."""
        with _tree:
            return any(not owner.orphaned for _, owner in self._foreign_parts())

    def subtree(self) -> "list[Lifecycle]":
        """Return a list of the node and all its descendants, parents before children."""
        lives = [self]
        for lifecycle in lives:
            if lifecycle.children:
                lives.extend(lifecycle.children.values())
        return lives

    async def close(self) -> None:
        """Close the resource: close its children, newest first, wait for its work in flight, and destroy its handles.

        A `ResourceWarning` is issued for each child that the user left open. If this is cancelled, only the wait for
        work in flight is interrupted; closing continues. A warning that is turned into an error does not interrupt
        closing either. If the wait was for work requests that use memory of the resource, or for another loop that
        closes a child, a background task continues the wait and then closes the rest. The same happens if all tasks are
        cancelled, including one that ends the work in flight, as at the end of a loop.

        If this fails, the resource stays open and can be closed again; children that were closed before the failure
        stay closed. If another task is opening or closing the resource, wait for that task, and close the resource if
        it is still open; if the loop of that task has ended, take over. Do nothing if the resource is closed or was
        never opened, or, in a forked child, if it was opened before the fork.

        :raises BusyResourceError: another event loop, which has not ended, owns a resource that was made from this one;
            in this case nothing is changed. Also raised if receives are posted in memory that would be deregistered, or
            if ``drain`` raises it; the resource then stays open.
        :raises AffinityError: another event loop, which has not ended, owns the resource. In this case nothing is
            changed.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain. The resource stays open.
        :raises VerbsError: a verb failed. The resource stays open.
        :raises asyncio.CancelledError: this was cancelled. The resource is closed, or a background task closes it, or
            closing failed, which a note on the exception says.
        :raises ResourceWarning: if warnings are turned into errors and a warning was issued. The resource is closed.
        :raises RuntimeError: no asyncio event loop is running here, and another task is opening or closing the
            resource, work is in flight, or the owner of the resource or of a descendant has ended. This call then does
            not close the resource.
        :raises Exception: whatever ``drain`` or destroying a handle raised, such as an exception of the allocator. The
            resource stays open.
        """
        interruptions: list[BaseException] = []
        try:
            while not await self._close(interruptions):
                await self.wait_settled()
        except Exception as error:
            for each in interruptions:
                if not isinstance(each, Warning):  # a cancellation takes precedence over the error
                    each.add_note(f"and closing {self!r} failed: {type(error).__name__}: {error}")
                    raise each  # noqa: B904
                error.add_note(f"and a warning was raised as an exception: {each}")
            raise
        if interruptions:
            raise min(interruptions, key=lambda each: isinstance(each, Warning))  # a cancellation first

    def abort(self) -> None:
        """Close the resource as far as that needs no wait, and let a background task on the running loop do the rest.

        Memory that the device may still access stays pinned until the background task has closed the rest. If that task
        fails, the loop logs the exception, and the resource stays open and can be closed again. Do nothing if the
        resource is not open, if it was opened before this process was forked, or if another task is opening or closing
        it.

        :raises BusyResourceError: another event loop, which has not ended, owns a resource that was made from this one.
            In this case nothing is changed.
        :raises AffinityError: another event loop, which has not ended, owns the resource. In this case nothing is
            changed.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain. In this case nothing is
            changed.
        :raises ResourceWarning: if warnings are turned into errors and ``stop`` issued one. The resource is closed all
            the same.
        :raises VerbsError: a verb failed. The resource stays open.
        :raises RuntimeError: no asyncio event loop is running. In this case nothing is changed.
        """
        closing = self._begin_closing()
        if closing is None:
            return
        if closing.closer is None:
            self._abort_closing(closing)
            raise RuntimeError(f"{self!r} cannot be closed here: no asyncio event loop is running")
        try:
            if self.stop is not None:
                self.stop()
        finally:  # `stop` may raise a warning; the resource is closed all the same
            if self._try_finish(closing):
                self._closed()
            else:
                self._finish_in_background(closing)

    def _try_finish(self, closing: _Closing) -> bool:
        """Finish an attempt to close if that needs no wait. If this raises, the attempt is aborted.

        :returns: False if something must be waited for; the rest is then left to `_finish`.
        :raises VerbsError: a verb failed.
        """
        try:
            return self._finish_now()
        except (ConcurrentAccessError, BusyResourceError):  # a thread is inside the domain, or changes a queue pair
            return False
        except BaseException:
            self._abort_closing(closing)
            raise

    def _finish_now(self) -> bool:
        """Close the children, end work in flight and destroy the handles, as far as that needs no wait.

        :returns: False if something must be waited for, or a child was left open by the user; `_finish` does the rest.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain.
        :raises VerbsError: a verb failed; the handles that were not destroyed are still held.
        """
        children = list(self.children.values())
        children.reverse()
        children.sort(key=_is_closed_last)
        if not all(child.suppress_warning and child._close_now() for child in children):
            return False
        if self.drain is not None and (self.drain_now is None or not self.drain_now()):
            return False
        self._destroy_handles()
        return True

    def _close_now(self) -> bool:
        """Close the resource, a part of another one, if that needs no wait; else leave it open.

        :returns: whether the resource is closed, or was never opened.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain.
        :raises VerbsError: a verb failed. The resource stays open.
        """
        closing = self._begin_closing()
        if closing is None:
            return self.state in (NEW, CLOSED)
        try:
            if self.stop is not None:
                self.stop()
            is_finished = self._finish_now()
        except BaseException:
            self._abort_closing(closing)
            raise
        if is_finished:
            self._closed()
        else:
            self._abort_closing(closing)
        return is_finished

    async def _close(self, interruptions: list[BaseException], in_task: bool = False) -> bool:
        """Close the resource, unless another task is opening or closing it.

        :param interruptions: list to which cancellations and warnings are appended; the caller raises one at the end.
        :param in_task: True in a background task: if that is cancelled, the resource stays open.
        :returns: False if another task is opening or closing the resource; True if the resource is now closed, was
            closed before or was never opened, or if it was opened before this process was forked.
        :raises BusyResourceError: see `close`; all other exceptions that `close` lists are raised as well.
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
        """Close the children, wait for work in flight and destroy the handles.

        :param interruptions: list to which cancellations and warnings are appended; the caller raises one at the end.
        :param in_task: True in a background task.
        :raises asyncio.CancelledError: this was cancelled while memory of the resource or of a child was in use, or
            while another loop was closing a child; or the end of the loop cancelled the task that ends its work.
            Closing is not complete.
        :raises VerbsError: a verb failed; the handles that were not destroyed are still held. The other exceptions that
            `close` lists are raised as well.
        """
        if self.children:
            await self._close_children(interruptions, in_task)
        if self.drain is not None:
            try:
                await self.drain()
            except anyio.get_cancelled_exc_class() as raised:
                failure = raised.__cause__  # set by `wait_uncancelled`: draining failed, or was itself cancelled
                if self.must_drain or isinstance(failure, asyncio.CancelledError):
                    raise
                interruptions.append(raised)
                if failure is not None:  # the resource stays open
                    raise failure  # noqa: B904
        self._destroy_handles()

    def _abort_closing(self, closing: _Closing) -> None:
        """Abort an attempt to close the resource, and restore the state that the resource had before the attempt.

        Do nothing if the attempt is no longer the current one.
        """
        with _tree:
            if self._closing is not closing:
                return
            self._closing = None
        self._reopen(closing)

    def _abort_deserted_closing(self) -> None:
        """Abort the current attempt to close if its loop has ended.

        If several threads call this, only one of them aborts the attempt.
        """
        with _tree:
            closing = self._closing
            if closing is None or not closing.is_deserted:
                return
            self._closing = None
        # The state stays CLOSING until `_reopen`, so no other task begins to close the resource before the coroutine is
        # closed. The end of the coroutine calls `_abort_closing`, which does nothing, as the attempt is not current.
        closing.stop_work()
        self._reopen(closing)

    def _reopen(self, closing: _Closing) -> None:
        """Resume the work of the resource after a failed attempt to close, and restore the state before the attempt."""
        if self.resume is not None:
            self.resume()
        self._settle(closing.before)

    def _closed(self) -> None:
        """Set the state to CLOSED at the end of a successful attempt, and drop the references to the parents."""
        self._closing = None
        self._settle(CLOSED)
        user = self.user()
        if user is not None:
            user._drop_parents()

    def _finish_in_background(self, closing: _Closing) -> None:
        """Continue an attempt to close in a background task on the loop that began it, which is running.

        If that task is cancelled, for example at the end of the loop, the resource stays open.

        :param closing: attempt to continue.
        """
        assert closing.closer is not None
        assert closing.closer.loop is not None
        closing.work = self._finish_in_task(closing)
        closing.background = task = closing.closer.loop.create_task(closing.work)
        _background_tasks.add(task)
        task.add_done_callback(functools.partial(_on_background_end, self, closing))

    async def _finish_in_task(self, closing: _Closing) -> None:
        """Do the rest of an attempt to close. This is the coroutine of a background task.

        If this fails or is cancelled, the attempt is aborted, so that the resource can be closed again.

        :raises BaseException: whatever `_finish` raised. The resource then has the state from before the attempt.
        """
        try:
            await self._finish([], True)
        except BaseException:
            self._abort_closing(closing)
            raise
        self._closed()

    def _begin_closing(self) -> _Closing | None:
        """Begin an attempt to close the resource, and set the state to CLOSING.

        First, abort any earlier attempt whose event loop has ended.

        :returns: the attempt; None if the resource is neither OPEN nor FAILED, or was opened before this process was
            forked.
        :raises BusyResourceError: see `_check_can_close`; all other exceptions that it lists are raised as well. The
            state stays the same.
        """
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
        """Close the children, newest first, and warn of each one that the user left open.

        Children that their siblings use are closed after these. This raises the same exceptions as `_finish`; the
        children that follow the failed one then stay open. A warning that is turned into an error is appended to
        `interruptions`.
        """
        children = list(self.children.values())
        children.reverse()
        children.sort(key=_is_closed_last)
        for child in children:
            left_open = not (child.suppress_warning or child.may_be_dropped) and child.state is not CLOSING
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
        """Close the resource as `_close` does, but try again while another thread is executing a verb on the domain.

        Only parts of other resources are tried again, up to 1000 times: a failure would leave the resource that they
        belong to partly closed. The first 10 attempts are made in consecutive turns of the loop, the others at
        intervals of 1 ms, so that the other thread can run; for about a second in all.

        :returns: the same as `_close`.
        :raises ConcurrentAccessError: another thread is still executing a verb. All other exceptions that `close` lists
            are raised as well.
        """
        for attempt in range(_CLOSE_ATTEMPTS if self.suppress_warning else 0):
            with contextlib.suppress(ConcurrentAccessError):
                return await self._close(interruptions, in_task)
            try:
                await asyncio.sleep(0 if attempt < _ATTEMPTS_IN_TURNS else 0.001)
            except asyncio.CancelledError as raised:
                if in_task:
                    raise
                interruptions.append(raised)
        return await self._close(interruptions, in_task)

    async def _wait_for_child(self, child: "Lifecycle", interruptions: list[BaseException]) -> None:
        """Wait until another task has opened or closed a child.

        :param child: node of the child.
        :param interruptions: list to which a cancellation is appended that does not end the wait.
        :raises asyncio.CancelledError: this was cancelled, and the child must wait for work with its memory, or may
            take forever to close.
        :raises RuntimeError: no asyncio event loop is running.
        """
        try:
            await child.wait_settled()
        except anyio.get_cancelled_exc_class() as raised:
            closing = child._closing
            if child.must_drain or (closing is not None and closing.may_never_end):
                raise
            interruptions.append(raised)
            await child._wait_settled_uncancelled(interruptions)

    async def _wait_settled_uncancelled(self, interruptions: list[BaseException]) -> None:
        """Wait as `wait_settled` does, even if this is cancelled: the cancellation is appended to `interruptions`.

        :raises RuntimeError: no asyncio event loop is running.
        """
        try:
            await wait_uncancelled(self.wait_settled())
        except asyncio.CancelledError as raised:
            interruptions.append(raised)

    def _destroy_handles(self) -> None:
        """Destroy the handles of the resource, in the order that `hold` and `hold_below` describe.

        :raises Exception: whatever destroying a handle raised, such as `VerbsError` or an exception of an allocator.
            That handle and those that would have been destroyed after it are still held.
        """
        while self._handles:
            self._handles[-1].destroy()
            self._handles.pop()

    def on_user_collected(self) -> None:
        """Warn that the user's object was garbage-collected while open, and schedule the closing of the resource.

        The owner's loop closes the resource. Without an owner that has not ended, the resource is closed together with
        its parents, and a device by `reap`. Do nothing if the resource is not open, if its warning is turned off, or if
        it was opened before this process was forked. Do not warn if nothing is lost by dropping it. A finalizer calls
        this, so it calls no verb and takes no lock.

        :raises ResourceWarning: if warnings are turned into errors. The closing has been scheduled.
        """
        if self.state not in (OPEN, FAILED) or self.suppress_warning or self.inherited:
            return
        self.suppress_warning = True
        # Only the owner may call verbs. Without a living owner, the resource is closed together with its parents.
        if self.owner is not None and self.owner.loop is not None and not self.owner.orphaned:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.owner.loop.call_soon_threadsafe(_close_forgotten, self)
        elif not self.parents:  # a device
            _forgotten[self] = None
            if self.opener is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the next open_device() calls `reap`
                    self.opener.call_soon_threadsafe(reap)
        if not self.may_be_dropped:
            _warn_open(self, "it was forgotten; use `async with`, or await aclose()")

    # ---- Inspection

    def find(self, handle: object) -> User | None:
        """Return the user's object of the resource in this subtree that holds a handle.

        :param handle: handle to find.
        :returns: the object; None if no resource holds the handle, or if the object was garbage-collected.
        """
        for lifecycle in self.subtree():
            if any(held is handle for held in lifecycle._handles):
                return lifecycle.user()
        return None

    def info(self) -> ResourceInfo:
        """Return a snapshot of the resource and of all resources made from it, as a `ResourceInfo`.

        A resource with several parents is listed under the first of them.
        """
        children = tuple(child.info() for child in tuple(self.children.values()) if child.parents[:1] == (self,))
        owner = repr(self.owner) if self.owner is not None else None
        return ResourceInfo(self.kind, self.label, owner, self.state, self.created, children)


def _warn_open(lifecycle: Lifecycle, reason: str) -> None:
    """Issue a `ResourceWarning` that says that a resource was left open.

    :param lifecycle: node of the resource.
    :param reason: text that ends the message and says why the warning is issued now.
    :raises ResourceWarning: if warnings are turned into errors.
    """
    warn_at(lifecycle._site, f"{lifecycle!r} was still open: {reason}", lifecycle)


# Garbage-collected devices, and resources of closed loops, that are not closed yet, each with the last task that was
# started to close it; None if there was none. Only single operations, which are atomic.
_forgotten: dict[Lifecycle, asyncio.Task[None] | None] = {}
_background_tasks: set[asyncio.Task[None]] = set()  # strong references: loops keep weak ones. Only atomic operations


def reap() -> None:
    """Start tasks on the running loop that close the devices whose objects were garbage-collected while open, and the
    resources passed to `reap_orphan` whose closing has not ended.

    A device from which another loop's resource was made is left to that loop, which calls this again. A device that a
    task is closing is left to the task, unless the task's loop has stopped.

    :raises RuntimeError: there is something to close, and no asyncio event loop is running.
    """
    for lifecycle, task in _forgotten.copy().items():
        if lifecycle.state is CLOSED or lifecycle.inherited:
            _forgotten.pop(lifecycle, None)
        elif (task is None or task.done() or not task.get_loop().is_running()) and not lifecycle.has_foreign_parts():
            _forgotten[lifecycle] = _close_forgotten(lifecycle)
            if task is not None and task.get_loop().is_closed() and (coroutine := task.get_coro()) is not None:
                _background_tasks.discard(task)
                # A cancel scope may be left by its own task only. Another thread may be closing the coroutine.
                with contextlib.suppress(RuntimeError, ValueError):
                    coroutine.close()


def reap_orphan(lifecycle: Lifecycle) -> None:
    """Start a task on the running loop that closes a resource of an event loop that was closed, or let a later `reap`
    do so if that task does not end. Without this, the resource is closed together with its device.

    :raises RuntimeError: no asyncio event loop is running.
    """
    _forgotten[lifecycle] = None
    reap()


def _close_forgotten(lifecycle: Lifecycle) -> asyncio.Task[None]:
    """Start a task on the running loop that closes a garbage-collected resource, and return the task.

    :raises RuntimeError: no asyncio event loop is running.
    """
    task = asyncio.get_running_loop().create_task(lifecycle.close())
    _background_tasks.add(task)
    task.add_done_callback(functools.partial(_on_forgotten_closed, lifecycle))
    return task


def _on_forgotten_closed(lifecycle: Lifecycle, task: asyncio.Task[None]) -> None:
    """Handle the end of a task that `_close_forgotten` started.

    :param lifecycle: node of the resource.
    :param task: task that has ended.
    :raises Exception: whatever the task raised, except `BusyResourceError` and `asyncio.CancelledError`; the loop logs
        the exception.
    """
    _background_tasks.discard(task)
    if lifecycle.state is CLOSED:
        reap()  # this resource may have kept a device from being closed
    with contextlib.suppress(asyncio.CancelledError, BusyResourceError):  # its owner's loop closes the part
        task.result()


def _on_background_end(lifecycle: Lifecycle, closing: _Closing, task: asyncio.Task[None]) -> None:
    """Handle the end of a background task that was closing a resource, and abort the attempt if it is still current.

    :param lifecycle: node of the resource.
    :param closing: attempt that the task continued.
    :param task: task that has ended.
    :raises BaseException: whatever the task raised, except `asyncio.CancelledError`; the loop logs the exception.
    """
    _background_tasks.discard(task)
    lifecycle._abort_closing(closing)  # if the task was cancelled before its first step
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error  # no task awaits this one; the loop logs the exception


publish(__name__)
