"""`aioverbs top`: what a running process is at, as it is now."""

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from aioverbs.cli.common import Seconds, Status, UntilStopped, console, json_option, print_json, run

if TYPE_CHECKING:
    from aioverbs.cli.rates import Branch, Report, Sample
    from aioverbs.cli.watching import Watch

__all__ = ["top"]

_PATIENCE_S = 5.0  # beyond the interval, before a process is taken for one that stands still


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The processes whose sockets are there; nobody is asked."""
    from aioverbs._monitoring.directory import MonitorDirectory

    try:
        with MonitorDirectory() as directory:
            found = [str(pid) for pid, _ in directory.names()]
    except (OSError, ValueError):  # there is nothing to complete; the command itself says why
        return []
    return [CompletionItem(pid) for pid in found if pid.startswith(incomplete)]


@click.command(short_help="Watch a running process.")
@click.argument("pid", required=False, type=click.IntRange(1), shell_complete=_complete)
@click.option(
    "-i",
    "--interval",
    type=Seconds(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Seconds from one sample to the next.",
)
@click.option("--once", is_flag=True, help="Show what happens within one interval, and end.")
@json_option
def top(pid: int | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch a process: its devices, what was made from them, and how much each of them does per second.

    Without PID, list the processes of this user that can be watched: those that were started with AIOVERBS_MONITOR=1,
    or that call aioverbs.monitor(). With --json each sample is a line.

    Ctrl-C ends it, and so does the end of the process. The exit status is 1 where there is nobody to list, 3 where
    there is no such process.
    """
    run(_list(as_json) if pid is None else _watch(pid, interval, once, as_json))


# ---- Who can be watched


async def _list(as_json: bool) -> Status:
    from rich.table import Table
    from rich.text import Text

    from aioverbs.cli.watching import processes

    found = await processes()
    if as_json:
        print_json({"processes": found})
    elif not found:
        click.echo("no process can be watched: start one with AIOVERBS_MONITOR=1, or have it call aioverbs.monitor()")
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("PID", justify="right")
        table.add_column("PROGRAM", overflow="ellipsis", no_wrap=True)
        for process in found:
            table.add_row(
                str(process.pid), Text(process.program) if process.problem is None else Text(process.problem, "red")
            )
        console().print(table)
    return Status.OK if found else Status.NO


# ---- One of them


async def _watch(pid: int, interval_s: float, once: bool, as_json: bool) -> Status:
    from aioverbs.cli.watching import open_watch

    show: _Lines | _Screen
    seen = False
    with UntilStopped():
        async with await open_watch(pid) as watch:
            watch.begin(interval_s)
            show = _Lines(watch, once) if as_json else _Screen(watch, once)
            with show:
                seen = await _follow(watch, interval_s, once, show)
            if not seen:
                click.echo(f"aioverbs: process {pid} ended before there was anything to show", err=True)
                return Status.NOT_THERE
    return Status.OK


async def _follow(watch: "Watch", interval_s: float, once: bool, show: "_Lines | _Screen") -> bool:
    """Until it ends; whether there was anything."""
    before: Sample | None = None
    seen = False
    while True:
        try:
            sample = await watch.sample(interval_s + _PATIENCE_S)
        except TimeoutError as error:
            if not show.note(str(error)):
                raise
            continue
        if sample is None:
            return seen
        if before is not None or not once:
            show.show(sample, before)
            seen = True
            if once:
                return True
        before = sample


class _Lines:
    """A line of JSON for each sample."""

    def __init__(self, watch: "Watch", once: bool) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, text: str) -> bool:
        """Whether that can be shown."""
        return False

    def show(self, sample: "Sample", before: "Sample | None") -> None:
        """Print it."""
        from aioverbs.cli.rates import report

        now = report(sample, before)
        told = {
            "pid": self._watch.pid,
            "time_ns": sample.time_ns,
            "seconds": now.seconds,
            "truncated": sample.truncated,
            "rates": now.totals,
            "devices": [_told(each) for each in now.devices],
        }
        print_json(told, one_line=True)


def _told(branch: "Branch") -> dict[str, object]:
    thing = branch.thing
    return {
        "id": thing.id,
        "kind": thing.kind,
        "label": thing.label,
        "state": thing.state,
        "owner": thing.owner,
        "created": thing.created,
        "native": thing.native,
        "statistics": thing.statistics,
        "rates": branch.rates,
        "children": [_told(child) for child in branch.children],
    }


class _Screen:
    """For people: on a terminal in its place, elsewhere one below the other."""

    def __init__(self, watch: "Watch", once: bool) -> None:
        from rich.live import Live

        self._watch = watch
        self._console = console()
        self._last: Report | None = None
        live = self._console.is_terminal and not once
        self._live = Live(console=self._console, auto_refresh=False) if live else None

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> bool:
        """Whether that can be shown; it is, with what was last."""
        if self._live is None or self._last is None:
            return False
        self._draw(self._last, text)
        return True

    def show(self, sample: "Sample", before: "Sample | None") -> None:
        """Draw it."""
        from aioverbs.cli.rates import report

        self._last = report(sample, before)
        self._draw(self._last, None)

    def _draw(self, now: "Report", note: str | None) -> None:
        from aioverbs.cli.top_view import view

        shown = view(self._watch.pid, self._watch.program, now, note=note)
        if self._live is None:
            self._console.print(shown)
        else:
            self._live.update(shown, refresh=True)
