"""Plots of `aioverbs bench`, made with matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator

from aioverbs.cli.measuring import Figure, Operation, format_size

__all__ = ["draw"]

_WIDTH, _HEIGHT = 5.2, 3.4  # inches of each plot


def draw(figures: Sequence[Figure], contenders: Sequence[str], path: Path) -> None:
    """Plot times and rates against sizes on logarithmic axes and write the plot to a file.

    There is a row of plots for each operation, and in each plot a line for each contender.

    :param figures: the measurements.
    :param contenders: names of the contenders.
    :param path: path of the file, ending in ``.svg`` or ``.png``; an existing file is overwritten.
    :raises OSError: the file cannot be written.
    """
    operations = list(dict.fromkeys(figure.operation for figure in figures))
    drawing = Drawing(figsize=(2 * _WIDTH, max(1, len(operations)) * _HEIGHT), layout="constrained")
    axes_grid = drawing.subplots(max(1, len(operations)), 2, squeeze=False)
    for row, operation in zip(axes_grid, operations, strict=False):
        _times(row[0], operation, figures, contenders)
        _rates(row[1], operation, figures, contenders)
    drawing.savefig(path, metadata={"Title": "aioverbs bench"})


def _times(axes: Axes, operation: Operation, figures: Sequence[Figure], contenders: Sequence[str]) -> None:
    """Draw a line for each contender: the median time of an operation by size, one operation at a time, in
    microseconds.
    """
    for name in contenders:
        own = [each for each in figures if (each.contender, each.operation, each.window) == (name, operation, 1)]
        axes.plot([each.size for each in own], [each.median_ns / 1e3 for each in own], marker="o", label=name)
    _finish(axes, f"{operation}, one at a time", "µs (median)", sorted({each.size for each in figures}))


def _rates(axes: Axes, operation: Operation, figures: Sequence[Figure], contenders: Sequence[str]) -> None:
    """Draw a line for each contender: the rate by size with many operations in flight, in MB/s."""
    for name in contenders:
        own = [each for each in figures if (each.contender, each.operation) == (name, operation) and each.window > 1]
        axes.plot([each.size for each in own], [each.bytes_per_s / 1e6 for each in own], marker="o", label=name)
    _finish(axes, f"{operation}, many at a time", "MB/s (median)", sorted({each.size for each in figures}))


def _finish(axes: Axes, title: str, unit: str, sizes: list[int]) -> None:
    """Set title, labels, scales, ticks, grid and legend of the axes, after the lines have been drawn."""
    axes.set_title(title)
    axes.set_xlabel("size")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(each) for each in sizes], fontsize="small")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
