"""`aioverbs bench`: devices, TCP and Unix streams side by side, between two processes on this host."""

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioverbs._durations import duration
from aioverbs.cli.common import Status, console, device_names, json_option, print_json, runner
from aioverbs.cli.measuring import OPERATIONS, Figure, Operation, cells, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table
    from rich.text import Text

    from aioverbs.cli.bench_run import Report

__all__ = ["bench", "format_rate"]

MODELS = ("default", "low-latency", "force-low-latency", "high-bandwidth")


@click.command()
@click.argument("names", metavar="[write|read|send]...", nargs=-1, type=click.Choice(OPERATIONS))
@click.option(
    "--device",
    "device",
    metavar="NAME",
    multiple=True,
    shell_complete=device_names,
    help="Device to measure, repeatable. Default: all devices that have an active port.",
)
@click.option(
    "--message-model",
    type=click.Choice(MODELS),
    default="default",
    show_default=True,
    help="How both processes wait for completions of devices.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="Approximate duration of the benchmark.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Plot the results to FILE, as SVG or PNG by its extension. Needs the extra `bench`.",
)
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    names: tuple[Operation, ...],
    device: tuple[str, ...],
    message_model: str,
    seconds: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure writes, reads and messages of 8 bytes to 1 MiB between two processes on this host.

    Devices, a TCP stream on the loopback interface and a Unix stream take turns, so that a disturbance of the machine
    affects all of them alike. The tables show medians and the speed relative to TCP. A write completes when its bytes
    are in the peer's memory, and a read when the bytes have arrived; the peer's program answers a message with eight
    bytes. Over a stream, the peer's program also serves writes and reads. The bytes of each turn are verified.

    Message models that poll need one processor for each process, or two with the software device. With fewer
    processors, the processes wait for each other.

    The exit status is 0 if all devices and streams were measured, 1 if some of them failed, 3 if the second process
    ended or a device named by --device does not exist, and 4 if all devices and streams failed.
    """
    if plot is not None:
        _check_plot(plot)
    operations = tuple(dict.fromkeys(names)) or OPERATIONS
    report = _measure(operations, device, message_model.upper().replace("-", "_"), seconds)
    if plot is not None:
        from aioverbs.cli.plot import draw

        draw(report.figures, report.contenders, plot)
    if as_json:
        print_json(_to_json(report, message_model))
    else:
        out = console()
        for table in tables(report):
            out.print(table)
            out.print()
        for name, problem in report.problems.items():
            out.print(f"[red]{name}[/red]: ", problem, sep="", markup=True)
        if plot is not None:
            out.print(f"plot written to {plot}", markup=False)
    ctx.exit(Status.NO if report.problems else Status.OK)


class _NotInstalledError(click.ClickException):
    """Error for missing matplotlib; click prints the message and exits with status 4."""

    exit_code = Status.FAILED


def _check_plot(path: Path) -> None:
    """Check that the plot can be drawn to ``path``, before the measurement starts.

    :raises click.BadParameter: the file's extension is unsupported, or its directory does not exist.
    :raises click.ClickException: matplotlib is not installed.
    """
    from importlib.util import find_spec

    if path.suffix not in (".svg", ".png"):
        raise click.BadParameter(
            f"the name of the file must end in .svg or .png, got {path.name!r}", param_hint="--plot"
        )
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the directory {path.absolute().parent} does not exist", param_hint="--plot")
    if find_spec("matplotlib") is None:
        raise _NotInstalledError("--plot needs matplotlib, which is not installed: pip install 'aioverbs[bench]'")


def _measure(operations: "Sequence[Operation]", named: "Sequence[str]", model: str, seconds: float) -> "Report":
    """Select the devices and run the benchmark, showing a progress bar.

    :param named: devices given with ``--device``; if empty, all usable devices with an active port are measured.
    :param model: name of the `MessageModel`.
    :param seconds: target duration of the whole benchmark.
    :returns: the report; its problems include the devices in ``named`` that cannot be used.
    :raises DeviceNotFoundError: a device in ``named`` does not exist.
    :raises ConnectionError: the peer process ended.
    :raises OSError: all devices and streams failed, the peer process cannot be started, or a device can be opened but
        not queried.
    :raises TimeoutError: the benchmark took too long, or the peer process did not answer.
    """
    from aioverbs._verbs.completion_queue import MessageModel
    from aioverbs.cli.bench_run import measure, select_devices

    devices, problems = select_devices(named)
    planned = cells(operations)
    with _Progress(len(planned)) as advance, runner() as loop:
        report = loop.run(measure(planned, devices, MessageModel[model], seconds, advance))
    report.problems = problems | report.problems
    return report


class _Progress:
    """Progress bar on standard error, if that is a terminal.

    The ``with`` statement shows the bar and yields a function that advances it by one cell.

    :param total: number of cells.
    """

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        err = console(stderr=True)
        columns = (TextColumn("measuring"), BarColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._task = self._shown.add_task("measuring", total=total)

    def __enter__(self) -> "Callable[[], None]":
        self._shown.start()
        return lambda: self._shown.advance(self._task)

    def __exit__(self, *exc: object) -> None:
        self._shown.stop()


def _to_json(report: "Report", message_model: str) -> dict[str, Any]:
    """Return the report with the versions and settings of this run, as a dict for `print_json`."""
    from aioverbs.cli.bench_run import BASE, loop_name

    return {
        "aioverbs": metadata.version("aioverbs"),
        "python": platform.python_version(),
        "loop": loop_name(),
        "message_model": message_model,
        "seconds": report.seconds,
        "compared_with": BASE,
        "contenders": report.contenders,
        "problems": report.problems,
        "figures": report.figures,
    }


# ---- For people


def tables(report: "Report") -> "Iterator[Table]":
    """Yield two rich tables for each kind of operation in the report: one for the measurements with one operation in
    flight, and one for those with several. A table is empty if there are no such measurements.
    """
    for operation in dict.fromkeys(figure.operation for figure in report.figures):
        own = [figure for figure in report.figures if figure.operation == operation]
        single = [figure for figure in own if figure.window == 1]
        many = [figure for figure in own if figure.window > 1]
        yield _table(f"{operation}, one at a time", single, report.contenders)
        yield _table(f"{operation}, many at a time", many, report.contenders)


def _table(title: str, figures: "Sequence[Figure]", contenders: "Sequence[str]") -> "Table":
    """Return a table with a row for each size and a column for each contender (a device or a stream).

    :param title: heading of the table.
    :param figures: measurements to show, all of the same operation.
    :param contenders: names of the columns.
    """
    from rich.table import Table

    windows = any(figure.window > 1 for figure in figures)
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="bold")
    for column in ("size", *(["window"] if windows else []), *contenders):
        table.add_column(column, justify="right")
    for size in dict.fromkeys(figure.size for figure in figures):
        row = {figure.contender: figure for figure in figures if figure.size == size}
        fastest = min(row.values(), key=lambda figure: figure.median_ns)
        texts = (_text(row.get(name), fastest) for name in contenders)
        window = [str(fastest.window)] if windows else []
        table.add_row(format_size(size), *window, *texts)
    return table


def _text(figure: Figure | None, fastest: Figure) -> "Text":
    """Return the content of a table cell as a rich `Text`: the duration of an operation if operations were run one at a
    time, otherwise the rate; then the speed relative to TCP, if TCP was measured.

    :param figure: measurement to show; None if there is none, which gives ``"-"``.
    :param fastest: measurement that is shown in green.
    """
    from rich.text import Text

    if figure is None:
        return Text("-")
    value = duration(figure.median_ns / 1e9) if figure.window == 1 else format_rate(figure.bytes_per_s)
    ratio = f" {_three_digits(figure.ratio):>4}x" if figure.ratio is not None else ""
    return Text.assemble((value, "green" if figure is fastest else ""), (ratio, "dim"))


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in bytes per second as text with a decimal unit, such as ``"12.3 kB/s"``."""
    for unit, letters in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit:
            return f"{_three_digits(bytes_per_s / unit)} {letters}"
    return f"{_three_digits(bytes_per_s)} B/s"


def _three_digits(value: float) -> str:
    """Return a number as text: with no decimals from 100 upwards, one from 10 and two from 0.1; smaller numbers have
    one significant digit.
    """
    if value < 0.1:
        return f"{value:.1g}"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
