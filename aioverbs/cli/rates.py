"""PURE: samples of a process as they come over its socket, and what happened between two of them, per second."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["COUNTERS", "Branch", "Report", "Sample", "Thing", "report"]

# What is counted of each kind of resource, and from which of its statistics: added up.
COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "QueuePair": {
        "operations": ("sends.completed", "receives.completed"),
        "bytes": ("sends.bytes",),
        "doorbells": ("sends.doorbells", "receives.doorbells"),
    },
    "SharedReceiveQueue": {"operations": ("completed",)},
    "CompletionQueue": {"completions": ("completions",), "wakeups": ("wakeups",)},
}
_DEEPEST = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Thing:
    """A resource, in a sample."""

    id: int
    kind: str
    label: str
    state: str
    owner: str | None
    created: str
    native: bool | None
    statistics: dict[str, object]
    children: tuple["Thing", ...]

    def number(self, path: str) -> int:
        """One of its statistics; 0 where it has none of that name."""
        found: object = self.statistics
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, int) else 0

    def counts(self) -> dict[str, int]:
        """What is counted of its kind."""
        of = COUNTERS.get(self.kind, {})
        return {name: sum(self.number(path) for path in paths) for name, paths in of.items()}

    def all(self) -> Iterator["Thing"]:
        """It and all that was made from it."""
        yield self
        for child in self.children:
            yield from child.all()


@dataclass(frozen=True)
class Sample:
    """What a process said of itself at one moment."""

    time_ns: int
    truncated: bool
    devices: tuple[Thing, ...]

    @classmethod
    def parse(cls, line: bytes) -> "Sample":
        """Of a line.

        :raises ValueError: it is no sample.
        """
        try:
            told = json.loads(line)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        told = _checked(told, dict, "a sample")
        devices = tuple(_thing(each, 0) for each in _checked(told.get("devices"), list, "devices"))
        time_ns = _checked(told.get("time_ns"), int, "time_ns")
        return cls(time_ns, _checked(told.get("truncated"), bool, "truncated"), devices)

    def all(self) -> Iterator[Thing]:
        """All resources."""
        for device in self.devices:
            yield from device.all()


def _checked(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what} is {type(value).__name__}, and not {kind.__name__}")
    return value


def _text(value: object, what: str) -> str:
    """Without what moves a terminal's cursor."""
    return "".join(each if each.isprintable() else "�" for each in _checked(value, str, what))


def _thing(value: object, depth: int) -> Thing:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deep")
    told = _checked(value, dict, "a resource")
    owner, native, statistics = told.get("owner"), told.get("native"), told.get("statistics")
    return Thing(
        _checked(told.get("id"), int, "id"),
        _text(told.get("kind"), "kind"),
        _text(told.get("label"), "label"),
        _text(told.get("state"), "state"),
        _text(owner, "owner") if owner is not None else None,
        _text(told.get("created"), "created"),
        _checked(native, bool, "native") if native is not None else None,
        _checked(statistics, dict, "statistics") if statistics is not None else {},
        tuple(_thing(child, depth + 1) for child in _checked(told.get("children"), list, "children")),
    )


@dataclass(frozen=True)
class Branch:
    """A resource, and its counters per second.

    :param rates: None where they are not known: it was not there in the sample before.
    """

    thing: Thing
    rates: dict[str, float] | None
    children: tuple["Branch", ...]


@dataclass(frozen=True)
class Report:
    """A sample, and what happened since the one before.

    :param seconds: between them; None: there was none before.
    :param totals: the counters of all resources per second.
    """

    sample: Sample
    seconds: float | None
    devices: tuple[Branch, ...]
    totals: dict[str, float] = field(default_factory=dict)


_TOTALS = tuple(dict.fromkeys(name for counters in COUNTERS.values() for name in counters))


def report(sample: Sample, before: Sample | None) -> Report:
    """What happened between two samples, the later one first."""
    seconds = (sample.time_ns - before.time_ns) / 1e9 if before is not None else 0.0
    known = {thing.id: thing.counts() for thing in before.all()} if before is not None and seconds > 0 else {}
    devices = tuple(_branch(each, known, seconds) for each in sample.devices)
    totals = dict.fromkeys(_TOTALS, 0.0)
    waiting = list(devices)
    for branch in waiting:
        waiting.extend(branch.children)
        for name, rate in (branch.rates or {}).items():
            totals[name] += rate
    return Report(sample, seconds if seconds > 0 else None, devices, totals)


def _branch(thing: Thing, known: dict[int, dict[str, int]], seconds: float) -> Branch:
    earlier = known.get(thing.id)
    rates = None
    if earlier is not None:
        rates = {name: max(0, count - earlier.get(name, 0)) / seconds for name, count in thing.counts().items()}
    return Branch(thing, rates, tuple(_branch(child, known, seconds) for child in thing.children))
