"""Forks of this process: what a child has of its parent is told apart."""

import os

count = 0
"""How many forks lead to this process: what remembers another count was made before the last of them."""


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
