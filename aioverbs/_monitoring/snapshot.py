"""Snapshots of all open devices of this process and their resources, as JSON-compatible values.

The thread that takes a snapshot owns no resource. It reads only data that any thread may read: the resource tree, and
statistics that need no verb. The only locks that it takes are those of statistics, each for a moment.
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

MAX_RESOURCES = 10_000  # maximum number of resources in a sample
_YIELD_INTERVAL = 32  # number of resources after which other threads may take the GIL

_devices: dict[int, weakref.ref[Resource]] = {}  # by serial number; changed by single, atomic operations


def register_device(device: Resource) -> None:
    """Include a device in samples for as long as it is open and its object exists."""
    number = lifecycle_of(device).serial
    _devices[number] = weakref.ref(device, lambda _: _devices.pop(number, None))


def _open_devices() -> Iterator[Resource]:
    """Yield the open devices of this process; unregister those that are closed or were garbage-collected."""
    for number, reference in tuple(_devices.items()):
        device = reference()
        if device is not None and not device.closed:
            yield device
        else:
            _devices.pop(number, None)


def sample() -> dict[str, object]:
    """Return a snapshot of all open devices of this process: a dict of JSON-compatible values.

    This can be called from any thread.

    The keys are ``devices``, a list of resources; ``time_ns``; and ``truncated``. Each resource has a number (``id``),
    ``kind``, ``label``, ``state``, ``owner``, the file and line in which it was created (``created``), ``native`` (True
    or False for resources that can be native, otherwise None), ``statistics`` and ``children``.

    ``time_ns`` is the time of a monotonic clock in nanoseconds. If there are more than `MAX_RESOURCES` resources, the
    rest is left out, and ``truncated`` is True.
    """
    budget = _Budget(MAX_RESOURCES)
    trees = [_tree(lifecycle_of(device), budget) for device in _open_devices()]
    return {"time_ns": time.monotonic_ns(), "truncated": budget.left < 0, "devices": trees}


def encode(sampled: dict[str, object]) -> str:
    """Encode a sample as one line of JSON, in pieces, so that a large sample does not hold the GIL for long.

    :param sampled: result of `sample`.
    :returns: the line as text, without a newline.
    """
    trees, number = sampled["devices"], itertools.count()
    assert isinstance(trees, list)
    rest = _dump({name: value for name, value in sampled.items() if name != "devices"})
    return f'{rest[:-1]},"devices":[{",".join(_encode_tree(tree, number) for tree in trees)}]}}'


def _encode_tree(tree: dict[str, object], number: Iterator[int]) -> str:
    """Return a resource and the resources created from it as JSON text.

    :param tree: the resource as a dict.
    :param number: counter of the resources that have been encoded, for `_yield_gil`.
    """
    _yield_gil(next(number))
    children = tree["children"]
    assert isinstance(children, list)
    own = _dump({name: value for name, value in tree.items() if name != "children"})
    return f'{own[:-1]},"children":[{",".join(_encode_tree(child, number) for child in children)}]}}'


def _dump(value: object) -> str:
    """Return a value as JSON text without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _yield_gil(number: int) -> None:
    """Let other threads take the GIL if ``number`` is a multiple of 32; otherwise do nothing."""
    if not number % _YIELD_INTERVAL:
        time.sleep(0)


class _Budget:
    """Number of resources that the sample has space for."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> bool:
        """Reserve space for one resource in the sample.

        :returns: True if there was space; False if there was none.
        """
        self.left -= 1
        return self.left >= 0


def _tree(root: Lifecycle, budget: _Budget) -> dict[str, object]:
    """Return a resource, and the resources created from it as far as the budget allows, as a dict of JSON-compatible
    values.
    """
    # Not recursive, so that the depth of the tree does not matter to the stack of the thread.
    tree, children = _node(root)
    budget.take()
    queue = [(root, children)]
    for lifecycle, branch in queue:
        for child in tuple(lifecycle.children.values()):
            if child.parents[:1] != (lifecycle,) or child.state is CLOSED:  # listed under its first parent only
                continue
            if not budget.take():
                return tree
            _yield_gil(budget.left)
            node, below = _node(child)
            branch.append(node)
            queue.append((child, below))
    return tree


def _node(lifecycle: Lifecycle) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Convert a resource to a dict of JSON-compatible values.

    :returns: a tuple of the dict and the list under its key ``children``, which is empty. The caller adds the resources
        created from this one to that list.
    :raises TypeError: JSON has no type for a value in the statistics of the resource.
    """
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
    """Return the statistics object that the method ``statistics`` of a resource returns; for a device, only a
    `ResourceStatistics` with the number of its children.

    Return None if the resource's object was garbage-collected or is being closed.
    """
    if not isinstance(user, Resource):
        return None
    try:
        # Device.statistics() calls into the device handle, which another thread may be closing; only count children.
        return user.statistics() if lifecycle_of(user).parents else Resource.statistics(user)
    except ClosedResourceError:
        return None
