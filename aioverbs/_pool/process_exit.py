"""Watching a child process for its exit, on an event loop."""

import asyncio
import contextlib
import os
import select
import subprocess
import weakref
from collections.abc import Callable

from aioverbs._lifecycle import forks

__all__ = ["ExitWatch"]

_POLL_S = 1.0  # between two looks at a process in a program that has forked

_has_forked = False  # whether this process has children that have copies of its event loops
_watches: "set[weakref.ref[ExitWatch]]" = set()  # that have begun and are not closed


class ExitWatch:
    """Call a function once when a child process has exited, though another process may keep all its sockets open.

    The event loop polls an epoll instance of the watch, which has the pidfd. A forked child's copy of the loop polls
    the same kernel object as the loop, and a pidfd stays readable: the copy would spin on it until the parent's loop
    has handled it. So before each fork the pidfd is taken out of the epoll instance, which is ready in neither process
    from then on: a copy has nothing to spin on, and no event to take from the parent. Nothing is lost, because after a
    fork the parent needs no event: it asks for the status of the process at intervals.

    Where there is no pidfd (a kernel older than 5.3, a filter of system calls, no more descriptors), nothing is
    watched, and only the ends of the process's sockets tell of its exit.

    :param loop: the running loop, or one whose thread this is.
    :param process: a child of this process, which only `process` itself waits for.
    :param on_exit: called on the loop, unless the watch is closed before.
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

    def start(self) -> None:
        """Begin to watch. Call on the loop."""
        if not hasattr(os, "pidfd_open"):  # CPython that was built with headers of an older kernel
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
        """Stop watching. Call on the loop, or where that runs no more; again and again. Do nothing in a forked child.

        The kernel's object of the loop is one for parent and child, so the child takes nothing out of it.
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
        """Close the watch and call the function if the process has exited, or look again later."""
        if self._is_closed or self._forks != forks.count:
            return
        if self._process.poll() is not None:
            self.close()
            self._on_exit()
            return
        self._disarm()  # for a debugger may have the exit first: the pidfd is readable, and there is no status yet
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_POLL_S, self._poll)

    def _disarm(self) -> None:
        """Have the epoll instance never be ready again. Call from any thread."""
        if (epoll := self._epoll) is not None:
            with contextlib.suppress(OSError, ValueError):  # it was done, or the watch is closed meanwhile
                epoll.unregister(self._pidfd)

    def _poll_after_fork(self) -> None:
        """Look on the loop, and at intervals from there on. Call from any thread.

        A copy of the loop may take what wakes the loop from other threads. uvloop sends that once until it has arrived,
        and would never be woken again: so it is used only where another thread runs the loop, of which no copy can run.
        """
        loop = self._loop
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if loop.is_running() and asyncio._get_running_loop() is not loop:
                loop.call_soon_threadsafe(self._poll)
            else:
                loop.call_soon(self._poll)

    def _close_in_child(self) -> None:
        """Close the pidfd. The epoll instance stays, for the copy of the loop knows its number."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _live_watches() -> "list[ExitWatch]":
    return [watch for ref in tuple(_watches) if (watch := ref()) is not None]


def _before_fork() -> None:
    global _has_forked
    _has_forked = True
    for watch in _live_watches():
        watch._disarm()


def _after_fork_in_parent() -> None:
    for watch in _live_watches():
        watch._poll_after_fork()


def _after_fork_in_child() -> None:
    global _has_forked
    _has_forked = False  # loops that are made here are this process's alone
    for watch in _live_watches():
        watch._close_in_child()
    _watches.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
