"""How a demonstration goes, shown: bars on terminals, a line for each thing that is done elsewhere, or nothing."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from aioverbs.cli.inventory import DeviceReport
from aioverbs.cli.top_view import quantity

__all__ = ["Bars", "Lines", "Silence"]


class Silence:
    """Nothing."""

    def device(self, device: DeviceReport, reason: str) -> None:
        """What it is on."""

    def phase(self, name: str, totals: list[int], unit: str) -> None:
        """Something begins."""

    def progress(self, client: int, done: int) -> None:
        """Somebody is on the way."""

    def ended(self) -> None:
        """It is done."""

    def stop(self) -> None:
        """There is nothing more to show."""


class Lines(Silence):
    """A line for each thing that is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._unit, self._began = "", "", 0.0
        self._done: list[int] = []

    def device(self, device: DeviceReport, reason: str) -> None:
        """What it is on."""
        self._console.print(Text.assemble("on ", (device.name, "bold"), f": {reason}"))

    def phase(self, name: str, totals: list[int], unit: str) -> None:
        """Something begins."""
        self._name, self._unit, self._began = name, unit, time.monotonic()
        self._done = [0] * len(totals)

    def progress(self, client: int, done: int) -> None:
        """Somebody is on the way."""
        self._done[client] = done

    def ended(self) -> None:
        """It is done."""
        seconds = time.monotonic() - self._began
        done = f"{quantity(sum(self._done))} {self._unit} in {seconds:.1f} s"
        self._console.print(Text.assemble(f"{self._name}: ", (done, "cyan")))


class Bars(Lines):
    """A bar for all and one for each client, while something is under way; then the line."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress: Progress | None = None
        self._tasks: list[TaskID] = []
        self._all = TaskID(0)

    def phase(self, name: str, totals: list[int], unit: str) -> None:
        """Something begins."""
        super().phase(name, totals, unit)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}", justify="right"))
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._all = self._progress.add_task(name, total=sum(totals) or None, rate="")
        numbers = range(1, len(totals) + 1)
        self._tasks = [
            self._progress.add_task(f"  client {number}", total=total or None, rate="")
            for number, total in zip(numbers, totals, strict=True)
        ]
        self._progress.start()

    def progress(self, client: int, done: int) -> None:
        """Somebody is on the way."""
        super().progress(client, done)
        if self._progress is not None:
            self._update(self._progress, self._tasks[client], done)
            self._update(self._progress, self._all, sum(self._done))

    def _update(self, progress: Progress, task: TaskID, done: int) -> None:
        seconds = max(time.monotonic() - self._began, 0.001)
        rate = f"{quantity(done)} {self._unit}, {quantity(done / seconds)}/s"
        progress.update(task, completed=done, rate=rate)

    def ended(self) -> None:
        """It is done."""
        self.stop()
        super().ended()

    def stop(self) -> None:
        """Take bars away."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
