"""Forks of this process: a child tells apart what it has of its parent, finds locks free, and keeps no peer waiting."""

import os
import socket
import weakref
from typing import Protocol

__all__ = ["HasFileno", "HasLock", "keep_from_children", "renew_lock_in_children"]

count = 0
"""How many forks lead to this process: what remembers another count was made before the last of them."""


class HasLock(Protocol):
    """What has a lock of its own, and is used in children, too."""

    def _renew_lock(self) -> None:
        """Have a new lock: who held the old one, if anybody did, is not in this process."""


_with_locks: "weakref.WeakSet[HasLock]" = weakref.WeakSet()


def renew_lock_in_children(with_lock: HasLock) -> None:
    """Have it renew its lock in each child that is forked from now on."""
    _with_locks.add(with_lock)


class HasFileno(Protocol):
    """Anything with a descriptor: a socket, or what has one."""

    def fileno(self) -> int:
        """Return the number of the descriptor; -1 where it is closed."""


_not_for_children: "weakref.WeakSet[HasFileno]" = weakref.WeakSet()
_idle_peer: socket.socket | None = None  # of the idle socket that a child has in the place of what it does not get


def keep_from_children(with_descriptor: HasFileno) -> None:
    """Have its descriptor lead to an idle socket in each child that is forked from now on.

    The kernel tells a peer of the end of a process when nobody has the connection any more, and a child would. To close
    it there is no way: the child has a copy of the loop, which uses the number, and would use it for what gets it next.
    Nor may the copy take it from what the kernel watches, which is one set for both; of an idle socket that set has
    nothing.
    """
    _not_for_children.add(with_descriptor)


def _after_fork_in_child() -> None:
    global count
    count += 1
    for with_lock in _with_locks:
        with_lock._renew_lock()
    _replace_descriptors()


def _replace_descriptors() -> None:
    global _idle_peer
    numbers = [number for with_descriptor in _not_for_children if (number := with_descriptor.fileno()) >= 0]
    _not_for_children.clear()  # children of this process do not have them
    if not numbers:
        return
    idle, _idle_peer = socket.socketpair()
    with idle:
        for number in numbers:
            os.dup2(idle.fileno(), number, inheritable=False)


os.register_at_fork(after_in_child=_after_fork_in_child)
