"""Forks of this process: what a child has of its parent is told apart, and locks are free there."""

import os
import weakref
from typing import Protocol

__all__ = ["Locked", "renew_lock_in_children"]

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


def _forked() -> None:
    global count
    count += 1
    for locked in _locked:
        locked._renew_lock()


os.register_at_fork(after_in_child=_forked)
