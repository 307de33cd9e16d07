"""`aioverbs demo`: two processes on the best device there is, and every byte between them compared."""

from typing import TYPE_CHECKING

import click

from aioverbs.cli.common import Status, UntilStopped, console, device_names, json_option, print_json, run

if TYPE_CHECKING:
    from rich.console import Console

    from aioverbs.cli.demo_run import Outcome

__all__ = ["demo"]


@click.command()
@click.option("--device", shell_complete=device_names, help="Its name; else AIOVERBS_DEVICE's, else the best there is.")
@click.option("--size", type=click.IntRange(1, 4096), default=64, show_default=True, help="MiB of memory to read.")
@click.option(
    "--messages", type=click.IntRange(1, 10**6), default=1000, show_default=True, help="To send and get back."
)
@json_option
def demo(device: str | None, size: int, messages: int, as_json: bool) -> None:
    """Exchange messages with a second process, read its memory one-sidedly, and compare every byte.

    Then call the connection from a thread and an event loop that do not own it, which raises an AffinityError, and show
    what the device does natively. The exit status is 1 if a byte was wrong or that call was not stopped.
    """
    run(_demo(device, size << 20, messages, as_json))


async def _demo(device: str | None, size: int, messages: int, as_json: bool) -> Status:
    from aioverbs.cli.demo_run import demonstrate

    outcome: Outcome | None = None
    with UntilStopped():
        outcome = await demonstrate(device, size, messages)
    if outcome is None:
        return Status.INTERRUPTED
    if as_json:
        print_json({"verified": outcome.good, **vars(outcome)})
    else:
        _print(console(), outcome)
    return Status.OK if outcome.good else Status.NO


def _print(out: "Console", outcome: "Outcome") -> None:
    from rich.table import Table
    from rich.text import Text

    from aioverbs._durations import duration
    from aioverbs.cli.inventory import FEATURES
    from aioverbs.cli.top_view import quantity

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("device", Text.assemble((outcome.device, "bold"), f": {outcome.reason}"))
    for feature, native in outcome.native.items():
        table.add_row(FEATURES[feature], Text("native", "green") if native else Text("emulated or missing", "yellow"))
    this, other = outcome.processes
    latencies = ", ".join(f"{name} {duration(value / 1e9)}" for name, value in outcome.round_trip_ns.items())
    rate = outcome.bytes / outcome.read_seconds
    table.add_row("processes", f"{this}, which asked, and {other}, which answered messages and owned the memory")
    table.add_row("messages", f"{outcome.messages:,} of 64 bytes there and back: {latencies}")
    table.add_row("one-sided reads", f"{outcome.bytes:,} bytes, {quantity(rate)}B/s")
    stopped = f"AffinityError: {outcome.affinity_error}" if outcome.affinity_error else "its call was not stopped"
    table.add_row("a wrong loop", stopped)
    out.print(table)
    if outcome.good:
        out.print(Text("verified: each message and each byte", "bold green"))
    else:
        out.print(Text(f"not as it should be: {'; '.join(outcome.faults)}", "bold red"))
