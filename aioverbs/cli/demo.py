"""`aioverbs demo`: a storage server and its clients, in a process each, from the first byte to the last."""

from typing import TYPE_CHECKING

import click

from aioverbs.cli.common import (
    Seconds,
    Status,
    UntilStopped,
    console,
    device_names,
    json_option,
    print_json,
    run,
)

if TYPE_CHECKING:
    from aioverbs.cli.demonstration.outcome import Outcome, Plan

__all__ = ["demo"]


@click.command()
@click.option("--device", shell_complete=device_names, help="Its name; else AIOVERBS_DEVICE's, else the best there is.")
@click.option(
    "--size", type=click.IntRange(1, 65536), default=200, show_default=True, help="MiB of files, all together."
)
@click.option("--clients", type=click.IntRange(1, 16), default=2, show_default=True, help="Processes.")
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Loops of the server.")
@click.option(
    "--seconds", type=Seconds(0.2, 3600), default=3.0, show_default=True, help="How long single blocks are read."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Files are made from it.")
@json_option
def demo(device: str | None, size: int, clients: int, workers: int, seconds: float, seed: int, as_json: bool) -> None:
    """Start a storage server and clients of it, have them write and read files, and compare every byte.

    The server has a loop for each of its workers and the clients are processes of their own. They make files of mixed
    sizes, write them to volumes, flush, read them back one-sidedly, and then read single blocks for a while. In the end
    there is what was open, what was measured, and what came of a call from a loop that had no right to it.

    All of it is in a folder below TMPDIR, which is gone afterwards. The exit status is 1 where something was not as it
    was written.
    """
    from aioverbs.cli.demonstration.outcome import Plan

    plan = Plan(device, size << 20, clients, workers, seconds, seed)
    run(_demo(plan, as_json))


async def _demo(plan: "Plan", as_json: bool) -> Status:
    from aioverbs.cli.demonstration.course import demonstrate
    from aioverbs.cli.demonstration.progress import Bars, Lines, Silence
    from aioverbs.cli.demonstration.storage import check_installed
    from aioverbs.cli.demonstration.summary import for_programs, print_summary

    check_installed()
    out = console()
    show: Silence = Silence() if as_json else Bars(out) if out.is_terminal else Lines(out)
    outcome: Outcome | None = None
    with UntilStopped():
        try:
            outcome = await demonstrate(plan, show)
        finally:
            show.stop()
    if outcome is None:
        return Status.INTERRUPTED
    if as_json:
        print_json(for_programs(outcome))
    else:
        print_summary(out, outcome)
    return Status.OK if outcome.good else Status.NO
