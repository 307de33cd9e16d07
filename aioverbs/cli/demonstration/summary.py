"""What came of a demonstration, for people; and as JSON has it, for programs."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aioverbs.cli.demonstration.outcome import Outcome, Transfer
from aioverbs.cli.histogram import Histogram, duration
from aioverbs.cli.inventory import FEATURES
from aioverbs.cli.top_view import quantity, view

__all__ = ["for_programs", "print_summary"]

_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}


def print_summary(out: Console, outcome: Outcome) -> None:
    """Print it."""
    for tree in outcome.trees:
        _head(out, f"what {tree.name} had open, while blocks were read")
        out.print(view(tree.pid, tree.name, tree.report))
    _head(out, "what is native")
    out.print(_native(outcome))
    _head(out, "a call from a wrong loop")
    _print_misuse(out, outcome)
    _head(out, "figures")
    out.print(_figures(outcome))
    out.print()
    for fault in outcome.faults:
        out.print(Text(fault, "red"))
    out.print(_verdict(outcome))


def _head(out: Console, text: str) -> None:
    out.print()
    out.print(Text(text, "bold underline"))


def _grid() -> Table:
    return Table(box=None, pad_edge=False, show_header=False)


def _native(outcome: Outcome) -> Table:
    device = outcome.device
    table = _grid()
    table.add_row("device", Text.assemble((device.name, "bold"), f" ({device.provider})"), outcome.reason)
    for feature, there in device.native.items():
        table.add_row(FEATURES[feature], Text("yes", "green") if there else Text("no", "yellow"))
    return table


def _print_misuse(out: Console, outcome: Outcome) -> None:
    misuse = outcome.misuse
    if misuse.error is None:
        out.print(Text("a queue pair was called from another thread and loop, and nothing stopped that", "red"))
        return
    out.print("a queue pair of client 1 was called from another thread, with another loop:")
    out.print(Text.assemble(("AffinityError: ", "yellow"), misuse.error))
    untouched = "no byte was written" if misuse.untouched else "and yet something was written"
    works = "its own loop went on to use it" if misuse.works else "it could not be used any more"
    out.print(f"{untouched}, and {works}")


def _figures(outcome: Outcome) -> Table:
    counts, plan = outcome.counts, outcome.plan
    table = _grid()
    table.add_row(
        "processes", f"1 server with {plan.workers} loops ({outcome.loop}), {plan.clients} clients with 1 loop each"
    )
    table.add_row("files", f"{outcome.files:,}, from a few bytes on; {outcome.bytes:,} bytes")
    table.add_row("written", _rate(outcome.written))
    table.add_row("read back", _rate(outcome.read))
    table.add_row("reads of 4 KiB", _latencies(outcome.block_reads))
    table.add_row("flushes", _latencies(outcome.flushes))
    table.add_row(
        "the server counted",
        f"{counts.flushes:,} flushes, {counts.syncs:,} syncs of the disk of {duration(counts.sync_mean_s * 1e9)} each,"
        f" {counts.message_bytes:,} bytes of data by messages: all others one-sidedly",
    )
    return table


def _rate(moved: Transfer) -> str:
    return f"{quantity(moved.bytes_per_s)}B/s, while requests were under way; {moved.seconds:.2f} s with all else"


def _latencies(times: Histogram) -> str:
    if not times.count:
        return "none"
    told = ", ".join(f"{name} {duration(times.percentile(percent))}" for name, percent in _PERCENTILES.items())
    return f"{times.count:,}: {told}, at most {duration(times.maximum)}"


def _verdict(outcome: Outcome) -> Text:
    took = f"{outcome.seconds:.1f} s"
    if outcome.good:
        verified = f"{outcome.verified_bytes:,} bytes in {outcome.verified_files:,} files"
        return Text(f"verified: {verified}, each byte and each SHA-256; {took}", "bold green")
    return Text(f"not as it should be: {'; '.join(_complaints(outcome))}; {took}", "bold red")


def _complaints(outcome: Outcome) -> Iterator[str]:
    if not outcome.everything_read:
        yield (
            f"{outcome.verified_files:,} of {outcome.files:,} files, {outcome.verified_bytes:,} of"
            f" {outcome.bytes:,} bytes, were read back as they were written"
        )
    if not outcome.stopped:
        yield "the call from a wrong loop was not stopped, or did harm"
    if not outcome.block_reads.count:
        yield "no single block was read"


def for_programs(outcome: Outcome) -> dict[str, object]:
    """What JSON has of it. Times are nanoseconds, where nothing else is said."""
    return {
        "verified": outcome.good,
        "device": {
            "name": outcome.device.name,
            "provider": outcome.device.provider,
            "reason": outcome.reason,
            "native": outcome.device.native,
        },
        "plan": outcome.plan,
        "loop": outcome.loop,
        "files": outcome.files,
        "bytes": outcome.bytes,
        "verified_files": outcome.verified_files,
        "verified_bytes": outcome.verified_bytes,
        "faults": outcome.faults,
        "written": outcome.written,
        "read": outcome.read,
        "block_reads": _told(outcome.block_reads),
        "flushes": _told(outcome.flushes),
        "server": outcome.counts,
        "affinity": outcome.misuse,
        "trees": [
            {"name": tree.name, "pid": tree.pid, "rates": tree.report.totals, "devices": tree.report.sample.devices}
            for tree in outcome.trees
        ],
        "seconds": outcome.seconds,
    }


def _told(times: Histogram) -> dict[str, float]:
    told = {name: times.percentile(percent) for name, percent in _PERCENTILES.items()}
    return {"count": times.count, "min": times.minimum, "mean": times.mean, **told, "max": times.maximum}
