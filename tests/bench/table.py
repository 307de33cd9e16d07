"""Table that the benchmarks print."""

from rich.table import Table

from tests.bench.measuring import Result

__all__ = ["add", "empty_table", "missed"]


def empty_table() -> Table:
    """Return a table without results."""
    table = Table("benchmark", "figure", "value", "limit", "met")
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def add(table: Table, result: Result) -> None:
    """Add the rows of a result."""
    name = result.name
    for figure, value in result.figures.items():
        limit = result.limits.get(figure)
        met = {None: "", True: "yes", False: "[bold]no[/bold]"}[result.met(figure)]
        table.add_row(name, figure, _shown(value), "" if limit is None else str(limit), met)
        name = ""
    table.add_section()


def missed(result: Result) -> list[str]:
    """Return a line for each figure that is not within its limit."""
    return [
        f"{result.name}: {figure} is {_shown(result.figures[figure])}, and its limit {limit}"
        for figure, limit in result.limits.items()
        if not result.met(figure)
    ]


def _shown(value: object) -> str:
    shown = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1000 else value
    return f"{shown:.3g}" if isinstance(shown, float) else str(shown)
