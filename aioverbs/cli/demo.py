"""`aioverbs demo`: exchange data between two processes on the best available device, and verify every byte."""

from typing import TYPE_CHECKING

import click

from aioverbs.cli.common import Status, UntilStopped, console, device_names, json_option, print_json, run

if TYPE_CHECKING:
    from rich.console import Console

    from aioverbs.cli.demo_run import Outcome

__all__ = ["demo"]


@click.command()
@click.option(
    "--device", shell_complete=device_names, help="Device name. Default: AIOVERBS_DEVICE, else the best device."
)
@click.option("--size", type=click.IntRange(1, 4096), default=64, show_default=True, help="Memory to read, in MiB.")
@click.option(
    "--messages", type=click.IntRange(1, 10**6), default=1000, show_default=True, help="Number of round trips."
)
@json_option
def demo(device: str | None, size: int, messages: int, as_json: bool) -> None:
    """Exchange messages with a second process, read its memory one-sidedly and verify every byte.

    Then use the connection from a thread and an event loop that do not own it, which must raise an AffinityError, and
    show the device's native features. The exit status is 1 if a message or a byte was wrong, or if the use by another
    thread raised no AffinityError or changed memory.
    """
    run(_demo(device, size << 20, messages, as_json))


async def _demo(device: str | None, size: int, messages: int, as_json: bool) -> Status:
    """Run the demonstration and print its outcome.

    :param size: number of bytes of memory to read.
    :param messages: number of round trips.
    :param device: name of the device; None for the default device.
    :returns: the exit status: OK if everything was verified, NO if not, INTERRUPTED if SIGINT or SIGTERM ended the
        demonstration early.
    :raises Exception: the exceptions that `demonstrate` raises.
    """
    from aioverbs.cli.demo_run import demonstrate

    outcome: Outcome | None = None
    with UntilStopped():
        outcome = await demonstrate(device, size, messages)
    if outcome is None:
        return Status.INTERRUPTED
    if as_json:
        print_json({"verified": outcome.verified, **vars(outcome)})
    else:
        _print(console(), outcome)
    return Status.OK if outcome.verified else Status.NO


def _print(out: "Console", outcome: "Outcome") -> None:
    """Print the outcome as a table, and whether everything was verified."""
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
    table.add_row("processes", f"{this} (client) and {other} (server, owner of the memory)")
    table.add_row("messages", f"{outcome.messages:,} round trips of 64 bytes: {latencies}")
    table.add_row("one-sided reads", f"{outcome.bytes:,} bytes, {quantity(rate)}B/s")
    foreign_call = f"AffinityError: {outcome.affinity_error}" if outcome.affinity_error else "did not fail"
    table.add_row("foreign loop", foreign_call)
    out.print(table)
    if outcome.verified:
        out.print(Text("verified: every message and every byte", "bold green"))
    else:
        out.print(Text(f"failed: {'; '.join(outcome.faults)}", "bold red"))
