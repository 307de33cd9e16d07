"""Draws the figures of `aioverbs bench`, by matplotlib: the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator

from aioverbs.cli.measuring import Figure, Operation, size_of

__all__ = ["draw"]

_WIDTH, _HEIGHT = 5.2, 3.4  # inches of each part


def draw(figures: Sequence[Figure], contenders: Sequence[str], path: Path) -> None:
    """Draw times and rates over sizes, with logarithmic axes: a row for each operation, a line for each contender.

    :param path: of the file, which ends in ``.svg`` or ``.png``; another one there is overwritten.
    :raises OSError: it cannot be written.
    """
    operations = list(dict.fromkeys(figure.operation for figure in figures))
    drawing = Drawing(figsize=(2 * _WIDTH, max(1, len(operations)) * _HEIGHT), layout="constrained")
    parts = drawing.subplots(max(1, len(operations)), 2, squeeze=False)
    for row, operation in zip(parts, operations, strict=False):
        _times(row[0], operation, figures, contenders)
        _rates(row[1], operation, figures, contenders)
    drawing.savefig(path, metadata={"Title": "aioverbs bench"})


def _times(axes: Axes, operation: Operation, figures: Sequence[Figure], contenders: Sequence[str]) -> None:
    for name in contenders:
        its = [each for each in figures if (each.contender, each.operation, each.window) == (name, operation, 1)]
        axes.plot([each.size for each in its], [each.median_ns / 1e3 for each in its], marker="o", label=name)
    _finish(axes, f"{operation}, one at a time", "µs (median)", sorted({each.size for each in figures}))


def _rates(axes: Axes, operation: Operation, figures: Sequence[Figure], contenders: Sequence[str]) -> None:
    for name in contenders:
        its = [each for each in figures if (each.contender, each.operation) == (name, operation) and each.window > 1]
        axes.plot([each.size for each in its], [each.bytes_per_s / 1e6 for each in its], marker="o", label=name)
    _finish(axes, f"{operation}, many at a time", "MB/s (median)", sorted({each.size for each in figures}))


def _finish(axes: Axes, title: str, unit: str, sizes: list[int]) -> None:
    axes.set_title(title)
    axes.set_xlabel("size")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_of(each) for each in sizes], fontsize="small")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
