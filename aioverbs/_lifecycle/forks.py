"""Support of forks: recognizing objects of the parent, renewing locks, and not sharing connections with a child."""

import os
import socket
import weakref
from typing import Protocol

__all__ = ["HasFileno", "HasLock", "keep_from_children", "renew_lock_in_children"]

count = 0
"""Number of forks that led to this process. An object that recorded a different count was made before the last one."""


class HasLock(Protocol):
    """Object that has a lock and is also used in forked children."""

    def _renew_lock(self) -> None:
        """Replace the lock with a new one in a forked child: a thread that held the old one does not exist there."""


_with_locks: "weakref.WeakSet[HasLock]" = weakref.WeakSet()


def renew_lock_in_children(with_lock: HasLock) -> None:
    """Register an object, so that its method ``_renew_lock`` is called in each child that is forked from now on.

    The object is referenced only weakly.
    """
    _with_locks.add(with_lock)


class HasFileno(Protocol):
    """Object with a file descriptor, such as a socket."""

    def fileno(self) -> int:
        """Return the number of the file descriptor; -1 if the object is closed."""


_not_for_children: "weakref.WeakSet[HasFileno]" = weakref.WeakSet()
_idle_peer: socket.socket | None = None  # other end of the idle socket that replaces descriptors in a child


def keep_from_children(with_descriptor: HasFileno) -> None:
    """Register an object, so that each child that is forked from now on replaces its descriptor with an idle socket.

    The kernel reports the end of a connection to the peer only after every process has closed its descriptor, so a
    child that keeps the descriptor would hide the end of the parent from the peer. The child cannot just close the
    descriptor: its copy of the event loop still uses the number, which the next file to be opened would get. The copy
    of the loop cannot remove the descriptor from the epoll set either, because parent and child share that set; the
    idle socket is not in it.

    :param with_descriptor: object with a file descriptor, which is referenced only weakly.
    """
    _not_for_children.add(with_descriptor)


def _after_fork_in_child() -> None:
    """Count the fork, and replace the locks and descriptors of registered objects. Python calls this in a forked child.

    :raises OSError: no socket pair can be created, and the descriptors are not replaced. Python passes the exception to
        ``sys.unraisablehook``, and the child continues.
    """
    global count
    count += 1
    for with_lock in _with_locks:
        with_lock._renew_lock()
    _replace_descriptors()


def _replace_descriptors() -> None:
    """Replace the descriptor of each object that `keep_from_children` has registered: an idle socket gets its number.

    :raises OSError: no socket pair can be created. In this case no descriptor is replaced.
    """
    global _idle_peer
    numbers = [number for with_descriptor in _not_for_children if (number := with_descriptor.fileno()) >= 0]
    _not_for_children.clear()  # in this process these are idle sockets now, which its own children may have
    if not numbers:
        return
    idle, _idle_peer = socket.socketpair()
    idle.setblocking(False)  # the copy of the loop reads it when the parent's connection is readable
    with idle:
        for number in numbers:
            os.dup2(idle.fileno(), number, inheritable=False)


os.register_at_fork(after_in_child=_after_fork_in_child)
