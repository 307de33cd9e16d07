"""Table of `aioverbs top`: rates and the tree of resources."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aioverbs.cli.rates import Report, ResourceRates, ResourceSample

__all__ = ["quantity", "view"]

_RATES = {"operations": "OPS/S", "bytes": "BYTES/S", "completions": "COMPL/S", "wakeups": "WAKE/S"}
_STATES = {"open": "green", "closing": "yellow", "opening": "yellow", "failed": "red"}


def quantity(value: float) -> str:
    """Return a number as text with at most three digits and a decimal unit prefix up to T, such as ``"12.3k"``. Only
    numbers of 1,000T or more have more digits.
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.{0 if value >= 99.95 or value == int(value) else 1}f}"


def view(pid: int, program: str, report: Report, *, note: str | None = None) -> Group:
    """Return a report as a rich renderable: a heading with the total rates, and a table of resources.

    :param pid: process ID.
    :param program: the process's command line.
    :param report: the report to show.
    :param note: a line to show above the table; None to show none.
    """
    parts: list[Text | Table] = [Text.assemble((f"{pid}", "bold"), f"  {program}", no_wrap=True, overflow="ellipsis")]
    if report.seconds is not None:
        rates = "  ".join(f"{quantity(report.totals[name])} {text.lower()}" for name, text in _RATES.items())
        parts.append(Text(rates, "cyan"))
    if note is not None:
        parts.append(Text(note, "yellow"))
    if report.sample.truncated:
        parts.append(Text("not all resources are shown: there are too many", "yellow"))
    if report.devices:
        parts.append(_table(report))
    else:
        parts.append(Text("no device is open"))
    return Group(*parts)


def _table(report: Report) -> Table:
    """Return a table of all devices and the resources created from them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("RESOURCE", no_wrap=True)
    table.add_column("STATE")
    for title in _RATES.values():
        table.add_column(title, justify="right")
    table.add_column("IN FLIGHT", justify="right")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for device in report.devices:
        for row in _rows(device, "", ""):
            table.add_row(*row)
    return table


def _rows(node: ResourceRates, stem: str, below: str) -> Iterator[tuple[str | Text, ...]]:
    """Yield a tuple of cells for a resource's row, then one for each row of its descendants.

    Descendants without a row of their own share one row for each kind, with their number; the tuple of such a row has
    only two cells.

    :param stem: tree lines to draw in front of the resource's name.
    :param below: tree lines to draw in front of the names of its descendants.
    """
    resource = node.resource
    name = Text.assemble((stem, "dim"), resource.kind, (f" {resource.label}" if resource.label else "", "bold"))
    state = Text(resource.state, _STATES.get(resource.state, ""))
    yield name, state, *_numbers(node), _in_flight(resource), Text(_details(resource), "dim")
    single = [child for child in node.children if _has_own_row(child)]
    plain = Counter(child.resource.kind for child in node.children if not _has_own_row(child))
    last = len(single) + len(plain) - 1
    for index, child in enumerate(single):
        yield from _rows(child, below + ("└ " if index == last else "├ "), below + ("  " if index == last else "│ "))
    for index, (kind, count) in enumerate(plain.items(), len(single)):
        yield Text.assemble((below + ("└ " if index == last else "├ "), "dim"), f"{count:,} {kind}"), ""


def _has_own_row(node: ResourceRates) -> bool:
    """Return whether a resource gets a row of its own: whether it has children, statistics of its own, or a known value
    of `ResourceSample.native`. Other resources are only counted, in one row for each kind.
    """
    return bool(node.children or set(node.resource.statistics) - {"children"} or node.resource.native is not None)


def _numbers(node: ResourceRates) -> Iterator[str]:
    """Yield each rate in `_RATES` as a string, which is empty if the resource has no such rate."""
    for name in _RATES:
        rate = (node.rates or {}).get(name)
        yield quantity(rate) if rate is not None else ""


def _in_flight(resource: ResourceSample) -> str:
    """Return as text how many operations are in flight, buffers in use or calls running; an empty string for kinds of
    resource that have none of these.
    """
    match resource.kind:
        case "QueuePair":
            return f"{resource.statistic('sends.in_flight') + resource.statistic('receives.in_flight'):,}"
        case "CompletionQueue" | "SharedReceiveQueue":
            return f"{resource.statistic('in_flight'):,} of {resource.statistic('depth'):,}"
        case "BufferPool":
            in_use = resource.statistic("leased") + resource.statistic("under_dma")
            return f"{in_use:,} of {in_use + resource.statistic('free'):,}"
        case "WorkerPool":
            return f"{sum(worker.get('calls', 0) for worker in _workers(resource)):,}"
    return ""


def _details(resource: ResourceSample) -> str:
    """Return the text of the last column: whether the resource is native, and the numbers of failed and queued
    operations, waiting tasks and workers.
    """
    parts = []
    if resource.native is not None:
        parts.append("native" if resource.native else "not native")
    if resource.kind == "QueuePair":
        failed = sum(_failed(resource, "sends") + _failed(resource, "receives"))
        parts += [f"{failed:,} failed"] if failed else []
        queued = resource.statistic("sends.queued") + resource.statistic("receives.queued")
        parts += [f"{queued:,} queued"] if queued else []
    if resource.kind == "BufferPool" and resource.statistic("waiting"):
        parts.append(f"{resource.statistic('waiting'):,} wait for a buffer")
    if resource.kind == "WorkerPool":
        parts.append(f"{len(_workers(resource))} workers")
    return ", ".join(parts)


def _workers(resource: ResourceSample) -> list[dict[str, int]]:
    """Return the statistics of each worker of a pool; an empty list if they are missing."""
    found = resource.statistics.get("workers")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _failed(resource: ResourceSample, queue: str) -> list[int]:
    """Return a list with the number of failed operations for each completion status.

    :param queue: ``"sends"`` or ``"receives"``.
    """
    statistics = resource.statistics.get(queue)
    failed = statistics.get("failed") if isinstance(statistics, dict) else None
    pairs = failed if isinstance(failed, list) else []
    return [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)]
