"""`aioverbs top`: watch the resources and rates of a running process."""

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from aioverbs.cli.common import Seconds, Status, UntilStopped, console, json_option, print_json, run

if TYPE_CHECKING:
    from aioverbs.cli.rates import Report, ResourceRates, Sample
    from aioverbs.cli.watching import Watch

__all__ = ["top"]

_GRACE_S = 5.0  # time beyond the interval after which a process counts as stopped


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the IDs of processes with a monitor socket that begin with the text typed so far, for shell completion.

    No process is contacted. The list is empty if the socket directory does not exist or cannot be used.
    """
    from aioverbs._monitoring.directory import MonitorDirectory

    try:
        with MonitorDirectory() as directory:
            found = [str(pid) for pid, _ in directory.names()]
    except (OSError, ValueError):  # no completions; the command itself reports the error
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
    help="Seconds between samples.",
)
@click.option("--once", is_flag=True, help="Show the rates of one interval, and exit.")
@json_option
def top(pid: int | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch a process: its devices, the resources created from them, and their rates.

    Without PID, list the processes of this user that can be watched: those started with AIOVERBS_MONITOR=1, and those
    that call aioverbs.monitor(). With --json, each sample is printed as one line.

    The command ends at Ctrl-C or when the process ends. The exit status is 1 if there is no process to list, and 3 if
    the process does not exist or cannot be watched.
    """
    run(_list(as_json) if pid is None else _watch(pid, interval, once, as_json))


# ---- List


async def _list(as_json: bool) -> Status:
    """Print the processes of this user that can be watched.

    :returns: the exit status: OK if there is such a process, NO if not.
    :raises PermissionError: the socket directory is accessible to other users.
    :raises OSError: the socket directory cannot be opened or listed.
    :raises ValueError: AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an absolute path.
    """
    from rich.table import Table
    from rich.text import Text

    from aioverbs.cli.watching import processes

    found = await processes()
    if as_json:
        print_json({"processes": found})
    elif not found:
        click.echo("no process can be watched: start one with AIOVERBS_MONITOR=1, or call aioverbs.monitor() in it")
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


# ---- Watch


async def _watch(pid: int, interval_s: float, once: bool, as_json: bool) -> Status:
    """Watch a process and print its samples until it ends, or until SIGINT or SIGTERM arrives.

    :param interval_s: seconds between samples.
    :param once: True to end after one interval.
    :param as_json: True to print JSON, False to print tables.
    :returns: the exit status: NOT_FOUND if the process ended before a sample could be shown, otherwise OK.
    :raises NotWatchableError: the process does not exist, or cannot be watched.
    :raises PermissionError: the socket directory or the process belongs to another user.
    :raises TimeoutError: the process does not answer.
    :raises OSError: the socket directory cannot be opened or listed, or the connection failed.
    :raises ValueError: the process sent an invalid sample, or AIOVERBS_MONITOR_DIRECTORY or XDG_RUNTIME_DIR is not an
        absolute path.
    """
    from aioverbs.cli.watching import open_watch

    output: _JsonOutput | _TerminalOutput
    shown_any = False
    with UntilStopped():
        async with await open_watch(pid) as watch:
            watch.begin(interval_s)
            output = _JsonOutput(watch, once) if as_json else _TerminalOutput(watch, once)
            with output:
                shown_any = await _follow(watch, interval_s, once, output)
            if not shown_any:
                click.echo(f"aioverbs: process {pid} ended before its first sample", err=True)
                return Status.NOT_FOUND
    return Status.OK


async def _follow(watch: "Watch", interval_s: float, once: bool, output: "_JsonOutput | _TerminalOutput") -> bool:
    """Show samples until the process ends; if ``once`` is set, only until the rates of one interval have been shown.

    With ``once``, the first sample is not shown.

    :param interval_s: seconds between samples; the process counts as stopped if a sample is 5 s late.
    :returns: whether any sample was shown.
    :raises TimeoutError: the process does not answer, and the output cannot show that as a note.
    :raises ValueError: the process sent an invalid sample.
    """
    before: Sample | None = None
    shown_any = False
    while True:
        try:
            sample = await watch.sample(interval_s + _GRACE_S)
        except TimeoutError as error:
            if not output.show_note(str(error)):
                raise
            continue
        if sample is None:
            return shown_any
        if before is not None or not once:
            output.show_sample(sample, before)
            shown_any = True
            if once:
                return True
        before = sample


class _JsonOutput:
    """Prints each sample as a line of JSON."""

    def __init__(self, watch: "Watch", once: bool) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def show_note(self, text: str) -> bool:
        """Return False, because JSON output cannot contain notes; print nothing."""
        return False

    def show_sample(self, sample: "Sample", before: "Sample | None") -> None:
        """Print a sample and its rates as one line.

        :param before: the previous sample; None if there is none.
        """
        from aioverbs.cli.rates import report

        now = report(sample, before)
        fields = {
            "pid": self._watch.pid,
            "time_ns": sample.time_ns,
            "seconds": now.seconds,
            "truncated": sample.truncated,
            "rates": now.totals,
            "devices": [_to_json(each) for each in now.devices],
        }
        print_json(fields, one_line=True)


def _to_json(node: "ResourceRates") -> dict[str, object]:
    """Return a resource with its rates and descendants as a dict for `print_json`."""
    resource = node.resource
    return {
        "id": resource.id,
        "kind": resource.kind,
        "label": resource.label,
        "state": resource.state,
        "owner": resource.owner,
        "created": resource.created,
        "native": resource.native,
        "statistics": resource.statistics,
        "rates": node.rates,
        "children": [_to_json(child) for child in node.children],
    }


class _TerminalOutput:
    """Prints tables: on a terminal, a table that is updated in place; elsewhere, one table below the other."""

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

    def show_note(self, text: str) -> bool:
        """Show the last sample again with a note above it.

        :returns: True if the note was shown; False if no sample has been shown yet, or the output is not a table that
            is updated in place.
        """
        if self._live is None or self._last is None:
            return False
        self._draw(self._last, text)
        return True

    def show_sample(self, sample: "Sample", before: "Sample | None") -> None:
        """Print a sample and its rates as a table; a table that is updated in place is replaced.

        :param before: the previous sample; None if there is none.
        """
        from aioverbs.cli.rates import report

        self._last = report(sample, before)
        self._draw(self._last, None)

    def _draw(self, now: "Report", note: str | None) -> None:
        """Print a report as a table, with a note above it unless ``note`` is None."""
        from aioverbs.cli.top_view import view

        shown = view(self._watch.pid, self._watch.program, now, note=note)
        if self._live is None:
            self._console.print(shown)
        else:
            self._live.update(shown, refresh=True)
