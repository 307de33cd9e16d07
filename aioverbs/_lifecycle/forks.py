"""Forks of this process: a child tells apart what it has of its parent, finds locks free, and keeps no peer waiting."""

import os
import socket
import weakref
from typing import Protocol

__all__ = ["Described", "Locked", "keep_from_children", "renew_lock_in_children"]

count = 0
"""How many forks lead to this process: what remembers another count was made before the last of them."""


class Locked(Protocol):
    """What has a lock of its own, and is used in children, too."""

    def _renew_lock(self) -> None:
        """Have a new lock: who held the old one, if anybody did, is not in this process."""


_locked: "weakref.WeakSet[Locked]" = weakref.WeakSet()


def renew_lock_in_children(locked: Locked) -> None:
    """Have it renew its lock in each child that is forked from now on."""
    _locked.add(locked)


class Described(Protocol):
    """Anything with a descriptor: a socket, or what has one."""

    def fileno(self) -> int:
        """Return the number of the descriptor; -1 where it is closed."""


_kept: "weakref.WeakSet[Described]" = weakref.WeakSet()
_far_end: socket.socket | None = None  # of the idle socket that a child has in the place of what it does not get


def keep_from_children(described: Described) -> None:
    """Have its descriptor lead to an idle socket in each child that is forked from now on.

    The kernel tells a peer of the end of a process when nobody has the connection any more, and a child would. To close
    it there is no way: the child has a copy of the loop, which uses the number, and would use it for what gets it next.
    Nor may the copy take it from what the kernel watches, which is one set for both; of an idle socket that set has
    nothing.
    """
    _kept.add(described)


def _forked() -> None:
    global count
    count += 1
    for locked in _locked:
        locked._renew_lock()
    _let_go()


def _let_go() -> None:
    global _far_end
    numbers = [number for described in _kept if (number := described.fileno()) >= 0]
    _kept.clear()  # children of this process do not have them
    if not numbers:
        return
    idle, _far_end = socket.socketpair()
    with idle:
        for number in numbers:
            os.dup2(idle.fileno(), number, inheritable=False)


os.register_at_fork(after_in_child=_forked)
