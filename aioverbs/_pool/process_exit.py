"""Detection of the exit of a child process on an event loop."""

import asyncio
import contextlib
import os
import select
import subprocess
import weakref
from collections.abc import Callable

from aioverbs._lifecycle import forks

__all__ = ["ExitWatch"]

_POLL_S = 1.0  # interval between polls of a process in a program that has forked

_has_forked = False  # True if children of this process may have copies of its event loops
_watches: "set[weakref.ref[ExitWatch]]" = set()  # watches that are started and not closed


class ExitWatch:
    """Watch that calls a function once when a child process has exited, even if another process keeps its sockets open.

    When the process exits, a pidfd becomes readable. The pidfd is not in the loop's own epoll set, but in an epoll
    instance of the watch, which the loop polls::

        loop's epoll set  ->  epoll instance of the watch  ->  pidfd  ->  child process

    A fork makes a copy of the loop in the forked child. The copy polls the same kernel objects as the loop, and a pidfd
    stays readable, so the copy would spin until the parent's loop has handled the exit. Therefore the pidfd is removed
    from the watch's epoll instance before each fork. From then on the instance is ready in neither process: the copy
    has no event to spin on, and none to take from the parent. The parent loses nothing, because after a fork it needs
    no event: it polls the status of the process at intervals.

    Without a pidfd (kernel older than 5.3, system call filter, no free descriptors) nothing is watched, and only the
    closing of the process's sockets shows its exit.

    :param loop: running loop, or loop that the calling thread will run.
    :param process: child of this process; only this object may wait for it.
    :param on_exit: function that is called on the loop without arguments, unless the watch is closed before.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, process: "subprocess.Popen[bytes]", on_exit: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._process = process
        self._on_exit = on_exit
        self._forks = forks.count
        self._is_closed = False
        self._pidfd = -1
        self._epoll: select.epoll | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ref = weakref.ref(self, _watches.discard)
        hash(self._ref)  # computed and kept now: a reference to a dead object that was never hashed cannot be discarded

    def start(self) -> None:
        """Start watching for the exit of the process. Call on the loop.

        If no pidfd or epoll instance can be created, nothing is watched, and `on_exit` is never called.
        """
        if not hasattr(os, "pidfd_open"):  # CPython was built with the headers of an older kernel
            return
        _watches.add(self._ref)  # before the pidfd can be ready, so that a fork in another thread finds it
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
            self._epoll = select.epoll(1)
            self._epoll.register(self._pidfd, select.EPOLLIN)
            self._loop.add_reader(self._epoll.fileno(), self._poll)
        except OSError:
            self.close()
            return
        if _has_forked:
            self._poll()

    def close(self) -> None:
        """Stop watching the process. Call on the loop, or when the loop is no longer running. Further calls do nothing.

        In a forked child, this does nothing: parent and child share the kernel object of the loop's epoll set, so the
        child must not remove anything from that set.
        """
        if self._forks != forks.count:
            return
        self._is_closed = True
        _watches.discard(self._ref)
        if self._timer is not None:
            self._timer.cancel()
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(epoll.fileno())
            epoll.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _poll(self) -> None:
        """Close the watch and call `on_exit` if the process has exited, else check again after 1 s.

        Do nothing if the watch is closed, or in a forked child.
        """
        if self._is_closed or self._forks != forks.count:
            return
        if self._process.poll() is not None:
            self.close()
            self._on_exit()
            return
        # A debugger may receive the exit first: then the pidfd is readable, and there is no status yet.
        self._disarm()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_POLL_S, self._poll)

    def _disarm(self) -> None:
        """Remove the pidfd from the epoll instance, so that the instance is never ready again.

        This can be called from any thread. Do nothing if the pidfd was removed before.
        """
        if (epoll := self._epoll) is not None:
            with contextlib.suppress(OSError, ValueError):  # removed before, or the watch is being closed
                epoll.unregister(self._pidfd)

    def _poll_after_fork(self) -> None:
        """Start polling the status of the process on the loop, after a fork. Do nothing if the loop is closed.

        This can be called from any thread.

        In the forked child, a copy of the loop may read the byte that was to wake the loop. uvloop sends no further
        byte before it has read the last one itself, so its loop would never be woken again: on uvloop,
        `call_soon_threadsafe` is used only if another thread runs the loop, because a forked child does not have that
        thread, and so no running copy of the loop. asyncio sends a byte for each call, and needs one if a signal
        handler forks, because handlers run within `select`.
        """
        loop = self._loop
        with contextlib.suppress(RuntimeError):  # the loop is closed
            wakes_safely = isinstance(loop, asyncio.SelectorEventLoop) or asyncio._get_running_loop() is not loop
            if loop.is_running() and wakes_safely:
                loop.call_soon_threadsafe(self._poll)
            else:
                loop.call_soon(self._poll)

    def _close_in_child(self) -> None:
        """Close the pidfd of the watch in a forked child.

        The epoll instance stays open, because the copy of the loop uses its descriptor number.
        """
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _live_watches() -> "list[ExitWatch]":
    """Return a list of all watches that are started and not closed."""
    return [watch for ref in tuple(_watches) if (watch := ref()) is not None]


def _before_fork() -> None:
    """Disarm all watches before a fork, so that the copies of their loops in the forked child see no event."""
    global _has_forked
    _has_forked = True
    for watch in _live_watches():
        watch._disarm()


def _after_fork_in_parent() -> None:
    """Make all watches poll after a fork, because they no longer receive events."""
    for watch in _live_watches():
        watch._poll_after_fork()


def _after_fork_in_child() -> None:
    """Close the pidfds of all watches in a forked child, because they belong to the parent, and forget the watches."""
    global _has_forked
    _has_forked = False  # no other process has copies of the loops that are made in this one
    for watch in _live_watches():
        watch._close_in_child()
    _watches.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
