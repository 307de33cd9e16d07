"""What all open devices of this process are at, at one moment, as values that JSON has.

It is read by a thread that owns nothing. What it reads is anybody's to read: the tree of resources, and statistics,
which are counts that no verb is called for. No locks but those of statistics are taken, and those for moments only.
"""

import itertools
import json
import time
import weakref
from collections.abc import Iterator

from aioverbs._lifecycle.lifecycle import CLOSED, Lifecycle
from aioverbs._lifecycle.resource import Resource, lifecycle_of
from aioverbs._monitoring.jsonable import plain
from aioverbs.errors import ClosedResourceError

__all__ = ["MOST", "encoded", "remember", "sample"]

MOST = 10_000  # resources in a sample
_BREATH = 32  # resources, after which others are let in who wait for the interpreter

_devices: dict[int, weakref.ref[Resource]] = {}  # by their numbers; changed by single operations, which are atomic


def remember(device: Resource) -> None:
    """Have samples tell of a device, as long as it is open."""
    number = lifecycle_of(device).serial
    _devices[number] = weakref.ref(device, lambda _: _devices.pop(number, None))


def _open_devices() -> Iterator[Resource]:
    for number, reference in tuple(_devices.items()):
        device = reference()
        if device is not None and not device.closed:
            yield device
        else:
            _devices.pop(number, None)


def sample() -> dict[str, object]:
    """The trees of all open devices of this process.

    Each resource has a number (``id``), ``kind``, ``label``, ``state``, ``owner``, the line that it was opened at
    (``created``), whether it is ``native`` where it is of those that may be, its ``statistics`` and its ``children``.

    ``time_ns`` is of a clock that never goes back. Where there are more than `MOST` resources the rest is left out, and
    ``truncated`` is true.
    """
    room = _Room(MOST)
    trees = [_tree(lifecycle_of(device), room) for device in _open_devices()]
    return {"time_ns": time.monotonic_ns(), "truncated": room.left < 0, "devices": trees}


def encoded(told: dict[str, object]) -> str:
    """A sample as JSON, on one line, made in pieces: a large one in one piece would keep all other threads waiting."""
    trees, number = told["devices"], itertools.count()
    assert isinstance(trees, list)
    rest = _dumped({name: value for name, value in told.items() if name != "devices"})
    return f'{rest[:-1]},"devices":[{",".join(_encoded(tree, number) for tree in trees)}]}}'


def _encoded(tree: dict[str, object], number: Iterator[int]) -> str:
    _let_others(next(number))
    children = tree["children"]
    assert isinstance(children, list)
    own = _dumped({name: value for name, value in tree.items() if name != "children"})
    return f'{own[:-1]},"children":[{",".join(_encoded(child, number) for child in children)}]}}'


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _let_others(number: int) -> None:
    if not number % _BREATH:
        time.sleep(0)


class _Room:
    """For so many resources."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


def _tree(root: Lifecycle, room: _Room) -> dict[str, object]:
    # Not recursive: nobody's tree is deep, but the thread's stack is no concern of anybody's either.
    found, children = _node(root)
    room.take()
    waiting = [(root, children)]
    for lifecycle, branch in waiting:
        for child in tuple(lifecycle.children.values()):
            if child.parents[:1] != (lifecycle,) or child.state is CLOSED:  # it is with the first of its parents
                continue
            if not room.take():
                return found
            _let_others(room.left)
            node, below = _node(child)
            branch.append(node)
            waiting.append((child, below))
    return found


def _node(lifecycle: Lifecycle) -> tuple[dict[str, object], list[dict[str, object]]]:
    user = lifecycle.user()
    children: list[dict[str, object]] = []
    return {
        "id": lifecycle.serial,
        "kind": lifecycle.kind,
        "label": lifecycle.label,
        "state": lifecycle.state.value,
        "owner": repr(lifecycle.owner) if lifecycle.owner is not None else None,
        "created": lifecycle.created,
        "native": getattr(user, "native", None),
        "statistics": plain(_statistics(user)),
        "children": children,
    }, children


def _statistics(user: object) -> object:
    """None where its user has forgotten it, or it is being closed."""
    if not isinstance(user, Resource):
        return None
    try:
        # A device would ask its verbs object for counts. Who closes that just now must not find somebody inside.
        return user.statistics() if lifecycle_of(user).parents else Resource.statistics(user)
    except ClosedResourceError:
        return None
