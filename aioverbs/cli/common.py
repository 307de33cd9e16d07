"""What all commands have in common: options, exit statuses, where they print, and how they run.

It loads neither rich nor the compiled core, nor does the file of any command: the command line is there at once, and
`aioverbs doctor` where the core does not load.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Coroutine
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from aioverbs._monitoring.jsonable import to_jsonable
from aioverbs._providers.sysfs import kernel_devices

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Seconds",
    "Status",
    "UntilStopped",
    "console",
    "device_names",
    "json_option",
    "print_json",
    "report",
    "run",
    "runner",
    "tell",
]

F = TypeVar("F", bound=Callable[..., Any])

_STOPS = (signal.SIGINT, signal.SIGTERM)
_WIDE = 1_000  # columns, where nobody looks: tables are as wide as what they hold


class Status(IntEnum):
    """The exit statuses of all commands."""

    OK = 0
    """It was done; what was asked is so."""

    NO = 1
    """It was done, and what was asked is not so: a device cannot be used, answers were lost."""

    USAGE = 2
    """The command line is wrong. It is click's."""

    NOT_THERE = 3
    """What was named is not there, or cannot be reached: a device, a peer, a process."""

    FAILED = 4
    """It could not be done, or not to its end: the line on standard error says why."""

    INTERRUPTED = 130
    """Ctrl-C, before there was anything to tell."""


# ---- Options and arguments


def json_option(command: F) -> F:
    """The option ``--json``, which a command gets as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


class Seconds(click.FloatRange):
    """A number of seconds, of which there is an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A number of its range."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{seconds} is no number of seconds", param, ctx)
        return seconds


def device_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """What completes a device's name: those that the kernel knows and the software device. None of them is opened."""
    return [name for name in (*kernel_devices(), "soft0") if name.startswith(incomplete)]


# ---- Printing


def console(*, stderr: bool = False) -> "Console":
    """Where to print for people: in colours on terminals only, and not where NO_COLOR is set to anything."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if not made.is_terminal:
        made.width = _WIDE
    return made


def print_json(value: object, *, one_line: bool = False) -> None:
    """Print a value for programs, dataclasses as objects, members of enumerations by their names.

    :param one_line: for commands that print many.
    """
    click.echo(json.dumps(to_jsonable(value), indent=None if one_line else 2))


# ---- Running


def run(main: Coroutine[Any, Any, Status]) -> NoReturn:
    """Run a coroutine on uvloop, or on asyncio where that is not installed, and exit with the status it returns."""
    with runner() as chosen:
        status = chosen.run(main)
    click.get_current_context().exit(status)


def runner() -> asyncio.Runner:
    """One of uvloop, or of asyncio where that is not installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=new_event_loop)


def tell(stdin: asyncio.StreamWriter, line: str) -> None:
    """Tell another process something by its standard input. One that has ended is told nothing."""
    if not stdin.is_closing():  # one that is closed raises RuntimeError on uvloop, and on asyncio it does not
        stdin.write(f"{line}\n".encode())


class UntilStopped:
    """A block that Ctrl-C and SIGTERM end, so that what comes after it can tell what was. The next Ctrl-C ends all."""

    def __enter__(self) -> None:
        import anyio

        self._loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        for number in _STOPS:
            self._loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self._release()
        self._scope.cancel()

    def _release(self) -> None:
        for number in _STOPS:
            self._loop.remove_signal_handler(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._release()
        return bool(self._scope.__exit__(kind, error, traceback))


def report(error: BaseException) -> Status:
    """Say in one line on standard error what went wrong, and tell the status to exit with."""
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
        return Status.INTERRUPTED
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, _expected()):
        text = f"{type(error).__name__}: {text} (aioverbs --traceback … shows where)"
    click.echo(f"aioverbs: {text}", err=True)
    return Status.NOT_THERE if isinstance(error, _absences()) else Status.FAILED


def _expected() -> tuple[type[BaseException], ...]:
    """What is raised by what is there and what was asked for, not by a mistake of the program's."""
    import anyio

    from aioverbs import errors

    completion = (errors.WorkCompletionError, errors.QueuePairStateError)
    return (OSError, ValueError, errors.DeviceNotFoundError, anyio.BrokenResourceError, *completion)


def _absences() -> tuple[type[BaseException], ...]:
    from aioverbs import errors

    return (ConnectionError, errors.DeviceNotFoundError, errors.LibraryNotFoundError, errors.UnreachableError)
