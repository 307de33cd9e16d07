"""What `aioverbs top` shows: rates, and the tree of resources, as a table."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aioverbs.cli.rates import Branch, Report, Thing

__all__ = ["quantity", "view"]

_RATES = {"operations": "OPS/S", "bytes": "BYTES/S", "completions": "COMPL/S", "wakeups": "WAKE/S"}
_STATES = {"open": "green", "closing": "yellow", "opening": "yellow", "failed": "red"}


def quantity(value: float) -> str:
    """A number in three digits: ``"12.3k"``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.{0 if value >= 99.95 or value == int(value) else 1}f}"


def view(pid: int, program: str, report: Report, *, note: str | None = None) -> Group:
    """All of it.

    :param note: what there is to say of it now.
    """
    parts: list[Text | Table] = [Text.assemble((f"{pid}", "bold"), f"  {program}", no_wrap=True, overflow="ellipsis")]
    if report.seconds is not None:
        rates = "  ".join(f"{quantity(report.totals[name])} {text.lower()}" for name, text in _RATES.items())
        parts.append(Text(rates, "cyan"))
    if note is not None:
        parts.append(Text(note, "yellow"))
    if report.sample.truncated:
        parts.append(Text("there are more resources than are shown", "yellow"))
    if report.devices:
        parts.append(_table(report))
    else:
        parts.append(Text("no device is open"))
    return Group(*parts)


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("RESOURCE", no_wrap=True)
    table.add_column("STATE")
    for title in _RATES.values():
        table.add_column(title, justify="right")
    table.add_column("UNDER WAY", justify="right")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for device in report.devices:
        for row in _rows(device, "", ""):
            table.add_row(*row)
    return table


def _rows(branch: Branch, stem: str, below: str) -> Iterator[tuple[str | Text, ...]]:
    thing = branch.thing
    name = Text.assemble((stem, "dim"), thing.kind, (f" {thing.label}" if thing.label else "", "bold"))
    state = Text(thing.state, _STATES.get(thing.state, ""))
    yield name, state, *_numbers(branch), _in_flight(thing), Text(_details(thing), "dim")
    single = [child for child in branch.children if _has_more(child)]
    plain = Counter(child.thing.kind for child in branch.children if not _has_more(child))
    last = len(single) + len(plain) - 1
    for index, child in enumerate(single):
        yield from _rows(child, below + ("└ " if index == last else "├ "), below + ("  " if index == last else "│ "))
    for index, (kind, count) in enumerate(plain.items(), len(single)):
        yield Text.assemble((below + ("└ " if index == last else "├ "), "dim"), f"{count:,} {kind}"), ""


def _has_more(branch: Branch) -> bool:
    """Whether there is more to say of it than how many of its kind there are."""
    return bool(branch.children or set(branch.thing.statistics) - {"children"} or branch.thing.native is not None)


def _numbers(branch: Branch) -> Iterator[str]:
    for name in _RATES:
        rate = (branch.rates or {}).get(name)
        yield quantity(rate) if rate is not None else ""


def _in_flight(thing: Thing) -> str:
    match thing.kind:
        case "QueuePair":
            return f"{thing.number('sends.in_flight') + thing.number('receives.in_flight'):,}"
        case "CompletionQueue" | "SharedReceiveQueue":
            return f"{thing.number('in_flight'):,} of {thing.number('depth'):,}"
        case "BufferPool":
            away = thing.number("leased") + thing.number("under_dma")
            return f"{away:,} of {away + thing.number('free'):,}"
        case "WorkerPool":
            return f"{sum(worker.get('calls', 0) for worker in _workers(thing)):,}"
    return ""


def _details(thing: Thing) -> str:
    parts = []
    if thing.native is not None:
        parts.append("native" if thing.native else "not native")
    if thing.kind == "QueuePair":
        failed = sum(_failed(thing, "sends") + _failed(thing, "receives"))
        parts += [f"{failed:,} failed"] if failed else []
        queued = thing.number("sends.queued") + thing.number("receives.queued")
        parts += [f"{queued:,} wait for a place"] if queued else []
    if thing.kind == "BufferPool" and thing.number("waiting"):
        parts.append(f"{thing.number('waiting'):,} wait for a buffer")
    if thing.kind == "WorkerPool":
        parts.append(f"{len(_workers(thing))} workers")
    return ", ".join(parts)


def _workers(thing: Thing) -> list[dict[str, int]]:
    found = thing.statistics.get("workers")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _failed(thing: Thing, queue: str) -> list[int]:
    of = thing.statistics.get(queue)
    failed = of.get("failed") if isinstance(of, dict) else None
    pairs = failed if isinstance(failed, list) else []
    return [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)]
