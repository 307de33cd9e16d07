"""PURE: samples of a watched process, parsed from its socket, and the rates between two samples."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["COUNTERS", "Report", "ResourceRates", "ResourceSample", "Sample", "report"]

# Counters of each kind of resource, and the statistics whose sum they are.
COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "QueuePair": {
        "operations": ("sends.completed", "receives.completed"),
        "bytes": ("sends.bytes",),
        "doorbells": ("sends.doorbells", "receives.doorbells"),
    },
    "SharedReceiveQueue": {"operations": ("completed",)},
    "CompletionQueue": {"completions": ("completions",), "wakeups": ("wakeups",)},
}
_MAX_DEPTH = 64

T = TypeVar("T")


@dataclass(frozen=True)
class ResourceSample:
    """A resource in a sample. Made by `Sample.parse`.

    :param id: identity of the resource within the process.
    :param kind: class name, such as ``"QueuePair"``.
    :param label: text that identifies the resource among others of its kind; may be empty.
    :param state: state of the resource, such as ``"open"``.
    :param owner: the resource's owner; None if unknown.
    :param created: file and line in which it was created.
    :param native: whether the device implements the resource; None if that does not apply.
    :param statistics: the resource's counters; empty if its kind has none.
    :param children: resources created from this one.
    """

    id: int
    kind: str
    label: str
    state: str
    owner: str | None
    created: str
    native: bool | None
    statistics: dict[str, object]
    children: tuple["ResourceSample", ...]

    def statistic(self, path: str) -> int:
        """Return the integer at a dotted path in the statistics, such as ``sends.completed``; 0 if there is none."""
        found: object = self.statistics
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, int) else 0

    def counts(self) -> dict[str, int]:
        """Return the values of the `COUNTERS` of this kind of resource by name; an empty dict if the kind has none."""
        counters = COUNTERS.get(self.kind, {})
        return {name: sum(self.statistic(path) for path in paths) for name, paths in counters.items()}

    def walk(self) -> Iterator["ResourceSample"]:
        """Yield this `ResourceSample` and those of all descendants, each before its own descendants."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Sample:
    """Snapshot of a process's resources. Made by `Sample.parse`.

    :param time_ns: the process's monotonic clock, in nanoseconds.
    :param truncated: whether resources are missing because there are too many.
    :param devices: the open devices.
    """

    time_ns: int
    truncated: bool
    devices: tuple[ResourceSample, ...]

    @classmethod
    def parse(cls, line: bytes) -> "Sample":
        """Parse a line of JSON.

        :returns: the sample. Unprintable characters in the strings of its resources are replaced, except in statistics.
        :raises ValueError: the line is not JSON, or not a valid sample.
        """
        try:
            fields = json.loads(line)
        except RecursionError as error:
            raise ValueError("the sample is nested too deep") from error
        fields = _checked(fields, dict, "a sample")
        devices = tuple(_parse_resource(each, 0) for each in _checked(fields.get("devices"), list, "devices"))
        time_ns = _checked(fields.get("time_ns"), int, "time_ns")
        return cls(time_ns, _checked(fields.get("truncated"), bool, "truncated"), devices)

    def walk(self) -> Iterator[ResourceSample]:
        """Yield a `ResourceSample` for each resource: each device, followed by its descendants."""
        for device in self.devices:
            yield from device.walk()


def _checked(value: Any, kind: type[T], name: str) -> T:
    """Return a value unchanged after checking its type.

    :param value: the value.
    :param kind: type that the value must have; a bool does not count as an int.
    :param name: name of the field, for the error message.
    :raises ValueError: the value has a different type.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value


def _text(value: object, name: str) -> str:
    """Return a string with unprintable characters replaced, so that a watched process cannot control the terminal.

    :param value: the string.
    :param name: name of the field, for the error message.
    :raises ValueError: the value is not a string.
    """
    return "".join(each if each.isprintable() else "�" for each in _checked(value, str, name))


def _parse_resource(value: object, depth: int) -> ResourceSample:
    """Build a `ResourceSample`, including its descendants, from decoded JSON and return it.

    :param value: the decoded JSON of the resource.
    :param depth: number of the resource's ancestors.
    :raises ValueError: a field is missing or invalid, or a resource has more than 64 ancestors.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("the sample is nested too deep")
    fields = _checked(value, dict, "a resource")
    owner, native, statistics = fields.get("owner"), fields.get("native"), fields.get("statistics")
    return ResourceSample(
        _checked(fields.get("id"), int, "id"),
        _text(fields.get("kind"), "kind"),
        _text(fields.get("label"), "label"),
        _text(fields.get("state"), "state"),
        _text(owner, "owner") if owner is not None else None,
        _text(fields.get("created"), "created"),
        _checked(native, bool, "native") if native is not None else None,
        _checked(statistics, dict, "statistics") if statistics is not None else {},
        tuple(_parse_resource(child, depth + 1) for child in _checked(fields.get("children"), list, "children")),
    )


@dataclass(frozen=True)
class ResourceRates:
    """Rates of a resource. Made by `report`.

    :param resource: the resource in the later sample.
    :param rates: counters per second, by the names in `COUNTERS`; None if the resource was not in the previous sample,
        or if there is no earlier sample.
    :param children: rates of the resources created from this one.
    """

    resource: ResourceSample
    rates: dict[str, float] | None
    children: tuple["ResourceRates", ...]


@dataclass(frozen=True)
class Report:
    """A sample, and the rates since the previous sample. Made by `report`.

    :param sample: the later sample.
    :param seconds: time between the two samples; None if there is no previous sample or no time has passed since.
    :param devices: rates of the open devices and their descendants.
    :param totals: sums of the counters of all resources, per second.
    """

    sample: Sample
    seconds: float | None
    devices: tuple[ResourceRates, ...]
    totals: dict[str, float] = field(default_factory=dict)


_TOTALS = tuple(dict.fromkeys(name for counters in COUNTERS.values() for name in counters))


def report(sample: Sample, before: Sample | None) -> Report:
    """Compute the rates between two samples.

    :param sample: the later sample.
    :param before: the previous sample of the same process; None if there is none.
    :returns: a report with the rates. If there is no previous sample, or no time has passed since,
        `ResourceRates.rates` is None and the totals are 0.
    """
    seconds = (sample.time_ns - before.time_ns) / 1e9 if before is not None else 0.0
    earlier_counts = (
        {resource.id: resource.counts() for resource in before.walk()} if before is not None and seconds > 0 else {}
    )
    devices = tuple(_resource_rates(each, earlier_counts, seconds) for each in sample.devices)
    totals = dict.fromkeys(_TOTALS, 0.0)
    pending = list(devices)
    for node in pending:
        pending.extend(node.children)
        for name, rate in (node.rates or {}).items():
            totals[name] += rate
    return Report(sample, seconds if seconds > 0 else None, devices, totals)


def _resource_rates(
    resource: ResourceSample, earlier_counts: dict[int, dict[str, int]], seconds: float
) -> ResourceRates:
    """Return the rates of a resource and its descendants: None for those without earlier counters.

    :param resource: the resource in the later sample.
    :param earlier_counts: counters in the previous sample, by resource ID.
    :param seconds: time between the two samples.
    """
    previous = earlier_counts.get(resource.id)
    rates = None
    if previous is not None:
        rates = {name: max(0, count - previous.get(name, 0)) / seconds for name, count in resource.counts().items()}
    children = tuple(_resource_rates(child, earlier_counts, seconds) for child in resource.children)
    return ResourceRates(resource, rates, children)
