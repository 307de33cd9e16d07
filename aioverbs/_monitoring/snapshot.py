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
from aioverbs._monitoring.jsonable import to_jsonable
from aioverbs.errors import ClosedResourceError

__all__ = ["MAX_RESOURCES", "encode", "register_device", "sample"]

MAX_RESOURCES = 10_000  # resources in a sample
_YIELD_INTERVAL = 32  # resources, after which others are let in who wait for the interpreter

_devices: dict[int, weakref.ref[Resource]] = {}  # by their numbers; changed by single operations, which are atomic


def register_device(device: Resource) -> None:
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
    (``created``), ``native`` (True or False for resources that can be native, else None), ``statistics`` and
    ``children``.

    ``time_ns`` is a time of a monotonic clock. If there are more than `MAX_RESOURCES` resources, the rest is left out,
    and ``truncated`` is True.
    """
    budget = _Budget(MAX_RESOURCES)
    trees = [_tree(lifecycle_of(device), budget) for device in _open_devices()]
    return {"time_ns": time.monotonic_ns(), "truncated": budget.left < 0, "devices": trees}


def encode(sampled: dict[str, object]) -> str:
    """A sample as JSON, on one line, made in pieces: a large one in one piece would keep all other threads waiting."""
    trees, number = sampled["devices"], itertools.count()
    assert isinstance(trees, list)
    rest = _dump({name: value for name, value in sampled.items() if name != "devices"})
    return f'{rest[:-1]},"devices":[{",".join(_encode_tree(tree, number) for tree in trees)}]}}'


def _encode_tree(tree: dict[str, object], number: Iterator[int]) -> str:
    _yield_gil(next(number))
    children = tree["children"]
    assert isinstance(children, list)
    own = _dump({name: value for name, value in tree.items() if name != "children"})
    return f'{own[:-1]},"children":[{",".join(_encode_tree(child, number) for child in children)}]}}'


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _yield_gil(number: int) -> None:
    if not number % _YIELD_INTERVAL:
        time.sleep(0)


class _Budget:
    """For so many resources."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


def _tree(root: Lifecycle, budget: _Budget) -> dict[str, object]:
    # Not recursive: nobody's tree is deep, but the thread's stack is no concern of anybody's either.
    tree, children = _node(root)
    budget.take()
    queue = [(root, children)]
    for lifecycle, branch in queue:
        for child in tuple(lifecycle.children.values()):
            if child.parents[:1] != (lifecycle,) or child.state is CLOSED:  # it is with the first of its parents
                continue
            if not budget.take():
                return tree
            _yield_gil(budget.left)
            node, below = _node(child)
            branch.append(node)
            queue.append((child, below))
    return tree


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
        "statistics": to_jsonable(_statistics(user)),
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
