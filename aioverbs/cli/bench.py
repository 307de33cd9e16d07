"""`aioverbs bench`: devices, TCP and Unix streams side by side, between two processes of this host."""

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioverbs._durations import duration
from aioverbs.cli.common import Status, console, device_names, json_option, print_json, runner
from aioverbs.cli.measuring import OPERATIONS, Figure, Operation, cells, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table
    from rich.text import Text

    from aioverbs.cli.bench_run import Report

__all__ = ["bench", "rate"]

MODELS = ("default", "low-latency", "force-low-latency", "high-bandwidth")


@click.command()
@click.argument("names", metavar="[write|read|send]...", nargs=-1, type=click.Choice(OPERATIONS))
@click.option(
    "--device",
    "device",
    metavar="NAME",
    multiple=True,
    shell_complete=device_names,
    help="Measure this device beside the streams; may be given again. Without it all that have an active port.",
)
@click.option(
    "--message-model",
    type=click.Choice(MODELS),
    default="default",
    show_default=True,
    help="How awaits of devices wait, in both processes.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="About how long all of it takes.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Draw it, too: as SVG or PNG, by the file's name. Needs the extra `bench`.",
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
    """Measure writes, reads and messages of 8 bytes to 1 MiB, between two processes of this host.

    Devices, a TCP stream on the loopback interface and a Unix stream take turns, so that what disturbs the machine
    disturbs all of them. What is shown are medians, and how many times as fast as TCP that is. A write is over when
    its bytes are in the peer's memory, a read when they are here; a message is answered by eight bytes by the peer's
    program. Over a stream the peer's program does all of that. The bytes of each turn are compared.

    Message models that poll want a processor for each process, and with the software device two: where there are fewer,
    they wait for each other.

    The exit status is 0 where all were measured to the end, 1 where one of them could not be, 3 where there is no
    such device.
    """
    if plot is not None:
        _check_plot(plot)
    operations = tuple(dict.fromkeys(names)) or OPERATIONS
    report = _measured(operations, device, message_model.upper().replace("-", "_"), seconds)
    if plot is not None:
        from aioverbs.cli.plot import draw

        draw(report.figures, report.contenders, plot)
    if as_json:
        print_json(_for_programs(report, message_model))
    else:
        out = console()
        for table in tables(report):
            out.print(table)
            out.print()
        for name, problem in report.problems.items():
            out.print(f"[red]{name}[/red]: ", problem, sep="", markup=True)
        if plot is not None:
            out.print(f"drawn: {plot}", markup=False)
    ctx.exit(Status.NO if report.problems else Status.OK)


class _NotInstalledError(click.ClickException):
    exit_code = Status.FAILED


def _check_plot(path: Path) -> None:
    """See that it can be drawn, before anything is measured.

    :raises click.ClickException: it cannot.
    """
    from importlib.util import find_spec

    if path.suffix not in (".svg", ".png"):
        raise click.BadParameter(
            f"the file is drawn by its name, as .svg or .png, not {path.name!r}", param_hint="--plot"
        )
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.absolute().parent}", param_hint="--plot")
    if find_spec("matplotlib") is None:
        raise _NotInstalledError("--plot draws with matplotlib, which is not here: pip install 'aioverbs[bench]'")


def _measured(operations: "Sequence[Operation]", named: "Sequence[str]", model: str, seconds: float) -> "Report":
    from aioverbs._verbs.completion_queue import MessageModel
    from aioverbs.cli.bench_run import chosen_devices, measure

    devices, problems = chosen_devices(named)
    wanted = cells(operations)
    with _Progress(len(wanted)) as advance, runner() as loop:
        report = loop.run(measure(wanted, devices, MessageModel[model], seconds, advance))
    report.problems = problems | report.problems
    return report


class _Progress:
    """How far it is, on a terminal."""

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


def _for_programs(report: "Report", message_model: str) -> dict[str, Any]:
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
    """A table for each operation, one by one, and one with a window."""
    for operation in dict.fromkeys(figure.operation for figure in report.figures):
        its = [figure for figure in report.figures if figure.operation == operation]
        single = [figure for figure in its if figure.window == 1]
        many = [figure for figure in its if figure.window > 1]
        yield _table(f"{operation}, one at a time", single, report.contenders)
        yield _table(f"{operation}, many at a time", many, report.contenders)


def _table(title: str, figures: "Sequence[Figure]", contenders: "Sequence[str]") -> "Table":
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
        table.add_row(size_of(size), *window, *texts)
    return table


def _text(figure: Figure | None, fastest: Figure) -> "Text":
    from rich.text import Text

    if figure is None:
        return Text("-")
    value = duration(figure.median_ns / 1e9) if figure.window == 1 else rate(figure.bytes_per_s)
    ratio = f" {_three(figure.ratio):>4}x" if figure.ratio is not None else ""
    return Text.assemble((value, "green" if figure is fastest else ""), (ratio, "dim"))


def rate(bytes_per_s: float) -> str:
    """Bytes in a second, in a unit that fits them."""
    for unit, letters in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit:
            return f"{_three(bytes_per_s / unit)} {letters}"
    return f"{_three(bytes_per_s)} B/s"


def _three(value: float) -> str:
    """Three digits, or as many as stand before the point; of what is small, one."""
    if value < 0.1:
        return f"{value:.1g}"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
